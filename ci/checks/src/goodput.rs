//! `xwarp-goodput`: goodput of ours (RDMA Writes) and of the kernel's TCP through the same hop, by loss, reordering
//! and round-trip time. Rounds are interleaved: within a round both meet the same fault with the same seed, one
//! after the other, and carry as many messages: a rate of the same bytes, since what falls with time (a window after
//! its first losses) must not count for longer with one than with the other. Medians and ratios are over the rounds.

mod table;

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_json::Value;

pub use self::table::{Condition, Fault, Measurement, Samples};
use crate::{
    hop::{
        Hop,
        options::{chance, rate, time},
    },
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
};

/// Bytes of a full frame at the MTU of the laboratory.
const FRAME_BYTES: u64 = 1514;

/// Chance that a frame is held back, in the rows of reordering.
const REORDERED: f64 = 0.02;

/// Bytes of a message. Several fit the smallest window, and few are left to drain when time is over.
const MESSAGE: &str = "16K";

/// Beyond the duration: the last messages must get through at the lowest rate.
const PATIENCE: Duration = Duration::from_mins(4);

/// Goodput through the impairment hop: ours beside the kernel's TCP, as a table.
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarp-goodput")]
#[allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]
pub struct GoodputArgs {
    /// Line rate of the hop, bits per second
    #[arg(long, value_name = "BITS", value_parser = rate, default_value = "100M")]
    pub rate: u64,
    /// Round-trip times that the hop makes
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = time, default_value = "10us,1ms,50ms")]
    pub rtts: Vec<Duration>,
    /// Independent loss in each direction
    #[arg(long, value_name = "CHANCES", value_delimiter = ',', value_parser = chance, default_value = "0,0.01%,0.1%,1%,3%")]
    pub losses: Vec<f64>,
    /// Reordering depths: one frame in fifty lets up to so many overtake it
    #[arg(long, value_name = "FRAMES", value_delimiter = ',', default_value = "3,10,100", num_args = 0..)]
    pub depths: Vec<u32>,
    /// How often everything is measured
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub rounds: u32,
    /// Seconds that the first of a round sends; the other sends as many messages
    #[arg(short = 'D', long, value_name = "SECONDS", default_value_t = 4.0)]
    pub duration: f64,
    /// Also write the table to this file, in Markdown
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Who sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// RDMA Writes over AF_XDP.
    Ours,
    /// The kernel's TCP.
    Kernel,
}

/// How much is sent.
#[derive(Debug, Clone, Copy)]
enum Extent {
    /// For so long, and then what was posted.
    Seconds(f64),
    /// So many messages.
    Messages(u64),
}

/// The program.
pub fn main() -> Result<()> {
    let args = GoodputArgs::parse();
    let programs = env::current_exe().context("cannot find my own program")?;
    let programs = programs.parent().context("a program is in a directory")?;
    let lab = Lab::up(LabOptions { hop: true, ..LabOptions::default() })?;
    for side in [Side::A, Side::B] {
        prepare_kernel(&lab, side)?;
    }
    let bench = Bench { lab: &lab, programs, args: &args };
    let mut samples = Samples::default();
    for round in 0..args.rounds {
        for condition in conditions(&args) {
            // Who goes first changes: what the machine does over time must not favour one.
            let mut order = [Subject::Ours, Subject::Kernel];
            order.rotate_left(round as usize % 2);
            let mut extent = Extent::Seconds(args.duration);
            for subject in order {
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
    println!("{table}");
    if let Some(path) = &args.out {
        fs::write(path, table).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
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

/// Nothing of an earlier connection is remembered, the buffers hold any window that occurs here, and unsent bytes do
/// not pile up in them: they would have to drain after the time is over.
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
    /// Frames that may wait before the line: what the path holds, and not less than a small switch has.
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
                // No longer than so many frames take at the full rate.
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
        let counter = |name: &str| result["counters"][name].as_f64().unwrap_or(0.0);
        let (sent, again) = match subject {
            Subject::Ours => (counter("tcp.segments_out"), counter("tcp.retransmits")),
            Subject::Kernel => (after.0 - before.0, after.1 - before.1),
        };
        let row = &result["results"][0];
        let mebibytes = row["BW_average"].as_f64().context("no figure in the JSON")?;
        Ok(Measurement {
            messages: row["n_iterations"].as_u64().context("no count in the JSON")?,
            megabits: mebibytes * f64::from(1 << 20) * 8.0 / 1e6,
            resent: again / sent.max(1.0),
            late_us: report["late_mean_us"].as_f64().unwrap_or(0.0),
        })
    }

    /// One transfer from A to B; the client's JSON.
    fn transfer(&self, subject: Subject, extent: Extent) -> Result<Value> {
        let json = self.lab.file("goodput.json");
        let _ = fs::remove_file(&json);
        let path = json.to_string_lossy().into_owned();
        let (option, extent) = match extent {
            Extent::Seconds(seconds) => ("-D", seconds.to_string()),
            Extent::Messages(count) => ("-n", count.to_string()),
        };
        let program = self.programs.join("xwarp-peer").to_string_lossy().into_owned();
        // The protocol decides, and not what else the machine does: both ends go before ordinary programs, whose
        // work they leave most of the time to, because they sleep.
        let mut line = vec!["--rr", "10", &program];
        line.extend(match subject {
            Subject::Ours => ["write_bw", "-d", INTERFACE, "-e", "--stats"],
            // Another port: its connections stay in TIME-WAIT, where we could not reserve it.
            Subject::Kernel => ["tcp_bw", "-C", "cubic", "-p", "18516"],
        });
        line.extend(["-s", MESSAGE, option, &extent]);
        let mut server = self.lab.start(Side::B, "chrt", &line)?;
        server.wait_for("Waiting for a client", Duration::from_secs(30))?;
        let address = self.lab.address(Side::B, Family::V4).to_string();
        line.extend(["--out_json", "--out_json_file", &path, &address]);
        let limit = Duration::from_secs_f64(self.args.duration) + PATIENCE;
        self.lab.start(Side::A, "chrt", &line)?.finish(limit)?;
        server.finish(PATIENCE)?;
        let text = fs::read_to_string(&json).context("the client left no result")?;
        serde_json::from_str(&text).context("what the client left is no JSON")
    }

    /// Segments sent, and sent again, by the kernel of A.
    fn kernel_segments(&self) -> Result<(f64, f64)> {
        let text = self.lab.run(Side::A, "cat", &["/proc/net/snmp"])?;
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (names, values) = lines.next().zip(lines.next()).context("no TCP in /proc/net/snmp")?;
        let value = |wanted: &str| {
            let mut pairs = names.split_whitespace().zip(values.split_whitespace());
            pairs.find(|(name, _)| *name == wanted).and_then(|(_, value)| value.parse::<f64>().ok())
        };
        value("OutSegs").zip(value("RetransSegs")).context("no segments in /proc/net/snmp")
    }

    fn setting(&self) -> String {
        let args = self.args;
        let queues: Vec<String> = args.rtts.iter().map(|rtt| args.queue(*rtt).to_string()).collect();
        format!(
            "Line {} Mbit/s in each direction, counted from the Ethernet header on; drop-tail queues of {} frames; MTU 1500, IPv4, \
             one connection.\nEach figure is the median of {} interleaved rounds: the one sends messages of {MESSAGE} for {} s \
             and until they have arrived, the other as many.\nLoss is independent, in each direction. Reordering: {} % of the data frames are held back \
             until up to so many others have passed.\nOurs: RDMA Writes over AF_XDP (both ends sleep until completions come), \
             CRC and markers on, CUBIC. The kernel's TCP: CUBIC, {}; checksum, segmentation and receive offloads off.\n",
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
