//! [`Relay`]: the tc program that hands frames to a [`Switch`] when a foreign XDP program has the interface.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::OpenObject;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::attach::{Anchor, AttachError, Hook, Kept, Place};
use crate::relay_skeleton::{RelaySkel, RelaySkelBuilder};
use crate::{ProgramError, Switch, redirect_messages};

/// The program while it is attached. The kernel detaches it when this is dropped or the process dies.
#[derive(Debug)]
pub struct Relay {
    program: OwnedFd,
    anchor: Anchor,
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
        let skeleton = load_skeleton(switch, near, &mut storage)?;
        let failed = |source: io::Error| ProgramError {
            doing: "attaching the program of the relay (kernel 6.6 or newer)",
            source: source.into(),
        };
        let program = skeleton.progs.xwarp_relay.as_fd().try_clone_to_owned().map_err(failed)?;
        let anchor = Anchor::default();
        let attached = anchor.attach(program.as_fd(), Place { ifindex, hook: Hook::Ingress });
        attached.map_err(|error| failed(io::Error::other(error)))?;
        Ok(Self { program, anchor })
    }

    /// Attaches the program again if somebody else has detached it.
    ///
    /// # Errors
    /// The interface is gone, or in another network namespace than the calling thread.
    pub fn keep_attached(&self) -> Result<Kept, AttachError> {
        self.anchor.keep(self.program.as_fd())
    }
}

/// Opens, configures and loads the program.
pub(crate) fn load_skeleton<'obj>(
    switch: &Switch,
    near: u32,
    storage: &'obj mut MaybeUninit<OpenObject>,
) -> Result<RelaySkel<'obj>, ProgramError> {
    let mut open = RelaySkelBuilder::default()
        .open(storage)
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
    open.load().map_err(ProgramError::new("loading the program of the relay"))
}
