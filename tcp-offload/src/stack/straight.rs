//! The straight path of received frames. It is for the expected segments of an undisturbed connection: plain segments of the
//! connection that got the last one too ([`Recent`](super::recent::Recent)), which TCP predicts (`tcp/prediction.rs`) and whose
//! payload the framing takes whole. All others leave it for the general path: [`Stack::receive_known`], [`Stack::take_payload`]
//! and [`Stack::after_change`], whose outcome is the same.
//!
//! The path looks the connection up once for all frames of it that follow one another in a batch. It asks before the first one
//! whether the connection [is ordinary](ConnSlot::is_ordinary), and leaves out what such segments cannot have changed:
//!
//! - the connection has not ended, and has nothing to report or to free;
//! - its shares of the memory that connections share are zero, as before;
//! - no time limit of the framing runs, and a timer of TCP concerns the stack only if it is due before all others were;
//! - the upper layer has as much to send as before: when that was nothing, an ACK is all that can have become due.
//!
//! A segment that [continues](crate::tcp::Connection::continues) the one before it tells TCP nothing but its payload.

use std::vec::Drain;

use super::{ConnSlot, Stack, turns::Work};
use crate::{
    framing::Taken,
    link::{Link, RxFrame},
    time::Instant,
    ulp::{ConnId, Ulp},
    wire::PlainSegment,
};

/// Bytes of the longest payload.
const MOST_PAYLOAD: usize = u16::MAX as usize;

impl<U: Ulp> Stack<U> {
    /// Processes a plain segment of connection `index`, which got the last segment too, and the frames of `more` that come next on
    /// the straight path.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a frame on its way up")]
    #[inline]
    pub(super) fn receive_plain(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        mut plain: PlainSegment,
        mut frame: RxFrame,
        more: &mut Drain<'_, RxFrame>,
        ulp: &mut U,
    ) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return link.recycle(frame) };
        let slot = &mut **slot;
        let spare = self.config.most_held_bytes.saturating_sub(self.held);
        if !(slot.is_ordinary() && spare >= MOST_PAYLOAD && slot.tcp.predicts(now, &plain)) {
            return self.receive_deviation(now, link, index, &plain, frame, ulp);
        }
        let (conn, bound) = (ConnId { index, generation: slot.generation }, slot.tcp.deadline_bound());
        slot.checksums.admits(false);
        if let Some(acked) = slot.tcp.receive_predicted(now, link, &plain) {
            ulp.acked(conn, acked);
        }
        loop {
            slot.tcp.follow_queue(frame.queue());
            if let Some(arrival) = slot.tcp.predicted_payload(&plain) {
                let (path, session) = (slot.tcp.path(), &mut slot.session);
                match session.receive_ordinary(now, ulp, conn, path, link, &arrival, frame, spare) {
                    Taken::Whole => slot.tcp.payload_taken(now, &arrival),
                    taken => {
                        self.payload_offered(now, index, &arrival, taken);
                        return self.after_change(now, link, index, None, ulp);
                    }
                }
            } else {
                link.recycle(frame);
            }
            let Some(next) = more.as_slice().first() else { break };
            let Some((_, next)) = self.recent.read(link, next) else { break };
            if slot.tcp.continues(&plain, &next) {
                slot.tcp.receive_continuation(&next);
            } else if !slot.tcp.has_mtu_news() && slot.tcp.predicts(now, &next) {
                if let Some(acked) = slot.tcp.receive_predicted(now, link, &next) {
                    ulp.acked(conn, acked);
                }
            } else {
                break;
            }
            let Some(its_frame) = more.next() else { break };
            self.counters.frames_in += 1;
            (plain, frame) = (next, its_frame);
        }
        if slot.tcp.has_mtu_news() {
            return self.after_change(now, link, index, None, ulp);
        }
        debug_assert!(slot.is_ordinary());
        let bound_now = slot.tcp.deadline_bound();
        if bound_now != bound {
            self.timers.arm(index, bound_now);
        }
        match self.turns.work(index) {
            Work::Send => {}
            Work::Nothing | Work::Ack if slot.only_acknowledges() => {
                let work = slot.next_ack(self.polled);
                debug_assert_eq!(work, slot.next_work(true, self.polled, ulp, conn));
                self.turns.set(index, work);
            }
            _ => self.plan(index, true, ulp),
        }
    }

    /// Processes a plain segment of connection `index` by the general rules.
    #[inline(never)]
    fn receive_deviation(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        plain: &PlainSegment,
        frame: RxFrame,
        ulp: &mut U,
    ) {
        match self.recent.segment(&frame, plain) {
            Some(segment) => self.receive_known(now, link, index, &segment, frame, ulp),
            None => link.recycle(frame),
        }
    }
}

impl<P> ConnSlot<P> {
    /// Whether an expected segment can make nothing due but an ACK, when nothing was due before: the upper layer has nothing to
    /// send, and no ACK has to report the boundary of a congestion mark.
    #[inline]
    fn only_acknowledges(&self) -> bool {
        self.dry && !self.tcp.owes_mark_boundary()
    }
}

#[cfg(test)]
mod tests;
