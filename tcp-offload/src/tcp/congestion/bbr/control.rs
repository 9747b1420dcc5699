//! The control parameters: pacing rate, quantum and window (section 5.6).

use std::time::Duration;

use super::{Bbr, MIN_PIPE_SEGMENTS, ModelSample, State, UNLIMITED};
use crate::tcp::congestion::{Window, rate::Rate};

/// `BBR.StartupPacingGain`: 4 ln 2.
pub(super) const STARTUP_PACING_GAIN: f64 = 2.77;

/// `BBR.PacingMarginPercent`: the flow is paced at 1 % below the bandwidth.
const PACING_MARGIN: f64 = 0.99;

/// `BBR.ProbeRTTCwndGain`.
const PROBE_RTT_CWND_GAIN: f64 = 0.5;

/// Largest quantum, in bytes (section 5.6.3).
const MAX_QUANTUM: u64 = 64 << 10;

/// Quanta in flight that hide the delays of batches at both ends (section 5.5.8).
const OFFLOAD_QUANTA: u64 = 3;

impl Bbr {
    /// The pacing gain of the state (section 5.6.1).
    pub(super) fn pacing_gain(&self) -> f64 {
        match self.state {
            State::Startup => STARTUP_PACING_GAIN,
            State::Drain => 0.5,
            State::Down => 0.9,
            State::Cruise | State::Refill | State::ProbeRtt => 1.0,
            State::Up => 1.25,
        }
    }

    /// The window gain of the state.
    fn cwnd_gain(&self) -> f64 {
        match self.state {
            State::Startup | State::Drain | State::Down | State::Cruise | State::Refill => 2.0,
            State::Up => 2.25,
            State::ProbeRtt => PROBE_RTT_CWND_GAIN,
        }
    }

    /// `BBRSetPacingRateWithGain`.
    pub(super) fn set_pacing_rate(&mut self, gain: f64) {
        let rate = self.bw.times(gain * PACING_MARGIN);
        if rate > Rate::ZERO && (self.reached || rate > self.pacing_rate) {
            self.pacing_rate = rate;
        }
    }

    /// `BBRSetSendQuantum`.
    pub(super) fn set_quantum(&mut self, window: &Window) {
        let bytes = self.pacing_rate.bytes_in(Duration::from_millis(1));
        self.quantum = bytes.min(MAX_QUANTUM).max(2 * window.smss);
    }

    /// `BBR.bdp` at the bandwidth `bw`, once the round-trip time is known.
    pub(super) fn bdp(&self, bw: Rate) -> Option<u64> {
        self.min_rtt.get().map(|rtt| bw.bytes_in(rtt))
    }

    /// `BBRQuantizationBudget`.
    fn quantized(&self, window: &Window, inflight: u64) -> u64 {
        let least = (OFFLOAD_QUANTA * self.quantum).max(MIN_PIPE_SEGMENTS * window.smss);
        let more = if self.state == State::Up { 2 * window.smss } else { 0 };
        inflight.max(least).saturating_add(more)
    }

    /// `BBRInflight` with a gain of 1 at the bandwidth `bw`.
    pub(super) fn inflight_at(&self, window: &Window, bw: Rate) -> u64 {
        self.quantized(window, self.bdp(bw).unwrap_or(window.cwnd))
    }

    /// `BBRUpdateMaxInflight`.
    fn max_inflight(&self, window: &Window, initial_window: u64) -> u64 {
        let bdp = self.bdp(self.bw.times(self.cwnd_gain())).unwrap_or(initial_window);
        self.quantized(window, bdp.saturating_add(self.extra.get()))
    }

    /// `BBRProbeRTTCwnd`.
    pub(super) fn probe_rtt_cwnd(&self, window: &Window) -> u64 {
        let bdp = self.bdp(self.bw.times(PROBE_RTT_CWND_GAIN)).unwrap_or(0);
        bdp.max(MIN_PIPE_SEGMENTS * window.smss)
    }

    /// `BBRSetCwnd` (section 5.6.4.6).
    pub(super) fn set_cwnd(&self, window: &mut Window, sample: &ModelSample) {
        let least = MIN_PIPE_SEGMENTS * window.smss;
        let max = self.max_inflight(window, sample.initial_window);
        let grown = window.cwnd.saturating_add(sample.rate.newly_acked);
        if self.reached {
            window.cwnd = grown.min(max);
        } else if window.cwnd < max || sample.rate.total_delivered < sample.initial_window {
            window.cwnd = grown;
        }
        window.cwnd = window.cwnd.max(least);
        if self.state == State::ProbeRtt {
            window.cwnd = window.cwnd.min(self.probe_rtt_cwnd(window));
        }
        window.cwnd = window.cwnd.min(self.cap(window).max(least));
    }

    /// The bounds of `BBRBoundCwndForModel`.
    fn cap(&self, window: &Window) -> u64 {
        let long = match self.state {
            State::Down | State::Refill | State::Up => self.long_inflight,
            State::Cruise | State::ProbeRtt => self.inflight_with_headroom(window),
            State::Startup | State::Drain => UNLIMITED,
        };
        long.min(self.short_inflight)
    }
}
