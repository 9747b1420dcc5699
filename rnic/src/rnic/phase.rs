//! [`Phase`]: the state of a queue pair, with the data of each state.

use xwarp_tcp::framing::FramingError;

use super::{QpState, connection::Attempt};

/// The state of a queue pair.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Without a connection.
    Idle,
    /// We are the initiator; the connection is not established. With the parameters of another attempt, while one may be
    /// needed.
    Connecting(Option<Box<Attempt>>),
    /// We accepted the peer's request; the connection is not established.
    Accepting,
    /// Full operation.
    Open(Closes),
    /// The stream has ended; all work is flushed.
    Ended {
        /// It ended with a Terminate of ours: the state is Terminate until the connection has ended.
        terminated: bool,
        since: Since,
    },
}

/// The ends that have closed their direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Closes {
    /// The application has begun a graceful close.
    pub(crate) here: bool,
    /// The peer has closed its direction, which was reported.
    pub(crate) peer: bool,
}

/// When a stream ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Since {
    /// Without a connection.
    Idle,
    /// During the establishment, perhaps by this error.
    Start(Option<FramingError>),
    /// In full operation.
    Open(Closes),
}

impl Phase {
    /// The state's name.
    pub(crate) fn state(&self) -> QpState {
        match self {
            Self::Idle | Self::Connecting(_) | Self::Accepting => QpState::Idle,
            Self::Open(Closes { here: false, peer: false }) => QpState::Rts,
            Self::Open(_) => QpState::Closing,
            Self::Ended { terminated: true, .. } => QpState::Terminate,
            Self::Ended { terminated: false, .. } => QpState::Error,
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Self::Ended { .. })
    }

    /// Whether the connection is being established, or failed before it was.
    pub(crate) fn is_starting(&self) -> bool {
        matches!(self, Self::Connecting(_) | Self::Accepting | Self::Ended { since: Since::Start(_), .. })
    }

    /// Whether the application has begun a graceful close.
    pub(crate) fn is_closing(&self) -> bool {
        matches!(self, Self::Open(closes) | Self::Ended { since: Since::Open(closes), .. } if closes.here)
    }

    /// Ends the stream, or changes its end state. Returns the previous phase, if the stream had not ended.
    pub(crate) fn end(&mut self, terminated: bool) -> Option<Since> {
        let since = match self {
            Self::Idle => Since::Idle,
            Self::Connecting(_) | Self::Accepting => Since::Start(None),
            Self::Open(closes) => Since::Open(*closes),
            Self::Ended { terminated: last, .. } => {
                *last = terminated;
                return None;
            }
        };
        *self = Self::Ended { terminated, since };
        Some(since)
    }
}
