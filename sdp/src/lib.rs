//! Sockets Direct Protocol (SDP) over iWARP: byte streams with the semantics of TCP's sockets over RDMA verbs, after
//! draft-pinkerton-iwarp-sdp-01 (the draft, below).
//!
//! | task | type |
//! |---|---|
//! | run SDP on a device | [`Sdp`] |
//! | connect, read, write, shut down, close | [`SdpStream`], in the manner of [`std::net::TcpStream`] |
//! | listen and accept | [`SdpListener`] |
//! | use streams and connections asynchronously (feature `tokio`) | `tokio::io::{AsyncRead, AsyncWrite}`, `SdpStream::connect_async`, `SdpListener::accept_async` |
//! | send from and receive into registered memory without a copy | [`SdpStream::send_memory`], [`SdpStream::recv_memory`], [`SdpStream::transact`] |
//! | move a connection to another service or device | [`SdpStream::hand_over`] |
//! | move a connection to another process | [`SdpStream::suspend`], [`Successor`] |
//! | find the SDP listener of a conventional address | [`SdpStream::connect_service`], [`mapper`] |
//! | choose between SDP and TCP for unmodified programs | [`rules`] |
//! | the protocol without any input or output | [`machine::Machine`] |
//! | messages on the wire | [`wire::Message`] |
//!
//! Small data is sent in messages through buffers of SDP. Memory that a program sends by
//! [`send_memory`](SdpStream::send_memory) is advertised, and the peer's [`recv_memory`](SdpStream::recv_memory) reads
//! it by RDMA. When receives are posted before their data arrives, the peer changes to Pipelined mode: the receives are
//! then advertised, and `send_memory` writes into them by RDMA.
//!
//! # A server and a client
//!
//! ```
//! # use std::{error::Error, io::{Read, Write}, thread};
//! # use xwarp_verbs::{Device, DeviceOptions, sim};
//! use xwarp_sdp::{Sdp, SdpListener, SdpOptions, SdpStream};
//!
//! # fn main() -> Result<(), Box<dyn Error>> {
//! # let (a, b) = sim::pair(sim::WireConfig::default(), 1500)?;
//! # let device = Device::over(Box::new(a), DeviceOptions::default())?;
//! # let other_device = Device::over(Box::new(b), DeviceOptions::default())?;
//! # let address = (sim::ipv4(1), 7).into();
//! let server = Sdp::new(&device, SdpOptions::default())?;
//! let listener = SdpListener::bind(&server, address)?;
//! let echo = thread::spawn(move || -> std::io::Result<()> {
//!     let (mut stream, _) = listener.accept()?;
//!     std::io::copy(&mut stream.try_clone()?, &mut stream).map(|_| ())
//! });
//!
//! let client = Sdp::new(&other_device, SdpOptions::default())?;
//! let mut stream = SdpStream::connect(&client, address)?;
//! stream.write_all(b"back, please")?;
//! stream.shutdown(std::net::Shutdown::Write)?;
//! let mut answer = String::new();
//! stream.read_to_string(&mut answer)?;
//! assert_eq!(answer, "back, please");
//! # echo.join().map_err(|_| "the server panicked")??;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod buffers;
mod listener;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod machine;
mod mapped;
pub mod mapper;
mod moved;
mod polling;
pub mod rules;
mod service;
mod socket;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod wire;

pub use self::{
    listener::SdpListener,
    moved::Successor,
    service::{Sdp, SdpOptions},
    stream::{Received, SdpStream, Sending},
};
