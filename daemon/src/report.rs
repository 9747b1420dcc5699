//! Reports of the helper's state: descriptions for users, metrics for monitors.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use rustix::net::sockopt::xdp_statistics;
use xwarp_control::{Description, Quota, Reason, Refusal};

use crate::client::Device;
use crate::limits::Usage;
use crate::metrics::Text;
use crate::server::Server;
use crate::uplink::{Uplink, refusal};

/// A number of one user.
type OfUser = fn(&Usage) -> u64;

impl Server {
    /// Devices on the interface at this place.
    fn devices_on(&self, index: usize) -> usize {
        let there = |device: &Device| matches!(device, Device::Open { uplink, .. } if *uplink == index);
        self.clients.values().filter(|client| there(&client.device)).count()
    }

    /// The state of an interface, and the resources of `uid`.
    pub(crate) fn describe(&self, uid: u32, number: u16) -> Result<Description, Refusal> {
        let interfaces = self.uplinks.len() as u16;
        let Some(uplink) = self.uplinks.get(usize::from(number)) else {
            return Err(refusal(Reason::NotServed, format!("there are {interfaces} shared interfaces")));
        };
        let attributes = uplink.shared.attributes();
        let usage = self.usage(uid);
        let quota = |used: usize, most: usize| Quota { used: used as u64, most: most as u64 };
        Ok(Description {
            interfaces,
            name: attributes.name.clone(),
            carrier: attributes.carrier.clone(),
            mtu: attributes.mtu,
            up: attributes.up,
            hook: uplink.shared.hook(),
            generic_clients: !uplink.shared.takes_redirected(),
            devices: self.devices_on(usize::from(number)) as u32,
            own_devices: quota(usage.devices, self.limits.devices),
            own_ports: quota(usage.ports, self.limits.ports),
            own_memory_bytes: Quota { used: usage.memory_bytes, most: self.limits.memory_bytes },
            counters: counters(uplink).map(|(name, value)| (name.to_owned(), value)).collect(),
        })
    }

    /// Answers the waiting monitors.
    pub(crate) fn answer_monitors(&self) {
        while let Some(monitor) = self.metrics.as_ref().and_then(crate::metrics::Metrics::next) {
            // The monitor may have disconnected.
            let _ = monitor.try_send(self.metrics());
        }
    }

    /// Work that waits for the threads.
    fn write_work(&self, text: &mut Text) {
        let (waiting, threads) = self.closing.counts();
        for (name, help, value) in [
            (
                "xwarpd_pair_jobs",
                "Pairs of interfaces that wait to be made, changed or removed.",
                self.pairs.waiting(),
            ),
            ("xwarpd_closing_waiting", "Descriptors of clients that wait to be closed.", waiting),
            ("xwarpd_closing_threads", "Threads that close descriptors of clients.", threads),
        ] {
            text.family(name, "gauge", help);
            text.sample(name, &[], value as u64);
        }
    }

    /// What each user has of its quota.
    fn write_users(&self, text: &mut Text) {
        let users: BTreeSet<u32> = self.clients.values().map(|client| client.uid).collect();
        let usages: Vec<(String, Usage)> =
            users.into_iter().map(|uid| (uid.to_string(), self.usage(uid))).collect();
        let families: [(&str, &str, OfUser); 4] = [
            ("xwarpd_user_connections", "Connected processes of a user.", |usage| usage.connections as u64),
            ("xwarpd_user_devices", "Open devices of a user.", |usage| usage.devices as u64),
            ("xwarpd_user_ports", "Ports of a user.", |usage| usage.ports as u64),
            ("xwarpd_user_memory_bytes", "Frame memory of a user.", |usage| usage.memory_bytes),
        ];
        for (name, help, value) in families {
            text.family(name, "gauge", help);
            for (uid, usage) in &usages {
                text.sample(name, &[("uid", uid)], value(usage));
            }
        }
    }

    /// The losses of all clients of an interface, those that have gone included.
    fn losses_on(&self, index: usize) -> [(&'static str, u64); 4] {
        let mut losses = self.losses.of(index);
        for client in self.clients.values() {
            if let Device::Open { uplink, socket, .. } = &client.device
                && *uplink == index
            {
                let more = read(socket);
                losses.iter_mut().zip(more).for_each(|(loss, more)| *loss += more);
            }
        }
        std::array::from_fn(|at| (LOSSES[at], losses[at]))
    }

    fn metrics(&self) -> String {
        let mut text = Text::default();
        let names = || self.uplinks.iter().map(|uplink| uplink.shared.attributes().name.as_str());
        text.family("xwarpd_frames", "counter", "Frames by what the switch did with them.");
        for (uplink, name) in self.uplinks.iter().zip(names()) {
            for (outcome, value) in counters(uplink) {
                text.sample("xwarpd_frames_total", &[("interface", name), ("outcome", outcome)], value);
            }
        }
        text.family("xwarpd_devices", "gauge", "Open devices.");
        for (index, name) in names().enumerate() {
            text.sample("xwarpd_devices", &[("interface", name)], self.devices_on(index) as u64);
        }
        text.family("xwarpd_interface_up", "gauge", "Whether the interface is up and has a carrier.");
        for (uplink, name) in self.uplinks.iter().zip(names()) {
            let up = u64::from(uplink.shared.attributes().up);
            text.sample("xwarpd_interface_up", &[("interface", name)], up);
        }
        let ports: usize = self.clients.values().map(|client| client.ports.len()).sum();
        for (name, help, value) in [
            ("xwarpd_connections", "Connected processes.", self.clients.len()),
            ("xwarpd_reserved_ports", "Ports of clients.", ports),
            (
                "xwarpd_quarantined_ports",
                "Released ports that only their old user may have.",
                self.quarantine.len(),
            ),
        ] {
            text.family(name, "gauge", help);
            text.sample(name, &[], value as u64);
        }
        self.write_work(&mut text);
        self.write_users(&mut text);
        text.family(
            "xwarpd_client_losses",
            "counter",
            "Frames that clients lost at their rings, by the reason.",
        );
        for (index, name) in names().enumerate() {
            for (reason, value) in self.losses_on(index) {
                text.sample("xwarpd_client_losses_total", &[("interface", name), ("reason", reason)], value);
            }
        }
        text.family("xwarpd_refused_requests", "counter", "Requests and connections that were refused.");
        for (reason, count) in &self.refused {
            text.sample("xwarpd_refused_requests_total", &[("reason", reason)], *count);
        }
        text.done()
    }
}

/// Why clients lost frames, as their AF_XDP sockets count it.
const LOSSES: [&str; 4] =
    ["receive_ring_full", "no_receive_buffer", "too_long", "invalid_transmit_descriptor"];

/// The losses that the socket of a client has counted.
fn read(socket: &OwnedFd) -> [u64; 4] {
    xdp_statistics(socket).map_or([0; 4], |seen| {
        let [full, empty] = [seen.rx_ring_full, seen.rx_fill_ring_empty_descs].map(Option::unwrap_or_default);
        [full, empty, seen.rx_dropped, seen.tx_invalid_descs]
    })
}

/// The losses of clients that have gone, by the place of their interface.
#[derive(Debug, Default)]
pub(crate) struct Losses(BTreeMap<usize, [u64; 4]>);

impl Losses {
    /// Adds those of a client that goes.
    pub(crate) fn add(&mut self, index: usize, socket: &OwnedFd) {
        let losses = self.0.entry(index).or_default();
        losses.iter_mut().zip(read(socket)).for_each(|(loss, more)| *loss += more);
    }

    fn of(&self, index: usize) -> [u64; 4] {
        self.0.get(&index).copied().unwrap_or_default()
    }
}

/// The counters of an interface's switch, with names without the prefix of the switch.
fn counters(uplink: &Uplink) -> impl Iterator<Item = (&'static str, u64)> {
    let counters = uplink.shared.switch().counters();
    let counters = counters.inspect_err(|error| tracing::warn!(%error, "counters cannot be read"));
    let named = counters.unwrap_or_default();
    named.iter().map(|(name, value)| (name.strip_prefix("switch.").unwrap_or(name), value))
}
