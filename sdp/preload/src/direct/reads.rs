//! Reads of the direct path. A read that finds nothing polls, then sleeps for frames of the device itself, then sleeps in
//! the kernel's call, to which the relay forwards what arrives.

use std::{
    io,
    os::fd::RawFd,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use libc::c_int;
use xwarp_verbs::Slept;

use super::{BYTES, Direct, Found, Inside, find};
use crate::{
    outgoing::ADVERTISED_BYTES,
    relay::Joined,
    signals::{self, Handlers},
    sys,
};

/// Polling time of a read that waits, before it sleeps: twice the time that the last such read waited, within these
/// bounds. A read polls only if the last one waited for less than the upper bound, so that at most every second read
/// polls without success. The upper bound is longer than a round trip between two sleeping programs, so that both begin
/// to poll.
const LEAST_POLLING: Duration = Duration::from_micros(50);
const MAX_POLLING: Duration = Duration::from_micros(250);
/// Number of consecutive reads without data after which a non-blocking program counts as polling.
const POLLS: u32 = 3;

/// The outcome of a direct read.
enum Read {
    Done(usize),
    /// No data is available, and the call is non-blocking or its time limit has passed.
    Empty,
    /// The kernel must serve the call.
    Kernel,
    /// The same for a call that has waited since this time.
    Waits(Instant),
    /// A signal handler has run while the call slept.
    Interrupted,
}

/// A read that does not sleep.
fn read(found: &Found, fd: RawFd, flags: c_int, pieces: &mut [&mut [u8]]) -> Read {
    let joined = &*found.joined;
    let direct = &joined.direct;
    let Some(_reading) = direct.receiving.read(|| sys::has_bytes(fd)) else { return Read::Kernel };
    if !direct.reads_stream() {
        return Read::Kernel;
    }
    if direct.incoming.is_left() {
        return match direct.take_piece(joined, pieces, 0) {
            0 => Read::Kernel,
            n => Read::Done(n),
        };
    }
    // Written under the lock only, so no bus lock is needed.
    direct.attempts.store(direct.attempts.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    let Some((first, rest)) = pieces.split_first_mut() else { return Read::Kernel };
    // A program that polls by non-blocking calls runs the device in them.
    let outcome = if direct.is_polled() {
        joined.stream.try_read_for(first, Duration::ZERO)
    } else {
        joined.stream.try_read(first)
    };
    if !is_empty(&outcome) {
        return direct.finish_read(joined, outcome, rest, first.len());
    }
    // The relay reads the data that the peer advertises, and turns out-of-band bytes into urgent data of the kernel's
    // socket.
    if joined.stream.has_offer_or_oob() {
        return Read::Kernel;
    }
    if flags & libc::MSG_DONTWAIT != 0 || !found.waits(fd) {
        // A reset by another thread that is lost here does not matter.
        let empty = direct.empty.load(Ordering::Relaxed).saturating_add(1);
        direct.empty.store(empty, Ordering::Relaxed);
        // The program continues to poll, and the relay checks this.
        if empty >= POLLS || direct.is_polled() {
            direct.polling.store(true, Ordering::Relaxed);
            return Read::Empty;
        }
        return Read::Kernel;
    }
    let begin = Instant::now();
    let waited = Duration::from_nanos(direct.waited_ns.load(Ordering::Relaxed));
    if waited < MAX_POLLING {
        direct.polling.store(true, Ordering::Relaxed);
        let limit = (2 * waited).clamp(LEAST_POLLING, MAX_POLLING);
        let outcome = joined.stream.try_read_for(first, limit);
        if !is_empty(&outcome) {
            direct.waited_since(begin);
            return direct.finish_read(joined, outcome, rest, first.len());
        }
    }
    Read::Waits(begin)
}

/// Sleeps until data arrives that a direct read can take, and reads it. The relay serves the kernel's socket meanwhile,
/// and wakes this thread when it has forwarded something there.
fn sleep(found: &Found, pieces: &mut [&mut [u8]], begin: Instant, cancels: u64) -> Read {
    let joined = &*found.joined;
    let direct = &joined.direct;
    let limit = direct.read_limit();
    // A call with a time limit ends by every signal handler. Otherwise the handlers that interrupt calls must be known from
    // those that do not.
    if !found.alone || (limit.is_none() && signals::handlers() == Handlers::Mixed) {
        return Read::Waits(begin);
    }
    direct.leave_to_kernel();
    direct.sleepers.fetch_add(1, Ordering::SeqCst);
    let ends = || signals::cancels() != cancels;
    let outcome = direct.sleep(joined, pieces, begin, limit.map(|limit| begin + limit), ends);
    direct.sleepers.fetch_sub(1, Ordering::SeqCst);
    if matches!(outcome, Read::Done(_)) {
        direct.waited_since(begin);
    }
    outcome
}

fn is_empty(outcome: &io::Result<usize>) -> bool {
    matches!(outcome, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

impl Direct {
    /// The part of [`sleep`] during which the relay wakes the thread.
    fn sleep(
        &self,
        joined: &Joined,
        pieces: &mut [&mut [u8]],
        begin: Instant,
        end: Option<Instant>,
        ends: impl Fn() -> bool,
    ) -> Read {
        let stream = &joined.stream;
        let mut begins = true;
        loop {
            {
                let Some(_reading) = self.receiving.read_awhile() else { return Read::Waits(begin) };
                let Some((first, rest)) = pieces.split_first_mut() else { return Read::Kernel };
                if ends() || !self.reads_stream() || self.incoming.is_left() {
                    return Read::Waits(begin);
                }
                let outcome = stream.try_read_to_sleep(first, begins);
                if !is_empty(&outcome) {
                    return self.finish_read(joined, outcome, rest, first.len());
                }
                if stream.has_offer_or_oob() {
                    return Read::Waits(begin);
                }
            }
            begins = false;
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Read::Empty;
            }
            match stream.sleep(left) {
                Ok(Slept::Ran | Slept::Ended | Slept::TimedOut) => {}
                Ok(Slept::Interrupted) => return Read::Interrupted,
                Ok(Slept::Refused) | Err(_) => return Read::Waits(begin),
            }
        }
    }

    /// Whether reads take from the stream: the program has read all that the kernel had.
    fn reads_stream(&self) -> bool {
        !self.kernel_reads.load(Ordering::SeqCst) && self.has_taken_all()
    }

    fn finish_read(
        &self,
        joined: &Joined,
        outcome: io::Result<usize>,
        rest: &mut [&mut [u8]],
        room: usize,
    ) -> Read {
        // The relay forwards the end of the stream and errors to the kernel.
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

    /// A read takes the piece that the relay has left for it.
    fn take_piece(&self, joined: &Joined, pieces: &mut [&mut [u8]], skip: usize) -> usize {
        let taken = self.incoming.take(joined.kernel(), pieces, skip, || self.has_taken_all());
        BYTES.fetch_add(taken as u64, Ordering::Relaxed);
        taken
    }

    fn waited_since(&self, begin: Instant) {
        let waited = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_ns.store(waited, Ordering::Relaxed);
    }

    /// Counts the bytes that a call of the kernel has read, if it has not failed.
    fn count_taken(&self, done: isize) {
        if let Ok(taken @ 1..) = u64::try_from(done) {
            self.taken.fetch_add(taken, Ordering::SeqCst);
            self.empty.store(0, Ordering::Relaxed);
        }
    }
}

/// A call that reads from the program's socket `fd` in the kernel.
pub fn read_in_kernel(fd: RawFd, call: impl FnOnce() -> isize) -> isize {
    let Some(found) = find(fd) else { return call() };
    let direct = &found.joined.direct;
    direct.leave_to_kernel();
    direct.incoming.leave_to_kernel(found.joined.kernel());
    let done = call();
    direct.count_taken(done);
    done
}

/// A read of the program. `kernel` is the kernel's call.
pub fn receive(fd: RawFd, pieces: &mut [&mut [u8]], flags: c_int, kernel: impl FnOnce() -> isize) -> isize {
    const KNOWN: c_int = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    let Some(found) = find(fd) else { return kernel() };
    let joined = &*found.joined;
    let direct = &joined.direct;
    let known = flags & !KNOWN == 0 && !pieces.is_empty() && pieces.iter().all(|piece| !piece.is_empty());
    if known && found.alone && pieces.iter().map(|piece| piece.len()).sum::<usize>() >= ADVERTISED_BYTES {
        direct.incoming.want(true);
    } else if !known {
        direct.incoming.leave_to_kernel(joined.kernel());
    }
    let mut waits_since = None;
    let mut interrupted = false;
    if let Some(inside) = Inside::enter() {
        let mut outcome = if known { read(&found, fd, flags, pieces) } else { Read::Kernel };
        if let Read::Waits(begin) = outcome {
            waits_since = Some(begin);
            // A cancellation before this count ends the thread here, a later one ends the sleep.
            let cancels = signals::cancels();
            inside.uncancelled.cancellation_point();
            outcome = sleep(&found, pieces, begin, cancels);
            if !matches!(outcome, Read::Done(_)) {
                // What came while this thread slept has notified nobody.
                joined.stream.end_polling();
            }
        }
        match outcome {
            Read::Done(n) => return n as isize,
            Read::Empty => {
                sys::set_errno(libc::EAGAIN);
                return -1;
            }
            Read::Kernel if !known => direct.bring_to_kernel(joined, fd),
            Read::Kernel | Read::Waits(_) => {}
            Read::Interrupted => {
                interrupted = direct.read_limit().is_some() || signals::handlers() != Handlers::Restart;
            }
        }
        direct.leave_to_kernel();
    }
    if interrupted {
        // The signal may have been that of a cancellation.
        sys::cancellation_point();
        sys::set_errno(libc::EINTR);
        return -1;
    }
    if found.is_replaced(fd) {
        sys::set_errno(libc::EBADF);
        return -1;
    }
    let done = kernel();
    if let Some(begin) = waits_since {
        direct.waited_since(begin);
    }
    // Neither takes bytes of the stream out of the kernel.
    if flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE) == 0 {
        direct.count_taken(done);
    }
    if known
        && direct.incoming.is_left()
        && let Ok(read @ 1..) = usize::try_from(done)
        && let Some(_inside) = Inside::enter()
    {
        return done + direct.take_piece(joined, pieces, read) as isize;
    }
    done
}
