//! [`PacingArgs`]: perftest's rate limiter.
#![allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

/// The rate limiter of a bandwidth test.
#[derive(Debug, Clone, Args)]
pub struct PacingArgs {
    /// Send no faster than this, in all queue pairs together
    #[arg(long = "rate_limit", visible_alias = "rate-limit", value_name = "RATE", value_parser = parse_rate, conflicts_with = "events")]
    pub rate_limit: Option<f64>,
    /// The unit of --rate_limit: M for MiB/sec, g for Gb/sec, p for messages/sec
    #[arg(
        long = "rate_units",
        visible_alias = "rate-units",
        value_name = "UNIT",
        default_value = "M",
        requires = "rate_limit"
    )]
    pub rate_units: RateLimitUnit,
    /// Messages that the rate limiter sends at once [default: the tx-depth]
    #[arg(long = "burst_size", visible_alias = "burst-size", value_name = "COUNT", requires = "rate_limit", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub burst_size: Option<u32>,
}

/// `--rate_units`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum RateLimitUnit {
    /// MiB/sec.
    #[value(name = "M")]
    MebibytesPerSecond,
    /// Gb/sec.
    #[value(name = "g")]
    GigabitsPerSecond,
    /// Messages/sec.
    #[value(name = "p")]
    MessagesPerSecond,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate: Option<f64> = text.parse().ok();
    rate.filter(|rate| rate.is_finite() && *rate > 0.0).ok_or_else(|| format!("'{text}' is not a rate"))
}
