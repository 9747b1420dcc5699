//! [`Device`]: an interface with an engine on it; everything else is made from one.

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
    rnic::{AsyncEvent, Limits, Registry, ResourceError},
};
use xwarp_tcp::{framing::FramingConfig, tcp::TcpConfig};

use super::{
    async_event::AsyncEvents,
    cm::{
        ConnectOptions, Connecting, Connection, ConnectionError, ListenOptions, Listener, ports::Ports,
        table::CmTable,
    },
    completion::{CompletionChannel, CompletionQueue, CompletionQueueOptions},
    counters::Counters,
    failure::DeviceFailed,
    observer::Observer,
    progress::{self, Progress},
    protection::ProtectionDomain,
    shared::{DeviceCore, Setup},
    sleep::Front,
};
use crate::{
    interface::{Interface, InterfaceAttributes},
    observe::OBSERVE_VARIABLE,
    system::{self, Clock, WaitSet, lock, wait_readable},
    tap::{Recording, Tap},
};

/// Threads that wait for neighbours at the same time; more resolutions are refused.
const MOST_RESOLVERS: usize = 64;
/// Longest wait between two checks while a closing device waits for its connections.
const FAREWELL_WAIT: Duration = Duration::from_millis(5);

/// Options of a device.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Which threads run the engine.
    pub progress: Progress,
    /// Longest time that closing the device waits until its connections are acknowledged and closed at both ends. Those
    /// that are left then are reset.
    pub linger: Duration,
    /// A pcapng file to which every frame is recorded.
    pub capture: Option<PathBuf>,
    /// Answer `xwarp stat` and `xwarp capture` of the same user and of root, on a socket (see [`crate::observe`]) and a thread.
    /// The environment variable `XWARP_OBSERVE=1` does the same. A device that cannot be observed is opened nevertheless, with a
    /// warning in the log.
    pub observe: bool,
    /// Framing, with its start-up settings, of connections and listeners that have none of their own.
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
            progress: Progress::default(),
            linger: Duration::from_secs(1),
            capture: None,
            observe: false,
            framing: FramingConfig::default(),
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
    /// The interface could not be opened; the text says what to do.
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
    /// Most objects and largest queues.
    pub limits: Limits,
    /// Which threads run the engine.
    pub progress: Progress,
}

/// An RNIC: a network interface with an engine. Clones are handles to the same device.
///
/// Every object that was created from a device keeps it open. When the last object and the last handle are dropped, the
/// device closes its connections in order (see [`DeviceOptions::linger`]) and releases the interface.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

pub(crate) struct DeviceInner {
    shared: Arc<DeviceCore>,
    thread: Mutex<Option<JoinHandle<()>>>,
    resolvers: Mutex<Vec<JoinHandle<()>>>,
    /// Descriptors that are readable while frames or changes wait, for threads that run the engine while they wait.
    readiness: Vec<OwnedFd>,
    front: Front,
    progress: Progress,
    linger: Duration,
    observer: Mutex<Option<Observer>>,
    recording: Option<Arc<Recording>>,
}

/// What the devices of one interface have in common.
struct Common {
    ports: Arc<Ports>,
    registry: Arc<Registry>,
}

impl Common {
    fn new(options: &DeviceOptions) -> io::Result<Self> {
        let registry = Registry::new(options.limits.clone(), &system::secret()?);
        Ok(Self { ports: Arc::default(), registry: Arc::new(registry) })
    }
}

/// An interface, and the switch of its tap, if it has one.
type Tapped = (Box<dyn Interface>, Option<Arc<Recording>>);

/// Puts a tap on the interface, if its frames are recorded or may be.
fn tapped(
    interface: Box<dyn Interface>,
    capture: Option<PathBuf>,
    observe: bool,
) -> Result<Tapped, OpenError> {
    let tap = match capture {
        None if !observe => return Ok((interface, None)),
        None => Tap::idle(interface),
        Some(path) => {
            let file = std::fs::File::create(&path)
                .map_err(|source| OpenError::Capture { path: path.clone(), source })?;
            Tap::new(interface, Box::new(file)).map_err(|source| OpenError::Capture { path, source })?
        }
    };
    let recording = tap.recording();
    Ok((Box::new(tap), Some(recording)))
}

/// The capture file of the device with this number, of several on one interface.
#[cfg(any(feature = "af-xdp", test))]
fn numbered(path: &std::path::Path, number: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if number > 0 {
        name.push(format!(".{number}"));
    }
    name.into()
}

/// Whether an environment variable is set, to something other than `0`.
fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
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
        let clock = self.shared.clock;
        let end = clock.now() + limit;
        while !self.shared.failed() {
            self.shared.progress();
            if self.shared.look(|state| state.engine.stack().unfinished_connections() == 0) {
                return true;
            }
            let now = clock.now();
            let fds = self.readiness.iter().map(AsFd::as_fd);
            if now >= end || wait_readable(fds, Some(end.since(now).min(FAREWELL_WAIT))).is_err() {
                break;
            }
        }
        false
    }

    fn observe(&self, recording: Arc<Recording>, interface: &str) {
        match Observer::start(Arc::clone(&self.shared), recording, interface) {
            Ok(observer) => *lock(&self.observer) = Some(observer),
            Err(error) => tracing::warn!(interface, %error, "the device cannot be observed"),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.shared.look(|state| state.link.attributes().name);
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
        let interface = crate::af_xdp::AfXdp::open(name, &options.driver)?;
        Self::over(Box::new(interface), options)
    }

    /// Opens the interface `name` for `count` devices that run in parallel: each has its own engine, lock and progress thread, and
    /// every `count`-th queue of the interface, with sockets and frame memory of its own. They share the interface's XDP program
    /// and its ports, and keys and completion queues: a region can serve queue pairs of all of them
    /// ([`ProtectionDomain::at`]), and so can a completion queue. A poll runs the engine of the device that created the queue, so
    /// the others need progress threads. Queue pairs and shared receive queues belong to one device each. Objects of all devices
    /// count together towards [`DeviceOptions::limits`], except shared receive queues.
    ///
    /// Several of the devices can listen at one port: the request appears at the device that has the queue on which the SYN
    /// arrived. A connection stays with its device. Frames of it that arrive on a queue of another device are handed over, at the
    /// cost of a copy; the counter `stack.handed_over` shows them. Put each device to the thread that uses it.
    ///
    /// [`DeviceOptions::capture`] names the file of the first device; those of the others end in `.1`, `.2` and so on. Fails if the
    /// interface has fewer than `count` queues. A helper's devices on a shared interface have one queue each: open several of them
    /// by [`open_with`](Self::open_with) instead.
    #[cfg(feature = "af-xdp")]
    pub fn open_several(name: &str, count: u16, options: &DeviceOptions) -> Result<Vec<Self>, OpenError> {
        let parts = crate::af_xdp::AfXdp::open_several(name, count, &options.driver)?;
        Self::several(parts.into_iter().map(|part| Box::new(part) as Box<dyn Interface>), options)
    }

    /// A device on each of `parts`, which are one interface's.
    #[cfg(any(feature = "af-xdp", test))]
    pub(super) fn several(
        parts: impl IntoIterator<Item = Box<dyn Interface>>,
        options: &DeviceOptions,
    ) -> Result<Vec<Self>, OpenError> {
        let common = Common::new(options)?;
        let open = |(number, part)| {
            let capture = options.capture.as_ref().map(|path| numbered(path, number));
            Self::with_common(part, DeviceOptions { capture, ..options.clone() }, &common)
        };
        let devices = parts.into_iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
        let cores: Vec<_> = devices.iter().map(Self::shared).collect();
        DeviceCore::join(&cores);
        Ok(devices)
    }

    /// Opens a device over the caller's own [`Interface`], for instance an end of the in-memory fabric (`sim::pair` with
    /// feature `sim`).
    pub fn over(interface: Box<dyn Interface>, options: DeviceOptions) -> Result<Self, OpenError> {
        let common = Common::new(&options)?;
        Self::with_common(interface, options, &common)
    }

    /// A device that has `common` in common with the others of its interface.
    fn with_common(
        interface: Box<dyn Interface>,
        options: DeviceOptions,
        common: &Common,
    ) -> Result<Self, OpenError> {
        let observe = options.observe || is_set(OBSERVE_VARIABLE);
        let (interface, recording) = tapped(interface, options.capture, observe)?;
        let attributes = interface.attributes();
        tracing::debug!(interface = attributes.name, shared = attributes.shared, mode = %attributes.mode, queues = attributes.queues, mtu = attributes.mtu, "device opened");
        let readiness = interface.readiness()?;
        let resolver = interface.resolver();
        let config = EngineConfig {
            secret: system::secret()?,
            tcp: options.tcp,
            framing: options.framing,
            ..EngineConfig::default()
        };
        let engine = Engine::over(Arc::clone(&common.registry), config);
        let has_thread = options.progress != Progress::Application;
        let clock = Clock::start();
        let time_wait = options.tcp.time_wait;
        let cm = CmTable::new(time_wait, Arc::clone(&common.ports));
        let application_progress = options.progress != Progress::Thread;
        let setup = Setup { engine, link: interface, cm, clock, application_progress, has_thread };
        let shared = Arc::new(DeviceCore::new(setup, resolver)?);
        let set = |bell| WaitSet::new(readiness.iter().map(AsFd::as_fd), bell);
        let front = Front::new(set(shared.failure_bell())?);
        let behind = set(shared.doorbell())?;
        let inner = Arc::new(DeviceInner {
            shared,
            front,
            thread: Mutex::default(),
            resolvers: Mutex::default(),
            readiness,
            progress: options.progress,
            linger: options.linger,
            observer: Mutex::default(),
            recording,
        });
        if let Some(recording) = inner.recording.as_ref().filter(|_| observe) {
            inner.observe(Arc::clone(recording), &attributes.name);
        }
        inner.shared.with(|state, _| state.cm.belongs_to(Arc::downgrade(&inner)));
        if has_thread {
            let thread = progress::spawn(&inner.shared, &attributes.name, behind)?;
            *lock(&inner.thread) = Some(thread);
        }
        Ok(Self(inner))
    }

    pub(super) fn from_inner(inner: Arc<DeviceInner>) -> Self {
        Self(inner)
    }

    pub(super) fn shared(&self) -> &Arc<DeviceCore> {
        &self.0.shared
    }

    /// Whether both are handles to the same device.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The device's current attributes.
    pub fn attributes(&self) -> DeviceAttributes {
        DeviceAttributes {
            interface: self.0.shared.look(|state| state.link.attributes()),
            limits: self.0.shared.look(|state| state.engine.rnic().limits().clone()),
            progress: self.0.progress,
        }
    }

    /// All counters of the device, by stable names. Those of one connection: [`QueuePair::counters`].
    ///
    /// [`QueuePair::counters`]: super::QueuePair::counters
    pub fn counters(&self) -> Counters {
        self.0.shared.look(Counters::collect)
    }

    /// The asynchronous events of the device, from its opening on: of its queues, its connections and its port. All callers
    /// share them.
    pub fn async_events(&self) -> AsyncEvents {
        self.0.shared.async_events.events()
    }

    /// Adds a reader of the asynchronous events: it gets each event from now on that `wants` chooses, whether or not other
    /// readers take it too. `wants` runs inside the engine and must not call verbs.
    pub fn subscribe_async_events(
        &self,
        wants: impl Fn(&AsyncEvent) -> bool + Send + 'static,
    ) -> io::Result<AsyncEvents> {
        self.0.shared.async_events.subscribe(wants)
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
        let end = self.0.shared.clock.now() + limit;
        let connecting = self.start_connect(qp, peer, options, limit)?;
        connecting.wait(end.since(self.0.shared.clock.now()))
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

    /// Why the device has failed, if it has: a panic inside its engine, or because this process is a child (`fork`) of the one that
    /// opened it. In a child, verbs return an error and change nothing; the parent goes on. A panic makes a device fail: all work is flushed as far as
    /// that is possible, verbs return an error that says so, waits end, and [`AsyncEvent::DeviceFatal`] is the last
    /// asynchronous event. The interface is closed, so that the kernel resets the connections of peers. Registered memory is not
    /// accessed any more.
    ///
    /// `None` for a device whose interface was removed, although it also raises [`AsyncEvent::DeviceFatal`]: its engine still
    /// runs, its objects can be queried, and its connections end with
    /// [`CloseReason::InterfaceRemoved`](crate::CloseReason::InterfaceRemoved).
    pub fn failure(&self) -> Option<DeviceFailed> {
        self.0.shared.failure().cloned()
    }

    /// Runs the engine until no frame is left to receive, but for a bounded number of frames. Needed only with
    /// [`Progress::Application`], by an application that does not poll for a while.
    pub fn progress(&self) {
        self.0.shared.progress();
    }

    /// Waits until every connection of the device has ended at both ends, at most for `limit`, and runs the engine meanwhile; returns
    /// whether all have. For a process that disconnects and exits while other objects still hold the device: dropping the device
    /// does the same.
    pub fn drain(&self, limit: Duration) -> bool {
        self.0.drain(limit)
    }

    /// Waits until `fd` (any channel, listener, connection or other descriptor) is readable, at most for `limit`;
    /// returns whether it is. Runs the engine meanwhile, unless another thread waits already or the device has
    /// [`Progress::Thread`].
    pub fn wait(&self, fd: impl AsFd, limit: Option<Duration>) -> io::Result<bool> {
        let shared = &self.0.shared;
        if let (true, Some(failure)) = (shared.inherited(), shared.failure()) {
            return Err(failure.clone().into());
        }
        if shared.has_thread {
            shared.application_sleeps();
            let end = limit.map(|limit| shared.clock.now() + limit);
            if shared.application_progress
                && let Some(readable) = self.0.front.lead(shared, fd.as_fd(), limit)?
            {
                return Ok(readable);
            }
            let limit = end.map(|end| end.since(shared.clock.now()));
            let woken = wait_readable([fd.as_fd(), shared.failure_bell()], limit)?;
            return match shared.failure() {
                None => Ok(woken),
                // An `fd` that is already readable counts before the failure.
                Some(_) if wait_readable([fd.as_fd()], Some(Duration::ZERO))? => Ok(true),
                Some(failure) => Err(failure.clone().into()),
            };
        }
        let link: Vec<BorrowedFd<'_>> = self.0.readiness.iter().map(AsFd::as_fd).collect();
        shared.drive(fd.as_fd(), &link, limit)
    }

    /// Runs `f` on a thread of its own, which is waited for when the device is closed.
    pub(super) fn spawn_resolver(&self, f: impl FnOnce(&DeviceCore) + Send + 'static) -> io::Result<()> {
        let mut running = lock(&self.0.resolvers);
        running.retain(|thread| !thread.is_finished());
        if running.len() >= MOST_RESOLVERS {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "too many addresses are being resolved"));
        }
        let shared = Arc::clone(&self.0.shared);
        running.push(system::spawn("xwarp-resolve".into(), move || f(&shared))?);
        Ok(())
    }
}

/// Checks the destruction of an object. It fails only while other objects use it; `why` says why that cannot be.
pub(super) fn destroyed(result: Result<(), ResourceError>, why: &str) {
    if let Err(error) = result
        && error != ResourceError::DeviceFailed
    {
        tracing::error!(%error, "an object was not destroyed, although {why}");
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if self.shared.inherited() {
            // The parent still uses descriptors, ports and programs of the device, and its threads are not in this process.
            std::mem::forget(Arc::clone(&self.shared));
            std::mem::forget(lock(&self.thread).take());
            std::mem::forget(lock(&self.observer).take());
            std::mem::forget(std::mem::take(&mut *lock(&self.resolvers)));
            return;
        }
        let observer = lock(&self.observer).take();
        drop(observer);
        self.shared.stop();
        let thread = lock(&self.thread).take();
        let resolvers = std::mem::take(&mut *lock(&self.resolvers));
        for thread in thread.into_iter().chain(resolvers) {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
        self.drain(self.linger);
        // The peers of the remaining connections are reset, so that they do not wait for their time-outs.
        self.shared.with(|state, _| state.engine.abort_unfinished());
    }
}
