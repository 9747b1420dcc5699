//! Completion queues: a bounded ring that the engine fills and any thread polls without the engine's lock.

use std::{
    fmt,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU8, Ordering, fence},
    },
};

use crossbeam_queue::ArrayQueue;

use super::work::{WcStatus, WorkCompletion};

/// Receives notifications from the engine, under its lock: must return quickly and must not call the engine.
pub trait Notify: Send + Sync {
    /// Called when an event that the owner asked for has occurred.
    fn notify(&self);
}

/// A completion queue had no room for an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overflow;

const DISARMED: u8 = 0;
const SOLICITED: u8 = 1;
const ANY: u8 = 2;

fn ring(capacity: u32) -> ArrayQueue<WorkCompletion> {
    ArrayQueue::new(capacity.max(1) as usize)
}

/// The completions of one queue. Clones of its `Arc` are handles to the same queue.
pub struct CompletionRing {
    /// Write-locked only by [`Self::resize`]; the engine and polling threads share the read lock.
    entries: RwLock<ArrayQueue<WorkCompletion>>,
    armed: AtomicU8,
    overflowed: AtomicBool,
    notify: Option<Arc<dyn Notify>>,
}

impl fmt::Debug for CompletionRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionRing({} of {})", self.len(), self.capacity())
    }
}

impl CompletionRing {
    /// Creates a ring for `capacity` entries. `notify` is called for the next entry after each [`arm`](Self::arm).
    pub(crate) fn new(capacity: u32, notify: Option<Arc<dyn Notify>>) -> Self {
        Self {
            entries: RwLock::new(ring(capacity)),
            armed: AtomicU8::new(DISARMED),
            overflowed: AtomicBool::new(false),
            notify,
        }
    }

    fn entries(&self) -> RwLockReadGuard<'_, ArrayQueue<WorkCompletion>> {
        // No code panics while it holds the write lock.
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes and returns the oldest entry.
    pub fn pop(&self) -> Option<WorkCompletion> {
        self.entries().pop()
    }

    /// Moves up to `max` entries, oldest first, to the end of `out`; returns their number.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        self.poll_each(max, |entry| out.push(entry))
    }

    /// Removes up to `max` entries, oldest first, and calls `each` with each of them; returns their number.
    pub fn poll_each(&self, max: usize, mut each: impl FnMut(WorkCompletion)) -> usize {
        let entries = self.entries();
        let mut found = 0;
        while found < max
            && let Some(entry) = entries.pop()
        {
            each(entry);
            found += 1;
        }
        found
    }

    /// Number of entries in the queue.
    pub fn len(&self) -> usize {
        self.entries().len()
    }

    /// Whether the queue has no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of entries that the queue has room for.
    pub fn capacity(&self) -> usize {
        self.entries().capacity()
    }

    /// Whether an entry was lost because the queue was full. The queue then takes no more entries, and its queue
    /// pairs have failed.
    pub fn overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Acquire)
    }

    /// Requests one notification: for the next entry, or with `solicited_only` for the next entry that is solicited
    /// or an error. Entries that are already in the queue cause no notification, so poll again after arming. A call
    /// with `solicited_only` does not narrow an earlier request for any entry.
    pub fn arm(&self, solicited_only: bool) {
        self.armed.fetch_max(if solicited_only { SOLICITED } else { ANY }, Ordering::SeqCst);
        // Orders the arming before the caller's next poll; the fence in `push` is its counterpart.
        fence(Ordering::SeqCst);
    }

    /// Adds an entry. Returns whether the owner was notified. Returns an error once, for the first entry that finds
    /// no room.
    pub(crate) fn push(&self, entry: WorkCompletion) -> Result<bool, Overflow> {
        if self.overflowed() {
            return Ok(false);
        }
        if self.entries().push(entry).is_err() {
            self.overflowed.store(true, Ordering::Release);
            self.fire();
            return Err(Overflow);
        }
        fence(Ordering::SeqCst);
        let worth = if entry.solicited || entry.status != WcStatus::Success { SOLICITED } else { ANY };
        Ok(self.armed.load(Ordering::Relaxed) >= worth && self.fire())
    }

    /// Replaces the ring by one for `capacity` entries and moves the waiting entries to it. The error is the number
    /// of waiting entries when `capacity` is too small for them.
    pub(crate) fn resize(&self, capacity: u32) -> Result<(), usize> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let waiting = entries.len();
        if waiting > capacity as usize {
            return Err(waiting);
        }
        let resized = ring(capacity);
        while let Some(entry) = entries.pop() {
            // The new ring has room for all waiting entries, and no other thread has access to it yet.
            let _ = resized.push(entry);
        }
        *entries = resized;
        Ok(())
    }

    /// Notifies the owner if the queue is armed; returns whether it was.
    pub(crate) fn fire(&self) -> bool {
        let armed = self.armed.swap(DISARMED, Ordering::SeqCst) != DISARMED;
        if armed && let Some(notify) = &self.notify {
            notify.notify();
        }
        armed
    }
}
