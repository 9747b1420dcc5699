//! A caller that sleeps on an armed queue is woken by frames, before all other threads, and needs no notification.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{thread, time::Duration};

use common::{End, LIMIT, connect, connect_with, devices};
use rustix::time::{ClockId, clock_gettime};
use xwarp_verbs::{CompletionChannel, Payload, Progress, QueuePairOptions, RecvRequest, Slept, WorkRequest};

/// A connection whose server has a completion channel.
fn ends() -> ([End; 2], CompletionChannel) {
    let channel = CompletionChannel::new().unwrap();
    let ends = connect_with(&devices(Progress::Auto), 1, |device| {
        let pd = device.create_pd().unwrap();
        let cq = device.create_cq_with_channel(16, &channel).unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        (pd, cq, qp)
    });
    (ends, channel)
}

#[test]
fn a_sleeping_caller_gets_its_completions_without_notification() {
    let ([server, client], channel) = ends();
    // On a loaded machine a message may come before the sleep, and then notifies. When sleeps do not take completions, each does.
    let calm = (0..40).any(|_| {
        server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
        server.cq.arm(false);
        let slept = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                client.qp.post_send(&WorkRequest::send(100, Payload::EMPTY)).unwrap();
            });
            let (mut slept, mut found) = (Slept::Refused, Vec::new());
            while server.cq.poll_armed(&mut found, 16) == 0 {
                slept = server.cq.sleep(Some(LIMIT)).unwrap();
            }
            found[0].check().unwrap();
            slept
        });
        let notifications = std::iter::from_fn(|| channel.poll()).filter(|event| event.cq == server.cq.id());
        slept == Slept::Ran && notifications.count() == 0
    });
    assert!(calm, "each message has notified");
}

/// Sleeps on the server's queue until something other than frames, such as late ones of the connection's start, ends it.
fn sleep(server: &End, limit: Duration) -> Slept {
    let mut outcomes = std::iter::repeat_with(|| server.cq.sleep(Some(limit)).unwrap());
    outcomes.find(|slept| *slept != Slept::Ran).unwrap()
}

#[test]
fn a_sleep_ends_by_its_limit_and_by_another_thread_and_is_one_at_a_time() {
    let ([server, _client], _channel) = ends();
    server.cq.arm(false);
    assert_eq!(sleep(&server, Duration::from_millis(1)), Slept::TimedOut);
    // Remembered by the next sleep.
    server.device.end_sleep();
    assert_eq!(sleep(&server, LIMIT), Slept::Ended);
    thread::scope(|scope| {
        let sleeping = scope.spawn(|| {
            loop {
                match sleep(&server, LIMIT) {
                    Slept::Refused => thread::yield_now(),
                    slept => return slept,
                }
            }
        });
        while sleep(&server, Duration::from_millis(1)) != Slept::Refused {
            assert!(!sleeping.is_finished());
        }
        server.device.end_sleep();
        assert_eq!(sleeping.join().unwrap(), Slept::Ended);
    });
    let [thread, _other] = devices(Progress::Thread);
    assert_eq!(thread.create_cq(1).unwrap().sleep(Some(LIMIT)).unwrap(), Slept::Refused);
}

/// Between two sleeps nobody waits for frames: the progress thread notices within milliseconds that the caller has stopped, and
/// notifies.
#[test]
fn a_caller_that_stops_sleeping_is_notified() {
    let ([server, client], channel) = ends();
    (0..16).for_each(|i| server.qp.post_recv(&RecvRequest::new(i, &[])).unwrap());
    for _ in 0..5 {
        server.cq.arm(false);
        let mut found = Vec::new();
        while server.cq.poll_armed(&mut found, 16) > 0 {}
        (0..50).for_each(|_| _ = server.cq.sleep(Some(Duration::from_micros(100))).unwrap());
        client.qp.post_send(&WorkRequest::send(100, Payload::EMPTY)).unwrap();
        assert!(server.device.wait(&channel, Some(LIMIT)).unwrap(), "no notification");
        while channel.poll().is_some() {}
    }
}

/// Processor time of the calling thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap())
}

#[test]
fn a_wait_for_a_queue_without_a_channel_sleeps() {
    const QUIET: Duration = Duration::from_millis(400);
    for progress in [Progress::Auto, Progress::Application, Progress::Thread] {
        let [server, _client] = connect(&devices(progress), 1);
        let before = processor_time();
        assert_eq!(server.cq.wait(QUIET).unwrap(), None, "{progress:?}");
        let used = processor_time().saturating_sub(before);
        assert!(used < QUIET / 4, "{progress:?}: the wait has used {used:?} of the processor");
    }
}

/// One notification wakes one thread, which may take the completion for which another one waits.
#[test]
fn each_thread_that_waits_for_a_queue_gets_a_completion() {
    const THREADS: u64 = 3;
    let [server, client] = connect(&devices(Progress::Auto), 1);
    (0..THREADS).for_each(|i| server.qp.post_recv(&RecvRequest::new(i, &[])).unwrap());
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| server.cq.wait(LIMIT).unwrap().expect("a completion for each").check().unwrap());
        }
        for i in 0..THREADS {
            client.qp.post_send(&WorkRequest::send(i, Payload::EMPTY)).unwrap();
            thread::sleep(Duration::from_millis(20));
        }
    });
}
