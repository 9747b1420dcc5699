//! TCP sockets of the kernel that have a port, by socket diagnostics (`NETLINK_SOCK_DIAG`).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr as NetlinkAddr};

/// `SOCK_DIAG_BY_FAMILY` of `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of `struct inet_diag_msg`.
const MESSAGE: usize = 72;

/// States of `net/tcp_states.h`.
const FIN_WAIT_1: u8 = 4;
const FIN_WAIT_2: u8 = 5;
const TIME_WAIT: u8 = 6;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;

/// A TCP socket of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TcpSocket {
    /// Its local address, without the mapping of IPv4 to IPv6.
    pub(crate) address: IpAddr,
    /// The interface to which it is restricted, or 0.
    pub(crate) interface: u32,
    /// The inode by which `/proc/PID/fd` names it; 0 if no descriptor refers to it.
    pub(crate) inode: u32,
    state: u8,
}

impl TcpSocket {
    /// Whether it is the rest of a connection whose program has closed it, as in TIME-WAIT.
    pub(crate) fn is_remainder(&self) -> bool {
        match self.state {
            TIME_WAIT => true,
            FIN_WAIT_1 | FIN_WAIT_2 | LAST_ACK | CLOSING => self.inode == 0,
            _ => false,
        }
    }
}

/// The sockets at `port`, in the network namespace of the calling thread. Sockets that are bound and neither listen nor are
/// connected are included since Linux 6.8.
///
/// # Errors
/// The kernel was built without socket diagnostics.
pub(crate) fn tcp_sockets(port: u16) -> io::Result<Vec<TcpSocket>> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&NetlinkAddr::new(0, 0))?;
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        socket.send(&request(family as u8, port), 0)?;
        while let Answer::More = read(&socket.recv_from_full()?.0, port, &mut found)? {}
    }
    Ok(found)
}

/// A request for all sockets of a family at `port`: `struct nlmsghdr`, then `struct inet_diag_req_v2`.
fn request(family: u8, port: u16) -> Vec<u8> {
    const LENGTH: usize = HEADER + 56;
    let mut bytes = Vec::with_capacity(LENGTH);
    bytes.extend((LENGTH as u32).to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family, libc::IPPROTO_TCP as u8, 0, 0]);
    // Every state.
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(port.to_be_bytes());
    bytes.resize(LENGTH, 0);
    bytes
}

/// Whether further datagrams of a dump follow.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    More,
    Done,
}

/// Adds the sockets at `port` in one datagram to `found`. Linux 6.18 lists sockets that are only bound whatever port was
/// requested.
fn read(mut datagram: &[u8], port: u16, found: &mut Vec<TcpSocket>) -> io::Result<Answer> {
    while let Some(header) = datagram.first_chunk::<HEADER>() {
        let length = u32_at(header, 0) as usize;
        let body = datagram.get(HEADER..length).ok_or(io::ErrorKind::InvalidData)?;
        match i32::from(u16::from_ne_bytes([header[4], header[5]])) {
            libc::NLMSG_DONE => return Ok(Answer::Done),
            libc::NLMSG_ERROR => {
                let error = body.first_chunk::<4>().map_or(0, |code| i32::from_ne_bytes(*code));
                return Err(io::Error::from_raw_os_error(error.saturating_neg()));
            }
            _ => found.extend(body.first_chunk::<MESSAGE>().and_then(|message| socket(message, port))),
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(Answer::More)
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |value| u32::from_ne_bytes(*value))
}

/// The socket that a `struct inet_diag_msg` describes, if it is at `port`.
fn socket(message: &[u8; MESSAGE], port: u16) -> Option<TcpSocket> {
    if message.get(4..6)? != port.to_be_bytes() {
        return None;
    }
    let address = message.get(8..24)?.first_chunk::<16>()?;
    let address = if i32::from(message[0]) == libc::AF_INET {
        IpAddr::from(Ipv4Addr::from(*address.first_chunk::<4>()?))
    } else {
        IpAddr::from(Ipv6Addr::from(*address)).to_canonical()
    };
    let (interface, inode) = (u32_at(message, 40), u32_at(message, 68));
    Some(TcpSocket { address, interface, inode, state: message[1] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_listener_and_the_remainder_of_a_connection_are_told_apart() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        // The end that closes first goes to TIME-WAIT.
        drop(listener.accept().unwrap());
        drop(client);
        let sockets = tcp_sockets(port).unwrap();
        let [held, remains]: [Vec<_>; 2] = [false, true]
            .map(|remainder| sockets.iter().filter(|one| one.is_remainder() == remainder).collect());
        assert!(held.len() == 1 && held[0].inode != 0, "{sockets:?}");
        assert_eq!(remains.len(), 1, "{sockets:?}");
        assert!(sockets.iter().all(|one| one.address == IpAddr::from([127, 0, 0, 1]) && one.interface == 0));
        drop(listener);
        assert!(tcp_sockets(port).unwrap().iter().all(TcpSocket::is_remainder));
    }

    #[test]
    fn datagrams_that_are_cut_short_are_errors() {
        let mut datagram = vec![0; HEADER + MESSAGE];
        datagram[..4].copy_from_slice(&((HEADER + MESSAGE) as u32).to_ne_bytes());
        datagram[4] = BY_FAMILY as u8;
        datagram[HEADER] = libc::AF_INET as u8;
        datagram[HEADER + 4..][..2].copy_from_slice(&7u16.to_be_bytes());
        let mut found = Vec::new();
        assert_eq!(read(&datagram, 7, &mut found).unwrap(), Answer::More);
        assert_eq!(read(&datagram, 8, &mut found).unwrap(), Answer::More);
        assert_eq!(found.len(), 1);
        assert!(read(&datagram[..HEADER + 8], 7, &mut found).is_err());
        datagram[0] = 3;
        assert!(read(&datagram, 7, &mut found).is_err());
    }
}
