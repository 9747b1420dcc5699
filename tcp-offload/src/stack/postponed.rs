//! The work that waits until a busy application has answered the last message. Between the arrival of a message and its answer, the
//! stack does only what the two need, and tells the upper layer what is acknowledged. The rest follows in the next turn, while the
//! answer is on its way:
//!
//! - what the acknowledgment in the segment of the message changes in TCP
//!   ([`catch_up`](crate::tcp::Connection::catch_up)): acknowledged segments are released, the round-trip time
//!   is measured;
//! - timers and the next work of the connection.
//!
//! One connection at a time can have such work, because it is done before anything else is received and before timers fire.

use super::Stack;
use crate::{
    link::Link,
    time::Instant,
    ulp::{ConnId, Ulp},
};

impl<U: Ulp> Stack<U> {
    /// Does the postponed work, if there is any. The stack itself calls this before it receives a frame and before timers; a turn
    /// that receives nothing calls it too.
    #[inline]
    pub fn catch_up(&mut self, now: Instant, link: &mut dyn Link, ulp: &mut U) {
        if let Some(conn) = self.postponed.take() {
            self.do_postponed(now, link, conn, ulp);
        }
    }

    #[inline(never)]
    fn do_postponed(&mut self, now: Instant, link: &mut dyn Link, conn: ConnId, ulp: &mut U) {
        let Some(slot) = self.slot(conn) else { return };
        slot.tcp.catch_up(now, link);
        if slot.allows_fast_path() {
            // The segment was predicted; its timers are not in the table yet.
            self.after_predicted(now, link, conn.index, None, ulp);
        } else {
            self.after_change(now, link, conn.index, None, ulp);
        }
    }

    /// Whether work waits for the next turn.
    pub fn has_postponed(&self) -> bool {
        self.postponed.is_some()
    }
}

#[cfg(test)]
mod tests;
