//! Initial sequence numbers (RFC 6528, RFC 9293 section 3.4.1): ISN = M + F(flow, secret), and timestamp offsets.

use std::{
    hash::{Hash, Hasher},
    net::IpAddr,
};

use siphasher::sip::SipHasher24;

use crate::{secret::Secret, seq::SeqNum, time::Instant, wire::Flow};

/// The numbers with which a connection begins. They come from independent halves of one keyed hash: with one hash for both, a
/// SYN-ACK would tell how long the engine has run (RFC 7323 section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isn {
    /// The initial sequence number.
    pub seq: SeqNum,
    /// The offset of the timestamp clock. All connections of a four-tuple have the same, so that timestamps grow from one
    /// incarnation to the next (RFC 6191); different four-tuples have different ones.
    pub stamps: u32,
}

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

    /// The first numbers of a connection that is opened at `now`. M ticks every 4 microseconds.
    pub fn isn(&self, now: Instant, flow: &Flow) -> Isn {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        for end in [flow.local, flow.remote] {
            match end.ip() {
                IpAddr::V4(ip) => ip.octets().hash(&mut hasher),
                IpAddr::V6(ip) => ip.octets().hash(&mut hasher),
            }
            hasher.write_u16(end.port());
        }
        let hash = hasher.finish();
        let seq = SeqNum::new((now.as_nanos() / 4_000) as u32).add(hash as u32);
        Isn { seq, stamps: (hash >> 32) as u32 }
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
        let isn = a.isn(t, &flow(1)).seq;
        assert_eq!(a.isn(Instant::from_nanos(1_004_000), &flow(1)).seq, isn.add(1));
        assert_ne!(a.isn(t, &flow(2)).seq, isn);
        assert_ne!(b.isn(t, &flow(1)).seq, isn);
        assert!(!format!("{a:?}").contains("key"));
    }

    /// Both numbers of a SYN-ACK were once a clock plus the same hash.
    #[test]
    fn rfc7323_s7_1_sequence_number_and_timestamp_do_not_tell_the_age_of_the_engine() {
        let key = IsnKey::new(&Secret::from_number(1));
        let [one, other] = [1, 2].map(|port| key.isn(Instant::ZERO, &flow(port)));
        assert_ne!(one.seq.value().wrapping_sub(one.stamps), other.seq.value().wrapping_sub(other.stamps));
        // RFC 6191: the offset of a four-tuple stays the same.
        assert_eq!(key.isn(Instant::from_nanos(77_000_000_000), &flow(1)).stamps, one.stamps);
        assert_ne!(one.stamps, other.stamps);
    }
}
