//! Changes of the interface that the device reports to the engine, and the end of all connections.

use std::{collections::BTreeMap, net::IpAddr};

use xwarp_tcp::{
    link::Link,
    stack::{Lookup, NextHop},
    time::Instant,
    ulp::ConnId,
    wire::Mac,
};

use super::Engine;

impl Engine {
    /// Ends the connections of the address `ip`, which the interface has lost.
    pub fn address_removed(&mut self, now: Instant, link: &mut dyn Link, ip: IpAddr) {
        self.stack.address_removed(now, link, ip);
    }

    /// Sets the interface's MTU to `mtu` bytes of IP packet.
    pub fn mtu_changed(&mut self, now: Instant, mtu: u16) {
        self.stack.mtu_changed(now, mtu);
    }

    /// Aborts the connections that are not finished; the next [`Self::transmit`] sends the resets.
    pub fn abort_unfinished(&mut self) {
        self.stack.abort_unfinished();
    }

    /// Applies changed Ethernet addresses of neighbours, by IP address.
    pub fn neighbours_changed(&mut self, now: Instant, changed: &BTreeMap<IpAddr, Mac>) {
        self.stack.neighbours_changed(now, changed);
    }

    /// Notes that the kernel has given up a neighbour.
    pub fn neighbour_lost(&mut self, address: IpAddr) {
        self.stack.neighbour_lost(address);
    }

    /// Notes that the interface has a carrier again.
    pub fn carrier_returned(&mut self, now: Instant) {
        self.stack.carrier_returned(now);
    }

    /// Makes every connection due for a lookup, after a route changed.
    pub fn routes_changed(&mut self) {
        self.stack.routes_changed();
    }

    /// Applies a changed Ethernet address of the interface.
    pub fn source_mac_changed(&mut self, mac: Mac) {
        self.stack.source_mac_changed(mac);
    }

    /// Fails every connection, because the interface was removed. The next [`Self::transmit`] reports the events.
    pub fn interface_removed(&mut self) {
        self.stack.interface_removed();
    }

    /// Whether [`Self::next_lookup`] has a connection to look up.
    pub fn wants_lookup(&self) -> bool {
        self.stack.wants_lookup()
    }

    /// The next connection whose next hop should be looked up.
    pub fn next_lookup(&mut self) -> Option<Lookup> {
        self.stack.next_lookup()
    }

    /// Sets the next hop of a connection that [`Self::next_lookup`] returned.
    pub fn next_hop_found(&mut self, now: Instant, conn: ConnId, found: NextHop) {
        self.stack.next_hop_found(now, conn, found);
    }

    /// Flushes the work of all queue pairs and notifies the owners of all completion queues: the last call of an
    /// engine that panicked.
    pub fn fail_all(&mut self) {
        self.rnic.fail_all();
    }
}
