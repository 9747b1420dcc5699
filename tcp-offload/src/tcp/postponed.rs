//! Postponed acknowledgments. The segment that a busy application waits for also acknowledges the one that it sent before. What
//! TCP does with that acknowledgment can wait until the application has answered: meanwhile the peer gets the answer.

use super::{Connection, prediction::PredictedAck};
use crate::{link::Link, seq::StreamOffset, time::Instant, wire::SegmentCore};

impl Connection {
    /// Whether the acknowledgment in a predicted segment may be [postponed](Self::postpone): the segment has payload, and acknowledges
    /// the only segment in flight.
    #[inline]
    pub(super) fn may_postpone(&self, segment: &SegmentCore) -> bool {
        segment.payload_len > 0 && self.tx.queue.len() == 1 && segment.ack == self.tx.seq_at(self.tx.nxt())
    }

    /// Leaves what `ack` changes in TCP to [`Self::catch_up`], which must precede the next segment and the next timer. Until then, TCP
    /// sends as if the acknowledgment had not arrived.
    #[inline]
    pub(super) fn postpone(&mut self, ack: PredictedAck) -> StreamOffset {
        self.postponed = Some(ack);
        ack.number
    }

    /// Processes the postponed acknowledgment.
    pub fn catch_up(&mut self, now: Instant, link: &mut dyn Link) {
        if let Some(ack) = self.postponed.take() {
            self.take_ack(now, link, ack);
        }
    }

    /// Whether an acknowledgment is [postponed](Self::catch_up).
    #[inline]
    pub fn has_postponed(&self) -> bool {
        self.postponed.is_some()
    }

    /// Whether any segment was sent of which no acknowledgment has been received.
    pub fn has_unacknowledged(&self) -> bool {
        !self.tx.queue.is_empty() && self.postponed.is_none_or(|ack| ack.number < self.tx.nxt())
    }
}
