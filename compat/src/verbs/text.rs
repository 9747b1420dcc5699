//! Names of numbers.

use std::ffi::{CStr, c_char, c_int};

/// The name at `index` of a list.
pub fn name(names: &[&'static CStr], index: c_int, unknown: &'static CStr) -> *const c_char {
    let name = usize::try_from(index).ok().and_then(|index| names.get(index));
    name.copied().unwrap_or(unknown).as_ptr()
}

pub extern "C" fn ibv_node_type_str(kind: c_int) -> *const c_char {
    let names =
        [c"unknown", c"InfiniBand channel adapter", c"InfiniBand switch", c"InfiniBand router", c"iWARP NIC"];
    name(&names, kind, c"unknown")
}

pub extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    let names = [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];
    name(&names, state, c"unknown")
}

pub extern "C" fn ibv_event_type_str(event: c_int) -> *const c_char {
    let names = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    name(&names, event, c"unknown")
}

pub extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    let names = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
    ];
    name(&names, status, c"unknown")
}

pub extern "C" fn ibv_wr_opcode_str(opcode: c_int) -> *const c_char {
    let names = [
        c"rdma-write",
        c"rdma-write-with-imm",
        c"send",
        c"send-with-imm",
        c"rdma-read",
        c"atomic-cmp-and-swp",
        c"atomic-fetch-and-add",
        c"local-inv",
        c"bind-mw",
        c"send-with-inv",
        c"tso",
        c"driver1",
        c"unknown",
        c"unknown",
        c"flush",
        c"atomic-write",
    ];
    name(&names, opcode, c"unknown")
}

/// Rates of `ibv_rate` in units of 2.5 Gbit/s, and in Mbit/s; index 0 is "the port's".
const RATES: [(c_int, c_int, c_int); 17] = [
    (2, 1, 2500),
    (5, 2, 5000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 5, 14_062),
    (12, 45, 112_500),
    (13, 22, 56_250),
    (14, 67, 168_750),
    (15, 10, 25_781),
    (16, 41, 103_125),
    (17, 82, 206_250),
    (18, 123, 309_375),
];

pub extern "C" fn ibv_rate_to_mult(rate: c_int) -> c_int {
    RATES.iter().find(|row| row.0 == rate).map_or(-1, |row| row.1)
}

pub extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_int {
    RATES.iter().find(|row| row.1 == mult).map_or(0, |row| row.0)
}

pub extern "C" fn ibv_rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|row| row.0 == rate).map_or(-1, |row| row.2)
}

pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|row| row.2 == mbps).map_or(0, |row| row.0)
}
