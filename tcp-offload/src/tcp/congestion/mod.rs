//! Congestion control (RFC 5681): how the window grows, and what a sign of congestion makes of it. Loss
//! detection, recovery and the pacing of recovery (PRR) are not here: they are the same for all algorithms.

mod cubic;
mod dctcp;
mod hystart;
mod new_reno;

use std::{fmt, time::Duration};

pub(super) use self::{cubic::Cubic, dctcp::Dctcp, new_reno::NewReno};
use super::Algorithm;
use crate::{seq::StreamOffset, time::Instant};

/// The window that all algorithms steer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    pub cwnd: u64,
    pub ssthresh: u64,
    /// SMSS: what a full segment carries.
    pub smss: u64,
}

impl Window {
    /// The initial window: `segments` full segments, but not above 14600 bytes unless two segments are larger
    /// (RFC 6928 section 2, for 10 segments of 1460).
    pub(super) fn initial(smss: u64, segments: u32) -> u64 {
        (u64::from(segments) * smss).min((u64::from(segments) * 1460).max(2 * smss))
    }

    pub(super) fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }
}

/// What an ACK of new data tells.
#[derive(Debug, Clone, Copy)]
pub(super) struct Acked {
    pub now: Instant,
    /// Bytes newly acknowledged.
    pub bytes: u64,
    /// Round-trip time of this ACK, where it gave one.
    pub rtt: Option<Duration>,
    pub srtt: Option<Duration>,
    pub una: StreamOffset,
    pub nxt: StreamOffset,
    /// After a time-out an ACK may cover much that had arrived long before: the window grows by one segment at
    /// most (RFC 3465 section 2.3).
    pub after_timeout: bool,
}

/// A sign of congestion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Congestion {
    /// Loss, as detected from ACKs.
    Loss,
    /// ECN-Echo.
    Marked,
    /// Retransmission time-out.
    Timeout,
}

/// A congestion control algorithm.
pub(super) trait CongestionControl: fmt::Debug + Send {
    /// New data was acknowledged outside of recovery, while the window limited the sender.
    fn acked(&mut self, window: &mut Window, acked: &Acked);

    /// An ACK of `bytes` new bytes has come, with or without ECN-Echo.
    fn echoed(&mut self, _una: StreamOffset, _nxt: StreamOffset, _bytes: u64, _marked: bool) {}

    /// There is congestion, with `flight` bytes outstanding. Returns what the window shall become; how small it may be
    /// is the sender's business. The state before is remembered for [`CongestionControl::undo`].
    fn reduce(&mut self, window: &Window, flight: u64, sign: Congestion) -> u64;

    /// The last reduction was spurious.
    fn undo(&mut self);

    /// Segments have become larger or smaller, and the window with them or not: it rises neither in bytes nor in segments
    /// (RFC 4821 section 4).
    fn resized(&mut self, before: u64, smss: u64);

    /// For `pause`, the application and not the window limited the sender: no growth is owed for that time.
    fn paused(&mut self, pause: Duration);
}

/// The algorithm that the configuration names.
pub(super) fn new(algorithm: Algorithm) -> Box<dyn CongestionControl> {
    match algorithm {
        Algorithm::NewReno => Box::new(NewReno::default()),
        Algorithm::Cubic => Box::new(Cubic::default()),
        Algorithm::Dctcp => Box::new(Dctcp::default()),
    }
}
