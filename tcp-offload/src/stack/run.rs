//! The frames of one connection that follow one another in a batch.
//!
//! The connection is found once, by the headers of its last segment ([`Recent`](super::recent::Recent)). If it
//! [allows the fast path](ConnSlot::allows_fast_path), its frames are processed one after the other while header prediction admits them and the
//! framing takes their payloads whole. The tables are updated once, after the last one, without what such segments cannot change:
//!
//! - the connection does not end, and has nothing to report or to free;
//! - what is known of the peer's checksums ([`ChecksumOffload`](super::offload::ChecksumOffload)) stays the same;
//! - its shares of the memory that connections share stay zero;
//! - no time limit of the framing runs, and a timer of TCP concerns the stack only if it is due before all earlier ones;
//! - the upper layer has as much to send as before: if that was nothing, only an ACK can have become due.
//!
//! Any other segment ends the run, and the tables are updated as after any change. The part of the work on the last segment that the
//! answer of a busy application does not depend on is [postponed](Stack::catch_up).

use super::{
    ConnSlot, Polling, Stack,
    source::{FramingSource, Supply},
    turns::Work,
};
use crate::{
    framing::{Carried, Taken},
    link::{Batch, Link},
    tcp::{Run, Sent},
    time::Instant,
    ulp::{ConnId, Ulp},
};

/// Bytes of the longest payload.
const MAX_PAYLOAD: usize = u16::MAX as usize;

impl<U: Ulp> Stack<U> {
    /// Processes the frames at the beginning of `frames` that belong to the connection of the last segment, up to the first one that
    /// header prediction does not admit. Returns whether there was one.
    #[inline]
    pub(super) fn receive_recent(
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
        let partial = template.partial_checksum();
        if spare < MAX_PAYLOAD || !slot.allows_fast_path() || !slot.checksums.expects(partial) {
            return self.receive_alone(now, link, frames, ulp);
        }
        let (conn, bound) = (ConnId { index, generation: slot.generation }, slot.tcp.deadline_bound());
        let (mut run, mut refused, mut count) = (Run::new(now), None, 0);
        while let Some(core) = frames.first().and_then(|frame| template.read(link, frame)) {
            run.may_postpone = self.polling == Polling::Busy && frames.len() == 1;
            let Some(frame) = frames.next() else { break };
            count += 1;
            let queue = frame.queue();
            slot.tcp.follow_queue(queue);
            let receipt = slot.tcp.receive(link, &mut run, Some(&core), || template.segment(&core, queue));
            if !run.is_predicted() {
                self.counters.note_frames(count, partial);
                self.apply_receipt(now, link, index, &receipt, frame, ulp);
                return true;
            }
            if let Some(acked) = receipt.acked {
                ulp.acked(conn, acked);
            }
            let Some(payload) = receipt.arrival else {
                link.recycle(frame);
                continue;
            };
            let carried = Carried { payload, frame, spare, fast: true };
            let taken = slot.session.receive(now, ulp, conn, slot.tcp.path(), link, carried);
            if taken != Taken::Whole {
                refused = Some((payload, taken));
                break;
            }
            slot.tcp.payload_taken(now, &payload);
        }
        if count == 0 {
            return false;
        }
        self.counters.note_frames(count, partial);
        let postponed = slot.tcp.has_postponed();
        if postponed {
            self.postponed = Some(conn);
        }
        let waits = postponed && slot.only_acknowledges() && !slot.tcp.must_acknowledge();
        if let Some((payload, taken)) = refused {
            self.payload_offered(now, index, &payload, taken);
            self.after_change(now, link, index, None, ulp);
        } else if !waits {
            self.after_predicted(now, link, index, bound, ulp);
        }
        true
    }

    /// Processes the first of `frames` if it belongs to the connection of the last segment, which does not allow the fast path. Returns
    /// whether it does.
    #[inline(never)]
    fn receive_alone(&mut self, now: Instant, link: &mut dyn Link, frames: &mut Batch, ulp: &mut U) -> bool {
        let Some((index, template)) = self.recent.template() else { return false };
        let Some(core) = frames.first().and_then(|frame| template.read(link, frame)) else { return false };
        let Some(frame) = frames.next() else { return false };
        self.counters.note_frames(1, template.partial_checksum());
        let segment = template.segment(&core, frame.queue());
        self.receive_known(now, link, index, &segment, frame, ulp);
        true
    }

    /// [`Self::wake`] and [`Self::transmit`] in one. When no other connection waits, the woken one is sent at once.
    pub fn transmit_woken(&mut self, now: Instant, link: &mut dyn Link, conn: ConnId, ulp: &mut U) {
        if self.wants_to_transmit() || !self.send_fast(now, link, conn, ulp) {
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
    pub(super) fn send_fast(&mut self, now: Instant, link: &mut dyn Link, conn: ConnId, ulp: &mut U) -> bool {
        let Some(slot) = self.slot(conn) else { return false };
        let emss = slot.tcp.emss();
        let mut source = FramingSource { now, emss, session: &mut slot.session, announced: true, ulp, conn };
        if !slot.tcp.transmit_fast(now, link, &mut source) {
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
}

impl<P> ConnSlot<P> {
    /// Whether a predicted segment can make nothing due but an ACK, when nothing was due before: the upper layer has nothing to
    /// send, and no ACK has to report the boundary of a congestion mark.
    #[inline]
    pub(super) fn only_acknowledges(&self) -> bool {
        self.supply == Supply::Dry && !self.tcp.owes_mark_boundary()
    }
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
