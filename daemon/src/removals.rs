//! The thread that removes the pairs of clients. The kernel takes tens of milliseconds for one, most of them without a lock, so
//! other pairs are made meanwhile.
//!
//! A client may keep its socket, and with it the namespace of the far end, after it has hung up. Its slot is reported as removed
//! when the last socket of the namespace is closed.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use xwarp_driver::netlink::Netlink;

use crate::pair::{Done, Pair, Results};
use crate::private::PrivateNamespace;
use crate::privileges;
use crate::turns::{Next, Turns};

/// Shortest and longest time between two looks at namespaces whose pair is gone. The kernel closes the sockets of a process that
/// ends some milliseconds after those that report the end.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LAST_LOOK: Duration = Duration::from_millis(200);

/// What is not needed any more.
#[derive(Debug)]
pub(crate) enum Removal {
    /// A pair, and the helper's own descriptor of its socket.
    Pair(Pair, OwnedFd),
    /// What a former helper had begun to remove: the near end of a slot, if it is there still, and its namespace.
    Remains { slot: u32, near: Option<u32>, namespace: Option<PrivateNamespace> },
}

/// Starts the thread in the network namespace of the calling one.
pub(crate) fn remove_all(removals: Arc<Turns<Removal>>, results: Results) -> Result<()> {
    let mut netlink = Netlink::open().context("opening a netlink socket")?;
    thread::Builder::new().name("xwarpd-removes".into()).spawn(move || {
        if let Err(error) = privileges::drop_others() {
            tracing::warn!(%error, "a thread keeps its capabilities");
        }
        let mut held: Vec<(u32, PrivateNamespace)> = Vec::new();
        let mut pause = FIRST_LOOK;
        loop {
            match removals.wait((!held.is_empty()).then_some(pause)) {
                Next::Job(Removal::Pair(pair, socket)) => {
                    held.push(pair.remove(&mut netlink));
                    drop(socket);
                    pause = FIRST_LOOK;
                }
                Next::Job(Removal::Remains { slot, near, namespace }) => {
                    if let Some(near) = near {
                        let _ = netlink.delete_link(near);
                    }
                    match namespace {
                        Some(namespace) => held.push((slot, namespace)),
                        None if !results.report(Done::Removed { slot }) => return,
                        None => {}
                    }
                    pause = FIRST_LOOK;
                }
                Next::Nothing => pause = LAST_LOOK.min(2 * pause),
                Next::Ended => return,
            }
            let released = held.extract_if(.., |(_, namespace)| namespace.is_empty());
            if !released.into_iter().all(|(slot, _)| results.report(Done::Removed { slot })) {
                return;
            }
        }
    })?;
    Ok(())
}
