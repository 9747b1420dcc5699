//! Positions and lengths in the stream: of markers, of FPDUs with their markers, and MULPDU (RFC 5044 sections 4.1,
//! 4.3 and 4.5). No code here reads or writes the bytes.

use crate::{copy::Gaps, framing::Mulpdu, seq::StreamOffset};

/// Bytes from the start of one marker to the start of the next (RFC 5044 section 4.3).
pub(crate) const MARKER_SPACING: u64 = 512;

/// Bytes of a marker: two reserved, two of FPDUPTR.
pub(crate) const MARKER_BYTES: usize = 4;

/// Bytes from the end of one marker to the start of the next.
pub(crate) const BETWEEN_MARKERS: usize = MARKER_SPACING as usize - MARKER_BYTES;

/// The markers after a position from which `to_marker` bytes lie before the first of them.
#[inline]
pub(crate) const fn markers_from(to_marker: usize) -> Gaps {
    Gaps { first: to_marker, between: BETWEEN_MARKERS, len: MARKER_BYTES }
}

/// Bytes of the ULPDU Length field.
pub(crate) const LENGTH_BYTES: usize = 2;

/// Bytes of the CRC field.
pub(crate) const CRC_BYTES: usize = 4;

/// The smallest and largest MULPDU (RFC 5044 section 3).
const MULPDU_RANGE: (usize, usize) = (128, 64768);

/// Layout of the FPDUs in one direction of a stream.
///
/// An FPDU's *range* begins with the marker right before its ULPDU Length field, when there is one (that marker
/// belongs to it, RFC 5044 section 4.3), and ends after its CRC. Ranges follow one another without a gap and start at
/// multiples of 4 from [`Self::origin`], as markers do, so a marker never cuts a length field or a CRC field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Layout {
    /// Start of the first FPDU's range, right after the start-up frame.
    pub origin: StreamOffset,
    /// Whether markers stand at `origin` and every 512 bytes from there.
    pub markers: bool,
}

impl Layout {
    /// Bytes from the last marker position at or before `offset` to `offset`.
    const fn since_marker(self, offset: StreamOffset) -> u64 {
        offset.wrapping_sub(self.origin) % MARKER_SPACING
    }

    /// Whether a marker begins at `offset`.
    pub const fn at_marker(self, offset: StreamOffset) -> bool {
        self.markers && self.since_marker(offset) == 0
    }

    /// Bytes from `offset` to the next marker that begins at or after it; `usize::MAX` without markers.
    pub const fn to_marker(self, offset: StreamOffset) -> usize {
        if !self.markers {
            return usize::MAX;
        }
        ((MARKER_SPACING - self.since_marker(offset)) % MARKER_SPACING) as usize
    }

    /// Start of the last marker at or before `offset`. Valid only with markers and from `origin` on.
    pub const fn marker_before(self, offset: StreamOffset) -> StreamOffset {
        offset - self.since_marker(offset)
    }

    /// Offset of the ULPDU Length field of the FPDU whose range begins at `start`.
    pub const fn header(self, start: StreamOffset) -> StreamOffset {
        if self.at_marker(start) { start + MARKER_BYTES as u64 } else { start }
    }

    /// Start of the range of the FPDU whose ULPDU Length field lies at `header`. `None` when no length field can lie
    /// there.
    pub fn range_of_header(self, header: StreamOffset) -> Option<StreamOffset> {
        let from_origin = header.checked_sub(self.origin)?;
        if from_origin % 4 != 0 || self.at_marker(header) {
            return None;
        }
        match from_origin.checked_sub(MARKER_BYTES as u64) {
            Some(before) if self.markers && before % MARKER_SPACING == 0 => Some(self.origin + before),
            _ => Some(header),
        }
    }

    /// Bytes of an FPDU without its markers: length field, ULPDU, pad and CRC (RFC 5044 section 4.1).
    pub const fn body(ulpdu: usize) -> usize {
        // `next_multiple_of` would test for a remainder.
        ((LENGTH_BYTES + ulpdu + 3) & !3) + CRC_BYTES
    }

    /// End of the range of an FPDU that begins at `start` and has a ULPDU of `ulpdu` bytes.
    pub const fn end(self, start: StreamOffset, ulpdu: usize) -> StreamOffset {
        start + with_markers(Self::body(ulpdu), self.to_marker(start)) as u64
    }

    /// The largest ULPDU whose FPDU fits into `room` bytes from `start`; `None` when not even an empty one
    /// fits.
    #[inline]
    pub fn largest_ulpdu(self, start: StreamOffset, room: usize) -> Option<usize> {
        if room < Self::body(0) {
            return None;
        }
        let range = room & !3;
        let before = self.to_marker(start);
        let markers = if range > before { (range - before).div_ceil(MARKER_SPACING as usize) } else { 0 };
        let body = range.checked_sub(MARKER_BYTES * markers)?;
        (body >= Self::body(0)).then(|| (body - LENGTH_BYTES - CRC_BYTES).min(u16::MAX as usize))
    }

    /// MULPDU for segments of `emss` bytes (RFC 5044 section 4.5). Raised to its minimum, it need not fit them.
    pub fn mulpdu(self, emss: usize) -> Mulpdu {
        let markers = if self.markers { emss.div_ceil(MARKER_SPACING as usize) } else { 0 };
        let overhead = LENGTH_BYTES + CRC_BYTES + MARKER_BYTES * markers + emss % 4;
        let most = emss.saturating_sub(overhead);
        let (bytes, fits) = (most.clamp(MULPDU_RANGE.0, MULPDU_RANGE.1), most >= MULPDU_RANGE.0);
        Mulpdu { emss, bytes, fits: if fits { emss } else { usize::MAX } }
    }
}

/// Bytes of the range of an FPDU whose `body` begins `to_marker` bytes before a marker position.
#[expect(
    clippy::manual_div_ceil,
    reason = "`div_ceil` tests for a remainder, because the sum might overflow"
)]
#[inline]
pub(crate) const fn with_markers(body: usize, to_marker: usize) -> usize {
    let Some(behind) = body.checked_sub(to_marker) else { return body };
    // A body has 17 bits; dividing 64 takes more instructions.
    let markers = (behind as u32 + (BETWEEN_MARKERS as u32 - 1)) / BETWEEN_MARKERS as u32;
    body + MARKER_BYTES * markers as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Lays an FPDU out byte by byte, as RFC 5044 section 4.3 describes.
    fn end_by_walking(layout: &Layout, start: u64, ulpdu: usize) -> u64 {
        let mut at = start;
        for _ in 0..Layout::body(ulpdu) {
            if layout.at_marker(at) {
                at += 4;
            }
            at += 1;
        }
        at
    }

    #[test]
    fn rfc5044_s4_5_mulpdu_formulas() {
        let with = Layout { origin: 0, markers: true };
        let without = Layout { origin: 0, markers: false };
        assert_eq!(with.mulpdu(1448).bytes, 1448 - (6 + 12));
        assert_eq!(with.mulpdu(1459).bytes, 1459 - (6 + 12 + 3));
        assert_eq!(without.mulpdu(1448).bytes, 1442);
        assert_eq!(without.mulpdu(1447).bytes, 1447 - 6 - 3);
        assert_eq!(with.mulpdu(100).bytes, 128, "never below 128");
        assert_eq!(without.mulpdu(65535).bytes, 64768, "never above 64768");
    }

    #[test]
    fn rfc5044_s4_3_first_marker_stands_before_the_first_fpdu() {
        let layout = Layout { origin: 24, markers: true };
        assert!(layout.at_marker(24) && layout.at_marker(536) && !layout.at_marker(512));
        assert_eq!(layout.header(24), 28);
        assert_eq!(layout.range_of_header(28), Some(24));
        assert_eq!(layout.range_of_header(24), None);
        assert_eq!(layout.range_of_header(32), Some(32));
        assert_eq!(layout.range_of_header(33), None);
        assert_eq!(layout.range_of_header(20), None);
    }

    proptest! {
        #[test]
        fn prop_layout_end_agrees_with_walking(
            origin in 0u64..1000, words in 0u64..600, ulpdu in 0usize..3000, markers: bool,
        ) {
            let layout = Layout { origin, markers };
            let start = origin + 4 * words;
            prop_assert_eq!(layout.end(start, ulpdu), end_by_walking(&layout, start, ulpdu));
        }

        #[test]
        fn prop_layout_largest_ulpdu_fits_and_one_more_does_not(
            origin in 0u64..1000, words in 0u64..600, room in 0usize..4000, markers: bool,
        ) {
            let layout = Layout { origin, markers };
            let start = origin + 4 * words;
            match layout.largest_ulpdu(start, room) {
                Some(ulpdu) => {
                    prop_assert!(layout.end(start, ulpdu) <= start + room as u64);
                    prop_assert!(layout.end(start, ulpdu + 1) > start + room as u64);
                }
                None => prop_assert!(layout.end(start, 0) > start + room as u64),
            }
        }

        #[test]
        fn prop_layout_mulpdu_fits_a_segment_wherever_it_begins(
            words in 0u64..600, emss in 1usize..9000, more in 1usize..100, markers: bool,
        ) {
            let layout = Layout { origin: 0, markers };
            let (start, mulpdu) = (4 * words, layout.mulpdu(emss));
            // `fits` is the largest number when nothing fits.
            if let Some(room) = mulpdu.fits.checked_add(more) {
                prop_assert!(layout.end(start, mulpdu.bytes) <= start + emss as u64);
                prop_assert!(layout.largest_ulpdu(start, room).is_some_and(|most| most >= mulpdu.bytes));
            }
            prop_assert!(mulpdu.fits == emss || emss < 200);
        }
    }
}
