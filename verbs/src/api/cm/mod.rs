//! The connection manager, modelled on rdma_cm: an identifier goes through the steps of a connection, and its changes are
//! events on a channel with a file descriptor.
//!
//! | initiator | responder |
//! |---|---|
//! | [`CmId::resolve_address`] → [`EventKind::AddressResolved`] | [`CmId::bind`], [`CmId::listen`] |
//! | [`CmId::resolve_route`] → [`EventKind::RouteResolved`] | [`EventKind::ConnectRequest`] with a new id |
//! | [`CmId::connect`] → [`EventKind::Established`] | [`CmId::accept`] → [`EventKind::Established`] |
//! | [`CmId::disconnect`], [`EventKind::Disconnected`] | the same |
//!
//! Protocols that log in before they use RDMA set [`MpaConfig::streaming`](crate::MpaConfig::streaming) at both ends. Then
//! [`CmId::connect`] leads to
//! [`EventKind::Streaming`] and the peer's connection to [`EventKind::StreamRequest`], bytes are exchanged by
//! [`CmId::stream_send`] and [`CmId::stream_recv`], and [`CmId::begin_mpa`] leads on to [`EventKind::Established`], or at
//! the responder to [`EventKind::MpaRequest`].
//!
//! None of these calls blocks. [`Device::connect`](super::Device::connect), [`Device::start_connect`] and [`Listener`] take
//! the same steps in fewer calls.
//!
//! [`Device::start_connect`]: super::Device::start_connect

mod channel;
mod connection;
mod id;
mod key;
pub(crate) mod ports;
pub(super) mod queue;
pub(super) mod table;

use std::{io, net::SocketAddr};

use xwarp_tcp::{framing::FramingConfig, ulp::CloseReason};

pub use self::{
    channel::{Event, EventKind, IncomingRequest},
    connection::{Connecting, Connection, ConnectionRequest, Listener},
    id::CmId,
    key::CmKey,
    queue::EventChannel,
};
use super::failure::Answer;
use crate::interface::RouteError;
pub use xwarp_rnic::rnic::CmError as EngineError;

/// Default number of RDMA Reads and atomics that may be outstanding in one direction.
pub const DEFAULT_READ_DEPTH: u16 = 16;

/// Options of an initiator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Private data for the peer's application: at most 252 bytes (256 with MPA revision 1), unless
    /// [`crate::MpaConfig::private_data_bytes`] allows more.
    pub private_data: Vec<u8>,
    /// RDMA Reads and atomics of the peer that we serve at the same time (`responder_resources` of rdma_cm).
    pub ird: u16,
    /// RDMA Reads and atomics that we want to have outstanding (`initiator_depth` of rdma_cm).
    pub ord: u16,
    /// Framing, with its start-up settings, in place of the device's.
    pub framing: Option<FramingConfig>,
    /// Close our direction as soon as the peer has closed its own. Otherwise the application calls [`CmId::disconnect`].
    pub close_with_peer: bool,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            private_data: Vec::new(),
            ird: DEFAULT_READ_DEPTH,
            ord: DEFAULT_READ_DEPTH,
            framing: None,
            close_with_peer: false,
        }
    }
}

/// Options of a responder. IRD and ORD may be reduced by the negotiation: see [`EventKind::Established`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptOptions {
    /// Private data for the peer's application: at most 252 bytes (256 to an initiator of MPA revision 1), unless
    /// [`crate::MpaConfig::private_data_bytes`] of [`ListenOptions::framing`] allows more.
    pub private_data: Vec<u8>,
    /// RDMA Reads and atomics of the peer that we serve at the same time.
    pub ird: u16,
    /// RDMA Reads and atomics that we want to have outstanding.
    pub ord: u16,
    /// As [`ConnectOptions::close_with_peer`].
    pub close_with_peer: bool,
}

impl Default for AcceptOptions {
    fn default() -> Self {
        let ConnectOptions { private_data, ird, ord, close_with_peer, .. } = ConnectOptions::default();
        Self { private_data, ird, ord, close_with_peer }
    }
}

/// Options of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenOptions {
    /// Largest number of connections in start-up or waiting to be accepted; more are dropped, and their peers retry.
    pub backlog: usize,
    /// A wildcard address stands for the addresses of its own family only.
    pub only_family: bool,
    /// Framing, with its start-up settings, in place of the device's.
    pub framing: Option<FramingConfig>,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 128, only_family: false, framing: None }
    }
}

/// An error of a call of the connection manager.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// The identifier is not in a state for this call.
    #[error("{call} does not fit an identifier that is {state}")]
    State {
        /// The call.
        call: &'static str,
        /// The state of the identifier.
        state: &'static str,
    },
    /// The identifier and the queue pair, or two identifiers, belong to different devices.
    #[error("the queue pair or the other identifier belongs to another device")]
    OtherDevice,
    /// The device has no engine with this number.
    #[error("the device has no engine {0}")]
    NoEngine(u16),
    /// A codepoint of Differentiated Services has six bits.
    #[error("{0} is not a DSCP: a codepoint has six bits")]
    Codepoint(u8),
    /// The address and port are in use, here or in the kernel, or are not ours.
    #[error("cannot bind {address}")]
    Bind {
        /// The requested address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The engine cannot listen there.
    #[error(transparent)]
    Listen(#[from] xwarp_tcp::stack::ListenError),
    /// The engine refuses to connect, accept or reject.
    #[error(transparent)]
    Engine(EngineError),
    /// The operating system refused a thread or a descriptor.
    #[error(transparent)]
    System(#[from] io::Error),
    /// The device has failed; [`Device::failure`](crate::Device::failure) has the reason.
    #[error("the device has failed")]
    DeviceFailed,
}

/// An error of connecting, listening or accepting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer's address is unknown, unreachable, or not to be reached through this interface.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The peer's application rejected the connection, with this private data.
    #[error("rejected by the peer's application, with {} bytes of private data", .0.len())]
    Rejected(Vec<u8>),
    /// The attempt failed otherwise: refused, unreachable, timed out, or a failure of MPA.
    #[error(transparent)]
    Failed(#[from] CloseReason),
    /// The peer gave up before it was answered.
    #[error("the request is gone")]
    RequestGone,
    /// The interface was removed, or the helper took the device away, so no peer can connect; the text says which of
    /// them.
    #[error("{0}")]
    InterfaceRemoved(String),
    /// The time limit has passed.
    #[error("timed out")]
    TimeLimit,
    /// A call of the connection manager failed.
    #[error(transparent)]
    Call(#[from] CmError),
}

impl<T> Answer for Result<T, CmError> {
    fn of_failed_device() -> Self {
        Err(CmError::DeviceFailed)
    }
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Call(CmError::System(error))
    }
}
