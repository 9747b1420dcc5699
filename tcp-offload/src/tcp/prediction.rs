//! Header prediction: the first arm of [`Connection::receive`]. It admits the next segment in order that has no control bit but ACK and
//! PSH and no option but timestamps, and acknowledges all or a part of what is in flight, while nothing is lost, retransmitted or
//! beyond a gap. Of the rules of RFC 9293 section 3.10.7.4, the arm applies those that can have an effect on such a segment.
//!
//! Within a [`Run`], a segment that repeats the acknowledgment of the one before it only adds payload.

use super::{
    Connection, NewPayload, Receipt,
    receiver::Receiver,
    sender::{Ack, Sender},
    stage::Stage,
};
use crate::{
    link::Link,
    seq::{SeqNum, StreamOffset},
    time::Instant,
    wire::SegmentCore,
};

/// The acknowledgment in a segment that header prediction has admitted: the part of an [`Ack`] that such a segment has.
#[derive(Debug, Clone, Copy)]
pub(super) struct PredictedAck {
    /// When it arrived.
    pub at: Instant,
    /// The acknowledgment number as an offset.
    pub number: StreamOffset,
    /// The segment's sequence number, and its window in bytes.
    pub seq: SeqNum,
    pub window: u32,
}

/// The segments of one connection that follow one another in a batch of frames.
#[derive(Debug)]
pub struct Run {
    /// When the batch arrived.
    pub(super) now: Instant,
    /// Whether the acknowledgment in the next segment [may be postponed](Connection::catch_up).
    pub may_postpone: bool,
    /// The last segment, if it was predicted.
    last: Option<SegmentCore>,
}

impl Run {
    /// A run without segments. The batch has arrived at `now`.
    pub const fn new(now: Instant) -> Self {
        Self { now, may_postpone: false, last: None }
    }

    /// Records that header prediction has not admitted the last segment.
    #[inline]
    pub(super) fn end(&mut self) {
        self.last = None;
    }

    /// Whether header prediction has admitted the last segment: the connection has changed its state in no way, and its receipt has
    /// an acknowledgment and payload at most.
    #[inline]
    pub const fn is_predicted(&self) -> bool {
        self.last.is_some()
    }
}

impl Connection {
    /// Whether header prediction admits the segment.
    #[inline]
    pub(super) fn predicts(&self, now: Instant, segment: &SegmentCore) -> bool {
        #[cfg(test)]
        if !super::testing::fast_paths() {
            return false;
        }
        matches!(self.stage, Stage::Established(_))
            && !self.unread
            && self.rx.expects(segment)
            && self.tx.expects(self.tx.ahead_of_una(segment.ack))
            && match (&self.clock, segment.timestamps) {
                (None, _) => true,
                (Some(clock), Some(stamp)) => !clock.is_old(now, stamp),
                (Some(_), None) => false,
            }
    }

    /// The first arm of [`Self::receive`]. Returns `None`, and has changed nothing, unless the segment is predicted.
    #[expect(clippy::inline_always, reason = "see `receive`")]
    #[inline(always)]
    pub(super) fn receive_predicted(
        &mut self,
        link: &mut dyn Link,
        run: &mut Run,
        segment: &SegmentCore,
    ) -> Option<Receipt> {
        let acked = if run.last.as_ref().is_some_and(|last| self.continues(run.now, last, segment)) {
            self.receive_continuation(segment);
            None
        } else if !self.mtu_news && self.predicts(run.now, segment) {
            let postpones = run.may_postpone && self.may_postpone(segment);
            self.note_predicted(run.now, segment);
            let ack = self.predicted_ack(run.now, segment);
            if postpones { Some(self.postpone(ack)) } else { self.take_ack(run.now, link, ack) }
        } else {
            return None;
        };
        run.last = Some(*segment);
        Some(Receipt { acked, arrival: self.predicted_payload(segment), ..Receipt::default() })
    }

    /// The part of [`Self::receive_predicted`] that concerns the peer's data and the next acknowledgment of it.
    #[inline]
    fn note_predicted(&mut self, now: Instant, segment: &SegmentCore) {
        self.counters.segments_in += 1;
        self.note_acceptable(now, segment, false);
        self.rx.note_length(segment.payload_len);
    }

    /// The acknowledgment in a segment that [`Self::predicts`] admits.
    #[inline]
    fn predicted_ack(&self, now: Instant, segment: &SegmentCore) -> PredictedAck {
        PredictedAck {
            at: now,
            number: self.tx.una() + self.tx.ahead_of_una(segment.ack).unsigned_abs(),
            seq: segment.seq,
            window: u32::from(segment.window) << self.snd_shift.unwrap_or(0),
        }
    }

    /// The part of [`Self::receive_predicted`] that concerns our data.
    #[inline(never)]
    pub(super) fn take_ack(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        ack: PredictedAck,
    ) -> Option<StreamOffset> {
        let PredictedAck { at, number, seq, window } = ack;
        let window = window.into();
        let ack = Ack {
            now: at,
            number,
            seq,
            window,
            blocks: &[],
            dsack: None,
            echo: None,
            bare: false,
            marked: false,
        };
        self.process_ack::<true>(now, link, &ack)
    }

    /// Whether `next` continues `last`, the predicted segment before it in a [`Run`], whose payload was taken: it is the next one in
    /// order, and only its payload is new.
    #[inline]
    fn continues(&self, now: Instant, last: &SegmentCore, next: &SegmentCore) -> bool {
        last.payload_len > 0
            && next.payload_len > 0
            && next.payload_len as u64 <= self.rx.window()
            && next.seq == self.rx.next_seq()
            && (next.ack, next.window, next.ecn) == (last.ack, last.window, last.ecn)
            && match (&self.clock, next.timestamps) {
                (None, _) => true,
                // `TS.Recent` stands still within a run, so each segment is compared with it, not with the one before.
                (Some(clock), Some(stamp)) => !clock.is_old(now, stamp),
                (Some(_), None) => false,
            }
            && self.tx.has_window_of(last.seq)
    }

    /// Processes a segment that [continues](Self::continues) the last one, except for its payload. What the last one has told
    /// is not processed again: timestamps count for the first segment behind the last ACK, and the acknowledgment number, the
    /// window and the congestion mark are the same.
    #[inline]
    fn receive_continuation(&mut self, segment: &SegmentCore) {
        self.counters.segments_in += 1;
        self.tx.repeat_ack(segment.seq);
        self.rx.note_length(segment.payload_len);
    }

    /// The payload of a segment that [`Self::predicts`] has admitted, if it has one.
    #[inline]
    fn predicted_payload(&self, segment: &SegmentCore) -> Option<NewPayload> {
        let (offset, len) = (self.rx.next(), segment.payload_len);
        (len > 0).then(|| NewPayload {
            offset,
            start: segment.payload_start,
            len,
            contiguous: offset + len as u64,
            pushed: segment.psh,
        })
    }
}

impl Receiver {
    /// Whether the segment is the next one in order, and its payload lies within the window, while no other is known.
    #[inline]
    fn expects(&self, segment: &SegmentCore) -> bool {
        segment.seq == self.next_seq()
            && !self.has_gap()
            && !self.knows_fin()
            && segment.payload_len as u64 <= self.window()
    }
}

impl Sender {
    /// Whether an acknowledgment number `ahead` bytes beyond `SND.UNA` acknowledges something in flight while nothing is lost or
    /// disordered, or nothing is in flight.
    #[inline]
    fn expects(&self, ahead: i64) -> bool {
        if self.queue.is_empty() {
            return ahead == 0;
        }
        ahead > 0 && ahead <= (self.nxt() - self.una()) as i64 && self.is_undisturbed()
    }
}
