//! The work that waits until a busy application has answered the last message. Between the arrival of a message and its answer, the
//! stack does only what the two need. The rest follows in the next turn, while the answer is on its way:
//!
//! - the acknowledgment in the segment of the message ([`receive_and_postpone`](crate::tcp::Connection::receive_and_postpone)):
//!   acknowledged segments are released, the upper layer completes its requests, the round-trip time is measured;
//! - timers and the next work of the connection.
//!
//! One connection at a time can have such work, because it is done before anything else is received and before timers fire.

use super::Stack;
use crate::{link::Link, time::Instant, ulp::Ulp};

impl<U: Ulp> Stack<U> {
    /// Does the postponed work, if there is any. The stack itself calls this in the next turn.
    #[inline]
    pub fn catch_up(&mut self, now: Instant, link: &mut dyn Link, ulp: &mut U) {
        if self.postponed.is_some()
            && let Some(index) = self.process_postponed(now, link, ulp)
        {
            self.after_change(now, link, index, None, ulp);
        }
    }

    /// Processes the postponed acknowledgment. Returns the connection, unless it has ended: its timers and its next work are still to
    /// be set.
    #[inline(never)]
    pub(super) fn process_postponed(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        ulp: &mut U,
    ) -> Option<u32> {
        let conn = self.postponed.take()?;
        let acked = self.slot(conn)?.tcp.catch_up(now, link);
        if let Some(acked) = acked {
            ulp.acked(conn, acked);
        }
        Some(conn.index)
    }

    /// Whether work waits for the next turn.
    pub fn has_postponed(&self) -> bool {
        self.postponed.is_some()
    }
}

#[cfg(test)]
mod tests;
