//! The state of a connection behind its lock: the machine, and the link that executes its actions.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use xwarp_verbs::{
    Rest, STag, WcStatus, WorkCompletion,
    cm::{ConnectOptions, EventKind},
};

use super::{
    Tasks,
    flood::Flood,
    link::{Link, MAX_RDMA},
};
use crate::{
    buffers::Work,
    machine::{Action, End, Machine, Notice, Violation},
    service::Core,
    wire::{Seq, has_payload, is_transaction},
};

/// Time limit for the peer's answer to a withdrawal of advertisements.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Results that the program has not collected yet.
#[derive(Default)]
pub(crate) struct Outcomes {
    /// Ended receives into memory, with their lengths.
    pub(crate) received: BTreeMap<u64, u32>,
}

pub(crate) struct State {
    pub(crate) machine: Machine,
    pub(crate) link: Option<Link>,
    pub(crate) outcomes: Outcomes,
    /// The error of a failed set-up.
    pub(crate) failed: Option<(io::ErrorKind, String)>,
    /// The time at which the program closed the connection.
    pub(crate) orphaned: Option<Instant>,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) read_shut: bool,
    /// A connecting end's Hello, until it is sent.
    pub(crate) hello: Vec<u8>,
    /// The time at which the stream below was established.
    pub(crate) established: Option<Instant>,
    flood: Flood,
    /// Our unanswered withdrawals, and the time since when they have been observed.
    unanswered: [Option<(Seq, Instant)>; 3],
    /// Whether a thread receives into memory.
    pub(crate) receiving: bool,
    /// Bytes sent by RDMA Write, and Transactions, that are not counted yet.
    pub(super) written: u64,
    pub(super) placed: u64,
    pub(super) transactions: u64,
    /// The present connection continues a suspended one.
    pub(crate) made_again: bool,
    /// The time at which the peer last suspended the connection.
    pub(super) suspended: Option<Instant>,
    /// The end was counted.
    pub(super) counted: bool,
    pub(super) readable: bool,
    bytes: Vec<u8>,
    /// Empty; kept for its allocation.
    completions: Vec<WorkCompletion>,
    /// Number of polls by callers that do not wait.
    pub(super) polls: u64,
    /// The connection is polled: its completions notify no thread. The value is the number of polls at the service's
    /// last check.
    pub(crate) polled: Option<u64>,
    /// The service checks periodically whether the connection is polled.
    pub(super) looked_at: bool,
    /// The machine's actions wait for the next call, or the service's next check.
    pub(crate) deferred: bool,
    /// Number of waiting threads, by event.
    pub(super) waiting: [usize; 3],
    /// A transfer of memory has ended since threads were last woken.
    pub(super) transferred: bool,
    /// The bell's descriptor is in use.
    pub(super) watched: bool,
    /// Tasks that wait for a change.
    pub(crate) tasks: Tasks,
}

impl State {
    pub(super) fn new(machine: Machine, link: Option<Link>) -> Self {
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
            placed: 0,
            transactions: 0,
            made_again: false,
            suspended: None,
            counted: false,
            readable: false,
            bytes: Vec::new(),
            completions: Vec::new(),
            polls: 0,
            polled: None,
            looked_at: false,
            deferred: false,
            waiting: [0; 3],
            transferred: false,
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

    /// The outcome of the set-up, if it has ended.
    pub(crate) fn connected(&self) -> Option<io::Result<()>> {
        if let Some(error) = self.error() {
            return Some(Err(error));
        }
        // The HelloAck may be handled before the event with our local address.
        (self.machine.is_open() && self.established.is_some()).then_some(Ok(()))
    }

    /// Whether nothing waits to be sent, and there is a slot for a message.
    pub(crate) fn can_send(&self) -> bool {
        self.machine.is_all_sent() && self.link.as_ref().is_some_and(|link| !link.slots.free.is_empty())
    }

    /// Whether the machine's actions can wait for the next call of the caller that polls: nobody else waits for them.
    pub(crate) fn can_wait(&self) -> bool {
        self.looked_at
            && self.is_polled()
            && self.waiting == [0; 3]
            && !self.watched
            && self.tasks.is_empty()
            && self.machine.can_wait()
    }

    /// Whether a caller polls the connection.
    pub(crate) fn is_polled(&self) -> bool {
        self.polled.is_some()
    }

    /// Handles the waiting completions, and arms the notification of the service.
    pub(crate) fn take_completions(&mut self, core: &Core) {
        loop {
            let Some(link) = &mut self.link else { return };
            link.cq.arm(false);
            if !self.poll_completions(core).0 {
                return;
            }
        }
    }

    /// Handles the waiting completions; returns whether there was one, and the rest of a caller that polls in vain, for the time after
    /// the lock. Runs the engine only when there was none: one
    /// more turn would send the acknowledgement that the program's reply can carry (`docs/decisions/0002-*`).
    pub(crate) fn poll_completions(&mut self, core: &Core) -> (bool, Option<Rest>) {
        let mut rest = None;
        let mut found = std::mem::take(&mut self.completions);
        if let Some(link) = &self.link {
            // Posted work bounds their number: none is posted before all are handled.
            if self.polled.is_some() {
                (_, rest) = link.cq.poll_awake(&mut found, usize::MAX);
            } else {
                link.cq.poll_armed(&mut found, usize::MAX);
            }
        }
        let any = !found.is_empty();
        for completion in found.drain(..) {
            self.complete(&completion, core);
        }
        self.completions = found;
        (any, rest)
    }

    fn complete(&mut self, completion: &WorkCompletion, core: &Core) {
        let Self { machine, link: Some(link), bytes, flood, .. } = self else { return };
        // After a failure only the memory is freed here: the connection manager reports the end of the connection.
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
                link.write_done();
                self.transferred = true;
            }
        }
    }

    /// Executes the machine's actions as far as the send queue has room; returns whether there was one.
    pub(super) fn drive(&mut self) -> bool {
        let mut acted = false;
        if self.orphaned.is_some() && (self.machine.buffered() > 0 || self.machine.has_offer()) {
            // The data will not be read: a reset notifies the peer, as with TCP.
            self.machine.abort();
        }
        acted |= self.take_notices();
        loop {
            let Some(link) = &mut self.link else { return acted };
            let can_send = link.established && !link.slots.free.is_empty() && link.rdma < MAX_RDMA;
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
    pub(super) fn take_notices(&mut self) -> bool {
        let mut any = false;
        while let Some(notice) = self.machine.notice() {
            any = true;
            self.transferred = true;
            if matches!(notice, Notice::Sent { .. }) {
                // The peer may have read it by RDMA, and has sent us only messages without payload.
                self.flood.transferred();
            }
            let Some(link) = &mut self.link else { continue };
            match notice {
                Notice::Sent { id } => {
                    if let Some(region) = link.sends.remove(&id)
                        && link.writes_done < link.writes_posted
                    {
                        link.written.push_back((id, link.writes_posted, region));
                    }
                }
                Notice::Received { id, len, copied } => {
                    if copied.is_empty() {
                        self.placed += u64::from(len);
                    }
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

    pub(super) fn event(&mut self, kind: EventKind) -> bool {
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
                // A resumed connection keeps the addresses that are shown to the program.
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

    /// Executes the connecting end's next step after the resolution of the route.
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

    /// Whether the connection can be freed.
    pub(crate) fn is_over(&self) -> bool {
        let ended = self.machine.ended().is_some() || self.failed.is_some();
        ended && self.link.as_ref().is_none_or(|link| link.reset_at.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        machine::Config,
        wire::{Advert, BASE_BYTES, Base, Message},
    };

    /// A machine of the accepting end, and what it sends.
    fn accepted() -> (Machine, impl FnMut(&mut Machine)) {
        let (_, hello) = Machine::connect(&Config::default());
        let machine = Machine::accept(&Config::default(), &hello).unwrap();
        let mut bytes = Vec::new();
        (machine, move |machine: &mut Machine| while machine.poll(true, &mut bytes).is_some() {})
    }

    /// A peer that reads our advertised data by RDMA sends only a message for each Read: thousands in a second on a
    /// fast link.
    #[test]
    fn sdp_s16_memory_that_the_peer_has_read_is_a_transfer() {
        let (machine, mut send) = accepted();
        let mut state = State::new(machine, None);
        for seq in 1..=100 {
            state.machine.write_memory(Advert { len: 100_000, stag: 1, offset: 0 });
            send(&mut state.machine);
            let mut message = Vec::new();
            let base = Base { bufs: 8, mseq: Seq(seq), mseq_ack: Seq(seq), ..Base::default() };
            // The SrcAvail was a message of 16 KiB.
            let len = 100_000 - (16 << 10) + BASE_BYTES as u32 + 16;
            Message::RdmaRdCompl { len }.emit(base, 0, &mut message);
            state.machine.receive(&message, None);
            assert_eq!(state.machine.ended(), None);
            assert!(state.take_notices());
        }
        let now = Instant::now();
        assert!((0..1000 + 100 * 16).all(|_| !state.flood.count(now)));
        assert!(state.flood.count(now));
    }

    #[test]
    fn sdp_s16_a_cancellation_without_answer_ends_the_connection() {
        let (mut machine, mut send) = accepted();
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
