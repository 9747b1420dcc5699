//! Direct Data Placement (RFC 5041): its number types, header and errors.
//!
//! This module has no state: [`crate::rnic`] finds the buffer of a segment.

mod error;
mod header;

use std::fmt;

pub use error::DdpError;
pub use header::{Header, Malformed, RawHeader, TAGGED_BYTES, Tagged, UNTAGGED_BYTES, Untagged};
use xwarp_tcp::mpa::Revision;

/// A Steering Tag (RFC 5041 section 4.2): names a region of registered memory, here and on the wire.
///
/// The upper 24 bits are an index, the lower 8 bits a key that changes each time the index is reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct STag(u32);

impl STag {
    /// The tag whose wire value is `value`.
    pub const fn new(value: u32) -> Self {
        Self(value)
    }

    /// The tag of `index` (24 bits) and `key`.
    pub(crate) const fn from_parts(index: u32, key: u8) -> Self {
        Self(index << 8 | key as u32)
    }

    /// The wire value.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The upper 24 bits.
    pub const fn index(self) -> u32 {
        self.0 >> 8
    }

    /// The same index with the next key, for the next binding or fast registration.
    #[must_use]
    pub const fn next(self) -> Self {
        Self::from_parts(self.index(), self.key().wrapping_add(1))
    }

    /// The lower 8 bits.
    pub const fn key(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Debug for STag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "STag({:#010x})", self.0)
    }
}

/// The versions of DDP and RDMAP on one connection, in both directions. The start-up decides them together with MPA's
/// revision, and they are never mixed (RFC 5044 appendix C.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Versions {
    /// Version 0 of both: the protocols of the RDMA Consortium, without the extensions of RFC 7306.
    Rdmac,
    /// Version 1 of both: RFC 5040 and RFC 5041.
    #[default]
    Ietf,
}

impl Versions {
    /// DV and RV.
    pub const fn number(self) -> u8 {
        match self {
            Self::Rdmac => 0,
            Self::Ietf => 1,
        }
    }
}

impl From<Revision> for Versions {
    fn from(revision: Revision) -> Self {
        match revision {
            Revision::Zero => Self::Rdmac,
            Revision::One | Revision::Two => Self::Ietf,
        }
    }
}

/// Address of a byte within the memory that a Steering Tag names (RFC 5041 section 4.2).
///
/// A plain 64-bit number with ordinary order: a sum that would wrap is an error of the peer (section 7.1).
pub type TaggedOffset = u64;

/// Offset of a byte within an untagged message (RFC 5041 section 4.3).
pub type MessageOffset = u32;

/// A Message Sequence Number (RFC 5041 section 4.3): starts at one on each queue, and wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Msn(u32);

impl Msn {
    /// Number of the first message on every queue.
    pub const FIRST: Self = Self(1);

    /// The number whose wire value is `value`.
    pub const fn new(value: u32) -> Self {
        Self(value)
    }

    /// The wire value.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// Number of the next message.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// Number of messages from `earlier` to this one; `None` when this one precedes `earlier`.
    pub const fn ahead_of(self, earlier: Self) -> Option<u32> {
        let distance = self.0.wrapping_sub(earlier.0);
        if distance < 1 << 31 { Some(distance) } else { None }
    }
}

/// An untagged queue (RFC 5040 section 4.1, RFC 7306 section 4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queue {
    /// Queue 0: Sends and Immediate Data.
    Send,
    /// Queue 1: RDMA Read and Atomic Requests.
    Request,
    /// Queue 2: Terminate.
    Terminate,
    /// Queue 3: Atomic Responses.
    AtomicResponse,
}

impl Queue {
    /// The queue number on the wire.
    pub const fn number(self) -> u32 {
        match self {
            Self::Send => 0,
            Self::Request => 1,
            Self::Terminate => 2,
            Self::AtomicResponse => 3,
        }
    }

    /// The queue with this number.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Send),
            1 => Some(Self::Request),
            2 => Some(Self::Terminate),
            3 => Some(Self::AtomicResponse),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn msn_starts_at_one_and_wraps_to_zero() {
        assert_eq!(Msn::FIRST.value(), 1);
        assert_eq!(Msn::new(u32::MAX).next().value(), 0);
        assert_eq!(Msn::new(2).ahead_of(Msn::new(u32::MAX)), Some(3));
        assert_eq!(Msn::new(u32::MAX).ahead_of(Msn::new(2)), None);
    }

    #[test]
    fn queue_numbers_are_those_of_the_registry() {
        for number in 0..4 {
            assert_eq!(Queue::from_number(number).map(Queue::number), Some(number));
        }
        assert_eq!(Queue::from_number(4), None);
    }
}
