//! Tables of objects that are named by small numbers which a stale holder cannot use by mistake.

/// Bits of an id that name the place; the upper ones step each time the place is used again.
const INDEX_BITS: u32 = 20;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
/// Most objects of one kind.
pub(crate) const TABLE_LIMIT: u32 = 1 << INDEX_BITS;

/// A name in a [`Table`].
pub(crate) trait Id: Copy {
    fn from_raw(raw: u32) -> Self;
    fn raw(self) -> u32;
}

/// Defines a public id type.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            /// The number, for people and for C programs.
            pub const fn number(self) -> u32 {
                self.0
            }
        }

        impl $crate::rnic::table::Id for $name {
            fn from_raw(raw: u32) -> Self {
                Self(raw)
            }

            fn raw(self) -> u32 {
                self.0
            }
        }
    };
}
pub(crate) use id;

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
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

    /// Objects in the table.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds what `make` returns for the id; `None` when the table is full.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(I) -> T) -> Option<I> {
        let index = if let Some(index) = self.free.pop() {
            index
        } else {
            let index = u32::try_from(self.slots.len()).ok().filter(|i| *i < self.limit)?;
            self.slots.push(Slot { generation: 0, value: None });
            index
        };
        let slot = self.slots.get_mut(index as usize)?;
        let id = I::from_raw(slot.generation << INDEX_BITS | index);
        slot.value = Some(make(id));
        Some(id)
    }

    /// Takes an object out; its id is stale from now on.
    pub(crate) fn remove(&mut self, id: I) -> Option<T> {
        self.get(id)?;
        let index = id.raw() & INDEX_MASK;
        let slot = self.slots.get_mut(index as usize)?;
        slot.generation = (slot.generation + 1) & (u32::MAX >> INDEX_BITS);
        self.free.push(index);
        slot.value.take()
    }

    pub(crate) fn get(&self, id: I) -> Option<&T> {
        let slot = self.slots.get((id.raw() & INDEX_MASK) as usize)?;
        if slot.generation == id.raw() >> INDEX_BITS { slot.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, id: I) -> Option<&mut T> {
        let slot = self.slots.get_mut((id.raw() & INDEX_MASK) as usize)?;
        if slot.generation == id.raw() >> INDEX_BITS { slot.value.as_mut() } else { None }
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|s| s.value.as_mut())
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
        assert_eq!((table.len(), table.iter_mut().map(|v| *v).sum::<u8>()), (2, 6));
    }
}
