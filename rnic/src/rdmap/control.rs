//! The RDMAP Control Field (RFC 5040 section 4.1) and the message types of its opcodes (figure 4, and
//! figure 2 of RFC 7306).

use super::RdmapError;
use crate::ddp::{Queue, Versions};

/// Opcode of Terminate. The opcodes above it belong to RFC 7306, which extends version 1 only.
const LAST_OF_RFC_5040: u8 = 0x7;

/// Opcode of a Send with immediate data: the one that RFC 6580 section 3.4 reserves for experiments.
const EXPERIMENTAL: u8 = 0xf;

/// The bit of the control field that is reserved in other messages, and makes a Send with immediate data a solicited one.
const SEND_IMMEDIATE_SOLICITED: u8 = 0x10;

/// The type of an RDMAP message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageType {
    /// RDMA Write.
    Write,
    /// RDMA Read Request.
    ReadRequest,
    /// RDMA Read Response.
    ReadResponse,
    /// Send in its four forms.
    Send {
        /// With Invalidate.
        invalidate: bool,
        /// With Solicited Event.
        solicited: bool,
    },
    /// Terminate.
    Terminate,
    /// Immediate Data (RFC 7306).
    Immediate {
        /// With Solicited Event.
        solicited: bool,
    },
    /// Atomic Request (RFC 7306).
    AtomicRequest,
    /// Atomic Response (RFC 7306).
    AtomicResponse,
    /// Send with immediate data: an extension of this project, which the start-up negotiates. The header of each segment has the
    /// four octets in place of the Invalidate `STag`.
    SendImmediate {
        /// With Solicited Event.
        solicited: bool,
    },
}

/// The DDP buffer model of a message: the Tagged flag and the queue number of figure 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carriage {
    Tagged,
    Untagged(Queue),
}

impl MessageType {
    /// The control field without the version: the opcode, and the bits before it, which are zero in most messages.
    const fn bits(self) -> u8 {
        match self {
            Self::Write => 0x0,
            Self::ReadRequest => 0x1,
            Self::ReadResponse => 0x2,
            Self::Send { invalidate: false, solicited: false } => 0x3,
            Self::Send { invalidate: true, solicited: false } => 0x4,
            Self::Send { invalidate: false, solicited: true } => 0x5,
            Self::Send { invalidate: true, solicited: true } => 0x6,
            Self::Terminate => 0x7,
            Self::Immediate { solicited: false } => 0x8,
            Self::Immediate { solicited: true } => 0x9,
            Self::AtomicRequest => 0xa,
            Self::AtomicResponse => 0xb,
            Self::SendImmediate { solicited: false } => EXPERIMENTAL,
            Self::SendImmediate { solicited: true } => SEND_IMMEDIATE_SOLICITED | EXPERIMENTAL,
        }
    }

    /// The type with this opcode of the RFCs; `None` for the others.
    const fn from_opcode(opcode: u8) -> Option<Self> {
        Some(match opcode {
            0x0 => Self::Write,
            0x1 => Self::ReadRequest,
            0x2 => Self::ReadResponse,
            0x3 => Self::Send { invalidate: false, solicited: false },
            0x4 => Self::Send { invalidate: true, solicited: false },
            0x5 => Self::Send { invalidate: false, solicited: true },
            0x6 => Self::Send { invalidate: true, solicited: true },
            0x7 => Self::Terminate,
            0x8 => Self::Immediate { solicited: false },
            0x9 => Self::Immediate { solicited: true },
            0xa => Self::AtomicRequest,
            0xb => Self::AtomicResponse,
            _ => return None,
        })
    }

    /// The type of our extension that the control field `byte` names. Apart from the others, which are nearly all messages.
    #[cold]
    const fn of_extension(byte: u8) -> Option<Self> {
        match byte & 0x0f {
            EXPERIMENTAL => Some(Self::SendImmediate { solicited: byte & SEND_IMMEDIATE_SOLICITED != 0 }),
            _ => None,
        }
    }

    pub(crate) const fn carriage(self) -> Carriage {
        match self {
            Self::Write | Self::ReadResponse => Carriage::Tagged,
            Self::Send { .. } | Self::Immediate { .. } | Self::SendImmediate { .. } => {
                Carriage::Untagged(Queue::Send)
            }
            Self::ReadRequest | Self::AtomicRequest => Carriage::Untagged(Queue::Request),
            Self::Terminate => Carriage::Untagged(Queue::Terminate),
            Self::AtomicResponse => Carriage::Untagged(Queue::AtomicResponse),
        }
    }
}

/// The RDMAP Control Field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Control {
    /// Type of the message.
    pub message: MessageType,
}

/// An invalid control field, and the error to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidControl(pub RdmapError);

impl Control {
    /// Parses the field, on a connection with these versions. Reserved bits are ignored.
    #[expect(clippy::inline_always, reason = "each segment calls it once")]
    #[inline(always)]
    pub fn parse(byte: u8, versions: Versions) -> Result<Self, InvalidControl> {
        let (version, opcode) = (byte >> 6, byte & 0x0f);
        if version != versions.number() {
            return Err(InvalidControl(RdmapError::Version));
        }
        if versions != Versions::Ietf && opcode > LAST_OF_RFC_5040 {
            return Err(InvalidControl(RdmapError::UnexpectedOpcode));
        }
        match MessageType::from_opcode(opcode) {
            Some(message) => Ok(Self { message }),
            None => match MessageType::of_extension(byte) {
                Some(message) => Ok(Self { message }),
                None => Err(InvalidControl(RdmapError::UnexpectedOpcode)),
            },
        }
    }

    /// The field's byte.
    pub const fn byte(self, versions: Versions) -> u8 {
        versions.number() << 6 | self.message.bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc5040_s4_1_every_control_byte_is_a_message_or_the_right_error() {
        for (versions, valid, opcodes) in [(Versions::Ietf, 1, 12), (Versions::Rdmac, 0, 8)] {
            for byte in 0..=u8::MAX {
                let (version, opcode) = (byte >> 6, byte & 15);
                let is_extension = versions == Versions::Ietf && opcode == EXPERIMENTAL;
                match Control::parse(byte, versions) {
                    Ok(control) => {
                        assert!(version == valid && (opcode < opcodes || is_extension));
                        let reserved = if is_extension { byte & SEND_IMMEDIATE_SOLICITED } else { 0 };
                        assert_eq!(control.byte(versions), valid << 6 | reserved | opcode);
                    }
                    Err(InvalidControl(RdmapError::Version)) => assert_ne!(version, valid),
                    Err(InvalidControl(error)) => {
                        assert_eq!(error, RdmapError::UnexpectedOpcode);
                        assert!(version == valid && opcode >= opcodes && !is_extension);
                    }
                }
            }
        }
    }
}
