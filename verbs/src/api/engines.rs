//! [`Engines`]: the engines of one device, and what they have in common.
//!
//! Each engine has queues of the interface, a lock, a thread and connections of its own. An engine is named by its number, which
//! an identifier of the connection manager has in its name, and a queue pair in an atomic.

use std::{
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use xwarp_rnic::{
    ddp::STag,
    rnic::{PostError, ReceivePool, RecvRequest, Registry, ResourceError},
};

use super::{
    async_event::AsyncQueue, cm::ports::Ports, device::DeviceOptions, failure::Answer, shared::SharedEngine,
};
use crate::{
    interface::InterfaceAttributes,
    system::{self, Clock, Doorbell},
};

/// What the engines of one device have in common.
pub(crate) struct Common {
    /// The engines' objects that are not behind their locks.
    pub(super) registry: Arc<Registry>,
    pub(super) ports: Arc<Ports>,
    pub(crate) clock: Clock,
    pub(crate) async_events: AsyncQueue,
    /// Rung when an engine panicked, and never cleared: ends every wait.
    pub(super) failure_bell: Doorbell,
    failed: AtomicBool,
    /// All engines, once the device is open.
    engines: OnceLock<Vec<Weak<SharedEngine>>>,
}

impl Common {
    pub(super) fn new(options: &DeviceOptions) -> io::Result<Self> {
        let registry = Registry::new(options.limits.clone(), &system::secret()?);
        Ok(Self {
            registry: Arc::new(registry),
            ports: Arc::default(),
            clock: Clock::start(),
            async_events: AsyncQueue::new()?,
            failure_bell: Doorbell::new()?,
            failed: AtomicBool::new(false),
            engines: OnceLock::new(),
        })
    }

    /// Notes that the device has failed. Returns whether it had not before.
    pub(super) fn fail(&self) -> bool {
        !self.failed.swap(true, Ordering::Relaxed)
    }

    /// All engines of the device.
    pub(super) fn engines(&self) -> impl Iterator<Item = Arc<SharedEngine>> {
        self.engines.get().into_iter().flatten().filter_map(Weak::upgrade)
    }
}

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
        // Set once, because `all` are the engines of one device.
        let _ = first.common.engines.set(all.iter().map(Arc::downgrade).collect());
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
        end(&self.first.registry, key)?;
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

impl SharedEngine {
    /// Runs a verb that needs only the registry, without waiting for the engine.
    pub(crate) fn registry<R: Answer>(&self, f: impl FnOnce(&Registry) -> R) -> R {
        if self.failed() { R::of_failed_device() } else { f(&self.registry) }
    }
}

/// The attributes of the interface whose parts `engines` have; `first` is the first of them.
pub(super) fn attributes(engines: &[Arc<SharedEngine>], first: &SharedEngine) -> InterfaceAttributes {
    let queues = engines.iter().map(|engine| engine.interface().queues).sum();
    InterfaceAttributes { queues, ..first.interface() }
}
