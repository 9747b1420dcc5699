//! [`Streams`]: the rows of perftest's bandwidth tests. The client is active; with `-b` both ends are. A
//! receiver of Sends writes its count of received messages to the sender's memory after each third of its
//! receive depth; a sender never exceeds that count by more than the depth.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use xwarp_verbs::{Opcode, Payload, WorkCompletion, WorkRequest};

use super::ends::{Ends, has_credits};
use crate::{
    options::Amount,
    rnic::{
        Plan, Verb,
        endpoint::{Endpoint, Idle},
        links::Role,
    },
};

/// Maximum number of completions in one poll.
const BATCH: usize = 64;

/// Progress of a queue pair in this row, in messages.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    posted: u64,
    completed: u64,
    receives: u64,
    received: u64,
    /// The credit to write when the send queue has room.
    due: Option<u32>,
    /// Credit writes in flight.
    telling: u32,
}

/// The result of a row at this end.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    /// Number of messages over all queue pairs: sent by a sender, received by a receiver.
    pub messages: u64,
    /// Time from the first post, or the first received message, to the last completion.
    pub elapsed: Duration,
}

/// A bandwidth test on established connections.
#[derive(Debug)]
pub struct Streams<'a> {
    endpoint: &'a Endpoint,
    ends: &'a Ends,
    plan: &'a Plan,
    sends: bool,
    receives: bool,
    iterations: u64,
    rx_depth: u64,
    paces: Vec<Pace>,
    batch: Vec<WorkCompletion>,
}

impl<'a> Streams<'a> {
    /// Creates the test for the end with role `role`.
    pub fn new(endpoint: &'a Endpoint, ends: &'a Ends, plan: &'a Plan, role: Role) -> Result<Self> {
        let Amount::Iterations(iterations) = plan.amount else {
            anyhow::bail!("with perftest a row is a number of messages (-n), not a time");
        };
        // Same limit as in perftest, which also rounds an odd depth to an even one unless all sizes are run.
        let mut rx_depth = u64::from(plan.rx_depth).min(iterations);
        if plan.sizes.len() == 1 {
            rx_depth = rx_depth.next_multiple_of(2);
        }
        Ok(Self {
            endpoint,
            ends,
            plan,
            sends: plan.bidirectional || role == Role::Client,
            receives: plan.test.verb == Verb::Send && (plan.bidirectional || role == Role::Server),
            iterations,
            rx_depth,
            paces: Vec::new(),
            batch: Vec::with_capacity(BATCH),
        })
    }

    /// Prepares a row, then synchronizes with the other end.
    pub fn prepare(&mut self, size: u64) -> Result<()> {
        self.paces = vec![Pace::default(); self.ends.list.len()];
        self.ends.forget_credits()?;
        if self.receives {
            for number in 0..self.paces.len() {
                while self.paces[number].receives < self.rx_depth.min(self.iterations) {
                    self.post_receive(number, size)?;
                }
            }
        }
        Ok(())
    }

    fn post_receive(&mut self, number: usize, size: u64) -> Result<()> {
        self.paces[number].receives += 1;
        self.ends.post_receive(number, size)
    }

    /// Runs a row.
    pub fn run(&mut self, size: u64) -> Result<Moved> {
        let queues = [&self.ends.send_cq, &self.ends.recv_cq];
        let mut idle = Idle::new(self.endpoint, &queues);
        let mut start = self.sends.then(Instant::now);
        while !self.is_finished() {
            let mut moved = self.reap()?;
            if self.poll_receives(size)? {
                start.get_or_insert_with(Instant::now);
                moved = true;
            }
            for number in 0..self.paces.len() {
                moved |= self.send_credit(number)?;
                if self.sends {
                    moved |= self.post(number, size)?;
                }
            }
            if moved { idle.over() } else { idle.wait("messages")? }
        }
        Ok(Moved {
            messages: self.iterations * self.paces.len() as u64,
            elapsed: start.map_or(Duration::ZERO, |start| start.elapsed()),
        })
    }

    fn is_finished(&self) -> bool {
        self.paces.iter().all(|pace| {
            (!self.sends || pace.completed == self.iterations)
                && (!self.receives || pace.received == self.iterations)
                && pace.due.is_none()
                && pace.telling == 0
        })
    }

    /// Polls the send completion queue. The work request ID of a message is the number of messages up to and
    /// including it.
    fn reap(&mut self) -> Result<bool> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        let found = self.ends.send_cq.poll(&mut batch, BATCH);
        for completion in &batch {
            let pace = &mut self.paces[self.ends.number(completion)?];
            if self.plan.test.verb == Verb::Send && completion.opcode == Opcode::RdmaWrite {
                pace.telling -= 1;
            } else {
                pace.completed = completion.wr_id;
            }
        }
        self.batch = batch;
        Ok(found > 0)
    }

    /// Polls the receive completion queue.
    fn poll_receives(&mut self, size: u64) -> Result<bool> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        let found = self.ends.recv_cq.poll(&mut batch, BATCH);
        for completion in &batch {
            let number = self.ends.number(completion)?;
            let pace = &mut self.paces[number];
            pace.received += 1;
            let third = (self.rx_depth / 3).max(1);
            if has_credits(self.plan) && (pace.received % self.rx_depth).is_multiple_of(third) {
                pace.due = Some(pace.received as u32);
            }
            if pace.receives < self.iterations {
                self.post_receive(number, size)?;
            }
        }
        self.batch = batch;
        Ok(found > 0)
    }

    /// Writes our receive count to the sender's memory.
    fn send_credit(&mut self, number: usize) -> Result<bool> {
        let (pace, end) = (&mut self.paces[number], &self.ends.list[number]);
        let in_flight = pace.posted - pace.completed + u64::from(pace.telling);
        let Some(credit) = pace.due.take_if(|_| in_flight < u64::from(self.plan.tx_depth)) else {
            return Ok(false);
        };
        let credit = credit.to_le_bytes();
        let request = WorkRequest::write(0, Payload::Inline(&credit), end.remote).signaled();
        end.qp.post_send(&request).context("sending credits")?;
        pace.telling += 1;
        Ok(true)
    }

    fn post(&mut self, number: usize, size: u64) -> Result<bool> {
        let (tx_depth, end) = (u64::from(self.plan.tx_depth), &self.ends.list[number]);
        let every = u64::from(self.plan.cq_mod).min((tx_depth / 4).max(1));
        let credit = self.ends.credit(number)?;
        let pace = &mut self.paces[number];
        let before = pace.posted;
        let piece = self.ends.source.sge(0, size as usize);
        let target = self.ends.sink.sge(0, size as usize);
        while pace.posted < self.iterations
            && pace.posted - pace.completed + u64::from(pace.telling) < tx_depth
            && (!has_credits(self.plan)
                || u64::from((pace.posted as u32).wrapping_sub(credit)) < self.rx_depth)
        {
            let id = pace.posted + 1;
            let mut request = match self.plan.test.verb {
                Verb::Send => WorkRequest::send(id, piece),
                Verb::Write => WorkRequest::write(id, piece, end.remote),
                Verb::Read => WorkRequest::read(id, target, end.remote),
                Verb::WriteImmediate | Verb::Atomic(_) => bail!("not offered with --perftest"),
            };
            if id.is_multiple_of(every) || id == self.iterations {
                request = request.signaled();
            }
            end.qp.post_send(&request).context("posting a message")?;
            pace.posted = id;
        }
        Ok(pace.posted > before)
    }
}
