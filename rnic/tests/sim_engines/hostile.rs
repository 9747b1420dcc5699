//! An engine between an honest engine and a hostile host, for hours of virtual time: the honest connection is served,
//! no receive completes with bytes that were not sent, and every queue pair is notified of the end of its connection.

use std::{collections::BTreeMap, net::IpAddr, ops::Add, sync::Arc, time::Duration};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use xwarp_rnic::{
    Access, Memory, Opcode, Operation, Pages, Payload, QpId, RecvRequest, STag, SendFlags, Sge, WcStatus,
    WorkCompletion, WorkRequest,
    ddp::{Header, Msn, Tagged, UNTAGGED_BYTES, Untagged, Versions},
    engine::{ConnectParams, Engine, EngineConfig},
    rdmap::{Control, MessageType},
    rnic::{CmEvent, CompletionRing, PdId, QpAttributes, QueuePairOptions, Registration, RequestId},
    sim::{ipv4, path},
};
use xwarp_tcp::{
    framing::AcceptParams,
    link::Link,
    sim::{Faults, HostileConfig, HostileHost, Node, Purpose, SimLink, Wire, WireConfig, run_for, run_seeds},
    stack::Polling,
    time::Instant,
};

const PORT: u16 = 7;

/// Longest time that the honest host may wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest time from the first sign of a connection's end to its last event.
const LINGER: Duration = Duration::from_mins(10);

/// Turns at one time: more mean that a timer or a queue spins.
const MAX_TURNS: u32 = 500;

/// Largest number of simultaneous connections of the victim.
const GUESTS: usize = 64;

/// Receives of each connection, and bytes of each.
const RECEIVES: usize = 4;
const SLOT: usize = 1024;

/// Bytes of a question and of its answer.
const QUESTION: usize = 1000;

/// The initial content of a receive; the peers send only [`WORD`].
const STALE: u8 = 0xee;
const WORD: u8 = 0x5a;

/// Bytes of a segment of the hostile host's messages.
const UNIT: u32 = 64;

/// A connection of an engine.
#[derive(Debug)]
struct Guest {
    qp: QpId,
    ring: Arc<CompletionRing>,
    /// The first of its receives in the memory.
    slot: usize,
    honest: bool,
    established: bool,
    /// The time at which its end became visible, or was requested.
    ending: Option<Instant>,
}

/// An engine and the memory that all its connections share.
struct Host {
    engine: Engine,
    link: SimLink,
    pd: PdId,
    memory: Memory,
    key: STag,
    guests: BTreeMap<u64, Guest>,
    honest: IpAddr,
    /// Draws the victim's actions on its connections; the honest host only answers.
    dice: Option<SmallRng>,
    /// Messages received on honest connections.
    heard: u64,
    turns: (Instant, u32),
    seen: Seen,
}

/// What a host has seen.
#[derive(Debug, Default)]
struct Seen {
    /// Receives that completed, and connections that ended.
    received: u64,
    ended: u64,
    /// Turns that have postponed work.
    postponed: u64,
}

impl Add for Seen {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            received: self.received + other.received,
            ended: self.ended + other.ended,
            postponed: self.postponed + other.postponed,
        }
    }
}

impl Host {
    fn new(link: SimLink, honest: IpAddr, dice: Option<SmallRng>) -> Self {
        let engine = Engine::new(EngineConfig::default());
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let memory = Memory::anonymous((GUESTS + 1) * RECEIVES * SLOT, Pages::Normal).unwrap();
        memory.fill(0, memory.len(), STALE).unwrap();
        memory.fill(GUESTS * RECEIVES * SLOT, QUESTION, WORD).unwrap();
        let registration =
            Registration { pd, memory: memory.clone(), access: Access::LOCAL_WRITE, base: 0, stream: None };
        let key = engine.rnic().registry().register(registration).unwrap();
        let (guests, turns) = (BTreeMap::new(), (Instant::ZERO, 0));
        Self { engine, link, pd, memory, key, guests, honest, dice, heard: 0, turns, seen: Seen::default() }
    }

    /// A new queue pair with receives, unless there are too many.
    fn guest(&mut self, honest: bool) -> Option<QpId> {
        let taken = |slot: &usize| self.guests.values().any(|guest| guest.slot == *slot);
        let slot = (0..GUESTS).map(|at| at * RECEIVES * SLOT).find(|slot| !taken(slot))?;
        let (cq, ring) = self.engine.rnic().registry().create_cq(256, None).unwrap();
        let options = QueuePairOptions { max_send_wr: 100, ..QueuePairOptions::default() };
        let attributes = QpAttributes { options, ..QpAttributes::new(self.pd, cq, cq) };
        let qp = self.engine.rnic_mut().create_qp(attributes).unwrap();
        for at in 0..RECEIVES {
            self.post_receive(qp, slot + at * SLOT);
        }
        let guest = Guest { qp, ring, slot, honest, established: false, ending: None };
        self.guests.insert(qp.number(), guest);
        Some(qp)
    }

    fn post_receive(&mut self, qp: QpId, offset: usize) {
        self.memory.fill(offset, SLOT, STALE).unwrap();
        let scatter = [Sge { key: self.key, offset: offset as u64, len: SLOT as u32 }];
        let request = RecvRequest { wr_id: offset as u64, scatter: &scatter };
        // The queue pair may have failed in the meantime.
        let _ = self.engine.rnic_mut().post_recv(qp, &request);
    }

    /// Sends a message, unless the queue pair takes none.
    fn send(&mut self, qp: QpId) {
        let offset = (GUESTS * RECEIVES * SLOT) as u64;
        let gather = [Sge { key: self.key, offset, len: QUESTION as u32 }];
        let operation = Operation::Send { invalidate: None };
        let payload = Payload::Gather(&gather);
        let request = WorkRequest { wr_id: 0, operation, payload, flags: SendFlags::SIGNALED };
        let _ = self.engine.rnic_mut().post_send(qp, &request);
    }

    fn answer(&mut self, now: Instant, request: RequestId, remote: IpAddr) {
        let honest = remote == self.honest;
        let refused = !honest && self.dice.as_mut().is_some_and(|dice| dice.random_bool(0.1));
        let qp = if refused { None } else { self.guest(honest) };
        let answered = match qp {
            Some(qp) => self.engine.accept(request, qp, AcceptParams::default()),
            None => self.engine.reject(now, request, &[]),
        };
        // The request may be gone before it is answered.
        if let (Some(qp), Err(_)) = (qp, answered) {
            self.dismiss(qp);
        }
    }

    fn dismiss(&mut self, qp: QpId) {
        let guest = self.guests.remove(&qp.number()).expect("one last event for each queue pair");
        assert!(!guest.honest, "the honest connection ended: {guest:?}");
        let cq = self.engine.rnic().query_qp(qp).unwrap().attributes.send_cq;
        self.engine.rnic_mut().destroy_qp(qp).unwrap();
        self.engine.rnic().registry().destroy_cq(cq).unwrap();
        self.seen.ended += 1;
    }

    fn take_events(&mut self, now: Instant) {
        while let Some(event) = self.engine.next_cm_event() {
            match event {
                CmEvent::ConnectRequest { request, remote, .. } => self.answer(now, request, remote.ip()),
                CmEvent::Established { qp, .. } => {
                    self.guests.get_mut(&qp.number()).expect("a guest").established = true;
                }
                CmEvent::Disconnected { qp } => self.disconnect(now, qp),
                CmEvent::Closed { qp, .. }
                | CmEvent::ConnectError { qp, .. }
                | CmEvent::Rejected { qp, .. } => self.dismiss(qp),
                CmEvent::RequestGone { .. } | CmEvent::Streaming { .. } | CmEvent::StreamReadable { .. } => {}
            }
        }
        while self.engine.next_async_event().is_some() {}
    }

    fn disconnect(&mut self, now: Instant, qp: QpId) {
        let _ = self.engine.disconnect(qp);
        if let Some(guest) = self.guests.get_mut(&qp.number()) {
            guest.ending.get_or_insert(now);
        }
    }

    fn take_completions(&mut self) {
        let mut completions = Vec::new();
        for guest in self.guests.values() {
            let before = completions.len();
            guest.ring.poll(&mut completions, usize::MAX);
            self.heard += completions
                .iter()
                .skip(before)
                .filter(|c| guest.honest && c.opcode == Opcode::Recv && c.status == WcStatus::Success)
                .count() as u64;
        }
        for completion in completions {
            if completion.opcode == Opcode::Recv && completion.status == WcStatus::Success {
                self.check_receive(&completion);
            }
        }
    }

    /// Every byte of the message was sent by the peer.
    fn check_receive(&mut self, completion: &WorkCompletion) {
        let (offset, len) = (completion.wr_id as usize, completion.byte_len as usize);
        let mut bytes = vec![0; len];
        self.memory.read(offset, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == WORD), "bytes that nobody sent: {completion:?} {bytes:x?}");
        self.seen.received += 1;
        let qp = completion.qp;
        self.post_receive(qp, offset);
        if self.dice.is_some() {
            self.send(qp);
        }
    }

    /// The actions of the victim's application on connections of the hostile host.
    fn misbehave(&mut self, now: Instant) {
        let Some(dice) = &mut self.dice else { return };
        if !dice.random_bool(0.1) {
            return;
        }
        let others: Vec<QpId> = self.guests.values().filter(|g| !g.honest).map(|g| g.qp).collect();
        let Some(&qp) = others.get(dice.random_range(0..others.len().max(1))) else { return };
        match dice.random_range(0..20) {
            0..10 => (0..1 << dice.random_range(0..6)).for_each(|_| self.send(qp)),
            10..14 => others.into_iter().for_each(|qp| (0..100).for_each(|_| self.send(qp))),
            14..19 => self.disconnect(now, qp),
            _ => {
                let _ = self.engine.abort(qp);
                self.disconnect(now, qp);
            }
        }
    }

    fn check(&mut self, now: Instant) {
        let turns = if self.turns.0 == now { self.turns.1 + 1 } else { 0 };
        self.turns = (now, turns);
        assert!(turns < MAX_TURNS, "{turns} turns at {now:?}");
        let deadline = self.engine.next_deadline();
        if self.engine.stack().has_postponed() {
            self.seen.postponed += 1;
        } else {
            assert!(deadline.is_none_or(|at| at > now), "a timer at {deadline:?}, and it is {now:?}");
        }
        for guest in self.guests.values() {
            let info = self.engine.connection_info(guest.qp);
            assert!(info.is_some() || !guest.established, "no connection, and no event said so: {guest:?}");
            let age = guest.ending.map_or(Duration::ZERO, |since| now.since(since));
            assert!(age < LINGER, "ending for {age:?}: {guest:?} {info:?}");
        }
    }
}

impl Node for Host {
    fn turn(&mut self, now: Instant) -> bool {
        let received = self.engine.turn(now, &mut self.link);
        self.take_events(now);
        self.take_completions();
        if received {
            self.misbehave(now);
        }
        self.engine.transmit(now, &mut self.link);
        self.take_events(now);
        self.check(now);
        received
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.engine.next_deadline()
    }
}

/// The honest host: a question from time to time, each of which must be answered.
struct Asker {
    host: Host,
    qp: QpId,
    every: Duration,
    next: Instant,
    asked: u64,
}

impl Node for Asker {
    fn turn(&mut self, now: Instant) -> bool {
        if self.next <= now && self.host.guests.get(&self.qp.number()).is_some_and(|g| g.established) {
            self.host.send(self.qp);
            self.asked += 1;
        }
        if self.next <= now {
            assert!(self.host.heard + 1 >= self.asked, "question {} at {now:?}", self.host.heard + 1);
            self.next = now + self.every;
        }
        self.host.turn(now)
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.host.next_deadline().into_iter().chain([self.next]).min()
    }
}

/// A ULPDU of the hostile host, mostly a segment of a Send whose segments have the right number and lengths, but overlap or
/// leave holes. `state` has the message's number, its segments that are left, and its length in units.
fn ulpdu(rng: &mut SmallRng, state: &mut u64, purpose: Purpose) -> Vec<u8> {
    let mut bytes = vec![WORD; UNTAGGED_BYTES + UNIT as usize];
    let errs = purpose == Purpose::Any;
    match rng.random_range(0..200) {
        _ if !errs => {}
        0 => return (0..rng.random_range(0..100)).map(|_| rng.random()).collect(),
        1 => {
            let control = Control { message: MessageType::Write }.byte(Versions::Ietf);
            let (stag, to) = (STag::new(rng.random()), rng.random());
            Header::Tagged(Tagged { last: true, control, stag, to }).emit(Versions::Ietf, &mut bytes);
            return bytes;
        }
        _ => {}
    }
    let (mut msn, mut left, mut units) = (*state as u32, (*state >> 32) as u8, (*state >> 40) as u8);
    if left == 0 {
        units = if errs { rng.random_range(1..5) } else { 1 };
        (msn, left) = (msn + 1, units);
    }
    left -= 1;
    *state = u64::from(msn) | u64::from(left) << 32 | u64::from(units) << 40;
    let in_order = units - 1 - left;
    let unit = if left == 0 || !errs || rng.random_bool(0.7) { in_order } else { rng.random_range(0..units) };
    let control =
        Control { message: MessageType::Send { invalidate: false, solicited: false } }.byte(Versions::Ietf);
    let queue = if errs && rng.random_bool(0.01) { rng.random_range(0..5) } else { 0 };
    let (msn, mo) = (Msn::new(msn), u32::from(unit) * UNIT);
    Header::Untagged(Untagged { last: left == 0, control, word: 0, queue, msn, mo })
        .emit(Versions::Ietf, &mut bytes);
    bytes
}

/// Runs the scenario of a seed, in which no application polls.
fn hostile(seed: u64) -> Seen {
    scenario(seed, Polling::No)
}

/// Runs the scenario of a seed with busy applications. The hostile host answers with messages, which acknowledge those of the victim.
fn hostile_to_busy(seed: u64) -> Seen {
    scenario(seed, Polling::Busy)
}

/// Runs the scenario of a seed. Returns what the victim has seen.
fn scenario(seed: u64, polling: Polling) -> Seen {
    let mut dice = SmallRng::seed_from_u64(seed);
    let (tx_chunks, rx_chunks) = (1 << dice.random_range(8..=10), 1 << dice.random_range(8..=10));
    let faults = Faults { delay: Duration::from_micros(dice.random_range(1..500)), ..Faults::default() };
    let config = WireConfig { seed, tx_chunks, rx_chunks, ..WireConfig::default() };
    let (wire, links) = Wire::switch(&config, &[faults; 3]);
    let Ok([mut victim, mut asker, mut hostile]) = <[SimLink; 3]>::try_from(links) else {
        panic!("three links")
    };
    for (link, number) in [(&mut victim, 1), (&mut asker, 2), (&mut hostile, 3)] {
        // A word to everybody, from which the switch learns where this one is.
        link.inject(&[&[0xff; 6][..], &[2, 0, 0, 0, 0, number], &[0x88, 0xb5]].concat());
    }
    let mut victim = Host::new(victim, ipv4(2), Some(SmallRng::seed_from_u64(seed ^ 0xd1ce)));
    victim.engine.set_polling(polling);
    victim.engine.listen(&mut victim.link, None, PORT, 32, 1500, None).unwrap();
    let mut host = Host::new(asker, ipv4(1), None);
    host.engine.set_polling(polling);
    let qp = host.guest(true).unwrap();
    let there = path([(2, 40_000), (1, PORT)], false, 1500);
    host.engine.connect(Instant::ZERO, &mut host.link, qp, there, ConnectParams::default()).unwrap();
    let next = Instant::ZERO + Duration::from_secs(1);
    let every = Duration::from_millis(dice.random_range(PATIENCE.as_millis() as u64..60_000));
    let mut asker = Asker { host, qp, every, next, asked: 0 };
    let mut hostile = HostileHost::new(
        hostile,
        HostileConfig {
            seed,
            path: path([(3, 1000), (1, PORT)], false, 1500),
            connections: dice.random_range(1..12),
            actions: dice.random_range(200..1500),
            pauses: Duration::from_micros(1)..Duration::from_secs(dice.random_range(1..60)),
            markers: true,
            converses: polling == Polling::Busy,
            ulpdu,
        },
    );
    let mut now = Instant::ZERO;
    let mut pass = |time: Duration, victim: &mut Host, hostile: &mut HostileHost| {
        run_for(&wire, &mut [victim, &mut asker, hostile], &mut now, time);
        now
    };
    while !hostile.is_done() {
        pass(Duration::from_mins(5), &mut victim, &mut hostile);
    }
    let at = pass(Duration::from_secs(1), &mut victim, &mut hostile);
    let left: Vec<QpId> = victim.guests.values().filter(|g| !g.honest).map(|g| g.qp).collect();
    for qp in left {
        victim.disconnect(at, qp);
    }
    pass(LINGER, &mut victim, &mut hostile);
    assert_eq!((victim.guests.len(), victim.engine.stack().connections()), (1, 1), "{:?}", victim.guests);
    victim.link.flush();
    let census = victim.link.census();
    assert_eq!((census.tx_out, census.rx_out), (0, 0), "frames leaked");
    victim.seen
}

#[test]
fn sim_a_hostile_host_gets_no_stale_bytes_delivered_and_leaves_no_queue_pair_behind() {
    run_seeds(hostile);
}

/// The applications are busy, so what TCP does with an acknowledgment is postponed until they have answered.
#[test]
fn sim_a_hostile_host_gets_no_further_when_the_applications_are_busy() {
    run_seeds(hostile_to_busy);
}

#[test]
fn sim_the_hostile_host_gets_messages_through_and_connections_closed() {
    let seen = (1..=4).map(hostile).fold(Seen::default(), Add::add);
    assert!(seen.received > 100 && seen.ended > 20 && seen.postponed == 0, "{seen:?}");
    let seen = (1..=4).map(hostile_to_busy).fold(Seen::default(), Add::add);
    assert!(seen.received > 100 && seen.ended > 20 && seen.postponed > 20, "{seen:?}");
}
