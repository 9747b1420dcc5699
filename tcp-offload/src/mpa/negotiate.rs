//! The negotiation by MPA Request and Reply (RFC 5044 section 7.1, RFC 6581 section 9).

use super::{
    Markers, MpaConfig, MpaError, RequestRevision, Revision, Rtr,
    startup::{ENHANCED_BYTES, Enhanced, MAX_PRIVATE_DATA, MpaReply, MpaRequest},
};
use crate::framing::{AcceptParams, SetupError, UNNEGOTIATED};

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

/// The parameters of an initiator's MPA Request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The initiator's private data, at most 512 bytes.
    pub private_data: Vec<u8>,
    /// The initiator's IRD; [`UNNEGOTIATED`] in revision 1.
    pub ird: u16,
    /// The initiator's ORD, which asks for an IRD of at least this; [`UNNEGOTIATED`] in revision 1.
    pub ord: u16,
    /// The revision of the request.
    pub revision: Revision,
    /// Whether IRD, ORD and the connection model are part of the request (RFC 6581 section 6, S).
    pub enhanced: bool,
    /// The ready-to-receive messages offered, if the initiator requests the peer-to-peer model.
    pub peer_to_peer: Option<RtrOptions>,
    /// The initiator requires markers in the FPDUs that this end sends.
    pub markers: bool,
    /// The initiator requests CRC.
    pub crc: bool,
    /// The initiator offers Sends with immediate data.
    pub send_immediate: bool,
}

/// The result of the negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Our IRD: Read Requests that the peer may have outstanding.
    pub ird: u16,
    /// Our ORD: Read Requests that this end may have outstanding.
    pub ord: u16,
    /// The IRD that the peer declared; [`UNNEGOTIATED`] without enhanced set-up.
    pub peer_ird: u16,
    /// The ORD that the peer declared; [`UNNEGOTIATED`] without enhanced set-up.
    pub peer_ord: u16,
    /// CRCs are generated and checked.
    pub crc: bool,
    /// This end sends markers.
    pub markers_sent: bool,
    /// The peer sends markers.
    pub markers_received: bool,
    /// The revision in use.
    pub revision: Revision,
    /// The peer-to-peer model (RFC 6581 section 9.2): the initiator's first FPDU is its RTR.
    pub peer_to_peer: bool,
    /// Initiator in the peer-to-peer model: its RTR.
    pub rtr: Option<Rtr>,
    /// Both ends have Sends with immediate data.
    pub send_immediate: bool,
}

impl RtrOptions {
    const ALL: Self = Self { send: true, write: true, read: true };
    const NONE: Self = Self { send: false, write: false, read: false };

    /// Whether the set contains an RTR of this kind.
    pub const fn contains(self, rtr: Rtr) -> bool {
        match rtr {
            Rtr::EmptyFpdu | Rtr::Send => self.send,
            Rtr::Write => self.write,
            Rtr::Read => self.read,
        }
    }

    fn of(rtrs: &[Rtr]) -> Self {
        let has = |wanted: &[Rtr]| rtrs.iter().any(|rtr| wanted.contains(rtr));
        Self { send: has(&[Rtr::EmptyFpdu, Rtr::Send]), write: has(&[Rtr::Write]), read: has(&[Rtr::Read]) }
    }
}

impl Revision {
    const fn number(self) -> u8 {
        match self {
            Self::Zero => 0,
            Self::One => 1,
            Self::Two => 2,
        }
    }

    const fn of(number: u8) -> Self {
        match number {
            0 => Self::Zero,
            1 => Self::One,
            _ => Self::Two,
        }
    }
}

impl Offer {
    /// The offer that a request makes.
    fn of(request: MpaRequest) -> Self {
        let MpaRequest { revision, markers, crc, enhanced, send_immediate, private_data } = request;
        Self {
            private_data,
            ird: enhanced.map_or(UNNEGOTIATED, |e| e.ird),
            ord: enhanced.map_or(UNNEGOTIATED, |e| e.ord),
            revision: Revision::of(revision),
            enhanced: enhanced.is_some(),
            peer_to_peer: enhanced.and_then(|e| e.peer_to_peer),
            markers,
            crc,
            send_immediate,
        }
    }
}

/// Checks that this end supports the revision of the peer's start-up frame, which has these M and C bits.
fn check_revision(config: &MpaConfig, revision: u8, markers: bool, crc: bool) -> Result<(), MpaError> {
    match revision {
        0 if !config.permissive => Err(MpaError::UnsupportedRevision(0)),
        0 if !(markers && crc) => Err(MpaError::NotRdmac),
        _ => Ok(()),
    }
}

/// Evaluates an initiator's request.
pub(crate) fn evaluate_request(config: &MpaConfig, request: MpaRequest) -> Result<Offer, MpaError> {
    check_revision(config, request.revision, request.markers, request.crc)?;
    Ok(Offer::of(request))
}

/// The request of an initiator, kept until the reply arrives.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The request that was sent.
    pub(crate) request: MpaRequest,
    /// Our IRD and ORD, even when the request does not carry them and they are left to the ULPs.
    ird: u16,
    ord: u16,
}

/// Builds the request of an initiator.
pub(crate) fn request(
    config: &MpaConfig,
    private_data: Vec<u8>,
    ird: u16,
    ord: u16,
) -> Result<Asked, SetupError> {
    check_depth(ird)?;
    check_depth(ord)?;
    let (revision, enhanced) = match config.revision {
        RequestRevision::One if !config.peer_to_peer.is_empty() => {
            return Err(SetupError::PeerToPeerNeedsRevisionTwo);
        }
        RequestRevision::One => (Revision::One, None),
        RequestRevision::PreferTwo | RequestRevision::RequireTwo => {
            let rtrs = RtrOptions::of(&config.peer_to_peer);
            let peer_to_peer = (rtrs != RtrOptions::NONE).then_some(rtrs);
            (Revision::Two, Some(Enhanced { ird, ord, peer_to_peer }))
        }
    };
    check_private_data(config, &private_data, enhanced)?;
    let request = MpaRequest {
        revision: revision.number(),
        markers: config.markers != Markers::Off,
        crc: config.crc,
        send_immediate: config.send_immediate && revision == Revision::Two,
        enhanced,
        private_data,
    };
    Ok(Asked { request, ird, ord })
}

/// Builds the reply of a responder that accepts, with the result of the negotiation.
///
/// IRD and ORD follow RFC 6581 section 9.1: our ORD is at most the initiator's IRD, and values that the initiator
/// leaves to the ULPs stay so. All offered RTRs are accepted, because this end understands each of them.
pub(crate) fn accept(
    config: &MpaConfig,
    offer: &Offer,
    params: AcceptParams,
) -> Result<(MpaReply, Agreed), SetupError> {
    check_depth(params.ird)?;
    check_depth(params.ord)?;
    let rtrs = rtrs_taken(offer);
    let ird = params.ird.max(u16::from(rtrs.is_some_and(|rtrs| rtrs.read)));
    let ord = if offer.ird == UNNEGOTIATED { params.ord } else { params.ord.min(offer.ird) };
    let mut reply = reply(config, offer, params.private_data, ird, ord)?;
    reply.rejected = false;
    reply.send_immediate = config.send_immediate && offer.send_immediate;
    let agreed = Agreed {
        ird,
        ord,
        peer_ird: offer.ird,
        peer_ord: offer.ord,
        crc: reply.crc || offer.crc,
        markers_sent: offer.markers,
        markers_received: reply.markers,
        revision: offer.revision,
        peer_to_peer: rtrs.is_some(),
        rtr: None,
        send_immediate: reply.send_immediate,
    };
    Ok((reply, agreed))
}

/// Builds the reply of a responder that rejects.
pub(crate) fn reject(
    config: &MpaConfig,
    offer: &Offer,
    private_data: Vec<u8>,
) -> Result<MpaReply, SetupError> {
    reply(config, offer, private_data, 0, 0)
}

fn reply(
    config: &MpaConfig,
    offer: &Offer,
    private_data: Vec<u8>,
    ird: u16,
    ord: u16,
) -> Result<MpaReply, SetupError> {
    let unless_left_to_ulps = |asked, ours| if asked == UNNEGOTIATED { UNNEGOTIATED } else { ours };
    let enhanced = offer.enhanced.then(|| Enhanced {
        ird: unless_left_to_ulps(offer.ord, ird),
        ord: unless_left_to_ulps(offer.ird, ord),
        peer_to_peer: rtrs_taken(offer),
    });
    check_private_data(config, &private_data, enhanced)?;
    Ok(MpaReply {
        revision: offer.revision.number(),
        markers: match config.markers {
            // An RDMAC RNIC sends markers, regardless of this end's preference (RFC 5044 appendix C.2.3).
            _ if offer.revision == Revision::Zero => true,
            Markers::Prefer => offer.markers,
            Markers::Require => true,
            Markers::Off => false,
        },
        crc: config.crc || offer.crc,
        rejected: true,
        enhanced,
        send_immediate: false,
        private_data,
    })
}

/// Flags B, C and D of a reply (RFC 6581 section 9.2): the RTRs offered, or all RTRs when the initiator asked for the
/// peer-to-peer model without naming any.
fn rtrs_taken(offer: &Offer) -> Option<RtrOptions> {
    offer.peer_to_peer.map(|rtrs| if rtrs == RtrOptions::NONE { RtrOptions::ALL } else { rtrs })
}

/// The result of a reply for the initiator.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ReplyOutcome {
    /// Full operation.
    Accepted(Agreed),
    /// Full operation that begins with a Terminate (RFC 6581 sections 9.1 and 9.2).
    Terminate(Agreed, MpaError),
    /// The responder's ULP rejected the connection.
    Rejected,
    /// The start-up has failed.
    Failed(MpaError),
}

/// Evaluates the reply to the initiator's request, which ends the negotiation.
pub(crate) fn evaluate_reply(config: &MpaConfig, asked: &Asked, reply: &MpaReply) -> ReplyOutcome {
    let Asked { request, ird, ord } = asked;
    // The M and C bits of a rejection have no effect.
    let (markers, crc) = (reply.markers || reply.rejected, reply.crc || reply.rejected);
    if let Err(error) = check_revision(config, reply.revision, markers, crc) {
        return ReplyOutcome::Failed(error);
    }
    // A responder of a lower revision interprets IRD and ORD as private data, so its answer has no meaning.
    if reply.revision < request.revision && config.falls_back_to_revision_one() {
        return ReplyOutcome::Failed(MpaError::NotEnhanced);
    }
    if reply.rejected {
        // A responder that does not support markers (Linux's siw) can only reject. One that declares markers for
        // itself, or sends private data, rejects for another reason.
        let for_markers = request.markers && !reply.markers && reply.private_data.is_empty();
        return if for_markers {
            ReplyOutcome::Failed(MpaError::MarkersRefused)
        } else {
            ReplyOutcome::Rejected
        };
    }
    let mut agreed = Agreed {
        ird: *ird,
        ord: *ord,
        peer_ird: UNNEGOTIATED,
        peer_ord: UNNEGOTIATED,
        crc: request.crc || reply.crc,
        markers_sent: reply.markers,
        markers_received: request.markers || reply.revision == 0,
        revision: Revision::of(reply.revision.min(request.revision)),
        peer_to_peer: false,
        rtr: None,
        send_immediate: request.send_immediate && reply.send_immediate,
    };
    let Some(ours) = request.enhanced else { return ReplyOutcome::Accepted(agreed) };
    let Some(theirs) = reply.enhanced else { return ReplyOutcome::Failed(MpaError::NotEnhanced) };
    (agreed.peer_ird, agreed.peer_ord) = (theirs.ird, theirs.ord);
    if theirs.ird != UNNEGOTIATED {
        agreed.ord = ours.ord.min(theirs.ird);
    }
    if theirs.ord != UNNEGOTIATED && theirs.ord > ours.ird {
        if theirs.ord > config.max_ird {
            return ReplyOutcome::Terminate(agreed, MpaError::InsufficientIrd);
        }
        agreed.ird = theirs.ord;
    }
    if ours.peer_to_peer.is_none() {
        return ReplyOutcome::Accepted(agreed);
    }
    if theirs.peer_to_peer.is_none() && config.falls_back_to_revision_one() {
        // The responder does not know the model, and this end only prefers it.
        return ReplyOutcome::Accepted(agreed);
    }
    agreed.peer_to_peer = true;
    let offered = theirs.peer_to_peer.unwrap_or(RtrOptions::NONE);
    agreed.rtr = config.peer_to_peer.iter().copied().find(|rtr| offered.contains(*rtr));
    match agreed.rtr {
        Some(_) => ReplyOutcome::Accepted(agreed),
        None => ReplyOutcome::Terminate(agreed, MpaError::NoMatchingRtr),
    }
}

fn check_depth(depth: u16) -> Result<(), SetupError> {
    if depth <= UNNEGOTIATED { Ok(()) } else { Err(SetupError::ReadDepth(depth)) }
}

fn check_private_data(
    config: &MpaConfig,
    private_data: &[u8],
    enhanced: Option<Enhanced>,
) -> Result<(), SetupError> {
    let depths = if enhanced.is_some() { ENHANCED_BYTES } else { 0 };
    let limit = config.private_data_bytes.min(MAX_PRIVATE_DATA).saturating_sub(depths);
    let len = private_data.len();
    if len <= limit { Ok(()) } else { Err(SetupError::PrivateDataTooLong { len, limit }) }
}
