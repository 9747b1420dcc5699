//! Processing of acknowledgments on the send side: delivered segments, detected losses, the begin and end of
//! recoveries, detection of spurious ones, and the change of the window.

use std::time::Duration;

use super::Sender;
use crate::{
    link::Link,
    seq::{SeqNum, StreamOffset},
    tcp::{
        TcpCounters,
        clock::Clock,
        congestion::{Acked, Congestion, Window},
        queue::{Block, SentSegment},
        rack::ProbeOutcome,
        recovery::{Frto, Prr, RecoveryPhase, Undo},
        timers::{Timer, Timers},
    },
    time::Instant,
};

/// Duplicate ACKs that prove a loss without SACK (RFC 5681 section 3.2).
const DUP_ACKS: u32 = 3;

/// An acceptable acknowledgment, in offsets.
#[derive(Debug, Clone, Copy)]
pub(in crate::tcp) struct Ack<'a> {
    pub now: Instant,
    pub number: StreamOffset,
    /// The segment's sequence number, and its window in bytes.
    pub seq: SeqNum,
    pub window: u64,
    /// SACK blocks above `number`.
    pub blocks: &'a [Block],
    /// The D-SACK block, if there was one.
    pub dsack: Option<Block>,
    /// The timestamp echoed.
    pub echo: Option<u32>,
    /// It has no payload, SYN or FIN, so it can be a duplicate ACK.
    pub bare: bool,
    /// It carries ECN-Echo, and ECN is negotiated: the window does not grow by this ACK (RFC 3168 section 6.1.2).
    pub marked: bool,
}

/// What an ACK has changed, for the rules of loss recovery.
struct Progress {
    /// Bytes by which `SND.UNA` advanced.
    acked: Option<u64>,
    /// It is a duplicate ACK.
    duplicate: bool,
    /// It is the first one to cover the first segment that was retransmitted.
    first: bool,
    delivery: Delivery,
}

/// The segments that an ACK newly reports as delivered.
#[derive(Debug, Default)]
struct Delivery {
    bytes: u64,
    /// Whether any of them was sent only once.
    original: bool,
    /// Whether any of them was retransmitted.
    retransmitted: bool,
    /// When the latest segment with an unambiguous round-trip time was sent, among those sent once.
    sample_original: Option<Instant>,
    /// The same among retransmitted segments.
    sample_retransmitted: Option<Instant>,
}

impl Delivery {
    fn sample(&self) -> Option<Instant> {
        self.sample_original.max(self.sample_retransmitted)
    }
}

impl Sender {
    /// Processes an acceptable ACK. Returns whether `SND.UNA` advanced.
    ///
    /// `PREDICTED`: header prediction has admitted the ACK ([`Self::is_undisturbed`]), and it acknowledges new data. Then the rules
    /// that are left out have no effect.
    #[expect(clippy::inline_always, reason = "each arm has one call of it")]
    #[inline(always)]
    pub(in crate::tcp) fn on_ack<const PREDICTED: bool>(
        &mut self,
        link: &mut dyn Link,
        clock: Option<&Clock>,
        counters: &mut TcpCounters,
        ack: &Ack<'_>,
    ) -> bool {
        self.flight_before = self.flight();
        let (una, edge) = (self.una, self.edge);
        let had_data = PREDICTED || !self.queue.is_empty();
        let resent =
            !PREDICTED && self.queue.front().is_some_and(|first| first.retransmitted && !first.sacked);
        self.update_window(ack.seq, ack.number, ack.window);
        if self.paced.is_some() {
            self.begin_sample(ack);
        }
        let delivery = self.deliver::<PREDICTED>(link, clock, ack);
        let advanced = PREDICTED || ack.number > una;
        if advanced {
            self.advance(ack.now, ack.number, !PREDICTED && ack.marked);
        }
        let sampled = delivery.sample();
        if let Some(sent) = sampled {
            self.rtt.sample(ack.now, sent);
            self.tlp.measured = true;
        }
        self.rack.adapt(self.una, self.nxt, !PREDICTED && ack.dsack.is_some());
        let acked = advanced.then(|| ack.number - una);
        if PREDICTED {
            self.reorder_at = None;
            self.grow_open(ack, acked, &delivery);
        } else {
            let duplicate = !advanced && ack.bare && had_data && edge == self.edge && ack.number == una;
            let first = resent && advanced && self.undo.as_ref().is_some_and(|undo| undo.from == una);
            self.recover(clock, counters, ack, &Progress { acked, duplicate, first, delivery });
        }
        if self.paced.is_some() {
            self.end_sample(ack.now, sampled);
        }
        if advanced {
            self.waiting_since = Some(ack.now).filter(|_| !self.queue.is_empty());
        }
        if had_data && self.queue.is_empty() {
            self.idle_since = Some(ack.now);
        }
        advanced
    }

    /// The part of [`Self::on_ack`] that concerns probes, losses, recovery and the congestion window.
    fn recover(
        &mut self,
        clock: Option<&Clock>,
        counters: &mut TcpCounters,
        ack: &Ack<'_>,
        progress: &Progress,
    ) {
        let &Progress { acked, duplicate, first, ref delivery } = progress;
        let advanced = acked.is_some();
        self.count_duplicates(advanced, duplicate, delivery.bytes);
        counters.dsacks_in += u64::from(ack.dsack.is_some());
        if self.probe_repaired(ack, duplicate) {
            self.reduce_once(Congestion::Loss);
        }
        self.detect_spurious(clock, counters, ack, first);
        let repaired = self.leave_recovery();
        self.step_frto(counters, ack, advanced, delivery);
        let lost = self.handle_losses(ack.now, counters);
        let held = repaired || ack.marked && self.phase == RecoveryPhase::Open;
        if !held {
            self.grow(ack, acked, delivery, lost);
        }
    }

    /// Whether nothing is lost, retransmitted, selectively acknowledged or probed for, nor beyond the peer's window, so that header
    /// prediction may admit an ACK of new data.
    #[inline]
    pub(in crate::tcp) fn is_undisturbed(&self) -> bool {
        self.sack
            && self.phase == RecoveryPhase::Open
            && !self.queue.is_disordered()
            && !self.queue.has_lost()
            && self.tlp.end_seq.is_none()
            && !self.is_blocked_by_window()
    }

    /// Moves `SND.UNA` to `number`.
    #[inline]
    fn advance(&mut self, now: Instant, number: StreamOffset, marked: bool) {
        let acked = number - self.una;
        self.una = number;
        self.progress = now;
        // The path delivers: the next time-out begins without back-off, even if only retransmitted segments were
        // delivered, for which Karn's rule allows no measurement.
        self.rtt.forgive();
        self.prober.acknowledged(self.una);
        self.control.echoed(self.una, self.nxt, acked, marked);
    }

    /// The window rule of RFC 9293 section 3.10.7.4 (fifth check): older segments do not change it.
    pub(in crate::tcp) fn update_window(&mut self, seq: SeqNum, number: StreamOffset, window: u64) {
        if self.wl1.before(seq) || self.wl1 == seq && self.wl2 <= number {
            (self.wl1, self.wl2) = (seq, number);
            self.edge = number + window;
            self.max_window = self.max_window.max(window);
        }
    }

    /// Whether the peer's window is that of its segment with number `seq`.
    #[inline]
    pub(in crate::tcp) fn has_window_of(&self, seq: SeqNum) -> bool {
        self.wl1 == seq
    }

    /// Processes the next segment in order, `seq`, whose acknowledgment number and window are those of the segment before it.
    #[inline]
    pub(in crate::tcp) fn repeat_ack(&mut self, seq: SeqNum) {
        self.wl1 = seq;
        if !self.queue.is_empty() {
            self.flight_before = self.flight();
        }
    }

    /// Removes acknowledged segments and marks selectively acknowledged ones. `PREDICTED`: none was retransmitted or selectively
    /// acknowledged.
    #[expect(clippy::inline_always, reason = "each arm has one call of it")]
    #[inline(always)]
    fn deliver<const PREDICTED: bool>(
        &mut self,
        link: &mut dyn Link,
        clock: Option<&Clock>,
        ack: &Ack<'_>,
    ) -> Delivery {
        let mut delivery = Delivery { original: PREDICTED, ..Delivery::default() };
        let min_rtt = if PREDICTED { None } else { self.rtt.min() };
        let after_timeout = !PREDICTED && matches!(self.phase, RecoveryPhase::Loss { .. });
        let (rack, prober) = (&mut self.rack, &mut self.prober);
        let mut note = |delivery: &mut Delivery, entry: &SentSegment| {
            let retransmitted = !PREDICTED && entry.retransmitted;
            let echo_before = match (clock, ack.echo) {
                (Some(clock), Some(echo)) if !PREDICTED => clock.echoes_before(echo, entry.sent),
                _ => false,
            };
            rack.delivered(ack.now, entry, echo_before, min_rtt);
            if !retransmitted {
                prober.delivered(entry.end, entry.bytes());
            }
            delivery.bytes += entry.bytes();
            delivery.original |= !retransmitted;
            delivery.retransmitted |= retransmitted;
            // After a time-out the echoed timestamp distinguishes transmissions, which are at least one tick apart.
            let sample = if !retransmitted {
                &mut delivery.sample_original
            } else if after_timeout && ack.echo.is_some() && !echo_before {
                &mut delivery.sample_retransmitted
            } else {
                return;
            };
            *sample = (*sample).max(Some(entry.sent));
        };
        let mut end = self.una;
        // A predicted number is nearly always the end of a segment, and the one behind it need not be looked at. In general a part
        // of a divided segment may have been acknowledged before.
        while (!PREDICTED || end < ack.number)
            && let Some(payload) = self.queue.pop_acked(ack.number, |entry| {
                end = entry.end;
                if PREDICTED || !entry.sacked {
                    note(&mut delivery, entry);
                }
            })
        {
            payload.release(link);
        }
        // Segments that waited beyond a gap until a retransmission filled it do not measure the path.
        if delivery.retransmitted {
            delivery.sample_original = None;
        }
        if !PREDICTED && !ack.blocks.is_empty() {
            let paced = &mut self.paced;
            self.queue.sack(ack.blocks, |entry| {
                note(&mut delivery, entry);
                if let Some(paced) = paced {
                    paced.sacked(ack.now, entry.start, entry.end);
                }
            });
        }
        delivery
    }

    /// Counts duplicate ACKs: without SACK each stands for a segment that has left the network (RFC 6582).
    fn count_duplicates(&mut self, advanced: bool, duplicate: bool, delivered: u64) {
        if self.sack {
            return;
        }
        if duplicate {
            self.duplicates += 1;
        } else if advanced {
            let left = (delivered / self.window.smss.max(1)).saturating_sub(1) as u32;
            let partial = matches!(self.phase, RecoveryPhase::Recovery { high, .. } if self.una < high);
            self.duplicates = if partial { self.duplicates.saturating_sub(left) } else { 0 };
        }
    }

    fn probe_repaired(&mut self, ack: &Ack<'_>, duplicate: bool) -> bool {
        let pure_duplicate = duplicate && ack.blocks.is_empty();
        let outcome = self.tlp.acked(ack.number, ack.dsack.map(|d| d.1), pure_duplicate);
        self.tlp.learn(outcome);
        outcome == ProbeOutcome::Repaired
    }

    /// Ends recovery when everything sent before it began is acknowledged. Returns whether fast recovery has just
    /// ended: then the window is the reduced one and does not grow by the same ACK.
    fn leave_recovery(&mut self) -> bool {
        let (RecoveryPhase::Recovery { high, .. } | RecoveryPhase::Loss { high, .. }) = self.phase else {
            return false;
        };
        if self.una < high {
            return false;
        }
        let fast = matches!(self.phase, RecoveryPhase::Recovery { .. });
        if fast && self.paced.is_none() {
            self.window.cwnd = self.window.ssthresh;
        }
        self.phase = RecoveryPhase::Open;
        self.recovered_to = high;
        self.duplicates = 0;
        self.rack.recovered();
        fast
    }

    /// Detects spurious retransmissions by timestamps (Eifel, RFC 3522) and by D-SACK (RFC 3708), and undoes the
    /// reduction. The echo is conclusive only in the `first` ACK that covers the first retransmitted segment (RFC 3522
    /// section 3.2): beyond a gap the peer echoes the timestamp before the gap (RFC 7323 section 4.3), whichever
    /// transmission has arrived.
    fn detect_spurious(
        &mut self,
        clock: Option<&Clock>,
        counters: &mut TcpCounters,
        ack: &Ack<'_>,
        first: bool,
    ) {
        let Some(undo) = &mut self.undo else { return };
        let by_dsack = ack.dsack.is_some_and(|(left, right)| undo.duplicate(left, right));
        let by_echo = first
            && match (clock, ack.echo, undo.first_resent) {
                (Some(clock), Some(echo), Some(first)) => clock.echoes_before(echo, first),
                _ => false,
            };
        if by_dsack || by_echo {
            self.restore(counters);
        }
    }

    fn restore(&mut self, counters: &mut TcpCounters) {
        let Some(undo) = self.undo.take() else { return };
        counters.undone += 1;
        self.control.undo();
        self.window.cwnd = self.window.cwnd.max(undo.cwnd);
        self.window.ssthresh = undo.ssthresh;
        self.queue.forget_losses();
        self.phase = RecoveryPhase::Open;
        self.recovered_to = self.una;
        self.duplicates = 0;
        self.rtt.forgive();
    }

    /// RFC 5682 section 3.1, steps 2 and 3.
    fn step_frto(&mut self, counters: &mut TcpCounters, ack: &Ack<'_>, advanced: bool, delivery: &Delivery) {
        let RecoveryPhase::Loss { high, frto } = &mut self.phase else { return };
        match *frto {
            Frto::Retransmitted if advanced => *frto = Frto::SendNew(2),
            Frto::Sent if ack.blocks.iter().any(|b| b.1 > *high) || delivery.bytes == 0 => {
                *frto = Frto::Off;
                self.window.cwnd = self.window.smss * 3;
            }
            Frto::Sent if delivery.original => self.restore(counters),
            _ => {}
        }
    }

    /// Detects losses: RFC 8985 section 6.2 steps 4 and 5, or RFC 6582 without SACK. Returns whether segments are newly
    /// lost. `reorder_at` becomes the time at which others will be, unless they are acknowledged.
    fn detect_losses(&mut self, now: Instant) -> bool {
        self.reorder_at = None;
        if !self.sack {
            return self.detect_by_duplicates(now);
        }
        if !self.queue.is_disordered() {
            return false;
        }
        let reo_wnd = self.reo_wnd();
        let (rtt, prober) = (self.rack.rtt(), &mut self.prober);
        let (control, paced) = (&mut self.control, &mut self.paced);
        let mut window_open = false;
        let new = self.queue.mark_lost_while(self.rack.xmit_ts, self.rack.end_seq, |entry| {
            window_open = entry.sent + rtt + reo_wnd > now;
            if !window_open {
                prober.lost(entry.bytes());
                if let Some(paced) = paced.as_deref_mut().filter(|_| !prober.is(entry.end)) {
                    paced.lost(&mut **control, &self.window, (now, entry.start, entry.end), self.sack);
                }
            }
            !window_open
        });
        // One timer for all segments whose reordering window is open: when it expires, all of these windows have ended.
        let last = if window_open {
            self.queue.last_sent_before(self.rack.xmit_ts, self.rack.end_seq)
        } else {
            None
        };
        self.reorder_at = last.map(|sent| sent + rtt + reo_wnd);
        new
    }

    /// When the latest reordering window ends of the segments that may be lost.
    pub(in crate::tcp) fn reorder_at(&self) -> Option<Instant> {
        self.reorder_at
    }

    /// Sets the reordering timer after an ACK that acknowledged nothing new. The probe timer is disarmed once
    /// SACK reported something.
    pub(in crate::tcp) fn arm_reorder(&self, timers: &mut Timers) {
        match self.reorder_at {
            Some(at) => timers.arm(Timer::Reorder, at),
            None => timers.disarm(Timer::Reorder),
        }
        if !self.probes_apply() {
            timers.disarm(Timer::Probe);
        }
    }

    pub(super) fn reo_wnd(&self) -> Duration {
        self.rack.reo_wnd(&self.rtt, self.phase != RecoveryPhase::Open, self.queue.sacked())
    }

    fn detect_by_duplicates(&mut self, now: Instant) -> bool {
        // The duplicate ACKs of a lost retransmission are those of its original: only a time-out detects its loss.
        let original = self.queue.front().is_some_and(|e| !e.retransmitted && !e.lost);
        let partial = matches!(self.phase, RecoveryPhase::Recovery { .. });
        let fresh =
            self.phase == RecoveryPhase::Open && self.duplicates >= DUP_ACKS && self.una >= self.recovered_to;
        if original && (partial || fresh) {
            self.note_front_lost(now);
            self.queue.mark_lost(0);
            return true;
        }
        false
    }

    /// The reordering timer has fired (RFC 8985 section 6.2, step 5).
    pub(in crate::tcp) fn on_reorder_timer(&mut self, now: Instant, counters: &mut TcpCounters) {
        self.flight_before = self.flight();
        self.handle_losses(now, counters);
    }

    /// Detects losses and enters recovery for the first one, unless a path MTU probe alone is lost (RFC 4821 section
    /// 4). Returns whether segments are newly lost.
    fn handle_losses(&mut self, now: Instant, counters: &mut TcpCounters) -> bool {
        if !self.detect_losses(now) {
            return false;
        }
        let open = self.phase == RecoveryPhase::Open;
        if open && self.queue.only_lost().is_some_and(|end| self.prober.is(end)) {
            self.prober.lost_alone(self.nxt, false);
            return true;
        }
        self.prober.inconclusive();
        if open {
            self.enter_recovery(counters);
        }
        true
    }

    fn enter_recovery(&mut self, counters: &mut TcpCounters) {
        counters.recoveries += 1;
        self.remember();
        let prr = Prr::begin(self.flight());
        self.reduce(self.flight_before, Congestion::Loss);
        // Marks in this window are answered by the same reduction (RFC 3168 section 6.1.2).
        self.marked_to = self.nxt;
        self.phase = RecoveryPhase::Recovery { high: self.nxt, prr };
        self.tlp.reset();
    }

    pub(super) fn remember(&mut self) {
        let undo = Undo {
            cwnd: self.window.cwnd,
            ssthresh: self.window.ssthresh,
            from: self.una,
            to: self.nxt,
            unproven: 0,
            first_resent: None,
        };
        match &mut self.undo {
            Some(last) => **last = undo,
            None => self.undo = Some(Box::new(undo)),
        }
    }

    /// Reduces the window at once, outside of recovery: for ECN, or for a loss that a probe has repaired.
    ///
    /// A mark reduces the window, as in Linux, not the flight size: the flight of an application that sends little says nothing
    /// about the path, and would leave one segment after the first mark. Two segments remain even if all are marked. One would
    /// wait for a delayed ACK each round trip.
    fn reduce_once(&mut self, sign: Congestion) {
        if self.phase != RecoveryPhase::Open {
            return;
        }
        let marked = sign == Congestion::Marked;
        self.reduce(if marked { self.window.cwnd } else { self.flight_before }, sign);
        let least = if marked { 2 * self.window.smss } else { 0 };
        self.window.cwnd = self.window.cwnd.min(self.window.ssthresh).max(least);
    }

    /// Reacts to ECN-Echo, at most once per window (RFC 3168 section 6.1.2). Returns whether the window was reduced.
    pub(in crate::tcp) fn on_ecn_echo(&mut self) -> bool {
        // The ACK of `marked_to` itself was sent before CWR can have arrived.
        if self.una <= self.marked_to || self.phase != RecoveryPhase::Open {
            return false;
        }
        self.marked_to = self.nxt;
        self.reduce_once(Congestion::Marked);
        true
    }

    /// Grows the window, or in fast recovery sets it by PRR. `lost` says whether the ACK has shown a loss.
    fn grow(&mut self, ack: &Ack<'_>, acked: Option<u64>, delivery: &Delivery, lost: bool) {
        match self.phase {
            RecoveryPhase::Recovery { .. } if self.paced.is_some() => {}
            RecoveryPhase::Recovery { .. } => {
                // Without SACK a duplicate ACK delivers one segment (RFC 6675 section 3 in spirit).
                let duplicate = u64::from(!self.sack && acked.is_none()) * self.window.smss;
                let newly = delivery.bytes + duplicate;
                let pipe = self.pipe();
                let Window { ssthresh, smss, .. } = self.window;
                if let RecoveryPhase::Recovery { prr, .. } = &mut self.phase {
                    self.window.cwnd = prr.window(newly, pipe, ssthresh, smss, acked.is_some() && !lost);
                }
            }
            RecoveryPhase::Open => self.grow_open(ack, acked, delivery),
            RecoveryPhase::Loss { .. } => {
                if let Some(bytes) = acked {
                    self.grow_by(ack.now, bytes, delivery);
                }
            }
        }
    }

    /// Grows the window outside of recovery, if it limited the sender.
    #[inline]
    fn grow_open(&mut self, ack: &Ack<'_>, acked: Option<u64>, delivery: &Delivery) {
        if let Some(bytes) = acked.filter(|_| self.was_limited_up_to(ack.number)) {
            self.grow_by(ack.now, bytes, delivery);
        }
    }

    /// Whether the congestion window limited the sender when it had sent up to `number`.
    #[inline]
    pub(super) fn was_limited_up_to(&self, number: StreamOffset) -> bool {
        self.limited_at.is_some_and(|at| number <= at)
    }

    /// Grows the window by an ACK of `bytes` new bytes.
    fn grow_by(&mut self, now: Instant, bytes: u64, delivery: &Delivery) {
        let acked = Acked {
            now,
            bytes,
            rtt: delivery.sample().map(|sent| now.since(sent)),
            srtt: self.rtt.srtt(),
            una: self.una,
            nxt: self.nxt,
            after_timeout: matches!(self.phase, RecoveryPhase::Loss { .. }),
        };
        self.control.acked(&mut self.window, &acked);
    }
}
