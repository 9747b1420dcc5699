//! `xwarp-compat-cost`: the cost of the drop-in libraries' C path beside the Rust path: `xwarp-perf` and the
//! distribution's perftest with the same options. Rounds are interleaved: each round measures both paths once, in
//! alternating order.

use std::{fmt, fmt::Write as _, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use clap::Parser;
use xwarp_perf::stats::Spread;

use crate::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    rounds::{self, Samples},
};

/// Time limit of one measurement.
const LIMIT: Duration = Duration::from_mins(2);
/// Time after which a client that finds no server gives up, and the interval between two attempts.
const LISTENS_WITHIN: Duration = Duration::from_secs(15);
const RETRY: Duration = Duration::from_millis(200);

/// Measures the cost of the drop-in libraries' C path beside the Rust path, as a page
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarp-compat-cost")]
pub struct CompatCostArgs {
    /// Number of rounds; each measures everything once
    #[arg(long, value_name = "COUNT", default_value_t = 11)]
    pub rounds: u32,
    /// Round trips of each latency measurement
    #[arg(long, value_name = "COUNT", default_value_t = 200_000)]
    pub pings: u32,
    /// Messages of each bandwidth measurement
    #[arg(long, value_name = "COUNT", default_value_t = 20_000)]
    pub writes: u32,
    /// MTU of the wire
    #[arg(long, default_value_t = 1500)]
    pub mtu: u32,
    /// Also write the page to this file, in Markdown
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// The program that calls the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Caller {
    /// `xwarp-perf`, by the Rust API.
    Rust,
    /// perftest, by the C ABI.
    C,
}

/// The measured quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Quantity {
    /// Half of the median round trip of 64 bytes in microseconds.
    Latency,
    /// Bandwidth of 64 KiB in Gbit/s.
    Bandwidth,
}

impl Quantity {
    const ALL: [Self; 2] = [Self::Latency, Self::Bandwidth];

    /// Dividend and divisor of the ratio of the C path's time for a message to the Rust path's.
    fn ratio(self) -> [Caller; 2] {
        match self {
            Self::Latency => [Caller::C, Caller::Rust],
            Self::Bandwidth => [Caller::Rust, Caller::C],
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latency => "`send_lat`, 64 B, us",
            Self::Bandwidth => "`write_bw`, 64 KiB, Gbit/s",
        })
    }
}

/// The row of one quantity.
fn row(samples: &Samples<(Caller, Quantity)>, quantity: Quantity) -> Option<String> {
    let spread = |caller| samples.spread(&(caller, quantity));
    let (rust, c) = (spread(Caller::Rust)?, spread(Caller::C)?);
    let [of, to] = quantity.ratio();
    Some(format!(
        "| {quantity} | {} | {} | {:.2} | {} |",
        shown(&rust),
        shown(&c),
        spread(of)?.median / spread(to)?.median,
        shown(&samples.ratio(&(of, quantity), &(to, quantity))?),
    ))
}

fn shown(spread: &Spread) -> String {
    format!("{:.2} ({:.2} to {:.2})", spread.median, spread.min, spread.max)
}

/// Runs the program.
pub fn main() -> Result<()> {
    let args = CompatCostArgs::parse();
    let programs = rounds::programs()?;
    let lab = Lab::up(LabOptions { mtu: args.mtu, ..LabOptions::default() })?;
    let bench = Bench { lab: &lab, programs, args: &args };
    let mut samples = Samples::default();
    for round in 0..args.rounds {
        for quantity in Quantity::ALL {
            for caller in rounds::order(round, &[Caller::Rust, Caller::C]) {
                let value = bench.measure(caller, quantity)?;
                eprintln!("round {round}: {quantity}: {caller:?} {value:.2}");
                samples.add((caller, quantity), value);
            }
        }
    }
    let page = page(&args, &samples);
    rounds::publish(&page, args.out.as_deref())
}

struct Bench<'a> {
    lab: &'a Lab,
    programs: PathBuf,
    args: &'a CompatCostArgs,
}

impl Bench<'_> {
    fn start(&self, caller: Caller, quantity: Quantity, side: Side, peer: Option<&str>) -> Result<Running> {
        let (pings, writes) = (self.args.pings.to_string(), self.args.writes.to_string());
        let (own, perftest, options) = match quantity {
            Quantity::Latency => ("send_lat", "ib_send_lat", ["-s", "64", "-I", "64", "-n", &pings].to_vec()),
            // A completion for every 32nd write at both, because xwarp-perf cannot request fewer.
            Quantity::Bandwidth => (
                "write_bw",
                "ib_write_bw",
                ["-s", "65536", "-t", "128", "-Q", "32", "--report_gbits", "-n", &writes].to_vec(),
            ),
        };
        let mut command = match caller {
            Caller::Rust => {
                let mut command = self.lab.command(side, self.programs.join("xwarp-perf"));
                command.args([own, "-d", INTERFACE]);
                command
            }
            Caller::C => {
                let mut command = self.lab.command(side, self.programs.join("xwarp"));
                command.args(["run", "--device", INTERFACE, perftest, "-F", "-R"]);
                command
            }
        };
        command.args(options).args(peer);
        // Do not use a helper of this machine.
        command.env("XWARP_HELPER", self.lab.file("none"));
        Running::start(command)
    }

    /// Measures one quantity on one path.
    fn measure(&self, caller: Caller, quantity: Quantity) -> Result<f64> {
        let address = self.lab.address(Side::B, Family::V4).to_string();
        let mut server = self.start(caller, quantity, Side::B, None)?;
        let begin = std::time::Instant::now();
        let said = loop {
            let mut client = self.start(caller, quantity, Side::A, Some(&address))?;
            let status = client.wait(LIMIT)?;
            if status.success() {
                break client.output();
            }
            // perftest's server does not report when it listens.
            anyhow::ensure!(begin.elapsed() < LISTENS_WITHIN, "{status}: {}", client.output());
            std::thread::sleep(RETRY);
        };
        server.wait(LIMIT)?;
        figure(&said, quantity).with_context(|| format!("no figure in the client's output: {said}"))
    }
}

/// The figure in the only row that either program prints: the median latency (`t_typical`), or the average bandwidth.
fn figure(said: &str, quantity: Quantity) -> Option<f64> {
    let column = match quantity {
        Quantity::Latency => 4,
        Quantity::Bandwidth => 3,
    };
    let row = said.lines().skip_while(|line| !line.trim_start().starts_with("#bytes")).nth(1)?;
    row.split_whitespace().nth(column)?.parse().ok()
}

fn page(args: &CompatCostArgs, samples: &Samples<(Caller, Quantity)>) -> String {
    let CompatCostArgs { rounds, pings, writes, mtu, .. } = args;
    let mut page = format!(
        "# The cost of the drop-in libraries\n\n\
         Written by `ci/compat --out docs/measurements/compat.md`. Medians (and ranges) of {rounds} interleaved rounds, between two \
         namespaces on one machine with a veth pair of MTU {mtu}, both ends of a round on the same path.\n\n\
         *Rust* is `xwarp-perf`. *C* is the distribution's perftest under `xwarp run -R`: the program that users have, with the same \
         options. So the ratio contains the difference between the two programs besides the ABI's cost. Latency: Sends of 64 bytes \
         inline, half of the median round trip of {pings}. Bandwidth: {writes} RDMA Writes of 64 KiB, 128 outstanding, every 32nd \
         signaled. Both have the default settings: CRC, and markers if the peer wants them. A ratio above 1 says that C takes longer.\n\n\
         | test | Rust | C | ratio of medians | ratios of the rounds |\n|---|--:|--:|--:|--:|\n"
    );
    for row in Quantity::ALL.into_iter().filter_map(|quantity| row(samples, quantity)) {
        let _ = writeln!(page, "{row}");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_row_of_either_program() {
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n 64      3000          1.50           99.00        2.50            3.00\n";
        assert_eq!(figure(latency, Quantity::Latency), Some(2.5));
        let bandwidth = "noise\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n 65536      500              70.0               60.0               0.1\n";
        assert_eq!(figure(bandwidth, Quantity::Bandwidth), Some(60.0));
        assert_eq!(figure("xwarp-perf: refused", Quantity::Bandwidth), None);
    }

    #[test]
    fn a_ratio_above_one_says_that_c_takes_longer() {
        let mut samples = Samples::default();
        for quantity in Quantity::ALL {
            for (rust, c) in [(2.0, 3.0), (4.0, 4.4), (3.0, 3.3)] {
                samples.add((Caller::Rust, quantity), rust);
                samples.add((Caller::C, quantity), c);
            }
        }
        assert_eq!(
            row(&samples, Quantity::Latency).unwrap(),
            "| `send_lat`, 64 B, us | 3.00 (2.00 to 4.00) | 3.30 (3.00 to 4.40) | 1.10 | 1.10 (1.10 to 1.50) |"
        );
        assert!(row(&samples, Quantity::Bandwidth).unwrap().contains("| 0.91 | 0.91 (0.67 to 0.91) |"));
        assert_eq!(row(&Samples::default(), Quantity::Latency), None);
    }
}
