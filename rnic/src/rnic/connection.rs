//! Connection events: requests, establishment and every way to end, applied to the queue pair and reported to the
//! application.

use std::{collections::VecDeque, sync::Arc};

use xwarp_tcp::{
    framing::{Agreed, FramingConfig, FramingError, Offer},
    mpa::{Markers, MpaError, RequestRevision},
    stack::ConnectParams,
    tcp::Tuning,
    ulp::{CloseReason, ConnId, Event, ListenerId},
    wire::Path,
};

use super::{
    AsyncEvent, CmError, CmEvent, Deferred, Notify, PeerDepths, QpId, QpState, RequestId, Rnic, Shared,
    SrqId, StreamId,
    phase::{Phase, Since},
    qp::{Current, QueuePair},
    rdma_tcp::Stream,
};
use crate::rdmap::StreamError;

/// The owner of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A request of a peer. Holds the number of its [`CmEvent::ConnectRequest`] until the request is accepted.
    Request(Option<u64>),
    Qp(QpId),
}

/// Owners of connections by the connection's index in the stack's table.
#[derive(Debug, Default)]
pub(super) struct Connections {
    by_index: Vec<Option<(ConnId, Owner)>>,
}

/// The parts of MPA that a peer does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Lacks {
    /// Markers in the FPDUs that it sends.
    pub(crate) markers: bool,
    /// Requests of revision 2.
    pub(crate) revision_two: bool,
}

impl Lacks {
    /// The parts that either of the two names.
    pub(crate) const fn and(self, other: Self) -> Self {
        Self { markers: self.markers || other.markers, revision_two: self.revision_two || other.revision_two }
    }

    /// The settings of an initiator for a peer that lacks these parts.
    pub(crate) fn adapt(self, mut framing: FramingConfig) -> FramingConfig {
        if let FramingConfig::Mpa(mpa) = &mut framing {
            if self.markers && mpa.markers == Markers::Prefer {
                mpa.markers = Markers::Off;
            }
            if self.revision_two && mpa.falls_back_to_revision_one() {
                mpa.revision = RequestRevision::One;
                // Revision 1 does not have this mode.
                mpa.peer_to_peer.clear();
            }
        }
        framing
    }
}

/// Parameters of an initiator's connection attempt, kept until the connection is established, in case the peer refuses
/// a part of MPA that another attempt can leave out.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) path: Path,
    /// Paths of the attempts that may follow, in this order. Without one, an attempt uses the path of the one before.
    pub(crate) fallbacks: VecDeque<Path>,
    pub(crate) framing: FramingConfig,
    pub(crate) params: ConnectParams,
    pub(crate) tuning: Option<Tuning>,
    /// The parts that the peer refused in the attempts so far.
    pub(crate) lacks: Lacks,
}

impl Attempt {
    /// The attempt after one that has ended for `reason`, without the part of MPA that the peer refused. `None`
    /// when the end is final. Each further attempt leaves out one more of two parts, so there are at most three
    /// attempts.
    fn after(mut self, reason: CloseReason) -> Option<Self> {
        let markers = reason == CloseReason::Startup(FramingError::Mpa(MpaError::MarkersRefused));
        // A responder that does not support revision 2 closes the connection (RFC 6581 section 10), or answers with
        // revision 1.
        let revision_two = matches!(
            reason,
            CloseReason::Reset
                | CloseReason::Startup(FramingError::Mpa(MpaError::Truncated | MpaError::NotEnhanced))
        );
        let refused = Lacks { markers, revision_two };
        let framing = refused.adapt(self.framing.clone());
        // After streaming data, only the application can repeat the attempt.
        if framing == self.framing || framing.streaming().is_some() {
            return None;
        }
        self.lacks = self.lacks.and(refused);
        self.framing = framing;
        self.path = self.fallbacks.pop_front().unwrap_or(self.path);
        Some(self)
    }
}

impl Connections {
    fn owner(&self, conn: ConnId) -> Option<Owner> {
        let (named, owner) = (*self.by_index.get(conn.index as usize)?)?;
        (named == conn).then_some(owner)
    }

    #[inline]
    pub(super) fn qp(&self, conn: ConnId) -> Option<QpId> {
        match self.by_index.get(conn.index as usize)? {
            Some((named, Owner::Qp(qp))) if named.generation == conn.generation => Some(*qp),
            _ => None,
        }
    }

    fn attach(&mut self, conn: ConnId, owner: Owner) {
        let index = conn.index as usize;
        if self.by_index.len() <= index {
            self.by_index.resize(index + 1, None);
        }
        if let Some(place) = self.by_index.get_mut(index) {
            *place = Some((conn, owner));
        }
    }

    pub(super) fn detach(&mut self, conn: ConnId) {
        if self.owner(conn).is_some()
            && let Some(place) = self.by_index.get_mut(conn.index as usize)
        {
            *place = None;
        }
    }
}

impl Rnic {
    /// The queue pair `qp`, if it is idle and unconnected.
    pub(super) fn unconnected(&mut self, qp: QpId) -> Result<&mut QueuePair, CmError> {
        let qp = self.qps.get_mut(qp).ok_or(CmError::UnknownQp)?;
        if matches!(qp.phase, Phase::Idle) { Ok(qp) } else { Err(CmError::State(qp.phase.state())) }
    }

    /// Checks that `qp` may connect with these depths.
    pub(crate) fn check_connect(&mut self, qp: QpId, ird: u16, ord: u16) -> Result<(), CmError> {
        let (max_ird, max_ord) = (self.limits().max_ird, self.limits().max_ord);
        self.unconnected(qp)?;
        for (attribute, value, limit) in [("ird", ird, max_ird), ("ord", ord, max_ord)] {
            if value > limit {
                return Err(CmError::ReadDepth { attribute, value, limit });
            }
        }
        Ok(())
    }

    /// Attaches the initiator's new connection, which `attempt` describes, to `qp`.
    pub(crate) fn connecting(&mut self, qp: QpId, conn: ConnId, attempt: Attempt) {
        self.bind(qp, conn, Phase::Connecting(Some(Box::new(attempt))));
    }

    fn bind(&mut self, qp: QpId, conn: ConnId, phase: Phase) {
        let Some(pair) = self.qps.get_mut(qp) else { return };
        pair.phase = phase;
        pair.conn = Some(conn);
        self.connections.attach(conn, Owner::Qp(qp));
    }

    /// Attaches the connection of `request` to `qp`.
    pub(crate) fn accepting(&mut self, qp: QpId, request: RequestId) -> Result<(), CmError> {
        self.check_request(request)?;
        self.bind(qp, request.0, Phase::Accepting);
        Ok(())
    }

    /// The connection of `qp`, to be tuned. A second attempt that may follow gets the same tuning.
    pub(crate) fn tuned(&mut self, qp: QpId, tuning: &Tuning) -> Result<ConnId, CmError> {
        let qp = self.qps.get_mut(qp).ok_or(CmError::UnknownQp)?;
        if let Phase::Connecting(Some(attempt)) = &mut qp.phase {
            attempt.tuning = Some(*tuning);
        }
        qp.conn.ok_or(CmError::State(qp.phase.state()))
    }

    /// Undoes [`Self::accepting`] after the answer failed: the request can be answered again.
    pub(crate) fn accept_failed(&mut self, qp: QpId, request: RequestId) {
        self.connections.attach(request.0, Owner::Request(None));
        if let Some(qp) = self.qps.get_mut(qp) {
            qp.reset();
        }
    }

    /// Checks that a request waits for an answer.
    pub(crate) fn check_request(&self, request: RequestId) -> Result<(), CmError> {
        if matches!(self.connections.owner(request.0), Some(Owner::Request(_))) {
            Ok(())
        } else {
            Err(CmError::UnknownRequest(request))
        }
    }

    /// Detaches the connection of a rejected request; from now on only the stack refers to it.
    pub(crate) fn rejected(&mut self, request: RequestId) {
        self.connections.detach(request.0);
    }

    /// The connection of an application's end that carries streaming data.
    pub(crate) fn stream_connection(&self, stream: StreamId) -> Result<ConnId, CmError> {
        match stream {
            StreamId::Request(request) => self.check_request(request).map(|()| request.0),
            StreamId::Qp(qp) => {
                let qp = self.qps.get(qp).ok_or(CmError::UnknownQp)?;
                qp.conn.ok_or(CmError::State(qp.phase.state()))
            }
        }
    }

    /// Begins a graceful close: posted work is executed, then our direction ends (RFC 5041 section 6.2.1).
    pub(crate) fn disconnect(&mut self, qp: QpId) -> Result<(), CmError> {
        let qp = self.qps.get_mut(qp).ok_or(CmError::UnknownQp)?;
        match &mut qp.phase {
            Phase::Open(closes) => {
                closes.here = true;
                self.shared.deferred.extend(qp.conn.map(Deferred::Close));
                Ok(())
            }
            // The stream is already ending.
            Phase::Ended { .. } => Ok(()),
            Phase::Connecting(attempt) => {
                // No other attempt follows, even if the peer refuses this one before the abort is executed.
                *attempt = None;
                self.shared.abort(qp.conn);
                Ok(())
            }
            Phase::Accepting => {
                self.shared.abort(qp.conn);
                Ok(())
            }
            Phase::Idle => Err(CmError::State(QpState::Idle)),
        }
    }

    /// Takes the connection attempt that `qp` repeats, unless it has been given up.
    pub(crate) fn take_retry(&mut self, qp: QpId) -> Option<Attempt> {
        match &mut self.qps.get_mut(qp)?.phase {
            Phase::Connecting(attempt) => attempt.take().map(|attempt| *attempt),
            _ => None,
        }
    }

    /// Reports that another connection attempt could not be started after the peer refused a part of MPA.
    pub(crate) fn retry_failed(&mut self, qp: QpId, lacks: Lacks) {
        if let Some(pair) = self.qps.get_mut(qp) {
            pair.reset();
            let error = if lacks.revision_two { MpaError::NotEnhanced } else { MpaError::MarkersRefused };
            let reason = CloseReason::Startup(error.into());
            self.shared.events.push_cm(CmEvent::ConnectError { qp, reason });
        }
    }

    pub(super) fn connection_event(&mut self, conn: ConnId, event: Event) {
        if let Event::Requested { listener, path, offer } = event {
            return self.requested(conn, listener, &path, offer);
        }
        if let Event::Streaming { listener: Some(listener), path } = event {
            let announced = self.shared.events.push_cm(CmEvent::Streaming {
                stream: StreamId::Request(RequestId(conn)),
                listener: Some(listener),
                local: path.flow.local,
                remote: path.flow.remote,
            });
            return self.connections.attach(conn, Owner::Request(Some(announced)));
        }
        match self.connections.owner(conn) {
            None => {}
            Some(Owner::Request(announced)) => match event {
                Event::Closed(_) => {
                    self.connections.detach(conn);
                    self.shared.events.request_gone(RequestId(conn), announced);
                }
                // An application that has not seen the connection yet reads the bytes once it does.
                Event::StreamReadable
                    if announced.is_none_or(|number| !self.shared.events.cm.holds(number)) =>
                {
                    let stream = StreamId::Request(RequestId(conn));
                    self.shared.events.push_cm(CmEvent::StreamReadable { stream });
                }
                _ => {}
            },
            Some(Owner::Qp(id)) => self.qp_event(conn, id, event),
        }
    }

    fn requested(&mut self, conn: ConnId, listener: ListenerId, path: &Path, offer: Offer) {
        let announced = self.shared.events.push_cm(CmEvent::ConnectRequest {
            request: RequestId(conn),
            listener,
            local: path.flow.local,
            remote: path.flow.remote,
            peer: PeerDepths::of(offer.ird(), offer.ord()),
            private_data: offer.into_private_data(),
        });
        self.connections.attach(conn, Owner::Request(Some(announced)));
    }

    fn qp_event(&mut self, conn: ConnId, id: QpId, event: Event) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        let shared = &mut self.shared;
        match event {
            Event::Requested { .. } => {}
            Event::Streaming { path, .. } => {
                let (local, remote) = (path.flow.local, path.flow.remote);
                let stream = StreamId::Qp(id);
                shared.events.push_cm(CmEvent::Streaming { stream, listener: None, local, remote });
            }
            Event::StreamReadable => {
                shared.events.push_cm(CmEvent::StreamReadable { stream: StreamId::Qp(id) });
            }
            // The queue pair failed during start-up: the peer gets a Terminate, then the application a
            // `ConnectError`.
            Event::Established { agreed, .. } if qp.phase.state() != QpState::Idle => {
                qp.agree(&agreed);
                shared.wake(Some(conn));
            }
            Event::Disagreed(agreed) => qp.agree(&agreed),
            Event::Established { path, agreed, private_data } => {
                let (local, remote) = (path.flow.local, path.flow.remote);
                tracing::debug!(qp = id.number(), %local, %remote, ?agreed, path_mtu = path.mtu, "connection established");
                shared.deferred.extend(qp.learned());
                let (ird, ord) = (agreed.ird(), agreed.ord());
                qp.agree(&agreed);
                qp.establish(ird, ord, (local, remote));
                let peer = PeerDepths::of(agreed.peer_ird(), agreed.peer_ord());
                let established =
                    CmEvent::Established { qp: id, local, remote, private_data, ird, ord, peer };
                shared.events.push_cm(established);
                shared.wake(Some(conn));
            }
            Event::Rejected { private_data, ird, ord } => {
                shared.deferred.extend(qp.learned());
                self.connections.detach(conn);
                qp.reset();
                let peer = PeerDepths::of(ird, ord);
                shared.events.push_cm(CmEvent::Rejected { qp: id, private_data, peer });
            }
            Event::StreamError(error) => qp.framing_error(error, shared),
            Event::PeerClosed => qp.peer_closed(shared),
            Event::SoftError(error) => shared.events.soft_error(id, error),
            Event::Closed(reason) => {
                self.connections.detach(conn);
                if qp.closed(reason, shared) {
                    shared.deferred.push(Deferred::Retry(id));
                }
            }
        }
    }
}

impl QueuePair {
    /// Adopts the codec of the connection's segments, and the framing's parameters of the first ones.
    fn agree(&mut self, agreed: &Agreed) {
        match agreed {
            Agreed::Mpa(agreed) => {
                self.versions = agreed.revision.into();
                self.send_immediate = agreed.send_immediate;
                self.tx.current = agreed.rtr.map(Current::Rtr);
                self.rx.expects_rtr = agreed.peer_to_peer && matches!(self.phase, Phase::Accepting);
            }
            Agreed::RdmaTcp(agreed) => self.stream = Some(Box::new(Stream::new(agreed))),
        }
    }

    fn framing_error(&mut self, error: FramingError, shared: &mut Shared) {
        // Only `Withheld` refers to a message, the one that waits for a receive.
        let quote = self.rx.withheld.filter(|_| error == MpaError::Withheld.into());
        self.fail(StreamError::from(error), quote.unwrap_or_default(), shared);
        self.note_startup_error(error);
    }

    /// The parts that the peer lacks, now that it has answered an attempt without them. Before that answer the cause is unknown:
    /// a connection can be reset for other reasons.
    fn learned(&self) -> Option<Deferred> {
        let Phase::Connecting(Some(attempt)) = &self.phase else { return None };
        let lacks = attempt.lacks;
        (lacks != Lacks::default()).then_some(Deferred::Learned(attempt.path.flow.remote, lacks))
    }

    /// Handles the end of the connection. Returns whether another attempt follows.
    fn closed(&mut self, reason: CloseReason, shared: &mut Shared) -> bool {
        self.conn = None;
        let (next, reason) = match &mut self.phase {
            Phase::Idle | Phase::Open(_) | Phase::Ended { since: Since::Idle | Since::Open(_), .. } => {
                self.disconnected(reason, shared);
                shared.events.push_cm(CmEvent::Closed { qp: self.id, reason });
                return false;
            }
            Phase::Ended { since: Since::Start(error), .. } => {
                (None, error.map_or(reason, CloseReason::Startup))
            }
            Phase::Connecting(attempt) => (attempt.take().and_then(|attempt| attempt.after(reason)), reason),
            Phase::Accepting => (None, reason),
        };
        self.reset();
        let retries = next.is_some();
        if let Some(next) = next {
            self.phase = Phase::Connecting(Some(Box::new(next)));
        } else {
            shared.events.push_cm(CmEvent::ConnectError { qp: self.id, reason });
        }
        retries
    }
}

/// Work that the RNIC defers to the engine.
impl Rnic {
    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        !self.shared.deferred.is_empty()
    }

    #[inline]
    pub(crate) fn take_only_wake(&mut self) -> Option<ConnId> {
        self.shared.deferred.take_only_wake()
    }

    pub(crate) fn next_deferred(&mut self) -> Option<Deferred> {
        self.shared.deferred.next()
    }

    /// The next connection that waits for a receive of `srq`, as long as the queue has receives.
    pub(crate) fn next_starved(&mut self, srq: SrqId) -> Option<ConnId> {
        let engine = self.shared.engine;
        loop {
            let first = self.shared.starved.first(srq).and_then(|qp| self.qps.get_mut(qp));
            let qp = first.filter(|qp| qp.rq.pool().is_some_and(|srq| srq.has_receive_for(engine)))?;
            qp.stop_waiting(&mut self.shared);
            if let Some(conn) = qp.conn {
                return Some(conn);
            }
        }
    }

    /// Whether a completion woke a sleeping application since the last call.
    pub(crate) fn just_woke(&mut self) -> bool {
        std::mem::take(&mut self.shared.woke)
    }

    pub(crate) fn on_event(&mut self, notify: Arc<dyn Notify>) {
        self.shared.events.notify = Some(notify);
    }

    pub(crate) fn has_events(&self) -> bool {
        let events = &self.shared.events;
        !events.cm.is_empty() || !events.asynchronous.is_empty()
    }

    pub(crate) fn next_cm_event(&mut self) -> Option<CmEvent> {
        self.shared.events.cm.pop()
    }

    pub(crate) fn next_async_event(&mut self) -> Option<AsyncEvent> {
        self.shared.events.asynchronous.pop()
    }
}
