//! The phases of one connection: start-up (of MPA: RFC 5044 section 7.1), full operation, and its end.
//!
//! The stack calls a [`Session`] with each payload that TCP took and each segment that TCP may send; the
//! session calls the upper layer. It never touches TCP itself.

mod opening;
mod streaming;

use std::{fmt, time::Duration};

use self::{opening::Opening, streaming::Streaming};
use super::{
    Carried, FramingCounters, FramingError, Full, Limits, Mulpdu, StartUp, Transmitter,
    receiver::{Halt, Receiver, Upper},
};
use crate::{
    framing::{AcceptParams, SetupError},
    link::{FrameWriter, Link},
    seq::StreamOffset,
    tcp::Filled,
    time::Instant,
    ulp::{ConnId, Event, ListenerId, Pulled, Ulp},
    wire::Path,
};

/// Largest start-up frame, in bytes: 532 of an MPA Request or Reply, 548 of a segment of RDMA/TCP.
pub(crate) const MAX_FIRST_BYTES: usize = 560;

/// Bytes of the shortest frame that carries a ULPDU: an FPDU with an empty one.
const LEAST_FRAME: usize = 8;

/// Largest number of bytes held during the start-up. The segments of a responder's first frames may overtake its
/// answer.
const MAX_STARTUP_BYTES: usize = 1 << 16;

/// The framing of one connection, between its TCP and the upper layer. `P` is [`Ulp::Placed`]; `S` is the framing's
/// start-up with this end's settings.
#[derive(Debug)]
#[expect(private_bounds, reason = "no other crate adds a framing")]
pub struct Session<P, S: StartUp> {
    phase: SessionPhase<S>,
    /// State of the start-up; `None` once the start-up is over and its bytes are sent.
    opening: Option<Box<Opening<S>>>,
    withhold_timeout: Duration,
    hold_bytes: usize,
    receiver: Receiver<P, S::Framing>,
    /// MULPDU of the last segment.
    mulpdu: Mulpdu,
    /// End of the held bytes at an earlier time, and that time. The cursor has not reached the end since, so the oldest held
    /// bytes are at least that old.
    stalled: Option<(StreamOffset, Instant)>,
    ulpdus_sent: u64,
}

/// The outcome of a received payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// It was delivered, or its bytes have no effect. The session is in full operation and holds nothing; it held nothing before.
    Whole,
    /// It was taken; bytes of it may be held, and the state of the session may have changed.
    InPart,
    /// It was not taken.
    Not,
}

impl From<bool> for Taken {
    fn from(taken: bool) -> Self {
        if taken { Self::InPart } else { Self::Not }
    }
}

/// Each frame asks for the phase; see [`AnySession`](super::AnySession).
#[derive(Debug)]
#[repr(u8)]
enum SessionPhase<S: StartUp> {
    /// The applications exchange streaming data; the framing was not started.
    Streaming(Box<Streaming<S>>),
    /// Initiator: the request is sent, the reply is awaited.
    AwaitReply(Box<S::Asked>),
    /// Responder: the request is awaited.
    AwaitRequest(ListenerId),
    /// Responder: the application decides whether to accept.
    Decide(Box<S::Offered>),
    /// Frames in both directions.
    Full(S::Transmitter),
    /// The responder rejected the connection; nothing follows the start-up frames.
    Rejected,
    /// The start-up failed.
    Failed(FramingError),
}

#[expect(private_bounds, reason = "no other crate adds a framing")]
impl<P: Copy + fmt::Debug, S: StartUp> Session<P, S> {
    /// The session of an initiator. The request is sent with the first [`Self::fill`].
    pub fn initiator(config: S, private_data: Vec<u8>, ird: u16, ord: u16) -> Result<Self, SetupError> {
        let (asked, startup) = config.request(private_data, ird, ord)?;
        if config.limits().streaming.is_some() {
            let streaming = Box::new(Streaming::initiator(asked, startup));
            return Ok(Self::new(config, SessionPhase::Streaming(streaming), Vec::new(), None));
        }
        Ok(Self::new(config, SessionPhase::AwaitReply(Box::new(asked)), startup, None))
    }

    /// The session of a responder, whose TCP connection was accepted by `listener`. The request must arrive within
    /// [`crate::mpa::MpaConfig::startup_timeout`] from `now`.
    pub fn responder(now: Instant, config: S, listener: ListenerId) -> Self {
        if config.limits().streaming.is_some() {
            let streaming = Box::new(Streaming::responder(listener));
            return Self::new(config, SessionPhase::Streaming(streaming), Vec::new(), None);
        }
        let deadline = now + config.limits().startup_timeout;
        Self::new(config, SessionPhase::AwaitRequest(listener), Vec::new(), Some(deadline))
    }

    fn new(config: S, phase: SessionPhase<S>, bytes: Vec<u8>, deadline: Option<Instant>) -> Self {
        let Limits { withhold_timeout, hold_bytes, .. } = config.limits();
        Self {
            receiver: Receiver::new(),
            mulpdu: Mulpdu::default(),
            phase,
            opening: Some(Box::new(Opening::new(config, bytes, deadline))),
            withhold_timeout,
            hold_bytes,
            stalled: None,
            ulpdus_sent: 0,
        }
    }

    /// Responder: accepts the request. [`Event::Established`] is reported before this returns. The reply is sent with
    /// the next [`Self::fill`], FPDUs only after the initiator's first FPDU.
    pub fn accept<U: Ulp<Placed = P>>(
        &mut self,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        params: AcceptParams,
    ) -> Result<(), SetupError> {
        let (SessionPhase::Decide(offer), Some(opening)) = (&self.phase, &mut self.opening) else {
            return Err(SetupError::NoRequest);
        };
        let (answer, Full { agreed, transmitter, frames }) =
            opening.config.accept(offer, params, opening.end())?;
        opening.queue(&answer);
        self.phase = SessionPhase::Full(transmitter);
        self.receiver.expect(frames);
        let private_data = Vec::new();
        ulp.event(conn, Event::Established { path: *path, agreed, private_data });
        Ok(())
    }

    /// Responder: rejects the request. The reply is sent with the next [`Self::fill`], followed by a FIN.
    pub fn reject(&mut self, private_data: &[u8]) -> Result<(), SetupError> {
        let (SessionPhase::Decide(offer), Some(opening)) = (&self.phase, &mut self.opening) else {
            return Err(SetupError::NoRequest);
        };
        let answer = opening.config.reject(offer, private_data.to_vec())?;
        opening.queue(&answer);
        self.phase = SessionPhase::Rejected;
        Ok(())
    }

    /// Whether [`Self::fill`] may have payload or the end of this direction. If it has neither, the allocation of a
    /// frame was wasted.
    pub fn has_data<U: Ulp<Placed = P>>(&self, ulp: &U, conn: ConnId) -> bool {
        if self.opening.as_ref().is_some_and(|opening| !opening.unsent().is_empty()) {
            return true;
        }
        match self.phase {
            SessionPhase::Full(_) => ulp.has_data(conn),
            SessionPhase::Rejected => true,
            SessionPhase::Streaming(_)
            | SessionPhase::AwaitReply(_)
            | SessionPhase::AwaitRequest(_)
            | SessionPhase::Decide(_)
            | SessionPhase::Failed(_) => false,
        }
    }

    /// Writes the payload of the next segment, which begins at `offset`: (a part of) the start-up frame, or as many
    /// whole FPDUs as the upper layer has and `out` has room for. MULPDU follows from TCP's EMSS `emss`; `out.room()`
    /// may be less, when the peer's window is smaller.
    #[inline]
    pub fn fill<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        offset: StreamOffset,
        emss: usize,
        out: &mut FrameWriter<'_>,
    ) -> Filled {
        if let Some(written) = self.fill_opening(now, out) {
            let segment = Filled::Segment { len: written, more: self.has_data(ulp, conn) };
            return if written > 0 { segment } else { Filled::Nothing };
        }
        let SessionPhase::Full(transmitter) = self.phase else {
            return if matches!(self.phase, SessionPhase::Rejected) {
                Filled::Finish
            } else {
                Filled::Nothing
            };
        };
        self.fill_frames(transmitter, ulp, conn, offset, emss, out)
    }

    #[inline]
    fn mulpdu_for(&mut self, transmitter: S::Transmitter, emss: usize) -> Mulpdu {
        if self.mulpdu.emss != emss {
            self.mulpdu = transmitter.mulpdu(emss);
        }
        self.mulpdu
    }

    #[inline]
    fn fill_frames<U: Ulp<Placed = P>>(
        &mut self,
        transmitter: S::Transmitter,
        ulp: &mut U,
        conn: ConnId,
        offset: StreamOffset,
        emss: usize,
        out: &mut FrameWriter<'_>,
    ) -> Filled {
        let mulpdu = if out.room() > emss {
            transmitter.probe_mulpdu(offset, emss, out.room())
        } else {
            self.mulpdu_for(transmitter, emss)
        };
        // After a stream error an FPDU has arrived, though not a valid one, so the Terminate may be sent.
        if transmitter.waits_for_first() && !self.receiver.has_begun() && !self.receiver.is_stopped() {
            return fill_nothing(transmitter, ulp, conn, offset, mulpdu, out);
        }
        let Some(mut writer) = transmitter.begin(out, offset, mulpdu) else { return Filled::Nothing };
        let pulled = ulp.pull(conn, &mut writer);
        let len = match pulled {
            Pulled::Ulpdu | Pulled::LastUlpdu => transmitter.finish(&mut writer),
            Pulled::Nothing => return Filled::Nothing,
            Pulled::Finish => return Filled::Finish,
        };
        self.ulpdus_sent += 1;
        if pulled == Pulled::LastUlpdu || S::Transmitter::ONE_FRAME || out.room() < LEAST_FRAME {
            return Filled::Segment { len, more: pulled == Pulled::Ulpdu };
        }
        let (added, more) = self.fill_more(transmitter, ulp, conn, offset + len as u64, mulpdu, out);
        Filled::Segment { len: len + added, more }
    }

    /// Writes the FPDUs behind the first one of a segment, from `offset` on. Returns the number of their bytes, and whether there is
    /// more to send.
    #[inline(never)]
    fn fill_more<U: Ulp<Placed = P>>(
        &mut self,
        transmitter: S::Transmitter,
        ulp: &mut U,
        conn: ConnId,
        offset: StreamOffset,
        mulpdu: Mulpdu,
        out: &mut FrameWriter<'_>,
    ) -> (usize, bool) {
        let (mut len, mut more) = (0, true);
        while more && let Some(mut writer) = transmitter.begin(out, offset + len as u64, mulpdu) {
            match ulp.pull(conn, &mut writer) {
                pulled @ (Pulled::Ulpdu | Pulled::LastUlpdu) => {
                    more = pulled == Pulled::Ulpdu;
                    len += transmitter.finish(&mut writer);
                    self.ulpdus_sent += 1;
                }
                Pulled::Nothing => {
                    // Work that needs no ULPDU may have been the last.
                    more = ulp.has_data(conn);
                    break;
                }
                // The FIN follows these FPDUs: the next call returns it.
                Pulled::Finish => break,
            }
        }
        (len, more)
    }

    /// Processes a payload. Its frame is recycled to `link` now or when its bytes are no longer needed. When
    /// [`Carried::spare`] or the session's own limit is too small, TCP must treat the payload as lost.
    ///
    /// The fast path is [`Self::take_whole`].
    pub fn receive<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        link: &mut dyn Link,
        carried: Carried,
    ) -> Taken {
        self.receive_rest(now, &mut Upper { ulp, conn }, path, link, carried, Ok(()))
    }

    /// The first arm of [`Self::receive`], for a session that [allows the fast path](Self::allows_fast_path): takes the whole frames
    /// from the beginning of a payload in one piece. Returns whether that was all of it; otherwise [`Self::receive_rest`] must follow.
    #[inline]
    pub(super) fn take_whole<U: Ulp<Placed = P>>(
        &mut self,
        ulp: &mut U,
        conn: ConnId,
        offset: StreamOffset,
        payload: &[u8],
    ) -> Result<bool, Halt> {
        debug_assert!(self.allows_fast_path());
        self.receiver.take_whole(&mut Upper { ulp, conn }, offset, payload)
    }

    /// The general arm of [`Self::receive`], after [`Self::take_whole`] with this outcome or without.
    pub(super) fn receive_rest<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        path: &Path,
        link: &mut dyn Link,
        carried: Carried,
        outcome: Result<(), Halt>,
    ) -> Taken {
        let most = self.hold_bytes.min(self.held_bytes().saturating_add(carried.spare));
        match &self.phase {
            SessionPhase::Full(_) => {
                let fast = carried.fast;
                let (taken, outcome) = self.receiver.receive(now, upper, link, carried, most, outcome);
                self.conclude(now, upper, link, fast, taken, outcome)
            }
            SessionPhase::AwaitReply(_) | SessionPhase::AwaitRequest(_) => {
                let most = most.min(MAX_STARTUP_BYTES);
                let taken = self.receiver.collect(link, carried, most);
                self.read_startup(now, upper, path, link);
                Taken::from(taken)
            }
            SessionPhase::Streaming(_) => {
                // The receiver keeps any payload in order, as of an FPDU; streaming data have no such end.
                let most = most.min(MAX_STARTUP_BYTES);
                if self.held_bytes() + carried.payload.len > most {
                    link.recycle(carried.frame);
                    return Taken::Not;
                }
                let taken = self.receiver.collect(link, carried, most);
                self.report_readable(upper.ulp, upper.conn);
                Taken::from(taken)
            }
            SessionPhase::Decide(_) => {
                link.recycle(carried.frame);
                self.fail(link, S::DATA_BEFORE_ANSWER);
                Taken::InPart
            }
            SessionPhase::Rejected | SessionPhase::Failed(_) => {
                link.recycle(carried.frame);
                Taken::InPart
            }
        }
    }

    /// Acts on the outcome of a payload in full operation. `fast`: see [`Carried::fast`].
    fn conclude<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        fast: bool,
        taken: bool,
        outcome: Result<(), Halt>,
    ) -> Taken {
        if fast && taken && outcome.is_ok() && self.allows_fast_path() {
            return Taken::Whole;
        }
        self.apply_outcome(now, upper, link, outcome);
        Taken::from(taken)
    }

    /// Offers a withheld FPDU to the upper layer again, after a receive was posted.
    pub fn resume<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        link: &mut dyn Link,
    ) {
        if self.holds_undelivered() {
            let mut upper = Upper { ulp, conn };
            let outcome = self.receiver.resume(now, &mut upper, link);
            self.apply_outcome(now, &mut upper, link, outcome);
        }
    }

    /// Processes the peer's FIN, which is next in order. The caller must call this only while
    /// [`Self::holds_undelivered`] is false.
    pub fn peer_closed<U: Ulp<Placed = P>>(&mut self, ulp: &mut U, conn: ConnId, link: &mut dyn Link) {
        match self.phase {
            SessionPhase::Full(_) if self.receiver.is_stopped() => {}
            SessionPhase::Full(_) if self.receiver.is_drained() => ulp.event(conn, Event::PeerClosed),
            SessionPhase::Full(_) => self.break_stream(&mut Upper { ulp, conn }, link, S::TRUNCATED),
            SessionPhase::Streaming(_)
            | SessionPhase::AwaitReply(_)
            | SessionPhase::AwaitRequest(_)
            | SessionPhase::Decide(_) => {
                self.fail(link, S::TRUNCATED);
            }
            SessionPhase::Rejected | SessionPhase::Failed(_) => {}
        }
    }

    /// Acts on the time limit that has passed, if one has.
    pub fn on_timer<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        link: &mut dyn Link,
    ) {
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        match self.phase {
            SessionPhase::Full(_) => self.break_stream(&mut Upper { ulp, conn }, link, S::WITHHELD),
            SessionPhase::Streaming(_) | SessionPhase::AwaitReply(_) | SessionPhase::AwaitRequest(_) => {
                self.fail(link, S::TIMED_OUT);
            }
            SessionPhase::Decide(_) | SessionPhase::Rejected | SessionPhase::Failed(_) => {}
        }
    }

    /// The time at which [`Self::on_timer`] must be called, if any.
    pub fn deadline(&self) -> Option<Instant> {
        match self.phase {
            SessionPhase::Full(_) => {
                self.receiver.withheld_since().map(|since| since + self.withhold_timeout)
            }
            SessionPhase::Streaming(ref streaming) => streaming.deadline,
            SessionPhase::AwaitReply(_) | SessionPhase::AwaitRequest(_) => self.opening.as_ref()?.deadline,
            SessionPhase::Decide(_) | SessionPhase::Rejected | SessionPhase::Failed(_) => None,
        }
    }

    /// The error of a failed start-up, after which TCP is aborted at once (RFC 5044 section 8, code 4).
    pub fn failed(&self) -> Option<FramingError> {
        match self.phase {
            SessionPhase::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// Responder: whether the initiator's MPA Request, or the first streaming data, is still awaited.
    pub fn is_silent(&self) -> bool {
        match &self.phase {
            SessionPhase::AwaitRequest(_) => true,
            SessionPhase::Streaming(streaming) => streaming.is_silent(),
            _ => false,
        }
    }

    /// Whether received payload is still processed. It is not after a stream error, or after the start-up has failed or was
    /// rejected.
    pub fn is_reading(&self) -> bool {
        match self.phase {
            SessionPhase::Streaming(_)
            | SessionPhase::AwaitReply(_)
            | SessionPhase::AwaitRequest(_)
            | SessionPhase::Decide(_) => true,
            SessionPhase::Full(_) => !self.receiver.is_stopped(),
            SessionPhase::Rejected | SessionPhase::Failed(_) => false,
        }
    }

    /// Bytes held, which count towards the limits on memory.
    pub fn held_bytes(&self) -> usize {
        self.receiver.held_bytes()
    }

    /// Bytes by which held data reduces TCP's window. The unfinished FPDU at the cursor does not count: only its rest
    /// can free it, so an FPDU longer than the window must not close the window.
    pub fn window_bytes(&self) -> usize {
        self.receiver.held_bytes() - self.receiver.unfinished_bytes()
    }

    /// The time since when the oldest held bytes have waited for the peer to fill a gap or finish an FPDU. `None`
    /// when no bytes wait, or when another time limit applies (that of the start-up,
    /// [`crate::mpa::MpaConfig::withhold_timeout`]).
    pub fn stalled_since(&self) -> Option<Instant> {
        self.stalled.map(|(_, since)| since)
    }

    /// Drops the bytes held beyond a gap, to free memory for other connections. The peer must retransmit them, so the
    /// caller must tell TCP (RFC 2018 section 8). Without such bytes only the unfinished FPDU at the cursor is held;
    /// it was acknowledged, so the stream ends with an error. Returns whether the stream continues.
    pub fn shed<U: Ulp<Placed = P>>(&mut self, ulp: &mut U, conn: ConnId, link: &mut dyn Link) -> bool {
        self.stalled = None;
        let shed = self.receiver.shed(link);
        if !shed {
            self.break_stream(&mut Upper { ulp, conn }, link, S::STALLED);
        }
        shed
    }

    /// Whether the connection is in full operation and nothing is held or withheld: it has nothing to report, and uses
    /// no shared memory.
    #[inline]
    pub fn allows_fast_path(&self) -> bool {
        // Nearly always all of it is true, so all is tested at once.
        matches!(self.phase, SessionPhase::Full(_))
            & self.opening.is_none()
            & self.stalled.is_none()
            & self.receiver.allows_fast_path()
    }

    /// Whether the upper layer withholds a complete FPDU.
    pub fn holds_undelivered(&self) -> bool {
        self.receiver.withheld_since().is_some()
    }

    /// The session's counters.
    pub fn counters(&self) -> FramingCounters {
        FramingCounters { ulpdus_sent: self.ulpdus_sent, ..*self.receiver.counters() }
    }

    /// Recycles every frame at the end of the session.
    pub fn release(&mut self, link: &mut dyn Link) {
        self.stop(link);
    }

    fn stop(&mut self, link: &mut dyn Link) {
        self.receiver.stop(link);
        self.stalled = None;
    }

    /// Acts on the outcome of the receiver's work: reports a stream error, and updates the time limits.
    fn apply_outcome<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        outcome: Result<(), Halt>,
    ) {
        match outcome {
            Err(Halt::Broken(error)) => return self.break_stream(upper, link, error),
            Err(Halt::Stopped) => self.stop(link),
            Err(Halt::Withheld) | Ok(()) => {}
        }
        if self.holds_undelivered() && self.withhold_timeout.is_zero() {
            return self.break_stream(upper, link, S::WITHHELD);
        }
        let held_to = self.receiver.held_to().filter(|_| !self.holds_undelivered());
        let passed = self.stalled.is_none_or(|(end, _)| self.receiver.cursor() >= end);
        self.stalled =
            if passed { held_to.map(|end| (end, now)) } else { self.stalled.filter(|_| held_to.is_some()) };
    }

    /// Stops reading after a stream error (RFC 5044 section 8) and reports it to the upper layer, which sends the
    /// Terminate.
    fn break_stream<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        link: &mut dyn Link,
        error: FramingError,
    ) {
        self.stop(link);
        upper.ulp.event(upper.conn, Event::StreamError(error));
    }

    fn fail(&mut self, link: &mut dyn Link, error: FramingError) {
        self.stop(link);
        self.phase = SessionPhase::Failed(error);
    }
}

/// Fills no segment, because no FPDU may be sent yet. A FIN is not an FPDU and may be sent: without room, the upper layer can only
/// answer whether it has finished.
#[inline(never)]
fn fill_nothing<T: Transmitter, U: Ulp>(
    transmitter: T,
    ulp: &mut U,
    conn: ConnId,
    offset: StreamOffset,
    mulpdu: Mulpdu,
    out: &mut FrameWriter<'_>,
) -> Filled {
    let Some(mut writer) = transmitter.begin(out, offset, mulpdu) else { return Filled::Nothing };
    writer.room = 0;
    if ulp.pull(conn, &mut writer) == Pulled::Finish { Filled::Finish } else { Filled::Nothing }
}
