//! The goals of the project's performance milestone, as ratios within a round.

use serde::Serialize;

use super::{
    plan::{Figure, LARGE, REGISTERED, SMALL, Subject},
    samples::{ANY, Case, Samples},
};
use crate::{
    options::{CompareArgs, Group},
    stats::{Limit, Spread},
};

/// A goal with its result at one distance of the cores.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Goal {
    /// Number of the goal; several rows may share it.
    pub number: u8,
    pub text: String,
    pub limit: Limit,
    /// `None` when nothing was measured.
    pub tag: Option<char>,
    pub found: Option<Spread>,
}

/// The value of a goal.
#[derive(Debug, Clone, Copy)]
enum Value {
    Ratio(Side, Side, Figure),
    Plain(Case, Figure),
}

/// One side of a ratio.
#[derive(Debug, Clone, Copy)]
enum Side {
    At(Case),
    /// Raw frames over xsk-rs, in the mode with the best median, in this table and row.
    Limit(Group, u64),
    /// The bulk transfer at the MTU with the highest median bandwidth of this subject.
    Best(Subject),
}

impl Side {
    fn resolve(self, samples: &Samples, figure: Figure, tag: char) -> Option<Case> {
        match self {
            Self::At(case) => Some(case),
            Self::Limit(group, x) => {
                let modes = [Subject::XskGeneric, Subject::XskNative].map(|subject| (group, x, subject));
                let medians = modes.into_iter().filter_map(|case| {
                    let median = samples.spread(case, figure, tag)?.median;
                    Some((case, if figure == Figure::HalfRoundTrip { -median } else { median }))
                });
                medians.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(case, _)| case)
            }
            Self::Best(subject) => {
                let cases = samples.values(Group::Bulk).into_iter().map(|mtu| (Group::Bulk, mtu, subject));
                let bandwidth = |case| Some((case, samples.spread(case, Figure::Bandwidth, tag)?.median));
                cases.filter_map(bandwidth).max_by(|a, b| a.1.total_cmp(&b.1)).map(|(case, _)| case)
            }
        }
    }
}

impl Value {
    fn group(self) -> Group {
        match self {
            Self::Ratio(Side::At(case), ..) | Self::Plain(case, _) => case.0,
            Self::Ratio(Side::Limit(group, _), ..) => group,
            Self::Ratio(Side::Best(_), ..) => Group::Bulk,
        }
    }

    fn found(self, samples: &Samples, tag: char) -> Option<Spread> {
        match self {
            Self::Ratio(ours, theirs, figure) => {
                let case = |side: Side| side.resolve(samples, figure, tag);
                samples.ratio(case(ours)?, case(theirs)?, figure, tag)
            }
            Self::Plain(case, figure) => samples.spread(case, figure, tag),
        }
    }
}

/// All goals of the measured tables: over all rounds, and once for each distance of the cores that occurred.
pub(super) fn goals(args: &CompareArgs, samples: &Samples) -> Vec<Goal> {
    let mut list = Vec::new();
    for (number, text, value, limit) in definitions(args) {
        let group = value.group();
        if !args.measures(group) {
            continue;
        }
        let goal = |tag, found| Goal { number, text: text.clone(), limit, tag, found };
        let before = list.len();
        let tags = samples.tags(group);
        let any = (tags.len() > 1).then_some(ANY);
        for tag in any.into_iter().chain(tags) {
            if let Some(found) = value.found(samples, tag) {
                list.push(goal(Some(tag), Some(found)));
            }
        }
        if list.len() == before {
            list.push(goal(None, None));
        }
    }
    list
}

/// Number, text, value and limit of a goal.
type Definition = (u8, String, Value, Limit);

fn at(group: Group, x: u64, subject: Subject) -> Side {
    Side::At((group, x, subject))
}

fn definitions(args: &CompareArgs) -> Vec<Definition> {
    let mut list = latencies();
    bulk(args, &mut list);
    limits(args, &mut list);
    busy(&mut list);
    rates_and_resources(args, &mut list);
    list.sort_by_key(|&(number, ..)| number);
    list
}

fn latencies() -> Vec<Definition> {
    use Subject::{Raw, Send, Tcp, Write, WriteImmediate};
    let goals = [
        (Group::Polling, "polling", Send, Raw, 1.35),
        (Group::Polling, "polling", Write, Raw, 1.35),
        (Group::Polling, "polling", Send, Tcp, 0.65),
        (Group::Polling, "polling", Write, Tcp, 0.65),
        (Group::Sleeping, "sleeping", Send, Tcp, 1.0),
        (Group::Sleeping, "sleeping", WriteImmediate, Tcp, 1.0),
    ];
    let definition = |(group, how, ours, theirs, limit): (Group, &str, Subject, Subject, f64)| {
        let (ours_name, theirs_name) = (ours.name(), theirs.name());
        let text = format!("{SMALL} B half round trip, both ends {how}: {ours_name} / {theirs_name}");
        let value = Value::Ratio(at(group, SMALL, ours), at(group, SMALL, theirs), Figure::HalfRoundTrip);
        (1, text, value, Limit::AtMost(limit))
    };
    goals.map(definition).to_vec()
}

fn bulk(args: &CompareArgs, list: &mut Vec<Definition>) {
    use Limit::AtLeast;
    use Subject::{Raw, Tcp, TcpOffloadsOff, Write};
    let mut add = |number, text: String, value, limit| list.push((number, text, value, limit));
    let large = format!("{} KiB messages", LARGE >> 10);
    for &mtu in &args.mtus {
        let (ours, raw) = (at(Group::Bulk, mtu.into(), Write), at(Group::Bulk, mtu.into(), Raw));
        let text = format!("bandwidth of {large} at MTU {mtu}: Write / raw AF_XDP");
        add(3, text, Value::Ratio(ours, raw, Figure::Bandwidth), AtLeast(0.85));
    }
    let first = args.mtus.first().copied().unwrap_or_default();
    let (best, off) = (Side::Best(Write), at(Group::Bulk, first.into(), TcpOffloadsOff));
    let bandwidth = |ours, theirs| Value::Ratio(ours, theirs, Figure::Bandwidth);
    add(
        3,
        format!("the same: Write at its best MTU / TCP, offloads off, at MTU {first}"),
        bandwidth(best, off),
        AtLeast(2.5),
    );
    add(
        4,
        "the same, each at its best MTU: Write / raw AF_XDP".into(),
        bandwidth(best, Side::Best(Raw)),
        AtLeast(0.85),
    );
    for subject in [Write, Raw] {
        let text = format!("the same, each at its best MTU: {} / TCP", subject.name());
        add(4, text, bandwidth(Side::Best(subject), Side::Best(Tcp)), Limit::None);
    }
    add(
        6,
        format!("CPU time for each GiB: Write at its best MTU / TCP, offloads off, at MTU {first}"),
        Value::Ratio(best, off, Figure::Cpu),
        Limit::AtMost(1.0),
    );
}

/// The distance to frames without xwarp, whole and the driver's part.
fn limits(args: &CompareArgs, list: &mut Vec<Definition>) {
    use Subject::{Raw, Send, Write};
    let small = Side::Limit(Group::Polling, SMALL);
    for (subject, limit) in [(Send, Limit::AtMost(1.35)), (Write, Limit::AtMost(1.35)), (Raw, Limit::None)] {
        let text = format!("{SMALL} B half round trip, both ends polling: {} / raw xsk-rs", subject.name());
        let value = Value::Ratio(at(Group::Polling, SMALL, subject), small, Figure::HalfRoundTrip);
        list.push((2, text, value, limit));
    }
    for &mtu in &args.mtus {
        let theirs = Side::Limit(Group::Bulk, mtu.into());
        for (subject, limit) in [(Write, Limit::AtLeast(0.9)), (Raw, Limit::None)] {
            let large = LARGE >> 10;
            let text =
                format!("bandwidth of {large} KiB messages at MTU {mtu}: {} / raw xsk-rs", subject.name());
            let value = Value::Ratio(at(Group::Bulk, mtu.into(), subject), theirs, Figure::Bandwidth);
            list.push((2, text, value, limit));
        }
    }
}

fn busy(list: &mut Vec<Definition>) {
    use Subject::{Send, SleepingWrite, Tcp, Write};
    for subject in [Send, Write] {
        let text = format!("busy machine, 99 % of the {SMALL} B half round trips: {} / TCP", subject.name());
        let [ours, theirs] = [subject, Tcp].map(|subject| at(Group::BusyLatency, SMALL, subject));
        list.push((8, text, Value::Ratio(ours, theirs, Figure::Tail), Limit::AtMost(1.0)));
    }
    for subject in [Write, SleepingWrite] {
        let large = LARGE >> 10;
        let text = format!("busy machine, bandwidth of {large} KiB messages: {} / TCP", subject.name());
        let [ours, theirs] = [subject, Tcp].map(|subject| at(Group::BusyBandwidth, LARGE, subject));
        list.push((8, text, Value::Ratio(ours, theirs, Figure::Bandwidth), Limit::AtLeast(0.8)));
    }
}

fn rates_and_resources(args: &CompareArgs, list: &mut Vec<Definition>) {
    use Limit::{AtLeast, AtMost};
    use Subject::{Raw, Send, Write};
    let mut add = |number, text: String, value, limit| list.push((number, text, value, limit));
    for subject in [Write, Send] {
        let text = format!("rate of {SMALL} B messages, one queue pair: {} / raw AF_XDP", subject.name());
        let (ours, raw) = (at(Group::Rate, SMALL, subject), at(Group::Rate, SMALL, Raw));
        add(5, text, Value::Ratio(ours, raw, Figure::Rate), AtLeast(3.0));
    }
    let pairs = args.queue_pairs.iter().copied();
    if let (Some(one), Some(many)) = (pairs.clone().min(), pairs.max()) {
        for (group, what, figure) in [
            (Group::Pairs, format!("bandwidth of {} KiB messages", LARGE >> 10), Figure::Bandwidth),
            (Group::PairsRate, format!("rate of {SMALL} B messages"), Figure::Rate),
        ] {
            let text = format!("{what}, Write: {many} queue pairs / {one}");
            let value = Value::Ratio(at(group, many.into(), Write), at(group, one.into(), Write), figure);
            add(6, text, value, AtLeast(0.8));
        }
        let memory = Value::Plain((Group::Memory, many.into(), Write), Figure::Memory);
        add(6, "memory of an idle connection at one end, in bytes".into(), memory, AtMost(4096.0));
    }
    let device = (Group::Idle, REGISTERED, Subject::Device);
    let (idle, register) =
        (Value::Plain(device, Figure::IdleCpu), Value::Plain(device, Figure::Registration));
    add(7, "CPU time of an idle device, in percent of one CPU".into(), idle, AtMost(0.1));
    add(7, "time to register 1 GiB, in microseconds".into(), register, AtMost(10.0));
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::{super::samples::Outcome, *};
    use crate::{
        cpu::Distance,
        options::{Cli, Command},
    };

    fn args(line: &str) -> Box<CompareArgs> {
        let Command::Compare(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
            panic!("not compare")
        };
        args
    }

    #[test]
    fn the_best_mtu_of_each_subject_is_compared() {
        let args = args("xwarp-perf compare --only bulk --mtus 1500,9000");
        let mut samples = Samples::default();
        let near = Distance::Near(100);
        let mut add = |mtu, subject, bandwidth, cpu| {
            let outcome = Outcome { bandwidth: Some(bandwidth), cpu: Some(cpu), ..Outcome::default() };
            samples.add(0, (Group::Bulk, mtu, subject), outcome, near, near);
        };
        add(1500, Subject::Write, 2.0, 4.0);
        add(9000, Subject::Write, 6.0, 1.0);
        add(1500, Subject::Raw, 4.0, 1.0);
        add(9000, Subject::Raw, 3.0, 1.0);
        add(1500, Subject::TcpOffloadsOff, 2.0, 2.0);
        let goals = goals(&args, &samples);
        let found = |text: &str| {
            let goal = goals.iter().find(|goal| goal.text.contains(text)).unwrap();
            (goal.found.map(|spread| spread.median), goal.found.and_then(|s| goal.limit.is_met(s.median)))
        };
        assert_eq!(found("MTU 9000: Write / raw AF_XDP"), (Some(2.0), Some(true)));
        assert_eq!(found("MTU 1500: Write / raw AF_XDP"), (Some(0.5), Some(false)));
        assert_eq!(found("best MTU / TCP, offloads off"), (Some(3.0), Some(true)));
        assert_eq!(found("each at its best MTU: Write / raw AF_XDP"), (Some(1.5), Some(true)));
        assert_eq!(found("each at its best MTU: Write / TCP"), (None, None));
        assert_eq!(found("CPU time"), (Some(0.5), Some(true)));
        assert!(goals.iter().all(|goal| goal.number != 1), "the latency tables were not measured");
    }
}
