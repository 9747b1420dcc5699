//! Timers of one connection: a table of deadlines by kind, whose minimum is the connection's deadline.

use crate::time::{Duration, Instant};

/// Kinds of timers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// RFC 6298: retransmission time-out, also of the SYN.
    Retransmit,
    /// RFC 8985 section 7: tail loss probe.
    Probe,
    /// RFC 8985 section 6.2: the reordering window of a segment ends.
    Reorder,
    /// Pacing: the next quantum may be sent.
    Pace,
    /// RFC 9293 section 3.8.6.1: zero-window probe.
    Persist,
    /// RFC 9293 section 3.8.6.3: delayed acknowledgment.
    DelayedAck,
    /// RFC 9293 section 3.8.4.
    Keepalive,
    /// End of TIME-WAIT, FIN-WAIT-2, the connection attempt, or a close after the local end has stopped reading.
    Wait,
}

/// All timers, in the order in which timers due at the same time are handled.
pub(super) const KINDS: [Timer; 8] = [
    Timer::Retransmit,
    Timer::Probe,
    Timer::Reorder,
    Timer::Pace,
    Timer::Persist,
    Timer::DelayedAck,
    Timer::Keepalive,
    Timer::Wait,
];

/// The shortest run of a timer: one tick of the timestamp clock. A handler that armed a timer at or before `now` would
/// run for ever.
pub(super) const TICK: Duration = Duration::from_millis(1);

const NEVER: Instant = Instant::from_nanos(u64::MAX);

/// Deadlines by kind.
#[derive(Debug, Clone)]
pub(super) struct Timers {
    deadlines: [Instant; KINDS.len()],
    /// No timer is due before this time. A timer that is disarmed or moved to a later time leaves it as it is, so that
    /// nobody looks for the earliest of the others with each segment.
    bound: Instant,
}

impl Timers {
    pub(super) const fn new() -> Self {
        Self { deadlines: [NEVER; KINDS.len()], bound: NEVER }
    }

    // The discriminants are the indices: no timer can leave the table.
    #[allow(clippy::indexing_slicing)]
    fn slot(&mut self, timer: Timer) -> &mut Instant {
        &mut self.deadlines[timer as usize]
    }

    pub(super) fn arm(&mut self, timer: Timer, at: Instant) {
        *self.slot(timer) = at;
        self.bound = self.bound.min(at);
    }

    /// Arms `timer` at `at` unless it is armed already.
    pub(super) fn arm_if_idle(&mut self, timer: Timer, at: Instant) {
        if *self.slot(timer) == NEVER {
            self.arm(timer, at);
        }
    }

    pub(super) fn disarm(&mut self, timer: Timer) {
        *self.slot(timer) = NEVER;
    }

    pub(super) fn disarm_all(&mut self) {
        *self = Self::new();
    }

    pub(super) fn at(&self, timer: Timer) -> Option<Instant> {
        self.deadlines.get(timer as usize).copied().filter(|at| *at != NEVER)
    }

    /// The earliest deadline.
    pub(super) fn next(&self) -> Option<Instant> {
        self.deadlines.iter().min().copied().filter(|at| *at != NEVER)
    }

    /// A time before which no timer is due.
    #[inline]
    pub(super) fn bound(&self) -> Option<Instant> {
        Some(self.bound).filter(|at| *at != NEVER)
    }

    /// Makes [`Self::bound`] the earliest deadline.
    pub(super) fn settle(&mut self) {
        self.bound = self.next().unwrap_or(NEVER);
    }

    /// Disarms `timer` if it is due. Returns whether it was.
    pub(super) fn expire(&mut self, timer: Timer, now: Instant) -> bool {
        let due = self.at(timer).is_some_and(|at| at <= now);
        if due {
            self.disarm(timer);
        }
        due
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
        let expired = |timers: &mut Timers, now| {
            KINDS.into_iter().filter(|t| timers.expire(*t, now)).collect::<Vec<_>>()
        };
        assert_eq!(expired(&mut timers, at(4)), []);
        assert_eq!(expired(&mut timers, at(9)), [Timer::Probe, Timer::Keepalive]);
        assert_eq!(expired(&mut timers, at(9)), []);
        timers.arm(Timer::Wait, at(3));
        timers.disarm(Timer::Wait);
        assert_eq!(timers.at(Timer::Wait), None);
    }

    #[test]
    fn the_bound_is_at_or_before_the_earliest_deadline() {
        let at = Instant::from_nanos;
        let mut timers = Timers::new();
        assert_eq!(timers.bound(), None);
        timers.arm(Timer::Probe, at(5));
        timers.arm(Timer::Keepalive, at(9));
        timers.arm(Timer::Probe, at(7));
        assert_eq!((timers.bound(), timers.next()), (Some(at(5)), Some(at(7))));
        timers.settle();
        assert_eq!(timers.bound(), Some(at(7)));
        timers.disarm(Timer::Probe);
        timers.arm_if_idle(Timer::Wait, at(8));
        assert_eq!((timers.bound(), timers.next()), (Some(at(7)), Some(at(8))));
        timers.disarm_all();
        assert_eq!(timers.bound(), None);
    }

    #[test]
    fn kinds_index_the_table() {
        for (index, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }
}
