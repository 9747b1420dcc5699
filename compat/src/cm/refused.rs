//! Functions of librdmacm that need what this device has not, and rsockets.
//!
//! rsockets are a library of their own inside librdmacm: it has no version of them for other providers of its functions, because its
//! code calls its own functions directly. Byte streams over xwarp are those of SDP. [`rpoll`] exists because programs of
//! librdmacm's own tests are linked with it.

use std::ffi::{c_int, c_void};

use nix::errno::Errno;

use super::id::Id;
use crate::{
    boundary::Handle,
    failure::{count, minus_one},
};

/// Multicast needs UD.
pub extern "C" fn rdma_join_multicast(
    _id: Handle<Id>,
    _address: *mut c_void,
    _context: *mut c_void,
) -> c_int {
    minus_one(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn rdma_join_multicast_ex(
    _id: Handle<Id>,
    _attributes: *mut c_void,
    _context: *mut c_void,
) -> c_int {
    minus_one(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn rdma_leave_multicast(_id: Handle<Id>, _address: *mut c_void) -> c_int {
    minus_one(Err(Errno::EOPNOTSUPP))
}

/// SRQs of XRC.
pub extern "C" fn rdma_create_srq_ex(_id: Handle<Id>, _attributes: *mut c_void) -> c_int {
    minus_one(Err(Errno::EOPNOTSUPP))
}

/// Enhanced connection establishment is InfiniBand's.
pub extern "C" fn rdma_set_local_ece(_id: Handle<Id>, _ece: *mut c_void) -> c_int {
    minus_one(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn rdma_get_remote_ece(_id: Handle<Id>, _ece: *mut c_void) -> c_int {
    minus_one(Err(Errno::EOPNOTSUPP))
}

pub extern "C" fn rdma_reject_ece(_id: Handle<Id>, _data: *const c_void, _len: u8) -> c_int {
    minus_one(Err(Errno::EOPNOTSUPP))
}

/// An rsocket call that returns a number: none is open.
pub extern "C" fn rsocket_call() -> isize {
    count(Err(Errno::EOPNOTSUPP)) as isize
}

/// `poll` for descriptors that are no rsockets, which is all that there are.
pub extern "C" fn rpoll(fds: *mut c_void, number: libc::nfds_t, limit_ms: c_int) -> c_int {
    crate::boundary::poll(fds, number, limit_ms)
}
