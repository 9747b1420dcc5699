//! [`Coverage`]: which bytes of an untagged message its delivered segments have filled.
//!
//! RFC 5041 section 5.4 allows the delivery of a message only when all its segments are placed. The sum of their
//! lengths does not show that: segments may overlap (section 5.3: a segment may be placed more than once), and an
//! increasing offset is only a SHOULD for the sender. Therefore the exact set of bytes is kept, as a bounded number
//! of disjoint ranges.

use smallvec::SmallVec;

/// Largest number of disjoint ranges of one message. A sender that follows the SHOULD of RFC 5041 section 5.3 needs
/// one.
const MAX_RANGES: usize = 16;

/// The message has more ranges at once than [`Coverage`] keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TooScattered;

/// The message cannot be delivered: it has ended, but not every byte is filled, or it has too many ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Incomplete;

/// The bytes of one message that its delivered segments have filled.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// Half-open ranges in ascending order, with a hole between any two.
    ranges: SmallVec<[(u64, u64); 1]>,
}

impl Coverage {
    /// Adds the bytes of a delivered segment, from `start` up to `end`. Returns whether the message is complete, and then forgets
    /// its ranges. It is if this is its `last` segment: that one has the highest offset (RFC 5041 section 4.1), so its end is the
    /// end of the message, and every byte before it must have been filled (section 5.4).
    #[inline]
    pub(crate) fn fill(&mut self, start: u64, end: u64, last: bool) -> Result<bool, Incomplete> {
        let only_segment = last && start == 0 && self.ranges.is_empty();
        if only_segment { Ok(true) } else { self.fill_part(start, end, last) }
    }

    #[inline(never)]
    fn fill_part(&mut self, start: u64, end: u64, last: bool) -> Result<bool, Incomplete> {
        self.add(start, end).map_err(|TooScattered| Incomplete)?;
        if !last {
            return Ok(false);
        }
        if !self.is_whole(end) {
            return Err(Incomplete);
        }
        self.clear();
        Ok(true)
    }

    /// Adds the bytes from `start` up to `end`.
    fn add(&mut self, start: u64, end: u64) -> Result<(), TooScattered> {
        if start >= end {
            return Ok(());
        }
        // The ranges that touch the new one are merged with it.
        let first = self.ranges.partition_point(|&(_, range_end)| range_end < start);
        let behind = self.ranges.partition_point(|&(range_start, _)| range_start <= end);
        let Some(&(first_start, _)) = self.ranges.get(first).filter(|_| first < behind) else {
            if self.ranges.len() >= MAX_RANGES {
                return Err(TooScattered);
            }
            self.ranges.insert(first, (start, end));
            return Ok(());
        };
        let last_end = self.ranges.get(behind - 1).map_or(end, |&(_, last_end)| last_end);
        if let Some(merged) = self.ranges.get_mut(first) {
            *merged = (first_start.min(start), last_end.max(end));
        }
        self.ranges.drain(first + 1..behind);
        Ok(())
    }

    /// Whether exactly the first `len` bytes are filled.
    pub(crate) fn is_whole(&self, len: u64) -> bool {
        match self.ranges.as_slice() {
            [] => len == 0,
            [range] => *range == (0, len),
            _ => false,
        }
    }

    /// Forgets all ranges, for the next message.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A bitmap is the oracle.
        #[test]
        fn prop_coverage_is_the_union_of_the_segments(
            segments in prop::collection::vec((0u64..60, 0u64..12), 0..40),
            len in 0u64..72,
        ) {
            let (mut coverage, mut bitmap) = (Coverage::default(), [false; 80]);
            for (start, bytes) in segments {
                prop_assert_eq!(coverage.add(start, start + bytes), Ok(()));
                bitmap[start as usize..(start + bytes) as usize].fill(true);
                prop_assert!(coverage.ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
            }
            let whole = bitmap.iter().enumerate().all(|(at, filled)| *filled == ((at as u64) < len));
            prop_assert_eq!(coverage.is_whole(len), whole);
        }
    }

    #[test]
    fn the_number_of_ranges_is_bounded_and_existing_ranges_can_still_grow() {
        let mut coverage = Coverage::default();
        for at in 0..MAX_RANGES as u64 {
            coverage.add(at * 10, at * 10 + 1).unwrap();
        }
        assert_eq!(coverage.add(1000, 1001), Err(TooScattered));
        coverage.add(1, 10).unwrap();
        coverage.add(1000, 1001).unwrap();
        assert_eq!(coverage.ranges.len(), MAX_RANGES);
    }
}
