//! [`Receiver`]: the passive side of a bandwidth test: receives, gives credits, checks.

use anyhow::{Context as _, Result, anyhow, ensure};
use xwarp_verbs::{Opcode, Payload, PostError, RecvRequest, WorkCompletion, WorkRequest};

use super::{
    links::{Links, Role},
    plan::{Plan, Verb},
    rounds::{Rounds, Word},
    sender::receive_window,
};
use crate::pattern::Pattern;

/// Completions taken by one poll.
const BATCH: usize = 64;
/// `wr_id` of the RDMA Writes that give credits; as that of rounds, no message has it.
const CREDIT_ID: u64 = u64::MAX;

/// Messages of one queue pair.
#[derive(Debug, Clone, Copy, Default)]
pub struct Count {
    /// Taken in this row.
    row: u64,
    /// Taken ever: credits count on through all rows.
    ever: u64,
    /// The peer was told of so many.
    told: u64,
}

/// The passive side of one row.
#[derive(Debug)]
pub struct Receiver<'a> {
    links: &'a Links,
    plan: &'a Plan,
    /// Who made the bytes.
    from: Role,
    size: u64,
    counts: &'a mut [Count],
    total: u64,
    verified_bytes: u64,
    batch: Vec<WorkCompletion>,
    scratch: Vec<u8>,
}

impl<'a> Receiver<'a> {
    /// Ready for messages of `size` bytes that `from` sends.
    pub fn new(links: &'a Links, plan: &'a Plan, from: Role, size: u64, counts: &'a mut [Count]) -> Self {
        for count in &mut *counts {
            count.row = 0;
        }
        Self {
            links,
            plan,
            from,
            size,
            counts,
            total: 0,
            verified_bytes: 0,
            batch: Vec::with_capacity(BATCH),
            scratch: if plan.verify { vec![0; size as usize] } else { Vec::new() },
        }
    }

    /// Posts the receives of a test with Sends; each is posted again when it was used, in all rows.
    pub fn post_receives(links: &Links, plan: &Plan) -> Result<()> {
        let window = receive_window(plan, links);
        for number in 0..links.list.len() as u32 {
            for slot in 0..window {
                post_receive(links, plan, number, slot)?;
            }
        }
        Ok(())
    }

    /// Messages received.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that were compared, each as it should be.
    pub fn verified_bytes(&self) -> u64 {
        self.verified_bytes
    }

    /// Takes what arrived; whether anything did.
    pub fn poll(&mut self, rounds: &mut Rounds) -> Result<bool> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        let found = self.links.recv_cq.poll(&mut batch, BATCH);
        for completion in &batch {
            let number = self.links.number(completion)?;
            ensure!(completion.opcode == Opcode::Recv, "a {:?} on the receive queue", completion.opcode);
            match self.plan.test.verb {
                Verb::Send => self.take(number, completion)?,
                Verb::Write | Verb::Read => self.hear(number, completion.wr_id, rounds)?,
            }
        }
        self.batch = batch;
        if found > 0 && self.plan.test.verb == Verb::Send {
            for number in 0..self.counts.len() as u32 {
                self.give_credit(number)?;
            }
        }
        Ok(found > 0)
    }

    /// One message of a Send test.
    fn take(&mut self, number: u32, completion: &WorkCompletion) -> Result<()> {
        let message = self.counts[number as usize].row;
        let (part, slot) = ((completion.wr_id >> 32) as u32, completion.wr_id & 0xffff_ffff);
        ensure!(
            u64::from(completion.byte_len) == self.size,
            "message {message} of queue pair {number} has {} bytes and not {}",
            completion.byte_len,
            self.size
        );
        if self.plan.verify {
            self.check(number, message, self.links.layout.place(part, slot))?;
        }
        post_receive(self.links, self.plan, part, slot)?;
        let count = &mut self.counts[number as usize];
        count.row += 1;
        count.ever += 1;
        self.total += 1;
        Ok(())
    }

    /// A round's word of a test with RDMA Writes.
    fn hear(&mut self, number: u32, slot: u64, rounds: &mut Rounds) -> Result<()> {
        match Rounds::read(self.links, number, slot)? {
            Word::Written { first, count } => {
                ensure!(count <= u64::from(self.links.layout.slots), "a round of {count} messages");
                for message in first..first + count {
                    self.check(number, message, self.links.layout.place(number, message))?;
                }
                self.total += count;
                Rounds::say(self.links, number, Word::Checked)
            }
            Word::Checked => {
                rounds.checked(number);
                Ok(())
            }
        }
    }

    fn check(&mut self, number: u32, message: u64, at: usize) -> Result<()> {
        self.links.sink.read(at, &mut self.scratch)?;
        self.verified_bytes += self.size;
        Pattern::new(self.from.number(), number, message)
            .verify(0, &self.scratch)
            .map_err(|mismatch| anyhow!("message {message} of queue pair {number}: {mismatch}"))
    }

    /// Tells the sender how many of its messages were taken, by RDMA Write to a word of its, as perftest does
    /// it on iWARP: not after each, but in time before it runs out.
    fn give_credit(&mut self, number: u32) -> Result<()> {
        let Count { ever: taken, told, .. } = self.counts[number as usize];
        let step = (receive_window(self.plan, self.links) / 3).max(1);
        if taken - told < step {
            return Ok(());
        }
        let bytes = (taken as u32).to_le_bytes();
        let request =
            WorkRequest::write(CREDIT_ID, Payload::Inline(&bytes), self.links.remote_credit(number));
        match self.links.list[number as usize].qp.post_send(&request) {
            Ok(()) => self.counts[number as usize].told = taken,
            // Our own messages fill the queue: later.
            Err(PostError::QueueFull(_)) => {}
            Err(error) => return Err(error).context("giving credit"),
        }
        Ok(())
    }
}

/// Posts the receive for a place; where it lies comes back with its completion.
fn post_receive(links: &Links, plan: &Plan, number: u32, slot: u64) -> Result<()> {
    let place = [links.sink.sge(links.layout.place(number, slot), plan.largest() as usize)];
    let id = u64::from(number) << 32 | slot;
    let request = RecvRequest::new(id, &place);
    match &links.srq {
        Some(srq) => srq.post_recv(&request),
        None => links.list[number as usize].qp.post_recv(&request),
    }
    .with_context(|| format!("posting a receive for queue pair {number}"))
}
