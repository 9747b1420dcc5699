//! The engine, the peer, and the wire between them, in virtual time.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use xwarp_rnic::{
    Access, AsyncEvent, Memory, Operation, Pages, Payload, QpId, QpState, RecvRequest, Remote, STag,
    SendFlags, Sge, WcStatus, WorkCompletion, WorkRequest,
    engine::{self, Engine, EngineConfig},
    rnic::{CompletionRing, CqId, PdId, QpAttributes, Registration},
    sim::{self, Station},
};
use xwarp_tcp::{
    framing::AcceptParams,
    link::Link,
    mpa::MpaConfig,
    secret::Secret,
    sim::{Faults, Node, SimLink, Wire, WireConfig, run},
    stack::{ConnectParams, Stack, StackConfig},
    time::Instant,
    ulp::{Arrival, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
};

/// IRD and ORD of both ends.
pub const DEPTH: u16 = 4;
pub const ALL: Access = Access::all();
pub const SEND: Operation = Operation::Send { invalidate: None };
const PORT: u16 = 7;
/// One-way delay of the wire.
const DELAY: Duration = Duration::from_micros(50);
/// Virtual time for one exchange: much more than it needs, and less than any time limit.
const EXCHANGE: Duration = Duration::from_millis(500);

/// One connection as the peer sees it.
#[derive(Debug, Default)]
pub struct Talk {
    outbox: VecDeque<Vec<u8>>,
    /// ULPDUs that were delivered and that the test has not read yet.
    pub inbox: VecDeque<Vec<u8>>,
    pub events: Vec<Event>,
    finish: bool,
}

/// The peer's upper layer.
#[derive(Debug, Default)]
pub struct Script {
    pub talks: HashMap<ConnId, Talk>,
    requested: Option<ConnId>,
}

impl Ulp for Script {
    type Placed = usize;

    fn place(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: Arrival) -> Result<usize, Refusal> {
        if arrival == Arrival::Early {
            return Err(Refusal::Withhold);
        }
        let mut bytes = vec![0; ulpdu.len()];
        ulpdu.peek(&mut bytes);
        self.talks.entry(conn).or_default().inbox.push_back(bytes);
        Ok(0)
    }

    fn deliver(&mut self, _conn: ConnId, _placed: usize) -> Result<(), Refusal> {
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        true
    }

    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        let talk = self.talks.entry(conn).or_default();
        match talk.outbox.front() {
            Some(ulpdu) if ulpdu.len() <= out.room() => {
                out.put(ulpdu);
                talk.outbox.pop_front();
                Pulled::Ulpdu
            }
            None if talk.finish => Pulled::Finish,
            _ => Pulled::Nothing,
        }
    }

    fn acked(&mut self, _conn: ConnId, _offset: u64) {}

    fn event(&mut self, conn: ConnId, event: Event) {
        if matches!(event, Event::Requested { .. }) {
            self.requested = Some(conn);
        }
        self.talks.entry(conn).or_default().events.push(event);
    }
}

pub struct Peer {
    stack: Stack<Script>,
    pub script: Script,
    link: SimLink,
    accept: AcceptParams,
}

impl Node for Peer {
    fn turn(&mut self, now: Instant) -> bool {
        let mut batch = Vec::new();
        let received = self.link.receive(&mut batch, 64);
        for frame in batch {
            self.stack.receive(now, &mut self.link, frame, &mut self.script);
        }
        if let Some(conn) = self.script.requested.take() {
            self.stack.accept(conn, self.accept.clone(), &mut self.script).unwrap();
        }
        if self.stack.next_deadline().is_some_and(|at| at <= now) {
            self.stack.on_timer(now, &mut self.link, &mut self.script);
        }
        if received == 0 {
            self.stack.idle();
        }
        for conn in self.script.talks.keys() {
            self.stack.wake(*conn);
        }
        self.stack.transmit(now, &mut self.link, &mut self.script);
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.stack.next_deadline()
    }
}

/// Both ends. The peer is the initiator unless a test says otherwise, so it may send first.
pub struct World {
    wire: Wire,
    now: Instant,
    pub card: Station,
    pub peer: Peer,
    pub pd: PdId,
    pub cq: CqId,
    pub ring: Arc<CompletionRing>,
    pub qp: QpId,
    /// The peer's identifier of the connection of [`Self::qp`].
    pub conn: ConnId,
    next_port: u16,
}

impl World {
    /// A connected world; `attributes` changes the default attributes of the queue pair.
    pub fn with(attributes: impl FnOnce(&mut Engine, QpAttributes) -> QpAttributes) -> Self {
        let mut world = Self::unconnected(attributes);
        world.listen();
        world.conn = world.connect(world.qp, MpaConfig::default());
        assert_eq!(world.state(), QpState::Rts);
        // A responder may send only after the initiator's first FPDU: an empty Write.
        world.say([write(STag::new(0), 0, b"")]);
        world
    }

    pub fn new() -> Self {
        Self::with(|_, attributes| attributes)
    }

    /// A world without a connection.
    pub fn unconnected(attributes: impl FnOnce(&mut Engine, QpAttributes) -> QpAttributes) -> Self {
        let (wire, near, far) = Wire::new(WireConfig { faults: [faults(); 2], ..WireConfig::default() });
        let config = EngineConfig { secret: Secret::from_number(11), ..EngineConfig::default() };
        let mut card = Station::new(near, config);
        card.accept = accept_params();
        let engine = &mut card.engine;
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let (cq, ring) = engine.rnic().registry().create_cq(1024, None).unwrap();
        let attributes = attributes(engine, QpAttributes::new(pd, cq, cq));
        let qp = engine.rnic_mut().create_qp(attributes).unwrap();
        let peer = Peer {
            stack: Stack::new(StackConfig { secret: Secret::from_number(12), ..StackConfig::default() }),
            script: Script::default(),
            link: far,
            accept: accept_params(),
        };
        let conn = ConnId { index: u32::MAX, generation: 0 };
        Self { wire, now: Instant::ZERO, card, peer, pd, cq, ring, qp, conn, next_port: 40_000 }
    }

    /// Makes the engine listen.
    pub fn listen(&mut self) {
        self.card.engine.listen(&mut self.card.link, None, PORT, 8, 1500, None).unwrap();
    }

    /// Connects the peer to the engine's listener, which accepts with `qp`.
    pub fn connect(&mut self, qp: QpId, mpa: MpaConfig) -> ConnId {
        self.card.expected.insert(sim::ipv4(2), qp);
        let params = ConnectParams { ird: DEPTH, ord: DEPTH, private_data: Vec::new() };
        let path = sim::path([(2, self.next_port), (1, PORT)], false, 1500);
        self.next_port += 1;
        let conn = self.peer.stack.connect(self.now, &mut self.peer.link, path, mpa, params).unwrap();
        self.run();
        conn
    }

    /// Connects the engine to the peer, which answers with `accept`.
    pub fn connect_card(&mut self, params: engine::ConnectParams, accept: AcceptParams) {
        self.peer.accept = accept;
        let mpa = MpaConfig::default();
        self.peer.stack.listen(&mut self.peer.link, None, PORT, 8, 1500, mpa).unwrap();
        let path = sim::path([(1, self.next_port), (2, PORT)], false, 1500);
        self.card.engine.connect(self.now, &mut self.card.link, self.qp, path, params).unwrap();
        self.run();
        self.conn = *self.peer.script.talks.keys().next().expect("the peer saw the request");
    }

    /// Runs both ends for one exchange.
    pub fn run(&mut self) {
        self.run_for(EXCHANGE);
    }

    pub fn run_for(&mut self, time: Duration) {
        let start = self.now;
        let Self { wire, card, peer, .. } = self;
        run(wire, &mut [card, peer], start, time, |_, _| false);
        self.now = start + time;
    }

    /// Sends these segments from the peer, in order.
    pub fn say(&mut self, ulpdus: impl IntoIterator<Item = Vec<u8>>) {
        let conn = self.conn;
        self.say_on(conn, ulpdus);
    }

    pub fn say_on(&mut self, conn: ConnId, ulpdus: impl IntoIterator<Item = Vec<u8>>) {
        self.talk(conn).outbox.extend(ulpdus);
        self.run();
    }

    /// Sends a segment from the peer and runs a few round trips only.
    pub fn say_and_interrupt(&mut self, ulpdu: Vec<u8>) {
        let conn = self.conn;
        self.talk(conn).outbox.push_back(ulpdu);
        self.run_for(DELAY * 6);
    }

    /// Makes the network change a byte of each frame to the engine and correct the TCP checksum.
    pub fn corrupt_with_good_checksums(&mut self) {
        let corrupting = Faults { corrupt: 1.0, repair_checksum: 1.0, ..faults() };
        self.wire.with_faults([faults(), corrupting]);
    }

    pub fn talk(&mut self, conn: ConnId) -> &mut Talk {
        self.peer.script.talks.entry(conn).or_default()
    }

    /// Closes the peer's direction.
    pub fn finish(&mut self) {
        let conn = self.conn;
        self.talk(conn).finish = true;
        self.run();
    }

    /// The ULPDUs that the engine sent since the last call.
    pub fn heard(&mut self) -> Vec<Vec<u8>> {
        let conn = self.conn;
        self.talk(conn).inbox.drain(..).collect()
    }

    /// The Terminate that the engine sent as its last ULPDU.
    pub fn terminate(&mut self) -> Terminate {
        let heard = self.heard();
        let last = heard.last().expect("a Terminate was sent");
        assert_eq!(last[..2], [0x41, 0x47], "L, DDP version 1; RDMAP version 1, opcode Terminate");
        assert_eq!(last[2..18], [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0], "queue 2, MSN 1, MO 0");
        let others = heard.iter().filter(|u| u[1] & 0xf == 7).count();
        assert_eq!(others, 1, "one Terminate");
        Terminate::read(&last[18..])
    }

    /// Registers a region of the engine in the common protection domain, filled with `fill`.
    pub fn region(&mut self, len: usize, fill: u8, access: Access) -> (STag, Memory) {
        let memory = Memory::anonymous(len, Pages::Normal).unwrap();
        memory.fill(0, len, fill).unwrap();
        let key = self.register(&memory, self.pd, access, None);
        (key, memory)
    }

    pub fn register(&mut self, memory: &Memory, pd: PdId, access: Access, stream: Option<QpId>) -> STag {
        let registration = Registration { pd, memory: memory.clone(), access, base: 0, stream };
        self.card.engine.rnic().registry().register(registration).unwrap()
    }

    pub fn receive(&mut self, wr_id: u64, scatter: &[Sge]) {
        self.card.engine.rnic_mut().post_recv(self.qp, &RecvRequest { wr_id, scatter }).unwrap();
    }

    pub fn post(&mut self, wr_id: u64, operation: Operation, pieces: &[Sge]) {
        self.post_flags(wr_id, operation, Payload::Gather(pieces), SendFlags::SIGNALED);
    }

    pub fn post_flags(&mut self, wr_id: u64, operation: Operation, payload: Payload<'_>, flags: SendFlags) {
        self.card
            .engine
            .rnic_mut()
            .post_send(self.qp, &WorkRequest { wr_id, operation, payload, flags })
            .unwrap();
    }

    pub fn completions(&mut self) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        self.ring.poll(&mut out, usize::MAX);
        out
    }

    pub fn outcomes(&mut self) -> Vec<(u64, WcStatus)> {
        self.completions().iter().map(|c| (c.wr_id, c.status)).collect()
    }

    pub fn state(&self) -> QpState {
        self.card.engine.rnic().query_qp(self.qp).unwrap().state
    }

    pub fn asyncs(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.card.engine.next_async_event()).collect()
    }
}

fn accept_params() -> AcceptParams {
    AcceptParams { ird: DEPTH, ord: DEPTH, ..AcceptParams::default() }
}

fn faults() -> Faults {
    Faults { delay: DELAY, ..Faults::default() }
}

/// A Terminate, decoded by hand after figures 7 and 8 of RFC 5040.
#[derive(Debug, PartialEq, Eq)]
pub struct Terminate {
    pub layer: u8,
    pub error_type: u8,
    pub code: u8,
    /// M with the DDP Segment Length.
    pub length: Option<u16>,
    /// D with the DDP header.
    pub ddp: Option<Vec<u8>>,
    /// R with the RDMA header.
    pub rdma: Option<Vec<u8>>,
}

impl Terminate {
    pub fn read(bytes: &[u8]) -> Self {
        let [first, code, bits, reserved] = bytes[..4] else { panic!("no Terminate Control") };
        assert_eq!((bits & 0x1f, reserved), (0, 0), "reserved bits are zero");
        let (m, d, r) = (bits & 0x80 != 0, bits & 0x40 != 0, bits & 0x20 != 0);
        let mut rest = &bytes[4..];
        let mut take = |n: usize| {
            let (now, later) = rest.split_at(n);
            rest = later;
            now.to_vec()
        };
        let length = (m || d).then(|| take(2)).map(|b| u16::from_be_bytes([b[0], b[1]])).filter(|_| m);
        let ddp = d.then(|| {
            let first = take(1);
            let more = take(if first[0] & 0x80 == 0 { 17 } else { 13 });
            [first, more].concat()
        });
        let rdma = r.then(|| take(28));
        assert!(rest.is_empty(), "nothing follows");
        Self { layer: first >> 4, error_type: first & 0xf, code, length, ddp, rdma }
    }

    pub fn numbers(&self) -> (u8, u8, u8) {
        (self.layer, self.error_type, self.code)
    }
}

/// A tagged segment (RFC 5041 figure 4); `control` with RV.
pub fn tagged(control: u8, stag: STag, to: u64, last: bool, payload: &[u8]) -> Vec<u8> {
    let flags = 0x81 | if last { 0x40 } else { 0 };
    [&[flags, control][..], &stag.value().to_be_bytes(), &to.to_be_bytes(), payload].concat()
}

/// An untagged segment (RFC 5041 figure 5); `control` with RV.
pub fn untagged(control: u8, queue: u32, msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    untagged_word(control, 0, queue, msn, mo, last, payload)
}

pub fn untagged_word(
    control: u8,
    word: u32,
    queue: u32,
    msn: u32,
    mo: u32,
    last: bool,
    payload: &[u8],
) -> Vec<u8> {
    let flags = 0x01 | if last { 0x40 } else { 0 };
    let words = [word, queue, msn, mo].map(u32::to_be_bytes).concat();
    [&[flags, control][..], &words, payload].concat()
}

pub fn write(stag: STag, to: u64, payload: &[u8]) -> Vec<u8> {
    tagged(0x40, stag, to, true, payload)
}

pub fn send(msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    untagged(0x43, 0, msn, mo, last, payload)
}

/// A Read Request (RFC 5040 figure 6) of `len` bytes at `source`, into STag 0x77 at 0x1000.
pub fn read_request(msn: u32, source: STag, to: u64, len: u32) -> Vec<u8> {
    untagged(0x41, 1, msn, 0, true, &read_header(source, to, len))
}

pub fn read_header(source: STag, to: u64, len: u32) -> Vec<u8> {
    let sink = [&0x77u32.to_be_bytes()[..], &0x1000u64.to_be_bytes()].concat();
    [&sink[..], &len.to_be_bytes(), &source.value().to_be_bytes(), &to.to_be_bytes()].concat()
}

pub fn whole(key: STag, len: u32) -> Sge {
    Sge { key, offset: 0, len }
}

pub fn remote(key: u32, offset: u64) -> Remote {
    Remote { key: STag::new(key), offset }
}

pub fn bytes(memory: &Memory) -> Vec<u8> {
    let mut out = vec![0; memory.len()];
    memory.read(0, &mut out).unwrap();
    out
}
