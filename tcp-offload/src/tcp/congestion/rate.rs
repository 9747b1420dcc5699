//! Rates, and the estimation of the delivery rate from acknowledgments (draft-ietf-ccwg-bbr-06 section 4.1, which continues
//! draft-cheng-iccrg-delivery-rate-estimation). Only a controller that models the path has a [`Sampler`].

use std::{collections::VecDeque, time::Duration};

use crate::{seq::StreamOffset, time::Instant};

/// A rate in bytes per second, never negative and never NaN.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub(in crate::tcp) struct Rate(f64);

/// Nanoseconds in a second.
const SECOND: f64 = 1e9;

impl Rate {
    pub(in crate::tcp) const ZERO: Self = Self(0.0);
    pub(in crate::tcp) const INFINITE: Self = Self(f64::INFINITY);

    /// `bytes` in `ns` nanoseconds; no time counts as one nanosecond.
    pub(in crate::tcp) fn of(bytes: u64, ns: u64) -> Self {
        Self(bytes as f64 * SECOND / ns.max(1) as f64)
    }

    /// The rate multiplied by `gain`.
    pub(in crate::tcp) fn times(self, gain: f64) -> Self {
        Self(self.0 * gain)
    }

    /// Bytes in a time, rounded down.
    pub(in crate::tcp) fn bytes_in(self, time: Duration) -> u64 {
        (self.0 * time.as_secs_f64()) as u64
    }

    /// The time that `bytes` take, in nanoseconds: none at an infinite rate.
    pub(in crate::tcp) fn time_of_ns(self, bytes: u64) -> u64 {
        (bytes as f64 * SECOND / self.0) as u64
    }

    /// Whole bytes per second.
    pub(in crate::tcp) fn bytes_per_second(self) -> u64 {
        self.0 as u64
    }

    pub(in crate::tcp) fn max(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }

    pub(in crate::tcp) fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }
}

/// What was known when a segment was last sent (section 4.1.2.1.2).
#[derive(Debug, Clone, Copy)]
struct Snapshot {
    start: StreamOffset,
    end: StreamOffset,
    /// Bytes of it already counted as delivered: those of pieces, once it was cut.
    counted: u64,
    sent: Instant,
    delivered: u64,
    delivered_at: Instant,
    first_sent: Instant,
    lost: u64,
    /// Bytes in flight right after it was sent, its own included.
    in_flight: u64,
    app_limited: bool,
}

/// The newest segment that an ACK has newly reported as delivered.
#[derive(Debug, Clone, Copy)]
struct Newest {
    end: StreamOffset,
    sent: Instant,
    delivered: u64,
    lost: u64,
    in_flight: u64,
    app_limited: bool,
    send_elapsed_ns: u64,
    ack_elapsed_ns: u64,
}

/// What one ACK has measured (section 4.1.2.1.3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::tcp) struct RateSample {
    /// The delivery rate, unless the interval was shorter than a round trip.
    pub rate: Option<Rate>,
    /// Bytes delivered from the transmission of the newest acknowledged segment until now.
    pub delivered: u64,
    /// All bytes delivered when that segment was sent.
    pub prior_delivered: u64,
    /// Bytes counted as lost from the transmission of that segment until now.
    pub lost: u64,
    /// Bytes in flight right after that segment was sent.
    pub tx_in_flight: u64,
    /// The application limited the rate.
    pub app_limited: bool,
    /// Bytes newly delivered by this ACK.
    pub newly_acked: u64,
    /// All bytes delivered so far.
    pub total_delivered: u64,
}

/// A segment that has just been counted as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tcp) struct Lost {
    pub at: Instant,
    pub start: StreamOffset,
    pub end: StreamOffset,
    /// Bytes in flight right after it was sent.
    pub tx_in_flight: u64,
    /// Bytes counted as lost since it was sent, its own included.
    pub since_sent: u64,
    /// The application limited the rate when it was sent.
    pub app_limited: bool,
    /// All bytes delivered so far.
    pub total_delivered: u64,
}

/// The estimator of one connection. It follows the retransmit queue: one [`Snapshot`] for each segment that is not yet
/// cumulatively acknowledged, in the order of offsets.
#[derive(Debug)]
pub(in crate::tcp) struct Sampler {
    delivered: u64,
    delivered_at: Instant,
    /// When the segment was sent that was most recently delivered, or the first one after a pause.
    first_sent: Instant,
    lost: u64,
    /// Samples are limited by the application until this number of bytes is delivered; 0: they are not.
    app_limited: u64,
    /// The source had no more data when the connection last sent.
    dry: bool,
    segments: VecDeque<Snapshot>,
    newest: Option<Newest>,
    newly_acked: u64,
}

impl Sampler {
    pub(in crate::tcp) fn new(now: Instant) -> Self {
        Self {
            delivered: 0,
            delivered_at: now,
            first_sent: now,
            lost: 0,
            app_limited: 0,
            dry: false,
            segments: VecDeque::new(),
            newest: None,
            newly_acked: 0,
        }
    }

    /// Records that a new segment was sent (section 4.1.2.2). `in_flight` includes it.
    pub(in crate::tcp) fn sent(
        &mut self,
        now: Instant,
        start: StreamOffset,
        end: StreamOffset,
        in_flight: u64,
    ) {
        self.dry = false;
        let snapshot = self.snapshot(now, start, end, in_flight);
        self.segments.push_back(snapshot);
    }

    /// Records that the segment that ends at `end` was retransmitted.
    pub(in crate::tcp) fn resent(&mut self, now: Instant, end: StreamOffset, in_flight: u64) {
        let Some(index) = self.index_of(end) else { return };
        let Some(old) = self.segments.get(index).copied() else { return };
        let snapshot = Snapshot { counted: old.counted, ..self.snapshot(now, old.start, old.end, in_flight) };
        if let Some(segment) = self.segments.get_mut(index) {
            *segment = snapshot;
        }
    }

    fn snapshot(&mut self, now: Instant, start: StreamOffset, end: StreamOffset, in_flight: u64) -> Snapshot {
        if in_flight <= end - start {
            (self.first_sent, self.delivered_at) = (now, now);
        }
        Snapshot {
            start,
            end,
            counted: 0,
            sent: now,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent: self.first_sent,
            lost: self.lost,
            in_flight,
            app_limited: self.app_limited != 0,
        }
    }

    fn index_of(&self, end: StreamOffset) -> Option<usize> {
        let index = self.segments.partition_point(|s| s.end < end);
        self.segments.get(index).filter(|s| s.start < end).map(|_| index)
    }

    /// Records that all data below `una` is delivered (section 4.1.2.3).
    pub(in crate::tcp) fn delivered_to(&mut self, now: Instant, una: StreamOffset) {
        while let Some(first) = self.segments.front_mut().filter(|s| s.start < una) {
            let end = first.end.min(una);
            let bytes = (end - first.start).saturating_sub(first.counted);
            first.counted = first.counted.saturating_sub(end - first.start);
            first.start = end;
            let (segment, done) = (*first, first.start >= first.end);
            if done {
                self.segments.pop_front();
            }
            self.count(now, &segment, bytes);
        }
    }

    /// Records that the segment from `start` to `end` is selectively acknowledged.
    pub(in crate::tcp) fn sacked(&mut self, now: Instant, start: StreamOffset, end: StreamOffset) {
        let Some(segment) = self.index_of(end).and_then(|index| self.segments.get_mut(index)) else { return };
        let bytes = (end - start).min((segment.end - segment.start).saturating_sub(segment.counted));
        segment.counted += bytes;
        let segment = *segment;
        self.count(now, &segment, bytes);
    }

    fn count(&mut self, now: Instant, segment: &Snapshot, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.delivered += bytes;
        self.newly_acked += bytes;
        self.delivered_at = now;
        if self.newest.is_some_and(|newest| (segment.sent, segment.end) <= (newest.sent, newest.end)) {
            return;
        }
        self.newest = Some(Newest {
            end: segment.end,
            sent: segment.sent,
            delivered: segment.delivered,
            lost: segment.lost,
            in_flight: segment.in_flight,
            app_limited: segment.app_limited,
            send_elapsed_ns: segment.sent.nanos_since(segment.first_sent),
            ack_elapsed_ns: now.nanos_since(segment.delivered_at),
        });
        self.first_sent = self.first_sent.max(segment.sent);
    }

    /// Records that the segment from `start` to `end` counts as lost.
    pub(in crate::tcp) fn lost(
        &mut self,
        now: Instant,
        start: StreamOffset,
        end: StreamOffset,
    ) -> Option<Lost> {
        let segment = self.index_of(end).and_then(|index| self.segments.get(index))?;
        self.lost += end - start;
        Some(Lost {
            at: now,
            start,
            end,
            tx_in_flight: segment.in_flight,
            since_sent: self.lost - segment.lost,
            app_limited: segment.app_limited,
            total_delivered: self.delivered,
        })
    }

    /// Records that the source has no more data.
    pub(in crate::tcp) fn ran_dry(&mut self) {
        self.dry = true;
    }

    /// Begins an application-limited phase if there was nothing to send although less than the window was in flight
    /// (section 4.1.2.4). To be called before a segment is sent and before an ACK is processed.
    pub(in crate::tcp) fn check_app_limited(&mut self, in_flight: u64, cwnd: u64, has_lost: bool) {
        if self.dry && in_flight < cwnd && !has_lost {
            self.mark_app_limited(in_flight);
        }
    }

    /// Samples of what was sent until now and is sent in the next round trip are limited by the application.
    pub(in crate::tcp) fn mark_app_limited(&mut self, in_flight: u64) {
        self.app_limited = (self.delivered + in_flight).max(1);
    }

    /// Whether new samples count as limited by the application.
    pub(in crate::tcp) fn is_app_limited(&self) -> bool {
        self.app_limited != 0
    }

    /// The sample of the ACK whose delivered segments were recorded since the last call; `None` if there were none.
    /// Without a round trip of `min_rtt` a rate is not reliable.
    pub(in crate::tcp) fn sample(&mut self, min_rtt: Option<Duration>) -> Option<RateSample> {
        let newly_acked = std::mem::take(&mut self.newly_acked);
        if self.delivered > self.app_limited {
            self.app_limited = 0;
        }
        let newest = self.newest.take()?;
        let interval = newest.send_elapsed_ns.max(newest.ack_elapsed_ns);
        let delivered = self.delivered - newest.delivered;
        let reliable = min_rtt.is_none_or(|min| Duration::from_nanos(interval) >= min) && interval > 0;
        Some(RateSample {
            rate: reliable.then(|| Rate::of(delivered, interval)),
            delivered,
            prior_delivered: newest.delivered,
            lost: self.lost - newest.lost,
            tx_in_flight: newest.in_flight,
            app_limited: newest.app_limited,
            newly_acked,
            total_delivered: self.delivered,
        })
    }
}

#[cfg(test)]
mod tests;
