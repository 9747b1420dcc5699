//! The cycle of `ProbeBW` (section 5.3.3): drain, cruise, refill the pipe, and probe for more bandwidth; and what a probe
//! that went too high teaches (section 5.5.10).

use std::time::Duration;

use super::{BETA, Bbr, LOSS_THRESHOLD, ModelSample, State, UNLIMITED, probing::AckPhase};
use crate::tcp::congestion::{Window, rate::Lost};

/// `BBR.Headroom`: the share of the long-term limit that is left to others.
const HEADROOM: f64 = 0.15;

/// Longest wait between two probes, in round trips: a flow of Reno would probe at least as often on a short path (section
/// 5.3.3.8.3).
const MAX_RENO_ROUNDS: u64 = 63;

/// Most doublings of the growth of the long-term limit in one probe.
const MAX_UP_ROUNDS: u32 = 30;

impl Bbr {
    // ----- states -----

    /// `BBRStartProbeBW_DOWN`.
    pub(super) fn start_down(&mut self) {
        self.reset_congestion_signals();
        self.probing.acked_per_increase = UNLIMITED;
        // `BBRPickProbeWait`: 2 to 3 s, and up to one round trip earlier.
        let random = self.probing.random();
        self.rounds.since_probe = random & 1;
        self.probing.wait = Duration::from_secs(2) + Duration::from_micros((random >> 1) % 1_000_000);
        self.probing.cycle_at = self.now;
        self.probing.ack_phase = AckPhase::Stopping;
        self.rounds.begin(self.delivered);
        self.state = State::Down;
    }

    /// `BBRStartProbeBW_REFILL`.
    pub(super) fn start_refill(&mut self) {
        self.reset_short_term();
        self.probing.up_rounds = 0;
        self.probing.up_acked = 0;
        self.probing.precautionary = false;
        self.probing.ack_phase = AckPhase::Refilling;
        self.rounds.begin(self.delivered);
        self.state = State::Refill;
    }

    /// `BBRStartProbeBW_UP`.
    fn start_up(&mut self, window: &Window, sample: &ModelSample) {
        self.probing.ack_phase = AckPhase::Starting;
        self.rounds.begin(self.delivered);
        self.full.restart(sample.rate.rate.unwrap_or_default());
        self.state = State::Up;
        self.raise_slope(window);
    }

    fn is_in_cycle(&self) -> bool {
        matches!(self.state, State::Down | State::Cruise | State::Refill | State::Up)
    }

    // ----- transitions -----

    /// `BBRUpdateProbeBWCyclePhase`.
    pub(super) fn update_cycle(&mut self, window: &Window, sample: &ModelSample) {
        if !self.reached || self.adapt_long_term(window, sample) {
            return;
        }
        let state = self.state;
        match state {
            State::Down | State::Cruise if self.is_time_to_probe(window) => self.start_refill(),
            State::Down if self.is_time_to_cruise(window, sample) => self.state = State::Cruise,
            State::Refill if self.rounds.start => {
                self.probing.is_sample = true;
                self.start_up(window, sample);
            }
            State::Up if self.is_time_to_go_down(window, sample) => {
                self.probing.too_high = false;
                self.start_down();
            }
            _ => {}
        }
    }

    /// `BBRIsTimeToProbeBW`.
    fn is_time_to_probe(&self, window: &Window) -> bool {
        let reno_rounds = self.target_inflight(window) / window.smss.max(1);
        self.now > self.probing.cycle_at + self.probing.wait
            || self.rounds.since_probe >= reno_rounds.min(MAX_RENO_ROUNDS)
    }

    /// `BBRIsTimeToCruise`.
    fn is_time_to_cruise(&self, window: &Window, sample: &ModelSample) -> bool {
        sample.in_flight <= self.inflight_with_headroom(window)
            && sample.in_flight <= self.inflight_at(window, self.max_bw.get())
    }

    /// `BBRIsTimeToGoDown`.
    fn is_time_to_go_down(&mut self, window: &Window, sample: &ModelSample) -> bool {
        if self.probing.too_high && sample.in_flight >= self.long_inflight {
            self.probing.precautionary = true;
            return true;
        }
        if sample.cwnd_limited && window.cwnd >= self.long_inflight {
            self.full.restart(sample.rate.rate.unwrap_or_default());
            return false;
        }
        self.full.is_full()
    }

    /// `BBRTargetInflight`.
    fn target_inflight(&self, window: &Window) -> u64 {
        self.bdp(self.bw).map_or(window.cwnd, |bdp| bdp.min(window.cwnd))
    }

    /// `BBRInflightWithHeadroom`.
    pub(super) fn inflight_with_headroom(&self, window: &Window) -> u64 {
        if self.long_inflight == UNLIMITED {
            return UNLIMITED;
        }
        let headroom = ((self.long_inflight as f64 * HEADROOM) as u64).max(window.smss);
        self.long_inflight.saturating_sub(headroom).max(super::MIN_PIPE_SEGMENTS * window.smss)
    }

    // ----- the long-term model -----

    /// `BBRAdaptLongTermModel`. Returns whether it has decided on a transition.
    fn adapt_long_term(&mut self, window: &Window, sample: &ModelSample) -> bool {
        if self.rounds.start {
            match self.probing.ack_phase {
                AckPhase::Starting => self.probing.ack_phase = AckPhase::Feedback,
                AckPhase::Stopping => {
                    self.probing.is_sample = false;
                    self.probing.ack_phase = AckPhase::Init;
                    if self.is_in_cycle() && !sample.rate.app_limited {
                        self.max_bw.advance();
                    }
                    if self.is_in_cycle() && self.probing.precautionary && !self.probing.too_high {
                        self.start_refill();
                        return true;
                    }
                }
                AckPhase::Init | AckPhase::Refilling | AckPhase::Feedback => {}
            }
        }
        if self.long_inflight != UNLIMITED && !self.is_inflight_too_high(sample) {
            self.long_inflight = self.long_inflight.max(sample.rate.tx_in_flight);
            if self.state == State::Up {
                self.raise_long_term(window, sample);
            }
        }
        false
    }

    /// `BBRRaiseInflightLongtermSlope`.
    fn raise_slope(&mut self, window: &Window) {
        let growth = 1 << self.probing.up_rounds;
        self.probing.up_rounds = (self.probing.up_rounds + 1).min(MAX_UP_ROUNDS);
        self.probing.acked_per_increase = (window.cwnd / growth).max(window.smss);
    }

    /// `BBRProbeInflightLongtermUpward`.
    fn raise_long_term(&mut self, window: &Window, sample: &ModelSample) {
        if !sample.cwnd_limited || window.cwnd < self.long_inflight {
            return;
        }
        self.probing.up_acked += sample.rate.newly_acked;
        let increases = self.probing.up_acked / self.probing.acked_per_increase.max(1);
        self.probing.up_acked -= increases * self.probing.acked_per_increase;
        self.long_inflight = self.long_inflight.saturating_add(increases * window.smss);
        if self.rounds.start {
            self.raise_slope(window);
        }
    }

    /// `BBRIsInflightTooHigh`.
    pub(super) fn is_inflight_too_high(&self, sample: &ModelSample) -> bool {
        self.is_too_high(sample.rate.lost, sample.rate.tx_in_flight, sample.sack)
    }

    fn is_too_high(&self, lost: u64, tx_in_flight: u64, sack: bool) -> bool {
        lost as f64 > tx_in_flight as f64 * self.loss_threshold() || lost > 0 && !sack
    }

    /// The loss rate that a probe for bandwidth tolerates: `BBR.LossThresh` above the losses that the path has anyway, of
    /// which a round trip may have twice as many by chance.
    fn loss_threshold(&self) -> f64 {
        LOSS_THRESHOLD + 2.0 * self.random_loss.share()
    }

    /// The rest of `BBRHandleLostPacket`: the loss of a segment that a probe has sent.
    pub(super) fn too_high_by_loss(&mut self, window: &Window, lost: &Lost, sack: bool) {
        if !self.probing.is_sample || !self.is_too_high(lost.since_sent, lost.tx_in_flight, sack) {
            return;
        }
        self.too_high(window, inflight_at_loss(lost, self.loss_threshold()), lost.app_limited);
    }

    /// A probe was answered with marks: what is in flight now is too much.
    pub(super) fn too_high_by_marks(&mut self, window: &Window) {
        if self.probing.is_sample {
            self.too_high(window, self.inflight, false);
        }
    }

    /// `BBRHandleInflightTooHigh`.
    fn too_high(&mut self, window: &Window, inflight: u64, app_limited: bool) {
        self.probing.too_high = true;
        self.probing.is_sample = false;
        if !app_limited {
            let least = (self.target_inflight(window) as f64 * BETA) as u64;
            self.long_inflight = inflight.max(least);
        }
        if self.state == State::Up {
            self.saved.left = Some(State::Up);
            self.start_down();
        }
    }
}

/// `BBRInflightAtLoss`: how much was in flight when the losses exceeded the threshold.
fn inflight_at_loss(lost: &Lost, threshold: f64) -> u64 {
    let size = lost.end - lost.start;
    let before = lost.tx_in_flight.saturating_sub(size) as f64;
    let lost_before = lost.since_sent.saturating_sub(size) as f64;
    let prefix = (threshold * before - lost_before) / (1.0 - threshold);
    (before + prefix).max(0.0) as u64
}
