//! Memory windows and fast regions: keys that work requests make valid and invalid.
//!
//! Both are created once and then bound (or registered) repeatedly under a new key by a work request, which is executed in
//! order with the other requests of its send queue: a request posted behind it may advertise the key. A key that was
//! invalidated, here or by the peer's Send with Invalidate, grants no access; the next binding uses another key.
//!
//! ```
//! # use xwarp_verbs::{Access, MemoryRegion, PostError, QueuePair, Remote, ResourceError, STag, WorkRequest};
//! # fn lend(qp: &QueuePair, region: &MemoryRegion, window: &xwarp_verbs::MemoryWindow) -> Result<(), PostError> {
//! let key = window.next_key();
//! let binding = region.binding(4096, 512, Access::REMOTE_READ);
//! qp.post_send(&WorkRequest::bind_window(1, key, binding))?;
//! let advertised = Remote { key, offset: binding.base }.to_bytes();
//! // ... send `advertised`; when the peer has read, and does not invalidate the key itself:
//! qp.post_send(&WorkRequest::local_invalidate(2, key).signaled())?;
//! # let _ = advertised;
//! # Ok(())
//! # }
//! ```

use std::{
    fmt,
    sync::atomic::{AtomicU32, Ordering},
};

use xwarp_rnic::{
    ddp::STag,
    rnic::{Access, Binding, FastRegistration, QpId, Registry, ResourceError},
};

use super::protection::{MemoryRegion, ProtectionDomain};

/// The key of something that is opened again and again.
struct StepKey(AtomicU32);

impl StepKey {
    fn new(key: STag) -> Self {
        Self(AtomicU32::new(key.value()))
    }

    fn current(&self) -> STag {
        STag::new(self.0.load(Ordering::Relaxed))
    }

    fn next(&self) -> STag {
        let step = |value| Some(STag::new(value).next().value());
        let (Ok(before) | Err(before)) = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step);
        STag::new(before).next()
    }
}

/// Such a key with its owner, who frees what it stands for.
struct OwnedKey {
    pd: ProtectionDomain,
    key: StepKey,
    free: fn(&Registry, STag) -> Result<(), ResourceError>,
}

impl fmt::Debug for OwnedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.current().fmt(f)
    }
}

impl Drop for OwnedKey {
    fn drop(&mut self) {
        let key = self.key.current();
        let freed = self.pd.device().engines().end_key(key, self.free);
        super::failure::destroyed(freed, "only its owner frees a window or a fast region");
    }
}

/// A memory window (type 2 of the verbs): a key that grants the peer of one queue pair access to part of a region, from
/// the request that binds the window until its invalidation. Dropping the window invalidates it immediately; a binding that
/// is still queued then fails with [`WcStatus::MemoryManagement`](crate::WcStatus::MemoryManagement), and the queue pair with it.
#[derive(Debug)]
pub struct MemoryWindow(OwnedKey);

impl MemoryWindow {
    /// The key that was used last.
    pub fn key(&self) -> STag {
        self.0.key.current()
    }

    /// The key for the next binding. Keys repeat after 256 bindings.
    pub fn next_key(&self) -> STag {
        self.0.key.next()
    }

    /// The protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.0.pd
    }
}

/// Options of a fast region.
#[derive(Debug, Clone, Copy)]
pub struct FastRegionOptions {
    /// Most pieces of memory in one registration.
    pub max_pieces: u32,
    /// The only queue pair whose peer may use the region (RFC 5041 section 8.2). That peer may also invalidate the region
    /// when the domain has other queue pairs.
    pub only_for: Option<QpId>,
}

impl Default for FastRegionOptions {
    fn default() -> Self {
        Self { max_pieces: 16, only_for: None }
    }
}

/// A region that gets its memory from a work request ([`WorkRequest::fast_register`]) and loses it when it is invalidated.
/// Dropping the region invalidates it immediately.
///
/// [`WorkRequest::fast_register`]: crate::WorkRequest::fast_register
#[derive(Debug)]
pub struct FastRegion(OwnedKey);

impl FastRegion {
    /// The key that was used last.
    pub fn key(&self) -> STag {
        self.0.key.current()
    }

    /// The key for the next registration. Keys repeat after 256 registrations.
    pub fn next_key(&self) -> STag {
        self.0.key.next()
    }

    /// The protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.0.pd
    }
}

impl ProtectionDomain {
    /// Allocates a window, which is not bound.
    pub fn alloc_window(&self) -> Result<MemoryWindow, ResourceError> {
        let key = self.device().shared().registry(|registry| registry.alloc_window(self.0.id))?;
        Ok(MemoryWindow(OwnedKey {
            pd: self.clone(),
            key: StepKey::new(key),
            free: Registry::dealloc_window,
        }))
    }

    /// Allocates a region for registrations by work requests. It is invalid until the first registration.
    pub fn alloc_fast_region(&self, options: FastRegionOptions) -> Result<FastRegion, ResourceError> {
        let FastRegionOptions { max_pieces, only_for } = options;
        let registration = FastRegistration { pd: self.0.id, max_pieces, stream: only_for };
        let key = self.device().shared().registry(|registry| registry.alloc_fast_region(registration))?;
        Ok(FastRegion(OwnedKey { pd: self.clone(), key: StepKey::new(key), free: Registry::revoke }))
    }
}

impl MemoryRegion {
    /// A binding of `len` bytes at `offset`, under the tagged offsets that they have in the region. The region must have
    /// been registered with [`Access::WINDOW_BIND`].
    pub fn binding(&self, offset: usize, len: usize, access: Access) -> Binding {
        let offset = self.remote(offset).offset;
        Binding { region: self.key(), offset, len: len as u64, base: offset, access }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_steps_its_last_byte_alone() {
        let key = StepKey::new(STag::new(0x0102_03fe));
        assert_eq!(
            [key.next(), key.next(), key.current()].map(STag::value),
            [0x0102_03ff, 0x0102_0300, 0x0102_0300]
        );
    }
}
