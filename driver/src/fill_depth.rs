//! [`FillDepth`]: how many receive chunks of a queue wait on its fill ring.
//!
//! The kernel takes chunks from a fill ring first in, first out. A ring with all chunks of a queue therefore cycles through
//! all of its memory, and each frame is written to, and read from, chunks that have left the cache. With only as many chunks as
//! the traffic needs, the same few are used again and again.

/// Fewest chunks on a fill ring: one MiB, which fits into a second-level cache, and several of the longest frames.
const LEAST: u32 = 256;

/// The depth is this multiple of the chunks that arrived between two refills at most.
const MARGIN: u32 = 4;

/// Times the queue's chunks arrive before the depth may shrink. On a link of 10 Gb/s this takes about 50 ms.
const CYCLES: u32 = 8;

/// The number of chunks that a queue keeps on its fill ring.
///
/// It begins with all chunks, shrinks slowly to a multiple of what recent batches used, and grows at once when a batch uses half of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FillDepth {
    /// Chunks of the queue.
    most: u32,
    depth: u32,
    /// Most chunks that were missing on the ring before a refill, since the last change.
    used: u32,
    /// Chunks that have arrived since the last change.
    arrived: u32,
}

impl FillDepth {
    /// The depth of a queue with `most` chunks.
    pub(crate) fn new(most: u32) -> Self {
        Self { most, depth: most, used: 0, arrived: 0 }
    }

    /// Chunks to put on a ring that has `filled` of them.
    pub(crate) fn missing(&self, filled: u32) -> u32 {
        self.depth.saturating_sub(filled)
    }

    /// Adapts the depth after a batch of `arrived` chunks, which left `filled` chunks on the ring. `more` says that further frames
    /// may be waiting.
    pub(crate) fn adapt(&mut self, arrived: u32, filled: u32, more: bool) {
        let used = self.missing(filled);
        if self.depth < self.most && (more || used > self.depth / 2) {
            let depth = if used > self.depth / 4 * 3 { self.most } else { self.depth.saturating_mul(2) };
            self.change(depth);
            return;
        }
        self.used = self.used.max(used);
        self.arrived = self.arrived.saturating_add(arrived);
        if self.arrived >= self.most.saturating_mul(CYCLES) {
            self.change(self.used.saturating_mul(MARGIN).max(LEAST).min(self.depth));
        }
    }

    fn change(&mut self, depth: u32) {
        *self = Self { depth: depth.min(self.most), ..Self::new(self.most) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches of `chunks` that arrive while the ring is refilled after each.
    fn run(depth: &mut FillDepth, chunks: u32, batches: u32) {
        for _ in 0..batches {
            depth.adapt(chunks, depth.depth - chunks.min(depth.depth), false);
        }
    }

    #[test]
    fn the_depth_shrinks_to_a_multiple_of_what_batches_use() {
        let mut depth = FillDepth::new(2048);
        run(&mut depth, 100, 100);
        assert_eq!(depth.missing(0), 2048, "not yet");
        run(&mut depth, 100, 100);
        assert_eq!(depth.missing(0), 400);
        run(&mut depth, 1, 8 * 2048 + 1);
        assert_eq!(depth.missing(0), LEAST);
    }

    #[test]
    fn the_depth_grows_at_once_when_half_of_it_is_used() {
        let shrunk = || {
            let mut depth = FillDepth::new(2048);
            run(&mut depth, 1, 8 * 2048);
            assert_eq!(depth.missing(0), LEAST);
            depth
        };
        let mut depth = shrunk();
        run(&mut depth, LEAST / 2 + 1, 1);
        assert_eq!(depth.missing(0), 2 * LEAST);
        let mut depth = shrunk();
        run(&mut depth, LEAST - 1, 1);
        assert_eq!(depth.missing(0), 2048, "frames may have been dropped");
        let mut depth = shrunk();
        depth.adapt(1, LEAST - 1, true);
        assert_eq!(depth.missing(0), 2 * LEAST);
    }

    #[test]
    fn a_small_queue_keeps_all_of_its_chunks_filled() {
        let mut depth = FillDepth::new(64);
        run(&mut depth, 1, 10_000);
        assert_eq!(depth.missing(10), 54);
    }
}
