//! [`Relay`]: the tc program that hands frames to a [`Switch`] when a foreign XDP program has the interface.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::relay_skeleton::RelaySkelBuilder;
use crate::{ProgramError, Switch, attach, redirect_messages};

/// The program while it is attached. The kernel detaches it when this is dropped or the process dies.
#[derive(Debug)]
pub struct Relay {
    _link: OwnedFd,
}

impl Relay {
    /// Attaches the program to interface `ifindex`, so that frames for clients of `switch` leave through interface `near`; both
    /// are in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel is older than 6.6, which has no links to tc.
    pub fn attach(switch: &Switch, ifindex: u32, near: u32) -> Result<Self, ProgramError> {
        redirect_messages();
        let mut storage = MaybeUninit::uninit();
        let mut open = RelaySkelBuilder::default()
            .open(&mut storage)
            .map_err(ProgramError::new("opening the program of the relay"))?;
        let maps =
            [&mut open.maps.owners, &mut open.maps.addresses, &mut open.maps.source, &mut open.maps.counters];
        for (map, shared) in maps.into_iter().zip(switch.maps()) {
            map.reuse_fd(shared.as_fd()).map_err(ProgramError::new("sharing the maps of the switch"))?;
        }
        let Some(constants) = open.maps.rodata_data.as_mut() else {
            let source = io::Error::from(io::ErrorKind::NotFound).into();
            return Err(ProgramError { doing: "configuring the program of the relay", source });
        };
        constants.relay = near;
        let skeleton = open.load().map_err(ProgramError::new("loading the program of the relay"))?;
        let link = attach::attach_ingress(skeleton.progs.xwarp_relay.as_fd(), ifindex).map_err(|source| {
            ProgramError {
                doing: "attaching the program of the relay (kernel 6.6 or newer)",
                source: source.into(),
            }
        })?;
        Ok(Self { _link: link })
    }
}
