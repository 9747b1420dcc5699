//! [`Waits`]: the sets of descriptors in which threads wait for the frames of one engine.
//!
//! Three kinds of threads wait, and a frame wakes one of them, in this order: the caller of
//! [`CompletionQueue::sleep`](crate::CompletionQueue::sleep), which polls its queue itself when it wakes up and therefore needs no
//! notification; the leader, an application that waits for an event and runs the engine meanwhile; the progress thread. Each kind
//! has a set, and one thread of an application at a time waits in each of the first two (`lead`).
//!
//! While the application polls, nobody waits for frames, and the sets do not contain the interface's descriptors: the
//! kernel would visit each set for each frame, which takes a seventh of the time of a sender of 1500-byte frames
//! (`docs/measurements/bulk.md`).

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, TryLockError, Weak},
    time::Duration,
};

use super::bell_queue::BellQueue;
use crate::{
    api::{
        channel::CqNotification,
        shared::{STARVED_WAIT, SharedEngine},
    },
    system::{Doorbell, WaitSet, lock},
};

/// Where threads wait for the frames of one engine.
pub(crate) struct Waits {
    /// Descriptors that are readable while frames or changes wait, for threads that run the engine while they wait.
    readiness: Vec<OwnedFd>,
    /// The caller of [`CompletionQueue::sleep`](crate::CompletionQueue::sleep).
    poller: Place<()>,
    /// Ends its sleep.
    end_of_sleep: Doorbell,
    /// The leader, and the queue that the set contains since an earlier wait.
    leader: Place<Weak<BellQueue<CqNotification>>>,
    /// The progress thread.
    behind: WaitSet,
    sharing: Mutex<Sharing>,
}

/// Whether the sets share the descriptors, which they do while there are waiters.
#[derive(Default)]
struct Sharing {
    shared: bool,
    waiters: usize,
}

/// A waiter for frames, until this is dropped.
pub(super) struct Waiter<'w>(&'w Mutex<Sharing>);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        lock(self.0).waiters -= 1;
    }
}

/// A set, and a lock that its waiter holds.
pub(super) struct Place<T> {
    set: WaitSet,
    taken: Mutex<T>,
}

impl<T: Default> Place<T> {
    fn new(set: WaitSet) -> Self {
        Self { set, taken: Mutex::default() }
    }

    /// `None` while another thread has taken it.
    pub(super) fn take(&self) -> Option<MutexGuard<'_, T>> {
        match self.taken.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn set(&self) -> &WaitSet {
        &self.set
    }
}

impl Waits {
    /// For an engine that runs: `readiness` are the descriptors of its part of the interface.
    pub(crate) fn new(engine: &SharedEngine, readiness: Vec<OwnedFd>) -> io::Result<Self> {
        let end_of_sleep = Doorbell::new()?;
        let poller = Place::new(WaitSet::new(engine.failure_bell())?);
        poller.set.add(end_of_sleep.as_fd())?;
        let leader = Place::new(WaitSet::new(engine.failure_bell())?);
        let behind = WaitSet::new(engine.doorbell().as_fd())?;
        Ok(Self { readiness, poller, end_of_sleep, leader, behind, sharing: Mutex::default() })
    }

    pub(crate) fn readiness(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.readiness.iter().map(AsFd::as_fd)
    }

    /// The place of the caller of [`CompletionQueue::sleep`](crate::CompletionQueue::sleep), and the bell in its set.
    pub(super) fn poller(&self) -> (&Place<()>, &Doorbell) {
        (&self.poller, &self.end_of_sleep)
    }

    /// The place of the leader.
    pub(super) fn leader(&self) -> &Place<Weak<BellQueue<CqNotification>>> {
        &self.leader
    }

    /// The sets in the order in which frames wake the threads that wait.
    fn sets(&self) -> [&WaitSet; 3] {
        [&self.poller.set, &self.leader.set, &self.behind]
    }

    /// Lets the sets share the descriptors for as long as the caller waits.
    pub(super) fn share(&self) -> io::Result<Waiter<'_>> {
        let mut sharing = lock(&self.sharing);
        if !sharing.shared {
            for set in self.sets() {
                self.readiness().try_for_each(|fd| set.share(fd))?;
            }
            sharing.shared = true;
        }
        sharing.waiters += 1;
        Ok(Waiter(&self.sharing))
    }

    /// Takes the descriptors out of the sets until a thread waits for frames, if none does now.
    pub(super) fn unshare(&self) {
        let mut sharing = lock(&self.sharing);
        if sharing.shared && sharing.waiters == 0 {
            for set in self.sets() {
                self.readiness().for_each(|fd| set.remove(fd));
            }
            sharing.shared = false;
        }
    }

    /// The progress thread's wait. Returns whether the doorbell has ended it.
    pub(super) fn behind(&self, limit: Option<Duration>) -> io::Result<bool> {
        let _waiter = self.share()?;
        Ok(self.behind.wait(limit)?.bell)
    }

    /// Ends the present sleep by polls, or else the next one.
    pub(crate) fn end_sleep(&self) {
        self.end_of_sleep.ring();
    }
}

/// A sleep of `wait`, or a shorter one if `frames_left` must be kicked again.
pub(super) fn until_kick(wait: Option<Duration>, frames_left: bool) -> Option<Duration> {
    if frames_left { Some(wait.map_or(STARVED_WAIT, |wait| wait.min(STARVED_WAIT))) } else { wait }
}
