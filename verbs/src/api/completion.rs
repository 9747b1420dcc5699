//! Completion queues for applications, and the channels that wake sleeping ones.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, OnceLock},
    time::Duration,
};

use super::{
    async_event::BellQueue,
    device::{Device, destroyed},
};
use crate::rnic::{CompletionRing, CqId, Notify, ResourceError, WorkCompletion};

/// Where completion queues say that they have something: a descriptor for `poll`, `epoll` or an async
/// runtime, readable while a notification waits. One channel may serve many queues, of many devices.
///
/// The steps that lose no wake-up: [`CompletionQueue::arm`], poll until empty, then wait for the channel,
/// take the notification with [`poll`](Self::poll), and begin again.
#[derive(Clone)]
pub struct CompletionChannel(Arc<BellQueue<CqId>>);

/// Told by the engine, under its lock.
struct Notifier {
    channel: CompletionChannel,
    /// Set once the queue has its id; until then nothing completes.
    cq: OnceLock<CqId>,
}

impl Notify for Notifier {
    fn notify(&self) {
        if let Some(cq) = self.cq.get() {
            // Each queue has at most one notification per arming, so the applications bound this.
            self.channel.0.push(*cq, usize::MAX);
        }
    }
}

impl CompletionChannel {
    /// A channel without queues.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(BellQueue::new()?)))
    }

    /// The queue of the oldest notification, without waiting.
    pub fn poll(&self) -> Option<CqId> {
        self.0.pop()
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

/// A completion queue. Clones are handles to the same queue; it lives until the last handle, the last queue
/// pair and the last shared receive queue on it are gone.
#[derive(Clone)]
pub struct CompletionQueue(pub(super) Arc<CqInner>);

pub(super) struct CqInner {
    pub(super) device: Device,
    pub(super) id: CqId,
    ring: Arc<CompletionRing>,
    channel: Option<CompletionChannel>,
}

impl Drop for CqInner {
    fn drop(&mut self) {
        let freed = self.device.shared().with(|state, _| state.engine.destroy_cq(self.id));
        destroyed(freed, "queue pairs hold their completion queues");
        if let Some(channel) = &self.channel {
            channel.0.take(|cq| *cq == self.id);
        }
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionQueue").field(&self.0.id).field(&self.0.ring).finish()
    }
}

impl CompletionQueue {
    pub(super) fn create(
        device: &Device,
        capacity: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self, ResourceError> {
        let notifier =
            channel.map(|channel| Arc::new(Notifier { channel: channel.clone(), cq: OnceLock::new() }));
        let notify = notifier.clone().map(|n| n as Arc<dyn Notify>);
        let (id, ring) = device.shared().with(|state, _| state.engine.create_cq(capacity, notify))?;
        if let Some(notifier) = notifier {
            let _ = notifier.cq.set(id);
        }
        Ok(Self(Arc::new(CqInner { device: device.clone(), id, ring, channel: channel.cloned() })))
    }

    /// Its name in notifications and asynchronous events.
    pub fn id(&self) -> CqId {
        self.0.id
    }

    /// Entries that fit. One more than that kills the queue and its queue pairs.
    pub fn capacity(&self) -> usize {
        self.0.ring.capacity()
    }

    /// Moves up to `max` completions, oldest first, to the end of `out`; returns how many. When none waits
    /// it runs the engine once (see [`Progress`](super::Progress)) and looks again. Never blocks.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        let shared = self.0.device.shared();
        shared.note_poll();
        let found = self.0.ring.poll(out, max);
        if found > 0 {
            return found;
        }
        shared.try_progress();
        self.0.ring.poll(out, max)
    }

    /// The oldest completion. Otherwise as [`poll`](Self::poll).
    pub fn poll_one(&self) -> Option<WorkCompletion> {
        let shared = self.0.device.shared();
        shared.note_poll();
        if let Some(completion) = self.0.ring.pop() {
            return Some(completion);
        }
        shared.try_progress();
        self.0.ring.pop()
    }

    /// Waits for the oldest completion by polling, at most for `limit`. For applications that may
    /// burn a processor while they wait; others arm the queue and wait for its channel.
    pub fn spin(&self, limit: Duration) -> Option<WorkCompletion> {
        let shared = self.0.device.shared();
        let end = shared.clock.now() + limit;
        loop {
            if let Some(completion) = self.poll_one() {
                return Some(completion);
            }
            if shared.clock.now() >= end {
                return None;
            }
            std::hint::spin_loop();
        }
    }

    /// Asks for one notification on the channel: of the next completion, or (`solicited_only`) of the next
    /// that is solicited or an error. Completions that wait already are not notified: poll once more after
    /// arming, before you sleep.
    pub fn arm(&self, solicited_only: bool) {
        self.0.ring.arm(solicited_only);
        self.0.device.shared().application_sleeps();
    }

    /// Makes room for `capacity` entries. What waits stays; fails when it would not fit.
    pub fn resize(&self, capacity: u32) -> Result<(), ResourceError> {
        self.0.device.shared().with(|state, _| state.engine.resize_cq(self.0.id, capacity))
    }

    /// Whether it was too small for what completed. It takes nothing any more.
    pub fn overflowed(&self) -> bool {
        self.0.ring.overflowed()
    }

    /// Waits for the oldest completion without burning a processor, at most for `limit`. Needs a channel
    /// that no other queue uses.
    pub fn wait(&self, limit: Duration) -> io::Result<Option<WorkCompletion>> {
        let Some(channel) = &self.0.channel else {
            return Ok(self.spin(limit));
        };
        let shared = self.0.device.shared();
        let end = shared.clock.now() + limit;
        loop {
            self.arm(false);
            if let Some(completion) = self.poll_one() {
                return Ok(Some(completion));
            }
            let left = end.since(shared.clock.now());
            if left.is_zero() || !self.0.device.wait(channel, Some(left))? {
                return Ok(self.poll_one());
            }
            channel.poll();
        }
    }
}
