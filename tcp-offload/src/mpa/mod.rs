//! Marker PDU Aligned framing (RFC 5044) with the enhanced set-up of RFC 6581: the start-up frames, and
//! FPDUs in both directions. One [`Session`] per connection sits between its TCP and the upper layer.

/// Whether we want markers in the direction towards us (design: each direction has its own).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Markers {
    /// Initiator: ask, and connect once more without when the peer refuses. Responder: ask exactly
    /// when the initiator asked.
    #[default]
    Prefer,
    /// Ask, and fail with an error that says so when the peer refuses.
    Require,
    /// Never ask. (Markers are still sent when the peer asks for them, as RFC 5044 demands.)
    Off,
}

/// MPA revision of an initiator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Revision {
    /// RFC 5044.
    One,
    /// RFC 6581: enhanced set-up with IRD and ORD.
    #[default]
    Two,
}

/// The ready-to-receive message of peer-to-peer mode (RFC 6581 section 9.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rtr {
    /// A bare FPDU (ULPDU length 0).
    EmptyFpdu,
    /// A zero-length Send.
    Send,
    /// A zero-length RDMA Write.
    Write,
    /// A zero-length RDMA Read.
    Read,
}

/// What the applications of both ends decide: our side's settings of one connection's start-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpaConfig {
    /// Markers towards us.
    pub markers: Markers,
    /// Whether we ask for CRC. It is used when either side asks.
    pub crc: bool,
    /// Revision that an initiator speaks; responders answer in kind.
    pub revision: Revision,
    /// Initiator: ask for peer-to-peer mode with these ready-to-receive messages.
    pub peer_to_peer: Vec<Rtr>,
    /// Time limit for the peer's start-up frame.
    pub startup_timeout: std::time::Duration,
    /// How long an FPDU may wait for a receive before the stream is terminated.
    pub withhold_timeout: std::time::Duration,
    /// Most bytes held for FPDUs that cannot be placed or delivered yet.
    pub hold_bytes: usize,
}
