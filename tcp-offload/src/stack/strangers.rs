//! Frames without a connection in this engine: of a half-open connection, of another engine's connection, for a
//! listener, or for none of these.

use super::Stack;
use crate::{
    link::{Link, RxFrame},
    time::Instant,
    ulp::Ulp,
    wire::{Flow, Segment},
};

/// Largest number of resets that wait for a transmit frame. Beyond them, segments without a connection are not
/// answered: RFC 9293 section 3.10.7.1 asks for a reset for each, but the queue must be bounded.
const MAX_RESETS: usize = 64;

impl<U: Ulp> Stack<U> {
    /// Processes a segment without a connection. Returns the connection that the segment has opened, if any.
    pub(super) fn receive_stranger(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        segment: &Segment,
        frame: &RxFrame,
    ) -> Option<u32> {
        if self.half_open.holds(&segment.flow) {
            self.receive_half(now, link, segment);
        } else if !self.hand_over(link, frame, &segment.flow) {
            self.receive_unknown(now, link, segment);
        }
        self.flows.get(&segment.flow).copied()
    }

    /// Hands a frame over to the engine that has its flow, if another one has it.
    pub(super) fn hand_over(&mut self, link: &mut dyn Link, frame: &RxFrame, flow: &Flow) -> bool {
        let elsewhere = link.hand_over(frame, flow);
        self.counters.handed_over += u64::from(elsewhere);
        elsewhere
    }

    fn receive_unknown(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) {
        let (ip, port) = (segment.flow.local.ip(), segment.flow.local.port());
        let listener = self
            .listeners
            .iter()
            .filter(|(_, l)| l.accepts(ip, port))
            .max_by_key(|(_, l)| l.precision())
            .map(|(id, _)| *id);
        match listener {
            Some(id) if segment.flags.is_plain_syn() => self.open_passive(now, link, segment, id),
            _ => {
                self.counters.no_connection += 1;
                self.answer_by_reset(segment);
            }
        }
    }

    /// Answers a segment by a reset, unless it is one.
    pub(super) fn answer_by_reset(&mut self, segment: &Segment) {
        if !segment.flags.rst && self.resets.len() < MAX_RESETS {
            self.resets.push_back(*segment);
        }
    }
}
