//! The retransmit queue: every segment sent and not yet cumulatively acknowledged, with its frame, and the SACK
//! scoreboard in the same entries (RFC 9293 section 3.8.1, RFC 2018 section 5, RFC 8985 section 5.2).

use std::collections::VecDeque;

use super::rack::sent_after;
use crate::{
    link::{Link, TxFrame},
    seq::StreamOffset,
    steps,
    time::Instant,
    wire::Sum,
};

/// The place where the payload of a segment is stored until it is acknowledged.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Payload {
    /// A FIN has no payload; its segment is rebuilt for each transmission.
    Fin,
    /// In the frame that was sent, behind `header` bytes of headers.
    Frame { frame: TxFrame, header: usize },
    /// On the heap: each retransmission copies it into a frame that is released at once.
    Heap(Box<[u8]>),
}

impl Payload {
    /// Releases the frame, if there is one.
    pub(super) fn release(self, link: &mut dyn Link) {
        if let Self::Frame { frame, .. } = self {
            link.release(frame);
        }
    }
}

/// A segment that occupies sequence space.
#[derive(Debug)]
pub(super) struct SentSegment {
    pub start: StreamOffset,
    /// One past its last byte; the FIN counts as one byte.
    pub end: StreamOffset,
    pub payload: Payload,
    /// Sum of the payload.
    pub payload_sum: Sum,
    /// Chunks of the frame in which it was first sent: its share of the budget, even while the payload is on the heap.
    pub chunks: u16,
    /// The times at which it was first and last sent.
    pub first_sent: Instant,
    pub sent: Instant,
    pub retransmitted: bool,
    /// Selectively acknowledged.
    pub sacked: bool,
    /// Its last transmission counts as lost.
    pub lost: bool,
    /// It was never transmitted, because the ring was full.
    pub unsent: bool,
    /// For a `sacked` entry: all entries from this one up to this offset are `sacked`.
    pub run_end: StreamOffset,
}

/// The transmission state of a segment, copied to the segments that it is cut into.
#[derive(Debug, Clone, Copy)]
pub(super) struct Status {
    pub sent: Instant,
    retransmitted: bool,
    sacked: bool,
    lost: bool,
    unsent: bool,
}

impl SentSegment {
    pub(super) fn new(
        start: StreamOffset,
        end: StreamOffset,
        payload: Payload,
        payload_sum: Sum,
        sent: Instant,
    ) -> Self {
        Self { end, payload, payload_sum, ..Self::fin(start, sent) }
    }

    /// The FIN at `start`.
    pub(super) fn fin(start: StreamOffset, sent: Instant) -> Self {
        Self {
            start,
            end: start + 1,
            payload: Payload::Fin,
            payload_sum: Sum::default(),
            chunks: 1,
            first_sent: sent,
            sent,
            retransmitted: false,
            sacked: false,
            lost: false,
            unsent: false,
            run_end: start + 1,
        }
    }

    pub(super) fn status(&self) -> Status {
        let Self { sent, retransmitted, sacked, lost, unsent, .. } = *self;
        Status { sent, retransmitted, sacked, lost, unsent }
    }

    pub(super) fn restore(&mut self, status: &Status) {
        let Status { sent, retransmitted, sacked, lost, unsent } = *status;
        (self.sent, self.retransmitted, self.sacked) = (sent, retransmitted, sacked);
        (self.lost, self.unsent, self.run_end) = (lost, unsent, self.end);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.end - self.start
    }

    fn spilled_bytes(&self) -> usize {
        if let Payload::Heap(bytes) = &self.payload { bytes.len() } else { 0 }
    }
}

/// Stale transmissions that the list keeps besides one for each entry.
const SPARE_TRANSMISSIONS: usize = 64;

/// Stale transmissions that [`Queue::last_sent_before`] passes over.
const MAX_STALE: usize = 8;

/// A block of the SACK option, as offsets.
pub(super) type Block = (StreamOffset, StreamOffset);

/// One transmission of a segment.
#[derive(Debug, Clone, Copy)]
struct Transmission {
    sent: Instant,
    /// End of the segment.
    end: StreamOffset,
}

impl Transmission {
    fn is_before(&self, sent: Instant, end: StreamOffset) -> bool {
        sent_after(sent, end, self.sent, self.end)
    }

    /// Whether it is the last transmission of `entry`, and `entry` is in flight.
    fn is_last_of(&self, entry: &SentSegment) -> bool {
        (self.sent, self.end) == (entry.sent, entry.end) && !entry.sacked && !entry.lost
    }
}

/// The retransmit queue, ordered by stream offset, without holes.
#[derive(Debug, Default)]
pub(super) struct Queue {
    entries: VecDeque<SentSegment>,
    /// Chunks of all entries.
    chunks: usize,
    /// Bytes sent that are neither acknowledged, cumulatively or selectively, nor lost: the `pipe` of RFC 6675.
    in_flight: u64,
    sacked: usize,
    lost: usize,
    retransmitted: usize,
    /// No entry before this offset counts as lost.
    lost_from: StreamOffset,
    /// Transmissions in the order of RFC 8985 (`RACK_sent_after`), oldest first: the last one of each entry in flight,
    /// and stale ones. `None` until a loss may have to be detected, and again after the queue was empty: most connections
    /// never lose a segment.
    transmissions: Option<VecDeque<Transmission>>,
    /// Bytes of payload on the heap.
    spilled_bytes: usize,
    /// No payload before this offset is in a frame.
    spilled_to: StreamOffset,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Chunks of the frames in which the segments were first sent.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Whether a segment counts as lost.
    pub(super) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Number of selectively acknowledged segments.
    pub(super) fn sacked(&self) -> usize {
        self.sacked
    }

    /// Whether any entry was retransmitted or selectively acknowledged, so that the order of offsets need not be the
    /// order of transmission and delivery.
    pub(super) fn is_disordered(&self) -> bool {
        self.sacked > 0 || self.retransmitted > 0
    }

    pub(super) fn front(&self) -> Option<&SentSegment> {
        self.entries.front()
    }

    pub(super) fn last_index(&self) -> Option<usize> {
        self.entries.len().checked_sub(1)
    }

    pub(super) fn entry(&mut self, index: usize) -> Option<&mut SentSegment> {
        self.entries.get_mut(index)
    }

    /// Appends a segment that was sent for the first time.
    #[expect(clippy::inline_always, reason = "each new segment calls it once")]
    #[inline(always)]
    pub(super) fn push(&mut self, entry: SentSegment) {
        self.in_flight += entry.bytes();
        self.chunks += usize::from(entry.chunks);
        if self.entries.capacity() == 0 {
            // Enough for the set-up of a connection; an idle one stays small.
            self.entries.reserve_exact(2);
        }
        let (sent, end) = (entry.sent, entry.end);
        self.entries.push_back(entry);
        if self.transmissions.is_some() {
            self.record_transmission(sent, end);
        }
    }

    /// Records a transmission at its place in the order: at the end, except for several of one instant, and for the
    /// pieces of a replaced entry, which keep its time.
    #[inline(never)]
    fn record_transmission(&mut self, sent: Instant, end: StreamOffset) {
        let Some(list) = &mut self.transmissions else { return };
        let later = list.iter().rev().take_while(|last| !last.is_before(sent, end)).count();
        list.insert(list.len() - later, Transmission { sent, end });
        if list.len() > 2 * self.entries.len() + SPARE_TRANSMISSIONS {
            self.collect_transmissions();
        }
    }

    /// Drops stale transmissions, and adds those of entries that are in flight again.
    fn collect_transmissions(&mut self) {
        if self.transmissions.is_some() {
            self.transmissions = Some(self.transmissions_in_flight());
        }
    }

    /// The last transmission of each entry in flight, oldest first.
    fn transmissions_in_flight(&self) -> VecDeque<Transmission> {
        let in_flight = self.entries.iter().filter(|e| !e.sacked && !e.lost);
        let mut list: VecDeque<_> = in_flight.map(|e| Transmission { sent: e.sent, end: e.end }).collect();
        list.make_contiguous().sort_unstable_by_key(|t| (t.sent, t.end));
        list
    }

    /// The list of transmissions, which is kept from now on.
    fn keep_transmissions(&mut self) -> &mut VecDeque<Transmission> {
        if self.transmissions.is_none() {
            self.transmissions = Some(self.transmissions_in_flight());
        }
        self.transmissions.get_or_insert_default()
    }

    /// Removes the first entry if all of it is below `una`, after a call of `f` with it. Returns its payload.
    pub(super) fn pop_acked(
        &mut self,
        una: StreamOffset,
        mut f: impl FnMut(&SentSegment),
    ) -> Option<Payload> {
        let entry = self.entries.front().filter(|e| e.end <= una)?;
        f(entry);
        if entry.sacked {
            self.sacked -= 1;
        } else if entry.lost {
            self.lost -= 1;
        } else {
            self.in_flight -= entry.bytes();
        }
        self.retransmitted -= usize::from(entry.retransmitted);
        self.spilled_bytes -= entry.spilled_bytes();
        self.chunks -= usize::from(entry.chunks);
        let payload = self.entries.pop_front().map(|entry| entry.payload);
        if let Some(list) = &mut self.transmissions {
            while list.pop_front_if(|oldest| oldest.end <= una).is_some() {}
            if self.entries.is_empty() {
                self.transmissions = None;
            }
        }
        payload
    }

    fn index_from(&self, offset: StreamOffset) -> usize {
        self.entries.partition_point(|e| e.start < offset)
    }

    /// Index of the first entry after entry `index` that begins at or beyond `offset`.
    fn index_behind(&self, index: usize, offset: StreamOffset) -> usize {
        let single = self.entries.get(index).is_none_or(|e| e.end >= offset);
        if single { index + 1 } else { self.index_from(offset) }
    }

    /// Marks the entries that lie wholly within `blocks` as selectively acknowledged, and calls `f` for each newly
    /// marked entry. Runs of marked entries are skipped, and each walk shortens the next one through the same entries,
    /// as in a union-find structure: the cost of an ACK is that of its newly marked entries plus some binary searches,
    /// whatever blocks its sender chooses.
    pub(super) fn sack(&mut self, blocks: &[Block], mut f: impl FnMut(&SentSegment)) {
        for &(left, right) in blocks {
            let first = self.index_from(left);
            let (mut index, mut reached) = (first, left);
            while let Some(entry) = self.entries.get_mut(index).filter(|e| e.end <= right) {
                steps::add(1);
                if !entry.sacked {
                    if entry.lost {
                        self.lost -= 1;
                    } else {
                        self.in_flight -= entry.bytes();
                    }
                    f(entry);
                    (entry.sacked, entry.lost, entry.run_end) = (true, false, entry.end);
                    self.sacked += 1;
                }
                reached = entry.run_end;
                index = self.index_behind(index, reached);
            }
            self.shorten_runs(first, reached);
        }
    }

    /// Records in the entries that a walk visits that all entries from `index` up to `reached` are marked.
    fn shorten_runs(&mut self, mut index: usize, reached: StreamOffset) {
        while let Some(entry) = self.entries.get_mut(index).filter(|e| e.end <= reached) {
            let run_end = std::mem::replace(&mut entry.run_end, reached);
            index = self.index_behind(index, run_end);
        }
    }

    /// Clears the scoreboard, because the receiver has dropped data that it had reported (RFC 2018 section 8).
    pub(super) fn renege(&mut self) {
        for entry in &mut self.entries {
            if entry.sacked {
                entry.sacked = false;
                self.in_flight += entry.bytes();
            }
        }
        self.sacked = 0;
        self.collect_transmissions();
    }

    /// Clears all loss marks, which were spurious. Segments that were never transmitted stay lost.
    pub(super) fn forget_losses(&mut self) {
        for entry in self.entries.iter_mut().filter(|entry| entry.lost && !entry.unsent) {
            entry.lost = false;
            self.lost -= 1;
            self.in_flight += entry.bytes();
        }
        self.collect_transmissions();
    }

    /// Marks entry `index` as lost.
    pub(super) fn mark_lost(&mut self, index: usize) {
        if let Some(entry) = self.entries.get_mut(index)
            && !entry.lost
            && !entry.sacked
        {
            entry.lost = true;
            self.lost += 1;
            self.in_flight -= entry.bytes();
            // Nothing before the first one is searched.
            self.lost_from = if self.lost == 1 { entry.start } else { self.lost_from.min(entry.start) };
        }
    }

    /// Marks the last entry as never transmitted, so that it is sent like a lost one.
    pub(super) fn mark_last_unsent(&mut self) {
        if let Some(last) = self.last_index() {
            self.mark_lost(last);
        }
        if let Some(entry) = self.entries.back_mut() {
            entry.unsent = true;
        }
    }

    /// Offset of the first segment that was never transmitted. Such segments are always the last ones.
    pub(super) fn unsent_from(&self) -> Option<StreamOffset> {
        self.entries.iter().rev().take_while(|entry| entry.unsent).last().map(|entry| entry.start)
    }

    /// Marks all entries longer than `bytes` as lost. Returns whether there are any.
    pub(super) fn mark_lost_longer_than(&mut self, bytes: usize) -> bool {
        let mut any = false;
        for index in 0..self.entries.len() {
            if self.entries.get(index).is_some_and(|e| e.bytes() > bytes as u64) {
                self.mark_lost(index);
                any = true;
            }
        }
        any
    }

    /// End offset of the lost segment, if exactly one is lost.
    pub(super) fn only_lost(&mut self) -> Option<StreamOffset> {
        let index = if self.lost == 1 { self.next_lost()? } else { return None };
        self.entries.get(index).map(|e| e.end)
    }

    /// The latest time before (`xmit`, `end`) at which an entry in flight was sent. If the last [`MAX_STALE`]
    /// transmissions before (`xmit`, `end`) are all stale, it is the time of the earliest of them, which is later
    /// than the right one.
    pub(super) fn last_sent_before(&mut self, xmit: Instant, end: StreamOffset) -> Option<Instant> {
        self.keep_transmissions();
        let list = self.transmissions.as_ref()?;
        let count = list.partition_point(|t| t.is_before(xmit, end));
        let mut last = None;
        for transmission in list.range(..count).rev().take(MAX_STALE) {
            steps::add(1);
            last = Some(transmission.sent);
            let at = self.entries.partition_point(|e| e.end < transmission.end);
            if self.entries.get(at).is_some_and(|entry| transmission.is_last_of(entry)) {
                break;
            }
        }
        last
    }

    /// Calls `lost` for the entries in flight that were sent before (`xmit`, `end`), in the order of their last
    /// transmissions, and marks them lost until it returns false. Returns whether any entry was marked.
    ///
    /// It visits the entries that it marks, stale transmissions, which it drops, and one more entry. The cost of an
    /// ACK that marks nothing does not depend on the number of segments that are in flight, lost or selectively
    /// acknowledged.
    pub(super) fn mark_lost_while(
        &mut self,
        xmit: Instant,
        end: StreamOffset,
        mut lost: impl FnMut(&SentSegment) -> bool,
    ) -> bool {
        let mut any = false;
        while let Some(oldest) =
            self.keep_transmissions().front().copied().filter(|oldest| oldest.is_before(xmit, end))
        {
            steps::add(1);
            let at = self.entries.partition_point(|e| e.end < oldest.end);
            if let Some(entry) = self.entries.get(at).filter(|entry| oldest.is_last_of(entry)) {
                if !lost(entry) {
                    break;
                }
                self.mark_lost(at);
                any = true;
            }
            self.keep_transmissions().pop_front();
        }
        any
    }

    /// The first entry that is lost.
    pub(super) fn next_lost(&mut self) -> Option<usize> {
        if self.lost == 0 {
            self.lost_from = StreamOffset::MAX;
            return None;
        }
        let from = self.index_from(self.lost_from);
        let index = from + self.entries.range(from..).position(|e| e.lost)?;
        self.lost_from = self.entries.get(index)?.start;
        Some(index)
    }

    /// Records that segment `index` was retransmitted.
    pub(super) fn resent(&mut self, index: usize, now: Instant) {
        if let Some(entry) = self.entries.get_mut(index) {
            if std::mem::take(&mut entry.lost) {
                self.lost -= 1;
                self.in_flight += entry.bytes();
            }
            (entry.sent, entry.unsent) = (now, false);
            if !std::mem::replace(&mut entry.retransmitted, true) {
                self.retransmitted += 1;
            }
            let end = entry.end;
            self.record_transmission(now, end);
        }
    }

    /// Replaces entry `index` by `pieces`, which together cover the same range. Returns the old entry.
    pub(super) fn replace(&mut self, index: usize, pieces: Vec<SentSegment>) -> Option<SentSegment> {
        let old = self.entries.remove(index)?;
        self.spilled_bytes -= old.spilled_bytes();
        self.spilled_bytes += pieces.iter().map(SentSegment::spilled_bytes).sum::<usize>();
        self.chunks -= usize::from(old.chunks);
        self.chunks += pieces.iter().map(|piece| usize::from(piece.chunks)).sum::<usize>();
        let more = pieces.len() - 1;
        self.lost += if old.lost { more } else { 0 };
        self.retransmitted += if old.retransmitted { more } else { 0 };
        for piece in pieces.into_iter().rev() {
            let (sent, end) = (piece.sent, piece.end);
            self.entries.insert(index, piece);
            self.record_transmission(sent, end);
        }
        Some(old)
    }

    /// Empties the queue and releases all frames.
    pub(super) fn clear(&mut self, link: &mut dyn Link) {
        for entry in self.entries.drain(..) {
            entry.payload.release(link);
        }
        *self = Self { entries: std::mem::take(&mut self.entries), ..Self::default() };
    }
}

mod spill;
#[cfg(test)]
mod tests;
