//! Header prediction: the segments of an undisturbed transfer take a straight path through the rules of RFC 9293 section
//! 3.10.7.4. Such a segment is the next one in order, has no control bit but ACK and PSH and no option but timestamps, and
//! acknowledges all or a part of what is in flight, while nothing is lost, retransmitted or beyond a gap.
//!
//! The path applies the rules of `input` and `sender` that can have an effect on such a segment, and no others. Both
//! paths have the same outcome, which a property test compares.

use super::{
    Connection, NewPayload,
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

impl Connection {
    /// Whether the segment is the expected one, so that [`Self::receive_predicted`] may process it.
    #[inline]
    pub fn predicts(&self, now: Instant, segment: &SegmentCore) -> bool {
        #[cfg(test)]
        if !super::testing::straight_paths() {
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

    /// Processes a segment that [`Self::predicts`] admits, except for its payload, which is [`Self::predicted_payload`].
    /// Returns the offset below which the peer has newly acknowledged all data, if it has. The state stays the same.
    pub fn receive_predicted(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        segment: SegmentCore,
    ) -> Option<StreamOffset> {
        self.note_predicted(now, &segment);
        let ack = self.predicted_ack(now, &segment);
        self.take_ack(now, link, ack)
    }

    /// The part of [`Self::receive_predicted`] that concerns the peer's data and the next acknowledgment of it.
    #[inline]
    pub(super) fn note_predicted(&mut self, now: Instant, segment: &SegmentCore) {
        self.counters.segments_in += 1;
        self.note_acceptable(now, segment, false);
        self.rx.note_length(segment.payload_len);
    }

    /// The acknowledgment in a segment that [`Self::predicts`] admits.
    #[inline]
    pub(super) fn predicted_ack(&self, now: Instant, segment: &SegmentCore) -> PredictedAck {
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

    /// Whether `next` continues `last`, the last segment that [`Self::receive_predicted`] or [`Self::receive_continuation`] has
    /// processed and whose payload was taken: it is the next one in order, and all that it tells is its payload.
    #[inline]
    pub fn continues(&self, now: Instant, last: &SegmentCore, next: &SegmentCore) -> bool {
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
    pub fn receive_continuation(&mut self, segment: &SegmentCore) {
        self.counters.segments_in += 1;
        self.tx.repeat_ack(segment.seq);
        self.rx.note_length(segment.payload_len);
    }

    /// The payload of a segment that [`Self::predicts`] has admitted, if it has one.
    #[inline]
    pub fn predicted_payload(&self, segment: &SegmentCore) -> Option<NewPayload> {
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
