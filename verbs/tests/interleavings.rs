//! All orders of the threads that run an engine, sleep and wake each other, by the model checker loom: a wake-up that is lost in any
//! order leaves a thread asleep for ever, which loom reports.
//!
//! The files that decide about wake-ups are compiled here once more, with loom's locks and atomics. What they are part of (the
//! engine, its lock, descriptors) is modelled by [`sync::Doorbell`] and by the tests. Each protocol is also tried with a mistake,
//! which the check must find.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::duplicate_mod, reason = "once as it is and once without fences")]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

#[allow(dead_code, reason = "the tests need a part of it")]
#[path = "../src/api/progress/bell_queue.rs"]
mod bell_queue;
#[allow(dead_code, reason = "the tests need a part of it")]
#[path = "../src/api/progress/calls.rs"]
mod calls;
#[allow(dead_code, reason = "the tests need a part of it")]
#[path = "../../rnic/src/rnic/completion.rs"]
mod completion;
#[path = "interleavings/models.rs"]
mod models;
#[allow(dead_code, reason = "the tests need a part of it")]
#[path = "../src/api/progress/sleeper.rs"]
mod sleeper;
#[allow(dead_code, reason = "the tests need a part of it")]
#[path = "../../rnic/src/rnic/slots.rs"]
mod slots;
/// [`sleeper`] without its fences.
#[path = "interleavings/unfenced.rs"]
mod unfenced;

use models::{policy, sync, table, work};

use bell_queue::BellQueue;
use calls::CallCounters;
use completion::{CompletionRing, Notify};
use models::{QpId, entry};
use sleeper::Sleeper;
use sync::{Doorbell, Mutex, lock};

/// Tries all orders of the threads of `model` in which a thread is interrupted at most three times.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Whether [`check`] finds a mistake in `model`.
fn finds_mistake(model: impl Fn() + Sync + Send + 'static) -> bool {
    catch_unwind(AssertUnwindSafe(|| check(model))).is_err()
}

/// A completion queue that notifies on a channel.
struct Queue {
    ring: CompletionRing,
    channel: Arc<BellQueue<()>>,
}

struct Notifier(Arc<BellQueue<()>>);

impl Notify for Notifier {
    fn notify(&self) {
        self.0.push((), usize::MAX);
    }
}

impl Queue {
    fn new() -> Arc<Self> {
        let channel = Arc::new(BellQueue::new().unwrap());
        let notifier: Arc<dyn Notify> = Arc::new(Notifier(Arc::clone(&channel)));
        Arc::new(Self { ring: CompletionRing::new(2, Some(notifier)), channel })
    }

    /// Another thread, which runs the engine, completes `entries`.
    fn completes(self: &Arc<Self>, entries: u64) -> loom::thread::JoinHandle<()> {
        let queue = Arc::clone(self);
        loom::thread::spawn(move || {
            for wr_id in 0..entries {
                queue.ring.push(entry(wr_id)).unwrap();
            }
        })
    }

    /// Sleeps on the channel's descriptor.
    fn sleep(&self) {
        self.channel.bell().wait();
        while self.channel.pop().is_some() {}
    }
}

/// The steps of [`xwarp_verbs::CompletionChannel`]: arm, poll, sleep.
fn arms_polls_and_sleeps(entries: u64) {
    let queue = Queue::new();
    let engine = queue.completes(entries);
    let mut found = 0;
    while found < entries {
        queue.ring.arm(false);
        match queue.ring.pop() {
            Some(_) => found += 1,
            None => queue.sleep(),
        }
    }
    engine.join().unwrap();
}

#[test]
fn loom_an_armed_queue_that_is_polled_before_the_sleep_loses_no_wake_up() {
    check(|| arms_polls_and_sleeps(1));
    check(|| arms_polls_and_sleeps(2));
}

#[test]
fn loom_finds_a_queue_that_is_not_polled_after_arming() {
    assert!(finds_mistake(|| {
        let queue = Queue::new();
        let engine = queue.completes(1);
        while queue.ring.pop().is_none() {
            queue.ring.arm(false);
            queue.sleep();
        }
        engine.join().unwrap();
    }));
}

/// The owner of an armed queue sleeps elsewhere after a poll that runs the engine: what others complete meanwhile is found by the
/// poll or notified. `poll`: [`CompletionRing::poll_attended`], or one with a mistake.
fn polls_an_armed_queue(poll: fn(&CompletionRing) -> usize) {
    let queue = Queue::new();
    queue.ring.arm(false);
    let engine = queue.completes(1);
    while poll(&queue.ring) == 0 {
        queue.sleep();
        queue.ring.arm(false);
    }
    engine.join().unwrap();
}

#[test]
fn loom_a_poll_that_attends_to_its_queue_loses_no_completion() {
    check(|| {
        polls_an_armed_queue(|ring| {
            let mut out = Vec::new();
            ring.poll_attended(&mut out, 1, |out| ring.poll(out, 1))
        });
    });
}

#[test]
fn loom_finds_a_poll_that_does_not_look_again_when_it_no_longer_attends() {
    assert!(finds_mistake(|| {
        polls_an_armed_queue(|ring| {
            ring.attend(true);
            let found = ring.poll(&mut Vec::new(), 1);
            ring.attend(false);
            found
        });
    }));
}

/// A leader runs the engine, whose notification it takes itself; a second application waits for the descriptor of the same channel
/// and gets the notification of another queue. `take`: how the leader takes its own.
fn two_wait_for_a_channel(take: fn(&BellQueue<u8>) -> Option<u8>) {
    let channel = Arc::new(BellQueue::new().unwrap());
    let waits = {
        let channel = Arc::clone(&channel);
        loom::thread::spawn(move || {
            loop {
                channel.bell().wait();
                if channel.pop().is_some() {
                    break;
                }
                loom::thread::yield_now();
            }
        })
    };
    channel.attend();
    for notification in 0..2 {
        channel.push(notification, usize::MAX);
    }
    assert!(take(&channel).is_some());
    waits.join().unwrap();
}

#[test]
fn loom_a_leader_leaves_the_other_notifications_to_the_threads_that_wait() {
    check(|| two_wait_for_a_channel(BellQueue::take));
}

#[test]
fn loom_finds_a_leader_that_does_not_end_its_attention() {
    assert!(finds_mistake(|| two_wait_for_a_channel(BellQueue::pop)));
}

/// A kick outside the lock leaves frames while the progress thread goes to sleep. Unless the doorbell ends the sleep, the thread has
/// seen the frames before.
macro_rules! a_kick_leaves_frames {
    ($sleeper:ty) => {
        || {
            let shared = Arc::new((<$sleeper>::new(), Doorbell::new().unwrap()));
            let kicks = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (sleeper, bell) = &*shared;
                    if sleeper.leave_frames() {
                        bell.ring();
                    }
                })
            };
            let (sleeper, bell) = &*shared;
            sleeper.announce(u64::MAX);
            if !sleeper.take_frames_left_before_sleep() {
                bell.wait();
            }
            sleeper.wake();
            kicks.join().unwrap();
        }
    };
}

#[test]
fn loom_the_thread_does_not_sleep_beside_frames_that_a_kick_has_left() {
    check(a_kick_leaves_frames!(Sleeper));
}

#[test]
fn loom_finds_a_missing_fence_between_a_kick_and_the_sleep() {
    assert!(finds_mistake(a_kick_leaves_frames!(unfenced::sleeper::Sleeper)));
}

/// A verb sets a deadline while the progress thread goes to sleep until a later one. `locked`: the thread announces its sleep before
/// it releases the engine's lock.
fn a_verb_sets_a_deadline(locked: bool) {
    const LATER: u64 = 1_000;
    const SOONER: u64 = 500;
    let shared = Arc::new((Mutex::new(LATER), Sleeper::new(), Doorbell::new().unwrap()));
    let verb = {
        let shared = Arc::clone(&shared);
        loom::thread::spawn(move || {
            let (deadline, sleeper, bell) = &*shared;
            let mut deadline = lock(deadline);
            *deadline = SOONER;
            if sleeper.oversleeps(*deadline) {
                bell.ring();
            }
        })
    };
    let (deadline, sleeper, bell) = &*shared;
    let guard = lock(deadline);
    let wakes_at = *guard;
    if locked {
        sleeper.announce(wakes_at);
        drop(guard);
    } else {
        drop(guard);
        sleeper.announce(wakes_at);
    }
    if wakes_at > SOONER {
        bell.wait();
    }
    sleeper.wake();
    verb.join().unwrap();
}

#[test]
fn loom_the_thread_does_not_oversleep_a_deadline() {
    check(|| a_verb_sets_a_deadline(true));
}

#[test]
fn loom_finds_a_sleep_that_is_announced_after_the_lock() {
    assert!(finds_mistake(|| a_verb_sets_a_deadline(false)));
}

/// An application polls, then arms a queue and sleeps, while the thread decides whether to nap. `arm`: how it arms.
fn an_application_arms_a_queue(arm: fn(&CallCounters, &Doorbell)) {
    let shared = Arc::new((CallCounters::new(), Doorbell::new().unwrap()));
    let thread = {
        let shared = Arc::clone(&shared);
        loom::thread::spawn(move || {
            let (calls, bell) = &*shared;
            // A nap ends by itself after some milliseconds; here it must not need to.
            if calls.are_busy() {
                bell.wait();
                bell.clear();
            }
        })
    };
    let (calls, bell) = &*shared;
    for _ in 0..policy::BUSY_POLLS {
        calls.poll();
    }
    arm(calls, bell);
    thread.join().unwrap();
}

#[test]
fn loom_arming_a_queue_ends_the_nap_that_the_polls_have_caused() {
    check(|| {
        an_application_arms_a_queue(|calls, bell| {
            if calls.arm() {
                bell.ring();
            }
        });
    });
}

#[test]
fn loom_finds_an_armed_queue_that_does_not_end_the_nap() {
    assert!(finds_mistake(|| an_application_arms_a_queue(|calls, _| _ = calls.arm())));
}
