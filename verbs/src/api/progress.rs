//! The progress thread: it runs the engine while the application does not (design section 8). It sleeps on
//! the interface's descriptors, the engine's next deadline and the doorbell; while the application polls
//! busily it only looks now and then whether that is still so.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use xwarp_tcp::time::Instant;

use super::shared::{BUSY_POLLS, Shared};
use crate::system;

/// Who runs the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Progress {
    /// The application whenever it polls an empty completion queue, and a thread of the device's while it
    /// does not: a peer can always reach our memory, and a busy-polling application pays for no second thread.
    #[default]
    Auto,
    /// Only the application, by polling and by [`Device::wait`](super::Device::wait). Between its calls
    /// nothing is received, acknowledged or repeated; a peer may give up.
    Application,
    /// Only the device's thread. Polling a completion queue never takes the engine's lock.
    Thread,
}

/// The first and the longest nap while the application polls. The longest is what a peer waits for when
/// the application stops polling without arming a queue.
const NAP: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(4)];

/// Starts the thread of a device whose interface is ready when one of `readiness` is readable.
pub(crate) fn spawn(
    shared: &Arc<Shared>,
    interface: &str,
    readiness: Vec<OwnedFd>,
) -> io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    system::spawn(format!("xwarp-{interface}"), move || {
        let fds: Vec<BorrowedFd<'_>> = readiness.iter().map(AsFd::as_fd).collect();
        if let Err(error) = run(&shared, &fds) {
            tracing::error!(%error, "the progress thread ends: the device stands still unless it is polled");
        }
    })
}

/// Polls between two looks that make an application a busy one: 16 000 a second at least.
const STEADY_POLLS: u64 = 16;

/// What the thread saw of the application's polling when it last looked.
struct Watch {
    polls: u64,
    at: Instant,
}

impl Watch {
    /// Whether the application polls busily. Looks at most once in the shortest nap: in less time
    /// even a busy application may not get to poll, above all while this thread has the engine.
    fn sees_polling(&mut self, shared: &Shared) -> bool {
        let now = shared.clock.now();
        if !shared.application_progress || now.since(self.at) < NAP[0] {
            return false;
        }
        let before = std::mem::replace(self, Self { polls: shared.polls(), at: now });
        self.polls >= BUSY_POLLS && self.polls.abs_diff(before.polls) >= STEADY_POLLS
    }
}

fn run(shared: &Shared, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut watch = Watch { polls: 0, at: shared.clock.now() };
    let mut nap = NAP[0];
    while !shared.stopping() {
        if watch.sees_polling(shared) {
            shared.nap(nap)?;
            nap = (nap * 2).min(NAP[1]);
        } else {
            nap = NAP[0];
            shared.progress();
            shared.sleep(fds, None)?;
        }
    }
    Ok(())
}
