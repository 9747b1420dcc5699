//! Creating, querying and destroying objects; posting work requests.

use std::sync::Arc;

use super::{
    Access, AsyncEvent, CmError, Deferred, Limits, Object, Operation, PostError, QpAttributes, QpId, QpInfo,
    QpState, QueuePair, RecvRequest, Registry, ResourceError, Rnic, Shared, SrqId, WcStatus, WorkRequest,
    phase::{Closes, Phase},
    qp::Ending,
    registry::{attribute, up_to},
    send_queue::Progress,
};
use crate::ddp::{STag, Versions};

/// A queue pair on its way from one engine to another.
#[derive(Debug)]
#[must_use = "the queue pair is lost unless an engine adopts it"]
pub struct IdleQueuePair(Box<QueuePair>);

impl Rnic {
    /// The objects that this RNIC shares with others.
    pub fn registry(&self) -> &Arc<Registry> {
        self.shared.keys.registry()
    }

    /// The number of this engine among those that share the registry.
    pub fn number(&self) -> u16 {
        self.shared.engine
    }

    /// The limits of this RNIC.
    pub fn limits(&self) -> &Limits {
        self.registry().limits()
    }

    /// Ends the use of a key that was deregistered (or of a window that was destroyed) in the registry: when this
    /// returns, no access by the key is in progress in this engine.
    pub fn forget(&mut self, key: STag) {
        self.shared.keys.forget(key);
    }

    /// Arms the limit event of a shared receive queue; 0 disarms it.
    pub fn arm_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), ResourceError> {
        if self.registry().srq(srq)?.arm_limit(limit) {
            self.shared.events.push_async(AsyncEvent::SrqLimit { srq });
        }
        Ok(())
    }

    /// Lets the queue pairs of this engine that wait for a receive of a shared queue take those that were posted: the engine is
    /// one of those that [`ReceivePool::post`](super::ReceivePool::post) returned.
    pub fn srq_refilled(&mut self, srq: SrqId) {
        self.shared.deferred.push(Deferred::Refilled(srq));
    }

    /// Creates an idle queue pair.
    pub fn create_qp(&mut self, attributes: QpAttributes) -> Result<QpId, ResourceError> {
        let limits = self.limits();
        let size = attributes.options;
        attribute("max_send_wr", size.max_send_wr, limits.max_qp_wr)?;
        up_to("max_send_sge", size.max_send_sge, limits.max_sge)?;
        up_to("max_inline_data", size.max_inline_data, limits.max_inline_data)?;
        if attributes.srq.is_none() {
            up_to("max_recv_wr", size.max_recv_wr, limits.max_qp_wr)?;
            up_to("max_recv_sge", size.max_recv_sge, limits.max_sge)?;
        }
        let new = self.registry().add_qp(&attributes)?;
        let id = new.id;
        self.qps.insert(id, Box::new(QueuePair::new(new, attributes)));
        Ok(id)
    }

    /// Takes an idle queue pair out of this engine, with its posted receives and counters.
    pub fn take_idle_qp(&mut self, qp: QpId) -> Result<IdleQueuePair, CmError> {
        self.unconnected(qp)?;
        self.qps.remove(qp).map(IdleQueuePair).ok_or(CmError::UnknownQp)
    }

    /// Adds a queue pair that was taken out of another engine over the same registry.
    pub fn adopt_qp(&mut self, IdleQueuePair(qp): IdleQueuePair) {
        self.qps.insert(qp.id, qp);
    }

    /// The connection of a queue pair.
    pub(crate) fn connection_of(&self, qp: QpId) -> Option<xwarp_tcp::ulp::ConnId> {
        self.qps.get(qp)?.conn
    }

    /// All queue pairs.
    pub fn qps(&self) -> Vec<QpId> {
        self.qps.ids().collect()
    }

    /// The current state and attributes of a queue pair.
    pub fn query_qp(&self, qp: QpId) -> Result<QpInfo, ResourceError> {
        let qp = self.qps.get(qp).ok_or(ResourceError::Unknown(Object::QueuePair))?;
        Ok(QpInfo {
            state: qp.phase.state(),
            attributes: qp.attributes,
            addresses: qp.addresses,
            ird: qp.ird,
            ord: qp.ord,
            versions: qp.versions,
            send_outstanding: qp.sq.len(),
            recv_outstanding: qp.rq.len(),
        })
    }

    /// Changes the remote rights that the queue pair's peer may use ([`QueuePairOptions::peer_access`](super::QueuePairOptions)).
    pub fn allow(&mut self, qp: QpId, access: Access) -> Result<(), ResourceError> {
        let pair = self.qps.get_mut(qp).ok_or(ResourceError::Unknown(Object::QueuePair))?;
        pair.attributes.options.peer_access = access;
        Ok(())
    }

    /// Makes a failed or closed queue pair idle, so that it can be connected again.
    pub fn reset_qp(&mut self, qp: QpId) -> Result<(), ResourceError> {
        let pair = self.qps.get_mut(qp).ok_or(ResourceError::Unknown(Object::QueuePair))?;
        match &pair.phase {
            Phase::Idle => Ok(()),
            Phase::Ended { terminated: false, .. } if pair.conn.is_none() => {
                pair.reset();
                self.shared.keys.close_windows_of(qp);
                Ok(())
            }
            other => Err(ResourceError::State(other.state())),
        }
    }

    /// Moves a queue pair to Error: its work is flushed and its connection reset.
    pub fn fail_qp(&mut self, qp: QpId) -> Result<(), ResourceError> {
        let qp = self.qps.get_mut(qp).ok_or(ResourceError::Unknown(Object::QueuePair))?;
        self.shared.abort(qp.conn);
        qp.end(Ending::Finished, None, &mut self.shared);
        self.end_overflowed();
        Ok(())
    }

    /// Destroys a queue pair. Its work is dropped without completions. Its connection is reset, unless our direction
    /// is finished or a graceful close has drained, so that only TCP has work left.
    pub fn destroy_qp(&mut self, qp: QpId) -> Result<(), ResourceError> {
        let mut gone = self.qps.remove(qp).ok_or(ResourceError::Unknown(Object::QueuePair))?;
        self.destroyed += gone.counters;
        self.registry().remove_qp(qp, &gone.attributes);
        gone.stop_waiting(&mut self.shared);
        if let Some(conn) = gone.conn.take() {
            self.connections.detach(conn);
            let closing = gone.phase.state() == QpState::Closing;
            if gone.tx.ending == Ending::Finished || closing && gone.drained() {
                self.shared.wake(Some(conn));
            } else {
                self.shared.abort(Some(conn));
            }
        }
        self.shared.events.forget(qp);
        Ok(())
    }

    /// Posts to a send queue. On a queue pair that is closing or has ended, the request completes as flushed, after
    /// earlier requests.
    pub fn post_send(&mut self, qp: QpId, request: &WorkRequest<'_>) -> Result<(), PostError> {
        let pair = self.qps.get_mut(qp).ok_or(PostError::Unknown)?;
        let open = matches!(pair.phase, Phase::Open(Closes { here: false, .. }));
        if !open || !request.operation.is_plain() {
            return self.post_other(qp, request);
        }
        pair.sq.post(request, Progress::Posted)?;
        self.shared.wake(pair.conn);
        Ok(())
    }

    /// Posts all of `requests` in order, or none: the number of the first one that is refused, and why.
    pub fn post_all<'a>(
        &mut self,
        qp: QpId,
        requests: impl Iterator<Item = WorkRequest<'a>> + Clone,
    ) -> Result<(), (usize, PostError)> {
        let pair = self.qps.get_mut(qp).ok_or((0, PostError::Unknown))?;
        for (number, request) in requests.clone().enumerate() {
            let checked = pair
                .check_post(request.operation)
                .and_then(|_| pair.sq.check(&request, u32::try_from(number).unwrap_or(u32::MAX)));
            checked.map_err(|error| (number, error))?;
        }
        for (number, request) in requests.enumerate() {
            self.post_send(qp, &request).map_err(|error| (number, error))?;
        }
        Ok(())
    }

    /// [`Self::post_send`] of a request that needs more checks, or work of ours, or is flushed.
    #[inline(never)]
    fn post_other(&mut self, qp: QpId, request: &WorkRequest<'_>) -> Result<(), PostError> {
        let pair = self.qps.get_mut(qp).ok_or(PostError::Unknown)?;
        let progress = pair.check_post(request.operation)?;
        pair.sq.post(request, progress)?;
        pair.posted(request.operation, &mut self.shared);
        self.end_overflowed();
        Ok(())
    }

    /// Posts to a queue pair's own receive queue.
    pub fn post_recv(&mut self, qp: QpId, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let qp = self.qps.get_mut(qp).ok_or(PostError::Unknown)?;
        if qp.flushes_receives() {
            qp.rq.check(request)?;
            qp.push_failed_recv(request.wr_id, WcStatus::Flushed, &mut self.shared);
            self.end_overflowed();
            return Ok(());
        }
        qp.rq.post(request)?;
        if qp.rx.withheld.take().is_some() {
            self.shared.deferred.extend(qp.conn.map(Deferred::Resume));
        }
        Ok(())
    }
}

impl QueuePair {
    /// Checks that the queue pair takes a request with this operation in its state. Returns the request's initial
    /// progress.
    fn check_post(&self, operation: Operation) -> Result<Progress, PostError> {
        if self.flushes_sends() {
            return Ok(Progress::Done(WcStatus::Flushed));
        }
        if !matches!(self.phase, Phase::Open(_)) {
            return Err(PostError::NotConnected);
        }
        if self.ord == 0 && operation.is_answered() {
            return Err(PostError::NoReads);
        }
        if self.versions == Versions::Rdmac && operation.is_extension() {
            return Err(PostError::NoExtensions);
        }
        if matches!(operation, Operation::SendImmediate { .. }) && !self.send_immediate {
            return Err(PostError::NoSendImmediate);
        }
        Ok(Progress::Posted)
    }

    /// Begins a request that was just posted, or flushes it.
    fn posted(&mut self, operation: Operation, shared: &mut Shared) {
        if self.flushes_sends() {
            self.complete_sends(shared);
        } else if operation.is_local() {
            self.do_local_work(shared);
        } else {
            shared.wake(self.conn);
        }
    }
}
