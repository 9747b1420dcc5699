//! Neighbours: Ethernet addresses of next hops. The kernel resolves them (ARP, neighbour discovery); we start the
//! resolution and read the kernel's table.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use xwarp_tcp::wire::Mac;

use super::{Netlink, family_of};

/// The state of a neighbour in the kernel's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Neighbour {
    /// Its Ethernet address, perhaps stale.
    Known(Mac),
    /// Resolution is in progress.
    Incomplete,
    /// Resolution got no answer.
    Failed,
    /// The table has no entry.
    Unknown,
}

impl Netlink {
    /// The entry of `address` on `interface`.
    pub fn neighbour(&mut self, interface: u32, address: IpAddr) -> io::Result<Neighbour> {
        match self.one(RouteNetlinkMessage::GetNeighbour(question(interface, address))) {
            Ok(RouteNetlinkMessage::NewNeighbour(message)) => Ok(from_message(&message)),
            Ok(_) => Err(io::ErrorKind::InvalidData.into()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Neighbour::Unknown),
            Err(error) => Err(error),
        }
    }

    /// Makes the kernel confirm the Ethernet address that it knows, and remove it if there is no answer. An entry
    /// that the administrator made is not changed.
    pub fn confirm_neighbour(&mut self, interface: u32, address: IpAddr) -> io::Result<()> {
        let known = self.one(RouteNetlinkMessage::GetNeighbour(question(interface, address)))?;
        let RouteNetlinkMessage::NewNeighbour(known) = known else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        if !matches!(
            known.header.state,
            NeighbourState::Reachable | NeighbourState::Stale | NeighbourState::Delay
        ) {
            return Ok(());
        }
        let mut message = question(interface, address);
        message.header.state = NeighbourState::Probe;
        self.change(RouteNetlinkMessage::NewNeighbour(message), NLM_F_REPLACE)
    }

    /// Makes the kernel resolve `address`, as if it had a packet to send there.
    pub fn probe_neighbour(&mut self, interface: u32, address: IpAddr) -> io::Result<()> {
        let mut message = question(interface, address);
        message.header.flags = NeighbourFlags::Use;
        message.header.state = NeighbourState::None;
        self.change(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)
    }
}

fn question(interface: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family_of(address);
    message.header.ifindex = interface;
    let destination = match address {
        IpAddr::V4(v4) => NeighbourAddress::Inet(v4),
        IpAddr::V6(v6) => NeighbourAddress::Inet6(v6),
    };
    message.attributes.push(NeighbourAttribute::Destination(destination));
    message
}

/// The IP address of the entry in a message.
pub(super) fn address_of(message: &NeighbourMessage) -> Option<IpAddr> {
    message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })
}

pub(super) fn from_message(message: &NeighbourMessage) -> Neighbour {
    let mac = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().map(Mac).ok(),
        _ => None,
    });
    match (message.header.state, mac) {
        (NeighbourState::Failed, _) => Neighbour::Failed,
        (NeighbourState::Incomplete, _) => Neighbour::Incomplete,
        (NeighbourState::None, _) | (_, None) => Neighbour::Unknown,
        (_, Some(mac)) => Neighbour::Known(mac),
    }
}
