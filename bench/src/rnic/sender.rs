//! [`Sender`]: the active side of a bandwidth test. It keeps the send queue of every queue pair full.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use smallvec::SmallVec;
use xwarp_verbs::{Payload, PostError, PostListError, Remote, Sge, WorkCompletion, WorkRequest};

use super::{
    limiter::Limiter,
    links::{Links, Role},
    plan::{Plan, Verb},
    rounds::Rounds,
};
use crate::{
    options::{Amount, AtomicType},
    pattern::Pattern,
    progress::Progress,
    stats::Completions,
};

/// Maximum number of samples for the peak rate; later completions are ignored for it.
const MARKS: usize = 1 << 16;
/// Maximum number of completions in one poll.
const BATCH: usize = 64;

/// Requests posted by one call without an allocation.
const LIST: usize = 16;

type Pieces = SmallVec<[Sge; LIST]>;

/// Progress of a queue pair, in messages.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    posted: u64,
    completed: u64,
    /// The last message that requests a completion.
    signaled: u64,
}

/// The result of sending a row.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sent {
    /// Number of messages over all queue pairs.
    pub messages: u64,
    /// Time from the first post to the last completion.
    pub elapsed: Duration,
    /// Rate of the best window, in messages a second.
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
    /// Queue pairs that may have room for messages, some of them twice.
    visits: Vec<u32>,
    /// Room also comes from elsewhere than completions: all queue pairs are visited all the time.
    visits_all: bool,
    /// Messages of earlier rows on each queue pair, because credits count across rows.
    before: &'a [u64],
    /// Largest number of messages in flight on each queue pair.
    depth: u64,
    /// One of this many messages requests a completion.
    signal_every: u64,
    /// Messages for each queue pair; `None` until the duration has elapsed.
    target: Option<u64>,
    start: Instant,
    until: Option<Duration>,
    limiter: Option<Limiter>,
    time_over: bool,
    posted: u64,
    completed: u64,
    completions: Completions,
    progress: Progress,
    done: Option<Duration>,
    batch: Vec<WorkCompletion>,
    scratch: Vec<u8>,
}

impl<'a> Sender<'a> {
    /// Creates a sender of messages of `size` bytes and starts the clock of the row.
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
        let start = Instant::now();
        Self {
            links,
            plan,
            role,
            size,
            paces: vec![Pace::default(); links.list.len()],
            visits: (0..links.list.len() as u32).collect(),
            visits_all: plan.verify || plan.rate_limit.is_some() || plan.test.verb.takes_receives(),
            before,
            depth,
            // At least four completions in a full queue: if the queue drained before its completion was seen,
            // the wire would starve.
            signal_every: u64::from(plan.cq_mod).min((depth / 4).max(1)),
            target,
            start,
            until,
            limiter: plan.rate_limit.map(|limit| Limiter::new(limit, size, start)),
            time_over: false,
            posted: 0,
            completed: 0,
            completions,
            progress: Progress::new(total, size, quiet),
            done: None,
            batch: Vec::with_capacity(BATCH),
            scratch: if plan.verify { vec![0; size as usize] } else { Vec::new() },
        }
    }

    /// The result, once every message has completed.
    pub fn done(&self) -> Option<Sent> {
        let elapsed = self.done?;
        // All messages in flight can complete at once, so a shorter window is meaningless.
        let window = self.completed.min(u64::from(self.plan.tx_depth) * u64::from(self.plan.queue_pairs));
        Some(Sent { messages: self.completed, elapsed, peak: self.completions.peak(window) })
    }

    /// Messages posted on each queue pair, including earlier rows.
    pub fn sent_ever(&self) -> Vec<u64> {
        self.before.iter().zip(&self.paces).map(|(before, pace)| before + pace.posted).collect()
    }

    /// Polls for completions and posts messages; returns whether there was anything to do.
    pub fn poll(&mut self, rounds: &mut Rounds) -> Result<bool> {
        if self.done.is_some() {
            return Ok(false);
        }
        let mut moved = self.reap()?;
        let was_over = self.time_over;
        self.time_over |= self.until.is_some_and(|until| self.start.elapsed() >= until);
        let mut visits = std::mem::take(&mut self.visits);
        if self.visits_all || self.time_over != was_over {
            visits.clear();
            visits.extend(0..self.paces.len() as u32);
        }
        for number in visits.drain(..) {
            moved |= self.post(number, rounds)?;
        }
        self.visits = visits;
        let count = self.paces.len() as u32;
        if self.completed == self.posted
            && (0..count).all(|number| self.is_finished(number) && rounds.is_settled(number))
        {
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
            self.visits.push(number);
            if self.plan.verify && self.plan.test.verb.fetches() {
                for message in first..upto {
                    self.verify_fetched(number, message)?;
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

    /// Number of messages that this queue pair may post now.
    fn room(&self, number: u32, rounds: &Rounds) -> Result<u64> {
        let pace = self.paces[number as usize];
        let mut room = self.depth - (pace.posted - pace.completed);
        if self.plan.test.verb.takes_receives() {
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
            // Allow one more message, which requests a completion, if the last one did not.
            room = room.min(u64::from(pace.signaled < pace.posted || pace.posted == 0));
        }
        Ok(room.min(rounds.room(number)))
    }

    fn post(&mut self, number: u32, rounds: &mut Rounds) -> Result<bool> {
        let mut moved = false;
        loop {
            let allowed = self.limiter.as_mut().map_or(u64::MAX, |limiter| limiter.room(Instant::now()));
            let room = self.room(number, rounds)?.min(u64::from(self.plan.post_list)).min(allowed);
            if room == 0 {
                return Ok(moved | rounds.close_if_full(self.links, number, self.is_flushing(number))?);
            }
            moved = true;
            self.post_some(number, room)?;
            rounds.wrote(number, room);
            if let Some(limiter) = &mut self.limiter {
                limiter.posted(room);
            }
        }
    }

    /// Whether the last message has been posted.
    fn is_flushing(&self, number: u32) -> bool {
        let pace = self.paces[number as usize];
        self.target.map_or(self.time_over, |target| pace.posted == target)
    }

    fn post_some(&mut self, number: u32, count: u64) -> Result<()> {
        let first = self.paces[number as usize].posted;
        // Pushed one by one: collecting a `Result` would move the list several times.
        let mut pieces = Pieces::new();
        for message in first..first + count {
            pieces.push(self.piece(number, message)?);
        }
        // Inline data is copied when the request is posted.
        let inline = self.size <= u64::from(self.plan.inline) && !self.plan.test.verb.fetches();
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
                None => Payload::Piece(pieces[at]),
            };
            let id = message + 1;
            let remote = self.links.remote(number, self.remote_message(message));
            let mut request = match self.plan.test.verb {
                Verb::Send => WorkRequest::send(id, payload),
                Verb::Write => WorkRequest::write(id, payload, remote),
                Verb::WriteImmediate => {
                    WorkRequest::write_with_immediate(id, payload, remote, message.to_le_bytes())
                }
                Verb::Read => WorkRequest::read(id, pieces[at], remote),
                Verb::Atomic(operation) => {
                    let word = self.links.remote(number, 0);
                    atomic(operation, id, pieces[at], word, self.before[number as usize] + message)
                }
            };
            if id.is_multiple_of(self.signal_every) || Some(id) == self.target || self.time_over {
                request = request.signaled();
                self.paces[number as usize].signaled = id;
            }
            requests.push(request);
        }
        let qp = &self.links.list[number as usize].qp;
        match qp.post_send_list(&requests) {
            Ok(()) => {
                self.paces[number as usize].posted += count;
                self.posted += count;
            }
            Err(PostListError { source: PostError::QueueFull(_), .. }) => {
                bail!("queue pair {number} accepts fewer requests than it was created for")
            }
            Err(error) => return Err(error).with_context(|| format!("posting on queue pair {number}")),
        }
        Ok(())
    }

    /// The local buffer of a message, filled with its pattern if the peer verifies it.
    fn piece(&mut self, number: u32, message: u64) -> Result<Sge> {
        let at = self.links.layout.place(number, message);
        let size = self.size as usize;
        if self.plan.verify {
            if self.plan.test.verb.fetches() {
                // With few slots, bytes of an earlier message could match.
                self.links.source.memory().fill(at, size, 0xff)?;
            } else {
                Pattern::new(self.role.number(), number, message).fill(0, &mut self.scratch);
                self.links.source.write(at, &self.scratch)?;
            }
        }
        Ok(self.links.source.sge(at, size))
    }

    /// The message whose place at the peer this message uses. Reads use the peer's places in another order
    /// than the local ones, so that a response that lands in the wrong place is detected.
    fn remote_message(&self, message: u64) -> u64 {
        match self.plan.test.verb {
            Verb::Read => message + message / u64::from(self.links.layout.slots),
            Verb::Send | Verb::Write | Verb::WriteImmediate | Verb::Atomic(_) => message,
        }
    }

    /// Verifies the bytes that an RDMA Read or an atomic operation returned.
    fn verify_fetched(&mut self, number: u32, message: u64) -> Result<()> {
        let at = self.links.layout.place(number, message);
        if let Verb::Atomic(_) = self.plan.test.verb {
            let (found, expected) =
                (self.links.source.memory().load_u64(at)?, self.before[number as usize] + message);
            ensure!(
                found == expected,
                "atomic {message} of queue pair {number} found {found} instead of {expected}"
            );
            return Ok(());
        }
        self.links.source.read(at, &mut self.scratch)?;
        let theirs = self.remote_message(message) % u64::from(self.links.layout.slots);
        Pattern::new(self.role.peer().number(), number, theirs)
            .verify(0, &self.scratch)
            .map_err(|mismatch| anyhow::anyhow!("read {message} of queue pair {number}: {mismatch}"))
    }
}

/// An atomic operation that replaces `value` by its successor. Either operation type works, because each
/// operation is executed once and in order.
pub fn atomic(operation: AtomicType, id: u64, local: Sge, word: Remote, value: u64) -> WorkRequest<'static> {
    match operation {
        AtomicType::FetchAdd => WorkRequest::fetch_add(id, local, word, 1),
        AtomicType::CompareSwap => WorkRequest::compare_swap(id, local, word, value, value + 1),
    }
}

/// Number of receives posted on each queue pair, which limits the messages sent ahead of credits.
pub fn receive_window(plan: &Plan, links: &Links) -> u64 {
    let depth = u64::from(plan.rx_depth);
    if plan.verify { depth.min(u64::from(links.layout.slots)) } else { depth }
}
