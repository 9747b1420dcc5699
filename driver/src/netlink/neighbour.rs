//! Neighbours: Ethernet addresses of next hops. Resolving them (ARP, neighbour discovery) is the
//! kernel's work; we ask it to start and read what it found.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use xwarp_tcp::wire::Mac;

use super::{Netlink, family_of};

/// What the kernel knows of a neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Neighbour {
    /// Its address. It may be stale; sending confirms it.
    Known(Mac),
    /// Being asked for.
    Incomplete,
    /// Asked for, and nobody answered.
    Failed,
    /// Nothing is known.
    Unknown,
}

impl Netlink {
    /// What the kernel knows of `address` on `interface`.
    pub fn neighbour(&mut self, interface: u32, address: IpAddr) -> io::Result<Neighbour> {
        match self.one(RouteNetlinkMessage::GetNeighbour(question(interface, address))) {
            Ok(RouteNetlinkMessage::NewNeighbour(message)) => Ok(from_message(&message)),
            Ok(_) => Err(io::ErrorKind::InvalidData.into()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Neighbour::Unknown),
            Err(error) => Err(error),
        }
    }

    /// Makes the kernel ask who has `address`, as if it had a packet to send there.
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

/// Whose entry a message is.
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
