//! [`Connection`]: the parts of one connection, its states, and the calls of the stack. Received segments are processed
//! in `input`, segments to send are built in `output`, timers are handled in `timeouts`.

use std::sync::Arc;

use super::{
    Algorithm, Info, Isn, NewPayload, SoftError, State, TcpConfig, TcpCounters, Tuning,
    ack::AckPolicy,
    clock::Clock,
    congestion::Window,
    marks::Marks,
    output::Plan,
    pmtu::PathMtu,
    prediction::PredictedAck,
    receiver::Receiver,
    sender::Sender,
    stage::{Fin, Sending, Stage, Syn},
    timers::{Timer, Timers},
};
use crate::{
    link::Link,
    seq::{SeqNum, StreamOffset},
    time::{Duration, Instant, nanos},
    ulp::CloseReason,
    wire::{Flow, Headers, Options, Path, Segment},
};

/// TIME-WAIT lasts for this many of the peer's time-outs: when our ACK of its FIN is lost, the peer retransmits the FIN
/// after one time-out and, backed off, after two more. Each retransmission restarts TIME-WAIT.
const PEER_TIMEOUTS: u32 = 3;

/// Longest TIME-WAIT unless the configuration asks for a longer one: the smallest maximum of a time-out by RFC 6298
/// section 2.5.
const MAX_TIME_WAIT: Duration = Duration::from_mins(1);

/// An error that the connection has survived.
#[derive(Debug, Clone, Copy)]
pub(super) struct SurvivedError {
    pub error: SoftError,
    pub at: Instant,
    pub reported: bool,
}

/// Budget of challenge ACKs: how many were sent in the current period (RFC 5961 section 7).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChallengeBudget {
    began: Option<Instant>,
    spent: u32,
}

impl ChallengeBudget {
    /// Spends one of the `most` challenge ACKs of a `period`. Returns whether one was left.
    pub(crate) fn spend(&mut self, now: Instant, most: u32, period: Duration) -> bool {
        if self.began.is_none_or(|began| now.since(began) >= period) {
            *self = Self { began: Some(now), spent: 0 };
        }
        let left = self.spent < most;
        self.spent += u32::from(left);
        left
    }
}

/// Segments due that are neither data nor plain acknowledgments.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Due {
    /// A segment without payload below the window, which makes the peer answer: keepalive or window probe.
    pub empty_probe: bool,
    /// A tail loss probe.
    pub loss_probe: bool,
    /// The persist timer has fired: a segment shorter than the EMSS may fill a small window, and a closed window is
    /// probed.
    pub window_probe: bool,
    /// A RST in answer to an unacceptable ACK of our SYN: its sequence number, and the timestamp that it echoes.
    pub refuse: Option<(SeqNum, Option<u32>)>,
    /// A RST that ends the connection, with the reason.
    pub abort: Option<CloseReason>,
}

impl Due {
    /// Whether anything is due. Nearly always nothing is, so all is read at once.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.empty_probe | self.loss_probe | self.window_probe | self.refuse.is_some() | self.abort.is_some()
    }
}

/// One TCP connection.
#[derive(Debug)]
pub struct Connection {
    /// Shared by the connections of a stack, until one is [tuned](Connection::tune).
    pub(super) config: Arc<TcpConfig>,
    pub(super) path: Path,
    pub(super) mtu: PathMtu,
    /// `mtu` has changed, which concerns other connections of the path.
    pub(super) mtu_news: bool,
    pub(super) headers: Headers,
    pub(super) stage: Stage,
    pub(super) passive: bool,
    pub(super) tx: Sender,
    pub(super) rx: Receiver,
    pub(super) ack: AckPolicy,
    pub(super) clock: Option<Clock>,
    pub(super) timers: Timers,
    /// The shift count of the peer's windows; `None` when scaling is off.
    pub(super) snd_shift: Option<u8>,
    /// The peer's MSS.
    pub(super) snd_mss: usize,
    pub(super) emss: usize,
    /// The plan of new segments, from the first one until [`Connection::resize`].
    pub(super) plan: Option<Plan>,
    pub(super) marks: Marks,
    pub(super) due: Due,
    challenges: ChallengeBudget,
    pub(super) challenge_due: bool,
    pub(super) last_ack_sent: SeqNum,
    /// Arrival time of the peer's last acceptable segment.
    pub(super) last_heard: Instant,
    pub(super) keepalives: u32,
    /// Window probes since the window was last open: the exponent of their back-off.
    pub(super) window_probes: u32,
    /// The local end no longer reads. See [`Connection::stop_reading`].
    pub(super) unread: bool,
    pub(super) opened: Instant,
    pub(super) soft_error: Option<SurvivedError>,
    /// See [`Connection::take_next_hop_doubt`].
    pub(super) next_hop_doubtful: bool,
    /// See [`Connection::hold_output`].
    pub(super) held: bool,
    /// Bytes that retransmissions may move to the heap. See [`Connection::allow_spill`].
    pub(super) spill_allowance: usize,
    pub(super) counters: TcpCounters,
    /// See [`Connection::catch_up`].
    pub(super) postponed: Option<PredictedAck>,
}

impl Connection {
    fn new(now: Instant, config: &Arc<TcpConfig>, path: Path, isn: Isn, passive: bool) -> Self {
        let default_mss = if path.flow.local.is_ipv6() { 1220 } else { 536 };
        let mut timers = Timers::new();
        timers.arm(Timer::Wait, now + config.connect_timeout);
        let syn = Syn { due: true, sent: 0, sent_at: now };
        let stage = if passive { Stage::SynReceived } else { Stage::SynSent };
        let mut connection = Self {
            config: Arc::clone(config),
            path,
            mtu: PathMtu::new(path.mtu, path.flow.local.is_ipv6(), &config.path_mtu),
            mtu_news: false,
            headers: Headers::new(&path).with_service(config.dscp, config.hop_limit),
            stage: stage(syn, Sending::Open),
            passive,
            tx: Sender::new(now, config, isn.seq, default_mss),
            rx: Receiver::new(SeqNum::default(), config),
            ack: AckPolicy::new(now),
            clock: config.timestamps.then(|| Clock::new(isn.stamps)),
            timers,
            snd_shift: None,
            snd_mss: default_mss,
            emss: default_mss,
            plan: None,
            marks: Marks::default(),
            due: Due::default(),
            challenges: ChallengeBudget::default(),
            challenge_due: false,
            last_ack_sent: SeqNum::default(),
            last_heard: now,
            keepalives: 0,
            window_probes: 0,
            unread: false,
            next_hop_doubtful: false,
            held: false,
            opened: now,
            soft_error: None,
            spill_allowance: usize::MAX,
            counters: TcpCounters::default(),
            postponed: None,
        };
        connection.resize();
        connection
    }

    /// An active open: state SYN-SENT, with a SYN due. `isn` comes from [`super::IsnKey`].
    pub fn connect(now: Instant, config: &Arc<TcpConfig>, path: Path, isn: Isn) -> Self {
        Self::new(now, config, path, isn, false)
    }

    /// A passive open from the peer's `syn`: state SYN-RECEIVED, with a SYN-ACK due. A payload in the SYN is ignored;
    /// the peer retransmits it.
    pub fn accept(now: Instant, config: &Arc<TcpConfig>, path: Path, syn: &Segment, isn: Isn) -> Self {
        let mut connection = Self::new(now, config, path, isn, true);
        connection.marks = Marks::negotiated(
            config.ecn && syn.flags.ece && syn.flags.cwr,
            config.algorithm == Algorithm::Dctcp,
        );
        connection.learn_options(now, syn);
        connection
    }

    /// Restores the SYN-ACK state of a passive open whose `Connection` was dropped and rebuilt: `sent` SYN-ACKs were
    /// sent, the last one at `at`.
    pub(crate) fn restore_syn_ack(&mut self, sent: u32, at: Instant) {
        if let Some(syn) = self.stage.syn_mut() {
            *syn = Syn { due: false, sent, sent_at: at };
        }
        if sent > 0 {
            self.rx.advertise(false);
        }
    }

    /// Leaves the right edge of the advertised window where it is.
    pub(crate) fn keep_window(&mut self) {
        self.rx.keep_window();
    }

    /// Makes the SYN-ACK due with the next [`Connection::transmit`].
    pub(crate) fn schedule_syn(&mut self) {
        if let Some(syn) = self.stage.syn_mut() {
            syn.due = true;
        }
    }

    /// Whether a bare ACK is due: in SYN-RECEIVED, the answer to a suspicious segment.
    pub(crate) fn owes_bare_ack(&self) -> bool {
        self.ack.is_due() || self.challenge_due
    }

    /// Discards the bare ACK that is due.
    pub(crate) fn drop_bare_ack(&mut self) {
        self.ack.sent();
        self.challenge_due = false;
    }

    /// Adopts sequence number, window and options of the peer's SYN. An extension is used when both SYNs have it (RFC
    /// 7323 sections 2.2 and 3.2, RFC 2018 section 2).
    pub(super) fn learn_options(&mut self, now: Instant, syn: &Segment) {
        let config = &self.config;
        self.rx = Receiver::new(syn.seq, config);
        if let Some(shift) = syn.options.window_scale.filter(|s| *s > super::receiver::MAX_SHIFT) {
            // RFC 7323 section 2.3.
            tracing::debug!(shift, peer = %self.path.flow.remote, "window scale above 14, using 14");
        }
        self.snd_shift = syn
            .options
            .window_scale
            .filter(|_| config.window_scaling)
            .map(|shift| shift.min(super::receiver::MAX_SHIFT));
        if self.snd_shift.is_none() {
            self.rx.without_scaling();
        }
        match (syn.options.timestamps, &mut self.clock) {
            (Some(timestamps), Some(clock)) => clock.update(now, timestamps),
            _ => self.clock = None,
        }
        self.tx.sack = config.sack && syn.options.sack_permitted;
        if let Some(mss) = syn.options.mss {
            self.snd_mss = usize::from(mss);
        }
        self.tx.first_window(syn.seq, syn.window.into());
        self.last_ack_sent = self.rx.next_seq();
        self.resize();
    }

    /// Options of our SYN or SYN-ACK.
    pub(super) fn syn_options(&self, now: Instant) -> Options {
        let answer = matches!(self.stage, Stage::SynReceived(..));
        let config = &self.config;
        Options {
            mss: Some(self.own_mss() as u16),
            window_scale: (config.window_scaling && (!answer || self.snd_shift.is_some()))
                .then(|| self.rx.shift()),
            sack_permitted: config.sack && (!answer || self.tx.sack),
            timestamps: self.clock.as_ref().map(|c| c.option(now)),
            ..Options::default()
        }
    }

    // ----- calls of the stack between segments -----

    /// Records that the framing layer has taken the payload of `arrival`.
    #[expect(
        clippy::inline_always,
        reason = "each frame calls it once, with an arrival that is then never built in memory"
    )]
    #[inline(always)]
    pub fn payload_taken(&mut self, now: Instant, arrival: &NewPayload) {
        self.counters.bytes_in += arrival.len as u64;
        self.rx.grow(now, || self.tx.rtt.min(), self.counters.bytes_in);
        if self.rx.add(arrival.offset, arrival.len) {
            let full = self.rx.largest_segment().min(self.own_mss());
            let window = self.rx.window() as usize;
            match self.ack.in_order(now, arrival.len, arrival.pushed, full, window, &self.config) {
                None => {}
                Some(delay) => match nanos(delay) {
                    0 => self.ack.now(),
                    delay => self.timers.arm(Timer::DelayedAck, now.after_nanos(delay)),
                },
            }
        } else {
            // Beyond a gap, or filling one: RFC 5681 section 4.2 wants the ACK at once.
            self.counters.out_of_order += u64::from(arrival.offset > arrival.contiguous);
            self.ack.disturbed();
        }
        // No payload lies behind the FIN, so it was not reached before.
        if self.rx.fin_reached() {
            self.on_peer_fin(now);
        } else if matches!(self.stage, Stage::FinWait2(_)) && !self.unread {
            self.timers.arm(Timer::Wait, now + self.config.fin_wait_2);
        }
    }

    /// Stops reading: the framing layer found the stream broken, or the connection was rejected. Payload is dropped
    /// without an acknowledgement; once the peer has acknowledged our FIN, payload is answered by a RST (RFC 9293
    /// section 3.6.1, SHLD-3). However the peer behaves, the connection ends after [`TcpConfig::fin_wait_2`].
    pub fn stop_reading(&mut self, now: Instant) {
        let over = matches!(self.stage, Stage::TimeWait(..) | Stage::Closed(_));
        if !std::mem::replace(&mut self.unread, true) && !over {
            self.timers.arm(Timer::Wait, now + self.config.fin_wait_2);
        }
    }

    /// The reason why the connection has just ended, unless another call has returned it. [`Connection::payload_taken`]
    /// ends the connection when the payload fills the gap before the peer's FIN.
    pub fn take_close_reason(&mut self) -> Option<CloseReason> {
        self.stage.take_ended()
    }

    /// Whether [`Self::take_close_reason`] would return a reason.
    pub fn has_ended(&self) -> bool {
        self.stage.ended().is_some()
    }

    /// Processes the peer's FIN once it is the next in order (RFC 9293 section 3.10.7.4, eighth check).
    #[inline(never)]
    pub(super) fn on_peer_fin(&mut self, now: Instant) {
        self.ack.now();
        match self.stage {
            Stage::Established(sending) => self.stage = Stage::CloseWait(sending),
            Stage::FinWait1(fin) => self.stage = Stage::Closing(fin),
            Stage::FinWait2(fin) => self.enter_time_wait(now, fin),
            _ => {}
        }
    }

    pub(super) fn enter_time_wait(&mut self, now: Instant, fin: Fin) {
        self.stage = Stage::TimeWait(fin, Some(CloseReason::Graceful));
        self.timers.disarm_all();
        self.wait_for_the_peer(now, fin);
    }

    /// Starts or restarts TIME-WAIT (RFC 9293 section 3.10.7.4). When our ACK of the peer's FIN is lost, the peer
    /// retransmits the FIN and any data before it, which must be acknowledged: a reset would make its application
    /// believe that delivered data is lost. The peer's time-out, estimated by ours, and its back-off, which is at most
    /// its silence so far, determine when it retransmits.
    pub(super) fn wait_for_the_peer(&mut self, now: Instant, fin: Fin) {
        let timeout = self.tx.rtt.base_rto() + fin.silence;
        let wait = timeout.saturating_mul(PEER_TIMEOUTS).min(MAX_TIME_WAIT).max(self.config.time_wait);
        self.timers.arm(Timer::Wait, now + wait);
    }

    /// Records the time since the peer's last segment, or since our FIN where that is later: before its answer to our
    /// FIN the peer was not silent.
    pub(super) fn note_silence(&mut self, now: Instant) {
        let last_heard = self.last_heard;
        if let Some(fin) = self.stage.fin_mut() {
            fin.silence = now.since(last_heard.max(fin.sent_at));
        }
    }

    /// Ends the connection for its user and on the wire.
    pub(super) fn end(&mut self, reason: CloseReason) {
        self.stage.end(Some(reason));
        self.timers.disarm_all();
    }

    /// Makes a delayed ACK due at once (an idle poll). Returns whether an ACK is due, so that [`Connection::transmit`]
    /// has to be called.
    pub fn flush_ack(&mut self) -> bool {
        self.ack.flush()
    }

    /// Whether an ACK is pending, at once or delayed.
    pub fn owes_ack(&self) -> bool {
        self.ack.is_owed()
    }

    /// Whether an ACK has to be sent with the next transmission.
    #[inline]
    pub fn must_acknowledge(&self) -> bool {
        self.ack.is_due()
    }

    /// Whether an ACK with an earlier acknowledgment number is due, which reports where congestion marks began or ended.
    #[inline]
    pub fn owes_mark_boundary(&self) -> bool {
        self.marks.boundary().is_some()
    }

    /// Whether the pending ACK waits for the peer's next segments, as long as the application polls.
    pub fn holds_ack(&self) -> bool {
        self.ack.is_held()
    }

    /// Whether the pending ACK waits for the application's answer, also when the engine is idle.
    pub fn awaits_answer(&self) -> bool {
        self.ack.awaits_answer()
    }

    /// Subtracts from the receive window the `bytes` that the framing layer holds because it can neither place nor
    /// deliver them.
    pub fn withheld(&mut self, bytes: usize) {
        if self.rx.hold(bytes) {
            self.ack.now();
        }
    }

    /// Drops all payload beyond a gap from the received ranges: the framing layer had taken it and has dropped it, so
    /// the peer must retransmit it (RFC 2018 section 8).
    pub fn renege(&mut self) {
        self.rx.renege();
    }

    /// Closes our direction: no more calls of [`super::Source::fill`], and a FIN after the data already filled.
    pub fn close(&mut self) {
        self.stage.close(Sending::Finished);
    }

    /// Announces that our direction will be closed as soon as the source has no more data. From now on answers to
    /// window probes alone do not keep the connection open: the peer must accept data within
    /// [`TcpConfig::user_timeout`].
    pub fn close_when_sent(&mut self) {
        self.stage.close(Sending::Closing);
    }

    /// Ends the connection at once, with a RST where RFC 9293 section 3.10.5 wants one (sent by the next
    /// [`Connection::transmit`]).
    pub fn abort(&mut self) {
        self.abort_with(CloseReason::Aborted);
    }

    /// Like [`Connection::abort`], with another reason.
    pub fn abort_with(&mut self, reason: CloseReason) {
        self.due.abort.get_or_insert(reason);
    }

    /// Changes the settings of this connection only.
    pub fn tune(&mut self, now: Instant, tuning: &Tuning) {
        let mut tuning = tuning.clamped();
        let before = self.config.algorithm;
        let negotiated = !matches!(self.stage, Stage::SynSent(..));
        if negotiated && (before == Algorithm::Dctcp) != (tuning.algorithm == Algorithm::Dctcp) {
            tuning.algorithm = before;
        }
        if tuning.algorithm != before {
            self.tx.control_by(now, tuning.algorithm);
        }
        let Tuning { dscp, hop_limit, .. } = tuning;
        Arc::make_mut(&mut self.config).apply(tuning);
        self.tx.user_timeout_ns = nanos(tuning.user_timeout);
        self.plan = None;
        self.headers = Headers::new(&self.path).with_service(dscp, hop_limit);
        if let Stage::SynSent(..) | Stage::SynReceived(..) | Stage::TimeWait(..) | Stage::Closed(_) =
            self.stage
        {
            return;
        }
        if let Some(at) = self.timers.at(Timer::Retransmit) {
            self.timers.arm(Timer::Retransmit, self.tx.bound_by_user_timeout(now, at));
        }
        self.arm_keepalive(now);
    }

    /// Releases all frames. The connection is [`State::Closed`] afterwards.
    pub fn release(&mut self, link: &mut dyn Link) {
        self.tx.queue.clear(link);
        self.timers.disarm_all();
        self.stage.end(None);
    }

    // ----- challenge ACKs -----

    /// Sends a challenge ACK, within the connection's budget (RFC 5961 section 7).
    pub(super) fn challenge(&mut self, now: Instant) {
        let (most, period) = (self.config.challenges, self.config.challenge_period);
        self.challenge_due |= self.challenges.spend(now, most, period);
    }

    // ----- queries -----

    /// The TCP state.
    pub fn state(&self) -> State {
        self.stage.state()
    }

    /// Whether the state is CLOSED: only the frames are left, for [`Connection::release`].
    pub fn is_closed(&self) -> bool {
        matches!(self.stage, Stage::Closed(_))
    }

    /// Whether the connection is open in both directions, and has nothing to report to the stack: no end, not even a FIN beyond a
    /// gap, no news of the path, no payload on the heap.
    #[inline]
    pub fn allows_fast_path(&self) -> bool {
        // The last two are nearly always true, so both are tested at once.
        matches!(self.stage, Stage::Established(_))
            && !self.mtu_news
            && !self.rx.knows_fin() & (self.tx.queue.spilled_bytes() == 0)
    }

    /// Whether all data of the peer, up to its FIN, was taken.
    pub fn peer_closed(&self) -> bool {
        self.rx.fin_reached()
    }

    /// Four-tuple.
    pub fn flow(&self) -> Flow {
        self.path.flow
    }

    /// Path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Payload bytes of a full segment: the send MSS less the options that every segment carries (RFC 9293
    /// section 3.7.1).
    pub fn emss(&self) -> usize {
        self.emss
    }

    /// `RCV.NXT` as an offset: everything below it was taken.
    pub fn contiguous(&self) -> StreamOffset {
        self.rx.next()
    }

    /// Counters since the connection was opened.
    pub fn counters(&self) -> TcpCounters {
        self.counters
    }

    /// A snapshot of the connection's state and estimates.
    pub fn info(&self) -> Info {
        let Window { cwnd, ssthresh, .. } = self.tx.window;
        Info {
            state: self.stage.state(),
            srtt: self.tx.rtt.srtt(),
            min_rtt: self.tx.rtt.min(),
            rto: self.tx.rtt.base_rto(),
            congestion: self.config.algorithm,
            cwnd,
            ssthresh,
            pacing_rate: self.tx.pacing_rate(),
            in_flight: self.tx.pipe(),
            snd_wnd: self.tx.snd_wnd(),
            rcv_wnd: self.rx.window(),
            emss: self.emss,
            path_mtu: self.mtu.bytes(),
            chunks_retained: self.tx.queue.chunks_retained(),
            spilled_bytes: self.tx.queue.spilled_bytes(),
            soft_error: self.soft_error.map(|survived| (survived.error, survived.at)),
            opened: self.opened,
            counters: self.counters,
        }
    }

    /// Whether `syn` may replace this connection in TIME-WAIT: its timestamp is later than all earlier ones or, without
    /// timestamps, its sequence number is (RFC 9293 section 3.10.7.4, RFC 6191 section 2).
    pub fn replaceable_by(&self, syn: &Segment) -> bool {
        if !matches!(self.stage, Stage::TimeWait(..)) || !syn.flags.is_plain_syn() {
            return false;
        }
        match (&self.clock, syn.options.timestamps) {
            (Some(clock), Some(stamp)) if stamp.value != clock.recent() => {
                (stamp.value.wrapping_sub(clock.recent()) as i32) > 0
            }
            _ => syn.seq.after(self.rx.next_seq()),
        }
    }
}
