//! [`Rss`]: the receive queue that a NIC chooses for a flow, by the Toeplitz hash of receive side scaling.

use std::net::{IpAddr, SocketAddr};

use xwarp_tcp::wire::Flow;

/// How a NIC distributes TCP segments over its receive queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rss {
    key: Vec<u8>,
    /// The queue for each remainder of the hash.
    table: Vec<u32>,
}

impl Rss {
    /// With this key and indirection table. `None` if the table is empty or the key too short for the flows of IPv6.
    pub fn new(key: Vec<u8>, table: Vec<u32>) -> Option<Self> {
        // The hash of the last bit needs the 31 bits of the key that follow it.
        const LEAST_KEY_BYTES: usize = 2 * (16 + 2) + 4;
        (!table.is_empty() && key.len() >= LEAST_KEY_BYTES).then_some(Self { key, table })
    }

    /// The queue on which the peer's segments of `flow` arrive.
    pub fn queue(&self, flow: &Flow) -> u32 {
        let hash = self.hash(flow.remote, flow.local);
        self.table.get(hash as usize % self.table.len()).copied().unwrap_or_default()
    }

    /// The hash of a segment between these addresses: of both addresses, then both ports.
    fn hash(&self, source: SocketAddr, destination: SocketAddr) -> u32 {
        let mut input = Vec::with_capacity(36);
        for end in [source, destination] {
            match end.ip() {
                IpAddr::V4(ip) => input.extend(ip.octets()),
                IpAddr::V6(ip) => input.extend(ip.octets()),
            }
        }
        for end in [source, destination] {
            input.extend(end.port().to_be_bytes());
        }
        toeplitz(&self.key, &input)
    }
}

/// The queues of one of several owners of an interface, and how its NIC distributes segments.
#[derive(Debug, Clone)]
pub struct Arrivals {
    pub(crate) rss: Rss,
    /// The owner has every `step`-th queue from `first` on.
    pub(crate) first: u16,
    pub(crate) step: u16,
}

impl Arrivals {
    /// Whether the peer's segments of `flow` arrive on a queue of this owner.
    pub fn are_ours(&self, flow: &Flow) -> bool {
        self.rss.queue(flow) % u32::from(self.step.max(1)) == u32::from(self.first)
    }
}

/// The Toeplitz hash: the exclusive or, over all bits of the input that are one, of the 32 bits of the key from the place of
/// that bit on. The key is at least four bytes longer than the input.
fn toeplitz(key: &[u8], input: &[u8]) -> u32 {
    let (first, rest) = key.split_first_chunk().unwrap_or((&[0; 4], &[]));
    let mut window = u32::from_be_bytes(*first);
    let mut hash = 0;
    for (byte, next) in input.iter().zip(rest) {
        for bit in (0..8).rev() {
            if byte >> bit & 1 == 1 {
                hash ^= window;
            }
            window = window << 1 | u32::from(next >> bit & 1);
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Key of the verification suite of the RSS specification (Microsoft, "Verifying the RSS Hash Calculation").
    const KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0,
        0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42,
        0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    /// The verification suite's TCP flows: destination, source, hash.
    const FLOWS: [(&str, &str, u32); 8] = [
        ("161.142.100.80:1766", "66.9.149.187:2794", 0x51cc_c178),
        ("65.69.140.83:4739", "199.92.111.2:14230", 0xc626_b0ea),
        ("12.22.207.184:38024", "24.19.198.95:12898", 0x5c2b_394a),
        ("209.142.163.6:2217", "38.27.205.30:48228", 0xafc7_327f),
        ("202.188.127.2:1303", "153.39.163.191:44251", 0x10e8_28a2),
        ("[3ffe:2501:200:3::1]:1766", "[3ffe:2501:200:1fff::7]:2794", 0x4020_7d3d),
        ("[ff02::1]:4739", "[3ffe:501:8::260:97ff:fe40:efab]:14230", 0xdde5_1bbf),
        ("[fe80::200:f8ff:fe21:67cf]:38024", "[3ffe:1900:4545:3:200:f8ff:fe21:67cf]:44251", 0x02d1_feef),
    ];

    #[test]
    fn flows_have_the_hashes_of_the_specification() {
        let rss = Rss::new(KEY.to_vec(), (0..128).collect()).unwrap();
        for (local, remote, hash) in FLOWS {
            let flow = Flow { local: local.parse().unwrap(), remote: remote.parse().unwrap() };
            assert_eq!(rss.hash(flow.remote, flow.local), hash, "{local}");
            assert_eq!(rss.queue(&flow), hash % 128, "{local}");
        }
    }

    #[test]
    fn an_owner_gets_the_flows_of_its_queues() {
        let rss = Rss::new(KEY.to_vec(), vec![0, 1, 2, 3]).unwrap();
        let owners = [0, 1].map(|first| Arrivals { rss: rss.clone(), first, step: 2 });
        for (local, remote, hash) in FLOWS {
            let flow = Flow { local: local.parse().unwrap(), remote: remote.parse().unwrap() };
            assert_eq!(owners.each_ref().map(|owner| owner.are_ours(&flow)), [hash % 2 == 0, hash % 2 == 1]);
        }
    }

    #[test]
    fn addresses_alone_have_the_hashes_of_the_specification() {
        let input = [66, 9, 149, 187, 161, 142, 100, 80];
        assert_eq!(toeplitz(&KEY, &input), 0x323e_8fc2);
    }

    #[test]
    fn a_table_or_a_key_that_says_nothing_is_not_used() {
        assert_eq!(Rss::new(KEY.to_vec(), Vec::new()), None);
        assert_eq!(Rss::new(KEY[..39].to_vec(), vec![0]), None);
    }
}
