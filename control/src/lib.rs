//! The control protocol between a process that uses an interface and `xwarpd`, which shares it; also between
//! a process and its user's fabric, which has no interface: its [`Reply::Opened`] carries the socket of a leg, on which memif's
//! handshake follows, in place of an AF_XDP socket.
//!
//! A client connects to the helper's socket, a `SOCK_SEQPACKET` socket of `AF_UNIX`, so each message is one datagram of
//! at most [`MAX_BYTES`]. The client sends [`Request`]s and the helper answers each with a [`Reply`] of the same id;
//! answers may come in any order. Two messages carry descriptors: [`Reply::Opened`] the AF_XDP socket, to which the client
//! registers its own frame memory before it binds it, and a second socket, on which the helper sends [`Event`]s;
//! [`Request::Register`] the frame memory of a client that may not lock so much. When the connection or the socket of events is
//! closed, the device ends.
//!
//! | request | reply | action of the helper |
//! |---|---|---|
//! | [`Request::Hello`] | [`Reply::Hello`] | compares versions |
//! | [`Request::Open`] | [`Reply::Opened`] | creates a veth pair, and a socket in the namespace of its far end |
//! | [`Request::Register`] | [`Reply::Registered`] | registers the client's frame memory to its socket |
//! | [`Request::Reserve`] | [`Reply::Reserved`] | reserves a port in the kernel and gives it to the client |
//! | [`Request::Release`] | none | releases the port |
//! | [`Request::Resolve`] | [`Reply::Resolved`] | looks up route and neighbour, without waiting |
//! | [`Request::NextHop`] | [`Reply::NextHop`] | the same for an established connection |
//! | [`Request::Describe`] | [`Reply::Described`] | reads counters of an interface, and the user's resources |
//! | [`Request::Host`] | [`Reply::Host`] | looks up a host of a fabric, by name |
//! | [`Request::Faults`] | [`Reply::Done`] | changes the faults between two hosts of a fabric |
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
    Choice, Description, Device, Event, Hook, Host, MAX_ADDRESSES, MAX_BYTES, MAX_COUNTERS, Neighbour, Quota,
    Reason, Refusal, Reply, Request, Sizes, Tagged, VERSION,
};

/// Default path of the helper's socket.
pub const DEFAULT_SOCKET: &str = "/run/xwarp/xwarpd.sock";

/// Environment variable with the path of another socket.
pub const SOCKET_VARIABLE: &str = "XWARP_HELPER";
