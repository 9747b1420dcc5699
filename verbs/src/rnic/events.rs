//! What happened that is no completion: connection events, and asynchronous events of queues.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use xwarp_tcp::{
    mpa::UNNEGOTIATED,
    tcp::SoftError,
    ulp::{CloseReason, ConnId, ListenerId},
};

use super::{CqId, Notify, QpId, SrqId};
use crate::rdmap::{StreamError, TerminateHeader};

/// A connection that a peer asks for, until it is accepted, rejected or gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub(crate) ConnId);

/// IRD and ORD as the peer gave them in its start-up frame; `None` where it leaves them to the applications
/// (as MPA revision 1 always does).
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
    /// A peer asks for a connection: answer with `Engine::accept` or `Engine::reject`.
    ConnectRequest {
        /// What to answer to.
        request: RequestId,
        /// The listener it came to.
        listener: ListenerId,
        /// Our address.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
        /// Bytes of the peer's application: not to be trusted.
        private_data: Vec<u8>,
        /// What the peer says of itself.
        peer: PeerDepths,
    },
    /// A request is gone before it was answered.
    RequestGone {
        /// Which.
        request: RequestId,
    },
    /// The queue pair is ready to send.
    Established {
        /// The queue pair.
        qp: QpId,
        /// Our address.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
        /// The responder's private data; empty at the responder.
        private_data: Vec<u8>,
        /// RDMA Reads that we serve at once.
        ird: u16,
        /// RDMA Reads that we may have outstanding.
        ord: u16,
        /// What the peer said of itself (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// The peer's application does not want the connection.
    Rejected {
        /// The queue pair that asked.
        qp: QpId,
        /// Bytes of the peer's application.
        private_data: Vec<u8>,
        /// What the peer said of itself, perhaps what it would need (RFC 6581 section 9.1).
        peer: PeerDepths,
    },
    /// The connection could not be made.
    ConnectError {
        /// The queue pair that asked, or was to answer.
        qp: QpId,
        /// Why: refused, unreachable, timed out, or an MPA start-up that failed.
        reason: CloseReason,
    },
    /// The peer sends no more: it closed its direction, terminated, or the connection is lost. Comes once.
    Disconnected {
        /// The queue pair.
        qp: QpId,
    },
    /// Nothing is left of the connection; the last event of a queue pair that was connected.
    Closed {
        /// The queue pair.
        qp: QpId,
        /// How it ended.
        reason: CloseReason,
    },
}

impl CmEvent {
    pub(super) fn concerns(&self, qp: QpId) -> bool {
        match self {
            Self::ConnectRequest { .. } | Self::RequestGone { .. } => false,
            Self::Established { qp: of, .. }
            | Self::Rejected { qp: of, .. }
            | Self::ConnectError { qp: of, .. }
            | Self::Disconnected { qp: of }
            | Self::Closed { qp: of, .. } => *of == qp,
        }
    }
}

/// Why a queue pair failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QpFault {
    /// The peer broke the protocol (or we cannot go on); we sent a Terminate.
    Local(StreamError),
    /// The peer sent a Terminate.
    Remote(TerminateHeader),
    /// The connection is gone.
    Connection(CloseReason),
    /// A completion queue that it uses overflowed.
    CqOverflow,
}

/// An asynchronous event (the verbs' word): something that no work request asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The queue pair left ready-to-send because of an error; its work is flushed.
    QpFatal {
        /// Which.
        qp: QpId,
        /// Why.
        fault: QpFault,
    },
    /// The connection of a queue pair is in trouble, and may survive it: nothing is over yet. Comes once, and again
    /// only when data went through in between (RFC 9293 sections 3.8.3 and 3.9.1.8).
    SoftError {
        /// Which.
        qp: QpId,
        /// Why.
        error: SoftError,
    },
    /// A completion queue lost an entry. It takes no more.
    CqOverflow {
        /// Which.
        cq: CqId,
    },
    /// A queue pair on a shared receive queue takes no more receives from it.
    LastWqeReached {
        /// Which.
        qp: QpId,
    },
    /// A shared receive queue holds fewer receives than its limit.
    SrqLimit {
        /// Which.
        srq: SrqId,
    },
}

impl AsyncEvent {
    pub(super) fn concerns(&self, qp: QpId) -> bool {
        match self {
            Self::QpFatal { qp: of, .. }
            | Self::SoftError { qp: of, .. }
            | Self::LastWqeReached { qp: of } => *of == qp,
            Self::CqOverflow { .. } | Self::SrqLimit { .. } => false,
        }
    }
}

/// Events that wait for the application.
#[derive(Default)]
pub(crate) struct Events {
    pub(crate) cm: VecDeque<CmEvent>,
    pub(crate) asynchronous: VecDeque<AsyncEvent>,
    pub(crate) notify: Option<Arc<dyn Notify>>,
}

impl Events {
    pub(crate) fn push_cm(&mut self, event: CmEvent) {
        self.cm.push_back(event);
        self.fire();
    }

    /// A request is gone. Of one that the application has not heard of it never hears, so that peers who
    /// come and go cannot make the queue grow.
    pub(crate) fn request_gone(&mut self, gone: RequestId) {
        let unheard =
            |event: &CmEvent| matches!(event, CmEvent::ConnectRequest { request, .. } if *request == gone);
        if let Some(at) = self.cm.iter().position(unheard) {
            self.cm.remove(at);
        } else {
            self.push_cm(CmEvent::RequestGone { request: gone });
        }
    }

    /// Trouble that the application has not taken notice of is not told twice, so that a peer's network cannot make
    /// the queue grow.
    pub(crate) fn soft_error(&mut self, qp: QpId, error: SoftError) {
        let event = AsyncEvent::SoftError { qp, error };
        if !self.asynchronous.contains(&event) {
            self.push_async(event);
        }
    }

    pub(crate) fn push_async(&mut self, event: AsyncEvent) {
        self.asynchronous.push_back(event);
        self.fire();
    }

    fn fire(&self) {
        if let Some(notify) = &self.notify {
            notify.notify();
        }
    }
}
