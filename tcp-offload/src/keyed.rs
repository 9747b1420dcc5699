//! [`KeyedMap`]: the hash table of the sans-IO core, keyed by the engine's secret.
//!
//! The standard library draws the key of its hash from the operating system, so two runs of one seed would iterate in
//! different orders. A fixed hash would let a peer choose addresses and ports that collide. A key from
//! [`Secret`] has neither defect.

use std::hash::{BuildHasher, Hasher};

use crate::secret::Secret;

/// A hash table whose order of iteration depends only on the secret and the history of insertions.
#[expect(clippy::disallowed_types, reason = "with a hasher that is keyed by the configuration")]
pub(crate) type KeyedMap<K, V> = std::collections::HashMap<K, V, KeyedHash>;

/// The hash function of a table, under a key of 128 bits that no peer knows.
///
/// Each word of a key is combined with the state and folded: both halves of a 64-by-64-bit product are combined. A peer
/// that knows neither factor cannot choose words whose products collide, and it never sees a hash. One word takes a
/// multiplication instead of the rounds of `SipHash`, which every received segment would pay for.
#[derive(Clone)]
pub(crate) struct KeyedHash {
    key: [u64; 2],
}

impl KeyedHash {
    /// The hash function with the key of `secret`.
    pub(crate) fn new(secret: &Secret) -> Self {
        let key = u128::from_le_bytes(secret.hash_key());
        // An odd factor loses no bit of the other.
        Self { key: [key as u64, (key >> 64) as u64 | 1] }
    }
}

impl std::fmt::Debug for KeyedHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A log must not reveal the key, with which a peer could produce collisions.
        f.debug_struct("KeyedHash").finish_non_exhaustive()
    }
}

impl BuildHasher for KeyedHash {
    type Hasher = FoldHasher;

    #[inline]
    fn build_hasher(&self) -> FoldHasher {
        let [state, factor] = self.key;
        FoldHasher { state, start: state, factor }
    }
}

/// A hash in the making. See [`KeyedHash`].
#[derive(Clone)]
pub(crate) struct FoldHasher {
    state: u64,
    start: u64,
    factor: u64,
}

#[inline]
const fn fold(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

impl Hasher for FoldHasher {
    #[inline]
    fn write_u64(&mut self, word: u64) {
        self.state = fold(self.state ^ word, self.factor).wrapping_add(self.start);
    }

    #[inline]
    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let word = chunk.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            self.write_u64(word);
        }
        self.write_u64(bytes.len() as u64);
    }

    /// Another product, so that each bit of the last word reaches the bits that select a bucket.
    #[inline]
    fn finish(&self) -> u64 {
        fold(self.state, self.start | 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(secret: u64) -> Vec<u32> {
        let mut map = KeyedMap::with_hasher(KeyedHash::new(&Secret::from_number(secret)));
        for n in 0..1000 {
            map.insert(n, n);
        }
        map.into_values().collect()
    }

    #[test]
    fn the_order_depends_on_the_secret_alone() {
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    /// Four-tuples that differ in their low bits only, as those of one host do, fall into different buckets.
    #[test]
    fn neighbouring_keys_spread_over_buckets() {
        let hash = KeyedHash::new(&Secret::from_number(3));
        let mut buckets = [0u32; 1024];
        for port in 0..65_536u64 {
            buckets[(hash.hash_one((0x0a01_0002_0a01_0001u64, port * 65_536 + 4791)) % 1024) as usize] += 1;
        }
        let (least, most) = (buckets.iter().min().unwrap(), buckets.iter().max().unwrap());
        assert!(*least > 20 && *most < 130, "64 on average, {least} to {most}");
    }

    #[test]
    fn the_key_never_shows_in_a_log() {
        let hash = KeyedHash { key: [0x5a; 2] };
        assert_eq!(format!("{hash:?}"), "KeyedHash { .. }");
    }
}
