//! [`Registry`]: the objects that the engines of one device share, and the ids of their queue pairs.
//!
//! Every verb that creates or ends an object takes the registry's lock, and so do work requests that manage memory and Sends
//! with Invalidate. Other work takes it once for each key that an engine has not used before. A thread may hold the lock of an
//! engine when it takes this one, never the other way round.

use std::sync::{
    Arc,
    atomic::{AtomicU16, Ordering},
};

use parking_lot::Mutex;
use xwarp_tcp::secret::Secret;

use super::{
    Access, CompletionRing, CqId, FastRegistration, Limits, Notify, Object, PdId, QpAttributes, QpId,
    Registration, ResourceError, SrqAttributes, SrqId,
    grant::Grant,
    keys::{KeyTable, User},
    receive_pool::ReceivePool,
    table::Table,
};
use crate::{ddp::STag, rdmap::RdmapError};

/// A protection domain: the number of objects that use it.
#[derive(Debug, Default)]
struct Domain {
    /// Regions and windows.
    keys: usize,
    srqs: usize,
    qps: usize,
}

/// A completion queue.
#[derive(Debug)]
struct Cq {
    ring: Arc<CompletionRing>,
    users: usize,
}

#[derive(Debug)]
struct Objects {
    domains: Table<PdId, Domain>,
    keys: KeyTable,
    cqs: Table<CqId, Cq>,
    srqs: Table<SrqId, Arc<ReceivePool>>,
    /// Queue pairs, with their domains.
    qps: Table<QpId, PdId>,
}

/// Objects that the engines of one device share: protection domains, keys, completion queues, shared receive queues; and the
/// ids of queue pairs.
#[derive(Debug)]
pub struct Registry {
    limits: Limits,
    /// Engines over this registry so far.
    engines: AtomicU16,
    objects: Mutex<Objects>,
}

/// The parts of a new queue pair that the registry creates.
pub(crate) struct NewQueuePair {
    pub(crate) id: QpId,
    pub(crate) send_ring: Arc<CompletionRing>,
    pub(crate) recv_ring: Arc<CompletionRing>,
    pub(crate) receives: Option<Arc<ReceivePool>>,
}

pub(crate) fn attribute(attribute: &'static str, value: u32, limit: u32) -> Result<(), ResourceError> {
    let (value, limit) = (u64::from(value), u64::from(limit));
    if value == 0 || value > limit {
        Err(ResourceError::Attribute { attribute, value, limit })
    } else {
        Ok(())
    }
}

pub(crate) fn up_to(name: &'static str, value: u32, limit: u32) -> Result<(), ResourceError> {
    if value == 0 { Ok(()) } else { attribute(name, value, limit) }
}

impl Registry {
    /// Creates a registry without objects. The keys of its regions are drawn from `secret`.
    pub fn new(limits: Limits, secret: &Secret) -> Self {
        let objects = Objects {
            domains: Table::new(limits.max_pd),
            keys: KeyTable::new(&limits, secret),
            cqs: Table::new(limits.max_cq),
            srqs: Table::new(limits.max_srq),
            qps: Table::new(limits.max_qp),
        };
        Self { limits, engines: AtomicU16::new(0), objects: Mutex::new(objects) }
    }

    /// The number of a new engine, of which there are at most [`MAX_ENGINES`](super::MAX_ENGINES).
    pub(crate) fn next_engine(&self) -> u16 {
        self.engines.fetch_add(1, Ordering::Relaxed)
    }

    /// The limits of objects and queue sizes.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Number of regions, including fast regions.
    pub(crate) fn regions(&self) -> u32 {
        self.objects.lock().keys.regions()
    }

    /// The grant of a tag, if it is valid.
    pub(crate) fn grant(&self, stag: STag) -> Option<Arc<Grant>> {
        self.objects.lock().keys.grant(stag)
    }

    /// Calls `f` with the key table.
    pub(crate) fn with_keys<R>(&self, f: impl FnOnce(&mut KeyTable) -> R) -> R {
        f(&mut self.objects.lock().keys)
    }

    /// See [`KeyTable::invalidate_remotely`].
    pub(crate) fn invalidate_remotely(&self, user: User, stag: STag) -> Result<(), RdmapError> {
        let mut objects = self.objects.lock();
        let alone = objects.domains.get(user.pd).is_some_and(|domain| domain.qps == 1);
        objects.keys.invalidate_remotely(user, stag, alone)
    }

    /// Creates a protection domain.
    pub fn alloc_pd(&self) -> Result<PdId, ResourceError> {
        let limit = self.limits.max_pd;
        let object = Object::ProtectionDomain;
        let pd = self.objects.lock().domains.insert_with(|_| Domain::default());
        pd.ok_or(ResourceError::TooMany { object, limit })
    }

    /// Destroys an unused protection domain.
    pub fn dealloc_pd(&self, pd: PdId) -> Result<(), ResourceError> {
        let unknown = ResourceError::Unknown(Object::ProtectionDomain);
        let mut objects = self.objects.lock();
        let domain = objects.domains.get(pd).ok_or(unknown)?;
        let users = domain.keys + domain.srqs + domain.qps;
        if users > 0 {
            return Err(ResourceError::InUse(Object::ProtectionDomain, users));
        }
        objects.domains.remove(pd).map(|_| ()).ok_or(unknown)
    }

    /// Registers memory. The returned key is both local and remote key.
    pub fn register(&self, registration: Registration) -> Result<STag, ResourceError> {
        let pd = registration.pd;
        registration.check()?;
        let (limit, stream) = (self.limits.max_mr, registration.stream);
        self.add_key(pd, stream, Object::Region, limit, |keys| keys.insert_region(registration))
    }

    /// Registers a region again under its key, with other memory, rights or domain. Fails while windows are bound to the region;
    /// a failure changes nothing. As with [`Self::revoke`], accesses to the former memory have ended when `forget` has been called
    /// for each engine.
    pub fn reregister(&self, key: STag, registration: Registration) -> Result<(), ResourceError> {
        let (pd, stream) = (registration.pd, registration.stream);
        registration.check()?;
        let mut objects = self.objects.lock();
        match objects.keys.bound_windows(key) {
            Some(0) => {}
            Some(windows) => return Err(ResourceError::InUse(Object::Region, windows)),
            None => return Err(ResourceError::UnknownKey(key)),
        }
        let Objects { domains, keys, .. } = objects.owners(pd, stream)?;
        let domain = domains.get_mut(pd).ok_or(ResourceError::Unknown(Object::ProtectionDomain))?;
        let before = keys.replace_region(key, registration);
        domain.keys += usize::from(before.is_some());
        objects.key_removed(key, before)
    }

    /// Creates a fast region. It is invalid until a work request registers memory for it.
    pub fn alloc_fast_region(&self, registration: FastRegistration) -> Result<STag, ResourceError> {
        let FastRegistration { pd, max_pieces, stream } = registration;
        attribute("max_pieces", max_pieces, self.limits.max_fast_pieces)?;
        let limit = self.limits.max_mr;
        self.add_key(pd, stream, Object::Region, limit, |keys| {
            keys.insert_fast_region(pd, max_pieces, stream)
        })
    }

    /// Creates an unbound window (type 2 of the verbs: work requests bind it, to one stream).
    pub fn alloc_window(&self, pd: PdId) -> Result<STag, ResourceError> {
        let limit = self.limits.max_mw;
        self.add_key(pd, None, Object::Window, limit, |keys| keys.insert_window(pd))
    }

    /// Adds a key to a domain. A queue pair to which a region is limited must belong to the same domain.
    fn add_key(
        &self,
        pd: PdId,
        stream: Option<QpId>,
        object: Object,
        limit: u32,
        insert: impl FnOnce(&mut KeyTable) -> Option<STag>,
    ) -> Result<STag, ResourceError> {
        let mut objects = self.objects.lock();
        let Objects { domains, keys, .. } = objects.owners(pd, stream)?;
        let domain = domains.get_mut(pd).ok_or(ResourceError::Unknown(Object::ProtectionDomain))?;
        let key = insert(keys).ok_or(ResourceError::TooMany { object, limit })?;
        domain.keys += 1;
        Ok(key)
    }

    /// Deregisters a region, fast or not. Fails while windows are bound to the region; see [`Self::revoke`].
    pub fn deregister(&self, key: STag) -> Result<(), ResourceError> {
        self.objects.lock().deregister(key)
    }

    /// Deregisters a region and ends the access of the windows that are bound to it. The key gives no access any
    /// longer, even to work that was posted before. Accesses in progress have ended when
    /// [`forget`](super::Rnic::forget) has been called for each engine; until then the memory must not be reused.
    pub fn revoke(&self, key: STag) -> Result<(), ResourceError> {
        self.objects.lock().revoke(key)
    }

    /// Destroys a window, bound or not. As with [`Self::revoke`], accesses in progress have ended when `forget` has
    /// been called for each engine.
    pub fn dealloc_window(&self, key: STag) -> Result<(), ResourceError> {
        let mut objects = self.objects.lock();
        let pd = objects.keys.remove_window(key);
        objects.key_removed(key, pd)
    }

    /// Creates a completion queue of `capacity` entries; `notify` is called when the queue is armed and an entry is
    /// added.
    pub fn create_cq(
        &self,
        capacity: u32,
        notify: Option<Arc<dyn Notify>>,
    ) -> Result<(CqId, Arc<CompletionRing>), ResourceError> {
        attribute("cqe", capacity, self.limits.max_cqe)?;
        let ring = Arc::new(CompletionRing::new(capacity, notify));
        let cq = Cq { ring: ring.clone(), users: 0 };
        let full = ResourceError::TooMany { object: Object::CompletionQueue, limit: self.limits.max_cq };
        Ok((self.objects.lock().cqs.insert_with(|_| cq).ok_or(full)?, ring))
    }

    /// Changes the capacity of a completion queue. Handles to its ring stay valid, and waiting entries are kept.
    pub fn resize_cq(&self, cq: CqId, capacity: u32) -> Result<(), ResourceError> {
        attribute("cqe", capacity, self.limits.max_cqe)?;
        let objects = self.objects.lock();
        let cq = objects.cqs.get(cq).ok_or(ResourceError::Unknown(Object::CompletionQueue))?;
        cq.ring.resize(capacity).map_err(|waiting| ResourceError::InUse(Object::CompletionQueue, waiting))
    }

    /// Destroys a completion queue that no queue pair uses.
    pub fn destroy_cq(&self, cq: CqId) -> Result<(), ResourceError> {
        let unknown = ResourceError::Unknown(Object::CompletionQueue);
        let mut objects = self.objects.lock();
        match objects.cqs.get(cq).ok_or(unknown)?.users {
            0 => objects.cqs.remove(cq).map(|_| ()).ok_or(unknown),
            users => Err(ResourceError::InUse(Object::CompletionQueue, users)),
        }
    }

    /// Creates a shared receive queue.
    pub fn create_srq(&self, attributes: &SrqAttributes) -> Result<Arc<ReceivePool>, ResourceError> {
        let limits = &self.limits;
        attribute("max_wr", attributes.max_wr, limits.max_srq_wr)?;
        attribute("max_sge", attributes.max_sge, limits.max_sge)?;
        let mut objects = self.objects.lock();
        let Objects { domains, srqs, .. } = &mut *objects;
        let unknown = ResourceError::Unknown(Object::ProtectionDomain);
        let domain = domains.get_mut(attributes.pd).ok_or(unknown)?;
        let full = ResourceError::TooMany { object: Object::SharedReceiveQueue, limit: limits.max_srq };
        let id = srqs.insert_with(|id| Arc::new(ReceivePool::new(id, attributes))).ok_or(full)?;
        domain.srqs += 1;
        srqs.get(id).map(Arc::clone).ok_or(full)
    }

    /// A shared receive queue.
    pub fn srq(&self, srq: SrqId) -> Result<Arc<ReceivePool>, ResourceError> {
        let unknown = ResourceError::Unknown(Object::SharedReceiveQueue);
        self.objects.lock().srqs.get(srq).map(Arc::clone).ok_or(unknown)
    }

    /// Changes the capacity of a shared receive queue.
    pub fn resize_srq(&self, srq: SrqId, max_wr: u32) -> Result<(), ResourceError> {
        attribute("max_wr", max_wr, self.limits.max_srq_wr)?;
        let in_use = |posted| ResourceError::InUse(Object::SharedReceiveQueue, posted);
        self.srq(srq)?.resize(max_wr).map_err(in_use)
    }

    /// Destroys a shared receive queue that no queue pair uses; posted receives are dropped without completions.
    pub fn destroy_srq(&self, srq: SrqId) -> Result<(), ResourceError> {
        let unknown = ResourceError::Unknown(Object::SharedReceiveQueue);
        let mut objects = self.objects.lock();
        let users = objects.srqs.get(srq).ok_or(unknown)?.users();
        if users > 0 {
            return Err(ResourceError::InUse(Object::SharedReceiveQueue, users));
        }
        let pd = objects.srqs.remove(srq).ok_or(unknown)?.pd();
        if let Some(domain) = objects.domains.get_mut(pd) {
            domain.srqs -= 1;
        }
        Ok(())
    }

    /// Gives a new queue pair its id, its completion rings and its shared receive queue.
    pub(crate) fn add_qp(&self, attributes: &QpAttributes) -> Result<NewQueuePair, ResourceError> {
        let mut objects = self.objects.lock();
        let unknown_cq = ResourceError::Unknown(Object::CompletionQueue);
        let send_ring = objects.cqs.get(attributes.send_cq).ok_or(unknown_cq)?.ring.clone();
        let recv_ring = objects.cqs.get(attributes.recv_cq).ok_or(unknown_cq)?.ring.clone();
        objects.domains.get(attributes.pd).ok_or(ResourceError::Unknown(Object::ProtectionDomain))?;
        let unknown_srq = ResourceError::Unknown(Object::SharedReceiveQueue);
        let receives = match attributes.srq {
            Some(srq) => Some(objects.srqs.get(srq).map(Arc::clone).ok_or(unknown_srq)?),
            None => None,
        };
        if receives.as_ref().is_some_and(|receives| receives.pd() != attributes.pd) {
            return Err(ResourceError::ForeignSrq);
        }
        let full = ResourceError::TooMany { object: Object::QueuePair, limit: self.limits.max_qp };
        let id = objects.qps.insert_with(|_| attributes.pd).ok_or(full)?;
        objects.count_qp(attributes, |users| *users += 1);
        if let Some(receives) = &receives {
            receives.add_user();
        }
        Ok(NewQueuePair { id, send_ring, recv_ring, receives })
    }

    /// Ends the id of a destroyed queue pair, and the windows of its stream.
    pub(crate) fn remove_qp(&self, qp: QpId, attributes: &QpAttributes) {
        let mut objects = self.objects.lock();
        objects.qps.remove(qp);
        objects.count_qp(attributes, |users| *users -= 1);
        if let Some(receives) = attributes.srq.and_then(|srq| objects.srqs.get(srq)) {
            receives.remove_user();
        }
        objects.keys.close_windows_of(qp);
    }

    /// Notifies the owners of all completion queues.
    pub(crate) fn fire_all(&self) {
        for cq in self.objects.lock().cqs.iter() {
            cq.ring.fire();
        }
    }
}

impl Registration {
    fn check(&self) -> Result<(), ResourceError> {
        let wraps = self.base.checked_add(self.memory.len() as u64).is_none();
        if wraps || self.access.intersects(Access::WRITES) && !self.memory.is_writable() {
            return Err(ResourceError::Memory);
        }
        Ok(())
    }
}

impl Objects {
    /// These objects, if the queue pair to which a region is limited belongs to the region's domain.
    fn owners(&mut self, pd: PdId, stream: Option<QpId>) -> Result<&mut Self, ResourceError> {
        if stream.is_some_and(|qp| self.qps.get(qp) != Some(&pd)) {
            return Err(ResourceError::Unknown(Object::QueuePair));
        }
        Ok(self)
    }

    fn deregister(&mut self, key: STag) -> Result<(), ResourceError> {
        match self.keys.bound_windows(key) {
            Some(0) => self.revoke(key),
            Some(windows) => Err(ResourceError::InUse(Object::Region, windows)),
            None => Err(ResourceError::UnknownKey(key)),
        }
    }

    fn revoke(&mut self, key: STag) -> Result<(), ResourceError> {
        let pd = self.keys.remove_region(key);
        self.key_removed(key, pd)
    }

    fn key_removed(&mut self, key: STag, pd: Option<PdId>) -> Result<(), ResourceError> {
        let domain = self.domains.get_mut(pd.ok_or(ResourceError::UnknownKey(key))?);
        if let Some(domain) = domain {
            domain.keys -= 1;
        }
        Ok(())
    }

    fn count_qp(&mut self, attributes: &QpAttributes, change: impl Fn(&mut usize)) {
        for cq in [attributes.send_cq, attributes.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(cq) {
                change(&mut cq.users);
            }
        }
        if let Some(domain) = self.domains.get_mut(attributes.pd) {
            change(&mut domain.qps);
        }
    }
}
