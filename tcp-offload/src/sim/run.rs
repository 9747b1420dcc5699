//! Virtual time: [`run`] gives each node its turns and advances from event to event.

use std::time::Duration;

use super::Wire;
use crate::time::Instant;

/// One end of the simulation: an engine with its link.
pub trait Node {
    /// One turn at `now`: receive what has arrived, act on timers, transmit. Returns whether anything was received or
    /// remains to be sent at once, so that another turn follows at the same time.
    fn turn(&mut self, now: Instant) -> bool;

    /// The time at which the next turn is due if nothing arrives.
    fn next_deadline(&self) -> Option<Instant>;
}

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// `done` returned true at this time.
    Done(Instant),
    /// No frame is in flight and no timer runs, but `done` has never returned true.
    Stalled(Instant),
    /// The time limit was reached.
    TimeLimit,
}

/// Largest number of rounds of turns while virtual time stands still. More of them mean that a timer or a queue spins.
const MAX_TURNS_AT_ONCE: usize = 100_000;

/// Runs the nodes over the wire until `done` (asked after each round of turns) or until `limit` has passed.
///
/// # Panics
/// When the nodes take too many turns while time stands still, or when a timer of a node is still due after a turn in
/// which it received nothing: such a timer would fire endlessly.
pub fn run(
    wire: &Wire,
    nodes: &mut [&mut dyn Node],
    start: Instant,
    limit: Duration,
    mut done: impl FnMut(Instant, &mut [&mut dyn Node]) -> bool,
) -> Outcome {
    let end = start + limit;
    let mut now = start;
    let mut turns = 0;
    loop {
        wire.advance(now);
        let mut busy = false;
        for node in &mut *nodes {
            let active = node.turn(now);
            let due = node.next_deadline().filter(|at| *at <= now);
            assert!(active || due.is_none(), "a timer at {due:?} is still due after a turn at {now:?}");
            busy |= active;
        }
        if done(now, nodes) {
            return Outcome::Done(now);
        }
        let timers = nodes.iter().filter_map(|n| n.next_deadline()).min();
        let next = match (wire.next_arrival(), timers) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        match next {
            _ if busy => turns += 1,
            Some(at) if at <= now => turns += 1,
            Some(at) if at > end => return Outcome::TimeLimit,
            Some(at) => {
                now = at;
                turns = 0;
            }
            None => return Outcome::Stalled(now),
        }
        assert!(turns < MAX_TURNS_AT_ONCE, "time stands still at {now:?}: a timer or a queue spins");
    }
}

/// Runs the nodes for `time` from `now`, which is advanced.
///
/// # Panics
/// Like [`run`], and when nothing is left to do before.
pub fn run_for(wire: &Wire, nodes: &mut [&mut dyn Node], now: &mut Instant, time: Duration) {
    let outcome = run(wire, nodes, *now, time, |_, _| false);
    assert_eq!(outcome, Outcome::TimeLimit, "nothing is left to do");
    *now += time;
}
