//! Tables of decisions, and applications and the thread in virtual time.

use super::*;

const MS: Duration = Duration::from_millis(1);
const SLEEP: Step = Step::Sleep { stands_by: false };
const NO_POSTS: WaitingPosts = WaitingPosts { lately: false, forgotten: false };
const FORGOTTEN: WaitingPosts = WaitingPosts { lately: true, forgotten: true };

/// A policy that has seen `calls` at `at`.
fn policy(calls: Calls, at: Instant) -> Policy {
    Policy { checked: calls, ..Policy::new(true, at) }
}

fn plus(calls: Calls, each: Calls) -> Calls {
    Calls {
        polls: calls.polls + each.polls,
        posts: calls.posts + each.posts,
        chunks: calls.chunks + each.chunks,
        kicking: each.kicking,
        leads: calls.leads + each.leads,
        sleeps: calls.sleeps + each.sleeps,
    }
}

/// The steps beside an application that makes the calls `each` in each of four milliseconds, after it began to poll.
fn steps(each: Calls, posts: WaitingPosts) -> [Step; 4] {
    let mut now = Instant::ZERO + MS;
    let mut calls = Calls { polls: BUSY_POLLS, ..Calls::default() };
    let mut policy = policy(calls, now);
    std::array::from_fn(|_| {
        now += MS;
        calls = plus(calls, each);
        policy.observe(now, calls, posts)
    })
}

const NAPS: [Step; 4] =
    [Step::Nap(MS), Step::Nap(Duration::from_millis(2)), Step::Nap(MAX_NAP), Step::Nap(MAX_NAP)];
const RUNS: [Step; 4] = [Step::Run(MS); 4];

#[test]
fn an_application_that_polls_is_left_alone() {
    assert_eq!(steps(Calls { polls: 16, ..Calls::default() }, NO_POSTS), NAPS);
    assert_eq!(steps(Calls { polls: 15, ..Calls::default() }, NO_POSTS), [SLEEP; 4]);
}

/// Without gathering, 128 posts take a millisecond, in which the application polls once.
#[test]
fn an_application_that_posts_much_and_polls_little_is_busy() {
    assert_eq!(steps(Calls { polls: 1, posts: 128, ..Calls::default() }, NO_POSTS), RUNS);
    assert_eq!(steps(Calls { posts: 128, ..Calls::default() }, NO_POSTS), [SLEEP; 4], "nobody receives");
}

/// A sender of 64 KiB messages spends its time in kicks and polls a few times in a millisecond.
#[test]
fn an_application_that_sends_much_is_busy() {
    let kicks = |polls, chunks| Calls { polls, posts: 5, chunks, ..Calls::default() };
    assert_eq!(steps(kicks(2, 200), NO_POSTS), NAPS);
    assert_eq!(steps(kicks(0, 200), NO_POSTS), RUNS, "one kick may take the whole time");
    assert_eq!(steps(kicks(2, 32), NO_POSTS), [SLEEP; 4]);
}

#[test]
fn an_application_inside_a_kick_is_busy_unless_it_sleeps_otherwise() {
    let kicking = Calls { kicking: true, ..Calls::default() };
    assert_eq!(steps(kicking, NO_POSTS), [Step::Nap(MS); 4]);
    let mut policy = policy(Calls::default(), Instant::ZERO);
    assert_eq!(policy.observe(Instant::ZERO + MS, kicking, NO_POSTS), SLEEP, "it has armed a queue");
}

#[test]
fn posts_that_missed_a_poll_do_not_end_the_attention() {
    assert_eq!(steps(Calls { polls: 100, posts: 100, ..Calls::default() }, FORGOTTEN), RUNS);
    assert_eq!(steps(Calls::default(), FORGOTTEN), [SLEEP; 4]);
}

#[test]
fn gathered_posts_wait_for_the_shortest_nap() {
    let lately = WaitingPosts { lately: true, forgotten: false };
    assert_eq!(steps(Calls { polls: 16, ..Calls::default() }, lately), [Step::Nap(MS); 4]);
}

#[test]
fn a_check_needs_a_millisecond_and_a_queue_that_is_not_armed() {
    let calls = Calls { polls: 1000, ..Calls::default() };
    let at = Instant::ZERO + MS;
    let mut policy = policy(Calls::default(), at);
    assert_eq!(policy.observe(at + MS / 2, calls, NO_POSTS), SLEEP);
    assert_eq!(policy.observe(at + MS, calls, NO_POSTS), Step::Nap(MS));
    // Arming sets the polls to 0.
    let armed = Calls { polls: BUSY_POLLS - 1, ..Calls::default() };
    assert_eq!(policy.observe(at + MS * 2, armed, NO_POSTS), SLEEP);
}

#[test]
fn a_device_whose_thread_alone_runs_the_engine_is_never_left_alone() {
    let mut policy = Policy::new(false, Instant::ZERO);
    let polling = |n| Calls { polls: n * 1000, kicking: true, ..Calls::default() };
    for n in 1..5 {
        assert_eq!(policy.observe(Instant::ZERO + MS * n, polling(u64::from(n)), NO_POSTS), SLEEP);
    }
}

#[test]
fn the_thread_stands_by_while_an_application_leads() {
    let leads = steps(Calls { leads: 3, ..Calls::default() }, NO_POSTS);
    assert_eq!(leads, [Step::Sleep { stands_by: true }; 4]);
}

#[test]
fn the_thread_yields_to_an_application_that_sleeps_by_polls() {
    let yields = [1, 2, 4, 8].map(|ms| Step::Yield(MS * ms));
    assert_eq!(steps(Calls { sleeps: 1, ..Calls::default() }, NO_POSTS), yields);
}

/// The longest yield is longer than the longest nap. A queue that is polled after many sleeps must not wait for a yield.
#[test]
fn a_nap_after_yields_is_not_longer_than_other_naps() {
    let at = Instant::ZERO + MS;
    let mut calls = Calls { polls: BUSY_POLLS, ..Calls::default() };
    let mut policy = policy(calls, at);
    for ms in [1, 2, 4, 8, 8] {
        calls.sleeps += 1;
        assert_eq!(policy.observe(at, calls, NO_POSTS), Step::Yield(MS * ms));
    }
    calls.polls += 100;
    assert_eq!(policy.observe(at + MS * 9, calls, NO_POSTS), Step::Nap(MAX_NAP));
}

/// An application in virtual time, beside the thread that follows the policy.
struct World {
    now: Instant,
    policy: Policy,
    calls: Calls,
    /// Observations, and runs of the engine by the thread.
    observed: u32,
    runs: u32,
    /// When the thread waits for frames; a frame or the doorbell wakes it then at once.
    listens: bool,
}

impl World {
    fn new() -> Self {
        let policy = Policy::new(true, Instant::ZERO);
        Self { now: Instant::ZERO, policy, calls: Calls::default(), observed: 0, runs: 0, listens: false }
    }

    /// One round of the thread, while the application makes the calls `each` in each millisecond. A sleep ends after `wakes`,
    /// by a frame.
    fn round(&mut self, each: Calls, wakes: Duration) -> Step {
        let step = self.policy.observe(self.now, self.calls, NO_POSTS);
        self.observed += 1;
        let (runs, passed) = match step {
            Step::Nap(nap) | Step::Yield(nap) => (0, nap),
            Step::Run(nap) => (1, nap),
            Step::Sleep { .. } => (1, wakes),
        };
        self.listens = matches!(step, Step::Sleep { .. });
        self.runs += runs;
        self.now += passed;
        let times = passed.as_micros() as u64;
        let many = |calls: u64| calls * times / 1000;
        let made = Calls { polls: many(each.polls), posts: many(each.posts), ..each };
        self.calls = plus(self.calls, made);
        step
    }

    fn run_until(&mut self, end: Instant, each: Calls, wakes: Duration) {
        while self.now < end {
            self.round(each, wakes);
        }
    }
}

#[test]
fn sim_the_thread_leaves_the_engine_to_an_application_that_polls_for_a_second() {
    let polling = Calls { polls: 1000, posts: 100, ..Calls::default() };
    let mut world = World::new();
    // Frames arrive every 20 us, and the thread is awake for the first ones.
    world.run_until(Instant::ZERO + Duration::from_secs(1), polling, Duration::from_micros(20));
    let Step::Nap(_) = world.round(polling, MS) else { panic!("it does not nap") };
    assert!(world.runs <= 60, "{} runs in the first millisecond", world.runs);
    assert!(world.observed - world.runs <= 260, "{} observations a second", world.observed);
}

#[test]
fn sim_an_application_that_stops_to_poll_is_served_after_the_longest_nap() {
    let polling = Calls { polls: 1000, ..Calls::default() };
    for ms in 20..60 {
        let mut world = World::new();
        world.run_until(Instant::ZERO + MS * ms, polling, Duration::from_micros(20));
        let stopped = world.now;
        while !world.listens {
            world.round(Calls::default(), MS);
        }
        // The nap during which it stops, and the next one: until the first is over, its polls count.
        assert!(world.now.since(stopped) <= MAX_NAP + MS, "{:?}", world.now.since(stopped));
    }
}

/// Arming a queue clears the polls and ends the nap by the doorbell.
#[test]
fn sim_an_application_that_arms_a_queue_is_served_at_once() {
    let mut world = World::new();
    world.run_until(
        Instant::ZERO + MS * 50,
        Calls { polls: 1000, ..Calls::default() },
        Duration::from_micros(20),
    );
    world.calls.polls = 0;
    assert_eq!(world.round(Calls::default(), MS), SLEEP);
}

/// Whatever an application does, no nap is longer than the longest, and an application that makes no calls for longer than that is
/// served.
#[test]
fn prop_every_application_that_stops_is_served() {
    use proptest::prelude::*;

    let call = (0..200u64, 0..200u64, 0..400u64, any::<bool>(), 0..2u64, 0..2u64).prop_map(
        |(polls, posts, chunks, kicking, leads, sleeps)| Calls {
            polls,
            posts,
            chunks,
            kicking,
            leads,
            sleeps,
        },
    );
    let steps = prop::collection::vec((call, any::<bool>(), any::<bool>(), any::<bool>()), 0..60);
    proptest!(|(steps in steps)| {
        let (mut now, mut calls) = (Instant::ZERO, Calls::default());
        let mut policy = Policy::new(true, now);
        let pass = |step| match step {
            Step::Nap(nap) | Step::Run(nap) => {
                assert!((MIN_NAP..=MAX_NAP).contains(&nap));
                nap
            }
            Step::Yield(nap) => {
                assert!((MIN_NAP..=MAX_YIELD).contains(&nap));
                nap
            }
            Step::Sleep { .. } => MIN_NAP,
        };
        for (each, armed, lately, forgotten) in steps {
            now += pass(policy.observe(now, calls, WaitingPosts { lately, forgotten }));
            calls = plus(calls, each);
            if armed {
                calls.polls = 0;
            }
        }
        calls.kicking = false;
        // The observation of a yield does not look at polls, and the next one still sees those of before.
        let served = (0..3).any(|_| {
            let step = policy.observe(now, calls, NO_POSTS);
            now += pass(step);
            matches!(step, Step::Sleep { .. })
        });
        prop_assert!(served);
    });
}

const US: Duration = Duration::from_micros(1);

/// A thread that polls in vain: a look each 4 us, and the time that it has waited for its processor.
struct Spinner {
    policy: SpinPolicy,
    now: Instant,
    waited: Duration,
    asked: u32,
}

impl Spinner {
    fn new() -> Self {
        Self {
            policy: SpinPolicy::new(),
            now: Instant::ZERO + Duration::from_secs(1),
            waited: 7 * MS,
            asked: 0,
        }
    }

    fn look(&mut self, first: bool) -> Option<Duration> {
        self.now += 4 * US;
        let Self { policy, now, waited, asked } = self;
        policy.observe(*now, first, || {
            *asked += 1;
            Some(*waited)
        })
    }

    /// Polls in vain for `time`; returns the number of rests, which end at once.
    fn spin(&mut self, time: Duration) -> u32 {
        let (end, mut rests) = (self.now + time, 0);
        self.look(true);
        while self.now < end {
            if self.look(false).is_some() {
                rests += 1;
                self.policy.rested(self.now);
            }
        }
        rests
    }

    /// Others have the processor for `time`, while the thread is ready to run.
    fn waits(&mut self, time: Duration) {
        self.now += time;
        self.waited += time;
    }
}

#[test]
fn a_polling_thread_with_its_own_processor_never_rests() {
    let mut spinner = Spinner::new();
    assert_eq!(spinner.spin(1000 * MS), 0);
    assert!((95..=105).contains(&spinner.asked), "asked {} times in a second", spinner.asked);
    // A thread of the kernel each millisecond, for 20 us.
    for _ in 0..1000 {
        spinner.waits(20 * US);
        assert_eq!(spinner.spin(MS), 0);
    }
    // The host of the virtual machine, or the application between two polls.
    spinner.now += 50 * MS;
    assert_eq!(spinner.spin(50 * MS), 0);
}

#[test]
fn a_polling_thread_rests_once_others_had_its_processor() {
    let mut spinner = Spinner::new();
    spinner.spin(15 * MS);
    spinner.waits(3 * MS);
    assert_eq!(spinner.look(false), Some(MAX_REST), "at the first look after the gap");
    assert_eq!(spinner.look(true), None, "the series is too short");
    assert_eq!(spinner.look(false), None);
    assert_eq!(spinner.look(false), Some(MAX_REST));
    assert!(spinner.spin(15 * MS) > 0);
    spinner.spin(10 * MS);
    assert_eq!(spinner.spin(10 * MS), 0, "nobody else was there for 20 ms");
}

#[test]
fn rests_are_tried_for_longer_while_the_processor_stays_busy() {
    let mut spinner = Spinner::new();
    spinner.spin(15 * MS);
    let mut times = Vec::new();
    for _ in 0..7 {
        spinner.waits(3 * MS);
        let begin = spinner.now;
        spinner.look(false);
        while spinner.spin(MS) > 0 {}
        times.push(spinner.now.since(begin).as_millis() / 10 * 10);
    }
    assert_eq!(times, [20, 40, 80, 160, 320, 320, 320]);
}

#[test]
fn a_kernel_that_counts_no_waits_gets_no_rests() {
    let mut policy = SpinPolicy::new();
    let mut now = Instant::ZERO + MS;
    for _ in 0..100 {
        assert_eq!(policy.observe(now, false, || None), None);
        now += 3 * MS;
    }
}
