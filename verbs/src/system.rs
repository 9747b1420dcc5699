//! The clock, waiting, threads and random secrets: all uses of the operating system by this crate except memory and
//! interfaces. Other modules get the time as an argument and ring a [`Doorbell`].

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use rand::{TryRngCore as _, rngs::OsRng};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll},
    io::Errno,
};
use xwarp_tcp::{secret::Secret, time::Instant};

/// The monotonic clock of one device; zero is the moment when the device was opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    origin: std::time::Instant,
}

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub(crate) fn start() -> Self {
        Self { origin: std::time::Instant::now() }
    }

    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub(crate) fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Locks `mutex`, even if a holder panicked. The data behind this crate's mutexes is never left half changed: queues
/// and tables change in single steps, and the device handles a panic inside its engine before it releases the lock
/// (see `api::failure`).
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called when a [`Doorbell`] rings.
type Hook = Box<dyn Fn() + Send + Sync>;

/// A descriptor that is readable from a call of [`ring`](Self::ring) to the next [`clear`](Self::clear).
pub(crate) struct Doorbell {
    fd: OwnedFd,
    hook: OnceLock<Hook>,
}

impl Doorbell {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, hook: OnceLock::new() })
    }

    /// Calls `hook` whenever the bell rings from now on. Of several hooks, the first one stays.
    pub(crate) fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.hook.set(Box::new(hook));
    }

    /// Makes it readable. The only possible error is a full counter, and then it is already readable.
    pub(crate) fn ring(&self) {
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        if let Some(hook) = self.hook.get() {
            hook();
        }
    }

    /// Makes it unreadable; returns whether it was rung.
    pub(crate) fn clear(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0u8; 8]).is_ok()
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Doorbell").field(&self.fd).finish()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Descriptors that a thread waits for. Several sets can share descriptors: an event of one wakes only one waiter, that of
/// the first set, in the order in which it was shared, in which a thread waits at that moment (`EPOLLEXCLUSIVE`).
#[derive(Debug)]
pub(crate) struct WaitSet(OwnedFd);

/// A set and one descriptor more, which is removed when this is dropped.
pub(crate) struct WaitSetWith<'s> {
    set: &'s WaitSet,
    own: BorrowedFd<'s>,
}

/// A descriptor that a wait found readable or in error.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Woken {
    /// A descriptor that the sets share.
    pub(crate) shared: bool,
    /// The set's bell.
    pub(crate) bell: bool,
    /// The waiter's own descriptor.
    pub(crate) own: bool,
    /// None: a signal handler has run.
    pub(crate) interrupted: bool,
}

/// Marks of the descriptors in a set.
const SHARED_MARK: u64 = 0;
const OWN_MARK: u64 = 1;
const BELL_MARK: u64 = 2;

impl WaitSet {
    /// A set of `bell`, which other sets may contain too and which wakes all waiters.
    pub(crate) fn new(bell: BorrowedFd<'_>) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&set, bell, epoll::EventData::new_u64(BELL_MARK), epoll::EventFlags::IN)?;
        Ok(Self(set))
    }

    /// Adds a descriptor that the sets share, unless it is in the set already.
    pub(crate) fn share(&self, shared: BorrowedFd<'_>) -> io::Result<()> {
        let mark = epoll::EventData::new_u64(SHARED_MARK);
        let added =
            match epoll::add(&self.0, shared, mark, epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE) {
                // The descriptor is a set itself, such as that of an interface's events: its rare events wake all waiters.
                Err(Errno::INVAL) => epoll::add(&self.0, shared, mark, epoll::EventFlags::IN),
                added => added,
            };
        match added {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes a descriptor.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // The only error is that the set does not contain it.
        let _ = epoll::delete(&self.0, fd);
    }

    /// Waits until a descriptor is readable or in error, at most for `limit`. A signal ends the wait early.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> io::Result<Woken> {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [nothing; 4];
        let limit = limit.and_then(timespec);
        let found = match epoll::wait(&self.0, &mut events[..], limit.as_ref()) {
            Ok(found) => found,
            Err(Errno::INTR) => return Ok(Woken { interrupted: true, ..Woken::default() }),
            Err(e) => return Err(e.into()),
        };
        let mut woken = Woken::default();
        for event in events.iter().take(found) {
            let data = event.data;
            match data.u64() {
                OWN_MARK => woken.own = true,
                BELL_MARK => woken.bell = true,
                _ => woken.shared = true,
            }
        }
        Ok(woken)
    }

    /// Adds the waiter's own descriptor, until it is removed or closed.
    pub(crate) fn add(&self, own: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.0, own, epoll::EventData::new_u64(OWN_MARK), epoll::EventFlags::IN)?)
    }

    /// The set with `own` in addition. Fails for a descriptor that cannot be waited for, or is in the set already.
    pub(crate) fn with<'s>(&'s self, own: BorrowedFd<'s>) -> io::Result<WaitSetWith<'s>> {
        self.add(own)?;
        Ok(WaitSetWith { set: self, own })
    }
}

impl Drop for WaitSetWith<'_> {
    fn drop(&mut self) {
        self.set.remove(self.own);
    }
}

/// A limit beyond the range of `Timespec` counts as no limit.
fn timespec(limit: Duration) -> Option<Timespec> {
    Timespec::try_from(limit).ok()
}

/// Waits until one of `fds` is readable or in error, at most for `limit` (`None`: without limit). Returns whether one
/// is. A signal ends the wait early.
pub(crate) fn wait_readable<'a>(
    fds: impl IntoIterator<Item = BorrowedFd<'a>>,
    limit: Option<Duration>,
) -> io::Result<bool> {
    let mut set: smallvec::SmallVec<[PollFd<'_>; 8]> =
        fds.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let limit = limit.and_then(timespec);
    match rustix::event::poll(&mut set, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// How long the calling thread has been ready to run without a processor in its life. `None` where the kernel does not count it.
pub(crate) fn waited_for_processor() -> Option<Duration> {
    // Opened each time: a descriptor that stays could be closed and reused by the application.
    let counts = std::fs::read("/proc/thread-self/schedstat").ok()?;
    let waited = str::from_utf8(&counts).ok()?.split_ascii_whitespace().nth(1)?;
    Some(Duration::from_nanos(waited.parse().ok()?))
}

/// Starts a thread.
#[expect(clippy::disallowed_methods, reason = "the one place that starts threads")]
pub(crate) fn spawn(name: String, f: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(f)
}

/// A secret from the system's random source (RFC 4086), from which all random values of one engine are derived.
pub(crate) fn secret() -> io::Result<Secret> {
    let mut bytes = [0; 32];
    OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(Secret::new(bytes))
}
