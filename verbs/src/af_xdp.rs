//! The AF_XDP driver as an [`Interface`]: names are translated here, nothing is decided.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use xwarp_driver::{DriverConfig, Event, Mode, OpenError, PortError, ResolveError};
use xwarp_tcp::{
    link::{ChunksMut, Link, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame},
    wire::{Flow, Mac, Path},
};

use crate::interface::{
    Interface, InterfaceAttributes, InterfaceChange, PortReservation, Resolver, Route, RouteError,
    TransferMode,
};

/// An interface opened with AF_XDP.
#[derive(Debug)]
pub(crate) struct AfXdp {
    driver: xwarp_driver::Interface,
    routes: Arc<Routes>,
    changes: std::collections::VecDeque<InterfaceChange>,
}

/// The driver's resolver, which sees the interface as it was when it was made, and the next hops it found.
#[derive(Debug)]
struct Routes {
    resolver: Mutex<xwarp_driver::Resolver>,
    queues: u16,
    next_hops: Mutex<HashMap<IpAddr, Mac>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AfXdp {
    pub(crate) fn open(name: &str, config: &DriverConfig) -> Result<Self, OpenError> {
        let driver = xwarp_driver::Interface::open(name, config)?;
        let resolver = driver
            .resolver()
            .map_err(|source| OpenError::System { doing: "opening a netlink socket", source })?;
        let routes = Arc::new(Routes {
            resolver: Mutex::new(resolver),
            queues: driver.attributes().queues,
            next_hops: Mutex::default(),
        });
        Ok(Self { driver, routes, changes: std::collections::VecDeque::new() })
    }

    /// The driver's event as ours; the resolver is made anew when what it knows is no longer so.
    fn read_events(&mut self) {
        let Self { driver, routes, changes } = self;
        let mut stale = false;
        let read = driver.events(|event| match event {
            Event::AddressAdded(address) => changes.push_back(InterfaceChange::AddressAdded(address)),
            Event::AddressRemoved(address) => changes.push_back(InterfaceChange::AddressRemoved(address)),
            Event::LinkState { up } => changes.push_back(InterfaceChange::Carrier { up }),
            Event::Mtu(mtu) => {
                stale = true;
                changes.push_back(InterfaceChange::Mtu(mtu));
            }
            Event::Mac(_) | Event::Overrun => stale = true,
            Event::LinkRemoved => changes.push_back(InterfaceChange::Removed),
            Event::Neighbour { address, mac: Some(new) } => {
                let mut next_hops = lock(&routes.next_hops);
                if let Some(old) = next_hops.insert(address, new).filter(|old| *old != new) {
                    changes.push_back(InterfaceChange::NextHop { old, new });
                }
            }
            _ => {}
        });
        if let Err(error) = read {
            tracing::warn!(%error, "changes of the interface are not seen");
        }
        if stale && let Ok(resolver) = driver.resolver() {
            *lock(&routes.resolver) = resolver;
        }
    }
}

impl Resolver for Routes {
    fn resolve(
        &self,
        destination: IpAddr,
        source: Option<IpAddr>,
        limit: Duration,
    ) -> Result<Route, RouteError> {
        let mut resolver = lock(&self.resolver);
        let route = resolver.route(destination, source)?;
        let flow = Flow { local: SocketAddr::new(route.source, 0), remote: SocketAddr::new(destination, 0) };
        let Path { source_mac, next_hop_mac, vlan, mtu, .. } = resolver.resolve(flow, limit)?;
        lock(&self.next_hops).insert(route.next_hop, next_hop_mac);
        Ok(Route { source: route.source, source_mac, next_hop_mac, vlan, mtu, queues: self.queues })
    }

    fn reserve_port(&self, address: Option<IpAddr>, port: u16) -> io::Result<PortReservation> {
        let held = xwarp_driver::reserve_port(address, Some(port)).map_err(|error| {
            let kind = match &error {
                PortError::InUse(_) | PortError::Exhausted(_) => io::ErrorKind::AddrInUse,
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
        self.driver
            .fds()
            .chain([self.driver.event_fd()])
            .map(|fd: BorrowedFd<'_>| fd.try_clone_to_owned())
            .collect()
    }

    fn resolver(&self) -> Arc<dyn Resolver> {
        Arc::clone(&self.routes) as Arc<dyn Resolver>
    }

    fn change(&mut self) -> Option<InterfaceChange> {
        if self.changes.is_empty() {
            self.read_events();
        }
        self.changes.pop_front()
    }

    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64)) {
        let frames = self.driver.frame_census();
        tell("link.frames_held", frames.received as u64);
        tell("link.frames_retained", (frames.retained + frames.sending) as u64);
        for (name, value) in self.driver.counters().iter().chain(self.driver.program_counters().iter()) {
            tell(name, value);
        }
    }
}

impl Link for AfXdp {
    fn chunk_bytes(&self) -> usize {
        self.driver.chunk_bytes()
    }

    fn tx_available(&self) -> usize {
        self.driver.tx_available()
    }

    fn rx_frames(&self) -> usize {
        self.driver.rx_frames()
    }

    fn rx_available(&self, queue: QueueId) -> usize {
        self.driver.rx_available(queue)
    }

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        self.driver.receive(batch, max)
    }

    fn rx_chunk(&self, frame: &RxFrame, index: usize) -> &[u8] {
        self.driver.rx_chunk(frame, index)
    }

    fn recycle(&mut self, frame: RxFrame) {
        self.driver.recycle(frame);
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        self.driver.alloc(len)
    }

    fn tx_chunks(&mut self, frame: &mut TxFrame) -> Option<ChunksMut<'_>> {
        self.driver.tx_chunks(frame)
    }

    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        self.driver.submit(queue, frame, len)
    }

    fn release(&mut self, frame: TxFrame) {
        self.driver.release(frame);
    }

    fn flush(&mut self) {
        self.driver.flush();
    }

    fn steer(&mut self, rule: Steer) -> Result<(), SteerError> {
        self.driver.steer(rule)
    }

    fn unsteer(&mut self, rule: Steer) {
        self.driver.unsteer(rule);
    }
}
