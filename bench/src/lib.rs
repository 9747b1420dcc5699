//! `xwarp-perf`: bandwidth and latency of the xwarp RNIC as perftest measures and prints them, and the
//! same traffic over kernel TCP beside it.
//!
//! | module | owns |
//! |---|---|
//! | [`options`] | the command line |
//! | [`report`], [`stats`], [`units`], [`progress`] | what is printed |
//! | [`pattern`] | what `--verify` sends and checks |
//! | [`cpu`] | pinning, CPU time, and how far apart two cores are |
//! | [`rnic`] | `send`, `write` and `read`, `_bw` and `_lat` |
//! | [`perftest`] | the same against perftest's own programs |
//! | [`baseline`] | `tcp_bw` and `tcp_lat` |
//! | [`compare`] | both, interleaved, with ratios |
#![forbid(unsafe_code)]

pub mod baseline;
pub mod compare;
pub mod cpu;
pub mod options;
pub mod pattern;
pub mod perftest;
pub mod progress;
pub mod report;
pub mod rnic;
pub mod stats;
pub mod units;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser as _;
use tracing_subscriber::EnvFilter;

use crate::{
    options::{Cli, Command},
    rnic::Verb,
};

/// The program: parses the command line, runs the test, and prints an error with its causes in one line.
///
/// What the RNIC has to say (`RUST_LOG=xwarp=debug` for more) goes to standard error.
pub fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xwarp-perf: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what the command line asks for.
pub fn run(cli: &Cli) -> Result<()> {
    match &cli.command {
        Command::SendBw(args) => rnic::bandwidth(Verb::Send, args),
        Command::WriteBw(args) => rnic::bandwidth(Verb::Write, args),
        Command::ReadBw(args) => rnic::bandwidth(Verb::Read, args),
        Command::SendLat(args) => rnic::latency(Verb::Send, args),
        Command::WriteLat(args) => rnic::latency(Verb::Write, args),
        Command::ReadLat(args) => rnic::latency(Verb::Read, args),
        Command::TcpBw(args) => baseline::run(baseline::Kind::Bandwidth, args),
        Command::TcpLat(args) => baseline::run(baseline::Kind::Latency, args),
        Command::Compare(args) => compare::run(args),
    }
}
