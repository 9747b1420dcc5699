//! `IPsec` policies of the kernel (`linux/xfrm.h`): our frames pass by them, so a flow that must be encrypted is not sent.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer};
use netlink_sys::{Socket, SocketAddr as NetlinkAddr};

use super::route::Question;

const NETLINK_XFRM: isize = 6;
/// Multicast group of changed policies (`XFRMNLGRP_POLICY`).
const POLICY_GROUP: u32 = 4;
const NEW_POLICY: u16 = 0x13;
const GET_POLICY: u16 = 0x15;
const HEADER: usize = 16;
/// Bytes of `struct xfrm_userpolicy_id`, of which all are zero in a request for all policies.
const POLICY_ID: usize = 64;
/// Bytes of `struct xfrm_userpolicy_info`, after which the attributes begin.
const POLICY: usize = 168;
/// Attribute with the transformations that a policy demands (`XFRMA_TMPL`), an array.
const TEMPLATES: u16 = 5;
/// Bytes of one of them (`struct xfrm_user_tmpl`), and the place of its field `optional`.
const TEMPLATE: usize = 64;
const OPTIONAL: usize = 50;
const TCP: u8 = 6;

/// A socket on which the kernel announces changes of the policies of the calling thread's network namespace.
pub(super) fn announcements() -> Option<Socket> {
    let mut socket = Socket::new(NETLINK_XFRM).ok()?;
    socket.bind(&NetlinkAddr::new(0, 0)).ok()?;
    socket.add_membership(POLICY_GROUP).ok()?;
    socket.set_non_blocking(true).ok()?;
    Some(socket)
}

/// Reads what such a socket holds; whether there was anything, or something was lost.
pub(super) fn has_announced(socket: &Socket) -> bool {
    let mut any = false;
    loop {
        match socket.recv_from_full() {
            Ok(_) => any = true,
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => any = true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return any,
        }
    }
}

/// What the policies of the kernel demand of the packets of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand {
    /// Nothing.
    Nothing,
    /// They are transformed, for instance encrypted.
    Transformation,
    /// They are not sent.
    Block,
}

/// The policies of a network namespace, which are asked for anew with each question.
#[derive(Debug)]
pub struct Policies(Option<Socket>);

impl Policies {
    /// Those of the calling thread's network namespace; none if the kernel has no `IPsec`.
    pub fn open() -> Self {
        let open = || {
            let mut socket = Socket::new(NETLINK_XFRM)?;
            socket.bind_auto()?;
            socket.connect(&NetlinkAddr::new(0, 0))?;
            io::Result::Ok(socket)
        };
        Self(open().ok())
    }

    /// No policies.
    pub fn none() -> Self {
        Self(None)
    }

    /// What the policies for outgoing packets demand of a flow.
    ///
    /// # Errors
    /// This process lacks `CAP_NET_ADMIN`.
    pub fn demand(&mut self, question: &Question) -> io::Result<Demand> {
        let Some(socket) = &mut self.0 else { return Ok(Demand::Nothing) };
        let mut request = ((HEADER + POLICY_ID) as u32).to_ne_bytes().to_vec();
        request.extend(GET_POLICY.to_ne_bytes());
        request.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
        request.resize(HEADER + POLICY_ID, 0);
        socket.send(&request, 0)?;
        let mut best: Option<(u32, Demand)> = None;
        loop {
            let (datagram, _) = socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while let Ok(message) = NetlinkBuffer::new_checked(rest) {
                if message.message_type() != NEW_POLICY {
                    // The end, or an error.
                    return Ok(best.map_or(Demand::Nothing, |(_, demand)| demand));
                }
                let found = Policy::parse(message.payload()).filter(|policy| policy.matches(question));
                // Of policies with the same priority, the older one applies.
                if let Some(policy) = found
                    && best.is_none_or(|(priority, _)| policy.priority < priority)
                {
                    best = Some((policy.priority, policy.demand));
                }
                let length = (message.length() as usize).next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
            }
        }
    }
}

/// A policy for outgoing packets.
struct Policy<'a> {
    /// `struct xfrm_selector`.
    selector: &'a [u8; 56],
    priority: u32,
    demand: Demand,
}

impl<'a> Policy<'a> {
    fn parse(payload: &'a [u8]) -> Option<Self> {
        const OUT: u8 = 1;
        const BLOCK: u8 = 1;
        let info = payload.get(..POLICY)?;
        let (selector, priority) =
            (info.first_chunk()?, u32::from_ne_bytes(*info.get(152..)?.first_chunk()?));
        let (direction, action) = (*info.get(160)?, *info.get(161)?);
        if direction != OUT {
            return None;
        }
        let demand = match action {
            BLOCK => Demand::Block,
            _ if demands_transformation(payload.get(POLICY..)?) => Demand::Transformation,
            _ => Demand::Nothing,
        };
        Some(Self { selector, priority, demand })
    }

    fn matches(&self, question: &Question) -> bool {
        const INET: u16 = libc::AF_INET as u16;
        const INET6: u16 = libc::AF_INET6 as u16;
        let word =
            |at: usize| self.selector.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
        let byte = |at: usize| self.selector.get(at).copied().unwrap_or_default();
        let family = u16::from_ne_bytes(word(40));
        let covers = |at: usize, bits: u8, address: IpAddr| {
            let octets: [u8; 16] =
                self.selector.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
            let [a, b, c, d, ..] = octets;
            let prefix = match family {
                INET => IpNet::new(Ipv4Addr::new(a, b, c, d).into(), bits.min(32)),
                INET6 => IpNet::new(Ipv6Addr::from(octets).into(), bits.min(128)),
                _ => return false,
            };
            prefix.is_ok_and(|prefix| prefix.contains(&address))
        };
        // A port that is not known yet may be one of those.
        let has_port = |at: usize, port: u16| {
            let (wanted, mask) = (u16::from_be_bytes(word(at)), u16::from_be_bytes(word(at + 2)));
            port == 0 || (port ^ wanted) & mask == 0
        };
        let any_family = family == 0;
        let is_covered = |at, prefix, address| any_family || covers(at, prefix, address);
        is_covered(0, byte(42), question.destination)
            && question.source.is_none_or(|source| is_covered(16, byte(43), source))
            && has_port(32, question.destination_port)
            && has_port(36, question.source_port)
            && matches!(byte(44), 0 | TCP)
    }
}

/// Whether there is a transformation among the attributes that is not optional.
fn demands_transformation(attributes: &[u8]) -> bool {
    let mut rest = attributes;
    while let [l0, l1, t0, t1, ..] = *rest {
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let Some(value) = rest.get(4..length) else { return false };
        if u16::from_ne_bytes([t0, t1]) == TEMPLATES {
            return value.chunks_exact(TEMPLATE).any(|template| template.get(OPTIONAL) == Some(&0));
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}
