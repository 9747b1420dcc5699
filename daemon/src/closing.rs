//! [`Closing`]: the threads that close the descriptors of clients, which may take arbitrarily long.
//!
//! Closing the last descriptor of a TCP socket waits for its linger time, and that of a file waits for its file system,
//! which may be a program of the user (FUSE). A client can pass such descriptors, or leave them unread in a socket, so
//! the server loop must not close them. A thread closes each, and counts as a connection of the user meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Largest number of threads; at this number no connection is accepted.
const MOST_THREADS: usize = 512;
/// Bytes of stack of a thread, which makes one system call.
const STACK_BYTES: usize = 64 << 10;

/// The threads that close, by the user whose descriptors they close.
#[derive(Debug, Default)]
pub(crate) struct Closing(Arc<Mutex<BTreeMap<u32, usize>>>);

fn lock(threads: &Mutex<BTreeMap<u32, usize>>) -> MutexGuard<'_, BTreeMap<u32, usize>> {
    // Each number is replaced as a whole.
    threads.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the threads of a user.
struct Counted {
    threads: Arc<Mutex<BTreeMap<u32, usize>>>,
    uid: u32,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut threads = lock(&self.threads);
        if let Some(number) = threads.get_mut(&self.uid) {
            *number -= 1;
            if *number == 0 {
                threads.remove(&self.uid);
            }
        }
    }
}

impl Closing {
    /// Drops, on a thread, a value that `uid` sent.
    pub(crate) fn close(&self, uid: u32, what: impl Send + 'static) {
        *lock(&self.0).entry(uid).or_default() += 1;
        let counted = Counted { threads: Arc::clone(&self.0), uid };
        let close = move || {
            drop(what);
            drop(counted);
        };
        let thread = thread::Builder::new().name("xwarpd-closes".into()).stack_size(STACK_BYTES).spawn(close);
        if let Err(error) = thread {
            tracing::warn!(%error, "no thread closes the descriptors of a client");
        }
    }

    /// Number of threads that close descriptors of `uid`.
    pub(crate) fn of(&self, uid: u32) -> usize {
        lock(&self.0).get(&uid).copied().unwrap_or_default()
    }

    /// Whether the number of threads is at its limit.
    pub(crate) fn is_full(&self) -> bool {
        lock(&self.0).values().sum::<usize>() >= MOST_THREADS
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    use super::*;

    /// A value whose drop blocks until its sender is dropped.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn a_slow_close_is_counted_until_it_has_finished() {
        let closing = Closing::default();
        let (end, slow) = channel();
        closing.close(7, Slow(slow));
        assert_eq!((closing.of(7), closing.of(8)), (1, 0));
        drop(end);
        let limit = Instant::now() + Duration::from_secs(10);
        while closing.of(7) > 0 {
            assert!(Instant::now() < limit, "still closing");
            thread::yield_now();
        }
    }
}
