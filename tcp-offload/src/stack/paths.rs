//! What is known of the MTU of paths, by destination: all connections to a destination share it, also those that come
//! later (RFC 8201 section 5.2, RFC 4821 section 5.2).

use std::{collections::HashMap, net::IpAddr};

use super::Stack;
use crate::{
    tcp::{Connection, PathMtu},
    time::Instant,
    ulp::Ulp,
};

/// Destinations remembered at most. Only those whose path is narrower than the interface count; for one more, that goes
/// which would be probed anew soonest.
const MOST_PATHS: usize = 1024;

/// Estimates by destination address.
#[derive(Debug, Default)]
pub(super) struct Paths {
    known: HashMap<IpAddr, PathMtu>,
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
    /// A new connection begins with what others have learnt.
    pub(super) fn adopt_path(&self, now: Instant, tcp: &mut Connection) {
        if let Some(mtu) = self.paths.known.get(&tcp.flow().remote_ip()) {
            tcp.adopt_mtu(now, *mtu);
        }
    }

    /// Connection `index` has learnt something of its path: the others on it are told.
    pub(super) fn share_path(&mut self, now: Instant, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(mtu) = slot.tcp.take_mtu_news() else { return };
        let destination = slot.tcp.flow().remote_ip();
        self.paths.learn(destination, mtu);
        let others: Vec<u32> = self
            .flows
            .iter()
            .filter(|(flow, other)| flow.remote_ip() == destination && **other != index)
            .map(|(_, other)| *other)
            .collect();
        for other in others {
            if let Some(slot) = self.slots.get_mut(other as usize) {
                slot.tcp.adopt_mtu(now, mtu);
                self.make_ready(other);
            }
        }
    }

    /// The interface carries IP packets of at most `mtu` bytes from now on.
    pub fn mtu_changed(&mut self, now: Instant, mtu: u16) {
        for (_, slot) in &mut self.slots {
            slot.tcp.link_mtu(now, mtu);
        }
        for (_, listener) in &mut self.listeners {
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
