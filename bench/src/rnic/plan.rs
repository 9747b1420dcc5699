//! [`Plan`]: what both ends must agree on. The client's command line decides; the server takes it over and
//! only insists that the test is the one it was started for.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::options::{Amount, BandwidthArgs, LatencyArgs};

/// The operation under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Two-sided.
    Send,
    /// Into the server's memory.
    Write,
    /// From the server's memory.
    Read,
}

/// What is measured of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As many as go.
    Bandwidth,
    /// One after the other.
    Latency,
}

/// A test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// The operation.
    pub verb: Verb,
    /// What of it.
    pub kind: Kind,
}

impl Test {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match (self.verb, self.kind) {
            (Verb::Send, Kind::Bandwidth) => "send_bw",
            (Verb::Send, Kind::Latency) => "send_lat",
            (Verb::Write, Kind::Bandwidth) => "write_bw",
            (Verb::Write, Kind::Latency) => "write_lat",
            (Verb::Read, Kind::Bandwidth) => "read_bw",
            (Verb::Read, Kind::Latency) => "read_lat",
        }
    }

    /// As perftest heads its output.
    pub fn title(self, bidirectional: bool) -> String {
        let verb = match self.verb {
            Verb::Send => "Send",
            Verb::Write => "RDMA_Write",
            Verb::Read => "RDMA_Read",
        };
        let kind = match (self.kind, bidirectional) {
            (Kind::Bandwidth, false) => "BW",
            (Kind::Bandwidth, true) => "Bidirectional BW",
            (Kind::Latency, _) => "Latency",
        };
        format!("{verb} {kind} Test")
    }
}

/// Everything that both ends must know.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The test.
    pub test: Test,
    /// Message size of each row of the table.
    pub sizes: Vec<u64>,
    /// How long a row is.
    pub amount: Amount,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Messages in flight on each.
    pub tx_depth: u32,
    /// Receives posted on each.
    pub rx_depth: u32,
    /// One message in so many asks for a completion.
    pub cq_mod: u32,
    /// Messages posted by one call.
    pub post_list: u32,
    /// RDMA Reads in flight on each.
    pub reads: u16,
    /// Whether the server sends too.
    pub bidirectional: bool,
    /// Whether every byte is checked.
    pub verify: bool,
    /// Whether receives come from one shared queue.
    pub shared_receive_queue: bool,
    /// Messages up to this size are sent inline.
    pub inline: u32,
}

/// RDMA Reads in flight, unless said otherwise: what Linux's software iWARP takes at most is 128, hardware
/// takes fewer.
const DEFAULT_READS: u32 = 16;
/// What perftest sends inline in latency tests on adapters that it knows to be able to.
const DEFAULT_LATENCY_INLINE: u32 = 64;
/// Messages longer than this cannot be (RFC 5041 section 5.2).
const MAX_SIZE: u64 = u32::MAX as u64;

impl Plan {
    /// From the command line of a bandwidth test.
    pub fn bandwidth(verb: Verb, args: &BandwidthArgs) -> Result<Self> {
        ensure!(
            verb == Verb::Send || !args.shared_receive_queue,
            "--use-srq is for Sends: an RDMA Write or Read takes no receive"
        );
        let reads = args.outstanding_reads.unwrap_or(DEFAULT_READS.min(args.tx_depth));
        Self {
            test: Test { verb, kind: Kind::Bandwidth },
            sizes: args.rnic.amount.sizes(65536),
            amount: args.rnic.amount.amount(),
            queue_pairs: args.queue_pairs,
            tx_depth: args.tx_depth,
            rx_depth: args.rx_depth,
            cq_mod: args.cq_mod.min(args.tx_depth),
            post_list: args.post_list,
            reads: reads.try_into().context("--outs is too large")?,
            bidirectional: args.bidirectional,
            verify: args.rnic.device.verify,
            shared_receive_queue: args.shared_receive_queue,
            inline: args.rnic.device.inline.unwrap_or(0),
        }
        .checked()
    }

    /// From the command line of a latency test.
    pub fn latency(verb: Verb, args: &LatencyArgs) -> Result<Self> {
        Self {
            test: Test { verb, kind: Kind::Latency },
            sizes: args.rnic.amount.sizes(2),
            amount: args.rnic.amount.amount(),
            queue_pairs: 1,
            tx_depth: 64,
            rx_depth: args.rx_depth,
            cq_mod: 1,
            post_list: 1,
            reads: args.outstanding_reads.unwrap_or(1).try_into().context("--outs is too large")?,
            bidirectional: false,
            verify: args.rnic.device.verify,
            shared_receive_queue: false,
            inline: args.rnic.device.inline.unwrap_or(DEFAULT_LATENCY_INLINE),
        }
        .checked()
    }

    /// Refuses what cannot be run; also what a stranger may have sent.
    fn checked(self) -> Result<Self> {
        ensure!(!self.sizes.is_empty() && self.sizes.len() <= 64, "no size, or too many");
        for &size in &self.sizes {
            ensure!((1..=MAX_SIZE).contains(&size), "a message has 1 to {MAX_SIZE} bytes, not {size}");
        }
        ensure!((1..=1024).contains(&self.queue_pairs), "1 to 1024 queue pairs, not {}", self.queue_pairs);
        for depth in [self.tx_depth, self.rx_depth] {
            ensure!((1..=16384).contains(&depth), "queues hold 1 to 16384 requests, not {depth}");
        }
        ensure!((1..=self.tx_depth).contains(&self.cq_mod), "--cq-mod must be 1 to the tx-depth");
        ensure!(
            self.reads > 0 || self.test.verb != Verb::Read,
            "an RDMA Read test needs --outs of at least 1"
        );
        ensure!((1..=256).contains(&self.post_list), "--post_list must be 1 to 256");
        ensure!(self.inline <= 4096, "at most 4096 bytes inline");
        Ok(self)
    }

    /// The largest message.
    pub fn largest(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(1)
    }

    /// For the other end.
    pub fn to_json(&self) -> Value {
        let (iterations, nanoseconds) = match self.amount {
            Amount::Iterations(n) => (n, 0),
            Amount::Duration(time) => (0, time.as_nanos() as u64),
        };
        json!({
            "test": self.test.name(), "sizes": self.sizes, "iterations": iterations, "nanoseconds": nanoseconds,
            "queue_pairs": self.queue_pairs, "tx_depth": self.tx_depth, "rx_depth": self.rx_depth,
            "cq_mod": self.cq_mod, "post_list": self.post_list, "reads": self.reads, "bidirectional": self.bidirectional, "verify": self.verify,
            "srq": self.shared_receive_queue, "inline": self.inline,
        })
    }

    /// What the client wants, at a server that was started for `test`.
    pub fn from_json(value: &Value, test: Test) -> Result<Self> {
        let name = value["test"].as_str().context("what the client sends is no plan")?;
        ensure!(name == test.name(), "the client runs {name}, this server {}", test.name());
        let number = |name: &str| value[name].as_u64().with_context(|| format!("the plan has no {name}"));
        let small = |name: &str| Ok::<_, anyhow::Error>(u32::try_from(number(name)?)?);
        let flag = |name: &str| value[name].as_bool().with_context(|| format!("the plan has no {name}"));
        let sizes = value["sizes"].as_array().context("the plan has no sizes")?;
        let nanoseconds = number("nanoseconds")?;
        Self {
            test,
            sizes: sizes.iter().filter_map(Value::as_u64).collect(),
            amount: match nanoseconds {
                0 => Amount::Iterations(number("iterations")?),
                _ => Amount::Duration(Duration::from_nanos(nanoseconds)),
            },
            queue_pairs: small("queue_pairs")?,
            tx_depth: small("tx_depth")?,
            rx_depth: small("rx_depth")?,
            cq_mod: small("cq_mod")?,
            post_list: small("post_list")?,
            reads: number("reads")?.try_into()?,
            bidirectional: flag("bidirectional")?,
            verify: flag("verify")?,
            shared_receive_queue: flag("srq")?,
            inline: small("inline")?,
        }
        .checked()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::options::{Cli, Command};

    fn plan(line: &str) -> Result<Plan> {
        let cli = Cli::try_parse_from(std::iter::once("xwarp-perf").chain(line.split_whitespace()))?;
        match cli.command {
            Command::SendBw(args) => Plan::bandwidth(Verb::Send, &args),
            Command::WriteBw(args) => Plan::bandwidth(Verb::Write, &args),
            Command::ReadBw(args) => Plan::bandwidth(Verb::Read, &args),
            Command::SendLat(args) => Plan::latency(Verb::Send, &args),
            _ => panic!("not in this test"),
        }
    }

    #[test]
    fn a_plan_survives_the_wire() {
        for line in [
            "send_bw -a -b --verify",
            "write_bw -D 2.5 -q 4 -Q 7",
            "send_lat -s 64 -n 5",
            "send_bw --use-srq -q 8",
        ] {
            let plan = plan(line).unwrap();
            let text = plan.to_json().to_string();
            let other = Plan::from_json(&serde_json::from_str(&text).unwrap(), plan.test).unwrap();
            assert_eq!(plan, other, "{line}");
            // It must fit a message of the control connection.
            assert!(text.len() < crate::rnic::control::MESSAGE_BYTES, "{} bytes", text.len());
        }
    }

    #[test]
    fn the_wrong_test_is_named() {
        let value = plan("send_bw").unwrap().to_json();
        let error = Plan::from_json(&value, Test { verb: Verb::Read, kind: Kind::Latency }).unwrap_err();
        assert_eq!(error.to_string(), "the client runs send_bw, this server read_lat");
    }

    #[test]
    fn what_cannot_be_run_is_refused() {
        assert!(plan("write_bw --use-srq").is_err());
        assert!(plan("send_bw -s 8G").is_err());
        assert!(plan("send_bw -s 0").is_err());
        assert!(plan("read_bw -o 0").is_err());
        let mut value = plan("send_bw").unwrap().to_json();
        value["queue_pairs"] = 1_000_000.into();
        assert!(Plan::from_json(&value, Test { verb: Verb::Send, kind: Kind::Bandwidth }).is_err());
    }
}
