//! The send side of a connection: `SND.UNA`, `SND.NXT` and the peer's window. It decides by loss detection, recovery
//! and congestion control what is sent when; `output` builds the frames.

mod acks;
mod paced;

use std::time::Duration;

pub(super) use self::{acks::Ack, paced::Paced};

use super::{
    TcpConfig,
    congestion::{Congestion, CongestionControl, Window},
    pmtu::Prober,
    queue::{Queue, SentSegment},
    rack::{DUP_THRESH, Rack, Tlp},
    recovery::{Frto, RecoveryPhase, Undo},
    rtt::Rtt,
    timers::{TICK, Timer, Timers},
};
use crate::{
    seq::{SeqNum, StreamOffset},
    time::{Instant, nanos},
};

/// Least number of retransmissions or probes in a user timeout while the peer's window is closed.
const LEAST_PROBES: u64 = 4;

/// Shortest probe time-out. A round trip within one turn of the engine measures as zero, and no timer may be due when
/// it is armed.
const LEAST_PTO_NS: u64 = 1_000;

/// Why no new segment may be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// The congestion window is full.
    Congestion,
    /// The peer's window has no room for a full segment.
    Window,
    /// The connection retains too many chunks.
    Frames,
    /// The pacer holds the next quantum back.
    Pacing,
}

/// The send side of one connection.
#[derive(Debug)]
pub(super) struct Sender {
    iss: SeqNum,
    una: StreamOffset,
    nxt: StreamOffset,
    /// Right edge of the peer's window, `SND.WL1`, `SND.WL2` and `MAX.SND.WND`.
    edge: StreamOffset,
    wl1: SeqNum,
    wl2: StreamOffset,
    max_window: u64,
    pub queue: Queue,
    pub rtt: Rtt,
    pub rack: Rack,
    pub tlp: Tlp,
    pub prober: Prober,
    control: Box<dyn CongestionControl>,
    /// For a controller that models the path and paces.
    paced: Option<Box<Paced>>,
    pub window: Window,
    initial_window: u64,
    pub phase: RecoveryPhase,
    /// How to undo the last reduction. On the heap, because most connections never lose a segment.
    undo: Option<Box<Undo>>,
    /// Whether the peer sends SACK.
    pub sack: bool,
    duplicates: u32,
    /// No fast retransmit before this offset is acknowledged (RFC 6582 section 3.2).
    recovered_to: StreamOffset,
    /// Bytes outstanding before the current ACK was processed: the flight size of RFC 5681 for a reduction.
    flight_before: u64,
    /// `SND.NXT` when the congestion window last limited the sender.
    limited_at: Option<StreamOffset>,
    /// When `SND.UNA` last advanced, or the empty queue got its first segment.
    pub progress: Instant,
    /// Start of the user timeout: since when the peer owes an answer. The answer is an acknowledgement of new data.
    /// While the peer's window is too small for the first segment, any segment is an answer (RFC 9293 section 3.8.6.1),
    /// and the time runs from the first retransmission or window probe after the last answer.
    pub waiting_since: Option<Instant>,
    /// [`TcpConfig::user_timeout`] in nanoseconds: each acknowledgement adds it.
    pub user_timeout_ns: u64,
    last_sent: Instant,
    idle_since: Option<Instant>,
    /// No second reduction for ECN before more than this offset is acknowledged (RFC 3168 section 6.1.2).
    marked_to: StreamOffset,
    /// When the reordering window of the last transmission that may be lost ends.
    reorder_at: Option<Instant>,
}

impl Sender {
    pub(super) fn new(now: Instant, config: &TcpConfig, iss: SeqNum, smss: usize) -> Self {
        let initial_window = Window::initial(smss as u64, config.initial_window);
        let (control, paced) = paced::control(now, config.algorithm, iss);
        Self {
            iss,
            una: 0,
            nxt: 0,
            edge: 0,
            wl1: SeqNum::default(),
            wl2: 0,
            max_window: 0,
            queue: Queue::default(),
            rtt: Rtt::new(config),
            rack: Rack::new(),
            tlp: Tlp::new(config),
            prober: Prober::default(),
            control,
            paced,
            window: Window { cwnd: initial_window, ssthresh: u64::MAX, smss: smss as u64 },
            initial_window,
            phase: RecoveryPhase::Open,
            undo: None,
            sack: false,
            duplicates: 0,
            recovered_to: 0,
            flight_before: 0,
            limited_at: None,
            progress: now,
            waiting_since: None,
            user_timeout_ns: nanos(config.user_timeout),
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

    /// The sequence number of a segment without payload: `SND.NXT`, or that of the first segment still waiting for ring
    /// slots. A short segment may find a slot where a long one found too few.
    pub(super) fn bare_seq(&self) -> SeqNum {
        self.seq_at(self.queue.unsent_from().unwrap_or(self.nxt))
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

    /// Whether the peer has owed an answer for longer than the user timeout.
    pub(super) fn waits_too_long(&self, now: Instant) -> bool {
        self.waiting_since.is_some_and(|since| now.nanos_since(since) >= self.user_timeout_ns)
    }

    /// Whether the first outstanding segment extends beyond the peer's window, which has shrunk: the peer need not
    /// acknowledge it (RFC 9293 section 3.8.6, SHLD-17).
    #[inline]
    pub(super) fn is_blocked_by_window(&self) -> bool {
        // While all that was sent lies within the window, the first segment need not be looked at.
        self.nxt > self.edge && self.queue.front().is_some_and(|first| first.end > self.edge)
    }

    /// Sets the peer's window from the handshake; it is not scaled.
    pub(super) fn first_window(&mut self, seq: SeqNum, window: u64) {
        (self.wl1, self.wl2, self.edge) = (seq, 0, window);
        self.max_window = window;
    }

    /// Changes the SMSS. Before any data was sent, the initial window changes with it; later the window rises neither
    /// in bytes nor in segments (RFC 4821 section 4, RFC 5681 section 3.1).
    pub(super) fn resize(&mut self, smss: usize, config: &TcpConfig) {
        let (before, smss) = (self.window.smss.max(1), smss as u64);
        self.window.smss = smss;
        if self.nxt == 0 {
            let untouched = self.window.cwnd == self.initial_window;
            self.initial_window = Window::initial(smss, config.initial_window);
            self.window.cwnd = if untouched { self.initial_window } else { smss };
        } else if smss != before {
            self.initial_window = Window::initial(smss, config.initial_window);
            self.window.cwnd = shrink(self.window.cwnd, before, smss).max(smss);
            if self.window.ssthresh != u64::MAX {
                self.window.ssthresh = shrink(self.window.ssthresh, before, smss).max(2 * smss);
            }
            self.control.resized(before, smss);
        }
    }

    /// Our SYN or SYN-ACK was sent `sent` times. After more than one loss the window starts with one segment (RFC 5681
    /// section 3.1); a single one is as often a late answer as a loss, and leaves the initial window, as in Linux.
    pub(super) fn syn_was_lost(&mut self, sent: u32) {
        self.rtt.syn_timed_out();
        if sent > 2 {
            self.window.cwnd = self.window.smss;
        }
    }

    /// Bytes believed to be in the network.
    pub(super) fn pipe(&self) -> u64 {
        let left = if self.sack { 0 } else { u64::from(self.duplicates) * self.window.smss };
        self.queue.in_flight().saturating_sub(left)
    }

    /// The flight size that congestion control reduces. It is limited to the congestion window, because in a recovery
    /// data beyond gaps accumulates that has already left the network; RFC 9438 section 4.6 allows that.
    fn flight(&self) -> u64 {
        self.flight_size().min(self.window.cwnd)
    }

    fn flight_size(&self) -> u64 {
        self.nxt - self.una
    }

    // ----- timers -----

    /// Handles the retransmission time-out: everything that could have been acknowledged by now counts as lost, and
    /// sending restarts with one segment (RFC 5681 section 3.1, RFC 8985 section 6.3).
    pub(super) fn on_timeout(&mut self, now: Instant, frto: bool) {
        let again = matches!(self.phase, RecoveryPhase::Loss { .. });
        if self.queue.front().is_some_and(|e| e.sacked) {
            self.queue.renege();
        }
        // F-RTO begins outside of a recovery, or again for the same segment (RFC 5682 section 3.2).
        let same = again && self.undo.as_ref().is_some_and(|u| u.from == self.una);
        let may_be_spurious = frto && self.sack && (self.phase == RecoveryPhase::Open || same);
        if self.phase == RecoveryPhase::Open {
            self.remember();
        }
        if !again {
            self.reduce(self.flight(), Congestion::Timeout);
            self.marked_to = self.nxt;
        }
        self.window.cwnd = self.window.smss;
        let deadline = self.rack.rtt() + self.reo_wnd();
        self.note_front_lost(now);
        if self.queue.front().is_some_and(|e| self.prober.is(e.end)) {
            self.prober.lost_alone(self.nxt, true);
        } else {
            self.prober.inconclusive();
        }
        self.queue.mark_lost(0);
        let (control, paced) = (&mut self.control, &mut self.paced);
        self.queue.mark_lost_while(Instant::from_nanos(u64::MAX), StreamOffset::MAX, |e| {
            let lost = e.sent + deadline <= now;
            if let Some(paced) = paced.as_deref_mut().filter(|_| lost) {
                paced.lost(&mut **control, &self.window, (now, e.start, e.end), self.sack);
            }
            lost
        });
        let frto = if may_be_spurious { Frto::Retransmitted } else { Frto::Off };
        self.phase = RecoveryPhase::Loss { high: self.nxt, frto };
        self.tlp.reset();
        self.duplicates = 0;
        self.rtt.back_off();
    }

    /// Rearms the timers of RFC 6298 section 5 and RFC 8985 section 8. The retransmission time-out stays armed in
    /// addition to the two shorter ones; the first to fire decides.
    #[expect(clippy::inline_always, reason = "each caller knows what has happened")]
    #[inline(always)]
    pub(super) fn arm(&mut self, now: Instant, timers: &mut Timers, config: &TcpConfig, after: After) {
        if self.queue.is_empty() {
            timers.disarm(Timer::Retransmit);
            timers.disarm(Timer::Probe);
            timers.disarm(Timer::Reorder);
            return;
        }
        let rto_at = match timers.at(Timer::Retransmit) {
            Some(at) if after == After::Sent => at,
            _ => {
                let at = self.bound_by_user_timeout(now, self.rtt.rto_after(now));
                timers.arm(Timer::Retransmit, at);
                at
            }
        };
        match self.reorder_at {
            Some(at) => timers.arm(Timer::Reorder, at),
            None => timers.disarm(Timer::Reorder),
        }
        // RFC 8985 section 7.3 restarts the time-out even after a probe that may not be sent. Such a probe is not
        // scheduled, because it would postpone the time-out.
        if after == After::Timeout || !self.may_probe() {
            timers.disarm(Timer::Probe);
        } else {
            timers.arm(Timer::Probe, rto_at.min(self.pto_after(now, config)));
        }
    }

    /// `at`, but no later than the end of the user timeout, and always later than `now`. While only the peer's window
    /// holds us back, the peer is probed [`LEAST_PROBES`] times in a user timeout, so that one lost answer does not end
    /// the connection.
    pub(super) fn bound_by_user_timeout(&self, now: Instant, at: Instant) -> Instant {
        let at = if self.queue.is_empty() || self.is_blocked_by_window() {
            at.min(now.after_nanos(self.user_timeout_ns / LEAST_PROBES))
        } else {
            at
        };
        let end = self.waiting_since.map_or(at, |since| since.after_nanos(self.user_timeout_ns));
        at.min(end).max(now + TICK)
    }

    /// RFC 8985 section 7.2: whether there is no recovery, and SACK has reported nothing.
    fn probes_apply(&self) -> bool {
        self.sack && self.phase == RecoveryPhase::Open && self.queue.sacked() == 0
    }

    /// When a tail loss probe is due whose time-out (`TLP_calc_PTO`) starts at `now`. A peer of our kind may delay the
    /// ACK of up to `ack_every` segments, so the allowance that the RFC grants for one segment in flight applies to
    /// that many.
    fn pto_after(&self, now: Instant, config: &TcpConfig) -> Instant {
        let Some(srtt) = self.rtt.srtt_ns() else { return now + Duration::from_secs(1) };
        let few = self.queue.len() <= config.ack_every as usize;
        let allowance = if few { self.tlp.allowance_ns() } else { 0 };
        now.after_nanos(srtt.saturating_mul(2).saturating_add(allowance).max(LEAST_PTO_NS))
    }

    /// Section 7.3: whether a probe may be sent.
    pub(super) fn may_probe(&self) -> bool {
        self.probes_apply() && self.tlp.end_seq.is_none() && self.tlp.measured && !self.queue.is_empty()
    }

    // ----- sending -----

    /// Whether a segment counts as lost, or F-RTO has to know whether there is new data.
    pub(super) fn wants_to_retransmit(&self) -> bool {
        self.queue.has_lost() || self.frto_sends_new()
    }

    /// Index of the lost segment to retransmit now, if the window allows one.
    #[inline]
    pub(super) fn next_resend(&mut self) -> Option<usize> {
        if self.phase == RecoveryPhase::Open && !self.queue.has_lost() {
            // Nearly always.
            return None;
        }
        self.find_resend()
    }

    fn find_resend(&mut self) -> Option<usize> {
        if let RecoveryPhase::Loss { frto: Frto::SendNew(_) | Frto::Sent, .. } = self.phase {
            // F-RTO sends only new data, which includes segments never transmitted because the ring was full.
            let last = self.queue.last_index()?;
            return self.queue.entry(last).is_some_and(|e| e.unsent).then_some(last);
        }
        let index = self.queue.next_lost()?;
        // A segment that is too long for the path is sent in pieces.
        let entry = self.queue.entry(index)?;
        let (bytes, unsent) = (entry.bytes().min(self.window.smss), entry.unsent);
        let pipe = self.pipe();
        // A segment that was never transmitted passed the window check before, perhaps as a probe, and precedes later
        // data.
        (pipe == 0 || unsent || pipe + bytes <= self.window.cwnd).then_some(index)
    }

    /// Room for a new segment's payload, at most `emss`, or the limit that prevents one. A window too small for a full
    /// segment is used only when it is at least half of the largest window ever offered, or when nothing is in flight
    /// and the persist timer has fired (`window_probe`, RFC 9293 section 3.8.6.2.1).
    #[inline]
    pub(super) fn room(&self, emss: usize, max_chunks: usize, window_probe: bool) -> Result<usize, Limit> {
        if self.queue.chunks() >= max_chunks {
            return Err(Limit::Frames);
        }
        let usable = self.usable();
        let enough = usable >= emss as u64
            || usable > 0 && (usable >= self.max_window / 2 || window_probe && self.queue.is_empty());
        if !enough {
            return Err(Limit::Window);
        }
        let pipe = self.pipe();
        if pipe > 0 && pipe + emss as u64 > self.window.cwnd && !self.frto_sends_new() {
            return Err(Limit::Congestion);
        }
        Ok(emss.min(usable as usize))
    }

    /// Whether [`Self::room`] is certainly that of a full segment. Bytes that duplicate ACKs report as delivered count as in flight.
    #[inline]
    pub(super) fn has_room(&self, emss: usize, max_chunks: usize) -> bool {
        let in_flight = self.queue.in_flight();
        self.queue.chunks() < max_chunks
            && self.usable() >= emss as u64
            && (in_flight == 0 || in_flight + emss as u64 <= self.window.cwnd)
    }

    /// RFC 4821 section 7.4: whether no probe is outstanding, and there is no loss or sign of one.
    pub(super) fn may_probe_mtu(&self, now: Instant) -> bool {
        self.phase == RecoveryPhase::Open
            && self.duplicates == 0
            && !self.queue.is_disordered()
            && self.prober.is_free(now)
    }

    /// The room that the windows leave for a path MTU probe with `probe` bytes of payload (RFC 4821 section 7.4): all
    /// or nothing, and only when three segments fit after it, whose ACKs show whether it was lost. Windows that are
    /// always too small for that allow a smaller probe; otherwise they would never grow again.
    pub(super) fn room_for_probe(&self, now: Instant, probe: usize, emss: usize) -> usize {
        let cwnd = self.cwnd_for_new_data(now);
        let windows = self.snd_wnd().min(cwnd) as usize;
        let free = self.usable().min(cwnd.saturating_sub(self.pipe())) as usize;
        let followers = DUP_THRESH * emss;
        if windows < followers + emss {
            return probe.min(free);
        }
        if probe <= free && probe + followers <= windows { probe } else { 0 }
    }

    /// Pauses path MTU probes after a failed one for as many round trips as the window has segments: the shortest time
    /// between two losses under congestion control (RFC 4821 section 7.6.2).
    pub(super) fn pause_probes(&mut self, now: Instant, factor: u32) {
        let segments = (self.window.cwnd / self.window.smss.max(1)).max(1).min(u64::from(u32::MAX)) as u32;
        let round = self.rtt.srtt().unwrap_or(Duration::from_secs(1));
        self.prober.pause(now, round.saturating_mul(segments).saturating_mul(factor));
    }

    /// Marks the last segment as lost, as if by a time-out, if it is a path MTU probe: nothing follows it that could
    /// show its loss earlier. Returns whether it was a probe.
    pub(super) fn give_up_last_probe(&mut self) -> bool {
        let Some(last) = self.queue.last_index() else { return false };
        if !self.queue.entry(last).is_some_and(|e| self.prober.is(e.end)) {
            return false;
        }
        self.prober.lost_alone(self.nxt, true);
        self.queue.mark_lost(last);
        true
    }

    /// Reacts to congestion with `flight` bytes outstanding: reduces `ssthresh`, to at least two segments (RFC 5681 equation
    /// 4, RFC 9438 section 4.6).
    fn reduce(&mut self, flight: u64, sign: Congestion) {
        let window = self.control.reduce(&self.window, flight, sign);
        self.window.ssthresh = window.max(2 * self.window.smss);
    }

    fn frto_sends_new(&self) -> bool {
        matches!(self.phase, RecoveryPhase::Loss { frto: Frto::SendNew(_), .. })
    }

    /// Records that the congestion window limits the sender.
    pub(super) fn was_limited(&mut self) {
        self.limited_at = Some(self.nxt);
    }

    /// The congestion window for new data: no more than the initial one after a pause longer than the retransmission
    /// time-out (RFC 5681 section 4.1). A sender that paces causes no burst.
    fn cwnd_for_new_data(&self, now: Instant) -> u64 {
        let restarts = self.idle_since.is_some() && now > self.rtt.rto_after(self.last_sent);
        if restarts && self.paced.is_none() {
            self.window.cwnd.min(self.initial_window)
        } else {
            self.window.cwnd
        }
    }

    /// Prepares for the first segment after an idle period: RFC 5681 section 4.1, RFC 9438 section 5.8.
    #[inline]
    pub(super) fn before_new_data(&mut self, now: Instant) {
        if let Some(since) = self.idle_since {
            let cwnd = self.cwnd_for_new_data(now);
            self.idle_since = None;
            self.control.paused(now.since(since));
            self.window.cwnd = cwnd;
            self.restart_paced(now);
            self.progress = now;
            self.waiting_since = Some(now);
        }
    }

    /// Records that a new segment was sent.
    #[expect(clippy::inline_always, reason = "each new segment calls it once")]
    #[inline(always)]
    pub(super) fn sent_new(&mut self, now: Instant, entry: SentSegment) {
        self.nxt = entry.end;
        self.last_sent = now;
        match &mut self.phase {
            RecoveryPhase::Recovery { prr, .. } => prr.sent(entry.bytes()),
            RecoveryPhase::Loss { frto, .. } => {
                if let Frto::SendNew(left) = *frto {
                    *frto = if left > 1 { Frto::SendNew(left - 1) } else { Frto::Sent };
                }
            }
            RecoveryPhase::Open => {}
        }
        let (start, end) = (entry.start, entry.end);
        self.queue.push(entry);
        if self.paced.is_some() {
            self.note_sent(now, start, end);
        }
    }

    /// Tells F-RTO that there is no new data to send. Returns whether conventional recovery has begun.
    pub(super) fn nothing_new(&mut self) -> bool {
        let RecoveryPhase::Loss { frto, .. } = &mut self.phase else { return false };
        let Frto::SendNew(left) = *frto else { return false };
        *frto = if left == 2 { Frto::Off } else { Frto::Sent };
        *frto == Frto::Off
    }

    /// Records that segment `index` was retransmitted.
    pub(super) fn resent(&mut self, now: Instant, index: usize) {
        self.queue.resent(index, now);
        self.note_resent(now, index);
        self.last_sent = now;
        self.waiting_since.get_or_insert(now);
        if let RecoveryPhase::Recovery { prr, .. } = &mut self.phase
            && let Some(bytes) = self.queue.entry(index).map(|e| e.bytes())
        {
            prr.sent(bytes);
        }
        if let Some(undo) = &mut self.undo {
            undo.resent(now);
        }
    }
}

/// Adapts a window of `bytes` to a new SMSS: the same number of segments when they become smaller, the same number of
/// bytes when they become larger.
fn shrink(bytes: u64, before: u64, smss: u64) -> u64 {
    if smss < before { (u128::from(bytes) * u128::from(smss) / u128::from(before)) as u64 } else { bytes }
}

/// The event after which timers are rearmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// New data was sent.
    Sent,
    /// New data was acknowledged.
    Acked,
    /// A time-out fired or a probe was sent: the time-out restarts now, and no probe is sent before an ACK.
    Timeout,
}
