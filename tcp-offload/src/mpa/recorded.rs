//! FPDUs in one direction of a recorded stream, for programs that explain captures. The receiver of a connection
//! ([`super::Session`]) needs the start-up frames and every byte; a capture may lack both.

use super::{
    MpaError, deframe,
    layout::{LENGTH_BYTES, Layout, MARKER_BYTES, MARKER_SPACING},
};
use crate::{link::read_at, seq::StreamOffset, ulp::Ulpdu};

/// Reads FPDUs from the bytes of one direction (RFC 5044 sections 4.1 to 4.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedFpdus {
    layout: Layout,
    crc: bool,
}

impl RecordedFpdus {
    /// A direction whose first FPDU, or the marker before it, is at `origin`.
    pub const fn new(origin: StreamOffset, markers: bool, crc: bool) -> Self {
        Self { layout: Layout { origin, markers }, crc }
    }

    /// Whether the direction has markers.
    pub const fn has_markers(&self) -> bool {
        self.layout.markers
    }

    /// Whether the CRCs are checked.
    pub const fn has_crc(&self) -> bool {
        self.crc
    }

    /// Whether an FPDU, or the marker before its length field, can begin at `start`.
    pub const fn can_begin(&self, start: StreamOffset) -> bool {
        start >= self.layout.origin && (start - self.layout.origin).is_multiple_of(4)
    }

    /// Bytes of the FPDU that begins at `start` with `bytes`, including its markers; `None` when its length field is
    /// not complete. `start` must be [possible](Self::can_begin).
    pub fn len(&self, start: StreamOffset, bytes: &[u8]) -> Option<usize> {
        let length = (self.layout.header(start) - start) as usize;
        let &[high, low] = bytes.get(length..)?.first_chunk::<LENGTH_BYTES>()?;
        Some((self.layout.end(start, u16::from_be_bytes([high, low]).into()) - start) as usize)
    }

    /// The ULPDU of the FPDU that begins at `start` and consists of `fpdu`, [`Self::len`] bytes in any number of
    /// pieces. Checks the CRC, if CRCs are in use, and the markers.
    pub fn ulpdu<'a>(&self, start: StreamOffset, fpdu: &'a [&'a [u8]]) -> Result<Ulpdu<'a>, MpaError> {
        if self.crc {
            deframe::verify_crc(fpdu)?;
        }
        let mut length = [0; LENGTH_BYTES];
        read_at(fpdu, (self.layout.header(start) - start) as usize, &mut length);
        deframe::cut(&self.layout, fpdu, start, u16::from_be_bytes(length).into())
    }

    /// The first bytes of the ULPDU of the FPDU that begins at `start`, of which only `captured` is known, and the length of the
    /// whole ULPDU. `None` when its length field is not complete. Neither the CRC nor the markers are checked.
    pub fn begin_of_ulpdu<'a>(
        &self,
        start: StreamOffset,
        captured: &'a [&'a [u8]],
    ) -> Option<(Ulpdu<'a>, usize)> {
        let [first, ..] = captured else { return None };
        let data = self.layout.header(start) + LENGTH_BYTES as u64;
        let skip = (data - start) as usize;
        let length = *first.get(..skip)?.last_chunk::<LENGTH_BYTES>()?;
        let len = usize::from(u16::from_be_bytes(length));
        let raw = captured.iter().map(|piece| piece.len()).sum::<usize>() - skip;
        let to_marker = self.layout.to_marker(data);
        let markers =
            (to_marker..raw).step_by(MARKER_SPACING as usize).map(|at| (raw - at).min(MARKER_BYTES));
        let known = (raw - markers.sum::<usize>()).min(len);
        Some((Ulpdu::between_markers(captured, skip, known, to_marker), len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5044 figure 5: an FPDU of 42 bytes behind the first marker.
    fn figure_5() -> [u8; 52] {
        let mut bytes = [0; 52];
        bytes[5..8].copy_from_slice(&[0x2a, 0x41, 0x43]);
        bytes[0x13] = 1;
        bytes[48..].copy_from_slice(&[0x52, 0x23, 0x99, 0x83]);
        bytes
    }

    #[test]
    fn rfc5044_s4_4_recorded_fpdu_of_figure_5() {
        let fpdus = RecordedFpdus::new(24, true, true);
        let bytes = figure_5();
        assert!(fpdus.can_begin(24) && !fpdus.can_begin(26) && !fpdus.can_begin(20));
        for cut in 0..=bytes.len() {
            assert_eq!(fpdus.len(24, &bytes[..cut]), (cut >= 6).then_some(52));
        }
        let mut begin = [0; 2];
        assert_eq!(fpdus.ulpdu(24, &[&bytes[..9], &bytes[9..]]).unwrap().peek(&mut begin), 2);
        assert_eq!(begin, [0x41, 0x43]);
    }

    #[test]
    fn rfc5044_s4_3_the_begin_of_a_cut_fpdu_has_no_bytes_of_markers() {
        let mut bytes = vec![0; 1100];
        bytes[4..6].copy_from_slice(&1000_u16.to_be_bytes());
        for marker in [0, 512, 1024] {
            bytes[marker..marker + 4].fill(0xff);
        }
        let fpdus = RecordedFpdus::new(24, true, true);
        for cut in 0..1018 {
            let pieces = [&bytes[..cut]];
            let found = fpdus.begin_of_ulpdu(24, &pieces);
            let Some((ulpdu, len)) = found else {
                assert!(cut < 6, "{cut}");
                continue;
            };
            let expected = cut - 6 - cut.saturating_sub(512).min(4);
            assert_eq!((ulpdu.len(), len), (expected.min(1000), 1000), "{cut}");
            let mut copy = vec![1; 1000];
            assert_eq!(ulpdu.peek(&mut copy), ulpdu.len(), "{cut}");
            assert!(copy[..ulpdu.len()].iter().all(|byte| *byte == 0), "{cut}");
        }
    }

    #[test]
    fn rfc5044_s4_4_recorded_fpdu_with_a_wrong_crc_or_marker() {
        let mut bytes = figure_5();
        bytes[40] ^= 1;
        let (with, without) = (RecordedFpdus::new(0, true, true), RecordedFpdus::new(0, true, false));
        assert_eq!(with.ulpdu(0, &[&bytes]).unwrap_err(), MpaError::Crc);
        assert_eq!(without.ulpdu(0, &[&bytes]).unwrap().len(), 42);
        bytes[3] = 8;
        assert_eq!(without.ulpdu(0, &[&bytes]).unwrap_err(), MpaError::MarkerMismatch);
    }
}
