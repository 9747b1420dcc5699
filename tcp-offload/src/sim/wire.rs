//! [`SimLink`]s and the [`Wire`] that connects them. The frames of a link go through the same states as UMEM chunks,
//! so that a frame leaked or freed twice is detected as with AF_XDP.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use siphasher::sip::SipHasher13;
use smallvec::{SmallVec, smallvec};

use super::{Direction, Faults, Tally, audit::Audit};
use crate::{
    link::{ChunksMut, Link, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame},
    time::Instant,
};

/// Parameters of a wire and its links.
#[derive(Debug, Clone, Copy)]
pub struct WireConfig {
    /// Bytes of a chunk; frames have one chunk.
    pub chunk_bytes: usize,
    /// Transmit frames of each link.
    pub tx_frames: usize,
    /// Receive frames of each link.
    pub rx_frames: usize,
    /// Frames that can wait in the transmit ring for a flush.
    pub ring: usize,
    /// Faults from the first link to the second, and back.
    pub faults: [Faults; 2],
    /// Seed of all randomness of the wire.
    pub seed: u64,
}

impl Default for WireConfig {
    fn default() -> Self {
        Self {
            chunk_bytes: 4096,
            tx_frames: 1024,
            rx_frames: 1024,
            ring: 256,
            faults: [Faults::default(); 2],
            seed: 1,
        }
    }
}

/// Number of a link's frames in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Census {
    /// Transmit frames that can be allocated.
    pub tx_free: usize,
    /// Transmit frames whose token is held.
    pub tx_out: usize,
    /// Received frames whose token is held.
    pub rx_out: usize,
    /// Frames lost because no receive frame was free.
    pub rx_dropped: u64,
    /// Steering rules in force.
    pub rules: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TxPlace {
    Free,
    Retained,
    Sending,
    SendingReleased,
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
    tx: Vec<(Box<[u8]>, TxPlace)>,
    tx_free: Vec<u32>,
    /// Submitted and not yet flushed: (frame, length).
    submitted: VecDeque<(u32, usize)>,
    /// Received bytes, and whether the frame's token is held.
    rx: Vec<(Vec<u8>, bool)>,
    rx_free: Vec<u32>,
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
        let chunk = || (vec![0; config.chunk_bytes].into_boxed_slice(), TxPlace::Free);
        Self {
            wire,
            end,
            chunk_bytes: config.chunk_bytes,
            ring: config.ring,
            tx: (0..config.tx_frames).map(|_| chunk()).collect(),
            tx_free: (0..config.tx_frames as u32).rev().collect(),
            submitted: VecDeque::new(),
            rx: vec![(Vec::new(), false); config.rx_frames],
            rx_free: (0..config.rx_frames as u32).rev().collect(),
            rx_dropped: 0,
            rules: BTreeSet::new(),
        }
    }

    /// Calls `f` in the sender's thread after a frame was sent to this end, for use in real time.
    pub fn on_arrival(&self, f: impl Fn() + Send + Sync + 'static) {
        self.wire.lock().ports[self.end].notify = Some(Arc::new(f));
    }

    /// Whether a frame has arrived and waits to be received.
    pub fn has_arrivals(&self) -> bool {
        let shared = self.wire.lock();
        shared.ports[self.end].towards.next_due().is_some_and(|due| due <= shared.now)
    }

    /// The number of frames in each state.
    pub fn census(&self) -> Census {
        let out = |p: &TxPlace| matches!(p, TxPlace::Retained | TxPlace::Sending);
        Census {
            tx_free: self.tx_free.len(),
            tx_out: self.tx.iter().filter(|(_, p)| out(p)).count(),
            rx_out: self.rx.len() - self.rx_free.len(),
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

impl Link for SimLink {
    fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    fn tx_available(&self) -> usize {
        self.tx_free.len()
    }

    fn rx_frames(&self) -> usize {
        self.rx.len()
    }

    fn rx_available(&self, _queue: QueueId) -> usize {
        self.rx_free.len()
    }

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let mut shared = self.wire.lock();
        let WireState { now, ports, trace, .. } = &mut *shared;
        let port = &mut ports[self.end];
        let mut received = 0;
        while received < max {
            let Some(bytes) = port.towards.deliver(*now) else { break };
            (*now, self.end, &bytes).hash(trace);
            let Some(head) = self.rx_free.pop() else {
                self.rx_dropped += 1;
                continue;
            };
            batch.push(RxFrame::new(head, 1, bytes.len() as u32, QueueId(0)));
            self.rx[head as usize] = (bytes, true);
            received += 1;
        }
        received
    }

    fn rx_chunk(&self, frame: &RxFrame, index: usize) -> &[u8] {
        if index == 0 { &self.rx[frame.head() as usize].0 } else { &[] }
    }

    fn recycle(&mut self, frame: RxFrame) {
        let out = std::mem::replace(&mut self.rx[frame.head() as usize].1, false);
        assert!(out, "receive frame recycled twice");
        self.rx_free.push(frame.head());
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        if len > self.chunk_bytes {
            return None;
        }
        let head = self.tx_free.pop()?;
        self.tx[head as usize].1 = TxPlace::Retained;
        Some(TxFrame::new(head, 1))
    }

    fn tx_chunks(&mut self, frame: &mut TxFrame) -> Option<ChunksMut<'_>> {
        let (chunk, place) = &mut self.tx[frame.head() as usize];
        match place {
            TxPlace::Retained => Some(smallvec![&mut **chunk]),
            TxPlace::Sending => None,
            TxPlace::Free | TxPlace::SendingReleased => panic!("a token for a frame that was released"),
        }
    }

    fn submit(&mut self, _queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        if self.submitted.len() >= self.ring {
            return Err(RingFull);
        }
        let place = &mut self.tx[frame.head() as usize].1;
        assert_eq!(*place, TxPlace::Retained, "submitted while it is still being sent");
        *place = TxPlace::Sending;
        self.submitted.push_back((frame.head(), len));
        Ok(())
    }

    fn release(&mut self, frame: TxFrame) {
        let place = &mut self.tx[frame.head() as usize].1;
        *place = match *place {
            TxPlace::Retained => {
                self.tx_free.push(frame.head());
                TxPlace::Free
            }
            TxPlace::Sending => TxPlace::SendingReleased,
            TxPlace::Free | TxPlace::SendingReleased => panic!("transmit frame released twice"),
        };
    }

    fn flush(&mut self) {
        if self.submitted.is_empty() {
            return;
        }
        let mut notified = Notified::new();
        let mut shared = self.wire.lock();
        for (head, len) in self.submitted.drain(..) {
            let (chunk, place) = &mut self.tx[head as usize];
            shared.audit.sent(&chunk[..len]);
            notified = shared.send(self.end, &chunk[..len]);
            *place = if *place == TxPlace::SendingReleased {
                self.tx_free.push(head);
                TxPlace::Free
            } else {
                TxPlace::Retained
            };
        }
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
