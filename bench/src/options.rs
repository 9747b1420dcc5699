//! The command line: perftest's options where they apply, and our own.
#![allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]

mod compare;
mod ignored;
mod pacing;
mod references;

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use xwarp_verbs::{Algorithm, Mode, ModePreference};

pub use self::{
    compare::{CompareArgs, Group},
    ignored::IgnoredArgs,
    pacing::{PacingArgs, RateLimitUnit},
    references::{IdleArgs, RawArgs, TcpArgs, WireArg},
};
use crate::units::{RateUnit, parse_bytes};

/// The default port, the same as perftest's.
pub const DEFAULT_PORT: u16 = 18515;

/// Printed below the tests in the help of the program; the help of a test refers to it by `-v`.
const AFTER_HELP: &str = "\
Environment:
  RUST_LOG  which log lines are printed on standard error, as 'xwarp_tcp=trace,warn'; overrides -v
  NO_COLOR  no colours on a terminal (files and pipes never get any)

Exit status:
  0  the test ran to its end
  1  the test failed
  2  the command line is wrong
  3  the other end is gone: its program died, or the network between the two ends failed
  4  a result is below --limit_bw or --limit_msgrate";

/// Bandwidth and latency of the xwarp RNIC, with perftest's options and columns.
///
/// Start it without an address on one machine (the server) and with the server's address on the other
/// (the client). Both take the same options; where they differ, the client decides.
#[derive(Debug, Parser)]
#[command(
    name = "xwarp-perf",
    version,
    disable_version_flag = true,
    rename_all = "snake_case",
    after_help = AFTER_HELP
)]
pub struct Cli {
    /// Print the version
    #[arg(short = 'V', long, action = ArgAction::Version)]
    version: Option<bool>,
    /// Log connections and their ends (-v), protocol decisions (-vv), every step (-vvv); RUST_LOG overrides
    /// it
    #[arg(short = 'v', long, action = ArgAction::Count, global = true)]
    pub verbose: u8,
    /// The test to run
    #[command(subcommand)]
    pub command: Command,
}

/// The tests.
#[derive(Debug, Subcommand)]
#[command(rename_all = "snake_case")]
pub enum Command {
    /// Bandwidth of Sends
    SendBw(BandwidthArgs),
    /// Latency of Sends, half a round trip
    SendLat(LatencyArgs),
    /// Bandwidth of RDMA Writes
    WriteBw(BandwidthArgs),
    /// Latency of RDMA Writes, half a round trip, both ends polling memory
    WriteLat(LatencyArgs),
    /// Bandwidth of RDMA Reads
    ReadBw(BandwidthArgs),
    /// Latency of RDMA Reads, the whole round trip
    ReadLat(LatencyArgs),
    /// Rate of atomic operations
    AtomicBw(AtomicBandwidthArgs),
    /// Latency of atomic operations, the whole round trip
    AtomicLat(AtomicLatencyArgs),
    /// Bandwidth of one kernel TCP connection: the baseline
    TcpBw(TcpArgs),
    /// Latency of one kernel TCP connection, half a round trip: the baseline
    TcpLat(TcpArgs),
    /// Bandwidth of raw AF_XDP, with the copies and acknowledgements of a transport and no protocol: the
    /// upper bound of what any transport over AF_XDP can reach
    RawBw(RawArgs),
    /// Latency of raw AF_XDP, half a round trip
    RawLat(RawArgs),
    /// Cost of a device without traffic, and of registering memory
    Idle(IdleArgs),
    /// Our verbs beside raw AF_XDP and kernel TCP between two network namespaces, interleaved, with ratios
    Compare(Box<CompareArgs>),
}

/// The addresses of the two ends.
#[derive(Debug, Clone, Args)]
pub struct MeetArgs {
    /// The server's address; without it, this end is the server
    pub server: Option<String>,
    /// The server's TCP port
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = DEFAULT_PORT)]
    pub port: u16,
    /// Bind to this address of the interface [default: by route; the server: any]
    #[arg(long = "bind_source_ip", visible_aliases = ["source_ip", "bind-source-ip"], value_name = "ADDRESS")]
    pub source: Option<IpAddr>,
    /// Prefer IPv6 when the server's name has addresses of both families
    #[arg(long, visible_alias = "ipv6-addr")]
    pub ipv6: bool,
}

/// Message sizes and counts.
#[derive(Debug, Clone, Args)]
pub struct AmountArgs {
    /// Message size in bytes; K, M, G are powers of 1024 [default: 65536 for bandwidth, 2 for latency]
    #[arg(short = 's', long, value_name = "BYTES", value_parser = parse_bytes)]
    pub size: Option<u64>,
    /// All sizes from 2 bytes to 8 MiB, each power of two
    #[arg(short = 'a', long, conflicts_with = "size")]
    pub all: bool,
    /// Messages of one size (per queue pair) [default: 1000]
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub iters: Option<u64>,
    /// Run for this time instead of a number of messages
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds, conflicts_with = "iters")]
    pub duration: Option<Duration>,
}

/// How results are reported.
#[derive(Debug, Clone, Args)]
pub struct OutputArgs {
    /// Report bandwidth in Gb/sec instead of MiB/sec
    #[arg(long = "report_gbits", visible_alias = "report-gbits")]
    pub report_gbits: bool,
    /// Also write the results as JSON
    #[arg(long = "out_json", visible_alias = "out-json")]
    pub out_json: bool,
    /// The file for the JSON [default: perftest_out.json in the current directory]
    #[arg(
        long = "out_json_file",
        visible_alias = "out-json-file",
        value_name = "FILE",
        requires = "out_json"
    )]
    pub out_json_file: Option<PathBuf>,
    /// Print one figure of each row only, for scripts
    #[arg(long, value_name = "WHAT")]
    pub output: Option<Figure>,
    /// Report the CPU utilisation of this process
    #[arg(long = "cpu_util", visible_alias = "cpu-util")]
    pub cpu_util: bool,
    /// Pin this end to one CPU
    #[arg(long, value_name = "CPU")]
    pub pin: Option<usize>,
}

/// The figure that `--output` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Figure {
    /// Average bandwidth.
    Bandwidth,
    /// Messages a second, in millions.
    MessageRate,
    /// Average latency in microseconds.
    Latency,
}

/// The RNIC and its connections.
#[derive(Debug, Clone, Args)]
pub struct DeviceArgs {
    /// The network interface [default: the only one besides the loopback]
    #[arg(short = 'd', long = "ib-dev", visible_alias = "dev", value_name = "INTERFACE")]
    pub device: Option<String>,
    /// How frames are sent and received
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub mode: ModeArg,
    /// Progress of the protocol: by the application's polling, a thread, or both as needed
    #[arg(long, value_name = "POLICY", default_value = "auto")]
    pub progress: ProgressArg,
    /// Framing of the messages in the TCP stream; both ends must choose the same
    #[arg(long, value_enum, default_value_t = FramingArg::Mpa)]
    pub framing: FramingArg,
    /// MPA markers in the data that we receive: prefer, require or omit them
    #[arg(long, value_name = "MARKERS", num_args = 0..=1, default_value = "prefer", default_missing_value = "require")]
    pub markers: MarkersArg,
    /// Do not request MPA's CRC (it is used if either end requests it)
    #[arg(long = "no-crc", visible_alias = "no_crc")]
    pub no_crc: bool,
    /// Revision of MPA: 1 (RFC 5044), or 2 (RFC 6581) and then 1 if the peer refuses 2
    #[arg(long = "mpa-rev", visible_alias = "mpa_rev", value_name = "REVISION", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub mpa_revision: u8,
    /// Congestion control of our connections: reno, cubic, dctcp, bbr
    #[arg(short = 'C', long, value_name = "NAME", default_value_t)]
    pub congestion: Algorithm,
    /// Accept peers that speak the RDMA Consortium's protocols (MPA revision 0, RFC 5044 appendix C)
    #[arg(long)]
    pub permissive: bool,
    /// The other end is a program of perftest (4.5), started with -R and the same options
    #[arg(long)]
    pub perftest: bool,
    /// Fill each message with its own pattern and verify every byte that arrives
    #[arg(long, visible_alias = "data_validation")]
    pub verify: bool,
    /// Print the counters of the RNIC at the end
    #[arg(long)]
    pub stats: bool,
    /// Record all sent and received frames in a pcapng file
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// Use the VLAN with this ID on the interface: frames carry its tag
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u16).range(1..=4094))]
    pub vlan: Option<u16>,
    /// Sleep until a completion arrives instead of polling
    #[arg(short = 'e', long)]
    pub events: bool,
    /// Largest message that is sent inline [default: 0 for bandwidth, 64 for latency]
    #[arg(short = 'I', long = "inline_size", visible_alias = "inline-size", value_name = "BYTES")]
    pub inline: Option<u32>,
    /// End the test when the other end has not answered for this time (0: never probe a silent peer)
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_keepalive)]
    pub keepalive: Duration,
    /// Type-of-service byte of all packets; its upper six bits are the DSCP, TCP uses the others for ECN
    #[arg(short = 'T', long, visible_alias = "tclass", value_name = "TOS", default_value_t = 0)]
    pub tos: u8,
    /// Hop limit (TTL) of all packets [default: 64]
    #[arg(short = 'L', long = "hop_limit", visible_alias = "hop-limit", value_name = "HOPS", value_parser = clap::value_parser!(u8).range(1..))]
    pub hop_limit: Option<u8>,
    /// Replace another XDP program that is attached to the interface instead of failing
    #[arg(long = "replace-program", visible_alias = "replace_program")]
    pub replace_program: bool,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub implied: ImpliedArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub ignored: IgnoredArgs,
}

/// Options of perftest that request the default behaviour.
#[derive(Debug, Clone, Args)]
pub struct ImpliedArgs {
    /// Always on: connections are established through the connection manager
    #[arg(short = 'R', long = "rdma_cm")]
    rdma_cm: bool,
    /// Always on: iWARP has only reliable connections
    #[arg(short = 'c', long, value_name = "RC", value_parser = ["RC"])]
    connection: Option<String>,
}

/// `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeArg {
    /// The best available: zero-copy, otherwise copy, otherwise generic; on a veth of one queue, generic before copy.
    Auto,
    /// Zero-copy AF_XDP, or an error.
    Zerocopy,
    /// Native XDP, frames copied.
    Copy,
    /// Generic (skb) XDP.
    Generic,
}

/// `--progress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProgressArg {
    /// The application's polling where it polls, otherwise a thread.
    Auto,
    /// Only the application's polling.
    Application,
    /// Always a thread.
    Thread,
}

/// `--framing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FramingArg {
    /// MPA (RFC 5044).
    Mpa,
    /// RDMA/TCP of 2000.
    RdmaTcp,
}

/// `--markers`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MarkersArg {
    /// Request markers; continue without them when the peer refuses.
    Prefer,
    /// Request markers; fail when the peer refuses.
    Require,
    /// Do not request markers.
    Off,
}

/// Options of every test of the RNIC.
#[derive(Debug, Clone, Args)]
pub struct RnicArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub meet: MeetArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub amount: AmountArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub device: DeviceArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub output: OutputArgs,
}

/// The operation of `atomic_bw` and `atomic_lat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum AtomicType {
    /// Compare a word, and replace it if it has the expected value.
    #[value(name = "CMP_AND_SWAP")]
    CompareSwap,
    /// Add to a word.
    #[value(name = "FETCH_AND_ADD")]
    FetchAdd,
}

impl AtomicType {
    /// Perftest's name of the operation.
    pub fn name(self) -> &'static str {
        match self {
            Self::CompareSwap => "CMP_AND_SWAP",
            Self::FetchAdd => "FETCH_AND_ADD",
        }
    }
}

/// `send_bw`, `write_bw`, `read_bw`.
#[derive(Debug, Clone, Args)]
pub struct BandwidthArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub rnic: RnicArgs,
    /// Both ends send at once; the sum is reported
    #[arg(short = 'b', long)]
    pub bidirectional: bool,
    /// Queue pairs
    #[arg(short = 'q', long = "qp", value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub queue_pairs: u32,
    /// Run the queue pairs in this many engines, each with a thread and with queues of the interface of its own; both
    /// ends need it, and an interface where a frame arrives on the queue on which it was sent, as veth
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64), conflicts_with = "perftest")]
    pub engines: u16,
    /// Messages in flight on each queue pair
    #[arg(short = 't', long = "tx-depth", value_name = "COUNT", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub tx_depth: u32,
    /// Receives posted on each queue pair (Sends only)
    #[arg(short = 'r', long = "rx-depth", value_name = "COUNT", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub rx_depth: u32,
    /// Request one completion for this many messages
    #[arg(short = 'Q', long = "cq-mod", value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub cq_mod: u32,
    /// Messages posted by one call
    #[arg(short = 'l', long = "post_list", visible_alias = "post-list", value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub post_list: u32,
    /// Receives posted by one call
    #[arg(long = "recv_post_list", visible_alias = "recv-post-list", value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub recv_post_list: u32,
    /// RDMA Reads and atomic operations in flight on each queue pair [default: 16]
    #[arg(short = 'o', long = "outs", value_name = "COUNT")]
    pub outstanding_reads: Option<u32>,
    /// Receive from one shared receive queue (Sends, and Writes with Immediate Data)
    #[arg(long = "use-srq", visible_alias = "use_srq")]
    pub shared_receive_queue: bool,
    /// Write with Immediate Data, so that each message completes a receive (write_bw only)
    #[arg(long = "write_with_imm", visible_alias = "write-with-imm")]
    pub write_with_imm: bool,
    /// The server sends and the client receives
    #[arg(long)]
    pub reversed: bool,
    /// Repeat the test until it is interrupted, with a row of results for each duration
    #[arg(long = "run_infinitely", visible_alias = "run-infinitely", requires = "duration")]
    pub run_infinitely: bool,
    /// Do not report the peak
    #[arg(short = 'N', long = "noPeak")]
    pub no_peak: bool,
    /// Fail when the average bandwidth, in the unit of the report, is below this
    #[arg(short = 'w', long = "limit_bw", visible_alias = "limit-bw", value_name = "BANDWIDTH", value_parser = parse_limit)]
    pub limit_bw: Option<f64>,
    /// Fail when the message rate, in millions a second, is below this
    #[arg(short = 'y', long = "limit_msgrate", visible_alias = "limit-msgrate", value_name = "RATE", value_parser = parse_limit)]
    pub limit_msgrate: Option<f64>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub pacing: PacingArgs,
}

/// `send_lat`, `write_lat`, `read_lat`.
#[derive(Debug, Clone, Args)]
pub struct LatencyArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub rnic: RnicArgs,
    /// Receives posted (Sends only)
    #[arg(short = 'r', long = "rx-depth", value_name = "COUNT", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub rx_depth: u32,
    /// RDMA Reads and atomic operations in flight to request from the peer [default: 1]
    #[arg(short = 'o', long = "outs", value_name = "COUNT")]
    pub outstanding_reads: Option<u32>,
    /// Write with Immediate Data, and wait for completions instead of polling memory (write_lat only)
    #[arg(long = "write_with_imm", visible_alias = "write-with-imm")]
    pub write_with_imm: bool,
    /// Wait this long before each message, in microseconds
    #[arg(long = "latency_gap", visible_alias = "latency-gap", value_name = "MICROSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub latency_gap: u32,
    /// Print every sample, sorted
    #[arg(short = 'H', long = "report-histogram")]
    pub histogram: bool,
    /// Print every sample in the order of measurement
    #[arg(short = 'U', long = "report-unsorted")]
    pub unsorted: bool,
}

/// Options of both atomic tests.
#[derive(Debug, Clone, Args)]
pub struct AtomicArgs {
    /// The atomic operation
    #[arg(
        short = 'A',
        long = "atomic_type",
        visible_alias = "atomic-type",
        value_name = "TYPE",
        default_value = "FETCH_AND_ADD"
    )]
    pub atomic_type: AtomicType,
}

/// `atomic_bw`.
#[derive(Debug, Clone, Args)]
pub struct AtomicBandwidthArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub atomic: AtomicArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub bandwidth: BandwidthArgs,
}

/// `atomic_lat`.
#[derive(Debug, Clone, Args)]
pub struct AtomicLatencyArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub atomic: AtomicArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub latency: LatencyArgs,
}

impl OutputArgs {
    /// The unit for bandwidth.
    pub fn unit(&self) -> RateUnit {
        if self.report_gbits { RateUnit::GigabitsPerSecond } else { RateUnit::MebibytesPerSecond }
    }
}

/// The condition that ends a row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Amount {
    /// A number of messages.
    Iterations(u64),
    /// A time.
    Duration(Duration),
}

impl Amount {
    /// The final value of a progress line: messages, or milliseconds.
    pub fn units(self) -> u64 {
        match self {
            Self::Iterations(n) => n,
            Self::Duration(time) => time.as_millis() as u64,
        }
    }
}

impl ModeArg {
    /// The driver's setting.
    pub fn preference(self) -> ModePreference {
        match self {
            Self::Auto => ModePreference::Probe,
            Self::Zerocopy => ModePreference::Force(Mode::ZeroCopy),
            Self::Copy => ModePreference::Force(Mode::Copy),
            Self::Generic => ModePreference::Force(Mode::Generic),
        }
    }
}

impl AmountArgs {
    /// The message sizes of the rows.
    pub fn sizes(&self, default: u64) -> Vec<u64> {
        if self.all { (1..=23).map(|shift| 1 << shift).collect() } else { vec![self.size.unwrap_or(default)] }
    }

    /// The length of each row.
    pub fn amount(&self) -> Amount {
        match self.duration {
            Some(duration) => Amount::Duration(duration),
            None => Amount::Iterations(self.iters.unwrap_or(1000)),
        }
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not a number of seconds between 0.01 and 86400");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if (0.01..=86400.0).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

/// Shortest keepalive time: below this, a busy machine would be taken for a dead one.
const MIN_KEEPALIVE_SECONDS: f64 = 0.5;

fn parse_keepalive(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is neither 0 nor a number of seconds between 0.5 and 86400");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if seconds == 0.0 || (MIN_KEEPALIVE_SECONDS..=86400.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(wrong())
    }
}

fn parse_limit(text: &str) -> Result<f64, String> {
    let limit: Option<f64> = text.parse().ok();
    limit.filter(|limit| limit.is_finite() && *limit >= 0.0).ok_or_else(|| format!("'{text}' is not a limit"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("xwarp-perf").chain(line.split_whitespace()))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_documents_logging_and_the_exit_status() {
        let mut command = Cli::command();
        let help = command.render_long_help().to_string();
        assert!(help.contains("RUST_LOG") && help.contains("Exit status:"), "{help}");
        command.build();
        let help = command.find_subcommand_mut("send_bw").unwrap().render_long_help().to_string();
        assert!(help.contains("RUST_LOG") && help.contains("--keepalive <SECONDS>"), "{help}");
        assert!(help.contains("[default: 30]"), "{help}");
    }

    #[test]
    fn a_perftest_command_line_is_parsed() {
        let cli = parse("write_bw -d xw0 -p 4000 -s 4096 -n 50 -t 64 -r 32 -q 4 -Q 1 -I 0 -x 1 -F -R -b -N --report_gbits --out_json 10.77.0.2").unwrap();
        let Command::WriteBw(args) = cli.command else { panic!("not write_bw") };
        assert_eq!(args.rnic.meet.server.as_deref(), Some("10.77.0.2"));
        assert_eq!((args.rnic.meet.port, args.queue_pairs, args.tx_depth, args.rx_depth), (4000, 4, 64, 32));
        assert_eq!(args.rnic.amount.sizes(65536), [4096]);
        assert_eq!(args.rnic.amount.amount(), Amount::Iterations(50));
        assert_eq!(args.rnic.output.unit(), RateUnit::GigabitsPerSecond);
        assert_eq!(args.rnic.device.markers, MarkersArg::Prefer);
        assert!(args.bidirectional && args.rnic.output.out_json);
    }

    #[test]
    fn defaults_are_those_of_perftest() {
        let Command::SendBw(args) = parse("send_bw").unwrap().command else { panic!("not send_bw") };
        assert_eq!((args.rnic.meet.port, args.tx_depth, args.rx_depth, args.cq_mod), (18515, 128, 512, 100));
        assert_eq!(args.rnic.amount.amount(), Amount::Iterations(1000));
        assert_eq!(args.rnic.meet.server, None);
        let all = AmountArgs { size: None, all: true, iters: None, duration: None }.sizes(65536);
        assert_eq!((all.first(), all.last(), all.len()), (Some(&2), Some(&(8 << 20)), 23));
    }

    #[test]
    fn markers_take_an_optional_wish() {
        for (line, wish) in [
            ("send_lat", MarkersArg::Prefer),
            ("send_lat --markers", MarkersArg::Require),
            ("send_lat --markers=off 10.0.0.1", MarkersArg::Off),
        ] {
            let Command::SendLat(args) = parse(line).unwrap().command else { panic!("not send_lat") };
            assert_eq!(args.rnic.device.markers, wish, "{line}");
        }
    }

    #[test]
    fn every_option_of_perftest_is_accepted_and_noted_if_it_has_no_effect() {
        let line = "write_bw -F -i 1 -x 3 -m 1024 -S 2 -u 14 -X 0 -f 2 -W x -z -R -c RC -T 104 -L 9 -y 0.5 -w 10 \
                    --write_with_imm --recv_post_list 4 --data_validation --odp --mr_per_qp --use_old_post_send \
                    --retry_count 7 --report-both --wait_destroy 1 -D 1 --run_infinitely --perform_warm_up -O --mmap /dev/x \
                    --mmap-offset 4096 --rate_limit 2.5 --rate_units g --burst_size 8 --rate_limit_type SW \
                    --typical_pkt_size 1000 10.0.0.1";
        let Command::WriteBw(args) = parse(line).unwrap().command else { panic!("not write_bw") };
        let device = &args.rnic.device;
        assert_eq!((device.tos, device.hop_limit, device.verify), (104, Some(9), true));
        assert_eq!((args.limit_bw, args.limit_msgrate), (Some(10.0), Some(0.5)));
        assert!(args.write_with_imm && args.run_infinitely && args.recv_post_list == 4);
        let notes: Vec<String> = device.ignored.notes().collect();
        assert_eq!(notes.len(), 22, "{notes:#?}");
        let pacing = &args.pacing;
        assert_eq!((pacing.rate_limit, pacing.rate_units), (Some(2.5), RateLimitUnit::GigabitsPerSecond));
        assert!(notes.iter().any(|note| note.starts_with("--CPU-freq has no effect: ")), "{notes:#?}");
        assert!(
            !notes.iter().any(|note| note.contains("--rdma_cm has")),
            "-R requests the default behaviour: {notes:#?}"
        );
        let Command::SendLat(args) = parse("send_lat").unwrap().command else { panic!("not send_lat") };
        assert_eq!(args.rnic.device.ignored.notes().count(), 0);
    }

    #[test]
    fn atomics_take_perftests_types() {
        for (line, expected) in
            [("atomic_bw", AtomicType::FetchAdd), ("atomic_bw -A CMP_AND_SWAP", AtomicType::CompareSwap)]
        {
            let Command::AtomicBw(args) = parse(line).unwrap().command else { panic!("not atomic_bw") };
            assert_eq!(args.atomic.atomic_type, expected, "{line}");
        }
        assert!(parse("atomic_lat -A SWAP").is_err());
    }

    #[test]
    fn compare_takes_two_cpus() {
        let Command::Compare(args) = parse("compare --cpus 0,1").unwrap().command else {
            panic!("not compare")
        };
        assert_eq!(args.cpus, Some((0, 1)));
        for wrong in ["compare --cpus 0", "compare --cpus 0,1,2", "compare --cpus a,b"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn keepalive_and_verbosity_have_their_ranges() {
        let Command::SendBw(args) = parse("send_bw").unwrap().command else { panic!("not send_bw") };
        assert_eq!(args.rnic.device.keepalive, Duration::from_secs(30));
        assert!(!args.rnic.device.replace_program);
        assert_eq!(parse("send_bw -vv --replace-program --keepalive 0").unwrap().verbose, 2);
        assert!(parse("send_bw --keepalive 0.1").is_err());
        assert!(parse("send_bw --keepalive never").is_err());
    }

    #[test]
    fn contradictory_and_invalid_options_are_rejected() {
        for line in [
            "send_bw -a -s 5",
            "send_bw -D 5 -n 5",
            "send_lat -q 2",
            "write_bw -c UD",
            "read_bw -t 0",
            "send_bw -D 0",
            "send_bw --run_infinitely",
            "send_bw -w -1",
            "",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
