//! The choice of a connection's framing at run time.

use std::{fmt, time::Duration};

use super::{Session, SetupError};
use crate::{
    mpa::MpaConfig,
    rdma_tcp::{RdmaTcpConfig, Setup},
    time::Instant,
    ulp::ListenerId,
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
    /// The time limit for streaming data that precede the framing, if the connection begins with them.
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

/// The session of a connection, with either framing. `P` is [`Ulp::Placed`](crate::ulp::Ulp::Placed).
#[derive(Debug)]
pub(crate) enum AnySession<P> {
    /// With MPA.
    Mpa(Session<P, MpaConfig>),
    /// With RDMA/TCP.
    RdmaTcp(Session<P, Setup>),
}

/// Calls a method of the session of either framing: `either!(&mut session => resume(now, ulp, conn, link))`.
macro_rules! either {
    ($any:expr => $method:ident($($argument:expr),*)) => {
        match $any {
            $crate::framing::AnySession::Mpa(session) => session.$method($($argument),*),
            $crate::framing::AnySession::RdmaTcp(session) => session.$method($($argument),*),
        }
    };
}
pub(crate) use either;

impl<P: Copy + fmt::Debug> AnySession<P> {
    /// See [`Session::initiator`]. `random` has 128 unpredictable bits.
    pub(crate) fn initiator(
        config: FramingConfig,
        random: u128,
        private_data: Vec<u8>,
        ird: u16,
        ord: u16,
    ) -> Result<Self, SetupError> {
        Ok(match config {
            FramingConfig::Mpa(config) => Self::Mpa(Session::initiator(config, private_data, ird, ord)?),
            FramingConfig::RdmaTcp(config) => {
                Self::RdmaTcp(Session::initiator(Setup { config, random }, private_data, ird, ord)?)
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
}
