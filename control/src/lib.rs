//! The control protocol between a process that uses an interface and `xwarpd`, which shares it.
//!
//! A client connects to the helper's socket, a `SOCK_SEQPACKET` socket of `AF_UNIX`, so each message is one datagram of at
//! most [`MOST_BYTES`]. The client sends [`Request`]s and the helper answers each with a [`Reply`] of the same id; answers
//! may come in any order. Two messages carry a descriptor: [`Request::Open`] the memory that the client made for frames, a
//! sealed memfd, and [`Reply::Opened`] two, the AF_XDP socket and a second socket, on which the helper sends [`Event`]s.
//! The end of either socket is the end of the device.
//!
//! | request | reply | what the helper does |
//! |---|---|---|
//! | [`Request::Hello`] | [`Reply::Hello`] | compares versions |
//! | [`Request::Open`] | [`Reply::Opened`] | makes a veth pair and binds a socket to its far end |
//! | [`Request::Reserve`] | [`Reply::Reserved`] | reserves a port in the kernel and gives it to the client |
//! | [`Request::Release`] | none | takes it away |
//! | [`Request::Resolve`] | [`Reply::Resolved`] | looks up route and neighbour, without waiting |
//! | [`Request::NextHop`] | [`Reply::NextHop`] | the same for an established connection |
//! | [`Request::Describe`] | [`Reply::Described`] | reads counters of an interface, and what the user has |
//!
//! Numbers are little-endian. A message is rejected as a whole when it is too short or too long, or when a field is out of
//! its range. This crate has no I/O: the driver and the helper send and receive.
#![forbid(unsafe_code)]

mod codec;
mod encoding;
mod message;
#[cfg(test)]
mod tests;

pub use codec::DecodeError;
pub use message::{
    Choice, Description, Device, Event, Hook, MOST_ADDRESSES, MOST_BYTES, MOST_COUNTERS, Neighbour, Quota,
    Reason, Refusal, Reply, Request, Sizes, Tagged, VERSION,
};

/// Where the helper listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/xwarp/xwarpd.sock";

/// Environment variable that names another socket.
pub const SOCKET_VARIABLE: &str = "XWARP_HELPER";
