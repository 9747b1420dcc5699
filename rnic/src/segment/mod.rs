//! Segments between the framing of a connection and its queue pair.
//!
//! A queue pair handles typed segments. The bytes of their headers are read and written here only: by DDP's codec
//! ([`crate::ddp`]) on a connection with MPA, and by the codec of RDMA/TCP ([`xwarp_tcp::rdma_tcp`]) on one with that
//! framing. The headers stay different types, because they name a message differently: DDP by a queue and its sequence
//! number, or by a tagged buffer alone; RDMA/TCP by one number for all messages of a direction.
#![deny(clippy::indexing_slicing)]

mod writer;

use xwarp_tcp::{
    copy::Gapped,
    rdma_tcp::{ConnectionId, HEADER_MAX_BYTES, SegmentHeader},
    ulp::Ulpdu,
};

pub(crate) use writer::{Head, Header, SegmentWriter, TaggedHead, UntaggedHead};

use crate::{
    ddp::{self, Malformed, RawHeader, TAGGED_BYTES, Tagged, UNTAGGED_BYTES, Untagged, Versions},
    rdmap::{Control, InvalidControl, MessageType, RdmapError, ReadRequest, StreamError},
};

/// The codec of a connection's segments.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Codec {
    /// DDP in MPA, with these versions of DDP and RDMAP.
    Ddp(Versions),
    /// RDMA/TCP.
    RdmaTcp(ConnectionId),
}

/// A received segment.
pub(crate) enum Received<'u, 'p> {
    /// An FPDU without payload, which can be a ready-to-receive message (RFC 6581 section 9.2).
    Empty,
    /// A segment for a tagged buffer.
    Tagged(MessageType, Seen<Tagged>, SegmentPayload<'u, 'p>),
    /// A segment for an untagged buffer.
    Untagged(MessageType, Seen<Untagged>, SegmentPayload<'u, 'p>),
    /// A segment of RDMA/TCP.
    Numbered(SegmentHeader, SegmentPayload<'u, 'p>),
}

/// The payload of a received segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SegmentPayload<'u, 'p> {
    ulpdu: &'u Ulpdu<'p>,
    /// Where the payload begins.
    at: usize,
}

impl SegmentPayload<'_, '_> {
    /// Bytes of the payload. The length field of a framing has 16 bits.
    pub(crate) fn len(&self) -> u16 {
        self.ulpdu.len().saturating_sub(self.at) as u16
    }

    /// Calls `f(offset, bytes)` for all pieces of the payload.
    #[inline]
    pub(crate) fn for_each(&self, f: impl FnMut(usize, &[u8])) {
        self.ulpdu.for_each(self.at, f);
    }

    /// The payload with the markers between its bytes, if it lies in one chunk.
    #[inline]
    pub(crate) fn one_run(&self) -> Option<Gapped<'_>> {
        self.ulpdu.one_run(self.at)
    }

    /// Calls `f(offset, bytes)` for the payload in each chunk, with the markers between its bytes.
    pub(crate) fn for_each_run(&self, f: impl FnMut(usize, &Gapped<'_>)) {
        self.ulpdu.for_each_run(self.at, f);
    }

    /// Copies the first bytes to `out`; returns those that were copied.
    pub(crate) fn peek<'o>(&self, out: &'o mut [u8]) -> &'o [u8] {
        let most = out.len().min(self.len().into());
        self.for_each(|at, bytes| {
            for (to, from) in out.iter_mut().skip(at).zip(bytes) {
                *to = *from;
            }
        });
        out.get(..most).unwrap_or_default()
    }
}

/// The reason why a segment cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unreadable {
    pub(crate) error: StreamError,
    pub(crate) quote: Quote,
}

impl From<StreamError> for Unreadable {
    fn from(error: StreamError) -> Self {
        Self { error, quote: Quote::default() }
    }
}

/// A segment's header and payload length, kept until delivery and for an error report (RFC 5041 section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen<H> {
    pub(crate) header: H,
    /// The header's first byte as received: a Terminate quotes it including reserved bits.
    first: u8,
    /// Bytes of payload.
    pub(crate) len: u16,
}

impl<H> Seen<H> {
    /// A segment without a DDP header, so that none is ever quoted.
    pub(crate) const fn without_bytes(header: H, len: u16) -> Self {
        Self { header, first: 0, len }
    }
}

/// The part of the faulty message that a Terminate may quote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Quote {
    /// The segment's header, and the length of the whole segment with its header.
    pub(crate) segment: Option<(RawHeader, u16)>,
    pub(crate) request: Option<ReadRequest>,
}

impl Quote {
    fn segment(header: &ddp::Header, first: u8, len: u16) -> Self {
        let raw = RawHeader::of(header, first);
        Self { segment: Some((raw, header.bytes() as u16 + len)), request: None }
    }
}

impl From<Seen<Tagged>> for Quote {
    fn from(Seen { header, first, len }: Seen<Tagged>) -> Self {
        Self::segment(&ddp::Header::Tagged(header), first, len)
    }
}

impl From<Seen<Untagged>> for Quote {
    fn from(Seen { header, first, len }: Seen<Untagged>) -> Self {
        Self::segment(&ddp::Header::Untagged(header), first, len)
    }
}

impl Codec {
    /// Whether the segment has a header of DDP that lies in one piece, as nearly all have.
    #[inline]
    pub(crate) fn reads_in_place(self, ulpdu: &Ulpdu<'_>) -> bool {
        matches!(self, Self::Ddp(_)) && ulpdu.header::<UNTAGGED_BYTES>().is_some()
    }

    /// Reads the segment that a frame carries.
    #[expect(clippy::inline_always, reason = "each segment calls it once, and its result is large")]
    #[inline(always)]
    pub(crate) fn read<'u, 'p>(self, ulpdu: &'u Ulpdu<'p>) -> Result<Received<'u, 'p>, Unreadable> {
        match self {
            Self::Ddp(versions) => read_ddp(versions, ulpdu),
            Self::RdmaTcp(_) => read_numbered(ulpdu),
        }
    }
}

#[inline(never)]
fn read_numbered<'u, 'p>(ulpdu: &'u Ulpdu<'p>) -> Result<Received<'u, 'p>, Unreadable> {
    let mut head = [0; HEADER_MAX_BYTES];
    let peeked = ulpdu.peek_header(&mut head);
    let header = SegmentHeader::parse(head.get(..peeked).unwrap_or_default(), ulpdu.len());
    let header = header.map_err(StreamError::from)?;
    Ok(Received::Numbered(header, SegmentPayload { ulpdu, at: header.bytes() }))
}

#[expect(clippy::inline_always, reason = "see `Codec::read`")]
#[inline(always)]
fn read_ddp<'u, 'p>(versions: Versions, ulpdu: &'u Ulpdu<'p>) -> Result<Received<'u, 'p>, Unreadable> {
    match ulpdu.header::<UNTAGGED_BYTES>() {
        Some(head) => parse_ddp(versions, ulpdu, head),
        None => read_divided_ddp(versions, ulpdu),
    }
}

/// [`read_ddp`] for a header that spans a marker or two chunks, or is shorter than the longest.
#[inline(never)]
fn read_divided_ddp<'u, 'p>(
    versions: Versions,
    ulpdu: &'u Ulpdu<'p>,
) -> Result<Received<'u, 'p>, Unreadable> {
    let mut head = [0; UNTAGGED_BYTES];
    let peeked = ulpdu.peek(&mut head);
    parse_ddp(versions, ulpdu, head.get(..peeked).unwrap_or_default())
}

/// Parses the header `head` of a segment, or the first bytes of a header that is too short.
#[expect(clippy::inline_always, reason = "see `Codec::read`")]
#[inline(always)]
fn parse_ddp<'u, 'p>(
    versions: Versions,
    ulpdu: &'u Ulpdu<'p>,
    head: &[u8],
) -> Result<Received<'u, 'p>, Unreadable> {
    let Some(&first) = head.first() else { return Ok(Received::Empty) };
    let payload = |at| SegmentPayload { ulpdu, at };
    let unreadable = |header: ddp::Header, error| Unreadable {
        error,
        quote: Quote::segment(&header, first, payload(header.bytes()).len()),
    };
    // The two forms are separate, so that the compiler specialises each.
    match ddp::Header::parse(head, versions) {
        Ok(ddp::Header::Tagged(header)) => match Control::parse(header.control, versions) {
            Ok(Control { message }) => {
                let payload = payload(TAGGED_BYTES);
                Ok(Received::Tagged(message, Seen { header, first, len: payload.len() }, payload))
            }
            Err(InvalidControl(error)) => Err(unreadable(ddp::Header::Tagged(header), error.into())),
        },
        Ok(ddp::Header::Untagged(header)) => match Control::parse(header.control, versions) {
            Ok(Control { message }) => {
                let payload = payload(UNTAGGED_BYTES);
                Ok(Received::Untagged(message, Seen { header, first, len: payload.len() }, payload))
            }
            Err(InvalidControl(error)) => Err(unreadable(ddp::Header::Untagged(header), error.into())),
        },
        Err(Malformed::Version(error, header)) => Err(unreadable(header, error.into())),
        Err(Malformed::Truncated) => Err(StreamError::from(RdmapError::StreamCatastrophic).into()),
    }
}
