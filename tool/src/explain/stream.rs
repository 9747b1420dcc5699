//! One direction of a recorded TCP connection: orders the segments, distinguishes retransmissions from new data, and
//! finds the bytes that are missing in the capture.

use std::{collections::BTreeMap, time::Duration};

/// Stream offset of the first byte of a connection whose start is not in the capture. Earlier bytes have lower offsets.
pub const FIRST_OF_MIDDLE: u64 = 512;

/// Memory that a segment takes besides its bytes while it waits for earlier ones.
const SEGMENT_OVERHEAD: usize = 128;

/// A direction.
#[derive(Debug, Default)]
pub struct Stream {
    /// Sequence number of stream offset 0.
    base: Option<u32>,
    /// Bytes that were delivered, also those that were cut off in the capture.
    delivered: u64,
    /// All bytes below this offset were delivered or are missing.
    next: u64,
    /// The receiver has acknowledged all bytes below this offset.
    acked: u64,
    /// Segments beyond a gap.
    waiting: BTreeMap<u64, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    payload: Vec<u8>,
    len: usize,
    since: Option<Duration>,
}

/// The role of a segment with payload in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamPosition {
    /// The next bytes.
    InOrder,
    /// Bytes beyond a gap of this length.
    BeyondGap(u64),
    /// The bytes of a gap, and the time since the first segment beyond it.
    FillsGap(Option<Duration>),
    /// Bytes that are in the capture already.
    Repeated,
    /// The last acknowledged byte again: a keepalive probe.
    Probe,
    /// Bytes from before the first segment of the capture.
    Earlier,
}

/// Bytes in stream order.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes, and whether a segment begins with them.
    Bytes(u64, &'a [u8], bool),
    /// Bytes that are missing in the capture.
    Missing(u64, u64),
    /// Bytes at the end of a segment whose first bytes were captured.
    Cut(u64, u64),
}

impl Stream {
    /// Starts the direction with this SYN, unless bytes came before it.
    pub fn begin(&mut self, syn: u32) {
        self.base.get_or_insert(syn.wrapping_add(1));
    }

    /// Starts the direction in the middle, with the byte of this sequence number, unless its start is known.
    pub fn begin_in_the_middle(&mut self, seq: u32) {
        if self.base.is_none() {
            let (base, next) = (Some(seq.wrapping_sub(FIRST_OF_MIDDLE as u32)), FIRST_OF_MIDDLE);
            *self = Self { base, next, acked: next, ..Self::default() };
        }
    }

    /// Whether the start of the direction is known: its SYN, or its first byte in the capture.
    pub fn has_begun(&self) -> bool {
        self.base.is_some()
    }

    /// Bytes delivered in order so far.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// The stream offset of a sequence number: the one nearest to the next byte.
    fn offset(&self, seq: u32) -> Option<u64> {
        let distance = seq.wrapping_sub(self.base?.wrapping_add(self.next as u32)).cast_signed();
        self.next.checked_add_signed(distance.into())
    }

    /// Adds a segment of `len` bytes, of which `payload` was captured. `held` is the memory of all streams; the gap is
    /// given up when it exceeds `most`.
    pub fn add(
        &mut self,
        (seq, len, payload): (u32, usize, &[u8]),
        now: Option<Duration>,
        held: &mut usize,
        most: usize,
        sink: &mut dyn FnMut(Piece<'_>),
    ) -> StreamPosition {
        let Some(begin) = self.offset(seq) else { return StreamPosition::Earlier };
        let end = begin + len as u64;
        if end <= self.next {
            return if len == 1 && end == self.next {
                StreamPosition::Probe
            } else {
                StreamPosition::Repeated
            };
        }
        if begin > self.next {
            let known = self.waiting.get(&begin).is_some_and(|waiting| waiting.len >= len);
            let arrival =
                if known { StreamPosition::Repeated } else { StreamPosition::BeyondGap(begin - self.next) };
            if !known {
                let waiting = Waiting { payload: payload.to_vec(), len, since: now };
                *held += payload.len() + SEGMENT_OVERHEAD;
                if let Some(shorter) = self.waiting.insert(begin, waiting) {
                    *held -= shorter.payload.len() + SEGMENT_OVERHEAD;
                }
            }
            self.skip_acknowledged(held, sink);
            if *held > most {
                self.skip_gap(held, sink);
            }
            return arrival;
        }
        let arrival = match self.waiting.first_key_value() {
            Some((_, first)) => {
                StreamPosition::FillsGap(now.zip(first.since).and_then(|(now, since)| now.checked_sub(since)))
            }
            None => StreamPosition::InOrder,
        };
        self.deliver(begin, len, payload, sink);
        self.deliver_waiting(held, sink);
        arrival
    }

    /// The receiver acknowledges all bytes before this sequence number, so bytes before it that are missing in the
    /// capture will not come.
    pub fn acknowledge(&mut self, ack: u32, held: &mut usize, sink: &mut dyn FnMut(Piece<'_>)) {
        if let Some(offset) = self.offset(ack) {
            self.acked = self.acked.max(offset);
            self.skip_acknowledged(held, sink);
        }
    }

    fn skip_acknowledged(&mut self, held: &mut usize, sink: &mut dyn FnMut(Piece<'_>)) {
        while self.waiting.first_key_value().is_some_and(|(&begin, _)| begin <= self.acked) {
            self.skip_gap(held, sink);
        }
    }

    fn skip_gap(&mut self, held: &mut usize, sink: &mut dyn FnMut(Piece<'_>)) {
        let Some((&begin, _)) = self.waiting.first_key_value() else { return };
        if begin > self.next {
            sink(Piece::Missing(self.next, begin));
            self.next = begin;
        }
        self.deliver_waiting(held, sink);
    }

    fn deliver_waiting(&mut self, held: &mut usize, sink: &mut dyn FnMut(Piece<'_>)) {
        while let Some(entry) = self.waiting.first_entry().filter(|entry| *entry.key() <= self.next) {
            let (begin, Waiting { payload, len, .. }) = entry.remove_entry();
            *held -= payload.len() + SEGMENT_OVERHEAD;
            self.deliver(begin, len, &payload, sink);
        }
    }

    /// Delivers the new bytes of a segment that begins at or before the next byte.
    fn deliver(&mut self, begin: u64, len: usize, payload: &[u8], sink: &mut dyn FnMut(Piece<'_>)) {
        let end = begin + len as u64;
        if end <= self.next {
            return;
        }
        let old = (self.next - begin) as usize;
        if let Some(new) = payload.get(old..).filter(|new| !new.is_empty()) {
            sink(Piece::Bytes(self.next, new, old == 0));
            self.next += new.len() as u64;
            self.delivered += new.len() as u64;
        }
        if self.next < end {
            sink(Piece::Cut(self.next, end));
            self.delivered += end - self.next;
            self.next = end;
        }
    }

    /// Gives up the gaps that began this long ago: bytes that were captured in one direction only are not acknowledged.
    pub fn give_up_gaps(
        &mut self,
        now: Option<Duration>,
        age: Duration,
        held: &mut usize,
        sink: &mut dyn FnMut(Piece<'_>),
    ) {
        while let Some((_, first)) = self.waiting.first_key_value()
            && now.zip(first.since).is_some_and(|(now, since)| now.saturating_sub(since) >= age)
        {
            self.skip_gap(held, sink);
        }
    }

    /// Gives up all gaps: the capture is at its end.
    pub fn finish(&mut self, held: &mut usize, sink: &mut dyn FnMut(Piece<'_>)) {
        while !self.waiting.is_empty() {
            self.skip_gap(held, sink);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Test {
        stream: Stream,
        held: usize,
        pieces: Vec<String>,
    }

    impl Test {
        fn add(&mut self, seq: u32, len: usize, payload: &[u8]) -> StreamPosition {
            let pieces = &mut self.pieces;
            let now = Some(Duration::from_millis(5));
            self.stream.add((seq, len, payload), now, &mut self.held, 1000, &mut |piece| {
                pieces.push(match piece {
                    Piece::Bytes(at, bytes, starts) => {
                        format!("{at}{}{}", if starts { '>' } else { '+' }, String::from_utf8_lossy(bytes))
                    }
                    Piece::Missing(from, to) => format!("{from}-{to} missing"),
                    Piece::Cut(from, to) => format!("{from}-{to} cut"),
                });
            })
        }
    }

    fn begun(syn: u32) -> Test {
        let mut stream = Stream::default();
        stream.begin(syn);
        Test { stream, held: 0, pieces: Vec::new() }
    }

    #[test]
    fn reordered_and_repeated_segments() {
        let first = u32::MAX - 1;
        let at = |offset: u32| first.wrapping_add(1 + offset);
        let mut test = begun(first);
        assert_eq!(test.add(at(0), 3, b"abc"), StreamPosition::InOrder);
        assert_eq!(test.add(at(6), 3, b"ghi"), StreamPosition::BeyondGap(3));
        assert_eq!(test.add(at(6), 3, b"ghi"), StreamPosition::Repeated);
        assert_eq!(test.add(at(0), 3, b"abc"), StreamPosition::Repeated);
        assert_eq!(test.add(at(2), 1, b"c"), StreamPosition::Probe);
        assert_eq!(test.add(at(2), 4, b"cdef"), StreamPosition::FillsGap(Some(Duration::ZERO)));
        assert_eq!(test.pieces, ["0>abc", "3+def", "6>ghi"]);
        assert_eq!(test.held, 0);
    }

    #[test]
    fn bytes_that_were_acknowledged_or_not_captured_are_missing() {
        let mut test = begun(99);
        test.add(100, 5, b"ab");
        assert_eq!(test.add(115, 2, b"yz"), StreamPosition::BeyondGap(10));
        let Test { stream, held, pieces } = &mut test;
        stream.acknowledge(114, held, &mut |_| panic!("the gap may still be filled"));
        stream.acknowledge(117, held, &mut |piece| pieces.push(format!("{piece:?}")));
        assert_eq!(pieces[..2], ["0>ab", "2-5 cut"]);
        assert_eq!(pieces[2..], ["Missing(5, 15)", "Bytes(15, [121, 122], true)"]);
        assert_eq!((test.held, test.stream.delivered()), (0, 7));
    }

    #[test]
    fn a_syn_behind_data_does_not_begin_the_stream_again() {
        let mut test = begun(0);
        test.add(1, 4, b"data");
        test.add(9, 2, b"yz");
        let held = test.held;
        test.stream.begin(5000);
        assert_eq!((test.stream.delivered(), test.held), (4, held));
        assert_eq!(test.add(5, 4, b"more"), StreamPosition::FillsGap(Some(Duration::ZERO)));
        assert_eq!((test.stream.delivered(), test.held), (10, 0));
    }

    #[test]
    fn a_gap_is_given_up_when_memory_runs_out() {
        let mut test = begun(0);
        for at in [901, 1801] {
            test.add(at, 400, &[b'x'; 400]);
        }
        assert_eq!(test.held, 400 + SEGMENT_OVERHEAD, "only the second one waits");
        assert_eq!(test.pieces[0], "0-900 missing");
        let Test { stream, held, pieces } = &mut test;
        stream.finish(held, &mut |piece| pieces.push(format!("{piece:?}")));
        assert_eq!(pieces[2], "Missing(1300, 1800)");
        assert_eq!(test.held, 0);
    }
}
