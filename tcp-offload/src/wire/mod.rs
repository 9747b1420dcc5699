//! Parsing and emitting of headers: Ethernet (with VLAN tags), IPv4, IPv6, TCP with its options, and the ICMP errors
//! that concern TCP. Checksums are computed and verified here; no code here keeps state.
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use std::{
    hash::{Hash, Hasher},
    net::{IpAddr, SocketAddr},
};

use crate::{link::QueueId, seq::SeqNum};

mod checksum;
mod emit;
mod extensions;
mod icmp;
mod ip;
mod options;
mod parse;
mod template;
#[cfg(test)]
mod tests;

pub(crate) use checksum::RunningSum;
pub use checksum::Sum;
pub use emit::{Fields, HOP_LIMIT, Headers, MAX_HEADER_BYTES, send_bare, send_reset};
pub use options::TIMESTAMPS_BYTES;
pub use parse::parse;
pub use template::Template;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The address of both ends of a connection within this host, as of the kernel's `lo`. No station of a network has it.
    pub const LOOPED: Self = Self([0; 6]);
}

/// The four-tuple of a connection, as seen from this end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// Our address and port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub remote: SocketAddr,
}

/// Up to two 802.1Q/802.1ad tags, outermost first: each a (EtherType, TCI) pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct VlanTags(pub [Option<(u16, u16)>; 2]);

/// The path of one connection: addresses, next hop, tags, MTU and queue of its frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Addresses and ports.
    pub flow: Flow,
    /// Our interface's Ethernet address.
    pub source_mac: Mac,
    /// The next hop's IP address: a gateway's, or the peer's own. `None` for a path that was taken from a received
    /// frame and has not been looked up yet.
    pub next_hop: Option<IpAddr>,
    /// The next hop's Ethernet address.
    pub next_hop_mac: Mac,
    /// Tags that frames carry.
    pub vlan: VlanTags,
    /// Largest IP packet on this path, in bytes (the interface's or route's MTU, not the Ethernet frame).
    pub mtu: u16,
    /// Queue on which frames are sent: the queue on which the peer's frames arrive.
    pub queue: QueueId,
}

/// Hashes addresses and ports in as few words as possible, because each received segment is looked up by them.
impl Hash for Flow {
    #[inline]
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        match (self.local.ip(), self.remote.ip()) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => {
                hasher.write_u64(u64::from(local.to_bits()) << 32 | u64::from(remote.to_bits()));
            }
            (local, remote) => {
                for ip in [local, remote] {
                    let bits = match ip {
                        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
                        IpAddr::V6(ip) => ip.to_bits(),
                    };
                    hasher.write_u64((bits >> 64) as u64);
                    hasher.write_u64(bits as u64);
                }
            }
        }
        hasher.write_u32(u32::from(self.local.port()) << 16 | u32::from(self.remote.port()));
    }
}

impl Flow {
    /// The peer's address.
    pub fn remote_ip(&self) -> IpAddr {
        self.remote.ip()
    }
}

/// The TCP control bits (RFC 9293 section 3.1; ECE and CWR of RFC 3168). URG has no meaning here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags {
    /// No more data from the sender.
    pub fin: bool,
    /// Synchronize sequence numbers.
    pub syn: bool,
    /// Reset the connection.
    pub rst: bool,
    /// Push function.
    pub psh: bool,
    /// The acknowledgment field is significant.
    pub ack: bool,
    /// ECN echo (RFC 3168 section 6.1).
    pub ece: bool,
    /// Congestion window reduced (RFC 3168 section 6.1).
    pub cwr: bool,
}

impl Flags {
    /// The control bits in the header's fourteenth byte.
    const fn from_byte(byte: u8) -> Self {
        Self {
            fin: byte & 0x01 != 0,
            syn: byte & 0x02 != 0,
            rst: byte & 0x04 != 0,
            psh: byte & 0x08 != 0,
            ack: byte & 0x10 != 0,
            ece: byte & 0x40 != 0,
            cwr: byte & 0x80 != 0,
        }
    }

    /// The header's fourteenth byte.
    #[expect(clippy::inline_always, reason = "its callers know most of the bits")]
    #[inline(always)]
    const fn to_byte(self) -> u8 {
        (self.fin as u8)
            | (self.syn as u8) << 1
            | (self.rst as u8) << 2
            | (self.psh as u8) << 3
            | (self.ack as u8) << 4
            | (self.ece as u8) << 6
            | (self.cwr as u8) << 7
    }

    /// Whether this is a SYN without ACK, RST or FIN, which asks for a new connection.
    pub const fn is_plain_syn(self) -> bool {
        self.syn && !self.ack && !self.rst && !self.fin
    }
}

/// The timestamps option (RFC 7323 section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timestamps {
    /// `TSval`: the sender's clock.
    pub value: u32,
    /// `TSecr`: the clock value echoed; meaningful with ACK only.
    pub echo: u32,
}

/// One block of the SACK option (RFC 2018 section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SackBlock {
    /// First sequence number of the block.
    pub left: SeqNum,
    /// The sequence number after its last one.
    pub right: SeqNum,
}

/// The TCP options that are supported. Others are skipped (RFC 9293 section 3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Maximum segment size, in bytes.
    pub mss: Option<u16>,
    /// Window scale shift count as sent, possibly above 14.
    pub window_scale: Option<u8>,
    /// SACK permitted.
    pub sack_permitted: bool,
    /// Timestamps.
    pub timestamps: Option<Timestamps>,
    /// SACK blocks, in the order sent; only the first [`Options::sack_count`] are valid.
    pub sack: [SackBlock; 4],
    /// Number of SACK blocks.
    pub sack_count: u8,
}

impl Options {
    /// The SACK blocks of the segment.
    pub fn sack_blocks(&self) -> &[SackBlock] {
        self.sack.get(..usize::from(self.sack_count)).unwrap_or_default()
    }
}

/// The ECN field of the IP header (RFC 3168 section 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ecn {
    /// Not ECN-capable.
    #[default]
    NotEct,
    /// ECT(1).
    Ect1,
    /// ECT(0).
    Ect0,
    /// Congestion experienced.
    Ce,
}

/// A received TCP segment: everything except the payload's bytes, which stay in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Ethernet source: the next hop that the peer's frames come from.
    pub source_mac: Mac,
    /// Ethernet destination.
    pub destination_mac: Mac,
    /// Tags that the frame carried.
    pub vlan: VlanTags,
    /// Queue on which it arrived.
    pub queue: QueueId,
    /// Local is the destination, remote the source.
    pub flow: Flow,
    /// Sequence number.
    pub seq: SeqNum,
    /// Acknowledgment number; meaningful with [`Flags::ack`].
    pub ack: SeqNum,
    /// Control bits.
    pub flags: Flags,
    /// The window field, unscaled.
    pub window: u16,
    /// Options.
    pub options: Options,
    /// The IP header's ECN field.
    pub ecn: Ecn,
    /// The payload's first byte in the frame, counted from the Ethernet header.
    pub payload_start: usize,
    /// Payload bytes, by the IP header's length.
    pub payload_len: usize,
    /// The checksum field contained only the sum of the pseudo-header: a local sender left the checksum to its
    /// hardware, or a corrupted frame looks like it. It may be accepted only from a sender that does so habitually.
    pub partial_checksum: bool,
}

/// The fields of a segment that differ from one to the next of an undisturbed transfer. A segment that header prediction can admit
/// consists of them: it has no control bit but ACK and PSH, and no option that concerns an open connection but timestamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentCore {
    /// Sequence number.
    pub seq: SeqNum,
    /// Acknowledgment number.
    pub ack: SeqNum,
    /// Push function.
    pub psh: bool,
    /// The window field, unscaled.
    pub window: u16,
    /// Timestamps.
    pub timestamps: Option<Timestamps>,
    /// The IP header's ECN field.
    pub ecn: Ecn,
    /// See [`Segment::payload_start`].
    pub payload_start: usize,
    /// Payload bytes.
    pub payload_len: usize,
}

impl Segment {
    /// The fields that differ within an undisturbed transfer.
    #[inline]
    pub fn core(&self) -> SegmentCore {
        let Self { seq, ack, flags, window, ref options, ecn, payload_start, payload_len, .. } = *self;
        let (psh, timestamps) = (flags.psh, options.timestamps);
        SegmentCore { seq, ack, psh, window, timestamps, ecn, payload_start, payload_len }
    }

    /// [`Self::core`], if header prediction can admit the segment.
    #[inline]
    pub fn predictable(&self) -> Option<SegmentCore> {
        const PREDICTABLE: Flags =
            Flags { fin: false, syn: false, rst: false, psh: false, ack: true, ece: false, cwr: false };
        let only_core = Flags { psh: false, ..self.flags } == PREDICTABLE && self.options.sack_count == 0;
        only_core.then(|| self.core())
    }
}

/// An ICMP error that quotes a TCP segment of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IcmpError {
    /// The quoted segment's flow, as seen from this end: local is the quoted source.
    pub flow: Flow,
    /// The quoted segment's sequence number.
    pub seq: SeqNum,
    /// The kind of the error.
    pub kind: IcmpKind,
}

/// The kind of an [`IcmpError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IcmpKind {
    /// Fragmentation needed and DF set (RFC 1191), or Packet Too Big (RFC 8201).
    TooBig {
        /// MTU of the next hop, in bytes; 0 from an old router that does not report it.
        mtu: u32,
    },
    /// Destination unreachable, of any other code.
    Unreachable {
        /// Hard errors (RFC 1122 section 4.2.3.9: protocol or port unreachable) mean that no endpoint is there.
        hard: bool,
    },
}

/// The content of a received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inbound {
    /// A TCP segment with correct checksums, except for [`Segment::partial_checksum`].
    Tcp(Segment),
    /// An ICMP error that quotes a TCP segment.
    Icmp(IcmpError),
    /// A packet that does not concern TCP.
    Other,
}

/// Why a frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A header or the payload does not lie within the frame, or headers do not lie in its first chunk.
    #[error("truncated")]
    Truncated,
    /// A header's own length field is impossible.
    #[error("bad header length")]
    HeaderLength,
    /// The packet is an IP fragment.
    #[error("fragment")]
    Fragment,
    /// The IPv4 header checksum is wrong.
    #[error("IPv4 header checksum")]
    IpChecksum,
    /// The TCP (or ICMP) checksum is wrong.
    #[error("TCP checksum")]
    Checksum,
    /// Addresses that no connection of ours can have (RFC 1122 section 3.2.1.3): multicast, broadcast, unspecified, loopback,
    /// reserved, or port 0. The same address at both ends is no error: two processes of a host talk so behind `xwarpd`, and the
    /// XDP programs drop such frames from the wire.
    #[error("address")]
    Address,
    /// The packet has a source route (RFC 1122 section 3.2.1.8: only routers forward those, and an answer would follow it).
    #[error("source route")]
    SourceRoute,
    /// An extension header or option of IPv6 that a host must not skip (RFC 8200 section 4).
    #[error("extension header")]
    Extension,
    /// An IPv6 packet from or to an IPv4-mapped address, which names no interface on the wire (RFC 4291 section
    /// 2.5.5.2). As a flow, it would be mistaken for the IPv4 flow wherever both families share a key.
    #[error("IPv4-mapped IPv6 address")]
    MappedAddress,
}
