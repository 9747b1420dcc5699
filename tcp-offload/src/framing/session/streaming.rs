//! Streaming data before MPA (RFC 5044 sections 7.1.3 and 7.1.5), for protocols that log in first.
//!
//! Both applications exchange bytes over TCP and agree on where MPA begins. The responder then starts MPA together with
//! its last streaming bytes, and the initiator when it has received them. In each direction, MPA begins behind the last
//! streaming byte that was sent or taken; markers count from the first FPDU, as always.

use std::fmt;

use super::{MAX_STARTUP_BYTES, Session, SessionPhase, StartUp, Upper};
use crate::{
    framing::SetupError,
    link::Link,
    time::Instant,
    ulp::{ConnId, Event, ListenerId, Ulp},
    wire::Path,
};

/// State of a connection that carries streaming data.
#[derive(Debug)]
pub(super) struct Streaming<S: StartUp> {
    role: Role<S>,
    /// The time by which MPA must have been started, once the connection was reported.
    pub(super) deadline: Option<Instant>,
    /// Bytes of the peer have arrived.
    heard: bool,
    /// Readable bytes were reported to the upper layer, which has not taken all of them.
    told: bool,
}

/// This end's role in the MPA start-up that follows.
#[derive(Debug)]
enum Role<S: StartUp> {
    /// The request that follows, and its bytes.
    Initiator(S::Asked, Vec<u8>),
    Responder(ListenerId),
}

impl<S: StartUp> Streaming<S> {
    pub(super) const fn initiator(asked: S::Asked, request: Vec<u8>) -> Self {
        Self { role: Role::Initiator(asked, request), deadline: None, heard: false, told: false }
    }

    pub(super) const fn responder(listener: ListenerId) -> Self {
        Self { role: Role::Responder(listener), deadline: None, heard: false, told: false }
    }

    /// Whether nothing has arrived at a responder.
    pub(super) const fn is_silent(&self) -> bool {
        !self.heard
    }
}

#[expect(private_bounds, reason = "no other crate adds a framing")]
impl<P: Copy + fmt::Debug, S: StartUp> Session<P, S> {
    /// Whether the connection carries streaming data and was not reported.
    pub fn awaits_report(&self) -> bool {
        matches!(&self.phase, SessionPhase::Streaming(streaming) if streaming.deadline.is_none())
    }

    /// Reports that the connection, whose TCP is established, carries streaming data, which may be exchanged from now
    /// on for [`crate::mpa::MpaConfig::streaming`].
    pub fn report_streaming<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
    ) {
        let SessionPhase::Streaming(streaming) = &mut self.phase else { return };
        let limit = self.opening.as_ref().and_then(|opening| opening.config.limits().streaming);
        streaming.deadline = Some(now + limit.unwrap_or_default());
        let listener = match streaming.role {
            Role::Initiator(..) => None,
            Role::Responder(listener) => Some(listener),
        };
        ulp.event(conn, Event::Streaming { listener, path: *path });
        self.report_readable(ulp, conn);
    }

    /// Reports streaming bytes that can be taken, once until all are taken, if the connection was reported.
    pub(super) fn report_readable<U: Ulp<Placed = P>>(&mut self, ulp: &mut U, conn: ConnId) {
        let readable = self.receiver.unfinished_bytes() > 0;
        if let SessionPhase::Streaming(streaming) = &mut self.phase {
            streaming.heard |= readable;
            if readable && streaming.deadline.is_some() && !std::mem::replace(&mut streaming.told, true) {
                ulp.event(conn, Event::StreamReadable);
            }
        }
    }

    /// Queues streaming bytes; returns the number of bytes taken. At most 64 KiB wait to be sent.
    pub fn stream_send(&mut self, bytes: &[u8]) -> Result<usize, SetupError> {
        let (SessionPhase::Streaming(_), Some(opening)) = (&self.phase, &mut self.opening) else {
            return Err(SetupError::NotStreaming);
        };
        let room = MAX_STARTUP_BYTES.saturating_sub(opening.unsent().len());
        let taken = bytes.get(..room).unwrap_or(bytes);
        opening.queue(taken);
        Ok(taken.len())
    }

    /// Takes streaming bytes of the peer into `out`; returns their number. Bytes that are not taken when MPA begins
    /// belong to MPA.
    pub fn stream_recv(&mut self, link: &mut dyn Link, out: &mut [u8]) -> Result<usize, SetupError> {
        let SessionPhase::Streaming(streaming) = &mut self.phase else {
            return Err(SetupError::NotStreaming);
        };
        let len = self.receiver.peek(link, out);
        self.receiver.consume(link, len);
        streaming.told = self.receiver.unfinished_bytes() > 0;
        Ok(len)
    }

    /// Begins MPA behind the streaming bytes that were sent and taken. `last` is sent before (RFC 5044 section 7.1.5,
    /// rule 2). The initiator's request follows with the next [`Self::fill`]; the responder waits for it.
    pub fn begin_mpa<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        link: &mut dyn Link,
        last: &[u8],
    ) -> Result<(), SetupError> {
        let sent = self.stream_send(last)?;
        let Some(opening) = &mut self.opening else { return Err(SetupError::NotStreaming) };
        if sent < last.len() {
            opening.bytes.truncate(opening.bytes.len() - sent);
            return Err(SetupError::StreamBufferFull);
        }
        match std::mem::replace(&mut self.phase, SessionPhase::Rejected) {
            SessionPhase::Streaming(streaming) => match streaming.role {
                Role::Initiator(asked, request) => {
                    opening.queue(&request);
                    self.phase = SessionPhase::AwaitReply(Box::new(asked));
                }
                Role::Responder(listener) => self.phase = SessionPhase::AwaitRequest(listener),
            },
            other => self.phase = other,
        }
        opening.deadline = Some(now + opening.config.limits().startup_timeout);
        let mut upper = Upper { ulp, conn };
        self.read_startup(now, &mut upper, path, link);
        Ok(())
    }
}
