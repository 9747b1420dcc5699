//! What the interface tells the engine of itself, and the end of it all.

use std::net::IpAddr;

use xwarp_tcp::{link::Link, time::Instant, wire::Mac};

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

    /// Resets the connections that still have something to say; the next [`Self::transmit`] tells their peers.
    pub fn abort_unfinished(&mut self) {
        self.stack.abort_unfinished();
    }

    /// The next hop `old` has a new Ethernet address.
    pub fn next_hop_changed(&mut self, old: Mac, new: Mac) {
        self.stack.next_hop_changed(old, new);
    }
}
