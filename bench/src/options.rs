//! The command line: perftest's letters where they mean something here, and our own words.
#![allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use crate::units::{RateUnit, parse_bytes};

/// The port of perftest.
pub const DEFAULT_PORT: u16 = 18515;

/// Bandwidth and latency of the xwarp RNIC, with perftest's options and columns.
///
/// Start it without an address on one machine (the server) and with the server's address on the other
/// (the client); both take the same options, as perftest wants it.
#[derive(Debug, Parser)]
#[command(name = "xwarp-perf", version, disable_version_flag = true, rename_all = "snake_case")]
pub struct Cli {
    /// Print the version.
    #[arg(short = 'V', long, action = ArgAction::Version)]
    version: Option<bool>,
    /// Which test.
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
    /// Bandwidth of one kernel TCP connection: the baseline
    TcpBw(TcpArgs),
    /// Latency of one kernel TCP connection, half a round trip: the baseline
    TcpLat(TcpArgs),
    /// Our verbs beside kernel TCP between two network namespaces, interleaved, with ratios
    Compare(CompareArgs),
}

/// Where the two ends meet.
#[derive(Debug, Clone, Args)]
pub struct MeetArgs {
    /// The server's address; without it this end is the server
    pub server: Option<String>,
    /// The TCP port to meet on
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = DEFAULT_PORT)]
    pub port: u16,
    /// Bind to this address of the interface [default: by route; the server: any]
    #[arg(long = "bind_source_ip", visible_aliases = ["source_ip", "bind-source-ip"], value_name = "ADDRESS")]
    pub source: Option<IpAddr>,
    /// Prefer IPv6 when the server's name has addresses of both families
    #[arg(long)]
    pub ipv6: bool,
}

/// What is measured, and how much of it.
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
    /// Run for so many seconds instead of a number of messages
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds, conflicts_with = "iters")]
    pub duration: Option<Duration>,
}

/// How results are told.
#[derive(Debug, Clone, Args)]
pub struct OutputArgs {
    /// Report bandwidth in Gb/sec instead of MiB/sec
    #[arg(long = "report_gbits", visible_alias = "report-gbits")]
    pub report_gbits: bool,
    /// Also write the results as JSON
    #[arg(long = "out_json", visible_alias = "out-json")]
    pub out_json: bool,
    /// Where to [default: perftest_out.json in the current directory]
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
    /// Report how busy the CPUs were with this process
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
    /// How frames get in and out
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub mode: ModeArg,
    /// Who runs the protocol: this program's polling, a thread, or both as needed
    #[arg(long, value_name = "WHO", default_value = "auto")]
    pub progress: ProgressArg,
    /// MPA markers in what we receive: prefer them, require them, or do without
    #[arg(long, value_name = "WISH", num_args = 0..=1, default_value = "prefer", default_missing_value = "require")]
    pub markers: MarkersArg,
    /// Do not ask for the CRC of MPA (it is used when either end asks)
    #[arg(long = "no-crc", visible_alias = "no_crc")]
    pub no_crc: bool,
    /// Revision of MPA: 1 (RFC 5044) or 2 (RFC 6581)
    #[arg(long = "mpa-rev", visible_alias = "mpa_rev", value_name = "REVISION", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub mpa_revision: u8,
    /// The other end is the program of perftest (4.5) with -R and the same options
    #[arg(long)]
    pub perftest: bool,
    /// Fill each message with a pattern of its own and check every byte that arrives
    #[arg(long)]
    pub verify: bool,
    /// Print the counters of the RNIC at the end
    #[arg(long)]
    pub stats: bool,
    /// Record every frame of ours in a pcapng file
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// Use the VLAN with this ID on the interface: our frames carry its tag
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u16).range(1..=4094))]
    pub vlan: Option<u16>,
    /// Sleep until a completion comes instead of polling
    #[arg(short = 'e', long)]
    pub events: bool,
    /// Send messages of up to so many bytes inline [default: 0 for bandwidth, 64 for latency]
    #[arg(short = 'I', long = "inline_size", visible_alias = "inline-size", value_name = "BYTES")]
    pub inline: Option<u32>,
    #[command(flatten)]
    ignored: IgnoredArgs,
}

/// Accepted, so that a perftest command line works, and without effect.
#[derive(Debug, Clone, Args)]
struct IgnoredArgs {
    /// Accepted for perftest's sake: connections always come up through the connection manager
    #[arg(short = 'R', long = "rdma_cm")]
    rdma_cm: bool,
    /// Accepted for perftest's sake: the CPU's frequency does not matter to our clock
    #[arg(short = 'F', long = "CPU-freq")]
    cpu_freq: bool,
    /// Accepted for perftest's sake: an interface is one port
    #[arg(short = 'i', long = "ib-port", value_name = "PORT")]
    ib_port: Option<u32>,
    /// Accepted for perftest's sake: iWARP has addresses and no GIDs, see --bind_source_ip
    #[arg(short = 'x', long = "gid-index", value_name = "INDEX")]
    gid_index: Option<u32>,
    /// Accepted for perftest's sake: iWARP has reliable connections only
    #[arg(short = 'c', long, value_name = "RC", value_parser = ["RC"])]
    connection: Option<String>,
}

/// `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeArg {
    /// The best that works: zerocopy, else copy, else generic.
    Auto,
    /// Zero-copy AF_XDP or nothing.
    Zerocopy,
    /// Native XDP, frames copied.
    Copy,
    /// Generic (skb) XDP.
    Generic,
}

/// `--progress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProgressArg {
    /// Polling where the application polls, a thread where it does not.
    Auto,
    /// Only the application's polling.
    Application,
    /// Always a thread.
    Thread,
}

/// `--markers`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MarkersArg {
    /// Ask for them, do without when the peer refuses.
    Prefer,
    /// Ask for them, and fail when the peer refuses.
    Require,
    /// Do without.
    Off,
}

/// What every test of the RNIC takes.
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
    /// Messages in flight on each queue pair
    #[arg(short = 't', long = "tx-depth", value_name = "COUNT", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub tx_depth: u32,
    /// Receives posted on each queue pair (Sends only)
    #[arg(short = 'r', long = "rx-depth", value_name = "COUNT", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub rx_depth: u32,
    /// One message in so many asks for a completion
    #[arg(short = 'Q', long = "cq-mod", value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub cq_mod: u32,
    /// Messages posted by one call
    #[arg(short = 'l', long = "post_list", visible_alias = "post-list", value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub post_list: u32,
    /// RDMA Reads in flight on each queue pair [default: 16]
    #[arg(short = 'o', long = "outs", value_name = "COUNT")]
    pub outstanding_reads: Option<u32>,
    /// Receive from one shared receive queue (Sends only)
    #[arg(long = "use-srq", visible_alias = "use_srq")]
    pub shared_receive_queue: bool,
    /// Do not report the peak
    #[arg(short = 'N', long = "noPeak")]
    pub no_peak: bool,
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
    /// RDMA Reads in flight that the peer is asked for [default: 1]
    #[arg(short = 'o', long = "outs", value_name = "COUNT")]
    pub outstanding_reads: Option<u32>,
    /// Print every sample, sorted
    #[arg(short = 'H', long = "report-histogram")]
    pub histogram: bool,
    /// Print every sample as it came
    #[arg(short = 'U', long = "report-unsorted")]
    pub unsorted: bool,
}

/// `tcp_bw`, `tcp_lat`.
#[derive(Debug, Clone, Args)]
pub struct TcpArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub meet: MeetArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub amount: AmountArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub output: OutputArgs,
    /// Sleep in the kernel until data comes instead of polling (latency; bandwidth always sleeps)
    #[arg(short = 'e', long)]
    pub events: bool,
    /// The congestion control of what the client sends [default: the kernel's]
    #[arg(short = 'C', long, value_name = "NAME")]
    pub congestion: Option<String>,
}

/// `compare`.
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// The namespace of the client
    #[arg(long = "netns-a", value_name = "NAME", default_value = "xw-a")]
    pub netns_a: String,
    /// The namespace of the server
    #[arg(long = "netns-b", value_name = "NAME", default_value = "xw-b")]
    pub netns_b: String,
    /// The interface in both namespaces
    #[arg(
        short = 'd',
        long = "ib-dev",
        visible_alias = "dev",
        value_name = "INTERFACE",
        default_value = "xw0"
    )]
    pub device: String,
    /// The server's address
    #[arg(long, value_name = "ADDRESS", default_value = "10.77.0.2")]
    pub server: IpAddr,
    /// Sizes of the ping-pong
    #[arg(long = "latency-sizes", value_name = "BYTES", value_delimiter = ',', value_parser = parse_bytes, default_value = "64,1024")]
    pub latency_sizes: Vec<u64>,
    /// Sizes of the bulk messages
    #[arg(long = "bandwidth-sizes", value_name = "BYTES", value_delimiter = ',', value_parser = parse_bytes, default_value = "4K,64K,1M")]
    pub bandwidth_sizes: Vec<u64>,
    /// MTU of ours, when it shall differ from TCP's; both ends are set for each run and restored
    #[arg(long = "our-mtu", value_name = "MTU", value_parser = clap::value_parser!(u32).range(576..=65535))]
    pub our_mtu: Option<u32>,
    /// How often everything is measured; medians are reported
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seconds of one bulk measurement
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "1")]
    pub duration: Duration,
    /// Messages of one ping-pong measurement
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub iters: u64,
    /// How our frames get in and out
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub mode: ModeArg,
    /// The CPUs of client and server [default: the first two; one CPU when there is only one]
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 2)]
    pub cpus: Option<Vec<usize>>,
    /// Also write the results as JSON to this file
    #[arg(long = "out_json_file", visible_alias = "out-json-file", value_name = "FILE")]
    pub out_json_file: Option<PathBuf>,
}

impl OutputArgs {
    /// The unit of bandwidth.
    pub fn unit(&self) -> RateUnit {
        if self.report_gbits { RateUnit::GigabitsPerSecond } else { RateUnit::MebibytesPerSecond }
    }
}

/// When a row of the table ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// After so many messages.
    Iterations(u64),
    /// After so much time.
    Duration(Duration),
}

impl AmountArgs {
    /// The sizes of the rows.
    pub fn sizes(&self, default: u64) -> Vec<u64> {
        if self.all { (1..=23).map(|shift| 1 << shift).collect() } else { vec![self.size.unwrap_or(default)] }
    }

    /// The length of a row.
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
    fn a_perftest_line_is_understood() {
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
    fn contradictions_and_nonsense_are_refused() {
        for line in [
            "send_bw -a -s 5",
            "send_bw -D 5 -n 5",
            "send_lat -q 2",
            "write_bw -c UD",
            "read_bw -t 0",
            "send_bw -D 0",
            "",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
