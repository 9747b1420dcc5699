//! Requests of clients and their answers.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use xwarp_control::{Choice, Event, MAX_ADDRESSES, Reason, Refusal, Reply, Request, Sizes, Tagged, VERSION};
use xwarp_driver::Question;
use xwarp_driver::shared::memory_bytes;

use crate::client::Device;
use crate::names::Name;
use crate::pair::{Done, Pair};
use crate::pairs::Registration;
use crate::pending::Pending;
use crate::private::Order;
use crate::server::Server;
use crate::slots::MAX_SLOTS;
use crate::uplink::refusal;

/// Largest number of chunks of a client, and of descriptors of a ring.
const MAX_CHUNKS: u32 = 1 << 18;
const MAX_RING: u32 = 1 << 15;

/// Why nothing more is granted when descriptors run out.
const FEW_DESCRIPTORS: &str = "xwarpd has no descriptors left (LimitNOFILE of its service)";

/// Refuses sizes that no client needs.
fn check(sizes: Sizes) -> Result<(), Refusal> {
    let Sizes { receive_chunks, transmit_chunks, ring } = sizes;
    let chunks = 1..=MAX_CHUNKS;
    if chunks.contains(&receive_chunks)
        && chunks.contains(&transmit_chunks)
        && ring.is_power_of_two()
        && ring <= MAX_RING
    {
        return Ok(());
    }
    let text = format!("{sizes:?}: at most {MAX_CHUNKS} chunks each way and a ring of {MAX_RING}");
    Err(refusal(Reason::Limit, text))
}

impl Server {
    pub(crate) fn request(&mut self, id: u64, request: Tagged<Request>, descriptors: Vec<OwnedFd>) {
        let Some(client) = self.clients.get(&id) else { return };
        let uid = client.uid;
        // A released port costs its user nothing.
        if let Request::Release { address, port } = request.body {
            return self.release(id, address, port);
        }
        self.rates.spend(uid, Instant::now());
        let answer = match request.body {
            Request::Reserve { address, port } => self.reserve(id, request.id, address, port).map(Some),
            body => self.answer(id, request.id, body, descriptors),
        };
        match answer {
            Ok(None) => {}
            Ok(Some(reply)) => self.reply(id, request.id, reply, &[]),
            Err(refusal) => {
                self.count_refusal(&refusal);
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
            Request::Open { interface, sizes } => self.open(id, request, &interface, sizes).map(|()| None),
            Request::Register => {
                let Ok([memory]) = <[OwnedFd; 1]>::try_from(descriptors) else {
                    let text = "Register carries one descriptor, the frame memory, a sealed memfd";
                    return Err(refusal(Reason::Memory, text));
                };
                self.register(id, request, memory).map(|()| None)
            }
            Request::Describe { number } => {
                let uid = client.uid;
                self.describe(uid, number).map(|description| Some(Reply::Described(description)))
            }
            Request::Host { .. } | Request::Faults { .. } => {
                Err(refusal(Reason::NotServed, "xwarpd has no hosts: a fabric has (xwarp fabric)"))
            }
            body => self.answer_about_device(id, body),
        }
    }

    /// The answer to a request that needs a device.
    fn answer_about_device(&mut self, id: u64, body: Request) -> Result<Option<Reply>, Refusal> {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(None) };
        let Device::Open { uplink, .. } = client.device else {
            return Err(refusal(Reason::State, "no device is open"));
        };
        let Some(uplink) = self.uplinks.get(uplink) else { return Ok(None) };
        if let Request::Resolve { destination, .. } | Request::NextHop { destination, .. } = body
            && !self.options.allows_peer(destination)
            && !uplink.shared.addresses().contains(&destination)
        {
            let text = format!("the administrator allows no connection to {destination} (xwarpd --peers)");
            return Err(refusal(Reason::Route, text));
        }
        match body {
            Request::Resolve { destination, source } => {
                let reply = uplink.resolve(destination, source)?;
                if let Reply::Resolved { next_hop, .. } = reply {
                    client.follow(next_hop);
                }
                Ok(Some(reply))
            }
            Request::NextHop { destination, source, destination_port, source_port, confirm } => {
                let question = Question {
                    destination_port,
                    source_port,
                    user: Some(client.uid),
                    ..Question::to(destination, Some(source))
                };
                let reply = uplink.next_hop(&question, confirm)?;
                if let Reply::NextHop { address, .. } = reply {
                    client.follow(address);
                }
                Ok(Some(reply))
            }
            Request::Hello { .. }
            | Request::Open { .. }
            | Request::Register
            | Request::Reserve { .. }
            | Request::Release { .. }
            | Request::Describe { .. }
            | Request::Host { .. }
            | Request::Faults { .. } => Ok(None),
        }
    }

    fn open(&mut self, id: u64, request: u32, choice: &Choice, sizes: Sizes) -> Result<(), Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        if !matches!(client.device, Device::None) {
            return Err(refusal(Reason::State, "this connection has a device already"));
        }
        let owner = client.owner;
        let found = self.uplinks.iter().position(|uplink| match choice {
            Choice::Name(name) => uplink.shared.attributes().name == *name,
            Choice::Address(address) => uplink.shared.addresses().contains(address),
        });
        let Some(found) = found else {
            let names: Vec<_> = self.uplinks.iter().map(|u| u.shared.attributes().name.as_str()).collect();
            let text = if names.is_empty() {
                "xwarpd shares no interface: its administrator has named none (XWARPD_OPTIONS in /etc/default/xwarpd)".to_owned()
            } else {
                format!("xwarpd does not share {choice:?}, but {}", names.join(", "))
            };
            return Err(refusal(Reason::NotServed, text));
        };
        check(sizes)?;
        let bytes = memory_bytes(sizes);
        self.limits.device(&self.usage(owner.uid), bytes)?;
        self.limits.all_devices(&self.slots.total(), bytes)?;
        if self.has_few_descriptors() {
            return Err(refusal(Reason::Limit, FEW_DESCRIPTORS));
        }
        let Some(uplink) = self.uplinks.get(found) else { return Ok(()) };
        if uplink.removed {
            let name = &uplink.shared.attributes().name;
            let text = format!("{name} was removed from the host: xwarpd takes it again when it comes back");
            return Err(refusal(Reason::System, text));
        }
        let Some(slot) = self.slots.assign(owner.uid, bytes) else {
            return Err(refusal(Reason::Limit, format!("xwarpd has {MAX_SLOTS} devices already")));
        };
        self.pairs.make(Order {
            client: id,
            uid: owner.uid,
            slot,
            switch: Arc::clone(uplink.shared.switch()),
            multi_buffer: uplink.shared.multi_buffer(),
            mtu: uplink.pair_mtu(),
            generic: !uplink.shared.takes_redirected(),
        });
        if let Some(client) = self.clients.get_mut(&id) {
            client.device = Device::Opening { request, uplink: found, sizes };
        }
        Ok(())
    }

    /// Lets the thread of the pairs register the memory of a client whose limit on locked memory is too low.
    fn register(&mut self, id: u64, request: u32, memory: OwnedFd) -> Result<(), Refusal> {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(()) };
        let Device::Open { sizes, socket, registers, .. } = &mut client.device else {
            return Err(refusal(Reason::State, "no device is open"));
        };
        // Each request that waits holds two descriptors of ours.
        if *registers {
            return Err(refusal(Reason::State, "memory of this device is being registered"));
        }
        let socket = socket.try_clone().map_err(|_| refusal(Reason::Limit, FEW_DESCRIPTORS))?;
        *registers = true;
        self.pairs.register(client.uid, Registration { client: id, request, socket, memory, sizes: *sizes });
        Ok(())
    }

    fn registered(&mut self, id: u64, request: u32, result: io::Result<()>) {
        if let Some(client) = self.clients.get_mut(&id)
            && let Device::Open { registers, .. } = &mut client.device
        {
            *registers = false;
        }
        let reply = result.map_or_else(
            |error| Reply::Refused(refusal(Reason::Memory, format!("registering the frame memory: {error}"))),
            |()| Reply::Registered,
        );
        if let Reply::Refused(refusal) = &reply {
            self.count_refusal(refusal);
        }
        self.reply(id, request, reply, &[]);
    }

    pub(crate) fn pairs_done(&mut self) {
        while let Some(done) = self.pairs.next() {
            match done {
                Done::Removed { slot } => self.removed(slot),
                Done::Registered { client, request, result } => self.registered(client, request, result),
                Done::Made { client, uid, slot, result } => match result {
                    Ok((pair, socket)) => self.opened(client, uid, pair, socket),
                    Err(error) => {
                        self.slots.free(slot);
                        tracing::warn!("a device could not be created: {error:#}");
                        let Some(there) = self.clients.get_mut(&client) else { continue };
                        let Device::Opening { request, .. } = there.device else { continue };
                        there.device = Device::None;
                        let refused = Reply::Refused(refusal(Reason::Device, format!("{error:#}")));
                        self.reply(client, request, refused, &[]);
                    }
                },
            }
        }
    }

    /// Passes a new device to its client.
    fn opened(&mut self, id: u64, uid: u32, pair: Pair, socket: OwnedFd) {
        let opening = self.clients.get_mut(&id).and_then(|client| match client.device {
            Device::Opening { request, uplink, sizes } => Some((client, request, uplink, sizes)),
            _ => None,
        });
        let Some((client, request, uplink, sizes)) = opening else {
            return self.pairs.remove(uid, pair, socket);
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let events = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        // The client must not be able to leave messages in the socket, with descriptors that this process would have to
        // close.
        let events = events.and_then(|(ours, theirs)| {
            shutdown(&ours, Shutdown::Read)?;
            Ok((ours, theirs))
        });
        // The same socket, whose statistics say what was lost.
        let (Ok((ours, theirs)), Some(there), Ok(same)) =
            (events, self.uplinks.get(uplink), socket.try_clone())
        else {
            self.pairs.remove(uid, pair, socket);
            return self.gone(id, "no socket for its events");
        };
        tracing::info!(
            uid = client.uid,
            pid = client.pid,
            slot = pair.slot(),
            interface = there.shared.attributes().name,
            "opened a device"
        );
        let granted = there.granted(pair.far());
        let mut pending = Pending::default();
        for address in there.shared.addresses().iter().skip(MAX_ADDRESSES) {
            pending.add(&Event::AddressAdded(*address));
        }
        client.device = Device::Open {
            uplink,
            sizes,
            pair,
            events: ours,
            pending,
            waits: false,
            socket: same,
            registers: false,
        };
        self.keep_device(id);
        self.reply(id, request, Reply::Opened(granted), &[socket, theirs]);
        self.send_events(id);
    }

    fn reserve(
        &mut self,
        id: u64,
        request: u32,
        address: Option<IpAddr>,
        port: u16,
    ) -> Result<Reply, Refusal> {
        let few = self.has_few_descriptors();
        let none = || refusal(Reason::State, "no device is open");
        let client = self.clients.get(&id).ok_or_else(none)?;
        let Device::Open { uplink, pair, .. } = &client.device else { return Err(none()) };
        let Some(uplink) = self.uplinks.get(*uplink) else { return Err(none()) };
        // A request that is repeated, because the former helper may not have answered it.
        if let Some(((_, port), _)) =
            client.ports.iter().find(|(_, (reserved_by, _))| *reserved_by == request)
        {
            return Ok(Reply::Reserved { port: *port });
        }
        self.limits.port(&self.usage(client.uid))?;
        if few {
            return Err(refusal(Reason::Limit, FEW_DESCRIPTORS));
        }
        let attributes = uplink.shared.attributes();
        if let Some(address) = address.filter(|address| !uplink.shared.is_ours(*address)) {
            let name = &attributes.name;
            return Err(refusal(Reason::NotOurAddress, format!("{address} is not an address of {name}")));
        }
        let reserved: usize = self.clients.values().map(|client| client.ports.len()).sum();
        let held = self.quarantine.reserve(&client.rights(), address, port, attributes.index, reserved)?;
        let port = held.port();
        uplink
            .shared
            .switch()
            .add_owner(address, port, pair.slot())
            .map_err(|error| refusal(Reason::System, error.to_string()))?;
        if let Some(client) = self.clients.get_mut(&id) {
            client.ports.insert((address, port), (request, held));
        }
        self.keep_port(id, request, (address, port));
        Ok(Reply::Reserved { port })
    }

    fn release(&mut self, id: u64, address: Option<IpAddr>, port: u16) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some((request, held)) = client.ports.remove(&(address, port)) else { return };
        if let Device::Open { uplink, pair, .. } = &client.device {
            let name = Name::Port { slot: pair.slot(), request };
            client.names.remove(&name);
            self.store.forget(&name);
            pair.switch().remove_owner(address, port);
            let interface = self.uplinks.get(*uplink).map_or(0, |uplink| uplink.shared.attributes().index);
            self.quarantine.add(Instant::now(), client.owner, interface, held);
        }
    }
}
