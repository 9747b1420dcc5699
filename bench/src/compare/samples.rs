//! All measurements of a run, their medians and ratios. Values are compared only within a round: for each distance between the two
//! cores, of the rounds in which it was the same for both, and for all rounds together.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::plan::{Figure, Subject};
use crate::{cpu::Distance, options::Group, stats::Spread};

/// The figures of one row of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Outcome {
    /// Message size.
    pub bytes: u64,
    /// Median half round trip, in microseconds.
    pub latency: Option<f64>,
    /// 99th percentile of the same.
    pub tail: Option<f64>,
    /// Gb/s.
    pub bandwidth: Option<f64>,
    /// Millions of messages a second.
    pub rate: Option<f64>,
    /// CPU seconds of both ends for each GiB.
    pub cpu: Option<f64>,
    /// Bytes of memory for each connection.
    pub memory: Option<f64>,
    /// CPU time without traffic, in percent of one CPU.
    pub idle_cpu: Option<f64>,
    /// Microseconds to register memory.
    pub registration: Option<f64>,
}

impl Outcome {
    pub(super) fn figure(&self, figure: Figure) -> Option<f64> {
        match figure {
            Figure::HalfRoundTrip => self.latency,
            Figure::Tail => self.tail,
            Figure::Bandwidth => self.bandwidth,
            Figure::Rate => self.rate,
            Figure::Cpu => self.cpu,
            Figure::Memory => self.memory,
            Figure::IdleCpu => self.idle_cpu,
            Figure::Registration => self.registration,
        }
    }
}

/// One row of one measurement.
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

/// The tag of all rounds together, whatever the distances of the cores were.
pub(super) const ANY: char = '*';

/// The case of a measurement: table, value of the first column, and subject.
pub(super) type Case = (Group, u64, Subject);

/// All measurements, by case and round.
#[derive(Debug, Default)]
pub(super) struct Samples(BTreeMap<Case, BTreeMap<u32, Sample>>);

impl Samples {
    pub(super) fn add(
        &mut self,
        round: u32,
        case: Case,
        outcome: Outcome,
        before: Distance,
        after: Distance,
    ) {
        self.0.entry(case).or_default().insert(round, Sample { outcome, before, after });
    }

    /// The figures of a case, by round, of the rounds with this tag.
    fn tagged(&self, case: Case, figure: Figure, tag: char) -> BTreeMap<u32, f64> {
        let rounds = self.0.get(&case).into_iter().flatten();
        rounds
            .filter(|(_, sample)| tag == ANY || sample.tag() == tag)
            .filter_map(|(&round, sample)| Some((round, sample.outcome.figure(figure)?)))
            .collect()
    }

    /// The median and the spread of a figure over the rounds with this tag.
    pub(super) fn spread(&self, case: Case, figure: Figure, tag: char) -> Option<Spread> {
        Spread::of(&self.tagged(case, figure, tag).into_values().collect::<Vec<_>>())
    }

    /// The median and the spread of the ratios of `ours` to `theirs`, over the rounds in which both had this tag.
    pub(super) fn ratio(&self, ours: Case, theirs: Case, figure: Figure, tag: char) -> Option<Spread> {
        let theirs = self.tagged(theirs, figure, tag);
        let ours = self.tagged(ours, figure, tag);
        let ratios = ours.iter().filter_map(|(round, ours)| Some(ours / theirs.get(round)?));
        Spread::of(&ratios.collect::<Vec<_>>())
    }

    /// The tags of a table's samples.
    pub(super) fn tags(&self, group: Group) -> BTreeSet<char> {
        self.of(group).flat_map(|(_, rounds)| rounds.values().map(Sample::tag)).collect()
    }

    /// The tag that most samples of a table have.
    pub(super) fn usual_tag(&self, group: Group) -> Option<char> {
        let mut counts = BTreeMap::<char, usize>::new();
        for sample in self.of(group).flat_map(|(_, rounds)| rounds.values()) {
            *counts.entry(sample.tag()).or_default() += 1;
        }
        counts.into_iter().max_by_key(|&(_, count)| count).map(|(tag, _)| tag)
    }

    /// The values of a table's first column.
    pub(super) fn values(&self, group: Group) -> BTreeSet<u64> {
        self.of(group).map(|(&(_, x, _), _)| x).collect()
    }

    fn of(&self, group: Group) -> impl Iterator<Item = (&Case, &BTreeMap<u32, Sample>)> {
        self.0.iter().filter(move |((found, _, _), _)| *found == group)
    }

    /// Whether anything was measured.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All measurements as JSON.
    pub(super) fn to_json(&self) -> Vec<Value> {
        let mut list = Vec::new();
        for (&(group, x, subject), rounds) in &self.0 {
            for (round, sample) in rounds {
                let outcome = sample.outcome;
                list.push(json!({
                    "table": format!("{group:?}"), group.axis(): x, "what": subject.name(), "round": round,
                    "half_round_trip_us": outcome.latency, "p99_us": outcome.tail,
                    "gbits": outcome.bandwidth, "million_messages": outcome.rate,
                    "cpu_sec_per_gib": outcome.cpu, "bytes_per_connection": outcome.memory,
                    "idle_cpu_percent": outcome.idle_cpu, "registration_us": outcome.registration,
                    "cores_before": sample.before.to_string(), "cores_after": sample.after.to_string(),
                    "tag": sample.tag().to_string(),
                }));
            }
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: [Case; 2] = [(Group::Polling, 64, Subject::Send), (Group::Polling, 64, Subject::Tcp)];

    fn outcome(latency: f64) -> Outcome {
        Outcome { latency: Some(latency), ..Outcome::default() }
    }

    #[test]
    fn ratios_are_within_a_round_and_a_tag() {
        let (near, far) = (Distance::Near(100), Distance::Far(400));
        let mut samples = Samples::default();
        // Round 0 near, round 1 far, round 2 near for one and changing for the other.
        for (round, ours, theirs) in
            [(0, (1.0, near), (2.0, near)), (1, (3.0, far), (4.0, far)), (2, (9.0, near), (1.0, far))]
        {
            samples.add(round, CASE[0], outcome(ours.0), ours.1, ours.1);
            let after = if round == 2 { near } else { theirs.1 };
            samples.add(round, CASE[1], outcome(theirs.0), theirs.1, after);
        }
        let figure = Figure::HalfRoundTrip;
        let ratio = |tag| samples.ratio(CASE[0], CASE[1], figure, tag).map(|spread| spread.median);
        assert_eq!((ratio('N'), ratio('F'), ratio('~')), (Some(0.5), Some(0.75), None));
        assert_eq!(ratio(ANY), Some(0.75), "of 0.5, 0.75 and 9");
        let near = samples.spread(CASE[0], figure, 'N').unwrap();
        assert_eq!((near.median, near.min, near.max, near.count), (5.0, 1.0, 9.0, 2));
        assert_eq!(samples.spread(CASE[0], Figure::Bandwidth, 'N'), None);
        assert_eq!(samples.tags(Group::Polling), BTreeSet::from(['F', 'N', '~']));
        assert_eq!(samples.usual_tag(Group::Polling), Some('N'));
        assert_eq!(samples.to_json().len(), 6);
    }
}
