//! The functions that replace those of the C library. Each calls the kernel first or last, and ignores sockets that are
//! not TCP sockets.

use std::{
    mem::{MaybeUninit, size_of},
    net::SocketAddr,
    os::fd::{BorrowedFd, RawFd},
};

use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use rustix::net::{SocketType, ipproto, sockopt};
use xwarp_sdp::{
    SdpStream,
    rules::{Role, Use},
};

use crate::{
    direct,
    legs::{self, Names},
    next,
    process::{self, Process, Source, Verdict},
    relay::{Gate, Joined},
    sys::{self, Naming, Quiet},
    tracking,
};

/// Run when the library is loaded.
// SAFETY: the section holds pointers to functions of this kind; the C library is ready when they run.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = {
    extern "C" fn init() {
        process::init();
    }
    init
};

fn is_tcp(socket: BorrowedFd<'_>) -> bool {
    sockopt::socket_type(socket) == Ok(SocketType::STREAM)
        && sockopt::socket_protocol(socket) == Ok(Some(ipproto::TCP))
}

/// An address of a socket in the kernel's form, and whether the socket is an IPv6 socket.
fn kernel_name(call: Naming, fd: RawFd) -> Option<(SocketAddr, bool)> {
    let address = sys::address_of(call, fd)?;
    Some((address, address.is_ipv6()))
}

/// The SDP addresses of a socket that is connected to a leg, and whether the socket is an IPv6 socket.
fn names(fd: RawFd) -> Option<(Names, bool)> {
    let (local, six) = kernel_name(Naming::Local, fd)?;
    let (peer, _) = kernel_name(Naming::Peer, fd)?;
    Some((legs::find((local, peer))?, six))
}

/// Connects a socket, over SDP if the rules allow it and the peer's host supports it.
///
/// # Safety
/// As for `connect` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the caller's promise.
    let target = unsafe { sys::read_address(address, len) };
    if target.is_none() {
        // The call may dissolve the connection.
        tracking::forget(fd);
    }
    let verdict = target.zip(sys::borrow(fd)).and_then(|(target, socket)| {
        if !is_tcp(socket) || kernel_name(Naming::Peer, fd).is_some() {
            return None;
        }
        let target = SocketAddr::new(target.ip().to_canonical(), target.port());
        let process = Process::current()?;
        let _quiet = Quiet::new();
        let bound = kernel_name(Naming::Local, fd).map(|(local, _)| local.ip().to_canonical());
        let ip = bound.filter(|ip| !ip.is_unspecified());
        let source = Source { ip, chosen_port: tracking::has_chosen_port(fd) };
        match process.connect(socket, source, target) {
            Verdict::Kernel => None,
            Verdict::Failed(error) => Some(Err(error)),
            Verdict::Through(through) => pass(process, fd, *through, target),
        }
    });
    match verdict {
        // SAFETY: the caller's promise.
        None => unsafe { sys::connect(fd, address, len) },
        Some(Ok(())) => 0,
        Some(Err(error)) => {
            sys::set_errno(error);
            -1
        }
    }
}

/// Gives a socket an address.
///
/// # Safety
/// As for `bind` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the caller's promise.
    let done = unsafe { next::bind(fd, address, len) };
    if done == 0 {
        // SAFETY: the kernel has read the address there.
        let port = unsafe { sys::read_address(address, len) }.map_or(0, |address| address.port());
        tracking::bound(fd, port != 0);
    }
    done
}

/// Connects the program's socket to the gate, and starts the relay. `None`: the kernel cannot connect it, so kernel TCP
/// is used unless the rules require SDP.
fn pass(
    process: &'static Process,
    fd: RawFd,
    (gate, stream): (Gate, SdpStream),
    target: SocketAddr,
) -> Option<Result<(), c_int>> {
    let mut storage = MaybeUninit::<sockaddr_storage>::zeroed();
    let address = storage.as_mut_ptr().cast::<sockaddr>();
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    // SAFETY: the storage has room for every address, and holds one when the kernel reads it.
    let done = unsafe {
        sys::store_address(gate.address, gate.address.is_ipv6(), address, &raw mut len);
        sys::connect(fd, address, len)
    };
    let error = sys::errno();
    if done != 0 && error != libc::EINPROGRESS {
        tracing::debug!(error, "the socket cannot be connected over the loopback");
        stream.abort();
        let must = process.decide(Role::Connect, target) == Use::Sdp;
        return must.then_some(Err(error));
    }
    let started = kernel_name(Naming::Local, fd).ok_or_else(std::io::Error::last_os_error);
    let started = started.and_then(|(own, _)| {
        legs::insert((own, gate.address), (stream.local_addr()?, target));
        let leg = gate.pass(own).inspect_err(|_| stream.abort())?;
        process.relays.start(&Joined::new(leg, (own, gate.address), stream))
    });
    direct::hint(fd, gate.address);
    match started {
        Ok(()) if done == 0 => Some(Ok(())),
        Ok(()) => Some(Err(error)),
        // Dropping the gate resets the socket.
        Err(_) => Some(Err(libc::ECONNRESET)),
    }
}

/// Makes a socket listen, also over SDP if the rules allow it.
#[unsafe(no_mangle)]
pub extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    let done = sys::listen(fd, backlog);
    if done == 0
        && sys::borrow(fd).is_some_and(is_tcp)
        && let Some((local, _)) = kernel_name(Naming::Local, fd)
        && let Some(process) = Process::current()
    {
        let _quiet = Quiet::new();
        process.listening(local);
    }
    done
}

/// The address of a socket.
///
/// # Safety
/// As for `getsockname` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { translated(Naming::Local, fd, address, len) }
}

/// The address of a socket's peer.
///
/// # Safety
/// As for `getpeername` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { translated(Naming::Peer, fd, address, len) }
}

/// Accepts a connection.
///
/// # Safety
/// As for `accept` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { translated(Naming::Accept(0), fd, address, len) }
}

/// Accepts a connection, with flags.
///
/// # Safety
/// As for `accept4` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { translated(Naming::Accept(flags), fd, address, len) }
}

/// Calls the kernel, and stores the address of the connection over SDP instead of that on the loopback.
///
/// # Safety
/// The pointers are those of the caller of one of the functions above.
unsafe fn translated(call: Naming, fd: RawFd, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    loop {
        // The kernel stores the whole length there, which may exceed the room. SAFETY: the caller's promise; the kernel
        // refuses what is null.
        let room = if len.is_null() { 0 } else { unsafe { len.read_unaligned() } };
        let serial = tracking::serial();
        // SAFETY: the caller's promise.
        let done = unsafe { sys::name(call, fd, address, len) };
        if done < 0 {
            return done;
        }
        if matches!(call, Naming::Accept(_)) {
            tracking::created(done, serial);
        }
        let socket = if matches!(call, Naming::Accept(_)) { done } else { fd };
        let before = sys::errno();
        let found = names(socket);
        if found.is_none() && matches!(call, Naming::Accept(_)) && must_be_sdp(done) {
            sys::close(done);
            if !len.is_null() {
                // SAFETY: as above.
                unsafe { len.write_unaligned(room) };
            }
            continue;
        }
        if found.is_some()
            && matches!(call, Naming::Accept(_))
            && Process::existing().is_some()
            && let Some((leg, _)) = kernel_name(Naming::Peer, done)
        {
            direct::hint(done, leg);
        }
        sys::set_errno(before);
        if let Some(((local, peer), six)) = found
            && !len.is_null()
        {
            let shown = if matches!(call, Naming::Local) { local } else { peer };
            // SAFETY: the caller's promise.
            unsafe {
                len.write_unaligned(room);
                sys::store_address(shown, six, address, len);
            }
        }
        return done;
    }
}

/// Whether the rules forbid TCP for an accepted connection.
fn must_be_sdp(accepted: RawFd) -> bool {
    let Some((local, _)) = kernel_name(Naming::Local, accepted) else { return false };
    Process::existing()
        .is_some_and(|process| !local.ip().is_loopback() && process.decide(Role::Listen, local) == Use::Sdp)
}

/// Ends the process without exit handlers, after the peers have received all data.
#[unsafe(no_mangle)]
pub extern "C" fn _exit(status: c_int) -> ! {
    finish(status)
}

/// The same.
#[unsafe(no_mangle)]
pub extern "C" fn _Exit(status: c_int) -> ! {
    finish(status)
}

fn finish(status: c_int) -> ! {
    if let Some(process) = Process::existing() {
        process.finish();
    }
    sys::exit_group(status)
}
