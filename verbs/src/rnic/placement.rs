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
    qp::QueuePair,
    receive_queue::Receive,
    work::{Access, WcStatus},
};
use crate::{
    ddp::{
        DdpError, Header, Malformed, Msn, Queue, RawHeader, TAGGED_BYTES, Tagged, UNTAGGED_BYTES, Untagged,
    },
    rdmap::{
        ATOMIC_REQUEST_BYTES, ATOMIC_RESPONSE_BYTES, AtomicRequest, AtomicResponse, Carriage, Control,
        InvalidControl, MessageType, READ_REQUEST_BYTES, RdmapError, ReadRequest, StreamError,
        TERMINATE_MOST_BYTES, TerminateHeader,
    },
};

/// Bytes of Immediate Data.
const IMMEDIATE_BYTES: usize = 8;

/// Bytes of the longest body of queues 1 to 3.
const MOST_BODY_BYTES: usize =
    if ATOMIC_REQUEST_BYTES > TERMINATE_MOST_BYTES { ATOMIC_REQUEST_BYTES } else { TERMINATE_MOST_BYTES };

/// A segment's header, and its length: what is remembered of it, and what an error report says of it (RFC
/// 5041 section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen<H> {
    pub(crate) header: H,
    /// The header's first byte, as it came: a Terminate quotes it with its reserved bits.
    first: u8,
    /// Bytes of payload. MPA's length field has 16 bits.
    pub(crate) len: u16,
}

/// What a Terminate may quote of the message that an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Quote {
    /// The segment's header, and the segment's length with it.
    pub(crate) segment: Option<(RawHeader, u16)>,
    pub(crate) request: Option<ReadRequest>,
}

impl Quote {
    fn segment(header: &Header, first: u8, len: u16) -> Self {
        let raw = RawHeader::of(header, first);
        Self { segment: Some((raw, header.bytes() as u16 + len)), request: None }
    }
}

impl From<Seen<Tagged>> for Quote {
    fn from(Seen { header, first, len }: Seen<Tagged>) -> Self {
        Self::segment(&Header::Tagged(header), first, len)
    }
}

impl From<Seen<Untagged>> for Quote {
    fn from(Seen { header, first, len }: Seen<Untagged>) -> Self {
        Self::segment(&Header::Untagged(header), first, len)
    }
}

/// What is remembered of a placed ULPDU until it is delivered.
#[derive(Debug, Clone, Copy)]
pub struct Placed(pub(crate) Segment);

#[derive(Debug, Clone, Copy)]
pub(crate) enum Segment {
    /// A bare FPDU (RFC 6581 section 9.2): delivering it means nothing.
    Silent,
    /// Only Immediate Data that follows will ask how long the Write was.
    Write {
        len: u16,
        last: bool,
    },
    ReadResponse(Seen<Tagged>),
    Untagged(Seen<Untagged>, Body),
}

/// What an untagged segment carries.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Body {
    /// Its payload lies in the receive.
    Send {
        invalidate: bool,
        solicited: bool,
    },
    Immediate {
        data: [u8; 8],
        solicited: bool,
    },
    ReadRequest(ReadRequest),
    AtomicRequest(AtomicRequest),
    AtomicResponse(AtomicResponse),
    Terminate(TerminateHeader),
    /// The Send that tells the responder that the initiator is ready: no application knows of it, so it
    /// takes no receive (RFC 6581 section 4.4.2).
    Rtr,
}

/// Why a ULPDU is not placed or not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// No receive for it yet.
    NoReceive(Quote),
    /// The peer broke the protocol.
    Stream(StreamError, Quote),
    /// The receive of the message that is due cannot take it.
    Receive(WcStatus, DdpError, Quote),
    /// The request of ours that it answers cannot take it.
    Answer(WcStatus, StreamError, Quote),
}

impl<H: Copy> Seen<H>
where
    Quote: From<Self>,
{
    /// The refusal of this segment for an error of the stream.
    pub(crate) fn refused(self, error: impl Into<StreamError>) -> Refused {
        Refused::Stream(error.into(), self.into())
    }
}

/// A ULPDU on its way into memory.
struct Incoming<'u, 'p, H> {
    ulpdu: &'u Ulpdu<'p>,
    arrival: Arrival,
    seen: Seen<H>,
}

impl<H: Copy> Incoming<'_, '_, H>
where
    Quote: From<Seen<H>>,
{
    fn refused(&self, error: impl Into<StreamError>) -> Refused {
        self.seen.refused(error)
    }

    /// Copies the payload, which follows `header_bytes`; false when the memory turns out to be read-only.
    fn copy_to(&self, header_bytes: usize, mut stretches: Stretches<'_>) -> bool {
        let mut written = true;
        self.ulpdu.for_each(header_bytes, |_, bytes| written &= stretches.write(bytes));
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
        if self.rx.expects_rtr && arrival == Arrival::Early {
            // Whether the first message takes a receive decides which receives the others take.
            return Err(Refused::NoReceive(Quote::default()));
        }
        if ulpdu.is_empty() {
            return Ok(Segment::Silent);
        }
        let mut head = [0; UNTAGGED_BYTES];
        let peeked = ulpdu.peek(&mut head);
        let parsed = Header::parse(head.get(..peeked).unwrap_or_default());
        let (header, version) = match parsed {
            Ok(header) => (header, Ok(())),
            Err(Malformed::Version(error, header)) => (header, Err(error)),
            Err(Malformed::Truncated) => {
                return Err(Refused::Stream(RdmapError::StreamCatastrophic.into(), Quote::default()));
            }
        };
        let [first, ..] = head;
        let len = (ulpdu.len() - header.bytes()) as u16;
        match header {
            Header::Tagged(header) => {
                let incoming = Incoming { ulpdu, arrival, seen: Seen { header, first, len } };
                version.map_err(|error| incoming.refused(error))?;
                match message_of(header.control).map_err(|error| incoming.refused(error))? {
                    MessageType::Write => self.place_write(shared, &incoming),
                    MessageType::ReadResponse => self.place_response(shared, &incoming),
                    _ => Err(incoming.refused(RdmapError::UnexpectedOpcode)),
                }
            }
            Header::Untagged(header) => {
                let incoming = Incoming { ulpdu, arrival, seen: Seen { header, first, len } };
                version.map_err(|error| incoming.refused(error))?;
                let message = message_of(header.control).map_err(|error| incoming.refused(error))?;
                Ok(Segment::Untagged(incoming.seen, self.place_untagged(shared, &incoming, message)?))
            }
        }
    }

    fn place_write(&self, shared: &Shared, incoming: &Incoming<'_, '_, Tagged>) -> Result<Segment, Refused> {
        let Seen { header, len, .. } = incoming.seen;
        // Without payload the tag and the offset must not be looked at (RFC 5041 section 5.2).
        if len > 0 {
            let stretches = shared
                .keys
                .open(self.user(), header.stag, Access::REMOTE_WRITE, header.to, u64::from(len))
                .map_err(|error| incoming.refused(DdpError::from(error)))?;
            if !incoming.copy_to(TAGGED_BYTES, stretches) {
                return Err(incoming.refused(DdpError::LocalCatastrophic));
            }
        }
        Ok(Segment::Write { len, last: header.last })
    }

    /// A Read Response goes only where one of our own requests asked for it, whatever other rights the
    /// region grants. RFC 5040 section 5.2.2 allows this check.
    fn place_response(
        &self,
        shared: &Shared,
        incoming: &Incoming<'_, '_, Tagged>,
    ) -> Result<Segment, Refused> {
        let Seen { header, len, .. } = incoming.seen;
        match incoming.arrival {
            Arrival::InOrder => {
                let asked = self.rx.asked.front();
                asked
                    .ok_or_else(|| incoming.refused(RdmapError::UnexpectedOpcode))?
                    .kind
                    .check(incoming.seen)?;
            }
            Arrival::Early if self.rx.asked.iter().any(|asked| asked.kind.covers(incoming.seen)) => {}
            Arrival::Early => return Err(incoming.refused(DdpError::TaggedBounds)),
        }
        if len > 0 {
            let quote = Quote::from(incoming.seen);
            let stretches = shared
                .keys
                .open(self.user(), header.stag, Access::LOCAL_WRITE, header.to, u64::from(len))
                .map_err(|error| {
                    Refused::Answer(WcStatus::LocalProtection, DdpError::from(error).into(), quote)
                })?;
            if !incoming.copy_to(TAGGED_BYTES, stretches) {
                return Err(incoming.refused(DdpError::LocalCatastrophic));
            }
        }
        Ok(Segment::ReadResponse(incoming.seen))
    }

    fn place_untagged(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_, Untagged>,
        message: MessageType,
    ) -> Result<Body, Refused> {
        let queue = Queue::from_number(incoming.seen.header.queue)
            .ok_or_else(|| incoming.refused(DdpError::InvalidQueue))?;
        if message.carriage() != Carriage::Untagged(queue) {
            return Err(incoming.refused(RdmapError::UnexpectedOpcode));
        }
        if let MessageType::Send { invalidate, solicited } = message {
            if self.rx.expects_rtr && incoming.seen.len == 0 {
                return Ok(Body::Rtr);
            }
            self.place_send(shared, incoming)?;
            return Ok(Body::Send { invalidate, solicited });
        }
        let mut head = [0; UNTAGGED_BYTES + MOST_BODY_BYTES];
        let peeked = incoming.ulpdu.peek(&mut head);
        let body = head.get(UNTAGGED_BYTES..peeked).unwrap_or_default();
        let short = || incoming.refused(RdmapError::StreamCatastrophic);
        Ok(match message {
            MessageType::Immediate { solicited } => {
                // RFC 7306 section 6.3: exactly eight bytes.
                whole(incoming, IMMEDIATE_BYTES)?;
                self.receive_for(shared, incoming)?;
                Body::Immediate { data: body.first_chunk().copied().ok_or_else(short)?, solicited }
            }
            MessageType::ReadRequest => {
                whole(incoming, READ_REQUEST_BYTES)?;
                in_range(incoming, self.rx.request_msn, 2 * u32::from(self.ird))?;
                Body::ReadRequest(ReadRequest::parse(body).ok_or_else(short)?)
            }
            MessageType::AtomicRequest => {
                whole(incoming, ATOMIC_REQUEST_BYTES)?;
                in_range(incoming, self.rx.request_msn, 2 * u32::from(self.ird))?;
                // An operation that we do not know: RFC 7306 section 5.2.1, rule 4.
                let unknown = || incoming.refused(RdmapError::UnexpectedOpcode);
                Body::AtomicRequest(AtomicRequest::parse(body).ok_or_else(short)?.ok_or_else(unknown)?)
            }
            MessageType::AtomicResponse => {
                whole(incoming, ATOMIC_RESPONSE_BYTES)?;
                in_range(incoming, self.rx.atomic_msn, u32::from(self.ord))?;
                Body::AtomicResponse(AtomicResponse::parse(body).ok_or_else(short)?)
            }
            MessageType::Terminate => {
                // There is one buffer, for one message (RFC 5040 section 5.4).
                in_range(incoming, Msn::FIRST, 1)?;
                if incoming.seen.header.mo != 0 {
                    return Err(incoming.refused(DdpError::InvalidMo));
                }
                Body::Terminate(TerminateHeader::parse(body).ok_or_else(short)?)
            }
            MessageType::Send { .. } | MessageType::Write | MessageType::ReadResponse => {
                return Err(incoming.refused(RdmapError::UnexpectedOpcode));
            }
        })
    }

    /// The receive that a message of queue 0 takes, by its MSN.
    fn receive_for(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_, Untagged>,
    ) -> Result<&Receive, Refused> {
        let ahead = incoming
            .seen
            .header
            .msn
            .ahead_of(self.rx.send_msn)
            .filter(|ahead| *ahead == 0 || incoming.arrival == Arrival::Early)
            .ok_or_else(|| incoming.refused(DdpError::MsnRange))?;
        let srq = self.attributes.srq.and_then(|id| shared.srqs.get_mut(id));
        let receive = self.rq.bind(ahead as usize, srq, &mut shared.events);
        receive.ok_or_else(|| Refused::NoReceive(incoming.seen.into()))
    }

    fn place_send(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_, Untagged>,
    ) -> Result<(), Refused> {
        let user = self.user();
        let receive = self.receive_for(shared, incoming)?;
        let Seen { header, len, .. } = incoming.seen;
        if len == 0 {
            return Ok(());
        }
        let refused = |status, error| Refused::Receive(status, error, incoming.seen.into());
        let (mo, len) = (u64::from(header.mo), u64::from(len));
        // A message has less than 2^32 bytes (RFC 5041 section 5.2), however large the receive is.
        if mo > receive.capacity || mo + len > u64::from(u32::MAX) {
            return Err(refused(WcStatus::LocalLength, DdpError::InvalidMo));
        }
        if mo + len > receive.capacity {
            return Err(refused(WcStatus::LocalLength, DdpError::TooLong));
        }
        let placed = Stretches::open(&shared.keys, user, Access::LOCAL_WRITE, &receive.scatter, mo, len)
            .is_ok_and(|stretches| incoming.copy_to(UNTAGGED_BYTES, stretches));
        if placed { Ok(()) } else { Err(refused(WcStatus::LocalProtection, DdpError::LocalCatastrophic)) }
    }
}

/// Whether a message of queues 1 to 3 is the one that is due, or early one of the `buffers` from there on
/// (RFC 5041 section 7.1).
fn in_range(incoming: &Incoming<'_, '_, Untagged>, due: Msn, buffers: u32) -> Result<(), Refused> {
    let ahead = incoming.seen.header.msn.ahead_of(due);
    let fits = |ahead: &u32| *ahead == 0 || incoming.arrival == Arrival::Early && *ahead < buffers;
    ahead.filter(fits).map(|_| ()).ok_or_else(|| incoming.refused(DdpError::MsnRange))
}

fn message_of(control: u8) -> Result<MessageType, RdmapError> {
    Control::parse(control).map(|control| control.message).map_err(|InvalidControl(error)| error)
}

/// Whether a message of queues 1 to 3, or Immediate Data, is there whole in one segment.
///
/// Every MULPDU is large enough for it (RFC 5044 section 3.2: at least 128), so only a broken peer cuts it.
fn whole(incoming: &Incoming<'_, '_, Untagged>, bytes: usize) -> Result<(), Refused> {
    let Seen { header, len, .. } = incoming.seen;
    let len = usize::from(len);
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
