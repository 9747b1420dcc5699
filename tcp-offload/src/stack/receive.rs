//! A received frame on its way to its connection, and its payload on the way to the framing. Frames of one connection that follow one
//! another are in `run`.

use super::Stack;
use crate::{
    framing::{Carried, Taken, either},
    link::{Batch, Link, RxFrame},
    tcp::{self, Receipt},
    time::Instant,
    ulp::{ConnId, Ulp},
    wire::{self, Inbound, Malformed, Segment},
};

impl<U: Ulp> Stack<U> {
    /// Processes a received frame.
    pub fn receive(&mut self, now: Instant, link: &mut dyn Link, frame: RxFrame, ulp: &mut U) {
        self.receive_run(now, link, &mut Batch::from(frame), ulp);
    }

    /// Processes the first of the received frames in `frames`, and those that follow while they are segments of the same connection
    /// that header prediction admits. The others stay in `frames`.
    pub fn receive_run(&mut self, now: Instant, link: &mut dyn Link, frames: &mut Batch, ulp: &mut U) {
        self.catch_up(now, link, ulp);
        if !self.receive_recent(now, link, frames, ulp)
            && let Some(frame) = frames.next()
        {
            self.counters.frames_in += 1;
            self.receive_any(now, link, frame, ulp);
        }
    }

    /// Processes a frame of any kind.
    #[inline(never)]
    fn receive_any(&mut self, now: Instant, link: &mut dyn Link, frame: RxFrame, ulp: &mut U) {
        match wire::parse(link, &frame) {
            Ok(Inbound::Tcp(ref segment)) => self.receive_segment(now, link, segment, frame, ulp),
            Ok(Inbound::Icmp(error)) => {
                let elsewhere =
                    !self.has_connection(&error.flow) && self.hand_over(link, &frame, &error.flow);
                link.recycle(frame);
                if !elsewhere {
                    self.receive_icmp(now, link, error, ulp);
                }
            }
            Ok(Inbound::Other) => {
                self.counters.foreign += 1;
                link.recycle(frame);
            }
            Err(Malformed::Fragment) => {
                self.counters.fragments += 1;
                if let Some(whole) = link.reassemble(frame) {
                    // It is no fragment any more.
                    self.receive_any(now, link, whole, ulp);
                }
            }
            Err(reason) => {
                self.counters.malformed += 1;
                self.counters.bad_checksum +=
                    u64::from(matches!(reason, Malformed::Checksum | Malformed::IpChecksum));
                self.counters.mapped_addresses += u64::from(reason == Malformed::MappedAddress);
                link.recycle(frame);
            }
        }
    }

    fn receive_segment(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        segment: &Segment,
        frame: RxFrame,
        ulp: &mut U,
    ) {
        self.counters.partial_checksum += u64::from(segment.partial_checksum);
        self.replace_time_wait(link, segment);
        let known = self.flows.get(&segment.flow).copied();
        let Some(index) = known.or_else(|| self.receive_stranger(now, link, segment, &frame)) else {
            return link.recycle(frame);
        };
        self.recent.note(link, &frame, index, segment);
        self.receive_known(now, link, index, segment, frame, ulp);
    }

    /// Processes a segment of connection `index`.
    pub(super) fn receive_known(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        segment: &Segment,
        frame: RxFrame,
        ulp: &mut U,
    ) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return link.recycle(frame) };
        if !slot.checksums.admits(segment.partial_checksum, slot.tcp.is_credible(segment)) {
            self.counters.malformed += 1;
            self.counters.bad_checksum += 1;
            return link.recycle(frame);
        }
        slot.tcp.follow_queue(segment.queue);
        let receipt = slot.tcp.receive_one(now, link, segment);
        self.apply_receipt(now, link, index, &receipt, frame, ulp);
    }

    /// Passes what TCP found in a segment to the layers above.
    #[inline(never)]
    pub(super) fn apply_receipt(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        receipt: &Receipt,
        frame: RxFrame,
        ulp: &mut U,
    ) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return link.recycle(frame) };
        let conn = ConnId { index, generation: slot.generation };
        if let Some(acked) = receipt.acked {
            ulp.acked(conn, acked);
        }
        match receipt.arrival {
            Some(arrival) => self.take_payload(now, link, conn, &arrival, frame, ulp),
            None => link.recycle(frame),
        }
        self.after_change(now, link, index, receipt.closed, ulp);
    }

    /// Passes new payload to the framing; payload that the framing refuses counts as lost.
    fn take_payload(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        conn: ConnId,
        arrival: &tcp::NewPayload,
        frame: RxFrame,
        ulp: &mut U,
    ) {
        let spare = self.spare_hold(now, link, arrival.len, ulp);
        // Making room may have ended this very connection.
        let Some(slot) = self.slots.get_mut(conn.index as usize) else { return link.recycle(frame) };
        let path = slot.tcp.path();
        let fast = either!(&slot.session => allows_fast_path());
        let carried = Carried { payload: *arrival, frame, spare, fast };
        let taken = slot.session.receive(now, ulp, conn, path, link, carried);
        self.payload_offered(now, conn.index, arrival, taken);
    }

    /// Tells TCP what became of a payload that was offered to the framing.
    pub(super) fn payload_offered(
        &mut self,
        now: Instant,
        index: u32,
        arrival: &tcp::NewPayload,
        taken: Taken,
    ) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        match taken {
            Taken::Whole | Taken::InPart => slot.tcp.payload_taken(now, arrival),
            Taken::Not => self.counters.refused_payloads += 1,
        }
        if taken != Taken::Whole {
            slot.tcp.withheld(either!(&slot.session => window_bytes()));
        }
    }
}
