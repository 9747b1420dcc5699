//! Set-up of a connection by Sends of control data (decisions A5, A8 and A12): the client's first message is Connect, the
//! server's is Accept or Reject.

use std::time::Duration;

use super::{
    ConnectionId, HEADER_MAX_BYTES, MessageNumber, Order, SegmentError, SegmentHeader, SegmentKind,
    SendControl,
    crc::crc32,
    header::{PREFIX_BYTES, Prefix, VERSION},
    segments::{SegmentTransmitter, Segments, padded, verify},
};
use crate::{
    framing::{
        self, AcceptParams, Answer, FramingError, Full, Limits, MAX_FIRST_BYTES, MAX_READ_DEPTH, SetupError,
        StartUp, UNNEGOTIATED,
    },
    seq::StreamOffset,
};

/// Largest length of private data in Connect, Accept or Reject, in bytes: as in MPA.
pub const MAX_PRIVATE_DATA: usize = 512;

/// This end's settings for the set-up of one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaTcpConfig {
    /// Time limit for the arrival of the peer's first message.
    pub startup_timeout: Duration,
    /// Longest time that a segment waits for a receive before the stream is terminated; zero terminates it at once.
    pub withhold_timeout: Duration,
    /// Largest number of bytes held for segments that cannot be placed or delivered yet.
    pub hold_bytes: usize,
    /// Client: the limit to which the server's ORD may raise our IRD.
    pub max_ird: u16,
}

impl Default for RdmaTcpConfig {
    fn default() -> Self {
        Self {
            startup_timeout: Duration::from_secs(10),
            withhold_timeout: Duration::from_secs(5),
            hold_bytes: 8 << 20,
            max_ird: 128,
        }
    }
}

/// The client's Connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connect {
    /// The connection's ID, chosen by the client.
    pub connection: ConnectionId,
    /// The number of the message.
    pub number: MessageNumber,
    /// The client's IRD.
    pub ird: u16,
    /// The client's ORD, which asks for an IRD of at least this.
    pub ord: u16,
    /// The client's private data.
    pub private_data: Vec<u8>,
}

impl From<Connect> for framing::Offer {
    fn from(connect: Connect) -> Self {
        Self::RdmaTcp(connect)
    }
}

/// The result of the set-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Our IRD: Read Requests that the peer may have outstanding.
    pub ird: u16,
    /// Our ORD: Read Requests that this end may have outstanding.
    pub ord: u16,
    /// The IRD that the peer declared.
    pub peer_ird: u16,
    /// The ORD that the peer declared.
    pub peer_ord: u16,
    /// The ID of every segment.
    pub connection: ConnectionId,
    /// Number of the first message that this end sends after the set-up.
    pub next_sent: MessageNumber,
    /// Number of the first message that the peer sends after the set-up.
    pub next_received: MessageNumber,
}

/// The settings of one connection, with the random numbers that it needs.
#[derive(Debug)]
pub(crate) struct Setup {
    pub config: RdmaTcpConfig,
    /// 128 unpredictable bits, from which the client's Connection ID and this end's first message number are taken.
    pub random: u128,
}

impl Setup {
    fn first_number(&self) -> MessageNumber {
        MessageNumber(self.random as u32)
    }

    fn connection_id(&self) -> ConnectionId {
        ConnectionId((self.random >> 64) as u64)
    }

    fn full(&self, connection: ConnectionId, received: MessageNumber, depths: Depths) -> Full<Self> {
        let Depths { ird, ord, peer_ird, peer_ord } = depths;
        let (next_sent, next_received) = (self.first_number().next(), received.next());
        let agreed = Agreed { ird, ord, peer_ird, peer_ord, connection, next_sent, next_received };
        Full {
            agreed: framing::Agreed::RdmaTcp(agreed),
            transmitter: SegmentTransmitter,
            frames: Segments::of(connection),
        }
    }

    /// The bytes of our first message.
    fn message(&self, connection: ConnectionId, control: SendControl, private_data: &[u8]) -> Vec<u8> {
        let header = SegmentHeader {
            first: true,
            last: true,
            solicited: false,
            number: self.first_number(),
            order: Order::STRICT,
            kind: SegmentKind::Send { offset: 0, control },
        };
        let mut head = [0; HEADER_MAX_BYTES];
        let len = header.emit(connection, private_data.len(), &mut head);
        let mut bytes = head.get(..len).unwrap_or_default().to_vec();
        bytes.extend_from_slice(private_data);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let crc = crc32([&bytes[..]]);
        bytes.extend(crc.to_le_bytes());
        bytes
    }
}

struct Depths {
    ird: u16,
    ord: u16,
    peer_ird: u16,
    peer_ord: u16,
}

/// The client's Connect, until it is answered: IRD, ORD and Connection ID.
#[derive(Debug)]
pub(crate) struct Asked {
    connection: ConnectionId,
    ird: u16,
    ord: u16,
}

/// The peer's first message.
struct First {
    connection: ConnectionId,
    number: MessageNumber,
    control: SendControl,
    private_data: Vec<u8>,
    /// Bytes of the message in the stream, with pad and CRC.
    bytes: usize,
}

impl First {
    /// Parses the peer's first message; `None` while it is incomplete.
    fn parse(bytes: &[u8]) -> Result<Option<Self>, SegmentError> {
        if let Some(version) = bytes.first().filter(|version| **version != VERSION) {
            return Err(SegmentError::Version(*version));
        }
        let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let Prefix { len, connection } = Prefix::parse(*prefix)?;
        if padded(len) > MAX_FIRST_BYTES {
            return Err(SegmentError::Setup);
        }
        let Some(segment) = bytes.get(..padded(len)) else { return Ok(None) };
        verify(&[segment])?;
        let header = SegmentHeader::parse(segment, len)?;
        let SegmentKind::Send { control, .. } = header.kind else { return Err(SegmentError::Setup) };
        let private_data = segment.get(header.bytes()..len).unwrap_or_default();
        if !header.first || !header.last || private_data.len() > MAX_PRIVATE_DATA {
            return Err(SegmentError::Setup);
        }
        Ok(Some(Self {
            connection,
            number: header.number,
            control,
            private_data: private_data.to_vec(),
            bytes: padded(len),
        }))
    }
}

fn check(private_data: &[u8], depths: [u16; 2]) -> Result<(), SetupError> {
    if let Some(depth) = depths.into_iter().find(|depth| *depth > MAX_READ_DEPTH) {
        return Err(SetupError::ReadDepth(depth));
    }
    let (len, limit) = (private_data.len(), MAX_PRIVATE_DATA);
    if len <= limit { Ok(()) } else { Err(SetupError::PrivateDataTooLong { len, limit }) }
}

impl StartUp for Setup {
    type Framing = Segments;
    type Transmitter = SegmentTransmitter;
    type Asked = Asked;
    type Offered = Connect;

    const TRUNCATED: FramingError = FramingError::RdmaTcp(SegmentError::Truncated);
    const WITHHELD: FramingError = FramingError::RdmaTcp(SegmentError::Withheld);
    const STALLED: FramingError = FramingError::RdmaTcp(SegmentError::Stalled);
    const TIMED_OUT: FramingError = FramingError::RdmaTcp(SegmentError::SetupTimeout);
    const DATA_BEFORE_ANSWER: FramingError = FramingError::RdmaTcp(SegmentError::DataBeforeAnswer);

    fn limits(&self) -> Limits {
        let RdmaTcpConfig { startup_timeout, withhold_timeout, hold_bytes, .. } = self.config;
        Limits { startup_timeout, streaming: None, withhold_timeout, hold_bytes }
    }

    fn request(&self, private_data: Vec<u8>, ird: u16, ord: u16) -> Result<(Asked, Vec<u8>), SetupError> {
        check(&private_data, [ird, ord])?;
        let connection = self.connection_id();
        let bytes = self.message(connection, SendControl::Connect { ird, ord }, &private_data);
        Ok((Asked { connection, ird, ord }, bytes))
    }

    fn parse_request(&self, bytes: &[u8]) -> Result<Option<(Connect, usize)>, FramingError> {
        let Some(First { connection, number, control, private_data, bytes }) = First::parse(bytes)? else {
            return Ok(None);
        };
        let SendControl::Connect { ird, ord } = control else { return Err(SegmentError::Setup.into()) };
        let (ird, ord) = (ird.min(MAX_READ_DEPTH), ord.min(MAX_READ_DEPTH));
        Ok(Some((Connect { connection, number, ird, ord, private_data }, bytes)))
    }

    fn accept(
        &self,
        offer: &Connect,
        params: AcceptParams,
        _start: StreamOffset,
    ) -> Result<(Vec<u8>, Full<Self>), SetupError> {
        let AcceptParams { ird, ord, private_data } = params;
        check(&private_data, [ird, ord])?;
        let ord = ord.min(offer.ird);
        let bytes = self.message(offer.connection, SendControl::Accept { ird, ord }, &private_data);
        let depths = Depths { ird, ord, peer_ird: offer.ird, peer_ord: offer.ord };
        Ok((bytes, self.full(offer.connection, offer.number, depths)))
    }

    fn reject(&self, offer: &Connect, private_data: Vec<u8>) -> Result<Vec<u8>, SetupError> {
        check(&private_data, [0, 0])?;
        Ok(self.message(offer.connection, SendControl::Reject, &private_data))
    }

    fn parse_answer(
        &self,
        asked: &Asked,
        bytes: &[u8],
        _start: StreamOffset,
    ) -> Result<Option<(Answer<Self>, usize)>, FramingError> {
        let Some(First { connection, number, control, private_data, bytes }) = First::parse(bytes)? else {
            return Ok(None);
        };
        if connection != asked.connection {
            return Err(SegmentError::ConnectionId.into());
        }
        let answer = match control {
            SendControl::Reject => Answer::Rejected { private_data, ird: UNNEGOTIATED, ord: UNNEGOTIATED },
            SendControl::Accept { ird, ord } => {
                let (peer_ird, peer_ord) = (ird.min(MAX_READ_DEPTH), ord.min(MAX_READ_DEPTH));
                let (ird, ord) = (asked.ird.max(peer_ord), asked.ord.min(peer_ird));
                let depths = Depths { ird, ord, peer_ird, peer_ord };
                let full = self.full(connection, number, depths);
                if peer_ord > asked.ird && peer_ord > self.config.max_ird {
                    Answer::Terminate(full, SegmentError::InsufficientIrd.into())
                } else {
                    Answer::Accepted { full, private_data }
                }
            }
            _ => return Err(SegmentError::Setup.into()),
        };
        Ok(Some((answer, bytes)))
    }
}

#[cfg(test)]
mod tests;
