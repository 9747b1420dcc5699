//! The session of a connection whose framing was chosen at run time.

use std::{fmt, time::Duration};

use super::{FramingCounters, FramingError, Session};
use crate::{
    link::{FrameWriter, Link, RxFrame},
    mpa::{AcceptParams, MpaConfig, SetupError},
    rdma_tcp::{RdmaTcpConfig, Setup},
    seq::StreamOffset,
    tcp::{self, Filled},
    time::Instant,
    ulp::{ConnId, ListenerId, Ulp},
    wire::Path,
};

/// The framing of a connection, with this end's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FramingConfig {
    /// MPA (RFC 5044).
    Mpa(MpaConfig),
    /// RDMA/TCP of 2000.
    RdmaTcp(RdmaTcpConfig),
}

impl Default for FramingConfig {
    fn default() -> Self {
        Self::Mpa(MpaConfig::default())
    }
}

impl FramingConfig {
    /// The time limit for streaming data before the framing begins, if there are any.
    pub fn streaming(&self) -> Option<Duration> {
        match self {
            Self::Mpa(config) => config.streaming,
            Self::RdmaTcp(_) => None,
        }
    }
}

impl From<MpaConfig> for FramingConfig {
    fn from(config: MpaConfig) -> Self {
        Self::Mpa(config)
    }
}

impl From<RdmaTcpConfig> for FramingConfig {
    fn from(config: RdmaTcpConfig) -> Self {
        Self::RdmaTcp(config)
    }
}

/// The session of one connection. `P` is [`Ulp::Placed`].
#[derive(Debug)]
pub(crate) enum AnySession<P> {
    /// With MPA.
    Mpa(Session<P, MpaConfig>),
    /// With RDMA/TCP.
    RdmaTcp(Session<P, Setup>),
}

/// Calls the same method of the session, whichever it is.
macro_rules! either {
    ($any:expr, $session:ident => $call:expr) => {
        match $any {
            AnySession::Mpa($session) => $call,
            AnySession::RdmaTcp($session) => $call,
        }
    };
}

impl<P: Copy + fmt::Debug> AnySession<P> {
    /// See [`Session::initiator`]. `random` has 128 bits that no one else can guess.
    pub(crate) fn initiator(
        now: Instant,
        config: FramingConfig,
        random: u128,
        private_data: Vec<u8>,
        ird: u16,
        ord: u16,
    ) -> Result<Self, SetupError> {
        Ok(match config {
            FramingConfig::Mpa(config) => Self::Mpa(Session::initiator(now, config, private_data, ird, ord)?),
            FramingConfig::RdmaTcp(config) => {
                Self::RdmaTcp(Session::initiator(now, Setup { config, random }, private_data, ird, ord)?)
            }
        })
    }

    /// See [`Session::responder`].
    pub(crate) fn responder(now: Instant, config: FramingConfig, random: u128, listener: ListenerId) -> Self {
        match config {
            FramingConfig::Mpa(config) => Self::Mpa(Session::responder(now, config, listener)),
            FramingConfig::RdmaTcp(config) => {
                Self::RdmaTcp(Session::responder(now, Setup { config, random }, listener))
            }
        }
    }

    pub(crate) fn accept<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        params: AcceptParams,
    ) -> Result<(), SetupError> {
        either!(self, session => session.accept(now, ulp, conn, path, params))
    }

    pub(crate) fn reject(&mut self, now: Instant, private_data: &[u8]) -> Result<(), SetupError> {
        either!(self, session => session.reject(now, private_data))
    }

    pub(crate) fn fill<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        offset: StreamOffset,
        emss: usize,
        out: &mut FrameWriter<'_>,
    ) -> Filled {
        either!(self, session => session.fill(now, ulp, conn, offset, emss, out))
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of a frame on its way up")]
    pub(crate) fn receive<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        link: &mut dyn Link,
        arrival: tcp::NewPayload,
        frame: RxFrame,
        spare: usize,
    ) -> bool {
        either!(self, session => session.receive(now, ulp, conn, path, link, arrival, frame, spare))
    }

    pub(crate) fn resume<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        link: &mut dyn Link,
    ) {
        either!(self, session => session.resume(now, ulp, conn, link));
    }

    pub(crate) fn peer_closed<U: Ulp<Placed = P>>(&mut self, ulp: &mut U, conn: ConnId, link: &mut dyn Link) {
        either!(self, session => session.peer_closed(ulp, conn, link));
    }

    pub(crate) fn on_timer<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        link: &mut dyn Link,
    ) {
        either!(self, session => session.on_timer(now, ulp, conn, link));
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        either!(self, session => session.deadline())
    }

    pub(crate) fn failed(&self) -> Option<FramingError> {
        either!(self, session => session.failed())
    }

    pub(crate) fn is_silent(&self) -> bool {
        either!(self, session => session.is_silent())
    }

    pub(crate) fn has_data<U: Ulp<Placed = P>>(&self, ulp: &U, conn: ConnId) -> bool {
        either!(self, session => session.has_data(ulp, conn))
    }

    pub(crate) fn awaits_report(&self) -> bool {
        either!(self, session => session.awaits_report())
    }

    pub(crate) fn report_streaming<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
    ) {
        either!(self, session => session.report_streaming(now, ulp, conn, path));
    }

    pub(crate) fn stream_send(&mut self, bytes: &[u8]) -> Result<usize, SetupError> {
        either!(self, session => session.stream_send(bytes))
    }

    pub(crate) fn stream_recv(&mut self, link: &mut dyn Link, out: &mut [u8]) -> Result<usize, SetupError> {
        either!(self, session => session.stream_recv(link, out))
    }

    pub(crate) fn begin_mpa<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        link: &mut dyn Link,
        last: &[u8],
    ) -> Result<(), SetupError> {
        either!(self, session => session.begin_mpa(now, ulp, conn, path, link, last))
    }

    pub(crate) fn is_reading(&self) -> bool {
        either!(self, session => session.is_reading())
    }

    pub(crate) fn held_bytes(&self) -> usize {
        either!(self, session => session.held_bytes())
    }

    pub(crate) fn window_bytes(&self) -> usize {
        either!(self, session => session.window_bytes())
    }

    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        either!(self, session => session.stalled_since())
    }

    pub(crate) fn shed<U: Ulp<Placed = P>>(
        &mut self,
        ulp: &mut U,
        conn: ConnId,
        link: &mut dyn Link,
    ) -> bool {
        either!(self, session => session.shed(ulp, conn, link))
    }

    pub(crate) fn holds_undelivered(&self) -> bool {
        either!(self, session => session.holds_undelivered())
    }

    pub(crate) fn counters(&self) -> FramingCounters {
        either!(self, session => session.counters())
    }

    pub(crate) fn release(&mut self, link: &mut dyn Link) {
        either!(self, session => session.release(link));
    }
}
