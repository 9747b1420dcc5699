//! Sleeping until the engine must run: the progress thread, and waiting applications.
//!
//! An application that waits on a device with a progress thread *leads*: it waits for frames itself and runs the
//! engine, so that a message wakes one thread. The thread stands by: each frame wakes the first waiter only, and that
//! is the leader while it waits, else the thread. One application thread leads at a time; the thread that runs the
//! engine wakes the others.
//!
//! Before the leader, frames wake the caller of [`CompletionQueue::sleep`](super::CompletionQueue::sleep), which polls
//! its queue itself when it wakes up, and therefore needs no notification.
//!
//! While the application polls, nobody waits for frames, and the sets do not contain the interface's descriptors: the
//! kernel would visit each set for each frame, which takes a seventh of the time of a sender of 1500-byte frames
//! (`docs/measurements/bulk.md`).

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, TryLockError, atomic::Ordering},
    time::Duration,
};

use xwarp_tcp::time::Instant;

use super::{
    engines::Engines,
    shared::{NOT_WAITING, STARVED_WAIT, SharedEngine},
};
use crate::system::{Doorbell, WaitSet, Woken, lock, wait_readable};

/// Longest sleep in an application's own wait, which verbs of other threads cannot shorten.
const APPLICATION_WAIT: Duration = Duration::from_millis(5);
/// Turns of a leader between two checks for the end of its wait.
const MOST_LEAD_TURNS: usize = 4;
/// Longest sleep of the progress thread while an application leads. Deadlines within it wait for its end if the
/// application does not run the engine: ringing the doorbell for each would again wake two threads per message.
const STANDBY: Duration = Duration::from_millis(1);
/// Shortest time after which a sleeping caller runs the engine for a deadline, as the longest nap of the progress
/// thread. Most deadlines are those of acknowledgements that the application's answer has carried.
const DEADLINE_WAIT: Duration = Duration::from_millis(4);

/// Why [`CompletionQueue::sleep`](super::CompletionQueue::sleep) has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slept {
    /// The engine has run, because frames had arrived or a timer had expired: completions may wait.
    Ran,
    /// By [`Device::end_sleep`](super::Device::end_sleep).
    Ended,
    /// By a signal handler.
    Interrupted,
    /// The time limit has passed.
    TimedOut,
    /// The caller has not slept: another thread does, several engines complete to the queue, or the device has failed,
    /// has lost its interface, or has no [`Progress::Auto`](super::Progress::Auto).
    Refused,
}

/// Where threads wait for the frames of one engine.
pub(crate) struct Waits {
    /// Descriptors that are readable while frames or changes wait, for threads that run the engine while they wait.
    readiness: Vec<OwnedFd>,
    /// The caller of [`CompletionQueue::sleep`](super::CompletionQueue::sleep).
    bed: Place,
    /// Ends its sleep.
    bell: Doorbell,
    /// The leader.
    front: Place,
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
struct Waiter<'w>(&'w Mutex<Sharing>);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        lock(self.0).waiters -= 1;
    }
}

/// A set, and a lock that its waiter holds.
struct Place {
    set: WaitSet,
    taken: Mutex<()>,
}

impl Place {
    fn new(set: WaitSet) -> Self {
        Self { set, taken: Mutex::default() }
    }

    /// `None` while another thread has taken it.
    fn take(&self) -> Option<MutexGuard<'_, ()>> {
        match self.taken.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Waits {
    /// For an engine that runs: `readiness` are the descriptors of its part of the interface.
    pub(crate) fn new(engine: &SharedEngine, readiness: Vec<OwnedFd>) -> io::Result<Self> {
        let bell = Doorbell::new()?;
        let bed = Place::new(WaitSet::new(engine.failure_bell())?);
        bed.set.add(bell.as_fd())?;
        let front = Place::new(WaitSet::new(engine.failure_bell())?);
        let behind = WaitSet::new(engine.doorbell())?;
        Ok(Self { readiness, bed, bell, front, behind, sharing: Mutex::default() })
    }

    pub(crate) fn readiness(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.readiness.iter().map(AsFd::as_fd)
    }

    /// The sets in the order in which frames wake the threads that wait.
    fn sets(&self) -> [&WaitSet; 3] {
        [&self.bed.set, &self.front.set, &self.behind]
    }

    /// Lets the sets share the descriptors for as long as the caller waits.
    fn share(&self) -> io::Result<Waiter<'_>> {
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
    pub(crate) fn unshare(&self) {
        let mut sharing = lock(&self.sharing);
        if sharing.shared && sharing.waiters == 0 {
            for set in self.sets() {
                self.readiness().for_each(|fd| set.unshare(fd));
            }
            sharing.shared = false;
        }
    }

    /// Ends the present [`sleep`](Self::sleep), or else the next one.
    pub(crate) fn end_sleep(&self) {
        self.bell.ring();
    }

    /// Sleeps until there is work for the engine, and does it; `attend` is called with true before and with false
    /// after that.
    pub(crate) fn sleep(
        &self,
        shared: &SharedEngine,
        attend: impl Fn(bool),
        limit: Option<Duration>,
    ) -> io::Result<Slept> {
        let Some(_bed) = self.bed.take() else { return Ok(Slept::Refused) };
        let _waiter = self.share()?;
        shared.sleeps.fetch_add(1, Ordering::Relaxed);
        let due = shared.until_deadline();
        let woken = self.bed.set.wait(limit.into_iter().chain(due).min())?;
        if shared.failed() || shared.interface_gone() {
            return Ok(Slept::Refused);
        }
        if woken.shared {
            // The event has woken this thread only, so frames are received before this thread leaves.
            attend(true);
            let rest = shared.run_for_event();
            attend(false);
            if rest {
                shared.doorbell.ring();
            }
            return Ok(Slept::Ran);
        }
        Ok(match woken {
            woken if woken.own => {
                self.bell.clear();
                Slept::Ended
            }
            woken if woken.interrupted => Slept::Interrupted,
            _ if due.is_some_and(|due| limit.is_none_or(|limit| due < limit)) => {
                attend(true);
                shared.turn(shared.lock());
                attend(false);
                Slept::Ran
            }
            _ => Slept::TimedOut,
        })
    }

    /// Waits until `fd` is readable, at most for `limit`, and runs the engine of `shared` when frames arrive. `None`
    /// when another thread leads, or the wait must continue without leading.
    pub(crate) fn lead(
        &self,
        shared: &SharedEngine,
        fd: BorrowedFd<'_>,
        limit: Option<Duration>,
    ) -> io::Result<Option<bool>> {
        let Some(_front) = self.front.take() else { return Ok(None) };
        let _waiter = self.share()?;
        // Not every descriptor can be added, for instance not one that is in the set already.
        let Ok(own) = self.front.set.with(fd) else { return Ok(None) };
        let end = limit.map(|l| shared.clock.now() + l);
        loop {
            let left = end.map(|end| end.since(shared.clock.now()));
            let woken = own.wait(left)?;
            if !woken.shared && !woken.bell {
                if woken.own || left.is_some_and(|left| left.is_zero()) {
                    return Ok(Some(woken.own));
                }
                continue;
            }
            // The event has woken this thread only, so frames are received before this thread leaves.
            shared.leads.fetch_add(1, Ordering::Relaxed);
            let rest = shared.run_for_event();
            // The descriptors of a removed interface, and the bell of a failure, stay readable.
            if shared.failed() || shared.interface_gone() {
                return Ok(None);
            }
            if wait_readable([fd], Some(Duration::ZERO))? {
                if rest {
                    shared.doorbell.ring();
                }
                return Ok(Some(true));
            }
        }
    }
}

impl SharedEngine {
    /// Runs the engine after an event of the interface's descriptors. Returns whether frames may be left.
    fn run_for_event(&self) -> bool {
        if !self.turn(self.lock()) {
            // The event was not a frame.
            self.progress();
            return false;
        }
        (0..MOST_LEAD_TURNS).all(|_| self.turn(self.lock()))
    }

    /// The progress thread's sleep: until a frame arrives that no leader receives, the doorbell rings or the engine's
    /// next deadline passes. While it stands by for a leader, the thread looks at deadlines every [`STANDBY`] only.
    pub(crate) fn sleep(&self, waits: &Waits, stands_by: bool) -> io::Result<()> {
        let wait = self.guarded(self.lock(), |state| {
            let now = self.clock.now();
            if stands_by && !state.engine.wants_to_transmit() {
                return Some(STANDBY);
            }
            let wait = state.quiet_for(now);
            let wakes_at = wait.map_or(u64::MAX, |w| (now + w).as_nanos());
            self.wakes_at.store(wakes_at.max(NOT_WAITING + 1), Ordering::SeqCst);
            wait
        });
        let Some(wait) = wait else { return Ok(()) };
        let wait = self.until_kick(wait);
        let woken = if self.interface_gone() {
            let bell = wait_readable([self.doorbell.as_fd()], wait)?;
            Woken { bell, ..Woken::default() }
        } else {
            let _waiter = waits.share()?;
            waits.behind.wait(wait)?
        };
        self.wakes_at.store(NOT_WAITING, Ordering::Relaxed);
        if woken.bell {
            self.doorbell.clear();
        }
        Ok(())
    }

    /// Time until the engine must run, if the progress thread does not wake up for it.
    fn until_deadline(&self) -> Option<Duration> {
        if self.wakes_at.load(Ordering::Relaxed) != NOT_WAITING {
            return None;
        }
        let quiet = self.guarded(self.lock(), |state| {
            let quiet = state.quiet_for(self.clock.now());
            if state.engine.wants_to_transmit() { quiet } else { quiet.map(|quiet| quiet.max(DEADLINE_WAIT)) }
        });
        self.until_kick(quiet.flatten())
    }

    /// Time until the engine must run for an application that waits.
    fn quiet_for(&self, now: Instant) -> Duration {
        let quiet = self.guarded(self.lock(), |state| state.quiet_for(now)).flatten();
        let quiet = quiet.unwrap_or(APPLICATION_WAIT);
        self.until_kick(Some(quiet)).unwrap_or(quiet)
    }

    /// A sleep of `wait`, or a shorter one if frames must be kicked again.
    fn until_kick(&self, wait: Option<Duration>) -> Option<Duration> {
        if !self.frames_left.swap(false, Ordering::SeqCst) {
            return wait;
        }
        Some(wait.map_or(STARVED_WAIT, |wait| wait.min(STARVED_WAIT)))
    }

    /// Sleeps for at most `limit` while the application runs the engine. Frames do not end this sleep. Returns whether
    /// the doorbell did.
    pub(crate) fn nap(&self, limit: Duration) -> io::Result<bool> {
        self.napping.store(true, Ordering::Relaxed);
        let woken = wait_readable([self.doorbell.as_fd()], Some(limit));
        self.napping.store(false, Ordering::Relaxed);
        let woken = woken?;
        if woken {
            self.doorbell.clear();
        }
        Ok(woken)
    }
}

/// Runs the engines of a device in the calling thread until `fd` is readable or `limit` has passed; returns whether `fd` is
/// readable. Checks both after each turn, so a steady stream of frames does not prolong the call. `link`: the descriptors of the
/// interface.
pub(crate) fn drive(
    engines: &Engines,
    fd: BorrowedFd<'_>,
    link: &[BorrowedFd<'_>],
    limit: Option<Duration>,
) -> io::Result<bool> {
    let first = engines.first();
    let end = limit.map(|l| first.clock.now() + l);
    let ask_changes = || engines.all().iter().for_each(|engine| engine.lock().ask_changes_at = Instant::ZERO);
    ask_changes();
    loop {
        let received =
            engines.all().iter().fold(false, |received, engine| engine.turn(engine.lock()) | received);
        if wait_readable([fd], Some(Duration::ZERO))? {
            return Ok(true);
        }
        if let Some(failure) = first.failure() {
            return Err(failure.clone().into());
        }
        let now = first.clock.now();
        let left = end.map_or(APPLICATION_WAIT, |end| end.since(now));
        if left.is_zero() {
            return Ok(false);
        }
        if received {
            continue;
        }
        let quiet =
            engines.all().iter().map(|engine| engine.quiet_for(now)).min().unwrap_or(APPLICATION_WAIT);
        let link = if first.interface_gone() { &[] } else { link };
        wait_readable(link.iter().copied().chain([fd]), Some(left.min(quiet).min(APPLICATION_WAIT)))?;
        ask_changes();
    }
}
