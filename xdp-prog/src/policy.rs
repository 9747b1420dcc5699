//! [`Policy`]: what an administrator allows the clients of a switch, in the maps of its programs.

use std::net::IpAddr;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::{ProgramError, insert};

/// Bytes of `struct policy` and `struct prefix_key` in `bpf/policy.h`.
const POLICY_BYTES: usize = 24;
const KEY_BYTES: usize = 21;
/// What a client may send ahead of its rate, in time; but at least two of the largest frames.
const BURST_NS: u64 = 20_000_000;
const LARGEST_FRAMES_BYTES: u64 = 2 << 16;

/// What the clients of a switch may do beyond owning their ports. Without settings, they reach every peer at any rate.
#[derive(Debug)]
pub struct Policy {
    policy: MapHandle,
    peers: MapHandle,
}

impl Policy {
    pub(crate) fn new(policy: MapHandle, peers: MapHandle) -> Self {
        Self { policy, peers }
    }

    /// Allows the peers of a prefix, of which the first `bits` bits count; from the first call on, others are not allowed. At most
    /// 1024 prefixes.
    ///
    /// # Errors
    /// The map is full.
    pub fn allow_peers(&self, prefix: IpAddr, bits: u8) -> Result<(), ProgramError> {
        insert(&self.peers, &key(prefix, bits), "allowing peers")?;
        self.change(|value| value[16..20].copy_from_slice(&1u32.to_ne_bytes()))
    }

    /// Limits what each client sends out of the interface to `bits_per_second` (at least 1000), counted in bytes of Ethernet
    /// frames without their checksums. Frames beyond it are dropped.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn limit_rate(&self, bits_per_second: u64) -> Result<(), ProgramError> {
        let rate = u128::from(bits_per_second.max(1000));
        let nanoseconds = |bytes: u64| (u128::from(bytes) * 8_000_000_000 / rate) as u64;
        let burst = BURST_NS.max(nanoseconds(LARGEST_FRAMES_BYTES));
        self.change(|value| {
            // Not 0, which stands for no limit.
            value[..8].copy_from_slice(&nanoseconds(1 << 20).max(1).to_ne_bytes());
            value[8..16].copy_from_slice(&burst.to_ne_bytes());
        })
    }

    /// Changes the value of the map.
    fn change(&self, change: impl FnOnce(&mut [u8; POLICY_BYTES])) -> Result<(), ProgramError> {
        let doing = "setting what clients may do";
        let first = 0u32.to_ne_bytes();
        let value = self.policy.lookup(&first, MapFlags::ANY).map_err(ProgramError::new(doing))?;
        let mut value = value.and_then(|v| v.try_into().ok()).unwrap_or([0; POLICY_BYTES]);
        change(&mut value);
        self.policy.update(&first, &value, MapFlags::ANY).map_err(ProgramError::new(doing))
    }
}

/// A key of `peers`: the number of bits that count, from the IP version on, then version and address.
fn key(prefix: IpAddr, bits: u8) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    key[..4].copy_from_slice(&(8 + u32::from(bits)).to_ne_bytes());
    match prefix {
        IpAddr::V4(v4) => {
            key[4] = 4;
            key[5..9].copy_from_slice(&v4.octets());
        }
        IpAddr::V6(v6) => {
            key[4] = 6;
            key[5..].copy_from_slice(&v6.octets());
        }
    }
    key
}
