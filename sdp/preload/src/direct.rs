//! The direct path: calls of the program that go straight to the stream, past the loopback and the relay.
//!
//! No descriptor is tracked. What is stored for a number is a hint: each call asks the kernel whether the number is still that
//! socket. The socket in the kernel stays complete, so every call that is not replaced, and every other process, may use it at any
//! time:
//!
//! - A read takes bytes from the stream only when the program has taken all bytes that the relay has forwarded to the kernel.
//!   Otherwise, and where it would sleep, the kernel serves it. So waiting, time limits, signals, the end of the stream and
//!   errors are the kernel's.
//! - A write goes to the stream only when the relay has moved all bytes that were written to the kernel, which the kernel is asked for. A
//!   full stream leaves it to the kernel, which then says when there is room.
//!
//! While the program polls, by reads that find nothing or by reads that wait, the relay leaves the data in the stream.

use std::{
    cell::Cell,
    collections::BTreeMap,
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::{AsFd as _, RawFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use libc::c_int;
use rustix::{fs::OFlags, io::ioctl_fionread};

use crate::{
    process::Process,
    relay::{ADVERTISED_BYTES, Joined},
    sys::{self, Naming},
};

/// Numbers above are served by the kernel.
const NUMBERS: usize = 4096;
/// How long a read that waits polls before it sleeps in the kernel: twice the time that the last such read waited, within these
/// bounds. A read polls only if the last one waited for less than the upper bound, so that at most every second read polls in
/// vain. The upper bound is longer than a round trip between programs that both sleep: two of these begin to poll together.
const LEAST_POLLING: Duration = Duration::from_micros(50);
const MOST_POLLING: Duration = Duration::from_micros(250);
/// Reads without data in a row that make a non-blocking program one that polls.
const POLLS: u32 = 3;
/// How often the relay looks whether a program still polls. Data may wait as long when the program stops.
const LOOK: Duration = Duration::from_millis(1);

/// What the direct path and the relay of a connection know of each other.
#[derive(Debug, Default)]
pub struct Direct {
    /// Held by the relay from taking bytes off the leg until the stream has them, and by a direct write.
    pub sending: Mutex<()>,
    /// Held by the relay from taking bytes off the stream until the kernel has them, and by a direct read.
    pub receiving: Mutex<()>,
    /// Bytes that the relay has forwarded to the kernel, and those that calls of the program have read there.
    pub forwarded: AtomicU64,
    taken: AtomicU64,
    /// An out-of-band byte went to the kernel. It is not counted: how the program reads it depends on options of the socket.
    kernel_reads: AtomicBool,
    /// The program polls: the relay leaves data in the stream.
    polling: AtomicBool,
    /// Reads of the stream.
    attempts: AtomicU64,
    /// Reads in a row that have found nothing.
    empty: AtomicU32,
    /// How long the last read that waited did, in nanoseconds.
    waited_ns: AtomicU64,
    /// The relay's thread towards the program.
    relay: Mutex<Option<Thread>>,
}

#[derive(Debug, Clone)]
struct Hint {
    /// The socket's peer on the loopback.
    leg: SocketAddr,
    joined: Weak<Joined>,
}

static HINTS: [RwLock<Option<Hint>>; NUMBERS] = [const { RwLock::new(None) }; NUMBERS];
/// Connections of this process by the address of their legs.
static BY_LEG: Mutex<BTreeMap<SocketAddr, Weak<Joined>>> = Mutex::new(BTreeMap::new());

/// Bytes that went straight from and to streams.
static BYTES: AtomicU64 = AtomicU64::new(0);

pub fn bytes() -> u64 {
    BYTES.load(Ordering::Relaxed)
}

thread_local! {
    /// This thread is in the direct path. A signal handler that interrupts it uses the kernel.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

struct Inside;

impl Inside {
    fn enter() -> Option<Self> {
        (!INSIDE.replace(true)).then(|| Self)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Makes a connection known by the address of its leg.
pub fn add(leg: SocketAddr, joined: &Arc<Joined>) {
    let mut all = lock(&BY_LEG);
    all.insert(leg, Arc::downgrade(joined));
}

/// Forgets a connection that has ended.
pub fn remove(leg: SocketAddr) {
    let mut all = lock(&BY_LEG);
    if all.get(&leg).is_some_and(|joined| joined.strong_count() == 0) {
        all.remove(&leg);
    }
}

/// The program's socket `fd` is connected to the leg with this address.
pub fn hint(fd: RawFd, leg: SocketAddr) {
    let Some(place) = usize::try_from(fd).ok().and_then(|fd| HINTS.get(fd)) else { return };
    let joined = lock(&BY_LEG).get(&leg).cloned();
    if let Ok(mut hint) = place.write() {
        *hint = joined.map(|joined| Hint { leg, joined });
    }
}

/// The connection of the program's socket `fd`, if it is one of this process.
fn find(fd: RawFd) -> Option<Arc<Joined>> {
    let place = HINTS.get(usize::try_from(fd).ok()?)?;
    if !Process::exists() {
        return None;
    }
    let (leg, joined) = {
        let hint = place.try_read().ok()?;
        let hint = hint.as_ref()?;
        (hint.leg, hint.joined.upgrade()?)
    };
    (sys::address_of(Naming::Peer, fd) == Some(leg)).then_some(joined)
}

/// Writes `pieces` to the stream; `None` when the kernel must take all of them.
fn write(joined: &Joined, fd: RawFd, pieces: &[IoSlice<'_>], len: usize) -> Option<usize> {
    let direct = &joined.direct;
    if len == 0 || len >= ADVERTISED_BYTES {
        return None;
    }
    let _sending = try_lock(&direct.sending)?;
    // What was written to the kernel, by whomever, is acknowledged, which the first says, and was moved by the relay, which the
    // second and the lock say.
    if sys::unacknowledged(fd) != Some(0) || ioctl_fionread(&joined.leg) != Ok(0) {
        return None;
    }
    let mut sent = 0;
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        match joined.stream.try_write(piece) {
            Ok(n) if n == piece.len() => sent += n,
            Ok(n) => {
                sent += n;
                break;
            }
            Err(_) => break,
        }
    }
    BYTES.fetch_add(sent as u64, Ordering::Relaxed);
    (sent > 0).then_some(sent)
}

/// A write of the program. `kernel` is the kernel's call for what is left behind the given number of bytes.
pub fn send(
    fd: RawFd,
    pieces: &[IoSlice<'_>],
    flags: c_int,
    mut kernel: impl FnMut(usize) -> isize,
) -> isize {
    const KNOWN: c_int = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE;
    let Some(joined) = find(fd) else { return kernel(0) };
    let len: usize = pieces.iter().map(|piece| piece.len()).sum();
    let inside = Inside::enter().filter(|_| flags & !KNOWN == 0);
    let sent = inside.and_then(|_inside| write(&joined, fd, pieces, len)).unwrap_or(0);
    if sent > 0 && sent == len {
        return sent as isize;
    }
    // The rest goes to the kernel also when the program does not wait: after a short count, programs wait for an edge of epoll,
    // which comes only if the kernel was full.
    let before = sys::errno();
    let done = kernel(sent);
    if done < 0 && sent > 0 {
        sys::set_errno(before);
        return sent as isize;
    }
    done + sent as isize
}

/// Whether calls on the program's socket wait.
fn waits(fd: RawFd) -> bool {
    let flags = sys::borrow(fd).map(|fd| rustix::fs::fcntl_getfl(fd.as_fd()));
    matches!(flags, Some(Ok(flags)) if !flags.contains(OFlags::NONBLOCK))
}

/// What a direct read came to.
enum Read {
    Done(usize),
    /// There is nothing, and the program does not want to wait.
    Empty,
    /// The kernel must serve the call.
    Kernel,
    /// The same for a call that has waited since this time.
    Waits(Instant),
}

fn read(joined: &Joined, fd: RawFd, flags: c_int, pieces: &mut [&mut [u8]]) -> Read {
    let direct = &joined.direct;
    let Some(_receiving) = try_lock(&direct.receiving) else { return Read::Kernel };
    if direct.kernel_reads.load(Ordering::Relaxed)
        || direct.forwarded.load(Ordering::Relaxed) != direct.taken.load(Ordering::Relaxed)
    {
        return Read::Kernel;
    }
    direct.attempts.fetch_add(1, Ordering::Relaxed);
    let Some((first, rest)) = pieces.split_first_mut() else { return Read::Kernel };
    // A program that polls by calls that do not wait runs the device by them.
    let outcome = if direct.is_polled() {
        joined.stream.try_read_for(first, Duration::ZERO)
    } else {
        joined.stream.try_read(first)
    };
    if !is_empty(&outcome) {
        return direct.finish_read(joined, outcome, rest, first.len());
    }
    // What the peer advertises, the relay reads by RDMA, and out-of-band bytes become urgent data of the kernel's socket.
    if joined.stream.has_offer_or_oob() {
        return Read::Kernel;
    }
    if flags & libc::MSG_DONTWAIT != 0 || !self::waits(fd) {
        let empty = direct.empty.fetch_add(1, Ordering::Relaxed) + 1;
        // A program that polls goes on: the relay looks whether it does.
        if empty >= POLLS || direct.is_polled() {
            direct.polling.store(true, Ordering::Relaxed);
            return Read::Empty;
        }
        return Read::Kernel;
    }
    let begin = Instant::now();
    let waited = Duration::from_nanos(direct.waited_ns.load(Ordering::Relaxed));
    if waited < MOST_POLLING {
        direct.polling.store(true, Ordering::Relaxed);
        let limit = (2 * waited).clamp(LEAST_POLLING, MOST_POLLING);
        let outcome = joined.stream.try_read_for(first, limit);
        if !is_empty(&outcome) {
            direct.waited_since(begin);
            return direct.finish_read(joined, outcome, rest, first.len());
        }
    }
    Read::Waits(begin)
}

fn is_empty(outcome: &io::Result<usize>) -> bool {
    matches!(outcome, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

impl Direct {
    fn finish_read(
        &self,
        joined: &Joined,
        outcome: io::Result<usize>,
        rest: &mut [&mut [u8]],
        room: usize,
    ) -> Read {
        // The relay brings the end of the stream and errors to the kernel.
        let Ok(mut total) = outcome else { return Read::Kernel };
        if total == 0 {
            return Read::Kernel;
        }
        self.empty.store(0, Ordering::Relaxed);
        let mut full = total == room;
        for piece in rest {
            if !full {
                break;
            }
            let Ok(n) = joined.stream.try_read(piece) else { break };
            total += n;
            full = n == piece.len();
        }
        BYTES.fetch_add(total as u64, Ordering::Relaxed);
        Read::Done(total)
    }

    fn waited_since(&self, begin: Instant) {
        let waited = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_ns.store(waited, Ordering::Relaxed);
    }

    /// The kernel serves a read: the relay must forward from now on.
    fn leave_to_kernel(&self) {
        if self.polling.swap(false, Ordering::AcqRel)
            && let Some(relay) = &*lock(&self.relay)
        {
            relay.unpark();
        }
    }

    /// Called by the relay's thread towards the program: waits while the program polls.
    pub fn wait_while_polled(&self) {
        while self.is_polled() {
            let before = self.attempts.load(Ordering::Relaxed);
            thread::park_timeout(LOOK);
            if self.attempts.load(Ordering::Relaxed) == before {
                self.polling.store(false, Ordering::Release);
            }
        }
    }

    pub fn is_polled(&self) -> bool {
        self.polling.load(Ordering::Acquire)
    }

    /// The kernel serves all reads from now on. Called by the relay's thread while it holds `receiving`.
    pub fn leave_reads_to_kernel(&self) {
        self.kernel_reads.store(true, Ordering::Relaxed);
    }

    /// The calling thread is the relay's towards the program.
    pub fn relayed_here(&self) {
        *lock(&self.relay) = Some(thread::current());
    }
}

/// A read of the program. `kernel` is the kernel's call.
pub fn receive(fd: RawFd, pieces: &mut [&mut [u8]], flags: c_int, kernel: impl FnOnce() -> isize) -> isize {
    const KNOWN: c_int = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    let Some(joined) = find(fd) else { return kernel() };
    let direct = &joined.direct;
    let known = flags & !KNOWN == 0 && !pieces.is_empty() && pieces.iter().all(|piece| !piece.is_empty());
    let mut begin = None;
    if let Some(_inside) = Inside::enter() {
        match if known { read(&joined, fd, flags, pieces) } else { Read::Kernel } {
            Read::Done(n) => return n as isize,
            Read::Empty => {
                sys::set_errno(libc::EAGAIN);
                return -1;
            }
            Read::Kernel => {}
            Read::Waits(since) => {
                begin = Some(since);
                joined.stream.end_polling();
            }
        }
        direct.leave_to_kernel();
    }
    let done = kernel();
    if let Some(begin) = begin {
        direct.waited_since(begin);
    }
    // Neither takes bytes of the stream from the kernel.
    if done > 0 && flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE) == 0 {
        direct.taken.fetch_add(done as u64, Ordering::Relaxed);
        direct.empty.store(0, Ordering::Relaxed);
    }
    done
}
