//! ULPDUs in frames: read between the markers of MPA, which other framings do not have, and written around them.

use crate::{
    copy::Gapped,
    link::FrameWriter,
    mpa::{
        Announced,
        layout::{BETWEEN_MARKERS, Layout, MARKER_BYTES},
    },
    seq::StreamOffset,
};

/// A received ULPDU: the bytes between an FPDU's length field and its pad. Markers between them are skipped by their
/// position; the bytes are not copied.
#[derive(Debug, Clone, Copy)]
pub struct Ulpdu<'a> {
    raw: &'a [&'a [u8]],
    /// Position in `raw` of the first byte.
    start: usize,
    len: usize,
    /// Bytes of the ULPDU before its first marker; `usize::MAX` without markers.
    to_marker: usize,
}

impl<'a> Ulpdu<'a> {
    /// The ULPDU whose bytes are `pieces`, in order.
    pub fn new(pieces: &'a [&'a [u8]]) -> Self {
        let len = pieces.iter().map(|p| p.len()).sum();
        Self { raw: pieces, start: 0, len, to_marker: usize::MAX }
    }

    /// The ULPDU of `len` bytes from byte `start` of `raw` on, whose first marker comes after `to_marker` of its bytes.
    pub(crate) fn between_markers(raw: &'a [&'a [u8]], start: usize, len: usize, to_marker: usize) -> Self {
        Self { raw, start, len, to_marker }
    }

    /// Bytes of the whole ULPDU.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the ULPDU has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first bytes into `out`; returns their number.
    #[inline]
    pub fn peek(&self, out: &mut [u8]) -> usize {
        let most = self.len.min(out.len());
        self.walk(0, most, |at, bytes| {
            if let Some(to) = out.get_mut(at..at + bytes.len()) {
                to.copy_from_slice(bytes);
            }
        });
        most
    }

    /// Like [`Self::peek`], for a header, which seldom spans a marker or two chunks.
    #[inline]
    pub fn peek_header<const N: usize>(&self, out: &mut [u8; N]) -> usize {
        let first = self.raw.first().and_then(|piece| piece.get(self.start..)?.first_chunk());
        match first {
            Some(bytes) if N <= self.len.min(self.to_marker) => {
                *out = *bytes;
                N
            }
            _ => self.peek(out),
        }
    }

    /// Calls `f(offset, bytes)` for the bytes from `start` on, where `offset` counts from `start`.
    #[inline]
    pub fn for_each(&self, start: usize, f: impl FnMut(usize, &[u8])) {
        self.walk(start, self.len.saturating_sub(start), f);
    }

    /// The bytes from `start` on with the markers between them, if all of them lie in one piece.
    #[inline]
    pub fn gapped(&self, start: usize) -> Option<Gapped<'a>> {
        let [piece] = self.raw else { return None };
        let (at, first) = self.position(start);
        let len = self.len.saturating_sub(start);
        Some(Gapped { bytes: piece.get(at..)?, len, first, span: BETWEEN_MARKERS, gap: MARKER_BYTES })
    }

    /// Position in `raw` of byte `start`, and the bytes from there to the next marker.
    #[inline]
    fn position(&self, start: usize) -> (usize, usize) {
        match start.checked_sub(self.to_marker) {
            None => (self.start + start, self.to_marker - start),
            Some(behind) => {
                let markers = 1 + behind / BETWEEN_MARKERS;
                (self.start + start + MARKER_BYTES * markers, BETWEEN_MARKERS - behind % BETWEEN_MARKERS)
            }
        }
    }

    /// Calls `f(offset, bytes)` for the `len` bytes from `start` on, where `offset` counts from `start`.
    #[inline]
    fn walk(&self, start: usize, len: usize, mut f: impl FnMut(usize, &[u8])) {
        if start + len <= self.to_marker
            && let Some(first) = self.raw.first()
            && let Some(bytes) = first.get(self.start + start..self.start + start + len)
        {
            if len > 0 {
                f(0, bytes);
            }
            return;
        }
        // Position in the current piece of `raw`, which may lie beyond its end, and bytes before the next marker.
        let (mut at, mut to_marker) = self.position(start);
        let mut done = 0;
        for piece in self.raw {
            let Some(mut rest) = piece.get(at..) else {
                at -= piece.len();
                continue;
            };
            at = 0;
            while done < len {
                let (bytes, behind) = rest.split_at(to_marker.min(len - done).min(rest.len()));
                if !bytes.is_empty() {
                    f(done, bytes);
                }
                done += bytes.len();
                to_marker -= bytes.len();
                if to_marker > 0 {
                    break;
                }
                to_marker = BETWEEN_MARKERS;
                let Some((_marker, bytes)) = behind.split_at_checked(MARKER_BYTES) else {
                    at = MARKER_BYTES - behind.len();
                    break;
                };
                rest = bytes;
            }
        }
    }
}

/// Writes one ULPDU into a segment that is being built, and leaves room for the markers.
///
/// Its methods are defined in [`crate::mpa`], which frames the ULPDU.
#[derive(Debug)]
pub struct UlpduWriter<'w, 'f> {
    pub(crate) frame: &'w mut FrameWriter<'f>,
    pub(crate) layout: Layout,
    /// Stream offsets of the start of the FPDU's range and of its next byte.
    pub(crate) start: StreamOffset,
    pub(crate) offset: StreamOffset,
    /// Position in the frame of the start of the FPDU's range.
    pub(crate) position: usize,
    /// Bytes of ULPDU that may still be written, and those written so far.
    pub(crate) room: usize,
    pub(crate) written: usize,
    /// Largest ULPDU in a segment of its own, in bytes.
    pub(crate) mulpdu: usize,
    /// Whether the connection uses CRCs.
    pub(crate) crc: bool,
    /// Whether the frame has a ULPDU Length field of MPA before the ULPDU.
    pub(crate) has_length: bool,
    /// Set when the upper layer has announced the length of the ULPDU.
    pub(crate) announced: Option<Announced>,
    /// The FPDU was written as a whole: nothing is added.
    pub(crate) complete: bool,
}
