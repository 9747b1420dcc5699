//! `xwarpd`, the helper that shares interfaces among unprivileged processes.
//!
//! For each client the helper creates a pair of virtual interfaces in a network namespace of its own and binds an
//! AF_XDP socket to the far end. The client receives this socket, which uses the client's own frame memory. The
//! programs of the switch (`xwarp_prog::Switch`) carry the client's frames between its pair and the interface, or into
//! the pair of another client. A port belongs to one client: the helper reserves it in the kernel, and the switch drops
//! frames that a client sends from any other port or address. The helper also answers queries that a client cannot send
//! to the kernel itself: routes, neighbours, changes of the interface.
//!
//! | module | owns |
//! |---|---|
//! | `options` | the command line |
//! | `server` | the loop: connections, requests, events |
//! | `uplink` | a shared interface, and the answers about it |
//! | `client` | one connection: its process and user, its device, its ports |
//! | `closing` | threads that close descriptors that clients passed |
//! | `limits` | the resource limits of one user |
//! | `slots` | the numbers of devices, until they are removed |
//! | `ports` | reservations and their quarantine |
//! | `pairs` | the thread that creates and removes pairs |
//! | `metrics` | the endpoint for monitors |
//! | `report` | reports for users and monitors |
//! | `privileges` | the capabilities that are kept |
//!
//! Nothing outlives the helper: programs, pairs and reserved ports end with its descriptors, and each client ends its device
//! when the helper's sockets close.
#![forbid(unsafe_code)]

mod client;
mod closing;
mod limits;
mod listen;
mod metrics;
mod options;
mod pairs;
mod ports;
mod privileges;
mod report;
mod server;
mod slots;
mod uplink;

use std::process::ExitCode;

use clap::Parser as _;
use tracing_subscriber::EnvFilter;

pub use options::Options;

/// Runs the program.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
    match server::run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
