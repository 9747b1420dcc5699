//! One connection: the protocol's machine on a queue pair. All of it is behind one lock; the service thread and the threads
//! of the program run it in turns.

mod flood;
mod moved;

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Waker,
    time::{Duration, Instant},
};

use rustix::event::EventfdFlags;
use xwarp_verbs::{
    CompletionQueue, MemoryRegion, Payload, ProtectionDomain, QueuePair, Remote, STag, WcStatus,
    WorkCompletion, WorkRequest,
    cm::{CmId, ConnectOptions, EventKind},
};

use self::flood::Flood;
use crate::{
    buffers::{Receives, SendSlots, Work},
    machine::{Action, End, Machine, Notice, Violation},
    service::Core,
    wire::{Advert, Seq, has_payload, is_transaction},
};

/// RDMA Writes and Reads in the send queue beside messages.
pub(crate) const MOST_RDMA: usize = 8;
/// How long the peer may take to answer a withdrawal of advertisements.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A descriptor that is readable while the socket is.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn set(&self, readable: bool) {
        // Neither call can fail in a way that matters: a full counter is readable, an empty one is not.
        let _ = if readable {
            rustix::io::write(&self.0, &1u64.to_ne_bytes())
        } else {
            rustix::io::read(&self.0, &mut [0u8; 8])
        };
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What a connection uses of the device, dropped when the connection has ended.
pub(crate) struct Link {
    // Dropped first: it disconnects what the queue pair would reset.
    pub(crate) id: CmId,
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) pd: ProtectionDomain,
    pub(crate) slots: SendSlots,
    pub(crate) receives: Receives,
    /// RDMA Reads and Writes in the send queue.
    pub(crate) rdma: usize,
    /// RDMA Writes among them.
    pub(crate) writes: usize,
    /// Messages may be posted.
    pub(crate) established: bool,
    /// Reset when all messages were acknowledged, at this time at the latest.
    pub(crate) reset_at: Option<Instant>,
    /// The peer has suspended the connection, which goes on at this port of the peer.
    pub(crate) moving: Option<u16>,
    /// Memory of the program that is being sent and received, by its identifiers.
    pub(crate) sends: BTreeMap<u64, MemoryRegion>,
    pub(crate) wants: BTreeMap<u64, MemoryRegion>,
    /// Memory that was sent by RDMA Writes whose completion is awaited.
    pub(crate) written: Vec<MemoryRegion>,
}

/// What waits for the program.
#[derive(Default)]
pub(crate) struct Outcomes {
    /// Ends of receives into memory, with their lengths.
    pub(crate) received: BTreeMap<u64, u32>,
}

pub(crate) struct State {
    pub(crate) machine: Machine,
    pub(crate) link: Option<Link>,
    pub(crate) outcomes: Outcomes,
    /// Why the connection could not be made.
    pub(crate) failed: Option<(io::ErrorKind, String)>,
    /// The program has closed it at this time.
    pub(crate) orphaned: Option<Instant>,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) read_shut: bool,
    /// A connecting end's Hello, until it is sent.
    pub(crate) hello: Vec<u8>,
    /// When the stream below was established.
    pub(crate) established: Option<Instant>,
    flood: Flood,
    /// Our withdrawals that the peer has not answered, and since when that is seen.
    unanswered: [Option<(Seq, Instant)>; 3],
    /// A thread receives into memory.
    pub(crate) receiving: bool,
    /// Bytes sent by RDMA Write, and Transactions, that were not counted yet.
    written: u64,
    transactions: u64,
    /// The connection goes on in another service.
    left: bool,
    /// The present connection continues a suspended one.
    pub(crate) made_again: bool,
    /// When the peer has last suspended the connection.
    suspended: Option<Instant>,
    /// The end was counted.
    counted: bool,
    readable: bool,
    bytes: Vec<u8>,
    /// Polls by callers that do not wait.
    polls: u64,
    /// The connection is polled: its completions notify nobody. The value is the number of polls when the service looked.
    polled: Option<u64>,
    /// Threads that wait for a change.
    waiting: usize,
    /// Somebody has the bell's descriptor.
    watched: bool,
    /// Tasks that wait for a change.
    pub(crate) tasks: Tasks,
}

/// Tasks to wake at the next change. A task is stored once, so there are at most as many as poll.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Vec<Waker>);

impl Tasks {
    #[cfg(feature = "tokio")]
    pub(crate) fn add(&mut self, task: &Waker) {
        if !self.0.iter().any(|known| known.will_wake(task)) {
            self.0.push(task.clone());
        }
    }

    pub(crate) fn wake(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }
}

/// A connection that its handles and the service share.
pub(crate) struct Socket {
    pub(crate) core: Arc<Core>,
    state: Mutex<State>,
    changed: Condvar,
    bell: Bell,
}

impl Socket {
    pub(crate) fn new(core: &Arc<Core>, machine: Machine, link: Link) -> io::Result<Arc<Self>> {
        let state = State::new(machine, Some(link));
        let core = Arc::clone(core);
        Ok(Arc::new(Self { core, state: Mutex::new(state), changed: Condvar::new(), bell: Bell::new()? }))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something has changed, at the latest at `end`; false when `end` has come.
    pub(crate) fn wait<'s>(
        &'s self,
        mut state: MutexGuard<'s, State>,
        end: Option<Instant>,
    ) -> (MutexGuard<'s, State>, bool) {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return (state, false);
        }
        state.waiting += 1;
        let mut state = match left {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
        };
        state.waiting -= 1;
        (state, true)
    }

    /// Executes what the machine wants, then wakes all callers that wait for a change.
    pub(crate) fn drive(&self, state: &mut State) {
        self.execute(state);
        self.wake(state);
    }

    /// The same after a call that waits itself: the others are woken only if the machine acted. Two callers that wait, one to
    /// read and one to write, would otherwise wake each other without end.
    /// Returns whether it did.
    pub(crate) fn drive_waiting(&self, state: &mut State) -> bool {
        let acted = self.execute(state);
        if acted {
            self.wake(state);
        }
        acted
    }

    fn wake(&self, state: &mut State) {
        // Waking nobody is a system call, too.
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        state.tasks.wake();
    }

    /// Returns whether the machine acted.
    fn execute(&self, state: &mut State) -> bool {
        let acted = state.drive();
        if let Some(End::Violated(violation)) = state.machine.ended()
            && !std::mem::replace(&mut state.counted, true)
        {
            tracing::warn!(peer = ?state.peer, %violation, "SDP connection aborted");
            self.core.count(violation.counter(), 1);
        }
        for (name, count) in
            [("sdp_bytes_written", &mut state.written), ("sdp_transactions", &mut state.transactions)]
        {
            if *count > 0 {
                self.core.count(name, std::mem::take(count));
            }
        }
        let readable = state.is_readable();
        if readable != state.readable {
            state.readable = readable;
            if state.watched {
                self.bell.set(readable);
            }
        }
        acted
    }

    /// The descriptor that is readable while the connection is, from now on.
    pub(crate) fn watched_bell(&self) -> &Bell {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.watched, true) {
            self.bell.set(state.readable);
        }
        &self.bell
    }

    /// Handles the completions that wait.
    pub(crate) fn turn(&self) {
        let mut state = self.lock();
        if state.is_polled() {
            state.poll_completions(&self.core);
        } else {
            state.take_completions(&self.core);
        }
        self.drive(&mut state);
    }

    /// Runs the device for a caller that polls, and handles the completions.
    pub(crate) fn poll(self: &Arc<Self>, state: &mut State) {
        state.polls += 1;
        if state.polled.is_none() {
            state.polled = Some(state.polls);
            self.core.polled(self);
        }
        if state.poll_completions(&self.core) {
            self.drive(state);
        }
    }

    /// Called by the service from time to time while the connection is polled. Returns whether it still is; otherwise
    /// completions notify the service again.
    pub(crate) fn still_polled(&self) -> bool {
        let mut state = self.lock();
        let now = Some(state.polls);
        if std::mem::replace(&mut state.polled, now) != now {
            return true;
        }
        state.polled = None;
        state.take_completions(&self.core);
        self.drive(&mut state);
        false
    }

    /// Handles an event of the connection manager. Returns true when an accepted connection is established.
    pub(crate) fn event(&self, kind: EventKind) -> bool {
        let mut state = self.lock();
        // Messages that came before the event count before it.
        state.take_completions(&self.core);
        let established = state.event(kind);
        self.drive(&mut state);
        established
    }
}

impl State {
    fn new(machine: Machine, link: Option<Link>) -> Self {
        Self {
            machine,
            link,
            outcomes: Outcomes::default(),
            failed: None,
            orphaned: None,
            local: None,
            peer: None,
            read_shut: false,
            hello: Vec::new(),
            established: None,
            flood: Flood::new(Instant::now()),
            unanswered: [None; 3],
            receiving: false,
            written: 0,
            transactions: 0,
            left: false,
            made_again: false,
            suspended: None,
            counted: false,
            readable: false,
            bytes: Vec::new(),
            polls: 0,
            polled: None,
            waiting: 0,
            watched: false,
            tasks: Tasks::default(),
        }
    }

    /// Whether a read would not block.
    pub(crate) fn is_readable(&self) -> bool {
        let machine = &self.machine;
        machine.buffered() > 0
            || machine.has_offer()
            || machine.is_urgent()
            || machine.peer_closed()
            || machine.ended().is_some()
            || self.failed.is_some()
    }

    /// The error of a connection that could not be made or was lost.
    pub(crate) fn error(&self) -> Option<io::Error> {
        if let Some((kind, text)) = &self.failed {
            return Some(io::Error::new(*kind, text.clone()));
        }
        match self.machine.ended()? {
            End::Graceful => None,
            End::Reset => Some(io::ErrorKind::ConnectionReset.into()),
            End::Aborted => Some(io::ErrorKind::ConnectionAborted.into()),
            End::Violated(violation) => Some(io::Error::new(io::ErrorKind::ConnectionAborted, violation)),
        }
    }

    /// How the set-up has ended, if it has.
    pub(crate) fn connected(&self) -> Option<io::Result<()>> {
        if let Some(error) = self.error() {
            return Some(Err(error));
        }
        // The HelloAck may be taken before the event that says from where we are connected.
        (self.machine.is_open() && self.established.is_some()).then_some(Ok(()))
    }

    /// Whether a caller polls the connection.
    pub(crate) fn is_polled(&self) -> bool {
        self.polled.is_some()
    }

    /// Handles the completions that wait, and lets the next one notify the service.
    fn take_completions(&mut self, core: &Core) {
        loop {
            let Some(link) = &mut self.link else { return };
            link.cq.arm(false);
            if !self.poll_completions(core) {
                return;
            }
        }
    }

    /// Handles the completions that wait; returns whether there was one.
    fn poll_completions(&mut self, core: &Core) -> bool {
        let mut any = false;
        while let Some(completion) = self.link.as_ref().and_then(|link| link.cq.poll_one()) {
            any = true;
            self.complete(&completion, core);
        }
        any
    }

    fn complete(&mut self, completion: &WorkCompletion, core: &Core) {
        let Self { machine, link: Some(link), bytes, flood, .. } = self else { return };
        // After a failure only the memory counts: the connection manager reports the end of the connection.
        let success = completion.status == WcStatus::Success;
        match Work::of(completion.wr_id) {
            Work::Send(slot) => link.slots.free.push(slot),
            Work::Receive(block, slot) => {
                link.receives.complete(block, slot, completion.byte_len, machine.post_bytes(), bytes);
                if success {
                    machine.receive(bytes, completion.invalidated.map(STag::value));
                    if has_payload(bytes) {
                        flood.transferred();
                    } else if flood.count(Instant::now()) {
                        machine.violated(Violation::Flood);
                    }
                }
            }
            Work::Read => {
                link.rdma -= 1;
                if success {
                    flood.transferred();
                    core.count("sdp_bytes_read", completion.byte_len.into());
                    machine.read_done();
                }
            }
            Work::Write => {
                link.rdma -= 1;
                link.writes -= 1;
                if link.writes == 0 {
                    link.written.clear();
                }
            }
        }
    }

    /// Executes the machine's actions as far as the send queue has room; returns whether there was one.
    fn drive(&mut self) -> bool {
        let mut acted = false;
        if self.orphaned.is_some() && (self.machine.buffered() > 0 || self.machine.has_offer()) {
            // Nobody will read the data: the peer is told by a reset, as with TCP.
            self.machine.abort();
        }
        acted |= self.take_notices();
        loop {
            let Some(link) = &mut self.link else { return acted };
            let can_send = link.established && !link.slots.free.is_empty() && link.rdma < MOST_RDMA;
            let Some(action) = self.machine.poll(can_send, &mut self.bytes) else { break };
            acted = true;
            match action {
                Action::Send { memory, .. } if memory.is_some() || has_payload(&self.bytes) => {
                    self.flood.transferred();
                    self.transactions += u64::from(is_transaction(&self.bytes));
                }
                Action::Write { local, .. } => {
                    self.flood.transferred();
                    self.written += u64::from(local.len);
                }
                _ => {}
            }
            if let Err(error) = link.execute(&action, &mut self.bytes) {
                tracing::debug!(error, "the queue pair takes no more work");
                self.machine.stream_ended();
            }
            self.take_notices();
        }
        let Some(link) = &mut self.link else { return acted };
        let due = |at: Instant| link.slots.all_free() || Instant::now() >= at;
        if link.reset_at.is_some_and(due) {
            link.reset_at = None;
            let _ = link.qp.abort();
        }
        acted
    }

    /// Returns whether there was a notice.
    fn take_notices(&mut self) -> bool {
        let mut any = false;
        while let Some(notice) = self.machine.notice() {
            any = true;
            let Some(link) = &mut self.link else { continue };
            match notice {
                Notice::Sent { id } => {
                    if let Some(region) = link.sends.remove(&id)
                        && link.writes > 0
                    {
                        link.written.push(region);
                    }
                }
                Notice::Received { id, len, copied } => {
                    if let Some(region) = link.wants.remove(&id) {
                        let fits = copied.is_empty() || region.write(0, &copied).is_ok();
                        self.outcomes.received.insert(id, if fits { len } else { 0 });
                    }
                }
                Notice::Withdrawn { id } => {
                    link.wants.remove(&id);
                    self.outcomes.received.insert(id, 0);
                }
            }
        }
        any
    }

    fn event(&mut self, kind: EventKind) -> bool {
        let Some(link) = &mut self.link else { return false };
        let failed = |kind: io::ErrorKind, text: &dyn std::fmt::Display| Some((kind, text.to_string()));
        match kind {
            EventKind::AddressResolved => {
                if let Err(error) = link.id.resolve_route() {
                    self.failed = failed(io::ErrorKind::NotConnected, &error);
                }
            }
            EventKind::Established { .. } => {
                link.established = true;
                self.established = Some(Instant::now());
                // A connection that is made again keeps the addresses that the program knows.
                if !self.made_again {
                    self.local = link.id.local_address();
                    self.peer = link.id.peer_address().or(self.peer);
                }
                return true;
            }
            EventKind::AddressError(error) => self.failed = failed(io::ErrorKind::HostUnreachable, &error),
            EventKind::Rejected { .. } => {
                self.failed = failed(io::ErrorKind::ConnectionRefused, &"the peer rejected the connection");
            }
            EventKind::Refused => {
                self.failed = failed(io::ErrorKind::ConnectionRefused, &"connection refused");
            }
            EventKind::Unreachable => {
                self.failed = failed(io::ErrorKind::HostUnreachable, &"the peer cannot be reached");
            }
            EventKind::TimedOut => self.failed = failed(io::ErrorKind::TimedOut, &"the peer did not answer"),
            EventKind::ConnectError(reason) => {
                self.failed = failed(io::ErrorKind::ConnectionRefused, &reason);
            }
            EventKind::Disconnected
            | EventKind::Closed(_)
            | EventKind::DeviceFailed
            | EventKind::RequestGone => {
                self.machine.stream_ended();
            }
            _ => {}
        }
        false
    }

    /// Takes the step of a connecting end that follows the resolution of the route.
    pub(crate) fn start(&mut self, options: ConnectOptions) {
        let Some(link) = &self.link else { return };
        if let Err(error) = link.id.connect(&link.qp, options) {
            self.failed = Some((io::ErrorKind::NotConnected, error.to_string()));
        }
    }

    /// Ends the connection when the peer does not answer a withdrawal.
    pub(crate) fn check_answers(&mut self, now: Instant) {
        for (pending, known) in self.machine.unanswered().into_iter().zip(&mut self.unanswered) {
            *known = match (pending, *known) {
                (Some(seq), Some((same, since))) if seq == same => Some((same, since)),
                (pending, _) => pending.map(|seq| (seq, now)),
            };
        }
        if self.unanswered.iter().flatten().any(|(_, since)| now >= *since + ANSWER_LIMIT) {
            self.machine.violated(Violation::Unanswered);
        }
    }

    /// Whether nothing of the connection is left to do but to free it.
    pub(crate) fn is_over(&self) -> bool {
        let ended = self.machine.ended().is_some() || self.failed.is_some();
        ended && self.link.as_ref().is_none_or(|link| link.reset_at.is_none())
    }
}

impl Link {
    fn execute(&mut self, action: &Action, bytes: &mut Vec<u8>) -> Result<(), String> {
        match *action {
            Action::PostReceives { count, bytes } => {
                self.receives.post(&self.pd, &self.qp, count, bytes).map_err(|e| e.to_string())
            }
            Action::Send { memory, solicited, invalidate } => {
                if let Some(piece) = memory {
                    self.append_memory(piece, bytes)?;
                }
                self.send(bytes, solicited, invalidate)
            }
            Action::Read { remote, local } => {
                let request = WorkRequest::read(Work::Read.wr_id(), sge(local), place(remote)).signaled();
                self.rdma += 1;
                self.qp.post_send(&request).map_err(|e| e.to_string())
            }
            Action::Write { local, remote } => {
                let request = WorkRequest::write(Work::Write.wr_id(), sge(local), place(remote)).signaled();
                self.rdma += 1;
                self.writes += 1;
                self.qp.post_send(&request).map_err(|e| e.to_string())
            }
            Action::Reconnect { port } => {
                self.moving = Some(port);
                Ok(())
            }
            Action::Disconnect => self.id.disconnect().map_err(|e| e.to_string()),
            Action::Reset { flush: true } => {
                self.reset_at = Some(Instant::now() + Duration::from_secs(2));
                Ok(())
            }
            Action::Reset { flush: false } => self.qp.abort().map_err(|e| e.to_string()),
        }
    }

    /// Appends a piece of the program's memory that goes in a message.
    fn append_memory(&self, piece: Advert, bytes: &mut Vec<u8>) -> Result<(), String> {
        let region = self.sends.values().find(|region| region.key().value() == piece.stag);
        let region = region.ok_or("memory is gone")?;
        let copied = region.to_vec(piece.offset as usize, piece.len as usize).map_err(|e| e.to_string())?;
        bytes.extend(copied);
        Ok(())
    }

    fn send(&mut self, bytes: &[u8], solicited: bool, invalidate: Option<u32>) -> Result<(), String> {
        let slot = self.slots.free.pop().ok_or("no slot")?;
        let at = slot * self.slots.slot_bytes;
        self.slots.region.write(at, bytes).map_err(|e| e.to_string())?;
        let payload = Payload::Piece(self.slots.region.sge(at, bytes.len()));
        let wr_id = Work::Send(slot).wr_id();
        let request = match invalidate {
            Some(key) => WorkRequest::send_with_invalidate(wr_id, payload, STag::new(key)),
            None => WorkRequest::send(wr_id, payload),
        };
        let request = request.signaled();
        let request = if solicited { request.solicited() } else { request };
        self.qp.post_send(&request).map_err(|e| e.to_string())
    }
}

fn sge(piece: Advert) -> xwarp_verbs::Sge {
    xwarp_verbs::Sge { key: STag::new(piece.stag), offset: piece.offset, len: piece.len }
}

fn place(piece: Advert) -> Remote {
    Remote { key: STag::new(piece.stag), offset: piece.offset }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Config;

    #[test]
    fn sdp_s16_a_cancellation_without_answer_ends_the_connection() {
        let (_, hello) = Machine::connect(&Config::default());
        let mut machine = Machine::accept(&Config::default(), &hello).unwrap();
        let mut bytes = Vec::new();
        let mut send = |machine: &mut Machine| while machine.poll(true, &mut bytes).is_some() {};
        machine.write_memory(Advert { len: 100_000, stag: 1, offset: 0 });
        send(&mut machine);
        machine.cancel_writes();
        send(&mut machine);
        let mut state = State::new(machine, None);
        let now = Instant::now();
        for seconds in [0, 30, 59] {
            state.check_answers(now + Duration::from_secs(seconds));
            assert_eq!(state.machine.ended(), None);
        }
        state.check_answers(now + Duration::from_secs(60));
        assert_eq!(state.machine.ended(), Some(End::Violated(Violation::Unanswered)));
    }
}
