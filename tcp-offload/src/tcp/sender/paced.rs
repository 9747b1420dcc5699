//! What a controller that models the path needs of the sender: samples of the delivery rate, losses one by one, and pacing.
//! Other controllers have none of this, and each of its hooks is one test for them.

use std::time::Duration;

use super::{Ack, Sender};
use crate::{
    seq::{SeqNum, StreamOffset},
    tcp::{
        Algorithm,
        congestion::{self, CongestionControl, ModelSample, Pacer, Pacing, Sampler, Window},
        recovery::RecoveryPhase,
    },
    time::Instant,
};

/// The estimator of the delivery rate and the pacer of one connection.
#[derive(Debug)]
pub(in crate::tcp) struct Paced {
    sampler: Sampler,
    pacer: Pacer,
}

impl Paced {
    pub(super) fn new(now: Instant, pacing: &Pacing) -> Self {
        Self { sampler: Sampler::new(now), pacer: Pacer::new(now, pacing) }
    }

    pub(super) fn sacked(&mut self, now: Instant, start: StreamOffset, end: StreamOffset) {
        self.sampler.sacked(now, start, end);
    }

    /// Reports to `control` that the segment from `start` to `end` counts as lost.
    pub(super) fn lost(
        &mut self,
        control: &mut dyn CongestionControl,
        window: &Window,
        (now, start, end): (Instant, StreamOffset, StreamOffset),
        sack: bool,
    ) {
        if let Some(lost) = self.sampler.lost(now, start, end) {
            control.lost(window, &lost, sack);
        }
    }
}

/// The congestion control `algorithm`, and what it needs. Connections differ in `iss`.
pub(super) fn control(
    now: Instant,
    algorithm: Algorithm,
    iss: SeqNum,
) -> (Box<dyn CongestionControl>, Option<Box<Paced>>) {
    let control = congestion::new(algorithm, iss.value().into());
    let paced = control.pacing().map(|pacing| Box::new(Paced::new(now, &pacing)));
    (control, paced)
}

impl Sender {
    /// Changes the congestion control. The window stays; without a model of the path it grows from there as after slow start.
    pub(in crate::tcp) fn control_by(&mut self, now: Instant, algorithm: Algorithm) {
        let was_paced = self.paced.is_some();
        (self.control, self.paced) = control(now, algorithm, self.iss);
        if was_paced && self.nxt > 0 {
            self.window.ssthresh = self.window.cwnd;
        }
        if self.nxt > 0 {
            self.restart_paced(now);
        }
    }

    /// Whether a pacer decides when the next segment may be sent.
    #[inline]
    pub(in crate::tcp) fn paces(&self) -> bool {
        self.paced.is_some()
    }

    /// The time until which the pacer holds the next segment back.
    pub(in crate::tcp) fn held_until(&self, now: Instant) -> Option<Instant> {
        self.paced.as_ref()?.pacer.held_until(now)
    }

    /// The rate of the pacer in bytes per second.
    pub(in crate::tcp) fn pacing_rate(&self) -> Option<u64> {
        self.paced.as_ref().map(|paced| paced.pacer.rate().bytes_per_second())
    }

    /// Records that the source has no more data.
    #[inline]
    pub(in crate::tcp) fn ran_dry(&mut self) {
        if let Some(paced) = &mut self.paced {
            paced.sampler.ran_dry();
        }
    }

    /// Looks whether the application has limited the rate, before anything changes.
    fn check_app_limited(&mut self, in_flight: u64) {
        let (cwnd, has_lost) = (self.window.cwnd, self.queue.has_lost());
        if let Some(paced) = &mut self.paced {
            paced.sampler.check_app_limited(in_flight, cwnd, has_lost);
        }
    }

    #[inline(never)]
    pub(super) fn note_sent(&mut self, now: Instant, start: StreamOffset, end: StreamOffset) {
        let in_flight = self.queue.in_flight();
        self.check_app_limited(in_flight.saturating_sub(end - start));
        if let Some(paced) = &mut self.paced {
            paced.sampler.sent(now, start, end, in_flight);
            paced.pacer.sent(now, end - start);
        }
    }

    /// Records that segment `index` was retransmitted.
    pub(super) fn note_resent(&mut self, now: Instant, index: usize) {
        let in_flight = self.queue.in_flight();
        if let Some(paced) = &mut self.paced
            && let Some(entry) = self.queue.entry(index)
        {
            paced.sampler.resent(now, entry.end, in_flight);
            paced.pacer.sent(now, entry.bytes());
        }
    }

    /// Reports that the first segment will count as lost, if it does not already.
    pub(super) fn note_front_lost(&mut self, now: Instant) {
        if let Some(paced) = &mut self.paced
            && let Some(first) = self.queue.front().filter(|first| !first.lost && !first.sacked)
        {
            paced.lost(&mut *self.control, &self.window, (now, first.start, first.end), self.sack);
        }
    }

    /// The first part of a sample: what the ACK acknowledges cumulatively.
    #[inline(never)]
    pub(super) fn begin_sample(&mut self, ack: &Ack<'_>) {
        self.check_app_limited(self.queue.in_flight());
        if let Some(paced) = &mut self.paced {
            paced.sampler.delivered_to(ack.now, ack.number);
        }
    }

    /// The last part: the controller takes the sample and sets window and pacing. The newest segment delivered without
    /// ambiguity was sent at `sent`.
    #[inline(never)]
    pub(super) fn end_sample(&mut self, now: Instant, sent: Option<Instant>) {
        let (in_flight, cwnd_limited) = (self.pipe(), self.was_limited_up_to(self.una));
        let Some(paced) = &mut self.paced else { return };
        let Some(rate) = paced.sampler.sample(self.rtt.min()) else { return };
        let sample = ModelSample {
            now,
            rate,
            rtt: sent.map(|sent| now.since(sent)),
            in_flight,
            cwnd_limited,
            recovering: self.phase != RecoveryPhase::Open,
            sack: self.sack,
            initial_window: self.initial_window,
        };
        self.control.sampled(&mut self.window, &sample);
        self.adapt_pacer(in_flight);
    }

    /// Prepares the controller for the first segment, or the first one after a pause.
    pub(super) fn restart_paced(&mut self, now: Instant) {
        let srtt: Option<Duration> = self.rtt.srtt();
        let Some(paced) = &mut self.paced else { return };
        let app_limited = paced.sampler.is_app_limited();
        self.control.restarted(&mut self.window, now, srtt, app_limited);
        self.adapt_pacer(0);
    }

    fn adapt_pacer(&mut self, in_flight: u64) {
        if let Some(paced) = &mut self.paced
            && let Some(pacing) = self.control.pacing()
        {
            paced.pacer.adapt(&pacing);
            if pacing.holds_back {
                paced.sampler.mark_app_limited(in_flight);
            }
        }
    }
}
