//! Events other than completions: connection events, and asynchronous events of queues.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use xwarp_tcp::{
    framing::UNNEGOTIATED,
    tcp::SoftError,
    ulp::{CloseReason, ConnId, ListenerId},
};

use super::{CqId, Notify, QpId, SrqId};
use crate::rdmap::{StreamError, TerminateHeader};

/// A peer's connection request, until it is accepted, rejected or withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub ConnId);

/// An application's end of a connection that carries streaming data before MPA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamId {
    /// A responder's connection, which has no queue pair yet.
    Request(RequestId),
    /// The connection of an initiator's queue pair.
    Qp(QpId),
}

/// IRD and ORD from the peer's start-up frame; `None` where the peer leaves them to the applications (as MPA revision
/// 1 always does).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerDepths {
    /// RDMA Reads that the peer serves at once.
    pub ird: Option<u16>,
    /// RDMA Reads that the peer wants to have outstanding.
    pub ord: Option<u16>,
}

impl PeerDepths {
    pub(super) fn of(ird: u16, ord: u16) -> Self {
        let negotiated = |depth: u16| Some(depth).filter(|depth| *depth != UNNEGOTIATED);
        Self { ird: negotiated(ird), ord: negotiated(ord) }
    }
}

/// An event of the connection manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CmEvent {
    /// A connection carries streaming data until `Engine::begin_mpa`. Bytes of the peer may have arrived.
    Streaming {
        /// The connection.
        stream: StreamId,
        /// Responder: the listener that accepted it.
        listener: Option<ListenerId>,
        /// Our address.
        local: SocketAddr,
        /// The peer's address.
        remote: SocketAddr,
    },
    /// Streaming bytes of the peer can be read. Reported again only after all were read.
    StreamReadable {
        /// The connection.
        stream: StreamId,
    },
    /// A peer requests a connection: answer with `Engine::accept` or `Engine::reject`.
    ConnectRequest {
        /// The request.
        request: RequestId,
        /// The listener that received it.
        listener: ListenerId,
        /// Our address.
        local: SocketAddr,
        /// The peer's address.
        remote: SocketAddr,
        /// The peer's private data: untrusted bytes.
        private_data: Vec<u8>,
        /// The peer's IRD and ORD.
        peer: PeerDepths,
    },
    /// A request ended before it was answered.
    RequestGone {
        /// The request.
        request: RequestId,
    },
    /// The queue pair is ready to send.
    Established {
        /// The queue pair.
        qp: QpId,
        /// Our address.
        local: SocketAddr,
        /// The peer's address.
        remote: SocketAddr,
        /// The responder's private data; empty at the responder.
        private_data: Vec<u8>,
        /// RDMA Reads that we serve at once (IRD).
        ird: u16,
        /// RDMA Reads that we may have outstanding (ORD).
        ord: u16,
        /// The peer's IRD and ORD (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// The peer rejected the connection.
    Rejected {
        /// The initiating queue pair.
        qp: QpId,
        /// The responder's private data: untrusted bytes.
        private_data: Vec<u8>,
        /// The peer's IRD and ORD, possibly those that it would need (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// The connection could not be established.
    ConnectError {
        /// The initiating or accepting queue pair.
        qp: QpId,
        /// The reason: refused, unreachable, timed out, or a failed MPA start-up.
        reason: CloseReason,
    },
    /// The peer sends no more: it closed its direction or sent a Terminate, or the stream failed. Reported once.
    Disconnected {
        /// The queue pair.
        qp: QpId,
    },
    /// The connection no longer exists: the last event of an established connection.
    Closed {
        /// The queue pair.
        qp: QpId,
        /// How it ended.
        reason: CloseReason,
    },
}

impl Concerns for CmEvent {
    fn queue_pair(&self) -> Option<QpId> {
        match self {
            Self::ConnectRequest { .. } | Self::RequestGone { .. } => None,
            Self::Streaming { stream, .. } | Self::StreamReadable { stream } => match stream {
                StreamId::Qp(qp) => Some(*qp),
                StreamId::Request(_) => None,
            },
            Self::Established { qp, .. }
            | Self::Rejected { qp, .. }
            | Self::ConnectError { qp, .. }
            | Self::Disconnected { qp }
            | Self::Closed { qp, .. } => Some(*qp),
        }
    }
}

/// Why a queue pair failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum QpFault {
    /// The peer violated the protocol or we had a local error; we send a Terminate if our direction is still open.
    Local(StreamError),
    /// The peer sent a Terminate.
    Remote(TerminateHeader),
    /// The connection ended.
    Connection(CloseReason),
    /// One of its completion queues overflowed.
    CqOverflow,
}

impl fmt::Display for QpFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(error) => write!(f, "stream error, {error}"),
            Self::Remote(header) => write!(f, "terminated by the peer, {header}"),
            Self::Connection(reason) => write!(f, "connection {reason}"),
            Self::CqOverflow => f.write_str("a completion queue overflowed"),
        }
    }
}

/// An asynchronous event (the verbs' term): a change that no work request asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The queue pair has failed; its work is flushed.
    QpFatal {
        /// The queue pair.
        qp: QpId,
        /// The reason.
        fault: QpFault,
    },
    /// TCP reports a soft error of the queue pair's connection, which may still recover. The same error is reported
    /// again only after data was acknowledged in between (RFC 9293 sections 3.8.3 and 3.9.1.8).
    SoftError {
        /// The queue pair.
        qp: QpId,
        /// The reason.
        error: SoftError,
    },
    /// A completion queue lost an entry because it was full. It takes no more entries.
    CqOverflow {
        /// The completion queue.
        cq: CqId,
    },
    /// A queue pair takes no more receives from its shared receive queue.
    LastWqeReached {
        /// The queue pair.
        qp: QpId,
    },
    /// A shared receive queue holds fewer receives than its limit.
    SrqLimit {
        /// The shared receive queue.
        srq: SrqId,
    },
    /// The device has failed permanently: its interface was removed, or its engine panicked. `Device::failure` returns
    /// the panic, and `None` for a removed interface, whose connections end with [`CloseReason::InterfaceRemoved`].
    DeviceFatal,
    /// The interface is up and has a carrier again.
    PortUp,
    /// The interface is down or has no carrier. Connections stay until their time-outs.
    PortDown,
    /// The interface has a new address.
    AddressAdded(IpAddr),
    /// The interface lost an address; the connections from it are reset.
    AddressRemoved(IpAddr),
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QpFatal { qp, fault } => write!(f, "queue pair {} failed: {fault}", qp.number()),
            Self::SoftError { qp, error } => {
                let why = match error {
                    SoftError::Unreachable => "a router reports that the peer is unreachable",
                    SoftError::NoAnswer => "the peer has not answered several retransmissions",
                };
                write!(f, "the connection of queue pair {} may fail: {why}", qp.number())
            }
            Self::CqOverflow { cq } => write!(f, "completion queue {} overflowed", cq.number()),
            Self::LastWqeReached { qp } => {
                write!(f, "queue pair {} takes no more shared receives", qp.number())
            }
            Self::SrqLimit { srq } => {
                write!(f, "shared receive queue {} holds fewer receives than its limit", srq.number())
            }
            Self::DeviceFatal => {
                f.write_str("the device failed: its interface was removed, or its engine panicked")
            }
            Self::PortUp => f.write_str("the interface is up"),
            Self::PortDown => f.write_str("the interface is down or has no carrier"),
            Self::AddressAdded(address) => write!(f, "the interface has the new address {address}"),
            Self::AddressRemoved(address) => write!(f, "the interface lost the address {address}"),
        }
    }
}

impl Concerns for AsyncEvent {
    fn queue_pair(&self) -> Option<QpId> {
        match self {
            Self::QpFatal { qp, .. } | Self::SoftError { qp, .. } | Self::LastWqeReached { qp } => Some(*qp),
            Self::CqOverflow { .. }
            | Self::SrqLimit { .. }
            | Self::DeviceFatal
            | Self::PortUp
            | Self::PortDown
            | Self::AddressAdded(_)
            | Self::AddressRemoved(_) => None,
        }
    }
}

/// An event that may belong to a queue pair.
pub(crate) trait Concerns {
    /// The queue pair, with which the event is dropped.
    fn queue_pair(&self) -> Option<QpId>;
}

/// Pending events for the application, oldest first. The application may poll rarely or never, so the cost of an
/// operation does not grow with the length of the queue.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    events: BTreeMap<u64, E>,
    /// The numbers of the events of each queue pair.
    by_queue_pair: BTreeSet<(QpId, u64)>,
    /// Number of the next event.
    next: u64,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self { events: BTreeMap::new(), by_queue_pair: BTreeSet::new(), next: 0 }
    }
}

impl<E: Concerns + PartialEq> EventQueue<E> {
    /// Adds an event; returns its number.
    fn push(&mut self, event: E) -> u64 {
        let number = self.next;
        self.next += 1;
        self.by_queue_pair.extend(event.queue_pair().map(|qp| (qp, number)));
        self.events.insert(number, event);
        number
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Removes and returns the oldest event.
    pub(crate) fn pop(&mut self) -> Option<E> {
        let number = *self.events.first_key_value()?.0;
        self.remove(number)
    }

    fn remove(&mut self, number: u64) -> Option<E> {
        let event = self.events.remove(&number)?;
        if let Some(qp) = event.queue_pair() {
            self.by_queue_pair.remove(&(qp, number));
        }
        Some(event)
    }

    /// Whether the event with this number is still in the queue.
    pub(super) fn holds(&self, number: u64) -> bool {
        self.events.contains_key(&number)
    }

    /// The numbers of the events of a queue pair.
    fn numbers_of(&self, qp: QpId) -> impl Iterator<Item = u64> {
        self.by_queue_pair.range((qp, 0)..=(qp, u64::MAX)).map(|(_, number)| *number)
    }

    /// Whether the queue of `qp` has an event equal to `event`.
    fn has(&self, qp: QpId, event: &E) -> bool {
        self.numbers_of(qp).any(|number| self.events.get(&number) == Some(event))
    }

    /// Drops the events of a queue pair.
    fn forget(&mut self, qp: QpId) {
        let numbers: Vec<u64> = self.numbers_of(qp).collect();
        for number in numbers {
            self.remove(number);
        }
    }
}

/// Pending events for the application.
#[derive(Default)]
pub(crate) struct Events {
    /// Events of the connection manager.
    pub(crate) cm: EventQueue<CmEvent>,
    pub(crate) asynchronous: EventQueue<AsyncEvent>,
    pub(crate) notify: Option<Arc<dyn Notify>>,
}

impl Events {
    /// Adds an event of the connection manager; returns its number.
    pub(crate) fn push_cm(&mut self, event: CmEvent) -> u64 {
        let number = self.cm.push(event);
        self.fire();
        number
    }

    /// Reports that a request has ended. If its [`CmEvent::ConnectRequest`], the event with the number `announced`, is
    /// still in the queue, that event is removed instead, so short-lived requests cannot make the queue grow.
    pub(crate) fn request_gone(&mut self, gone: RequestId, announced: Option<u64>) {
        if announced.and_then(|number| self.cm.remove(number)).is_none() {
            self.push_cm(CmEvent::RequestGone { request: gone });
        }
    }

    /// Reports a soft error unless the same event is still in the queue, so that soft errors cannot make the queue
    /// grow.
    pub(crate) fn soft_error(&mut self, qp: QpId, error: SoftError) {
        let event = AsyncEvent::SoftError { qp, error };
        if !self.asynchronous.has(qp, &event) {
            self.push_async(event);
        }
    }

    pub(crate) fn push_async(&mut self, event: AsyncEvent) {
        self.asynchronous.push(event);
        self.fire();
    }

    /// Drops the events of a destroyed queue pair.
    pub(crate) fn forget(&mut self, qp: QpId) {
        self.cm.forget(qp);
        self.asynchronous.forget(qp);
    }

    fn fire(&self) {
        if let Some(notify) = &self.notify {
            notify.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rnic::table::Id;

    fn soft(qp: u64, unreachable: bool) -> AsyncEvent {
        let error = if unreachable { SoftError::Unreachable } else { SoftError::NoAnswer };
        AsyncEvent::SoftError { qp: QpId::from_raw(qp), error }
    }

    proptest! {
        /// A plain list is the oracle.
        #[test]
        fn prop_the_queue_agrees_with_a_list(ops in prop::collection::vec((0..6u8, 0..4u64, any::<bool>()), 0..200)) {
            let (mut events, mut list) = (Events::default(), Vec::new());
            for (op, qp, unreachable) in ops {
                let event = soft(qp, unreachable);
                match op {
                    0 => {
                        events.push_async(AsyncEvent::PortUp);
                        list.push(AsyncEvent::PortUp);
                    }
                    1 => {
                        events.forget(QpId::from_raw(qp));
                        list.retain(|e| e.queue_pair() != Some(QpId::from_raw(qp)));
                    }
                    2 => {
                        let oldest = (!list.is_empty()).then(|| list.remove(0));
                        prop_assert_eq!(events.asynchronous.pop(), oldest);
                    }
                    _ => {
                        let error = if unreachable { SoftError::Unreachable } else { SoftError::NoAnswer };
                        events.soft_error(QpId::from_raw(qp), error);
                        if !list.contains(&event) {
                            list.push(event);
                        }
                    }
                }
                prop_assert_eq!(events.asynchronous.events.values().cloned().collect::<Vec<_>>(), list.clone());
                let owned = list.iter().filter(|e| e.queue_pair().is_some()).count();
                prop_assert_eq!(events.asynchronous.by_queue_pair.len(), owned);
            }
        }
    }
}
