//! Closing a device leaves no thread and no descriptor behind. The test runs in its own process, because it counts
//! them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{fs, thread, time::Duration};

use common::{LIMIT, connect, devices};
use xwarp_verbs::{
    CompletionChannel, Payload, Progress, QueuePairOptions, RecvRequest, WorkRequest,
    cm::{CmId, ConnectOptions, EventChannel, ListenOptions},
    sim,
};

/// Threads and descriptors of this process.
fn census() -> (usize, usize) {
    let count = |path| fs::read_dir(path).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// Whether the counts return to `before`: a joined thread may stay visible for a moment.
fn settles_to(before: (usize, usize)) -> bool {
    (0..200).any(|_| {
        census() == before || {
            thread::sleep(Duration::from_millis(5));
            false
        }
    })
}

fn traffic(progress: Progress) {
    let pair = devices(progress);
    let [server, client] = connect(&pair, 1);
    server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    client.qp.post_send(&WorkRequest::send(1, Payload::EMPTY)).unwrap();
    assert!(server.cq.spin(LIMIT).is_some());
}

/// Drops objects in unusual orders, with unread events.
fn abandoned() {
    let [server, client] = devices(Progress::Auto);
    let channel = EventChannel::new().unwrap();
    let listener = CmId::new(&server, &channel);
    listener.bind((sim::ipv4(1), 1).into()).unwrap();
    listener.listen(ListenOptions::default()).unwrap();
    let completions = CompletionChannel::new().unwrap();
    let cq = client.create_cq_with_channel(4, &completions).unwrap();
    let pd = client.create_pd().unwrap();
    let region = pd.allocate(4096, xwarp_verbs::Access::LOCAL_WRITE).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    qp.post_recv(&RecvRequest::new(1, &[region.sge(0, 4096)])).unwrap();
    let id = CmId::new(&client, &EventChannel::new().unwrap());
    id.resolve_address((sim::ipv4(1), 1).into(), LIMIT).unwrap();
    id.resolve_route().unwrap();
    id.connect(&qp, ConnectOptions::default()).unwrap();
    assert!(server.wait(&channel, Some(LIMIT)).unwrap());
    // A slow resolution is in progress when its device is closed.
    let slow = CmId::new(&client, &channel);
    slow.resolve_address("192.0.2.99:1".parse().unwrap(), Duration::from_mins(1)).unwrap();
    drop((pd, client, cq, completions, slow));
    drop((region, server, qp, channel, listener, id));
}

#[test]
fn nothing_is_left_behind() {
    // Opens the descriptors that the process opens once and keeps.
    traffic(Progress::Auto);
    let before = census();
    for _ in 0..5 {
        for progress in [Progress::Auto, Progress::Thread] {
            traffic(progress);
        }
        abandoned();
    }
    assert!(settles_to(before), "before {before:?}, after {:?}", census());
}
