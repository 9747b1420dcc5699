//! Lists of pieces opened by the key table, and copies between them and bytes that come in parts.

use smallvec::SmallVec;

use super::{
    keys::{KeyError, KeyTable, User},
    work::{Access, Sge},
};
use crate::memory::Memory;

/// A stretch of memory that was checked.
#[derive(Debug)]
struct Stretch<'k> {
    memory: &'k Memory,
    offset: usize,
    len: usize,
}

/// Stretches that belong together, checked in this engine call: they cannot be deregistered within it.
#[derive(Debug)]
pub(crate) struct Stretches<'k> {
    list: SmallVec<[Stretch<'k>; 4]>,
    /// Where the next copy goes on.
    at: usize,
    within: usize,
}

impl<'k> Stretches<'k> {
    /// The one stretch of `len` bytes at `offset` of `memory`.
    pub(crate) fn one(memory: &'k Memory, offset: usize, len: usize) -> Self {
        let mut list = SmallVec::new();
        list.push(Stretch { memory, offset, len });
        Self { list, at: 0, within: 0 }
    }

    /// The `len` bytes from byte `skip` of `pieces` on, each opened to `user` for `need`.
    pub(crate) fn open(
        keys: &'k KeyTable,
        user: User,
        need: Access,
        pieces: &[Sge],
        mut skip: u64,
        mut len: u64,
    ) -> Result<Self, KeyError> {
        let mut list = SmallVec::new();
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
            let (memory, offset) = keys.open(user, piece.key, need, start, now)?;
            list.push(Stretch { memory, offset, len: now as usize });
            len -= now;
            skip = 0;
        }
        if len > 0 { Err(KeyError::Bounds) } else { Ok(Self { list, at: 0, within: 0 }) }
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
