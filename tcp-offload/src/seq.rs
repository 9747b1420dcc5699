//! Sequence numbers: 32 bits that wrap (RFC 9293 section 3.4), and the 64-bit stream offsets that the framing layer
//! uses so that it need not handle wrapping.

use std::fmt;

/// A TCP sequence number (RFC 9293 section 3.4).
///
/// The type has no `Ord`, because the order of two numbers depends on the window they lie in. Differences wrap and
/// are signed; a comparison is meaningful when the two numbers are less than 2^31 apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SeqNum(u32);

impl SeqNum {
    /// The number whose wire value is `value`.
    pub const fn new(value: u32) -> Self {
        Self(value)
    }

    /// The wire value.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// `self + n`, wrapping.
    #[must_use]
    pub const fn add(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }

    /// `self - n`, wrapping.
    #[must_use]
    pub const fn sub(self, n: u32) -> Self {
        Self(self.0.wrapping_sub(n))
    }

    /// The signed distance from `earlier` to `self`.
    pub const fn since(self, earlier: Self) -> i32 {
        self.0.wrapping_sub(earlier.0) as i32
    }

    /// Whether `self` comes before `other`.
    pub const fn before(self, other: Self) -> bool {
        self.since(other) < 0
    }

    /// Whether `self` comes after `other`.
    pub const fn after(self, other: Self) -> bool {
        self.since(other) > 0
    }

    /// Whether `self` is `other` or comes before it.
    pub const fn at_or_before(self, other: Self) -> bool {
        self.since(other) <= 0
    }

    /// Whether `self` is `other` or comes after it.
    pub const fn at_or_after(self, other: Self) -> bool {
        self.since(other) >= 0
    }

    /// The earlier of the two.
    #[must_use]
    pub const fn earliest(self, other: Self) -> Self {
        if self.before(other) { self } else { other }
    }

    /// The later of the two.
    #[must_use]
    pub const fn latest(self, other: Self) -> Self {
        if self.after(other) { self } else { other }
    }
}

impl fmt::Debug for SeqNum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A position in one direction of a connection's byte stream: 0 is the first byte after the SYN.
///
/// It does not wrap (2^64 bytes are 46 years at 100 Gbit/s), so ordinary order applies.
pub type StreamOffset = u64;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn prop_seq_order_is_that_of_the_signed_distance(base: u32, ahead in 1u32..0x7fff_ffff) {
            let a = SeqNum::new(base);
            let b = a.add(ahead);
            prop_assert!(a.before(b) && b.after(a) && !b.before(a));
            prop_assert_eq!(b.since(a), ahead as i32);
            prop_assert_eq!(a.latest(b), b);
            prop_assert_eq!(a.earliest(b), a);
            prop_assert_eq!(b.sub(ahead), a);
        }
    }
}
