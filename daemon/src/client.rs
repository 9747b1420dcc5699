//! [`Client`]: one connection.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::{
    getsockopt,
    sockopt::{PeerCredentials, PeerPidfd},
};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use xwarp_control::{Event, Reply, Sizes, Tagged};
use xwarp_driver::PortReservation;
use xwarp_driver::shared::memory_bytes;
use xwarp_leg::message::send_message;

use crate::identity;
use crate::names::Name;
use crate::pair::Pair;
use crate::pending::Pending;
use crate::ports::{Owner, Rights};

/// Largest number of next hops whose changes are sent to a client.
const MAX_NEXT_HOPS: usize = 1024;

/// A connected process.
pub(crate) struct Client {
    pub socket: OwnedFd,
    pub uid: u32,
    pub pid: i32,
    /// The user and its network namespace.
    pub owner: Owner,
    /// Whether its process has root's rights on this host.
    privileged: bool,
    /// Readable when the process has ended: a child of it may keep the socket open.
    pub process: Option<OwnedFd>,
    pub greeted: bool,
    pub device: Device,
    /// Its ports, with the numbers of the requests that reserved them.
    pub ports: BTreeMap<(Option<IpAddr>, u16), (u32, PortReservation)>,
    /// What is kept for the next helper.
    pub names: BTreeSet<Name>,
    /// Next hops of its connections.
    pub next_hops: BTreeSet<IpAddr>,
}

/// A client's device.
pub(crate) enum Device {
    None,
    /// The pair is being created.
    Opening {
        request: u32,
        uplink: usize,
        sizes: Sizes,
    },
    Open {
        uplink: usize,
        sizes: Sizes,
        pair: Pair,
        events: OwnedFd,
        /// What it has not been sent yet, and whether the loop waits until it can be.
        pending: Pending,
        waits: bool,
        /// The granted AF_XDP socket, for its statistics.
        socket: OwnedFd,
        /// Memory of it is being registered.
        registers: bool,
    },
}

impl Device {
    /// Bytes of its frame memory; `None` without a device.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Opening { sizes, .. } | Self::Open { sizes, .. } => Some(memory_bytes(*sizes)),
        }
    }
}

impl Client {
    /// The process at the other end of `socket`.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        let peer = getsockopt(&socket, PeerCredentials)?;
        let pid = peer.pid();
        // Before kernel 6.5 only its number is known, which is 0 in a PID namespace that cannot be seen from here.
        let by_number = || pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok();
        let process = getsockopt(&socket, PeerPidfd).ok().or_else(by_number);
        Self::of(socket, process)
    }

    /// The process `process` at the other end of `socket`.
    pub(crate) fn of(socket: OwnedFd, process: Option<OwnedFd>) -> io::Result<Self> {
        let peer = getsockopt(&socket, PeerCredentials)?;
        let pid = peer.pid();
        Ok(Self {
            socket,
            uid: peer.uid(),
            pid,
            owner: Owner { uid: peer.uid(), namespace: identity::network_namespace(pid) },
            privileged: peer.uid() == 0 && identity::is_root_of_host(pid),
            process,
            greeted: false,
            device: Device::None,
            ports: BTreeMap::new(),
            names: BTreeSet::new(),
            next_hops: BTreeSet::new(),
        })
    }

    /// Answers a request.
    pub(crate) fn reply(&self, id: u32, body: Reply, descriptors: &[OwnedFd]) -> Result<(), Errno> {
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        send_message(self.socket.as_fd(), &Tagged { id, body }.encode(), &descriptors)
    }

    /// Sends an event, unless there is no device.
    pub(crate) fn notify(&self, event: &Event) -> Result<(), Errno> {
        match &self.device {
            Device::Open { events, .. } => send_message(events.as_fd(), &event.encode(), &[]),
            _ => Ok(()),
        }
    }

    /// Sends the pending changes as far as the client reads. Returns whether some remain.
    pub(crate) fn send_pending(&mut self) -> Result<bool, Errno> {
        let Device::Open { events, pending, .. } = &mut self.device else { return Ok(false) };
        while let Some(event) = pending.first() {
            match send_message(events.as_fd(), &event.encode(), &[]) {
                Ok(()) => pending.sent(&event),
                Err(Errno::AGAIN | Errno::NOBUFS) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(false)
    }

    /// Whether its device is on the interface at this place.
    pub(crate) fn is_on(&self, index: usize) -> bool {
        match self.device {
            Device::None => false,
            Device::Opening { uplink, .. } | Device::Open { uplink, .. } => uplink == index,
        }
    }

    /// What decides about its ports.
    pub(crate) fn rights(&self) -> Rights {
        Rights { owner: self.owner, privileged: self.privileged }
    }

    /// Whether it is subscribed to the changes of a next hop.
    pub(crate) fn follows(&self, next_hop: IpAddr) -> bool {
        self.next_hops.contains(&next_hop)
    }

    /// Subscribes this client to the changes of a next hop.
    pub(crate) fn follow(&mut self, next_hop: IpAddr) {
        if self.next_hops.len() >= MAX_NEXT_HOPS
            && !self.next_hops.contains(&next_hop)
            && let Some(forgotten) = self.next_hops.pop_first()
            && let Device::Open { pending, .. } = &mut self.device
        {
            pending.unfollow(forgotten);
        }
        self.next_hops.insert(next_hop);
    }
}
