//! Send credits (draft sections 10.2 to 10.5): what we may send, what the peer may send, and when to send credit
//! updates.
//!
//! A credit is one receive of the other end. Bufs and MSeqAck of one message together are the last sequence number that
//! its receiver may use, so the state is that of a TCP window: an edge on each side.

use super::seeded::{Mistake, seeded};
use crate::wire::{Base, Flags, Seq};

/// Largest number of consecutive prompts of the accepting end.
const MAX_PROMPTS: u8 = 3;

/// The credit that a message needs (draft section 10.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Raises the peer's credit and has no payload: the last credit suffices.
    Update,
    /// Has no payload.
    Control,
    /// Has payload.
    Payload,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Credits {
    /// The last number sent: LSSeq.
    sent: Seq,
    /// The number of the last sent message other than a credit update: the peer answers it with credit when it has
    /// some.
    sent_real: Seq,
    /// Bufs and MSeqAck as last received.
    peer_bufs: u16,
    peer_ack: Seq,
    /// Receives that the peer spends on the HelloAck although its Bufs may count them (decision 4).
    unseen_hello_ack: bool,
    /// The last number received.
    received: Seq,
    /// The held-back value of MSeqAck (draft section 9.5.4).
    frozen: Option<Seq>,
    /// Posted and unused receives: Bufs.
    pub(super) posted: u16,
    /// Bufs and MSeqAck as last sent.
    told_bufs: u16,
    told_ack: Seq,
    /// The highest number that any of our messages has allowed the peer.
    edge: Seq,
    /// Nothing was sent since the HelloAck arrived, so the peer does not know that the receive used by it was posted
    /// again.
    hello_ack_unanswered: bool,
    /// Credit updates received since we last sent a message. They need no answer.
    updates_received: u16,
    /// Whether this end prompts without a limit: the connecting end only.
    insists: bool,
    /// Prompts since a message other than an update was exchanged.
    prompts: u8,
}

impl Credits {
    pub(super) fn new(posted: u16, unseen_hello_ack: bool, insists: bool) -> Self {
        // The number of Hello and HelloAck (decision 5).
        let set_up = if seeded(Mistake::FirstNumberIsZero) { Seq(u32::MAX) } else { Seq(0) };
        Self {
            sent: set_up,
            sent_real: set_up,
            peer_bufs: 0,
            peer_ack: Seq(0),
            unseen_hello_ack,
            received: set_up,
            frozen: None,
            posted,
            told_bufs: posted,
            told_ack: Seq(0),
            edge: Seq(u32::from(posted)),
            hello_ack_unanswered: insists,
            updates_received: 0,
            insists,
            prompts: 0,
        }
    }

    /// Takes the peer's initial credit from its Hello or HelloAck.
    pub(super) fn greet(&mut self, bufs: u16) {
        self.peer_bufs = bufs;
    }

    /// Messages that we may still send.
    pub(super) fn available(&self) -> i32 {
        let hello_ack = i32::from(self.unseen_hello_ack);
        i32::from(self.peer_bufs) - self.sent.since(self.peer_ack) - hello_ack
    }

    /// Messages that the peer believes it may still send, if it has seen all of ours.
    fn told(&self) -> i32 {
        let hello_ack = i32::from(self.hello_ack_unanswered);
        i32::from(self.told_bufs) - self.received.since(self.told_ack) - hello_ack
    }

    /// Holds MSeqAck back, or releases it.
    pub(super) fn freeze(&mut self, ack: Option<Seq>) {
        self.frozen = ack;
    }

    /// The credit that the next message adds for the peer. While MSeqAck is held back, reposted receives add none.
    fn raise(&self) -> i32 {
        let edge = self.frozen.unwrap_or(self.received).plus(u32::from(self.posted));
        let hello_ack = i32::from(self.hello_ack_unanswered);
        edge.since(self.told_ack.plus(u32::from(self.told_bufs))) + hello_ack
    }

    pub(super) fn allows(&self, need: Need) -> bool {
        let available = self.available();
        match need {
            Need::Update => available >= 1 && self.raise() > 0,
            Need::Control => available >= 2 || self.allows(Need::Update),
            Need::Payload => available >= 3,
        }
    }

    /// Whether an acknowledgement covers `seq`.
    pub(super) fn acknowledged(&self, seq: Seq) -> bool {
        self.peer_ack.since(seq) >= 0
    }

    /// Whether the number in `base` is the next one.
    pub(super) fn is_next(&self, base: &Base) -> bool {
        base.mseq == self.received.next() || seeded(Mistake::NumberUnchecked)
    }

    /// Whether MSeqAck lies between the last one and the last number sent (decision 6).
    pub(super) fn is_ack_valid(&self, base: &Base) -> bool {
        base.mseq_ack.since(self.peer_ack) >= 0
            && (self.sent.since(base.mseq_ack) >= 0 || seeded(Mistake::FirstNumberIsZero))
    }

    /// Whether the peer may send a message now; with payload it must leave two receives (draft section 10.5).
    pub(super) fn peer_may_send(&self, payload: bool) -> bool {
        let needed = if payload { 3 } else { 1 };
        self.posted > 0 && self.edge.since(self.received) >= needed || seeded(Mistake::CreditUnchecked)
    }

    /// Counts a received message.
    pub(super) fn take(&mut self, base: &Base, is_update: bool) {
        self.received = base.mseq;
        self.posted = self.posted.saturating_sub(1);
        self.peer_bufs = base.bufs;
        self.peer_ack = base.mseq_ack;
        self.unseen_hello_ack = false;
        if is_update {
            self.updates_received = self.updates_received.saturating_add(1);
        } else {
            self.prompts = 0;
        }
    }

    /// The base header of the next message, which is counted as sent.
    pub(super) fn stamp(&mut self, flags: Flags, is_update: bool) -> Base {
        self.sent = self.sent.next();
        if !is_update {
            self.sent_real = self.sent;
            self.prompts = 0;
        }
        self.told_bufs = self.posted;
        self.told_ack = self.frozen.unwrap_or(self.received);
        if seeded(Mistake::FirstNumberIsZero) && self.received == Seq(u32::MAX) {
            self.told_ack = Seq(0);
        }
        let edge = self.told_ack.plus(u32::from(self.told_bufs));
        if edge.since(self.edge) > 0 {
            self.edge = edge;
        }
        self.updates_received = 0;
        self.hello_ack_unanswered = false;
        Base { flags, bufs: self.told_bufs, mseq: self.sent, mseq_ack: self.told_ack }
    }

    /// Whether an empty Data message is due, so that the peer has credit.
    ///
    /// It is required when the peer has at most one (draft section 10.4). It is useful when the peer cannot send
    /// payload but could, or when half of `window` is new. Reposted receives that updates had used do not count, so
    /// that two idle ends do not answer each other endlessly.
    pub(super) fn update_due(&self, window: u16) -> bool {
        let (posted, told, raise) = (i32::from(self.posted), self.told(), self.raise());
        let earned = raise - i32::from(self.updates_received);
        let due =
            told <= 1 || (earned >= 1 && told <= 2 && posted >= 3) || earned >= i32::from(window / 2).max(2);
        due && self.allows(Need::Update)
    }

    /// Whether an empty Data message should ask for credit: payload waits with two credits left, and nothing that we sent
    /// makes the peer update them, because all of it were updates. The peer answers, because it then believes that we have
    /// one credit.
    ///
    /// When both ends prompt at the same time, each is left with two credits again, since its answer to the other's prompt
    /// uses one. Therefore the accepting end prompts a few times only before something else is exchanged: enough for prompts
    /// that cross updates, and the connecting end's next one then gets through.
    pub(super) fn prompt_due(&self) -> bool {
        self.available() == 2
            && self.peer_bufs >= 3
            && self.acknowledged(self.sent_real)
            && (self.insists || self.prompts < MAX_PROMPTS)
    }

    /// Records that a prompt is about to be sent.
    pub(super) fn prompt(&mut self) {
        self.prompts = self.prompts.saturating_add(1);
    }

    /// Credit updates received since we last sent a message.
    pub(super) fn updates_received(&self) -> u16 {
        self.updates_received
    }

    pub(super) fn last_sent(&self) -> Seq {
        self.sent
    }
}
