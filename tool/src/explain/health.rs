//! What slowed a recorded connection: silences with and without unacknowledged bytes, closed and filled windows, time to the first
//! byte. Times are those of the place where the capture was made.

use std::{fmt, time::Duration};

use serde::Serialize;
use xwarp_tcp::seq::SeqNum;

use super::{
    event::{count, milliseconds},
    packet::Segment,
};

/// Shortest time without a frame that counts as a silence: longer than delayed acknowledgements (RFC 1122 section 4.2.3.2 allows half a
/// second, implementations wait 40 ms) and than round trips in a data centre.
const SILENCE: Duration = Duration::from_millis(100);

/// RFC 7323 section 2.3.
const MAX_WINDOW_SCALE: u8 = 14;

/// Observations of a connection. Directions are 0 and 1.
#[derive(Debug, Default)]
pub struct Health {
    last: Option<(Duration, u64)>,
    /// Nothing was on its way: the programs had nothing to send.
    idle: WaitTotal,
    /// Bytes, a SYN or a FIN were not acknowledged.
    unanswered: WaitTotal,
    directions: [Direction; 2],
}

#[derive(Debug, Default)]
struct Direction {
    /// Whether the capture has frames of it.
    seen: bool,
    /// The sequence number after the last byte sent, and after the last one acknowledged.
    sent: Option<SeqNum>,
    acknowledged: Option<SeqNum>,
    first_byte: Option<Duration>,
    /// The shift of the window field, if its SYN offers one (RFC 7323 section 2.2).
    scale: Option<u8>,
    window_bytes: Option<u64>,
    closed_since: Option<(Duration, u64)>,
    closed: WaitTotal,
    full_windows: u64,
    smallest_full_window_bytes: Option<u64>,
    longest_recovery: Option<Duration>,
}

/// Several waits of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct WaitTotal {
    count: u64,
    #[serde(rename = "total_ms", serialize_with = "in_milliseconds")]
    total: Duration,
    #[serde(rename = "longest_ms", serialize_with = "in_milliseconds")]
    longest: Duration,
    /// The frame before the longest one.
    after_frame: u64,
}

fn in_milliseconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(milliseconds(*time))
}

impl WaitTotal {
    fn add(&mut self, time: Duration, after_frame: u64) {
        self.count += 1;
        self.total += time;
        if time > self.longest {
            (self.longest, self.after_frame) = (time, after_frame);
        }
    }
}

impl fmt::Display for WaitTotal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [total, longest] = [self.total, self.longest].map(milliseconds);
        write!(f, "{total:.3} ms")?;
        if self.count > 1 {
            write!(f, " in {} times, the longest of {longest:.3} ms", self.count)?;
        }
        write!(f, " after frame {}", self.after_frame)
    }
}

/// A reason why a connection was slower than it could be. `end` is the name of the end whose bytes or whose window it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Finding {
    /// Segments that were sent again.
    Retransmissions {
        end: &'static str,
        segments: u64,
        of_segments: u64,
        bytes: u64,
        longest_recovery_ms: Option<f64>,
    },
    /// Segments that overtook others.
    Reordering { end: &'static str, segments: u64 },
    /// Packets that a router marked.
    CongestionMarks { end: &'static str, packets: u64 },
    /// FPDUs with a wrong CRC or markers.
    BadFpdus { end: &'static str, fpdus: u64 },
    /// The receiver's window was closed: its program or its posted receives did not keep up.
    ClosedWindow { end: &'static str, waits: WaitTotal },
    /// Segments that filled the receiver's window: a larger buffer would let more bytes travel.
    FullWindow { end: &'static str, segments: u64, smallest_window_bytes: u64 },
    /// Silences while bytes were not acknowledged: losses until a time-out, or a peer that stopped.
    Unanswered { waits: WaitTotal },
    /// Silences while nothing was on its way: the programs sent nothing.
    Idle { waits: WaitTotal },
}

/// What was counted of an end's segments.
#[derive(Debug, Clone, Copy)]
pub struct Counts {
    /// The end's name.
    pub end: &'static str,
    /// Segments with payload, and those that overtook earlier ones.
    pub segments: u64,
    pub out_of_order: u64,
    /// Segments that were sent again, and their bytes.
    pub retransmissions: u64,
    pub retransmitted_bytes: u64,
    /// FPDUs with a wrong CRC or markers.
    pub bad_fpdus: u64,
    /// Packets that a router marked.
    pub congestion_marks: u64,
}

impl Finding {
    /// Whether the connection was slower than its programs.
    pub fn is_slow(&self) -> bool {
        !matches!(self, Self::Idle { .. })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Retransmissions { end, segments, of_segments, bytes, longest_recovery_ms } => {
                let share = *segments as f64 / (*of_segments).max(1) as f64 * 100.0;
                let segments = count(*segments, "segment");
                write!(f, "{end} retransmitted {segments} ({share:.1} %) of {}", count(*bytes, "byte"))?;
                longest_recovery_ms
                    .map_or(Ok(()), |ms| write!(f, "; the longest gap was filled after {ms:.3} ms"))
            }
            Self::Reordering { end, segments } => {
                write!(f, "{} of {end} arrived before earlier ones", count(*segments, "segment"))
            }
            Self::CongestionMarks { end, packets } => {
                write!(f, "routers marked {} of {end} with congestion", count(*packets, "packet"))
            }
            Self::BadFpdus { end, fpdus } => write!(f, "{} of {end} broken", count(*fpdus, "FPDU")),
            Self::ClosedWindow { end, waits } => {
                write!(f, "the receive window of {end} was closed for {waits}: its program did not keep up")
            }
            Self::FullWindow { end, segments, smallest_window_bytes } => write!(
                f,
                "{} filled the receive window of {end} ({}): a larger receive buffer would help",
                count(*segments, "segment"),
                count(*smallest_window_bytes, "byte")
            ),
            Self::Unanswered { waits } => {
                write!(
                    f,
                    "silent for {waits} while bytes were not acknowledged: losses, or a peer that stopped"
                )
            }
            Self::Idle { waits } => {
                write!(f, "silent for {waits}, with nothing on its way: the programs sent nothing")
            }
        }
    }
}

impl Direction {
    fn is_unacknowledged(&self) -> bool {
        match (self.sent, self.acknowledged) {
            (Some(sent), Some(acknowledged)) => sent.after(acknowledged),
            (sent, None) => sent.is_some(),
            (None, Some(_)) => false,
        }
    }
}

impl Health {
    /// Observes a segment of a direction.
    pub fn read(&mut self, segment: &Segment<'_>, from: usize, time: Option<Duration>, frame: u64) {
        let [first, second] = &mut self.directions;
        let (this, peer) = if from == 0 { (first, second) } else { (second, first) };
        this.seen = true;
        // Of one direction alone, nobody knows what was acknowledged.
        if let (Some(time), Some((last, before)), true) = (time, self.last, peer.seen) {
            let silence = time.saturating_sub(last);
            let closed = this.closed_since.is_some() || peer.closed_since.is_some();
            if silence >= SILENCE && !closed {
                let unanswered = this.is_unacknowledged() || peer.is_unacknowledged();
                let waits = if unanswered { &mut self.unanswered } else { &mut self.idle };
                waits.add(silence, before);
            }
        }
        self.last = time.map(|time| (time, frame)).or(self.last);
        if segment.syn {
            this.scale = segment.options.window_scale;
        }
        if segment.len > 0 && !segment.syn {
            this.first_byte = this.first_byte.or(time);
        }
        let bytes = segment.len as u32 + u32::from(segment.syn) + u32::from(segment.fin);
        let end = SeqNum::new(segment.seq).add(bytes);
        let new = this.sent.is_none_or(|sent| end.after(sent));
        if bytes > 0 {
            this.sent = Some(this.sent.map_or(end, |sent| sent.latest(end)));
        }
        if new
            && segment.len > 0
            && let (Some(window), Some(acknowledged)) =
                (peer.window_bytes.filter(|w| *w > 0), this.acknowledged)
            && u64::from(end.since(acknowledged).max(0).unsigned_abs()) + segment.len as u64 > window
        {
            peer.full_windows += 1;
            let smallest = peer.smallest_full_window_bytes.unwrap_or(window);
            peer.smallest_full_window_bytes = Some(smallest.min(window));
        }
        if let Some(ack) = segment.ack {
            let ack = SeqNum::new(ack);
            peer.acknowledged = Some(peer.acknowledged.map_or(ack, |acknowledged| acknowledged.latest(ack)));
            // The scale of a connection whose SYNs are not in the capture is unknown.
            let scale = this.scale.filter(|_| peer.scale.is_some() && !segment.syn);
            this.window_bytes = scale.map(|scale| u64::from(segment.window) << scale.min(MAX_WINDOW_SCALE));
            if !segment.syn {
                this.read_window(segment.window == 0, time, frame);
            }
        }
    }

    /// A gap in a direction's bytes was filled after this time.
    pub fn filled(&mut self, from: usize, after: Duration) {
        if let Some(this) = self.directions.get_mut(from) {
            this.longest_recovery = this.longest_recovery.max(Some(after));
        }
    }

    /// Time of a direction's first byte.
    pub fn first_byte(&self, from: usize) -> Option<Duration> {
        self.directions.get(from)?.first_byte
    }

    /// The reasons, the gravest first.
    pub fn findings(&self, ends: [Counts; 2]) -> Vec<Finding> {
        let mut found = Vec::new();
        for (counts, direction) in ends.iter().zip(&self.directions) {
            direction.find(counts, self.last, &mut found);
        }
        let some = |waits: WaitTotal| (waits.count > 0).then_some(waits);
        found.extend(some(self.unanswered).map(|waits| Finding::Unanswered { waits }));
        found.extend(some(self.idle).map(|waits| Finding::Idle { waits }));
        found
    }
}

impl Direction {
    fn read_window(&mut self, closed: bool, time: Option<Duration>, frame: u64) {
        match (closed, self.closed_since) {
            (true, None) => self.closed_since = time.map(|time| (time, frame)),
            (false, Some((since, before))) => {
                self.closed_since = None;
                self.closed.add(time.unwrap_or(since).saturating_sub(since), before);
            }
            _ => {}
        }
    }

    /// The reasons in this direction; the capture ended at `last`.
    fn find(&self, counts: &Counts, last: Option<(Duration, u64)>, found: &mut Vec<Finding>) {
        let end = counts.end;
        let mut closed = self.closed;
        if let (Some((since, before)), Some((last, _))) = (self.closed_since, last) {
            closed.add(last.saturating_sub(since), before);
        }
        if counts.retransmissions > 0 {
            found.push(Finding::Retransmissions {
                end,
                segments: counts.retransmissions,
                of_segments: counts.segments,
                bytes: counts.retransmitted_bytes,
                longest_recovery_ms: self.longest_recovery.map(milliseconds),
            });
        } else if counts.out_of_order > 0 {
            // With retransmissions, segments behind a lost one are out of order as well.
            found.push(Finding::Reordering { end, segments: counts.out_of_order });
        }
        if counts.bad_fpdus > 0 {
            found.push(Finding::BadFpdus { end, fpdus: counts.bad_fpdus });
        }
        if closed.count > 0 {
            found.push(Finding::ClosedWindow { end, waits: closed });
        }
        if let Some(smallest_window_bytes) = self.smallest_full_window_bytes {
            found.push(Finding::FullWindow { end, segments: self.full_windows, smallest_window_bytes });
        }
        if counts.congestion_marks > 0 {
            found.push(Finding::CongestionMarks { end, packets: counts.congestion_marks });
        }
    }
}
