//! The interface of the upper layer to the framing of a connection. The stack calls the upper layer only through the
//! trait [`Ulp`].
//!
//! *Place* and *deliver* are different things in the RFCs (RFC 5041 section 2): a ULPDU is placed as soon as it is
//! complete and its CRC is right, even beyond a gap; it is delivered once, in order.

use crate::{
    framing::{Agreed, FramingError, Offer},
    seq::StreamOffset,
    tcp::SoftError,
    wire::Path,
};

pub use crate::framing::ulpdu::{Ulpdu, UlpduWriter};

/// The id of a connection of one [`crate::stack::Stack`], unique in the life of the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnId {
    /// Index in the connection table.
    pub index: u32,
    /// Number of the connection in the life of the stack. 64 bits do not wrap: at 10^9 connections a second they
    /// last for 500 years.
    pub generation: u64,
}

/// The id of a listener of one [`crate::stack::Stack`], unique in the life of the stack, so that a late request never
/// reaches another listener of the same port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(pub u64);

/// When a ULPDU is offered for placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Everything before the ULPDU has been delivered; errors are final.
    InOrder,
    /// Bytes before the ULPDU are missing. After an error the ULPDU waits and is offered again in order.
    Early,
}

/// Why a ULPDU was not placed or not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// There is no buffer for the ULPDU yet (no receive is posted). The framing holds it and reduces the window by its
    /// size until [`crate::stack::Stack::resume`].
    Withhold,
    /// The peer violated the protocol. Nothing more of this stream is read. For [`Arrival::InOrder`] the upper layer
    /// has recorded the error and will send its Terminate through [`Ulp::pull`].
    Stop,
}

/// The result of [`Ulp::pull`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pulled {
    /// One ULPDU was written, and [`Ulp::has_data`] is still true.
    Ulpdu,
    /// One ULPDU was written, and [`Ulp::has_data`] is false now.
    LastUlpdu,
    /// There is nothing to send now, or the next ULPDU does not fit into the rest of this segment.
    Nothing,
    /// There is nothing more to send: a FIN closes this direction after the ULPDUs already pulled. Later calls return the same.
    Finish,
}

/// An event of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The connection is established and carries streaming data until [`crate::stack::Stack::begin_mpa`], because
    /// [`crate::mpa::MpaConfig::streaming`] says so. The connection's first event.
    Streaming {
        /// Responder: the listener that accepted the connection.
        listener: Option<ListenerId>,
        /// Addresses of the connection.
        path: Path,
    },
    /// Streaming bytes of the peer can be taken with [`crate::stack::Stack::stream_recv`]. Reported again only after all
    /// were taken.
    StreamReadable,
    /// Responder: a valid request (of MPA: an MPA Request) has arrived; answer with [`crate::stack::Stack::accept`] or
    /// [`crate::stack::Stack::reject`].
    Requested {
        /// The listener that accepted the connection.
        listener: ListenerId,
        /// Addresses of the connection.
        path: Path,
        /// The initiator's parameters and private data.
        offer: Offer,
    },
    /// Full operation has begun: FPDUs may be sent, by the responder only after the initiator's first FPDU.
    Established {
        /// Addresses of the connection (an initiator learns its local port here).
        path: Path,
        /// The result of the negotiation.
        agreed: Agreed,
        /// The responder's private data; empty at the responder.
        private_data: Vec<u8>,
    },
    /// Initiator: full operation begins with the Terminate for the stream error that follows. The result of the
    /// negotiation decides the Terminate's form.
    Disagreed(Agreed),
    /// Initiator: the responder rejected the connection (R set in its reply).
    Rejected {
        /// The responder's private data.
        private_data: Vec<u8>,
        /// The responder's IRD; [`crate::framing::UNNEGOTIATED`] without enhanced set-up.
        ird: u16,
        /// The responder's ORD, perhaps the one that it would need (RFC 6581 section 9.1).
        ord: u16,
    },
    /// The framing found an error in the stream. The upper layer sends its Terminate and finishes.
    StreamError(FramingError),
    /// The peer closed its direction, and everything it sent was delivered.
    PeerClosed,
    /// A soft error, which the connection may survive (RFC 9293 section 3.9.1.8).
    SoftError(SoftError),
    /// The connection has ended and its id is no longer valid. This is the last event of every connection.
    Closed(CloseReason),
}

/// Why a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// Both directions were closed in order.
    #[error("closed by both ends")]
    Graceful,
    /// This end aborted the connection.
    #[error("aborted by this end")]
    Aborted,
    /// The peer reset the connection.
    #[error("reset by the peer")]
    Reset,
    /// The peer refused the connection: no listener has this address and port.
    #[error("refused by the peer")]
    Refused,
    /// The peer did not answer for too long.
    #[error("timed out")]
    TimedOut,
    /// The network reported that the peer cannot be reached (ICMP).
    #[error("unreachable")]
    Unreachable,
    /// The peer accepts only segments too short for an FPDU: its MSS is below 256 bytes and the options.
    #[error("the peer accepts only segments of less than 256 bytes")]
    SegmentsTooSmall,
    /// The interface lost our address.
    #[error("our address was removed from the interface")]
    AddressRemoved,
    /// The interface was removed, or cannot carry frames any more.
    #[error("the interface was removed")]
    InterfaceRemoved,
    /// The start-up of the framing failed.
    #[error("the start-up failed: {0}")]
    Startup(FramingError),
}

/// The layer above the framing.
pub trait Ulp {
    /// The part of a placed ULPDU that is kept until it is delivered: its header.
    type Placed: Copy + std::fmt::Debug;

    /// Places a complete ULPDU whose CRC is right. It may be empty: a bare FPDU can be a ready-to-receive
    /// message (RFC 6581 section 9.2).
    fn place(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: Arrival) -> Result<Self::Placed, Refusal>;

    /// Places the next ULPDU in order and delivers it, in one step. After an error neither has happened, so
    /// [`Refusal::Withhold`] must not come from the delivery.
    fn take(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>) -> Result<(), Refusal> {
        let placed = self.place(conn, ulpdu, Arrival::InOrder)?;
        self.deliver(conn, placed)
    }

    /// Delivers the next ULPDU in order; it was placed before.
    fn deliver(&mut self, conn: ConnId, placed: Self::Placed) -> Result<(), Refusal>;

    /// Whether [`Ulp::pull`] may return anything but [`Pulled::Nothing`]. After `false`, the upper layer calls
    /// [`crate::stack::Stack::wake`] once it has something to send.
    fn has_data(&self, conn: ConnId) -> bool;

    /// Writes the next ULPDU to send. Called only when window, frames and ring have room for it.
    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled;

    /// Reports that the peer has acknowledged the stream up to `offset` (compare [`UlpduWriter::end`]).
    fn acked(&mut self, conn: ConnId, offset: StreamOffset);

    /// Reports an event of the connection.
    fn event(&mut self, conn: ConnId, event: Event);
}
