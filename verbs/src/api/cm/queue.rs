//! [`ChannelQueue`]: the queue of a channel, as the engine's side fills it. Nothing here knows a device.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, Weak},
};

use xwarp_rnic::rnic::PeerDepths;
use xwarp_tcp::ulp::CloseReason;

use super::key::CmKey;
use crate::{
    interface::RouteError,
    system::{Doorbell, lock},
};

/// The device that a new identifier keeps open.
pub(crate) type Owner = dyn Any + Send + Sync;

/// A change of an identifier, as the engine's side reports it: an [`EventKind`](super::EventKind) without a handle to the device.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    AddressResolved,
    AddressError(RouteError),
    RouteResolved,
    Streaming,
    StreamReadable,
    MpaRequest { private_data: Vec<u8>, depths: PeerDepths },
    RequestGone,
    Established { private_data: Vec<u8>, ird: u16, ord: u16, peer: PeerDepths },
    Rejected { private_data: Vec<u8>, peer: PeerDepths },
    Refused,
    Unreachable,
    TimedOut,
    ConnectError(CloseReason),
    Disconnected,
    Closed(CloseReason),
    MacChanged,
    DeviceFailed,
}

/// An event in the queue. It holds no handle to the device, so unread events do not keep a device open.
pub(crate) enum Queued {
    Change(CmKey, Change),
    Request {
        listener: CmKey,
        device: Weak<Owner>,
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
            Self::Change(id, _) => [*id; 2],
            Self::Request { listener, key, .. } => [*key, *listener],
        }
    }

    /// The new identifier of a request.
    fn request(&self) -> Option<CmKey> {
        match self {
            Self::Change(..) => None,
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
type Filter = Box<dyn Fn(CmKey, &Change) -> bool + Send + Sync>;

/// The queue of a channel, behind a descriptor that is readable exactly while an event waits and that signals each event.
pub(crate) struct ChannelQueue {
    waiting: Mutex<Waiting>,
    bell: Doorbell,
    /// Which events, beside requests, are queued; `None`: all.
    wants: Option<Filter>,
}

impl ChannelQueue {
    pub(super) fn new(wants: Option<Filter>) -> io::Result<Self> {
        Ok(Self { waiting: Mutex::default(), bell: Doorbell::new()?, wants })
    }

    /// Readable while an event waits.
    pub(super) fn bell(&self) -> &Doorbell {
        &self.bell
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
            (Queued::Change(id, change), Some(wants)) => wants(*id, change),
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

    pub(super) fn pop(&self) -> Option<Queued> {
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
/// When the descriptor becomes readable, call [`poll`](EventChannel::poll) until it returns `None`: an edge-triggered poller
/// (mio, tokio) is not notified again for remaining events.
#[derive(Clone)]
pub struct EventChannel(Arc<ChannelQueue>);

impl EventChannel {
    pub(super) fn over(queue: ChannelQueue) -> Self {
        Self(Arc::new(queue))
    }

    pub(super) fn queue(&self) -> &Arc<ChannelQueue> {
        &self.0
    }
}
