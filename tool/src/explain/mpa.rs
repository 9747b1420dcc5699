//! MPA of one recorded connection: reads the start-up frames and the FPDUs of both directions. If the start of a
//! connection or of an FPDU is not in the capture, FPDUs are found at the start of a segment.

use std::collections::BTreeMap;

use xwarp_rnic::Versions;
use xwarp_tcp::mpa::{MpaError, MpaReply, MpaRequest, RecordedFpdus};

use super::{
    event::{Event, StartUp},
    messages::{Messages, Total, is_plausible},
    stream::Piece,
};

/// Number of segments at whose start FPDUs of unknown form are searched.
const MAX_TRIES: u32 = 64;
/// Distances of markers from the start of a segment: multiples of 4 below 512 (RFC 5044 section 4.3).
const MARKER_PHASES: std::ops::Range<u64> = 0..128;
/// Bytes of a start-up frame without private data, of the IRD and ORD in it, and of the longest (RFC 5044 section 7.1.1, RFC 6581).
const START_UP_BYTES: usize = 20;
const ENHANCED_BYTES: usize = 4;
const MAX_START_UP_BYTES: usize = START_UP_BYTES + 512;
/// Bytes kept while a start-up frame or an FPDU is incomplete. The longest FPDU has 65535 bytes, and 516 of markers.
const MAX_BYTES: usize = 1 << 17;

/// The events of both directions, with the direction.
pub type Events = Vec<(usize, Event)>;

/// MPA of a connection. Directions are 0 and 1.
#[derive(Debug, Default)]
pub struct Mpa {
    directions: [Direction; 2],
    /// The initiator's direction, when the request was seen.
    initiator: Option<usize>,
    request: Option<MpaRequest>,
    reply: Option<MpaReply>,
    versions: Versions,
    /// The capture has nothing of the peer of the direction that is read.
    alone: bool,
}

#[derive(Debug, Default)]
struct Direction {
    phase: ReadingState,
    /// Bytes that are not read yet, and the stream offset of the first.
    buffer: Vec<u8>,
    at: u64,
    messages: Messages,
    /// FPDUs read.
    fpdus: u64,
}

#[derive(Debug, Default)]
enum ReadingState {
    /// No MPA frame was seen; earlier bytes may be streaming data.
    #[default]
    StartUp,
    /// This end's start-up frame was seen, but not the peer's, which decides on markers and CRC.
    AwaitPeer,
    /// FPDUs.
    Fpdus(RecordedFpdus),
    /// The start of an FPDU is unknown.
    Search { known: Option<RecordedFpdus>, tries: u32 },
    /// Not MPA, or no longer MPA.
    Ignored,
}

impl Direction {
    /// Whether the next frame begins at `at`, and nothing of it was read.
    fn is_aligned(&self) -> bool {
        self.buffer.is_empty() && matches!(self.phase, ReadingState::Fpdus(_) | ReadingState::AwaitPeer)
    }
}

impl Mpa {
    /// The capture starts in the middle of the connection: no start-up frames can be expected.
    pub fn begin_in_the_middle(&mut self) {
        for direction in &mut self.directions {
            direction.phase = ReadingState::Search { known: None, tries: 0 };
        }
    }

    /// The direction in which the MPA Request was sent.
    pub fn initiator(&self) -> Option<usize> {
        self.initiator
    }

    /// Whether any MPA frame was seen.
    pub fn was_seen(&self) -> bool {
        self.initiator.is_some() || self.reply.is_some() || self.directions.iter().any(|d| d.fpdus > 0)
    }

    /// Messages of a direction by kind.
    pub fn totals(&self, direction: usize) -> BTreeMap<&'static str, Total> {
        self.directions
            .get(direction)
            .map(|direction| direction.messages.totals().clone())
            .unwrap_or_default()
    }

    /// Number of FPDUs in a direction.
    pub fn fpdus(&self, direction: usize) -> u64 {
        self.directions.get(direction).map_or(0, |direction| direction.fpdus)
    }

    /// Reads the next bytes of a direction. `alone`: the capture has nothing of the peer.
    pub fn read(
        &mut self,
        (direction, alone): (usize, bool),
        piece: &Piece<'_>,
        frame: u64,
        out: &mut Events,
    ) {
        self.alone = alone;
        match *piece {
            Piece::Bytes(at, bytes, starts_segment) => {
                self.take(direction, at, bytes, starts_segment);
                self.advance(direction, frame, out);
                // Both directions continue when the second start-up frame decides on their form.
                self.advance(1 - direction.min(1), frame, out);
            }
            Piece::Missing(_, to) | Piece::Cut(_, to) => self.skip(direction, to, frame, out),
        }
        if let Some(this) = self.directions.get_mut(direction)
            && this.buffer.len() > MAX_BYTES
        {
            this.buffer.clear();
            this.phase = ReadingState::Ignored;
        }
    }

    /// Appends bytes to those that are not read yet.
    fn take(&mut self, direction: usize, at: u64, bytes: &[u8], starts_segment: bool) {
        let Some(this) = self.directions.get_mut(direction) else { return };
        let mut bytes = bytes;
        if this.is_aligned() && at < this.at {
            // The rest of a frame of which the capture has only the first bytes.
            let rest = usize::try_from(this.at - at).unwrap_or(usize::MAX);
            bytes = bytes.get(rest..).unwrap_or_default();
        } else if this.buffer.is_empty()
            || (starts_segment && matches!(this.phase, ReadingState::Search { .. }))
        {
            this.buffer.clear();
            this.at = at;
        }
        this.buffer.extend_from_slice(bytes);
    }

    /// The capture lacks the next bytes up to offset `to`. If they end within a frame whose length is known, the next frame begins
    /// after it, else it is searched.
    fn skip(&mut self, direction: usize, to: u64, frame: u64, out: &mut Events) {
        let Some(this) = self.directions.get_mut(direction) else { return };
        match this.phase {
            ReadingState::StartUp => {
                if let Some(len) = cut_start_up(&this.buffer) {
                    this.buffer.resize(len, 0);
                    self.advance(direction, frame, out);
                    self.advance(1 - direction.min(1), frame, out);
                }
            }
            ReadingState::Fpdus(fpdus) => self.read_cut_fpdu(direction, fpdus, frame, out),
            _ => {}
        }
        let Some(this) = self.directions.get_mut(direction) else { return };
        if this.is_aligned() && to <= this.at {
            return;
        }
        this.buffer.clear();
        this.messages.cut();
        this.phase = match this.phase {
            ReadingState::Fpdus(known) => ReadingState::Search { known: Some(known), tries: 0 },
            ReadingState::StartUp | ReadingState::AwaitPeer => ReadingState::Search { known: None, tries: 0 },
            ReadingState::Search { known, tries } => ReadingState::Search { known, tries },
            ReadingState::Ignored => ReadingState::Ignored,
        };
    }

    /// Reads an FPDU of which the capture has only the first bytes.
    fn read_cut_fpdu(&mut self, direction: usize, fpdus: RecordedFpdus, frame: u64, out: &mut Events) {
        let [first, second] = &mut self.directions;
        let (this, peer) = if direction == 0 { (first, second) } else { (second, first) };
        let pieces = [&this.buffer[..]];
        if let Some(len) = fpdus.len(this.at, &this.buffer)
            && let Some((ulpdu, whole)) = fpdus.begin_of_ulpdu(this.at, &pieces)
        {
            this.fpdus += 1;
            this.messages.read((&ulpdu, whole), self.versions, frame, &peer.messages, &mut |event| {
                out.push((direction, event));
            });
            this.buffer.clear();
            this.at += len as u64;
        }
    }

    /// Whether the peer's start-up frame cannot be expected: it was not captured.
    fn awaits_in_vain(&self, direction: usize) -> bool {
        let peer = self.directions.get(1 - direction.min(1)).map(|peer| &peer.phase);
        self.alone || matches!(peer, Some(ReadingState::Search { .. } | ReadingState::Ignored))
    }

    fn advance(&mut self, direction: usize, frame: u64, out: &mut Events) {
        let in_vain = self.awaits_in_vain(direction);
        let Some(this) = self.directions.get_mut(direction) else { return };
        if this.buffer.is_empty() {
            return;
        }
        match this.phase {
            ReadingState::StartUp => self.read_start_up(direction, frame, out),
            ReadingState::AwaitPeer if in_vain => {
                this.phase = ReadingState::Search { known: None, tries: 0 };
                self.advance(direction, frame, out);
            }
            ReadingState::AwaitPeer => {}
            ReadingState::Fpdus(_) => self.read_fpdus(direction, frame, out),
            ReadingState::Search { known, tries } => {
                let found = search(this.at, &this.buffer, known, self.versions);
                match found {
                    Some(fpdus) => {
                        if known.is_none() {
                            out.push((
                                direction,
                                Event::Found { markers: fpdus.has_markers(), crc: fpdus.has_crc() },
                            ));
                        }
                        this.phase = ReadingState::Fpdus(fpdus);
                        self.read_fpdus(direction, frame, out);
                    }
                    None if known.is_none() && tries == MAX_TRIES => this.phase = ReadingState::Ignored,
                    None => this.phase = ReadingState::Search { known, tries: tries + 1 },
                }
            }
            ReadingState::Ignored => this.buffer.clear(),
        }
    }

    fn read_start_up(&mut self, direction: usize, frame: u64, out: &mut Events) {
        let Some(this) = self.directions.get_mut(direction) else { return };
        let consumed = match MpaRequest::parse(&this.buffer) {
            Ok(Some((request, len))) => {
                out.push((direction, Event::MpaRequest(StartUp::from(&request))));
                (self.initiator, self.request) = (Some(direction), Some(request));
                len
            }
            Ok(None) => return,
            Err(MpaError::SameRole) => match MpaReply::parse(&this.buffer) {
                Ok(Some((reply, len))) => {
                    let start_up = StartUp::from(&reply);
                    out.push((direction, Event::MpaReply { rejected: reply.rejected, start_up }));
                    self.reply = Some(reply);
                    len
                }
                Ok(None) => return,
                Err(error) => return self.bad_start_up(direction, error, out),
            },
            // Streaming data, or another protocol: the next segment may begin with a start-up frame.
            Err(MpaError::InvalidKey) => {
                this.buffer.clear();
                return;
            }
            Err(error) => return self.bad_start_up(direction, error, out),
        };
        this.buffer.drain(..consumed);
        this.at += consumed as u64;
        this.phase = ReadingState::AwaitPeer;
        self.agree(out);
        self.advance(direction, frame, out);
    }

    fn bad_start_up(&mut self, direction: usize, error: MpaError, out: &mut Events) {
        out.push((direction, Event::BadFpdu { error: format!("start-up frame: {error}") }));
        for this in &mut self.directions {
            this.buffer.clear();
            this.phase = ReadingState::Ignored;
        }
    }

    /// Applies both start-up frames (RFC 5044 section 7.1.1): M requests markers in the stream that the sender of the
    /// frame receives, and CRC is used if either end wants it.
    fn agree(&mut self, out: &mut Events) {
        let (Some(initiator), Some(request), Some(reply)) = (self.initiator, &self.request, &self.reply)
        else {
            return;
        };
        if reply.rejected {
            for this in &mut self.directions {
                this.phase = ReadingState::Ignored;
            }
            return;
        }
        let crc = request.crc || reply.crc;
        let warning = if request.revision != reply.revision {
            Some("the two ends sent different revisions")
        } else if let (Some(ours), Some(theirs)) = (request.enhanced, reply.enhanced)
            && (theirs.ord > ours.ird || ours.ord > theirs.ird)
        {
            Some("one end's ORD exceeds the other's IRD")
        } else {
            None
        };
        let (markers_received, markers_sent) = (request.markers, reply.markers);
        out.push((
            initiator,
            Event::Agreed { revision: reply.revision, crc, markers_received, markers_sent, warning },
        ));
        self.versions = if reply.revision == 0 { Versions::Rdmac } else { Versions::Ietf };
        for (direction, this) in self.directions.iter_mut().enumerate() {
            if matches!(this.phase, ReadingState::AwaitPeer) {
                let markers = if direction == initiator { markers_sent } else { markers_received };
                this.phase = ReadingState::Fpdus(RecordedFpdus::new(this.at, markers, crc));
            }
        }
    }

    fn read_fpdus(&mut self, direction: usize, frame: u64, out: &mut Events) {
        let [first, second] = &mut self.directions;
        let (this, peer) = if direction == 0 { (first, second) } else { (second, first) };
        let ReadingState::Fpdus(fpdus) = this.phase else { return };
        let mut read = 0;
        while let Some(rest) = this.buffer.get(read..)
            && let Some(len) = fpdus.len(this.at, rest)
            && let Some(fpdu) = rest.get(..len)
        {
            let pieces = [fpdu];
            match fpdus.ulpdu(this.at, &pieces) {
                Ok(ulpdu) => {
                    this.fpdus += 1;
                    let ulpdu = (&ulpdu, ulpdu.len());
                    this.messages.read(ulpdu, self.versions, frame, &peer.messages, &mut |event| {
                        out.push((direction, event));
                    });
                }
                Err(error) => {
                    out.push((direction, Event::BadFpdu { error: error.to_string() }));
                    this.messages.cut();
                    if error == MpaError::MarkerMismatch {
                        this.buffer.clear();
                        this.phase = ReadingState::Search { known: Some(fpdus), tries: 0 };
                        return;
                    }
                }
            }
            this.at += len as u64;
            read += len;
        }
        this.buffer.drain(..read.min(this.buffer.len()));
    }
}

/// The length of a start-up frame of which the capture has only the first bytes, if it has all fields but private data.
fn cut_start_up(bytes: &[u8]) -> Option<usize> {
    let length = *bytes.get(START_UP_BYTES - 2..)?.first_chunk()?;
    let len = START_UP_BYTES + usize::from(u16::from_be_bytes(length));
    (bytes.len() >= START_UP_BYTES + ENHANCED_BYTES && bytes.len() < len && len <= MAX_START_UP_BYTES)
        .then_some(len)
}

/// Finds FPDUs at the start of a segment at this stream offset; the first FPDU must end within the bytes.
fn search(at: u64, bytes: &[u8], known: Option<RecordedFpdus>, versions: Versions) -> Option<RecordedFpdus> {
    let begins = |fpdus: &RecordedFpdus| {
        let len = fpdus.can_begin(at).then(|| fpdus.len(at, bytes)).flatten()?;
        let pieces = [bytes.get(..len)?];
        is_plausible(&fpdus.ulpdu(at, &pieces).ok()?, versions).then_some(len)
    };
    if let Some(known) = known {
        return begins(&known).map(|_| known);
    }
    let without_markers = RecordedFpdus::new(at, false, true);
    if begins(&without_markers).is_some() {
        return Some(without_markers);
    }
    // The last marker before the segment, or at its start.
    let with_markers = MARKER_PHASES
        .filter_map(|phase| Some(RecordedFpdus::new(at.checked_sub(4 * phase)?, true, true)))
        .find(|fpdus| begins(fpdus).is_some());
    // Without a CRC only a segment that consists of whole FPDUs is certain enough.
    with_markers.or_else(|| {
        let fpdus = RecordedFpdus::new(at, false, false);
        (begins(&fpdus)? == bytes.len()).then_some(fpdus)
    })
}
