//! Congestion control (RFC 5681): how the window grows, and how it is reduced on a sign of congestion. Loss detection,
//! recovery and proportional rate reduction are elsewhere, because all algorithms share them.

mod bbr;
mod cubic;
mod dctcp;
mod hystart;
mod new_reno;
mod pacer;
mod rate;

use std::{fmt, time::Duration};

pub(super) use self::{
    bbr::Bbr,
    cubic::Cubic,
    dctcp::Dctcp,
    new_reno::NewReno,
    pacer::{Pacer, Pacing},
    rate::{Lost, RateSample, Sampler},
};
use super::Algorithm;
use crate::{seq::StreamOffset, time::Instant};

/// The congestion window that all algorithms control, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    pub cwnd: u64,
    pub ssthresh: u64,
    /// SMSS: payload bytes of a full segment.
    pub smss: u64,
}

impl Window {
    /// The initial window: `segments` full segments, but no more than `segments` times 1460 bytes unless two segments
    /// are larger (RFC 6928 section 2, for 10 segments).
    pub(super) fn initial(smss: u64, segments: u32) -> u64 {
        (u64::from(segments) * smss).min((u64::from(segments) * 1460).max(2 * smss))
    }

    pub(super) fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }
}

/// Measurements from an ACK of new data.
#[derive(Debug, Clone, Copy)]
pub(super) struct Acked {
    pub now: Instant,
    /// Bytes newly acknowledged.
    pub bytes: u64,
    /// Round-trip time measured by this ACK, if any.
    pub rtt: Option<Duration>,
    pub srtt: Option<Duration>,
    pub una: StreamOffset,
    pub nxt: StreamOffset,
    /// The connection recovers from a time-out. An ACK may then cover much that had arrived long before, so the window
    /// grows by at most one segment (RFC 3465 section 2.3).
    pub after_timeout: bool,
}

/// Measurements from an ACK of new data, cumulative or selective, for a controller that models the path.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelSample {
    pub now: Instant,
    pub rate: RateSample,
    /// Round-trip time of the newest segment delivered, if it is not ambiguous.
    pub rtt: Option<Duration>,
    /// Bytes in flight after the ACK.
    pub in_flight: u64,
    /// The congestion window limited the sender in the last round trip.
    pub cwnd_limited: bool,
    /// A loss recovery is in progress after the ACK.
    pub recovering: bool,
    /// Selective acknowledgments report several losses in a round trip.
    pub sack: bool,
    pub initial_window: u64,
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
    /// Processes an ACK of new data outside of fast recovery, while the window limited the sender.
    fn acked(&mut self, window: &mut Window, acked: &Acked);

    /// Processes an ACK of `bytes` new bytes; `marked` says whether it carries ECN-Echo.
    fn echoed(&mut self, _una: StreamOffset, _nxt: StreamOffset, _bytes: u64, _marked: bool) {}

    /// Reacts to congestion with `flight` bytes outstanding. Returns the new window; the sender applies the lower
    /// limits. The previous state is kept for [`CongestionControl::undo`].
    fn reduce(&mut self, window: &Window, flight: u64, sign: Congestion) -> u64;

    /// Undoes the last reduction, which was spurious.
    fn undo(&mut self);

    /// The SMSS has changed from `before` to `smss`. The sender has adapted the window, which rises neither in bytes
    /// nor in segments (RFC 4821 section 4).
    fn resized(&mut self, before: u64, smss: u64);

    /// The application, not the window, limited the sender for `pause`: that time does not count for the growth of the
    /// window.
    fn paused(&mut self, pause: Duration);

    /// The pacing that the controller wants. A controller with one models the path: it sets the window itself, by the
    /// samples, and no other rule does, except after a time-out.
    fn pacing(&self) -> Option<Pacing> {
        None
    }

    /// Processes an ACK that has delivered something.
    fn sampled(&mut self, _window: &mut Window, _sample: &ModelSample) {}

    /// Processes the loss of a segment, before the window is reduced for it. `sack`: the peer sends SACK.
    fn lost(&mut self, _window: &Window, _lost: &Lost, _sack: bool) {}

    /// Prepares for the first segment, and for the first one after a pause. `app_limited`: the application had nothing to
    /// send meanwhile.
    fn restarted(
        &mut self,
        _window: &mut Window,
        _now: Instant,
        _srtt: Option<Duration>,
        _app_limited: bool,
    ) {
    }
}

/// The congestion control that the configuration selects. `seed` differs between flows.
pub(super) fn new(algorithm: Algorithm, seed: u64) -> Box<dyn CongestionControl> {
    match algorithm {
        Algorithm::Bbr => Box::new(Bbr::new(seed)),
        Algorithm::NewReno => Box::new(NewReno::default()),
        Algorithm::Cubic => Box::new(Cubic::default()),
        Algorithm::Dctcp => Box::new(Dctcp::default()),
    }
}
