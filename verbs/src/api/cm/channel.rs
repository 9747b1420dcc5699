//! Events of the connection manager, and their channel.

use std::{
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use xwarp_rnic::rnic::PeerDepths;
use xwarp_tcp::ulp::CloseReason;

use super::{
    id::CmId,
    key::CmKey,
    queue::{Change, ChannelQueue, EventChannel, Queued},
};
use crate::{api::handle::Device, interface::RouteError};

/// A change of an identifier.
#[derive(Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// [`CmId::resolve_address`]: the peer's address can be reached.
    AddressResolved,
    /// [`CmId::resolve_address`]: the peer's address cannot be reached.
    AddressError(RouteError),
    /// [`CmId::resolve_route`]: the identifier is ready to connect.
    RouteResolved,
    /// A listener: a peer requests a connection.
    ConnectRequest(IncomingRequest),
    /// An initiator whose [`MpaConfig::streaming`](crate::MpaConfig::streaming) is set: bytes can be exchanged
    /// ([`CmId::stream_send`], [`CmId::stream_recv`]) until [`CmId::begin_mpa`].
    Streaming,
    /// The same at a listener, for a peer that has connected. [`EventKind::MpaRequest`] follows
    /// [`CmId::begin_mpa`].
    StreamRequest(IncomingRequest),
    /// Streaming bytes of the peer can be read. Reported again only after all were read.
    StreamReadable,
    /// A responder that has begun MPA: the peer has, too. Answer with [`CmId::accept`] or [`CmId::reject`].
    MpaRequest {
        /// Private data of the initiator's application; untrusted.
        private_data: Vec<u8>,
        /// The peer's own IRD and ORD, as far as it sent them.
        depths: PeerDepths,
    },
    /// The peer gave up before [`CmId::accept`] or [`CmId::reject`].
    RequestGone,
    /// The queue pair is ready to send.
    Established {
        /// Private data of the responder's application; untrusted. Empty at the responder.
        private_data: Vec<u8>,
        /// RDMA Reads and atomics of the peer that we serve at the same time.
        ird: u16,
        /// RDMA Reads and atomics that we may have outstanding.
        ord: u16,
        /// The peer's own IRD and ORD (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// The peer's application rejected the connection.
    Rejected {
        /// Private data of the peer's application; untrusted.
        private_data: Vec<u8>,
        /// The peer's IRD and ORD, possibly those that it would have needed (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// No listener at the peer's port.
    Refused,
    /// The network reported that the peer cannot be reached.
    Unreachable,
    /// The peer did not answer in time.
    TimedOut,
    /// The connection could not be established for another reason.
    ConnectError(CloseReason),
    /// The peer closed the connection, or it was lost. The work of the queue pair is flushed.
    Disconnected,
    /// The connection has ended at both ends. The last event of a connection. An identifier without a connection gets
    /// the event when the interface is removed ([`CloseReason::InterfaceRemoved`]), because it can no longer accept or
    /// connect.
    Closed(CloseReason),
    /// The Ethernet address of the interface on which the identifier has an address changed. The connection continues.
    MacChanged,
    /// The device has failed, and the identifier with it. Its last event.
    DeviceFailed,
}

/// A peer's request for a connection.
#[derive(Debug)]
#[non_exhaustive]
pub struct IncomingRequest {
    /// The identifier of the new connection, to accept or to reject. Its events come on the listener's channel. Dropping
    /// it rejects the request.
    pub id: CmId,
    /// Private data of the initiator's application; untrusted.
    pub private_data: Vec<u8>,
    /// The peer's own IRD and ORD, as far as it sent them.
    pub depths: PeerDepths,
    /// Our address.
    pub local: SocketAddr,
    /// The peer's address.
    pub peer: SocketAddr,
}

/// An event of the connection manager.
#[derive(Debug)]
#[non_exhaustive]
pub struct Event {
    /// The identifier ([`CmId::key`]). For [`EventKind::ConnectRequest`] and [`EventKind::StreamRequest`] it is the
    /// listener.
    pub id: CmKey,
    /// The change.
    pub kind: EventKind,
}

impl From<Change> for EventKind {
    fn from(change: Change) -> Self {
        match change {
            Change::AddressResolved => Self::AddressResolved,
            Change::AddressError(error) => Self::AddressError(error),
            Change::RouteResolved => Self::RouteResolved,
            Change::Streaming => Self::Streaming,
            Change::StreamReadable => Self::StreamReadable,
            Change::MpaRequest { private_data, depths } => Self::MpaRequest { private_data, depths },
            Change::RequestGone => Self::RequestGone,
            Change::Established { private_data, ird, ord, peer } => {
                Self::Established { private_data, ird, ord, peer }
            }
            Change::Rejected { private_data, peer } => Self::Rejected { private_data, peer },
            Change::Refused => Self::Refused,
            Change::Unreachable => Self::Unreachable,
            Change::TimedOut => Self::TimedOut,
            Change::ConnectError(reason) => Self::ConnectError(reason),
            Change::Disconnected => Self::Disconnected,
            Change::Closed(reason) => Self::Closed(reason),
            Change::MacChanged => Self::MacChanged,
            Change::DeviceFailed => Self::DeviceFailed,
        }
    }
}

impl EventChannel {
    /// A channel without events.
    pub fn new() -> io::Result<Self> {
        Ok(Self::over(ChannelQueue::new(None)?))
    }

    /// A channel that drops each event for which `wants` returns false, instead of queueing it, so that the descriptor is
    /// readable for the other events only. Requests of peers are always queued. `wants` is called once for each event, while
    /// the device is locked: it must neither use an object of the device nor drop a handle to one.
    pub fn filtered(wants: impl Fn(&Event) -> bool + Send + Sync + 'static) -> io::Result<Self> {
        let wants = move |id, change: &Change| wants(&Event { id, kind: change.clone().into() });
        Ok(Self::over(ChannelQueue::new(Some(Box::new(wants)))?))
    }

    /// Calls `hook` after each event that is queued, beside making the descriptor readable. For a caller that sleeps in another way than
    /// on the descriptor. `hook` runs while the device is locked and must not call verbs; of several hooks, the first one stays.
    pub fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.queue().bell().set_hook(hook);
    }

    /// The oldest waiting event, without blocking.
    pub fn poll(&self) -> Option<Event> {
        loop {
            match self.queue().pop()? {
                Queued::Change(id, change) => return Some(Event { id, kind: change.into() }),
                Queued::Request { listener, device, key, private_data, depths, local, peer, streaming } => {
                    let Some(device) = device.upgrade().and_then(Device::of_owner) else { continue };
                    let id = CmId::adopt(device, self, key);
                    let request = IncomingRequest { id, private_data, depths, local, peer };
                    let kind = if streaming {
                        EventKind::StreamRequest(request)
                    } else {
                        EventKind::ConnectRequest(request)
                    };
                    return Some(Event { id: listener, kind });
                }
            }
        }
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue().bell().as_fd()
    }
}

impl AsRawFd for EventChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventChannel")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::system::wait_readable;

    #[test]
    fn a_channel_whose_events_were_read_has_no_heap() {
        let channel = EventChannel::new().unwrap();
        let used = allocation_counter::measure(|| {
            for _ in 0..20 {
                channel.queue().push(Queued::Change(CmKey::NONE, Change::Disconnected));
            }
            while channel.poll().is_some() {}
        });
        assert!(used.count_total > 0);
        assert_eq!((used.count_current, used.bytes_current), (0, 0));
    }

    #[test]
    fn an_unwanted_event_never_makes_the_descriptor_readable() {
        let plain = |change| Queued::Change(CmKey::NONE, change);
        let wants = |event: &Event| !matches!(event.kind, EventKind::MacChanged);
        let channel = EventChannel::filtered(wants).unwrap();
        let readable =
            |channel: &EventChannel| wait_readable([channel.as_fd()], Some(Duration::ZERO)).unwrap();
        channel.queue().push(plain(Change::MacChanged));
        assert!(!readable(&channel) && channel.poll().is_none());
        channel.queue().push(plain(Change::Disconnected));
        assert!(readable(&channel));

        // The filter has a memory in the C libraries, so it is not asked again when an identifier moves.
        let other = EventChannel::filtered(|_| false).unwrap();
        channel.queue().hand_over(CmKey::NONE, 0, other.queue());
        assert!(!readable(&channel) && readable(&other));
        assert!(matches!(other.poll().unwrap().kind, EventKind::Disconnected));
    }
}
