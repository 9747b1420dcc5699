//! Verbs that need the registry: what the devices of one interface share.

use std::sync::{Arc, Weak};

use xwarp_rnic::{
    ddp::STag,
    rnic::{PostError, ReceivePool, RecvRequest, Registry, ResourceError},
};

use super::{failure::Answer, shared::DeviceCore};

impl DeviceCore {
    /// Runs a verb that needs only the registry, without waiting for the engine.
    pub(crate) fn registry<R: Answer>(&self, f: impl FnOnce(&Registry) -> R) -> R {
        if self.failed() { R::of_failed_device() } else { f(&self.registry) }
    }

    /// Ends an object of the registry. A failed device ends it too, because others may share what the object uses.
    pub(crate) fn end_object(
        &self,
        end: impl FnOnce(&Registry) -> Result<(), ResourceError>,
    ) -> Result<(), ResourceError> {
        // In a child process, a thread that does not exist there may hold the registry's lock.
        if self.inherited() { Err(ResourceError::DeviceFailed) } else { end(&self.registry) }
    }

    /// Posts a receive to a shared queue. Takes the engine's lock only if one of its queue pairs waits for a receive.
    pub(crate) fn post_shared_receive(
        &self,
        receives: &ReceivePool,
        request: &RecvRequest<'_>,
    ) -> Result<(), PostError> {
        if self.failed() {
            return Err(PostError::DeviceFailed);
        }
        self.note_post();
        if receives.post(request)?.is_empty() {
            self.send_due_posts();
        } else {
            self.with(|state, _| state.engine.rnic_mut().srq_refilled(receives.id()));
        }
        Ok(())
    }

    /// Whether both use the same domains, keys and completion queues.
    pub(crate) fn shares_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.registry, &other.registry)
    }

    /// Makes `cores` known to each other: they share a registry.
    #[cfg(any(feature = "af-xdp", test))]
    pub(crate) fn join(cores: &[&Arc<Self>]) {
        for core in cores.iter().filter(|_| cores.len() > 1) {
            let others =
                cores.iter().filter(|other| !Arc::ptr_eq(core, other)).map(|core| Arc::downgrade(core));
            // Set once, when all devices of an interface have been opened.
            let _ = core.others.set(others.collect());
        }
    }

    /// Ends a key by `end`. When this returns, nothing accesses memory by it any more: its accesses that were under way have
    /// ended, because they hold the lock of their engine. A failed device ends it too, because others may share the key.
    pub(crate) fn end_key(
        &self,
        key: STag,
        end: impl FnOnce(&Registry, STag) -> Result<(), ResourceError>,
    ) -> Result<(), ResourceError> {
        self.end_object(|registry| end(registry, key))?;
        for other in self.others.get().into_iter().flatten().filter_map(Weak::upgrade) {
            other.with(|state, _| state.engine.rnic_mut().forget(key));
        }
        self.with(|state, _| {
            state.engine.rnic_mut().forget(key);
            Ok(())
        })
    }
}
