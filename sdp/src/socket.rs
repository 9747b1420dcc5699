//! One connection: the protocol's machine on a queue pair, behind one lock. The service thread and the threads of the
//! program run it in turn.

mod flood;
mod link;
mod moved;
mod state;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
    time::Instant,
};

use rustix::event::EventfdFlags;
use xwarp_verbs::{Rest, cm::EventKind};

pub(crate) use self::{
    link::{Link, MAX_RDMA},
    state::State,
};
use crate::{
    machine::{End, Machine},
    service::Core,
};

/// A descriptor that is readable while the socket is.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn set(&self, readable: bool) {
        // Errors of both calls are harmless: a full counter is readable, an empty one is not.
        let _ = if readable {
            rustix::io::write(&self.0, &1u64.to_ne_bytes())
        } else {
            rustix::io::read(&self.0, &mut [0u8; 8])
        };
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Tasks to wake at the next change. A task is stored once, so there are at most as many entries as polling tasks.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Vec<Waker>);

impl Tasks {
    #[cfg(feature = "tokio")]
    pub(crate) fn add(&mut self, task: &Waker) {
        if !self.0.iter().any(|known| known.will_wake(task)) {
            self.0.push(task.clone());
        }
    }

    pub(crate) fn wake(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The event that a thread waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Until {
    /// Anything has changed.
    Changed,
    /// A read would not wait.
    Readable,
    /// A transfer of memory has ended.
    Transferred,
}

/// The threads to wake, by the event that they wait for.
type Due = [bool; 3];

/// A connection that its handles and the service share.
pub(crate) struct Socket {
    pub(crate) core: Arc<Core>,
    state: Mutex<State>,
    /// Condition variables by event: a transfer wakes no thread that waits to read.
    changed: [Condvar; 3],
    bell: Bell,
    /// See [`Self::has_offer_or_oob`].
    offer_or_oob: AtomicBool,
}

impl Socket {
    pub(crate) fn new(core: &Arc<Core>, machine: Machine, link: Link) -> io::Result<Arc<Self>> {
        let state = State::new(machine, Some(link));
        let core = Arc::clone(core);
        Ok(Arc::new(Self {
            core,
            state: Mutex::new(state),
            changed: Default::default(),
            bell: Bell::new()?,
            offer_or_oob: AtomicBool::new(false),
        }))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits at the latest until `end`, possibly shorter; false when `end` has passed.
    pub(crate) fn wait<'s>(
        &'s self,
        mut state: MutexGuard<'s, State>,
        until: Until,
        end: Option<Instant>,
    ) -> (MutexGuard<'s, State>, bool) {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return (state, false);
        }
        let changed = &self.changed[until as usize];
        state.waiting[until as usize] += 1;
        let mut state = match left {
            None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(left) => changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
        };
        state.waiting[until as usize] -= 1;
        (state, true)
    }

    /// Executes the machine's actions, then wakes all callers that wait for a change.
    pub(crate) fn drive(&self, state: &mut State) {
        self.execute(state);
        self.wake(state);
    }

    /// Does the same after a call that waits itself: the others are woken only if the machine acted. Otherwise two
    /// waiting callers, one that reads and one that writes, would wake each other endlessly. Returns whether the
    /// machine acted.
    pub(crate) fn drive_waiting(&self, state: &mut State) -> bool {
        let acted = self.execute(state);
        if acted {
            self.wake(state);
        }
        acted
    }

    fn wake(&self, state: &mut State) {
        let due = Self::due(state);
        self.notify(due);
    }

    /// The threads that the last changes concern. Tasks are woken at once.
    fn due(state: &mut State) -> Due {
        let over = state.machine.ended().is_some() || state.failed.is_some() || state.read_shut;
        let transferred = std::mem::take(&mut state.transferred);
        state.tasks.wake();
        // A wake-up without waiters is a system call, too.
        let [changing, reading, transferring] = state.waiting.map(|threads| threads > 0);
        [changing, reading && (over || state.readable), transferring && (over || transferred)]
    }

    fn notify(&self, due: Due) {
        for (changed, _) in self.changed.iter().zip(due).filter(|(_, due)| *due) {
            changed.notify_all();
        }
    }

    /// [`Self::drive`] for the service, which releases the lock before it wakes other threads: they run at once, and
    /// would wait for the lock.
    fn drive_and_let_go(&self, mut state: MutexGuard<'_, State>) {
        self.execute(&mut state);
        let due = Self::due(&mut state);
        drop(state);
        self.notify(due);
    }

    /// Returns whether the machine acted.
    fn execute(&self, state: &mut State) -> bool {
        state.deferred = false;
        let acted = state.drive();
        if let Some(End::Violated(violation)) = state.machine.ended()
            && !std::mem::replace(&mut state.counted, true)
        {
            tracing::warn!(peer = ?state.peer, %violation, "SDP connection aborted");
            self.core.count(violation.counter(), 1);
        }
        for (name, count) in [
            ("sdp_bytes_written", &mut state.written),
            ("sdp_bytes_placed", &mut state.placed),
            ("sdp_transactions", &mut state.transactions),
        ] {
            if *count > 0 {
                self.core.count(name, std::mem::take(count));
            }
        }
        let offer_or_oob = state.machine.has_offer() || state.machine.is_urgent();
        if offer_or_oob != self.has_offer_or_oob() {
            self.offer_or_oob.store(offer_or_oob, Ordering::Relaxed);
        }
        let readable = state.is_readable();
        if readable != state.readable {
            state.readable = readable;
            if state.watched {
                self.bell.set(readable);
            }
        }
        acted
    }

    /// Whether advertised data waits, or an out-of-band byte has arrived or was announced, for callers without the lock.
    pub(crate) fn has_offer_or_oob(&self) -> bool {
        self.offer_or_oob.load(Ordering::Relaxed)
    }

    /// Creates the descriptor that is readable while the connection is.
    pub(crate) fn watched_bell(&self) -> &Bell {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.watched, true) {
            state.readable = state.is_readable();
            self.bell.set(state.readable);
        }
        &self.bell
    }

    /// Handles the waiting completions.
    pub(crate) fn turn(&self) {
        let mut state = self.lock();
        if state.is_polled() {
            while state.poll_completions(&self.core).0 {}
        } else {
            state.take_completions(&self.core);
        }
        self.drive_and_let_go(state);
    }

    /// Runs the device for a polling caller, and handles the completions; returns whether there was one, and the caller's rest for the
    /// time after the lock. The caller must then execute the machine's actions.
    pub(crate) fn poll(self: &Arc<Self>, state: &mut State) -> (bool, Option<Rest>) {
        state.polls += 1;
        if state.polled.is_none() {
            state.polled = Some(state.polls);
            if !std::mem::replace(&mut state.looked_at, true) {
                self.core.polled(self);
            }
        }
        state.poll_completions(&self.core)
    }

    /// [`Self::poll`], with the actions that follow.
    pub(crate) fn poll_and_drive(self: &Arc<Self>, state: &mut State) -> Option<Rest> {
        let (found, rest) = self.poll(state);
        if found {
            self.drive(state);
        }
        rest
    }

    /// The caller stops polling, or sleeping: completions notify the service from now on, and those that came before are
    /// handled.
    pub(crate) fn end_polling(&self) {
        let mut state = self.lock();
        state.polled = None;
        state.take_completions(&self.core);
        self.drive(&mut state);
    }

    /// Called by the service from time to time while the connection is polled. Returns whether it still is; otherwise
    /// completions notify the service again.
    pub(crate) fn still_polled(&self) -> bool {
        // The holder of the lock uses the connection. Waiting for the lock would cost both sides system calls.
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        let now = Some(state.polls);
        if state.polled.is_some() && std::mem::replace(&mut state.polled, now) != now {
            if state.deferred {
                self.drive(&mut state);
            }
            return true;
        }
        state.looked_at = false;
        if state.polled.take().is_some() {
            state.take_completions(&self.core);
            self.drive(&mut state);
        }
        false
    }

    /// Handles an event of the connection manager. Returns true when an accepted connection is established.
    pub(crate) fn event(&self, kind: EventKind) -> bool {
        let mut state = self.lock();
        // Messages that arrived before the event are processed before it.
        state.take_completions(&self.core);
        let established = state.event(kind);
        self.drive(&mut state);
        established
    }
}
