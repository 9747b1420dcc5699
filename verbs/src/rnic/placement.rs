//! ULPDUs into memory: what [`Ulp::place`] does, in order or early.
//!
//! Placement decides which buffer a segment belongs to and copies its payload there, and nothing else:
//! what it means is decided when it is delivered. All checks of RFC 5041 section 7.1 come before the first
//! byte is written. The few bytes of requests and of Terminate are carried in [`Placed`] itself, so that
//! queues 1 to 3 need no buffers.
//!
//! [`Ulp::place`]: xwarp_tcp::ulp::Ulp::place
#![deny(clippy::indexing_slicing)]

use xwarp_tcp::ulp::{Arrival, Ulpdu};

use super::{
    Shared,
    pieces::Stretches,
    qp::{AskedKind, QueuePair},
    receive_queue::Receive,
    work::{Access, WcStatus},
};
use crate::{
    ddp::{DdpError, Header, Malformed, Queue, Tagged, UNTAGGED_BYTES, Untagged},
    rdmap::{
        ATOMIC_REQUEST_BYTES, ATOMIC_RESPONSE_BYTES, AtomicRequest, AtomicResponse, Carriage, Control,
        InvalidControl, MessageType, READ_REQUEST_BYTES, RdmapError, ReadRequest, StreamError,
        TERMINATE_MOST_BYTES, TerminateHeader,
    },
};

/// Bytes of a ULPDU that are looked at: an untagged header and the longest body of queues 1 to 3.
const HEAD_BYTES: usize = UNTAGGED_BYTES + max(ATOMIC_REQUEST_BYTES, TERMINATE_MOST_BYTES);

const fn max(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// The segment that an error is about, as a Terminate quotes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context {
    pub(crate) header: Header,
    /// Bytes of the segment, header included.
    pub(crate) segment_length: u16,
    /// The Read Request that it carries.
    pub(crate) request: Option<ReadRequest>,
}

/// What is remembered of a placed ULPDU until it is delivered.
#[derive(Debug, Clone, Copy)]
pub struct Placed(pub(crate) Segment);

#[derive(Debug, Clone, Copy)]
pub(crate) enum Segment {
    /// A bare FPDU (RFC 6581 section 9.2), or a segment of an RDMA Write: delivering it means nothing.
    Silent,
    ReadResponse {
        header: Tagged,
        len: u32,
        context: Context,
    },
    Send {
        header: Untagged,
        len: u32,
        invalidate: bool,
        solicited: bool,
        context: Context,
    },
    Immediate {
        header: Untagged,
        data: [u8; 8],
        solicited: bool,
        context: Context,
    },
    ReadRequest {
        request: ReadRequest,
        context: Context,
    },
    AtomicRequest {
        request: AtomicRequest,
        context: Context,
    },
    AtomicResponse {
        response: AtomicResponse,
        context: Context,
    },
    Terminate {
        terminate: TerminateHeader,
    },
}

/// Why a ULPDU is not placed or not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// No receive for it yet.
    NoReceive(Context),
    /// The peer broke the protocol.
    Stream(StreamError, Option<Context>),
    /// The receive of the message that is due cannot take it.
    Receive(WcStatus, DdpError, Context),
    /// The request of ours that it answers cannot take it.
    Answer(WcStatus, StreamError, Context),
}

/// A ULPDU whose DDP header was read.
struct Incoming<'u, 'p> {
    ulpdu: &'u Ulpdu<'p>,
    arrival: Arrival,
    message: MessageType,
    /// Bytes of payload.
    len: u32,
    context: Context,
}

impl Incoming<'_, '_> {
    fn refused(&self, error: impl Into<StreamError>) -> Refused {
        Refused::Stream(error.into(), Some(self.context))
    }

    /// Copies the payload; false when the memory turns out to be read-only.
    fn copy_to(&self, mut stretches: Stretches<'_>) -> bool {
        let mut written = true;
        self.ulpdu.for_each(self.context.header.len(), |_, bytes| written &= stretches.write(bytes));
        written
    }
}

impl QueuePair {
    /// Places a ULPDU. Early, nothing is changed but the memory that it is for, and the receive that a
    /// shared queue gives to its message.
    pub(crate) fn place(
        &mut self,
        shared: &mut Shared,
        ulpdu: &Ulpdu<'_>,
        arrival: Arrival,
    ) -> Result<Segment, Refused> {
        if ulpdu.is_empty() {
            return Ok(Segment::Silent);
        }
        let mut head = [0; HEAD_BYTES];
        let peeked = ulpdu.peek(&mut head);
        let head = head.get(..peeked).unwrap_or_default();
        let header = match Header::parse(head) {
            Ok(header) => header,
            Err(Malformed::Truncated) => {
                return Err(Refused::Stream(RdmapError::StreamCatastrophic.into(), None));
            }
            Err(Malformed::Version(error, header)) => {
                let context = Context { header, segment_length: ulpdu.len() as u16, request: None };
                return Err(Refused::Stream(error.into(), Some(context)));
            }
        };
        // MPA's length field has 16 bits, so the lengths fit.
        let context = Context { header, segment_length: ulpdu.len() as u16, request: None };
        let Control { message } = Control::parse(header.control())
            .map_err(|InvalidControl(error)| Refused::Stream(error.into(), Some(context)))?;
        let body = head.get(header.len()..).unwrap_or_default();
        let len = (ulpdu.len() - header.len()) as u32;
        let incoming = Incoming { ulpdu, arrival, message, len, context };
        match (header, message) {
            (Header::Tagged(tagged), MessageType::Write) => self.place_write(shared, &incoming, &tagged),
            (Header::Tagged(tagged), MessageType::ReadResponse) => {
                self.place_response(shared, &incoming, &tagged)
            }
            (Header::Tagged(_), _) => Err(incoming.refused(RdmapError::UnexpectedOpcode)),
            (Header::Untagged(untagged), _) => self.place_untagged(shared, &incoming, &untagged, body),
        }
    }

    fn place_write(
        &self,
        shared: &Shared,
        incoming: &Incoming<'_, '_>,
        header: &Tagged,
    ) -> Result<Segment, Refused> {
        // Without payload the tag and the offset must not be looked at (RFC 5041 section 5.2).
        if incoming.len > 0 {
            let len = incoming.len;
            let (memory, offset) = shared
                .keys
                .open(self.user(), header.stag, Access::REMOTE_WRITE, header.to, u64::from(len))
                .map_err(|error| incoming.refused(DdpError::from(error)))?;
            if !incoming.copy_to(Stretches::one(memory, offset, len as usize)) {
                return Err(incoming.refused(DdpError::LocalCatastrophic));
            }
        }
        Ok(Segment::Silent)
    }

    /// A Read Response goes only where one of our own requests asked for it, whatever other rights the
    /// region grants. RFC 5040 section 5.2.2 allows this check.
    fn place_response(
        &self,
        shared: &Shared,
        incoming: &Incoming<'_, '_>,
        header: &Tagged,
    ) -> Result<Segment, Refused> {
        let len = incoming.len;
        let bad = |error: StreamError| Refused::Answer(WcStatus::BadResponse, error, incoming.context);
        let asked = match incoming.arrival {
            Arrival::InOrder => {
                let Some(AskedKind::Read { sink, to, len: asked, delivered }) =
                    self.rx.asked.front().map(|a| a.kind)
                else {
                    return Err(incoming.refused(RdmapError::UnexpectedOpcode));
                };
                if asked > 0 && header.stag != sink {
                    return Err(bad(DdpError::InvalidStag.into()));
                }
                if asked > 0 && header.to != to.wrapping_add(u64::from(delivered)) || len > asked - delivered
                {
                    return Err(bad(DdpError::TaggedBounds.into()));
                }
                header.last == (delivered + len == asked)
            }
            Arrival::Early => {
                len == 0 || self.rx.asked.iter().any(|a| a.kind.covers(header.stag, header.to, len))
            }
        };
        if !asked {
            return Err(bad(RdmapError::StreamCatastrophic.into()));
        }
        if len > 0 {
            let (memory, offset) = shared
                .keys
                .open(self.user(), header.stag, Access::LOCAL_WRITE, header.to, u64::from(len))
                .map_err(|e| {
                    Refused::Answer(WcStatus::LocalProtection, DdpError::from(e).into(), incoming.context)
                })?;
            if !incoming.copy_to(Stretches::one(memory, offset, len as usize)) {
                return Err(incoming.refused(DdpError::LocalCatastrophic));
            }
        }
        Ok(Segment::ReadResponse { header: *header, len, context: incoming.context })
    }

    fn place_untagged(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_>,
        header: &Untagged,
        body: &[u8],
    ) -> Result<Segment, Refused> {
        let queue =
            Queue::from_number(header.queue).ok_or_else(|| incoming.refused(DdpError::InvalidQueue))?;
        if incoming.message.carriage() != Carriage::Untagged(queue) {
            return Err(incoming.refused(RdmapError::UnexpectedOpcode));
        }
        let context = incoming.context;
        let short = || incoming.refused(RdmapError::StreamCatastrophic);
        Ok(match incoming.message {
            MessageType::Send { invalidate, solicited } => {
                self.place_send(shared, incoming, header)?;
                Segment::Send { header: *header, len: incoming.len, invalidate, solicited, context }
            }
            MessageType::Immediate { solicited } => {
                // RFC 7306 section 6.3: exactly eight bytes.
                whole(incoming, header, 8)?;
                self.receive_for(shared, incoming, header)?;
                let data = body.first_chunk().copied().ok_or_else(short)?;
                Segment::Immediate { header: *header, data, solicited, context }
            }
            MessageType::ReadRequest => {
                whole(incoming, header, READ_REQUEST_BYTES)?;
                let request = ReadRequest::parse(body).ok_or_else(short)?;
                Segment::ReadRequest { request, context: Context { request: Some(request), ..context } }
            }
            MessageType::AtomicRequest => {
                whole(incoming, header, ATOMIC_REQUEST_BYTES)?;
                let request = AtomicRequest::parse(body).ok_or_else(short)?;
                // An operation that we do not know (RFC 7306 section 5.2.1, rule 4).
                let request = request.ok_or_else(|| incoming.refused(RdmapError::UnexpectedOpcode))?;
                Segment::AtomicRequest { request, context }
            }
            MessageType::AtomicResponse => {
                whole(incoming, header, ATOMIC_RESPONSE_BYTES)?;
                let response = AtomicResponse::parse(body).ok_or_else(short)?;
                Segment::AtomicResponse { response, context }
            }
            MessageType::Terminate => {
                Segment::Terminate { terminate: TerminateHeader::parse(body).ok_or_else(short)? }
            }
            MessageType::Write | MessageType::ReadResponse => {
                return Err(incoming.refused(RdmapError::UnexpectedOpcode));
            }
        })
    }

    /// The receive that a message of queue 0 takes, by its MSN.
    fn receive_for(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_>,
        header: &Untagged,
    ) -> Result<&Receive, Refused> {
        let ahead = header
            .msn
            .ahead_of(self.rx.send_msn)
            .filter(|ahead| *ahead == 0 || incoming.arrival == Arrival::Early)
            .ok_or_else(|| incoming.refused(DdpError::MsnRange))?;
        let srq = self.attributes.srq.and_then(|id| shared.srqs.get_mut(id));
        self.rq.bind(ahead as usize, srq, &mut shared.events).ok_or(Refused::NoReceive(incoming.context))
    }

    fn place_send(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_>,
        header: &Untagged,
    ) -> Result<(), Refused> {
        let user = self.user();
        let receive = self.receive_for(shared, incoming, header)?;
        if incoming.len == 0 {
            return Ok(());
        }
        let refused = |status, error| Refused::Receive(status, error, incoming.context);
        let (mo, len) = (u64::from(header.mo), u64::from(incoming.len));
        // A message has less than 2^32 bytes (RFC 5041 section 5.2), however large the receive is.
        if mo > receive.capacity || mo + len > u64::from(u32::MAX) {
            return Err(refused(WcStatus::LocalLength, DdpError::InvalidMo));
        }
        if mo + len > receive.capacity {
            return Err(refused(WcStatus::LocalLength, DdpError::TooLong));
        }
        let placed = Stretches::open(&shared.keys, user, Access::LOCAL_WRITE, &receive.scatter, mo, len)
            .is_ok_and(|stretches| incoming.copy_to(stretches));
        if placed { Ok(()) } else { Err(refused(WcStatus::LocalProtection, DdpError::LocalCatastrophic)) }
    }
}

/// Whether a message of queues 1 to 3, or Immediate Data, is there whole in one segment.
///
/// Every MULPDU is large enough for it (RFC 5044 section 3.2: at least 128), so only a broken peer cuts it.
fn whole(incoming: &Incoming<'_, '_>, header: &Untagged, bytes: usize) -> Result<(), Refused> {
    let len = incoming.len as usize;
    if header.mo != 0 {
        Err(incoming.refused(DdpError::InvalidMo))
    } else if len > bytes || len == bytes && !header.last {
        Err(incoming.refused(DdpError::TooLong))
    } else if len < bytes {
        Err(incoming.refused(RdmapError::StreamCatastrophic))
    } else {
        Ok(())
    }
}
