//! TCP ports of one device, or of all devices on one interface. Each is reserved in the kernel once and shared by the
//! connections and listeners that use it: an accepted connection may outlive its listener, and a new listener may use the port
//! again.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, Weak},
};

use crate::{
    interface::{Flow, PortReservation, Resolver},
    system::lock,
};

/// A local address: `None` is the wildcard.
type Key = (Option<IpAddr>, u16);

/// Number of entries below which dead ones are not searched.
const SWEEP_AT: usize = 64;

#[derive(Default)]
struct Held {
    ports: HashMap<Key, Weak<PortReservation>>,
    /// Number of entries at which dead ones are searched.
    sweep_at: usize,
}

#[derive(Default)]
pub(crate) struct Ports {
    held: Mutex<Held>,
}

impl Ports {
    /// The port of `address`, newly reserved or one that we hold already; port 0 is any free one.
    pub(crate) fn reserve(
        &self,
        resolver: &dyn Resolver,
        address: SocketAddr,
    ) -> io::Result<Arc<PortReservation>> {
        let ip = Some(address.ip()).filter(|ip| !ip.is_unspecified());
        let mut held = lock(&self.held);
        // A reservation on the wildcard covers each address.
        for key in [(ip, address.port()), (None, address.port())] {
            if let Some(port) = held.ports.get(&key).and_then(Weak::upgrade) {
                return Ok(port);
            }
        }
        let port = Arc::new(resolver.reserve_port(ip, address.port())?);
        if held.ports.len() >= held.sweep_at {
            held.ports.retain(|_, port| port.strong_count() > 0);
            held.sweep_at = (2 * held.ports.len()).max(SWEEP_AT);
        }
        held.ports.insert((ip, port.port), Arc::downgrade(&port));
        Ok(port)
    }
}

/// The local port of a connection, or of one attempt to make it.
pub(super) struct LocalPort {
    pub(super) flow: Flow,
    pub(super) reservation: Arc<PortReservation>,
}

impl LocalPort {
    /// The port of a connection from `source` to `peer`, whose scope id no flow has.
    pub(super) fn new(source: IpAddr, peer: SocketAddr, reservation: Arc<PortReservation>) -> Self {
        let local = SocketAddr::new(source, reservation.port);
        Self { flow: Flow { local, remote: SocketAddr::new(peer.ip(), peer.port()) }, reservation }
    }
}

/// The reserved ports of one connection.
pub(super) struct LocalPorts {
    /// Of the connection, or of the first attempt.
    pub(super) port: LocalPort,
    /// Of an initiator's further attempts in their order, while there may be some.
    pub(super) fallbacks: Vec<LocalPort>,
}

impl LocalPorts {
    /// The port of a connection without further attempts.
    pub(super) const fn single(port: LocalPort) -> Self {
        Self { port, fallbacks: Vec::new() }
    }
}
