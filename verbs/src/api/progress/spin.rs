//! Rests of threads that poll in vain on a busy processor (`docs/decisions/0005-*`).
//!
//! A thread that polls empty queues needs its processor for nothing, but the scheduler cannot know that: the thread uses up its time
//! slice, and whoever waits for the processor, often the peer that has the work, waits for all of it. [`SpinPolicy`] decides when such
//! a thread sleeps instead, and `spin` keeps one per thread, because threads wait for processors, not queues.

use std::{cell::Cell, time::Duration};

use xwarp_tcp::time::Instant;

use super::policy::SpinPolicy;
use crate::system::waited_for_processor;

/// Empty polls between two looks at the clock.
const LOOK_EVERY: u32 = 16;

thread_local! {
    /// Empty polls of this thread since one found something.
    static EMPTY_POLLS: Cell<u32> = const { Cell::new(0) };
    static POLICY: Cell<SpinPolicy> = const { Cell::new(SpinPolicy::new()) };
}

/// The calling thread's poll has found a completion or received a frame.
#[inline]
pub(crate) fn found() {
    EMPTY_POLLS.set(0);
}

/// The calling thread's poll has found nothing. Returns the longest time for which it should sleep on the interface's descriptors, if
/// others need its processor.
#[inline]
pub(crate) fn empty(now: impl FnOnce() -> Instant) -> Option<Duration> {
    let empty = EMPTY_POLLS.get().wrapping_add(1);
    EMPTY_POLLS.set(empty);
    if empty.is_multiple_of(LOOK_EVERY) { look(now(), empty == LOOK_EVERY) } else { None }
}

/// [`empty`], at the first poll of a series or a later one.
#[inline(never)]
fn look(now: Instant, first: bool) -> Option<Duration> {
    let mut policy = POLICY.get();
    let rest = policy.observe(now, first, waited_for_processor);
    POLICY.set(policy);
    rest
}

/// The calling thread has slept.
pub(crate) fn rested(now: Instant) {
    let mut policy = POLICY.get();
    policy.rested(now);
    POLICY.set(policy);
}
