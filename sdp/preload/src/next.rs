//! The functions of the C library that transfer data, which `calls` replaces. Unlike plain system calls they are cancellation
//! points of threads.

use std::{
    ffi::CStr,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use libc::{c_int, c_void, iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t};

/// The address of the function behind ours; looked up once.
fn address(name: &CStr, known: &AtomicPtr<c_void>) -> *mut c_void {
    let found = known.load(Ordering::Relaxed);
    if !found.is_null() {
        return found;
    }
    // SAFETY: the name is a string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    // Ours are in front of a C library that has all of them.
    assert!(!found.is_null(), "the C library has no {name:?}");
    known.store(found, Ordering::Relaxed);
    found
}

macro_rules! next {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $kind:ty),*);)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The arguments are what the caller gave to the function that replaces it.
        pub unsafe fn $name($($arg: $kind),*) -> ssize_t {
            static KNOWN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            // SAFETY: the function of this name has this type.
            let function = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> ssize_t>(
                    address($symbol, &KNOWN),
                )
            };
            // SAFETY: the caller's promise.
            unsafe { function($($arg),*) }
        }
    )*};
}

next! {
    /// `read`.
    read = c"read" (fd: c_int, to: *mut c_void, len: size_t);
    /// `readv`.
    readv = c"readv" (fd: c_int, to: *const iovec, count: c_int);
    /// `recvfrom`; `recv` is the same without an address.
    recvfrom = c"recvfrom" (fd: c_int, to: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, room: *mut socklen_t);
    /// `recvmsg`.
    recvmsg = c"recvmsg" (fd: c_int, message: *mut msghdr, flags: c_int);
    /// `write`.
    write = c"write" (fd: c_int, from: *const c_void, len: size_t);
    /// `writev`.
    writev = c"writev" (fd: c_int, from: *const iovec, count: c_int);
    /// `sendto`; `send` is the same without an address.
    sendto = c"sendto" (fd: c_int, from: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, room: socklen_t);
    /// `sendmsg`.
    sendmsg = c"sendmsg" (fd: c_int, message: *const msghdr, flags: c_int);
    /// `__read_chk`, which ends the process when `len` is more than the object has.
    read_checked = c"__read_chk" (fd: c_int, to: *mut c_void, len: size_t, object: size_t);
    /// `__recvfrom_chk`.
    recvfrom_checked = c"__recvfrom_chk" (fd: c_int, to: *mut c_void, len: size_t, object: size_t, flags: c_int, address: *mut sockaddr, room: *mut socklen_t);
}
