//! [`CompletionChannel`]: the channel that wakes the owners of sleeping completion queues.

use std::{
    fmt, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::Arc,
};

use xwarp_rnic::rnic::CqId;

use super::progress::bell_queue::BellQueue;

/// A channel on which completion queues notify: a descriptor for `poll`, `epoll` or an async runtime, readable while a
/// notification waits. One channel may serve many queues of many devices.
///
/// These steps lose no wake-up, also with an edge-triggered poller (mio, tokio, `EPOLLET`):
///
/// 1. [`arm`](crate::CompletionQueue::arm) each queue.
/// 2. Poll each queue until it is empty.
/// 3. Wait until the descriptor is readable.
/// 4. Call [`poll`](Self::poll) until it returns `None`, and begin again with the queues that it returned. An
///    edge-triggered poller is not notified again for remaining notifications.
#[derive(Clone)]
pub struct CompletionChannel(Arc<BellQueue<CqNotification>>);

/// A notification of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CqNotification {
    /// The queue.
    pub cq: CqId,
    /// The queue's [`crate::CompletionQueueOptions::context`].
    pub context: u64,
}

impl CompletionChannel {
    /// A channel without queues.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(BellQueue::new()?)))
    }

    /// Calls `hook` after each notification that is queued, beside making the descriptor readable. For a caller that sleeps in another way than
    /// on the descriptor. `hook` runs while the device is locked and must not call verbs; of several hooks, the first one stays.
    pub fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.0.set_hook(hook);
    }

    pub(super) fn queue(&self) -> &Arc<BellQueue<CqNotification>> {
        &self.0
    }

    /// The oldest notification, without blocking.
    pub fn poll(&self) -> Option<CqNotification> {
        self.0.pop()
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CompletionChannel")
    }
}
