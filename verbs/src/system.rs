//! The clock, waiting, threads and random secrets: all uses of the operating system by this crate except memory and
//! interfaces. Other modules get the time as an argument and ring a [`Doorbell`].

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use rand::{TryRngCore as _, rngs::OsRng};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec},
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

/// A descriptor that is readable from a call of [`ring`](Self::ring) to the next [`clear`](Self::clear).
#[derive(Debug)]
pub(crate) struct Doorbell(OwnedFd);

impl Doorbell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes it readable. The only possible error is a full counter, and then it is already readable.
    pub(crate) fn ring(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable; returns whether it was rung.
    pub(crate) fn clear(&self) -> bool {
        rustix::io::read(&self.0, &mut [0u8; 8]).is_ok()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of `fds` is readable or in error, at most for `limit` (`None`: without limit). Returns whether one
/// is. A signal ends the wait early.
pub(crate) fn wait_readable<'a>(
    fds: impl IntoIterator<Item = BorrowedFd<'a>>,
    limit: Option<Duration>,
) -> io::Result<bool> {
    let mut set: smallvec::SmallVec<[PollFd<'_>; 8]> =
        fds.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let limit = limit.map(|l| Timespec {
        tv_sec: i64::try_from(l.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(l.subsec_nanos()),
    });
    match rustix::event::poll(&mut set, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
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
