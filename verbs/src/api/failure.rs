//! The state of a device whose engine panicked, or that a child process inherited: [`DeviceFailed`], the results of
//! verbs, and a closed interface.
//!
//! A panic leaves the engine in an unknown state, so it never runs again. Reporting the failure to applications does
//! not depend on that state, or is attempted and given up if it panics too ([`SharedEngine::fail`]).

use std::{
    any::Any,
    fmt, io,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use xwarp_rnic::rnic::{AsyncEvent, PostError, ResourceError};
use xwarp_tcp::link::{ChunksMut, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame};

use super::{
    cm::CmError,
    queue_pair::PostListError,
    shared::{SharedEngine, State},
};
use crate::interface::{Interface, InterfaceAttributes, InterfaceChange, Resolver};

/// The device has failed: its engine panicked, or this process is a child (`fork`) of the one that opened it, where the
/// device still works. It is unusable here; open another one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the device failed: {message}")]
pub struct DeviceFailed {
    /// The cause.
    pub message: Arc<str>,
}

impl DeviceFailed {
    /// The failure that a panic with the payload `panic` caused.
    pub(super) fn by(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().copied();
        let message = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Self { message: format!("its engine panicked: {}", message.unwrap_or("no message")).into() }
    }

    /// The failure of a device that a child process inherited.
    pub(super) fn inherited() -> Self {
        let message = "a parent of this process opened it (fork), and its connections and listeners stay there: open a \
                       device and listen in this process";
        Self { message: message.into() }
    }
}

/// A step of failing a device, with its description for the log in case the step fails too.
type FailureStep = (&'static str, fn(&mut State));

impl SharedEngine {
    /// Fails the other engines of a failed device, one after another, and reports the failure.
    #[cold]
    pub(super) fn fail_others(&self, failure: &DeviceFailed) {
        for engine in self.common.engines().filter(|engine| engine.number != self.number) {
            engine.fail(&mut engine.lock(), failure);
        }
        if self.common.fail() {
            self.common.async_events.push(AsyncEvent::DeviceFatal);
            self.common.failure_bell.ring();
        }
    }

    /// Fails this engine after a panic of an engine of its device: it never runs again.
    /// A panic leaves the state unreliable, so flushing work, notifying connections and closing the interface are
    /// attempted one by one.
    pub(super) fn fail(&self, state: &mut State, failure: &DeviceFailed) {
        if self.failure.set(failure.clone()).is_err() {
            return;
        }
        let steps: [FailureStep; 3] = [
            ("flush the work of its queue pairs", |state| state.engine.fail_all()),
            ("notify its connections", |state| state.cm.device_failed()),
            ("close its interface", |state| {
                let closed = ClosedInterface::of(&*state.link);
                drop(std::mem::replace(&mut state.link, Box::new(closed)));
            }),
        ];
        for (what, step) in steps {
            if catch_unwind(AssertUnwindSafe(|| step(state))).is_err() {
                tracing::error!("the failed device could not {what}");
            }
        }
        self.doorbell.ring();
    }

    /// The reason why the device has failed, if it has.
    pub(crate) fn failure(&self) -> Option<&DeviceFailed> {
        self.inherited();
        self.failure.get()
    }

    /// Whether the device has failed. Asked before the lock is taken: in a child process, a thread that does not exist there
    /// may hold it.
    pub(crate) fn failed(&self) -> bool {
        self.inherited() || self.failure.get().is_some()
    }

    /// Whether a parent of this process opened the device, which still uses it.
    pub(crate) fn inherited(&self) -> bool {
        let inherited = self.fork.is_inherited();
        if inherited {
            self.failure.get_or_init(DeviceFailed::inherited);
        }
        inherited
    }
}

impl From<DeviceFailed> for io::Error {
    fn from(failed: DeviceFailed) -> Self {
        Self::other(failed)
    }
}

/// The result of a verb on a failed device.
pub(crate) trait Answer {
    /// The result.
    fn of_failed_device() -> Self;
}

impl Answer for () {
    fn of_failed_device() -> Self {}
}

impl<T> Answer for Option<T> {
    fn of_failed_device() -> Self {
        None
    }
}

impl<T> Answer for Result<T, ResourceError> {
    fn of_failed_device() -> Self {
        Err(ResourceError::DeviceFailed)
    }
}

impl<T> Answer for Result<T, PostError> {
    fn of_failed_device() -> Self {
        Err(PostError::DeviceFailed)
    }
}

impl Answer for Result<(), PostListError> {
    fn of_failed_device() -> Self {
        Err(PostListError { posted: 0, source: PostError::DeviceFailed })
    }
}

impl<T> Answer for Result<T, CmError> {
    fn of_failed_device() -> Self {
        Err(CmError::DeviceFailed)
    }
}

/// The interface of a device that has failed: the real one is closed, and its steering rules are gone, so that the
/// kernel resets the connections of peers that continue to send.
pub(super) struct ClosedInterface {
    /// The last attributes of the real interface.
    attributes: InterfaceAttributes,
    resolver: Arc<dyn Resolver>,
}

impl ClosedInterface {
    /// The closed form of `interface`, which the caller drops.
    pub(super) fn of(interface: &dyn Interface) -> Self {
        let attributes = InterfaceAttributes { up: false, ..interface.attributes() };
        Self { attributes, resolver: interface.resolver() }
    }
}

impl fmt::Debug for ClosedInterface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClosedInterface").field(&self.attributes.name).finish()
    }
}

impl Link for ClosedInterface {
    fn chunk_bytes(&self) -> usize {
        0
    }

    fn tx_available(&self) -> usize {
        0
    }

    fn rx_capacity(&self) -> usize {
        0
    }

    fn rx_available(&self, _queue: QueueId) -> usize {
        0
    }

    fn receive(&mut self, _batch: &mut Vec<RxFrame>, _max: usize) -> usize {
        0
    }

    fn rx_chunks(&self, _frame: &RxFrame) -> Pieces<'_> {
        Pieces::new()
    }

    fn recycle(&mut self, _frame: RxFrame) {}

    fn alloc(&mut self, _len: usize) -> Option<TxFrame> {
        None
    }

    fn tx_chunks_into<'a>(&'a mut self, _frame: &mut TxFrame, _chunks: &mut ChunksMut<'a>) -> bool {
        false
    }

    fn submit(&mut self, _queue: QueueId, _frame: &mut TxFrame, _len: usize) -> Result<(), RingFull> {
        Err(RingFull)
    }

    fn release(&mut self, _frame: TxFrame) {}

    fn flush(&mut self) {}

    fn steer(&mut self, _rule: Steer) -> Result<(), SteerError> {
        Err(SteerError("the device has failed".into()))
    }

    fn unsteer(&mut self, _rule: Steer) {}
}

impl Interface for ClosedInterface {
    fn attributes(&self) -> InterfaceAttributes {
        self.attributes.clone()
    }

    fn readiness(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    fn resolver(&self) -> Arc<dyn Resolver> {
        Arc::clone(&self.resolver)
    }

    fn change(&mut self) -> Option<InterfaceChange> {
        None
    }

    fn counters(&self, _tell: &mut dyn FnMut(&'static str, u64)) {}
}
