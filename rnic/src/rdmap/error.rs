//! The errors of RFC 5040 section 4.8 (figure 9), and the conversion of every layer's errors to Terminate numbers.

use xwarp_tcp::{framing::FramingError, mpa::MpaError, rdma_tcp::SegmentError};

use super::{LAYER_DDP, LAYER_RDMA};
use crate::ddp::DdpError;

/// An error that RDMAP detects (RFC 5040 figure 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RdmapError {
    /// A local failure that the peer did not cause.
    #[error("local catastrophic error")]
    LocalCatastrophic,
    /// Remote protection: the Steering Tag does not exist.
    #[error("invalid STag")]
    InvalidStag,
    /// Remote protection: some bytes lie outside of the region.
    #[error("base or bounds violation")]
    Bounds,
    /// Remote protection: the region does not grant this access.
    #[error("access rights violation")]
    AccessRights,
    /// Remote protection: the Steering Tag belongs to another protection domain or stream.
    #[error("STag not associated with the RDMAP stream")]
    StagNotAssociated,
    /// Remote protection: offset plus length exceed 64 bits.
    #[error("TO wrap")]
    ToWrap,
    /// Remote protection: the peer may not invalidate the Steering Tag.
    #[error("STag cannot be invalidated")]
    CannotInvalidate,
    /// Remote protection, unspecified.
    #[error("unspecified protection error")]
    UnspecifiedProtection,
    /// Remote operation: RV is not supported.
    #[error("invalid RDMAP version")]
    Version,
    /// Remote operation: a reserved opcode, or one that is not valid on this queue or at this time.
    #[error("unexpected opcode")]
    UnexpectedOpcode,
    /// Remote operation: the stream is broken.
    #[error("catastrophic error, localized to the RDMAP stream")]
    StreamCatastrophic,
    /// Remote operation: more than the stream is broken.
    #[error("catastrophic error, global")]
    GlobalCatastrophic,
    /// Remote operation: the Steering Tag cannot be invalidated (the figure lists it under both types).
    #[error("STag cannot be invalidated (operation)")]
    CannotInvalidateOperation,
    /// Remote operation, unspecified.
    #[error("unspecified operation error")]
    UnspecifiedOperation,
}

impl RdmapError {
    /// Every error, in the order of the figure.
    pub const ALL: [Self; 14] = [
        Self::LocalCatastrophic,
        Self::InvalidStag,
        Self::Bounds,
        Self::AccessRights,
        Self::StagNotAssociated,
        Self::ToWrap,
        Self::CannotInvalidate,
        Self::UnspecifiedProtection,
        Self::Version,
        Self::UnexpectedOpcode,
        Self::StreamCatastrophic,
        Self::GlobalCatastrophic,
        Self::CannotInvalidateOperation,
        Self::UnspecifiedOperation,
    ];

    /// The 4-bit Error Type and the 8-bit Error Code.
    pub const fn numbers(self) -> (u8, u8) {
        match self {
            Self::LocalCatastrophic => (0, 0x00),
            Self::InvalidStag => (1, 0x00),
            Self::Bounds => (1, 0x01),
            Self::AccessRights => (1, 0x02),
            Self::StagNotAssociated => (1, 0x03),
            Self::ToWrap => (1, 0x04),
            Self::CannotInvalidate => (1, 0x09),
            Self::UnspecifiedProtection => (1, 0xff),
            Self::Version => (2, 0x05),
            Self::UnexpectedOpcode => (2, 0x06),
            Self::StreamCatastrophic => (2, 0x07),
            Self::GlobalCatastrophic => (2, 0x08),
            Self::CannotInvalidateOperation => (2, 0x09),
            Self::UnspecifiedOperation => (2, 0xff),
        }
    }
}

/// A stream error of any layer, reported to the peer by a Terminate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// Detected by RDMAP.
    #[error("RDMAP: {0}")]
    Rdmap(#[from] RdmapError),
    /// Detected by DDP.
    #[error("DDP: {0}")]
    Ddp(#[from] DdpError),
    /// Detected by MPA.
    #[error("MPA: {0}")]
    Mpa(#[from] MpaError),
    /// Detected by RDMA/TCP.
    #[error("RDMA/TCP: {0}")]
    RdmaTcp(#[from] SegmentError),
}

impl From<FramingError> for StreamError {
    fn from(error: FramingError) -> Self {
        match error {
            FramingError::Mpa(error) => Self::Mpa(error),
            FramingError::RdmaTcp(error) => Self::RdmaTcp(error),
        }
    }
}

impl StreamError {
    /// Layer, Error Type and Error Code of the Terminate Control Field.
    pub fn numbers(&self) -> (u8, u8, u8) {
        let (layer, (error_type, code)) = match self {
            Self::Rdmap(error) => (LAYER_RDMA, error.numbers()),
            Self::Ddp(error) => (LAYER_DDP, error.numbers()),
            Self::Mpa(error) => {
                let code = error.terminate_code();
                return (code.layer, code.error_type, code.code);
            }
            Self::RdmaTcp(error) => {
                let code = error.terminate_code();
                return (code.layer, code.error_type, code.code);
            }
        };
        (layer, error_type, code)
    }

    /// The error that a Terminate with these numbers names; `None` for numbers that no RFC defines.
    pub fn from_numbers(layer: u8, error_type: u8, code: u8) -> Option<Self> {
        let rdmap = RdmapError::ALL.into_iter().map(Self::from);
        let ddp = DdpError::ALL.into_iter().map(Self::from);
        let mpa = MPA_ERRORS.into_iter().map(Self::from);
        rdmap.chain(ddp).chain(mpa).find(|error| error.numbers() == (layer, error_type, code))
    }

    /// Whether the Terminate quotes the DDP header and length of the faulty segment (RFC 5040 figure 10): not for a
    /// Local Catastrophic Error of either layer, nor for an error of MPA. [`MpaError::Withheld`] counts as an error
    /// of DDP.
    pub(crate) const fn takes_ddp_header(self) -> bool {
        match self {
            Self::Rdmap(error) => error.numbers().0 != 0,
            Self::Ddp(error) => error.numbers().0 != 0,
            Self::Mpa(error) => matches!(error, MpaError::Withheld),
            Self::RdmaTcp(_) => false,
        }
    }

    /// Whether the Terminate quotes the header of the faulty Read Request (RFC 5040 figure 10).
    pub(crate) const fn takes_rdma_header(self) -> bool {
        matches!(self, Self::Rdmap(error) if error.numbers().0 == 1)
    }
}

/// One MPA error for each Terminate code (RFC 5044 section 8, RFC 6581 section 8).
const MPA_ERRORS: [MpaError; 7] = [
    MpaError::Truncated,
    MpaError::Crc,
    MpaError::MarkerMismatch,
    MpaError::InvalidKey,
    MpaError::LocalCatastrophic,
    MpaError::InsufficientIrd,
    MpaError::NoMatchingRtr,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc5040_s4_8_every_error_has_numbers_of_its_own_in_the_order_of_the_figure() {
        let numbers: Vec<_> = RdmapError::ALL.iter().map(|e| e.numbers()).collect();
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn rfc5040_s4_8_layers_are_those_of_the_figure() {
        assert_eq!(StreamError::from(RdmapError::UnexpectedOpcode).numbers(), (0, 2, 6));
        assert_eq!(StreamError::from(DdpError::TooLong).numbers(), (1, 2, 5));
    }
}
