//! Statistics of a series of measurements: the figures of perftest's latency table, and peak rates.

use std::{fmt, time::Duration};

use hdrhistogram::Histogram;
use serde::Serialize;

/// The figures of one latency row, in the unit of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
    /// The median: perftest's "typical".
    pub typical: f64,
    /// The mean.
    pub average: f64,
    /// The standard deviation of the samples.
    pub stdev: f64,
    /// The 99th percentile: 99 of 100 samples are at most this.
    pub p99: f64,
    /// The 99.9th percentile: 999 of 1000 samples are at most this.
    pub p999: f64,
}

impl Summary {
    /// Computes the figures of `samples`; `None` without samples.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let count = sorted.len() as f64;
        let average = sorted.iter().sum::<f64>() / count;
        let variance = sorted.iter().map(|x| (x - average).powi(2)).sum::<f64>() / count;
        Some(Self {
            min,
            max,
            typical: median_of_sorted(&sorted),
            average,
            stdev: variance.sqrt(),
            p99: percentile(&sorted, 0.99),
            p999: percentile(&sorted, 0.999),
        })
    }
}

/// Longest time that a [`Latencies`] distinguishes, in nanoseconds; a longer time counts as this.
const LONGEST: Duration = Duration::from_secs(100);
/// Decimal digits of precision of each time in a [`Latencies`].
const DIGITS: u8 = 3;

/// A histogram of message times in bounded memory, with a precision of three digits. Recording does not
/// allocate.
#[derive(Debug)]
pub struct Latencies(Histogram<u64>);

impl Latencies {
    /// Creates an empty histogram.
    pub fn new() -> Result<Self, hdrhistogram::CreationError> {
        Histogram::new_with_bounds(1, LONGEST.as_nanos() as u64, DIGITS).map(Self)
    }

    /// Adds the time of one message.
    pub fn record(&mut self, time: Duration) {
        self.0.saturating_record(time.as_nanos() as u64);
    }

    /// Computes the figures in microseconds after dividing the times by `divisor`; `None` without samples.
    pub fn summary(&self, divisor: f64) -> Option<Summary> {
        let histogram = &self.0;
        let scale = 1000.0 * divisor;
        let at = |share| histogram.value_at_quantile(share) as f64 / scale;
        (!histogram.is_empty()).then(|| Summary {
            min: histogram.min() as f64 / scale,
            max: histogram.max() as f64 / scale,
            typical: at(0.5),
            average: histogram.mean() / scale,
            stdev: histogram.stdev() / scale,
            p99: at(0.99),
            p999: at(0.999),
        })
    }
}

/// The median of a few samples, and how far they spread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
    /// Number of samples.
    pub count: usize,
}

impl Spread {
    /// Computes the figures of `samples`; `None` without samples.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        Some(Self { median: median_of_sorted(&sorted), min, max, count: sorted.len() })
    }
}

/// The limit that a goal sets for a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Met by this value and below.
    AtMost(f64),
    /// Met by this value and above.
    AtLeast(f64),
    /// Shown without a limit.
    None,
}

impl Limit {
    /// Whether `value` meets the limit; `None` without a limit.
    pub fn is_met(self, value: f64) -> Option<bool> {
        match self {
            Self::AtMost(limit) => Some(value <= limit),
            Self::AtLeast(limit) => Some(value >= limit),
            Self::None => None,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(limit) => write!(f, "at most {limit}"),
            Self::AtLeast(limit) => write!(f, "at least {limit}"),
            Self::None => f.write_str("-"),
        }
    }
}

fn median_of_sorted(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
}

/// The smallest sample that at least `share` of all samples do not exceed (nearest rank).
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// Completion times of messages, for the peak rate.
#[derive(Debug, Default)]
pub struct Completions {
    /// Pairs of completed messages and nanoseconds since the start, both ascending.
    marks: Vec<(u64, u64)>,
}

impl Completions {
    /// Allocates room for `marks` marks, so that the measured loop does not allocate.
    pub fn with_capacity(marks: usize) -> Self {
        Self { marks: Vec::with_capacity(marks) }
    }

    /// Records that `messages` are complete after `nanoseconds`. Ignores marks beyond the capacity.
    pub fn mark(&mut self, messages: u64, nanoseconds: u64) {
        if self.marks.len() < self.marks.capacity() {
            self.marks.push((messages, nanoseconds));
        }
    }

    /// The highest rate, in messages per second, over all windows of at least `window` messages; a shorter
    /// window would only show the batching of completions. `None` when no window is that long.
    pub fn peak(&self, window: u64) -> Option<f64> {
        let mut from = 0;
        let mut best: Option<f64> = None;
        for (end, &(messages, at)) in self.marks.iter().enumerate() {
            while from + 1 < end && messages - self.marks[from + 1].0 >= window {
                from += 1;
            }
            let (first, since) = self.marks[from];
            if messages - first >= window.max(1) && at > since {
                let rate = (messages - first) as f64 * 1e9 / (at - since) as f64;
                best = Some(best.map_or(rate, |b| b.max(rate)));
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_known_series() {
        let samples: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let summary = Summary::of(&samples).unwrap();
        assert_eq!((summary.min, summary.max), (1.0, 1000.0));
        assert_eq!((summary.typical, summary.average), (500.5, 500.5));
        assert_eq!((summary.p99, summary.p999), (990.0, 999.0));
        assert!((summary.stdev - 288.675).abs() < 0.001, "{}", summary.stdev);
    }

    #[test]
    fn a_histogram_agrees_with_the_samples_to_three_digits() {
        let mut latencies = Latencies::new().unwrap();
        assert_eq!(latencies.summary(1.0), None);
        let nanoseconds: Vec<u64> = (1..=10_000).map(|n| 5_000 + n * n / 100).collect();
        for &ns in &nanoseconds {
            latencies.record(Duration::from_nanos(ns));
        }
        let exact =
            Summary::of(&nanoseconds.iter().map(|&ns| ns as f64 / 2000.0).collect::<Vec<_>>()).unwrap();
        let found = latencies.summary(2.0).unwrap();
        for (found, exact) in [
            (found.min, exact.min),
            (found.max, exact.max),
            (found.typical, exact.typical),
            (found.average, exact.average),
            (found.stdev, exact.stdev),
            (found.p99, exact.p99),
            (found.p999, exact.p999),
        ] {
            assert!((found / exact - 1.0).abs() < 2e-3, "{found} and not {exact}");
        }
        latencies.record(Duration::from_secs(1000));
        assert!(latencies.summary(1.0).unwrap().max > 99e6, "too long a time counts as the longest");
    }

    #[test]
    fn one_sample_is_every_figure() {
        let summary = Summary::of(&[7.0]).unwrap();
        assert_eq!((summary.min, summary.typical, summary.p999, summary.stdev), (7.0, 7.0, 7.0, 0.0));
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Spread::of(&[]), None);
        let spread = Spread::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((spread.min, spread.median, spread.max, spread.count), (1.0, 2.0, 3.0, 3));
    }

    #[test]
    fn the_peak_is_the_fastest_window_of_the_asked_length() {
        let mut completions = Completions::with_capacity(8);
        completions.mark(0, 0);
        completions.mark(10, 10_000);
        // Twice the rate, for 20 messages.
        completions.mark(20, 15_000);
        completions.mark(30, 20_000);
        completions.mark(40, 30_000);
        let rate = |window| completions.peak(window).map(|r| (r / 1e6).round());
        assert_eq!(rate(10), Some(2.0));
        assert_eq!(rate(20), Some(2.0));
        assert_eq!(completions.peak(40).map(f64::round), Some(1_333_333.0));
        assert_eq!(rate(41), None);
    }
}
