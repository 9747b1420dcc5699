//! The connection manager's verbs, and the initiator's further attempts when the peer refuses a part of MPA.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
};

use xwarp_tcp::{
    framing::{AcceptParams, FramingConfig, FramingCounters},
    link::Link,
    mpa::Markers,
    stack::{self, ListenError},
    tcp::{self, Tuning},
    time::Instant,
    ulp::ListenerId,
    wire::Path,
};

use super::Engine;
use crate::rnic::{Attempt, CmError, Lacks, QpId, RequestId, ResourceError};

/// Parameters of an initiator's connection.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConnectParams {
    /// RDMA Reads and atomics that we serve at once (IRD).
    pub ird: u16,
    /// RDMA Reads and atomics that we want to have outstanding (ORD).
    pub ord: u16,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
    /// Framing and its settings; `None`: the engine's.
    pub framing: Option<FramingConfig>,
    /// Paths of further attempts when the peer refuses a part of MPA: [`Engine::further_attempts`] of them, each with
    /// another local port that is reserved like the first. Without one, a further attempt uses the port of the one
    /// before, whose connection the peer may still keep in TIME-WAIT.
    pub fallbacks: VecDeque<Path>,
}

impl Engine {
    /// Framing of connections that have none of their own.
    pub fn framing_defaults(&self) -> &FramingConfig {
        &self.framing
    }

    /// Listens on `port` of `addr`. `None` stands for every address of the interface, the unspecified address of a family
    /// for every address of that family. `mtu` is the interface's, in bytes of an IP packet.
    pub fn listen(
        &mut self,
        link: &mut dyn Link,
        addr: Option<IpAddr>,
        port: u16,
        backlog: usize,
        mtu: u16,
        framing: Option<FramingConfig>,
    ) -> Result<ListenerId, ListenError> {
        let framing = framing.unwrap_or_else(|| self.framing.clone());
        self.stack.listen(link, addr, port, backlog, mtu, framing)
    }

    /// Stops listening. Requests that were already reported can still be answered.
    pub fn unlisten(&mut self, link: &mut dyn Link, listener: ListenerId) {
        self.stack.unlisten(link, listener);
    }

    /// Connects an idle queue pair; an event reports the result. `path.flow.local` names a port that the caller has
    /// reserved, and so do the fallbacks, until [`crate::rnic::CmEvent::Closed`],
    /// [`crate::rnic::CmEvent::Rejected`] or [`crate::rnic::CmEvent::ConnectError`].
    pub fn connect(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        qp: QpId,
        path: Path,
        params: ConnectParams,
    ) -> Result<(), CmError> {
        let ConnectParams { ird, ord, private_data, framing, fallbacks } = params;
        self.rnic.check_connect(qp, ird, ord)?;
        let framing = self.adapted(now, path.flow.remote, framing.as_ref());
        let params = stack::ConnectParams { ird, ord, private_data };
        let conn = self.stack.connect(now, link, path, framing.clone(), params.clone())?;
        let attempt = Attempt { path, fallbacks, framing, params, tuning: None, lacks: Lacks::default() };
        self.rnic.connecting(qp, conn, attempt);
        Ok(())
    }

    /// The settings `framing` (`None`: the engine's) for connecting to `peer`, without the parts that the peer is known
    /// to lack.
    fn adapted(&self, now: Instant, peer: SocketAddr, framing: Option<&FramingConfig>) -> FramingConfig {
        self.peers.lacks(now, peer).adapt(framing.unwrap_or(&self.framing).clone())
    }

    /// Largest number of attempts after the first one of a connection to `peer` with `framing` (`None`: the engine's):
    /// with MPA one without markers, and one with revision 1, unless the peer is known to need it. None after streaming
    /// data, and none with RDMA/TCP: a connector never falls back to another framing.
    pub fn further_attempts(&self, now: Instant, peer: SocketAddr, framing: Option<&FramingConfig>) -> usize {
        match self.adapted(now, peer, framing) {
            FramingConfig::Mpa(mpa) if mpa.streaming.is_none() => {
                usize::from(mpa.markers == Markers::Prefer) + usize::from(mpa.falls_back_to_revision_one())
            }
            FramingConfig::Mpa(_) | FramingConfig::RdmaTcp(_) | FramingConfig::Either(..) => 0,
        }
    }

    /// Repeats a connection attempt that failed because the peer does not support a part of MPA, without this part.
    pub(super) fn retry(&mut self, now: Instant, link: &mut dyn Link, qp: QpId) {
        let Some(attempt) = self.rnic.take_retry(qp) else { return };
        let Attempt { path, framing, params, tuning, lacks, .. } = attempt.clone();
        tracing::info!(remote = %path.flow.remote, ?lacks, "the peer does not support a part of MPA, connecting without it");
        match self.stack.connect(now, link, path, framing, params) {
            Ok(conn) => {
                self.rnic.connecting(qp, conn, attempt);
                if let Some(tuning) = tuning {
                    self.stack.tune(now, conn, &tuning);
                }
            }
            Err(error) => {
                tracing::warn!(qp = qp.number(), %error, "the repeated connection attempt failed");
                self.rnic.retry_failed(qp, lacks);
            }
        }
    }

    /// Changes the TCP settings of a queue pair's connection, which may still be in start-up.
    pub fn tune(&mut self, now: Instant, qp: QpId, tuning: &Tuning) -> Result<(), CmError> {
        let conn = self.rnic.tuned(qp, tuning)?;
        self.stack.tune(now, conn, tuning);
        Ok(())
    }

    /// TCP's state and MPA's counters of a queue pair's connection, if it has one.
    pub fn connection_info(&self, qp: QpId) -> Option<(tcp::Info, FramingCounters)> {
        let conn = self.rnic.connection_of(qp)?;
        Some((self.stack.info(conn)?, self.stack.framing_counters_of(conn)?))
    }

    /// Payload bytes of a full segment of a queue pair whose connection has data in flight.
    pub fn emss_in_flight(&self, qp: QpId) -> Option<usize> {
        self.stack.emss_in_flight(self.rnic.connection_of(qp)?)
    }

    /// The TCP settings of a new connection, which [`Self::tune`] changes.
    pub fn tuning_defaults(&self) -> Tuning {
        self.stack.tuning_defaults()
    }

    /// Accepts a request with an idle queue pair.
    pub fn accept(&mut self, request: RequestId, qp: QpId, params: AcceptParams) -> Result<(), CmError> {
        self.rnic.check_connect(qp, params.ird, params.ord)?;
        self.rnic.accepting(qp, request)?;
        if let Err(error) = self.stack.accept(request.0, params, &mut self.rnic) {
            self.rnic.accept_failed(qp, request);
            return Err(error.into());
        }
        Ok(())
    }

    /// Rejects a request, with private data for the peer's application. After an error the request can still be
    /// answered.
    pub fn reject(&mut self, now: Instant, request: RequestId, private_data: &[u8]) -> Result<(), CmError> {
        self.rnic.check_request(request)?;
        self.stack.reject(now, request.0, private_data)?;
        self.rnic.rejected(request);
        Ok(())
    }

    /// Closes gracefully, without a Terminate: posted work is executed and the peer's requests are answered before
    /// our direction ends. Work that is posted later is flushed. The connection is reset when the peer accepts no data
    /// for the user timeout (its window stays closed), and after five minutes in any case.
    pub fn disconnect(&mut self, qp: QpId) -> Result<(), CmError> {
        self.rnic.disconnect(qp)
    }

    /// Resets a connection at once; its work is flushed.
    pub fn abort(&mut self, qp: QpId) -> Result<(), ResourceError> {
        self.rnic.fail_qp(qp)
    }
}
