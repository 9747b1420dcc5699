//! What the model knows of the path: filters of the bandwidth, of the round-trip time and of the aggregation of ACKs, and the
//! estimator of a full pipe.

use std::time::Duration;

use crate::{tcp::congestion::rate::Rate, time::Instant};

/// `BBR.MinRTTFilterLen`.
const MIN_RTT_WINDOW: Duration = Duration::from_secs(10);

/// `BBR.ProbeRTTInterval`.
const PROBE_RTT_INTERVAL: Duration = Duration::from_secs(5);

/// `BBR.ExtraAckedFilterLen`, in round trips.
const AGGREGATION_ROUNDS: u64 = 10;

/// Growth of the delivery rate in a round trip that shows that the pipe is not full, and the number of round trips without
/// it that show that it is (section 5.3.1.2).
const GROWTH: f64 = 1.25;
const ROUNDS_WITHOUT_GROWTH: u32 = 3;

/// `BBR.max_bw_filter`: the largest sample of this `ProbeBW` cycle and of the one before (section 5.5.5).
#[derive(Debug, Default)]
pub(super) struct MaxBandwidth {
    now: Rate,
    before: Rate,
}

impl MaxBandwidth {
    pub(super) fn get(&self) -> Rate {
        self.now.max(self.before)
    }

    pub(super) fn add(&mut self, sample: Rate) {
        self.now = self.now.max(sample);
    }

    /// Begins a cycle (section 5.5.6). A cycle without samples leaves the estimate as it is.
    pub(super) fn advance(&mut self) {
        if self.now > Rate::ZERO {
            (self.before, self.now) = (self.now, Rate::ZERO);
        }
    }
}

/// `BBR.min_rtt` and the schedule of `ProbeRTT` (section 5.3.4.3).
#[derive(Debug)]
pub(super) struct MinRtt {
    min: Option<Duration>,
    min_at: Instant,
    probe: Option<Duration>,
    probe_at: Instant,
    expired: bool,
}

impl MinRtt {
    pub(super) fn new() -> Self {
        Self { min: None, min_at: Instant::ZERO, probe: None, probe_at: Instant::ZERO, expired: false }
    }

    pub(super) fn get(&self) -> Option<Duration> {
        self.min
    }

    /// No smaller round-trip time was measured for so long that the queue has to be drained.
    pub(super) fn is_expired(&self) -> bool {
        self.expired
    }

    /// `BBRUpdateMinRTT`.
    pub(super) fn update(&mut self, now: Instant, rtt: Option<Duration>) {
        self.expired = self.probe.is_some() && now > self.probe_at + PROBE_RTT_INTERVAL;
        if let Some(rtt) = rtt
            && (self.expired || self.probe.is_none_or(|probe| rtt < probe))
        {
            (self.probe, self.probe_at) = (Some(rtt), now);
        }
        let old = now > self.min_at + MIN_RTT_WINDOW;
        if let Some(probe) = self.probe
            && (old || self.min.is_none_or(|min| probe < min))
        {
            (self.min, self.min_at) = (Some(probe), self.probe_at);
        }
    }

    /// `ProbeRTT` has ended: the next one is due an interval later.
    pub(super) fn probed(&mut self, now: Instant) {
        self.probe_at = now;
    }
}

/// `BBR.extra_acked`: how much more was acknowledged at once than the bandwidth explains (section 5.5.9).
#[derive(Debug)]
pub(super) struct Aggregation {
    began: Instant,
    delivered: u64,
    /// The largest excess of the current and of the previous half window, and the round trip in which the current one began.
    now: u64,
    before: u64,
    since: u64,
}

impl Aggregation {
    pub(super) fn new() -> Self {
        Self { began: Instant::ZERO, delivered: 0, now: 0, before: 0, since: 0 }
    }

    pub(super) fn get(&self) -> u64 {
        self.now.max(self.before)
    }

    /// Begins the interval anew: the connection was idle.
    pub(super) fn restart(&mut self, now: Instant) {
        self.began = now;
    }

    /// An ACK of `newly_acked` bytes arrived in round trip `round`, at a bandwidth of `bw`. Until the pipe was `full`, only the
    /// last round trip counts.
    pub(super) fn update(
        &mut self,
        now: Instant,
        newly_acked: u64,
        (bw, cwnd): (Rate, u64),
        (round, full): (u64, bool),
    ) {
        let mut expected = bw.bytes_in(now.since(self.began));
        if self.delivered <= expected {
            (self.delivered, self.began, expected) = (0, now, 0);
        }
        self.delivered += newly_acked;
        let extra = (self.delivered - expected.min(self.delivered)).min(cwnd);
        let half = if full { AGGREGATION_ROUNDS / 2 } else { 1 };
        if round >= self.since + half {
            (self.before, self.now, self.since) = (if full { self.now } else { 0 }, 0, round);
        }
        self.now = self.now.max(extra);
    }
}

/// Weight of a round trip in the estimate of the losses that are not ours.
const LOSS_WEIGHT: f64 = 1.0 / 8.0;

/// Losses above this share of a round trip are congestion whatever else is seen: a probe, at 1.25 times the bandwidth, could
/// not outweigh them.
const MAX_RANDOM_LOSS: f64 = 0.2;

/// Round-trip times that exceed the smallest one by less than this, or an eighth of it, show no queue.
const NO_QUEUE: Duration = Duration::from_millis(1);

/// The losses of a path that do not depend on what we send: their share in round trips without a queue, outside of probes
/// for bandwidth. The draft has no such estimate; without one, losses above its threshold reduce the rate without a limit.
#[derive(Debug, Default)]
pub(super) struct RandomLoss {
    share: f64,
    lost: u64,
    /// All bytes delivered when the round trip began.
    began: u64,
    /// The smallest round-trip time of the round trip.
    rtt: Option<Duration>,
    last: f64,
    queued: bool,
}

impl RandomLoss {
    /// The estimate, as a share of all bytes.
    pub(super) fn share(&self) -> f64 {
        self.share
    }

    /// Whether the losses of the last round trip come from a full queue, for all that is known.
    pub(super) fn is_congestion(&self) -> bool {
        self.queued || self.last > MAX_RANDOM_LOSS
    }

    pub(super) fn lost(&mut self, bytes: u64) {
        self.lost += bytes;
    }

    pub(super) fn measured(&mut self, rtt: Option<Duration>) {
        self.rtt = self.rtt.into_iter().chain(rtt).min();
    }

    /// A round trip ends with `delivered` bytes delivered in all. It was one of a probe if `probes`.
    pub(super) fn round(&mut self, delivered: u64, min_rtt: Option<Duration>, probes: bool) {
        let lost = std::mem::take(&mut self.lost);
        let all = lost + (delivered - self.began);
        self.began = delivered;
        self.last = if all > 0 { lost as f64 / all as f64 } else { 0.0 };
        self.queued = match (self.rtt.take(), min_rtt) {
            (Some(rtt), Some(min)) => rtt > min + NO_QUEUE.max(min / 8),
            _ => false,
        };
        if !probes && !self.is_congestion() {
            self.share += (self.last - self.share) * LOSS_WEIGHT;
        }
    }
}

/// The estimator of a full pipe (section 5.3.1.2).
#[derive(Debug, Default)]
pub(super) struct FullPipe {
    baseline: Rate,
    rounds: u32,
    full: bool,
}

impl FullPipe {
    /// Looks again, from `baseline` on.
    pub(super) fn restart(&mut self, baseline: Rate) {
        *self = Self { baseline, ..Self::default() };
    }

    /// `BBR.full_bw_now`.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// A round trip has ended in which the application did not limit the rate.
    pub(super) fn round(&mut self, rate: Rate) {
        if self.full {
            return;
        }
        if rate >= self.baseline.times(GROWTH) {
            return self.restart(rate);
        }
        self.rounds += 1;
        self.full = self.rounds >= ROUNDS_WITHOUT_GROWTH;
    }
}
