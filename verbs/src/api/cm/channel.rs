//! Events of the connection manager, and the channel they come on.

use std::{
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Weak},
};

use xwarp_tcp::ulp::CloseReason;

use super::{CmId, table::CmKey};
use crate::{
    api::{async_event::BellQueue, device::DeviceInner},
    interface::RouteError,
    rnic::PeerDepths,
};

/// What happened to an identifier.
#[derive(Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// [`CmId::resolve_address`]: the peer's address can be reached.
    AddressResolved,
    /// [`CmId::resolve_address`]: it cannot.
    AddressError(RouteError),
    /// [`CmId::resolve_route`]: ready to connect.
    RouteResolved,
    /// A listener: a peer asks for a connection.
    ConnectRequest(IncomingRequest),
    /// The peer gave up before [`CmId::accept`] or [`CmId::reject`].
    RequestGone,
    /// The queue pair is ready to send.
    Established {
        /// Bytes of the responder's application, not to be trusted; empty at the responder.
        private_data: Vec<u8>,
        /// RDMA Reads and atomics of the peer that we serve at once.
        ird: u16,
        /// RDMA Reads and atomics that we may have outstanding.
        ord: u16,
        /// What the peer said of itself (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// The peer's application does not want the connection.
    Rejected {
        /// Bytes of its, not to be trusted.
        private_data: Vec<u8>,
        /// What the peer said of itself, perhaps what it would need (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// Nobody listens at the peer's port.
    Refused,
    /// The network says that the peer cannot be reached.
    Unreachable,
    /// The peer did not answer in time.
    TimedOut,
    /// The connection could not be made for another reason.
    ConnectError(CloseReason),
    /// The peer closed the connection, or it is lost; work of the queue pair is flushed.
    Disconnected,
    /// Nothing is left of the connection. Its last event.
    Closed(CloseReason),
}

/// A connection that a peer asks for.
#[derive(Debug)]
pub struct IncomingRequest {
    /// The new identifier, to accept or to reject. It reports on its listener's channel. Dropping it rejects.
    pub id: CmId,
    /// Bytes of the initiator's application: not to be trusted.
    pub private_data: Vec<u8>,
    /// RDMA Reads that the peer serves at once and wants to have outstanding, if it says so.
    pub depths: PeerDepths,
    /// Our address.
    pub local: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
}

/// Something happened to an identifier.
#[derive(Debug)]
pub struct Event {
    /// Which ([`CmId::key`]). With a [`EventKind::ConnectRequest`] the listener.
    pub id: CmKey,
    /// What.
    pub kind: EventKind,
}

/// An event as it waits: it must keep no device alive, or nobody could ever close one with unread events.
pub(crate) enum Queued {
    Plain(Event),
    Request {
        listener: CmKey,
        device: Weak<DeviceInner>,
        key: CmKey,
        private_data: Vec<u8>,
        depths: PeerDepths,
        local: SocketAddr,
        peer: SocketAddr,
    },
}

impl Queued {
    /// The identifier that the event is about; for a request the new one.
    fn about(&self) -> CmKey {
        match self {
            Self::Plain(event) => event.id,
            Self::Request { key, .. } => *key,
        }
    }
}

/// The inside of a channel.
pub(crate) struct ChannelQueue(BellQueue<Queued>);

impl ChannelQueue {
    /// Adds an event. The number that can wait is bounded by the identifiers and their backlogs.
    pub(crate) fn push(&self, event: Queued) {
        self.0.push(event, usize::MAX);
    }

    /// Moves what waits for an identifier to another channel.
    pub(crate) fn hand_over(&self, id: CmKey, to: &Self) {
        for event in self.0.take(|event| event.about() == id) {
            to.push(event);
        }
    }

    /// Forgets what waits for an identifier that is gone.
    pub(crate) fn forget(&self, id: CmKey) {
        self.0.take(|event| event.about() == id);
    }

    /// Takes back the requests of a listener that the application has not seen.
    pub(crate) fn take_requests(&self, of: CmKey) -> Vec<CmKey> {
        self.0
            .take(|event| matches!(event, Queued::Request { listener, .. } if *listener == of))
            .iter()
            .map(Queued::about)
            .collect()
    }
}

/// Where events come. Its descriptor is readable while one waits. Clones share the events: each is given
/// out once.
#[derive(Clone)]
pub struct EventChannel(pub(super) Arc<ChannelQueue>);

impl EventChannel {
    /// A channel without events.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(ChannelQueue(BellQueue::new()?))))
    }

    /// The oldest event, without waiting.
    pub fn poll(&self) -> Option<Event> {
        loop {
            match self.0.0.pop()? {
                Queued::Plain(event) => return Some(event),
                Queued::Request { listener, device, key, private_data, depths, local, peer } => {
                    let Some(device) = device.upgrade() else { continue };
                    let id = CmId::adopt(device, self, key);
                    let request = IncomingRequest { id, private_data, depths, local, peer };
                    return Some(Event { id: listener, kind: EventKind::ConnectRequest(request) });
                }
            }
        }
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

impl fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventChannel")
    }
}
