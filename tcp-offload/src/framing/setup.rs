//! The parameters and errors of a start-up that do not depend on the framing.

/// The IRD or ORD that means "not negotiated, left to the ULP" (RFC 6581 section 9.1).
pub const UNNEGOTIATED: u16 = 0x3fff;

/// The largest IRD or ORD that can be negotiated.
pub const MAX_READ_DEPTH: u16 = UNNEGOTIATED - 1;

/// Parameters of a responder that accepts a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AcceptParams {
    /// Our IRD, at most [`MAX_READ_DEPTH`].
    pub ird: u16,
    /// Our ORD; the initiator's IRD limits it.
    pub ord: u16,
    /// Private data for the initiator; the framing limits its length.
    pub private_data: Vec<u8>,
}

/// The error of a caller whose request the start-up cannot follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// More private data than the limit allows.
    #[error("{len} bytes of private data exceed the limit of {limit}")]
    PrivateDataTooLong {
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// IRD or ORD above [`MAX_READ_DEPTH`] (and not [`UNNEGOTIATED`]).
    #[error("IRD or ORD of {0} does not fit into 14 bits")]
    ReadDepth(u16),
    /// Peer-to-peer mode needs revision 2 of MPA.
    #[error("peer-to-peer mode needs MPA revision 2")]
    PeerToPeerNeedsRevisionTwo,
    /// The connection carries no streaming data: it never did, or the framing was started.
    #[error("the connection carries no streaming data")]
    NotStreaming,
    /// The last streaming bytes do not fit into the buffer of bytes that wait to be sent.
    #[error("too many streaming bytes are waiting to be sent")]
    StreamBufferFull,
    /// A connector must choose one framing.
    #[error("a connector must choose one framing")]
    TwoFramings,
    /// There is no request to accept or reject: none has arrived, or it was already answered.
    #[error("no request is waiting for an answer")]
    NoRequest,
}
