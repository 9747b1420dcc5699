//! Locks of the program's calls and of the library's threads. A lock that a thread has left by a panic is used again.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Attempts to get a lock that another thread holds for a moment.
const ATTEMPTS: u32 = 64;
/// Longest wait of a call of the program for bytes that the relay moves. A relay that is not preempted needs microseconds.
const MOVED_WITHIN: Duration = Duration::from_millis(100);

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For calls of the program: a thread may have left a lock for ever by a jump out of a signal handler.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// The same for a lock that another thread may hold for a moment.
pub fn try_lock_awhile<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    (0..ATTEMPTS).find_map(|_| {
        try_lock(mutex).or_else(|| {
            thread::yield_now();
            None
        })
    })
}

/// The lock of those who take bytes off a stream: reads of the program, and the relay, which holds it until the kernel has
/// the bytes.
#[derive(Debug, Default)]
pub struct ReadLock {
    lock: Mutex<()>,
    /// The relay takes bytes that have arrived.
    moves: AtomicBool,
}

impl ReadLock {
    /// For the relay, which takes bytes that have arrived (`moves`) or waits for some.
    pub fn relay(&self, moves: bool) -> Relaying<'_> {
        self.moves.store(moves, Ordering::SeqCst);
        Relaying { moves: &self.moves, _lock: lock(&self.lock) }
    }

    /// For a call of the program. Waits for the relay while it moves bytes that have arrived, because calls must find what
    /// earlier ones have left. `None` if the kernel must serve the call: the relay or another call waits for the peer, or the
    /// kernel `has` bytes for it.
    pub fn read(&self, has: impl Fn() -> bool) -> Option<MutexGuard<'_, ()>> {
        if let Some(guard) = try_lock(&self.lock) {
            return Some(guard);
        }
        let begin = Instant::now();
        while self.moves.load(Ordering::SeqCst) && !has() && begin.elapsed() < MOVED_WITHIN {
            thread::yield_now();
            if let Some(guard) = try_lock(&self.lock) {
                return Some(guard);
            }
        }
        None
    }

    /// For a call of the program that may sleep in the kernel instead: gives up when the holder keeps the lock.
    pub fn read_awhile(&self) -> Option<MutexGuard<'_, ()>> {
        try_lock_awhile(&self.lock)
    }
}

/// A [`ReadLock`] that the relay holds.
pub struct Relaying<'l> {
    moves: &'l AtomicBool,
    _lock: MutexGuard<'l, ()>,
}

impl Drop for Relaying<'_> {
    fn drop(&mut self) {
        self.moves.store(false, Ordering::SeqCst);
    }
}
