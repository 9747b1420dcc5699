//! The bytes that `--verify` sends. Each message has its own pattern, so that a byte of another message,
//! another queue pair or another offset is detected as a mismatch.

/// The pattern of one message, derived from its sender, queue pair and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    state: u64,
}

/// The first byte that differs from the pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// Bytes from the start of the message.
    pub offset: usize,
    /// The byte that the sender wrote.
    pub expected: u8,
    /// The byte found in memory.
    pub found: u8,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "byte {} is {:#04x} instead of {:#04x}", self.offset, self.found, self.expected)
    }
}

impl Pattern {
    /// The pattern of message `message` on queue pair `queue_pair`; `role` distinguishes the two directions.
    pub fn new(role: u8, queue_pair: u32, message: u64) -> Self {
        let name = (u64::from(role) << 56) ^ (u64::from(queue_pair) << 40) ^ message;
        Self { state: mix(name.wrapping_add(0x9e37_79b9_7f4a_7c15)) }
    }

    /// The pattern's 64-bit word number `index`.
    fn word(self, index: u64) -> [u8; 8] {
        let x = self.state.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes()
    }

    /// Writes the pattern to `bytes`, which begin `offset` bytes into the message (a multiple of 8).
    pub fn fill(self, offset: usize, bytes: &mut [u8]) {
        for (index, chunk) in (offset as u64 / 8..).zip(bytes.chunks_mut(8)) {
            chunk.copy_from_slice(&self.word(index)[..chunk.len()]);
        }
    }

    /// Compares `bytes`, which begin `offset` bytes into the message (a multiple of 8), with the pattern.
    pub fn verify(self, offset: usize, bytes: &[u8]) -> Result<(), Mismatch> {
        for (index, chunk) in (offset as u64 / 8..).zip(bytes.chunks(8)) {
            let word = self.word(index);
            if *chunk == word[..chunk.len()] {
                continue;
            }
            for (at, (&found, expected)) in chunk.iter().zip(word).enumerate() {
                if found != expected {
                    return Err(Mismatch { offset: index as usize * 8 + at, expected, found });
                }
            }
        }
        Ok(())
    }
}

/// Spreads every bit of the input over the whole word.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbouring_messages_differ_in_most_bytes() {
        let bytes = |role, queue_pair, message| {
            let mut bytes = vec![0; 4096];
            Pattern::new(role, queue_pair, message).fill(0, &mut bytes);
            bytes
        };
        let base = bytes(0, 0, 0);
        for other in [bytes(1, 0, 0), bytes(0, 1, 0), bytes(0, 0, 1), bytes(0, 1, 1)] {
            let same = base.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 100, "{same} of 4096 bytes are equal");
        }
    }

    proptest! {
        #[test]
        fn prop_every_changed_byte_is_found(len in 1usize..200, at in 0usize..200, flip in 1u8..=255, message: u64) {
            let pattern = Pattern::new(0, 3, message);
            let mut bytes = vec![0; len];
            pattern.fill(0, &mut bytes);
            prop_assert_eq!(pattern.verify(0, &bytes), Ok(()));
            let at = at % len;
            bytes[at] ^= flip;
            let mismatch = pattern.verify(0, &bytes).expect_err("one byte was changed");
            prop_assert_eq!(mismatch.offset, at);
            prop_assert_eq!(mismatch.found ^ mismatch.expected, flip);
        }

        #[test]
        fn prop_pieces_equal_the_whole(len in 1usize..400, cut in 0usize..50) {
            let pattern = Pattern::new(1, 0, 9);
            let mut whole = vec![0; len];
            pattern.fill(0, &mut whole);
            let cut = (cut * 8).min(len / 8 * 8);
            let mut pieces = vec![0; len];
            pattern.fill(0, &mut pieces[..cut]);
            pattern.fill(cut, &mut pieces[cut..]);
            prop_assert_eq!(&whole, &pieces);
            prop_assert_eq!(pattern.verify(cut, &whole[cut..]), Ok(()));
        }
    }
}
