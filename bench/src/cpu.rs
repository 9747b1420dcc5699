//! The machine of a result: CPU pinning, CPU time, memory, and the distance of two cores.
//!
//! On a virtual machine the host can move the virtual CPUs at any time, which changes the cost of
//! communication between two cores by a factor of three without notice. A two-core result is therefore
//! comparable only with results of the same [`Distance`].

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::{
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};

use crate::stats::Spread;

/// Pins the calling thread, and the threads that it will start, to one CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    anyhow::ensure!(cpu < CpuSet::MAX_CPU, "there is no CPU {cpu}");
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("cannot pin to CPU {cpu}"))
}

/// The CPUs this process may use, in order.
pub fn allowed() -> Vec<usize> {
    sched_getaffinity(None)
        .map(|set| (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
        .unwrap_or_default()
}

/// CPU time of all threads of this process, in user code and in the kernel on its behalf (including packet
/// processing in softirqs that interrupt it).
pub fn process_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Whether this process has a real-time scheduling policy, so that other load delays it less.
pub fn is_realtime() -> bool {
    // The name in parentheses can contain spaces; the fields behind it are counted from 3 (proc_pid_stat(5)).
    const POLICY: usize = 41;
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let policy = text.rsplit_once(") ").and_then(|(_, rest)| rest.split_whitespace().nth(POLICY - 3));
    // SCHED_FIFO and SCHED_RR (sched(7)).
    matches!(policy, Some("1" | "2"))
}

/// Bytes of memory of this process that are present in RAM.
pub fn resident_bytes() -> Option<u64> {
    // Pages: total, resident, shared, ... (proc_pid_statm(5)).
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// The cost of a system call that does nothing, in nanoseconds: the median of a few blocks.
pub fn system_call_ns() -> Option<f64> {
    const CALLS: u32 = 2000;
    let blocks: Vec<f64> = (0..15)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..CALLS {
                std::hint::black_box(rustix::process::getppid());
            }
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        })
        .collect();
    Spread::of(&blocks).map(|spread| spread.median)
}

/// Time for a cache line to travel to another core and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distance {
    /// Less than [`NEAR_LIMIT_NS`] nanoseconds: the cores share caches, or are one core.
    Near(u32),
    /// At least [`NEAR_LIMIT_NS`] nanoseconds.
    Far(u32),
    /// There is only one CPU, or the measurement failed.
    Unknown,
}

/// Round-trip limit between near and far cores, in nanoseconds. Virtual machines show two regimes, of about
/// 110 ns and about 400 ns.
pub const NEAR_LIMIT_NS: u32 = 220;

/// Time after which an unfinished measurement is given up, because a core may be busy for long.
const GIVE_UP: Duration = Duration::from_millis(500);

impl Distance {
    /// Classifies a round-trip time in nanoseconds.
    pub fn from_ns(ns: u32) -> Self {
        if ns < NEAR_LIMIT_NS { Self::Near(ns) } else { Self::Far(ns) }
    }

    /// One letter for a table: N, F or `?`.
    pub fn tag(self) -> char {
        match self {
            Self::Near(_) => 'N',
            Self::Far(_) => 'F',
            Self::Unknown => '?',
        }
    }

    /// Whether results measured at the two distances can be compared.
    pub fn comparable(self, other: Self) -> bool {
        self.tag() == other.tag()
    }

    /// Measures the distance with two threads pinned to `a` and `b` that bounce one cache line, for about 2
    /// ms.
    pub fn measure(a: usize, b: usize) -> Self {
        if a == b {
            return Self::Unknown;
        }
        let line = Line { turn: AtomicU32::new(0), stop: AtomicBool::new(false) };
        let start = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                let pinned = pin(b).is_ok();
                start.wait();
                if pinned {
                    line.answer();
                }
            });
            let asker = scope.spawn(|| {
                let pinned = pin(a).is_ok();
                start.wait();
                let rounds = if pinned { line.ask() } else { None };
                line.stop.store(true, Ordering::Release);
                rounds
            });
            match asker.join() {
                Ok(Some(ns)) => Self::from_ns(ns),
                _ => Self::Unknown,
            }
        })
    }
}

/// One cache line that two threads hand to each other: on even numbers it is the asking thread's turn.
#[repr(align(128))]
struct Line {
    turn: AtomicU32,
    stop: AtomicBool,
}

/// Round trips in a block, and number of blocks. The fastest block gives the distance; the others were
/// interrupted.
const ROUNDS: u32 = 400;
const BLOCKS: u32 = 12;

impl Line {
    fn answer(&self) {
        let mut expected = 1;
        while !self.stop.load(Ordering::Acquire) {
            if self.turn.load(Ordering::Acquire) == expected {
                self.turn.store(expected + 1, Ordering::Release);
                expected += 2;
            }
        }
    }

    /// Nanoseconds of a round trip in the fastest block.
    fn ask(&self) -> Option<u32> {
        let begin = Instant::now();
        let mut best = None;
        for block in 0..BLOCKS {
            let start = Instant::now();
            for round in 0..ROUNDS {
                let mine = 2 * (block * ROUNDS + round) + 1;
                self.turn.store(mine, Ordering::Release);
                let mut spins = 0_u32;
                while self.turn.load(Ordering::Acquire) != mine + 1 {
                    spins += 1;
                    if spins.is_multiple_of(100_000) && begin.elapsed() > GIVE_UP {
                        return best;
                    }
                }
            }
            let ns = (start.elapsed().as_nanos() / u128::from(ROUNDS)) as u32;
            best = Some(best.map_or(ns, |b: u32| b.min(ns)));
        }
        best
    }
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Near(ns) => write!(f, "near ({ns} ns)"),
            Self::Far(ns) => write!(f, "far ({ns} ns)"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_separates_near_and_far() {
        assert_eq!(Distance::from_ns(110).tag(), 'N');
        assert_eq!(Distance::from_ns(400).tag(), 'F');
        assert!(Distance::Near(100).comparable(Distance::Near(120)));
        assert!(!Distance::Near(100).comparable(Distance::Far(400)));
    }

    #[test]
    fn a_measured_distance_is_plausible() {
        let cpus = allowed();
        assert!(!cpus.is_empty());
        assert_eq!(Distance::measure(cpus[0], cpus[0]), Distance::Unknown);
        if let &[a, b, ..] = cpus.as_slice() {
            match Distance::measure(a, b) {
                Distance::Near(ns) | Distance::Far(ns) => assert!((10..1_000_000).contains(&ns), "{ns}"),
                Distance::Unknown => {}
            }
        }
    }

    #[test]
    fn spinning_uses_cpu_time() {
        let before = process_time();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {}
        assert!(process_time() > before);
    }
}
