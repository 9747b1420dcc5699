//! The Internet checksum (RFC 1071, as used by RFC 9293 section 3.1), over bytes that may be in several pieces.

use crate::copy::sum;

/// Length in bytes from which vector instructions are faster.
const LONG: usize = 256;

/// An unfolded one's complement sum, in the machine's byte order.
///
/// The sum commutes with byte swapping, so words are added as the machine reads them, eight bytes at a time with the
/// carry added to the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum(u64);

impl Sum {
    /// The sum of `bytes`, which begin at an even position.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        if bytes.len() < LONG { Self::of_short(bytes) } else { Self::of_long(bytes) }
    }

    /// Like [`Self::of`], for long payloads.
    #[inline(never)]
    fn of_long(bytes: &[u8]) -> Self {
        let (blocks, rest) = bytes.as_chunks::<{ sum::BLOCK }>();
        let words = sum::of_words(blocks);
        Self((words & 0xffff_ffff) + (words >> 32)).and(Self::of_short(rest))
    }

    /// Like [`Self::of`], for headers and small payloads.
    #[inline]
    fn of_short(bytes: &[u8]) -> Self {
        let add = |sum: u64, word: &[u8; 8]| {
            let (added, carry) = sum.overflowing_add(u64::from_ne_bytes(*word));
            added + u64::from(carry)
        };
        let (blocks, rest) = bytes.as_chunks::<32>();
        let sum = blocks.iter().fold(0, |sum, block| block.as_chunks().0.iter().fold(sum, add));
        let (words, mut rest) = rest.as_chunks();
        let sum = words.iter().fold(sum, add);
        let mut sum = (sum & 0xffff_ffff) + (sum >> 32);
        if let Some((word, tail)) = rest.split_first_chunk::<4>() {
            sum += u64::from(u32::from_ne_bytes(*word));
            rest = tail;
        }
        if let Some((word, tail)) = rest.split_first_chunk::<2>() {
            sum += u64::from(u16::from_ne_bytes(*word));
            rest = tail;
        }
        if let [last] = *rest {
            sum += u64::from(u16::from_ne_bytes([last, 0]));
        }
        Self(sum)
    }

    /// The sum of a short array, whose length is a multiple of 4.
    #[inline]
    pub(super) fn of_array<const N: usize>(bytes: &[u8; N]) -> Self {
        const { assert!(N.is_multiple_of(4) && N <= 64) };
        Self(bytes.as_chunks().0.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum())
    }

    /// The sum of four bytes.
    pub(super) const fn of_u32(bytes: [u8; 4]) -> Self {
        Self(u32::from_ne_bytes(bytes) as u64)
    }

    /// The sum of the bytes of several pieces, the first of which begins at an even position.
    pub fn of_pieces(pieces: &[&[u8]]) -> Self {
        let mut all = RunningSum::default();
        for piece in pieces {
            all.add(piece);
        }
        all.sum
    }

    /// The sum of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        // Each sum is less than 2^34, and a frame has few parts, so the addition cannot overflow.
        Self(self.0 + other.0)
    }

    /// Adds a 16-bit number.
    #[must_use]
    pub const fn and_word(self, word: u16) -> Self {
        Self(self.0 + word.to_be() as u64)
    }

    const fn folded(self) -> u16 {
        // The upper half of a word plus its rotation by half is the sum of both halves with the carry added to the end.
        let sum = (self.0.wrapping_add(self.0.rotate_left(32)) >> 32) as u32;
        (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16
    }

    /// The sum folded to 16 bits; 0xffff for bytes that contain their own correct checksum.
    pub const fn fold(self) -> u16 {
        u16::from_be(self.folded())
    }

    /// Whether the bytes contain their own correct checksum. Equal to `self.fold() == 0xffff`.
    #[inline]
    pub(super) const fn is_correct(self) -> bool {
        // Folding preserves the residue, and turns no sum but 0 into 0: the sum must be a multiple of 0xffff other than 0.
        // A multiplication by the inverse of 0xffff modulo 2^64 divides all multiples, and makes greater numbers of all others.
        const INVERSE: u64 = 0xfffe_fffe_fffe_ffff;
        self.0.wrapping_mul(INVERSE).wrapping_sub(1) < u64::MAX / 0xffff
    }

    /// The value for the checksum field, which must count as 0 in this sum.
    pub const fn checksum(self) -> u16 {
        !self.fold()
    }
}

/// A sum over bytes that are added piece by piece; the first piece begins at an even position.
#[derive(Debug, Default)]
pub(crate) struct RunningSum {
    /// The sum of all pieces so far.
    pub(crate) sum: Sum,
    /// The next piece begins at an odd position.
    odd: bool,
}

impl RunningSum {
    /// Adds the next piece.
    #[inline]
    pub(crate) fn add(&mut self, piece: &[u8]) {
        let part = Sum::of(piece);
        self.sum = self.sum.and(if self.odd { Sum(u64::from(part.folded().swap_bytes())) } else { part });
        self.odd ^= piece.len() % 2 == 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 1071 section 4.1 word by word.
    fn slow(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn the_example_of_rfc1071_section_3_sums_to_ddf2() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::of(&bytes).fold(), 0xddf2);
        assert_eq!(Sum::of(&bytes).checksum(), !0xddf2);
    }

    #[test]
    fn the_longest_frame_of_ones_does_not_overflow() {
        let bytes = vec![0xff; 65_536];
        assert_eq!(Sum::of(&bytes).and(Sum::of(&bytes)).fold(), 0xffff);
    }

    proptest! {
        #[test]
        fn prop_the_sum_does_not_depend_on_how_the_bytes_are_cut(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            cuts in proptest::collection::vec(0usize..200, 0..6),
        ) {
            let mut cuts: Vec<_> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(Sum::of(&bytes).fold(), slow(&bytes));
            let sum = Sum::of_pieces(&pieces);
            prop_assert_eq!(sum.fold(), slow(&bytes));
        }
    }
}
