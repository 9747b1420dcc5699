//! Retransmission: from the frame that was sent, or from the heap when the frame was released.

use super::{Stopped, Turn};
use crate::{
    link::{FrameWriter, Link, chunks_for},
    seq::StreamOffset,
    tcp::{Connection, queue::Payload, sender::After},
    time::Instant,
    wire::{Flags, MAX_HEADER_BYTES, Options},
};

impl Connection {
    /// Allows the next [`Connection::transmit`] to move at most `bytes` of payload to the heap.
    pub fn allow_spill(&mut self, bytes: usize) {
        self.spill_allowance = bytes;
    }

    /// Relieves a shortage of frames: segments first sent at `before` or earlier move their payload to the heap and release their
    /// frame, the oldest first, at most `room` bytes. Returns the bytes moved.
    pub fn spill(&mut self, link: &mut dyn Link, before: Instant, room: usize) -> usize {
        self.tx.queue.spill(link, before, room)
    }

    /// Bytes of unacknowledged payload on the heap.
    pub fn spilled_bytes(&self) -> usize {
        self.tx.queue.spilled_bytes()
    }

    /// The time at which the oldest unacknowledged segment was first sent.
    pub fn unacknowledged_since(&self) -> Option<Instant> {
        self.tx.queue.front().map(|entry| entry.first_sent)
    }

    #[inline(never)]
    pub(super) fn retransmit(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        while let Some(index) = self.tx.next_resend() {
            if self.is_held_by_pacing(turn.now) {
                break;
            }
            self.resend(turn, index)?;
        }
        Ok(())
    }

    /// Retransmits the last segment as a tail loss probe when there is no new data to send (RFC 8985 section 7.3).
    #[inline]
    pub(super) fn probe_with_old(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        if self.due.loss_probe { self.probe_with_last(turn) } else { Ok(()) }
    }

    #[inline(never)]
    fn probe_with_last(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        if self.tx.give_up_last_probe() {
            self.retransmit(turn)?;
            self.tx.arm(turn.now, &mut self.timers, &self.config, After::Timeout);
        } else if self.tx.may_probe()
            && let Some(last) = self.tx.queue.last_index()
        {
            self.resend(turn, last)?;
            self.probe_sent(turn.now, true);
        }
        self.due.loss_probe = false;
        Ok(())
    }

    #[inline(never)]
    pub(super) fn probe_sent(&mut self, now: Instant, is_retrans: bool) {
        self.counters.tlp_probes += 1;
        self.due.loss_probe = false;
        self.tx.tlp.end_seq = Some(self.tx.nxt());
        self.tx.tlp.is_retrans = is_retrans;
        self.tx.tlp.measured = false;
        self.tx.arm(now, &mut self.timers, &self.config, After::Timeout);
    }

    /// Retransmits entry `index` with new headers in front of the same payload.
    fn resend(&mut self, turn: &mut Turn<'_>, index: usize) -> Result<(), Stopped> {
        turn.check_room()?;
        let header = self.headers.len(&Options::default()) + self.option_bytes();
        self.recut(turn, index, header)?;
        let Some(entry) = self.tx.queue.entry(index) else { return Ok(()) };
        let (offset, is_fin) = (entry.start, entry.payload == Payload::Fin);
        if is_fin {
            let seq = self.tx.seq_at(offset);
            let fields = self.fields(turn.now, seq, Flags { fin: true, ..Flags::default() });
            self.bare(turn, &fields)?;
        } else {
            self.resend_payload(turn, index, offset)?;
        }
        self.acknowledged(false);
        self.counters.retransmits += 1;
        self.tx.resent(turn.now, index);
        if index == 0 {
            self.restart_timeout(turn.now);
        }
        Ok(())
    }

    fn resend_payload(
        &mut self,
        turn: &mut Turn<'_>,
        index: usize,
        offset: StreamOffset,
    ) -> Result<(), Stopped> {
        let fields = self.fields(turn.now, self.tx.seq_at(offset), self.data_flags(false));
        let reserved = self.reserved_chunks(turn.link.chunk_bytes());
        let left_checksum = self.headers.left_checksum(turn.link);
        let Some(entry) = self.tx.queue.entry(index) else { return Ok(()) };
        let (len, sum) = (entry.bytes() as usize, left_checksum.is_none().then_some(entry.payload_sum));
        let mut head = [0; MAX_HEADER_BYTES];
        let written = self.headers.emit(&mut head, &fields, len, sum).unwrap_or(0);
        let head = head.get(..written).unwrap_or_default();
        let sent = match &mut entry.payload {
            Payload::Fin => return Ok(()),
            Payload::Frame { frame, header } => {
                let chunks = turn.link.tx_chunks(frame).ok_or(Stopped::Starved)?;
                FrameWriter::new(chunks, 0, written).put(head);
                frame.leave_checksum(left_checksum);
                turn.link.submit(self.path.queue, frame, *header + len).is_ok()
            }
            Payload::Heap(bytes) => {
                // The frame is released as soon as it is sent, like that of an ACK. It may therefore come from the
                // reserve, but leaves half of the reserve to ACKs.
                if turn.link.tx_available() < reserved / 2 + chunks_for(turn.link, written + len) {
                    return Err(turn.no_frame());
                }
                let Some(mut frame) = turn.link.alloc(written + len) else { return Err(turn.no_frame()) };
                if let Some(chunks) = turn.link.tx_chunks(&mut frame) {
                    let mut writer = FrameWriter::new(chunks, 0, written + len);
                    writer.put(head);
                    writer.put(bytes);
                }
                frame.leave_checksum(left_checksum);
                let sent = turn.link.submit(self.path.queue, &mut frame, written + len).is_ok();
                turn.link.release(frame);
                sent
            }
        };
        turn.count(sent)
    }

    /// Cuts a segment that no longer fits the path into segments that do, or makes room for longer headers. Payload and
    /// sequence numbers stay the same, but the new segments are no longer aligned with FPDUs. They are stored on the
    /// heap, so that no frame is needed to retain them.
    fn recut(&mut self, turn: &mut Turn<'_>, index: usize, header: usize) -> Result<(), Stopped> {
        let emss = self.emss;
        let Some(entry) = self.tx.queue.entry(index) else { return Ok(()) };
        let len = entry.bytes() as usize;
        let too_long = len > emss;
        match &entry.payload {
            Payload::Frame { header: old, .. } if too_long || *old != header => {}
            Payload::Heap(_) if too_long => {}
            _ => return Ok(()),
        }
        if matches!(entry.payload, Payload::Frame { .. }) {
            if len > self.spill_allowance {
                return Err(turn.no_frame());
            }
            if !self.tx.queue.spill_entry(turn.link, index) {
                return Err(Stopped::Starved);
            }
            self.spill_allowance -= len;
        }
        if too_long {
            self.tx.queue.split(index, emss);
        }
        self.counters.recut += 1;
        Ok(())
    }
}
