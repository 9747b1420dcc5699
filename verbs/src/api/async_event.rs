//! Asynchronous events (the verbs' term): changes of queues, connections and ports that no work request asked for.

use std::{
    collections::VecDeque,
    fmt, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{Arc, Mutex},
};

use xwarp_rnic::rnic::AsyncEvent;

use crate::system::{Doorbell, lock};

/// Events kept for an application that does not read them. When there are more, the oldest one is dropped.
const MOST_EVENTS: usize = 1024;

/// A queue of events behind a descriptor that is readable exactly while the queue has an entry, and that signals each
/// entry: an edge-triggered poller gets an edge for an entry that is added while others wait.
pub(super) struct BellQueue<T> {
    entries: Mutex<VecDeque<T>>,
    bell: Doorbell,
}

impl<T> BellQueue<T> {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { entries: Mutex::default(), bell: Doorbell::new()? })
    }

    /// Adds an entry and signals it; returns the oldest entry when there are more than `most`.
    pub(super) fn push(&self, entry: T, most: usize) -> Option<T> {
        let mut entries = lock(&self.entries);
        entries.push_back(entry);
        // Rings even when earlier events wait: under EPOLLET only a write to the descriptor is an edge.
        self.bell.ring();
        if entries.len() > most { entries.pop_front() } else { None }
    }

    pub(super) fn pop(&self) -> Option<T> {
        let mut entries = lock(&self.entries);
        let entry = entries.pop_front();
        if entries.is_empty() {
            self.bell.clear();
        }
        entry
    }

    /// Removes and returns the entries for which `which` is true, in order.
    pub(super) fn remove_if(&self, mut which: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut entries = lock(&self.entries);
        let mut taken = Vec::new();
        for entry in std::mem::take(&mut *entries) {
            if which(&entry) { taken.push(entry) } else { entries.push_back(entry) }
        }
        if entries.is_empty() {
            self.bell.clear();
        }
        taken
    }
}

impl<T> AsFd for BellQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// The device's side of [`AsyncEvents`].
pub(crate) struct AsyncQueue(Arc<BellQueue<AsyncEvent>>);

impl AsyncQueue {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(BellQueue::new()?)))
    }

    pub(super) fn push(&self, event: AsyncEvent) {
        tracing::debug!(?event, "asynchronous event");
        if let Some(lost) = self.0.push(event, MOST_EVENTS) {
            tracing::warn!(?lost, "nobody reads the asynchronous events");
        }
    }

    pub(super) fn events(&self) -> AsyncEvents {
        AsyncEvents(Arc::clone(&self.0))
    }
}

/// The asynchronous events of a device. The descriptor is readable while an event waits. Clones share the events: each
/// event is returned once.
///
/// When the descriptor becomes readable, call [`poll`](Self::poll) until it returns `None`: an edge-triggered poller
/// (mio, tokio) is not notified again for events that were left.
#[derive(Clone)]
pub struct AsyncEvents(Arc<BellQueue<AsyncEvent>>);

impl AsyncEvents {
    /// The oldest event that waits, without blocking.
    pub fn poll(&self) -> Option<AsyncEvent> {
        self.0.pop()
    }
}

impl AsRawFd for AsyncEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl fmt::Debug for AsyncEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AsyncEvents")
    }
}
