//! The state machine on a path of the simplest kind: one queue, one delay.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::tcp::congestion::{Pacer, Sampler};

const SMSS: u64 = 1000;

/// A sender without an upper limit of data, and its path. Times are in nanoseconds.
struct Flow {
    bbr: Bbr,
    window: Window,
    sampler: Sampler,
    pacer: Pacer,
    now: u64,
    /// Bytes per second, one-way delay, bytes of queue.
    rate: u64,
    delay: u64,
    queue: u64,
    /// Every n-th segment is lost; 0: none is.
    lose_each: u64,
    /// The application may send this many bytes in all.
    allowed: u64,
    line_free: u64,
    sent: u64,
    next: u64,
    lost: VecDeque<u64>,
    /// Segments in flight by the time of their ACK; and those that will be found lost, by the time of that.
    acks: BTreeMap<(u64, u64), (u64, u64)>,
    losses: BTreeMap<(u64, u64), u64>,
    in_flight: u64,
    una: u64,
    held: BTreeSet<u64>,
    min_rtt: Option<Duration>,
    limited: bool,
    recover_to: u64,
    states: Vec<State>,
}

impl Flow {
    fn new(rate: u64, delay_ms: u64, queue: u64) -> Self {
        let bbr = Bbr::new(7);
        let pacing = bbr.pacing().unwrap();
        let mut flow = Self {
            bbr,
            window: Window { cwnd: 10 * SMSS, ssthresh: u64::MAX, smss: SMSS },
            sampler: Sampler::new(Instant::ZERO),
            pacer: Pacer::new(Instant::ZERO, &pacing),
            now: 1,
            rate,
            delay: delay_ms * 1_000_000,
            queue,
            lose_each: 0,
            allowed: u64::MAX,
            line_free: 0,
            sent: 0,
            next: 0,
            lost: VecDeque::new(),
            acks: BTreeMap::new(),
            losses: BTreeMap::new(),
            in_flight: 0,
            una: 0,
            held: BTreeSet::new(),
            min_rtt: None,
            limited: false,
            recover_to: 0,
            states: vec![State::Startup],
        };
        flow.restart();
        flow
    }

    fn at(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    fn adapt(&mut self) {
        let pacing = self.bbr.pacing().unwrap();
        self.pacer.adapt(&pacing);
        if pacing.holds_back {
            self.sampler.mark_app_limited(self.in_flight);
        }
        if self.states.last() != Some(&self.bbr.state) {
            self.states.push(self.bbr.state);
        }
        assert!(self.window.cwnd >= MIN_PIPE_SEGMENTS * SMSS, "{:?}", self.bbr);
        assert!(pacing.rate > Rate::ZERO && pacing.quantum >= 2 * SMSS, "{:?}", self.bbr);
    }

    fn restart(&mut self) {
        let app_limited = self.sampler.is_app_limited();
        let rtt = Duration::from_nanos(2 * self.delay);
        self.bbr.restarted(&mut self.window, Instant::from_nanos(self.now), Some(rtt), app_limited);
        self.adapt();
    }

    fn transmit(&mut self) {
        while self.pacer.held_until(self.at()).is_none() {
            if self.in_flight + SMSS > self.window.cwnd {
                self.limited = true;
                return;
            }
            let again = self.lost.pop_front();
            if again.is_none() && self.next * SMSS >= self.allowed {
                self.sampler.ran_dry();
                return;
            }
            self.sampler.check_app_limited(self.in_flight, self.window.cwnd, again.is_some());
            if self.in_flight == 0 && self.sent > 0 {
                self.restart();
            }
            self.in_flight += SMSS;
            let segment = again.unwrap_or(self.next);
            if again.is_some() {
                self.sampler.resent(self.at(), (segment + 1) * SMSS, self.in_flight);
            } else {
                self.sampler.sent(self.at(), segment * SMSS, (segment + 1) * SMSS, self.in_flight);
                self.next += 1;
            }
            self.pacer.sent(self.at(), SMSS);
            self.travel(segment);
        }
    }

    fn travel(&mut self, segment: u64) {
        self.sent += 1;
        let free = self.line_free.max(self.now);
        let waiting = u128::from(free - self.now) * u128::from(self.rate) / 1_000_000_000;
        let full = waiting as u64 + SMSS > self.queue;
        let unlucky = self.lose_each > 0 && self.sent.is_multiple_of(self.lose_each);
        let mut leaves = free;
        if !full {
            leaves += SMSS * 1_000_000_000 / self.rate;
            self.line_free = leaves;
        }
        let back = leaves + 2 * self.delay;
        if full || unlucky {
            // Found by later ACKs.
            self.losses.insert((back + 3 * SMSS * 1_000_000_000 / self.rate, self.sent), segment);
        } else {
            self.acks.insert((back, self.sent), (segment, self.now));
        }
    }

    fn on_ack(&mut self, segment: u64, sent: u64) {
        self.sampler.check_app_limited(self.in_flight, self.window.cwnd, !self.lost.is_empty());
        self.in_flight -= SMSS;
        self.held.insert(segment);
        if segment == self.una {
            while self.held.remove(&self.una) {
                self.una += 1;
            }
            self.sampler.delivered_to(self.at(), self.una * SMSS);
        } else {
            self.sampler.sacked(self.at(), segment * SMSS, (segment + 1) * SMSS);
        }
        let rtt = Duration::from_nanos(self.now - sent);
        self.min_rtt = Some(self.min_rtt.map_or(rtt, |min| min.min(rtt)));
        let Some(rate) = self.sampler.sample(self.min_rtt) else { return };
        let sample = ModelSample {
            now: self.at(),
            rate,
            rtt: Some(rtt),
            in_flight: self.in_flight,
            cwnd_limited: std::mem::take(&mut self.limited),
            recovering: self.una < self.recover_to,
            sack: true,
            initial_window: 10 * SMSS,
        };
        self.bbr.sampled(&mut self.window, &sample);
        self.adapt();
    }

    fn on_loss(&mut self, segment: u64) {
        self.in_flight -= SMSS;
        self.lost.push_back(segment);
        let lost = self.sampler.lost(self.at(), segment * SMSS, (segment + 1) * SMSS).unwrap();
        self.bbr.lost(&self.window, &lost, true);
        if self.una >= self.recover_to {
            self.bbr.reduce(&self.window, self.in_flight, Congestion::Loss);
            self.recover_to = self.next;
        }
        self.adapt();
    }

    /// Runs until `ms`.
    fn run(&mut self, ms: u64) {
        let end = ms * 1_000_000;
        loop {
            self.transmit();
            let held = self.pacer.held_until(self.at()).map(Instant::as_nanos);
            let ack = self.acks.first_key_value().map(|((at, _), _)| *at);
            let loss = self.losses.first_key_value().map(|((at, _), _)| *at);
            let next = [held, ack, loss].into_iter().flatten().min().unwrap_or(u64::MAX);
            if next > end {
                self.now = end;
                return;
            }
            self.now = next;
            if loss == Some(next) {
                let (_, segment) = self.losses.pop_first().unwrap();
                self.on_loss(segment);
            } else if ack == Some(next) {
                let (_, (segment, sent)) = self.acks.pop_first().unwrap();
                self.on_ack(segment, sent);
            }
        }
    }

    fn bandwidth(&self) -> f64 {
        self.bbr.max_bw.get().bytes_per_second() as f64 / self.rate as f64
    }
}

/// 10 MB/s, 40 ms: 400 segments.
fn flow(queue: u64) -> Flow {
    Flow::new(10_000_000, 20, queue)
}

/// "Exiting STARTUP on Bandwidth Plateau" and "Exiting DRAIN Based on Inflight" of the draft's appendix.
#[test]
fn draft_ccwg_bbr_a_startup_ends_at_a_plateau_and_drains() {
    let mut flow = flow(10_000_000);
    flow.run(1000);
    // The queue is gone when `Drain` ends, and with it the reason for `Down`.
    assert_eq!(flow.states, [State::Startup, State::Drain, State::Cruise]);
    assert!((0.98..1.02).contains(&flow.bandwidth()), "{}", flow.bandwidth());
    assert!((39..=41).contains(&flow.bbr.min_rtt.get().unwrap().as_millis()));
    let bdp = flow.bbr.bdp(flow.bbr.bw).unwrap();
    assert!(flow.in_flight <= bdp + 10 * SMSS, "no queue stays: {} of {bdp}", flow.in_flight);
}

/// "Exiting `PROBE_UP` on Bandwidth Plateau", and the order of the cycle.
#[test]
fn draft_ccwg_bbr_s5_3_3_the_cycle_goes_down_cruises_refills_and_probes() {
    let mut flow = flow(10_000_000);
    flow.run(4800);
    let cycle = [State::Cruise, State::Refill, State::Up, State::Down, State::Cruise];
    assert!(flow.states.windows(5).any(|states| states == cycle), "{:?}", flow.states);
}

/// "Entering and Exiting `PROBE_RTT`".
#[test]
fn draft_ccwg_bbr_s5_3_4_the_queue_is_drained_every_five_seconds() {
    let mut flow = flow(10_000_000);
    flow.run(4900);
    assert!(!flow.states.contains(&State::ProbeRtt));
    flow.run(5400);
    let at = flow.states.iter().position(|state| *state == State::ProbeRtt).expect("ProbeRTT");
    assert_eq!(flow.states.get(at + 1), Some(&State::Cruise), "{:?}", flow.states);
    assert!(flow.window.cwnd > 400 * SMSS, "the window is back: {}", flow.window.cwnd);
}

/// "Skipping `PROBE_RTT` Due to Application-Limited Sending".
#[test]
fn draft_ccwg_bbr_s5_4_a_pause_takes_the_place_of_probe_rtt_and_leaves_the_window() {
    let mut flow = flow(10_000_000);
    flow.run(2000);
    flow.allowed = flow.next * SMSS;
    flow.run(9000);
    assert_eq!(flow.in_flight, 0);
    let (window, known) = (flow.window.cwnd, flow.states.len());
    flow.allowed = u64::MAX;
    flow.run(9100);
    assert!(flow.window.cwnd >= window, "{} then {}", window, flow.window.cwnd);
    assert!((0.98..1.02).contains(&flow.bandwidth()), "{}", flow.bandwidth());
    flow.run(9400);
    assert!(!flow.states[known..].contains(&State::ProbeRtt), "{:?}", &flow.states[known..]);
}

/// "Never Exiting `PROBE_UP` (or STARTUP) When Application-Limited With No Loss".
#[test]
fn draft_ccwg_bbr_a_an_app_limited_flow_stays_in_startup() {
    let mut flow = flow(10_000_000);
    for ms in 1..300 {
        flow.allowed = ms * 2 * SMSS;
        flow.run(10 * ms);
    }
    assert_eq!(flow.states, [State::Startup]);
    let rate = flow.bbr.pacing_rate;
    flow.allowed = u64::MAX;
    flow.run(4000);
    assert!(rate > Rate::ZERO && flow.bandwidth() > 0.98, "{}", flow.bandwidth());
}

/// "Correctly Managing Sub-Packet BDPs".
#[test]
fn draft_ccwg_bbr_a_a_path_that_holds_less_than_a_segment() {
    let mut flow = Flow::new(100_000, 1, 100_000);
    flow.run(4000);
    assert!(flow.window.cwnd <= 20 * SMSS, "{}", flow.window.cwnd);
    assert!((0.9..1.1).contains(&flow.bandwidth()), "{}", flow.bandwidth());
}

/// "Increasing Bandwidth 10x" and "Decreasing Bandwidth 10x".
#[test]
fn draft_ccwg_bbr_a_the_bandwidth_follows_the_path_up_and_down() {
    let mut flow = Flow::new(1_000_000, 20, 400_000);
    flow.run(4000);
    assert!((0.97..1.03).contains(&flow.bandwidth()));
    flow.rate = 10_000_000;
    flow.run(14_000);
    assert!((0.9..1.03).contains(&flow.bandwidth()), "{}", flow.bandwidth());
    flow.rate = 1_000_000;
    flow.run(26_000);
    assert!((0.9..1.2).contains(&flow.bandwidth()), "{}", flow.bandwidth());
}

/// A queue of a tenth of the path: probes lose, and the long-term limit is what fits.
#[test]
fn draft_ccwg_bbr_s5_5_10_losses_of_a_shallow_queue_set_a_limit() {
    let mut flow = flow(40_000);
    flow.run(20_000);
    assert!(flow.bbr.long_inflight < 700_000, "{:?}", flow.bbr);
    assert!(flow.una as f64 * SMSS as f64 > 0.8 * 20.0 * 10_000_000.0, "{}", flow.una);
    assert!(flow.bbr.random_loss.share() < 0.01, "{:?}", flow.bbr.random_loss);
}

/// Losses that come without a queue, however little is sent, are no reason to slow down.
#[test]
fn losses_of_the_path_itself_are_learnt() {
    for (each, most, least) in [(100, 0.015, 0.8), (33, 0.04, 0.75), (20, 0.06, 0.75), (10, 0.12, 0.6)] {
        let mut flow = flow(400_000);
        flow.lose_each = each;
        flow.run(20_000);
        let share = flow.bbr.random_loss.share();
        assert!((0.7 / each as f64..most).contains(&share), "one of {each}: {share}");
        let goodput = (flow.una * SMSS) as f64 / (20.0 * 10_000_000.0);
        assert!(goodput > least, "one of {each}: {goodput}");
    }
}

/// "Handling Spurious Fast Recovery".
#[test]
fn draft_ccwg_bbr_s5_5_11_spurious_losses_are_undone() {
    let mut flow = flow(10_000_000);
    flow.run(600);
    let (short, long) = (flow.bbr.short_rate, flow.bbr.long_inflight);
    flow.lose_each = 3;
    flow.run(640);
    flow.lose_each = 0;
    flow.run(720);
    assert!(flow.bbr.short_rate < short);
    flow.bbr.undo();
    assert_eq!((flow.bbr.short_rate, flow.bbr.long_inflight), (short, long));
}

#[test]
fn rfc3168_marks_are_congestion() {
    let mut flow = flow(10_000_000);
    flow.run(100);
    assert_eq!(flow.bbr.state, State::Startup);
    flow.bbr.reduce(&flow.window, flow.window.cwnd, Congestion::Marked);
    assert_eq!(flow.bbr.state, State::Drain);
    flow.run(700);
    assert_eq!(flow.bbr.state, State::Cruise);
    let before = flow.bbr.bw;
    flow.window.cwnd += 1;
    flow.bbr.reduce(&flow.window, flow.window.cwnd, Congestion::Marked);
    flow.run(760);
    assert!(flow.bbr.short_rate < Rate::INFINITE && flow.bbr.bw <= before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Whatever the path does: the window never falls below four segments (asserted at each step), never exceeds what the
    /// model allows, and the flow never stops.
    #[test]
    fn prop_the_flow_never_stops_and_the_window_is_bounded(
        steps in prop::collection::vec((10_000..20_000_000u64, 4_000..2_000_000u64, 0..40u64, 50..600u64), 1..8),
        delay in 1..60u64,
    ) {
        let mut flow = Flow::new(1_000_000, delay, 200_000);
        let mut end = 0;
        for (rate, queue, lose_each, ms) in steps {
            (flow.rate, flow.queue) = (rate, queue);
            flow.lose_each = if lose_each < 3 { 0 } else { lose_each };
            end += ms;
            flow.run(end);
            if flow.bbr.reached {
                let model = flow.bbr.max_bw.get().times(2.25);
                let bdp = flow.bbr.bdp(model).unwrap_or(0) + flow.bbr.extra.get();
                let most = bdp.max(3 * flow.bbr.quantum).max(4 * SMSS) + 4 * SMSS;
                prop_assert!(flow.window.cwnd <= most, "{} {}", flow.window.cwnd, most);
            }
        }
        let (sent, una) = (flow.sent, flow.una);
        flow.lose_each = 0;
        (flow.rate, flow.queue) = (1_000_000, 1_000_000);
        flow.run(end + 20_000);
        prop_assert!(flow.sent > sent && flow.una > una, "the flow has stopped: {:?}", flow.bbr);
    }
}
