//! The functions that replace the C library's functions for data transfer. All others, such as `sendmmsg` and those of
//! the standard input and output, use the socket in the kernel.

use std::{io::IoSlice, ptr, slice};

use libc::{c_int, c_void, iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t};

use crate::{descriptors::forget_passed, direct, next};

/// Largest number of pieces of a vector for the direct path; the kernel serves longer vectors.
const MAX_PIECES: usize = 8;
/// Largest length of a piece. Programs may pass lengths that exceed all memory.
const MAX_BYTES: usize = 1 << 30;

/// Calls `then` with the memory of a read.
///
/// # Safety
/// The pieces of `count` pieces may be written.
unsafe fn to_fill(
    pieces: *const iovec,
    count: usize,
    then: impl FnOnce(&mut [&mut [u8]]) -> ssize_t,
) -> ssize_t {
    let mut found: [&mut [u8]; MAX_PIECES] = Default::default();
    let count = if count <= MAX_PIECES && !pieces.is_null() { count } else { 0 };
    for (at, place) in found.iter_mut().take(count).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let piece = pieces.add(at).read_unaligned();
            if piece.iov_base.is_null() {
                return then(&mut []);
            }
            *place = slice::from_raw_parts_mut(piece.iov_base.cast(), piece.iov_len.min(MAX_BYTES));
        }
    }
    then(found.get_mut(..count).unwrap_or_default())
}

/// Calls `then` with the memory of a write.
///
/// # Safety
/// The pieces of `count` pieces may be read.
unsafe fn to_send(
    pieces: *const iovec,
    count: usize,
    then: impl FnOnce(&[IoSlice<'_>]) -> ssize_t,
) -> ssize_t {
    let mut found = [IoSlice::new(&[]); MAX_PIECES];
    let count = if count <= MAX_PIECES && !pieces.is_null() { count } else { 0 };
    for (at, place) in found.iter_mut().take(count).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let piece = pieces.add(at).read_unaligned();
            if piece.iov_base.is_null() {
                return then(&[]);
            }
            *place = IoSlice::new(slice::from_raw_parts(piece.iov_base.cast(), piece.iov_len.min(MAX_BYTES)));
        }
    }
    then(found.get(..count).unwrap_or_default())
}

fn one(base: *mut c_void, len: size_t) -> iovec {
    iovec { iov_base: base, iov_len: len }
}

/// Reads.
///
/// # Safety
/// As for `read` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { to_fill(&one(to, len), 1, |pieces| direct::receive(fd, pieces, 0, || next::read(fd, to, len))) }
}

/// The same, of programs that were compiled with checks.
///
/// # Safety
/// As for `read` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    object: size_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { if len > object { next::read_checked(fd, to, len, object) } else { read(fd, to, len) } }
}

/// Reads into several pieces.
///
/// # Safety
/// As for `readv` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t {
    let pieces = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller's promise.
    unsafe { to_fill(to, pieces, |pieces| direct::receive(fd, pieces, 0, || next::readv(fd, to, count))) }
}

/// Receives.
///
/// # Safety
/// As for `recv` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { recvfrom(fd, to, len, flags, ptr::null_mut(), ptr::null_mut()) }
}

/// The same, of programs that were compiled with checks.
///
/// # Safety
/// As for `recv` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    object: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { __recvfrom_chk(fd, to, len, object, flags, ptr::null_mut(), ptr::null_mut()) }
}

/// Receives, with the sender's address: TCP has none, and stores the length 0.
///
/// # Safety
/// As for `recvfrom` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    room: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        to_fill(&one(to, len), 1, |pieces| {
            let mut kernel = false;
            let done = direct::receive(fd, pieces, flags, || {
                kernel = true;
                next::recvfrom(fd, to, len, flags, address, room)
            });
            if !kernel && done >= 0 && !address.is_null() && !room.is_null() {
                room.write_unaligned(0);
            }
            done
        })
    }
}

/// The same, of programs that were compiled with checks.
///
/// # Safety
/// As for `recvfrom` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    object: size_t,
    flags: c_int,
    address: *mut sockaddr,
    room: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        if len > object {
            next::recvfrom_checked(fd, to, len, object, flags, address, room)
        } else {
            recvfrom(fd, to, len, flags, address, room)
        }
    }
}

/// Receives a message: for TCP, into several pieces.
///
/// # Safety
/// As for `recvmsg` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise; the kernel refuses null.
    unsafe {
        let Some(header) = message.as_mut() else { return next::recvmsg(fd, message, flags) };
        let (pieces, count) = (header.msg_iov.cast_const(), header.msg_iovlen);
        to_fill(pieces, count, |pieces| {
            let mut kernel = false;
            let done = direct::receive(fd, pieces, flags, || {
                kernel = true;
                next::recvmsg(fd, message, flags)
            });
            if !kernel && done >= 0 {
                (header.msg_controllen, header.msg_flags) = (0, 0);
                if !header.msg_name.is_null() {
                    header.msg_namelen = 0;
                }
            }
            done
        })
    }
}

/// Writes.
///
/// # Safety
/// As for `write` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        to_send(&one(from.cast_mut(), len), 1, |pieces| {
            direct::send(fd, pieces, 0, |done| next::write(fd, from.byte_add(done), len - done))
        })
    }
}

/// Writes several pieces.
///
/// # Safety
/// As for `writev` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        to_send(from, usize::try_from(count).unwrap_or(0), |pieces| {
            direct::send(fd, pieces, 0, |done| {
                if done == 0 {
                    return next::writev(fd, from, count);
                }
                let rest = rest(pieces, done);
                next::writev(fd, rest.as_ptr(), rest.len() as c_int)
            })
        })
    }
}

/// Sends.
///
/// # Safety
/// As for `send` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { sendto(fd, from, len, flags, ptr::null(), 0) }
}

/// Sends; a connected TCP socket ignores the address.
///
/// # Safety
/// As for `sendto` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    room: socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        to_send(&one(from.cast_mut(), len), 1, |pieces| {
            direct::send(fd, pieces, flags, |done| {
                next::sendto(fd, from.byte_add(done), len - done, flags, address, room)
            })
        })
    }
}

/// Sends a message: for TCP, several pieces.
///
/// # Safety
/// As for `sendmsg` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise; the kernel refuses null.
    unsafe {
        let Some(header) = message.as_ref().filter(|header| header.msg_controllen == 0) else {
            if let Some(header) = message.as_ref() {
                forget_passed(header);
            }
            return direct::send(fd, &[], flags, |_| next::sendmsg(fd, message, flags));
        };
        to_send(header.msg_iov.cast_const(), header.msg_iovlen, |pieces| {
            direct::send(fd, pieces, flags, |done| {
                if done == 0 {
                    return next::sendmsg(fd, message, flags);
                }
                let mut rest = rest(pieces, done);
                let mut header = *header;
                header.msg_iov = rest.as_mut_ptr();
                header.msg_iovlen = rest.len();
                next::sendmsg(fd, &raw const header, flags)
            })
        })
    }
}

/// The rest of `pieces` after the first `done` bytes.
fn rest(pieces: &[IoSlice<'_>], mut done: usize) -> Vec<iovec> {
    let mut rest = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let skipped = done.min(piece.len());
        done -= skipped;
        let left = piece.get(skipped..).unwrap_or_default();
        rest.push(one(left.as_ptr().cast_mut().cast(), left.len()));
    }
    rest
}
