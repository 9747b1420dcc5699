//! The rows of a latency test: one message to the server and one back. RDMA Reads and atomic operations are
//! round trips by themselves.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::json;
use xwarp_verbs::{Payload, RecvRequest, WorkCompletion, WorkRequest};

use super::{
    control::Control,
    endpoint::{Endpoint, Idle},
    links::{Links, Role},
    plan::{Plan, Verb},
    sender::atomic,
};
use crate::{
    options::Amount,
    pattern::Pattern,
    progress::Progress,
    report::{DurationRow, LatencyRow, Row},
    stats::{Latencies, Summary},
};

/// One of this many messages requests a completion.
const SIGNAL_EVERY: u64 = 16;
/// Number of empty polls between two polls of the control connection.
const POLLS_PER_LOOK: u32 = 256;
/// Time allowed for the rest of a written message after its last byte: the segments of an RDMA Write are
/// placed in any order.
const STRAGGLER: Duration = Duration::from_secs(1);

/// A latency test on an established connection.
#[derive(Debug)]
pub struct Latency<'a> {
    endpoint: &'a Endpoint,
    links: &'a Links,
    plan: &'a Plan,
    role: Role,
    posted: u64,
    verified_bytes: u64,
    scratch: Vec<u8>,
    batch: Vec<WorkCompletion>,
}

/// The event that ended a wait.
enum Heard {
    Message,
    End,
}

impl<'a> Latency<'a> {
    /// Posts the receives.
    pub fn new(endpoint: &'a Endpoint, links: &'a Links, plan: &'a Plan, role: Role) -> Result<Self> {
        ensure!(
            plan.test.verb != Verb::Write || endpoint.channel.is_none(),
            "write_lat polls memory, so it cannot sleep (-e)"
        );
        let latency = Self {
            endpoint,
            links,
            plan,
            role,
            posted: 0,
            verified_bytes: 0,
            scratch: Vec::new(),
            batch: Vec::with_capacity(64),
        };
        if plan.test.verb.takes_receives() {
            for slot in 0..u64::from(plan.rx_depth) {
                latency.post_receive(slot)?;
            }
        }
        Ok(latency)
    }

    /// Number of bytes that this end verified.
    pub fn verified_bytes(&self) -> u64 {
        self.verified_bytes
    }

    fn post_receive(&self, slot: u64) -> Result<()> {
        let place = [self.links.sink.sge(self.links.layout.place(0, slot), self.plan.largest() as usize)];
        self.links.list[0].qp.post_recv(&RecvRequest::new(slot, &place)).context("posting a receive")
    }

    /// Runs one row. Returns it with every sample in microseconds; a timed row has no samples.
    pub fn row(&mut self, control: &mut Control, size: u64) -> Result<Option<(Row, Vec<f64>)>> {
        self.scratch = vec![0; size as usize];
        self.prepare(size)?;
        control.exchange(self.endpoint, &json!({ "ready": size }))?;
        let result = match self.role {
            Role::Client => {
                let row = match self.plan.amount {
                    Amount::Iterations(n) => self.ask(control, size, n)?,
                    Amount::Duration(time) => (self.ask_for(control, size, time)?, Vec::new()),
                };
                control.send(self.endpoint, &json!({ "done": true }))?;
                control.receive(self.endpoint)?;
                Some(row)
            }
            Role::Server => {
                if self.plan.test.verb.fetches() {
                    control.receive(self.endpoint)?;
                } else {
                    self.answer(control, size)?;
                }
                control.send(self.endpoint, &json!({ "done": true }))?;
                None
            }
        };
        Ok(result)
    }

    fn prepare(&self, size: u64) -> Result<()> {
        let sink = &self.links.sink;
        match self.plan.test.verb {
            Verb::Send | Verb::WriteImmediate | Verb::Atomic(_) => {}
            // Reset the polled byte; no first message has the number 0.
            Verb::Write => sink.memory().fill(self.links.layout.place(0, 0), size as usize, 0)?,
            Verb::Read => {
                let mut bytes = vec![0; size as usize];
                Pattern::new(self.role.number(), 0, 0).fill(0, &mut bytes);
                sink.write(self.links.layout.place(0, 0), &bytes)?;
            }
        }
        Ok(())
    }

    fn ask(&mut self, control: &mut Control, size: u64, iterations: u64) -> Result<(Row, Vec<f64>)> {
        let mut samples = Vec::with_capacity(iterations as usize);
        let mut progress = Progress::new(iterations, size, false);
        for message in 0..iterations {
            self.fill(size, message)?;
            self.pause()?;
            let start = Instant::now();
            self.exchange(control, size, message)?;
            let now = Instant::now();
            samples.push((now - start).as_nanos() as f64 / 1000.0 / self.trips());
            progress.at(now, message + 1, message + 1);
            self.check(size, message)?;
        }
        let summary = Summary::of(&samples).context("no message was measured")?;
        Ok((Row::Latency(LatencyRow { bytes: size, iterations, summary }), samples))
    }

    fn ask_for(&mut self, control: &mut Control, size: u64, time: Duration) -> Result<Row> {
        let mut progress = Progress::new(time.as_millis() as u64, size, false);
        let mut latencies = Latencies::new()?;
        let begin = Instant::now();
        let mut iterations = 0;
        let elapsed = loop {
            self.fill(size, iterations)?;
            self.pause()?;
            let start = Instant::now();
            self.exchange(control, size, iterations)?;
            let now = Instant::now();
            latencies.record(now - start);
            self.check(size, iterations)?;
            iterations += 1;
            let elapsed = now - begin;
            progress.at(now, elapsed.as_millis() as u64, iterations);
            if elapsed >= time {
                break elapsed;
            }
        };
        let summary = latencies.summary(self.trips()).context("no message was measured")?;
        let transactions = iterations as f64 / elapsed.as_secs_f64();
        Ok(Row::Duration(DurationRow {
            latency: LatencyRow { bytes: size, iterations, summary },
            transactions,
        }))
    }

    /// Waits before a message, and lets the engine run meanwhile.
    fn pause(&mut self) -> Result<()> {
        if self.plan.latency_gap.is_zero() {
            return Ok(());
        }
        let end = Instant::now() + self.plan.latency_gap;
        while Instant::now() < end {
            self.reap()?;
        }
        Ok(())
    }

    /// Messages in a round trip, by which its time is divided: two when the server replies, otherwise one.
    fn trips(&self) -> f64 {
        if self.plan.test.verb.fetches() { 1.0 } else { 2.0 }
    }

    fn exchange(&mut self, control: &mut Control, size: u64, message: u64) -> Result<()> {
        self.post(size, message)?;
        match self.wait(control, size, message)? {
            Heard::Message => Ok(()),
            Heard::End => bail!("the server ended the test"),
        }
    }

    /// Replies to each message until the client reports the end: the server's part of Sends and Writes.
    fn answer(&mut self, control: &mut Control, size: u64) -> Result<()> {
        for message in 0.. {
            if let Heard::End = self.wait(control, size, message)? {
                break;
            }
            self.check(size, message)?;
            self.fill(size, message)?;
            self.post(size, message)?;
        }
        Ok(())
    }

    /// Writes the message's pattern to its place.
    fn fill(&mut self, size: u64, message: u64) -> Result<()> {
        let place = self.links.layout.place(0, message);
        match (self.plan.test.verb, self.plan.verify) {
            // The server's bytes never change, so bytes of an earlier message would match.
            (Verb::Read | Verb::Atomic(_), true) => {
                self.links.source.memory().fill(place, size as usize, 0)?;
            }
            (Verb::Send | Verb::Write | Verb::WriteImmediate, true) => {
                Pattern::new(self.role.number(), 0, message).fill(0, &mut self.scratch);
                self.links.source.write(place, &self.scratch)?;
            }
            (_, false) => {}
        }
        if self.plan.test.verb == Verb::Write {
            self.links.source.memory().store_u8(place + size as usize - 1, number_byte(message))?;
        }
        Ok(())
    }

    fn post(&mut self, size: u64, message: u64) -> Result<()> {
        self.posted += 1;
        let signaled = self.posted.is_multiple_of(SIGNAL_EVERY);
        if signaled && self.plan.test.verb.takes_receives() {
            // The wait for a message polls only the receives. The last signaled message has completed long ago.
            self.reap()?;
        }
        let ask = self.plan.test.verb.fetches() || signaled;
        let links = self.links;
        let place = links.layout.place(0, message);
        let piece = links.source.sge(place, size as usize);
        let id = message + 1;
        let payload = if size <= u64::from(self.plan.inline) && !self.plan.test.verb.fetches() {
            links.source.read(place, &mut self.scratch)?;
            Payload::Inline(&self.scratch)
        } else {
            Payload::Piece(piece)
        };
        let request = match self.plan.test.verb {
            Verb::Send => WorkRequest::send(id, payload),
            Verb::Write => WorkRequest::write(id, payload, links.remote(0, 0)),
            Verb::WriteImmediate => {
                WorkRequest::write_with_immediate(id, payload, links.remote(0, 0), message.to_le_bytes())
            }
            Verb::Read => WorkRequest::read(id, piece, links.remote(0, 0)),
            Verb::Atomic(operation) => atomic(operation, id, piece, links.remote(0, 0), message),
        };
        let request = if ask { request.signaled() } else { request };
        links.list[0].qp.post_send(&request).context("posting a message")
    }

    /// Waits for the reply to a message or the data of a read. On the server, a message on the control
    /// connection also ends the wait.
    fn wait(&mut self, control: &mut Control, size: u64, message: u64) -> Result<Heard> {
        let messages = match self.plan.test.verb {
            Verb::Send | Verb::WriteImmediate => &self.links.recv_cq,
            Verb::Write | Verb::Read | Verb::Atomic(_) => &self.links.send_cq,
        };
        let control_cq = control.cq().clone();
        let queues = [messages, &control_cq];
        let mut idle = Idle::new(self.endpoint, &queues);
        let mut looks = 0_u32;
        while !self.has_come(size, message)? {
            looks += 1;
            let look = looks.is_multiple_of(POLLS_PER_LOOK) || self.endpoint.channel.is_some();
            if look && self.role == Role::Server {
                if control.try_receive()?.is_some() {
                    return Ok(Heard::End);
                }
            } else if look {
                control.check()?;
            }
            idle.wait("latency test")?;
        }
        Ok(Heard::Message)
    }

    /// Whether the message has arrived. Drives the engine if it has not.
    fn has_come(&mut self, size: u64, message: u64) -> Result<bool> {
        match self.plan.test.verb {
            Verb::Send | Verb::WriteImmediate => {
                let Some(completion) = self.links.recv_cq.poll_one() else { return Ok(false) };
                self.links.number(&completion)?;
                ensure!(
                    u64::from(completion.byte_len) == size,
                    "received a message of {} bytes",
                    completion.byte_len
                );
                if self.plan.verify && self.plan.test.verb == Verb::Send {
                    self.links.sink.read(self.links.layout.place(0, completion.wr_id), &mut self.scratch)?;
                }
                self.post_receive(completion.wr_id)?;
                Ok(true)
            }
            Verb::Write => {
                let last = self.links.layout.place(0, 0) + size as usize - 1;
                let (sink, number) = (&self.links.sink, number_byte(message));
                if sink.memory().load_u8(last)? == number {
                    return Ok(true);
                }
                self.reap()?;
                // The engine may have placed it just now.
                Ok(sink.memory().load_u8(last)? == number)
            }
            Verb::Read | Verb::Atomic(_) => {
                let Some(completion) = self.links.send_cq.poll_one() else { return Ok(false) };
                self.links.number(&completion)?;
                Ok(true)
            }
        }
    }

    /// Processes the completions of sent messages; fails if one is not a success.
    fn reap(&mut self) -> Result<()> {
        self.batch.clear();
        self.links.send_cq.poll(&mut self.batch, 64);
        for completion in &self.batch {
            self.links.number(completion)?;
        }
        Ok(())
    }

    /// Verifies the received message.
    fn check(&mut self, size: u64, message: u64) -> Result<()> {
        if !self.plan.verify {
            return Ok(());
        }
        let from = self.role.peer().number();
        let found = match self.plan.test.verb {
            // The message was copied before the receive was reposted.
            Verb::Send => Pattern::new(from, 0, message).verify(0, &self.scratch),
            Verb::Write => self.check_written(size, Pattern::new(from, 0, message))?,
            Verb::Read => {
                self.links.source.read(self.links.layout.place(0, message), &mut self.scratch)?;
                Pattern::new(from, 0, 0).verify(0, &self.scratch)
            }
            // The word was placed before the Immediate Data was delivered (RFC 7306 section 6).
            Verb::WriteImmediate => {
                self.links.sink.read(self.links.layout.place(0, 0), &mut self.scratch)?;
                Pattern::new(from, 0, message).verify(0, &self.scratch)
            }
            Verb::Atomic(_) => return self.check_atomic(size, message),
        };
        self.verified_bytes += size;
        found.map_err(|mismatch| anyhow!("message {message}: {mismatch}"))
    }

    /// Verifies the word returned by an atomic operation: each operation increments it by one.
    fn check_atomic(&mut self, size: u64, message: u64) -> Result<()> {
        let at = self.links.layout.place(0, message);
        let (found, expected) = (self.links.source.memory().load_u64(at)?, message);
        ensure!(found == expected, "atomic {message} found {found} instead of {expected}");
        self.verified_bytes += size;
        Ok(())
    }

    /// Verifies all bytes but the last one, which is the message's number.
    fn check_written(&mut self, size: u64, pattern: Pattern) -> Result<Result<(), crate::pattern::Mismatch>> {
        let until = Instant::now() + STRAGGLER;
        loop {
            self.links.sink.read(self.links.layout.place(0, 0), &mut self.scratch)?;
            let found = pattern.verify(0, &self.scratch[..size as usize - 1]);
            if found.is_ok() || Instant::now() >= until {
                return Ok(found);
            }
            self.reap()?;
        }
    }
}

/// The last byte of written message `message`: 1, 2, and so on. Memory is 0 before the first.
fn number_byte(message: u64) -> u8 {
    (message + 1) as u8
}
