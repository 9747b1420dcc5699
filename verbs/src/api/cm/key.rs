//! [`CmKey`]: the name of an identifier.

/// The name of an identifier in events, never reused in the life of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CmKey(u64);

/// Bits of a name below the number of the identifier's engine, of which there are at most 64.
const KEY_BITS: u32 = 58;

impl CmKey {
    /// The first name that `engine` gives.
    pub(super) fn first(engine: u16) -> Self {
        Self(u64::from(engine) << KEY_BITS)
    }

    /// The name after this one.
    pub(super) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The name that no identifier has.
    pub(super) const NONE: Self = Self(u64::MAX);

    /// The engine that has the identifier, and its connection.
    pub(super) const fn engine(self) -> u16 {
        (self.0 >> KEY_BITS) as u16
    }
}
