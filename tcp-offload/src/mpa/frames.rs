//! MPA as a framing: implements the traits of [`crate::framing`] by the other files of this module.

use super::{
    Agreed, MpaConfig, MpaError, MpaReply, MpaRequest, Offer,
    deframe::{cut, pointer, verify_crc, whole},
    layout::{LENGTH_BYTES, Layout, MARKER_SPACING},
    negotiate::{self, Asked, ReplyOutcome},
};
use crate::{
    framing::{
        self, AcceptParams, Answer, Framing, FramingError, Full, Limits, Mulpdu, SetupError, StartUp,
        Transmitter, UNNEGOTIATED, Whole, hold::Hold,
    },
    link::{FrameWriter, Link},
    seq::StreamOffset,
    ulp::{Ulpdu, UlpduWriter},
};

/// The FPDUs of one direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Fpdus {
    pub layout: Layout,
    pub crc: bool,
}

impl Framing for Fpdus {
    type Head = [u8; LENGTH_BYTES];

    const OVERLAP: FramingError = FramingError::Mpa(MpaError::MarkerMismatch);

    fn starting_at(self, origin: StreamOffset) -> Self {
        Self { layout: Layout { origin, ..self.layout }, ..self }
    }

    fn head(&self, start: StreamOffset) -> StreamOffset {
        self.layout.header(start)
    }

    fn ulpdu_len(&self, head: Self::Head) -> Result<usize, FramingError> {
        Ok(usize::from(u16::from_be_bytes(head)))
    }

    fn end(&self, start: StreamOffset, ulpdu: usize) -> StreamOffset {
        self.layout.end(start, ulpdu)
    }

    fn verify(&self, raw: &[&[u8]]) -> Result<(), FramingError> {
        if self.crc { verify_crc(raw).map_err(FramingError::Mpa) } else { Ok(()) }
    }

    fn cut<'a>(
        &self,
        raw: &'a [&'a [u8]],
        start: StreamOffset,
        ulpdu: usize,
    ) -> Result<Ulpdu<'a>, FramingError> {
        cut(&self.layout, raw, start, ulpdu).map_err(FramingError::Mpa)
    }

    #[expect(clippy::inline_always, reason = "see `deframe::whole`")]
    #[inline(always)]
    fn whole(&self, bytes: &[u8], start: StreamOffset) -> Option<Whole> {
        whole(self, bytes, start)
    }

    /// The marker before the received bytes: an FPDU that they complete may begin before them.
    fn first_probe(&self, _hold: &Hold, fresh: StreamOffset) -> Option<StreamOffset> {
        self.layout.markers.then(|| self.layout.marker_before(fresh))
    }

    /// The next marker, up to the one right after the received bytes.
    fn next_probe(
        &self,
        probe: StreamOffset,
        _fresh: StreamOffset,
        end: StreamOffset,
    ) -> Option<StreamOffset> {
        (probe < end).then(|| probe + MARKER_SPACING)
    }

    /// Start of the FPDU to which the marker at `probe` belongs, if the marker is held.
    fn frame_at(&self, hold: &Hold, link: &dyn Link, probe: StreamOffset) -> Option<StreamOffset> {
        match pointer(hold.read(link, probe)?) {
            0 => Some(probe),
            back => self.layout.range_of_header(probe.checked_sub(u64::from(back))?),
        }
    }
}

/// The FPDUs that this end sends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FpduTransmitter {
    layout: Layout,
    crc: bool,
    /// A responder sends no FPDU before the initiator's first FPDU has arrived (RFC 5044 section 7.1.2, rule 4).
    waits_for_first: bool,
}

impl Transmitter for FpduTransmitter {
    const ONE_FRAME: bool = false;

    fn waits_for_first(&self) -> bool {
        self.waits_for_first
    }

    fn mulpdu(&self, emss: usize) -> Mulpdu {
        self.layout.mulpdu(emss)
    }

    /// A path MTU probe is filled to its last byte, wherever its markers lie.
    fn probe_mulpdu(&self, offset: StreamOffset, emss: usize, room: usize) -> Mulpdu {
        let mulpdu = self.mulpdu(emss);
        match self.layout.largest_ulpdu(offset, room) {
            Some(bytes) => Mulpdu { bytes, fits: usize::MAX, ..mulpdu },
            None => mulpdu,
        }
    }

    #[inline]
    fn begin<'w, 'f>(
        &self,
        out: &'w mut FrameWriter<'f>,
        start: StreamOffset,
        mulpdu: Mulpdu,
    ) -> Option<UlpduWriter<'w, 'f>> {
        UlpduWriter::begin(out, self.layout, start, mulpdu, self.crc)
    }

    #[inline]
    fn finish(&self, writer: &mut UlpduWriter<'_, '_>) -> usize {
        writer.finish()
    }
}

/// The state of full operation with the negotiated parameters; our first FPDU has the offset `origin`.
fn full(agreed: Agreed, origin: StreamOffset, waits_for_first: bool) -> Full<MpaConfig> {
    let crc = agreed.crc;
    Full {
        agreed: framing::Agreed::Mpa(agreed),
        transmitter: FpduTransmitter {
            layout: Layout { origin, markers: agreed.markers_sent },
            crc,
            waits_for_first,
        },
        frames: Fpdus { layout: Layout { origin: 0, markers: agreed.markers_received }, crc },
    }
}

impl From<Offer> for framing::Offer {
    fn from(offer: Offer) -> Self {
        Self::Mpa(offer)
    }
}

impl StartUp for MpaConfig {
    type Framing = Fpdus;
    type Transmitter = FpduTransmitter;
    type Asked = Asked;
    type Offered = Offer;

    const TRUNCATED: FramingError = FramingError::Mpa(MpaError::Truncated);
    const WITHHELD: FramingError = FramingError::Mpa(MpaError::Withheld);
    const STALLED: FramingError = FramingError::Mpa(MpaError::Stalled);
    const TIMED_OUT: FramingError = FramingError::Mpa(MpaError::StartupTimeout);
    const DATA_BEFORE_ANSWER: FramingError = FramingError::Mpa(MpaError::DataBeforeReply);

    fn limits(&self) -> Limits {
        let Self { startup_timeout, streaming, withhold_timeout, hold_bytes, .. } = *self;
        Limits { startup_timeout, streaming, withhold_timeout, hold_bytes }
    }

    fn request(&self, private_data: Vec<u8>, ird: u16, ord: u16) -> Result<(Asked, Vec<u8>), SetupError> {
        let asked = negotiate::request(self, private_data, ird, ord)?;
        let bytes = asked.request.emit();
        Ok((asked, bytes))
    }

    fn parse_request(&self, bytes: &[u8]) -> Result<Option<(Offer, usize)>, FramingError> {
        let Some((request, len)) = MpaRequest::parse(bytes)? else { return Ok(None) };
        Ok(Some((negotiate::evaluate_request(self, request)?, len)))
    }

    fn accept(
        &self,
        offer: &Offer,
        params: AcceptParams,
        start: StreamOffset,
    ) -> Result<(Vec<u8>, Full<Self>), SetupError> {
        let (reply, agreed) = negotiate::accept(self, offer, params)?;
        let bytes = reply.emit();
        let full = full(agreed, start + bytes.len() as u64, true);
        Ok((bytes, full))
    }

    fn reject(&self, offer: &Offer, private_data: Vec<u8>) -> Result<Vec<u8>, SetupError> {
        Ok(negotiate::reject(self, offer, private_data)?.emit())
    }

    fn parse_answer(
        &self,
        asked: &Asked,
        bytes: &[u8],
        start: StreamOffset,
    ) -> Result<Option<(Answer<Self>, usize)>, FramingError> {
        let Some((reply, len)) = MpaReply::parse(bytes)? else { return Ok(None) };
        let answer = match negotiate::evaluate_reply(self, asked, &reply) {
            ReplyOutcome::Accepted(agreed) => {
                Answer::Accepted { full: full(agreed, start, false), private_data: reply.private_data }
            }
            ReplyOutcome::Terminate(agreed, error) => {
                Answer::Terminate(full(agreed, start, false), error.into())
            }
            ReplyOutcome::Rejected => Answer::Rejected {
                private_data: reply.private_data,
                ird: reply.enhanced.map_or(UNNEGOTIATED, |e| e.ird),
                ord: reply.enhanced.map_or(UNNEGOTIATED, |e| e.ord),
            },
            ReplyOutcome::Failed(error) => Answer::Failed(error.into()),
        };
        Ok(Some((answer, len)))
    }
}
