//! The samples, and the tables of medians and ratios.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use serde_json::{Value, json};

use super::ends::Outcome;
use crate::{cpu::Distance, options::CompareArgs, stats::median, units::short_bytes};

/// The subject of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    SendLat,
    WriteLat,
    TcpPolling,
    TcpSleeping,
    WriteBw,
    SendBw,
    TcpOffloadsOff,
    TcpDefault,
}

impl Subject {
    pub(super) const LATENCIES: [Self; 4] =
        [Self::SendLat, Self::WriteLat, Self::TcpPolling, Self::TcpSleeping];
    pub(super) const BANDWIDTHS: [Self; 4] =
        [Self::WriteBw, Self::SendBw, Self::TcpOffloadsOff, Self::TcpDefault];

    /// Name in column heads.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::SendLat => "send_lat",
            Self::WriteLat => "write_lat",
            Self::TcpPolling => "TCP polling",
            Self::TcpSleeping => "TCP sleeping",
            Self::WriteBw => "write_bw",
            Self::SendBw => "send_bw",
            Self::TcpOffloadsOff => "TCP off",
            Self::TcpDefault => "TCP default",
        }
    }

    /// The subcommand that measures this subject.
    pub(super) fn test(self) -> &'static str {
        match self {
            Self::SendLat | Self::WriteLat | Self::WriteBw | Self::SendBw => self.name(),
            Self::TcpPolling | Self::TcpSleeping => "tcp_lat",
            Self::TcpOffloadsOff | Self::TcpDefault => "tcp_bw",
        }
    }

    pub(super) fn is_ours(self) -> bool {
        self.test() == self.name()
    }

    /// Whether the kernel's segmentation offloads stay on.
    pub(super) fn kernel_offloads(self) -> bool {
        self != Self::TcpOffloadsOff
    }
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Sample {
    outcome: Outcome,
    before: Distance,
    after: Distance,
}

impl Sample {
    /// The class of the cores' distance, if it was the same before and after the measurement; otherwise `~`.
    fn tag(&self) -> char {
        if self.before.comparable(self.after) { self.before.tag() } else { '~' }
    }
}

/// All measurements, by size, subject and round.
#[derive(Debug, Default)]
pub(super) struct Samples(BTreeMap<(u64, Subject), BTreeMap<u32, Sample>>);

impl Samples {
    pub(super) fn add(
        &mut self,
        round: u32,
        subject: Subject,
        bytes: u64,
        outcome: Outcome,
        before: Distance,
        after: Distance,
    ) {
        self.0.entry((bytes, subject)).or_default().insert(round, Sample { outcome, before, after });
    }

    fn tagged(&self, bytes: u64, subject: Subject, tag: char) -> impl Iterator<Item = (u32, Outcome)> + '_ {
        let rounds = self.0.get(&(bytes, subject)).into_iter().flatten();
        rounds.filter(move |(_, sample)| sample.tag() == tag).map(|(&round, sample)| (round, sample.outcome))
    }

    /// The median of a figure over the rounds with this tag.
    fn median(
        &self,
        bytes: u64,
        subject: Subject,
        tag: char,
        figure: impl Fn(&Outcome) -> Option<f64>,
    ) -> Option<f64> {
        median(
            &self.tagged(bytes, subject, tag).filter_map(|(_, outcome)| figure(&outcome)).collect::<Vec<_>>(),
        )
    }

    /// The median of the ratios over the rounds in which both samples had this tag.
    fn ratio(&self, bytes: u64, ours: Subject, theirs: Subject, tag: char) -> Option<f64> {
        let theirs: BTreeMap<u32, Outcome> = self.tagged(bytes, theirs, tag).collect();
        let ratios: Vec<f64> = self
            .tagged(bytes, ours, tag)
            .filter_map(|(round, ours)| Some(ours.value / theirs.get(&round)?.value))
            .collect();
        median(&ratios)
    }

    fn tags(&self, bytes: u64, subjects: &[Subject]) -> BTreeSet<char> {
        let of = |&subject: &Subject| {
            self.0.get(&(bytes, subject)).into_iter().flat_map(BTreeMap::values).map(Sample::tag)
        };
        subjects.iter().flat_map(of).collect()
    }

    /// All measurements as JSON.
    pub(super) fn to_json(&self) -> Value {
        let mut list = Vec::new();
        for ((bytes, subject), rounds) in &self.0 {
            for (round, sample) in rounds {
                list.push(json!({
                    "what": subject.name(), "bytes": bytes, "round": round, "value": sample.outcome.value,
                    "t_99%": sample.outcome.tail, "CPU_sec_per_GiB": sample.outcome.cpu,
                    "cores_before": sample.before.to_string(), "cores_after": sample.after.to_string(),
                    "tag": sample.tag().to_string(),
                }));
            }
        }
        json!({ "unit": "usec (half round trip) and Gb/sec", "samples": list })
    }
}

/// Prints both tables.
pub(super) fn print(args: &CompareArgs, samples: &Samples, cpus: (usize, usize)) {
    let ours = args.our_mtu.map_or_else(String::new, |mtu| format!(", ours at MTU {mtu}"));
    println!(
        "Medians of {} rounds, CPUs {} and {}{ours}. Cores: N near, F far, ~ changed during the measurement.",
        args.rounds, cpus.0, cpus.1
    );
    if !args.latency_sizes.is_empty() {
        println!("\nHalf round trip [usec]; ratios are ours to kernel TCP's, below 1 is faster");
        let ratios = [
            (Subject::SendLat, Subject::TcpPolling),
            (Subject::WriteLat, Subject::TcpPolling),
            (Subject::SendLat, Subject::TcpSleeping),
        ];
        print!("{}", table(samples, &args.latency_sizes, &Subject::LATENCIES, &ratios, false));
    }
    if !args.bandwidth_sizes.is_empty() {
        println!(
            "\nBandwidth [Gb/sec] and CPU time [s/GiB, both ends]; ratios are ours to kernel TCP's, above 1 is faster"
        );
        let ratios = [
            (Subject::WriteBw, Subject::TcpOffloadsOff),
            (Subject::SendBw, Subject::TcpOffloadsOff),
            (Subject::WriteBw, Subject::TcpDefault),
        ];
        print!("{}", table(samples, &args.bandwidth_sizes, &Subject::BANDWIDTHS, &ratios, true));
    }
}

fn table(
    samples: &Samples,
    sizes: &[u64],
    subjects: &[Subject],
    ratios: &[(Subject, Subject)],
    cpu: bool,
) -> String {
    let mut text = format!(" {:<8} {:<5}", "#bytes", "cores");
    for subject in subjects {
        let _ = write!(text, " {:>17}", subject.name());
    }
    for (ours, theirs) in ratios {
        let _ = write!(text, " {:>22}", format!("{}/{}", ours.name(), theirs.name()));
    }
    text.push('\n');
    for &bytes in sizes {
        for tag in samples.tags(bytes, subjects) {
            let _ = write!(text, " {:<8} {tag:<5}", short_bytes(bytes));
            for &subject in subjects {
                let mut cell = figure(samples.median(bytes, subject, tag, |o| Some(o.value)));
                if cpu {
                    let _ = write!(cell, " ({})", figure(samples.median(bytes, subject, tag, |o| o.cpu)));
                }
                let _ = write!(text, " {cell:>17}");
            }
            for &(ours, theirs) in ratios {
                let _ = write!(text, " {:>22}", figure(samples.ratio(bytes, ours, theirs, tag)));
            }
            text.push('\n');
        }
    }
    text
}

/// Formats a figure; a dash when no round had this tag.
fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(value: f64) -> Outcome {
        Outcome { value, tail: None, cpu: Some(value / 10.0) }
    }

    #[test]
    fn ratios_are_within_a_round_and_a_tag() {
        let (near, far) = (Distance::Near(100), Distance::Far(400));
        let mut samples = Samples::default();
        // Round 0 near, round 1 far, round 2 near for one and changing for the other.
        for (round, ours, theirs) in
            [(0, (1.0, near), (2.0, near)), (1, (3.0, far), (4.0, far)), (2, (9.0, near), (1.0, far))]
        {
            samples.add(round, Subject::SendLat, 64, outcome(ours.0), ours.1, ours.1);
            samples.add(
                round,
                Subject::TcpPolling,
                64,
                outcome(theirs.0),
                theirs.1,
                if round == 2 { near } else { theirs.1 },
            );
        }
        let ratio = |tag| samples.ratio(64, Subject::SendLat, Subject::TcpPolling, tag);
        assert_eq!((ratio('N'), ratio('F'), ratio('~')), (Some(0.5), Some(0.75), None));
        assert_eq!(samples.median(64, Subject::SendLat, 'N', |o| Some(o.value)), Some(5.0));
        assert_eq!(samples.tags(64, &Subject::LATENCIES), BTreeSet::from(['F', 'N', '~']));
        let text =
            table(&samples, &[64], &Subject::LATENCIES, &[(Subject::SendLat, Subject::TcpPolling)], false);
        assert_eq!(text.lines().count(), 4, "{text}");
        assert_eq!(samples.to_json()["samples"].as_array().map(Vec::len), Some(6));
    }
}
