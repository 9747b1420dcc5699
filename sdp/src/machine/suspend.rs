//! Suspension of communication, and its continuation over another stream below (draft section 13): socket duplication and
//! managed failover.
//!
//! The asking end finishes its transfers, sends SuspComm and is silent. The other end finishes its own transfers,
//! answers, closes the stream below and connects to the port in SuspComm. Data that no completion message has reported
//! counts as not transferred and is sent again; the streams of both directions and out-of-band data are unchanged.

use super::{
    Action, Control, Credits, Machine, Phase, Role, Violation,
    seeded::{Mistake, seeded},
    source::Payload,
};
use crate::wire::{Message, Seq};

/// Receives that are posted before SuspComm beyond the usual number, so that the peer has credit for its completions and its
/// answer while we are silent: one for each advertisement, and four.
pub const FAREWELL_RECEIVES: u16 = super::MAX_ADVERTS as u16 + 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    None,
    /// SuspComm was sent with this number.
    Asked(Seq),
    /// The peer's SuspComm has to be answered.
    Answering {
        port: u16,
    },
    /// SuspCommAck was sent.
    Answered {
        port: u16,
        /// [`Action::Reconnect`] is due.
        due: bool,
    },
    /// The peer has answered and will connect again.
    Suspended,
}

/// The state of a suspension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Suspend {
    step: Step,
    /// The port of our unanswered SuspComm.
    wanted: Option<u16>,
}

impl Suspend {
    pub(super) fn new() -> Self {
        Self { step: Step::None, wanted: None }
    }

    /// The peer has suspended communication with the machine that was saved.
    pub(super) fn restore(&mut self) {
        self.step = Step::Suspended;
    }

    /// Whether transfers may begin.
    pub(super) fn is_open(&self) -> bool {
        self.step == Step::None && self.wanted.is_none()
    }

    /// Whether only messages for the suspension are sent.
    pub(super) fn is_silent(&self) -> bool {
        self.step != Step::None
    }

    /// Whether more receives are posted than usual.
    pub(super) fn prepares(&self) -> bool {
        self.step == Step::None && self.wanted.is_some()
    }

    /// Whether the peer must not send a message.
    pub(super) fn peer_is_silent(&self) -> bool {
        matches!(self.step, Step::Answering { .. } | Step::Answered { .. } | Step::Suspended)
    }

    /// Whether the end of the stream below belongs to the suspension.
    pub(super) fn expects_end(&self) -> bool {
        matches!(self.step, Step::Answered { .. } | Step::Suspended)
    }

    /// The number of our SuspComm, until it is answered.
    pub(super) fn sent(&self) -> Option<Seq> {
        if let Step::Asked(seq) = self.step { Some(seq) } else { None }
    }

    /// The peer's SuspComm, whose message acknowledges `ack`.
    pub(super) fn requested(&mut self, port: u16, ack: Seq, role: Role) -> Result<(), Violation> {
        if port == 0 {
            return Err(Violation::Suspend);
        }
        if let Step::Asked(seq) = self.step {
            if ack.since(seq) >= 0 {
                // The peer has seen ours and should be silent.
                return Err(Violation::Suspend);
            }
            // Both ends have asked: the accepting end of the first set-up disregards the other's request, which is
            // repeated after ours (draft section 13.1.2).
            if role == Role::Accepting && !seeded(Mistake::BothAnswerSuspComm) {
                return Ok(());
            }
        }
        self.step = Step::Answering { port };
        Ok(())
    }

    pub(super) fn answered(&mut self, ack: Seq) -> Result<(), Violation> {
        match self.step {
            Step::Asked(seq) if ack.since(seq) >= 0 => {
                self.step = Step::Suspended;
                self.wanted = None;
                Ok(())
            }
            _ => Err(Violation::Suspend),
        }
    }
}

/// Whether a message reports a completed transfer. Only these are sent before SuspCommAck.
fn is_completion(control: &Control) -> bool {
    matches!(control.message, Message::RdmaRdCompl { .. } | Message::RdmaWrCompl { .. })
}

impl Machine {
    /// Asks the peer to suspend communication and to connect again to `port` of the same address. Returns whether that is
    /// possible now. [`Self::is_suspended`] is true when the peer has done so.
    pub fn suspend(&mut self, port: u16) -> bool {
        let may = self.phase == Phase::Open && self.suspend.is_open() && !self.disconnected && port != 0;
        if may {
            self.suspend.wanted = Some(port);
        }
        may
    }

    /// Whether the program has asked to suspend communication, and the peer has not answered.
    pub fn asks_to_suspend(&self) -> bool {
        self.suspend.wanted.is_some()
    }

    /// Whether the peer has suspended communication at our request: the machine continues with [`Self::resume`].
    pub fn is_suspended(&self) -> bool {
        self.suspend.step == Step::Suspended && self.ended().is_none()
    }

    /// The actions of a suspension, when current transfers are complete and nothing else waits to be sent.
    pub(super) fn poll_suspend(&mut self, out: &mut Vec<u8>) -> Option<Action> {
        if let Step::Answered { port, due: true } = self.suspend.step {
            self.suspend.step = Step::Answered { port, due: false };
            return Some(Action::Reconnect { port });
        }
        if self.sink.is_reading() || !self.control.is_empty() {
            return None;
        }
        match (self.suspend.step, self.suspend.wanted) {
            // The last message over this stream below may use the last credit.
            (Step::Answering { port }, _) if self.credits.available() >= 1 => {
                self.suspend.step = Step::Answered { port, due: true };
                Some(self.send(Message::SuspCommAck, Payload::default(), None, out))
            }
            (Step::None, Some(port)) if self.credits.available() >= 2 => {
                self.suspend.step = Step::Asked(self.credits.last_sent().next());
                Some(self.send(Message::SuspComm { port }, Payload::default(), None, out))
            }
            _ => None,
        }
    }

    /// The part of [`Machine::poll`] while the peer's SuspComm is being answered, or ours was sent.
    pub(super) fn poll_silent(&mut self, out: &mut Vec<u8>) -> Option<Action> {
        if let Step::Answering { .. } = self.suspend.step {
            self.control.retain(is_completion);
            if let Some(action) = self.poll_control(out) {
                return Some(action);
            }
        }
        self.poll_suspend(out)
    }

    /// Begins the connection to the port of [`Action::Reconnect`]: returns the Hello. [`Self::receives_to_post`] receives are
    /// posted before it is sent.
    pub fn reconnect(&mut self) -> Option<Vec<u8>> {
        if !matches!(self.suspend.step, Step::Answered { due: false, .. }) || self.ended().is_some() {
            return None;
        }
        self.start_again(Role::Connecting);
        Some(self.hello())
    }

    /// Continues with the peer's new connection, for its Hello. [`Self::receives_to_post`] receives are posted before
    /// the HelloAck is sent.
    pub fn resume(&mut self, hello: &[u8]) -> Result<(), Violation> {
        let (base, Message::Hello(hello), _) = Message::parse(hello)? else { return Err(Violation::SetUp) };
        if !self.is_suspended() {
            return Err(Violation::Suspend);
        }
        self.start_again(Role::Accepting);
        self.config.ord = self.config.ord.min(hello.ird);
        self.greet(base.bufs, hello.buffer_bytes, hello.max_adverts)
    }

    /// Gives memory that is being sent its key on the new connection.
    pub fn rekey_write(&mut self, id: u64, stag: u32) {
        self.source.rekey(id, stag);
    }

    /// Gives memory that is received into its key on the new connection.
    pub fn rekey_read(&mut self, id: u64, stag: u32) {
        self.sink.rekey(id, stag);
    }

    /// Resets numbers, modes and advertisements to their values after the first set-up.
    fn start_again(&mut self, role: Role) {
        self.link_role = role;
        self.phase = Phase::Acking;
        self.suspend.step = Step::None;
        self.credits = Credits::new(self.config.buffers, role == Role::Accepting, role == Role::Connecting);
        self.control.clear();
        self.resize.start_again();
        self.source.start_again();
        self.sink.start_again(&mut self.notices);
    }
}
