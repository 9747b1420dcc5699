//! Who runs the engine, and what it costs. In a process of its own, because it looks at threads by name.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use common::{connect, devices};
use xwarp_verbs::{Payload, Progress, RecvRequest, WorkRequest};

/// How often the progress threads of both devices went to sleep, since they began.
fn sleeps() -> u64 {
    let mut total = 0;
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        // A thread may end while we look.
        let Ok(name) = fs::read_to_string(task.join("comm")) else { continue };
        if name.starts_with("xwarp-sim") {
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            total += line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
        }
    }
    total
}

#[test]
fn progress_threads_stay_out_of_the_way() {
    const PERIOD: Duration = Duration::from_millis(500);
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

    // Both applications poll all the time, in one thread.
    let mut rounds = 0u64;
    let begin = Instant::now();
    let mut counted = None;
    ends[1].qp.post_send(&WorkRequest::send(100, Payload::EMPTY)).unwrap();
    while begin.elapsed() < PERIOD {
        for end in &ends {
            if let Some(completion) = end.cq.poll_one() {
                completion.ok().unwrap();
                rounds += 1;
                end.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
                end.qp.post_send(&WorkRequest::send(100, Payload::EMPTY)).unwrap();
            }
        }
        if counted.is_none() && begin.elapsed() > PERIOD / 10 {
            counted = Some((sleeps(), rounds));
        }
    }
    let (sleeps_then, rounds_then) = counted.unwrap();
    let (woken, rounds) = (sleeps() - sleeps_then, rounds - rounds_then);
    // Two threads that look again after naps of 1 to 4 ms, in 450 ms: at most 900 times, about 225 when all is calm.
    assert!(woken <= 900, "threads woke {woken} times");
    assert!(rounds > woken, "{rounds} messages, {woken} wake-ups");
}
