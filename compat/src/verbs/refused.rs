//! Functions that an iWARP device, or a process without a kernel driver, cannot provide, with the errors that programs
//! expect; and functions without an effect.

use std::ffi::{c_char, c_int, c_void};

use nix::errno::Errno;

use super::{context::Context, memory::Pd, qp::Qp};
use crate::{
    boundary::{Handle, Out, Text},
    failure::{count, number},
};

/// `IBV_FORK_UNNEEDED`: the engine copies in the parent, so pages that a fork shares never confuse it.
const FORK_UNNEEDED: c_int = 2;

fn none<T>(error: Errno) -> *mut T {
    error.set();
    std::ptr::null_mut()
}

/// Datagrams and multicast need UD.
pub extern "C" fn ibv_create_ah(_pd: Handle<Pd>, _attributes: *mut c_void) -> *mut c_void {
    none(Errno::EOPNOTSUPP)
}

pub extern "C" fn ibv_create_ah_from_wc(
    _pd: Handle<Pd>,
    _wc: *mut c_void,
    _grh: *mut c_void,
    _port: u8,
) -> *mut c_void {
    none(Errno::EOPNOTSUPP)
}

pub extern "C" fn ibv_init_ah_from_wc(
    _context: Handle<Context>,
    _port: u8,
    _wc: *mut c_void,
    _grh: *mut c_void,
    _attributes: *mut c_void,
) -> c_int {
    count(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn ibv_destroy_ah(_ah: *mut c_void) -> c_int {
    number(Err(Errno::EINVAL))
}

pub extern "C" fn ibv_attach_mcast(_qp: Handle<Qp>, _gid: *const c_void, _lid: u16) -> c_int {
    number(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn ibv_detach_mcast(_qp: Handle<Qp>, _gid: *const c_void, _lid: u16) -> c_int {
    number(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: Handle<Context>,
    _attributes: *mut c_void,
    _mac: *mut u8,
    _vid: *mut u16,
) -> c_int {
    count(Err(Errno::EOPNOTSUPP))
}

/// Objects of other processes belong to a kernel driver's descriptor, and there is none.
pub extern "C" fn ibv_import_device(_fd: c_int) -> Handle<Context> {
    Errno::EOPNOTSUPP.set();
    Handle::NULL
}

pub extern "C" fn ibv_import_pd(_context: Handle<Context>, _handle: u32) -> *mut c_void {
    none(Errno::EOPNOTSUPP)
}

pub extern "C" fn ibv_import_mr(_pd: Handle<Pd>, _handle: u32) -> *mut c_void {
    none(Errno::EOPNOTSUPP)
}

pub extern "C" fn ibv_import_dm(_context: Handle<Context>, _handle: u32) -> *mut c_void {
    none(Errno::EOPNOTSUPP)
}

pub extern "C" fn ibv_unimport_pd(_pd: *mut c_void) {}

pub extern "C" fn ibv_unimport_mr(_mr: *mut c_void) {}

pub extern "C" fn ibv_unimport_dm(_dm: *mut c_void) {}

pub extern "C" fn ibv_reg_dmabuf_mr(
    _pd: Handle<Pd>,
    _offset: u64,
    _len: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut c_void {
    none(Errno::EOPNOTSUPP)
}

pub extern "C" fn ibv_query_ece(_qp: Handle<Qp>, _ece: *mut c_void) -> c_int {
    number(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn ibv_set_ece(_qp: Handle<Qp>, _ece: *mut c_void) -> c_int {
    number(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

pub extern "C" fn ibv_is_fork_initialized() -> c_int {
    FORK_UNNEEDED
}

pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _len: usize) -> c_int {
    0
}

pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _len: usize) -> c_int {
    0
}

/// Drivers of hardware register themselves when they are loaded; they find no device here.
pub extern "C" fn verbs_register_driver(_operations: *const c_void) {}

pub extern "C" fn ibv_register_driver(_name: *const c_char, _init: *const c_void) {}

pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Files of RDMA devices do not exist; programs take that as "unknown".
pub extern "C" fn ibv_read_sysfs_file(
    _directory: Text,
    _file: Text,
    _out: Out<c_char>,
    _size: usize,
) -> c_int {
    -1
}

/// Called by a hardware driver to log that a device is not its own.
pub extern "C" fn verbs_log(_context: *const c_void, _level: u32, _format: *const c_char) {}

/// A function that returns an error number, of a feature that this device lacks. The table names it for functions of any parameters:
/// the calling convention leaves them to the caller.
pub extern "C" fn unsupported() -> c_int {
    number(Err(Errno::EOPNOTSUPP))
}

/// The same, for a function that returns an object, or null with `errno`.
pub extern "C" fn no_object() -> *mut c_void {
    none(Errno::EOPNOTSUPP)
}

/// The same, for a function that returns -1 with `errno`.
pub extern "C" fn minus_one() -> c_int {
    count(Err(Errno::EOPNOTSUPP))
}

/// A function that reports no failure and has nothing to do; 0 where it has a result.
pub extern "C" fn nothing() -> usize {
    0
}
