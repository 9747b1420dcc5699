//! Checks from outside that a sender keeps to its congestion window. A violation panics.

use crate::{seq::StreamOffset, tcp::Info};

/// The state of one sender's check.
#[derive(Debug, Default)]
pub(crate) struct CongestionCheck {
    before: Option<Info>,
    /// An upper bound of the longest segment so far, in bytes.
    largest: u64,
    /// Bytes that F-RTO may still send beyond the congestion window.
    frto: u64,
}

impl CongestionCheck {
    /// Checks, after a turn of the sender, that new data was sent only while less than the congestion window was in flight,
    /// apart from a tail loss probe (RFC 8985 section 7.3), limited transmit (RFC 3042: two segments), rounding up to
    /// segments, and two segments after a time-out, by which F-RTO finds out whether it was spurious (RFC 5682 section 3.1
    /// step 2b). The peer has acknowledged the bytes up to `acked`.
    pub(crate) fn observe(&mut self, info: &Info, acked: StreamOffset) {
        let Some(before) = self.before.replace(*info) else { return };
        assert!(info.cwnd > 0 && info.ssthresh > 0, "{info:?}");
        let new = info.counters.bytes_out - before.counters.bytes_out;
        let probed = info.counters.tlp_probes > before.counters.tlp_probes;
        // A model of the path may cut the window at once, after the turn has sent.
        let window = if info.pacing_rate.is_some() { info.cwnd.max(before.cwnd) } else { info.cwnd };
        let allowed = window + 4 * info.emss as u64;
        if info.counters.rto_expired > before.counters.rto_expired {
            self.frto = 2 * info.emss as u64;
        }
        if new > 0 && !probed && info.in_flight > allowed {
            assert!(new <= self.frto, "sent beyond the congestion window: {before:?}, then {info:?}");
            self.frto -= new;
        }
        // A partly acknowledged segment counts in full. It may be longer than the EMSS and the path MTU: a probe of the
        // path MTU is, which was among the new bytes of its turn.
        let outstanding = info.counters.bytes_out - acked.min(info.counters.bytes_out);
        let probe = if info.counters.mtu_probes > before.counters.mtu_probes { new } else { 0 };
        self.largest = self.largest.max(u64::from(info.path_mtu)).max(probe);
        let most = outstanding + self.largest.max(1500);
        assert!(info.in_flight <= most, "more in flight than the {outstanding} outstanding: {info:?}");
    }
}
