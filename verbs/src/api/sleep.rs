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
    sync::{Arc, Mutex, MutexGuard, TryLockError, Weak, atomic::Ordering},
    time::Duration,
};

use xwarp_tcp::time::Instant;

use super::{
    async_event::BellQueue,
    completion::{CompletionChannel, CqNotification},
    engines::Engines,
    shared::{NOT_WAITING, STARVED_WAIT, SharedEngine},
};
use crate::system::{Doorbell, WaitSet, WaitSetWith, Woken, lock, wait_readable};

/// Longest sleep in an application's own wait, which verbs of other threads cannot shorten.
const APPLICATION_WAIT: Duration = Duration::from_millis(5);
/// Turns of a leader between two checks for the end of its wait.
const MOST_LEAD_TURNS: usize = 4;
/// Longest sleep of the progress thread while an application leads. Deadlines within it wait for its end if the
/// application does not run the engine: ringing the doorbell for each would again wake two threads per message.
const STANDBY: Duration = Duration::from_millis(1);
/// Shortest time after which a sleeping caller runs the engine for a deadline. Most deadlines are those of acknowledgements
/// that the application's answer has carried.
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

/// What an application waits for.
pub(crate) trait Awaited {
    type Event;

    fn fd(&self) -> BorrowedFd<'_>;

    /// The calling thread runs an engine that may cause the event, and [takes](Self::take) it afterwards.
    fn attend(&self) {}

    /// The event, if it is there. `readable`: the descriptor was just found to be readable.
    fn take(&self, readable: bool) -> io::Result<Option<Self::Event>>;

    /// Whether a signal handler that runs meanwhile ends the wait, with [`io::ErrorKind::Interrupted`].
    const ENDS_AT_SIGNAL: bool = false;

    /// A queue whose descriptor may stay in the set between two waits: the kernel removes it when the queue is freed.
    fn kept(&self) -> Option<Weak<BellQueue<CqNotification>>> {
        None
    }
}

impl Awaited for BorrowedFd<'_> {
    type Event = ();

    fn fd(&self) -> BorrowedFd<'_> {
        *self
    }

    fn take(&self, readable: bool) -> io::Result<Option<()>> {
        Ok((readable || wait_readable([*self], Some(Duration::ZERO))?).then_some(()))
    }
}

impl Awaited for CompletionChannel {
    type Event = CqNotification;

    fn fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }

    fn attend(&self) {
        self.0.attend();
    }

    fn take(&self, _readable: bool) -> io::Result<Option<CqNotification>> {
        Ok(self.0.take())
    }

    fn kept(&self) -> Option<Weak<BellQueue<CqNotification>>> {
        Some(Arc::downgrade(&self.0))
    }
}

/// The same, and a signal handler that runs meanwhile.
pub(crate) struct OrSignal<'a, A>(pub(crate) &'a A);

impl<A: Awaited> Awaited for OrSignal<'_, A> {
    type Event = A::Event;

    const ENDS_AT_SIGNAL: bool = true;

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    fn attend(&self) {
        self.0.attend();
    }

    fn take(&self, readable: bool) -> io::Result<Option<A::Event>> {
        self.0.take(readable)
    }

    fn kept(&self) -> Option<Weak<BellQueue<CqNotification>>> {
        self.0.kept()
    }
}

/// The outcome of a wait that leads.
pub(crate) enum Led<E> {
    Found(E),
    TimedOut,
    /// Another thread leads, or the wait must continue without leading.
    Elsewhere,
}

/// Where threads wait for the frames of one engine.
pub(crate) struct Waits {
    /// Descriptors that are readable while frames or changes wait, for threads that run the engine while they wait.
    readiness: Vec<OwnedFd>,
    /// The caller of [`CompletionQueue::sleep`](super::CompletionQueue::sleep).
    bed: Place<()>,
    /// Ends its sleep.
    bell: Doorbell,
    /// The leader, and the queue that the set contains since an earlier wait.
    front: Place<Weak<BellQueue<CqNotification>>>,
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
struct Place<T> {
    set: WaitSet,
    taken: Mutex<T>,
}

impl<T: Default> Place<T> {
    fn new(set: WaitSet) -> Self {
        Self { set, taken: Mutex::default() }
    }

    /// `None` while another thread has taken it.
    fn take(&self) -> Option<MutexGuard<'_, T>> {
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
                self.readiness().for_each(|fd| set.remove(fd));
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

    /// Waits for an event, at most for `limit`, and runs the engine of `shared` when frames arrive.
    pub(crate) fn lead<A: Awaited>(
        &self,
        shared: &SharedEngine,
        awaited: &A,
        limit: Option<Duration>,
    ) -> io::Result<Led<A::Event>> {
        let Some(mut kept) = self.front.take() else { return Ok(Led::Elsewhere) };
        let _waiter = self.share()?;
        // Not every descriptor can be added, for instance not one that is in the set already.
        let Ok(_own) = self.front.enter(&mut kept, awaited) else { return Ok(Led::Elsewhere) };
        let end = limit.map(|l| shared.clock.now() + l);
        loop {
            let left = end.map(|end| end.since(shared.clock.now()));
            let woken = self.front.set.wait(left)?;
            if woken.interrupted && A::ENDS_AT_SIGNAL {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if !woken.shared && !woken.bell {
                if woken.own
                    && let Some(found) = awaited.take(true)?
                {
                    return Ok(Led::Found(found));
                }
                if left.is_some_and(|left| left.is_zero()) {
                    return Ok(Led::TimedOut);
                }
                continue;
            }
            // The event has woken this thread only, so frames are received before this thread leaves.
            shared.leads.fetch_add(1, Ordering::Relaxed);
            awaited.attend();
            let rest = shared.run_for_event();
            if let Some(found) = awaited.take(false)? {
                if rest {
                    shared.doorbell.ring();
                }
                return Ok(Led::Found(found));
            }
            // Whoever waits for a signal as well sleeps elsewhere after its limit, also while frames keep coming.
            if A::ENDS_AT_SIGNAL && left.is_some_and(|left| left.is_zero()) {
                if rest {
                    shared.doorbell.ring();
                }
                return Ok(Led::TimedOut);
            }
            // The descriptors of a removed interface, and the bell of a failure, stay readable.
            if shared.failed() || shared.interface_gone() {
                return Ok(Led::Elsewhere);
            }
        }
    }
}

impl Place<Weak<BellQueue<CqNotification>>> {
    /// Adds the descriptor of `awaited` to the set, unless it is `kept` there. One that is not kept is removed when the result is
    /// dropped.
    fn enter<'s, A: Awaited>(
        &'s self,
        kept: &mut Weak<BellQueue<CqNotification>>,
        awaited: &'s A,
    ) -> io::Result<Option<WaitSetWith<'s>>> {
        let queue = awaited.kept();
        if queue.as_ref().is_some_and(|queue| queue.ptr_eq(kept)) {
            return Ok(None);
        }
        // The kernel removes the descriptor of a queue that does not exist any more.
        if let Some(before) = std::mem::take(kept).upgrade() {
            self.set.remove(before.as_fd());
        }
        match queue {
            Some(queue) => {
                self.set.add(awaited.fd())?;
                *kept = queue;
                Ok(None)
            }
            None => self.set.with(awaited.fd()).map(Some),
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
            if state.engine.wants_to_transmit() || state.link.has_frames() {
                return quiet;
            }
            quiet.map(|quiet| quiet.max(DEADLINE_WAIT))
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
