//! The state of each identifier, and the effect of the engine's events on it. Protected by the engine's lock; the
//! identifiers that applications hold are keys into this table.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use xwarp_rnic::{
    engine::Engine,
    rnic::{self, CmEvent, PeerDepths, QpId, RequestId, Rnic, StreamId},
};
use xwarp_tcp::{
    stack::Stack,
    tcp::Tuning,
    time::Instant,
    ulp::{CloseReason, ListenerId},
};

use super::{
    CmError,
    key::CmKey,
    ports::{LocalPort, LocalPorts, Ports},
    queue::{Change, ChannelQueue, Owner, Queued},
};
use crate::interface::{Mac, PortReservation, Route};

/// Where an identifier stands.
#[derive(Debug, Clone)]
pub(super) enum CmState {
    Idle,
    Resolving,
    AddressResolved(Route),
    RouteResolved(Route),
    Listening(ListenerId),
    /// A responder's connection that carries streaming data.
    Streaming(RequestId),
    Requested(RequestId),
    Connecting(QpId),
    Connected(QpId),
    /// By the peer, or never made. The queue pair when our direction may still be open.
    Disconnected(Option<QpId>),
}

impl CmState {
    /// Whether the identifier has a connection, has had one, or attempts to make one.
    pub(super) const fn is_of_a_connection(&self) -> bool {
        match self {
            Self::Idle
            | Self::Resolving
            | Self::AddressResolved(_)
            | Self::RouteResolved(_)
            | Self::Listening(_) => false,
            Self::Streaming(_)
            | Self::Requested(_)
            | Self::Connecting(_)
            | Self::Connected(_)
            | Self::Disconnected(_) => true,
        }
    }

    /// For error messages.
    fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Resolving => "resolving",
            Self::AddressResolved(_) => "resolved, without its route",
            Self::RouteResolved(_) => "resolved",
            Self::Listening(_) => "listening",
            Self::Streaming(_) => "exchanging streaming data",
            Self::Requested(_) => "waiting to be accepted",
            Self::Connecting(_) => "connecting",
            Self::Connected(_) => "connected",
            Self::Disconnected(_) => "disconnected",
        }
    }
}

pub(super) struct Identifier {
    pub(super) channel: Arc<ChannelQueue>,
    pub(super) state: CmState,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) port: Option<Arc<PortReservation>>,
    /// TCP's settings, when they differ from the device's.
    pub(super) tuning: Option<Tuning>,
    /// See [`ConnectOptions::close_with_peer`](super::ConnectOptions::close_with_peer).
    pub(super) close_with_peer: bool,
}

impl Identifier {
    /// Whether the resolved peer is an address of ours, whose frames the link must loop.
    pub(super) fn is_looped(&self) -> bool {
        matches!(self.state, CmState::RouteResolved(route) if route.next_hop_mac == Mac::LOOPED)
    }

    pub(super) fn new(channel: &Arc<ChannelQueue>) -> Self {
        Self {
            channel: Arc::clone(channel),
            state: CmState::Idle,
            local: None,
            peer: None,
            port: None,
            tuning: None,
            close_with_peer: false,
        }
    }

    /// The identifier as a listener's in a further engine.
    pub(super) fn to_listen(&self) -> Self {
        Self { local: self.local, port: self.port.clone(), tuning: self.tuning, ..Self::new(&self.channel) }
    }

    /// The port of a connection to the peer, if the identifier has one.
    pub(super) fn connection_port(&self) -> Option<LocalPort> {
        Some(LocalPort::new(self.local?.ip(), self.peer?, self.port.clone()?))
    }

    /// The error of a call that does not fit the state.
    pub(super) fn wrong_state(&self, call: &'static str) -> CmError {
        CmError::State { call, state: self.state.name() }
    }
}

/// All identifiers of an engine. Those of listeners are in each engine of the device, under one name, so that a request can arrive at
/// any of them.
pub(crate) struct CmTable {
    engine: u16,
    /// Boxed, because half of a hash table is free.
    pub(super) entries: HashMap<CmKey, Box<Identifier>>,
    next: CmKey,
    device: Weak<Owner>,
    pub(super) ports: Arc<Ports>,
    /// The identifier of each queue pair's events.
    by_qp: HashMap<QpId, CmKey>,
    by_listener: HashMap<ListenerId, CmKey>,
    by_request: HashMap<RequestId, CmKey>,
    /// Ports of connections, until the connections have ended completely.
    in_use: HashMap<QpId, LocalPorts>,
    /// Ports of ended connections, and when to look whether they can be released.
    resting: VecDeque<(Instant, LocalPort)>,
    time_wait: Duration,
}

impl CmTable {
    pub(crate) fn new(time_wait: Duration, ports: Arc<Ports>, engine: u16) -> Self {
        Self {
            engine,
            entries: HashMap::new(),
            next: CmKey::first(engine),
            device: Weak::<()>::new(),
            ports,
            by_qp: HashMap::new(),
            by_listener: HashMap::new(),
            by_request: HashMap::new(),
            in_use: HashMap::new(),
            resting: VecDeque::new(),
            time_wait,
        }
    }

    /// Sets the device that new identifiers keep open.
    pub(crate) fn belongs_to(&mut self, device: Weak<Owner>) {
        self.device = device;
    }

    pub(super) fn insert(&mut self, entry: Identifier) -> CmKey {
        let key = self.next;
        self.next = key.next();
        self.entries.insert(key, Box::new(entry));
        key
    }

    /// The queue pair of an identifier whose connection has not ended.
    pub(super) fn queue_pair(&self, key: CmKey) -> Option<QpId> {
        let (CmState::Connecting(qp) | CmState::Connected(qp) | CmState::Disconnected(Some(qp))) =
            self.entries.get(&key)?.state
        else {
            return None;
        };
        (self.by_qp.get(&qp) == Some(&key)).then_some(qp)
    }

    fn report(&self, id: CmKey, kind: Change) {
        if let Some(entry) = self.entries.get(&id) {
            entry.channel.push(Queued::Change(id, kind));
        }
    }

    /// Updates the identifier of a queue pair's event, and reports the event to its owner.
    fn advance(&mut self, qp: QpId, state: CmState, kind: Change) {
        let Some(&key) = self.by_qp.get(&qp) else { return };
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.state = state;
        }
        self.report(key, kind);
    }

    pub(super) fn connecting(&mut self, key: CmKey, qp: QpId, ports: Option<LocalPorts>) {
        self.by_qp.insert(qp, key);
        if let Some(ports) = ports {
            self.in_use.insert(qp, ports);
        }
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.state = CmState::Connecting(qp);
        }
    }

    pub(super) fn listening(&mut self, key: CmKey, listener: ListenerId) {
        self.by_listener.insert(listener, key);
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.state = CmState::Listening(listener);
        }
    }

    /// Makes a listener's identifier idle again, or removes it if it is another engine's. Returns the listener.
    pub(super) fn not_listening(&mut self, key: CmKey) -> Option<ListenerId> {
        let entry = self.entries.get_mut(&key)?;
        let CmState::Listening(listener) = entry.state else { return None };
        entry.state = CmState::Idle;
        self.by_listener.remove(&listener);
        if key.engine() != self.engine {
            self.entries.remove(&key);
        }
        Some(listener)
    }

    pub(super) fn answered(&mut self, request: RequestId) {
        self.by_request.remove(&request);
    }

    /// The device has failed: notifies every identifier and releases all ports.
    pub(crate) fn device_failed(&mut self) {
        self.by_qp.clear();
        self.by_listener.clear();
        self.by_request.clear();
        self.in_use.clear();
        self.resting.clear();
        for (id, entry) in &mut self.entries {
            entry.state = CmState::Disconnected(None);
            entry.port = None;
            if id.engine() == self.engine {
                entry.channel.push(Queued::Change(*id, Change::DeviceFailed));
            }
        }
    }

    /// The interface was removed: ends identifiers without a connection. The others end with their connection.
    pub(crate) fn interface_removed(&self) {
        self.report_where(
            || Change::Closed(CloseReason::InterfaceRemoved),
            |entry| {
                let alone = matches!(
                    entry.state,
                    CmState::Idle
                        | CmState::AddressResolved(_)
                        | CmState::RouteResolved(_)
                        | CmState::Listening(_)
                );
                alone && entry.local.is_some()
            },
        );
    }

    /// Handles a new Ethernet address of the interface.
    pub(crate) fn mac_changed(&self) {
        self.report_where(|| Change::MacChanged, |entry| entry.local.is_some());
    }

    /// Reports an event to the identifiers that `concerned` selects, once to a listener that is in several engines.
    fn report_where(&self, kind: impl Fn() -> Change, concerned: impl Fn(&Identifier) -> bool) {
        let own = self.entries.iter().filter(|(id, _)| id.engine() == self.engine);
        for (id, entry) in own.filter(|(_, entry)| concerned(entry)) {
            entry.channel.push(Queued::Change(*id, kind()));
        }
    }

    /// Removes an identifier; returns its state.
    pub(super) fn remove(&mut self, key: CmKey) -> Option<Identifier> {
        let qp = self.queue_pair(key);
        let entry = self.entries.remove(&key)?;
        match entry.state {
            CmState::Listening(listener) => drop(self.by_listener.remove(&listener)),
            CmState::Requested(request) | CmState::Streaming(request) => self.answered(request),
            _ => {}
        }
        if let Some(qp) = qp {
            self.by_qp.remove(&qp);
        }
        entry.channel.forget(key, self.engine);
        Some(*entry)
    }

    /// Moves the events of an identifier, as far as they are this engine's, to another channel, where further ones follow.
    pub(super) fn migrate(&mut self, key: CmKey, to: &Arc<ChannelQueue>) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let old = std::mem::replace(&mut entry.channel, Arc::clone(to));
        for request in old.hand_over(key, self.engine, to) {
            if let Some(entry) = self.entries.get_mut(&request) {
                entry.channel = Arc::clone(to);
            }
        }
    }

    /// A queue pair was destroyed, so its connection reports no more events.
    pub(crate) fn queue_pair_gone(&mut self, now: Instant, qp: QpId) {
        self.release_ports(now, qp);
        if let Some(key) = self.by_qp.remove(&qp)
            && let Some(entry) = self.entries.get_mut(&key)
        {
            entry.state = CmState::Disconnected(None);
        }
    }

    /// The connection of `qp` has ended completely.
    fn over(&mut self, now: Instant, qp: QpId, kind: Change) {
        self.release_ports(now, qp);
        self.advance(qp, CmState::Disconnected(None), kind);
        self.by_qp.remove(&qp);
    }

    /// The connection of `qp` is established from `port`: the ports of earlier attempts are kept for TIME-WAIT, those
    /// of unneeded attempts are released.
    fn pass_port_on(&mut self, now: Instant, qp: QpId, port: u16) {
        let Some(ports) = self.in_use.get_mut(&qp) else { return };
        let mut fallbacks = std::mem::take(&mut ports.fallbacks);
        let Some(used) = fallbacks.iter().position(|fallback| fallback.reservation.port == port) else {
            return;
        };
        fallbacks.truncate(used + 1);
        let Some(last) = fallbacks.pop() else { return };
        fallbacks.push(std::mem::replace(&mut ports.port, last));
        for earlier in fallbacks {
            self.rest(now, earlier);
        }
    }

    /// The attempt of `qp` has failed before TCP was established, so no TIME-WAIT follows: its ports are released by the next
    /// [`Self::end_rests`], except one that the stack still needs.
    fn never_connected(&mut self, now: Instant, qp: QpId, kind: Change) {
        if let Some(LocalPorts { port, fallbacks }) = self.in_use.remove(&qp) {
            for port in fallbacks.into_iter().chain([port]) {
                self.resting.push_front((now, port));
            }
        }
        self.over(now, qp, kind);
    }

    /// The connection of `qp` has ended.
    fn release_ports(&mut self, now: Instant, qp: QpId) {
        let Some(LocalPorts { port, fallbacks }) = self.in_use.remove(&qp) else { return };
        for port in fallbacks.into_iter().chain([port]) {
            self.rest(now, port);
        }
    }

    /// Keeps the port of an ended connection for the shortest TIME-WAIT, here or at the peer.
    fn rest(&mut self, now: Instant, port: LocalPort) {
        self.resting.push_back((now + self.time_wait, port));
    }

    /// Time at which the next port of an ended connection can be released.
    pub(crate) fn next_rest_end(&self) -> Option<Instant> {
        self.resting.front().map(|(until, _)| *until)
    }

    /// Releases the ports of ended connections whose time has passed, except those that `stack` still needs: it may have
    /// data to send, or a longer TIME-WAIT, and would refuse a new connection of the same four-tuple. Its limits for ending
    /// connections are the limits of these ports too.
    pub(crate) fn end_rests(&mut self, now: Instant, stack: &Stack<Rnic>) {
        for _ in 0..self.resting.len() {
            let Some((_, port)) = self.resting.pop_front_if(|(until, _)| *until <= now) else { return };
            if stack.has_connection(&port.flow) {
                self.rest(now, port);
            }
        }
    }

    fn requested(
        &mut self,
        listener: ListenerId,
        request: RequestId,
        state: CmState,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<(CmKey, CmKey)> {
        let listening = *self.by_listener.get(&listener)?;
        let parent = self.entries.get(&listening)?;
        let entry = Identifier {
            state,
            local: Some(local),
            peer: Some(peer),
            port: parent.port.clone(),
            tuning: parent.tuning,
            ..Identifier::new(&parent.channel)
        };
        let key = self.insert(entry);
        self.by_request.insert(request, key);
        Some((listening, key))
    }

    /// Makes an identifier for a peer's connection and reports it to the listener: with the peer's depths if MPA was
    /// requested, without while the connection carries streaming data. `None` if the listener was closed.
    fn announce(
        &mut self,
        listener: ListenerId,
        request: RequestId,
        state: CmState,
        [local, peer]: [SocketAddr; 2],
        private_data: Vec<u8>,
        depths: Option<PeerDepths>,
    ) -> Option<()> {
        let (listener, key) = self.requested(listener, request, state, local, peer)?;
        let device = Weak::clone(&self.device);
        let streaming = depths.is_none();
        let depths = depths.unwrap_or_default();
        let event = Queued::Request { listener, device, key, private_data, depths, local, peer, streaming };
        self.entries.get(&key)?.channel.push(event);
        Some(())
    }

    /// Reports an event of the connection of `qp`.
    fn report_to_owner(&self, qp: QpId, kind: Change) {
        if let Some(&key) = self.by_qp.get(&qp) {
            self.report(key, kind);
        }
    }

    /// Reports the end of a request, or removes it completely if the application has not seen it, so that short-lived
    /// requests to a listener that is not polled leave nothing behind.
    fn request_gone(&mut self, request: RequestId) {
        let Some(key) = self.by_request.remove(&request) else { return };
        let Some(entry) = self.entries.get_mut(&key) else { return };
        if entry.channel.withdraw_request(key) {
            entry.channel.forget(key, self.engine);
            self.entries.remove(&key);
        } else {
            entry.state = CmState::Disconnected(None);
            self.report(key, Change::RequestGone);
        }
    }
}

impl CmTable {
    /// Starts the connection of an identifier with its earlier settings, if there are any.
    pub(super) fn tune(&self, engine: &mut Engine, now: Instant, key: CmKey) -> Result<(), CmError> {
        let tuning = self.entries.get(&key).and_then(|entry| entry.tuning);
        match (self.queue_pair(key), tuning) {
            (Some(qp), Some(tuning)) => Ok(engine.tune(now, qp, &tuning)?),
            _ => Ok(()),
        }
    }

    /// Applies an event of the engine to the identifiers.
    pub(crate) fn dispatch(&mut self, engine: &mut Engine, now: Instant, event: CmEvent) {
        log(&event);
        let cm = self;
        match event {
            CmEvent::Streaming { stream: StreamId::Request(request), listener, local, remote } => {
                cm.streaming_request(engine, listener, request, [local, remote]);
            }
            CmEvent::Streaming { stream: StreamId::Qp(qp), .. } => {
                cm.report_to_owner(qp, Change::Streaming);
            }
            CmEvent::StreamReadable { stream: StreamId::Qp(qp) } => {
                cm.report_to_owner(qp, Change::StreamReadable);
            }
            CmEvent::StreamReadable { stream: StreamId::Request(request) } => {
                if let Some(&key) = cm.by_request.get(&request) {
                    cm.report(key, Change::StreamReadable);
                }
            }
            CmEvent::ConnectRequest { request, listener, local, remote, private_data, peer } => {
                if !cm.connect_request(listener, request, [local, remote], private_data, peer) {
                    let _ = engine.reject(now, request, &[]);
                }
            }
            CmEvent::RequestGone { request } => cm.request_gone(request),
            CmEvent::Established { qp, local, remote, private_data, ird, ord, peer } => {
                cm.pass_port_on(now, qp, local.port());
                let port = cm.in_use.get(&qp).map(|ports| Arc::clone(&ports.port.reservation));
                if let Some(entry) = cm.by_qp.get(&qp).and_then(|key| cm.entries.get_mut(key)) {
                    (entry.local, entry.peer) = (Some(local), Some(remote));
                    // Not that of the first attempt.
                    entry.port = port.or(entry.port.take());
                }
                let established = Change::Established { private_data, ird, ord, peer };
                cm.advance(qp, CmState::Connected(qp), established);
            }
            CmEvent::Rejected { qp, private_data, peer } => {
                cm.over(now, qp, Change::Rejected { private_data, peer });
            }
            CmEvent::ConnectError {
                qp,
                reason: reason @ (CloseReason::Refused | CloseReason::Unreachable | CloseReason::TimedOut),
            } => cm.never_connected(now, qp, failure(reason)),
            CmEvent::ConnectError { qp, reason } => cm.over(now, qp, failure(reason)),
            CmEvent::Disconnected { qp } => {
                let owner = cm.by_qp.get(&qp).and_then(|key| cm.entries.get(key));
                let closes = owner.is_some_and(|entry| entry.close_with_peer);
                cm.advance(qp, CmState::Disconnected(Some(qp)), Change::Disconnected);
                if closes {
                    // A destroyed queue pair has nothing to close.
                    let _ = engine.disconnect(qp);
                }
            }
            CmEvent::Closed { qp, reason } => cm.over(now, qp, Change::Closed(reason)),
        }
    }

    /// Reports a peer's connection with streaming data, or abandons it if the listener was closed.
    fn streaming_request(
        &mut self,
        engine: &mut Engine,
        listener: Option<ListenerId>,
        request: RequestId,
        ends: [SocketAddr; 2],
    ) {
        let state = CmState::Streaming(request);
        let announced =
            listener.and_then(|listener| self.announce(listener, request, state, ends, Vec::new(), None));
        if announced.is_none() {
            let _ = engine.abandon(request);
        }
    }

    /// Reports a peer's MPA Request, to the identifier of its connection if streaming data preceded it. Returns false if the listener
    /// was closed.
    fn connect_request(
        &mut self,
        listener: ListenerId,
        request: RequestId,
        ends: [SocketAddr; 2],
        private_data: Vec<u8>,
        depths: PeerDepths,
    ) -> bool {
        let state = CmState::Requested(request);
        let Some(&key) = self.by_request.get(&request) else {
            return self.announce(listener, request, state, ends, private_data, Some(depths)).is_some();
        };
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.state = state;
        }
        self.report(key, Change::MpaRequest { private_data, depths });
        true
    }
}

/// Logs the start and the end of a connection. `rnic` logs the negotiated parameters.
fn log(event: &CmEvent) {
    match event {
        CmEvent::ConnectRequest { local, remote, peer, .. } => {
            tracing::debug!(%local, %remote, ird = ?peer.ird, ord = ?peer.ord, "connection request");
        }
        CmEvent::Streaming { local, remote, .. } => {
            tracing::debug!(%local, %remote, "connection carries streaming data");
        }
        CmEvent::StreamReadable { .. } => {}
        CmEvent::RequestGone { .. } => tracing::debug!("connection request gone before it was answered"),
        CmEvent::Established { qp, ird, ord, .. } => {
            tracing::debug!(qp = qp.number(), ird, ord, "queue pair ready to send");
        }
        CmEvent::Rejected { qp, .. } => {
            tracing::debug!(qp = qp.number(), "rejected by the peer's application");
        }
        CmEvent::ConnectError { qp, reason } => {
            tracing::debug!(qp = qp.number(), %reason, "connection attempt failed");
        }
        CmEvent::Disconnected { qp } => tracing::debug!(qp = qp.number(), "peer disconnected"),
        CmEvent::Closed { qp, reason } => tracing::debug!(qp = qp.number(), %reason, "connection closed"),
    }
}

/// The event for a failed connection.
fn failure(reason: CloseReason) -> Change {
    match reason {
        CloseReason::Refused => Change::Refused,
        CloseReason::Unreachable => Change::Unreachable,
        CloseReason::TimedOut => Change::TimedOut,
        other => Change::ConnectError(other),
    }
}

/// Converts the engine's error of a call to that of the API.
impl From<rnic::CmError> for CmError {
    fn from(error: rnic::CmError) -> Self {
        Self::Engine(error)
    }
}

#[cfg(test)]
mod tests {
    use xwarp_tcp::ulp::ConnId;

    use super::*;
    use crate::{
        Device, DeviceOptions, PeerDepths,
        cm::{CmId, EventChannel, EventKind, ListenOptions},
        sim::{self, WireConfig},
    };

    const LISTENER: ListenerId = ListenerId(77);

    fn request(index: u32) -> RequestId {
        RequestId(ConnId { index, generation: 1 })
    }

    /// The event of a peer's connection request.
    fn asked(index: u32) -> CmEvent {
        CmEvent::ConnectRequest {
            request: request(index),
            listener: LISTENER,
            local: (sim::ipv4(1), 7).into(),
            remote: (sim::ipv4(2), 8).into(),
            private_data: vec![0; 16],
            peer: PeerDepths::default(),
        }
    }

    fn gone(index: u32) -> CmEvent {
        CmEvent::RequestGone { request: request(index) }
    }

    fn dispatch(device: &Device, events: impl IntoIterator<Item = CmEvent>) {
        device.shared().with(|state, now| {
            for event in events {
                state.cm.dispatch(&mut state.engine, now, event);
            }
        });
    }

    /// Sizes of the tables: identifiers, requests, events and names of events.
    fn sizes(device: &Device, channel: &EventChannel) -> [usize; 4] {
        let [events, names] = channel.queue().sizes();
        device
            .shared()
            .look(|state| [state.cm.entries.len(), state.cm.by_request.len(), events, names])
            .unwrap()
    }

    /// A listener whose requests are made by [`dispatch`].
    fn listening(channel: &EventChannel) -> (Device, CmId) {
        let (a, _b) = sim::pair(WireConfig::default(), 1500).unwrap();
        let device = Device::over(Box::new(a), DeviceOptions::default()).unwrap();
        let listener = CmId::new(&device, channel);
        listener.bind((sim::ipv4(1), 7).into()).unwrap();
        listener.listen(ListenOptions::default()).unwrap();
        device.shared().with(|state, _| state.cm.by_listener.insert(LISTENER, listener.key()));
        (device, listener)
    }

    #[test]
    fn requests_that_come_and_go_leave_nothing_at_a_listener_that_is_not_polled() {
        const REQUESTS: u32 = 5000;
        let channel = EventChannel::new().unwrap();
        let (device, listener) = listening(&channel);
        let before = sizes(&device, &channel);
        // One by one, and in batches of which the newest goes first.
        dispatch(&device, (0..REQUESTS).flat_map(|index| [asked(index), gone(index)]));
        assert_eq!(sizes(&device, &channel), before);
        dispatch(&device, (0..REQUESTS).map(asked).chain((0..REQUESTS).rev().map(gone)));
        assert_eq!(sizes(&device, &channel), before);
        assert!(
            !device.wait(&channel, Some(Duration::ZERO)).unwrap(),
            "the descriptor is readable for no event"
        );

        let stream = |index| StreamId::Request(request(index));
        let ends = [(sim::ipv4(1), 7).into(), (sim::ipv4(2), 8).into()];
        let streaming = |index| {
            let [local, remote] = ends;
            [
                CmEvent::Streaming { stream: stream(index), listener: Some(LISTENER), local, remote },
                CmEvent::StreamReadable { stream: stream(index) },
                gone(index),
            ]
        };
        dispatch(&device, (0..REQUESTS).flat_map(streaming));
        assert_eq!(sizes(&device, &channel), before);

        // The end of a request is reported if and only if the application has seen the request.
        dispatch(&device, [asked(1), asked(2)]);
        let seen = channel.poll().unwrap();
        let EventKind::ConnectRequest(incoming) = seen.kind else { panic!("{seen:?}") };
        assert_eq!(seen.id, listener.key());
        dispatch(&device, [gone(2), gone(1)]);
        let event = channel.poll().unwrap();
        assert!(matches!(event.kind, EventKind::RequestGone), "{event:?}");
        assert_eq!(event.id, incoming.id.key());
        drop(incoming);
        assert_eq!(sizes(&device, &channel), before);
    }

    #[test]
    fn a_listener_takes_its_unseen_requests_to_another_channel() {
        let (old, new) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
        let (device, mut listener) = listening(&old);
        dispatch(&device, (0..3).map(asked));
        listener.migrate(&new);
        assert!(old.poll().is_none());
        dispatch(&device, [gone(1)]);
        for _ in [0, 2] {
            assert!(matches!(new.poll().unwrap().kind, EventKind::ConnectRequest(_)));
        }
        assert!(new.poll().is_none());
        dispatch(&device, (4..7).map(asked));
        drop(listener);
        assert_eq!(sizes(&device, &new), [0; 4]);
    }
}
