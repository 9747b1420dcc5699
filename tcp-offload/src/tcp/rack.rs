//! RACK loss detection and tail loss probes (RFC 8985). Variables have the RFC's names.

use std::time::Duration;

use super::{TcpConfig, queue::SentSegment, rtt::Rtt};
use crate::{
    seq::StreamOffset,
    time::{Instant, nanos},
};

/// Recoveries without a D-SACK after which the reordering window shrinks back (section 6.2 step 4).
const REO_WND_PERSIST: u32 = 16;

/// Largest number of doublings of the allowance for delayed ACKs: from 2 to 256 ms, more than the 200 ms of Linux.
const MAX_DOUBLINGS: u32 = 7;

/// Selectively acknowledged segments that prove a loss on a path without observed reordering (RFC 6675 section 2).
pub(super) const DUP_THRESH: usize = 3;

/// `RACK_sent_after`: whether the first was sent after the second; ties are broken by position.
pub(super) fn sent_after(t1: Instant, end1: StreamOffset, t2: Instant, end2: StreamOffset) -> bool {
    t1 > t2 || t1 == t2 && end1 > end2
}

/// The state of RFC 8985 section 5.3.
#[derive(Debug, Clone, Default)]
pub(super) struct Rack {
    pub xmit_ts: Instant,
    pub end_seq: StreamOffset,
    /// `RACK.rtt`, in nanoseconds.
    rtt_ns: u64,
    fack: StreamOffset,
    reordering_seen: bool,
    dsack_round: Option<StreamOffset>,
    reo_wnd_mult: u32,
    reo_wnd_persist: u32,
}

impl Rack {
    pub(super) fn new() -> Self {
        Self { reo_wnd_mult: 1, ..Self::default() }
    }

    /// Steps 2 and 3, for an entry that was newly acknowledged, cumulatively or selectively. `echo_before`: the ACK's
    /// timestamp shows that it answers an earlier transmission of the entry.
    pub(super) fn delivered(
        &mut self,
        now: Instant,
        entry: &SentSegment,
        echo_before: bool,
        min_rtt: Option<Duration>,
    ) {
        if entry.end > self.fack {
            self.fack = entry.end;
        } else if entry.end < self.fack && !entry.retransmitted {
            self.reordering_seen = true;
        }
        let rtt_ns = now.nanos_since(entry.sent);
        if entry.retransmitted && (echo_before || min_rtt.is_some_and(|min| rtt_ns < nanos(min))) {
            return;
        }
        if sent_after(entry.sent, entry.end, self.xmit_ts, self.end_seq) {
            self.xmit_ts = entry.sent;
            self.end_seq = entry.end;
            self.rtt_ns = rtt_ns;
        }
    }

    /// `RACK.rtt`: the round-trip time of the segment delivered last that was sent last.
    pub(super) fn rtt(&self) -> Duration {
        Duration::from_nanos(self.rtt_ns)
    }

    /// The first part of step 4: D-SACKs widen the reordering window, at most once per round trip.
    pub(super) fn adapt(&mut self, una: StreamOffset, nxt: StreamOffset, dsack: bool) {
        if self.dsack_round.is_some_and(|round| una >= round) {
            self.dsack_round = None;
        }
        if dsack && self.dsack_round.is_none() {
            self.dsack_round = Some(nxt);
            self.reo_wnd_mult = self.reo_wnd_mult.saturating_add(1);
            self.reo_wnd_persist = REO_WND_PERSIST;
        }
    }

    /// Counts an ended fast or RTO recovery; after [`REO_WND_PERSIST`] of them without a D-SACK the window shrinks
    /// back.
    pub(super) fn recovered(&mut self) {
        self.reo_wnd_persist = self.reo_wnd_persist.saturating_sub(1);
        if self.reo_wnd_persist == 0 {
            self.reo_wnd_mult = 1;
        }
    }

    /// The reordering window (the second part of step 4).
    pub(super) fn reo_wnd(&self, rtt: &Rtt, in_recovery: bool, sacked: usize) -> Duration {
        if !self.reordering_seen && (in_recovery || sacked >= DUP_THRESH) {
            return Duration::ZERO;
        }
        let (Some(min), Some(srtt)) = (rtt.min(), rtt.srtt()) else { return Duration::ZERO };
        (min / 4).saturating_mul(self.reo_wnd_mult).min(srtt)
    }
}

/// Tail loss probes (section 7).
#[derive(Debug, Clone, Default)]
pub(super) struct Tlp {
    /// `SND.NXT` when the outstanding probe was sent.
    pub end_seq: Option<StreamOffset>,
    pub is_retrans: bool,
    /// A round-trip time was measured since the last probe.
    pub measured: bool,
    /// The allowance for the peer's delayed ACK, in nanoseconds, and its least value. See [`Tlp::learn`].
    allowance_ns: u64,
    least_ns: u64,
}

/// The outcome of the outstanding probe according to an ACK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProbeOutcome {
    /// No probe is outstanding, its outcome is still open, or nothing was lost.
    Nothing,
    /// The probe repaired the only loss: congestion control must react to it.
    Repaired,
    /// The probe was spurious: the ACK was only late.
    Late,
}

impl Tlp {
    pub(super) fn new(config: &TcpConfig) -> Self {
        let least_ns = nanos(config.tlp_ack_delay);
        Self { allowance_ns: least_ns, least_ns, ..Self::default() }
    }

    /// Discards the outstanding probe when a recovery begins (section 7.1).
    pub(super) fn reset(&mut self) {
        self.end_seq = None;
        self.is_retrans = false;
    }

    /// The allowance for the peer's delayed ACK (section 7.2), in nanoseconds.
    pub(super) fn allowance_ns(&self) -> u64 {
        self.allowance_ns
    }

    /// Adapts the allowance to a probe's outcome. A peer does not announce its delay, and a sender that probes early never
    /// observes it. Therefore the allowance begins with [`TcpConfig::tlp_ack_delay`], which covers a peer of our kind, doubles
    /// with each spurious probe, and returns to its least value when a probe repairs a loss, because a longer wait would have
    /// delayed the repair.
    pub(super) fn learn(&mut self, outcome: ProbeOutcome) {
        match outcome {
            ProbeOutcome::Nothing => {}
            ProbeOutcome::Repaired => self.allowance_ns = self.least_ns,
            ProbeOutcome::Late => {
                let most = self.least_ns.saturating_mul(1 << MAX_DOUBLINGS);
                self.allowance_ns = self.allowance_ns.saturating_mul(2).min(most);
            }
        }
    }

    /// `TLP_process_ack`. `dsack_end` is the right edge of the ACK's D-SACK block; `pure_duplicate` says that the ACK
    /// acknowledges nothing new and has no SACK blocks.
    pub(super) fn acked(
        &mut self,
        ack: StreamOffset,
        dsack_end: Option<StreamOffset>,
        pure_duplicate: bool,
    ) -> ProbeOutcome {
        let Some(end) = self.end_seq.filter(|end| ack >= *end) else { return ProbeOutcome::Nothing };
        if self.is_retrans && dsack_end == Some(end) {
            self.end_seq = None;
            return ProbeOutcome::Late;
        } else if !self.is_retrans {
            self.end_seq = None;
        } else if ack > end {
            self.end_seq = None;
            return ProbeOutcome::Repaired;
        } else if pure_duplicate {
            self.end_seq = None;
            return ProbeOutcome::Late;
        }
        ProbeOutcome::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    fn at(n: u64) -> Instant {
        Instant::ZERO + us(n)
    }

    fn entry(start: u64, sent: u64, retransmitted: bool) -> SentSegment {
        SentSegment { end: start + 100, retransmitted, ..SentSegment::fin(start, at(sent)) }
    }

    fn rtt(srtt: u64) -> Rtt {
        let mut rtt = Rtt::new(&TcpConfig::default());
        rtt.sample(at(srtt), at(0));
        rtt
    }

    #[test]
    fn rfc8985_s6_2_step2_ambiguous_retransmissions_are_ignored() {
        let mut rack = Rack::new();
        rack.delivered(at(100), &entry(0, 10, false), false, Some(us(50)));
        assert_eq!((rack.xmit_ts, rack.rtt()), (at(10), us(90)));
        rack.delivered(at(120), &entry(100, 100, true), false, Some(us(50)));
        assert_eq!(rack.xmit_ts, at(10), "the ACK arrived faster than the path allows");
        rack.delivered(at(200), &entry(100, 100, true), true, Some(us(50)));
        assert_eq!(rack.xmit_ts, at(10), "the echo is that of an earlier transmission");
        rack.delivered(at(200), &entry(100, 100, true), false, Some(us(50)));
        assert_eq!((rack.xmit_ts, rack.rtt()), (at(100), us(100)));
    }

    #[test]
    fn rfc8985_s6_2_step3_originals_behind_fack_show_reordering() {
        let mut rack = Rack::new();
        rack.delivered(at(10), &entry(500, 0, false), false, None);
        rack.delivered(at(11), &entry(100, 0, true), false, None);
        assert!(!rack.reordering_seen);
        rack.delivered(at(11), &entry(200, 0, false), false, None);
        assert!(rack.reordering_seen);
    }

    #[test]
    fn rfc8985_s6_2_step4_the_window_adapts_to_dsacks_and_back() {
        let mut rack = Rack::new();
        let rtt = rtt(400);
        assert_eq!(rack.reo_wnd(&rtt, false, 2), us(100));
        assert_eq!(rack.reo_wnd(&rtt, false, 3), us(0));
        assert_eq!(rack.reo_wnd(&rtt, true, 0), us(0));
        rack.reordering_seen = true;
        assert_eq!(rack.reo_wnd(&rtt, true, 9), us(100));
        rack.adapt(0, 1000, true);
        rack.adapt(500, 1500, true);
        assert_eq!(rack.reo_wnd(&rtt, true, 9), us(200), "once a round");
        for una in 1..9 {
            rack.adapt(una * 1000, una * 1000 + 1000, true);
        }
        assert_eq!(rack.reo_wnd(&rtt, true, 9), us(400), "never above SRTT");
        for _ in 0..REO_WND_PERSIST {
            rack.recovered();
        }
        assert_eq!(rack.reo_wnd(&rtt, true, 9), us(100));
    }

    #[test]
    fn rfc8985_s7_4_2_the_outcome_of_a_probe_follows_from_the_ack() {
        let probe = |is_retrans| Tlp { end_seq: Some(1000), is_retrans, ..Tlp::default() };
        let mut tlp = probe(true);
        assert_eq!(tlp.acked(900, None, false), ProbeOutcome::Nothing);
        assert_eq!(tlp.acked(1000, None, false), ProbeOutcome::Nothing);
        assert_eq!(tlp.end_seq, Some(1000), "undecided");
        assert_eq!(tlp.acked(1100, None, false), ProbeOutcome::Repaired);
        let mut tlp = probe(true);
        assert_eq!(tlp.acked(1100, Some(1000), false), ProbeOutcome::Late);
        assert_eq!(tlp.end_seq, None);
        let mut tlp = probe(true);
        assert_eq!(tlp.acked(1000, None, true), ProbeOutcome::Late);
        assert_eq!(tlp.end_seq, None);
        assert_eq!(probe(false).acked(1100, None, false), ProbeOutcome::Nothing);
    }
}
