//! [`Sleeper`]: the progress thread's sleep as other threads see it. It decides who must ring the doorbell, so that the thread
//! never oversleeps:
//!
//! - a verb or a turn that creates an earlier deadline than the one for which the thread sleeps. Both compare under the engine's
//!   lock;
//! - a kick that has left frames, outside the lock. Either the kicking thread sees the sleep, or the sleeping thread sees the
//!   frames: each of them first announces its own part and then looks at the other's, with a fence in between.
//!
//! `verbs/tests/interleavings.rs` compiles this file with the atomics of a model checker and tries all orders.

use super::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// Value of `until` while the thread is awake.
const AWAKE: u64 = 0;
/// Value of `until` while the thread naps: the application runs the engine.
const NAPPING: u64 = 1;

/// See the module. Written by the progress thread, except `frames_left`.
pub(crate) struct Sleeper {
    /// [`AWAKE`], [`NAPPING`], or the time at which the sleeping thread wakes up, in nanoseconds of the device's clock.
    until: AtomicU64,
    /// A kick has left frames that must be kicked again.
    frames_left: AtomicBool,
}

impl Sleeper {
    /// A thread that is awake.
    pub(crate) fn new() -> Self {
        Self { until: AtomicU64::new(AWAKE), frames_left: AtomicBool::new(false) }
    }

    /// Whether the thread has seen that the application runs the engine, and naps.
    #[inline]
    pub(crate) fn naps(&self) -> bool {
        self.until.load(Ordering::Relaxed) == NAPPING
    }

    /// Whether the thread sleeps until a deadline.
    #[inline]
    pub(crate) fn sleeps(&self) -> bool {
        self.until.load(Ordering::Relaxed) > NAPPING
    }

    /// Whether the thread sleeps beyond `deadline` (in nanoseconds of the device's clock), so that the doorbell must be rung.
    /// Called under the engine's lock, after the deadline was set.
    pub(crate) fn oversleeps(&self, deadline: u64) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until > NAPPING && deadline < until
    }

    /// Notes that a kick has left frames. Returns whether the doorbell must be rung.
    #[must_use]
    pub(crate) fn leave_frames(&self) -> bool {
        self.frames_left.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.sleeps()
    }

    /// Whether a kick has left frames that nobody has [taken](Self::take_frames_left).
    pub(crate) fn frames_are_left(&self) -> bool {
        self.frames_left.load(Ordering::Relaxed)
    }

    /// Whether a kick has left frames since the last call. The caller runs the engine, which kicks them, after a short sleep.
    #[must_use]
    pub(crate) fn take_frames_left(&self) -> bool {
        self.frames_left.swap(false, Ordering::Relaxed)
    }

    /// The thread is about to nap.
    pub(crate) fn nap(&self) {
        self.until.store(NAPPING, Ordering::Relaxed);
    }

    /// The thread will sleep until the time `until`. Called under the engine's lock, with which the deadlines were read.
    pub(crate) fn announce(&self, until: u64) {
        self.until.store(until.max(NAPPING + 1), Ordering::Relaxed);
    }

    /// [`take_frames_left`](Self::take_frames_left), after [`announce`](Self::announce).
    #[must_use]
    pub(crate) fn take_frames_left_before_sleep(&self) -> bool {
        fence(Ordering::SeqCst);
        self.take_frames_left()
    }

    /// The thread has woken up.
    pub(crate) fn wake(&self) {
        self.until.store(AWAKE, Ordering::Relaxed);
    }
}
