//! Parser of a received frame's headers, from Ethernet to TCP, which verifies every length and checksum.

use std::net::{IpAddr, SocketAddr};

use super::{
    Flags, Flow, Inbound, Mac, Malformed, Options, Segment, TIMESTAMPS_BYTES, Timestamps, VlanTags,
    checksum::Sum,
    icmp,
    ip::{PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP, Packet, ipv4, ipv6, pseudo_header},
    options::{NOP, TIMESTAMPS},
};
use crate::{
    link::{Link, RxFrame, part},
    seq::SeqNum,
};

pub(super) const ETHERNET_HEADER: usize = 14;
const VLAN_TAG: usize = 4;
const TCP_HEADER: usize = 20;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPES_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];

/// Bytes of a TCP header whose only option is the timestamps.
pub(super) const TIMESTAMPED_HEADER: usize = TCP_HEADER + TIMESTAMPS_BYTES;
const ACK: u8 = 0x10;
pub(super) const PSH: u8 = 0x08;

/// Parses the headers of a received frame and verifies its checksums. Ethernet padding after the IP packet is
/// ignored; headers must lie in the frame's first chunk.
///
/// A segment from or to a loopback address is refused (RFC 1122 section 3.2.1.3) unless the link stays [within the
/// host](Link::is_within_host).
pub fn parse(link: &dyn Link, frame: &RxFrame) -> Result<Inbound, Malformed> {
    let chunks = link.rx_chunks(frame);
    let parsed = match *chunks.as_slice() {
        [chunk] => one_chunk(chunk, frame).map(Inbound::Tcp),
        _ => None,
    };
    let parsed = parsed.map_or_else(|| parse_any(&chunks, frame), Ok)?;
    match parsed {
        Inbound::Tcp(ref segment) if is_looped(&segment.flow) && !link.is_within_host() => {
            Err(Malformed::Address)
        }
        parsed => Ok(parsed),
    }
}

fn is_looped(flow: &Flow) -> bool {
    flow.local.ip().is_loopback() || flow.remote.ip().is_loopback()
}

/// The segment in a frame with the layout that nearly all segments of established connections have: one chunk, no tags, no
/// option of IP, no control bits but ACK and PSH, and the timestamps as the only TCP option. `None` for all other frames
/// and for malformed ones, which [`parse_any`] judges; a property test compares both.
#[expect(clippy::inline_always, reason = "the segment is then written once, to where the caller wants it")]
#[inline(always)]
fn one_chunk(chunk: &[u8], frame: &RxFrame) -> Option<Segment> {
    let ethernet = chunk.first_chunk::<ETHERNET_HEADER>()?;
    let [.., t0, t1] = *ethernet;
    match u16::from_be_bytes([t0, t1]) {
        ETHERTYPE_IPV4 => one_chunk_tcp(chunk, frame, ethernet, &ipv4(chunk, ETHERNET_HEADER).ok()?),
        ETHERTYPE_IPV6 => one_chunk_tcp(chunk, frame, ethernet, &ipv6(chunk, ETHERNET_HEADER).ok()?),
        _ => None,
    }
}

/// The part of [`one_chunk`] behind the IP header. It is compiled for each version of IP, which makes its addresses cheap.
#[expect(clippy::inline_always, reason = "it is called once for each version of IP")]
#[inline(always)]
fn one_chunk_tcp(
    chunk: &[u8],
    frame: &RxFrame,
    ethernet: &[u8; ETHERNET_HEADER],
    packet: &Packet,
) -> Option<Segment> {
    let end = packet.start + packet.len;
    if packet.protocol != PROTOCOL_TCP || end > frame.len() {
        return None;
    }
    let bytes = chunk.get(packet.start..end)?;
    let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, rest @ ..] =
        *bytes.first_chunk::<TIMESTAMPED_HEADER>()?;
    let [0x80, flags, w0, w1, _, _, _, _, NOP, NOP, TIMESTAMPS, 10, rest @ ..] = rest else { return None };
    let [v0, v1, v2, v3, e0, e1, e2, e3] = rest;
    if flags & !PSH != ACK {
        return None;
    }
    let pseudo = pseudo_header(packet.source, packet.destination, PROTOCOL_TCP, packet.len);
    if Sum::of(bytes).and(pseudo).fold() != 0xffff {
        return None;
    }
    let (source_port, destination_port) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
    if source_port == 0 || destination_port == 0 {
        return None;
    }
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, _, _] = *ethernet;
    let timestamps = Timestamps {
        value: u32::from_be_bytes([v0, v1, v2, v3]),
        echo: u32::from_be_bytes([e0, e1, e2, e3]),
    };
    Some(Segment {
        source_mac: Mac([s0, s1, s2, s3, s4, s5]),
        destination_mac: Mac([d0, d1, d2, d3, d4, d5]),
        vlan: VlanTags::default(),
        queue: frame.queue(),
        flow: Flow {
            local: SocketAddr::new(packet.destination, destination_port),
            remote: SocketAddr::new(packet.source, source_port),
        },
        seq: SeqNum::new(u32::from_be_bytes([q0, q1, q2, q3])),
        ack: SeqNum::new(u32::from_be_bytes([a0, a1, a2, a3])),
        flags: Flags { ack: true, psh: flags & PSH != 0, ..Flags::default() },
        window: u16::from_be_bytes([w0, w1]),
        options: Options { timestamps: Some(timestamps), ..Options::default() },
        ecn: packet.ecn,
        payload_start: packet.start + TIMESTAMPED_HEADER,
        payload_len: packet.len - TIMESTAMPED_HEADER,
        partial_checksum: false,
    })
}

/// Like [`parse`], for frames of any layout.
#[inline(never)]
pub(super) fn parse_any(chunks: &[&[u8]], frame: &RxFrame) -> Result<Inbound, Malformed> {
    let head = chunks.first().copied().unwrap_or_default();
    let ethernet = head.first_chunk::<ETHERNET_HEADER>().ok_or(Malformed::Truncated)?;
    let [.., t0, t1] = *ethernet;
    let (vlan, ethertype, ip) = tags(head, u16::from_be_bytes([t0, t1]))?;
    let received = Received { frame, chunks, head, ethernet, vlan };
    match ethertype {
        ETHERTYPE_IPV4 => received.packet(&ipv4(head, ip)?),
        ETHERTYPE_IPV6 => received.packet(&ipv6(head, ip)?),
        _ => Ok(Inbound::Other),
    }
}

/// A received frame up to its IP header.
struct Received<'a> {
    frame: &'a RxFrame,
    chunks: &'a [&'a [u8]],
    /// The first chunk.
    head: &'a [u8],
    ethernet: &'a [u8; ETHERNET_HEADER],
    vlan: VlanTags,
}

#[expect(clippy::inline_always, reason = "each is called once for each version of IP")]
impl Received<'_> {
    /// Parses what follows the IP header. It is compiled for each version of IP, which makes its addresses cheap.
    #[inline(always)]
    fn packet(&self, packet: &Packet) -> Result<Inbound, Malformed> {
        if packet.start + packet.len > self.frame.len() {
            return Err(Malformed::Truncated);
        }
        match (packet.protocol, packet.source) {
            (PROTOCOL_TCP, _) => self.tcp(packet),
            (PROTOCOL_ICMP, IpAddr::V4(_)) | (PROTOCOL_ICMPV6, IpAddr::V6(_)) => {
                icmp::parse(self.head, packet, self.sum(packet)?)
            }
            _ => Ok(Inbound::Other),
        }
    }

    /// The sum over the packet behind its IP header.
    #[inline(always)]
    fn sum(&self, packet: &Packet) -> Result<Sum, Malformed> {
        if let [chunk] = self.chunks {
            return chunk
                .get(packet.start..packet.start + packet.len)
                .map(Sum::of)
                .ok_or(Malformed::Truncated);
        }
        Ok(Sum::of_pieces(&part(self.chunks, packet.start, packet.len)))
    }

    /// Parses the TCP header (RFC 9293 section 3.1).
    #[inline(always)]
    fn tcp(&self, packet: &Packet) -> Result<Inbound, Malformed> {
        let bytes = self.head.get(packet.start..).unwrap_or_default();
        let bytes = bytes.get(..packet.len).unwrap_or(bytes);
        let fixed = bytes.first_chunk::<TCP_HEADER>().ok_or(Malformed::Truncated)?;
        let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, offset, flags, w0, w1, c0, c1, _, _] = *fixed;
        let header_len = usize::from(offset >> 4) * 4;
        if header_len < TCP_HEADER {
            return Err(Malformed::HeaderLength);
        }
        let options = bytes.get(TCP_HEADER..header_len).ok_or(Malformed::Truncated)?;
        let pseudo = pseudo_header(packet.source, packet.destination, PROTOCOL_TCP, packet.len);
        let good = self.sum(packet)?.and(pseudo).fold() == 0xffff;
        let partial_checksum = !good && u16::from_be_bytes([c0, c1]) == pseudo.fold();
        if !(good || partial_checksum) {
            return Err(Malformed::Checksum);
        }
        let (source_port, destination_port) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        if source_port == 0 || destination_port == 0 {
            return Err(Malformed::Address);
        }
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, _, _] = *self.ethernet;
        Ok(Inbound::Tcp(Segment {
            source_mac: Mac([s0, s1, s2, s3, s4, s5]),
            destination_mac: Mac([d0, d1, d2, d3, d4, d5]),
            vlan: self.vlan,
            queue: self.frame.queue(),
            flow: Flow {
                local: SocketAddr::new(packet.destination, destination_port),
                remote: SocketAddr::new(packet.source, source_port),
            },
            seq: SeqNum::new(u32::from_be_bytes([q0, q1, q2, q3])),
            ack: SeqNum::new(u32::from_be_bytes([a0, a1, a2, a3])),
            flags: Flags::from_byte(flags),
            window: u16::from_be_bytes([w0, w1]),
            options: Options::parse(options),
            ecn: packet.ecn,
            payload_start: packet.start + header_len,
            payload_len: packet.len - header_len,
            partial_checksum,
        }))
    }
}

/// Parses up to two VLAN tags. Returns the tags, the EtherType after them and the position of its payload.
fn tags(head: &[u8], ethertype: u16) -> Result<(VlanTags, u16, usize), Malformed> {
    let mut tags = VlanTags::default();
    let (mut ethertype, mut at) = (ethertype, ETHERNET_HEADER);
    for tag in &mut tags.0 {
        if !ETHERTYPES_VLAN.contains(&ethertype) {
            break;
        }
        let bytes = head.get(at..).and_then(<[u8]>::first_chunk::<VLAN_TAG>);
        let [c0, c1, t0, t1] = *bytes.ok_or(Malformed::Truncated)?;
        *tag = Some((ethertype, u16::from_be_bytes([c0, c1])));
        ethertype = u16::from_be_bytes([t0, t1]);
        at += VLAN_TAG;
    }
    Ok((tags, ethertype, at))
}
