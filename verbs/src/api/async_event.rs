//! Asynchronous events (the verbs' term): changes of queues, connections and ports that no work request asked for.

use std::{
    fmt, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{Arc, Mutex, Weak},
};

use xwarp_rnic::rnic::AsyncEvent;

use super::progress::bell_queue::BellQueue;
use crate::system::lock;

/// Capacity of the queue for an application that does not read its events. Beyond it, the oldest event is dropped.
const MAX_EVENTS: usize = 1024;

/// The device's side of [`AsyncEvents`].
pub(crate) struct AsyncQueue {
    /// From the opening of the device on.
    first: Arc<BellQueue<AsyncEvent>>,
    further: Mutex<Vec<Reader>>,
}

/// A further reader, with a filter.
struct Reader {
    queue: Weak<BellQueue<AsyncEvent>>,
    wants: Box<dyn Fn(&AsyncEvent) -> bool + Send>,
}

impl AsyncQueue {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { first: Arc::new(BellQueue::new()?), further: Mutex::default() })
    }

    pub(super) fn push(&self, event: AsyncEvent) {
        tracing::debug!(?event, "asynchronous event");
        lock(&self.further).retain(|reader| {
            let Some(queue) = reader.queue.upgrade() else { return false };
            queue.push_if(MAX_EVENTS, || (reader.wants)(&event).then(|| event.clone()));
            true
        });
        if let Some(lost) = self.first.push(event, MAX_EVENTS) {
            tracing::debug!(?lost, "nobody reads the asynchronous events");
        }
    }

    pub(super) fn events(&self) -> AsyncEvents {
        AsyncEvents(Arc::clone(&self.first))
    }

    pub(super) fn subscribe(
        &self,
        wants: impl Fn(&AsyncEvent) -> bool + Send + 'static,
    ) -> io::Result<AsyncEvents> {
        let queue = Arc::new(BellQueue::new()?);
        lock(&self.further).push(Reader { queue: Arc::downgrade(&queue), wants: Box::new(wants) });
        Ok(AsyncEvents(queue))
    }
}

/// The asynchronous events of a device. The descriptor is readable while an event waits. Clones share the events: each
/// event is returned once.
///
/// When the descriptor becomes readable, call [`poll`](Self::poll) until it returns `None`: an edge-triggered poller
/// (mio, tokio) is not notified again for remaining events.
#[derive(Clone)]
pub struct AsyncEvents(Arc<BellQueue<AsyncEvent>>);

impl AsyncEvents {
    /// Calls `hook` after each event that is queued, beside making the descriptor readable. For a caller that sleeps in another way than
    /// on the descriptor. `hook` runs while the device is locked and must not call verbs; of several hooks, the first one stays.
    pub fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.0.set_hook(hook);
    }

    /// The oldest waiting event, without blocking.
    pub fn poll(&self) -> Option<AsyncEvent> {
        self.0.pop()
    }

    /// Discards the waiting events for which `which` returns true, for instance those of an object that is about to be destroyed.
    pub fn discard(&self, which: impl Fn(&AsyncEvent) -> bool) {
        self.0.remove_if(which);
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::system::wait_readable;

    #[test]
    fn the_descriptor_is_readable_while_an_entry_waits_that_nobody_attends() {
        let queue = BellQueue::new().unwrap();
        let readable = || wait_readable([queue.as_fd()], Some(Duration::ZERO)).unwrap();
        queue.push(1, 9);
        assert!(readable());
        assert_eq!((queue.pop(), readable(), queue.pop()), (Some(1), false, None));
        queue.attend();
        for entry in 2..5 {
            queue.push(entry, 9);
        }
        assert!(!readable(), "the thread that attends takes an entry");
        assert_eq!((queue.take(), readable()), (Some(2), true), "others may wait for the rest");
        assert_eq!((queue.take(), queue.take(), readable()), (Some(3), Some(4), false));
        queue.push(5, 9);
        assert_eq!((readable(), queue.remove_if(|_| true), readable()), (true, vec![5], false));
    }

    #[test]
    fn each_reader_gets_the_events_that_it_wants_from_its_beginning() {
        let queue = AsyncQueue::new().unwrap();
        queue.push(AsyncEvent::PortDown);
        let subscribe = || queue.subscribe(|event| *event == AsyncEvent::PortUp).unwrap();
        let [one, two] = [subscribe(), subscribe()];
        queue.push(AsyncEvent::PortUp);
        queue.push(AsyncEvent::DeviceFatal);
        for reader in [&one, &two] {
            assert_eq!((reader.poll(), reader.poll()), (Some(AsyncEvent::PortUp), None));
        }
        queue.push(AsyncEvent::PortUp);
        one.discard(|event| *event == AsyncEvent::PortUp);
        let readable = |reader: &AsyncEvents| wait_readable([reader.as_fd()], Some(Duration::ZERO)).unwrap();
        assert!(!readable(&one) && readable(&two));
        assert_eq!((one.poll(), two.poll()), (None, Some(AsyncEvent::PortUp)));
        let all: Vec<_> = std::iter::from_fn(|| queue.events().poll()).collect();
        let [down, up] = [AsyncEvent::PortDown, AsyncEvent::PortUp];
        assert_eq!(all, [down, up.clone(), AsyncEvent::DeviceFatal, up]);
        drop(two);
        queue.push(AsyncEvent::PortDown);
        assert_eq!(lock(&queue.further).len(), 1, "a reader that is gone is kept");
    }
}
