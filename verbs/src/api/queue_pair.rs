//! Queue pairs and shared receive queues.

use std::{
    borrow::Borrow,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
};

use xwarp_rnic::rnic::{
    Access, CmError as CardCmError, Object, PostError, QpAttributes, QpId, QpInfo, QpState, QueuePairOptions,
    ReceivePool, RecvRequest, ResourceError, SrqAttributes, SrqId, WorkRequest,
};
use xwarp_tcp::tcp::Info as TcpInfo;

use super::{
    cm::CmError,
    completion::CompletionQueue,
    counters::Counters,
    failure::{Answer, destroyed},
    handle::Device,
    protection::ProtectionDomain,
    shared::SharedEngine,
};
use crate::system::lock;

/// The failure of a list of work requests: earlier requests are posted, later ones are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("work request {posted} of the list was not posted")]
pub struct PostListError {
    /// Number of requests that were posted, which is the index of the one that failed.
    pub posted: usize,
    /// The reason why it was not posted.
    pub source: PostError,
}

impl Answer for Result<(), PostListError> {
    fn of_failed_device() -> Self {
        Err(PostListError { posted: 0, source: PostError::DeviceFailed })
    }
}

/// A send queue and a receive queue, for a connection to one peer.
///
/// Any thread may post. Dropping a queue pair discards outstanding work, and resets the connection unless it was
/// [disconnected](super::cm::CmId::disconnect) before and everything has been sent. Wait for the completions of work
/// that must arrive.
pub struct QueuePair {
    id: QpId,
    /// Number of the engine that has the queue pair.
    engine: AtomicU16,
    /// Held while the queue pair moves to another engine and is connected there.
    moving: Mutex<()>,
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    srq: Option<SharedReceiveQueue>,
}

/// The result of a verb that looks for a queue pair in an engine.
trait Sought {
    /// Whether the queue pair may be in another engine.
    fn is_elsewhere(&self) -> bool;
}

impl<T> Sought for Result<T, ResourceError> {
    fn is_elsewhere(&self) -> bool {
        matches!(self, Err(ResourceError::Unknown(Object::QueuePair)))
    }
}

impl<T> Sought for Result<T, PostError> {
    fn is_elsewhere(&self) -> bool {
        matches!(self, Err(PostError::Unknown))
    }
}

impl Sought for Result<(), PostListError> {
    fn is_elsewhere(&self) -> bool {
        matches!(self, Err(PostListError { source: PostError::Unknown, .. }))
    }
}

impl<T> Sought for Option<T> {
    fn is_elsewhere(&self) -> bool {
        self.is_none()
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QueuePair").field(&self.id).finish()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.here().with(|state, now| {
            let gone = state.engine.rnic_mut().destroy_qp(self.id);
            destroyed(gone, "only its owner destroys a queue pair");
            state.cm.queue_pair_gone(now, self.id);
        });
        let engine = self.engine();
        self.completion_queues().for_each(|cq| cq.0.remove_user(engine));
    }
}

impl ProtectionDomain {
    /// Creates a queue pair of this domain. Both completion queues may be the same one.
    pub fn create_qp(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        options: QueuePairOptions,
    ) -> Result<QueuePair, ResourceError> {
        QueuePair::create(self, send_cq, recv_cq, None, options)
    }

    /// Creates a queue pair of this domain that takes its receives from `srq`.
    pub fn create_qp_with_srq(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        srq: &SharedReceiveQueue,
        options: QueuePairOptions,
    ) -> Result<QueuePair, ResourceError> {
        QueuePair::create(self, send_cq, recv_cq, Some(srq), options)
    }

    /// Creates a receive queue for several queue pairs of this domain: `max_wr` receives of at most `max_sge` pieces.
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue, ResourceError> {
        let attributes = SrqAttributes { pd: self.0.id, max_wr, max_sge, limit: 0 };
        let receives = self.device().shared().registry(|registry| registry.create_srq(&attributes))?;
        Ok(SharedReceiveQueue(Arc::new(SrqInner { receives, pd: self.clone() })))
    }
}

impl QueuePair {
    fn create(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        srq: Option<&SharedReceiveQueue>,
        options: QueuePairOptions,
    ) -> Result<Self, ResourceError> {
        let device = pd.device();
        for cq in [send_cq, recv_cq] {
            if !device.is(&cq.0.device) {
                return Err(ResourceError::Unknown(Object::CompletionQueue));
            }
        }
        if srq.is_some_and(|srq| !device.is(srq.0.pd.device())) {
            return Err(ResourceError::ForeignSrq);
        }
        let attributes = QpAttributes {
            pd: pd.0.id,
            send_cq: send_cq.id(),
            recv_cq: recv_cq.id(),
            srq: srq.map(SharedReceiveQueue::id),
            options,
        };
        let engine = device.engines().in_turn();
        let id =
            device.engines().get(engine).with(|state, _| state.engine.rnic_mut().create_qp(attributes))?;
        let pair = Self {
            id,
            engine: AtomicU16::new(engine),
            moving: Mutex::new(()),
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: srq.cloned(),
        };
        pair.completion_queues().for_each(|cq| cq.0.add_user(engine));
        Ok(pair)
    }

    fn completion_queues(&self) -> impl Iterator<Item = &CompletionQueue> {
        [&self.send_cq, &self.recv_cq].into_iter()
    }

    /// The engine that has the queue pair, unless it is just moving.
    #[inline]
    fn here(&self) -> &SharedEngine {
        self.device().engines().get(self.engine.load(Ordering::Acquire))
    }

    /// Calls `f` with the engine that has the queue pair.
    #[inline]
    fn at_engine<R: Sought>(&self, mut f: impl FnMut(&SharedEngine) -> R) -> R {
        let several = self.device().engines().are_several();
        let result = f(self.here());
        // When the engine has executed the work, the peer may have answered it, and another thread may have destroyed this queue
        // pair for that: it must not be accessed any more unless the engine does not know it.
        if several && result.is_elsewhere() {
            return self.after_move(f);
        }
        result
    }

    /// As [`Self::at_engine`], while the queue pair cannot move.
    #[cold]
    fn after_move<R>(&self, mut f: impl FnMut(&SharedEngine) -> R) -> R {
        let _moving = lock(&self.moving);
        f(self.here())
    }

    /// Moves the queue pair, which must be idle, to the engine `to`. It stays there while the guard lives.
    pub(super) fn bring_to(&self, to: u16) -> Result<Option<MutexGuard<'_, ()>>, CmError> {
        let engines = self.device().engines();
        if !engines.are_several() {
            return Ok(None);
        }
        if engines.first().failed() {
            return Err(CmError::DeviceFailed);
        }
        let moving = lock(&self.moving);
        let from = self.engine();
        if from != to {
            let idle = self
                .here()
                .with(|state, _| state.engine.rnic_mut().take_idle_qp(self.id).map_err(CmError::from))?;
            engines.get(to).with(|state, _| state.engine.rnic_mut().adopt_qp(idle));
            self.completion_queues().for_each(|cq| cq.0.add_user(to));
            self.engine.store(to, Ordering::Release);
            self.completion_queues().for_each(|cq| cq.0.remove_user(from));
        }
        Ok(Some(moving))
    }

    /// The number of the engine that has the queue pair, which is 0 in a device with one engine. Queue pairs are created in all
    /// engines in turn. One that [connects](Device::connect) does so in its engine; one that accepts a request moves to the engine
    /// at which the request arrived ([`CmId::engine`](super::cm::CmId::engine)).
    pub fn engine(&self) -> u16 {
        self.engine.load(Ordering::Acquire)
    }

    /// Moves an idle queue pair to another engine of the device, with the receives that are posted. For an application that serves
    /// each engine by a thread of its own.
    pub fn move_to_engine(&self, engine: u16) -> Result<(), CmError> {
        if usize::from(engine) >= self.device().engines().all().len() {
            return Err(CmError::NoEngine(engine));
        }
        self.bring_to(engine).map(drop)
    }

    /// The queue pair's identifier in completions and asynchronous events.
    pub fn id(&self) -> QpId {
        self.id
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.pd.device()
    }

    /// The protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The completion queue of the send queue.
    pub fn send_cq(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// The completion queue of receives.
    pub fn recv_cq(&self) -> &CompletionQueue {
        &self.recv_cq
    }

    /// The shared receive queue, if receives are taken from one.
    pub fn srq(&self) -> Option<&SharedReceiveQueue> {
        self.srq.as_ref()
    }

    /// The current state and attributes.
    pub fn query(&self) -> Result<QpInfo, ResourceError> {
        self.at_engine(|engine| {
            engine
                .look(|state| state.engine.rnic().query_qp(self.id))
                .unwrap_or(Err(ResourceError::DeviceFailed))
        })
    }

    /// The current state.
    pub fn state(&self) -> QpState {
        self.query().map_or(QpState::Error, |info| info.state)
    }

    /// TCP statistics of the queue pair's connection: round-trip time, congestion window, windows, retransmissions.
    /// `None` without a connection.
    pub fn tcp_info(&self) -> Option<TcpInfo> {
        let info =
            self.at_engine(|engine| engine.look(|state| state.engine.connection_info(self.id)).flatten());
        info.map(|(tcp, _)| tcp)
    }

    /// TCP's and MPA's counters of the queue pair's connection, since it began. Empty without a connection.
    pub fn counters(&self) -> Counters {
        let info =
            self.at_engine(|engine| engine.look(|state| state.engine.connection_info(self.id)).flatten());
        info.map(|(tcp, mpa)| Counters::of_connection(&tcp, &mpa)).unwrap_or_default()
    }

    /// Posts a request to the send queue.
    ///
    /// The request is transmitted before this returns if nothing of the connection is in flight, or if the application
    /// does not poll continuously. Otherwise small requests gather, so that several messages share a segment and
    /// several segments a system call: they are transmitted with the next poll that finds no completion, as soon as
    /// they fill a few segments or are 64, or with one of the first posts or polls after 50 us. Should the application
    /// stop polling, the progress thread transmits them at the end of its nap, within 4 ms. Requests of one queue pair
    /// are always sent in the order in which they were posted.
    pub fn post_send(&self, request: &WorkRequest<'_>) -> Result<(), PostError> {
        self.at_engine(|engine| {
            let requests = std::slice::from_ref(request).iter().copied();
            engine.post(self.id, requests, |rnic| rnic.post_send(self.id, request))
        })
    }

    /// Posts requests in order with one call, which takes the device's lock once and kicks the interface at most once;
    /// several small messages may then share a segment. Stops at the first request that is refused. See
    /// [`post_send`](Self::post_send) for the time of transmission.
    pub fn post_send_list(&self, requests: &[WorkRequest<'_>]) -> Result<(), PostListError> {
        self.at_engine(|engine| {
            engine.post(self.id, requests.iter().copied(), |rnic| {
                for (posted, request) in requests.iter().enumerate() {
                    rnic.post_send(self.id, request).map_err(|source| PostListError { posted, source })?;
                }
                Ok(())
            })
        })
    }

    /// Posts all of the requests in order with one call, or none of them: if one is refused, nothing is sent. Otherwise like
    /// [`post_send_list`](Self::post_send_list). The requests are looked at twice.
    pub fn post_send_all<'a>(
        &self,
        requests: impl ExactSizeIterator<Item = WorkRequest<'a>> + Clone,
    ) -> Result<(), PostListError> {
        self.at_engine(|engine| {
            let each = requests.clone();
            engine.post(self.id, requests.clone(), |rnic| {
                rnic.post_all(self.id, each).map_err(|(posted, source)| PostListError { posted, source })
            })
        })
    }

    /// Posts a receive.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.at_engine(|engine| engine.post_receive(|rnic| rnic.post_recv(self.id, request)))
    }

    /// Posts receives in order with one call. Stops at the first one that is refused.
    pub fn post_recv_list(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostListError> {
        self.at_engine(|engine| {
            engine.post_receive(|rnic| {
                for (posted, request) in requests.iter().enumerate() {
                    rnic.post_recv(self.id, request).map_err(|source| PostListError { posted, source })?;
                }
                Ok(())
            })
        })
    }

    /// Changes the remote rights that the peer may use ([`QueuePairOptions::peer_access`](crate::QueuePairOptions)), from its next
    /// access on.
    pub fn allow(&self, access: Access) -> Result<(), ResourceError> {
        self.at_engine(|engine| engine.with(|state, _| state.engine.rnic_mut().allow(self.id, access)))
    }

    /// Returns a queue pair whose connection has ended to the idle state, so that it can be connected again.
    pub fn reset(&self) -> Result<(), ResourceError> {
        self.at_engine(|engine| engine.with(|state, _| state.engine.rnic_mut().reset_qp(self.id)))
    }

    /// Closes the connection in order, for an application that has no [`CmId`](super::cm::CmId): posted work is
    /// executed first, and later work is flushed.
    pub fn disconnect(&self) -> Result<(), ResourceError> {
        self.at_engine(|engine| {
            engine.with(|state, _| {
                state.engine.disconnect(self.id).map_err(|error| match error {
                    CardCmError::State(state) => ResourceError::State(state),
                    _ => ResourceError::Unknown(Object::QueuePair),
                })
            })
        })
    }

    /// Resets the connection and flushes all work.
    pub fn abort(&self) -> Result<(), ResourceError> {
        self.at_engine(|engine| engine.with(|state, _| state.engine.abort(self.id)))
    }
}

/// Requests for queue pairs of one device that are sent together, when this is dropped: with one kick of the interface
/// for all of them, and small messages of one queue pair in shared segments. Other activity of the device may transmit
/// some of them earlier.
///
/// ```no_run
/// # use xwarp_verbs::{Device, Payload, PostError, QueuePair, WorkRequest};
/// # fn send(device: &Device, qps: &[QueuePair]) -> Result<(), PostError> {
/// let batch = device.batch();
/// for qp in qps {
///     batch.post_send(qp, &WorkRequest::send(1, Payload::Inline(b"to all")))?;
/// }
/// drop(batch);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the requests leave when the batch is dropped"]
pub struct PostBatch<D: Borrow<Device>> {
    device: D,
    /// The engines, of several, that have got requests, as bits.
    engines: AtomicU64,
}

impl<D: Borrow<Device>> PostBatch<D> {
    fn new(device: D) -> Self {
        Self { device, engines: AtomicU64::new(0) }
    }

    /// Posts a request to the send queue of `qp`, which must be a queue pair of the batch's device.
    pub fn post_send(&self, qp: &QueuePair, request: &WorkRequest<'_>) -> Result<(), PostError> {
        if !self.device.borrow().is(qp.device()) {
            return Err(PostError::Unknown);
        }
        qp.at_engine(|engine| {
            if engine.number() > 0 {
                self.engines.fetch_or(1 << engine.number(), Ordering::Relaxed);
            }
            engine.post_in_batch(|rnic| rnic.post_send(qp.id, request))
        })
    }
}

impl<D: Borrow<Device>> Drop for PostBatch<D> {
    fn drop(&mut self) {
        let engines = self.device.borrow().engines();
        // The first engine is not counted.
        let used = *self.engines.get_mut() | 1;
        for engine in engines.all().iter().filter(|engine| used >> engine.number() & 1 == 1) {
            engine.with(|_, _| ());
        }
    }
}

impl Device {
    /// Begins a batch of posts, which are sent together when it is dropped.
    pub fn batch(&self) -> PostBatch<&Self> {
        PostBatch::new(self)
    }

    /// Like [`batch`](Self::batch), for a batch that is kept between calls, for instance in a structure of the
    /// application.
    pub fn into_batch(self) -> PostBatch<Self> {
        PostBatch::new(self)
    }
}

/// A queue of receives for several queue pairs. Clones are handles to the same queue.
#[derive(Clone)]
pub struct SharedReceiveQueue(Arc<SrqInner>);

struct SrqInner {
    receives: Arc<ReceivePool>,
    pd: ProtectionDomain,
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        let id = self.receives.id();
        let freed = self.pd.device().shared().registry(|registry| registry.destroy_srq(id));
        destroyed(freed, "queue pairs hold their shared receive queue");
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedReceiveQueue").field(&self.id()).finish()
    }
}

impl SharedReceiveQueue {
    /// The queue's identifier in asynchronous events.
    pub fn id(&self) -> SrqId {
        self.0.receives.id()
    }

    /// Posts a receive for the first queue pair that needs one. Takes the lock of an engine only if queue pairs of that
    /// engine wait for a receive.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.0.pd.device().engines().post_shared_receive(&self.0.receives, request)
    }

    /// Number of receives that are posted and not taken by a queue pair.
    pub fn posted(&self) -> Result<usize, ResourceError> {
        self.0.pd.device().shared().registry(|_| Ok(self.0.receives.len()))
    }

    /// Requests one [`AsyncEvent::SrqLimit`](crate::AsyncEvent::SrqLimit) when fewer than `limit` receives are left. 0
    /// cancels the request.
    pub fn arm_limit(&self, limit: u32) -> Result<(), ResourceError> {
        self.0.pd.device().shared().with(|state, _| state.engine.rnic_mut().arm_srq_limit(self.id(), limit))
    }

    /// Changes the capacity to `max_wr` receives; fails when more are posted.
    pub fn resize(&self, max_wr: u32) -> Result<(), ResourceError> {
        self.0.pd.device().shared().registry(|registry| registry.resize_srq(self.id(), max_wr))
    }
}
