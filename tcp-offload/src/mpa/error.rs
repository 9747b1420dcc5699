//! Errors of MPA: those of the peer or the network, with the only conversion to a Terminate code.

/// The reason why MPA ended a stream (RFC 5044 section 8, RFC 6581 section 8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MpaError {
    /// The peer closed its direction within a start-up frame or an FPDU.
    #[error("the peer closed the connection in the middle of a frame")]
    Truncated,
    /// The CRC of an FPDU is wrong.
    #[error("the CRC of an FPDU is wrong")]
    Crc,
    /// A marker and the ULPDU lengths disagree on where an FPDU starts.
    #[error("a marker and the ULPDU lengths disagree on the start of an FPDU")]
    MarkerMismatch,
    /// An FPDU waited for a receive for longer than [`super::MpaConfig::withhold_timeout`].
    #[error("no receive was posted in time")]
    Withheld,
    /// An FPDU was not completed within [`crate::stack::StackConfig::gap_age`] while memory for held bytes was short.
    #[error("the rest of an FPDU did not arrive in time while memory was short")]
    Stalled,
    /// The stream does not begin with a start-up frame.
    #[error("the peer does not speak MPA")]
    InvalidKey,
    /// Both ends started MPA as initiators, or both as responders (RFC 5044 section 7.1.2, rule 8).
    #[error("both ends started MPA in the same role")]
    SameRole,
    /// This end does not support the revision of the start-up frame.
    #[error("the peer speaks MPA revision {0}")]
    UnsupportedRevision(u8),
    /// A frame of revision 0 lacks M or C, which every RNIC of the RDMA Consortium sets (RFC 5044 figure 14).
    #[error("the peer's start-up frame of revision 0 does not ask for markers and CRC")]
    NotRdmac,
    /// The private data exceeds 512 bytes.
    #[error("the peer announced {0} bytes of private data, 512 is the limit")]
    PrivateDataTooLong(u16),
    /// The start-up frame announces enhanced data, but has no room for IRD and ORD.
    #[error("the start-up frame lacks the IRD and ORD that it announces")]
    EnhancedDataMissing,
    /// This end requested enhanced set-up, and the responder answered without it.
    #[error("the responder does not speak the enhanced set-up of RFC 6581")]
    NotEnhanced,
    /// The initiator sent data after its request and before the reply.
    #[error("the initiator sent data before the reply")]
    DataBeforeReply,
    /// The responder rejected a request for markers and gave no other reason: a connection without them
    /// may succeed.
    #[error("the responder rejected the request for markers")]
    MarkersRefused,
    /// The peer's start-up frame did not arrive in time.
    #[error("the peer's MPA start-up frame did not arrive in time")]
    StartupTimeout,
    /// A local error while connecting.
    #[error("local catastrophic error")]
    LocalCatastrophic,
    /// The responder's ORD is more than [`super::MpaConfig::max_ird`].
    #[error("the responder's ORD exceeds the IRD that this end can offer")]
    InsufficientIrd,
    /// The responder supports none of the ready-to-receive messages that this end can send.
    #[error("no ready-to-receive message that both ends support")]
    NoMatchingRtr,
}

/// Layer, error type and error code of a Terminate message (RFC 5040 section 4.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminateCode {
    /// 0 RDMAP, 1 DDP, 2 LLP.
    pub layer: u8,
    /// Error type within the layer.
    pub error_type: u8,
    /// Error code within the type.
    pub code: u8,
}

impl MpaError {
    /// The codes of this error in a Terminate message: layer LLP, type MPA, and the codes of RFC 5044 section 8 and RFC 6581
    /// section 8. The exception is [`Self::Withheld`]: MPA detects it, but RFC 5041 section 7.2 defines its code (untagged
    /// buffer error, no buffer available).
    pub const fn terminate_code(self) -> TerminateCode {
        let code = match self {
            Self::Withheld => return TerminateCode { layer: 1, error_type: 2, code: 2 },
            Self::Truncated | Self::StartupTimeout => 1,
            Self::Crc => 2,
            Self::MarkerMismatch => 3,
            Self::InvalidKey
            | Self::SameRole
            | Self::UnsupportedRevision(_)
            | Self::NotRdmac
            | Self::PrivateDataTooLong(_)
            | Self::EnhancedDataMissing
            | Self::NotEnhanced
            | Self::DataBeforeReply
            | Self::MarkersRefused => 4,
            Self::LocalCatastrophic | Self::Stalled => 5,
            Self::InsufficientIrd => 6,
            Self::NoMatchingRtr => 7,
        };
        TerminateCode { layer: 2, error_type: 0, code }
    }
}
