//! `xwarpd`, the helper that shares interfaces among unprivileged processes.
//!
//! For each client the helper creates a pair of virtual interfaces, whose far end is in a network namespace of its own, and an
//! AF_XDP socket in that namespace. The client receives the socket, registers its own frame memory and binds it to the far end. The
//! programs of the switch (`xwarp_prog::Switch`) carry the client's frames between its pair and the interface, or into
//! the pair of another client. A port belongs to one client: the helper reserves it in the kernel, and the switch drops
//! frames that a client sends from any other port or address. The helper also answers queries that a client cannot send
//! to the kernel itself: routes, neighbours, changes of the interface.
//!
//! | module | owns |
//! |---|---|
//! | `options` | the command line |
//! | `server` | the loop: connections, rates, ends |
//! | `requests` | requests and answers |
//! | `events` | changes of interfaces; interfaces that go and come back |
//! | `pending` | the changes that a client has not been sent yet |
//! | `identity` | containers: the process behind a connection |
//! | `memory` | files in memory, which the loop may close |
//! | `uplink` | a shared interface, and the answers about it |
//! | `client` | one connection: its process and user, its device, its ports |
//! | `closing` | threads that close descriptors that clients passed |
//! | `limits` | the resource limits of one user |
//! | `slots` | the numbers of devices, until they are removed |
//! | `ports` | reservations and their quarantine |
//! | `pair` | the pair of a client, and reports about pairs |
//! | `pairs` | the thread that creates pairs |
//! | `removals` | the thread that removes them |
//! | `turns` | the queues of these threads |
//! | `private` | the network namespace of a client's socket |
//! | `log` | the log on standard error |
//! | `signals` | the signals that end the helper |
//! | `metrics` | the endpoint for monitors |
//! | `names` | the names of descriptors that outlive the helper |
//! | `store` | the protocol by which systemd, or the keeper, keeps them |
//! | `keeper` | the process that keeps them where systemd does not |
//! | `watchdog` | the reports that the loop runs |
//! | `former` | what the former helper has left |
//! | `takeover` | the devices of the former helper |
//! | `report` | reports for users and monitors |
//! | `privileges` | the capabilities that are kept |
//! | `syscalls` | the system calls that are kept |
//!
//! Programs, pairs and reserved ports end with the helper's descriptors, and each client ends its device when the helper's sockets
//! close. With `--keep`, somebody else holds copies of them until the next helper takes over.
#![forbid(unsafe_code)]

mod client;
mod closing;
mod events;
mod former;
mod identity;
mod keeper;
mod limits;
mod listen;
mod log;
mod memory;
mod metrics;
mod names;
mod options;
mod pair;
mod pairs;
mod pending;
mod ports;
mod private;
mod privileges;
mod removals;
mod report;
mod requests;
mod server;
mod signals;
mod slots;
mod store;
mod syscalls;
mod takeover;
mod turns;
mod uplink;
mod watchdog;

use std::process::ExitCode;

use clap::Parser as _;
use former::Former;
pub use options::Options;
use signals::Signals;

/// Runs the program.
pub fn main() -> ExitCode {
    let options = Options::parse();
    run(&options).unwrap_or(ExitCode::FAILURE)
}

fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let former = Former::take();
    let is_kept = former.as_ref().is_ok_and(|former| former.keeper.is_some());
    let keeps = options.keep && former.is_ok() && !is_kept && std::env::var_os("NOTIFY_SOCKET").is_none();
    // Before the first thread starts.
    let signals = if keeps { Signals::take_with_children() } else { Signals::take() };
    if keeps {
        privileges::suspend()?;
    }
    let _log = log::start()?;
    let outcome =
        signals.and_then(
            |signals| {
                if keeps { keeper::run(signals) } else { server::run(options, &signals, former?) }
            },
        );
    outcome.inspect_err(|error| tracing::error!("{error:#}"))
}
