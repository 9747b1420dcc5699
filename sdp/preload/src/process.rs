//! The SDP state of this process: its rules, devices, listeners and relays. A forked child starts with none of them.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    env, fmt, fs,
    io::{self, IsTerminal as _, Write as _},
    mem,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{BorrowedFd, OwnedFd, RawFd},
    path::PathBuf,
    process, ptr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicPtr, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::OFlags,
    net::{AddressFamily, sockopt},
};
use xwarp_sdp::{
    Sdp, SdpListener, SdpOptions, SdpStream,
    mapper::{self, Host},
    rules::{Role, RuleError, Rules, Use},
};
use xwarp_verbs::{Device, DeviceOptions};

use crate::{
    direct, legs,
    locks::lock,
    numbers,
    outgoing::ADVERTISED_BYTES,
    relay::{self, Gate, Joined, Relays},
    sys::{self, Quiet},
    tracking,
};

/// The interface, if there are several.
const DEVICE_VARIABLE: &str = "XWARP_SDP_DEVICE";
/// The file with the rules, as in libsdp.
const RULES_VARIABLE: &str = "LIBSDP_CONFIG_FILE";
/// Use SDP only, as in libsdp.
const SIMPLE_VARIABLE: &str = "SIMPLE_LIBSDP";
/// A filter for the log on the standard error, for instance `debug`.
const LOG_VARIABLE: &str = "XWARP_SDP_LOG";
/// A directory in which the frames of each process and interface are recorded.
const CAPTURE_VARIABLE: &str = "XWARP_SDP_CAPTURE";
/// Print at the end how many bytes were transferred by RDMA.
const STATISTICS_VARIABLE: &str = "XWARP_SDP_STATISTICS";

/// Time limit for connecting over SDP by a blocking call.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The same for a non-blocking call: kernel TCP is tried afterwards.
const SHORT_LIMIT: Duration = Duration::from_secs(1);
/// Interval at which a listener checks whether the program's listening socket still exists.
const LOOK: Duration = Duration::from_secs(1);
/// Time without progress after which the end of the process gives up on unsent data: more than a chunk takes at 1
/// Mbit/s.
const PATIENCE: Duration = Duration::from_secs(5);

/// The decision on a `connect` call.
pub enum Verdict {
    /// The kernel does it.
    Kernel,
    /// Connect the socket to this gate of the stream.
    Through(Box<(Gate, SdpStream)>),
    /// The call fails with this error number.
    Failed(i32),
}

/// Where a connection comes from, as far as the program has said by `bind`.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    pub ip: Option<IpAddr>,
    /// The program has chosen a port.
    pub chosen_port: bool,
}

struct Options {
    /// `None`: the file with the rules cannot be read, so all connections use TCP.
    rules: Option<Rules>,
    program: String,
    device: Option<String>,
    capture: Option<PathBuf>,
    statistics: bool,
}

/// Read when the library is loaded, so that nothing is read in a forked child.
static OPTIONS: OnceLock<Options> = OnceLock::new();
static CURRENT: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// SDP on one interface.
struct Port {
    sdp: Sdp,
    /// The port mapper, since the first listener.
    mapper: OnceLock<Option<Host>>,
}

pub struct Process {
    id: u32,
    options: &'static Options,
    /// Interfaces; `None` is one that cannot be opened.
    ports: Mutex<BTreeMap<String, Option<Arc<Port>>>>,
    /// Addresses at which both the program and SDP listen.
    services: Mutex<BTreeSet<SocketAddr>>,
    pub relays: Arc<Relays>,
}

/// Prints a line on standard error. The program may have closed it, or its reader may have ended, so errors are ignored: a
/// panic would be one of the program.
fn say(text: fmt::Arguments<'_>) {
    // One write, which lines of other processes do not cut.
    let _ = io::stderr().write_all(format!("xwarp-sdp: {text}\n").as_bytes());
}

/// Prepares the process when the library is loaded.
pub fn init() {
    let rules = match env::var_os(RULES_VARIABLE) {
        _ if env::var_os(SIMPLE_VARIABLE).is_some() => {
            Ok("use sdp connect * *:*\nuse sdp listen * *:*".parse().unwrap_or_default())
        }
        None => Ok(Rules::default()),
        Some(path) => fs::read_to_string(&path)
            .map_err(|error| error.to_string())
            .and_then(|text| text.parse().map_err(|error: RuleError| error.to_string()))
            .map_err(|error| format!("{}: {error}", path.to_string_lossy())),
    };
    let rules = rules.map_err(|error| say(format_args!("{error}: all connections use TCP"))).ok();
    if let Ok(filter) = env::var(LOG_VARIABLE) {
        // A log that cannot be written loses lines: by default the subscriber would report that, and panic.
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
        let log = log.with_ansi(io::stderr().is_terminal()).log_internal_errors(false);
        // The program may have a log of its own.
        let _ = log.try_init();
    }
    let program = env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let device = env::var(DEVICE_VARIABLE).ok();
    let capture = env::var_os(CAPTURE_VARIABLE).map(PathBuf::from);
    let statistics = env::var_os(STATISTICS_VARIABLE).is_some();
    let _ = OPTIONS.set(Options { rules, program, device, capture, statistics });
    legs::init();
    sys::on_fork_and_exit(before_fork, in_parent, in_child, at_exit);
}

/// Descriptors that a child must not keep, unchanged until the fork has finished.
struct Fork {
    mapper: MutexGuard<'static, BTreeSet<RawFd>>,
    numbers: MutexGuard<'static, Vec<OwnedFd>>,
}

thread_local! {
    /// Set in a thread that forks.
    static FORK: Cell<Option<Fork>> = const { Cell::new(None) };
}

extern "C" fn before_fork() {
    tracking::forget_all();
    let fork = Fork { mapper: mapper::descriptors(), numbers: numbers::taken() };
    // An ending thread no longer has this variable. Its children keep the descriptors.
    let _ = FORK.try_with(|place| place.set(Some(fork)));
}

extern "C" fn in_parent() {
    let _ = FORK.try_with(Cell::take);
}

/// This process is a forked child.
pub fn is_child() {
    // The parent's threads do not exist here, and its locks may never be released.
    CURRENT.store(ptr::null_mut(), Ordering::Release);
    tracking::forked();
}

extern "C" fn in_child() {
    is_child();
    if let Ok(Some(mut fork)) = FORK.try_with(Cell::take) {
        mem::take(&mut *fork.mapper).into_iter().for_each(sys::close);
        fork.numbers.clear();
    }
}

/// Finishes in another thread: logging needs thread-local variables, and those of the exiting thread are already destroyed.
extern "C" fn at_exit() {
    let Some(process) = Process::existing() else { return };
    let quiet = Quiet::new();
    let finishes = thread::Builder::new().name("xwarp-sdp-exit".into()).spawn(|| process.finish());
    drop(quiet);
    match finishes {
        Ok(finishes) => drop(finishes.join()),
        Err(_) => process.finish(),
    }
}

fn error_number(error: &io::Error) -> i32 {
    match error.kind() {
        io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        io::ErrorKind::HostUnreachable => libc::EHOSTUNREACH,
        io::ErrorKind::NetworkUnreachable => libc::ENETUNREACH,
        _ => libc::ECONNREFUSED,
    }
}

impl Process {
    /// Whether this process has used SDP. Also true in a child of `vfork`, which has its parent's memory.
    pub fn exists() -> bool {
        !CURRENT.load(Ordering::Acquire).is_null()
    }

    /// This process, if it has used SDP.
    pub fn existing() -> Option<&'static Self> {
        // SAFETY: null, or a process that is never freed.
        let process = unsafe { CURRENT.load(Ordering::Acquire).as_ref() }?;
        // A child of vfork() or clone() has our memory but none of our threads.
        (process.id == process::id()).then_some(process)
    }

    /// This process. `None` where SDP must not be used.
    pub fn current() -> Option<&'static Self> {
        if CURRENT.load(Ordering::Acquire).is_null() {
            let options = OPTIONS.get().filter(|options| options.rules.is_some())?;
            let made = Box::new(Self {
                id: process::id(),
                options,
                ports: Mutex::default(),
                services: Mutex::default(),
                relays: Arc::default(),
            });
            let made = Box::into_raw(made);
            let order = Ordering::AcqRel;
            if CURRENT.compare_exchange(ptr::null_mut(), made, order, Ordering::Acquire).is_err() {
                // SAFETY: another thread was faster, so no other code has a reference to this value.
                drop(unsafe { Box::from_raw(made) });
            }
        }
        Self::existing()
    }

    pub fn decide(&self, role: Role, address: SocketAddr) -> Use {
        let rules = self.options.rules.as_ref();
        rules.map_or(Use::Tcp, |rules| rules.decide(role, &self.options.program, address))
    }

    /// SDP on the interface with the address `local`; without an address, on the only interface.
    fn port(&self, local: Option<IpAddr>) -> Option<Arc<Port>> {
        let name = match &self.options.device {
            Some(name) => name.clone(),
            None => only_interface(local)?,
        };
        let mut ports = lock(&self.ports);
        let port = ports.entry(name).or_insert_with_key(|name| {
            let open = || {
                let device = DeviceOptions { capture: self.capture(name), ..DeviceOptions::default() };
                let device = Device::open_with(name, device).map_err(io::Error::other)?;
                Sdp::new(&device, options())
            };
            match numbers::above(open) {
                Ok(sdp) => Some(Arc::new(Port { sdp, mapper: OnceLock::new() })),
                Err(error) => {
                    // Once: the interface is not tried again.
                    say(format_args!(
                        "no SDP on {name}, so connections stay with TCP unless SDP is required: {error}"
                    ));
                    None
                }
            }
        });
        port.clone()
    }

    /// The file in which frames of an interface are recorded.
    fn capture(&self, interface: &str) -> Option<PathBuf> {
        let Options { capture, program, .. } = self.options;
        let file = |directory: &PathBuf| directory.join(format!("{program}-{}-{interface}.pcapng", self.id));
        capture.as_ref().map(file)
    }

    /// Connects a stream over SDP to `target`.
    pub fn connect(&self, socket: BorrowedFd<'_>, source: Source, target: SocketAddr) -> Verdict {
        let ip = target.ip();
        let what = self.decide(Role::Connect, target);
        let from_loopback = source.ip.is_some_and(|ip| ip.is_loopback());
        if what == Use::Tcp || from_loopback || ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
            return Verdict::Kernel;
        }
        if source.chosen_port {
            // The program's socket has the port, so that a connection over SDP cannot have it.
            return if what == Use::Sdp { Verdict::Failed(libc::EADDRINUSE) } else { Verdict::Kernel };
        }
        let addresses = sys::addresses().unwrap_or_default();
        if addresses.iter().any(|address| address.ip == ip) {
            return Verdict::Kernel;
        }
        let waits = rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK));
        let (limit, sends) = if waits { (CONNECT_LIMIT, 3) } else { (SHORT_LIMIT, 1) };
        let six = sockopt::socket_domain(socket) == Ok(AddressFamily::INET6);
        let connect = || {
            let from = source.ip.map_or_else(|| mapper::source_of(target), Ok)?;
            let port = self.port(Some(from)).ok_or_else(|| io::Error::other("no interface for SDP"))?;
            let gate = Gate::open(six)?;
            let stream = SdpStream::connect_service_from(&port.sdp, from, target, limit, sends)?;
            Ok((gate, stream))
        };
        let connected: io::Result<_> = connect();
        match connected {
            Ok(through) => Verdict::Through(Box::new(through)),
            Err(error) => {
                tracing::debug!(%target, %error, "no connection over SDP");
                if what == Use::Sdp { Verdict::Failed(error_number(&error)) } else { Verdict::Kernel }
            }
        }
    }

    /// Adds an SDP listener for the program's listener at `local`.
    pub fn listening(&'static self, local: SocketAddr) {
        let ip = local.ip().to_canonical();
        if ip.is_loopback() || self.decide(Role::Listen, local) == Use::Tcp {
            return;
        }
        let Some(port) = self.port(Some(ip).filter(|ip| !ip.is_unspecified())) else { return };
        let mapper = port.mapper.get_or_init(|| {
            let addresses = port.sdp.device().attributes().interface.addresses;
            Host::start(&addresses).map_err(|error| tracing::warn!(%error, "no port mapper")).ok()
        });
        let Some(mapper) = mapper else { return };
        if !lock(&self.services).insert(local) {
            return;
        }
        let listener = SdpListener::bind(&port.sdp, SocketAddr::new(ip, 0));
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        let served = bound.and_then(|(number, listener)| {
            listener.set_nonblocking(true);
            mapper.add(SocketAddr::new(ip, local.port()), number)?;
            tracing::debug!(%local, number, "listens over SDP");
            let port = Arc::clone(&port);
            thread::Builder::new().name("xwarp-sdp-listen".into()).spawn(move || {
                self.serve(&listener, local);
                if let Some(Some(mapper)) = port.mapper.get() {
                    mapper.remove(SocketAddr::new(ip, local.port()));
                }
                lock(&self.services).remove(&local);
            })
        });
        if let Err(error) = served {
            tracing::warn!(%local, %error, "does not listen over SDP");
            lock(&self.services).remove(&local);
        }
    }

    /// Passes accepted SDP connections to the program's listening socket, until the program has closed it.
    fn serve(&self, listener: &SdpListener, local: SocketAddr) {
        let service = match local.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => ([127, 0, 0, 1], local.port()).into(),
            IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, local.port()).into(),
            _ => local,
        };
        // A table that cannot be read is no reason to stop listening.
        let program_listens = || mapper::is_listening(local, None).unwrap_or(true);
        loop {
            let accepted = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let look: Option<Timespec> = LOOK.try_into().ok();
                    let waited = poll(&mut [PollFd::new(listener, PollFlags::IN)], look.as_ref());
                    if waited == Ok(0) && !program_listens() {
                        return;
                    }
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%local, %error, "no longer listens over SDP");
                    return;
                }
            };
            if let Err(error) = self.bring(accepted, service, local.port()) {
                tracing::debug!(%local, %error, "the program does not take a connection");
                if !program_listens() {
                    return;
                }
            }
        }
    }

    /// Connects the program's listening socket to an accepted stream. If that fails, the stream is reset.
    fn bring(
        &self,
        (stream, peer): (SdpStream, SocketAddr),
        service: SocketAddr,
        port: u16,
    ) -> io::Result<()> {
        let local = SocketAddr::new(stream.local_addr()?.ip(), port);
        let (leg, own) = relay::leg(service).inspect_err(|_| stream.abort())?;
        // Names and connection are stored before the program can see the socket.
        legs::insert((service, own), (local, peer));
        let joined = Joined::new(leg, (service, own), stream);
        joined.call(service).inspect_err(|_| joined.stream.abort())?;
        self.relays.start(&joined)
    }

    /// Wakes the threads that sleep for frames.
    pub fn end_sleeps(&self) {
        lock(&self.ports).values().flatten().for_each(|port| port.sdp.device().end_sleep());
    }

    /// Called at the end of the process: sends the remaining data to the peers.
    pub fn finish(&self) {
        tracing::debug!("the program ends");
        self.relays.finish(PATIENCE);
        let Options { program, capture, statistics, .. } = self.options;
        let Ok(ports) = self.ports.try_lock() else { return };
        for (name, port) in ports.iter() {
            let Some(port) = port else { continue };
            if capture.is_some() {
                // Writes what was recorded.
                port.sdp.device().drain(Duration::ZERO);
            }
            if *statistics {
                say(format_args!("{program}[{}] {name}: {}", self.id, share(&port.sdp.counters())));
            }
        }
    }
}

/// The numbers of bytes transferred by RDMA, as text.
fn share(counters: &BTreeMap<&'static str, u64>) -> String {
    let count = |name: &str| counters.get(name).copied().unwrap_or(0);
    let (sent, received, placed) =
        (count("sdp_bytes_sent"), count("sdp_bytes_received"), count("sdp_bytes_placed"));
    let percent = (placed * 100).checked_div(received).unwrap_or(0);
    let direct = direct::bytes();
    format!(
        "sent {sent} bytes, received {received} bytes, {percent} % of them by RDMA; {direct} bytes passed the loopback by"
    )
}

fn options() -> SdpOptions {
    SdpOptions { bcopy_threshold: ADVERTISED_BYTES, ..SdpOptions::default() }
}

/// The interface of an address, or the only one that is not the loopback.
fn only_interface(local: Option<IpAddr>) -> Option<String> {
    let all = sys::addresses().inspect_err(|error| tracing::warn!(%error, "no interfaces")).ok()?;
    let fits = |address: &&sys::Address| !address.loopback && local.is_none_or(|ip| ip == address.ip);
    let names: BTreeSet<String> = all.iter().filter(fits).map(|a| a.interface.clone()).collect();
    if names.len() > 1 {
        tracing::warn!(?names, "several interfaces: choose one by {DEVICE_VARIABLE}");
        return None;
    }
    names.into_iter().next()
}
