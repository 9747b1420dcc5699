//! Creating, querying and destroying objects; posting work requests.

use std::sync::Arc;

use super::{
    Access, CompletionRing, Cq, CqId, Domain, FastRegistration, KeyTable, Limits, Notify, Object, Opcode,
    PdId, PostError, QpAttributes, QpId, QpInfo, QpState, QueuePair, RecvRequest, Registration,
    ResourceError, Rnic, SharedReceiveQueue, SrqAttributes, SrqId, WcStatus, WorkRequest, phase::Phase,
    qp::Ending, send_queue::Progress,
};
use crate::ddp::{STag, Versions};

fn attribute(attribute: &'static str, value: u32, limit: u32) -> Result<(), ResourceError> {
    let (value, limit) = (u64::from(value), u64::from(limit));
    if value == 0 || value > limit {
        Err(ResourceError::Attribute { attribute, value, limit })
    } else {
        Ok(())
    }
}

fn up_to(name: &'static str, value: u32, limit: u32) -> Result<(), ResourceError> {
    if value == 0 { Ok(()) } else { attribute(name, value, limit) }
}

impl Rnic {
    /// The limits of this RNIC.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Creates a protection domain.
    pub fn alloc_pd(&mut self) -> Result<PdId, ResourceError> {
        let limit = self.limits.max_pd;
        let object = Object::ProtectionDomain;
        self.shared.domains.insert_with(|_| Domain::default()).ok_or(ResourceError::TooMany { object, limit })
    }

    /// Destroys an unused protection domain.
    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), ResourceError> {
        let unknown = ResourceError::Unknown(Object::ProtectionDomain);
        let domain = self.shared.domains.get(pd).ok_or(unknown)?;
        let users = domain.keys + domain.srqs + domain.qps;
        if users > 0 {
            return Err(ResourceError::InUse(Object::ProtectionDomain, users));
        }
        self.shared.domains.remove(pd).map(|_| ()).ok_or(unknown)
    }

    /// Registers memory. The returned key is both local and remote key.
    pub fn register(&mut self, registration: Registration) -> Result<STag, ResourceError> {
        let pd = registration.pd;
        let wraps = registration.base.checked_add(registration.memory.len() as u64).is_none();
        if wraps || registration.access.intersects(Access::WRITES) && !registration.memory.is_writable() {
            return Err(ResourceError::Memory);
        }
        self.check_stream(pd, registration.stream)?;
        let limit = self.limits.max_mr;
        self.add_key(pd, Object::Region, limit, |keys| keys.insert_region(registration))
    }

    /// Creates a fast region. It is invalid until a work request registers memory for it.
    pub fn alloc_fast_region(&mut self, registration: FastRegistration) -> Result<STag, ResourceError> {
        let FastRegistration { pd, max_pieces, stream } = registration;
        attribute("max_pieces", max_pieces, self.limits.max_fast_pieces)?;
        self.check_stream(pd, stream)?;
        let limit = self.limits.max_mr;
        self.add_key(pd, Object::Region, limit, |keys| keys.insert_fast_region(pd, max_pieces, stream))
    }

    /// Creates an unbound window (type 2 of the verbs: work requests bind it, to one stream).
    pub fn alloc_window(&mut self, pd: PdId) -> Result<STag, ResourceError> {
        let limit = self.limits.max_mw;
        self.add_key(pd, Object::Window, limit, |keys| keys.insert_window(pd))
    }

    /// Checks that the queue pair to which a region is limited belongs to the same domain.
    fn check_stream(&self, pd: PdId, stream: Option<QpId>) -> Result<(), ResourceError> {
        match stream {
            Some(qp) if self.qps.get(qp).is_none_or(|qp| qp.attributes.pd != pd) => {
                Err(ResourceError::Unknown(Object::QueuePair))
            }
            _ => Ok(()),
        }
    }

    fn add_key(
        &mut self,
        pd: PdId,
        object: Object,
        limit: u32,
        insert: impl FnOnce(&mut KeyTable) -> Option<STag>,
    ) -> Result<STag, ResourceError> {
        let unknown = ResourceError::Unknown(Object::ProtectionDomain);
        let domain = self.shared.domains.get_mut(pd).ok_or(unknown)?;
        let key = insert(&mut self.shared.keys).ok_or(ResourceError::TooMany { object, limit })?;
        domain.keys += 1;
        Ok(key)
    }

    fn key_removed(&mut self, key: STag, pd: Option<PdId>) -> Result<(), ResourceError> {
        let domain = self.shared.domains.get_mut(pd.ok_or(ResourceError::UnknownKey(key))?);
        if let Some(domain) = domain {
            domain.keys -= 1;
        }
        Ok(())
    }

    /// Deregisters a region, fast or not. Its key gives no access any more, even to work that was posted before.
    /// Fails while windows are bound to the region; see [`Self::revoke`].
    pub fn deregister(&mut self, key: STag) -> Result<(), ResourceError> {
        match self.shared.keys.bound_windows(key) {
            Some(0) => self.revoke(key),
            Some(windows) => Err(ResourceError::InUse(Object::Region, windows as usize)),
            None => Err(ResourceError::UnknownKey(key)),
        }
    }

    /// Deregisters a region and ends the access of the windows that are bound to it.
    pub fn revoke(&mut self, key: STag) -> Result<(), ResourceError> {
        let pd = self.shared.keys.remove_region(key);
        self.key_removed(key, pd)
    }

    /// Destroys a window, bound or not.
    pub fn dealloc_window(&mut self, key: STag) -> Result<(), ResourceError> {
        let pd = self.shared.keys.remove_window(key);
        self.key_removed(key, pd)
    }

    /// Creates a completion queue of `capacity` entries; `notify` is called when the queue is armed and an entry is
    /// added.
    pub fn create_cq(
        &mut self,
        capacity: u32,
        notify: Option<Arc<dyn Notify>>,
    ) -> Result<(CqId, Arc<CompletionRing>), ResourceError> {
        attribute("cqe", capacity, self.limits.max_cqe)?;
        let ring = Arc::new(CompletionRing::new(capacity, notify));
        let cq = Cq { ring: ring.clone(), users: 0 };
        let full = ResourceError::TooMany { object: Object::CompletionQueue, limit: self.limits.max_cq };
        Ok((self.cqs.insert_with(|_| cq).ok_or(full)?, ring))
    }

    /// Changes the capacity of a completion queue. Handles to its ring stay valid, and waiting entries are kept.
    pub fn resize_cq(&mut self, cq: CqId, capacity: u32) -> Result<(), ResourceError> {
        attribute("cqe", capacity, self.limits.max_cqe)?;
        let cq = self.cqs.get(cq).ok_or(ResourceError::Unknown(Object::CompletionQueue))?;
        cq.ring.resize(capacity).map_err(|waiting| ResourceError::InUse(Object::CompletionQueue, waiting))
    }

    /// Destroys a completion queue that no queue pair uses.
    pub fn destroy_cq(&mut self, cq: CqId) -> Result<(), ResourceError> {
        let unknown = ResourceError::Unknown(Object::CompletionQueue);
        match self.cqs.get(cq).ok_or(unknown)?.users {
            0 => self.cqs.remove(cq).map(|_| ()).ok_or(unknown),
            users => Err(ResourceError::InUse(Object::CompletionQueue, users)),
        }
    }

    /// Creates a shared receive queue.
    pub fn create_srq(&mut self, attributes: &SrqAttributes) -> Result<SrqId, ResourceError> {
        attribute("max_wr", attributes.max_wr, self.limits.max_srq_wr)?;
        attribute("max_sge", attributes.max_sge, self.limits.max_sge)?;
        let unknown = ResourceError::Unknown(Object::ProtectionDomain);
        let domain = self.shared.domains.get_mut(attributes.pd).ok_or(unknown)?;
        let full = ResourceError::TooMany { object: Object::SharedReceiveQueue, limit: self.limits.max_srq };
        let srq = self.shared.srqs.insert_with(|id| SharedReceiveQueue::new(id, attributes)).ok_or(full)?;
        domain.srqs += 1;
        Ok(srq)
    }

    /// The current attributes of a shared receive queue, and its number of posted receives.
    pub fn query_srq(&self, srq: SrqId) -> Result<(SrqAttributes, usize), ResourceError> {
        let srq = self.shared.srqs.get(srq).ok_or(ResourceError::Unknown(Object::SharedReceiveQueue))?;
        Ok((srq.attributes(), srq.len()))
    }

    /// Changes the capacity of a shared receive queue.
    pub fn resize_srq(&mut self, srq: SrqId, max_wr: u32) -> Result<(), ResourceError> {
        attribute("max_wr", max_wr, self.limits.max_srq_wr)?;
        let srq = self.shared.srqs.get_mut(srq).ok_or(ResourceError::Unknown(Object::SharedReceiveQueue))?;
        srq.resize(max_wr).map_err(|posted| ResourceError::InUse(Object::SharedReceiveQueue, posted))
    }

    /// Arms the limit event of a shared receive queue; 0 disarms it.
    pub fn arm_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), ResourceError> {
        let srq = self.shared.srqs.get_mut(srq).ok_or(ResourceError::Unknown(Object::SharedReceiveQueue))?;
        srq.arm_limit(limit, &mut self.shared.events);
        Ok(())
    }

    /// Destroys a shared receive queue that no queue pair uses; posted receives are dropped without completions.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), ResourceError> {
        let unknown = ResourceError::Unknown(Object::SharedReceiveQueue);
        let SharedReceiveQueue { pd, users, .. } = *self.shared.srqs.get(srq).ok_or(unknown)?;
        if users > 0 {
            return Err(ResourceError::InUse(Object::SharedReceiveQueue, users));
        }
        self.shared.srqs.remove(srq);
        if let Some(domain) = self.shared.domains.get_mut(pd) {
            domain.srqs -= 1;
        }
        Ok(())
    }

    /// Creates an idle queue pair.
    pub fn create_qp(&mut self, attributes: QpAttributes) -> Result<QpId, ResourceError> {
        let limits = &self.limits;
        let size = attributes.options;
        attribute("max_send_wr", size.max_send_wr, limits.max_qp_wr)?;
        up_to("max_send_sge", size.max_send_sge, limits.max_sge)?;
        up_to("max_inline_data", size.max_inline_data, limits.max_inline_data)?;
        if attributes.srq.is_none() {
            up_to("max_recv_wr", size.max_recv_wr, limits.max_qp_wr)?;
            up_to("max_recv_sge", size.max_recv_sge, limits.max_sge)?;
        }
        let full = ResourceError::TooMany { object: Object::QueuePair, limit: limits.max_qp };
        let unknown_cq = ResourceError::Unknown(Object::CompletionQueue);
        let send_ring = self.cqs.get(attributes.send_cq).ok_or(unknown_cq)?.ring.clone();
        let recv_ring = self.cqs.get(attributes.recv_cq).ok_or(unknown_cq)?.ring.clone();
        let unknown_pd = ResourceError::Unknown(Object::ProtectionDomain);
        self.shared.domains.get(attributes.pd).ok_or(unknown_pd)?;
        if let Some(srq) = attributes.srq {
            let srq = self.shared.srqs.get(srq).ok_or(ResourceError::Unknown(Object::SharedReceiveQueue))?;
            if srq.pd != attributes.pd {
                return Err(ResourceError::ForeignSrq);
            }
        }
        let make = |id| Box::new(QueuePair::new(id, attributes, send_ring, recv_ring));
        let qp = self.qps.insert_with(make).ok_or(full)?;
        self.count_users(&attributes, |n| *n += 1);
        Ok(qp)
    }

    fn count_users(&mut self, attributes: &QpAttributes, change: impl Fn(&mut usize)) {
        for cq in [attributes.send_cq, attributes.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(cq) {
                change(&mut cq.users);
            }
        }
        if let Some(domain) = self.shared.domains.get_mut(attributes.pd) {
            change(&mut domain.qps);
        }
        if let Some(srq) = attributes.srq.and_then(|srq| self.shared.srqs.get_mut(srq)) {
            change(&mut srq.users);
        }
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
        qp.tx.ending = Ending::Finished;
        qp.end(false, None, &mut self.shared);
        self.end_overflowed();
        Ok(())
    }

    /// Destroys a queue pair. Its work is dropped without completions. Its connection is reset, unless our direction
    /// is finished or a graceful close has drained, so that only TCP has work left.
    pub fn destroy_qp(&mut self, qp: QpId) -> Result<(), ResourceError> {
        let mut gone = self.qps.remove(qp).ok_or(ResourceError::Unknown(Object::QueuePair))?;
        self.destroyed += gone.counters;
        self.count_users(&gone.attributes, |n| *n -= 1);
        self.shared.keys.close_windows_of(qp);
        if let Some(srq) = gone.attributes.srq.and_then(|srq| self.shared.srqs.get_mut(srq)) {
            srq.waiting.retain(|waiting| *waiting != qp);
        }
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
        let qp = self.qps.get_mut(qp).ok_or(PostError::Unknown)?;
        if qp.flushes_sends() {
            qp.sq.post(request, Progress::Done(WcStatus::Flushed))?;
            qp.complete_sends(&mut self.shared);
            self.end_overflowed();
            return Ok(());
        }
        if !matches!(qp.phase, Phase::Open(_)) {
            return Err(PostError::NotConnected);
        }
        if qp.ord == 0 && request.operation.is_answered() {
            return Err(PostError::NoReads);
        }
        if qp.versions == Versions::Rdmac && request.operation.is_extension() {
            return Err(PostError::NoExtensions);
        }
        qp.sq.post(request, Progress::Posted)?;
        if request.operation.is_local() {
            qp.do_local_work(&mut self.shared);
            self.end_overflowed();
        } else {
            self.shared.wake(qp.conn);
        }
        Ok(())
    }

    /// Posts to a queue pair's own receive queue.
    pub fn post_recv(&mut self, qp: QpId, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let qp = self.qps.get_mut(qp).ok_or(PostError::Unknown)?;
        if qp.flushes_receives() {
            qp.rq.check(request)?;
            let completion = qp.completion(request.wr_id, WcStatus::Flushed, Opcode::Recv);
            qp.push_recv(completion, &mut self.shared);
            self.end_overflowed();
            return Ok(());
        }
        qp.rq.post(request)?;
        if qp.rx.withheld.take().is_some() {
            self.shared.resumes.extend(qp.conn);
        }
        Ok(())
    }

    /// Posts to a shared receive queue.
    pub fn post_srq_recv(&mut self, srq: SrqId, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let queue = self.shared.srqs.get_mut(srq).ok_or(PostError::Unknown)?;
        queue.post(request)?;
        if !queue.waiting.is_empty() {
            self.shared.refilled.push(srq);
        }
        Ok(())
    }
}
