//! Slow start and congestion avoidance of RFC 5681 with appropriate byte counting (RFC 3465).

use std::time::Duration;

use super::{Acked, Congestion, CongestionControl, Window};

/// Segments by which one ACK may grow the window in slow start. The 2 of RFC 3465 assumes ACKs of two segments; our
/// peers acknowledge up to eight at once.
pub(super) const SLOW_START_LIMIT: u64 = 8;

/// RFC 5681.
#[derive(Debug, Clone, Default)]
pub(crate) struct NewReno {
    /// Bytes acknowledged since the window last grew in congestion avoidance.
    counted: u64,
}

impl CongestionControl for NewReno {
    fn acked(&mut self, window: &mut Window, acked: &Acked) {
        if window.in_slow_start() {
            let limit = if acked.after_timeout { 1 } else { SLOW_START_LIMIT };
            window.cwnd += acked.bytes.min(limit * window.smss).min(window.ssthresh - window.cwnd);
            return;
        }
        self.counted += acked.bytes;
        if self.counted >= window.cwnd {
            self.counted -= window.cwnd;
            window.cwnd += window.smss;
        }
    }

    fn reduce(&mut self, _window: &Window, flight: u64, _sign: Congestion) -> u64 {
        self.counted = 0;
        flight / 2
    }

    fn undo(&mut self) {}

    fn resized(&mut self, _before: u64, _smss: u64) {
        self.counted = 0;
    }

    fn paused(&mut self, _pause: Duration) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Instant;

    pub(crate) fn acked(bytes: u64) -> Acked {
        Acked { now: Instant::ZERO, bytes, rtt: None, srtt: None, una: 0, nxt: 0, after_timeout: false }
    }

    #[test]
    fn rfc5681_s3_1_slow_start_then_one_segment_a_round() {
        let mut reno = NewReno::default();
        let mut window = Window { cwnd: 10_000, ssthresh: 14_000, smss: 1000 };
        reno.acked(&mut window, &acked(2_000));
        assert_eq!(window.cwnd, 12_000);
        reno.acked(&mut window, &acked(8_000));
        assert_eq!(window.cwnd, 14_000, "slow start ends at ssthresh");
        for _ in 0..7 {
            reno.acked(&mut window, &acked(2_000));
        }
        assert_eq!(window.cwnd, 15_000);
    }

    #[test]
    fn rfc5681_s3_1_equation_4() {
        let mut reno = NewReno::default();
        let window = Window { cwnd: 20_000, ssthresh: u64::MAX, smss: 1000 };
        assert_eq!(reno.reduce(&window, 20_000, Congestion::Loss), 10_000);
    }

    #[test]
    fn rfc3465_s2_3_one_segment_an_ack_after_a_timeout() {
        let mut reno = NewReno::default();
        let mut window = Window { cwnd: 1_000, ssthresh: 14_000, smss: 1000 };
        reno.acked(&mut window, &Acked { after_timeout: true, ..acked(9_000) });
        assert_eq!(window.cwnd, 2_000);
    }
}
