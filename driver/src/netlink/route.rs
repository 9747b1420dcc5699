//! Routes: the interface, next hop and source address that the kernel would use.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteType,
};

use super::{Netlink, family_of};

/// The table of this host's own addresses (`RT_TABLE_LOCAL` of `linux/rtnetlink.h`).
pub(super) const LOCAL_TABLE: u8 = 255;

/// The kernel's answer to a route lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteAnswer {
    /// The destination is an address of this host.
    pub local: bool,
    /// Index of the interface.
    pub interface: u32,
    /// The next hop, when it is not the destination itself.
    pub gateway: Option<IpAddr>,
    /// The source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// The route's own MTU, if it has one (configured or learnt).
    pub mtu: Option<u32>,
}

/// The flow of a TCP connection for which the kernel is asked: routing rules may depend on all of it, and one of several paths is
/// chosen by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// The peer's address.
    pub destination: IpAddr,
    /// The local address, if it is chosen already.
    pub source: Option<IpAddr>,
    /// The peer's port; 0 if unknown.
    pub destination_port: u16,
    /// The local port; 0 if unknown.
    pub source_port: u16,
    /// The user on whose behalf we ask; `None` for that of this process.
    pub user: Option<u32>,
}

impl Question {
    /// The question about an address, with whatever port.
    pub fn to(destination: IpAddr, source: Option<IpAddr>) -> Self {
        Self { destination, source, destination_port: 0, source_port: 0, user: None }
    }

    fn message(&self, interface: Option<u32>, flags: RouteFlags) -> RouteMessage {
        const TCP: u8 = 6;
        let mut message = RouteMessage::default();
        message.header.address_family = family_of(self.destination);
        message.header.flags = flags;
        message.header.destination_prefix_length = bits(self.destination);
        let mut add = |attribute| message.attributes.push(attribute);
        add(RouteAttribute::Destination(self.destination.into()));
        if let Some(source) = self.source {
            add(RouteAttribute::Source(source.into()));
        }
        if let Some(interface) = interface {
            add(RouteAttribute::Oif(interface));
        }
        add(RouteAttribute::IpProto(TCP));
        if self.source_port != 0 {
            add(RouteAttribute::Sport(self.source_port));
        }
        if self.destination_port != 0 {
            add(RouteAttribute::Dport(self.destination_port));
        }
        if let Some(user) = self.user {
            add(RouteAttribute::Uid(user));
        }
        message.header.source_prefix_length = self.source.map_or(0, bits);
        message
    }
}

impl Netlink {
    /// Looks up the route of a flow, through `interface` if it is given.
    ///
    /// # Errors
    /// `ENETUNREACH` or a similar error when there is none, or one that forbids the flow.
    pub fn route(&mut self, question: &Question, interface: Option<u32>) -> io::Result<RouteAnswer> {
        self.ask_route(question.message(interface, RouteFlags::empty()))
    }

    /// Whether the routing tables have an entry for `destination` through `interface`. (A plain lookup with an
    /// interface always succeeds for IPv4: the kernel then takes the destination to be on the link.)
    pub fn has_route(&mut self, destination: IpAddr, interface: u32) -> bool {
        let question = Question::to(destination, None);
        let found = self.ask_route(question.message(Some(interface), RouteFlags::FibMatch));
        found.is_ok_and(|route| route.interface == interface)
    }

    fn ask_route(&mut self, message: RouteMessage) -> io::Result<RouteAnswer> {
        let RouteNetlinkMessage::NewRoute(answer) = self.one(RouteNetlinkMessage::GetRoute(message))? else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        // For IPv6, the kernel answers with the route that forbids, and not with its error.
        let forbidden = match answer.header.kind {
            RouteType::BlackHole => Some(libc::EINVAL),
            RouteType::Unreachable => Some(libc::EHOSTUNREACH),
            RouteType::Prohibit => Some(libc::EACCES),
            RouteType::Throw => Some(libc::ENETUNREACH),
            _ => None,
        };
        forbidden.map_or_else(|| Ok(from_message(&answer)), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

fn from_message(message: &RouteMessage) -> RouteAnswer {
    let mut answer = RouteAnswer {
        local: message.header.kind == RouteType::Local,
        interface: 0,
        gateway: None,
        source: None,
        mtu: None,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => answer.interface = *index,
            RouteAttribute::Gateway(address) => answer.gateway = ip_of(address),
            RouteAttribute::Via(via) => {
                // An IPv4 route may have an IPv6 next hop (RFC 5549): the neighbour has an IPv6 address.
                answer.gateway = match via {
                    netlink_packet_route::route::RouteVia::Inet(v4) => Some(IpAddr::V4(*v4)),
                    netlink_packet_route::route::RouteVia::Inet6(v6) => Some(IpAddr::V6(*v6)),
                    _ => None,
                };
            }
            RouteAttribute::PrefSource(address) => answer.source = ip_of(address),
            RouteAttribute::Metrics(metrics) => {
                answer.mtu = metrics
                    .iter()
                    .find_map(|m| if let RouteMetric::Mtu(mtu) = m { Some(*mtu) } else { None });
            }
            _ => {}
        }
    }
    answer
}

/// The address of the host that a route of the local table is for, if frames of interface `index` can be for it.
pub(super) fn local_address(route: &RouteMessage, index: u32) -> Option<IpAddr> {
    if route.header.kind != RouteType::Local || route.header.table != LOCAL_TABLE {
        return None;
    }
    let address = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(address) => ip_of(address),
        _ => None,
    })?;
    let is_here = || route.attributes.contains(&RouteAttribute::Oif(index));
    let is_received = match address {
        IpAddr::V4(v4) => !v4.is_loopback(),
        IpAddr::V6(v6) => !v6.is_loopback() && (!v6.is_unicast_link_local() || is_here()),
    };
    (is_received && route.header.destination_prefix_length == bits(address)).then_some(address)
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { Ipv4Addr::BITS as u8 } else { Ipv6Addr::BITS as u8 }
}

fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}
