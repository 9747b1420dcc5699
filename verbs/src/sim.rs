//! A network in memory, without root, for our tests and those of applications. Frames, TCP and all layers above are
//! the real ones; only the cable is simulated.
//!
//! [`pair`] makes two interfaces for devices that run in real time, and [`queues`] two with several queues.

use std::{
    collections::HashSet,
    fmt, io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use xwarp_rnic::sim::mac;
pub use xwarp_rnic::sim::{ipv4, ipv6};
pub use xwarp_tcp::sim::{
    Aim, Blackout, Census, Faults, Gilbert, PathMtu, Recut, Resets, SimLink, Tally, Wire, WireConfig,
};
use xwarp_tcp::{
    forward_link,
    link::{Link, RxFrame},
    wire::VlanTags,
};

use crate::{
    interface::{
        Interface, InterfaceAttributes, InterfaceChange, PortReservation, Resolver, Route, RouteError,
        TransferMode,
    },
    system::{Clock, Doorbell, lock, wait_readable},
};

/// First ephemeral port.
const EPHEMERAL: u16 = 49152;

/// One end of a virtual cable, as an interface.
///
/// The first end has the addresses `192.0.2.1` and `2001:db8::1`, the second `192.0.2.2` and `2001:db8::2`.
pub struct SimInterface {
    link: SimLink,
    wire: Wire,
    clock: Clock,
    bell: Arc<Doorbell>,
    end: u8,
    mtu: u16,
    resolver: Arc<SimResolver>,
}

impl fmt::Debug for SimInterface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimInterface").field("link", &self.link).finish_non_exhaustive()
    }
}

/// Routes and ports of one end.
struct SimResolver {
    end: u8,
    mtu: u16,
    ports: Arc<Mutex<HashSet<u16>>>,
}

/// A reserved port; dropping it frees the port.
struct Held(u16, Arc<Mutex<HashSet<u16>>>);

impl Drop for Held {
    fn drop(&mut self) {
        lock(&self.1).remove(&self.0);
    }
}

/// Creates a cable with an MTU of `mtu` bytes and returns its two ends. The cable runs in real time.
pub fn pair(config: WireConfig, mtu: u16) -> io::Result<(SimInterface, SimInterface)> {
    let (clock, [first, second]) = (Clock::start(), resolvers(mtu));
    let (wire, a, b) = Wire::new(config);
    Ok((SimInterface::new(a, &wire, clock, &first)?, SimInterface::new(b, &wire, clock, &second)?))
}

/// Creates two interfaces with `queues` queues each, and returns the queues of each. A frame that one end sends on a queue arrives on
/// the same queue of the other end. Each queue is an interface that an engine of its own can have
/// ([`Device::over_parts`](crate::Device::over_parts)).
pub fn queues(config: WireConfig, mtu: u16, queues: u16) -> io::Result<[Vec<SimInterface>; 2]> {
    let (clock, [first, second]) = (Clock::start(), resolvers(mtu));
    let mut ends = [Vec::new(), Vec::new()];
    for _ in 0..queues {
        let (wire, a, b) = Wire::new(config);
        let [ours, theirs] = &mut ends;
        ours.push(SimInterface::new(a, &wire, clock, &first)?);
        theirs.push(SimInterface::new(b, &wire, clock, &second)?);
    }
    Ok(ends)
}

/// The resolvers of both ends.
fn resolvers(mtu: u16) -> [Arc<SimResolver>; 2] {
    [1, 2].map(|end| Arc::new(SimResolver { end, mtu, ports: Arc::default() }))
}

impl SimInterface {
    fn new(link: SimLink, wire: &Wire, clock: Clock, resolver: &Arc<SimResolver>) -> io::Result<Self> {
        let bell = Arc::new(Doorbell::new()?);
        let notify = Arc::clone(&bell);
        link.on_arrival(move || notify.ring());
        let (end, mtu, resolver) = (resolver.end, resolver.mtu, Arc::clone(resolver));
        Ok(Self { link, wire: wire.clone(), clock, bell, end, mtu, resolver })
    }

    /// The cable, to change its faults.
    pub fn wire(&self) -> Wire {
        self.wire.clone()
    }
}

impl Resolver for SimResolver {
    fn resolve(
        &self,
        peer: SocketAddr,
        source: Option<IpAddr>,
        limit: Duration,
    ) -> Result<Route, RouteError> {
        let destination = peer.ip();
        let peer = 3 - self.end;
        let own = if destination.is_ipv4() { ipv4(self.end) } else { ipv6(self.end) };
        if source.is_some_and(|s| s != own) {
            return Err(RouteError::Address(format!("{source:?} is not an address of this end")));
        }
        if destination != ipv4(peer) && destination != ipv6(peer) {
            // No neighbour answers for any other address.
            wait_readable([], Some(limit)).ok();
            return Err(RouteError::TimedOut(format!("{destination} does not answer")));
        }
        Ok(Route {
            source: own,
            source_mac: mac(self.end),
            next_hop: destination,
            next_hop_mac: mac(peer),
            vlan: VlanTags::default(),
            mtu: self.mtu,
            queues: 1,
        })
    }

    fn reserve_port(&self, _address: Option<IpAddr>, port: u16) -> io::Result<PortReservation> {
        let mut ports = lock(&self.ports);
        let port = match port {
            0 => (EPHEMERAL..=u16::MAX).find(|p| !ports.contains(p)).ok_or(io::ErrorKind::AddrInUse)?,
            port => port,
        };
        if !ports.insert(port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(PortReservation::new(port, Held(port, Arc::clone(&self.ports))))
    }
}

impl Link for SimInterface {
    forward_link!(link: chunk_bytes, offloads_checksums, tx_available, rx_capacity, rx_available, rx_chunks, rx_head,
        recycle, alloc, tx_chunks_into, submit, release, steer, unsteer);

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        self.wire.advance(self.clock.now());
        self.bell.clear();
        let received = self.link.receive(batch, max);
        // Frames that are still in flight to this end must be checked again later: the cable has no clock of its own.
        if self.wire.next_arrival_at(usize::from(self.end) - 1).is_some() {
            self.bell.ring();
        }
        received
    }

    fn flush(&mut self) {
        self.wire.advance(self.clock.now());
        self.link.flush();
    }
}

impl Interface for SimInterface {
    fn attributes(&self) -> InterfaceAttributes {
        InterfaceAttributes {
            name: format!("sim{}", self.end),
            shared: false,
            index: self.end.into(),
            mac: mac(self.end),
            mtu: self.mtu,
            up: true,
            addresses: vec![ipv4(self.end), ipv6(self.end)],
            mode: TransferMode::Memory,
            queues: 1,
        }
    }

    fn readiness(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.bell.as_fd().try_clone_to_owned()?])
    }

    fn resolver(&self) -> Arc<dyn Resolver> {
        Arc::clone(&self.resolver) as Arc<dyn Resolver>
    }

    fn change(&mut self) -> Option<InterfaceChange> {
        None
    }

    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64)) {
        tell("sim_rx_dropped", self.link.census().rx_dropped);
    }
}
