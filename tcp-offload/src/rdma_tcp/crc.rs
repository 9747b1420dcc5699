//! The CRC-32 of a segment (section 3.4 of the proposal, field CRC-32).
//!
//! "Exactly Ethernet's algorithm" with another generator: least significant bit of each byte first, register all ones, complemented,
//! stored least significant byte first. The crate `crc-fast` folds with carry-less multiplication; tables of 16 bytes per step
//! reach a seventh of its speed for 1,412 bytes (docs/measurements/framings.md).

use std::sync::LazyLock;

use crc_fast::{CrcParams, Digest};

/// The generator polynomial without x^32: Ethernet's, reversed.
const GENERATOR: u64 = 0xdb71_0641;

const ALL_ONES: u64 = 0xffff_ffff;

/// The parameters of `crc-fast`, with folding constants that are computed once.
static PARAMS: LazyLock<CrcParams> =
    LazyLock::new(|| CrcParams::new("CRC-32/RDMA-TCP", 32, GENERATOR, ALL_ONES, true, ALL_ONES, 0));

/// The CRC-32 of the bytes appended so far.
pub(crate) struct Crc32(Digest);

impl Crc32 {
    /// The CRC of an empty sequence.
    pub(crate) fn new() -> Self {
        Self(Digest::new_with_params(*PARAMS))
    }

    /// Appends bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The CRC. On the wire its least significant byte is first.
    pub(crate) fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

/// The CRC of the concatenation of `pieces`.
pub(crate) fn crc32<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut crc = Crc32::new();
    for piece in pieces {
        crc.update(piece);
    }
    crc.value()
}

#[cfg(test)]
#[expect(clippy::indexing_slicing, reason = "a test that is wrong may panic")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The polynomial division bit by bit, from the terms that the proposal lists.
    fn by_division(bytes: &[u8]) -> u32 {
        const TERMS: [u32; 14] = [31, 30, 28, 27, 25, 24, 22, 21, 20, 16, 10, 9, 6, 0];
        let generator = TERMS.iter().fold(0u32, |sum, term| sum | 1 << term);
        assert_eq!(u64::from(generator), GENERATOR);
        let mut register = u32::MAX;
        for bit in bytes.iter().flat_map(|byte| (0..8).map(move |n| byte >> n & 1)) {
            let out = (register >> 31) as u8 ^ bit;
            register <<= 1;
            if out == 1 {
                register ^= generator;
            }
        }
        !register.reverse_bits()
    }

    #[test]
    fn rdma_tcp_s3_4_crc_vectors() {
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, crc) in [
            (&b"123456789"[..], 0xe07e_661e),
            (&[0; 4], 0xb950_9bb6),
            (&[0xff; 4], 0xffff_ffff),
            (&[0; 32], 0xf2f1_998c),
            (&[0xff; 32], 0x654f_1871),
            (&ascending, 0x10a7_db23),
        ] {
            assert_eq!(crc32([bytes]), crc, "{bytes:02x?}");
            assert_eq!(by_division(bytes), crc, "{bytes:02x?}");
        }
    }

    #[test]
    fn rdma_tcp_s3_4_the_register_after_a_segment_and_its_crc_is_constant() {
        for len in [0, 1, 27, 1412] {
            let bytes = vec![0x5a; len];
            let crc = crc32([&bytes[..]]).to_le_bytes();
            assert_eq!(!crc32([&bytes[..], &crc]), 0x46af_6449);
        }
    }

    proptest! {
        #[test]
        fn prop_crc_of_pieces_is_that_of_the_division(bytes in prop::collection::vec(any::<u8>(), 0..3000), cuts in prop::collection::vec(0usize..3000, 0..4)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]);
            prop_assert_eq!(crc32(pieces), by_division(&bytes));
        }
    }
}
