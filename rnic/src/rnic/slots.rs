//! [`Slots`]: the memory of a queue, in which entries are written, read and left where they are.

/// Slots for the entries of a queue, found by an entry's position: how many entries were added before it. The queue
/// itself knows which positions it holds. An entry that has left the queue stays in its slot until a later one is
/// written over it, because moving and dropping large entries takes longer than the rest of what a queue does.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    /// The slots that were used so far.
    slots: Vec<T>,
    /// Positions that differ only in other bits share a slot.
    mask: u64,
}

impl<T> Slots<T> {
    /// Slots for at least `most` entries. They are allocated with the first entry.
    pub(crate) fn new(most: u32) -> Self {
        Self { slots: Vec::new(), mask: u64::from(most).next_power_of_two() - 1 }
    }

    /// [`Self::new`] with its memory allocated.
    pub(crate) fn allocated(most: u32) -> Self {
        let mut slots = Self::new(most);
        slots.allocate();
        slots
    }

    /// Number of entries that there are slots for.
    #[inline]
    pub(crate) fn most(&self) -> u64 {
        self.mask + 1
    }

    #[inline]
    fn index(&self, position: u64) -> usize {
        (position & self.mask) as usize
    }

    /// The slot of a position.
    #[inline]
    pub(crate) fn get(&self, position: u64) -> Option<&T> {
        self.slots.get(self.index(position))
    }

    /// The slot of a position, to be changed.
    #[inline]
    pub(crate) fn get_mut(&mut self, position: u64) -> Option<&mut T> {
        let index = self.index(position);
        self.slots.get_mut(index)
    }

    /// The slot for a new entry, with an old one in it, or what `unused` returns.
    #[expect(clippy::inline_always, reason = "`add` has the long part")]
    #[inline(always)]
    pub(crate) fn claim(&mut self, position: u64, unused: impl Fn() -> T) -> Option<&mut T> {
        if self.slots.len() <= self.index(position) {
            self.add(position, unused);
        }
        self.get_mut(position)
    }

    /// Adds the slot of a position, and as many others as there are already.
    #[cold]
    fn add(&mut self, position: u64, unused: impl Fn() -> T) {
        self.allocate();
        let all = self.mask as usize + 1;
        let wanted = (self.slots.len() * 2).max(self.index(position) + 1);
        self.slots.resize_with(wanted.min(all), unused);
    }

    fn allocate(&mut self) {
        self.slots.reserve_exact(self.mask as usize + 1 - self.slots.len());
    }

    /// Changes the number of slots to at least `most`, allocates them, and moves the entries of the queue, at the
    /// positions `held`, to their new slots.
    #[cold]
    pub(crate) fn resize(&mut self, most: u32, held: impl Iterator<Item = u64>, unused: impl Fn() -> T) {
        let mut old = std::mem::replace(self, Self::allocated(most));
        for position in held {
            if let (Some(from), Some(to)) = (old.get_mut(position), self.claim(position, &unused)) {
                std::mem::swap(from, to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A deque is the oracle.
        #[test]
        fn prop_entries_stay_at_their_positions(
            sizes in prop::collection::vec(1u32..40, 1..8),
            steps in prop::collection::vec((any::<bool>(), any::<u8>()), 0..200),
        ) {
            let mut sizes = sizes.into_iter().cycle();
            let mut slots = Slots::new(sizes.next().unwrap());
            let (mut oracle, mut head) = (std::collections::VecDeque::new(), 0);
            for (adds, value) in steps {
                let tail = head + oracle.len() as u64;
                if !adds {
                    head += u64::from(oracle.pop_front().is_some());
                } else if tail - head < slots.most() {
                    *slots.claim(tail, || 0).unwrap() = value;
                    oracle.push_back(value);
                } else {
                    slots.resize(sizes.next().unwrap().max((tail - head) as u32), head..tail, || 0);
                }
                let found = (head..).take(oracle.len()).map(|position| *slots.get(position).unwrap());
                prop_assert_eq!(found.collect::<Vec<_>>(), oracle.iter().copied().collect::<Vec<_>>());
                prop_assert!(slots.slots.len() as u64 <= slots.most());
            }
        }
    }

    #[test]
    fn memory_is_allocated_once_and_with_the_first_entry() {
        let mut slots = Slots::new(5);
        assert_eq!((slots.most(), slots.slots.capacity()), (8, 0));
        for position in 0..20 {
            *slots.claim(position, || 0).unwrap() = position;
            assert_eq!((slots.slots.capacity(), slots.get(position)), (8, Some(&position)));
        }
    }
}
