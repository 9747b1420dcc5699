//! Reports of the helper's state: descriptions for users, metrics for monitors.

use xwarp_control::{Description, Quota, Reason, Refusal};

use crate::client::Device;
use crate::metrics::Text;
use crate::server::Server;
use crate::uplink::{Uplink, refusal};

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
        text.family("xwarpd_refused_requests", "counter", "Requests that were refused.");
        text.sample("xwarpd_refused_requests_total", &[], self.refused);
        text.done()
    }
}

/// The counters of an interface's switch, with names without the prefix of the switch.
fn counters(uplink: &Uplink) -> impl Iterator<Item = (&'static str, u64)> {
    let counters = uplink.shared.switch().counters();
    let counters = counters.inspect_err(|error| tracing::warn!(%error, "counters cannot be read"));
    let named = counters.unwrap_or_default();
    named.iter().map(|(name, value)| (name.strip_prefix("switch.").unwrap_or(name), value))
}
