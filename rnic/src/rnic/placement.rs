//! Placement of segments in memory ([`Ulp::place`]), in order or early (beyond a gap).
//!
//! Placement finds the buffer of a segment and copies the payload there; the effects of a message come with its
//! delivery. All checks of RFC 5041 section 7.1 precede the first written byte. The short bodies of requests and of
//! Terminate are stored in [`Placed`] itself, so queues 1 to 3 need no buffers.
//!
//! [`Ulp::place`]: xwarp_tcp::ulp::Ulp::place
#![deny(clippy::indexing_slicing)]

use xwarp_tcp::ulp::{Arrival, Ulpdu};

use super::{
    Shared,
    grant::Keys,
    keys::{KeyError, User},
    pieces::{Extent, Stretches},
    qp::QueuePair,
    rdma_tcp::PlacedSegment,
    receive_queue::Receive,
    work::{Access, SgeList, WcStatus},
};
use crate::{
    ddp::{DdpError, Msn, Queue, STag, Tagged, Untagged},
    memory::Memory,
    rdmap::{
        ATOMIC_REQUEST_BYTES, ATOMIC_RESPONSE_BYTES, AtomicRequest, AtomicResponse, Carriage, MessageType,
        READ_REQUEST_BYTES, RdmapError, ReadRequest, StreamError, TERMINATE_MAX_BYTES, TerminateHeader,
    },
    segment::{Quote, Received, Seen, SegmentPayload, Unreadable},
};

/// Bytes of Immediate Data.
const IMMEDIATE_BYTES: usize = 8;

/// Bytes of the longest message body on queues 1 to 3.
const MAX_BODY_BYTES: usize =
    if ATOMIC_REQUEST_BYTES > TERMINATE_MAX_BYTES { ATOMIC_REQUEST_BYTES } else { TERMINATE_MAX_BYTES };

/// A placed ULPDU, kept until it is delivered.
#[derive(Debug, Clone, Copy)]
pub struct Placed(pub(crate) Segment);

#[derive(Debug, Clone, Copy)]
pub(crate) enum Segment {
    /// An FPDU without payload (RFC 6581 section 9.2): its delivery has no effect.
    Silent,
    /// A segment of an RDMA Write. Its length counts for Immediate Data that follows.
    Write {
        len: u16,
        last: bool,
    },
    ReadResponse(Seen<Tagged>),
    Untagged(Seen<Untagged>, Body),
    /// A segment of RDMA/TCP.
    Numbered(PlacedSegment),
}

/// The content of an untagged segment.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Body {
    /// A segment of a Send, whose payload was placed in the receive.
    Send {
        invalidate: bool,
        solicited: bool,
    },
    /// A segment of a Send with immediate data, which are in its header.
    SendImmediate {
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
    /// The initiator's ready-to-receive Send: no application posted it, so it takes no receive (RFC 6581 section
    /// 4.4.2).
    Rtr,
}

/// What a Send carries besides its payload.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Marks {
    pub(super) invalidate: Option<STag>,
    pub(super) immediate: Option<[u8; 4]>,
    pub(super) solicited: bool,
}

/// The reason why a ULPDU was not placed or not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// No receive is available for it yet.
    NoReceive(Quote),
    /// The peer violated the protocol.
    Stream(StreamError, Quote),
    /// The receive for the next message cannot hold it: the receive fails.
    Receive(WcStatus, DdpError, Quote),
    /// The response does not fit our oldest outstanding request: that request fails.
    Answer(WcStatus, StreamError, Quote),
}

/// How the rejection of a segment is described. A rule that [`QueuePair::take_first`] shares with the general
/// path is written once, for both types.
pub(crate) trait Detail {
    fn of(describe: impl FnOnce() -> Refused) -> Self;
}

/// A rejection without a description, because preparing one costs more than processing a segment of a Write or a Send: the general arm
/// processes the segment once more. What was done until then, up to writing the payload, has no further effect when it is done again.
pub(crate) struct Undescribed;

impl Detail for Undescribed {
    #[inline]
    fn of(_: impl FnOnce() -> Refused) -> Self {
        Self
    }
}

impl Detail for Refused {
    #[inline]
    fn of(describe: impl FnOnce() -> Self) -> Self {
        describe()
    }
}

impl From<Unreadable> for Refused {
    fn from(Unreadable { error, quote }: Unreadable) -> Self {
        Self::Stream(error, quote)
    }
}

impl<H: Copy> Seen<H>
where
    Quote: From<Self>,
{
    /// The rejection of this segment for a stream error.
    pub(crate) fn refused(self, error: impl Into<StreamError>) -> Refused {
        Refused::Stream(error.into(), self.into())
    }
}

/// A segment that is being placed.
pub(super) struct Incoming<'u, 'p, H> {
    pub(super) payload: SegmentPayload<'u, 'p>,
    pub(super) arrival: Arrival,
    pub(super) seen: Seen<H>,
}

impl<H: Copy> Incoming<'_, '_, H>
where
    Quote: From<Seen<H>>,
{
    fn refused(&self, error: impl Into<StreamError>) -> Refused {
        self.seen.refused(error)
    }
}

/// Copies `payload` to `extent`, from byte `start` on, where it fits; returns false if the memory is read-only, or is gone.
#[expect(clippy::inline_always, reason = "see `QueuePair::take_first`")]
#[inline(always)]
fn copy_to(payload: SegmentPayload<'_, '_>, extent: &Extent, start: u64) -> bool {
    let Some(memory) = extent.one_memory() else {
        return copy_to_stretches(payload, extent.stretches(start, payload.len().into()));
    };
    match payload.one_run() {
        Some(run) => run.len == 0 || memory.write_gapped(start as usize, &run).is_ok(),
        None => copy_to_memory(payload, memory, start),
    }
}

/// Copies `payload` to `receive`, from byte `mo` on, where it fits; returns false if the user has no access to the memory.
#[expect(clippy::inline_always, reason = "see `QueuePair::take_first`")]
#[inline(always)]
fn copy_to_receive(
    payload: SegmentPayload<'_, '_>,
    receive: &Receive,
    mo: u64,
    keys: &Keys,
    user: User,
) -> bool {
    let (need, len) = (Access::LOCAL_WRITE, payload.len().into());
    let SgeList::One(piece) = &receive.scatter else {
        return copy_to_list(payload, receive, mo, keys, user);
    };
    let Some(start) = piece.offset.checked_add(mo) else { return false };
    match keys.find(user, piece.key, need, start, len) {
        Ok((extent, start)) => copy_to(payload, extent, start),
        Err(_) => false,
    }
}

/// [`copy_to_receive`] for a receive of several pieces.
#[inline(never)]
fn copy_to_list(
    payload: SegmentPayload<'_, '_>,
    receive: &Receive,
    mo: u64,
    keys: &Keys,
    user: User,
) -> bool {
    let len = payload.len().into();
    let stretches = Stretches::open(keys, user, Access::LOCAL_WRITE, &receive.scatter, mo, len);
    stretches.is_ok_and(|stretches| copy_to_stretches(payload, stretches))
}

/// Copies `payload` to `memory`, from byte `start` on; returns false if the memory is read-only, or is gone.
#[inline(never)]
fn copy_to_memory(payload: SegmentPayload<'_, '_>, memory: &Memory, start: u64) -> bool {
    let mut written = true;
    payload.for_each_run(|at, run| written &= memory.write_gapped(start as usize + at, run).is_ok());
    written
}

/// Copies `payload` to `stretches`; returns false if memory is read-only, or is gone.
#[inline(never)]
fn copy_to_stretches(payload: SegmentPayload<'_, '_>, mut stretches: Stretches<'_>) -> bool {
    let mut written = true;
    payload.for_each(|_, bytes| written &= stretches.write(bytes));
    written
}

impl QueuePair {
    /// Places a segment in order and delivers it, if it is one of an RDMA Write or a Send with DDP, as nearly all are, and nothing is
    /// wrong with it. [`Self::place`] and [`Self::deliver`] take all others.
    #[expect(clippy::inline_always, reason = "each segment calls it once")]
    #[inline(always)]
    pub(crate) fn take_first(&mut self, shared: &mut Shared, ulpdu: &Ulpdu<'_>) -> Result<(), Undescribed> {
        let codec = self.codec();
        if self.rx.expects_rtr || !codec.reads_in_place(ulpdu) {
            return Err(Undescribed);
        }
        let arrival = Arrival::InOrder;
        match codec.read(ulpdu) {
            Ok(Received::Tagged(MessageType::Write, seen, payload)) if seen.len > 0 => {
                let segment =
                    self.place_write::<Undescribed>(shared, &Incoming { payload, arrival, seen })?;
                self.counters.placed(&segment, arrival);
                self.rx.written.add(seen.len, seen.header.last);
                Ok(())
            }
            Ok(Received::Untagged(MessageType::Send { invalidate: false, solicited }, seen, payload))
                if seen.len > 0 && seen.header.queue == Queue::Send.number() =>
            {
                let receive = self.place_send::<Undescribed>(shared, &Incoming { payload, arrival, seen })?;
                let marks = Marks { solicited, ..Marks::default() };
                self.deliver_send::<Undescribed>(shared, seen, Some(receive), marks)?;
                let body = Body::Send { invalidate: false, solicited };
                self.counters.placed(&Segment::Untagged(seen, body), arrival);
                Ok(())
            }
            _ => Err(Undescribed),
        }
    }

    /// Places a segment. Early placement changes only the target memory and the binding of a shared queue's receive to the message.
    pub(crate) fn place(
        &mut self,
        shared: &mut Shared,
        received: Received<'_, '_>,
        arrival: Arrival,
    ) -> Result<Segment, Refused> {
        match received {
            Received::Numbered(header, payload) => self.place_numbered(shared, header, payload, arrival),
            // The first message may be a ready-to-receive Send, which takes no receive; until it has come, the
            // receives of later messages are unknown.
            _ if self.rx.expects_rtr && arrival == Arrival::Early => {
                Err(Refused::NoReceive(Quote::default()))
            }
            Received::Empty => Ok(Segment::Silent),
            Received::Tagged(message, seen, payload) => {
                let incoming = Incoming { payload, arrival, seen };
                match message {
                    MessageType::Write => self.place_write(shared, &incoming),
                    MessageType::ReadResponse => self.place_response(shared, &incoming),
                    _ => Err(incoming.refused(RdmapError::UnexpectedOpcode)),
                }
            }
            Received::Untagged(message, seen, payload) => {
                let incoming = Incoming { payload, arrival, seen };
                Ok(Segment::Untagged(seen, self.place_untagged(shared, &incoming, message)?))
            }
        }
    }

    #[expect(clippy::inline_always, reason = "see `Self::take_first`")]
    #[inline(always)]
    pub(super) fn place_write<D: Detail>(
        &self,
        shared: &Shared,
        incoming: &Incoming<'_, '_, Tagged>,
    ) -> Result<Segment, D> {
        let Seen { header, len, .. } = incoming.seen;
        // The tag and the offset of a segment without payload must not be checked (RFC 5041 section 5.2).
        if len > 0 {
            let (extent, start) = shared
                .keys
                .find(self.user(), header.stag, Access::REMOTE_WRITE, header.to, u64::from(len))
                .map_err(|error| D::of(|| incoming.refused(DdpError::from(error))))?;
            if !copy_to(incoming.payload, extent, start) {
                return Err(D::of(|| incoming.refused(DdpError::from(KeyError::Access))));
            }
        }
        Ok(Segment::Write { len, last: header.last })
    }

    /// Places a segment of a Read Response, only within the sink of one of our outstanding requests, whatever else
    /// the region grants. RFC 5040 section 5.2.2 allows this check.
    pub(super) fn place_response(
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
            let (extent, start) = shared
                .keys
                .find(self.user(), header.stag, Access::LOCAL_WRITE, header.to, u64::from(len))
                .map_err(|error| {
                    Refused::Answer(WcStatus::LocalProtection, DdpError::from(error).into(), quote)
                })?;
            if !copy_to(incoming.payload, extent, start) {
                let error = DdpError::LocalCatastrophic.into();
                return Err(Refused::Answer(WcStatus::LocalProtection, error, quote));
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
                in_range(incoming, self.rx.send_msn, 1)?;
                whole(incoming, 0)?;
                return Ok(Body::Rtr);
            }
            self.place_send::<Refused>(shared, incoming)?;
            return Ok(Body::Send { invalidate, solicited });
        }
        if let MessageType::SendImmediate { solicited } = message {
            if !self.send_immediate {
                return Err(incoming.refused(RdmapError::UnexpectedOpcode));
            }
            self.place_send::<Refused>(shared, incoming)?;
            return Ok(Body::SendImmediate { solicited });
        }
        let mut body = [0; MAX_BODY_BYTES];
        let body = incoming.payload.peek(&mut body);
        let short = || incoming.refused(RdmapError::StreamCatastrophic);
        Ok(match message {
            MessageType::Immediate { solicited } => {
                // RFC 7306 section 6.3: exactly eight bytes.
                whole(incoming, IMMEDIATE_BYTES)?;
                self.receive_for::<Refused>(shared, incoming)?;
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
                // An unknown operation: RFC 7306 section 5.2.1, rule 4.
                let unknown = || incoming.refused(RdmapError::UnexpectedOpcode);
                Body::AtomicRequest(AtomicRequest::parse(body).ok_or_else(short)?.ok_or_else(unknown)?)
            }
            MessageType::AtomicResponse => {
                whole(incoming, ATOMIC_RESPONSE_BYTES)?;
                in_range(incoming, self.rx.atomic_msn, u32::from(self.ord))?;
                Body::AtomicResponse(AtomicResponse::parse(body).ok_or_else(short)?)
            }
            MessageType::Terminate => {
                // The queue has one buffer, for one message (RFC 5040 section 5.4).
                in_range(incoming, Msn::FIRST, 1)?;
                if incoming.seen.header.mo != 0 {
                    return Err(incoming.refused(DdpError::InvalidMo));
                }
                Body::Terminate(TerminateHeader::parse(body).ok_or_else(short)?)
            }
            MessageType::Send { .. }
            | MessageType::SendImmediate { .. }
            | MessageType::Write
            | MessageType::ReadResponse => {
                return Err(incoming.refused(RdmapError::UnexpectedOpcode));
            }
        })
    }

    /// The receive for a message of queue 0, by its MSN.
    #[expect(clippy::inline_always, reason = "see `Self::take_first`")]
    #[inline(always)]
    pub(super) fn receive_for<D: Detail>(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_, Untagged>,
    ) -> Result<&Receive, D> {
        let ahead = incoming
            .seen
            .header
            .msn
            .ahead_of(self.rx.send_msn)
            .filter(|ahead| *ahead == 0 || incoming.arrival == Arrival::Early)
            .ok_or_else(|| D::of(|| incoming.refused(DdpError::MsnRange)))?;
        let receive = self.rq.bind(ahead, &mut shared.events);
        receive.ok_or_else(|| D::of(|| Refused::NoReceive(incoming.seen.into())))
    }

    /// Places a segment of a Send. Returns the identifier of its receive.
    #[expect(clippy::inline_always, reason = "see `Self::take_first`")]
    #[inline(always)]
    pub(super) fn place_send<D: Detail>(
        &mut self,
        shared: &mut Shared,
        incoming: &Incoming<'_, '_, Untagged>,
    ) -> Result<u64, D> {
        let user = self.user();
        let receive = self.receive_for(shared, incoming)?;
        let wr_id = receive.wr_id;
        let Seen { header, len, .. } = incoming.seen;
        if len == 0 {
            return Ok(wr_id);
        }
        let refused = |status, error| D::of(|| Refused::Receive(status, error, incoming.seen.into()));
        let (mo, len) = (u64::from(header.mo), u64::from(len));
        // A message has fewer than 2^32 bytes (RFC 5041 section 5.2), even in a larger receive.
        if mo > receive.capacity || mo + len > u64::from(u32::MAX) {
            return Err(refused(WcStatus::LocalLength, DdpError::InvalidMo));
        }
        if mo + len > receive.capacity {
            return Err(refused(WcStatus::LocalLength, DdpError::TooLong));
        }
        if copy_to_receive(incoming.payload, receive, mo, &shared.keys, user) {
            Ok(wr_id)
        } else {
            Err(refused(WcStatus::LocalProtection, DdpError::LocalCatastrophic))
        }
    }
}

/// Checks that a message of queues 1 to 3 is the one that is due or, if early, one of the `buffers` messages from
/// that one on (RFC 5041 section 7.1).
fn in_range(incoming: &Incoming<'_, '_, Untagged>, due: Msn, buffers: u32) -> Result<(), Refused> {
    let ahead = incoming.seen.header.msn.ahead_of(due);
    let fits = |ahead: &u32| *ahead == 0 || incoming.arrival == Arrival::Early && *ahead < buffers;
    ahead.filter(fits).map(|_| ()).ok_or_else(|| incoming.refused(DdpError::MsnRange))
}

/// Checks that one segment holds a whole message of queues 1 to 3, or whole Immediate Data.
///
/// Every MULPDU is large enough for these (RFC 5044 section 3: at least 128 octets), so only a faulty peer splits
/// them.
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
