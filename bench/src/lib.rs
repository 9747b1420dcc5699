//! `xwarp-perf`: bandwidth and latency of the xwarp RNIC as perftest measures and prints them, and the
//! same traffic over kernel TCP beside it.
//!
//! | module | owns |
//! |---|---|
//! | [`options`] | the command line |
//! | [`report`], [`stats`], [`units`], [`progress`] | what is printed |
//! | [`pattern`] | what `--verify` sends and checks |
//! | [`cpu`] | pinning, CPU time, and how far apart two cores are |
//! | [`baseline`] | `tcp_bw` and `tcp_lat` |
//! | [`compare`] | both, interleaved, with ratios |
#![forbid(unsafe_code)]

pub mod baseline;
pub mod compare;
pub mod cpu;
pub mod options;
pub mod pattern;
pub mod progress;
pub mod report;
pub mod stats;
pub mod units;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser as _;

use crate::options::{Cli, Command};

/// The program: parses the command line, runs the test, and prints an error with its causes in one line.
pub fn main() -> ExitCode {
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
        Command::TcpBw(args) => baseline::run(baseline::Kind::Bandwidth, args),
        Command::TcpLat(args) => baseline::run(baseline::Kind::Latency, args),
        Command::Compare(args) => compare::run(args),
        _ => anyhow::bail!("this test needs the verbs"),
    }
}
