//! Placed ULPDUs in order: what [`Ulp::deliver`] does. Here messages become completions, requests become
//! work, and Terminate ends the stream.
//!
//! [`Ulp::deliver`]: xwarp_tcp::ulp::Ulp::deliver

use super::{
    Opcode, Shared, WorkCompletion,
    pieces::Stretches,
    placement::{Context, Refused, Segment},
    qp::{Asked, AskedKind, QueuePair, ToAnswer},
    send_queue::Progress,
    work::{Access, Operation, WcStatus},
};
use crate::{
    ddp::{DdpError, Header, Msn, STag, Tagged, Untagged},
    rdmap::{AtomicResponse, RdmapError, ReadRequest, StreamError},
};

impl QueuePair {
    /// Delivers the next ULPDU.
    pub(crate) fn deliver(&mut self, shared: &mut Shared, segment: Segment) -> Result<(), Refused> {
        match segment {
            Segment::Silent => Ok(()),
            Segment::Send { header, len, invalidate, solicited, context } => {
                let invalidate = invalidate.then(|| STag::new(header.word));
                self.deliver_send(shared, &header, len, invalidate, solicited, context)
            }
            Segment::Immediate { header, data, solicited, context } => {
                self.due(header.msn, self.rx.send_msn, context)?;
                self.complete_receive(shared, |completion| WorkCompletion {
                    opcode: Opcode::RecvImmediate,
                    immediate: Some(data),
                    solicited,
                    ..completion
                });
                Ok(())
            }
            Segment::ReadResponse { header, len, context } => {
                self.deliver_response(shared, &header, len, context)
            }
            Segment::ReadRequest { request, context } => self.deliver_read_request(shared, request, context),
            Segment::AtomicRequest { request, context } => {
                self.accept_request(context)?;
                self.check(shared.check_atomic(self.user(), &request), context)?;
                self.tx.to_answer.push_back(ToAnswer::Atomic { request, context });
                shared.wake(self.conn);
                Ok(())
            }
            Segment::AtomicResponse { response, context } => {
                self.deliver_atomic_response(shared, response, context)
            }
            Segment::Terminate { terminate } => {
                self.terminated(terminate, shared);
                Ok(())
            }
        }
    }

    /// The message of queue 0 that is due is this one.
    fn due(&self, msn: Msn, expected: Msn, context: Context) -> Result<(), Refused> {
        if msn == expected { Ok(()) } else { Err(Refused::Stream(DdpError::MsnRange.into(), Some(context))) }
    }

    fn check<T>(&self, result: Result<T, RdmapError>, context: Context) -> Result<T, Refused> {
        result.map_err(|error| Refused::Stream(error.into(), Some(context)))
    }

    fn deliver_send(
        &mut self,
        shared: &mut Shared,
        header: &Untagged,
        len: u32,
        invalidate: Option<STag>,
        solicited: bool,
        context: Context,
    ) -> Result<(), Refused> {
        self.due(header.msn, self.rx.send_msn, context)?;
        self.rx.send_bytes += u64::from(len);
        if !header.last {
            return Ok(());
        }
        // The last segment has the highest offset, so a message without holes is as long as its segments
        // together (RFC 5041 sections 4.1 and 5.4).
        let total = u64::from(header.mo) + u64::from(len);
        if self.rx.send_bytes != total {
            return Err(Refused::Receive(WcStatus::LocalLength, DdpError::InvalidMo, context));
        }
        if let Some(stag) = invalidate {
            let alone = shared.is_alone(self.attributes.pd);
            let done = shared.keys.invalidate_remotely(self.user(), stag, alone);
            self.check(done, context)?;
        }
        self.complete_receive(shared, |completion| WorkCompletion {
            byte_len: total as u32,
            invalidated: invalidate,
            solicited,
            ..completion
        });
        Ok(())
    }

    /// Completes the receive of the message that was due, as `describe` says.
    fn complete_receive(
        &mut self,
        shared: &mut Shared,
        describe: impl FnOnce(WorkCompletion) -> WorkCompletion,
    ) {
        self.rx.send_msn = self.rx.send_msn.next();
        self.rx.send_bytes = 0;
        if let Some(receive) = self.rq.complete() {
            let completion = describe(self.completion(receive.wr_id, WcStatus::Success, Opcode::Recv));
            self.push_recv(completion, shared);
        }
    }

    /// A request of the peer's: the one that is due, and not one more than we promised to take (IRD).
    fn accept_request(&mut self, context: Context) -> Result<(), Refused> {
        if let Header::Untagged(header) = context.header {
            self.due(header.msn, self.rx.request_msn, context)?;
        }
        if self.tx.to_answer.len() >= usize::from(self.ird) {
            return Err(Refused::Stream(DdpError::NoBuffer.into(), Some(context)));
        }
        self.rx.request_msn = self.rx.request_msn.next();
        Ok(())
    }

    /// Checks of RFC 5040 section 7.2; a request for no bytes names nothing (section 5.2.1).
    fn deliver_read_request(
        &mut self,
        shared: &mut Shared,
        request: ReadRequest,
        context: Context,
    ) -> Result<(), Refused> {
        self.accept_request(context)?;
        if request.len > 0 {
            let (stag, to, len) = (request.source_stag, request.source_to, u64::from(request.len));
            let opened = shared.keys.open(self.user(), stag, Access::REMOTE_READ, to, len);
            self.check(opened.map(|_| ()).map_err(RdmapError::from), context)?;
        }
        self.tx.to_answer.push_back(ToAnswer::Read { request, sent: 0, context });
        shared.wake(self.conn);
        Ok(())
    }

    fn deliver_response(
        &mut self,
        shared: &mut Shared,
        header: &Tagged,
        len: u32,
        context: Context,
    ) -> Result<(), Refused> {
        let bad = |error: StreamError| Refused::Answer(WcStatus::BadResponse, error, context);
        let Some(Asked { position, kind: AskedKind::Read { sink, to, len: asked, delivered } }) =
            self.rx.asked.front_mut()
        else {
            return Err(Refused::Stream(RdmapError::UnexpectedOpcode.into(), Some(context)));
        };
        // What was placed early was only found to lie within some request.
        let follows =
            *asked == 0 || header.stag == *sink && header.to == to.wrapping_add(u64::from(*delivered));
        if !follows || len > *asked - *delivered {
            return Err(bad(DdpError::TaggedBounds.into()));
        }
        *delivered += len;
        if header.last != (delivered == asked) {
            return Err(bad(RdmapError::StreamCatastrophic.into()));
        }
        let (position, sink) = (*position, *sink);
        if header.last {
            self.answered(position, sink, shared);
        }
        Ok(())
    }

    fn deliver_atomic_response(
        &mut self,
        shared: &mut Shared,
        response: AtomicResponse,
        context: Context,
    ) -> Result<(), Refused> {
        if let Header::Untagged(header) = context.header {
            self.due(header.msn, self.rx.atomic_msn, context)?;
        }
        let Some(&Asked { position: Some(position), kind: AskedKind::Atomic { id } }) = self.rx.asked.front()
        else {
            return Err(Refused::Stream(RdmapError::UnexpectedOpcode.into(), Some(context)));
        };
        if id != response.id {
            return Err(Refused::Answer(
                WcStatus::BadResponse,
                RdmapError::StreamCatastrophic.into(),
                context,
            ));
        }
        self.rx.atomic_msn = self.rx.atomic_msn.next();
        let Some(entry) = self.sq.get(position) else { return Ok(()) };
        // Verbs return the word in the byte order of the host.
        let written = Stretches::open(&shared.keys, self.user(), Access::LOCAL_WRITE, &entry.payload, 0, 8)
            .is_ok_and(|mut stretches| stretches.write(&response.original.to_ne_bytes()));
        if !written {
            return Err(Refused::Answer(
                WcStatus::LocalProtection,
                RdmapError::LocalCatastrophic.into(),
                context,
            ));
        }
        self.answered(Some(position), STag::default(), shared);
        Ok(())
    }

    /// The oldest request of ours has its answer. What waited for that may go on: a fence, or ORD.
    fn answered(&mut self, position: Option<u64>, sink: STag, shared: &mut Shared) {
        self.rx.asked.pop_front();
        let Some(entry) = position.and_then(|p| self.sq.get_mut(p)) else { return };
        entry.progress = Progress::Done(WcStatus::Success);
        if matches!(entry.operation, Operation::Read { invalidate: true, .. }) {
            // A region that was deregistered meanwhile has no rights left to revoke.
            let _ = shared.keys.invalidate_locally(self.attributes.pd, sink);
        }
        self.complete_sends(shared);
        shared.wake(self.conn);
    }
}
