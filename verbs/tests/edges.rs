//! What callers get at the edges: lengths that do not fit, queues that have overflowed, devices of a parent process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{LIMIT, connect, connect_with, devices};
use xwarp_verbs::{
    Access, CompletionChannel, Payload, PostError, Progress, QpState, QueuePairOptions, RecvRequest,
    WorkRequest,
};

/// The tail of such a piece was once lost, with a success.
#[test]
fn a_piece_longer_than_a_message_is_refused_by_the_post() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let region = client.pd.allocate(4096, Access::all()).unwrap();
    let piece = region.sge(0, 1 << 32);
    assert_eq!(region.sge(0, u32::MAX as usize).len, u32::MAX);
    let remote = server.pd.allocate(4096, Access::all()).unwrap().remote(0);
    let gather = [region.sge(0, 1), piece];
    for payload in [Payload::Piece(piece), Payload::Gather(&gather)] {
        let write = WorkRequest::write(1, payload, remote);
        assert_eq!(client.qp.post_send(&write), Err(PostError::MessageTooLong));
    }
    assert_eq!(client.qp.post_recv(&RecvRequest::new(1, &[piece])), Err(PostError::MessageTooLong));
}

#[test]
fn a_wait_on_a_queue_that_has_overflowed_fails() {
    let pair = devices(Progress::Auto);
    for (port, channel) in [(1, None), (2, Some(CompletionChannel::new().unwrap()))] {
        let cqs = pair.each_ref().map(|device| match &channel {
            Some(channel) => device.create_cq_with_channel(2, channel).unwrap(),
            None => device.create_cq(2).unwrap(),
        });
        let [server, client] = connect_with(&pair, port, |device| {
            let cq = cqs[usize::from(device.is(&pair[1]))].clone();
            let pd = device.create_pd().unwrap();
            let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
            (pd, cq, qp)
        });
        for wr_id in 0..4 {
            server.qp.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
        }
        for wr_id in 0..4 {
            // Fails once the peer has ended the stream.
            let _ = client.qp.post_send(&WorkRequest::send(wr_id, Payload::EMPTY));
        }
        let end = Instant::now() + LIMIT;
        while !server.cq.overflowed() {
            assert!(Instant::now() < end, "no overflow");
            thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..2 {
            assert!(server.cq.wait(LIMIT).unwrap().is_some(), "an entry that had room");
        }
        assert!(server.cq.wait(LIMIT).is_err());
    }
}

/// If another thread ran the engine when the process forked, its lock is never free in the child.
#[test]
fn a_child_process_gets_an_answer_to_queries() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn alarm(seconds: u32) -> u32;
        fn waitpid(child: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }
    const SIGALRM: i32 = 14;
    let pair = devices(Progress::Thread);
    let [server, client] = connect(&pair, 1);
    let region = server.pd.allocate(1 << 20, Access::all()).unwrap();
    let source = client.pd.allocate(1 << 20, Access::all()).unwrap();
    let stop = AtomicBool::new(false);
    let mut blocked = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            let piece = [source.sge(0, 1 << 20)];
            while !stop.load(Ordering::Relaxed) {
                let write = WorkRequest::write(1, Payload::Gather(&piece), region.remote(0)).signaled();
                let _ = client.qp.post_send(&write);
                while client.cq.poll_one().is_some() {}
            }
        });
        for _ in 0..40 {
            thread::sleep(Duration::from_millis(1));
            // SAFETY: the child calls what the test is about, which must be safe in a child of a process with threads, and
            // exits.
            let child = unsafe { fork() };
            if child == 0 {
                // SAFETY: it sets a timer of the child.
                unsafe { alarm(5) };
                let state = server.qp.state();
                let _ = (server.connection.peer_address(), server.qp.tcp_info(), server.device.attributes());
                let _ = (server.device.counters(), server.connection.id().tuning());
                // SAFETY: it ends the child.
                unsafe { _exit(i32::from(state != QpState::Error)) };
            }
            let mut status = 0;
            // SAFETY: the status is a local variable.
            unsafe { waitpid(child, &raw mut status, 0) };
            let signal = status & 0x7f;
            assert!([0, SIGALRM].contains(&signal), "status {status:#x}");
            blocked += i32::from(status != 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(blocked, 0, "of 40 children");
}
