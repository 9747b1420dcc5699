//! Timestamps: our clock, the peer's, and protection against wrapped sequence numbers (RFC 7323 sections 3 to 5).

use std::time::Duration;

use crate::{seq::SeqNum, time::Instant, wire::Timestamps};

/// Nanoseconds per tick of the timestamp clock: 1 ms, the shortest tick that RFC 7323 section 5.4 allows.
const TICK_NS: u64 = 1_000_000;

/// How long `TS.Recent` stays valid without an update: 24 days (RFC 7323 section 5.5).
const RECENT_VALID: Duration = Duration::from_hours(24 * 24);

/// The timestamps of one connection, when both ends sent the option in their SYN.
#[derive(Debug, Clone)]
pub(super) struct Clock {
    /// Added to our ticks. All connections of a four-tuple have the same offset, so that timestamps grow from one
    /// incarnation to the next (RFC 6191); different four-tuples have different ones (RFC 7323 section 7.1).
    offset: u32,
    recent: u32,
    recent_at: Option<Instant>,
}

impl Clock {
    /// Derives the offset from `isn`, which is a clock of 4 us ticks plus a keyed hash of the four-tuple (RFC 6528):
    /// subtracting the clock leaves the hash.
    pub(super) fn new(now: Instant, isn: SeqNum) -> Self {
        Self { offset: isn.value().wrapping_sub((now.as_nanos() / 4_000) as u32), recent: 0, recent_at: None }
    }

    /// `TSval` at `now`.
    pub(super) fn value(&self, now: Instant) -> u32 {
        ((now.as_nanos() / TICK_NS) as u32).wrapping_add(self.offset)
    }

    /// The timestamps option of a segment sent at `now`.
    pub(super) fn option(&self, now: Instant) -> Timestamps {
        Timestamps { value: self.value(now), echo: self.recent }
    }

    /// Whether `timestamps` are older than `TS.Recent` (rule R1).
    pub(super) fn is_old(&self, now: Instant, timestamps: Timestamps) -> bool {
        (timestamps.value.wrapping_sub(self.recent) as i32) < 0
            && self.recent_at.is_some_and(|at| now.since(at) < RECENT_VALID)
    }

    /// Updates `TS.Recent` by rule R3, for an acceptable segment that begins at or before the last acknowledgment
    /// number sent.
    pub(super) fn update(&mut self, now: Instant, timestamps: Timestamps) {
        if self.recent_at.is_none() || !self.is_old(now, timestamps) {
            self.recent = timestamps.value;
            self.recent_at = Some(now);
        }
    }

    /// Whether `echo` is the timestamp of a segment sent before `sent`. The resolution is one tick.
    pub(super) fn echoes_before(&self, echo: u32, sent: Instant) -> bool {
        (echo.wrapping_sub(self.value(sent)) as i32) < 0
    }

    /// `TS.Recent`.
    pub(super) fn recent(&self) -> u32 {
        self.recent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(value: u32) -> Timestamps {
        Timestamps { value, echo: 0 }
    }

    #[test]
    fn rfc7323_s5_3_older_timestamps_are_refused_across_the_wrap() {
        let mut clock = Clock::new(Instant::ZERO, SeqNum::new(7));
        let now = Instant::from_nanos(1);
        assert!(!clock.is_old(now, stamp(0)), "nothing known yet");
        clock.update(now, stamp(u32::MAX));
        assert!(!clock.is_old(now, stamp(3)));
        assert!(clock.is_old(now, stamp(u32::MAX - 1)));
        clock.update(now, stamp(3));
        assert!(clock.is_old(now, stamp(u32::MAX)));
    }

    #[test]
    fn rfc7323_s5_5_recent_expires_after_24_days() {
        let mut clock = Clock::new(Instant::ZERO, SeqNum::new(7));
        clock.update(Instant::ZERO, stamp(1000));
        assert!(!clock.is_old(Instant::ZERO + RECENT_VALID, stamp(5)));
        clock.update(Instant::ZERO + RECENT_VALID, stamp(5));
        assert_eq!(clock.recent(), 5);
    }

    #[test]
    fn rfc6191_s2_timestamps_of_one_flow_grow_from_incarnation_to_incarnation() {
        let hash = 0x1234_5678u32;
        let isn = |ms: u64| SeqNum::new(((ms * 250) as u32).wrapping_add(hash));
        let at = |ms: u64| Instant::from_nanos(ms * TICK_NS);
        let first = Clock::new(at(10), isn(10));
        let second = Clock::new(at(500), isn(500));
        assert_eq!(second.value(at(500)).wrapping_sub(first.value(at(10))), 490);
    }

    #[test]
    fn an_echo_identifies_the_transmission_that_it_answers() {
        let clock = Clock::new(Instant::ZERO, SeqNum::new(9));
        let first = Instant::from_nanos(5 * TICK_NS);
        let second = Instant::from_nanos(8 * TICK_NS);
        assert!(clock.echoes_before(clock.value(first), second));
        assert!(!clock.echoes_before(clock.value(second), second));
    }
}
