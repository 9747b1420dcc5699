//! Output that is held, because the host has no route to the peer: to the connection, the network loses all that it sends.

use crate::{
    forward_link,
    link::{Link, QueueId, RingFull, TxFrame},
};

/// A link that sends nothing.
pub(super) struct Nowhere<'a>(pub &'a mut dyn Link);

impl Link for Nowhere<'_> {
    forward_link!(0: chunk_bytes, offloads_checksums, is_within_host, tx_available, rx_capacity, rx_available, receive, rx_chunks, rx_head, recycle,
        alloc, tx_chunks_into, release, flush, steer, unsteer, hand_over);

    /// The frame stays as it is, like one that the link has sent and the network has lost.
    fn submit(&mut self, _queue: QueueId, _frame: &mut TxFrame, _len: usize) -> Result<(), RingFull> {
        Ok(())
    }
}
