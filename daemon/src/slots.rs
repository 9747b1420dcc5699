//! [`Slots`]: the numbers of devices, which are keys of the switch's maps.

use std::collections::BTreeMap;

use crate::limits::Usage;

/// Number of slots; the switch's maps have no room for more.
pub(crate) const MAX_SLOTS: u32 = 4095;

/// The slots in use. A slot is in use until its pair is removed, tens of milliseconds after the end of its client, so a
/// user who opens and closes devices in a loop is charged for all of them.
#[derive(Debug, Default)]
pub(crate) struct Slots(BTreeMap<u32, Slot>);

#[derive(Debug)]
struct Slot {
    uid: u32,
    memory_bytes: u64,
}

impl Slots {
    /// Takes the first free slot for a device of `uid`; `None` when none is free.
    pub(crate) fn assign(&mut self, uid: u32, memory_bytes: u64) -> Option<u32> {
        let number = (1..=MAX_SLOTS).find(|number| !self.0.contains_key(number))?;
        self.0.insert(number, Slot { uid, memory_bytes });
        Some(number)
    }

    /// Takes a slot that a former helper has assigned.
    pub(crate) fn take(&mut self, number: u32, uid: u32, memory_bytes: u64) {
        self.0.insert(number, Slot { uid, memory_bytes });
    }

    /// The user whose slot this is, and the bytes of its frame memory.
    pub(crate) fn charged(&self, number: u32) -> Option<(u32, u64)> {
        self.0.get(&number).map(|slot| (slot.uid, slot.memory_bytes))
    }

    /// Frees a slot whose pair has been removed.
    pub(crate) fn free(&mut self, number: u32) {
        self.0.remove(&number);
    }

    /// The resources of all slots.
    pub(crate) fn total(&self) -> Usage {
        let slots_bytes = self.0.values().map(|slot| slot.memory_bytes).sum();
        Usage { slots: self.0.len(), slots_bytes, ..Usage::default() }
    }

    /// Adds the resources of the slots of `uid` to `usage`.
    pub(crate) fn charge(&self, uid: u32, usage: &mut Usage) {
        for slot in self.0.values().filter(|slot| slot.uid == uid) {
            usage.slots += 1;
            usage.slots_bytes += slot.memory_bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_charged_to_its_user_until_it_is_free() {
        let mut slots = Slots::default();
        let usage = |slots: &Slots, uid| {
            let mut usage = Usage::default();
            slots.charge(uid, &mut usage);
            (usage.slots, usage.slots_bytes)
        };
        assert_eq!(
            (slots.assign(7, 100), slots.assign(8, 10), slots.assign(7, 1)),
            (Some(1), Some(2), Some(3))
        );
        assert_eq!((usage(&slots, 7), usage(&slots, 8), usage(&slots, 9)), ((2, 101), (1, 10), (0, 0)));
        slots.free(1);
        assert_eq!(usage(&slots, 7), (1, 1));
        assert_eq!(slots.assign(9, 5), Some(1), "the first free one");
        while slots.assign(9, 1).is_some() {}
        assert_eq!(usage(&slots, 9).0 + 2, MAX_SLOTS as usize);
    }
}
