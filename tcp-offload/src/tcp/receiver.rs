//! The receive side of a connection: `RCV.NXT`, the ranges received beyond a gap, the advertised window, and the SACK
//! blocks to report (RFC 9293 section 3.4, RFC 2018, RFC 2883, RFC 7323 section 2). It stores ranges only, no data.

use std::time::Duration;

use smallvec::SmallVec;

use super::{NewPayload, TcpConfig};
use crate::{
    seq::{SeqNum, StreamOffset},
    time::Instant,
    wire::{Options, SackBlock, Segment},
};

/// Largest number of ranges kept beyond gaps. A slow start that overruns a queue loses every second segment for a round
/// trip, which can be half of the largest default window: 2900 ranges. A hostile peer that sends every second byte must
/// not make us keep a list of them: a segment that needs one more range is dropped.
const MAX_RANGES: usize = 1 << 12;

/// The receive window grows to this multiple of what arrives in a round trip: slow start doubles that amount each round
/// trip, and the measurement is one round trip old.
const GROWTH: u64 = 4;

/// Shortest period for which arrivals are counted. On short paths a single round trip may bring nothing, or everything
/// that has waited while the application slept.
const GROWTH_PERIOD: Duration = Duration::from_millis(10);

/// Largest shift count (RFC 7323 section 2.3).
pub(super) const MAX_SHIFT: u8 = 14;

/// A range of stream offsets beyond a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: StreamOffset,
    end: StreamOffset,
    /// The count of arrivals at its last growth: SACK reports the latest range first.
    touched: u64,
}

/// The receiver's verdict on a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Outside the window: answered by an ACK and otherwise ignored.
    Unacceptable,
    /// Acceptable, but without new payload.
    Nothing {
        /// It had payload, all of which was received before.
        duplicate: bool,
    },
    /// New payload that is dropped because it would need one range too many.
    Crowded,
    /// Payload to take.
    Payload(NewPayload),
}

/// The receive side of one connection.
#[derive(Debug, Clone)]
pub(super) struct Receiver {
    /// The peer's initial sequence number.
    irs: SeqNum,
    /// `RCV.NXT`, not counting the FIN.
    next: StreamOffset,
    /// The end of the peer's stream, known from its FIN.
    fin: Option<StreamOffset>,
    /// The advertised right edge of the window. It moves left only when the shift count cannot express it; see
    /// [`Receiver::advertise`].
    edge: StreamOffset,
    /// The window while the framing layer holds nothing, and its upper limit.
    buffer: u64,
    buffer_max: u64,
    /// The end of the shortest period of the current count of arrivals, and the bytes received before its start.
    counted: Option<(Instant, u64)>,
    /// Bytes that the framing layer holds.
    held: u64,
    shift: u8,
    /// Received ranges beyond `next`, in order, disjoint and not adjacent.
    ranges: Vec<Range>,
    arrivals: u64,
    /// A duplicate that is reported once (RFC 2883).
    dsack: Option<(StreamOffset, StreamOffset)>,
    /// Largest payload received, as an estimate of the peer's full segment.
    largest: usize,
}

impl Receiver {
    /// A receiver for a peer with the initial sequence number `irs`.
    pub(super) fn new(irs: SeqNum, config: &TcpConfig) -> Self {
        let (buffer, buffer_max) = config.receive_windows();
        let shift = if config.window_scaling { shift_for(buffer_max) } else { 0 };
        Self {
            irs,
            next: 0,
            fin: None,
            edge: 0,
            buffer: buffer.into(),
            buffer_max: buffer_max.into(),
            counted: None,
            held: 0,
            shift,
            ranges: Vec::new(),
            arrivals: 0,
            dsack: None,
            largest: 0,
        }
    }

    /// The shift count that our SYN offers.
    pub(super) fn shift(&self) -> u8 {
        self.shift
    }

    /// Turns scaling off, because the peer does not support it.
    pub(super) fn without_scaling(&mut self) {
        self.shift = 0;
    }

    pub(super) fn seq_at(&self, offset: StreamOffset) -> SeqNum {
        self.irs.add(1).add(offset as u32)
    }

    pub(super) fn irs(&self) -> SeqNum {
        self.irs
    }

    /// `RCV.NXT`.
    pub(super) fn next_seq(&self) -> SeqNum {
        self.seq_at(self.next).add(u32::from(self.fin_reached()))
    }

    /// `RCV.NXT` as an offset.
    pub(super) fn next(&self) -> StreamOffset {
        self.next
    }

    /// Whether `RCV.NXT` is beyond the peer's FIN.
    pub(super) fn fin_reached(&self) -> bool {
        self.fin == Some(self.next)
    }

    /// Whether bytes are missing before others that were received.
    pub(super) fn has_gap(&self) -> bool {
        !self.ranges.is_empty()
    }

    /// Whether the peer's FIN has arrived, in order or beyond a gap.
    pub(super) fn knows_fin(&self) -> bool {
        self.fin.is_some()
    }

    pub(super) fn largest_segment(&self) -> usize {
        self.largest
    }

    /// Records that a segment had a payload of `len` bytes.
    pub(super) fn note_length(&mut self, len: usize) {
        self.largest = self.largest.max(len);
    }

    /// Applies the acceptability test of RFC 9293 section 3.10.7.4 (first check), and finds the new part of the
    /// payload.
    pub(super) fn judge(&mut self, segment: &Segment) -> Verdict {
        let next = self.next_seq();
        let from = i64::from(segment.seq.since(next));
        let len = segment.payload_len as i64;
        let window = (self.edge - self.next) as i64;
        let sequence_len = len + i64::from(segment.flags.fin) + i64::from(segment.flags.syn);
        let first_inside = from >= 0 && from < window.max(1);
        let acceptable = match (sequence_len, window) {
            (0, 0) => from == 0,
            (0, _) => first_inside,
            // Zero window: the ACK of a window probe is processed, its payload is not.
            (_, 0) => from == 0,
            _ => first_inside || (from < 0 && from + sequence_len > 0),
        };
        if !acceptable {
            if len > 0 && from + len <= 0 {
                self.note_duplicate(from, from + len);
            }
            return Verdict::Unacceptable;
        }
        if len == 0 || self.fin_reached() {
            return Verdict::Nothing { duplicate: false };
        }
        self.note_length(segment.payload_len);
        self.trim(segment, from, (from + len).min(window))
    }

    fn note_duplicate(&mut self, from: i64, to: i64) {
        let base = self.next as i64 + i64::from(self.fin_reached());
        // The SYN is not a byte of the stream.
        let (left, right) = ((base + from).max(0), base + to);
        if left < right {
            self.dsack = Some((left as u64, right as u64));
        }
    }

    /// Trims the payload at both ends: below `RCV.NXT`, beyond the window, and where a range covers it. `from` and `to`
    /// count from `RCV.NXT`.
    fn trim(&mut self, segment: &Segment, from: i64, to: i64) -> Verdict {
        let (mut start, mut end) = (from.max(0), to);
        let base = self.next;
        // Of several duplicate parts the first is reported (RFC 2883 section 4.2.2).
        let mut duplicate = (from < 0).then(|| (from, to.min(0)));
        for range in self.ranges.iter().skip(self.first_after(base + start as u64)) {
            let (left, right) = ((range.start - base) as i64, (range.end - base) as i64);
            if left >= end {
                break;
            }
            duplicate.get_or_insert((left.max(start), right.min(end)));
            if left <= start {
                start = right;
            } else if end <= right {
                end = left;
            }
        }
        if let Some((left, right)) = duplicate {
            self.note_duplicate(left, right);
        }
        if let Some(fin) = self.fin {
            end = end.min((fin - base) as i64);
        }
        if start >= end {
            return Verdict::Nothing { duplicate: duplicate.is_some() };
        }
        let offset = base + start as u64;
        let len = (end - start) as usize;
        if offset > base
            && self.ranges.len() >= MAX_RANGES
            && !self.touches_a_range(offset, offset + len as u64)
        {
            return Verdict::Crowded;
        }
        Verdict::Payload(NewPayload {
            offset,
            start: segment.payload_start + (start - from) as usize,
            len,
            contiguous: self.contiguous_with(offset, offset + len as u64),
            pushed: segment.flags.psh,
        })
    }

    /// Index of the first range that ends after `offset`.
    fn first_after(&self, offset: StreamOffset) -> usize {
        self.ranges.partition_point(|r| r.end <= offset)
    }

    fn touches_a_range(&self, start: StreamOffset, end: StreamOffset) -> bool {
        let first = self.ranges.partition_point(|r| r.end < start);
        self.ranges.get(first).is_some_and(|r| r.start <= end)
    }

    /// `RCV.NXT` after `start..end` is taken.
    fn contiguous_with(&self, start: StreamOffset, end: StreamOffset) -> StreamOffset {
        if start > self.next {
            return self.next;
        }
        let mut next = end.max(self.next);
        for range in &self.ranges {
            if range.start > next {
                break;
            }
            next = next.max(range.end);
        }
        next
    }

    /// Records that the payload `start..start + len` was taken. Returns whether it was the next in order and there was
    /// no gap.
    #[inline]
    pub(super) fn add(&mut self, start: StreamOffset, len: usize) -> bool {
        let end = start + len as u64;
        self.arrivals += 1;
        let next = self.ranges.is_empty() && start == self.next;
        if next {
            self.next = end;
        } else {
            self.add_around_gap(start, end);
        }
        next
    }

    #[inline(never)]
    fn add_around_gap(&mut self, start: StreamOffset, end: StreamOffset) {
        if start <= self.next {
            self.next = self.contiguous_with(start, end);
            let first = self.first_after(self.next);
            self.ranges.drain(..first);
        } else {
            self.add_range(start, end);
        }
    }

    /// Drops all ranges beyond `RCV.NXT`.
    pub(super) fn renege(&mut self) {
        self.ranges.clear();
    }

    fn add_range(&mut self, start: StreamOffset, end: StreamOffset) {
        let first = self.ranges.partition_point(|r| r.end < start);
        let behind = self.ranges.partition_point(|r| r.start <= end);
        let new = Range { start, end, touched: self.arrivals };
        let merged = self.ranges.drain(first..behind).fold(new, |all, range| Range {
            start: all.start.min(range.start),
            end: all.end.max(range.end),
            ..all
        });
        self.ranges.insert(first, merged);
    }

    /// Records the FIN at the end of an acceptable segment. It is ignored when it contradicts data received before.
    pub(super) fn note_fin(&mut self, segment: &Segment) {
        let at =
            self.next as i64 + i64::from(segment.seq.since(self.next_seq())) + segment.payload_len as i64;
        let beyond = self.ranges.last().map_or(self.next, |r| r.end) as i64;
        if self.fin.is_none() && at >= beyond && at <= self.edge as i64 {
            self.fin = Some(at as u64);
        }
    }

    /// Opens the window to [`GROWTH`] times what arrives in a round trip of `rtt`, so that the peer is limited by its
    /// congestion window. `bytes` is the total received so far.
    #[inline]
    pub(super) fn grow(&mut self, now: Instant, rtt: impl FnOnce() -> Option<Duration>, bytes: u64) {
        if self.buffer < self.buffer_max && self.counted.is_none_or(|(until, _)| now >= until) {
            self.grow_after_period(now, rtt, bytes);
        }
    }

    #[inline(never)]
    fn grow_after_period(&mut self, now: Instant, rtt: impl FnOnce() -> Option<Duration>, bytes: u64) {
        let Some(rtt) = rtt() else { return };
        let next = now + GROWTH_PERIOD;
        let (until, before) = *self.counted.get_or_insert((next, bytes));
        let period = next.since(until);
        if period < rtt.max(GROWTH_PERIOD) {
            return;
        }
        let of_round = u128::from(bytes - before) * rtt.as_nanos() / period.as_nanos();
        let wanted = u64::try_from(of_round).unwrap_or(u64::MAX).saturating_mul(GROWTH);
        self.buffer = wanted.clamp(self.buffer, self.buffer_max);
        self.counted = Some((next, bytes));
    }

    /// Records that the framing layer holds `bytes`. Returns whether a window update should be sent, because the window
    /// was small and can grow by enough (RFC 9293 section 3.8.6.2.2).
    pub(super) fn hold(&mut self, bytes: usize) -> bool {
        let fewer = (bytes as u64) < self.held;
        self.held = bytes as u64;
        let small = self.edge - self.next < self.buffer / 2;
        fewer && small && self.wanted_edge() >= self.edge + self.step()
    }

    /// Leaves the right edge of the advertised window where it is.
    pub(super) fn keep_window(&mut self) {
        self.buffer = self.window();
    }

    fn wanted_edge(&self) -> StreamOffset {
        self.next + self.buffer.saturating_sub(self.held)
    }

    /// The window opens in steps of at least this many bytes, to avoid the silly window syndrome (RFC 9293 section
    /// 3.8.6.2.2).
    fn step(&self) -> u64 {
        (self.buffer / 2).min(self.largest.max(536) as u64)
    }

    /// The window field of a segment that is about to be sent. The right edge moves left only where 16 bits with the
    /// shift count cannot express it. Bytes lost by rounding down to the scale are not advertised but still accepted
    /// (RFC 7323 section 2.4).
    #[expect(clippy::inline_always, reason = "nearly each segment calls it once")]
    #[inline(always)]
    pub(super) fn advertise(&mut self, scaled: bool) -> u16 {
        let wanted = self.wanted_edge();
        let shift = if scaled { self.shift } else { 0 };
        if wanted >= self.edge + self.step() {
            self.edge = wanted;
        }
        let field = (self.edge - self.next) >> shift;
        if field > u16::MAX.into() {
            self.edge = self.next + (u64::from(u16::MAX) << shift);
            return u16::MAX;
        }
        field as u16
    }

    /// The window field of an ACK with the earlier acknowledgment number `next`: the same right edge.
    pub(super) fn advertise_from(&self, next: StreamOffset, scaled: bool) -> u16 {
        let shift = if scaled { self.shift } else { 0 };
        ((self.edge - next.min(self.edge)) >> shift).min(u16::MAX.into()) as u16
    }

    /// The window that the peer may use now, in bytes.
    pub(super) fn window(&self) -> u64 {
        self.edge - self.next
    }

    /// Whether a duplicate is still to be reported.
    pub(super) fn has_dsack(&self) -> bool {
        self.dsack.is_some()
    }

    /// Writes at most `room` SACK blocks into `options`: first the duplicate (RFC 2883 section 4), then the ranges, the
    /// one that grew last first (RFC 2018 section 4).
    pub(super) fn report(&self, options: &mut Options, room: usize) {
        let room = room.min(options.sack.len());
        let mut blocks: SmallVec<[(StreamOffset, StreamOffset); 4]> = SmallVec::new();
        blocks.extend(self.dsack);
        let mut below = u64::MAX;
        while blocks.len() < room {
            let latest = self.ranges.iter().filter(|r| r.touched < below).max_by_key(|r| r.touched);
            let Some(range) = latest else { break };
            below = range.touched;
            blocks.push((range.start, range.end));
        }
        for (to, (left, right)) in options.sack.iter_mut().zip(blocks.iter().take(room)) {
            *to = SackBlock { left: self.seq_at(*left), right: self.seq_at(*right) };
            options.sack_count += 1;
        }
    }

    /// Records that the [report](Self::report) was sent, so that the duplicate is not repeated.
    pub(super) fn reported(&mut self) {
        self.dsack = None;
    }
}

/// The smallest shift that lets 16 bits express `window` (RFC 7323 section 2.2).
fn shift_for(window: u32) -> u8 {
    (0..=MAX_SHIFT).find(|s| u16::try_from(window >> s).is_ok()).unwrap_or(MAX_SHIFT)
}

#[cfg(test)]
mod tests;
