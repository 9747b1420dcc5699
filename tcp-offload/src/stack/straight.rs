//! The straight path of received frames, for the expected segments of an undisturbed connection. A segment belongs on it if it is a
//! plain segment of the same connection as the one before ([`Recent`](super::recent::Recent)), if TCP predicts it
//! (`tcp/prediction.rs`), and if the framing takes its payload whole. All others take the general path ([`Stack::receive_known`],
//! [`Stack::take_payload`], [`Stack::after_change`]), which has the same outcome.
//!
//! The path looks the connection up once for all frames of it that follow one another in a batch. Before the first frame it tests
//! whether the connection [is ordinary](ConnSlot::is_ordinary). It leaves out the rules for what such segments cannot change:
//!
//! - the connection does not end, and has nothing to report or to free;
//! - what is known of the peer's checksums ([`ChecksumOffload`](super::offload::ChecksumOffload)) stays the same;
//! - its shares of the memory that connections share stay zero;
//! - no time limit of the framing runs, and a timer of TCP concerns the stack only if it is due before all earlier ones;
//! - the upper layer has as much to send as before: if that was nothing, only an ACK can have become due.
//!
//! What the answer of a busy application does not need of the last segment is [postponed](Stack::catch_up).
//!
//! Of a segment that [continues](crate::tcp::Connection::continues) the one before it, TCP processes the payload only.

use super::{
    ConnSlot, Polling, Stack,
    source::{FramingSource, Supply},
    turns::Work,
};
use crate::{
    framing::{Carried, Taken},
    link::{Batch, Link},
    tcp::Sent,
    time::Instant,
    ulp::{ConnId, Ulp},
    wire::SegmentCore,
};

/// Bytes of the longest payload.
const MOST_PAYLOAD: usize = u16::MAX as usize;

impl<U: Ulp> Stack<U> {
    /// Processes the frames at the beginning of `frames` that belong on the straight path. Returns whether there was one.
    #[inline]
    pub(super) fn receive_straight(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        frames: &mut Batch,
        ulp: &mut U,
    ) -> bool {
        let Some((index, template)) = self.recent.template() else { return false };
        let Some(slot) = self.slots.get_mut(index as usize) else { return false };
        let slot = &mut **slot;
        let spare = self.config.most_held_bytes.saturating_sub(self.held);
        let partial_checksum = template.partial_checksum();
        if spare < MOST_PAYLOAD || !slot.is_ordinary() || !slot.checksums.expects(partial_checksum) {
            return false;
        }
        let (conn, bound) = (ConnId { index, generation: slot.generation }, slot.tcp.deadline_bound());
        let (mut last, mut refused): (Option<SegmentCore>, _) = (None, None);
        let before = self.counters.frames_in;
        while let Some(plain) = frames.first().and_then(|frame| template.read(link, frame)) {
            if last.as_ref().is_some_and(|last| slot.tcp.continues(now, last, &plain)) {
                slot.tcp.receive_continuation(&plain);
            } else if !slot.tcp.has_mtu_news() && slot.tcp.predicts(now, &plain) {
                let may_wait = self.polling == Polling::Busy && frames.len() == 1;
                let postponed = if may_wait { slot.tcp.receive_and_postpone(now, &plain) } else { None };
                if postponed.is_some() {
                    self.postponed = Some(conn);
                }
                if let Some(acked) = postponed.or_else(|| slot.tcp.receive_predicted(now, link, plain)) {
                    ulp.acked(conn, acked);
                }
            } else {
                break;
            }
            let Some(frame) = frames.next() else { break };
            self.counters.frames_in += 1;
            slot.tcp.follow_queue(frame.queue());
            if let Some(payload) = slot.tcp.predicted_payload(&plain) {
                let outcome = slot.session.take_straight(ulp, conn, link, &payload, &frame);
                if outcome == Ok(true) {
                    link.recycle(frame);
                } else {
                    let carried = Carried { payload, frame, spare };
                    let taken = match outcome {
                        Ok(_) => slot.session.receive(now, ulp, conn, slot.tcp.path(), link, carried),
                        Err(halt) => slot.session.receive_rest(now, ulp, conn, link, carried, halt),
                    };
                    if taken != Taken::Whole {
                        refused = Some((payload, taken));
                        break;
                    }
                }
                slot.tcp.payload_taken(now, &payload);
            } else {
                link.recycle(frame);
            }
            last = Some(plain);
        }
        if partial_checksum {
            self.counters.partial_checksum += self.counters.frames_in - before;
        }
        let waits = self.postponed.is_some() && slot.only_acknowledges() && !slot.tcp.must_acknowledge();
        if let Some((payload, taken)) = refused {
            self.payload_offered(now, index, &payload, taken);
            self.after_change(now, link, index, None, ulp);
            return true;
        }
        if last.is_some() && !waits {
            self.after_expected(now, link, index, bound, ulp);
        }
        last.is_some()
    }

    /// [`Self::wake`] and [`Self::transmit`] in one. When no other connection waits, the woken one is sent at once.
    pub fn transmit_woken(&mut self, now: Instant, link: &mut dyn Link, conn: ConnId, ulp: &mut U) {
        if self.wants_to_transmit() || !self.send_straight(now, link, conn, ulp) {
            self.wake(conn);
            self.transmit(now, link, ulp);
        } else {
            link.flush();
        }
    }

    /// Sends the next segment of an undisturbed connection whose upper layer has announced data. Returns false when
    /// [`Self::transmit`] has to send the rest, or all.
    #[expect(clippy::inline_always, reason = "one of its two callers is that of nearly all segments")]
    #[inline(always)]
    pub(super) fn send_straight(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        conn: ConnId,
        ulp: &mut U,
    ) -> bool {
        let Some(slot) = self.slot(conn) else { return false };
        let emss = slot.tcp.emss();
        let mut source = FramingSource { now, emss, session: &mut slot.session, announced: true, ulp, conn };
        if !slot.tcp.transmit_straight(now, link, &mut source) {
            return false;
        }
        let catches_up = slot.tcp.has_postponed();
        // The next turn sets the timer and the next work of the connection, when it catches up.
        slot.supply = Supply::Dry;
        self.turns.set(conn.index, Work::Nothing);
        if !catches_up {
            let sent = Sent { frames: 1, dry: true, ..Sent::default() };
            self.after_sending(now, link, conn.index, sent, 0, ulp);
        }
        true
    }

    /// Updates the tables after expected segments of connection `index`, whose timers were not due before `bound`.
    #[expect(clippy::inline_always, reason = "each of its two callers knows some of the arguments")]
    #[inline(always)]
    pub(super) fn after_expected(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        bound: Option<Instant>,
        ulp: &mut U,
    ) {
        let Some(slot) = self.slots.get(index as usize) else { return };
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
                let work = slot.next_ack(self.polling);
                debug_assert_eq!(
                    work,
                    slot.next_work(true, self.polling, ulp, ConnId { index, generation: slot.generation })
                );
                self.turns.set(index, work);
            }
            _ => self.plan(index, true, ulp),
        }
    }
}

impl<P> ConnSlot<P> {
    /// Whether an expected segment can make nothing due but an ACK, when nothing was due before: the upper layer has nothing to
    /// send, and no ACK has to report the boundary of a congestion mark.
    #[inline]
    fn only_acknowledges(&self) -> bool {
        self.supply == Supply::Dry && !self.tcp.owes_mark_boundary()
    }
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
