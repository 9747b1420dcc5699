//! `xwarp-sharing`: the cost of sharing an interface: latency and bandwidth of an interface that each end owns, through
//! the switch of `xwarpd`, between two processes of one host, and of kernel TCP, also over the loopback interface.
//! Rounds are interleaved: each round measures every path once. The page has medians and ratios over the rounds.

use std::{fmt, fmt::Write as _, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use clap::Parser;
use xwarp_perf::stats::Spread;

use crate::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    rounds::{self, Samples},
    shared::SharedInterface,
};

/// Time allowed beyond the duration of a measurement.
const PATIENCE: Duration = Duration::from_mins(1);

/// The cost of sharing an interface by xwarpd, as a page
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarp-sharing")]
pub struct SharingArgs {
    /// Number of rounds; each measures everything once
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub rounds: u32,
    /// Duration of each measurement in seconds
    #[arg(short = 'D', long, value_name = "SECONDS", default_value_t = 2)]
    pub duration: u32,
    /// MTU of the wire
    #[arg(long, default_value_t = 1500)]
    pub mtu: u32,
    /// Also write the page to this file, in Markdown
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Where XDP runs on the frames that clients of the helper send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    Generic,
    Native,
    NativeThreaded,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Generic, Self::Native, Self::NativeThreaded];

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Generic => &["--from-clients", "generic"],
            Self::Native => &["--from-clients", "native"],
            Self::NativeThreaded => &["--from-clients", "native", "--threaded-napi"],
        }
    }
}

/// A way between two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Path {
    /// Each end owns its interface.
    Direct,
    /// A client of the helper, and a peer on the wire that owns its interface.
    ToPeer(Mode),
    /// Clients of two helpers, on the two ends of the wire.
    BetweenHosts(Mode),
    /// Two clients of one helper.
    Local(Mode),
    /// Kernel TCP over the wire.
    KernelTcp,
    /// Kernel TCP over the loopback interface.
    LoopbackTcp,
}

impl Path {
    fn all() -> Vec<Self> {
        let mut all = vec![Self::Direct];
        for path in [Self::ToPeer, Self::BetweenHosts, Self::Local] {
            all.extend(Mode::ALL.map(path));
        }
        all.extend([Self::KernelTcp, Self::LoopbackTcp]);
        all
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, mode) = match self {
            Self::Direct => ("direct", None),
            Self::ToPeer(mode) => ("switch at one end", Some(mode)),
            Self::BetweenHosts(mode) => ("switch at both ends", Some(mode)),
            Self::Local(mode) => ("two processes of one host", Some(mode)),
            Self::KernelTcp => ("kernel TCP", None),
            Self::LoopbackTcp => ("kernel TCP, loopback", None),
        };
        let mode = match mode {
            None => "",
            Some(Mode::Generic) => ", generic",
            Some(Mode::Native) => ", native",
            Some(Mode::NativeThreaded) => ", native, threaded NAPI",
        };
        write!(f, "{path}{mode}")
    }
}

/// The measured path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Quantity {
    /// Half round trip of 64 bytes in microseconds.
    Latency,
    /// Bandwidth of 64 KiB in MiB/s.
    Bandwidth,
}

fn table(samples: &Samples<(Path, Quantity)>) -> String {
    let mut table = String::from(
        "| path | 64 B half round trip, us | range | of direct | 64 KiB, MiB/s | range | of direct |\n|---|--:|--:|--:|--:|--:|--:|\n",
    );
    for path in Path::all() {
        let _ = write!(table, "| {path} ");
        for (quantity, digits) in [(Quantity::Latency, 2), (Quantity::Bandwidth, 0)] {
            let direct = samples.spread(&(Path::Direct, quantity)).map_or(f64::NAN, |spread| spread.median);
            let Some(Spread { median, min, max, .. }) = samples.spread(&(path, quantity)) else {
                table.push_str("| | | ");
                continue;
            };
            let ratio = median / direct;
            let _ = write!(table, "| {median:.digits$} | {min:.digits$} to {max:.digits$} | {ratio:.2} ");
        }
        table.push_str("|\n");
    }
    table
}

/// Runs the program.
pub fn main() -> Result<()> {
    let args = SharingArgs::parse();
    let programs = rounds::programs()?;
    let lab = Lab::up(LabOptions { mtu: args.mtu, ..LabOptions::default() })?;
    lab.run(Side::A, "ip", &["link", "set", "dev", "lo", "up"])?;
    for side in [Side::A, Side::B] {
        // So that each end takes the frames that the other end redirects to it.
        lab.run(side, "ethtool", &["-K", INTERFACE, "gro", "on"])?;
    }
    let bench = Bench { lab: &lab, programs, duration: args.duration };
    let mut samples = Samples::default();
    for round in 0..args.rounds {
        for path in rounds::order(round, &Path::all()) {
            for quantity in [Quantity::Latency, Quantity::Bandwidth] {
                let value = bench.measure(path, quantity).with_context(|| path.to_string())?;
                eprintln!("round {round}: {path}: {quantity:?} {value:.2}");
                samples.add((path, quantity), value);
            }
        }
    }
    let page = format!("{}\n{}", setting(&args), table(&samples));
    rounds::publish(&page, args.out.as_deref())
}

struct Bench<'a> {
    lab: &'a Lab,
    programs: PathBuf,
    duration: u32,
}

impl Bench<'_> {
    fn program(&self, name: &str) -> String {
        self.programs.join(name).to_string_lossy().into_owned()
    }

    /// Measures one quantity on one path, with helpers of its own.
    fn measure(&self, path: Path, quantity: Quantity) -> Result<f64> {
        let helper = |side, mode: Mode| {
            let socket = self.lab.file(if side == Side::A { "a.sock" } else { "b.sock" });
            let options = [&[INTERFACE], mode.options()].concat();
            SharedInterface::start_by(socket, &options, |args| {
                self.lab.start(side, self.program("xwarp-helper"), args)
            })
        };
        let tcp = matches!(path, Path::KernelTcp | Path::LoopbackTcp);
        let test = match (quantity, tcp) {
            (Quantity::Latency, false) => ["send_lat", "-s", "64"],
            (Quantity::Latency, true) => ["tcp_lat", "-s", "64"],
            (Quantity::Bandwidth, false) => ["write_bw", "-s", "65536"],
            (Quantity::Bandwidth, true) => ["tcp_bw", "-s", "65536"],
        };
        let duration = self.duration.to_string();
        let mut args = test.to_vec();
        args.extend(["-D", &duration]);
        if tcp {
            // The kernel's connections rest on their port, which ours could not reserve then.
            args.extend(["-p", "18516"]);
        } else {
            args.extend(["-d", INTERFACE]);
        }
        let perf = self.program("xwarp-peer");
        let owned = |side, args: &[&str]| {
            let mut command = self.lab.command(side, &perf);
            // No helper of this machine is meant.
            command.args(args).env("XWARP_HELPER", self.lab.file("none"));
            Running::start(command)
        };
        let [a, b] = [Side::A, Side::B].map(|side| self.lab.address(side, Family::V4).to_string());
        match path {
            Path::Direct | Path::KernelTcp => {
                run(&args, &b, quantity, |args| owned(Side::B, args), |args| owned(Side::A, args))
            }
            Path::LoopbackTcp => {
                run(&args, "127.0.0.1", quantity, |args| owned(Side::A, args), |args| owned(Side::A, args))
            }
            Path::ToPeer(mode) => {
                let here = helper(Side::A, mode)?;
                let client = |args: &[&str]| here.start_unprivileged(&perf, args);
                run(&args, &b, quantity, |args| owned(Side::B, args), client)
            }
            Path::BetweenHosts(mode) => {
                let (here, there) = (helper(Side::A, mode)?, helper(Side::B, mode)?);
                let server = |args: &[&str]| there.start_unprivileged(&perf, args);
                run(&args, &b, quantity, server, |args| here.start_unprivileged(&perf, args))
            }
            Path::Local(mode) => {
                let here = helper(Side::A, mode)?;
                let end = |args: &[&str]| here.start_unprivileged(&perf, args);
                run(&args, &a, quantity, end, end)
            }
        }
    }
}

/// Runs a server and a client, and returns the client's figure.
fn run(
    args: &[&str],
    address: &str,
    quantity: Quantity,
    server: impl Fn(&[&str]) -> Result<Running>,
    client: impl Fn(&[&str]) -> Result<Running>,
) -> Result<f64> {
    let mut server = server(args)?;
    server.wait_for("Waiting for a client", PATIENCE)?;
    let said = client(&[args, &[address]].concat())?.finish(2 * PATIENCE)?;
    server.finish(PATIENCE)?;
    figure(&said, quantity).with_context(|| format!("no figure in the client's output: {said}"))
}

/// The figure in the only row that `xwarp-perf` has printed: the median latency (`t_typical`), or the average bandwidth.
fn figure(said: &str, quantity: Quantity) -> Option<f64> {
    let column = match quantity {
        Quantity::Latency => 6,
        Quantity::Bandwidth => 3,
    };
    let row = said.lines().skip_while(|line| !line.starts_with(" #bytes")).nth(1)?;
    row.split_whitespace().nth(column)?.parse().ok()
}

fn setting(args: &SharingArgs) -> String {
    let SharingArgs { rounds, duration, mtu, .. } = args;
    format!(
        "# The cost of sharing an interface\n\n\
         Written by `ci/sharing --out docs/measurements/sharing.md`. Medians and ranges of {rounds} interleaved rounds of {duration} s \
         each, between two namespaces on one machine with a veth pair of MTU {mtu}. Both ends poll; kernel TCP polls for latency and sleeps \
         for bandwidth. Latency: Sends of 64 bytes, half of the median round trip. Bandwidth: RDMA Writes of 64 KiB, MPA with CRC and markers.\n\n\
         *Direct*: each end owns its interface. *Switch*: unprivileged clients of `xwarpd`. *Generic* and *native* say where XDP runs on \
         the frames that clients send (`--from-clients`); the peer's end of the wire has GRO, so native frames are taken. The difference \
         between one and two ends with a switch is one hop.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_row_of_a_test() {
        let latency =
            " #bytes #iterations t_avg tps t_min t_max t_typical\n 64 1000 3.5 9.0 1.5 99.0 2.5 8.0\n----\n";
        assert_eq!(figure(latency, Quantity::Latency), Some(2.5));
        let bandwidth = "noise\n #bytes #iterations peak average rate\n 65536 500 70.0 60.0 0.1\n";
        assert_eq!(figure(bandwidth, Quantity::Bandwidth), Some(60.0));
        assert_eq!(figure("xwarp-perf: refused", Quantity::Bandwidth), None);
    }

    #[test]
    fn every_path_has_a_row_with_its_median_and_its_ratio() {
        let mut samples = Samples::default();
        for (number, path) in Path::all().into_iter().enumerate() {
            for value in [30.0, 10.0, 20.0] {
                samples.add((path, Quantity::Latency), value * (number + 1) as f64);
                samples.add((path, Quantity::Bandwidth), 1000.0);
            }
        }
        let table = table(&samples);
        assert_eq!(table.lines().count(), 2 + 12);
        assert!(
            table.contains("| direct | 20.00 | 10.00 to 30.00 | 1.00 | 1000 | 1000 to 1000 | 1.00 |"),
            "{table}"
        );
        assert!(table.contains("| switch at one end, generic | 40.00 | 20.00 to 60.00 | 2.00 |"), "{table}");
    }
}
