//! Completion queues, queue pairs, shared receive queues, work requests and completions.

use std::ffi::{c_int, c_uint, c_void};

use super::{
    COND_WORDS, MUTEX_WORDS,
    device::{Unused, ibv_comp_channel, ibv_context, ibv_gid, ibv_mw, ibv_mw_bind_info, ibv_pd},
};

/// The fields of `ibv_cq`, `ibv_qp` and `ibv_srq` behind which stock code counts acknowledged events.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Sync {
    pub mutex: [u64; MUTEX_WORDS],
    pub cond: [u64; COND_WORDS],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub sync: Sync,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_cq_ex {
    pub cq: ibv_cq,
    pub comp_mask: u32,
    pub status: c_int,
    pub wr_id: u64,
    pub start_poll: Unused,
    pub next_poll: Unused,
    pub end_poll: Unused,
    pub read_opcode: Unused,
    pub read_vendor_err: Unused,
    pub read_byte_len: Unused,
    pub read_imm_data: Unused,
    pub read_qp_num: Unused,
    pub read_src_qp: Unused,
    pub read_wc_flags: Unused,
    pub read_slid: Unused,
    pub read_sl: Unused,
    pub read_dlid_path_bits: Unused,
    pub read_completion_ts: Unused,
    pub read_cvlan: Unused,
    pub read_flow_tag: Unused,
    pub read_tm_info: Unused,
    pub read_completion_wallclock_ns: Unused,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_cq_init_attr_ex {
    pub cqe: u32,
    pub cq_context: *mut c_void,
    pub channel: *mut ibv_comp_channel,
    pub comp_vector: u32,
    pub wc_flags: u64,
    pub comp_mask: u32,
    pub flags: u32,
    pub parent_domain: *mut ibv_pd,
}

/// Bits of `wc_flags` of `ibv_create_cq_ex`.
pub mod cq_wc {
    /// `byte_len`, immediate data, numbers of queue pairs, LIDs and service level.
    pub const STANDARD: u64 = 0x7f;
    pub const COMPLETION_TIMESTAMP: u64 = 1 << 7;
    pub const COMPLETION_TIMESTAMP_WALLCLOCK: u64 = 1 << 11;
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Immediate data in network byte order, or the invalidated key.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// Statuses of completions.
pub mod wc_status {
    use std::ffi::c_int;

    pub const SUCCESS: c_int = 0;
    pub const LOC_LEN_ERR: c_int = 1;
    pub const LOC_QP_OP_ERR: c_int = 2;
    pub const LOC_PROT_ERR: c_int = 4;
    pub const WR_FLUSH_ERR: c_int = 5;
    pub const MW_BIND_ERR: c_int = 6;
    pub const BAD_RESP_ERR: c_int = 7;
    pub const REM_INV_REQ_ERR: c_int = 9;
    pub const REM_ACCESS_ERR: c_int = 10;
    pub const REM_OP_ERR: c_int = 11;
    pub const RETRY_EXC_ERR: c_int = 12;
    pub const GENERAL_ERR: c_int = 21;
}

/// Kinds of completions.
pub mod wc_opcode {
    use std::ffi::c_int;

    pub const SEND: c_int = 0;
    pub const RDMA_WRITE: c_int = 1;
    pub const RDMA_READ: c_int = 2;
    pub const COMP_SWAP: c_int = 3;
    pub const FETCH_ADD: c_int = 4;
    pub const BIND_MW: c_int = 5;
    pub const LOCAL_INV: c_int = 6;
    pub const RECV: c_int = 1 << 7;
    pub const RECV_RDMA_WITH_IMM: c_int = RECV + 1;
}

pub const WC_WITH_IMM: c_uint = 1 << 1;
pub const WC_WITH_INV: c_uint = 1 << 3;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_srq {
    pub context: *mut ibv_context,
    pub srq_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub handle: u32,
    pub sync: Sync,
    pub events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_srq_attr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_srq_init_attr {
    pub srq_context: *mut c_void,
    pub attr: ibv_srq_attr,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_srq_init_attr_ex {
    pub srq_context: *mut c_void,
    pub attr: ibv_srq_attr,
    pub comp_mask: u32,
    pub srq_type: c_int,
    pub pd: *mut ibv_pd,
    pub xrcd: *mut c_void,
    pub cq: *mut ibv_cq,
    pub tm_cap: [u32; 2],
}

pub const SRQ_TYPE_BASIC: c_int = 0;
pub const SRQ_INIT_TYPE: u32 = 1;
pub const SRQ_INIT_PD: u32 = 1 << 1;
pub const SRQ_MAX_WR: c_int = 1;
pub const SRQ_LIMIT: c_int = 1 << 1;

pub const QPT_RC: c_int = 2;
/// The other types that the kernel knows: UC, UD, raw packets, both ends of XRC, and those of drivers.
pub const QPT_OTHERS: [c_int; 6] = [3, 4, 8, 9, 10, 0xff];

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_init_attr_ex {
    // The fields of `ibv_qp_init_attr`, without the padding at its end.
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
    pub comp_mask: u32,
    pub pd: *mut ibv_pd,
    pub xrcd: *mut c_void,
    pub create_flags: u32,
    pub max_tso_header: u16,
    pub rwq_ind_tbl: *mut c_void,
    pub rx_hash_conf: [u64; 3],
    pub source_qpn: u32,
    pub send_ops_flags: u64,
}

impl ibv_qp_init_attr_ex {
    /// The fields shared with `ibv_qp_init_attr`.
    pub fn base(&self) -> ibv_qp_init_attr {
        let Self { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, .. } = *self;
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
    }
}

pub const QP_INIT_PD: u32 = 1;
pub const QP_INIT_CREATE_FLAGS: u32 = 1 << 2;
pub const QP_INIT_SEND_OPS_FLAGS: u32 = 1 << 6;
/// Every operation of `ibv_wr_*` except TSO and atomic writes.
pub const SEND_OPS: u64 = 0x3ff;

/// Attributes of `ibv_modify_qp`.
pub mod qp_mask {
    use std::ffi::c_int;

    pub const STATE: c_int = 1;
    pub const CUR_STATE: c_int = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: c_int = 1 << 2;
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    pub const PKEY_INDEX: c_int = 1 << 4;
    pub const PORT: c_int = 1 << 5;
    pub const QKEY: c_int = 1 << 6;
    pub const AV: c_int = 1 << 7;
    pub const PATH_MTU: c_int = 1 << 8;
    pub const TIMEOUT: c_int = 1 << 9;
    pub const RETRY_CNT: c_int = 1 << 10;
    pub const RNR_RETRY: c_int = 1 << 11;
    pub const RQ_PSN: c_int = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub const ALT_PATH: c_int = 1 << 14;
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    pub const SQ_PSN: c_int = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub const PATH_MIG_STATE: c_int = 1 << 18;
    pub const DEST_QPN: c_int = 1 << 20;
    pub const RATE_LIMIT: c_int = 1 << 25;
}

/// States of queue pairs.
pub mod qp_state {
    use std::ffi::c_int;

    pub const RESET: c_int = 0;
    pub const INIT: c_int = 1;
    pub const RTR: c_int = 2;
    pub const RTS: c_int = 3;
    pub const SQD: c_int = 4;
    pub const ERR: c_int = 6;
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_attr {
    pub qp_state: c_int,
    pub cur_qp_state: c_int,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// Operations of work requests.
pub mod wr {
    use std::ffi::c_int;

    pub const RDMA_WRITE: c_int = 0;
    pub const RDMA_WRITE_WITH_IMM: c_int = 1;
    pub const SEND: c_int = 2;
    pub const SEND_WITH_IMM: c_int = 3;
    pub const RDMA_READ: c_int = 4;
    pub const ATOMIC_CMP_AND_SWP: c_int = 5;
    pub const ATOMIC_FETCH_AND_ADD: c_int = 6;
    pub const LOCAL_INV: c_int = 7;
    pub const BIND_MW: c_int = 8;
    pub const SEND_WITH_INV: c_int = 9;
    pub const TSO: c_int = 10;
    pub const DRIVER1: c_int = 11;
    pub const FLUSH: c_int = 14;
    pub const ATOMIC_WRITE: c_int = 15;
}

/// Flags of work requests.
pub mod send {
    use std::ffi::c_uint;

    pub const FENCE: c_uint = 1;
    pub const SIGNALED: c_uint = 1 << 1;
    pub const SOLICITED: c_uint = 1 << 2;
    pub const INLINE: c_uint = 1 << 3;
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_data_buf {
    pub addr: *mut c_void,
    pub length: usize,
}

/// Of alignment 1, because programs have it in packed structures of theirs (libiscsi, tgt).
#[repr(C, packed)]
#[derive(Clone, Copy)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The place in the peer's memory and the operands of a work request: a union in C, of which `rdma` and `atomic` concern us.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Target {
    pub remote_addr: u64,
    /// The key of `rdma` in the first half, or `compare_add` of `atomic`.
    pub second: u64,
    pub swap: u64,
    pub atomic_rkey: u32,
}

impl Target {
    /// The key of an RDMA Write or RDMA Read.
    pub fn rkey(&self) -> u32 {
        let [a, b, c, d, ..] = self.second.to_ne_bytes();
        u32::from_ne_bytes([a, b, c, d])
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct BindWr {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: c_uint,
    /// Immediate data in network byte order, or the key to invalidate.
    pub imm_data: u32,
    pub wr: Target,
    pub xrc_remote_srqn: u32,
    pub bind_mw: BindWr,
}

/// Of alignment 1, as [`ibv_sge`].
#[repr(C, packed)]
#[derive(Clone, Copy)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    _padding: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mw_bind {
    pub wr_id: u64,
    pub send_flags: c_uint,
    pub bind_info: ibv_mw_bind_info,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_int,
    pub qp_type: c_int,
    pub sync: Sync,
    pub events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_ex {
    pub qp_base: ibv_qp,
    pub comp_mask: u64,
    pub wr_id: u64,
    pub wr_flags: c_uint,
    pub wr_atomic_cmp_swp: Unused,
    pub wr_atomic_fetch_add: Unused,
    pub wr_bind_mw: Unused,
    pub wr_local_inv: Unused,
    pub wr_rdma_read: Unused,
    pub wr_rdma_write: Unused,
    pub wr_rdma_write_imm: Unused,
    pub wr_send: Unused,
    pub wr_send_imm: Unused,
    pub wr_send_inv: Unused,
    pub wr_send_tso: Unused,
    pub wr_set_ud_addr: Unused,
    pub wr_set_xrc_srqn: Unused,
    pub wr_set_inline_data: Unused,
    pub wr_set_inline_data_list: Unused,
    pub wr_set_sge: Unused,
    pub wr_set_sge_list: Unused,
    pub wr_start: Unused,
    pub wr_complete: Unused,
    pub wr_abort: Unused,
    pub wr_atomic_write: Unused,
    /// Since rdma-core 48; null as `wr_atomic_write`, because a queue pair with it cannot be created.
    pub wr_flush: Unused,
}
