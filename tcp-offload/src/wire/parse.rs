//! Parser of a received frame's headers, from Ethernet to TCP, which verifies every length and checksum.

use std::net::{IpAddr, SocketAddr};

use etherparse::{Ethernet2HeaderSlice, SingleVlanHeaderSlice, TcpHeaderSlice};

use super::{
    Flags, Flow, Inbound, Mac, Malformed, Options, Segment, VlanTags,
    checksum::Sum,
    icmp,
    ip::{PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP, Packet, ipv4, ipv6, pseudo_header},
};
use crate::{
    link::{Link, RxFrame, part},
    seq::SeqNum,
};

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPES_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];

/// Parses the headers of a received frame and verifies its checksums. Ethernet padding after the IP packet is
/// ignored; headers must lie in the frame's first chunk.
pub fn parse(link: &dyn Link, frame: &RxFrame) -> Result<Inbound, Malformed> {
    let chunks = link.rx_chunks(frame);
    let head = chunks.first().copied().unwrap_or_default();
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
        if chunks.len() == 1 {
            head.get(packet.start..packet.start + packet.len).map(Sum::of).ok_or(Malformed::Truncated)
        } else {
            Ok(Sum::of_pieces(part(chunks.iter().copied(), packet.start, packet.len)))
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

/// Parses up to two VLAN tags. Returns the tags, the EtherType after them and the position of its payload.
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

/// Parses the TCP header; `sum` is the sum over header and payload. The caller fills in the fields that come from the
/// Ethernet header.
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
