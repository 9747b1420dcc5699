//! `xwarp-perf`: bandwidth and latency of the xwarp RNIC as perftest measures and prints them, and the
//! same traffic over kernel TCP and over raw AF_XDP beside it.
//!
//! | module | owns |
//! |---|---|
//! | [`options`] | the command line |
//! | [`failure`] | errors that have an exit status of their own, and how errors are printed |
//! | [`report`], [`stats`], [`units`], [`progress`] | the output |
//! | [`pattern`] | the bytes that `--verify` sends and verifies |
//! | [`cpu`] | pinning, CPU time, and how far apart two cores are |
//! | [`rnic`] | `send`, `write`, `read` and `atomic`, `_bw` and `_lat` |
//! | [`perftest`] | the same against perftest's own programs |
//! | [`baseline`] | `tcp_bw` and `tcp_lat` |
//! | [`raw`] | `raw_bw` and `raw_lat` |
//! | [`idle`] | the cost of a device without traffic |
//! | [`order`] | the requests of a baseline or raw test's client to its server |
//! | [`compare`] | all of them, interleaved, with ratios |
#![deny(unsafe_code)]

pub mod baseline;
pub mod compare;
pub mod cpu;
pub mod failure;
pub mod idle;
pub mod options;
pub mod order;
pub mod pattern;
pub mod perftest;
pub mod progress;
pub mod raw;
pub mod report;
pub mod rnic;
pub mod stats;
pub mod units;

use std::{
    io::{IsTerminal as _, stderr},
    process::ExitCode,
};

use anyhow::Result;
use clap::Parser as _;
use tracing_subscriber::EnvFilter;

use crate::{
    options::{Cli, Command},
    rnic::Verb,
};

/// The program: parses the command line, runs the test, and prints an error with its causes in one line.
///
/// Log lines go to standard error, as `-v` and `RUST_LOG` say.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(directives(cli.verbose)));
    let colours = stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(stderr).init();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xwarp-perf: {}", failure::one_line(&error));
            failure::exit_code(&error)
        }
    }
}

/// The log filter for a number of `-v`: all crates of xwarp have names with this prefix.
fn directives(verbose: u8) -> &'static str {
    match verbose {
        0 => "warn",
        1 => "warn,xwarp=info",
        2 => "warn,xwarp=debug",
        _ => "warn,xwarp=trace",
    }
}

/// Runs the test that the command line names.
pub fn run(cli: &Cli) -> Result<()> {
    match &cli.command {
        Command::SendBw(args) => rnic::bandwidth(Verb::Send, args),
        Command::WriteBw(args) => rnic::bandwidth(Verb::Write, args),
        Command::ReadBw(args) => rnic::bandwidth(Verb::Read, args),
        Command::SendLat(args) => rnic::latency(Verb::Send, args),
        Command::WriteLat(args) => rnic::latency(Verb::Write, args),
        Command::ReadLat(args) => rnic::latency(Verb::Read, args),
        Command::AtomicBw(args) => rnic::bandwidth(Verb::Atomic(args.atomic.atomic_type), &args.bandwidth),
        Command::AtomicLat(args) => rnic::latency(Verb::Atomic(args.atomic.atomic_type), &args.latency),
        Command::TcpBw(args) => baseline::run(baseline::Kind::Bandwidth, args),
        Command::TcpLat(args) => baseline::run(baseline::Kind::Latency, args),
        Command::RawBw(args) => raw::run(baseline::Kind::Bandwidth, args),
        Command::RawLat(args) => raw::run(baseline::Kind::Latency, args),
        Command::Idle(args) => idle::run(args),
        Command::Compare(args) => compare::run(args),
    }
}
