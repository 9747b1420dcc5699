//! Numbers of descriptors. The library leaves the low ones to the program: some programs have small descriptor tables,
//! others close standard descriptors and rely on getting these numbers for their own files.

use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::fcntl_dupfd_cloexec,
    process::{Resource, getrlimit},
};

/// Smallest number of a descriptor of the library: half of the usual limit.
const LEAST: i32 = 512;

/// Descriptors that take the low numbers while [`above`] runs.
static TAKEN: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());

/// The descriptors that take low numbers. Before a fork, their guard is taken; the child closes its copies.
pub fn taken() -> MutexGuard<'static, Vec<OwnedFd>> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Moves a descriptor of the library away from the low numbers.
pub fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    // With a low limit of descriptors it keeps its number.
    fcntl_dupfd_cloexec(&fd, LEAST).unwrap_or(fd)
}

/// Calls `open`, which opens descriptors that cannot be moved, while all low numbers are taken; one call at a time. Files that other
/// threads open meanwhile get high numbers as well.
pub fn above<R>(open: impl FnOnce() -> R) -> R {
    take_low_numbers(&mut taken());
    let opened = open();
    taken().clear();
    opened
}

fn take_low_numbers(taken: &mut Vec<OwnedFd>) {
    // The library needs some dozens of higher numbers.
    if getrlimit(Resource::Nofile).current.is_some_and(|limit| limit < 2 * LEAST as u64) {
        return;
    }
    let Ok(mut next) = eventfd(0, EventfdFlags::CLOEXEC) else { return };
    while next.as_raw_fd() < LEAST {
        let copy = fcntl_dupfd_cloexec(&next, 0);
        taken.push(next);
        let Ok(copy) = copy else { return };
        next = copy;
    }
}
