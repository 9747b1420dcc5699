//! The measurements, and the table of medians and ratios.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    time::Duration,
};

use xwarp_perf::stats::Spread;

use super::Subject;

/// A fault of the hop besides delay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// Independent loss with this probability.
    Loss(f64),
    /// Some frames are overtaken by up to this many others.
    Reordering(u32),
}

/// The condition of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// Round-trip time added by the hop.
    pub rtt: Duration,
    /// Loss in millionths, and depth; integers, so that conditions can be ordered.
    fault: (u32, u32),
}

impl Condition {
    /// Creates a condition.
    pub fn new(rtt: Duration, fault: Fault) -> Self {
        let fault = match fault {
            Fault::Loss(chance) => ((chance * 1e6).round() as u32, 0),
            Fault::Reordering(depth) => (0, depth),
        };
        Self { rtt, fault }
    }

    /// The fault.
    pub fn fault(&self) -> Fault {
        match self.fault {
            (loss, 0) => Fault::Loss(f64::from(loss) / 1e6),
            (_, depth) => Fault::Reordering(depth),
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RTT {:?}, {}", self.rtt, self.fault())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loss(chance) => write!(f, "loss {} %", (chance * 1e6).round() / 1e4),
            Self::Reordering(depth) => write!(f, "reordering, depth {depth}"),
        }
    }
}

/// The result of one transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measurement {
    /// Messages transferred.
    pub messages: u64,
    /// Goodput: payload of messages, in 10^6 bits per second.
    pub megabits: f64,
    /// Share of retransmitted segments among all sent segments.
    pub resent: f64,
    /// Mean delay of the hop's deliveries beyond their due time, caused by the machine.
    pub late_us: f64,
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let resent = self.resent * 100.0;
        write!(f, "{:.2} Mbit/s, {resent:.2} % retransmitted, hop {:.0} us late", self.megabits, self.late_us)
    }
}

/// All transfers, in round order.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<Condition, BTreeMap<Subject, Vec<Measurement>>>);

impl Samples {
    /// Adds the result of the next round.
    pub fn add(&mut self, condition: Condition, subject: Subject, measured: Measurement) {
        self.0.entry(condition).or_default().entry(subject).or_default().push(measured);
    }

    /// Formats the table as Markdown.
    pub fn table(&self) -> String {
        let mut text = String::from(
            "| RTT | fault | ours, Mbit/s | kernel, Mbit/s | ours / kernel (min, max) | retransmitted, ours | retransmitted, kernel |\n\
             |---|---|---|---|---|---|---|\n",
        );
        for (condition, subjects) in &self.0 {
            let of = |subject| subjects.get(&subject).map_or(&[][..], Vec::as_slice);
            let (ours, kernel) = (of(Subject::Ours), of(Subject::Kernel));
            let ratios: Vec<f64> = ours.iter().zip(kernel).map(|(a, b)| a.megabits / b.megabits).collect();
            let [ratio, least, most] =
                Spread::of(&ratios).map_or([f64::NAN; 3], |s| [s.median, s.min, s.max]);
            let megabits = |list: &[Measurement]| median(list.iter().map(|m| m.megabits));
            let resent = |list: &[Measurement]| 100.0 * median(list.iter().map(|m| m.resent));
            let _ = writeln!(
                text,
                "| {:?} | {} | {:.2} | {:.2} | **{ratio:.2}** ({least:.2}, {most:.2}) | {:.2} % | {:.2} % |",
                condition.rtt,
                condition.fault(),
                megabits(ours),
                megabits(kernel),
                resent(ours),
                resent(kernel),
            );
        }
        text
    }
}

/// The median; NaN without values.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    Spread::of(&values.collect::<Vec<_>>()).map_or(f64::NAN, |spread| spread.median)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(megabits: f64) -> Measurement {
        Measurement { messages: 100, megabits, resent: 0.01, late_us: 5.0 }
    }

    #[test]
    fn ratios_are_within_rounds_and_medians_over_them() {
        let condition = Condition::new(Duration::from_millis(50), Fault::Loss(0.001));
        let mut samples = Samples::default();
        for (ours, kernel) in [(1.0, 2.0), (30.0, 10.0), (8.0, 8.0)] {
            samples.add(condition, Subject::Ours, measured(ours));
            samples.add(condition, Subject::Kernel, measured(kernel));
        }
        let table = samples.table();
        let row = table.lines().last().unwrap();
        assert_eq!(row, "| 50ms | loss 0.1 % | 8.00 | 8.00 | **1.00** (0.50, 3.00) | 1.00 % | 1.00 % |");
    }

    #[test]
    fn rows_stand_by_round_trip_time_and_keep_their_fault() {
        let rows = [Fault::Loss(0.0), Fault::Loss(0.0001), Fault::Loss(0.03), Fault::Reordering(100)];
        for fault in rows {
            assert_eq!(Condition::new(Duration::ZERO, fault).fault(), fault);
        }
        assert_eq!(median([].into_iter()).to_string(), "NaN");
        assert!((median([1.0, 4.0].into_iter()) - 2.5).abs() < 1e-12);
    }
}
