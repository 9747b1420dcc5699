//! The loop of the fabric: connections, requests, ends of clients, and turns of the legs. It never waits for a client.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with, sockopt,
};
use rustix::process::geteuid;
use xwarp_control::{
    Choice, Description, Device as Opened, Hook, Neighbour, Quota, Reason, Refusal, Reply, Request, Tagged,
    VERSION,
};
use xwarp_leg::memif::Step;
use xwarp_leg::message::receive_message;
use xwarp_leg::place::Place;
use xwarp_leg::{MTU, far, hosts};

use crate::Options;
use crate::client::{Client, Device};
use crate::hosts::Hosts;
use crate::legs::{Legs, Tables};
use crate::ports::Ports;

/// Marks of descriptors in the epoll set; from [`FIRST_CLIENT`] on those of clients, [`KINDS`] for each.
const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_CLIENT: u64 = 8;
const CONTROL: u64 = 0;
const LEG: u64 = 1;
const BELL: u64 = 2;
const KINDS: u64 = 4;

/// Requests of one client that are served before others get a turn.
const MAX_REQUESTS: usize = 16;
/// Turns of legs between two looks at the descriptors.
const MAX_TURNS: usize = 64;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// The largest numbers of what one fabric has.
#[derive(Debug, Clone, Copy)]
struct Limits {
    clients: usize,
    ports_of_a_client: usize,
    /// Bytes of memory of one device, and of all.
    device_bytes: u64,
    all_bytes: u64,
}

const LIMITS: Limits =
    Limits { clients: 256, ports_of_a_client: 8192, device_bytes: 64 << 20, all_bytes: 4 << 30 };

/// A fabric that serves at its socket.
#[derive(Debug)]
pub struct Server {
    place: Place,
    options: Options,
    listener: OwnedFd,
    /// Held while the socket is this process's.
    _lock: File,
    epoll: OwnedFd,
    clients: Vec<Option<Client>>,
    hosts: Hosts,
    ports: Ports,
    legs: Legs,
    /// When it ends unless a client comes.
    idle_since: Instant,
}

/// The outcome of an attempt to serve.
#[derive(Debug)]
pub enum Attempt {
    /// This process serves from now on.
    Serving(Box<Server>),
    /// Another process does.
    Elsewhere,
}

fn refusal(reason: Reason, text: impl Into<String>) -> Refusal {
    Refusal { reason, text: text.into() }
}

impl Server {
    /// Begins to serve at `place`, unless another process does.
    ///
    /// # Errors
    /// The socket or the lock cannot be made.
    pub fn begin(place: &Place, options: Options) -> io::Result<Attempt> {
        let lock = File::options().create(true).truncate(false).write(true).open(place.lock())?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) => return Ok(Attempt::Elsewhere),
            locked => locked?,
        }
        let path = place.socket();
        // It is that of a fabric that was killed.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new(&path)?)?;
        listen(&listener, BACKLOG)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(Attempt::Serving(Box::new(Self {
            place: place.clone(),
            options,
            listener,
            _lock: lock,
            epoll,
            clients: Vec::new(),
            hosts: Hosts::default(),
            ports: Ports::default(),
            legs: Legs::default(),
            idle_since: Instant::now(),
        })))
    }

    /// Serves until no client has been there for the time in the options, or `stop` is readable.
    ///
    /// # Errors
    /// Waiting for events failed.
    pub fn serve(mut self, stop: Option<BorrowedFd<'_>>) -> io::Result<()> {
        if let Some(stop) = stop {
            epoll::add(&self.epoll, stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        }
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [nothing; 64];
        loop {
            let asleep = self.run_legs();
            let idle = self.idle_left();
            let due = self.legs.next_due();
            let limit = if asleep { idle.into_iter().chain(due).min() } else { Some(Duration::ZERO) };
            if asleep && idle.is_some_and(|idle| idle.is_zero()) {
                tracing::info!(fabric = self.place.name(), "no client is left");
                return Ok(());
            }
            let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
            let count = match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
                Ok(count) => count,
                Err(Errno::INTR) => 0,
                Err(errno) => return Err(errno.into()),
            };
            for event in events.iter().take(count) {
                let data = event.data;
                match data.u64() {
                    LISTENER => self.accept(),
                    STOP => {
                        self.end("the fabric was stopped");
                        return Ok(());
                    }
                    mark => {
                        let client = ((mark - FIRST_CLIENT) / KINDS) as usize;
                        match (mark - FIRST_CLIENT) % KINDS {
                            CONTROL => self.read(client),
                            LEG => self.read_leg(client),
                            _ => self.legs.activate(client),
                        }
                    }
                }
            }
        }
    }

    /// Carries frames; returns whether there are none left.
    fn run_legs(&mut self) -> bool {
        let asleep = self.legs.run(MAX_TURNS, Tables { hosts: &self.hosts, ports: &self.ports });
        while let Some((client, reason)) = self.legs.next_ended() {
            self.gone(client, &reason);
        }
        asleep
    }

    /// Time until it ends; `None` while there are clients, or if it never ends.
    fn idle_left(&self) -> Option<Duration> {
        let is_used = self.clients.iter().any(Option::is_some);
        let limit = self.options.idle.filter(|_| !is_used)?;
        Some(limit.saturating_sub(self.idle_since.elapsed()))
    }

    fn end(&mut self, reason: &str) {
        for client in self.clients.iter().flatten() {
            client.revoke(reason);
        }
    }

    fn watch(
        &self,
        fd: BorrowedFd<'_>,
        client: usize,
        kind: u64,
        flags: epoll::EventFlags,
    ) -> io::Result<()> {
        let mark = FIRST_CLIENT + client as u64 * KINDS + kind;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(mark), flags)?)
    }

    fn accept(&mut self) {
        let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else {
            return;
        };
        self.idle_since = Instant::now();
        // The directory admits this user only; root may enter it too.
        let user = sockopt::socket_peercred(&socket).map(|peer| peer.uid);
        let Ok(client) = Client::new(socket) else { return };
        if !user.is_ok_and(|user| user == geteuid() || user.is_root()) {
            let text = "it serves the processes of its own user only";
            let _ = client.reply(0, Reply::Refused(refusal(Reason::Permission, text)), &[]);
            return;
        }
        if self.clients.iter().flatten().count() >= LIMITS.clients {
            let text = format!("it has {} clients already", LIMITS.clients);
            let _ = client.reply(0, Reply::Refused(refusal(Reason::Limit, text)), &[]);
            return;
        }
        let number = self.clients.iter().position(Option::is_none).unwrap_or_else(|| {
            self.clients.push(None);
            self.clients.len() - 1
        });
        if self.watch(client.control.as_fd(), number, CONTROL, epoll::EventFlags::IN).is_ok()
            && let Some(place) = self.clients.get_mut(number)
        {
            *place = Some(client);
        }
    }

    /// Frees what a client has.
    fn gone(&mut self, number: usize, reason: &str) {
        let Some(client) = self.clients.get_mut(number).and_then(Option::take) else { return };
        tracing::debug!(pid = client.pid, reason, "a client is gone");
        client.revoke(reason);
        self.ports.release_all(number);
        if let Some(bell) = self.legs.bell(number) {
            // The client has the same file, which would stay in the set.
            let _ = epoll::delete(&self.epoll, bell);
        }
        self.legs.remove(number);
        self.idle_since = Instant::now();
    }

    /// Reads requests of a client.
    fn read(&mut self, number: usize) {
        for _ in 0..MAX_REQUESTS {
            let Some(Some(client)) = self.clients.get(number) else { return };
            let (bytes, _descriptors) = match receive_message(client.control.as_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => return self.gone(number, "it has hung up"),
                Ok(received) => received,
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => return self.gone(number, "its connection has failed"),
            };
            let Ok(request) = Tagged::<Request>::decode(&bytes) else {
                return self.gone(number, "it violates the protocol");
            };
            let (reply, descriptors) = match self.answer(number, request.body) {
                Ok(None) => continue,
                Ok(Some(answer)) => answer,
                Err(refusal) => (Reply::Refused(refusal), Vec::new()),
            };
            let Some(Some(client)) = self.clients.get(number) else { return };
            if client.reply(request.id, reply, &descriptors).is_err() {
                return self.gone(number, "it does not read answers");
            }
        }
    }

    /// The answer to a request, with descriptors; `None` where none is due.
    fn answer(&mut self, number: usize, body: Request) -> Result<Option<(Reply, Vec<OwnedFd>)>, Refusal> {
        let Some(Some(client)) = self.clients.get_mut(number) else { return Ok(None) };
        let only = |reply| Ok(Some((reply, Vec::new())));
        match body {
            Request::Hello { version: VERSION } => {
                client.greeted = true;
                only(Reply::Hello { version: VERSION })
            }
            Request::Hello { version } => {
                let text = format!(
                    "the program has version {version} of the protocol, and it {VERSION}: update the older one"
                );
                Err(refusal(Reason::Version, text))
            }
            _ if !client.greeted => Err(refusal(Reason::State, "the first request is Hello")),
            Request::Host { name, join } => {
                let found = if join {
                    self.hosts.join(&name).map_err(|text| refusal(Reason::NotServed, text))?
                } else {
                    let text =
                        || refusal(Reason::NotServed, format!("it has no host {name:?}: xwarp fabric show"));
                    self.hosts.find(&name).ok_or_else(text)?
                };
                only(Reply::Host(Hosts::describe(found)))
            }
            Request::Faults { from, to, words } => {
                let text = |text: String| refusal(Reason::State, text);
                let find = |name: &str| {
                    self.hosts
                        .find(name)
                        .ok_or_else(|| text(format!("it has no host {name:?}: xwarp fabric show")))
                };
                let (from, to) = (find(&from)?, find(&to)?);
                self.legs.paths().change(from, to, &words).map_err(text)?;
                only(Reply::Done)
            }
            Request::Describe { number } => only(Reply::Described(self.describe(number)?)),
            Request::Open { interface: Choice::Name(name), sizes } => {
                let bytes = memory_bytes(sizes)?;
                self.open(number, &name, bytes)
            }
            Request::Open { .. } | Request::Register => {
                Err(refusal(Reason::State, "a device of it is opened by the name of a host"))
            }
            body => {
                self.answer_about_device(number, body).map(|reply| reply.map(|reply| (reply, Vec::new())))
            }
        }
    }

    fn open(
        &mut self,
        number: usize,
        name: &str,
        bytes: u64,
    ) -> Result<Option<(Reply, Vec<OwnedFd>)>, Refusal> {
        let all: u64 = self.clients.iter().flatten().filter_map(|c| c.device.as_ref()).map(|d| d.bytes).sum();
        let Some(Some(client)) = self.clients.get_mut(number) else { return Ok(None) };
        if client.device.is_some() {
            return Err(refusal(Reason::State, "this connection has a device already"));
        }
        if all + bytes > LIMITS.all_bytes {
            return Err(refusal(Reason::Limit, format!("its devices have {all} bytes of memory already")));
        }
        let host = self.hosts.join(name).map_err(|text| refusal(Reason::NotServed, text))?;
        let system = |error: io::Error| refusal(Reason::System, error.to_string());
        let (device, theirs) = Device::new(host, bytes).map_err(system)?;
        let mark = FIRST_CLIENT + number as u64 * KINDS + LEG;
        epoll::add(&self.epoll, device.master.fd(), epoll::EventData::new_u64(mark), epoll::EventFlags::IN)
            .map_err(|errno| system(errno.into()))?;
        client.device = Some(device);
        let opened = Opened {
            name: "fabric".into(),
            carrier: self.hosts.name(host).into(),
            index: u32::from(host) + 1,
            socket_index: 0,
            mac: hosts::mac(host),
            mtu: MTU.into(),
            path_mtu: MTU,
            largest_mtu: MTU,
            up: true,
            hook: Hook::Native,
            multi_buffer: true,
            vlans: Vec::new(),
            program_id: 0,
            addresses: hosts::addresses(host).to_vec(),
        };
        Ok(Some((Reply::Opened(opened), theirs.into())))
    }

    fn answer_about_device(&mut self, number: usize, body: Request) -> Result<Option<Reply>, Refusal> {
        let Some(Some(client)) = self.clients.get_mut(number) else { return Ok(None) };
        let Some(host) = client.device.as_ref().map(|device| device.host) else {
            return Err(refusal(Reason::State, "no device is open"));
        };
        match body {
            Request::Reserve { address, port } => {
                if address.is_some_and(|address| self.hosts.at(host, address) != Some(host)) {
                    let name = self.hosts.name(host);
                    let text =
                        format!("{} is not an address of host {name}", address.unwrap_or([0; 4].into()));
                    return Err(refusal(Reason::NotOurAddress, text));
                }
                if client.ports >= LIMITS.ports_of_a_client {
                    let text = format!("this device has {} ports already", client.ports);
                    return Err(refusal(Reason::Limit, text));
                }
                let Some(port) = self.ports.reserve(host, address, port, number) else {
                    let (reason, text) = if port == 0 {
                        (Reason::PortsExhausted, "all ephemeral ports of this host are in use".into())
                    } else {
                        (
                            Reason::PortInUse,
                            format!("port {port} of this host is in use by a device of the fabric"),
                        )
                    };
                    return Err(refusal(reason, text));
                };
                client.ports += 1;
                Ok(Some(Reply::Reserved { port }))
            }
            Request::Release { address, port } => {
                client.ports -= usize::from(self.ports.release(host, address, port, number));
                Ok(None)
            }
            Request::Resolve { destination, source } => {
                let (source, there) = self
                    .hosts
                    .route(host, destination, source)
                    .map_err(|text| refusal(Reason::Route, text))?;
                let neighbour = Neighbour::Known(hosts::mac(there));
                Ok(Some(Reply::Resolved { source, next_hop: destination, neighbour, mtu: MTU }))
            }
            Request::NextHop { destination, .. } => {
                let mac = self.hosts.at(host, destination).map(hosts::mac);
                Ok(Some(Reply::NextHop { address: destination, mac, mtu: MTU }))
            }
            _ => Ok(None),
        }
    }

    /// Reads a message of a leg's handshake.
    fn read_leg(&mut self, number: usize) {
        let Some(Some(client)) = self.clients.get_mut(number) else { return };
        let Some(device) = &mut client.device else { return };
        let host = device.host;
        let asked = match device.master.read() {
            Ok(Step::Nothing) => return,
            Ok(Step::Gone) => return self.gone(number, "its leg has hung up"),
            Ok(Step::Asked(asked)) => asked,
            Err(lie) => return self.gone(number, &lie.to_string()),
        };
        let (source, sink) = match far::accept(asked) {
            Ok(ends) => ends,
            Err(text) => return self.gone(number, &text),
        };
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        if let Err(error) = self.watch(source.bell(), number, BELL, edges) {
            return self.gone(number, &error.to_string());
        }
        self.legs.add(number, host, source, sink);
        if let Some(Some(Client { device: Some(device), .. })) = self.clients.get(number) {
            device.master.connected();
        }
    }

    /// The state of a host.
    fn describe(&self, number: u16) -> Result<Description, Refusal> {
        if number >= self.hosts.len() {
            return Err(refusal(Reason::NotServed, format!("it has {} hosts", self.hosts.len())));
        }
        let devices = || self.clients.iter().flatten().filter_map(|client| client.device.as_ref());
        let quota = |used: u64, most: u64| Quota { used, most };
        let ports: usize = self.clients.iter().flatten().map(|client| client.ports).sum();
        let counters = self.legs.counters();
        Ok(Description {
            interfaces: self.hosts.len(),
            name: self.hosts.name(number).into(),
            carrier: "fabric".into(),
            mtu: MTU.into(),
            up: true,
            hook: Hook::Native,
            generic_clients: false,
            devices: devices().filter(|device| device.host == number).count() as u32,
            own_devices: quota(devices().count() as u64, LIMITS.clients as u64),
            own_ports: quota(ports as u64, (LIMITS.clients * LIMITS.ports_of_a_client) as u64),
            own_memory_bytes: quota(devices().map(|device| device.bytes).sum(), LIMITS.all_bytes),
            counters: counters.iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        })
    }
}

impl Drop for Server {
    /// The socket goes first, so that whoever finds the lock free finds no socket.
    fn drop(&mut self) {
        let _ = fs::remove_file(self.place.socket());
    }
}

/// Bytes of memory of a device, with rings.
fn memory_bytes(sizes: xwarp_control::Sizes) -> Result<u64, Refusal> {
    let chunks = u64::from(sizes.receive_chunks) + u64::from(sizes.transmit_chunks);
    // A chunk, its descriptor, and the pages of the rings.
    let bytes = chunks * (4096 + 16) + 4 * 4096;
    if bytes > LIMITS.device_bytes {
        let text = format!("a device may have at most {} bytes of memory", LIMITS.device_bytes);
        return Err(refusal(Reason::Limit, text));
    }
    Ok(bytes)
}
