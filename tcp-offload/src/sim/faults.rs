//! What a direction of the wire does to frames: seeded, so that the same seed gives the same trace.

use std::time::Duration;

use rand::{Rng, RngCore, SeedableRng, rngs::SmallRng};

use crate::time::Instant;

/// Bursty loss after Gilbert: a good and a bad state, and the chances to change between them per frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gilbert {
    /// Chance to enter the bad state, per frame.
    pub enter: f64,
    /// Chance to leave it, per frame.
    pub leave: f64,
    /// Chance to lose a frame while in it.
    pub loss: f64,
}

/// The faults of one direction. All chances are per frame, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Faults {
    /// Independent loss.
    pub loss: f64,
    /// Bursty loss, on top.
    pub bursts: Option<Gilbert>,
    /// A second copy arrives.
    pub duplicate: f64,
    /// The frame is held back for up to `reorder_by`, so later ones overtake it.
    pub reorder: f64,
    /// Longest time that a reordered frame is held back.
    pub reorder_by: Duration,
    /// One bit flips somewhere behind the Ethernet header.
    pub corrupt: f64,
    /// Of the corrupted frames, how many have their TCP checksum repaired by the network, so that only
    /// MPA's CRC can notice.
    pub repair_checksum: f64,
    /// Propagation delay.
    pub delay: Duration,
    /// Additional random delay (order is kept).
    pub jitter: Duration,
    /// Line rate in bytes per second; `None` is infinitely fast.
    pub rate_bytes: Option<u64>,
    /// Frames that may wait for the line; more are dropped at the tail.
    pub queue_frames: usize,
    /// Nothing passes in this time span.
    pub blackout: Option<(Instant, Instant)>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            loss: 0.0,
            bursts: None,
            duplicate: 0.0,
            reorder: 0.0,
            reorder_by: Duration::ZERO,
            corrupt: 0.0,
            repair_checksum: 0.0,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate_bytes: None,
            queue_frames: usize::MAX,
            blackout: None,
        }
    }
}

/// The state of one direction: where its random numbers and its line stand.
#[derive(Debug)]
pub(super) struct Direction {
    pub(super) faults: Faults,
    rng: SmallRng,
    in_burst: bool,
    /// When the line has sent all that was given to it.
    line_free: Instant,
    /// Latest delivery of an in-order frame: jitter alone never reorders.
    last_due: Instant,
}

/// One arrival of a frame: when, and with which bit flipped (a number to reduce modulo the bits there are).
pub(super) struct Fate {
    pub(super) due: Instant,
    pub(super) flip: Option<(u64, bool)>,
}

impl Direction {
    pub(super) fn new(faults: Faults, seed: u64) -> Self {
        Self {
            faults,
            rng: SmallRng::seed_from_u64(seed),
            in_burst: false,
            line_free: Instant::ZERO,
            last_due: Instant::ZERO,
        }
    }

    fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.rng.random::<f64>() < p
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        let ns = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        if ns == 0 { Duration::ZERO } else { Duration::from_nanos(self.rng.random_range(0..=ns)) }
    }

    /// Decides what becomes of a frame of `len` bytes sent at `now`, while `waiting` frames are under
    /// way: no, one or two arrivals.
    pub(super) fn decide(&mut self, now: Instant, len: usize, waiting: usize) -> Vec<Fate> {
        let faults = self.faults;
        if let Some(bursts) = faults.bursts {
            let flip = if self.in_burst { bursts.leave } else { bursts.enter };
            self.in_burst ^= self.chance(flip);
        }
        let burst_loss = faults.bursts.filter(|_| self.in_burst).map_or(0.0, |b| b.loss);
        let dark = faults.blackout.is_some_and(|(from, to)| from <= now && now < to);
        // Both dice are thrown always: the trace must not depend on what the first one showed.
        let lost = [self.chance(faults.loss), self.chance(burst_loss), waiting >= faults.queue_frames, dark];
        if lost.contains(&true) {
            return Vec::new();
        }
        let copies = 1 + usize::from(self.chance(faults.duplicate));
        (0..copies).map(|_| self.arrival(now, len)).collect()
    }

    fn arrival(&mut self, now: Instant, len: usize) -> Fate {
        let faults = self.faults;
        let mut sent = now;
        if let Some(rate) = faults.rate_bytes {
            let ns = (len as u64).saturating_mul(1_000_000_000) / rate.max(1);
            self.line_free = self.line_free.max(now) + Duration::from_nanos(ns);
            sent = self.line_free;
        }
        let due = (sent + faults.delay + self.up_to(faults.jitter)).max(self.last_due);
        self.last_due = due;
        let late = if self.chance(faults.reorder) { self.up_to(faults.reorder_by) } else { Duration::ZERO };
        let flip =
            self.chance(faults.corrupt).then(|| (self.rng.next_u64(), self.chance(faults.repair_checksum)));
        Fate { due: due + late, flip }
    }
}
