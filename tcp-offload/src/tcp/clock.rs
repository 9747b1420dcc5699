//! Timestamps: our clock, the peer's, and protection against wrapped sequence numbers (RFC 7323 sections 3 to 5).

use std::time::Duration;

use crate::{time::Instant, wire::Timestamps};

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
    /// A clock with an offset from [`Isn::stamps`](super::Isn::stamps).
    pub(super) fn new(offset: u32) -> Self {
        Self { offset, recent: 0, recent_at: None }
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

    /// When the tick of `echo`, a timestamp of ours, began; `None` if that is not in the past.
    pub(super) fn sent_at(&self, now: Instant, echo: u32) -> Option<Instant> {
        let age = u64::try_from(self.value(now).wrapping_sub(echo) as i32).ok()?;
        let tick = (now.as_nanos() / TICK_NS).checked_sub(age)?;
        Some(Instant::from_nanos(tick * TICK_NS))
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
        let mut clock = Clock::new(7);
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
        let mut clock = Clock::new(7);
        clock.update(Instant::ZERO, stamp(1000));
        assert!(!clock.is_old(Instant::ZERO + RECENT_VALID, stamp(5)));
        clock.update(Instant::ZERO + RECENT_VALID, stamp(5));
        assert_eq!(clock.recent(), 5);
    }

    #[test]
    fn an_echo_identifies_the_transmission_that_it_answers() {
        let clock = Clock::new(9);
        let first = Instant::from_nanos(5 * TICK_NS);
        let second = Instant::from_nanos(8 * TICK_NS);
        assert!(clock.echoes_before(clock.value(first), second));
        assert!(!clock.echoes_before(clock.value(second), second));
    }

    #[test]
    fn rfc7323_s4_an_echo_gives_the_time_of_the_segment_that_it_answers() {
        let clock = Clock::new(u32::MAX - 3);
        let (sent, now) = (Instant::from_nanos(5 * TICK_NS + 7), Instant::from_nanos(250 * TICK_NS));
        assert_eq!(clock.sent_at(now, clock.value(sent)), Some(Instant::from_nanos(5 * TICK_NS)));
        assert_eq!(clock.sent_at(sent, clock.value(now)), None, "not sent yet");
        assert_eq!(clock.sent_at(now, clock.value(Instant::ZERO).wrapping_sub(1)), None, "before the clock");
    }
}
