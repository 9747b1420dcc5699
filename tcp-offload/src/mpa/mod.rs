//! Marker PDU Aligned framing (RFC 5044) with the enhanced set-up of RFC 6581: the start-up frames, and
//! FPDUs in both directions. [`crate::framing::Session`] runs it between a connection's TCP and the upper layer.
//!
//! | file | owns |
//! |---|---|
//! | `startup` | the bytes of MPA Request and Reply frames |
//! | `negotiate` | the negotiation by request and reply: CRC, markers, IRD/ORD, peer to peer |
//! | `layout` | positions and lengths of FPDUs and markers in the stream, MULPDU |
//! | `writer` | building one FPDU in a transmit frame |
//! | `deframe` | checking one received FPDU and extracting its ULPDU |
//! | `recorded` | FPDUs in recorded streams, for programs that explain captures |
//! | `frames` | the traits of a framing |
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod deframe;
mod error;
pub(crate) mod frames;
pub(crate) mod layout;
mod negotiate;
mod recorded;
mod startup;
mod writer;

pub use error::{MpaError, TerminateCode};
pub use negotiate::{Agreed, Offer, RtrOptions};
pub use recorded::RecordedFpdus;
pub use startup::{Enhanced, MpaReply, MpaRequest};
pub(crate) use writer::Announced;

/// The session of a connection with MPA.
pub type Session<P> = crate::framing::Session<P, MpaConfig>;

use std::time::Duration;

/// Whether this end wants markers in the FPDUs that it receives. Each direction is negotiated separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Markers {
    /// Initiator: request markers, and connect again without them if the peer refuses. Responder: request them if and
    /// only if the initiator did.
    #[default]
    Prefer,
    /// Request markers, and fail with [`MpaError::MarkersRefused`] if the peer refuses.
    Require,
    /// Never request markers. (They are still sent if the peer requests them, as RFC 5044 requires.)
    Off,
}

/// MPA revision of a start-up frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Revision {
    /// The RDMA Consortium's MPA, whose connections also have version 0 of DDP and RDMAP (RFC 5044 appendix C).
    Zero,
    /// RFC 5044.
    One,
    /// RFC 6581: enhanced set-up with IRD and ORD.
    Two,
}

/// MPA revision of an initiator's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RequestRevision {
    /// Revision 1. IRD and ORD are left to the applications.
    One,
    /// Revision 2. When the peer does not support it, the initiator connects again with revision 1 (RFC 6581 section
    /// 10), and without the peer-to-peer mode that [`MpaConfig::peer_to_peer`] asks for.
    #[default]
    PreferTwo,
    /// Revision 2 only, and peer-to-peer mode if it is asked for.
    RequireTwo,
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

/// This end's settings for the start-up of one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpaConfig {
    /// Markers in the FPDUs that this end receives.
    pub markers: Markers,
    /// Whether this end requests CRC, which is used if either end requests it.
    pub crc: bool,
    /// Revision of an initiator's request. A responder answers with the revision of the request.
    pub revision: RequestRevision,
    /// Whether this end also connects with RNICs of the RDMA Consortium: the permissive RNIC of RFC 5044 appendix C.
    pub permissive: bool,
    /// Initiator: request peer-to-peer mode with these ready-to-receive messages. Without this mode the acceptor may send
    /// nothing before the initiator's first message (RFC 5044 section 7.1.2, rule 4): a service that speaks first waits for
    /// ever.
    pub peer_to_peer: Vec<Rtr>,
    /// `Some`: MPA does not begin with the connection, but when the application starts it, after an exchange of
    /// streaming data with the peer (RFC 5044 sections 7.1.3 and 7.1.5). The value is the time limit of this exchange.
    /// Both ends must use it. Connection attempts are not repeated, since the application would have to log in again.
    pub streaming: Option<Duration>,
    /// Time limit for the peer's start-up frame.
    pub startup_timeout: Duration,
    /// Longest time that an FPDU may wait for a receive before the stream is terminated. Zero terminates at once: the
    /// strict behaviour of RFC 5041 section 7.1.
    pub withhold_timeout: Duration,
    /// Largest number of bytes held for FPDUs that cannot be placed or delivered yet. A peer that respects the TCP
    /// window never sends more, so the default is the same as [`crate::tcp::TcpConfig::receive_window_max`].
    pub hold_bytes: usize,
    /// Initiator: the largest IRD that a responder's ORD may raise ours to (RFC 6581 section 9.1).
    pub max_ird: u16,
    /// Largest private data in a request or reply that this end sends, in bytes, including the 4 bytes of IRD and ORD;
    /// RFC 5044 section 7.1.1 allows 512. Linux's siw resets a connection whose request has more than the default, 256,
    /// and its kernel crashes on such a reply. Raise the limit only for peers that are known to accept more.
    pub private_data_bytes: usize,
    /// Whether Sends with immediate data, an extension of this project, are negotiated with a peer that has them. Other peers
    /// ignore the offer, which is a bit that RFC 5044 section 7.1.1 reserves.
    pub send_immediate: bool,
}

impl Default for MpaConfig {
    /// Markers preferred, CRC on, revision 2 preferred, client-server model.
    fn default() -> Self {
        Self {
            markers: Markers::default(),
            crc: true,
            revision: RequestRevision::default(),
            permissive: false,
            streaming: None,
            peer_to_peer: Vec::new(),
            startup_timeout: Duration::from_secs(10),
            withhold_timeout: Duration::from_secs(5),
            hold_bytes: 8 << 20,
            max_ird: 128,
            private_data_bytes: 256,
            send_immediate: true,
        }
    }
}

impl MpaConfig {
    /// Initiator: whether a request of revision 2 may be followed by one of revision 1, on another connection. Revision
    /// 1 has no peer-to-peer model.
    pub fn falls_back_to_revision_one(&self) -> bool {
        self.revision == RequestRevision::PreferTwo
    }

    /// The same settings, with a request for peer-to-peer mode by each ready-to-receive message that costs the peer's
    /// application nothing: either side may then speak first, if the peer knows this mode.
    #[must_use]
    pub fn either_speaks_first(self) -> Self {
        Self { peer_to_peer: vec![Rtr::EmptyFpdu, Rtr::Write, Rtr::Read], ..self }
    }
}
