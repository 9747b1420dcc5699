//! [`CallCounters`]: counts of the application's calls, which the progress thread observes. They stand on the path of each post
//! and poll, so that they are counted without a bus lock: a count that two threads lose does not matter.
//!
//! `verbs/tests/interleavings.rs` compiles this file with the atomics of a model checker and tries all orders.

use super::{
    policy::{BUSY_POLLS, Calls},
    sync::{AtomicBool, AtomicU64, Ordering},
};

/// See the module.
pub(crate) struct CallCounters {
    polls: AtomicU64,
    posts: AtomicU64,
    chunks: AtomicU64,
    kicking: AtomicBool,
    leads: AtomicU64,
    sleeps: AtomicU64,
}

fn count(counter: &AtomicU64, many: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(many), Ordering::Relaxed);
}

impl CallCounters {
    /// No calls.
    pub(crate) fn new() -> Self {
        let [polls, posts, chunks, leads, sleeps] = std::array::from_fn(|_| AtomicU64::new(0));
        Self { polls, posts, chunks, kicking: AtomicBool::new(false), leads, sleeps }
    }

    /// Counts a poll.
    #[inline]
    pub(crate) fn poll(&self) {
        count(&self.polls, 1);
    }

    /// Counts a post.
    #[inline]
    pub(crate) fn post(&self) {
        count(&self.posts, 1);
    }

    /// Calls `kick`, which returns for how many chunks it has kicked, and counts them.
    #[inline]
    pub(crate) fn kick(&self, kick: impl FnOnce() -> u64) {
        self.kicking.store(true, Ordering::Relaxed);
        let chunks = kick();
        self.kicking.store(false, Ordering::Relaxed);
        if chunks > 0 {
            count(&self.chunks, chunks);
        }
    }

    /// Counts a run of the engine by a leader.
    pub(crate) fn lead(&self) {
        self.leads.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a sleep by polls.
    pub(crate) fn sleep(&self) {
        self.sleeps.fetch_add(1, Ordering::Relaxed);
    }

    /// The application is about to sleep and must be woken: it no longer counts as polling. Returns whether it did, so that the
    /// doorbell must end the thread's nap.
    #[must_use]
    pub(crate) fn arm(&self) -> bool {
        self.polls.swap(0, Ordering::Relaxed) >= BUSY_POLLS
    }

    /// Whether the application has polled so often since it last armed a queue that it may count as polling.
    #[inline]
    pub(crate) fn are_busy(&self) -> bool {
        self.polls.load(Ordering::Relaxed) >= BUSY_POLLS
    }

    /// The calls so far.
    pub(super) fn so_far(&self) -> Calls {
        let [polls, posts, chunks, leads, sleeps] =
            [&self.polls, &self.posts, &self.chunks, &self.leads, &self.sleeps]
                .map(|counter| counter.load(Ordering::Relaxed));
        Calls { polls, posts, chunks, kicking: self.kicking.load(Ordering::Relaxed), leads, sleeps }
    }
}
