//! IPv4 and IPv6 headers of received packets, and the pseudo-header of their payload.

use std::net::IpAddr;

use etherparse::{Ipv4HeaderSlice, Ipv6HeaderSlice};

use super::{Ecn, Malformed, checksum::Sum};

pub(super) const PROTOCOL_ICMP: u8 = 1;
pub(super) const PROTOCOL_TCP: u8 = 6;
pub(super) const PROTOCOL_ICMPV6: u8 = 58;

/// The result of parsing a packet's IP header.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    pub ecn: Ecn,
    /// Position of the transport header in the frame, and the bytes from there to the packet's end.
    pub start: usize,
    pub len: usize,
}

fn ecn(bits: u8) -> Ecn {
    match bits & 3 {
        0 => Ecn::NotEct,
        1 => Ecn::Ect1,
        2 => Ecn::Ect0,
        _ => Ecn::Ce,
    }
}

/// Parses an IPv4 header that begins at `at`.
pub(super) fn ipv4(head: &[u8], at: usize) -> Result<Packet, Malformed> {
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

/// Parses an IPv6 header that begins at `at`.
///
/// Extension headers are not supported: such packets count as [`Inbound::Other`](super::Inbound::Other), because
/// their next header is not TCP. A fragment header is reported as [`Malformed::Fragment`].
pub(super) fn ipv6(head: &[u8], at: usize) -> Result<Packet, Malformed> {
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
    if is_mapped(source) || is_mapped(destination) {
        return Err(Malformed::MappedAddress);
    }
    // Neighbour discovery and others use multicast addresses, which only TCP must not.
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

/// Whether `ip` is `::ffff:a.b.c.d` (RFC 4291 section 2.5.5.2).
pub(super) fn is_mapped(ip: std::net::Ipv6Addr) -> bool {
    ip.to_ipv4_mapped().is_some()
}

/// The sum over the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
pub(super) fn pseudo_header(source: IpAddr, destination: IpAddr, protocol: u8, len: usize) -> Sum {
    let address = |ip| match ip {
        IpAddr::V4(ip) => Sum::of(&ip.octets()),
        IpAddr::V6(ip) => Sum::of(&ip.octets()),
    };
    address(source).and(address(destination)).and_word(protocol.into()).and_word(len as u16)
}
