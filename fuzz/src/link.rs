//! A link without a network: the target passes frames in and takes sent frames out. It tracks the owner of
//! each frame, so that a double return or a use after return panics, and a leak is detected.

use slab::Slab;
use xwarp_tcp::link::{
    ChunksMut, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame, chunks_for,
};

/// Size of the largest chunk, in bytes.
const LARGEST_CHUNK: usize = 2048;
/// Size of the memory for transmit frames, in bytes.
const TX_BYTES: usize = 96 * LARGEST_CHUNK;
/// Size of the memory for received frames, in bytes.
const RX_BYTES: usize = 256 * LARGEST_CHUNK;
/// Largest number of bytes in chunks that wait for a flush.
const RING_BYTES: usize = 32 * LARGEST_CHUNK;

#[derive(Debug)]
struct Sent {
    chunks: Vec<Vec<u8>>,
    /// The frame is between submit and flush.
    submitted: bool,
    released: bool,
}

/// A link that is driven by the target.
#[derive(Debug)]
pub struct FuzzLink {
    /// Chunk size of received and sent frames, in bytes.
    chunk: usize,
    incoming: std::collections::VecDeque<RxFrame>,
    lent: Slab<Vec<Vec<u8>>>,
    /// Chunks of the lent frames.
    lent_chunks: usize,
    out: Slab<Sent>,
    /// Chunks of the transmit frames.
    out_chunks: usize,
    ring: Vec<(usize, usize)>,
    ring_chunks: usize,
    /// Sent frames that the target has not taken yet.
    pub sent: Vec<Vec<u8>>,
}

impl FuzzLink {
    /// Creates a link whose frames have chunks of `chunk` bytes, at least the size of all headers together.
    pub fn new(chunk: usize) -> Self {
        Self {
            chunk: chunk.clamp(256, LARGEST_CHUNK),
            incoming: std::collections::VecDeque::new(),
            lent: Slab::new(),
            lent_chunks: 0,
            out: Slab::new(),
            out_chunks: 0,
            ring: Vec::new(),
            ring_chunks: 0,
            sent: Vec::new(),
        }
    }

    /// Creates a received frame with these bytes.
    pub fn lend(&mut self, bytes: &[u8]) -> RxFrame {
        let mut chunks: Vec<_> = bytes.chunks(self.chunk).map(<[u8]>::to_vec).collect();
        if chunks.is_empty() {
            chunks.push(Vec::new());
        }
        let count = chunks.len() as u16;
        self.lent_chunks += chunks.len();
        RxFrame::new(self.lent.insert(chunks) as u32, count, bytes.len() as u32, QueueId(0))
    }

    /// Queues a frame for [`Link::receive`]. It is lost, as on a NIC, when no frame is free.
    pub fn arrive(&mut self, bytes: &[u8]) {
        if bytes.len().div_ceil(self.chunk) <= self.rx_available(QueueId(0)) {
            let frame = self.lend(bytes);
            self.incoming.push_back(frame);
        }
    }

    /// Number of received frames that have not been returned.
    pub fn lent(&self) -> usize {
        self.lent.len()
    }

    /// Number of transmit frames that have not been returned.
    pub fn retained(&self) -> usize {
        self.out.len()
    }
}

impl Link for FuzzLink {
    fn chunk_bytes(&self) -> usize {
        self.chunk
    }

    fn tx_available(&self) -> usize {
        TX_BYTES / self.chunk - self.out_chunks
    }

    fn rx_capacity(&self) -> usize {
        RX_BYTES / self.chunk
    }

    fn rx_available(&self, _queue: QueueId) -> usize {
        self.rx_capacity().saturating_sub(self.lent_chunks)
    }

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let n = max.min(self.incoming.len());
        batch.extend(self.incoming.drain(..n));
        n
    }

    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        self.lent[frame.head() as usize].iter().map(Vec::as_slice).collect()
    }

    fn recycle(&mut self, frame: RxFrame) {
        self.lent_chunks -= self.lent.remove(frame.head() as usize).len();
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        let count = chunks_for(self, len);
        if count > self.tx_available() {
            return None;
        }
        self.out_chunks += count;
        let chunks = vec![vec![0; self.chunk]; count];
        let head = self.out.insert(Sent { chunks, submitted: false, released: false });
        Some(TxFrame::new(head as u32, count as u16))
    }

    fn tx_chunks_into<'a>(&'a mut self, frame: &mut TxFrame, chunks: &mut ChunksMut<'a>) -> bool {
        let sent = &mut self.out[frame.head() as usize];
        assert!(!sent.released, "a token for a frame that was released");
        if !sent.submitted {
            chunks.extend(sent.chunks.iter_mut().map(Vec::as_mut_slice));
        }
        !sent.submitted
    }

    fn submit(&mut self, _queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        let count = chunks_for(self, len);
        if self.ring_chunks + count > RING_BYTES / self.chunk {
            return Err(RingFull);
        }
        let sent = &mut self.out[frame.head() as usize];
        assert!(!sent.submitted && !sent.released, "submitted while it is still being sent");
        assert!(count <= sent.chunks.len(), "longer than the frame");
        self.out_chunks -= sent.chunks.drain(count..).count();
        frame.shorten(count as u16);
        sent.submitted = true;
        self.ring_chunks += count;
        self.ring.push((frame.head() as usize, len));
        Ok(())
    }

    fn release(&mut self, frame: TxFrame) {
        let sent = &mut self.out[frame.head() as usize];
        assert!(!sent.released, "released twice");
        sent.released = true;
        if !sent.submitted {
            self.out_chunks -= self.out.remove(frame.head() as usize).chunks.len();
        }
    }

    fn flush(&mut self) {
        for (head, len) in std::mem::take(&mut self.ring) {
            let sent = &mut self.out[head];
            sent.submitted = false;
            let mut bytes = sent.chunks.concat();
            bytes.truncate(len);
            self.sent.push(bytes);
            if sent.released {
                self.out_chunks -= self.out.remove(head).chunks.len();
            }
        }
        self.ring_chunks = 0;
    }

    fn steer(&mut self, _rule: Steer) -> Result<(), SteerError> {
        Ok(())
    }

    fn unsteer(&mut self, _rule: Steer) {}
}
