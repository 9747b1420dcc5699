//! The time of transmission of posts, counted in frames and kicks. The peer's engine runs only where a test says so:
//! until then, what was sent is in flight.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use common::{
    End, LIMIT, connect, connect_with,
    probe::{Probe, Probed},
    queue_pair,
};
use xwarp_verbs::{
    Device, DeviceOptions, Payload, PostError, Progress, QueuePairOptions, RecvRequest, WorkRequest,
    sim::{self, WireConfig},
};

/// Messages after the one that is in flight.
const MESSAGES: u64 = 8;
/// More polls than make an application a polling one.
const MANY_POLLS: usize = 100;

fn devices(progress: [Progress; 2]) -> ([Device; 2], Arc<Probe>) {
    devices_over(progress, 1500)
}

fn devices_over(progress: [Progress; 2], mtu: u16) -> ([Device; 2], Arc<Probe>) {
    let (a, b) = sim::pair(WireConfig::default(), mtu).unwrap();
    let (b, probe) = Probed::new(b);
    let options = progress.map(|progress| DeviceOptions { progress, ..Default::default() });
    let [first, second] = options;
    let devices = [Device::over(Box::new(a), first).unwrap(), Device::over(Box::new(b), second).unwrap()];
    (devices, probe)
}

fn send(end: &End) {
    end.qp.post_send(&WorkRequest::send(1, Payload::EMPTY)).unwrap();
}

fn post_receives(end: &End, count: u64) {
    for i in 0..count {
        end.qp.post_recv(&RecvRequest::new(i, &[])).unwrap();
    }
}

/// Connects queue pairs that take as many requests as a test needs.
fn connect_deep(devices: &[Device; 2]) -> [End; 2] {
    let options = QueuePairOptions { max_recv_wr: 4096, ..Default::default() };
    connect_with(devices, 1, |device| queue_pair(device, options))
}

/// Runs both engines until nothing is in flight.
fn settle(ends: &[End; 2]) {
    let end = Instant::now() + LIMIT;
    while ends.iter().any(|end| end.qp.tcp_info().unwrap().chunks_retained > 0) {
        for end in ends {
            end.device.progress();
        }
        assert!(Instant::now() < end);
    }
}

fn poll_much(end: &End) {
    for _ in 0..MANY_POLLS {
        assert_eq!(end.cq.poll_one(), None);
    }
}

/// Two connected ends without threads, of which the second one polls all the time and has an empty pipe.
fn polling() -> ([End; 2], Arc<Probe>) {
    polling_over(1500)
}

fn polling_over(mtu: u16) -> ([End; 2], Arc<Probe>) {
    let (devices, probe) = devices_over([Progress::Application; 2], mtu);
    let ends = connect_deep(&devices);
    post_receives(&ends[0], 64);
    settle(&ends);
    poll_much(&ends[1]);
    (ends, probe)
}

#[test]
fn a_post_into_an_empty_pipe_leaves_at_once() {
    let (ends, probe) = polling();
    for _ in 0..3 {
        let before = probe.frames();
        send(&ends[1]);
        assert_eq!(probe.frames() - before, 1);
        settle(&ends);
    }
}

#[test]
fn posts_gather_behind_data_in_flight_and_leave_with_the_next_poll() {
    let (ends, probe) = polling();
    // A test that is descheduled between two posts exceeds the time for which posts wait.
    let gathered = (0..200).any(|_| {
        send(&ends[1]);
        let before = (probe.frames(), probe.kicks());
        (0..MESSAGES).for_each(|_| send(&ends[1]));
        let early = probe.frames() - before.0;
        ends[1].cq.poll_one();
        let sent = (probe.frames() - before.0, probe.kicks() - before.1);
        post_receives(&ends[0], MESSAGES + 1);
        settle(&ends);
        assert!(sent.0 > 0, "a poll sends what waits");
        early == 0 && sent == (1, 1)
    });
    assert!(gathered, "{MESSAGES} messages never shared a frame");
}

#[test]
fn a_few_segments_of_posts_leave_without_a_poll() {
    let (ends, probe) = polling();
    send(&ends[1]);
    let before = probe.frames();
    let region = ends[1].pd.allocate(2000, xwarp_verbs::Access::empty()).unwrap();
    for id in 0..3 {
        ends[1].qp.post_send(&WorkRequest::send(id, Payload::Piece(region.sge(0, 2000)))).unwrap();
    }
    assert!(probe.frames() - before >= 4, "6000 bytes are more than a few segments");
}

/// Otherwise a send queue full of small messages would be one segment, and the two ends would work in turn.
#[test]
fn many_messages_leave_without_a_poll_in_a_large_segment_too() {
    let (ends, probe) = polling_over(9000);
    send(&ends[1]);
    let before = probe.frames();
    (0..80).for_each(|_| send(&ends[1]));
    assert!(probe.frames() > before, "80 messages are many");
}

#[test]
fn an_application_that_does_not_poll_waits_for_nobody() {
    let (ends, probe) = polling();
    ends[1].cq.arm(false);
    for _ in 0..MESSAGES {
        let before = probe.frames();
        send(&ends[1]);
        assert_eq!(probe.frames() - before, 1);
    }
}

#[test]
fn arming_a_queue_sends_gathered_posts() {
    let (ends, probe) = polling();
    let before = probe.frames();
    send(&ends[1]);
    send(&ends[1]);
    ends[1].cq.arm(false);
    assert_eq!(probe.frames() - before, 2);
}

#[test]
fn the_progress_thread_sends_what_an_application_forgets() {
    let (devices, _) = devices([Progress::Auto; 2]);
    let ends = connect_deep(&devices);
    post_receives(&ends[0], 2000);
    let mut received = 0;
    for _ in 0..20 {
        // Long enough for the thread to see that the application polls.
        let until = Instant::now() + Duration::from_millis(10);
        while Instant::now() < until {
            ends[1].cq.poll_one();
        }
        (0..MESSAGES).for_each(|_| send(&ends[1]));
        // The sender makes no further call.
        for _ in 0..MESSAGES {
            let completion = ends[0].cq.spin(LIMIT).expect("every message leaves");
            assert_eq!(completion.check().unwrap().wr_id, received);
            received += 1;
        }
    }
}

#[test]
fn a_batch_leaves_when_it_is_dropped_with_one_kick() {
    let (devices, probe) = devices([Progress::Application; 2]);
    let [first_peer, first] = connect(&devices, 1);
    let [second_peer, second] = connect(&devices, 2);
    post_receives(&first_peer, 20);
    post_receives(&second_peer, 20);
    let before = (probe.frames(), probe.kicks());
    let batch = first.device.batch();
    for end in [&first, &second] {
        for id in 0..20 {
            batch.post_send(&end.qp, &WorkRequest::send(id, Payload::EMPTY)).unwrap();
        }
    }
    let foreign = batch.post_send(&first_peer.qp, &WorkRequest::send(1, Payload::EMPTY));
    assert_eq!(foreign, Err(PostError::Unknown));
    assert_eq!((probe.frames(), probe.kicks()), before);
    drop(batch);
    assert_eq!((probe.frames() - before.0, probe.kicks() - before.1), (2, 1), "one frame a queue pair");
    for peer in [&first_peer, &second_peer] {
        for id in 0..20 {
            assert_eq!(peer.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, id);
        }
    }
}

/// Posts of several queue pairs and a full send queue do not change the order of one queue pair's messages.
#[test]
fn gathered_posts_keep_their_order() {
    let (devices, _) = devices([Progress::Auto, Progress::Application]);
    let ends = connect_deep(&devices);
    let depth = u64::from(QueuePairOptions::default().max_send_wr);
    post_receives(&ends[0], 1000);
    let (mut posted, mut received) = (0, 0);
    poll_much(&ends[1]);
    let end = Instant::now() + LIMIT;
    while received < 1000 {
        while posted < 1000 {
            let request = WorkRequest::send(posted, Payload::EMPTY).signaled();
            match ends[1].qp.post_send(&request) {
                Ok(()) => posted += 1,
                Err(PostError::QueueFull(full)) => {
                    assert_eq!(u64::from(full), depth);
                    break;
                }
                Err(error) => panic!("{error}"),
            }
        }
        while ends[1].cq.poll_one().is_some() {}
        while let Some(completion) = ends[0].cq.poll_one() {
            assert_eq!(completion.check().unwrap().wr_id, received);
            received += 1;
        }
        assert!(Instant::now() < end);
    }
}
