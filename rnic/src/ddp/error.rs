//! The error numbers of RFC 5041 section 7.2.

/// An error that DDP detects in a segment (RFC 5041 sections 7.1 and 7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum DdpError {
    /// A local failure that the peer did not cause.
    #[error("local catastrophic error")]
    LocalCatastrophic,
    /// Tagged: the Steering Tag does not exist or, for lack of another code, does not grant the access.
    #[error("tagged buffer: invalid STag")]
    InvalidStag,
    /// Tagged: some bytes lie outside of the region.
    #[error("tagged buffer: base or bounds violation")]
    TaggedBounds,
    /// Tagged: the Steering Tag belongs to another protection domain or stream.
    #[error("tagged buffer: STag not associated with the stream")]
    StagNotAssociated,
    /// Tagged: offset plus length exceed 64 bits.
    #[error("tagged buffer: TO wrap")]
    ToWrap,
    /// Tagged: DV is not 1.
    #[error("tagged buffer: invalid DDP version")]
    TaggedVersion,
    /// Untagged: the queue does not exist.
    #[error("untagged buffer: invalid queue number")]
    InvalidQueue,
    /// Untagged: no buffer is posted for this message.
    #[error("untagged buffer: invalid MSN, no buffer available")]
    NoBuffer,
    /// Untagged: the MSN is outside of the valid range.
    #[error("untagged buffer: invalid MSN, not in range")]
    MsnRange,
    /// Untagged: the offset lies outside of the buffer, or segments do not make up the whole message.
    #[error("untagged buffer: invalid MO")]
    InvalidMo,
    /// Untagged: the message is longer than its buffer.
    #[error("untagged buffer: message too long for the available buffer")]
    TooLong,
    /// Untagged: DV is not 1.
    #[error("untagged buffer: invalid DDP version")]
    UntaggedVersion,
}

impl DdpError {
    /// Every error, in the order of the table.
    pub const ALL: [Self; 12] = [
        Self::LocalCatastrophic,
        Self::InvalidStag,
        Self::TaggedBounds,
        Self::StagNotAssociated,
        Self::ToWrap,
        Self::TaggedVersion,
        Self::InvalidQueue,
        Self::NoBuffer,
        Self::MsnRange,
        Self::InvalidMo,
        Self::TooLong,
        Self::UntaggedVersion,
    ];

    /// The 4-bit Error Type and the 8-bit Error Code.
    pub const fn numbers(self) -> (u8, u8) {
        match self {
            Self::LocalCatastrophic => (0, 0x00),
            Self::InvalidStag => (1, 0x00),
            Self::TaggedBounds => (1, 0x01),
            Self::StagNotAssociated => (1, 0x02),
            Self::ToWrap => (1, 0x03),
            Self::TaggedVersion => (1, 0x04),
            Self::InvalidQueue => (2, 0x01),
            Self::NoBuffer => (2, 0x02),
            Self::MsnRange => (2, 0x03),
            Self::InvalidMo => (2, 0x04),
            Self::TooLong => (2, 0x05),
            Self::UntaggedVersion => (2, 0x06),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc5041_s7_2_every_error_has_a_number_of_its_own() {
        let mut numbers: Vec<_> = DdpError::ALL.iter().map(|e| e.numbers()).collect();
        numbers.dedup();
        assert_eq!(numbers.len(), DdpError::ALL.len());
        assert!(numbers.is_sorted());
    }
}
