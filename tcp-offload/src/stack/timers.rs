//! Deadlines of all connections of one stack: a binary heap with at most one entry for each connection, so that its size
//! is bounded by the number of connections.
//!
//! Moving a deadline to a later time costs nothing: the entry stays, expires early and is armed again. For the same reason
//! the connections report a lower bound of their deadlines ([`crate::tcp::Connection::deadline_bound`]). A
//! retransmission timer that each acknowledgement restarts is therefore free, and idle connections are never scanned.

use super::{Stack, earlier, icmp};
use crate::{
    framing::either,
    link::Link,
    time::Instant,
    ulp::{ConnId, Ulp},
};

/// Value in [`Timers::places`] of a connection without an entry.
const ABSENT: u32 = u32::MAX;

/// One entry of the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Deadline {
    at: Instant,
    connection: u32,
}

/// The deadlines, earliest first.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: Vec<Deadline>,
    /// The index in `heap` of each connection's entry.
    places: Vec<u32>,
}

impl Timers {
    /// Sets the deadline of connection `connection` to `deadline`, unless it has an earlier one.
    #[inline]
    pub(super) fn arm(&mut self, connection: u32, deadline: Option<Instant>) {
        let Some(at) = deadline else { return };
        // The place of a connection without an entry lies beyond the heap.
        let place = self.places.get(connection as usize).map_or(usize::MAX, |place| *place as usize);
        if self.heap.get(place).is_none_or(|entry| at < entry.at) {
            self.set(connection, at);
        }
    }

    fn set(&mut self, connection: u32, at: Instant) {
        if let Some(place) = self.place(connection) {
            if let Some(entry) = self.heap.get_mut(place) {
                entry.at = at;
                self.sift_up(place);
            }
        } else {
            self.heap.push(Deadline { at, connection });
            self.sift_up(self.heap.len() - 1);
        }
    }

    /// Removes and returns the connection with the earliest deadline, if that has passed.
    fn expire(&mut self, now: Instant) -> Option<u32> {
        let first = self.heap.first().filter(|first| first.at <= now)?.connection;
        self.remove(first);
        Some(first)
    }

    /// Removes the entry of a connection, if it has one.
    pub(super) fn remove(&mut self, connection: u32) {
        let Some(place) = self.place(connection) else { return };
        self.heap.swap_remove(place);
        self.note_place(connection, ABSENT);
        if place < self.heap.len() {
            self.sift_down(place);
            self.sift_up(place);
        }
    }

    /// The earliest deadline.
    #[inline]
    fn next(&self) -> Option<Instant> {
        self.heap.first().map(|first| first.at)
    }

    /// Number of connections with a deadline.
    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }

    fn place(&self, connection: u32) -> Option<usize> {
        self.places.get(connection as usize).filter(|place| **place != ABSENT).map(|place| *place as usize)
    }

    fn note_place(&mut self, connection: u32, place: u32) {
        let connection = connection as usize;
        if self.places.len() <= connection {
            self.places.resize(connection + 1, ABSENT);
        }
        if let Some(to) = self.places.get_mut(connection) {
            *to = place;
        }
    }

    /// Records `place` for the connection whose entry lies there.
    fn record_place(&mut self, place: usize) {
        if let Some(entry) = self.heap.get(place).copied() {
            self.note_place(entry.connection, place as u32);
        }
    }

    fn sift_up(&mut self, mut place: usize) {
        while place > 0 && self.heap.get(place) < self.heap.get((place - 1) / 2) {
            self.heap.swap(place, (place - 1) / 2);
            self.record_place(place);
            place = (place - 1) / 2;
        }
        self.record_place(place);
    }

    fn sift_down(&mut self, mut place: usize) {
        loop {
            let (left, right) = (2 * place + 1, 2 * place + 2);
            let least = if right < self.heap.len() && self.heap.get(right) < self.heap.get(left) {
                right
            } else {
                left
            };
            if left >= self.heap.len() || self.heap.get(place) <= self.heap.get(least) {
                return self.record_place(place);
            }
            self.heap.swap(place, least);
            self.record_place(place);
            place = least;
        }
    }
}

impl<U: Ulp> Stack<U> {
    /// Handles the expired timers.
    pub fn on_timer(&mut self, now: Instant, link: &mut dyn Link, ulp: &mut U) {
        self.catch_up(now, link, ulp);
        self.half_open_timer(now, link);
        self.sweep_frames(now, link);
        self.pass_paths(now);
        // Each connection is served at most once, so that a timer that wrongly re-arms itself cannot delay the
        // others.
        for _ in 0..self.timers.len() {
            let Some(index) = self.timers.expire(now) else { break };
            let Some(slot) = self.slots.get_mut(index as usize) else { continue };
            self.counters.timer_looks += 1;
            let conn = ConnId { index, generation: slot.generation };
            let closed = slot.tcp.on_timer(now);
            let doubt = slot.tcp.take_next_hop_doubt();
            if icmp::pass_soft_error(conn, &mut slot.tcp, ulp) || doubt {
                self.lookups.insert(index, true);
            }
            if either!(&slot.session => deadline()).is_some_and(|d| d <= now) {
                either!(&mut slot.session => on_timer(now, ulp, conn, link));
            }
            debug_assert!(
                slot.deadline_bound(false).is_none_or(|at| at > now),
                "a timer at or before now: {slot:?}"
            );
            self.after_change(now, link, index, closed, ulp);
        }
    }

    /// Whether [`Stack::on_timer`] must be called now.
    #[inline]
    pub fn is_due(&self, now: Instant) -> bool {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        due(self.timers.next())
            || due(self.half_open.next())
            || due(self.sweep.due())
            || due(self.paths.due())
    }

    /// The time at which [`Stack::on_timer`] must be called next, if any; at once when that time has passed.
    pub fn next_deadline(&self) -> Option<Instant> {
        let tables = earlier(self.half_open.next(), earlier(self.sweep.due(), self.paths.due()));
        earlier(self.timers.next(), tables)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn at(ns: u64) -> Instant {
        Instant::from_nanos(ns)
    }

    #[test]
    fn only_an_earlier_deadline_moves_the_entry() {
        let mut timers = Timers::default();
        timers.arm(7, Some(at(50)));
        timers.arm(7, Some(at(90)));
        timers.arm(7, Some(at(20)));
        timers.arm(7, None);
        assert_eq!((timers.len(), timers.next()), (1, Some(at(20))));
        assert_eq!(timers.expire(at(19)), None);
        assert_eq!(timers.expire(at(60)), Some(7));
        assert_eq!((timers.expire(at(60)), timers.next()), (None, None));
    }

    /// One connection with a keepalive two hours away that sends a message each millisecond.
    #[test]
    fn a_far_deadline_and_many_near_ones_leave_one_entry() {
        let mut timers = Timers::default();
        for message in 0..100_000u64 {
            let now = message * 1_000_000;
            timers.arm(3, Some(at(now + 500_000)));
            assert_eq!(timers.expire(at(now + 500_000)), Some(3));
            timers.arm(3, Some(at(now + 7_200_000_000_000)));
        }
        assert_eq!((timers.len(), timers.heap.capacity()), (1, 4));
    }

    proptest! {
        #[test]
        fn prop_the_heap_agrees_with_a_map(ops in prop::collection::vec((0..4u8, 0..16u32, 0..100u64), 1..200)) {
            let mut timers = Timers::default();
            let mut model: BTreeMap<u32, Instant> = BTreeMap::new();
            for (op, connection, ns) in ops {
                match op {
                    0 => {
                        let expired = timers.expire(at(ns));
                        let least = model.iter().map(|(c, at)| (*at, *c)).min().filter(|first| first.0 <= at(ns));
                        prop_assert_eq!(expired, least.map(|first| first.1));
                        expired.and_then(|c| model.remove(&c));
                    }
                    1 => {
                        timers.remove(connection);
                        model.remove(&connection);
                    }
                    _ => {
                        timers.arm(connection, Some(at(ns)));
                        let entry = model.entry(connection).or_insert(at(ns));
                        *entry = at(ns).min(*entry);
                    }
                }
                prop_assert_eq!(timers.len(), model.len());
                prop_assert_eq!(timers.next(), model.values().min().copied());
            }
        }
    }
}
