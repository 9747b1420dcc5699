//! [`CmId`]: one end of a connection, through the connection manager's steps.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, MutexGuard},
    time::Duration,
};

use xwarp_rnic::{engine::ConnectParams, rnic::StreamId};
use xwarp_tcp::{
    framing::{AcceptParams, FramingConfig},
    tcp::{Info as TcpInfo, TcpConfig, Tuning},
    time::Instant,
};

use super::{
    AcceptOptions, CmError, ConnectOptions, ListenOptions,
    key::CmKey,
    ports::{LocalPort, LocalPorts},
    queue::{Change, ChannelQueue, EventChannel, Queued},
    table::{CmState, Identifier},
};
use crate::{
    api::{
        handle::Device,
        queue_pair::QueuePair,
        shared::{SharedEngine, State},
    },
    fabric,
    interface::{Interface, PortReservation, Route, RouteError},
    local,
};

/// Time limit of one request to the resolver; closing a device waits for it.
const RESOLVE_SLICE: Duration = Duration::from_millis(50);
/// Most ports that are drawn for one connection. With 16 engines, 16 are drawn on average, and more than this once in fifteen million
/// connections.
const MAX_DRAWS: usize = 256;

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
    /// Creates an identifier whose events are reported on `channel`.
    pub fn new(device: &Device, channel: &EventChannel) -> Self {
        Self::in_engine(device, channel, device.engines().in_turn())
    }

    /// As [`new`](Self::new), for a connection in `engine`.
    pub(super) fn in_engine(device: &Device, channel: &EventChannel, engine: u16) -> Self {
        let entry = Identifier::new(channel.queue());
        // An identifier of a failed device is in no table: every call with it returns an error for the failed device.
        let key = device.engines().get(engine).with(|state, _| Some(state.cm.insert(entry)));
        Self { device: device.clone(), channel: Arc::clone(channel.queue()), key: key.unwrap_or(CmKey::NONE) }
    }

    /// The handle to an identifier that the engine made.
    pub(super) fn adopt(device: Device, channel: &EventChannel, key: CmKey) -> Self {
        Self { device, channel: Arc::clone(channel.queue()), key }
    }

    /// The identifier's key in events.
    pub fn key(&self) -> CmKey {
        self.key
    }

    /// Moves the identifier to another channel, with its waiting events.
    pub fn migrate(&mut self, channel: &EventChannel) {
        self.channel = Arc::clone(channel.queue());
        // A listener is in all engines, other identifiers are in one.
        for engine in self.engines() {
            engine.with(|state, _| state.cm.migrate(self.key, channel.queue()));
        }
    }

    /// The engine that has the identifier.
    fn home(&self) -> &Arc<SharedEngine> {
        self.device.engines().get(self.key.engine())
    }

    /// The engines that have the identifier, its own one last.
    fn engines(&self) -> impl Iterator<Item = &Arc<SharedEngine>> {
        let (home, all) = (self.home(), self.device.engines().all());
        // The table of a failed device is not asked: in a child process, a thread that does not exist there may hold its lock.
        let listens = all.len() > 1
            && !home.failed()
            && self.entry(|entry| matches!(entry.state, CmState::Listening(_)).then_some(())).is_some();
        let others = if listens { all } else { &[] };
        others.iter().filter(move |engine| !Arc::ptr_eq(engine, home)).chain([home])
    }

    /// The number of the engine that has the identifier and its connection; 0 in a device with one engine.
    pub fn engine(&self) -> u16 {
        self.home().number()
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
        self.home().look(|state| state.cm.entries.get(&self.key).and_then(|entry| f(entry))).flatten()
    }

    /// Runs `f` on this identifier's entry if `fits` accepts its state.
    fn step<R>(
        &self,
        call: &'static str,
        fits: impl FnOnce(&CmState) -> bool,
        f: impl FnOnce(&mut State, Instant) -> Result<R, CmError>,
    ) -> Result<R, CmError> {
        self.home().with(|state, now| {
            let entry = state.cm.entries.get(&self.key).ok_or(CmError::State { call, state: "gone" })?;
            if !fits(&entry.state) {
                return Err(entry.wrong_state(call));
            }
            f(state, now)
        })
    }

    fn change(&self, f: impl FnOnce(&mut Identifier)) {
        self.home().with(|state, _| state.cm.entries.get_mut(&self.key).map(|entry| f(entry)));
    }

    fn reserve(&self, address: SocketAddr) -> Result<Arc<PortReservation>, CmError> {
        let shared = self.home();
        let ports = shared.look(|state| Arc::clone(&state.cm.ports)).ok_or(CmError::DeviceFailed)?;
        ports.reserve(shared.resolver(), address).map_err(|source| CmError::Bind { address, source })
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

    /// Takes the address and the port of the connection `other`, for a connection to another port of the same peer. `other` may have
    /// ended. The port is reserved until both have ended.
    ///
    /// While `other` exists and in its TIME-WAIT, [`connect`](Self::connect) to the same port of the peer fails with
    /// [`CmError::Engine`].
    pub fn bind_as(&self, other: &Self) -> Result<(), CmError> {
        if !self.device.is(&other.device) {
            return Err(CmError::OtherDevice);
        }
        let (local, port) = other.step("bind_as", CmState::is_of_a_connection, |state, _| {
            let entry = state.cm.entries.get(&other.key);
            let bound = entry.and_then(|entry| Some((entry.local?, entry.port.clone()?)));
            bound.ok_or(CmError::State { call: "bind_as", state: "without a port" })
        })?;
        self.step(
            "bind_as",
            |p| matches!(p, CmState::Idle),
            |state, _| {
                if let Some(entry) = state.cm.entries.get_mut(&self.key) {
                    (entry.local, entry.port) = (Some(local), Some(port));
                }
                Ok(())
            },
        )
    }

    /// Resolves the path to `peer`, from the bound address if there is one: [`EventKind::AddressResolved`](super::EventKind::AddressResolved), or
    /// [`EventKind::AddressError`](super::EventKind::AddressError) at the latest after `limit`.
    ///
    /// A loopback address (`localhost`) stands for the bound or the first address of the interface, because no loopback address is
    /// on it; [`peer_address`](Self::peer_address) is that address then.
    pub fn resolve_address(&self, peer: SocketAddr, limit: Duration) -> Result<(), CmError> {
        let (source, peer, own) = self.step(
            "resolve_address",
            |p| matches!(p, CmState::Idle),
            |state, _| {
                let Some(entry) = state.cm.entries.get_mut(&self.key) else { return Ok((None, peer, None)) };
                entry.state = CmState::Resolving;
                let source = entry.local.map(|a| a.ip()).filter(|ip| !ip.is_unspecified());
                let peer = on_interface(&*state.link, peer, source);
                Ok((source, peer, local::route(&*state.link, peer.ip(), source)))
            },
        )?;
        if let Some(answer) = own {
            self.home().with(|state, _| state.resolved(self.key, peer, answer));
            return Ok(());
        }
        let shared = self.home();
        match shared.resolver().resolve(peer, source, Duration::ZERO) {
            Err(RouteError::TimedOut(_)) if !limit.is_zero() => {
                self.resolve_later(peer, source, limit).map_err(|error| {
                    self.change(|entry| entry.state = CmState::Idle);
                    error.into()
                })
            }
            answer => {
                self.home().with(|state, _| state.resolved(self.key, peer, answer));
                Ok(())
            }
        }
    }

    /// The next hop must be resolved, which a separate thread waits for.
    fn resolve_later(&self, peer: SocketAddr, source: Option<IpAddr>, limit: Duration) -> io::Result<()> {
        let key = self.key;
        self.device.spawn_resolver(self.home(), move |shared| {
            let end = shared.clock().now() + limit;
            let answer = loop {
                let left = end.since(shared.clock().now());
                let answer = shared.resolver().resolve(peer, source, left.min(RESOLVE_SLICE));
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

    /// A step without work: with iWARP the route is known with the address. [`EventKind::RouteResolved`](super::EventKind::RouteResolved) follows.
    pub fn resolve_route(&self) -> Result<(), CmError> {
        self.step(
            "resolve_route",
            |p| matches!(p, CmState::AddressResolved(_)),
            |state, _| {
                let Some(entry) = state.cm.entries.get_mut(&self.key) else { return Ok(()) };
                if let CmState::AddressResolved(route) = entry.state {
                    entry.state = CmState::RouteResolved(route);
                    entry.channel.push(Queued::Change(self.key, Change::RouteResolved));
                }
                Ok(())
            },
        )
    }

    /// Connects `qp` to the resolved peer: [`EventKind::Established`](super::EventKind::Established), or an event with the reason of the failure. When
    /// the peer refuses markers or revision 2 of MPA, up to two further attempts follow: from other ports if the
    /// identifier was not bound, else from the same port.
    pub fn connect(&self, qp: &QueuePair, options: ConnectOptions) -> Result<(), CmError> {
        let _here = self.bring(qp)?;
        let ConnectOptions { private_data, ird, ord, framing, close_with_peer } = options;
        let reserved = self.reserve_for_connect(framing.as_ref())?;
        let qp = qp.id();
        self.step(
            "connect",
            |p| matches!(p, CmState::RouteResolved(_)),
            |state, now| {
                if state.cm.entries.get(&self.key).is_some_and(|entry| entry.is_looped()) {
                    state.loop_own_frames();
                }
                let State { cm, engine, link, .. } = state;
                let Some(entry) = cm.entries.get(&self.key) else { return Ok(()) };
                // A port that was bound, or reserved by a call on another thread, takes precedence over the new
                // reservation.
                let bound = entry.connection_port().map(LocalPorts::single);
                let (CmState::RouteResolved(route), Some(peer), Some(ports)) =
                    (&entry.state, entry.peer, bound.or(reserved))
                else {
                    return Err(entry.wrong_state("connect"));
                };
                let path = |port: &LocalPort| route.path(port.reservation.port, peer);
                let fallbacks = ports.fallbacks.iter().map(path).collect();
                let path = path(&ports.port);
                if path.flow.local == path.flow.remote {
                    return Err(CmError::State { call: "connect", state: "bound to its peer's address and port" });
                }
                let params = ConnectParams { ird, ord, private_data, framing, fallbacks };
                engine.connect(now, &mut **link, qp, path, params)?;
                tracing::debug!(qp = qp.number(), local = %path.flow.local, remote = %path.flow.remote, "connecting");
                if let Some(entry) = cm.entries.get_mut(&self.key) {
                    entry.local = Some(path.flow.local);
                    entry.port = Some(Arc::clone(&ports.port.reservation));
                    entry.close_with_peer = close_with_peer;
                }
                cm.connecting(self.key, qp, Some(ports));
                state.cm.tune(&mut state.engine, now, self.key)
            },
        )
    }

    /// Reserves a port for an identifier that is ready to connect and has none, and one for each further attempt
    /// that the connection may take.
    fn reserve_for_connect(&self, framing: Option<&FramingConfig>) -> Result<Option<LocalPorts>, CmError> {
        let ready = |entry: &Identifier| match entry.state {
            CmState::RouteResolved(route) if entry.port.is_none() => Some((route.source, entry.peer?)),
            _ => None,
        };
        let Some((source, peer)) = self.entry(ready) else { return Ok(None) };
        let port = self.reserve_arriving(source, peer)?;
        let shared = self.home();
        let now = shared.clock().now();
        let further = shared.look(|state| state.engine.further_attempts(now, peer, framing)).unwrap_or(0);
        let fallbacks =
            (0..further).map(|_| self.reserve_arriving(source, peer)).collect::<Result<_, _>>()?;
        Ok(Some(LocalPorts { port, fallbacks }))
    }

    /// Reserves a port with which the peer's frames arrive on a queue of the identifier's engine, as far as that is known. If
    /// none of [`MAX_DRAWS`] is one, the frames are handed over.
    fn reserve_arriving(&self, source: IpAddr, peer: SocketAddr) -> Result<LocalPort, CmError> {
        // The others stay reserved meanwhile, so that none is drawn twice.
        let mut drawn = Vec::new();
        loop {
            let port = LocalPort::new(source, peer, self.reserve(SocketAddr::new(source, 0))?);
            if drawn.len() + 1 >= MAX_DRAWS || self.home().resolver().arrives_here(&port.flow) {
                return Ok(port);
            }
            drawn.push(port);
        }
    }

    /// Listens at the bound address, in all engines of the device: each request is an [`EventKind::ConnectRequest`](super::EventKind::ConnectRequest).
    pub fn listen(&self, options: ListenOptions) -> Result<(), CmError> {
        let idle = |p: &CmState| matches!(p, CmState::Idle);
        self.step("listen", idle, |state, _| state.listen(self.key, &options))?;
        let others =
            || self.device.engines().all().iter().filter(|engine| engine.number() != self.key.engine());
        for engine in others() {
            let Some(entry) = self.entry(|entry| Some(entry.to_listen())) else { break };
            if let Err(error) = engine.with(|state, _| state.listen_too(self.key, entry, &options)) {
                others()
                    .chain([self.home()])
                    .for_each(|engine| engine.with(|state, _| state.unlisten(self.key)));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Accepts a request for `qp`: [`EventKind::Established`](super::EventKind::Established), or [`EventKind::ConnectError`](super::EventKind::ConnectError).
    pub fn accept(&self, qp: &QueuePair, options: AcceptOptions) -> Result<(), CmError> {
        let _here = self.bring(qp)?;
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
                let ports = entry.connection_port().map(LocalPorts::single);
                cm.answered(request);
                cm.connecting(self.key, qp, ports);
                state.cm.tune(&mut state.engine, now, self.key)
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
    /// be sent. Possible from [`EventKind::Streaming`](super::EventKind::Streaming) or [`EventKind::StreamRequest`](super::EventKind::StreamRequest) on.
    pub fn stream_send(&self, bytes: &[u8]) -> Result<usize, CmError> {
        self.stream("stream_send", |state, _, stream| Ok(state.engine.stream_send(stream, bytes)?))
    }

    /// Takes streaming bytes of the peer into `out`, without blocking; returns their number.
    /// [`EventKind::StreamReadable`](super::EventKind::StreamReadable) reports more bytes, after all were taken. An initiator or responder
    /// should look for bytes when the connection is reported, too.
    pub fn stream_recv(&self, out: &mut [u8]) -> Result<usize, CmError> {
        self.stream("stream_recv", |State { engine, link, .. }, _, stream| {
            Ok(engine.stream_recv(&mut **link, stream, out)?)
        })
    }

    /// Begins MPA on a connection with streaming data (RFC 5044 section 7.1.3): behind all bytes that
    /// [`stream_send`](Self::stream_send) took, then `last`, in our direction, and behind all bytes that
    /// [`stream_recv`](Self::stream_recv) returned in the peer's. The responder calls this with its last streaming bytes,
    /// and the initiator when it has received them. [`EventKind::MpaRequest`](super::EventKind::MpaRequest) or [`EventKind::Established`](super::EventKind::Established) follows.
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

    /// TCP statistics of the identifier's connection, like [`QueuePair::tcp_info`]. `None` before there is a queue pair
    /// and after the connection.
    pub fn tcp_info(&self) -> Option<TcpInfo> {
        let info = self.home().look(|state| {
            let qp = state.cm.queue_pair(self.key)?;
            state.engine.connection_info(qp)
        });
        info.flatten().map(|(tcp, _)| tcp)
    }

    /// TCP's settings for this identifier's connection: those that were made here, else the device's.
    pub fn tuning(&self) -> Tuning {
        let tuning = self.home().look(|state| {
            let entry = state.cm.entries.get(&self.key);
            entry.and_then(|entry| entry.tuning).unwrap_or_else(|| state.engine.tuning_defaults())
        });
        tuning.unwrap_or_else(|| TcpConfig::default().tuning())
    }

    /// Changes them (`rdma_set_option`): user timeout, keepalive, codepoint, hop limit and answer delay. They apply to an existing
    /// connection from now on, to a later one from its start; a listener applies them to later requests.
    pub fn tune(&self, tuning: Tuning) -> Result<(), CmError> {
        if tuning.dscp >= 64 {
            return Err(CmError::Codepoint(tuning.dscp));
        }
        let any = |_: &CmState| true;
        for engine in self.engines().filter(|engine| engine.number() != self.key.engine()) {
            // A listener's copy, whose requests have the settings.
            engine.with(|state, _| {
                state.cm.entries.get_mut(&self.key).map(|entry| entry.tuning = Some(tuning))
            });
        }
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
    /// [`EventKind::Disconnected`](super::EventKind::Disconnected) and [`EventKind::Closed`](super::EventKind::Closed) follow. Not an error if it is closed already.
    pub fn disconnect(&self) -> Result<(), CmError> {
        let connected = |p: &CmState| {
            matches!(p, CmState::Connecting(_) | CmState::Connected(_) | CmState::Disconnected(_))
        };
        self.step("disconnect", connected, |state, _| {
            let State { cm, engine, .. } = state;
            Ok(cm.queue_pair(self.key).map_or(Ok(()), |qp| engine.disconnect(qp))?)
        })
    }

    /// Brings a queue pair to the identifier's engine, to be connected there while the guard lives.
    fn bring<'qp>(&self, qp: &'qp QueuePair) -> Result<Option<MutexGuard<'qp, ()>>, CmError> {
        if !self.device.is(qp.device()) {
            return Err(CmError::OtherDevice);
        }
        qp.bring_to(self.key.engine())
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        for engine in self.engines() {
            engine.with(|state, now| state.abandon(now, self.key, &self.channel));
        }
        self.channel.forget(self.key, self.key.engine());
    }
}

/// The address that a loopback address stands for; all others stand for themselves, also those of a fabric's hosts.
fn on_interface(link: &dyn Interface, peer: SocketAddr, source: Option<IpAddr>) -> SocketAddr {
    if !peer.ip().is_loopback() || fabric::host_number(peer.ip()).is_some() {
        return peer;
    }
    let attributes = link.attributes();
    let same_family = |address: &IpAddr| address.is_ipv4() == peer.is_ipv4();
    let link_local = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let usable = |address: &IpAddr| same_family(address) && !link_local(address);
    let address = source.into_iter().chain(attributes.addresses).find(usable);
    address.map_or(peer, |address| SocketAddr::new(address, peer.port()))
}

impl State {
    /// Ends the object of an identifier that the application drops, as far as it is in this engine.
    fn abandon(&mut self, now: Instant, key: CmKey, channel: &ChannelQueue) {
        let Self { cm, engine, link, .. } = self;
        if let Some(qp) = cm.queue_pair(key) {
            // Fails only when there is no connection to close.
            drop(engine.disconnect(qp));
        }
        let unseen = channel.forget(key, engine.rnic().number());
        let Some(entry) = cm.remove(key) else { return };
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
    }

    /// Listens at the address of the identifier `key`.
    fn listen(&mut self, key: CmKey, options: &ListenOptions) -> Result<(), CmError> {
        let Self { cm, engine, link, .. } = self;
        let Some(local) = cm.entries.get(&key).and_then(|entry| entry.local) else {
            return Err(CmError::State { call: "listen", state: "not bound" });
        };
        let ip = Some(local.ip()).filter(|ip| !ip.is_unspecified() || options.only_family);
        let mtu = link.attributes().mtu;
        let framing = options.framing.clone();
        let listener = engine.listen(&mut **link, ip, local.port(), options.backlog, mtu, framing)?;
        cm.listening(key, listener);
        Ok(())
    }

    /// Listens also in this engine for the identifier `key` of another one.
    fn listen_too(&mut self, key: CmKey, entry: Identifier, options: &ListenOptions) -> Result<(), CmError> {
        self.cm.entries.insert(key, Box::new(entry));
        self.listen(key, options).inspect_err(|_| drop(self.cm.entries.remove(&key)))
    }

    /// Undoes [`Self::listen`]; the identifier stays bound in its own engine.
    fn unlisten(&mut self, key: CmKey) {
        let Self { cm, engine, link, .. } = self;
        if let Some(listener) = cm.not_listening(key) {
            engine.unlisten(&mut **link, listener);
        }
    }

    /// The resolver's answer for an identifier, unless the identifier was destroyed.
    fn resolved(&mut self, key: CmKey, peer: SocketAddr, answer: Result<Route, RouteError>) {
        let Some(entry) = self.cm.entries.get_mut(&key) else { return };
        let change = match answer {
            Ok(route) => {
                entry.state = CmState::AddressResolved(route);
                entry.peer = Some(peer);
                let port = entry.port.as_ref().map_or(0, |p| p.port);
                entry.local = Some(SocketAddr::new(route.source, port));
                Change::AddressResolved
            }
            Err(error) => {
                entry.state = CmState::Idle;
                Change::AddressError(error)
            }
        };
        entry.channel.push(Queued::Change(key, change));
    }
}
