//! [`Switch`]: the programs of an interface that many processes share, and their maps.

use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject, ProgramMut};

use crate::addresses::{Addresses, Station};
use crate::attach::{self, Anchor, AttachError, AttachMode, Hook, Kept, Place};
use crate::counters::SwitchCounters;
use crate::policy::Policy;
use crate::switch_skeleton::{SwitchSkel, SwitchSkelBuilder};
use crate::{HAS_FRAGS, ProgramConfig, ProgramError, configure, keys, redirect_messages, remove};

/// Key of the interface itself in the map of clients.
const UPLINK: u32 = 0;

/// The programs and maps of one shared interface. Dropping it detaches the program from the interface.
#[derive(Debug)]
pub struct Switch {
    uplink: OwnedFd,
    port: OwnedFd,
    to_xsk: OwnedFd,
    owners: MapHandle,
    addresses: Addresses,
    clients: MapHandle,
    slots: MapHandle,
    sockets: MapHandle,
    station: Station,
    policy: Policy,
    counters: MapHandle,
    anchor: Anchor,
}

/// Keeps the programs on the two ends of a client's pair attached.
#[derive(Debug)]
pub struct PairLinks {
    near: OwnedFd,
    far: OwnedFd,
}

impl PairLinks {
    /// Links that another process has made.
    pub fn new(near: OwnedFd, far: OwnedFd) -> Self {
        Self { near, far }
    }

    /// The link at the near end.
    pub fn near(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }

    /// The link at the far end.
    pub fn far(&self) -> BorrowedFd<'_> {
        self.far.as_fd()
    }
}

impl Switch {
    /// Loads the programs without attaching them.
    ///
    /// # Errors
    /// As [`SteeringProgram::load`](crate::SteeringProgram::load).
    pub fn load(config: &ProgramConfig<'_>) -> Result<Self, ProgramError> {
        redirect_messages();
        let mut storage = MaybeUninit::uninit();
        Self::from_skeleton(&load_skeleton(config, &mut storage)?)
    }

    /// Duplicates the descriptors, so that the skeleton can be dropped.
    pub(crate) fn from_skeleton(skeleton: &SwitchSkel<'_>) -> Result<Self, ProgramError> {
        let program = |program: &ProgramMut<'_>| {
            program.as_fd().try_clone_to_owned().map_err(|source| ProgramError {
                doing: "duplicating a program's descriptor",
                source: source.into(),
            })
        };
        let map = |map: &libbpf_rs::MapMut<'_>| {
            MapHandle::try_from(map).map_err(ProgramError::new("duplicating a map's descriptor"))
        };
        let (programs, maps) = (&skeleton.progs, &skeleton.maps);
        Ok(Self {
            uplink: program(&programs.xwarp_uplink)?,
            port: program(&programs.xwarp_port)?,
            to_xsk: program(&programs.xwarp_to_xsk)?,
            owners: map(&maps.owners)?,
            addresses: Addresses(map(&maps.addresses)?),
            clients: map(&maps.clients)?,
            slots: map(&maps.slots)?,
            sockets: map(&maps.sockets)?,
            station: Station(map(&maps.source)?),
            policy: Policy::new(map(&maps.policy)?, map(&maps.peers)?),
            counters: map(&maps.counters)?,
            anchor: Anchor::default(),
        })
    }

    /// Attaches the program to interface `ifindex` of the calling thread's network namespace, through which the frames
    /// of clients leave from now on.
    ///
    /// # Errors
    /// [`AttachError::Foreign`] names the program that is there already.
    pub fn attach(&mut self, ifindex: u32, mode: AttachMode) -> Result<(), AttachError> {
        self.anchor.attach(self.uplink.as_fd(), Place { ifindex, hook: Hook::Xdp(mode) })?;
        self.send_through(ifindex).map_err(|error| AttachError::System(std::io::Error::other(error)))
    }

    /// Takes over the `link` of another switch at interface `ifindex`, whose program is replaced by this switch's at once.
    ///
    /// # Errors
    /// The link has no interface any more, or the kernel refuses the program.
    pub fn take_over(&self, link: OwnedFd, ifindex: u32, mode: AttachMode) -> Result<(), AttachError> {
        self.anchor.take_over(link, self.uplink.as_fd(), Place { ifindex, hook: Hook::Xdp(mode) })
    }

    /// Lets the links of a client that was [added](Self::add_client) run the programs of this switch.
    ///
    /// # Errors
    /// An end has no interface any more, or the kernel refuses a program.
    pub fn take_over_pair(&self, links: &PairLinks) -> Result<(), AttachError> {
        attach::update(links.far(), self.to_xsk.as_fd())?;
        Ok(attach::update(links.near(), self.port.as_fd())?)
    }

    /// Calls `f` with the link that keeps the program attached to the interface.
    pub fn with_link<R>(&self, f: impl FnOnce(Option<BorrowedFd<'_>>) -> R) -> R {
        self.anchor.with_link(f)
    }

    /// Attaches the program to the interface again if somebody else has detached it.
    ///
    /// # Errors
    /// As [`SteeringProgram::keep_attached`](crate::SteeringProgram::keep_attached).
    pub fn keep_attached(&self) -> Result<Kept, AttachError> {
        self.anchor.keep(self.uplink.as_fd())
    }

    /// Has the driver run the program on queues that were added since it was attached.
    ///
    /// # Errors
    /// The kernel refuses it; the program runs on the former queues.
    pub fn cover_queues(&self) -> std::io::Result<()> {
        self.anchor.cover_queues(self.uplink.as_fd())
    }

    /// Lets the frames of clients leave through interface `ifindex`, without attaching a program to it: frames from the
    /// wire arrive through a [`Relay`](crate::Relay).
    pub fn send_through(&self, ifindex: u32) -> Result<(), ProgramError> {
        self.set_device(UPLINK, ifindex)
    }

    /// Attaches the program that distributes frames from the wire to the far end of a relay, interface `ifindex` of the calling
    /// thread's network namespace. It is attached until the result is dropped.
    ///
    /// # Errors
    /// A kernel without native XDP on veth.
    pub fn attach_behind_relay(&self, ifindex: u32) -> Result<OwnedFd, AttachError> {
        attach::attach_to_own(self.uplink.as_fd(), ifindex, AttachMode::Native)
    }

    /// The maps that the program of a relay shares.
    pub(crate) fn maps(&self) -> [&MapHandle; 4] {
        [&self.owners, &self.addresses.0, &self.station.0, &self.counters]
    }

    fn set_device(&self, slot: u32, ifindex: u32) -> Result<(), ProgramError> {
        let doing = "adding an interface to the switch";
        self.clients
            .update(&slot.to_ne_bytes(), &ifindex.to_ne_bytes(), MapFlags::ANY)
            .map_err(ProgramError::new(doing))
    }

    /// Attaches the program of far ends to interface `far` of the calling thread's network namespace. It is attached until the
    /// result is dropped. A far end receives redirected frames only while it has a program, or its peer has one.
    ///
    /// # Errors
    /// A kernel without native XDP on veth.
    pub fn attach_far(&self, far: u32) -> Result<OwnedFd, AttachError> {
        attach::attach_to_own(self.to_xsk.as_fd(), far, AttachMode::Native)
    }

    /// Connects the client of `slot` (1 to 4095): the ends of its pair, of which the near one is an interface of the calling
    /// thread's network namespace and the far one has a [program](Self::attach_far), and the socket for the far end. Both
    /// indices are unique among all ends of this switch, whatever namespaces these are in.
    ///
    /// # Errors
    /// A program cannot be attached in this mode, or a map is full.
    pub fn connect_client(
        &self,
        slot: u32,
        [near, far]: [u32; 2],
        far_link: OwnedFd,
        socket: BorrowedFd<'_>,
        mode: AttachMode,
    ) -> Result<PairLinks, AttachError> {
        let near_link = attach::attach_to_own(self.port.as_fd(), near, mode)?;
        let added = self.add_client(slot, [near, far], socket);
        added.map_err(|error| AttachError::System(std::io::Error::other(error)))?;
        Ok(PairLinks { near: near_link, far: far_link })
    }

    /// Adds a client to the maps, as [`connect_client`](Self::connect_client) does, whose ends have programs already.
    ///
    /// # Errors
    /// A map is full.
    pub fn add_client(
        &self,
        slot: u32,
        [near, far]: [u32; 2],
        socket: BorrowedFd<'_>,
    ) -> Result<(), ProgramError> {
        for end in [near, far] {
            let added = self.slots.update(&end.to_ne_bytes(), &slot.to_ne_bytes(), MapFlags::ANY);
            added.map_err(ProgramError::new("adding a client to the switch"))?;
        }
        let descriptor = socket.as_raw_fd().to_ne_bytes();
        let added = self.sockets.update(&slot.to_ne_bytes(), &descriptor, MapFlags::ANY);
        added.map_err(ProgramError::new("adding a client's socket to the switch"))?;
        self.set_device(slot, near)
    }

    /// Disconnects the client of `slot` with these ends. Its ports are removed separately, before.
    pub fn disconnect_client(&self, slot: u32, ends: [u32; 2]) {
        remove(&self.clients, &slot.to_ne_bytes());
        remove(&self.sockets, &slot.to_ne_bytes());
        for end in ends {
            remove(&self.slots, &end.to_ne_bytes());
        }
    }

    /// Gives `port` of `address` (`None`: of every [address](Addresses)) to the client of `slot`.
    pub fn add_owner(&self, address: Option<IpAddr>, port: u16, slot: u32) -> Result<(), ProgramError> {
        self.owners
            .update(&keys::port(address, port), &slot.to_ne_bytes(), MapFlags::ANY)
            .map_err(ProgramError::new("giving a port to a client"))
    }

    /// Takes a port away from its owner, if it has one.
    pub fn remove_owner(&self, address: Option<IpAddr>, port: u16) {
        remove(&self.owners, &keys::port(address, port));
    }

    /// The addresses of the interface; frames from and to other addresses belong to no client.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// The Ethernet address of the interface: frames of clients must come from it, and those from the wire go to it.
    pub fn station(&self) -> &Station {
        &self.station
    }

    /// What the clients may do beyond owning their ports.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The kernel's id of the program on the interface; 0 if the kernel does not report it.
    pub fn id(&self) -> u32 {
        attach::program_id(self.uplink.as_fd()).unwrap_or(0)
    }

    /// Counts of frames by the programs' action, over all CPUs since they were loaded.
    pub fn counters(&self) -> Result<SwitchCounters, ProgramError> {
        SwitchCounters::read(&self.counters).map_err(ProgramError::new("reading the switch's counters"))
    }
}

/// Opens, configures and loads the programs.
pub(crate) fn load_skeleton<'obj>(
    config: &ProgramConfig<'_>,
    storage: &'obj mut MaybeUninit<OpenObject>,
) -> Result<SwitchSkel<'obj>, ProgramError> {
    let mut open = SwitchSkelBuilder::default()
        .open(storage)
        .map_err(ProgramError::new("opening the programs of the switch"))?;
    let flags = if config.multi_buffer { HAS_FRAGS } else { 0 };
    open.progs.xwarp_uplink.set_flags(flags);
    open.progs.xwarp_port.set_flags(flags);
    open.progs.xwarp_to_xsk.set_flags(flags);
    let constants = open.maps.rodata_data.as_mut();
    configure(config.vlans, constants.map(|data| (&mut data.vlan_count, &mut data.vlan_ids)))?;
    open.load().map_err(ProgramError::new("loading the programs of the switch"))
}

#[cfg(test)]
mod tests;
