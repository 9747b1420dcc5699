//! [`Receiver`]: the passive side of a bandwidth test. It receives, grants credits and verifies.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use smallvec::SmallVec;
use xwarp_verbs::{Opcode, Payload, PostError, RecvRequest, Sge, WorkCompletion, WorkRequest};

use super::{
    links::{Links, Role},
    plan::{Plan, Verb},
    rounds::{Rounds, Word},
    sender::receive_window,
};
use crate::pattern::Pattern;

/// Maximum number of completions in one poll.
const BATCH: usize = 64;
/// `wr_id` of the RDMA Writes that carry credits. As for rounds, no message has this ID.
const CREDIT_ID: u64 = u64::MAX;
/// Receives posted by one call without an allocation.
const LIST: usize = 16;

/// Messages of one queue pair.
#[derive(Debug, Clone, Default)]
pub struct Count {
    /// Messages received in this row.
    row: u64,
    /// Receives reposted after use, in all rows: the credit.
    reposted: u64,
    /// The last credit sent to the peer.
    told: u64,
    /// `wr_id` of used receives, collected until one call can repost them.
    used: SmallVec<[u64; LIST]>,
}

/// The passive side of one row.
#[derive(Debug)]
pub struct Receiver<'a> {
    links: &'a Links,
    plan: &'a Plan,
    /// Role of the sending end.
    from: Role,
    size: u64,
    counts: &'a mut [Count],
    total: u64,
    verified_bytes: u64,
    batch: Vec<WorkCompletion>,
    scratch: Vec<u8>,
}

impl<'a> Receiver<'a> {
    /// Creates a receiver for messages of `size` bytes from `from`.
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

    /// Posts the receives of a test whose messages consume receives. Each one is reposted after use, in all
    /// rows.
    pub fn post_receives(links: &Links, plan: &Plan) -> Result<()> {
        let window = receive_window(plan, links);
        for number in 0..links.list.len() as u32 {
            let ids: Vec<u64> = (0..window).map(|slot| u64::from(number) << 32 | slot).collect();
            for list in ids.chunks(plan.recv_post_list as usize) {
                post_receives(links, plan, number, list)?;
            }
        }
        Ok(())
    }

    /// Number of received messages.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Number of verified bytes.
    pub fn verified_bytes(&self) -> u64 {
        self.verified_bytes
    }

    /// Polls for completions; returns whether there were any.
    pub fn poll(&mut self, rounds: &mut Rounds) -> Result<bool> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        let found = self.links.recv_cq.poll(&mut batch, BATCH);
        for completion in &batch {
            let number = self.links.number(completion)?;
            match (self.plan.test.verb, completion.opcode) {
                (Verb::Send, Opcode::Recv) | (Verb::WriteImmediate, Opcode::RecvImmediate) => {
                    self.complete_receive(number, completion)?;
                }
                (Verb::Write, Opcode::Recv) => self.receive_word(number, completion.wr_id, rounds)?,
                (_, opcode) => bail!("a completion of {opcode:?} on the receive queue"),
            }
        }
        self.batch = batch;
        if found > 0 && self.plan.test.verb.takes_receives() {
            for number in 0..self.counts.len() as u32 {
                self.give_credit(number)?;
            }
        }
        Ok(found > 0)
    }

    /// Processes a message that completed a receive.
    fn complete_receive(&mut self, number: u32, completion: &WorkCompletion) -> Result<()> {
        let message = self.counts[number as usize].row;
        ensure!(
            u64::from(completion.byte_len) == self.size,
            "message {message} of queue pair {number} has {} bytes instead of {}",
            completion.byte_len,
            self.size
        );
        if let Some(data) = completion.immediate {
            let found = u64::from_le_bytes(data);
            ensure!(found == message, "message {message} of queue pair {number} is numbered {found}");
        }
        if self.plan.verify {
            // The receive chooses the place of a Send; the sender chooses the place of an RDMA Write.
            let at = match completion.immediate {
                None => place_of(self.links, completion.wr_id),
                Some(_) => self.links.layout.place(number, message),
            };
            self.check(number, message, at)?;
        }
        self.total += 1;
        // At most half of the window waits to be reposted, so that the sender can use the other half
        // meanwhile.
        let list = u64::from(self.plan.recv_post_list).min(receive_window(self.plan, self.links) / 2).max(1);
        let count = &mut self.counts[number as usize];
        count.row += 1;
        count.used.push(completion.wr_id);
        if count.used.len() as u64 >= list {
            post_receives(self.links, self.plan, number, &count.used)?;
            count.reposted += count.used.len() as u64;
            count.used.clear();
        }
        Ok(())
    }

    /// Processes the Send of a round in a test of RDMA Writes.
    fn receive_word(&mut self, number: u32, slot: u64, rounds: &mut Rounds) -> Result<()> {
        match Rounds::read(self.links, number, slot)? {
            Word::Written { first, count } => {
                ensure!(count <= u64::from(self.links.layout.slots), "a round of {count} messages");
                for message in first..first + count {
                    self.check(number, message, self.links.layout.place(number, message))?;
                }
                self.total += count;
                Rounds::send(self.links, number, Word::Checked)
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

    /// Reports the number of reposted receives to the sender after each third of the window, by an RDMA Write
    /// to a word of its memory, as perftest does on iWARP.
    fn give_credit(&mut self, number: u32) -> Result<()> {
        let Count { reposted: taken, told, .. } = self.counts[number as usize];
        let step = (receive_window(self.plan, self.links) / 3).max(1);
        if taken - told < step {
            return Ok(());
        }
        let bytes = (taken as u32).to_le_bytes();
        let request =
            WorkRequest::write(CREDIT_ID, Payload::Inline(&bytes), self.links.remote_credit(number));
        match self.links.list[number as usize].qp.post_send(&request) {
            Ok(()) => self.counts[number as usize].told = taken,
            // Our own messages fill the send queue: the next poll retries.
            Err(PostError::QueueFull(_)) => {}
            Err(error) => return Err(error).context("sending credits"),
        }
        Ok(())
    }
}

/// Offset in the sink of the buffer of receive `wr_id`.
fn place_of(links: &Links, wr_id: u64) -> usize {
    links.layout.place((wr_id >> 32) as u32, wr_id & 0xffff_ffff)
}

/// Posts receives on a queue pair or on the shared receive queue; a `wr_id` holds the queue pair and slot of
/// the buffer.
fn post_receives(links: &Links, plan: &Plan, number: u32, ids: &[u64]) -> Result<()> {
    let size = plan.largest() as usize;
    let pieces: SmallVec<[[Sge; 1]; LIST]> =
        ids.iter().map(|&id| [links.sink.sge(place_of(links, id), size)]).collect();
    let requests: SmallVec<[RecvRequest<'_>; LIST]> =
        ids.iter().zip(&pieces).map(|(&id, piece)| RecvRequest::new(id, piece)).collect();
    match &links.srq {
        Some(srq) => requests.iter().try_for_each(|request| srq.post_recv(request)),
        None => links.list[number as usize].qp.post_recv_list(&requests).map_err(|error| error.source),
    }
    .with_context(|| format!("posting receives for queue pair {number}"))
}
