//! The receive direction in full operation: the in-order cursor and the islands beyond gaps.
//!
//! A ULPDU is placed as soon as its FPDU is there as a whole and its start is known, and delivered when the
//! cursor reaches it. What is remembered of a placed FPDU is its range and its header. The start of an FPDU
//! beyond a gap is known from a marker in it, or from the end of an FPDU before it that was checked
//! (RFC 5044 section 6).

use std::collections::VecDeque;

use super::{
    Counters, MpaError,
    deframe::{cut, pointer, verify_crc},
    hold::{Hold, Range, Ranges, StoreKey},
    layout::{LENGTH_BYTES, Layout, MARKER_SPACING},
};
use crate::{
    link::{Link, Pieces, RxFrame, part, rx_pieces},
    seq::StreamOffset,
    tcp,
    ulp::{Arrival, ConnId, Refusal, Ulp, Ulpdu},
};

/// So many frames are held whatever little is needed of them: the tail of one or two, when FPDUs are not
/// aligned with segments.
const FREE_FRAMES: usize = 4;

/// Of further frames, less than this many bytes are copied out instead: a peer that sends single bytes out
/// of order does not empty the receive rings.
const COPY_BELOW: usize = 1024;

/// One connection may hold this part of a queue's receive frames; beyond it, bytes are copied.
const FRAMES_SHARE: usize = 8;

/// All connections together leave this part of a queue's receive frames free, or the segments that everything held
/// waits for could not be received.
const FREE_SHARE: usize = 4;

/// Most separate pieces held out of order, so that a list of single bytes stays short.
const MAX_PIECES: usize = 1 << 12;

/// Most FPDUs known beyond the cursor. Those found when there are as many wait like unreachable ones.
const MAX_KNOWN: usize = 1 << 13;

/// The upper layer, and which connection this is to it.
pub(crate) struct Upper<'a, U> {
    pub ulp: &'a mut U,
    pub conn: ConnId,
}

/// Why the receiver does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Halt {
    /// The upper layer wants the FPDU at the cursor later.
    Withheld,
    /// The upper layer reads no more.
    Stopped,
    /// The stream is broken.
    Broken(MpaError),
}

impl Halt {
    /// Whether nothing more is taken.
    fn is_final(self) -> bool {
        self != Self::Withheld
    }
}

/// An FPDU at or beyond the cursor that was checked.
#[derive(Debug)]
struct Known<P> {
    start: StreamOffset,
    end: StreamOffset,
    ulpdu: usize,
    /// `None`: the upper layer wants to see it again in order; its bytes are held.
    placed: Option<P>,
}

/// What is known of the FPDUs from the cursor on.
#[derive(Debug)]
struct Track<P> {
    layout: Layout,
    crc: bool,
    /// Where the range of the next FPDU to deliver begins. All before it is done with.
    cursor: StreamOffset,
    /// In order of offset, without overlap.
    known: VecDeque<Known<P>>,
    /// A valid FPDU has been received.
    begun: bool,
    counters: Counters,
}

impl<P: Copy> Track<P> {
    /// Checks, places and delivers the FPDU at the cursor, which consists of `raw`.
    fn accept<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        raw: &Pieces<'_>,
        ulpdu: usize,
    ) -> Result<(), Halt> {
        let start = self.cursor;
        let end = self.layout.end(start, ulpdu);
        let cut = self.check(raw, start, ulpdu).map_err(Halt::Broken)?;
        self.begun = true;
        match upper.ulp.place(upper.conn, &cut, Arrival::InOrder) {
            Ok(placed) => {
                self.counters.placed_in_order += 1;
                self.deliver(upper, placed, end).inspect_err(|_| {
                    self.known.push_front(Known { start, end, ulpdu, placed: Some(placed) });
                })
            }
            Err(refusal) => {
                self.known.push_front(Known { start, end, ulpdu, placed: None });
                Err(refusal.into())
            }
        }
    }

    fn deliver<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        placed: P,
        end: StreamOffset,
    ) -> Result<(), Halt> {
        upper.ulp.deliver(upper.conn, placed)?;
        self.counters.delivered += 1;
        self.cursor = end;
        Ok(())
    }

    /// CRC first: without a good one no field of an FPDU means anything.
    fn check<'a>(
        &mut self,
        raw: &Pieces<'a>,
        start: StreamOffset,
        ulpdu: usize,
    ) -> Result<Ulpdu<'a>, MpaError> {
        if self.crc {
            verify_crc(raw).inspect_err(|_| self.counters.crc_errors += 1)?;
        }
        cut(&self.layout, raw, start, ulpdu).inspect_err(|_| self.counters.marker_errors += 1)
    }

    /// The first known FPDU that ends after `offset`.
    fn index(&self, offset: StreamOffset) -> usize {
        self.known.partition_point(|k| k.end <= offset)
    }

    /// The first placed FPDU that ends after `offset`.
    fn first_placed_after(&self, offset: StreamOffset) -> Option<Range> {
        let known = self.known.range(self.index(offset)..);
        known.filter(|k| k.placed.is_some()).map(|k| (k.start, k.end)).next()
    }
}

impl From<Refusal> for Halt {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Withhold => Self::Withheld,
            Refusal::Stop => Self::Stopped,
        }
    }
}

/// The receive direction of one connection.
#[derive(Debug)]
pub(crate) struct Receiver<P> {
    track: Track<P>,
    hold: Hold,
    /// The FPDU at the cursor waits for the upper layer.
    withheld: bool,
    /// Nothing more is read.
    stopped: bool,
}

impl<P: Copy> Receiver<P> {
    /// A receiver that only [collects](Self::collect) until [`Self::begin`].
    pub fn new() -> Self {
        let layout = Layout { origin: 0, markers: false };
        let track = Track {
            layout,
            crc: false,
            cursor: 0,
            known: VecDeque::new(),
            begun: false,
            counters: Counters::default(),
        };
        Self { track, hold: Hold::default(), withheld: false, stopped: false }
    }

    pub fn counters(&self) -> &Counters {
        &self.track.counters
    }

    pub fn held_bytes(&self) -> usize {
        self.hold.bytes()
    }

    /// The position that is waiting for the upper layer, if it is.
    pub fn withheld_at(&self) -> Option<StreamOffset> {
        (self.withheld && !self.stopped).then_some(self.track.cursor)
    }

    /// Whether a valid FPDU has been received.
    pub fn has_begun(&self) -> bool {
        self.track.begun
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether everything received has been delivered.
    pub fn is_drained(&self) -> bool {
        self.hold.is_empty() && self.track.known.is_empty()
    }

    /// Reads nothing any more. Frames go back with the next call that has the link.
    pub fn stop(&mut self) {
        self.stopped = true;
        self.track.known.clear();
    }

    pub fn release(&mut self, link: &mut dyn Link) {
        self.hold.release(link);
    }

    /// Start-up: the bytes from the beginning of the stream, without a gap, at most as many as `out` has.
    pub fn peek(&self, link: &dyn Link, out: &mut [u8]) -> usize {
        let start = self.track.cursor;
        let end = self.hold.contiguous_from(start).min(start + out.len() as u64);
        let Some(raw) = self.hold.raw(link, (start, end)) else { return 0 };
        let bytes = raw.iter().flat_map(|p| p.iter());
        out.iter_mut().zip(bytes).map(|(to, from)| *to = *from).count()
    }

    /// Start-up: the first `len` bytes are done with.
    pub fn consume(&mut self, link: &mut dyn Link, len: usize) {
        let end = self.track.cursor + len as u64;
        self.hold.remove(link, (self.track.cursor, end));
        self.track.cursor = end;
    }

    /// Start-up: holds what came. Returns false when that would be more than `most` bytes.
    pub fn collect(
        &mut self,
        link: &mut dyn Link,
        arrival: &tcp::Arrival,
        frame: RxFrame,
        most: usize,
    ) -> bool {
        match self.keep(link, arrival, frame) {
            Some((store, _)) => self.settle(link, arrival, store, most),
            None => true,
        }
    }

    /// FPDUs begin here. What has come already is worked on.
    pub fn begin<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        framing: Framing,
    ) -> Result<(), Halt> {
        self.expect(framing);
        self.advance(upper, link)?;
        let held: Ranges = self.hold.ranges().collect();
        self.place_early(upper, link, &held)
    }

    /// FPDUs will begin here; nothing has come yet.
    pub fn expect(&mut self, Framing { markers, crc }: Framing) {
        self.track.layout = Layout { origin: self.track.cursor, markers };
        self.track.crc = crc;
    }

    /// Takes a payload: places and delivers what it completes, holds the rest. Returns false when that would be more
    /// than `most` bytes; then the payload counts as not received, though some of it may have been placed.
    pub fn take<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        arrival: &tcp::Arrival,
        frame: RxFrame,
        most: usize,
    ) -> (bool, Result<(), Halt>) {
        if self.stopped {
            link.recycle(frame);
            self.release(link);
            return (true, Ok(()));
        }
        let mut outcome = Ok(());
        if self.is_drained() && arrival.offset <= self.track.cursor {
            outcome = self.take_aligned(upper, link, arrival, &frame);
            let all = self.track.cursor >= arrival.offset + arrival.len as u64;
            if all || outcome.is_err_and(Halt::is_final) {
                link.recycle(frame);
                return (true, outcome);
            }
            self.withheld = outcome.is_err();
        }
        let Some((store, fresh)) = self.keep(link, arrival, frame) else { return (true, outcome) };
        if !self.withheld {
            outcome = self.advance(upper, link);
        }
        if !outcome.is_err_and(Halt::is_final) {
            outcome = outcome.and(self.place_early(upper, link, &fresh));
        }
        if outcome.is_err_and(Halt::is_final) {
            self.release(link);
            return (true, outcome);
        }
        (self.settle(link, arrival, store, most), outcome)
    }

    /// The upper layer can take what it refused.
    pub fn resume<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
    ) -> Result<(), Halt> {
        if self.stopped {
            self.release(link);
            return Ok(());
        }
        self.advance(upper, link)
    }

    /// The fast path: whole FPDUs from the cursor on, straight from the frame, while nothing is held.
    fn take_aligned<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &dyn Link,
        arrival: &tcp::Arrival,
        frame: &RxFrame,
    ) -> Result<(), Halt> {
        let payload = rx_pieces(link, frame, arrival.start, arrival.len);
        let end = arrival.offset + arrival.len as u64;
        loop {
            let start = self.track.cursor;
            let header = self.track.layout.header(start);
            if header + LENGTH_BYTES as u64 > end {
                return Ok(());
            }
            let length = part(payload.iter().copied(), (header - arrival.offset) as usize, LENGTH_BYTES);
            let ulpdu = length.iter().flat_map(|p| p.iter()).fold(0, |n, b| n << 8 | usize::from(*b));
            let fpdu_end = self.track.layout.end(start, ulpdu);
            if fpdu_end > end {
                return Ok(());
            }
            let raw =
                part(payload.iter().copied(), (start - arrival.offset) as usize, (fpdu_end - start) as usize);
            self.track.accept(upper, &raw, ulpdu)?;
        }
    }

    /// Holds the bytes of a payload that are new, if any, and says which.
    fn keep(
        &mut self,
        link: &mut dyn Link,
        arrival: &tcp::Arrival,
        frame: RxFrame,
    ) -> Option<(StoreKey, Ranges)> {
        let end = arrival.offset + arrival.len as u64;
        let fresh = self.missing((arrival.offset.max(self.track.cursor), end));
        let bytes = fresh.iter().map(|(from, to)| to - from).sum::<u64>();
        // What the fast path has just consumed was fresh as well, and the cursor is beyond it.
        if arrival.offset >= self.track.cursor {
            self.track.counters.duplicate_bytes += arrival.len as u64 - bytes;
        }
        if fresh.is_empty() {
            link.recycle(frame);
            return None;
        }
        let store = self.hold.adopt(frame);
        for (from, to) in &fresh {
            self.hold.add((*from, *to), store, arrival.start + (from - arrival.offset) as usize);
        }
        Some((store, fresh))
    }

    /// The parts of `range` that are neither held nor placed.
    fn missing(&self, (mut at, end): Range) -> Ranges {
        let mut missing = Ranges::new();
        while at < end {
            let covers = [self.hold.first_after(at), self.track.first_placed_after(at)];
            let nearest = covers.into_iter().flatten().min().unwrap_or((end, end));
            if nearest.0 > at {
                missing.push((at, nearest.0.min(end)));
            }
            at = nearest.1;
        }
        missing
    }

    /// Walks the cursor over all that is there without a gap.
    fn advance<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
    ) -> Result<(), Halt> {
        self.withheld = false;
        loop {
            let step = self.step(upper, link);
            match step {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(halt) => {
                    self.withheld = halt == Halt::Withheld;
                    return Err(halt);
                }
            }
        }
    }

    /// Works on the FPDU at the cursor. Returns whether there is reason to look again.
    fn step<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
    ) -> Result<bool, Halt> {
        let track = &mut self.track;
        let start = track.cursor;
        if let Some(known) = track.known.front_mut()
            && known.start == start
        {
            let range = (start, known.end);
            if let Some(placed) = known.placed {
                track.deliver(upper, placed, range.1)?;
                track.known.pop_front();
                return Ok(true);
            }
            let Some(raw) = self.hold.raw(link, range) else { return Ok(false) };
            let ulpdu = cut(&track.layout, &raw, start, known.ulpdu).map_err(Halt::Broken)?;
            known.placed = Some(upper.ulp.place(upper.conn, &ulpdu, Arrival::InOrder)?);
            track.counters.placed_in_order += 1;
            drop((ulpdu, raw));
            self.hold.remove(link, range);
            return Ok(true);
        }
        let Some((ulpdu, end)) = self.next_fpdu(link)? else { return Ok(false) };
        let track = &mut self.track;
        let Some(raw) = self.hold.raw(link, (start, end)) else { return Ok(false) };
        let outcome = track.accept(upper, &raw, ulpdu);
        drop(raw);
        if track.known.front().is_none_or(|k| k.start > start || k.placed.is_some()) {
            self.hold.remove(link, (start, end));
        }
        outcome.map(|()| true)
    }

    /// The ULPDU length and the end of the FPDU at the cursor, once its header is held. An error when
    /// markers said that another one begins before that end (RFC 5044 section 8, code 3).
    fn next_fpdu(&mut self, link: &dyn Link) -> Result<Option<(usize, StreamOffset)>, Halt> {
        let track = &mut self.track;
        let start = track.cursor;
        let Some(length) = self.hold.read(link, track.layout.header(start)) else { return Ok(None) };
        let ulpdu = usize::from(u16::from_be_bytes(length));
        let end = track.layout.end(start, ulpdu);
        if track.known.front().is_some_and(|k| k.start > start && k.start < end) {
            track.counters.marker_errors += 1;
            return Err(Halt::Broken(MpaError::MarkerMismatch));
        }
        Ok(Some((ulpdu, end)))
    }

    /// Places the FPDUs beyond the cursor that became whole, or whose start became known, when the ranges
    /// `fresh` came.
    ///
    /// Such an FPDU has fresh bytes, or follows one that has. Its start is known when the FPDU before it is
    /// known, or when it has a marker: one that precedes the fresh range, one within, or the one behind. An error when
    /// what was found contradicts the FPDU at the cursor.
    fn place_early<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        fresh: &[Range],
    ) -> Result<(), Halt> {
        for &(from, to) in fresh {
            let from = from.max(self.track.cursor);
            if from >= to {
                continue;
            }
            // The FPDU before the range, and the one at its front when that is the one withheld.
            let index = self.track.index(from);
            for index in [index.checked_sub(1), Some(index)].into_iter().flatten() {
                if let Some(known) = self.track.known.get(index).filter(|k| k.end < to) {
                    self.place_chain(upper, link, known.end, from);
                }
            }
            if !self.track.layout.markers {
                continue;
            }
            let mut marker = self.track.layout.marker_before(from);
            loop {
                // An FPDU that ends before its marker is none.
                if let Some(start) = self.fpdu_of_marker(link, marker) {
                    self.place_chain(upper, link, start, from.max(marker));
                }
                if marker >= to {
                    break;
                }
                marker += MARKER_SPACING;
            }
        }
        self.next_fpdu(link).map(|_| ())
    }

    /// Where the range of the FPDU begins that the marker at `marker` belongs to, if the marker is held.
    fn fpdu_of_marker(&self, link: &dyn Link, marker: StreamOffset) -> Option<StreamOffset> {
        match pointer(self.hold.read(link, marker)?) {
            0 => Some(marker),
            back => self.track.layout.range_of_header(marker.checked_sub(u64::from(back))?),
        }
    }

    /// Places the FPDU at `start`, if it is whole and reaches beyond `fresh`, and those behind it.
    fn place_chain<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        mut start: StreamOffset,
        fresh: StreamOffset,
    ) {
        let track = &mut self.track;
        while start >= track.cursor && track.known.len() < MAX_KNOWN {
            let index = track.index(start);
            let next = track.known.get(index).map_or(StreamOffset::MAX, |k| k.start);
            let Some(length) = self.hold.read(link, track.layout.header(start)) else { return };
            let ulpdu = usize::from(u16::from_be_bytes(length));
            let end = track.layout.end(start, ulpdu);
            // Known already, or in conflict with what is known: then the cursor will find out who is right.
            if end > next || end <= fresh {
                return;
            }
            let Some(raw) = self.hold.raw(link, (start, end)) else { return };
            let Ok(cut) = track.check(&raw, start, ulpdu) else { return };
            track.begun = true;
            let placed = upper.ulp.place(upper.conn, &cut, Arrival::Early).ok();
            drop((cut, raw));
            track.known.insert(index, Known { start, end, ulpdu, placed });
            if placed.is_some() {
                track.counters.placed_early += 1;
                self.hold.remove(link, (start, end));
            } else {
                track.counters.refused_early += 1;
            }
            start = end;
        }
    }

    /// After a payload was worked on: what is still held of it stays, within the limits.
    fn settle(&mut self, link: &mut dyn Link, arrival: &tcp::Arrival, store: StoreKey, most: usize) -> bool {
        let range = (arrival.offset, arrival.offset + arrival.len as u64);
        let live = self.hold.live(store);
        if live > 0 {
            let in_order = arrival.contiguous >= range.1 && !self.withheld;
            // What is in order is always taken: it completes the FPDU that everything waits for, and is
            // less than the longest FPDU.
            let full = self.hold.bytes() > most || self.hold.pieces() > MAX_PIECES;
            if full && !in_order {
                self.hold.evict(link, store, range);
                let hold = &self.hold;
                let whole = |k: &Known<P>| hold.contiguous_from(k.start) >= k.end;
                self.track.known.retain(|k| k.placed.is_some() || whole(k));
                self.track.counters.refused_segments += 1;
                return false;
            }
            let (frames, all) = (self.hold.frames(), link.rx_frames());
            let scarce = self.hold.queue(store).is_some_and(|q| link.rx_available(q) < all / FREE_SHARE);
            let too_many = frames > all / FRAMES_SHARE || frames > FREE_FRAMES && live < COPY_BELOW;
            if scarce || too_many {
                self.track.counters.copied_bytes += self.hold.compact(link, store, range) as u64;
            }
        }
        let peak = &mut self.track.counters.held_bytes_peak;
        *peak = (*peak).max(self.hold.bytes() as u64);
        true
    }
}

/// How FPDUs of one direction are framed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Framing {
    pub markers: bool,
    pub crc: bool,
}
