//! Round-trip time and the retransmission time-out (RFC 6298), and the windowed minimum that RACK needs.

use std::time::Duration;

use super::TcpConfig;
use crate::time::{Instant, nanos};

/// Half of the window of the minimum round-trip time: paths change, and RFC 8985 section 6.2 asks for a windowed
/// minimum. Two halves of 5 s each make a window of 5 to 10 s, long enough to include a time when the queues on the
/// path were empty.
const MIN_HALF_NS: u64 = 5_000_000_000;

/// In place of a minimum that was not measured.
const UNKNOWN: u64 = u64::MAX;

/// Most doublings of the time-out; `rto_max` limits it long before.
const MAX_BACKOFF: u32 = 16;

/// Round-trip estimates of one connection, in nanoseconds. They are updated with each ACK, where arithmetic on
/// [`Duration`] would carry between seconds and nanoseconds at each step.
#[derive(Debug, Clone)]
pub(super) struct Rtt {
    srtt: Option<u64>,
    rttvar: u64,
    /// Smallest round-trip time in the current half of the window and in the previous one, [`UNKNOWN`] without a measurement.
    min: u64,
    min_before: u64,
    half_ends: Instant,
    backoff: u32,
    /// The current time-out, with back-off: it is read more often than it changes.
    timeout: u64,
    initial: u64,
    floor: u64,
    ceiling: u64,
}

impl Rtt {
    pub(super) fn new(config: &TcpConfig) -> Self {
        let mut rtt = Self {
            srtt: None,
            rttvar: 0,
            min: UNKNOWN,
            min_before: UNKNOWN,
            half_ends: Instant::ZERO.after_nanos(MIN_HALF_NS),
            backoff: 0,
            timeout: 0,
            initial: nanos(config.rto_initial),
            floor: nanos(config.rto_min),
            ceiling: nanos(config.rto_max),
        };
        rtt.update_timeout();
        rtt
    }

    /// Takes a measurement at `now` of a segment sent at `sent`, whose round-trip time is not ambiguous (Karn's rule,
    /// RFC 6298 section 3). Ends the back-off.
    pub(super) fn sample(&mut self, now: Instant, sent: Instant) {
        let rtt = now.nanos_since(sent);
        match self.srtt {
            None => {
                self.srtt = Some(rtt);
                self.rttvar = rtt / 2;
            }
            Some(srtt) => {
                self.rttvar = self.rttvar - self.rttvar / 4 + srtt.abs_diff(rtt) / 4;
                self.srtt = Some(srtt - srtt / 8 + rtt / 8);
            }
        }
        self.backoff = 0;
        self.timeout = self.base_rto_ns();
        if now >= self.half_ends {
            self.min_before = std::mem::replace(&mut self.min, UNKNOWN);
            self.half_ends = now.after_nanos(MIN_HALF_NS);
        }
        self.min = self.min.min(rtt);
    }

    pub(super) fn srtt(&self) -> Option<Duration> {
        self.srtt.map(Duration::from_nanos)
    }

    /// SRTT in nanoseconds.
    pub(super) fn srtt_ns(&self) -> Option<u64> {
        self.srtt
    }

    pub(super) fn min(&self) -> Option<Duration> {
        let min = self.min.min(self.min_before);
        (min != UNKNOWN).then(|| Duration::from_nanos(min))
    }

    fn base_rto_ns(&self) -> u64 {
        let beyond = self.rttvar.saturating_mul(4).max(self.floor);
        self.srtt.map_or(self.initial.max(self.floor), |srtt| srtt.saturating_add(beyond)).min(self.ceiling)
    }

    fn update_timeout(&mut self) {
        self.timeout = self.base_rto_ns().saturating_mul(1 << self.backoff).min(self.ceiling);
    }

    /// The time-out without back-off (RFC 6298 section 2). On a steady path RTTVAR falls to zero, and any late ACK
    /// would then cause a time-out. Therefore `floor` replaces G, the clock granularity, which is a nanosecond here.
    pub(super) fn base_rto(&self) -> Duration {
        Duration::from_nanos(self.base_rto_ns())
    }

    /// The current time-out, with back-off.
    pub(super) fn rto(&self) -> Duration {
        Duration::from_nanos(self.timeout)
    }

    /// When a time-out that starts at `start` fires.
    pub(super) fn rto_after(&self, start: Instant) -> Instant {
        start.after_nanos(self.timeout)
    }

    /// Doubles the time-out (RFC 6298 rule 5.5).
    pub(super) fn back_off(&mut self) {
        self.backoff = (self.backoff + 1).min(MAX_BACKOFF);
        self.update_timeout();
    }

    /// Doublings of the time-out since the last measurement.
    pub(super) fn backoff(&self) -> u32 {
        self.backoff
    }

    /// Ends the back-off without a measurement: new data was acknowledged, or a time-out was spurious.
    pub(super) fn forgive(&mut self) {
        if self.backoff > 0 {
            self.backoff = 0;
            self.update_timeout();
        }
    }

    /// RFC 6298 rule 5.7: the SYN timed out, so data begins with 3 s instead of 1 s.
    pub(super) fn syn_timed_out(&mut self) {
        self.backoff = 0;
        self.initial = self.initial.max(3_000_000_000).min(self.ceiling);
        self.update_timeout();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn at(n: u64) -> Instant {
        Instant::ZERO + ms(n)
    }

    fn sample(rtt: &mut Rtt, sent: Instant, after: Duration) {
        rtt.sample(sent + after, sent);
    }

    fn rtt() -> Rtt {
        Rtt::new(&TcpConfig { rto_min: ms(1), ..TcpConfig::default() })
    }

    #[test]
    fn rfc6298_s2_first_and_later_measurements() {
        let mut rtt = rtt();
        assert_eq!(rtt.rto(), Duration::from_secs(1));
        sample(&mut rtt, at(0), ms(100));
        assert_eq!(rtt.rto(), ms(100 + 4 * 50));
        sample(&mut rtt, at(1), ms(180));
        // RTTVAR = 3/4 * 50 + 1/4 * 80 = 57.5, SRTT = 7/8 * 100 + 1/8 * 180 = 110.
        assert_eq!(rtt.srtt(), Some(ms(110)));
        assert_eq!(rtt.rto(), ms(110 + 230));
    }

    #[test]
    fn rfc6298_s4_a_steady_path_leaves_room_for_a_late_ack() {
        let mut rtt = Rtt::new(&TcpConfig::default());
        for n in 0..100 {
            sample(&mut rtt, at(n), ms(300));
        }
        assert_eq!(rtt.rto(), ms(500));
    }

    #[test]
    fn rfc6298_s5_back_off_doubles_to_the_ceiling_and_ends_with_a_measurement() {
        let mut rtt = rtt();
        sample(&mut rtt, at(0), ms(100));
        rtt.back_off();
        assert_eq!(rtt.rto(), ms(600));
        for _ in 0..40 {
            rtt.back_off();
        }
        assert_eq!(rtt.rto(), Duration::from_mins(1));
        sample(&mut rtt, at(1), ms(100));
        assert!(rtt.rto() < ms(300));
    }

    #[test]
    fn rfc6298_s5_7_a_lost_syn_makes_the_first_data_timeout_3s() {
        let mut rtt = rtt();
        rtt.back_off();
        rtt.syn_timed_out();
        assert_eq!(rtt.rto(), Duration::from_secs(3));
    }

    #[test]
    fn rfc8985_s6_2_the_minimum_expires_after_a_window() {
        let mut rtt = rtt();
        sample(&mut rtt, at(0), ms(10));
        sample(&mut rtt, at(5_000), ms(50));
        assert_eq!(rtt.min(), Some(ms(10)));
        sample(&mut rtt, at(10_000), ms(60));
        assert_eq!(rtt.min(), Some(ms(50)));
    }
}
