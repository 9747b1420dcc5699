//! The progress thread of an engine, which runs the engine while the application does not. It sleeps on the interface's
//! descriptors, the engine's next deadline and the doorbell. While the application busy-polls, the thread only checks
//! periodically whether it still does. While an application waits for frames itself, the thread stands by. What it does when is
//! decided by [`Policy`].

use std::{io, os::fd::AsFd, sync::Arc, thread::JoinHandle, time::Duration};

use super::{
    policy::{Policy, Step, WaitingPosts},
    waits::{Waits, until_kick},
};
use crate::{
    api::shared::SharedEngine,
    system::{self, wait_readable},
};

/// Longest sleep of the thread while an application leads. Deadlines within it wait for its end if the application does not run
/// the engine: ringing the doorbell for each would again wake two threads per message.
const STANDBY: Duration = Duration::from_millis(1);

/// Starts the thread of an engine.
pub(crate) fn spawn(
    shared: &Arc<SharedEngine>,
    waits: &Arc<Waits>,
    interface: &str,
) -> io::Result<JoinHandle<()>> {
    let (shared, waits) = (Arc::clone(shared), Arc::clone(waits));
    let name = match shared.number() {
        0 => format!("xwarp-{interface}"),
        number => format!("xwarp-{interface}-{number}"),
    };
    system::spawn(name, move || {
        if let Err(error) = run(&shared, &waits) {
            tracing::error!(%error, "the progress thread ends: the device makes no progress unless it is polled");
        }
    })
}

fn run(shared: &SharedEngine, waits: &Waits) -> io::Result<()> {
    let mut policy = Policy::new(shared.application_progress(), shared.clock().now());
    while !shared.stopping() && !shared.failed() {
        let posts =
            WaitingPosts { lately: shared.gathered_lately(), forgotten: shared.application_forgets_posts() };
        match policy.observe(shared.clock().now(), shared.calls().so_far(), posts) {
            Step::Nap(limit) => {
                waits.unshare();
                nap(shared, limit)?;
            }
            Step::Run(limit) => {
                shared.progress();
                nap(shared, limit)?;
            }
            Step::Yield(limit) => {
                if nap(shared, limit)? {
                    shared.progress();
                }
            }
            Step::Sleep { stands_by } => {
                shared.progress();
                sleep(shared, waits, stands_by)?;
            }
        }
    }
    Ok(())
}

/// Sleeps for at most `limit` while the application runs the engine. Frames do not end this sleep. Returns whether the doorbell did.
fn nap(shared: &SharedEngine, limit: Duration) -> io::Result<bool> {
    let bell = shared.doorbell();
    shared.sleeper().nap();
    let woken = wait_readable([bell.as_fd()], Some(limit));
    shared.sleeper().wake();
    let woken = woken?;
    if woken {
        bell.clear();
    }
    Ok(woken)
}

/// Sleeps until a frame arrives that no leader receives, the doorbell rings or the engine's next deadline passes. While the thread
/// stands by for a leader, it looks at deadlines every [`STANDBY`] only.
fn sleep(shared: &SharedEngine, waits: &Waits, stands_by: bool) -> io::Result<()> {
    let (bell, sleeper) = (shared.doorbell(), shared.sleeper());
    let wait = shared.guarded(shared.lock(), |state| {
        let now = shared.clock().now();
        if stands_by && !state.engine.wants_to_transmit() {
            return Some(STANDBY);
        }
        let wait = state.quiet_for(now);
        sleeper.announce(wait.map_or(u64::MAX, |wait| (now + wait).as_nanos()));
        wait
    });
    let Some(wait) = wait else { return Ok(()) };
    let wait = until_kick(wait, sleeper.take_frames_left_before_sleep());
    let woken =
        if shared.interface_gone() { wait_readable([bell.as_fd()], wait)? } else { waits.behind(wait)? };
    sleeper.wake();
    if woken {
        bell.clear();
    }
    Ok(())
}
