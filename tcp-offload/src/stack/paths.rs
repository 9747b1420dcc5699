//! Path MTU estimates by destination. All connections to a destination share them, also those opened later (RFC 8201
//! section 5.2, RFC 4821 section 5.2).

use std::{collections::BTreeMap, net::IpAddr};

use super::{ConnSlot, Stack};
use crate::{
    tcp::{Connection, PathMtu},
    time::Instant,
    ulp::Ulp,
};

/// Most destinations in the cache, which contains only paths narrower than the interface. When the cache is full, the
/// entry with the earliest re-probe time is evicted.
const MOST_PATHS: usize = 1024;

/// Estimates by destination address.
#[derive(Debug, Default)]
pub(super) struct Paths {
    known: BTreeMap<IpAddr, PathMtu>,
}

impl Paths {
    fn learn(&mut self, destination: IpAddr, mtu: PathMtu) {
        if mtu.is_plain() {
            self.known.remove(&destination);
            return;
        }
        if self.known.len() >= MOST_PATHS && !self.known.contains_key(&destination) {
            let oldest = self.known.iter().min_by_key(|(_, mtu)| mtu.retry_at()).map(|(ip, _)| *ip);
            oldest.and_then(|ip| self.known.remove(&ip));
        }
        self.known.insert(destination, mtu);
    }
}

impl<U: Ulp> Stack<U> {
    /// Gives a new connection the cached estimate for its destination.
    pub(super) fn adopt_path(&self, now: Instant, tcp: &mut Connection) {
        if let Some(mtu) = self.paths.known.get(&tcp.flow().remote_ip()) {
            tcp.adopt_mtu(now, *mtu);
        }
    }

    /// Passes a new path MTU estimate of connection `index` to the other connections to its destination.
    pub(super) fn share_path(&mut self, now: Instant, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(mtu) = slot.tcp.take_mtu_news() else { return };
        let destination = slot.tcp.flow().remote_ip();
        self.paths.learn(destination, mtu);
        // In the order of the connection table, because this order decides which of them sends first.
        let shares = |slot: &ConnSlot<_>| slot.tcp.flow().remote_ip() == destination;
        let others = self.slots.iter().filter(|(key, slot)| *key as u32 != index && shares(slot));
        let others: Vec<u32> = others.map(|(key, _)| key as u32).collect();
        for other in others {
            if let Some(slot) = self.slots.get_mut(other as usize) {
                slot.tcp.adopt_mtu(now, mtu);
                self.make_ready(other);
            }
        }
    }

    /// Applies a changed MTU of the interface, in bytes.
    pub fn mtu_changed(&mut self, now: Instant, mtu: u16) {
        for (_, slot) in &mut self.slots {
            slot.tcp.link_mtu(now, mtu);
        }
        for listener in self.listeners.values_mut() {
            listener.mtu = mtu;
        }
        for known in self.paths.known.values_mut() {
            *known = known.over(mtu);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::PathMtuConfig;

    fn ip(n: u32) -> IpAddr {
        IpAddr::V4(n.into())
    }

    #[test]
    fn rfc8201_s5_2_the_memory_of_paths_is_bounded_and_drops_the_oldest() {
        let config = PathMtuConfig { initial: Some(1280), ..PathMtuConfig::default() };
        let narrow = PathMtu::new(1500, false, &config);
        let mut paths = Paths::default();
        for n in 0..3000 {
            paths.learn(ip(n), narrow.retried_at(Instant::from_nanos(u64::from(n))));
        }
        assert_eq!(paths.known.len(), MOST_PATHS);
        assert!(paths.known.contains_key(&ip(2999)) && !paths.known.contains_key(&ip(0)));
        paths.learn(ip(2999), PathMtu::new(1500, false, &PathMtuConfig::default()));
        assert!(!paths.known.contains_key(&ip(2999)), "nothing to remember of a plain path");
    }
}
