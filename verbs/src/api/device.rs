//! [`Device`]: an interface with engines on it; everything else is made from one.

use std::{
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use xwarp_rnic::{
    engine::{Engine, EngineConfig},
    rnic::{AsyncEvent, Limits, MOST_ENGINES, ResourceError},
};
use xwarp_tcp::{framing::FramingConfig, mpa::MpaConfig, tcp::TcpConfig};

use super::{
    async_event::AsyncEvents,
    channel::{CompletionChannel, CqNotification},
    cm::{ConnectOptions, Connecting, Connection, ConnectionError, ListenOptions, Listener, table::CmTable},
    completion::{CompletionQueue, CompletionQueueOptions},
    counters::Counters,
    engines::{self, Engines},
    failure::DeviceFailed,
    observer::Observer,
    progress::{
        Progress,
        lead::{self, Awaited, Led, OrSignal, Slept, drive},
        thread,
        waits::Waits,
    },
    protection::ProtectionDomain,
    shared::{Common, Setup, SharedEngine},
};
use crate::{
    interface::{Interface, InterfaceAttributes},
    observe,
    system::{self, lock, wait_readable},
    tap::{Recording, Tap, create_capture},
};

/// Threads that wait for neighbours at the same time; more resolutions are refused.
const MOST_RESOLVERS: usize = 64;
/// Longest wait between two checks while a closing device waits for its connections.
const FAREWELL_WAIT: Duration = Duration::from_millis(5);

/// Options of a device.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Number of engines that share the queues of the interface, each with a lock and a progress thread of its own. Several engines
    /// let several threads of the application send and receive at the same time, if each thread uses completion queues and
    /// queue pairs of its own ([`QueuePair::engine`](super::QueuePair::engine)). The interface needs a queue for each engine, and
    /// a device of the helper has one engine.
    pub engines: u16,
    /// Which threads run the engines.
    pub progress: Progress,
    /// Longest time that closing the device waits until its connections are acknowledged and closed at both ends. The
    /// remaining connections are then reset.
    pub linger: Duration,
    /// A pcapng file to which every frame is recorded. While another device writes this file, the process id is added to the name.
    pub capture: Option<PathBuf>,
    /// Answer `xwarp stat` and `xwarp capture` of the same user and of root, on a socket (see [`crate::observe`]) and a
    /// thread. The environment variable `XWARP_OBSERVE=1` does the same. A device that cannot be observed is opened
    /// nevertheless, with a warning in the log.
    pub observe: bool,
    /// Framing, with its start-up settings, of connections and listeners that have none of their own. By default MPA, whose
    /// initiators ask for peer-to-peer mode ([`MpaConfig::either_speaks_first`](crate::MpaConfig::either_speaks_first)), so
    /// that a service may send before its clients do.
    pub framing: FramingConfig,
    /// TCP settings of all connections. Keepalive, user timeout, DSCP and hop limit can be changed for a single
    /// connection: [`CmId::tune`](super::cm::CmId::tune).
    pub tcp: TcpConfig,
    /// Most objects and largest queues.
    pub limits: Limits,
    /// Settings of the AF_XDP driver.
    #[cfg(feature = "af-xdp")]
    pub driver: xwarp_driver::DriverConfig,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            engines: 1,
            progress: Progress::default(),
            linger: Duration::from_secs(1),
            capture: None,
            observe: false,
            framing: MpaConfig::default().either_speaks_first().into(),
            tcp: TcpConfig::default(),
            limits: Limits::default(),
            #[cfg(feature = "af-xdp")]
            driver: xwarp_driver::DriverConfig::default(),
        }
    }
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The interface could not be opened; the text has a remedy.
    #[cfg(feature = "af-xdp")]
    #[error(transparent)]
    Interface(#[from] xwarp_driver::OpenError),
    /// The capture file cannot be written.
    #[error("cannot write the capture file {path}")]
    Capture {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The operating system refused a thread or a descriptor.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The attributes of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAttributes {
    /// The network interface.
    pub interface: InterfaceAttributes,
    /// Number of engines.
    pub engines: u16,
    /// Most objects and largest queues.
    pub limits: Limits,
    /// Which threads run the engines.
    pub progress: Progress,
}

/// An RNIC: a network interface with one or more engines. Clones are handles to the same device.
///
/// A device with several engines ([`DeviceOptions::engines`]) is used like one with a single engine: regions, completion queues and
/// shared receive queues serve queue pairs of all engines, and a listener accepts in all of them. A connection lives in the engine
/// of the queue on which it began, and an idle queue pair moves to the engine of its connection.
///
/// Every object that was created from a device keeps it open. When the last object and the last handle are dropped, the
/// device closes its connections in order (see [`DeviceOptions::linger`]) and releases the interface.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

pub(crate) struct DeviceInner {
    engines: Engines,
    /// One for each engine.
    seats: Vec<Seat>,
    resolvers: Mutex<Vec<JoinHandle<()>>>,
    progress: Progress,
    linger: Duration,
    observer: Mutex<Option<Observer>>,
    recording: Option<Arc<Recording>>,
}

/// What waits for the frames of one engine.
struct Seat {
    waits: Arc<Waits>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The recording of a device whose frames are recorded or may be.
fn recording(
    interface: &str,
    capture: Option<PathBuf>,
    observe: bool,
) -> Result<Option<Arc<Recording>>, OpenError> {
    if capture.is_none() && !observe {
        return Ok(None);
    }
    let recording = Recording::new(interface.into());
    if let Some(path) = capture {
        let started = create_capture(&path).and_then(|file| recording.start_file(Box::new(file)));
        started.map_err(|source| OpenError::Capture { path, source })?;
    }
    Ok(Some(Arc::new(recording)))
}

impl DeviceInner {
    /// Runs the engine until every connection has ended at both ends, at most for `limit`, and writes all recorded frames to
    /// their file. Returns whether all have ended.
    fn drain(&self, limit: Duration) -> bool {
        let drained = self.run_until_closed(limit);
        if let Some(recording) = &self.recording {
            recording.flush();
        }
        drained
    }

    fn run_until_closed(&self, limit: Duration) -> bool {
        let first = self.engines.first();
        let end = first.clock().now() + limit;
        let closed = |engine: &Arc<SharedEngine>| {
            engine.look(|state| state.engine.stack().unfinished_connections() == 0).unwrap_or(true)
        };
        while !first.failed() {
            self.engines.all().iter().for_each(|engine| engine.progress());
            if self.engines.all().iter().all(closed) {
                return true;
            }
            let now = first.clock().now();
            if now >= end || wait_readable(self.readiness(), Some(end.since(now).min(FAREWELL_WAIT))).is_err()
            {
                break;
            }
        }
        false
    }

    /// The descriptors of all engines.
    fn readiness(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.seats.iter().flat_map(|seat| seat.waits.readiness())
    }

    fn observe(&self, recording: Arc<Recording>, interface: &str) {
        match Observer::start(self.engines.all().to_vec(), recording, interface) {
            Ok(observer) => *lock(&self.observer) = Some(observer),
            Err(error) => tracing::warn!(interface, %error, "the device cannot be observed"),
        }
    }
}

impl Seat {
    /// A seat for an engine that runs: `readiness` are the descriptors of its part of the interface.
    fn new(engine: &Arc<SharedEngine>, readiness: Vec<OwnedFd>, interface: &str) -> io::Result<Self> {
        let waits = Arc::new(Waits::new(engine, readiness)?);
        let thread = engine.has_thread().then(|| thread::spawn(engine, &waits, interface)).transpose()?;
        Ok(Self { waits, thread: Mutex::new(thread) })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.shared().interface().name;
        f.debug_tuple("Device").field(&name).finish()
    }
}

impl Device {
    /// Opens the interface with this name or IP address with AF_XDP, with default options: through the helper `xwarpd` if it answers and shares this
    /// interface, else the interface itself, which needs privileges. [`InterfaceAttributes::shared`] has the choice.
    #[cfg(feature = "af-xdp")]
    pub fn open(name: &str) -> Result<Self, OpenError> {
        Self::open_with(name, DeviceOptions::default())
    }

    /// Opens the interface `name` with AF_XDP.
    #[cfg(feature = "af-xdp")]
    pub fn open_with(name: &str, options: DeviceOptions) -> Result<Self, OpenError> {
        use crate::af_xdp::AfXdp;

        let parts = match options.engines {
            0 | 1 => vec![AfXdp::open(name, &options.driver)?],
            engines => AfXdp::open_several(name, engines, &options.driver)?,
        };
        let parts = parts.into_iter().map(|part| Box::new(part) as Box<dyn Interface>);
        Self::over_parts(parts.collect(), options)
    }

    /// Opens a device over the caller's own [`Interface`], for instance an end of the in-memory fabric (`sim::pair` with
    /// feature `sim`). It has one engine.
    pub fn over(interface: Box<dyn Interface>, options: DeviceOptions) -> Result<Self, OpenError> {
        Self::over_parts(vec![interface], options)
    }

    /// Opens a device over the parts of one interface, for instance an end of `sim::queues` with feature `sim`. It has an engine for
    /// each part, at most 64, whatever [`DeviceOptions::engines`] says.
    pub fn over_parts(parts: Vec<Box<dyn Interface>>, options: DeviceOptions) -> Result<Self, OpenError> {
        let observe = options.observe || observe::is_asked_for();
        let none = || io::Error::new(io::ErrorKind::InvalidInput, "a device has 1 to 64 engines");
        let attributes =
            parts.first().filter(|_| parts.len() <= MOST_ENGINES.into()).ok_or_else(none)?.attributes();
        tracing::debug!(interface = attributes.name, shared = attributes.shared, mode = %attributes.mode, engines = parts.len(), mtu = attributes.mtu, "device opened");
        let recording = recording(&attributes.name, options.capture.clone(), observe)?;
        let common = Arc::new(Common::new(options.limits.clone())?);
        let mut engines = Vec::with_capacity(parts.len());
        let mut readiness = Vec::with_capacity(parts.len());
        for part in parts {
            let part = match &recording {
                Some(recording) => Box::new(Tap::new(part, recording)),
                None => part,
            };
            readiness.push(part.readiness()?);
            engines.push(engine(part, &options, &common)?);
        }
        let engines = Engines::new(engines).ok_or_else(none)?;
        let seats = engines.all().iter().zip(readiness);
        let seats = seats.map(|(engine, readiness)| Seat::new(engine, readiness, &attributes.name));
        let inner = Arc::new(DeviceInner {
            seats: seats.collect::<io::Result<_>>()?,
            engines,
            resolvers: Mutex::default(),
            progress: options.progress,
            linger: options.linger,
            observer: Mutex::default(),
            recording,
        });
        if let Some(recording) = inner.recording.as_ref().filter(|_| observe) {
            inner.observe(Arc::clone(recording), &attributes.name);
        }
        for engine in inner.engines.all() {
            engine.with(|state, _| state.cm.belongs_to(Arc::downgrade(&inner)));
        }
        Ok(Self(inner))
    }

    pub(super) fn from_inner(inner: Arc<DeviceInner>) -> Self {
        Self(inner)
    }

    /// The first engine, for what concerns the device or any engine.
    pub(super) fn shared(&self) -> &Arc<SharedEngine> {
        self.0.engines.first()
    }

    #[inline]
    pub(super) fn engines(&self) -> &Engines {
        &self.0.engines
    }

    /// Whether both are handles to the same device.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The device's current attributes.
    pub fn attributes(&self) -> DeviceAttributes {
        DeviceAttributes {
            interface: engines::attributes(self.engines().all(), self.shared()),
            engines: self.engines().all().len() as u16,
            limits: self.shared().limits().clone(),
            progress: self.0.progress,
        }
    }

    /// All counters of the device, by stable names. Those of one connection: [`QueuePair::counters`].
    ///
    /// [`QueuePair::counters`]: super::QueuePair::counters
    pub fn counters(&self) -> Counters {
        Counters::of_device(self.engines().all())
    }

    /// The asynchronous events of the device, from its opening on: of its queues, its connections and its port. All callers
    /// share them.
    pub fn async_events(&self) -> AsyncEvents {
        self.shared().common().async_events().events()
    }

    /// Adds a reader of the asynchronous events: it gets each event from now on that `wants` chooses, whether or not other
    /// readers take it too. `wants` runs inside the engine and must not call verbs.
    pub fn subscribe_async_events(
        &self,
        wants: impl Fn(&AsyncEvent) -> bool + Send + 'static,
    ) -> io::Result<AsyncEvents> {
        self.shared().common().async_events().subscribe(wants)
    }

    /// Creates a protection domain: a set of regions and queue pairs that may work together.
    pub fn create_pd(&self) -> Result<ProtectionDomain, ResourceError> {
        ProtectionDomain::create(self)
    }

    /// Creates a completion queue for `capacity` entries, to be polled.
    pub fn create_cq(&self, capacity: u32) -> Result<CompletionQueue, ResourceError> {
        self.create_cq_with(CompletionQueueOptions { capacity, ..Default::default() })
    }

    /// Creates a completion queue for `capacity` entries that notifies on `channel`.
    pub fn create_cq_with_channel(
        &self,
        capacity: u32,
        channel: &CompletionChannel,
    ) -> Result<CompletionQueue, ResourceError> {
        let channel = Some(channel.clone());
        self.create_cq_with(CompletionQueueOptions { capacity, channel, ..Default::default() })
    }

    /// Creates a completion queue with options.
    pub fn create_cq_with(&self, options: CompletionQueueOptions) -> Result<CompletionQueue, ResourceError> {
        CompletionQueue::create(self, options)
    }

    /// Connects `qp` to the listener at `peer` and waits until the connection is established, at most for `limit`.
    pub fn connect(
        &self,
        qp: &super::QueuePair,
        peer: SocketAddr,
        options: ConnectOptions,
        limit: Duration,
    ) -> Result<Connection, ConnectionError> {
        let end = self.shared().clock().now() + limit;
        let connecting = self.start_connect(qp, peer, options, limit)?;
        connecting.wait(end.since(self.shared().clock().now()))
    }

    /// Starts to connect `qp` to the listener at `peer`, without waiting. The next hop is resolved within
    /// `resolve_limit`; then TCP's and MPA's own time-outs bound the attempt. Single steps are [`CmId`](super::cm::CmId)'s.
    pub fn start_connect<'qp>(
        &self,
        qp: &'qp super::QueuePair,
        peer: SocketAddr,
        options: ConnectOptions,
        resolve_limit: Duration,
    ) -> Result<Connecting<'qp>, ConnectionError> {
        Connecting::start(self, qp, peer, options, resolve_limit)
    }

    /// Listens at `address`. The IP address may be a wildcard; port 0 chooses a free port.
    pub fn listen(&self, address: SocketAddr, options: ListenOptions) -> Result<Listener, ConnectionError> {
        Listener::new(self, address, options)
    }

    /// The reason for a failure of the device, if any: a panic inside its engine, or because this process is a child
    /// (`fork`) of the one that opened it. In a child, verbs return an error and change nothing; the parent's device is
    /// not affected. A panic makes a device fail: all work is flushed as far as possible, verbs return an error that
    /// says so, waits end, and [`AsyncEvent::DeviceFatal`] is the last asynchronous event. The interface is closed, so
    /// that the kernel resets the connections of peers. Registered memory is no longer accessed.
    ///
    /// `None` for a device whose interface was removed, although it also raises [`AsyncEvent::DeviceFatal`]: its engine still
    /// runs, its objects can be queried, and its connections end with
    /// [`CloseReason::InterfaceRemoved`](crate::CloseReason::InterfaceRemoved).
    pub fn failure(&self) -> Option<DeviceFailed> {
        self.shared().failure().cloned()
    }

    /// Runs the engines until no frame is left to receive, but for a bounded number of frames. Needed only with
    /// [`Progress::Application`], by an application that does not poll for a while.
    pub fn progress(&self) {
        self.engines().all().iter().for_each(|engine| engine.progress());
    }

    /// Waits until every connection of the device has ended at both ends, at most for `limit`, and runs the engine meanwhile; returns
    /// whether all have. For a process that disconnects and exits while other objects still hold the device: dropping the device
    /// does the same.
    pub fn drain(&self, limit: Duration) -> bool {
        self.0.drain(limit)
    }

    /// Waits until `fd` (any channel, listener, connection or other descriptor) is readable, at most for `limit`;
    /// returns whether it is. Runs the engine meanwhile, unless another thread waits already, the device has several engines, or it
    /// has [`Progress::Thread`]: then the progress threads run them.
    pub fn wait(&self, fd: impl AsFd, limit: Option<Duration>) -> io::Result<bool> {
        let only = (!self.engines().are_several()).then_some(0);
        Ok(self.wait_for(only, &fd.as_fd(), limit)?.is_some())
    }

    /// Waits for a notification on `channel`, at most for `limit`, like [`wait`](Self::wait) and then
    /// [`CompletionChannel::poll`], with fewer system calls.
    pub fn wait_notification(
        &self,
        channel: &CompletionChannel,
        limit: Option<Duration>,
    ) -> io::Result<Option<CqNotification>> {
        let only = (!self.engines().are_several()).then_some(0);
        self.wait_for(only, channel, limit)
    }

    /// Runs the engine until `fd` is readable, at most for `limit`; returns whether it is. Unlike [`wait`](Self::wait), returns at once
    /// where another thread runs the engine: the caller then waits in another way. Fails with [`io::ErrorKind::Interrupted`] when a
    /// signal handler has run meanwhile.
    pub fn attend(&self, fd: impl AsFd, limit: Duration) -> io::Result<bool> {
        Ok(self.attend_for(&fd.as_fd(), limit)?.is_some())
    }

    /// Like [`attend`](Self::attend), for a notification on `channel`, which is returned.
    pub fn attend_notification(
        &self,
        channel: &CompletionChannel,
        limit: Duration,
    ) -> io::Result<Option<CqNotification>> {
        self.attend_for(channel, limit)
    }

    fn attend_for<A: Awaited>(&self, awaited: &A, limit: Duration) -> io::Result<Option<A::Event>> {
        if let Some(failure) = self.shared().failure() {
            return Err(failure.clone().into());
        }
        let only = (!self.engines().are_several()).then_some(0);
        match self.lead(only, &OrSignal(awaited), Some(limit))? {
            Led::Found(found) => Ok(Some(found)),
            Led::Interrupted => Err(io::ErrorKind::Interrupted.into()),
            Led::TimedOut | Led::Elsewhere => Ok(None),
        }
    }

    /// Waits for an event that the engine `only` will cause.
    pub(super) fn wait_for<A: Awaited>(
        &self,
        only: Option<u16>,
        awaited: &A,
        limit: Option<Duration>,
    ) -> io::Result<Option<A::Event>> {
        let first = self.shared();
        if let (true, Some(failure)) = (first.inherited(), first.failure()) {
            return Err(failure.clone().into());
        }
        let end = limit.map(|limit| first.clock().now() + limit);
        if first.has_thread() {
            match self.lead(only, awaited, limit)? {
                Led::Found(found) => return Ok(Some(found)),
                Led::TimedOut => return Ok(None),
                Led::Interrupted | Led::Elsewhere => {}
            }
        }
        loop {
            let limit = end.map(|end| end.since(first.clock().now()));
            let readable = if first.has_thread() {
                wait_readable([awaited.fd(), first.failure_bell()], limit)?
            } else {
                let link: Vec<BorrowedFd<'_>> = self.0.readiness().collect();
                drive(self.engines(), awaited.fd(), &link, limit)?
            };
            // An event that is there takes precedence over the failure.
            match (awaited.take(readable && first.failure().is_none())?, first.failure()) {
                (Some(found), _) => return Ok(Some(found)),
                (None, Some(failure)) => return Err(failure.clone().into()),
                (None, None) if !readable || limit.is_some_and(|limit| limit.is_zero()) => return Ok(None),
                // Another thread was faster.
                (None, None) => {}
            }
        }
    }

    /// Runs the engine `only`, if it is known, while it waits; see [`lead::lead`].
    fn lead<A: Awaited>(
        &self,
        only: Option<u16>,
        awaited: &A,
        limit: Option<Duration>,
    ) -> io::Result<Led<A::Event>> {
        let Some(number) = only else {
            self.engines().all().iter().for_each(|engine| engine.application_sleeps());
            return Ok(Led::Elsewhere);
        };
        let engine = self.engines().get(number);
        engine.application_sleeps();
        match self.0.seats.get(usize::from(number)).filter(|_| engine.application_progress()) {
            Some(seat) => lead::lead(&seat.waits, engine, awaited, limit),
            None => Ok(Led::Elsewhere),
        }
    }

    /// See [`CompletionQueue::sleep`]; the queue is that of the engine `only`.
    pub(super) fn sleep(
        &self,
        only: Option<u16>,
        attend: impl Fn(bool),
        limit: Option<Duration>,
    ) -> io::Result<Slept> {
        let number = only.filter(|_| self.0.progress == Progress::Auto).unwrap_or(u16::MAX);
        match (self.engines().get(number), self.0.seats.get(usize::from(number))) {
            (engine, Some(seat)) if !engine.failed() => lead::sleep(&seat.waits, engine, attend, limit),
            _ => Ok(Slept::Refused),
        }
    }

    /// Ends the present [`sleep`](CompletionQueue::sleep) on a queue of the device, or else the next one. Takes no lock.
    pub fn end_sleep(&self) {
        self.0.seats.iter().for_each(|seat| seat.waits.end_sleep());
    }

    /// Runs `f` on a thread of its own, which is waited for when the device is closed.
    pub(super) fn spawn_resolver(
        &self,
        engine: &Arc<SharedEngine>,
        f: impl FnOnce(&SharedEngine) + Send + 'static,
    ) -> io::Result<()> {
        let mut running = lock(&self.0.resolvers);
        running.retain(|thread| !thread.is_finished());
        if running.len() >= MOST_RESOLVERS {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "too many addresses are being resolved"));
        }
        let engine = Arc::clone(engine);
        running.push(system::spawn("xwarp-resolve".into(), move || f(&engine))?);
        Ok(())
    }
}

/// Checks the destruction of an object. It fails only while other objects use it; `why` states why this cannot happen.
pub(super) fn destroyed(result: Result<(), ResourceError>, why: &str) {
    if let Err(error) = result
        && error != ResourceError::DeviceFailed
    {
        tracing::error!(%error, "an object was not destroyed, although {why}");
    }
}

/// An engine on a part of an interface.
fn engine(
    part: Box<dyn Interface>,
    options: &DeviceOptions,
    common: &Arc<Common>,
) -> io::Result<Arc<SharedEngine>> {
    let resolver = part.resolver();
    let config = EngineConfig {
        secret: system::secret()?,
        tcp: options.tcp,
        framing: options.framing.clone(),
        ..EngineConfig::default()
    };
    let engine = Engine::over(Arc::clone(common.registry()), config);
    let cm = CmTable::new(options.tcp.time_wait, Arc::clone(common.ports()), engine.rnic().number());
    let setup = Setup {
        common: Arc::clone(common),
        engine,
        link: part,
        cm,
        application_progress: options.progress != Progress::Thread,
        has_thread: options.progress != Progress::Application,
    };
    Ok(Arc::new(SharedEngine::new(setup, resolver)?))
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        let threads = || self.seats.iter().filter_map(|seat| lock(&seat.thread).take());
        if self.engines.first().inherited() {
            // The parent still uses descriptors, ports and programs of the device, and its threads are not in this process.
            for engine in self.engines.all() {
                std::mem::forget(Arc::clone(engine));
            }
            threads().for_each(std::mem::forget);
            std::mem::forget(lock(&self.observer).take());
            std::mem::forget(std::mem::take(&mut *lock(&self.resolvers)));
            return;
        }
        let observer = lock(&self.observer).take();
        drop(observer);
        self.engines.all().iter().for_each(|engine| engine.stop());
        let resolvers = std::mem::take(&mut *lock(&self.resolvers));
        for thread in threads().chain(resolvers) {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
        self.drain(self.linger);
        // The peers of the remaining connections are reset, so that they do not wait for their time-outs.
        for engine in self.engines.all() {
            engine.with(|state, _| state.engine.abort_unfinished());
        }
    }
}
