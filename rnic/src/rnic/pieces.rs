//! Lists of memory pieces to which keys gave access, and copies between them and private buffers.

use smallvec::SmallVec;
use xwarp_tcp::copy::{Fault, GappedMut};

use super::{
    grant::Keys,
    keys::{KeyError, User},
    work::{Access, Sge},
};
use crate::memory::{Memory, Reader};

/// The bytes of a region.
#[derive(Debug, Clone)]
pub(crate) enum Extent {
    One(Memory),
    /// Several memories, concatenated: each with the offset of its first byte, and the length of all.
    Several(Box<[(u64, Memory)]>, u64),
}

impl Default for Extent {
    fn default() -> Self {
        Self::Several(Box::default(), 0)
    }
}

impl FromIterator<Memory> for Extent {
    fn from_iter<I: IntoIterator<Item = Memory>>(memory: I) -> Self {
        let mut len = 0u64;
        let pieces: Vec<_> = memory
            .into_iter()
            .map(|piece| {
                let start = len;
                // Memories that are mapped at the same time have fewer than 2^64 bytes together.
                len = start.saturating_add(piece.len() as u64);
                (start, piece)
            })
            .collect();
        match <[_; 1]>::try_from(pieces) {
            Ok([(_, only)]) => Self::One(only),
            Err(pieces) => Self::Several(pieces.into(), len),
        }
    }
}

impl From<Memory> for Extent {
    fn from(memory: Memory) -> Self {
        Self::One(memory)
    }
}

impl Extent {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::One(memory) => memory.len() as u64,
            Self::Several(_, len) => *len,
        }
    }

    /// Number of memories.
    pub(crate) fn pieces(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Several(pieces, _) => pieces.len(),
        }
    }

    /// Whether all bytes are writable.
    pub(crate) fn is_writable(&self) -> bool {
        match self {
            Self::One(memory) => memory.is_writable(),
            Self::Several(pieces, _) => pieces.iter().all(|(_, memory)| memory.is_writable()),
        }
    }

    /// The memory, if all bytes lie in one.
    #[inline]
    pub(crate) fn one_memory(&self) -> Option<&Memory> {
        match self {
            Self::One(memory) => Some(memory),
            Self::Several(..) => None,
        }
    }

    /// The `len` bytes from `start`. The caller has checked that they are in bounds.
    pub(crate) fn stretches(&self, start: u64, len: u64) -> Stretches<'_> {
        let mut stretches = Stretches::default();
        self.cut(start, len, &mut stretches);
        stretches
    }

    /// Appends the `len` bytes from `start` to `stretches`. The caller has checked that they are in bounds.
    #[inline]
    pub(crate) fn cut<'k>(&'k self, start: u64, len: u64, stretches: &mut Stretches<'k>) {
        match self {
            Self::One(memory) if len > 0 => {
                stretches.list.push(Stretch { memory, offset: start as usize, len: len as usize });
            }
            Self::One(_) => {}
            Self::Several(pieces, _) => Self::cut_pieces(pieces, start, len, stretches),
        }
    }

    fn cut_pieces<'k>(pieces: &'k [(u64, Memory)], start: u64, mut len: u64, stretches: &mut Stretches<'k>) {
        let behind = pieces.partition_point(|(at, _)| *at <= start);
        let mut skip = start;
        for (at, memory) in pieces.iter().skip(behind.saturating_sub(1)) {
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

/// A contiguous range of memory whose access was checked.
#[derive(Debug)]
struct Stretch<'k> {
    memory: &'k Memory,
    offset: usize,
    len: usize,
}

/// A list of checked stretches. They borrow the engine's keys, so no engine's lock is passed meanwhile, and none of their
/// regions can be deregistered.
#[derive(Debug, Default)]
pub(crate) struct Stretches<'k> {
    list: SmallVec<[Stretch<'k>; 4]>,
    /// Position of the next copy.
    at: usize,
    within: usize,
}

impl<'k> Stretches<'k> {
    /// The `len` bytes from byte `skip` of `pieces`, each checked for access `need` by `user`.
    #[inline]
    pub(crate) fn open(
        keys: &'k Keys,
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
            let (extent, start) = keys.find(user, piece.key, need, start, now)?;
            extent.cut(start, now, &mut stretches);
            len -= now;
            skip = 0;
        }
        if len > 0 { Err(KeyError::Bounds) } else { Ok(stretches) }
    }

    /// The memory and the offset if all bytes lie in one piece, as those of an atomic word must.
    pub(crate) fn in_one_piece(&self) -> Option<(&'k Memory, usize)> {
        match self.list.as_slice() {
            [Stretch { memory, offset, .. }] => Some((memory, *offset)),
            _ => None,
        }
    }

    /// Copies `bytes` to the next bytes; returns false if the memory is read-only, or is gone.
    #[inline]
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

    /// Returns the next stretch of at most `max` bytes and advances past it.
    #[inline]
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

/// The bytes of a gather list, which are read from front to back. As with [`Stretches`], none of their regions can be
/// deregistered meanwhile.
#[derive(Debug)]
pub(crate) struct Gather<'k> {
    /// The rest of the stretch that is being read.
    reader: Reader<'k>,
    /// All stretches, if there are several, of which the first `begun` were passed to `reader`.
    list: SmallVec<[Stretch<'k>; 4]>,
    begun: usize,
}

impl<'k> Gather<'k> {
    /// Reads the `len` bytes from byte `skip` of `pieces`, each checked for access `need` by `user`.
    pub(crate) fn open(
        keys: &'k Keys,
        user: User,
        need: Access,
        pieces: &[Sge],
        skip: u64,
        len: u64,
    ) -> Result<Self, KeyError> {
        let list = Stretches::open(keys, user, need, pieces, skip, len)?.list;
        Ok(Self { reader: Reader::empty(), list, begun: 0 })
    }

    /// Copies the next bytes into all of `out`.
    #[inline]
    pub(crate) fn read(&mut self, out: &mut GappedMut<'_>) -> Result<(), Fault> {
        if self.reader.read_gapped(out) {
            return if self.reader.is_broken() { Err(Fault) } else { Ok(()) };
        }
        let mut done = Ok(());
        out.for_each(|space| {
            if done.is_ok() {
                done = self.read_on(space);
            }
        });
        done
    }

    /// Copies the rest of the stretch and the bytes of the next stretches into `out`.
    #[inline(never)]
    fn read_on(&mut self, mut out: &mut [u8]) -> Result<(), Fault> {
        loop {
            let done = self.reader.read(out)?;
            out = out.get_mut(done..).unwrap_or_default();
            let next = self.list.get(self.begun).filter(|_| !out.is_empty());
            let Some(Stretch { memory, offset, len }) = next else { return Ok(()) };
            self.begun += 1;
            // The range was checked when the list was opened, and the memory of a key never shrinks.
            self.reader = memory.reader(*offset, *len).unwrap_or_else(|_| Reader::empty());
        }
    }
}
