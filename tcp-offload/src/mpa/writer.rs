//! Builds one FPDU in a transmit frame: the methods of [`UlpduWriter`] for the upper layer, and the framing of its
//! ULPDU.

use super::layout::{CRC_BYTES, LENGTH_BYTES, Layout, MARKER_BYTES, MARKER_SPACING, markers_from};
use crate::{
    copy::{self, GappedMut, Sum},
    framing::Mulpdu,
    link::FrameWriter,
    seq::StreamOffset,
    ulp::UlpduWriter,
};

/// An FPDU whose length was announced: its CRC is computed chunk by chunk, while the bytes are in the first-level cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Announced {
    /// Bytes of the ULPDU.
    ulpdu: usize,
    /// The CRC of the range's bytes before `summed`.
    crc: u32,
    /// Position in the frame up to which `crc` covers the bytes.
    summed: usize,
}

impl<'w, 'f> UlpduWriter<'w, 'f> {
    /// A writer of the FPDU that begins at `start` of the stream and at the write position of `frame`, with a CRC if `crc`.
    /// Nothing is written before the upper layer writes. `None` when not even an empty FPDU fits.
    #[inline]
    pub(crate) fn begin(
        frame: &'w mut FrameWriter<'f>,
        layout: Layout,
        start: StreamOffset,
        mulpdu: Mulpdu,
        crc: bool,
    ) -> Option<Self> {
        let room = if frame.room() >= mulpdu.fits {
            mulpdu.bytes
        } else {
            layout.largest_ulpdu(start, frame.room())?.min(mulpdu.bytes)
        };
        let position = frame.position();
        Some(Self {
            frame,
            layout,
            start,
            offset: start,
            position,
            room,
            written: 0,
            mulpdu: mulpdu.bytes,
            crc,
            has_length: true,
            announced: None,
            complete: false,
        })
    }

    /// A writer of `room` bytes of a frame without markers, which begins with the ULPDU.
    pub(crate) fn begin_segment(
        frame: &'w mut FrameWriter<'f>,
        start: StreamOffset,
        mulpdu: usize,
        room: usize,
    ) -> Self {
        let position = frame.position();
        Self {
            frame,
            layout: Layout::default(),
            start,
            offset: start,
            position,
            room,
            written: 0,
            mulpdu,
            crc: false,
            has_length: false,
            announced: None,
            complete: false,
        }
    }

    /// Appends bytes that do not belong to the ULPDU to a frame without markers.
    pub(crate) fn put_raw(&mut self, bytes: &[u8]) {
        self.offset += self.frame.put(bytes) as u64;
    }

    /// Bytes of ULPDU that can still be written into this segment. An upper layer with a larger ULPDU writes nothing
    /// and returns [`crate::ulp::Pulled::Nothing`].
    #[inline]
    pub fn room(&self) -> usize {
        self.room
    }

    /// MULPDU: the largest ULPDU, in bytes, that fits a full segment of its own (RFC 5044 section 4.5), at least 128
    /// bytes. Long messages are cut into ULPDUs of this size.
    #[inline]
    pub fn mulpdu(&self) -> usize {
        self.mulpdu
    }

    /// Bytes of ULPDU written so far.
    pub fn written(&self) -> usize {
        self.written
    }

    /// Stream offset of the next byte of the ULPDU, unless a marker comes first.
    pub fn offset(&self) -> StreamOffset {
        match self.written {
            0 if self.has_length => self.layout.header(self.start) + LENGTH_BYTES as u64,
            _ => self.offset,
        }
    }

    /// Stream offset of the end of the FPDU, right after its CRC, if nothing more is written. A peer that has
    /// acknowledged the stream up to here has the whole FPDU.
    #[inline]
    pub fn end(&self) -> StreamOffset {
        if self.complete {
            self.offset
        } else if self.has_length {
            self.layout.end(self.start, self.written)
        } else {
            self.start + (self.written.next_multiple_of(4) + CRC_BYTES) as u64
        }
    }

    /// Announces, before anything is written, that the ULPDU will have `len` bytes. The CRC, which covers the length
    /// first, is then computed after each chunk of the frame. Without an announcement, or when a different number of bytes is
    /// written, it is computed at the end.
    pub fn announce(&mut self, len: usize) {
        if self.crc && self.offset == self.start && len <= self.room {
            self.announced = Some(Announced { ulpdu: len, crc: 0, summed: self.position });
        }
    }

    /// Writes a whole FPDU at once if nothing was written before, and it has no markers and fits the current chunk; else writes
    /// nothing and returns false, and [`Self::put_whole`] may write it. Its ULPDU has `header` and `len` bytes, which `f(space)`
    /// writes.
    #[inline]
    pub fn put_unmarked<const N: usize>(
        &mut self,
        header: &[u8; N],
        len: usize,
        f: &mut impl FnMut(&mut GappedMut<'_>),
    ) -> bool {
        let ulpdu = N + len;
        let range = Layout::body(ulpdu);
        if !self.has_length
            || self.offset != self.start
            || ulpdu > self.room
            || range > self.layout.to_marker(self.start)
        {
            return false;
        }
        let Some(fpdu) = self.frame.contiguous(range) else { return false };
        put_fpdu(fpdu, 0, usize::MAX, self.crc, header, len, f);
        self.end_whole(ulpdu, range);
        true
    }

    /// Writes a whole FPDU at once: a ULPDU of `header` and `len` bytes. `f(space)` writes these bytes chunk by chunk, which is
    /// once unless the FPDU crosses the end of a chunk. Returns false, and has written nothing, when something was written before,
    /// the FPDU does not fit, or its first fields have a marker between them or cross the end of a chunk: the other methods write
    /// it then.
    #[inline]
    pub fn put_whole<const N: usize>(
        &mut self,
        header: &[u8; N],
        len: usize,
        f: &mut impl FnMut(&mut GappedMut<'_>),
    ) -> bool {
        let ulpdu = N + len;
        if !self.has_length || self.offset != self.start || ulpdu > self.room {
            return false;
        }
        // The first fields, after the marker that may precede them, and the bytes from them to the next marker.
        let to_marker = self.layout.to_marker(self.start);
        let marker = if to_marker == 0 { MARKER_BYTES } else { 0 };
        let fields = marker + LENGTH_BYTES + N;
        let next_marker = if to_marker == 0 { MARKER_SPACING as usize } else { to_marker };
        let Some(first) = next_marker.checked_sub(fields) else { return false };
        let range = (self.layout.end(self.start, ulpdu) - self.start) as usize;
        if let Some(fpdu) = self.frame.contiguous(range) {
            put_fpdu(fpdu, marker, first, self.crc, header, len, f);
            self.end_whole(ulpdu, range);
            return true;
        }
        let Some(space) = self.frame.contiguous(fields) else { return false };
        put_fields(space, marker, ulpdu, header);
        self.offset += fields as u64;
        (self.written, self.room) = (N, self.room - N);
        self.announced = self.crc.then_some(Announced { ulpdu, crc: 0, summed: self.position });
        self.fill_runs(len, f);
        true
    }

    /// Appends `bytes`, which must fit into [`Self::room`]; bytes that do not fit are not written.
    #[inline]
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
    #[inline]
    pub fn fill(&mut self, len: usize, mut f: impl FnMut(usize, &mut [u8])) {
        let mut at = 0;
        self.fill_runs(len, |run| {
            run.for_each(|space| {
                f(at, space);
                at += space.len();
            });
        });
    }

    /// Appends `len` bytes, which must fit into [`Self::room`]: calls `f(space)` for the space in each chunk of the frame, between
    /// markers; `f` writes every byte of it. The bytes are added to the CRC of an announced ULPDU, by `f` if it can.
    pub fn fill_runs(&mut self, len: usize, mut f: impl FnMut(&mut GappedMut<'_>)) {
        let len = self.begin_bytes(len);
        let header = self.layout.header(self.start);
        let mut at = 0;
        while at < len {
            self.write_marker();
            self.sum_written();
            let (distance, gaps) = (self.offset - header, markers_from(self.layout.to_marker(self.offset)));
            let rest = self.frame.rest_of_chunk();
            let n = gaps.bytes_in(rest.len()).min(len - at);
            let used = gaps.space_of(n);
            if n == 0 {
                break;
            }
            let bytes = rest.get_mut(..used).unwrap_or_default();
            let number = marker_number(distance.wrapping_add(gaps.first as u64));
            let wanted = |before: Announced| Sum::Wanted { crc: before.crc, number };
            let sum = self.announced.map_or(Sum::Apart, wanted);
            let mut space = GappedMut { bytes, len: n, gaps, sum };
            f(&mut space);
            match (space.sum, &mut self.announced) {
                (Sum::Done(crc), Some(sum)) => (sum.crc, sum.summed) = (crc, sum.summed + used),
                _ => put_markers(bytes, gaps.first, distance),
            }
            at += n;
            self.frame.advance(used);
            self.offset += used as u64;
            self.sum_written();
        }
        self.end_bytes(len, at);
    }

    /// Discards the ULPDU, of which some or all bytes were written: another one may be written instead. For bytes that turn out not to
    /// be readable.
    #[cold]
    pub fn discard(&mut self) {
        self.frame.rewind(self.position);
        let space = self.frame.room();
        let room = if self.has_length {
            self.layout.largest_ulpdu(self.start, space).unwrap_or(0)
        } else {
            (space & !3).saturating_sub(CRC_BYTES)
        };
        self.offset = self.start;
        (self.room, self.written) = (room.min(self.mulpdu), 0);
        (self.announced, self.complete) = (None, false);
    }

    /// Prepares for `len` more bytes of ULPDU. Returns how many of them may be written.
    #[inline]
    fn begin_bytes(&mut self, len: usize) -> usize {
        debug_assert!(len <= self.room, "the upper layer asked for {len} bytes, {} are left", self.room);
        self.write_header();
        len.min(self.room)
    }

    /// Records that a whole FPDU was written: a ULPDU of `ulpdu` bytes in a range of `range` bytes.
    #[inline]
    fn end_whole(&mut self, ulpdu: usize, range: usize) {
        self.offset += range as u64;
        (self.written, self.room, self.complete) = (ulpdu, 0, true);
    }

    /// Records that `done` of `len` bytes of ULPDU were written.
    #[inline]
    fn end_bytes(&mut self, len: usize, done: usize) {
        debug_assert_eq!(len, done, "the frame is shorter than the room that was computed from it");
        self.room -= done;
        self.written += done;
    }

    /// Completes the FPDU with pad, ULPDU length and CRC (zero when the connection uses none). Returns the length of
    /// its range in bytes.
    #[inline]
    pub(crate) fn finish(&mut self) -> usize {
        if self.complete { (self.offset - self.start) as usize } else { self.write_trailer() }
    }

    fn write_trailer(&mut self) -> usize {
        self.write_header();
        let pad = Layout::body(self.written) - LENGTH_BYTES - self.written - CRC_BYTES;
        if pad > 0 {
            self.offset += self.frame.put([0; 3].get(..pad).unwrap_or_default()) as u64;
        }
        if self.announced.is_none_or(|announced| announced.ulpdu != self.written) {
            let header = (self.layout.header(self.start) - self.start) as usize;
            self.frame.patch(self.position + header, &(self.written as u16).to_be_bytes());
            // The CRC covers the length, so it is computed again from the start.
            self.announced =
                self.crc.then_some(Announced { ulpdu: self.written, crc: 0, summed: self.position });
        }
        // A marker that is due here comes before the CRC and is covered by it (RFC 5044 section 4.4).
        self.write_marker();
        self.sum_written();
        let crc = self.announced.map_or(0, |announced| announced.crc);
        self.put_field(crc.to_le_bytes());
        (self.offset - self.start) as usize
    }

    /// Position in the frame up to which the FPDU is written.
    #[inline]
    fn written_to(&self) -> usize {
        self.position + (self.offset - self.start) as usize
    }

    /// Adds the bytes written since the last call to the CRC of an announced ULPDU.
    #[inline]
    fn sum_written(&mut self) {
        let to = self.written_to();
        let Some(Announced { crc, summed, .. }) = &mut self.announced else { return };
        if to == *summed {
            return;
        }
        if let Some(bytes) = self.frame.written_last(to - *summed) {
            *crc = copy::crc32c(*crc, bytes);
        } else {
            self.frame.for_each(*summed, to, |piece| *crc = copy::crc32c(*crc, piece));
        }
        *summed = to;
    }

    /// Writes the ULPDU Length field, after the marker that may precede it: the announced length, or a placeholder.
    #[inline]
    fn write_header(&mut self) {
        if self.offset == self.start && self.has_length {
            self.write_marker();
            let len = self.announced.map_or(0, |announced| announced.ulpdu as u16);
            self.put_field(len.to_be_bytes());
        }
    }

    /// Writes a field, in which no marker can lie: fields end at multiples of 4, or at the first byte of the ULPDU, and
    /// markers begin at multiples of 4.
    #[inline]
    fn put_field<const N: usize>(&mut self, field: [u8; N]) {
        self.offset += self.frame.put_field(field) as u64;
    }

    /// Writes the marker that is due at the write position, if one is (RFC 5044 sections 4.2 and 4.3).
    #[inline]
    fn write_marker(&mut self) {
        if self.layout.at_marker(self.offset) {
            self.put_marker();
        }
    }

    /// Writes a marker.
    #[inline]
    fn put_marker(&mut self) {
        self.put_field(marker(self.offset.saturating_sub(self.layout.header(self.start))));
    }
}

/// Writes an FPDU, which begins with a marker of `marker` bytes, to all of `fpdu`. `first` bytes lie between the ULPDU's header and
/// the next marker. `f(space)` writes the `len` bytes behind the header.
#[expect(clippy::inline_always, reason = "most FPDUs have no marker, and the compiler specialises them")]
#[inline(always)]
fn put_fpdu<const N: usize>(
    fpdu: &mut [u8],
    marker: usize,
    first: usize,
    crc: bool,
    header: &[u8; N],
    len: usize,
    f: &mut impl FnMut(&mut GappedMut<'_>),
) {
    let Some((covered, to_crc)) = fpdu.split_last_chunk_mut::<CRC_BYTES>() else { return };
    let bytes = put_fields(covered, marker, N + len, header);
    // The pad, and the marker that may follow it.
    match bytes.last_chunk_mut::<8>() {
        Some(end) => *end = [0; 8],
        None => bytes.fill(0),
    }
    f(&mut GappedMut { bytes, len, gaps: markers_from(first), sum: Sum::Apart });
    put_markers(bytes, first, (LENGTH_BYTES + N) as u64);
    *to_crc = if crc { copy::crc32c(0, covered) } else { 0 }.to_le_bytes();
}

/// Writes the markers of `bytes`, which begin `distance` bytes behind the ULPDU Length field. The first marker lies at byte `first`.
#[inline]
fn put_markers(bytes: &mut [u8], first: usize, distance: u64) {
    let mut at = first;
    while let Some(space) = bytes.get_mut(at..).and_then(|bytes| bytes.first_chunk_mut()) {
        *space = marker(distance + at as u64);
        at += MARKER_SPACING as usize;
    }
}

/// Writes the ULPDU Length and the ULPDU's header to the front of `out`, after a marker of `marker` bytes. Returns the rest.
#[inline]
fn put_fields<'a, const N: usize>(
    out: &'a mut [u8],
    marker: usize,
    ulpdu: usize,
    header: &[u8; N],
) -> &'a mut [u8] {
    let (before, out) = out.split_at_mut(marker);
    if let Some(before) = before.first_chunk_mut() {
        *before = [0; MARKER_BYTES];
    }
    let Some((length, out)) = out.split_first_chunk_mut::<LENGTH_BYTES>() else { return &mut [] };
    *length = (ulpdu as u16).to_be_bytes();
    let Some((head, out)) = out.split_first_chunk_mut::<N>() else { return &mut [] };
    *head = *header;
    out
}

/// The marker `distance` bytes behind the ULPDU Length field of the FPDU to which it belongs.
#[inline]
fn marker(distance: u64) -> [u8; MARKER_BYTES] {
    marker_number(distance).to_be_bytes()
}

/// Its value: FPDUPTR, behind 16 reserved bits.
#[inline]
fn marker_number(distance: u64) -> u32 {
    u32::from(distance as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// How the ULPDU is written.
    #[derive(Debug, Clone, Copy)]
    enum Way {
        Plain,
        /// With this length announced.
        Announced(usize),
        /// At once if that is possible.
        Whole,
    }

    const HEADER: usize = 14;

    /// The FPDU with `ulpdu` at `start` of the stream, in a frame of two chunks.
    fn fpdu(ulpdu: &[u8], start: u64, markers: bool, first_chunk: usize, way: Way) -> Vec<u8> {
        let mut memory = vec![0xee; 4096];
        let (first, second) = memory.split_at_mut(first_chunk);
        let mut frame = FrameWriter::new([first, second].into_iter().collect(), 0, usize::MAX);
        let layout = Layout { origin: 0, markers };
        let mut writer = UlpduWriter::begin(&mut frame, layout, start, Mulpdu::of(4000), true).unwrap();
        if let Way::Announced(len) = way {
            writer.announce(len);
        }
        let (header, data) = ulpdu.split_at(ulpdu.len().min(HEADER));
        let whole = matches!(way, Way::Whole)
            && header.first_chunk::<HEADER>().is_some_and(|header| {
                let mut rest = data;
                writer.put_whole(header, data.len(), &mut |space: &mut GappedMut<'_>| {
                    let (now, later) = rest.split_at(space.len);
                    space.copy_from_slice(now);
                    rest = later;
                })
            });
        if !whole {
            writer.put(header);
            writer.fill(data.len(), |at, space| space.copy_from_slice(&data[at..at + space.len()]));
        }
        assert_eq!(writer.written(), ulpdu.len());
        let end = writer.end();
        let len = writer.finish();
        assert_eq!(end, start + len as u64);
        drop(frame);
        memory.truncate(len);
        memory
    }

    proptest! {
        /// An FPDU that is written after another one was discarded is as if that had never been.
        #[test]
        fn prop_a_discarded_ulpdu_leaves_no_trace(
            discarded in prop::collection::vec(any::<u8>(), HEADER..3000),
            written in prop::collection::vec(any::<u8>(), HEADER..3000),
            start in (0u64..3000).prop_map(|start| start * 4),
            markers: bool,
            crc: bool,
            has_length: bool,
            first_chunk in 100usize..4096,
            whole: bool,
        ) {
            let build = |before: Option<&[u8]>| {
                let mut memory = vec![0xee; 4096];
                let (first, second) = memory.split_at_mut(first_chunk);
                let mut frame = FrameWriter::new([first, second].into_iter().collect(), 40, 4000);
                let layout = Layout { origin: 0, markers };
                let mut writer = if has_length {
                    UlpduWriter::begin(&mut frame, layout, start, Mulpdu::of(3800), crc).unwrap()
                } else {
                    UlpduWriter::begin_segment(&mut frame, start, 3800, 3800)
                };
                let room = writer.room();
                if let Some(bytes) = before {
                    let (header, data) = bytes.split_first_chunk::<HEADER>().unwrap();
                    if !(whole && writer.put_whole(header, data.len(), &mut |space| space.bytes.fill(1))) {
                        writer.announce(bytes.len());
                        writer.put(bytes);
                    }
                    writer.discard();
                }
                assert_eq!((writer.room(), writer.written(), writer.offset() >= start), (room, 0, true));
                writer.announce(written.len());
                writer.put(&written);
                let end = writer.end();
                if has_length {
                    let len = writer.finish();
                    assert_eq!(end, start + len as u64);
                }
                let position = frame.position();
                drop(frame);
                memory.truncate(position);
                memory.split_off(40)
            };
            prop_assert_eq!(build(Some(&discarded)), build(None));
        }

        /// The CRC that is computed chunk by chunk equals that of the finished bytes, and a wrong or missing
        /// announcement changes no byte.
        #[test]
        fn prop_an_announced_length_changes_no_byte_of_the_fpdu(
            ulpdu in prop::collection::vec(any::<u8>(), 0..3000),
            start in (0u64..3000).prop_map(|start| start * 4),
            markers: bool,
            first_chunk in 0usize..4096,
            wrong in 0usize..3000,
        ) {
            let plain = fpdu(&ulpdu, start, markers, first_chunk, Way::Plain);
            let (covered, crc) = plain.split_at(plain.len() - CRC_BYTES);
            prop_assert_eq!(crc32c::crc32c(covered).to_le_bytes(), crc);
            for way in [Way::Announced(ulpdu.len()), Way::Announced(wrong)] {
                prop_assert_eq!(&fpdu(&ulpdu, start, markers, first_chunk, way), &plain);
            }
        }

        /// An FPDU that is written at once has the same bytes.
        #[test]
        fn prop_a_whole_fpdu_has_the_bytes_of_one_written_in_parts(
            ulpdu in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..600),
                prop::collection::vec(any::<u8>(), 600..3000),
            ],
            start in (0u64..300).prop_map(|start| start * 4),
            markers: bool,
            first_chunk in 0usize..4096,
        ) {
            let plain = fpdu(&ulpdu, start, markers, first_chunk, Way::Plain);
            prop_assert_eq!(&fpdu(&ulpdu, start, markers, first_chunk, Way::Whole), &plain);
        }
    }
}
