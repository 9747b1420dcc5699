//! Options of `compare`.
#![allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

use super::{ModeArg, parse_seconds};

/// The tables that `compare` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Group {
    /// Half round trip, both ends polling.
    Polling,
    /// Half round trip, both ends sleeping.
    Sleeping,
    /// Rate of pipelined small messages.
    Rate,
    /// Bandwidth of 64 KiB messages, by MTU.
    Bulk,
    /// Bandwidth of 64 KiB messages, by queue pairs.
    Pairs,
    /// Rate of small messages, by queue pairs.
    PairsRate,
    /// Memory of idle connections.
    Memory,
    /// Half round trip, by message size.
    LatencySizes,
    /// Bandwidth, by message size.
    BandwidthSizes,
    /// Half round trip, both ends polling beside two busy loops on each of the two CPUs.
    BusyLatency,
    /// Bandwidth of 64 KiB messages beside the same.
    BusyBandwidth,
    /// CPU time of an idle device, and of registering memory.
    Idle,
    /// Bandwidth of 64 KiB Writes with each framing, by MTU; only if named.
    Framings,
    /// Rate of small Writes with each framing; only if named.
    FramingsRate,
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
    /// Measure only these tables [default: all but framings and framings_rate]
    #[arg(long, value_name = "TABLES", value_delimiter = ',')]
    pub only: Vec<Group>,
    /// MTUs of the bulk table; both ends are set for each measurement and restored. The first is that of the
    /// latency tables, the largest that of the tables by queue pairs and by size
    #[arg(long, value_name = "MTUS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(576..=65535), default_value = "1500,3506,9000,32768,65535")]
    pub mtus: Vec<u32>,
    /// Numbers of queue pairs
    #[arg(long = "queue-pairs", value_name = "COUNTS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024), default_value = "1,10,100,1000")]
    pub queue_pairs: Vec<u32>,
    /// Number of rounds; a round measures everything once [default: 10, with --quick 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Duration of one measurement, in seconds [default: 0.5, with --quick 0.05]
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// One short round, to verify that everything runs: its figures have no meaning
    #[arg(long)]
    pub quick: bool,
    /// How the frames of xwarp and of raw AF_XDP are sent and received
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub mode: ModeArg,
    /// The CPUs of client and server [default: the first two; one CPU when there is only one]
    #[arg(long, value_name = "A,B", value_parser = parse_cpus)]
    pub cpus: Option<(usize, usize)>,
    /// Copy the table of Soft-iWARP from this page of ci/vm/measure: its kernel module runs in a virtual machine only
    #[arg(long, value_name = "FILE")]
    pub siw: Option<PathBuf>,
    /// Also write the page as one HTML file with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Also write every measurement and every ratio as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl CompareArgs {
    /// The number of rounds.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 10 })
    }

    /// The duration of one measurement.
    pub fn duration(&self) -> Duration {
        self.duration.unwrap_or(Duration::from_millis(if self.quick { 50 } else { 500 }))
    }

    /// Whether a table is measured.
    pub fn measures(&self, group: Group) -> bool {
        if self.only.is_empty() { group.is_default() } else { self.only.contains(&group) }
    }
}

impl Group {
    /// Whether the table is measured when no table is named.
    pub fn is_default(self) -> bool {
        !matches!(self, Self::Framings | Self::FramingsRate)
    }
}

fn parse_cpus(text: &str) -> Result<(usize, usize), String> {
    let pair = text.split_once(',').and_then(|(a, b)| Some((a.trim().parse().ok()?, b.trim().parse().ok()?)));
    pair.ok_or_else(|| format!("'{text}' is not two CPU numbers (like 0,1)"))
}
