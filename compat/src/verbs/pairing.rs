//! Connections by GID and queue pair number: programs that exchange these by themselves and then call `ibv_modify_qp` work between two
//! ends of ours.
//!
//! At `INIT` the device begins to listen at a fixed port. At `RTR` the end with the smaller (GID, number) connects, and the other
//! one waits for it; the private data of the request names both queue pairs. On the wire this is plain iWARP. A thread of each
//! device executes these steps, because `ibv_modify_qp` must return: programs often tell their peer afterwards who they are.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{SigSet, SigmaskHow},
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::OwnedFd;
use xwarp_verbs::{
    Device,
    cm::{
        AcceptOptions, CmId, CmKey, ConnectOptions, Event, EventChannel, EventKind, IncomingRequest,
        ListenOptions,
    },
};

use super::qp::Qp;
use crate::{config::config, failure, wait::lock};

/// The first octets of the private data.
const MAGIC: [u8; 4] = *b"xwqp";
/// Interval between two attempts at a peer that does not listen yet.
const RETRY: Duration = Duration::from_millis(20);
/// Time that a queue pair may wait for its peer.
pub const LIMIT: Duration = Duration::from_secs(30);
/// Limit of one resolution of the peer's address.
const RESOLVE: Duration = Duration::from_secs(1);
/// Requests that wait for our queue pair to be ready; more are rejected.
const MOST_PENDING: usize = 1024;

/// What a program knows of both ends when it sets `RTR`.
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
    /// To be connected at this time.
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

#[derive(Default)]
struct Table {
    pairs: BTreeMap<u32, Pair>,
    pending: Vec<(IncomingRequest, Instant)>,
}

/// The pairing of one device.
pub struct Pairing {
    device: Device,
    events: EventChannel,
    _listener: Option<CmId>,
    table: Mutex<Table>,
    bell: OwnedFd,
}

impl Pairing {
    /// Begins to listen, and starts the thread, which ends with the process.
    pub fn start(device: &Device) -> Result<Arc<Self>, Errno> {
        let port = config().pairing_port.ok_or(Errno::EOPNOTSUPP)?;
        let system = |error: std::io::Error| failure::io(&error);
        let events = EventChannel::new().map_err(system)?;
        let listener = CmId::new(device, &events);
        let listened = listener.bind(SocketAddr::new([0; 4].into(), port)).and_then(|()| {
            listener.listen(ListenOptions { backlog: MOST_PENDING, ..ListenOptions::default() })
        });
        if let Err(error) = &listened {
            eprintln!("xwarp: peers cannot connect by queue pair number: {error}");
        }
        let bell =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| system(e.into()))?;
        let pairing = Arc::new(Self {
            device: device.clone(),
            events,
            _listener: listened.is_ok().then_some(listener),
            table: Mutex::default(),
            bell,
        });
        let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
        let thread = Arc::clone(&pairing);
        let spawned = std::thread::Builder::new().name("xwarp-pairing".into()).spawn(move || thread.run());
        if let Ok(mask) = mask {
            let _ = mask.thread_set_mask();
        }
        spawned.map_err(system)?;
        Ok(pairing)
    }

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
        while self.device.failure().is_none() {
            while let Some(event) = self.events.poll() {
                self.advance(event);
            }
            let next = self.step();
            let limit = Timespec { tv_sec: 0, tv_nsec: next.as_nanos() as i64 };
            let mut fds = [PollFd::new(&self.events, PollFlags::IN), PollFd::new(&self.bell, PollFlags::IN)];
            let _ = poll(&mut fds, Some(&limit));
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
    }

    /// Starts what is due, gives up what took too long; returns the time until the next look.
    fn step(&self) -> Duration {
        let now = Instant::now();
        let mut table = lock(&self.table);
        let Table { pairs, pending } = &mut *table;
        pending.retain(|(_, until)| now < *until);
        let mut next = Duration::from_millis(500);
        pairs.retain(|_, pair| {
            let Some(qp) = pair.qp.upgrade() else { return false };
            match pair.step {
                Step::Done(_) => return true,
                _ if now >= pair.until => {
                    let _ = qp.qp.abort();
                    return false;
                }
                Step::ConnectAt(at) if now >= at => {
                    let cm = CmId::new(&self.device, &self.events);
                    let peer = SocketAddr::new(pair.names.peer, config().pairing_port.unwrap_or(0));
                    let begun = cm
                        .bind(SocketAddr::new(pair.names.local, 0))
                        .and_then(|()| cm.resolve_address(peer, RESOLVE));
                    pair.step =
                        if begun.is_ok() { Step::Connecting(cm) } else { Step::ConnectAt(now + RETRY) };
                }
                Step::AwaitsRequest => {
                    let fits = |request: &IncomingRequest| {
                        request.peer.ip() == pair.names.peer
                            && decode(&request.private_data)
                                == Some([pair.names.own_number, pair.names.peer_number])
                    };
                    if let Some(index) = pending.iter().position(|(request, _)| fits(request)) {
                        let (request, _) = pending.swap_remove(index);
                        let limits = self.device.attributes().limits;
                        let options = AcceptOptions {
                            private_data: Vec::new(),
                            ird: limits.max_ird,
                            ord: limits.max_ord,
                        };
                        if request.id.accept(&qp.qp, options).is_ok() {
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
            if table.pending.len() < MOST_PENDING && decode(&request.private_data).is_some() {
                table.pending.push((request, Instant::now() + LIMIT));
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
                    framing: None,
                };
                pair.qp.upgrade().is_some_and(|qp| cm.connect(&qp.qp, options).is_ok())
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
                    let _ = qp.qp.reset();
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
