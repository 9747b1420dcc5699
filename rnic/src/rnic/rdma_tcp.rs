//! The part of a queue pair that is specific to a connection with RDMA/TCP of 2000: it maps message numbers to the queue
//! pair's receives and requests.
//!
//! DDP names a message by queue and MSN, this format by one number for all messages of a direction. The common part (buffers,
//! rights, completions, the send queue) is in the other files; docs/decisions/0014 lists the decisions (A1 to A20).
#![deny(clippy::indexing_slicing)]

use std::collections::VecDeque;

use xwarp_tcp::{
    rdma_tcp::{
        Agreed, AtomicWords, BufferPlace, ConnectionId, MessageNumber, Order, OrderWindow, SegmentError,
        SegmentHeader, SegmentKind, SendControl, SendTerms, Sequence,
    },
    ulp::Arrival,
};

use super::{
    Shared,
    placement::{Incoming, Marks, Refused, Segment},
    qp::{AskedKind, QueuePair},
    send_queue::SendRequest,
    work::{Operation, Remote, SendFlags},
};
use crate::{
    ddp::{Queue, STag, Tagged, Untagged, Versions},
    rdmap::{
        AtomicOperation, AtomicRequest, AtomicResponse, Control, MessageType, RdmapError, ReadRequest,
        TerminateHeader,
    },
    segment::{Quote, Seen, SegmentPayload, SegmentWriter},
};

/// Bytes of an atomic response's payload: the former value, big-endian.
pub(super) const ATOMIC_VALUE_BYTES: usize = 8;

/// State of a stream of segments, in both directions.
#[derive(Debug)]
pub(crate) struct Stream {
    connection: ConnectionId,
    /// Number of the current message of group 1, or else of the next one.
    next_sent: MessageNumber,
    /// Some segments of that message were sent, but not the last one.
    sent_partly: bool,
    received: Sequence,
    processed: OrderWindow,
    /// The numbers of our outstanding requests, in the order of [`QueuePair`]'s list of requests.
    asked: VecDeque<AskedNumber>,
    /// The numbers of the peer's unanswered requests, in the order of [`QueuePair`]'s list of them.
    to_answer: VecDeque<MessageNumber>,
}

/// The number of an outstanding request, and whether it may be answered before requests that were sent before it.
#[derive(Debug, Clone, Copy)]
struct AskedNumber {
    number: MessageNumber,
    overtakes: bool,
}

impl Stream {
    pub(super) fn new(agreed: &Agreed) -> Self {
        Self {
            connection: agreed.connection,
            next_sent: agreed.next_sent,
            sent_partly: false,
            received: Sequence::new(agreed.next_received),
            processed: OrderWindow::new(agreed.next_received),
            asked: VecDeque::new(),
            to_answer: VecDeque::new(),
        }
    }

    pub(super) fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// Header of the segment that begins at byte `sent` of a Send or RDMA Write, without the E bit.
    pub(super) fn message_header(&self, entry: &SendRequest, sent: u32) -> SegmentHeader {
        let (order, kind) = match entry.operation {
            Operation::Write { remote } | Operation::WriteImmediate { remote, .. } => {
                let offset = remote.offset.wrapping_add(u64::from(sent));
                let to = BufferPlace { id: remote.key.value(), offset };
                // RFC 5040 section 5.5 promises no order of placement.
                (Order::AT_ONCE, SegmentKind::Write { to, total: entry.len })
            }
            operation => {
                let control = match operation {
                    Operation::Send { invalidate: Some(stag) } if sent == 0 => {
                        SendControl::Invalidate { stag: stag.value() }
                    }
                    _ => SendControl::None,
                };
                let overtakes = entry.flags.contains(SendFlags::OVERTAKE)
                    && matches!(operation, Operation::Send { invalidate: None });
                let order = if overtakes { Order::AT_ONCE } else { Order::STRICT };
                (order, SegmentKind::Send { offset: sent, control })
            }
        };
        let write = matches!(kind, SegmentKind::Write { .. });
        SegmentHeader {
            first: sent == 0,
            last: false,
            solicited: !write && entry.flags.contains(SendFlags::SOLICITED),
            number: self.next_sent,
            order,
            kind,
        }
    }

    /// Header of the segment that begins at byte `sent` of the oldest response to send, without the E bit.
    pub(super) fn response_header(&self, sent: u32) -> SegmentHeader {
        SegmentHeader {
            first: sent == 0,
            last: false,
            solicited: false,
            number: self.to_answer.front().copied().unwrap_or(self.next_sent),
            order: Order::AT_ONCE,
            kind: SegmentKind::ReadResponse { offset: sent },
        }
    }

    /// Advances past a segment that was written.
    pub(super) fn sent(&mut self, header: &SegmentHeader) {
        match header.kind {
            SegmentKind::ReadResponse { .. } if header.last => drop(self.to_answer.pop_front()),
            SegmentKind::ReadResponse { .. } => {}
            _ => {
                self.sent_partly = !header.last;
                if header.last {
                    self.next_sent = header.number.next();
                }
            }
        }
    }

    /// Writes a Send of control data alone, if it fits.
    pub(super) fn put_control(
        &mut self,
        control: SendControl,
        solicited: bool,
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> bool {
        // A Terminate may interrupt a message; no more segments of that message follow (A19).
        let number = if self.sent_partly { self.next_sent.next() } else { self.next_sent };
        let kind = SegmentKind::Send { offset: 0, control };
        let header = SegmentHeader { first: true, last: true, solicited, number, order: Order::STRICT, kind };
        self.put_whole(&header, &[], out)
    }

    /// The index of the outstanding request that this in-order response answers out of turn, which is allowed if the
    /// request may overtake others (A18). `None` for a response in turn.
    fn answered_early(&self, header: &SegmentHeader) -> Option<usize> {
        let place = self.asked.iter().position(|asked| asked.number == header.number)?;
        let asked = self.asked.get(place)?;
        (place > 0 && header.first && asked.overtakes).then_some(place)
    }

    /// Writes a request for `total` bytes, or for an atomic operation, if it fits.
    pub(super) fn put_request(
        &mut self,
        from: Remote,
        total: u32,
        atomic: Option<AtomicWords>,
        order: Order,
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> bool {
        let from = BufferPlace { id: from.key.value(), offset: from.offset };
        let kind = SegmentKind::ReadRequest { from, total, atomic };
        let number = self.next_sent;
        let header = SegmentHeader { first: true, last: true, solicited: false, number, order, kind };
        let written = self.put_whole(&header, &[], out);
        if written {
            self.asked.push_back(AskedNumber { number, overtakes: order != Order::STRICT });
        }
        written
    }

    /// Writes a segment that is a whole message, if it fits.
    pub(super) fn put_whole(
        &mut self,
        header: &SegmentHeader,
        payload: &[u8],
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> bool {
        let written = out.put_whole(header, payload);
        if written {
            self.sent(header);
        }
        written
    }
}

/// The words of an atomic request, with the numbers of RFC 7306 section 5.2.
pub(super) fn atomic_words(operation: AtomicOperation) -> AtomicWords {
    match operation {
        AtomicOperation::FetchAdd { add, mask } => {
            AtomicWords { code: FETCH_ADD, operands: [add, mask, 0, u64::MAX] }
        }
        AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask } => {
            AtomicWords { code: COMPARE_SWAP, operands: [swap, swap_mask, compare, compare_mask] }
        }
    }
}

const FETCH_ADD: u32 = 0;
const COMPARE_SWAP: u32 = 2;

/// The operation of these words; `None` when it is unknown.
fn atomic_operation(AtomicWords { code, operands }: AtomicWords) -> Option<AtomicOperation> {
    let [first, first_mask, compare, compare_mask] = operands;
    match code {
        FETCH_ADD => Some(AtomicOperation::FetchAdd { add: first, mask: first_mask }),
        COMPARE_SWAP => {
            let (swap, swap_mask) = (first, first_mask);
            Some(AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask })
        }
        _ => None,
    }
}

/// A segment that was placed: its header, the bytes of its payload, and the value of an atomic response.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedSegment {
    pub(crate) header: SegmentHeader,
    pub(crate) len: u16,
    value: u64,
    /// The segment is a Send that was completed, or a Read Request that was accepted, at its early placement.
    overtook: bool,
}

/// The former value in an atomic response.
fn atomic_value(header: &SegmentHeader, payload: SegmentPayload<'_, '_>) -> Result<u64, Refused> {
    if usize::from(payload.len()) != ATOMIC_VALUE_BYTES || !header.first || !header.last {
        return Err(violation(SegmentError::Length));
    }
    let mut bytes = [0; ATOMIC_VALUE_BYTES];
    payload.peek(&mut bytes);
    Ok(u64::from_be_bytes(bytes))
}

fn violation(error: SegmentError) -> Refused {
    Refused::Stream(error.into(), Quote::default())
}

/// The queue pair's form of a segment for a tagged buffer.
fn tagged(message: MessageType, last: bool, stag: STag, to: u64, len: u16) -> Seen<Tagged> {
    let control = Control { message }.byte(Versions::Ietf);
    Seen::without_bytes(Tagged { last, control, stag, to }, len)
}

impl QueuePair {
    fn numbered(&self, header: &SegmentHeader, message: MessageType, len: u16) -> Seen<Untagged> {
        let control = Control { message }.byte(Versions::Ietf);
        let (queue, msn, mo) = match header.kind {
            SegmentKind::Send { offset, .. } => (Queue::Send, self.rx.send_msn, offset),
            _ => (Queue::Request, self.rx.request_msn, 0),
        };
        Seen::without_bytes(
            Untagged { last: header.last, control, word: 0, queue: queue.number(), msn, mo },
            len,
        )
    }

    /// Places a segment. Beyond a gap, responses and those RDMA Writes that their order field allows are placed, and those Read
    /// Requests that their order field allows are accepted. The receive of a Send is unknown there, because Writes and Read
    /// Requests share their numbers with Sends, so a Send is placed and completed only if any receive will do.
    pub(super) fn place_numbered(
        &mut self,
        shared: &mut Shared,
        header: SegmentHeader,
        payload: SegmentPayload<'_, '_>,
        arrival: Arrival,
    ) -> Result<Segment, Refused> {
        let len = payload.len();
        let Some(stream) = &self.stream else { return Err(violation(SegmentError::Setup)) };
        let terms = match arrival {
            Arrival::InOrder => stream.received.check(&header, u32::from(len)).map_err(violation)?,
            Arrival::Early => None,
        };
        let allowed = stream.processed.may_process(header.number, header.order);
        let may_write = arrival == Arrival::InOrder || allowed;
        let overtakes = arrival == Arrival::Early
            && allowed
            && self.attributes.options.any_receive
            && header.first
            && header.last
            && !stream.received.has_open_send();
        let mut value = 0;
        match header.kind {
            SegmentKind::Write { to, .. } if may_write => {
                let seen = tagged(MessageType::Write, header.last, STag::new(to.id), to.offset, len);
                self.place_write::<Refused>(shared, &Incoming { payload, arrival, seen })?;
            }
            SegmentKind::ReadRequest { from, total, atomic: None }
                if arrival == Arrival::Early && allowed =>
            {
                self.accept_overtaking(shared, &header, from, total)?;
            }
            SegmentKind::ReadResponse { offset } => match self.asked_by(&header, arrival)? {
                AskedKind::Read { sink, to, .. } => {
                    let to = to.wrapping_add(u64::from(offset));
                    let seen = tagged(MessageType::ReadResponse, header.last, sink, to, len);
                    self.place_response(shared, &Incoming { payload, arrival, seen })?;
                }
                AskedKind::Atomic { .. } => value = atomic_value(&header, payload)?,
            },
            SegmentKind::Send { control: SendControl::None, .. } if overtakes => {
                let message = MessageType::Send { invalidate: false, solicited: header.solicited };
                let seen = self.numbered(&header, message, len);
                self.place_overtaking(shared, &Incoming { payload, arrival, seen }, &header)?;
            }
            SegmentKind::Write { .. } | SegmentKind::Send { .. } | SegmentKind::ReadRequest { .. }
                if arrival == Arrival::Early =>
            {
                return Err(Refused::NoReceive(Quote::default()));
            }
            SegmentKind::Send { .. } => {
                let seen =
                    self.numbered(&header, MessageType::Send { invalidate: false, solicited: false }, len);
                self.place_numbered_send(shared, &Incoming { payload, arrival, seen }, terms)?;
            }
            SegmentKind::ReadRequest { atomic, .. } => {
                // An unknown operation: RFC 7306 section 5.2.1, rule 4.
                if atomic.is_some_and(|words| atomic_operation(words).is_none()) {
                    let seen = self.numbered(&header, MessageType::AtomicRequest, len);
                    return Err(seen.refused(RdmapError::UnexpectedOpcode));
                }
            }
            SegmentKind::Write { .. } => return Err(violation(SegmentError::Number)),
        }
        let overtook = arrival == Arrival::Early
            && matches!(header.kind, SegmentKind::Send { .. } | SegmentKind::ReadRequest { .. });
        Ok(Segment::Numbered(PlacedSegment { header, len, value, overtook }))
    }

    /// Places and completes a Send beyond a gap. It overtakes other messages, unless the gap contains only responses.
    fn place_overtaking(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_, Untagged>,
        header: &SegmentHeader,
    ) -> Result<(), Refused> {
        self.place_send::<Refused>(shared, incoming)?;
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let overtook = stream.processed.oldest() != header.number;
        stream.processed.process(header.number);
        self.complete_early_send(shared, incoming.seen.len, header.solicited, overtook);
        Ok(())
    }

    /// Accepts a Read Request beyond a gap. Requests are answered in the order of their acceptance (A18).
    fn accept_overtaking(
        &mut self,
        shared: &mut Shared,
        header: &SegmentHeader,
        from: BufferPlace,
        total: u32,
    ) -> Result<(), Refused> {
        self.deliver_request(shared, header, from, total, None)?;
        if let Some(stream) = &mut self.stream {
            stream.processed.process(header.number);
        }
        Ok(())
    }

    /// Places a segment of a Send in order; `terms` are the properties of the whole message.
    fn place_numbered_send(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_, Untagged>,
        terms: Option<SendTerms>,
    ) -> Result<(), Refused> {
        match terms.map(|terms| terms.control) {
            Some(SendControl::None | SendControl::Invalidate { .. }) => {
                self.place_send(shared, incoming).map(|_| ())
            }
            Some(SendControl::Immediate { .. }) => self.receive_for(shared, incoming).map(|_| ()),
            Some(SendControl::Terminate { .. }) => Ok(()),
            _ => Err(violation(SegmentError::Control)),
        }
    }

    /// Our request that a response answers. For a response in order, it is the oldest one (A17), or one that may overtake, which
    /// then becomes the oldest one.
    fn asked_by(&mut self, header: &SegmentHeader, arrival: Arrival) -> Result<AskedKind, Refused> {
        if arrival == Arrival::InOrder
            && let Some(stream) = &mut self.stream
            && let Some(place) = stream.answered_early(header)
        {
            if let Some(number) = stream.asked.remove(place) {
                stream.asked.push_front(number);
            }
            if let Some(asked) = self.rx.asked.remove(place) {
                self.rx.asked.push_front(asked);
            }
        }
        let asked = self.stream.iter().flat_map(|stream| &stream.asked).zip(&self.rx.asked);
        let most = if arrival == Arrival::InOrder { 1 } else { usize::MAX };
        let found = asked.take(most).find(|(asked, _)| asked.number == header.number);
        found.map(|(_, asked)| asked.kind).ok_or_else(|| violation(SegmentError::Number))
    }

    /// Delivers the next segment.
    pub(super) fn deliver_numbered(
        &mut self,
        shared: &mut Shared,
        PlacedSegment { header, len, value, overtook }: PlacedSegment,
    ) -> Result<(), Refused> {
        let Some(stream) = &self.stream else { return Err(violation(SegmentError::Setup)) };
        let terms = stream.received.check(&header, u32::from(len)).map_err(violation)?;
        match header.kind {
            SegmentKind::Write { .. } => self.rx.written.add(len, header.last),
            SegmentKind::Send { .. } => {
                if let Some(terms) = terms.filter(|_| !overtook) {
                    self.deliver_numbered_send(shared, &header, terms, len)?;
                }
            }
            SegmentKind::ReadRequest { from, total, atomic } => {
                if !overtook {
                    self.deliver_request(shared, &header, from, total, atomic)?;
                }
            }
            SegmentKind::ReadResponse { offset } => {
                self.deliver_answer(shared, &header, offset, len, value)?;
            }
        }
        let Some(stream) = &mut self.stream else { return Ok(()) };
        stream.received.accept(&header, u32::from(len)).map_err(violation)?;
        match header.kind {
            SegmentKind::ReadResponse { .. } if header.last => drop(stream.asked.pop_front()),
            SegmentKind::ReadResponse { .. } => {}
            _ if header.last => stream.processed.process(header.number),
            _ => {}
        }
        Ok(())
    }

    fn deliver_numbered_send(
        &mut self,
        shared: &mut Shared,
        header: &SegmentHeader,
        SendTerms { control, solicited }: SendTerms,
        len: u16,
    ) -> Result<(), Refused> {
        let message = MessageType::Send { invalidate: false, solicited };
        let seen = self.numbered(header, message, len);
        match control {
            SendControl::None => {
                let marks = Marks { solicited, ..Marks::default() };
                self.deliver_send(shared, seen, self.rq.first(), marks)
            }
            SendControl::Invalidate { stag } => {
                let marks = Marks { invalidate: Some(STag::new(stag)), solicited, ..Marks::default() };
                self.deliver_send(shared, seen, self.rq.first(), marks)
            }
            SendControl::Immediate { data } => self.deliver_immediate(shared, seen, data, solicited),
            SendControl::Terminate { code } => {
                let header = TerminateHeader {
                    layer: (code >> 12) as u8,
                    error_type: (code >> 8) as u8 & 0x0f,
                    code: code as u8,
                    segment_length: None,
                    ddp_header: None,
                    rdma_header: None,
                };
                self.terminated(header, shared);
                Ok(())
            }
            SendControl::Connect { .. } | SendControl::Accept { .. } | SendControl::Reject => {
                Err(violation(SegmentError::Control))
            }
        }
    }

    fn deliver_request(
        &mut self,
        shared: &mut Shared,
        header: &SegmentHeader,
        from: BufferPlace,
        total: u32,
        atomic: Option<AtomicWords>,
    ) -> Result<(), Refused> {
        let (stag, to) = (STag::new(from.id), from.offset);
        match atomic.and_then(atomic_operation) {
            None => {
                let seen = self.numbered(header, MessageType::ReadRequest, 0);
                // The sink is not on the wire: the requester finds it by the number.
                let request = ReadRequest {
                    sink_stag: STag::new(0),
                    sink_to: 0,
                    len: total,
                    source_stag: stag,
                    source_to: to,
                };
                self.deliver_read_request(shared, seen, request)?;
            }
            Some(operation) => {
                let seen = self.numbered(header, MessageType::AtomicRequest, 0);
                let request = AtomicRequest { operation, id: 0, stag, to };
                self.deliver_atomic_request(shared, seen, request)?;
            }
        }
        if let Some(stream) = &mut self.stream {
            stream.to_answer.push_back(header.number);
        }
        Ok(())
    }

    fn deliver_answer(
        &mut self,
        shared: &mut Shared,
        header: &SegmentHeader,
        offset: u32,
        len: u16,
        value: u64,
    ) -> Result<(), Refused> {
        match self.asked_by(header, Arrival::InOrder)? {
            AskedKind::Read { sink, to, .. } => {
                let to = to.wrapping_add(u64::from(offset));
                let seen = tagged(MessageType::ReadResponse, header.last, sink, to, len);
                self.deliver_response(shared, seen)
            }
            AskedKind::Atomic { id } => {
                let seen = Seen::without_bytes(
                    Untagged {
                        last: true,
                        control: Control { message: MessageType::AtomicResponse }.byte(Versions::Ietf),
                        word: 0,
                        queue: Queue::AtomicResponse.number(),
                        msn: self.rx.atomic_msn,
                        mo: 0,
                    },
                    len,
                );
                self.deliver_atomic_response(shared, seen, AtomicResponse { id, original: value })
            }
        }
    }
}
