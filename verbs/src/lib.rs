//! RDMA verbs over a software RNIC: no RDMA hardware, no kernel module, any Ethernet interface with XDP.
//!
//! | task | type |
//! |---|---|
//! | open an interface | [`Device`] |
//! | use its queues in parallel | [`DeviceOptions::engines`] |
//! | register memory that peers can reach | [`ProtectionDomain`], [`MemoryRegion`] |
//! | open parts of it temporarily | [`MemoryWindow`], [`FastRegion`] |
//! | exchange data with one peer | [`QueuePair`]: post [`WorkRequest`]s and [`RecvRequest`]s |
//! | get their outcome | [`CompletionQueue`]: poll [`WorkCompletion`]s, or sleep on a [`CompletionChannel`] |
//! | connect | [`Device::connect`], [`Device::listen`]; without blocking: [`Device::start_connect`], [`cm`] |
//! | change TCP's settings of one connection | [`cm::CmId::tune`] |
//! | make a running process visible to `xwarp stat` and `xwarp capture` | [`DeviceOptions::observe`], [`observe`] |
//! | see round-trip time, windows, retransmissions | [`QueuePair::tcp_info`], [`QueuePair::counters`], [`Device::counters`] |
//! | get faults and warnings | [`Device::async_events`]: [`AsyncEvent`] |
//!
//! The nouns are those of ibverbs and rdma_cm. Three things differ: objects keep alive what they need, so they can be
//! dropped in any order; attributes are plain structs with defaults; memory is named by key and offset, never by address.
//! A send completes when the peer's TCP has acknowledged its last byte.
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
//! # Ordering
//!
//! The rules of RFC 5040 section 5.5 (its table is in appendix B) and RFC 7306 section 7, for two requests of one send
//! queue. Requests complete in the order in which they were posted. There is no order between different queue pairs, nor
//! between the two directions of one connection.
//!
//! | first | second | guarantee |
//! |---|---|---|
//! | Send, Immediate | Send, Immediate | The peer's receives complete in the order of posting. |
//! | RDMA Write | Send, Immediate | When the receive completes, the written bytes are in the peer's memory. |
//! | RDMA Write | RDMA Write | None at the peer until a later Send or Immediate is delivered: bytes may be placed in any order. |
//! | Send, RDMA Write | RDMA Read, atomic | The read returns the written bytes, the atomic operates on them. |
//! | RDMA Read, atomic | RDMA Read, atomic | Executed and answered in the order of posting; the bytes of two reads may be read in any order. |
//! | RDMA Read, atomic | Send, RDMA Write, Immediate | **None**: the peer may place the second one before it reads for the first one. Use [`WorkRequest::fenced`] on the second one. |
//!
//! Do not poll memory to find out whether data has arrived: bytes are placed as segments come, also beyond a lost one, so
//! the last byte may be there before the first. Wait for the completion of a receive, or of the RDMA Read. A completed RDMA
//! Write has reached the peer's RNIC, which says nothing about the peer's application.
//!
//! # Byte order of atomics
//!
//! An atomic operates on an aligned 64-bit word of the peer's memory in the peer's own byte order, as the peer's processor
//! sees it (RFC 7306 section 5.1). The former value is written to local memory in our byte order. Both ends therefore use
//! [`Memory::load_u64`] and [`Memory::store_u64`], and no conversion. An atomic is atomic towards other atomics through the
//! same device and towards the atomic methods of [`Memory`], not towards RDMA Writes. `base` of a registration must be a
//! multiple of eight for the word to be aligned at both ends.
//!
//! # Tests without root
//!
//! With feature `sim` (and without `af-xdp`), `sim::pair` is a fabric in memory: two
//! interfaces on one virtual cable, with optional faults from a seed. The whole stack above is the real one.
//!
//! ```
//! # #[cfg(feature = "sim")] {
//! use xwarp_verbs::{Device, DeviceOptions, sim};
//!
//! let (a, b) = sim::pair(sim::WireConfig::default(), 1500)?;
//! let server = Device::over(Box::new(a), DeviceOptions::default())?; // 192.0.2.1
//! let client = Device::over(Box::new(b), DeviceOptions::default())?; // 192.0.2.2
//! # let _ = (server, client);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Logs
//!
//! The library logs with `tracing`: `error` for internal errors, `warn` for lost events, `info` for changes of the
//! interface and peers that refuse markers, `debug` for each connection: the negotiated parameters, and the reason of its end. A program
//! that installs `tracing_subscriber` with an `EnvFilter` is controlled by `RUST_LOG`: `RUST_LOG=xwarp=debug`.
//!
//! # Features
//!
//! | feature | effect |
//! |---|---|
//! | `af-xdp` (default) | real interfaces; needs clang and libelf to build |
//! | `tokio` | futures: module `tokio` |
//! | `sim` | the fabric in memory: module `sim` |
#![deny(unsafe_code)]
#![deny(clippy::disallowed_methods)]

#[cfg(feature = "af-xdp")]
mod af_xdp;
mod api;
pub mod fabric;
mod fork;
pub mod interface;
mod local;
pub mod observe;
#[cfg(feature = "sim")]
pub mod sim;
mod system;
mod tap;
mod ticks;

#[cfg(feature = "tokio")]
pub use self::api::tokio;
// The interface for applications: `api` owns the lock around the engine and decides which thread runs it. The objects of
// `xwarp_rnic` and the settings of `xwarp_tcp` that applications use are the names below, and no others.
pub use xwarp_rnic::memory;
pub use xwarp_rnic::{
    Access, AccessError, AsyncEvent, Binding, CqId, DdpError, LAYER_DDP, LAYER_LLP, LAYER_RDMA, Limits,
    Memory, NoReceive, Opcode, Operation, Pages, Payload, PeerDepths, PostError, QpFault, QpId, QpInfo,
    QpState, QueuePairOptions, RdmapError, RecvRequest, Remote, ResourceError, STag, SendFlags, Sge, SrqId,
    StreamError, TaggedOffset, TerminateHeader, Versions, WcStatus, WorkCompletion, WorkRequest,
};
pub use xwarp_tcp::{
    copy::landing as fault_landing,
    framing::{FramingConfig, FramingError},
    mpa::{Markers, MpaConfig, MpaError, RequestRevision, Rtr},
    rdma_tcp::{RdmaTcpConfig, SegmentError},
    tcp::{Algorithm, Info as TcpInfo, Keepalive, SoftError, TcpConfig, Tuning, UnknownAlgorithm},
    ulp::CloseReason,
};

#[cfg(feature = "af-xdp")]
pub use xwarp_driver::{DriverConfig, Mode, ModePreference, Origin, OriginPreference};

pub use self::api::{
    AsyncEvents, CompletionChannel, CompletionQueue, CompletionQueueOptions, Counters, CqNotification,
    Device, DeviceAttributes, DeviceFailed, DeviceOptions, FastRegion, FastRegionOptions, MemoryRegion,
    MemoryWindow, OpenError, PostBatch, PostListError, Progress, ProtectionDomain, QueuePair, RegionOptions,
    RegisterError, Rest, SharedReceiveQueue, Slept, cm,
};
