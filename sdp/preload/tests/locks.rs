//! Locks. The crate has no tests in its own sources, because the functions that it replaces would be replaced in the tests' executable.

#[allow(dead_code, reason = "the library uses all of it")]
#[path = "../src/locks.rs"]
mod locks;

use std::{sync::Barrier, thread, time::Duration};

use locks::ReadLock;

/// Time for which a preempted relay holds the lock.
const MOVE: Duration = Duration::from_millis(20);
/// Attempts of which one must succeed: on a loaded machine, the relay may hold the lock for longer than a call waits.
const ATTEMPTS: u32 = 50;

#[test]
fn a_call_does_not_wait_when_nothing_has_arrived_or_when_the_kernel_has_bytes() {
    let lock = ReadLock::default();
    assert!(lock.read(|| false).is_some());
    let relay = lock.relay(false);
    assert!(lock.read(|| false).is_none());
    drop(relay);
    let relay = lock.relay(true);
    assert!(lock.read(|| true).is_none());
    drop(relay);
    assert!(lock.read(|| false).is_some());
}

/// Whether a call waits until a preempted relay has released the lock.
fn gets_lock() -> bool {
    let (lock, begun) = (ReadLock::default(), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let _relay = lock.relay(true);
            begun.wait();
            thread::sleep(MOVE);
        });
        begun.wait();
        lock.read(|| false).is_some()
    })
}

#[test]
fn a_call_waits_for_bytes_that_the_relay_moves() {
    assert!((0..ATTEMPTS).any(|_| gets_lock()));
}
