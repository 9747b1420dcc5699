//! What a direction of the wire does to frames: the parameters. [`super::Direction`] acts on them.

use std::time::Duration;

use crate::time::Instant;

/// Bursty loss after Gilbert and Elliott: a good and a bad state, and the chances to change between them per frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gilbert {
    /// Chance to enter the bad state, per frame.
    pub enter: f64,
    /// Chance to leave it, per frame.
    pub leave: f64,
    /// Chance to lose a frame while in it.
    pub loss: f64,
}

/// Time spans in which nothing passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blackout {
    /// When the first begins.
    pub from: Instant,
    /// How long each lasts.
    pub length: Duration,
    /// From the beginning of one to the beginning of the next; `None`: there is only one.
    pub every: Option<Duration>,
}

impl Blackout {
    /// Whether it is dark at `now`.
    pub fn covers(&self, now: Instant) -> bool {
        let since = now.since(self.from);
        let period = self.every.filter(|every| !every.is_zero());
        let into = period.map_or(since.as_nanos(), |every| since.as_nanos() % every.as_nanos());
        now >= self.from && into < self.length.as_nanos()
    }
}

/// A middlebox that cuts the payload of TCP segments anew. Sequence space and bytes stay the same, and the
/// checksums are right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recut {
    /// Chance that a segment is cut into pieces, at random places.
    pub split: f64,
    /// Chance that a segment waits for the one that follows it, to become one with it when their headers allow.
    pub join: f64,
    /// Longest wait.
    pub wait: Duration,
    /// Largest IP packet that is made by joining, in bytes.
    pub most_bytes: usize,
}

/// A hop that does not take every packet that the ends' interfaces do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMtu {
    /// When it begins to matter.
    pub from: Instant,
    /// Largest IP packet that passes, in bytes.
    pub bytes: u16,
    /// Whether the sender is told (RFC 1191, RFC 8201); otherwise the hop is a black hole.
    pub icmp: bool,
}

/// Which sequence number a reset has that somebody slips in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aim {
    /// That of the segment in front of which it comes: where nothing is missing, the peer's own reset looks so.
    Next,
    /// A little beyond all that was sent: within the window, but not next (RFC 5961 section 3.2).
    Near,
    /// Far outside of the window.
    Far,
}

/// Resets that somebody slips in, in front of TCP segments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resets {
    /// Chance per TCP segment.
    pub chance: f64,
    /// Where it points.
    pub aim: Aim,
}

/// The faults of one direction. All chances are per frame, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Faults {
    /// Independent loss.
    pub loss: f64,
    /// Bursty loss, on top.
    pub bursts: Option<Gilbert>,
    /// Nothing passes in these time spans.
    pub blackout: Option<Blackout>,
    /// A second copy arrives.
    pub duplicate: f64,
    /// The frame is held back, so later ones overtake it.
    pub reorder: f64,
    /// A reordered frame is held back for a random time up to this...
    pub reorder_by: Duration,
    /// ...and until a random number of frames up to this have overtaken it, if that comes first.
    pub reorder_depth: u32,
    /// One bit flips somewhere behind the Ethernet header.
    pub corrupt: f64,
    /// Of the corrupted frames, how many have the flip in the TCP payload and their TCP checksum repaired, so
    /// that only MPA's CRC can notice.
    pub repair_checksum: f64,
    /// Segments are cut anew.
    pub recut: Option<Recut>,
    /// A hop with a smaller MTU.
    pub mtu: Option<PathMtu>,
    /// Resets that neither end sent.
    pub resets: Option<Resets>,
    /// Propagation delay.
    pub delay: Duration,
    /// Additional random delay (order is kept).
    pub jitter: Duration,
    /// Line rate in bytes per second; `None` is infinitely fast.
    pub rate_bytes: Option<u64>,
    /// Frames that may wait for the line; more are dropped at the tail.
    pub queue_frames: usize,
    /// So many frames waiting make the next one carry Congestion Experienced if it is ECN-capable (RFC 3168).
    pub mark_frames: usize,
}

impl Default for Faults {
    /// None: every frame arrives at once.
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
        }
    }
}
