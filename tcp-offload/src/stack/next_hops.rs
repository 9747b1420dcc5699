//! Next hops: the neighbour whose Ethernet address the frames of a connection carry.
//!
//! The stack has no routing table. It names the connections whose next hop should be looked up
//! ([`Stack::next_lookup`]). Its owner asks the kernel, passes the answer to [`Stack::next_hop_found`], and reports
//! every neighbour whose Ethernet address changed ([`Stack::neighbours_changed`]). A connection needs a lookup when the
//! peer opened it (its path then comes from a frame), when a route changed, and when it reports a soft error. RFC 9293
//! section 3.8.3 (MUST-20(b)) requires that IP be asked for another next hop when a segment was retransmitted R1 times.

use std::{collections::BTreeMap, net::IpAddr};

use super::Stack;
use crate::{
    ulp::{ConnId, Ulp},
    wire::{Flow, Mac},
};

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

    /// Sets the next hop of a connection to `address`; `mac` is its Ethernet address, if known.
    pub fn next_hop_found(&mut self, conn: ConnId, address: IpAddr, mac: Option<Mac>) {
        let Some(slot) = self.slot(conn) else { return };
        slot.tcp.set_next_hop(address);
        if let Some(mac) = mac {
            let source = slot.tcp.path().source_mac;
            slot.tcp.redirect(source, mac);
        }
    }

    /// Applies changed Ethernet addresses of neighbours, by IP address, in one pass over all connections.
    pub fn neighbours_changed(&mut self, changed: &BTreeMap<IpAddr, Mac>) {
        for (_, slot) in &mut self.slots {
            let path = slot.tcp.path();
            let source = path.source_mac;
            if let Some(mac) = path.next_hop.and_then(|address| changed.get(&address)) {
                slot.tcp.redirect(source, *mac);
            }
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
        bench.stack.neighbours_changed(&BTreeMap::from([(gateway(2), NEW), (gateway(4), OLD)]));
        assert_eq!((macs(&bench, one).1, macs(&bench, other).1), (NEW, OLD));
    }

    #[test]
    fn an_accepted_connection_is_looked_up_and_follows_its_gateway() {
        let mut bench = Bench::new();
        let active = connect(&mut bench, 1, 2);
        let conn = accepted(&mut bench, 2);
        let lookup = bench.stack.next_lookup().unwrap();
        assert_eq!((lookup.conn, lookup.unanswered), (conn, false));
        assert_eq!(bench.stack.next_lookup(), None, "looked up once, and not for {active:?}");
        bench.stack.next_hop_found(conn, gateway(5), None);
        assert_eq!(macs(&bench, conn).1, OLD, "until the neighbour is resolved");
        bench.stack.neighbours_changed(&BTreeMap::from([(gateway(5), NEW)]));
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
        bench.stack.next_hop_found(conns[0], gateway(6), Some(NEW));
        bench.stack.next_hop_found(conns[1], gateway(6), Some(NEW));
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
