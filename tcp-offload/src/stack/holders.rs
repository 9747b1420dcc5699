//! The connections that hold bytes beyond a gap or of an unfinished FPDU, ordered by how long they have held them.

use crate::time::Instant;

/// Links of one connection in the list.
#[derive(Debug, Clone, Copy)]
struct Neighbours {
    before: Option<u32>,
    after: Option<u32>,
    since: Instant,
}

/// A doubly linked list, indexed by connection, so that insertion and removal need no search.
#[derive(Debug, Default)]
pub(super) struct Holders {
    /// Links by connection index.
    neighbours: Vec<Option<Neighbours>>,
    oldest: Option<u32>,
    latest: Option<u32>,
}

impl Holders {
    /// Records that connection `index` has held bytes since `since`, or holds none when that is `None`. A new time
    /// must not be earlier than the times recorded before, because it is appended to the list.
    pub(super) fn note(&mut self, index: u32, since: Option<Instant>) {
        let noted = self.at(index).map(|n| n.since);
        if noted == since {
            return;
        }
        if noted.is_some() {
            self.unlink(index);
        }
        if let Some(since) = since {
            self.push(index, since);
        }
    }

    /// The connection that has held bytes for longest, and since when.
    pub(super) fn oldest(&self) -> Option<(u32, Instant)> {
        let index = self.oldest?;
        Some((index, self.at(index)?.since))
    }

    fn at(&self, index: u32) -> Option<Neighbours> {
        *self.neighbours.get(index as usize)?
    }

    fn neighbours(&mut self, index: Option<u32>) -> Option<&mut Neighbours> {
        self.neighbours.get_mut(index? as usize)?.as_mut()
    }

    fn push(&mut self, index: u32, since: Instant) {
        let at = index as usize;
        if self.neighbours.len() <= at {
            self.neighbours.resize(at + 1, None);
        }
        let before = self.latest.replace(index);
        match self.neighbours(before) {
            Some(before) => before.after = Some(index),
            None => self.oldest = Some(index),
        }
        if let Some(place) = self.neighbours.get_mut(at) {
            *place = Some(Neighbours { before, after: None, since });
        }
    }

    fn unlink(&mut self, index: u32) {
        let Some(place) = self.neighbours.get_mut(index as usize) else { return };
        let Some(Neighbours { before, after, .. }) = place.take() else { return };
        match self.neighbours(before) {
            Some(before) => before.after = after,
            None => self.oldest = after,
        }
        match self.neighbours(after) {
            Some(after) => after.before = before,
            None => self.latest = before,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_holder_is_first_after_every_removal() {
        let at = |ns| Some(Instant::from_nanos(ns));
        let mut holders = Holders::default();
        for (index, since) in [(5, 1), (0, 2), (9, 3), (2, 3)] {
            holders.note(index, at(since));
        }
        holders.note(0, at(2));
        assert_eq!(holders.oldest(), Some((5, Instant::from_nanos(1))));
        holders.note(5, at(4));
        assert_eq!(holders.oldest(), Some((0, Instant::from_nanos(2))));
        holders.note(9, None);
        holders.note(0, None);
        holders.note(0, None);
        assert_eq!(holders.oldest(), Some((2, Instant::from_nanos(3))));
        holders.note(2, None);
        assert_eq!(holders.oldest(), Some((5, Instant::from_nanos(4))));
        holders.note(5, None);
        assert_eq!(holders.oldest(), None);
        holders.note(7, at(6));
        assert_eq!(holders.oldest(), Some((7, Instant::from_nanos(6))));
    }
}
