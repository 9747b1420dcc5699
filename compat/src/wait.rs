//! Descriptors for programs that poll: one descriptor of our own, readable while one of several is. Its `O_NONBLOCK` belongs to the
//! program, which says with it whether our functions may block.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    event::epoll,
    fs::{OFlags, fcntl_getfl},
};

/// A descriptor that is readable while one of its sources is.
pub struct Readable(OwnedFd);

impl Readable {
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// A descriptor with one source.
    pub fn of(source: impl AsFd) -> io::Result<Self> {
        let readable = Self::new()?;
        readable.add(source)?;
        Ok(readable)
    }

    /// Adds a source.
    pub fn add(&self, source: impl AsFd) -> io::Result<()> {
        Ok(epoll::add(&self.0, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
    }

    pub fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Whether the program has set `O_NONBLOCK`.
    pub fn is_nonblocking(&self) -> bool {
        fcntl_getfl(&self.0).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }
}

impl AsFd for Readable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Locks `mutex`, even if a holder panicked: a panic aborts the process at the boundary to C.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events that were returned to the program and not acknowledged. The object that they are about must outlive them.
#[derive(Default)]
pub struct Unacknowledged {
    count: Mutex<u64>,
    none: Condvar,
}

impl Unacknowledged {
    pub fn returned(&self) {
        *lock(&self.count) += 1;
    }

    /// Notes `number` acknowledgements. More than there are events count as all.
    pub fn acknowledged(&self, number: u64) {
        let mut count = lock(&self.count);
        *count = count.saturating_sub(number);
        if *count == 0 {
            self.none.notify_all();
        }
    }

    /// Waits until all are acknowledged.
    pub fn drain(&self) {
        let mut count = lock(&self.count);
        while *count > 0 {
            count = self.none.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
