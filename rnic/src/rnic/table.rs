//! Tables of objects whose ids are never reused in the life of the table.
//!
//! Access rights depend on ids: a region may be limited to one queue pair, and a stale id must never name another
//! peer's queue pair, however many were created and destroyed in between.

/// Bits of an id that are the slot's index; the upper bits are a generation that increases each time the slot is
/// reused.
const INDEX_BITS: u32 = 20;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
/// Largest number of objects of one kind.
pub(crate) const TABLE_LIMIT: u32 = 1 << INDEX_BITS;
/// The last generation of a slot, which stays empty after it. Years of continuous creation and destruction do not
/// reach it.
const LAST_GENERATION: u64 = u64::MAX >> INDEX_BITS;

/// An identifier of an object in a [`Table`].
pub(crate) trait Id: Copy {
    fn from_raw(raw: u64) -> Self;
    fn raw(self) -> u64;
}

/// Defines a public id type.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// The number, for logs and C programs: no other object of this kind ever has it.
            pub const fn number(self) -> u64 {
                self.0
            }
        }

        impl $crate::rnic::table::Id for $name {
            fn from_raw(raw: u64) -> Self {
                Self(raw)
            }

            fn raw(self) -> u64 {
                self.0
            }
        }
    };
}
pub(crate) use id;

#[derive(Debug)]
struct Slot<T> {
    generation: u64,
    value: Option<T>,
}

/// Objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<I, T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    limit: u32,
    _id: std::marker::PhantomData<I>,
}

impl<I: Id, T> Table<I, T> {
    /// An empty table for at most `limit` objects.
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            limit: limit.min(TABLE_LIMIT),
            _id: std::marker::PhantomData,
        }
    }

    /// Adds the object that `make` returns for its id; `None` when the table is full.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(I) -> T) -> Option<I> {
        let index = if let Some(index) = self.free.pop() {
            index
        } else {
            let index = u32::try_from(self.slots.len()).ok().filter(|i| *i < self.limit)?;
            self.slots.push(Slot { generation: 0, value: None });
            index
        };
        let slot = self.slots.get_mut(index as usize)?;
        let id = I::from_raw(slot.generation << INDEX_BITS | u64::from(index));
        slot.value = Some(make(id));
        Some(id)
    }

    /// Removes an object; its id becomes stale.
    pub(crate) fn remove(&mut self, id: I) -> Option<T> {
        let slot = self.slot_mut(id)?;
        let value = slot.value.take()?;
        if slot.generation < LAST_GENERATION {
            slot.generation += 1;
            self.free.push((id.raw() & INDEX_MASK) as u32);
        }
        Some(value)
    }

    pub(crate) fn get(&self, id: I) -> Option<&T> {
        let slot = self.slots.get((id.raw() & INDEX_MASK) as usize)?;
        if slot.generation == id.raw() >> INDEX_BITS { slot.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, id: I) -> Option<&mut T> {
        self.slot_mut(id)?.value.as_mut()
    }

    fn slot_mut(&mut self, id: I) -> Option<&mut Slot<T>> {
        let slot = self.slots.get_mut((id.raw() & INDEX_MASK) as usize)?;
        (slot.generation == id.raw() >> INDEX_BITS).then_some(slot)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|s| s.value.as_ref())
    }
}

/// Objects with the ids of a [`Table`], some of which are in this table: those that one engine has.
#[derive(Debug)]
pub(crate) struct PartTable<I, T> {
    /// By the index of the id, with the whole id.
    slots: Vec<(u64, Option<T>)>,
    len: usize,
    _id: std::marker::PhantomData<I>,
}

impl<I: Id, T> PartTable<I, T> {
    pub(crate) fn new() -> Self {
        Self { slots: Vec::new(), len: 0, _id: std::marker::PhantomData }
    }

    /// Number of objects in the table.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds the object with this id, which no object in the table has.
    pub(crate) fn insert(&mut self, id: I, value: T) {
        let index = (id.raw() & INDEX_MASK) as usize;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || (0, None));
        }
        if let Some(slot) = self.slots.get_mut(index) {
            self.len += usize::from(slot.1.is_none());
            *slot = (id.raw(), Some(value));
        }
    }

    /// Removes an object.
    pub(crate) fn remove(&mut self, id: I) -> Option<T> {
        let value = self.slot_mut(id)?.take()?;
        self.len -= 1;
        Some(value)
    }

    #[inline]
    pub(crate) fn get(&self, id: I) -> Option<&T> {
        let (raw, value) = self.slots.get((id.raw() & INDEX_MASK) as usize)?;
        if *raw == id.raw() { value.as_ref() } else { None }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: I) -> Option<&mut T> {
        self.slot_mut(id)?.as_mut()
    }

    #[inline]
    fn slot_mut(&mut self, id: I) -> Option<&mut Option<T>> {
        let (raw, value) = self.slots.get_mut((id.raw() & INDEX_MASK) as usize)?;
        (*raw == id.raw()).then_some(value)
    }

    /// The ids of all objects.
    pub(crate) fn ids(&self) -> impl Iterator<Item = I> {
        self.slots.iter().filter(|(_, value)| value.is_some()).map(|(raw, _)| I::from_raw(*raw))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|(_, value)| value.as_ref())
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|(_, value)| value.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    id! {
        /// For this test.
        TestId
    }

    #[test]
    fn a_stale_id_finds_nothing_and_the_limit_holds() {
        let mut table = Table::<TestId, u8>::new(2);
        let a = table.insert_with(|_| 1).unwrap();
        let b = table.insert_with(|_| 2).unwrap();
        assert_eq!(table.insert_with(|_| 3), None);
        assert_eq!(table.remove(a), Some(1));
        assert_eq!(table.remove(a), None);
        let c = table.insert_with(|_| 4).unwrap();
        assert_ne!(a.number(), c.number());
        assert_eq!((table.get(a), table.get(b), table.get(c)), (None, Some(&2), Some(&4)));
        assert_eq!(table.iter().copied().collect::<Vec<_>>(), [4, 2]);
    }

    #[test]
    fn a_part_finds_only_its_own_objects() {
        let mut ids = Table::<TestId, ()>::new(4);
        let [a, b] = [(); 2].map(|()| ids.insert_with(|_| ()).unwrap());
        let mut part = PartTable::<TestId, u8>::new();
        assert_eq!((part.remove(a), part.get(b), part.len()), (None, None, 0));
        part.insert(b, 2);
        assert_eq!((part.get(a), part.get(b), part.len()), (None, Some(&2), 1));
        assert_eq!((part.ids().collect::<Vec<_>>(), part.remove(b), part.len()), (vec![b], Some(2), 0));
        ids.remove(b);
        let reused = ids.insert_with(|_| ()).unwrap();
        part.insert(reused, 3);
        assert_eq!(part.get_mut(reused), Some(&mut 3));
        assert_eq!((part.get(b), part.iter().count()), (None, 1));
    }

    #[test]
    fn an_id_is_never_reused_although_its_slot_is() {
        let mut table = Table::<TestId, u8>::new(1);
        let first = table.insert_with(|_| 0).unwrap();
        table.remove(first);
        for _ in 0..10_000 {
            let id = table.insert_with(|_| 1).unwrap();
            assert_ne!(id, first);
            assert_eq!(table.get(first), None);
            table.remove(id);
        }
        table.slots[0].generation = LAST_GENERATION;
        let last = table.insert_with(|_| 2).unwrap();
        assert_eq!(table.remove(last), Some(2));
        assert_eq!((table.insert_with(|_| 3), table.get(last), table.iter().count()), (None, None, 0));
    }
}
