//! When to look at which connection again. A heap with lazy entries: a connection has at most one entry
//! that counts, and moving its deadline later costs nothing (the entry fires early and is put back), so
//! a re-armed retransmission timer per acknowledgement is free and idle connections are never scanned.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::time::Instant;

/// The deadlines of all connections of one stack.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
}

impl Timers {
    /// Notes that connection `index` wants to be looked at by `deadline`. `scheduled` is the
    /// connection's entry that counts.
    pub(super) fn arm(&mut self, index: u32, deadline: Option<Instant>, scheduled: &mut Option<Instant>) {
        let Some(deadline) = deadline else { return };
        if scheduled.is_none_or(|earlier| deadline < earlier) {
            *scheduled = Some(deadline);
            self.heap.push(Reverse((deadline, index)));
        }
    }

    /// The next entry that is due: its time and connection. The caller compares the time with the
    /// connection's `scheduled`, and ignores entries that count no more.
    pub(super) fn due(&mut self, now: Instant) -> Option<(Instant, u32)> {
        let Reverse((at, _)) = *self.heap.peek()?;
        if at > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// When the earliest entry fires, if there is one.
    pub(super) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_deadlines_add_no_entries_and_earlier_ones_win() {
        let at = Instant::from_nanos;
        let mut timers = Timers::default();
        let mut scheduled = None;
        timers.arm(7, Some(at(50)), &mut scheduled);
        timers.arm(7, Some(at(90)), &mut scheduled);
        assert_eq!(timers.heap.len(), 1);
        timers.arm(7, Some(at(20)), &mut scheduled);
        assert_eq!(scheduled, Some(at(20)));
        assert_eq!(timers.due(at(19)), None);
        assert_eq!(timers.due(at(60)), Some((at(20), 7)));
        assert_eq!(timers.due(at(60)), Some((at(50), 7)), "a stale entry, for the caller to ignore");
        assert_eq!(timers.next(), None);
    }
}
