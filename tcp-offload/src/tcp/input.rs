//! Processing of received segments: RFC 9293 section 3.10.7, with PAWS (RFC 7323), the checks of RFC 5961, SACK and
//! ECN.

use smallvec::SmallVec;

use super::{
    Algorithm, Connection, Receipt,
    marks::Marks,
    prediction::Run,
    queue::Block,
    receiver::Verdict,
    sender::{Ack, After},
    stage::{Sending, Stage, Syn},
    timers::{TICK, Timer},
};
use crate::{
    link::Link,
    seq::{SeqNum, StreamOffset},
    time::Instant,
    ulp::CloseReason,
    wire::{Segment, SegmentCore, Timestamps},
};

/// Whether a segment is processed further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Go,
    Drop,
}

impl Connection {
    /// Processes the next segment of `run`, except for taking its payload: by header prediction if that admits `core`, else by all
    /// rules of RFC 9293 section 3.10.7, for which `whole` makes the segment.
    #[expect(clippy::inline_always, reason = "the first arm returns its receipt in registers")]
    #[inline(always)]
    pub fn receive(
        &mut self,
        link: &mut dyn Link,
        run: &mut Run,
        core: Option<&SegmentCore>,
        whole: impl FnOnce() -> Segment,
    ) -> Receipt {
        if let Some(receipt) = core.and_then(|core| self.receive_predicted(link, run, core)) {
            return receipt;
        }
        run.end();
        self.receive_any(run.now, link, &whole())
    }

    /// [`Self::receive`] for a segment on its own.
    pub fn receive_one(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) -> Receipt {
        self.receive(link, &mut Run::new(now), segment.predictable().as_ref(), || *segment)
    }

    /// The general arm of [`Self::receive`].
    #[inline(never)]
    fn receive_any(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) -> Receipt {
        self.counters.segments_in += 1;
        let mut receipt = Receipt::default();
        match self.stage {
            Stage::Closed(_) => return receipt,
            Stage::SynSent(syn, sending) => {
                self.receive_in_syn_sent(now, segment, syn, sending, &mut receipt);
            }
            _ => self.receive_synchronized(now, link, segment, &mut receipt),
        }
        receipt.closed = self.stage.take_ended();
        receipt
    }

    /// RFC 9293 section 3.10.7.3.
    fn receive_in_syn_sent(
        &mut self,
        now: Instant,
        segment: &Segment,
        syn: Syn,
        sending: Sending,
        receipt: &mut Receipt,
    ) {
        let flags = segment.flags;
        let acceptable = flags.ack && segment.ack == self.tx.iss().add(1);
        if flags.ack && !acceptable {
            if !flags.rst {
                self.refuse(segment);
                // The peer still has an earlier connection with this four-tuple, which our RST ends: in TIME-WAIT, or
                // from before a restart (RFC 9293 section 3.5.1). The next SYN need not wait for the time-out; once, so
                // that forged ACKs cost no more.
                if let Some(syn) = self.stage.syn_mut().filter(|syn| syn.sent == 1) {
                    syn.due = true;
                }
            }
            return;
        }
        if flags.rst {
            if acceptable {
                self.end(CloseReason::Refused);
            }
            return;
        }
        if !flags.syn {
            return;
        }
        self.last_heard = now;
        self.learn_options(now, segment);
        if !self.carries_segments() {
            return self.abort_with(CloseReason::SegmentsTooSmall);
        }
        if acceptable {
            self.marks = Marks::negotiated(
                self.config.ecn && syn.sent == 1 && flags.ece && !flags.cwr,
                self.config.algorithm == Algorithm::Dctcp,
            );
            self.ack.now();
            self.establish(now, segment.options.timestamps, (syn, sending), receipt);
        } else {
            // Simultaneous open.
            self.stage = Stage::SynReceived(Syn { due: true, ..syn }, sending);
        }
    }

    /// Answers an unacceptable ACK of our SYN by a RST that echoes its timestamp (RFC 7323 section 5.2).
    fn refuse(&mut self, segment: &Segment) {
        self.due.refuse = Some((segment.ack, segment.options.timestamps.map(|t| t.value)));
    }

    /// Enters ESTABLISHED: our SYN was acknowledged by a segment with `timestamps`.
    fn establish(
        &mut self,
        now: Instant,
        timestamps: Option<Timestamps>,
        (syn, sending): (Syn, Sending),
        receipt: &mut Receipt,
    ) {
        self.stage = Stage::Established(sending);
        receipt.established = true;
        if syn.sent > 1 {
            self.tx.syn_was_lost(syn.sent);
        }
        if let Some(sent) = self.syn_sent_at(now, syn, timestamps) {
            self.tx.rtt.sample(now, sent);
            self.tx.tlp.measured = true;
        }
        self.timers.disarm_all();
        self.arm_keepalive(now);
    }

    /// When the SYN was sent that the segment with `timestamps` acknowledges. Of several, the echo identifies one (RFC 7323
    /// section 4), unless its time cannot be right.
    fn syn_sent_at(&self, now: Instant, syn: Syn, timestamps: Option<Timestamps>) -> Option<Instant> {
        if syn.sent <= 1 {
            return Some(syn.sent_at);
        }
        let (clock, stamp) = self.clock.as_ref().zip(timestamps)?;
        let sent = clock.sent_at(now, stamp.echo)?;
        // The resolution of the echo is a tick; the last SYN's time is known exactly.
        let last = clock.value(syn.sent_at) == stamp.echo;
        Some(if last { syn.sent_at } else { sent })
            .filter(|sent| (self.opened - TICK..=syn.sent_at).contains(sent))
    }

    /// RFC 9293 section 3.10.7.4.
    fn receive_synchronized(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        segment: &Segment,
        receipt: &mut Receipt,
    ) {
        if self.check_handshake(segment) == Next::Drop {
            return;
        }
        // Every SYN but the SYN-ACK of a simultaneous open is challenged, whatever its sequence number and options (RFC
        // 5961 section 4.2).
        let simultaneous = self.is_simultaneous_open(segment);
        if segment.flags.syn && !segment.flags.rst && !simultaneous {
            return self.challenge(now);
        }
        if self.check_timestamps(now, segment) == Next::Drop {
            return;
        }
        let verdict =
            if simultaneous { Verdict::Nothing { duplicate: false } } else { self.rx.judge(segment) };
        if verdict == Verdict::Unacceptable {
            return self.answer_unacceptable(now, segment);
        }
        if self.check_reset(now, segment) == Next::Drop {
            return;
        }
        if !segment.flags.ack || self.check_ack(now, segment) == Next::Drop {
            return;
        }
        self.note_silence(now);
        self.note_acceptable(now, &segment.core(), segment.flags.cwr);
        if let Stage::SynReceived(syn, sending) = self.stage {
            self.tx.first_window(segment.seq, 0);
            self.establish(now, segment.options.timestamps, (syn, sending), receipt);
        }
        receipt.acked = self.read_ack(now, link, segment);
        self.process_payload(verdict, segment, receipt);
        self.process_fin(now, segment);
    }

    /// Records what every acceptable segment tells, besides its acknowledgment and payload: that the peer lives, its timestamp and
    /// its congestion mark.
    #[expect(clippy::inline_always, reason = "each arm of `receive` has one call of it")]
    #[inline(always)]
    pub(super) fn note_acceptable(&mut self, now: Instant, segment: &SegmentCore, cwr: bool) {
        self.note_life(now);
        self.learn_timestamp(now, segment.seq, segment.timestamps);
        self.marks.received(segment.ecn, cwr, segment.payload_len, self.ack.is_owed(), self.rx.next());
    }

    /// Updates `TS.Recent` (RFC 7323 section 4.3).
    #[inline]
    fn learn_timestamp(&mut self, now: Instant, seq: SeqNum, timestamps: Option<Timestamps>) {
        if let (Some(clock), Some(stamp)) = (&mut self.clock, timestamps)
            && seq.at_or_before(self.last_ack_sent)
        {
            clock.update(now, stamp);
        }
    }

    /// In SYN-RECEIVED a SYN is either the peer's first one, retransmitted because its time-out fired before our answer
    /// arrived, or the SYN-ACK of a simultaneous open (RFC 9293 section 3.5, figure 7). Any other SYN is suspicious.
    fn check_handshake(&mut self, segment: &Segment) -> Next {
        let simultaneous = self.is_simultaneous_open(segment);
        match &mut self.stage {
            Stage::SynReceived(syn, _)
                if segment.flags.syn && segment.seq == self.rx.irs() && !simultaneous =>
            {
                syn.due |= !segment.flags.rst;
                Next::Drop
            }
            _ => Next::Go,
        }
    }

    /// Whether this is the SYN-ACK of a simultaneous open: it repeats the sequence number of the peer's SYN.
    fn is_simultaneous_open(&self, segment: &Segment) -> bool {
        matches!(self.stage, Stage::SynReceived(..))
            && !self.passive
            && segment.flags.syn
            && segment.flags.ack
            && segment.seq == self.rx.irs()
            && segment.ack == self.tx.iss().add(1)
    }

    /// PAWS (RFC 7323 section 5.3, R1): segments with an older timestamp are answered and dropped, unless they are a RST. A
    /// segment without the option is processed, as Linux does: section 3.2 would drop it, but some stacks send keepalive
    /// probes without it, and a middlebox may remove it.
    fn check_timestamps(&mut self, now: Instant, segment: &Segment) -> Next {
        let Some(clock) = &self.clock else { return Next::Go };
        if segment.flags.rst {
            return Next::Go;
        }
        match segment.options.timestamps {
            Some(stamp) if clock.is_old(now, stamp) => {
                self.counters.paws_dropped += 1;
                if segment.payload_len > 0 {
                    self.ack.now();
                } else {
                    self.challenge(now);
                }
                Next::Drop
            }
            _ => Next::Go,
        }
    }

    fn answer_unacceptable(&mut self, now: Instant, segment: &Segment) {
        if segment.flags.rst {
            return;
        }
        self.counters.out_of_window += 1;
        if segment.payload_len > 0 || segment.flags.fin {
            // An old duplicate, which is reported to its sender (RFC 2883), or more than the window allows.
            self.counters.duplicates += u64::from(self.rx.has_dsack());
            self.ack.now();
        } else if self.is_keepalive_probe(segment) {
            // Answered without a budget: if forged segments could use up a budget, idle connections would be ended. An
            // answer is never itself taken for a probe, because its sequence number is not one below the next octet.
            self.note_life(now);
            self.ack.now();
        } else {
            // Possibly a window probe. The answers have a budget, so that two confused ends do not answer each other
            // endlessly.
            self.challenge(now);
        }
        // The peer has not received our ACK of its FIN.
        if matches!(self.stage, Stage::TimeWait(..)) && (segment.flags.fin || segment.payload_len > 0) {
            self.note_silence(now);
            self.restart_time_wait(now);
        }
    }

    /// Whether this is the peer's keepalive probe: its sequence number is one below the next octet, and it acknowledges
    /// all that we sent (RFC 9293 section 3.8.4). Both numbers must be exact: an off-path host would have to guess
    /// them, so it cannot hide that the peer is gone.
    fn is_keepalive_probe(&self, segment: &Segment) -> bool {
        segment.seq == self.rx.next_seq().sub(1) && self.tx.offset_of(segment.ack) == Some(self.tx.nxt())
    }

    /// RFC 5961 section 3.2: only a RST with the exact sequence number resets the connection.
    fn check_reset(&mut self, now: Instant, segment: &Segment) -> Next {
        if !segment.flags.rst {
            return Next::Go;
        }
        if segment.seq != self.rx.next_seq() {
            self.challenge(now);
            return Next::Drop;
        }
        let reason = match self.stage {
            Stage::SynReceived(..) if !self.passive => CloseReason::Refused,
            // No reset is reported to the user here (RFC 9293 section 3.10.7.4): both ends have received all data, and
            // the peer's TIME-WAIT is over.
            Stage::Closing(fin) | Stage::LastAck(fin) if self.tx.una() >= fin.at => CloseReason::Graceful,
            _ => CloseReason::Reset,
        };
        self.end(reason);
        Next::Drop
    }

    /// Checks the ACK field: RFC 9293 section 3.10.7.4, fifth check, with the bounds of RFC 5961 section 5.2. An old
    /// acknowledgment number is acceptable only if it covers bytes that were sent: on a young connection the peer's largest
    /// window alone would let a blind sender guess 2^9 numbers instead of 2^32.
    fn check_ack(&mut self, now: Instant, segment: &Segment) -> Next {
        let ahead = self.tx.ahead_of_una(segment.ack);
        let outstanding = (self.tx.nxt() - self.tx.una()) as i64;
        if matches!(self.stage, Stage::SynReceived(..)) {
            if ahead != 0 {
                self.refuse(segment);
                return Next::Drop;
            }
        } else if ahead > outstanding || ahead < -(self.tx.max_window().min(self.tx.una()) as i64) {
            self.challenge(now);
            return Next::Drop;
        }
        Next::Go
    }

    /// Whether only the peer, or a host that sees its segments, can have sent this: the segment has the exact sequence number,
    /// and acknowledges nothing but what was sent.
    pub(crate) fn is_credible(&self, segment: &Segment) -> bool {
        match self.stage {
            Stage::Closed(_) => false,
            Stage::SynSent(..) => segment.flags.ack && segment.ack == self.tx.iss().add(1),
            _ => {
                let outstanding = (self.tx.nxt() - self.tx.una()) as i64;
                segment.seq == self.rx.next_seq()
                    && (!segment.flags.ack || (0..=outstanding).contains(&self.tx.ahead_of_una(segment.ack)))
            }
        }
    }

    /// Reads the acknowledgment of an acceptable segment, and processes it.
    fn read_ack(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) -> Option<StreamOffset> {
        let number = self.tx.offset_of(segment.ack).filter(|o| *o >= self.tx.una())?;
        // The window of a SYN-ACK is not scaled, also in a simultaneous open (RFC 7323 section 2.2).
        let shift = if segment.flags.syn { 0 } else { self.snd_shift.unwrap_or(0) };
        let mut blocks: SmallVec<[Block; 4]> = SmallVec::new();
        let dsack = self.read_blocks(segment, number, &mut blocks);
        let ack = Ack {
            now,
            number,
            seq: segment.seq,
            window: u64::from(segment.window) << shift,
            blocks: &blocks,
            dsack,
            echo: segment.options.timestamps.map(|t| t.echo),
            marked: segment.flags.ece && self.marks.is_on(),
            bare: segment.payload_len == 0 && !segment.flags.fin && !segment.flags.syn,
        };
        self.process_ack::<false>(now, link, &ack)
    }

    /// Processes an acceptable acknowledgment: the fifth check of RFC 9293 section 3.10.7.4. Returns the offset below which the peer has
    /// newly acknowledged all data, if it has.
    ///
    /// `PREDICTED`: [header prediction](Self::predicts) has admitted it. `now` is later than its arrival if it was
    /// [postponed](Self::catch_up).
    #[expect(clippy::inline_always, reason = "each arm has one call of it")]
    #[inline(always)]
    pub(super) fn process_ack<const PREDICTED: bool>(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        ack: &Ack<'_>,
    ) -> Option<StreamOffset> {
        let widest = self.tx.max_window();
        let has_blocks = !PREDICTED && (!ack.blocks.is_empty() || ack.dsack.is_some());
        let acked = if self.tx.queue.is_empty() && !has_blocks {
            self.acknowledge_nothing(ack);
            None
        } else {
            self.acknowledge::<PREDICTED>(now, link, ack)
        };
        if self.tx.max_window() > widest {
            self.resize();
        }
        acked
    }

    /// Processes an acknowledgment while nothing is in flight, as at an end that only receives.
    #[inline]
    fn acknowledge_nothing(&mut self, ack: &Ack<'_>) {
        self.tx.update_window(ack.seq, ack.number, ack.window);
        if self.answers_keep_it_open() {
            self.tx.waiting_since = None;
        }
        self.stop_window_probes();
    }

    /// Processes an acknowledgment while something is in flight. The arguments and the result are those of [`Self::process_ack`].
    #[expect(clippy::inline_always, reason = "each arm has one call of it")]
    #[inline(always)]
    fn acknowledge<const PREDICTED: bool>(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        ack: &Ack<'_>,
    ) -> Option<StreamOffset> {
        let was_blocked = !PREDICTED && self.tx.is_blocked_by_window();
        let recoveries = self.counters.recoveries;
        let advanced = self.tx.on_ack::<PREDICTED>(link, self.clock.as_ref(), &mut self.counters, ack);
        if !PREDICTED && self.counters.recoveries > recoveries {
            self.marks.set_cwr(true);
        }
        if (was_blocked || self.tx.is_blocked_by_window()) && self.answers_keep_it_open() {
            self.tx.waiting_since = None;
        }
        self.act_on_probe_outcome(now);
        if !PREDICTED && ack.marked {
            self.counters.ecn_echoes += 1;
            self.on_ecn_echo();
        }
        // A FIN of ours is not data.
        let fin = if PREDICTED { None } else { self.stage.fin() }.map_or(StreamOffset::MAX, |fin| fin.at);
        if advanced {
            self.window_probes = 0;
            self.tx.arm(now, &mut self.timers, &self.config, After::Acked);
            if ack.number > fin {
                self.on_fin_acked(now);
            }
        } else {
            self.tx.arm_reorder(&mut self.timers);
        }
        self.stop_window_probes();
        advanced.then(|| ack.number.min(fin))
    }

    /// Stops the window probes once the window has room for a full segment.
    pub(super) fn stop_window_probes(&mut self) {
        if self.tx.usable() >= self.emss as u64 {
            self.timers.disarm(Timer::Persist);
            self.window_probes = 0;
            self.due.window_probe = false;
        }
    }

    /// Converts SACK blocks to offsets. The first block is a D-SACK when it lies below the acknowledgment number or
    /// within the second block (RFC 2883 section 4). Blocks that cover anything not sent are ignored.
    fn read_blocks(
        &self,
        segment: &Segment,
        ack: StreamOffset,
        blocks: &mut SmallVec<[Block; 4]>,
    ) -> Option<Block> {
        if !self.tx.sack || segment.options.sack_count == 0 {
            return None;
        }
        let mut dsack = None;
        for (index, block) in segment.options.sack_blocks().iter().enumerate() {
            let Some((left, right)) = self.tx.offset_of(block.left).zip(self.tx.offset_of(block.right))
            else {
                continue;
            };
            if left >= right || right > self.tx.nxt() {
                continue;
            }
            if right <= ack {
                dsack = if index == 0 { Some((left, right)) } else { dsack };
            } else if left >= ack {
                blocks.push((left, right));
            }
        }
        if let (None, [first, second, ..]) = (dsack, blocks.as_slice())
            && second.0 <= first.0
            && first.1 <= second.1
        {
            dsack = Some(*first);
        }
        dsack
    }

    fn on_fin_acked(&mut self, now: Instant) {
        match self.stage {
            Stage::FinWait1(fin) => {
                self.stage = Stage::FinWait2(fin);
                if !self.unread {
                    self.timers.arm(Timer::Wait, now + self.config.fin_wait_2);
                }
            }
            Stage::Closing(fin) => self.enter_time_wait(now, fin),
            Stage::LastAck(_) => self.end(CloseReason::Graceful),
            _ => {}
        }
    }

    /// Reacts to the peer's ECN-Echo (RFC 3168 section 6.1.2).
    fn on_ecn_echo(&mut self) {
        if self.tx.on_ecn_echo() {
            self.counters.ecn_reductions += 1;
            self.marks.set_cwr(true);
        }
    }

    fn process_payload(&mut self, verdict: Verdict, segment: &Segment, receipt: &mut Receipt) {
        if !matches!(self.stage, Stage::Established(_) | Stage::FinWait1(_) | Stage::FinWait2(_)) {
            return;
        }
        match verdict {
            Verdict::Payload(_) if self.unread => self.drop_unread_payload(),
            Verdict::Payload(arrival) => receipt.arrival = Some(arrival),
            Verdict::Nothing { duplicate } => {
                self.counters.duplicates += u64::from(duplicate);
                if segment.payload_len > 0 {
                    self.ack.now();
                }
            }
            Verdict::Crowded => {
                self.counters.crowded += 1;
                self.ack.now();
            }
            Verdict::Unacceptable => {}
        }
    }

    /// Drops new payload without an acknowledgement, because the local end no longer reads. Once the peer has
    /// acknowledged our FIN, and thus all data before it, a RST answers (RFC 9293 section 3.6.1, SHLD-3); an earlier
    /// RST could destroy data that the peer has not read yet.
    fn drop_unread_payload(&mut self) {
        self.counters.unread += 1;
        if matches!(self.stage, Stage::FinWait2(_)) {
            self.abort();
        }
    }

    fn process_fin(&mut self, now: Instant, segment: &Segment) {
        if !segment.flags.fin {
            return;
        }
        let before = self.rx.fin_reached();
        self.rx.note_fin(segment);
        if self.rx.fin_reached() && !before {
            self.on_peer_fin(now);
        } else {
            // Beyond a gap, or retransmitted.
            self.ack.now();
        }
        if before {
            self.restart_time_wait(now);
        }
    }

    /// Restarts TIME-WAIT, because the peer has not received our ACK of its FIN.
    fn restart_time_wait(&mut self, now: Instant) {
        if let Stage::TimeWait(fin, _) = self.stage {
            self.wait_for_the_peer(now, fin);
        }
    }
}
