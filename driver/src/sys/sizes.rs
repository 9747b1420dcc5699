//! [`Sizes`]: how many chunks and descriptors the queues of an interface have.

use xwarp_control::Sizes as ChunkSizes;

use super::ring::Entries;
use super::{CHUNK_BYTES, MAX_CHUNKS, QueueCounts};

/// Sizes of memory and rings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Receive queues; each gets a socket.
    pub queues: u16,
    /// Transmit queues: the first ones of the receive queues.
    pub transmit_queues: u16,
    /// The interface's number of the first queue, and the distance to the next one.
    pub first_queue: u16,
    pub queue_step: u16,
    pub receive_per_queue: u32,
    pub transmit: u32,
    /// A power of two.
    pub transmit_ring: u32,
    /// Frames may have several chunks.
    pub multi_buffer: bool,
    /// The kernel shall complete TCP checksums, if it can.
    pub offload_checksums: bool,
}

impl Sizes {
    /// The sizes for these queues, of which each has receive chunks of its own.
    pub(crate) fn new(queues: QueueCounts, chunks: ChunkSizes, multi_buffer: bool) -> Self {
        let most = queues.receive.clamp(1, u32::from(xwarp_prog::MAX_QUEUES));
        Self {
            queues: most as u16,
            transmit_queues: queues.transmit.clamp(1, most) as u16,
            first_queue: 0,
            queue_step: 1,
            receive_per_queue: chunks.receive_chunks,
            transmit: chunks.transmit_chunks,
            transmit_ring: chunks.ring,
            multi_buffer,
            offload_checksums: false,
        }
    }

    /// The sizes of a granted interface, which has one queue.
    pub(crate) fn granted(chunks: ChunkSizes, multi_buffer: bool) -> Self {
        Self::new(QueueCounts { receive: 1, transmit: 1 }, chunks, multi_buffer)
    }

    /// The sizes of `count` owners of the interface, of which each has every `count`-th queue, so that each can transmit on its
    /// first one. `None` when there are too few queues.
    pub(crate) fn split(self, count: u16) -> Option<Vec<Self>> {
        if count == 0 || count > self.transmit_queues {
            return None;
        }
        let owner = |first| {
            let part = Self { first_queue: first, queue_step: count, ..self };
            Self {
                queues: part.of_all(self.queues),
                transmit_queues: part.of_all(self.transmit_queues),
                ..part
            }
        };
        Some((0..count).map(owner).collect())
    }

    /// The number of this owner's queues when the interface has `all`.
    pub(crate) const fn of_all(&self, all: u16) -> u16 {
        all.saturating_sub(self.first_queue).div_ceil(self.queue_step)
    }

    /// The interface's number of a queue.
    pub(crate) const fn number_of(&self, queue: u16) -> u16 {
        self.first_queue + queue * self.queue_step
    }

    /// Groups of receive chunks: one for each queue, and with several owners one for the frames that the others hand over,
    /// whose number follows the last queue's.
    pub(super) const fn receive_groups(&self) -> u16 {
        self.queues + (self.queue_step > 1) as u16
    }

    pub(crate) const fn chunks(&self) -> u32 {
        self.receive_groups() as u32 * self.receive_per_queue + self.transmit
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.chunks() as u64 * CHUNK_BYTES as u64
    }

    /// Entries of each queue's rings.
    pub(super) fn entries(&self) -> Entries {
        Entries { receive: self.receive_per_queue.next_power_of_two(), transmit: self.transmit_ring }
    }

    /// Largest number of chunks of a frame; rings and memory of each direction have room for at least four such frames.
    pub(crate) fn frame_chunks(&self) -> usize {
        let least = self.receive_per_queue.min(self.transmit).min(self.transmit_ring) / 4;
        if self.multi_buffer { MAX_CHUNKS.min(least as usize).max(1) } else { 1 }
    }
}
