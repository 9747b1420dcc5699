//! Target: the receive side of an MPA session, fed with pieces of a stream in any order.
//!
//! An input is: settings, the number of steps, the steps (four bytes each), the stream. A step delivers a
//! piece of the stream, possibly with a changed byte, or lets the upper layer accept more. At the end, all
//! missing pieces arrive in order. The oracle is [`Reference`], which reads the stream from start to end.

use xwarp_tcp::{
    framing::Agreed,
    mpa::{Markers, MpaConfig, MpaError, RequestRevision},
    ulp::Event,
};

use crate::{
    input::Input,
    link::FuzzLink,
    session::{End, SEGMENT},
};

const MARKERS: u8 = 1;
const CRC: u8 = 2;
/// Recompute the CRCs of the mutated stream.
const MEND_CRC: u8 = 4;
/// Correct the pointers of the markers.
const MEND_MARKERS: u8 = 8;
/// Limit held bytes to [`LITTLE_BYTES`].
const LITTLE: u8 = 16;
/// The upper layer accepts ULPDUs only as far as steps grant it.
const WITHHOLD: u8 = 32;
/// The upper layer refuses early placement of ULPDUs that begin with an odd byte.
const REFUSE_EARLY: u8 = 64;
/// Frames span several chunks.
const CHUNKS: u8 = 128;

/// A responder's start-up frame of revision 1, without private data.
const REPLY: &[u8; 20] = b"MPA ID Rep Frame\0\x01\0\0";
const LITTLE_BYTES: usize = 4096;

/// Runs one input.
pub fn target(data: &[u8]) {
    let mut input = Input::new(data);
    let settings = input.u8();
    let count = input.u8();
    let mut steps = Input::new(input.bytes(usize::from(count) * 4));
    let mut stream = input.rest().to_vec();
    let (markers, crc) = (settings & MARKERS != 0, settings & CRC != 0);
    mend(&mut stream, markers, settings & MEND_CRC != 0 && crc, settings & MEND_MARKERS != 0);
    let reference = Reference::read(&stream, markers, crc);

    let mut end = connected(settings);
    let mut changed = false;
    while !steps.is_empty() {
        let (offset, what) = (usize::from(steps.u16()), steps.u16());
        match what >> 12 {
            15 => end.grant(usize::from(what & 15)),
            14 => {
                changed = true;
                deliver(&mut end, &stream, offset, usize::from(what & 0xff) + 1, (offset % 255) as u8 + 1);
            }
            _ => deliver(&mut end, &stream, offset, usize::from(what & 0xfff), 0),
        }
    }
    complete(&mut end, &stream);
    compare(&end, &reference, changed);
    end.peer_closed();
    end.over();
}

fn connected(settings: u8) -> End {
    let config = MpaConfig {
        markers: if settings & MARKERS != 0 { Markers::Require } else { Markers::Off },
        crc: settings & CRC != 0,
        revision: RequestRevision::One,
        hold_bytes: if settings & LITTLE != 0 { LITTLE_BYTES } else { 1 << 20 },
        ..MpaConfig::default()
    };
    let mut end = End::initiator(config);
    if settings & CHUNKS != 0 {
        end.link = FuzzLink::new(256);
    }
    end.ulp.refuses_early = settings & REFUSE_EARLY != 0;
    end.ulp.grants = (settings & WITHHOLD != 0).then_some(0);
    end.segment(0, REPLY);
    assert!(matches!(end.ulp.events[..], [Event::Established { .. }]));
    end
}

/// Delivers a piece of the stream, with `flip` applied to its middle byte.
fn deliver(end: &mut End, stream: &[u8], offset: usize, len: usize, flip: u8) {
    let to = (offset + len).min(stream.len());
    let Some(piece) = stream.get(offset..to).filter(|piece| !piece.is_empty()) else { return };
    let mut piece = piece.to_vec();
    let middle = piece.len() / 2;
    piece[middle] ^= flip;
    end.segment(REPLY.len() + offset, &piece);
}

/// Delivers all missing pieces in order; the upper layer accepts everything.
fn complete(end: &mut End, stream: &[u8]) {
    end.grant(usize::MAX / 2);
    while let Some(rest) = stream.get(end.contiguous - REPLY.len()..).filter(|rest| !rest.is_empty()) {
        let took = end.segment(end.contiguous, &rest[..SEGMENT.min(rest.len())]);
        assert!(took, "a segment in order is always taken");
    }
}

/// Compares the result with the stream; `changed` means that some delivered bytes differed from the stream.
fn compare(end: &End, reference: &Reference, changed: bool) {
    let delivered: Vec<_> = end.ulp.delivered.iter().map(|at| &end.ulp.placed[*at].0).collect();
    let errors = end.stream_errors();
    assert!(errors.len() <= 1, "one error ends a stream");
    let checks_crc = end
        .ulp
        .events
        .iter()
        .any(|e| matches!(e, Event::Established { agreed: Agreed::Mpa(agreed), .. } if agreed.crc));
    if changed && !checks_crc {
        return;
    }
    let common = reference.ulpdus.iter().zip(&delivered).take_while(|(a, b)| a == *b).count();
    assert_eq!(common, delivered.len(), "a delivered ULPDU is not in the stream");
    if changed {
        return;
    }
    if reference.error.is_some() {
        assert!(!errors.is_empty(), "{:?} was not detected", reference.error);
    } else if !reference.lies {
        assert_eq!(errors, [], "the stream is good");
    }
    if errors.is_empty() {
        assert_eq!(delivered.len(), reference.ulpdus.len(), "not everything was delivered");
        assert!(reference.lies || end.ulp.placed.len() == delivered.len(), "a ULPDU was placed twice");
    }
}

/// Corrects the markers and CRCs of a stream's FPDUs.
fn mend(stream: &mut [u8], markers: bool, crcs: bool, pointers: bool) {
    let mut at = 0;
    while let Some(fpdu) = Fpdu::find(stream, at, markers) {
        if pointers {
            for marker in fpdu.markers(markers) {
                let back = (marker.max(fpdu.header) - fpdu.header) as u16;
                stream[marker..marker + 4].copy_from_slice(&[0, 0, (back >> 8) as u8, back as u8]);
            }
        }
        if crcs {
            let sum = crc32c::crc32c(&stream[at..fpdu.end - 4]).to_le_bytes();
            stream[fpdu.end - 4..fpdu.end].copy_from_slice(&sum);
        }
        at = fpdu.end;
    }
}

/// The position of an FPDU (RFC 5044 section 4).
#[derive(Debug)]
struct Fpdu {
    start: usize,
    /// Offset of its length field.
    header: usize,
    ulpdu: usize,
    end: usize,
}

impl Fpdu {
    /// Finds the FPDU that begins at `start`, if it is complete.
    fn find(stream: &[u8], start: usize, markers: bool) -> Option<Self> {
        let header = if markers && start.is_multiple_of(512) { start + 4 } else { start };
        let length = stream.get(header..header + 2)?;
        let ulpdu = usize::from(u16::from_be_bytes([length[0], length[1]]));
        // Length, ULPDU and pad, then the CRC, with markers at their positions.
        let mut left = (2 + ulpdu).next_multiple_of(4) + 4;
        let mut end = header;
        while left > 0 {
            if markers && end.is_multiple_of(512) {
                end += 4;
            }
            let run = if markers { left.min(512 - end % 512) } else { left };
            end += run;
            left -= run;
        }
        (end <= stream.len()).then_some(Self { start, header, ulpdu, end })
    }

    /// Offsets of its markers.
    fn markers(&self, markers: bool) -> impl Iterator<Item = usize> + use<> {
        (self.start.next_multiple_of(512)..self.end).step_by(512).filter(move |_| markers)
    }
}

/// The result of a receiver that reads the stream from start to end.
#[derive(Debug)]
struct Reference {
    ulpdus: Vec<Vec<u8>>,
    error: Option<MpaError>,
    /// The last complete FPDU is followed by a marker that does not point to the next header: a receiver that
    /// reads beyond gaps may report the error before an in-order receiver would.
    lies: bool,
}

impl Reference {
    fn read(stream: &[u8], markers: bool, crc: bool) -> Self {
        let mut this = Self { ulpdus: Vec::new(), error: None, lies: false };
        let mut at = 0;
        while let Some(fpdu) = Fpdu::find(stream, at, markers) {
            let (covered, sum) = stream[at..fpdu.end].split_at(fpdu.end - 4 - at);
            if crc && crc32c::crc32c(covered).to_le_bytes() != sum {
                this.error = Some(MpaError::Crc);
                return this;
            }
            if fpdu.markers(markers).any(|marker| !points(stream, marker, fpdu.header)) {
                this.error = Some(MpaError::MarkerMismatch);
                return this;
            }
            let is_marker = |at: &usize| markers && at % 512 < 4;
            let ulpdu = (fpdu.header + 2..fpdu.end).filter(|at| !is_marker(at)).take(fpdu.ulpdu);
            this.ulpdus.push(ulpdu.map(|at| stream[at]).collect());
            at = fpdu.end;
        }
        let header = if markers && at.is_multiple_of(512) { at + 4 } else { at };
        let tail = (at.next_multiple_of(512)..stream.len()).step_by(512);
        this.lies = markers && tail.into_iter().any(|marker| !points(stream, marker, header));
        this
    }
}

/// Whether the available bytes of the marker at `marker` point to the length field at `header`.
fn points(stream: &[u8], marker: usize, header: usize) -> bool {
    let Some(bytes) = stream.get(marker + 2..marker + 4) else { return true };
    u16::from_be_bytes([bytes[0], bytes[1] & !3]) == marker.saturating_sub(header) as u16
}
