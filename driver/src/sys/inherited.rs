//! [`inherited`] and [`close_inherited`]: the descriptors that the program that has started this one passes on.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};

/// The first descriptor behind standard input, output and error.
const FIRST: RawFd = 3;

/// Takes the first `count` descriptors behind standard error, as in `sd_listen_fds(3)`. Programs that this process starts do not get
/// them.
///
/// # Errors
/// One of them was not inherited.
pub fn inherited(count: usize) -> io::Result<Vec<OwnedFd>> {
    let end = RawFd::try_from(count).ok().and_then(|count| FIRST.checked_add(count));
    let end = end.ok_or(io::ErrorKind::InvalidInput)?;
    (FIRST..end).map(take).collect()
}

/// Closes all descriptors behind standard error that this process has inherited.
///
/// # Errors
/// They cannot be listed.
pub fn close_inherited() -> io::Result<()> {
    let numbers = std::fs::read_dir("/proc/self/fd")?.flatten();
    let numbers: Vec<RawFd> = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    // Others belong to this process.
    numbers.into_iter().filter(|number| *number >= FIRST).for_each(|number| drop(take(number)));
    Ok(())
}

fn take(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the number is not -1, and the descriptor is used for two system calls that fail if it is not open.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(descriptor)?;
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(Errno::BADF.into());
    }
    fcntl_setfd(descriptor, flags | FdFlags::CLOEXEC)?;
    // SAFETY: all code of this process opens descriptors with close-on-exec, and standard input, output and error have lower
    // numbers. So this one was inherited, and nothing owns it yet. It has the flag now, so it is not taken twice.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
