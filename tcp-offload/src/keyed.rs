//! [`KeyedMap`]: the hash table of the sans-IO core, keyed by the engine's secret.
//!
//! The standard library draws the key of its hash from the operating system, so two runs of one seed would iterate in
//! different orders. A fixed hash would let a peer choose addresses and ports that collide. A key from
//! [`Secret`] has neither defect.

use std::hash::BuildHasher;

use siphasher::sip::SipHasher13;

use crate::secret::Secret;

/// A hash table whose order of iteration depends on the secret and on the history of insertions only.
#[expect(clippy::disallowed_types, reason = "with a hasher that is keyed by the configuration")]
pub(crate) type KeyedMap<K, V> = std::collections::HashMap<K, V, KeyedHash>;

/// SipHash-1-3 under a key that no peer knows.
#[derive(Clone)]
pub(crate) struct KeyedHash {
    key: [u8; 16],
}

impl KeyedHash {
    /// The hash function with the key of `secret`.
    pub(crate) fn new(secret: &Secret) -> Self {
        Self { key: secret.hash_key() }
    }
}

impl std::fmt::Debug for KeyedHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A log must not reveal the key, with which a peer could produce collisions.
        f.debug_struct("KeyedHash").finish_non_exhaustive()
    }
}

impl BuildHasher for KeyedHash {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_key(&self.key)
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

    #[test]
    fn the_key_never_shows_in_a_log() {
        let hash = KeyedHash { key: [0x5a; 16] };
        assert_eq!(format!("{hash:?}"), "KeyedHash { .. }");
    }
}
