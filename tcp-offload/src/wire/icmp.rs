//! ICMP and ICMPv6 errors that quote a TCP segment of ours (RFC 1122 section 3.2.2, RFC 1191, RFC 8201).

use std::net::{IpAddr, SocketAddr};

use etherparse::{Ipv4HeaderSlice, Ipv6HeaderSlice};

use super::{
    Flow, IcmpError, IcmpKind, Inbound, Malformed,
    checksum::Sum,
    ip::{PROTOCOL_ICMPV6, PROTOCOL_TCP, Packet, is_mapped, pseudo_header},
};
use crate::seq::SeqNum;

/// Bytes of an ICMP error before the packet that it quotes.
const ICMP_HEADER: usize = 8;

/// Parses an ICMP message whose sum, from the ICMP header on, is `sum`.
pub(super) fn parse(head: &[u8], packet: &Packet, sum: Sum) -> Result<Inbound, Malformed> {
    let bytes = head.get(packet.start..).unwrap_or_default();
    let bytes = bytes.get(..packet.len).unwrap_or(bytes);
    let Some((header, quoted)) = bytes.split_first_chunk::<ICMP_HEADER>() else {
        return Err(Malformed::Truncated);
    };
    let v6 = packet.source.is_ipv6();
    let Some(kind) = (if v6 { kind_v6(*header) } else { kind_v4(*header) }) else {
        return Ok(Inbound::Other);
    };
    let sum = if v6 {
        sum.and(pseudo_header(packet.source, packet.destination, PROTOCOL_ICMPV6, packet.len))
    } else {
        sum
    };
    if sum.fold() != 0xffff {
        return Err(Malformed::Checksum);
    }
    let quote = if v6 { quote_v6(quoted) } else { quote_v4(quoted) };
    Ok(quote.map_or(Inbound::Other, |(flow, seq)| Inbound::Icmp(IcmpError { flow, seq, kind })))
}

/// Destination Unreachable (type 3); code 4 is "fragmentation needed and DF set", with the next hop's MTU in
/// the last two bytes (RFC 1191 section 4). Codes 2 and 3 are hard errors (RFC 1122 section 4.2.3.9).
fn kind_v4(header: [u8; ICMP_HEADER]) -> Option<IcmpKind> {
    let [kind, code, _, _, _, _, mtu @ ..] = header;
    match (kind, code) {
        (3, 4) => Some(IcmpKind::TooBig { mtu: u16::from_be_bytes(mtu).into() }),
        (3, _) => Some(IcmpKind::Unreachable { hard: code == 2 || code == 3 }),
        _ => None,
    }
}

/// Packet Too Big (type 2) and Destination Unreachable (type 1) of RFC 4443; code 4 is "port unreachable".
fn kind_v6(header: [u8; ICMP_HEADER]) -> Option<IcmpKind> {
    let [kind, code, _, _, mtu @ ..] = header;
    match kind {
        2 => Some(IcmpKind::TooBig { mtu: u32::from_be_bytes(mtu) }),
        1 => Some(IcmpKind::Unreachable { hard: code == 4 }),
        _ => None,
    }
}

/// Parses a quoted packet. The quote may end anywhere after the first 8 bytes of its TCP header (RFC 792), and
/// routers may have changed lengths and checksums, so only addresses, ports and the sequence number are read.
fn quote_v4(quoted: &[u8]) -> Option<(Flow, SeqNum)> {
    let header = Ipv4HeaderSlice::from_slice(quoted).ok()?;
    if header.protocol().0 != PROTOCOL_TCP || header.fragments_offset().value() != 0 {
        return None;
    }
    let tcp = quoted.get(header.slice().len()..)?;
    quote_tcp(header.source_addr().into(), header.destination_addr().into(), tcp)
}

fn quote_v6(quoted: &[u8]) -> Option<(Flow, SeqNum)> {
    let header = Ipv6HeaderSlice::from_slice(quoted).ok()?;
    let tcp = quoted.get(header.header_len()..)?;
    if is_mapped(header.source_addr()) || is_mapped(header.destination_addr()) {
        return None;
    }
    (header.next_header().0 == PROTOCOL_TCP)
        .then(|| quote_tcp(header.source_addr().into(), header.destination_addr().into(), tcp))?
}

fn quote_tcp(source: IpAddr, destination: IpAddr, tcp: &[u8]) -> Option<(Flow, SeqNum)> {
    let [s0, s1, d0, d1, seq @ ..] = *tcp.first_chunk::<8>()?;
    let flow = Flow {
        local: SocketAddr::new(source, u16::from_be_bytes([s0, s1])),
        remote: SocketAddr::new(destination, u16::from_be_bytes([d0, d1])),
    };
    Some((flow, SeqNum::new(u32::from_be_bytes(seq))))
}
