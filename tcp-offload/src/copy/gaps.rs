//! Bytes with gaps between them, as a ULPDU has markers between its bytes.

use super::Fault;

/// The places of gaps that have one length and one distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gaps {
    /// Bytes before the first gap.
    pub first: usize,
    /// Bytes from the end of a gap to the next one.
    pub between: usize,
    /// Bytes of a gap.
    pub len: usize,
}

impl Gaps {
    /// Number of the bytes outside of gaps in the first `space` bytes.
    #[inline]
    pub const fn bytes_in(self, space: usize) -> usize {
        let Some(behind) = space.checked_sub(self.first) else { return space };
        let period = self.between + self.len;
        self.first + behind / period * self.between + (behind % period).saturating_sub(self.len)
    }

    /// Number of the first bytes among which `bytes` lie outside of gaps, without the gap that may follow them.
    #[inline]
    pub const fn space_of(self, bytes: usize) -> usize {
        bytes + self.len * bytes.saturating_sub(self.first).div_ceil(self.between)
    }

    /// With `number` in the first gap.
    #[inline]
    pub(crate) const fn numbered(self, number: u32) -> NumberedGaps {
        NumberedGaps { places: self, number }
    }
}

/// Gaps that a copy fills with numbers; see [`Sum::Wanted`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NumberedGaps {
    places: Gaps,
    /// The number of the next gap.
    number: u32,
}

#[cfg_attr(
    not(all(target_arch = "x86_64", not(miri))),
    expect(dead_code, reason = "only copies of x86-64 fill gaps")
)]
impl NumberedGaps {
    /// Bytes of a gap.
    #[inline]
    pub(crate) const fn len(self) -> usize {
        self.places.len
    }

    /// Bytes from the start of one gap to the start of the next.
    #[inline]
    const fn spacing(self) -> usize {
        self.places.between + self.places.len
    }

    /// Whether the gaps have `len` bytes, and `spacing` from the start of one to the start of the next.
    #[inline]
    pub(crate) const fn are(self, len: usize, spacing: usize) -> bool {
        self.places.len == len && self.spacing() == spacing
    }

    /// The end of the first gap.
    #[inline]
    pub(crate) const fn first_end(self) -> Option<usize> {
        self.places.first.checked_add(self.places.len)
    }

    /// The contents of the next gap.
    #[inline]
    pub(crate) fn next(&mut self) -> [u8; 4] {
        let bytes = self.number.to_be_bytes();
        self.number = self.number.wrapping_add(self.spacing() as u32);
        bytes
    }
}

/// Bytes with gaps between them.
#[derive(Debug, Clone, Copy)]
pub struct Gapped<'a> {
    /// The bytes and the gaps.
    pub bytes: &'a [u8],
    /// Number of the bytes without the gaps.
    pub len: usize,
    /// The places of the gaps in `bytes`.
    pub gaps: Gaps,
}

impl<'a> Gapped<'a> {
    /// Calls `f` for each piece between two gaps.
    #[inline]
    pub fn for_each(&self, mut f: impl FnMut(&'a [u8])) {
        let Self { bytes: mut rest, len: mut left, gaps } = *self;
        let mut until = gaps.first;
        if left == 0 {
            return;
        }
        loop {
            let (now, behind) = rest.split_at(until.min(left).min(rest.len()));
            f(now);
            left -= now.len();
            if left == 0 {
                return;
            }
            let Some(bytes) = behind.get(gaps.len..) else {
                return debug_assert!(false, "the bytes end before the length");
            };
            (rest, until) = (bytes, gaps.between);
        }
    }
}

/// Space for bytes with gaps between them.
#[derive(Debug)]
pub struct GappedMut<'a> {
    /// The space with the gaps.
    pub bytes: &'a mut [u8],
    /// Number of the bytes without the gaps.
    pub len: usize,
    /// The places of the gaps in `bytes`.
    pub gaps: Gaps,
    /// Whether whoever writes the bytes may also fill the gaps and compute the CRC.
    pub sum: Sum,
}

/// The contents of a space's gaps and its CRC32c, which [`read_gapped`](super::read_gapped) may make while it copies: one pass over the
/// bytes takes less time than several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sum {
    /// They are made apart from the copy, or not at all.
    Apart,
    /// The copy may make them.
    Wanted {
        /// CRC32c of the bytes in front of the space.
        crc: u32,
        /// Number in the first gap, in network byte order. In each later gap it is larger by the distance of the gaps.
        number: u32,
    },
    /// The copy has made them. This is the CRC32c of the bytes in front of the space, followed by the space.
    Done(u32),
}

impl GappedMut<'_> {
    /// If a sum is wanted, lets `copy(crc, space, gaps)` write the space, which ends with the last of the bytes, and its gaps. It
    /// returns the CRC, or `None` if it has written nothing. Returns whether it has written.
    #[inline]
    pub(crate) fn sum_by(
        &mut self,
        copy: impl FnOnce(u32, &mut [u8], NumberedGaps) -> Result<Option<u32>, Fault>,
    ) -> Result<bool, Fault> {
        let Sum::Wanted { crc, number } = self.sum else { return Ok(false) };
        let Some(space) = self.bytes.get_mut(..self.gaps.space_of(self.len)) else { return Ok(false) };
        let done = copy(crc, space, self.gaps.numbered(number))?;
        self.sum = done.map_or(self.sum, Sum::Done);
        Ok(done.is_some())
    }

    /// Calls `f` for each piece between two gaps.
    #[inline]
    pub fn for_each(&mut self, mut f: impl FnMut(&mut [u8])) {
        let (mut left, gaps) = (self.len, self.gaps);
        let (mut rest, mut until) = (&mut *self.bytes, gaps.first);
        if left == 0 {
            return;
        }
        loop {
            let (now, behind) = rest.split_at_mut(until.min(left).min(rest.len()));
            f(now);
            left -= now.len();
            if left == 0 {
                return;
            }
            let Some(bytes) = behind.get_mut(gaps.len..) else {
                return debug_assert!(false, "the space ends before the length");
            };
            (rest, until) = (bytes, gaps.between);
        }
    }

    /// Copies `from`, which has as many bytes as there is space for, into the space.
    #[inline]
    pub fn copy_from_slice(&mut self, mut from: &[u8]) {
        self.for_each(|space| {
            let Some((now, later)) = from.split_at_checked(space.len()) else { return };
            space.copy_from_slice(now);
            from = later;
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn prop_gaps_are_where_a_walk_over_all_bytes_finds_them(
            first in 0usize..20, between in 1usize..20, len in 1usize..6, space in 0usize..100, bytes in 0usize..60,
        ) {
            let gaps = Gaps { first, between, len };
            let is_byte = |at: &usize| *at < first || (at - first) % (between + len) >= len;
            prop_assert_eq!(gaps.bytes_in(space), (0..space).filter(is_byte).count());
            let end = (0..).filter(is_byte).take(bytes).last().map_or(0, |last| last + 1);
            prop_assert_eq!(gaps.space_of(bytes), end);

            let mut memory: Vec<u8> = (0..space as u8).collect();
            let n = gaps.bytes_in(space);
            let expected: Vec<u8> = (0..space).filter(is_byte).map(|at| at as u8).collect();
            let mut seen = Vec::new();
            Gapped { bytes: &memory, len: n, gaps }.for_each(|piece| seen.extend_from_slice(piece));
            prop_assert_eq!(&seen, &expected);

            let written = vec![0xff; n];
            GappedMut { bytes: &mut memory, len: n, gaps, sum: Sum::Apart }.copy_from_slice(&written);
            let expected: Vec<u8> = (0..space).map(|at| if is_byte(&at) { 0xff } else { at as u8 }).collect();
            prop_assert_eq!(memory, expected);
        }
    }
}
