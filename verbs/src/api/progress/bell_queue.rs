//! [`BellQueue`]: a queue behind a descriptor, for events and notifications.
//!
//! `verbs/tests/interleavings.rs` compiles this file with the locks of a model checker and tries all orders.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
};

use super::sync::{Doorbell, Mutex, lock};

/// A queue of events behind a descriptor that is readable exactly while the queue has an entry, and that signals each
/// entry: an edge-triggered poller gets an edge for an entry that is added while others wait.
pub(crate) struct BellQueue<T> {
    entries: Mutex<Entries<T>>,
    bell: Doorbell,
}

struct Entries<T> {
    waiting: VecDeque<T>,
    /// A thread will [take](BellQueue::take) what is added: the descriptor need not be readable for it.
    attended: bool,
    /// The descriptor is readable.
    rung: bool,
}

impl<T> BellQueue<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let entries = Entries { waiting: VecDeque::new(), attended: false, rung: false };
        Ok(Self { entries: Mutex::new(entries), bell: Doorbell::new()? })
    }

    /// Adds an entry and signals it; returns the oldest entry when there are more than `most`.
    pub(crate) fn push(&self, entry: T, most: usize) -> Option<T> {
        self.push_if(most, || Some(entry))
    }

    /// Adds the entry that `make` returns, like [`push`](Self::push). `make` is called while the queue is locked: after what it
    /// decides by has changed, [`remove_if`](Self::remove_if) finds all entries of before.
    pub(crate) fn push_if(&self, most: usize, make: impl FnOnce() -> Option<T>) -> Option<T> {
        let mut entries = lock(&self.entries);
        entries.waiting.push_back(make()?);
        if !entries.attended {
            // Rings even when earlier events wait: under EPOLLET only a write to the descriptor is an edge.
            self.bell.ring();
            entries.rung = true;
        }
        if entries.waiting.len() > most { entries.waiting.pop_front() } else { None }
    }

    pub(crate) fn pop(&self) -> Option<T> {
        let mut entries = lock(&self.entries);
        let entry = entries.waiting.pop_front();
        self.fit(&mut entries);
        entry
    }

    /// The calling thread runs an engine that may add entries, and takes one of them afterwards.
    pub(crate) fn attend(&self) {
        lock(&self.entries).attended = true;
    }

    /// Ends [`Self::attend`] and returns the oldest entry. Others wait as if they were added now.
    pub(crate) fn take(&self) -> Option<T> {
        let mut entries = lock(&self.entries);
        entries.attended = false;
        let entry = entries.waiting.pop_front();
        if !entries.waiting.is_empty() && !entries.rung {
            self.bell.ring();
            entries.rung = true;
        }
        self.fit(&mut entries);
        entry
    }

    /// Removes and returns the entries for which `which` is true, in order.
    pub(crate) fn remove_if(&self, mut which: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut entries = lock(&self.entries);
        let mut taken = Vec::new();
        for entry in std::mem::take(&mut entries.waiting) {
            if which(&entry) { taken.push(entry) } else { entries.waiting.push_back(entry) }
        }
        self.fit(&mut entries);
        taken
    }

    pub(crate) fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.bell.set_hook(hook);
    }

    /// Readable while an entry waits that nobody attends.
    pub(crate) fn bell(&self) -> &Doorbell {
        &self.bell
    }

    /// Makes the descriptor of an empty queue unreadable.
    fn fit(&self, entries: &mut Entries<T>) {
        if entries.waiting.is_empty() && std::mem::take(&mut entries.rung) {
            self.bell.clear();
        }
    }
}

impl<T> AsFd for BellQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell().as_fd()
    }
}
