//! Connections, connection attempts and listeners as objects of their own: the connection manager's steps over a private
//! channel. Each has a descriptor and a `poll` that does not block, and each wait has a time limit.

use std::{
    mem,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use xwarp_rnic::rnic::PeerDepths;
use xwarp_tcp::ulp::CloseReason;

use super::{
    AcceptOptions, CmError, CmId, ConnectOptions, ConnectionError, EventChannel, EventKind, IncomingRequest,
    ListenOptions,
};
use crate::api::{handle::Device, queue_pair::QueuePair};

/// An established connection of a queue pair. Dropping it disconnects in order; the queue pair then flushes the
/// remaining work.
///
/// The descriptor becomes readable when the connection ends: see [`poll`](Self::poll).
#[derive(Debug)]
pub struct Connection {
    id: CmId,
    channel: EventChannel,
    private_data: Vec<u8>,
    ird: u16,
    ord: u16,
    peer_depths: PeerDepths,
    /// An event has reported the end.
    ended: AtomicBool,
}

impl Connection {
    /// Private data that the responder's application sent when it accepted; untrusted. Empty at the responder.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// RDMA Reads and atomics of the peer that we serve at the same time.
    pub fn ird(&self) -> u16 {
        self.ird
    }

    /// RDMA Reads and atomics that we may have outstanding.
    pub fn ord(&self) -> u16 {
        self.ord
    }

    /// The peer's own IRD and ORD, as far as it sent them.
    pub fn peer_depths(&self) -> PeerDepths {
        self.peer_depths
    }

    /// Our address.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }

    /// The peer's address.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.id.peer_address()
    }

    /// The connection manager's identifier of this connection.
    pub fn id(&self) -> &CmId {
        &self.id
    }

    /// Starts an orderly close; see [`CmId::disconnect`].
    pub fn disconnect(&self) -> Result<(), CmError> {
        self.id.disconnect()
    }

    /// The next event of the connection, without blocking: [`EventKind::Disconnected`], then [`EventKind::Closed`];
    /// before them possibly [`EventKind::MacChanged`].
    pub fn poll(&self) -> Option<EventKind> {
        let kind = self.channel.poll()?.kind;
        if matches!(kind, EventKind::Disconnected | EventKind::Closed(_) | EventKind::DeviceFailed) {
            self.ended.store(true, Ordering::Release);
        }
        Some(kind)
    }

    /// Whether the peer closed the connection or it was lost, by the events so far. Consumes the waiting ones until one says so.
    pub(in crate::api) fn poll_disconnected(&self) -> Option<()> {
        loop {
            if self.ended.load(Ordering::Acquire) {
                return Some(());
            }
            self.poll()?;
        }
    }

    /// Waits until the connection has ended, at most for `limit`; returns whether it has. Once it has, each further call says so,
    /// and so does one after [`poll`](Self::poll) has returned the event.
    pub fn wait_disconnected(&self, limit: Duration) -> Result<bool, ConnectionError> {
        match wait_for(self.id.device(), self, limit, || self.poll_disconnected().map(Ok)) {
            // A device that has failed has no connections.
            Ok(()) | Err(ConnectionError::Call(CmError::DeviceFailed)) => Ok(true),
            Err(ConnectionError::TimeLimit) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A connection attempt of an initiator, or of a responder that has accepted. Dropping it abandons the attempt.
///
/// Made by [`Device::start_connect`] and [`ConnectionRequest::start_accept`]. The descriptor becomes readable when the
/// attempt has made progress: then call [`poll`](Self::poll), which also takes the initiator's next step.
#[derive(Debug)]
pub struct Connecting<'qp> {
    /// `None` once `poll` has returned the outcome.
    id: Option<CmId>,
    channel: EventChannel,
    device: Device,
    /// An initiator's queue pair and options, until the route is resolved.
    initiator: Option<(&'qp QueuePair, ConnectOptions)>,
}

impl<'qp> Connecting<'qp> {
    /// Starts an initiator's steps; the peer's address is resolved within `limit`.
    pub(in crate::api) fn start(
        device: &Device,
        qp: &'qp QueuePair,
        peer: SocketAddr,
        options: ConnectOptions,
        limit: Duration,
    ) -> Result<Self, ConnectionError> {
        let channel = EventChannel::new()?;
        let id = CmId::in_engine(device, &channel, qp.engine());
        id.resolve_address(peer, limit)?;
        Ok(Self { id: Some(id), channel, device: device.clone(), initiator: Some((qp, options)) })
    }

    /// The outcome, without blocking; `None` while there is none, and after the outcome was returned.
    pub fn poll(&mut self) -> Option<Result<Connection, ConnectionError>> {
        while let Some(id) = &self.id {
            let kind = self.channel.poll()?.kind;
            match step(id, kind, &mut self.initiator) {
                Ok(None) => {}
                Ok(Some(negotiated)) => {
                    let Negotiated { private_data, ird, ord, peer: peer_depths } = negotiated;
                    let (id, channel) = (self.id.take()?, self.channel.clone());
                    let ended = AtomicBool::new(false);
                    return Some(Ok(Connection { id, channel, private_data, ird, ord, peer_depths, ended }));
                }
                Err(error) => {
                    self.id = None;
                    return Some(Err(error));
                }
            }
        }
        None
    }

    /// Waits for the outcome, at most for `limit` ([`ConnectionError::TimeLimit`]).
    pub fn wait(mut self, limit: Duration) -> Result<Connection, ConnectionError> {
        let (device, channel) = (self.device.clone(), self.channel.clone());
        wait_for(&device, &channel, limit, || self.poll())
    }

    #[cfg(feature = "tokio")]
    pub(in crate::api) fn device(&self) -> &Device {
        &self.device
    }
}

/// The parameters of an established connection.
struct Negotiated {
    private_data: Vec<u8>,
    ird: u16,
    ord: u16,
    peer: PeerDepths,
}

/// Executes the next step of a connection attempt after an event.
fn step(
    id: &CmId,
    kind: EventKind,
    initiator: &mut Option<(&QueuePair, ConnectOptions)>,
) -> Result<Option<Negotiated>, ConnectionError> {
    match kind {
        EventKind::AddressResolved => id.resolve_route()?,
        EventKind::RouteResolved => {
            if let Some((qp, options)) = initiator.take() {
                id.connect(qp, options)?;
            }
        }
        EventKind::Established { private_data, ird, ord, peer } => {
            return Ok(Some(Negotiated { private_data, ird, ord, peer }));
        }
        EventKind::AddressError(error) => return Err(error.into()),
        EventKind::Rejected { private_data, .. } => return Err(ConnectionError::Rejected(private_data)),
        EventKind::Refused => return Err(CloseReason::Refused.into()),
        EventKind::Unreachable => return Err(CloseReason::Unreachable.into()),
        EventKind::TimedOut => return Err(CloseReason::TimedOut.into()),
        EventKind::ConnectError(reason) | EventKind::Closed(reason) => return Err(reason.into()),
        EventKind::RequestGone => return Err(ConnectionError::RequestGone),
        EventKind::DeviceFailed => return Err(CmError::DeviceFailed.into()),
        EventKind::ConnectRequest(_)
        | EventKind::StreamRequest(_)
        | EventKind::Streaming
        | EventKind::StreamReadable
        | EventKind::MpaRequest { .. }
        | EventKind::MacChanged
        | EventKind::Disconnected => {}
    }
    Ok(None)
}

/// A listening port. The descriptor becomes readable when a connection request waits: see [`poll`](Self::poll).
#[derive(Debug)]
pub struct Listener {
    id: CmId,
    channel: EventChannel,
}

/// A peer's request for a connection: accept it or reject it. Dropping it rejects. A call that fails at once leaves the request
/// as it was, to be answered in another way; after a call that succeeded, further answers are [`CmError::State`].
#[derive(Debug)]
pub struct ConnectionRequest {
    request: IncomingRequest,
    channel: EventChannel,
}

impl Listener {
    pub(in crate::api) fn new(
        device: &Device,
        address: SocketAddr,
        options: ListenOptions,
    ) -> Result<Self, ConnectionError> {
        let channel = EventChannel::new()?;
        let id = CmId::new(device, &channel);
        id.bind(address)?;
        id.listen(options)?;
        Ok(Self { id, channel })
    }

    /// The bound address, with the chosen port if port 0 was requested.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }

    /// The connection manager's identifier of this listener.
    pub fn id(&self) -> &CmId {
        &self.id
    }

    /// The oldest waiting request, without blocking. Call it until it returns `None` before you wait again.
    pub fn poll(&self) -> Result<Option<ConnectionRequest>, ConnectionError> {
        if self.channel.queue().is_empty() {
            return self.nothing();
        }
        // The request's own channel, so that another thread which accepts the next request gets none of its events. The
        // channel is made before the request is taken: without a descriptor for it, the request waits for the next call.
        let channel = EventChannel::new()?;
        while let Some(event) = self.channel.poll() {
            let mut request = match event.kind {
                EventKind::ConnectRequest(request) => request,
                EventKind::DeviceFailed => return Err(CmError::DeviceFailed.into()),
                _ => continue,
            };
            request.id.migrate(&channel);
            return Ok(Some(ConnectionRequest { request, channel }));
        }
        self.nothing()
    }

    /// No request waits, and none will arrive if the interface was removed.
    fn nothing(&self) -> Result<Option<ConnectionRequest>, ConnectionError> {
        match self.id.device().shared().removal() {
            Some(cause) => Err(ConnectionError::InterfaceRemoved(cause.to_owned())),
            None => Ok(None),
        }
    }

    /// Waits for the next request, at most for `limit` ([`ConnectionError::TimeLimit`]).
    pub fn accept(&self, limit: Duration) -> Result<ConnectionRequest, ConnectionError> {
        wait_for(self.id.device(), self, limit, || self.poll().transpose())
    }
}

impl ConnectionRequest {
    /// The initiator's private data; untrusted.
    pub fn private_data(&self) -> &[u8] {
        &self.request.private_data
    }

    /// The initiator's address.
    pub fn peer_address(&self) -> SocketAddr {
        self.request.peer
    }

    /// The number of the engine at which the request arrived: a queue pair that accepts it moves there.
    pub fn engine(&self) -> u16 {
        self.request.id.engine()
    }

    /// All data of the request.
    pub fn details(&self) -> &IncomingRequest {
        &self.request
    }

    /// Accepts the request for `qp` and waits until the connection is established, at most for `limit`.
    pub fn accept(
        &mut self,
        qp: &QueuePair,
        options: AcceptOptions,
        limit: Duration,
    ) -> Result<Connection, ConnectionError> {
        self.start_accept(qp, options)?.wait(limit)
    }

    /// Accepts the request for `qp`, without waiting for the connection.
    pub fn start_accept(
        &mut self,
        qp: &QueuePair,
        options: AcceptOptions,
    ) -> Result<Connecting<'static>, CmError> {
        self.request.id.accept(qp, options)?;
        let (device, channel) = (self.request.id.device().clone(), self.channel.clone());
        let id = mem::replace(&mut self.request.id, CmId::in_engine(&device, &channel, qp.engine()));
        Ok(Connecting { id: Some(id), channel, device, initiator: None })
    }

    /// Rejects the request, with private data for the initiator's application. If that is too long, the request waits on, to be
    /// rejected with less.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), CmError> {
        self.request.id.reject(private_data)
    }
}

/// The descriptors of objects that have a channel of their own.
macro_rules! descriptor_of_channel {
    ($($object:ty),*) => {$(
        impl AsFd for $object {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.channel.as_fd()
            }
        }

        impl AsRawFd for $object {
            fn as_raw_fd(&self) -> RawFd {
                self.channel.as_raw_fd()
            }
        }
    )*};
}

descriptor_of_channel!(Connection, Connecting<'_>, Listener);

/// Waits until `poll` returns a value, at most for `limit`.
fn wait_for<R>(
    device: &Device,
    fd: &impl AsFd,
    limit: Duration,
    mut poll: impl FnMut() -> Option<Result<R, ConnectionError>>,
) -> Result<R, ConnectionError> {
    let clock = device.shared().clock();
    let end = clock.now() + limit;
    loop {
        if let Some(outcome) = poll() {
            return outcome;
        }
        if device.failure().is_some() {
            return Err(CmError::DeviceFailed.into());
        }
        let left = end.since(clock.now());
        if left.is_zero() {
            return Err(ConnectionError::TimeLimit);
        }
        // The next check detects a failure.
        if let Err(error) = device.wait(fd, Some(left))
            && device.failure().is_none()
        {
            return Err(error.into());
        }
    }
}
