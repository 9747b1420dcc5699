//! Changes of addresses, links, neighbours and routes, as the kernel announces them.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{NetlinkBuffer, NetlinkPayload};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr as NetlinkAddr};
use xwarp_tcp::wire::Mac;

use super::link::{self, KernelLink};
use super::neighbour::{self, Neighbour};
use super::{address_of, messages, route, xfrm};

/// Multicast groups of `linux/rtnetlink.h` that we join.
const GROUPS: [u32; 9] = [
    1,  // RTNLGRP_LINK
    3,  // RTNLGRP_NEIGH
    5,  // RTNLGRP_IPV4_IFADDR
    7,  // RTNLGRP_IPV4_ROUTE
    8,  // RTNLGRP_IPV4_RULE
    9,  // RTNLGRP_IPV6_IFADDR
    11, // RTNLGRP_IPV6_ROUTE
    19, // RTNLGRP_IPV6_RULE
    32, // RTNLGRP_NEXTHOP
];

/// Types of messages about objects that routes name as their next hops; the library does not decode them.
const NEXT_HOP_OBJECTS: std::ops::RangeInclusive<u16> = 104..=105; // RTM_NEWNEXTHOP, RTM_DELNEXTHOP

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The interface has a new address.
    AddressAdded(IpAddr),
    /// The host has a new address that is not the interface's, on which frames of the interface are received too.
    LocalAdded(IpAddr),
    /// The interface or the host lost an address: connections from it must end.
    AddressRemoved(IpAddr),
    /// The interface went up or down, or its carrier appeared or disappeared.
    LinkState {
        /// Whether it is up and has a carrier.
        up: bool,
    },
    /// The interface's MTU changed; the value is the new path MTU, in bytes of IP packet.
    Mtu(u16),
    /// The interface's Ethernet address changed.
    Mac(Mac),
    /// The interface is gone.
    LinkRemoved,
    /// The kernel learnt the Ethernet address of a neighbour, or (`None`) dropped it: it does so with
    /// neighbours that it does not use itself, so a working connection keeps the old one.
    Neighbour {
        /// The neighbour's IP address.
        address: IpAddr,
        /// Its Ethernet address.
        mac: Option<Mac>,
    },
    /// Some route, rule or `IPsec` policy changed: resolved paths may have another next hop now, or none.
    Routes,
    /// Changes came faster than they were read, and some were lost: the state must be read again.
    Overrun,
}

/// The content of a message, before it is compared with the known state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    Link(KernelLink),
    Other(Event),
}

/// Sockets that receive the kernel's announcements about one interface.
#[derive(Debug)]
pub(crate) struct Monitor {
    socket: Socket,
    /// Those of changed `IPsec` policies, which decide about the flows of all interfaces; none if the kernel has no `IPsec`.
    policies: Option<Socket>,
    interface: u32,
}

impl Monitor {
    pub(crate) fn open(interface: u32) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&NetlinkAddr::new(0, 0))?;
        for group in GROUPS {
            socket.add_membership(group)?;
        }
        socket.set_non_blocking(true)?;
        Ok(Self { socket, policies: xfrm::announcements(), interface })
    }

    /// Those that are readable when there is something to read.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.socket.as_fd()].into_iter().chain(self.policies.as_ref().map(AsFd::as_fd))
    }

    /// Reads all waiting announcements.
    pub(crate) fn read(&mut self, mut notify: impl FnMut(Change)) -> io::Result<()> {
        if self.policies.as_ref().is_some_and(xfrm::has_announced) {
            notify(Change::Other(Event::Routes));
        }
        loop {
            match self.socket.recv_from_full() {
                Ok((datagram, _)) => {
                    // Messages that the library cannot decode are skipped: newer kernels have attributes that it
                    // does not know.
                    for message in messages(&datagram).flatten() {
                        if let NetlinkPayload::InnerMessage(inner) = message.payload
                            && let Some(change) = self.change(&inner)
                        {
                            notify(change);
                        }
                    }
                    if has_next_hop_object(&datagram) {
                        notify(Change::Other(Event::Routes));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    notify(Change::Other(Event::Overrun));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn change(&self, message: &RouteNetlinkMessage) -> Option<Change> {
        use RouteNetlinkMessage as M;
        let event = match message {
            M::NewLink(message) if message.header.index == self.interface => {
                return Some(Change::Link(link::from_message(message)));
            }
            // A bridge announces in its own family that a port has left it.
            M::DelLink(message)
                if message.header.index == self.interface
                    && message.header.interface_family == AddressFamily::Unspec =>
            {
                Event::LinkRemoved
            }
            M::NewAddress(message) if message.header.index == self.interface => {
                Event::AddressAdded(address_of(message)?)
            }
            M::DelAddress(message) if message.header.index == self.interface => {
                Event::AddressRemoved(address_of(message)?)
            }
            M::NewNeighbour(message) if message.header.ifindex == self.interface => {
                let mac = match neighbour::from_message(message) {
                    Neighbour::Known(mac) => Some(mac),
                    Neighbour::Failed => None,
                    Neighbour::Incomplete | Neighbour::Unknown => return None,
                };
                Event::Neighbour { address: neighbour::address_of(message)?, mac }
            }
            M::DelNeighbour(message) if message.header.ifindex == self.interface => {
                Event::Neighbour { address: neighbour::address_of(message)?, mac: None }
            }
            M::NewRoute(message) | M::DelRoute(message) if self.concerns(message) => Event::Routes,
            M::NewRoute(message) => Event::LocalAdded(route::local_address(message, self.interface)?),
            M::DelRoute(message) => Event::AddressRemoved(route::local_address(message, self.interface)?),
            M::NewRule(_) | M::DelRule(_) => Event::Routes,
            _ => return None,
        };
        Some(Change::Other(event))
    }
}

impl Monitor {
    /// Whether a route may be one of the interface's connections.
    fn concerns(&self, route: &RouteMessage) -> bool {
        match route.header.kind {
            RouteType::Unicast => leads_through(route, self.interface),
            // They forbid, wherever the packets would go.
            RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw => true,
            // Local and broadcast routes come and go with addresses, which have events of their own.
            _ => false,
        }
    }
}

/// Whether the first message of a datagram is about the next hop of routes. The kernel announces one at a time.
fn has_next_hop_object(datagram: &[u8]) -> bool {
    let first = NetlinkBuffer::new_checked(datagram);
    first.is_ok_and(|message| NEXT_HOP_OBJECTS.contains(&message.message_type()))
}

/// Whether a route leads through an interface. A route that does not say so may.
fn leads_through(route: &RouteMessage, interface: u32) -> bool {
    let mut interfaces = route.attributes.iter().flat_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => vec![*index],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    });
    let Some(first) = interfaces.next() else { return true };
    first == interface || interfaces.any(|index| index == interface)
}

/// The first of its sockets.
impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
