//! [`Opening`]: the start-up of a connection (of MPA: RFC 5044 section 7.1).

use std::fmt;

use super::{MAX_FIRST_BYTES, MAX_STARTUP_BYTES, Session, SessionPhase};
use crate::{
    framing::{Answer, Full, StartUp, receiver::Upper},
    link::{FrameWriter, Link},
    seq::StreamOffset,
    time::Instant,
    ulp::{Event, Ulp},
    wire::Path,
};

/// State of a session until its start-up is over and the bytes before the first frame are sent. It is freed then, because
/// most connections of many are idle.
#[derive(Debug)]
pub(super) struct Opening<S> {
    pub(super) config: S,
    /// Bytes before the first frame: streaming data, if there is any, and our start-up frame.
    pub(super) bytes: Vec<u8>,
    /// Stream offset of the first byte of `bytes`.
    offset: StreamOffset,
    /// Number of `bytes` that TCP has taken.
    sent: usize,
    /// The time by which the peer's start-up frame must arrive.
    pub(super) deadline: Option<Instant>,
}

impl<S> Opening<S> {
    pub(super) fn new(config: S, bytes: Vec<u8>, deadline: Option<Instant>) -> Self {
        Self { config, bytes, offset: 0, sent: 0, deadline }
    }

    /// The bytes that TCP has not taken.
    pub(super) fn unsent(&self) -> &[u8] {
        self.bytes.get(self.sent..).unwrap_or_default()
    }

    /// Stream offset of the end of the queued bytes, where our first frame begins.
    pub(super) fn end(&self) -> StreamOffset {
        self.offset + self.bytes.len() as u64
    }

    /// Appends bytes to those that precede the first frame. Sent bytes are dropped when no other bytes wait, or when they
    /// reach [`MAX_STARTUP_BYTES`], so that the buffer does not grow while the peer never takes all bytes.
    pub(super) fn queue(&mut self, bytes: &[u8]) {
        if self.sent == self.bytes.len() || self.sent >= MAX_STARTUP_BYTES {
            self.offset += self.sent as u64;
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }
}

#[expect(private_bounds, reason = "no other crate adds a framing")]
impl<P: Copy + fmt::Debug, S: StartUp> Session<P, S> {
    /// Frees the state of the start-up, if the start-up is over and its bytes are sent.
    fn end_opening(&mut self) {
        let over = match self.phase {
            SessionPhase::Full(_) | SessionPhase::Rejected | SessionPhase::Failed(_) => true,
            SessionPhase::Streaming(_)
            | SessionPhase::AwaitReply(_)
            | SessionPhase::AwaitRequest(_)
            | SessionPhase::Decide(_) => false,
        };
        if over && self.opening.as_ref().is_some_and(|opening| opening.unsent().is_empty()) {
            self.opening = None;
        }
    }

    /// Writes unsent bytes that precede the first frame and returns the number of written ones; `None` if all were sent.
    pub(super) fn fill_opening(&mut self, now: Instant, out: &mut FrameWriter<'_>) -> Option<usize> {
        let opening = self.opening.as_mut().filter(|opening| !opening.unsent().is_empty())?;
        let written = out.put(opening.unsent());
        opening.sent += written;
        if matches!(self.phase, SessionPhase::AwaitReply(_)) && opening.deadline.is_none() {
            opening.deadline = Some(now + opening.config.limits().startup_timeout);
        }
        self.end_opening();
        Some(written)
    }

    /// Processes the peer's start-up frame, if it is complete.
    pub(super) fn read_startup<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        path: &Path,
        link: &mut dyn Link,
    ) {
        let mut bytes = [0; MAX_FIRST_BYTES];
        let len = self.receiver.peek(link, &mut bytes);
        let bytes = bytes.get(..len).unwrap_or_default();
        let Some(opening) = &mut self.opening else { return };
        match &self.phase {
            SessionPhase::AwaitRequest(listener) => match opening.config.parse_request(bytes) {
                Ok(Some((offer, len))) => {
                    let listener = *listener;
                    self.receiver.consume(link, len);
                    if !self.receiver.is_drained() {
                        return self.fail(link, S::DATA_BEFORE_ANSWER);
                    }
                    opening.deadline = None;
                    self.phase = SessionPhase::Decide(Box::new(offer.clone()));
                    upper
                        .ulp
                        .event(upper.conn, Event::Requested { listener, path: *path, offer: offer.into() });
                }
                Ok(None) => {}
                Err(error) => self.fail(link, error),
            },
            SessionPhase::AwaitReply(asked) => {
                match opening.config.parse_answer(asked, bytes, opening.end()) {
                    Ok(Some((answer, len))) => {
                        self.receiver.consume(link, len);
                        opening.deadline = None;
                        self.answered(now, upper, path, link, answer);
                        self.end_opening();
                    }
                    Ok(None) => {}
                    Err(error) => self.fail(link, error),
                }
            }
            SessionPhase::Streaming(_)
            | SessionPhase::Decide(_)
            | SessionPhase::Full(_)
            | SessionPhase::Rejected
            | SessionPhase::Failed(_) => {}
        }
    }

    /// Initiator: acts on the answer.
    fn answered<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        path: &Path,
        link: &mut dyn Link,
        answer: Answer<S>,
    ) {
        let conn = upper.conn;
        match answer {
            Answer::Accepted { full: Full { agreed, transmitter, frames }, private_data } => {
                self.phase = SessionPhase::Full(transmitter);
                upper.ulp.event(conn, Event::Established { path: *path, agreed, private_data });
                let outcome = self.receiver.begin(now, upper, link, frames);
                self.apply_outcome(now, upper, link, outcome);
            }
            Answer::Terminate(full, error) => {
                self.phase = SessionPhase::Full(full.transmitter);
                upper.ulp.event(conn, Event::Disagreed(full.agreed));
                self.break_stream(upper, link, error);
            }
            Answer::Rejected { private_data, ird, ord } => {
                self.phase = SessionPhase::Rejected;
                self.receiver.stop(link);
                upper.ulp.event(conn, Event::Rejected { private_data, ird, ord });
            }
            Answer::Failed(error) => self.fail(link, error),
        }
    }
}
