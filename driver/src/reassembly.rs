//! [`Reassembler`]: IP packets that arrive in fragments, because a gateway has cleared DF in front of a narrower link, or a peer does
//! not set it. Bounded in packets, per source, in bytes and in time; an overlap ends a packet (RFC 5722, RFC 8200 section 4.5).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use xwarp_tcp::wire::Sum;

/// Largest number of packets whose fragments are held.
const MAX_PACKETS: usize = 16;
/// Largest number of them from one source.
const MAX_PER_SOURCE: usize = 8;
/// Largest number of fragments of a packet: 65535 bytes over the smallest MTU of IPv6 are 54.
const MAX_FRAGMENTS: usize = 64;
/// Time for which fragments are held. The peer's TCP retransmits earlier than it would take with the minute of RFC 8200.
const MAX_AGE: Duration = Duration::from_secs(3);

const ETHERNET: usize = 14;
const VLAN_TAG: usize = 4;
const IPV6_HEADER: usize = 40;
const FRAGMENT_HEADER: usize = 8;

/// What the fragments of a packet have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    source: [u8; 16],
    destination: [u8; 16],
    id: u32,
    is_ipv6: bool,
}

/// A fragment in a frame.
#[derive(Debug, PartialEq, Eq)]
struct Fragment<'a> {
    key: Key,
    /// The frame up to the payload, without the fragment header of IPv6.
    head: Vec<u8>,
    /// Where the IP header begins in `head`.
    ip: usize,
    payload: &'a [u8],
    /// The place of the payload in that of the packet.
    offset: usize,
    more: bool,
    /// Congestion experienced (RFC 3168).
    marked: bool,
}

/// The fragments of a packet that have arrived.
#[derive(Debug)]
struct Packet {
    key: Key,
    since: Instant,
    /// Place and bytes of each fragment; they do not overlap.
    parts: Vec<(usize, Vec<u8>)>,
    /// The length of the payload, once the last fragment has arrived.
    end: Option<usize>,
    /// Of the first fragment.
    head: Option<(Vec<u8>, usize)>,
    marked: bool,
}

/// Packets of which fragments have arrived, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Reassembler(VecDeque<Packet>);

impl Reassembler {
    /// Adds the fragment in a frame. Returns the frame of its packet when it is complete.
    pub(crate) fn add(&mut self, now: Instant, frame: &[u8]) -> Option<Vec<u8>> {
        self.0.retain(|packet| now.duration_since(packet.since) < MAX_AGE);
        let fragment = parse(frame)?;
        let key = fragment.key;
        if !self.0.iter().any(|packet| packet.key == key) {
            self.make_room(&key);
            let packet = Packet { key, since: now, parts: Vec::new(), end: None, head: None, marked: false };
            self.0.push_back(packet);
        }
        let index = self.0.iter().position(|packet| packet.key == key)?;
        match self.0.get_mut(index)?.add(fragment) {
            Ok(false) => None,
            Ok(true) => self.0.remove(index)?.whole(),
            Err(Inconsistent) => {
                self.0.remove(index);
                None
            }
        }
    }

    fn make_room(&mut self, key: &Key) {
        let of_source = |packet: &Packet| packet.key.source == key.source;
        let oldest = if self.0.iter().filter(|packet| of_source(packet)).count() >= MAX_PER_SOURCE {
            self.0.iter().position(of_source)
        } else {
            (self.0.len() >= MAX_PACKETS).then_some(0)
        };
        if let Some(oldest) = oldest {
            self.0.remove(oldest);
        }
    }
}

/// Fragments overlap, or cannot be of one packet.
#[derive(Debug, PartialEq, Eq)]
struct Inconsistent;

impl Packet {
    /// Adds a fragment. Returns whether the packet is complete.
    fn add(&mut self, fragment: Fragment<'_>) -> Result<bool, Inconsistent> {
        let Fragment { head, ip, payload, offset, more, marked, .. } = fragment;
        let end = offset + payload.len();
        if more && payload.len() % 8 != 0 || payload.is_empty() || end > usize::from(u16::MAX) {
            return Err(Inconsistent);
        }
        if self.parts.iter().any(|(start, part)| *start == offset && part.len() == payload.len()) {
            // A duplicate (RFC 8200 section 4.5).
            return Ok(false);
        }
        let overlaps = |(start, part): &(usize, Vec<u8>)| offset < start + part.len() && *start < end;
        if self.parts.iter().any(overlaps) || self.parts.len() >= MAX_FRAGMENTS {
            return Err(Inconsistent);
        }
        if !more && self.end.replace(end).is_some() {
            return Err(Inconsistent);
        }
        self.marked |= marked;
        self.parts.push((offset, payload.to_vec()));
        if offset == 0 {
            self.head = Some((head, ip));
        }
        let bytes: usize = self.parts.iter().map(|(_, part)| part.len()).sum();
        let last = self.parts.iter().map(|(start, part)| start + part.len()).max();
        if self.end.is_some() && last > self.end {
            return Err(Inconsistent);
        }
        // They do not overlap, and none is beyond the end.
        Ok(self.end == Some(bytes))
    }

    /// The frame of the packet.
    fn whole(mut self) -> Option<Vec<u8>> {
        let (mut frame, ip) = self.head?;
        self.parts.sort_unstable_by_key(|(offset, _)| *offset);
        let headers = frame.len() - ip;
        frame.extend(self.parts.into_iter().flat_map(|(_, part)| part));
        let packet = frame.get_mut(ip..)?;
        let mut put = |at: usize, value: u16| {
            packet.get_mut(at..at + 2).map(|to| to.copy_from_slice(&value.to_be_bytes()))
        };
        let length = headers + self.end?;
        if self.key.is_ipv6 {
            put(4, u16::try_from(length - IPV6_HEADER).ok()?)?;
            // The lower two bits of the traffic class.
            *packet.get_mut(1)? |= if self.marked { 0x30 } else { 0 };
        } else {
            put(2, u16::try_from(length).ok()?)?;
            put(6, 0)?;
            put(10, 0)?;
            *packet.get_mut(1)? |= if self.marked { 3 } else { 0 };
            let sum = !Sum::of(packet.get(..headers)?).fold();
            packet.get_mut(10..12)?.copy_from_slice(&sum.to_be_bytes());
        }
        Some(frame)
    }
}

/// The fragment in a frame, if there is one.
fn parse(frame: &[u8]) -> Option<Fragment<'_>> {
    let mut ip = ETHERNET;
    while matches!(*frame.get(ip - 2..ip)?, [0x81, 0] | [0x88, 0xa8]) && ip < ETHERNET + 2 * VLAN_TAG {
        ip += VLAN_TAG;
    }
    match *frame.get(ip - 2..ip)? {
        [0x08, 0x00] => parse_v4(frame, ip),
        [0x86, 0xdd] => parse_v6(frame, ip),
        _ => None,
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map(|word| u16::from_be_bytes(*word))
}

fn parse_v4(frame: &[u8], ip: usize) -> Option<Fragment<'_>> {
    const TCP: u8 = 6;
    let packet = frame.get(ip..)?;
    let headers = usize::from(packet.first()? & 0xf) * 4;
    let field = word(packet, 6)?;
    let (more, offset) = (field & 0x2000 != 0, usize::from(field & 0x1fff) * 8);
    let is_fragment = more || offset > 0;
    if packet.first()? >> 4 != 4 || headers < 20 || !is_fragment || *packet.get(9)? != TCP {
        return None;
    }
    if Sum::of(packet.get(..headers)?).fold() != u16::MAX {
        return None;
    }
    let address = |at: usize| {
        let mut octets = [0; 16];
        octets.get_mut(..4)?.copy_from_slice(packet.get(at..at + 4)?);
        Some(octets)
    };
    let key =
        Key { source: address(12)?, destination: address(16)?, id: word(packet, 4)?.into(), is_ipv6: false };
    Some(Fragment {
        key,
        head: frame.get(..ip + headers)?.to_vec(),
        ip,
        payload: packet.get(headers..usize::from(word(packet, 2)?))?,
        offset,
        more,
        marked: packet.get(1)? & 3 == 3,
    })
}

fn parse_v6(frame: &[u8], ip: usize) -> Option<Fragment<'_>> {
    const FRAGMENT: u8 = 44;
    const SKIPPED: [u8; 3] = [0, 43, 60];
    const MAX_EXTENSIONS: usize = 8;
    let packet = frame.get(ip..)?;
    if packet.first()? >> 4 != 6 {
        return None;
    }
    let (mut next, mut at) = (6, IPV6_HEADER);
    for _ in 0..MAX_EXTENSIONS {
        let kind = *packet.get(next)?;
        if kind == FRAGMENT {
            break;
        }
        if !SKIPPED.contains(&kind) {
            return None;
        }
        next = at;
        at += (usize::from(*packet.get(at + 1)?) + 1) * 8;
    }
    if *packet.get(next)? != FRAGMENT {
        return None;
    }
    let field = word(packet, at + 2)?;
    let end = IPV6_HEADER + usize::from(word(packet, 4)?);
    let mut head = frame.get(..ip + at)?.to_vec();
    *head.get_mut(ip + next)? = *packet.get(at)?;
    let key = Key {
        source: *packet.get(8..)?.first_chunk()?,
        destination: *packet.get(24..)?.first_chunk()?,
        id: u32::from_be_bytes(*packet.get(at + 4..)?.first_chunk()?),
        is_ipv6: true,
    };
    Some(Fragment {
        key,
        head,
        ip,
        payload: packet.get(at + FRAGMENT_HEADER..end)?,
        offset: usize::from(field & 0xfff8),
        more: field & 1 != 0,
        marked: packet.get(1)? & 0x30 == 0x30,
    })
}

#[cfg(test)]
mod tests;
