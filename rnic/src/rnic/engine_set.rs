//! [`EngineSet`]: some of the engines of a device, by number.

/// Largest number of engines that share a registry.
pub const MAX_ENGINES: u16 = 64;

/// Some of the engines that share a registry, by their [numbers](super::Rnic::number).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineSet(u64);

impl EngineSet {
    /// Adds an engine, whose number is below [`MAX_ENGINES`].
    pub fn insert(&mut self, engine: u16) {
        self.0 |= 1u64.checked_shl(engine.into()).unwrap_or(0);
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Their numbers, in order.
    pub fn iter(self) -> impl Iterator<Item = u16> {
        (0..MAX_ENGINES).filter(move |engine| self.0 >> engine & 1 == 1)
    }
}
