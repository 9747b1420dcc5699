//! [`Pending`]: the changes that a client has not been sent yet, as states: the latest of each kind.
//!
//! A client that reads late, because it is stopped or busy, gets the latest state of its interface and no history. The
//! number of pending changes is bounded by the addresses of the interface and by the next hops that the client follows.

use std::collections::BTreeMap;
use std::net::IpAddr;

use xwarp_control::Event;

/// Changes to be sent.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// Addresses, and whether each was added or removed.
    addresses: BTreeMap<IpAddr, bool>,
    /// The latest [`Event::LinkState`], [`Event::Mtu`] and [`Event::Mac`].
    up: Option<Event>,
    mtu: Option<Event>,
    mac: Option<Event>,
    /// The latest [`Event::Neighbour`] of each next hop.
    neighbours: BTreeMap<IpAddr, Event>,
    routes: bool,
    removed: bool,
    /// The other changes are the whole state, from a new helper.
    restarted: bool,
}

impl Pending {
    /// Adds a change.
    pub(crate) fn add(&mut self, event: &Event) {
        match event {
            Event::AddressAdded(address) => self.address(*address, true),
            Event::AddressRemoved(address) => self.address(*address, false),
            Event::LinkState { .. } => self.up = Some(event.clone()),
            Event::Mtu(_) => self.mtu = Some(event.clone()),
            Event::Mac(_) => self.mac = Some(event.clone()),
            Event::Neighbour { address, .. } => drop(self.neighbours.insert(*address, event.clone())),
            Event::Routes => self.routes = true,
            Event::Restarted => self.restarted = true,
            Event::LinkRemoved => self.removed = true,
            // Sent at once, before the end of the connection.
            Event::Revoked { .. } => {}
        }
    }

    /// Two opposite changes cancel: the client never hears of an address that came and went, or went and came back.
    fn address(&mut self, address: IpAddr, added: bool) {
        match self.addresses.insert(address, added) {
            Some(before) if before != added => drop(self.addresses.remove(&address)),
            _ => {}
        }
    }

    /// The change to be sent next: the restart is the first one, routes follow addresses, and the removal of the interface is the last one.
    pub(crate) fn first(&self) -> Option<Event> {
        if self.restarted {
            return Some(Event::Restarted);
        }
        if let Some((address, added)) = self.addresses.first_key_value() {
            let change = if *added { Event::AddressAdded } else { Event::AddressRemoved };
            return Some(change(*address));
        }
        let latest = [&self.up, &self.mtu, &self.mac].into_iter().flatten().chain(self.neighbours.values());
        if let Some(event) = latest.into_iter().next() {
            return Some(event.clone());
        }
        if self.routes {
            return Some(Event::Routes);
        }
        self.removed.then_some(Event::LinkRemoved)
    }

    /// Removes the change that was sent.
    pub(crate) fn sent(&mut self, event: &Event) {
        match event {
            Event::AddressAdded(address) | Event::AddressRemoved(address) => {
                self.addresses.remove(address);
            }
            Event::LinkState { .. } => self.up = None,
            Event::Mtu(_) => self.mtu = None,
            Event::Mac(_) => self.mac = None,
            Event::Neighbour { address, .. } => drop(self.neighbours.remove(address)),
            Event::Routes => self.routes = false,
            Event::Restarted => self.restarted = false,
            Event::LinkRemoved => self.removed = false,
            Event::Revoked { .. } => {}
        }
    }

    /// Forgets a next hop that the client no longer follows.
    pub(crate) fn unfollow(&mut self, next_hop: IpAddr) {
        self.neighbours.remove(&next_hop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut pending: Pending) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(event) = pending.first() {
            pending.sent(&event);
            events.push(event);
        }
        events
    }

    #[test]
    fn attack_a_burst_of_changes_is_one_state() {
        let mut pending = Pending::default();
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        for number in 0..10_000u16 {
            pending.add(&Event::Routes);
            pending.add(&Event::Mtu(number));
            pending.add(&Event::LinkState { up: number % 2 == 1 });
            pending.add(&Event::AddressAdded(address(1)));
            pending.add(&Event::AddressRemoved(address(1)));
        }
        pending.add(&Event::LinkRemoved);
        pending.add(&Event::AddressRemoved(address(2)));
        let expected = [
            Event::AddressRemoved(address(2)),
            Event::LinkState { up: true },
            Event::Mtu(9999),
            Event::Routes,
            Event::LinkRemoved,
        ];
        assert_eq!(all(pending), expected);
    }

    #[test]
    fn an_address_that_comes_back_before_it_is_sent_has_never_gone() {
        let mut pending = Pending::default();
        let address = IpAddr::from([10, 0, 0, 1]);
        pending.add(&Event::AddressRemoved(address));
        pending.add(&Event::AddressAdded(address));
        assert_eq!(pending.first(), None);
        pending.add(&Event::AddressRemoved(address));
        assert_eq!(all(pending), [Event::AddressRemoved(address)]);
    }
}
