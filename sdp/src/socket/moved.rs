//! Suspended connections (draft section 13), at both ends: the asking end gives its state away, the other end opens a new connection for
//! the same socket.

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use xwarp_verbs::{Access, MemoryRegion, RegionOptions};

use super::{Link, Socket, State, Until};
use crate::{
    machine::{Machine, Violation},
    moved,
};

/// Shortest time between two suspensions of a connection by the peer.
const SUSPEND_PERIOD: Duration = Duration::from_secs(10);
/// Lowest port to which a peer may redirect us, unless its port was lower before.
const LEAST_PORT: u16 = 1024;

impl Socket {
    /// Suspends the connection, which the peer will make again to `port` of the same address. Returns its state; this socket has none
    /// any more.
    pub(crate) fn suspend(self: &Arc<Self>, port: u16) -> io::Result<Vec<u8>> {
        let mut state = self.lock();
        let addresses = state.addresses().ok_or(io::ErrorKind::NotConnected)?;
        let busy = |link: &Link| !(link.sends.is_empty() && link.wants.is_empty() && link.written.is_empty());
        if state.link.as_ref().is_none_or(busy) || !state.machine.suspend(port) {
            return Err(state.error().unwrap_or_else(|| io::ErrorKind::ResourceBusy.into()));
        }
        self.drive(&mut state);
        let end = Some(Instant::now() + super::state::ANSWER_LIMIT);
        while !state.machine.is_suspended() {
            if let Some(error) = state.error() {
                return Err(error);
            }
            let (after, in_time) = self.wait(state, Until::Changed, end);
            state = after;
            if !in_time {
                state.machine.abort();
                self.drive(&mut state);
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        let saved = moved::save(&state.machine, addresses);
        // The peer closes the connection below, or the end of this socket does.
        state.machine = Machine::connect(&self.core.options.connection).0;
        state.machine.stream_ended();
        state.failed = Some((io::ErrorKind::ConnectionAborted, "the connection was suspended".into()));
        self.drive(&mut state);
        // A clone has begun to transfer memory meanwhile.
        saved.ok_or_else(|| io::ErrorKind::ResourceBusy.into())
    }
}

impl State {
    /// The addresses of both ends, as shown to the program.
    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((self.local?, self.peer?))
    }

    /// The port at which the peer waits for the suspended connection, once the old one has nothing left to send.
    pub(crate) fn port_to_reconnect(&mut self, now: Instant) -> Option<u16> {
        let link = self.link.as_mut()?;
        let port = link.moving.filter(|_| link.slots.all_free() && link.rdma == 0)?;
        link.moving = None;
        let known = self.peer.is_some_and(|peer| port >= LEAST_PORT || peer.port() < LEAST_PORT);
        let soon = self.suspended.is_some_and(|before| now < before + SUSPEND_PERIOD);
        if !known || soon {
            self.machine.violated(Violation::Suspend);
            return None;
        }
        self.suspended = Some(now);
        Some(port)
    }

    /// Begins a new connection to `target` for this socket.
    pub(crate) fn reconnect(
        &mut self,
        link: impl FnOnce(&Machine) -> io::Result<Link>,
        target: SocketAddr,
        limit: Duration,
    ) -> io::Result<()> {
        self.hello = self.machine.reconnect().ok_or(io::ErrorKind::ConnectionReset)?;
        self.take_notices();
        let mut new = link(&self.machine)?;
        let old = self.link.take().ok_or(io::ErrorKind::NotConnected)?;
        for (id, region) in &old.sends {
            let region = new.register_again(region, Access::REMOTE_READ)?;
            self.machine.rekey_write(*id, region.key().value());
            new.sends.insert(*id, region);
        }
        for (id, region) in &old.wants {
            let region = new.register_again(region, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
            self.machine.rekey_read(*id, region.key().value());
            new.wants.insert(*id, region);
        }
        self.made_again = true;
        self.established = None;
        let resolving = new.id.resolve_address(target, limit);
        self.link = Some(new);
        resolving.map_err(io::Error::other)
    }
}

impl Link {
    fn register_again(&self, region: &MemoryRegion, access: Access) -> io::Result<MemoryRegion> {
        let options = RegionOptions { base: 0, only_for: Some(self.qp.id()) };
        self.pd.register_with(region.memory().clone(), access, options).map_err(io::Error::other)
    }
}
