//! Completion queues: a bounded ring that the engine fills and anybody polls without the engine's lock.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, Ordering, fence},
    },
};

use crossbeam_queue::ArrayQueue;

use super::work::{WcStatus, WorkCompletion};

/// Told when something happened that its owner asked to be told of; must be quick, and must not call back.
pub trait Notify: Send + Sync {
    /// Something happened.
    fn notify(&self);
}

/// A completion queue had no room for an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overflow;

const DISARMED: u8 = 0;
const SOLICITED: u8 = 1;
const ANY: u8 = 2;

/// A ring, and the larger or smaller one that took its place when the queue was resized.
struct Ring {
    entries: ArrayQueue<WorkCompletion>,
    /// Once set, nothing is pushed to `entries` any more.
    next: OnceLock<Box<Ring>>,
}

impl Ring {
    fn new(capacity: u32) -> Self {
        Self { entries: ArrayQueue::new(capacity.max(1) as usize), next: OnceLock::new() }
    }

    fn last(&self) -> &Self {
        let mut ring = self;
        while let Some(next) = ring.next.get() {
            ring = next;
        }
        ring
    }
}

/// The completions of one queue. Clones of the `Arc` around it are handles to the same queue.
pub struct CompletionRing {
    first: Ring,
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
    /// A ring for `capacity` entries; `notify` is told of the next entry after each [`arm`](Self::arm).
    pub(crate) fn new(capacity: u32, notify: Option<Arc<dyn Notify>>) -> Self {
        Self {
            first: Ring::new(capacity),
            armed: AtomicU8::new(DISARMED),
            overflowed: AtomicBool::new(false),
            notify,
        }
    }

    /// Takes the oldest entry.
    pub fn pop(&self) -> Option<WorkCompletion> {
        let mut ring = &self.first;
        loop {
            if let Some(entry) = ring.entries.pop() {
                return Some(entry);
            }
            let next = ring.next.get()?;
            // Entries that were pushed between the look and the successor's birth come before its own.
            if let Some(entry) = ring.entries.pop() {
                return Some(entry);
            }
            ring = next;
        }
    }

    /// Moves up to `max` entries, oldest first, to the end of `out`; returns how many.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        let before = out.len();
        out.extend(std::iter::from_fn(|| self.pop()).take(max));
        out.len() - before
    }

    /// Entries waiting.
    pub fn len(&self) -> usize {
        let (mut ring, mut len) = (&self.first, self.first.entries.len());
        while let Some(next) = ring.next.get() {
            ring = next;
            len += ring.entries.len();
        }
        len
    }

    /// Whether no entry is waiting.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries that fit.
    pub fn capacity(&self) -> usize {
        self.first.last().entries.capacity()
    }

    /// Whether an entry was lost because the queue was full: the queue is dead, and so are its queue pairs.
    pub fn overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Acquire)
    }

    /// Asks for one notification: of the next entry, or of the next that is solicited or an error. What
    /// came before is not notified: poll once more after arming. A wish for any entry is not weakened by a
    /// later one for solicited entries only.
    pub fn arm(&self, solicited_only: bool) {
        self.armed.fetch_max(if solicited_only { SOLICITED } else { ANY }, Ordering::SeqCst);
        // Orders the arming before the caller's next poll; the fence in `push` is its counterpart.
        fence(Ordering::SeqCst);
    }

    /// Adds an entry. Never blocks. Whether somebody was notified; an error, once, when there was no room.
    pub(crate) fn push(&self, entry: WorkCompletion) -> Result<bool, Overflow> {
        if self.overflowed() {
            return Ok(false);
        }
        if self.first.last().entries.push(entry).is_err() {
            self.overflowed.store(true, Ordering::Release);
            self.fire();
            return Err(Overflow);
        }
        fence(Ordering::SeqCst);
        let worth = if entry.solicited || entry.status != WcStatus::Success { SOLICITED } else { ANY };
        Ok(self.armed.load(Ordering::Relaxed) >= worth && self.fire())
    }

    /// Replaces the ring by one for `capacity` entries; what waits stays and is polled first.
    pub(crate) fn resize(&self, capacity: u32) -> Result<(), usize> {
        let waiting = self.len();
        if waiting > capacity as usize {
            return Err(waiting);
        }
        // Only the engine's owner pushes and resizes, one at a time, so the cell is empty.
        let _ = self.first.last().next.set(Box::new(Ring::new(capacity)));
        Ok(())
    }

    /// Notifies whoever armed the queue; whether anybody had.
    fn fire(&self) -> bool {
        let armed = self.armed.swap(DISARMED, Ordering::SeqCst) != DISARMED;
        if armed && let Some(notify) = &self.notify {
            notify.notify();
        }
        armed
    }
}
