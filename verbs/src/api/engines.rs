//! [`Engines`]: the engines of one device.
//!
//! Each engine has queues of the interface, a lock, a thread and connections of its own. An engine is named by its number, which
//! an identifier of the connection manager has in its name, and a queue pair in an atomic.

use std::sync::{
    Arc,
    atomic::{AtomicU16, Ordering},
};

use xwarp_rnic::{
    ddp::STag,
    rnic::{PostError, ReceivePool, RecvRequest, Registry, ResourceError},
};

use super::shared::SharedEngine;
use crate::interface::InterfaceAttributes;

/// The engines of one device, by number.
pub(crate) struct Engines {
    /// The first of `all`, so that a device with one engine finds it without a look-up.
    first: Arc<SharedEngine>,
    all: Box<[Arc<SharedEngine>]>,
    /// Where the next queue pair or identifier begins.
    next: AtomicU16,
}

impl Engines {
    /// `None` without an engine.
    pub(super) fn new(all: Vec<Arc<SharedEngine>>) -> Option<Self> {
        let first = Arc::clone(all.first()?);
        SharedEngine::are_siblings(&all);
        Some(Self { first, all: all.into(), next: AtomicU16::new(0) })
    }

    #[inline]
    pub(crate) fn first(&self) -> &Arc<SharedEngine> {
        &self.first
    }

    /// The engine with this number; the first one if there is none.
    #[inline]
    pub(crate) fn get(&self, number: u16) -> &Arc<SharedEngine> {
        if number == 0 { &self.first } else { self.all.get(usize::from(number)).unwrap_or(&self.first) }
    }

    pub(crate) fn all(&self) -> &[Arc<SharedEngine>] {
        &self.all
    }

    #[inline]
    pub(crate) fn are_several(&self) -> bool {
        self.all.len() > 1
    }

    /// The engine that is next in turn.
    pub(crate) fn in_turn(&self) -> u16 {
        if !self.are_several() {
            return 0;
        }
        self.next.fetch_add(1, Ordering::Relaxed) % self.all.len() as u16
    }

    /// Ends a key by `end`. When this returns, nothing accesses memory by it any more: its accesses that were under way have
    /// ended, because they hold the lock of their engine.
    pub(crate) fn end_key(
        &self,
        key: STag,
        end: impl FnOnce(&Registry, STag) -> Result<(), ResourceError>,
    ) -> Result<(), ResourceError> {
        // In a child process, a thread that does not exist there may hold the registry's lock.
        if self.first.inherited() {
            return Err(ResourceError::DeviceFailed);
        }
        self.first.registry(|registry| end(registry, key))?;
        for engine in &self.all {
            engine.with(|state, _| state.engine.rnic_mut().forget(key));
        }
        Ok(())
    }

    /// Posts a receive to a shared queue. Takes the locks of the engines whose queue pairs wait for a receive, and no other.
    pub(crate) fn post_shared_receive(
        &self,
        receives: &ReceivePool,
        request: &RecvRequest<'_>,
    ) -> Result<(), PostError> {
        if self.first.failed() {
            return Err(PostError::DeviceFailed);
        }
        self.first.note_post();
        // Once the receive is posted, a message may come in it, and another thread may destroy the queue for that.
        let id = receives.id();
        let waiting = receives.post(request)?;
        if waiting.is_empty() {
            self.first.send_due_posts();
        }
        for engine in waiting.iter() {
            self.get(engine).with(|state, _| state.engine.rnic_mut().srq_refilled(id));
        }
        Ok(())
    }
}

/// The attributes of the interface whose parts `engines` have; `first` is the first of them.
pub(super) fn attributes(engines: &[Arc<SharedEngine>], first: &SharedEngine) -> InterfaceAttributes {
    let queues = engines.iter().map(|engine| engine.interface().queues).sum();
    InterfaceAttributes { queues, ..first.interface() }
}
