//! Lists of pieces opened by the key table, and copies between them and bytes that come in parts.

use smallvec::SmallVec;

use super::{
    keys::{KeyError, KeyTable, User},
    work::{Access, Sge},
};
use crate::memory::Memory;

/// Bytes of one memory, or of several one behind the other: what a region stands for.
#[derive(Debug, Default)]
pub(crate) struct Extent {
    /// Each with where it begins.
    pieces: SmallVec<[(u64, Memory); 1]>,
    len: u64,
}

impl FromIterator<Memory> for Extent {
    fn from_iter<I: IntoIterator<Item = Memory>>(memory: I) -> Self {
        let mut extent = Self::default();
        for piece in memory {
            let start = extent.len;
            // Memory that is mapped together has fewer than 2^64 bytes.
            extent.len = start.saturating_add(piece.len() as u64);
            extent.pieces.push((start, piece));
        }
        extent
    }
}

impl Extent {
    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Memories.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Whether all bytes may be written.
    pub(crate) fn is_writable(&self) -> bool {
        self.pieces.iter().all(|(_, memory)| memory.is_writable())
    }

    /// Adds the `len` bytes from `start` on, which are within, to `stretches`.
    pub(crate) fn cut<'k>(&'k self, start: u64, mut len: u64, stretches: &mut Stretches<'k>) {
        let behind = self.pieces.partition_point(|(at, _)| *at <= start);
        let mut skip = start;
        for (at, memory) in self.pieces.iter().skip(behind.saturating_sub(1)) {
            if len == 0 {
                break;
            }
            let offset = skip - at;
            let now = (memory.len() as u64 - offset).min(len);
            if now > 0 {
                stretches.list.push(Stretch { memory, offset: offset as usize, len: now as usize });
            }
            len -= now;
            skip += now;
        }
        debug_assert_eq!(len, 0, "checked against `len` before");
    }
}

/// A stretch of memory that was checked.
#[derive(Debug)]
struct Stretch<'k> {
    memory: &'k Memory,
    offset: usize,
    len: usize,
}

/// Stretches that belong together, checked in this engine call: they cannot be deregistered within it.
#[derive(Debug, Default)]
pub(crate) struct Stretches<'k> {
    list: SmallVec<[Stretch<'k>; 4]>,
    /// Where the next copy goes on.
    at: usize,
    within: usize,
}

impl<'k> Stretches<'k> {
    /// The `len` bytes from byte `skip` of `pieces` on, each opened to `user` for `need`.
    pub(crate) fn open(
        keys: &'k KeyTable,
        user: User,
        need: Access,
        pieces: &[Sge],
        mut skip: u64,
        mut len: u64,
    ) -> Result<Self, KeyError> {
        let mut stretches = Self::default();
        for piece in pieces {
            if len == 0 {
                break;
            }
            let piece_len = u64::from(piece.len);
            if skip >= piece_len {
                skip -= piece_len;
                continue;
            }
            let now = (piece_len - skip).min(len);
            let start = piece.offset.checked_add(skip).ok_or(KeyError::Wrap)?;
            keys.open_into(user, piece.key, need, start, now, &mut stretches)?;
            len -= now;
            skip = 0;
        }
        if len > 0 { Err(KeyError::Bounds) } else { Ok(stretches) }
    }

    /// The memory and the offset, when all bytes lie in one piece: what an atomic word must do.
    pub(crate) fn in_one_piece(&self) -> Option<(&'k Memory, usize)> {
        match self.list.as_slice() {
            [Stretch { memory, offset, .. }] => Some((memory, *offset)),
            _ => None,
        }
    }

    /// Copies the next bytes into `out`.
    pub(crate) fn read(&mut self, mut out: &mut [u8]) {
        while !out.is_empty() {
            let Some((memory, offset, n)) = self.step(out.len()) else { return };
            let (now, later) = out.split_at_mut(n);
            // Checked when opened; the memory of a key never shrinks.
            let copied = memory.read(offset, now);
            debug_assert!(copied.is_ok());
            out = later;
        }
    }

    /// Copies `bytes` to the next bytes; false when the memory turns out to be read-only.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let Some((memory, offset, n)) = self.step(bytes.len()) else { return false };
            let (now, later) = bytes.split_at(n);
            if memory.write(offset, now).is_err() {
                return false;
            }
            bytes = later;
        }
        true
    }

    /// The next stretch of at most `max` bytes, which is passed over.
    fn step(&mut self, max: usize) -> Option<(&'k Memory, usize, usize)> {
        loop {
            let stretch = self.list.get(self.at)?;
            let left = stretch.len - self.within;
            if left == 0 {
                self.at += 1;
                self.within = 0;
                continue;
            }
            let n = left.min(max);
            let found = (stretch.memory, stretch.offset + self.within, n);
            self.within += n;
            return Some(found);
        }
    }
}
