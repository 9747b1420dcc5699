//! An interface that counts the frames that it sends, and whose kick a test can hold.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use xwarp_tcp::link::{
    ChunksMut, Kick, Kicked, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame,
};
use xwarp_verbs::{
    interface::{Interface, InterfaceAttributes, InterfaceChange, Resolver},
    sim::SimInterface,
};

/// What a [`Probed`] interface does, seen from outside.
#[derive(Debug, Default)]
pub struct Probe {
    frames: AtomicU64,
    /// Frames were submitted and flushed since the last kick.
    wanted: AtomicBool,
    kicks: AtomicU64,
    hold: Mutex<Option<(SyncSender<()>, Receiver<()>)>>,
}

/// Holds the next kick: it is inside once `inside` receives, and leaves when `leave` sends or is dropped.
pub struct Held {
    pub inside: Receiver<()>,
    pub leave: SyncSender<()>,
}

impl Probe {
    /// Frames submitted so far.
    pub fn frames(&self) -> u64 {
        self.frames.load(Ordering::SeqCst)
    }

    /// Kicks that had something to send.
    pub fn kicks(&self) -> u64 {
        self.kicks.load(Ordering::SeqCst)
    }

    pub fn hold_next_kick(&self) -> Held {
        let (enter, inside) = sync_channel(1);
        let (leave, left) = sync_channel(1);
        *self.hold.lock().unwrap() = Some((enter, left));
        Held { inside, leave }
    }
}

/// The kick of a probed interface. The frames are in the cable already: only its time is simulated.
struct ProbeKick(Arc<Probe>);

impl Kick for ProbeKick {
    fn kick(&self) -> Kicked {
        if !self.0.wanted.swap(false, Ordering::SeqCst) {
            return Kicked::Nothing;
        }
        self.0.kicks.fetch_add(1, Ordering::SeqCst);
        let held = self.0.hold.lock().unwrap().take();
        if let Some((enter, left)) = held {
            enter.send(()).unwrap();
            let _ = left.recv();
        }
        Kicked::Done
    }
}

pub struct Probed(SimInterface, Arc<Probe>);

impl Probed {
    pub fn new(inner: SimInterface) -> (Self, Arc<Probe>) {
        let probe = Arc::<Probe>::default();
        (Self(inner, Arc::clone(&probe)), probe)
    }
}

impl Link for Probed {
    fn chunk_bytes(&self) -> usize {
        self.0.chunk_bytes()
    }
    fn tx_available(&self) -> usize {
        self.0.tx_available()
    }
    fn rx_capacity(&self) -> usize {
        self.0.rx_capacity()
    }
    fn rx_available(&self, queue: QueueId) -> usize {
        self.0.rx_available(queue)
    }
    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        self.0.receive(batch, max)
    }
    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        self.0.rx_chunks(frame)
    }
    fn recycle(&mut self, frame: RxFrame) {
        self.0.recycle(frame);
    }
    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        self.0.alloc(len)
    }
    fn tx_chunks(&mut self, frame: &mut TxFrame) -> Option<ChunksMut<'_>> {
        self.0.tx_chunks(frame)
    }
    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        self.0.submit(queue, frame, len)?;
        self.1.frames.fetch_add(1, Ordering::SeqCst);
        self.1.wanted.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn release(&mut self, frame: TxFrame) {
        self.0.release(frame);
    }
    fn flush(&mut self) {
        self.0.flush();
    }
    fn steer(&mut self, rule: Steer) -> Result<(), SteerError> {
        self.0.steer(rule)
    }
    fn unsteer(&mut self, rule: Steer) {
        self.0.unsteer(rule);
    }
}

impl Interface for Probed {
    fn attributes(&self) -> InterfaceAttributes {
        self.0.attributes()
    }
    fn readiness(&self) -> io::Result<Vec<OwnedFd>> {
        self.0.readiness()
    }
    fn resolver(&self) -> Arc<dyn Resolver> {
        self.0.resolver()
    }
    fn kicker(&mut self) -> Option<Arc<dyn Kick>> {
        Some(Arc::new(ProbeKick(Arc::clone(&self.1))))
    }
    fn change(&mut self) -> Option<InterfaceChange> {
        self.0.change()
    }
    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64)) {
        self.0.counters(tell);
    }
}
