//! The [`Link`] implementation: tokens to ring descriptors and back.

use std::time::Instant;

use rustix::net::{RecvFlags, recv};
use xwarp_tcp::link::{ChunksMut, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame};
use xwarp_tcp::wire::Flow;

use crate::interface::Interface;
use crate::lease::Lease;
use crate::sys::{CHUNK_CAPACITY, HANDED_OVER, REASSEMBLED, chunks_of};

/// This number of free chunks is put on the fill ring at a time. A refill reads the flag beside the kernel's position, and
/// the kernel waits for this cache line with the next frame: for every frame, if chunks were put back one by one.
const REFILL_BATCH: usize = 32;

impl Link for Interface {
    fn chunk_bytes(&self) -> usize {
        CHUNK_CAPACITY
    }

    fn offloads_checksums(&self) -> bool {
        self.rings.offloads_checksums()
    }

    fn tx_available(&self) -> usize {
        self.rings.transmit_free()
    }

    fn rx_capacity(&self) -> usize {
        self.sizes.receive_per_queue as usize
    }

    fn rx_available(&self, queue: QueueId) -> usize {
        self.rings.receive_available(queue.0)
    }

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let before = batch.len();
        if self.revoked() {
            return 0;
        }
        let queues = self.rings.queues();
        // With several owners, handed-over frames are received in turn with those of the queues.
        let sources = queues + u16::from(self.handed_over_bell().is_some());
        for turn in 0..sources {
            let room = max - (batch.len() - before);
            if room == 0 {
                break;
            }
            let queue = (self.next_queue + turn) % sources;
            if queue == queues {
                self.receive_handed_over(batch, room);
                continue;
            }
            self.rings.complete(queue);
            self.refill(queue);
            let mut bytes = 0;
            let taken = self.rings.receive(queue, room, |arrived| {
                bytes += u64::from(arrived.bytes);
                batch.push(RxFrame::new(arrived.head, arrived.chunks, arrived.bytes, QueueId(queue)));
            });
            self.counters.received_frames += taken.frames as u64;
            self.counters.received_bytes += bytes;
            self.counters.receive_malformed += taken.malformed as u64;
        }
        self.next_queue = (self.next_queue + 1) % sources.max(1);
        batch.len() - before
    }

    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        self.rings.received(frame.head()).collect()
    }

    fn rx_head(&self, frame: &RxFrame) -> &[u8] {
        self.rings.received(frame.head()).next().unwrap_or_default()
    }

    fn recycle(&mut self, frame: RxFrame) {
        self.rings.recycle(frame.head());
        self.refill(frame.queue().0);
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        let chunks = chunks_of(len);
        if chunks > self.sizes.frame_chunks() {
            return None;
        }
        if self.rings.transmit_free() < chunks {
            self.complete();
        }
        let head = self.rings.alloc(chunks);
        self.counters.transmit_exhausted += u64::from(head.is_none());
        head.map(|head| TxFrame::new(head, chunks as u16))
    }

    fn tx_chunks_into<'a>(&'a mut self, frame: &mut TxFrame, chunks: &mut ChunksMut<'a>) -> bool {
        self.rings.retained_into(frame.head(), chunks)
    }

    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        // An interface may have fewer transmit than receive queues.
        let queue = queue.0 % self.sizes.transmit_queues;
        let Some(chunks) = self.rings.submit(queue, frame.head(), len, frame.left_checksum()) else {
            self.counters.transmit_ring_full += 1;
            return Err(RingFull);
        };
        frame.shorten(chunks);
        self.sent_since_flush = true;
        self.counters.sent_frames += 1;
        self.counters.sent_bytes += len as u64;
        Ok(())
    }

    fn release(&mut self, frame: TxFrame) {
        self.rings.release(frame.head());
    }

    fn flush(&mut self) {
        for queue in 0..self.rings.queues() {
            self.request_kick(queue);
        }
        self.sent_since_flush = false;
        // If the caller kicks, a message waits for that now; the next call of `receive` takes the completions.
        if self.kicks.serve() || self.rings.transmit_free() < self.sizes.transmit as usize / 2 {
            self.complete();
        }
    }

    fn reassemble(&mut self, frame: RxFrame) -> Option<RxFrame> {
        let bytes = self.rings.received(frame.head()).collect::<Pieces<'_>>().concat();
        self.recycle(frame);
        self.counters.fragments += 1;
        let whole = self.reassembler.add(Instant::now(), &bytes)?;
        let arrived = self.rings.adopt_reassembled(&whole)?;
        self.counters.reassembled += 1;
        Some(RxFrame::new(arrived.head, arrived.chunks, arrived.bytes, QueueId(REASSEMBLED)))
    }

    /// A granted interface has no rules: all frames to a reserved port are ours.
    fn steer(&mut self, rule: Steer) -> Result<(), SteerError> {
        self.lease().map_or(Ok(()), |lease| lease.steer(rule))
    }

    fn unsteer(&mut self, rule: Steer) {
        if let Some(lease) = self.lease() {
            lease.unsteer(rule);
        }
    }

    fn hand_over(&mut self, frame: &RxFrame, flow: &Flow) -> bool {
        let Some(lease) = self.lease() else { return false };
        let Some(owner) = lease.owner_elsewhere(flow) else { return false };
        let bytes = self.rings.received(frame.head()).collect::<Pieces<'_>>().concat();
        let taken = lease.hand_over(owner, *flow, bytes);
        self.counters.hand_over_full += u64::from(!taken);
        true
    }
}

impl Interface {
    /// Receives up to `max` frames that other owners have handed over.
    fn receive_handed_over(&mut self, batch: &mut Vec<RxFrame>, max: usize) {
        for _ in 0..max {
            let Some(frame) = self.lease().and_then(Lease::next_handed_over) else { return };
            let Some(arrived) = self.rings.adopt(&frame) else {
                self.counters.hand_over_full += 1;
                continue;
            };
            self.counters.handed_in += 1;
            batch.push(RxFrame::new(arrived.head, arrived.chunks, arrived.bytes, QueueId(HANDED_OVER)));
        }
    }

    /// Requests a kick of the queue if frames are on its ring and the kernel must be woken.
    fn request_kick(&mut self, queue: u16) {
        let new = self.sent_since_flush;
        let left = self.rings.transmit_pending(queue);
        // After the helper has ended, the switch would still carry the device's frames.
        if left > 0 && !self.revoked() && self.rings.transmit_sleeps(queue) {
            self.kicks.request(queue, left, new);
        }
    }

    /// Takes the completions of all queues.
    fn complete(&mut self) {
        for queue in 0..self.rings.queues() {
            self.rings.complete(queue);
        }
    }

    /// Puts the queue's free chunks on its fill ring, once there are [`REFILL_BATCH`] of them or as many as on the ring.
    fn refill(&mut self, queue: u16) {
        let free = self.rings.receive_free(queue);
        let filled = self.rx_available(QueueId(queue)) - free;
        if free == 0 || free < REFILL_BATCH.min(filled) {
            return;
        }
        self.rings.refill(queue);
        if self.rings.fill_sleeps(queue)
            && let Some(socket) = self.socket(QueueId(queue))
        {
            // The call only wakes the kernel; it receives nothing, so its result does not matter.
            let _ = recv(socket, &mut [0; 0], RecvFlags::DONTWAIT);
        }
    }
}
