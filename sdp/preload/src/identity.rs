//! Which socket is which: the kernel's cookie names a socket of this network namespace for its whole life and is never used again,
//! unlike a port, an address or a descriptor number.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd as _, RawFd},
};

use rustix::{
    fs::fstat,
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
        sockopt,
    },
};

use crate::{numbers, sys};

/// A listening socket of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listener {
    pub inode: u64,
    cookie: u64,
    /// Other sockets, of any process of the same user, may listen at the same port (`SO_REUSEPORT`).
    pub shares_port: bool,
}

impl Listener {
    pub fn of(fd: RawFd) -> Option<Self> {
        let socket = sys::borrow(fd)?;
        let shares_port = sockopt::socket_reuseport(socket).ok()?;
        Some(Self { inode: fstat(socket).ok()?.st_ino, cookie: cookie(fd)?, shares_port })
    }
}

/// The cookie of a socket (`SO_COOKIE`).
pub fn cookie(fd: RawFd) -> Option<u64> {
    sockopt::socket_cookie(sys::borrow(fd)?).ok().filter(|cookie| *cookie != 0)
}

/// The socket that the kernel finds for a segment from `from` to `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Socket(u64),
    /// An ended connection in TIME-WAIT, from which a SYN of a new one may get to the listening socket.
    Ended,
    None,
    /// The kernel does not answer (no `inet_diag`).
    Unknown,
}

impl Found {
    pub fn is_one_of(self, listeners: &[Listener]) -> bool {
        matches!(self, Self::Socket(cookie) if listeners.iter().any(|listener| listener.cookie == cookie))
    }
}

const REQUEST_BYTES: usize = 72;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
/// Offset of the state in an answer: behind the header of netlink and the family.
const STATE_AT: usize = 17;
const TIME_WAIT: u8 = 6;
/// Offset of the cookie in an answer: behind the header of netlink (16 bytes), four bytes, and ports, addresses and interface.
const COOKIE_AT: usize = 16 + 4 + 40;

/// Asks the kernel which TCP socket has the addresses `to` (its own) and `from`: a connection, or the listening socket that would
/// get the connection. Among listening sockets that share a port, the kernel chooses by the same hash as for a SYN.
pub fn socket_at(to: SocketAddr, from: SocketAddr) -> Found {
    ask(to, from).unwrap_or(Found::Unknown)
}

fn ask(to: SocketAddr, from: SocketAddr) -> Result<Found, Errno> {
    let kernel =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    // The number is given back at once; a fork between would leave it to the child.
    let kernel = numbers::out_of_the_way(kernel);
    send(&kernel, &request(to, from), SendFlags::empty())?;
    let mut answer = [0_u8; 1024];
    let (_, len) = recv(kernel.as_fd(), &mut answer[..], RecvFlags::DONTWAIT)?;
    let answer = answer.get(..len).unwrap_or_default();
    let half = |at: usize| answer.get(at..at + 2).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
    let word = |at: usize| answer.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    Ok(match half(4) {
        Some(SOCK_DIAG_BY_FAMILY) if answer.get(STATE_AT) == Some(&TIME_WAIT) => Found::Ended,
        Some(SOCK_DIAG_BY_FAMILY) => match (word(COOKIE_AT), word(COOKIE_AT + 4)) {
            (Some(low), Some(high)) => Found::Socket(u64::from(high) << 32 | u64::from(low)),
            _ => Found::Unknown,
        },
        Some(NLMSG_ERROR) if word(16) == Some((-libc::ENOENT).cast_unsigned()) => Found::None,
        _ => Found::Unknown,
    })
}

/// `inet_diag_req_v2` for one socket.
fn request(to: SocketAddr, from: SocketAddr) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    let mut put = |at: usize, part: &[u8]| {
        if let Some(place) = bytes.get_mut(at..at + part.len()) {
            place.copy_from_slice(part);
        }
    };
    put(0, &(REQUEST_BYTES as u32).to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &NLM_F_REQUEST.to_ne_bytes());
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    put(16, &[family as u8, libc::IPPROTO_TCP as u8]);
    // All states.
    put(20, &u32::MAX.to_ne_bytes());
    put(24, &to.port().to_be_bytes());
    put(26, &from.port().to_be_bytes());
    for (at, ip) in [(28, to.ip()), (44, from.ip())] {
        match ip {
            IpAddr::V4(ip) => put(at, &ip.octets()),
            IpAddr::V6(ip) => put(at, &ip.octets()),
        }
    }
    // INET_DIAG_NOCOOKIE.
    put(64, &[0xff; 8]);
    bytes
}
