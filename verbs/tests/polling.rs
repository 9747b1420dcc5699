//! While an application polls, the kernel has no set of a waiter to visit when a frame arrives. The test runs in its own process,
//! because it counts the descriptors in all sets of the process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use common::{LIMIT, connect, devices};
use xwarp_verbs::{Payload, Progress, RecvRequest, Slept, WorkRequest};

/// Number of descriptors in the process's epoll sets.
fn waited_for() -> usize {
    let sets = fs::read_dir("/proc/self/fdinfo").unwrap();
    // A descriptor may have been closed since.
    let infos = sets.filter_map(|set| fs::read_to_string(set.ok()?.path()).ok());
    infos.map(|info| info.lines().filter(|line| line.starts_with("tfd:")).count()).sum()
}

/// Calls `step` until `is` holds.
fn until(is: impl Fn() -> bool, step: impl Fn()) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < LIMIT, "still {} descriptors", waited_for());
        step();
    }
}

#[test]
fn nobody_waits_for_frames_while_the_application_polls() {
    const PAUSE: Duration = Duration::from_millis(10);
    let [server, client] = connect(&devices(Progress::Auto), 1);
    let pause = || thread::sleep(PAUSE);
    let send = || client.qp.post_send(&WorkRequest::send(100, Payload::EMPTY).signaled()).unwrap();
    let receive = || server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    let exchange = || {
        receive();
        send();
        let mut left = 2;
        while left > 0 {
            for end in [&server, &client] {
                left -= i32::from(end.cq.poll_one().is_some_and(|completion| completion.check().is_ok()));
            }
        }
    };
    let exchange_much = || (0..100).for_each(|_| exchange());
    // The sets of both devices contain four bells, and of each end's only descriptor three, one for each waiter, or none.
    let (polling, waiting) = (2 * 4, 2 * (4 + 3));
    for _ in 0..3 {
        // The frame may arrive while nobody waits or while the server does.
        for early in [false, true] {
            until(|| waited_for() == polling, exchange_much);
            receive();
            let mut found = Vec::new();
            thread::scope(|scope| {
                if early {
                    send();
                } else {
                    scope.spawn(|| {
                        pause();
                        send();
                    });
                }
                let begin = Instant::now();
                while server.cq.poll_armed(&mut found, 1) == 0 {
                    assert!(begin.elapsed() < LIMIT, "the frame was not seen");
                    assert_ne!(server.cq.sleep(Some(LIMIT)).unwrap(), Slept::TimedOut);
                }
            });
            found[0].check().unwrap();
            until(|| client.cq.poll_one().is_some(), || {});
        }
        until(|| waited_for() == waiting, pause);
    }
}
