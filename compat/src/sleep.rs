//! Calls that wait for an event: how a thread sleeps, so that signals and cancellation end the sleep as they end a `read` of a kernel's
//! file. Unsafe code: system calls through which a cancelled thread is unwound, and questions about signal handlers.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd as _, OwnedFd, RawFd},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::errno::Errno;
use rustix::event::{EventfdFlags, eventfd};

use crate::{failure, wait::Readable};

/// Time for which a thread that waits for an event runs the engine itself, so that an event which comes soon wakes one thread only.
const LEAD: Duration = Duration::from_millis(5);

/// Whether the process exits, and its connections are being closed.
static EXITS: AtomicBool = AtomicBool::new(false);
/// Interval between two looks at [`EXITS`].
const EXIT_CHECK: Duration = Duration::from_millis(50);

/// Calls `close`, which closes connections while the process exits. What comes of that is no event for the program's other threads, which
/// a kernel would have ended before: until `close` returns, they wait. Later they get it, since what the process still runs may wait for
/// them.
pub fn while_process_exits(close: impl FnOnce()) {
    EXITS.store(true, Ordering::SeqCst);
    close();
    EXITS.store(false, Ordering::SeqCst);
}

/// Waits while the process exits.
fn hold_at_exit() {
    while EXITS.load(Ordering::SeqCst) {
        std::thread::sleep(EXIT_CHECK);
    }
}

/// Where threads sleep until an event comes, as in the `read` of a kernel's file: `read` of a blocking eventfd, from which each of
/// them takes one unit.
///
/// A `read`, because the kernel repeats it after a signal handler exactly when the handler has `SA_RESTART` (`epoll_wait` and
/// `poll` are never repeated), and because it is a cancellation point.
pub struct Sleepers {
    /// Threads that sleep or are about to. One that was cancelled, or interrupted, still counts: the unit for it makes a later thread
    /// look for an event that is not there, and sleep again.
    number: AtomicU64,
    units: OwnedFd,
}

impl Sleepers {
    pub fn new() -> Result<Arc<Self>, Errno> {
        let units = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE);
        let units = units.map_err(|error| failure::io(&error.into()))?;
        Ok(Arc::new(Self { number: AtomicU64::new(0), units }))
    }

    /// Counts the calling thread, which looks for an event once more before it reads from the descriptor that is returned.
    fn register(&self) -> RawFd {
        self.number.fetch_add(1, Ordering::SeqCst);
        self.units.as_raw_fd()
    }

    /// Wakes all threads. Called after an event was queued.
    pub fn wake(&self) {
        let number = self.number.swap(0, Ordering::SeqCst);
        if number > 0 {
            let _ = rustix::io::write(&self.units, &number.to_ne_bytes());
        }
    }
}

/// What a call that waits for an event does next.
pub enum Next<T> {
    /// It returns the event.
    Found(T),
    /// It reads from this descriptor of [`Sleepers`], and looks again.
    Sleep(RawFd),
}

/// How a call waits for events.
pub struct Wait<'a, P, A> {
    /// The descriptor whose `O_NONBLOCK` forbids it; `None`: it waits always.
    pub fd: Option<&'a Readable>,
    pub sleepers: &'a Sleepers,
    /// Takes an event.
    pub poll: P,
    /// Runs the engine for at most the given time, and may return an event.
    pub attend: A,
}

impl<T, P, A> Wait<'_, P, A>
where
    P: Fn() -> Option<T>,
    A: Fn(Duration) -> io::Result<Option<T>>,
{
    /// Takes an event, or prepares the caller's sleep.
    pub fn next(&self) -> Result<Next<T>, Errno> {
        loop {
            if let Some(found) = (self.poll)() {
                return Ok(Next::Found(found));
            }
            if self.fd.is_some_and(Readable::is_nonblocking) {
                return Err(Errno::EAGAIN);
            }
            match (self.attend)(LEAD) {
                Ok(Some(found)) => return Ok(Next::Found(found)),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    if handlers_interrupt() {
                        return Err(Errno::EINTR);
                    }
                    continue;
                }
                Err(error) => return Err(failure::io(&error)),
            }
            let units = self.sleepers.register();
            // An event of before the registration has woken nobody, nor has the failure of the device.
            if let Some(found) = (self.poll)() {
                return Ok(Next::Found(found));
            }
            match (self.attend)(Duration::ZERO) {
                Ok(Some(found)) => return Ok(Next::Found(found)),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(failure::io(&error)),
                Ok(None) | Err(_) => return Ok(Next::Sleep(units)),
            }
        }
    }
}

/// Repeats `next` until it finds an event. The sleeps are no cancellation points: the caller's frames have destructors.
pub fn wait<T>(next: impl Fn() -> Result<Next<T>, Errno>) -> Result<T, Errno> {
    loop {
        match next()? {
            Next::Found(found) => {
                hold_at_exit();
                return Ok(found);
            }
            Next::Sleep(units) => read_uncancelled(units)?,
        }
    }
}

/// One attempt of a call that waits.
#[derive(Clone, Copy)]
#[repr(C)]
pub enum Attempt {
    /// The call returns this.
    Done(c_int),
    /// See [`Next::Sleep`].
    Sleep(RawFd),
}

impl Attempt {
    /// The attempt of a function that returns 0, or -1 with `errno`.
    pub fn of(next: impl FnOnce() -> Result<Next<()>, Errno>) -> Self {
        let attempt = || {
            let next = next();
            if !matches!(next, Ok(Next::Sleep(_))) {
                hold_at_exit();
            }
            next
        };
        match uncancelled(attempt) {
            Ok(Next::Sleep(units)) => Self::Sleep(units),
            Ok(Next::Found(())) => Self::Done(0),
            Err(error) => Self::Done(failure::minus_one(Err(error))),
        }
    }
}

/// Repeats `attempt`, and sleeps in between, in a cancellation point.
///
/// The cancellation of a thread unwinds its stack by force, and no Rust frame with a destructor may lie in its way (RFC 2945). So all
/// that has destructors (locks, references to objects) lives in the attempts, which are functions of the ABI `C` and have returned
/// before the sleep. The frames below the sleep are this one and the function that the program has called, which have none, and are of
/// the ABI `C-unwind`. The program's own cleanup handlers run as usual.
///
/// Each attempt gets the descriptor of the sleep before it, or -1.
pub fn cancellable(attempt: impl Fn(RawFd) -> Attempt + Copy) -> c_int {
    let mut slept = -1;
    loop {
        match attempt(slept) {
            Attempt::Done(result) => return result,
            Attempt::Sleep(units) => {
                slept = units;
                if !read_cancellable(units) {
                    return -1;
                }
            }
        }
    }
}

unsafe extern "C-unwind" {
    /// `read` of libc. Cancellation unwinds through it, which the declaration of the crate `libc` rules out.
    fn read(fd: RawFd, buffer: *mut c_void, bytes: usize) -> isize;
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// Calls `f`, which may call functions of libc that are cancellation points (sockets, files, the end of a thread), without being
/// cancelled there.
pub fn uncancelled<T>(f: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: changes a flag of the calling thread, and stores its old value.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
    let result = f();
    // SAFETY: as above, with a null pointer where the old value is not needed.
    unsafe { pthread_setcancelstate(before, ptr::null_mut()) };
    result
}

/// Takes a unit from an eventfd, and sleeps until there is one. Returns false, with `errno`, when a signal handler without `SA_RESTART`
/// has run. A cancellation point: no frame of a caller may have a destructor.
fn read_cancellable(units: RawFd) -> bool {
    let mut unit = 0u64;
    // SAFETY: the buffer has room for the 8 octets of an eventfd's unit. The frame has no destructor, so it may be unwound by force.
    unsafe { read(units, (&raw mut unit).cast(), size_of::<u64>()) >= 0 }
}

/// The same, but no cancellation point.
fn read_uncancelled(units: RawFd) -> Result<(), Errno> {
    let mut unit = 0u64;
    // SAFETY: as in `read_cancellable`. A system call is no cancellation point.
    let read = unsafe { libc::syscall(libc::SYS_read, units, &raw mut unit, size_of::<u64>()) };
    Errno::result(read).map(drop)
}

/// Signals whose handlers run for faults of the program itself, not while it sleeps.
const FAULTS: [c_int; 7] =
    [libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV, libc::SIGSYS];

/// Whether a signal handler that has just run makes a call return with `EINTR`: whether one of the program's handlers lacks `SA_RESTART`.
/// The system does not say which one has run, so a program with handlers of both kinds gets `EINTR` after either.
fn handlers_interrupt() -> bool {
    (1..=libc::SIGRTMAX()).filter(|signal| !FAULTS.contains(signal)).any(|signal| {
        let mut action = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: asks for the present action, which is stored in full if the call succeeds.
        let action = unsafe {
            if libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) != 0 {
                return false;
            }
            action.assume_init()
        };
        let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        is_handled && action.sa_flags & libc::SA_RESTART == 0
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// An event that the engine's last run before the sleep brings woke nobody: that run returns it.
    #[test]
    fn an_event_of_the_last_run_before_the_sleep_is_returned() {
        let sleepers = Sleepers::new().expect("an eventfd can be made");
        let runs = Cell::new(0);
        let attend = |_| {
            runs.set(runs.get() + 1);
            Ok((runs.get() == 2).then_some("event"))
        };
        let wait = Wait { fd: None, sleepers: &sleepers, poll: || None, attend };
        assert!(matches!(wait.next(), Ok(Next::Found("event"))), "the event is lost");
    }
}
