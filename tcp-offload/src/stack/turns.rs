//! The next work of each connection: nothing, a delayed ACK when the engine is idle, sending when frames are free, or
//! sending now.
//!
//! Each kind of work has a list. A connection whose work changes keeps its entry in the old list, where it is skipped:
//! the work of a connection changes several times per message, and its turn in the list of ACKs comes only when the
//! engine is idle. No list has two entries of a connection, so the lists are bounded by the table.

use std::collections::VecDeque;

/// The next work of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Work {
    /// None.
    #[default]
    Nothing,
    /// It owes an ACK that may wait until a turn receives nothing.
    Ack,
    /// It has data for which no frame was free.
    Frames,
    /// It may have something to send now.
    Send,
}

impl Work {
    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The work of one connection.
#[derive(Debug, Clone, Copy)]
struct Place {
    work: Work,
    /// The lists that have an entry of the connection, as [bits](Work::bit).
    listed: u8,
}

impl Place {
    /// Without work. The list of such connections has no entries: each connection counts as listed.
    const EMPTY: Self = Self { work: Work::Nothing, listed: Work::Nothing.bit() };
}

/// The connections that have, or had, one kind of work.
#[derive(Debug, Default)]
struct List {
    /// The first of them, apart from the others: most lists have no more, and a queue takes longer.
    first: Option<u32>,
    others: VecDeque<u32>,
    /// Number of connections that have this work.
    len: usize,
}

impl List {
    #[inline]
    fn push(&mut self, index: u32) {
        if self.first.is_none() {
            self.first = Some(index);
        } else {
            self.push_behind(index);
        }
    }

    #[inline(never)]
    fn push_behind(&mut self, index: u32) {
        self.others.push_back(index);
    }

    #[inline]
    fn pop(&mut self) -> Option<u32> {
        let first = self.first.take();
        if !self.others.is_empty() {
            self.advance();
        }
        first
    }

    #[inline(never)]
    fn advance(&mut self) {
        self.first = self.others.pop_front();
    }
}

/// The lists of all kinds of work.
#[derive(Debug, Default)]
struct Lists([List; 4]);

// The discriminants are the indices: no work can leave the table.
#[allow(clippy::indexing_slicing)]
impl Lists {
    #[inline]
    fn of(&self, work: Work) -> &List {
        &self.0[work as usize]
    }

    #[inline]
    fn of_mut(&mut self, work: Work) -> &mut List {
        &mut self.0[work as usize]
    }
}

/// The work of all connections, first come, first served.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// By connection index.
    places: Vec<Place>,
    lists: Lists,
}

impl Turns {
    /// The work of connection `index`.
    #[inline]
    pub(super) fn work(&self, index: u32) -> Work {
        self.places.get(index as usize).map_or(Work::Nothing, |place| place.work)
    }

    /// Sets the work of connection `index`. The connection is appended to the list of its new work, unless that has an
    /// entry of it.
    #[inline]
    pub(super) fn set(&mut self, index: u32, work: Work) {
        if self.work(index) != work {
            self.change(index, work);
        }
    }

    fn change(&mut self, index: u32, work: Work) {
        let Some(place) = self.places.get_mut(index as usize) else { return self.add(index, work) };
        self.lists.of_mut(std::mem::replace(&mut place.work, work)).len -= 1;
        let list = self.lists.of_mut(work);
        list.len += 1;
        if place.listed & work.bit() == 0 {
            place.listed |= work.bit();
            list.push(index);
        }
    }

    /// Sets the work of connection `index`, which has no place yet.
    #[cold]
    fn add(&mut self, index: u32, work: Work) {
        let places = index as usize + 1;
        self.lists.of_mut(Work::Nothing).len += places - self.places.len();
        self.places.resize(places, Place::EMPTY);
        self.change(index, work);
    }

    /// Takes the work `work` from the first connection that has it, and returns the connection.
    #[inline]
    fn take(&mut self, work: Work) -> Option<u32> {
        loop {
            let index = self.lists.of_mut(work).pop()?;
            let Some(place) = self.places.get_mut(index as usize) else { continue };
            place.listed &= !work.bit();
            if place.work == work {
                place.work = Work::Nothing;
                self.lists.of_mut(work).len -= 1;
                self.lists.of_mut(Work::Nothing).len += 1;
                return Some(index);
            }
        }
    }

    /// Removes and returns the connection whose turn it is to send.
    #[inline]
    pub(super) fn next_send(&mut self) -> Option<u32> {
        self.take(Work::Send)
    }

    /// Removes and returns a connection that owes an ACK.
    pub(super) fn next_ack(&mut self) -> Option<u32> {
        self.take(Work::Ack)
    }

    /// Makes the connection that has waited longest for frames send. Returns false if none waits.
    pub(super) fn retry_one(&mut self) -> bool {
        let waits = self.take(Work::Frames);
        if let Some(index) = waits {
            self.set(index, Work::Send);
        }
        waits.is_some()
    }

    /// Number of connections that wait for free frames.
    pub(super) fn waiting(&self) -> usize {
        self.lists.of(Work::Frames).len
    }

    /// Number of connections that may have something to send.
    pub(super) fn sends(&self) -> usize {
        self.lists.of(Work::Send).len
    }

    /// Number of connections that owe an ACK and nothing else.
    pub(super) fn acks(&self) -> usize {
        self.lists.of(Work::Ack).len
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONNECTIONS: u32 = 8;

    /// The specification of [`Turns`], without regard to cost.
    #[derive(Default)]
    struct Model {
        works: [Work; CONNECTIONS as usize],
        acks: VecDeque<u32>,
        frames: VecDeque<u32>,
        sends: VecDeque<u32>,
    }

    impl Model {
        fn list(&mut self, work: Work) -> &mut VecDeque<u32> {
            match work {
                Work::Ack => &mut self.acks,
                Work::Frames => &mut self.frames,
                _ => &mut self.sends,
            }
        }

        fn set(&mut self, index: u32, work: Work) {
            let old = std::mem::replace(&mut self.works[index as usize], work);
            if old != work && work != Work::Nothing && !self.list(work).contains(&index) {
                self.list(work).push_back(index);
            }
        }

        fn advance(&mut self, old: Work, new: Work) -> Option<u32> {
            while let Some(index) = self.list(old).pop_front() {
                if self.works[index as usize] == old {
                    self.set(index, new);
                    return Some(index);
                }
            }
            None
        }

        fn count(&self, work: Work) -> usize {
            self.works.iter().filter(|w| **w == work).count()
        }
    }

    proptest! {
        #[test]
        fn prop_the_lists_agree_with_queues(ops in prop::collection::vec((0..7u8, 0..CONNECTIONS), 1..200)) {
            let (mut turns, mut model) = (Turns::default(), Model::default());
            for (op, index) in ops {
                let work = match op {
                    0 => Work::Nothing,
                    1 => Work::Ack,
                    2 => Work::Frames,
                    3 => Work::Send,
                    4 => {
                        let retried = model.advance(Work::Frames, Work::Send);
                        prop_assert_eq!(turns.retry_one(), retried.is_some());
                        continue;
                    }
                    5 => {
                        prop_assert_eq!(turns.next_send(), model.advance(Work::Send, Work::Nothing));
                        continue;
                    }
                    _ => {
                        prop_assert_eq!(turns.next_ack(), model.advance(Work::Ack, Work::Nothing));
                        continue;
                    }
                };
                turns.set(index, work);
                model.set(index, work);
                for index in 0..CONNECTIONS {
                    prop_assert_eq!(turns.work(index), model.works[index as usize]);
                }
                let counts = [Work::Ack, Work::Frames, Work::Send].map(|work| model.count(work));
                prop_assert_eq!([turns.acks(), turns.waiting(), turns.sends()], counts);
            }
            // Each connection with work is returned exactly once.
            for expected in [Work::Ack, Work::Frames, Work::Send] {
                let found = std::iter::from_fn(|| turns.take(expected)).count();
                prop_assert_eq!(found, model.count(expected));
            }
        }
    }

    /// An engine that is never idle takes no turn of the list of ACKs.
    #[test]
    fn a_list_has_one_entry_of_a_connection() {
        let mut turns = Turns::default();
        for _ in 0..1000 {
            turns.set(3, Work::Ack);
            turns.set(3, Work::Send);
            assert_eq!(turns.next_send(), Some(3));
        }
        let list = turns.lists.of(Work::Ack);
        assert_eq!((list.first, list.others.len(), turns.acks()), (Some(3), 0, 0));
        assert_eq!(turns.next_ack(), None);
    }
}
