//! A machine whose peer breaks the protocol: the connection ends with the right violation, nothing panics or grows
//! without bound, and only the program's memory is accessed.

use super::{
    Action, Config, End, Machine, Mode, Notice, Violation,
    model_tests::{Item, SCENARIOS, SINK_KEYS, WANT_BYTES, World, config},
    reaction_tests::Link,
    seeded::{MISTAKE, Mistake},
};
use crate::wire::{Advert, Base, Flags, Half, Hello, HelloAck, Message, Seq, WireError};

/// Number of random walks through each scenario.
const WALKS: u64 = 3;
const MAX_STEPS: usize = 60;
/// Largest number of actions that one message may cause.
const MAX_ACTIONS: usize = 40;
/// Messages without payload that may wait: see `MAX_CONTROL` of `transmit`, and a message for each receive that was posted
/// before.
const MAX_CONTROL: usize = 64 + 16;

const ADVERT: Advert = Advert { len: 100, stag: 7, offset: 0 };

/// A connection with larger limits.
struct Victim(Link);

impl Victim {
    fn new() -> Self {
        let mut victim = Self(Link::with(&Config { max_adverts: 2, ..config(8) }));
        victim.drive();
        victim
    }

    fn drive(&mut self) {
        self.0.drive();
        while self.0.machine.notice().is_some() {}
    }

    /// The peer sends `message` with `payload`, and valid numbers.
    fn take(&mut self, message: Message, payload: &[u8]) -> &mut Self {
        let base = self.0.base();
        self.take_with(base, message, payload, None)
    }

    fn take_with(&mut self, base: Base, message: Message, payload: &[u8], key: Option<u32>) -> &mut Self {
        self.0.give(base, message, payload, key);
        self.drive();
        self
    }

    fn violation(&self) -> Option<Violation> {
        match self.0.machine.ended() {
            Some(End::Violated(violation)) => Some(violation),
            _ => None,
        }
    }
}

/// Messages with their payload.
type Row<'a> = &'a [(Message, &'a [u8])];

fn src_avail() -> Message {
    Message::SrcAvail(ADVERT)
}

fn sink_avail() -> Message {
    Message::SinkAvail { advert: ADVERT, non_discards: 0 }
}

fn mode_change(half: Half, mode: Mode) -> Message {
    Message::ModeChange { half, mode }
}

/// Every type of message, when nothing was advertised, cancelled, requested or closed.
#[test]
fn sdp_s8_2_2_messages_in_the_wrong_state_are_named() {
    let hello = Hello { max_adverts: 1, desired_bytes: 64, buffer_bytes: 64, ird: 1, ord: 1 };
    let hello_ack = HelloAck { max_adverts: 1, buffer_bytes: 64, ird: 1, ord: 1 };
    let cases = [
        (Message::Hello(hello), Some(Violation::SetUp)),
        (Message::HelloAck(hello_ack), Some(Violation::SetUp)),
        (Message::DisConn, None),
        (Message::AbortConn, None),
        (Message::SendSm, None),
        (Message::RdmaWrCompl { len: 1 }, Some(Violation::Completion)),
        (Message::RdmaRdCompl { len: 1 }, Some(Violation::Completion)),
        (mode_change(Half::Receive, Mode::Buffered), None),
        (mode_change(Half::Receive, Mode::Combined), Some(Violation::ModeChange)),
        (mode_change(Half::Receive, Mode::Pipelined), None),
        (mode_change(Half::Send, Mode::Buffered), Some(Violation::ModeChange)),
        (mode_change(Half::Send, Mode::Combined), Some(Violation::ModeChange)),
        (mode_change(Half::Send, Mode::Pipelined), Some(Violation::ModeChange)),
        (Message::SrcAvailCancel, None),
        (Message::SinkAvailCancel, None),
        (Message::SinkCancelAck, None),
        (Message::ChRcvBuf { bytes: 100 }, None),
        (Message::ChRcvBufAck { bytes: 100 }, Some(Violation::Resize)),
        (Message::SuspComm { port: 5000 }, None),
        (Message::SuspComm { port: 0 }, Some(Violation::Suspend)),
        (Message::SuspCommAck, Some(Violation::Suspend)),
        (sink_avail(), Some(Violation::AdvertMode)),
        (src_avail(), Some(Violation::AdvertMode)),
        (Message::Data, None),
    ];
    for (message, violation) in cases {
        assert_eq!(Victim::new().take(message, b"").violation(), violation, "{message:?}");
    }
}

#[test]
fn sdp_s8_2_2_sequences_of_messages_that_are_no_protocol_are_named() {
    let pipelined = mode_change(Half::Receive, Mode::Pipelined);
    let buffered = mode_change(Half::Receive, Mode::Buffered);
    let suspend = Message::SuspComm { port: 5000 };
    let cases: [(Row<'_>, Violation); 12] = [
        (&[(suspend, b""), (Message::Data, b"")], Violation::Suspend),
        (&[(suspend, b""), (suspend, b"")], Violation::Suspend),
        (&[(Message::DisConn, b""), (Message::Data, b"x")], Violation::AfterDisConn),
        (&[(Message::DisConn, b""), (Message::DisConn, b"")], Violation::AfterDisConn),
        (&[(Message::DisConn, b""), (src_avail(), b"x")], Violation::AfterDisConn),
        (&[(src_avail(), b"x"), (Message::DisConn, b"")], Violation::EarlyDisConn),
        (&[(src_avail(), b"x"), (Message::Data, b"x")], Violation::DataBesideSrcAvail),
        (&[(src_avail(), b"x"), (src_avail(), b"x")], Violation::AdvertMode),
        (&[(src_avail(), b"x"), (buffered, b"")], Violation::ModeChange),
        (&[(buffered, b""), (src_avail(), b"x")], Violation::AdvertMode),
        (&[(pipelined, b""), (src_avail(), b"x")], Violation::AdvertMode),
        (
            &[(pipelined, b""), (src_avail(), b""), (src_avail(), b""), (src_avail(), b"")],
            Violation::TooManyAdverts,
        ),
    ];
    for (messages, violation) in cases {
        let mut victim = Victim::new();
        for (message, payload) in messages {
            assert_eq!(victim.violation(), None, "{messages:?}");
            victim.take(*message, payload);
        }
        assert_eq!(victim.violation(), Some(violation), "{messages:?}");
    }
}

#[test]
fn sdp_s6_1_wrong_numbers_lengths_and_keys_are_named() {
    let base = Victim::new().0.base();
    let cases = [
        (Base { mseq: Seq(0), ..base }, None, Violation::Sequence),
        (Base { mseq: Seq(2), ..base }, None, Violation::Sequence),
        (Base { mseq_ack: Seq(1 << 31), ..base }, None, Violation::Acknowledgement),
        (Base { mseq_ack: base.mseq_ack.next(), ..base }, None, Violation::Acknowledgement),
        (Base { flags: Flags::OOB_PRES, ..base }, None, WireError::OutOfBand.into()),
        (base, Some(7), Violation::Invalidation),
    ];
    for (base, key, violation) in cases {
        let mut victim = Victim::new();
        assert_eq!(victim.take_with(base, Message::Data, b"", key).violation(), Some(violation), "{base:?}");
    }
    for (bytes, violation) in [
        (&b""[..], WireError::Short),
        (&[0xff; 16], WireError::Length),
        (&[0x40, 0, 0, 8, 0, 0, 0, 16, 0, 0, 0, 1, 0, 0, 0, 0], WireError::Identifier),
    ] {
        let mut victim = Victim::new();
        victim.0.machine.receive(bytes, None);
        assert_eq!(victim.violation(), Some(violation.into()));
    }
}

/// Payload uses all credit but two. The program does not read and our answers are not sent, so no more credit is
/// granted.
#[test]
fn sdp_s10_5_messages_without_credit_are_named() {
    for (payload, most) in [(&b"x"[..], 6), (b"", 8)] {
        let mut victim = Victim::new();
        let mut bytes = Vec::new();
        let mut taken = 0;
        while victim.0.machine.ended().is_none() {
            victim.0.give(victim.0.base(), Message::Data, payload, None);
            // The receives are posted again, but no message grants the credit.
            while victim.0.machine.poll(false, &mut bytes).is_some() {}
            taken += 1;
            assert!(taken < 100, "no end");
        }
        assert_eq!((victim.violation(), taken), (Some(Violation::Credit), most + 1));
    }
}

/// An endless sequence of each kind of message that may legally be repeated.
#[test]
fn sdp_s16_nothing_grows_by_endless_messages() {
    let rows: [&[Message]; 6] = [
        &[Message::Data],
        &[Message::SendSm],
        &[Message::SrcAvailCancel, Message::SinkAvailCancel, Message::SinkCancelAck],
        &[Message::ChRcvBuf { bytes: 37 }, Message::ChRcvBuf { bytes: 1 << 31 }],
        &[mode_change(Half::Receive, Mode::Pipelined), mode_change(Half::Receive, Mode::Combined)],
        &[mode_change(Half::Receive, Mode::Pipelined), src_avail(), Message::SrcAvailCancel],
    ];
    for (row, sends) in rows.into_iter().flat_map(|row| [(row, true), (row, false)]) {
        let mut victim = Victim::new();
        let mut out = Vec::new();
        for (number, message) in row.iter().cycle().take(5000).enumerate() {
            if row.contains(&src_avail()) && number > 0 && matches!(message, Message::ModeChange { .. }) {
                // Pipelined already.
                continue;
            }
            victim.0.give(victim.0.base(), *message, b"", None);
            if sends {
                victim.drive();
            } else {
                while victim.0.machine.poll(false, &mut out).is_some() {}
            }
            check_bounds(&victim.0.machine);
        }
        let ended = victim.violation();
        let expected = if sends { None } else { Some(Violation::Credit) };
        assert_eq!(ended, expected, "{row:?}");
    }
}

fn check_bounds(machine: &Machine) {
    let config = &machine.config;
    assert!(machine.control.len() <= MAX_CONTROL, "{} messages wait", machine.control.len());
    let most = config.receive_bytes + usize::from(config.buffers) * config.most_buffer_bytes as usize;
    assert!(machine.buffered() <= most, "{} bytes wait", machine.buffered());
    let adverts = machine.sink.offers() + machine.source.held();
    assert!(adverts <= config.max_adverts.into(), "{adverts} advertisements");
    let receives = 2 * config.buffers + 1 + super::suspend::FAREWELL_RECEIVES;
    assert!(machine.credits.posted <= receives, "{} receives", machine.credits.posted);
}

/// Passes a message to a copy of an end of the model, and checks the machine's reaction.
fn attack(machine: &Machine, sent: u64, bytes: &[u8], key: Option<u32>) {
    let mut machine = machine.clone();
    let mut out = Vec::new();
    machine.receive(bytes, key);
    for step in 0.. {
        assert!(step < MAX_ACTIONS, "no end of actions");
        let Some(action) = machine.poll(true, &mut out) else { break };
        match action {
            Action::Read { remote, local } => {
                assert!(local.stag >= SINK_KEYS && local.len <= WANT_BYTES && local.len == remote.len);
            }
            Action::Write { local, .. } | Action::Send { memory: Some(local), .. } => {
                assert!(local.stag == 0 && local.offset + u64::from(local.len) <= sent);
            }
            _ => {}
        }
        check_bounds(&machine);
    }
    while let Some(notice) = machine.notice() {
        if let Notice::Received { len, copied, .. } = notice {
            assert!(len <= WANT_BYTES && copied.len() <= len as usize);
        }
    }
    if let Some(End::Violated(violation)) = machine.ended() {
        assert!(violation.counter().starts_with("sdp_"));
        let before = machine.clone();
        machine.receive(bytes, key);
        assert!(machine == before, "a message after the end has an effect");
    }
}

/// Every field of every message of random walks through all scenarios, each with other values, and messages of all types.
#[test]
fn sdp_s16_a_peer_that_mutates_its_messages_reaches_nothing() {
    let mut attacks = 0;
    for (number, (_, scripts)) in SCENARIOS.iter().enumerate() {
        for walk in 0..WALKS {
            let mut world = World::new(3, *scripts).unwrap();
            let mut random = walk * 100 + number as u64;
            for _ in 0..MAX_STEPS {
                for (wire, peer) in world.wires.iter().zip(&world.peers) {
                    let Some(Item::Message(bytes, key)) = wire.front() else { continue };
                    attacks += mutate(bytes, *key, |bytes, key| attack(&peer.machine, peer.sent, bytes, key));
                }
                let mut next = world.successors().unwrap();
                if next.is_empty() {
                    break;
                }
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                world = next.swap_remove((random >> 33) as usize % next.len()).1;
            }
        }
    }
    assert!(attacks > 100_000, "only {attacks} messages: do the walks still run?");
}

/// Calls `attack` with each mutation of a message; returns their number.
fn mutate(bytes: &[u8], key: Option<u32>, attack: impl Fn(&[u8], Option<u32>)) -> usize {
    let mut count = 0;
    let mut run = |bytes: &[u8], key| {
        attack(bytes, key);
        count += 1;
    };
    for at in 0..bytes.len().min(36) {
        let byte = bytes[at];
        for value in [0, 1, 0x7f, 0x80, 0xff, byte ^ 1, byte.wrapping_add(1), byte.wrapping_sub(1)] {
            let mut mutated = bytes.to_vec();
            mutated[at] = value;
            run(&mutated, key);
        }
    }
    run(&bytes[..bytes.len() - 1], key);
    run(&[bytes, b"x"].concat(), key);
    for key in [None, Some(0), Some(SINK_KEYS), Some(u32::MAX)] {
        run(bytes, key);
        // All types, with extended headers of every existing length.
        for mid in (0..0x10).chain(0xfd..=0xff) {
            for len in [16, 20, 24, 32, 33, 36, 37] {
                let mut other = bytes.to_vec();
                other.resize(len, 1);
                other[0] = mid;
                other[4..8].copy_from_slice(&(len as u32).to_be_bytes());
                run(&other, key);
            }
        }
    }
    count
}

/// Each of these tests fails when a check is left out.
#[test]
fn sdp_s16_missing_checks_are_found() {
    let cases: [(Mistake, fn()); 5] = [
        (Mistake::NumberUnchecked, sdp_s6_1_wrong_numbers_lengths_and_keys_are_named),
        (Mistake::CreditUnchecked, sdp_s10_5_messages_without_credit_are_named),
        (Mistake::CompletionUnchecked, sdp_s16_a_peer_that_mutates_its_messages_reaches_nothing),
        (Mistake::AdvertsUnbounded, sdp_s8_2_2_sequences_of_messages_that_are_no_protocol_are_named),
        (Mistake::EndIgnored, sdp_s16_a_peer_that_mutates_its_messages_reaches_nothing),
    ];
    for (mistake, test) in cases {
        MISTAKE.set(Some(mistake));
        let found = std::panic::catch_unwind(test).is_err();
        MISTAKE.set(None);
        assert!(found, "{mistake:?} was not found");
    }
}
