//! The next work of each connection: nothing, a delayed ACK when the engine is idle, sending when frames are free, or
//! sending now. A connection is in at most one list, and a removed connection is in none, so the lists are bounded by the
//! table.

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

/// Index of no connection.
const NONE: u32 = u32::MAX;

/// Links of one connection in its list.
#[derive(Debug, Clone, Copy)]
struct Place {
    work: Work,
    before: u32,
    after: u32,
}

impl Default for Place {
    fn default() -> Self {
        Self { work: Work::Nothing, before: NONE, after: NONE }
    }
}

/// One doubly linked list.
#[derive(Debug, Clone, Copy)]
struct List {
    first: u32,
    last: u32,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE, len: 0 }
    }
}

impl List {
    fn first(&self) -> Option<u32> {
        Some(self.first).filter(|first| *first != NONE)
    }
}

/// The work of all connections, first come, first served.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// By connection index.
    places: Vec<Place>,
    acks: List,
    frames: List,
    sends: List,
}

impl Turns {
    /// The work of connection `index`.
    #[inline]
    pub(super) fn work(&self, index: u32) -> Work {
        self.places.get(index as usize).map_or(Work::Nothing, |place| place.work)
    }

    /// Sets the work of connection `index`. The connection is appended to the list of its new work; with the same work
    /// as before it keeps its place.
    #[inline]
    pub(super) fn set(&mut self, index: u32, work: Work) {
        if self.work(index) != work {
            self.change(index, work);
        }
    }

    fn change(&mut self, index: u32, work: Work) {
        let at = index as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, Place::default());
        }
        let Some(Place { work: old, before, after }) = self.places.get(at).copied() else { return };
        if let Some(list) = self.list(old) {
            list.len -= 1;
            if before == NONE {
                list.first = after;
            }
            if after == NONE {
                list.last = before;
            }
            if let Some(place) = self.places.get_mut(before as usize) {
                place.after = after;
            }
            if let Some(place) = self.places.get_mut(after as usize) {
                place.before = before;
            }
        }
        let mut new = Place { work, ..Place::default() };
        if let Some(list) = self.list(work) {
            list.len += 1;
            new.before = std::mem::replace(&mut list.last, index);
            if new.before == NONE {
                list.first = index;
            }
            if let Some(last) = self.places.get_mut(new.before as usize) {
                last.after = index;
            }
        }
        if let Some(place) = self.places.get_mut(at) {
            *place = new;
        }
    }

    /// Removes and returns the connection whose turn it is to send.
    pub(super) fn next_send(&mut self) -> Option<u32> {
        let index = self.sends.first()?;
        self.set(index, Work::Nothing);
        Some(index)
    }

    /// Removes and returns a connection that owes an ACK.
    pub(super) fn next_ack(&mut self) -> Option<u32> {
        let index = self.acks.first()?;
        self.set(index, Work::Nothing);
        Some(index)
    }

    /// Makes the connection that has waited longest for frames send. Returns false if none waits.
    pub(super) fn retry_one(&mut self) -> bool {
        let waits = self.frames.first();
        if let Some(index) = waits {
            self.set(index, Work::Send);
        }
        waits.is_some()
    }

    /// Number of connections that wait for free frames.
    pub(super) fn waiting(&self) -> usize {
        self.frames.len
    }

    /// Number of connections that may have something to send.
    pub(super) fn sends(&self) -> usize {
        self.sends.len
    }

    /// Number of connections that owe an ACK and nothing else.
    pub(super) fn acks(&self) -> usize {
        self.acks.len
    }

    fn list(&mut self, work: Work) -> Option<&mut List> {
        match work {
            Work::Nothing => None,
            Work::Ack => Some(&mut self.acks),
            Work::Frames => Some(&mut self.frames),
            Work::Send => Some(&mut self.sends),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn prop_the_lists_agree_with_queues(ops in prop::collection::vec((0..7u8, 0..8u32), 1..200)) {
            let mut turns = Turns::default();
            let [mut acks, mut frames, mut sends] = [const { VecDeque::new() }; 3];
            for (op, index) in ops {
                let (index, work) = match op {
                    0 => (index, Work::Nothing),
                    1 => (index, Work::Ack),
                    2 => (index, Work::Frames),
                    3 => (index, Work::Send),
                    4 => {
                        prop_assert_eq!(turns.retry_one(), !frames.is_empty());
                        sends.extend(frames.pop_front());
                        continue;
                    }
                    5 => {
                        prop_assert_eq!(turns.next_send(), sends.pop_front());
                        continue;
                    }
                    _ => {
                        prop_assert_eq!(turns.next_ack(), acks.pop_front());
                        continue;
                    }
                };
                turns.set(index, work);
                for (list, of) in [(&mut acks, Work::Ack), (&mut frames, Work::Frames), (&mut sends, Work::Send)] {
                    match list.iter().position(|i| *i == index) {
                        Some(_) if work == of => {}
                        Some(at) => drop(list.remove(at)),
                        None if work == of => list.push_back(index),
                        None => {}
                    }
                }
                prop_assert_eq!(turns.work(index), work);
                prop_assert_eq!(
                    (turns.acks(), turns.waiting(), turns.sends()),
                    (acks.len(), frames.len(), sends.len())
                );
            }
        }
    }
}
