//! The direct path: calls of the program that go straight to the stream, past the loopback and the relay.
//!
//! The entry of a descriptor number is a hint. While `tracking` reports that the number is the only descriptor of its
//! socket, all bytes of the socket pass the replaced calls, which count them. Otherwise each call asks the kernel
//! whether the number is still that socket. The socket in the kernel stays complete, so every call that is not
//! replaced, and every other process, may use it at any time:
//!
//! - A read takes bytes from the stream only when the program has taken all bytes that the relay has forwarded to the
//!   kernel; it may sleep for them. Otherwise the kernel serves it. The end of the stream and errors are therefore the
//!   kernel's.
//! - A write goes to the stream only when the relay has moved all bytes that were written to the kernel, by our count
//!   or by the kernel's. If the stream is full, the kernel executes the write, and reports when there is room.
//! - Long writes are copied into the memory of `outgoing`, and long reads out of that of `incoming`; the kernel has the
//!   first bytes of the latter.
//!
//! While the program polls, by reads that find nothing or by reads that wait, the relay leaves the data in the stream.

mod reads;

use std::{
    cell::Cell,
    collections::BTreeMap,
    io::IoSlice,
    net::SocketAddr,
    os::fd::{AsFd as _, RawFd},
    sync::{
        Arc, Mutex, RwLock, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::Duration,
};

use libc::c_int;
use rustix::{fs::OFlags, io::ioctl_fionread};
use xwarp_sdp::SdpStream;

pub use self::reads::{read_in_kernel, receive};
use crate::{
    incoming::Incoming,
    locks::{ReadLock, lock, try_lock, try_lock_awhile},
    loopback::Loopback,
    outgoing::{ADVERTISED_BYTES, Outgoing},
    process::Process,
    relay::Joined,
    sys::{self, Naming, Quiet},
    tracking::{self, NUMBERS},
};

/// Interval at which the relay checks whether a program still polls, at first and while it continues. When the program
/// stops, data may wait this long.
const LOOK: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(4)];

/// The shared state of a connection's direct path and relay.
#[derive(Debug, Default)]
pub struct Direct {
    /// Held by the relay from taking bytes off the leg until the stream has them, and by a direct write.
    pub outgoing: Mutex<Outgoing>,
    /// Held by the relay from taking bytes off the stream until the kernel has them, and by a direct read.
    pub receiving: ReadLock,
    /// A long piece for reads of the program.
    pub incoming: Incoming,
    /// Bytes that the relay has forwarded to the kernel, and bytes that the program's calls have read from the kernel.
    pub forwarded: AtomicU64,
    taken: AtomicU64,
    /// Bytes that the program's calls have written to the kernel, and calls that may be writing now.
    written: AtomicU64,
    writing: AtomicU64,
    /// The loopback towards the network.
    pub loopback: Loopback,
    /// The socket was closed, or sent bytes that were not counted.
    unseen: AtomicBool,
    /// Whether calls block: [`WAITS`] or [`WAITS_NOT`], 0 if the kernel must be asked. The other bits count changes.
    mode: AtomicU64,
    /// The program has ended the direction towards the network.
    shut: AtomicBool,
    /// An out-of-band byte was written to the kernel. It is not counted, because the way in which the program reads it
    /// depends on socket options.
    kernel_reads: AtomicBool,
    /// The time limit of reads (`SO_RCVTIMEO`) in nanoseconds; 0 if there is none.
    read_limit_ns: AtomicU64,
    /// Threads that sleep for frames in a read.
    sleepers: AtomicU32,
    /// The program polls: the relay leaves data in the stream.
    polling: AtomicBool,
    /// Reads of the stream.
    attempts: AtomicU64,
    /// Consecutive reads that have found nothing.
    empty: AtomicU32,
    /// Wait of the last read that waited, in nanoseconds.
    waited_ns: AtomicU64,
    /// The relay's thread towards the program.
    relay: Mutex<Option<Thread>>,
}

/// Values of [`Direct::mode`], and the step by which changes are counted.
const WAITS: u64 = 1;
const WAITS_NOT: u64 = 2;
const MODE_CHANGE: u64 = 4;

#[derive(Debug, Clone)]
struct Hint {
    /// The socket's peer on the loopback.
    leg: SocketAddr,
    joined: Weak<Joined>,
    /// The serial number of the descriptor; a later number if it is not tracked.
    serial: u64,
}

/// The connection of a call.
struct Found {
    joined: Arc<Joined>,
    leg: SocketAddr,
    serial: u64,
    /// The number is the only descriptor of the socket.
    alone: bool,
}

impl Found {
    /// Whether the number was closed or replaced while the call was in the direct path: the kernel must not serve the
    /// call then.
    fn is_replaced(&self, fd: RawFd) -> bool {
        self.alone
            && !tracking::is_alone(fd, self.serial)
            && sys::address_of(Naming::Peer, fd) != Some(self.leg)
    }

    /// Whether calls wait.
    fn waits(&self, fd: RawFd) -> bool {
        let ask = || {
            let flags = sys::borrow(fd).map(|fd| rustix::fs::fcntl_getfl(fd.as_fd()));
            matches!(flags, Some(Ok(flags)) if !flags.contains(OFlags::NONBLOCK))
        };
        if !self.alone {
            return ask();
        }
        let mode = &self.joined.direct.mode;
        let known = mode.load(Ordering::Acquire);
        match known % MODE_CHANGE {
            0 => {
                let waits = ask();
                let now = known + if waits { WAITS } else { WAITS_NOT };
                // Fails if the mode has changed since it was asked for.
                let _ = mode.compare_exchange(known, now, Ordering::AcqRel, Ordering::Relaxed);
                waits
            }
            known => known == WAITS,
        }
    }
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

/// A cancellation of the thread waits until it has left: it must not end the thread in a system call of the engine.
struct Inside {
    uncancelled: sys::Uncancelled,
}

impl Inside {
    fn enter() -> Option<Self> {
        (!INSIDE.replace(true)).then(|| Self { uncancelled: sys::Uncancelled::new() })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Registers a connection under the address of its leg.
pub fn add(leg: SocketAddr, joined: &Arc<Joined>) {
    let mut all = lock(&BY_LEG);
    all.insert(leg, Arc::downgrade(joined));
}

/// Removes an ended connection.
pub fn remove(leg: SocketAddr) {
    let mut all = lock(&BY_LEG);
    if all.get(&leg).is_some_and(|joined| joined.strong_count() == 0) {
        all.remove(&leg);
    }
}

/// Records that the program's socket `fd` is connected to the leg with this address.
pub fn hint(fd: RawFd, leg: SocketAddr) {
    let Some(place) = usize::try_from(fd).ok().and_then(|fd| HINTS.get(fd)) else { return };
    tracking::look_at_objects();
    let joined = lock(&BY_LEG).get(&leg).cloned();
    let serial = match tracking::serial_of(fd) {
        0 => tracking::serial(),
        serial => serial,
    };
    if let Ok(mut hint) = place.write() {
        *hint = joined.map(|joined| Hint { leg, joined, serial });
    }
    // The options may have been set before, or on the listening socket.
    low_mark_changed(fd);
    read_limit_changed(fd);
}

/// The connection of the program's socket `fd`, if it is one of this process.
fn find(fd: RawFd) -> Option<Found> {
    let place = HINTS.get(usize::try_from(fd).ok()?)?;
    if !Process::exists() {
        return None;
    }
    let found = {
        let hint = place.try_read().ok()?;
        let hint = hint.as_ref().filter(|hint| tracking::is_own(hint.serial))?;
        let joined = hint.joined.upgrade()?;
        let alone = !joined.direct.unseen.load(Ordering::Acquire) && tracking::is_alone(fd, hint.serial);
        Found { joined, leg: hint.leg, serial: hint.serial, alone }
    };
    (found.alone || sys::address_of(Naming::Peer, fd) == Some(found.leg)).then_some(found)
}

/// The program has switched its socket `fd` to blocking or non-blocking calls.
pub fn mode_changed(fd: RawFd) {
    if let Some(found) = find(fd) {
        let mode = &found.joined.direct.mode;
        let _ = mode.fetch_update(Ordering::AcqRel, Ordering::Acquire, |mode| {
            Some(mode - mode % MODE_CHANGE + MODE_CHANGE)
        });
    }
}

/// The program may have changed `SO_RCVLOWAT` of its socket `fd`. Only the kernel's reads wait for more than one byte.
pub fn low_mark_changed(fd: RawFd) {
    if sys::low_mark(fd) > 1
        && let Some(found) = find(fd)
    {
        let direct = &found.joined.direct;
        direct.leave_reads_to_kernel();
        direct.leave_to_kernel();
        direct.incoming.leave_to_kernel(found.joined.kernel());
        found.joined.wake_reader();
    }
}

/// The program may have changed `SO_RCVTIMEO` of its socket `fd`.
pub fn read_limit_changed(fd: RawFd) {
    if let Some(found) = find(fd) {
        found.joined.direct.read_limit_ns.store(sys::read_limit_ns(fd), Ordering::Release);
    }
}

/// The program shuts down directions of its socket `fd`: the kernel serves later calls.
pub fn shut(fd: RawFd, how: c_int) {
    let Some(found) = find(fd) else { return };
    let direct = &found.joined.direct;
    if matches!(how, libc::SHUT_RD | libc::SHUT_RDWR) {
        direct.leave_reads_to_kernel();
        found.joined.wake_reader();
    }
    if matches!(how, libc::SHUT_WR | libc::SHUT_RDWR) {
        direct.shut.store(true, Ordering::Release);
    }
}

/// The program asks the kernel what its socket `fd` has to read: the kernel gets what is still in the stream.
pub fn bring_to_kernel(fd: RawFd) {
    if let Some(found) = find(fd)
        && let Some(_inside) = Inside::enter()
    {
        found.joined.direct.incoming.leave_to_kernel(found.joined.kernel());
        found.joined.direct.bring_to_kernel(&found.joined, fd);
        found.joined.direct.leave_to_kernel();
    }
}

/// A call that writes to the program's socket `fd` in the kernel.
pub fn write_in_kernel(fd: RawFd, call: impl FnOnce() -> isize) -> isize {
    match find(fd) {
        Some(found) => found.joined.direct.count_written(call),
        None => call(),
    }
}

/// Writes `pieces` to the stream; `None` when the kernel must take all of them.
fn write(found: &Found, fd: RawFd, pieces: &[IoSlice<'_>], len: usize) -> Option<usize> {
    let Found { joined, alone, .. } = found;
    let direct = &joined.direct;
    let is_long = len >= ADVERTISED_BYTES;
    if len == 0 || (is_long && !alone) || direct.shut.load(Ordering::Acquire) {
        return None;
    }
    let mut outgoing = if is_long { try_lock_awhile(&direct.outgoing) } else { try_lock(&direct.outgoing) }?;
    if is_long {
        direct.loopback.shorten(&joined.leg, outgoing.is_for_long_writes(len));
        if !direct.loopback.is_short() {
            return None;
        }
    }
    let is_moved = if *alone {
        direct.writing.load(Ordering::SeqCst) == 0
            && direct.written.load(Ordering::SeqCst) == joined.moved.load(Ordering::SeqCst)
    } else {
        // All bytes written to the kernel, by any process, are acknowledged (first test), and the relay has moved them
        // (second test, and the lock).
        sys::unacknowledged(fd) == Some(0) && ioctl_fionread(&joined.leg) == Ok(0)
    };
    if !is_moved {
        return None;
    }
    let mut sent = if is_long { outgoing.write(&joined.stream, pieces) } else { 0 };
    if len - sent < ADVERTISED_BYTES {
        let mut skipped = sent;
        for piece in pieces {
            let (before, piece) = piece.split_at(skipped.min(piece.len()));
            skipped -= before.len();
            if piece.is_empty() {
                continue;
            }
            let n = joined.stream.try_write(piece).unwrap_or(0);
            sent += n;
            if n < piece.len() {
                break;
            }
        }
    }
    BYTES.fetch_add(sent as u64, Ordering::Relaxed);
    (sent > 0).then_some(sent)
}

/// A write of the program. `kernel` is the kernel's call for the rest after the given number of bytes.
pub fn send(
    fd: RawFd,
    pieces: &[IoSlice<'_>],
    flags: c_int,
    mut kernel: impl FnMut(usize) -> isize,
) -> isize {
    const KNOWN: c_int = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE;
    let Some(found) = find(fd) else { return kernel(0) };
    let direct = &found.joined.direct;
    let len: usize = pieces.iter().map(|piece| piece.len()).sum();
    // A signal handler that runs in a long write before the kernel's call would not interrupt that call, which may wait
    // indefinitely.
    let waits = len >= ADVERTISED_BYTES && flags & libc::MSG_DONTWAIT == 0 && found.alone && found.waits(fd);
    let quiet = waits.then(Quiet::but_for_faults);
    let inside = Inside::enter().filter(|_| flags & !KNOWN == 0);
    let sent = inside.and_then(|_inside| write(&found, fd, pieces, len)).unwrap_or(0);
    if sent > 0 && sent == len {
        return sent as isize;
    }
    if let Some(quiet) = quiet
        && quiet.has_signal(sent > 0)
    {
        // As in the kernel: sent bytes count, even if the handler has `SA_RESTART`.
        drop(quiet);
        sys::set_errno(libc::EINTR);
        return if sent > 0 { sent as isize } else { -1 };
    }
    // The rest is written to the kernel also by non-blocking programs: after a short count they wait for an edge of
    // epoll, which occurs only if the kernel's buffer was full.
    let before = sys::errno();
    if found.is_replaced(fd) {
        sys::set_errno(libc::EBADF);
        return if sent > 0 { sent as isize } else { -1 };
    }
    direct.loopback.shorten_own(fd);
    let done = direct.count_written(|| kernel(sent));
    if done < 0 && sent > 0 {
        sys::set_errno(before);
        return sent as isize;
    }
    done + sent as isize
}

impl Direct {
    /// Whether the program has read all bytes that were written to the kernel.
    fn has_taken_all(&self) -> bool {
        self.forwarded.load(Ordering::SeqCst) == self.taken.load(Ordering::SeqCst)
    }

    /// Whether the next long piece is for reads of the program, not for the kernel.
    pub fn takes_pieces(&self) -> bool {
        self.incoming.is_wanted() && !self.kernel_reads.load(Ordering::Relaxed) && self.has_taken_all()
    }

    /// Makes a call of the kernel and counts the bytes that it has written. While calls wait in the kernel, no direct
    /// write overtakes them.
    fn count_written(&self, call: impl FnOnce() -> isize) -> isize {
        self.writing.fetch_add(1, Ordering::SeqCst);
        let done = call();
        if let Ok(written) = u64::try_from(done) {
            self.written.fetch_add(written, Ordering::SeqCst);
        }
        self.writing.fetch_sub(1, Ordering::SeqCst);
        done
    }

    /// Called by the relay when it has moved so many bytes from the leg: the calls that have written them are over, or wait, unless
    /// somebody writes unseen.
    pub fn has_moved(&self, bytes: u64) {
        if self.writing.load(Ordering::SeqCst) == 0 && self.written.load(Ordering::SeqCst) < bytes {
            self.give_up();
        }
    }

    /// The socket is closed, or used by calls that bypass this library, which may give its number to another file as
    /// well.
    pub fn give_up(&self) {
        self.unseen.store(true, Ordering::Release);
    }

    /// The kernel serves a read, so the relay must forward from now on.
    fn leave_to_kernel(&self) {
        if self.polling.swap(false, Ordering::AcqRel)
            && let Some(relay) = &*lock(&self.relay)
        {
            relay.unpark();
        }
    }

    /// Gives the kernel what is in the stream: a read that has taken a part of it may be followed by a call that does not wait for the
    /// rest, and that the kernel serves.
    fn bring_to_kernel(&self, joined: &Joined, fd: RawFd) {
        if let Some(_reading) = self.receiving.read(|| sys::has_bytes(fd))
            && !self.incoming.is_left()
        {
            joined.kernel().bring(&joined.stream);
            joined.wake_reader();
        }
    }

    /// Called by the relay's thread towards the program: waits while the program polls `stream`.
    pub fn wait_while_polled(&self, stream: &SdpStream) {
        let mut look = LOOK[0];
        while self.is_polled() {
            let before = self.attempts.load(Ordering::Relaxed);
            thread::park_timeout(look);
            if self.attempts.load(Ordering::Relaxed) == before {
                self.polling.store(false, Ordering::Release);
                // Otherwise the service of the stream would detect the end of polling after the same time again.
                stream.end_polling();
            }
            look = (look * 2).min(LOOK[1]);
        }
    }

    pub fn is_polled(&self) -> bool {
        self.polling.load(Ordering::Acquire)
    }

    /// From now on the kernel serves all reads. Called by the relay's thread while it holds `receiving`.
    pub fn leave_reads_to_kernel(&self) {
        self.kernel_reads.store(true, Ordering::SeqCst);
    }

    fn read_limit(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.read_limit_ns.load(Ordering::Acquire)))
            .filter(|limit| !limit.is_zero())
    }

    /// Whether a thread sleeps for frames, and must be woken when the kernel has something to read.
    pub fn is_slept_in(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) > 0
    }

    /// Records that the calling thread is the relay's towards the program.
    pub fn relayed_here(&self) {
        *lock(&self.relay) = Some(thread::current());
    }
}
