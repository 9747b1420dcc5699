//! An interface that counts the frames that it sends, and whose kick a test can hold.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
    mpsc::{Receiver, SyncSender, sync_channel},
};

use xwarp_tcp::{
    forward_link,
    link::{Kick, Kicked, Link, QueueId, RingFull, TxFrame},
};
use xwarp_verbs::{forward_interface, interface::Interface, sim::SimInterface};

/// The observable behaviour of a [`Probed`] interface.
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
        Kicked::Done(1)
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
    forward_link!(0: chunk_bytes, tx_available, rx_capacity, rx_available, receive, rx_chunks, rx_head, recycle, alloc,
        tx_chunks_into, release, flush, steer, unsteer);

    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        self.0.submit(queue, frame, len)?;
        self.1.frames.fetch_add(1, Ordering::SeqCst);
        self.1.wanted.store(true, Ordering::SeqCst);
        Ok(())
    }
}

impl Interface for Probed {
    forward_interface!(0: attributes, readiness, resolver, change, counters);

    fn kicker(&mut self) -> Option<Arc<dyn Kick>> {
        Some(Arc::new(ProbeKick(Arc::clone(&self.1))))
    }
}
