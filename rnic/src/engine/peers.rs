//! Parts of MPA that peers lack: an initiator caches the parts that a service did not support, so that the next connection
//! to it needs no repeated attempts. A service is an address and a port: what one program of a host says must not decide how the
//! others are connected to.

use std::{collections::BTreeMap, net::SocketAddr};

use xwarp_tcp::time::{Duration, Instant};

use crate::rnic::Lacks;

/// Capacity of the cache, in services.
const MAX_PEERS: usize = 4096;

/// Lifetime of an entry. Afterwards the missing parts are requested again, since the peer may have been replaced, or a
/// reset by another cause may have been mistaken for a refusal.
const LIFETIME: Duration = Duration::from_secs(600);

/// The cache of peers with missing parts.
#[derive(Debug, Default)]
pub(super) struct Peers {
    entries: BTreeMap<SocketAddr, Known>,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    lacks: Lacks,
    until: Instant,
}

impl Peers {
    /// The parts of MPA that `peer` is known to lack.
    pub(super) fn lacks(&self, now: Instant, peer: SocketAddr) -> Lacks {
        self.entries.get(&peer).filter(|known| known.until > now).map_or_else(Lacks::default, |k| k.lacks)
    }

    /// Adds the parts that `peer` lacks. When the table is full, the entry that expires first is evicted.
    pub(super) fn remember(&mut self, now: Instant, peer: SocketAddr, lacks: Lacks) {
        let known = Known { lacks: self.lacks(now, peer).and(lacks), until: now + LIFETIME };
        if self.entries.len() >= MAX_PEERS && !self.entries.contains_key(&peer) {
            self.entries.retain(|_, known| known.until > now);
            let first = self.entries.iter().min_by_key(|(_, known)| known.until).map(|(peer, _)| *peer);
            if let Some(first) = first.filter(|_| self.entries.len() >= MAX_PEERS) {
                self.entries.remove(&first);
            }
        }
        self.entries.insert(peer, known);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const MARKERS: Lacks = Lacks { markers: true, revision_two: false };
    const REVISION_TWO: Lacks = Lacks { markers: false, revision_two: true };

    fn peer(number: usize) -> SocketAddr {
        (Ipv4Addr::from(number as u32), 7).into()
    }

    #[test]
    fn a_peer_is_remembered_for_its_lifetime() {
        let mut peers = Peers::default();
        peers.remember(Instant::ZERO, peer(1), MARKERS);
        let half = Instant::ZERO + LIFETIME / 2;
        assert_eq!(peers.lacks(half, peer(1)), MARKERS);
        assert_eq!(peers.lacks(half, peer(2)), Lacks::default());
        peers.remember(half, peer(1), REVISION_TWO);
        assert_eq!(peers.lacks(half, peer(1)), MARKERS.and(REVISION_TWO));
        assert_eq!(peers.lacks(half + LIFETIME, peer(1)), Lacks::default());
        // Expired parts do not return with parts learned later.
        peers.remember(half + LIFETIME, peer(1), REVISION_TWO);
        assert_eq!(peers.lacks(half + LIFETIME, peer(1)), REVISION_TWO);
    }

    #[test]
    fn a_full_table_evicts_the_entry_that_expires_first() {
        let mut peers = Peers::default();
        let at = |number: usize| Instant::ZERO + Duration::from_millis(number as u64);
        for number in 0..=MAX_PEERS {
            peers.remember(at(number), peer(number), MARKERS);
        }
        assert_eq!(peers.entries.len(), MAX_PEERS);
        let now = at(MAX_PEERS);
        assert_eq!(peers.lacks(now, peer(0)), Lacks::default());
        assert_eq!(peers.lacks(now, peer(1)), MARKERS);
        // A known peer needs no room.
        peers.remember(now, peer(1), REVISION_TWO);
        assert_eq!(peers.lacks(now, peer(2)), MARKERS);
        // Expired entries are evicted first, all at once.
        peers.remember(now + LIFETIME, peer(0), MARKERS);
        assert_eq!(peers.entries.len(), 1);
    }
}
