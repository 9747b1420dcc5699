//! [`Plan`]: the parameters that both ends must agree on. The client's command line decides; the server
//! adopts the client's plan and checks only that the test is the one it was started for.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::limiter::RateLimit;
use crate::options::{Amount, AtomicType, BandwidthArgs, LatencyArgs};

/// The operation under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verb {
    /// A Send into the peer's next receive.
    Send,
    /// An RDMA Write into the server's memory.
    Write,
    /// An RDMA Write that also completes the peer's next receive.
    WriteImmediate,
    /// An RDMA Read from the server's memory.
    Read,
    /// An atomic operation on a word of the server's memory.
    Atomic(AtomicType),
}

impl Verb {
    /// Whether each message completes a receive of the peer's.
    pub fn takes_receives(self) -> bool {
        matches!(self, Self::Send | Self::WriteImmediate)
    }

    /// Whether data flows from the peer to us: the peer's program does nothing, and the limits IRD and ORD apply.
    pub fn fetches(self) -> bool {
        matches!(self, Self::Read | Self::Atomic(_))
    }
}

/// The quantity that a test measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Throughput, with many messages in flight.
    Bandwidth,
    /// Time per message, with one message in flight.
    Latency,
}

/// A test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Test {
    /// The operation.
    pub verb: Verb,
    /// The quantity.
    pub kind: Kind,
}

impl Test {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match (self.verb, self.kind) {
            (Verb::Send, Kind::Bandwidth) => "send_bw",
            (Verb::Send, Kind::Latency) => "send_lat",
            (Verb::Write | Verb::WriteImmediate, Kind::Bandwidth) => "write_bw",
            (Verb::Write | Verb::WriteImmediate, Kind::Latency) => "write_lat",
            (Verb::Read, Kind::Bandwidth) => "read_bw",
            (Verb::Read, Kind::Latency) => "read_lat",
            (Verb::Atomic(_), Kind::Bandwidth) => "atomic_bw",
            (Verb::Atomic(_), Kind::Latency) => "atomic_lat",
        }
    }
}

/// The parameters that both ends must know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The test.
    pub test: Test,
    /// Message size of each row of the table, in bytes.
    pub sizes: Vec<u64>,
    /// Length of a row.
    pub amount: Amount,
    /// Repeat the rows until the program is interrupted.
    pub infinite: bool,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Engines that share the queue pairs.
    pub engines: u16,
    /// Messages in flight on each queue pair.
    pub tx_depth: u32,
    /// Receives posted on each queue pair.
    pub rx_depth: u32,
    /// One of this many messages requests a completion.
    pub cq_mod: u32,
    /// Messages posted by one call.
    pub post_list: u32,
    /// Receives posted by one call.
    pub recv_post_list: u32,
    /// RDMA Reads and atomic operations in flight on each queue pair.
    pub reads: u16,
    /// Whether both ends send.
    pub bidirectional: bool,
    /// Whether the server sends and the client receives.
    pub reversed: bool,
    /// Whether every byte is verified.
    pub verify: bool,
    /// Whether all queue pairs receive from one shared queue.
    pub shared_receive_queue: bool,
    /// Largest message that is sent inline, in bytes.
    pub inline: u32,
    /// Rate that each sender must not exceed.
    pub rate_limit: Option<RateLimit>,
    /// Pause before each message of a latency test.
    pub latency_gap: Duration,
}

/// Default number of RDMA Reads in flight. Linux's software iWARP accepts at most 128, hardware fewer.
const DEFAULT_READS: u32 = 16;
/// Default inline limit of a latency test, in bytes; the same as in perftest for adapters that support inline
/// data.
const DEFAULT_LATENCY_INLINE: u32 = 64;
/// Longest message (RFC 5041 section 5.2).
const MAX_SIZE: u64 = u32::MAX as u64;
/// Size of the word of an atomic operation, in bytes.
pub const ATOMIC_BYTES: u64 = 8;

/// Applies `--write_with_imm` to `verb`; an error unless it is an RDMA Write.
fn with_immediate(verb: Verb, immediate: bool) -> Result<Verb> {
    ensure!(!immediate || verb == Verb::Write, "--write_with_imm is an option of write_bw and write_lat");
    Ok(if immediate { Verb::WriteImmediate } else { verb })
}

/// The message sizes of a test; an atomic operation has only one size.
fn sizes(verb: Verb, args: &crate::options::AmountArgs, default: u64) -> Result<Vec<u64>> {
    if !matches!(verb, Verb::Atomic(_)) {
        return Ok(args.sizes(default));
    }
    ensure!(
        !args.all && args.size.is_none_or(|size| size == ATOMIC_BYTES),
        "an atomic operation works on a word of {ATOMIC_BYTES} bytes: no other size (-s, -a) is possible"
    );
    Ok(vec![ATOMIC_BYTES])
}

impl Plan {
    /// Creates the plan of a bandwidth test from its command line.
    pub fn bandwidth(verb: Verb, args: &BandwidthArgs) -> Result<Self> {
        let verb = with_immediate(verb, args.write_with_imm)?;
        let reads = args.outstanding_reads.unwrap_or(DEFAULT_READS.min(args.tx_depth));
        Self {
            test: Test { verb, kind: Kind::Bandwidth },
            sizes: sizes(verb, &args.rnic.amount, 65536)?,
            amount: args.rnic.amount.amount(),
            infinite: args.run_infinitely,
            queue_pairs: args.queue_pairs,
            engines: args.engines,
            tx_depth: args.tx_depth,
            rx_depth: args.rx_depth,
            cq_mod: args.cq_mod.min(args.tx_depth),
            post_list: args.post_list,
            recv_post_list: args.recv_post_list,
            reads: reads.try_into().context("--outs is too large")?,
            bidirectional: args.bidirectional,
            reversed: args.reversed,
            verify: args.rnic.device.verify,
            shared_receive_queue: args.shared_receive_queue,
            inline: args.rnic.device.inline.unwrap_or(0),
            rate_limit: RateLimit::of(&args.pacing, args.tx_depth),
            latency_gap: Duration::ZERO,
        }
        .checked()
    }

    /// Creates the plan of a latency test from its command line.
    pub fn latency(verb: Verb, args: &LatencyArgs) -> Result<Self> {
        let verb = with_immediate(verb, args.write_with_imm)?;
        Self {
            test: Test { verb, kind: Kind::Latency },
            sizes: sizes(verb, &args.rnic.amount, 2)?,
            amount: args.rnic.amount.amount(),
            infinite: false,
            queue_pairs: 1,
            engines: 1,
            tx_depth: 64,
            rx_depth: args.rx_depth,
            cq_mod: 1,
            post_list: 1,
            recv_post_list: 1,
            reads: args.outstanding_reads.unwrap_or(1).try_into().context("--outs is too large")?,
            bidirectional: false,
            reversed: false,
            verify: args.rnic.device.verify,
            shared_receive_queue: false,
            inline: args.rnic.device.inline.unwrap_or(DEFAULT_LATENCY_INLINE),
            rate_limit: None,
            latency_gap: Duration::from_micros(args.latency_gap.into()),
        }
        .checked()
    }

    /// Rejects a plan that cannot be run. The plan may come from an untrusted peer.
    fn checked(self) -> Result<Self> {
        let verb = self.test.verb;
        ensure!(!self.sizes.is_empty() && self.sizes.len() <= 64, "a test needs 1 to 64 message sizes");
        for &size in &self.sizes {
            ensure!((1..=MAX_SIZE).contains(&size), "a message must have 1 to {MAX_SIZE} bytes, not {size}");
            let fits = !matches!(verb, Verb::Atomic(_)) || size == ATOMIC_BYTES;
            ensure!(fits, "an atomic operation cannot have {size} bytes");
        }
        ensure!(
            verb.takes_receives() || !self.shared_receive_queue,
            "--use-srq needs an operation that takes receives: Send, or RDMA Write with Immediate Data"
        );
        ensure!(
            (1..=1024).contains(&self.queue_pairs),
            "the number of queue pairs must be 1 to 1024, not {}",
            self.queue_pairs
        );
        ensure!(
            self.engines > 0 && self.queue_pairs.is_multiple_of(self.engines.into()),
            "{} queue pairs cannot be shared equally by {} engines: see -q and --engines",
            self.queue_pairs,
            self.engines
        );
        for depth in [self.tx_depth, self.rx_depth] {
            ensure!((1..=16384).contains(&depth), "a queue depth must be 1 to 16384, not {depth}");
        }
        ensure!((1..=self.tx_depth).contains(&self.cq_mod), "--cq-mod must be 1 to the tx-depth");
        ensure!(self.reads > 0 || !verb.fetches(), "{} requires --outs of at least 1", self.test.name());
        ensure!((1..=256).contains(&self.post_list), "--post_list must be 1 to 256");
        ensure!((1..=256).contains(&self.recv_post_list), "--recv_post_list must be 1 to 256");
        ensure!(!(self.bidirectional && self.reversed), "--reversed and -b exclude each other");
        if let Amount::Duration(time) = self.amount {
            ensure!(!time.is_zero() && time <= Duration::from_secs(86_400), "a row cannot last {time:?}");
        }
        ensure!(!self.infinite || matches!(self.amount, Amount::Duration(_)), "--run_infinitely requires -D");
        ensure!(self.inline <= 4096, "--inline_size must be at most 4096");
        self.rate_limit.map_or(Ok(()), |limit| limit.check(&self.sizes))?;
        ensure!(self.latency_gap <= Duration::from_secs(1), "--latency_gap must be at most a second");
        Ok(self)
    }

    /// The part of one engine.
    #[must_use]
    pub fn part(&self) -> Self {
        Self { queue_pairs: self.queue_pairs / u32::from(self.engines), engines: 1, ..self.clone() }
    }

    /// Size of the largest message, in bytes.
    pub fn largest(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(1)
    }

    /// Perftest's name of the test, as in the heading of its output.
    pub fn title(&self) -> String {
        let mut words = match self.test.verb {
            Verb::Send => "Send".to_owned(),
            Verb::Write => "RDMA_Write".to_owned(),
            Verb::WriteImmediate => "RDMA_Write_imm".to_owned(),
            Verb::Read => "RDMA_Read".to_owned(),
            Verb::Atomic(operation) => format!("Atomic {}", operation.name()),
        };
        match self.test.kind {
            Kind::Bandwidth => {
                if self.bidirectional {
                    words.push_str(" Bidirectional");
                }
                if self.post_list > 1 {
                    words.push_str(" Post List");
                }
                words.push_str(" BW");
            }
            Kind::Latency => words.push_str(" Latency"),
        }
        words + " Test"
    }

    /// Reads the client's plan at a server that was started for the test `own` with `engines` engines.
    pub fn from_client(value: &Value, own: Test, engines: u16) -> Result<Self> {
        let plan = Self::deserialize(value).context("the client's plan cannot be read")?;
        let (theirs, ours) = (plan.test.name(), own.name());
        ensure!(theirs == ours, "the client runs {theirs}, this server {ours}");
        let theirs = plan.engines;
        ensure!(theirs == engines, "the client has {theirs} engines, this server {engines}: see --engines");
        plan.checked()
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
            Command::AtomicBw(args) => {
                Plan::bandwidth(Verb::Atomic(args.atomic.atomic_type), &args.bandwidth)
            }
            Command::SendLat(args) => Plan::latency(Verb::Send, &args),
            Command::WriteLat(args) => Plan::latency(Verb::Write, &args),
            Command::AtomicLat(args) => Plan::latency(Verb::Atomic(args.atomic.atomic_type), &args.latency),
            _ => panic!("not in this test"),
        }
    }

    #[test]
    fn a_plan_survives_the_wire() {
        for line in [
            "send_bw -a -b --verify",
            "write_bw -D 2.5 -q 4 -Q 7",
            "write_bw --write_with_imm --recv_post_list 8 -D 1 --run_infinitely",
            "atomic_bw -A CMP_AND_SWAP --reversed",
            "send_lat -s 64 -n 5 --latency_gap 100",
            "send_bw --use-srq -q 8 --engines 2",
            "write_bw --rate_limit 0.3 --rate_units g --burst_size 4",
        ] {
            let plan = plan(line).unwrap();
            let text = serde_json::to_string(&plan).unwrap();
            let other =
                Plan::from_client(&serde_json::from_str(&text).unwrap(), plan.test, plan.engines).unwrap();
            assert_eq!(plan, other, "{line}");
            // It must fit a message of the control connection.
            assert!(text.len() + 64 < crate::rnic::control::MESSAGE_BYTES, "{} bytes", text.len());
        }
    }

    #[test]
    fn the_wrong_test_is_named() {
        let value = serde_json::to_value(plan("send_bw").unwrap()).unwrap();
        let error = Plan::from_client(&value, Test { verb: Verb::Read, kind: Kind::Latency }, 1).unwrap_err();
        assert_eq!(error.to_string(), "the client runs send_bw, this server read_lat");
        let test = Test { verb: Verb::Send, kind: Kind::Bandwidth };
        assert!(
            Plan::from_client(&value, test, 2).unwrap_err().to_string().contains("1 engines, this server 2")
        );
    }

    #[test]
    fn titles_are_those_of_perftest() {
        for (line, title) in [
            ("send_bw", "Send BW Test"),
            ("write_bw -b -l 4", "RDMA_Write Bidirectional Post List BW Test"),
            ("write_bw --write_with_imm", "RDMA_Write_imm BW Test"),
            ("atomic_bw", "Atomic FETCH_AND_ADD BW Test"),
            ("atomic_lat -A CMP_AND_SWAP", "Atomic CMP_AND_SWAP Latency Test"),
        ] {
            assert_eq!(plan(line).unwrap().title(), title, "{line}");
        }
    }

    #[test]
    fn a_plan_that_cannot_be_run_is_rejected() {
        for line in [
            "write_bw --use-srq",
            "send_bw -s 8G",
            "send_bw -s 0",
            "read_bw -o 0",
            "atomic_bw -s 16",
            "atomic_bw -o 0",
            "send_bw --write_with_imm",
            "send_bw -b --reversed",
            "send_bw --rate_limit 1 --rate_units p",
            "send_bw -e --rate_limit 100",
            "send_bw --burst_size 4",
            "send_bw -q 3 --engines 2",
            "send_bw --engines 2",
        ] {
            assert!(plan(line).is_err(), "{line}");
        }
        assert!(plan("write_bw --use-srq --write_with_imm").is_ok());
        let test = Test { verb: Verb::Send, kind: Kind::Bandwidth };
        let mut value = serde_json::to_value(plan("send_bw").unwrap()).unwrap();
        value["queue_pairs"] = 1_000_000.into();
        assert!(Plan::from_client(&value, test, 1).is_err());
        assert!(Plan::from_client(&Value::Null, test, 1).is_err());
    }
}
