//! Pending ACKs, which wait for a turn that receives nothing
//! (`docs/decisions/0002-acknowledgements-wait-for-an-idle-turn.md`).

use super::{ConnSlot, Stack, turns::Work};
use crate::ulp::Ulp;

/// How the application polls, which determines what the stack does at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Polling {
    /// It does not: a thread runs the engine when frames have arrived or a timer is due.
    #[default]
    No,
    /// It polls now, so that the next turn comes soon. [`Stack::idle`] does not send the ACKs of segments after which the peer had
    /// more to send.
    Yes,
    /// It polls all the time, so that its next turn comes right after its answer to a message. The stack
    /// [postpones](Stack::catch_up) what the answer does not need.
    Busy,
}

impl<U: Ulp> Stack<U> {
    /// Records how the application polls.
    pub fn set_polling(&mut self, polling: Polling) {
        self.polling = polling;
    }

    /// Makes delayed acknowledgements due, after a turn that received nothing; the next [`Stack::transmit`] sends
    /// them.
    pub fn idle(&mut self) {
        while let Some(index) = self.turns.next_ack() {
            if let Some(slot) = self.slots.get_mut(index as usize)
                && slot.tcp.flush_ack()
            {
                self.make_ready(index);
            }
        }
    }

    /// Whether acknowledgements wait for [`Stack::idle`].
    pub fn owes_acks(&self) -> bool {
        self.turns.acks() > 0
    }
}

impl<P> ConnSlot<P> {
    /// Whether an idle turn sends an ACK. It sends none that waits for the application's answer, and while the application
    /// polls none that waits for further segments.
    #[inline]
    pub(super) fn has_idle_ack(&self, polling: Polling) -> bool {
        self.tcp.owes_ack() && !self.tcp.awaits_answer() && !(polling != Polling::No && self.tcp.holds_ack())
    }

    /// The work for the ACK that the connection owes, if it owes one.
    #[inline]
    pub(super) fn next_ack(&self, polling: Polling) -> Work {
        if self.tcp.must_acknowledge() {
            Work::Send
        } else if self.has_idle_ack(polling) {
            Work::Ack
        } else {
            Work::Nothing
        }
    }
}
