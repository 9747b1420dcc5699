//! Finds the TCP segment in a captured packet, even if the packet was captured in part.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
};

use etherparse::{EtherType, LaxNetSlice, LaxSlicedPacket, TransportSlice};
use xwarp_tcp::wire::Options;

use super::file::{LinkType, Packet};

/// A TCP segment.
#[derive(Debug, Clone)]
pub struct Segment<'a> {
    /// The sender.
    pub from: SocketAddr,
    /// The receiver.
    pub to: SocketAddr,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number, if the segment has one.
    pub ack: Option<u32>,
    /// Flags.
    pub syn: bool,
    /// No more data from the sender.
    pub fin: bool,
    /// The sender ends the connection.
    pub rst: bool,
    /// The window field, unscaled.
    pub window: u16,
    /// Options; those of a broken header are empty.
    pub options: Options,
    /// The captured bytes of the payload.
    pub payload: &'a [u8],
    /// Bytes of the payload on the wire.
    pub len: usize,
    /// Whether a router marked the packet: congestion experienced (RFC 3168).
    pub congestion: bool,
}

/// A packet's content.
#[derive(Debug)]
pub enum Content<'a> {
    /// TCP.
    Tcp(Box<Segment<'a>>),
    /// Anything else, by name.
    Other(Cow<'static, str>),
}

/// Finds the content of a packet.
pub fn content<'a>(packet: &Packet<'a>) -> Content<'a> {
    if let Some(name) = packet.link.unexplained() {
        return Content::Other(name.into());
    }
    let Some(sliced) = slice(packet) else { return Content::Other("not readable".into()) };
    let Some(net) = &sliced.net else { return Content::Other("not IP".into()) };
    let (from, to, announced, congestion) = match net {
        LaxNetSlice::Ipv4(ip) => {
            let header = ip.header();
            let headers = usize::from(header.ihl()) * 4
                + ip.extensions().auth.as_ref().map_or(0, |auth| auth.slice().len());
            (
                IpAddr::from(header.source_addr()),
                IpAddr::from(header.destination_addr()),
                usize::from(header.total_len()).checked_sub(headers),
                header.ecn().value() == 3,
            )
        }
        LaxNetSlice::Ipv6(ip) => {
            let header = ip.header();
            (
                IpAddr::from(header.source_addr()),
                IpAddr::from(header.destination_addr()),
                usize::from(header.payload_length()).checked_sub(ip.extensions().slice().len()),
                header.ecn().value() == 3,
            )
        }
        LaxNetSlice::Arp(_) => return Content::Other("ARP".into()),
    };
    if net.ip_payload_ref().is_some_and(|payload| payload.fragmented) {
        return Content::Other("IP fragment".into());
    }
    let tcp = match &sliced.transport {
        Some(TransportSlice::Tcp(tcp)) => tcp,
        Some(TransportSlice::Udp(_)) => return Content::Other("UDP".into()),
        Some(TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_)) => return Content::Other("ICMP".into()),
        Some(TransportSlice::Igmp(_)) | None => return Content::Other("other IP".into()),
    };
    let captured = tcp.payload();
    // A frame that the kernel will cut into segments later may exceed the length field, which is then 0.
    let len = announced.map_or(0, |ip| ip.saturating_sub(tcp.header_len())).max(captured.len());
    Content::Tcp(Box::new(Segment {
        from: SocketAddr::new(from, tcp.source_port()),
        to: SocketAddr::new(to, tcp.destination_port()),
        seq: tcp.sequence_number(),
        ack: tcp.ack().then(|| tcp.acknowledgment_number()),
        syn: tcp.syn(),
        fin: tcp.fin(),
        rst: tcp.rst(),
        window: tcp.window_size(),
        options: Options::parse(tcp.options()),
        payload: captured,
        len,
        congestion,
    }))
}

fn slice<'a>(packet: &Packet<'a>) -> Option<LaxSlicedPacket<'a>> {
    let bytes = packet.bytes;
    let cooked = |protocol: usize, header: usize| {
        let kind = EtherType(u16::from_be_bytes(*bytes.get(protocol..)?.first_chunk()?));
        Some(LaxSlicedPacket::from_ether_type(kind, bytes.get(header..)?))
    };
    match packet.link {
        LinkType::Ethernet => LaxSlicedPacket::from_ethernet(bytes).ok(),
        LinkType::Ip => LaxSlicedPacket::from_ip(bytes).ok(),
        LinkType::Loopback => LaxSlicedPacket::from_ip(bytes.get(packet.link.bytes_before_ip()..)?).ok(),
        LinkType::Cooked => cooked(14, 16),
        LinkType::CookedTwo => cooked(0, 20),
        LinkType::Other(_) => None,
    }
}
