//! Postponed acknowledgments. The segment that a busy application waits for also acknowledges the one that it sent before. What
//! TCP does with that acknowledgment can wait until the application has answered: meanwhile the peer gets the answer.

use super::{Connection, prediction::PlainAck};
use crate::{link::Link, seq::StreamOffset, time::Instant, wire::PlainSegment};

/// Acknowledgments that are processed at once after one was postponed in vain: some applications answer only when their last
/// request is complete.
const AT_ONCE: u8 = 15;

/// The acknowledgment that is postponed, if one is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Postponed {
    pub ack: Option<PlainAck>,
    /// Acknowledgments that are not postponed, because the application did not answer before it polled again.
    at_once: u8,
}

impl Connection {
    /// Like [`Self::receive_predicted`], but leaves the acknowledgment to [`Self::catch_up`], which must precede the next segment
    /// and the next timer. Until then, TCP sends as if the acknowledgment had not arrived. Returns false, and does nothing with the
    /// segment, unless that has payload and acknowledges the only segment in flight, and an answer is likely.
    #[inline]
    pub fn receive_and_postpone(&mut self, now: Instant, segment: &PlainSegment) -> bool {
        let answers = segment.payload_len > 0
            && self.tx.queue.len() == 1
            && segment.ack == self.tx.seq_at(self.tx.nxt());
        if !answers || self.postponed.at_once > 0 {
            self.postponed.at_once = self.postponed.at_once.saturating_sub(1);
            return false;
        }
        self.note_predicted(now, segment);
        self.postponed.ack = Some(self.plain_ack(now, segment));
        true
    }

    /// Processes the postponed acknowledgment. Returns the offset below which the peer has acknowledged all data.
    pub fn catch_up(&mut self, now: Instant, link: &mut dyn Link) -> Option<StreamOffset> {
        let ack = self.postponed.ack.take()?;
        if ack.number == self.tx.nxt() {
            self.postponed.at_once = AT_ONCE;
        }
        self.take_ack(now, link, ack)
    }

    /// Whether an acknowledgment is [postponed](Self::receive_and_postpone).
    #[inline]
    pub fn has_postponed(&self) -> bool {
        self.postponed.ack.is_some()
    }

    /// Whether any segment was sent of which no acknowledgment has been received.
    pub fn has_unacknowledged(&self) -> bool {
        !self.tx.queue.is_empty() && self.postponed.ack.is_none_or(|ack| ack.number < self.tx.nxt())
    }
}
