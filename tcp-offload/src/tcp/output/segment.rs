//! One new segment: how many chunks it may take, how its frame is filled, and how it is submitted and retained.

use std::num::NonZeroU16;

use super::{ACK, Acknowledgement, Stopped, Turn};
use crate::{
    link::{FrameWriter, Link, TxFrame, chunks_of},
    tcp::{
        Connection, Filled, Source,
        queue::{Payload, SentSegment},
    },
    time::Instant,
    wire::{Ecn, Fields, Flags, Options, RunningSum, Sum},
};

/// What stays the same for all new segments until the connection is [resized](Connection::resize) or tuned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tcp) struct Plan {
    /// Bytes of the headers.
    pub(super) header: usize,
    /// See [`Link::chunk_bytes`].
    pub(super) chunk_bytes: usize,
    /// See [`Headers::left_checksum`](crate::wire::Headers::left_checksum).
    pub(super) left_checksum: Option<NonZeroU16>,
    /// See [`Connection::reserved_chunks`].
    pub(super) reserved: usize,
}

/// The reason why a new segment was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotSent {
    /// No frame is free.
    NoFrame,
    /// The link still reads the frame.
    LinkReads,
    /// The ring has no slot. The segment counts as sent and lost.
    NoSlot,
}

/// A connection may retain this multiple of the free chunks. A single connection can thus retain four fifths of all
/// chunks.
const FREE_TIMES: usize = 4;

impl Connection {
    /// The plan of new segments.
    #[inline]
    pub(super) fn plan(&mut self, link: &dyn Link) -> Plan {
        if let Some(plan) = self.plan {
            debug_assert_eq!(plan, self.new_plan(link));
            return plan;
        }
        let plan = self.new_plan(link);
        // The fast path is only for connections with a plan.
        if !self.held {
            self.plan = Some(plan);
        }
        plan
    }

    #[inline(never)]
    fn new_plan(&self, link: &dyn Link) -> Plan {
        let chunk_bytes = link.chunk_bytes();
        let reserved = self.reserved_chunks(chunk_bytes);
        let left_checksum = self.headers.left_checksum(link);
        Plan { header: self.header_bytes(), chunk_bytes, left_checksum, reserved }
    }

    /// Number of chunks that may be retained now, if `free` chunks are not reserved: a multiple of `free` (dynamic
    /// thresholds, Choudhury and Hahne 1998). Even if many peers have fallen silent, the next connection finds free
    /// chunks.
    pub(super) fn most_chunks(&self, free: usize) -> usize {
        // At least one: with nothing in flight, no ACK would trigger another attempt. Then `fill` checks for free
        // chunks.
        (FREE_TIMES * free).max(1).min(self.config.max_chunks as usize)
    }

    /// Free chunks that new data leaves to ACKs and retransmissions: one half to ACKs, the other half, at least one
    /// full segment, to retransmissions.
    #[inline]
    pub(super) fn reserved_chunks(&self, chunk_bytes: usize) -> usize {
        (self.config.reserve_chunks as usize).max(2 * chunks_of(chunk_bytes, self.header_bytes() + self.emss))
    }

    /// Bytes of the headers of a segment with payload.
    pub(super) fn header_bytes(&self) -> usize {
        self.headers.len(&Options::default()) + self.option_bytes()
    }

    /// [`Self::send_next`] within a call of [`Connection::transmit`].
    pub(super) fn fill(
        &mut self,
        turn: &mut Turn<'_>,
        source: &mut impl Source,
        room: usize,
        plan: Plan,
        acknowledgement: &mut Option<Acknowledgement>,
    ) -> Result<Filled, Stopped> {
        match self.send_next(turn.now, turn.link, source, (plan, room), acknowledgement) {
            Ok(filled) => {
                turn.sent.frames += usize::from(matches!(filled, Filled::Segment { .. }));
                Ok(filled)
            }
            Err(NotSent::NoFrame) => Err(turn.no_frame()),
            Err(NotSent::LinkReads | NotSent::NoSlot) => Err(Stopped::Starved),
        }
    }

    /// Builds and sends one new segment from `source`, with at most `room` bytes of payload. It is pushed if there is no data for
    /// another one (RFC 9293 section 3.9.1.2). All segments of one call of [`Connection::transmit`] carry the `acknowledgement` of the
    /// first one. Nothing has changed, unless the outcome is a segment or [`NotSent::NoSlot`].
    #[expect(clippy::inline_always, reason = "each of its two callers knows some of the arguments")]
    #[inline(always)]
    pub(super) fn send_next(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        source: &mut impl Source,
        (plan, room): (Plan, usize),
        acknowledgement: &mut Option<Acknowledgement>,
    ) -> Result<Filled, NotSent> {
        let (offset, header) = (self.tx.nxt(), plan.header);
        let Some(mut frame) = link.alloc(header + room) else { return Err(NotSent::NoFrame) };
        let mut writer = FrameWriter::closed();
        if !writer.open(link, &mut frame, header, header + room) {
            drop(writer);
            link.release(frame);
            return Err(NotSent::LinkReads);
        }
        let filled = source.fill(offset, &mut writer);
        let (len, more) = match filled {
            Filled::Segment { len, more } if len > 0 => (len.min(room), more),
            Filled::Segment { .. } | Filled::Nothing | Filled::Finish => {
                drop(writer);
                link.release(frame);
                return Ok(if filled == Filled::Finish { filled } else { Filled::Nothing });
            }
        };
        let left = plan.left_checksum.is_some();
        let sum = if left { Sum::default() } else { payload_sum(&writer, header, len) };
        self.tx.before_new_data(now);
        let acknowledgement = match *acknowledgement {
            Some(known) => known,
            None => *acknowledgement.insert(self.acknowledgement(now)),
        };
        let flags = Flags { psh: !more, ..self.data_flags(true) };
        // Only a new segment is ECN-capable (RFC 3168 section 6.1.5).
        let ecn = if self.marks.is_on() { Ecn::Ect0 } else { Ecn::NotEct };
        let fields = Fields { ecn, ..acknowledgement.fields(self.tx.seq_at(offset), flags) };
        let written = self.headers.emit(writer.front(header), &fields, len, (!left).then_some(sum));
        debug_assert_eq!(written, Some(header), "the header was reserved for these options");
        drop(writer);
        if left {
            frame.leave_checksum(plan.left_checksum);
        }
        if !self.submit_new(now, link, frame, header, len, sum) {
            return Err(NotSent::NoSlot);
        }
        Ok(Filled::Segment { len, more })
    }

    /// Submits a new segment with `header` bytes of headers and `len` bytes of payload, and retains it until it is acknowledged.
    /// Returns whether the link has taken it.
    #[expect(clippy::inline_always, reason = "each new segment calls it once")]
    #[inline(always)]
    pub(super) fn submit_new(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        mut frame: TxFrame,
        header: usize,
        len: usize,
        sum: Sum,
    ) -> bool {
        self.counters.bytes_out += len as u64;
        let offset = self.tx.nxt();
        let sent = link.submit(self.path.queue, &mut frame, header + len).is_ok();
        // The link may have shortened the frame.
        let chunks = frame.chunks() as u16;
        let payload = Payload::Frame { frame, header };
        let end = offset + len as u64;
        self.tx.sent_new(now, SentSegment { chunks, ..SentSegment::new(offset, end, payload, sum, now) });
        if sent {
            self.marks.set_cwr(false);
        } else {
            // Its bytes have already been taken from the source: the segment counts as sent and lost, and the next turn
            // sends it.
            self.tx.queue.mark_last_unsent();
        }
        sent
    }

    /// The control bits of a segment with payload, which is pushed. A new segment may report a reduced window.
    pub(super) fn data_flags(&self, new: bool) -> Flags {
        Flags { psh: true, ece: self.marks.echo(), cwr: new && self.marks.cwr(), ..ACK }
    }
}

/// The sum of the `len` bytes of payload that were written behind `header` bytes.
#[expect(clippy::inline_always, reason = "each new segment calls it once")]
#[inline(always)]
fn payload_sum(writer: &FrameWriter<'_>, header: usize, len: usize) -> Sum {
    if let Some(payload) = writer.in_first_chunk(header, header + len) {
        return Sum::of(payload);
    }
    let mut payload = RunningSum::default();
    writer.for_each(header, header + len, |piece| payload.add(piece));
    payload.sum
}
