//! Changes of the interfaces, and what clients hear of them.

use std::time::{Duration, Instant};

use xwarp_control::Event;

use crate::client::{Client, Device};
use crate::pending::Pending;
use crate::server::Server;
use crate::uplink::{Uplink, event_of};

/// How often a removed interface is looked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Server {
    pub(crate) fn interface_changed(&mut self, index: usize) {
        let Some(uplink) = self.uplinks.get_mut(index).filter(|uplink| !uplink.removed) else { return };
        // However many changes there are, clients hear of their outcome.
        let mut outcome = Pending::default();
        let changed = uplink.shared.events(|change| {
            if let Some(event) = event_of(change) {
                outcome.add(&event);
            }
        });
        if let Err(error) = changed {
            tracing::warn!(%error, "changes of an interface cannot be read");
        }
        uplink.follow();
        let ended = uplink.shared.ended().map(str::to_owned);
        let mtu = uplink.pair_mtu();
        let mut removed = false;
        while let Some(event) = outcome.first() {
            outcome.sent(&event);
            if !matches!(event, Event::Neighbour { .. }) {
                tracing::debug!(?event, "an interface changed");
            }
            removed |= event == Event::LinkRemoved;
            for client in self.clients.values_mut().filter(|client| concerns(&event, client, index)) {
                if let Some(text) = ended.clone().filter(|_| event == Event::LinkRemoved) {
                    let _ = client.notify(&Event::Revoked { text });
                    continue;
                }
                let uid = client.uid;
                let Device::Open { pair, pending, .. } = &mut client.device else { continue };
                if matches!(event, Event::Mtu(_)) {
                    self.pairs.set_mtu(uid, pair, mtu);
                }
                pending.add(&event);
            }
        }
        let on_it: Vec<u64> =
            self.clients.iter().filter(|(_, client)| client.is_on(index)).map(|(id, _)| *id).collect();
        for id in &on_it {
            self.send_events(*id);
        }
        if removed {
            self.lose(index);
        }
    }

    /// Sends the pending changes to a client as far as it reads; the rest waits until it does.
    pub(crate) fn send_events(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        match client.send_pending() {
            Ok(remain) => {
                let Device::Open { events, waits, .. } = &mut client.device else { return };
                if std::mem::replace(waits, remain) != remain {
                    Self::await_events(&self.epoll, id, events, remain);
                }
            }
            Err(_) => self.gone(id, "it has closed its socket of events"),
        }
    }

    /// Ends the devices on an interface that was removed, or moved to another network namespace, or from which somebody has taken the
    /// program.
    fn lose(&mut self, index: usize) {
        let Some(uplink) = self.uplinks.get_mut(index) else { return };
        uplink.removed = true;
        let name = uplink.shared.attributes().name.clone();
        let why = uplink.shared.ended().unwrap_or("the interface was removed");
        tracing::warn!(interface = name, "{why}: its devices end, and it is taken again when it comes back");
        self.store.forget(&uplink.name());
        self.unwatch_interface(index);
        let on_it: Vec<u64> =
            self.clients.iter().filter(|(_, client)| client.is_on(index)).map(|(id, _)| *id).collect();
        for id in on_it {
            self.gone(id, "its interface was removed");
        }
        self.look_again = Instant::now() + LOOK_EVERY;
    }

    /// Takes interfaces that have come back. Returns the time until the next look; `None` when none is removed.
    pub(crate) fn take_again(&mut self, now: Instant) -> Option<Duration> {
        if !self.uplinks.iter().any(|uplink| uplink.removed) {
            return None;
        }
        let left = self.look_again.saturating_duration_since(now);
        if !left.is_zero() {
            return Some(left);
        }
        self.look_again = now + LOOK_EVERY;
        for index in 0..self.uplinks.len() {
            let Some(uplink) = self.uplinks.get_mut(index).filter(|uplink| uplink.removed) else { continue };
            let name = uplink.shared.attributes().name.clone();
            if !Uplink::exists(&name) {
                continue;
            }
            let again = Uplink::open(&name, &self.options, |_| None).and_then(|mut again| {
                again.connect_relay(index, &self.pairs)?;
                Ok(again)
            });
            match again {
                Ok(again) => {
                    again.report();
                    *uplink = again;
                    self.keep_uplink(index);
                    if let Err(error) = self.watch_interface(index) {
                        tracing::error!("{error:#}");
                    }
                }
                Err(error) => tracing::warn!(interface = name, "the interface is not taken yet: {error:#}"),
            }
        }
        Some(LOOK_EVERY)
    }
}

/// Whether a client hears of a change of the interface at this place.
fn concerns(event: &Event, client: &Client, index: usize) -> bool {
    match event {
        Event::Neighbour { address, .. } => client.is_on(index) && client.follows(*address),
        _ => client.is_on(index),
    }
}
