//! One connection's protocol as a value: no clock, no thread, no descriptor.
//!
//! The caller passes in arrivals ([`Machine::receive`], [`Machine::read_done`], [`Machine::stream_ended`]) and the
//! program's calls, then takes [`Action`]s from [`Machine::poll`] until there is none, and executes them in order on
//! one send queue. [`Notice`]s report which memory of the program is free again.
//!
//! | file | owns |
//! |---|---|
//! | `config`, `action` | settings of the caller, and the actions that it executes |
//! | `credit` | credits of both ends, sequence numbers |
//! | `transmit` | the order of transmission |
//! | `source` | the sending half: data, SrcAvails, RDMA Writes, its mode |
//! | `sink` | the receiving half: ring, RDMA Reads, SinkAvails, its mode |
//! | `readable` | queries about the receiving half |
//! | `resize` | sizes of receive buffers |
//! | `suspend` | suspension, and continuation over another connection below |
//! | `saved` | a suspended machine as bytes |
//! | `violation` | protocol violations of the peer |

mod action;
mod config;
mod credit;
#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod reaction_tests;
mod readable;
mod resize;
#[cfg(test)]
mod rule_tests;
mod saved;
mod seeded;
mod sink;
mod source;
mod suspend;
mod transmit;
mod violation;

use std::collections::VecDeque;

pub(crate) use self::saved::{Reader, Writer};
pub use self::{
    action::{Action, Notice},
    config::Config,
    suspend::FAREWELL_RECEIVES,
    violation::Violation,
};
use self::{
    credit::{Credits, Need},
    resize::Resize,
    seeded::{Mistake, seeded},
    sink::Sink,
    source::Source,
    suspend::Suspend,
};
use crate::wire::{Advert, Base, Flags, Half, Hello, HelloAck, Message, Mode, Seq};

/// Smallest number of receives (draft section 10, constraint 2).
pub const LEAST_BUFFERS: u16 = 3;
/// Largest number of our outstanding advertisements, if the peer accepts as many.
const MAX_ADVERTS: usize = 8;

/// The role of this end in the set-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The end that sent the Hello.
    Connecting,
    /// The end that answered it.
    Accepting,
}

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Both directions were closed in order.
    Graceful,
    /// The peer reset it, or it was lost.
    Reset,
    /// We reset it.
    Aborted,
    /// We reset it, because the peer violated the protocol.
    Violated(Violation),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    /// The HelloAck has not arrived.
    Acking,
    Open,
    /// Ended. `reset`: an [`Action::Reset`] must be returned; with `Some(true)`, after an AbortConn.
    Ended {
        end: End,
        reset: Option<bool>,
    },
}

/// The state of a request that the peer answers: a withdrawal of advertisements, or a change of size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Request {
    None,
    Queued,
    Sent(Seq),
}

impl Request {
    /// Its number, once it has been sent.
    fn sent(self) -> Option<Seq> {
        if let Self::Sent(seq) = self { Some(seq) } else { None }
    }
}

/// A message without payload that waits for credit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Control {
    message: Message,
    flags: Flags,
    invalidate: Option<u32>,
}

impl From<Message> for Control {
    fn from(message: Message) -> Self {
        Self { message, flags: Flags::empty(), invalidate: None }
    }
}

/// The protocol of one end of a connection. See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Machine {
    config: Config,
    /// The role in the first set-up, which decides conflicts.
    role: Role,
    /// The role in the set-up of the present connection below.
    link_role: Role,
    phase: Phase,
    credits: Credits,
    resize: Resize,
    suspend: Suspend,
    source: Source,
    sink: Sink,
    control: VecDeque<Control>,
    notices: VecDeque<Notice>,
    /// Advertisements that the peer accepts at a time.
    peer_adverts: usize,
    /// The program sends no more.
    closing: bool,
    disconn_sent: bool,
    disconnected: bool,
}

impl Machine {
    fn new(config: &Config, role: Role) -> Self {
        let config = config.bounded();
        Self {
            role,
            link_role: role,
            phase: Phase::Acking,
            credits: Credits::new(
                config.buffers,
                role == Role::Accepting && !seeded(Mistake::HelloAckUncounted),
                role == Role::Connecting,
            ),
            resize: Resize::new(config.buffer_bytes, config.most_buffer_bytes, config.desired_bytes),
            suspend: Suspend::new(),
            source: Source::new(),
            sink: Sink::new(),
            control: VecDeque::new(),
            notices: VecDeque::new(),
            peer_adverts: 0,
            closing: false,
            disconn_sent: false,
            disconnected: false,
            config,
        }
    }

    /// The connecting end, and its Hello. [`Self::receives_to_post`] receives are posted before it is sent.
    pub fn connect(config: &Config) -> (Self, Vec<u8>) {
        let machine = Self::new(config, Role::Connecting);
        let hello = machine.hello();
        (machine, hello)
    }

    fn hello(&self) -> Vec<u8> {
        let config = &self.config;
        let hello = Message::Hello(Hello {
            max_adverts: config.max_adverts,
            desired_bytes: config.desired_bytes,
            buffer_bytes: self.resize.own_bytes,
            ird: config.ird,
            ord: config.ord,
        });
        let mut bytes = Vec::new();
        hello.emit(Base { bufs: config.buffers, ..Base::default() }, 0, &mut bytes);
        bytes
    }

    /// The accepting end for a peer's Hello; its first message will be the HelloAck.
    pub fn accept(config: &Config, hello: &[u8]) -> Result<Self, Violation> {
        let (base, message, _) = Message::parse(hello)?;
        let Message::Hello(hello) = message else { return Err(Violation::SetUp) };
        let mut machine = Self::new(&config.for_peer(hello.desired_bytes), Role::Accepting);
        machine.config.ord = machine.config.ord.min(hello.ird);
        machine.greet(base.bufs, hello.buffer_bytes, hello.max_adverts)?;
        Ok(machine)
    }

    fn greet(&mut self, bufs: u16, buffer_bytes: u32, max_adverts: u16) -> Result<(), Violation> {
        if bufs < LEAST_BUFFERS {
            return Err(Violation::FewBuffers);
        }
        self.credits.greet(bufs);
        self.resize.peer_bytes = buffer_bytes;
        self.peer_adverts = usize::from(max_adverts).min(MAX_ADVERTS);
        if self.link_role == Role::Accepting {
            let config = &self.config;
            let ack = HelloAck {
                max_adverts: config.max_adverts,
                buffer_bytes: self.resize.own_bytes,
                ird: config.ird,
                ord: config.ord,
            };
            self.control.push_back(Message::HelloAck(ack).into());
        }
        self.phase = Phase::Open;
        Ok(())
    }

    /// Receives to post before the set-up. The connecting end posts one more than its Hello says, for the HelloAck, which
    /// the credits do not count (decision 4).
    pub fn receives_to_post(&self) -> (u16, u32) {
        let counted = self.link_role == Role::Accepting || seeded(Mistake::HelloAckUncounted);
        let hello_ack = u16::from(!counted);
        (self.config.buffers + hello_ack, self.resize.post_bytes())
    }

    /// Size of the receives that are posted now, in bytes.
    pub fn post_bytes(&self) -> u32 {
        self.resize.post_bytes()
    }

    /// Sizes and limits of this end.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// RDMA Reads that may be outstanding.
    pub fn ord(&self) -> u16 {
        self.config.ord
    }

    /// RDMA Reads of the peer that are served.
    pub fn ird(&self) -> u16 {
        self.config.ird
    }

    /// Takes a message of the peer. `invalidated` is the key of ours that it invalidated.
    pub fn receive(&mut self, bytes: &[u8], invalidated: Option<u32>) {
        if matches!(self.phase, Phase::Ended { .. }) && !seeded(Mistake::EndIgnored) {
            return;
        }
        if let Err(violation) = self.take(bytes, invalidated) {
            self.end(End::Violated(violation));
        }
    }

    fn take(&mut self, bytes: &[u8], invalidated: Option<u32>) -> Result<(), Violation> {
        let (base, message, payload) = Message::parse(bytes)?;
        if self.phase == Phase::Acking {
            let Message::HelloAck(ack) = message else { return Err(Violation::SetUp) };
            self.config.ord = self.config.ord.min(ack.ird);
            return self.greet(base.bufs, ack.buffer_bytes, ack.max_adverts);
        }
        if matches!(self.control.front(), Some(Control { message: Message::HelloAck(_), .. })) {
            return Err(Violation::SetUp);
        }
        if !self.credits.is_next(&base) {
            return Err(Violation::Sequence);
        }
        if self.suspend.peer_is_silent() {
            return Err(Violation::Suspend);
        }
        if !self.credits.is_ack_valid(&base) {
            return Err(Violation::Acknowledgement);
        }
        if !self.credits.peer_may_send(!payload.is_empty()) {
            return Err(Violation::Credit);
        }
        self.credits.take(&base, Sink::is_update(&base, &message, payload));
        self.resize.receive_used(&mut self.control);
        self.source.acknowledged(base.mseq_ack);
        if invalidated.is_some()
            && !matches!(message, Message::RdmaRdCompl { .. } | Message::RdmaWrCompl { .. })
        {
            return Err(Violation::Invalidation);
        }
        if base.flags.contains(Flags::OOB_PEND) && payload.is_empty() {
            self.sink.payload(&[], base.flags, &mut self.notices)?;
        }
        self.dispatch(base, message, payload, invalidated)?;
        self.adjust();
        self.follow_advice();
        Ok(())
    }

    fn dispatch(
        &mut self,
        base: Base,
        message: Message,
        payload: &[u8],
        invalidated: Option<u32>,
    ) -> Result<(), Violation> {
        let most = usize::from(self.config.max_adverts);
        let Self { source, sink, control, notices, .. } = self;
        match message {
            Message::Hello(_) | Message::HelloAck(_) => return Err(Violation::SetUp),
            Message::Data => sink.payload(payload, base.flags, notices)?,
            Message::SrcAvail(advert) => {
                // One limit for the peer's advertisements of both halves (decision 7).
                let most = most.saturating_sub(source.held());
                sink.src_avail(advert, payload, base.flags, most, notices)?;
            }
            Message::SinkAvail { advert, non_discards } => {
                sink.payload(payload, base.flags, notices)?;
                source.sink_avail(advert, non_discards, most.saturating_sub(sink.offers()))?;
            }
            Message::SendSm => source.send_sm(base.mseq_ack),
            Message::RdmaRdCompl { len } => {
                source.read_completed(len, invalidated, notices)?;
                source.advise(base.flags.contains(Flags::REQ_PIPE));
            }
            Message::RdmaWrCompl { len } => {
                sink.write_completed(len, invalidated, notices)?;
                source.advise(base.flags.contains(Flags::REQ_PIPE));
            }
            Message::ModeChange { half: Half::Receive, mode } => sink.change_mode(mode, notices)?,
            Message::ModeChange { half: Half::Send, mode: Mode::Combined } => source.leave_buffered()?,
            Message::ModeChange { half: Half::Send, .. } => return Err(Violation::ModeChange),
            Message::SrcAvailCancel => sink.src_cancelled(base.mseq, control),
            Message::SinkAvailCancel => source.sink_cancelled(control),
            Message::SinkCancelAck => sink.cancel_acknowledged(base.mseq_ack, notices),
            Message::ChRcvBuf { bytes } => {
                self.resize.requested(bytes, base.mseq_ack, self.credits.posted, self.role, control)?;
            }
            Message::ChRcvBufAck { bytes } => self.resize.answered(bytes)?,
            Message::SuspComm { port } => self.suspend.requested(port, base.mseq_ack, self.role)?,
            Message::SuspCommAck => self.suspend.answered(base.mseq_ack)?,
            Message::DisConn => sink.close(notices)?,
            Message::AbortConn => self.end(End::Reset),
        }
        Ok(())
    }

    /// Policies that follow from a change of both halves.
    fn adjust(&mut self) {
        // Both ends advertise and neither receives: the data is sent in messages, into the ring (draft section 9.2).
        while self.source.adverts() > 0
            && self.sink.offer_is_unwanted()
            && self.sink.force_messages(&mut self.control)
        {}
    }

    /// Changes the mode of the sending half as the peer's hints suggest, when the program sends memory (draft section 12).
    fn follow_advice(&mut self) {
        if self.phase == Phase::Open
            && self.suspend.is_open()
            && let Some(mode) = self.source.preferred_mode()
        {
            self.source.change_mode(mode, &mut self.control);
        }
    }

    /// The current RDMA Read has completed.
    pub fn read_done(&mut self) {
        if !matches!(self.phase, Phase::Ended { .. }) {
            self.sink.read_done(&mut self.control, &mut self.notices);
        }
    }

    /// The stream below has ended, in order or not.
    pub fn stream_ended(&mut self) {
        if self.suspend.expects_end() && self.ended().is_none() {
            return;
        }
        let graceful = self.disconn_sent && self.sink.has_eof();
        if let Phase::Ended { reset, .. } = &mut self.phase {
            *reset = None;
        } else {
            self.end(if graceful { End::Graceful } else { End::Reset });
            if let Phase::Ended { reset, .. } = &mut self.phase {
                *reset = None;
            }
        }
    }

    fn end(&mut self, end: End) {
        if matches!(self.phase, Phase::Ended { .. }) {
            return;
        }
        self.control.clear();
        self.sink.abandon(&mut self.notices);
        // AbortConn revokes the DisConn before it. Without credit, the reset alone must suffice (decision 20).
        let says_so = self.disconn_sent && end != End::Graceful && end != End::Reset;
        let says_so = says_so && self.credits.allows(Need::Control) && !self.suspend.is_silent();
        if says_so {
            self.control.push_back(Message::AbortConn.into());
        }
        let reset = (end != End::Graceful).then_some(says_so);
        self.phase = Phase::Ended { end, reset };
    }

    /// The numbers of our unanswered requests: to withdraw SrcAvails, to withdraw SinkAvails, and to suspend.
    pub(crate) fn unanswered(&self) -> [Option<Seq>; 3] {
        [self.source.cancel_sent(), self.sink.cancel_sent(), self.suspend.sent()]
    }

    /// Ends the connection because the peer has exceeded a limit that needs a clock.
    pub(crate) fn violated(&mut self, violation: Violation) {
        self.end(End::Violated(violation));
    }

    /// Resets the connection: unsent data is discarded.
    pub fn abort(&mut self) {
        self.end(End::Aborted);
    }

    /// Ends the sending direction: DisConn follows all data.
    pub fn shutdown(&mut self) {
        self.closing = true;
    }

    /// Whether [`Self::shutdown`] was called.
    pub fn is_shut_down(&self) -> bool {
        self.closing
    }

    /// The way in which the connection ended, if it has ended.
    pub fn ended(&self) -> Option<End> {
        match self.phase {
            Phase::Ended { end, .. } => Some(end),
            _ => None,
        }
    }

    /// Whether the set-up is complete.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Whether all written data was sent, followed by DisConn after [`Self::shutdown`].
    pub fn is_all_sent(&self) -> bool {
        self.ended().is_some()
            || (self.source.is_empty() && self.control.is_empty() && self.closing == self.disconn_sent)
    }

    /// Whether both directions are closed, and the peer was notified.
    pub fn is_finished(&self) -> bool {
        self.disconnected || self.ended().is_some()
    }

    /// Queues bytes to be sent; returns the number of accepted bytes.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        if self.closing || self.ended().is_some() {
            return 0;
        }
        let room = self.config.send_bytes.saturating_sub(self.source.copied());
        let taken = bytes.get(..bytes.len().min(room)).unwrap_or_default();
        self.source.write(taken);
        taken.len()
    }

    /// Whether [`Self::write`] would take bytes.
    pub fn is_writable(&self) -> bool {
        self.source.copied() < self.config.send_bytes
    }

    /// Queues an out-of-band byte; returns whether it was taken.
    pub fn write_oob(&mut self, byte: u8) -> bool {
        !self.closing && self.ended().is_none() && self.is_writable() && self.source.write_oob(byte)
    }

    /// Queues memory to be sent, by RDMA if the peer requests it. The memory must stay unchanged, and readable by the
    /// peer under its key, until [`Notice::Sent`] or the end of the connection.
    pub fn write_memory(&mut self, piece: Advert) -> u64 {
        let id = self.source.write_memory(piece, &mut self.notices);
        self.follow_advice();
        id
    }

    /// Sends advertised data in messages from now on, because the peer does not read it.
    pub fn cancel_writes(&mut self) {
        self.source.cancel(&mut self.control);
    }

    /// Posts a receive into memory, which must be writable by the peer under its key until the receive ends. Receives into
    /// memory and [`Self::read`] are not mixed: one waits at a time.
    pub fn read_memory(&mut self, piece: Advert) -> u64 {
        let id = self.want(piece, false);
        if self.sink.is_waiting() && piece.len > self.resize.own_bytes && self.suspend.is_open() {
            self.sink.leave_buffered(&mut self.control);
        }
        id
    }

    /// Does the same for a receive that will be withdrawn soon: its memory is not advertised.
    pub fn read_memory_briefly(&mut self, piece: Advert) -> u64 {
        self.want(piece, true)
    }

    /// After the end of the connection, a receive takes the data that has arrived, or is withdrawn.
    fn want(&mut self, piece: Advert, briefly: bool) -> u64 {
        let id = self.sink.want(piece, briefly, &mut self.notices);
        if matches!(self.phase, Phase::Ended { .. }) {
            self.sink.abandon(&mut self.notices);
        }
        id
    }

    /// Withdraws all receives into memory. Each ends with a [`Notice`].
    pub fn cancel_reads(&mut self) {
        self.sink.withdraw(&mut self.control, &mut self.notices);
    }

    /// Takes received bytes. Stops before an out-of-band mark.
    pub fn read(&mut self, out: &mut [u8]) -> usize {
        self.sink.read(out)
    }

    /// Copies received bytes without taking them.
    pub fn peek(&self, out: &mut [u8]) -> usize {
        self.sink.peek(out)
    }

    /// Bytes that wait to be read.
    pub fn buffered(&self) -> usize {
        self.sink.buffered()
    }

    /// A plain reader waits: requests advertised data in messages.
    pub fn want_messages(&mut self) {
        if self.sink.buffered() == 0 && self.sink.has_offer() && !self.suspend.is_silent() {
            self.sink.force_messages(&mut self.control);
        }
    }

    /// Changes the mode of the sending half; returns whether that is a legal transition now (draft section 12).
    pub fn change_mode(&mut self, mode: Mode) -> bool {
        self.phase == Phase::Open && self.source.change_mode(mode, &mut self.control)
    }

    /// Ends Buffered mode of the receiving half; returns whether it was in that mode.
    pub fn leave_buffered(&mut self) -> bool {
        self.sink.leave_buffered(&mut self.control)
    }

    /// The modes of the sending and of the receiving half.
    pub fn modes(&self) -> (Mode, Mode) {
        (self.source.mode, self.sink.mode)
    }

    #[cfg(test)]
    fn source_at_rest(&self) -> (Mode, u32, bool) {
        self.source.rest()
    }

    #[cfg(test)]
    fn sink_at_rest(&self) -> (Mode, u32, bool) {
        self.sink.rest()
    }

    #[cfg(test)]
    fn receives_into_memory(&self) -> u64 {
        self.sink.next_id()
    }

    /// The oldest notice.
    pub fn notice(&mut self) -> Option<Notice> {
        self.notices.pop_front()
    }
}
