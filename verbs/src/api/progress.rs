//! The progress thread of an engine, which runs the engine while the application does not. It sleeps on the interface's
//! descriptors, the engine's next deadline and the doorbell. While the application busy-polls, the thread only checks
//! periodically whether it still does. While an application waits for frames itself, the thread stands by.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::Duration,
};

use xwarp_tcp::time::Instant;

use super::{
    shared::{BUSY_POLLS, Calls, SharedEngine},
    sleep::Waits,
};
use crate::system;

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

/// The first and the longest nap while the application polls. A peer waits at most for the longest one when the
/// application stops polling without arming a queue.
const NAP: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(4)];
/// The longest nap beside an application that sleeps for frames itself again and again. Only between two of its sleeps does a peer
/// wait for the thread.
const LONG_NAP: Duration = Duration::from_millis(8);

/// Starts the thread of an engine.
pub(crate) fn spawn(
    shared: &Arc<SharedEngine>,
    waits: &Arc<Waits>,
    interface: &str,
) -> io::Result<JoinHandle<()>> {
    let (shared, waits) = (Arc::clone(shared), Arc::clone(waits));
    let name = match shared.number {
        0 => format!("xwarp-{interface}"),
        number => format!("xwarp-{interface}-{number}"),
    };
    system::spawn(name, move || {
        if let Err(error) = run(&shared, &waits) {
            tracing::error!(%error, "the progress thread ends: the device makes no progress unless it is polled");
        }
    })
}

/// Number of calls between two checks at which an application counts as busy: at least 16 000 per second.
const STEADY_CALLS: u64 = 16;

/// Chunks of frames whose kicks leave no time for one call: an application that polls between the kicks of large messages is
/// as busy as one that polls all the time. 64 000 chunks per second are 90 MB/s of frames of 1500 bytes.
const CHUNKS_PER_CALL: u64 = 4;

/// The application's share of the engine's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attention {
    /// It does not poll.
    None,
    /// It polls, but rarely compared with its posts, or gathered posts missed their poll.
    Some,
    /// It polls all the time.
    Full,
    /// It is inside a kick, after which it will poll or post again.
    Kicking,
}

/// The application's calls at the thread's last check.
struct Watch {
    calls: Calls,
    at: Instant,
}

impl Watch {
    /// Judges the calls of the application since the last check. Checks at most once in the shortest nap: in less time even a busy
    /// application may not poll, above all while this thread holds the engine. `forgotten`: posts wait that should have been
    /// sent.
    ///
    /// Posts count beside polls. While the thread is not napping, posts do not gather, so that each one takes the time
    /// of a kick; an application that fills its send queue then polls a few times in a millisecond, and would never be
    /// recognised as polling. For the same reason the chunks of its kicks count, and it counts as busy while it is
    /// inside a kick: the window of a fast connection is some hundred frames, and the kick for them takes longer than a
    /// nap. A thread that runs the engine meanwhile takes the application's processor or its lock, so that the
    /// application polls even less.
    fn look(&mut self, now: Instant, calls: Calls, forgotten: bool) -> Attention {
        match self.judge(now, calls, forgotten) {
            Attention::None if calls.kicking && calls.polls >= BUSY_POLLS => Attention::Kicking,
            seen => seen,
        }
    }

    /// [`Self::look`] for an application that is not in a kick now.
    fn judge(&mut self, now: Instant, calls: Calls, forgotten: bool) -> Attention {
        if now.since(self.at) < NAP[0] {
            return Attention::None;
        }
        let before = std::mem::replace(self, Self { calls, at: now }).calls;
        let polls = calls.polls.abs_diff(before.polls);
        let posts = calls.posts.abs_diff(before.posts);
        let kicks = calls.chunks.abs_diff(before.chunks) / CHUNKS_PER_CALL;
        if calls.polls < BUSY_POLLS || polls + kicks == 0 || polls + posts + kicks < STEADY_CALLS {
            Attention::None
        } else if forgotten || polls == 0 || polls + kicks < STEADY_CALLS {
            Attention::Some
        } else {
            Attention::Full
        }
    }
}

fn run(shared: &SharedEngine, waits: &Waits) -> io::Result<()> {
    let (mut leads, mut sleeps) = (0, 0);
    let mut watch = Watch { calls: Calls::default(), at: shared.clock.now() };
    let mut nap = NAP[0];
    while !shared.stopping() && !shared.failed() {
        let before = std::mem::replace(&mut sleeps, shared.sleeps.load(Ordering::Relaxed));
        if sleeps != before {
            // An application sleeps again and again, and receives frames before and after each sleep.
            if shared.nap(nap)? {
                shared.progress();
            }
            nap = (nap * 2).min(LONG_NAP);
            continue;
        }
        let attention = if shared.application_progress {
            watch.look(shared.clock.now(), shared.calls(), shared.application_forgets_posts())
        } else {
            Attention::None
        };
        match attention {
            Attention::Full => {
                waits.unshare();
                shared.nap(nap)?;
                // Gathered posts wait for a nap at most, should the application stop polling.
                nap = if shared.gathered_lately() { NAP[0] } else { (nap * 2).min(NAP[1]) };
            }
            // The scheduler may have taken the processor from the application. One missed poll must not end its posts'
            // gathering, and the frames of a millisecond must not wait longer.
            Attention::Some => {
                nap = NAP[0];
                shared.progress();
                shared.nap(nap)?;
            }
            Attention::Kicking => {
                nap = NAP[0];
                shared.nap(nap)?;
            }
            Attention::None => {
                nap = NAP[0];
                shared.progress();
                let before = std::mem::replace(&mut leads, shared.leads());
                shared.sleep(waits, leads != before)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The attention of an application that makes the calls `each` in each of four milliseconds, after it began to
    /// poll.
    fn seen(each: Calls, forgotten: bool) -> [Attention; 4] {
        let mut now = Instant::ZERO + MS;
        let mut calls = Calls { polls: BUSY_POLLS, ..Calls::default() };
        let mut watch = Watch { calls, at: now };
        std::array::from_fn(|_| {
            now += MS;
            calls = Calls {
                polls: calls.polls + each.polls,
                posts: calls.posts + each.posts,
                chunks: calls.chunks + each.chunks,
                kicking: each.kicking,
            };
            watch.look(now, calls, forgotten)
        })
    }

    #[test]
    fn an_application_that_polls_has_attention() {
        assert_eq!(seen(Calls { polls: 16, ..Calls::default() }, false), [Attention::Full; 4]);
        assert_eq!(seen(Calls { polls: 15, ..Calls::default() }, false), [Attention::None; 4]);
    }

    /// Without gathering, 128 posts take a millisecond, in which the application polls once.
    #[test]
    fn an_application_that_posts_much_and_polls_little_is_busy() {
        assert_eq!(seen(Calls { polls: 1, posts: 128, ..Calls::default() }, false), [Attention::Some; 4]);
        assert_eq!(
            seen(Calls { polls: 0, posts: 128, ..Calls::default() }, false),
            [Attention::None; 4],
            "nobody receives"
        );
    }

    /// A sender of 64 KiB messages spends its time in kicks and polls a few times in a millisecond.
    #[test]
    fn an_application_that_sends_much_is_busy() {
        let kicks = |polls, chunks| Calls { polls, posts: 5, chunks, kicking: false };
        assert_eq!(seen(kicks(2, 200), false), [Attention::Full; 4]);
        assert_eq!(seen(kicks(0, 200), false), [Attention::Some; 4], "one kick may take the whole time");
        assert_eq!(seen(kicks(2, 32), false), [Attention::None; 4]);
    }

    #[test]
    fn an_application_inside_a_kick_is_busy_unless_it_sleeps_otherwise() {
        let kicking = Calls { kicking: true, ..Calls::default() };
        assert_eq!(seen(kicking, false), [Attention::Kicking; 4]);
        let mut watch = Watch { calls: Calls::default(), at: Instant::ZERO };
        assert_eq!(watch.look(Instant::ZERO + MS, kicking, false), Attention::None, "it has armed a queue");
    }

    #[test]
    fn posts_that_missed_a_poll_do_not_end_the_attention() {
        assert_eq!(seen(Calls { polls: 100, posts: 100, ..Calls::default() }, true), [Attention::Some; 4]);
        assert_eq!(seen(Calls::default(), true), [Attention::None; 4]);
    }

    #[test]
    fn a_check_needs_a_millisecond_and_a_queue_that_is_not_armed() {
        let calls = Calls { polls: 1000, ..Calls::default() };
        let at = Instant::ZERO + MS;
        let mut watch = Watch { calls: Calls::default(), at };
        assert_eq!(watch.look(at + MS / 2, calls, false), Attention::None);
        assert_eq!(watch.look(at + MS, calls, false), Attention::Full);
        // Arming sets the polls to 0.
        let armed = Calls { polls: BUSY_POLLS - 1, ..Calls::default() };
        assert_eq!(watch.look(at + MS * 2, armed, false), Attention::None);
    }
}
