//! [`Closing`]: the threads that close the descriptors of clients, which may take arbitrarily long.
//!
//! Closing the last descriptor of a TCP socket waits for its linger time, and that of a file waits for its file system,
//! which may be a program of the user (FUSE). A client can pass such descriptors, or leave them unread in a socket, so
//! the server loop closes only what cannot wait: a socket without unread messages, and frame memory. Everything else goes
//! to a few threads for each user, and counts as connections of the user until it is closed. What no thread can take
//! at the moment waits: it is never closed on the loop.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::net::{Shutdown, shutdown, sockopt};
use xwarp_leg::message::{has_message, receive_message};

/// Largest number of threads, in total and of one user.
const MAX_THREADS: usize = 512;
const MAX_THREADS_PER_USER: usize = 32;
/// Largest number of values that wait for a thread; at this number no connection is accepted.
const MAX_WAITING: usize = 4096;
/// Bytes of stack of a thread, which makes one system call.
const STACK_BYTES: usize = 64 << 10;
/// Unread messages of a socket whose descriptors are taken out before it is closed.
const MAX_UNREAD: usize = 64;

/// The values to close, and the threads, by the user whose descriptors they close.
#[derive(Default)]
pub(crate) struct Closing(Arc<Mutex<Work>>);

#[derive(Default)]
struct Work {
    users: BTreeMap<u32, User>,
    threads: usize,
    waiting: usize,
}

#[derive(Default)]
struct User {
    threads: usize,
    /// Values that its threads are closing.
    busy: usize,
    waiting: VecDeque<Box<dyn Send>>,
}

fn lock(work: &Mutex<Work>) -> MutexGuard<'_, Work> {
    // The numbers change together, in steps that cannot panic.
    work.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Work {
    /// The next value of a user, after the one that its thread has closed; without one, the thread ends.
    fn next(&mut self, uid: u32, closed: bool) -> Option<Box<dyn Send>> {
        let user = self.users.get_mut(&uid)?;
        user.busy -= usize::from(closed);
        if let Some(next) = user.waiting.pop_front() {
            user.busy += 1;
            self.waiting -= 1;
            return Some(next);
        }
        self.ended(uid);
        None
    }

    fn ended(&mut self, uid: u32) {
        self.threads -= 1;
        if let Some(user) = self.users.get_mut(&uid) {
            user.threads -= 1;
            if user.threads == 0 && user.waiting.is_empty() {
                self.users.remove(&uid);
            }
        }
    }
}

impl Closing {
    /// Closes a connection of `uid`, from which nothing more is read.
    pub(crate) fn close_socket(&self, uid: u32, socket: OwnedFd, process: Option<OwnedFd>) {
        // The peer can send nothing from now on, so an empty queue stays empty.
        let _ = shutdown(&socket, Shutdown::Both);
        let mut unread = Vec::new();
        for _ in 0..MAX_UNREAD {
            if !has_message(socket.as_fd()) {
                if !unread.is_empty() {
                    self.close(uid, unread);
                }
                return;
            }
            match receive_message(socket.as_fd()) {
                Ok((_, descriptors)) => unread.extend(descriptors.into_iter().inspect(without_linger)),
                Err(_) => break,
            }
        }
        self.close(uid, (unread, Unread(socket), process));
    }

    /// Closes descriptors that `uid` has passed.
    pub(crate) fn close_descriptors(&self, uid: u32, descriptors: Vec<OwnedFd>) {
        descriptors.iter().for_each(without_linger);
        self.close(uid, descriptors);
    }

    /// Drops, on a thread, a value that `uid` sent.
    fn close(&self, uid: u32, what: impl Send + 'static) {
        let mut work = lock(&self.0);
        work.waiting += 1;
        work.users.entry(uid).or_default().waiting.push_back(Box::new(what));
        drop(work);
        self.start(uid);
    }

    /// Starts a thread for a user, unless it has enough. Without a thread the values wait.
    fn start(&self, uid: u32) {
        let mut work = lock(&self.0);
        if work.threads >= MAX_THREADS {
            return;
        }
        match work.users.get_mut(&uid) {
            Some(user) if user.threads < MAX_THREADS_PER_USER => user.threads += 1,
            _ => return,
        }
        work.threads += 1;
        drop(work);
        let work = Arc::clone(&self.0);
        let close = move || {
            let mut closed = false;
            loop {
                // The lock is released before the value is dropped.
                let next = lock(&work).next(uid, closed);
                let Some(what) = next else { return };
                drop(what);
                closed = true;
            }
        };
        let thread = thread::Builder::new().name("xwarpd-closes".into()).stack_size(STACK_BYTES).spawn(close);
        if let Err(error) = thread {
            tracing::warn!(%error, "no thread closes the descriptors of a client");
            lock(&self.0).ended(uid);
        }
    }

    /// Whether values wait for threads that could not be started; then call [`retry`](Self::retry) after a while.
    pub(crate) fn is_stuck(&self) -> bool {
        lock(&self.0).users.values().any(|user| user.threads == 0)
    }

    /// Starts threads for users who have none.
    pub(crate) fn retry(&self) {
        let stuck: Vec<u32> = {
            let work = lock(&self.0);
            work.users.iter().filter(|(_, user)| user.threads == 0).map(|(uid, _)| *uid).collect()
        };
        for uid in stuck {
            self.start(uid);
        }
    }

    /// Values of `uid` that wait or are being closed.
    pub(crate) fn of(&self, uid: u32) -> usize {
        lock(&self.0).users.get(&uid).map_or(0, |user| user.busy + user.waiting.len())
    }

    /// Values of all users that wait, and threads.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let work = lock(&self.0);
        (work.waiting, work.threads)
    }

    /// Whether no more values may wait.
    pub(crate) fn is_full(&self) -> bool {
        self.counts().0 >= MAX_WAITING
    }
}

/// A socket whose messages are received before it is closed: the keeper of this program may have a copy of it, and would close what
/// they carry.
struct Unread(OwnedFd);

impl Drop for Unread {
    fn drop(&mut self) {
        while has_message(self.0.as_fd()) {
            match receive_message(self.0.as_fd()) {
                Ok((_, descriptors)) => descriptors.iter().for_each(without_linger),
                Err(_) => return,
            }
        }
    }
}

/// Lets a socket close at once, although its peer has not acknowledged everything.
fn without_linger(descriptor: &OwnedFd) {
    // Other files have no such option.
    let _ = sockopt::set_socket_linger(descriptor, None);
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

    fn until(what: &str, is: impl Fn() -> bool) {
        let limit = Instant::now() + Duration::from_secs(10);
        while !is() {
            assert!(Instant::now() < limit, "{what}");
            thread::yield_now();
        }
    }

    #[test]
    fn a_slow_close_is_counted_until_it_has_finished() {
        let closing = Closing::default();
        let (end, slow) = channel();
        closing.close(7, Slow(slow));
        assert_eq!((closing.of(7), closing.of(8)), (1, 0));
        drop(end);
        until("still closing", || closing.of(7) == 0);
    }

    /// One user's slow closes leave threads to others, and wait instead of blocking the caller.
    #[test]
    fn attack_slow_closes_of_one_user_leave_threads_to_others() {
        let closing = Closing::default();
        let mut ends = Vec::new();
        for _ in 0..2 * MAX_THREADS_PER_USER {
            let (end, slow) = channel();
            closing.close(7, Slow(slow));
            ends.push(end);
        }
        until("not all threads wait", || closing.counts() == (MAX_THREADS_PER_USER, MAX_THREADS_PER_USER));
        assert_eq!(closing.of(7), 2 * MAX_THREADS_PER_USER);
        closing.close(8, ());
        until("another user waits", || closing.of(8) == 0);
        drop(ends);
        until("still closing", || closing.of(7) == 0);
    }
}
