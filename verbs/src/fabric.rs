//! Devices on the fabric of a user: a switch in user space, which needs no privileges and no network interface.
//!
//! A device is opened by the name `fabric:` for the host `localhost`, or `fabric:HOST` for a host of the table
//! ([`Device::open`](crate::Device::open)). The fabric starts with the first program that asks, if the program `xwarp` is installed, or a program serves itself
//! (`xwarp_fabric::Server`). `docs/fabric.md` describes it.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, OnceLock},
    time::Duration,
};

use rustix::event::epoll;
use xwarp_leg::{
    Leg, LegSizes, NotInherited,
    fabric::{Events, Fabric, Opened},
};
pub use xwarp_leg::{fabric::FabricError, hosts::number as host_number, place::Place};
use xwarp_tcp::{
    forward_link,
    link::{Kick, Link},
    wire::{Flow, Mac, VlanTags},
};

use crate::interface::{
    Interface, InterfaceAttributes, InterfaceChange, NextHop, PortReservation, Resolver, Route, RouteError,
    TransferMode,
};

/// What the name of a device on a fabric begins with.
pub const PREFIX: &str = "fabric:";

/// The host that the name of a device names, if it names one of a fabric.
pub(crate) fn host_of(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)
}

/// A host of a fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its number in the table.
    pub number: u16,
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// The host `name` of the fabric at `place`, which is started if it does not run; the empty name is `localhost`. With `join`, the host
/// is added to the table if it is not there.
pub fn find_host(place: &Place, name: &str, join: bool) -> Result<Host, FabricError> {
    let host = Fabric::connect(place)?.host(name, join)?;
    Ok(Host { number: host.number, mac: host.mac.0, addresses: host.addresses })
}

/// A device on a fabric, as an interface.
#[derive(Debug)]
pub(crate) struct OnFabric {
    leg: Leg,
    events: Events,
    /// Readable when the leg or the events are.
    changes_ready: OwnedFd,
    host: Arc<OfHost>,
    attributes: InterfaceAttributes,
    changes: VecDeque<InterfaceChange>,
    has_ended: bool,
    _not_inherited: NotInherited,
}

/// Routes and ports of a device.
#[derive(Debug)]
struct OfHost {
    fabric: Arc<Fabric>,
    mac: Mac,
    mtu: u16,
    /// Why the device carries no frames any more.
    removal: OnceLock<String>,
}

/// A reserved port, which is given back when this is dropped.
struct Reserved {
    fabric: Arc<Fabric>,
    address: Option<IpAddr>,
    port: u16,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.fabric.release(self.address, self.port);
    }
}

impl OnFabric {
    /// Opens a device on host `host` of the fabric at `place`.
    pub(crate) fn open(place: &Place, host: &str) -> Result<Self, FabricError> {
        let fabric = Fabric::connect(place)?;
        let Opened { leg, device, events } = fabric.open(host, LegSizes::default())?;
        let changes_ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [events.fd(), leg.socket()] {
            epoll::add(&changes_ready, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let attributes = InterfaceAttributes {
            name: device.name,
            shared: true,
            index: device.index,
            mac: device.mac,
            mtu: device.path_mtu,
            up: true,
            addresses: device.addresses,
            mode: TransferMode::Memory,
            queues: 1,
        };
        let host = Arc::new(OfHost {
            fabric: Arc::new(fabric),
            mac: attributes.mac,
            mtu: attributes.mtu,
            removal: OnceLock::new(),
        });
        Ok(Self {
            _not_inherited: NotInherited::new([changes_ready.as_fd()]),
            leg,
            events,
            changes_ready,
            host,
            attributes,
            changes: VecDeque::new(),
            has_ended: false,
        })
    }

    /// Notices the end of the fabric, or of the leg.
    fn read_events(&mut self) {
        if self.has_ended {
            return;
        }
        // The fabric's own words come first.
        if let Err(reason) = self.events.read(|_| ()) {
            self.leg.end(reason);
        }
        self.leg.check();
        if let Some(reason) = self.leg.ended() {
            self.has_ended = true;
            let cause = format!("the device of the fabric is gone: {reason}");
            let _ = self.host.removal.set(cause.clone());
            self.changes.push_back(InterfaceChange::Removed { cause });
        }
    }
}

impl Resolver for OfHost {
    fn resolve(
        &self,
        peer: SocketAddr,
        source: Option<IpAddr>,
        _limit: Duration,
    ) -> Result<Route, RouteError> {
        if let Some(cause) = self.removal.get() {
            return Err(RouteError::Address(cause.clone()));
        }
        let (source, next_hop_mac) = self.fabric.resolve(peer.ip(), source).map_err(|error| match error {
            FabricError::Refused(refusal) => RouteError::Address(refusal.text),
            other => RouteError::Address(other.to_string()),
        })?;
        Ok(Route {
            source,
            source_mac: self.mac,
            next_hop: peer.ip(),
            next_hop_mac,
            vlan: VlanTags::default(),
            mtu: self.mtu,
            queues: 1,
        })
    }

    fn reserve_port(&self, address: Option<IpAddr>, port: u16) -> io::Result<PortReservation> {
        if let Some(cause) = self.removal.get() {
            return Err(io::Error::other(cause.clone()));
        }
        let port = self.fabric.reserve(address, port).map_err(|error| {
            let kind = error.kind();
            io::Error::new(kind, error)
        })?;
        Ok(PortReservation::new(port, Reserved { fabric: Arc::clone(&self.fabric), address, port }))
    }
}

impl Interface for OnFabric {
    fn attributes(&self) -> InterfaceAttributes {
        self.attributes.clone()
    }

    fn readiness(&self) -> io::Result<Vec<OwnedFd>> {
        let duplicate = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
        Ok(vec![duplicate(self.leg.bell())?, duplicate(self.changes_ready.as_fd())?])
    }

    fn resolver(&self) -> Arc<dyn Resolver> {
        Arc::clone(&self.host) as Arc<dyn Resolver>
    }

    fn kicker(&mut self) -> Option<Arc<dyn Kick>> {
        Some(self.leg.ringer())
    }

    fn change(&mut self) -> Option<InterfaceChange> {
        if self.changes.is_empty() {
            self.read_events();
        }
        self.changes.pop_front()
    }

    /// The next hop of each address is the address itself, and never changes.
    fn next_hop(&mut self, _flow: &Flow, _unanswered: bool) -> Option<NextHop> {
        None
    }

    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64)) {
        let frames = self.leg.frame_census();
        tell("link.chunks_held", frames.received as u64);
        tell("link.chunks_retained", (frames.retained + frames.sending) as u64);
        for (name, value) in self.leg.counters().iter() {
            tell(name, value);
        }
    }
}

impl Link for OnFabric {
    forward_link!(leg: chunk_bytes, offloads_checksums, is_within_host, tx_available, rx_capacity, rx_available, receive, rx_chunks,
        rx_head, recycle, alloc, tx_chunks_into, submit, release, flush, steer, unsteer);
}
