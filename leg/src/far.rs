//! The end of a leg that does not own the memory: [`Source`] and [`Sink`] of a switch.
//!
//! Nothing that the other end writes is believed: positions, descriptors and headers are read once, compared with what they may
//! be, and used from private memory. An end that [lies](Lie) has ended.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{SendFlags, send, sockopt};
use smallvec::SmallVec;

use crate::sys::{Lie, Ring, Shared};
use crate::{MAX_FRAME_BYTES, memif};

/// Largest number of descriptors of a frame.
const MAX_PIECES: usize = 64;

/// Bytes of a leg's memory.
#[derive(Debug, Clone, Copy, Default)]
struct Piece {
    at: usize,
    len: usize,
}

/// The frames that come from the other end.
#[derive(Debug)]
pub struct Source {
    memory: Arc<Shared>,
    ring: Ring,
    tail: u16,
    bell: OwnedFd,
}

/// The frames that go to the other end.
#[derive(Debug)]
pub struct Sink {
    memory: Arc<Shared>,
    ring: Ring,
    tail: u16,
    bell: OwnedFd,
}

/// A frame that has come: its beginning, and where the rest is.
#[derive(Debug)]
pub struct Frame<'a> {
    memory: &'a Shared,
    /// A private copy of the first bytes.
    head: &'a [u8],
    pieces: SmallVec<[Piece; 18]>,
    len: usize,
}

impl Frame<'_> {
    /// A private copy of the first bytes.
    pub fn head(&self) -> &[u8] {
        self.head
    }

    /// Bytes of the whole frame.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A private copy of the whole frame.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        let mut at = 0;
        for piece in &self.pieces {
            if let Some(to) = bytes.get_mut(at..at + piece.len) {
                self.memory.read(piece.at, to);
            }
            at += piece.len;
        }
        // Whoever has looked at the head sees the same one.
        if let Some(to) = bytes.get_mut(..self.head.len()) {
            to.copy_from_slice(self.head);
        }
        bytes
    }

    /// Calls `f` with each piece behind the head.
    fn rest(&self, mut f: impl FnMut(Piece)) {
        let mut skip = self.head.len();
        for piece in &self.pieces {
            let skipped = skip.min(piece.len);
            skip -= skipped;
            if skipped < piece.len {
                f(Piece { at: piece.at + skipped, len: piece.len - skipped });
            }
        }
    }
}

impl Source {
    /// Readable when frames have come while this end slept. It is not to be read: wait for its edges.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Sets whether this end sleeps, so that the other one wakes it. Look for frames once more after that.
    pub fn sleep(&self, sleeps: bool) {
        self.ring.mask_wakeups(!sleeps);
    }

    /// Whether frames wait.
    pub fn has_frames(&self) -> bool {
        self.ring.head() != self.tail
    }

    /// Takes the next frame, hands it to `take` with a copy of its beginning in `head`, and gives its memory back. Returns whether
    /// there was one.
    ///
    /// # Errors
    /// The other end lies: its leg has ended.
    pub fn next(&mut self, head: &mut [u8], take: impl FnOnce(&Frame<'_>)) -> Result<bool, Lie> {
        let posted = self.ring.head().wrapping_sub(self.tail);
        if posted > self.ring.len() {
            return Err(Lie("posts more descriptors than its ring has"));
        }
        if posted == 0 {
            return Ok(false);
        }
        let mut pieces = SmallVec::new();
        let mut len = 0;
        loop {
            if pieces.len() >= usize::from(posted) {
                return Err(Lie("posts a part of a frame"));
            }
            let descriptor = self.ring.descriptor(self.tail.wrapping_add(pieces.len() as u16));
            let piece = Piece { at: descriptor.offset as usize, len: descriptor.len as usize };
            len += piece.len;
            if descriptor.region != 0 || !self.memory.contains(piece.at, piece.len) {
                return Err(Lie("posts bytes outside of its memory"));
            }
            if len > MAX_FRAME_BYTES || pieces.len() >= MAX_PIECES {
                return Err(Lie("posts a frame that is too long"));
            }
            pieces.push(piece);
            if !descriptor.continued {
                break;
            }
        }
        let count = pieces.len() as u16;
        let mut copied = 0;
        for Piece { at, len } in &pieces {
            let wanted = (*len).min(head.len() - copied);
            if let Some(to) = head.get_mut(copied..copied + wanted) {
                self.memory.read(*at, to);
            }
            copied += wanted;
        }
        let head = head.get(..copied).unwrap_or_default();
        take(&Frame { memory: &self.memory, head, pieces, len });
        self.tail = self.tail.wrapping_add(count);
        Ok(true)
    }

    /// Makes the memory of the taken frames the other end's again.
    pub fn give_back(&self) {
        self.ring.set_tail(self.tail);
    }
}

/// What became of a frame for a [`Sink`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivered {
    /// It was delivered.
    Yes,
    /// The other end has no memory for it now.
    Full,
}

impl Sink {
    /// Delivers a frame of a leg, perhaps the same one.
    ///
    /// # Errors
    /// The other end lies: its leg has ended.
    pub fn deliver(&mut self, frame: &Frame<'_>) -> Result<Delivered, Lie> {
        let Some(places) = self.places(frame.len)? else { return Ok(Delivered::Full) };
        let mut to = Cursor { sink: &self.memory, places: &places, done: 0 };
        to.put(frame.head.len(), |done, len, memory, at| {
            memory.write(at, frame.head.get(done..done + len).unwrap_or_default());
        });
        frame.rest(|piece| {
            to.put(piece.len, |done, len, memory, at| {
                frame.memory.copy(piece.at + done, memory, at, len);
            });
        });
        self.commit(&places);
        Ok(Delivered::Yes)
    }

    /// Delivers a frame of this process.
    ///
    /// # Errors
    /// The other end lies: its leg has ended.
    pub fn deliver_bytes(&mut self, frame: &[u8]) -> Result<Delivered, Lie> {
        let Some(places) = self.places(frame.len())? else { return Ok(Delivered::Full) };
        let mut to = Cursor { sink: &self.memory, places: &places, done: 0 };
        to.put(frame.len(), |done, len, memory, at| {
            memory.write(at, frame.get(done..done + len).unwrap_or_default());
        });
        self.commit(&places);
        Ok(Delivered::Yes)
    }

    /// The memory for a frame of `len` bytes; `None` while there is too little.
    fn places(&self, len: usize) -> Result<Option<SmallVec<[Piece; 18]>>, Lie> {
        let posted = self.ring.head().wrapping_sub(self.tail);
        if posted > self.ring.len() {
            return Err(Lie("posts more descriptors than its ring has"));
        }
        let mut places = SmallVec::new();
        let mut left = len;
        while left > 0 || places.is_empty() {
            if places.len() >= usize::from(posted) {
                return Ok(None);
            }
            let descriptor = self.ring.descriptor(self.tail.wrapping_add(places.len() as u16));
            let room = Piece { at: descriptor.offset as usize, len: (descriptor.len as usize).min(left) };
            if descriptor.region != 0 || !self.memory.contains(room.at, descriptor.len as usize) {
                return Err(Lie("posts memory that it does not have"));
            }
            if places.len() >= MAX_PIECES || (room.len == 0 && left > 0) {
                return Err(Lie("posts memory in pieces that are too small"));
            }
            left -= room.len;
            places.push(room);
        }
        Ok(Some(places))
    }

    /// Tells the other end the lengths, and gives it the descriptors of a frame.
    fn commit(&mut self, places: &[Piece]) {
        for (index, place) in places.iter().enumerate() {
            let mut descriptor = self.ring.descriptor(self.tail);
            descriptor.len = place.len as u32;
            descriptor.continued = index + 1 < places.len();
            self.ring.set_descriptor(self.tail, descriptor);
            self.tail = self.tail.wrapping_add(1);
        }
        self.ring.set_tail(self.tail);
    }

    /// Wakes the other end if it sleeps. Never waits. Returns whether it was woken.
    pub fn wake(&self) -> bool {
        self.ring.wants_wakeup() && {
            // A full queue wakes the other end too.
            let _ = send(&self.bell, &1_u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            true
        }
    }
}

/// A write position in the memory for a frame.
struct Cursor<'a> {
    sink: &'a Shared,
    places: &'a [Piece],
    /// Bytes of the first place that are written.
    done: usize,
}

impl Cursor<'_> {
    /// Writes the next `len` bytes, each run by `copy(offset in these bytes, length, memory, address)`.
    fn put(&mut self, len: usize, mut copy: impl FnMut(usize, usize, &Shared, usize)) {
        let mut from = 0;
        while from < len
            && let Some((place, others)) = self.places.split_first()
        {
            let run = (place.len - self.done).min(len - from);
            copy(from, run, self.sink, place.at + self.done);
            from += run;
            self.done += run;
            if self.done == place.len {
                (self.places, self.done) = (others, 0);
            }
        }
    }
}

/// The ends of a leg that the other end has offered by `asked`.
///
/// # Errors
/// The memory, the rings or the descriptors are not what a leg needs; the text is for the other end.
pub fn accept(asked: memif::Asked) -> Result<(Source, Sink), String> {
    let memif::Asked { memory, bytes, to_master, to_slave } = asked;
    let memory = Shared::of(memory.as_fd(), bytes).map_err(|error| error.to_string())?;
    let memory = Arc::new(memory);
    let ring = |asked: &memif::AskedRing| {
        Ring::at(&memory, asked.offset as usize, asked.log2)
            .filter(Ring::is_formatted)
            .ok_or_else(|| "a ring is not in the memory, or not prepared".to_owned())
    };
    let (source, sink) = (ring(&to_master)?, ring(&to_slave)?);
    // Of a socket alone a write can be told not to wait.
    if sockopt::socket_type(&to_slave.bell).is_err() {
        return Err("the wake-ups of a client of the fabric must be a socket".into());
    }
    let (from_tail, to_tail) = (source.tail(), sink.tail());
    Ok((
        Source { memory: Arc::clone(&memory), ring: source, tail: from_tail, bell: to_master.bell },
        Sink { memory, ring: sink, tail: to_tail, bell: to_slave.bell },
    ))
}

#[cfg(test)]
mod tests;
