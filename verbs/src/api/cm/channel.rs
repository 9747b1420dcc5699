//! Events of the connection manager, and their channel.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{Arc, Mutex, Weak},
};

use xwarp_rnic::rnic::PeerDepths;
use xwarp_tcp::ulp::CloseReason;

use super::{CmId, table::CmKey};
use crate::{
    api::device::DeviceInner,
    interface::RouteError,
    system::{Doorbell, lock},
};

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

/// An event in the queue. It holds no handle to the device, so unread events do not keep a device open.
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
        /// The connection carries streaming data; MPA has not begun.
        streaming: bool,
    },
}

impl Queued {
    /// The identifiers that the event names: its own, and the listener of a request.
    fn names(&self) -> [CmKey; 2] {
        match self {
            Self::Plain(event) => [event.id; 2],
            Self::Request { listener, key, .. } => [*key, *listener],
        }
    }

    /// The new identifier of a request.
    fn request(&self) -> Option<CmKey> {
        match self {
            Self::Plain(_) => None,
            Self::Request { key, .. } => Some(*key),
        }
    }
}

/// The waiting events of a channel. All operations on one event take logarithmic time.
#[derive(Default)]
struct Waiting {
    /// The events by their number, the oldest first.
    events: BTreeMap<u64, Queued>,
    /// The numbers of the events that name each identifier.
    by_name: BTreeSet<(CmKey, u64)>,
    /// Number of the next event.
    next: u64,
}

impl Waiting {
    fn push(&mut self, event: Queued) {
        let number = self.next;
        self.next += 1;
        self.by_name.extend(event.names().map(|name| (name, number)));
        self.events.insert(number, event);
    }

    fn remove(&mut self, number: u64) -> Option<Queued> {
        let event = self.events.remove(&number)?;
        for name in event.names() {
            self.by_name.remove(&(name, number));
        }
        if self.events.is_empty() {
            // An empty tree keeps a node for eleven events, and the channel of an idle connection gets no further event.
            (self.events, self.by_name) = Default::default();
        }
        Some(event)
    }

    fn pop(&mut self) -> Option<Queued> {
        let number = *self.events.first_key_value()?.0;
        self.remove(number)
    }

    /// The numbers of the events that name `id`, the oldest first.
    fn naming(&self, id: CmKey) -> Vec<u64> {
        self.by_name.range((id, 0)..=(id, u64::MAX)).map(|&(_, number)| number).collect()
    }

    /// Removes and returns the events that name `id`, except requests of other engines than `engine`, the oldest first.
    fn remove_naming(&mut self, id: CmKey, engine: u16) -> Vec<Queued> {
        let elsewhere = |event: &Queued| event.request().is_some_and(|request| request.engine() != engine);
        let mut numbers = self.naming(id);
        numbers.retain(|number| self.events.get(number).is_some_and(|event| !elsewhere(event)));
        numbers.into_iter().filter_map(|number| self.remove(number)).collect()
    }
}

/// Decides about an event before it is queued.
type Filter = Box<dyn Fn(&Event) -> bool + Send + Sync>;

/// The queue of a channel, behind a descriptor that is readable exactly while an event waits and that signals each event.
pub(crate) struct ChannelQueue {
    waiting: Mutex<Waiting>,
    bell: Doorbell,
    /// Which events, beside requests, are queued; `None`: all.
    wants: Option<Filter>,
}

impl ChannelQueue {
    fn new(wants: Option<Filter>) -> io::Result<Self> {
        Ok(Self { waiting: Mutex::default(), bell: Doorbell::new()?, wants })
    }

    /// Runs `f`, which removes events, and keeps the descriptor readable only if some are left.
    fn shrink<R>(&self, f: impl FnOnce(&mut Waiting) -> R) -> R {
        let mut waiting = lock(&self.waiting);
        let result = f(&mut waiting);
        if waiting.events.is_empty() {
            self.bell.clear();
        }
        result
    }

    /// Adds an event, if the channel's filter wants it. The number of identifiers and the backlogs of listeners bound the number
    /// of waiting events.
    pub(crate) fn push(&self, event: Queued) {
        let is_wanted = match (&event, &self.wants) {
            (Queued::Plain(event), Some(wants)) => wants(event),
            _ => true,
        };
        if is_wanted {
            self.add(event);
        }
    }

    fn add(&self, event: Queued) {
        let mut waiting = lock(&self.waiting);
        waiting.push(event);
        // Rings even when other events wait: under EPOLLET only a write to the descriptor is an edge.
        self.bell.ring();
    }

    /// Moves the events of an identifier to another channel, whose filter is not asked about them, except requests of other
    /// engines than `engine`. Returns the new identifiers of requests among them.
    pub(crate) fn hand_over(&self, id: CmKey, engine: u16, to: &Self) -> Vec<CmKey> {
        let events = self.shrink(|waiting| waiting.remove_naming(id, engine));
        let requests = events.iter().filter_map(Queued::request).collect();
        for event in events {
            to.add(event);
        }
        requests
    }

    /// Discards the events of an identifier that is gone, except requests of other engines than `engine`. Returns the new identifiers
    /// of requests among them, which the application will not see.
    pub(crate) fn forget(&self, id: CmKey, engine: u16) -> Vec<CmKey> {
        let events = self.shrink(|waiting| waiting.remove_naming(id, engine));
        events.iter().filter_map(Queued::request).collect()
    }

    /// Removes the event of a request that the application has not seen. Returns false when it has seen the request.
    pub(crate) fn withdraw_request(&self, id: CmKey) -> bool {
        self.shrink(|waiting| {
            let unseen = |number: &u64| waiting.events.get(number).and_then(Queued::request) == Some(id);
            let Some(number) = waiting.naming(id).into_iter().find(unseen) else { return false };
            waiting.remove(number).is_some()
        })
    }

    fn pop(&self) -> Option<Queued> {
        self.shrink(Waiting::pop)
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.waiting).events.is_empty()
    }

    /// Entries of all tables, in the order of their fields.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 2] {
        let waiting = lock(&self.waiting);
        [waiting.events.len(), waiting.by_name.len()]
    }
}

/// A channel of connection manager events. The descriptor is readable while an event waits. Clones share the events:
/// each event is returned once.
///
/// When the descriptor becomes readable, call [`poll`](Self::poll) until it returns `None`: an edge-triggered poller
/// (mio, tokio) is not notified again for remaining events.
#[derive(Clone)]
pub struct EventChannel(pub(super) Arc<ChannelQueue>);

impl EventChannel {
    /// A channel without events.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(ChannelQueue::new(None)?)))
    }

    /// A channel that drops each event for which `wants` returns false, instead of queueing it, so that the descriptor is
    /// readable for the other events only. Requests of peers are always queued. `wants` is called once for each event, while
    /// the device is locked: it must neither use an object of the device nor drop a handle to one.
    pub fn filtered(wants: impl Fn(&Event) -> bool + Send + Sync + 'static) -> io::Result<Self> {
        Ok(Self(Arc::new(ChannelQueue::new(Some(Box::new(wants)))?)))
    }

    /// Calls `hook` after each event that is queued, beside making the descriptor readable. For a caller that sleeps in another way than
    /// on the descriptor. `hook` runs while the device is locked and must not call verbs; of several hooks, the first one stays.
    pub fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.0.bell.set_hook(hook);
    }

    /// The oldest waiting event, without blocking.
    pub fn poll(&self) -> Option<Event> {
        loop {
            match self.0.pop()? {
                Queued::Plain(event) => return Some(event),
                Queued::Request { listener, device, key, private_data, depths, local, peer, streaming } => {
                    let Some(device) = device.upgrade() else { continue };
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
        self.0.bell.as_fd()
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
                let event = Event { id: CmKey::NONE, kind: EventKind::Disconnected };
                channel.0.push(Queued::Plain(event));
            }
            while channel.poll().is_some() {}
        });
        assert!(used.count_total > 0);
        assert_eq!((used.count_current, used.bytes_current), (0, 0));
    }

    #[test]
    fn an_unwanted_event_never_makes_the_descriptor_readable() {
        let plain = |kind| Queued::Plain(Event { id: CmKey::NONE, kind });
        let wants = |event: &Event| !matches!(event.kind, EventKind::MacChanged);
        let channel = EventChannel::filtered(wants).unwrap();
        let readable =
            |channel: &EventChannel| wait_readable([channel.as_fd()], Some(Duration::ZERO)).unwrap();
        channel.0.push(plain(EventKind::MacChanged));
        assert!(!readable(&channel) && channel.poll().is_none());
        channel.0.push(plain(EventKind::Disconnected));
        assert!(readable(&channel));

        // The filter has a memory in the C libraries, so it is not asked again when an identifier moves.
        let other = EventChannel::filtered(|_| false).unwrap();
        channel.0.hand_over(CmKey::NONE, 0, &other.0);
        assert!(!readable(&channel) && readable(&other));
        assert!(matches!(other.poll().unwrap().kind, EventKind::Disconnected));
    }
}
