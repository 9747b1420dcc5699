//! The timers of one connection: a table indexed by kind, whose minimum is the connection's deadline.

use crate::time::Instant;

/// What can be due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// RFC 6298: retransmission time-out; of the SYN too.
    Retransmit,
    /// RFC 8985 section 7: tail loss probe.
    Probe,
    /// RFC 8985 section 6.2: reordering settles.
    Reorder,
    /// RFC 9293 section 3.8.6.1: zero-window probe.
    Persist,
    /// RFC 9293 section 3.8.6.3: delayed acknowledgment.
    DelayedAck,
    /// RFC 9293 section 3.8.4.
    Keepalive,
    /// End of TIME-WAIT or FIN-WAIT-2, of the connection attempt.
    Wait,
    /// RFC 3168 section 6.1.2: new data waits, since a window of one segment was marked.
    Hold,
}

const KINDS: [Timer; 8] = [
    Timer::Retransmit,
    Timer::Probe,
    Timer::Reorder,
    Timer::Persist,
    Timer::DelayedAck,
    Timer::Keepalive,
    Timer::Wait,
    Timer::Hold,
];

const NEVER: Instant = Instant::from_nanos(u64::MAX);

/// Deadlines by kind.
#[derive(Debug, Clone)]
pub(super) struct Timers([Instant; KINDS.len()]);

impl Timers {
    pub(super) const fn new() -> Self {
        Self([NEVER; KINDS.len()])
    }

    // The discriminants are the indices: no timer can leave the table.
    #[allow(clippy::indexing_slicing)]
    fn slot(&mut self, timer: Timer) -> &mut Instant {
        &mut self.0[timer as usize]
    }

    pub(super) fn arm(&mut self, timer: Timer, at: Instant) {
        *self.slot(timer) = at;
    }

    /// Arms it unless it is armed already.
    pub(super) fn arm_if_idle(&mut self, timer: Timer, at: Instant) {
        let slot = self.slot(timer);
        if *slot == NEVER {
            *slot = at;
        }
    }

    pub(super) fn disarm(&mut self, timer: Timer) {
        *self.slot(timer) = NEVER;
    }

    pub(super) fn disarm_all(&mut self) {
        *self = Self::new();
    }

    pub(super) fn at(&self, timer: Timer) -> Option<Instant> {
        self.0.get(timer as usize).copied().filter(|at| *at != NEVER)
    }

    /// The earliest deadline.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.iter().min().copied().filter(|at| *at != NEVER)
    }

    /// Takes one timer that is due, disarming it.
    pub(super) fn expire(&mut self, now: Instant) -> Option<Timer> {
        let (timer, _) = KINDS.into_iter().zip(self.0).find(|(_, at)| *at <= now)?;
        self.disarm(timer);
        Some(timer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_is_next_and_each_expires_once() {
        let at = Instant::from_nanos;
        let mut timers = Timers::new();
        assert_eq!(timers.next(), None);
        timers.arm(Timer::Keepalive, at(9));
        timers.arm(Timer::Probe, at(5));
        timers.arm_if_idle(Timer::Probe, at(1));
        assert_eq!(timers.next(), Some(at(5)));
        assert_eq!(timers.expire(at(4)), None);
        assert_eq!(timers.expire(at(9)), Some(Timer::Probe));
        assert_eq!(timers.expire(at(9)), Some(Timer::Keepalive));
        assert_eq!(timers.expire(at(9)), None);
        timers.arm(Timer::Wait, at(3));
        timers.disarm(Timer::Wait);
        assert_eq!(timers.at(Timer::Wait), None);
    }

    #[test]
    fn kinds_index_the_table() {
        for (index, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }
}
