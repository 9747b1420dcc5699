//! CUBIC (RFC 9438) with HyStart++ in its first slow start. Windows are in segments here, as in the RFC.

use std::time::Duration;

use super::{
    Acked, Congestion, CongestionControl, Window,
    hystart::{Advice, HyStart},
    new_reno::SLOW_START_LIMIT,
};
use crate::time::Instant;

/// Section 5: aggressiveness, in segments per second cubed.
const C: f64 = 0.4;

/// Section 4.6: multiplicative decrease factor.
const BETA: f64 = 0.7;

/// Section 4.3: additive increase factor that makes `w_est` grow as fast on average as Reno with its own decrease
/// factor.
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// One congestion avoidance stage.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Epoch {
    began: Instant,
    /// Seconds to grow back to `w_max`.
    k: f64,
    /// The plateau, in segments.
    origin: f64,
    w_est: f64,
}

/// RFC 9438.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cubic {
    state: State,
    /// The state before the last reduction, to undo it (section 4.9.2).
    before: Option<Box<State>>,
    first: FirstSlowStart,
}

/// The first slow start. HyStart++ applies to no later one (RFC 9406 section 4.3).
#[derive(Debug, Clone, Default)]
enum FirstSlowStart {
    #[default]
    Ahead,
    Now(Box<HyStart>),
    Over,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    epoch: Option<Epoch>,
    w_max: f64,
    cwnd_prior: f64,
    /// The next stage follows a time-out (section 4.8).
    after_timeout: bool,
    /// Growth of less than one byte, carried over to the next ACK.
    fraction: f64,
}

fn segments(bytes: u64, window: &Window) -> f64 {
    bytes as f64 / window.smss as f64
}

impl Cubic {
    fn slow_start(&mut self, window: &mut Window, acked: &Acked) {
        if matches!(self.first, FirstSlowStart::Ahead) {
            self.first = FirstSlowStart::Now(Box::default());
        }
        let FirstSlowStart::Now(hystart) = &mut self.first else {
            let limit = if acked.after_timeout { 1 } else { SLOW_START_LIMIT };
            window.cwnd += acked.bytes.min(limit * window.smss).min(window.ssthresh - window.cwnd);
            return;
        };
        if hystart.acked(window, acked) == Advice::Leave {
            window.ssthresh = window.cwnd;
            self.state.cwnd_prior = segments(window.cwnd, window);
            self.first = FirstSlowStart::Over;
        }
    }

    /// Begins a congestion avoidance stage: towards the last plateau (figure 2), or from the current window where there
    /// is none (sections 4.8, 4.10).
    fn begin(&self, now: Instant, cwnd: f64) -> Epoch {
        let known = self.state.w_max > cwnd && !self.state.after_timeout;
        let origin = if known { self.state.w_max } else { cwnd };
        Epoch { began: now, k: ((origin - cwnd) / C).cbrt(), origin, w_est: cwnd }
    }
}

impl CongestionControl for Cubic {
    fn acked(&mut self, window: &mut Window, acked: &Acked) {
        if window.in_slow_start() {
            return self.slow_start(window, acked);
        }
        let cwnd = segments(window.cwnd, window);
        let epoch = self.state.epoch.unwrap_or_else(|| self.begin(acked.now, cwnd));
        let acked_segments = segments(acked.bytes, window);
        let alpha = if epoch.w_est >= self.state.cwnd_prior { 1.0 } else { ALPHA };
        let epoch = Epoch { w_est: epoch.w_est + alpha * acked_segments / cwnd, ..epoch };
        self.state.epoch = Some(epoch);
        let t = acked.now.since(epoch.began).as_secs_f64();
        let w_cubic = |t: f64| C * (t - epoch.k).powi(3) + epoch.origin;
        let grown = if w_cubic(t) < epoch.w_est {
            epoch.w_est.max(cwnd)
        } else {
            let rtt = acked.srtt.unwrap_or_default().as_secs_f64();
            let target = w_cubic(t + rtt).clamp(cwnd, 1.5 * cwnd);
            cwnd + (target - cwnd) / cwnd * acked_segments
        };
        let bytes = (grown - cwnd) * window.smss as f64 + self.state.fraction;
        self.state.fraction = bytes.fract();
        window.cwnd += bytes as u64;
    }

    fn reduce(&mut self, window: &Window, flight: u64, sign: Congestion) -> u64 {
        **self.before.get_or_insert_default() = self.state;
        self.first = FirstSlowStart::Over;
        let cwnd = segments(window.cwnd, window);
        // Fast convergence, section 4.7.
        self.state.w_max = if cwnd < self.state.w_max { cwnd * f64::midpoint(1.0, BETA) } else { cwnd };
        self.state.cwnd_prior = cwnd;
        self.state.epoch = None;
        self.state.fraction = 0.0;
        self.state.after_timeout = sign == Congestion::Timeout;
        (flight as f64 * BETA) as u64
    }

    fn undo(&mut self) {
        if let Some(before) = self.before.take() {
            self.state = *before;
        }
    }

    fn resized(&mut self, before: u64, smss: u64) {
        let larger = (smss as f64 / before as f64).max(1.0);
        self.state.w_max /= larger;
        self.state.cwnd_prior /= larger;
        self.state.epoch = None;
        self.before = None;
    }

    fn paused(&mut self, pause: Duration) {
        if let Some(epoch) = &mut self.state.epoch {
            epoch.began += pause;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(cwnd: u64) -> Window {
        Window { cwnd, ssthresh: cwnd, smss: 1000 }
    }

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    /// Acknowledges one window every `rtt_ms`, from `from_ms` until `until_ms`.
    fn run(cubic: &mut Cubic, window: &mut Window, from_ms: u64, until_ms: u64, rtt_ms: u64) {
        let mut now = from_ms;
        while now < until_ms {
            now += rtt_ms;
            let acks = window.cwnd / 2000;
            for _ in 0..acks {
                let srtt = Some(Duration::from_millis(rtt_ms));
                let acked = Acked {
                    now: at(now),
                    bytes: 2000,
                    rtt: srtt,
                    srtt,
                    una: 0,
                    nxt: 0,
                    after_timeout: false,
                };
                cubic.acked(window, &acked);
            }
        }
    }

    #[test]
    fn rfc9438_s4_6_and_4_7_decrease_and_fast_convergence() {
        let mut cubic = Cubic::default();
        assert_eq!(cubic.reduce(&window(100_000), 100_000, Congestion::Loss), 70_000);
        assert!((cubic.state.w_max - 100.0).abs() < 1e-9);
        cubic.reduce(&window(80_000), 80_000, Congestion::Loss);
        assert!((cubic.state.w_max - 80.0 * 0.85).abs() < 1e-9);
    }

    #[test]
    fn rfc9438_s4_2_the_window_is_back_at_w_max_after_k_seconds_and_grows_beyond() {
        let mut cubic = Cubic::default();
        let mut w = window(1_000_000);
        let ssthresh = cubic.reduce(&w, 1_000_000, Congestion::Loss);
        w = window(ssthresh);
        // K = cbrt((1000 - 700) / 0.4) = 9.09 s.
        run(&mut cubic, &mut w, 0, 9_000, 100);
        assert!((950_000..=1_005_000).contains(&w.cwnd), "{}", w.cwnd);
        let plateau = w.cwnd;
        run(&mut cubic, &mut w, 9_000, 20_000, 100);
        assert!(w.cwnd > plateau + 300_000, "{}", w.cwnd);
    }

    #[test]
    fn rfc9438_s4_3_short_paths_grow_as_reno_does() {
        let mut cubic = Cubic::default();
        let mut w = window(100_000);
        let ssthresh = cubic.reduce(&w, 100_000, Congestion::Loss);
        w = window(ssthresh);
        run(&mut cubic, &mut w, 0, 100, 1);
        // 100 rounds of ALPHA (0.53) segments, then 1: 30 segments take 57 rounds.
        assert!((110_000..=150_000).contains(&w.cwnd), "{}", w.cwnd);
    }

    #[test]
    fn rfc9438_s4_9_2_a_spurious_reduction_is_undone() {
        let mut cubic = Cubic::default();
        cubic.reduce(&window(100_000), 100_000, Congestion::Loss);
        cubic.reduce(&window(200_000), 200_000, Congestion::Loss);
        cubic.undo();
        assert!((cubic.state.w_max - 100.0).abs() < 1e-9);
    }

    #[test]
    fn rfc9438_s5_8_pauses_do_not_count() {
        let mut cubic = Cubic::default();
        let mut w = window(700_000);
        cubic.reduce(&window(1_000_000), 1_000_000, Congestion::Loss);
        run(&mut cubic, &mut w, 0, 100, 100);
        let before = w.cwnd;
        cubic.paused(Duration::from_mins(1));
        run(&mut cubic, &mut w, 60_000, 60_200, 100);
        assert!(w.cwnd < before + 50_000, "{} then {}", before, w.cwnd);
    }
}
