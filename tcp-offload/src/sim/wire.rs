//! [`SimLink`]s and the [`Wire`] that connects them. The frames of a link go through the same states as UMEM chunks,
//! so that a frame leaked or freed twice is detected as with AF_XDP.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    hash::{Hash, Hasher},
    num::NonZeroU16,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use siphasher::sip::SipHasher13;
use slab::Slab;
use smallvec::SmallVec;

use super::{Direction, Faults, Tally, audit::Audit};
use crate::{
    link::{ChunksMut, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame, chunks_for},
    time::Instant,
    wire::Sum,
};

/// Bytes of an Ethernet header with two VLAN tags.
const MAX_ETHERNET_BYTES: usize = 22;

/// What is done about the TCP checksums of sent frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Checksums {
    /// The stack computes them.
    #[default]
    Computed,
    /// The link completes them, like the hardware of a NIC.
    Completed,
    /// They stay partial, as on a veth pair.
    Partial,
}

/// Parameters of a wire and its links.
#[derive(Debug, Clone, Copy)]
pub struct WireConfig {
    /// Bytes of a chunk. Longer frames are chains of chunks.
    pub chunk_bytes: usize,
    /// Transmit chunks of each link.
    pub tx_chunks: usize,
    /// Receive chunks of each link.
    pub rx_chunks: usize,
    /// Chunks that can wait in the transmit ring for a flush.
    pub ring: usize,
    /// What is done about TCP checksums.
    pub checksums: Checksums,
    /// Faults from the first link to the second, and back.
    pub faults: [Faults; 2],
    /// Seed of all randomness of the wire.
    pub seed: u64,
}

impl Default for WireConfig {
    fn default() -> Self {
        Self {
            chunk_bytes: 4096,
            tx_chunks: 1024,
            rx_chunks: 1024,
            ring: 256,
            checksums: Checksums::default(),
            faults: [Faults::default(); 2],
            seed: 1,
        }
    }
}

impl WireConfig {
    /// The same wire with chunks of `chunk_bytes`. The number of chunks is multiplied by the number that a frame with
    /// an IP packet of `mtu` bytes needs.
    #[must_use]
    pub fn chained(self, chunk_bytes: usize, mtu: u16) -> Self {
        let chunks = (MAX_ETHERNET_BYTES + usize::from(mtu)).div_ceil(chunk_bytes);
        Self {
            chunk_bytes,
            tx_chunks: self.tx_chunks * chunks,
            rx_chunks: self.rx_chunks * chunks,
            ring: self.ring * chunks,
            ..self
        }
    }
}

/// Number of a link's frames in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Census {
    /// Transmit chunks that can be allocated.
    pub tx_free: usize,
    /// Transmit frames whose token is held.
    pub tx_out: usize,
    /// Received frames whose token is held.
    pub rx_out: usize,
    /// Frames lost because too few receive chunks were free.
    pub rx_dropped: u64,
    /// Steering rules in force.
    pub rules: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TxPlace {
    Retained,
    Sending,
    SendingReleased,
}

/// A transmit frame that is not free.
struct Outgoing {
    chunks: Vec<Box<[u8]>>,
    place: TxPlace,
}

/// A frame in the transmit ring.
struct Submitted {
    key: usize,
    len: usize,
    /// See [`TxFrame::left_checksum`].
    left_checksum: Option<NonZeroU16>,
}

struct Port {
    /// The frames in flight to this port.
    towards: Direction,
    notify: Option<Arc<dyn Fn() + Send + Sync>>,
}

struct WireState {
    now: Instant,
    ports: Vec<Port>,
    /// The port at which each hardware address was last seen.
    learned: BTreeMap<[u8; 6], usize>,
    audit: Audit,
    trace: SipHasher13,
}

/// The connection between links: a cable with two ends, or a switch. Clones are cheap and share its state with the
/// links.
#[derive(Clone)]
pub struct Wire {
    shared: Arc<Mutex<WireState>>,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}

impl Wire {
    /// A cable and the links at its two ends.
    pub fn new(config: WireConfig) -> (Self, SimLink, SimLink) {
        let [there, back] = config.faults;
        let (wire, mut links) = Self::switch(&config, &[back, there]);
        let mut end = || links.pop().expect("as many links as faults");
        let (second, first) = (end(), end());
        (wire, first, second)
    }

    /// A switch with a link for each of `faults`, which apply to the direction from the switch to that link
    /// ([`WireConfig::faults`] is ignored). The switch learns hardware addresses, and floods frames to unknown ones.
    pub fn switch(config: &WireConfig, faults: &[Faults]) -> (Self, Vec<SimLink>) {
        let seed = config.seed.wrapping_mul(faults.len() as u64);
        let port = |(faults, number): (&Faults, u64)| Port {
            towards: Direction::new(*faults, seed.wrapping_add(number)),
            notify: None,
        };
        let shared = WireState {
            now: Instant::ZERO,
            ports: faults.iter().zip(0..).map(port).collect(),
            learned: BTreeMap::new(),
            audit: Audit::default(),
            trace: SipHasher13::new(),
        };
        let wire = Self { shared: Arc::new(Mutex::new(shared)) };
        let links = (0..faults.len()).map(|end| SimLink::new(wire.clone(), end, config)).collect();
        (wire, links)
    }

    fn lock(&self) -> MutexGuard<'_, WireState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Advances virtual time to `now`; time never goes back.
    pub fn advance(&self, now: Instant) {
        let mut shared = self.lock();
        shared.now = shared.now.max(now);
    }

    /// Arrival time of the next frame at any link, if one is in flight.
    pub fn next_arrival(&self) -> Option<Instant> {
        self.lock().ports.iter().filter_map(|p| p.towards.next_due()).min()
    }

    /// Arrival time of the next frame at link `end`, if one is in flight.
    pub fn next_arrival_at(&self, end: usize) -> Option<Instant> {
        self.lock().ports.get(end)?.towards.next_due()
    }

    /// Replaces the faults of both directions of a cable (first link to second, and back); frames in flight keep
    /// theirs.
    pub fn with_faults(&self, [there, back]: [Faults; 2]) {
        self.set_faults(1, there);
        self.set_faults(0, back);
    }

    /// Replaces the faults of the direction towards link `end`; frames in flight keep theirs.
    pub fn set_faults(&self, end: usize, faults: Faults) {
        self.lock().ports[end].towards.set_faults(faults);
    }

    /// Counters of the direction towards link `end`.
    pub fn tally(&self, end: usize) -> Tally {
        self.lock().ports[end].towards.tally()
    }

    /// A hash over all frames received so far, with receiver and time. The same seed gives the same hash.
    pub fn trace_hash(&self) -> u64 {
        self.lock().trace.finish()
    }
}

type Notified = SmallVec<[Arc<dyn Fn() + Send + Sync>; 1]>;

impl WireState {
    /// Sends a frame from port `from`. Returns the callbacks to call after the lock is released.
    fn send(&mut self, from: usize, frame: &[u8]) -> Notified {
        let mut notified = Notified::new();
        for to in self.towards(from, frame) {
            let back = self.ports[to].towards.send(self.now, frame);
            notified.extend(self.ports[to].notify.clone());
            if let Some(error) = back {
                self.ports[from].towards.send(self.now, &error);
                notified.extend(self.ports[from].notify.clone());
            }
        }
        notified
    }

    fn towards(&mut self, from: usize, frame: &[u8]) -> SmallVec<[usize; 2]> {
        let address = |at| frame.get(at..).and_then(<[u8]>::first_chunk::<6>).copied();
        if let Some(source) = address(6) {
            self.learned.insert(source, from);
        }
        let others = || (0..self.ports.len()).filter(|to| *to != from);
        match address(0).and_then(|destination| self.learned.get(&destination)) {
            // On a cable, the hardware addresses are irrelevant.
            Some(to) if self.ports.len() > 2 => others().filter(|other| other == to).collect(),
            _ => others().collect(),
        }
    }
}

/// One end of a [`Wire`].
pub struct SimLink {
    wire: Wire,
    end: usize,
    chunk_bytes: usize,
    ring: usize,
    checksums: Checksums,
    tx: Slab<Outgoing>,
    tx_free: Vec<Box<[u8]>>,
    /// Submitted and not yet flushed.
    submitted: VecDeque<Submitted>,
    /// Chunks of the submitted frames.
    submitted_chunks: usize,
    /// The bytes of the received frames whose token is held.
    rx: Slab<Vec<u8>>,
    rx_capacity: usize,
    rx_free: usize,
    rx_dropped: u64,
    rules: BTreeSet<Steer>,
}

impl fmt::Debug for SimLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimLink")
            .field("end", &self.end)
            .field("census", &self.census())
            .finish_non_exhaustive()
    }
}

impl SimLink {
    fn new(wire: Wire, end: usize, config: &WireConfig) -> Self {
        let chunk = || vec![0; config.chunk_bytes].into_boxed_slice();
        Self {
            wire,
            end,
            chunk_bytes: config.chunk_bytes,
            ring: config.ring,
            checksums: config.checksums,
            tx: Slab::new(),
            tx_free: (0..config.tx_chunks).map(|_| chunk()).collect(),
            submitted: VecDeque::new(),
            submitted_chunks: 0,
            rx: Slab::new(),
            rx_capacity: config.rx_chunks,
            rx_free: config.rx_chunks,
            rx_dropped: 0,
            rules: BTreeSet::new(),
        }
    }

    /// Calls `f` in the sender's thread after a frame was sent to this end, for use in real time.
    pub fn on_arrival(&self, f: impl Fn() + Send + Sync + 'static) {
        self.wire.lock().ports[self.end].notify = Some(Arc::new(f));
    }

    /// Changes how many chunks can wait in the transmit ring.
    pub fn set_ring(&mut self, chunks: usize) {
        self.ring = chunks;
    }

    /// Whether a frame has arrived and waits to be received.
    pub fn has_arrivals(&self) -> bool {
        let shared = self.wire.lock();
        shared.ports[self.end].towards.next_due().is_some_and(|due| due <= shared.now)
    }

    /// The number of frames in each state.
    pub fn census(&self) -> Census {
        let held = |(_, frame): &(usize, &Outgoing)| frame.place != TxPlace::SendingReleased;
        Census {
            tx_free: self.tx_free.len(),
            tx_out: self.tx.iter().filter(held).count(),
            rx_out: self.rx.len(),
            rx_dropped: self.rx_dropped,
            rules: self.rules.len(),
        }
    }

    /// Whether a steering rule is in force.
    pub fn is_steered(&self, rule: Steer) -> bool {
        self.rules.contains(&rule)
    }

    /// Puts raw bytes on the wire, as a peer without a stack would.
    pub fn inject(&mut self, bytes: &[u8]) {
        let notified = self.wire.lock().send(self.end, bytes);
        for notify in notified {
            notify();
        }
    }
}

/// Completes the partial checksum of the TCP header at byte `header`, as hardware does.
fn complete_checksum(frame: &mut [u8], header: usize) {
    let checksum = Sum::of(&frame[header..]).checksum();
    frame[header + 16..header + 18].copy_from_slice(&checksum.to_be_bytes());
}

impl Link for SimLink {
    fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    fn offloads_checksums(&self) -> bool {
        self.checksums != Checksums::Computed
    }

    fn tx_available(&self) -> usize {
        self.tx_free.len()
    }

    fn rx_capacity(&self) -> usize {
        self.rx_capacity
    }

    fn rx_available(&self, _queue: QueueId) -> usize {
        self.rx_free
    }

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let mut shared = self.wire.lock();
        let WireState { now, ports, trace, .. } = &mut *shared;
        let port = &mut ports[self.end];
        let mut received = 0;
        while received < max {
            let Some(bytes) = port.towards.deliver(*now) else { break };
            (*now, self.end, &bytes).hash(trace);
            let (len, chunks) = (bytes.len() as u32, bytes.len().div_ceil(self.chunk_bytes).max(1));
            let Some(free) = self.rx_free.checked_sub(chunks) else {
                self.rx_dropped += 1;
                continue;
            };
            self.rx_free = free;
            let head = self.rx.insert(bytes) as u32;
            batch.push(RxFrame::new(head, chunks as u16, len, QueueId(0)));
            received += 1;
        }
        received
    }

    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        self.rx[frame.head() as usize].chunks(self.chunk_bytes).collect()
    }

    fn rx_head(&self, frame: &RxFrame) -> &[u8] {
        let bytes = &self.rx[frame.head() as usize];
        &bytes[..bytes.len().min(self.chunk_bytes)]
    }

    fn recycle(&mut self, frame: RxFrame) {
        let bytes = self.rx.try_remove(frame.head() as usize).expect("receive frame recycled twice");
        assert_eq!(bytes.len(), frame.len(), "a token of another frame");
        self.rx_free += frame.chunks();
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        let rest = self.tx_free.len().checked_sub(chunks_for(self, len))?;
        let chunks = self.tx_free.split_off(rest);
        let count = chunks.len() as u16;
        Some(TxFrame::new(self.tx.insert(Outgoing { chunks, place: TxPlace::Retained }) as u32, count))
    }

    fn tx_chunks_into<'a>(&'a mut self, frame: &mut TxFrame, chunks: &mut ChunksMut<'a>) -> bool {
        let Outgoing { chunks: memory, place } = &mut self.tx[frame.head() as usize];
        assert_eq!(memory.len(), frame.chunks(), "a token of another frame");
        match place {
            TxPlace::Retained => {
                chunks.extend(memory.iter_mut().map(|chunk| &mut **chunk));
                true
            }
            TxPlace::Sending => false,
            TxPlace::SendingReleased => panic!("a token for a frame that was released"),
        }
    }

    fn submit(&mut self, _queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        let count = chunks_for(self, len);
        if self.submitted_chunks + count > self.ring {
            return Err(RingFull);
        }
        let Outgoing { chunks, place } = &mut self.tx[frame.head() as usize];
        assert_eq!(*place, TxPlace::Retained, "submitted while it is still being sent");
        assert!(count <= chunks.len(), "longer than the frame");
        *place = TxPlace::Sending;
        self.tx_free.extend(chunks.drain(count..));
        frame.shorten(count as u16);
        let (key, left_checksum) = (frame.head() as usize, frame.left_checksum());
        assert!(left_checksum.is_none() || self.offloads_checksums(), "a checksum left to nobody");
        self.submitted.push_back(Submitted { key, len, left_checksum });
        self.submitted_chunks += count;
        Ok(())
    }

    fn release(&mut self, frame: TxFrame) {
        let key = frame.head() as usize;
        match self.tx[key].place {
            TxPlace::Retained => self.tx_free.extend(self.tx.remove(key).chunks),
            TxPlace::Sending => self.tx[key].place = TxPlace::SendingReleased,
            TxPlace::SendingReleased => panic!("transmit frame released twice"),
        }
    }

    fn flush(&mut self) {
        if self.submitted.is_empty() {
            return;
        }
        let mut notified = Notified::new();
        let mut shared = self.wire.lock();
        for Submitted { key, len, left_checksum } in self.submitted.drain(..) {
            let frame = &mut self.tx[key];
            let mut bytes = frame.chunks.concat();
            bytes.truncate(len);
            let partial = (self.checksums == Checksums::Partial).then(|| bytes.clone());
            if let Some(header) = left_checksum {
                complete_checksum(&mut bytes, header.get().into());
            }
            shared.audit.sent(&bytes);
            notified = shared.send(self.end, &partial.unwrap_or(bytes));
            if frame.place == TxPlace::SendingReleased {
                self.tx_free.extend(self.tx.remove(key).chunks);
            } else {
                frame.place = TxPlace::Retained;
            }
        }
        self.submitted_chunks = 0;
        drop(shared);
        for notify in notified {
            notify();
        }
    }

    fn steer(&mut self, rule: Steer) -> Result<(), SteerError> {
        self.rules.insert(rule);
        Ok(())
    }

    fn unsteer(&mut self, rule: Steer) {
        self.rules.remove(&rule);
    }
}
