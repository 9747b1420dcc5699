//! Messages with immediate data: those of RFC 7306, which have no payload, and Sends with it.

use xwarp_tcp::{rdma_tcp::SendControl, ulp::Pulled};

use super::{
    Shared,
    qp::{QueuePair, Transmitter},
    send_queue::{Progress, SendRequest},
    transmission::untagged,
    work::{Operation, SendFlags},
};
use crate::{
    ddp::Queue,
    rdmap::MessageType,
    segment::{SegmentWriter, UntaggedHead},
};

impl Transmitter {
    /// Header of the segment that begins at byte `sent` of a Send with immediate data.
    pub(super) fn immediate_head(&self, request: &SendRequest, sent: u32, last: bool) -> UntaggedHead {
        let word = match request.operation {
            Operation::SendImmediate { data } => u32::from_be_bytes(data),
            _ => 0,
        };
        let message = MessageType::SendImmediate { solicited: request.flags.contains(SendFlags::SOLICITED) };
        UntaggedHead { message, last, word, queue: Queue::Send, msn: self.send_msn, mo: sent }
    }
}

impl QueuePair {
    /// Writes the next segment of a Send with immediate data. `None`: the request has failed.
    #[inline(never)]
    pub(super) fn send_with_immediate(
        &mut self,
        shared: &mut Shared,
        out: SegmentWriter<'_, '_, '_>,
    ) -> Option<Pulled> {
        self.message_segment::<true>(shared, out)
    }

    /// Writes Immediate Data, of its own request or after an RDMA Write.
    #[inline(never)]
    pub(super) fn send_immediate(&mut self, data: [u8; 8], out: &mut SegmentWriter<'_, '_, '_>) -> Pulled {
        let position = self.sq.next;
        let solicited = self.sq.get(position).is_some_and(|e| e.flags.contains(SendFlags::SOLICITED));
        let header = untagged(MessageType::Immediate { solicited }, Queue::Send, self.tx.send_msn);
        let written = match &mut self.stream {
            Some(stream) => stream.put_control(SendControl::Immediate { data }, solicited, out),
            None => out.put_whole(&header, &data),
        };
        if !written {
            return Pulled::Nothing;
        }
        self.tx.send_msn = self.tx.send_msn.next();
        self.tx.current = None;
        self.sq.next = position + 1;
        self.set_progress(position, Progress::Sent(out.end()));
        Pulled::Ulpdu
    }
}
