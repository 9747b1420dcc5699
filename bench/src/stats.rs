//! What a series of measurements says: the figures of perftest's latency table.

/// The figures of one latency row, in the unit of the samples.
#[derive(Debug, Clone, Copy, PartialEq)]
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
    /// 99 of 100 samples are at most this.
    pub p99: f64,
    /// 999 of 1000 samples are at most this.
    pub p999: f64,
}

impl Summary {
    /// The figures of `samples`; `None` when there is none.
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

/// The median of `samples`; `None` when there is none.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    (!sorted.is_empty()).then(|| median_of_sorted(&sorted))
}

fn median_of_sorted(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
}

/// The smallest sample that at least the share `share` of all samples does not exceed (nearest rank).
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// When messages completed, for the peak rate.
#[derive(Debug, Default)]
pub struct Completions {
    /// (messages completed so far, nanoseconds since the start), both rising.
    marks: Vec<(u64, u64)>,
}

impl Completions {
    /// Room for `marks` marks, so that the measured loop does not allocate.
    pub fn with_capacity(marks: usize) -> Self {
        Self { marks: Vec::with_capacity(marks) }
    }

    /// `messages` are complete after `nanoseconds`. Marks beyond the capacity are not kept.
    pub fn mark(&mut self, messages: u64, nanoseconds: u64) {
        if self.marks.len() < self.marks.capacity() {
            self.marks.push((messages, nanoseconds));
        }
    }

    /// The best rate, in messages per second, over any window of at least `window` messages: shorter
    /// windows only show how completions are batched. `None` when no window is that long.
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
    fn one_sample_is_every_figure() {
        let summary = Summary::of(&[7.0]).unwrap();
        assert_eq!((summary.min, summary.typical, summary.p999, summary.stdev), (7.0, 7.0, 7.0, 0.0));
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
    }

    #[test]
    fn the_peak_is_the_fastest_window_of_the_asked_length() {
        let mut completions = Completions::with_capacity(8);
        completions.mark(0, 0);
        completions.mark(10, 10_000);
        // Twice as fast, for 20 messages.
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
