//! Moving payloads from frames to the heap, so that other connections can use the frames
//! (`docs/decisions/0009-frames-are-shared-by-thresholds.md`).

use super::{Payload, Queue, SentSegment};
use crate::{
    link::{FrameWriter, Link},
    time::Instant,
    wire::Sum,
};

impl Queue {
    /// Bytes of payload on the heap.
    pub(in crate::tcp) fn spilled_bytes(&self) -> usize {
        self.spilled_bytes
    }

    /// Chunks of the frames that contain payload.
    pub(in crate::tcp) fn chunks_retained(&self) -> usize {
        let chunks = |entry: &SentSegment| match &entry.payload {
            Payload::Frame { frame, .. } => frame.chunks(),
            Payload::Heap(_) | Payload::Fin => 0,
        };
        self.entries.iter().map(chunks).sum()
    }

    /// Moves the payload of segments first sent at `before` or earlier to the heap, the oldest first, at most `room`
    /// bytes. Returns the bytes moved.
    pub(in crate::tcp) fn spill(&mut self, link: &mut dyn Link, before: Instant, room: usize) -> usize {
        let had = self.spilled_bytes;
        let mut index = self.index_from(self.spilled_to);
        while let Some(entry) = self.entries.get(index) {
            let moved = self.spilled_bytes - had;
            if entry.first_sent > before || moved + entry.bytes() as usize > room {
                break;
            }
            let end = entry.end;
            // The link still reads this frame; the next call tries again.
            if !self.spill_entry(link, index) {
                break;
            }
            self.spilled_to = end;
            index += 1;
        }
        self.spilled_bytes - had
    }

    /// Moves the payload of entry `index` to the heap. Returns false while the link still reads the frame.
    pub(in crate::tcp) fn spill_entry(&mut self, link: &mut dyn Link, index: usize) -> bool {
        let Some(entry) = self.entries.get_mut(index) else { return false };
        let len = entry.bytes() as usize;
        let Payload::Frame { frame, header } = &mut entry.payload else { return true };
        let Some(chunks) = link.tx_chunks(frame) else { return false };
        let (start, end) = (*header, *header + len);
        let mut bytes = Vec::with_capacity(end - start);
        FrameWriter::new(chunks, 0, end).for_each(start, end, |piece| bytes.extend_from_slice(piece));
        let bytes = bytes.into_boxed_slice();
        self.spilled_bytes += bytes.len();
        std::mem::replace(&mut entry.payload, Payload::Heap(bytes)).release(link);
        true
    }

    /// Cuts entry `index`, whose payload is on the heap, into segments of at most `emss` bytes. Each keeps the
    /// transmission state of the whole.
    pub(in crate::tcp) fn split(&mut self, index: usize, emss: usize) {
        let Some(entry) = self.entries.get(index) else { return };
        let Payload::Heap(payload) = &entry.payload else { return };
        let mut at = entry.start;
        let mut pieces = Vec::with_capacity(payload.len().div_ceil(emss.max(1)));
        for bytes in payload.chunks(emss.max(1)) {
            let end = at + bytes.len() as u64;
            let mut piece =
                SentSegment::new(at, end, Payload::Heap(bytes.into()), Sum::of(bytes), entry.sent);
            piece.first_sent = entry.first_sent;
            piece.restore(&entry.status());
            pieces.push(piece);
            at = end;
        }
        if !pieces.is_empty() {
            self.replace(index, pieces);
        }
    }
}
