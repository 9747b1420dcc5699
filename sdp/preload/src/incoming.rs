//! Long pieces in transit to the program: its reads take them from the memory into which they were received. Only the
//! first bytes of a piece are written to the kernel, which wakes all waiters of the socket.
//!
//! While a piece is left, the kernel has a byte that the program has not read, or a read is about to take the piece.

use std::{
    io::Read as _,
    mem,
    ops::Range,
    os::fd::OwnedFd,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::net::SendFlags;
use xwarp_sdp::SdpStream;
use xwarp_verbs::Memory;

use crate::{locks::try_lock_awhile, sys};

/// Bytes of the beginning.
const BEGINNING_BYTES: usize = 4 << 10;

/// One piece that the relay has left for reads of the program.
#[derive(Debug, Default)]
pub struct Incoming {
    /// The program reads long pieces.
    wanted: AtomicBool,
    /// There is a piece. Written under the lock.
    left: AtomicBool,
    piece: Mutex<Piece>,
    taken: Condvar,
}

/// The part of the memory that the program has not received.
#[derive(Debug, Default)]
struct Piece {
    memory: Option<Memory>,
    at: usize,
    end: usize,
}

/// The kernel's side of the connection.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    pub leg: &'a OwnedFd,
    /// Bytes that were written to the kernel.
    pub forwarded: &'a AtomicU64,
}

impl Kernel<'_> {
    /// Gives the kernel what has come in messages, as far as it has room. The caller holds the lock of reads.
    pub fn bring(self, mut stream: &SdpStream) {
        let mut bytes = [0; BEGINNING_BYTES];
        loop {
            let len = stream.try_peek(&mut bytes);
            let Some(waiting) = bytes.get(..len).filter(|waiting| !waiting.is_empty()) else { return };
            // Before the program can read them.
            self.forwarded.fetch_add(len as u64, Ordering::SeqCst);
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let sent = rustix::net::send(self.leg, waiting, flags).unwrap_or(0);
            self.forwarded.fetch_sub((len - sent) as u64, Ordering::SeqCst);
            // They are there, so that it does not wait.
            let taken = bytes.get_mut(..sent).map(|sent| stream.read_exact(sent));
            if sent < len || !matches!(taken, Some(Ok(()))) {
                return;
            }
        }
    }

    /// Writes bytes of the piece to the kernel, as many as it takes and at most `most`.
    fn forward(self, piece: &mut Piece, most: usize) {
        let Some(memory) = &piece.memory else { return };
        let len = most.min(piece.end - piece.at);
        if len == 0 {
            return;
        }
        // Before the program can read it.
        self.forwarded.fetch_add(len as u64, Ordering::SeqCst);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sys::send(self.leg, memory, piece.at, len, flags).unwrap_or(0);
        self.forwarded.fetch_sub((len - sent) as u64, Ordering::SeqCst);
        piece.at += sent;
    }
}

impl Incoming {
    fn lock(&self) -> MutexGuard<'_, Piece> {
        self.piece.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records whether the program reads long pieces.
    pub fn want(&self, wanted: bool) {
        if self.wanted.load(Ordering::Relaxed) != wanted {
            self.wanted.store(wanted, Ordering::Relaxed);
        }
    }

    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Whether there is a piece.
    pub fn is_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Leaves the first `len` bytes of `memory`, which is exchanged for that of the piece before. There is no other
    /// piece, and the program has read all that the kernel had. Returns the first bytes, which the caller writes to the
    /// kernel.
    pub fn leave(
        &self,
        forwarded: &AtomicU64,
        memory: &mut Option<Memory>,
        len: usize,
    ) -> Option<(Memory, Range<usize>)> {
        let mut piece = self.lock();
        mem::swap(&mut piece.memory, memory);
        piece.at = len.min(BEGINNING_BYTES);
        piece.end = len;
        self.left.store(true, Ordering::Release);
        // Before the program can read it.
        forwarded.fetch_add(piece.at as u64, Ordering::SeqCst);
        // The lock is released first: the write of the first bytes wakes the program, which takes the rest.
        piece.memory.clone().map(|memory| (memory, 0..piece.at))
    }

    /// Reads bytes of the piece into `pieces`, after their first `skip` bytes. `is_next` says whether the program has
    /// read all bytes that the kernel had. Returns the number of bytes.
    pub fn take(
        &self,
        kernel: Kernel<'_>,
        pieces: &mut [&mut [u8]],
        mut skip: usize,
        is_next: impl Fn() -> bool,
    ) -> usize {
        let Some(mut piece) = try_lock_awhile(&self.piece) else { return 0 };
        let Some(memory) = piece.memory.clone().filter(|_| piece.at < piece.end && is_next()) else {
            return 0;
        };
        let begin = piece.at;
        for room in pieces {
            let skipped = skip.min(room.len());
            skip -= skipped;
            let room = room.get_mut(skipped..).unwrap_or_default();
            let len = room.len().min(piece.end - piece.at);
            if memory.read(piece.at, room.get_mut(..len).unwrap_or_default()).is_err() {
                break;
            }
            piece.at += len;
        }
        let taken = piece.at - begin;
        kernel.forward(&mut piece, BEGINNING_BYTES);
        self.look(&piece);
        taken
    }

    /// Notifies the relay when the piece is used up.
    fn look(&self, piece: &Piece) {
        if piece.at == piece.end {
            self.left.store(false, Ordering::Release);
            self.taken.notify_all();
        }
    }

    /// The kernel serves a read: writes the piece to it, as far as it has room.
    pub fn leave_to_kernel(&self, kernel: Kernel<'_>) {
        self.want(false);
        if self.is_left()
            && let Some(mut piece) = try_lock_awhile(&self.piece)
        {
            kernel.forward(&mut piece, usize::MAX);
            self.look(&piece);
        }
    }

    /// Waits until the program has taken the piece, for `patience` at most. On a time-out, returns the memory and its
    /// remaining range to the caller.
    pub fn wait_taken(&self, patience: Duration) -> Option<(Memory, Range<usize>)> {
        if !self.is_left() {
            return None;
        }
        let waited = self.taken.wait_timeout_while(self.lock(), patience, |piece| piece.at < piece.end);
        let (mut piece, _) = waited.unwrap_or_else(PoisonError::into_inner);
        self.left.store(false, Ordering::Release);
        let rest = mem::take(&mut piece.at)..mem::take(&mut piece.end);
        piece.memory.clone().filter(|_| !rest.is_empty()).zip(Some(rest))
    }
}
