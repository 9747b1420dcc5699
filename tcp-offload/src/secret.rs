//! [`Secret`]: what everything unpredictable of one engine is drawn from. It comes from outside, like the time.

use std::fmt;

use rand::{RngCore, SeedableRng, rngs::StdRng};

/// 256 bits that nobody may guess (RFC 4086): sequence numbers and keys of memory are drawn from them.
///
/// It never shows in a log.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// The secret of these bytes, which outside of tests come from the system's random source.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// No secret at all: what tests and simulations that shall repeat themselves take.
    pub fn from_number(number: u64) -> Self {
        let mut bytes = [0; 32];
        for (to, from) in bytes.iter_mut().zip(number.to_le_bytes()) {
            *to = from;
        }
        Self(bytes)
    }

    /// Secrets for `N` purposes. Who learns one of them, or what was drawn from it, learns nothing of the others.
    pub fn split<const N: usize>(&self) -> [Self; N] {
        let mut rng = self.rng();
        std::array::from_fn(|_| {
            let mut bytes = [0; 32];
            rng.fill_bytes(&mut bytes);
            Self(bytes)
        })
    }

    /// The stream of a cipher, `ChaCha`, under this secret.
    pub fn rng(&self) -> StdRng {
        StdRng::from_seed(self.0)
    }

    /// A key for a hash of 128 bits.
    pub(crate) fn hash_key(&self) -> [u8; 16] {
        let mut key = [0; 16];
        self.rng().fill_bytes(&mut key);
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc6528_s4_what_is_drawn_for_one_purpose_tells_nothing_of_another() {
        let secret = Secret::from_number(1);
        let [a, b] = secret.split();
        assert_ne!(a, b);
        assert_ne!(a, secret);
        assert_ne!(a.hash_key(), b.hash_key());
        assert_eq!(secret.split::<2>(), [a.clone(), b]);
        assert_ne!(Secret::from_number(2).split::<1>(), [a]);
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }
}
