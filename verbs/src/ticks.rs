//! [`TickClock`]: the monotonic [`Clock`], read at the cost of the processor's time-stamp counter.
//!
//! An engine that is polled reads the time in each turn and each post, and a reading takes longer than most of the other
//! steps of a message. For a short time after a reading, the counter tells how much time has passed since.
//!
//! Libraries for the counter (quanta, minstant) calibrate it once, which delays the start of a program, and leave the clock then.
//! Here the clock stays the reference: no start is delayed, and a suspended or moved machine is noticed.

use std::{fs, ops::RangeInclusive};

use xwarp_tcp::time::Instant;

use crate::system::Clock;

/// Time for which the counter stands in for the clock.
const WINDOW_NS: u64 = 200_000;
/// Time over which the counter's rate is measured first.
const BASELINE_NS: u64 = 2_000_000;
/// Nanoseconds in 2^32 ticks of counters from 10 GHz down to 500 MHz. Others were measured while the counter jumped.
const RATES: RangeInclusive<u128> = (1 << 32) / 10..=2 << 32;
/// Deviation of the counter from the clock beyond which its rate is measured anew: the machine was suspended or moved.
const TOLERANCE_NS: u64 = 1_000;

/// A clock that one thread at a time reads, often.
#[derive(Debug)]
pub(crate) struct TickClock {
    clock: Clock,
    /// `None`: the counter cannot be used.
    ticks: Option<Interpolation>,
}

impl TickClock {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { clock, ticks: counts_time().then(Interpolation::default) }
    }

    /// The time of [`Clock::now`], possibly some nanoseconds off. It never goes back.
    #[inline]
    pub(crate) fn now(&mut self) -> Instant {
        let Self { clock, ticks } = self;
        match ticks {
            Some(ticks) => Instant::from_nanos(ticks.now(counter, || clock.now().as_nanos())),
            None => clock.now(),
        }
    }
}

/// Whether the kernel itself takes the time from the counter: it has found that the counter runs at a constant rate, and the same
/// on all processors.
fn counts_time() -> bool {
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    cfg!(target_arch = "x86_64") && fs::read_to_string(SOURCE).is_ok_and(|source| source.trim() == "tsc")
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the counter has no safe function")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every processor of this architecture has the instruction. A process that has forbidden it to itself (`PR_SET_TSC`) is
    // killed by any reading of the clock.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

/// The counter and the clock at one moment.
#[derive(Debug, Clone, Copy, Default)]
struct Reading {
    ticks: u64,
    nanos: u64,
}

/// The time between readings of the clock.
#[derive(Debug, Default)]
struct Interpolation {
    /// The first reading since the rate was last measured anew, and the last one.
    first: Option<Reading>,
    last: Reading,
    /// Nanoseconds in 2^32 ticks.
    rate: u64,
    /// Ticks after the last reading for which the counter is used: 0 while the rate is not known.
    window: u64,
    /// The largest time that was returned.
    latest: u64,
}

impl Interpolation {
    #[inline]
    fn now(&mut self, counter: impl Fn() -> u64, clock: impl FnOnce() -> u64) -> u64 {
        let passed = counter().wrapping_sub(self.last.ticks);
        let nanos = if passed < self.window {
            self.last.nanos + ((passed * self.rate) >> 32)
        } else {
            let nanos = clock();
            // After the clock: if the thread is interrupted in between, the counter's time is late, not early.
            self.read(Reading { ticks: counter(), nanos });
            nanos
        };
        self.latest = self.latest.max(nanos);
        self.latest
    }

    /// Takes a reading, and measures the rate.
    #[inline(never)]
    fn read(&mut self, now: Reading) {
        let first = match self.first {
            Some(first) if !self.deviates(now) => first,
            _ => {
                self.window = 0;
                *self.first.insert(now)
            }
        };
        self.last = now;
        let (ticks, nanos) = (now.ticks.wrapping_sub(first.ticks), now.nanos.saturating_sub(first.nanos));
        let rate = (u128::from(nanos) << 32).checked_div(ticks.into()).filter(|rate| RATES.contains(rate));
        match rate {
            Some(rate) if nanos >= BASELINE_NS => {
                self.rate = rate as u64;
                self.window = (WINDOW_NS << 32) / self.rate;
            }
            None if nanos >= BASELINE_NS => self.first = None,
            _ => {}
        }
    }

    /// Whether the counter and the clock have passed different times since the last reading.
    fn deviates(&self, now: Reading) -> bool {
        let ticks = u128::from(now.ticks.wrapping_sub(self.last.ticks));
        let expected = u128::from(self.last.nanos) + ((ticks * u128::from(self.rate)) >> 32);
        let passed = now.nanos.saturating_sub(self.last.nanos);
        self.window > 0 && expected.abs_diff(now.nanos.into()) > (TOLERANCE_NS + passed / 1000).into()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    /// A counter of `hertz` and a clock, `read` times of which were read.
    struct Machine {
        nanos: Cell<u64>,
        ticks: Cell<u64>,
        hertz: u64,
        read: Cell<u32>,
        interpolation: Interpolation,
    }

    impl Machine {
        fn new(hertz: u64) -> Self {
            let interpolation = Interpolation::default();
            let (nanos, ticks) = (Cell::new(7_000), Cell::new(u64::MAX - 1_000_000));
            Self { nanos, ticks, hertz, read: Cell::new(0), interpolation }
        }

        fn pass(&self, nanos: u64) {
            let ticks = u128::from(nanos) * u128::from(self.hertz) / 1_000_000_000;
            self.nanos.set(self.nanos.get() + nanos);
            self.ticks.set(self.ticks.get().wrapping_add(ticks as u64));
        }

        fn now(&mut self) -> u64 {
            let clock = || {
                self.read.set(self.read.get() + 1);
                self.nanos.get()
            };
            self.interpolation.now(|| self.ticks.get(), clock)
        }

        /// Lets time pass in steps of 100 ns; returns how often the clock was read.
        fn poll(&mut self, steps: u32) -> u32 {
            let before = self.read.get();
            for _ in 0..steps {
                self.pass(100);
                let error = self.now().abs_diff(self.nanos.get());
                assert!(error < 50, "{error} ns");
            }
            self.read.get() - before
        }
    }

    #[test]
    fn the_clock_is_read_rarely_once_the_rate_is_known() {
        for hertz in [600_000_000, 2_596_000_000, 6_000_000_000] {
            let mut machine = Machine::new(hertz);
            assert!(machine.poll(20_000) >= 20_000, "{hertz}");
            let read = machine.poll(100_000);
            assert!((49..=52).contains(&read), "{hertz}: {read}");
        }
    }

    #[test]
    fn a_counter_that_jumps_is_measured_anew() {
        for jump in [1 << 40, 1 << 63, u64::MAX - (1 << 30)] {
            let mut machine = Machine::new(2_000_000_000);
            machine.poll(30_000);
            machine.ticks.set(machine.ticks.get().wrapping_add(jump));
            assert!(machine.poll(20_000) >= 19_000, "{jump}");
            assert!(machine.poll(100_000) < 150, "{jump}");
        }
    }

    #[test]
    fn an_interruption_while_the_clock_is_read_does_not_put_the_time_ahead() {
        let mut machine = Machine::new(2_000_000_000);
        machine.poll(30_000);
        machine.pass(WINDOW_NS);
        let (ticks, nanos) = (&machine.ticks, &machine.nanos);
        let interrupted = || {
            let now = nanos.get();
            nanos.set(now + 5_000_000);
            ticks.set(ticks.get() + 10_000_000);
            now
        };
        machine.interpolation.now(|| ticks.get(), interrupted);
        assert!(machine.now() <= machine.nanos.get());
        machine.pass(WINDOW_NS);
        assert_eq!(machine.now(), machine.nanos.get());
    }

    /// The counter of this machine. A thread that is interrupted between two readings sees a difference.
    #[test]
    fn the_time_is_that_of_the_clock() {
        let clock = Clock::start();
        let mut ticks = TickClock::new(clock);
        let (mut latest, mut readings, mut apart) = (Instant::ZERO, 0, 0);
        while clock.now() < Instant::from_nanos(20 * BASELINE_NS) {
            let (before, now, after) = (clock.now(), ticks.now(), clock.now());
            assert!(now >= latest, "{now:?} after {latest:?}");
            latest = now;
            readings += 1;
            apart +=
                u32::from(before.nanos_since(now) > TOLERANCE_NS || now.nanos_since(after) > TOLERANCE_NS);
        }
        assert!(apart * 10 < readings, "{apart} of {readings} readings");
    }

    proptest! {
        /// A clock that is slewed, and a counter that may jump.
        #[test]
        fn prop_the_time_never_goes_back_and_follows_the_clock(
            steps in prop::collection::vec((1..200_000u64, -600..600i64, prop::option::weighted(0.01, any::<u64>())), 1..400),
        ) {
            let mut machine = Machine::new(3_000_000_000);
            let mut latest = 0;
            for (nanos, ppm, jump) in steps {
                machine.pass(nanos);
                machine.nanos.set(machine.nanos.get().saturating_add_signed(nanos as i64 * ppm / 1_000_000));
                let now = machine.now();
                prop_assert!(now >= latest);
                latest = now;
                if let Some(jump) = jump {
                    machine.ticks.set(machine.ticks.get().wrapping_add(jump));
                } else {
                    let error = now.abs_diff(machine.nanos.get());
                    prop_assert!(error <= 4 * WINDOW_NS, "{} ns", error);
                }
            }
        }
    }
}
