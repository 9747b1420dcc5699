//! [`NotInherited`]: descriptors that a child process (`fork`) does not keep.
//!
//! A child has copies of all descriptors of its parent. Those of an interface would keep the interface, its ports and its queues in
//! use after the end of the parent, for the child itself too: a program that becomes a daemon after its first call could not
//! open the interface any more. A child therefore replaces them before `fork` returns. The numbers stay valid, because
//! values in the child's memory still own them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError, TryLockError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::fstat;
use rustix::io::{DupFlags, dup3};

/// Attempts of a fork to get the table, which other threads hold for very short times. A fork in a signal handler may
/// interrupt one of them, and must not wait without end.
const ATTEMPTS: usize = 10_000;

/// Device and inode of an open file.
type Identity = (u64, u64);

/// The descriptors, with the files to which they refer: a number of a stale entry may belong to another file.
type Table = BTreeMap<RawFd, Identity>;

static TABLE: Mutex<Table> = Mutex::new(BTreeMap::new());
/// The file that replaces the others in a child.
static PLACEHOLDER: OnceLock<OwnedFd> = OnceLock::new();

thread_local! {
    /// The table, while this thread forks.
    static FORKING: RefCell<Option<MutexGuard<'static, Table>>> = const { RefCell::new(None) };
}

/// Descriptors that children do not keep until this is dropped.
#[derive(Debug, Default)]
pub struct NotInherited(Vec<RawFd>);

impl NotInherited {
    /// Registers descriptors. Where a descriptor has no unique inode (BPF, eventfd), this must be dropped before it is closed.
    pub fn new<'fd>(descriptors: impl IntoIterator<Item = BorrowedFd<'fd>>) -> Self {
        prepare_for_forks();
        let mut numbers = Vec::new();
        for descriptor in descriptors {
            let Some(identity) = identity(descriptor) else { continue };
            table().insert(descriptor.as_raw_fd(), identity);
            numbers.push(descriptor.as_raw_fd());
        }
        Self(numbers)
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        let mut table = table();
        for number in &self.0 {
            table.remove(number);
        }
    }
}

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn identity(descriptor: BorrowedFd<'_>) -> Option<Identity> {
    fstat(descriptor).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Makes the placeholder and registers the handlers of forks, once in a process.
pub fn prepare_for_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let Ok(placeholder) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) else { return };
        let _ = PLACEHOLDER.set(placeholder);
        // SAFETY: the three handlers are functions of this library; libc forgets them when the library is unloaded.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

/// Keeps all descriptors but the standard ones from the programs that this process starts: a program that serves for long would keep
/// files, pipes and connections of its starter's starter open.
pub fn keep_from_programs() {
    const FIRST: libc::c_int = 3;
    const CLOSE_RANGE_CLOEXEC: libc::c_int = 4;
    /// Where a kernel lacks the call, descriptors are looked at one by one, up to here.
    const LAST: libc::c_int = 4096;
    // SAFETY: the call closes nothing; it sets a flag of descriptors.
    let done = unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_int::MAX, CLOSE_RANGE_CLOEXEC) };
    if done != 0 {
        for number in FIRST..=LAST {
            // SAFETY: the call sets a flag of the descriptor, or fails if there is none.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}

/// Takes the table, so that no other thread changes it while the process is copied.
unsafe extern "C" fn before() {
    for _ in 0..ATTEMPTS {
        let guard = match TABLE.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => {
                std::thread::yield_now();
                continue;
            }
        };
        let _ = FORKING.try_with(|forking| forking.replace(Some(guard)));
        return;
    }
}

unsafe extern "C" fn in_parent() {
    let _ = FORKING.try_with(RefCell::take);
}

/// Replaces the descriptors. Calls nothing that needs other threads or allocates.
unsafe extern "C" fn in_child() {
    let Ok(Some(table)) = FORKING.try_with(RefCell::take) else { return };
    let Some(placeholder) = PLACEHOLDER.get() else { return };
    for (number, file) in &*table {
        // SAFETY: the number is borrowed for two system calls, which return an error if it is not open.
        let there = unsafe { BorrowedFd::borrow_raw(*number) };
        if identity(there) != Some(*file) {
            continue;
        }
        // SAFETY: the value owns the number only for the call, and gives it back below. The child's owner of the number has
        // another file from now on, which it can use, and closes later.
        let mut replaced = unsafe { OwnedFd::from_raw_fd(*number) };
        let _ = dup3(placeholder.as_fd(), &mut replaced, DupFlags::CLOEXEC);
        let _ = replaced.into_raw_fd();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::process::{WaitOptions, waitpid};

    use super::*;

    /// Forks a child that sleeps; returns its process id.
    fn sleeping_child() -> rustix::process::Pid {
        // SAFETY: the child calls functions only that a signal handler may call.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; the child never returns.
            unsafe {
                libc::sleep(60);
                libc::_exit(0);
            }
        }
        rustix::process::Pid::from_raw(child).unwrap()
    }

    #[test]
    fn a_child_does_not_keep_a_registered_descriptor_open() {
        for registered in [true, false] {
            let (ours, mut peers) = UnixStream::pair().unwrap();
            let guard = registered.then(|| NotInherited::new([ours.as_fd()]));
            let child = sleeping_child();
            drop((guard, ours));
            peers
                .set_read_timeout(Some(Duration::from_millis(if registered { 30_000 } else { 100 })))
                .unwrap();
            let end = peers.read(&mut [0]);
            rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
            waitpid(Some(child), WaitOptions::empty()).unwrap();
            assert_eq!(end.is_ok_and(|bytes| bytes == 0), registered);
        }
    }

    #[test]
    fn a_child_keeps_the_file_that_has_a_stale_number() {
        let (ours, _peer) = UnixStream::pair().unwrap();
        let guard = NotInherited::new([ours.as_fd()]);
        let mut ours = OwnedFd::from(ours);
        let (other, mut peers) = UnixStream::pair().unwrap();
        dup3(&other, &mut ours, DupFlags::CLOEXEC).unwrap();
        drop(other);
        let child = sleeping_child();
        drop((guard, ours));
        peers.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let end = peers.read(&mut [0]);
        rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
        waitpid(Some(child), WaitOptions::empty()).unwrap();
        assert!(end.is_err(), "the child has closed a file that was not registered");
    }
}
