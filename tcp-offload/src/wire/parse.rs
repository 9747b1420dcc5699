//! A received frame's headers, from Ethernet to TCP, with every length and checksum verified.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    Ethernet2HeaderSlice, Ipv4HeaderSlice, Ipv6HeaderSlice, SingleVlanHeaderSlice, TcpHeaderSlice,
};

use super::{Ecn, Flags, Flow, Inbound, Mac, Malformed, Options, Segment, VlanTags, checksum::Sum, icmp};
use crate::{
    link::{Link, RxFrame, rx_pieces},
    seq::SeqNum,
};

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPES_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];
pub(super) const PROTOCOL_ICMP: u8 = 1;
pub(super) const PROTOCOL_TCP: u8 = 6;
pub(super) const PROTOCOL_ICMPV6: u8 = 58;

/// What is known of a packet when its IP header has been read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    pub ecn: Ecn,
    /// Where the transport header lies in the frame, and the bytes from there to the packet's end.
    pub start: usize,
    pub len: usize,
}

/// Reads the headers of a received frame and verifies its checksums. Ethernet padding behind the IP
/// packet is cut off; headers must lie in the frame's first chunk.
pub fn parse(link: &dyn Link, frame: &RxFrame) -> Result<Inbound, Malformed> {
    let head = link.rx_chunk(frame, 0);
    let ethernet = Ethernet2HeaderSlice::from_slice(head).map_err(|_| Malformed::Truncated)?;
    let (vlan, ethertype, ip) = tags(head, ethernet.ether_type().0)?;
    let packet = match ethertype {
        ETHERTYPE_IPV4 => ipv4(head, ip)?,
        ETHERTYPE_IPV6 => ipv6(head, ip)?,
        _ => return Ok(Inbound::Other),
    };
    if packet.start + packet.len > frame.len() {
        return Err(Malformed::Truncated);
    }
    let sum = || {
        if frame.chunks() == 1 {
            head.get(packet.start..packet.start + packet.len).map(Sum::of).ok_or(Malformed::Truncated)
        } else {
            Ok(Sum::of_pieces(rx_pieces(link, frame, packet.start, packet.len)))
        }
    };
    match (packet.protocol, packet.source) {
        (PROTOCOL_TCP, _) => {
            let mut segment = tcp(head, &packet, sum()?)?;
            segment.source_mac = Mac(ethernet.source());
            segment.destination_mac = Mac(ethernet.destination());
            segment.vlan = vlan;
            segment.queue = frame.queue();
            Ok(Inbound::Tcp(segment))
        }
        (PROTOCOL_ICMP, IpAddr::V4(_)) | (PROTOCOL_ICMPV6, IpAddr::V6(_)) => {
            icmp::parse(head, &packet, sum()?)
        }
        _ => Ok(Inbound::Other),
    }
}

/// Walks over up to two VLAN tags: the tags, the EtherType behind them and where its payload begins.
fn tags(head: &[u8], ethertype: u16) -> Result<(VlanTags, u16, usize), Malformed> {
    let mut tags = VlanTags::default();
    let (mut ethertype, mut at) = (ethertype, 14);
    for tag in &mut tags.0 {
        if !ETHERTYPES_VLAN.contains(&ethertype) {
            break;
        }
        let bytes = head.get(at..).unwrap_or_default();
        let header = SingleVlanHeaderSlice::from_slice(bytes).map_err(|_| Malformed::Truncated)?;
        let tci = header.slice().first_chunk::<2>().map_or(0, |b| u16::from_be_bytes(*b));
        *tag = Some((ethertype, tci));
        ethertype = header.ether_type().0;
        at += header.slice().len();
    }
    Ok((tags, ethertype, at))
}

fn ecn(bits: u8) -> Ecn {
    match bits & 3 {
        0 => Ecn::NotEct,
        1 => Ecn::Ect1,
        2 => Ecn::Ect0,
        _ => Ecn::Ce,
    }
}

fn ipv4(head: &[u8], at: usize) -> Result<Packet, Malformed> {
    let bytes = head.get(at..).unwrap_or_default();
    let header = Ipv4HeaderSlice::from_slice(bytes).map_err(|e| match e {
        etherparse::err::ipv4::HeaderSliceError::Len(_) => Malformed::Truncated,
        etherparse::err::ipv4::HeaderSliceError::Content(_) => Malformed::HeaderLength,
    })?;
    if Sum::of(header.slice()).fold() != 0xffff {
        return Err(Malformed::IpChecksum);
    }
    if header.is_fragmenting_payload() {
        return Err(Malformed::Fragment);
    }
    let header_len = header.slice().len();
    let len = usize::from(header.total_len()).checked_sub(header_len).ok_or(Malformed::HeaderLength)?;
    let (source, destination) = (header.source_addr(), header.destination_addr());
    if !(unicast_v4(source) && unicast_v4(destination)) {
        return Err(Malformed::Address);
    }
    Ok(Packet {
        source: source.into(),
        destination: destination.into(),
        protocol: header.protocol().0,
        ecn: ecn(header.ecn().value()),
        start: at + header_len,
        len,
    })
}

fn unicast_v4(ip: std::net::Ipv4Addr) -> bool {
    !(ip.is_multicast() || ip.is_broadcast() || ip.is_unspecified())
}

/// Packets with extension headers are not for us: their next header is not TCP, and they count as
/// [`Inbound::Other`]; a fragment header says so itself.
fn ipv6(head: &[u8], at: usize) -> Result<Packet, Malformed> {
    const FRAGMENT: u8 = 44;
    let bytes = head.get(at..).unwrap_or_default();
    let header = Ipv6HeaderSlice::from_slice(bytes).map_err(|e| match e {
        etherparse::err::ipv6::HeaderSliceError::Len(_) => Malformed::Truncated,
        etherparse::err::ipv6::HeaderSliceError::Content(_) => Malformed::HeaderLength,
    })?;
    if header.next_header().0 == FRAGMENT {
        return Err(Malformed::Fragment);
    }
    let (source, destination) = (header.source_addr(), header.destination_addr());
    // Neighbour discovery and the like go to multicast groups; only TCP must not.
    if header.next_header().0 == PROTOCOL_TCP
        && [source, destination].iter().any(|ip| ip.is_multicast() || ip.is_unspecified())
    {
        return Err(Malformed::Address);
    }
    Ok(Packet {
        source: source.into(),
        destination: destination.into(),
        protocol: header.next_header().0,
        ecn: ecn(header.traffic_class()),
        start: at + header.header_len(),
        len: usize::from(header.payload_length()),
    })
}

/// The sum over the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
pub(super) fn pseudo_header(source: IpAddr, destination: IpAddr, protocol: u8, len: usize) -> Sum {
    let address = |ip| match ip {
        IpAddr::V4(ip) => Sum::of(&ip.octets()),
        IpAddr::V6(ip) => Sum::of(&ip.octets()),
    };
    address(source).and(address(destination)).and_word(protocol.into()).and_word(len as u16)
}

/// Reads the TCP header; `sum` is that of header and payload. What only the Ethernet header knows is filled
/// in by the caller.
fn tcp(head: &[u8], packet: &Packet, sum: Sum) -> Result<Segment, Malformed> {
    let bytes = head.get(packet.start..).unwrap_or_default();
    let bytes = bytes.get(..packet.len).unwrap_or(bytes);
    let header = TcpHeaderSlice::from_slice(bytes).map_err(|e| match e {
        etherparse::err::tcp::HeaderSliceError::Len(_) => Malformed::Truncated,
        etherparse::err::tcp::HeaderSliceError::Content(_) => Malformed::HeaderLength,
    })?;
    let pseudo = pseudo_header(packet.source, packet.destination, PROTOCOL_TCP, packet.len);
    let good = sum.and(pseudo).fold() == 0xffff;
    let partial_checksum = !good && header.checksum() == pseudo.fold();
    if !(good || partial_checksum) {
        return Err(Malformed::Checksum);
    }
    if header.source_port() == 0 || header.destination_port() == 0 {
        return Err(Malformed::Address);
    }
    let header_len = header.slice().len();
    Ok(Segment {
        source_mac: Mac::default(),
        destination_mac: Mac::default(),
        vlan: VlanTags::default(),
        queue: crate::link::QueueId::default(),
        flow: Flow {
            local: SocketAddr::new(packet.destination, header.destination_port()),
            remote: SocketAddr::new(packet.source, header.source_port()),
        },
        seq: SeqNum::new(header.sequence_number()),
        ack: SeqNum::new(header.acknowledgment_number()),
        flags: Flags {
            fin: header.fin(),
            syn: header.syn(),
            rst: header.rst(),
            psh: header.psh(),
            ack: header.ack(),
            ece: header.ece(),
            cwr: header.cwr(),
        },
        window: header.window_size(),
        options: Options::parse(header.options())?,
        ecn: packet.ecn,
        payload_start: packet.start + header_len,
        payload_len: packet.len - header_len,
        partial_checksum,
    })
}
