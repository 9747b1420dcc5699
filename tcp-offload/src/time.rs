//! Time as an argument: [`Instant`] counts nanoseconds since an origin of the caller's choice, and only the caller (the
//! progress loop, the simulator) creates one.

pub use std::time::Duration;
use std::{
    num::NonZeroU64,
    ops::{Add, AddAssign, Sub},
};

/// A point in time, in nanoseconds since an arbitrary origin that one engine keeps for its life.
///
/// Unlike sequence numbers it never wraps: 64 bits of nanoseconds are 584 years.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(
    /// One more than the nanoseconds, so that an `Option<Instant>`, of which a connection has many, is as short.
    NonZeroU64,
);

impl Instant {
    /// The origin.
    pub const ZERO: Self = Self(NonZeroU64::MIN);

    /// The instant `ns` nanoseconds after the origin.
    pub const fn from_nanos(ns: u64) -> Self {
        Self(NonZeroU64::MIN.saturating_add(ns))
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// The instant `ns` nanoseconds later.
    #[must_use]
    pub const fn after_nanos(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// The time from `earlier` to `self`, zero when `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanos_since(earlier))
    }

    /// [`Self::since`] in nanoseconds.
    pub const fn nanos_since(self, earlier: Self) -> u64 {
        self.0.get().saturating_sub(earlier.0.get())
    }
}

/// `duration` in nanoseconds, at most 2^64 - 1 (584 years).
#[inline]
pub const fn nanos(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(1_000_000_000).saturating_add(duration.subsec_nanos() as u64)
}

impl Default for Instant {
    fn default() -> Self {
        Self::ZERO
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    #[inline]
    fn add(self, rhs: Duration) -> Self {
        self.after_nanos(nanos(rhs))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, rhs: Duration) -> Self {
        Self::from_nanos(self.as_nanos().saturating_sub(nanos(rhs)))
    }
}
