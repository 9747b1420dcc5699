//! The loop: new connections, requests, ends of processes, changes of the interfaces. It never waits for a client, and closes
//! nothing whose closing may take long.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use rustix::event::{Timespec, epoll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{SocketFlags, accept_with};
use xwarp_control::{Event, Reason, Refusal, Reply, Request, Tagged};
use xwarp_leg::message::receive_message;

use crate::client::{Client, Device};
use crate::closing::Closing;
use crate::former::Former;
use crate::limits::{Limits, Rates, Usage};
use crate::listen;
use crate::memory::MemoryFiles;
use crate::metrics::Metrics;
use crate::names::Name;
use crate::options::Options;
use crate::pairs::Pairs;
use crate::ports::Quarantine;
use crate::privileges;
use crate::report::Losses;
use crate::signals::Signals;
use crate::slots::Slots;
use crate::store::Store;
use crate::syscalls;
use crate::uplink::{Uplink, refusal};

/// Marks of descriptors in the epoll set; those of interfaces follow, and from [`FIRST_CLIENT`] on those of clients.
const LISTENER: u64 = 0;
const BELL: u64 = 1;
const STOP: u64 = 2;
const METRICS: u64 = 3;
const KEEPER: u64 = 4;
const FIRST_INTERFACE: u64 = 5;
const FIRST_CLIENT: u64 = 256;
/// Descriptors of one client: its connection, its process, and its events while they cannot be sent.
const CONNECTION: u64 = 0;
const PROCESS: u64 = 1;
const EVENTS: u64 = 2;
const KINDS: u64 = 3;

/// Largest number of interfaces.
const MAX_INTERFACES: usize = 64;
/// Requests of one client that are served before other clients get a turn.
const MAX_REQUESTS: usize = 8;
/// Pause before connections are accepted again when no descriptor, or no thread, is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a thread that could not be started is tried again.
const THREAD_PAUSE: Duration = Duration::from_millis(100);
/// Pause before messages to the keeper are tried again.
const STORE_PAUSE: Duration = Duration::from_millis(5);
/// Descriptors that stay free: those of one message (`SCM_MAX_FD`), which the kernel would otherwise close on this thread;
/// monitors; and those that the other threads open for a moment.
const SPARE_DESCRIPTORS: u64 = 253 + 128 + 64;

/// The state of the helper.
pub(crate) struct Server {
    pub(crate) limits: Limits,
    pub(crate) options: Options,
    pub(crate) uplinks: Vec<Uplink>,
    /// When removed interfaces are looked for again.
    pub(crate) look_again: Instant,
    pub(crate) clients: BTreeMap<u64, Client>,
    /// Number of the next client.
    next: u64,
    pub(crate) slots: Slots,
    pub(crate) pairs: Pairs,
    pub(crate) quarantine: Quarantine,
    pub(crate) rates: Rates,
    /// Clients whose requests wait, by user.
    throttled: BTreeMap<u32, Vec<u64>>,
    pub(crate) closing: Closing,
    pub(crate) store: Store,
    pub(crate) memory: MemoryFiles,
    /// Refused requests and connections since the start, by reason.
    pub(crate) refused: BTreeMap<&'static str, u64>,
    pub(crate) losses: Losses,
    pub(crate) metrics: Option<Metrics>,
    pub(crate) epoll: OwnedFd,
    listener: OwnedFd,
    /// When connections are accepted again.
    accept_at: Option<Instant>,
    /// The limit on descriptors of this process.
    descriptors: u64,
}

/// Serves until a signal asks the program to end.
pub(crate) fn run(options: &Options, stop: &Signals, mut former: Former) -> Result<ExitCode> {
    check(options)?;
    let descriptors = privileges::raise_descriptor_limit()?;
    let mut uplinks = Vec::new();
    for name in &options.interfaces {
        uplinks.push(Uplink::open(name, options, |index| former.uplinks.remove(&index))?);
    }
    let (pairs, home) = Pairs::start(options.threaded_napi, former.home.take())?;
    for (number, uplink) in uplinks.iter_mut().enumerate() {
        uplink.connect_relay(number, &pairs)?;
    }
    let listening = listen::Listening::open(options, former.listener.take(), former.activated.take())?;
    let memory = MemoryFiles::new().context("making a file in memory")?;
    privileges::drop_others().context("dropping capabilities")?;
    let now = Instant::now();
    let limits = options.limits();
    // Dropping it would detach the programs, also those that the next helper goes on with.
    let mut server = ManuallyDrop::new(Server {
        limits,
        options: options.clone(),
        uplinks,
        look_again: now,
        clients: BTreeMap::new(),
        next: FIRST_CLIENT,
        slots: Slots::default(),
        pairs,
        quarantine: Quarantine::new(options),
        rates: Rates::new(limits.requests_per_second),
        throttled: BTreeMap::new(),
        closing: Closing::default(),
        store: Store::open(former.keeper.take(), options.keep, former.names),
        memory,
        refused: BTreeMap::new(),
        losses: Losses::default(),
        metrics: options.metrics.map(Metrics::start).transpose()?,
        epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        listener: listening.socket()?,
        accept_at: None,
        descriptors,
    });
    server.watch_all(stop)?;
    server.take_over(former.devices)?;
    server.keep_first(&home, listening.name());
    server.report();
    server.store.ready();
    match server.serve(stop)? {
        End::Restart => {
            server.store.finish();
            listening.leave();
        }
        End::Stop(why) => {
            server.revoke_all(why);
            server.store.stopping();
            drop(ManuallyDrop::into_inner(server));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(options: &Options) -> Result<()> {
    anyhow::ensure!(options.interfaces.len() <= MAX_INTERFACES, "at most {MAX_INTERFACES} interfaces");
    let by_systemd = options.socket.as_os_str() == "-";
    anyhow::ensure!(by_systemd || !options.interfaces.is_empty(), "no interface is named");
    if options.interfaces.is_empty() {
        // Whoever installed the service has not set it up yet. If this program failed, its socket would fail too.
        tracing::warn!("no interface is named (XWARPD_OPTIONS in /etc/default/xwarpd): nothing is shared");
    }
    Ok(())
}

/// How the loop ends.
enum End {
    /// The next helper goes on with the devices.
    Restart,
    /// All devices end, for this reason.
    Stop(&'static str),
}

impl Server {
    /// Watches all but the clients.
    fn watch_all(&self, stop: &Signals) -> Result<()> {
        self.watch(self.listener.as_fd(), LISTENER)?;
        self.watch(self.pairs.bell(), BELL)?;
        self.watch(stop.fd(), STOP)?;
        if let Some(metrics) = &self.metrics {
            self.watch(metrics.bell(), METRICS)?;
        }
        if let Some(keeper) = self.store.keeper() {
            // It says nothing, and hangs up at its end.
            let mark = epoll::EventData::new_u64(KEEPER);
            epoll::add(&self.epoll, keeper, mark, epoll::EventFlags::empty())
                .context("watching the keeper")?;
        }
        (0..self.uplinks.len()).try_for_each(|index| self.watch_interface(index))
    }

    /// Keeps what all devices need. `socket` is the name of the listening socket.
    fn keep_first(&mut self, home: &OwnedFd, socket: Option<Name>) {
        self.store.retain(|name| !matches!(name, Name::Listener { .. }) || socket.as_ref() == Some(name));
        self.store.keep(Name::Home, home.as_fd());
        if let Some(name) = socket {
            self.store.keep(name, self.listener.as_fd());
        }
    }

    /// Writes to the log what is shared, and restricts what this process can do.
    fn report(&self) {
        for uplink in &self.uplinks {
            uplink.report();
        }
        if self.options.threaded_napi {
            tracing::info!("frames of clients are processed on kernel threads");
        }
        // The threads of the log, of the pairs and of the metrics run already.
        if let Err(error) = syscalls::restrict() {
            tracing::warn!("system calls are not restricted: {error:#}");
        }
        let socket = self.options.socket.display();
        tracing::info!(%socket, capabilities = privileges::KEPT_NAMES, "ready");
    }

    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, mark: u64) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(mark), epoll::EventFlags::IN)
            .context("adding a descriptor to an epoll set")
    }

    pub(crate) fn watch_interface(&self, index: usize) -> Result<()> {
        let Some(uplink) = self.uplinks.get(index) else { return Ok(()) };
        self.watch(uplink.shared.event_fd(), FIRST_INTERFACE + index as u64)
    }

    pub(crate) fn unwatch_interface(&self, index: usize) {
        if let Some(uplink) = self.uplinks.get(index) {
            let _ = epoll::delete(&self.epoll, uplink.shared.event_fd());
        }
    }

    fn serve(&mut self, stop: &Signals) -> Result<End> {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [nothing; 64];
        loop {
            let limit = self.due(Instant::now()).and_then(|limit| Timespec::try_from(limit).ok());
            let count = match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
                Ok(count) => count,
                Err(Errno::INTR) => 0,
                Err(errno) => return Err(errno).context("waiting for events"),
            };
            for event in events.iter().take(count) {
                let (data, flags) = (event.data, event.flags);
                match data.u64() {
                    LISTENER => self.accept(),
                    BELL => self.pairs_done(),
                    STOP => {
                        let restarts = self.store.keeps() && stop.arrived() == Some(Signal::SIGTERM);
                        tracing::info!(clients = self.clients.len(), restarts, "ends");
                        return Ok(if restarts { End::Restart } else { End::Stop("xwarpd was stopped") });
                    }
                    KEEPER => return Ok(End::Stop("the keeper of xwarpd has ended")),
                    METRICS => self.answer_monitors(),
                    mark if mark < FIRST_CLIENT => self.interface_changed((mark - FIRST_INTERFACE) as usize),
                    mark => match (mark / KINDS, mark % KINDS) {
                        (id, PROCESS) => self.gone(id, "its process has ended"),
                        (id, EVENTS) => self.send_events(id),
                        // It has hung up while its requests wait.
                        (id, _) if !flags.contains(epoll::EventFlags::IN) => self.gone(id, "it has hung up"),
                        (id, _) => self.read(id),
                    },
                }
            }
        }
    }

    /// Does what is due now, and returns the time until the next of it.
    fn due(&mut self, now: Instant) -> Option<Duration> {
        let stuck = self.closing.is_stuck().then(|| {
            self.closing.retry();
            THREAD_PAUSE
        });
        let paused = self.accept_at.and_then(|at| {
            let left = at.saturating_duration_since(now);
            if !left.is_zero() {
                return Some(left);
            }
            self.accept_at = None;
            self.listen(epoll::EventFlags::IN);
            None
        });
        let behind = self.store.is_behind().then(|| {
            self.store.flush();
            STORE_PAUSE
        });
        let limits = [
            self.store.report_running(now),
            behind,
            self.quarantine.expire(now),
            self.unthrottle(now),
            self.take_again(now),
            stuck,
            paused,
        ];
        limits.into_iter().flatten().min()
    }

    pub(crate) fn usage(&self, uid: u32) -> Usage {
        let mut usage = Usage::default();
        for client in self.clients.values().filter(|client| client.uid == uid) {
            usage.connections += 1;
            usage.ports += client.ports.len();
            if let Some(bytes) = client.device.memory_bytes() {
                usage.devices += 1;
                usage.memory_bytes += bytes;
            }
        }
        usage.connections += self.closing.of(uid);
        self.slots.charge(uid, &mut usage);
        usage
    }

    fn listen(&self, flags: epoll::EventFlags) {
        let changed = epoll::modify(&self.epoll, &self.listener, epoll::EventData::new_u64(LISTENER), flags);
        if let Err(error) = changed {
            tracing::error!(%error, "the listening socket cannot be watched");
        }
    }

    /// Accepts no connection for a moment. The loop goes on.
    fn pause_accepting(&mut self, why: &str) {
        tracing::warn!("no connection is accepted for a moment: {why}");
        self.listen(epoll::EventFlags::empty());
        self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
    }

    /// Whether so few descriptors are left that those of a message might not fit. Ports in quarantine are given up first.
    pub(crate) fn has_few_descriptors(&mut self) -> bool {
        loop {
            // A new descriptor has the lowest free number.
            let few = fcntl_dupfd_cloexec(self.pairs.bell(), 0)
                .map_or(true, |lowest| lowest.as_raw_fd() as u64 + SPARE_DESCRIPTORS > self.descriptors);
            if !few || !self.quarantine.give_up_oldest() {
                return few;
            }
        }
    }

    fn accept(&mut self) {
        if self.closing.is_full() {
            return self.pause_accepting("too many connections are still being closed");
        }
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE) => return self.pause_accepting("no descriptor is left"),
            Err(_) => return,
        };
        let client = match Client::new(socket) {
            Ok(client) => client,
            Err(error) => return tracing::debug!(%error, "a client cannot be identified"),
        };
        let most = self.limits.most_connections();
        if self.usage(client.uid).connections >= most {
            let text =
                format!("this user has {most} connections to xwarpd already (--devices-per-user of xwarpd)");
            return self.turn_away(client, refusal(Reason::Limit, text));
        }
        if self.has_few_descriptors() {
            let text = "xwarpd has no descriptors left for another client (LimitNOFILE of its service)";
            return self.turn_away(client, refusal(Reason::Limit, text));
        }
        let (id, watched) = self.admit(client);
        if let Err(error) = watched
            && let Some(client) = self.clients.remove(&id)
        {
            self.turn_away(client, refusal(Reason::System, format!("{error:#}")));
        }
    }

    /// Adds a client. Returns its number, and whether it can be watched.
    pub(crate) fn admit(&mut self, client: Client) -> (u64, Result<()>) {
        let id = self.next;
        let watched = self.watch(client.socket.as_fd(), KINDS * id + CONNECTION);
        let watched = watched.and_then(|()| match &client.process {
            Some(process) => self.watch(process.as_fd(), KINDS * id + PROCESS),
            None => Ok(()),
        });
        self.next += 1;
        self.clients.insert(id, client);
        (id, watched)
    }

    /// Closes a new connection. Its client finds the reason in the place of the first answer.
    fn turn_away(&mut self, client: Client, why: Refusal) {
        tracing::debug!(uid = client.uid, pid = client.pid, reason = why.text, "a connection was refused");
        self.count_refusal(&why);
        let _ = client.reply(0, Reply::Refused(why), &[]);
        self.closing.close_socket(client.uid, client.socket, client.process);
    }

    pub(crate) fn count_refusal(&mut self, refusal: &Refusal) {
        *self.refused.entry(refusal.reason.name()).or_default() += 1;
    }

    /// Serves some requests of a client. Those beyond its user's rate wait in its socket.
    fn read(&mut self, id: u64) {
        for _ in 0..MAX_REQUESTS {
            let Some(client) = self.clients.get(&id) else { return };
            let uid = client.uid;
            if self.rates.ready(uid, Instant::now()).is_err() {
                return self.throttle(id, uid);
            }
            match receive_message(client.socket.as_fd()) {
                Ok((bytes, descriptors)) if bytes.is_empty() => {
                    // An empty message looks like the end, and may carry some.
                    let _ = self.memory_only(id, descriptors);
                    return self.gone(id, "it has hung up");
                }
                Ok((bytes, descriptors)) => {
                    let Some(memory) = self.memory_only(id, descriptors) else { return };
                    match Tagged::<Request>::decode(&bytes) {
                        Ok(request) => self.request(id, request, memory),
                        Err(error) => return self.gone(id, &error.to_string()),
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(errno) => return self.gone(id, &errno.to_string()),
            }
        }
    }

    /// Reads nothing from a client until its user's rate allows another request.
    fn throttle(&mut self, id: u64, uid: u32) {
        self.attend(id, epoll::EventFlags::empty());
        self.throttled.entry(uid).or_default().push(id);
    }

    fn attend(&self, id: u64, flags: epoll::EventFlags) {
        let Some(client) = self.clients.get(&id) else { return };
        let mark = epoll::EventData::new_u64(KINDS * id + CONNECTION);
        if let Err(error) = epoll::modify(&self.epoll, &client.socket, mark, flags) {
            tracing::error!(%error, "a connection cannot be watched");
        }
    }

    /// Reads again from the clients of users whose rate allows it. Returns the time until the next of them.
    fn unthrottle(&mut self, now: Instant) -> Option<Duration> {
        let mut next = None;
        let users: Vec<u32> = self.throttled.keys().copied().collect();
        for uid in users {
            match self.rates.resumes(uid, now) {
                Err(wait) => next = Some(next.map_or(wait, |next: Duration| next.min(wait))),
                Ok(()) => {
                    for id in self.throttled.remove(&uid).unwrap_or_default() {
                        self.attend(id, epoll::EventFlags::IN);
                    }
                }
            }
        }
        next
    }

    /// The descriptors that are frame memory; only these are closed at once. `None` after the end of a client whose
    /// user has passed too many others.
    fn memory_only(&mut self, id: u64, descriptors: Vec<OwnedFd>) -> Option<Vec<OwnedFd>> {
        let (memory, others): (Vec<_>, Vec<_>) =
            descriptors.into_iter().partition(|descriptor| self.memory.is_memory(descriptor));
        if !others.is_empty() {
            let uid = self.clients.get(&id)?.uid;
            self.closing.close_descriptors(uid, others);
            if self.closing.of(uid) >= self.limits.most_connections() {
                self.gone(id, "its user has passed too many descriptors that are no memory");
                return None;
            }
        }
        Some(memory)
    }

    /// Releases all resources of a client.
    pub(crate) fn gone(&mut self, id: u64, why: &str) {
        let Some(client) = self.clients.remove(&id) else { return };
        // Whoever only connects, as often as it likes, leaves no line.
        if let Device::Open { .. } = client.device {
            tracing::info!(uid = client.uid, pid = client.pid, why, "a client has disconnected");
        } else {
            tracing::debug!(uid = client.uid, pid = client.pid, why, "a client has disconnected");
        }
        // A child of the process may keep the same socket open, so closing ours is not enough.
        for fd in [Some(&client.socket), client.process.as_ref()].into_iter().flatten() {
            let _ = epoll::delete(&self.epoll, fd);
        }
        let now = Instant::now();
        self.store.forget_all(&client.names);
        if let Device::Open { uplink, pair, events, socket, .. } = client.device {
            // Its reader may still hold the other end.
            let _ = epoll::delete(&self.epoll, &events);
            let interface = self.uplinks.get(uplink).map_or(0, |uplink| uplink.shared.attributes().index);
            for ((address, port), (_, held)) in client.ports {
                pair.switch().remove_owner(address, port);
                self.quarantine.add(now, client.owner, interface, held);
            }
            self.losses.add(uplink, &socket);
            self.pairs.remove(client.uid, pair, socket);
        }
        self.closing.close_socket(client.uid, client.socket, client.process);
        self.rates.forget_full(now);
    }

    /// Waits until a client's events can be sent again, or no longer.
    pub(crate) fn await_events(epoll: &OwnedFd, id: u64, events: &OwnedFd, wait: bool) {
        let mark = epoll::EventData::new_u64(KINDS * id + EVENTS);
        let changed = if wait {
            epoll::add(epoll, events, mark, epoll::EventFlags::OUT)
        } else {
            epoll::delete(epoll, events)
        };
        if let Err(error) = changed {
            tracing::error!(%error, "a client's events cannot be watched");
        }
    }

    /// Sends every client the reason for the end of its device. A client that does not read only sees its connections
    /// end.
    fn revoke_all(&self, text: &str) {
        for client in self.clients.values() {
            let _ = client.notify(&Event::Revoked { text: text.into() });
        }
    }
}
