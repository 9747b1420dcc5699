//! [`Header`]: what the switch reads of a frame, and the reset that answers a segment for nobody.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use xwarp_leg::hosts;
use xwarp_tcp::link::QueueId;
use xwarp_tcp::seq::SeqNum;
use xwarp_tcp::wire::{Fields, Flags, Flow, Headers, Path, Sum, VlanTags};

/// Bytes of a frame that are read: the longest headers of Ethernet, IPv4 and TCP fit.
pub(crate) const HEAD_BYTES: usize = 160;

const ETHERNET: usize = 14;
const IPV6: usize = 40;
const TCP: usize = 20;
const PROTOCOL_TCP: u8 = 6;
/// More fragments, and the place of a fragment, in IPv4's field.
const FRAGMENT: u16 = 0x3fff;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// The headers of a TCP segment in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub source: SocketAddr,
    pub destination: SocketAddr,
    seq: u32,
    ack: u32,
    flags: u8,
    payload: u32,
}

impl Header {
    /// Parses the beginning of a frame of `len` bytes. `None`: it is no TCP segment in one piece.
    pub(crate) fn parse(head: &[u8], len: usize) -> Option<Self> {
        let ip = head.get(ETHERNET..)?;
        let ip_bytes = len.checked_sub(ETHERNET)?;
        let (source, destination, start, end) = match head.get(12..ETHERNET)? {
            [0x08, 0x00] => v4(ip)?,
            [0x86, 0xdd] => v6(ip)?,
            _ => return None,
        };
        if end > ip_bytes {
            return None;
        }
        let tcp = ip.get(start..)?.first_chunk::<TCP>()?;
        let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, offset, flags, ..] = *tcp;
        let header = usize::from(offset >> 4) * 4;
        if header < TCP || start + header > end {
            return None;
        }
        Some(Self {
            source: SocketAddr::new(source, u16::from_be_bytes([s0, s1])),
            destination: SocketAddr::new(destination, u16::from_be_bytes([d0, d1])),
            seq: u32::from_be_bytes([q0, q1, q2, q3]),
            ack: u32::from_be_bytes([a0, a1, a2, a3]),
            flags,
            payload: (end - start - header) as u32,
        })
    }

    /// The acknowledgement number of a segment that does not end its connection.
    pub(crate) fn acknowledges(&self) -> Option<u32> {
        (self.flags & (ACK | RST) == ACK).then_some(self.ack)
    }

    /// Whether it ends its connection at once.
    pub(crate) fn is_reset(&self) -> bool {
        self.flags & RST != 0
    }

    /// The reset that answers it (RFC 9293 section 3.5.2), from host `from` to host `to`; `None` for a reset.
    pub(crate) fn reset(&self, from: u16, to: u16) -> Option<Vec<u8>> {
        if self.is_reset() {
            return None;
        }
        let numbers = if self.flags & ACK != 0 {
            (self.ack, None)
        } else {
            let length = self.payload + u32::from(self.flags & SYN != 0) + u32::from(self.flags & FIN != 0);
            (0, Some(self.seq.wrapping_add(length)))
        };
        let flow = Flow { local: self.destination, remote: self.source };
        Some(reset(flow, numbers, from, to))
    }
}

/// A reset of `flow` with a sequence number, and perhaps an acknowledgement number.
pub(crate) fn reset(flow: Flow, (seq, ack): (u32, Option<u32>), from: u16, to: u16) -> Vec<u8> {
    let path = Path {
        flow,
        source_mac: hosts::mac(from),
        next_hop: None,
        next_hop_mac: hosts::mac(to),
        vlan: VlanTags::default(),
        mtu: xwarp_leg::MTU,
        queue: QueueId(0),
    };
    let fields = Fields {
        seq: SeqNum::new(seq),
        ack: SeqNum::new(ack.unwrap_or(0)),
        flags: Flags { rst: true, ack: ack.is_some(), ..Flags::default() },
        ..Fields::default()
    };
    let mut bytes = vec![0; HEAD_BYTES];
    let len = Headers::new(&path).emit(&mut bytes, &fields, 0, Sum::default()).unwrap_or(0);
    bytes.truncate(len);
    bytes
}

/// Addresses, and where the segment begins and ends, counted from the IP header.
type Packet = (IpAddr, IpAddr, usize, usize);

fn v4(ip: &[u8]) -> Option<Packet> {
    let [version, _, l0, l1, _, _, f0, f1, _, protocol, _, _, rest @ ..] = ip.first_chunk::<20>()?;
    let [s0, s1, s2, s3, d0, d1, d2, d3] = *rest;
    let start = usize::from(version & 15) * 4;
    let fragment = u16::from_be_bytes([*f0, *f1]) & FRAGMENT != 0;
    if version >> 4 != 4 || start < 20 || *protocol != PROTOCOL_TCP || fragment {
        return None;
    }
    let (source, destination) = (Ipv4Addr::new(s0, s1, s2, s3), Ipv4Addr::new(d0, d1, d2, d3));
    Some((source.into(), destination.into(), start, u16::from_be_bytes([*l0, *l1]).into()))
}

fn v6(ip: &[u8]) -> Option<Packet> {
    let header = ip.first_chunk::<IPV6>()?;
    let [version, _, _, _, l0, l1, next, _, addresses @ ..] = header;
    if version >> 4 != 6 || *next != PROTOCOL_TCP {
        return None;
    }
    let (source, destination) = addresses.split_first_chunk::<16>()?;
    let destination = destination.first_chunk::<16>()?;
    let end = IPV6 + usize::from(u16::from_be_bytes([*l0, *l1]));
    Some((Ipv6Addr::from(*source).into(), Ipv6Addr::from(*destination).into(), IPV6, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(v6: bool) -> Flow {
        let [source, destination] = [1, 2].map(|host| hosts::addresses(host)[usize::from(v6)]);
        Flow { local: SocketAddr::new(source, 1000), remote: SocketAddr::new(destination, 2000) }
    }

    #[test]
    fn a_reset_is_parsed_as_it_was_made_and_not_answered() {
        for v6 in [false, true] {
            let flow = flow(v6);
            let bytes = reset(flow, (7, Some(9)), 1, 2);
            let header = Header::parse(&bytes, bytes.len()).unwrap();
            assert_eq!((header.source, header.destination), (flow.local, flow.remote));
            assert_eq!((header.seq, header.ack, header.payload), (7, 9, 0));
            assert!(header.is_reset());
            assert_eq!((header.reset(2, 1), header.acknowledges()), (None, None));
            // Each truncation is refused.
            for len in 0..bytes.len() {
                assert_eq!(Header::parse(&bytes[..len], len), None, "{len} bytes");
            }
        }
    }

    #[test]
    fn a_syn_for_nobody_is_acknowledged_by_the_reset() {
        let mut bytes = reset(flow(false), (u32::MAX, None), 1, 2);
        bytes[14 + 20 + 13] = SYN;
        let syn = Header::parse(&bytes, bytes.len()).unwrap();
        let answer = syn.reset(2, 1).unwrap();
        let answer = Header::parse(&answer, answer.len()).unwrap();
        assert_eq!((answer.seq, answer.ack, answer.flags), (0, 0, RST | ACK));
        assert_eq!((answer.source, answer.destination), (syn.destination, syn.source));
    }

    #[test]
    fn other_packets_are_none() {
        let bytes = reset(flow(false), (7, None), 1, 2);
        for (at, value) in
            [(12, 9), (14, 0x65), (14, 0x44), (14 + 9, 17), (14 + 6, 0x20), (14 + 7, 1), (14 + 20 + 12, 0x40)]
        {
            let mut other = bytes.clone();
            other[at] = value;
            assert_eq!(Header::parse(&other, other.len()), None, "byte {at} is {value}");
        }
    }
}
