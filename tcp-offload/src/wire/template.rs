//! [`Template`]: the headers of a connection's predictable segments. The next of them is recognised by comparing its headers with
//! those of an earlier one, so that nothing has to be parsed but what differs.

use super::{
    Flags, Options, Segment, SegmentCore, Timestamps, VlanTags,
    checksum::Sum,
    ip::{PROTOCOL_TCP, pseudo_header},
    parse::{ETHERNET_HEADER, PSH, TIMESTAMPED_HEADER},
};
use crate::{
    link::{Link, QueueId, RxFrame, rx_pieces},
    seq::SeqNum,
};

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

/// Bytes of Ethernet without tags, IP without options, and TCP with its timestamps.
const V4_HEADERS: usize = ETHERNET_HEADER + IPV4_HEADER + TIMESTAMPED_HEADER;
const V6_HEADERS: usize = ETHERNET_HEADER + IPV6_HEADER + TIMESTAMPED_HEADER;

/// Number of words in the headers, without the last bytes.
const V4_WORDS: usize = V4_HEADERS / 8;
const V6_WORDS: usize = V6_HEADERS / 8;

const ALL: u8 = 0xff;

/// The bits of the headers that all predictable segments of a connection have in common.
const V4_COMMON: [u8; V4_HEADERS] =
    // The lengths and the identification differ, the time to live and the checksum.
    common([ALL, ALL, 0, 0, 0, 0, ALL, ALL, 0, ALL, 0, 0, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL]);
const V6_COMMON: [u8; V6_HEADERS] = {
    let mut ip = [ALL; IPV6_HEADER];
    // The flow label may differ, the length and the hop limit.
    [ip[1], ip[2], ip[3], ip[4], ip[5], ip[7]] = [0xf0, 0, 0, 0, 0, 0];
    common(ip)
};

/// The common bits of Ethernet, an IP header with the common bits `ip`, and TCP.
const fn common<const IP: usize, const N: usize>(ip: [u8; IP]) -> [u8; N] {
    // The sequence numbers differ, PSH, the window, the checksum, the urgent pointer, and the timestamps.
    #[rustfmt::skip]
    const TCP: [u8; TIMESTAMPED_HEADER] = [
        ALL, ALL, ALL, ALL, 0, 0, 0, 0, 0, 0, 0, 0, ALL, !PSH, 0, 0, 0, 0, 0, 0,
        ALL, ALL, ALL, ALL, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    let mut all = [ALL; N];
    let (_, packet) = all.split_at_mut(ETHERNET_HEADER);
    let (to_ip, to_tcp) = packet.split_at_mut(IP);
    to_ip.copy_from_slice(&ip);
    to_tcp.copy_from_slice(&TCP);
    all
}

/// The words of the headers, as the machine reads them.
#[inline]
fn words<const N: usize, const W: usize>(headers: &[u8; N]) -> [u64; W] {
    let mut words = [0; W];
    for (word, bytes) in words.iter_mut().zip(headers.as_chunks().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    words
}

/// The words of the headers, without the bits that differ from segment to segment.
#[inline]
fn common_words<const N: usize, const W: usize>(headers: &[u8; N], common: &[u8; N]) -> [u64; W] {
    let mut words: [u64; W] = words(headers);
    for (word, common) in words.iter_mut().zip(self::words::<N, W>(common)) {
        *word &= common;
    }
    words
}

/// Whether the headers have the common words `ours`. All words are compared, because nearly always they are equal.
#[inline]
fn agree<const N: usize, const W: usize>(headers: &[u8; N], common: &[u8; N], ours: &[u64; W]) -> bool {
    let seen: [u64; W] = common_words(headers, common);
    seen.into_iter().zip(*ours).map(|(seen, ours)| seen ^ ours).fold(0, |all, one| all | one) == 0
}

/// The [common words](common_words) of the headers over each version of IP.
#[derive(Debug)]
enum Common {
    V4([u64; V4_WORDS]),
    V6([u64; V6_WORDS]),
}

/// The headers of a predictable segment, with which those of the connection's next segments are compared.
#[derive(Debug)]
pub struct Template {
    common: Common,
    /// The sum of the pseudo-header without the length.
    pseudo: Sum,
    segment: Segment,
}

impl Template {
    /// The template of the segments that follow `segment`, which was parsed from `frame`. `None` unless it is a
    /// [predictable](Segment::predictable) segment with timestamps and without tags.
    pub fn new(link: &dyn Link, frame: &RxFrame, segment: &Segment) -> Option<Self> {
        let head = link.rx_head(frame);
        let (common, headers) = if segment.flow.local.is_ipv4() {
            (Common::V4(common_words(head.first_chunk()?, &V4_COMMON)), V4_HEADERS)
        } else {
            (Common::V6(common_words(head.first_chunk()?, &V6_COMMON)), V6_HEADERS)
        };
        let is_bare = segment.vlan == VlanTags::default()
            && segment.options.timestamps.is_some()
            && segment.payload_start == headers;
        segment.predictable().filter(|_| is_bare)?;
        let pseudo = pseudo_header(segment.flow.remote.ip(), segment.flow.local.ip(), PROTOCOL_TCP, 0);
        Some(Self { common, pseudo, segment: *segment })
    }

    /// Whether the segments have partial checksums.
    pub const fn partial_checksum(&self) -> bool {
        self.segment.partial_checksum
    }

    /// The segment in `frame`, if it is a predictable segment of the same connection with correct checksums, or
    /// [partial](Self::partial_checksum) ones.
    #[expect(
        clippy::inline_always,
        reason = "nearly all segments of a run are read by one of its two callers"
    )]
    #[inline(always)]
    pub fn read(&self, link: &dyn Link, frame: &RxFrame) -> Option<SegmentCore> {
        let head = link.rx_head(frame);
        let (payload_start, len, fixed) = match &self.common {
            Common::V4(words) => {
                let headers = head.first_chunk()?;
                let (_, packet) = headers.split_first_chunk::<ETHERNET_HEADER>()?;
                let ip = packet.first_chunk::<IPV4_HEADER>()?;
                if !(agree(headers, &V4_COMMON, words) && Sum::of_array(ip).is_correct()) {
                    return None;
                }
                let [_, _, l0, l1, ..] = *ip;
                let len = usize::from(u16::from_be_bytes([l0, l1])).checked_sub(IPV4_HEADER)?;
                (V4_HEADERS, len, headers.last_chunk::<TIMESTAMPED_HEADER>()?)
            }
            Common::V6(words) => {
                let headers = head.first_chunk()?;
                let (_, packet) = headers.split_first_chunk::<ETHERNET_HEADER>()?;
                if !agree(headers, &V6_COMMON, words) {
                    return None;
                }
                let [_, _, _, _, l0, l1] = *packet.first_chunk()?;
                (V6_HEADERS, usize::from(u16::from_be_bytes([l0, l1])), headers.last_chunk()?)
            }
        };
        let start = payload_start - TIMESTAMPED_HEADER;
        let pseudo = self.pseudo.and_word(len as u16);
        if self.partial_checksum() {
            if start + len > frame.len() || !is_partial(fixed, pseudo) {
                return None;
            }
        } else {
            let sum = match head.get(start..start + len) {
                Some(bytes) => Sum::of(bytes),
                None => sum_of_chain(link, frame, start, len)?,
            };
            if !sum.and(pseudo).is_correct() {
                return None;
            }
        }
        let [_, _, _, _, q0, q1, q2, q3, a0, a1, a2, a3, _, flags, w0, w1, rest @ ..] = *fixed;
        let [.., v0, v1, v2, v3, e0, e1, e2, e3] = rest;
        Some(SegmentCore {
            seq: SeqNum::new(u32::from_be_bytes([q0, q1, q2, q3])),
            ack: SeqNum::new(u32::from_be_bytes([a0, a1, a2, a3])),
            psh: flags & PSH != 0,
            window: u16::from_be_bytes([w0, w1]),
            timestamps: Some(Timestamps {
                value: u32::from_be_bytes([v0, v1, v2, v3]),
                echo: u32::from_be_bytes([e0, e1, e2, e3]),
            }),
            ecn: self.segment.ecn,
            payload_start,
            payload_len: len.checked_sub(TIMESTAMPED_HEADER)?,
        })
    }

    /// The whole of a segment that was [read](Self::read) from a frame of `queue`.
    pub fn segment(&self, core: &SegmentCore, queue: QueueId) -> Segment {
        let SegmentCore { seq, ack, psh, window, timestamps, ecn, payload_start, payload_len } = *core;
        Segment {
            queue,
            seq,
            ack,
            flags: Flags { psh, ..self.segment.flags },
            window,
            options: Options { timestamps, ..self.segment.options },
            ecn,
            payload_start,
            payload_len,
            ..self.segment
        }
    }
}

/// Whether the checksum field of a TCP header is the sum of the pseudo-header.
#[inline(never)]
fn is_partial(header: &[u8; TIMESTAMPED_HEADER], pseudo: Sum) -> bool {
    u16::from_be_bytes([header[16], header[17]]) == pseudo.fold()
}

/// The sum of the `len` bytes from byte `start` on, in a frame whose first chunk does not have all of them. `None` if the frame is
/// too short.
#[inline(never)]
fn sum_of_chain(link: &dyn Link, frame: &RxFrame, start: usize, len: usize) -> Option<Sum> {
    (start + len <= frame.len()).then(|| Sum::of_pieces(&rx_pieces(link, frame, start, len)))
}
