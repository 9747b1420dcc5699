//! The common part of all framings of ULPDUs in a TCP stream, and the traits that a framing implements.
//!
//! A *frame* is an FPDU of MPA or a segment of RDMA/TCP; a *ULPDU* is its content. [`Session`] is compiled once for each
//! framing, so a frame costs no dynamic call; the stack chooses between the two sessions once for each payload and each
//! TCP segment (`AnySession`).
//!
//! | file | owns |
//! |---|---|
//! | `counters` | the counters of a session, the same for every framing |
//! | `session` | the phases of a connection, time limits, events |
//! | `setup` | the parameters and errors of a start-up that do not depend on the framing |
//! | `any` | the choice of the framing at run time |
//! | `receiver` | the in-order cursor and the islands beyond gaps: early placement, delivery in order |
//! | `track` | the known frames from the cursor on: check, place, deliver |
//! | `hold` | received bytes that cannot be placed yet, and the frames of the link that they lie in |
//! | `ulpdu` | reading and writing ULPDUs in frames |
//! | `ordered` | lists in stream order whose operations stay cheap with thousands of items |
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod any;
mod counters;
pub(crate) mod hold;
mod ordered;
pub(crate) mod receiver;
mod session;
mod setup;
mod track;
pub(crate) mod ulpdu;

use std::{fmt, time::Duration};

pub use any::FramingConfig;
pub(crate) use any::{AnySession, either};
pub use counters::FramingCounters;
pub(crate) use session::MAX_FIRST_BYTES;
pub use session::{Session, Taken};
pub use setup::{AcceptParams, MAX_READ_DEPTH, SetupError, UNNEGOTIATED};

use crate::{
    link::{FrameWriter, Link, RxFrame},
    mpa::{self, MpaError},
    rdma_tcp::{self, SegmentError},
    seq::StreamOffset,
    tcp::NewPayload,
    ulp::{Ulpdu, UlpduWriter},
};
use hold::Hold;

/// New payload on its way up.
#[derive(Debug)]
pub struct Carried {
    /// The payload.
    pub payload: NewPayload,
    /// The received frame in which it lies.
    pub frame: RxFrame,
    /// Bytes that the session may hold in addition to those that it holds now.
    pub spare: usize,
    /// Whether the session [allows the fast path](Session::allows_fast_path), which it does until a payload is not taken whole.
    pub fast: bool,
}

/// The error with which a framing ended a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    /// An error of MPA.
    #[error(transparent)]
    Mpa(#[from] MpaError),
    /// An error of RDMA/TCP.
    #[error(transparent)]
    RdmaTcp(#[from] SegmentError),
}

/// The peer's part of the negotiation, for the responder's application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Offer {
    /// An MPA Request.
    Mpa(mpa::Offer),
    /// A Connect of RDMA/TCP.
    RdmaTcp(rdma_tcp::Connect),
}

impl Offer {
    /// The initiator's IRD; [`UNNEGOTIATED`] when it is left to the ULPs.
    pub fn ird(&self) -> u16 {
        match self {
            Self::Mpa(offer) => offer.ird,
            Self::RdmaTcp(connect) => connect.ird,
        }
    }

    /// The initiator's ORD; [`UNNEGOTIATED`] when it is left to the ULPs.
    pub fn ord(&self) -> u16 {
        match self {
            Self::Mpa(offer) => offer.ord,
            Self::RdmaTcp(connect) => connect.ord,
        }
    }

    /// The initiator's private data.
    pub fn into_private_data(self) -> Vec<u8> {
        match self {
            Self::Mpa(offer) => offer.private_data,
            Self::RdmaTcp(connect) => connect.private_data,
        }
    }
}

/// The result of the negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreed {
    /// Of MPA.
    Mpa(mpa::Agreed),
    /// Of RDMA/TCP.
    RdmaTcp(rdma_tcp::Agreed),
}

impl Agreed {
    /// RDMA Reads that this end serves concurrently (IRD).
    pub fn ird(&self) -> u16 {
        match self {
            Self::Mpa(agreed) => agreed.ird,
            Self::RdmaTcp(agreed) => agreed.ird,
        }
    }

    /// RDMA Reads that this end may have outstanding (ORD).
    pub fn ord(&self) -> u16 {
        match self {
            Self::Mpa(agreed) => agreed.ord,
            Self::RdmaTcp(agreed) => agreed.ord,
        }
    }

    /// The peer's IRD; [`UNNEGOTIATED`] when it was left to the ULPs.
    pub fn peer_ird(&self) -> u16 {
        match self {
            Self::Mpa(agreed) => agreed.peer_ird,
            Self::RdmaTcp(agreed) => agreed.peer_ird,
        }
    }

    /// The peer's ORD; [`UNNEGOTIATED`] when it was left to the ULPs.
    pub fn peer_ord(&self) -> u16 {
        match self {
            Self::Mpa(agreed) => agreed.peer_ord,
            Self::RdmaTcp(agreed) => agreed.peer_ord,
        }
    }
}

/// A frame that was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Whole {
    /// Bytes of the frame.
    pub len: usize,
    /// Position of its ULPDU, and the bytes of that.
    pub ulpdu_at: usize,
    pub ulpdu: usize,
    /// Bytes of the ULPDU before its first marker; `usize::MAX` without markers.
    pub to_marker: usize,
}

/// The frames of one direction of a stream.
pub(crate) trait Framing: Copy + Default + fmt::Debug {
    /// The bytes of a frame's head up to the end of its length field.
    type Head: Copy + Default + AsMut<[u8]>;

    /// The error when a frame found beyond a gap begins within another frame.
    const OVERLAP: FramingError;

    /// This framing of a direction whose first frame begins at `origin`.
    #[must_use]
    fn starting_at(self, origin: StreamOffset) -> Self;

    /// Offset of the head of the frame that begins at `start`.
    fn head(&self, start: StreamOffset) -> StreamOffset;

    /// Bytes of the ULPDU of the frame with this head. Fails when the head is not valid.
    fn ulpdu_len(&self, head: Self::Head) -> Result<usize, FramingError>;

    /// End of the frame that begins at `start` and has a ULPDU of `ulpdu` bytes.
    fn end(&self, start: StreamOffset, ulpdu: usize) -> StreamOffset;

    /// Verifies the CRC of the frame that consists of `raw`, if the connection uses CRCs.
    fn verify(&self, raw: &[&[u8]]) -> Result<(), FramingError>;

    /// Extracts the ULPDU of the frame that begins at `start` and consists of `raw`.
    fn cut<'a>(
        &self,
        raw: &'a [&'a [u8]],
        start: StreamOffset,
        ulpdu: usize,
    ) -> Result<Ulpdu<'a>, FramingError>;

    /// The frame that begins at `start`, of whose stream `bytes` come next, if they contain all of it and all checks
    /// pass: the fast path of the methods above for a frame in one piece. `None` otherwise; then these methods
    /// decide.
    #[inline]
    fn whole(&self, bytes: &[u8], start: StreamOffset) -> Option<Whole> {
        let _ = (bytes, start);
        None
    }

    /// The first place to probe for the start of a frame, when bytes from `fresh` on were received beyond a gap.
    fn first_probe(&self, hold: &Hold, fresh: StreamOffset) -> Option<StreamOffset>;

    /// The place to probe after `probe`; `end` is the end of the received bytes.
    fn next_probe(&self, probe: StreamOffset, fresh: StreamOffset, end: StreamOffset)
    -> Option<StreamOffset>;

    /// Start of the frame that the probe at `probe` finds, if the bytes that it needs are held.
    fn frame_at(&self, hold: &Hold, link: &dyn Link, probe: StreamOffset) -> Option<StreamOffset>;
}

/// MULPDU for one EMSS. It is kept until the EMSS changes, because each segment asks for it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mulpdu {
    /// The EMSS. No connection has one of 0.
    pub emss: usize,
    /// The largest ULPDU in a segment of its own, in bytes.
    pub bytes: usize,
    /// In this many bytes of a segment, a frame with such a ULPDU fits wherever it begins.
    pub fits: usize,
}

#[cfg(any(test, feature = "sim"))]
impl Mulpdu {
    /// This MULPDU, whatever the EMSS is.
    pub(crate) const fn of(bytes: usize) -> Self {
        Self { emss: 0, bytes, fits: usize::MAX }
    }
}

/// The transmit direction in full operation.
pub(crate) trait Transmitter: Copy + fmt::Debug {
    /// Whether a TCP segment contains exactly one frame.
    const ONE_FRAME: bool;

    /// Whether the first frame is sent only after the peer's first frame has arrived.
    fn waits_for_first(&self) -> bool;

    /// MULPDU for TCP's EMSS `emss`.
    fn mulpdu(&self, emss: usize) -> Mulpdu;

    /// MULPDU in a path MTU probe of `room` bytes that begins at `offset`, all of which the frame must fill.
    fn probe_mulpdu(&self, offset: StreamOffset, emss: usize, room: usize) -> Mulpdu;

    /// A writer of the frame that begins at `start`; `None` when not even an empty frame fits.
    fn begin<'w, 'f>(
        &self,
        out: &'w mut FrameWriter<'f>,
        start: StreamOffset,
        mulpdu: Mulpdu,
    ) -> Option<UlpduWriter<'w, 'f>>;

    /// Completes the frame; returns its bytes.
    fn finish(&self, writer: &mut UlpduWriter<'_, '_>) -> usize;
}

/// The part of a configuration that does not depend on the framing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub startup_timeout: Duration,
    /// `Some`: streaming data precedes the first frame. The time limit for its exchange.
    pub streaming: Option<Duration>,
    pub withhold_timeout: Duration,
    pub hold_bytes: usize,
}

/// The state with which full operation begins.
#[derive(Debug)]
pub(crate) struct Full<S: StartUp> {
    pub agreed: Agreed,
    pub transmitter: S::Transmitter,
    /// The frames that the peer sends.
    pub frames: S::Framing,
}

/// The outcome of the start-up for the initiator, after the responder's answer.
#[derive(Debug)]
pub(crate) enum Answer<S: StartUp> {
    /// Full operation.
    Accepted { full: Full<S>, private_data: Vec<u8> },
    /// Full operation that begins with a Terminate.
    Terminate(Full<S>, FramingError),
    /// The responder's ULP rejected the connection.
    Rejected { private_data: Vec<u8>, ird: u16, ord: u16 },
    /// The start-up has failed.
    Failed(FramingError),
}

/// The start-up of a framing: the first bytes of each direction and their negotiation. `Self` is the configuration.
pub(crate) trait StartUp: fmt::Debug + Sized {
    type Framing: Framing;
    type Transmitter: Transmitter;
    /// The initiator's request, kept until the answer.
    type Asked: fmt::Debug;
    /// The offer in an initiator's request.
    type Offered: fmt::Debug + Clone + Into<Offer>;

    const TRUNCATED: FramingError;
    const WITHHELD: FramingError;
    const STALLED: FramingError;
    const TIMED_OUT: FramingError;
    const DATA_BEFORE_ANSWER: FramingError;

    fn limits(&self) -> Limits;

    /// The initiator's first bytes.
    fn request(
        &self,
        private_data: Vec<u8>,
        ird: u16,
        ord: u16,
    ) -> Result<(Self::Asked, Vec<u8>), SetupError>;

    /// Parses the initiator's first bytes. Returns the offer and the number of bytes parsed, or `None` while they are incomplete.
    fn parse_request(&self, bytes: &[u8]) -> Result<Option<(Self::Offered, usize)>, FramingError>;

    /// The bytes with which a responder accepts. They begin at `start` of the stream that it sends.
    fn accept(
        &self,
        offer: &Self::Offered,
        params: AcceptParams,
        start: StreamOffset,
    ) -> Result<(Vec<u8>, Full<Self>), SetupError>;

    /// The bytes with which a responder rejects.
    fn reject(&self, offer: &Self::Offered, private_data: Vec<u8>) -> Result<Vec<u8>, SetupError>;

    /// Parses the responder's answer. Returns the answer and the number of bytes parsed, or `None` while it is incomplete. Our
    /// first frame begins at stream offset `start`, after the request.
    fn parse_answer(
        &self,
        asked: &Self::Asked,
        bytes: &[u8],
        start: StreamOffset,
    ) -> Result<Option<(Answer<Self>, usize)>, FramingError>;
}
