//! The kick runs outside of the engine's lock.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::{Arc, mpsc::channel},
    thread,
};

use common::{
    LIMIT, connect,
    probe::{Probe, Probed},
};
use xwarp_verbs::{
    Device, DeviceOptions, Payload, Progress, RecvRequest, WorkRequest,
    sim::{self, WireConfig},
};

/// Two devices; only its application runs the second one, whose kicks the probe counts.
fn devices() -> ([Device; 2], Arc<Probe>) {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    let (b, probe) = Probed::new(b);
    let options = DeviceOptions { progress: Progress::Application, ..Default::default() };
    let devices = [
        Device::over(Box::new(a), DeviceOptions::default()).unwrap(),
        Device::over(Box::new(b), options).unwrap(),
    ];
    (devices, probe)
}

#[test]
fn others_post_and_poll_while_one_thread_kicks() {
    let (devices, probe) = devices();
    let [slow_peer, slow] = connect(&devices, 1);
    let [peer, end] = connect(&devices, 2);
    slow_peer.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    peer.qp.post_recv(&RecvRequest::new(2, &[])).unwrap();
    end.qp.post_recv(&RecvRequest::new(3, &[])).unwrap();
    let held = probe.hold_next_kick();
    let (posted, slow_post) = channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            slow.qp.post_send(&WorkRequest::send(10, Payload::EMPTY)).unwrap();
            posted.send(()).unwrap();
        });
        // Dropped here, so that a failure lets the other thread go.
        let held = held;
        held.inside.recv_timeout(LIMIT).expect("the verb kicks");

        // A message and its answer cross while the other thread is inside the kick.
        end.qp.post_send(&WorkRequest::send(20, Payload::EMPTY).signaled()).unwrap();
        assert_eq!(peer.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, 2);
        peer.qp.post_send(&WorkRequest::send(30, Payload::EMPTY)).unwrap();
        let mut done = [0, 0].map(|_| end.cq.spin(LIMIT).unwrap().check().unwrap().wr_id);
        done.sort_unstable();
        assert_eq!(done, [3, 20]);

        assert!(slow_post.try_recv().is_err(), "the slow thread is still inside");
        held.leave.send(()).unwrap();
        slow_post.recv_timeout(LIMIT).unwrap();
    });
    assert_eq!(slow_peer.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, 1);
}
