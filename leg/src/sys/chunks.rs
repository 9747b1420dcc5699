//! [`Chunks`]: frame memory at the end that owns it, in chunks of one page, and the place of each chunk.

use std::sync::Arc;

use xwarp_tcp::link::ChunksMut;

use super::Shared;
use crate::chains::Chains;
use crate::frames::{FrameCensus, FrameTable, Place};

/// Bytes of one chunk.
pub(crate) const CHUNK_BYTES: usize = 4096;

/// Largest number of chunks of a frame.
pub(crate) const MAX_CHUNKS: usize = 16;

/// The chunks of a leg: those for received frames, then those for frames to send.
#[derive(Debug)]
pub(crate) struct Chunks {
    memory: Arc<Shared>,
    /// Byte of the memory at which the first chunk begins.
    base: usize,
    table: FrameTable,
    chains: Chains,
    /// By chunk: how many bytes were received in it.
    received: Box<[u32]>,
}

/// A received frame: a chain of chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Arrived {
    pub head: u32,
    last: u32,
    pub chunks: u16,
    pub bytes: u32,
}

/// Number of chunks of a frame of `len` bytes.
pub(crate) const fn chunks_of(len: usize) -> usize {
    if len == 0 { 1 } else { len.div_ceil(CHUNK_BYTES) }
}

impl Chunks {
    /// The chunks from byte `base` of `memory` on. `None` if the memory is too short.
    pub(crate) fn new(memory: &Arc<Shared>, base: usize, receive: u32, transmit: u32) -> Option<Self> {
        let total = receive.checked_add(transmit)?;
        let bytes = (total as usize).checked_mul(CHUNK_BYTES)?;
        memory.contains(base, bytes).then(|| Self {
            memory: Arc::clone(memory),
            base,
            table: FrameTable::new(1, receive, transmit),
            chains: Chains::new(total),
            received: vec![0; total as usize].into(),
        })
    }

    /// Where a chunk begins in the memory; at most as far as its length, which a region's offset of 32 bits covers.
    pub(crate) fn offset(&self, chunk: u32) -> usize {
        self.base + chunk as usize * CHUNK_BYTES
    }

    pub(crate) fn census(&self) -> FrameCensus {
        self.table.census()
    }

    pub(crate) fn transmit_free(&self) -> usize {
        self.table.transmit_free()
    }

    /// Receive chunks that hold no received frame.
    pub(crate) fn receive_available(&self) -> usize {
        self.table.receive_total(0) - self.table.receive_out(0)
    }

    /// Receive chunks that are with neither end.
    pub(crate) fn receive_free(&self) -> usize {
        self.table.receive_free(0)
    }

    /// Takes a free receive chunk for the other end to fill.
    pub(crate) fn fill(&mut self) -> Option<u32> {
        self.table.fill(0)
    }

    /// Appends a chunk that the other end has filled with `len` bytes to a frame. Returns false, and the chunk is free again, if the
    /// chunk was not with the other end, the length is too large, or the frame has too many chunks.
    pub(crate) fn arrived(&mut self, frame: &mut Arrived, chunk: u32, len: u32) -> bool {
        if self.table.received(chunk).is_err() {
            return false;
        }
        if len as usize > CHUNK_BYTES || usize::from(frame.chunks) >= MAX_CHUNKS {
            let recycled = self.table.recycle(chunk);
            debug_assert!(recycled.is_ok(), "it has just been received");
            return false;
        }
        if let Some(bytes) = self.received.get_mut(chunk as usize) {
            *bytes = len;
        }
        if frame.chunks == 0 {
            self.chains.begin(chunk);
            frame.head = chunk;
        } else {
            self.chains.append(frame.head, frame.last, chunk);
        }
        frame.last = chunk;
        frame.chunks += 1;
        frame.bytes += len;
        true
    }

    /// The bytes of a received frame, chunk by chunk; nothing when it is not received.
    pub(crate) fn received(&self, head: u32) -> impl Iterator<Item = &[u8]> {
        let is_received = |chunk: &u32| self.table.place(*chunk) == Some(Place::Received);
        let bytes = |chunk: u32| {
            let len = self.received.get(chunk as usize).map_or(0, |len| *len as usize).min(CHUNK_BYTES);
            // SAFETY: all chunks lie inside the mapping, which `self` keeps, and `len` inside the chunk. The chunk is `Received`, so
            // this end does not write it while `self` is borrowed, and the other end has given it back.
            unsafe { std::slice::from_raw_parts(self.memory.start().add(self.offset(chunk)).as_ptr(), len) }
        };
        self.chains.iter(head).filter(is_received).map(bytes)
    }

    /// Frees the chunks of a received frame.
    pub(crate) fn recycle(&mut self, head: u32) {
        for chunk in self.chains.truncate(head, 0) {
            let recycled = self.table.recycle(chunk);
            debug_assert!(recycled.is_ok(), "chunk {chunk} is not received");
        }
    }

    /// A transmit frame of `chunks` chunks, named by its first chunk.
    pub(crate) fn alloc(&mut self, chunks: usize) -> Option<u32> {
        if chunks > MAX_CHUNKS || self.table.transmit_free() < chunks {
            return None;
        }
        let head = self.table.alloc()?;
        self.chains.begin(head);
        let mut last = head;
        for _ in 1..chunks {
            let chunk = self.table.alloc()?;
            self.chains.append(head, last, chunk);
            last = chunk;
        }
        Some(head)
    }

    /// Number of chunks of a transmit frame.
    pub(crate) fn len(&self, head: u32) -> usize {
        self.chains.len(head)
    }

    /// Whether the other end reads no chunk of the frame, which has some.
    pub(crate) fn is_retained(&self, head: u32) -> bool {
        let mut places = self.chains.iter(head).map(|chunk| self.table.place(chunk));
        self.chains.len(head) > 0 && places.all(|place| place == Some(Place::Retained))
    }

    /// Appends the memory of a frame that is retained to `chunks`, chunk by chunk. Returns false, and appends nothing, while the
    /// other end may read it.
    pub(crate) fn retained_into<'a>(&'a mut self, head: u32, chunks: &mut ChunksMut<'a>) -> bool {
        if !self.is_retained(head) {
            return false;
        }
        for chunk in self.chains.iter(head) {
            // SAFETY: all chunks lie inside the mapping, which `self` keeps. The chunk is `Retained`, so the other end does not use
            // it, and `&mut self` keeps every other reference to it away; the other slices are of other chunks of the chain.
            chunks.push(unsafe {
                std::slice::from_raw_parts_mut(
                    self.memory.start().add(self.offset(chunk)).as_ptr(),
                    CHUNK_BYTES,
                )
            });
        }
        true
    }

    /// Gives the first `count` chunks of a retained frame to the other end, each to `send`, and frees the others.
    pub(crate) fn send(&mut self, head: u32, count: usize, mut send: impl FnMut(u32)) {
        for chunk in self.chains.truncate(head, count) {
            let released = self.table.release(chunk);
            debug_assert!(released.is_ok(), "chunk {chunk} is retained");
        }
        for chunk in self.chains.iter(head) {
            let sending = self.table.sending(chunk);
            debug_assert!(sending.is_ok(), "chunk {chunk} is retained");
            send(chunk);
        }
    }

    /// The other end has given a chunk back.
    pub(crate) fn sent(&mut self, chunk: u32) {
        let sent = self.table.sent(chunk);
        debug_assert!(sent.is_ok(), "chunk {chunk} was not being sent");
    }

    /// Takes back the token of a transmit frame.
    pub(crate) fn release(&mut self, head: u32) {
        for chunk in self.chains.truncate(head, 0) {
            let released = self.table.release(chunk);
            debug_assert!(released.is_ok(), "chunk {chunk} has no token");
        }
    }
}
