//! The TCP and the framings (MPA, RDMA/TCP) of xwarp, sans-IO and polled: one plain data structure per concern.
//!
//! Nothing here reads a clock, spawns a thread or makes a system call: time is an argument
//! ([`time::Instant`]), randomness comes from a [`secret::Secret`] in the configuration, and frames are received and
//! sent through [`link::Link`]. The AF_XDP driver implements [`link::Link`] below; DDP and RDMAP implement [`ulp::Ulp`]
//! above; [`stack::Stack`] joins the two.
//!
//! | module | owns |
//! |---|---|
//! | [`time`], [`seq`] | time in nanoseconds, wrapping sequence numbers |
//! | [`link`] | frames as move-only tokens, and the interface that lends them |
//! | [`wire`] | frames to headers and back, checksums |
//! | [`tcp`] | one connection: state machine, recovery, windows |
//! | [`framing`] | the common part of the framings: the phases of a connection, frames beyond gaps |
//! | [`mpa`] | start-up, FPDUs, markers, CRC, both directions |
//! | [`rdma_tcp`] | RDMA/TCP of 2000, the second framing |
//! | [`ulp`] | the interface to DDP |
//! | [`stack`] | the connection table, listeners, timers, the transmit loop |
//! | [`copy`] | access to memory that others may change concurrently: the only unsafe code |
//! | [`counters!`] | the macro that defines each layer's counters |
#![deny(unsafe_code)]
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod copy;
mod counters;
pub mod framing;
mod keyed;
pub mod link;
pub mod mpa;
pub mod rdma_tcp;
pub mod secret;
pub mod seq;
#[cfg(feature = "sim")]
pub mod sim;
pub mod stack;
mod steps;
pub mod tcp;
pub mod time;
pub mod ulp;
pub mod wire;
