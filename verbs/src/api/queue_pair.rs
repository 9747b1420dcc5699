//! Queue pairs and shared receive queues.

use std::{fmt, sync::Arc};

use super::{
    completion::CompletionQueue,
    device::{Device, destroyed},
    protection::ProtectionDomain,
};
use crate::rnic::{
    PostError, QpAttributes, QpId, QpInfo, QpState, QueuePairOptions, RecvRequest, ResourceError,
    SrqAttributes, SrqId, WorkRequest,
};

/// A send queue and a receive queue, to be connected to one peer's.
///
/// Any thread may post. Dropping it forgets what is outstanding; its connection is reset, unless it was
/// [disconnected](super::cm::CmId::disconnect) before and everything has been sent. Wait for the completion of
/// what must arrive.
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
            let gone = state.engine.destroy_qp(self.id);
            destroyed(gone, "only its owner destroys a queue pair");
            state.cm.queue_pair_gone(now, self.id);
        });
    }
}

impl ProtectionDomain {
    /// A queue pair of this domain. Both completion queues may be the same.
    pub fn create_qp(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        options: QueuePairOptions,
    ) -> Result<QueuePair, ResourceError> {
        QueuePair::create(self, send_cq, recv_cq, None, options)
    }

    /// A queue pair of this domain that takes its receives from `srq`.
    pub fn create_qp_with_srq(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        srq: &SharedReceiveQueue,
        options: QueuePairOptions,
    ) -> Result<QueuePair, ResourceError> {
        QueuePair::create(self, send_cq, recv_cq, Some(srq), options)
    }

    /// A receive queue for several queue pairs of this domain: `max_wr` receives of at most `max_sge` pieces.
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue, ResourceError> {
        let attributes = SrqAttributes { pd: self.0.id, max_wr, max_sge, limit: 0 };
        let id = self.device().shared().with(|state, _| state.engine.create_srq(&attributes))?;
        Ok(SharedReceiveQueue(Arc::new(SrqInner { id, pd: self.clone() })))
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
                return Err(ResourceError::Unknown(crate::rnic::Object::CompletionQueue));
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
        let id = device.shared().with(|state, _| state.engine.create_qp(attributes))?;
        Ok(Self { id, pd: pd.clone(), send_cq: send_cq.clone(), recv_cq: recv_cq.clone(), srq: srq.cloned() })
    }

    /// Its name in completions and asynchronous events.
    pub fn id(&self) -> QpId {
        self.id
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        self.pd.device()
    }

    /// Its protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Where requests of the send queue complete.
    pub fn send_cq(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// Where receives complete.
    pub fn recv_cq(&self) -> &CompletionQueue {
        &self.recv_cq
    }

    /// The shared receive queue that it takes receives from.
    pub fn srq(&self) -> Option<&SharedReceiveQueue> {
        self.srq.as_ref()
    }

    /// What it is now.
    pub fn query(&self) -> Result<QpInfo, ResourceError> {
        self.device().shared().look(|state| state.engine.query_qp(self.id))
    }

    /// Where it is in its life.
    pub fn state(&self) -> QpState {
        self.query().map_or(QpState::Error, |info| info.state)
    }

    /// Posts a request to the send queue, and sends as much of it as the window allows before it returns.
    pub fn post_send(&self, request: &WorkRequest<'_>) -> Result<(), PostError> {
        self.device().shared().with(|state, _| state.engine.post_send(self.id, request))
    }

    /// Posts requests in order, for the price of one call; several small messages may then share a segment.
    /// An error says how many were posted before the request that it is about.
    pub fn post_send_list(&self, requests: &[WorkRequest<'_>]) -> Result<(), (usize, PostError)> {
        self.device().shared().with(|state, _| {
            for (posted, request) in requests.iter().enumerate() {
                state.engine.post_send(self.id, request).map_err(|error| (posted, error))?;
            }
            Ok(())
        })
    }

    /// Posts a receive.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.device().shared().with(|state, _| state.engine.post_recv(self.id, request))
    }

    /// Posts receives in order. An error says how many were posted before the one that it is about.
    pub fn post_recv_list(&self, requests: &[RecvRequest<'_>]) -> Result<(), (usize, PostError)> {
        self.device().shared().with(|state, _| {
            for (posted, request) in requests.iter().enumerate() {
                state.engine.post_recv(self.id, request).map_err(|error| (posted, error))?;
            }
            Ok(())
        })
    }

    /// Makes a queue pair idle again whose connection is over, so that it can be connected anew.
    pub fn reset(&self) -> Result<(), ResourceError> {
        self.device().shared().with(|state, _| state.engine.reset_qp(self.id))
    }

    /// Ends the connection at once with a reset, and flushes all work.
    pub fn abort(&self) -> Result<(), ResourceError> {
        self.device().shared().with(|state, _| state.engine.abort(self.id))
    }
}

/// Receives that several queue pairs take from. Clones are handles to the same queue.
#[derive(Clone)]
pub struct SharedReceiveQueue(Arc<SrqInner>);

struct SrqInner {
    id: SrqId,
    pd: ProtectionDomain,
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        let freed = self.pd.device().shared().with(|state, _| state.engine.destroy_srq(self.id));
        destroyed(freed, "queue pairs hold their shared receive queue");
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedReceiveQueue").field(&self.0.id).finish()
    }
}

impl SharedReceiveQueue {
    /// Its name in asynchronous events.
    pub fn id(&self) -> SrqId {
        self.0.id
    }

    /// Posts a receive, for whichever queue pair needs it first.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.0.pd.device().shared().with(|state, _| state.engine.post_srq_recv(self.0.id, request))
    }

    /// Receives that are posted and not taken.
    pub fn posted(&self) -> Result<usize, ResourceError> {
        self.0.pd.device().shared().look(|state| state.engine.query_srq(self.0.id)).map(|(_, posted)| posted)
    }

    /// Asks for one [`AsyncEvent::SrqLimit`](crate::AsyncEvent::SrqLimit), when fewer than `limit` receives
    /// are left. 0: none.
    pub fn arm_limit(&self, limit: u32) -> Result<(), ResourceError> {
        self.0.pd.device().shared().with(|state, _| state.engine.arm_srq_limit(self.0.id, limit))
    }

    /// Makes room for `max_wr` receives; fails when more are posted.
    pub fn resize(&self, max_wr: u32) -> Result<(), ResourceError> {
        self.0.pd.device().shared().with(|state, _| state.engine.resize_srq(self.0.id, max_wr))
    }
}
