//! Queue pairs and shared receive queues.

use std::{borrow::Borrow, fmt, sync::Arc};

use xwarp_rnic::rnic::{
    CmError, Object, PostError, QpAttributes, QpId, QpInfo, QpState, QueuePairOptions, ReceivePool,
    RecvRequest, ResourceError, SrqAttributes, SrqId, WorkRequest,
};
use xwarp_tcp::tcp::Info as TcpInfo;

use super::{
    completion::CompletionQueue,
    counters::Counters,
    device::{Device, destroyed},
    protection::ProtectionDomain,
};

/// The failure of a list of work requests: those before the failed one are posted, those after it are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("work request {posted} of the list was not posted")]
pub struct PostListError {
    /// Number of requests that were posted, which is the index of the one that failed.
    pub posted: usize,
    /// Why that one was not posted.
    pub source: PostError,
}

/// A send queue and a receive queue, for a connection to one peer.
///
/// Any thread may post. Dropping a queue pair discards outstanding work, and resets the connection unless it was
/// [disconnected](super::cm::CmId::disconnect) before and everything has been sent. Wait for the completions of work
/// that must arrive.
pub struct QueuePair {
    id: QpId,
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    srq: Option<SharedReceiveQueue>,
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QueuePair").field(&self.id).finish()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.device().shared().with(|state, now| {
            let gone = state.engine.rnic_mut().destroy_qp(self.id);
            destroyed(gone, "only its owner destroys a queue pair");
            state.cm.queue_pair_gone(now, self.id);
        });
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
            if !device.shared().shares_with(cq.0.device.shared()) {
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
        let id = device.shared().with(|state, _| state.engine.rnic_mut().create_qp(attributes))?;
        Ok(Self { id, pd: pd.clone(), send_cq: send_cq.clone(), recv_cq: recv_cq.clone(), srq: srq.cloned() })
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
        self.device().shared().look(|state| state.engine.rnic().query_qp(self.id))
    }

    /// The current state.
    pub fn state(&self) -> QpState {
        self.query().map_or(QpState::Error, |info| info.state)
    }

    /// TCP's numbers of the queue pair's connection: round-trip time, congestion window, windows, retransmissions.
    /// `None` without a connection.
    pub fn tcp_info(&self) -> Option<TcpInfo> {
        let info = self.device().shared().look(|state| state.engine.connection_info(self.id));
        info.map(|(tcp, _)| tcp)
    }

    /// TCP's and MPA's counters of the queue pair's connection, since it began. Empty without a connection.
    pub fn counters(&self) -> Counters {
        let info = self.device().shared().look(|state| state.engine.connection_info(self.id));
        info.map(|(tcp, mpa)| Counters::of_connection(&tcp, &mpa)).unwrap_or_default()
    }

    /// Posts a request to the send queue.
    ///
    /// While nothing of the connection is in flight, the request is transmitted before this returns. The same holds for an
    /// application that does not poll all the time. While it does and data is in flight, small requests gather, so that
    /// several messages share a segment and several segments a system call: they are transmitted with the next poll that
    /// finds no completion, as soon as they fill a few segments or are 64, or with one of the first posts or polls after 50 us. Should
    /// the application stop polling, the progress thread transmits them at the end of its nap, within 4 ms. Requests of
    /// one queue pair always leave in the order in which they were posted.
    pub fn post_send(&self, request: &WorkRequest<'_>) -> Result<(), PostError> {
        let requests = std::slice::from_ref(request);
        self.device().shared().post(self.id, requests, |rnic| rnic.post_send(self.id, request))
    }

    /// Posts requests in order with one call, which takes the device's lock once and kicks the interface at most once;
    /// several small messages may then share a segment. Stops at the first request that is refused. See
    /// [`post_send`](Self::post_send) for the time at which they leave.
    pub fn post_send_list(&self, requests: &[WorkRequest<'_>]) -> Result<(), PostListError> {
        self.device().shared().post(self.id, requests, |rnic| {
            for (posted, request) in requests.iter().enumerate() {
                rnic.post_send(self.id, request).map_err(|source| PostListError { posted, source })?;
            }
            Ok(())
        })
    }

    /// Posts a receive.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.device().shared().post_receive(|rnic| rnic.post_recv(self.id, request))
    }

    /// Posts receives in order with one call. Stops at the first one that is refused.
    pub fn post_recv_list(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostListError> {
        self.device().shared().post_receive(|rnic| {
            for (posted, request) in requests.iter().enumerate() {
                rnic.post_recv(self.id, request).map_err(|source| PostListError { posted, source })?;
            }
            Ok(())
        })
    }

    /// Returns a queue pair whose connection has ended to the idle state, so that it can be connected again.
    pub fn reset(&self) -> Result<(), ResourceError> {
        self.device().shared().with(|state, _| state.engine.rnic_mut().reset_qp(self.id))
    }

    /// Closes the connection in order, for an application that has no [`CmId`](super::cm::CmId): work that is posted is executed first,
    /// and work that is posted later is flushed.
    pub fn disconnect(&self) -> Result<(), ResourceError> {
        self.device().shared().with(|state, _| {
            state.engine.disconnect(self.id).map_err(|error| match error {
                CmError::State(state) => ResourceError::State(state),
                _ => ResourceError::Unknown(Object::QueuePair),
            })
        })
    }

    /// Resets the connection and flushes all work.
    pub fn abort(&self) -> Result<(), ResourceError> {
        self.device().shared().with(|state, _| state.engine.abort(self.id))
    }
}

/// Requests for queue pairs of one device that leave together, when this is dropped: with one kick of the interface for all
/// of them, and small messages of one queue pair in shared segments. Other activity of the device may transmit some of
/// them earlier.
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
pub struct PostBatch<D: Borrow<Device>>(D);

impl<D: Borrow<Device>> PostBatch<D> {
    /// Posts a request to the send queue of `qp`, which must be a queue pair of the batch's device.
    pub fn post_send(&self, qp: &QueuePair, request: &WorkRequest<'_>) -> Result<(), PostError> {
        let device: &Device = self.0.borrow();
        if !device.is(qp.device()) {
            return Err(PostError::Unknown);
        }
        device.shared().post_in_batch(|rnic| rnic.post_send(qp.id, request))
    }
}

impl<D: Borrow<Device>> Drop for PostBatch<D> {
    fn drop(&mut self) {
        let device: &Device = self.0.borrow();
        device.shared().with(|_, _| ());
    }
}

impl Device {
    /// Begins a batch of posts: they leave together when it is dropped.
    pub fn batch(&self) -> PostBatch<&Self> {
        PostBatch(self)
    }

    /// As [`batch`](Self::batch), for a batch that is kept between calls, for instance in a structure of the application.
    pub fn into_batch(self) -> PostBatch<Self> {
        PostBatch(self)
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
        let freed = self.pd.device().shared().end_object(|registry| registry.destroy_srq(id));
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

    /// Posts a receive for the queue pair that needs one first. Takes the lock of an engine only if queue pairs of that engine
    /// wait for a receive.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let shared = self.0.pd.device().shared();
        shared.post_shared_receive(&self.0.receives, request)
    }

    /// Number of receives that are posted and not taken by a queue pair.
    pub fn posted(&self) -> Result<usize, ResourceError> {
        self.0.pd.device().shared().registry(|_| Ok(self.0.receives.len()))
    }

    /// Requests one [`AsyncEvent::SrqLimit`](crate::AsyncEvent::SrqLimit) for the time when fewer than `limit` receives
    /// are left. 0 cancels the request.
    pub fn arm_limit(&self, limit: u32) -> Result<(), ResourceError> {
        self.0.pd.device().shared().with(|state, _| state.engine.rnic_mut().arm_srq_limit(self.id(), limit))
    }

    /// Changes the capacity to `max_wr` receives; fails when more are posted.
    pub fn resize(&self, max_wr: u32) -> Result<(), ResourceError> {
        self.0.pd.device().shared().registry(|registry| registry.resize_srq(self.id(), max_wr))
    }
}
