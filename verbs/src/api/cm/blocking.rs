//! Connecting and accepting in one call each, for those who can wait: the connection manager's steps over
//! a private channel.

use std::{net::SocketAddr, time::Duration};

use super::{
    AcceptOptions, CmError, CmId, ConnectOptions, ConnectionError, EventChannel, EventKind, IncomingRequest,
    ListenOptions,
};
use crate::{
    api::{device::Device, queue_pair::QueuePair},
    rnic::PeerDepths,
};

/// An established connection of a queue pair. Dropping it disconnects in order; the queue pair then
/// flushes what is left.
#[derive(Debug)]
pub struct Connection {
    id: CmId,
    channel: EventChannel,
    private_data: Vec<u8>,
    ird: u16,
    ord: u16,
    peer_depths: PeerDepths,
}

impl Connection {
    /// What the responder's application said as it accepted: not to be trusted. Empty at the responder.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// RDMA Reads and atomics of the peer that we serve at once.
    pub fn ird(&self) -> u16 {
        self.ird
    }

    /// RDMA Reads and atomics that we may have outstanding.
    pub fn ord(&self) -> u16 {
        self.ord
    }

    /// What the peer said of its own IRD and ORD.
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

    /// The identifier, for everything else.
    pub fn id(&self) -> &CmId {
        &self.id
    }

    /// Begins to close in order; see [`CmId::disconnect`].
    pub fn disconnect(&self) -> Result<(), CmError> {
        self.id.disconnect()
    }

    /// Waits until the connection is no more, at most for `limit`; says whether it is so.
    pub fn wait_disconnected(&self, limit: Duration) -> Result<bool, ConnectionError> {
        let mut ended = |kind| match kind {
            EventKind::Disconnected | EventKind::Closed(_) => Some(Ok(())),
            _ => None,
        };
        match await_event(self.id.device(), &self.channel, limit, &mut ended) {
            Ok(()) => Ok(true),
            Err(ConnectionError::TimeLimit) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A port that takes connections.
#[derive(Debug)]
pub struct Listener {
    id: CmId,
    channel: EventChannel,
}

/// A connection that a peer asks for: accept it or reject it; dropping rejects.
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

    /// Where it listens: the port, when any would do.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }

    /// The next request, waited for at most `limit` ([`ConnectionError::TimeLimit`]).
    pub fn accept(&self, limit: Duration) -> Result<ConnectionRequest, ConnectionError> {
        let mut requested = |kind| match kind {
            EventKind::ConnectRequest(request) => Some(Ok(request)),
            _ => None,
        };
        let mut request = await_event(self.id.device(), &self.channel, limit, &mut requested)?;
        // From here on the request reports to its own channel, whoever accepts the next one.
        let channel = EventChannel::new()?;
        request.id.migrate(&channel);
        Ok(ConnectionRequest { request, channel })
    }
}

impl ConnectionRequest {
    /// What the initiator's application says: not to be trusted.
    pub fn private_data(&self) -> &[u8] {
        &self.request.private_data
    }

    /// The initiator's address.
    pub fn peer_address(&self) -> SocketAddr {
        self.request.peer
    }

    /// All that is known of it.
    pub fn details(&self) -> &IncomingRequest {
        &self.request
    }

    /// Accepts it for `qp`, and waits for the connection at most `limit`.
    pub fn accept(
        self,
        qp: &QueuePair,
        options: AcceptOptions,
        limit: Duration,
    ) -> Result<Connection, ConnectionError> {
        self.request.id.accept(qp, options)?;
        established(self.request.id, self.channel, limit)
    }

    /// Refuses it, with bytes for the initiator's application.
    pub fn reject(self, private_data: &[u8]) -> Result<(), CmError> {
        self.request.id.reject(private_data)
    }
}

/// All steps of an initiator.
pub(in crate::api) fn connect(
    device: &Device,
    qp: &QueuePair,
    peer: SocketAddr,
    options: ConnectOptions,
    limit: Duration,
) -> Result<Connection, ConnectionError> {
    let clock = device.shared().clock;
    let end = clock.now() + limit;
    let channel = EventChannel::new()?;
    let id = CmId::new(device, &channel);
    id.resolve_address(peer, limit)?;
    let mut resolved = |kind| match kind {
        EventKind::AddressResolved => Some(Ok(())),
        EventKind::AddressError(error) => Some(Err(error.into())),
        _ => None,
    };
    await_event(device, &channel, limit, &mut resolved)?;
    id.resolve_route()?;
    id.connect(qp, options)?;
    established(id, channel, end.since(clock.now()))
}

/// Waits for what becomes of a connection attempt.
fn established(id: CmId, channel: EventChannel, limit: Duration) -> Result<Connection, ConnectionError> {
    use xwarp_tcp::ulp::CloseReason;
    let mut outcome = |kind| match kind {
        EventKind::Established { private_data, ird, ord, peer } => Some(Ok((private_data, ird, ord, peer))),
        EventKind::Rejected { private_data, .. } => Some(Err(ConnectionError::Rejected(private_data))),
        EventKind::Refused => Some(Err(CloseReason::Refused.into())),
        EventKind::Unreachable => Some(Err(CloseReason::Unreachable.into())),
        EventKind::TimedOut => Some(Err(CloseReason::TimedOut.into())),
        EventKind::ConnectError(reason) | EventKind::Closed(reason) => Some(Err(reason.into())),
        EventKind::RequestGone => Some(Err(ConnectionError::RequestGone)),
        _ => None,
    };
    let (private_data, ird, ord, peer_depths) = await_event(id.device(), &channel, limit, &mut outcome)?;
    Ok(Connection { id, channel, private_data, ird, ord, peer_depths })
}

/// Waits for the event that `pick` knows, at most for `limit`; drops the others.
fn await_event<R>(
    device: &Device,
    channel: &EventChannel,
    limit: Duration,
    pick: &mut dyn FnMut(EventKind) -> Option<Result<R, ConnectionError>>,
) -> Result<R, ConnectionError> {
    let clock = device.shared().clock;
    let end = clock.now() + limit;
    loop {
        while let Some(event) = channel.poll() {
            if let Some(found) = pick(event.kind) {
                return found;
            }
        }
        let left = end.since(clock.now());
        if left.is_zero() {
            return Err(ConnectionError::TimeLimit);
        }
        device.wait(channel, Some(left))?;
    }
}
