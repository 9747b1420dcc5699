//! An interface that this process has opened: one device of xwarp, shared by all contexts on it.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use nix::errno::Errno;
use xwarp_verbs::{CqId, Device, QpId, SrqId};

use super::{
    cq::Cq,
    device::Port,
    pairing::{Pairing, Pairs},
    qp::Qp,
    srq::Srq,
};
use crate::{
    abi::device::ibv_gid,
    boundary::{at_exit, objects},
    cm::id::Id,
    config::config,
    sleep::while_process_exits,
    wait::{lock, spawn, without_signals},
};

/// Longest time that a process which exits waits until its connections are closed at both ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// The first number of queue pairs. 0 and 1 have a meaning in InfiniBand.
const FIRST_NUMBER: u32 = 2;

/// An opened interface.
pub struct Card {
    // Dropped before the device that it uses.
    pairing: Mutex<Option<Pairing>>,
    pub device: Device,
    pub port: Arc<Port>,
    /// Apart from the card, because the engine uses it, which must not drop the card.
    pub end: Arc<End>,
    names: Mutex<Names>,
}

/// The end of a device, which is reported once on standard error.
pub struct End {
    interface: String,
    has_come: AtomicBool,
}

impl End {
    /// The device has ended.
    pub fn come(&self) {
        if !self.has_come.swap(true, Ordering::SeqCst) {
            let name = &self.interface;
            let text = format!(
                "xwarp: the device {name} has ended, because its interface was removed, its xwarpd or its fabric has ended, or its \
                 engine failed: its connections are closed, and the posted requests fail\n"
            );
            // One write, which lines of other processes do not cut.
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }
}

/// Objects by the identifiers in events and programs.
#[derive(Default)]
struct Names {
    qps: BTreeMap<QpId, Weak<Qp>>,
    by_number: BTreeMap<u32, Weak<Qp>>,
    last_number: u32,
    cqs: BTreeMap<CqId, Weak<Cq>>,
    srqs: BTreeMap<SrqId, Weak<Srq>>,
}

/// The interfaces that are open, by their port's address.
static OPEN: Mutex<BTreeMap<usize, Weak<Card>>> = Mutex::new(BTreeMap::new());

/// Opens the interface of `port`, or returns it when it is open. Signals stay with the program's threads.
pub fn open(port: &Arc<Port>) -> Result<Arc<Card>, Errno> {
    let mut open = lock(&OPEN);
    let key = Arc::as_ptr(port).addr();
    // A child does not use its parent's device, but may open one of its own.
    let known = open.get(&key).and_then(Weak::upgrade).filter(|card| card.device.failure().is_none());
    if let Some(card) = known {
        return Ok(card);
    }
    let options = config().device_options(&port.name, open.is_empty());
    let opened = without_signals(|| Device::open_with(&port.opens, options));
    let device = opened.map_err(|error| {
        say!("cannot open {}: {error}", port.name);
        Errno::ENODEV
    })?;
    if open.is_empty() {
        at_exit(farewell);
    }
    let card = Arc::new(Card {
        device,
        port: Arc::clone(port),
        end: Arc::new(End { interface: port.name.clone(), has_come: AtomicBool::new(false) }),
        names: Mutex::new(Names { last_number: FIRST_NUMBER, ..Names::default() }),
        pairing: Mutex::default(),
    });
    open.insert(key, Arc::downgrade(&card));
    Ok(card)
}

/// Closes connections in order when the process exits: a kernel would do that for it. A signal handler that calls `exit` may have
/// interrupted a thread that holds an engine's lock, so another thread does this, and the process exits without it after a time.
extern "C" fn farewell() {
    while_process_exits(hang_up_all);
}

fn hang_up_all() {
    let (sender, done) = mpsc::channel();
    let started = spawn("xwarp-farewell", move || {
        close_all();
        let _ = sender.send(());
    });
    if started.is_ok() {
        let _ = done.recv_timeout(2 * FAREWELL);
    }
}

fn close_all() {
    let cards: Vec<_> = lock(&OPEN).values().filter_map(Weak::upgrade).collect();
    for card in cards.iter().filter(|card| card.device.failure().is_none()) {
        for id in objects::<Id>() {
            id.hang_up();
        }
        card.device.drain(FAREWELL);
    }
}

impl Card {
    /// Runs the engine by `attend` for a call that waits for an event. After the end of the device, such a call gets what `poll` still finds,
    /// and `EIO` then, as from a kernel device that was removed.
    pub fn attend<T>(
        &self,
        poll: impl FnOnce() -> Option<T>,
        attend: impl FnOnce() -> io::Result<Option<T>>,
    ) -> io::Result<Option<T>> {
        if !self.end.has_come.load(Ordering::SeqCst) {
            return attend();
        }
        // The requests are flushed under the engine's lock: after this, the notifications for them are there.
        self.device.progress();
        poll().map(Some).ok_or_else(|| Errno::EIO.into())
    }

    /// A number for a new queue pair, for programs and peers: 24 bits, and neither 0 nor 1.
    pub fn qp_number(&self) -> u32 {
        let [first, last] = self.with_pairing(|pairing| pairing.numbers()).unwrap_or([0, u32::MAX >> 8]);
        let first = first.max(FIRST_NUMBER);
        let mut names = lock(&self.names);
        loop {
            let next = names.last_number + 1;
            names.last_number = if (first..=last).contains(&next) { next } else { first };
            if !names.by_number.contains_key(&names.last_number) {
                return names.last_number;
            }
        }
    }

    /// Connections by queue pair number, started at first use.
    pub fn pairing(&self) -> Result<Arc<Pairs>, Errno> {
        self.with_pairing(|pairing| pairing.start().map(|()| pairing.pairs()))?
    }

    fn with_pairing<T>(&self, f: impl FnOnce(&mut Pairing) -> T) -> Result<T, Errno> {
        let mut pairing = lock(&self.pairing);
        match &mut *pairing {
            Some(pairing) => Ok(f(pairing)),
            none => Ok(f(none.insert(Pairing::new(&self.device)?))),
        }
    }

    pub fn add_qp(&self, qp: &Arc<Qp>) {
        lock(&qp.context.owned).qps.insert(qp.qp.id());
        let mut names = lock(&self.names);
        names.qps.insert(qp.qp.id(), Arc::downgrade(qp));
        names.by_number.insert(qp.number(), Arc::downgrade(qp));
    }

    /// Reserves the number of a companion.
    pub fn add_companion(&self, qp: &Arc<Qp>, number: u32) {
        lock(&self.names).by_number.insert(number, Arc::downgrade(qp));
    }

    pub fn remove_qp(&self, qp: &Qp) {
        lock(&qp.context.owned).qps.remove(&qp.qp.id());
        qp.context.discard_events();
        let mut names = lock(&self.names);
        names.qps.remove(&qp.qp.id());
        names.by_number.remove(&qp.number());
        if let Some(companion) = qp.companion_number() {
            names.by_number.remove(&companion);
        }
    }

    /// The object of an event that the program is about to get, which counts as unacknowledged: [`Self::remove_qp`] comes before, and
    /// then there is no event, or after, and then the destruction waits for the acknowledgement.
    pub fn qp_of_event(&self, id: QpId) -> Option<Arc<Qp>> {
        let names = lock(&self.names);
        let found = names.qps.get(&id)?.upgrade()?;
        found.unacknowledged.returned();
        Some(found)
    }

    pub fn qp_by_number(&self, number: u32) -> Option<Arc<Qp>> {
        lock(&self.names).by_number.get(&number)?.upgrade()
    }

    pub fn add_cq(&self, cq: &Arc<Cq>) {
        lock(&cq.context.owned).cqs.insert(cq.cq.id());
        lock(&self.names).cqs.insert(cq.cq.id(), Arc::downgrade(cq));
    }

    pub fn remove_cq(&self, cq: &Cq) {
        lock(&cq.context.owned).cqs.remove(&cq.cq.id());
        cq.context.discard_events();
        lock(&self.names).cqs.remove(&cq.cq.id());
    }

    /// The object of an event that the program is about to get, which counts as unacknowledged: [`Self::remove_cq`] comes before, and
    /// then there is no event, or after, and then the destruction waits for the acknowledgement.
    pub fn cq_of_event(&self, id: CqId) -> Option<Arc<Cq>> {
        let names = lock(&self.names);
        let found = names.cqs.get(&id)?.upgrade()?;
        found.unacknowledged.returned();
        Some(found)
    }

    pub fn add_srq(&self, srq: &Arc<Srq>) {
        lock(&srq.context().owned).srqs.insert(srq.srq.id());
        lock(&self.names).srqs.insert(srq.srq.id(), Arc::downgrade(srq));
    }

    pub fn remove_srq(&self, srq: &Srq) {
        lock(&srq.context().owned).srqs.remove(&srq.srq.id());
        srq.context().discard_events();
        lock(&self.names).srqs.remove(&srq.srq.id());
    }

    /// The object of an event that the program is about to get, which counts as unacknowledged: [`Self::remove_srq`] comes before, and
    /// then there is no event, or after, and then the destruction waits for the acknowledgement.
    pub fn srq_of_event(&self, id: SrqId) -> Option<Arc<Srq>> {
        let names = lock(&self.names);
        let found = names.srqs.get(&id)?.upgrade()?;
        found.unacknowledged.returned();
        Some(found)
    }

    /// The addresses as a table of GIDs: IPv4 first, link-local addresses last.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let rank = |address: &IpAddr| match address {
            IpAddr::V4(_) => 0,
            IpAddr::V6(v6) if v6.is_unicast_link_local() => 2,
            IpAddr::V6(_) => 1,
        };
        let mut addresses = self.device.attributes().interface.addresses;
        addresses.sort_by_key(|address| (rank(address), *address));
        addresses
    }
}

/// The address of a GID.
pub fn address(gid: ibv_gid) -> IpAddr {
    Ipv6Addr::from(gid.raw).to_canonical()
}

/// The GID of an address: IPv4 is mapped.
pub fn gid(address: IpAddr) -> ibv_gid {
    let v6 = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    ibv_gid { raw: v6.octets() }
}
