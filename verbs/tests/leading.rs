//! Applications that wait run the engine themselves: a message wakes one thread. The test runs in its own process,
//! because it finds threads by name.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use common::{End, LIMIT, connect_with, devices, sleeps};
use xwarp_verbs::{CompletionChannel, Payload, Progress, QueuePairOptions, RecvRequest, WorkRequest};

/// Messages in each direction whose wake-ups are counted together.
const ROUNDS: u64 = 200;

fn receive(end: &End) {
    end.cq.wait(LIMIT).unwrap().expect("a message").check().unwrap();
    end.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
}

fn send(end: &End) {
    end.qp.post_send(&WorkRequest::send(100, Payload::EMPTY)).unwrap();
}

#[test]
fn a_message_wakes_the_application_that_waits_and_no_other_thread() {
    let pair = devices(Progress::Auto);
    let ends = connect_with(&pair, 1, |device| {
        let pd = device.create_pd().unwrap();
        let cq = device.create_cq_with_channel(16, &CompletionChannel::new().unwrap()).unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        (pd, cq, qp)
    });
    for end in &ends {
        (0..4).for_each(|i| end.qp.post_recv(&RecvRequest::new(i, &[])).unwrap());
    }
    let [server, client] = &ends;
    let done = AtomicBool::new(false);
    let calm = thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                receive(server);
                if done.load(Ordering::SeqCst) {
                    return;
                }
                send(server);
            }
        });
        // On a loaded machine a message may take milliseconds, and the threads look every millisecond: the calmest of
        // several windows counts. When a thread runs the engine, it wakes for every message.
        let calm = (0..40).any(|_| {
            let before = sleeps();
            for _ in 0..ROUNDS {
                send(client);
                receive(client);
            }
            sleeps() - before < ROUNDS
        });
        done.store(true, Ordering::SeqCst);
        send(client);
        calm
    });
    assert!(calm, "the progress threads woke for every other message");
}
