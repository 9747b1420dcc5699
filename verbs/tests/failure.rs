//! A panic inside the engine fails its device, all objects of the device and all waits, and no other device.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{LIMIT, connect_with, queue_pair};
use xwarp_tcp::{
    forward_link,
    link::{Link, QueueId, RingFull, RxFrame, TxFrame},
};
use xwarp_verbs::{
    AsyncEvent, CompletionChannel, Device, DeviceOptions, Payload, PostError, Progress, QpState,
    QueuePairOptions, RecvRequest, ResourceError, WcStatus, WorkRequest,
    cm::{CmError, ConnectionError, ListenOptions},
    forward_interface,
    interface::Interface,
    sim::{self, SimInterface, WireConfig},
};

/// The call in which an interface panics.
#[derive(Debug, Default)]
struct Mines {
    receive: AtomicBool,
    submit: AtomicBool,
}

/// An interface that panics on request.
struct Mined(SimInterface, Arc<Mines>);

impl Link for Mined {
    forward_link!(0: chunk_bytes, tx_available, rx_capacity, rx_available, rx_chunks, rx_head, recycle, alloc,
        tx_chunks_into, release, flush, steer, unsteer);

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let received = self.0.receive(batch, max);
        assert!(!self.1.receive.load(Ordering::Relaxed) || received == 0, "stepped on a mine");
        received
    }

    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        assert!(!self.1.submit.load(Ordering::Relaxed), "stepped on a mine");
        self.0.submit(queue, frame, len)
    }
}

impl Interface for Mined {
    forward_interface!(0: attributes, readiness, resolver, change, counters);
}

/// Two devices, of which the one with the index `which` has mines and this progress.
fn mined_devices(which: usize, progress: Progress) -> ([Device; 2], Arc<Mines>) {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    let mines = Arc::new(Mines::default());
    let mut interfaces: [Option<SimInterface>; 2] = [Some(a), Some(b)];
    let devices = [0, 1].map(|index: usize| {
        let interface = interfaces[index].take().unwrap();
        if index == which {
            let options = DeviceOptions { progress, ..Default::default() };
            Device::over(Box::new(Mined(interface, Arc::clone(&mines))), options).unwrap()
        } else {
            Device::over(Box::new(interface), DeviceOptions::default()).unwrap()
        }
    });
    (devices, mines)
}

fn device_failed(error: &ConnectionError) -> bool {
    matches!(error, ConnectionError::Call(CmError::DeviceFailed))
}

#[test]
fn a_panic_inside_a_turn_fails_the_device_and_wakes_everybody() {
    for progress in [Progress::Auto, Progress::Thread] {
        let (devices, mines) = mined_devices(0, progress);
        let channel = CompletionChannel::new().unwrap();
        let ends = connect_with(&devices, 1, |device| {
            let pd = device.create_pd().unwrap();
            let cq = device.create_cq_with_channel(16, &channel).unwrap();
            let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
            (pd, cq, qp)
        });
        let [failing, other] = &ends;
        let events = failing.device.async_events();
        let address = std::net::SocketAddr::new(sim::ipv4(1), 2);
        let listener = failing.device.listen(address, ListenOptions::default()).unwrap();
        let begin = Instant::now();
        thread::scope(|s| {
            let accepting = s.spawn(|| listener.accept(LIMIT).map(|_| ()));
            let disconnecting = s.spawn(|| failing.connection.wait_disconnected(LIMIT));
            let watching = s.spawn(|| failing.device.wait(&events, Some(LIMIT)));
            failing.qp.post_recv(&RecvRequest::new(7, &[])).unwrap();
            // All threads sleep by then.
            thread::sleep(Duration::from_millis(50));
            mines.receive.store(true, Ordering::Relaxed);
            other.qp.post_send(&WorkRequest::send(1, Payload::EMPTY)).unwrap();
            let flushed = failing.cq.wait(LIMIT).unwrap().unwrap();
            assert_eq!((flushed.wr_id, flushed.status), (7, WcStatus::Flushed));
            assert!(device_failed(&accepting.join().unwrap().unwrap_err()));
            assert!(disconnecting.join().unwrap().unwrap(), "the connection has ended");
            assert!(watching.join().unwrap().unwrap(), "the event is readable");
        });
        assert!(begin.elapsed() < LIMIT / 2, "waits ended by the failure, not by their limit");

        assert_eq!(&*failing.device.failure().unwrap().message, "its engine panicked: stepped on a mine");
        assert_eq!(std::iter::from_fn(|| events.poll()).last(), Some(AsyncEvent::DeviceFatal));
        let failed = failing.device.wait(&events, Some(LIMIT)).unwrap_err();
        assert!(failed.to_string().contains("stepped on a mine"), "{failed}");
        assert!(failing.cq.wait(LIMIT).is_err() && failing.cq.spin(LIMIT).is_none());
        let request = WorkRequest::send(8, Payload::EMPTY);
        assert_eq!(failing.qp.post_send(&request), Err(PostError::DeviceFailed));
        assert_eq!(failing.qp.post_recv(&RecvRequest::new(9, &[])), Err(PostError::DeviceFailed));
        assert_eq!(failing.qp.state(), QpState::Error);
        assert_eq!(failing.device.create_pd().unwrap_err(), ResourceError::DeviceFailed);
        assert_eq!(failing.device.create_cq(1).unwrap_err(), ResourceError::DeviceFailed);
        assert!(device_failed(&listener.accept(LIMIT).unwrap_err()));
        let address = std::net::SocketAddr::new(sim::ipv4(1), 3);
        assert!(device_failed(&failing.device.listen(address, ListenOptions::default()).unwrap_err()));
        assert!(!failing.device.attributes().interface.up);

        assert_eq!(other.device.failure(), None);
        other.device.create_pd().unwrap();
    }
}

#[test]
fn a_panic_inside_a_verb_is_an_error_of_the_verb() {
    // The initiator may send at once, and only this thread runs its engine.
    let (devices, mines) = mined_devices(1, Progress::Application);
    let [other, failing] =
        connect_with(&devices, 1, |device| queue_pair(device, QueuePairOptions::default()));
    mines.submit.store(true, Ordering::Relaxed);
    let posted = failing.qp.post_send(&WorkRequest::send(1, Payload::Inline(b"never sent")).signaled());
    assert_eq!(posted, Err(PostError::DeviceFailed));
    assert!(failing.device.failure().is_some());
    assert_eq!(failing.cq.poll_one().unwrap().status, WcStatus::Flushed);
    assert_eq!(failing.cq.poll_one(), None);
    assert_eq!(other.device.failure(), None);
}

#[test]
fn a_panic_while_the_application_runs_the_engine_ends_its_wait() {
    let (devices, mines) = mined_devices(0, Progress::Application);
    let [failing, other] =
        connect_with(&devices, 1, |device| queue_pair(device, QueuePairOptions::default()));
    let events = failing.device.async_events();
    mines.receive.store(true, Ordering::Relaxed);
    other.qp.post_send(&WorkRequest::send(1, Payload::EMPTY)).unwrap();
    let channel = CompletionChannel::new().unwrap();
    let error = failing.device.wait(&channel, Some(LIMIT)).unwrap_err();
    assert!(error.to_string().contains("stepped on a mine"), "{error}");
    assert_eq!(events.poll(), Some(AsyncEvent::DeviceFatal));
    assert!(failing.cq.wait(LIMIT).is_err());
}
