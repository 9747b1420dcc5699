//! [`Sender`]: the active side of a bandwidth test: keeps every queue pair's send queue full.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use smallvec::SmallVec;
use xwarp_verbs::{Payload, PostError, Sge, WorkCompletion, WorkRequest};

use super::{
    links::{Links, Role},
    plan::{Plan, Verb},
    rounds::Rounds,
};
use crate::{options::Amount, pattern::Pattern, progress::Progress, stats::Completions};

/// Marks for the peak rate; further completions do not count for it.
const MARKS: usize = 1 << 16;
/// Completions taken by one poll.
const BATCH: usize = 64;

/// Requests posted by one call without an allocation.
const LIST: usize = 16;

type Pieces = SmallVec<[Sge; LIST]>;

/// How far a queue pair is, in messages.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    posted: u64,
    completed: u64,
    /// Posted up to the last one that asks for a completion.
    signaled: u64,
}

/// What sending brought.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sent {
    /// Messages, over all queue pairs.
    pub messages: u64,
    /// From the first post to the last completion.
    pub elapsed: Duration,
    /// The best window, in messages a second.
    pub peak: Option<f64>,
}

/// The active side of one row.
#[derive(Debug)]
pub struct Sender<'a> {
    links: &'a Links,
    plan: &'a Plan,
    role: Role,
    size: u64,
    paces: Vec<Pace>,
    /// Messages of the rows before, on each queue pair: credits count on through all rows.
    before: &'a [u64],
    /// Messages in flight on each queue pair, at most.
    depth: u64,
    /// One message in so many asks for a completion.
    signal_every: u64,
    /// Messages of one queue pair: a number, or no end until the time is over.
    target: Option<u64>,
    start: Instant,
    until: Option<Duration>,
    time_over: bool,
    completed: u64,
    completions: Completions,
    progress: Progress,
    done: Option<Duration>,
    batch: Vec<WorkCompletion>,
    scratch: Vec<u8>,
}

impl<'a> Sender<'a> {
    /// Ready to send messages of `size` bytes. Time counts from here.
    pub fn new(
        links: &'a Links,
        plan: &'a Plan,
        role: Role,
        size: u64,
        before: &'a [u64],
        quiet: bool,
    ) -> Self {
        let slots = u64::from(links.layout.slots);
        let depth = if plan.verify { u64::from(plan.tx_depth).min(slots) } else { u64::from(plan.tx_depth) };
        let (target, until, total) = match plan.amount {
            Amount::Iterations(n) => (Some(n), None, n * u64::from(plan.queue_pairs)),
            Amount::Duration(time) => (None, Some(time), time.as_millis() as u64),
        };
        let mut completions = Completions::with_capacity(MARKS);
        completions.mark(0, 0);
        Self {
            links,
            plan,
            role,
            size,
            paces: vec![Pace::default(); links.list.len()],
            before,
            depth,
            // Four completions to a full queue at least: a queue that drains before it is told starves the wire.
            signal_every: u64::from(plan.cq_mod).min((depth / 4).max(1)),
            target,
            start: Instant::now(),
            until,
            time_over: false,
            completed: 0,
            completions,
            progress: Progress::new(total, size, quiet),
            done: None,
            batch: Vec::with_capacity(BATCH),
            scratch: if plan.verify { vec![0; size as usize] } else { Vec::new() },
        }
    }

    /// What was sent, once everything is complete.
    pub fn done(&self) -> Option<Sent> {
        let elapsed = self.done?;
        // As many as can be in flight, and so complete at the same time.
        let window = self.completed.min(u64::from(self.plan.tx_depth) * u64::from(self.plan.queue_pairs));
        Some(Sent { messages: self.completed, elapsed, peak: self.completions.peak(window) })
    }

    /// Messages on each queue pair, those of the rows before included.
    pub fn sent_ever(&self) -> Vec<u64> {
        self.before.iter().zip(&self.paces).map(|(before, pace)| before + pace.posted).collect()
    }

    /// Takes completions and posts what there is room for; whether anything happened.
    pub fn poll(&mut self, rounds: &mut Rounds) -> Result<bool> {
        if self.done.is_some() {
            return Ok(false);
        }
        let mut moved = self.reap()?;
        if self.until.is_some_and(|until| self.start.elapsed() >= until) {
            self.time_over = true;
        }
        let mut finished = true;
        for number in 0..self.paces.len() as u32 {
            moved |= self.post(number, rounds)?;
            finished &= self.is_finished(number) && rounds.is_settled(number);
        }
        if finished {
            self.done = Some(self.start.elapsed());
        }
        Ok(moved)
    }

    fn is_finished(&self, number: u32) -> bool {
        let pace = self.paces[number as usize];
        let enough = self.target.map_or(self.time_over && pace.posted > 0, |target| pace.posted == target);
        enough && pace.completed == pace.posted
    }

    fn reap(&mut self) -> Result<bool> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        let found = self.links.send_cq.poll(&mut batch, BATCH);
        for completion in &batch {
            let number = self.links.number(completion)?;
            if Rounds::is_own(completion.wr_id) {
                continue;
            }
            let upto = completion.wr_id;
            let pace = &mut self.paces[number as usize];
            let first = std::mem::replace(&mut pace.completed, upto);
            ensure!(
                first < upto && upto <= pace.posted,
                "completion {upto} after {first} on queue pair {number}"
            );
            self.completed += upto - first;
            if self.plan.verify && self.plan.test.verb == Verb::Read {
                for message in first..upto {
                    self.check_read(number, message)?;
                }
            }
        }
        self.batch = batch;
        if found > 0 {
            let now = Instant::now();
            let elapsed = now - self.start;
            self.completions.mark(self.completed, elapsed.as_nanos() as u64);
            let done = if self.until.is_some() { elapsed.as_millis() as u64 } else { self.completed };
            self.progress.at(now, done, self.completed);
        }
        Ok(found > 0)
    }

    /// How many more messages this queue pair may post now.
    fn room(&self, number: u32, rounds: &Rounds) -> Result<u64> {
        let pace = self.paces[number as usize];
        let mut room = self.depth - (pace.posted - pace.completed);
        if self.plan.test.verb == Verb::Send {
            let credit = self.links.source.memory().load_u32(self.links.layout.words(number))?;
            let window = receive_window(self.plan, self.links);
            // The counter is 32 bits wide and wraps; the difference does not.
            let posted = self.before[number as usize] + pace.posted;
            let ahead = (posted as u32).wrapping_sub(u32::from_le(credit));
            room = room.min(window.saturating_sub(u64::from(ahead)));
        }
        if let Some(target) = self.target {
            room = room.min(target - pace.posted);
        } else if self.time_over {
            // Only the one message that brings the last completions, if they were not asked for.
            room = room.min(u64::from(pace.signaled < pace.posted || pace.posted == 0));
        }
        Ok(room.min(rounds.room(number)))
    }

    fn post(&mut self, number: u32, rounds: &mut Rounds) -> Result<bool> {
        let mut moved = false;
        loop {
            let room = self.room(number, rounds)?.min(u64::from(self.plan.post_list));
            if room == 0 {
                return Ok(moved | rounds.close_if_full(self.links, number, self.is_flushing(number))?);
            }
            moved = true;
            self.post_some(number, room)?;
            rounds.wrote(number, room);
        }
    }

    /// Whether the last message has been posted.
    fn is_flushing(&self, number: u32) -> bool {
        let pace = self.paces[number as usize];
        self.target.map_or(self.time_over, |target| pace.posted == target)
    }

    fn post_some(&mut self, number: u32, count: u64) -> Result<()> {
        let first = self.paces[number as usize].posted;
        let pieces: Pieces =
            (first..first + count).map(|message| self.piece(number, message)).collect::<Result<_>>()?;
        // What is sent inline is copied from here as it is posted.
        let inline = self.size <= u64::from(self.plan.inline) && self.plan.test.verb != Verb::Read;
        let mut text = Vec::new();
        if inline {
            for message in first..first + count {
                text.push(
                    self.links.source.to_vec(self.links.layout.place(number, message), self.size as usize)?,
                );
            }
        }
        let mut requests: SmallVec<[WorkRequest<'_>; LIST]> = SmallVec::new();
        for (at, message) in (first..first + count).enumerate() {
            let payload = match text.get(at) {
                Some(bytes) => Payload::Inline(bytes),
                None => Payload::Gather(std::slice::from_ref(&pieces[at])),
            };
            let id = message + 1;
            let remote = self.links.remote(number, self.remote_message(message));
            let mut request = match self.plan.test.verb {
                Verb::Send => WorkRequest::send(id, payload),
                Verb::Write => WorkRequest::write(id, payload, remote),
                Verb::Read => WorkRequest::read(id, &pieces[at], remote),
            };
            if id.is_multiple_of(self.signal_every) || Some(id) == self.target || self.time_over {
                request = request.signaled();
                self.paces[number as usize].signaled = id;
            }
            requests.push(request);
        }
        let qp = &self.links.list[number as usize].qp;
        match qp.post_send_list(&requests) {
            Ok(()) => self.paces[number as usize].posted += count,
            Err((_, PostError::QueueFull(_))) => {
                bail!("queue pair {number} takes fewer requests than it was made for")
            }
            Err((_, error)) => return Err(error).with_context(|| format!("posting on queue pair {number}")),
        }
        Ok(())
    }

    /// The local piece of a message; filled, when its bytes are to be checked at the peer.
    fn piece(&mut self, number: u32, message: u64) -> Result<Sge> {
        let at = self.links.layout.place(number, message);
        let size = self.size as usize;
        if self.plan.verify {
            if self.plan.test.verb == Verb::Read {
                // Bytes of the message before would look right when the slots are few.
                self.links.source.memory().fill(at, size, 0)?;
            } else {
                Pattern::new(self.role.number(), number, message).fill(0, &mut self.scratch);
                self.links.source.write(at, &self.scratch)?;
            }
        }
        Ok(self.links.source.sge(at, size))
    }

    /// Which of the peer's places a message uses. Reads walk through them in another order than through ours,
    /// so that a reply that lands in the wrong place is found.
    fn remote_message(&self, message: u64) -> u64 {
        match self.plan.test.verb {
            Verb::Read => message + message / u64::from(self.links.layout.slots),
            Verb::Send | Verb::Write => message,
        }
    }

    fn check_read(&mut self, number: u32, message: u64) -> Result<()> {
        let at = self.links.layout.place(number, message);
        self.links.source.read(at, &mut self.scratch)?;
        let theirs = self.remote_message(message) % u64::from(self.links.layout.slots);
        Pattern::new(self.role.peer().number(), number, theirs)
            .verify(0, &self.scratch)
            .map_err(|mismatch| anyhow::anyhow!("read {message} of queue pair {number}: {mismatch}"))
    }
}

/// Receives that are posted on each queue pair: as many messages may be sent ahead.
pub fn receive_window(plan: &Plan, links: &Links) -> u64 {
    let depth = u64::from(plan.rx_depth);
    if plan.verify { depth.min(u64::from(links.layout.slots)) } else { depth }
}
