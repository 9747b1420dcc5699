//! The port mapper's descriptors. They belong to one process: a forked child that kept them would hold the port and the
//! name after the end of their owner, and the connections by which processes detect each other's end.

use std::{
    collections::BTreeSet,
    io,
    ops::Deref,
    os::fd::{AsRawFd, RawFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

static DESCRIPTORS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// The port mapper's descriptors in this process. None is opened while the guard is held. A process that forks takes the guard before,
/// and the child closes them and clears the set.
pub fn descriptors() -> MutexGuard<'static, BTreeSet<RawFd>> {
    DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket of the port mapper, which is among [`descriptors`] until it is closed.
#[derive(Debug)]
pub(super) struct Kept<T: AsRawFd>(T);

impl<T: AsRawFd> Kept<T> {
    /// Opens a socket with `open`, which does not block.
    pub(super) fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        let mut all = descriptors();
        let socket = open()?;
        all.insert(socket.as_raw_fd());
        Ok(Self(socket))
    }
}

impl<T: AsRawFd> Deref for Kept<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> Drop for Kept<T> {
    fn drop(&mut self) {
        // Before the close: another file may get the number at once.
        descriptors().remove(&self.0.as_raw_fd());
    }
}
