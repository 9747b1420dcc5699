//! [`Template`]: the headers of a connection's plain segments. The next of them is recognised by comparing its headers with
//! those of an earlier one, so that nothing has to be parsed but what differs.

use super::{
    Flags, Options, PlainSegment, Segment, Timestamps, VlanTags,
    checksum::Sum,
    ip::{PROTOCOL_TCP, pseudo_header},
    parse::{ETHERNET_HEADER, PLAIN_HEADER, PSH},
};
use crate::{
    link::{Link, QueueId, RxFrame, rx_pieces},
    seq::SeqNum,
};

const IPV4_HEADER: usize = 20;

/// Position of the TCP header.
const TCP_START: usize = ETHERNET_HEADER + IPV4_HEADER;

/// Bytes of Ethernet without tags, IPv4 without options, and TCP with its timestamps.
const HEADERS: usize = TCP_START + PLAIN_HEADER;

/// Number of words in the headers, without the last two bytes.
const WORDS: usize = HEADERS / 8;

/// The bits of the headers that all plain segments of a connection have in common.
#[rustfmt::skip]
const COMMON: [u8; HEADERS] = {
    const ALL: u8 = 0xff;
    [
        ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL,
        // IPv4: the lengths and the identification differ, the time to live and the checksum.
        ALL, ALL, 0, 0, 0, 0, ALL, ALL, 0, ALL, 0, 0, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL,
        // TCP: the sequence numbers differ, PSH, the window, the checksum, the urgent pointer, and the timestamps.
        ALL, ALL, ALL, ALL, 0, 0, 0, 0, 0, 0, 0, 0, ALL, !PSH, 0, 0, 0, 0, 0, 0,
        ALL, ALL, ALL, ALL, 0, 0, 0, 0, 0, 0, 0, 0,
    ]
};

/// The words of the headers, as the machine reads them.
#[inline]
fn words(headers: &[u8; HEADERS]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(headers.as_chunks().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    words
}

/// The words of the headers, without the bits that differ from segment to segment.
#[inline]
fn common_words(headers: &[u8; HEADERS]) -> [u64; WORDS] {
    let mut words = words(headers);
    for (word, common) in words.iter_mut().zip(self::words(&COMMON)) {
        *word &= common;
    }
    words
}

/// The headers of a plain segment over IPv4, with which those of the connection's next segments are compared.
#[derive(Debug)]
pub struct Template {
    /// Its [common words](common_words).
    words: [u64; WORDS],
    /// The sum of the pseudo-header without the length.
    pseudo: Sum,
    segment: Segment,
}

impl Template {
    /// The template of the segments that follow `segment`, which was parsed from `frame`. `None` unless it is a
    /// [plain](Segment::plain) segment over IPv4, with timestamps and without tags.
    pub fn new(link: &dyn Link, frame: &RxFrame, segment: &Segment) -> Option<Self> {
        let headers = link.rx_head(frame).first_chunk::<HEADERS>()?;
        let usual = segment.flow.local.is_ipv4()
            && segment.vlan == VlanTags::default()
            && segment.options.timestamps.is_some()
            && segment.payload_start == HEADERS
            && !segment.partial_checksum;
        segment.plain().filter(|_| usual)?;
        let pseudo = pseudo_header(segment.flow.remote.ip(), segment.flow.local.ip(), PROTOCOL_TCP, 0);
        Some(Self { words: common_words(headers), pseudo, segment: *segment })
    }

    /// The segment in `frame`, if it is a plain segment of the same connection with correct checksums.
    #[inline]
    pub fn read(&self, link: &dyn Link, frame: &RxFrame) -> Option<PlainSegment> {
        let head = link.rx_head(frame);
        let headers = head.first_chunk::<HEADERS>()?;
        let differences = |(seen, ours): (u64, u64)| seen ^ ours;
        if common_words(headers).into_iter().zip(self.words).map(differences).fold(0, |all, one| all | one)
            != 0
        {
            return None;
        }
        let (_, packet) = headers.split_first_chunk::<ETHERNET_HEADER>()?;
        let (ip, tcp) = packet.split_first_chunk::<IPV4_HEADER>()?;
        let [_, _, l0, l1, ..] = *ip;
        let len = usize::from(u16::from_be_bytes([l0, l1])).checked_sub(IPV4_HEADER)?;
        let fixed = tcp.first_chunk::<PLAIN_HEADER>()?;
        let sum = match head.get(TCP_START..TCP_START + len) {
            Some(bytes) => Sum::of(bytes),
            None => sum_of_chain(link, frame, len)?,
        };
        let sum = sum.and(self.pseudo).and_word(len as u16);
        if !(Sum::of_array(ip).is_correct() && sum.is_correct()) {
            return None;
        }
        let [_, _, _, _, q0, q1, q2, q3, a0, a1, a2, a3, _, flags, w0, w1, rest @ ..] = *fixed;
        let [.., v0, v1, v2, v3, e0, e1, e2, e3] = rest;
        Some(PlainSegment {
            seq: SeqNum::new(u32::from_be_bytes([q0, q1, q2, q3])),
            ack: SeqNum::new(u32::from_be_bytes([a0, a1, a2, a3])),
            psh: flags & PSH != 0,
            window: u16::from_be_bytes([w0, w1]),
            timestamps: Some(Timestamps {
                value: u32::from_be_bytes([v0, v1, v2, v3]),
                echo: u32::from_be_bytes([e0, e1, e2, e3]),
            }),
            ecn: self.segment.ecn,
            payload_start: HEADERS,
            payload_len: len.checked_sub(PLAIN_HEADER)?,
        })
    }

    /// The whole of a segment that was [read](Self::read) from a frame of `queue`.
    pub fn segment(&self, plain: &PlainSegment, queue: QueueId) -> Segment {
        let PlainSegment { seq, ack, psh, window, timestamps, ecn, payload_start, payload_len } = *plain;
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

/// The sum of the `len` bytes from the TCP header on, in a frame whose first chunk does not have all of them. `None` if the frame
/// is too short.
#[inline(never)]
fn sum_of_chain(link: &dyn Link, frame: &RxFrame, len: usize) -> Option<Sum> {
    (TCP_START + len <= frame.len()).then(|| Sum::of_pieces(&rx_pieces(link, frame, TCP_START, len)))
}
