//! Delivery of placed ULPDUs in stream order ([`Ulp::deliver`]). Messages become completions, the peer's requests
//! become work, and a Terminate ends the stream.
//!
//! [`Ulp::deliver`]: xwarp_tcp::ulp::Ulp::deliver

use super::{
    Opcode, Shared, WorkCompletion,
    coverage::Incomplete,
    pieces::Stretches,
    placement::{Body, Detail, Marks, Refused, Segment},
    qp::{Asked, AskedKind, QueuePair, ToAnswer, Written},
    send_queue::{Position, Progress},
    work::{Access, Operation, WcStatus},
};
use crate::{
    ddp::{DdpError, Msn, STag, Tagged, Untagged},
    rdmap::{AtomicRequest, AtomicResponse, RdmapError, ReadRequest},
    segment::{Quote, Seen},
};

impl QueuePair {
    /// Delivers the next ULPDU.
    pub(crate) fn deliver(&mut self, shared: &mut Shared, segment: Segment) -> Result<(), Refused> {
        self.rx.expects_rtr = false;
        let (seen, body) = match segment {
            Segment::Silent => return Ok(()),
            Segment::Write { len, last } => {
                self.rx.written.add(len, last);
                return Ok(());
            }
            Segment::ReadResponse(seen) => return self.deliver_response(shared, seen),
            Segment::Untagged(seen, body) => (seen, body),
            Segment::Numbered(segment) => return self.deliver_numbered(shared, segment),
        };
        match body {
            Body::Send { invalidate, solicited } => {
                let invalidate = invalidate.then(|| STag::new(seen.header.word));
                let marks = Marks { invalidate, immediate: None, solicited };
                self.deliver_send(shared, seen, self.rq.first(), marks)
            }
            Body::SendImmediate { solicited } => {
                let immediate = Some(seen.header.word.to_be_bytes());
                let marks = Marks { invalidate: None, immediate, solicited };
                self.deliver_send(shared, seen, self.rq.first(), marks)
            }
            Body::Immediate { data, solicited } => self.deliver_immediate(shared, seen, data, solicited),
            Body::ReadRequest(request) => self.deliver_read_request(shared, seen, request),
            Body::AtomicRequest(request) => self.deliver_atomic_request(shared, seen, request),
            Body::AtomicResponse(response) => self.deliver_atomic_response(shared, seen, response),
            Body::Rtr => {
                due::<Refused>(seen, self.rx.send_msn)?;
                self.rx.send_msn = self.rx.send_msn.next();
                Ok(())
            }
            Body::Terminate(terminate) => {
                self.terminated(terminate, shared);
                Ok(())
            }
        }
    }

    pub(super) fn deliver_immediate(
        &mut self,
        shared: &mut Shared,
        seen: Seen<Untagged>,
        data: [u8; 8],
        solicited: bool,
    ) -> Result<(), Refused> {
        due::<Refused>(seen, self.rx.send_msn)?;
        if !self.rx.send_coverage.is_whole(0) {
            // Segments of a Send with this MSN were already delivered.
            return Err(seen.refused(RdmapError::UnexpectedOpcode));
        }
        let byte_len = self.rx.written.bytes;
        self.counters.rdmap.immediates_in += 1;
        self.complete_receive(shared, self.rq.first(), |completion| WorkCompletion {
            opcode: Opcode::RecvImmediate,
            byte_len,
            immediate: Some(data),
            solicited,
            ..completion
        });
        Ok(())
    }

    /// Delivers a segment of the next Send, whose receive is `receive`.
    #[expect(clippy::inline_always, reason = "see `Self::take_first`")]
    #[inline(always)]
    pub(super) fn deliver_send<D: Detail>(
        &mut self,
        shared: &mut Shared,
        seen: Seen<Untagged>,
        receive: Option<u64>,
        marks: Marks,
    ) -> Result<(), D> {
        due(seen, self.rx.send_msn)?;
        let invalid_mo =
            |Incomplete| D::of(|| Refused::Receive(WcStatus::LocalLength, DdpError::InvalidMo, seen.into()));
        let start = u64::from(seen.header.mo);
        let end = start + u64::from(seen.len);
        if !self.rx.send_coverage.fill(start, end, seen.header.last).map_err(invalid_mo)? {
            return Ok(());
        }
        if let Some(stag) = marks.invalidate {
            let invalidated = shared.keys.invalidate_remotely(self.user(), stag);
            invalidated.map_err(|error| D::of(|| seen.refused(error)))?;
            self.counters.rdmap.invalidated_by_peer += 1;
        }
        self.complete_send(shared, receive, end as u32, marks);
        Ok(())
    }

    /// Completes `receive`, that of the next message, with a Send of `byte_len` bytes.
    #[expect(clippy::inline_always, reason = "see `CompletionRing::push`")]
    #[inline(always)]
    fn complete_send(&mut self, shared: &mut Shared, receive: Option<u64>, byte_len: u32, marks: Marks) {
        self.counters.rdmap.sends_in += 1;
        self.complete_receive(shared, receive, |completion| WorkCompletion {
            byte_len,
            invalidated: marks.invalidate,
            immediate: marks.immediate.map(|[a, b, c, d]| [a, b, c, d, 0, 0, 0, 0]),
            solicited: marks.solicited,
            ..completion
        });
    }

    /// Completes the next receive with a Send of `len` bytes beyond a gap. If it `overtook` messages, they are unchanged.
    pub(super) fn complete_early_send(
        &mut self,
        shared: &mut Shared,
        len: u16,
        solicited: bool,
        overtook: bool,
    ) {
        // An overtaken Write may have Immediate Data, whose completion reports the length of the Write.
        let written = if overtook { self.rx.written } else { Written::default() };
        self.rx.send_coverage.clear();
        self.counters.rdmap.sends_in += 1;
        self.complete_receive(shared, self.rq.first(), |completion| WorkCompletion {
            byte_len: len.into(),
            solicited,
            overtook,
            ..completion
        });
        self.rx.written = written;
    }

    /// Completes `receive`, that of the next message, whose coverage the caller has cleared; `describe` fills in the completion.
    #[expect(clippy::inline_always, reason = "see `CompletionRing::push`")]
    #[inline(always)]
    fn complete_receive(
        &mut self,
        shared: &mut Shared,
        receive: Option<u64>,
        describe: impl FnOnce(WorkCompletion) -> WorkCompletion,
    ) {
        self.rx.send_msn = self.rx.send_msn.next();
        self.rx.written = Written::default();
        self.rq.remove_first();
        if let Some(wr_id) = receive {
            let completion = describe(self.completion(wr_id, WcStatus::Success, Opcode::Recv));
            shared.complete(&self.recv_cq, self.attributes.recv_cq, completion);
        }
    }

    /// Accepts the peer's next request if its number is the next one and it is within IRD. IRD counts Reads; as many
    /// atomics are accepted besides, for a peer that counts them separately (RFC 7306 section 5.2.2, rule 4).
    fn accept_request(
        &mut self,
        seen: Seen<Untagged>,
        same_kind: impl Fn(&ToAnswer) -> bool,
    ) -> Result<(), Refused> {
        due::<Refused>(seen, self.rx.request_msn)?;
        let ird = usize::from(self.ird);
        let to_answer = &self.tx.to_answer;
        if to_answer.len() >= ird && to_answer.iter().filter(|asked| same_kind(asked)).count() >= ird {
            return Err(seen.refused(DdpError::NoBuffer));
        }
        self.rx.request_msn = self.rx.request_msn.next();
        Ok(())
    }

    /// Checks a Read Request (RFC 5040 section 7.2). The tag and offset of a request for zero bytes are not checked
    /// (section 5.2.1).
    pub(super) fn deliver_read_request(
        &mut self,
        shared: &mut Shared,
        seen: Seen<Untagged>,
        request: ReadRequest,
    ) -> Result<(), Refused> {
        self.accept_request(seen, |asked| matches!(asked, ToAnswer::Read { .. }))?;
        if request.len > 0 {
            let (stag, to, len) = (request.source_stag, request.source_to, u64::from(request.len));
            shared.keys.open(self.user(), stag, Access::REMOTE_READ, to, len).map_err(|error| {
                let quote = Quote { request: Some(request), ..seen.into() };
                Refused::Stream(RdmapError::from(error).into(), quote)
            })?;
        }
        self.counters.rdmap.reads_in += 1;
        self.tx.to_answer.push_back(ToAnswer::Read { request, sent: 0, seen });
        shared.wake(self.conn);
        Ok(())
    }

    pub(super) fn deliver_atomic_request(
        &mut self,
        shared: &mut Shared,
        seen: Seen<Untagged>,
        request: AtomicRequest,
    ) -> Result<(), Refused> {
        self.accept_request(seen, |asked| matches!(asked, ToAnswer::Atomic { .. }))?;
        shared.check_atomic(self.user(), &request).map_err(|error| seen.refused(error))?;
        self.counters.rdmap.atomics_in += 1;
        self.tx.to_answer.push_back(ToAnswer::Atomic { request, seen });
        shared.wake(self.conn);
        Ok(())
    }

    pub(super) fn deliver_response(
        &mut self,
        shared: &mut Shared,
        seen: Seen<Tagged>,
    ) -> Result<(), Refused> {
        let asked = self.rx.asked.front_mut().ok_or_else(|| seen.refused(RdmapError::UnexpectedOpcode))?;
        // Early placement only checked that the segment lies within some request.
        asked.kind.check(seen)?;
        if let AskedKind::Read { delivered, .. } = &mut asked.kind {
            *delivered += u32::from(seen.len);
        }
        if seen.header.last {
            let position = asked.position;
            self.answered(position, shared);
        }
        Ok(())
    }

    pub(super) fn deliver_atomic_response(
        &mut self,
        shared: &mut Shared,
        seen: Seen<Untagged>,
        response: AtomicResponse,
    ) -> Result<(), Refused> {
        due::<Refused>(seen, self.rx.atomic_msn)?;
        let Some(&Asked { position: Some(position), kind: AskedKind::Atomic { id } }) = self.rx.asked.front()
        else {
            return Err(seen.refused(RdmapError::UnexpectedOpcode));
        };
        if id != response.id {
            return Err(Refused::Answer(
                WcStatus::BadResponse,
                RdmapError::StreamCatastrophic.into(),
                seen.into(),
            ));
        }
        self.rx.atomic_msn = self.rx.atomic_msn.next();
        let Some(entry) = self.sq.get(position) else { return Ok(()) };
        // Verbs return the word in the byte order of the host.
        let written = Stretches::open(&shared.keys, self.user(), Access::LOCAL_WRITE, &entry.payload, 0, 8)
            .is_ok_and(|mut stretches| stretches.write(&response.original.to_ne_bytes()));
        if !written {
            let error = RdmapError::LocalCatastrophic;
            return Err(Refused::Answer(WcStatus::LocalProtection, error.into(), seen.into()));
        }
        self.answered(Some(position), shared);
        Ok(())
    }

    /// Completes our oldest outstanding Read or atomic. Requests that waited for it, by a fence or for ORD, may
    /// begin.
    fn answered(&mut self, position: Option<Position>, shared: &mut Shared) {
        self.rx.asked.pop_front();
        let user = self.user();
        let Some(entry) = position.and_then(|p| self.sq.get_mut(p)) else { return };
        entry.progress = Progress::Done(WcStatus::Success);
        // The key is taken from the request: the peer chooses the tag in a response without payload (RFC 5041 section
        // 5.2).
        if let (Operation::Read { invalidate: true, .. }, Some(sink)) =
            (entry.operation, entry.payload.first())
        {
            // The error is ignored: a region that was deregistered meanwhile has no rights to revoke, and one with
            // bound windows keeps its rights.
            let _ = shared.keys.invalidate_locally(user, sink.key);
        }
        self.complete_sends(shared);
        if let Some(position) = position {
            self.complete_early(position, shared);
        }
        shared.wake(self.conn);
    }
}

/// Checks that this is the next message on its queue.
fn due<D: Detail>(seen: Seen<Untagged>, expected: Msn) -> Result<(), D> {
    if seen.header.msn == expected { Ok(()) } else { Err(D::of(|| seen.refused(DdpError::MsnRange))) }
}
