//! [`Template`]: the headers of a connection's plain segments. The next of them is recognised by comparing its headers with
//! those of an earlier one, so that nothing has to be parsed but what differs.

use super::{
    Flags, Options, PlainSegment, Segment, Timestamps, VlanTags,
    checksum::Sum,
    ip::{PROTOCOL_TCP, pseudo_header},
    parse::{ETHERNET_HEADER, PLAIN_HEADER, PSH},
};
use crate::{
    link::{Link, QueueId, RxFrame},
    seq::SeqNum,
};

const IPV4_HEADER: usize = 20;

/// Bytes of Ethernet without tags, IPv4 without options, and TCP with its timestamps.
const HEADERS: usize = ETHERNET_HEADER + IPV4_HEADER + PLAIN_HEADER;

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

/// The headers of a plain segment over IPv4, with which those of the connection's next segments are compared.
#[derive(Debug)]
pub struct Template {
    words: [u64; WORDS],
    /// The sum of the pseudo-header without the length.
    pseudo: Sum,
    segment: Segment,
}

impl Template {
    /// The template of the segments that follow `segment`, which was parsed from `frame`. `None` unless it is a
    /// [plain](Segment::plain) segment over IPv4, in one chunk, with timestamps and without tags.
    pub fn new(link: &dyn Link, frame: &RxFrame, segment: &Segment) -> Option<Self> {
        let chunks = link.rx_chunks(frame);
        let [chunk] = chunks.as_slice() else { return None };
        let headers = chunk.first_chunk::<HEADERS>()?;
        let usual = segment.flow.local.is_ipv4()
            && segment.vlan == VlanTags::default()
            && segment.options.timestamps.is_some()
            && segment.payload_start == HEADERS
            && !segment.partial_checksum;
        segment.plain().filter(|_| usual)?;
        let pseudo = pseudo_header(segment.flow.remote.ip(), segment.flow.local.ip(), PROTOCOL_TCP, 0);
        Some(Self { words: words(headers), pseudo, segment: *segment })
    }

    /// The segment in `frame`, if it is a plain segment of the same connection with correct checksums.
    #[inline]
    pub fn read(&self, link: &dyn Link, frame: &RxFrame) -> Option<PlainSegment> {
        let chunks = link.rx_chunks(frame);
        let [chunk] = chunks.as_slice() else { return None };
        let headers = chunk.first_chunk::<HEADERS>()?;
        let pairs = words(headers).into_iter().zip(self.words).zip(words(&COMMON));
        if pairs.fold(0, |differences, ((word, ours), common)| differences | (word ^ ours) & common) != 0 {
            return None;
        }
        let (_, packet) = chunk.split_first_chunk::<ETHERNET_HEADER>()?;
        let (ip, _) = packet.split_first_chunk::<IPV4_HEADER>()?;
        let [_, _, l0, l1, ..] = *ip;
        let len = usize::from(u16::from_be_bytes([l0, l1])).checked_sub(IPV4_HEADER)?;
        let bytes = packet.get(IPV4_HEADER..IPV4_HEADER + len)?;
        let fixed = bytes.first_chunk::<PLAIN_HEADER>()?;
        let sum = Sum::of(bytes).and(self.pseudo).and_word(len as u16);
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
            payload_len: len - PLAIN_HEADER,
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
