//! System calls past the functions that this library replaces, addresses of the C interface, and hooks of the C library.

use std::{
    io,
    mem::{MaybeUninit, size_of},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    ptr,
};

use libc::{
    c_int, c_long, c_void, sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t,
};
use rustix::{
    io::{Errno, ioctl_fionread},
    net::{SendFlags, sockopt},
};
use xwarp_verbs::Memory;

use crate::next;

/// A system call past the functions that this library replaces.
macro_rules! kernel {
    ($number:expr $(, $argument:expr)*) => {{
        let mut arguments = [0; 6];
        #[allow(clippy::cast_lossless, reason = "numbers and pointers of several types")]
        for (place, argument) in arguments.iter_mut().zip([$($argument as c_long),*]) {
            *place = argument;
        }
        let [a, b, c, d, e, f] = arguments;
        next::syscall($number, a, b, c, d, e, f)
    }};
}

/// `connect` of the kernel.
///
/// # Safety
/// `address` is what the caller of `connect` gave.
pub unsafe fn connect(fd: RawFd, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the kernel checks the pointer.
    unsafe { kernel!(libc::SYS_connect, fd, address, len) as c_int }
}

/// `listen` of the kernel.
pub fn listen(fd: RawFd, backlog: c_int) -> c_int {
    // SAFETY: no pointers.
    unsafe { kernel!(libc::SYS_listen, fd, backlog) as c_int }
}

/// A call that stores an address.
#[derive(Debug, Clone, Copy)]
pub enum Naming {
    Local,
    Peer,
    /// `accept4` with these flags.
    Accept(c_int),
}

/// `getsockname`, `getpeername` or `accept4` of the kernel.
///
/// # Safety
/// The pointers are what the caller gave to one of these functions.
pub unsafe fn name(call: Naming, fd: RawFd, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the kernel checks the pointers.
    unsafe {
        let done = match call {
            Naming::Local => kernel!(libc::SYS_getsockname, fd, address, len),
            Naming::Peer => kernel!(libc::SYS_getpeername, fd, address, len),
            Naming::Accept(flags) => kernel!(libc::SYS_accept4, fd, address, len, flags),
        };
        done as c_int
    }
}

/// An address of a socket in the kernel's form.
pub fn address_of(call: Naming, fd: RawFd) -> Option<SocketAddr> {
    let mut storage = MaybeUninit::<sockaddr_storage>::uninit();
    let address = storage.as_mut_ptr().cast::<sockaddr>();
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    // SAFETY: the storage has room for every address, and the kernel returns the stored length.
    unsafe {
        if name(call, fd, address, &raw mut len) != 0 {
            return None;
        }
        read_address(address, len)
    }
}

/// Whether a read of the kernel's socket finds bytes.
pub fn has_bytes(fd: RawFd) -> bool {
    borrow(fd).is_some_and(|fd| ioctl_fionread(fd).is_ok_and(|waiting| waiting > 0))
}

/// Bytes that were written to a TCP socket and that its peer has not acknowledged (`SIOCOUTQ`).
pub fn unacknowledged(fd: RawFd) -> Option<c_int> {
    let mut bytes = 0;
    // SAFETY: the call stores a number.
    (unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) } == 0).then_some(bytes)
}

/// Lets the kernel choose the sizes of a socket's buffers again after they were set.
pub fn grow_buffers(socket: BorrowedFd<'_>) {
    const SO_BUF_LOCK: c_int = 72;
    const MAX_BYTES: usize = 4 << 20;
    // The kernel limits the value to a much smaller one.
    let _ = sockopt::set_socket_send_buffer_size(socket, MAX_BYTES);
    let _ = sockopt::set_socket_recv_buffer_size(socket, MAX_BYTES);
    let unlocked: c_int = 0;
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: the value is a number. Kernels before 5.15 do not know the option.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_BUF_LOCK,
            (&raw const unlocked).cast(),
            len,
        );
    }
}

/// The number of bytes for which reads of a socket wait (`SO_RCVLOWAT`).
pub fn low_mark(fd: RawFd) -> c_int {
    let mut bytes: c_int = 1;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: the call stores a number.
    let known = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, (&raw mut bytes).cast(), &raw mut len) == 0
    };
    if known { bytes } else { 1 }
}

/// The time limit of reads of a socket (`SO_RCVTIMEO`) in nanoseconds; 0 if there is none.
pub fn read_limit_ns(fd: RawFd) -> u64 {
    let Some(socket) = borrow(fd) else { return 0 };
    let limit = sockopt::socket_timeout(socket, sockopt::Timeout::Recv).ok().flatten();
    limit.map_or(0, |limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Ends the calling thread if another thread has cancelled it.
pub fn cancellation_point() {
    // SAFETY: no arguments.
    unsafe { pthread_testcancel() };
}

/// While it exists, the calling thread cannot be cancelled.
pub struct Uncancelled(c_int);

/// Sets whether the calling thread can be cancelled; returns what was set before.
fn set_cancel_state(state: c_int) -> c_int {
    let mut before = 0;
    // SAFETY: the call stores a number.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

impl Uncancelled {
    pub fn new() -> Self {
        Self(set_cancel_state(PTHREAD_CANCEL_DISABLE))
    }

    /// Ends the thread if another thread has cancelled it.
    pub fn cancellation_point(&self) {
        set_cancel_state(self.0);
        cancellation_point();
        set_cancel_state(PTHREAD_CANCEL_DISABLE);
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        set_cancel_state(self.0);
    }
}

/// Whether the next byte of a socket that keeps urgent data in line is the urgent byte (`SIOCATMARK`).
pub fn is_at_mark(socket: &OwnedFd) -> bool {
    const SIOCATMARK: libc::Ioctl = 0x8905;
    let mut at_mark: c_int = 0;
    // SAFETY: the call stores a number.
    unsafe { libc::ioctl(socket.as_raw_fd(), SIOCATMARK, &raw mut at_mark) == 0 && at_mark != 0 }
}

/// `recv` of the kernel, which does not wait, into a part of `memory`.
pub fn receive(socket: &OwnedFd, memory: &Memory, offset: usize, len: usize) -> Result<usize, Errno> {
    if !memory.contains(offset, len) {
        return Err(Errno::FAULT);
    }
    // SAFETY: the part is inside the memory, which the caller borrows, and which is used as bytes only.
    let done = unsafe {
        let to = memory.as_ptr().add(offset);
        let (flags, nobody) = (libc::MSG_DONTWAIT, ptr::null_mut::<c_void>());
        kernel!(libc::SYS_recvfrom, socket.as_raw_fd(), to, len, flags, nobody, nobody)
    };
    usize::try_from(done).map_err(|_| Errno::from_raw_os_error(errno()))
}

/// `send` of the kernel from a part of `memory`.
pub fn send(
    socket: &OwnedFd,
    memory: &Memory,
    offset: usize,
    len: usize,
    flags: SendFlags,
) -> Result<usize, Errno> {
    if !memory.contains(offset, len) {
        return Err(Errno::FAULT);
    }
    // SAFETY: as above.
    let done = unsafe {
        let from = memory.as_ptr().add(offset);
        let nobody = ptr::null_mut::<c_void>();
        kernel!(libc::SYS_sendto, socket.as_raw_fd(), from, len, flags.bits(), nobody, 0)
    };
    usize::try_from(done).map_err(|_| Errno::from_raw_os_error(errno()))
}

/// Ends the process at once.
pub fn exit_group(status: c_int) -> ! {
    loop {
        // SAFETY: no pointers; the call does not return.
        unsafe { kernel!(libc::SYS_exit_group, status) };
    }
}

/// `close` of the kernel.
pub fn close(fd: RawFd) {
    // SAFETY: no pointers; the number was returned to us, and no other code has it.
    unsafe { kernel!(libc::SYS_close, fd) };
}

pub fn set_errno(error: c_int) {
    // SAFETY: the location of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = error };
}

pub fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// A descriptor of the caller, for the time of one call.
pub fn borrow(fd: RawFd) -> Option<BorrowedFd<'static>> {
    // SAFETY: used for system calls only, which check the number; the caller keeps it open during its call.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Reads an IPv4 or IPv6 address.
///
/// # Safety
/// `address` points to `len` readable bytes, or is null.
pub unsafe fn read_address(address: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    let len = len as usize;
    if address.is_null() || len < size_of::<sa_family_t>() {
        return None;
    }
    // SAFETY: there are enough bytes for the family, and below for each kind of address; the pointer need not be aligned.
    unsafe {
        let family = &raw const (*address).sa_family;
        match c_int::from(family.read_unaligned()) {
            libc::AF_INET if len >= size_of::<sockaddr_in>() => {
                let four = address.cast::<sockaddr_in>().read_unaligned();
                let ip = four.sin_addr.s_addr.to_ne_bytes();
                Some((ip, u16::from_be(four.sin_port)).into())
            }
            libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
                let six = address.cast::<sockaddr_in6>().read_unaligned();
                Some((six.sin6_addr.s6_addr, u16::from_be(six.sin6_port)).into())
            }
            _ => None,
        }
    }
}

/// An address in the form of IPv6 sockets.
pub fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

/// Stores an address like the kernel, in the form of an IPv6 (`six`) or IPv4 socket: cut to the caller's room, with the
/// whole length.
///
/// # Safety
/// `len` is null, or `*len` bytes at `address` may be written.
pub unsafe fn store_address(to: SocketAddr, six: bool, address: *mut sockaddr, len: *mut socklen_t) {
    if address.is_null() || len.is_null() {
        return;
    }
    let (four, sixth);
    let (from, whole) = match (to.ip(), six) {
        (IpAddr::V4(ip), false) => {
            four = sockaddr_in {
                sin_family: libc::AF_INET as sa_family_t,
                sin_port: to.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) },
                sin_zero: [0; 8],
            };
            (ptr::from_ref(&four).cast::<u8>(), size_of::<sockaddr_in>())
        }
        (ip, _) => {
            sixth = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as sa_family_t,
                sin6_port: to.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: mapped(ip).octets() },
                sin6_scope_id: 0,
            };
            (ptr::from_ref(&sixth).cast::<u8>(), size_of::<sockaddr_in6>())
        }
    };
    // SAFETY: at most the caller's room and at most the structure's size; both exist until here.
    unsafe {
        let room = (len.read_unaligned() as usize).min(whole);
        ptr::copy_nonoverlapping(from, address.cast::<u8>(), room);
        len.write_unaligned(whole as socklen_t);
    }
}

/// Blocks all signals in the calling thread while it exists, so that threads that are started meanwhile never run a signal
/// handler of the program.
pub struct Quiet(libc::sigset_t);

/// Signals by which the kernel reports a fault of the thread itself.
const FAULTS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

impl Quiet {
    pub fn new() -> Self {
        Self::but_for(&[])
    }

    /// Does not block the signals that an access to the program's memory may cause.
    pub fn but_for_faults() -> Self {
        Self::but_for(&FAULTS)
    }

    fn but_for(left: &[c_int]) -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: both sets are written before they are read.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for signal in left {
                libc::sigdelset(all.as_mut_ptr(), *signal);
            }
            libc::sigemptyset(before.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }

    /// Whether a signal with a handler is pending; with `restarts` false, only one whose handler interrupts calls
    /// (without `SA_RESTART`).
    pub fn has_signal(&self, restarts: bool) -> bool {
        let mut pending = MaybeUninit::uninit();
        // SAFETY: the set is written before it is read; `before` was initialised; a null action changes nothing, and an action is
        // read only if the call has stored it.
        unsafe {
            libc::sigemptyset(pending.as_mut_ptr());
            libc::sigpending(pending.as_mut_ptr());
            let pending = pending.assume_init();
            (1..=libc::SIGRTMAX()).any(|signal| {
                if libc::sigismember(&raw const pending, signal) != 1
                    || libc::sigismember(&raw const self.0, signal) != 0
                {
                    return false;
                }
                let mut action = MaybeUninit::<libc::sigaction>::uninit();
                libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) == 0 && {
                    let action = action.assume_init();
                    !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
                        && (restarts || action.sa_flags & libc::SA_RESTART == 0)
                }
            })
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: the set was initialised.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// Registers `before` to run before each fork, `parent` and `child` after it, and `exit` at the normal end of the
/// process.
pub fn on_fork_and_exit(
    before: extern "C" fn(),
    parent: extern "C" fn(),
    child: extern "C" fn(),
    exit: extern "C" fn(),
) {
    // SAFETY: the functions live as long as the process, since the library is never unloaded.
    unsafe {
        libc::pthread_atfork(Some(before), Some(parent), Some(child));
        libc::atexit(exit);
    }
}

/// An interface of this network namespace and one of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    pub interface: String,
    pub ip: IpAddr,
    pub loopback: bool,
}

/// All addresses of interfaces that are up.
pub fn addresses() -> io::Result<Vec<Address>> {
    let mut first = ptr::null_mut();
    // SAFETY: the list is freed below, after its last use.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut all = Vec::new();
    let mut next = first;
    // SAFETY: the C library made the list and its strings; an address has the length of its family.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let flags = entry.ifa_flags as c_int;
        // SAFETY: as above.
        let address = unsafe { read_address(entry.ifa_addr, family_len(entry.ifa_addr)) };
        if let Some(address) = address
            && flags & libc::IFF_UP != 0
        {
            // SAFETY: as above.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            all.push(Address {
                interface: name.to_string_lossy().into_owned(),
                ip: address.ip(),
                loopback: flags & libc::IFF_LOOPBACK != 0,
            });
        }
    }
    // SAFETY: created above, and no reference into it is kept.
    unsafe { libc::freeifaddrs(first) };
    Ok(all)
}

/// Length of an address of the C library by its family.
///
/// # Safety
/// `address` is null or a valid address.
unsafe fn family_len(address: *const sockaddr) -> socklen_t {
    // SAFETY: the caller's promise.
    let family = unsafe { address.as_ref() }.map_or(libc::AF_UNSPEC, |a| c_int::from(a.sa_family));
    let len = match family {
        libc::AF_INET => size_of::<sockaddr_in>(),
        libc::AF_INET6 => size_of::<sockaddr_in6>(),
        _ => 0,
    };
    len as socklen_t
}
