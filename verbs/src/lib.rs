//! RDMA verbs over a software RNIC: no RDMA hardware, no kernel module, any Ethernet interface with XDP.
//!
//! | to | take |
//! |---|---|
//! | open an interface | [`Device`] |
//! | have memory that peers can reach | [`ProtectionDomain`], [`MemoryRegion`] |
//! | open parts of it for a while | [`MemoryWindow`], [`FastRegion`] |
//! | talk to one peer | [`QueuePair`]: post [`WorkRequest`]s and [`RecvRequest`]s |
//! | learn that they are done | [`CompletionQueue`]: poll [`WorkCompletion`]s, or sleep on a [`CompletionChannel`] |
//! | connect | [`Device::connect`], [`Device::listen`]; step by step: [`cm`] |
//! | set what TCP does for one connection | [`cm::CmId::tune`] |
//! | hear of faults, and of trouble that may pass | [`Device::async_events`]: [`AsyncEvent`] |
//!
//! The nouns are those of ibverbs and rdma_cm. What differs: objects keep alive what they need, so they can
//! be dropped in any order; attributes are plain structs with defaults; memory is named by key and offset,
//! never by address. A send completes when the peer's end has acknowledged its last byte.
//!
//! # A server and a client
//!
//! ```
#![doc = include_str!("../examples/hello/server.rs")]
//! ```
//!
//! ```
#![doc = include_str!("../examples/hello/client.rs")]
//! ```
//!
//! # Inside
//!
//! [`engine::Engine`] is the whole card as plain data: [`rnic`] (queues, keys, RDMAP streams) over
//! [`rdmap`] and [`ddp`] (the numbers and headers of RFC 5040, 7306 and 5041) over the stack of `xwarp_tcp`. It
//! knows no clock, no thread and no system call. `api` owns the lock around it and decides who runs it;
//! [`interface`] is what it needs of a network; [`memory`] is the only unsafe code.
#![deny(unsafe_code)]
#![deny(clippy::disallowed_methods)]

#[cfg(feature = "af-xdp")]
mod af_xdp;
mod api;
pub mod ddp;
pub mod engine;
pub mod interface;
pub mod memory;
pub mod rdmap;
pub mod rnic;
#[cfg(feature = "sim")]
pub mod sim;
mod system;
pub mod tap;

pub use xwarp_tcp::{
    mpa::{Markers, MpaConfig, Revision, Rtr},
    tcp::{Algorithm, Keepalive, SoftError, TcpConfig, Tuning},
    ulp::CloseReason,
};

#[cfg(feature = "af-xdp")]
pub use xwarp_driver::{DriverConfig, Mode, ModePreference};

pub use self::{
    api::{
        AsyncEvents, CompletionChannel, CompletionQueue, Counters, Device, DeviceAttributes, DeviceOptions,
        FastRegion, FastRegionOptions, MemoryRegion, MemoryWindow, OpenError, Progress, ProtectionDomain,
        QueuePair, RegionOptions, RegisterError, SharedReceiveQueue, cm,
    },
    ddp::{STag, TaggedOffset},
    memory::{AccessError, Memory, Pages},
    rnic::{
        Access, AsyncEvent, Binding, CqId, Limits, NoReceive, Opcode, Operation, Payload, PeerDepths,
        PostError, QpFault, QpId, QpInfo, QpState, QueuePairOptions, RecvRequest, Remote, ResourceError,
        SendFlags, Sge, SrqId, WcStatus, WorkCompletion, WorkRequest,
    },
};
