//! [`LoopedFrames`]: the frames from one connection of this host to another, which no interface carries.

use std::collections::VecDeque;

use super::{Pieces, QueueId, RingFull, RxFrame};

/// Frames that may wait to be received; the stack sends more when it has received some.
const MAX_WAITING: usize = 512;
/// Frames that may exist, with those that the stack holds.
const MAX_FRAMES: usize = 8192;
/// The bit in the names of looped frames that those of no link have.
const LOOPED: u32 = 1 << 31;

/// A queue of frames that were sent to an address of this host, each a copy of the bytes that were submitted.
///
/// A wrapper around a link adds those frames that go to [`Mac::LOOPED`](crate::wire::Mac::LOOPED) instead of submitting them, and
/// returns them among the received ones. Their tokens have names of their own.
#[derive(Debug, Default)]
pub struct LoopedFrames {
    /// The bytes of each frame by its number.
    frames: Vec<Vec<u8>>,
    free: Vec<u32>,
    /// The frames that were not received yet, oldest first.
    waiting: VecDeque<RxFrame>,
}

impl LoopedFrames {
    /// Whether a received frame is one of these.
    #[inline]
    pub const fn owns(frame: &RxFrame) -> bool {
        frame.head() & LOOPED != 0
    }

    /// Whether frames wait to be received.
    pub fn any(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds a frame: the first `len` bytes of `chunks`, which a link with chunks of `chunk_bytes` would receive on `queue`.
    ///
    /// # Errors
    /// Too many frames wait or are held.
    pub fn push<'a>(
        &mut self,
        chunks: impl Iterator<Item = &'a [u8]>,
        len: usize,
        chunk_bytes: usize,
        queue: QueueId,
    ) -> Result<(), RingFull> {
        if self.waiting.len() >= MAX_WAITING || self.free.is_empty() && self.frames.len() >= MAX_FRAMES {
            return Err(RingFull);
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.frames.push(Vec::new());
            self.frames.len() as u32 - 1
        });
        let Some(bytes) = self.frames.get_mut(number as usize) else { return Err(RingFull) };
        bytes.clear();
        for chunk in chunks {
            let wanted = chunk.len().min(len - bytes.len());
            bytes.extend_from_slice(chunk.get(..wanted).unwrap_or_default());
        }
        let chunks = bytes.len().div_ceil(chunk_bytes.max(1)).max(1) as u16;
        self.waiting.push_back(RxFrame::new(LOOPED | number, chunks, bytes.len() as u32, queue));
        Ok(())
    }

    /// Appends up to `max` frames to `batch` and returns their number.
    pub fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let count = self.waiting.len().min(max);
        batch.extend(self.waiting.drain(..count));
        count
    }

    /// The bytes of a frame.
    pub fn bytes(&self, frame: &RxFrame) -> &[u8] {
        self.frames.get((frame.head() & !LOOPED) as usize).map_or(&[], Vec::as_slice)
    }

    /// The bytes of a frame as the pieces of a link.
    pub fn pieces(&self, frame: &RxFrame) -> Pieces<'_> {
        std::iter::once(self.bytes(frame)).collect()
    }

    /// Takes back a frame.
    #[expect(clippy::needless_pass_by_value, reason = "the token ends here")]
    pub fn recycle(&mut self, frame: RxFrame) {
        self.free.push(frame.head() & !LOOPED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUE: QueueId = QueueId(3);

    fn push(frames: &mut LoopedFrames, bytes: &[u8]) -> Result<(), RingFull> {
        frames.push(bytes.chunks(2), bytes.len(), 2, QUEUE)
    }

    #[test]
    fn frames_arrive_in_order_with_the_bytes_that_were_sent() {
        let mut frames = LoopedFrames::default();
        for bytes in [&b"first"[..], b"2nd"] {
            push(&mut frames, bytes).unwrap();
        }
        // Only the bytes that were submitted, of a frame that has room for more.
        frames.push([&b"thi"[..], b"rd, and more"].into_iter(), 5, 4096, QUEUE).unwrap();
        let mut batch = Vec::new();
        assert_eq!((frames.receive(&mut batch, 2), frames.any()), (2, true));
        assert_eq!((frames.receive(&mut batch, 9), frames.any()), (1, false));
        let read: Vec<_> =
            batch.iter().map(|frame| (frames.bytes(frame), frame.len(), frame.chunks())).collect();
        assert_eq!(read, [(&b"first"[..], 5, 3), (b"2nd", 3, 2), (b"third", 5, 1)]);
        assert!(batch.iter().all(|frame| LoopedFrames::owns(frame) && frame.queue() == QUEUE));
        assert!(!LoopedFrames::owns(&RxFrame::new(7, 1, 60, QUEUE)));
    }

    #[test]
    fn the_queue_is_bounded_and_frames_are_used_again() {
        let mut frames = LoopedFrames::default();
        let mut held = Vec::new();
        while held.len() < MAX_FRAMES {
            while frames.waiting.len() < MAX_WAITING && push(&mut frames, b"bytes").is_ok() {}
            assert_eq!(push(&mut frames, b"one too many"), Err(RingFull));
            frames.receive(&mut held, usize::MAX);
        }
        assert_eq!(push(&mut frames, b"all are held"), Err(RingFull));
        for frame in held {
            frames.recycle(frame);
        }
        push(&mut frames, b"used again").unwrap();
        assert_eq!(frames.frames.len(), MAX_FRAMES);
    }
}
