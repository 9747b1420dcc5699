//! Completion queues for applications.

use std::{
    fmt, io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use xwarp_rnic::rnic::{CompletionRing, CqId, Notify, ResourceError, WorkCompletion};

use super::{
    channel::{CompletionChannel, CqNotification},
    failure::destroyed,
    handle::Device,
    progress::{lead::Slept, spin},
    shared::SharedEngine,
};

/// Size and notification of a completion queue.
#[derive(Debug, Clone)]
pub struct CompletionQueueOptions {
    /// Entries that fit.
    pub capacity: u32,
    /// Channel for notifications; `None`: the queue is polled, or sleeps in [`wait`](CompletionQueue::wait) only.
    pub channel: Option<CompletionChannel>,
    /// A number of the application's, returned in each notification (an index or a handle).
    pub context: u64,
}

impl Default for CompletionQueueOptions {
    fn default() -> Self {
        Self { capacity: 256, channel: None, context: 0 }
    }
}

/// The engine's side of a channel, called under the engine's lock.
struct Notifier {
    /// Set later for a queue without a channel whose owner [waits](CompletionQueue::wait).
    channel: OnceLock<CompletionChannel>,
    context: u64,
    /// Set once the queue has its id; until then nothing completes.
    cq: OnceLock<CqId>,
}

impl Notify for Notifier {
    fn notify(&self) {
        if let (Some(cq), Some(channel)) = (self.cq.get(), self.channel.get()) {
            // Each queue has at most one notification per arming, which bounds the list.
            channel.queue().push(CqNotification { cq: *cq, context: self.context }, usize::MAX);
        }
    }
}

/// A completion queue. Clones are handles to the same queue, which lives as long as a handle or a queue pair on it.
#[derive(Clone)]
pub struct CompletionQueue(pub(super) Arc<CqInner>);

pub(super) struct CqInner {
    pub(super) device: Device,
    pub(super) id: CqId,
    ring: Arc<CompletionRing>,
    notifier: Arc<Notifier>,
    /// Threads in [`wait`](CompletionQueue::wait).
    waiters: AtomicU32,
    /// Queue pairs that complete here, by their engine: each for its send queue and for its receives. Empty for a device with one
    /// engine.
    users: Box<[AtomicU32]>,
}

impl CqInner {
    /// Calls `f` with the engines that may add completions. A queue without queue pairs stands for all engines.
    #[inline]
    fn each_engine(&self, mut f: impl FnMut(&SharedEngine)) {
        let engines = self.device.engines();
        if !engines.are_several() {
            return f(engines.first());
        }
        let mut used = false;
        for (engine, _) in self.used() {
            used = true;
            f(engines.get(engine));
        }
        if !used {
            engines.all().iter().for_each(|engine| f(engine));
        }
    }

    /// The engines, of several, that have queue pairs which complete here.
    fn used(&self) -> impl Iterator<Item = (u16, u32)> {
        let users = (0..).zip(&self.users).map(|(engine, users)| (engine, users.load(Ordering::Relaxed)));
        users.filter(|(_, users)| *users > 0)
    }

    /// The engine that alone adds completions, if it is known.
    fn only_engine(&self) -> Option<u16> {
        if !self.device.engines().are_several() {
            return Some(0);
        }
        let mut used = self.used();
        let first = used.next();
        first.filter(|_| used.next().is_none()).map(|(engine, _)| engine)
    }

    /// See [`Rest`]. An application that arms its queue again and again sleeps by itself, and frames are no sign for one whose polls do
    /// not run the engine: the progress thread would take it for one that runs it, and nap.
    #[cold]
    fn rest(&self, limit: Duration) {
        let mut polls = true;
        self.each_engine(|engine| polls &= engine.application_progress() && engine.calls().are_busy());
        if polls {
            self.device.rest(self.only_engine(), limit);
            spin::rested(self.device.shared().clock().now());
        }
    }

    /// The queue's channel, which is made now if it has none.
    fn channel(&self) -> io::Result<&CompletionChannel> {
        if let Some(channel) = self.notifier.channel.get() {
            return Ok(channel);
        }
        let channel = CompletionChannel::new()?;
        Ok(self.notifier.channel.get_or_init(|| channel))
    }

    fn discard_notifications(&self) {
        if let Some(channel) = self.notifier.channel.get() {
            channel.queue().remove_if(|notification| notification.cq == self.id);
        }
    }

    /// Counts a queue pair of `engine` that completes here.
    pub(super) fn add_user(&self, engine: u16) {
        if let Some(users) = self.users.get(usize::from(engine)) {
            users.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a queue pair of `engine` that does not complete here any more.
    pub(super) fn remove_user(&self, engine: u16) {
        if let Some(users) = self.users.get(usize::from(engine)) {
            users.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A thread that waits for a completion, until this is dropped.
struct Waiter<'q>(&'q CqInner);

impl<'q> Waiter<'q> {
    fn of(queue: &'q CqInner) -> Self {
        queue.waiters.fetch_add(1, Ordering::Relaxed);
        Self(queue)
    }
}

impl Drop for Waiter<'_> {
    /// The notification that this thread has taken was perhaps for another one that waits: that one polls and arms again.
    fn drop(&mut self) {
        let queue = self.0;
        if queue.waiters.fetch_sub(1, Ordering::Relaxed) > 1 {
            queue.ring.arm(false);
            if !queue.ring.is_empty() {
                queue.notifier.notify();
            }
        }
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        let freed = self.device.shared().registry(|registry| registry.destroy_cq(self.id));
        destroyed(freed, "queue pairs hold their completion queues");
        self.discard_notifications();
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionQueue").field(&self.0.id).field(&self.0.ring).finish()
    }
}

/// The sleep of a thread that polls a queue in vain while others need its processor.
#[derive(Debug)]
#[must_use = "a thread that polls on keeps the processor"]
pub struct Rest {
    queue: CompletionQueue,
    limit: Duration,
}

impl Rest {
    /// Sleeps until a frame arrives, at most 3 ms.
    pub fn sleep(self) {
        self.queue.0.rest(self.limit);
    }
}

impl CompletionQueue {
    pub(super) fn create(device: &Device, options: CompletionQueueOptions) -> Result<Self, ResourceError> {
        let CompletionQueueOptions { capacity, channel, context } = options;
        let channel = channel.map_or_else(OnceLock::new, OnceLock::from);
        let notifier = Arc::new(Notifier { channel, context, cq: OnceLock::new() });
        let notify = Arc::clone(&notifier) as Arc<dyn Notify>;
        let (id, ring) = device.shared().registry(|registry| registry.create_cq(capacity, Some(notify)))?;
        let _ = notifier.cq.set(id);
        let engines = device.engines();
        let users = if engines.are_several() { engines.all().len() } else { 0 };
        let users = (0..users).map(|_| AtomicU32::new(0)).collect();
        Ok(Self(Arc::new(CqInner {
            device: device.clone(),
            id,
            ring,
            notifier,
            waiters: AtomicU32::new(0),
            users,
        })))
    }

    /// The queue's identifier in notifications and asynchronous events.
    pub fn id(&self) -> CqId {
        self.0.id
    }

    /// Capacity in entries. A further entry overflows the queue, which ends it and its queue pairs.
    pub fn capacity(&self) -> usize {
        self.0.ring.capacity()
    }

    /// Appends up to `max` completions to `out`, oldest first, and returns their number. When no completion waits, runs
    /// the engine once (see [`Progress`](super::Progress)) and looks again: of several engines, each that has queue pairs which
    /// complete here and that no other thread runs. Does not block, except for at most 3 ms when it has found nothing again and again and
    /// others wait for the caller's processor; a frame ends this rest.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        self.look(|ring| some(ring.poll(out, max))).unwrap_or(0)
    }

    /// Calls `each` with up to `max` completions, oldest first, and returns their number; otherwise like
    /// [`poll`](Self::poll). Avoids a list when the caller stores completions elsewhere.
    pub fn poll_each(&self, max: usize, mut each: impl FnMut(WorkCompletion)) -> usize {
        self.look(|ring| some(ring.poll_each(max, &mut each))).unwrap_or(0)
    }

    /// Polls like [`poll`](Self::poll) without blocking, for a caller that holds a lock. When others wait for its processor, it also
    /// returns the [`Rest`] for the time after the lock.
    pub fn poll_awake(&self, out: &mut Vec<WorkCompletion>, max: usize) -> (usize, Option<Rest>) {
        let (found, limit) = self.look_counted(|ring| some(ring.poll(out, max)));
        (found.unwrap_or(0), limit.map(|limit| Rest { queue: self.clone(), limit }))
    }

    /// A poll that takes completions by `take`, which returns `None` when there is none; a caller that polls again and again in vain
    /// may [rest](CqInner::rest).
    #[inline]
    fn look<R>(&self, take: impl FnMut(&CompletionRing) -> Option<R>) -> Option<R> {
        let (found, limit) = self.look_counted(take);
        if let Some(limit) = limit {
            self.0.rest(limit);
        }
        found
    }

    /// [`Self::look`] without its rest, of which the longest time is returned.
    #[inline]
    fn look_counted<R>(
        &self,
        take: impl FnMut(&CompletionRing) -> Option<R>,
    ) -> (Option<R>, Option<Duration>) {
        let (found, received) = self.look_awake(take);
        if received || found.is_some() {
            spin::found();
            return (found, None);
        }
        (found, spin::empty(|| self.0.device.shared().clock().now()))
    }

    /// [`Self::look_counted`] that counts nothing. Returns also whether a frame was received.
    #[inline]
    fn look_awake<R>(&self, mut take: impl FnMut(&CompletionRing) -> Option<R>) -> (Option<R>, bool) {
        let ring = &self.0.ring;
        self.0.each_engine(SharedEngine::note_poll);
        let found = take(ring);
        if found.is_some() {
            self.0.each_engine(SharedEngine::send_due_posts);
            return (found, false);
        }
        let mut received = false;
        self.0.each_engine(|engine| received |= engine.try_progress());
        (take(ring), received)
    }

    /// Polls like [`poll`](Self::poll), for the owner of an [armed](Self::arm) queue: the completions that this call's turn
    /// of the engine brings notify nobody, and the queue stays armed. Repeat it until it returns fewer than `max` before you
    /// sleep: nobody is notified of those that are left.
    pub fn poll_armed(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        // The owner of an armed queue sleeps by itself.
        let poll = |out: &mut Vec<_>| self.look_awake(|ring| some(ring.poll(out, max))).0.unwrap_or(0);
        self.0.ring.poll_attended(out, max, poll)
    }

    /// The oldest completion; otherwise like [`poll`](Self::poll).
    pub fn poll_one(&self) -> Option<WorkCompletion> {
        self.look(CompletionRing::pop)
    }

    /// Discards the queue's waiting notification. For a queue that is about to be destroyed, which does the same when the last handle
    /// is dropped.
    pub fn discard_notifications(&self) {
        self.0.discard_notifications();
    }

    /// Polls until a completion arrives, at most for `limit`. Keeps a processor busy; use [`wait`](Self::wait) to
    /// sleep.
    pub fn spin(&self, limit: Duration) -> Option<WorkCompletion> {
        let shared = self.0.device.shared();
        let end = shared.clock().now() + limit;
        loop {
            if let Some(completion) = self.poll_one() {
                return Some(completion);
            }
            if shared.failed() || self.overflowed() || shared.clock().now() >= end {
                return self.0.ring.pop();
            }
            std::hint::spin_loop();
        }
    }

    /// Requests one notification on the channel: for the next completion, or with `solicited_only` for the next one
    /// that is solicited or an error. Completions that are already in the queue cause no notification: poll after
    /// arming, before you sleep.
    pub fn arm(&self, solicited_only: bool) {
        self.0.ring.arm(solicited_only);
        self.0.each_engine(SharedEngine::application_sleeps);
    }

    /// Sleeps until frames arrive, and runs the engine for them; at most for `limit`. For the owner of an
    /// [armed](Self::arm) queue that polls it before and after: a frame wakes this caller before all other threads, and
    /// the completions that it then brings notify nobody. The queue stays armed, so that others are notified of what
    /// completes before and after the call. One thread of a device sleeps at a time.
    pub fn sleep(&self, limit: Option<Duration>) -> io::Result<Slept> {
        let CqInner { device, ring, .. } = &*self.0;
        device.sleep(self.0.only_engine(), |attends| ring.attend(attends), limit)
    }

    /// Changes the capacity. Waiting entries are kept; fails if they do not fit.
    pub fn resize(&self, capacity: u32) -> Result<(), ResourceError> {
        self.0.device.shared().registry(|registry| registry.resize_cq(self.0.id, capacity))
    }

    /// Whether no completion waits to be polled. Does not run the engine.
    pub fn is_empty(&self) -> bool {
        self.0.ring.is_empty()
    }

    /// Whether the queue has overflowed. It then accepts no more entries.
    pub fn overflowed(&self) -> bool {
        self.0.ring.overflowed()
    }

    /// Sleeps until a completion arrives, at most for `limit`. The queue's channel must not be shared with other
    /// queues; a queue without a channel gets one of its own. Several threads may wait for a queue. Fails when the queue has overflowed
    /// and is empty.
    pub fn wait(&self, limit: Duration) -> io::Result<Option<WorkCompletion>> {
        let shared = self.0.device.shared();
        let channel = self.0.channel()?;
        let _waiter = Waiter::of(&self.0);
        let end = shared.clock().now() + limit;
        loop {
            self.arm(false);
            if let Some(completion) = self.unless_overflowed(self.poll_one())? {
                return Ok(Some(completion));
            }
            let left = end.since(shared.clock().now());
            if left.is_zero() || self.0.device.wait_for(self.0.only_engine(), channel, Some(left))?.is_none()
            {
                return self.unless_overflowed(self.poll_one());
            }
        }
    }

    /// `found`; nothing more will come to a queue that has overflowed.
    pub(super) fn unless_overflowed(
        &self,
        found: Option<WorkCompletion>,
    ) -> io::Result<Option<WorkCompletion>> {
        if found.is_none() && self.overflowed() {
            return Err(io::Error::other("the completion queue has overflowed"));
        }
        Ok(found)
    }
}

/// The number of completions that were found, if there are any.
fn some(found: usize) -> Option<usize> {
    (found > 0).then_some(found)
}
