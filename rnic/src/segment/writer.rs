//! Writing segments: typed headers of queue pairs become the bytes of the connection's codec.

use xwarp_tcp::{
    copy,
    rdma_tcp::{HEADER_MOST_BYTES, SegmentHeader},
    seq::StreamOffset,
    ulp::UlpduWriter,
};

use super::Codec;
use crate::{
    ddp::{MessageOffset, Msn, Queue, STag, TAGGED_BYTES, Tagged, TaggedOffset, UNTAGGED_BYTES, Untagged},
    rdmap::{Control, MessageType},
};

/// The header of a segment to send.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Header {
    /// Of a segment for a tagged buffer.
    Tagged { message: MessageType, last: bool, stag: STag, to: TaggedOffset },
    /// Of a segment for an untagged buffer; `word` is the tag to invalidate.
    Untagged { message: MessageType, last: bool, word: u32, queue: Queue, msn: Msn, mo: MessageOffset },
    /// Of a segment of RDMA/TCP.
    Numbered(SegmentHeader),
}

impl Header {
    /// Bytes of the header.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Tagged { .. } => TAGGED_BYTES,
            Self::Untagged { .. } => UNTAGGED_BYTES,
            Self::Numbered(header) => header.bytes(),
        }
    }

    /// Says whether this is the last segment of its message.
    #[inline]
    pub(crate) fn end_message(&mut self, is_last: bool) {
        match self {
            Self::Tagged { last, .. } | Self::Untagged { last, .. } => *last = is_last,
            Self::Numbered(header) => header.last = is_last,
        }
    }
}

/// Writes one segment into a frame that is being built.
pub(crate) struct SegmentWriter<'a, 'w, 'f> {
    codec: Codec,
    out: &'a mut UlpduWriter<'w, 'f>,
}

impl<'a, 'w, 'f> SegmentWriter<'a, 'w, 'f> {
    pub(crate) fn new(codec: Codec, out: &'a mut UlpduWriter<'w, 'f>) -> Self {
        Self { codec, out }
    }

    /// Bytes of payload that fit behind `header`; `None` when not even the header fits.
    #[inline]
    pub(crate) fn room_behind(&self, header: &Header) -> Option<usize> {
        self.out.room().checked_sub(header.bytes())
    }

    /// Whether the segment may be as long as one in a TCP segment of its own.
    #[inline]
    pub(crate) fn has_all_room(&self) -> bool {
        self.out.room() >= self.out.mulpdu()
    }

    /// Stream offset of the end of the frame with the segment that was written. A peer that has acknowledged the stream
    /// up to here has the whole segment.
    #[inline]
    pub(crate) fn end(&self) -> StreamOffset {
        self.out.end()
    }

    /// Writes a segment with these bytes, which must fit.
    #[inline]
    pub(crate) fn put(&mut self, header: &Header, payload: &[u8]) {
        let mut rest = payload;
        self.fill(header, payload.len(), |space, crc| {
            let Some((now, later)) = rest.split_at_checked(space.len()) else { return };
            match crc {
                Some(crc) => *crc = copy::copy_crc32c(*crc, now, space),
                None => space.copy_from_slice(now),
            }
            rest = later;
        });
    }

    /// Writes a segment with these bytes, if it fits.
    pub(crate) fn put_whole(&mut self, header: &Header, payload: &[u8]) -> bool {
        let fits = self.room_behind(header).is_some_and(|room| room >= payload.len());
        if fits {
            self.put(header, payload);
        }
        fits
    }

    /// Writes a segment with `len` bytes, which must fit: `f(space, crc)` writes the next piece of the payload, and updates
    /// the CRC, if there is one.
    #[inline]
    pub(crate) fn fill(&mut self, header: &Header, len: usize, f: impl FnMut(&mut [u8], Option<&mut u32>)) {
        match (self.codec, header) {
            (Codec::Ddp(versions), &Header::Tagged { message, last, stag, to }) => {
                let control = Control { message }.byte(versions);
                self.fill_behind(&Tagged { last, control, stag, to }.to_bytes(versions), len, f);
            }
            (Codec::Ddp(versions), &Header::Untagged { message, last, word, queue, msn, mo }) => {
                let control = Control { message }.byte(versions);
                let header = Untagged { last, control, word, queue: queue.number(), msn, mo };
                self.fill_behind(&header.to_bytes(versions), len, f);
            }
            (Codec::RdmaTcp(connection), Header::Numbered(header)) => {
                let mut bytes = [0; HEADER_MOST_BYTES];
                let header_len = header.emit(connection, len, &mut bytes);
                self.out.put(bytes.get(..header_len).unwrap_or_default());
                self.fill_rest(len, f);
            }
            _ => debug_assert!(false, "{header:?} is not of {:?}", self.codec),
        }
    }

    /// Writes a segment with the DDP header `header` and `len` bytes: at once if it is short.
    #[inline]
    fn fill_behind<const N: usize>(
        &mut self,
        header: &[u8; N],
        len: usize,
        mut f: impl FnMut(&mut [u8], Option<&mut u32>),
    ) {
        if !self.out.put_whole(header, len, |space| f(space, None)) {
            self.out.announce(N + len);
            self.out.put_header(header);
            self.fill_rest(len, f);
        }
    }

    #[inline]
    fn fill_rest(&mut self, len: usize, mut f: impl FnMut(&mut [u8], Option<&mut u32>)) {
        self.out.fill_with_crc(len, |_, space, crc| f(space, crc));
    }
}
