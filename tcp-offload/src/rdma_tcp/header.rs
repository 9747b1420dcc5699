//! The header and control data of a segment (section 3 of the proposal; decisions A6 to A9 of
//! docs/decisions/0014).
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use super::{MessageNumber, Order, SegmentError};

/// Version of the format.
pub(crate) const VERSION: u8 = 1;

/// Bytes from the start of a segment to the end of the Connection ID.
pub(crate) const PREFIX_BYTES: usize = 12;

/// Bytes of the header of a Send and of an RDMA Read Response.
const UNTAGGED_BYTES: usize = 24;

/// Bytes of the header of an RDMA Write and of an RDMA Read Request.
const TAGGED_BYTES: usize = 32;

/// Words of control data of an atomic request: the high half of the offset, the operation, four operands of 64 bits.
const ATOMIC_WORDS: usize = 10;

/// Bytes of the longest header with control data, which is that of an atomic request.
pub const HEADER_MAX_BYTES: usize = TAGGED_BYTES + 4 * ATOMIC_WORDS;

const FIRST: u8 = 1 << 3;
const LAST: u8 = 1 << 2;
/// One of the four bits that the format leaves to the upper layer (decision A9).
const SOLICITED: u8 = 1 << 4;
const RESERVED: u8 = 0xe0;

const SEND: u8 = 0;
const WRITE: u8 = 1;
const READ_REQUEST: u8 = 2;
const READ_RESPONSE: u8 = 3;

/// The Connection ID: 64 random bits, chosen by the client, in every segment of both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionId(pub u64);

/// The fields at the start of a segment that framing needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix {
    /// Segment Length: header, control data and payload, in bytes.
    pub len: usize,
    pub connection: ConnectionId,
}

impl Prefix {
    /// Parses the first bytes of a segment.
    pub fn parse(bytes: [u8; PREFIX_BYTES]) -> Result<Self, SegmentError> {
        let [version, flags, high, low, id @ ..] = bytes;
        if version != VERSION {
            return Err(SegmentError::Version(version));
        }
        let least = match flags & 3 {
            SEND | READ_RESPONSE => UNTAGGED_BYTES,
            _ => TAGGED_BYTES,
        };
        let len = usize::from(u16::from_be_bytes([high, low]));
        if len < least {
            return Err(SegmentError::Length);
        }
        Ok(Self { len, connection: ConnectionId(u64::from_be_bytes(id)) })
    }
}

/// The control data of a Send (decision A8): connection control, invalidation or Immediate Data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendControl {
    /// No control data.
    None,
    /// The client's first message, with its IRD and ORD. The payload is private data.
    Connect {
        /// RDMA Reads that the client serves concurrently.
        ird: u16,
        /// RDMA Reads that the client wants to have outstanding.
        ord: u16,
    },
    /// The server accepts; the fields and the payload are as in Connect.
    Accept {
        /// RDMA Reads that the server serves concurrently.
        ird: u16,
        /// RDMA Reads that the server wants to have outstanding.
        ord: u16,
    },
    /// The server rejects. The payload is private data.
    Reject,
    /// The sender ends the stream because of an error.
    Terminate {
        /// Layer, type and code: the first 16 bits of RFC 5040 figure 8.
        code: u16,
    },
    /// The receiver invalidates a Steering Tag when the message is delivered.
    Invalidate {
        /// The tag.
        stag: u32,
    },
    /// Immediate Data: eight bytes for the completion of the receive; there is no payload.
    Immediate {
        /// The bytes.
        data: [u8; 8],
    },
}

/// A place in the receiver's memory: RDMA Buffer ID and RDMA Buffer Offset. The high half of the offset is a control word
/// (decision A7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferPlace {
    /// RDMA Buffer ID: a Steering Tag.
    pub id: u32,
    /// Tagged offset.
    pub offset: u64,
}

/// An atomic operation in a Read Request (decision A8), with the numbers of RFC 7306 section 5.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicWords {
    /// The operation's code.
    pub code: u32,
    /// Data, mask, compare data, compare mask.
    pub operands: [u64; 4],
}

/// The fields that depend on the type of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// A segment of a Send.
    Send {
        /// Data Offset.
        offset: u32,
        /// Control data, only in the first segment.
        control: SendControl,
    },
    /// A segment of an RDMA Write.
    Write {
        /// The place of this segment's payload.
        to: BufferPlace,
        /// RDMA Length: bytes of the whole message.
        total: u32,
    },
    /// An RDMA Read Request or an atomic request.
    ReadRequest {
        /// The place of the source.
        from: BufferPlace,
        /// RDMA Length: bytes of the response.
        total: u32,
        /// The atomic operation, if the request is an atomic request.
        atomic: Option<AtomicWords>,
    },
    /// A segment of an RDMA Read Response; to an atomic request, the former value of the word.
    ReadResponse {
        /// Data Offset.
        offset: u32,
    },
}

/// A segment's header with its control data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// B: the first segment of its message.
    pub first: bool,
    /// E: the last segment of its message.
    pub last: bool,
    /// The message raises a solicited event (decision A9).
    pub solicited: bool,
    /// Message Number; of a response, that of its request.
    pub number: MessageNumber,
    /// The order field: how many messages this one may overtake.
    pub order: Order,
    /// The fields that depend on the type of the message.
    pub kind: SegmentKind,
}

impl SegmentHeader {
    /// Bytes of the header with control data.
    pub fn bytes(&self) -> usize {
        let (fixed, words) = match self.kind {
            SegmentKind::Send { control, .. } => (UNTAGGED_BYTES, control.words()),
            SegmentKind::ReadResponse { .. } => (UNTAGGED_BYTES, 0),
            SegmentKind::Write { to, .. } => (TAGGED_BYTES, usize::from(to.offset >> 32 != 0)),
            SegmentKind::ReadRequest { atomic: Some(_), .. } => (TAGGED_BYTES, ATOMIC_WORDS),
            SegmentKind::ReadRequest { from, atomic: None, .. } => {
                (TAGGED_BYTES, usize::from(from.offset >> 32 != 0))
            }
        };
        fixed + 4 * words
    }

    /// Parses the header of a segment of `len` bytes (without pad and CRC). `bytes` is the whole segment, or at least its first
    /// [`HEADER_MAX_BYTES`]. The framing has checked version, length and Connection ID.
    pub fn parse(bytes: &[u8], len: usize) -> Result<Self, SegmentError> {
        let mut fields = Fields(bytes);
        let [_, flags, _, _] = fields.word()?;
        fields.skip(PREFIX_BYTES - 4)?;
        let number = MessageNumber(fields.u32()?);
        let [order_high, order_low, reserved, words] = fields.word()?;
        if flags & RESERVED != 0 || reserved != 0 {
            return Err(SegmentError::Reserved);
        }
        let words = usize::from(words);
        let (first, last) = (flags & FIRST != 0, flags & LAST != 0);
        let kind = match flags & 3 {
            SEND => {
                let offset = fields.u32()?;
                SegmentKind::Send { offset, control: SendControl::parse(&mut fields, words, first)? }
            }
            WRITE => {
                let (to, total) = tagged(&mut fields, words)?;
                if words > 1 {
                    return Err(SegmentError::Control);
                }
                SegmentKind::Write { to, total }
            }
            READ_REQUEST => {
                let (from, total) = tagged(&mut fields, words)?;
                let atomic = match words {
                    0 | 1 => None,
                    ATOMIC_WORDS => Some(AtomicWords {
                        code: fields.u32()?,
                        operands: [fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?],
                    }),
                    _ => return Err(SegmentError::Control),
                };
                SegmentKind::ReadRequest { from, total, atomic }
            }
            _ if words > 0 => return Err(SegmentError::Control),
            _ => SegmentKind::ReadResponse { offset: fields.u32()? },
        };
        let order = Order(u16::from_be_bytes([order_high, order_low]));
        let header = Self { first, last, solicited: flags & SOLICITED != 0, number, order, kind };
        header.check(len)?;
        Ok(header)
    }

    /// Checks the rules that a segment of `len` bytes must satisfy whatever precedes it.
    fn check(&self, len: usize) -> Result<(), SegmentError> {
        let payload = len.checked_sub(self.bytes()).ok_or(SegmentError::Length)? as u64;
        let whole = self.first && self.last;
        match self.kind {
            SegmentKind::Send { offset, control } => {
                if self.first && offset != 0 || u64::from(offset) + payload > u64::from(u32::MAX) {
                    return Err(SegmentError::Offset);
                }
                match control {
                    SendControl::None | SendControl::Invalidate { .. } => Ok(()),
                    SendControl::Connect { .. } | SendControl::Accept { .. } | SendControl::Reject
                        if whole =>
                    {
                        Ok(())
                    }
                    SendControl::Terminate { .. } | SendControl::Immediate { .. }
                        if whole && payload == 0 =>
                    {
                        Ok(())
                    }
                    _ => Err(SegmentError::Control),
                }
            }
            SegmentKind::Write { to, total } => {
                let total = u64::from(total);
                if payload > total || self.first && self.last != (payload == total) {
                    return Err(SegmentError::Length);
                }
                to.offset.checked_add(payload).map(|_| ()).ok_or(SegmentError::Offset)
            }
            SegmentKind::ReadRequest { atomic, total, .. } => {
                if !whole || payload > 0 || atomic.is_some() && total != 8 {
                    return Err(SegmentError::Length);
                }
                Ok(())
            }
            SegmentKind::ReadResponse { offset } => {
                if self.first && offset != 0 || u64::from(offset) + payload > u64::from(u32::MAX) {
                    return Err(SegmentError::Offset);
                }
                Ok(())
            }
        }
    }

    /// Writes the header of a segment of `connection` with `payload` bytes of payload to `out`. Returns the length of the
    /// header, or 0 when the segment would be too long.
    pub fn emit(&self, connection: ConnectionId, payload: usize, out: &mut [u8; HEADER_MAX_BYTES]) -> usize {
        let bytes = self.bytes();
        let Ok(len) = u16::try_from(bytes + payload) else { return 0 };
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let kind = match self.kind {
            SegmentKind::Send { .. } => SEND,
            SegmentKind::Write { .. } => WRITE,
            SegmentKind::ReadRequest { .. } => READ_REQUEST,
            SegmentKind::ReadResponse { .. } => READ_RESPONSE,
        };
        let flags = kind | flag(self.first, FIRST) | flag(self.last, LAST) | flag(self.solicited, SOLICITED);
        let fixed = match self.kind {
            SegmentKind::Send { .. } | SegmentKind::ReadResponse { .. } => UNTAGGED_BYTES,
            SegmentKind::Write { .. } | SegmentKind::ReadRequest { .. } => TAGGED_BYTES,
        };
        let words = ((bytes - fixed) / 4) as u8;
        let [high, low] = len.to_be_bytes();
        let [order_high, order_low] = self.order.0.to_be_bytes();
        let mut to = Emitter { out, at: 0 };
        to.put(&[VERSION, flags, high, low]);
        to.put(&connection.0.to_be_bytes());
        to.put(&self.number.0.to_be_bytes());
        to.put(&[order_high, order_low, 0, words]);
        match self.kind {
            SegmentKind::Send { offset, control } => {
                to.put(&offset.to_be_bytes());
                control.emit(&mut to);
            }
            SegmentKind::ReadResponse { offset } => to.put(&offset.to_be_bytes()),
            SegmentKind::Write { to: place, total } => to.tagged(place, total, words > 0),
            SegmentKind::ReadRequest { from, total, atomic } => {
                to.tagged(from, total, words > 0);
                if let Some(AtomicWords { code, operands }) = atomic {
                    to.put(&code.to_be_bytes());
                    for operand in operands {
                        to.put(&operand.to_be_bytes());
                    }
                }
            }
        }
        to.at
    }
}

/// Parses the buffer fields and the first control word, which is the high half of the offset. As the only control word it
/// must not be zero, so that each header has one form.
fn tagged(fields: &mut Fields<'_>, words: usize) -> Result<(BufferPlace, u32), SegmentError> {
    let (id, low, total) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let high = if words > 0 { fields.u32()? } else { 0 };
    if words == 1 && high == 0 {
        return Err(SegmentError::Control);
    }
    Ok((BufferPlace { id, offset: u64::from(high) << 32 | u64::from(low) }, total))
}

const CONNECT: u8 = 1;
const ACCEPT: u8 = 2;
const REJECT: u8 = 3;
const TERMINATE: u8 = 4;
const INVALIDATE: u8 = 5;
const IMMEDIATE: u8 = 6;

impl SendControl {
    const fn words(self) -> usize {
        match self {
            Self::None => 0,
            Self::Reject => 1,
            Self::Connect { .. } | Self::Accept { .. } | Self::Terminate { .. } | Self::Invalidate { .. } => {
                2
            }
            Self::Immediate { .. } => 3,
        }
    }

    fn parse(fields: &mut Fields<'_>, words: usize, first: bool) -> Result<Self, SegmentError> {
        if words == 0 {
            return Ok(Self::None);
        }
        let [code, 0, 0, 0] = fields.word()? else { return Err(SegmentError::Control) };
        if !first {
            return Err(SegmentError::Control);
        }
        let control = match (code, words) {
            (REJECT, 1) => Self::Reject,
            (CONNECT | ACCEPT, 2) => {
                let [a, b, c, d] = fields.word()?;
                let (ird, ord) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
                if code == CONNECT { Self::Connect { ird, ord } } else { Self::Accept { ird, ord } }
            }
            (TERMINATE, 2) => match fields.word()? {
                [high, low, 0, 0] => Self::Terminate { code: u16::from_be_bytes([high, low]) },
                _ => return Err(SegmentError::Control),
            },
            (INVALIDATE, 2) => Self::Invalidate { stag: fields.u32()? },
            (IMMEDIATE, 3) => Self::Immediate { data: fields.u64()?.to_be_bytes() },
            _ => return Err(SegmentError::Control),
        };
        Ok(control)
    }

    fn emit(self, to: &mut Emitter<'_>) {
        let mut code = |code: u8| to.put(&[code, 0, 0, 0]);
        match self {
            Self::None => {}
            Self::Connect { ird, ord } => {
                code(CONNECT);
                to.put(&ird.to_be_bytes());
                to.put(&ord.to_be_bytes());
            }
            Self::Accept { ird, ord } => {
                code(ACCEPT);
                to.put(&ird.to_be_bytes());
                to.put(&ord.to_be_bytes());
            }
            Self::Reject => code(REJECT),
            Self::Terminate { code: terminate } => {
                code(TERMINATE);
                to.put(&terminate.to_be_bytes());
                to.put(&[0, 0]);
            }
            Self::Invalidate { stag } => {
                code(INVALIDATE);
                to.put(&stag.to_be_bytes());
            }
            Self::Immediate { data } => {
                code(IMMEDIATE);
                to.put(&data);
            }
        }
    }
}

/// The bytes that have not been parsed yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SegmentError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(SegmentError::Length)?;
        self.0 = rest;
        Ok(*head)
    }

    fn skip(&mut self, bytes: usize) -> Result<(), SegmentError> {
        self.0 = self.0.get(bytes..).ok_or(SegmentError::Length)?;
        Ok(())
    }

    fn word(&mut self) -> Result<[u8; 4], SegmentError> {
        self.take()
    }

    fn u32(&mut self) -> Result<u32, SegmentError> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, SegmentError> {
        self.take().map(u64::from_be_bytes)
    }
}

struct Emitter<'a> {
    out: &'a mut [u8; HEADER_MAX_BYTES],
    at: usize,
}

impl Emitter<'_> {
    fn put(&mut self, bytes: &[u8]) {
        if let Some(to) = self.out.get_mut(self.at..self.at + bytes.len()) {
            to.copy_from_slice(bytes);
            self.at += bytes.len();
        }
    }

    fn tagged(&mut self, place: BufferPlace, total: u32, with_high: bool) {
        self.put(&place.id.to_be_bytes());
        self.put(&(place.offset as u32).to_be_bytes());
        self.put(&total.to_be_bytes());
        if with_high {
            self.put(&((place.offset >> 32) as u32).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
