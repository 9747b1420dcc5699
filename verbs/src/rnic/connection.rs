//! What happens to connections: requests, establishment, and every way to end, told to the queue pair and
//! to the application.

use std::{collections::VecDeque, sync::Arc};

use xwarp_tcp::{
    mpa::{MpaConfig, MpaError, Offer},
    stack::ConnectParams,
    tcp::Tuning,
    ulp::{CloseReason, ConnId, Event, ListenerId},
    wire::Path,
};

use super::{
    AsyncEvent, CmError, CmEvent, Notify, PeerDepths, QpId, QpState, RequestId, Rnic, Shared,
    qp::{QueuePair, Stage},
};
use crate::rdmap::StreamError;

/// Whose a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Request,
    Qp(QpId),
}

/// Connections by their place in the stack's table, and those to be made once more.
#[derive(Debug, Default)]
pub(super) struct Connections {
    by_index: Vec<Option<(u32, Owner)>>,
    /// Attempts whose markers were refused, with their queue pairs; to be made without.
    retries: VecDeque<QpId>,
}

/// What an initiator asks for when its markers are refused, kept until it is established.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) path: Path,
    pub(crate) mpa: MpaConfig,
    pub(crate) params: ConnectParams,
    pub(crate) tuning: Option<Tuning>,
}

impl Connections {
    fn owner(&self, conn: ConnId) -> Option<Owner> {
        let (generation, owner) = (*self.by_index.get(conn.index as usize)?)?;
        (generation == conn.generation).then_some(owner)
    }

    pub(super) fn qp(&self, conn: ConnId) -> Option<QpId> {
        match self.owner(conn)? {
            Owner::Qp(qp) => Some(qp),
            Owner::Request => None,
        }
    }

    fn attach(&mut self, conn: ConnId, owner: Owner) {
        let index = conn.index as usize;
        if self.by_index.len() <= index {
            self.by_index.resize(index + 1, None);
        }
        if let Some(place) = self.by_index.get_mut(index) {
            *place = Some((conn.generation, owner));
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
    /// A queue pair that is free to connect.
    fn unconnected(&mut self, qp: QpId) -> Result<&mut QueuePair, CmError> {
        let qp = self.qps.get_mut(qp).ok_or(CmError::UnknownQp)?;
        if qp.state == QpState::Idle && qp.stage == Stage::Unconnected {
            Ok(qp)
        } else {
            Err(CmError::State(qp.state))
        }
    }

    /// Whether `qp` may connect with these depths.
    pub(crate) fn check_connect(&mut self, qp: QpId, ird: u16, ord: u16) -> Result<(), CmError> {
        let (max_ird, max_ord) = (self.limits.max_ird, self.limits.max_ord);
        self.unconnected(qp)?;
        for (attribute, value, limit) in [("ird", ird, max_ird), ("ord", ord, max_ord)] {
            if value > limit {
                return Err(CmError::ReadDepth { attribute, value, limit });
            }
        }
        Ok(())
    }

    /// The initiator's connection exists; `second` is the attempt to follow when its markers are refused.
    pub(crate) fn connecting(&mut self, qp: QpId, conn: ConnId, second: Option<Attempt>) {
        self.bind(qp, conn, Stage::Connecting);
        if let Some(qp) = self.qps.get_mut(qp) {
            qp.attempt = second.map(Box::new);
        }
    }

    fn bind(&mut self, qp: QpId, conn: ConnId, stage: Stage) {
        let Some(pair) = self.qps.get_mut(qp) else { return };
        pair.stage = stage;
        pair.conn = Some(conn);
        self.connections.attach(conn, Owner::Qp(qp));
    }

    /// The connection is `qp`'s from now on.
    pub(crate) fn accepting(&mut self, qp: QpId, request: RequestId) -> Result<(), CmError> {
        if self.connections.owner(request.0) != Some(Owner::Request) {
            return Err(CmError::UnknownRequest(request));
        }
        self.bind(qp, request.0, Stage::Accepting);
        Ok(())
    }

    /// The connection of `qp`, to be tuned; one that may be made once more remembers how.
    pub(crate) fn tuned(&mut self, qp: QpId, tuning: &Tuning) -> Result<ConnId, CmError> {
        let qp = self.qps.get_mut(qp).ok_or(CmError::UnknownQp)?;
        if let Some(attempt) = &mut qp.attempt {
            attempt.tuning = Some(*tuning);
        }
        qp.conn.ok_or(CmError::State(qp.state))
    }

    /// The answer could not be given: the request waits on.
    pub(crate) fn accept_failed(&mut self, qp: QpId, request: RequestId) {
        self.connections.attach(request.0, Owner::Request);
        if let Some(qp) = self.qps.get_mut(qp) {
            qp.reset_connection();
        }
    }

    /// Takes a request that is to be rejected.
    pub(crate) fn take_request(&mut self, request: RequestId) -> Result<(), CmError> {
        if self.connections.owner(request.0) != Some(Owner::Request) {
            return Err(CmError::UnknownRequest(request));
        }
        self.connections.detach(request.0);
        Ok(())
    }

    /// Begins a graceful close: what was posted is done, then our direction ends (RFC 5041 section 6.2.1).
    pub(crate) fn disconnect(&mut self, qp: QpId) -> Result<(), CmError> {
        let qp = self.qps.get_mut(qp).ok_or(CmError::UnknownQp)?;
        match qp.state {
            QpState::Rts | QpState::Closing => {
                qp.closing = true;
                qp.state = QpState::Closing;
                self.shared.wake(qp.conn);
                Ok(())
            }
            // On its way down already: nothing to do.
            QpState::Terminate | QpState::Error => Ok(()),
            QpState::Idle if qp.stage.is_underway() => {
                self.shared.abort(qp.conn);
                Ok(())
            }
            QpState::Idle => Err(CmError::State(QpState::Idle)),
        }
    }

    /// The next queue pair that connects once more, and what it asks for.
    pub(crate) fn next_retry(&mut self) -> Option<(QpId, Attempt)> {
        loop {
            let qp = self.connections.retries.pop_front()?;
            let pair = self.qps.get_mut(qp)?;
            if let Some(attempt) = pair.attempt.take() {
                return Some((qp, *attempt));
            }
        }
    }

    /// Connecting once more failed.
    pub(crate) fn retry_failed(&mut self, qp: QpId) {
        if let Some(pair) = self.qps.get_mut(qp) {
            pair.reset_connection();
            let reason = CloseReason::Startup(MpaError::MarkersRefused);
            self.shared.events.push_cm(CmEvent::ConnectError { qp, reason });
        }
    }

    pub(super) fn connection_event(&mut self, conn: ConnId, event: Event) {
        if let Event::Requested { listener, path, offer } = event {
            return self.requested(conn, listener, &path, offer);
        }
        match self.connections.owner(conn) {
            None => {}
            Some(Owner::Request) => {
                if matches!(event, Event::Closed(_)) {
                    self.connections.detach(conn);
                    self.shared.events.request_gone(RequestId(conn));
                }
            }
            Some(Owner::Qp(id)) => self.qp_event(conn, id, event),
        }
    }

    fn requested(&mut self, conn: ConnId, listener: ListenerId, path: &Path, offer: Offer) {
        self.connections.attach(conn, Owner::Request);
        self.shared.events.push_cm(CmEvent::ConnectRequest {
            request: RequestId(conn),
            listener,
            local: path.flow.local,
            remote: path.flow.remote,
            peer: PeerDepths::of(offer.ird, offer.ord),
            private_data: offer.private_data,
        });
    }

    fn qp_event(&mut self, conn: ConnId, id: QpId, event: Event) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        let shared = &mut self.shared;
        match event {
            Event::Requested { .. } => {}
            // What failed here meanwhile is told by a Terminate first, and then as a connection not made.
            Event::Established { .. } if qp.state != QpState::Idle => shared.wake(Some(conn)),
            Event::Established { path, agreed, private_data, rtr } => {
                let (local, remote) = (path.flow.local, path.flow.remote);
                qp.rx.expects_rtr = agreed.peer_to_peer && qp.stage == Stage::Accepting;
                qp.establish(agreed.ird, agreed.ord, rtr, (local, remote));
                let (ird, ord) = (agreed.ird, agreed.ord);
                let peer = PeerDepths::of(agreed.peer_ird, agreed.peer_ord);
                let established =
                    CmEvent::Established { qp: id, local, remote, private_data, ird, ord, peer };
                shared.events.push_cm(established);
                shared.wake(Some(conn));
            }
            Event::Rejected { private_data, ird, ord } => {
                self.connections.detach(conn);
                qp.reset_connection();
                let peer = PeerDepths::of(ird, ord);
                shared.events.push_cm(CmEvent::Rejected { qp: id, private_data, peer });
            }
            Event::StreamError(error) => qp.mpa_error(error, shared),
            Event::PeerClosed => qp.peer_closed(shared),
            Event::SoftError(error) => shared.events.soft_error(id, error),
            Event::Closed(reason) => {
                self.connections.detach(conn);
                if qp.closed(reason, shared) {
                    self.connections.retries.push_back(id);
                }
            }
        }
    }
}

impl QueuePair {
    /// Idle again after a connection that was never established; posted receives stay.
    fn reset_connection(&mut self) {
        self.reset();
        self.attempt = None;
    }

    fn mpa_error(&mut self, error: MpaError, shared: &mut Shared) {
        if self.stage.is_underway() {
            self.startup_error = Some(error);
            if error == MpaError::MarkersRefused {
                // Nothing to argue about: this connection goes, and perhaps another one comes.
                self.tx.finished = true;
                return shared.abort(self.conn);
            }
        }
        // Only an error about a message that waits is about a message.
        let quote = self.rx.withheld.take().filter(|_| error == MpaError::Withheld);
        self.fail(StreamError::Mpa(error), quote.unwrap_or_default(), shared);
    }

    /// The connection is gone. Returns whether it is to be tried once more without markers.
    fn closed(&mut self, reason: CloseReason, shared: &mut Shared) -> bool {
        self.conn = None;
        if !self.stage.is_underway() {
            self.disconnected(reason, shared);
            self.attempt = None;
            shared.events.push_cm(CmEvent::Closed { qp: self.id, reason });
            return false;
        }
        let reason = self.startup_error.take().map_or(reason, CloseReason::Startup);
        let refused = reason == CloseReason::Startup(MpaError::MarkersRefused);
        let attempt = self.attempt.take().filter(|_| refused);
        let retries = attempt.is_some();
        self.reset();
        self.attempt = attempt;
        if retries {
            self.stage = Stage::Connecting;
        } else {
            shared.events.push_cm(CmEvent::ConnectError { qp: self.id, reason });
        }
        retries
    }
}

/// What is left to do for the engine.
impl Rnic {
    pub(crate) fn has_errands(&self) -> bool {
        let Shared { wakes, resumes, aborts, .. } = &self.shared;
        !(wakes.is_empty() && resumes.is_empty() && aborts.is_empty() && self.connections.retries.is_empty())
    }

    /// Whether a sleeping application was woken since the last call.
    pub(crate) fn just_woke(&mut self) -> bool {
        std::mem::take(&mut self.shared.woke)
    }

    pub(crate) fn next_wake(&mut self) -> Option<ConnId> {
        self.shared.wakes.pop()
    }

    pub(crate) fn next_resume(&mut self) -> Option<ConnId> {
        self.shared.resumes.pop()
    }

    pub(crate) fn next_abort(&mut self) -> Option<ConnId> {
        self.shared.aborts.pop()
    }

    pub(crate) fn on_event(&mut self, notify: Arc<dyn Notify>) {
        self.shared.events.notify = Some(notify);
    }

    pub(crate) fn next_cm_event(&mut self) -> Option<CmEvent> {
        self.shared.events.cm.pop_front()
    }

    pub(crate) fn next_async_event(&mut self) -> Option<AsyncEvent> {
        self.shared.events.asynchronous.pop_front()
    }
}
