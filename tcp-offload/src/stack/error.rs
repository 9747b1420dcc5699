//! What the caller of the stack may get wrong, one small enum per call.

use crate::{link::SteerError, mpa::SetupError};

/// Why a connection could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The four-tuple is in use.
    #[error("a connection with the same addresses and ports exists")]
    AddressInUse,
    /// The stack's limit is reached.
    #[error("the limit of {0} connections is reached")]
    TooMany(usize),
    /// The interface cannot hand us the frames.
    #[error(transparent)]
    Steer(#[from] SteerError),
    /// The MPA parameters cannot be sent.
    #[error("MPA: {0}")]
    Mpa(#[from] SetupError),
}

/// Why there can be no such listener.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListenError {
    /// The same address and port has a listener.
    #[error("another listener has this address and port")]
    AddressInUse,
    /// The interface cannot hand us the frames.
    #[error(transparent)]
    Steer(#[from] SteerError),
}

/// Why a request could not be answered as wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    /// The id names no connection (any more).
    #[error("no such connection request")]
    NotWaiting,
    /// The parameters cannot be sent, or the request was answered before.
    #[error("MPA: {0}")]
    Mpa(#[from] SetupError),
}
