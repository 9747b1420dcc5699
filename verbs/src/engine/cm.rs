//! The connection manager's verbs, and the second try of an initiator whose markers were refused.

use std::net::IpAddr;

use xwarp_tcp::{
    link::Link,
    mpa::{AcceptParams, Markers, MpaConfig},
    stack::{self, ListenError},
    tcp::Tuning,
    time::Instant,
    ulp::ListenerId,
    wire::Path,
};

use super::Engine;
use crate::rnic::{Attempt, CmError, QpId, RequestId, ResourceError};

/// Peers remembered for refusing markers; beyond that all are forgotten, at the price of one try more each.
const MOST_MARKERLESS: usize = 4096;

/// What an initiator asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConnectParams {
    /// RDMA Reads and atomics that we serve at once.
    pub ird: u16,
    /// RDMA Reads and atomics that we want to have outstanding.
    pub ord: u16,
    /// For the peer's application.
    pub private_data: Vec<u8>,
    /// MPA's settings, in place of the engine's.
    pub mpa: Option<MpaConfig>,
    /// The path of a second attempt when the peer refuses markers: with another local port, reserved like the
    /// first. Without it the second attempt takes the first one's port, whose connection the peer may still
    /// keep in TIME-WAIT.
    pub fallback: Option<Path>,
}

impl Engine {
    /// What connections start with unless a verb says otherwise.
    pub fn mpa_defaults(&self) -> &MpaConfig {
        &self.mpa
    }

    /// Takes connection requests to `port` of `addr` (`None`: of every address of the interface). `mtu` is
    /// the interface's, in bytes of an IP packet.
    pub fn listen(
        &mut self,
        link: &mut dyn Link,
        addr: Option<IpAddr>,
        port: u16,
        backlog: usize,
        mtu: u16,
        mpa: Option<MpaConfig>,
    ) -> Result<ListenerId, ListenError> {
        let mpa = mpa.unwrap_or_else(|| self.mpa.clone());
        self.stack.listen(link, addr, port, backlog, mtu, mpa)
    }

    /// Takes no more requests there. Those that came stay to be answered.
    pub fn unlisten(&mut self, link: &mut dyn Link, listener: ListenerId) {
        self.stack.unlisten(link, listener);
    }

    /// Connects an idle queue pair; how it ends comes as an event. `path.flow.local` names a port that the
    /// caller has reserved, and so does the fallback's, until [`crate::rnic::CmEvent::Closed`],
    /// [`crate::rnic::CmEvent::Rejected`] or [`crate::rnic::CmEvent::ConnectError`].
    pub fn connect(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        qp: QpId,
        path: Path,
        params: ConnectParams,
    ) -> Result<(), CmError> {
        let ConnectParams { ird, ord, private_data, mpa, fallback } = params;
        self.rnic.check_connect(qp, ird, ord)?;
        let may_fall_back = self.may_fall_back(path.flow.remote_ip(), mpa.as_ref());
        let mut mpa = mpa.unwrap_or_else(|| self.mpa.clone());
        if mpa.markers == Markers::Prefer && !may_fall_back {
            mpa.markers = Markers::Off;
        }
        let params = stack::ConnectParams { ird, ord, private_data };
        let second = may_fall_back.then(|| Attempt {
            path: fallback.unwrap_or(path),
            mpa: MpaConfig { markers: Markers::Off, ..mpa.clone() },
            params: params.clone(),
            tuning: None,
        });
        let conn = self.stack.connect(now, link, path, mpa, params)?;
        self.rnic.connecting(qp, conn, second);
        Ok(())
    }

    /// Whether connecting to `peer` with `mpa` (`None`: the engine's settings) may take a second attempt:
    /// markers are preferred, and the peer is not known to refuse them.
    pub fn may_fall_back(&self, peer: IpAddr, mpa: Option<&MpaConfig>) -> bool {
        mpa.unwrap_or(&self.mpa).markers == Markers::Prefer && !self.markerless.contains(&peer)
    }

    /// Connects those once more whose markers were refused, without, and remembers their peers (design
    /// section 5).
    pub(super) fn retry_without_markers(&mut self, now: Instant, link: &mut dyn Link) {
        while let Some((qp, Attempt { path, mpa, params, tuning })) = self.rnic.next_retry() {
            if self.markerless.len() >= MOST_MARKERLESS {
                self.markerless.clear();
            }
            self.markerless.insert(path.flow.remote_ip());
            tracing::info!(remote = %path.flow.remote, "the peer refuses markers, connecting without");
            match self.stack.connect(now, link, path, mpa, params) {
                Ok(conn) => {
                    self.rnic.connecting(qp, conn, None);
                    if let Some(tuning) = tuning {
                        self.stack.tune(now, conn, &tuning);
                    }
                }
                Err(error) => {
                    tracing::warn!(qp = qp.number(), %error, "connecting once more failed");
                    self.rnic.retry_failed(qp);
                }
            }
        }
    }

    /// Changes the settings of TCP of a queue pair's connection, which may still be in start-up, from now on.
    pub fn tune(&mut self, now: Instant, qp: QpId, tuning: &Tuning) -> Result<(), CmError> {
        let conn = self.rnic.tuned(qp, tuning)?;
        self.stack.tune(now, conn, tuning);
        Ok(())
    }

    /// What [`Self::tune`] finds in a new connection.
    pub fn tuning_defaults(&self) -> Tuning {
        self.stack.tuning_defaults()
    }

    /// Answers a request: the queue pair, which must be idle, is connected.
    pub fn accept(
        &mut self,
        now: Instant,
        request: RequestId,
        qp: QpId,
        params: AcceptParams,
    ) -> Result<(), CmError> {
        self.rnic.check_connect(qp, params.ird, params.ord)?;
        self.rnic.accepting(qp, request)?;
        if let Err(error) = self.stack.accept(now, request.0, params, &mut self.rnic) {
            self.rnic.accept_failed(qp, request);
            return Err(error.into());
        }
        Ok(())
    }

    /// Refuses a request, with bytes for the peer's application.
    pub fn reject(&mut self, now: Instant, request: RequestId, private_data: &[u8]) -> Result<(), CmError> {
        self.rnic.take_request(request)?;
        Ok(self.stack.reject(now, request.0, private_data)?)
    }

    /// Closes in order: what was posted is done, and what the peer asked for is answered, before our
    /// direction ends; nothing more can be posted. Without a Terminate.
    pub fn disconnect(&mut self, qp: QpId) -> Result<(), CmError> {
        self.rnic.disconnect(qp)
    }

    /// Ends a connection at once by a reset; the work is flushed.
    pub fn abort(&mut self, qp: QpId) -> Result<(), ResourceError> {
        self.rnic.fail_qp(qp)
    }
}
