//! What request and reply mean together (RFC 5044 section 7.1, RFC 6581 section 9).

use super::{Revision, Rtr};

/// The IRD or ORD that stands for "not negotiated, the ULP sees to it" (RFC 6581 section 9.1).
pub const UNNEGOTIATED: u16 = 0x3fff;

/// The largest IRD or ORD that can be negotiated.
pub const MAX_READ_DEPTH: u16 = UNNEGOTIATED - 1;

/// A set of ready-to-receive messages: control flags B, C and D (RFC 6581 section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RtrOptions {
    /// B: a zero-length FULPDU (a bare FPDU, or a zero-length Send; the RFC's wording allows both).
    pub send: bool,
    /// C: a zero-length RDMA Write.
    pub write: bool,
    /// D: a zero-length RDMA Read.
    pub read: bool,
}

/// What an initiator asks for in its MPA Request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The initiator's private data, at most 512 bytes.
    pub private_data: Vec<u8>,
    /// The initiator's IRD; [`UNNEGOTIATED`] in revision 1.
    pub ird: u16,
    /// The initiator's ORD, which asks for an IRD of at least this; [`UNNEGOTIATED`] in revision 1.
    pub ord: u16,
    /// The revision it speaks.
    pub revision: Revision,
    /// Whether IRD, ORD and the connection model are part of the request (RFC 6581 section 6, S).
    pub enhanced: bool,
    /// The ready-to-receive messages on offer, when it asks for the peer-to-peer model.
    pub peer_to_peer: Option<RtrOptions>,
    /// The initiator requires markers in what we send.
    pub markers: bool,
    /// The initiator asks for CRC.
    pub crc: bool,
}

/// What both ends agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Our IRD: Read Requests that we let the peer have outstanding.
    pub ird: u16,
    /// Our ORD: Read Requests that we may have outstanding.
    pub ord: u16,
    /// What the peer gave as its IRD; [`UNNEGOTIATED`] without enhanced set-up.
    pub peer_ird: u16,
    /// What the peer gave as its ORD; [`UNNEGOTIATED`] without enhanced set-up.
    pub peer_ord: u16,
    /// CRCs are generated and checked.
    pub crc: bool,
    /// We send markers.
    pub markers_sent: bool,
    /// The peer sends markers.
    pub markers_received: bool,
    /// The revision spoken.
    pub revision: Revision,
    /// The peer-to-peer model (RFC 6581 section 9.2): the initiator's first FPDU is its RTR.
    pub peer_to_peer: bool,
}

/// A responder's yes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AcceptParams {
    /// Our IRD, at most [`MAX_READ_DEPTH`].
    pub ird: u16,
    /// Our ORD; the initiator's IRD limits it.
    pub ord: u16,
    /// For the initiator, at most 252 bytes (256 when it speaks unenhanced).
    pub private_data: Vec<u8>,
}
