//! Two [`SimLink`]s and the cable between them. Each link has its own frame memory with the same
//! places a UMEM chunk can be in, so a leaked or twice-freed frame shows here as on AF_XDP.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use smallvec::smallvec;

use super::faults::{Direction, Faults};
use crate::{
    link::{ChunksMut, Link, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame},
    time::Instant,
};

/// How a wire and its links are made.
#[derive(Debug, Clone, Copy)]
pub struct WireConfig {
    /// Bytes of a chunk; frames have one chunk.
    pub chunk_bytes: usize,
    /// Frames that a link can have out for sending and retaining.
    pub tx_frames: usize,
    /// Frames that a link can have received and not recycled.
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

/// How many frames of a link are in which place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Census {
    /// Transmit frames that can be allocated.
    pub tx_free: usize,
    /// Transmit frames whose token is out.
    pub tx_out: usize,
    /// Received frames whose token is out.
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
    /// What is on its way to this port, by arrival time and then by order of sending.
    incoming: BTreeMap<(Instant, u64), Vec<u8>>,
    towards: Direction,
    notify: Option<Arc<dyn Fn() + Send + Sync>>,
}

struct Shared {
    now: Instant,
    serial: u64,
    ports: [Port; 2],
}

/// The cable. Cheap to clone; the clones and the links share it.
#[derive(Clone)]
pub struct Wire {
    shared: Arc<Mutex<Shared>>,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}

impl Wire {
    /// A cable and the links at its two ends.
    pub fn new(config: WireConfig) -> (Self, SimLink, SimLink) {
        let port = |faults, seed| Port {
            incoming: BTreeMap::new(),
            towards: Direction::new(faults, seed),
            notify: None,
        };
        let ports = [
            port(config.faults[1], config.seed.wrapping_mul(2)),
            port(config.faults[0], config.seed.wrapping_mul(2).wrapping_add(1)),
        ];
        let shared = Arc::new(Mutex::new(Shared { now: Instant::ZERO, serial: 0, ports }));
        let wire = Self { shared };
        let link = |end| SimLink::new(wire.clone(), end, &config);
        (wire.clone(), link(0), link(1))
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves virtual time on; it never goes back.
    pub fn advance(&self, now: Instant) {
        let mut shared = self.lock();
        shared.now = shared.now.max(now);
    }

    /// When the next frame arrives anywhere, if one is under way.
    pub fn next_arrival(&self) -> Option<Instant> {
        let shared = self.lock();
        shared.ports.iter().filter_map(|p| p.incoming.keys().next().map(|k| k.0)).min()
    }

    /// Replaces the faults of both directions (first link to second, and back); frames under way keep theirs.
    pub fn with_faults(&self, faults: [Faults; 2]) {
        let mut shared = self.lock();
        shared.ports[1].towards.faults = faults[0];
        shared.ports[0].towards.faults = faults[1];
    }
}

impl Shared {
    fn send(&mut self, to: usize, bytes: &[u8]) -> Option<Arc<dyn Fn() + Send + Sync>> {
        let now = self.now;
        let port = &mut self.ports[to];
        for fate in port.towards.decide(now, bytes.len()) {
            let mut copy = bytes.to_vec();
            fate.damage(&mut copy);
            self.serial += 1;
            port.incoming.insert((fate.due, self.serial), copy);
        }
        port.notify.clone()
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
    /// Received bytes, and whether the token is out.
    rx: Vec<(Vec<u8>, bool)>,
    rx_free: Vec<u32>,
    rx_dropped: u64,
    rules: HashSet<Steer>,
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
            rules: HashSet::new(),
        }
    }

    /// Calls `f` whenever a frame was sent to this end (from the sender's thread), for use in real time.
    pub fn on_arrival(&self, f: impl Fn() + Send + Sync + 'static) {
        self.wire.lock().ports[self.end].notify = Some(Arc::new(f));
    }

    /// Whether a frame has arrived and waits to be received.
    pub fn has_arrivals(&self) -> bool {
        let shared = self.wire.lock();
        let now = shared.now;
        shared.ports[self.end].incoming.keys().next().is_some_and(|k| k.0 <= now)
    }

    /// Which frames are where.
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

    /// Puts raw bytes on the wire, as a peer without a stack would.
    pub fn inject(&mut self, bytes: &[u8]) {
        let notify = self.wire.lock().send(1 - self.end, bytes);
        if let Some(notify) = notify {
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

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let mut shared = self.wire.lock();
        let now = shared.now;
        let port = &mut shared.ports[self.end];
        let mut received = 0;
        while received < max {
            let Some(entry) = port.incoming.first_entry().filter(|e| e.key().0 <= now) else { break };
            let bytes = entry.remove();
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
        let mut notify = None;
        let mut shared = self.wire.lock();
        for (head, len) in self.submitted.drain(..) {
            let (chunk, place) = &mut self.tx[head as usize];
            notify = shared.send(1 - self.end, &chunk[..len]);
            *place = if *place == TxPlace::SendingReleased {
                self.tx_free.push(head);
                TxPlace::Free
            } else {
                TxPlace::Retained
            };
        }
        drop(shared);
        if let Some(notify) = notify {
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
