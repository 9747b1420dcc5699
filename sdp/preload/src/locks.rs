//! Locks of the program's calls and of the library's threads. A lock that a thread has left by a panic is used again.

use std::{
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    thread,
};

/// Attempts to get a lock that another thread holds for a moment.
const ATTEMPTS: u32 = 64;

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
