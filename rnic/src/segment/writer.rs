//! Writing segments: typed headers of queue pairs become the bytes of the connection's codec.

use xwarp_tcp::{
    copy::GappedMut,
    rdma_tcp::{HEADER_MAX_BYTES, SegmentHeader},
    seq::StreamOffset,
    ulp::UlpduWriter,
};

use super::Codec;
use crate::{
    ddp::{
        MessageOffset, Msn, Queue, STag, TAGGED_BYTES, Tagged, TaggedOffset, UNTAGGED_BYTES, Untagged,
        Versions,
    },
    rdmap::{Control, MessageType},
};

/// The header of a segment to send. A caller that knows the form of its header uses that, and [`Header`] otherwise.
pub(crate) trait Head {
    /// Bytes of the header.
    fn bytes(&self) -> usize;

    /// Writes the segment with `len` bytes; see [`SegmentWriter::fill`].
    fn write(&self, out: &mut SegmentWriter<'_, '_, '_>, len: usize, f: impl FnMut(&mut GappedMut<'_>));
}

/// Of a segment for a tagged buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TaggedHead {
    pub(crate) message: MessageType,
    pub(crate) last: bool,
    pub(crate) stag: STag,
    pub(crate) to: TaggedOffset,
}

/// Of a segment for an untagged buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UntaggedHead {
    pub(crate) message: MessageType,
    pub(crate) last: bool,
    /// The tag to invalidate.
    pub(crate) word: u32,
    pub(crate) queue: Queue,
    pub(crate) msn: Msn,
    pub(crate) mo: MessageOffset,
}

/// A header of any form.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Header {
    Tagged(TaggedHead),
    Untagged(UntaggedHead),
    /// Of RDMA/TCP.
    Numbered(SegmentHeader),
}

impl Head for TaggedHead {
    #[inline]
    fn bytes(&self) -> usize {
        TAGGED_BYTES
    }

    #[inline]
    fn write(&self, out: &mut SegmentWriter<'_, '_, '_>, len: usize, f: impl FnMut(&mut GappedMut<'_>)) {
        let &Self { message, last, stag, to } = self;
        out.fill_ddp(
            message,
            |control, versions| Tagged { last, control, stag, to }.to_bytes(versions),
            len,
            f,
        );
    }
}

impl Head for UntaggedHead {
    #[inline]
    fn bytes(&self) -> usize {
        UNTAGGED_BYTES
    }

    #[inline]
    fn write(&self, out: &mut SegmentWriter<'_, '_, '_>, len: usize, f: impl FnMut(&mut GappedMut<'_>)) {
        let &Self { message, last, word, queue, msn, mo } = self;
        let queue = queue.number();
        let header = |control, versions| Untagged { last, control, word, queue, msn, mo }.to_bytes(versions);
        out.fill_ddp(message, header, len, f);
    }
}

impl Head for SegmentHeader {
    fn bytes(&self) -> usize {
        Self::bytes(self)
    }

    fn write(&self, out: &mut SegmentWriter<'_, '_, '_>, len: usize, f: impl FnMut(&mut GappedMut<'_>)) {
        let Codec::RdmaTcp(connection) = out.codec else {
            return debug_assert!(false, "{self:?} is not of {:?}", out.codec);
        };
        let mut bytes = [0; HEADER_MAX_BYTES];
        let header_len = self.emit(connection, len, &mut bytes);
        fill_in_parts(out.out, bytes.get(..header_len).unwrap_or_default(), len, f);
    }
}

impl Header {
    /// Sets whether this is the last segment of its message.
    pub(crate) fn end_message(&mut self, is_last: bool) {
        match self {
            Self::Tagged(head) => head.last = is_last,
            Self::Untagged(head) => head.last = is_last,
            Self::Numbered(head) => head.last = is_last,
        }
    }
}

impl Head for Header {
    fn bytes(&self) -> usize {
        match self {
            Self::Tagged(head) => head.bytes(),
            Self::Untagged(head) => head.bytes(),
            Self::Numbered(head) => head.bytes(),
        }
    }

    fn write(&self, out: &mut SegmentWriter<'_, '_, '_>, len: usize, f: impl FnMut(&mut GappedMut<'_>)) {
        match self {
            Self::Tagged(head) => head.write(out, len, f),
            Self::Untagged(head) => head.write(out, len, f),
            Self::Numbered(head) => head.write(out, len, f),
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

    /// The same writer, for a function that takes it by value: one that is not passed in memory.
    #[inline]
    pub(crate) fn reborrow(&mut self) -> SegmentWriter<'_, 'w, 'f> {
        SegmentWriter { codec: self.codec, out: self.out }
    }

    /// Bytes of payload that fit behind `header` bytes of a header; `None` when not even these fit.
    #[inline]
    pub(crate) fn room_behind(&self, header: usize) -> Option<usize> {
        self.out.room().checked_sub(header)
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
    pub(crate) fn put(&mut self, header: &impl Head, payload: &[u8]) {
        let mut rest = payload;
        self.fill(header, payload.len(), |space| {
            let Some((now, later)) = rest.split_at_checked(space.len) else { return };
            space.copy_from_slice(now);
            rest = later;
        });
    }

    /// Writes a segment with these bytes, if it fits.
    pub(crate) fn put_whole(&mut self, header: &impl Head, payload: &[u8]) -> bool {
        let fits = self.room_behind(header.bytes()).is_some_and(|room| room >= payload.len());
        if fits {
            self.put(header, payload);
        }
        fits
    }

    /// Writes a segment with `len` bytes, which must fit: `f(space)` writes the next bytes of the payload.
    #[inline]
    pub(crate) fn fill(&mut self, header: &impl Head, len: usize, f: impl FnMut(&mut GappedMut<'_>)) {
        header.write(self, len, f);
    }

    /// Discards the segment that was written, because its bytes turned out not to be accessible; another one may follow instead.
    #[cold]
    pub(crate) fn discard(&mut self) {
        self.out.discard();
    }

    /// Writes a segment with the DDP header `header(control, versions)` and `len` bytes: at once if that is possible.
    #[inline]
    fn fill_ddp<const N: usize>(
        &mut self,
        message: MessageType,
        header: impl Fn(u8, Versions) -> [u8; N],
        len: usize,
        mut f: impl FnMut(&mut GappedMut<'_>),
    ) {
        let Codec::Ddp(versions) = self.codec else {
            return debug_assert!(false, "a DDP header on a connection with RDMA/TCP");
        };
        let control = Control { message }.byte(versions);
        // Made for each call: a header that is passed to the second one would be built in memory for the first one too.
        if !self.out.put_unmarked(&header(control, versions), len, &mut f) {
            fill_marked(self.out, &header(control, versions), len, f);
        }
    }
}

/// Writes a ULPDU with `header` and `len` bytes, wherever its markers lie: at once if that is possible.
#[inline(never)]
fn fill_marked<const N: usize>(
    out: &mut UlpduWriter<'_, '_>,
    header: &[u8; N],
    len: usize,
    mut f: impl FnMut(&mut GappedMut<'_>),
) {
    if !out.put_whole(header, len, &mut f) {
        fill_in_parts(out, header, len, f);
    }
}

#[inline(never)]
fn fill_in_parts(
    out: &mut UlpduWriter<'_, '_>,
    header: &[u8],
    len: usize,
    f: impl FnMut(&mut GappedMut<'_>),
) {
    out.announce(header.len() + len);
    out.put(header);
    out.fill_runs(len, f);
}
