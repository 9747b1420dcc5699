//! Waiting: descriptors for programs that poll, threads of our own, locks, and events that the program has not
//! acknowledged.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    fs::{OFlags, fcntl_getfl},
    thread::futex,
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
/// Faults of the thread itself are not blocked, because the kernel ends the process for a blocked one (see `faults`).
pub fn without_signals<T>(f: impl FnOnce() -> T) -> T {
    let mut others = SigSet::all();
    others.remove(Signal::SIGSEGV);
    others.remove(Signal::SIGBUS);
    let mask = others.thread_swap_mask(SigmaskHow::SIG_SETMASK);
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

/// A lock that a C program holds between two calls: from `ibv_wr_start` to `ibv_wr_complete`, and from `ibv_start_poll` to
/// `ibv_end_poll`. A program whose thread ends in between has locked the others out, as with every provider.
///
/// The object with the lock may be destroyed while another thread is inside the call that releases it, because the peer has
/// already answered what that call posted. Therefore [`release`](Self::release) accesses the lock once, as its last step, and
/// [`drain`](Self::drain) waits for it.
pub struct HeldLock {
    state: AtomicU32,
    /// Whether the program has not promised to use the object from one thread at a time.
    is_needed: bool,
}

/// Bits of the lock's state. 0: free.
const HELD: u32 = 1;
/// A thread sleeps until the lock is released.
const WAITED: u32 = 2;
/// The holder is inside the call that releases the lock.
const LEAVING: u32 = 4;
/// Looks at the lock before a thread sleeps: it is mostly held for less time than a sleep takes.
const LOOKS: u32 = 100;

impl HeldLock {
    /// `is_needed`: the program may use the object from several threads at the same time.
    pub const fn new(is_needed: bool) -> Self {
        Self { state: AtomicU32::new(0), is_needed }
    }

    /// Waits until the lock is free, and takes it.
    pub fn acquire(&self) {
        if !self.is_needed {
            self.state.store(HELD, Ordering::Relaxed);
        } else if self.state.compare_exchange(0, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.acquire_late();
        }
    }

    #[cold]
    fn acquire_late(&self) {
        // Other threads may sleep too, so the release must wake somebody.
        while self.state.compare_exchange(0, HELD | WAITED, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait_while(|state| state != 0);
        }
    }

    /// Looks some times, then sleeps once, unless `busy` is not true of the state any more.
    fn wait_while(&self, busy: impl Fn(u32) -> bool) {
        for _ in 0..LOOKS {
            if !busy(self.state.load(Ordering::Acquire)) {
                return;
            }
            std::hint::spin_loop();
        }
        let seen = self.state.load(Ordering::Acquire);
        let waited = seen | WAITED;
        if busy(seen)
            && self.state.compare_exchange(seen, waited, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            // An error means that the state has changed, or that a signal came; the caller looks again.
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, waited, None);
        }
    }

    /// Whether a thread holds the lock: the one that asks, if the program follows the manual pages.
    pub fn is_held(&self) -> bool {
        self.state.load(Ordering::Relaxed) != 0
    }

    /// The holder's last call has begun.
    pub fn leave(&self) {
        self.state.fetch_or(LEAVING, Ordering::Relaxed);
    }

    /// Releases the lock, which may not exist any more when this returns.
    pub fn release(&self) {
        if self.state.swap(0, Ordering::Release) & WAITED != 0 {
            // Only the address counts: without waiters there, nothing happens.
            let _ = futex::wake(&self.state, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }

    /// Waits until no thread is inside the call that releases the lock. One that is between two calls is not waited for.
    pub fn drain(&self) {
        while self.state.load(Ordering::Acquire) & LEAVING != 0 {
            self.wait_while(|state| state & LEAVING != 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::AtomicU64,
        thread::{scope, yield_now},
    };

    use super::*;

    #[test]
    fn one_thread_at_a_time_holds_a_lock() {
        const ROUNDS: u64 = 5000;
        let (held, number) = (HeldLock::new(true), AtomicU64::new(0));
        scope(|threads| {
            for _ in 0..3 {
                threads.spawn(|| {
                    for round in 0..ROUNDS {
                        held.acquire();
                        let before = number.load(Ordering::Relaxed);
                        if round % 16 == 0 {
                            yield_now();
                        }
                        number.store(before + 1, Ordering::Relaxed);
                        held.leave();
                        held.release();
                    }
                });
            }
        });
        assert_eq!(number.into_inner(), 3 * ROUNDS);
        assert!(!held.is_held());
    }

    #[test]
    fn the_end_of_a_lock_waits_for_the_call_that_releases_it_only() {
        let (held, left) = (HeldLock::new(true), AtomicU32::new(0));
        held.acquire();
        // Between two calls.
        held.drain();
        held.leave();
        scope(|threads| {
            threads.spawn(|| {
                for _ in 0..100 {
                    yield_now();
                }
                left.store(1, Ordering::Relaxed);
                held.release();
            });
            held.drain();
            assert_eq!(left.load(Ordering::Relaxed), 1);
        });
    }
}
