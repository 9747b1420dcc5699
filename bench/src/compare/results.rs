//! [`Run`]: the results of a run, and the page about them.

use std::{fs, time::Duration};

use super::{
    goals::Goal,
    page::{Page, Section, Table},
    plan::{Figure, LARGE, SMALL, Subject},
    plot::Plot,
    samples::Samples,
};
use crate::{
    cpu,
    options::{CompareArgs, Group},
    stats::Spread,
    units::short_bytes,
};

/// The machine of a run.
#[derive(Debug)]
pub(super) struct Machine {
    kernel: String,
    processor: String,
    cpus: usize,
    /// Nanoseconds of a system call that does nothing.
    system_call: Option<f64>,
    /// Load averages (1, 5, 15 minutes) before the run.
    load: String,
    /// Whether this process and its children have a real-time scheduling policy.
    realtime: bool,
}

impl Machine {
    /// Describes this machine.
    pub(super) fn describe() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| Some(line.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned()));
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor: processor.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpus: cpu::allowed().len(),
            system_call: cpu::system_call_ns(),
            load: load(),
            realtime: cpu::is_realtime(),
        }
    }

    /// The description, as one line for each fact.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!("Linux {}, {} CPUs: {}", self.kernel, self.cpus, self.processor),
            format!("load average before the run (1, 5, 15 minutes): {}", self.load),
        ];
        if self.realtime {
            lines.push("all programs ran with a real-time scheduling policy".to_owned());
        }
        // `ci/profile` sets it.
        if let Some(build) = option_env!("XWARP_BUILD") {
            lines.push(format!("a {build} build"));
        }
        if let Some(ns) = self.system_call {
            lines.push(format!("a system call that does nothing takes {ns:.0} ns"));
        }
        lines
    }
}

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// The results of a run.
pub(super) struct Run<'a> {
    pub args: &'a CompareArgs,
    pub cpus: (usize, usize),
    pub machine: Machine,
    pub elapsed: Duration,
    /// Whether libfabric's program is installed.
    pub libfabric: bool,
    /// The table of Soft-iWARP, measured earlier.
    pub siw: Option<Table>,
    pub samples: Samples,
    pub goals: Vec<Goal>,
    pub failures: Vec<String>,
}

impl Run<'_> {
    /// The page.
    pub(super) fn page(&self) -> Page {
        let mut sections = vec![self.method()];
        if !self.goals.is_empty() {
            sections.push(self.goal_section());
        }
        let measured = |group: &Group| self.args.measures(*group);
        sections.extend(Group::ALL.into_iter().filter(measured).map(|group| self.table_section(group)));
        sections.extend(self.siw.clone().map(siw_section));
        Page { title: "Performance: xwarp, raw AF_XDP and kernel TCP".into(), sections }
    }

    fn method(&self) -> Section {
        let args = self.args;
        let mut paragraphs = vec![
            "`xwarp-perf compare` measured and wrote this page. Two processes, each pinned to one CPU and in its own \
             network namespace, exchange messages over one veth pair. A round measures every subject once, one after \
             the other; the order within a table changes from round to round. Each cell is a median over rounds with \
             the smallest and the largest value in parentheses. A ratio is taken within a round, and the table has \
             the median of these ratios."
                .to_owned(),
            "The host of a virtual machine can move the CPUs at any time, which changes the cost of communication \
             between them several times over. Rows are therefore separate by the distance of the two cores, measured \
             before and after each measurement: N near (the round trip of a cache line takes less than 220 ns), F \
             far, ~ changed in between, ? one CPU or unknown. The goals are also given over all rounds (*), in which \
             the distance may differ between the two sides of a ratio."
                .to_owned(),
            "raw AF_XDP is `xwarp-perf raw_bw` and `raw_lat`: payloads are copied from and to the application's \
             memory, every fourth frame is acknowledged by a frame, and a window limits the frames in flight. It has \
             no retransmission, congestion control, checksum, CRC or framing. It uses xwarp's driver, so the cost of \
             the driver's rings is in both, and both have the same XDP mode: with Auto, generic on a veth of one \
             queue. raw xsk-rs sends the same frames through the package xsk-rs and libxdp's program, which share nothing \
             with xwarp: the faster of its two modes is the limit. xwarp has CRC on, and markers if the peer requests them; on a veth it leaves TCP checksums to \
             the kernel, as kernel TCP does. TCP is kernel TCP with all offloads; with offloads off, it has no \
             segmentation or receive offload."
                .to_owned(),
            if self.libfabric {
                "libfabric tcp is libfabric's tcp provider over kernel TCP, with connected endpoints, as fi_pingpong \
                 measures it: both ends spin, with one message at a time. Its half round trips are means, and its bandwidth is \
                 a message's size over that mean."
            } else {
                "libfabric's tcp provider was not measured: fi_pingpong (Debian's libfabric-bin) is not installed."
            }
            .to_owned(),
        ];
        let omitted: Vec<String> = Group::ALL
            .into_iter()
            .filter(|&group| group.is_default() && !args.measures(group))
            .map(|group| heading(group).0)
            .collect();
        if !omitted.is_empty() {
            paragraphs.push(format!("Not measured in this run: {}.", omitted.join("; ")));
        }
        if args.quick {
            paragraphs.push("This was a run with --quick: its figures have no meaning.".to_owned());
        }
        let mut lines = self.machine.lines();
        lines.push(format!("load average after the run: {}", load()));
        lines.push(format!(
            "{} {} of {} s a measurement, in {}; CPUs {} and {}; XDP mode {:?}",
            args.rounds(),
            if args.rounds() == 1 { "round" } else { "rounds" },
            args.duration().as_secs_f64(),
            minutes(self.elapsed),
            self.cpus.0,
            self.cpus.1,
            args.mode
        ));
        paragraphs.push(format!("{}.", lines.join("; ")));
        if !self.failures.is_empty() {
            paragraphs.push(format!("Failed measurements, left out: {}.", self.failures.join("; ")));
        }
        Section { heading: "Method".into(), paragraphs, ..Section::default() }
    }

    fn goal_section(&self) -> Section {
        let head = ["", "goal", "limit", "cores", "median", "min", "max", "rounds", "met"];
        let rows = self.goals.iter().map(|goal| {
            let digits =
                |value: f64| if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
            let cell = |value: fn(&Spread) -> f64| {
                goal.found.as_ref().map_or_else(dash, |spread| digits(value(spread)))
            };
            let met = goal.found.and_then(|spread| goal.limit.is_met(spread.median));
            vec![
                goal.number.to_string(),
                goal.text.clone(),
                goal.limit.to_string(),
                goal.tag.map_or_else(dash, |tag| tag.to_string()),
                cell(|s| s.median),
                cell(|s| s.min),
                cell(|s| s.max),
                goal.found.map_or_else(dash, |spread| spread.count.to_string()),
                met.map_or_else(dash, |met| if met { "yes" } else { "no" }.to_owned()),
            ]
        });
        let table = Table { head: head.map(str::to_owned).to_vec(), rows: rows.collect() };
        let text = "Ratios of interleaved measurements, by the number of the goal.".to_owned();
        Section { heading: "Goals".into(), paragraphs: vec![text], tables: vec![table], ..Section::default() }
    }

    fn table_section(&self, group: Group) -> Section {
        let (heading, note) = heading(group);
        let largest = self.args.mtus.iter().max().copied().unwrap_or_default();
        let first = self.args.mtus.first().copied().unwrap_or_default();
        let mtu = match group {
            Group::Polling | Group::Sleeping | Group::Rate | Group::FramingsRate => format!(" MTU {first}."),
            Group::Bulk | Group::Framings => String::new(),
            _ => format!(" MTU {largest}."),
        };
        Section {
            heading,
            paragraphs: vec![format!("{note}{mtu}")],
            tables: group.figures().iter().map(|&figure| self.table(group, figure)).collect(),
            plots: self.plot(group).into_iter().collect(),
        }
    }

    fn table(&self, group: Group, figure: Figure) -> Table {
        let mut head = vec![group.axis().to_owned(), "cores".to_owned()];
        let present = |subject: Subject| self.libfabric || subject != Subject::Libfabric;
        let subjects: Vec<Subject> = group.subjects().iter().copied().filter(|&s| present(s)).collect();
        let ratios: Vec<_> =
            group.ratios().iter().copied().filter(|&(a, b)| present(a) && present(b)).collect();
        head.extend(subjects.iter().map(|s| format!("{} [{}]", s.name(), figure.unit())));
        head.extend(ratios.iter().map(|(a, b)| format!("{} / {}", a.name(), b.name())));
        let mut rows = Vec::new();
        for x in self.samples.values(group) {
            for tag in self.samples.tags(group) {
                let mut found = false;
                let mut row = vec![group.label(x), tag.to_string()];
                for &subject in &subjects {
                    let spread = self.samples.spread((group, x, subject), figure, tag);
                    found |= spread.is_some();
                    row.push(spread.map_or_else(dash, cell));
                }
                for &(ours, theirs) in &ratios {
                    let spread = self.samples.ratio((group, x, ours), (group, x, theirs), figure, tag);
                    row.push(spread.map_or_else(dash, cell));
                }
                if found {
                    rows.push(row);
                }
            }
        }
        Table { head, rows }
    }

    fn plot(&self, group: Group) -> Option<Plot> {
        let values = self.samples.values(group);
        let tag = self.samples.usual_tag(group).filter(|_| values.len() > 2 || group.axis() == "MTU")?;
        let figure = *group.figures().first()?;
        let lines = group.subjects().iter().map(|&subject| {
            let points = values.iter();
            let points =
                points.filter_map(|&x| Some((x, self.samples.spread((group, x, subject), figure, tag)?)));
            (subject.name().to_owned(), points.collect::<Vec<_>>())
        });
        Some(Plot {
            title: format!("{} (cores {tag})", heading(group).0),
            x_label: group.axis(),
            y_label: figure.unit().to_owned(),
            x_text: if group.axis() == "bytes" { short_bytes } else { |x| x.to_string() },
            logarithmic: matches!(group, Group::LatencySizes | Group::BandwidthSizes),
            lines: lines.filter(|(_, points)| !points.is_empty()).collect(),
        })
    }
}

/// Soft-iWARP's table, which is of another machine.
fn siw_section(table: Table) -> Section {
    let text = "siw, the kernel's iWARP over kernel TCP, is not in the tables above: it is a kernel module, and few \
                kernels have it. `ci/vm/measure` measured it, and xwarp with it and with itself, in a virtual machine \
                at MTU 1500 that is emulated and counts instructions, so only the ratios to kernel TCP in that machine \
                mean something, and none of its figures compares with the tables above. Above 1 is faster for \
                bandwidth, below 1 for latency; docs/measurements/siw.md has the method and the results.";
    Section {
        heading: "Soft-iWARP (siw) in a virtual machine, recorded earlier".into(),
        paragraphs: vec![text.to_owned()],
        tables: vec![table],
        ..Section::default()
    }
}

/// The note on measurements beside other work.
const BUSY: &str =
    "Two busy loops run on each of the two CPUs. Both ends spin, except where the column has another word.";

/// The heading of a table, and the notes on it.
fn heading(group: Group) -> (String, String) {
    let (small, large) = (SMALL, format!("{} KiB", LARGE >> 10));
    let (heading, note) = match group {
        Group::Polling => ("Half round trip, polling".to_owned(), "Both ends spin.".to_owned()),
        Group::Sleeping => (
            "Half round trip, sleeping".to_owned(),
            "Both ends sleep until a message arrives. An RDMA Write does not wake the receiver, so Write with Immediate takes \
             its place."
                .to_owned(),
        ),
        Group::Rate => (
            format!("Rate of {small} B messages"),
            "One queue pair, many messages in flight. raw AF_XDP sends one message a frame; TCP is a byte stream and \
             joins messages."
                .to_owned(),
        ),
        Group::Bulk => (
            format!("Bandwidth of {large} messages by MTU"),
            "One queue pair or connection. The second table has the CPU time of both ends.".to_owned(),
        ),
        Group::Framings => (
            format!("Bandwidth of {large} Writes by framing and MTU"),
            "One queue pair or connection, all with CRC. The second table has the CPU time of both ends.".to_owned(),
        ),
        Group::FramingsRate => (
            format!("Rate of {small} B Writes by framing"),
            "One queue pair, many messages in flight. MPA sends several in a TCP segment, RDMA/TCP one; TCP is a byte \
             stream and joins messages."
                .to_owned(),
        ),
        Group::Pairs => (
            format!("Bandwidth of {large} Writes by queue pairs"),
            "All queue pairs send at once; the sum counts.".to_owned(),
        ),
        Group::PairsRate => (
            format!("Rate of {small} B Writes by queue pairs"),
            "All queue pairs send at once; the sum counts.".to_owned(),
        ),
        Group::Memory => (
            "Memory of a connection".to_owned(),
            "Growth of the client's resident memory during the set-up of all connections, per connection: with queues of \
             depth 1, and before the first message. The test's buffers and completion queues exist before (an entry takes 64 bytes)."
                .to_owned(),
        ),
        Group::LatencySizes => ("Half round trip by message size".to_owned(), "Both ends spin.".to_owned()),
        Group::BandwidthSizes => {
            ("Bandwidth by message size".to_owned(), "One queue pair or connection.".to_owned())
        }
        Group::BusyLatency => ("Half round trip on a busy machine".to_owned(), BUSY.to_owned()),
        Group::BusyBandwidth => {
            (format!("Bandwidth of {large} Writes on a busy machine"), BUSY.to_owned())
        }
        Group::Idle => (
            "Idle device".to_owned(),
            "CPU time of a program with an open device and no connection, and the time to register memory; no peer \
             takes part."
                .to_owned(),
        ),
    };
    (heading, note)
}

fn dash() -> String {
    "-".to_owned()
}

/// A median with its spread.
fn cell(spread: Spread) -> String {
    let digits = |value: f64| match value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value if value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    };
    if spread.count == 1 {
        return digits(spread.median);
    }
    format!("{} ({}..{})", digits(spread.median), digits(spread.min), digits(spread.max))
}

pub(super) fn minutes(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 90 { format!("{seconds} seconds") } else { format!("{} minutes", seconds.div_ceil(60)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_the_spread_of_several_rounds() {
        let spread = |count| Spread { median: 12.345, min: 0.05, max: 2000.4, count };
        assert_eq!(cell(spread(3)), "12.35 (0.0500..2000)");
        assert_eq!(cell(spread(1)), "12.35");
    }
}
