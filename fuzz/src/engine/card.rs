//! The engine under test with the objects that an application would create, and the checks at the end.

use std::{collections::HashMap, sync::Arc};

use xwarp_rnic::{
    Access, CqId, Operation, Payload, QpId, RecvRequest, Remote, ResourceError, STag, SendFlags, Sge, SrqId,
    WcStatus, WorkRequest,
    engine::{ConnectParams, Engine, EngineConfig},
    rnic::{
        CmEvent, CompletionRing, Limits, NoReceive, PdId, QpAttributes, QueuePairOptions, Registration,
        Registry, SrqAttributes,
    },
};
use xwarp_tcp::{
    framing::{AcceptParams, FramingConfig},
    mpa::{Markers, MpaConfig},
    rdma_tcp::RdmaTcpConfig,
    secret::Secret,
    sim::path,
    stack::Polling,
    time::{Duration, Instant},
};

use super::{
    doors::{Doors, Request, rekeyed},
    peer::{Addresses, CARD_PORT},
};
use crate::{canary::Guarded, input::Input, link::FuzzLink};

/// Size of every region, in bytes.
const REGION: usize = 8192;
/// The part of the sink that receives and reads use; the bytes around it must never change.
const SINK: std::ops::Range<usize> = 1024..7168;
const SINK_FILL: u8 = 0x11;
const OPEN_FILL: u8 = 0x22;
const READABLE_FILL: u8 = 0x33;
/// Maximum number of requests in one queue.
const DEPTH: u32 = 16;
/// First number of former keys: see [`Card::key`].
const BEFORE: usize = 16;
/// First number of the verbs that open and close keys or change queues.
const MORE_VERBS: u8 = 192;
/// Number of queue pairs.
const QPS: usize = 3;
/// Limit of turns until the end; each turn runs timers or sends.
const MAX_TURNS: usize = 2_000;

/// Regions, by the rights of the peer.
#[derive(Debug)]
struct Regions {
    sink: Guarded,
    /// All rights.
    open: Guarded,
    readable: Guarded,
    /// No rights; another protection domain; another queue pair; deregistered.
    closed: [Guarded; 4],
    /// The keys of these regions, in this order.
    keys: Vec<STag>,
    doors: Doors,
}

/// The engine and its environment.
#[derive(Debug)]
pub struct Card {
    engine: Engine,
    /// The engine's link.
    pub link: FuzzLink,
    /// The virtual time.
    pub now: Instant,
    addresses: Addresses,
    pds: [PdId; 2],
    cq: CqId,
    regions: Regions,
    ring: Arc<CompletionRing>,
    qps: Vec<QpId>,
    /// A queue pair that is never connected.
    aside: QpId,
    srq: SrqId,
    /// Outstanding requests, by number.
    outstanding: HashMap<u64, QpId>,
    next_id: u64,
    refuses: bool,
    reached: Reached,
}

/// Coverage of an input: a target whose inputs never get past the first checks would find nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reached {
    /// Number of successful requests.
    pub successes: usize,
    /// Number of changed bytes in regions.
    pub bytes: usize,
    /// Number of bytes changed through a memory window or fast-registration region.
    pub through_doors: usize,
}

/// Settings of the engine, from the first byte of an input.
#[derive(Debug, Clone, Copy)]
pub struct Settings(pub u8);

impl Settings {
    fn markers(self) -> Markers {
        [Markers::Prefer, Markers::Off, Markers::Require, Markers::Prefer][usize::from(self.0 & 3)]
    }
    /// The last of the four marker settings selects IPv6.
    pub fn v6(self) -> bool {
        self.0 & 3 == 3
    }
    fn crc(self) -> bool {
        self.0 & 4 == 0
    }
    /// Whether the engine connects instead of listening.
    pub fn initiator(self) -> bool {
        self.0 & 8 != 0
    }
    fn little_hold(self) -> bool {
        self.0 & 16 != 0
    }
    /// The size of chunks and the MTU: frames of one chunk, or chains.
    fn frames(self) -> (usize, u16) {
        if self.0 & 32 != 0 { (512, 9000) } else { (usize::MAX, 1500) }
    }
    /// Whether the peer uses timestamps.
    pub fn timestamps(self) -> bool {
        self.0 & 64 != 0
    }
    fn refuses(self) -> bool {
        self.0 & 128 != 0
    }
}

/// Attributes: a plain queue pair whose messages may overtake each other, one that terminates when no receive is posted, one with a shared receive
/// queue, and another plain one.
fn kinds(attributes: QpAttributes, srq: SrqId) -> [QpAttributes; 4] {
    let options = QueuePairOptions { max_send_wr: DEPTH, max_recv_wr: DEPTH, ..attributes.options };
    let strict = QueuePairOptions { no_receive: NoReceive::Terminate, ..options };
    let plain = QpAttributes { options, ..attributes };
    let any = QpAttributes { options: QueuePairOptions { any_receive: true, ..options }, ..attributes };
    [any, QpAttributes { options: strict, ..plain }, QpAttributes { srq: Some(srq), ..plain }, plain]
}

/// `framing` with these settings.
fn configured(framing: &FramingConfig, settings: Settings) -> FramingConfig {
    let hold_bytes = if settings.little_hold() { 2048 } else { 1 << 17 };
    let mpa = |config| {
        let (markers, crc) = (settings.markers(), settings.crc());
        MpaConfig { markers, crc, hold_bytes, ..config }
    };
    let rdma_tcp = |config| RdmaTcpConfig { hold_bytes, ..config };
    match framing.clone() {
        FramingConfig::Mpa(config) => mpa(config).into(),
        FramingConfig::RdmaTcp(config) => rdma_tcp(config).into(),
        FramingConfig::Either(first, second) => FramingConfig::Either(mpa(first), rdma_tcp(second)),
    }
}

impl Card {
    /// Creates a card that listens or can connect.
    pub fn new(settings: Settings, addresses: Addresses, framing: &FramingConfig) -> Self {
        let limits = Limits { max_cqe: 4096, max_mr: 64, max_qp: 8, ..Limits::default() };
        let mut engine = Engine::new(EngineConfig {
            secret: Secret::from_number(7),
            framing: configured(framing, settings),
            limits,
            most_connections: 16,
            ..EngineConfig::default()
        });
        engine.set_polling(Polling::Busy);
        let pd = engine.rnic().registry().alloc_pd().expect("a domain");
        let foreign = engine.rnic().registry().alloc_pd().expect("another domain");
        let (cq, ring) = engine.rnic().registry().create_cq(512, None).expect("a completion queue");
        let srq = SrqAttributes { pd, max_wr: DEPTH, max_sge: 4, limit: 0 };
        let srq = engine.rnic().registry().create_srq(&srq).expect("a shared receive queue").id();
        let attributes = QpAttributes::new(pd, cq, cq);
        let [plain, strict, shared, aside] =
            kinds(attributes, srq).map(|a| engine.rnic_mut().create_qp(a).expect("a queue pair"));
        let qps = vec![plain, strict, shared];
        let mut keys = Vec::new();
        let mut make = |fill, pd, access, stream| {
            let guarded = Guarded::new(REGION, fill);
            let memory = guarded.region().clone();
            let registration = Registration { pd, memory, access, base: 0, stream };
            keys.push(engine.rnic().registry().register(registration).expect("a region"));
            guarded
        };
        let sink = make(Some(SINK_FILL), pd, Access::LOCAL_WRITE, None);
        let open = make(Some(OPEN_FILL), pd, Access::all(), None);
        let readable = make(Some(READABLE_FILL), pd, Access::REMOTE_READ, None);
        let no_rights = make(None, pd, Access::empty(), None);
        let other_domain = make(None, foreign, Access::all(), None);
        let other_stream = make(None, pd, Access::all(), Some(aside));
        let gone = make(None, pd, Access::all(), None);
        engine.rnic().registry().deregister(*keys.last().expect("seven keys")).expect("it was registered");
        let closed = [no_rights, other_domain, other_stream, gone];
        let doors = Doors::new(&mut engine, pd, qps[0]);
        let regions = Regions { sink, open, readable, closed, keys, doors };
        let (chunk, mtu) = settings.frames();
        let mut link = FuzzLink::new(chunk);
        if !settings.initiator() {
            engine.listen(&mut link, None, CARD_PORT, 4, mtu, None).expect("a listener");
        }
        Self {
            engine,
            link,
            now: Instant::from_nanos(1_000_000_000),
            addresses,
            pds: [pd, foreign],
            cq,
            regions,
            ring,
            qps,
            aside,
            srq,
            outstanding: HashMap::new(),
            next_id: 0,
            refuses: settings.refuses(),
            reached: Reached::default(),
        }
    }

    /// The key with a number: regions first, then memory windows and fast-registration regions. From
    /// [`BEFORE`] on, a key that the same index may have had before.
    pub fn key(&self, number: u32) -> Option<STag> {
        let mut keys = self.regions.keys.iter().copied().chain(self.regions.doors.keys());
        let key = keys.nth(number as usize % BEFORE)?;
        match number as usize / BEFORE {
            0 => Some(key),
            1 => Some(rekeyed(key, key.key().wrapping_sub(1))),
            _ => None,
        }
    }

    /// Connects a queue pair to this port of the peer.
    pub fn connect(&mut self, port: u16) {
        let path = path(self.addresses.card(), (self.addresses.peer(), port));
        for qp in self.qps.clone() {
            let params =
                ConnectParams { ird: 2, ord: 2, private_data: b"hello".to_vec(), ..ConnectParams::default() };
            if self.engine.connect(self.now, &mut self.link, qp, path, params).is_ok() {
                break;
            }
        }
    }

    /// Runs one turn: received frames, due timers, the application's replies, sending.
    pub fn turn(&mut self) {
        self.engine.turn(self.now, &mut self.link);
        self.answer();
        self.engine.transmit(self.now, &mut self.link);
        self.reap();
    }

    /// Lets `duration` pass and runs timers.
    pub fn wait(&mut self, duration: Duration) {
        let end = self.now + duration;
        for _ in 0..MAX_TURNS {
            match self.engine.next_deadline() {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => break,
            }
            self.turn();
        }
        self.now = end;
        self.turn();
    }

    /// The application replies to connection requests.
    fn answer(&mut self) {
        while let Some(event) = self.engine.next_cm_event() {
            let CmEvent::ConnectRequest { request, .. } = event else { continue };
            let params = AcceptParams { ird: 2, ord: 2, private_data: Vec::new() };
            let taken = !self.refuses
                && self.qps.clone().into_iter().any(|qp| {
                    let _ = self.engine.rnic_mut().reset_qp(qp);
                    self.engine.accept(request, qp, params.clone()).is_ok()
                });
            if !taken {
                // The request may already be gone.
                let _ = self.engine.reject(self.now, request, b"no");
            }
        }
        while self.engine.next_async_event().is_some() {}
    }

    /// Checks completions: each belongs to an outstanding request.
    fn reap(&mut self) {
        while let Some(completion) = self.ring.pop() {
            self.regions.doors.completed(&completion);
            let known = self.outstanding.remove(&completion.wr_id);
            assert!(known.is_some(), "{completion:?}: completed before, or never posted");
            self.reached.successes += usize::from(completion.status == WcStatus::Success);
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Executes one verb of the application.
    pub fn verb(&mut self, input: &mut Input<'_>) {
        let (what, number) = (input.u8(), input.u8());
        let qp = self.qps[usize::from(number) % QPS];
        if what >= MORE_VERBS {
            return self.another_verb(qp, what - MORE_VERBS, input);
        }
        match what % 12 {
            0 | 1 => self.post_recv(qp, input),
            2..=6 => self.post_send(qp, what % 12, input),
            7 => drop(self.engine.disconnect(qp)),
            8 => drop(self.engine.abort(qp)),
            9 => drop(self.engine.rnic_mut().reset_qp(qp)),
            10 => self.end_key(input, Registry::deregister),
            _ => self.engine.mtu_changed(self.now, input.u16().max(68)),
        }
    }

    fn another_verb(&mut self, qp: QpId, what: u8, input: &mut Input<'_>) {
        match what % 12 {
            0..=2 => {
                let elsewhere = self.key(input.u8().into());
                let request = self.regions.doors.open(elsewhere, input);
                self.post_local(qp, &request, input.u8());
            }
            3 | 4 => {
                let key = self.key(input.u8().into()).unwrap_or_default();
                let request = Request { operation: Operation::LocalInvalidate { key }, memory: Vec::new() };
                self.post_local(qp, &request, input.u8());
            }
            what @ 5..=8 => self.post_send(qp, what + 2, input),
            9 => self.regions.doors.take_away(&mut self.engine, input),
            10 => self.end_key(input, Registry::revoke),
            _ => {
                let size = input.u16().into();
                let _ = match size % 3 {
                    0 => self.engine.rnic_mut().arm_srq_limit(self.srq, size),
                    1 => self.engine.rnic().registry().resize_srq(self.srq, size),
                    _ => self.engine.rnic().registry().resize_cq(self.cq, size + 256),
                };
            }
        }
    }

    /// Posts a request that concerns only memory.
    /// Deregisters one of the first three regions, if it still is registered.
    fn end_key(
        &mut self,
        input: &mut Input<'_>,
        end: impl FnOnce(&Registry, STag) -> Result<(), ResourceError>,
    ) {
        let key = self.regions.keys[usize::from(input.u8()) % 3];
        if end(self.engine.rnic().registry(), key).is_ok() {
            self.engine.rnic_mut().forget(key);
        }
    }

    fn post_local(&mut self, qp: QpId, request: &Request, flags: u8) {
        let Request { operation, memory } = request;
        let payload = match operation {
            Operation::FastRegister { .. } => Payload::Memory(memory),
            _ => Payload::EMPTY,
        };
        self.post(qp, *operation, payload, flags);
    }

    /// A part of the sink.
    fn piece(&self, input: &mut Input<'_>) -> Sge {
        let (offset, len) = (usize::from(input.u16()), usize::from(input.u16()));
        let offset = SINK.start + offset % SINK.len();
        let len = len.min(SINK.end - offset) as u32;
        Sge { key: self.regions.keys[0], offset: offset as u64, len }
    }

    fn post_recv(&mut self, qp: QpId, input: &mut Input<'_>) {
        let count = usize::from(input.u8() % 4);
        let scatter: Vec<Sge> = (0..count).map(|_| self.piece(input)).collect();
        let wr_id = self.id();
        let request = RecvRequest { wr_id, scatter: &scatter };
        let shared = self.engine.rnic().query_qp(qp).is_ok_and(|info| info.attributes.srq.is_some());
        let posted = if shared {
            let srq = self.engine.rnic().registry().srq(self.srq).expect("it is there");
            srq.post(&request).map(|waiting| {
                if !waiting.is_empty() {
                    self.engine.rnic_mut().srq_refilled(self.srq);
                }
            })
        } else {
            self.engine.rnic_mut().post_recv(qp, &request)
        };
        if posted.is_ok() {
            self.outstanding.insert(wr_id, qp);
        }
    }

    fn post_send(&mut self, qp: QpId, what: u8, input: &mut Input<'_>) {
        let remote = Remote { key: STag::new(input.u32()), offset: input.u64() };
        let flags = input.u8();
        let piece = [self.piece(input)];
        let word = [Sge { len: 8, offset: piece[0].offset.min(SINK.end as u64 - 8) & !7, ..piece[0] }];
        let data = *b"whatever";
        let (operation, payload) = match what {
            2 => (Operation::Send { invalidate: None }, Payload::Gather(&piece)),
            3 => (Operation::Write { remote }, Payload::Gather(&piece)),
            4 => (Operation::Read { remote, invalidate: false }, Payload::Gather(&piece)),
            5 => (Operation::FetchAdd { remote, add: 1, mask: 0 }, Payload::Gather(&word)),
            6 => (Operation::Immediate { data }, Payload::EMPTY),
            7 => (Operation::WriteImmediate { remote, data }, Payload::Gather(&piece)),
            8 if flags & 4 != 0 => (Operation::SendImmediate { data: *b"what" }, Payload::Gather(&piece)),
            8 => (Operation::Send { invalidate: Some(remote.key) }, Payload::Inline(&data)),
            9 => (Operation::Read { remote, invalidate: true }, Payload::Gather(&piece)),
            _ => {
                let (compare, swap) = (remote.offset, !remote.offset);
                let masks = (u64::MAX >> 8, u64::MAX << 8);
                let (compare_mask, swap_mask) = masks;
                let operation = Operation::CompareSwap { remote, compare, compare_mask, swap, swap_mask };
                (operation, Payload::Gather(&word))
            }
        };
        self.post(qp, operation, payload, flags);
    }

    fn post(&mut self, qp: QpId, operation: Operation, payload: Payload<'_>, flags: u8) {
        let flags = SendFlags::SIGNALED | SendFlags::from_bits_truncate(flags);
        let wr_id = self.id();
        let request = WorkRequest { wr_id, operation, payload, flags };
        if self.engine.rnic_mut().post_send(qp, &request).is_ok() {
            self.regions.doors.posted(wr_id, &operation);
            self.outstanding.insert(wr_id, qp);
        }
    }

    /// Closes everything and checks that nothing is left.
    pub fn over(mut self) -> Reached {
        for qp in self.qps.clone() {
            let _ = self.engine.disconnect(qp);
        }
        self.wait(Duration::from_secs(1));
        for qp in self.qps.clone() {
            let _ = self.engine.abort(qp);
        }
        self.turn();
        let mut turns = 0;
        while self.engine.stack().connections() > 0 {
            let deadline = self.engine.next_deadline().expect("an open connection has a timer");
            self.now = self.now.max(deadline);
            self.turn();
            self.link.sent.clear();
            turns += 1;
            assert!(turns < MAX_TURNS, "connections do not end: {:?}", self.engine);
        }
        self.engine.transmit(self.now, &mut self.link);
        self.reap();
        assert_eq!((self.link.lent(), self.link.retained()), (0, 0), "frames leaked");
        let shared = self.qps[QPS - 1];
        let left: Vec<_> = self.outstanding.values().filter(|qp| **qp != shared).collect();
        assert_eq!(left.len(), 0, "requests never completed");
        let bytes = self.check_memory();
        let reached = self.reached;
        let through_doors = self.take_apart();
        Reached { bytes, through_doors, ..reached }
    }

    /// Destroys all objects. Returns the result of [`Doors::over`].
    fn take_apart(self) -> usize {
        let Self { mut engine, regions, qps, aside, srq, cq, pds, .. } = self;
        for qp in qps.into_iter().chain([aside]) {
            engine.rnic_mut().destroy_qp(qp).expect("a queue pair");
        }
        let through_doors = regions.doors.over(&mut engine);
        for key in regions.keys {
            // Some have already been deregistered.
            let gone = engine.rnic().registry().deregister(key);
            assert!(!matches!(gone, Err(ResourceError::InUse(..))), "{gone:?}");
        }
        engine.rnic().registry().destroy_srq(srq).expect("it is unused");
        engine.rnic().registry().destroy_cq(cq).expect("it is unused");
        for pd in pds {
            engine.rnic().registry().dealloc_pd(pd).expect("nothing is left in it");
        }
        through_doors
    }

    /// Checks that memory without write access has not changed. Returns the number of changed bytes in
    /// writable memory.
    fn check_memory(&self) -> usize {
        let Regions { sink, open, readable, closed, doors, .. } = &self.regions;
        doors.check();
        for guarded in [sink, open, readable].into_iter().chain(closed) {
            guarded.check();
        }
        let sunk = sink.bytes();
        assert!(sunk[..SINK.start] == [SINK_FILL; SINK.start], "written before a receive");
        assert!(sunk[SINK.end..] == [SINK_FILL; REGION - SINK.end], "written after a receive");
        assert!(readable.bytes() == [READABLE_FILL; REGION], "written without the right");
        assert!(closed.iter().all(Guarded::is_secret), "written without any right");
        let changed = |guarded: &Guarded, fill| guarded.bytes().iter().filter(|byte| **byte != fill).count();
        changed(sink, SINK_FILL) + changed(open, OPEN_FILL)
    }
}
