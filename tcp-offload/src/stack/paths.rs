//! Path MTU estimates by destination. All connections to a destination share them, including those opened later (RFC 8201
//! section 5.2, RFC 4821 section 5.2).

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use super::Stack;
use crate::{
    steps,
    tcp::{Connection, PathMtu},
    time::Instant,
    ulp::Ulp,
};

/// Capacity of the cache in destinations; it contains only paths narrower than the interface. When the cache is full,
/// the entry with the earliest re-probe time is evicted.
const MAX_PATHS: usize = 1024;

/// Shortest time between two passes over the connection table. A peer can change the estimate of its own path with each
/// ICMP error that it sends.
const PASS_INTERVAL: Duration = Duration::from_millis(20);

/// Estimates by destination address.
#[derive(Debug, Default)]
pub(super) struct Paths {
    known: BTreeMap<IpAddr, PathMtu>,
    /// Estimates that the other connections to their destinations do not have yet, and the connection that made each.
    news: BTreeMap<IpAddr, (u32, PathMtu)>,
    /// The time at which `news` may be passed on.
    next_pass: Instant,
}

impl Paths {
    /// The time at which estimates must be passed on, if there are any.
    #[inline]
    pub(super) fn due(&self) -> Option<Instant> {
        (!self.news.is_empty()).then_some(self.next_pass)
    }

    fn learn(&mut self, destination: IpAddr, mtu: PathMtu) {
        if mtu.is_plain() {
            self.known.remove(&destination);
            return;
        }
        if self.known.len() >= MAX_PATHS && !self.known.contains_key(&destination) {
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

    /// Records a new path MTU estimate of connection `index`, for the other connections to its destination.
    pub(super) fn share_path(&mut self, now: Instant, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(mtu) = slot.tcp.take_mtu_news() else { return };
        let destination = slot.tcp.flow().remote_ip();
        self.paths.learn(destination, mtu);
        self.paths.news.insert(destination, (index, mtu));
        self.pass_paths(now);
    }

    /// Passes new estimates to the connections to their destinations, if it is time.
    pub(super) fn pass_paths(&mut self, now: Instant) {
        if self.paths.due().is_none_or(|due| due > now) {
            return;
        }
        self.paths.next_pass = now + PASS_INTERVAL;
        let news = std::mem::take(&mut self.paths.news);
        // In the order of the connection table, because this order decides which of them sends first.
        let mut changed = Vec::new();
        for (key, slot) in &mut self.slots {
            steps::add(1);
            let estimate = news.get(&slot.tcp.flow().remote_ip());
            if let Some((_, mtu)) = estimate.filter(|(from, _)| *from as usize != key) {
                slot.tcp.adopt_mtu(now, *mtu);
                changed.push(key as u32);
            }
        }
        for index in changed {
            self.make_ready(index);
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
    use crate::{
        sim::path,
        stack::testing::{Bench, ISS},
        tcp::PathMtuConfig,
        ulp::ConnId,
        wire::{IcmpError, IcmpKind},
    };

    fn ip(n: u32) -> IpAddr {
        IpAddr::V4(n.into())
    }

    #[test]
    fn rfc8201_s5_2_the_path_cache_is_bounded_and_evicts_the_oldest_entry() {
        let config = PathMtuConfig { initial: Some(1280), ..PathMtuConfig::default() };
        let narrow = PathMtu::new(1500, false, &config);
        let mut paths = Paths::default();
        for n in 0..3000 {
            paths.learn(ip(n), narrow.retried_at(Instant::from_nanos(u64::from(n))));
        }
        assert_eq!(paths.known.len(), MAX_PATHS);
        assert!(paths.known.contains_key(&ip(2999)) && !paths.known.contains_key(&ip(0)));
        paths.learn(ip(2999), PathMtu::new(1500, false, &PathMtuConfig::default()));
        assert!(!paths.known.contains_key(&ip(2999)), "a plain path is not cached");
    }

    fn estimate(bench: &Bench, conn: ConnId) -> u16 {
        bench.stack.info(conn).unwrap().path_mtu
    }

    fn too_big(bench: &mut Bench, now: Instant, conn: ConnId, mtu: u32) {
        let slot = &bench.stack.slots[conn.index as usize];
        let error = IcmpError { flow: slot.tcp.flow(), seq: ISS, kind: IcmpKind::TooBig { mtu } };
        bench.stack.receive_icmp(now, &mut bench.link, error, &mut bench.upper);
    }

    /// A peer that quotes its own connection can lower the estimate with each packet. This costs a pass over all
    /// connections every 20 ms, not one per packet.
    #[test]
    fn errors_of_one_peer_cost_few_passes_over_the_connections() {
        let mut bench = Bench::new();
        let remote = |host| ([192, 0, 2, host], 4791);
        let hostile = bench.insert(path(([10, 0, 0, 1], 1), remote(7)));
        let same_host = bench.insert(path(([10, 0, 0, 1], 2), remote(7)));
        let others: Vec<ConnId> =
            (0..100).map(|n| bench.insert(path(([10, 0, 0, 1], 3 + n), remote(8)))).collect();
        let at = |ms: u64| Instant::ZERO + Duration::from_millis(ms);
        let steps = steps::of(|| {
            for n in 0..190 {
                too_big(&mut bench, at(1) + Duration::from_micros(100 * n), hostile, 1490 - n as u32);
            }
        });
        assert!(steps < 3 * 102, "{steps}");
        assert_eq!(estimate(&bench, hostile), 1301);
        assert_eq!(estimate(&bench, same_host), 1490, "the first one, at once");
        assert_eq!(bench.stack.next_deadline(), Some(at(21)));
        bench.stack.on_timer(at(21), &mut bench.link, &mut bench.upper);
        assert_eq!(estimate(&bench, same_host), 1301, "the last one, with the next pass");
        assert!(others.iter().all(|conn| estimate(&bench, *conn) == 1500));
    }
}
