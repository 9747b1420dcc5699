//! A queue pair: its queues, its stream's state in both directions, and the ways it ends.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use xwarp_tcp::{
    framing::FramingError,
    mpa::{MpaError, Rtr},
    seq::StreamOffset,
    ulp::{CloseReason, ConnId},
};

use super::{
    AsyncEvent, CmEvent, CompletionRing, Deferred, Opcode, QpAttributes, QpFault, QpId, Shared, WcStatus,
    WorkCompletion,
    counters::StreamCounters,
    coverage::Coverage,
    keys::User,
    phase::{Closes, Phase, Since},
    placement::Refused,
    rdma_tcp::Stream,
    receive_queue::ReceiveQueue,
    registry::NewQueuePair,
    send_queue::{Position, Progress, SendQueue, Summary},
    work::{Access, CqId, Operation, SendFlags},
};
use crate::{
    ddp::{DdpError, Msn, STag, Tagged, TaggedOffset, Untagged, Versions},
    rdmap::{AtomicRequest, RdmapError, ReadRequest, StreamError, TerminateHeader},
    segment::{Codec, Quote, Seen},
};

/// A Read or Atomic Request of ours that the peer has not answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Position of the work request; `None` for a ready-to-receive Read (RFC 6581 section 9.2).
    pub(crate) position: Option<Position>,
    pub(crate) kind: AskedKind,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum AskedKind {
    Read {
        sink: STag,
        to: TaggedOffset,
        len: u32,
        /// Bytes of the response that were delivered.
        delivered: u32,
    },
    Atomic {
        id: u32,
    },
}

impl AskedKind {
    pub(crate) const fn read(request: &ReadRequest) -> Self {
        Self::Read { sink: request.sink_stag, to: request.sink_to, len: request.len, delivered: 0 }
    }

    /// Whether a segment of a Read Response lies within the requested range. The tag and offset of a segment without
    /// payload are not checked.
    pub(crate) fn covers(&self, Seen { header, len, .. }: Seen<Tagged>) -> bool {
        match *self {
            Self::Read { sink, to, len: asked, .. } if len > 0 => {
                sink == header.stag
                    && header
                        .to
                        .checked_sub(to)
                        .and_then(|skip| skip.checked_add(u64::from(len)))
                        .is_some_and(|end| end <= u64::from(asked))
            }
            Self::Read { .. } => true,
            Self::Atomic { .. } => false,
        }
    }

    /// Checks that a segment of a Read Response is the next one of the response.
    pub(crate) fn check(&self, seen: Seen<Tagged>) -> Result<(), Refused> {
        let Seen { header, len, .. } = seen;
        let bad = |error: StreamError| Err(Refused::Answer(WcStatus::BadResponse, error, seen.into()));
        let Self::Read { sink, to, len: asked, delivered } = *self else {
            return Err(seen.refused(RdmapError::UnexpectedOpcode));
        };
        let left = asked - delivered;
        if len > 0 && header.stag != sink {
            return bad(DdpError::InvalidStag.into());
        }
        if u32::from(len) > left || len > 0 && header.to != to.wrapping_add(u64::from(delivered)) {
            return bad(DdpError::TaggedBounds.into());
        }
        if header.last != (u32::from(len) == left) {
            return bad(RdmapError::StreamCatastrophic.into());
        }
        Ok(())
    }
}

/// A request of the peer to which we have not sent the whole response.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ToAnswer {
    Read { request: ReadRequest, sent: u32, seen: Seen<Untagged> },
    Atomic { request: AtomicRequest, seen: Seen<Untagged> },
}

/// The message that is being sent, or is sent next before all others.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Current {
    /// The Send or RDMA Write at [`SendQueue::next`], whose first `sent` bytes were sent.
    Request { sent: u32 },
    /// The Immediate Data of the RDMA Write at [`SendQueue::next`], whose payload was sent.
    Immediate { data: [u8; 8] },
    /// The ready-to-receive message of peer-to-peer mode (RFC 6581 section 9.2).
    Rtr(Rtr),
    /// The Read Response at the front of [`Transmitter::to_answer`].
    Response,
}

/// The end of the direction to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    No,
    /// This Terminate is the last message.
    Terminate(TerminateHeader),
    /// No more ULPDUs are sent: MPA finishes the direction.
    Finished,
}

/// State of the direction to the peer.
#[derive(Debug)]
pub(crate) struct Transmitter {
    pub(crate) current: Option<Current>,
    pub(crate) send_msn: Msn,
    pub(crate) request_msn: Msn,
    pub(crate) atomic_msn: Msn,
    pub(crate) next_atomic_id: u32,
    pub(crate) ending: Ending,
    pub(crate) to_answer: VecDeque<ToAnswer>,
    /// The last message was a response: the send queue is next if it has a request that may begin.
    pub(crate) answered_last: bool,
    pub(crate) acked: StreamOffset,
}

/// The last delivered RDMA Write, for the Immediate Data that may follow it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Written {
    /// Delivered bytes of the Write.
    pub(crate) bytes: u32,
    /// The Write is complete: the next segment begins another one.
    ended: bool,
}

impl Written {
    pub(crate) fn add(&mut self, len: u16, last: bool) {
        let before = if self.ended { 0 } else { self.bytes };
        *self = Self { bytes: before.saturating_add(u32::from(len)), ended: last };
    }
}

/// State of the direction from the peer.
#[derive(Debug)]
pub(crate) struct Receiver {
    /// Sequence number of the next Send or Immediate Data.
    pub(crate) send_msn: Msn,
    /// Delivered bytes of that message.
    pub(crate) send_coverage: Coverage,
    pub(crate) written: Written,
    pub(crate) request_msn: Msn,
    pub(crate) atomic_msn: Msn,
    pub(crate) asked: VecDeque<Asked>,
    /// The quote of the segment that waits for a receive, for a Terminate in case none is posted in time; `None` when
    /// no segment waits.
    pub(crate) withheld: Option<Quote>,
    /// The initiator's ready-to-receive message has not arrived (RFC 6581 section 9.2).
    pub(crate) expects_rtr: bool,
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) id: QpId,
    pub(crate) attributes: QpAttributes,
    pub(crate) phase: Phase,
    pub(crate) conn: Option<ConnId>,
    pub(crate) addresses: Option<(SocketAddr, SocketAddr)>,
    pub(crate) ird: u16,
    pub(crate) ord: u16,
    /// Versions of DDP and RDMAP, determined by the start-up.
    pub(crate) versions: Versions,
    /// Both ends have Sends with immediate data.
    pub(crate) send_immediate: bool,
    pub(crate) send_cq: Arc<CompletionRing>,
    pub(crate) recv_cq: Arc<CompletionRing>,
    pub(crate) sq: SendQueue,
    pub(crate) rq: ReceiveQueue,
    pub(crate) tx: Transmitter,
    pub(crate) rx: Receiver,
    /// State of a connection with RDMA/TCP; `None` with MPA.
    pub(crate) stream: Option<Box<Stream>>,
    pub(crate) counters: StreamCounters,
}

impl QueuePair {
    pub(crate) fn new(new: NewQueuePair, attributes: QpAttributes) -> Self {
        let NewQueuePair { id, send_ring, recv_ring, receives } = new;
        let size = attributes.options;
        let rq = match receives {
            None => ReceiveQueue::own(size.max_recv_wr, size.max_recv_sge),
            Some(pool) => ReceiveQueue::shared(pool),
        };
        Self {
            sq: SendQueue::new(size.max_send_wr, size.max_send_sge, size.max_inline_data),
            rq,
            id,
            attributes,
            send_cq: send_ring,
            recv_cq: recv_ring,
            phase: Phase::Idle,
            conn: None,
            addresses: None,
            ird: 0,
            ord: 0,
            versions: Versions::default(),
            send_immediate: false,
            tx: Transmitter::new(),
            rx: Receiver::new(),
            stream: None,
            counters: StreamCounters::default(),
        }
    }

    pub(crate) fn user(&self) -> User {
        const LOCAL: Access = Access::all().difference(Access::REMOTE);
        let rights = LOCAL.union(self.attributes.options.peer_access);
        User { pd: self.attributes.pd, qp: self.id, rights }
    }

    /// How the segments of its connection are read and written.
    #[inline]
    pub(crate) fn codec(&self) -> Codec {
        match &self.stream {
            Some(stream) => Codec::RdmaTcp(stream.connection()),
            None => Codec::Ddp(self.versions),
        }
    }

    /// Whether posted work is flushed at once.
    pub(crate) fn flushes_sends(&self) -> bool {
        matches!(self.phase, Phase::Open(Closes { here: true, .. }) | Phase::Ended { .. })
    }

    pub(crate) fn flushes_receives(&self) -> bool {
        matches!(self.phase, Phase::Open(Closes { peer: true, .. }) | Phase::Ended { .. })
    }

    /// Begins full operation.
    pub(crate) fn establish(&mut self, ird: u16, ord: u16, addresses: (SocketAddr, SocketAddr)) {
        self.phase = Phase::Open(Closes::default());
        (self.ird, self.ord) = (ird, ord);
        self.addresses = Some(addresses);
    }

    /// Resets all state but the receives of the queue pair's own queue, which stay posted while it is idle.
    pub(crate) fn reset(&mut self) {
        self.phase = Phase::Idle;
        self.conn = None;
        self.addresses = None;
        (self.ird, self.ord) = (0, 0);
        self.versions = Versions::default();
        self.send_immediate = false;
        self.tx = Transmitter::new();
        self.rx = Receiver::new();
        self.stream = None;
    }

    /// Whether a graceful close may finish our direction: all work is sent, and all Reads and atomics are answered in
    /// both directions.
    pub(crate) fn drained(&self) -> bool {
        self.tx.current.is_none()
            && self.sq.upcoming().is_none()
            && self.rx.asked.is_empty()
            && self.tx.to_answer.is_empty()
    }

    /// Completes the finished requests at the head of the send queue, in order (RFC 5040 section 5.5, rule 15).
    pub(crate) fn complete_sends(&mut self, shared: &mut Shared) {
        let Some(first) = self.sq.first() else { return };
        // Most acknowledgements complete one request or none.
        if let Progress::Sent(end) = first.progress {
            if end > self.tx.acked {
                return;
            }
            if let Some(request) = self.sq.pop() {
                self.push_send(&request, WcStatus::Success, shared);
            }
            if self.sq.is_empty() {
                return;
            }
        }
        self.complete_more_sends(shared);
    }

    #[inline(never)]
    fn complete_more_sends(&mut self, shared: &mut Shared) {
        while let Some((request, status)) = self.sq.pop_done(self.tx.acked) {
            self.push_send(&request, status, shared);
        }
    }

    /// Completes the Read at `position` before the requests that were posted before it, if it may overtake them and they
    /// are not done.
    pub(crate) fn complete_early(&mut self, position: Position, shared: &mut Shared) {
        let Some(entry) = self.sq.get_mut(position).filter(|_| self.stream.is_some()) else { return };
        if entry.flags.contains(SendFlags::OVERTAKE)
            && let Progress::Done(status) = entry.progress
        {
            entry.progress = Progress::Overtook;
            let summary = Summary { overtook: true, ..entry.summary() };
            self.push_send(&summary, status, shared);
        }
    }

    #[expect(clippy::inline_always, reason = "see `CompletionRing::push`")]
    #[inline(always)]
    fn push_send(&mut self, request: &Summary, status: WcStatus, shared: &mut Shared) {
        let &Summary { wr_id, operation, flags, len, overtook } = request;
        self.counters.request_done(&operation, status);
        let silent = !flags.contains(SendFlags::SIGNALED) && !self.attributes.options.signal_all;
        if silent && status == WcStatus::Success {
            return;
        }
        // Immediate Data has no payload.
        let byte_len = len + if matches!(operation, Operation::Immediate { .. }) { 8 } else { 0 };
        let completion = self.completion(wr_id, status, operation.opcode());
        let completion = WorkCompletion { byte_len, overtook, ..completion };
        shared.complete(&self.send_cq, self.attributes.send_cq, completion);
    }

    /// Completes a receive that failed or was flushed.
    #[inline(never)]
    pub(crate) fn push_failed_recv(&mut self, wr_id: u64, status: WcStatus, shared: &mut Shared) {
        self.counters.work_failed(status);
        let completion = self.completion(wr_id, status, Opcode::Recv);
        shared.complete(&self.recv_cq, self.attributes.recv_cq, completion);
    }

    #[inline]
    pub(crate) fn completion(&self, wr_id: u64, status: WcStatus, opcode: Opcode) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status,
            opcode,
            qp: self.id,
            context: self.attributes.options.context,
            byte_len: 0,
            invalidated: None,
            immediate: None,
            solicited: false,
            overtook: false,
        }
    }

    /// Completes the receive of the next message with an error, before the others are flushed.
    pub(crate) fn fail_receive(&mut self, status: WcStatus, shared: &mut Shared) {
        if let Some(wr_id) = self.rq.first() {
            self.rq.remove_first();
            self.push_failed_recv(wr_id, status, shared);
        }
    }

    /// Completes all requests: those that are done with their outcomes, the others as flushed. A Read may be done although the Send
    /// before it is not acknowledged: the peer has executed both, and its TCP then had no memory for the rest of the segment. The
    /// Read is flushed like the Send, because no request succeeds after a flushed one.
    pub(crate) fn flush_sends(&mut self, shared: &mut Shared) {
        let mut flushed = false;
        while let Some((request, status)) = self.sq.pop_flushed() {
            let status = if flushed && status == WcStatus::Success { WcStatus::Flushed } else { status };
            flushed |= status == WcStatus::Flushed;
            self.push_send(&request, status, shared);
        }
        self.tx.current = None;
        self.rx.asked.clear();
    }

    pub(crate) fn flush_receives(&mut self, shared: &mut Shared) {
        while let Some(wr_id) = self.rq.pop_flushed() {
            self.push_failed_recv(wr_id, WcStatus::Flushed, shared);
        }
        if self.attributes.srq.is_some() {
            shared.events.push_async(AsyncEvent::LastWqeReached { qp: self.id });
        }
    }

    /// Ends the stream with a Terminate after a protocol error or a local error (RFC 5040 section 7.1). Only the
    /// first error counts (rule 4).
    pub(crate) fn fail(&mut self, error: StreamError, quote: Quote, shared: &mut Shared) {
        self.fail_for(QpFault::Local(error), error, quote, shared);
    }

    /// Fails the queue pair because one of its completion queues lost an entry: its work can no longer be reported.
    pub(crate) fn overflowed(&mut self, shared: &mut Shared) {
        let starting = self.phase.is_starting();
        let error = if starting {
            // RFC 6581 section 9.3: the error that the peer gets during connection establishment.
            MpaError::LocalCatastrophic.into()
        } else {
            RdmapError::LocalCatastrophic.into()
        };
        self.fail_for(QpFault::CqOverflow, error, Quote::default(), shared);
        if starting {
            self.note_startup_error(MpaError::LocalCatastrophic.into());
        }
    }

    fn fail_for(&mut self, fault: QpFault, error: StreamError, quote: Quote, shared: &mut Shared) {
        if self.phase.has_ended() {
            return;
        }
        tracing::warn!(qp = self.id.number(), %error, ?fault, "the stream fails");
        if self.tx.ending == Ending::Finished || self.conn.is_none() {
            // Our direction is closed: only a reset can inform the peer.
            shared.abort(self.conn);
            return self.end(Ending::Finished, Some(fault), shared);
        }
        self.end(Ending::Terminate(terminate_header(error, quote)), Some(fault), shared);
    }

    /// Records the error that the application will get for a connection that failed before it was established.
    pub(crate) fn note_startup_error(&mut self, error: FramingError) {
        if let Phase::Ended { since: Since::Start(reason), .. } = &mut self.phase {
            *reason = Some(error);
        }
    }

    /// Handles the peer's Terminate: the stream ends in both directions (RFC 5040 section 5.4).
    pub(crate) fn terminated(&mut self, header: TerminateHeader, shared: &mut Shared) {
        tracing::warn!(qp = self.id.number(), %header, "the peer sent a Terminate");
        shared.terminates.received.count(&header);
        self.blame(&header);
        self.end(Ending::Finished, Some(QpFault::Remote(header)), shared);
    }

    /// Handles the end of the connection.
    pub(crate) fn disconnected(&mut self, reason: CloseReason, shared: &mut Shared) {
        // After our close with no work outstanding, the way in which the connection ended is no fault.
        let done = self.phase.is_closing() && self.tx.ending == Ending::Finished && self.sq.is_empty();
        // Nor is it after the peer's orderly close, which was reported: a peer that exits then resets a connection with data under
        // way to it.
        let peer_closed = matches!(self.phase, Phase::Open(Closes { peer: true, .. }));
        let is_fault = !done && !peer_closed && reason != CloseReason::Graceful;
        let fault = is_fault.then_some(QpFault::Connection(reason));
        self.end(Ending::Finished, fault, shared);
    }

    /// Ends the stream, and our direction by `how`: receiving stops, and all work is flushed, each request exactly once and in
    /// order. If the stream has ended before, only the name of the state changes.
    pub(crate) fn end(&mut self, how: Ending, fault: Option<QpFault>, shared: &mut Shared) {
        self.tx.ending = how;
        let before = self.phase.end(matches!(how, Ending::Terminate(_)));
        self.stop_waiting(shared);
        self.tx.to_answer.clear();
        if let Some(before) = before {
            if let Some(fault) = fault {
                shared.events.push_async(AsyncEvent::QpFatal { qp: self.id, fault });
            }
            shared.deferred.extend(self.conn.map(Deferred::Ended));
            self.flush_sends(shared);
            // The peer's close has flushed the receives, and was reported.
            let peer_closed = matches!(before, Since::Open(Closes { peer: true, .. }));
            if !peer_closed {
                self.flush_receives(shared);
            }
            if matches!(before, Since::Open(_)) && !peer_closed {
                shared.events.push_cm(CmEvent::Disconnected { qp: self.id });
            }
        }
        shared.wake(self.conn);
    }

    /// Handles the peer's orderly close of its direction: posted receives are flushed. Our direction stays open until
    /// the application closes it (RFC 5041 section 6.2.1).
    pub(crate) fn peer_closed(&mut self, shared: &mut Shared) {
        let Phase::Open(closes @ Closes { peer: false, .. }) = &mut self.phase else { return };
        closes.peer = true;
        self.flush_receives(shared);
        shared.events.push_cm(CmEvent::Disconnected { qp: self.id });
        if !self.rx.asked.is_empty() {
            // A close with outstanding responses is not orderly.
            self.end(Ending::Finished, Some(QpFault::Connection(CloseReason::Graceful)), shared);
        }
        shared.wake(self.conn);
    }

    /// Fails the stream because the peer sent data after it had closed its direction (RFC 5041 section 6.2.1).
    pub(crate) fn data_after_close(&mut self, shared: &mut Shared) {
        shared.abort(self.conn);
        self.end(Ending::Finished, Some(QpFault::Connection(CloseReason::Aborted)), shared);
    }

    /// Whether one of its completion queues is `cq`.
    pub(crate) fn completes_to(&self, cq: CqId) -> bool {
        self.attributes.send_cq == cq || self.attributes.recv_cq == cq
    }
}

impl Transmitter {
    fn new() -> Self {
        Self {
            current: None,
            send_msn: Msn::FIRST,
            request_msn: Msn::FIRST,
            atomic_msn: Msn::FIRST,
            next_atomic_id: 0,
            ending: Ending::No,
            to_answer: VecDeque::new(),
            answered_last: false,
            acked: 0,
        }
    }
}

impl Receiver {
    fn new() -> Self {
        Self {
            send_msn: Msn::FIRST,
            send_coverage: Coverage::default(),
            written: Written::default(),
            request_msn: Msn::FIRST,
            atomic_msn: Msn::FIRST,
            asked: VecDeque::new(),
            withheld: None,
            expects_rtr: false,
        }
    }
}

/// The Terminate header for an error (RFC 5040 section 4.8, figure 10).
fn terminate_header(error: StreamError, quote: Quote) -> TerminateHeader {
    let (layer, error_type, code) = error.numbers();
    let segment = quote.segment.filter(|_| error.takes_ddp_header());
    TerminateHeader {
        layer,
        error_type,
        code,
        segment_length: segment.map(|(_, length)| length),
        ddp_header: segment.map(|(header, _)| header),
        rdma_header: quote.request.filter(|_| error.takes_rdma_header()),
    }
}
