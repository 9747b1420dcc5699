//! Completion queues: a bounded ring that the engine fills and any thread polls without the engine's lock.
//!
//! `verbs/tests/interleavings.rs` compiles this file with the locks of a model checker and tries all orders.

use std::{fmt, sync::Arc};

use smallvec::SmallVec;

use super::{
    QpId,
    slots::Slots,
    sync::{AtomicBool, AtomicUsize, Mutex, Ordering},
    table::Id,
    work::{Opcode, WcStatus, WorkCompletion},
};

/// Receives notifications from the engine, under its lock: must return quickly and must not call the engine.
pub trait Notify: Send + Sync {
    /// Called when the event that the owner requested has occurred.
    fn notify(&self);
}

/// A completion queue had no room for an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overflow {
    /// No entry was lost before.
    pub(crate) first: bool,
    /// The lost entry reported flushed work, so its queue pair has ended already.
    pub(crate) flushed: bool,
}

/// Entries that [`CompletionRing::poll_each`] takes at a time.
const BATCH: usize = 8;

/// The request of the owner for a notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Armed {
    No,
    /// Notify for the next entry that is solicited or an error.
    Solicited,
    /// For the next entry.
    Any,
}

/// The part of a ring that its lock protects.
struct Ring {
    slots: Slots<WorkCompletion>,
    /// Position of the oldest entry.
    head: u64,
    /// Entries that the ring has room for. The memory for them is allocated with the ring.
    capacity: usize,
    armed: Armed,
    /// See [`CompletionRing::attend`].
    attended: bool,
}

/// What a slot holds before its first entry.
fn unused() -> WorkCompletion {
    WorkCompletion {
        wr_id: 0,
        status: WcStatus::Success,
        opcode: Opcode::Send,
        qp: QpId::from_raw(0),
        context: 0,
        byte_len: 0,
        invalidated: None,
        immediate: None,
        solicited: false,
        overtook: false,
    }
}

impl Ring {
    /// Removes and returns the oldest of `len` entries.
    #[inline]
    fn pop(&mut self, len: &AtomicUsize) -> Option<WorkCompletion> {
        let left = len.load(Ordering::Relaxed).checked_sub(1)?;
        let position = self.head;
        self.head += 1;
        len.store(left, Ordering::Release);
        self.slots.get(position).copied()
    }

    /// Removes the request for a notification; returns whether there was one.
    fn disarm(&mut self) -> bool {
        std::mem::replace(&mut self.armed, Armed::No) != Armed::No
    }
}

/// The completions of one queue. Clones of its `Arc` are handles to the same queue.
///
/// The ring has a lock of its own, which is held only while entries are moved: one acquisition for each entry that
/// the engine adds, and one for each poll that finds entries. A poll of an empty ring does not acquire it.
pub struct CompletionRing {
    ring: Mutex<Ring>,
    /// Number of entries, written under the lock.
    len: AtomicUsize,
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
        let capacity = capacity.max(1);
        Self {
            ring: Mutex::new(Ring {
                slots: Slots::allocated(capacity),
                head: 0,
                capacity: capacity as usize,
                armed: Armed::No,
                attended: false,
            }),
            len: AtomicUsize::new(0),
            overflowed: AtomicBool::new(false),
            notify,
        }
    }

    /// Removes and returns the oldest entry.
    #[inline]
    pub fn pop(&self) -> Option<WorkCompletion> {
        if self.is_empty() {
            return None;
        }
        self.ring.lock().pop(&self.len)
    }

    /// Moves up to `max` entries, oldest first, to the end of `out`; returns their number.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        self.take(out, max)
    }

    /// Removes up to `max` entries, oldest first, and calls `each` with each of them; returns their number. `each` is
    /// called without the ring's lock, so that it may post work.
    pub fn poll_each(&self, max: usize, mut each: impl FnMut(WorkCompletion)) -> usize {
        let mut found = 0;
        while found < max && !self.is_empty() {
            let mut batch = SmallVec::<[WorkCompletion; BATCH]>::new();
            let taken = self.take(&mut batch, BATCH.min(max - found));
            batch.drain(..).for_each(&mut each);
            found += taken;
            if taken < BATCH {
                break;
            }
        }
        found
    }

    /// Moves up to `max` entries, oldest first, to the end of `out`; returns their number.
    #[inline]
    fn take(&self, out: &mut impl Extend<WorkCompletion>, max: usize) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut ring = self.ring.lock();
        let before = self.len();
        out.extend(std::iter::from_fn(|| ring.pop(&self.len)).take(max));
        before - self.len()
    }

    /// Number of entries in the queue.
    #[inline]
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Whether the queue has no entry.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of entries that the queue has room for.
    pub fn capacity(&self) -> usize {
        self.ring.lock().capacity
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
        let wanted = if solicited_only { Armed::Solicited } else { Armed::Any };
        let mut ring = self.ring.lock();
        ring.armed = ring.armed.max(wanted);
    }

    /// Polls by `poll`, which may run the engine, for the owner of an armed queue: the entries that it brings notify nobody, and
    /// the queue stays armed. Returns the number of entries that were moved to `out`, at most `max`.
    pub fn poll_attended(
        &self,
        out: &mut Vec<WorkCompletion>,
        max: usize,
        poll: impl FnOnce(&mut Vec<WorkCompletion>) -> usize,
    ) -> usize {
        self.attend(true);
        let found = poll(out);
        self.attend(false);
        // Others may have come meanwhile, from other threads.
        found + self.poll(out, max.saturating_sub(found))
    }

    /// Records whether the owner runs the engine itself and will poll afterwards: entries then notify nobody, and an
    /// armed queue stays armed.
    pub fn attend(&self, attends: bool) {
        self.ring.lock().attended = attends;
    }

    /// Adds an entry. Returns whether the owner was notified, or attends to an armed queue. After the first entry that
    /// finds no room, no entry is added.
    #[expect(clippy::inline_always, reason = "the entry is built in its slot, not moved there")]
    #[inline(always)]
    pub(crate) fn push(&self, entry: WorkCompletion) -> Result<bool, Overflow> {
        let worth =
            if entry.solicited || entry.status != WcStatus::Success { Armed::Solicited } else { Armed::Any };
        let mut guard = self.ring.lock();
        let (ring, len) = (&mut *guard, self.len());
        let slot = if len >= ring.capacity || self.overflowed() {
            None
        } else {
            ring.slots.claim(ring.head + len as u64, unused)
        };
        let Some(slot) = slot else {
            drop(guard);
            return Err(self.lose(entry.status));
        };
        *slot = entry;
        self.len.store(len + 1, Ordering::Release);
        let notifies = ring.armed >= worth;
        drop(guard);
        Ok(notifies && self.fire())
    }

    /// Loses an entry, for which the ring has no room.
    #[cold]
    fn lose(&self, status: WcStatus) -> Overflow {
        let first = !self.overflowed.swap(true, Ordering::AcqRel);
        if first {
            self.fire();
        }
        Overflow { first, flushed: status == WcStatus::Flushed }
    }

    /// Changes the number of entries that the ring has room for. The error is the number of waiting entries when
    /// `capacity` is too small for them.
    pub(crate) fn resize(&self, capacity: u32) -> Result<(), usize> {
        let mut ring = self.ring.lock();
        let waiting = self.len();
        if waiting > capacity as usize {
            return Err(waiting);
        }
        let held = (ring.head..).take(waiting);
        ring.slots.resize(capacity, held, unused);
        ring.capacity = capacity as usize;
        Ok(())
    }

    /// Notifies the owner if the queue is armed, unless the owner attends to it; returns whether it was armed.
    #[cold]
    pub(crate) fn fire(&self) -> bool {
        let mut ring = self.ring.lock();
        if ring.attended {
            return ring.armed != Armed::No;
        }
        let armed = ring.disarm();
        drop(ring);
        if armed && let Some(notify) = &self.notify {
            notify.notify();
        }
        armed
    }
}
