//! Waiting: descriptors for programs that poll, threads of our own, locks, and events that the program has not
//! acknowledged.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

use nix::sys::signal::{SigSet, SigmaskHow};
use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    fs::{OFlags, fcntl_getfl},
};

/// A descriptor of our own that is readable while one of its sources is. Its `O_NONBLOCK` belongs to the program, which says with it whether
/// our functions may block.
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

/// Entries behind a descriptor that is readable while there is one.
pub struct BellQueue<T> {
    entries: Mutex<VecDeque<T>>,
    bell: OwnedFd,
}

impl<T> BellQueue<T> {
    pub fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { entries: Mutex::default(), bell })
    }

    pub fn push(&self, entry: T) {
        let mut entries = lock(&self.entries);
        entries.push_back(entry);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    pub fn pop(&self) -> Option<T> {
        self.shrink(VecDeque::pop_front)
    }

    /// Removes the entries for which `which` is true. Returns whether there were any.
    pub fn remove_if(&self, which: impl Fn(&T) -> bool) -> bool {
        self.shrink(|entries| {
            let before = entries.len();
            entries.retain(|entry| !which(entry));
            entries.len() < before
        })
    }

    /// Runs `f`, which removes entries, and keeps the descriptor readable only if some are left.
    fn shrink<R>(&self, f: impl FnOnce(&mut VecDeque<T>) -> R) -> R {
        let mut entries = lock(&self.entries);
        let result = f(&mut entries);
        if entries.is_empty() {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
        result
    }
}

impl<T> AsFd for BellQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Calls `f` with all signals of this thread blocked, which threads that `f` starts inherit: signals stay with the program's threads.
pub fn without_signals<T>(f: impl FnOnce() -> T) -> T {
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let result = f();
    if let Ok(mask) = mask {
        let _ = mask.thread_set_mask();
    }
    result
}

/// Starts a thread that handles no signals.
pub fn spawn(name: &str, f: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    without_signals(|| thread::Builder::new().name(name.to_owned()).spawn(f))
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

    /// Counts `number` acknowledgements, at most as many as there are events.
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
