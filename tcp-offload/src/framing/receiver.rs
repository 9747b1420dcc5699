//! The receive direction in full operation: the in-order cursor and the islands beyond gaps.
//!
//! A ULPDU is placed as soon as its frame is complete and the start of the frame is known, and delivered when the cursor
//! reaches it. Of a placed frame only the range and the header are kept. The start of a frame beyond a gap is known from the
//! probes of the framing ([`Framing::first_probe`]), or from the end of a checked frame before it (RFC 5044 section 6).

pub(crate) use super::track::{Halt, Upper};
use super::{
    Carried, Framing,
    hold::{Hold, Range, Ranges, StoreKey},
    track::{Known, Track},
};
use crate::{
    framing::FramingCounters,
    link::{Link, part, read_at, rx_pieces},
    seq::StreamOffset,
    tcp,
    time::Instant,
    ulp::{Arrival, Ulp, Ulpdu},
};

/// Chunks that one connection may hold even if few of their bytes are needed. They hold the tails of one or two segments
/// when frames are not aligned with segments.
const FREE_CHUNKS: usize = 4;

/// Beyond [`FREE_CHUNKS`], a receive frame with fewer needed bytes than this is copied and recycled, so that a peer that sends
/// single bytes out of order does not empty the receive rings.
const COPY_BELOW: usize = 1024;

/// One connection may hold one in this many of a queue's receive chunks; beyond that share, bytes are copied.
const CHUNKS_SHARE: usize = 8;

/// One in this many of a queue's receive chunks stays free of held bytes of all connections, because the segments
/// that fill the gaps need frames too.
const FREE_SHARE: usize = 4;

/// Largest number of separate pieces that one connection holds out of order, which bounds a list of single bytes.
const MAX_PIECES: usize = 1 << 12;

/// The receive direction of one connection.
#[derive(Debug)]
pub(crate) struct Receiver<P, F> {
    track: Track<P, F>,
    hold: Hold,
    /// Offset of the FPDU at the cursor that the upper layer withholds, and the time when it was first withheld.
    withheld: Option<(StreamOffset, Instant)>,
    /// Nothing more is read.
    stopped: bool,
}

impl<P: Copy, F: Framing> Receiver<P, F> {
    /// A receiver that only [collects](Self::collect) until [`Self::begin`].
    pub fn new() -> Self {
        Self { track: Track::new(), hold: Hold::default(), withheld: None, stopped: false }
    }

    pub fn counters(&self) -> &FramingCounters {
        &self.track.counters
    }

    pub fn held_bytes(&self) -> usize {
        self.hold.bytes()
    }

    /// Bytes held of the incomplete FPDU (or start-up frame) at the cursor; 0 while the upper layer withholds it.
    pub fn unfinished_bytes(&self) -> usize {
        let cursor = self.track.cursor;
        let none = self.withheld.is_some() || self.hold.is_empty();
        if none { 0 } else { (self.hold.contiguous_from(cursor) - cursor) as usize }
    }

    /// The end of the last held byte.
    pub fn held_to(&self) -> Option<StreamOffset> {
        self.hold.end()
    }

    /// The start of the next FPDU to deliver.
    pub fn cursor(&self) -> StreamOffset {
        self.track.cursor
    }

    /// Drops the bytes held beyond a gap. Returns whether there were any.
    pub fn shed(&mut self, link: &mut dyn Link) -> bool {
        let range = (self.hold.contiguous_from(self.track.cursor), StreamOffset::MAX);
        let before = self.hold.bytes();
        self.hold.remove(link, range);
        self.track.forget_parts(&self.hold, range);
        self.hold.bytes() < before
    }

    /// When the upper layer first withheld the FPDU at the cursor, if it withholds it.
    pub fn withheld_since(&self) -> Option<Instant> {
        self.withheld.map(|(_, since)| since)
    }

    /// Records whether the work up to `now` has halted at an FPDU that the upper layer withholds.
    fn note_halt(&mut self, now: Instant, outcome: Result<(), Halt>) {
        let at = self.track.cursor;
        if outcome != Err(Halt::Withheld) {
            self.withheld = None;
        } else if self.withheld.is_none_or(|(before, _)| before != at) {
            self.withheld = Some((at, now));
            self.track.counters.withheld += 1;
        }
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

    /// Whether it reads, nothing is held or withheld, and no FPDU beyond the cursor is known. An FPDU may be known although TCP sees
    /// no gap: it was placed from a payload that was refused then.
    #[inline]
    pub fn allows_fast_path(&self) -> bool {
        // Nearly always all of it is true, so all is tested at once.
        !self.stopped & self.withheld.is_none() & self.hold.is_empty() & self.track.known.is_empty()
    }

    /// Stops reading, and recycles all held frames.
    pub fn stop(&mut self, link: &mut dyn Link) {
        (self.stopped, self.withheld) = (true, None);
        self.track.stop();
        self.hold.release(link);
    }

    /// Start-up: copies the contiguous bytes from the cursor into `out`; returns their number.
    pub fn peek(&self, link: &dyn Link, out: &mut [u8]) -> usize {
        let start = self.track.cursor;
        let end = self.hold.contiguous_from(start).min(start + out.len() as u64);
        let Some(raw) = self.hold.raw(link, (start, end)) else { return 0 };
        let bytes = raw.iter().flat_map(|p| p.iter());
        out.iter_mut().zip(bytes).map(|(to, from)| *to = *from).count()
    }

    /// Start-up: drops the first `len` bytes and moves the cursor past them.
    pub fn consume(&mut self, link: &mut dyn Link, len: usize) {
        let end = self.track.cursor + len as u64;
        self.hold.remove(link, (self.track.cursor, end));
        self.track.cursor = end;
    }

    /// Start-up: holds a payload. Returns false, without holding it, when more than `most` bytes would be held.
    pub fn collect(&mut self, link: &mut dyn Link, carried: Carried, most: usize) -> bool {
        let payload = carried.payload;
        match self.keep(link, carried) {
            Some((store, _)) => self.enforce_limits(link, &payload, store, most),
            None => true,
        }
    }

    /// Starts full operation at the cursor, and processes the bytes that have already arrived.
    pub fn begin<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        framing: F,
    ) -> Result<(), Halt> {
        self.expect(framing);
        self.advance(now, upper, link)?;
        let held: Ranges = self.hold.islands_from(self.track.cursor).collect();
        self.place_early(upper, link, &held)
    }

    /// Sets the framing of the FPDUs that begin at the cursor.
    pub fn expect(&mut self, framing: F) {
        if self.hold.is_empty() {
            // An idle connection must not keep the memory that its start-up used.
            self.hold = Hold::default();
        }
        self.track.framing = framing.starting_at(self.track.cursor);
    }

    /// Processes the rest of a payload, from which [`Self::take_whole`] has taken FPDUs with this `outcome`, or none: places and
    /// delivers the FPDUs that the payload completes, and holds what follows. Returns false when more than `most` bytes would be
    /// held; the payload then counts as not received, though a part of it may have been placed.
    pub fn receive<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        carried: Carried,
        most: usize,
        mut outcome: Result<(), Halt>,
    ) -> (bool, Result<(), Halt>) {
        if self.stopped {
            link.recycle(carried.frame);
            return (true, Ok(()));
        }
        if self.is_drained() && carried.payload.offset <= self.track.cursor {
            outcome = outcome.and_then(|()| self.take_aligned(upper, link, &carried));
            let all = self.track.cursor >= carried.payload.offset + carried.payload.len as u64;
            if all || outcome.is_err_and(Halt::is_final) {
                link.recycle(carried.frame);
                return (true, outcome);
            }
            self.note_halt(now, outcome);
        }
        self.receive_held(now, upper, link, carried, most, outcome)
    }

    /// Holds a payload, and processes the FPDUs that it completes.
    fn receive_held<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        carried: Carried,
        most: usize,
        mut outcome: Result<(), Halt>,
    ) -> (bool, Result<(), Halt>) {
        let payload = carried.payload;
        let Some((store, fresh)) = self.keep(link, carried) else { return (true, outcome) };
        if self.withheld.is_none() {
            outcome = self.advance(now, upper, link);
        }
        if !outcome.is_err_and(Halt::is_final) {
            outcome = outcome.and(self.place_early(upper, link, &fresh));
        }
        if outcome.is_err_and(Halt::is_final) {
            return (true, outcome);
        }
        (self.enforce_limits(link, &payload, store, most), outcome)
    }

    /// Offers withheld FPDUs to the upper layer again.
    pub fn resume<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
    ) -> Result<(), Halt> {
        if self.stopped { Ok(()) } else { self.advance(now, upper, link) }
    }

    /// The fast path of [`Self::take_aligned`] for a payload in one piece: processes the FPDUs from the cursor on up to the first that
    /// is not [whole](Framing::whole). Returns whether all were.
    #[inline]
    pub fn take_whole<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        first: StreamOffset,
        payload: &[u8],
    ) -> Result<bool, Halt> {
        let Some(at) = self.track.cursor.checked_sub(first).map(|at| at as usize) else { return Ok(false) };
        if at >= payload.len() {
            return Ok(true);
        }
        match self.take_next(upper, first, payload, at)? {
            Some(at) if at < payload.len() => self.take_others(upper, first, payload, at),
            next => Ok(next.is_some()),
        }
    }

    /// Continues [`Self::take_whole`] behind the first FPDU. In one loop, the only FPDU of most payloads would pay for what the
    /// compiler computes before the loop.
    #[inline(never)]
    fn take_others<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        first: StreamOffset,
        payload: &[u8],
        mut at: usize,
    ) -> Result<bool, Halt> {
        while at < payload.len() {
            let Some(next) = self.take_next(upper, first, payload, at)? else { return Ok(false) };
            at = next;
        }
        Ok(true)
    }

    /// Processes the FPDU at `at` in the payload if it is [whole](Framing::whole). Returns where it ends.
    #[expect(clippy::inline_always, reason = "it is the body of `take_whole` and of a loop")]
    #[inline(always)]
    fn take_next<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        first: StreamOffset,
        payload: &[u8],
        at: usize,
    ) -> Result<Option<usize>, Halt> {
        let raw = [payload];
        let bytes = payload.get(at..).unwrap_or_default();
        let Some(whole) = self.track.framing.whole(bytes, first + at as u64) else { return Ok(None) };
        let cut = Ulpdu::between_markers(&raw, at + whole.ulpdu_at, whole.ulpdu, whole.to_marker);
        let end = at + whole.len;
        self.track.take(upper, &cut, first + end as u64)?;
        Ok(Some(end))
    }

    /// Processes the complete FPDUs from the cursor on directly from the frame, while nothing is held.
    fn take_aligned<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &dyn Link,
        Carried { payload: arrival, frame, .. }: &Carried,
    ) -> Result<(), Halt> {
        let (first, len) = (arrival.offset, arrival.len);
        let payload = &rx_pieces(link, frame, arrival.start, len)[..];
        if let [bytes] = *payload
            && self.take_whole(upper, first, bytes)?
        {
            return Ok(());
        }
        let end = first + len as u64;
        loop {
            let start = self.track.cursor;
            let framing = self.track.framing;
            let at = framing.head(start);
            let mut head = F::Head::default();
            let head_bytes = head.as_mut();
            if at + head_bytes.len() as u64 > end {
                return Ok(());
            }
            read_at(payload, (at - first) as usize, head_bytes);
            let ulpdu = framing.ulpdu_len(head).map_err(Halt::Broken)?;
            let fpdu_end = framing.end(start, ulpdu);
            if fpdu_end > end {
                return Ok(());
            }
            let (from, to) = ((start - first) as usize, (fpdu_end - first) as usize);
            if to - from == len {
                // Nearly always, as our senders fill a segment with one frame: no list of pieces has to be made.
                self.track.accept(upper, payload, ulpdu, fpdu_end)?;
            } else if let [piece] = payload {
                self.track.accept(upper, &[piece.get(from..to).unwrap_or_default()], ulpdu, fpdu_end)?;
            } else {
                self.track.accept(upper, &part(payload, from, to - from), ulpdu, fpdu_end)?;
            }
        }
    }

    /// Holds the new bytes of a payload, if any, and returns their ranges.
    fn keep(
        &mut self,
        link: &mut dyn Link,
        Carried { payload: arrival, frame, .. }: Carried,
    ) -> Option<(StoreKey, Ranges)> {
        let end = arrival.offset + arrival.len as u64;
        let fresh = self.missing((arrival.offset.max(self.track.cursor), end));
        let bytes = fresh.iter().map(|(from, to)| to - from).sum::<u64>();
        // Bytes that the fast path has just consumed are not duplicates, though the cursor is beyond them.
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
        let mut held = self.hold.islands_from(at).peekable();
        let mut placed = self.track.placed_within(at, end).peekable();
        while at < end {
            let held_first = match (held.peek(), placed.peek()) {
                (Some(held), Some(placed)) => held < placed,
                (held, _) => held.is_some(),
            };
            let there = if held_first { held.next() } else { placed.next() };
            let (from, to) = there.unwrap_or((end, end));
            if from > at {
                missing.push((at, from.min(end)));
            }
            at = to;
        }
        missing
    }

    /// Advances the cursor over all complete FPDUs without a gap.
    fn advance<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
    ) -> Result<(), Halt> {
        let outcome = loop {
            match self.step(upper, link) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(halt) => break Err(halt),
            }
        };
        self.note_halt(now, outcome);
        outcome
    }

    /// Advances the FPDU at the cursor by one step. Returns whether another step may be possible.
    fn step<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
    ) -> Result<bool, Halt> {
        let track = &mut self.track;
        let start = track.cursor;
        if let Some(known) = track.known.front()
            && known.start == start
        {
            let range = (start, known.end);
            if let Some(placed) = known.placed {
                track.deliver(upper, placed, range.1)?;
                track.known.pop_front();
                return Ok(true);
            }
            let Some(raw) = self.hold.raw(link, range) else { return Ok(false) };
            let ulpdu = track.framing.cut(&raw, start, known.ulpdu).map_err(Halt::Broken)?;
            upper.ulp.take(upper.conn, &ulpdu)?;
            drop(raw);
            track.known.pop_front();
            track.taken(range.1);
            self.hold.remove(link, range);
            return Ok(true);
        }
        let Some((ulpdu, end)) = self.next_fpdu(link)? else { return Ok(false) };
        let track = &mut self.track;
        let Some(raw) = self.hold.raw(link, (start, end)) else { return Ok(false) };
        let outcome = track.accept(upper, &raw, ulpdu, end);
        drop(raw);
        if track.known.front().is_none_or(|k| k.start > start) {
            self.hold.remove(link, (start, end));
        }
        outcome.map(|()| true)
    }

    /// The ULPDU length and the end of the FPDU at the cursor, once its header is held. Fails when a marker has shown
    /// that another FPDU begins before that end (RFC 5044 section 8, code 3).
    fn next_fpdu(&mut self, link: &dyn Link) -> Result<Option<(usize, StreamOffset)>, Halt> {
        let track = &mut self.track;
        let start = track.cursor;
        let Some(head) = self.hold.read(link, track.framing.head(start)) else { return Ok(None) };
        let ulpdu = track.framing.ulpdu_len(head).map_err(Halt::Broken)?;
        let end = track.framing.end(start, ulpdu);
        if track.known.front().is_some_and(|k| k.start > start && k.start < end) {
            track.counters.marker_errors += 1;
            return Err(Halt::Broken(F::OVERLAP));
        }
        Ok(Some((ulpdu, end)))
    }

    /// Places the FPDUs beyond the cursor that the newly received ranges `fresh` completed, or whose start they made
    /// known.
    ///
    /// Such an FPDU contains fresh bytes, or follows one that does. Its start is known when the FPDU before it is
    /// known, or when it has a marker: before the fresh range, within it, or right after it. Fails when an FPDU that
    /// was found contradicts the FPDU at the cursor.
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
            // The FPDU before the range, and the FPDU at its front, which is known when it is the withheld one.
            let known = &self.track.known;
            let place = known.seek(from);
            let before = [known.before(place), Some(place)];
            let ends = before.map(|place| known.get(place?).map(|k| k.end).filter(|end| *end < to));
            for end in ends.into_iter().flatten() {
                self.place_chain(upper, link, end, from);
            }
            let framing = self.track.framing;
            let mut probe = framing.first_probe(&self.hold, from);
            while let Some(at) = probe {
                // A frame cannot end before its own marker, and a frame that begins after the range has not changed.
                if let Some(start) = framing.frame_at(&self.hold, link, at).filter(|start| *start < to) {
                    self.place_chain(upper, link, start, from.max(at));
                }
                probe = framing.next_probe(at, from, to);
            }
        }
        self.next_fpdu(link).map(|_| ())
    }

    /// Places the FPDU at `start`, if it is complete and ends after `fresh`, and the complete FPDUs that follow it.
    fn place_chain<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        mut start: StreamOffset,
        fresh: StreamOffset,
    ) {
        let track = &mut self.track;
        while start >= track.cursor && track.may_check_early(start) {
            let place = track.known.seek(start);
            let next = track.known.get(place).map_or(StreamOffset::MAX, |k| k.start);
            let Some(head) = self.hold.read(link, track.framing.head(start)) else { return };
            let Ok(ulpdu) = track.framing.ulpdu_len(head) else { return };
            let end = track.framing.end(start, ulpdu);
            // The FPDU is already known, or it conflicts with a known one, which is decided when the cursor reaches
            // it.
            if end > next || end <= fresh {
                return;
            }
            let Some(raw) = self.hold.raw(link, (start, end)) else { return };
            let Some(cut) = track.check_early(&raw, start, ulpdu) else { return };
            track.begun = true;
            let placed = upper.ulp.place(upper.conn, &cut, Arrival::Early).ok();
            drop(raw);
            track.known.insert(place, Known { start, end, ulpdu, placed });
            if placed.is_some() {
                track.counters.placed_early += 1;
                self.hold.remove(link, (start, end));
            } else {
                track.counters.refused_early += 1;
            }
            start = end;
        }
    }

    /// Enforces the limits on the bytes of a payload that are still held after it was processed: evicts or copies
    /// them. Returns false when they were evicted.
    fn enforce_limits(
        &mut self,
        link: &mut dyn Link,
        arrival: &tcp::NewPayload,
        store: StoreKey,
        most: usize,
    ) -> bool {
        let range = (arrival.offset, arrival.offset + arrival.len as u64);
        let live = self.hold.live(store);
        if live > 0 {
            let in_order = arrival.contiguous >= range.1 && self.withheld.is_none();
            // Payload in order is always kept: it belongs to the FPDU for which all others wait, and is less than the
            // longest FPDU.
            let full = self.hold.bytes() > most || self.hold.pieces() > MAX_PIECES;
            if full && !in_order {
                self.hold.evict(link, store, range);
                self.track.forget_parts(&self.hold, range);
                self.track.counters.refused_segments += 1;
                return false;
            }
            let (chunks, all) = (self.hold.chunks(), link.rx_capacity());
            let scarce = self.hold.queue(store).is_some_and(|q| link.rx_available(q) < all / FREE_SHARE);
            let too_many = chunks > all / CHUNKS_SHARE || chunks > FREE_CHUNKS && live < COPY_BELOW;
            if scarce || too_many {
                self.track.counters.copied_bytes += self.hold.compact(link, store, range) as u64;
            }
        }
        let peak = &mut self.track.counters.held_bytes_peak;
        *peak = (*peak).max(self.hold.bytes() as u64);
        true
    }
}

#[cfg(test)]
mod tests;
