//! Port reservation: a kernel socket that is bound to a TCP port, without listening, reserves the port for us while
//! it is open. The kernel gives the port to no other socket and resets segments to it that are not steered to us.
//!
//! The socket is restricted to its interface: reservations of one port on different interfaces do not exclude each other,
//! but each excludes a socket of the kernel's TCP that is not restricted. Connections that the kernel's TCP remembers after their
//! end (TIME-WAIT) do not exclude a reservation.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rand::Rng;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, bind, getsockname, listen, shutdown, socket_with,
    sockopt,
};

use xwarp_control::{Reason, Reply, Request};
use xwarp_prog::{Holder, socket_user};

use crate::error::PortError;
use crate::helper::{CallError, Helper, PATIENCE, unexpected};
use crate::netlink::sockets::{TcpSocket, tcp_sockets};
use crate::sys::{NotInherited, bind_to_interface};

/// The dynamic ports of RFC 6335 section 6, used when the kernel's range is not readable.
const DYNAMIC_PORTS: RangeInclusive<u16> = 49152..=65535;

/// A port that the kernel reserves for us until this is dropped.
#[derive(Debug)]
#[must_use = "dropping the reservation frees the port"]
pub struct PortReservation {
    address: Option<IpAddr>,
    port: u16,
    held: Held,
}

/// The resource that keeps a port reserved.
#[derive(Debug)]
enum Held {
    Socket { _not_inherited: NotInherited, bound: OwnedFd },
    Granted { _port: GrantedPort },
}

impl Held {
    fn by(socket: OwnedFd) -> Self {
        Self::Socket { _not_inherited: NotInherited::new([socket.as_fd()]), bound: socket }
    }
}

/// A port that a helper has reserved for this process.
#[derive(Debug)]
struct GrantedPort {
    helper: Arc<Helper>,
    address: Option<IpAddr>,
    port: u16,
    /// The process that owns the port; a child (`fork`) has a copy of this value.
    owner: u32,
}

impl Drop for GrantedPort {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            self.helper.notify(Request::Release { address: self.address, port: self.port });
        }
    }
}

impl PortReservation {
    /// The reserved address; `None` for all addresses of both families.
    pub fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The kernel socket that is bound to the port, unless a helper has it.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        match &self.held {
            Held::Socket { bound, .. } => Some(bound.as_fd()),
            Held::Granted { .. } => None,
        }
    }

    /// The reservation that consists of this socket, which another process has made by [`reserve_port`].
    ///
    /// # Errors
    /// It is no such socket.
    pub fn of_socket(socket: OwnedFd) -> io::Result<Self> {
        let address = SocketAddr::try_from(getsockname(&socket)?)?;
        let port = address.port();
        if port == 0 || sockopt::socket_type(&socket)? != SocketType::STREAM {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let address = Some(address.ip()).filter(|ip| !ip.is_unspecified());
        Ok(Self { address, port, held: Held::by(socket) })
    }
}

/// Reserves `port`, or a random ephemeral one (RFC 6056 section 3.3.1), on `address`, or (`None`) on all
/// addresses of both families, of the interface with the index `interface` (0: of all interfaces); in the network namespace of
/// the calling thread.
///
/// A port is not in use because of connections in TIME-WAIT, if their program had set `SO_REUSEADDR`, as servers do.
///
/// # Errors
/// The port is in use, privileged, or the address not this host's.
pub fn reserve_port(
    address: Option<IpAddr>,
    port: Option<u16>,
    interface: u32,
) -> Result<PortReservation, PortError> {
    let address = address.filter(|a| !a.is_unspecified());
    match port {
        Some(port) if port != 0 => reserve_named(address, port, interface),
        _ => reserve_ephemeral(address, interface),
    }
}

/// Reserves a random port of `range`, as [`reserve_port`] does.
///
/// # Errors
/// All are in use, or the address is not this host's.
pub fn reserve_port_in(
    address: Option<IpAddr>,
    range: RangeInclusive<u16>,
    interface: u32,
) -> Result<PortReservation, PortError> {
    reserve_any(address.filter(|a| !a.is_unspecified()), &range, &[], interface)
}

/// Reserves a port through `helper`; see [`reserve_port`].
pub(crate) fn reserve_by_helper(
    helper: &Arc<Helper>,
    address: Option<IpAddr>,
    port: u16,
) -> Result<PortReservation, PortError> {
    let address = address.filter(|a| !a.is_unspecified());
    match helper.call(Request::Reserve { address, port }, PATIENCE) {
        Ok(Reply::Reserved { port }) => {
            let granted =
                GrantedPort { helper: Arc::clone(helper), address, port, owner: std::process::id() };
            Ok(PortReservation { address, port, held: Held::Granted { _port: granted } })
        }
        Ok(other) => Err(PortError::Helper(io::Error::from(unexpected(&other)).to_string())),
        Err(CallError::Refused(refusal)) => {
            let named = named(address, port);
            Err(match refusal.reason {
                Reason::PortInUse => PortError::InUse { address: named, holder: None },
                Reason::Permission if port < 1024 => PortError::Permission(named),
                Reason::NotOurAddress => PortError::NotOurAddress(named.ip()),
                Reason::PortsExhausted => PortError::Exhausted(named.ip()),
                _ => PortError::Helper(refusal.text),
            })
        }
        Err(error) => Err(PortError::Helper(io::Error::from(error).to_string())),
    }
}

/// The address in errors.
fn named(address: Option<IpAddr>, port: u16) -> SocketAddr {
    SocketAddr::new(address.unwrap_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED)), port)
}

fn reserve_ephemeral(address: Option<IpAddr>, interface: u32) -> Result<PortReservation, PortError> {
    reserve_any(address, &ephemeral_range(), &administratively_reserved(), interface)
}

/// Reserves the first free port of the range outside of `reserved`, starting at a random one.
fn reserve_any(
    address: Option<IpAddr>,
    range: &RangeInclusive<u16>,
    reserved: &[RangeInclusive<u16>],
    interface: u32,
) -> Result<PortReservation, PortError> {
    let count = u32::from(range.end() - range.start()) + 1;
    let mut rng = rand::rng();
    let first = rng.random_range(0..count);
    for step in 0..count {
        let port = range.start() + ((first + step) % count) as u16;
        if reserved.iter().any(|r| r.contains(&port)) {
            continue;
        }
        match reserve(address, port, interface) {
            Err(PortError::InUse { .. }) => {}
            done => return done,
        }
    }
    Err(PortError::Exhausted(address.unwrap_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED))))
}

/// How a socket is bound to a port that others have or had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// No other socket has the port.
    Nothing,
    /// The kernel's TCP still remembers old connections of the port.
    Remainders,
}

fn reserve(address: Option<IpAddr>, port: u16, interface: u32) -> Result<PortReservation, PortError> {
    socket_at(address, port, interface, Beside::Nothing)
        .map(|socket| PortReservation { address, port, held: Held::by(socket) })
        .map_err(|errno| error(address, port, errno, None))
}

/// As [`reserve`], also while the kernel's TCP remembers old connections of the port.
fn reserve_named(address: Option<IpAddr>, port: u16, interface: u32) -> Result<PortReservation, PortError> {
    let free = reserve(address, port, interface);
    let Err(PortError::InUse { .. }) = free else { return free };
    let Ok(sockets) = tcp_sockets(port) else { return free };
    let is_obstacle = |socket: &&TcpSocket| !socket.is_remainder() && meets(socket, address, interface);
    let in_use = |inode| error(address, port, Errno::ADDRINUSE, socket_user(inode));
    if let Some(obstacle) = sockets.iter().find(is_obstacle) {
        return Err(in_use(obstacle.inode));
    }
    let socket = socket_at(address, port, interface, Beside::Remainders);
    socket
        .map(|socket| PortReservation { address, port, held: Held::by(socket) })
        .map_err(|errno| error(address, port, errno, None))
}

/// Whether a socket of the kernel can receive what comes to `address` over `interface`.
fn meets(socket: &TcpSocket, address: Option<IpAddr>, interface: u32) -> bool {
    let same_address = socket.address.is_unspecified() || address.is_none_or(|ip| ip == socket.address);
    let same_interface = socket.interface == 0 || interface == 0 || socket.interface == interface;
    same_address && same_interface
}

fn error(address: Option<IpAddr>, port: u16, errno: Errno, holder: Option<Holder>) -> PortError {
    let named = named(address, port);
    match errno {
        Errno::ADDRINUSE => PortError::InUse { address: named, holder },
        Errno::ACCESS | Errno::PERM => PortError::Permission(named),
        Errno::ADDRNOTAVAIL => PortError::NotOurAddress(named.ip()),
        errno => PortError::System { address: named, source: errno.into() },
    }
}

fn socket_at(address: Option<IpAddr>, port: u16, interface: u32, beside: Beside) -> Result<OwnedFd, Errno> {
    match address {
        Some(IpAddr::V6(ip)) if ip.is_unicast_link_local() => {
            bound_socket(SocketAddrV6::new(ip, port, 0, interface).into(), interface, beside)
        }
        Some(ip) => bound_socket(SocketAddr::new(ip, port), interface, beside),
        // One IPv6 socket reserves the port for both families, unless the host has no IPv6.
        None => {
            let at = |ip: IpAddr| bound_socket(SocketAddr::new(ip, port), interface, beside);
            match at(Ipv6Addr::UNSPECIFIED.into()) {
                Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => at(Ipv4Addr::UNSPECIFIED.into()),
                other => other,
            }
        }
    }
}

fn bound_socket(address: SocketAddr, interface: u32, beside: Beside) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    if interface != 0 {
        match bind_to_interface(socket.as_fd(), interface) {
            // The interface was removed, or is in another namespace: the port is reserved on all interfaces of this one.
            Ok(()) | Err(Errno::NODEV) => {}
            Err(errno) => return Err(errno),
        }
    }
    if beside == Beside::Nothing {
        bind(&socket, &address)?;
        return Ok(socket);
    }
    // SO_REUSEADDR admits a socket beside those in TIME-WAIT, but also beside others with this option. The first of them that
    // listens excludes the others, and turning the option off then excludes all later ones. The end of listening does not free
    // the port, because it was chosen by name.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, 0)?;
    sockopt::set_socket_reuseaddr(&socket, false)?;
    shutdown(&socket, Shutdown::Both)?;
    Ok(socket)
}

/// The range from which the kernel chooses local ports.
pub fn ephemeral_range() -> RangeInclusive<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    parse_range(&text).unwrap_or(DYNAMIC_PORTS)
}

fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut ports = text.split_whitespace().map(str::parse::<u16>);
    match (ports.next(), ports.next()) {
        (Some(Ok(first)), Some(Ok(last))) if 0 < first && first <= last => Some(first..=last),
        _ => None,
    }
}

/// Ports that the administrator excludes from automatic choice.
fn administratively_reserved() -> Vec<RangeInclusive<u16>> {
    parse_list(&std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default())
}

fn parse_list(text: &str) -> Vec<RangeInclusive<u16>> {
    let parse = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    const LOCALHOST: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));

    #[test]
    fn a_reserved_port_is_taken_until_it_is_dropped() {
        let held = reserve_port(LOCALHOST, None, 0).unwrap();
        let port = held.port();
        assert!(ephemeral_range().contains(&port));
        assert!(TcpListener::bind(("127.0.0.1", port)).is_err());
        assert!(
            matches!(reserve_port(LOCALHOST, Some(port), 0), Err(PortError::InUse { address, .. }) if address.port() == port)
        );
        drop(held);
        drop(TcpListener::bind(("127.0.0.1", port)).unwrap());
    }

    #[test]
    fn the_wildcard_takes_the_port_in_both_families() {
        let held = reserve_port(None, None, 0).unwrap();
        assert_eq!(held.address(), None);
        assert!(TcpListener::bind(("127.0.0.1", held.port())).is_err());
        assert!(matches!(reserve_port(LOCALHOST, Some(held.port()), 0), Err(PortError::InUse { .. })));
    }

    #[test]
    fn ephemeral_ports_are_not_consecutive() {
        let held: Vec<_> = (0..8).map(|_| reserve_port(LOCALHOST, None, 0).unwrap()).collect();
        let steps: Vec<_> = held.windows(2).map(|w| w[1].port().wrapping_sub(w[0].port())).collect();
        assert!(steps.iter().any(|step| *step != 1), "{steps:?}");
    }

    /// A connection of the kernel's TCP whose server has closed first, as its last use of the port.
    fn use_once(address: SocketAddr) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(address).unwrap();
        drop(listener.accept().unwrap());
        drop((listener, client));
    }

    #[test]
    fn connections_in_time_wait_do_not_keep_a_port() {
        for address in [LOCALHOST, None] {
            let port = reserve_port(LOCALHOST, None, 0).unwrap().port();
            let kernels = SocketAddr::new(LOCALHOST.unwrap(), port);
            use_once(kernels);
            assert!(
                matches!(reserve(address, port, 0), Err(PortError::InUse { .. })),
                "nothing in TIME-WAIT"
            );
            let held = reserve_port(address, Some(port), 0).unwrap();
            // It excludes all others as an ordinary reservation does, also those with SO_REUSEADDR.
            assert!(TcpListener::bind(kernels).is_err());
            assert!(matches!(reserve_port(address, Some(port), 0), Err(PortError::InUse { .. })));
            assert_eq!(TcpStream::connect(kernels).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
            drop(held);
            drop(TcpListener::bind(kernels).unwrap());
        }
    }

    #[test]
    fn a_listener_of_the_kernel_keeps_its_port_and_is_named() {
        let port = reserve_port(LOCALHOST, None, 0).unwrap().port();
        let address = SocketAddr::new(LOCALHOST.unwrap(), port);
        use_once(address);
        let listener = TcpListener::bind(address).unwrap();
        let refused = reserve_port(LOCALHOST, Some(port), 0).unwrap_err();
        let PortError::InUse { holder: Some(holder), .. } = &refused else { panic!("{refused:?}") };
        assert_eq!(holder.pid, std::process::id());
        drop(listener);
        drop(reserve_port(LOCALHOST, Some(port), 0).unwrap());
    }

    #[test]
    fn a_live_connection_of_the_kernel_keeps_its_port() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _client = TcpStream::connect(address).unwrap();
        let _server = listener.accept().unwrap();
        drop(listener);
        assert!(matches!(reserve_port(LOCALHOST, Some(address.port()), 0), Err(PortError::InUse { .. })));
    }

    #[test]
    fn an_address_of_another_host_is_refused() {
        let elsewhere = "192.0.2.1".parse().unwrap();
        assert!(
            matches!(reserve_port(Some(elsewhere), None, 0), Err(PortError::NotOurAddress(a)) if a == elsewhere)
        );
    }

    #[test]
    fn kernel_port_lists_parse() {
        assert_eq!(parse_range("32768\t60999\n"), Some(32768..=60999));
        assert_eq!(parse_range("0 0"), None);
        assert_eq!(parse_range("nonsense"), None);
        assert_eq!(parse_list("8080,9000-9100\n"), [8080..=8080, 9000..=9100]);
        assert_eq!(parse_list("\n"), []);
    }
}
