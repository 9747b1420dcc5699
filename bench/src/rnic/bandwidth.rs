//! The rows of a bandwidth test. Both ends run each row together, synchronized by the control connection.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    control::Control,
    endpoint::{Endpoint, Idle},
    links::{Links, Role},
    plan::{Plan, Verb},
    receiver::{Count, Receiver},
    rounds::Rounds,
    sender::{Sender, Sent},
};
use crate::{
    cpu,
    pattern::Pattern,
    report::{BandwidthRow, CpuUse},
};

/// Empty polls between two polls of the control connection.
const POLLS_PER_LOOK: u32 = 32;

/// A bandwidth test on established connections.
#[derive(Debug)]
pub struct Bandwidth<'a> {
    endpoint: &'a Endpoint,
    links: &'a Links,
    plan: &'a Plan,
    role: Role,
    /// Messages sent in earlier rows, on each queue pair.
    sent: Vec<u64>,
    /// Messages received, on each queue pair.
    counts: Vec<Count>,
    /// Atomic operations of the peer in all rows, over all queue pairs.
    executed: u64,
    verified_bytes: u64,
}

/// The measurements that an end reports after a row.
#[derive(Debug, Clone, Copy, Default)]
struct Told {
    sent: Sent,
    /// Of the whole process.
    cpu: Duration,
}

/// The measurements of both ends in a row of one engine.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    mine: Told,
    theirs: Told,
}

impl<'a> Bandwidth<'a> {
    /// Posts the receives, and prepares the state that all rows use.
    pub fn new(endpoint: &'a Endpoint, links: &'a Links, plan: &'a Plan, role: Role) -> Result<Self> {
        match plan.test.verb {
            Verb::Send | Verb::WriteImmediate => Receiver::post_receives(links, plan)?,
            Verb::Write if plan.verify => Rounds::post_receives(links)?,
            Verb::Write | Verb::Read | Verb::Atomic(_) => {}
        }
        let count = links.list.len();
        let counts = vec![Count::default(); count];
        Ok(Self { endpoint, links, plan, role, sent: vec![0; count], counts, executed: 0, verified_bytes: 0 })
    }

    /// Whether this end sends.
    fn is_active(&self) -> bool {
        self.plan.bidirectional || (self.role == Role::Client) != self.plan.reversed
    }

    /// Whether this end receives.
    fn is_passive(&self) -> bool {
        self.plan.bidirectional || (self.role == Role::Server) != self.plan.reversed
    }

    /// Bytes that this end verified.
    pub fn verified_bytes(&self) -> u64 {
        self.verified_bytes
    }

    /// Runs one row and returns the measurements of both ends.
    pub fn row(&mut self, control: &mut Control, size: u64) -> Result<Measured> {
        if self.plan.verify && self.plan.test.verb == Verb::Read {
            self.fill_sink(size)?;
        }
        control.exchange(self.endpoint, &json!({ "ready": size }))?;
        let before = cpu::process_time();
        let sent = self.run(control, size)?;
        let mine = Told { sent, cpu: cpu::process_time().saturating_sub(before) };
        let theirs = Told::from_json(&control.exchange(self.endpoint, &mine.to_json())?)?;
        Ok(Measured { mine, theirs })
    }

    /// Fills each place that the peer will read with a constant pattern.
    fn fill_sink(&self, size: u64) -> Result<()> {
        let mut bytes = vec![0; size as usize];
        for number in 0..self.plan.queue_pairs {
            for slot in 0..u64::from(self.links.layout.slots) {
                Pattern::new(self.role.number(), number, slot).fill(0, &mut bytes);
                self.links.sink.write(self.links.layout.place(number, slot), &bytes)?;
            }
        }
        Ok(())
    }

    /// Sends, receives, or both, until both ends have received all messages.
    fn run(&mut self, control: &mut Control, size: u64) -> Result<Sent> {
        let plan = self.plan;
        let quiet = self.role == Role::Server;
        let verified_writes = plan.verify && plan.test.verb == Verb::Write;
        let mut rounds = if verified_writes { Rounds::begin(self.links) } else { Rounds::none() };
        let (active, passive) = (self.is_active(), self.is_passive());
        let mut sender = active.then(|| Sender::new(self.links, plan, self.role, size, &self.sent, quiet));
        let mut receiver = Receiver::new(self.links, plan, self.role.peer(), size, &mut self.counts);
        let takes_receives = plan.test.verb.takes_receives() || verified_writes;
        let control_cq = control.cq().clone();
        let queues = [&self.links.send_cq, &self.links.recv_cq, &control_cq];
        let mut idle = Idle::new(self.endpoint, &queues);
        // Number of messages that the peer sent; known when the peer has reported it.
        let mut announced = if passive { None } else { Some(0) };
        let mut told = false;
        let mut looks = 0_u32;
        loop {
            let mut moved = match &mut sender {
                Some(sender) => sender.poll(&mut rounds)?,
                None => false,
            };
            if takes_receives {
                moved |= receiver.poll(&mut rounds)?;
            }
            let sent = sender.as_ref().map_or(Some(Sent::default()), Sender::done);
            if let (Some(sent), false, true) = (sent, told, active) {
                control.send(self.endpoint, &json!({ "done": sent.messages }))?;
                told = true;
            }
            looks += 1;
            let look = !moved
                && (looks.is_multiple_of(POLLS_PER_LOOK)
                    || self.endpoint.channel.is_some()
                    || sender.is_none());
            if look && announced.is_some() {
                control.check()?;
            } else if look && let Some(message) = control.try_receive()? {
                announced = Some(message["done"].as_u64().context("unexpected message from the other end")?);
                moved = true;
            }
            if let (Some(sent), Some(announced)) = (sent, announced)
                && (!takes_receives || receiver.total() >= announced)
            {
                self.verified_bytes += receiver.verified_bytes();
                if let Some(sender) = sender {
                    self.sent = sender.sent_ever();
                }
                self.verify_row(size, sent.messages, announced)?;
                return Ok(sent);
            }
            if moved {
                idle.over();
            } else {
                idle.wait("bandwidth test")?;
            }
        }
    }

    /// Counts the bytes that the sender verified, and verifies the words of the peer's atomic operations.
    fn verify_row(&mut self, size: u64, sent: u64, announced: u64) -> Result<()> {
        if !self.plan.verify || !self.plan.test.verb.fetches() {
            return Ok(());
        }
        self.verified_bytes += sent * size;
        if let Verb::Atomic(_) = self.plan.test.verb {
            self.executed += announced;
            let (layout, memory) = (self.links.layout, self.links.sink.memory());
            let word = |number| Ok::<_, anyhow::Error>(memory.load_u64(layout.place(number, 0))?);
            let found = (0..self.plan.queue_pairs).map(word).sum::<Result<u64>>()?;
            ensure!(
                found == self.executed,
                "the words count {found} atomic operations, the peer {}",
                self.executed
            );
        }
        Ok(())
    }
}

/// The figures of both ends of all engines together, as one row.
pub fn sum_up(size: u64, engines: &[Measured]) -> BandwidthRow {
    let told = || engines.iter().flat_map(|row| [row.mine, row.theirs]);
    let rate = |told: Told| {
        let seconds = told.sent.elapsed.as_secs_f64();
        if seconds > 0.0 { told.sent.messages as f64 / seconds } else { 0.0 }
    };
    let peaks = told().filter_map(|told| told.sent.peak).reduce(|a, b| a + b);
    let messages = told().map(|told| told.sent.messages).sum();
    let elapsed = told().map(|told| told.sent.elapsed).max().unwrap_or_default().as_secs_f64();
    let bytes = messages as f64 * size as f64;
    // Each engine reports the time of its whole process.
    let cpu = |end: fn(&Measured) -> Told| {
        engines.iter().map(|row| end(row).cpu).max().unwrap_or_default().as_secs_f64()
    };
    let (local, remote) = (cpu(|row| row.mine), cpu(|row| row.theirs));
    BandwidthRow {
        bytes: size,
        iterations: messages,
        peak: peaks.map(|peak| peak * size as f64),
        average: told().map(rate).sum::<f64>() * size as f64,
        cpu: Some(CpuUse::of(local, Some(remote), bytes, elapsed)),
    }
}

impl Told {
    fn to_json(self) -> Value {
        json!({
            "messages": self.sent.messages, "nanoseconds": self.sent.elapsed.as_nanos() as u64,
            "peak": self.sent.peak, "cpu": self.cpu.as_nanos() as u64,
        })
    }

    fn from_json(value: &Value) -> Result<Self> {
        let number = |name: &str| {
            value[name].as_u64().with_context(|| format!("the other end's report has no {name}"))
        };
        Ok(Self {
            sent: Sent {
                messages: number("messages")?,
                elapsed: Duration::from_nanos(number("nanoseconds")?),
                peak: value["peak"].as_f64(),
            },
            cpu: Duration::from_nanos(number("cpu")?),
        })
    }
}
