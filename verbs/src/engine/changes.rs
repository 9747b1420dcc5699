//! Changes of the interface that the device passes to the engine, and the end of all connections.

use std::{collections::BTreeMap, net::IpAddr};

use xwarp_tcp::{link::Link, stack::Lookup, time::Instant, ulp::ConnId, wire::Mac};

use super::Engine;

impl Engine {
    /// The interface lost the address `ip`: its connections end.
    pub fn address_removed(&mut self, now: Instant, link: &mut dyn Link, ip: IpAddr) {
        self.stack.address_removed(now, link, ip);
    }

    /// The interface's largest IP packet has `mtu` bytes now.
    pub fn mtu_changed(&mut self, now: Instant, mtu: u16) {
        self.stack.mtu_changed(now, mtu);
    }

    /// Aborts the connections that are not finished; the next [`Self::transmit`] sends the resets.
    pub fn abort_unfinished(&mut self) {
        self.stack.abort_unfinished();
    }

    /// The neighbours with these IP addresses have these Ethernet addresses now.
    pub fn neighbours_changed(&mut self, changed: &BTreeMap<IpAddr, Mac>) {
        self.stack.neighbours_changed(changed);
    }

    /// Some route changed: every connection is due for a lookup.
    pub fn routes_changed(&mut self) {
        self.stack.routes_changed();
    }

    /// The interface's own Ethernet address changed.
    pub fn source_mac_changed(&mut self, mac: Mac) {
        self.stack.source_mac_changed(mac);
    }

    /// The interface is gone: every connection fails. The next [`Self::transmit`] passes the events up.
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

    /// The answer to [`Self::next_lookup`].
    pub fn next_hop_found(&mut self, conn: ConnId, address: IpAddr, mac: Option<Mac>) {
        self.stack.next_hop_found(conn, address, mac);
    }

    /// Flushes the work of all queue pairs and notifies the owners of all completion queues: the last call of an
    /// engine that panicked.
    pub(crate) fn fail_all(&mut self) {
        self.rnic.fail_all();
    }
}
