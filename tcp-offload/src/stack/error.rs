//! Errors that the stack returns to its caller, one small enum per call.

use crate::{framing::SetupError, link::SteerError};

/// Why a connection could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The four-tuple is in use.
    #[error("a connection with the same addresses and ports exists")]
    AddressInUse,
    /// An IPv4-mapped IPv6 address names no host on the wire (RFC 4291 section 2.5.5.2).
    #[error("an IPv4-mapped IPv6 address cannot be connected to: use the IPv4 address")]
    MappedAddress,
    /// The interface or the route has an MTU of this many bytes, too few for segments of 256 bytes with their headers.
    #[error("an MTU of {0} bytes carries no FPDU")]
    SmallMtu(u16),
    /// The stack's limit is reached.
    #[error("the limit of {0} connections is reached")]
    TooMany(usize),
    /// The interface refused the steering rule.
    #[error(transparent)]
    Steer(#[from] SteerError),
    /// The parameters of the framing's start-up are not valid.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

/// Why a listener could not be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListenError {
    /// The same address and port has a listener.
    #[error("another listener has this address and port")]
    AddressInUse,
    /// The listener accepts two framings, but streaming data would precede MPA, so the first byte would say nothing.
    #[error("streaming data cannot precede MPA where RDMA/TCP is accepted too")]
    StreamingBeforeEither,
    /// The interface refused the steering rule.
    #[error(transparent)]
    Steer(#[from] SteerError),
}

/// Why a request could not be accepted or rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    /// The id does not name a connection, or no longer does.
    #[error("no such connection request")]
    NotWaiting,
    /// The parameters cannot be sent, or the request was answered before.
    #[error(transparent)]
    Setup(#[from] SetupError),
}
