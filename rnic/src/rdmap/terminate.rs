//! The Terminate Header (RFC 5040 section 4.8).
#![deny(clippy::indexing_slicing)]

use std::fmt;

use super::{READ_REQUEST_BYTES, ReadRequest, StreamError, split};
use crate::ddp::{RawHeader, UNTAGGED_BYTES};

/// Layer of errors that RDMAP detects.
pub const LAYER_RDMA: u8 = 0;
/// Layer of errors that DDP detects.
pub const LAYER_DDP: u8 = 1;
/// Layer of errors that the lower layer (MPA) detects.
pub const LAYER_LLP: u8 = 2;

const CONTROL_BYTES: usize = 4;
const LENGTH_BYTES: usize = 2;
/// Bytes of the longest Terminate Header: the one that quotes a Read Request.
pub const TERMINATE_MAX_BYTES: usize = CONTROL_BYTES + LENGTH_BYTES + UNTAGGED_BYTES + READ_REQUEST_BYTES;

/// M: the DDP Segment Length is valid. Bit in the 32-bit word that holds the control field left-aligned.
const LENGTH_VALID: u32 = 1 << 15;
/// D: the terminated DDP header follows.
const DDP_HEADER: u32 = 1 << 14;
/// R: the terminated Read Request header follows.
const RDMA_HEADER: u32 = 1 << 13;

/// A Terminate Header: why a peer ends the stream.
///
/// Linux's siw exchanges layer and type (`docs/decisions/0008`), so no decision may depend on these numbers alone.
/// They are shown to users, in both readings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminateHeader {
    /// The layer that detected the error.
    pub layer: u8,
    /// Error Type, by layer.
    pub error_type: u8,
    /// Error Code, by layer and type.
    pub code: u8,
    /// Bytes of the terminated DDP segment, when they are known.
    pub segment_length: Option<u16>,
    /// Its header.
    pub ddp_header: Option<RawHeader>,
    /// The Read Request in that segment, advanced by the bytes that were answered.
    pub rdma_header: Option<ReadRequest>,
}

impl fmt::Display for TerminateHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, error_type, code, .. } = *self;
        let name = |layer, error_type| StreamError::from_numbers(layer, error_type, code);
        write!(f, "layer {layer} type {error_type} code {code:#04x}")?;
        if let Some(error) = name(layer, error_type) {
            write!(f, ": {error}")?;
        }
        if layer != error_type {
            write!(f, " (if the peer is Linux's siw: layer {error_type} type {layer}")?;
            if let Some(error) = name(error_type, layer) {
                write!(f, ": {error}")?;
            }
            write!(f, ")")?;
        }
        Ok(())
    }
}

impl TerminateHeader {
    /// Layer, Error Type and Error Code.
    pub const fn numbers(&self) -> (u8, u8, u8) {
        (self.layer, self.error_type, self.code)
    }

    /// Parses the header. A quoted part that is announced but missing or malformed is left out, because the stream
    /// ends anyway. `None` when the control field is incomplete.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (control, rest) = split::<CONTROL_BYTES>(bytes)?;
        let control = u32::from_be_bytes(control);
        let mut header = Self {
            layer: (control >> 28) as u8,
            error_type: (control >> 24) as u8 & 0x0f,
            code: (control >> 16) as u8,
            segment_length: None,
            ddp_header: None,
            rdma_header: None,
        };
        header.parse_parts(control, rest);
        Some(header)
    }

    fn parse_parts(&mut self, control: u32, mut rest: &[u8]) -> Option<()> {
        if control & (LENGTH_VALID | DDP_HEADER) != 0 {
            let (length, behind) = split(rest)?;
            rest = behind;
            self.segment_length = (control & LENGTH_VALID != 0).then(|| u16::from_be_bytes(length));
        }
        if control & DDP_HEADER != 0 {
            let ddp = RawHeader::read(rest)?;
            rest = rest.get(ddp.as_bytes().len()..)?;
            self.ddp_header = Some(ddp);
        }
        if control & RDMA_HEADER != 0 {
            self.rdma_header = ReadRequest::parse(rest);
        }
        Some(())
    }

    /// Writes the header to the start of `out`; returns its length, or 0 when `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut control = u32::from(self.layer & 0x0f) << 28
            | u32::from(self.error_type & 0x0f) << 24
            | u32::from(self.code) << 16;
        let mut bytes = [0; TERMINATE_MAX_BYTES];
        let mut len = CONTROL_BYTES;
        let mut put = |at: usize, part: &[u8]| {
            if let Some(to) = bytes.get_mut(at..at + part.len()) {
                to.copy_from_slice(part);
            }
            at + part.len()
        };
        if self.segment_length.is_some() || self.ddp_header.is_some() {
            len = put(len, &self.segment_length.unwrap_or_default().to_be_bytes());
        }
        if self.segment_length.is_some() {
            control |= LENGTH_VALID;
        }
        if let Some(header) = &self.ddp_header {
            len = put(len, header.as_bytes());
            control |= DDP_HEADER;
        }
        if let Some(request) = self.rdma_header {
            len = put(len, &request.to_bytes());
            control |= RDMA_HEADER;
        }
        put(0, &control.to_be_bytes());
        match (out.get_mut(..len), bytes.get(..len)) {
            (Some(to), Some(from)) => {
                to.copy_from_slice(from);
                len
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
#[expect(clippy::indexing_slicing, reason = "a test that is wrong may panic")]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ddp::{Header, Msn, STag, Tagged, Untagged};

    fn ddp_header() -> impl Strategy<Value = RawHeader> {
        let header = prop_oneof![
            any::<(bool, u32, u64)>().prop_map(|(last, stag, to)| Header::Tagged(Tagged {
                last,
                control: 0x40,
                stag: STag::new(stag),
                to
            })),
            any::<(bool, u32, u32)>().prop_map(|(last, msn, mo)| Header::Untagged(Untagged {
                last,
                control: 0x41,
                word: 0,
                queue: 1,
                msn: Msn::new(msn),
                mo
            })),
        ];
        (header, any::<u8>())
            .prop_map(|(header, noise)| RawHeader::of(&header, header.flags() ^ noise & 0x3f))
    }

    fn terminate() -> impl Strategy<Value = TerminateHeader> {
        let request = any::<(u32, u64, u32)>().prop_map(|(stag, to, len)| ReadRequest {
            sink_stag: STag::new(stag),
            sink_to: to,
            len,
            source_stag: STag::new(!stag),
            source_to: !to,
        });
        (
            (0u8..16, 0u8..16, any::<u8>()),
            prop::option::of(any::<u16>()),
            prop::option::of(ddp_header()),
            prop::option::of(request),
        )
            .prop_map(|((layer, error_type, code), length, ddp_header, rdma_header)| {
                TerminateHeader { layer, error_type, code, segment_length: length, ddp_header, rdma_header }
            })
    }

    proptest! {
        #[test]
        fn prop_terminates_survive_a_round_trip_and_any_truncation(header in terminate()) {
            let mut bytes = [0; TERMINATE_MAX_BYTES];
            let len = header.emit(&mut bytes);
            prop_assert_eq!(TerminateHeader::parse(&bytes[..len]), Some(header));
            for short in 0..len {
                let read = TerminateHeader::parse(&bytes[..short]);
                prop_assert_eq!(read.is_some(), short >= 4);
                if let Some(read) = read {
                    prop_assert_eq!((read.layer, read.error_type, read.code), (header.layer, header.error_type, header.code));
                }
                prop_assert_eq!(header.emit(&mut [0; TERMINATE_MAX_BYTES][..short]), 0);
            }
        }
    }

    #[test]
    fn rfc5040_s4_8_control_bits_lie_where_figure_8_has_them() {
        let header = TerminateHeader {
            layer: LAYER_LLP,
            error_type: 0,
            code: 2,
            segment_length: None,
            ddp_header: None,
            rdma_header: None,
        };
        let mut bytes = [0xff; 8];
        assert_eq!(header.emit(&mut bytes), 4);
        assert_eq!(bytes[..4], [0x20, 0x02, 0, 0]);
        assert_eq!(
            header.to_string(),
            "layer 2 type 0 code 0x02: MPA: the CRC of an FPDU is wrong (if the peer is Linux's siw: layer 0 type 2)"
        );
    }
}
