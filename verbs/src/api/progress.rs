//! The progress thread, which runs the engine while the application does not. It sleeps on the interface's
//! descriptors, the engine's next deadline and the doorbell. While the application busy-polls, the thread only checks
//! from time to time whether it still does. While an application waits for frames itself, the thread stands by.

use std::{io, sync::Arc, thread::JoinHandle, time::Duration};

use xwarp_tcp::time::Instant;

use super::shared::{BUSY_POLLS, DeviceCore};
use crate::system::{self, WaitSet};

/// Which threads run the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Progress {
    /// The application when it polls an empty completion queue, and a progress thread while the application does not poll:
    /// peers can always reach our memory, and a busy-polling application does not pay for a second thread.
    #[default]
    Auto,
    /// Only the application, by polling and by [`Device::wait`](super::Device::wait). Between its calls nothing is received,
    /// acknowledged or retransmitted, and a peer may time out.
    Application,
    /// Only the progress thread. Polling a completion queue never takes the engine's lock.
    Thread,
}

/// The first and the longest nap while the application polls. The longest is what a peer waits for when
/// the application stops polling without arming a queue.
const NAP: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(4)];

/// Starts the thread of a device. `set` contains the interface's descriptors and was made after the device's
/// [`Front`](super::sleep::Front), so that a waiting application is woken first.
pub(crate) fn spawn(shared: &Arc<DeviceCore>, interface: &str, set: WaitSet) -> io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    system::spawn(format!("xwarp-{interface}"), move || {
        if let Err(error) = run(&shared, &set) {
            tracing::error!(%error, "the progress thread ends: the device stands still unless it is polled");
        }
    })
}

/// Polls between two checks from which on an application counts as busy-polling: at least 16 000 per second.
const STEADY_POLLS: u64 = 16;

/// The application's polling at the thread's last check.
struct Watch {
    polls: u64,
    at: Instant,
}

impl Watch {
    /// Whether the application busy-polls. Checks at most once in the shortest nap: in less time even a busy
    /// application may not poll, above all while this thread holds the engine.
    fn sees_polling(&mut self, shared: &DeviceCore) -> bool {
        let now = shared.clock.now();
        if !shared.application_progress || now.since(self.at) < NAP[0] {
            return false;
        }
        let before = std::mem::replace(self, Self { polls: shared.polls(), at: now });
        self.polls >= BUSY_POLLS
            && self.polls.abs_diff(before.polls) >= STEADY_POLLS
            && !shared.application_forgets_posts()
    }
}

fn run(shared: &DeviceCore, set: &WaitSet) -> io::Result<()> {
    let mut leads = 0;
    let mut watch = Watch { polls: 0, at: shared.clock.now() };
    let mut nap = NAP[0];
    while !shared.stopping() && !shared.failed() {
        if watch.sees_polling(shared) {
            shared.nap(nap)?;
            // Gathered posts wait for a nap at most, should the application stop polling.
            nap = if shared.gathered_lately() { NAP[0] } else { (nap * 2).min(NAP[1]) };
        } else {
            nap = NAP[0];
            shared.progress();
            let before = std::mem::replace(&mut leads, shared.leads());
            shared.sleep(set, leads != before)?;
        }
    }
    Ok(())
}
