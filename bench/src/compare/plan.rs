//! The measurements of a round: tables, subjects, and the command of each measurement.

use std::time::Duration;

use xwarp_driver::SINGLE_CHUNK_MTU;

use super::libfabric;
use crate::{
    options::{CompareArgs, DEFAULT_PORT, Group, ModeArg},
    units::short_bytes,
};

/// The subject of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    Send,
    Write,
    WriteImmediate,
    /// Writes with MPA and markers.
    Markers,
    /// Writes with MPA without markers.
    NoMarkers,
    /// Writes with RDMA/TCP of 2000.
    RdmaTcp,
    /// Raw AF_XDP over xwarp's driver.
    Raw,
    /// Raw AF_XDP over xsk-rs in generic mode.
    XskGeneric,
    /// The same in native mode.
    XskNative,
    TcpOffloadsOff,
    Tcp,
    /// Writes whose ends sleep.
    SleepingWrite,
    /// libfabric's `tcp` provider.
    Libfabric,
    /// A device of xwarp without a peer.
    Device,
}

impl Subject {
    /// Name in tables, plots and JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Send => "Send",
            Self::Write => "Write",
            Self::WriteImmediate => "Write with Immediate",
            Self::Markers => "MPA, markers",
            Self::NoMarkers => "MPA, no markers",
            Self::RdmaTcp => "RDMA/TCP",
            Self::Raw => "raw AF_XDP",
            Self::XskGeneric => "raw xsk-rs, generic",
            Self::XskNative => "raw xsk-rs, native",
            Self::TcpOffloadsOff => "TCP, offloads off",
            Self::Tcp => "TCP",
            Self::SleepingWrite => "Write, sleeping",
            Self::Libfabric => "libfabric tcp",
            Self::Device => "xwarp",
        }
    }

    /// Whether the kernel's segmentation and receive offloads stay on.
    pub(super) fn kernel_offloads(self) -> bool {
        self != Self::TcpOffloadsOff
    }

    /// The XDP mode of its ends in a run in this mode.
    fn mode(self, run: ModeArg) -> &'static str {
        match (self, run) {
            (Self::XskGeneric, _) | (_, ModeArg::Generic) => "generic",
            (Self::XskNative, _) | (_, ModeArg::Copy) => "copy",
            (_, ModeArg::Auto) => "auto",
            (_, ModeArg::Zerocopy) => "zerocopy",
        }
    }

    /// Whether frames of `mtu` bytes can be sent: in native mode, a frame on a veth is one chunk.
    fn can_send(self, mtu: u32) -> bool {
        self != Self::XskNative || mtu <= SINGLE_CHUNK_MTU.into()
    }
}

/// The figure that a table shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Figure {
    /// Microseconds.
    HalfRoundTrip,
    /// The 99th percentile of the same.
    Tail,
    /// Gb/s.
    Bandwidth,
    /// Millions of messages a second.
    Rate,
    /// CPU seconds of both ends for each GiB.
    Cpu,
    /// Bytes of memory for each connection of the client's end.
    Memory,
    /// Percent of one CPU.
    IdleCpu,
    /// Microseconds.
    Registration,
}

impl Figure {
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::HalfRoundTrip => "us",
            Self::Tail => "us, 99 %",
            Self::Bandwidth => "Gb/s",
            Self::Rate => "million messages/s",
            Self::Cpu => "CPU s/GiB",
            Self::Memory => "bytes",
            Self::IdleCpu => "% of one CPU",
            Self::Registration => "us to register",
        }
    }
}

impl Group {
    pub(super) const ALL: [Self; 14] = [
        Self::Polling,
        Self::Sleeping,
        Self::Rate,
        Self::Bulk,
        Self::Pairs,
        Self::PairsRate,
        Self::Memory,
        Self::LatencySizes,
        Self::BandwidthSizes,
        Self::BusyLatency,
        Self::BusyBandwidth,
        Self::Idle,
        Self::Framings,
        Self::FramingsRate,
    ];

    pub(super) fn subjects(self) -> &'static [Subject] {
        use Subject::{
            Libfabric, Markers, NoMarkers, Raw, RdmaTcp, Send, SleepingWrite, Tcp, TcpOffloadsOff, Write,
            WriteImmediate, XskGeneric, XskNative,
        };
        match self {
            Self::Polling => &[Send, Write, Raw, XskGeneric, XskNative, Tcp],
            Self::Sleeping => &[Send, WriteImmediate, Raw, Tcp],
            Self::Bulk => &[Write, Send, Raw, XskGeneric, XskNative, TcpOffloadsOff, Tcp],
            Self::Pairs | Self::PairsRate | Self::Memory => &[Write],
            Self::LatencySizes => &[Write, Send, Tcp, Libfabric],
            Self::Rate => &[Write, Send, Raw, Tcp],
            Self::BandwidthSizes => &[Write, Send, Raw, Tcp, Libfabric],
            Self::BusyLatency => &[Send, Write, Tcp],
            Self::BusyBandwidth => &[Write, SleepingWrite, Tcp],
            Self::Idle => &[Subject::Device],
            Self::Framings => &[Markers, NoMarkers, RdmaTcp, TcpOffloadsOff, Tcp],
            Self::FramingsRate => &[Markers, NoMarkers, RdmaTcp, Tcp],
        }
    }

    pub(super) fn figures(self) -> &'static [Figure] {
        match self {
            Self::Polling | Self::Sleeping | Self::LatencySizes => &[Figure::HalfRoundTrip],
            Self::BusyLatency => &[Figure::HalfRoundTrip, Figure::Tail],
            Self::Rate | Self::PairsRate | Self::FramingsRate => &[Figure::Rate],
            Self::Bulk | Self::Framings => &[Figure::Bandwidth, Figure::Cpu],
            Self::Pairs | Self::BandwidthSizes | Self::BusyBandwidth => &[Figure::Bandwidth],
            Self::Memory => &[Figure::Memory],
            Self::Idle => &[Figure::IdleCpu, Figure::Registration],
        }
    }

    /// Pairs of subjects whose ratio the table shows.
    pub(super) fn ratios(self) -> &'static [(Subject, Subject)] {
        use Subject::{
            Libfabric, Markers, NoMarkers, Raw, RdmaTcp, Send, SleepingWrite, Tcp, TcpOffloadsOff, Write,
            WriteImmediate, XskGeneric, XskNative,
        };
        match self {
            Self::Polling => {
                &[(Send, Raw), (Write, Raw), (Raw, XskGeneric), (Raw, XskNative), (Send, Tcp), (Write, Tcp)]
            }
            Self::Sleeping => &[(Send, Raw), (Send, Tcp), (WriteImmediate, Tcp)],
            Self::Rate => &[(Write, Raw), (Send, Raw), (Write, Tcp)],
            Self::Bulk => &[
                (Write, Raw),
                (Send, Raw),
                (Raw, XskGeneric),
                (Raw, XskNative),
                (Write, TcpOffloadsOff),
                (Write, Tcp),
                (Raw, Tcp),
            ],
            Self::BusyLatency => &[(Send, Tcp), (Write, Tcp)],
            Self::BusyBandwidth => &[(Write, Tcp), (SleepingWrite, Tcp)],
            Self::Pairs | Self::PairsRate | Self::Memory | Self::Idle => &[],
            Self::LatencySizes => &[(Write, Tcp), (Send, Tcp), (Send, Libfabric)],
            Self::BandwidthSizes => &[(Write, Raw), (Write, Tcp)],
            Self::Framings => &[(RdmaTcp, Markers), (RdmaTcp, NoMarkers), (RdmaTcp, TcpOffloadsOff)],
            Self::FramingsRate => &[(RdmaTcp, Markers), (RdmaTcp, NoMarkers)],
        }
    }

    /// Whether two busy loops run on each of the two CPUs meanwhile.
    pub(super) fn is_busy(self) -> bool {
        matches!(self, Self::BusyLatency | Self::BusyBandwidth)
    }

    /// Duration of one measurement.
    fn duration(self, args: &CompareArgs) -> Duration {
        args.duration() * if self.is_busy() { BUSY_TIMES } else { 1 }
    }

    /// The quantity in the first column.
    pub(super) fn axis(self) -> &'static str {
        match self {
            Self::Bulk | Self::Framings => "MTU",
            Self::Pairs | Self::PairsRate | Self::Memory => "queue pairs",
            _ => "bytes",
        }
    }

    /// A value of the first column.
    pub(super) fn label(self, x: u64) -> String {
        if self.axis() == "bytes" { short_bytes(x) } else { x.to_string() }
    }
}

/// One measurement of a round.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub group: Group,
    pub subject: Subject,
    /// Value of the first column; `None` when each row of the result has its own, the message size.
    pub x: Option<u64>,
    pub mtu: u32,
    /// Arguments of this program, or of libfabric's, for both ends.
    pub command: Vec<String>,
    pub limit: Duration,
}

impl Step {
    pub(super) fn title(&self) -> String {
        let x = self.x.map_or_else(|| "all sizes".to_owned(), |x| self.group.label(x));
        format!("{:?}: {} at {} {x}", self.group, self.subject.name(), self.group.axis())
    }
}

/// Measurements on a busy machine take so many times as long as others: the slices of a processor are milliseconds.
const BUSY_TIMES: u32 = 4;

/// Time allowed to one measurement beyond its requested duration; it includes opening and closing a device, and a
/// thousand connections.
const OVERHEAD: Duration = Duration::from_secs(60);

/// Sizes of the latency tables.
const LATENCY_SIZES: [u64; 2] = [64, 1024];
/// Size of a small message.
pub(super) const SMALL: u64 = 64;
/// Size of a large message.
pub(super) const LARGE: u64 = 65536;
/// Size of a memory region.
pub(super) const REGISTERED: u64 = 1 << 30;
/// Number of sizes of `-a`.
const ALL_SIZES: u32 = 23;

/// All measurements of a round, in the order of the first round, except those of subjects that are not `present`.
pub(super) fn steps(args: &CompareArgs, present: impl Fn(Subject) -> bool) -> Vec<Step> {
    let groups = Group::ALL.into_iter().filter(|&group| args.measures(group));
    groups.flat_map(|group| group_steps(args, group)).filter(|step| present(step.subject)).collect()
}

fn group_steps(args: &CompareArgs, group: Group) -> Vec<Step> {
    let first = args.mtus.first().copied().unwrap_or(1500);
    let largest = args.mtus.iter().copied().max().unwrap_or(first);
    // The values of the first column, with the MTU of each.
    let rows: Vec<(Option<u64>, u32)> = match group {
        Group::Polling => LATENCY_SIZES.map(|bytes| (Some(bytes), first)).to_vec(),
        Group::Sleeping | Group::Rate | Group::FramingsRate => vec![(Some(SMALL), first)],
        Group::BusyLatency => vec![(Some(SMALL), largest)],
        Group::BusyBandwidth => vec![(Some(LARGE), largest)],
        Group::Bulk | Group::Framings => args.mtus.iter().map(|&mtu| (Some(mtu.into()), mtu)).collect(),
        Group::Pairs | Group::PairsRate => {
            args.queue_pairs.iter().map(|&count| (Some(count.into()), largest)).collect()
        }
        Group::Memory => vec![(args.queue_pairs.iter().max().map(|&count| count.into()), largest)],
        Group::LatencySizes | Group::BandwidthSizes => vec![(None, largest)],
        Group::Idle => vec![(Some(REGISTERED), first)],
    };
    let mut steps = Vec::new();
    for (x, mtu) in rows {
        for &subject in group.subjects().iter().filter(|subject| subject.can_send(mtu)) {
            if subject == Subject::Libfabric {
                steps.extend(libfabric::SIZES.map(|bytes| libfabric_step(args, group, bytes, mtu)));
                continue;
            }
            let command = command(args, group, subject, x);
            let rows = if x.is_none() { ALL_SIZES } else { 1 };
            let limit = OVERHEAD + group.duration(args) * rows;
            steps.push(Step { group, subject, x, mtu, command, limit });
        }
    }
    steps
}

/// A measurement of one message size with libfabric, which measures one in a run.
fn libfabric_step(args: &CompareArgs, group: Group, bytes: u64, mtu: u32) -> Step {
    let command = libfabric::options(bytes, args.duration(), args.server);
    let limit = OVERHEAD + args.duration();
    Step { group, subject: Subject::Libfabric, x: Some(bytes), mtu, command, limit }
}

/// The command line of a measurement, for both ends.
fn command(args: &CompareArgs, group: Group, subject: Subject, x: Option<u64>) -> Vec<String> {
    let latency = group.figures().contains(&Figure::HalfRoundTrip);
    let seconds = group.duration(args).as_secs_f64().to_string();
    let mode = subject.mode(args.mode);
    let text = x.unwrap_or_default().to_string();
    let test = match subject {
        Subject::Device => {
            let line = ["idle", "-s", &text, "-D", &seconds, "-d", &args.device, "--mode", mode];
            return line.map(str::to_owned).to_vec();
        }
        Subject::Send => "send",
        Subject::Write
        | Subject::SleepingWrite
        | Subject::WriteImmediate
        | Subject::Markers
        | Subject::NoMarkers
        | Subject::RdmaTcp => "write",
        Subject::Raw | Subject::XskGeneric | Subject::XskNative => "raw",
        Subject::TcpOffloadsOff | Subject::Tcp | Subject::Libfabric => "tcp",
    };
    let mut line = vec![format!("{test}_{}", if latency { "lat" } else { "bw" })];
    let mut add = |words: &[&str]| line.extend(words.iter().map(|&word| word.to_owned()));
    let (small, large) = (SMALL.to_string(), LARGE.to_string());
    match group {
        Group::Polling | Group::Sleeping | Group::BusyLatency | Group::BusyBandwidth => add(&["-s", &text]),
        Group::Rate | Group::FramingsRate => add(&["-s", &small]),
        Group::Bulk | Group::Framings => add(&["-s", &large]),
        Group::Pairs => add(&["-s", &large, "-q", &text, "-t", "16", "-Q", "4"]),
        Group::PairsRate => add(&["-s", &small, "-q", &text, "-t", "16", "-Q", "4"]),
        Group::Memory => add(&["-s", &small, "-q", &text, "-t", "1", "-Q", "1", "-r", "1"]),
        // Messages in flight at the end of a row are still waited for: at the default depth, a GiB of them.
        Group::BandwidthSizes if matches!(test, "send" | "write") => add(&["-a", "-t", "32", "-Q", "8"]),
        Group::LatencySizes | Group::BandwidthSizes => add(&["-a"]),
        // Its only subject is the device.
        Group::Idle => {}
    }
    add(&["-D", &seconds]);
    if !latency {
        add(&["--report_gbits", "--cpu_util"]);
    }
    if group == Group::Sleeping || subject == Subject::SleepingWrite {
        add(&["-e"]);
    }
    match subject {
        Subject::WriteImmediate => add(&["--write_with_imm"]),
        Subject::Markers => add(&["--markers", "require"]),
        Subject::NoMarkers => add(&["--markers", "off"]),
        Subject::RdmaTcp => add(&["--framing", "rdma-tcp"]),
        Subject::XskGeneric | Subject::XskNative => add(&["--over", "xsk-rs"]),
        _ => {}
    }
    if test == "tcp" {
        // Kernel connections stay in TIME-WAIT on their port, where we could not reserve it.
        add(&["-p", &(DEFAULT_PORT + 1).to_string()]);
    } else {
        add(&["-d", &args.device, "--mode", mode]);
    }
    line
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Parser as _;

    use super::*;
    use crate::options::{Cli, Command};

    fn args(line: &str) -> CompareArgs {
        let cli = Cli::try_parse_from(std::iter::once("xwarp-perf").chain(line.split_whitespace())).unwrap();
        let Command::Compare(args) = cli.command else { panic!("not compare") };
        *args
    }

    #[test]
    fn every_command_of_a_round_can_be_parsed() {
        let steps = steps(&args("compare --mode generic"), |_| true);
        let found: BTreeSet<Group> = steps.iter().map(|step| step.group).collect();
        assert_eq!(found, Group::ALL.into_iter().filter(|group| group.is_default()).collect());
        let named = self::steps(&args("compare --only framings,framings_rate"), |_| true);
        let found: BTreeSet<Group> = named.iter().map(|step| step.group).collect();
        assert_eq!(found, BTreeSet::from([Group::Framings, Group::FramingsRate]));
        let ours = |step: &Step| step.subject != Subject::Libfabric;
        for step in steps.into_iter().chain(named).filter(ours) {
            let line = std::iter::once("xwarp-perf".to_owned()).chain(step.command);
            assert!(Cli::try_parse_from(line).is_ok());
        }
    }

    #[test]
    fn a_round_has_the_chosen_groups_and_mtus() {
        let steps = steps(&args("compare --only bulk,polling --mtus 1500,9000"), |_| true);
        assert!(steps.iter().all(|step| [Group::Bulk, Group::Polling].contains(&step.group)));
        let mtus: BTreeSet<u32> = steps.iter().filter(|s| s.group == Group::Bulk).map(|s| s.mtu).collect();
        assert_eq!(mtus, BTreeSet::from([1500, 9000]));
        assert!(steps.iter().all(|step| step.group == Group::Bulk || step.mtu == 1500));
    }

    #[test]
    fn libfabric_is_measured_by_size_if_its_program_is_present() {
        let args = args("compare --only latency_sizes,bandwidth_sizes");
        let sizes = |group, present: bool| {
            let steps = steps(&args, |subject| present || subject != Subject::Libfabric);
            let steps = steps.into_iter().filter(|step| step.group == group);
            steps
                .filter(|step| step.subject == Subject::Libfabric)
                .filter_map(|step| step.x)
                .collect::<Vec<_>>()
        };
        for group in [Group::LatencySizes, Group::BandwidthSizes] {
            assert_eq!(sizes(group, true), libfabric::SIZES);
            assert!(sizes(group, false).is_empty());
        }
    }
}
