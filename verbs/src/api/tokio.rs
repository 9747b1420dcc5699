//! Futures for tokio (feature `tokio`): of completion queues, events and connections.
//!
//! Everything here runs on tokio's own reactor (`tokio::io::unix::AsyncFd`), so the runtime needs `enable_io`, and no
//! thread is added but the device's progress thread: a device with [`Progress::Application`](crate::Progress) has none
//! and is refused. Futures may be dropped at any time; no completion or event is lost by that. For time limits use
//! `tokio::time::timeout`.
//!
//! ```no_run
//! # use std::{error::Error, net::SocketAddr, time::Duration};
//! use xwarp_verbs::{
//!     Access, Device, Payload, QueuePairOptions, WorkRequest, cm::ConnectOptions, tokio::AsyncCompletionQueue,
//! };
//!
//! # async fn send(device: &Device, peer: SocketAddr) -> Result<(), Box<dyn Error>> {
//! let mut cq = AsyncCompletionQueue::create(device, 16)?;
//! let qp = device.create_pd()?.create_qp(&cq, &cq, QueuePairOptions::default())?;
//! let resolve_limit = Duration::from_secs(5);
//! let connection =
//!     device.start_connect(&qp, peer, ConnectOptions::default(), resolve_limit)?.established().await?;
//! qp.post_send(&WorkRequest::send(1, Payload::Inline(b"hello")).signaled())?;
//! cq.next().await?.check()?;
//! connection.disconnect()?;
//! connection.disconnected().await?;
//! # Ok(())
//! # }
//! ```

use std::{
    fmt, io,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
};

use ::tokio::io::{Interest, unix::AsyncFd};
use xwarp_rnic::rnic::{AsyncEvent, WorkCompletion};

use super::{
    AsyncEvents, CompletionChannel, CompletionQueue, CqNotification, Device,
    cm::{Connecting, Connection, ConnectionError, ConnectionRequest, Event, EventChannel, Listener},
};

/// The registration of a descriptor with tokio's reactor. It is a duplicate, so that several can be registered.
#[derive(Debug)]
struct Readiness(AsyncFd<OwnedFd>);

impl Readiness {
    /// Registers `fd`. Panics outside of a runtime with IO, as `AsyncFd` does.
    #[allow(
        deprecated,
        reason = "its successor is unsafe for what an `OwnedFd` guarantees: that it stays open"
    )]
    fn of(fd: impl AsFd) -> io::Result<Self> {
        let duplicate = fd.as_fd().try_clone_to_owned()?;
        Ok(Self(AsyncFd::with_interest(duplicate, Interest::READABLE)?))
    }

    /// Completes when the descriptor became readable since the last call.
    async fn wait(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }

    /// Waits until `poll` returns a value.
    async fn until<R>(&self, mut poll: impl FnMut() -> Option<R>) -> io::Result<R> {
        loop {
            if let Some(found) = poll() {
                return Ok(found);
            }
            // The descriptor is cleared before the next check, so an event in between is either found by it or
            // signalled again.
            self.wait().await?;
        }
    }
}

impl Device {
    /// Refuses a device that only the application runs, and notifies the progress thread that the application will
    /// sleep.
    fn before_await(&self) -> io::Result<()> {
        if !self.shared().has_thread() {
            let text = "a device with Progress::Application has no thread that would complete a future";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        self.engines().all().iter().for_each(|engine| engine.application_sleeps());
        Ok(())
    }
}

/// A completion queue whose completions can be awaited. Dereferences to [`CompletionQueue`], so it can be passed where
/// one is expected.
#[derive(Debug)]
pub struct AsyncCompletionQueue {
    cq: CompletionQueue,
    channel: CompletionChannel,
    readiness: Readiness,
}

impl AsyncCompletionQueue {
    /// Creates a queue for `capacity` entries.
    pub fn create(device: &Device, capacity: u32) -> io::Result<Self> {
        device.before_await()?;
        let channel = CompletionChannel::new()?;
        let readiness = Readiness::of(&channel)?;
        let cq = device.create_cq_with_channel(capacity, &channel).map_err(io::Error::other)?;
        Ok(Self { cq, channel, readiness })
    }

    /// The oldest completion. Fails when the queue has overflowed and is empty.
    pub async fn next(&mut self) -> io::Result<WorkCompletion> {
        loop {
            // The queue is polled before arming, which is cheap for a busy queue, and again after it.
            if let Some(completion) = self.cq.poll_one() {
                return Ok(completion);
            }
            self.cq.arm(false);
            if let Some(completion) = self.cq.poll_one() {
                return Ok(completion);
            }
            // A failing device sets this before it notifies armed queues.
            if let Some(failure) = self.cq.0.device.failure() {
                return Err(failure.into());
            }
            if let Some(completion) = self.cq.unless_overflowed(None)? {
                return Ok(completion);
            }
            self.readiness.wait().await?;
            while self.channel.poll().is_some() {}
        }
    }
}

impl Deref for AsyncCompletionQueue {
    type Target = CompletionQueue;

    fn deref(&self) -> &CompletionQueue {
        &self.cq
    }
}

/// A channel whose entries [`EventStream`] can await.
pub trait Channel: AsFd + sealed::Sealed {
    /// An entry of the channel.
    type Item;

    /// The oldest entry, without blocking.
    fn poll_item(&self) -> Option<Self::Item>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! channels {
    ($($channel:ty => $entry:ty),*) => {$(
        impl sealed::Sealed for $channel {}

        impl Channel for $channel {
            type Item = $entry;

            fn poll_item(&self) -> Option<$entry> {
                self.poll()
            }
        }
    )*};
}

channels!(AsyncEvents => AsyncEvent, CompletionChannel => CqNotification, EventChannel => Event);

/// A channel whose entries can be awaited: [`AsyncEvents`], [`CompletionChannel`] or
/// [`cm::EventChannel`](crate::cm::EventChannel).
pub struct EventStream<C> {
    channel: C,
    readiness: Readiness,
}

impl<C> fmt::Debug for EventStream<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventStream")
    }
}

impl<C: Channel> EventStream<C> {
    /// Registers `channel` with the runtime.
    pub fn new(channel: C) -> io::Result<Self> {
        let readiness = Readiness::of(&channel)?;
        Ok(Self { channel, readiness })
    }

    /// The channel.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// The oldest entry.
    pub async fn next(&mut self) -> io::Result<C::Item> {
        self.readiness.until(|| self.channel.poll_item()).await
    }
}

impl Connecting<'_> {
    /// Waits for the outcome of the attempt. Dropping the future abandons the attempt.
    pub async fn established(mut self) -> Result<Connection, ConnectionError> {
        self.device().before_await()?;
        let readiness = Readiness::of(&self)?;
        readiness.until(|| self.poll()).await?
    }
}

impl Listener {
    /// Waits for the next connection request.
    pub async fn next(&self) -> Result<ConnectionRequest, ConnectionError> {
        self.id().device().before_await()?;
        Readiness::of(self)?.until(|| self.poll().transpose()).await?
    }
}

impl Connection {
    /// Waits until the peer has closed the connection or it was lost.
    pub async fn disconnected(&self) -> io::Result<()> {
        self.id().device().before_await()?;
        Readiness::of(self)?.until(|| self.poll_disconnected()).await
    }
}
