//! Virtual time: [`run`] gives each node its turns and jumps from event to event.

use std::time::Duration;

use super::Wire;
use crate::time::Instant;

/// One end of the simulation: an engine with its link.
pub trait Node {
    /// One turn at `now`: receive what has arrived, act on timers, transmit. Returns whether anything was
    /// received or remains to be sent at once, so that another turn is due at the same time.
    fn turn(&mut self, now: Instant) -> bool;

    /// When the next turn is due without anything arriving.
    fn next_deadline(&self) -> Option<Instant>;
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// `done` said so, at this time.
    Done(Instant),
    /// Nothing is under way and no timer runs, but `done` never said so.
    Stalled(Instant),
    /// The time limit was reached.
    TimeLimit,
}

/// Turns that nodes may take without time moving on: more means that a timer or a queue spins.
const MOST_TURNS_AT_ONCE: usize = 100_000;

/// Runs the nodes over the wire until `done` (asked after each round of turns) or until `limit` has passed.
///
/// # Panics
/// When the nodes take turn after turn without time moving on.
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
            busy |= node.turn(now);
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
        assert!(turns < MOST_TURNS_AT_ONCE, "time stands still at {now:?}: a timer or a queue spins");
    }
}
