//! One end of a connection with work of all kinds, and the checks of its results: each signalled request completes
//! once and in order, bytes equal those of the source, receives complete in order, atomics are exact, and no byte
//! outside of the writable ranges changes. Requests that may overtake others complete once.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use rand::{Rng, rngs::SmallRng};
use xwarp_rnic::{
    Access, AsyncEvent, Memory, Opcode, Operation, Pages, Payload, PostError, QpId, QpState, RecvRequest,
    Remote, STag, SendFlags, Sge, WcStatus, WorkCompletion, WorkRequest,
    engine::Engine,
    rnic::{CompletionRing, QpAttributes, QueuePairOptions, Registration},
};

/// Bytes before, between and after the writable ranges that must not change.
const CANARY: usize = 512;
const CANARY_BYTE: u8 = 0xc5;
/// Bytes of the source of Writes, Sends and Reads.
const SOURCE: usize = 1 << 16;
/// Longest message.
pub const MOST: usize = 20_000;

/// The effect of a request. `from` is the offset of its bytes in the source of the end that has them, `to` their
/// destination.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Write { immediate: bool, inline: bool },
    Read,
    Send,
    Immediate,
    FetchAdd { add: u64 },
    Swap { right: bool },
}

#[derive(Debug, Clone, Copy)]
struct Op {
    kind: Kind,
    from: usize,
    len: usize,
    to: usize,
    signalled: bool,
    fence: bool,
    overtake: bool,
    /// A Send has immediate data.
    send_immediate: bool,
}

impl Op {
    fn consumes_receive(&self) -> bool {
        matches!(self.kind, Kind::Send | Kind::Immediate | Kind::Write { immediate: true, .. })
    }

    fn immediate(&self) -> [u8; 8] {
        (self.from as u64 * 77).to_be_bytes()
    }

    /// The immediate data of a Send: the last four of the eight bytes.
    fn of_send(&self) -> [u8; 4] {
        *self.immediate().last_chunk().unwrap()
    }

    /// The immediate data that the receiver gets.
    fn expected(&self) -> Option<[u8; 8]> {
        let [a, b, c, d] = self.of_send();
        match self.kind {
            Kind::Send => self.send_immediate.then_some([a, b, c, d, 0, 0, 0, 0]),
            _ => Some(self.immediate()),
        }
    }
}

/// The work of one end, in order.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    ops: Vec<Op>,
    /// Bytes of the peer's that are written, and of ours that are read into.
    written: usize,
    read: usize,
    /// Some requests may overtake others.
    overtakes: bool,
}

impl Plan {
    /// `count` requests of random kinds. If `overtakes`, some Reads and Sends may overtake others.
    pub fn random(rng: &mut SmallRng, count: usize, overtakes: bool) -> Self {
        let mut plan = Self { overtakes, ..Self::default() };
        for _ in 0..count {
            let kind = match rng.random_range(0..8) {
                0..3 => Kind::Write { immediate: rng.random_bool(0.2), inline: rng.random_bool(0.2) },
                3 => Kind::Read,
                4..6 => Kind::Send,
                6 if rng.random_bool(0.5) => Kind::Immediate,
                6 => Kind::FetchAdd { add: rng.random() },
                _ => Kind::Swap { right: rng.random_bool(0.5) },
            };
            let most = if rng.random_bool(0.5) { 600 } else { MOST };
            let len = match kind {
                Kind::Write { inline: true, .. } => rng.random_range(0..=128),
                Kind::Write { .. } | Kind::Read | Kind::Send => rng.random_range(0..=most),
                Kind::Immediate | Kind::FetchAdd { .. } | Kind::Swap { .. } => 0,
            };
            let place = match kind {
                Kind::Write { .. } => &mut plan.written,
                Kind::Read => &mut plan.read,
                _ => &mut 0,
            };
            let to = *place;
            *place += len;
            // The bytes of a short Send would not distinguish it from others.
            let may_overtake =
                overtakes && (matches!(kind, Kind::Send) && len >= 16 || matches!(kind, Kind::Read));
            plan.ops.push(Op {
                kind,
                from: rng.random_range(0..=SOURCE - len),
                len,
                to,
                signalled: rng.random_bool(0.6),
                fence: rng.random_bool(0.1),
                overtake: may_overtake && rng.random_bool(0.5),
                send_immediate: false,
            });
        }
        // When the last has completed, all have: then the connection may be closed.
        if let Some(last) = plan.ops.last_mut() {
            last.signalled = true;
            last.overtake = false;
        }
        plan
    }

    /// The same requests; some Sends have immediate data, which only connections with MPA carry.
    pub fn with_immediate_sends(mut self) -> Self {
        for op in &mut self.ops {
            op.send_immediate = op.from % 3 == 0;
        }
        self
    }

    fn messages(&self) -> impl Iterator<Item = &Op> {
        self.ops.iter().filter(|op| op.consumes_receive())
    }

    /// Message `number`, and the bytes of the last Write that came for it: Immediate Data tells them, and it does not matter
    /// whether the two were one request. Messages that have `overtaken` others do not count.
    fn message(&self, number: usize, overtaken: &BTreeSet<usize>) -> (Op, usize) {
        let (mut messages, mut written) = (0, 0);
        for op in &self.ops {
            if let Kind::Write { .. } = op.kind {
                written = op.len;
            }
            if op.consumes_receive() {
                if messages == number {
                    return (*op, written);
                }
                written = if overtaken.contains(&messages) { written } else { 0 };
                messages += 1;
            }
        }
        panic!("no message {number}")
    }
}

/// Layout of an end's memory.
#[derive(Debug, Clone, Copy)]
struct Map {
    /// The words that the peer's atomics work on: a sum, and one that is swapped.
    words: usize,
    /// Results of our atomics.
    results: usize,
    source: usize,
    sink: usize,
    read: usize,
    receives: usize,
    total: usize,
}

impl Map {
    fn new(plan: &Plan, peer: &Plan) -> Self {
        let mut at = 0;
        let mut place = |len: usize| {
            let start = at + CANARY;
            at = (start + len).next_multiple_of(8);
            start
        };
        let words = place(16);
        let results = place(plan.ops.len() * 8);
        let source = place(SOURCE);
        let sink = place(peer.written);
        let read = place(plan.read);
        let receives = place(peer.messages().count() * MOST);
        Self { words, results, source, sink, read, receives, total: at + CANARY }
    }
}

fn source_byte(salt: u64, at: usize) -> u8 {
    ((at as u64 ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn sources(salt: u64, from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|at| source_byte(salt, at)).collect()
}

/// One end of a connection.
#[derive(Debug)]
pub struct Talk {
    pub qp: QpId,
    ring: Arc<CompletionRing>,
    memory: Memory,
    key: STag,
    map: Map,
    salt: u64,
    plan: Plan,
    peer_plan: Plan,
    peer: Option<(STag, Map, u64)>,
    posted: usize,
    /// Signalled requests that have not completed, in order.
    awaited: VecDeque<u64>,
    receives_posted: usize,
    received: usize,
    receive_depth: usize,
    /// Number of the next message in order, and the numbers of those that have overtaken others.
    next_message: usize,
    overtaken: BTreeSet<usize>,
    /// The first sign that the connection is over.
    failed: bool,
    asynchronous: Vec<AsyncEvent>,
}

impl Talk {
    pub fn new(engine: &mut Engine, plan: Plan, peer_plan: Plan, salt: u64, receive_depth: usize) -> Self {
        let map = Map::new(&plan, &peer_plan);
        let memory = Memory::anonymous(map.total, Pages::Normal).unwrap();
        memory.fill(0, map.total, CANARY_BYTE).unwrap();
        memory.write(map.source, &sources(salt, 0, SOURCE)).unwrap();
        memory.fill(map.words, 16, 0).unwrap();
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let (cq, ring) = engine.rnic().registry().create_cq(4096, None).unwrap();
        let any_receive = peer_plan.overtakes;
        let options = QueuePairOptions { max_send_wr: 20, any_receive, ..QueuePairOptions::default() };
        let attributes = QpAttributes { options, ..QpAttributes::new(pd, cq, cq) };
        let qp = engine.rnic_mut().create_qp(attributes).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE;
        let registration = Registration { pd, memory: memory.clone(), access, base: 0, stream: None };
        let key = engine.rnic().registry().register(registration).unwrap();
        let mut talk = Self {
            qp,
            ring,
            memory,
            key,
            map,
            salt,
            plan,
            peer_plan,
            peer: None,
            posted: 0,
            awaited: VecDeque::new(),
            receives_posted: 0,
            received: 0,
            receive_depth,
            next_message: 0,
            overtaken: BTreeSet::new(),
            failed: false,
            asynchronous: Vec::new(),
        };
        talk.post_receives(engine);
        talk
    }

    /// Gives each end the key and layout of the other.
    pub fn introduce(a: &mut Self, b: &mut Self) {
        a.peer = Some((b.key, b.map, b.salt));
        b.peer = Some((a.key, a.map, a.salt));
    }

    /// Posts as many requests as there is room for, and checks completions. Returns whether there was any work.
    pub fn step(&mut self, engine: &mut Engine) -> bool {
        let mut busy = self.post_sends(engine);
        let mut completions = Vec::new();
        self.ring.poll(&mut completions, usize::MAX);
        for completion in completions {
            busy = true;
            match completion.opcode {
                Opcode::Recv | Opcode::RecvImmediate => self.on_receive(&completion),
                _ => self.on_send(&completion),
            }
        }
        self.post_receives(engine);
        busy
    }

    pub fn take_event(&mut self, event: AsyncEvent) {
        self.asynchronous.push(event);
    }

    fn post_receives(&mut self, engine: &mut Engine) {
        let all = self.peer_plan.messages().count();
        while self.receives_posted < all && self.receives_posted < self.received + self.receive_depth {
            let slot = self.map.receives + self.receives_posted * MOST;
            let piece = |at: usize, len: usize| Sge { key: self.key, offset: at as u64, len: len as u32 };
            let scatter = [piece(slot, 700), piece(slot + 700, MOST - 700)];
            let request = RecvRequest { wr_id: self.receives_posted as u64, scatter: &scatter };
            engine.rnic_mut().post_recv(self.qp, &request).unwrap();
            self.receives_posted += 1;
        }
    }

    fn post_sends(&mut self, engine: &mut Engine) -> bool {
        let before = self.posted;
        while let Some(op) = self.plan.ops.get(self.posted).copied() {
            match self.post(engine, &op) {
                Ok(()) => {}
                Err(PostError::QueueFull(_) | PostError::NotConnected) => break,
                Err(error) => panic!("{error}"),
            }
            if op.signalled {
                self.awaited.push_back(self.posted as u64);
            }
            self.posted += 1;
        }
        self.posted > before
    }

    fn post(&self, engine: &mut Engine, op: &Op) -> Result<(), PostError> {
        let (key, map, _) = self.peer.unwrap();
        let remote = |at: usize| Remote { key, offset: at as u64 };
        let local = |at: usize, len: usize| [Sge { key: self.key, offset: at as u64, len: len as u32 }];
        let result = local(self.map.results + self.posted * 8, 8);
        let from = local(self.map.source + op.from, op.len);
        let bytes = sources(self.salt, op.from, op.len);
        let into = local(self.map.read + op.to, op.len);
        let (operation, payload) = match op.kind {
            Kind::Write { immediate, inline } => {
                let remote = remote(map.sink + op.to);
                let data = op.immediate();
                let operation = if immediate {
                    Operation::WriteImmediate { remote, data }
                } else {
                    Operation::Write { remote }
                };
                (operation, if inline { Payload::Inline(&bytes) } else { Payload::Gather(&from[..]) })
            }
            Kind::Read => {
                let remote = remote(map.source + op.from);
                (Operation::Read { remote, invalidate: false }, Payload::Gather(&into[..]))
            }
            Kind::Send if op.send_immediate => {
                (Operation::SendImmediate { data: op.of_send() }, Payload::Gather(&from[..]))
            }
            Kind::Send => (Operation::Send { invalidate: None }, Payload::Gather(&from[..])),
            Kind::Immediate => (Operation::Immediate { data: op.immediate() }, Payload::EMPTY),
            Kind::FetchAdd { add } => {
                let remote = remote(map.words);
                (Operation::FetchAdd { remote, add, mask: 0 }, Payload::Gather(&result[..]))
            }
            Kind::Swap { right } => {
                let expected = self.swapped_before(self.posted);
                let compare = if right { expected } else { expected ^ 1 };
                let operation = Operation::CompareSwap {
                    remote: remote(map.words + 8),
                    compare,
                    compare_mask: u64::MAX,
                    swap: self.posted as u64 + 1,
                    swap_mask: u64::MAX,
                };
                (operation, Payload::Gather(&result[..]))
            }
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, op.signalled);
        flags.set(SendFlags::FENCE, op.fence);
        flags.set(SendFlags::OVERTAKE, op.overtake);
        engine
            .rnic_mut()
            .post_send(self.qp, &WorkRequest { wr_id: self.posted as u64, operation, payload, flags })
    }

    /// The peer's second and first word when our request `index` is executed.
    fn swapped_before(&self, index: usize) -> u64 {
        let right = |op: &Op| matches!(op.kind, Kind::Swap { right: true });
        self.plan.ops[..index].iter().rposition(right).map_or(0, |i| i as u64 + 1)
    }

    fn sum_before(&self, index: usize) -> u64 {
        let added = |op: &Op| if let Kind::FetchAdd { add } = op.kind { add } else { 0 };
        self.plan.ops[..index].iter().map(added).fold(0, u64::wrapping_add)
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.read(at, &mut out).unwrap();
        out
    }

    fn on_send(&mut self, completion: &WorkCompletion) {
        let index = completion.wr_id as usize;
        let op = self.plan.ops[index];
        if completion.status != WcStatus::Success {
            self.failed = true;
            // Unsignalled requests complete too when they fail, in order with the others.
            assert!(index < self.posted);
            if op.signalled {
                assert_eq!(self.awaited.pop_front(), Some(completion.wr_id), "once and in order");
            }
            return;
        }
        assert!(!self.failed, "a success after a failure: {completion:?}");
        if completion.overtook {
            assert!(op.overtake && matches!(op.kind, Kind::Read), "{op:?} has overtaken others");
            let place = self.awaited.iter().position(|awaited| *awaited == completion.wr_id);
            assert_eq!(place.and_then(|place| self.awaited.remove(place)), Some(completion.wr_id), "once");
        } else {
            assert_eq!(self.awaited.pop_front(), Some(completion.wr_id), "once and in order");
        }
        match op.kind {
            Kind::Read => {
                let (.., salt) = self.peer.unwrap();
                let read = self.bytes(self.map.read + op.to, op.len);
                assert!(read == sources(salt, op.from, op.len), "request {index} read other bytes");
                assert_eq!(completion.byte_len as usize, op.len);
            }
            Kind::FetchAdd { .. } => {
                assert_eq!(self.result(index), self.sum_before(index), "request {index}");
            }
            Kind::Swap { .. } => {
                assert_eq!(self.result(index), self.swapped_before(index), "request {index}");
            }
            Kind::Write { .. } | Kind::Send | Kind::Immediate => {}
        }
    }

    /// Number of the next message in order.
    fn in_order(&mut self) -> usize {
        while self.overtaken.contains(&self.next_message) {
            self.next_message += 1;
        }
        self.next_message += 1;
        self.next_message - 1
    }

    /// Number of the message that has overtaken others, by its bytes.
    fn overtaking(&mut self, completion: &WorkCompletion) -> usize {
        let (.., salt) = self.peer.unwrap();
        let slot = self.map.receives + completion.wr_id as usize * MOST;
        let bytes = self.bytes(slot, completion.byte_len as usize);
        let came = |(number, op): &(usize, &Op)| {
            let is_left = *number >= self.next_message && !self.overtaken.contains(number);
            is_left && op.overtake && matches!(op.kind, Kind::Send) && sources(salt, op.from, op.len) == bytes
        };
        let found = self.peer_plan.messages().enumerate().find(came).map(|(number, _)| number);
        let number = found.expect("a Send that may overtake and has not arrived");
        self.overtaken.insert(number);
        number
    }

    fn result(&self, index: usize) -> u64 {
        self.memory.load_u64(self.map.results + index * 8).unwrap()
    }

    fn on_receive(&mut self, completion: &WorkCompletion) {
        assert_eq!(completion.wr_id as usize, self.received, "receives complete once and in order");
        self.received += 1;
        if completion.status != WcStatus::Success {
            self.failed = true;
            return;
        }
        let (.., salt) = self.peer.unwrap();
        let number = if completion.overtook { self.overtaking(completion) } else { self.in_order() };
        let (op, written) = self.peer_plan.message(number, &self.overtaken);
        let bytes = if let Kind::Send = op.kind { op.len } else { written };
        assert_eq!(completion.byte_len as usize, bytes);
        assert_eq!(completion.immediate, op.expected());
        let place = match op.kind {
            Kind::Send => self.map.receives + completion.wr_id as usize * MOST,
            _ => self.map.sink + op.to,
        };
        assert!(
            self.bytes(place, op.len) == sources(salt, op.from, op.len),
            "message {op:?} has other bytes"
        );
    }

    /// Whether all is posted and has completed, in both directions.
    pub fn is_done(&self) -> bool {
        let messages = self.peer_plan.messages().count();
        self.posted == self.plan.ops.len() && self.awaited.is_empty() && self.received == messages
    }

    /// Checks the conditions that must hold at the end in all cases.
    pub fn check_end(&self, engine: &Engine, context: &str) {
        assert_eq!(self.awaited, [0; 0], "{context}: signalled requests that never completed");
        assert!(self.received <= self.receives_posted, "{context}");
        let info = engine.rnic().query_qp(self.qp).unwrap();
        // A queue pair that was never connected keeps its receives.
        let kept = if info.state == QpState::Idle { info.recv_outstanding } else { 0 };
        assert_eq!((info.send_outstanding, info.recv_outstanding), (0, kept), "{context}");
        assert!(matches!(info.state, QpState::Error | QpState::Idle), "{context}: {:?}", info.state);
        let Map { words, results, source, sink, read, receives, total } = self.map;
        for at in [words, results, source, sink, read, receives, total] {
            let canary = self.bytes(at - CANARY, CANARY);
            assert!(canary.iter().all(|b| *b == CANARY_BYTE), "{context}: the canary before {at} is dead");
        }
        assert!(self.bytes(source, SOURCE) == sources(self.salt, 0, SOURCE), "{context}: the source changed");
        self.check_written(false, context);
    }

    /// Each byte of the sink was written by the peer or, unless `all` must have arrived, is untouched.
    fn check_written(&self, all: bool, context: &str) {
        let (.., salt) = self.peer.unwrap();
        for op in &self.peer_plan.ops {
            if matches!(op.kind, Kind::Write { .. }) {
                let bytes = self.bytes(self.map.sink + op.to, op.len);
                let right = sources(salt, op.from, op.len);
                let fine = bytes.iter().zip(&right).all(|(b, r)| b == r || !all && *b == CANARY_BYTE);
                assert!(fine, "{context}: {op:?} has left other bytes");
            }
        }
    }

    /// Checks the further conditions at the end if no connection failed.
    pub fn check_success(&self, engine: &Engine, context: &str) {
        assert!(self.is_done() && !self.failed, "{context}: {} of {}", self.posted, self.plan.ops.len());
        let trouble = |event: &&AsyncEvent| !matches!(event, AsyncEvent::SoftError { .. });
        assert_eq!(self.asynchronous.iter().find(trouble), None, "{context}");
        self.check_end(engine, context);
        self.check_written(true, context);
        let sum = |plan: &Plan| {
            let added = |op: &Op| if let Kind::FetchAdd { add } = op.kind { add } else { 0 };
            plan.ops.iter().map(added).fold(0, u64::wrapping_add)
        };
        assert_eq!(self.memory.load_u64(self.map.words).unwrap(), sum(&self.peer_plan), "{context}");
    }
}
