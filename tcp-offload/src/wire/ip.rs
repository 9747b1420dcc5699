//! IPv4 and IPv6 headers of received packets, and the pseudo-header of their payload.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Ecn, Malformed, checksum::Sum, extensions};

pub(super) const PROTOCOL_ICMP: u8 = 1;
pub(super) const PROTOCOL_TCP: u8 = 6;
pub(super) const PROTOCOL_ICMPV6: u8 = 58;

/// Bytes of an IPv4 header without options, and of an IPv6 header.
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

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

/// Parses an IPv4 header that begins at `at` (RFC 791).
#[expect(clippy::inline_always, reason = "the packet is then never stored in memory")]
#[inline(always)]
pub(super) fn ipv4(head: &[u8], at: usize) -> Result<Packet, Malformed> {
    let bytes = head.get(at..).unwrap_or_default();
    let fixed = bytes.first_chunk::<IPV4_HEADER>().ok_or(Malformed::Truncated)?;
    let [version, service, l0, l1, _, _, f0, f1, _, protocol, _, _, addresses @ ..] = *fixed;
    let header_len = usize::from(version & 0xf) * 4;
    if version >> 4 != 4 || header_len < IPV4_HEADER {
        return Err(Malformed::HeaderLength);
    }
    let sum = if header_len == IPV4_HEADER {
        Sum::of_array(fixed)
    } else {
        Sum::of(bytes.get(..header_len).ok_or(Malformed::Truncated)?)
    };
    if sum.fold() != 0xffff {
        return Err(Malformed::IpChecksum);
    }
    // "More fragments", or an offset.
    if u16::from_be_bytes([f0, f1]) & 0x3fff != 0 {
        return Err(Malformed::Fragment);
    }
    let total = usize::from(u16::from_be_bytes([l0, l1]));
    let len = total.checked_sub(header_len).ok_or(Malformed::HeaderLength)?;
    let [s0, s1, s2, s3, d0, d1, d2, d3] = addresses;
    let (source, destination) = (Ipv4Addr::new(s0, s1, s2, s3), Ipv4Addr::new(d0, d1, d2, d3));
    let may_be_end = |ip| unicast_v4(ip) || ip.is_loopback() && protocol == PROTOCOL_TCP;
    if !(may_be_end(source) && may_be_end(destination)) {
        return Err(Malformed::Address);
    }
    if header_len > IPV4_HEADER && has_source_route(bytes.get(IPV4_HEADER..header_len).unwrap_or_default()) {
        return Err(Malformed::SourceRoute);
    }
    Ok(Packet {
        source: source.into(),
        destination: destination.into(),
        protocol,
        ecn: ecn(service),
        start: at + header_len,
        len,
    })
}

/// Whether `ip` may be an end of a connection on a network: not 0/8, loopback, multicast, 240/4 or broadcast (RFC 1122 section
/// 3.2.1.3, RFC 6890). The caller of the parser decides about loopback addresses of TCP: some links do not leave the host.
fn unicast_v4(ip: Ipv4Addr) -> bool {
    matches!(ip.octets(), [1..=126 | 128..=223, ..])
}

/// Whether there is a loose or strict source route among the options of an IPv4 header (RFC 791).
#[cold]
fn has_source_route(options: &[u8]) -> bool {
    const END: u8 = 0;
    const NOP: u8 = 1;
    const LOOSE: u8 = 131;
    const STRICT: u8 = 137;
    let mut rest = options;
    loop {
        match *rest {
            [] | [END, ..] => return false,
            [NOP, ref after @ ..] => rest = after,
            [LOOSE | STRICT, ..] => return true,
            [_, length, ..] if usize::from(length) >= 2 => {
                rest = rest.get(usize::from(length)..).unwrap_or_default();
            }
            [_, ..] => return false,
        }
    }
}

/// Parses an IPv6 header that begins at `at`, and the extension headers behind it (RFC 8200).
pub(super) fn ipv6(head: &[u8], at: usize) -> Result<Packet, Malformed> {
    let bytes = head.get(at..).unwrap_or_default();
    let fixed = bytes.first_chunk::<IPV6_HEADER>().ok_or(Malformed::Truncated)?;
    let [version, service, _, _, l0, l1, next, _, addresses @ ..] = *fixed;
    if version >> 4 != 6 {
        return Err(Malformed::HeaderLength);
    }
    let (protocol, behind) =
        if next == PROTOCOL_TCP { (next, IPV6_HEADER) } else { extensions::skip(bytes, next, IPV6_HEADER)? };
    let address = |octets: Option<&[u8; 16]>| octets.copied().map_or(Ipv6Addr::UNSPECIFIED, Ipv6Addr::from);
    let (source, destination) = (address(addresses.first_chunk()), address(addresses.last_chunk()));
    if is_mapped(source) || is_mapped(destination) {
        return Err(Malformed::MappedAddress);
    }
    // Neighbour discovery and others use multicast addresses, which only TCP must not.
    if protocol == PROTOCOL_TCP
        && [source, destination].iter().any(|ip| ip.is_multicast() || ip.is_unspecified())
    {
        return Err(Malformed::Address);
    }
    let len = usize::from(u16::from_be_bytes([l0, l1]));
    Ok(Packet {
        source: source.into(),
        destination: destination.into(),
        protocol,
        // The traffic class lies across the first two bytes; ECN is its lower two bits.
        ecn: ecn(service >> 4),
        start: at + behind,
        len: len.checked_sub(behind - IPV6_HEADER).ok_or(Malformed::HeaderLength)?,
    })
}

/// Whether `ip` is `::ffff:a.b.c.d` (RFC 4291 section 2.5.5.2).
pub(super) fn is_mapped(ip: Ipv6Addr) -> bool {
    ip.to_ipv4_mapped().is_some()
}

/// The sum over the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
#[inline]
pub(super) fn pseudo_header(source: IpAddr, destination: IpAddr, protocol: u8, len: usize) -> Sum {
    let address = |ip| match ip {
        IpAddr::V4(ip) => Sum::of_u32(ip.octets()),
        IpAddr::V6(ip) => Sum::of_array(&ip.octets()),
    };
    address(source).and(address(destination)).and_word(protocol.into()).and_word(len as u16)
}
