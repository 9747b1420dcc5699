//! Initial sequence numbers (RFC 6528, RFC 9293 section 3.4.1): ISN = M + F(flow, secret).

use std::{
    hash::{Hash, Hasher},
    net::IpAddr,
};

use siphasher::sip::SipHasher24;

use crate::{secret::Secret, seq::SeqNum, time::Instant, wire::Flow};

/// The key of `F`, for all initial sequence numbers of one engine.
#[derive(Clone)]
pub struct IsnKey {
    key: [u8; 16],
}

impl std::fmt::Debug for IsnKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not leak through logs (RFC 6528 section 3).
        f.debug_struct("IsnKey").finish_non_exhaustive()
    }
}

impl IsnKey {
    /// Derives the key from `secret`.
    pub fn new(secret: &Secret) -> Self {
        Self { key: secret.hash_key() }
    }

    /// The initial sequence number of a connection that is opened at `now`. M ticks every 4 microseconds.
    pub fn isn(&self, now: Instant, flow: &Flow) -> SeqNum {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        for end in [flow.local, flow.remote] {
            match end.ip() {
                IpAddr::V4(ip) => ip.octets().hash(&mut hasher),
                IpAddr::V6(ip) => ip.octets().hash(&mut hasher),
            }
            hasher.write_u16(end.port());
        }
        SeqNum::new((now.as_nanos() / 4_000) as u32).add(hasher.finish() as u32)
    }

    /// A number from 0 to `most`, derived from `number`, that cannot be predicted without the secret.
    pub(crate) fn draw(&self, number: u64, most: u32) -> u32 {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write_u64(number);
        (hasher.finish() % (u64::from(most) + 1)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(remote_port: u16) -> Flow {
        Flow { local: "10.0.0.1:7".parse().unwrap(), remote: ([10, 0, 0, 2], remote_port).into() }
    }

    #[test]
    fn rfc6528_s3_isn_grows_with_the_clock_and_differs_by_flow_and_key() {
        let [a, b] = [1, 2].map(|number| IsnKey::new(&Secret::from_number(number)));
        let t = Instant::from_nanos(1_000_000);
        let isn = a.isn(t, &flow(1));
        assert_eq!(a.isn(Instant::from_nanos(1_004_000), &flow(1)), isn.add(1));
        assert_ne!(a.isn(t, &flow(2)), isn);
        assert_ne!(b.isn(t, &flow(1)), isn);
        assert!(!format!("{a:?}").contains("key"));
    }
}
