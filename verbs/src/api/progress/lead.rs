//! Every wait of an application that runs the engine meanwhile.
//!
//! Waits differ in what they wait for ([`Awaited`]), not in how: an application on a device with a progress thread takes a place
//! (`waits`), waits for frames beside its own descriptor, and runs the engine when frames arrive, so that a message wakes one
//! thread. [`lead`] waits so for an event, [`sleep`] for the moment when the caller's own poll may find something. Of several
//! threads, one has the place; the thread that runs the engine wakes the others, by their descriptors ([`drive`] is the wait of a
//! device without a progress thread). Futures wait for the same descriptors (`tokio`).

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Weak},
    time::Duration,
};

use xwarp_tcp::time::Instant;

use super::{
    bell_queue::BellQueue,
    waits::{Waits, until_kick},
};
use crate::{
    api::{
        channel::{CompletionChannel, CqNotification},
        engines::Engines,
        shared::SharedEngine,
    },
    system::{Doorbell, WaitSet, WaitSetWith, wait_readable},
};

/// Longest sleep in an application's own wait, which verbs of other threads cannot shorten.
const APPLICATION_WAIT: Duration = Duration::from_millis(5);
/// Turns of a waiting application between two checks for the end of its wait.
const MAX_LEAD_TURNS: usize = 4;
/// Shortest time after which a sleeping caller runs the engine for a deadline. Most deadlines are those of acknowledgements
/// that the application's answer has carried.
const DEADLINE_WAIT: Duration = Duration::from_millis(4);

/// Why [`CompletionQueue::sleep`](crate::CompletionQueue::sleep) has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slept {
    /// The engine has run, because frames had arrived or a timer had expired: completions may wait.
    Ran,
    /// By [`Device::end_sleep`](crate::Device::end_sleep).
    Ended,
    /// By a signal handler.
    Interrupted,
    /// The time limit has passed.
    TimedOut,
    /// The caller has not slept: another thread does, several engines complete to the queue, or the device has failed,
    /// has lost its interface, or has no [`Progress::Auto`](crate::Progress::Auto).
    Refused,
}

/// What an application waits for.
pub(crate) trait Awaited {
    type Event;

    /// Whether a signal handler that runs meanwhile ends the wait.
    const ENDS_AT_SIGNAL: bool = false;
    /// Whether the waiter polls its queue itself when the engine has run, and runs the engine's timers.
    const POLLS: bool = false;

    fn fd(&self) -> BorrowedFd<'_>;

    /// The calling thread runs an engine that may cause the event, and [takes](Self::take) it afterwards.
    fn attend(&self) {}

    /// The event, if it is there. `readable`: the descriptor was just found to be readable.
    fn take(&self, readable: bool) -> io::Result<Option<Self::Event>>;

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
        self.queue().attend();
    }

    fn take(&self, _readable: bool) -> io::Result<Option<CqNotification>> {
        Ok(self.queue().take())
    }

    fn kept(&self) -> Option<Weak<BellQueue<CqNotification>>> {
        Some(Arc::downgrade(self.queue()))
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

/// A reason for the owner of an armed queue to poll it, or the end of its sleep.
struct Poll<'a, F> {
    end: &'a Doorbell,
    /// Called with true before the engine runs and with false afterwards.
    attend: F,
}

impl<F: Fn(bool)> Awaited for Poll<'_, F> {
    type Event = Slept;

    const ENDS_AT_SIGNAL: bool = true;
    const POLLS: bool = true;

    fn fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    fn attend(&self) {
        (self.attend)(true);
    }

    fn take(&self, readable: bool) -> io::Result<Option<Slept>> {
        Ok(Some(if readable {
            self.end.clear();
            Slept::Ended
        } else {
            (self.attend)(false);
            Slept::Ran
        }))
    }
}

/// The outcome of a wait at a place.
pub(crate) enum Led<E> {
    Found(E),
    TimedOut,
    Interrupted,
    /// Another thread has the place, or the wait must continue without running the engine.
    Elsewhere,
}

/// Waits for an event, at most for `limit`, and runs the engine of `shared` when frames arrive.
pub(crate) fn lead<A: Awaited>(
    waits: &Waits,
    shared: &SharedEngine,
    awaited: &A,
    limit: Option<Duration>,
) -> io::Result<Led<A::Event>> {
    let place = waits.leader();
    let Some(mut kept) = place.take() else { return Ok(Led::Elsewhere) };
    let _waiter = waits.share()?;
    // Not every descriptor can be added, for instance not one that is in the set already.
    let Ok(_own) = enter(place.set(), &mut kept, awaited) else { return Ok(Led::Elsewhere) };
    wait_in(place.set(), shared, awaited, limit)
}

/// Sleeps until there is work for the engine, and does it; `attend` is called with true before and with false after that.
pub(crate) fn sleep(
    waits: &Waits,
    shared: &SharedEngine,
    attend: impl Fn(bool),
    limit: Option<Duration>,
) -> io::Result<Slept> {
    let (place, end) = waits.poller();
    let Some(_taken) = place.take() else { return Ok(Slept::Refused) };
    let _waiter = waits.share()?;
    shared.calls().sleep();
    Ok(match wait_in(place.set(), shared, &Poll { end, attend }, limit)? {
        Led::Found(slept) => slept,
        Led::TimedOut => Slept::TimedOut,
        Led::Interrupted => Slept::Interrupted,
        Led::Elsewhere => Slept::Refused,
    })
}

/// Adds the descriptor of `awaited` to the set, unless it is `kept` there. One that is not kept is removed when the result is
/// dropped.
fn enter<'s, A: Awaited>(
    set: &'s WaitSet,
    kept: &mut Weak<BellQueue<CqNotification>>,
    awaited: &'s A,
) -> io::Result<Option<WaitSetWith<'s>>> {
    let queue = awaited.kept();
    if queue.as_ref().is_some_and(|queue| queue.ptr_eq(kept)) {
        return Ok(None);
    }
    // The kernel removes the descriptor of a queue that does not exist any more.
    if let Some(before) = std::mem::take(kept).upgrade() {
        set.remove(before.as_fd());
    }
    match queue {
        Some(queue) => {
            set.add(awaited.fd())?;
            *kept = queue;
            Ok(None)
        }
        None => set.with(awaited.fd()).map(Some),
    }
}

/// The wait of a thread that has a place; `set` contains the descriptor of `awaited`.
fn wait_in<A: Awaited>(
    set: &WaitSet,
    shared: &SharedEngine,
    awaited: &A,
    limit: Option<Duration>,
) -> io::Result<Led<A::Event>> {
    let end = limit.map(|limit| shared.clock().now() + limit);
    loop {
        let left = end.map(|end| end.since(shared.clock().now()));
        let timer = if A::POLLS { until_deadline(shared) } else { None };
        let woken = set.wait(left.into_iter().chain(timer).min())?;
        if woken.interrupted && A::ENDS_AT_SIGNAL {
            return Ok(Led::Interrupted);
        }
        // The descriptors of a removed interface, and the bell of a failure, stay readable.
        if shared.failed() || shared.interface_gone() {
            return Ok(Led::Elsewhere);
        }
        let frames = woken.shared || woken.bell;
        if frames || !woken.own && timer.is_some_and(|timer| left.is_none_or(|left| timer < left)) {
            // The event has woken this thread only, so frames are received before this thread leaves.
            awaited.attend();
            let rest = run(shared, frames, A::POLLS);
            let found = awaited.take(false)?;
            // Whoever waits for a signal as well sleeps elsewhere after its limit, also while frames keep coming.
            let over = A::ENDS_AT_SIGNAL && left.is_some_and(|left| left.is_zero());
            if rest && (found.is_some() || over) {
                shared.doorbell().ring();
            }
            if found.is_some() || over {
                return Ok(found.map_or(Led::TimedOut, Led::Found));
            }
        } else if woken.own
            && let Some(found) = awaited.take(true)?
        {
            return Ok(Led::Found(found));
        } else if left.is_some_and(|left| left.is_zero() || !(woken.own || woken.interrupted)) {
            return Ok(Led::TimedOut);
        }
    }
}

/// Runs the engine for a waiting application: for an event of the interface's descriptors, or for a timer. Returns whether frames
/// may be left.
fn run(shared: &SharedEngine, for_event: bool, polls: bool) -> bool {
    if !polls {
        shared.calls().lead();
    }
    if !for_event {
        // The turn kicks them.
        _ = shared.sleeper().take_frames_left();
        shared.turn(shared.lock())
    } else if shared.turn(shared.lock()) {
        (0..MAX_LEAD_TURNS).all(|_| shared.turn(shared.lock()))
    } else {
        // The event was not a frame.
        shared.progress();
        false
    }
}

/// Time until the engine must run, if the progress thread does not wake up for it.
fn until_deadline(shared: &SharedEngine) -> Option<Duration> {
    if shared.sleeper().sleeps() {
        return None;
    }
    let quiet = shared.guarded(shared.lock(), |state| {
        let quiet = state.quiet_for(shared.clock().now());
        if state.engine.wants_to_transmit() || state.link.has_frames() {
            return quiet;
        }
        quiet.map(|quiet| quiet.max(DEADLINE_WAIT))
    });
    until_kick(quiet.flatten(), shared.sleeper().frames_are_left())
}

/// Time until the engine must run for an application that waits without a progress thread.
fn quiet_for(shared: &SharedEngine, now: Instant) -> Duration {
    let quiet = shared.guarded(shared.lock(), |state| state.quiet_for(now)).flatten();
    let quiet = quiet.unwrap_or(APPLICATION_WAIT);
    until_kick(Some(quiet), shared.sleeper().take_frames_left()).unwrap_or(quiet)
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
    let end = limit.map(|limit| first.clock().now() + limit);
    let ask_changes = || engines.all().iter().for_each(|engine| engine.ask_changes());
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
        let now = first.clock().now();
        let left = end.map_or(APPLICATION_WAIT, |end| end.since(now));
        if left.is_zero() {
            return Ok(false);
        }
        if received {
            continue;
        }
        let quiet =
            engines.all().iter().map(|engine| quiet_for(engine, now)).min().unwrap_or(APPLICATION_WAIT);
        let link = if first.interface_gone() { &[] } else { link };
        wait_readable(link.iter().copied().chain([fd]), Some(left.min(quiet).min(APPLICATION_WAIT)))?;
        ask_changes();
    }
}
