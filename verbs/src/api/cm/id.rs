//! [`CmId`]: one end of a connection on its way through the connection manager's steps.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use xwarp_rnic::{engine::ConnectParams, rnic::StreamId};
use xwarp_tcp::{
    framing::{AcceptParams, FramingConfig},
    tcp::{Info as TcpInfo, Tuning},
    time::Instant,
};

use super::{
    AcceptOptions, ChannelQueue, CmError, ConnectOptions, EventChannel, ListenOptions,
    channel::{Event, EventKind, Queued},
    table::{CmKey, CmState, Identifier, LocalPorts},
};
use crate::{
    api::{
        device::{Device, DeviceInner},
        queue_pair::QueuePair,
        shared::State,
    },
    interface::{Interface, PortReservation, Route, RouteError},
};

/// How long one request to the resolver may take: a device that is being closed waits for it.
const RESOLVE_SLICE: Duration = Duration::from_millis(50);

/// An identifier of the connection manager (`rdma_cm_id`).
///
/// Dropping it ends its object: a listener is closed, a request is rejected, a connection is disconnected in order.
pub struct CmId {
    device: Device,
    channel: Arc<ChannelQueue>,
    key: CmKey,
}

impl fmt::Debug for CmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CmId").field(&self.key).finish()
    }
}

impl CmId {
    /// Creates an identifier whose events come on `channel`.
    pub fn new(device: &Device, channel: &EventChannel) -> Self {
        let entry = Identifier::new(&channel.0);
        // An identifier of a failed device is in no table: every call with it returns an error for the failed device.
        let key = device.shared().with(|state, _| Some(state.cm.insert(entry))).unwrap_or(CmKey::NONE);
        Self { device: device.clone(), channel: Arc::clone(&channel.0), key }
    }

    /// The handle to an identifier that the engine made.
    pub(super) fn adopt(device: Arc<DeviceInner>, channel: &EventChannel, key: CmKey) -> Self {
        Self { device: Device::from_inner(device), channel: Arc::clone(&channel.0), key }
    }

    /// The identifier's key in events.
    pub fn key(&self) -> CmKey {
        self.key
    }

    /// Moves the identifier to another channel, with the events that wait already.
    pub fn migrate(&mut self, channel: &EventChannel) {
        let old = std::mem::replace(&mut self.channel, Arc::clone(&channel.0));
        self.device.shared().with(|state, _| {
            if let Some(entry) = state.cm.entries.get_mut(&self.key) {
                entry.channel = Arc::clone(&channel.0);
                for request in old.hand_over(self.key, &channel.0) {
                    if let Some(entry) = state.cm.entries.get_mut(&request) {
                        entry.channel = Arc::clone(&channel.0);
                    }
                }
            }
        });
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Our address, once it is known.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.entry(|entry| entry.local)
    }

    /// The peer's address, once it is known.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.entry(|entry| entry.peer)
    }

    fn entry<R>(&self, f: impl FnOnce(&Identifier) -> Option<R>) -> Option<R> {
        self.device.shared().look(|state| state.cm.entries.get(&self.key).and_then(|entry| f(entry)))
    }

    /// Runs `f` on this identifier's entry when `fits` says that the call belongs here.
    fn step<R>(
        &self,
        call: &'static str,
        fits: impl FnOnce(&CmState) -> bool,
        f: impl FnOnce(&mut State, Instant) -> Result<R, CmError>,
    ) -> Result<R, CmError> {
        self.device.shared().with(|state, now| {
            let entry = state.cm.entries.get(&self.key).ok_or(CmError::State { call, state: "gone" })?;
            if !fits(&entry.state) {
                return Err(entry.wrong_state(call));
            }
            f(state, now)
        })
    }

    fn change(&self, f: impl FnOnce(&mut Identifier)) {
        self.device.shared().with(|state, _| state.cm.entries.get_mut(&self.key).map(|entry| f(entry)));
    }

    fn reserve(&self, address: SocketAddr) -> Result<Arc<PortReservation>, CmError> {
        let shared = self.device.shared();
        let ports = shared.look(|state| Arc::clone(&state.cm.ports));
        ports.reserve(&*shared.resolver, address).map_err(|source| CmError::Bind { address, source })
    }

    /// Takes a local address and port. The address may be a wildcard, which stands for every address of the interface, in both
    /// families unless [`ListenOptions::only_family`] says otherwise; port 0 is any free one.
    pub fn bind(&self, address: SocketAddr) -> Result<(), CmError> {
        let port = self.reserve(address)?;
        self.step(
            "bind",
            |p| matches!(p, CmState::Idle),
            |state, _| {
                if let Some(entry) = state.cm.entries.get_mut(&self.key) {
                    entry.local = Some(SocketAddr::new(address.ip(), port.port));
                    entry.port = Some(port);
                }
                Ok(())
            },
        )
    }

    /// Finds the way to `peer`, from the bound address if there is one: [`EventKind::AddressResolved`], or
    /// [`EventKind::AddressError`] at the latest after `limit`.
    ///
    /// A loopback address (`localhost`) stands for the bound or the first address of an interface that a helper shares, because
    /// no loopback address is on the interface; [`peer_address`](Self::peer_address) is that address then.
    pub fn resolve_address(&self, peer: SocketAddr, limit: Duration) -> Result<(), CmError> {
        let (source, peer) = self.step(
            "resolve_address",
            |p| matches!(p, CmState::Idle),
            |state, _| {
                let Some(entry) = state.cm.entries.get_mut(&self.key) else { return Ok((None, peer)) };
                entry.state = CmState::Resolving;
                let source = entry.local.map(|a| a.ip()).filter(|ip| !ip.is_unspecified());
                Ok((source, on_interface(&*state.link, peer, source)))
            },
        )?;
        let shared = self.device.shared();
        match shared.resolver.resolve(peer.ip(), source, Duration::ZERO) {
            Err(RouteError::TimedOut(_)) if !limit.is_zero() => {
                self.resolve_later(peer, source, limit).map_err(|error| {
                    self.change(|entry| entry.state = CmState::Idle);
                    error.into()
                })
            }
            answer => {
                self.device.shared().with(|state, _| state.resolved(self.key, peer, answer));
                Ok(())
            }
        }
    }

    /// The next hop must be asked for: a thread of its own waits for it.
    fn resolve_later(&self, peer: SocketAddr, source: Option<IpAddr>, limit: Duration) -> io::Result<()> {
        let key = self.key;
        self.device.spawn_resolver(move |shared| {
            let end = shared.clock.now() + limit;
            let answer = loop {
                let left = end.since(shared.clock.now());
                let answer = shared.resolver.resolve(peer.ip(), source, left.min(RESOLVE_SLICE));
                if !matches!(answer, Err(RouteError::TimedOut(_)))
                    || left <= RESOLVE_SLICE
                    || shared.stopping()
                {
                    break answer;
                }
            };
            shared.with(|state, _| state.resolved(key, peer, answer));
        })
    }

    /// A step without work of its own: with iWARP the route is known with the address.
    /// [`EventKind::RouteResolved`] follows.
    pub fn resolve_route(&self) -> Result<(), CmError> {
        self.step(
            "resolve_route",
            |p| matches!(p, CmState::AddressResolved(_)),
            |state, _| {
                let Some(entry) = state.cm.entries.get_mut(&self.key) else { return Ok(()) };
                if let CmState::AddressResolved(route) = entry.state {
                    entry.state = CmState::RouteResolved(route);
                    entry.channel.push(Queued::Plain(Event { id: self.key, kind: EventKind::RouteResolved }));
                }
                Ok(())
            },
        )
    }

    /// Connects `qp` to the resolved peer: [`EventKind::Established`], or one that says why not. When the peer refuses
    /// markers or revision 2 of MPA, up to two further attempts follow: from other ports if the identifier was not
    /// bound, else from the same port.
    pub fn connect(&self, qp: &QueuePair, options: ConnectOptions) -> Result<(), CmError> {
        self.same_device(qp)?;
        let ConnectOptions { private_data, ird, ord, framing, close_with_peer } = options;
        let reserved = self.reserve_for_connect(framing.as_ref())?;
        let qp = qp.id();
        self.step(
            "connect",
            |p| matches!(p, CmState::RouteResolved(_)),
            |state, now| {
                let State { cm, engine, link, .. } = state;
                let Some(entry) = cm.entries.get(&self.key) else { return Ok(()) };
                // A port that was bound, or reserved by a call on another thread, takes precedence over the new
                // reservation.
                let bound = entry.port.clone().map(LocalPorts::single);
                let (CmState::RouteResolved(route), Some(peer), Some(ports)) =
                    (&entry.state, entry.peer, bound.or(reserved))
                else {
                    return Err(entry.wrong_state("connect"));
                };
                let path = route.path(ports.port.port, peer);
                let fallbacks = ports.fallbacks.iter().map(|port| route.path(port.port, peer)).collect();
                let params = ConnectParams { ird, ord, private_data, framing, fallbacks };
                engine.connect(now, &mut **link, qp, path, params)?;
                tracing::debug!(qp = qp.number(), local = %path.flow.local, remote = %path.flow.remote, "connecting");
                if let Some(entry) = cm.entries.get_mut(&self.key) {
                    entry.local = Some(path.flow.local);
                    entry.port = Some(Arc::clone(&ports.port));
                    entry.close_with_peer = close_with_peer;
                }
                cm.connecting(self.key, qp, Some(ports));
                state.tune(now, self.key)
            },
        )
    }

    /// Reserves a port for an identifier that is ready to connect and has none, and one for each further attempt
    /// that the connection may take.
    fn reserve_for_connect(&self, framing: Option<&FramingConfig>) -> Result<Option<LocalPorts>, CmError> {
        let ready = |entry: &Identifier| match entry.state {
            CmState::RouteResolved(route) if entry.port.is_none() => Some((route.source, entry.peer?.ip())),
            _ => None,
        };
        let Some((source, peer)) = self.entry(ready) else { return Ok(None) };
        let any = SocketAddr::new(source, 0);
        let port = self.reserve(any)?;
        let shared = self.device.shared();
        let now = shared.clock.now();
        let further = shared.look(|state| state.engine.further_attempts(now, peer, framing));
        let fallbacks = (0..further).map(|_| self.reserve(any)).collect::<Result<_, _>>()?;
        Ok(Some(LocalPorts { port, fallbacks }))
    }

    /// Listens at the bound address: each request is an [`EventKind::ConnectRequest`].
    pub fn listen(&self, options: ListenOptions) -> Result<(), CmError> {
        self.step(
            "listen",
            |p| matches!(p, CmState::Idle),
            |state, _| {
                let State { cm, engine, link, .. } = state;
                let Some(local) = cm.entries.get(&self.key).and_then(|e| e.local) else {
                    return Err(CmError::State { call: "listen", state: "not bound" });
                };
                let ip = Some(local.ip()).filter(|ip| !ip.is_unspecified() || options.only_family);
                let mtu = link.attributes().mtu;
                let listener =
                    engine.listen(&mut **link, ip, local.port(), options.backlog, mtu, options.framing)?;
                cm.listening(self.key, listener);
                Ok(())
            },
        )
    }

    /// Accepts a request for `qp`: [`EventKind::Established`], or [`EventKind::ConnectError`].
    pub fn accept(&self, qp: &QueuePair, options: AcceptOptions) -> Result<(), CmError> {
        self.same_device(qp)?;
        let qp = qp.id();
        self.step(
            "accept",
            |p| matches!(p, CmState::Requested(_)),
            |state, now| {
                let State { cm, engine, .. } = state;
                let Some(entry) = cm.entries.get_mut(&self.key) else { return Ok(()) };
                let CmState::Requested(request) = entry.state else {
                    return Err(entry.wrong_state("accept"));
                };
                let AcceptOptions { private_data, ird, ord, close_with_peer } = options;
                engine.accept(request, qp, AcceptParams { ird, ord, private_data })?;
                entry.close_with_peer = close_with_peer;
                let ports = entry.port.clone().map(LocalPorts::single);
                cm.answered(request);
                cm.connecting(self.key, qp, ports);
                state.tune(now, self.key)
            },
        )
    }

    /// Rejects a request, with private data for the initiator's application.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), CmError> {
        self.step(
            "reject",
            |p| matches!(p, CmState::Requested(_)),
            |state, now| {
                let State { cm, engine, .. } = state;
                let Some(entry) = cm.entries.get_mut(&self.key) else { return Ok(()) };
                let CmState::Requested(request) = entry.state else {
                    return Err(entry.wrong_state("reject"));
                };
                engine.reject(now, request, private_data)?;
                entry.state = CmState::Disconnected(None);
                cm.answered(request);
                Ok(())
            },
        )
    }

    /// Queues streaming bytes before MPA; returns the number of bytes taken, which is less than all when 64 KiB wait to
    /// be sent. Possible from [`EventKind::Streaming`] or [`EventKind::StreamRequest`] on.
    pub fn stream_send(&self, bytes: &[u8]) -> Result<usize, CmError> {
        self.stream("stream_send", |state, _, stream| Ok(state.engine.stream_send(stream, bytes)?))
    }

    /// Takes streaming bytes of the peer into `out`, without blocking; returns their number.
    /// [`EventKind::StreamReadable`] reports more bytes, after all were taken. An initiator or responder
    /// should look for bytes when the connection is reported, too.
    pub fn stream_recv(&self, out: &mut [u8]) -> Result<usize, CmError> {
        self.stream("stream_recv", |State { engine, link, .. }, _, stream| {
            Ok(engine.stream_recv(&mut **link, stream, out)?)
        })
    }

    /// Begins MPA on a connection with streaming data (RFC 5044 section 7.1.3): behind all bytes that
    /// [`stream_send`](Self::stream_send) took, then `last`, in our direction, and behind all bytes that
    /// [`stream_recv`](Self::stream_recv) returned in the peer's. The responder calls this with its last streaming bytes,
    /// and the initiator when it has received them. [`EventKind::MpaRequest`] or [`EventKind::Established`] follows.
    pub fn begin_mpa(&self, last: &[u8]) -> Result<(), CmError> {
        self.stream("begin_mpa", |State { engine, link, .. }, now, stream| {
            Ok(engine.begin_mpa(now, &mut **link, stream, last)?)
        })
    }

    fn stream<R>(
        &self,
        call: &'static str,
        f: impl FnOnce(&mut State, Instant, StreamId) -> Result<R, CmError>,
    ) -> Result<R, CmError> {
        let streams = |p: &CmState| matches!(p, CmState::Streaming(_) | CmState::Connecting(_));
        self.step(call, streams, |state, now| {
            let stream = match state.cm.entries.get(&self.key).map(|entry| &entry.state) {
                Some(CmState::Streaming(request)) => StreamId::Request(*request),
                Some(CmState::Connecting(qp)) => StreamId::Qp(*qp),
                _ => return Err(CmError::State { call, state: "gone" }),
            };
            f(state, now, stream)
        })
    }

    /// TCP's numbers of the identifier's connection, as [`QueuePair::tcp_info`]. `None` before there is a queue pair and
    /// after the connection.
    pub fn tcp_info(&self) -> Option<TcpInfo> {
        let info = self.device.shared().look(|state| {
            let qp = state.cm.queue_pair(self.key)?;
            state.engine.connection_info(qp)
        });
        info.map(|(tcp, _)| tcp)
    }

    /// TCP's settings for this identifier's connection: those that were made here, else the device's.
    pub fn tuning(&self) -> Tuning {
        self.device.shared().look(|state| {
            let entry = state.cm.entries.get(&self.key);
            entry.and_then(|entry| entry.tuning).unwrap_or_else(|| state.engine.tuning_defaults())
        })
    }

    /// Changes them (`rdma_set_option`): user timeout, keepalive, codepoint and hop limit. A connection that there is
    /// has them from now on, others from their beginning; a listener gives them to the requests that come after this.
    pub fn tune(&self, tuning: Tuning) -> Result<(), CmError> {
        if tuning.dscp >= 64 {
            return Err(CmError::Codepoint(tuning.dscp));
        }
        let any = |_: &CmState| true;
        self.step("tune", any, |state, now| {
            if let Some(qp) = state.cm.queue_pair(self.key) {
                state.engine.tune(now, qp, &tuning)?;
            }
            if let Some(entry) = state.cm.entries.get_mut(&self.key) {
                entry.tuning = Some(tuning);
            }
            Ok(())
        })
    }

    /// Closes the connection in order: posted work is sent first, then our direction is closed.
    /// [`EventKind::Disconnected`] and [`EventKind::Closed`] follow. Not an error when it is closed already.
    pub fn disconnect(&self) -> Result<(), CmError> {
        let connected = |p: &CmState| {
            matches!(p, CmState::Connecting(_) | CmState::Connected(_) | CmState::Disconnected(_))
        };
        self.step("disconnect", connected, |state, _| {
            let State { cm, engine, .. } = state;
            Ok(cm.queue_pair(self.key).map_or(Ok(()), |qp| engine.disconnect(qp))?)
        })
    }

    fn same_device(&self, qp: &QueuePair) -> Result<(), CmError> {
        if self.device.is(qp.device()) { Ok(()) } else { Err(CmError::OtherDevice) }
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        self.device.shared().with(|state, now| {
            let State { cm, engine, link, .. } = state;
            if let Some(qp) = cm.queue_pair(self.key) {
                // Fails only when there is no connection to close.
                drop(engine.disconnect(qp));
            }
            let unseen = self.channel.forget(self.key);
            let Some(entry) = cm.remove(self.key) else { return };
            match entry.state {
                CmState::Listening(listener) => {
                    engine.unlisten(&mut **link, listener);
                    for key in unseen {
                        match cm.remove(key).map(|entry| entry.state) {
                            Some(CmState::Requested(request)) => drop(engine.reject(now, request, &[])),
                            Some(CmState::Streaming(request)) => drop(engine.abandon(request)),
                            _ => {}
                        }
                    }
                }
                CmState::Requested(request) => drop(engine.reject(now, request, &[])),
                CmState::Streaming(request) => drop(engine.abandon(request)),
                _ => {}
            }
        });
        self.channel.forget(self.key);
    }
}

/// The address that a loopback address stands for on a shared interface; all others stand for themselves.
fn on_interface(link: &dyn Interface, peer: SocketAddr, source: Option<IpAddr>) -> SocketAddr {
    if !peer.ip().is_loopback() {
        return peer;
    }
    let attributes = link.attributes();
    let same_family = |address: &IpAddr| address.is_ipv4() == peer.is_ipv4();
    let link_local = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let usable = |address: &IpAddr| same_family(address) && !link_local(address);
    match source.into_iter().chain(attributes.addresses).find(usable) {
        Some(address) if attributes.shared => SocketAddr::new(address, peer.port()),
        _ => peer,
    }
}

impl State {
    /// The resolver's answer for an identifier, unless it is gone by now.
    fn resolved(&mut self, key: CmKey, peer: SocketAddr, answer: Result<Route, RouteError>) {
        let Some(entry) = self.cm.entries.get_mut(&key) else { return };
        let kind = match answer {
            Ok(route) => {
                entry.state = CmState::AddressResolved(route);
                entry.peer = Some(peer);
                let port = entry.port.as_ref().map_or(0, |p| p.port);
                entry.local = Some(SocketAddr::new(route.source, port));
                EventKind::AddressResolved
            }
            Err(error) => {
                entry.state = CmState::Idle;
                EventKind::AddressError(error)
            }
        };
        entry.channel.push(Queued::Plain(Event { id: key, kind }));
    }
}
