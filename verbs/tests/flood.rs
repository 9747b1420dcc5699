//! Peers that never stop sending, and an application that runs the engine itself (`Progress::Application`).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use xwarp_tcp::link::{ChunksMut, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame};
use xwarp_verbs::{
    CompletionChannel, Device, DeviceOptions, Progress, QueuePairOptions, RecvRequest,
    interface::{Interface, InterfaceAttributes, InterfaceChange, Resolver},
    sim::{self, SimInterface, WireConfig},
};

/// An interface at which a frame arrives before each check.
struct Flooded {
    ours: SimInterface,
    peer: SimInterface,
}

impl Link for Flooded {
    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        if let Some(mut frame) = self.peer.alloc(60) {
            let sent = self.peer.submit(QueueId(0), &mut frame, 60);
            sent.unwrap();
            self.peer.release(frame);
            self.peer.flush();
        }
        let mut none = Vec::new();
        self.peer.receive(&mut none, max);
        for frame in none {
            self.peer.recycle(frame);
        }
        self.ours.receive(batch, max)
    }

    fn chunk_bytes(&self) -> usize {
        self.ours.chunk_bytes()
    }

    fn tx_available(&self) -> usize {
        self.ours.tx_available()
    }

    fn rx_capacity(&self) -> usize {
        self.ours.rx_capacity()
    }

    fn rx_available(&self, queue: QueueId) -> usize {
        self.ours.rx_available(queue)
    }

    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        self.ours.rx_chunks(frame)
    }

    fn recycle(&mut self, frame: RxFrame) {
        self.ours.recycle(frame);
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        self.ours.alloc(len)
    }

    fn tx_chunks(&mut self, frame: &mut TxFrame) -> Option<ChunksMut<'_>> {
        self.ours.tx_chunks(frame)
    }

    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        self.ours.submit(queue, frame, len)
    }

    fn release(&mut self, frame: TxFrame) {
        self.ours.release(frame);
    }

    fn flush(&mut self) {
        self.ours.flush();
    }

    fn steer(&mut self, rule: Steer) -> Result<(), SteerError> {
        self.ours.steer(rule)
    }

    fn unsteer(&mut self, rule: Steer) {
        self.ours.unsteer(rule);
    }
}

impl Interface for Flooded {
    fn attributes(&self) -> InterfaceAttributes {
        self.ours.attributes()
    }

    fn readiness(&self) -> io::Result<Vec<OwnedFd>> {
        self.ours.readiness()
    }

    fn resolver(&self) -> Arc<dyn Resolver> {
        self.ours.resolver()
    }

    fn change(&mut self) -> Option<InterfaceChange> {
        self.ours.change()
    }

    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64)) {
        self.ours.counters(tell);
    }
}

fn flooded_device() -> Device {
    let (ours, peer) = sim::pair(WireConfig::default(), 1500).unwrap();
    let options = DeviceOptions {
        progress: Progress::Application,
        linger: Duration::from_millis(10),
        ..Default::default()
    };
    Device::over(Box::new(Flooded { ours, peer }), options).unwrap()
}

/// Runs `f` in a thread; fails when it takes longer than ten seconds.
fn in_time<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, outcome) = mpsc::channel();
    thread::spawn(move || done.send(f()));
    outcome.recv_timeout(Duration::from_secs(10)).expect("frames that keep coming hold the application")
}

#[test]
fn waiting_ends_at_its_limit_while_frames_come() {
    const LIMIT: Duration = Duration::from_millis(50);
    let waited = in_time(|| {
        let device = flooded_device();
        let channel = CompletionChannel::new().unwrap();
        let begin = Instant::now();
        assert!(!device.wait(&channel, Some(LIMIT)).unwrap());
        assert!(device.counters().iter().any(|(_, value)| value >= 10), "the flood came");
        begin.elapsed()
    });
    assert!(waited >= LIMIT && waited < 20 * LIMIT, "{waited:?}");
}

#[test]
fn waiting_ends_with_its_descriptor_while_frames_come() {
    in_time(|| {
        let device = flooded_device();
        let channel = CompletionChannel::new().unwrap();
        let cq = device.create_cq_with_channel(1, &channel).unwrap();
        let qp = device.create_pd().unwrap().create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
        cq.arm(false);
        qp.abort().unwrap();
        assert!(device.wait(&channel, None).unwrap());
        assert!(cq.poll_one().is_some());
    });
}

#[test]
fn progress_returns_while_frames_come() {
    in_time(|| flooded_device().progress());
}
