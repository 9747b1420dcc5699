//! Protection domains and memory regions.

use std::{fmt, io, sync::Arc};

use xwarp_rnic::{
    ddp::{STag, TaggedOffset},
    memory::{AccessError, Memory, Pages},
    rnic::{Access, Object, PdId, Registration, Registry, Remote, ResourceError, Sge},
};

use super::{failure::destroyed, handle::Device};

/// An error of [`ProtectionDomain::allocate`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The operating system refuses the memory.
    #[error("cannot allocate memory")]
    Allocate(#[from] io::Error),
    /// The device refuses the registration.
    #[error(transparent)]
    Resource(#[from] ResourceError),
}

/// Options of a registration.
#[derive(Debug, Clone, Copy, Default)]
pub struct RegionOptions {
    /// Tagged offset of the first byte, in work requests and at peers. 0 by default; programs that use addresses set it
    /// to the address.
    pub base: TaggedOffset,
    /// The only queue pair whose peer may use the region (RFC 5041 section 8.2); by default the peers of all queue pairs
    /// of the domain.
    pub only_for: Option<xwarp_rnic::rnic::QpId>,
}

/// A protection domain. Regions and queue pairs of different domains do not work together. Clones are handles to the
/// same domain.
#[derive(Clone)]
pub struct ProtectionDomain(pub(super) Arc<PdInner>);

pub(super) struct PdInner {
    pub(super) device: Device,
    pub(super) id: PdId,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        let freed = self.device.shared().registry(|registry| registry.dealloc_pd(self.id));
        destroyed(freed, "objects hold their domain");
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProtectionDomain").field(&self.0.id).finish()
    }
}

impl ProtectionDomain {
    pub(super) fn create(device: &Device) -> Result<Self, ResourceError> {
        let id = device.shared().registry(Registry::alloc_pd)?;
        Ok(Self(Arc::new(PdInner { device: device.clone(), id })))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Allocates `len` zeroed bytes and registers them.
    pub fn allocate(&self, len: usize, access: Access) -> Result<MemoryRegion, RegisterError> {
        Ok(self.register(Memory::anonymous(len, Pages::Normal)?, access)?)
    }

    /// Registers memory that was allocated by [`Memory::anonymous`] or borrowed by [`Memory::borrowed`], whose contract
    /// ends when the region is dropped.
    pub fn register(&self, memory: Memory, access: Access) -> Result<MemoryRegion, ResourceError> {
        self.register_with(memory, access, RegionOptions::default())
    }

    /// Registers `memory` with options.
    pub fn register_with(
        &self,
        memory: Memory,
        access: Access,
        options: RegionOptions,
    ) -> Result<MemoryRegion, ResourceError> {
        let RegionOptions { base, only_for } = options;
        let registration =
            Registration { pd: self.0.id, memory: memory.clone(), access, base, stream: only_for };
        let key = self.0.device.shared().registry(|registry| registry.register(registration))?;
        Ok(MemoryRegion { pd: self.clone(), memory, key, base, access })
    }
}

/// A registered region of memory. Dropping it ends the registration immediately: work requests and peers that still name
/// the region, or a window bound to it, get an error. ([`deregister`](Self::deregister) refuses while windows are bound,
/// as `ibv_dereg_mr` does.)
///
/// Peers may write the memory at any time, so its bytes are accessed by copies and atomic words, never by reference (see
/// [`xwarp_rnic::memory`]). Offsets of these methods count from the first byte of the region.
pub struct MemoryRegion {
    pd: ProtectionDomain,
    memory: Memory,
    key: STag,
    base: TaggedOffset,
    access: Access,
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("key", &self.key)
            .field("memory", &self.memory)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // Fails only when the region is already deregistered.
        let _ = self.pd.0.device.engines().end_key(self.key, Registry::revoke);
    }
}

impl MemoryRegion {
    /// Ends the registration, unless windows are bound to the region: then returns the region with the error.
    pub fn deregister(self) -> Result<(), (Self, ResourceError)> {
        let ended = self.pd.0.device.engines().end_key(self.key, Registry::deregister);
        ended.map_err(|error| (self, error))
    }

    /// Registers the region again under the same key: in `pd`, with `memory`, `access` and `options`. When this returns, nothing
    /// accesses the former memory by the key any more. Fails while windows are bound to the region, and for a domain of another
    /// device; a failure changes nothing.
    pub fn reregister(
        &mut self,
        pd: &ProtectionDomain,
        memory: Memory,
        access: Access,
        options: RegionOptions,
    ) -> Result<(), ResourceError> {
        if !pd.device().is(self.pd.device()) {
            return Err(ResourceError::Unknown(Object::ProtectionDomain));
        }
        let RegionOptions { base, only_for } = options;
        let again = Registration { pd: pd.0.id, memory: memory.clone(), access, base, stream: only_for };
        let engines = self.pd.0.device.engines();
        engines.end_key(self.key, |registry, key| registry.reregister(key, again))?;
        (self.pd, self.memory, self.base, self.access) = (pd.clone(), memory, base, access);
        Ok(())
    }

    /// The key of the region, for work requests and peers.
    pub fn key(&self) -> STag {
        self.key
    }

    /// The access rights.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// The memory, for atomic words, copies between memories, and the address.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The piece of `len` bytes at `offset`, for a work request. Bounds are checked when the piece is used. A length above
    /// 2^32 - 1 gives [`Sge::TOO_LONG`], which no post accepts ([`PostError::MessageTooLong`](crate::PostError::MessageTooLong)).
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        let of_len = |len| Sge { key: self.key, offset: self.at(offset), len };
        u32::try_from(len).map_or(Sge::TOO_LONG, of_len)
    }

    /// The place at `offset`, to be advertised to a peer.
    pub fn remote(&self, offset: usize) -> Remote {
        Remote { key: self.key, offset: self.at(offset) }
    }

    fn at(&self, offset: usize) -> TaggedOffset {
        self.base.wrapping_add(offset as u64)
    }

    /// Fills `out` with the bytes at `offset`.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        self.memory.read(offset, out)
    }

    /// Copies all of `bytes` to `offset`.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.memory.write(offset, bytes)
    }

    /// A copy of the `len` bytes at `offset`.
    pub fn to_vec(&self, offset: usize, len: usize) -> Result<Vec<u8>, AccessError> {
        if !self.memory.contains(offset, len) {
            return Err(AccessError::OutOfBounds { offset, len, size: self.len() });
        }
        let mut bytes = vec![0; len];
        self.memory.read(offset, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use xwarp_rnic::rnic::{AsyncEvent, QueuePairOptions};

    use super::*;
    use crate::{
        api::{DeviceOptions, QueuePair},
        interface::Interface,
        sim,
    };

    /// A device with two engines whose peer is not used.
    fn device() -> Device {
        let [parts, _] = sim::queues(sim::WireConfig::default(), 1500, 2).unwrap();
        let parts = parts.into_iter().map(|part| Box::new(part) as Box<dyn Interface>).collect();
        Device::over_parts(parts, DeviceOptions::default()).unwrap()
    }

    #[test]
    fn deregistering_waits_for_each_engine_and_registering_does_not() {
        let device = device();
        let pd = device.create_pd().unwrap();
        // Like an engine that writes a received segment.
        for busy in device.engines().all() {
            let region = pd.allocate(64, Access::REMOTE_WRITE).unwrap();
            let engine = busy.lock();
            let (end, ended) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(move || {
                    drop(region);
                    end.send(()).unwrap();
                });
                let early = ended.recv_timeout(Duration::from_millis(50));
                assert!(early.is_err(), "the engine may still write to the memory");
                let fresh = pd.allocate(64, Access::REMOTE_WRITE).unwrap();
                drop(engine);
                ended.recv_timeout(Duration::from_secs(20)).unwrap();
                drop(fresh);
            });
        }
    }

    #[test]
    fn objects_serve_all_engines_of_their_device_and_no_other_device() {
        let (ours, foreign) = (device(), device());
        let (pd, cq) = (ours.create_pd().unwrap(), ours.create_cq(8).unwrap());
        let srq = pd.create_srq(4, 1).unwrap();
        let options = QueuePairOptions::default();
        let qps = [(); 3].map(|()| pd.create_qp_with_srq(&cq, &cq, &srq, options).unwrap());
        assert_eq!([&qps[0], &qps[1], &qps[2]].map(QueuePair::engine), [0, 1, 0]);
        assert_ne!(qps[0].id(), qps[1].id());
        let id = pd.0.id;
        let busy = ours.shared().registry(|registry| registry.dealloc_pd(id));
        assert_eq!(busy, Err(ResourceError::InUse(Object::ProtectionDomain, 4)));
        let foreign_cq = foreign.create_cq(8).unwrap();
        let refused = pd.create_qp(&cq, &foreign_cq, options).unwrap_err();
        assert_eq!(refused, ResourceError::Unknown(Object::CompletionQueue));
        let foreign_srq = foreign.create_pd().unwrap().create_srq(4, 1).unwrap();
        let refused = pd.create_qp_with_srq(&cq, &cq, &foreign_srq, options).unwrap_err();
        assert_eq!(refused, ResourceError::ForeignSrq);
        drop((qps, srq, pd));
        let gone = ours.shared().registry(|registry| registry.dealloc_pd(id));
        assert_eq!(gone, Err(ResourceError::Unknown(Object::ProtectionDomain)));
    }

    #[test]
    fn a_panic_of_one_engine_fails_all_engines_of_the_device() {
        let device = device();
        let (events, pd, cq) =
            (device.async_events(), device.create_pd().unwrap(), device.create_cq(8).unwrap());
        let qps = [(); 2].map(|()| pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap());
        device.engines().get(1).with(|_, _| -> () { panic!("for this test") });
        assert!(device.failure().is_some());
        for (qp, engine) in qps.iter().zip(device.engines().all()) {
            assert!(engine.failed());
            assert_eq!(qp.reset(), Err(ResourceError::DeviceFailed));
            assert!(!engine.interface().up, "its part of the interface is closed");
        }
        let fatal = std::iter::from_fn(|| events.poll()).filter(|event| *event == AsyncEvent::DeviceFatal);
        assert_eq!(fatal.count(), 1);
    }
}
