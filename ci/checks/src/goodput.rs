//! `xwarp-goodput`: goodput of xwarp (RDMA Writes) and of kernel TCP through the same hop, by loss,
//! reordering and round-trip time. Rounds are interleaved: within a round both meet the same fault with the
//! same seed, one after the other, and carry the same number of messages. With equal durations instead, an
//! effect that decays over time (a small window after the first losses) would count longer for one of the
//! two. The table has medians and ratios over the rounds.

mod table;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_json::Value;
use xwarp_verbs::Algorithm;

pub use self::table::{Condition, Fault, Measurement, Samples};
use crate::{
    hop::{
        Hop,
        options::{chance, rate, time},
    },
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    rounds,
};

/// Size of a full frame at the lab's MTU, in bytes.
const FRAME_BYTES: u64 = 1514;

/// Probability that a frame is delayed, in the rows of reordering.
const REORDERED: f64 = 0.02;

/// Size of a message. Several fit into the smallest window, and little is left to drain at the end of the
/// duration.
const MESSAGE: &str = "16K";

/// Time allowed beyond the duration, for the last messages at the lowest rate.
const PATIENCE: Duration = Duration::from_mins(4);

/// Goodput through the impairment hop: xwarp beside kernel TCP, as a table.
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarp-goodput")]
#[allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]
pub struct GoodputArgs {
    /// Line rate of the hop, bits per second
    #[arg(long, value_name = "BITS", value_parser = rate, default_value = "100M")]
    pub rate: u64,
    /// Round-trip times added by the hop
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = time, default_value = "10us,1ms,50ms")]
    pub rtts: Vec<Duration>,
    /// Independent loss in each direction
    #[arg(long, value_name = "CHANCES", value_delimiter = ',', value_parser = chance, default_value = "0,0.01%,0.1%,1%,3%")]
    pub losses: Vec<f64>,
    /// Reordering depths: one frame in fifty is overtaken by up to this many others
    #[arg(long, value_name = "FRAMES", value_delimiter = ',', default_value = "3,10,100", num_args = 0..)]
    pub depths: Vec<u32>,
    /// Congestion control of both
    #[arg(short = 'C', long, value_name = "NAME", default_value_t)]
    pub congestion: Algorithm,
    /// Number of rounds; each measures everything once
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub rounds: u32,
    /// Duration of the first transfer of a round; the second transfer sends as many messages
    #[arg(short = 'D', long, value_name = "SECONDS", default_value_t = 4.0)]
    pub duration: f64,
    /// Also write the table to this file, in Markdown
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// The sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// RDMA Writes over AF_XDP.
    Ours,
    /// Kernel TCP.
    Kernel,
}

/// Amount of data to send.
#[derive(Debug, Clone, Copy)]
enum Extent {
    /// Send for this many seconds, then drain what was posted.
    Seconds(f64),
    /// Send this many messages.
    Messages(u64),
}

/// Runs the program.
pub fn main() -> Result<()> {
    let args = GoodputArgs::parse();
    let programs = rounds::programs()?;
    let lab = Lab::up(LabOptions { hop: true, ..LabOptions::default() })?;
    for side in [Side::A, Side::B] {
        prepare_kernel(&lab, side)?;
    }
    let bench = Bench { lab: &lab, programs: &programs, args: &args };
    let mut samples = Samples::default();
    for round in 0..args.rounds {
        for condition in conditions(&args) {
            let mut extent = Extent::Seconds(args.duration);
            for subject in rounds::order(round, &[Subject::Ours, Subject::Kernel]) {
                let measured = bench
                    .measure(subject, &condition, round, extent)
                    .with_context(|| format!("{subject:?} at {condition}"))?;
                eprintln!("round {round}: {condition}: {subject:?} {measured}");
                extent = Extent::Messages(measured.messages);
                samples.add(condition, subject, measured);
            }
        }
    }
    let table = format!("{}\n{}", bench.setting(), samples.table());
    rounds::publish(&table, args.out.as_deref())
}

/// All rows of the table.
fn conditions(args: &GoodputArgs) -> Vec<Condition> {
    let mut all = Vec::new();
    for &rtt in &args.rtts {
        all.extend(args.losses.iter().map(|&loss| Condition::new(rtt, Fault::Loss(loss))));
        all.extend(args.depths.iter().map(|&depth| Condition::new(rtt, Fault::Reordering(depth))));
    }
    all
}

/// Disable metrics of earlier connections, make the buffers large enough for every window that occurs here,
/// and limit unsent bytes, which would have to drain after the duration.
const KERNEL_SETTINGS: [&str; 4] = [
    "net.ipv4.tcp_no_metrics_save=1",
    "net.ipv4.tcp_rmem=4096 131072 33554432",
    "net.ipv4.tcp_wmem=4096 131072 33554432",
    "net.ipv4.tcp_notsent_lowat=262144",
];

fn prepare_kernel(lab: &Lab, side: Side) -> Result<()> {
    for setting in KERNEL_SETTINGS {
        lab.run(side, "sysctl", &["-qw", setting])?;
    }
    Ok(())
}

impl GoodputArgs {
    /// Length of the queue in frames: the bandwidth-delay product, and at least what a small switch has.
    fn queue(&self, rtt: Duration) -> u64 {
        let path = (self.rate as f64 / 8.0 * rtt.as_secs_f64()) as u64 / FRAME_BYTES;
        path.max(100)
    }

    /// The options of the hop.
    fn hop_line(&self, condition: &Condition, seed: u32) -> String {
        let (rate, rtt) = (self.rate, condition.rtt);
        let line = format!("--rate {rate} --rtt {}ns --queue {}", rtt.as_nanos(), self.queue(rtt));
        let fault = match condition.fault() {
            Fault::Loss(loss) => format!("--loss {loss}"),
            Fault::Reordering(depth) => {
                // At most the time that this many frames take at the full rate.
                let by = u64::from(depth) * FRAME_BYTES * 8 * 1_000_000_000 / rate;
                format!("--reorder {REORDERED} --depth {depth} --reorder-by {by}ns --only a")
            }
        };
        format!("{line} {fault} --seed {seed}")
    }
}

struct Bench<'a> {
    lab: &'a Lab,
    programs: &'a Path,
    args: &'a GoodputArgs,
}

impl Bench<'_> {
    fn measure(
        &self,
        subject: Subject,
        condition: &Condition,
        round: u32,
        extent: Extent,
    ) -> Result<Measurement> {
        let hop =
            Hop::start(self.lab, self.programs.join("xwarp-hop"), &self.args.hop_line(condition, round + 1))?;
        let before = self.kernel_segments()?;
        let result = self.transfer(subject, extent)?;
        let after = self.kernel_segments()?;
        let report = hop.stop()?;
        let counter = |name: &str| result["xwarp"]["counters"][name].as_f64().unwrap_or(0.0);
        let (sent, again) = match subject {
            Subject::Ours => (counter("tcp.segments_out"), counter("tcp.retransmits")),
            Subject::Kernel => (after.0 - before.0, after.1 - before.1),
        };
        let row = &result["xwarp"]["rows"][0];
        let mebibytes = row["bw_average"].as_f64().context("no bandwidth in the JSON")?;
        Ok(Measurement {
            messages: row["iterations"].as_u64().context("no count in the JSON")?,
            megabits: mebibytes * f64::from(1 << 20) * 8.0 / 1e6,
            resent: again / sent.max(1.0),
            late_us: report["late_mean_us"].as_f64().unwrap_or(0.0),
        })
    }

    /// Runs one transfer from A to B and returns the client's JSON.
    fn transfer(&self, subject: Subject, extent: Extent) -> Result<Value> {
        let json = self.lab.file("goodput.json");
        let _ = fs::remove_file(&json);
        let path = json.to_string_lossy().into_owned();
        let (option, extent) = match extent {
            Extent::Seconds(seconds) => ("-D", seconds.to_string()),
            Extent::Messages(count) => ("-n", count.to_string()),
        };
        let program = self.programs.join("xwarp-peer").to_string_lossy().into_owned();
        // Real-time priority for both ends, so that the result depends on the protocol and not on other work.
        // They sleep, so other programs keep most of the CPU time.
        let mut line = vec!["--rr", "10", &program];
        line.extend(match subject {
            Subject::Ours => &["write_bw", "-d", INTERFACE, "-e", "--stats"][..],
            // A separate port: the kernel's connections stay in TIME-WAIT on theirs, where we could not
            // reserve it.
            Subject::Kernel => &["tcp_bw", "-p", "18516"],
        });
        line.extend(["-C", self.args.congestion.name(), "-s", MESSAGE, option, &extent]);
        let mut server = self.lab.start(Side::B, "chrt", &line)?;
        server.wait_for("Waiting for a client", Duration::from_secs(30))?;
        let address = self.lab.address(Side::B, Family::V4).to_string();
        line.extend(["--out_json", "--out_json_file", &path, &address]);
        let limit = Duration::from_secs_f64(self.args.duration) + PATIENCE;
        self.lab.start(Side::A, "chrt", &line)?.finish(limit)?;
        server.finish(PATIENCE)?;
        let text = fs::read_to_string(&json).context("the client wrote no result")?;
        serde_json::from_str(&text).context("the client's result is not JSON")
    }

    /// Segments sent and retransmitted by the kernel of A.
    fn kernel_segments(&self) -> Result<(f64, f64)> {
        let text = self.lab.run(Side::A, "cat", &["/proc/net/snmp"])?;
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (names, values) = lines.next().zip(lines.next()).context("no TCP counters in /proc/net/snmp")?;
        let value = |wanted: &str| {
            let mut pairs = names.split_whitespace().zip(values.split_whitespace());
            pairs.find(|(name, _)| *name == wanted).and_then(|(_, value)| value.parse::<f64>().ok())
        };
        value("OutSegs").zip(value("RetransSegs")).context("no segment counters in /proc/net/snmp")
    }

    fn setting(&self) -> String {
        let args = self.args;
        let congestion = args.congestion;
        let queues: Vec<String> = args.rtts.iter().map(|rtt| args.queue(*rtt).to_string()).collect();
        format!(
            "Line {} Mbit/s in each direction, including the Ethernet header; drop-tail queues of {} frames; MTU 1500, IPv4, \
             one connection.\nEach figure is the median of {} interleaved rounds: one subject sends messages of {MESSAGE} for {} s \
             and until they have arrived, the other sends as many messages.\nLoss is independent in each direction. Reordering: {} % of the data frames are delayed \
             until up to the given number of later frames has passed.\nOurs: RDMA Writes over AF_XDP (both ends sleep until completions arrive), \
             CRC and markers on, {congestion}. Kernel TCP: {congestion}, {}; checksum, segmentation and receive offloads off.\n",
            args.rate as f64 / 1e6,
            queues.join(", "),
            args.rounds,
            args.duration,
            REORDERED * 100.0,
            KERNEL_SETTINGS.map(|setting| setting.trim_start_matches("net.ipv4.")).join(", "),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hop::options::HopArgs;

    #[test]
    fn every_row_is_a_line_that_the_hop_understands() {
        let args = GoodputArgs::parse_from(["xwarp-goodput"]);
        let conditions = conditions(&args);
        assert_eq!(conditions.len(), 3 * (5 + 3));
        for condition in conditions {
            let line = args.hop_line(&condition, 7);
            let words = ["xwarp-hop", "xa", "xb"].into_iter().chain(line.split_whitespace());
            let hop = HopArgs::try_parse_from(words).unwrap();
            assert_eq!((hop.rate, hop.rtt, hop.seed), (Some(100_000_000), condition.rtt, 7));
        }
    }
}
