//! [`Device`]: an interface with an engine on it; everything else is made from one.

use std::{
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use xwarp_tcp::{mpa::MpaConfig, tcp::TcpConfig};

use super::{
    async_event::AsyncEvents,
    cm::{self, ConnectOptions, Connection, ConnectionError, ListenOptions, Listener, table::CmTable},
    completion::{CompletionChannel, CompletionQueue},
    counters::Counters,
    progress::{self, Progress},
    protection::ProtectionDomain,
    shared::{Setup, Shared},
};
use crate::{
    engine::{Engine, EngineConfig},
    interface::{Interface, InterfaceAttributes},
    rnic::{Limits, ResourceError},
    system::{self, Clock, wait_readable},
    tap::Tap,
};

/// Threads that wait for neighbours at the same time; more resolutions are refused.
const MOST_RESOLVERS: usize = 64;
/// Longest wait between two looks while a device that is being closed says goodbye.
const FAREWELL_WAIT: Duration = Duration::from_millis(5);

/// How to open a device.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Who runs the engine.
    pub progress: Progress,
    /// How long closing the device may take to finish its connections in order: to have everything
    /// acknowledged and both ends closed. What is left then is dropped, and peers see a reset.
    pub linger: Duration,
    /// Record every frame to this pcapng file.
    pub capture: Option<PathBuf>,
    /// Start-up settings of connections and listeners that bring none of their own.
    pub mpa: MpaConfig,
    /// Settings of all TCP connections. Some can be others for one connection: [`cm::CmId::tune`].
    pub tcp: TcpConfig,
    /// What the engine has room for.
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
            mpa: MpaConfig::default(),
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
    #[error("capture file {path}: {source}")]
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

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Its interface.
    pub interface: InterfaceAttributes,
    /// What it has room for.
    pub limits: Limits,
    /// Who runs its engine.
    pub progress: Progress,
}

/// An RNIC: an interface with an engine on it. Clones are handles to the same device.
///
/// Every object made from it keeps it open. When the last one and the last handle are gone, the device
/// finishes its connections (see [`DeviceOptions::linger`]) and leaves nothing behind.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

pub(crate) struct DeviceInner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    resolvers: Mutex<Vec<JoinHandle<()>>>,
    /// Readable when the interface has something; for those who run the engine while they wait.
    readiness: Vec<OwnedFd>,
    progress: Progress,
    linger: Duration,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.shared.look(|state| state.link.attributes().name);
        f.debug_tuple("Device").field(&name).finish()
    }
}

impl Device {
    /// Opens the interface `name` with AF_XDP, with default options.
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

    /// A device over an interface of the caller's.
    pub fn over(interface: Box<dyn Interface>, options: DeviceOptions) -> Result<Self, OpenError> {
        let interface = match options.capture {
            None => interface,
            Some(path) => {
                let file = std::fs::File::create(&path)
                    .map_err(|source| OpenError::Capture { path: path.clone(), source })?;
                let tap = Tap::new(interface, Box::new(file));
                Box::new(tap.map_err(|source| OpenError::Capture { path, source })?)
            }
        };
        let attributes = interface.attributes();
        tracing::debug!(interface = attributes.name, mode = %attributes.mode, queues = attributes.queues, mtu = attributes.mtu, "device opened");
        let readiness = interface.readiness()?;
        let resolver = interface.resolver();
        let engine = Engine::new(EngineConfig {
            secret: system::secret()?,
            tcp: options.tcp,
            mpa: options.mpa,
            limits: options.limits,
            ..EngineConfig::default()
        });
        let has_thread = options.progress != Progress::Application;
        let clock = Clock::start();
        let time_wait = options.tcp.time_wait;
        let cm = CmTable::new(time_wait);
        let application_progress = options.progress != Progress::Thread;
        let setup = Setup { engine, link: interface, cm, clock, application_progress, has_thread };
        let inner = Arc::new(DeviceInner {
            shared: Arc::new(Shared::new(setup, resolver)?),
            thread: Mutex::default(),
            resolvers: Mutex::default(),
            readiness,
            progress: options.progress,
            linger: options.linger,
        });
        inner.shared.with(|state, _| state.cm.belongs_to(Arc::downgrade(&inner)));
        if has_thread {
            let fds = inner.readiness.iter().map(OwnedFd::try_clone).collect::<io::Result<Vec<_>>>()?;
            let thread = progress::spawn(&inner.shared, &attributes.name, fds)?;
            *inner.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        }
        Ok(Self(inner))
    }

    pub(super) fn from_inner(inner: Arc<DeviceInner>) -> Self {
        Self(inner)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Whether `other` is a handle to the same device.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// What it is, as of now.
    pub fn attributes(&self) -> DeviceAttributes {
        DeviceAttributes {
            interface: self.0.shared.look(|state| state.link.attributes()),
            limits: self.0.shared.look(|state| state.engine.limits().clone()),
            progress: self.0.progress,
        }
    }

    /// Everything that is counted, by stable names.
    pub fn counters(&self) -> Counters {
        self.0.shared.look(Counters::collect)
    }

    /// Asynchronous events of its queues.
    pub fn async_events(&self) -> AsyncEvents {
        self.0.shared.async_events.events()
    }

    /// A protection domain: memory and queue pairs that may work together.
    pub fn create_pd(&self) -> Result<ProtectionDomain, ResourceError> {
        ProtectionDomain::create(self)
    }

    /// A completion queue for `capacity` entries, to be polled.
    pub fn create_cq(&self, capacity: u32) -> Result<CompletionQueue, ResourceError> {
        CompletionQueue::create(self, capacity, None)
    }

    /// A completion queue for `capacity` entries that can wake whoever waits for `channel`.
    pub fn create_cq_with_channel(
        &self,
        capacity: u32,
        channel: &CompletionChannel,
    ) -> Result<CompletionQueue, ResourceError> {
        CompletionQueue::create(self, capacity, Some(channel))
    }

    /// Connects `qp` to the listener at `peer`; waits at most `limit`. The steps one by one, without
    /// waiting, are [`cm::CmId`]'s.
    pub fn connect(
        &self,
        qp: &super::QueuePair,
        peer: SocketAddr,
        options: ConnectOptions,
        limit: Duration,
    ) -> Result<Connection, ConnectionError> {
        cm::connect(self, qp, peer, options, limit)
    }

    /// Listens at `address`, which may be a wildcard, and whose port may be 0 (any).
    pub fn listen(&self, address: SocketAddr, options: ListenOptions) -> Result<Listener, ConnectionError> {
        Listener::new(self, address, options)
    }

    /// Runs the engine until nothing comes in any more. Only [`Progress::Application`] needs it, for
    /// stretches without a poll.
    pub fn progress(&self) {
        self.0.shared.progress();
    }

    /// Waits until `fd` (a channel of any kind, or any other descriptor) is readable, at most for `limit`;
    /// says whether it is. Runs the engine meanwhile, if no thread of the device's does.
    pub fn wait(&self, fd: impl AsFd, limit: Option<Duration>) -> io::Result<bool> {
        let shared = &self.0.shared;
        if shared.has_thread {
            shared.application_sleeps();
            return wait_readable([fd.as_fd()], limit);
        }
        let link: Vec<BorrowedFd<'_>> = self.0.readiness.iter().map(AsFd::as_fd).collect();
        shared.drive(fd.as_fd(), &link, limit)
    }

    /// Runs `f` on a thread of its own, which is waited for when the device is closed.
    pub(super) fn spawn_resolver(&self, f: impl FnOnce(&Shared) + Send + 'static) -> io::Result<()> {
        let mut running = self.0.resolvers.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|thread| !thread.is_finished());
        if running.len() >= MOST_RESOLVERS {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "too many addresses are being resolved"));
        }
        let shared = Arc::clone(&self.0.shared);
        running.push(system::spawn("xwarp-resolve".into(), move || f(&shared))?);
        Ok(())
    }
}

/// Destroying an object fails only when something still uses it, and `why` that cannot be.
pub(super) fn destroyed(result: Result<(), ResourceError>, why: &str) {
    if let Err(error) = result {
        tracing::error!(%error, "an object was not destroyed, although {why}");
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        self.shared.stop();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let resolvers = std::mem::take(self.resolvers.get_mut().unwrap_or_else(PoisonError::into_inner));
        for thread in thread.into_iter().chain(resolvers) {
            // A thread that panicked has said so; there is nothing left to do about it here.
            let _ = thread.join();
        }
        let clock = self.shared.clock;
        let end = clock.now() + self.linger;
        loop {
            self.shared.progress();
            let now = clock.now();
            if now >= end || self.shared.look(|state| state.engine.stack().unfinished_connections() == 0) {
                break;
            }
            let fds = self.readiness.iter().map(AsFd::as_fd);
            if wait_readable(fds, Some(end.since(now).min(FAREWELL_WAIT))).is_err() {
                break;
            }
        }
        // Whoever is left shall not wait for us.
        self.shared.with(|state, _| state.engine.abort_unfinished());
    }
}
