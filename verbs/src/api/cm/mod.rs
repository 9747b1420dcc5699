//! The connection manager, in the manner of rdma_cm: identifiers walk through the steps of a connection,
//! and what happens to them comes as events on a channel that is a file descriptor.
//!
//! | initiator | responder |
//! |---|---|
//! | [`CmId::resolve_address`] → [`EventKind::AddressResolved`] | [`CmId::bind`], [`CmId::listen`] |
//! | [`CmId::resolve_route`] → [`EventKind::RouteResolved`] | [`EventKind::ConnectRequest`] with a new id |
//! | [`CmId::connect`] → [`EventKind::Established`] | [`CmId::accept`] → [`EventKind::Established`] |
//! | [`CmId::disconnect`], [`EventKind::Disconnected`] | the same |
//!
//! Nothing here blocks. [`connect`](super::Device::connect) and [`Listener`] do the same steps and wait.

mod blocking;
mod channel;
mod id;
mod ports;
pub(super) mod table;

use std::{io, net::SocketAddr};

use xwarp_tcp::{mpa::MpaConfig, ulp::CloseReason};

pub use self::{
    blocking::{Connection, ConnectionRequest, Listener},
    channel::{Event, EventChannel, EventKind, IncomingRequest},
    id::CmId,
    table::CmKey,
};
use self::{channel::ChannelQueue, ports::Ports};
use crate::interface::RouteError;
pub(super) use blocking::connect;

/// RDMA Reads and atomics that may be outstanding in one direction, unless said otherwise.
pub const DEFAULT_READ_DEPTH: u16 = 16;

/// How to connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Bytes for the peer's application: at most 252 (256 with revision 1), unless
    /// [`MpaConfig::private_data_bytes`] allows more.
    pub private_data: Vec<u8>,
    /// RDMA Reads and atomics of the peer that we serve at once (`responder_resources` of rdma_cm).
    pub ird: u16,
    /// RDMA Reads and atomics that we want to have outstanding (`initiator_depth` of rdma_cm).
    pub ord: u16,
    /// Start-up settings, when they differ from the device's.
    pub mpa: Option<MpaConfig>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { private_data: Vec::new(), ird: DEFAULT_READ_DEPTH, ord: DEFAULT_READ_DEPTH, mpa: None }
    }
}

/// How to accept. What was granted may be less, and is told with [`EventKind::Established`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptOptions {
    /// Bytes for the peer's application: at most 252 (256 to an initiator of revision 1), unless
    /// [`MpaConfig::private_data_bytes`] of [`ListenOptions::mpa`] allows more.
    pub private_data: Vec<u8>,
    /// RDMA Reads and atomics of the peer that we serve at once.
    pub ird: u16,
    /// RDMA Reads and atomics that we want to have outstanding.
    pub ord: u16,
}

impl Default for AcceptOptions {
    fn default() -> Self {
        Self { private_data: Vec::new(), ird: DEFAULT_READ_DEPTH, ord: DEFAULT_READ_DEPTH }
    }
}

/// How to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenOptions {
    /// Most connections that may be in start-up or wait to be accepted; more are dropped, and their peers
    /// try again.
    pub backlog: usize,
    /// Start-up settings, when they differ from the device's.
    pub mpa: Option<MpaConfig>,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 128, mpa: None }
    }
}

/// A call of the connection manager that cannot be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// The identifier is not at the step that this call belongs to.
    #[error("{call} does not fit an identifier that is {phase}")]
    Phase {
        /// The call.
        call: &'static str,
        /// Where the identifier stands.
        phase: &'static str,
    },
    /// The identifier and the queue pair belong to different devices.
    #[error("the queue pair belongs to another device")]
    OtherDevice,
    /// A codepoint of Differentiated Services has six bits.
    #[error("{0} is no codepoint: it has six bits")]
    Codepoint(u8),
    /// The address and port are taken, here or in the kernel, or are not ours.
    #[error("cannot bind {address}: {source}")]
    Bind {
        /// What was asked for.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The engine cannot listen there.
    #[error(transparent)]
    Listen(#[from] xwarp_tcp::stack::ListenError),
    /// The engine refuses to connect, accept or reject.
    #[error(transparent)]
    Engine(crate::rnic::CmError),
    /// The operating system refused a thread or a descriptor.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Why there is no connection, as the blocking calls report it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer's address is unknown, unreachable, or not to be reached through this interface.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The peer's application does not want it.
    #[error("rejected by the peer's application, with {} bytes of private data", .0.len())]
    Rejected(Vec<u8>),
    /// The attempt ended otherwise: refused, unreachable, timed out, or MPA failed.
    #[error(transparent)]
    Failed(#[from] CloseReason),
    /// The peer gave up before it was answered.
    #[error("the request is gone")]
    RequestGone,
    /// Nothing came within the time limit.
    #[error("the time limit is over")]
    TimeLimit,
    /// A call that cannot be done.
    #[error(transparent)]
    Call(#[from] CmError),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Call(CmError::System(error))
    }
}
