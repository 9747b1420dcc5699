//! Routes: the interface, next hop and source address that the kernel would use.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteType,
};

use super::{Netlink, family_of};

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

impl Netlink {
    /// Looks up the route to `destination`, from `source` and through `interface` if they are given.
    ///
    /// # Errors
    /// `ENETUNREACH` or a similar error when there is none.
    pub fn route(
        &mut self,
        destination: IpAddr,
        source: Option<IpAddr>,
        interface: Option<u32>,
    ) -> io::Result<RouteAnswer> {
        self.route_with(destination, source, interface, RouteFlags::empty())
    }

    /// Whether the routing tables have an entry for `destination` through `interface`. (A plain lookup with an
    /// interface always succeeds for IPv4: the kernel then takes the destination to be on the link.)
    pub fn has_route(&mut self, destination: IpAddr, interface: u32) -> bool {
        let found = self.route_with(destination, None, Some(interface), RouteFlags::FibMatch);
        found.is_ok_and(|route| route.interface == interface)
    }

    fn route_with(
        &mut self,
        destination: IpAddr,
        source: Option<IpAddr>,
        interface: Option<u32>,
        flags: RouteFlags,
    ) -> io::Result<RouteAnswer> {
        let bits =
            |address: IpAddr| if address.is_ipv4() { Ipv4Addr::BITS as u8 } else { Ipv6Addr::BITS as u8 };
        let mut message = RouteMessage::default();
        message.header.address_family = family_of(destination);
        message.header.flags = flags;
        message.header.destination_prefix_length = bits(destination);
        message.attributes.push(RouteAttribute::Destination(destination.into()));
        if let Some(source) = source {
            message.header.source_prefix_length = bits(source);
            message.attributes.push(RouteAttribute::Source(source.into()));
        }
        if let Some(interface) = interface {
            message.attributes.push(RouteAttribute::Oif(interface));
        }
        match self.one(RouteNetlinkMessage::GetRoute(message))? {
            RouteNetlinkMessage::NewRoute(answer) => Ok(from_message(&answer)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
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

fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}
