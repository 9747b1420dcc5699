//! The messages of SDP on the wire: one base header (BSDH), an extended header for some types, payload for three.
//!
//! The draft's figures number bit 0 as the least significant bit of a big-endian word, except for the port mapper's
//! (docs/decisions/0016). All fields are big-endian. Fields chosen by the peer are checked here as far as one message
//! suffices; [`machine`](crate::machine) checks what depends on the connection's state.

/// Bytes of the base header (draft section 6.1).
pub const BASE_BYTES: usize = 16;
/// Bytes of the largest header: base header and SinkAvail's (draft section 10, constraint 4).
pub const MAX_HEADER_BYTES: usize = BASE_BYTES + 20;
/// Bytes of a Hello, the private data of an MPA Request.
pub const HELLO_BYTES: usize = BASE_BYTES + 16;
/// Smallest receive buffer: the largest header and one byte (draft section 10, constraint 4).
pub const LEAST_BUFFER_BYTES: u32 = MAX_HEADER_BYTES as u32 + 1;
/// Largest receive buffer and advertised length, in bytes (draft sections 6.2.1 and 6.3.2).
pub const MAX_BYTES: u32 = 1 << 31;
/// The protocol version of this implementation, major and minor (draft section 6.2.1).
const VERSION: u8 = 0x11;

/// A message sequence number (MSeq), which wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Seq(pub u32);

impl Seq {
    /// The number that follows.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The number `n` after this one.
    #[must_use]
    pub fn plus(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }

    /// Distance from `other` to this number; negative if this number is earlier.
    pub fn since(self, other: Self) -> i32 {
        self.0.wrapping_sub(other.0) as i32
    }
}

bitflags::bitflags! {
    /// Flags of the base header (draft section 6.1.2).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Flags: u8 {
        /// The last byte of the payload is out-of-band data.
        const OOB_PRES = 1;
        /// Out-of-band data follows within 65535 bytes of the stream.
        const OOB_PEND = 2;
        /// The sender would prefer Pipelined mode.
        const REQ_PIPE = 4;
    }
}

/// The fields of the base header that every message has. Type and length are those of [`Message`] and payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Base {
    /// Flags; unknown bits of a received message are dropped.
    pub flags: Flags,
    /// Receives that the sender has posted.
    pub bufs: u16,
    /// Sequence number of this message.
    pub mseq: Seq,
    /// Sequence number of the last message that the sender has received.
    pub mseq_ack: Seq,
}

/// The flow control mode of one direction (draft section 11).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// Payload in messages only.
    Buffered,
    /// Messages, and one RDMA Read at a time: the mode after set-up.
    #[default]
    Combined,
    /// Messages, and several RDMA Reads and Writes.
    Pipelined,
}

/// The half of its connection whose mode the receiver of a ModeChange changes (draft section 6.3.8.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// The direction in which the receiver of the message sends: bit S is 1.
    Send,
    /// The direction in which it receives: bit S is 0.
    Receive,
}

/// A buffer that a peer advertises for RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Advert {
    /// Length in bytes, 1 to 2^31.
    pub len: u32,
    /// The steering tag.
    pub stag: u32,
    /// Tagged offset of the first byte.
    pub offset: u64,
}

/// The extended header of a Hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hello {
    /// Largest number of advertisements that the sender accepts at a time, at least 1.
    pub max_adverts: u16,
    /// Size that the sender would like the receiver's buffers to have, in bytes.
    pub desired_bytes: u32,
    /// Size of the sender's receive buffers, in bytes.
    pub buffer_bytes: u32,
    /// RDMA Reads that the sender serves at a time, at least 1.
    pub ird: u16,
    /// RDMA Reads that the sender wants to have outstanding, at least 1.
    pub ord: u16,
}

/// The extended header of a HelloAck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HelloAck {
    /// As in [`Hello`].
    pub max_adverts: u16,
    /// As in [`Hello`].
    pub buffer_bytes: u32,
    /// As in [`Hello`].
    pub ird: u16,
    /// As in [`Hello`].
    pub ord: u16,
}

/// The type of a message and its extended header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    /// The connecting peer's parameters.
    Hello(Hello),
    /// The accepting peer's parameters.
    HelloAck(HelloAck),
    /// The sender will send no more payload.
    DisConn,
    /// Ignore the DisConn: the connection is reset.
    AbortConn,
    /// Send the oldest advertised data in messages; also ends the cancellation of SrcAvails.
    SendSm,
    /// RDMA Writes of `len` bytes into the oldest SinkAvail are complete.
    RdmaWrCompl {
        /// Bytes written.
        len: u32,
    },
    /// RDMA Reads of `len` bytes of the oldest SrcAvail are complete.
    RdmaRdCompl {
        /// Bytes read since the last such message.
        len: u32,
    },
    /// A half of the connection has another mode from now on.
    ModeChange {
        /// The half, from the point of view of the message's receiver.
        half: Half,
        /// The new mode.
        mode: Mode,
    },
    /// The sender withdraws its SrcAvails.
    SrcAvailCancel,
    /// The sender withdraws its SinkAvails.
    SinkAvailCancel,
    /// SinkAvails were dropped as requested.
    SinkCancelAck,
    /// The sender would like the receiver's buffers to have another size.
    ChRcvBuf {
        /// The desired size in bytes.
        bytes: u32,
    },
    /// The answer: their new size.
    ChRcvBufAck {
        /// The size in bytes.
        bytes: u32,
    },
    /// Stop, then connect to the sender again at this port.
    SuspComm {
        /// The port.
        port: u16,
    },
    /// Communication has stopped.
    SuspCommAck,
    /// A buffer that the receiver may fill by RDMA Write.
    SinkAvail {
        /// The buffer.
        advert: Advert,
        /// Payload messages received so far that used no SinkAvail.
        non_discards: u32,
    },
    /// Data that the receiver may fetch by RDMA Read.
    SrcAvail(Advert),
    /// Payload, or none for a credit update.
    Data,
}

/// The reason why bytes are not a valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum WireError {
    /// Shorter than the header of its type.
    #[error("the message is shorter than its header")]
    Short,
    /// The Len field differs from the number of received bytes, or a type without payload has payload.
    #[error("the length does not fit the message")]
    Length,
    /// A reserved or experimental type.
    #[error("unknown message identifier")]
    Identifier,
    /// A field is outside of its range.
    #[error("a field is out of range")]
    Field,
    /// Another major version.
    #[error("another major version of the protocol")]
    Version,
    /// An OOB flag on a type that carries no payload of the stream.
    #[error("OOB_PRES without payload in a Data message")]
    OutOfBand,
}

impl WireError {
    /// The name of the counter of messages with this error.
    pub const fn counter(self) -> &'static str {
        match self {
            Self::Short => "sdp_short",
            Self::Length => "sdp_length",
            Self::Identifier => "sdp_identifier",
            Self::Field => "sdp_field",
            Self::Version => "sdp_version",
            Self::OutOfBand => "sdp_oob_flag",
        }
    }
}

/// Takes big-endian fields from the front of a message.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(WireError::Short)?;
        self.0 = rest;
        Ok(*field)
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        self.take().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.take().map(u64::from_be_bytes)
    }

    /// A field that must lie within a range.
    fn within<T: PartialOrd>(value: T, least: T, most: T) -> Result<T, WireError> {
        if value >= least && value <= most { Ok(value) } else { Err(WireError::Field) }
    }

    /// Version, reserved byte and MaxAdverts, with which Hello and HelloAck begin.
    fn greeting(&mut self) -> Result<u16, WireError> {
        let version = self.u8()?;
        let _reserved = self.u8()?;
        if version >> 4 != VERSION >> 4 {
            return Err(WireError::Version);
        }
        Self::within(self.u16()?, 1, u16::MAX)
    }

    fn buffer_bytes(&mut self) -> Result<u32, WireError> {
        Self::within(self.u32()?, LEAST_BUFFER_BYTES, MAX_BYTES)
    }

    fn depth(&mut self) -> Result<u16, WireError> {
        Self::within(self.u16()?, 1, u16::MAX)
    }

    fn advert(&mut self) -> Result<Advert, WireError> {
        let len = Self::within(self.u32()?, 1, MAX_BYTES)?;
        Ok(Advert { len, stag: self.u32()?, offset: self.u64()? })
    }

    fn mode_change(&mut self) -> Result<Message, WireError> {
        let [first, _, _, _] = self.take()?;
        let half = if first & 0x80 == 0 { Half::Receive } else { Half::Send };
        let mode = match first >> 4 & 7 {
            0 => Mode::Buffered,
            1 => Mode::Combined,
            2 => Mode::Pipelined,
            _ => return Err(WireError::Field),
        };
        Ok(Message::ModeChange { half, mode })
    }

    fn message(&mut self, mid: u8) -> Result<Message, WireError> {
        Ok(match mid {
            0x00 => {
                let max_adverts = self.greeting()?;
                let (desired_bytes, buffer_bytes) = (self.u32()?, self.buffer_bytes()?);
                let (ord, ird) = (self.depth()?, self.depth()?);
                Message::Hello(Hello { max_adverts, desired_bytes, buffer_bytes, ird, ord })
            }
            0x01 => {
                let (max_adverts, buffer_bytes) = (self.greeting()?, self.buffer_bytes()?);
                let (ord, ird) = (self.depth()?, self.depth()?);
                Message::HelloAck(HelloAck { max_adverts, buffer_bytes, ird, ord })
            }
            0x02 => Message::DisConn,
            0x03 => Message::AbortConn,
            0x04 => Message::SendSm,
            0x05 => Message::RdmaWrCompl { len: self.u32()? },
            0x06 => Message::RdmaRdCompl { len: self.u32()? },
            0x07 => self.mode_change()?,
            0x08 => Message::SrcAvailCancel,
            0x09 => Message::SinkAvailCancel,
            0x0a => Message::SinkCancelAck,
            0x0b => Message::ChRcvBuf { bytes: self.buffer_bytes()? },
            0x0c => Message::ChRcvBufAck { bytes: self.buffer_bytes()? },
            0x0d => {
                Self::within((self.u32()?, self.u16()?), (0, 1), (0, 1))?;
                Message::SuspComm { port: self.u16()? }
            }
            0x0e => Message::SuspCommAck,
            0xfd => Message::SinkAvail { advert: self.advert()?, non_discards: self.u32()? },
            0xfe => Message::SrcAvail(self.advert()?),
            0xff => Message::Data,
            _ => return Err(WireError::Identifier),
        })
    }
}

/// The rest of a header under construction.
struct Header<'a>(&'a mut [u8]);

impl Header<'_> {
    fn put(&mut self, field: &[u8]) {
        if let Some((place, rest)) = std::mem::take(&mut self.0).split_at_mut_checked(field.len()) {
            place.copy_from_slice(field);
            self.0 = rest;
        }
    }

    fn advert(&mut self, advert: &Advert) {
        self.put(&advert.len.to_be_bytes());
        self.put(&advert.stag.to_be_bytes());
        self.put(&advert.offset.to_be_bytes());
    }
}

/// Whether a message that was parsed or emitted has payload.
pub(crate) fn has_payload(bytes: &[u8]) -> bool {
    let header = match bytes.first() {
        Some(0xff) => BASE_BYTES,
        Some(0xfe) => BASE_BYTES + 16,
        Some(0xfd) => BASE_BYTES + 20,
        _ => return false,
    };
    bytes.len() > header
}

/// Whether a message with payload that was parsed or emitted is a SinkAvail.
pub(crate) fn is_transaction(bytes: &[u8]) -> bool {
    bytes.first() == Some(&0xfd)
}

impl Message {
    /// Decodes a message that fills `bytes`; returns base header, message and payload.
    pub fn parse(bytes: &[u8]) -> Result<(Base, Self, &[u8]), WireError> {
        let mut fields = Fields(bytes);
        let (mid, flags, bufs) = (fields.u8()?, fields.u8()?, fields.u16()?);
        let (len, mseq, mseq_ack) = (fields.u32()?, Seq(fields.u32()?), Seq(fields.u32()?));
        if usize::try_from(len) != Ok(bytes.len()) {
            return Err(WireError::Length);
        }
        let base = Base { flags: Flags::from_bits_truncate(flags), bufs, mseq, mseq_ack };
        let message = fields.message(mid)?;
        let payload = fields.0;
        match &message {
            Self::Data | Self::SinkAvail { .. } => {}
            // Payload is the first part of the advertised data, and at least one byte must be left to read (decision 28
            // of docs/decisions/0016).
            Self::SrcAvail(advert) if payload.len() < advert.len as usize => {}
            _ if payload.is_empty() => {}
            _ => return Err(WireError::Length),
        }
        let in_data = message == Self::Data && !payload.is_empty();
        if base.flags.contains(Flags::OOB_PRES) && !in_data {
            return Err(WireError::OutOfBand);
        }
        Ok((base, message, payload))
    }

    /// Appends the header of this message, for `payload` bytes that follow it, to `out`; returns its length.
    pub fn emit(&self, base: Base, payload: u32, out: &mut Vec<u8>) -> usize {
        let at = out.len();
        out.resize(at + MAX_HEADER_BYTES, 0);
        let len = self.emit_before(base, payload, out.get_mut(at..).unwrap_or_default());
        out.truncate(at + len);
        len
    }

    /// Writes the header of this message, for `payload` bytes that follow it, to the beginning of `out`, which has room for it;
    /// returns its length.
    pub(crate) fn emit_before(&self, base: Base, payload: u32, out: &mut [u8]) -> usize {
        let room = out.len();
        let Some((fields, extended)) = out.split_first_chunk_mut::<BASE_BYTES>() else { return 0 };
        let mut extended = Header(extended);
        self.put_extended(&mut extended);
        let len = room - extended.0.len();
        let mut header = Header(fields);
        header.put(&[self.mid(), base.flags.bits()]);
        header.put(&base.bufs.to_be_bytes());
        for field in [len as u32 + payload, base.mseq.0, base.mseq_ack.0] {
            header.put(&field.to_be_bytes());
        }
        len
    }

    fn put_extended(&self, header: &mut Header<'_>) {
        match self {
            Self::Hello(hello) => {
                header.put(&[VERSION, 0]);
                header.put(&hello.max_adverts.to_be_bytes());
                header.put(&hello.desired_bytes.to_be_bytes());
                header.put(&hello.buffer_bytes.to_be_bytes());
                header.put(&hello.ord.to_be_bytes());
                header.put(&hello.ird.to_be_bytes());
            }
            Self::HelloAck(ack) => {
                header.put(&[VERSION, 0]);
                header.put(&ack.max_adverts.to_be_bytes());
                header.put(&ack.buffer_bytes.to_be_bytes());
                header.put(&ack.ord.to_be_bytes());
                header.put(&ack.ird.to_be_bytes());
            }
            Self::RdmaWrCompl { len: word }
            | Self::RdmaRdCompl { len: word }
            | Self::ChRcvBuf { bytes: word }
            | Self::ChRcvBufAck { bytes: word } => header.put(&word.to_be_bytes()),
            Self::ModeChange { half, mode } => {
                let half = if *half == Half::Send { 0x80 } else { 0 };
                let mode = match mode {
                    Mode::Buffered => 0,
                    Mode::Combined => 0x10,
                    Mode::Pipelined => 0x20,
                };
                header.put(&[half | mode, 0, 0, 0]);
            }
            Self::SuspComm { port } => {
                header.put(&[0, 0, 0, 0, 0, 1]);
                header.put(&port.to_be_bytes());
            }
            Self::SinkAvail { advert, non_discards } => {
                header.advert(advert);
                header.put(&non_discards.to_be_bytes());
            }
            Self::SrcAvail(advert) => header.advert(advert),
            Self::DisConn
            | Self::AbortConn
            | Self::SendSm
            | Self::SrcAvailCancel
            | Self::SinkAvailCancel
            | Self::SinkCancelAck
            | Self::SuspCommAck
            | Self::Data => {}
        }
    }

    /// The message identifier (draft section 6.1.1).
    pub const fn mid(&self) -> u8 {
        match self {
            Self::Hello(_) => 0x00,
            Self::HelloAck(_) => 0x01,
            Self::DisConn => 0x02,
            Self::AbortConn => 0x03,
            Self::SendSm => 0x04,
            Self::RdmaWrCompl { .. } => 0x05,
            Self::RdmaRdCompl { .. } => 0x06,
            Self::ModeChange { .. } => 0x07,
            Self::SrcAvailCancel => 0x08,
            Self::SinkAvailCancel => 0x09,
            Self::SinkCancelAck => 0x0a,
            Self::ChRcvBuf { .. } => 0x0b,
            Self::ChRcvBufAck { .. } => 0x0c,
            Self::SuspComm { .. } => 0x0d,
            Self::SuspCommAck => 0x0e,
            Self::SinkAvail { .. } => 0xfd,
            Self::SrcAvail(_) => 0xfe,
            Self::Data => 0xff,
        }
    }

    /// Whether the message is sent with a solicited event (draft section 14.2).
    pub const fn is_solicited(&self, flags: Flags) -> bool {
        match self {
            Self::HelloAck(_)
            | Self::AbortConn
            | Self::SendSm
            | Self::RdmaWrCompl { .. }
            | Self::RdmaRdCompl { .. }
            | Self::SrcAvailCancel
            | Self::SinkAvailCancel
            | Self::SinkCancelAck
            | Self::SuspComm { .. }
            | Self::SuspCommAck => true,
            Self::Data => flags.intersects(Flags::OOB_PRES.union(Flags::OOB_PEND)),
            Self::Hello(_)
            | Self::DisConn
            | Self::ModeChange { .. }
            | Self::ChRcvBuf { .. }
            | Self::ChRcvBufAck { .. }
            | Self::SinkAvail { .. }
            | Self::SrcAvail(_) => false,
        }
    }
}

#[cfg(test)]
mod tests;
