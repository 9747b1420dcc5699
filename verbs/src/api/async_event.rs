//! Asynchronous events (the verbs' word): what happens to queues without a work request asking for it.

use std::{
    collections::VecDeque,
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, PoisonError},
};

use crate::{rnic::AsyncEvent, system::Doorbell};

/// Events kept for an application that does not read them; the oldest go first.
const MOST_EVENTS: usize = 1024;

/// A queue of events behind a descriptor that is readable exactly while something is in it.
pub(super) struct BellQueue<T> {
    entries: Mutex<VecDeque<T>>,
    bell: Doorbell,
}

impl<T> BellQueue<T> {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { entries: Mutex::default(), bell: Doorbell::new()? })
    }

    /// Adds an entry; returns the oldest one when there are more than `most`.
    pub(super) fn push(&self, entry: T, most: usize) -> Option<T> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.is_empty() {
            self.bell.ring();
        }
        entries.push_back(entry);
        if entries.len() > most { entries.pop_front() } else { None }
    }

    pub(super) fn pop(&self) -> Option<T> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.pop_front();
        if entries.is_empty() {
            self.bell.clear();
        }
        entry
    }

    /// Takes out all that `which` says, in order.
    pub(super) fn take(&self, mut which: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
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

/// The asynchronous events of a device. Its descriptor is readable while one waits. Clones share the
/// events: each is given out once.
#[derive(Clone)]
pub struct AsyncEvents(Arc<BellQueue<AsyncEvent>>);

impl AsyncEvents {
    /// The oldest event that waits.
    pub fn poll(&self) -> Option<AsyncEvent> {
        self.0.pop()
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
