//! What rides on MPA, as MPA sees it: DDP. The stack calls down nothing and up only this trait.
//!
//! *Place* and *deliver* are the RFCs' words and different things (RFC 5041 section 2): a ULPDU is placed
//! as soon as it is complete and its CRC is right, also beyond a gap; it is delivered once, in order.

use crate::{
    link::{FrameWriter, Pieces},
    mpa::{MpaError, Rtr, layout::Layout},
    seq::StreamOffset,
    tcp::SoftError,
    wire::Path,
};

/// Names one connection of one [`crate::stack::Stack`]; never reused while anybody can hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnId {
    /// Place in the connection table.
    pub index: u32,
    /// Steps each time the place is reused.
    pub generation: u32,
}

/// Names one listener of one [`crate::stack::Stack`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ListenerId(pub u32);

/// A received ULPDU: the bytes between an FPDU's length field and its pad, markers already cut out.
#[derive(Debug)]
pub struct Ulpdu<'a> {
    pieces: Pieces<'a>,
    len: usize,
}

impl<'a> Ulpdu<'a> {
    /// The ULPDU whose bytes are `pieces`, in order.
    pub fn new(pieces: Pieces<'a>) -> Self {
        let len = pieces.iter().map(|p| p.len()).sum();
        Self { pieces, len }
    }

    /// Bytes of the whole ULPDU.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first bytes into `out`; returns how many there were.
    pub fn peek(&self, out: &mut [u8]) -> usize {
        let mut done = 0;
        for piece in &self.pieces {
            let Some(to) = out.get_mut(done..) else { break };
            let n = to.len().min(piece.len());
            if let (Some(to), Some(from)) = (to.get_mut(..n), piece.get(..n)) {
                to.copy_from_slice(from);
            }
            done += n;
        }
        done
    }

    /// Calls `f(offset, bytes)` for the bytes from `start` on, where `offset` counts from `start`.
    pub fn for_each(&self, start: usize, mut f: impl FnMut(usize, &[u8])) {
        let mut skip = start;
        let mut offset = 0;
        for piece in &self.pieces {
            let Some(rest) = piece.get(skip..) else {
                skip -= piece.len();
                continue;
            };
            skip = 0;
            if !rest.is_empty() {
                f(offset, rest);
                offset += rest.len();
            }
        }
    }
}

/// When a ULPDU is offered for placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Everything before it has been delivered; errors are final.
    InOrder,
    /// Bytes before it are missing. An error only means that it waits and is offered again in order.
    Early,
}

/// Why a ULPDU was not placed or not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No buffer for it yet (no receive posted). MPA keeps it, and the window shrinks by it, until
    /// [`crate::stack::Stack::resume`].
    Withhold,
    /// The peer broke the protocol. Nothing more of this stream is read. For [`Arrival::InOrder`] the
    /// upper layer has noted the error and will send its Terminate through [`Ulp::pull`].
    Stop,
}

/// What [`Ulp::pull`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pulled {
    /// One ULPDU was written.
    Ulpdu,
    /// Nothing to send now, or nothing that fits into what is left of this segment.
    Nothing,
    /// Nothing to send any more: close this direction after what was pulled (FIN).
    Finish,
}

/// Writes one ULPDU into a segment that is being built, leaving out the markers' places.
///
/// Its methods stand in [`crate::mpa`], which frames what is written.
#[derive(Debug)]
pub struct UlpduWriter<'w, 'f> {
    pub(crate) frame: &'w mut FrameWriter<'f>,
    pub(crate) layout: Layout,
    /// Where the FPDU's range begins in the stream, and where its next byte will lie.
    pub(crate) start: StreamOffset,
    pub(crate) offset: StreamOffset,
    /// Where the FPDU's range begins in the frame.
    pub(crate) position: usize,
    /// Bytes of ULPDU still allowed, and written so far.
    pub(crate) room: usize,
    pub(crate) written: usize,
    /// Most bytes a ULPDU may have in a segment of its own.
    pub(crate) mulpdu: usize,
}

/// What happened to a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Responder: a valid MPA Request came in; answer with [`crate::stack::Stack::accept`] or
    /// [`crate::stack::Stack::reject`].
    Requested {
        /// The listener that it came to.
        listener: ListenerId,
        /// Addresses of the connection.
        path: Path,
        /// What the initiator asks for and says.
        offer: crate::mpa::Offer,
    },
    /// Full operation: FPDUs may flow (for the responder: after the initiator's first).
    Established {
        /// Addresses of the connection (an initiator learns its local port here).
        path: Path,
        /// What was agreed on.
        agreed: crate::mpa::Agreed,
        /// The responder's private data; empty at the responder.
        private_data: Vec<u8>,
        /// Initiator in peer-to-peer mode: the ready-to-receive message to send first (RFC 6581 section 9).
        rtr: Option<Rtr>,
    },
    /// Initiator: the responder answered with R set.
    Rejected {
        /// Its private data.
        private_data: Vec<u8>,
        /// Its IRD; [`crate::mpa::UNNEGOTIATED`] without enhanced set-up.
        ird: u16,
        /// Its ORD, perhaps the one that it would need (RFC 6581 section 9.1).
        ord: u16,
    },
    /// MPA found the stream broken. The upper layer sends its Terminate and finishes.
    StreamError(MpaError),
    /// The peer closed its direction, and all it sent was delivered.
    PeerClosed,
    /// Trouble that the connection may survive (RFC 9293 section 3.9.1.8).
    SoftError(SoftError),
    /// The connection is gone and its id no longer valid. The last event of every connection.
    Closed(CloseReason),
}

/// Why a connection is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// Both directions were closed in order.
    #[error("closed by both ends")]
    Graceful,
    /// We aborted it.
    #[error("aborted by this end")]
    Aborted,
    /// The peer reset it.
    #[error("reset by the peer")]
    Reset,
    /// The peer refused the connection: nobody listens there.
    #[error("refused by the peer")]
    Refused,
    /// The peer did not answer for too long.
    #[error("timed out")]
    TimedOut,
    /// The network says that the peer cannot be reached (ICMP).
    #[error("unreachable")]
    Unreachable,
    /// The MPA start-up failed.
    #[error("MPA start-up failed: {0}")]
    Startup(MpaError),
}

/// The layer above MPA.
pub trait Ulp {
    /// What has to be remembered of a placed ULPDU until it is delivered: its header.
    type Placed: Copy + std::fmt::Debug;

    /// Places a complete ULPDU whose CRC is right. It may be empty: a bare FPDU can be a ready-to-receive
    /// message (RFC 6581 section 9.2).
    fn place(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: Arrival) -> Result<Self::Placed, Refusal>;

    /// Delivers the next ULPDU in order; it was placed before.
    fn deliver(&mut self, conn: ConnId, placed: Self::Placed) -> Result<(), Refusal>;

    /// Writes the next ULPDU to send. Called only when window, frames and ring have room for it.
    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled;

    /// The peer has acknowledged the stream up to `offset` (compare [`UlpduWriter::end`]).
    fn acked(&mut self, conn: ConnId, offset: StreamOffset);

    /// Something happened to the connection.
    fn event(&mut self, conn: ConnId, event: Event);
}
