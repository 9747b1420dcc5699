//! The RDMA Read Request Header (RFC 5040 section 4.4).
#![deny(clippy::indexing_slicing)]

use super::split;
use crate::ddp::{STag, TaggedOffset};

/// Bytes of the header.
pub const READ_REQUEST_BYTES: usize = 28;

/// A request for `len` bytes from the responder's memory into the requester's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest {
    /// The requester's region; the responder copies the tag to its response without checks.
    pub sink_stag: STag,
    /// Tagged offset of the first byte in the region.
    pub sink_to: TaggedOffset,
    /// Length in bytes (RDMARDSZ).
    pub len: u32,
    /// The responder's region.
    pub source_stag: STag,
    /// Tagged offset of the first byte in the region.
    pub source_to: TaggedOffset,
}

impl ReadRequest {
    /// Parses the header; `None` when `bytes` is too short.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (sink_stag, rest) = split(bytes)?;
        let (sink_to, rest) = split(rest)?;
        let (len, rest) = split(rest)?;
        let (source_stag, rest) = split(rest)?;
        let (source_to, _) = split(rest)?;
        Some(Self {
            sink_stag: STag::new(u32::from_be_bytes(sink_stag)),
            sink_to: u64::from_be_bytes(sink_to),
            len: u32::from_be_bytes(len),
            source_stag: STag::new(u32::from_be_bytes(source_stag)),
            source_to: u64::from_be_bytes(source_to),
        })
    }

    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; READ_REQUEST_BYTES] {
        let mut out = [0; READ_REQUEST_BYTES];
        let fields = [
            &self.sink_stag.value().to_be_bytes()[..],
            &self.sink_to.to_be_bytes(),
            &self.len.to_be_bytes(),
            &self.source_stag.value().to_be_bytes(),
            &self.source_to.to_be_bytes(),
        ];
        super::put_fields(&mut out, &fields);
        out
    }

    /// The request that remains after `sent` bytes of its response (section 4.8, Terminated RDMA Header).
    #[must_use]
    pub const fn advanced(self, sent: u32) -> Self {
        Self {
            sink_to: self.sink_to.wrapping_add(sent as u64),
            len: self.len.saturating_sub(sent),
            source_to: self.source_to.wrapping_add(sent as u64),
            ..self
        }
    }
}

#[cfg(test)]
#[expect(clippy::indexing_slicing, reason = "a test that is wrong may panic")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn prop_read_requests_survive_a_round_trip(a: u32, b: u64, len: u32, c: u32, d: u64) {
            let request = ReadRequest {
                sink_stag: STag::new(a), sink_to: b, len, source_stag: STag::new(c), source_to: d,
            };
            let bytes = request.to_bytes();
            prop_assert_eq!(ReadRequest::parse(&bytes), Some(request));
            for short in 0..READ_REQUEST_BYTES {
                prop_assert_eq!(ReadRequest::parse(&bytes[..short]), None);
            }
        }
    }
}
