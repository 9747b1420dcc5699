//! The state of loss recovery: its phase, proportional rate reduction (RFC 9937), and the values to restore when it was
//! spurious.

use crate::{seq::StreamOffset, time::Instant};

/// The phase of loss recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecoveryPhase {
    /// No recovery.
    Open,
    /// Fast recovery, until `high` is acknowledged.
    Recovery {
        /// `SND.NXT` when it began: the `RecoveryPoint`.
        high: StreamOffset,
        prr: Prr,
    },
    /// After a retransmission time-out, until `high` is acknowledged.
    Loss {
        /// `SND.NXT` when the time-out fired.
        high: StreamOffset,
        /// Whether the time-out may still turn out spurious.
        frto: Frto,
    },
}

/// The steps of SACK-enhanced F-RTO (RFC 5682 section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frto {
    /// Conventional recovery.
    Off,
    /// Step 2: waits for the ACK of the first retransmission.
    Retransmitted,
    /// Step 2b: sends up to this many new segments instead of retransmitting.
    SendNew(u8),
    /// Step 3: waits for the next ACK.
    Sent,
}

/// Proportional rate reduction of RFC 9937, which obsoletes RFC 6937: below `ssthresh`, the conservative reduction bound, and the
/// slow start reduction bound only for an ACK that advances `SND.UNA` without a sign of another loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prr {
    delivered: u64,
    out: u64,
    recover_fs: u64,
}

impl Prr {
    pub(super) fn begin(flight: u64) -> Self {
        Self { delivered: 0, out: 0, recover_fs: flight.max(1) }
    }

    /// The window after an ACK that delivered `newly` bytes, with `pipe` bytes in the network. `safe`: it has advanced `SND.UNA`
    /// and shown no loss (`SafeACK`).
    pub(super) fn window(&mut self, newly: u64, pipe: u64, ssthresh: u64, smss: u64, safe: bool) -> u64 {
        self.delivered += newly;
        let count = if pipe > ssthresh {
            (self.delivered.saturating_mul(ssthresh)).div_ceil(self.recover_fs).saturating_sub(self.out)
        } else {
            let limit = self.delivered.saturating_sub(self.out).max(newly) + if safe { smss } else { 0 };
            (ssthresh - pipe).min(limit)
        };
        // The first retransmission is always allowed: it repairs the loss that started the recovery.
        let least = if self.out == 0 { smss } else { 0 };
        // Never zero: when all is lost and nothing was delivered, the next segment still goes out.
        (pipe + count.max(least)).max(smss)
    }

    /// Counts bytes sent, new or retransmitted.
    pub(super) fn sent(&mut self, bytes: u64) {
        self.out += bytes;
    }
}

/// The state to restore when a reduction turns out spurious (RFC 4015, RFC 9438 section 4.9).
#[derive(Debug, Clone, Copy)]
pub(super) struct Undo {
    pub cwnd: u64,
    pub ssthresh: u64,
    /// The range of offsets that may be retransmitted: `SND.UNA` and `SND.NXT` when the recovery began.
    pub from: StreamOffset,
    pub to: StreamOffset,
    /// Retransmissions that no D-SACK has reported as superfluous yet.
    pub unproven: u32,
    /// When the first segment was retransmitted, if any.
    pub first_resent: Option<Instant>,
}

impl Undo {
    /// Records a retransmission.
    pub(super) fn resent(&mut self, now: Instant) {
        self.unproven += 1;
        self.first_resent.get_or_insert(now);
    }

    /// Processes a D-SACK for `left..right`. Returns whether all retransmissions were superfluous.
    pub(super) fn duplicate(&mut self, left: StreamOffset, right: StreamOffset) -> bool {
        if self.first_resent.is_none() || left < self.from || right > self.to {
            return false;
        }
        self.unproven = self.unproven.saturating_sub(1);
        self.unproven == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u64 = 1000;

    /// RFC 6937 section 3.1, first example: 20 segments in flight, one lost, target 10.
    #[test]
    fn rfc6937_s3_1_a_single_loss_sends_every_other_ack() {
        let mut prr = Prr::begin(20 * MSS);
        let mut pipe = 18 * MSS;
        let mut sent = 0;
        // ACKs 3 to 19; two new segments went out before recovery by limited transmit.
        for ack in 3..=19 {
            if ack > 3 {
                pipe -= MSS;
            }
            let window = prr.window(MSS, pipe, 10 * MSS, MSS, false);
            while pipe + MSS <= window {
                pipe += MSS;
                prr.sent(MSS);
                sent += 1;
            }
        }
        assert!((10 * MSS..=11 * MSS).contains(&pipe), "{pipe}");
        assert!((8..=9).contains(&sent), "{sent}");
    }

    /// Segments sent for each of three ACKs after 15 of 20 segments were lost.
    fn sent_after_many_losses(safe: bool) -> Vec<u64> {
        let mut prr = Prr::begin(20 * MSS);
        let mut pipe = 4 * MSS;
        let mut sent = Vec::new();
        for _ in 17..=19 {
            let window = prr.window(MSS, pipe, 10 * MSS, MSS, safe);
            let before = pipe;
            while pipe + MSS <= window {
                pipe += MSS;
                prr.sent(MSS);
            }
            sent.push((pipe - before) / MSS);
            pipe -= MSS;
        }
        sent
    }

    /// Second example of RFC 6937: the window rises by one segment an ACK from what was delivered.
    #[test]
    fn rfc6937_s3_1_many_losses_slow_start_back() {
        assert_eq!(sent_after_many_losses(true), [2, 2, 2]);
    }

    /// Linux's `prr-ss-ack-below-snd_una-cubic.pkt`.
    #[test]
    fn rfc9937_s6_2_an_ack_that_advances_nothing_lets_as_much_be_sent_as_was_delivered() {
        assert_eq!(sent_after_many_losses(false), [1, 1, 1]);
    }

    #[test]
    fn the_first_retransmission_is_always_allowed() {
        let mut prr = Prr::begin(100 * MSS);
        assert!(prr.window(1, 90 * MSS, 50 * MSS, MSS, false) >= 91 * MSS);
    }
}
