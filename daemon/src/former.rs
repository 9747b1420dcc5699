//! [`Former`]: what the helper that served before this one has left with its keeper, by the names of the descriptors.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use anyhow::{Context as _, Result};
use xwarp_control::{Sizes, VERSION};
use xwarp_driver::shared::Remains;

use crate::names::{Name, NameError};

/// The name of the socket to the keeper of this program, always the first descriptor.
pub(crate) const KEEPER: &str = "keeper";

/// The descriptors of another version of this program, which this one leaves alone.
#[derive(Debug, thiserror::Error)]
#[error(
    "another version of xwarpd left a descriptor ({name}) that this one does not know: nothing was changed"
)]
pub(crate) struct OtherVersion {
    name: String,
}

/// What the former helper has left.
#[derive(Debug, Default)]
pub(crate) struct Former {
    /// The socket to the keeper.
    pub keeper: Option<OwnedFd>,
    /// The listening socket of the service manager.
    pub activated: Option<OwnedFd>,
    /// The listening socket, and device and inode of its file.
    pub listener: Option<(OwnedFd, (u64, u64))>,
    /// The network namespace of the near ends.
    pub home: Option<OwnedFd>,
    /// Interfaces, by index.
    pub uplinks: BTreeMap<u32, Remains>,
    /// Devices, by slot.
    pub devices: BTreeMap<u32, FormerDevice>,
    /// The names of all.
    pub names: BTreeSet<Name>,
}

/// A device of the former helper, as far as it was kept.
#[derive(Debug, Default)]
pub(crate) struct FormerDevice {
    pub client: Option<FormerClient>,
    pub process: Option<OwnedFd>,
    pub events: Option<OwnedFd>,
    pub socket: Option<OwnedFd>,
    pub near: Option<OwnedFd>,
    pub far: Option<OwnedFd>,
    pub space: Option<FormerSpace>,
    /// Ports, with the requests that reserved them.
    pub ports: Vec<(u32, OwnedFd)>,
}

/// The connection of a client.
#[derive(Debug)]
pub(crate) struct FormerClient {
    pub connection: OwnedFd,
    pub interface: u32,
    pub sizes: Sizes,
}

/// The namespace of a client's socket, and to whom it is charged.
#[derive(Debug)]
pub(crate) struct FormerSpace {
    pub protocols: OwnedFd,
    pub uid: u32,
    pub memory_bytes: u64,
}

impl Former {
    /// Takes the descriptors that this process has inherited (`sd_listen_fds(3)`).
    ///
    /// # Errors
    /// [`OtherVersion`].
    pub(crate) fn take() -> Result<Self> {
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let names = variable("LISTEN_FDNAMES");
        let for_this = variable("LISTEN_PID") == std::process::id().to_string();
        // The keeper does not know the number of its child when it starts it.
        if !for_this && names.split(':').next() != Some(KEEPER) {
            return Ok(Self::default());
        }
        let count = variable("LISTEN_FDS").parse().context("LISTEN_FDS")?;
        let descriptors = xwarp_driver::inherited(count).context("taking inherited descriptors")?;
        Self::sort(names.split(':').map(str::to_owned).zip(descriptors))
    }

    fn sort(descriptors: impl Iterator<Item = (String, OwnedFd)>) -> Result<Self> {
        let mut former = Self::default();
        for (text, descriptor) in descriptors {
            if text == KEEPER && former.keeper.is_none() {
                former.keeper = Some(descriptor);
                continue;
            }
            match text.parse() {
                Ok(name) => former.add(name, descriptor)?,
                Err(NameError::Foreign) if former.activated.is_none() => former.activated = Some(descriptor),
                Err(NameError::Foreign) => {}
                Err(NameError::Unknown) => return Err(OtherVersion { name: text }.into()),
            }
        }
        Ok(former)
    }

    fn device(&mut self, slot: u32) -> &mut FormerDevice {
        self.devices.entry(slot).or_default()
    }

    fn add(&mut self, name: Name, descriptor: OwnedFd) -> Result<(), OtherVersion> {
        self.names.insert(name.clone());
        match name {
            Name::Listener { device, inode } => self.listener = Some((descriptor, (device, inode))),
            Name::Home => self.home = Some(descriptor),
            Name::Uplink { interface, multi_buffer, vlans } => {
                self.uplinks.insert(interface, Remains { link: descriptor, multi_buffer, vlans });
            }
            Name::Client { protocol, .. } if protocol != VERSION => {
                return Err(OtherVersion { name: name.to_string() });
            }
            Name::Client { slot, interface, receive, transmit, ring, .. } => {
                let sizes = Sizes { receive_chunks: receive, transmit_chunks: transmit, ring };
                self.device(slot).client = Some(FormerClient { connection: descriptor, interface, sizes });
            }
            Name::Process { slot } => self.device(slot).process = Some(descriptor),
            Name::Events { slot } => self.device(slot).events = Some(descriptor),
            Name::Socket { slot } => self.device(slot).socket = Some(descriptor),
            Name::Near { slot } => self.device(slot).near = Some(descriptor),
            Name::Far { slot } => self.device(slot).far = Some(descriptor),
            Name::Space { slot, uid, memory_bytes } => {
                self.device(slot).space = Some(FormerSpace { protocols: descriptor, uid, memory_bytes });
            }
            Name::Port { slot, request } => self.device(slot).ports.push((request, descriptor)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn sort(names: &[&str]) -> Result<Former> {
        let open = |name: &&str| (name.to_string(), File::open("/dev/null").unwrap().into());
        Former::sort(names.iter().map(open))
    }

    #[test]
    fn descriptors_are_sorted_by_device() {
        let protocol = VERSION;
        let client = format!("1c7.3.{protocol}.1.2.4");
        let former =
            sort(&["keeper", "xwarpd.socket", "1h", "1u3.1.42", &client, "1e7", "1p7.1", "1p7.2", "1s9"]);
        let former = former.unwrap();
        assert!(former.keeper.is_some() && former.home.is_some() && former.listener.is_none());
        assert!(former.activated.is_some() && sort(&["1h"]).unwrap().activated.is_none());
        assert_eq!(former.uplinks[&3].vlans, [42]);
        let device = &former.devices[&7];
        assert_eq!(device.client.as_ref().unwrap().interface, 3);
        assert!(device.events.is_some() && device.socket.is_none() && device.ports.len() == 2);
        assert!(former.devices[&9].socket.is_some() && former.names.len() == 7);
    }

    #[test]
    fn descriptors_of_another_version_are_named() {
        for name in ["2h", "1z1", &format!("1c7.3.{}.1.2.4", VERSION + 1)] {
            let refused = sort(&["1h", name]).unwrap_err();
            assert!(refused.is::<OtherVersion>() && refused.to_string().contains(name), "{refused:#}");
        }
    }
}
