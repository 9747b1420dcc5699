//! ULPDUs in frames: read between the markers of MPA, which other framings do not have, and written around them.

use crate::{
    copy::Gapped,
    link::FrameWriter,
    mpa::{
        Announced,
        layout::{BETWEEN_MARKERS, Layout, MARKER_BYTES, markers_from},
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
    #[inline(never)]
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
        match self.header() {
            Some(bytes) => {
                *out = *bytes;
                N
            }
            None => self.peek(out),
        }
    }

    /// The first bytes, if neither a marker nor the end of a chunk lies between them.
    #[inline]
    pub fn header<const N: usize>(&self) -> Option<&'a [u8; N]> {
        if N > self.len.min(self.to_marker) {
            return None;
        }
        self.raw.first()?.get(self.start..)?.first_chunk()
    }

    /// Calls `f(offset, bytes)` for the bytes from `start` on, where `offset` counts from `start`.
    #[inline]
    pub fn for_each(&self, start: usize, f: impl FnMut(usize, &[u8])) {
        self.walk(start, self.len.saturating_sub(start), f);
    }

    /// The bytes from `start` on with the markers between them, if they lie in one chunk, as they nearly always do.
    #[expect(clippy::inline_always, reason = "each ULPDU calls it once, and its result is large")]
    #[inline(always)]
    pub fn one_run(&self, start: usize) -> Option<Gapped<'a>> {
        let [piece] = self.raw else { return None };
        let (at, to_marker) = self.position(start);
        let bytes = piece.get(at..).unwrap_or_default();
        Some(Gapped { bytes, len: self.len.saturating_sub(start), gaps: markers_from(to_marker) })
    }

    /// Calls `f(offset, bytes)` for the bytes from `start` on in each chunk, with the markers between them. `offset` counts from
    /// `start`.
    pub fn for_each_run(&self, start: usize, f: impl FnMut(usize, &Gapped<'a>)) {
        self.runs(start, self.len.saturating_sub(start), f);
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

    /// [`Self::for_each`] for the `len` bytes from `start` on.
    #[inline]
    fn walk(&self, start: usize, len: usize, mut f: impl FnMut(usize, &[u8])) {
        self.runs(start, len, |mut at, run| {
            run.for_each(|bytes| {
                f(at, bytes);
                at += bytes.len();
            });
        });
    }

    /// [`Self::for_each_run`] for the `len` bytes from `start` on.
    #[inline(never)]
    fn runs(&self, start: usize, len: usize, mut f: impl FnMut(usize, &Gapped<'a>)) {
        let (mut before, mut done) = (0, 0);
        for piece in self.raw {
            if done == len {
                break;
            }
            let (at, to_marker) = self.position(start + done);
            let bytes = piece.get(at - before..).unwrap_or_default();
            let gaps = markers_from(to_marker);
            let n = gaps.bytes_in(bytes.len()).min(len - done);
            if n > 0 {
                f(done, &Gapped { bytes, len: n, gaps });
            }
            done += n;
            before += piece.len();
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
