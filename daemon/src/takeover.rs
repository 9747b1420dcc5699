//! Devices that outlive this process: what is kept of them, and how this helper goes on with those of the former one.
//!
//! The switch of this helper begins with empty maps. They are filled first, while the programs of the former helper go on with
//! theirs; then each link gets the program of this helper in one step, so that no frame meets an incomplete table.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use xwarp_control::{Event, Reply, Sizes};
use xwarp_driver::PortReservation;
use xwarp_leg::message::send_message;
use xwarp_prog::{PairLinks, Switch};

use crate::client::{Client, Device};
use crate::former::{FormerClient, FormerDevice, FormerSpace};
use crate::names::Name;
use crate::pair::Pair;
use crate::pending::Pending;
use crate::private::{PrivateNamespace, far_index};
use crate::server::Server;
use crate::slots::Slots;
use crate::uplink::Uplink;

impl Server {
    /// Keeps a device that is complete. The client is the last: without it, the next helper removes the others.
    pub(crate) fn keep_device(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Device::Open { uplink, sizes, pair, events, socket, .. } = &client.device else { return };
        let Some(uplink) = self.uplinks.get(*uplink) else { return };
        let slot = pair.slot();
        let interface = uplink.shared.attributes().index;
        let last = Name::client(slot, interface, *sizes);
        let space = space_of(&self.slots, slot);
        let mut parts = vec![
            (Name::Near { slot }, pair.links().near()),
            (Name::Far { slot }, pair.links().far()),
            (Name::Socket { slot }, socket.as_fd()),
            (Name::Events { slot }, events.as_fd()),
        ];
        parts.extend(client.process.as_ref().map(|process| (Name::Process { slot }, process.as_fd())));
        parts.push((last, client.socket.as_fd()));
        let names: Vec<Name> = parts.iter().map(|(name, _)| name.clone()).chain(space.clone()).collect();
        if !self.store.keeps() {
            return;
        }
        if !self.store.has_room(&names) {
            tracing::warn!(uid = client.uid, slot, "no room: this device ends with a restart of xwarpd");
            return;
        }
        if let Some(space) = space {
            self.store.keep(space, pair.namespace().protocols());
        }
        for (name, descriptor) in parts {
            self.store.keep(name.clone(), descriptor);
            client.names.insert(name);
        }
    }

    /// Keeps a port of a device that is kept. Without room, the device is kept no longer: its client would believe that it still has
    /// the port.
    pub(crate) fn keep_port(&mut self, id: u64, request: u32, port: (Option<IpAddr>, u16)) {
        let Some(client) = self.clients.get_mut(&id).filter(|client| !client.names.is_empty()) else {
            return;
        };
        let Device::Open { pair, .. } = &client.device else { return };
        let Some(socket) = client.ports.get(&port).and_then(|(_, held)| held.socket()) else { return };
        let name = Name::Port { slot: pair.slot(), request };
        if self.store.has_room(std::slice::from_ref(&name)) {
            self.store.keep(name.clone(), socket);
            client.names.insert(name);
        } else {
            tracing::warn!(
                uid = client.uid,
                slot = pair.slot(),
                "no room: this device ends with a restart of xwarpd"
            );
            self.store.forget_all(&std::mem::take(&mut client.names));
        }
    }

    /// Keeps the link on an interface.
    pub(crate) fn keep_uplink(&mut self, index: usize) {
        let Some(uplink) = self.uplinks.get(index) else { return };
        let name = uplink.name();
        uplink.shared.switch().with_link(|link| {
            if let Some(link) = link {
                self.store.keep(name, link);
            }
        });
    }

    /// Frees the slot of a device of which nothing is left.
    pub(crate) fn removed(&mut self, slot: u32) {
        if let Some(space) = space_of(&self.slots, slot) {
            self.store.forget(&space);
        }
        self.slots.free(slot);
    }

    /// Goes on with the devices of the former helper, by slot.
    pub(crate) fn take_over(&mut self, former: BTreeMap<u32, FormerDevice>) -> Result<()> {
        let mut near_ends = self.pairs.near_ends()?;
        let mut there = BTreeSet::new();
        for (slot, mut device) in former {
            let near = near_ends.remove(&slot);
            let space = device.space.take();
            // Nobody is charged for remains, but their number is in use until they are removed.
            let (uid, bytes) = space.as_ref().map_or((u32::MAX, 0), |space| (space.uid, space.memory_bytes));
            self.slots.take(slot, uid, bytes);
            there.extend(space_of(&self.slots, slot));
            let events = device.events.as_ref().and_then(|events| events.try_clone().ok());
            match self.go_on(slot, near, device, space) {
                Ok(id) => {
                    let client = self.clients.get(&id);
                    there.extend(client.into_iter().flat_map(|client| client.names.clone()));
                }
                Err((why, space)) => {
                    tracing::info!(slot, "a device of the former xwarpd ends: {why:#}");
                    let text =
                        format!("xwarpd was started again, and cannot go on with this device: {why:#}");
                    let revoked = Event::Revoked { text }.encode();
                    let _ = events.map(|events| send_message(events.as_fd(), &revoked, &[]));
                    self.pairs.remove_remains(slot, near, space);
                }
            }
        }
        for (slot, near) in near_ends {
            self.slots.take(slot, u32::MAX, 0);
            self.pairs.remove_remains(slot, Some(near), None);
        }
        for index in 0..self.uplinks.len() {
            if let Some(uplink) = self.uplinks.get_mut(index).filter(|uplink| uplink.shared.has_former()) {
                uplink.shared.take_over().context("replacing the program of the former xwarpd")?;
                there.insert(uplink.name());
            }
        }
        // From here on, frames are carried by this helper's programs.
        let ids: Vec<u64> = self.clients.keys().copied().collect();
        for id in ids {
            self.announce(id);
        }
        self.store.retain(|name| there.contains(name) || matches!(name, Name::Home | Name::Listener { .. }));
        for index in 0..self.uplinks.len() {
            self.keep_uplink(index);
        }
        if !self.clients.is_empty() {
            tracing::info!(devices = self.clients.len(), "goes on with devices of the former xwarpd");
        }
        Ok(())
    }

    /// Goes on with a device. If that is not possible, its client is hung up on, and its namespace is returned.
    fn go_on(
        &mut self,
        slot: u32,
        near: Option<u32>,
        device: FormerDevice,
        space: Option<FormerSpace>,
    ) -> Result<u64, (anyhow::Error, Option<PrivateNamespace>)> {
        let namespace = space.map(|space| PrivateNamespace::of(space.protocols));
        let FormerDevice { client, process, events, socket, near: near_link, far, ports, .. } = device;
        let Some(FormerClient { connection, interface, sizes }) = client else {
            return Err((anyhow::anyhow!("it was not complete"), namespace));
        };
        let parts = near.zip(events).zip(socket).zip(near_link.zip(far));
        let parts = parts.map(|(((near, events), socket), (near_link, far))| {
            let links = PairLinks::new(near_link, far);
            Parts { interface, sizes, ends: [near, far_index(slot)], events, socket, links, ports }
        });
        let client = match Client::of(connection, process) {
            Ok(client) => client,
            Err(error) => return Err((error.into(), namespace)),
        };
        let (why, namespace) = match (parts, namespace) {
            (Some(parts), Some(namespace)) => match self.join(slot, &parts) {
                Ok(joined) => return Ok(self.adopt(slot, client, parts, namespace, joined)),
                Err(why) => (why, Some(namespace)),
            },
            (_, namespace) => (anyhow::anyhow!("it was not complete"), namespace),
        };
        self.closing.close_socket(client.uid, client.socket, client.process);
        Err((why, namespace))
    }

    /// Serves a former client from now on. Returns its number.
    fn adopt(
        &mut self,
        slot: u32,
        mut client: Client,
        parts: Parts,
        namespace: PrivateNamespace,
        (uplink, switch): (usize, Arc<Switch>),
    ) -> u64 {
        let Parts { interface, sizes, ends, events, socket, links, ports } = parts;
        let pair = Pair::new(slot, ends, namespace, Arc::clone(&switch), links);
        client.greeted = true;
        client.names.extend([
            Name::client(slot, interface, sizes),
            Name::Near { slot },
            Name::Far { slot },
            Name::Socket { slot },
            Name::Events { slot },
        ]);
        client.names.extend(client.process.is_some().then_some(Name::Process { slot }));
        for (request, socket) in ports {
            let reservation = PortReservation::of_socket(socket);
            let owned = reservation.map_err(anyhow::Error::from).and_then(|held| {
                switch.add_owner(held.address(), held.port(), slot)?;
                Ok(held)
            });
            match owned {
                Ok(held) => {
                    client.names.insert(Name::Port { slot, request });
                    client.ports.insert((held.address(), held.port()), (request, held));
                }
                Err(error) => tracing::warn!(slot, "a port of the former xwarpd is lost: {error:#}"),
            }
        }
        let pending = Pending::default();
        client.device =
            Device::Open { uplink, sizes, pair, events, pending, waits: false, socket, registers: false };
        let (id, watched) = self.admit(client);
        if let Err(error) = watched {
            self.gone(id, &format!("{error:#}"));
        }
        id
    }

    /// Adds a former device to the switch of its interface.
    fn join(&self, slot: u32, parts: &Parts) -> Result<(usize, Arc<Switch>)> {
        let same = |uplink: &Uplink| uplink.shared.attributes().index == parts.interface;
        let index = self.uplinks.iter().position(same).context("its interface is not shared any more")?;
        let uplink = self.uplinks.get(index).context("no such interface")?;
        ensure!(uplink.shared.has_former(), "its interface is shared in another way than before, or anew");
        let switch = Arc::clone(uplink.shared.switch());
        self.pairs.adopt(slot, parts.ends, Arc::clone(&switch), parts.socket.try_clone()?)?;
        Ok((index, switch))
    }

    /// Lets the programs of this helper carry a former client's frames, and tells it what it may have missed.
    fn announce(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let uid = client.uid;
        let Device::Open { uplink, pair, pending, .. } = &mut client.device else { return };
        let Some(uplink) = self.uplinks.get(*uplink) else { return };
        if let Err(error) = pair.switch().take_over_pair(pair.links()) {
            return self.gone(id, &format!("its pair of interfaces is gone ({error})"));
        }
        self.pairs.set_mtu(uid, pair, uplink.pair_mtu());
        pending.add(&Event::Restarted);
        uplink.state().for_each(|change| pending.add(&change));
        pending.add(&Event::Routes);
        // A client with many unread messages waits for no answer.
        let _ = client.reply(0, Reply::Restarted, &[]);
        self.send_events(id);
    }
}

/// The name of the namespace of a slot in use.
fn space_of(slots: &Slots, slot: u32) -> Option<Name> {
    slots.charged(slot).map(|(uid, memory_bytes)| Name::Space { slot, uid, memory_bytes })
}

/// The descriptors of a former device, all there.
struct Parts {
    interface: u32,
    sizes: Sizes,
    ends: [u32; 2],
    events: OwnedFd,
    socket: OwnedFd,
    links: PairLinks,
    /// With the requests that reserved them.
    ports: Vec<(u32, OwnedFd)>,
}
