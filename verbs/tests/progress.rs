//! Which thread runs the engine, and its cost. The test runs in its own process, because it finds threads by name.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{connect, devices, sleeps};
use xwarp_verbs::{Payload, Progress, RecvRequest, WorkRequest};

#[test]
fn progress_threads_stay_out_of_the_way() {
    const PERIOD: Duration = Duration::from_millis(500);
    const WINDOW: Duration = Duration::from_millis(100);
    let pair = devices(Progress::Auto);
    let ends = connect(&pair, 1);
    for end in &ends {
        for i in 0..64 {
            end.qp.post_recv(&RecvRequest::new(i, &[])).unwrap();
        }
    }
    let before = sleeps();
    thread::sleep(PERIOD);
    let idle = sleeps() - before;
    assert!(idle < 100, "threads woke {idle} times in {PERIOD:?} without any work");

    // Both applications poll all the time, in one thread. On a loaded machine the polling thread may be descheduled,
    // and then a progress thread must run: the window with the fewest wake-ups counts.
    ends[1].qp.post_send(&WorkRequest::send(100, Payload::EMPTY)).unwrap();
    let calm = (0..40).any(|_| {
        let mut rounds = 0;
        let (begin, before) = (Instant::now(), sleeps());
        while begin.elapsed() < WINDOW {
            for end in &ends {
                if let Some(completion) = end.cq.poll_one() {
                    completion.check().unwrap();
                    rounds += 1;
                    end.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
                    end.qp.post_send(&WorkRequest::send(100, Payload::EMPTY)).unwrap();
                }
            }
        }
        let woken = sleeps() - before;
        // Two threads check again after naps of 1 to 4 ms: at most 200 times, about 50 on an idle machine.
        woken <= 200 && rounds > woken
    });
    assert!(calm, "threads woke more often than they look, or than messages came");
}
