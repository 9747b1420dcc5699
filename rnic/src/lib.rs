//! The card of xwarp, sans-IO: a software RNIC as plain data, above the TCP and the framings of [`xwarp_tcp`].
//!
//! [`engine::Engine`] is the whole RNIC. Nothing here reads a clock, starts a thread or opens a descriptor: time and frames
//! are arguments, and randomness comes from a secret in the configuration. The list of dependencies has no crate that could
//! do otherwise, with one exception: [`memory`] maps the memory that an application asks for. The caller owns the lock, the
//! threads and the clock around an engine; `xwarp-verbs` is such a caller and the API for applications. This crate is for
//! tests, fuzz targets and tools that look inside, and promises them no stability.
//!
//! | module | owns |
//! |---|---|
//! | [`engine`] | [`engine::Engine`]: the stack and the RNIC, and the work that they pass to each other |
//! | [`rnic`] | queue pairs, queues, keys: the state of every RDMAP stream |
//! | [`rdmap`] | numbers and headers of RFC 5040 and RFC 7306 |
//! | [`ddp`] | numbers and headers of RFC 5041 |
//! | `segment` | received bytes to typed segments and back, in the form of the connection's framing |
//! | [`memory`] | the bytes that peers and the application share: the only unsafe code |
//! | `sim` | with feature `sim`: an engine on a link of the virtual wire of `xwarp_tcp` |
#![deny(unsafe_code)]
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod ddp;
pub mod engine;
pub mod memory;
pub mod rdmap;
pub mod rnic;
mod segment;
#[cfg(feature = "sim")]
pub mod sim;

pub use self::{
    ddp::{DdpError, STag, TaggedOffset, Versions},
    memory::{AccessError, Memory, Pages},
    rdmap::{LAYER_DDP, LAYER_LLP, LAYER_RDMA, RdmapError, StreamError, TerminateHeader},
    rnic::{
        Access, AsyncEvent, Binding, CqId, Limits, NoReceive, Opcode, Operation, Payload, PeerDepths,
        PostError, QpFault, QpId, QpInfo, QpState, QueuePairOptions, RecvRequest, Remote, ResourceError,
        SendFlags, Sge, SrqId, WcStatus, WorkCompletion, WorkRequest,
    },
};
