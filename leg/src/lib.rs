//! A leg: the connection of a process to a switch that needs no privileges, only memory that two processes share.
//!
//! The process makes the memory, rings and chunks of frames in it, and passes it over a Unix socket by the handshake of memif
//! version 2. Its end is a [`Link`](xwarp_tcp::link::Link); the switch's end copies frames from one leg to another. An end that
//! looks for frames makes no system call; one that sleeps is woken by a descriptor.
//!
//! | module | owns |
//! |---|---|
//! | [`near`](Leg) | the end that owns the memory |
//! | [`far`] | the end of a switch |
//! | [`memif`] | the handshake |
//! | [`message`] | messages with descriptors (also those of `xwarpd` and its clients) |
//! | [`fabric`] | a process's connection to the fabric of its user, which gives it a leg, ports and names |
//! | [`hosts`] | the addresses of the fabric's hosts |
//! | [`place`] | where the fabric of a user is, and how it is started |
//! | [`frames`], [`chains`] | the place of each chunk; frames of several chunks (also the AF_XDP driver's) |
//! | `sys` | everything `unsafe`: memory, rings, descriptors that children lose |
//!
//! Reasons are in `docs/decisions/0029-the-fabric.md`.
#![deny(unsafe_code)]

pub mod chains;
pub mod fabric;
pub mod far;
pub mod frames;
pub mod hosts;
pub mod memif;
pub mod message;
mod near;
pub mod place;
mod sys;

pub use frames::FrameCensus;
pub use near::{Bells, Leg, LegCounters, LegSizes, Ringer};
pub(crate) use sys::{CHUNK_BYTES, chunks_of};
pub use sys::{Lie, NotInherited, keep_from_programs, prepare_for_forks};

/// Largest frame in bytes, from the Ethernet header on.
pub const MAX_FRAME_BYTES: usize = 65536;

/// Largest IP packet in bytes: with an Ethernet header it fills the chunks of a frame.
pub const MTU: u16 = 65520;
