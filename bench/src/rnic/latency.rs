//! The rows of a latency test: one message there, and (but for RDMA Reads) one back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::json;
use xwarp_verbs::{Payload, RecvRequest, WorkCompletion, WorkRequest};

use super::{
    control::Control,
    endpoint::{Endpoint, Idle},
    links::{Links, Role},
    plan::{Plan, Verb},
};
use crate::{
    options::Amount,
    pattern::Pattern,
    progress::Progress,
    report::{LatencyRow, RateRow, Row},
    stats::Summary,
};

/// One message in so many asks for a completion of its sending.
const SIGNAL_EVERY: u64 = 16;
/// Empty polls of the answering end between two looks for the end of the test.
const POLLS_PER_LOOK: u32 = 256;
/// How long the rest of a written message may come behind its last byte: RDMA Writes are placed in any order.
const STRAGGLER: Duration = Duration::from_secs(1);

/// A latency test on a connection that stands.
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

/// What one wait of the answering end brought.
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
        if plan.test.verb == Verb::Send {
            for slot in 0..u64::from(plan.rx_depth) {
                latency.post_receive(slot)?;
            }
        }
        Ok(latency)
    }

    /// Bytes that this end compared, each as it should be.
    pub fn verified_bytes(&self) -> u64 {
        self.verified_bytes
    }

    fn post_receive(&self, slot: u64) -> Result<()> {
        let place = [self.links.sink.sge(self.links.layout.place(0, slot), self.plan.largest() as usize)];
        self.links.list[0].qp.post_recv(&RecvRequest::new(slot, &place)).context("posting a receive")
    }

    /// Runs one row; every sample in microseconds comes back beside what they amount to.
    pub fn row(&mut self, control: &mut Control, size: u64) -> Result<Option<(Row, Vec<f64>)>> {
        self.scratch = vec![0; size as usize];
        self.prepare(size)?;
        control.exchange(self.endpoint, &json!({ "ready": size }))?;
        let result = match self.role {
            Role::Client => {
                let row = match self.plan.amount {
                    Amount::Iterations(n) => self.ask(size, n)?,
                    Amount::Duration(time) => (self.ask_for(size, time)?, Vec::new()),
                };
                control.send(self.endpoint, &json!({ "done": true }))?;
                control.receive(self.endpoint)?;
                Some(row)
            }
            Role::Server => {
                if self.plan.test.verb == Verb::Read {
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
            Verb::Send => {}
            // The byte that is polled: 0 is not the number of the first message.
            Verb::Write => sink.memory().fill(self.links.layout.place(0, 0), size as usize, 0)?,
            Verb::Read => {
                let mut bytes = vec![0; size as usize];
                Pattern::new(self.role.number(), 0, 0).fill(0, &mut bytes);
                sink.write(self.links.layout.place(0, 0), &bytes)?;
            }
        }
        Ok(())
    }

    fn ask(&mut self, size: u64, iterations: u64) -> Result<(Row, Vec<f64>)> {
        let mut samples = Vec::with_capacity(iterations as usize);
        let mut progress = Progress::new(iterations, size, false);
        for message in 0..iterations {
            self.fill(size, message)?;
            let start = Instant::now();
            self.exchange(size, message)?;
            let now = Instant::now();
            samples.push((now - start).as_nanos() as f64 / self.per_sample());
            progress.at(now, message + 1, message + 1);
            self.check(size, message)?;
        }
        let summary = Summary::of(&samples).context("no message was measured")?;
        Ok((Row::Latency(LatencyRow { bytes: size, iterations, summary }), samples))
    }

    fn ask_for(&mut self, size: u64, time: Duration) -> Result<Row> {
        let mut progress = Progress::new(time.as_millis() as u64, size, false);
        let begin = Instant::now();
        let mut iterations = 0;
        let elapsed = loop {
            self.fill(size, iterations)?;
            self.exchange(size, iterations)?;
            self.check(size, iterations)?;
            iterations += 1;
            let elapsed = begin.elapsed();
            progress.at(begin + elapsed, elapsed.as_millis() as u64, iterations);
            if elapsed >= time {
                break elapsed;
            }
        };
        let average = elapsed.as_nanos() as f64 / self.per_sample() / iterations as f64;
        let transactions = iterations as f64 / elapsed.as_secs_f64();
        Ok(Row::Rate(RateRow { bytes: size, iterations, average, transactions }))
    }

    /// Nanoseconds of a round trip by this are the sample: half of it, in microseconds; a Read is one way.
    fn per_sample(&self) -> f64 {
        if self.plan.test.verb == Verb::Read { 1000.0 } else { 2000.0 }
    }

    fn exchange(&mut self, size: u64, message: u64) -> Result<()> {
        self.post(size, message)?;
        match self.wait(size, message, None)? {
            Heard::Message => Ok(()),
            Heard::End => bail!("the server ended the test"),
        }
    }

    /// The server's part of Send and Write: each message is answered, until the client says that it is done.
    fn answer(&mut self, control: &mut Control, size: u64) -> Result<()> {
        for message in 0.. {
            if let Heard::End = self.wait(size, message, Some(control))? {
                break;
            }
            self.check(size, message)?;
            self.fill(size, message)?;
            self.post(size, message)?;
        }
        Ok(())
    }

    /// Puts the message's bytes into its place.
    fn fill(&mut self, size: u64, message: u64) -> Result<()> {
        let place = self.links.layout.place(0, message);
        match (self.plan.test.verb, self.plan.verify) {
            // Stale bytes would look like the server's, which never change.
            (Verb::Read, true) => self.links.source.memory().fill(place, size as usize, 0)?,
            (Verb::Send | Verb::Write, true) => {
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
        let links = self.links;
        let place = links.layout.place(0, message);
        let piece = links.source.sge(place, size as usize);
        let id = message + 1;
        let mut inline = [0; 4096];
        let payload = if size <= u64::from(self.plan.inline) && self.plan.test.verb != Verb::Read {
            let bytes = &mut inline[..size as usize];
            links.source.read(place, bytes)?;
            Payload::Inline(bytes)
        } else {
            Payload::Gather(std::slice::from_ref(&piece))
        };
        let request = match self.plan.test.verb {
            Verb::Send => WorkRequest::send(id, payload),
            Verb::Write => WorkRequest::write(id, payload, links.remote(0, 0)),
            Verb::Read => WorkRequest::read(id, &piece, links.remote(0, 0)),
        };
        self.posted += 1;
        let ask = self.plan.test.verb == Verb::Read || self.posted.is_multiple_of(SIGNAL_EVERY);
        let request = if ask { request.signaled() } else { request };
        links.list[0].qp.post_send(&request).context("posting a message")
    }

    /// Waits for what follows a message: the answer, or the data read. With the control connection, its
    /// message ends the wait too.
    fn wait(&mut self, size: u64, message: u64, mut control: Option<&mut Control>) -> Result<Heard> {
        let queues = match self.plan.test.verb {
            Verb::Send => vec![&self.links.recv_cq],
            Verb::Write | Verb::Read => vec![&self.links.send_cq],
        };
        let control_cq = control.as_ref().map(|control| control.cq().clone());
        let all: Vec<_> = queues.into_iter().chain(&control_cq).collect();
        let mut idle = Idle::new(self.endpoint, &all);
        let mut looks = 0_u32;
        while !self.has_come(size, message)? {
            looks += 1;
            if let Some(control) = &mut control
                && (looks.is_multiple_of(POLLS_PER_LOOK) || self.endpoint.channel.is_some())
                && control.try_receive()?.is_some()
            {
                return Ok(Heard::End);
            }
            idle.wait("latency test")?;
        }
        Ok(Heard::Message)
    }

    /// Whether the message is here. Runs the engine when it is not.
    fn has_come(&mut self, size: u64, message: u64) -> Result<bool> {
        match self.plan.test.verb {
            Verb::Send => {
                let Some(completion) = self.links.recv_cq.poll_one() else {
                    return self.reap().map(|()| false);
                };
                self.links.number(&completion)?;
                ensure!(u64::from(completion.byte_len) == size, "a message of {} bytes", completion.byte_len);
                if self.plan.verify {
                    self.links.sink.read(self.links.layout.place(0, completion.wr_id), &mut self.scratch)?;
                }
                self.post_receive(completion.wr_id)?;
                Ok(true)
            }
            Verb::Write => {
                let last = self.links.layout.place(0, 0) + size as usize - 1;
                if self.links.sink.memory().load_u8(last)? == number_byte(message) {
                    return Ok(true);
                }
                self.reap()?;
                Ok(false)
            }
            Verb::Read => {
                let Some(completion) = self.links.send_cq.poll_one() else { return Ok(false) };
                self.links.number(&completion)?;
                Ok(true)
            }
        }
    }

    /// Takes the completions of what was sent, and notices failures.
    fn reap(&mut self) -> Result<()> {
        self.batch.clear();
        self.links.send_cq.poll(&mut self.batch, 64);
        for completion in &self.batch {
            self.links.number(completion)?;
        }
        Ok(())
    }

    /// Compares what came with what the other end sent.
    fn check(&mut self, size: u64, message: u64) -> Result<()> {
        if !self.plan.verify {
            return Ok(());
        }
        let from = self.role.peer().number();
        let found = match self.plan.test.verb {
            // Copied before the receive was posted again.
            Verb::Send => Pattern::new(from, 0, message).verify(0, &self.scratch),
            Verb::Write => self.check_written(size, Pattern::new(from, 0, message))?,
            Verb::Read => {
                self.links.source.read(self.links.layout.place(0, message), &mut self.scratch)?;
                Pattern::new(from, 0, 0).verify(0, &self.scratch)
            }
        };
        self.verified_bytes += size;
        found.map_err(|mismatch| anyhow!("message {message}: {mismatch}"))
    }

    /// All but the last byte, which is the message's number.
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

/// The last byte of written message `message`: 1, 2, ... and never 0 before the first.
fn number_byte(message: u64) -> u8 {
    (message + 1) as u8
}
