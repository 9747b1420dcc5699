//! Implements [`Interface`] for the AF_XDP driver: a translation of types without decisions of its own.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
    time::Duration,
};

use xwarp_driver::{
    DriverConfig, Event, Mode, OpenError, Origin, PortError, ProgramCounters, Question, ResolveError,
};
use xwarp_tcp::{
    forward_link,
    link::{Kick, Link},
    wire::{Flow, Path},
};

use crate::interface::{
    Interface, InterfaceAttributes, InterfaceChange, NextHop, PortReservation, Resolver, Route, RouteError,
    TransferMode,
};

/// An interface opened with AF_XDP.
#[derive(Debug)]
pub(crate) struct AfXdp {
    driver: xwarp_driver::Interface,
    routes: Arc<Routes>,
    changes: VecDeque<InterfaceChange>,
}

/// The driver's resolver with the constant attributes that its routes carry.
#[derive(Debug)]
struct Routes {
    resolver: xwarp_driver::Resolver,
    queues: u16,
    arrivals: Option<xwarp_driver::Arrivals>,
    /// Why the interface carries no frames any more.
    removal: OnceLock<String>,
}

impl AfXdp {
    pub(crate) fn open(name: &str, config: &DriverConfig) -> Result<Self, OpenError> {
        Self::over(xwarp_driver::Interface::open(name, config)?)
    }

    /// The parts of an interface that `count` engines have.
    pub(crate) fn open_several(
        name: &str,
        count: u16,
        config: &DriverConfig,
    ) -> Result<Vec<Self>, OpenError> {
        let parts = xwarp_driver::Interface::open_several(name, count, config)?;
        parts.into_iter().map(Self::over).collect()
    }

    fn over(driver: xwarp_driver::Interface) -> Result<Self, OpenError> {
        let resolver = driver
            .resolver()
            .map_err(|source| OpenError::System { doing: "opening a netlink socket", source })?;
        let routes = Arc::new(Routes {
            resolver,
            queues: driver.attributes().queues,
            arrivals: driver.arrivals().cloned(),
            removal: OnceLock::new(),
        });
        Ok(Self { driver, routes, changes: VecDeque::new() })
    }

    /// Translates the driver's events. Neighbours of one call are one change, so that a burst of them costs one pass
    /// over the connections.
    fn read_events(&mut self) {
        let Self { driver, routes, changes } = self;
        let mut neighbours = BTreeMap::new();
        let mut removed = false;
        let read = driver.events(|event| {
            let change = match event {
                Event::AddressAdded(address) => InterfaceChange::AddressAdded(address),
                Event::AddressRemoved(address) => InterfaceChange::AddressRemoved(address),
                Event::LinkState { up } => InterfaceChange::Carrier { up },
                Event::Mtu(mtu) => InterfaceChange::Mtu(mtu),
                Event::Mac(mac) => InterfaceChange::Mac(mac),
                Event::LinkRemoved => {
                    removed = true;
                    return;
                }
                // The lost events may be of any kind; a lookup for every connection covers routes and neighbours.
                Event::Routes | Event::Overrun => InterfaceChange::Routes,
                Event::Neighbour { address, mac: Some(mac) } => {
                    neighbours.insert(address, mac);
                    return;
                }
                Event::Neighbour { address, mac: None } => InterfaceChange::NeighbourLost(address),
                _ => return,
            };
            if changes.back() != Some(&change) {
                changes.push_back(change);
            }
        });
        if let Err(error) = read {
            tracing::warn!(%error, "changes of the interface cannot be read");
        }
        if !neighbours.is_empty() {
            changes.push_back(InterfaceChange::Neighbours(neighbours));
        }
        if removed {
            let cause = driver.removal();
            let _ = routes.removal.set(cause.clone());
            changes.push_back(InterfaceChange::Removed { cause });
        }
        routes.resolver.follow(driver.attributes());
    }
}

impl Resolver for Routes {
    fn resolve(
        &self,
        peer: SocketAddr,
        source: Option<IpAddr>,
        limit: Duration,
    ) -> Result<Route, RouteError> {
        if let Some(cause) = self.removal.get() {
            return Err(RouteError::Address(cause.clone()));
        }
        let question = Question { destination_port: peer.port(), ..Question::to(peer.ip(), source) };
        let route = self.resolver.route_of(&question)?;
        let flow =
            Flow { local: SocketAddr::new(route.source, 0), remote: SocketAddr::new(peer.ip(), peer.port()) };
        let Path { source_mac, next_hop_mac, vlan, mtu, .. } = self.resolver.resolve(flow, limit)?;
        let (source, next_hop, queues) = (route.source, route.next_hop, self.queues);
        Ok(Route { source, source_mac, next_hop, next_hop_mac, vlan, mtu, queues })
    }

    fn arrives_here(&self, flow: &Flow) -> bool {
        self.arrivals.as_ref().is_none_or(|arrivals| arrivals.are_ours(flow))
    }

    fn reserve_port(&self, address: Option<IpAddr>, port: u16) -> io::Result<PortReservation> {
        let held = self.resolver.reserve_port(address, port).map_err(|error| {
            let kind = match &error {
                PortError::InUse { .. } | PortError::Exhausted(_) => io::ErrorKind::AddrInUse,
                PortError::Permission(_) => io::ErrorKind::PermissionDenied,
                PortError::NotOurAddress(_) => io::ErrorKind::AddrNotAvailable,
                _ => io::ErrorKind::Other,
            };
            io::Error::new(kind, error)
        })?;
        Ok(PortReservation::new(held.port(), held))
    }
}

impl From<ResolveError> for RouteError {
    fn from(error: ResolveError) -> Self {
        let text = error.to_string();
        match error {
            ResolveError::Unreachable { .. } => Self::Unreachable(text),
            ResolveError::TimedOut { .. } => Self::TimedOut(text),
            _ => Self::Address(text),
        }
    }
}

impl Interface for AfXdp {
    fn attributes(&self) -> InterfaceAttributes {
        let attributes = self.driver.attributes();
        InterfaceAttributes {
            name: attributes.name.clone(),
            shared: attributes.origin == Origin::Granted,
            index: attributes.index,
            mac: attributes.mac,
            mtu: attributes.path_mtu,
            up: attributes.up,
            addresses: self.driver.addresses().to_vec(),
            mode: match attributes.mode {
                Mode::ZeroCopy => TransferMode::ZeroCopy,
                Mode::Copy => TransferMode::Copy,
                Mode::Generic => TransferMode::Generic,
            },
            queues: attributes.queues,
        }
    }

    fn readiness(&self) -> io::Result<Vec<OwnedFd>> {
        self.driver.readiness()
    }

    fn resolver(&self) -> Arc<dyn Resolver> {
        Arc::clone(&self.routes) as Arc<dyn Resolver>
    }

    fn kicker(&mut self) -> Option<Arc<dyn Kick>> {
        Some(Arc::new(self.driver.kicker()))
    }

    fn change(&mut self) -> Option<InterfaceChange> {
        if self.changes.is_empty() {
            self.read_events();
        }
        self.changes.pop_front()
    }

    fn next_hop(&mut self, flow: &Flow, unanswered: bool) -> Option<NextHop> {
        match self.routes.resolver.next_hop(*flow, unanswered) {
            Ok(xwarp_driver::NextHop { address, mac, mtu }) => Some(NextHop::Neighbour { address, mac, mtu }),
            Err(error) => {
                tracing::debug!(?flow, %error, "no next hop");
                error.forbids().then_some(NextHop::Nowhere)
            }
        }
    }

    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64)) {
        let frames = self.driver.frame_census();
        tell("link.chunks_held", frames.received as u64);
        tell("link.chunks_retained", (frames.retained + frames.sending) as u64);
        for (name, value) in self.driver.counters().iter() {
            tell(name, value);
        }
        for (name, value) in self.driver.program_counters().iter().flat_map(ProgramCounters::iter) {
            tell(name, value);
        }
    }
}

impl Link for AfXdp {
    forward_link!(driver: chunk_bytes, offloads_checksums, tx_available, rx_capacity, rx_available, receive, rx_chunks,
        rx_head, recycle, reassemble, alloc, tx_chunks_into, submit, release, flush, steer, unsteer, hand_over);
}
