//! The fast path of new data: one full segment, which nothing precedes and nothing limits. A property test compares its outcome with
//! that of [`Connection::transmit`].

use super::{Acknowledgement, segment::NotSent};
use crate::{
    link::{Link, chunks_of},
    tcp::{
        Connection, Filled, Source,
        recovery::RecoveryPhase,
        sender::After,
        stage::{Sending, Stage},
    },
    time::Instant,
};

impl Connection {
    /// Sends the next new segment from `source`, if nothing is due before it and no limit applies. Returns whether nothing more is to
    /// be sent; otherwise [`Self::transmit`] must follow.
    #[inline(never)]
    pub fn transmit_fast(&mut self, now: Instant, link: &mut dyn Link, source: &mut impl Source) -> bool {
        if !self.allows_fast_transmit(now) {
            return false;
        }
        let Some(plan) = self.plan else { return false };
        let (free, header, emss) = (link.tx_available(), plan.header, self.emss);
        let needed = plan.reserved + chunks_of(plan.chunk_bytes, header + emss);
        if free < needed || !self.tx.has_room(emss, self.most_chunks(free - plan.reserved)) {
            return false;
        }
        let mut acknowledgement = None;
        let outcome = self.send_next(now, link, source, (plan, emss), &mut acknowledgement);
        let (Ok(Filled::Segment { .. }) | Err(NotSent::NoSlot), Some(Acknowledgement { ack, .. })) =
            (outcome, acknowledgement)
        else {
            return false;
        };
        // The postponed acknowledgment restarts the timers.
        if !self.has_postponed() {
            self.tx.arm(now, &mut self.timers, &self.config, After::Sent);
        }
        let Ok(Filled::Segment { more, .. }) = outcome else { return false };
        self.counters.segments_out += 1;
        self.acknowledged_to(ack, false);
        !more && !self.ack.is_due() && !self.challenge_due
    }

    /// Whether nothing precedes new data, which may be sent now in full segments.
    #[inline]
    fn allows_fast_transmit(&self, now: Instant) -> bool {
        #[cfg(test)]
        if !crate::tcp::testing::fast_paths() {
            return false;
        }
        matches!(self.stage, Stage::Established(Sending::Open))
            && !self.due.any()
            && self.marks.boundary().is_none()
            && self.tx.phase == RecoveryPhase::Open
            && !self.tx.wants_to_retransmit()
            && !self.tx.paces()
            && !self.mtu.is_searching(now)
    }
}
