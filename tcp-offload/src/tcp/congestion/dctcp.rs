//! DCTCP: the window falls in proportion to the fraction of bytes that was marked, so queues stay short where switches
//! mark early (RFC 8257 section 3.3). Window growth and the reaction to losses are those of RFC 5681.

use std::time::Duration;

use super::{Acked, Congestion, CongestionControl, NewReno, Window};
use crate::seq::StreamOffset;

/// Section 4.1: the weight of one window in the estimate.
const G: f64 = 1.0 / 16.0;

/// RFC 8257.
#[derive(Debug, Clone)]
pub(crate) struct Dctcp {
    reno: NewReno,
    /// Estimated fraction of bytes that are marked; 1 initially (section 3.3, step 1).
    alpha: f64,
    /// Bytes acknowledged in this window, and how many of them by ACKs with ECN-Echo.
    acked: u64,
    marked: u64,
    /// `DCTCP.WindowEnd`.
    window_end: StreamOffset,
}

impl Default for Dctcp {
    fn default() -> Self {
        Self { reno: NewReno::default(), alpha: 1.0, acked: 0, marked: 0, window_end: 0 }
    }
}

impl CongestionControl for Dctcp {
    fn echoed(&mut self, una: StreamOffset, nxt: StreamOffset, bytes: u64, marked: bool) {
        self.acked += bytes;
        self.marked += if marked { bytes } else { 0 };
        if una <= self.window_end {
            return;
        }
        if self.acked > 0 {
            let fraction = self.marked as f64 / self.acked as f64;
            self.alpha = self.alpha * (1.0 - G) + fraction * G;
        }
        (self.acked, self.marked, self.window_end) = (0, 0, nxt);
    }

    fn acked(&mut self, window: &mut Window, acked: &Acked) {
        self.reno.acked(window, acked);
    }

    /// Section 3.3, step 9; losses halve the window (section 3.5).
    fn reduce(&mut self, window: &Window, flight: u64, sign: Congestion) -> u64 {
        let reno = self.reno.reduce(window, flight, sign);
        if sign != Congestion::Marked {
            return reno;
        }
        (window.cwnd as f64 * (1.0 - self.alpha / 2.0)) as u64
    }

    fn undo(&mut self) {
        self.reno.undo();
    }

    fn resized(&mut self, before: u64, smss: u64) {
        self.reno.resized(before, smss);
    }

    fn paused(&mut self, pause: Duration) {
        self.reno.paused(pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Window = Window { cwnd: 100_000, ssthresh: 100_000, smss: 1000 };

    /// Acknowledges `count` windows of 100 segments, of which `marked` segments each carry a mark.
    fn windows(dctcp: &mut Dctcp, count: u64, marked: u64) {
        let mut una = dctcp.window_end;
        for _ in 0..count {
            let nxt = una + 100_000;
            for n in 0..100 {
                una += 1000;
                dctcp.echoed(una, nxt + n * 1000, 1000, n < marked);
            }
        }
    }

    #[test]
    fn rfc8257_s3_3_the_window_falls_by_half_the_fraction_that_is_marked() {
        let mut dctcp = Dctcp::default();
        assert_eq!(
            dctcp.reduce(&WINDOW, 100_000, Congestion::Marked),
            50_000,
            "the initial estimate halves the window"
        );
        windows(&mut dctcp, 200, 20);
        assert!((dctcp.alpha - 0.2).abs() < 0.01, "{}", dctcp.alpha);
        let reduced = dctcp.reduce(&WINDOW, 100_000, Congestion::Marked);
        assert!((89_000..=91_000).contains(&reduced), "{reduced}");
        windows(&mut dctcp, 200, 0);
        assert!(dctcp.reduce(&WINDOW, 100_000, Congestion::Marked) >= 99_000, "marks have become rare");
    }

    #[test]
    fn rfc8257_s3_3_one_window_counts_for_a_sixteenth() {
        let mut dctcp = Dctcp { alpha: 0.0, ..Dctcp::default() };
        windows(&mut dctcp, 1, 100);
        windows(&mut dctcp, 1, 0);
        // The window before the first one has a single segment, and counts as well.
        assert!(dctcp.alpha > G / 2.0 && dctcp.alpha <= 2.0 * G, "{}", dctcp.alpha);
    }

    #[test]
    fn rfc8257_s3_5_losses_halve_the_window_as_in_rfc_5681() {
        let mut dctcp = Dctcp { alpha: 0.0, ..Dctcp::default() };
        assert_eq!(dctcp.reduce(&WINDOW, 100_000, Congestion::Loss), 50_000);
        assert_eq!(dctcp.reduce(&WINDOW, 100_000, Congestion::Timeout), 50_000);
    }
}
