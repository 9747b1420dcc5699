//! [`Ordered`]: items in stream order, with insertion and removal anywhere at a cost that hardly depends on their number.
//!
//! A peer chooses the stream positions of its segments, so with a flat list it could choose the most expensive
//! position for each of thousands of items. Here an operation is a binary search and moves at most [`BLOCK`] items.
//! Blocks that become empty are kept for reuse, so a list that has grown once does not allocate.

use std::collections::VecDeque;

use crate::{seq::StreamOffset, steps};

/// Largest number of items in a block.
const BLOCK: usize = 64;

/// Largest number of empty blocks that are kept for reuse.
const SPARE: usize = 4;

/// An item that covers a range of the stream. The ranges of two items of a list do not overlap.
pub(crate) trait Extent {
    /// The offset after the last byte of the range.
    fn end(&self) -> StreamOffset;
}

impl Extent for (StreamOffset, StreamOffset) {
    fn end(&self) -> StreamOffset {
        self.1
    }
}

/// The position of an item, valid until the next insertion or removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    block: usize,
    at: usize,
}

/// A list of items in stream order, divided into blocks; see the module documentation.
#[derive(Debug)]
pub(crate) struct Ordered<T> {
    /// `None` before the first item: most lists of most connections never have one.
    blocks: Option<Box<Blocks<T>>>,
    len: usize,
}

#[derive(Debug)]
struct Blocks<T> {
    /// No block is empty. A removal that leaves a block less than a quarter full joins it with a neighbour, if both
    /// fit into half a block.
    used: VecDeque<VecDeque<T>>,
    spare: Vec<VecDeque<T>>,
}

impl<T> Default for Ordered<T> {
    fn default() -> Self {
        Self { blocks: None, len: 0 }
    }
}

impl<T> Default for Blocks<T> {
    fn default() -> Self {
        Self { used: VecDeque::new(), spare: Vec::new() }
    }
}

impl<T: Extent> Ordered<T> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The place of the first item that ends after `offset`, or the place after the last item when none does.
    pub fn seek(&self, offset: StreamOffset) -> Place {
        steps::add(1);
        let Some(Blocks { used, .. }) = self.blocks.as_deref() else { return Place { block: 0, at: 0 } };
        let block = used.partition_point(|b| b.back().is_none_or(|item| item.end() <= offset));
        let items = used.get(block);
        let at = items.map_or(0, |items| items.partition_point(|item| item.end() <= offset));
        Place { block, at }
    }

    pub fn get(&self, place: Place) -> Option<&T> {
        self.blocks.as_ref()?.used.get(place.block)?.get(place.at)
    }

    pub fn get_mut(&mut self, place: Place) -> Option<&mut T> {
        self.blocks.as_mut()?.used.get_mut(place.block)?.get_mut(place.at)
    }

    /// The place before `place`, if there is one.
    pub fn before(&self, place: Place) -> Option<Place> {
        if let Some(at) = place.at.checked_sub(1) {
            return Some(Place { at, ..place });
        }
        let block = place.block.checked_sub(1)?;
        Some(Place { block, at: self.blocks.as_ref()?.used.get(block)?.len().checked_sub(1)? })
    }

    /// The items from `place` on.
    pub fn iter_from(&self, place: Place) -> impl Iterator<Item = &T> {
        let mut at = place.at;
        self.blocks
            .iter()
            .flat_map(move |blocks| blocks.used.range(place.block.min(blocks.used.len())..))
            .flat_map(move |items| items.range(std::mem::take(&mut at).min(items.len())..))
            .inspect(|_| steps::add(1))
    }

    pub fn front(&self) -> Option<&T> {
        self.blocks.as_ref()?.used.front()?.front()
    }

    pub fn back(&self) -> Option<&T> {
        self.blocks.as_ref()?.used.back()?.back()
    }

    /// Inserts `item` before the item at `place`, which must be its position in stream order.
    pub fn insert(&mut self, place: Place, item: T) {
        self.len += 1;
        self.blocks.get_or_insert_default().insert(place, item);
    }

    /// Removes the item at `place`.
    pub fn remove(&mut self, place: Place) -> Option<T> {
        let item = self.blocks.as_mut()?.remove(place)?;
        self.len -= 1;
        Some(item)
    }

    pub fn pop_front(&mut self) -> Option<T> {
        self.remove(Place { block: 0, at: 0 })
    }

    pub fn push_front(&mut self, item: T) {
        self.insert(Place { block: 0, at: 0 }, item);
    }

    pub fn clear(&mut self) {
        self.len = 0;
        if let Some(blocks) = &mut self.blocks {
            blocks.clear();
        }
    }
}

impl<T: Extent> Blocks<T> {
    fn insert(&mut self, Place { mut block, mut at }: Place, item: T) {
        // The place after the last block is the end of that block.
        if block > 0 && block == self.used.len() {
            block -= 1;
            at = self.used.get(block).map_or(0, VecDeque::len);
        }
        let full = self.used.get(block).is_none_or(|items| items.len() >= BLOCK);
        if full {
            (block, at) = self.open(block, at);
        }
        if let Some(items) = self.used.get_mut(block) {
            steps::add(at.min(items.len() - at));
            items.insert(at, item);
        }
    }

    /// Makes room at `at` of block `block`, which is full or does not exist; returns the new place.
    fn open(&mut self, block: usize, at: usize) -> (usize, usize) {
        let mut new = self.spare.pop().unwrap_or_default();
        match self.used.get_mut(block) {
            // A full block is not split at its ends, so that lists that grow at one end fill their blocks.
            Some(_) if at == 0 => {
                self.used.insert(block, new);
                (block, 0)
            }
            Some(items) if at < items.len() => {
                let half = items.len() / 2;
                steps::add(half);
                new.extend(items.drain(half..));
                self.used.insert(block + 1, new);
                if at <= half { (block, at) } else { (block + 1, at - half) }
            }
            Some(_) => {
                self.used.insert(block + 1, new);
                (block + 1, 0)
            }
            None => {
                self.used.push_back(new);
                (self.used.len() - 1, 0)
            }
        }
    }

    fn remove(&mut self, place: Place) -> Option<T> {
        let items = self.used.get_mut(place.block)?;
        let item = items.remove(place.at)?;
        steps::add(place.at.min(items.len() - place.at));
        if items.is_empty() {
            self.retire(place.block);
        } else if items.len() < BLOCK / 4 {
            self.merge(place.block);
            if let Some(before) = place.block.checked_sub(1) {
                self.merge(before);
            }
        }
        Some(item)
    }

    /// Joins a block with the next one when both fit into half a block.
    fn merge(&mut self, block: usize) {
        let Some([first, second]) = self.pair(block) else { return };
        if first.len() + second.len() <= BLOCK / 2 {
            steps::add(second.len());
            first.append(second);
            self.retire(block + 1);
        }
    }

    fn pair(&mut self, block: usize) -> Option<[&mut VecDeque<T>; 2]> {
        let mut both = self.used.range_mut(block..(block + 2).min(self.used.len()));
        Some([both.next()?, both.next()?])
    }

    /// Removes an empty block and keeps it for reuse.
    fn retire(&mut self, block: usize) {
        if let Some(items) = self.used.remove(block)
            && self.spare.len() < SPARE
        {
            self.spare.push(items);
        }
    }

    fn clear(&mut self) {
        while let Some(mut items) = self.used.pop_back() {
            if self.spare.len() < SPARE {
                items.clear();
                self.spare.push(items);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn prop_ordered_agrees_with_a_tree(work in proptest::collection::vec((0u64..500, 0u8..8), 0..3000)) {
            let mut list = Ordered::default();
            let mut tree = BTreeMap::new();
            for (at, what) in work {
                // Items of two bytes at odd offsets.
                let item = (2 * at + 1, 2 * at + 3);
                let place = list.seek(item.0);
                let there = list.get(place) == Some(&item);
                prop_assert_eq!(there, tree.contains_key(&item.0));
                let after: Vec<_> = list.iter_from(place).take(2).copied().collect();
                let expected: Vec<_> = tree.range(item.0..).take(2).map(|(s, e)| (*s, *e)).collect();
                prop_assert_eq!(after, expected);
                let before = list.before(place).and_then(|place| list.get(place)).copied();
                prop_assert_eq!(before, tree.range(..item.0).next_back().map(|(s, e)| (*s, *e)));
                match what {
                    0 if there => {
                        prop_assert_eq!(list.remove(place), Some(item));
                        tree.remove(&item.0);
                    }
                    1 => prop_assert_eq!(list.pop_front(), tree.pop_first()),
                    _ if !there => {
                        list.insert(place, item);
                        tree.insert(item.0, item.1);
                    }
                    _ => {}
                }
                prop_assert_eq!((list.len(), list.is_empty()), (tree.len(), tree.is_empty()));
                prop_assert_eq!(list.front().copied(), tree.first_key_value().map(|(s, e)| (*s, *e)));
                prop_assert_eq!(list.back().copied(), tree.last_key_value().map(|(s, e)| (*s, *e)));
                let used = list.blocks.iter().flat_map(|blocks| &blocks.used);
                prop_assert!(used.clone().all(|items| !items.is_empty() && items.len() <= BLOCK));
                prop_assert!(used.count() <= 2 + list.len() * 8 / BLOCK, "blocks are nearly empty");
            }
            prop_assert!(list.iter_from(list.seek(0)).copied().eq(tree));
        }
    }

    #[test]
    fn an_operation_moves_no_more_items_than_a_block_has() {
        let mut list = Ordered::default();
        for n in 0..10_000u64 {
            // Ascending and descending starts in turn: every insertion is in the middle of the list.
            let start = if n % 2 == 0 { n } else { 1_000_000 - n };
            let cost = steps::of(|| list.insert(list.seek(start), (start, start + 1)));
            assert!(cost <= 2 * BLOCK, "{cost} steps");
        }
        let cost = steps::of(|| assert!(list.remove(list.seek(5000)).is_some()));
        assert!(cost <= 2 * BLOCK, "{cost} steps");
    }
}
