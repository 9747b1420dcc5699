//! [`Limiter`]: perftest's rate limiter, which sends in bursts and waits between them.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::options::{PacingArgs, RateLimitUnit};

/// Longest time between two bursts: a slower rate would look like a test that hangs.
const MAX_GAP: Duration = Duration::from_secs(10);

/// A rate that a sender must not exceed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RateLimit {
    rate: f64,
    unit: RateLimitUnit,
    /// Messages of a burst.
    burst: u32,
}

impl RateLimit {
    /// The limit that the command line sets, if any. The default burst has `tx_depth` messages.
    pub fn of(args: &PacingArgs, tx_depth: u32) -> Option<Self> {
        let burst = args.burst_size.unwrap_or(tx_depth);
        args.rate_limit.map(|rate| Self { rate, unit: args.rate_units, burst })
    }

    /// Time from the beginning of a burst of messages of `size` bytes to the next one.
    fn gap(self, size: u64) -> Duration {
        let messages_per_second = match self.unit {
            RateLimitUnit::MebibytesPerSecond => self.rate * f64::from(1 << 20) / size as f64,
            RateLimitUnit::GigabitsPerSecond => self.rate * 1e9 / 8.0 / size as f64,
            RateLimitUnit::MessagesPerSecond => self.rate,
        };
        Duration::try_from_secs_f64(f64::from(self.burst) / messages_per_second).unwrap_or(Duration::MAX)
    }

    /// Rejects a limit that cannot be kept for messages of these sizes. It may come from an untrusted peer.
    pub fn check(self, sizes: &[u64]) -> Result<()> {
        ensure!((1..=16384).contains(&self.burst), "--burst_size must be 1 to 16384, not {}", self.burst);
        for &size in sizes {
            let gap = self.gap(size);
            ensure!(
                gap <= MAX_GAP,
                "at this rate limit, bursts of {} messages are {gap:?} apart",
                self.burst
            );
        }
        Ok(())
    }
}

/// The rate limiter of one row.
#[derive(Debug)]
pub struct Limiter {
    burst: u64,
    gap: Duration,
    /// When the next burst may begin.
    next: Instant,
    /// Messages that are left of this burst.
    left: u64,
}

impl Limiter {
    /// A limiter for messages of `size` bytes; the first burst may begin at `now`.
    pub fn new(limit: RateLimit, size: u64, now: Instant) -> Self {
        Self { burst: limit.burst.into(), gap: limit.gap(size), next: now, left: 0 }
    }

    /// Number of messages that may be posted at `now`. A burst that begins late lets the next one begin earlier, but at most by
    /// one gap, so that a pause is not followed by many bursts at once.
    pub fn room(&mut self, now: Instant) -> u64 {
        if self.left == 0 && now >= self.next {
            self.left = self.burst;
            self.next = (self.next + self.gap).max(now);
        }
        self.left
    }

    /// `count` messages were posted.
    pub fn posted(&mut self, count: u64) {
        self.left = self.left.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(rate: f64, unit: RateLimitUnit, burst: u32) -> RateLimit {
        RateLimit { rate, unit, burst }
    }

    #[test]
    fn units_are_those_of_perftest() {
        for (limit, size, gap) in [
            (limit(1.0, RateLimitUnit::MebibytesPerSecond, 1), 1 << 20, Duration::from_secs(1)),
            (limit(8.0, RateLimitUnit::GigabitsPerSecond, 2), 1000, Duration::from_micros(2)),
            (limit(50.0, RateLimitUnit::MessagesPerSecond, 5), 1 << 20, Duration::from_millis(100)),
        ] {
            assert_eq!(limit.gap(size), gap, "{limit:?}");
        }
    }

    #[test]
    fn a_burst_leaves_each_gap_and_a_pause_is_made_up_for_by_one() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut limiter = Limiter::new(limit(50.0, RateLimitUnit::MessagesPerSecond, 5), 1, start);
        assert_eq!(limiter.room(at(0)), 5);
        limiter.posted(3);
        assert_eq!(limiter.room(at(1)), 2);
        limiter.posted(2);
        assert_eq!((limiter.room(at(99)), limiter.room(at(110))), (0, 5));
        limiter.posted(5);
        assert_eq!((limiter.room(at(199)), limiter.room(at(1000))), (0, 5));
        limiter.posted(5);
        assert_eq!(limiter.room(at(1000)), 5, "one burst makes up for the pause");
        limiter.posted(5);
        assert_eq!((limiter.room(at(1099)), limiter.room(at(1100))), (0, 5));
    }

    #[test]
    fn a_limit_that_takes_hours_is_refused() {
        for (rate, burst) in [(1e-9, 1), (f64::NAN, 1), (-1.0, 1), (1.0, 128), (1.0, 0)] {
            let limit = limit(rate, RateLimitUnit::MessagesPerSecond, burst);
            assert!(limit.check(&[1]).is_err(), "{limit:?}");
        }
        assert!(limit(1.0, RateLimitUnit::MessagesPerSecond, 1).check(&[1]).is_ok());
    }
}
