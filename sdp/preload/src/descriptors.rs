//! The functions that replace those which close, duplicate or pass on descriptors, start processes, or transfer data in
//! rarer ways. Each notifies `tracking` before the C library executes the call, so that the direct path stops before.

use std::{arch::naked_asm, ffi::CStr, os::fd::RawFd, ptr, slice, sync::atomic::AtomicPtr};

use libc::{
    FILE, aiocb, c_char, c_int, c_long, c_uint, c_ulong, c_void, iovec, mmsghdr, msghdr, off_t, off64_t,
    pid_t, sigevent, size_t, socklen_t, ssize_t, timespec,
};

use crate::{direct, next, process, tracking};

/// Replaces functions of the C library; `before` runs first.
macro_rules! replace {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty = $next:ident, $before:expr;)*) => {$(
        #[doc = concat!("Replaces `", stringify!($name), "`.\n\n# Safety\nAs for the function of the C library.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $kind),*) -> $result {
            $before;
            // SAFETY: the caller's promise.
            unsafe { next::$next($($arg),*) }
        }
    )*};
}

replace! {
    dup(fd: c_int) -> c_int = dup, tracking::forget(fd);
    dup2(fd: c_int, to: c_int) -> c_int = dup2, duplicated(fd, to);
    __dup2(fd: c_int, to: c_int) -> c_int = dup2, duplicated(fd, to);
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int = dup3, duplicated(fd, to);
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int = close_range, tracking::forget_range(first, last);
    closefrom(first: c_int) -> () = closefrom, tracking::forget_range(c_uint::try_from(first).unwrap_or(0), c_uint::MAX);
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE = fdopen, tracking::has_file(fd, true);
    shutdown(fd: c_int, how: c_int) -> c_int = shutdown, direct::shut(fd, how);
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int = sendmmsg, forget_messages(fd, messages, count);
    __sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int = sendmmsg, forget_messages(fd, messages, count);
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, limit: *mut timespec) -> c_int = recvmmsg, tracking::forget(fd);
    preadv2(fd: c_int, to: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t = preadv2, tracking::forget(fd);
    preadv64v2(fd: c_int, to: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t = preadv2, tracking::forget(fd);
    pwritev2(fd: c_int, from: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t = pwritev2, tracking::forget(fd);
    pwritev64v2(fd: c_int, from: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t = pwritev2, tracking::forget(fd);
    aio_read(control: *mut aiocb) -> c_int = aio_read, forget_control(control);
    aio_read64(control: *mut aiocb) -> c_int = aio_read, forget_control(control);
    aio_write(control: *mut aiocb) -> c_int = aio_write, forget_control(control);
    aio_write64(control: *mut aiocb) -> c_int = aio_write, forget_control(control);
    lio_listio(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int = lio_listio, tracking::forget_all();
    lio_listio64(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int = lio_listio, tracking::forget_all();
    vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int = vdprintf, tracking::forget(fd);
    __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int = vdprintf_checked, tracking::forget(fd);
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, variables: *const *mut c_char) -> c_int = posix_spawn, tracking::forget_all();
    posix_spawnp(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, variables: *const *mut c_char) -> c_int = posix_spawnp, tracking::forget_all();
    popen(command: *const c_char, mode: *const c_char) -> *mut FILE = popen, tracking::forget_all();
    system(command: *const c_char) -> c_int = system, tracking::forget_all();
    wordexp(words: *const c_char, expanded: *mut c_void, flags: c_int) -> c_int = wordexp, tracking::forget_all();
    unshare(flags: c_int) -> c_int = unshare, unshared(flags);
}

/// `SO_RCVTIMEO` with 64-bit times on every platform.
const SO_RCVTIMEO_NEW: c_int = 66;

fn duplicated(fd: RawFd, to: RawFd) {
    tracking::forget(fd);
    tracking::forget(to);
}

fn unshared(flags: c_int) {
    // From now on the threads have descriptor tables of their own.
    if flags & libc::CLONE_FILES != 0 {
        tracking::forget_for_ever();
    }
}

/// The control block is null or comes from the program's call.
fn forget_control(control: *const aiocb) {
    // SAFETY: the program's promise.
    if let Some(control) = unsafe { control.as_ref() } {
        tracking::forget(control.aio_fildes);
    }
}

/// The messages come from the program's call.
fn forget_messages(fd: RawFd, messages: *const mmsghdr, count: c_uint) {
    tracking::forget(fd);
    for at in 0..if messages.is_null() { 0 } else { count as usize } {
        // SAFETY: the program's promise.
        unsafe { forget_passed(&(*messages.add(at)).msg_hdr) };
    }
}

/// Descriptors that a message passes to another process (`SCM_RIGHTS`).
///
/// # Safety
/// The control data of the message may be read.
pub unsafe fn forget_passed(message: &msghdr) {
    // SAFETY: the caller's promise; the macros stay within the control data.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = next.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let len = control.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = slice::from_raw_parts(libc::CMSG_DATA(control), len);
                let (numbers, _) = data.as_chunks();
                for number in numbers {
                    tracking::forget(c_int::from_ne_bytes(*number));
                }
            }
            next = libc::CMSG_NXTHDR(message, control);
        }
    }
}

/// Makes a socket.
#[unsafe(no_mangle)]
pub extern "C" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    let serial = tracking::serial();
    // SAFETY: no pointers.
    let fd = unsafe { next::socket(family, kind, protocol) };
    if fd >= 0 {
        tracking::created(fd, serial);
    }
    fd
}

/// Closes a descriptor.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn close(fd: c_int) -> c_int {
    tracking::forget(fd);
    // SAFETY: no pointers.
    unsafe { next::close(fd) }
}

/// Another name of [`close`].
#[unsafe(no_mangle)]
pub extern "C-unwind" fn __close(fd: c_int) -> c_int {
    close(fd)
}

/// Changes or duplicates a descriptor.
///
/// # Safety
/// As for `fcntl` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { control(fd, command, || next::fcntl(fd, command, argument)) }
}

/// The same.
///
/// # Safety
/// As for `fcntl` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fcntl(fd, command, argument) }
}

/// The same.
///
/// # Safety
/// As for `fcntl` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { control(fd, command, || next::fcntl64(fd, command, argument)) }
}

fn control(fd: RawFd, command: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        tracking::forget(fd);
    }
    let done = call();
    if command == libc::F_SETFL {
        direct::mode_changed(fd);
    }
    done
}

/// Controls a device or a socket.
///
/// # Safety
/// As for `ioctl` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, command: c_ulong, argument: *mut c_void) -> c_int {
    if command == libc::FIONREAD {
        direct::bring_to_kernel(fd);
    }
    // SAFETY: the caller's promise.
    let done = unsafe { next::ioctl(fd, command, argument) };
    if command == libc::FIONBIO {
        direct::mode_changed(fd);
    }
    done
}

/// Sets an option of a socket.
///
/// # Safety
/// As for `setsockopt` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // SAFETY: the caller's promise.
    let done = unsafe { next::setsockopt(fd, level, name, value, len) };
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => direct::low_mark_changed(fd),
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW) => direct::read_limit_changed(fd),
        _ => {}
    }
    done
}

/// Closes a file, and the descriptor of it.
///
/// # Safety
/// As for `fclose` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fclose(file: *mut FILE) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let fd = number(file);
        // While the descriptor is open, no other file can get its number.
        tracking::has_file(fd, false);
        next::fclose(file)
    }
}

/// The number of a file, negative if it has none.
///
/// # Safety
/// Null or a valid file.
unsafe fn number(file: *mut FILE) -> RawFd {
    let before = crate::sys::errno();
    // SAFETY: the caller's promise.
    let fd = if file.is_null() { -1 } else { unsafe { libc::fileno(file) } };
    crate::sys::set_errno(before);
    fd
}

/// Reopens a `FILE` with another file.
///
/// # Safety
/// As for `freopen` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn freopen(
    path: *const c_char,
    mode: *const c_char,
    file: *mut FILE,
) -> *mut FILE {
    // SAFETY: the caller's promise.
    unsafe { reopened(file, || next::freopen(path, mode, file)) }
}

/// The same.
///
/// # Safety
/// As for `freopen` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn freopen64(
    path: *const c_char,
    mode: *const c_char,
    file: *mut FILE,
) -> *mut FILE {
    // SAFETY: the caller's promise.
    unsafe { reopened(file, || next::freopen64(path, mode, file)) }
}

/// # Safety
/// Null or a valid file.
unsafe fn reopened(file: *mut FILE, call: impl FnOnce() -> *mut FILE) -> *mut FILE {
    // SAFETY: the caller's promise, before and after.
    unsafe {
        tracking::has_file(number(file), false);
        let done = call();
        tracking::has_file(number(done), true);
        done
    }
}

/// Sends a file.
///
/// # Safety
/// As for `sendfile` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    len: size_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    direct::write_in_kernel(out, || unsafe { next::sendfile(out, from, offset, len) })
}

/// The same.
///
/// # Safety
/// As for `sendfile` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    len: size_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { sendfile(out, from, offset, len) }
}

/// Moves data from or to a pipe.
///
/// # Safety
/// As for `splice` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let call = || unsafe { next::splice(from, from_at, to, to_at, len, flags) };
    direct::read_in_kernel(from, || direct::write_in_kernel(to, call))
}

/// Forks without handlers.
#[unsafe(no_mangle)]
pub extern "C" fn _Fork() -> pid_t {
    tracking::forget_all();
    // SAFETY: no pointers.
    let child = unsafe { next::raw_fork() };
    if child == 0 {
        process::is_child();
    }
    child
}

/// Makes a system call.
///
/// # Safety
/// As for `syscall` of the C library.
#[unsafe(no_mangle)]
#[allow(clippy::many_single_char_names, reason = "the arguments have no other names")]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    match number {
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_sendto
        | libc::SYS_recvfrom
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg
        | libc::SYS_recvmsg
        | libc::SYS_recvmmsg
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
        | libc::SYS_connect
        | libc::SYS_shutdown
        | libc::SYS_setsockopt
        | libc::SYS_fcntl
        | libc::SYS_ioctl
        | libc::SYS_close
        | libc::SYS_dup => tracking::forget(a as c_int),
        libc::SYS_dup3 | libc::SYS_sendfile => duplicated(a as c_int, b as c_int),
        libc::SYS_splice => duplicated(a as c_int, c as c_int),
        libc::SYS_close_range => tracking::forget_range(a as c_uint, b as c_uint),
        libc::SYS_clone | libc::SYS_clone3 => tracking::forget_all(),
        libc::SYS_unshare => unshared(a as c_int),
        // Operations in its rings bypass this library.
        libc::SYS_io_uring_setup => tracking::forget_for_ever(),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_dup2 => duplicated(a as c_int, b as c_int),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork | libc::SYS_vfork => tracking::forget_all(),
        _ => {}
    }
    // SAFETY: the caller's promise.
    let done = unsafe { next::syscall(number, a, b, c, d, e, f) };
    // The child has memory of its own, where no thread serves its parent's connections.
    let has_copy = match number {
        libc::SYS_clone => a & c_long::from(libc::CLONE_VM) == 0,
        // SAFETY: the kernel has read the arguments there.
        libc::SYS_clone3 if done == 0 => unsafe { *(a as *const u64) & libc::CLONE_VM as u64 == 0 },
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => true,
        _ => false,
    };
    if done == 0 && has_copy {
        process::is_child();
    }
    done
}

/// Functions that cannot be written in Rust: they have variable arguments, or return twice.
const JUMPS: [&CStr; 4] = [c"dprintf", c"__dprintf_chk", c"vfork", c"clone"];

/// Runs before one of the [`JUMPS`] and returns the address of the C library's function.
extern "C" fn before(which: usize, fd: c_int, _: usize, flags: c_int) -> *mut c_void {
    static KNOWN: [AtomicPtr<c_void>; JUMPS.len()] = [const { AtomicPtr::new(ptr::null_mut()) }; JUMPS.len()];
    match which {
        0 | 1 => tracking::forget(fd),
        // Threads share the descriptors.
        3 if flags & libc::CLONE_FILES != 0 => {}
        _ => tracking::forget_all(),
    }
    match (JUMPS.get(which), KNOWN.get(which)) {
        (Some(name), Some(known)) => next::address(name, known),
        _ => std::process::abort(),
    }
}

/// Replaces one of the [`JUMPS`]: keeps all registers that carry arguments, calls [`before`], and jumps to what it returns, so that
/// the C library's function finds the stack as its caller left it.
macro_rules! jump {
    ($($name:ident = $which:literal;)*) => {$(
        #[doc = concat!("Replaces `", stringify!($name), "`.\n\n# Safety\nAs for the function of the C library.")]
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "push rax", "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                "sub rsp, 128",
                "movaps [rsp], xmm0", "movaps [rsp + 16], xmm1", "movaps [rsp + 32], xmm2", "movaps [rsp + 48], xmm3",
                "movaps [rsp + 64], xmm4", "movaps [rsp + 80], xmm5", "movaps [rsp + 96], xmm6", "movaps [rsp + 112], xmm7",
                "mov rcx, rdx", "mov rdx, rsi", "mov rsi, rdi", "mov edi, {which}",
                "call {before}",
                "mov r11, rax",
                "movaps xmm0, [rsp]", "movaps xmm1, [rsp + 16]", "movaps xmm2, [rsp + 32]", "movaps xmm3, [rsp + 48]",
                "movaps xmm4, [rsp + 64]", "movaps xmm5, [rsp + 80]", "movaps xmm6, [rsp + 96]", "movaps xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi", "pop rax",
                "jmp r11",
                which = const $which,
                before = sym before,
            )
        }

        #[doc = concat!("Replaces `", stringify!($name), "`.\n\n# Safety\nAs for the function of the C library.")]
        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "stp x29, x30, [sp, #-16]!",
                "stp x0, x1, [sp, #-16]!", "stp x2, x3, [sp, #-16]!", "stp x4, x5, [sp, #-16]!",
                "stp x6, x7, [sp, #-16]!", "stp x8, xzr, [sp, #-16]!",
                "stp q0, q1, [sp, #-32]!", "stp q2, q3, [sp, #-32]!", "stp q4, q5, [sp, #-32]!", "stp q6, q7, [sp, #-32]!",
                "mov x3, x2", "mov x2, x1", "mov x1, x0", "mov x0, #{which}",
                "bl {before}",
                "mov x16, x0",
                "ldp q6, q7, [sp], #32", "ldp q4, q5, [sp], #32", "ldp q2, q3, [sp], #32", "ldp q0, q1, [sp], #32",
                "ldp x8, xzr, [sp], #16", "ldp x6, x7, [sp], #16", "ldp x4, x5, [sp], #16",
                "ldp x2, x3, [sp], #16", "ldp x0, x1, [sp], #16",
                "ldp x29, x30, [sp], #16",
                "br x16",
                which = const $which,
                before = sym before,
            )
        }
    )*};
}

jump! {
    dprintf = 0;
    __dprintf_chk = 1;
    vfork = 2;
    clone = 3;
}
