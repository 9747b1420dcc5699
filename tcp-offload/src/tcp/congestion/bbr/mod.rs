//! BBR, version 3 (draft-ietf-ccwg-bbr-06): a model of the path, made of the largest delivery rate and the smallest round-trip
//! time of late, determines the pacing rate and the window. Random loss below a threshold does not slow it down.
//!
//! The draft's names are used for the states; sections in comments are the draft's.
//! `docs/decisions/0030-a-controller-that-tolerates-loss.md` lists what is left out or done differently.

mod control;
mod path;
mod probe;
mod probing;

use std::time::Duration;

use self::{
    path::{Aggregation, FullPipe, MaxBandwidth, MinRtt, RandomLoss},
    probing::{AckPhase, Probing},
};
use super::{
    Acked, Congestion, CongestionControl, ModelSample, Window,
    pacer::Pacing,
    rate::{Lost, Rate},
};
use crate::time::Instant;

/// `BBR.LossThresh`: the loss rate of a round trip that a probe for bandwidth tolerates.
const LOSS_THRESHOLD: f64 = 0.02;

/// `BBR.Beta`: the largest decrease in a round trip with losses.
const BETA: f64 = 0.7;

/// `BBRStartupFullLossCnt`: separate ranges lost in a round trip that end `Startup`.
const STARTUP_LOST_RANGES: u32 = 6;

/// `BBR.ProbeRTTDuration`.
const PROBE_RTT_DURATION: Duration = Duration::from_millis(200);

/// `BBR.MinPipeCwnd`, in segments.
const MIN_PIPE_SEGMENTS: u64 = 4;

/// Round trips after which `Drain` ends even if the queue is not empty (section 5.3.2).
const MAX_DRAIN_ROUNDS: u64 = 3;

/// No limit, of a volume in bytes.
const UNLIMITED: u64 = u64::MAX;

/// `BBR.state` (section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Startup,
    Drain,
    Down,
    Cruise,
    Refill,
    Up,
    ProbeRtt,
}

/// Packet-timed round trips (section 5.5.1).
#[derive(Debug, Default)]
struct Rounds {
    count: u64,
    /// This ACK begins one.
    start: bool,
    next_delivered: u64,
    /// `BBR.rounds_since_probe_up`.
    since_probe: u64,
}

impl Rounds {
    fn begin(&mut self, total_delivered: u64) {
        self.next_delivered = total_delivered;
    }

    fn update(&mut self, prior_delivered: u64, total_delivered: u64) {
        self.start = prior_delivered >= self.next_delivered;
        if self.start {
            self.begin(total_delivered);
            self.count += 1;
            self.since_probe += 1;
        }
    }
}

/// What was delivered in a round trip, and whether some of it was lost or marked (section 5.5.10).
#[derive(Debug, Default)]
struct Latest {
    rate: Rate,
    delivered: u64,
    /// End of the round trip, in bytes delivered, and whether this ACK is its last one.
    end: u64,
    ended: bool,
    congested: bool,
    /// Separate ranges lost, and the end of the last one.
    ranges: u32,
    range_end: u64,
}

/// The state to restore when losses turn out spurious (section 5.5.11).
#[derive(Debug, Clone, Copy)]
struct Saved {
    cwnd: u64,
    short_rate: Rate,
    short_inflight: u64,
    long_inflight: u64,
    /// The state that the losses ended.
    left: Option<State>,
}

/// The model, the state machine and the control parameters of one connection.
#[derive(Debug)]
pub(crate) struct Bbr {
    state: State,
    rounds: Rounds,
    latest: Latest,
    full: FullPipe,
    /// `BBR.full_bw_reached`: the pipe was full once.
    reached: bool,
    max_bw: MaxBandwidth,
    min_rtt: MinRtt,
    extra: Aggregation,
    random_loss: RandomLoss,
    /// `BBR.bw`.
    bw: Rate,
    /// `BBR.bw_shortterm`, `BBR.inflight_shortterm` and `BBR.inflight_longterm`.
    short_rate: Rate,
    short_inflight: u64,
    long_inflight: u64,
    probing: Probing,
    drain_round: u64,
    /// When the window of `ProbeRTT` has been in force long enough, and whether it was for a round trip.
    probe_rtt_done_at: Option<Instant>,
    probe_rtt_round_done: bool,
    idle_restart: bool,
    saved: Saved,
    /// Losses were reported and not all of them repaired: [`Self::saved`] is from before.
    recovering: bool,
    /// `BBR.prior_cwnd`, for `ProbeRTT`.
    prior_cwnd: u64,
    /// The time, all bytes delivered, and those in flight when the connection last reported something.
    now: Instant,
    delivered: u64,
    inflight: u64,
    pacing_rate: Rate,
    quantum: u64,
}

impl Bbr {
    /// `BBROnInit` (section 5.2.1). `seed` decides when bandwidth is probed for.
    pub(crate) fn new(seed: u64) -> Self {
        let saved = Saved {
            cwnd: 0,
            short_rate: Rate::INFINITE,
            short_inflight: UNLIMITED,
            long_inflight: UNLIMITED,
            left: None,
        };
        Self {
            state: State::Startup,
            rounds: Rounds::default(),
            latest: Latest::default(),
            full: FullPipe::default(),
            reached: false,
            max_bw: MaxBandwidth::default(),
            min_rtt: MinRtt::new(),
            extra: Aggregation::new(),
            random_loss: RandomLoss::default(),
            bw: Rate::ZERO,
            short_rate: Rate::INFINITE,
            short_inflight: UNLIMITED,
            long_inflight: UNLIMITED,
            probing: Probing::new(seed),
            drain_round: 0,
            probe_rtt_done_at: None,
            probe_rtt_round_done: false,
            idle_restart: false,
            saved,
            recovering: false,
            prior_cwnd: 0,
            now: Instant::ZERO,
            delivered: 0,
            inflight: 0,
            pacing_rate: Rate::INFINITE,
            quantum: UNLIMITED,
        }
    }

    // ----- the end of a round trip and of a phase -----

    /// `BBRUpdateLatestDeliverySignals` and `BBRUpdateMaxBw`.
    fn update_latest(&mut self, sample: &ModelSample) {
        let rs = &sample.rate;
        let rate = rs.rate.unwrap_or_default();
        (self.now, self.delivered, self.inflight) = (sample.now, rs.total_delivered, sample.in_flight);
        self.latest.rate = self.latest.rate.max(rate);
        self.latest.delivered = self.latest.delivered.max(rs.delivered);
        self.latest.ended = rs.prior_delivered >= self.latest.end;
        if self.latest.ended {
            self.latest.end = rs.total_delivered;
        }
        self.rounds.update(rs.prior_delivered, rs.total_delivered);
        self.random_loss.measured(sample.rtt);
        if self.rounds.start {
            let probes = self.state == State::Up;
            self.random_loss.round(rs.total_delivered, self.min_rtt.get(), probes);
        }
        if rate > Rate::ZERO && (rate >= self.max_bw.get() || !rs.app_limited) {
            self.max_bw.add(rate);
        }
    }

    /// `BBRUpdateCongestionSignals`: once a round trip, the short-term model follows what is still delivered, if there were
    /// losses or marks while the flow did not probe for bandwidth.
    fn update_short_term(&mut self, window: &Window) {
        if !self.latest.ended {
            return;
        }
        let probes = matches!(self.state, State::Startup | State::Refill | State::Up);
        if self.latest.congested && !probes {
            let rate = if self.short_rate == Rate::INFINITE { self.max_bw.get() } else { self.short_rate };
            let inflight = if self.short_inflight == UNLIMITED { window.cwnd } else { self.short_inflight };
            // What would have been delivered if the path lost nothing by itself.
            let whole = 1.0 / (1.0 - self.random_loss.share());
            let delivered = (self.latest.delivered as f64 * whole) as u64;
            self.short_rate = self.latest.rate.times(whole).max(rate.times(BETA));
            self.short_inflight = delivered.max((inflight as f64 * BETA) as u64);
        }
        self.latest.congested = false;
    }

    /// `BBRAdvanceLatestDeliverySignals`.
    fn advance_latest(&mut self, sample: &ModelSample) {
        if self.latest.ended {
            self.latest.rate = sample.rate.rate.unwrap_or_default();
            self.latest.delivered = sample.rate.delivered;
            self.latest.ranges = 0;
        }
    }

    fn reset_congestion_signals(&mut self) {
        self.latest.congested = false;
        (self.latest.rate, self.latest.delivered) = (Rate::ZERO, 0);
    }

    fn reset_short_term(&mut self) {
        (self.short_rate, self.short_inflight) = (Rate::INFINITE, UNLIMITED);
    }

    /// `BBRCheckFullBWReached`.
    fn check_full_pipe(&mut self, sample: &ModelSample) {
        if let Some(rate) = sample.rate.rate.filter(|_| self.rounds.start && !sample.rate.app_limited)
            && !self.full.is_full()
        {
            self.full.round(rate);
            self.reached |= self.full.is_full();
        }
    }

    // ----- Startup and Drain (sections 5.3.1 and 5.3.2) -----

    fn check_startup(&mut self, sample: &ModelSample) {
        if self.state != State::Startup {
            return;
        }
        let lossy = self.latest.ended && sample.recovering && self.is_inflight_too_high(sample);
        let many = self.latest.ranges >= STARTUP_LOST_RANGES && self.random_loss.is_congestion();
        if lossy && (many || !sample.sack) {
            self.leave_startup_congested();
        } else if self.reached {
            self.enter_drain();
        }
    }

    /// Losses or marks show that the pipe is full (section 5.3.1.3).
    fn leave_startup_congested(&mut self) {
        self.saved.left = Some(State::Startup);
        self.reached = true;
        self.long_inflight = self.bdp(self.bw).unwrap_or(0).max(self.latest.delivered);
        self.enter_drain();
    }

    fn enter_drain(&mut self) {
        self.state = State::Drain;
        self.drain_round = self.rounds.count;
    }

    fn check_drain(&mut self, window: &Window, sample: &ModelSample) {
        let long = self.rounds.count > self.drain_round + MAX_DRAIN_ROUNDS;
        if self.state == State::Drain && (long || sample.in_flight <= self.inflight_at(window, self.bw)) {
            self.start_down();
        }
    }

    // ----- ProbeRTT (section 5.3.4) -----

    /// `BBRCheckProbeRTT`.
    fn check_probe_rtt(&mut self, window: &mut Window, sample: &ModelSample) {
        if self.state != State::ProbeRtt && self.min_rtt.is_expired() && !self.idle_restart {
            self.state = State::ProbeRtt;
            self.prior_cwnd = if self.recovering { self.saved.cwnd.max(window.cwnd) } else { window.cwnd };
            self.probe_rtt_done_at = None;
            self.probing.ack_phase = AckPhase::Stopping;
            self.rounds.begin(self.delivered);
        }
        if self.state == State::ProbeRtt {
            self.step_probe_rtt(window, sample);
        }
        self.idle_restart &= sample.rate.delivered == 0;
    }

    fn step_probe_rtt(&mut self, window: &mut Window, sample: &ModelSample) {
        if self.probe_rtt_done_at.is_none() {
            if sample.in_flight <= self.probe_rtt_cwnd(window) {
                self.probe_rtt_done_at = Some(sample.now + PROBE_RTT_DURATION);
                self.probe_rtt_round_done = false;
                self.rounds.begin(self.delivered);
            }
            return;
        }
        self.probe_rtt_round_done |= self.rounds.start;
        if self.probe_rtt_round_done {
            self.check_probe_rtt_done(window);
        }
    }

    /// `BBRCheckProbeRTTDone` and `BBRExitProbeRTT`.
    fn check_probe_rtt_done(&mut self, window: &mut Window) {
        if self.probe_rtt_done_at.is_none_or(|at| self.now <= at) {
            return;
        }
        self.min_rtt.probed(self.now);
        window.cwnd = window.cwnd.max(self.prior_cwnd);
        self.reset_short_term();
        if self.reached {
            self.start_down();
            self.state = State::Cruise;
        } else {
            self.state = State::Startup;
        }
    }

    // ----- losses and marks (sections 5.5.10 and 5.5.11) -----

    /// `BBRNoteLoss`: there are losses or marks in this round trip.
    fn note_congestion(&mut self, window: &Window) {
        if !self.recovering {
            self.saved = Saved {
                cwnd: if self.state == State::ProbeRtt { self.prior_cwnd } else { window.cwnd },
                short_rate: self.short_rate,
                short_inflight: self.short_inflight,
                long_inflight: self.long_inflight,
                left: None,
            };
        }
        if !self.latest.congested {
            self.latest.end = self.delivered;
        }
        self.latest.congested = true;
    }

    /// A loss recovery begins, or has ended with this ACK: what has been lost in between belongs together.
    fn follow_recovery(&mut self, window: &mut Window, recovering: bool) {
        if self.recovering && !recovering {
            window.cwnd = window.cwnd.max(self.saved.cwnd);
        }
        self.recovering = recovering;
    }
}

impl CongestionControl for Bbr {
    fn acked(&mut self, _window: &mut Window, _acked: &Acked) {}

    fn reduce(&mut self, window: &Window, _flight: u64, sign: Congestion) -> u64 {
        self.note_congestion(window);
        match (sign, self.state) {
            (Congestion::Marked, State::Startup) => self.leave_startup_congested(),
            (Congestion::Marked, _) => self.too_high_by_marks(window),
            // The recovery that begins ends with an ACK.
            (Congestion::Loss, _) => {}
            (Congestion::Timeout, _) => self.recovering = true,
        }
        UNLIMITED
    }

    /// `BBRHandleSpuriousLossDetection`.
    fn undo(&mut self) {
        let Saved { short_rate, short_inflight, long_inflight, left, .. } = self.saved;
        self.latest.congested = false;
        self.full.restart(Rate::ZERO);
        self.short_rate = self.short_rate.max(short_rate);
        self.short_inflight = self.short_inflight.max(short_inflight);
        self.long_inflight = self.long_inflight.max(long_inflight);
        match left {
            Some(State::Startup) if self.state != State::Startup => {
                self.reached = false;
                if self.state != State::ProbeRtt {
                    self.state = State::Startup;
                }
            }
            Some(State::Up) if !matches!(self.state, State::Up | State::ProbeRtt) => self.start_refill(),
            _ => {}
        }
        self.saved.left = None;
    }

    fn resized(&mut self, _before: u64, _smss: u64) {}

    fn paused(&mut self, _pause: Duration) {}

    fn pacing(&self) -> Option<Pacing> {
        Some(Pacing {
            rate: self.pacing_rate,
            quantum: self.quantum,
            holds_back: self.state == State::ProbeRtt,
        })
    }

    /// `BBRUpdateOnACK` (section 5.2.3).
    fn sampled(&mut self, window: &mut Window, sample: &ModelSample) {
        self.update_latest(sample);
        self.update_short_term(window);
        let flow = (self.bw, window.cwnd);
        self.extra.update(sample.now, sample.rate.newly_acked, flow, (self.rounds.count, self.reached));
        self.check_full_pipe(sample);
        self.check_startup(sample);
        self.check_drain(window, sample);
        self.update_cycle(window, sample);
        self.min_rtt.update(sample.now, sample.rtt);
        self.check_probe_rtt(window, sample);
        self.advance_latest(sample);
        self.bw = self.max_bw.get().min(self.short_rate);
        self.follow_recovery(window, sample.recovering);
        self.set_pacing_rate(self.pacing_gain());
        self.set_quantum(window);
        self.set_cwnd(window, sample);
    }

    /// `BBRHandleLostPacket`.
    fn lost(&mut self, window: &Window, lost: &Lost, sack: bool) {
        (self.now, self.delivered) = (lost.at, lost.total_delivered);
        self.note_congestion(window);
        self.recovering = true;
        self.latest.ranges += u32::from(lost.start != self.latest.range_end);
        self.latest.range_end = lost.end;
        self.random_loss.lost(lost.end - lost.start);
        self.too_high_by_loss(window, lost, sack);
    }

    /// `BBRHandleRestartFromIdle` (section 5.4.1), and before the first data `BBRInitPacingRate` (section 5.6.2).
    fn restarted(&mut self, window: &mut Window, now: Instant, srtt: Option<Duration>, app_limited: bool) {
        if self.pacing_rate == Rate::INFINITE {
            let rtt = srtt.unwrap_or(Duration::from_millis(1));
            let nominal = Rate::of(window.cwnd, crate::time::nanos(rtt));
            self.pacing_rate = nominal.times(control::STARTUP_PACING_GAIN);
            self.set_quantum(window);
        }
        if !app_limited {
            return;
        }
        self.now = now;
        self.idle_restart = true;
        self.extra.restart(now);
        match self.state {
            State::Down | State::Cruise | State::Refill | State::Up => self.set_pacing_rate(1.0),
            State::ProbeRtt => self.check_probe_rtt_done(window),
            State::Startup | State::Drain => {}
        }
    }
}

#[cfg(test)]
mod tests;
