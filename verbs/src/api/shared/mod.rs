//! One engine of a device, its part of the interface and its lock: [`SharedEngine`]. Every verb that needs the engine
//! goes through [`SharedEngine::with`]; threads that poll run it through [`SharedEngine::try_progress`]; the progress
//! thread waits for it.

mod common;
mod failing;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use xwarp_rnic::{
    engine::Engine,
    rnic::{AsyncEvent, Limits, QpId, Registry, Rnic, WorkRequest},
};
use xwarp_tcp::{
    link::{Kick, Kicked},
    stack::Polling,
    time::Instant,
};

pub(crate) use self::common::Common;
use super::{
    cm::table::CmTable,
    failure::{Answer, ClosedInterface, DeviceFailed},
    gather::Gathered,
    progress::{calls::CallCounters, sleeper::Sleeper},
};
use crate::{
    fork::ForkMark,
    interface::{Interface, InterfaceAttributes, InterfaceChange, Resolver},
    local::Local,
    system::{Clock, Doorbell, lock},
    ticks::TickClock,
};

/// Interval at which transmission and kicks are retried when the interface had no room: no event announces room.
pub(super) const STARVED_WAIT: Duration = Duration::from_micros(100);
/// Interval at which a busy engine asks the interface for changes.
const CHANGE_EVERY: Duration = Duration::from_millis(20);
/// Largest number of next hops that are looked up at a time, with two or three netlink requests each under the
/// engine's lock.
const MAX_LOOKUPS: usize = 8;
/// Largest number of repeated transmissions in one call, of frames that had no room before the kick.
const MAX_REFILLS: usize = 4;
/// Largest number of turns in one call of [`SharedEngine::progress`]: about 4000 frames.
const MAX_TURNS: usize = 64;

/// What the lock protects.
pub(crate) struct State {
    pub(crate) engine: Engine,
    pub(crate) link: Box<dyn Interface>,
    pub(crate) cm: CmTable,
    /// The clock of the calls that run the engine.
    clock: TickClock,
    /// The time of the next check for changes of the interface.
    ask_changes_at: Instant,
    /// The link has a loop for connections to our own addresses.
    loops: bool,
}

/// The parts of a new [`SharedEngine`].
pub(crate) struct Setup {
    pub(crate) common: Arc<Common>,
    pub(crate) engine: Engine,
    pub(crate) link: Box<dyn Interface>,
    pub(crate) cm: CmTable,
    pub(crate) application_progress: bool,
    pub(crate) has_thread: bool,
}

/// The time at which a verb's posted requests are sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leave {
    Now,
    /// With the call that ends their batch, the application's next poll, or the thread's next check.
    Later,
}

/// One engine of a device, which the device's handles, objects and threads share.
pub(crate) struct SharedEngine {
    state: Mutex<State>,
    /// Number of the engine in its device.
    number: u16,
    common: Arc<Common>,
    registry: Arc<Registry>,
    /// Kicks the interface, outside the lock. `None` where [`Link::flush`](xwarp_tcp::link::Link::flush) sends.
    kicker: Option<Arc<dyn Kick>>,
    clock: Clock,
    /// Whether applications run the engine when they poll.
    application_progress: bool,
    /// Whether there is a progress thread.
    has_thread: bool,
    resolver: Arc<dyn Resolver>,
    /// Wakes the progress thread.
    doorbell: Doorbell,
    /// The application's calls, which the progress thread's policy observes.
    calls: CallCounters,
    /// The progress thread's sleep.
    sleeper: Sleeper,
    /// Posts that wait for the next poll.
    gathered: Gathered,
    stop: AtomicBool,
    /// Set when an engine of the device panicked, or in a child process: this one does not run any more.
    failure: OnceLock<DeviceFailed>,
    fork: ForkMark,
    /// The attributes of the interface when the device was opened.
    opened: InterfaceAttributes,
    /// The engine's limits, which never change.
    limits: Limits,
    /// The reason why the interface no longer carries frames, if so.
    interface_gone: OnceLock<String>,
}

/// The asynchronous event for a change of the interface, if any.
fn event_of(change: &InterfaceChange) -> Option<AsyncEvent> {
    Some(match change {
        InterfaceChange::Removed { .. } => AsyncEvent::DeviceFatal,
        InterfaceChange::Carrier { up: true } => AsyncEvent::PortUp,
        InterfaceChange::Carrier { up: false } => AsyncEvent::PortDown,
        InterfaceChange::AddressAdded(address) => AsyncEvent::AddressAdded(*address),
        InterfaceChange::AddressRemoved(address) => AsyncEvent::AddressRemoved(*address),
        _ => return None,
    })
}

impl State {
    /// Time until the engine must run unless a frame arrives or a verb is called.
    pub(super) fn quiet_for(&self, now: Instant) -> Option<Duration> {
        if self.link.has_frames() {
            return Some(Duration::ZERO);
        }
        // Ports are released when changes are asked for.
        let release = self.cm.next_rest_end().map(|at| at.max(self.ask_changes_at));
        let deadline = self.engine.next_deadline().into_iter().chain(release).min();
        let timer = deadline.map(|at| at.since(now));
        if self.engine.wants_to_transmit() {
            return Some(timer.map_or(STARVED_WAIT, |t| t.min(STARVED_WAIT)));
        }
        if self.engine.wants_lookup() {
            return Some(timer.map_or(CHANGE_EVERY, |t| t.min(CHANGE_EVERY)));
        }
        timer
    }

    /// Makes the frames to our own addresses return to us, from now on.
    pub(super) fn loop_own_frames(&mut self) {
        if !self.loops {
            let closed = Box::new(ClosedInterface::of(&*self.link));
            let link = std::mem::replace(&mut self.link, closed);
            self.link = Box::new(Local::over(link));
            self.loops = true;
        }
    }

    /// Asks the kernel for next hops that the engine wants to look up, a bounded number at a time.
    fn look_up_next_hops(&mut self, now: Instant) {
        for _ in 0..MAX_LOOKUPS {
            let Some(lookup) = self.engine.next_lookup() else { return };
            if let Some(found) = self.link.next_hop(&lookup.flow, lookup.unanswered) {
                self.engine.next_hop_found(now, lookup.conn, found);
            }
        }
    }
}

impl SharedEngine {
    pub(crate) fn new(setup: Setup, resolver: Arc<dyn Resolver>) -> io::Result<Self> {
        let Setup { common, engine, mut link, cm, application_progress, has_thread } = setup;
        let (kicker, clock) = (link.kicker(), TickClock::new(common.clock()));
        Ok(Self {
            number: engine.rnic().number(),
            opened: link.attributes(),
            limits: engine.rnic().limits().clone(),
            registry: Arc::clone(common.registry()),
            clock: common.clock(),
            common,
            kicker,
            state: Mutex::new(State { engine, link, cm, clock, ask_changes_at: Instant::ZERO, loops: false }),
            application_progress,
            has_thread,
            resolver,
            doorbell: Doorbell::new()?,
            calls: CallCounters::new(),
            sleeper: Sleeper::new(),
            gathered: Gathered::new(),
            stop: AtomicBool::new(false),
            failure: OnceLock::new(),
            fork: ForkMark::new()?,
            interface_gone: OnceLock::new(),
        })
    }

    /// Makes `engines` those of one device, which fail together.
    pub(super) fn are_siblings(engines: &[Arc<Self>]) {
        if let Some(first) = engines.first() {
            let siblings = engines.iter().map(Arc::downgrade);
            first.common.are(siblings.map(|engine| engine as Weak<dyn common::Sibling>));
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Calls `f` with the state for reading, even after the device has failed. `None` in a child process (`fork`): a thread that
    /// does not exist there may hold the lock, for ever.
    pub(crate) fn look<R>(&self, f: impl FnOnce(&State) -> R) -> Option<R> {
        if self.inherited() { None } else { Some(f(&self.lock())) }
    }

    /// The interface's attributes; in a child process those with which it was opened, and that it is down.
    pub(crate) fn interface(&self) -> InterfaceAttributes {
        let closed = || InterfaceAttributes { up: false, ..self.opened.clone() };
        self.look(|state| state.link.attributes()).unwrap_or_else(closed)
    }

    /// Runs a verb that needs only the registry, without waiting for the engine.
    pub(crate) fn registry<R: Answer>(&self, f: impl FnOnce(&Registry) -> R) -> R {
        if self.failed() { R::of_failed_device() } else { f(&self.registry) }
    }

    /// Runs a verb and transmits the work that it made ready. If the device has failed or fails now, the verb returns
    /// the answer of a failed device.
    pub(crate) fn with<R: Answer>(&self, f: impl FnOnce(&mut State, Instant) -> R) -> R {
        self.call(|state| {
            let now = state.clock.now();
            (f(state, now), Leave::Now)
        })
    }

    /// Posts `requests` to the send queue of `qp` by `f`; they may be gathered.
    pub(crate) fn post<'a, R: Answer>(
        &self,
        qp: QpId,
        requests: impl ExactSizeIterator<Item = WorkRequest<'a>>,
        f: impl FnOnce(&mut Rnic) -> R,
    ) -> R {
        self.calls.post();
        self.call(|state| {
            let gathers = self.application_polls()
                && state
                    .engine
                    .emss_in_flight(qp)
                    .is_some_and(|emss| self.gathered.add(&self.clock, requests, emss));
            (f(state.engine.rnic_mut()), if gathers { Leave::Later } else { Leave::Now })
        })
    }

    /// Posts a receive, which does not send gathered posts. Most receives give the engine nothing to do.
    pub(crate) fn post_receive<R: Answer>(&self, f: impl FnOnce(&mut Rnic) -> R) -> R {
        self.calls.post();
        self.call(|state| {
            let result = f(state.engine.rnic_mut());
            let waits = if self.gathered.any() {
                !self.gathered.is_due(state.clock.now())
            } else {
                self.application_polls() && !state.engine.wants_to_transmit()
            };
            (result, if waits { Leave::Later } else { Leave::Now })
        })
    }

    /// Posts requests that are sent with a later call.
    pub(crate) fn post_in_batch<R: Answer>(&self, f: impl FnOnce(&mut Rnic) -> R) -> R {
        self.calls.post();
        self.call(|state| (f(state.engine.rnic_mut()), Leave::Later))
    }

    fn call<R: Answer>(&self, f: impl FnOnce(&mut State) -> (R, Leave)) -> R {
        if self.failed() {
            return R::of_failed_device();
        }
        let done = self.guarded(self.lock(), |state| {
            let (result, leave) = f(state);
            // A later call that transmits this work publishes the rest too.
            if leave == Leave::Later {
                return (result, None);
            }
            let now = state.clock.now();
            if state.engine.wants_to_transmit() {
                self.transmit(state, now);
            }
            self.publish(state, now);
            (result, Some(state.engine.wants_to_transmit()))
        });
        if let Some((_, Some(starved))) = done {
            self.kick_for_application(starved);
        }
        done.map_or_else(R::of_failed_device, |(result, _)| result)
    }

    fn transmit(&self, state: &mut State, now: Instant) {
        let State { engine, link, .. } = state;
        engine.transmit(now, &mut **link);
        self.gathered.clear();
    }

    /// Whether the application polls so often that posts may wait for it. The progress thread, if there is one, has
    /// detected this, and checks again after each nap.
    fn application_polls(&self) -> bool {
        self.calls.are_busy() && (!self.has_thread || self.sleeper.naps())
    }

    /// Sends gathered posts that have waited long enough: called by polls that do not run the engine.
    pub(crate) fn send_due_posts(&self) {
        if self.gathered.any() && self.gathered.is_due(self.clock.now()) {
            self.try_progress();
        }
    }

    /// Whether gathered posts wait although the application had time to poll.
    pub(crate) fn application_forgets_posts(&self) -> bool {
        self.gathered.any() && self.gathered.is_due(self.clock.now())
    }

    /// Whether posts were gathered since the last call.
    pub(crate) fn gathered_lately(&self) -> bool {
        self.gathered.lately()
    }

    /// [Kicks](Self::kick) in a call of the application, which counts as work for the engine.
    fn kick_for_application(&self, starved: bool) {
        self.calls.kick(|| self.kick(starved));
    }

    /// Kicks the interface for what was submitted under the lock, which the caller has released: other threads post and
    /// poll meanwhile. `starved`: the link had no room for all that the engine wanted to send. The kick may have made room,
    /// so the rest is sent then. Returns for how many chunks this thread kicked.
    fn kick(&self, starved: bool) -> u64 {
        let Some(kicker) = &self.kicker else { return 0 };
        let (mut starved, mut kicked) = (starved, 0);
        for _ in 0..=MAX_REFILLS {
            match kicker.kick() {
                Kicked::Nothing => break,
                Kicked::Done(chunks) => kicked += u64::from(chunks),
                Kicked::More(chunks) => {
                    kicked += u64::from(chunks);
                    if self.sleeper.leave_frames() {
                        self.doorbell.ring();
                    }
                    break;
                }
            }
            if !starved {
                break;
            }
            let refilled = self.guarded(self.lock(), |state| {
                let now = state.clock.now();
                self.transmit(state, now);
                self.publish(state, now);
                state.engine.wants_to_transmit()
            });
            starved = refilled.unwrap_or(false);
        }
        kicked
    }

    /// Runs `f` unless the device has failed. A panic of `f` is caught and fails the device, with all its engines. Returns `None` in
    /// both cases.
    pub(super) fn guarded<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        f: impl FnOnce(&mut State) -> R,
    ) -> Option<R> {
        if self.failed() {
            return None;
        }
        match catch_unwind(AssertUnwindSafe(|| f(&mut state))) {
            Ok(result) => Some(result),
            Err(panic) => {
                let failure = DeviceFailed::by(&*panic);
                tracing::error!(panic = %failure.message, "an engine panicked: the device and all its objects have failed");
                self.fail(&mut state, &failure);
                drop(state);
                self.fail_others(&failure);
                None
            }
        }
    }

    /// Rung when the progress thread must look at the engine.
    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// The application's calls so far.
    pub(super) fn calls(&self) -> &CallCounters {
        &self.calls
    }

    /// The progress thread's sleep.
    pub(super) fn sleeper(&self) -> &Sleeper {
        &self.sleeper
    }

    /// Number of the engine in its device.
    #[inline]
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// The device's clock.
    #[inline]
    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// What the engines of the device have in common.
    pub(super) fn common(&self) -> &Common {
        &self.common
    }

    /// The engine's limits, which never change.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Resolves next hops, without the engine's lock.
    pub(crate) fn resolver(&self) -> &dyn Resolver {
        &*self.resolver
    }

    /// Whether applications run the engine when they poll.
    pub(crate) fn application_progress(&self) -> bool {
        self.application_progress
    }

    /// Whether there is a progress thread.
    pub(crate) fn has_thread(&self) -> bool {
        self.has_thread
    }

    /// Readable from the moment the device fails.
    pub(crate) fn failure_bell(&self) -> BorrowedFd<'_> {
        self.common.failure_bell().as_fd()
    }

    /// One turn of the engine by a polling application, unless another thread holds the engine. Returns whether a frame
    /// was received.
    pub(crate) fn try_progress(&self) -> bool {
        if !self.application_progress || self.failed() {
            return false;
        }
        let state = match self.state.try_lock() {
            Ok(state) => state,
            // As in `lock`.
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let (received, starved) = self.turn_without_kick(state, true);
        self.kick_for_application(starved);
        received
    }

    /// Runs the engine until no frame is left to receive or the device is stopped, but at most [`MAX_TURNS`] turns:
    /// peers that never stop sending do not keep the caller here. Called after a sleep, so the interface is asked for
    /// changes.
    pub(crate) fn progress(&self) {
        if self.failed() {
            return;
        }
        self.ask_changes();
        for _ in 0..MAX_TURNS {
            if !self.turn(self.lock()) || self.stopping() {
                break;
            }
        }
    }

    /// One turn of the engine. Returns whether a frame was received.
    pub(super) fn turn(&self, state: MutexGuard<'_, State>) -> bool {
        let (received, starved) = self.turn_without_kick(state, false);
        self.kick(starved);
        received
    }

    /// One turn of the engine, after which the caller must [kick](Self::kick); `polled` by an application that will soon do it
    /// again. Returns whether a frame was received, and whether the link had no room for all frames.
    fn turn_without_kick(&self, state: MutexGuard<'_, State>, polled: bool) -> (bool, bool) {
        let turned = self.guarded(state, |state| {
            let now = state.clock.now();
            let State { engine, link, .. } = state;
            engine.set_polling(if !polled {
                Polling::No
            } else if self.application_polls() {
                Polling::Busy
            } else {
                Polling::Yes
            });
            let received = engine.turn(now, &mut **link);
            self.gathered.clear();
            self.publish(state, now);
            (received, state.engine.wants_to_transmit())
        });
        turned.unwrap_or_default()
    }

    /// Passes on the events and deadlines that the engine's last work may have caused: nearly always none.
    #[inline]
    fn publish(&self, state: &mut State, now: Instant) {
        if now >= state.ask_changes_at || state.engine.has_events() || self.sleeper.sleeps() {
            self.publish_all(state, now);
        }
    }

    /// [`Self::publish`], if there is something.
    #[inline(never)]
    fn publish_all(&self, state: &mut State, now: Instant) {
        if now >= state.ask_changes_at {
            state.ask_changes_at = now + CHANGE_EVERY;
            while let Some(change) = state.link.change() {
                self.interface_changed(state, now, change);
            }
            state.look_up_next_hops(now);
            state.cm.end_rests(now, state.engine.stack());
        }
        while let Some(event) = state.engine.next_cm_event() {
            state.cm.dispatch(&mut state.engine, now, event);
        }
        while let Some(event) = state.engine.next_async_event() {
            self.common.async_events().push(event);
        }
        if self.sleeper.sleeps()
            && let Some(quiet) = state.quiet_for(now)
            && self.sleeper.oversleeps((now + quiet).as_nanos())
        {
            self.doorbell.ring();
        }
    }

    fn interface_changed(&self, state: &mut State, now: Instant, change: InterfaceChange) {
        tracing::debug!(?change, "the interface changed");
        // Each engine is told of each change, and the application once.
        if let Some(event) = event_of(&change).filter(|_| self.number == 0) {
            tracing::info!(?event, "the interface changed");
            self.common.async_events().push(event);
        }
        match change {
            InterfaceChange::AddressRemoved(address) => {
                state.engine.address_removed(now, &mut *state.link, address);
            }
            InterfaceChange::AddressAdded(_) | InterfaceChange::Carrier { up: false } => {}
            InterfaceChange::Carrier { up: true } => state.engine.carrier_returned(now),
            InterfaceChange::Mtu(mtu) => {
                state.engine.mtu_changed(now, mtu);
                // A route may have a smaller one.
                state.engine.routes_changed();
            }
            InterfaceChange::Mac(mac) => {
                state.engine.source_mac_changed(mac);
                state.cm.mac_changed();
            }
            InterfaceChange::Neighbours(changed) => state.engine.neighbours_changed(now, &changed),
            InterfaceChange::NeighbourLost(address) => state.engine.neighbour_lost(address),
            InterfaceChange::Routes => state.engine.routes_changed(),
            InterfaceChange::Removed { cause } => {
                let _ = self.interface_gone.set(cause);
                state.engine.interface_removed();
                state.cm.interface_removed();
            }
        }
    }

    /// Whether the interface was removed. Its descriptors stay readable (`POLLERR`) then and must not be waited for.
    pub(crate) fn interface_gone(&self) -> bool {
        self.removal().is_some()
    }

    /// The reason why the interface was removed, if it was.
    pub(crate) fn removal(&self) -> Option<&str> {
        self.interface_gone.get().map(String::as_str)
    }

    /// Counts a post of the application that did not take the engine's lock.
    #[inline]
    pub(super) fn note_post(&self) {
        self.calls.post();
    }

    /// Counts a poll of the application.
    #[inline]
    pub(crate) fn note_poll(&self) {
        self.calls.poll();
    }

    /// Records that the application is about to sleep and must be woken: it no longer counts as polling.
    pub(crate) fn application_sleeps(&self) {
        if self.gathered.any() {
            self.with(|_, _| ());
        }
        if self.calls.arm() {
            self.doorbell.ring();
        }
    }

    /// Lets the next turn ask the interface for changes.
    pub(super) fn ask_changes(&self) {
        self.lock().ask_changes_at = Instant::ZERO;
    }

    /// Asks the progress thread to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.doorbell.ring();
    }

    /// `limit` of a sleep during which nobody else kicks the interface, or a shorter one if it had no room for all frames.
    pub(super) fn until_room(&self, limit: Duration) -> Duration {
        let starved = self.sleeper.frames_are_left()
            || self
                .look(|state| state.engine.wants_to_transmit() || state.link.has_frames())
                .unwrap_or(false);
        if starved { limit.min(STARVED_WAIT) } else { limit }
    }

    /// Whether the device is being closed.
    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}
