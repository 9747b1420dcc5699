//! Work requests and completions of the API.

use std::ops::Deref;

use smallvec::SmallVec;

use super::{QpId, table::id};
use crate::{
    ddp::{STag, TaggedOffset},
    memory::Memory,
};

id! {
    /// A protection domain.
    PdId
}
id! {
    /// A completion queue.
    CqId
}
id! {
    /// A shared receive queue.
    SrqId
}

bitflags::bitflags! {
    /// Access rights on a region (RFC 5042 section 6). The owner may always read it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// Receives and RDMA Read data may be written to it.
        const LOCAL_WRITE = 1;
        /// The peer may write to it (RDMA Write).
        const REMOTE_WRITE = 2;
        /// The peer may read it (RDMA Read).
        const REMOTE_READ = 4;
        /// The peer may execute atomic operations on it.
        const REMOTE_ATOMIC = 8;
        /// Windows may be bound to it.
        const WINDOW_BIND = 16;
    }
}

impl Access {
    /// All rights of peers.
    pub const REMOTE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);
    /// Every right to change the bytes.
    pub(crate) const WRITES: Self = Self::LOCAL_WRITE.union(Self::REMOTE_WRITE).union(Self::REMOTE_ATOMIC);
}

/// A piece of registered memory: an element of a gather or scatter list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// The region.
    pub key: STag,
    /// Tagged offset of the first byte; the region's first byte has the offset that its registration chose (`base`).
    pub offset: TaggedOffset,
    /// Length in bytes.
    pub len: u32,
}

impl Sge {
    /// In place of a piece whose length does not fit [`Self::len`]. No post accepts it: [`PostError::MessageTooLong`](super::PostError::MessageTooLong).
    pub const TOO_LONG: Self = Self { key: STag::new(0), offset: TaggedOffset::MAX, len: u32::MAX };

    /// Whether this is [`Self::TOO_LONG`].
    #[inline]
    pub(super) fn is_too_long(&self) -> bool {
        self.len == u32::MAX && *self == Self::TOO_LONG
    }
}

/// A place in the peer's memory, advertised by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remote {
    /// The region.
    pub key: STag,
    /// Tagged offset of the first byte.
    pub offset: TaggedOffset,
}

/// The part of a region that a window makes accessible to the peer of the queue pair that binds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// The region, which must allow it ([`Access::WINDOW_BIND`]).
    pub region: STag,
    /// Tagged offset of the first byte in the region.
    pub offset: TaggedOffset,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Tagged offset of the first byte for the peer: 0 for a zero-based window, `offset`, or any other.
    pub base: TaggedOffset,
    /// Remote rights only. Those that change bytes need [`Access::LOCAL_WRITE`] of the region, as with all verbs.
    pub access: Access,
}

/// The operation of a send queue request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// A message into the peer's next receive (RFC 5040 section 5.3).
    Send {
        /// Key of the peer that delivery of the message invalidates.
        invalidate: Option<STag>,
    },
    /// A message into the peer's next receive, with four bytes for its completion. Only a peer that negotiated this extension
    /// has it ([`PostError::NoSendImmediate`](super::PostError::NoSendImmediate)).
    SendImmediate {
        /// The four bytes.
        data: [u8; 4],
    },
    /// Bytes into the peer's memory (RFC 5040 section 5.1).
    Write {
        /// The destination.
        remote: Remote,
    },
    /// Bytes into the peer's memory, then Immediate Data, which notifies the peer's application of them (RFC 7306
    /// section 6).
    WriteImmediate {
        /// The destination.
        remote: Remote,
        /// The eight bytes for the completion of the peer's next receive.
        data: [u8; 8],
    },
    /// Bytes from the peer's memory into one local piece (RFC 5040 section 5.2).
    Read {
        /// The source.
        remote: Remote,
        /// Revoke the remote rights on the local piece after the data has been delivered.
        invalidate: bool,
    },
    /// Eight bytes into the completion of the peer's next receive (RFC 7306 section 6).
    Immediate {
        /// The bytes.
        data: [u8; 8],
    },
    /// Adds to a 64-bit word of the peer's memory and returns its former value (RFC 7306 section 5.1.1).
    FetchAdd {
        /// The word, which must lie on a multiple of eight.
        remote: Remote,
        /// The addend.
        add: u64,
        /// Bits where a carry stops: the most significant one of each field; 0 is one field of 64 bits.
        mask: u64,
    },
    /// Replaces bits of a 64-bit word of the peer's memory if other bits are as expected, and returns its former value
    /// (RFC 7306 section 5.1.2).
    CompareSwap {
        /// The word, which must lie on a multiple of eight.
        remote: Remote,
        /// The expected value.
        compare: u64,
        /// The bits of `compare` that are compared.
        compare_mask: u64,
        /// The new value.
        swap: u64,
        /// The bits of `swap` that are written.
        swap_mask: u64,
    },
    /// Invalidates a window, a fast region, or the remote rights on a local region, in order with the
    /// other requests.
    LocalInvalidate {
        /// The key to invalidate.
        key: STag,
    },
    /// Binds an unbound window. It takes effect before the next request of the queue begins.
    BindWindow {
        /// The window's index with its new key.
        window: STag,
        /// The part of a region to bind.
        binding: Binding,
    },
    /// Registers memory ([`Payload::Memory`]) with a fast region that is invalid. It takes effect before the next
    /// request of the queue begins.
    FastRegister {
        /// The region's index with its new key.
        key: STag,
        /// Access rights on the memory.
        access: Access,
        /// Tagged offset of the first byte.
        base: TaggedOffset,
    },
}

impl Operation {
    /// The kind of operation in its completion.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Send { .. } | Self::SendImmediate { .. } => Opcode::Send,
            Self::Write { .. } | Self::WriteImmediate { .. } => Opcode::RdmaWrite,
            Self::Read { .. } => Opcode::RdmaRead,
            Self::Immediate { .. } => Opcode::Immediate,
            Self::FetchAdd { .. } => Opcode::FetchAdd,
            Self::CompareSwap { .. } => Opcode::CompareSwap,
            Self::LocalInvalidate { .. } => Opcode::LocalInvalidate,
            Self::BindWindow { .. } => Opcode::BindWindow,
            Self::FastRegister { .. } => Opcode::FastRegister,
        }
    }

    /// Whether it only sends bytes, which is possible on every connection.
    pub(crate) const fn is_plain(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Write { .. })
    }

    /// Whether it concerns only local memory, so that nothing is sent to the peer.
    pub(crate) const fn is_local(&self) -> bool {
        matches!(self, Self::LocalInvalidate { .. } | Self::BindWindow { .. } | Self::FastRegister { .. })
    }

    /// Whether it needs RFC 7306, which extends RDMAP version 1.
    pub(crate) const fn is_extension(&self) -> bool {
        matches!(
            self,
            Self::Immediate { .. }
                | Self::WriteImmediate { .. }
                | Self::FetchAdd { .. }
                | Self::CompareSwap { .. }
        )
    }

    /// Whether the peer sends a response, so that it counts against ORD.
    pub(crate) const fn is_answered(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::FetchAdd { .. } | Self::CompareSwap { .. })
    }
}

bitflags::bitflags! {
    /// Options of a work request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SendFlags: u8 {
        /// Add an entry to the completion queue; without this flag only a failure does.
        const SIGNALED = 1;
        /// Raise a solicited event at the peer (Send and Immediate).
        const SOLICITED = 2;
        /// Begin only when all RDMA Reads and atomics before it have completed.
        const FENCE = 4;
                /// Send without invalidation: it may be delivered before messages that were posted earlier and are
                /// lost. Only RDMA/TCP signals this to the peer, which must have allowed it
                /// ([`QueuePairOptions::any_receive`]).
        ///
        /// RDMA Read: may be executed before messages that were posted before it and are lost on the way, and may complete
        /// before them ([`WorkCompletion::overtook`]). It need not see the effects of RDMA Writes before it. Its place in the
        /// send queue becomes free with those of the requests before it.
        ///
        /// [`QueuePairOptions::any_receive`]: super::QueuePairOptions::any_receive
        const OVERTAKE = 8;
    }
}

/// The local bytes of a work request.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Payload<'a> {
    /// One piece of registered memory.
    Piece(Sge),
    /// Pieces of registered memory, in this order.
    Gather(&'a [Sge]),
    /// Bytes that are copied when the request is posted.
    Inline(&'a [u8]),
    /// Memory for a fast region, in this order.
    Memory(&'a [Memory]),
}

impl Payload<'_> {
    /// An empty payload.
    pub const EMPTY: Self = Self::Gather(&[]);

    /// The pieces of registered memory.
    pub fn pieces(&self) -> &[Sge] {
        match self {
            Self::Piece(piece) => std::slice::from_ref(piece),
            Self::Gather(list) => list,
            Self::Inline(_) | Self::Memory(_) => &[],
        }
    }
}

/// A request for a send queue.
#[derive(Debug, Clone, Copy)]
pub struct WorkRequest<'a> {
    /// Identifier of the request, returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// The local bytes; for RDMA Reads and atomics the piece to which the data is returned.
    pub payload: Payload<'a>,
    /// Options.
    pub flags: SendFlags,
}

/// A request for a receive queue, own or shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvRequest<'a> {
    /// Identifier of the request, returned in the completion.
    pub wr_id: u64,
    /// Pieces for the message, in this order.
    pub scatter: &'a [Sge],
}

/// A list of pieces in the form that the queues store. Nearly all lists have one piece, which takes the fewest steps.
#[derive(Debug, Clone)]
pub(crate) enum SgeList {
    One(Sge),
    Any(SmallVec<[Sge; 4]>),
}

impl SgeList {
    /// A list of no pieces.
    pub(crate) fn new() -> Self {
        Self::Any(SmallVec::new())
    }

    /// Makes it the list of `pieces`.
    #[inline]
    pub(crate) fn set(&mut self, pieces: &[Sge]) {
        if let (Self::One(only), [piece]) = (&mut *self, pieces) {
            *only = *piece;
        } else {
            self.replace(pieces);
        }
    }

    #[inline(never)]
    fn replace(&mut self, pieces: &[Sge]) {
        *self = match pieces {
            [piece] => Self::One(*piece),
            pieces => Self::Any(SmallVec::from_slice(pieces)),
        };
    }
}

impl Deref for SgeList {
    type Target = [Sge];

    fn deref(&self) -> &[Sge] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Any(pieces) => pieces,
        }
    }
}

/// The kind of work request that a completion belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Opcode {
    /// A Send of any kind.
    Send,
    /// An RDMA Write, with or without Immediate Data.
    RdmaWrite,
    /// An RDMA Read.
    RdmaRead,
    /// Immediate Data.
    Immediate,
    /// An atomic fetch and add.
    FetchAdd,
    /// An atomic compare and swap.
    CompareSwap,
    /// A local invalidation.
    LocalInvalidate,
    /// The binding of a window.
    BindWindow,
    /// A fast registration.
    FastRegister,
    /// A receive that a Send consumed, with or without immediate data, or that was flushed.
    Recv,
    /// A receive that Immediate Data consumed.
    RecvImmediate,
}

/// The outcome of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum WcStatus {
    /// Success.
    #[error("success")]
    Success,
    /// Receive: the message was longer than the buffer.
    #[error("local length error")]
    LocalLength,
    /// The request cannot be executed on this queue pair.
    #[error("local queue pair operation error")]
    LocalQpOperation,
    /// A local piece names no region of the protection domain, lies outside of it, or may not be written.
    #[error("local protection error")]
    LocalProtection,
    /// A binding, fast registration or local invalidation that is not possible: the key is of another kind, in the
    /// wrong state, or of another domain or queue pair, or the memory does not allow it.
    #[error("memory management operation error")]
    MemoryManagement,
    /// The queue pair left the ready-to-send state before the request was complete.
    #[error("flushed")]
    Flushed,
    /// The peer's response does not match the request.
    #[error("bad response")]
    BadResponse,
    /// The peer reported that the request violates the protocol.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The peer reported that the request exceeds the access rights.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer reported that it cannot execute the request.
    #[error("remote operation error")]
    RemoteOperation,
}

/// An entry of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkCompletion {
    /// The work request's identifier.
    pub wr_id: u64,
    /// The outcome. After a failure only `wr_id`, `qp`, `context` and `opcode` are meaningful.
    pub status: WcStatus,
    /// The kind of request.
    pub opcode: Opcode,
    /// The queue pair.
    pub qp: QpId,
    /// The queue pair's [`QueuePairOptions::context`](super::QueuePairOptions::context).
    pub context: u64,
    /// Bytes received or read. For a receive with Immediate Data: bytes of the RDMA Write before it, or 0.
    pub byte_len: u32,
    /// Receive: the key that the message invalidated.
    pub invalidated: Option<STag>,
    /// Receive: the Immediate Data. A Send with immediate data has four bytes, which zeros follow.
    pub immediate: Option<[u8; 8]>,
    /// Receive: the sender set the solicited-event flag.
    pub solicited: bool,
    /// Receive: messages that were sent before this one had not arrived. RDMA Read: requests that were posted before it
    /// are not complete ([`SendFlags::OVERTAKE`]).
    pub overtook: bool,
}
