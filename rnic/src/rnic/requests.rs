//! Constructors of work requests: one for each operation, options by chaining.
//!
//! ```
//! use xwarp_rnic::{Sge, WorkRequest};
//!
//! let piece = Sge { len: 64, ..Sge::default() };
//! let request = WorkRequest::send(1, piece).signaled().solicited();
//! assert_eq!(request.wr_id, 1);
//! ```

use super::{
    Access, Binding, Operation, Payload, RecvRequest, Remote, SendFlags, Sge, WcStatus, WorkCompletion,
    WorkRequest,
};
use crate::{
    ddp::{STag, TaggedOffset},
    memory::Memory,
};

impl<'a> From<&'a [Sge]> for Payload<'a> {
    fn from(pieces: &'a [Sge]) -> Self {
        Self::Gather(pieces)
    }
}

impl<'a, const N: usize> From<&'a [Sge; N]> for Payload<'a> {
    fn from(pieces: &'a [Sge; N]) -> Self {
        Self::Gather(pieces)
    }
}

impl From<Sge> for Payload<'_> {
    fn from(piece: Sge) -> Self {
        Self::Piece(piece)
    }
}

impl<'a> WorkRequest<'a> {
    fn new(wr_id: u64, operation: Operation, payload: Payload<'a>) -> Self {
        Self { wr_id, operation, payload, flags: SendFlags::empty() }
    }

    /// Sends a message into the peer's next receive.
    pub fn send(wr_id: u64, payload: impl Into<Payload<'a>>) -> Self {
        Self::new(wr_id, Operation::Send { invalidate: None }, payload.into())
    }

    /// Sends a message into the peer's next receive and invalidates the peer's `key`: a window or a fast region is
    /// closed, a region loses its remote rights.
    pub fn send_with_invalidate(wr_id: u64, payload: impl Into<Payload<'a>>, key: STag) -> Self {
        Self::new(wr_id, Operation::Send { invalidate: Some(key) }, payload.into())
    }

    /// Sends a message into the peer's next receive, whose completion gets four bytes of immediate data.
    pub fn send_with_immediate(wr_id: u64, payload: impl Into<Payload<'a>>, data: [u8; 4]) -> Self {
        Self::new(wr_id, Operation::SendImmediate { data }, payload.into())
    }

    /// Writes to the peer's memory. The peer's application is not notified: send a message after the write.
    pub fn write(wr_id: u64, payload: impl Into<Payload<'a>>, remote: Remote) -> Self {
        Self::new(wr_id, Operation::Write { remote }, payload.into())
    }

    /// Writes to the peer's memory, then delivers eight bytes of Immediate Data with the completion of the peer's next
    /// receive. That completion's `byte_len` is the number of bytes written.
    pub fn write_with_immediate(
        wr_id: u64,
        payload: impl Into<Payload<'a>>,
        remote: Remote,
        data: [u8; 8],
    ) -> Self {
        Self::new(wr_id, Operation::WriteImmediate { remote, data }, payload.into())
    }

    /// Reads the peer's memory into `local`.
    pub fn read(wr_id: u64, local: Sge, remote: Remote) -> Self {
        Self::new(wr_id, Operation::Read { remote, invalidate: false }, local.into())
    }

    /// Reads the peer's memory into `local`, then revokes the remote rights on `local`'s region.
    pub fn read_with_invalidate(wr_id: u64, local: Sge, remote: Remote) -> Self {
        Self::new(wr_id, Operation::Read { remote, invalidate: true }, local.into())
    }

    /// Delivers eight bytes of Immediate Data with the completion of the peer's next receive.
    pub fn immediate(wr_id: u64, data: [u8; 8]) -> Self {
        Self::new(wr_id, Operation::Immediate { data }, Payload::EMPTY)
    }

    /// Adds `add` to a 64-bit word of the peer's memory. The word's former value is written to `local`, eight bytes.
    /// (The documentation of `xwarp-verbs` has a section on their byte order.)
    pub fn fetch_add(wr_id: u64, local: Sge, remote: Remote, add: u64) -> Self {
        Self::masked_fetch_add(wr_id, local, remote, add, 0)
    }

    /// Adds `add` to a 64-bit word of the peer's memory that consists of several fields: `mask` has the most
    /// significant bit of each field set, and no carry leaves a field (RFC 7306 section 5.1.1).
    pub fn masked_fetch_add(wr_id: u64, local: Sge, remote: Remote, add: u64, mask: u64) -> Self {
        Self::new(wr_id, Operation::FetchAdd { remote, add, mask }, local.into())
    }

    /// Replaces a 64-bit word of the peer's memory by `swap` if it is `compare`. The word's former value is written to
    /// `local`, eight bytes. (The documentation of `xwarp-verbs` has a section on their byte order.)
    pub fn compare_swap(wr_id: u64, local: Sge, remote: Remote, compare: u64, swap: u64) -> Self {
        Self::masked_compare_swap(wr_id, local, remote, (compare, u64::MAX), (swap, u64::MAX))
    }

    /// Replaces bits of a 64-bit word of the peer's memory if other bits are as expected. Of `compare` and `swap`, the
    /// first number is the value and the second one has the bits set that count (RFC 7306 section 5.1.2).
    pub fn masked_compare_swap(
        wr_id: u64,
        local: Sge,
        remote: Remote,
        (compare, compare_mask): (u64, u64),
        (swap, swap_mask): (u64, u64),
    ) -> Self {
        let operation = Operation::CompareSwap { remote, compare, compare_mask, swap, swap_mask };
        Self::new(wr_id, operation, local.into())
    }

    /// Replaces a 64-bit word of the peer's memory by `value`, whatever it is. The word's former value is written to
    /// `local`, eight bytes. On the wire this is a compare and swap that compares no bits.
    pub fn swap(wr_id: u64, local: Sge, remote: Remote, value: u64) -> Self {
        Self::masked_compare_swap(wr_id, local, remote, (0, 0), (value, u64::MAX))
    }

    /// Invalidates our `key` in order with the other requests: a window or a fast region is closed, a region loses its
    /// remote rights. RDMA Reads and atomics posted before may still be outstanding; see [`fenced`](Self::fenced).
    pub fn local_invalidate(wr_id: u64, key: STag) -> Self {
        Self::new(wr_id, Operation::LocalInvalidate { key }, Payload::EMPTY)
    }

    /// Binds a window that is not bound to part of a region, under `key` (`MemoryWindow::next_key`), for the peer of
    /// this queue pair.
    pub fn bind_window(wr_id: u64, key: STag, binding: Binding) -> Self {
        Self::new(wr_id, Operation::BindWindow { window: key, binding }, Payload::EMPTY)
    }

    /// Registers the pieces of `memory`, in this order, under `key` of a fast region that is invalid
    /// (`FastRegion::next_key`). `base` is the tagged offset of the first byte.
    pub fn fast_register(
        wr_id: u64,
        key: STag,
        memory: &'a [Memory],
        access: Access,
        base: TaggedOffset,
    ) -> Self {
        Self::new(wr_id, Operation::FastRegister { key, access, base }, Payload::Memory(memory))
    }

    /// Adds a completion queue entry for success as well. (A failure always adds one.)
    #[must_use]
    pub fn signaled(mut self) -> Self {
        self.flags |= SendFlags::SIGNALED;
        self
    }

    /// Raises a solicited event at the peer.
    #[must_use]
    pub fn solicited(mut self) -> Self {
        self.flags |= SendFlags::SOLICITED;
        self
    }

    /// Delays the request until all RDMA Reads and atomics posted before it have completed.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.flags |= SendFlags::FENCE;
        self
    }

    /// Lets a Send be delivered, or a Read be executed and completed, before earlier messages that are lost in the
    /// network.
    #[must_use]
    pub fn overtaking(mut self) -> Self {
        self.flags |= SendFlags::OVERTAKE;
        self
    }
}

impl<'a> RecvRequest<'a> {
    /// Receives a message into the pieces of `scatter`, in this order.
    pub fn new(wr_id: u64, scatter: &'a [Sge]) -> Self {
        Self { wr_id, scatter }
    }
}

impl Remote {
    /// Length of [`to_bytes`](Self::to_bytes), in bytes.
    pub const BYTES: usize = 12;

    /// An encoding in which applications can advertise memory to each other: key and offset, most significant byte
    /// first.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (key, offset) = bytes.split_at_mut(4);
        key.copy_from_slice(&self.key.value().to_be_bytes());
        offset.copy_from_slice(&self.offset.to_be_bytes());
        bytes
    }

    /// Decodes what [`to_bytes`](Self::to_bytes) returned from the start of `bytes`; `None` when they are too short.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (key, rest) = bytes.split_first_chunk()?;
        let (offset, _) = rest.split_first_chunk()?;
        Some(Self { key: STag::new(u32::from_be_bytes(*key)), offset: u64::from_be_bytes(*offset) })
    }
}

impl Binding {
    /// The same bytes under tagged offsets that start at 0, so that the peer does not learn their position in the
    /// region.
    #[must_use]
    pub fn zero_based(self) -> Self {
        Self { base: 0, ..self }
    }
}

impl WorkCompletion {
    /// The completion if its status is success, else the status as an error.
    pub fn check(self) -> Result<Self, WcStatus> {
        match self.status {
            WcStatus::Success => Ok(self),
            status => Err(status),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_survives_its_encoding() {
        let remote = Remote { key: STag::new(0x0123_4567), offset: 0x89ab_cdef_0011_2233 };
        assert_eq!(remote.to_bytes()[..5], [1, 0x23, 0x45, 0x67, 0x89]);
        assert_eq!(Remote::from_bytes(&remote.to_bytes()), Some(remote));
        assert_eq!(Remote::from_bytes(&remote.to_bytes()[..11]), None);
    }

    #[test]
    fn chained_options_add_up() {
        let request = WorkRequest::send(7, Payload::EMPTY).signaled().fenced();
        assert_eq!(request.flags, SendFlags::SIGNALED | SendFlags::FENCE);
        assert_eq!(request.wr_id, 7);
    }
}
