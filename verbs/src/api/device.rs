//! Opening a device, and its constructors of everything else.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use xwarp_rnic::{
    engine::{Engine, EngineConfig},
    rnic::{Limits, MAX_ENGINES, ResourceError},
};
use xwarp_tcp::{framing::FramingConfig, mpa::MpaConfig, tcp::TcpConfig};

use super::{
    channel::CompletionChannel,
    cm::{ConnectOptions, Connecting, Connection, ConnectionError, ListenOptions, Listener, table::CmTable},
    completion::{CompletionQueue, CompletionQueueOptions},
    engines::Engines,
    handle::Device,
    progress::Progress,
    protection::ProtectionDomain,
    shared::{Common, Setup, SharedEngine},
};
use crate::{
    fabric::{self, FabricError, OnFabric, Place},
    interface::Interface,
    observe, system,
    tap::{Recording, Tap, create_capture},
};

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
    /// The name of the [fabric] of a device `fabric:HOST`; `None`: `default`.
    pub fabric: Option<String>,
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
            fabric: None,
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
    /// The fabric gives no device; the text has a remedy.
    #[error(transparent)]
    Fabric(#[from] FabricError),
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

impl Device {
    /// Opens a device with default options. `fabric:` and `fabric:HOST` are on the [fabric] of this user, which needs no privileges.
    /// Another name, or an IP address, is that of an interface, which is opened with AF_XDP: through the helper `xwarpd` if it
    /// answers and shares this interface, else the interface itself, which needs privileges.
    /// [`InterfaceAttributes::shared`](crate::interface::InterfaceAttributes::shared) has the choice.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        Self::open_with(name, DeviceOptions::default())
    }

    /// Opens the device `name`, see [`open`](Self::open). A device on a fabric has one engine.
    pub fn open_with(name: &str, options: DeviceOptions) -> Result<Self, OpenError> {
        if let Some(host) = fabric::host_of(name) {
            let place = Place::of(options.fabric.as_deref())?;
            return Self::over(Box::new(OnFabric::open(&place, host)?), options);
        }
        Self::open_interface(name, options)
    }

    /// Real interfaces need the feature `af-xdp`.
    #[cfg(not(feature = "af-xdp"))]
    fn open_interface(name: &str, _options: DeviceOptions) -> Result<Self, OpenError> {
        let text = format!("{name}: interfaces need the feature af-xdp; fabric: needs none");
        Err(io::Error::new(io::ErrorKind::Unsupported, text).into())
    }

    #[cfg(feature = "af-xdp")]
    fn open_interface(name: &str, options: DeviceOptions) -> Result<Self, OpenError> {
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
            parts.first().filter(|_| parts.len() <= MAX_ENGINES.into()).ok_or_else(none)?.attributes();
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
        let device = Self::of(
            engines,
            readiness,
            (options.progress, options.linger),
            recording.clone(),
            &attributes.name,
        )?;
        if let Some(recording) = recording.filter(|_| observe) {
            device.observe(recording, &attributes.name);
        }
        Ok(device)
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
