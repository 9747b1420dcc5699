//! Peers that never stop sending, and an application that runs the engine itself (`Progress::Application`).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use xwarp_tcp::{
    forward_link,
    link::{Link, QueueId, RxFrame},
};
use xwarp_verbs::{
    CompletionChannel, Device, DeviceOptions, Progress, QueuePairOptions, RecvRequest, forward_interface,
    interface::Interface,
    sim::{self, SimInterface, WireConfig},
};

/// An interface at which a frame arrives before each check.
struct Flooded {
    ours: SimInterface,
    peer: SimInterface,
}

impl Link for Flooded {
    forward_link!(ours: chunk_bytes, tx_available, rx_capacity, rx_available, rx_chunks, rx_head, recycle, alloc,
        tx_chunks_into, submit, release, flush, steer, unsteer);

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
}

impl Interface for Flooded {
    forward_interface!(ours: attributes, readiness, resolver, change, counters);
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
