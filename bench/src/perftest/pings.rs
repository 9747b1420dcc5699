//! [`Pings`]: the rows of perftest's latency tests. In `send_lat` a Send answers a Send. In `write_lat` the
//! *server* writes first, and each end polls the last byte of its buffer for the number of the round. In
//! `read_lat` the peer's program takes no part.

use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use xwarp_verbs::WorkRequest;

use super::ends::Ends;
use crate::{
    options::Amount,
    rnic::{
        Plan, Verb,
        endpoint::{Endpoint, Idle},
        links::Role,
    },
};

/// A latency test on established connections.
#[derive(Debug)]
pub struct Pings<'a> {
    endpoint: &'a Endpoint,
    ends: &'a Ends,
    plan: &'a Plan,
    role: Role,
    iterations: u64,
    receives: u64,
    /// Sends and writes that have completed, and those posted.
    completed: u64,
    posted: u64,
}

impl<'a> Pings<'a> {
    /// Creates the test for the end with role `role`.
    pub fn new(endpoint: &'a Endpoint, ends: &'a Ends, plan: &'a Plan, role: Role) -> Result<Self> {
        let Amount::Iterations(iterations) = plan.amount else {
            anyhow::bail!("with perftest a row is a number of messages (-n), not a time");
        };
        Ok(Self { endpoint, ends, plan, role, iterations, receives: 0, completed: 0, posted: 0 })
    }

    /// Posts the receives of a row of Sends, then synchronizes with the other end.
    pub fn prepare(&mut self, size: u64) -> Result<()> {
        self.receives = 0;
        if self.plan.test.verb == Verb::Send {
            while self.receives < u64::from(self.plan.rx_depth).min(self.iterations) {
                self.post_receive(size)?;
            }
        }
        Ok(())
    }

    fn post_receive(&mut self, size: u64) -> Result<()> {
        self.receives += 1;
        self.ends.post_receive(0, size)
    }

    /// Runs a row. Returns one sample for each message, in microseconds: half of a round trip, or all of it
    /// for Reads.
    pub fn run(&mut self, size: u64) -> Result<Vec<f64>> {
        let mut samples = Vec::with_capacity(self.iterations as usize);
        // In write_lat the server sends first.
        let speaks_first = (self.plan.test.verb == Verb::Write) == (self.role == Role::Server);
        let trips = if self.plan.test.verb == Verb::Read { 1.0 } else { 2.0 };
        let mut last = Instant::now();
        for round in 1..=self.iterations {
            match (self.plan.test.verb, speaks_first) {
                (Verb::Read, _) => self.speak(round, size)?,
                (_, true) => {
                    self.speak(round, size)?;
                    self.await_message(round, size)?;
                }
                (_, false) => {
                    self.await_message(round, size)?;
                    self.speak(round, size)?;
                }
            }
            let now = Instant::now();
            samples.push((now - last).as_nanos() as f64 / 1000.0 / trips);
            last = now;
        }
        self.drain(0)?;
        Ok(samples)
    }

    fn speak(&mut self, round: u64, size: u64) -> Result<()> {
        let end = &self.ends.list[0];
        let piece = self.ends.source.sge(0, size as usize);
        let target = self.ends.sink.sge(0, size as usize);
        let request = match self.plan.test.verb {
            Verb::Send => WorkRequest::send(round, piece),
            Verb::Write => {
                self.ends.source.write(size as usize - 1, &[round as u8])?;
                WorkRequest::write(round, piece, end.remote)
            }
            Verb::Read => WorkRequest::read(round, target, end.remote),
            Verb::WriteImmediate | Verb::Atomic(_) => bail!("not offered with --perftest"),
        };
        end.qp.post_send(&request.signaled()).context("posting a message")?;
        self.posted += 1;
        // The memory of a posted Write is read when it is sent, so wait for it before the next round changes
        // its byte.
        let in_flight = if self.plan.test.verb == Verb::Send { 32 } else { 0 };
        self.drain(in_flight)
    }

    /// Waits until at most `most` messages are in flight.
    fn drain(&mut self, most: u64) -> Result<()> {
        let queues = [&self.ends.send_cq];
        let mut idle = Idle::new(self.endpoint, &queues);
        while self.posted - self.completed > most {
            let Some(completion) = self.ends.send_cq.poll_one() else {
                idle.wait("the completion of a message")?;
                continue;
            };
            self.ends.number(&completion)?;
            self.completed += 1;
        }
        Ok(())
    }

    fn await_message(&mut self, round: u64, size: u64) -> Result<()> {
        let queues = [&self.ends.recv_cq];
        let mut idle = Idle::new(self.endpoint, &queues);
        if self.plan.test.verb == Verb::Write {
            let last = size as usize - 1;
            while self.ends.sink.memory().load_u8(last)? != round as u8 {
                self.endpoint.device.progress();
                idle.wait("the byte of the next round")?;
            }
            return Ok(());
        }
        let completion = loop {
            match self.ends.recv_cq.poll_one() {
                Some(completion) => break completion,
                None => idle.wait("a message")?,
            }
        };
        self.ends.number(&completion)?;
        if self.receives < self.iterations {
            self.post_receive(size)?;
        }
        Ok(())
    }
}
