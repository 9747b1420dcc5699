//! Pacing: segments leave in quanta whose average rate is that of the controller (draft-ietf-ccwg-bbr-06 sections 5.6.2 and
//! 5.6.3). It has no timer of its own: the sender arms one with the time that it is told.

use super::rate::Rate;
use crate::time::Instant;

/// What a controller that paces asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::tcp) struct Pacing {
    pub rate: Rate,
    /// Bytes that may leave at once.
    pub quantum: u64,
    /// The controller itself holds the flow below what the path delivers: samples of the delivery rate count as limited by
    /// the application.
    pub holds_back: bool,
}

/// Longest time between two quanta. An estimate near zero must not stop a connection.
const MAX_INTERVAL_NS: u64 = 1_000_000_000;

/// The pacer of one connection.
#[derive(Debug)]
pub(in crate::tcp) struct Pacer {
    rate: Rate,
    quantum: u64,
    /// Bytes left of the current quantum.
    credit: u64,
    /// When the next quantum may begin.
    next: Instant,
}

impl Pacer {
    pub(in crate::tcp) fn new(now: Instant, pacing: &Pacing) -> Self {
        Self { rate: pacing.rate, quantum: pacing.quantum, credit: 0, next: now }
    }

    pub(in crate::tcp) fn adapt(&mut self, pacing: &Pacing) {
        (self.rate, self.quantum) = (pacing.rate, pacing.quantum);
        self.credit = self.credit.min(self.quantum);
    }

    pub(in crate::tcp) fn rate(&self) -> Rate {
        self.rate
    }

    /// The time until which nothing may be sent, which is later than `now`, or `None`.
    pub(in crate::tcp) fn held_until(&self, now: Instant) -> Option<Instant> {
        (self.credit == 0 && self.next > now).then_some(self.next)
    }

    /// Counts a segment of `bytes` that is sent now.
    ///
    /// A timer fires late. The time lost is made up for, but no more than that of half a quantum, so that a pause never
    /// leads to a burst of more than one and a half.
    pub(in crate::tcp) fn sent(&mut self, now: Instant, bytes: u64) {
        if self.credit == 0 {
            self.credit = self.quantum;
        }
        self.credit = self.credit.saturating_sub(bytes);
        let made_up = Instant::from_nanos(now.as_nanos().saturating_sub(self.interval_ns(self.quantum / 2)));
        let next = self.next.max(made_up).after_nanos(self.interval_ns(bytes));
        self.next = next.min(now.after_nanos(MAX_INTERVAL_NS));
    }

    fn interval_ns(&self, bytes: u64) -> u64 {
        self.rate.time_of_ns(bytes).min(MAX_INTERVAL_NS)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pacing(rate: u64, quantum: u64) -> Pacing {
        Pacing { rate: Rate::of(rate, 1_000_000_000), quantum, holds_back: false }
    }

    fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    #[test]
    fn draft_ccwg_bbr_s5_6_2_quanta_leave_at_the_rate() {
        // A byte each microsecond.
        let mut pacer = Pacer::new(at(0), &pacing(1_000_000, 3000));
        for quantum in 0..10 {
            let now = at(quantum * 3000);
            for _ in 0..3 {
                assert_eq!(pacer.held_until(now), None);
                pacer.sent(now, 1000);
            }
            assert_eq!(pacer.held_until(now), Some(at((quantum + 1) * 3000)));
        }
    }

    #[test]
    fn a_late_timer_is_made_up_for_and_a_pause_is_not() {
        let mut pacer = Pacer::new(at(0), &pacing(1_000_000, 2000));
        pacer.sent(at(0), 2000);
        pacer.sent(at(2500), 2000);
        assert_eq!(pacer.held_until(at(2500)), Some(at(4000)));
        pacer.sent(at(1_000_000), 2000);
        assert_eq!(pacer.held_until(at(1_000_000)), Some(at(1_001_000)));
    }

    #[test]
    fn no_rate_holds_a_segment_for_ever() {
        let mut pacer = Pacer::new(at(0), &pacing(0, 2000));
        pacer.sent(at(0), 2000);
        assert_eq!(pacer.held_until(at(0)), Some(at(1_000_000)));
        pacer.adapt(&Pacing { rate: Rate::INFINITE, ..pacing(0, 2000) });
        pacer.sent(at(1_000_000), 2000);
        assert_eq!(pacer.held_until(at(1_000_000)), None);
    }

    proptest! {
        /// However late the sender is, and however long the segments are, it exceeds the rate by less than two and a half
        /// quanta and a segment.
        #[test]
        fn prop_the_rate_is_never_exceeded(
            steps in prop::collection::vec((0..20_000u64, 1..1500u64), 1..300),
            quantum in 1500..20_000u64,
        ) {
            let mut pacer = Pacer::new(at(0), &pacing(1_000_000, quantum));
            let (mut now, mut sent) = (0, 0);
            for (late, bytes) in steps {
                if let Some(until) = pacer.held_until(at(now)) {
                    prop_assert!(until > at(now));
                    now = until.as_nanos().div_ceil(1000) + late;
                }
                pacer.sent(at(now), bytes);
                sent += bytes;
                prop_assert!(sent <= now + 5 * quantum / 2 + 1500, "{} sent by {}", sent, now);
            }
        }
    }
}
