//! [`Secret`]: the source of all unpredictable numbers of one engine. The caller provides it, like the time.

use std::fmt;

use rand::{RngCore, SeedableRng, rngs::StdRng};

/// 256 bits that an attacker must not be able to guess (RFC 4086). Sequence numbers and memory keys are derived from
/// them. The `Debug` output does not contain the bits, so that no log does.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// The secret of these bytes. Outside of tests they come from the system's random source.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// A secret derived from a plain number, for reproducible tests and simulations. It is easy to guess.
    pub fn from_number(number: u64) -> Self {
        let mut bytes = [0; 32];
        for (to, from) in bytes.iter_mut().zip(number.to_le_bytes()) {
            *to = from;
        }
        Self(bytes)
    }

    /// Secrets for `N` purposes. One of them, or a number drawn from it, reveals nothing about the others.
    pub fn split<const N: usize>(&self) -> [Self; N] {
        let mut rng = self.rng();
        std::array::from_fn(|_| {
            let mut bytes = [0; 32];
            rng.fill_bytes(&mut bytes);
            Self(bytes)
        })
    }

    /// A random number generator, the key stream of `ChaCha` under this secret.
    pub fn rng(&self) -> StdRng {
        StdRng::from_seed(self.0)
    }

    /// A key of 128 bits for a hash function.
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
    fn rfc6528_s4_secrets_for_different_purposes_are_independent() {
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
