//! One engine, its interface and its lock: [`Shared`]. Every verb that needs the engine goes through
//! [`Shared::with`]; whoever polls runs it through [`Shared::try_progress`]; the progress thread waits for it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use xwarp_tcp::time::Instant;

use super::{async_event::AsyncQueue, cm::table::CmTable};
use crate::{
    engine::Engine,
    interface::{Interface, InterfaceChange, Resolver},
    system::{Clock, Doorbell, wait_readable},
};

/// How soon to look again when the link had no room for what wants to be sent: nothing announces room.
const STARVED_WAIT: Duration = Duration::from_micros(100);
/// Polls without arming a queue after which an application may count as busy-polling.
pub(crate) const BUSY_POLLS: u64 = 64;
/// How often a busy engine asks the interface whether it changed.
const CHANGE_EVERY: Duration = Duration::from_millis(20);
/// Longest sleep of an application's own wait, which nobody else's verbs can shorten.
const APPLICATION_WAIT: Duration = Duration::from_millis(5);
/// No time at all: nobody sleeps.
const NOT_WAITING: u64 = 0;

/// What the lock protects.
pub(crate) struct State {
    pub(crate) engine: Engine,
    pub(crate) link: Box<dyn Interface>,
    pub(crate) cm: CmTable,
    /// When to ask the interface for changes.
    ask_changes_at: Instant,
}

/// What a [`Shared`] is made of.
pub(crate) struct Setup {
    pub(crate) engine: Engine,
    pub(crate) link: Box<dyn Interface>,
    pub(crate) cm: CmTable,
    pub(crate) clock: Clock,
    pub(crate) application_progress: bool,
    pub(crate) has_thread: bool,
}

/// A device, as its handles, its objects and its thread share it.
pub(crate) struct Shared {
    state: Mutex<State>,
    pub(crate) clock: Clock,
    /// Whether applications run the engine when they poll.
    pub(crate) application_progress: bool,
    /// Whether there is a progress thread.
    pub(crate) has_thread: bool,
    pub(crate) resolver: Arc<dyn Resolver>,
    pub(crate) async_events: AsyncQueue,
    /// Wakes the progress thread.
    doorbell: Doorbell,
    /// When the sleeping progress thread wakes by itself, in nanoseconds of `clock`.
    wakes_at: AtomicU64,
    /// Polls of the application since it last armed a queue.
    polls: AtomicU64,
    stop: AtomicBool,
    interface_gone: AtomicBool,
}

impl State {
    /// How long nothing needs to be done unless a frame arrives or a verb is called.
    fn quiet_for(&self, now: Instant) -> Option<Duration> {
        let timer = self.engine.next_deadline().map(|at| at.since(now));
        if self.engine.wants_to_transmit() {
            return Some(timer.map_or(STARVED_WAIT, |t| t.min(STARVED_WAIT)));
        }
        timer
    }
}

impl Shared {
    pub(crate) fn new(setup: Setup, resolver: Arc<dyn Resolver>) -> io::Result<Self> {
        let Setup { engine, link, cm, clock, application_progress, has_thread } = setup;
        Ok(Self {
            state: Mutex::new(State { engine, link, cm, ask_changes_at: Instant::ZERO }),
            clock,
            application_progress,
            has_thread,
            resolver,
            async_events: AsyncQueue::new()?,
            doorbell: Doorbell::new()?,
            wakes_at: AtomicU64::new(NOT_WAITING),
            polls: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            interface_gone: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state without changing anything.
    pub(crate) fn look<R>(&self, f: impl FnOnce(&State) -> R) -> R {
        f(&self.lock())
    }

    /// Runs a verb, and sends what it made ready.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut State, Instant) -> R) -> R {
        let mut state = self.lock();
        let now = self.clock.now();
        let result = f(&mut state, now);
        let State { engine, link, .. } = &mut *state;
        if engine.wants_to_transmit() {
            engine.transmit(now, &mut **link);
        }
        self.conclude(state, now);
        result
    }

    /// One turn of the engine by a polling application, unless somebody else is at it. Whether anything
    /// was received.
    pub(crate) fn try_progress(&self) -> bool {
        if !self.application_progress {
            return false;
        }
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let now = self.clock.now();
        self.turn(state, now)
    }

    /// Turns of the engine until nothing comes in any more, or somebody stops the device. Called after a
    /// sleep, so the interface itself may have something to say.
    pub(crate) fn progress(&self) {
        self.lock().ask_changes_at = Instant::ZERO;
        while self.turn(self.lock(), self.clock.now()) && !self.stopping() {}
    }

    fn turn(&self, mut state: MutexGuard<'_, State>, now: Instant) -> bool {
        let State { engine, link, .. } = &mut *state;
        let received = engine.turn(now, &mut **link);
        self.conclude(state, now);
        received
    }

    /// After anything that may have caused events or deadlines: passes them on.
    fn conclude(&self, mut state: MutexGuard<'_, State>, now: Instant) {
        while let Some(event) = state.engine.next_cm_event() {
            state.dispatch(now, event);
        }
        while let Some(event) = state.engine.next_async_event() {
            self.async_events.push(event);
        }
        if now >= state.ask_changes_at {
            state.ask_changes_at = now + CHANGE_EVERY;
            while let Some(change) = state.link.change() {
                self.interface_changed(&mut state, now, change);
            }
        }
        // The thread stores this under the lock too, so that either it has seen our deadline or we see it.
        let wakes_at = self.wakes_at.load(Ordering::Relaxed);
        if wakes_at != NOT_WAITING
            && state.quiet_for(now).is_some_and(|quiet| (now + quiet).as_nanos() < wakes_at)
        {
            self.doorbell.ring();
        }
    }

    fn interface_changed(&self, state: &mut State, now: Instant, change: InterfaceChange) {
        tracing::info!(?change, "the interface changed");
        match change {
            InterfaceChange::AddressRemoved(address) => {
                state.engine.address_removed(now, &mut *state.link, address);
            }
            InterfaceChange::Mtu(mtu) => state.engine.mtu_changed(now, mtu),
            InterfaceChange::NextHop { old, new } => state.engine.next_hop_changed(old, new),
            InterfaceChange::Removed => self.interface_gone.store(true, Ordering::Relaxed),
            InterfaceChange::Carrier { .. } | InterfaceChange::AddressAdded(_) => {}
        }
    }

    /// The application polls. Counted without a bus lock: a count that gets lost between threads does not matter.
    pub(crate) fn note_poll(&self) {
        self.polls.store(self.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// How often it has, since it last armed a queue.
    pub(crate) fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// The application is about to sleep and relies on being woken: it no longer counts as polling.
    pub(crate) fn application_sleeps(&self) {
        if self.polls.swap(0, Ordering::Relaxed) >= BUSY_POLLS {
            self.doorbell.ring();
        }
    }

    /// Tells the progress thread to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.doorbell.ring();
    }

    /// Whether the device is being closed.
    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Sleeps until something readable, the doorbell, the engine's next deadline or `limit` ends it.
    pub(crate) fn sleep(&self, fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> io::Result<()> {
        let wait = {
            let state = self.lock();
            let now = self.clock.now();
            let wait = match (state.quiet_for(now), limit) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            let wakes_at = wait.map_or(u64::MAX, |w| (now + w).as_nanos());
            self.wakes_at.store(wakes_at.max(NOT_WAITING + 1), Ordering::Relaxed);
            wait
        };
        wait_readable(fds.iter().copied().chain([self.doorbell.as_fd()]), wait)?;
        self.wakes_at.store(NOT_WAITING, Ordering::Relaxed);
        self.doorbell.clear();
        Ok(())
    }

    /// Runs the engine in the calling thread until `fd` is readable or `limit` has passed. Whether it is.
    pub(crate) fn drive(
        &self,
        fd: BorrowedFd<'_>,
        link: &[BorrowedFd<'_>],
        limit: Option<Duration>,
    ) -> io::Result<bool> {
        let end = limit.map(|l| self.clock.now() + l);
        loop {
            self.progress();
            if wait_readable([fd], Some(Duration::ZERO))? {
                return Ok(true);
            }
            let now = self.clock.now();
            let left = end.map_or(APPLICATION_WAIT, |end| end.since(now));
            if left.is_zero() {
                return Ok(false);
            }
            let quiet = self.lock().quiet_for(now).unwrap_or(APPLICATION_WAIT);
            wait_readable(link.iter().copied().chain([fd]), Some(left.min(quiet).min(APPLICATION_WAIT)))?;
        }
    }

    /// Sleeps while the application does the work, at most for `limit`. Frames do not end this.
    pub(crate) fn nap(&self, limit: Duration) -> io::Result<()> {
        wait_readable([self.doorbell.as_fd()], Some(limit))?;
        self.doorbell.clear();
        Ok(())
    }
}
