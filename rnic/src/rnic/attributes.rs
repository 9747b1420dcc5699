//! Attributes that objects are created with, their queryable state, limits, and the errors of verbs.

use std::net::SocketAddr;

use xwarp_tcp::stack;

use super::work::{Access, CqId, PdId, SrqId};
use super::{QpId, RequestId};
use crate::{
    ddp::{STag, TaggedOffset, Versions},
    memory::Memory,
};

/// Limits of one device: the number of objects of each kind, and their largest sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Protection domains.
    pub max_pd: u32,
    /// Regions, fast ones included (at most 2^22).
    pub max_mr: u32,
    /// Windows (at most 2^22).
    pub max_mw: u32,
    /// Pieces of memory of a fast region.
    pub max_fast_pieces: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of one completion queue.
    pub max_cqe: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Requests outstanding on one send or receive queue.
    pub max_qp_wr: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Receives on one shared receive queue.
    pub max_srq_wr: u32,
    /// Pieces of a gather or scatter list. (RDMA Read: always one.)
    pub max_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
    /// RDMA Reads and atomics that one queue pair serves at once (IRD).
    pub max_ird: u16,
    /// RDMA Reads and atomics that one queue pair has outstanding (ORD).
    pub max_ord: u16,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_pd: 65_536,
            max_mr: 1 << 20,
            max_mw: 1 << 20,
            max_fast_pieces: 512,
            max_cq: 65_536,
            max_cqe: 4 << 20,
            max_qp: 65_536,
            max_qp_wr: 32_768,
            max_srq: 65_536,
            max_srq_wr: 32_768,
            max_sge: 32,
            max_inline_data: 1024,
            max_ird: 128,
            max_ord: 128,
        }
    }
}

/// A region of memory to register.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The protection domain.
    pub pd: PdId,
    /// The bytes.
    pub memory: Memory,
    /// Access rights that the region grants.
    pub access: Access,
    /// Tagged offset of the first byte: zero for a zero-based region, or the byte's virtual address.
    pub base: TaggedOffset,
    /// The only queue pair whose peer may use the region (RFC 5041 section 8.2); `None`: all of the domain.
    pub stream: Option<QpId>,
}

/// A fast region to create: work requests give it its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FastRegistration {
    /// The protection domain.
    pub pd: PdId,
    /// Largest number of pieces of memory.
    pub max_pieces: u32,
    /// See [`Registration::stream`].
    pub stream: Option<QpId>,
}

/// Handling of a message for which no receive is posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NoReceive {
    /// Withhold the message, bounded in time and bytes by MPA's settings; the TCP window shrinks.
    #[default]
    Withhold,
    /// Terminate the stream, as RFC 5041 section 7.1 allows.
    Terminate,
}

/// Size and behaviour of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Requests outstanding on the send queue.
    pub max_send_wr: u32,
    /// Receives posted (ignored with a shared receive queue).
    pub max_recv_wr: u32,
    /// Pieces of a gather list.
    pub max_send_sge: u32,
    /// Pieces of a scatter list (ignored with a shared receive queue).
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
    /// Generate a completion for every request of the send queue, as if it were signalled.
    pub signal_all: bool,
    /// Handling of a message for which no receive is posted.
    pub no_receive: NoReceive,
    /// Let a Send that may overtake others ([`SendFlags::OVERTAKE`](super::SendFlags::OVERTAKE)) and fits one segment
    /// use the next receive as soon as it arrives, and complete at once, even if messages before it are missing.
    /// Otherwise such Sends are delivered in order as well.
    pub any_receive: bool,
    /// The remote rights that the peer of the connection may use, of those that a region or window grants. What is missing here is
    /// denied like a right that the memory does not grant (RFC 5040 section 7.2). Local rights have no meaning here.
    pub peer_access: Access,
    /// A number chosen by the application, returned in each completion of this queue pair (an index or a handle).
    pub context: u64,
}

impl Default for QueuePairOptions {
    fn default() -> Self {
        Self {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 128,
            signal_all: false,
            no_receive: NoReceive::Withhold,
            any_receive: false,
            peer_access: Access::REMOTE,
            context: 0,
        }
    }
}

/// Attributes with which a queue pair is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpAttributes {
    /// The protection domain.
    pub pd: PdId,
    /// Completion queue for requests of the send queue.
    pub send_cq: CqId,
    /// Completion queue for receives.
    pub recv_cq: CqId,
    /// The shared receive queue to take receives from. `None`: the queue pair has its own receive queue.
    pub srq: Option<SrqId>,
    /// Its size and behaviour.
    pub options: QueuePairOptions,
}

impl QpAttributes {
    /// A queue pair of modest size.
    pub fn new(pd: PdId, send_cq: CqId, recv_cq: CqId) -> Self {
        Self { pd, send_cq, recv_cq, srq: None, options: QueuePairOptions::default() }
    }
}

/// Attributes with which a shared receive queue is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttributes {
    /// The protection domain. Queue pairs that use the queue must belong to the same domain.
    pub pd: PdId,
    /// Receives posted.
    pub max_wr: u32,
    /// Pieces of a scatter list.
    pub max_sge: u32,
    /// Raise [`super::AsyncEvent::SrqLimit`] once when fewer receives than this are left; 0: never.
    pub limit: u32,
}

/// The state of a queue pair.
///
/// The names are those of the RDMA Consortium's verbs. RFC 5040 section 6.2 describes the same ways in which a stream
/// ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Not connected. Receives may be posted.
    Idle,
    /// Connected (ready to send).
    Rts,
    /// An orderly close: we have disconnected and posted work is still executed, but no more may be posted; or the peer
    /// has closed its direction and only ours is open.
    Closing,
    /// A Terminate is being sent. All work was flushed.
    Terminate,
    /// The stream has ended. All work was flushed, and new work is flushed immediately.
    Error,
}

/// The current state and attributes of a queue pair.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpInfo {
    /// Its state.
    pub state: QpState,
    /// Its attributes at creation.
    pub attributes: QpAttributes,
    /// Addresses of its connection, ours first, once it is established.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
    /// RDMA Reads and atomics that the queue pair serves at once (IRD).
    pub ird: u16,
    /// RDMA Reads and atomics that the queue pair may have outstanding (ORD).
    pub ord: u16,
    /// Versions of DDP and RDMAP on its connection. [`Versions::Rdmac`] needs
    /// [`MpaConfig::permissive`](xwarp_tcp::mpa::MpaConfig::permissive).
    pub versions: Versions,
    /// Requests of the send queue that have not completed.
    pub send_outstanding: usize,
    /// Receives of its own receive queue that have not completed.
    pub recv_outstanding: usize,
}

/// A kind of object, in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Object {
    /// Protection domain.
    ProtectionDomain,
    /// Memory region.
    Region,
    /// Memory window.
    Window,
    /// Completion queue.
    CompletionQueue,
    /// Queue pair.
    QueuePair,
    /// Shared receive queue.
    SharedReceiveQueue,
}

impl std::fmt::Display for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ProtectionDomain => "protection domain",
            Self::Region => "memory region",
            Self::Window => "memory window",
            Self::CompletionQueue => "completion queue",
            Self::QueuePair => "queue pair",
            Self::SharedReceiveQueue => "shared receive queue",
        })
    }
}

/// Why an object could not be created, changed or destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// The object does not exist, or no longer exists.
    #[error("no such {0}")]
    Unknown(Object),
    /// No such key.
    #[error("no region or window has the key {0:?}")]
    UnknownKey(STag),
    /// The engine's limit for this kind of object is reached.
    #[error("the limit of {limit} {object}s is reached")]
    TooMany {
        /// The kind of object.
        object: Object,
        /// The limit.
        limit: u32,
    },
    /// An attribute is out of range.
    #[error("{attribute} of {value} is outside of 1..={limit}")]
    Attribute {
        /// Name of the attribute.
        attribute: &'static str,
        /// The requested value.
        value: u64,
        /// The largest valid value.
        limit: u64,
    },
    /// Other objects still use it.
    #[error("the {0} is still used by {1} other objects")]
    InUse(Object, usize),
    /// The objects belong to different protection domains.
    #[error("the shared receive queue belongs to another protection domain")]
    ForeignSrq,
    /// The queue pair's state does not allow this.
    #[error("the queue pair is in state {0:?}")]
    State(QpState),
    /// The access rights include writing but the memory is read-only, or the offsets would exceed 64 bits.
    #[error("the memory does not allow this registration")]
    Memory,
    /// The device has failed; `Device::failure` says why.
    #[error("the device has failed")]
    DeviceFailed,
}

/// Why a work request could not be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The queue does not exist, or no longer exists, or the queue pair has no receive queue of its own.
    #[error("no such queue")]
    Unknown,
    /// The queue pair is not connected yet.
    #[error("the queue pair is not connected")]
    NotConnected,
    /// The queue is full: the number of requests for which it was created is outstanding.
    #[error("the queue is full ({0} requests)")]
    QueueFull(u32),
    /// The gather or scatter list is too long.
    #[error("more than {0} pieces")]
    TooManyPieces(u32),
    /// The payload does not fit the operation. An RDMA Read takes one piece, an atomic operation one piece of eight
    /// bytes, a fast registration memory; Immediate, binding and invalidation take no payload.
    #[error("the local memory does not fit this operation")]
    Payload,
    /// The inline data is too long.
    #[error("more than {0} bytes inline")]
    InlineTooLong(u32),
    /// A message has at most 2^32 - 1 bytes (RFC 5041 section 5.2).
    #[error("a message of more than 2^32 - 1 bytes")]
    MessageTooLong,
    /// The connection allows no RDMA Reads or atomics (ORD is 0).
    #[error("the connection allows no RDMA Reads (ORD is 0)")]
    NoReads,
    /// The peer is an RNIC of the RDMA Consortium ([`Versions::Rdmac`]), whose RDMAP has neither atomics nor Immediate
    /// Data.
    #[error("RDMAP version 0 has no atomics and no Immediate Data")]
    NoExtensions,
    /// The peer has no Sends with immediate data: it did not negotiate this extension of MPA's start-up, or the connection is one
    /// of RDMA/TCP.
    #[error("the peer has no Sends with immediate data")]
    NoSendImmediate,
    /// The device has failed; `Device::failure` says why. When it failed within this call, the
    /// request may have been posted, and is then flushed.
    #[error("the device has failed")]
    DeviceFailed,
}

/// Why a connection could not be started, accepted or rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// The queue pair does not exist, or no longer exists.
    #[error("no such queue pair")]
    UnknownQp,
    /// The queue pair already has a connection, or had one and was not reset.
    #[error("the queue pair is in state {0:?}")]
    State(QpState),
    /// The request does not exist, or no longer exists.
    #[error("no such connection request: {0:?}")]
    UnknownRequest(RequestId),
    /// IRD or ORD exceeds the engine's limit.
    #[error("{attribute} of {value} exceeds {limit}")]
    ReadDepth {
        /// The attribute, `ird` or `ord`.
        attribute: &'static str,
        /// The requested value.
        value: u16,
        /// The largest valid value.
        limit: u16,
    },
    /// The TCP stack could not start the connection.
    #[error(transparent)]
    Connect(#[from] stack::ConnectError),
    /// The TCP stack could not answer the request.
    #[error(transparent)]
    Answer(#[from] stack::AcceptError),
}
