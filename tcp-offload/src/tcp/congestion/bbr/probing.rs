//! The state of probing for bandwidth, which [`super::probe`] changes.

use std::time::Duration;

use crate::time::Instant;

/// `BBR.ack_phase`: what the ACKs that arrive now say about the last probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AckPhase {
    Init,
    Refilling,
    Starting,
    Feedback,
    Stopping,
}

/// The state of probing for bandwidth.
#[derive(Debug)]
pub(super) struct Probing {
    pub(super) ack_phase: AckPhase,
    /// `BBR.is_bw_probe_sample`: the ACKs cover data sent by a probe that has not gone too high yet.
    pub(super) is_sample: bool,
    pub(super) up_acked: u64,
    pub(super) acked_per_increase: u64,
    pub(super) up_rounds: u32,
    /// `BBR.prev_probe_too_high` and `BBR.prev_probe_precautionary`.
    pub(super) too_high: bool,
    pub(super) precautionary: bool,
    pub(super) wait: Duration,
    pub(super) cycle_at: Instant,
    /// State of the generator of random waits.
    random: u64,
}

impl Probing {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            ack_phase: AckPhase::Init,
            is_sample: false,
            up_acked: 0,
            acked_per_increase: u64::MAX,
            up_rounds: 0,
            too_high: false,
            precautionary: false,
            wait: Duration::ZERO,
            cycle_at: Instant::ZERO,
            random: seed,
        }
    }

    /// The next random number (SplitMix64): flows that share a path probe at different times.
    pub(super) fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}
