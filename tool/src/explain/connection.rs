//! One recorded TCP connection: set-up, retransmissions, windows, the end, and MPA above it.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use serde::Serialize;

use super::{
    event::{Event, milliseconds},
    health::{Counts, Finding, Health},
    messages::Total,
    mpa::{Events, Mpa},
    packet::Segment,
    stream::{Piece, Stream, StreamPosition},
};

/// Age of a gap from which a segment that fills it counts as retransmitted, if the round-trip time is unknown.
const LATE: Duration = Duration::from_millis(3);
/// Age of a gap from which its bytes count as not captured, if the capture has nothing of the receiver.
const LOST: Duration = Duration::from_secs(2);

/// A connection.
#[derive(Debug)]
pub struct Connection {
    /// The ends: the one that sent the SYN first, if it is in the capture.
    pub ends: [SocketAddr; 2],
    directions: [Direction; 2],
    mpa: Mpa,
    health: Health,
    state: State,
    begin: Option<Duration>,
    last: Option<Duration>,
    handshake: Option<Duration>,
    frames: u64,
    reset: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// SYN seen, with this sequence number.
    SynSent(u32),
    /// SYN and SYN-ACK seen.
    SynReceived(u32),
    /// Data may flow; the SYN had this sequence number.
    Open(Option<u32>),
}

#[derive(Debug, Default)]
struct Direction {
    stream: Stream,
    frames: u64,
    fin: bool,
    window_closed: bool,
    segments: u64,
    retransmissions: u64,
    retransmitted_bytes: u64,
    out_of_order: u64,
    not_captured_bytes: u64,
    congestion_marks: u64,
    bad_fpdus: u64,
}

/// A connection's summary.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Number in the capture, from 1.
    pub connection: usize,
    /// Frames.
    pub frames: u64,
    /// Whether the SYN is in the capture.
    pub begins_in_the_middle: bool,
    /// Time from the first to the last frame.
    pub seconds: Option<f64>,
    /// Time from the SYN to the acknowledgement of the SYN-ACK.
    pub handshake_ms: Option<f64>,
    /// Time from the first frame to the first byte of data.
    pub first_byte_ms: Option<f64>,
    /// Whether MPA was recognised.
    pub mpa: bool,
    /// What slowed it.
    pub health: Vec<Finding>,
    /// How it ended.
    pub end: String,
    /// The traffic of each end.
    pub ends: [EndSummary; 2],
}

/// The traffic of one end.
#[derive(Debug, Serialize)]
pub struct EndSummary {
    /// Name in the events.
    pub name: &'static str,
    /// Address and port.
    pub address: SocketAddr,
    /// Whether it sent the MPA Request.
    pub initiator: bool,
    /// Segments with payload.
    pub segments: u64,
    /// Payload bytes, without retransmissions.
    pub bytes: u64,
    /// Retransmitted segments and bytes.
    pub retransmissions: u64,
    /// Bytes of them.
    pub retransmitted_bytes: u64,
    /// Segments that overtook earlier ones.
    pub out_of_order: u64,
    /// Bytes that are missing in the capture.
    pub not_captured_bytes: u64,
    /// Packets that a router marked: congestion experienced.
    pub congestion_marks: u64,
    /// FPDUs.
    pub fpdus: u64,
    /// Invalid FPDUs.
    pub bad_fpdus: u64,
    /// Messages by kind.
    pub messages: BTreeMap<&'static str, Total>,
}

impl EndSummary {
    fn counts(&self) -> Counts {
        Counts {
            end: self.name,
            segments: self.segments,
            out_of_order: self.out_of_order,
            retransmissions: self.retransmissions,
            retransmitted_bytes: self.retransmitted_bytes,
            bad_fpdus: self.bad_fpdus,
            congestion_marks: self.congestion_marks,
        }
    }
}

impl Connection {
    /// The connection of a segment; its sender becomes end 0 unless the segment is a SYN-ACK.
    pub fn new(segment: &Segment<'_>, time: Option<Duration>) -> Self {
        let answer = segment.syn && segment.ack.is_some();
        let (from, to) = (segment.from, segment.to);
        Self {
            ends: if answer { [to, from] } else { [from, to] },
            directions: Default::default(),
            mpa: Mpa::default(),
            health: Health::default(),
            state: State::Open(None),
            begin: time,
            last: time,
            handshake: None,
            frames: 0,
            reset: None,
        }
    }

    /// Whether a SYN starts a new connection between the same ends.
    pub fn is_succeeded_by(&self, segment: &Segment<'_>) -> bool {
        let begun = match self.state {
            State::SynSent(seq) | State::SynReceived(seq) | State::Open(Some(seq)) => Some(seq),
            State::Open(None) => None,
        };
        segment.syn && segment.ack.is_none() && self.frames > 0 && begun != Some(segment.seq)
    }

    /// Time of the last frame.
    pub fn last(&self) -> Option<Duration> {
        self.last
    }

    /// Names of the ends.
    pub fn names(&self) -> [&'static str; 2] {
        if self.is_in_the_middle() { ["A", "B"] } else { ["client", "server"] }
    }

    fn is_in_the_middle(&self) -> bool {
        self.state == State::Open(None)
    }

    /// Reads a segment. `held` counts the memory of all connections, `most` limits it.
    pub fn read(
        &mut self,
        segment: &Segment<'_>,
        (frame, time): (u64, Option<Duration>),
        held: &mut usize,
        most: usize,
        out: &mut Events,
    ) {
        let from = usize::from(segment.from != self.ends[0]);
        let first = self.frames == 0;
        self.frames += 1;
        self.last = time.or(self.last);
        self.health.read(segment, from, time, frame);
        if segment.syn {
            self.read_syn(segment, from, first, out);
        } else if first {
            self.mpa.begin_in_the_middle();
            out.push((from, Event::Middle));
        }
        self.directions[from].frames += 1;
        self.directions[from].congestion_marks += u64::from(segment.congestion);
        if segment.rst {
            if self.reset.is_none() {
                out.push((from, Event::Reset));
            }
            self.reset.get_or_insert(from);
            return;
        }
        if let Some(ack) = segment.ack {
            self.read_ack(segment, (from, ack), (frame, time), held, out);
        }
        if segment.len > 0 && !segment.syn {
            self.read_payload(segment, from, (frame, time), (held, most), out);
        }
        if segment.fin && !self.directions[from].fin {
            self.directions[from].fin = true;
            out.push((from, Event::Fin));
        }
    }

    fn read_syn(&mut self, segment: &Segment<'_>, from: usize, first: bool, out: &mut Events) {
        let answer = segment.ack.is_some();
        let repeated = match self.state {
            State::SynSent(_) => !answer,
            State::SynReceived(_) => true,
            State::Open(_) => !first,
        };
        if repeated {
            self.directions[from].retransmissions += 1;
            out.push((from, Event::Retransmission { bytes: 0 }));
            return;
        }
        self.state = match self.state {
            State::SynSent(seq) if answer => State::SynReceived(seq),
            _ if answer => State::SynReceived(segment.ack.unwrap_or_default().wrapping_sub(1)),
            _ => State::SynSent(segment.seq),
        };
        self.directions[from].stream.begin(segment.seq);
        let options = &segment.options;
        out.push((
            from,
            Event::Syn {
                answer,
                mss: options.mss,
                window_scale: options.window_scale,
                sack_permitted: options.sack_permitted,
                timestamps: options.timestamps.is_some(),
            },
        ));
    }

    fn read_ack(
        &mut self,
        segment: &Segment<'_>,
        (from, ack): (usize, u32),
        (frame, time): (u64, Option<Duration>),
        held: &mut usize,
        out: &mut Events,
    ) {
        if let State::SynReceived(seq) = self.state
            && !segment.syn
        {
            self.state = State::Open(Some(seq));
            // A handshake whose SYN is not in the capture has no length.
            self.handshake = self
                .directions
                .iter()
                .all(|d| d.stream.has_begun())
                .then(|| time.zip(self.begin).and_then(|(time, begin)| time.checked_sub(begin)))
                .flatten();
            out.push((from, Event::Connected { handshake_ms: self.handshake.map(milliseconds) }));
        }
        let closed = segment.window == 0;
        if !segment.syn && closed != self.directions[from].window_closed {
            self.directions[from].window_closed = closed;
            out.push((from, Event::Window { closed }));
        }
        let to = 1 - from;
        let Self { directions, mpa, .. } = self;
        let mut missing = Missing::default();
        directions[to].stream.acknowledge(ack, held, &mut |piece| {
            missing.count(&piece);
            mpa.read((to, false), &piece, frame, out);
        });
        self.report_missing(to, &missing, out);
    }

    fn read_payload(
        &mut self,
        segment: &Segment<'_>,
        from: usize,
        (frame, time): (u64, Option<Duration>),
        (held, most): (&mut usize, usize),
        out: &mut Events,
    ) {
        let alone = self.directions[1 - from].frames == 0;
        let Self { directions, mpa, health, .. } = self;
        let direction = &mut directions[from];
        direction.stream.begin_in_the_middle(segment.seq);
        let (mut missing, bytes) = (Missing::default(), segment.len as u64);
        let mut inner = Events::new();
        let arrival = direction.stream.add(
            (segment.seq, segment.len, segment.payload),
            time,
            held,
            most,
            &mut |piece| {
                missing.count(&piece);
                mpa.read((from, alone), &piece, frame, &mut inner);
            },
        );
        if alone {
            direction.stream.give_up_gaps(time, LOST, held, &mut |piece| {
                missing.count(&piece);
                mpa.read((from, alone), &piece, frame, &mut inner);
            });
        }
        direction.segments += 1;
        match arrival {
            StreamPosition::Repeated => {
                direction.retransmissions += 1;
                direction.retransmitted_bytes += bytes;
                out.push((from, Event::Retransmission { bytes }));
            }
            StreamPosition::BeyondGap(gap_bytes) => {
                direction.out_of_order += 1;
                out.push((from, Event::OutOfOrder { gap_bytes }));
            }
            StreamPosition::FillsGap(Some(after)) if after >= self.handshake.unwrap_or(LATE) => {
                direction.retransmissions += 1;
                direction.retransmitted_bytes += bytes;
                health.filled(from, after);
                out.push((from, Event::LateSegment { bytes, after_ms: milliseconds(after) }));
            }
            StreamPosition::Probe => {
                direction.segments -= 1;
                out.push((from, Event::KeepaliveProbe));
            }
            StreamPosition::InOrder | StreamPosition::FillsGap(_) | StreamPosition::Earlier => {}
        }
        self.report(from, &missing, inner, out);
    }

    /// Reports what the bytes of one direction showed: those that are not in the capture, then `found`.
    fn report(&mut self, from: usize, missing: &Missing, found: Events, out: &mut Events) {
        self.report_missing(from, missing, out);
        for (from, event) in found {
            self.directions[from].bad_fpdus += u64::from(matches!(event, Event::BadFpdu { .. }));
            out.push((from, event));
        }
    }

    fn report_missing(&mut self, from: usize, missing: &Missing, out: &mut Events) {
        self.directions[from].not_captured_bytes += missing.lost + missing.cut;
        if missing.lost > 0 {
            out.push((from, Event::NotCaptured { bytes: missing.lost }));
        }
    }

    /// Reads the segments that wait for earlier ones at the end of the capture.
    pub fn finish(&mut self, frame: u64, held: &mut usize, out: &mut Events) {
        for from in [0, 1] {
            let alone = self.directions[1 - from].frames == 0;
            let Self { directions, mpa, .. } = self;
            let mut missing = Missing::default();
            let mut inner = Events::new();
            directions[from].stream.finish(held, &mut |piece| {
                missing.count(&piece);
                mpa.read((from, alone), &piece, frame, &mut inner);
            });
            self.report(from, &missing, inner, out);
        }
    }

    /// The summary; `number` is the connection's.
    pub fn summary(&self, number: usize) -> Summary {
        let names = self.names();
        let alone = [0, 1].into_iter().find(|from| self.directions[1 - from].frames == 0);
        let alone = alone.filter(|from| self.directions[*from].segments > 0);
        let end = match (self.reset, self.directions[0].fin, self.directions[1].fin) {
            (Some(by), ..) => format!("reset by {}", names[by]),
            (None, true, true) => "closed by both ends".to_owned(),
            (None, true, false) => format!("only {} has closed its direction", names[0]),
            (None, false, true) => format!("only {} has closed its direction", names[1]),
            (None, false, false) => match self.state {
                _ if alone.is_some() => "the end is not in the capture".to_owned(),
                State::SynSent(_) => "the SYN was not answered".to_owned(),
                State::SynReceived(_) => "the handshake was not completed".to_owned(),
                State::Open(_) => "still open at the end of the capture".to_owned(),
            },
        };
        let end = match alone {
            Some(from) => format!("{end}; only frames of {} are in the capture", names[from]),
            None => end,
        };
        let end_of = |from: usize| {
            let direction = &self.directions[from];
            EndSummary {
                name: names[from],
                address: self.ends[from],
                initiator: self.mpa.initiator() == Some(from),
                segments: direction.segments,
                bytes: direction.stream.delivered(),
                retransmissions: direction.retransmissions,
                retransmitted_bytes: direction.retransmitted_bytes,
                out_of_order: direction.out_of_order,
                not_captured_bytes: direction.not_captured_bytes,
                congestion_marks: direction.congestion_marks,
                fpdus: self.mpa.fpdus(from),
                bad_fpdus: direction.bad_fpdus,
                messages: self.mpa.totals(from),
            }
        };
        let ends = [end_of(0), end_of(1)];
        let first_byte = [0, 1].iter().filter_map(|from| self.health.first_byte(*from)).min();
        Summary {
            connection: number,
            frames: self.frames,
            begins_in_the_middle: self.is_in_the_middle(),
            seconds: self.last.zip(self.begin).map(|(last, begin)| last.saturating_sub(begin).as_secs_f64()),
            handshake_ms: self.handshake.map(milliseconds),
            first_byte_ms: first_byte
                .zip(self.begin)
                .map(|(at, begin)| milliseconds(at.saturating_sub(begin))),
            mpa: self.mpa.was_seen(),
            health: self.health.findings(ends.each_ref().map(EndSummary::counts)),
            end,
            ends,
        }
    }
}

/// Bytes that are not in the capture: of whole segments, and of the ends of segments.
#[derive(Debug, Default)]
struct Missing {
    lost: u64,
    cut: u64,
}

impl Missing {
    fn count(&mut self, piece: &Piece<'_>) {
        match *piece {
            Piece::Missing(from, to) => self.lost += to - from,
            Piece::Cut(from, to) => self.cut += to - from,
            Piece::Bytes(..) => {}
        }
    }
}
