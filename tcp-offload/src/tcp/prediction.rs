//! Header prediction: the segments of an undisturbed transfer take a straight path through the rules of RFC 9293 section
//! 3.10.7.4. Such a segment is the next one in order, has no control bit but ACK and PSH and no option but timestamps, and
//! acknowledges all or a part of what is in flight, while nothing is lost, retransmitted or beyond a gap.
//!
//! The path applies the rules of `input` and `sender` that can have an effect on such a segment, and no others. Both ways have
//! the same outcome, which a property test compares.

use super::{
    Connection, NewPayload, Receipt,
    receiver::Receiver,
    sender::{After, Sender},
    stage::Stage,
};
use crate::{link::Link, seq::StreamOffset, time::Instant, wire::PlainSegment};

impl Connection {
    /// Processes a segment of this flow, except for taking its payload, if it is the expected one. Otherwise nothing is
    /// changed, and [`Self::receive`] must process it.
    pub fn receive_plain(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        segment: &PlainSegment,
    ) -> Option<Receipt> {
        self.predicts(now, segment).then(|| self.receive_predicted(now, link, segment))
    }

    /// Whether [`Self::receive_predicted`] may process the segment.
    #[inline]
    pub(super) fn predicts(&self, now: Instant, segment: &PlainSegment) -> bool {
        #[cfg(test)]
        if !super::testing::prediction() {
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

    /// Processes a segment that [`Self::predicts`] admits, except for taking its payload.
    #[inline]
    fn receive_predicted(&mut self, now: Instant, link: &mut dyn Link, segment: &PlainSegment) -> Receipt {
        self.counters.segments_in += 1;
        self.note_life(now);
        self.learn_timestamp(now, segment.seq, segment.timestamps);
        let mut receipt = Receipt::default();
        let widest = self.tx.max_window();
        let window = u64::from(segment.window) << self.snd_shift.unwrap_or(0);
        let number = self.tx.una() + self.tx.ahead_of_una(segment.ack).unsigned_abs();
        if self.tx.queue.is_empty() {
            self.acknowledge_nothing(segment.seq, number, window);
        } else {
            self.tx.on_plain_ack(now, link, segment.seq, number, window);
            if self.tx.is_blocked_by_window() && self.answers_keep_it_open() {
                self.tx.waiting_since = None;
            }
            self.act_on_probe_outcome(now);
            receipt.acked = Some(number);
            self.tx.arm(now, &mut self.timers, &self.config, After::Acked);
            self.stop_window_probes();
        }
        if self.tx.max_window() > widest {
            self.resize();
        }
        self.marks.received(segment.ecn, false, segment.payload_len, self.ack.is_owed(), self.rx.next());
        receipt.arrival = self.rx.next_payload(segment);
        receipt
    }
}

impl Receiver {
    /// Whether the segment is the next one in order, and its payload lies within the window, while no other is known.
    #[inline]
    fn expects(&self, segment: &PlainSegment) -> bool {
        segment.seq == self.next_seq()
            && !self.has_gap()
            && !self.knows_fin()
            && segment.payload_len as u64 <= self.window()
    }

    /// The payload of a segment that it [expects](Self::expects), if it has one.
    #[inline]
    fn next_payload(&mut self, segment: &PlainSegment) -> Option<NewPayload> {
        let len = segment.payload_len;
        if len == 0 {
            return None;
        }
        self.note_length(len);
        let offset: StreamOffset = self.next();
        Some(NewPayload {
            offset,
            start: segment.payload_start,
            len,
            contiguous: offset + len as u64,
            pushed: segment.psh,
        })
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
