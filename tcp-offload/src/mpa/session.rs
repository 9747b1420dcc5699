//! The phases of one connection's MPA: start-up (RFC 5044 section 7.1), full operation, and how it ends.
//!
//! The stack calls a [`Session`] with each payload that TCP took and each segment that TCP may send; the
//! session calls the upper layer. It never touches TCP itself.

use std::fmt;

use super::{
    AcceptParams, Agreed, Counters, MpaConfig, MpaError, Offer, SetupError, UNNEGOTIATED,
    layout::Layout,
    negotiate::{self, Asked, Conclusion},
    receiver::{Framing, Halt, Receiver, Upper},
    startup::{MAX_FRAME_BYTES, MpaReply, MpaRequest},
};
use crate::{
    link::{FrameWriter, Link, RxFrame},
    seq::StreamOffset,
    tcp::{self, Filled},
    time::Instant,
    ulp::{ConnId, Event, ListenerId, Pulled, Ulp, UlpduWriter},
    wire::Path,
};

/// MPA of one connection, between its TCP and the upper layer. `P` is [`Ulp::Placed`].
#[derive(Debug)]
pub struct Session<P> {
    config: MpaConfig,
    phase: Phase,
    /// Our start-up frame, and how much of it TCP has.
    startup: Vec<u8>,
    startup_sent: usize,
    /// When the peer's start-up frame must be there.
    startup_deadline: Option<Instant>,
    receiver: Receiver<P>,
    /// The FPDU that waits for a receive, by its offset, and since when.
    withheld: Option<(StreamOffset, Instant)>,
    /// The upper layer has nothing to send any more.
    finished: bool,
    fpdus_sent: u64,
    fpdus_withheld: u64,
}

#[derive(Debug)]
enum Phase {
    /// Initiator: the request goes out, the reply is awaited.
    AwaitReply(Box<Asked>),
    /// Responder: the request is awaited.
    AwaitRequest(ListenerId),
    /// Responder: the application decides.
    Decide(Box<Offer>),
    /// FPDUs in both directions.
    Full(Transmitter),
    /// The responder said no; nothing follows the start-up frames.
    Rejected,
    /// The start-up failed.
    Failed(MpaError),
}

/// The transmit direction in full operation.
#[derive(Debug, Clone, Copy)]
struct Transmitter {
    layout: Layout,
    crc: bool,
    /// A responder sends no FPDU before the initiator's first has come (RFC 5044 section 7.1.2, rule 4).
    waits_for_first: bool,
}

impl<P: Copy + fmt::Debug> Session<P> {
    /// The session of an initiator. The request goes out with the first [`Self::fill`].
    pub fn initiator(
        _now: Instant,
        config: MpaConfig,
        private_data: Vec<u8>,
        ird: u16,
        ord: u16,
    ) -> Result<Self, SetupError> {
        let asked = negotiate::request(&config, private_data, ird, ord)?;
        let startup = asked.request.emit();
        Ok(Self { startup, ..Self::new(config, Phase::AwaitReply(Box::new(asked)), None) })
    }

    /// The session of a responder, whose TCP connection came to `listener`. The request must come within
    /// [`MpaConfig::startup_timeout`] from `now`.
    pub fn responder(now: Instant, config: MpaConfig, listener: ListenerId) -> Self {
        let deadline = now + config.startup_timeout;
        Self::new(config, Phase::AwaitRequest(listener), Some(deadline))
    }

    fn new(config: MpaConfig, phase: Phase, startup_deadline: Option<Instant>) -> Self {
        Self {
            receiver: Receiver::new(),
            config,
            phase,
            startup: Vec::new(),
            startup_sent: 0,
            startup_deadline,
            withheld: None,
            finished: false,
            fpdus_sent: 0,
            fpdus_withheld: 0,
        }
    }

    /// Responder: accepts the request. [`Event::Established`] comes before this returns; the reply goes out
    /// with the next [`Self::fill`], FPDUs only when the initiator's first has come.
    pub fn accept<U: Ulp<Placed = P>>(
        &mut self,
        _now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        params: AcceptParams,
    ) -> Result<(), SetupError> {
        let Phase::Decide(offer) = &self.phase else { return Err(SetupError::NoRequest) };
        let (reply, agreed) = negotiate::accept(&self.config, offer, params)?;
        self.startup = reply.emit();
        self.enter_full_operation(&agreed, true);
        self.receiver.expect(framing(&agreed));
        let private_data = Vec::new();
        ulp.event(conn, Event::Established { path: *path, agreed, private_data, rtr: None });
        Ok(())
    }

    /// Responder: rejects the request. The reply goes out with the next [`Self::fill`], then the end.
    pub fn reject(&mut self, _now: Instant, private_data: &[u8]) -> Result<(), SetupError> {
        let Phase::Decide(offer) = &self.phase else { return Err(SetupError::NoRequest) };
        self.startup = negotiate::reject(&self.config, offer, private_data.to_vec())?.emit();
        self.phase = Phase::Rejected;
        Ok(())
    }

    /// Writes the payload of the next segment, which begins at `offset`: (a part of) the start-up frame, or
    /// as many whole FPDUs as the upper layer has and `out` has room for. `emss` is TCP's EMSS, from which
    /// MULPDU follows; `out.room()` may be less, when the peer's window is.
    pub fn fill<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        offset: StreamOffset,
        emss: usize,
        out: &mut FrameWriter<'_>,
    ) -> Filled {
        if let Some(rest) = self.startup.get(self.startup_sent..).filter(|rest| !rest.is_empty()) {
            let written = out.put(rest);
            self.startup_sent += written;
            if matches!(self.phase, Phase::AwaitReply(_)) && self.startup_deadline.is_none() {
                self.startup_deadline = Some(now + self.config.startup_timeout);
            }
            return if written > 0 { Filled::Segment(written) } else { Filled::Nothing };
        }
        match self.phase {
            Phase::Full(transmitter) => self.fill_fpdus(transmitter, ulp, conn, offset, emss, out),
            Phase::Rejected => Filled::Finish,
            Phase::AwaitReply(_) | Phase::AwaitRequest(_) | Phase::Decide(_) | Phase::Failed(_) => {
                Filled::Nothing
            }
        }
    }

    fn fill_fpdus<U: Ulp<Placed = P>>(
        &mut self,
        transmitter: Transmitter,
        ulp: &mut U,
        conn: ConnId,
        offset: StreamOffset,
        emss: usize,
        out: &mut FrameWriter<'_>,
    ) -> Filled {
        let Transmitter { layout, crc, waits_for_first } = transmitter;
        // A probe of the path's MTU is filled to its last byte, wherever the markers lie.
        let probe = out.room() > emss;
        let whole = if probe { layout.largest_ulpdu(offset, out.room()) } else { None };
        let mulpdu = whole.unwrap_or_else(|| layout.mulpdu(emss));
        // When the stream is broken an FPDU has come, if no valid one: the Terminate may go.
        if waits_for_first && !self.receiver.has_begun() && !self.receiver.is_stopped() {
            // To close is not to send an FPDU: asked without room, the upper layer can only say whether it is done.
            if !self.finished
                && let Some(mut writer) = UlpduWriter::begin(out, layout, offset, mulpdu)
            {
                writer.room = 0;
                self.finished = ulp.pull(conn, &mut writer) == Pulled::Finish;
            }
            return if self.finished { Filled::Finish } else { Filled::Nothing };
        }
        let mut len = 0;
        while !self.finished {
            let Some(mut writer) = UlpduWriter::begin(out, layout, offset + len as u64, mulpdu) else {
                break;
            };
            match ulp.pull(conn, &mut writer) {
                Pulled::Ulpdu => {
                    len += writer.finish(crc);
                    self.fpdus_sent += 1;
                }
                Pulled::Nothing => break,
                Pulled::Finish => self.finished = true,
            }
        }
        match len {
            0 if self.finished => Filled::Finish,
            0 => Filled::Nothing,
            len => Filled::Segment(len),
        }
    }

    /// Takes a payload, whose frame is given back to `link` now or when its bytes are not needed any more.
    /// At most `spare` bytes more may be held than are now. Returns false when that is too little, or the session's own
    /// limit is: TCP shall treat the payload as lost.
    #[expect(clippy::too_many_arguments, reason = "what a frame's way up consists of")]
    pub fn take<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        link: &mut dyn Link,
        arrival: tcp::Arrival,
        frame: RxFrame,
        spare: usize,
    ) -> bool {
        let most = self.config.hold_bytes.min(self.held_bytes().saturating_add(spare));
        match &self.phase {
            Phase::Full(_) => {
                let mut upper = Upper { ulp, conn };
                let (taken, outcome) = self.receiver.take(&mut upper, link, &arrival, frame, most);
                self.conclude(now, &mut upper, outcome);
                taken
            }
            Phase::AwaitReply(_) | Phase::AwaitRequest(_) => {
                let taken = self.receiver.collect(link, &arrival, frame, most);
                self.read_startup(now, &mut Upper { ulp, conn }, path, link);
                taken
            }
            Phase::Decide(_) => {
                link.recycle(frame);
                self.fail(MpaError::DataBeforeReply);
                true
            }
            Phase::Rejected | Phase::Failed(_) => {
                link.recycle(frame);
                true
            }
        }
    }

    /// Looks whether the peer's start-up frame is complete.
    fn read_startup<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        path: &Path,
        link: &mut dyn Link,
    ) {
        let mut bytes = [0; MAX_FRAME_BYTES];
        let len = self.receiver.peek(link, &mut bytes);
        let bytes = bytes.get(..len).unwrap_or_default();
        match &self.phase {
            Phase::AwaitRequest(listener) => match MpaRequest::parse(bytes) {
                Ok(Some((request, len))) => {
                    let listener = *listener;
                    self.receiver.consume(link, len);
                    if !self.receiver.is_drained() {
                        return self.fail(MpaError::DataBeforeReply);
                    }
                    self.startup_deadline = None;
                    let offer = Offer::of(request);
                    self.phase = Phase::Decide(Box::new(offer.clone()));
                    upper.ulp.event(upper.conn, Event::Requested { listener, path: *path, offer });
                }
                Ok(None) => {}
                Err(error) => self.fail(error),
            },
            Phase::AwaitReply(asked) => match MpaReply::parse(bytes) {
                Ok(Some((reply, len))) => {
                    let conclusion = negotiate::conclude(&self.config, asked, &reply);
                    self.receiver.consume(link, len);
                    self.startup_deadline = None;
                    self.replied(now, upper, path, link, reply, conclusion);
                }
                Ok(None) => {}
                Err(error) => self.fail(error),
            },
            Phase::Decide(_) | Phase::Full(_) | Phase::Rejected | Phase::Failed(_) => {}
        }
    }

    /// Initiator: the reply is there.
    fn replied<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        path: &Path,
        link: &mut dyn Link,
        reply: MpaReply,
        conclusion: Conclusion,
    ) {
        let conn = upper.conn;
        match conclusion {
            Conclusion::Accepted(agreed, rtr) => {
                self.enter_full_operation(&agreed, false);
                let private_data = reply.private_data;
                upper.ulp.event(conn, Event::Established { path: *path, agreed, private_data, rtr });
                let outcome = self.receiver.begin(upper, link, framing(&agreed));
                self.conclude(now, upper, outcome);
            }
            Conclusion::Terminate(agreed, error) => {
                self.enter_full_operation(&agreed, false);
                self.receiver.release(link);
                self.break_stream(upper, error);
            }
            Conclusion::Rejected => {
                self.phase = Phase::Rejected;
                self.receiver.release(link);
                let ird = reply.enhanced.map_or(UNNEGOTIATED, |e| e.ird);
                let ord = reply.enhanced.map_or(UNNEGOTIATED, |e| e.ord);
                upper.ulp.event(conn, Event::Rejected { private_data: reply.private_data, ird, ord });
            }
            Conclusion::Failed(error) => self.fail(error),
        }
    }

    fn enter_full_operation(&mut self, agreed: &Agreed, waits_for_first: bool) {
        let layout = Layout { origin: self.startup.len() as StreamOffset, markers: agreed.markers_sent };
        self.phase = Phase::Full(Transmitter { layout, crc: agreed.crc, waits_for_first });
    }

    /// The upper layer can take what it withheld: a receive was posted.
    pub fn resume<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        link: &mut dyn Link,
    ) {
        if self.withheld.is_some() {
            let mut upper = Upper { ulp, conn };
            let outcome = self.receiver.resume(&mut upper, link);
            self.conclude(now, &mut upper, outcome);
        }
    }

    /// The peer's FIN is next in order: all that it sent was taken. Call it when
    /// [`Self::holds_undelivered`] is false.
    pub fn peer_closed<U: Ulp<Placed = P>>(&mut self, ulp: &mut U, conn: ConnId) {
        match self.phase {
            Phase::Full(_) if self.receiver.is_stopped() => {}
            Phase::Full(_) if self.receiver.is_drained() => ulp.event(conn, Event::PeerClosed),
            Phase::Full(_) => self.break_stream(&mut Upper { ulp, conn }, MpaError::Truncated),
            Phase::AwaitReply(_) | Phase::AwaitRequest(_) | Phase::Decide(_) => {
                self.fail(MpaError::Truncated);
            }
            Phase::Rejected | Phase::Failed(_) => {}
        }
    }

    /// Runs the time limits that have passed.
    pub fn on_timer<U: Ulp<Placed = P>>(&mut self, now: Instant, ulp: &mut U, conn: ConnId) {
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        match self.phase {
            Phase::Full(_) => self.break_stream(&mut Upper { ulp, conn }, MpaError::Withheld),
            Phase::AwaitReply(_) | Phase::AwaitRequest(_) => self.fail(MpaError::StartupTimeout),
            Phase::Decide(_) | Phase::Rejected | Phase::Failed(_) => {}
        }
    }

    /// When [`Self::on_timer`] has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Full(_) => self.withheld.map(|(_, since)| since + self.config.withhold_timeout),
            Phase::AwaitReply(_) | Phase::AwaitRequest(_) => self.startup_deadline,
            Phase::Decide(_) | Phase::Rejected | Phase::Failed(_) => None,
        }
    }

    /// Why the start-up failed, when it did: TCP is then aborted at once (RFC 5044 section 8, code 4).
    pub fn failed(&self) -> Option<MpaError> {
        match self.phase {
            Phase::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// Bytes held: TCP advertises a window smaller by these.
    pub fn held_bytes(&self) -> usize {
        self.receiver.held_bytes()
    }

    /// Whether complete FPDUs wait for the upper layer.
    pub fn holds_undelivered(&self) -> bool {
        self.withheld.is_some()
    }

    /// What was counted so far.
    pub fn counters(&self) -> Counters {
        let (fpdus_sent, withheld) = (self.fpdus_sent, self.fpdus_withheld);
        Counters { fpdus_sent, withheld, ..*self.receiver.counters() }
    }

    /// Gives back every frame. The session is over.
    pub fn release(&mut self, link: &mut dyn Link) {
        self.receiver.stop();
        self.receiver.release(link);
        self.withheld = None;
    }

    /// Sees to what a turn of the receiver came to.
    fn conclude<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        outcome: Result<(), Halt>,
    ) {
        match outcome {
            Err(Halt::Broken(error)) => return self.break_stream(upper, error),
            Err(Halt::Stopped) => self.receiver.stop(),
            Err(Halt::Withheld) | Ok(()) => {}
        }
        let at = self.receiver.withheld_at();
        if self.withheld.map(|(at, _)| at) != at {
            self.withheld = at.map(|at| (at, now));
            self.fpdus_withheld += u64::from(at.is_some());
            if at.is_some() && self.config.withhold_timeout.is_zero() {
                self.break_stream(upper, MpaError::Withheld);
            }
        }
    }

    /// The stream is broken: nothing more of it is read (RFC 5044 section 8), and the upper layer says so
    /// to the peer.
    fn break_stream<U: Ulp<Placed = P>>(&mut self, upper: &mut Upper<'_, U>, error: MpaError) {
        self.receiver.stop();
        self.withheld = None;
        upper.ulp.event(upper.conn, Event::StreamError(error));
    }

    fn fail(&mut self, error: MpaError) {
        self.receiver.stop();
        self.phase = Phase::Failed(error);
    }
}

fn framing(agreed: &Agreed) -> Framing {
    Framing { markers: agreed.markers_received, crc: agreed.crc }
}
