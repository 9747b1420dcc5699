//! Functions of librdmacm that need features that this device lacks.

use std::ffi::{c_int, c_void};

use nix::errno::Errno;

use super::id::Id;
use crate::{boundary::Handle, failure::minus_one};

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
