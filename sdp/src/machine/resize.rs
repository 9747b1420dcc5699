//! Sizes of the receive buffers of both ends, and their change (draft section 10.6).

use std::collections::VecDeque;

use super::{Control, Request, Role, Violation};
use crate::wire::{Message, Seq};

/// Number of consecutive full messages after which larger buffers are requested.
const FULL_IN_A_ROW: u8 = 16;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Resize {
    /// Size of the peer's receive buffers: the longest message that we may send.
    pub(super) peer_bytes: u32,
    /// The size that we request.
    wanted: u32,
    /// Our unanswered ChRcvBuf.
    asked: Request,
    /// The peer answered a request for larger buffers with the same size, so no more requests are sent.
    pub(super) refused: bool,
    full_in_a_row: u8,
    /// Size of our receive buffers, as acknowledged to the peer.
    pub(super) own_bytes: u32,
    /// The new size, until the Ack is sent: buffers of this size are posted.
    growing: Option<u32>,
    /// Buffers of the old size that are still posted.
    pub(super) old_left: u16,
    most_bytes: u32,
}

impl Resize {
    pub(super) fn new(own_bytes: u32, most_bytes: u32, wanted: u32) -> Self {
        Self {
            peer_bytes: 0,
            wanted,
            asked: Request::None,
            refused: false,
            full_in_a_row: 0,
            own_bytes,
            growing: None,
            old_left: 0,
            most_bytes,
        }
    }

    /// Drops requests of the suspended connection. The current sizes stay.
    pub(super) fn start_again(&mut self) {
        self.asked = Request::None;
        self.full_in_a_row = 0;
        self.growing = None;
        self.old_left = 0;
    }

    /// Size of the receives to post from now on.
    pub(super) fn post_bytes(&self) -> u32 {
        self.growing.unwrap_or(self.own_bytes)
    }

    /// Counts a sent payload message, and requests larger buffers after several full ones.
    pub(super) fn sent_payload(&mut self, bytes: u32, control: &mut VecDeque<Control>) {
        if bytes < self.peer_bytes {
            self.full_in_a_row = 0;
            return;
        }
        self.full_in_a_row = self.full_in_a_row.saturating_add(1);
        if self.full_in_a_row >= FULL_IN_A_ROW
            && self.wanted > self.peer_bytes
            && self.asked == Request::None
            && !self.refused
        {
            self.asked = Request::Queued;
            control.push_back(Message::ChRcvBuf { bytes: self.wanted }.into());
        }
    }

    /// Records the number of our ChRcvBuf.
    pub(super) fn sent_request(&mut self, seq: Seq) {
        self.asked = Request::Sent(seq);
    }

    /// The peer's request. `ack` is the MSeqAck of its message, `posted` the number of receives posted.
    pub(super) fn requested(
        &mut self,
        bytes: u32,
        ack: Seq,
        posted: u16,
        role: Role,
        control: &mut VecDeque<Control>,
    ) -> Result<(), Violation> {
        // Both requested at the same time: the accepting peer disregards the other's request (draft section 10.6.1).
        // Requests cross when the peer had not received ours when it sent its own (decision 21).
        let crossed = matches!(self.asked, Request::Sent(seq) if ack.since(seq) < 0);
        if crossed && role == Role::Accepting {
            return Ok(());
        }
        if self.growing.is_some() {
            return Err(Violation::Resize);
        }
        let new = bytes.min(self.most_bytes);
        if new > self.own_bytes {
            self.growing = Some(new);
            self.old_left = posted;
            self.acknowledge_growth(control);
        } else {
            // A decrease may be answered with the same size.
            control.push_back(Message::ChRcvBufAck { bytes: self.own_bytes }.into());
        }
        Ok(())
    }

    /// Counts a used receive, and acknowledges the new size after the last one of the old size.
    pub(super) fn receive_used(&mut self, control: &mut VecDeque<Control>) {
        if self.growing.is_some() {
            self.old_left = self.old_left.saturating_sub(1);
            self.acknowledge_growth(control);
        }
    }

    fn acknowledge_growth(&mut self, control: &mut VecDeque<Control>) {
        if self.old_left == 0
            && let Some(bytes) = self.growing.take()
        {
            self.own_bytes = bytes;
            control.push_back(Message::ChRcvBufAck { bytes }.into());
        }
    }

    /// The peer's answer.
    pub(super) fn answered(&mut self, bytes: u32) -> Result<(), Violation> {
        let Request::Sent(_) = self.asked else { return Err(Violation::Resize) };
        if bytes < self.peer_bytes {
            // A request for larger buffers is answered by a larger or the same size.
            return Err(Violation::Resize);
        }
        self.refused = bytes == self.peer_bytes;
        self.peer_bytes = bytes;
        self.asked = Request::None;
        self.full_in_a_row = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An end that has requested larger buffers in its message number 20, and the waiting messages.
    fn asking() -> (Resize, VecDeque<Control>) {
        let mut control = VecDeque::new();
        let mut resize = Resize::new(37, 80, 80);
        resize.peer_bytes = 37;
        for _ in 0..FULL_IN_A_ROW {
            assert!(control.is_empty());
            resize.sent_payload(37, &mut control);
        }
        assert_eq!(control.pop_front().unwrap().message, Message::ChRcvBuf { bytes: 80 });
        resize.sent_request(Seq(20));
        (resize, control)
    }

    #[test]
    fn sdp_s10_6_1_of_crossing_requests_the_connecting_end_answers() {
        let (mut accepting, mut control) = asking();
        accepting.requested(80, Seq(19), 3, Role::Accepting, &mut control).unwrap();
        assert!(control.is_empty() && accepting.post_bytes() == 37, "disregarded");
        accepting.requested(80, Seq(20), 0, Role::Accepting, &mut control).unwrap();
        assert_eq!(control.pop_front().unwrap().message, Message::ChRcvBufAck { bytes: 80 }, "not crossed");

        let (mut connecting, mut control) = asking();
        connecting.requested(80, Seq(19), 3, Role::Connecting, &mut control).unwrap();
        assert_eq!(connecting.post_bytes(), 80);
        for _ in 0..3 {
            assert!(control.is_empty(), "the Ack follows the last old receive");
            connecting.receive_used(&mut control);
        }
        assert_eq!(control.pop_front().unwrap().message, Message::ChRcvBufAck { bytes: 80 });
    }

    #[test]
    fn sdp_s10_6_a_refused_request_is_not_repeated_and_answers_need_a_request() {
        let (mut resize, mut control) = asking();
        assert_eq!(resize.answered(36), Err(Violation::Resize), "less than before");
        resize.answered(37).unwrap();
        for _ in 0..100 {
            resize.sent_payload(37, &mut control);
        }
        assert!(control.is_empty());
        assert_eq!(resize.answered(80), Err(Violation::Resize), "an answer to nothing");
    }
}
