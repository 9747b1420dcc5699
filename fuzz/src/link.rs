//! A link without a network: the target passes frames in and takes sent frames out. It tracks the owner of
//! each frame, so that a double return or a use after return panics, and a leak is detected.

use slab::Slab;
use xwarp_tcp::link::{ChunksMut, Link, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame};

/// Number of transmit frames.
const TX_FRAMES: usize = 96;
/// Number of receive frames that the link reports.
const RX_FRAMES: usize = 256;
/// Maximum number of frames that wait for a flush.
const RING: usize = 32;
/// Size of a transmit frame, in bytes.
const TX_BYTES: usize = 2048;

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
    out: Slab<Sent>,
    ring: Vec<(usize, usize)>,
    /// Sent frames that the target has not taken yet.
    pub sent: Vec<Vec<u8>>,
}

impl FuzzLink {
    /// Creates a link whose frames have chunks of `chunk` bytes, at least the size of all headers together.
    pub fn new(chunk: usize) -> Self {
        Self {
            chunk: chunk.clamp(256, TX_BYTES),
            incoming: std::collections::VecDeque::new(),
            lent: Slab::new(),
            out: Slab::new(),
            ring: Vec::new(),
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
        RxFrame::new(self.lent.insert(chunks) as u32, count, bytes.len() as u32, QueueId(0))
    }

    /// Queues a frame for [`Link::receive`]. It is lost, as on a NIC, when no frame is free.
    pub fn arrive(&mut self, bytes: &[u8]) {
        if self.lent.len() < RX_FRAMES {
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
        TX_FRAMES - self.out.len()
    }

    fn rx_frames(&self) -> usize {
        RX_FRAMES
    }

    fn rx_available(&self, _queue: QueueId) -> usize {
        RX_FRAMES - self.lent.len()
    }

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let n = max.min(self.incoming.len());
        batch.extend(self.incoming.drain(..n));
        n
    }

    fn rx_chunk(&self, frame: &RxFrame, index: usize) -> &[u8] {
        self.lent[frame.head() as usize].get(index).map_or(&[], Vec::as_slice)
    }

    fn recycle(&mut self, frame: RxFrame) {
        self.lent.remove(frame.head() as usize);
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        if self.out.len() >= TX_FRAMES || len > TX_BYTES {
            return None;
        }
        let count = len.div_ceil(self.chunk).max(1);
        let chunks = vec![vec![0; self.chunk]; count];
        let head = self.out.insert(Sent { chunks, submitted: false, released: false });
        Some(TxFrame::new(head as u32, count as u16))
    }

    fn tx_chunks(&mut self, frame: &mut TxFrame) -> Option<ChunksMut<'_>> {
        let sent = &mut self.out[frame.head() as usize];
        assert!(!sent.released, "a token for a frame that was released");
        (!sent.submitted).then(|| sent.chunks.iter_mut().map(Vec::as_mut_slice).collect())
    }

    fn submit(&mut self, _queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        if self.ring.len() >= RING {
            return Err(RingFull);
        }
        let sent = &mut self.out[frame.head() as usize];
        assert!(!sent.submitted && !sent.released, "submitted while it is still being sent");
        assert!(len <= sent.chunks.len() * self.chunk, "longer than the frame");
        sent.submitted = true;
        self.ring.push((frame.head() as usize, len));
        Ok(())
    }

    fn release(&mut self, frame: TxFrame) {
        let sent = &mut self.out[frame.head() as usize];
        assert!(!sent.released, "released twice");
        sent.released = true;
        if !sent.submitted {
            self.out.remove(frame.head() as usize);
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
                self.out.remove(head);
            }
        }
    }

    fn steer(&mut self, _rule: Steer) -> Result<(), SteerError> {
        Ok(())
    }

    fn unsteer(&mut self, _rule: Steer) {}
}
