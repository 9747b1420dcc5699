//! Protection domains and memory regions.

use std::{fmt, io, sync::Arc};

use super::device::{Device, destroyed};
use crate::{
    ddp::{STag, TaggedOffset},
    memory::{AccessError, Memory, Pages},
    rnic::{Access, PdId, Registration, Remote, ResourceError, Sge},
};

/// Why memory was not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// There is no such memory to be had.
    #[error("allocating memory: {0}")]
    Allocate(#[from] io::Error),
    /// The engine refuses.
    #[error(transparent)]
    Resource(#[from] ResourceError),
}

/// How to register memory, beyond the rights on it.
#[derive(Debug, Clone, Copy, Default)]
pub struct RegionOptions {
    /// The offset that peers and work requests use for the first byte. 0 by default; programs that think
    /// in addresses take the address.
    pub base: TaggedOffset,
    /// Only the peer of this queue pair may use the region (RFC 5041 section 8.2); by default every peer
    /// of the domain's queue pairs.
    pub only_for: Option<crate::rnic::QpId>,
}

/// A protection domain: regions and queue pairs of different ones do not work together. Clones are
/// handles to the same domain.
#[derive(Clone)]
pub struct ProtectionDomain(pub(super) Arc<PdInner>);

pub(super) struct PdInner {
    pub(super) device: Device,
    pub(super) id: PdId,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        let freed = self.device.shared().with(|state, _| state.engine.dealloc_pd(self.id));
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
        let id = device.shared().with(|state, _| state.engine.alloc_pd())?;
        Ok(Self(Arc::new(PdInner { device: device.clone(), id })))
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Allocates `len` zeroed bytes and registers them.
    pub fn allocate(&self, len: usize, access: Access) -> Result<MemoryRegion, RegisterError> {
        Ok(self.register(Memory::anonymous(len, Pages::Normal)?, access)?)
    }

    /// Registers `memory`: of our own ([`Memory::anonymous`]) or borrowed ([`Memory::borrowed`], whose
    /// contract ends when the region is dropped).
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
        let key = self.0.device.shared().with(|state, _| state.engine.register(registration))?;
        Ok(MemoryRegion { pd: self.clone(), memory, key, base, access })
    }
}

/// Registered memory. Dropping it ends the registration at once and totally: whatever still names it, here
/// or at a peer, fails, and so does what names a window that is bound to it. (The verb of ibverbs that refuses
/// while windows are bound is [`deregister`](Self::deregister).)
///
/// Peers may write it at any moment, so its bytes are reached by copies and atomic words, never by
/// reference (see [`crate::memory`]). Offsets of these methods count from the first byte.
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
        // Fails only when it was deregistered, which leaves nothing to end.
        let _ = self.pd.0.device.shared().with(|state, _| state.engine.revoke(self.key));
    }
}

impl MemoryRegion {
    /// Ends the registration, unless windows are bound to it: then it comes back with the reason.
    pub fn deregister(self) -> Result<(), (Self, ResourceError)> {
        let ended = self.pd.0.device.shared().with(|state, _| state.engine.deregister(self.key));
        ended.map_err(|error| (self, error))
    }

    /// The key that work requests, here and at the peer, name it by.
    pub fn key(&self) -> STag {
        self.key
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Its protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has no byte at all.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// The memory itself: atomic words, copies between memories, the address.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The piece of `len` bytes from `offset` on, for a work request. It is checked when it is used.
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { key: self.key, offset: self.at(offset), len: u32::try_from(len).unwrap_or(u32::MAX) }
    }

    /// The place `offset` bytes from the start, to be told to a peer.
    pub fn remote(&self, offset: usize) -> Remote {
        Remote { key: self.key, offset: self.at(offset) }
    }

    fn at(&self, offset: usize) -> TaggedOffset {
        self.base.wrapping_add(offset as u64)
    }

    /// Copies the bytes from `offset` on into `out`, all of it.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        self.memory.read(offset, out)
    }

    /// Copies `bytes` to `offset`, all of them.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.memory.write(offset, bytes)
    }

    /// A copy of the `len` bytes from `offset` on.
    pub fn to_vec(&self, offset: usize, len: usize) -> Result<Vec<u8>, AccessError> {
        if !self.memory.contains(offset, len) {
            return Err(AccessError::OutOfBounds { offset, len, size: self.len() });
        }
        let mut bytes = vec![0; len];
        self.memory.read(offset, &mut bytes)?;
        Ok(bytes)
    }
}
