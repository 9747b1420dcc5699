//! The loop: new connections, requests, ends of processes, changes of the interfaces.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::fcntl_get_seals;
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, accept_with, shutdown, socketpair};
use xwarp_control::{Choice, Event, MOST_ADDRESSES, Reason, Refusal, Reply, Request, Sizes, Tagged, VERSION};
use xwarp_driver::helper::receive_message;
use xwarp_driver::shared::memory_bytes;

use crate::client::{Client, Device};
use crate::closing::Closing;
use crate::limits::{Limits, Rates, Usage};
use crate::listen;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::pairs::{Done, Order, Pair, Pairs};
use crate::ports::Quarantine;
use crate::privileges;
use crate::slots::{MOST_SLOTS, Slots};
use crate::uplink::{Uplink, event_of, refusal};

/// Marks of descriptors in the epoll set; those of interfaces follow, and from [`FIRST_CLIENT`] on those of clients.
const LISTENER: u64 = 0;
const BELL: u64 = 1;
const STOP: u64 = 2;
const METRICS: u64 = 3;
const FIRST_INTERFACE: u64 = 4;
const FIRST_CLIENT: u64 = 256;

/// Largest number of interfaces.
const MOST_INTERFACES: usize = 64;
/// Requests of one client that are served before other clients get a turn.
const MOST_REQUESTS: usize = 8;
/// Largest number of chunks of a client, and of descriptors of a ring.
const MOST_CHUNKS: u32 = 1 << 18;
const MOST_RING: u32 = 1 << 15;
/// Pause of the loop when no descriptor is left for a new connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The state of the helper.
pub(crate) struct Server {
    pub(crate) limits: Limits,
    pub(crate) uplinks: Vec<Uplink>,
    pub(crate) clients: BTreeMap<u64, Client>,
    /// Number of the next client.
    next: u64,
    slots: Slots,
    pairs: Pairs,
    pub(crate) quarantine: Quarantine,
    rates: Rates,
    closing: Closing,
    /// Refused requests since the start.
    pub(crate) refused: u64,
    pub(crate) metrics: Option<Metrics>,
    epoll: OwnedFd,
    listener: OwnedFd,
}

/// Serves until a signal asks the program to end.
pub(crate) fn run(options: &Options) -> Result<()> {
    anyhow::ensure!(options.interfaces.len() <= MOST_INTERFACES, "at most {MOST_INTERFACES} interfaces");
    privileges::raise_descriptor_limit();
    let mut uplinks = Vec::new();
    for name in &options.interfaces {
        uplinks.push(Uplink::open(name, options)?);
    }
    let pairs = Pairs::start(options.threaded_napi)?;
    for (number, uplink) in uplinks.iter_mut().enumerate() {
        if let Some(mtu) = uplink.shared.relay_mtu() {
            let near = format!("xw{}-{number}", std::process::id());
            pairs.make_relay(&near, Arc::clone(uplink.shared.switch()), mtu)?;
            uplink.shared.attach_relay(&near).context("taking frames behind another XDP program")?;
        }
    }
    let listening = listen::Listening::open(options)?;
    privileges::drop_others().context("dropping capabilities")?;
    // Its thread starts without the dropped capabilities.
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let ring = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        let _ = rustix::io::write(&ring, &1u64.to_ne_bytes());
    })?;
    let mut server = Server {
        limits: options.limits(),
        uplinks,
        clients: BTreeMap::new(),
        next: FIRST_CLIENT,
        slots: Slots::default(),
        pairs,
        quarantine: Quarantine::new(options.quarantine()),
        rates: Rates::default(),
        closing: Closing::default(),
        refused: 0,
        metrics: options.metrics.map(Metrics::start).transpose()?,
        epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        listener: listening.socket()?,
    };
    server.watch(server.listener.as_fd(), LISTENER)?;
    server.watch(server.pairs.bell(), BELL)?;
    server.watch(stop.as_fd(), STOP)?;
    if let Some(metrics) = &server.metrics {
        server.watch(metrics.bell(), METRICS)?;
    }
    for (uplink, mark) in server.uplinks.iter().zip(FIRST_INTERFACE..) {
        server.watch(uplink.shared.event_fd(), mark)?;
    }
    for uplink in &server.uplinks {
        let attributes = uplink.shared.attributes();
        tracing::info!(
            interface = attributes.name,
            from_wire = %uplink.shared.hook(),
            mtu = attributes.path_mtu,
            from_clients = if uplink.shared.takes_redirected() { "native" } else { "generic" },
            addresses = ?uplink.shared.addresses(),
            "shared"
        );
    }
    if options.threaded_napi {
        tracing::info!("frames of clients are processed on kernel threads");
    }
    tracing::info!(socket = %options.socket.display(), capabilities = privileges::KEPT_NAMES, "ready");
    server.serve()
}

impl Server {
    fn watch(&self, fd: BorrowedFd<'_>, mark: u64) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(mark), epoll::EventFlags::IN)
            .context("adding a descriptor to an epoll set")
    }

    fn serve(&mut self) -> Result<()> {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [nothing; 64];
        loop {
            let limit = self.quarantine.expire(Instant::now());
            let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
            let count = match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
                Ok(count) => count,
                Err(Errno::INTR) => 0,
                Err(errno) => return Err(errno).context("waiting for events"),
            };
            for event in events.iter().take(count) {
                let data = event.data;
                match data.u64() {
                    LISTENER => self.accept(),
                    BELL => self.pairs_done(),
                    STOP => {
                        tracing::info!(clients = self.clients.len(), "ends");
                        self.revoke_all("xwarpd was stopped");
                        return Ok(());
                    }
                    METRICS => self.answer_monitors(),
                    mark if mark < FIRST_CLIENT => self.interface_changed((mark - FIRST_INTERFACE) as usize),
                    mark if mark % 2 == 1 => self.gone(mark / 2, "its process has ended"),
                    mark => self.read(mark / 2),
                }
            }
        }
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

    fn accept(&mut self) {
        if self.closing.is_full() {
            tracing::warn!("too many connections are still being closed");
            return std::thread::sleep(ACCEPT_PAUSE);
        }
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE) => {
                tracing::warn!("no descriptor is left for a new client");
                return std::thread::sleep(ACCEPT_PAUSE);
            }
            Err(_) => return,
        };
        let client = match Client::new(socket) {
            Ok(client) => client,
            Err(error) => return tracing::warn!(%error, "a client cannot be identified"),
        };
        if self.usage(client.uid).connections >= self.limits.most_connections() {
            tracing::warn!(uid = client.uid, pid = client.pid, "too many connections of this user");
            return self.closing.close(client.uid, client);
        }
        let id = self.next;
        let watched = self.watch(client.socket.as_fd(), 2 * id).and_then(|()| match &client.process {
            Some(process) => self.watch(process.as_fd(), 2 * id + 1),
            None => Ok(()),
        });
        if let Err(error) = watched {
            tracing::warn!("{error:#}");
            return self.closing.close(client.uid, client);
        }
        self.next += 1;
        self.clients.insert(id, client);
    }

    /// Serves some requests of a client.
    fn read(&mut self, id: u64) {
        for _ in 0..MOST_REQUESTS {
            let Some(client) = self.clients.get(&id) else { return };
            match receive_message(client.socket.as_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => return self.gone(id, "it has hung up"),
                Ok((bytes, descriptors)) => {
                    let Some(descriptors) = self.memory_only(id, descriptors) else { return };
                    match Tagged::<Request>::decode(&bytes) {
                        Ok(request) => self.request(id, request, descriptors),
                        Err(error) => return self.gone(id, &error.to_string()),
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(errno) => return self.gone(id, &errno.to_string()),
            }
        }
    }

    /// The descriptors that are files in memory; only these are closed at once. `None` after the end of a client whose
    /// user has passed too many others.
    fn memory_only(&mut self, id: u64, descriptors: Vec<OwnedFd>) -> Option<Vec<OwnedFd>> {
        // Only files in memory have seals.
        let is_memory = |descriptor: &OwnedFd| fcntl_get_seals(descriptor).is_ok();
        let (memory, others): (Vec<_>, Vec<_>) = descriptors.into_iter().partition(is_memory);
        if !others.is_empty() {
            let uid = self.clients.get(&id)?.uid;
            self.closing.close(uid, others);
            if self.closing.of(uid) >= self.limits.most_connections() {
                self.gone(id, "its user has passed too many descriptors that are no memory");
                return None;
            }
        }
        Some(memory)
    }

    fn request(&mut self, id: u64, request: Tagged<Request>, descriptors: Vec<OwnedFd>) {
        let Some(client) = self.clients.get(&id) else { return };
        let rate = self.rates.spend(client.uid, self.limits.requests_per_second, Instant::now());
        let answer = match (rate, request.body) {
            // Released ports are free at once, at any request rate.
            (_, Request::Release { address, port }) => return self.release(id, address, port),
            (Err(refusal), _) => Err(refusal),
            (Ok(()), body) => self.answer(id, request.id, body, descriptors),
        };
        match answer {
            Ok(None) => {}
            Ok(Some(reply)) => self.reply(id, request.id, reply, &[]),
            Err(refusal) => {
                self.refused += 1;
                if let Some(client) = self.clients.get(&id) {
                    tracing::debug!(uid = client.uid, pid = client.pid, reason = refusal.text, "refused");
                }
                self.reply(id, request.id, Reply::Refused(refusal), &[]);
            }
        }
    }

    fn reply(&mut self, id: u64, request: u32, reply: Reply, descriptors: &[OwnedFd]) {
        let Some(client) = self.clients.get(&id) else { return };
        if let Err(errno) = client.reply(request, reply, descriptors) {
            self.gone(id, if errno == Errno::AGAIN { "it does not read answers" } else { "it has hung up" });
        }
    }

    /// The answer to a request; `None` when it follows later.
    fn answer(
        &mut self,
        id: u64,
        request: u32,
        body: Request,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Option<Reply>, Refusal> {
        let state = |text| Err(refusal(Reason::State, text));
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        match body {
            Request::Hello { version } if version == VERSION => {
                client.greeted = true;
                Ok(Some(Reply::Hello { version: VERSION }))
            }
            Request::Hello { version } => Err(refusal(
                Reason::Version,
                format!(
                    "the program has version {version} of the protocol, and xwarpd {VERSION}: update the older one"
                ),
            )),
            _ if !client.greeted => state("the first request is Hello"),
            Request::Open { interface, sizes } => {
                let Ok([memory]) = <[OwnedFd; 1]>::try_from(descriptors) else {
                    return Err(refusal(
                        Reason::Memory,
                        "Open carries one descriptor, the frame memory, a memfd",
                    ));
                };
                self.open(id, request, &interface, sizes, memory).map(|()| None)
            }
            Request::Describe { number } => {
                let uid = client.uid;
                self.describe(uid, number).map(|description| Some(Reply::Described(description)))
            }
            _ => {
                let Device::Open { uplink, .. } = client.device else { return state("no device is open") };
                let Some(uplink) = self.uplinks.get(uplink) else { return Ok(None) };
                match body {
                    Request::Reserve { address, port } => {
                        let port = self.reserve(id, address, port)?;
                        Ok(Some(Reply::Reserved { port }))
                    }
                    Request::Resolve { destination, source } => {
                        let reply = uplink.resolve(destination, source)?;
                        if let Reply::Resolved { next_hop, .. } = reply {
                            client.follow(next_hop);
                        }
                        Ok(Some(reply))
                    }
                    Request::NextHop { destination, source, confirm } => {
                        let reply = uplink.next_hop(destination, source, confirm)?;
                        if let Reply::NextHop { address, .. } = reply {
                            client.follow(address);
                        }
                        Ok(Some(reply))
                    }
                    Request::Hello { .. }
                    | Request::Open { .. }
                    | Request::Release { .. }
                    | Request::Describe { .. } => Ok(None),
                }
            }
        }
    }

    fn open(
        &mut self,
        id: u64,
        request: u32,
        choice: &Choice,
        sizes: Sizes,
        memory: OwnedFd,
    ) -> Result<(), Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        if !matches!(client.device, Device::None) {
            return Err(refusal(Reason::State, "this connection has a device already"));
        }
        let found = self.uplinks.iter().position(|uplink| match choice {
            Choice::Name(name) => uplink.shared.attributes().name == *name,
            Choice::Address(address) => uplink.shared.addresses().contains(address),
        });
        let Some(found) = found else {
            let names: Vec<_> = self.uplinks.iter().map(|u| u.shared.attributes().name.as_str()).collect();
            let text = format!("xwarpd does not share {choice:?}, but {}", names.join(", "));
            return Err(refusal(Reason::NotServed, text));
        };
        let Sizes { receive_chunks, transmit_chunks, ring } = sizes;
        let chunks = 1..=MOST_CHUNKS;
        if !chunks.contains(&receive_chunks)
            || !chunks.contains(&transmit_chunks)
            || !ring.is_power_of_two()
            || ring > MOST_RING
        {
            let text = format!("{sizes:?}: at most {MOST_CHUNKS} chunks each way and a ring of {MOST_RING}");
            return Err(refusal(Reason::Limit, text));
        }
        let bytes = memory_bytes(sizes);
        self.limits.device(&self.usage(client.uid), bytes)?;
        let Some(uplink) = self.uplinks.get(found) else { return Ok(()) };
        let Some(slot) = self.slots.assign(client.uid, bytes) else {
            return Err(refusal(Reason::Limit, format!("xwarpd has {MOST_SLOTS} devices already")));
        };
        self.pairs.make(Order {
            client: id,
            slot,
            switch: Arc::clone(uplink.shared.switch()),
            memory,
            sizes,
            multi_buffer: uplink.shared.multi_buffer(),
            mtu: uplink.pair_mtu(),
            generic: !uplink.shared.takes_redirected(),
        });
        if let Some(client) = self.clients.get_mut(&id) {
            client.device = Device::Opening { request, uplink: found, memory_bytes: bytes };
        }
        Ok(())
    }

    fn pairs_done(&mut self) {
        while let Some(done) = self.pairs.next() {
            match done {
                Done::Removed { slot } => {
                    self.slots.free(slot);
                }
                Done::Made { client, slot, result } => match result {
                    Ok((pair, socket)) => self.opened(client, pair, socket),
                    Err(error) => {
                        self.slots.free(slot);
                        tracing::warn!("a device could not be created: {error:#}");
                        let Some(there) = self.clients.get_mut(&client) else { continue };
                        let Device::Opening { request, .. } = there.device else { continue };
                        there.device = Device::None;
                        let refused = Reply::Refused(refusal(Reason::Memory, format!("{error:#}")));
                        self.reply(client, request, refused, &[]);
                    }
                },
            }
        }
    }

    /// Passes a new device to its client.
    fn opened(&mut self, id: u64, pair: Pair, socket: OwnedFd) {
        let opening = self.clients.get_mut(&id).and_then(|client| match client.device {
            Device::Opening { request, uplink, memory_bytes } => {
                Some((client, request, uplink, memory_bytes))
            }
            _ => None,
        });
        let Some((client, request, uplink, memory_bytes)) = opening else {
            return self.pairs.remove(pair);
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let events = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        // The client must not be able to leave messages in the socket, with descriptors that this process would have to
        // close.
        let events = events.and_then(|(ours, theirs)| {
            shutdown(&ours, Shutdown::Read)?;
            Ok((ours, theirs))
        });
        let (Ok((ours, theirs)), Some(there)) = (events, self.uplinks.get(uplink)) else {
            self.pairs.remove(pair);
            return self.gone(id, "no socket for its events");
        };
        tracing::info!(
            uid = client.uid,
            pid = client.pid,
            slot = pair.slot,
            interface = there.shared.attributes().name,
            "opened a device"
        );
        client.device = Device::Open { uplink, memory_bytes, pair, events: ours };
        let more: Vec<_> = there.shared.addresses().iter().skip(MOST_ADDRESSES).copied().collect();
        let granted = there.granted();
        // Our descriptor of the AF_XDP socket is closed; the client's is the only one.
        self.reply(id, request, Reply::Opened(granted), &[socket, theirs]);
        for address in more {
            self.notify(id, &Event::AddressAdded(address));
        }
    }

    fn reserve(&mut self, id: u64, address: Option<IpAddr>, port: u16) -> Result<u16, Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(0) };
        let Device::Open { uplink, pair, .. } = &client.device else { return Ok(0) };
        let Some(uplink) = self.uplinks.get(*uplink) else { return Ok(0) };
        self.limits.port(&self.usage(client.uid))?;
        if let Some(address) = address.filter(|address| !uplink.shared.addresses().contains(address)) {
            let name = &uplink.shared.attributes().name;
            return Err(refusal(Reason::NotOurAddress, format!("{address} is not an address of {name}")));
        }
        let index = uplink.shared.attributes().index;
        let held = self.quarantine.reserve(client.uid, address, port, index)?;
        let port = held.port();
        uplink
            .shared
            .switch()
            .add_owner(address, port, pair.slot)
            .map_err(|error| refusal(Reason::System, error.to_string()))?;
        if let Some(client) = self.clients.get_mut(&id) {
            client.ports.insert((address, port), held);
        }
        Ok(port)
    }

    fn release(&mut self, id: u64, address: Option<IpAddr>, port: u16) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(held) = client.ports.remove(&(address, port)) else { return };
        if let Device::Open { uplink, .. } = client.device
            && let Some(uplink) = self.uplinks.get(uplink)
        {
            uplink.shared.switch().remove_owner(address, port);
            self.quarantine.add(Instant::now(), client.uid, uplink.shared.attributes().index, held);
        }
    }

    /// Releases all resources of a client.
    fn gone(&mut self, id: u64, why: &str) {
        let Some(client) = self.clients.remove(&id) else { return };
        tracing::info!(uid = client.uid, pid = client.pid, why, "a client has disconnected");
        // A child of the process may keep the same socket open, so closing ours is not enough.
        for fd in [Some(&client.socket), client.process.as_ref()].into_iter().flatten() {
            let _ = epoll::delete(&self.epoll, fd);
        }
        let now = Instant::now();
        if let Device::Open { uplink, pair, .. } = client.device {
            if let Some(uplink) = self.uplinks.get(uplink) {
                let index = uplink.shared.attributes().index;
                for ((address, port), held) in client.ports {
                    uplink.shared.switch().remove_owner(address, port);
                    self.quarantine.add(now, client.uid, index, held);
                }
            }
            self.pairs.remove(pair);
        }
        self.closing.close(client.uid, (client.socket, client.process));
        self.rates.forget_full(self.limits.requests_per_second, now);
    }

    fn interface_changed(&mut self, index: usize) {
        let Some(uplink) = self.uplinks.get_mut(index) else { return };
        let mut changes = Vec::new();
        if let Err(error) = uplink.shared.events(|change| changes.push(change)) {
            tracing::warn!(%error, "changes of an interface cannot be read");
        }
        uplink.resolver.follow(uplink.shared.attributes());
        let mtu = uplink.pair_mtu();
        for event in changes.into_iter().filter_map(event_of) {
            if !matches!(event, Event::Neighbour { .. }) {
                tracing::debug!(?event, "an interface changed");
            }
            let concerned = |client: &Client| match (&client.device, &event) {
                (Device::Open { uplink, .. }, _) if *uplink != index => false,
                (Device::Open { .. }, Event::Neighbour { address, .. }) => client.next_hops.contains(address),
                (Device::Open { .. }, _) => true,
                _ => false,
            };
            let ids: Vec<u64> =
                self.clients.iter().filter(|(_, client)| concerned(client)).map(|(id, _)| *id).collect();
            for id in ids {
                if let (Event::Mtu(_), Some(Device::Open { pair, .. })) =
                    (&event, self.clients.get(&id).map(|client| &client.device))
                {
                    self.pairs.set_mtu(pair, mtu);
                }
                self.notify(id, &event);
            }
        }
    }

    /// Sends every client the reason for the end of its device. A client that does not read only sees its connections
    /// end.
    fn revoke_all(&self, text: &str) {
        for client in self.clients.values() {
            let _ = client.notify(&Event::Revoked { text: text.into() });
        }
    }

    /// Sends an event to a client. A client that does not read loses its device, because the helper never waits for a
    /// client.
    fn notify(&mut self, id: u64, event: &Event) {
        let Some(client) = self.clients.get(&id) else { return };
        if client.notify(event).is_err() {
            self.gone(id, "it does not read events");
        }
    }
}
