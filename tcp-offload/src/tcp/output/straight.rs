//! The straight path of new data: one segment of an undisturbed connection, which nothing precedes and nothing limits. It applies the
//! rules of `output` that can have an effect on such a segment, and no others. A property test compares its outcome with that of
//! [`Connection::transmit`].

use super::segment::payload_sum;
use crate::{
    link::{FrameWriter, Link, chunks_of},
    tcp::{
        Connection, Filled, Source,
        recovery::RecoveryPhase,
        sender::After,
        stage::{Sending, Stage},
    },
    time::Instant,
    wire::{CoreFields, Ecn, Flags, Sum},
};

impl Connection {
    /// Sends the next new segment from `source`, if nothing disturbs the connection. Returns whether nothing more is to be sent;
    /// otherwise [`Self::transmit`] must follow.
    #[inline(never)]
    pub fn transmit_straight(&mut self, now: Instant, link: &mut dyn Link, source: &mut impl Source) -> bool {
        if !self.sends_straight(now) {
            return false;
        }
        let (Some(plan), Some(clock)) = (self.plan, &self.clock) else { return false };
        let timestamps = clock.option(now);
        let (free, header, emss) = (link.tx_available(), plan.header, self.emss);
        let needed = plan.reserved + chunks_of(plan.chunk_bytes, header + emss);
        if free < needed || !self.tx.has_room(emss, self.most_chunks(free - plan.reserved)) {
            return false;
        }
        let Some(mut frame) = link.alloc(header + emss) else { return false };
        let mut writer = FrameWriter::closed();
        let opened = writer.open(link, &mut frame, header, header + emss);
        let offset = self.tx.nxt();
        let (len, more) = match if opened { source.fill(offset, &mut writer) } else { Filled::Nothing } {
            Filled::Segment { len, more } if len > 0 => (len.min(emss), more),
            _ => {
                drop(writer);
                link.release(frame);
                return false;
            }
        };
        let left = plan.left_checksum.is_some();
        let sum = if left { Sum::default() } else { payload_sum(&writer, header, len) };
        self.tx.before_new_data(now);
        // Before the peer's FIN.
        let ack = self.rx.seq_at(self.rx.next());
        let flags = Flags { psh: !more, ..self.data_flags(true) };
        let fields = CoreFields {
            seq: self.tx.seq_at(offset),
            ack,
            flags,
            window: self.rx.advertise(self.snd_shift.is_some()),
            timestamps,
            ecn: if self.marks.is_on() { Ecn::Ect0 } else { Ecn::NotEct },
        };
        let written = self.headers.emit_plain(writer.front(header), &fields, len, (!left).then_some(sum));
        debug_assert_eq!(written, Some(header), "the header was reserved for these options");
        drop(writer);
        if left {
            frame.leave_checksum(plan.left_checksum);
        }
        let sent = self.submit_new(now, link, frame, header, len, sum);
        // The postponed acknowledgment restarts the timers.
        if !self.has_postponed() {
            self.tx.arm(now, &mut self.timers, &self.config, After::Sent);
        }
        if !sent {
            return false;
        }
        self.counters.segments_out += 1;
        self.acknowledged_to(ack, false);
        !more && !self.ack.is_due() && !self.challenge_due
    }

    /// Whether nothing precedes new data, which may be sent now, in full segments with plain headers.
    #[inline]
    fn sends_straight(&self, now: Instant) -> bool {
        #[cfg(test)]
        if !crate::tcp::testing::straight_paths() {
            return false;
        }
        matches!(self.stage, Stage::Established(Sending::Open))
            && !self.due.any()
            && self.marks.boundary().is_none()
            && self.tx.phase == RecoveryPhase::Open
            && !self.tx.wants_to_retransmit()
            && !self.tx.paces()
            && !self.mtu.is_searching(now)
            && self.headers.is_plain()
    }
}
