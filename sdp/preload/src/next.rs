//! The functions of the C library that transfer data or change descriptors, which this library replaces. Unlike plain system calls
//! they are cancellation points of threads: where a thread ends, its stack is unwound, through the functions that replace
//! these (`C-unwind`).

use std::{
    ffi::CStr,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use libc::{
    FILE, aiocb, c_char, c_int, c_long, c_uint, c_ulong, c_void, iovec, mmsghdr, msghdr, off_t, off64_t,
    pid_t, pthread_t, sigevent, sighandler_t, size_t, sockaddr, socklen_t, ssize_t, timespec,
};

/// The address of the function behind ours; looked up once.
pub fn address(name: &CStr, known: &AtomicPtr<c_void>) -> *mut c_void {
    let found = known.load(Ordering::Relaxed);
    if !found.is_null() {
        return found;
    }
    // SAFETY: the name is a string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    // This library precedes a C library that has all of these functions.
    assert!(!found.is_null(), "the C library has no {name:?}");
    known.store(found, Ordering::Relaxed);
    found
}

macro_rules! next {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $kind:ty),*) -> $result:ty;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The arguments are those of the caller of the replacing function.
        pub unsafe fn $name($($arg: $kind),*) -> $result {
            static KNOWN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            // SAFETY: the function of this name has this type.
            let function = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($kind),*) -> $result>(
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
    read = c"read" (fd: c_int, to: *mut c_void, len: size_t) -> ssize_t;
    /// `readv`.
    readv = c"readv" (fd: c_int, to: *const iovec, count: c_int) -> ssize_t;
    /// `recvfrom`; `recv` is the same without an address.
    recvfrom = c"recvfrom" (fd: c_int, to: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, room: *mut socklen_t) -> ssize_t;
    /// `recvmsg`.
    recvmsg = c"recvmsg" (fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    /// `write`.
    write = c"write" (fd: c_int, from: *const c_void, len: size_t) -> ssize_t;
    /// `writev`.
    writev = c"writev" (fd: c_int, from: *const iovec, count: c_int) -> ssize_t;
    /// `sendto`; `send` is the same without an address.
    sendto = c"sendto" (fd: c_int, from: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, room: socklen_t) -> ssize_t;
    /// `sendmsg`.
    sendmsg = c"sendmsg" (fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    /// `__read_chk`, which ends the process when `len` is more than the object has.
    read_checked = c"__read_chk" (fd: c_int, to: *mut c_void, len: size_t, object: size_t) -> ssize_t;
    /// `__recvfrom_chk`.
    recvfrom_checked = c"__recvfrom_chk" (fd: c_int, to: *mut c_void, len: size_t, object: size_t, flags: c_int, address: *mut sockaddr, room: *mut socklen_t) -> ssize_t;
    /// `socket`.
    socket = c"socket" (family: c_int, kind: c_int, protocol: c_int) -> c_int;
    /// `bind`.
    bind = c"bind" (fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    /// `close`.
    close = c"close" (fd: c_int) -> c_int;
    /// `close_range`.
    close_range = c"close_range" (first: c_uint, last: c_uint, flags: c_int) -> c_int;
    /// `closefrom`.
    closefrom = c"closefrom" (first: c_int) -> ();
    /// `dup`.
    dup = c"dup" (fd: c_int) -> c_int;
    /// `dup2`.
    dup2 = c"dup2" (fd: c_int, to: c_int) -> c_int;
    /// `dup3`.
    dup3 = c"dup3" (fd: c_int, to: c_int, flags: c_int) -> c_int;
    /// `fcntl`; the last argument may be missing, which makes no difference on the supported platforms.
    fcntl = c"fcntl" (fd: c_int, command: c_int, argument: c_long) -> c_int;
    /// `fcntl64`.
    fcntl64 = c"fcntl64" (fd: c_int, command: c_int, argument: c_long) -> c_int;
    /// `ioctl`.
    ioctl = c"ioctl" (fd: c_int, command: c_ulong, argument: *mut c_void) -> c_int;
    /// `shutdown`.
    shutdown = c"shutdown" (fd: c_int, how: c_int) -> c_int;
    /// `setsockopt`.
    setsockopt = c"setsockopt" (fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    /// `sigaction`.
    sigaction = c"sigaction" (signal: c_int, action: *const libc::sigaction, before: *mut libc::sigaction) -> c_int;
    /// `signal`; `bsd_signal` and `ssignal` are the same.
    signal = c"signal" (signal: c_int, handler: sighandler_t) -> sighandler_t;
    /// `sysv_signal`.
    sysv_signal = c"sysv_signal" (signal: c_int, handler: sighandler_t) -> sighandler_t;
    /// `sigset`.
    sigset = c"sigset" (signal: c_int, disposition: sighandler_t) -> sighandler_t;
    /// `sigignore`.
    sigignore = c"sigignore" (signal: c_int) -> c_int;
    /// `siginterrupt`.
    siginterrupt = c"siginterrupt" (signal: c_int, flag: c_int) -> c_int;
    /// `pthread_cancel`.
    pthread_cancel = c"pthread_cancel" (thread: pthread_t) -> c_int;
    /// `fdopen`.
    fdopen = c"fdopen" (fd: c_int, mode: *const c_char) -> *mut FILE;
    /// `fclose`.
    fclose = c"fclose" (file: *mut FILE) -> c_int;
    /// `freopen`.
    freopen = c"freopen" (path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE;
    /// `freopen64`.
    freopen64 = c"freopen64" (path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE;
    /// `sendfile`; `sendfile64` is the same.
    sendfile = c"sendfile" (out: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t;
    /// `splice`.
    splice = c"splice" (from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t;
    /// `sendmmsg`.
    sendmmsg = c"sendmmsg" (fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    /// `recvmmsg`.
    recvmmsg = c"recvmmsg" (fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, limit: *mut timespec) -> c_int;
    /// `preadv2`; `preadv64v2` is the same.
    preadv2 = c"preadv2" (fd: c_int, to: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    /// `pwritev2`; `pwritev64v2` is the same.
    pwritev2 = c"pwritev2" (fd: c_int, from: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    /// `aio_read`; `aio_read64` is the same.
    aio_read = c"aio_read" (control: *mut aiocb) -> c_int;
    /// `aio_write`; `aio_write64` is the same.
    aio_write = c"aio_write" (control: *mut aiocb) -> c_int;
    /// `lio_listio`; `lio_listio64` is the same.
    lio_listio = c"lio_listio" (mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int;
    /// `vdprintf`, whose list of arguments is one pointer.
    vdprintf = c"vdprintf" (fd: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    /// `__vdprintf_chk`.
    vdprintf_checked = c"__vdprintf_chk" (fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    /// `_Fork`.
    raw_fork = c"_Fork" () -> pid_t;
    /// `posix_spawn`.
    posix_spawn = c"posix_spawn" (pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, variables: *const *mut c_char) -> c_int;
    /// `posix_spawnp`.
    posix_spawnp = c"posix_spawnp" (pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, variables: *const *mut c_char) -> c_int;
    /// `popen`.
    popen = c"popen" (command: *const c_char, mode: *const c_char) -> *mut FILE;
    /// `system`.
    system = c"system" (command: *const c_char) -> c_int;
    /// `wordexp`.
    wordexp = c"wordexp" (words: *const c_char, expanded: *mut c_void, flags: c_int) -> c_int;
    /// `unshare`.
    unshare = c"unshare" (flags: c_int) -> c_int;
    /// `syscall`; arguments may be missing, as above.
    syscall = c"syscall" (number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
}
