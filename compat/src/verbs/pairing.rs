//! Connections by GID and queue pair number: programs that exchange these themselves and then call `ibv_modify_qp` work
//! if both ends are xwarp.
//!
//! At `INIT` the device begins to listen at a port that follows from its queue pair numbers. At `RTR` the end with the smaller (GID, number) connects, and the other
//! one waits for it; the private data of the request names both queue pairs. On the wire this is plain iWARP. A thread of each
//! device executes these steps, because `ibv_modify_qp` must return: programs often send their own number to the peer afterwards.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::errno::Errno;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use xwarp_verbs::{
    Device,
    cm::{
        AcceptOptions, CmId, CmKey, ConnectOptions, Event, EventChannel, EventKind, IncomingRequest,
        ListenOptions,
    },
};

use super::qp::Qp;
use crate::{
    config::config,
    failure,
    wait::{lock, spawn},
};

/// The first octets of the private data.
const MAGIC: [u8; 4] = *b"xwqp";
/// Interval between two attempts at a peer that does not listen yet.
const RETRY: Duration = Duration::from_millis(20);
/// Time that a queue pair may wait for its peer.
pub const LIMIT: Duration = Duration::from_secs(30);
/// Limit of one resolution of the peer's address.
const RESOLVE: Duration = Duration::from_secs(1);
/// Requests that wait for our queue pairs to be ready: of all peers, and of one address. A further request evicts the
/// oldest, which is rejected; an xwarp peer then connects again.
const MAX_PENDING: usize = 1024;
const MAX_PENDING_OF_PEER: usize = 256;
/// Backlog of the listener: more than the requests that wait, so that these do not keep new ones out.
const BACKLOG: usize = 2 * MAX_PENDING;

/// Processes of one address that accept connections by number at the same time: behind a helper, several have an address. Each
/// has a port of its own, and the number of the port is in its queue pair numbers.
const MAX_PROCESSES: u32 = 16;
/// Bits of a queue pair number below the number of its process.
const PROCESS_SHIFT: u32 = 20;

/// Whose queue pair numbers begin at which value: the number of a process, in the place that it has in them.
const fn first_number(process: u32) -> u32 {
    process << PROCESS_SHIFT
}

/// The port of the process that has a queue pair.
fn port_of(base: u16, number: u32) -> Option<u16> {
    base.checked_add(u16::try_from(number >> PROCESS_SHIFT).ok()?)
}

/// The two ends, known when a program sets `RTR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    pub local: IpAddr,
    pub peer: IpAddr,
    pub own_number: u32,
    pub peer_number: u32,
}

impl Names {
    /// Whether we connect and the peer waits.
    fn connects(&self) -> bool {
        (canonical(self.local), self.own_number) < (canonical(self.peer), self.peer_number)
    }

    /// The private data of our request.
    fn encode(&self) -> Vec<u8> {
        [MAGIC, self.peer_number.to_be_bytes(), self.own_number.to_be_bytes()].concat()
    }
}

fn canonical(address: IpAddr) -> [u8; 16] {
    super::card::gid(address).raw
}

/// The numbers in the private data of a request: of the receiving queue pair, and of the sending one.
fn decode(private_data: &[u8]) -> Option<[u32; 2]> {
    let rest = private_data.strip_prefix(&MAGIC)?;
    let (to, rest) = rest.split_first_chunk()?;
    let (from, _) = rest.split_first_chunk()?;
    Some([*to, *from].map(u32::from_be_bytes))
}

enum Step {
    /// Connect at this time.
    ConnectAt(Instant),
    Connecting(CmId),
    AwaitsRequest,
    /// Dropping the identifier would end the connection.
    Done(CmId),
}

struct Pair {
    qp: Weak<Qp>,
    names: Names,
    step: Step,
    until: Instant,
}

/// Requests that wait for our queue pair to be ready, oldest first, each with its peer and its time limit.
struct Pending<R>(VecDeque<(IpAddr, Instant, R)>);

impl<R> Pending<R> {
    /// Adds a request, and evicts the oldest one of the same peer or of all when there are too many.
    fn add(&mut self, peer: IpAddr, until: Instant, request: R) {
        let of_peer = self.0.iter().filter(|(from, ..)| *from == peer).count();
        if of_peer >= MAX_PENDING_OF_PEER {
            self.take(|from, _| from == peer);
        } else if self.0.len() >= MAX_PENDING {
            self.0.pop_front();
        }
        self.0.push_back((peer, until, request));
    }

    /// Removes the oldest request that `fits`.
    fn take(&mut self, fits: impl Fn(IpAddr, &R) -> bool) -> Option<R> {
        let index = self.0.iter().position(|(peer, _, request)| fits(*peer, request))?;
        self.0.remove(index).map(|(.., request)| request)
    }

    /// Removes the requests whose time limit has passed.
    fn expire(&mut self, now: Instant) {
        self.0.retain(|(_, until, _)| now < *until);
    }
}

struct Table {
    pairs: BTreeMap<u32, Pair>,
    pending: Pending<IncomingRequest>,
}

/// The pairing of one device. Dropping it ends its thread, so that the device can be closed.
pub struct Pairing {
    pairs: Arc<Pairs>,
    thread: Option<JoinHandle<()>>,
    /// The number of this process among those that share its addresses.
    process: u32,
}

/// The state that the thread and the callers share.
pub struct Pairs {
    device: Device,
    events: EventChannel,
    /// Bound; it listens from the first connection on.
    listener: Option<CmId>,
    table: Mutex<Table>,
    bell: OwnedFd,
    stops: AtomicBool,
}

impl Pairing {
    /// Reserves a port, on which the numbers of the process's queue pairs depend.
    pub fn new(device: &Device) -> Result<Self, Errno> {
        let system = |error: std::io::Error| failure::io(&error);
        let events = EventChannel::new().map_err(system)?;
        let bound = |process| {
            let listener = CmId::new(device, &events);
            let port = port_of(config().pairing_port?, first_number(process))?;
            listener.bind(SocketAddr::new([0; 4].into(), port)).ok()?;
            Some((process, listener))
        };
        let (process, listener) = (0..MAX_PROCESSES).find_map(bound).unzip();
        let bell =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| system(e.into()))?;
        let pairs = Arc::new(Pairs {
            device: device.clone(),
            events,
            listener,
            table: Mutex::new(Table { pairs: BTreeMap::new(), pending: Pending(VecDeque::new()) }),
            bell,
            stops: AtomicBool::new(false),
        });
        Ok(Self { pairs, thread: None, process: process.unwrap_or(0) })
    }

    /// The first number of the process's queue pairs, and the last.
    pub const fn numbers(&self) -> [u32; 2] {
        [first_number(self.process), first_number(self.process + 1) - 1]
    }

    /// Begins to listen, and starts the thread, unless that has been done.
    pub fn start(&mut self) -> Result<(), Errno> {
        let base = config().pairing_port.ok_or(Errno::EOPNOTSUPP)?;
        if self.thread.is_some() {
            return Ok(());
        }
        let options = ListenOptions { backlog: BACKLOG, ..ListenOptions::default() };
        let listened = self.pairs.listener.as_ref().map(|listener| listener.listen(options));
        match listened {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                failure::explain(&format_args!("peers cannot connect by queue pair number: {error}"));
            }
            None => failure::explain(&format_args!(
                "peers cannot connect by queue pair number: TCP ports {base} to {} are in use",
                u32::from(base) + MAX_PROCESSES - 1
            )),
        }
        let shared = Arc::clone(&self.pairs);
        let thread = spawn("xwarp-pairing", move || shared.run());
        self.thread = Some(thread.map_err(|error| failure::io(&error))?);
        Ok(())
    }

    /// The pairs, for a queue pair that joins or leaves.
    pub fn pairs(&self) -> Arc<Pairs> {
        Arc::clone(&self.pairs)
    }
}

impl Drop for Pairing {
    fn drop(&mut self) {
        self.pairs.stops.store(true, Ordering::Release);
        self.pairs.ring();
        let Some(thread) = self.thread.take() else { return };
        // The thread of a failed device ends by itself, and is not in this process if it is a child.
        if self.pairs.device.failure().is_none() && thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

impl Pairs {
    /// Connects `qp`, or waits for its peer.
    pub fn add(&self, qp: &Arc<Qp>, names: Names) {
        let now = Instant::now();
        let step = if names.connects() { Step::ConnectAt(now) } else { Step::AwaitsRequest };
        let pair = Pair { qp: Arc::downgrade(qp), names, step, until: now + LIMIT };
        lock(&self.table).pairs.insert(names.own_number, pair);
        self.ring();
    }

    /// Ends the connection of a queue pair in order.
    pub fn remove(&self, number: u32) {
        let pair = lock(&self.table).pairs.remove(&number);
        if let Some(Pair { step: Step::Done(cm) | Step::Connecting(cm), .. }) = pair {
            let _ = cm.disconnect();
        }
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn run(&self) {
        while !self.stops.load(Ordering::Acquire) && self.device.failure().is_none() {
            while let Some(event) = self.events.poll() {
                self.advance(event);
            }
            let next = self.step();
            let limit = Timespec::try_from(next).ok();
            let mut fds = [PollFd::new(&self.events, PollFlags::IN), PollFd::new(&self.bell, PollFlags::IN)];
            let _ = poll(&mut fds, limit.as_ref());
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
    }

    /// Starts connections whose time has come, and gives up those beyond their time limit. Returns the time until the
    /// next call.
    fn step(&self) -> Duration {
        let now = Instant::now();
        let mut table = lock(&self.table);
        let Table { pairs, pending } = &mut *table;
        pending.expire(now);
        let mut next = Duration::from_millis(500);
        pairs.retain(|_, pair| {
            let Some(qp) = pair.qp.upgrade() else { return false };
            match pair.step {
                Step::Done(_) => return true,
                _ if now >= pair.until => {
                    let _ = qp.half(pair.names.own_number).abort();
                    return false;
                }
                Step::ConnectAt(at) if now >= at => {
                    let cm = CmId::new(&self.device, &self.events);
                    let port = config().pairing_port.and_then(|base| port_of(base, pair.names.peer_number));
                    let peer = SocketAddr::new(pair.names.peer, port.unwrap_or(0));
                    let begun = cm
                        .bind(SocketAddr::new(pair.names.local, 0))
                        .and_then(|()| cm.resolve_address(peer, RESOLVE));
                    pair.step =
                        if begun.is_ok() { Step::Connecting(cm) } else { Step::ConnectAt(now + RETRY) };
                }
                Step::AwaitsRequest => {
                    let numbers = [pair.names.own_number, pair.names.peer_number];
                    let fits = |peer, request: &IncomingRequest| {
                        peer == pair.names.peer && decode(&request.private_data) == Some(numbers)
                    };
                    if let Some(request) = pending.take(fits) {
                        let limits = self.device.attributes().limits;
                        let options = AcceptOptions {
                            ird: limits.max_ird,
                            ord: limits.max_ord,
                            ..AcceptOptions::default()
                        };
                        if request.id.accept(qp.half(pair.names.own_number), options).is_ok() {
                            pair.step = Step::Connecting(request.id);
                        }
                    }
                }
                Step::ConnectAt(_) | Step::Connecting(_) => {}
            }
            if matches!(pair.step, Step::ConnectAt(_)) {
                next = RETRY;
            }
            true
        });
        next
    }

    fn advance(&self, event: Event) {
        let mut table = lock(&self.table);
        if let EventKind::ConnectRequest(request) = event.kind {
            if decode(&request.private_data).is_some() {
                table.pending.add(request.peer.ip(), Instant::now() + LIMIT, request);
            }
            return;
        }
        let is_of = |pair: &&mut Pair| key(&pair.step) == Some(event.id);
        let Some(pair) = table.pairs.values_mut().find(is_of) else { return };
        let cm = match &pair.step {
            Step::Connecting(cm) => cm,
            Step::Done(cm) => {
                // The peer has left: its end closes when ours does.
                if matches!(event.kind, EventKind::Disconnected) {
                    let _ = cm.disconnect();
                }
                return;
            }
            Step::ConnectAt(_) | Step::AwaitsRequest => return,
        };
        let going = match event.kind {
            EventKind::AddressResolved => cm.resolve_route().is_ok(),
            EventKind::RouteResolved => {
                let limits = self.device.attributes().limits;
                let options = ConnectOptions {
                    private_data: pair.names.encode(),
                    ird: limits.max_ird,
                    ord: limits.max_ord,
                    ..ConnectOptions::default()
                };
                let number = pair.names.own_number;
                pair.qp.upgrade().is_some_and(|qp| cm.connect(qp.half(number), options).is_ok())
            }
            EventKind::Established { .. } => {
                let step = std::mem::replace(&mut pair.step, Step::AwaitsRequest);
                if let Step::Connecting(cm) = step {
                    pair.step = Step::Done(cm);
                }
                return;
            }
            EventKind::AddressError(_)
            | EventKind::Refused
            | EventKind::Rejected { .. }
            | EventKind::TimedOut
            | EventKind::Unreachable
            | EventKind::ConnectError(_)
            | EventKind::RequestGone => false,
            _ => true,
        };
        if !going {
            pair.step = if pair.names.connects() {
                if let Some(qp) = pair.qp.upgrade() {
                    let _ = qp.half(pair.names.own_number).reset();
                }
                Step::ConnectAt(Instant::now() + RETRY)
            } else {
                Step::AwaitsRequest
            };
        }
    }
}

fn key(step: &Step) -> Option<CmKey> {
    match step {
        Step::Connecting(cm) | Step::Done(cm) => Some(cm.key()),
        Step::ConnectAt(_) | Step::AwaitsRequest => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_floods_us_evicts_its_own_requests_only() {
        let [hostile, other]: [IpAddr; 2] = [[10, 0, 0, 66].into(), [10, 0, 0, 2].into()];
        let until = Instant::now() + LIMIT;
        let mut pending = Pending(VecDeque::new());
        pending.add(other, until, usize::MAX);
        for number in 0..10 * MAX_PENDING {
            pending.add(hostile, until, number);
        }
        assert_eq!(pending.0.len(), MAX_PENDING_OF_PEER + 1);
        assert_eq!(pending.take(|peer, _| peer == other), Some(usize::MAX));
        assert_eq!(pending.take(|_, _| true), Some(10 * MAX_PENDING - MAX_PENDING_OF_PEER), "the oldest");
        pending.expire(until);
        assert!(pending.0.is_empty());
    }

    #[test]
    fn many_hostile_addresses_do_not_keep_a_new_request_out() {
        let until = Instant::now() + LIMIT;
        let mut pending = Pending(VecDeque::new());
        for number in 0..10 * MAX_PENDING {
            pending.add(std::net::Ipv6Addr::from(number as u128).into(), until, number);
        }
        let new: IpAddr = [10, 0, 0, 2].into();
        pending.add(new, until, 0);
        assert_eq!(pending.0.len(), MAX_PENDING);
        assert_eq!(pending.take(|peer, _| peer == new), Some(0));
    }

    #[test]
    fn the_number_of_a_queue_pair_names_the_port_of_its_process() {
        assert_eq!(port_of(4794, 2), Some(4794));
        let last = first_number(MAX_PROCESSES) - 1;
        assert_eq!(last, 0xff_ffff, "the numbers have 24 bits");
        assert_eq!(port_of(4794, last), Some(4809));
        assert_eq!(port_of(u16::MAX, last), None);
    }

    #[test]
    fn exactly_one_end_connects_and_names_both_queue_pairs() {
        let [a, b]: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        for (own_number, peer_number) in [(7, 9), (9, 7), (7, 7)] {
            let ours = Names { local: a, peer: b, own_number, peer_number };
            let theirs = Names { local: b, peer: a, own_number: peer_number, peer_number: own_number };
            assert_ne!(ours.connects(), theirs.connects());
            assert_eq!(decode(&ours.encode()), Some([peer_number, own_number]));
        }
        assert_eq!(decode(b"xwqp\0\0\0\x01\0\0\0"), None);
        assert_eq!(decode(b"other\0\0\0\x01\0\0\0\x02"), None);
    }
}
