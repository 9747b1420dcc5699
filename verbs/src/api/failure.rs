//! The state of a device whose engine panicked, or that a child process inherited: [`DeviceFailed`], the results of
//! verbs, and a closed interface. Nothing here knows an engine.

use std::{any::Any, fmt, io, os::fd::OwnedFd, sync::Arc};

use xwarp_rnic::rnic::{PostError, ResourceError};
use xwarp_tcp::link::{ChunksMut, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame};

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

/// Checks the destruction of an object. It fails only while other objects use it; `why` states why this cannot happen.
pub(super) fn destroyed(result: Result<(), ResourceError>, why: &str) {
    if let Err(error) = result
        && error != ResourceError::DeviceFailed
    {
        tracing::error!(%error, "an object was not destroyed, although {why}");
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
