//! Who runs the engine, and who sleeps. From the application's calls and the time, [`Policy`] decides what the progress thread does
//! next. From the time and how long a thread has waited for a processor, [`SpinPolicy`] decides when a thread that polls in vain
//! sleeps. Both read no clock, wait for nothing and take no lock: `thread` and `spin` do what they decide.

use std::time::Duration;

use xwarp_tcp::time::Instant;

/// Polls without arming a queue after which an application may count as busy-polling.
pub(super) const BUSY_POLLS: u64 = 64;
/// Number of calls between two checks at which an application counts as busy: at least 16 000 per second.
const STEADY_CALLS: u64 = 16;
/// Chunks of frames whose kicks leave no time for one call: an application that polls between the kicks of large messages is
/// as busy as one that polls all the time. 64 000 chunks per second are 90 MB/s of frames of 1500 bytes.
const CHUNKS_PER_CALL: u64 = 4;
/// The first nap, and the shortest time between two checks.
const MIN_NAP: Duration = Duration::from_millis(1);
/// The longest nap while the application polls. A peer waits at most for this when the application stops polling without arming a
/// queue.
const MAX_NAP: Duration = Duration::from_millis(4);
/// The longest nap beside an application that sleeps for frames itself again and again. Only between two of its sleeps does a peer
/// wait for the thread.
const MAX_YIELD: Duration = Duration::from_millis(8);

/// Counts of the application's calls that run the engine or give it work.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Calls {
    /// Polls since it last armed a queue.
    pub(super) polls: u64,
    /// Posts, one for each call.
    pub(super) posts: u64,
    /// Chunks of frames that its polls and verbs made the interface send.
    pub(super) chunks: u64,
    /// It is inside the kick of a poll or a verb now. If several of its threads kick, the first to return clears this.
    pub(super) kicking: bool,
    /// Runs of the engine by a leader, because frames had arrived.
    pub(super) leads: u64,
    /// Sleeps by polls ([`CompletionQueue::sleep`](crate::CompletionQueue::sleep)).
    pub(super) sleeps: u64,
}

/// Posts that wait for the application's next poll (`docs/decisions/0012-*`).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WaitingPosts {
    /// Some have waited since the last observation.
    pub(super) lately: bool,
    /// Some wait now that should have been sent.
    pub(super) forgotten: bool,
}

/// What the progress thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The application polls all the time and runs the engine: nap for this time. Frames do not end a nap; the doorbell does.
    Nap(Duration),
    /// The application is busy, but polls rarely, or gathered posts have missed their poll: run the engine, then nap.
    Run(Duration),
    /// The application sleeps for frames itself: nap, and run the engine only if the doorbell ends the nap.
    Yield(Duration),
    /// The application does not run the engine: run it, then sleep until a frame, the next deadline or the doorbell.
    Sleep {
        /// An application leads and receives the frames: look at deadlines from time to time only.
        stands_by: bool,
    },
}

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

/// See the module.
pub(super) struct Policy {
    /// Whether applications run the engine at all.
    applications_run: bool,
    /// The application's calls at the last check, and its time.
    checked: Calls,
    checked_at: Instant,
    /// At the last observation.
    leads: u64,
    sleeps: u64,
    /// The next nap.
    nap: Duration,
}

impl Policy {
    /// The policy of a thread that starts at `now`.
    pub(super) fn new(applications_run: bool, now: Instant) -> Self {
        let calls = Calls::default();
        Self { applications_run, checked: calls, checked_at: now, leads: 0, sleeps: 0, nap: MIN_NAP }
    }

    /// Decides by the application's `calls` so far.
    pub(super) fn observe(&mut self, now: Instant, calls: Calls, posts: WaitingPosts) -> Step {
        let sleeps = calls.sleeps != std::mem::replace(&mut self.sleeps, calls.sleeps);
        if sleeps {
            // An application sleeps again and again, and receives frames before and after each sleep.
            let nap = self.nap;
            self.nap = (nap * 2).min(MAX_YIELD);
            return Step::Yield(nap);
        }
        let attention =
            if self.applications_run { self.attention(now, calls, posts.forgotten) } else { Attention::None };
        if attention != Attention::Full || posts.lately {
            // Gathered posts wait for a nap at most, should the application stop polling.
            self.nap = MIN_NAP;
        }
        match attention {
            Attention::Full => {
                let nap = self.nap.min(MAX_NAP);
                self.nap = nap * 2;
                Step::Nap(nap)
            }
            Attention::Kicking => Step::Nap(MIN_NAP),
            // The scheduler may have taken the processor from the application. One missed poll must not end its posts'
            // gathering, and the frames of a millisecond must not wait longer.
            Attention::Some => Step::Run(MIN_NAP),
            Attention::None => {
                let stands_by = calls.leads != std::mem::replace(&mut self.leads, calls.leads);
                Step::Sleep { stands_by }
            }
        }
    }

    /// Judges the calls of the application since the last check. Checks at most once in the shortest nap: in less time even a busy
    /// application may not poll, above all while the thread holds the engine.
    ///
    /// Posts count beside polls. While the thread is not napping, posts do not gather, so that each one takes the time
    /// of a kick; an application that fills its send queue then polls a few times in a millisecond, and would never be
    /// recognised as polling. For the same reason the chunks of its kicks count, and it counts as busy while it is
    /// inside a kick: the window of a fast connection is some hundred frames, and the kick for them takes longer than a
    /// nap. A thread that runs the engine meanwhile takes the application's processor or its lock, so that the
    /// application polls even less.
    fn attention(&mut self, now: Instant, calls: Calls, forgotten: bool) -> Attention {
        match self.check(now, calls, forgotten) {
            Attention::None if calls.kicking && calls.polls >= BUSY_POLLS => Attention::Kicking,
            seen => seen,
        }
    }

    /// [`Self::attention`] for an application that is not in a kick now.
    fn check(&mut self, now: Instant, calls: Calls, forgotten: bool) -> Attention {
        if now.since(self.checked_at) < MIN_NAP {
            return Attention::None;
        }
        self.checked_at = now;
        let before = std::mem::replace(&mut self.checked, calls);
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

/// Time between two looks of a polling thread, some microseconds apart, after which it asks whether others had its processor.
const GAP: Duration = Duration::from_micros(500);
/// Interval at which a polling thread asks how long it has waited for its processor.
const ASK_EVERY: Duration = Duration::from_millis(10);
/// Wait since the last question from which the processor counts as busy: at least this long, and this part of the time. The slice of a
/// thread is 0.7 to 3 ms; threads of the kernel, and the progress thread, take less.
const MIN_WAITED: Duration = Duration::from_micros(400);
const MIN_WAITED_PART: u32 = 32;
/// Time of empty polls before a rest: a reply within it finds the thread awake. Where both ends share a processor, the peer waits for
/// its end, so that a longer time lengthens each round trip.
const MIN_SPIN: Duration = Duration::from_micros(5);
/// The longest rest, about as long as another thread's slice. Completions that another thread causes, and timers, wait for its end. A
/// shorter one needs the processor's timer before the scheduler's next tick, each time.
const MAX_REST: Duration = Duration::from_millis(3);
const _: () = assert!(
    MAX_REST.as_nanos() <= MAX_NAP.as_nanos(),
    "timers would be later than those of a thread that sleeps"
);
/// Time for which a thread that has waited rests instead of polling in vain, at first and at most. Afterwards it polls until it waits
/// again, which costs it a slice and its turns until the scheduler has made up for that.
const MIN_BUSY: Duration = Duration::from_millis(20);
const MAX_BUSY: Duration = Duration::from_millis(320);

/// When a thread that polls in vain sleeps: one for each thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpinPolicy {
    /// The first look of the present series of empty polls.
    began: Instant,
    /// The last look.
    looked: Instant,
    /// How long the thread has waited for a processor in its life, and when it asked.
    waited: Option<Duration>,
    asked: Instant,
    /// The processor counts as busy until then.
    busy_until: Instant,
    /// For how long it counted as busy after the last wait.
    busy_for: Duration,
}

impl SpinPolicy {
    /// The policy of a thread that has not polled yet.
    pub(super) const fn new() -> Self {
        const START: Instant = Instant::ZERO;
        Self {
            began: START,
            looked: START,
            waited: None,
            asked: START,
            busy_until: START,
            busy_for: Duration::ZERO,
        }
    }

    /// A look of the thread at `now`, the `first` one of a series of empty polls or a later one. Returns how long it should sleep at
    /// most, unless it should poll again. `waited` tells how long the thread has been ready to run without a processor in its life;
    /// `None` where the kernel does not count it.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        first: bool,
        waited: impl FnOnce() -> Option<Duration>,
    ) -> Option<Duration> {
        // Before the first look of a series the thread had work.
        let gap = !first && now.since(self.looked) >= GAP;
        self.looked = now;
        if first {
            self.began = now;
        }
        if gap || now.since(self.asked) >= ASK_EVERY {
            self.ask(now, waited());
        }
        (now < self.busy_until && now.since(self.began) >= MIN_SPIN).then_some(MAX_REST)
    }

    /// The thread has slept until `now`.
    pub(super) fn rested(&mut self, now: Instant) {
        self.looked = now;
    }

    fn ask(&mut self, now: Instant, waited: Option<Duration>) {
        let time = now.since(std::mem::replace(&mut self.asked, now));
        let before = std::mem::replace(&mut self.waited, waited);
        let (Some(waited), Some(before)) = (waited, before) else { return };
        // Without a wait, the application or the host of a virtual machine took the time of a gap.
        if waited.saturating_sub(before) >= MIN_WAITED.max(time / MIN_WAITED_PART) {
            let lately = now.since(self.busy_until) < self.busy_for;
            self.busy_for = if lately { (self.busy_for * 2).min(MAX_BUSY) } else { MIN_BUSY };
            self.busy_until = now + self.busy_for;
        }
    }
}

#[cfg(test)]
mod tests;
