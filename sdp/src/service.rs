//! SDP on a device: the state that all its connections share, and the thread that runs them when the program does not.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use xwarp_verbs::{
    CompletionChannel, CompletionQueueOptions, Device, FramingConfig, Markers, MpaConfig, NoReceive,
    ProtectionDomain, QueuePairOptions, Rtr, Tuning,
    cm::{AcceptOptions, CmId, CmKey, ConnectOptions, EventChannel, EventKind, IncomingRequest},
};

use crate::{
    buffers::{Receives, SEND_SLOTS, SendSlots},
    listener::Backlog,
    machine::{Config, FAREWELL_RECEIVES, Machine, Violation},
    mapper::Cache,
    socket::{Bell, Link, MAX_RDMA, Socket},
};

/// Longest sleep of the service thread: the resolution of its time limits.
const TICK: Duration = Duration::from_millis(200);
/// Interval at which the service thread checks connections that callers poll, at first and while they continue. It does
/// not wait for frames meanwhile. The progress thread of a device naps as long.
const NAP: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(4)];
/// Time limit for a closed connection to send its remaining data and close in order.
const ORPHAN_LIMIT: Duration = Duration::from_secs(60);
/// The same when SDP itself ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time limit for each step of the set-up: the resolution of the peer's address, the MPA start-up frames, and the HelloAck
/// behind them.
const SET_UP_LIMIT: Duration = Duration::from_secs(10);

/// Longest time that the ACK of a single short segment waits for the program's answer: 40 ms, as in Linux. An ACK of its own
/// wakes a peer that sleeps for nothing. SDP needs the completion of a send only to use its buffer again.
const ANSWER_DELAY: Duration = Duration::from_millis(40);

/// Settings of SDP on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SdpOptions {
    /// Sizes and limits of each connection.
    pub connection: Config,
    /// Shorter transfers by [`SdpStream::send_memory`](crate::SdpStream::send_memory) are copied (the Bcopy Threshold).
    pub bcopy_threshold: usize,
    /// Time for which advertised data may stay unread before [`SdpStream::send_memory`](crate::SdpStream::send_memory)
    /// withdraws the SrcAvail and sends messages.
    pub unread_limit: Duration,
    /// Connections that wait to be accepted at a listener; more are rejected.
    pub backlog: usize,
    /// Settings of MPA's start-up. Markers and peer-to-peer mode are chosen by SDP.
    pub mpa: MpaConfig,
}

impl Default for SdpOptions {
    fn default() -> Self {
        let connection = Config::default();
        let mpa = MpaConfig { startup_timeout: SET_UP_LIMIT, ..MpaConfig::default() };
        let unread_limit = Duration::from_secs(1);
        Self { connection, bcopy_threshold: 64 << 10, unread_limit, backlog: 128, mpa }
    }
}

impl SdpOptions {
    /// MPA's settings: the connecting end promises the one port from which it connects, so nothing may need a second
    /// attempt, and peer-to-peer mode lets the accepting end send first (draft section 8.1.1).
    fn mpa(&self) -> MpaConfig {
        let peer_to_peer = vec![Rtr::EmptyFpdu, Rtr::Write];
        MpaConfig { markers: Markers::Off, peer_to_peer, ..self.mpa.clone() }
    }
}

/// The time of the service thread's next check of polled connections, and its nap until then.
struct Looks {
    next: Instant,
    nap: Duration,
    /// The sleeps of callers at the last check, and whether the thread runs the device while it waits, because there were
    /// no others lately.
    sleeps: u64,
    leads: bool,
}

/// The receiver of a connection manager event.
enum Target {
    Socket(Arc<Socket>),
    Listener(Arc<Backlog>),
    /// An accepted connection, until it is established.
    Accepting(Arc<Socket>, Arc<Backlog>),
}

pub(crate) struct Core {
    pub(crate) device: Device,
    pub(crate) options: SdpOptions,
    pd: ProtectionDomain,
    completions: CompletionChannel,
    pub(crate) events: EventChannel,
    sockets: Mutex<BTreeMap<u64, (CmKey, Arc<Socket>)>>,
    targets: Mutex<BTreeMap<CmKey, Target>>,
    next_socket: AtomicU64,
    counters: Mutex<BTreeMap<&'static str, u64>>,
    /// Bytes sent and received: counters too, apart because each read and write changes one.
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    /// Connections that callers poll.
    polled: Mutex<Vec<Arc<Socket>>>,
    /// Sleeps of callers that run the device when frames arrive.
    pub(crate) sleeps: AtomicU64,
    /// Answers of port mappers.
    pub(crate) mapped: Mutex<Cache>,
    stop: AtomicBool,
    /// Wakes the service thread.
    bell: Bell,
    /// All descriptors that the service thread waits for.
    waits: OwnedFd,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// SDP on a device. Clones, streams and listeners are handles to the same service; its thread ends with the last one, after
/// at most a second for connections that were closed and are not finished.
#[derive(Clone)]
pub struct Sdp(pub(crate) Arc<Service>);

/// The service thread's owner.
pub(crate) struct Service {
    pub(crate) core: Arc<Core>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Sdp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Sdp").field(&self.0.core.device).finish()
    }
}

impl Sdp {
    /// Starts SDP on `device`.
    pub fn new(device: &Device, options: SdpOptions) -> io::Result<Self> {
        let (completions, events, bell) = (CompletionChannel::new()?, EventChannel::new()?, Bell::new()?);
        let waits = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [completions.as_fd(), events.as_fd(), bell.as_fd()] {
            epoll::add(&waits, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let core = Arc::new(Core {
            pd: device.create_pd().map_err(io::Error::other)?,
            device: device.clone(),
            options,
            completions,
            events,
            sockets: Mutex::default(),
            targets: Mutex::default(),
            next_socket: AtomicU64::new(0),
            counters: Mutex::default(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            polled: Mutex::default(),
            sleeps: AtomicU64::new(0),
            mapped: Mutex::default(),
            stop: AtomicBool::new(false),
            bell,
            waits,
        });
        let runs = Arc::clone(&core);
        let thread = std::thread::Builder::new().name("xwarp-sdp".into()).spawn(move || runs.run())?;
        Ok(Self(Arc::new(Service { core, thread: Mutex::new(Some(thread)) })))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.core.device
    }

    /// Counters of protocol violations by name, and of bytes by the way of transfer.
    pub fn counters(&self) -> BTreeMap<&'static str, u64> {
        let core = &self.0.core;
        let mut counters = lock(&core.counters).clone();
        for (name, bytes) in [("sdp_bytes_sent", &core.sent), ("sdp_bytes_received", &core.received)] {
            counters.insert(name, bytes.load(Ordering::Relaxed));
        }
        counters
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.core.stop.store(true, Ordering::Release);
        self.core.bell.set(true);
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
    }
}

impl Core {
    pub(crate) fn count(&self, name: &'static str, n: u64) {
        *lock(&self.counters).entry(name).or_default() += n;
    }

    /// The device's resources for a new connection, with its first receives posted.
    fn link(&self, id: CmId, machine: &Machine, number: u64) -> io::Result<Link> {
        let tuning = Tuning { answer_delay: Some(ANSWER_DELAY), ..id.tuning() };
        id.tune(tuning).map_err(io::Error::other)?;
        // A connection that was moved has the settings of its first service.
        let config = machine.config();
        let receives_most = u32::from(config.buffers) * 2 + 2 + u32::from(FAREWELL_RECEIVES);
        let sends_most = (SEND_SLOTS + MAX_RDMA) as u32;
        let cq = self.device.create_cq_with(CompletionQueueOptions {
            capacity: receives_most + sends_most,
            channel: Some(self.completions.clone()),
            context: number,
        });
        let cq = cq.map_err(io::Error::other)?;
        let options = QueuePairOptions {
            max_send_wr: sends_most,
            max_recv_wr: receives_most,
            max_send_sge: 1,
            max_recv_sge: 1,
            no_receive: NoReceive::Terminate,
            ..QueuePairOptions::default()
        };
        let qp = self.pd.create_qp(&cq, &cq, options).map_err(io::Error::other)?;
        let slots =
            SendSlots::new(&self.pd, config.desired_bytes.max(crate::wire::LEAST_BUFFER_BYTES) as usize);
        let mut link = Link {
            id,
            qp,
            cq,
            pd: self.pd.clone(),
            slots: slots.map_err(io::Error::other)?,
            receives: Receives::default(),
            rdma: 0,
            writes_posted: 0,
            writes_done: 0,
            established: false,
            reset_at: None,
            moving: None,
            sends: BTreeMap::new(),
            wants: BTreeMap::new(),
            written: VecDeque::new(),
        };
        let (count, bytes) = machine.receives_to_post();
        link.receives.post(&link.pd, &link.qp, count, bytes).map_err(io::Error::other)?;
        Ok(link)
    }

    /// Connects a stream again whose peer has suspended it, once its old connection has nothing left to send.
    fn move_on(self: &Arc<Self>, number: u64, socket: &Arc<Socket>) {
        let mut state = socket.lock();
        let Some(port) = state.port_to_reconnect(Instant::now()) else { return };
        let (Some((_, peer)), Some(link)) = (state.addresses(), &state.link) else { return };
        let target = SocketAddr::new(peer.ip(), port);
        let Some((old, _)) = lock(&self.sockets).remove(&number) else { return };
        lock(&self.targets).remove(&old);
        let number = self.next_number();
        let id = CmId::new(&self.device, &self.events);
        // The peer expects the same port.
        let made = id.bind_as(&link.id).map_err(io::Error::other).and_then(|()| {
            let key = id.key();
            // The identifier's events find the socket, whose lock is held until it waits for them.
            lock(&self.targets).insert(key, Target::Socket(Arc::clone(socket)));
            lock(&self.sockets).insert(number, (key, Arc::clone(socket)));
            state.reconnect(|machine| self.link(id, machine, number), target, SET_UP_LIMIT)
        });
        if let Err(error) = made {
            state.failed = Some((io::ErrorKind::ConnectionReset, error.to_string()));
        }
        socket.drive(&mut state);
    }

    fn next_number(&self) -> u64 {
        self.next_socket.fetch_add(1, Ordering::Relaxed)
    }

    /// An identifier for a connection; from the port of `local`, where 0 chooses one.
    pub(crate) fn identifier(&self, local: Option<SocketAddr>) -> io::Result<CmId> {
        let id = CmId::new(&self.device, &self.events);
        if let Some(local) = local {
            id.bind(local).map_err(|error| io::Error::new(io::ErrorKind::AddrInUse, error))?;
        }
        Ok(id)
    }

    /// Starts to connect `id` to `peer`.
    pub(crate) fn connect(self: &Arc<Self>, id: CmId, peer: SocketAddr) -> io::Result<Arc<Socket>> {
        let (machine, hello) = Machine::connect(&self.options.connection);
        let number = self.next_number();
        let key = id.key();
        let link = self.link(id, &machine, number)?;
        let socket = Socket::new(self, machine, link)?;
        let mut state = socket.lock();
        state.peer = Some(peer);
        state.hello = hello;
        lock(&self.targets).insert(key, Target::Socket(Arc::clone(&socket)));
        lock(&self.sockets).insert(number, (key, Arc::clone(&socket)));
        let resolving = state.link.as_ref().map(|link| link.id.resolve_address(peer, SET_UP_LIMIT));
        if let Some(Err(error)) = resolving {
            state.failed = Some((io::ErrorKind::AddrNotAvailable, error.to_string()));
        }
        drop(state);
        Ok(socket)
    }

    pub(crate) fn listen(&self, backlog: &Arc<Backlog>, key: CmKey) {
        lock(&self.targets).insert(key, Target::Listener(Arc::clone(backlog)));
    }

    pub(crate) fn unlisten(&self, key: CmKey) {
        lock(&self.targets).remove(&key);
    }

    /// MPA with SDP's settings. SDP over iWARP is defined over MPA only.
    pub(crate) fn framing(&self) -> FramingConfig {
        FramingConfig::Mpa(self.options.mpa())
    }

    /// A peer's request: its Hello is answered, or rejected.
    fn requested(self: &Arc<Self>, request: IncomingRequest, backlog: &Arc<Backlog>) -> io::Result<()> {
        if let Some(resumption) = &backlog.resumes {
            return self.requested_again(request, backlog, resumption);
        }
        let (local, peer) = (request.local, request.peer);
        let machine = Machine::accept(&self.options.connection, &request.private_data);
        self.establish(request.id, machine, (local, peer), backlog)
    }

    /// Accepts or rejects a request, for which there is `machine` or the violation of its Hello. The program is shown `local` and
    /// `peer`.
    pub(crate) fn establish(
        self: &Arc<Self>,
        id: CmId,
        machine: Result<Machine, Violation>,
        (local, peer): (SocketAddr, SocketAddr),
        backlog: &Arc<Backlog>,
    ) -> io::Result<()> {
        let machine = match machine {
            Ok(machine) => machine,
            Err(violation) => {
                tracing::debug!(%peer, %violation, "no SDP Hello");
                self.count(violation.counter(), 1);
                return id.reject(&[]).map_err(io::Error::other);
            }
        };
        if !backlog.reserve() {
            return id.reject(&[]).map_err(io::Error::other);
        }
        let (ird, ord) = (machine.ird(), machine.ord());
        let (number, key) = (self.next_number(), id.key());
        let made = self.link(id, &machine, number).and_then(|link| Socket::new(self, machine, link));
        let socket = made.inspect_err(|_| backlog.release())?;
        let mut state = socket.lock();
        (state.local, state.peer) = (Some(local), Some(peer));
        state.made_again = backlog.resumes.is_some();
        lock(&self.targets).insert(key, Target::Accepting(Arc::clone(&socket), Arc::clone(backlog)));
        lock(&self.sockets).insert(number, (key, Arc::clone(&socket)));
        let options = AcceptOptions { ird, ord, ..AcceptOptions::default() };
        let accepted = state.link.as_ref().map(|link| link.id.accept(&link.qp, options));
        if let Some(Err(error)) = accepted {
            state.failed = Some((io::ErrorKind::ConnectionAborted, error.to_string()));
        }
        Ok(())
    }

    fn event(self: &Arc<Self>, key: CmKey, kind: EventKind) {
        let target = match lock(&self.targets).get(&key) {
            Some(Target::Socket(socket)) => Target::Socket(Arc::clone(socket)),
            Some(Target::Listener(backlog)) => Target::Listener(Arc::clone(backlog)),
            Some(Target::Accepting(socket, backlog)) => {
                Target::Accepting(Arc::clone(socket), Arc::clone(backlog))
            }
            None => return,
        };
        match (target, kind) {
            (Target::Listener(backlog), EventKind::ConnectRequest(request)) => {
                if let Err(error) = self.requested(request, &backlog) {
                    tracing::warn!(%error, "a connection was not accepted");
                }
            }
            (Target::Listener(backlog), EventKind::DeviceFailed | EventKind::Closed(_)) => backlog.fail(),
            (Target::Listener(_), _) => {}
            (Target::Socket(socket), EventKind::RouteResolved) => {
                let mut state = socket.lock();
                let (ird, ord) = (state.machine.ird(), state.machine.ord());
                let private_data = std::mem::take(&mut state.hello);
                let framing = Some(self.framing());
                state.start(ConnectOptions { private_data, ird, ord, framing, ..ConnectOptions::default() });
                socket.drive(&mut state);
            }
            (Target::Socket(socket), kind) => {
                socket.event(kind);
            }
            (Target::Accepting(socket, backlog), kind) => {
                if socket.event(kind) {
                    lock(&self.targets).insert(key, Target::Socket(Arc::clone(&socket)));
                    backlog.push(socket);
                } else if socket.lock().is_over() {
                    lock(&self.targets).insert(key, Target::Socket(socket));
                    backlog.release();
                }
            }
        }
    }

    fn run(self: Arc<Self>) {
        let mut farewell = None;
        let mut next_tick = Instant::now();
        let mut looks = Looks { next: next_tick, nap: NAP[0], sleeps: 0, leads: true };
        loop {
            let woken = self.wait(&mut looks);
            if woken.is_err() && self.device.failure().is_some() {
                // The device may have failed before its event reached each socket; all waits then end at once.
                self.fail_all();
                thread::sleep(TICK);
            }
            // After a full nap, there is nothing to read.
            let woken = woken.unwrap_or(true);
            if woken {
                self.bell.set(false);
            }
            while woken && let Some(notification) = self.completions.poll() {
                let socket = lock(&self.sockets).get(&notification.context).map(|(_, s)| Arc::clone(s));
                if let Some(socket) = socket {
                    socket.turn();
                    self.move_on(notification.context, &socket);
                }
            }
            while woken && let Some(event) = self.events.poll() {
                self.event(event.id, event.kind);
            }
            let now = Instant::now();
            if now >= next_tick || self.stop.load(Ordering::Acquire) {
                next_tick = now + TICK;
                self.sweep(now);
            }
            if self.stop.load(Ordering::Acquire) {
                let end = *farewell.get_or_insert(now + FAREWELL);
                if now >= end || lock(&self.sockets).is_empty() || self.device.failure().is_some() {
                    lock(&self.sockets).clear();
                    lock(&self.polled).clear();
                    lock(&self.targets).clear();
                    return;
                }
            }
        }
    }

    /// Sleeps until there may be work, at most for a tick; false after a nap. Callers that poll run the device
    /// themselves.
    fn wait(&self, looks: &mut Looks) -> io::Result<bool> {
        let mut polled = std::mem::take(&mut *lock(&self.polled));
        let now = Instant::now();
        if now >= looks.next {
            let before = polled.len();
            polled.retain(|socket| socket.still_polled());
            looks.nap = if polled.len() < before { NAP[0] } else { (looks.nap * 2).min(NAP[1]) };
            looks.next = now + looks.nap;
        }
        if polled.is_empty() {
            looks.nap = NAP[0];
            let before = std::mem::replace(&mut looks.sleeps, self.sleeps.load(Ordering::Relaxed));
            if looks.sleeps == before && looks.leads {
                return self.device.wait(&self.waits, Some(TICK)).map(|_| true);
            }
            // Otherwise frames that arrive between two sleeps would wake this thread.
            let ready = self.rest(TICK)?;
            looks.leads = !ready && looks.sleeps == self.sleeps.load(Ordering::Relaxed);
            return Ok(true);
        }
        lock(&self.polled).append(&mut polled);
        self.rest(looks.next.saturating_duration_since(now))
    }

    /// Sleeps until there is a notification, without running the device.
    fn rest(&self, limit: Duration) -> io::Result<bool> {
        let limit: Option<Timespec> = limit.try_into().ok();
        match rustix::event::poll(&mut [PollFd::new(&self.waits, PollFlags::IN)], limit.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Records that a caller begins to poll a connection.
    pub(crate) fn polled(&self, socket: &Arc<Socket>) {
        lock(&self.polled).push(Arc::clone(socket));
        self.bell.set(true);
    }

    fn fail_all(&self) {
        let all: Vec<Arc<Socket>> =
            lock(&self.sockets).values().map(|(_, socket)| Arc::clone(socket)).collect();
        for socket in all {
            socket.event(EventKind::DeviceFailed);
        }
    }

    /// Checks time limits, and removes ended connections.
    fn sweep(self: &Arc<Self>, now: Instant) {
        let all: Vec<(u64, CmKey, Arc<Socket>)> =
            lock(&self.sockets).iter().map(|(n, (key, s))| (*n, *key, Arc::clone(s))).collect();
        for (number, key, socket) in all {
            let mut state = socket.lock();
            if state.orphaned.is_some_and(|since| now >= since + ORPHAN_LIMIT) {
                state.machine.abort();
            }
            state.check_answers(now);
            if !state.machine.is_open()
                && state.machine.ended().is_none()
                && state.established.is_some_and(|since| now >= since + SET_UP_LIMIT)
            {
                state.failed = Some((io::ErrorKind::TimedOut, "no HelloAck came".into()));
                state.machine.abort();
            }
            socket.drive(&mut state);
            drop(state);
            self.move_on(number, &socket);
            let mut state = socket.lock();
            if state.is_over() {
                // The queue pair and its memory are freed; the program may still read received data.
                let link = state.link.take();
                drop(state);
                drop(link);
                lock(&self.sockets).remove(&number);
                lock(&self.targets).remove(&key);
            }
        }
    }
}
