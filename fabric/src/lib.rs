//! The fabric: a switch in user space between the processes of one user, which need no privileges.
//!
//! Each process has a leg (`xwarp_leg`), and belongs to a host of the fabric's table. Several processes of a host share its addresses
//! by ports. The fabric carries TCP segments from leg to leg, to the process that has the destination's port; it answers for nobody
//! by a reset, and resets the peers of a process that is gone. It starts with the first program that asks, and ends some time after
//! the last one (`xwarp fabric`). Reasons are in `docs/decisions/0029-the-fabric.md`.
//!
//! | module | owns |
//! |---|---|
//! | `server` | the loop: connections, requests, ends |
//! | `client` | one connection: its process and its device |
//! | `legs` | frames from leg to leg |
//! | `paths` | faults between hosts |
//! | `header` | what is read of a frame, and resets |
//! | `hosts` | the table of hosts |
//! | `ports` | whose a port is |
//!
//! A program may serve itself, for instance a test for the processes that it starts:
//!
//! ```no_run
//! use xwarp_fabric::{Attempt, Options, Place, Server};
//!
//! let place = Place::of(Some("of-my-test"))?;
//! if let Attempt::Serving(server) = Server::begin(&place, Options::default())? {
//!     std::thread::spawn(move || server.serve(None));
//! }
//! # Ok::<(), std::io::Error>(())
//! ```
#![forbid(unsafe_code)]

mod client;
mod header;
mod hosts;
mod legs;
mod paths;
mod ports;
mod server;

use std::time::Duration;

pub use legs::SwitchCounters;
pub use server::{Attempt, Server};
pub use xwarp_leg::place::Place;

/// How a fabric serves.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How long it serves without a client; `None`: for ever.
    pub idle: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self { idle: Some(Duration::from_secs(30)) }
    }
}
