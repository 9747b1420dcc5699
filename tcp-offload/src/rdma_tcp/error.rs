//! Violations of RDMA/TCP of 2000 by the peer.

use crate::mpa::TerminateCode;

/// A violation of the format by one segment or by a sequence of segments. In order it ends the stream; beyond a gap it only
/// shows that no segment begins at that place (decision A14).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The Version field is not 1.
    #[error("the peer speaks version {0} of RDMA/TCP")]
    Version(u8),
    /// The segment has the ID of another connection.
    #[error("a segment has another Connection ID")]
    ConnectionId,
    /// The segment length does not agree with the header, the RDMA Length or the other segments of the message.
    #[error("the length of a segment is wrong")]
    Length,
    /// The CRC is wrong.
    #[error("the CRC of a segment is wrong")]
    Crc,
    /// A reserved bit is set.
    #[error("a reserved bit is set in a segment")]
    Reserved,
    /// The control data is not valid for the type of message, or is in a segment that must have none.
    #[error("the control data of a segment is wrong")]
    Control,
    /// The Message Number is not the next one.
    #[error("a segment does not have the next message number")]
    Number,
    /// A message begins without B or before the E of the previous one, or a segment differs from the first one of its message in
    /// type, order field or buffer.
    #[error("a segment does not continue the open message")]
    Message,
    /// The offset does not continue that of the previous segment, or it wraps.
    #[error("the offset of a segment is wrong")]
    Offset,
    /// A segment that was found beyond a gap begins within another segment.
    #[error("segments overlap")]
    Overlap,
    /// The peer closed its direction within a segment.
    #[error("the peer closed the connection in the middle of a segment")]
    Truncated,
    /// A segment waited for a receive for longer than [`super::RdmaTcpConfig::withhold_timeout`].
    #[error("no receive was posted in time")]
    Withheld,
    /// A segment was not completed within [`crate::stack::StackConfig::gap_age`] while memory for held bytes was short.
    #[error("the rest of a segment did not arrive in time while memory was short")]
    Stalled,
    /// The client's first message is not Connect, or the server's is neither Accept nor Reject.
    #[error("the peer's first message does not set up the connection")]
    Setup,
    /// The client sent data before the server's answer.
    #[error("the client sent data before the answer")]
    DataBeforeAnswer,
    /// The peer's first message did not come in time.
    #[error("the peer's first message did not arrive in time")]
    SetupTimeout,
    /// The server's ORD is more than the largest IRD that this end may raise its own to.
    #[error("the server's ORD exceeds the IRD that this end can offer")]
    InsufficientIrd,
}

impl SegmentError {
    /// The layer, type and code of this error in a Terminate. They are those of the corresponding error of MPA (RFC 5044
    /// section 8); a violation that MPA does not have is reported as a framing error.
    pub const fn terminate_code(self) -> TerminateCode {
        let code = match self {
            Self::Withheld => return TerminateCode { layer: 1, error_type: 2, code: 2 },
            Self::Truncated | Self::SetupTimeout => 1,
            Self::Crc => 2,
            Self::Stalled => 5,
            Self::InsufficientIrd => 6,
            Self::Setup | Self::DataBeforeAnswer | Self::Version(_) => 4,
            Self::ConnectionId
            | Self::Length
            | Self::Reserved
            | Self::Control
            | Self::Number
            | Self::Message
            | Self::Offset
            | Self::Overlap => 3,
        };
        TerminateCode { layer: 2, error_type: 0, code }
    }
}
