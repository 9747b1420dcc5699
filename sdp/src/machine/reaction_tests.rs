//! The messages that a machine sends in reaction to single messages of a conforming peer.

use super::{Action, Config, Machine, Mode, Notice, model_tests::config};
use crate::wire::{Advert, Base, Flags, Half, Hello, Message, Seq};

/// An accepting machine, and its peer's side of the connection.
pub(super) struct Link {
    pub(super) machine: Machine,
    /// Number of the last message to the machine, and of the last one from it. The HelloAck is number 0.
    pub(super) received: u32,
    sent: u32,
}

impl Link {
    pub(super) fn new() -> Self {
        Self::with(&config(8))
    }

    /// Both ends have the same settings.
    pub(super) fn with(config: &Config) -> Self {
        let (_, hello) = Machine::connect(config);
        let mut link =
            Self { machine: Machine::accept(config, &hello).unwrap(), received: 0, sent: u32::MAX };
        link.drive();
        link
    }

    /// Takes all actions, with the base header and type of the messages among them.
    pub(super) fn drive(&mut self) -> Vec<(Action, Option<(Base, Message)>)> {
        let (mut all, mut out) = (Vec::new(), Vec::new());
        while let Some(action) = self.machine.poll(true, &mut out) {
            let sent = match action {
                Action::Send { memory, .. } => {
                    self.sent = self.sent.wrapping_add(1);
                    out.resize(out.len() + memory.map_or(0, |piece| piece.len as usize), 0);
                    Message::parse(&out).ok().map(|(base, message, _)| (base, message))
                }
                Action::PostReceives { .. } => continue,
                _ => None,
            };
            all.push((action, sent));
        }
        all
    }

    /// Takes all actions; returns the messages among them with their payload's length.
    pub(super) fn messages(&mut self) -> Vec<(Base, Message, usize)> {
        let (mut all, mut out) = (Vec::new(), Vec::new());
        while let Some(action) = self.machine.poll(true, &mut out) {
            if let Action::Send { memory, .. } = action {
                self.sent = self.sent.wrapping_add(1);
                out.resize(out.len() + memory.map_or(0, |piece| piece.len as usize), 0);
                let (base, message, payload) = Message::parse(&out).unwrap();
                all.push((base, message, payload.len()));
            }
        }
        all
    }

    /// Counts a message of the machine that the test has taken itself.
    pub(super) fn sent_one(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Both ends number their messages from the start again.
    pub(super) fn restart(&mut self) {
        (self.received, self.sent) = (0, u32::MAX);
    }

    /// The base header of the peer's next message.
    pub(super) fn base(&self) -> Base {
        Base { flags: Flags::empty(), bufs: 8, mseq: Seq(self.received + 1), mseq_ack: Seq(self.sent) }
    }

    /// The peer sends a message with this header, and invalidates `key`.
    pub(super) fn give(&mut self, base: Base, message: Message, payload: &[u8], key: Option<u32>) {
        let mut bytes = Vec::new();
        message.emit(base, payload.len() as u32, &mut bytes);
        bytes.extend(payload);
        self.machine.receive(&bytes, key);
        self.received += 1;
    }

    /// The peer sends a valid message.
    pub(super) fn take(&mut self, message: Message, flags: Flags, payload: &[u8]) {
        self.give(Base { flags, ..self.base() }, message, payload, None);
        assert_eq!(self.machine.ended(), None);
    }
}

pub(super) fn memory(len: u32, stag: u32) -> Advert {
    Advert { len, stag, offset: 0 }
}

#[test]
fn sdp_s8_1_1_our_reads_are_at_most_what_the_peer_serves() {
    let hello = Hello { max_adverts: 1, desired_bytes: 64, buffer_bytes: 64, ird: 3, ord: 9 };
    let mut bytes = Vec::new();
    Message::Hello(hello).emit(Base { bufs: 3, ..Base::default() }, 0, &mut bytes);
    let machine = Machine::accept(&Config { ord: 16, ird: 5, ..config(3) }, &bytes).unwrap();
    assert_eq!((machine.ord(), machine.ird()), (3, 5));
}

#[test]
fn sdp_s8_2_2_an_abort_after_disconn_sends_abort_conn() {
    let mut link = Link::new();
    link.machine.shutdown();
    assert!(matches!(link.drive()[..], [(_, Some((_, Message::DisConn)))]));
    link.machine.abort();
    let actions = link.drive();
    assert!(
        matches!(
            actions[..],
            [
                (Action::Send { solicited: true, .. }, Some((_, Message::AbortConn))),
                (Action::Reset { flush: true }, None)
            ]
        ),
        "{actions:?}"
    );
    let mut link = Link::new();
    link.machine.abort();
    assert!(matches!(link.drive()[..], [(Action::Reset { flush: false }, None)]));
}

#[test]
fn sdp_s9_3_buffers_that_fit_a_message_are_not_advertised() {
    for (len, advertised) in [(37, false), (38, true)] {
        let mut link = Link::new();
        let pipelined = Message::ModeChange { half: Half::Receive, mode: Mode::Pipelined };
        link.take(pipelined, Flags::empty(), b"");
        link.machine.read_memory(memory(len, 5));
        let sent = link.drive();
        let is_advert = |sent: &(Action, Option<(Base, Message)>)| matches!(sent.1, Some((_, Message::SinkAvail { advert, .. })) if advert == memory(len, 5));
        assert_eq!(sent.iter().any(is_advert), advertised, "{len} bytes: {sent:?}");
    }
}

#[test]
fn sdp_s9_4_payload_of_a_sink_avail_is_taken_and_its_buffer_used_unless_stale() {
    for (non_discards, stale) in [(0, false), (1, true)] {
        let mut link = Link::new();
        assert!(link.machine.change_mode(Mode::Pipelined));
        link.drive();
        let sink_avail = Message::SinkAvail { advert: memory(50, 9), non_discards };
        link.take(sink_avail, Flags::empty(), b"abc");
        let mut bytes = [0; 8];
        assert_eq!(link.machine.read(&mut bytes), 3);
        assert_eq!(&bytes[..3], b"abc");
        link.machine.write_memory(memory(40, 5));
        let first = link.drive()[0];
        let written = matches!(first.0, Action::Write { remote, .. } if remote == memory(40, 9));
        let advertised = matches!(first.1, Some((_, Message::SrcAvail(_))));
        assert_eq!((written, advertised), (!stale, stale), "{first:?}");
    }
}

/// The sink requests Pipelined mode while more receives into memory wait.
#[test]
fn sdp_s6_1_2_req_pipe_is_set_while_receives_wait() {
    let mut link = Link::new();
    link.machine.read_memory(memory(40, 5));
    link.machine.read_memory(memory(40, 6));
    // The payload of the SrcAvail completes the first receive.
    for (stag, flags) in [(70, Flags::REQ_PIPE), (71, Flags::empty())] {
        link.machine.read_memory(memory(40, 7));
        link.take(Message::SrcAvail(memory(41, stag)), Flags::empty(), b"x");
        if flags.is_empty() {
            link.machine.cancel_reads();
            link.machine.read_memory(memory(40, 8));
        }
        assert!(link.drive().iter().any(|(action, _)| matches!(action, Action::Read { .. })));
        link.machine.read_done();
        let sent = link.drive();
        let completion = sent.iter().find_map(|(_, sent)| match sent {
            Some((base, Message::RdmaRdCompl { len: 40 })) => Some(base.flags),
            _ => None,
        });
        assert_eq!(completion, Some(flags), "{sent:?}");
    }
}

/// The source follows the hint in RdmaRdCompl only, and only while it has more memory to send.
#[test]
fn sdp_s6_1_2_req_pipe_is_examined_in_completions_only() {
    for (more, flags, changes) in
        [(true, Flags::REQ_PIPE, true), (true, Flags::empty(), false), (false, Flags::REQ_PIPE, false)]
    {
        let mut link = Link::new();
        link.machine.write_memory(memory(100, 5));
        if more {
            link.machine.write_memory(memory(100, 6));
        }
        link.drive();
        link.take(Message::Data, Flags::REQ_PIPE, b"x");
        assert_eq!(link.machine.modes().0, Mode::Combined, "REQ_PIPE in a Data message");
        // The SrcAvail has carried 5 bytes in a message of 37.
        link.take(Message::RdmaRdCompl { len: 95 }, flags, b"");
        assert_eq!(link.machine.modes().0 == Mode::Pipelined, changes, "{more} {flags:?}");
    }
}

#[test]
fn a_receive_after_the_end_is_withdrawn() {
    let mut link = Link::new();
    link.machine.abort();
    let ids = [link.machine.read_memory(memory(100, 5)), link.machine.read_memory_briefly(memory(100, 6))];
    let withdrawn: Vec<_> = std::iter::from_fn(|| link.machine.notice()).collect();
    assert_eq!(withdrawn, ids.map(|id| Notice::Withdrawn { id }));
}

/// The next actions: `None` for a message, and the number of receives otherwise.
fn next_actions(machine: &mut Machine) -> Vec<Option<u16>> {
    let mut out = Vec::new();
    let actions = std::iter::from_fn(|| machine.poll(true, &mut out));
    let known = actions.map(|action| match action {
        Action::PostReceives { count, .. } => Some(count),
        Action::Send { .. } => None,
        other => panic!("{other:?}"),
    });
    known.collect()
}

#[test]
fn receives_are_posted_several_at_a_time_while_credit_suffices() {
    let mut link = Link::new();
    for posted in [vec![], vec![Some(2)], vec![]] {
        link.take(Message::Data, Flags::empty(), b"x");
        assert_eq!(next_actions(&mut link.machine), posted);
    }
    // One is due. The receive that the peer's update uses must not wait.
    link.take(Message::Data, Flags::empty(), b"");
    assert_eq!(next_actions(&mut link.machine), [Some(2)]);
    let mut link = Link::new();
    link.take(Message::Data, Flags::empty(), b"");
    assert_eq!(next_actions(&mut link.machine), [Some(1)]);
    // With little credit of our own, one does not wait either.
    let mut link = Link::new();
    link.give(Base { bufs: 2, ..link.base() }, Message::Data, b"x", None);
    assert_eq!(next_actions(&mut link.machine), [Some(1)]);
}

#[test]
fn payload_does_not_wait_for_receives_that_the_peer_does_not_need() {
    let mut link = Link::new();
    (0..2).for_each(|_| link.take(Message::Data, Flags::empty(), b"x"));
    link.machine.write(b"y");
    assert_eq!(next_actions(&mut link.machine), [None, Some(2)]);
    link.sent_one();

    (0..4).for_each(|_| link.take(Message::Data, Flags::empty(), b"x"));
    link.machine.write(b"y");
    assert_eq!(next_actions(&mut link.machine), [Some(4), None], "half of all are used");
    link.sent_one();

    (0..2).for_each(|_| link.take(Message::Data, Flags::empty(), b"x"));
    link.machine.write(b"y");
    assert!(link.machine.suspend(4791));
    let actions = next_actions(&mut link.machine);
    assert!(matches!(actions[..], [Some(3..), None, ..]), "SuspComm needs its receives: {actions:?}");
}

#[test]
fn actions_that_somebody_waits_for_cannot_wait() {
    let after = |change: &dyn Fn(&mut Link)| {
        let mut link = Link::new();
        change(&mut link);
        link.machine.can_wait()
    };
    let data = |link: &mut Link| link.take(Message::Data, Flags::empty(), b"x");
    assert!(after(&data));
    assert!(after(&|link| (0..3).for_each(|_| data(link))));
    assert!(!after(&|link| (0..4).for_each(|_| data(link))), "the peer needs credit");
    assert!(!after(&|link| _ = link.machine.write(b"x")));
    assert!(!after(&|link| _ = link.machine.read_memory(memory(100, 1))));
    assert!(!after(&|link| link.machine.shutdown()));
    assert!(!after(&|link| link.machine.abort()));
    assert!(!after(&|link| _ = link.machine.suspend(4791)));
    assert!(!after(&|link| link.take(Message::SrcAvail(memory(100, 1)), Flags::empty(), b"x")));
    assert!(!after(&|link| link.take(Message::Data, Flags::OOB_PEND, b"x")));
    assert!(!after(&|link| link.take(Message::ChRcvBuf { bytes: 64 }, Flags::empty(), b"")));
    assert!(!after(&|link| link.take(Message::DisConn, Flags::empty(), b"")));
}
