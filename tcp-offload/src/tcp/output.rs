//! Building of segments to send: which are due, and in which order. How a new one is filled and retained is in `segment`, the fast
//! path to it in `fast`; retransmissions are in `resend`.

mod fast;
mod held;
mod resend;
mod segment;

use self::held::Nowhere;
pub(super) use self::segment::Plan;
use super::{
    Connection, Filled, Sent, Source, Wants,
    queue::SentSegment,
    recovery::RecoveryPhase,
    sender::{After, Limit},
    stage::{Sending, Stage, Syn},
    timers::Timer,
};
use crate::{
    link::{Link, chunks_of},
    seq::SeqNum,
    time::{Duration, Instant},
    ulp::CloseReason,
    wire::{Ecn, Fields, Flags, Options, Timestamps, send_bare},
};

/// Shortest and longest time after which a small window is used that stays too small for a full segment: the override timeout of RFC
/// 9293 section 3.8.6.2.1.
const OVERRIDE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// The reason why a segment could not be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    /// The call's `room` is used up.
    Room,
    /// No free frame, no ring slot, or the link still reads the frame.
    Starved,
}

/// The limits and the result of one call of [`Connection::transmit`].
struct Turn<'a> {
    now: Instant,
    link: &'a mut dyn Link,
    room: usize,
    sent: Sent,
}

impl Turn<'_> {
    fn check_room(&self) -> Result<(), Stopped> {
        if self.sent.frames < self.room { Ok(()) } else { Err(Stopped::Room) }
    }

    /// Records that no frame is free for the segment.
    fn no_frame(&mut self) -> Stopped {
        self.sent.short_of_frames = true;
        Stopped::Starved
    }

    fn count(&mut self, sent: bool) -> Result<(), Stopped> {
        if !sent {
            return Err(Stopped::Starved);
        }
        self.sent.frames += 1;
        Ok(())
    }
}

/// What precedes the new data of one call of [`Connection::transmit`].
enum First {
    /// Perhaps retransmissions, with this result.
    Data(Result<(), Stopped>),
    /// The handshake, during which no data is sent.
    Handshake,
    /// The end of the connection.
    Ended,
}

/// The header fields that acknowledge what the peer has sent.
#[derive(Clone, Copy)]
struct Acknowledgement {
    ack: SeqNum,
    window: u16,
    timestamps: Option<Timestamps>,
}

impl Acknowledgement {
    #[inline]
    fn fields(self, seq: SeqNum, flags: Flags) -> Fields {
        let Self { ack, window, timestamps } = self;
        let options = Options { timestamps, ..Options::default() };
        Fields { seq, ack, flags, window, options, ecn: Ecn::NotEct }
    }
}

/// Why no more new segments were sent.
enum End {
    /// The source has no more data now.
    Dry,
    /// The next data needs more than `room` bytes.
    DoesNotFit {
        room: usize,
    },
    Limit(Limit),
    /// The source has no more data at all: a FIN is next.
    Finished,
    /// The direction to the peer is closed.
    Closed,
}

const ACK: Flags =
    Flags { fin: false, syn: false, rst: false, psh: false, ack: true, ece: false, cwr: false };

impl Connection {
    /// Sends pending segments, at most `room` frames: control segments, retransmissions, new data from `source`, ACKs.
    #[inline(never)]
    pub fn transmit(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        source: &mut impl Source,
        room: usize,
    ) -> Sent {
        let mut nowhere;
        let link: &mut dyn Link = if self.held {
            nowhere = Nowhere(link);
            &mut nowhere
        } else {
            link
        };
        let mut turn = Turn { now, link, room, sent: Sent::default() };
        match self.transmit_all(&mut turn, source) {
            Ok(()) => {}
            Err(Stopped::Room) => turn.sent.more = true,
            Err(Stopped::Starved) => turn.sent.starved = true,
        }
        self.counters.segments_out += turn.sent.frames as u64;
        turn.sent.closed = self.stage.take_ended();
        turn.sent
    }

    /// Whether [`Connection::transmit`] may have something to send.
    #[inline]
    pub fn wants_to_transmit(&self) -> Wants {
        if self.ack.is_due() || self.challenge_due || self.due.any() || self.marks.boundary().is_some() {
            return Wants::Yes;
        }
        let wants = match &self.stage {
            Stage::Closed(_) => false,
            Stage::SynSent(syn, sending) | Stage::SynReceived(syn, sending) => {
                syn.due || *sending == Sending::Finished
            }
            stage => match stage.sending() {
                _ if self.tx.wants_to_retransmit() => true,
                Some(Sending::Finished) => true,
                Some(_) => return Wants::NewData,
                None => false,
            },
        };
        if wants { Wants::Yes } else { Wants::Nothing }
    }

    fn transmit_all(&mut self, turn: &mut Turn<'_>, source: &mut impl Source) -> Result<(), Stopped> {
        let first = if self.sends_new_first() { First::Data(Ok(())) } else { self.transmit_first(turn)? };
        let mut data = Ok(());
        match first {
            First::Ended => return Ok(()),
            First::Handshake => {}
            First::Data(before) => {
                data = before.and_then(|()| self.transmit_new(turn, source));
                if data == Err(Stopped::Room) {
                    return data;
                }
                // ACKs are sent from the reserve even when data finds no frame. Otherwise two ends with all frames in
                // flight would deadlock, each waiting for the other's ACK.
                if self.due.empty_probe {
                    self.transmit_empty_probe(turn)?;
                }
            }
        }
        if self.ack.is_due() || self.challenge_due {
            self.transmit_ack(turn)?;
        }
        data
    }

    /// Whether nothing precedes new data.
    #[inline]
    fn sends_new_first(&self) -> bool {
        matches!(self.stage, Stage::Established(_))
            && !self.due.any()
            && self.marks.boundary().is_none()
            && !self.tx.wants_to_retransmit()
    }

    /// Sends what precedes new data.
    #[inline(never)]
    fn transmit_first(&mut self, turn: &mut Turn<'_>) -> Result<First, Stopped> {
        if self.due.any() {
            self.transmit_resets(turn)?;
        }
        if self.marks.boundary().is_some() {
            self.transmit_boundaries(turn)?;
        }
        match self.stage {
            Stage::Closed(_) => return Ok(First::Ended),
            Stage::SynSent(_, Sending::Finished) => {
                self.end(CloseReason::Graceful);
                return Ok(First::Ended);
            }
            Stage::SynSent(syn, _) if syn.due => self.transmit_syn(turn, syn, false)?,
            Stage::SynReceived(syn, _) if syn.due => self.transmit_syn(turn, syn, true)?,
            Stage::SynSent(..) | Stage::SynReceived(..) => {}
            _ if self.tx.wants_to_retransmit() => return Ok(First::Data(self.retransmit(turn))),
            _ => return Ok(First::Data(Ok(()))),
        }
        Ok(First::Handshake)
    }

    // ----- control segments -----

    /// The current acknowledgement. It advertises the window, so a segment with it must be sent.
    #[expect(clippy::inline_always, reason = "each new segment calls it once")]
    #[inline(always)]
    fn acknowledgement(&mut self, now: Instant) -> Acknowledgement {
        Acknowledgement {
            ack: self.rx.next_seq(),
            window: self.rx.advertise(self.snd_shift.is_some()),
            timestamps: self.clock.as_ref().map(|c| c.option(now)),
        }
    }

    /// Header fields with the current acknowledgement; `flags` are set in addition to ACK.
    #[inline]
    fn fields(&mut self, now: Instant, seq: SeqNum, flags: Flags) -> Fields {
        let flags = Flags { ack: true, ece: self.marks.echo(), ..flags };
        self.acknowledgement(now).fields(seq, flags)
    }

    /// Records that a segment with the current acknowledgment was sent. An ACK with SACK blocks stays due unless the
    /// segment carried them (`with_sack`).
    #[inline]
    fn acknowledged(&mut self, with_sack: bool) {
        self.acknowledged_to(self.rx.next_seq(), with_sack);
    }

    /// [`Self::acknowledged`], when the acknowledgment number `ack` is known.
    #[expect(clippy::inline_always, reason = "each new segment calls it once")]
    #[inline(always)]
    fn acknowledged_to(&mut self, ack: SeqNum, with_sack: bool) {
        self.last_ack_sent = ack;
        if !with_sack && self.ack.is_due() && self.tx.sack && (self.rx.has_gap() || self.rx.has_dsack()) {
            return;
        }
        self.ack.sent();
        self.challenge_due = false;
        self.timers.disarm(Timer::DelayedAck);
    }

    fn bare(&mut self, turn: &mut Turn<'_>, fields: &Fields) -> Result<(), Stopped> {
        turn.check_room()?;
        let sent = send_bare(turn.link, &self.headers, &self.path, fields);
        turn.count(sent)
    }

    fn transmit_resets(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        if let Some((seq, stamp)) = self.due.refuse {
            let timestamps = stamp.map(|echo| Timestamps { value: 0, echo });
            let options = Options { timestamps, ..Options::default() };
            let flags = Flags { rst: true, ..Flags::default() };
            self.bare(turn, &Fields { seq, flags, options, ..Fields::default() })?;
            self.due.refuse = None;
        }
        let Some(reason) = self.due.abort else { return Ok(()) };
        if !matches!(self.stage, Stage::SynSent(..) | Stage::TimeWait(..) | Stage::Closed(_)) {
            // Receivers ignore the ACK field of a reset (RFC 9293 section 3.10.7.4, second check). Without an ACK before
            // it, the peer would report messages as lost that the upper layer has already received.
            if self.last_ack_sent != self.rx.next_seq() {
                self.transmit_ack(turn)?;
            }
            let seq = self.tx.bare_seq();
            let fields = self.fields(turn.now, seq, Flags { rst: true, ..Flags::default() });
            self.bare(turn, &fields)?;
        }
        self.due.abort = None;
        self.end(reason);
        Ok(())
    }

    /// Sends ACKs with earlier acknowledgment numbers, at which congestion marks began or ended (RFC 8257 section 3.2).
    fn transmit_boundaries(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        while let Some(boundary) = self.marks.boundary() {
            let seq = self.tx.bare_seq();
            let fields = Fields {
                ack: self.rx.seq_at(boundary.next),
                window: self.rx.advertise_from(boundary.next, self.snd_shift.is_some()),
                ..self.fields(turn.now, seq, ACK)
            };
            let fields = Fields { flags: Flags { ece: boundary.marked, ..fields.flags }, ..fields };
            self.bare(turn, &fields)?;
            self.counters.acks_out += 1;
            self.marks.boundary_sent();
        }
        Ok(())
    }

    /// Sends our SYN, or with `answer` our SYN-ACK.
    fn transmit_syn(&mut self, turn: &mut Turn<'_>, syn: Syn, answer: bool) -> Result<(), Stopped> {
        // A SYN may be lost because a router drops its ECN bits: retransmissions carry none (RFC 3168 section 6.1.1.1).
        let ask_ecn = !answer && self.config.ecn && syn.sent == 0;
        let flags = Flags {
            syn: true,
            ack: answer,
            ece: ask_ecn || answer && self.marks.is_on(),
            cwr: ask_ecn,
            ..Flags::default()
        };
        let fields = Fields {
            seq: self.tx.iss(),
            ack: if answer { self.rx.next_seq() } else { SeqNum::default() },
            flags,
            window: self.rx.advertise(false),
            options: self.syn_options(turn.now),
            ecn: Ecn::NotEct,
        };
        self.bare(turn, &fields)?;
        if syn.sent > 0 {
            self.counters.retransmits += 1;
            self.tx.rtt.back_off();
        }
        if let Some(to) = self.stage.syn_mut() {
            *to = Syn { due: false, sent: syn.sent + 1, sent_at: turn.now };
        }
        self.timers.arm(Timer::Retransmit, self.tx.rtt.rto_after(turn.now));
        if answer {
            self.acknowledged(false);
        }
        Ok(())
    }

    /// Sends a bare ACK with all SACK blocks that fit.
    #[inline(never)]
    fn transmit_ack(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        let seq = self.tx.bare_seq();
        let mut fields = self.fields(turn.now, seq, ACK);
        if self.tx.sack && (self.rx.has_gap() || self.rx.has_dsack()) {
            let room = if self.clock.is_some() { 3 } else { 4 };
            self.rx.report(&mut fields.options, room);
        }
        self.bare(turn, &fields)?;
        self.rx.reported();
        self.counters.acks_out += 1;
        self.counters.challenge_acks += u64::from(self.challenge_due && !self.ack.is_due());
        self.acknowledged(true);
        Ok(())
    }

    /// Sends a keepalive or window probe: no payload, and a sequence number one below `SND.UNA`, so that no FPDU is
    /// ever cut. The peer must answer a segment outside its window with an ACK (RFC 9293 section 3.10.7.4), which
    /// carries its window. It ignores everything else in that segment, so an ACK that is owed stays owed.
    #[inline(never)]
    fn transmit_empty_probe(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        let seq = self.tx.seq_at(self.tx.una()).sub(1);
        let fields = self.fields(turn.now, seq, ACK);
        self.bare(turn, &fields)?;
        self.due.empty_probe = false;
        Ok(())
    }

    // ----- new data -----

    fn transmit_new(&mut self, turn: &mut Turn<'_>, source: &mut impl Source) -> Result<(), Stopped> {
        let (before, frames) = (self.tx.nxt(), turn.sent.frames);
        let end = self.send_new(turn, source);
        // The postponed acknowledgment restarts the timers.
        if self.tx.nxt() != before && !self.has_postponed() {
            self.tx.arm(turn.now, &mut self.timers, &self.config, After::Sent);
        }
        if turn.sent.frames != frames {
            self.acknowledged(false);
        }
        let end = match end? {
            // A timer may only be armed for data that waits.
            End::Limit(_) | End::DoesNotFit { .. } if !source.has_data() => End::Dry,
            end => end,
        };
        if let End::Dry = end {
            turn.sent.dry = true;
            self.tx.ran_dry();
            return self.nothing_new(turn);
        }
        self.ended_by(turn, &end)
    }

    /// Handles the reason why no more new segments were sent, unless the source has no more data.
    #[inline(never)]
    fn ended_by(&mut self, turn: &mut Turn<'_>, end: &End) -> Result<(), Stopped> {
        match *end {
            End::Finished if self.tx.usable() > 0 => self.transmit_fin(turn),
            End::Finished => self.stopped_by(turn, Limit::Window),
            End::Limit(limit) => self.stopped_by(turn, limit),
            End::Dry => self.nothing_new(turn),
            End::DoesNotFit { room } => {
                if room < self.emss && self.tx.queue.is_empty() {
                    self.persist(turn)?;
                }
                self.nothing_new(turn)
            }
            End::Closed => self.probe_with_old(turn),
        }
    }

    /// Sends new segments until the source or a limit ends it. The caller arms the timers once for all of them.
    #[inline]
    fn send_new(&mut self, turn: &mut Turn<'_>, source: &mut impl Source) -> Result<End, Stopped> {
        match self.stage.sending() {
            Some(Sending::Open | Sending::Closing) => {}
            Some(Sending::Finished) => return Ok(End::Finished),
            None => return Ok(End::Closed),
        }
        let mut has_data = source.may_have_data();
        let paces = self.tx.paces();
        let searches_mtu = self.mtu.is_searching(turn.now);
        let plan = self.plan(turn.link);
        let mut acknowledgement = None;
        while has_data {
            let probe = self.due.loss_probe;
            let free = turn.link.tx_available();
            let most_chunks = self.most_chunks(free.saturating_sub(plan.reserved));
            let room = match self.tx.room(self.emss, most_chunks, self.due.window_probe) {
                Err(Limit::Congestion) if probe && self.tx.usable() >= self.emss as u64 => self.emss,
                Ok(room) if searches_mtu && room == self.emss && !probe => {
                    self.probe_room(turn.now).unwrap_or(room)
                }
                Ok(room) => room,
                Err(limit) => return Ok(End::Limit(limit)),
            };
            if paces && !probe && self.is_held_by_pacing(turn.now) {
                return Ok(End::Limit(Limit::Pacing));
            }
            turn.check_room()?;
            if free < plan.reserved + chunks_of(plan.chunk_bytes, plan.header + room) {
                return Err(turn.no_frame());
            }
            let before = self.tx.nxt();
            match self.fill(turn, source, room, plan, &mut acknowledgement).inspect_err(|_| {
                // The ring has no slot for the probe, which waits and is not due a second time.
                if probe && self.tx.nxt() != before {
                    self.probe_sent(turn.now, false);
                }
            })? {
                Filled::Segment { len, more } => {
                    if len > self.emss {
                        self.mtu_probe_sent(len);
                    }
                    if probe {
                        self.probe_sent(turn.now, false);
                    }
                    self.due.window_probe = false;
                    has_data = more;
                }
                Filled::Finish => {
                    self.stage.close(Sending::Finished);
                    return Ok(End::Finished);
                }
                Filled::Nothing => return Ok(End::DoesNotFit { room }),
            }
        }
        Ok(End::Dry)
    }

    /// Ends the sending of new data: F-RTO and the tail loss probe fall back to retransmission.
    #[inline]
    fn nothing_new(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        if self.tx.phase != RecoveryPhase::Open && self.tx.nothing_new() {
            self.retransmit(turn)?;
        }
        self.probe_with_old(turn)
    }

    /// Handles a limit that holds back new data, if there is any.
    fn stopped_by(&mut self, turn: &mut Turn<'_>, limit: Limit) -> Result<(), Stopped> {
        match limit {
            // What the postponed acknowledgment covers has left the network.
            Limit::Congestion if self.has_postponed() => {}
            Limit::Congestion => self.tx.was_limited(),
            Limit::Window if self.tx.queue.is_empty() => self.persist(turn)?,
            Limit::Frames => turn.sent.short_of_frames = true,
            Limit::Window | Limit::Pacing => {}
        }
        self.nothing_new(turn)
    }

    /// Whether the pacer holds the next segment back. Then the timer that ends this is armed.
    fn is_held_by_pacing(&mut self, now: Instant) -> bool {
        let until = self.tx.held_until(now);
        if let Some(until) = until {
            self.counters.paced += 1;
            self.timers.arm(Timer::Pace, until);
        }
        until.is_some()
    }

    /// The window is too small for the data to send, and nothing is in flight whose ACK could open it: sends a window
    /// probe when the persist timer has fired, and restarts the timer. A closed window is probed after one time-out, then
    /// with exponential back-off (RFC 9293 section 3.8.6.1). A small one is used after [`OVERRIDE`] (section 3.8.6.2.1),
    /// with back-off only where no FPDU fits it.
    fn persist(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        if self.due.window_probe {
            // It stays due if it cannot be sent now.
            self.due.empty_probe = true;
            self.transmit_empty_probe(turn)?;
            self.counters.window_probes += 1;
            self.due.window_probe = false;
            self.tx.waiting_since.get_or_insert(turn.now);
        }
        let first = self.tx.rtt.base_rto();
        let first = if self.tx.usable() > 0 { first.clamp(OVERRIDE.0, OVERRIDE.1) } else { first };
        let wait = first.saturating_mul(1 << self.window_probes.min(16));
        let at = turn.now + wait.min(self.config.rto_max);
        self.timers.arm_if_idle(Timer::Persist, self.tx.bound_by_user_timeout(turn.now, at));
        Ok(())
    }

    /// Sends the FIN in a segment of its own: the last data may have been sent long before.
    fn transmit_fin(&mut self, turn: &mut Turn<'_>) -> Result<(), Stopped> {
        let offset = self.tx.nxt();
        let seq = self.tx.seq_at(offset);
        let fields = self.fields(turn.now, seq, Flags { fin: true, ..Flags::default() });
        self.bare(turn, &fields)?;
        self.acknowledged(false);
        self.tx.before_new_data(turn.now);
        self.tx.sent_new(turn.now, SentSegment::fin(offset, turn.now));
        self.tx.arm(turn.now, &mut self.timers, &self.config, After::Sent);
        self.stage.fin_sent(turn.now, offset);
        Ok(())
    }
}
