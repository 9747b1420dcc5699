//! Work requests as they are posted, and completions as they are polled.

use smallvec::SmallVec;

use super::{QpId, table::id};
use crate::ddp::{STag, TaggedOffset};

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
    /// What may be done with a region (RFC 5042 section 6). The owner may always read it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// Receives and RDMA Read data may be written to it.
        const LOCAL_WRITE = 1;
        /// The peer may write it (RDMA Write).
        const REMOTE_WRITE = 2;
        /// The peer may read it (RDMA Read).
        const REMOTE_READ = 4;
        /// The peer may do atomic operations on it.
        const REMOTE_ATOMIC = 8;
    }
}

impl Access {
    /// Any right of the peer's.
    pub const REMOTE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);
}

/// A piece of registered memory, of a gather or scatter list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// The region.
    pub key: STag,
    /// First byte, counted as the region's registration counts ([`super::Registration::base`]).
    pub offset: TaggedOffset,
    /// Bytes.
    pub len: u32,
}

/// A place in the peer's memory, as it advertised it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remote {
    /// The region.
    pub key: STag,
    /// First byte.
    pub offset: TaggedOffset,
}

/// What a work request of a send queue does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A message into the peer's next receive (RFC 5040 section 5.3).
    Send {
        /// Revoke the peer's remote rights on this region of its own as the message is delivered.
        invalidate: Option<STag>,
    },
    /// Bytes into the peer's memory (RFC 5040 section 5.1).
    Write {
        /// Where to.
        remote: Remote,
    },
    /// Bytes from the peer's memory into ours, which is one piece (RFC 5040 section 5.2).
    Read {
        /// Where from.
        remote: Remote,
        /// Revoke the remote rights on our piece when the data is there.
        invalidate: bool,
    },
    /// Eight bytes into the completion of the peer's next receive (RFC 7306 section 6).
    Immediate {
        /// The bytes.
        data: [u8; 8],
    },
    /// Adds to a 64-bit word of the peer's, and returns the word before (RFC 7306 section 5.1.1).
    FetchAdd {
        /// The word, which must lie on a multiple of eight.
        remote: Remote,
        /// What to add.
        add: u64,
        /// Bits where a carry stops: the most significant one of each field; 0 is one field of 64 bits.
        mask: u64,
    },
    /// Replaces bits of a 64-bit word of the peer's if others are as expected, and returns the word before
    /// (RFC 7306 section 5.1.2).
    CompareSwap {
        /// The word, which must lie on a multiple of eight.
        remote: Remote,
        /// What is expected, and on which bits.
        compare: u64,
        /// The bits of `compare` that count.
        compare_mask: u64,
        /// What is written.
        swap: u64,
        /// The bits of `swap` that are written.
        swap_mask: u64,
    },
    /// Revokes the remote rights on a region of ours, in order with the other requests.
    LocalInvalidate {
        /// The region.
        key: STag,
    },
}

impl Operation {
    /// What its completion is called.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Send { .. } => Opcode::Send,
            Self::Write { .. } => Opcode::RdmaWrite,
            Self::Read { .. } => Opcode::RdmaRead,
            Self::Immediate { .. } => Opcode::Immediate,
            Self::FetchAdd { .. } => Opcode::FetchAdd,
            Self::CompareSwap { .. } => Opcode::CompareSwap,
            Self::LocalInvalidate { .. } => Opcode::LocalInvalidate,
        }
    }

    /// Whether the peer answers it, so that it counts against ORD.
    pub(crate) const fn is_answered(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::FetchAdd { .. } | Self::CompareSwap { .. })
    }
}

bitflags::bitflags! {
    /// Options of a work request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SendFlags: u8 {
        /// Complete with an entry on the completion queue; without it only a failure does.
        const SIGNALED = 1;
        /// Raise a solicited event at the peer (Send and Immediate).
        const SOLICITED = 2;
        /// Begin only when all RDMA Reads and atomics before it have completed.
        const FENCE = 4;
    }
}

/// The local bytes of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Registered memory, in this order.
    Gather(&'a [Sge]),
    /// Bytes that are copied as the request is posted.
    Inline(&'a [u8]),
}

impl Payload<'_> {
    /// No bytes.
    pub const EMPTY: Self = Self::Gather(&[]);
}

/// A request for a send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation,
    /// With which local bytes. The piece an RDMA Read or an atomic operation returns its data to.
    pub payload: Payload<'a>,
    /// How.
    pub flags: SendFlags,
}

/// A request for a receive queue, own or shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Where the message goes, in this order.
    pub scatter: &'a [Sge],
}

/// A list of pieces, as the queues keep it.
pub(crate) type SgeList = SmallVec<[Sge; 4]>;

/// What a completion is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// A Send of any kind.
    Send,
    /// An RDMA Write.
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
    /// A receive that a Send consumed, or that was flushed.
    Recv,
    /// A receive that Immediate Data consumed.
    RecvImmediate,
}

/// How a work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum WcStatus {
    /// Done.
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
    /// The queue pair left the ready-to-send state before this was done.
    #[error("flushed")]
    Flushed,
    /// The peer's answer was not one to this request.
    #[error("bad response")]
    BadResponse,
    /// The peer says that the request breaks the protocol.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The peer says that it grants no such access.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer says that it cannot execute the request.
    #[error("remote operation error")]
    RemoteOperation,
}

/// An entry of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkCompletion {
    /// Of the request.
    pub wr_id: u64,
    /// How it ended. Unless it is a success only `wr_id`, `qp` and `opcode` mean something.
    pub status: WcStatus,
    /// What it is of.
    pub opcode: Opcode,
    /// The queue pair.
    pub qp: QpId,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Receive: the region on which the message revoked remote rights.
    pub invalidated: Option<STag>,
    /// Receive: Immediate Data.
    pub immediate: Option<[u8; 8]>,
    /// Receive: the message asked for a solicited event.
    pub solicited: bool,
}
