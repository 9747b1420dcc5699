//! Offloads and MTU of the two interfaces: changed for a measurement, then restored.

use std::{cell::RefCell, process::Command};

use anyhow::{Context as _, Result, bail, ensure};

/// Offloads that let kernel TCP use frames of up to 64 KiB: the name for setting each, and its name in the
/// listing.
const OFFLOADS: [(&str, &str); 3] = [
    ("tso", "tcp-segmentation-offload"),
    ("gso", "generic-segmentation-offload"),
    ("gro", "generic-receive-offload"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Settings {
    /// Whether each of [`OFFLOADS`] is on, in that order.
    offloads: [bool; 3],
    mtu: u32,
}

/// One interface in one namespace.
#[derive(Debug)]
struct Interface {
    namespace: String,
    device: String,
    found: Settings,
    now: RefCell<Settings>,
}

/// The interfaces of both ends.
#[derive(Debug)]
pub(super) struct Interfaces([Interface; 2]);

impl Interfaces {
    /// Reads the current settings of both interfaces.
    pub(super) fn remember(namespaces: [&str; 2], device: &str) -> Result<Self> {
        let [a, b] = namespaces.map(|namespace| Interface::read(namespace, device));
        Ok(Self([a?, b?]))
    }

    /// Turns the offloads off or restores them, and sets `mtu` or restores the original one.
    pub(super) fn arrange(&self, offloads: bool, mtu: Option<u32>) -> Result<()> {
        for interface in &self.0 {
            let found = interface.found;
            interface.apply(Settings {
                offloads: if offloads { found.offloads } else { [false; 3] },
                mtu: mtu.unwrap_or(found.mtu),
            })?;
        }
        Ok(())
    }

    /// Restores all settings.
    pub(super) fn restore(&self) -> Result<()> {
        self.arrange(true, None)
    }
}

impl Drop for Interfaces {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            eprintln!("xwarp-perf: the interfaces' settings were not restored: {error:#}");
        }
    }
}

impl Interface {
    fn read(namespace: &str, device: &str) -> Result<Self> {
        let features = inside(namespace, &["ethtool", "-k", device])?;
        let link = inside(namespace, &["ip", "-o", "link", "show", "dev", device])?;
        let found = Settings { offloads: parse_features(&features)?, mtu: parse_mtu(&link)? };
        Ok(Self { namespace: namespace.into(), device: device.into(), found, now: RefCell::new(found) })
    }

    fn apply(&self, wanted: Settings) -> Result<()> {
        let mut now = self.now.borrow_mut();
        if wanted.offloads != now.offloads {
            let mut command = vec!["ethtool", "-K", &self.device];
            for ((name, _), on) in OFFLOADS.iter().zip(wanted.offloads) {
                command.extend([*name, if on { "on" } else { "off" }]);
            }
            inside(&self.namespace, &command)?;
        }
        if wanted.mtu != now.mtu {
            inside(&self.namespace, &["ip", "link", "set", &self.device, "mtu", &wanted.mtu.to_string()])?;
        }
        *now = wanted;
        Ok(())
    }
}

fn parse_features(text: &str) -> Result<[bool; 3]> {
    let mut offloads = [false; 3];
    for (on, (_, name)) in offloads.iter_mut().zip(OFFLOADS) {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        *on = line.with_context(|| format!("ethtool does not report {name}"))?.trim().starts_with("on");
    }
    Ok(offloads)
}

fn parse_mtu(text: &str) -> Result<u32> {
    let mut words = text.split_whitespace();
    words.find(|&word| word == "mtu");
    Ok(words.next().context("ip does not report the MTU")?.parse()?)
}

fn inside(namespace: &str, command: &[&str]) -> Result<String> {
    let output = Command::new("ip").args(["netns", "exec", namespace]).args(command).output();
    let output = output.context("cannot run 'ip': is iproute2 installed?")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        if words.contains("Cannot open network namespace") {
            bail!("there is no namespace {namespace}: 'ci/lab up' makes xw-a and xw-b");
        }
        ensure!(false, "{} in {namespace}: {}", command.join(" "), words.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listings_are_read() {
        let features = "Features for xw0:\nrx-checksumming: on\ntcp-segmentation-offload: on\n\ttx-tcp-segmentation: on\ngeneric-segmentation-offload: on [requested off]\ngeneric-receive-offload: off\n";
        assert_eq!(parse_features(features).unwrap(), [true, true, false]);
        assert!(parse_features("nothing").is_err());
        let link =
            "2: xw0@if2: <BROADCAST,UP> mtu 1500 qdisc noqueue state UP mode DEFAULT group default qlen 1000";
        assert_eq!(parse_mtu(link).unwrap(), 1500);
        assert!(parse_mtu("2: xw0").is_err());
    }
}
