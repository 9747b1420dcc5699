//! The parameters of a direction's faults, which [`super::Direction`] applies to frames.

use std::time::Duration;

use crate::time::Instant;

/// Bursty loss (Gilbert-Elliott model): a good and a bad state, with transition probabilities per frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gilbert {
    /// Chance to enter the bad state, per frame.
    pub enter: f64,
    /// Chance to leave the bad state, per frame.
    pub leave: f64,
    /// Chance to lose a frame in the bad state.
    pub loss: f64,
}

/// Time spans in which no frame passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blackout {
    /// Start of the first time span.
    pub from: Instant,
    /// Duration of each.
    pub length: Duration,
    /// Period from the start of one to the start of the next; `None`: there is only one.
    pub every: Option<Duration>,
}

impl Blackout {
    /// Whether `now` is within a blackout.
    pub fn covers(&self, now: Instant) -> bool {
        let since = now.since(self.from);
        let period = self.every.filter(|every| !every.is_zero());
        let into = period.map_or(since.as_nanos(), |every| since.as_nanos() % every.as_nanos());
        now >= self.from && into < self.length.as_nanos()
    }
}

/// A middlebox that splits and joins TCP segments. Sequence space and bytes stay the same, and the checksums are
/// right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recut {
    /// Chance that a segment is split, at a random place; the rest may be split again.
    pub split: f64,
    /// Chance that a segment waits for the next one, to be joined with it if their headers allow.
    pub join: f64,
    /// Longest wait.
    pub wait: Duration,
    /// Largest IP packet made by joining, in bytes.
    pub most_bytes: usize,
}

/// A hop whose MTU is smaller than that of the ends' interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMtu {
    /// The time from which it applies.
    pub from: Instant,
    /// Largest IP packet that passes, in bytes.
    pub bytes: u16,
    /// Whether the hop reports the loss by ICMP (RFC 1191, RFC 8201); otherwise it is a black hole.
    pub icmp: bool,
}

/// Sequence number of an injected reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aim {
    /// The number of the next segment. Unless a segment is missing, this looks like the peer's own reset.
    Next,
    /// A little beyond all sent data: within the window, but not the next number (RFC 5961 section 3.2).
    Near,
    /// Far outside the window.
    Far,
}

/// Forged resets that are injected before TCP segments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resets {
    /// Chance per TCP segment.
    pub chance: f64,
    /// Sequence number of the reset.
    pub aim: Aim,
}

/// The faults of one direction. All chances are per frame, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Faults {
    /// Independent loss.
    pub loss: f64,
    /// Bursty loss, in addition.
    pub bursts: Option<Gilbert>,
    /// Time spans in which no frame passes.
    pub blackout: Option<Blackout>,
    /// A second copy of the frame arrives.
    pub duplicate: f64,
    /// The frame is held back, so later ones overtake it.
    pub reorder: f64,
    /// A reordered frame is held back for a random time up to this...
    pub reorder_by: Duration,
    /// ...and until a random number of frames up to this have overtaken it, if that comes first.
    pub reorder_depth: u32,
    /// One bit after the Ethernet header is flipped.
    pub corrupt: f64,
    /// Chance that the flipped bit of a corrupted frame is in its TCP payload and the TCP checksum is repaired, so that
    /// only MPA's CRC can detect it.
    pub repair_checksum: f64,
    /// Segments are split and joined.
    pub recut: Option<Recut>,
    /// A hop with a smaller MTU.
    pub mtu: Option<PathMtu>,
    /// Forged resets are injected.
    pub resets: Option<Resets>,
    /// Propagation delay.
    pub delay: Duration,
    /// Largest additional random delay (order is kept).
    pub jitter: Duration,
    /// Line rate in bytes per second; `None` is infinitely fast.
    pub rate_bytes: Option<u64>,
    /// Frames that may wait for the line; more are dropped at the tail.
    pub queue_frames: usize,
    /// Number of waiting frames from which an arriving ECN-capable frame is marked Congestion Experienced (RFC 3168).
    pub mark_frames: usize,
    /// An ECN-capable frame is marked Congestion Experienced, however short the queue is.
    pub mark: f64,
}

impl Default for Faults {
    /// No faults: every frame arrives at once.
    fn default() -> Self {
        Self {
            loss: 0.0,
            bursts: None,
            blackout: None,
            duplicate: 0.0,
            reorder: 0.0,
            reorder_by: Duration::ZERO,
            reorder_depth: u32::MAX,
            corrupt: 0.0,
            repair_checksum: 0.0,
            recut: None,
            mtu: None,
            resets: None,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate_bytes: None,
            queue_frames: usize::MAX,
            mark_frames: usize::MAX,
            mark: 0.0,
        }
    }
}
