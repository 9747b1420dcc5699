//! Links, addresses, routes and neighbours of the kernel, by netlink requests and announcements.
//!
//! [`Netlink`] is one request socket: each request is answered before the next is sent. The other files hold one kind
//! of request each; [`monitor`] listens for changes.

pub mod features;
pub mod link;
pub mod monitor;
pub mod neighbour;
pub mod route;
pub(crate) mod sockets;
pub mod veth;
pub(crate) mod xfrm;

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr as NetlinkAddr};

/// A request socket to the kernel's routing subsystem, in the network namespace of the thread that
/// opened it.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Opens the socket.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Requests all objects of one kind.
    fn dump(&mut self, message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.ask(message, NLM_F_REQUEST | NLM_F_DUMP)
    }

    /// Requests one object, or returns the kernel's error.
    fn one(&mut self, message: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        let answer = self.ask(message, NLM_F_REQUEST | NLM_F_ACK)?;
        answer.into_iter().next().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Requests a change and waits for the acknowledgement.
    fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.ask(message, NLM_F_REQUEST | NLM_F_ACK | flags).map(drop)
    }

    /// Sends one request and collects the answers until the kernel acknowledges it, ends the dump, or returns an
    /// error.
    fn ask(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;

        let mut answers = Vec::new();
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            for message in messages(&datagram) {
                let message = message?;
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => answers.push(inner),
                    NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                    NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(answers),
                    _ => {}
                }
            }
        }
    }

    /// The addresses of interface `index`.
    pub fn addresses(&mut self, index: u32) -> io::Result<Vec<IpAddr>> {
        let answers = self.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        let ours = answers.iter().filter_map(|answer| match answer {
            RouteNetlinkMessage::NewAddress(message) if message.header.index == index => address_of(message),
            _ => None,
        });
        Ok(ours.collect())
    }
}

impl Netlink {
    /// The addresses of this host on which frames of interface `index` are received: those of the kernel's local table, in which are
    /// also addresses of other interfaces and of the loopback (a virtual address of a load balancer), but no whole prefixes.
    pub fn local_addresses(&mut self, index: u32) -> io::Result<Vec<IpAddr>> {
        let mut local = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut message = RouteMessage::default();
            message.header.address_family = family;
            message.header.table = route::LOCAL_TABLE;
            // Otherwise the kernel lists the routes of all tables.
            self.socket.set_netlink_get_strict_chk(true)?;
            let answers = self.dump(RouteNetlinkMessage::GetRoute(message));
            self.socket.set_netlink_get_strict_chk(false)?;
            let routes = answers?.into_iter().filter_map(|answer| match answer {
                RouteNetlinkMessage::NewRoute(route) => route::local_address(&route, index),
                _ => None,
            });
            local.extend(routes);
        }
        Ok(local)
    }
}

/// Our address in an address message: on point-to-point links `Address` is the peer's and `Local` ours.
fn address_of(message: &AddressMessage) -> Option<IpAddr> {
    let local = message
        .attributes
        .iter()
        .find_map(|a| if let AddressAttribute::Local(ip) = a { Some(*ip) } else { None });
    local.or_else(|| {
        message
            .attributes
            .iter()
            .find_map(|a| if let AddressAttribute::Address(ip) = a { Some(*ip) } else { None })
    })
}

fn family_of(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

/// The messages of one datagram.
fn messages(datagram: &[u8]) -> impl Iterator<Item = io::Result<NetlinkMessage<RouteNetlinkMessage>>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let length = NetlinkBuffer::new_checked(rest).map(|message| message.length() as usize);
        let bad =
            |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
        let message = match length {
            Ok(length) => {
                let (message, after) = rest.split_at(length.min(rest.len()));
                // Messages are padded to four bytes.
                rest = after.get((length.next_multiple_of(4) - length)..).unwrap_or_default();
                NetlinkMessage::deserialize(message).map_err(|error| bad(&error))
            }
            Err(error) => {
                rest = &[];
                Err(bad(&error))
            }
        };
        Some(message)
    })
}
