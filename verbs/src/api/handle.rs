//! [`Device`]: the handle to the engines of one device, and the waits of its threads. Everything else of the API is made from it or
//! holds one (`device` opens devices and makes their objects).

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, Weak},
    thread::JoinHandle,
    time::Duration,
};

use xwarp_rnic::rnic::{AsyncEvent, Limits};

use super::{
    async_event::AsyncEvents,
    channel::{CompletionChannel, CqNotification},
    cm::queue::Owner,
    counters::Counters,
    engines::{self, Engines},
    failure::DeviceFailed,
    observer::Observer,
    progress::{
        Progress,
        lead::{self, Awaited, Led, OrSignal, Slept, drive},
        thread,
        waits::Waits,
    },
    shared::SharedEngine,
};
use crate::{
    interface::InterfaceAttributes,
    system::{self, lock, wait_readable},
    tap::Recording,
};

/// Threads that wait for neighbours at the same time; more resolutions are refused.
const MAX_RESOLVERS: usize = 64;
/// Longest wait between two checks while a closing device waits for its connections.
const FAREWELL_WAIT: Duration = Duration::from_millis(5);

/// The attributes of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAttributes {
    /// The network interface.
    pub interface: InterfaceAttributes,
    /// Number of engines.
    pub engines: u16,
    /// Most objects and largest queues.
    pub limits: Limits,
    /// Which threads run the engines.
    pub progress: Progress,
}

/// An RNIC: a network interface with one or more engines. Clones are handles to the same device.
///
/// A device with several engines ([`DeviceOptions::engines`](super::DeviceOptions::engines)) is used like one with a single engine: regions, completion queues and
/// shared receive queues serve queue pairs of all engines, and a listener accepts in all of them. A connection lives in the engine
/// of the queue on which it began, and an idle queue pair moves to the engine of its connection.
///
/// Every object that was created from a device keeps it open. When the last object and the last handle are dropped, the
/// device closes its connections in order (see [`DeviceOptions::linger`](super::DeviceOptions::linger)) and releases the interface.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

pub(crate) struct DeviceInner {
    engines: Engines,
    /// One for each engine.
    seats: Vec<Seat>,
    resolvers: Mutex<Vec<JoinHandle<()>>>,
    progress: Progress,
    linger: Duration,
    observer: Mutex<Option<Observer>>,
    recording: Option<Arc<Recording>>,
}

/// What waits for the frames of one engine.
struct Seat {
    waits: Arc<Waits>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DeviceInner {
    /// Runs the engine until every connection has ended at both ends, at most for `limit`, and writes all recorded frames to
    /// their file. Returns whether all have ended.
    fn drain(&self, limit: Duration) -> bool {
        let drained = self.run_until_closed(limit);
        if let Some(recording) = &self.recording {
            recording.flush();
        }
        drained
    }

    fn run_until_closed(&self, limit: Duration) -> bool {
        let first = self.engines.first();
        let end = first.clock().now() + limit;
        let closed = |engine: &Arc<SharedEngine>| {
            engine.look(|state| state.engine.stack().unfinished_connections() == 0).unwrap_or(true)
        };
        while !first.failed() {
            self.engines.all().iter().for_each(|engine| engine.progress());
            if self.engines.all().iter().all(closed) {
                return true;
            }
            let now = first.clock().now();
            if now >= end || wait_readable(self.readiness(), Some(end.since(now).min(FAREWELL_WAIT))).is_err()
            {
                break;
            }
        }
        false
    }

    /// The descriptors of all engines.
    fn readiness(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.seats.iter().flat_map(|seat| seat.waits.readiness())
    }
}

impl Seat {
    /// A seat for an engine that runs: `readiness` are the descriptors of its part of the interface.
    fn new(engine: &Arc<SharedEngine>, readiness: Vec<OwnedFd>, interface: &str) -> io::Result<Self> {
        let waits = Arc::new(Waits::new(engine, readiness)?);
        let thread = engine.has_thread().then(|| thread::spawn(engine, &waits, interface)).transpose()?;
        Ok(Self { waits, thread: Mutex::new(thread) })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.shared().interface().name;
        f.debug_tuple("Device").field(&name).finish()
    }
}

impl Device {
    /// A device of `engines`, each with the descriptors of its part of the interface.
    pub(super) fn of(
        engines: Engines,
        readiness: Vec<Vec<OwnedFd>>,
        (progress, linger): (Progress, Duration),
        recording: Option<Arc<Recording>>,
        interface: &str,
    ) -> io::Result<Self> {
        let seats = engines.all().iter().zip(readiness);
        let seats = seats.map(|(engine, readiness)| Seat::new(engine, readiness, interface));
        let inner = Arc::new(DeviceInner {
            seats: seats.collect::<io::Result<_>>()?,
            engines,
            resolvers: Mutex::default(),
            progress,
            linger,
            observer: Mutex::default(),
            recording,
        });
        for engine in inner.engines.all() {
            engine.with(|state, _| state.cm.belongs_to(Arc::downgrade(&inner) as Weak<Owner>));
        }
        Ok(Self(inner))
    }

    /// Answers queries of other processes from now on. A device that cannot be observed works nevertheless, with a warning in the log.
    pub(super) fn observe(&self, recording: Arc<Recording>, interface: &str) {
        match Observer::start(self.engines().all().to_vec(), recording, interface) {
            Ok(observer) => *lock(&self.0.observer) = Some(observer),
            Err(error) => tracing::warn!(interface, %error, "the device cannot be observed"),
        }
    }

    /// The device that new identifiers of the connection manager keep open.
    pub(super) fn of_owner(owner: Arc<Owner>) -> Option<Self> {
        owner.downcast().ok().map(Self)
    }

    /// The first engine, for what concerns the device or any engine.
    pub(super) fn shared(&self) -> &Arc<SharedEngine> {
        self.0.engines.first()
    }

    #[inline]
    pub(super) fn engines(&self) -> &Engines {
        &self.0.engines
    }

    /// Whether both are handles to the same device.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The device's current attributes.
    pub fn attributes(&self) -> DeviceAttributes {
        DeviceAttributes {
            interface: engines::attributes(self.engines().all(), self.shared()),
            engines: self.engines().all().len() as u16,
            limits: self.shared().limits().clone(),
            progress: self.0.progress,
        }
    }

    /// All counters of the device, by stable names. Those of one connection: [`QueuePair::counters`].
    ///
    /// [`QueuePair::counters`]: super::QueuePair::counters
    pub fn counters(&self) -> Counters {
        Counters::of_device(self.engines().all())
    }

    /// The asynchronous events of the device, from its opening on: of its queues, its connections and its port. All callers
    /// share them.
    pub fn async_events(&self) -> AsyncEvents {
        self.shared().common().async_events().events()
    }

    /// Adds a reader of the asynchronous events: it gets each event from now on that `wants` chooses, whether or not other
    /// readers take it too. `wants` runs inside the engine and must not call verbs.
    pub fn subscribe_async_events(
        &self,
        wants: impl Fn(&AsyncEvent) -> bool + Send + 'static,
    ) -> io::Result<AsyncEvents> {
        self.shared().common().async_events().subscribe(wants)
    }

    /// The reason for a failure of the device, if any: a panic inside its engine, or because this process is a child
    /// (`fork`) of the one that opened it. In a child, verbs return an error and change nothing; the parent's device is
    /// not affected. A panic makes a device fail: all work is flushed as far as possible, verbs return an error that
    /// says so, waits end, and [`AsyncEvent::DeviceFatal`] is the last asynchronous event. The interface is closed, so
    /// that the kernel resets the connections of peers. Registered memory is no longer accessed.
    ///
    /// `None` for a device whose interface was removed, although it also raises [`AsyncEvent::DeviceFatal`]: its engine still
    /// runs, its objects can be queried, and its connections end with
    /// [`CloseReason::InterfaceRemoved`](crate::CloseReason::InterfaceRemoved).
    pub fn failure(&self) -> Option<DeviceFailed> {
        self.shared().failure().cloned()
    }

    /// Runs the engines until no frame is left to receive, but for a bounded number of frames. Needed only with
    /// [`Progress::Application`], by an application that does not poll for a while.
    pub fn progress(&self) {
        self.engines().all().iter().for_each(|engine| engine.progress());
    }

    /// Waits until every connection of the device has ended at both ends, at most for `limit`, and runs the engine meanwhile; returns
    /// whether all have. For a process that disconnects and exits while other objects still hold the device: dropping the device
    /// does the same.
    pub fn drain(&self, limit: Duration) -> bool {
        self.0.drain(limit)
    }

    /// Waits until `fd` (any channel, listener, connection or other descriptor) is readable, at most for `limit`;
    /// returns whether it is. Runs the engine meanwhile, unless another thread waits already, the device has several engines, or it
    /// has [`Progress::Thread`]: then the progress threads run them.
    pub fn wait(&self, fd: impl AsFd, limit: Option<Duration>) -> io::Result<bool> {
        let only = (!self.engines().are_several()).then_some(0);
        Ok(self.wait_for(only, &fd.as_fd(), limit)?.is_some())
    }

    /// Waits for a notification on `channel`, at most for `limit`, like [`wait`](Self::wait) and then
    /// [`CompletionChannel::poll`], with fewer system calls.
    pub fn wait_notification(
        &self,
        channel: &CompletionChannel,
        limit: Option<Duration>,
    ) -> io::Result<Option<CqNotification>> {
        let only = (!self.engines().are_several()).then_some(0);
        self.wait_for(only, channel, limit)
    }

    /// Runs the engine until `fd` is readable, at most for `limit`; returns whether it is. Unlike [`wait`](Self::wait), returns at once
    /// where another thread runs the engine: the caller then waits in another way. Fails with [`io::ErrorKind::Interrupted`] when a
    /// signal handler has run meanwhile.
    pub fn attend(&self, fd: impl AsFd, limit: Duration) -> io::Result<bool> {
        Ok(self.attend_for(&fd.as_fd(), limit)?.is_some())
    }

    /// Like [`attend`](Self::attend), for a notification on `channel`, which is returned.
    pub fn attend_notification(
        &self,
        channel: &CompletionChannel,
        limit: Duration,
    ) -> io::Result<Option<CqNotification>> {
        self.attend_for(channel, limit)
    }

    fn attend_for<A: Awaited>(&self, awaited: &A, limit: Duration) -> io::Result<Option<A::Event>> {
        if let Some(failure) = self.shared().failure() {
            return Err(failure.clone().into());
        }
        let only = (!self.engines().are_several()).then_some(0);
        match self.lead(only, &OrSignal(awaited), Some(limit))? {
            Led::Found(found) => Ok(Some(found)),
            Led::Interrupted => Err(io::ErrorKind::Interrupted.into()),
            Led::TimedOut | Led::Elsewhere => Ok(None),
        }
    }

    /// Waits for an event that the engine `only` will cause.
    pub(super) fn wait_for<A: Awaited>(
        &self,
        only: Option<u16>,
        awaited: &A,
        limit: Option<Duration>,
    ) -> io::Result<Option<A::Event>> {
        let first = self.shared();
        if let (true, Some(failure)) = (first.inherited(), first.failure()) {
            return Err(failure.clone().into());
        }
        let end = limit.map(|limit| first.clock().now() + limit);
        if first.has_thread() {
            match self.lead(only, awaited, limit)? {
                Led::Found(found) => return Ok(Some(found)),
                Led::TimedOut => return Ok(None),
                Led::Interrupted | Led::Elsewhere => {}
            }
        }
        loop {
            let limit = end.map(|end| end.since(first.clock().now()));
            let readable = if first.has_thread() {
                wait_readable([awaited.fd(), first.failure_bell()], limit)?
            } else {
                let link: Vec<BorrowedFd<'_>> = self.0.readiness().collect();
                drive(self.engines(), awaited.fd(), &link, limit)?
            };
            // An event that is there takes precedence over the failure.
            match (awaited.take(readable && first.failure().is_none())?, first.failure()) {
                (Some(found), _) => return Ok(Some(found)),
                (None, Some(failure)) => return Err(failure.clone().into()),
                (None, None) if !readable || limit.is_some_and(|limit| limit.is_zero()) => return Ok(None),
                // Another thread was faster.
                (None, None) => {}
            }
        }
    }

    /// Runs the engine `only`, if it is known, while it waits; see [`lead::lead`].
    fn lead<A: Awaited>(
        &self,
        only: Option<u16>,
        awaited: &A,
        limit: Option<Duration>,
    ) -> io::Result<Led<A::Event>> {
        let Some(number) = only else {
            self.engines().all().iter().for_each(|engine| engine.application_sleeps());
            return Ok(Led::Elsewhere);
        };
        let engine = self.engines().get(number);
        engine.application_sleeps();
        match self.0.seats.get(usize::from(number)).filter(|_| engine.application_progress()) {
            Some(seat) => lead::lead(&seat.waits, engine, awaited, limit),
            None => Ok(Led::Elsewhere),
        }
    }

    /// See [`CompletionQueue::sleep`](super::CompletionQueue::sleep); the queue is that of the engine `only`.
    pub(super) fn sleep(
        &self,
        only: Option<u16>,
        attend: impl Fn(bool),
        limit: Option<Duration>,
    ) -> io::Result<Slept> {
        let number = only.filter(|_| self.0.progress == Progress::Auto).unwrap_or(u16::MAX);
        match (self.engines().get(number), self.0.seats.get(usize::from(number))) {
            (engine, Some(seat)) if !engine.failed() => lead::sleep(&seat.waits, engine, attend, limit),
            _ => Ok(Slept::Refused),
        }
    }

    /// Sleeps until a frame arrives, at most for `limit`: the rest of a thread that polls in vain a queue of the engine `only`, if it is
    /// known.
    pub(super) fn rest(&self, only: Option<u16>, limit: Duration) {
        let (mut limit, engines) = (limit, self.engines().all());
        let seats = (0_u16..).zip(engines.iter().zip(&self.0.seats));
        let seats = seats.filter(|(number, _)| only.is_none_or(|only| only == *number));
        let mut readiness = smallvec::SmallVec::<[BorrowedFd<'_>; 8]>::new();
        for (_, (engine, seat)) in seats {
            engine.calls().sleep();
            limit = engine.until_room(limit);
            readiness.extend(seat.waits.readiness());
        }
        // An error ends the rest like a frame.
        _ = wait_readable(readiness, Some(limit));
    }

    /// Ends the present [`sleep`](super::CompletionQueue::sleep) on a queue of the device, or else the next one. Takes no lock.
    pub fn end_sleep(&self) {
        self.0.seats.iter().for_each(|seat| seat.waits.end_sleep());
    }

    /// Runs `f` on a thread of its own, which is waited for when the device is closed.
    pub(super) fn spawn_resolver(
        &self,
        engine: &Arc<SharedEngine>,
        f: impl FnOnce(&SharedEngine) + Send + 'static,
    ) -> io::Result<()> {
        let mut running = lock(&self.0.resolvers);
        running.retain(|thread| !thread.is_finished());
        if running.len() >= MAX_RESOLVERS {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "too many addresses are being resolved"));
        }
        let engine = Arc::clone(engine);
        running.push(system::spawn("xwarp-resolve".into(), move || f(&engine))?);
        Ok(())
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        let threads = || self.seats.iter().filter_map(|seat| lock(&seat.thread).take());
        if self.engines.first().inherited() {
            // The parent still uses descriptors, ports and programs of the device, and its threads are not in this process.
            for engine in self.engines.all() {
                std::mem::forget(Arc::clone(engine));
            }
            threads().for_each(std::mem::forget);
            std::mem::forget(lock(&self.observer).take());
            std::mem::forget(std::mem::take(&mut *lock(&self.resolvers)));
            return;
        }
        let observer = lock(&self.observer).take();
        drop(observer);
        self.engines.all().iter().for_each(|engine| engine.stop());
        let resolvers = std::mem::take(&mut *lock(&self.resolvers));
        for thread in threads().chain(resolvers) {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
        self.drain(self.linger);
        // The peers of the remaining connections are reset, so that they do not wait for their time-outs.
        for engine in self.engines.all() {
            engine.with(|state, _| state.engine.abort_unfinished());
        }
    }
}
