//! [`Common`]: what the engines of one device have in common.

use std::{
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use xwarp_rnic::rnic::{AsyncEvent, Limits, Registry};

use crate::{
    api::{async_event::AsyncQueue, cm::ports::Ports, failure::DeviceFailed},
    system::{self, Clock, Doorbell},
};

/// An engine of the device, as its siblings see it: it fails with them.
pub(super) trait Sibling: Send + Sync {
    fn number(&self) -> u16;

    fn fail_with(&self, failure: &DeviceFailed);
}

/// See the module.
pub(crate) struct Common {
    /// The engines' objects that are not behind their locks.
    registry: Arc<Registry>,
    ports: Arc<Ports>,
    clock: Clock,
    async_events: AsyncQueue,
    /// Rung when an engine panicked, and never cleared: ends every wait.
    failure_bell: Doorbell,
    failed: AtomicBool,
    /// All engines, once the device is open.
    engines: OnceLock<Vec<Weak<dyn Sibling>>>,
}

impl Common {
    pub(crate) fn new(limits: Limits) -> io::Result<Self> {
        Ok(Self {
            registry: Arc::new(Registry::new(limits, &system::secret()?)),
            ports: Arc::default(),
            clock: Clock::start(),
            async_events: AsyncQueue::new()?,
            failure_bell: Doorbell::new()?,
            failed: AtomicBool::new(false),
            engines: OnceLock::new(),
        })
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    pub(crate) fn ports(&self) -> &Arc<Ports> {
        &self.ports
    }

    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    pub(crate) fn async_events(&self) -> &AsyncQueue {
        &self.async_events
    }

    pub(super) fn failure_bell(&self) -> &Doorbell {
        &self.failure_bell
    }

    /// Names the engines of the device. Called once.
    pub(super) fn are(&self, engines: impl Iterator<Item = Weak<dyn Sibling>>) {
        let _ = self.engines.set(engines.collect());
    }

    /// Fails all engines of the device but `first`, which has failed, one after another, and reports the failure.
    pub(super) fn fail_others(&self, first: u16, failure: &DeviceFailed) {
        let others = self.engines.get().into_iter().flatten().filter_map(Weak::upgrade);
        for engine in others.filter(|engine| engine.number() != first) {
            engine.fail_with(failure);
        }
        if !self.failed.swap(true, Ordering::Relaxed) {
            self.async_events.push(AsyncEvent::DeviceFatal);
            self.failure_bell.ring();
        }
    }
}
