//! Suspended and resumed connections (draft section 13), at both ends: the asking end moves its machine to the service
//! with the new listener, the other end opens a new connection for the same socket.

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use xwarp_verbs::{Access, MemoryRegion, RegionOptions};

use super::{Link, Socket, State, Until};
use crate::{
    listener::SdpListener,
    machine::{Machine, Violation},
    service::Sdp,
    stream::SdpStream,
};

/// Shortest time between two suspensions of a connection by the peer.
const SUSPEND_PERIOD: Duration = Duration::from_secs(10);
/// Lowest port to which a peer may redirect us, unless its port was lower before.
const LEAST_PORT: u16 = 1024;
/// Time limit for the peer to connect again.
const RECONNECT_LIMIT: Duration = Duration::from_secs(30);

impl Socket {
    /// Suspends the connection and continues it in `to`, at another port of the same address.
    pub(crate) fn hand_over(self: &Arc<Self>, to: &Sdp) -> io::Result<SdpStream> {
        let local = self.lock().local.ok_or(io::ErrorKind::NotConnected)?;
        let own = Some(Arc::clone(self));
        let listener = SdpListener::bind_for(to, SocketAddr::new(local.ip(), 0), own)?;
        let port = listener.local_addr()?.port();
        let mut state = self.lock();
        let busy = |link: &Link| !(link.sends.is_empty() && link.wants.is_empty() && link.written.is_empty());
        if state.link.as_ref().is_none_or(busy) || !state.machine.suspend(port) {
            return Err(state.error().unwrap_or_else(|| io::ErrorKind::ResourceBusy.into()));
        }
        self.drive(&mut state);
        let end = Some(Instant::now() + super::state::ANSWER_LIMIT);
        // The machine leaves with the new connection.
        while !state.machine.is_suspended() && !state.left {
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
        drop(state);
        listener.accept_until(Some(Instant::now() + RECONNECT_LIMIT)).map(|(stream, _)| stream).inspect_err(
            |_| {
                let mut state = self.lock();
                state.machine.abort();
                self.drive(&mut state);
            },
        )
    }

    /// The machine of a suspended connection, for the Hello with which `peer` resumes it.
    pub(crate) fn resume(&self, peer: SocketAddr, hello: &[u8]) -> Result<Machine, Violation> {
        // The peer's answer is older than its new connection.
        self.turn();
        let mut state = self.lock();
        if state.peer.map(|known| known.ip()) != Some(peer.ip()) {
            return Err(Violation::Suspend);
        }
        let mut machine = state.machine.clone();
        machine.resume(hello)?;
        state.left = true;
        state.machine = Machine::connect(&self.core.options.connection).0;
        state.machine.abort();
        self.drive(&mut state);
        Ok(machine)
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
