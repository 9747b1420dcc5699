//! Next hops: the neighbour whose Ethernet address the frames of a connection carry.
//!
//! The stack has no routing table. It names the connections whose next hop should be looked up
//! ([`Stack::next_lookup`]). Its owner asks the kernel, passes the answer to [`Stack::next_hop_found`], and reports
//! every neighbour whose Ethernet address changed ([`Stack::neighbours_changed`]). A connection needs a lookup when
//! it begins (its path comes from a frame, or from a look-up without its ports), when a route changed, and when it reports a soft error. RFC 9293
//! section 3.8.3 (MUST-20(b)) requires that IP be asked for another next hop when a segment was retransmitted R1 times.

use std::{collections::BTreeMap, net::IpAddr};

use super::Stack;
use crate::{
    time::Instant,
    ulp::{ConnId, Ulp},
    wire::{Flow, Mac},
};

/// Where the frames of a flow go, by the current routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextHop {
    /// To a neighbour.
    Neighbour {
        /// Its IP address.
        address: IpAddr,
        /// Its Ethernet address, if known.
        mac: Option<Mac>,
        /// The largest IP packet of the route, in bytes; `None` if unknown.
        mtu: Option<u16>,
    },
    /// Nowhere: there is no route, or one that forbids them.
    Nowhere,
}

/// A connection whose next hop should be looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lookup {
    /// The connection to name in the answer.
    pub conn: ConnId,
    /// Its addresses.
    pub flow: Flow,
    /// The peer does not answer, so the neighbour should be confirmed.
    pub unanswered: bool,
}

/// Connections that need a lookup, by index, and whether their peer does not answer. An entry is removed with its
/// connection.
pub(super) type Lookups = BTreeMap<u32, bool>;

impl<U: Ulp> Stack<U> {
    /// Whether [`Self::next_lookup`] has a connection to return.
    pub fn wants_lookup(&self) -> bool {
        !self.lookups.is_empty()
    }

    /// The next connection whose next hop should be looked up. Each cause leads to one lookup.
    pub fn next_lookup(&mut self) -> Option<Lookup> {
        loop {
            let (index, unanswered) = self.lookups.pop_first()?;
            if let Some(slot) = self.slots.get(index as usize) {
                let conn = ConnId { index, generation: slot.generation };
                return Some(Lookup { conn, flow: slot.tcp.flow(), unanswered });
            }
        }
    }

    /// Sets the next hop of a connection. One without holds its output until it has one again.
    pub fn next_hop_found(&mut self, now: Instant, conn: ConnId, found: NextHop) {
        let Some(slot) = self.slot(conn) else { return };
        let NextHop::Neighbour { address, mac, mtu } = found else {
            slot.tcp.hold_output();
            return;
        };
        let before = *slot.tcp.path();
        slot.tcp.set_next_hop(address);
        if let Some(mac) = mac {
            slot.tcp.redirect(before.source_mac, mac);
        }
        if let Some(mtu) = mtu.filter(|mtu| *mtu != before.mtu) {
            slot.tcp.link_mtu(now, mtu);
        }
        if slot.tcp.is_held() || slot.tcp.path().next_hop_mac != before.next_hop_mac {
            self.way_found(now, conn.index);
        }
    }

    /// Applies changed Ethernet addresses of neighbours, by IP address, in one pass over all connections.
    pub fn neighbours_changed(&mut self, now: Instant, changed: &BTreeMap<IpAddr, Mac>) {
        let mut through = Vec::new();
        for (index, slot) in &mut self.slots {
            let path = slot.tcp.path();
            let source = path.source_mac;
            if let Some(mac) = path.next_hop.and_then(|address| changed.get(&address)) {
                slot.tcp.redirect(source, *mac);
                through.push(index as u32);
            }
        }
        for index in through {
            let is_held = self.slots.get(index as usize).is_some_and(|slot| slot.tcp.is_held());
            // A route decides whether a held connection may send.
            if !is_held {
                self.way_found(now, index);
            }
        }
    }

    /// Notes that the interface has a carrier again.
    pub fn carrier_returned(&mut self, now: Instant) {
        let all: Vec<u32> = self.slots.iter().map(|(index, _)| index as u32).collect();
        for index in all {
            let is_held = self.slots.get(index as usize).is_some_and(|slot| slot.tcp.is_held());
            if is_held {
                self.lookups.entry(index).or_insert(false);
            } else {
                self.way_found(now, index);
            }
        }
    }

    /// The kernel has given up a neighbour: the connections that wait for an answer through it are looked up, which makes the kernel
    /// ask again.
    pub fn neighbour_lost(&mut self, address: IpAddr) {
        for (index, slot) in &self.slots {
            if slot.tcp.path().next_hop == Some(address) && slot.tcp.waits_for_answer() {
                self.lookups.insert(index as u32, true);
            }
        }
    }

    /// See [`Connection::way_found`](crate::tcp::Connection::way_found).
    fn way_found(&mut self, now: Instant, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        if slot.tcp.way_found(now) {
            let bound = slot.tcp.deadline_bound();
            self.timers.arm(index, bound);
            self.make_ready(index);
        }
    }

    /// Schedules a lookup for every connection, after a route changed.
    pub fn routes_changed(&mut self) {
        for (index, _) in &self.slots {
            self.lookups.entry(index as u32).or_insert(false);
        }
    }

    /// Applies a changed Ethernet address of the interface.
    pub fn source_mac_changed(&mut self, mac: Mac) {
        for (_, slot) in &mut self.slots {
            let next_hop = slot.tcp.path().next_hop_mac;
            slot.tcp.redirect(mac, next_hop);
        }
        self.half_open.source_mac_changed(mac);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{sim::path, stack::testing::Bench, wire::Path};

    const OLD: Mac = Mac([2, 0, 0, 0, 0, 2]);
    const NEW: Mac = Mac([2, 0, 0, 0, 0, 9]);

    fn gateway(number: u8) -> IpAddr {
        [10, 0, 0, number].into()
    }

    fn through(number: u8, mac: Option<Mac>) -> NextHop {
        NextHop::Neighbour { address: gateway(number), mac, mtu: None }
    }

    fn path_from(port: u16, next_hop: Option<IpAddr>) -> Path {
        Path { next_hop, ..path(([10, 0, 0, 1], port), ([192, 0, 2, 7], 4791)) }
    }

    fn connect(bench: &mut Bench, port: u16, next_hop: u8) -> ConnId {
        bench.connect(path_from(port, Some(gateway(next_hop))))
    }

    /// A connection whose path was taken from a frame.
    fn accepted(bench: &mut Bench, port: u16) -> ConnId {
        bench.insert(path_from(port, None))
    }

    fn macs(bench: &Bench, conn: ConnId) -> (Mac, Mac) {
        let path = bench.stack.slots[conn.index as usize].tcp.path();
        (path.source_mac, path.next_hop_mac)
    }

    #[test]
    fn a_changed_neighbour_redirects_only_the_connections_through_its_address() {
        let mut bench = Bench::new();
        let (one, other) = (connect(&mut bench, 1, 2), connect(&mut bench, 2, 3));
        assert_eq!(macs(&bench, one), macs(&bench, other), "one router has both addresses");
        let changed = BTreeMap::from([(gateway(2), NEW), (gateway(4), OLD)]);
        bench.stack.neighbours_changed(Instant::ZERO, &changed);
        assert_eq!((macs(&bench, one).1, macs(&bench, other).1), (NEW, OLD));
    }

    #[test]
    fn an_accepted_connection_is_looked_up_and_follows_its_gateway() {
        let mut bench = Bench::new();
        let active = connect(&mut bench, 1, 2);
        let conn = accepted(&mut bench, 2);
        let lookup = bench.stack.next_lookup().unwrap();
        assert_eq!((lookup.conn, lookup.unanswered), (active, false));
        assert_eq!(bench.stack.next_lookup().unwrap().conn, conn);
        assert_eq!(bench.stack.next_lookup(), None, "each is looked up once");
        bench.stack.next_hop_found(Instant::ZERO, conn, through(5, None));
        assert_eq!(macs(&bench, conn).1, OLD, "until the neighbour is resolved");
        bench.stack.neighbours_changed(Instant::ZERO, &BTreeMap::from([(gateway(5), NEW)]));
        assert_eq!((macs(&bench, conn).1, macs(&bench, active).1), (NEW, OLD));
    }

    #[test]
    fn a_route_change_makes_every_open_connection_due_for_a_lookup() {
        let mut bench = Bench::new();
        let conns = [connect(&mut bench, 1, 2), connect(&mut bench, 2, 2), accepted(&mut bench, 3)];
        bench.stack.routes_changed();
        bench.stack.remove(&mut bench.link, conns[1].index);
        let due: Vec<ConnId> = std::iter::from_fn(|| bench.stack.next_lookup()).map(|l| l.conn).collect();
        assert_eq!(due, [conns[0], conns[2]]);
        bench.stack.next_hop_found(Instant::ZERO, conns[0], through(6, Some(NEW)));
        bench.stack.next_hop_found(Instant::ZERO, conns[1], through(6, Some(NEW)));
        assert_eq!(macs(&bench, conns[0]).1, NEW);
    }

    #[test]
    fn open_connections_follow_the_interface_s_own_address() {
        let mut bench = Bench::new();
        let conn = connect(&mut bench, 1, 2);
        bench.stack.source_mac_changed(NEW);
        assert_eq!(macs(&bench, conn), (NEW, OLD));
    }
}
