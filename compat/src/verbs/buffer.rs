//! Buffers that the library allocates for a program to register, and registration with named parameters (rdma-core 59 and 64).

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use nix::errno::Errno;

use super::memory::{self, Mr, Pd};
use crate::{
    abi::device::{ibv_buf, ibv_mr_init_attr, ibv_mr_init_attr_since_64, mr_init},
    boundary::{CPart, Handle, In, Out, Pages, object},
    failure::{count, pointer},
};

/// A buffer of whole pages.
pub struct Buffer {
    c: CPart<ibv_buf>,
    pages: Pages,
    /// Address of the domain for which it was allocated. As with rdma-core the buffer does not keep it.
    pd: usize,
}

object!(Buffer: ibv_buf);

pub extern "C" fn ibv_alloc_buf(pd: Handle<Pd>, size: usize, out: Out<*mut ibv_buf>) -> *mut c_void {
    let make = || {
        pd.object()?;
        let pages = Pages::allocate(size).ok_or(Errno::ENOMEM)?;
        let address = pages.address();
        let buffer = Buffer { c: CPart::new(ibv_buf { unused: 0 }), pages, pd: pd.as_ptr().addr() };
        let handle = Handle::publish(Arc::new(buffer));
        if let Err(error) = out.write(handle.as_ptr()) {
            drop(handle.withdraw());
            return Err(error);
        }
        Ok(address)
    };
    make().unwrap_or_else(|error: Errno| {
        error.set();
        std::ptr::null_mut()
    })
}

pub extern "C" fn ibv_free_buf(buffer: Handle<Buffer>) {
    drop(buffer.withdraw());
}

/// The memory is the process's own, not a dma-buf.
pub extern "C" fn ibv_export_buf_dmabuf_fd(buffer: Handle<Buffer>) -> c_int {
    count(buffer.object().and(Err(Errno::ENODATA)))
}

/// Fails with `EINVAL` unless the range is part of a buffer of the domain.
fn check_buffer(
    pd: Handle<Pd>,
    buffer: Handle<Buffer>,
    address: *mut c_void,
    len: usize,
) -> Result<(), Errno> {
    let buffer = buffer.object()?;
    let offset = address.addr().checked_sub(buffer.pages.address().addr()).ok_or(Errno::EINVAL)?;
    let fits = buffer.pages.len().checked_sub(offset).is_some_and(|rest| len <= rest);
    if fits && buffer.pd == pd.as_ptr().addr() { Ok(()) } else { Err(Errno::EINVAL) }
}

pub extern "C" fn ibv_reg_buf_mr(
    pd: Handle<Pd>,
    buffer: Handle<Buffer>,
    address: *mut c_void,
    len: usize,
    access: c_int,
) -> Handle<Mr> {
    match check_buffer(pd, buffer, address, len) {
        Ok(()) => memory::ibv_reg_mr(pd, address, len, access),
        Err(error) => pointer(Err(error)),
    }
}

pub extern "C" fn ibv_reg_mr_ex(pd: Handle<Pd>, attributes: In<ibv_mr_init_attr>) -> Handle<Mr> {
    let known = || {
        let of = attributes.get().ok_or(Errno::EINVAL)?;
        let has = |bit| of.comp_mask & bit != 0;
        if has(mr_init::BUF) {
            let rest = In::of(attributes.as_ptr().wrapping_add(1).cast::<ibv_mr_init_attr_since_64>());
            let buffer = rest.read().ok_or(Errno::EINVAL)?.buf;
            check_buffer(pd, Handle::of(buffer), of.addr, of.length)?;
        }
        let names_memory = has(mr_init::ADDR) && !has(mr_init::FD | mr_init::FD_OFFSET);
        // Neither dma-bufs nor DMA handles.
        if of.comp_mask & !(mr_init::IOVA | mr_init::ADDR | mr_init::FD | mr_init::FD_OFFSET | mr_init::BUF)
            != 0
            || has(mr_init::FD) && !has(mr_init::ADDR)
        {
            return Err(Errno::EOPNOTSUPP);
        }
        if names_memory { Ok(of) } else { Err(Errno::EINVAL) }
    };
    match known() {
        Ok(of) if of.comp_mask & mr_init::IOVA != 0 => {
            memory::ibv_reg_mr_iova2(pd, of.addr, of.length, of.iova, of.access as u32)
        }
        Ok(of) => memory::ibv_reg_mr(pd, of.addr, of.length, of.access),
        Err(error) => pointer(Err(error)),
    }
}
