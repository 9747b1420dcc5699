//! Operations of middleboxes on frames: mark, flip bits, split, join, forge. Frames may contain any bytes. Operations
//! on TCP do not change frames without a complete TCP segment in an unfragmented IPv4 or IPv6 packet.
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use crate::{seq::SeqNum, wire::Sum};

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
const TCP: usize = 20;
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_ICMPV6: u8 = 58;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const URG: u8 = 32;
const CWR: u8 = 128;

/// Positions of the parts of a frame with an IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ip {
    /// The IP header.
    at: usize,
    v6: bool,
    protocol: u8,
    /// Start of the IP payload, and the packet's end.
    body: usize,
    end: usize,
}

/// Positions of the parts of a frame with a TCP segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tcp {
    ip: Ip,
    payload: usize,
}

fn word(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?))
}

fn put<const N: usize>(frame: &mut [u8], at: usize, bytes: [u8; N]) -> Option<()> {
    *frame.get_mut(at..)?.first_chunk_mut()? = bytes;
    Some(())
}

impl Ip {
    pub fn of(frame: &[u8]) -> Option<Self> {
        let mut at = ETHERNET;
        while matches!(word(frame, at - 2)?, 0x8100 | 0x88a8) {
            at += 4;
        }
        let (v6, protocol, body, len) = match word(frame, at - 2)? {
            0x0800 => {
                let header = usize::from(*frame.get(at)? & 15) * 4;
                if header < IPV4 || word(frame, at + 6)? & 0x3fff != 0 {
                    return None;
                }
                (false, *frame.get(at + 9)?, at + header, usize::from(word(frame, at + 2)?))
            }
            0x86dd => (true, *frame.get(at + 6)?, at + IPV6, IPV6 + usize::from(word(frame, at + 4)?)),
            _ => return None,
        };
        let end = at + len;
        (body <= end && end <= frame.len()).then_some(Self { at, v6, protocol, body, end })
    }

    /// Bytes of the packet.
    pub fn len(&self) -> usize {
        self.end - self.at
    }

    /// The sum of the pseudo-header for `len` bytes of IP payload.
    fn pseudo(&self, frame: &[u8], protocol: u8, len: usize) -> Option<Sum> {
        let addresses = if self.v6 { self.at + 8..self.at + 40 } else { self.at + 12..self.at + 20 };
        Some(Sum::of(frame.get(addresses)?).and_word(protocol.into()).and_word(len as u16))
    }

    /// Sets the length of the packet to the frame's end, and the header checksum.
    fn finish(&self, frame: &mut [u8]) -> Option<()> {
        let len = frame.len() - self.at;
        if self.v6 {
            return put(frame, self.at + 4, ((len - IPV6) as u16).to_be_bytes());
        }
        put(frame, self.at + 2, (len as u16).to_be_bytes())?;
        self.checksum(frame)
    }

    fn checksum(&self, frame: &mut [u8]) -> Option<()> {
        put(frame, self.at + 10, [0; 2])?;
        let sum = Sum::of(frame.get(self.at..self.body)?).checksum();
        put(frame, self.at + 10, sum.to_be_bytes())
    }
}

impl Tcp {
    pub fn of(frame: &[u8]) -> Option<Self> {
        let ip = Ip::of(frame)?;
        let payload = ip.body + usize::from(*frame.get(ip.body + 12)? >> 4) * 4;
        let whole = ip.protocol == PROTOCOL_TCP && payload >= ip.body + TCP && payload <= ip.end;
        whole.then_some(Self { ip, payload })
    }

    pub fn payload_len(&self) -> usize {
        self.ip.end - self.payload
    }

    pub fn payload<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        frame.get(self.payload..self.ip.end).unwrap_or_default()
    }

    fn flags(&self, frame: &[u8]) -> u8 {
        frame.get(self.ip.body + 13).copied().unwrap_or_default()
    }

    pub fn seq(&self, frame: &[u8]) -> SeqNum {
        let bytes = frame.get(self.ip.body + 4..).and_then(<[u8]>::first_chunk);
        SeqNum::new(bytes.map_or(0, |b| u32::from_be_bytes(*b)))
    }

    /// The sequence number after the segment.
    pub fn next_seq(&self, frame: &[u8]) -> SeqNum {
        let flags = self.flags(frame);
        let controls = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        self.seq(frame).add(self.payload_len() as u32 + controls)
    }

    /// The bytes of the addresses and of the ports in the frame.
    pub fn flow<'a>(&self, frame: &'a [u8]) -> Option<(&'a [u8], &'a [u8])> {
        let addresses =
            if self.ip.v6 { self.ip.at + 8..self.ip.at + 40 } else { self.ip.at + 12..self.ip.at + 20 };
        Some((frame.get(addresses)?, frame.get(self.ip.body..self.ip.body + 4)?))
    }

    /// Updates lengths and checksums after the frame has changed.
    fn finish(&self, frame: &mut [u8]) -> Option<()> {
        self.ip.finish(frame)?;
        put(frame, self.ip.body + 16, [0; 2])?;
        let pseudo = self.ip.pseudo(frame, PROTOCOL_TCP, frame.len() - self.ip.body)?;
        let sum = Sum::of(frame.get(self.ip.body..)?).and(pseudo).checksum();
        put(frame, self.ip.body + 16, sum.to_be_bytes())
    }

    /// A copy of the segment with other sequence number, flags and payload.
    fn with_payload(&self, frame: &[u8], seq: SeqNum, flags: u8, payload: &[u8]) -> Option<Vec<u8>> {
        let mut copy = frame.get(..self.payload)?.to_vec();
        copy.extend_from_slice(payload);
        put(&mut copy, self.ip.body + 4, seq.value().to_be_bytes())?;
        *copy.get_mut(self.ip.body + 13)? = flags;
        self.finish(&mut copy)?;
        Some(copy)
    }
}

/// Marks the packet Congestion Experienced, if it is ECN-capable (RFC 3168 section 5). Returns whether it is.
pub(super) fn mark(frame: &mut [u8]) -> bool {
    let Some(ip) = Ip::of(frame) else { return false };
    let (at, shift) = if ip.v6 { (ip.at + 1, 4) } else { (ip.at + 1, 0) };
    let Some(byte) = frame.get_mut(at) else { return false };
    let capable = *byte >> shift & 3 != 0;
    if capable {
        *byte |= 3 << shift;
    }
    if capable && !ip.v6 {
        ip.checksum(frame);
    }
    capable
}

/// Completes the checksums of a frame with a TCP segment: its sender may have left them to the link, and a link that changes bytes is to
/// be noticed. Other frames stay as they are.
pub fn complete_checksums(frame: &mut [u8]) {
    if let Some(tcp) = Tcp::of(frame)
        && tcp.ip.end == frame.len()
    {
        let _ = tcp.finish(frame);
    }
}

/// Flips one bit after the Ethernet header.
pub(super) fn flip(frame: &mut [u8], random: u64) {
    let bits = frame.len().saturating_sub(ETHERNET) as u64 * 8;
    if bits > 0
        && let Some(byte) = frame.get_mut(ETHERNET + (random % bits / 8) as usize)
    {
        *byte ^= 1 << (random % 8);
    }
}

/// Flips one bit of the TCP payload and repairs the checksum. Returns whether there is payload.
pub(super) fn flip_unseen(frame: &mut Vec<u8>, random: u64) -> bool {
    let Some(tcp) = Tcp::of(frame) else { return false };
    frame.truncate(tcp.ip.end);
    let bits = tcp.payload_len() as u64 * 8;
    if bits == 0 {
        return false;
    }
    if let Some(byte) = frame.get_mut(tcp.payload + (random % bits / 8) as usize) {
        *byte ^= 1 << (random % 8);
    }
    tcp.finish(frame).is_some()
}

/// Splits the segment in two after `first` bytes of payload; `None` when it cannot be split. FIN and PSH stay with
/// the last byte, CWR with the first (RFC 3168 section 6.1.2).
pub(super) fn split(frame: &[u8], first: usize) -> Option<[Vec<u8>; 2]> {
    let tcp = Tcp::of(frame)?;
    let flags = tcp.flags(frame);
    let (head, tail) = tcp.payload(frame).split_at_checked(first)?;
    if head.is_empty() || tail.is_empty() || flags & (SYN | RST | URG) != 0 {
        return None;
    }
    let seq = tcp.seq(frame);
    Some([
        tcp.with_payload(frame, seq, flags & !(FIN | PSH), head)?,
        tcp.with_payload(frame, seq.add(first as u32), flags & !CWR, tail)?,
    ])
}

/// Joins two segments, if the second follows the first and no difference between their headers would be lost.
pub(super) fn join(first: &[u8], second: &[u8], most_bytes: usize) -> Option<Vec<u8>> {
    let (a, b) = (Tcp::of(first)?, Tcp::of(second)?);
    let (flags, more) = (a.flags(first), b.flags(second));
    let ack_and_window = |tcp: &Tcp, frame: &[u8]| {
        Some((*frame.get(tcp.ip.body + 8..)?.first_chunk::<4>()?, word(frame, tcp.ip.body + 14)?))
    };
    let options = |tcp: &Tcp| tcp.ip.body + TCP..tcp.payload;
    let same = a.flow(first)? == b.flow(second)?
        && first.get(..a.ip.at)? == second.get(..b.ip.at)?
        && first.get(a.ip.at + 1)? == second.get(b.ip.at + 1)?
        && ack_and_window(&a, first)? == ack_and_window(&b, second)?
        && first.get(options(&a))? == second.get(options(&b))?;
    let plain = (flags | more) & (SYN | RST | URG) == 0 && flags & FIN == 0 && more & CWR == 0;
    let follows = a.payload_len() > 0 && b.payload_len() > 0 && a.next_seq(first) == b.seq(second);
    if !(same && plain && follows) || a.ip.len() + b.payload_len() > most_bytes {
        return None;
    }
    let payload = [a.payload(first), b.payload(second)].concat();
    a.with_payload(first, a.seq(first), flags | more, &payload)
}

/// A forged reset from the sender of `frame`. It has no ACK, so that it cannot refuse a SYN.
pub(super) fn reset(frame: &[u8], seq: SeqNum) -> Option<Vec<u8>> {
    let tcp = Tcp::of(frame)?;
    let mut forged = frame.get(..tcp.ip.body + TCP)?.to_vec();
    put(&mut forged, tcp.ip.body + 4, seq.value().to_be_bytes())?;
    put(&mut forged, tcp.ip.body + 8, [0; 4])?;
    put(&mut forged, tcp.ip.body + 12, [(TCP as u8 / 4) << 4, RST])?;
    put(&mut forged, tcp.ip.body + 18, [0; 2])?;
    tcp.finish(&mut forged)?;
    Some(forged)
}

/// The ICMP error of a router for a packet that is too large for a hop of `mtu` bytes: Fragmentation Needed (RFC 1191
/// section 4) or Packet Too Big (RFC 4443 section 3.2). Its source is the receiver's address.
pub(super) fn too_big(frame: &[u8], mtu: u16) -> Option<Vec<u8>> {
    const HEADER: usize = 8;
    let ip = Ip::of(frame)?;
    let mut error: Vec<u8> = Vec::new();
    // Swap the Ethernet addresses, so that the error returns to the sender.
    error.extend_from_slice(frame.get(6..12)?);
    error.extend_from_slice(frame.get(..6)?);
    error.extend_from_slice(frame.get(12..ip.at)?);
    let quoted = ip.len().min(if ip.v6 { 1280 - IPV6 - HEADER } else { ip.body - ip.at + 8 });
    let quote = frame.get(ip.at..ip.at + quoted)?;
    let [high, low] = mtu.to_be_bytes();
    let body = if ip.v6 {
        error.extend_from_slice(&[0x60, 0, 0, 0, 0, 0, PROTOCOL_ICMPV6, 64]);
        error.extend_from_slice(frame.get(ip.at + 24..ip.at + 40)?);
        error.extend_from_slice(frame.get(ip.at + 8..ip.at + 24)?);
        let body = error.len();
        error.extend_from_slice(&[2, 0, 0, 0, 0, 0, high, low]);
        body
    } else {
        error.extend_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, PROTOCOL_ICMP, 0, 0]);
        error.extend_from_slice(frame.get(ip.at + 16..ip.at + 20)?);
        error.extend_from_slice(frame.get(ip.at + 12..ip.at + 16)?);
        let body = error.len();
        error.extend_from_slice(&[3, 4, 0, 0, 0, 0, high, low]);
        body
    };
    error.extend_from_slice(quote);
    let header = Ip { body, end: error.len(), ..ip };
    header.finish(&mut error)?;
    let sum = Sum::of(error.get(body..)?);
    let pseudo =
        if ip.v6 { header.pseudo(&error, PROTOCOL_ICMPV6, error.len() - body)? } else { Sum::default() };
    put(&mut error, body + 2, sum.and(pseudo).checksum().to_be_bytes())?;
    Some(error)
}
