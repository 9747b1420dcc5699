//! [`Resolver`]: from a peer's address to the [`Path`] that frames to it need.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use xwarp_tcp::link::QueueId;
use xwarp_tcp::wire::{Flow, Mac, Path, VlanTags};

use crate::error::ResolveError;
use crate::netlink::Netlink;
use crate::netlink::neighbour::Neighbour;

/// How often the kernel is asked whether it has resolved a neighbour.
const NEIGHBOUR_POLL: Duration = Duration::from_millis(2);

/// The smallest MTU that IPv4 allows (RFC 791); a smaller one on a route is taken for this.
const MIN_MTU: u32 = 68;

/// What an open interface tells its resolvers.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub name: String,
    pub index: u32,
    pub mac: Mac,
    /// What our paths may use.
    pub mtu: u16,
    pub vlan: VlanTags,
    pub queues: u16,
}

/// How to reach an address: the kernel's routing decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Where to.
    pub destination: IpAddr,
    /// The local address to use.
    pub source: IpAddr,
    /// The neighbour to send to: a gateway, or the destination itself.
    pub next_hop: IpAddr,
    /// Largest IP packet, in bytes.
    pub mtu: u16,
}

/// Asks the kernel for paths out of one interface.
///
/// Owns its netlink socket and borrows nothing from the interface, so a connection manager can use it
/// without holding the engine. It sees the interface's Ethernet address and MTU as they were when it
/// was made: make a new one when an [`Event`](crate::Event) tells of a change.
#[derive(Debug)]
pub struct Resolver {
    netlink: Netlink,
    facts: Facts,
}

impl Resolver {
    pub(crate) fn new(facts: Facts) -> io::Result<Self> {
        Ok(Self { netlink: Netlink::open()?, facts })
    }

    /// The route to `destination`, from `source` if given, else from the address that the kernel prefers.
    ///
    /// # Errors
    /// Everything but [`ResolveError::Unreachable`] and [`ResolveError::TimedOut`].
    pub fn route(&mut self, destination: IpAddr, source: Option<IpAddr>) -> Result<Route, ResolveError> {
        check_addresses(destination, source)?;
        let ours = self.netlink.addresses(self.facts.index)?;
        if let Some(address) = source.filter(|source| !ours.contains(source)) {
            return Err(ResolveError::NotOurAddress { address, name: self.facts.name.clone() });
        }
        // A link-local address means nothing without its link.
        let scope = is_link_local(destination).then_some(self.facts.index);
        let no_route = |source| ResolveError::NoRoute { destination, source };
        let mut answer = self.netlink.route(destination, source, scope).map_err(no_route)?;
        if answer.local {
            return Err(ResolveError::Local(destination));
        }
        if answer.interface != self.facts.index {
            if !self.netlink.has_route(destination, self.facts.index) {
                return Err(self.other_interface(destination, answer.interface));
            }
            // Two interfaces lead there; the caller chose this one by opening it.
            answer = self.netlink.route(destination, source, Some(self.facts.index))?;
        }
        let Some(source) = source.or(answer.source).filter(|source| ours.contains(source)) else {
            return Err(no_route(io::ErrorKind::AddrNotAvailable.into()));
        };
        let most = u32::from(self.facts.mtu);
        let mtu = answer.mtu.unwrap_or(most).min(most).max(MIN_MTU) as u16;
        Ok(Route { destination, source, next_hop: answer.gateway.unwrap_or(destination), mtu })
    }

    fn other_interface(&mut self, destination: IpAddr, index: u32) -> ResolveError {
        let through =
            self.netlink.link(index).map_or_else(|_| format!("interface {index}"), |link| link.name);
        ResolveError::OtherInterface { destination, name: self.facts.name.clone(), through }
    }

    /// The next hop's Ethernet address if the kernel knows it. If not, the kernel is asked to find it, and
    /// the answer is `None`: ask again later ([`Event::Neighbour`](crate::Event::Neighbour) tells when).
    ///
    /// # Errors
    /// [`ResolveError::Unreachable`] when the kernel has tried and nobody answered. It tries anew when it
    /// is asked again.
    pub fn neighbour(&mut self, route: &Route) -> Result<Option<Mac>, ResolveError> {
        match self.netlink.neighbour(self.facts.index, route.next_hop)? {
            Neighbour::Known(mac) => Ok(Some(mac)),
            Neighbour::Incomplete => Ok(None),
            Neighbour::Unknown => {
                self.netlink.probe_neighbour(self.facts.index, route.next_hop)?;
                Ok(None)
            }
            Neighbour::Failed => {
                self.netlink.probe_neighbour(self.facts.index, route.next_hop)?;
                Err(ResolveError::Unreachable { destination: route.destination, next_hop: route.next_hop })
            }
        }
    }

    /// The path of a connection, once its route and the next hop's Ethernet address are known. It leaves
    /// on a queue chosen by the ports, until the peer's first frame tells on which queue it arrives.
    pub fn path(&self, flow: Flow, route: &Route, next_hop_mac: Mac) -> Path {
        Path {
            flow,
            source_mac: self.facts.mac,
            next_hop_mac,
            vlan: self.facts.vlan,
            mtu: route.mtu,
            queue: QueueId((flow.local.port() ^ flow.remote.port()) % self.facts.queues.max(1)),
        }
    }

    /// Waits for the path of a connection, at most `limit`. `flow.local` holds a local address and port.
    ///
    /// A neighbour whose last resolution failed gets the whole `limit` anew.
    ///
    /// # Errors
    /// Any of [`ResolveError`].
    pub fn resolve(&mut self, flow: Flow, limit: Duration) -> Result<Path, ResolveError> {
        let route = self.route(flow.remote.ip(), Some(flow.local.ip()))?;
        let end = Instant::now() + limit;
        let mut asked_again = false;
        loop {
            match self.neighbour(&route) {
                Ok(Some(mac)) => return Ok(self.path(flow, &route, mac)),
                Ok(None) => asked_again = true,
                // The failure is of an earlier attempt of somebody's.
                Err(ResolveError::Unreachable { .. }) if !asked_again => asked_again = true,
                Err(error) => return Err(error),
            }
            if Instant::now() >= end {
                return Err(ResolveError::TimedOut {
                    destination: route.destination,
                    next_hop: route.next_hop,
                });
            }
            std::thread::sleep(NEIGHBOUR_POLL);
        }
    }
}

/// What needs no kernel to be refused.
fn check_addresses(destination: IpAddr, source: Option<IpAddr>) -> Result<(), ResolveError> {
    let broadcast = matches!(destination, IpAddr::V4(v4) if v4.is_broadcast());
    if destination.is_multicast() || destination.is_unspecified() || broadcast {
        return Err(ResolveError::NotUnicast(destination));
    }
    if destination.is_loopback() {
        return Err(ResolveError::Local(destination));
    }
    match source {
        Some(source) if source.is_ipv4() != destination.is_ipv4() => {
            Err(ResolveError::Family(source, destination))
        }
        _ => Ok(()),
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(v6) => Ipv6Addr::is_unicast_link_local(&v6),
    }
}
