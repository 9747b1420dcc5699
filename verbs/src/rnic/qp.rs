//! A queue pair: its queues, its stream's state in both directions, and the ways it ends.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use xwarp_tcp::{
    mpa::{MpaError, Rtr},
    seq::StreamOffset,
    ulp::{CloseReason, ConnId},
};

use super::{
    AsyncEvent, Attempt, CmEvent, CompletionRing, Opcode, QpAttributes, QpFault, QpId, QpState, Shared,
    WcStatus, WorkCompletion,
    keys::User,
    placement::{Quote, Refused, Seen},
    receive_queue::{Receive, ReceiveQueue},
    send_queue::{Entry, Position, Progress, SendQueue},
    work::{CqId, Operation, SendFlags},
};
use crate::{
    ddp::{DdpError, Msn, STag, Tagged, TaggedOffset, Untagged},
    rdmap::{AtomicRequest, RdmapError, ReadRequest, StreamError, TerminateHeader},
};

/// A Read or Atomic Request of ours that the peer has not answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The request it is for; `None` for a ready-to-receive Read (RFC 6581 section 9.2).
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

    /// Whether a segment of a Read Response lies within what was asked for. One without payload names nothing.
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

    /// Whether a segment of a Read Response is the next one of the answer.
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

/// A request of the peer's that we have not wholly answered.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ToAnswer {
    Read { request: ReadRequest, sent: u32, seen: Seen<Untagged> },
    Atomic { request: AtomicRequest, seen: Seen<Untagged> },
}

/// The message of which some segments are out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Current {
    /// A Send or RDMA Write of the send queue.
    Request { position: Position, sent: u32 },
    /// The Immediate Data of an RDMA Write that is out.
    Immediate { position: Position, data: [u8; 8] },
    /// The Read Response at the front of [`Transmitter::to_answer`].
    Response,
}

/// The direction to the peer.
#[derive(Debug)]
pub(crate) struct Transmitter {
    pub(crate) current: Option<Current>,
    pub(crate) send_msn: Msn,
    pub(crate) request_msn: Msn,
    pub(crate) atomic_msn: Msn,
    pub(crate) next_atomic_id: u32,
    /// Sent before everything else.
    pub(crate) rtr: Option<Rtr>,
    pub(crate) terminate: Option<TerminateHeader>,
    /// Nothing more is sent: MPA was, or will be, told to finish.
    pub(crate) finished: bool,
    pub(crate) to_answer: VecDeque<ToAnswer>,
    /// The last message was a response: the send queue is next if it has something.
    pub(crate) answered_last: bool,
    pub(crate) acked: StreamOffset,
}

/// The RDMA Write that was delivered last, for the Immediate Data that may follow it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Written {
    /// Bytes of it.
    pub(crate) bytes: u32,
    /// It is whole: the next segment begins another one.
    ended: bool,
}

impl Written {
    pub(crate) fn add(&mut self, len: u16, last: bool) {
        let before = if self.ended { 0 } else { self.bytes };
        *self = Self { bytes: before.saturating_add(u32::from(len)), ended: last };
    }
}

/// The direction from the peer.
#[derive(Debug)]
pub(crate) struct Receiver {
    /// The Send (or Immediate Data) that is due, and the bytes of it that were delivered.
    pub(crate) send_msn: Msn,
    pub(crate) send_bytes: u64,
    pub(crate) written: Written,
    pub(crate) request_msn: Msn,
    pub(crate) atomic_msn: Msn,
    pub(crate) asked: VecDeque<Asked>,
    /// The segment that waits for a receive, if one does: what a Terminate says of it when none is posted in time.
    pub(crate) withheld: Option<Quote>,
    /// The initiator's ready-to-receive message has not come (RFC 6581 section 9.2).
    pub(crate) expects_rtr: bool,
    /// Nothing more of the stream is looked at.
    pub(crate) stopped: bool,
}

/// What the connection manager knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Unconnected,
    /// We asked, and are not established.
    Connecting,
    /// We accepted, and are not established.
    Accepting,
    Established,
}

impl Stage {
    pub(crate) const fn is_underway(self) -> bool {
        matches!(self, Self::Connecting | Self::Accepting)
    }
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) id: QpId,
    pub(crate) attributes: QpAttributes,
    pub(crate) state: QpState,
    pub(crate) stage: Stage,
    pub(crate) conn: Option<ConnId>,
    pub(crate) addresses: Option<(SocketAddr, SocketAddr)>,
    pub(crate) ird: u16,
    pub(crate) ord: u16,
    pub(crate) send_cq: Arc<CompletionRing>,
    pub(crate) recv_cq: Arc<CompletionRing>,
    pub(crate) sq: SendQueue,
    pub(crate) rq: ReceiveQueue,
    pub(crate) tx: Transmitter,
    pub(crate) rx: Receiver,
    /// The application closes.
    pub(crate) closing: bool,
    /// The peer sends no more.
    pub(crate) peer_closed: bool,
    told_disconnected: bool,
    /// What was asked for, while it may have to be asked once more.
    pub(crate) attempt: Option<Box<Attempt>>,
    /// What went wrong in the start-up of MPA.
    pub(crate) startup_error: Option<MpaError>,
}

impl QueuePair {
    pub(crate) fn new(
        id: QpId,
        attributes: QpAttributes,
        send_cq: Arc<CompletionRing>,
        recv_cq: Arc<CompletionRing>,
    ) -> Self {
        let size = attributes.options;
        let rq = match attributes.srq {
            None => ReceiveQueue::own(size.max_recv_wr, size.max_recv_sge),
            Some(_) => ReceiveQueue::shared(),
        };
        Self {
            sq: SendQueue::new(size.max_send_wr, size.max_send_sge, size.max_inline_data),
            rq,
            id,
            attributes,
            send_cq,
            recv_cq,
            state: QpState::Idle,
            stage: Stage::Unconnected,
            conn: None,
            addresses: None,
            ird: 0,
            ord: 0,
            tx: Transmitter::new(),
            rx: Receiver::new(),
            closing: false,
            peer_closed: false,
            told_disconnected: false,
            attempt: None,
            startup_error: None,
        }
    }

    pub(crate) fn user(&self) -> User {
        User { pd: self.attributes.pd, qp: self.id }
    }

    /// Whether posted work is flushed at once.
    pub(crate) fn flushes_sends(&self) -> bool {
        self.closing || matches!(self.state, QpState::Terminate | QpState::Error)
    }

    pub(crate) fn flushes_receives(&self) -> bool {
        self.peer_closed || matches!(self.state, QpState::Terminate | QpState::Error)
    }

    /// Full operation begins.
    pub(crate) fn establish(
        &mut self,
        ird: u16,
        ord: u16,
        rtr: Option<Rtr>,
        addresses: (SocketAddr, SocketAddr),
    ) {
        self.state = QpState::Rts;
        self.stage = Stage::Established;
        self.attempt = None;
        (self.ird, self.ord) = (ird, ord);
        self.addresses = Some(addresses);
        self.tx.rtr = rtr;
    }

    /// As it was made, but for the receives of its own queue, which stay posted while it is idle.
    pub(crate) fn reset(&mut self) {
        self.state = QpState::Idle;
        self.stage = Stage::Unconnected;
        self.conn = None;
        self.addresses = None;
        (self.ird, self.ord) = (0, 0);
        self.tx = Transmitter::new();
        self.rx = Receiver::new();
        self.closing = false;
        self.peer_closed = false;
        self.told_disconnected = false;
        self.startup_error = None;
    }

    /// Whether a graceful close has nothing left to wait for: all work sent, all reads answered, both ways.
    pub(crate) fn drained(&self) -> bool {
        self.tx.current.is_none()
            && self.sq.upcoming().is_none()
            && self.rx.asked.is_empty()
            && self.tx.to_answer.is_empty()
            && self.tx.rtr.is_none()
    }

    /// Completes what is done of the send queue, in order (RFC 5040 section 5.5, rule 15).
    pub(crate) fn complete_sends(&mut self, shared: &mut Shared) {
        while let Some((entry, status)) = self.sq.pop_done(self.tx.acked) {
            self.push_send(&entry, status, shared);
        }
    }

    fn push_send(&self, entry: &Entry, status: WcStatus, shared: &mut Shared) {
        shared.counters.request_done(&entry.operation, status);
        let silent = !entry.flags.contains(SendFlags::SIGNALED) && !self.attributes.options.signal_all;
        if silent && status == WcStatus::Success {
            return;
        }
        let byte_len = match entry.operation {
            Operation::Immediate { .. } => 8,
            _ => entry.len,
        };
        let completion =
            WorkCompletion { byte_len, ..self.completion(entry.wr_id, status, entry.operation.opcode()) };
        shared.complete(&self.send_cq, self.attributes.send_cq, completion);
    }

    pub(crate) fn push_recv(&self, completion: WorkCompletion, shared: &mut Shared) {
        match completion.status {
            WcStatus::Success => {}
            status => shared.counters.work_failed(status),
        }
        shared.complete(&self.recv_cq, self.attributes.recv_cq, completion);
    }

    pub(crate) fn completion(&self, wr_id: u64, status: WcStatus, opcode: Opcode) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status,
            opcode,
            qp: self.id,
            byte_len: 0,
            invalidated: None,
            immediate: None,
            solicited: false,
        }
    }

    /// Completes the receive of the message that is due in error, ahead of the flush of the others.
    pub(crate) fn fail_receive(&mut self, status: WcStatus, shared: &mut Shared) {
        if let Some(receive) = self.rq.complete() {
            self.push_recv(self.completion(receive.wr_id, status, Opcode::Recv), shared);
        }
    }

    pub(crate) fn flush_sends(&mut self, shared: &mut Shared) {
        while let Some((entry, status)) = self.sq.pop_flushed() {
            self.push_send(&entry, status, shared);
        }
        self.tx.current = None;
        self.rx.asked.clear();
    }

    pub(crate) fn flush_receives(&mut self, shared: &mut Shared) {
        while let Some(Receive { wr_id, .. }) = self.rq.pop_flushed() {
            self.push_recv(self.completion(wr_id, WcStatus::Flushed, Opcode::Recv), shared);
        }
        if self.attributes.srq.is_some() {
            shared.events.push_async(AsyncEvent::LastWqeReached { qp: self.id });
        }
    }

    /// The peer broke the protocol, or we cannot go on: ends the stream with a Terminate (RFC 5040 section
    /// 7.1). Only the first error counts (rule 4).
    pub(crate) fn fail(&mut self, error: StreamError, quote: Quote, shared: &mut Shared) {
        self.fail_for(QpFault::Local(error), error, quote, shared);
    }

    /// A completion queue that this queue pair uses lost an entry: its work cannot be told of any more.
    pub(crate) fn overflowed(&mut self, shared: &mut Shared) {
        let error = if self.stage.is_underway() {
            // RFC 6581 section 9.3: so the peer is told while the connection is being made.
            self.startup_error = Some(MpaError::LocalCatastrophic);
            MpaError::LocalCatastrophic.into()
        } else {
            RdmapError::LocalCatastrophic.into()
        };
        self.fail_for(QpFault::CqOverflow, error, Quote::default(), shared);
    }

    fn fail_for(&mut self, fault: QpFault, error: StreamError, quote: Quote, shared: &mut Shared) {
        if matches!(self.state, QpState::Terminate | QpState::Error) {
            return;
        }
        tracing::warn!(qp = self.id.number(), %error, ?fault, "the stream fails");
        if self.tx.finished || self.conn.is_none() {
            // Our direction is closed already: only a reset can tell the peer.
            shared.abort(self.conn);
            return self.end(QpState::Error, Some(fault), shared);
        }
        self.tx.terminate = Some(terminate_header(error, quote));
        self.end(QpState::Terminate, Some(fault), shared);
    }

    /// The peer sent a Terminate: nothing more goes either way (RFC 5040 section 5.4).
    pub(crate) fn terminated(&mut self, header: TerminateHeader, shared: &mut Shared) {
        tracing::warn!(qp = self.id.number(), %header, "the peer sent a Terminate");
        shared.counters.terminates_received.count(&header);
        self.blame_read(&header);
        self.tx.finished = true;
        self.end(QpState::Error, Some(QpFault::Remote(header)), shared);
    }

    /// When the Terminate quotes a Read Request of ours, that request failed for the peer's reason.
    fn blame_read(&mut self, header: &TerminateHeader) {
        let Some(quoted) = header.rdma_header else { return };
        let position = self.rx.asked.iter().find_map(|asked| match asked.kind {
            AskedKind::Read { sink, to, len, .. } => {
                // The quoted request is advanced by what was answered: where it ends has not changed.
                let end = |to: TaggedOffset, len: u32| to.wrapping_add(u64::from(len));
                let same = sink == quoted.sink_stag
                    && quoted.len <= len
                    && end(to, len) == end(quoted.sink_to, quoted.len);
                asked.position.filter(|_| same)
            }
            AskedKind::Atomic { .. } => None,
        });
        if let Some(entry) = position.and_then(|p| self.sq.get_mut(p)) {
            entry.progress = Progress::Done(WcStatus::RemoteAccess);
        }
    }

    /// The connection is gone.
    pub(crate) fn disconnected(&mut self, reason: CloseReason, shared: &mut Shared) {
        // Whoever has closed and has nothing left to lose does not care how the peer went.
        let done = self.closing && self.tx.finished && self.sq.len() == 0;
        let orderly = done || reason == CloseReason::Graceful && self.state != QpState::Terminate;
        let fault = (!orderly && !self.rx.stopped).then_some(QpFault::Connection(reason));
        self.tx.finished = true;
        self.tx.terminate = None;
        self.end(QpState::Error, fault, shared);
    }

    /// Leaves operation: no more is received, all work is flushed, each exactly once and in order.
    pub(crate) fn end(&mut self, state: QpState, fault: Option<QpFault>, shared: &mut Shared) {
        let first = !matches!(self.state, QpState::Terminate | QpState::Error);
        self.state = state;
        self.rx.stopped = true;
        self.tx.to_answer.clear();
        self.tx.rtr = None;
        if first {
            if let Some(fault) = fault {
                shared.events.push_async(AsyncEvent::QpFatal { qp: self.id, fault });
            }
            self.flush_sends(shared);
            if !self.peer_closed {
                self.flush_receives(shared);
            }
        }
        if self.stage == Stage::Established {
            self.tell_disconnected(shared);
        }
        shared.wake(self.conn);
    }

    pub(crate) fn tell_disconnected(&mut self, shared: &mut Shared) {
        if !self.told_disconnected {
            self.told_disconnected = true;
            shared.events.push_cm(CmEvent::Disconnected { qp: self.id });
        }
    }

    /// The peer's direction ended in order: what was to come from there never will. Our direction goes on
    /// until the application closes it (RFC 5041 section 6.2.1).
    pub(crate) fn peer_closed(&mut self, shared: &mut Shared) {
        if self.flushes_receives() {
            return;
        }
        self.state = QpState::Closing;
        self.flush_receives(shared);
        self.peer_closed = true;
        if !self.rx.asked.is_empty() {
            // A peer that still owes answers did not close in order.
            self.tx.finished = true;
            self.end(QpState::Error, Some(QpFault::Connection(CloseReason::Graceful)), shared);
        }
        self.tell_disconnected(shared);
        shared.wake(self.conn);
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
            rtr: None,
            terminate: None,
            finished: false,
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
            send_bytes: 0,
            written: Written::default(),
            request_msn: Msn::FIRST,
            atomic_msn: Msn::FIRST,
            asked: VecDeque::new(),
            withheld: None,
            expects_rtr: false,
            stopped: false,
        }
    }
}

/// What a Terminate says of an error (RFC 5040 section 4.8, figure 10).
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
