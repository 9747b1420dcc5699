//! Builds one FPDU in a transmit frame: the methods of [`UlpduWriter`] for the upper layer, and the framing of its
//! ULPDU.

use super::layout::{BETWEEN_MARKERS, CRC_BYTES, LENGTH_BYTES, Layout, MARKER_BYTES, MARKER_SPACING};
use crate::{copy, link::FrameWriter, seq::StreamOffset, ulp::UlpduWriter};

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
    pub(crate) fn begin(
        frame: &'w mut FrameWriter<'f>,
        layout: Layout,
        start: StreamOffset,
        mulpdu: usize,
        crc: bool,
    ) -> Option<Self> {
        let room = layout.largest_ulpdu(start, frame.room())?.min(mulpdu);
        let position = frame.position();
        Some(Self {
            frame,
            layout,
            start,
            offset: start,
            position,
            room,
            written: 0,
            mulpdu,
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
        if self.has_length {
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

    /// Writes a whole FPDU at once: a ULPDU of `header` and `len` bytes. `f(space)` writes each piece of these bytes.
    /// Returns false, and has written nothing, when something was written before, the
    /// FPDU does not fit, or its first fields have a marker between them or cross the end of a chunk: the other methods write it
    /// then.
    #[inline]
    pub fn put_whole<const N: usize>(
        &mut self,
        header: &[u8; N],
        len: usize,
        mut f: impl FnMut(&mut [u8]),
    ) -> bool {
        let ulpdu = N + len;
        if !self.has_length || self.offset != self.start || ulpdu > self.room {
            return false;
        }
        let to_marker = self.layout.to_marker(self.start);
        let body = Layout::body(ulpdu);
        if body <= to_marker
            && let Some(fpdu) = self.frame.contiguous(body)
        {
            put_between_markers(fpdu, header, len, self.crc, f);
            self.offset += body as u64;
            self.written = ulpdu;
            self.room = 0;
            self.complete = true;
            return true;
        }
        // The first fields, after the marker that may precede them.
        let first = if to_marker == 0 { MARKER_BYTES } else { 0 };
        let behind = if to_marker == 0 { BETWEEN_MARKERS } else { to_marker };
        if behind < LENGTH_BYTES + N {
            return false;
        }
        let Some(fields) = self.frame.contiguous(first + LENGTH_BYTES + N) else { return false };
        let (marker, rest) = fields.split_at_mut(first);
        if let Some(marker) = marker.first_chunk_mut() {
            *marker = [0; MARKER_BYTES];
        }
        put_fields(rest, ulpdu, header);
        self.offset += (first + LENGTH_BYTES + N) as u64;
        self.written = N;
        self.room -= N;
        self.announced = self.crc.then_some(Announced { ulpdu, crc: 0, summed: self.position });
        self.fill_between_markers(len, |_, space| f(space));
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
    pub fn fill(&mut self, len: usize, f: impl FnMut(usize, &mut [u8])) {
        let len = self.begin_bytes(len);
        self.fill_between_markers(len, f);
    }

    /// Writes `len` bytes by `f` and the markers between them, and adds them to the CRC of an announced ULPDU.
    #[inline]
    fn fill_between_markers(&mut self, len: usize, mut f: impl FnMut(usize, &mut [u8])) {
        let (mut at, mut to_marker) = (0, self.layout.to_marker(self.offset));
        let header = self.layout.header(self.start);
        while at < len {
            if to_marker == 0 {
                self.put_marker();
                to_marker = BETWEEN_MARKERS;
            }
            let mut run =
                Run { rest: self.frame.rest_of_chunk(), at, distance: self.offset - header, f: &mut f };
            let (first, space) = (at, run.rest.len());
            run.piece(to_marker.min(len - at));
            to_marker -= run.at - at;
            while to_marker == 0
                && len - run.at >= BETWEEN_MARKERS
                && run.rest.len() >= MARKER_SPACING as usize
            {
                run.marker();
                run.piece(BETWEEN_MARKERS);
            }
            if to_marker == 0 && run.at < len && run.marker() {
                let before = run.at;
                run.piece(BETWEEN_MARKERS.min(len - run.at));
                to_marker = BETWEEN_MARKERS - (run.at - before);
            }
            let used = space - run.rest.len();
            at = run.at;
            self.frame.advance(used);
            self.offset += used as u64;
            self.sum_written();
            if at == first {
                break;
            }
        }
        self.end_bytes(len, at);
    }

    /// Prepares for `len` more bytes of ULPDU. Returns how many of them may be written.
    #[inline]
    fn begin_bytes(&mut self, len: usize) -> usize {
        debug_assert!(len <= self.room, "the upper layer asked for {len} bytes, {} are left", self.room);
        self.write_header();
        len.min(self.room)
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
        if let Some(Announced { ulpdu, crc, summed }) = self.announced
            && ulpdu == self.written
            && summed == self.written_to()
            && self.layout.to_marker(self.offset) > pad
            && let Some((pad, field)) =
                self.frame.contiguous(pad + CRC_BYTES).and_then(<[u8]>::split_last_chunk_mut)
        {
            // Nearly always.
            let mut crc = crc;
            if !pad.is_empty() {
                pad.fill(0);
                crc = copy::crc32c(crc, pad);
            }
            *field = crc.to_le_bytes();
            return (self.offset - self.start) as usize + pad.len() + CRC_BYTES;
        }
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

/// Pieces of a ULPDU, and the markers between them, in one chunk of the frame.
struct Run<'s, 'c, F> {
    /// The rest of the chunk.
    rest: &'s mut [u8],
    /// Bytes written by `f` before `rest`.
    at: usize,
    /// Bytes from the ULPDU Length field to `rest`.
    distance: u64,
    f: &'c mut F,
}

impl<F: FnMut(usize, &mut [u8])> Run<'_, '_, F> {
    /// Writes `n` bytes by `f`, or as many as the chunk has.
    #[inline]
    fn piece(&mut self, n: usize) {
        let n = n.min(self.rest.len());
        let (space, rest) = std::mem::take(&mut self.rest).split_at_mut(n);
        (self.f)(self.at, space);
        self.rest = rest;
        self.at += n;
        self.distance += n as u64;
    }

    /// Writes a marker. Returns false, and has written nothing, if the marker crosses the end of the chunk.
    #[inline]
    fn marker(&mut self) -> bool {
        if self.rest.len() < MARKER_BYTES {
            return false;
        }
        let (space, rest) = std::mem::take(&mut self.rest).split_at_mut(MARKER_BYTES);
        space.copy_from_slice(&marker(self.distance));
        self.rest = rest;
        self.distance += MARKER_BYTES as u64;
        true
    }
}

/// Writes the ULPDU Length and the ULPDU's header to the front of `out`. Returns the rest.
#[inline]
fn put_fields<'a, const N: usize>(out: &'a mut [u8], ulpdu: usize, header: &[u8; N]) -> &'a mut [u8] {
    let Some((length, out)) = out.split_first_chunk_mut::<LENGTH_BYTES>() else { return &mut [] };
    *length = (ulpdu as u16).to_be_bytes();
    let Some((head, out)) = out.split_first_chunk_mut::<N>() else { return &mut [] };
    *head = *header;
    out
}

/// Writes an FPDU without markers to all of `fpdu`. `f` writes the `len` bytes after the header.
#[inline]
fn put_between_markers<const N: usize>(
    fpdu: &mut [u8],
    header: &[u8; N],
    len: usize,
    crc: bool,
    f: impl FnOnce(&mut [u8]),
) {
    let Some((covered, to_crc)) = fpdu.split_last_chunk_mut::<CRC_BYTES>() else { return };
    if let Some((payload, pad)) = put_fields(covered, N + len, header).split_at_mut_checked(len) {
        f(payload);
        for byte in pad {
            *byte = 0;
        }
    }
    *to_crc = if crc { copy::crc32c(0, covered) } else { 0 }.to_le_bytes();
}

/// The marker `distance` bytes behind the ULPDU Length field of the FPDU to which it belongs.
#[inline]
fn marker(distance: u64) -> [u8; MARKER_BYTES] {
    let [high, low] = (distance as u16).to_be_bytes();
    [0, 0, high, low]
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
        let mut writer = UlpduWriter::begin(&mut frame, layout, start, 4000, true).unwrap();
        if let Way::Announced(len) = way {
            writer.announce(len);
        }
        let (header, data) = ulpdu.split_at(ulpdu.len().min(HEADER));
        let whole = matches!(way, Way::Whole)
            && header.first_chunk::<HEADER>().is_some_and(|header| {
                let mut at = 0;
                writer.put_whole(header, data.len(), |space| {
                    space.copy_from_slice(&data[at..at + space.len()]);
                    at += space.len();
                })
            });
        if !whole {
            writer.put(header);
            writer.fill(data.len(), |at, space| space.copy_from_slice(&data[at..at + space.len()]));
        }
        assert_eq!(writer.written(), ulpdu.len());
        let len = writer.finish();
        drop(frame);
        memory.truncate(len);
        memory
    }

    proptest! {
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
