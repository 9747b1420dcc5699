//! The send side of a connection: `SND.UNA`, `SND.NXT`, the peer's window, and what to send when by loss
//! detection, recovery and congestion control. It decides; the frames are made in `output`.

use std::time::Duration;

use super::{
    Counters, TcpConfig,
    clock::Clock,
    congestion::{self, Acked, Congestion, CongestionControl, Window},
    queue::{Block, Entry, Queue},
    rack::{ProbeOutcome, Rack, Tlp},
    recovery::{Frto, Phase, Prr, Undo},
    rtt::Rtt,
    timers::{Timer, Timers},
};
use crate::{
    link::Link,
    seq::{SeqNum, StreamOffset},
    time::Instant,
};

/// Duplicate ACKs that prove a loss where there is no SACK (RFC 5681 section 3.2).
const DUP_ACKS: u32 = 3;

/// An acceptable acknowledgment, in offsets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ack<'a> {
    pub now: Instant,
    pub number: StreamOffset,
    /// The segment's sequence number, and its window in bytes.
    pub seq: SeqNum,
    pub window: u64,
    /// SACK blocks above `ack`.
    pub blocks: &'a [Block],
    /// The D-SACK block, if there was one.
    pub dsack: Option<Block>,
    /// The timestamp echoed.
    pub echo: Option<u32>,
    /// No payload, SYN or FIN: it can be a duplicate ACK.
    pub bare: bool,
}

/// Why no new segment may be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// The congestion window is full.
    Congestion,
    /// The peer's window has no room for a full segment.
    Window,
    /// Too many frames are retained.
    Frames,
}

/// The send side of one connection.
#[derive(Debug)]
pub(super) struct Sender {
    iss: SeqNum,
    una: StreamOffset,
    nxt: StreamOffset,
    /// The FIN's place in the sequence space, once it was sent.
    pub fin: Option<StreamOffset>,
    /// Right edge of the peer's window, `SND.WL1`, `SND.WL2` and `MAX.SND.WND`.
    edge: StreamOffset,
    wl1: SeqNum,
    wl2: StreamOffset,
    max_window: u64,
    pub queue: Queue,
    pub rtt: Rtt,
    pub rack: Rack,
    pub tlp: Tlp,
    control: Box<dyn CongestionControl>,
    pub window: Window,
    initial_window: u64,
    pub phase: Phase,
    prr: Prr,
    undo: Option<Undo>,
    /// Whether the peer sends SACK.
    pub sack: bool,
    duplicates: u32,
    /// RFC 6582 section 3.2: no new fast retransmit before this is acknowledged.
    recovered_to: StreamOffset,
    /// `SND.NXT` when the congestion window last stopped us.
    limited_at: Option<StreamOffset>,
    /// When `SND.UNA` last moved, or the queue ceased to be empty.
    pub progress: Instant,
    last_sent: Instant,
    idle_since: Option<Instant>,
    /// No second reduction for ECN before this is acknowledged (RFC 3168 section 6.1.2).
    marked_to: StreamOffset,
    /// When the reordering window of the last segment in doubt has passed.
    reorder_at: Option<Instant>,
}

impl Sender {
    pub(super) fn new(now: Instant, config: &TcpConfig, iss: SeqNum, smss: usize) -> Self {
        let initial_window = Window::initial(smss as u64, config.initial_window);
        Self {
            iss,
            una: 0,
            nxt: 0,
            fin: None,
            edge: 0,
            wl1: SeqNum::default(),
            wl2: 0,
            max_window: 0,
            queue: Queue::default(),
            rtt: Rtt::new(config),
            rack: Rack::new(),
            tlp: Tlp::default(),
            control: congestion::new(config.algorithm),
            window: Window { cwnd: initial_window, ssthresh: u64::MAX, smss: smss as u64 },
            initial_window,
            phase: Phase::Open,
            prr: Prr::default(),
            undo: None,
            sack: false,
            duplicates: 0,
            recovered_to: 0,
            limited_at: None,
            progress: now,
            last_sent: now,
            idle_since: Some(now),
            marked_to: 0,
            reorder_at: None,
        }
    }

    /// The sequence number of `offset`.
    pub(super) fn seq_at(&self, offset: StreamOffset) -> SeqNum {
        self.iss.add(1).add(offset as u32)
    }

    pub(super) fn iss(&self) -> SeqNum {
        self.iss
    }

    pub(super) fn una(&self) -> StreamOffset {
        self.una
    }

    pub(super) fn nxt(&self) -> StreamOffset {
        self.nxt
    }

    /// The offset of an acknowledgment number relative to `SND.UNA`: negative below it.
    pub(super) fn ahead_of_una(&self, seq: SeqNum) -> i64 {
        seq.since(self.seq_at(self.una)).into()
    }

    /// The offset of a sequence number near `SND.UNA`.
    pub(super) fn offset_of(&self, seq: SeqNum) -> Option<StreamOffset> {
        self.una.checked_add_signed(self.ahead_of_una(seq))
    }

    pub(super) fn fin_acked(&self) -> bool {
        self.fin.is_some_and(|fin| self.una > fin)
    }

    pub(super) fn max_window(&self) -> u64 {
        self.max_window
    }

    /// Bytes that the peer's window still allows.
    pub(super) fn usable(&self) -> u64 {
        self.edge.saturating_sub(self.nxt)
    }

    /// `SND.WND`.
    pub(super) fn snd_wnd(&self) -> u64 {
        self.edge.saturating_sub(self.una)
    }

    /// The handshake told the peer's first window; it is not scaled.
    pub(super) fn first_window(&mut self, seq: SeqNum, window: u64) {
        (self.wl1, self.wl2, self.edge) = (seq, 0, window);
        self.max_window = window;
    }

    /// The SMSS has changed; before any data, the initial window with it.
    pub(super) fn resize(&mut self, smss: usize, config: &TcpConfig) {
        let smss = smss as u64;
        if self.nxt == 0 {
            self.initial_window = Window::initial(smss, config.initial_window);
            self.window.cwnd = self.initial_window;
        }
        self.window.smss = smss;
        self.window.cwnd = self.window.cwnd.max(smss);
    }

    /// The SYN had to be sent more than once: one segment (RFC 5681 section 3.1).
    pub(super) fn syn_was_lost(&mut self) {
        self.rtt.syn_timed_out();
        self.window.cwnd = self.window.smss;
    }

    /// Bytes believed to be in the network.
    pub(super) fn pipe(&self) -> u64 {
        let left = if self.sack { 0 } else { u64::from(self.duplicates) * self.window.smss };
        self.queue.in_flight().saturating_sub(left)
    }

    fn flight_size(&self) -> u64 {
        self.nxt - self.una
    }

    // ----- acknowledgments -----

    /// Processes an acceptable ACK. Returns whether `SND.UNA` moved.
    pub(super) fn on_ack(
        &mut self,
        link: &mut dyn Link,
        clock: Option<&Clock>,
        counters: &mut Counters,
        ack: &Ack<'_>,
    ) -> bool {
        let (una, window_before) = (self.una, self.edge);
        let had_data = !self.queue.is_empty();
        self.update_window(ack.seq, ack.number, ack.window);
        let delivery = self.deliver(link, clock, ack);
        let advanced = ack.number > una;
        if advanced {
            self.una = ack.number;
            self.progress = ack.now;
            // The path delivers: the next time-out begins without back-off, also when only segments came through
            // that were sent twice and Karn's rule allows no measurement.
            self.rtt.forgive();
        }
        let duplicate = !advanced && ack.bare && had_data && window_before == self.edge && ack.number == una;
        self.count_duplicates(advanced, duplicate, delivery.bytes);
        if let Some(sent) = delivery.sample() {
            self.rtt.sample(ack.now, ack.now.since(sent));
            self.tlp.measured = true;
        }
        counters.dsacks_in += u64::from(ack.dsack.is_some());
        self.rack.adapt(self.una, self.nxt, ack.dsack.is_some());
        if self.probe_repaired(ack, duplicate) {
            self.reduce_once(Congestion::Loss);
        }
        self.look_for_undo(clock, counters, ack, &delivery);
        let repaired = self.leave_recovery();
        self.step_frto(counters, ack, advanced, &delivery);
        self.look_for_losses(ack.now, counters);
        if !repaired {
            self.grow(ack, advanced.then(|| ack.number - una), &delivery);
        }
        if had_data && self.queue.is_empty() {
            self.idle_since = Some(ack.now);
        }
        advanced
    }

    /// The window rule of RFC 9293 section 3.10.7.4 (fifth check): older segments do not change it.
    pub(super) fn update_window(&mut self, seq: SeqNum, number: StreamOffset, window: u64) {
        if self.wl1.before(seq) || self.wl1 == seq && self.wl2 <= number {
            (self.wl1, self.wl2) = (seq, number);
            self.edge = number + window;
            self.max_window = self.max_window.max(window);
        }
    }

    /// Takes out what is acknowledged and marks what is selectively acknowledged.
    fn deliver(&mut self, link: &mut dyn Link, clock: Option<&Clock>, ack: &Ack<'_>) -> Delivery {
        let mut delivery = Delivery::default();
        let min_rtt = self.rtt.min();
        let after_timeout = matches!(self.phase, Phase::Loss { .. });
        let rack = &mut self.rack;
        let mut note = |delivery: &mut Delivery, entry: &Entry| {
            let echo_before = match (clock, ack.echo) {
                (Some(clock), Some(echo)) => clock.echoes_before(echo, entry.sent),
                _ => false,
            };
            rack.delivered(ack.now, entry, echo_before, min_rtt);
            delivery.bytes += entry.bytes();
            delivery.original |= !entry.retransmitted;
            delivery.retransmitted |= entry.retransmitted;
            // After a time-out the echo tells transmissions apart: they are at least a tick apart.
            let sample = if !entry.retransmitted {
                &mut delivery.sample_original
            } else if after_timeout && ack.echo.is_some() && !echo_before {
                &mut delivery.sample_again
            } else {
                return;
            };
            *sample = (*sample).max(Some(entry.sent));
        };
        while let Some(entry) = self.queue.pop_acked(ack.number) {
            if !entry.sacked {
                note(&mut delivery, &entry);
            }
            if let Some(frame) = entry.frame {
                link.release(frame);
            }
        }
        // What waited beyond a gap until a retransmission filled it says nothing of the path.
        if delivery.retransmitted {
            delivery.sample_original = None;
        }
        if !ack.blocks.is_empty() {
            self.queue.sack(ack.blocks, |entry| note(&mut delivery, entry));
        }
        delivery
    }

    /// Without SACK, duplicate ACKs stand for segments that have left the network (RFC 6582).
    fn count_duplicates(&mut self, advanced: bool, duplicate: bool, delivered: u64) {
        if self.sack {
            return;
        }
        if duplicate {
            self.duplicates += 1;
        } else if advanced {
            let left = (delivered / self.window.smss.max(1)).saturating_sub(1) as u32;
            let partial = matches!(self.phase, Phase::Recovery { high } if self.una < high);
            self.duplicates = if partial { self.duplicates.saturating_sub(left) } else { 0 };
        }
    }

    fn probe_repaired(&mut self, ack: &Ack<'_>, duplicate: bool) -> bool {
        let pure_duplicate = duplicate && ack.blocks.is_empty();
        self.tlp.acked(ack.number, ack.dsack.map(|d| d.1), pure_duplicate) == ProbeOutcome::Repaired
    }

    /// Recovery ends when all is acknowledged that was sent before it began. Returns whether fast recovery has
    /// just ended: then the window is what the reduction said, and does not grow by the same ACK.
    fn leave_recovery(&mut self) -> bool {
        let (Phase::Recovery { high } | Phase::Loss { high, .. }) = self.phase else { return false };
        if self.una < high {
            return false;
        }
        let fast = matches!(self.phase, Phase::Recovery { .. });
        if fast {
            self.window.cwnd = self.window.ssthresh;
        }
        self.phase = Phase::Open;
        self.recovered_to = high;
        self.duplicates = 0;
        self.rack.recovered();
        fast
    }

    /// Eifel by timestamps (RFC 3522) and D-SACK (RFC 3708): was the retransmission for nothing?
    fn look_for_undo(
        &mut self,
        clock: Option<&Clock>,
        counters: &mut Counters,
        ack: &Ack<'_>,
        delivery: &Delivery,
    ) {
        let Some(undo) = &mut self.undo else { return };
        let by_dsack = ack.dsack.is_some_and(|(left, right)| undo.duplicate(left, right));
        let by_echo = delivery.retransmitted
            && match (clock, ack.echo, undo.first_resent) {
                (Some(clock), Some(echo), Some(first)) => clock.echoes_before(echo, first),
                _ => false,
            };
        if by_dsack || by_echo {
            self.restore(counters);
        }
    }

    fn restore(&mut self, counters: &mut Counters) {
        let Some(undo) = self.undo.take() else { return };
        counters.undone += 1;
        self.control.undo();
        self.window.cwnd = self.window.cwnd.max(undo.cwnd);
        self.window.ssthresh = undo.ssthresh;
        self.queue.forget_losses();
        self.phase = Phase::Open;
        self.recovered_to = self.una;
        self.duplicates = 0;
        self.rtt.forgive();
    }

    /// RFC 5682 section 3.1, steps 2 and 3.
    fn step_frto(&mut self, counters: &mut Counters, ack: &Ack<'_>, advanced: bool, delivery: &Delivery) {
        let Phase::Loss { high, frto } = &mut self.phase else { return };
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

    /// RFC 8985 section 6.2 steps 4 and 5; RFC 6582 without SACK.
    /// Returns whether segments are newly lost; when others will be if nothing happens is in `reorder_at`.
    fn detect_losses(&mut self, now: Instant) -> bool {
        self.reorder_at = None;
        if !self.sack {
            return self.detect_by_duplicates();
        }
        if !self.queue.is_disordered() {
            return false;
        }
        let reo_wnd = self.reo_wnd();
        let rtt = self.rack.rtt;
        let mut wait: Option<Instant> = None;
        let new = self.queue.mark_lost_where(self.rack.xmit_ts, self.rack.end_seq, |entry| {
            let due = entry.sent + rtt + reo_wnd;
            if due > now {
                wait = wait.max(Some(due));
            }
            due <= now
        });
        self.reorder_at = wait;
        new
    }

    /// When the reordering window of the last segment in doubt has passed.
    pub(super) fn reorder_at(&self) -> Option<Instant> {
        self.reorder_at
    }

    /// Sets the reordering timer after an ACK that acknowledged nothing new. A probe is not due any more once
    /// SACK reported something.
    pub(super) fn arm_reorder(&self, timers: &mut Timers) {
        match self.reorder_at {
            Some(at) => timers.arm(Timer::Reorder, at),
            None => timers.disarm(Timer::Reorder),
        }
        if !self.probes_apply() {
            timers.disarm(Timer::Probe);
        }
    }

    fn reo_wnd(&self) -> Duration {
        self.rack.reo_wnd(&self.rtt, self.phase != Phase::Open, self.queue.sacked())
    }

    fn detect_by_duplicates(&mut self) -> bool {
        let partial = matches!(self.phase, Phase::Recovery { .. })
            && self.queue.front().is_some_and(|e| !e.retransmitted);
        let fresh = self.phase == Phase::Open && self.duplicates >= DUP_ACKS && self.una >= self.recovered_to;
        if (partial || fresh) && self.queue.front().is_some_and(|e| !e.lost) {
            self.queue.mark_lost(0);
            return true;
        }
        false
    }

    /// Detects losses, and enters recovery for the first. Also called when the reordering timer fires.
    pub(super) fn look_for_losses(&mut self, now: Instant, counters: &mut Counters) {
        if self.detect_losses(now) && self.phase == Phase::Open {
            self.enter_recovery(counters);
        }
    }

    fn enter_recovery(&mut self, counters: &mut Counters) {
        counters.recoveries += 1;
        self.remember();
        self.prr = Prr::begin(self.flight_size());
        self.window.ssthresh = self.control.reduce(&self.window, self.flight_size(), Congestion::Loss);
        self.phase = Phase::Recovery { high: self.nxt };
        self.tlp.reset();
    }

    fn remember(&mut self) {
        self.undo = Some(Undo {
            cwnd: self.window.cwnd,
            ssthresh: self.window.ssthresh,
            from: self.una,
            to: self.nxt,
            unproven: 0,
            first_resent: None,
        });
    }

    /// A reduction outside of recovery, at once: ECN, and a loss that a probe has repaired.
    fn reduce_once(&mut self, sign: Congestion) {
        if self.phase == Phase::Open {
            self.window.ssthresh = self.control.reduce(&self.window, self.flight_size(), sign);
            self.window.cwnd = self.window.cwnd.min(self.window.ssthresh);
        }
    }

    /// ECN-Echo (RFC 3168 section 6.1.2): at most once a window. Returns whether CWR is to be said.
    pub(super) fn on_ecn_echo(&mut self) -> bool {
        if self.una < self.marked_to || self.phase != Phase::Open {
            return false;
        }
        self.marked_to = self.nxt;
        self.reduce_once(Congestion::Marked);
        true
    }

    /// The window grows, or PRR steers it.
    fn grow(&mut self, ack: &Ack<'_>, acked: Option<u64>, delivery: &Delivery) {
        let limited = self.limited_at.is_some_and(|at| ack.number <= at);
        match self.phase {
            Phase::Recovery { .. } => {
                // Without SACK a duplicate ACK delivers one segment (RFC 6675 section 3 in spirit).
                let duplicate = u64::from(!self.sack && acked.is_none()) * self.window.smss;
                let newly = delivery.bytes + duplicate;
                self.window.cwnd =
                    self.prr.window(newly, self.pipe(), self.window.ssthresh, self.window.smss);
            }
            Phase::Open | Phase::Loss { .. } => {
                let Some(bytes) = acked.filter(|_| limited || matches!(self.phase, Phase::Loss { .. }))
                else {
                    return;
                };
                let acked = Acked {
                    now: ack.now,
                    bytes,
                    rtt: delivery.sample().map(|sent| ack.now.since(sent)),
                    srtt: self.rtt.srtt(),
                    una: self.una,
                    nxt: self.nxt,
                    after_timeout: matches!(self.phase, Phase::Loss { .. }),
                };
                self.control.acked(&mut self.window, &acked);
            }
        }
    }

    // ----- timers -----

    /// The retransmission time-out has fired: everything that could have been acknowledged by now is lost, and
    /// sending begins with one segment (RFC 5681 section 3.1, RFC 8985 section 6.3).
    pub(super) fn on_timeout(&mut self, now: Instant, frto: bool) {
        let again = matches!(self.phase, Phase::Loss { .. });
        if self.queue.front().is_some_and(|e| e.sacked) {
            self.queue.renege();
        }
        // F-RTO begins from no recovery, or again for the same segment (RFC 5682 section 3.2).
        let same = again && self.undo.is_some_and(|u| u.from == self.una);
        let may_be_spurious = frto && self.sack && (self.phase == Phase::Open || same);
        if self.phase == Phase::Open {
            self.remember();
        }
        if !again {
            self.window.ssthresh = self.control.reduce(&self.window, self.flight_size(), Congestion::Timeout);
        }
        self.window.cwnd = self.window.smss;
        let deadline = self.rack.rtt + self.reo_wnd();
        self.queue.mark_lost(0);
        self.queue
            .mark_lost_where(Instant::from_nanos(u64::MAX), StreamOffset::MAX, |e| e.sent + deadline <= now);
        let frto = if may_be_spurious { Frto::Retransmitted } else { Frto::Off };
        self.phase = Phase::Loss { high: self.nxt, frto };
        self.tlp.reset();
        self.duplicates = 0;
        self.rtt.back_off();
    }

    /// Sets the timers of RFC 6298 section 5 and RFC 8985 section 8 anew. The time-out stays armed behind the two
    /// shorter ones: what fires first decides.
    pub(super) fn arm(&mut self, now: Instant, timers: &mut Timers, config: &TcpConfig, after: After) {
        if self.queue.is_empty() {
            timers.disarm(Timer::Retransmit);
            timers.disarm(Timer::Probe);
            timers.disarm(Timer::Reorder);
            return;
        }
        let rto_at = now + self.rtt.rto();
        if after == After::Sent {
            timers.arm_if_idle(Timer::Retransmit, rto_at);
        } else {
            timers.arm(Timer::Retransmit, rto_at);
        }
        match self.reorder_at {
            Some(at) => timers.arm(Timer::Reorder, at),
            None => timers.disarm(Timer::Reorder),
        }
        if after == After::Timeout || !self.probes_apply() {
            timers.disarm(Timer::Probe);
        } else {
            let rto_at = timers.at(Timer::Retransmit).unwrap_or(rto_at);
            timers.arm(Timer::Probe, (now + self.pto(config)).min(rto_at));
        }
    }

    /// RFC 8985 section 7.2: not in recovery, nothing reported by SACK.
    fn probes_apply(&self) -> bool {
        self.sack && self.phase == Phase::Open && self.queue.sacked() == 0
    }

    /// `TLP_calc_PTO`. A peer of our kind may keep back the ACK of up to `ack_every` segments, so the allowance
    /// that the RFC has for one segment applies to as many.
    fn pto(&self, config: &TcpConfig) -> Duration {
        let Some(srtt) = self.rtt.srtt() else { return Duration::from_secs(1) };
        let few = self.queue.len() <= config.ack_every as usize;
        srtt * 2 + if few { config.tlp_ack_delay } else { Duration::ZERO }
    }

    /// Section 7.3: whether a probe may be sent now that its timer has fired.
    pub(super) fn may_probe(&self) -> bool {
        self.probes_apply() && self.tlp.end_seq.is_none() && self.tlp.measured && !self.queue.is_empty()
    }

    // ----- sending -----

    /// The lost segment to send again now, if the window allows one.
    pub(super) fn next_resend(&mut self) -> Option<usize> {
        if matches!(self.phase, Phase::Loss { frto: Frto::SendNew(_) | Frto::Sent, .. }) {
            return None;
        }
        let index = self.queue.next_lost()?;
        let bytes = self.queue.entry(index)?.bytes();
        let pipe = self.pipe();
        (pipe == 0 || pipe + bytes <= self.window.cwnd).then_some(index)
    }

    /// Room for a new segment's payload, at most `emss`; or what limits it. A window too small for a full segment is
    /// offered only when it is at least half of the largest the peer ever had, or when nothing is in flight
    /// and `insist` (RFC 9293 section 3.8.6.2.1).
    pub(super) fn room(&self, emss: usize, max_frames: usize, insist: bool) -> Result<usize, Limit> {
        if self.queue.len() >= max_frames {
            return Err(Limit::Frames);
        }
        let usable = self.usable();
        let enough = usable >= emss as u64
            || usable > 0 && (usable >= self.max_window / 2 || insist && self.queue.is_empty());
        if !enough {
            return Err(Limit::Window);
        }
        let pipe = self.pipe();
        if pipe > 0 && pipe + emss as u64 > self.window.cwnd && !self.frto_sends_new() {
            return Err(Limit::Congestion);
        }
        Ok(emss.min(usable as usize))
    }

    fn frto_sends_new(&self) -> bool {
        matches!(self.phase, Phase::Loss { frto: Frto::SendNew(_), .. })
    }

    /// The congestion window has stopped us.
    pub(super) fn was_limited(&mut self) {
        self.limited_at = Some(self.nxt);
    }

    /// Before the first segment after a pause: RFC 5681 section 4.1, RFC 9438 section 5.8.
    pub(super) fn before_new_data(&mut self, now: Instant) {
        if let Some(since) = self.idle_since.take() {
            self.control.paused(now.since(since));
            if now.since(self.last_sent) > self.rtt.rto() {
                self.window.cwnd = self.window.cwnd.min(self.initial_window);
            }
            self.progress = now;
        }
    }

    /// A new segment was sent.
    pub(super) fn sent_new(&mut self, now: Instant, entry: Entry) {
        self.nxt = entry.end;
        self.last_sent = now;
        self.prr.sent(entry.bytes());
        self.queue.push(entry);
        if let Phase::Loss { frto, .. } = &mut self.phase
            && let Frto::SendNew(left) = *frto
        {
            *frto = if left > 1 { Frto::SendNew(left - 1) } else { Frto::Sent };
        }
    }

    /// F-RTO found no new data to send: conventional recovery. Returns whether that changed anything.
    pub(super) fn nothing_new(&mut self) -> bool {
        let Phase::Loss { frto, .. } = &mut self.phase else { return false };
        let Frto::SendNew(left) = *frto else { return false };
        *frto = if left == 2 { Frto::Off } else { Frto::Sent };
        *frto == Frto::Off
    }

    /// Entry `index` was sent again.
    pub(super) fn resent(&mut self, now: Instant, index: usize) {
        self.queue.resent(index, now);
        self.last_sent = now;
        if let Some(bytes) = self.queue.entry(index).map(|e| e.bytes()) {
            self.prr.sent(bytes);
        }
        if let Some(undo) = &mut self.undo {
            undo.resent(now);
        }
    }
}

/// What an ACK delivered.
#[derive(Debug, Default)]
struct Delivery {
    bytes: u64,
    /// Some of it had been sent once only, some of it more than once.
    original: bool,
    retransmitted: bool,
    /// When the latest segment was sent whose round-trip time is not ambiguous: of those sent once, and of those sent
    /// again.
    sample_original: Option<Instant>,
    sample_again: Option<Instant>,
}

impl Delivery {
    fn sample(&self) -> Option<Instant> {
        self.sample_original.max(self.sample_again)
    }
}

/// What makes timers be set anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// New data was sent.
    Sent,
    /// New data was acknowledged.
    Acked,
    /// A time-out or a probe: the time-out runs from now, and no probe before an ACK.
    Timeout,
}
