//! Building one FPDU in a transmit frame: the methods of [`UlpduWriter`] for the upper layer, and the
//! framing around what it writes.

use super::layout::{CRC_BYTES, LENGTH_BYTES, Layout, MARKER_BYTES};
use crate::{link::FrameWriter, seq::StreamOffset, ulp::UlpduWriter};

impl<'w, 'f> UlpduWriter<'w, 'f> {
    /// A writer of the FPDU that begins at `start` of the stream and at the write position of `frame`.
    /// Nothing is written before the upper layer writes. `None` when not even an empty FPDU fits.
    pub(crate) fn begin(
        frame: &'w mut FrameWriter<'f>,
        layout: Layout,
        start: StreamOffset,
        mulpdu: usize,
    ) -> Option<Self> {
        let room = layout.largest_ulpdu(start, frame.room())?.min(mulpdu);
        let position = frame.position();
        Some(Self { frame, layout, start, offset: start, position, room, written: 0, mulpdu })
    }

    /// Bytes of ULPDU that can still be written into this segment; whoever has a larger ULPDU writes
    /// nothing and answers [`crate::ulp::Pulled::Nothing`].
    pub fn room(&self) -> usize {
        self.room
    }

    /// MULPDU: the largest ULPDU that fits a full segment of its own (RFC 5044 section 4.5), at least
    /// 128 bytes. Long messages are cut into ULPDUs of this size.
    pub fn mulpdu(&self) -> usize {
        self.mulpdu
    }

    /// Bytes of ULPDU written so far.
    pub fn written(&self) -> usize {
        self.written
    }

    /// Where in the stream the next byte of the ULPDU will lie, if no marker comes first.
    pub fn offset(&self) -> StreamOffset {
        match self.written {
            0 => self.layout.header(self.start) + LENGTH_BYTES as u64,
            _ => self.offset,
        }
    }

    /// Where in the stream the FPDU ends if nothing more is written: the offset right behind its CRC. Once
    /// the peer has acknowledged the stream up to here, it has the whole FPDU.
    pub fn end(&self) -> StreamOffset {
        self.layout.end(self.start, self.written)
    }

    /// Appends `bytes`, which must fit into [`Self::room`]: what does not is not written.
    pub fn put(&mut self, bytes: &[u8]) {
        self.fill(bytes.len(), |at, space| {
            if let Some(from) = bytes.get(at..at + space.len()) {
                space.copy_from_slice(from);
            }
        });
    }

    /// Appends `len` bytes, which must fit into [`Self::room`]: calls `f(at, space)` for each contiguous
    /// piece of the frame's memory between markers, where `at` counts from 0 to `len`; `f` writes every
    /// byte of `space`.
    pub fn fill(&mut self, len: usize, mut f: impl FnMut(usize, &mut [u8])) {
        debug_assert!(len <= self.room, "the upper layer asked for {len} bytes, {} are left", self.room);
        let len = len.min(self.room);
        self.write_header();
        let mut at = 0;
        while at < len {
            let space = self.space(len - at);
            if space.is_empty() {
                debug_assert!(false, "the frame is shorter than the room that was computed from it");
                break;
            }
            f(at, space);
            at += space.len();
        }
        self.room -= at;
        self.written += at;
    }

    /// Completes the FPDU: pad, ULPDU length, CRC (zero without). Returns the bytes of its range.
    pub(crate) fn finish(mut self, crc: bool) -> usize {
        self.write_header();
        let pad = Layout::body(self.written) - LENGTH_BYTES - self.written - CRC_BYTES;
        for _ in 0..pad {
            self.write(&[0]);
        }
        let header = (self.layout.header(self.start) - self.start) as usize;
        self.frame.patch(self.position + header, &(self.written as u16).to_be_bytes());
        // A marker that is due right here stands before the CRC and is covered by it (RFC 5044 section 4.4).
        self.write_marker();
        let sum = if crc { self.sum() } else { 0 };
        self.write(&sum.to_le_bytes());
        (self.offset - self.start) as usize
    }

    /// The CRC of everything from the range's start, markers included, to the write position.
    fn sum(&self) -> u32 {
        let end = self.position + (self.offset - self.start) as usize;
        self.frame.pieces(self.position, end).iter().fold(0, |sum, piece| crc32c::crc32c_append(sum, piece))
    }

    /// Leaves room for the ULPDU Length field, behind the marker that may precede it.
    fn write_header(&mut self) {
        if self.offset == self.start {
            self.write(&[0; LENGTH_BYTES]);
        }
    }

    /// Writes `bytes` around the markers.
    fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let space = self.space(bytes.len());
            if space.is_empty() {
                break;
            }
            let (now, later) = bytes.split_at(space.len());
            space.copy_from_slice(now);
            bytes = later;
        }
    }

    /// The next contiguous memory up to a marker, a chunk's end, or `max` bytes; empty only for `max` 0 or
    /// when the frame is full.
    fn space(&mut self, max: usize) -> &mut [u8] {
        self.write_marker();
        // A marker stood at `offset` if at all, so the next one is as far as from one byte later.
        let max = max.min(self.layout.to_marker(self.offset + 1).saturating_add(1));
        let space = self.frame.space(max);
        self.offset += space.len() as u64;
        space
    }

    /// Writes the marker that is due at the write position, if one is (RFC 5044 sections 4.2 and 4.3).
    fn write_marker(&mut self) {
        if self.layout.at_marker(self.offset) {
            let header = self.layout.header(self.start);
            let pointer = self.offset.saturating_sub(header) as u16;
            let mut marker = [0; MARKER_BYTES];
            marker[2..].copy_from_slice(&pointer.to_be_bytes());
            self.offset += self.frame.put(&marker) as u64;
        }
    }
}
