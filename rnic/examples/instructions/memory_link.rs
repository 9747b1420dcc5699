//! [`MemoryLink`]: the two ends of a cable in memory, as cheap as a link can be. Its functions are left out of the
//! count by their names, so none of them is inlined, and none calls another.
//!
//! A frame arrives when it is submitted.

use std::sync::{Arc, Mutex};

use xwarp_tcp::link::{ChunksMut, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame};

/// Transmit frames of each end, and receive frames.
const FRAMES: usize = 1024;

/// A received frame's memory and length.
type Received = (Box<[u8]>, usize);

/// Memory of frames in flight to one end, and memory to put others into.
#[derive(Default)]
struct Direction {
    in_flight: Vec<Received>,
    spare: Vec<Box<[u8]>>,
}

/// One end.
pub struct MemoryLink {
    /// Bytes of a chunk and of the longest frame.
    chunk_bytes: usize,
    frame_bytes: usize,
    /// Whether checksums are left to the link, and not needed because the peer is on the same machine.
    offloads_checksums: bool,
    tx: Vec<Box<[u8]>>,
    tx_free: Vec<u32>,
    rx: Vec<Received>,
    rx_free: Vec<u32>,
    to_us: Arc<Mutex<Direction>>,
    to_peer: Arc<Mutex<Direction>>,
}

/// The two ends of a cable for frames of at most `frame_bytes` bytes in chunks of `chunk_bytes`. Like a veth, it may have
/// partial checksums arrive as they are sent.
pub fn cable(chunk_bytes: usize, frame_bytes: usize, offloads_checksums: bool) -> [MemoryLink; 2] {
    let directions: [Arc<Mutex<Direction>>; 2] = Default::default();
    [0, 1].map(|end| MemoryLink {
        chunk_bytes,
        frame_bytes,
        offloads_checksums,
        tx: (0..FRAMES).map(|_| memory(frame_bytes)).collect(),
        tx_free: (0..FRAMES as u32).rev().collect(),
        rx: (0..FRAMES).map(|_| (memory(0), 0)).collect(),
        rx_free: (0..FRAMES as u32).rev().collect(),
        to_us: Arc::clone(&directions[end]),
        to_peer: Arc::clone(&directions[1 - end]),
    })
}

fn memory(bytes: usize) -> Box<[u8]> {
    vec![0; bytes].into_boxed_slice()
}

impl Link for MemoryLink {
    #[inline(never)]
    fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    #[inline(never)]
    fn offloads_checksums(&self) -> bool {
        self.offloads_checksums
    }

    #[inline(never)]
    fn tx_available(&self) -> usize {
        self.tx_free.len()
    }

    #[inline(never)]
    fn rx_capacity(&self) -> usize {
        FRAMES
    }

    #[inline(never)]
    fn rx_available(&self, _queue: QueueId) -> usize {
        self.rx_free.len()
    }

    #[inline(never)]
    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let mut direction = self.to_us.lock().unwrap();
        let n = direction.in_flight.len().min(max);
        for received in direction.in_flight.drain(..n) {
            let head = self.rx_free.pop().expect("the window is smaller than the receive frames");
            let chunks = received.1.div_ceil(self.chunk_bytes) as u16;
            batch.push(RxFrame::new(head, chunks, received.1 as u32, QueueId(0)));
            self.rx[head as usize] = received;
        }
        n
    }

    #[inline(never)]
    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        let (memory, len) = &self.rx[frame.head() as usize];
        memory[..*len].chunks(self.chunk_bytes).collect()
    }

    #[inline(never)]
    fn rx_head(&self, frame: &RxFrame) -> &[u8] {
        let (memory, len) = &self.rx[frame.head() as usize];
        &memory[..self.chunk_bytes.min(*len)]
    }

    #[inline(never)]
    fn recycle(&mut self, frame: RxFrame) {
        let (bytes, _) = std::mem::take(&mut self.rx[frame.head() as usize]);
        self.to_us.lock().unwrap().spare.push(bytes);
        self.rx_free.push(frame.head());
    }

    #[inline(never)]
    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        assert!(len <= self.frame_bytes, "longer than the MTU");
        Some(TxFrame::new(self.tx_free.pop()?, len.div_ceil(self.chunk_bytes) as u16))
    }

    #[inline(never)]
    fn tx_chunks_into<'a>(&'a mut self, frame: &mut TxFrame, chunks: &mut ChunksMut<'a>) -> bool {
        let memory = &mut self.tx[frame.head() as usize];
        chunks.extend(memory.chunks_mut(self.chunk_bytes).take(frame.chunks()));
        true
    }

    #[inline(never)]
    fn submit(&mut self, _queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        let mut direction = self.to_peer.lock().unwrap();
        let mut bytes = match direction.spare.pop() {
            Some(bytes) => bytes,
            None => memory(self.frame_bytes),
        };
        bytes[..len].copy_from_slice(&self.tx[frame.head() as usize][..len]);
        direction.in_flight.push((bytes, len));
        Ok(())
    }

    #[inline(never)]
    fn release(&mut self, frame: TxFrame) {
        self.tx_free.push(frame.head());
    }

    #[inline(never)]
    fn flush(&mut self) {}

    #[inline(never)]
    fn steer(&mut self, _rule: Steer) -> Result<(), SteerError> {
        Ok(())
    }

    #[inline(never)]
    fn unsteer(&mut self, _rule: Steer) {}
}
