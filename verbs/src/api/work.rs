//! Making work requests: constructors for each operation, options by chaining.
//!
//! ```
//! use xwarp_verbs::{Sge, WorkRequest};
//!
//! let piece = Sge { len: 64, ..Sge::default() };
//! let request = WorkRequest::send(1, &piece).signaled().solicited();
//! assert_eq!(request.wr_id, 1);
//! ```

use crate::{
    ddp::{STag, TaggedOffset},
    memory::Memory,
    rnic::{
        Access, Binding, Operation, Payload, RecvRequest, Remote, SendFlags, Sge, WcStatus, WorkCompletion,
        WorkRequest,
    },
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

impl<'a> From<&'a Sge> for Payload<'a> {
    fn from(piece: &'a Sge) -> Self {
        Self::Gather(std::slice::from_ref(piece))
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

    /// Sends a message into the peer's next receive, and invalidates `key` of the peer's: a window or a fast
    /// region is closed, a region loses its remote rights.
    pub fn send_with_invalidate(wr_id: u64, payload: impl Into<Payload<'a>>, key: STag) -> Self {
        Self::new(wr_id, Operation::Send { invalidate: Some(key) }, payload.into())
    }

    /// Writes to the peer's memory; the peer's application learns nothing of it.
    pub fn write(wr_id: u64, payload: impl Into<Payload<'a>>, remote: Remote) -> Self {
        Self::new(wr_id, Operation::Write { remote }, payload.into())
    }

    /// Writes to the peer's memory; then eight bytes come with the completion of the peer's next receive,
    /// which also says how many were written.
    pub fn write_with_immediate(
        wr_id: u64,
        payload: impl Into<Payload<'a>>,
        remote: Remote,
        data: [u8; 8],
    ) -> Self {
        Self::new(wr_id, Operation::WriteImmediate { remote, data }, payload.into())
    }

    /// Reads the peer's memory into `local`.
    pub fn read(wr_id: u64, local: &'a Sge, remote: Remote) -> Self {
        Self::new(wr_id, Operation::Read { remote, invalidate: false }, local.into())
    }

    /// Reads the peer's memory into `local`, then revokes the remote rights on `local`'s region.
    pub fn read_with_invalidate(wr_id: u64, local: &'a Sge, remote: Remote) -> Self {
        Self::new(wr_id, Operation::Read { remote, invalidate: true }, local.into())
    }

    /// Eight bytes into the completion of the peer's next receive.
    pub fn immediate(wr_id: u64, data: [u8; 8]) -> Self {
        Self::new(wr_id, Operation::Immediate { data }, Payload::EMPTY)
    }

    /// Adds `add` to a 64-bit word of the peer's; the word before comes to `local`.
    pub fn fetch_add(wr_id: u64, local: &'a Sge, remote: Remote, add: u64) -> Self {
        Self::new(wr_id, Operation::FetchAdd { remote, add, mask: 0 }, local.into())
    }

    /// Replaces a 64-bit word of the peer's by `swap` if it is `compare`; the word before comes to `local`.
    pub fn compare_swap(wr_id: u64, local: &'a Sge, remote: Remote, compare: u64, swap: u64) -> Self {
        let (compare_mask, swap_mask) = (u64::MAX, u64::MAX);
        let operation = Operation::CompareSwap { remote, compare, compare_mask, swap, swap_mask };
        Self::new(wr_id, operation, local.into())
    }

    /// Invalidates `key` of ours in order with the other requests: a window or a fast region is closed, a
    /// region loses its remote rights. Reads and atomics before it may still be under way; see
    /// [`fenced`](Self::fenced).
    pub fn local_invalidate(wr_id: u64, key: STag) -> Self {
        Self::new(wr_id, Operation::LocalInvalidate { key }, Payload::EMPTY)
    }

    /// Opens a window, which must not be bound, under `key` ([`MemoryWindow::next_key`]) to the peer of this
    /// queue pair.
    ///
    /// [`MemoryWindow::next_key`]: crate::MemoryWindow::next_key
    pub fn bind_window(wr_id: u64, key: STag, binding: Binding) -> Self {
        Self::new(wr_id, Operation::BindWindow { window: key, binding }, Payload::EMPTY)
    }

    /// Registers `memory`, one piece behind the other, under `key` of a fast region that is invalid
    /// ([`FastRegion::next_key`]). The first byte is called `base`.
    ///
    /// [`FastRegion::next_key`]: crate::FastRegion::next_key
    pub fn fast_register(
        wr_id: u64,
        key: STag,
        memory: &'a [Memory],
        access: Access,
        base: TaggedOffset,
    ) -> Self {
        Self::new(wr_id, Operation::FastRegister { key, access, base }, Payload::Memory(memory))
    }

    /// Completes with an entry on the completion queue also when it succeeds.
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

    /// Begins only when all RDMA Reads and atomics before it have completed.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.flags |= SendFlags::FENCE;
        self
    }
}

impl<'a> RecvRequest<'a> {
    /// Takes a message into `scatter`.
    pub fn new(wr_id: u64, scatter: &'a [Sge]) -> Self {
        Self { wr_id, scatter }
    }
}

impl Remote {
    /// Bytes of [`to_bytes`](Self::to_bytes).
    pub const BYTES: usize = 12;

    /// A form in which applications can tell it to each other: key and offset, most significant byte first.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (key, offset) = bytes.split_at_mut(4);
        key.copy_from_slice(&self.key.value().to_be_bytes());
        offset.copy_from_slice(&self.offset.to_be_bytes());
        bytes
    }

    /// What [`to_bytes`](Self::to_bytes) made, from the beginning of `bytes`; `None` when they are too few.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (key, rest) = bytes.split_first_chunk()?;
        let (offset, _) = rest.split_first_chunk()?;
        Some(Self { key: STag::new(u32::from_be_bytes(*key)), offset: u64::from_be_bytes(*offset) })
    }
}

impl WorkCompletion {
    /// Itself, if it is a success.
    pub fn ok(self) -> Result<Self, WcStatus> {
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
    fn a_remote_place_survives_the_way_to_the_peer() {
        let remote = Remote { key: STag::new(0x0123_4567), offset: 0x89ab_cdef_0011_2233 };
        assert_eq!(remote.to_bytes()[..5], [1, 0x23, 0x45, 0x67, 0x89]);
        assert_eq!(Remote::from_bytes(&remote.to_bytes()), Some(remote));
        assert_eq!(Remote::from_bytes(&remote.to_bytes()[..11]), None);
    }

    #[test]
    fn options_add_up() {
        let request = WorkRequest::send(7, Payload::EMPTY).signaled().fenced();
        assert_eq!(request.flags, SendFlags::SIGNALED | SendFlags::FENCE);
        assert_eq!(request.wr_id, 7);
    }
}
