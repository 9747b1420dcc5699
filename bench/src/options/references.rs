//! Options of the references, kernel TCP and raw AF_XDP, and of `idle`.
#![allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

use super::{AmountArgs, DeviceArgs, MeetArgs, ModeArg, OutputArgs, parse_seconds};
use crate::units::parse_bytes;

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
    /// Sleep in the kernel until data arrives instead of polling (latency; bandwidth always sleeps)
    #[arg(short = 'e', long)]
    pub events: bool,
    /// Congestion control of the client's connection [default: the kernel's]
    #[arg(short = 'C', long, value_name = "NAME")]
    pub congestion: Option<String>,
}

/// `raw_bw`, `raw_lat`.
#[derive(Debug, Clone, Args)]
pub struct RawArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub meet: MeetArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub amount: AmountArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub output: OutputArgs,
    /// The network interface [default: the only one besides the loopback]
    #[arg(short = 'd', long = "ib-dev", visible_alias = "dev", value_name = "INTERFACE")]
    pub device: Option<String>,
    /// How frames are sent and received
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub mode: ModeArg,
    /// The library that sends and receives the frames; both ends should choose the same
    #[arg(long, value_enum, value_name = "LIBRARY", default_value_t = WireArg::Driver)]
    pub over: WireArg,
    /// Sleep until a frame arrives instead of polling
    #[arg(short = 'e', long)]
    pub events: bool,
    /// Frames in flight before the sender waits for an acknowledgement (bandwidth only)
    #[arg(long, value_name = "FRAMES", default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=1024))]
    pub window: u32,
}

/// `--over`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WireArg {
    /// xwarp's driver.
    Driver,
    /// The crate xsk-rs with libxdp's program, on the one queue on which the frames arrive. While it runs, the kernel gets no frame
    /// of that queue. Needs --mode generic or copy; copy takes an MTU of at most 3506.
    XskRs,
}

impl WireArg {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "xwarp's driver",
            Self::XskRs => "xsk-rs",
        }
    }
}

/// `idle`.
#[derive(Debug, Clone, Args)]
pub struct IdleArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "shown by its own type")]
    pub device: DeviceArgs,
    /// Bytes of memory to register; K, M, G are powers of 1024
    #[arg(short = 's', long, value_name = "BYTES", value_parser = parse_bytes, default_value = "1G")]
    pub size: u64,
    /// Time without traffic, in seconds
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "1")]
    pub duration: Duration,
    /// Pin the program to one CPU
    #[arg(long, value_name = "CPU")]
    pub pin: Option<usize>,
    /// Also write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
