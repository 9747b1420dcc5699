//! HyStart++ (RFC 9406): slow start ends when the delay grows, before segments are lost.

use std::time::Duration;

use super::{Acked, Window, new_reno::SLOW_START_LIMIT};
use crate::seq::StreamOffset;

/// The constants of section 4.3. `MIN_RTT_THRESH` is lowered from 4 ms: round trips in a data centre are tens of
/// microseconds, where an increase by 4 ms would never be seen.
const MIN_RTT_THRESH: Duration = Duration::from_micros(50);
const MAX_RTT_THRESH: Duration = Duration::from_millis(16);
const MIN_RTT_DIVISOR: u32 = 8;
const N_RTT_SAMPLE: u32 = 8;
const CSS_GROWTH_DIVISOR: u64 = 4;
const CSS_ROUNDS: u32 = 5;

/// Whether slow start continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Advice {
    /// Stay in slow start.
    Stay,
    /// Enter congestion avoidance with the current window.
    Leave,
}

/// State of one slow start.
#[derive(Debug, Clone, Default)]
pub(super) struct HyStart {
    window_end: StreamOffset,
    last_round_min: Option<Duration>,
    round_min: Option<Duration>,
    samples: u32,
    /// In conservative slow start: the baseline round-trip time, and the rounds completed.
    css: Option<(Duration, u32)>,
}

impl HyStart {
    /// Grows the window by one ACK in slow start (section 4.2).
    pub(super) fn acked(&mut self, window: &mut Window, acked: &Acked) -> Advice {
        let growth = acked.bytes.min(SLOW_START_LIMIT * window.smss);
        window.cwnd += if self.css.is_some() { growth / CSS_GROWTH_DIVISOR } else { growth };
        if let Some(rtt) = acked.rtt {
            self.round_min = Some(self.round_min.map_or(rtt, |m| m.min(rtt)));
            self.samples += 1;
        }
        self.judge();
        // A round ends with the first ACK beyond `window_end`, not at it: the segment sent for the last ACK of a burst
        // is queued behind the whole burst, and would give the next round the longest round-trip times of this one.
        if acked.una > self.window_end {
            return self.end_round(acked.nxt);
        }
        Advice::Stay
    }

    fn judge(&mut self) {
        let (Some(now), Some(last)) = (self.round_min, self.last_round_min) else { return };
        if self.samples < N_RTT_SAMPLE {
            return;
        }
        match self.css {
            Some((baseline, _)) if now < baseline => self.css = None,
            Some(_) => {}
            None => {
                let threshold = (last / MIN_RTT_DIVISOR).min(MAX_RTT_THRESH).max(MIN_RTT_THRESH);
                if now >= last + threshold {
                    self.css = Some((now, 0));
                }
            }
        }
    }

    fn end_round(&mut self, nxt: StreamOffset) -> Advice {
        self.window_end = nxt;
        self.last_round_min = self.round_min.take();
        self.samples = 0;
        if let Some((_, rounds)) = &mut self.css {
            *rounds += 1;
            if *rounds >= CSS_ROUNDS {
                return Advice::Leave;
            }
        }
        Advice::Stay
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Instant;

    /// One round: ten ACKs with this round-trip time.
    fn round(hystart: &mut HyStart, window: &mut Window, rtt_us: u64, n: u64) -> Advice {
        let mut advice = Advice::Stay;
        for i in 1..=10 {
            advice = hystart.acked(
                window,
                &Acked {
                    now: Instant::ZERO,
                    bytes: 1000,
                    rtt: Some(Duration::from_micros(rtt_us)),
                    srtt: None,
                    una: n * 10 + i,
                    nxt: n * 10 + 19,
                    after_timeout: false,
                },
            );
        }
        advice
    }

    fn start() -> (HyStart, Window) {
        let hystart = HyStart { window_end: 9, ..HyStart::default() };
        (hystart, Window { cwnd: 10_000, ssthresh: u64::MAX, smss: 1000 })
    }

    #[test]
    fn rfc9406_s4_2_growing_delay_leads_through_css_to_the_end_of_slow_start() {
        let (mut hystart, mut window) = start();
        assert_eq!(round(&mut hystart, &mut window, 1000, 0), Advice::Stay);
        assert_eq!(window.cwnd, 20_000);
        let mut rounds = 0;
        for n in 1..20 {
            rounds = n;
            if round(&mut hystart, &mut window, 1200, n) == Advice::Leave {
                break;
            }
        }
        // CSS began in round 1, which counts.
        assert_eq!(rounds, u64::from(CSS_ROUNDS));
        assert!(window.cwnd < 20_000 + 10_000 + 5 * 2_500 + 2_500);
    }

    #[test]
    fn rfc9406_s4_2_css_ends_when_delay_falls_again() {
        let (mut hystart, mut window) = start();
        round(&mut hystart, &mut window, 1000, 0);
        round(&mut hystart, &mut window, 1200, 1);
        assert!(hystart.css.is_some());
        round(&mut hystart, &mut window, 1000, 2);
        assert!(hystart.css.is_none());
    }

    #[test]
    fn a_steady_delay_never_ends_slow_start() {
        let (mut hystart, mut window) = start();
        for n in 0..50 {
            assert_eq!(round(&mut hystart, &mut window, 1000, n), Advice::Stay);
        }
        assert_eq!(window.cwnd, 510_000);
    }
}
