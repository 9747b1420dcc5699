//! Errors of the peer in RDMA/TCP of 2000.

use crate::mpa::TerminateCode;

/// Why a segment, or the order of segments, is invalid. Beyond a gap such a segment only shows that no segment begins
/// there; in order it ends the stream (decision A14).
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
    /// The control data is none of this type of message, or in a segment that carries none.
    #[error("the control data of a segment is wrong")]
    Control,
    /// The Message Number is not the one that is due.
    #[error("the message number of a segment is not the one that is due")]
    Number,
    /// A message does not begin with B, or another message begins before E, or a segment has another type, order field,
    /// or buffer than the first one of its message.
    #[error("a segment does not continue the message that is open")]
    Message,
    /// The offset does not follow from the segments before it, or wraps.
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
    #[error("the rest of a segment did not come in time while memory was short")]
    Stalled,
    /// The first message is no Connect, or no Accept or Reject.
    #[error("the peer's first message is not the one that sets a connection up")]
    Setup,
    /// The client sent data before the server's answer.
    #[error("the client sent data before the answer")]
    DataBeforeAnswer,
    /// The peer's first message did not come in time.
    #[error("the peer's first message did not come in time")]
    SetupTimeout,
    /// The server's ORD is more than the largest IRD that this end may raise its own to.
    #[error("the server's ORD exceeds the IRD that this end can offer")]
    InsufficientIrd,
}

impl SegmentError {
    /// The codes of this error in a Terminate, which are MPA's where MPA has such an error (RFC 5044 section 8): a message
    /// that breaks the rules for segments is a framing error.
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
