//! The traffic whose instructions are counted: two engines in one thread and virtual time, on a link in memory.

use std::{sync::Arc, time::Duration};

use xwarp_rnic::{
    Access, Memory, Opcode, Operation, Pages, Payload, QpId, RecvRequest, Remote, STag, SendFlags, Sge,
    WcStatus, WorkRequest,
    engine::{ConnectParams, Engine, EngineConfig},
    rnic::{CmEvent, CompletionRing, QpAttributes, Registration},
    sim::path,
};
use xwarp_tcp::{
    framing::{AcceptParams, FramingConfig},
    secret::Secret,
    stack::Polling,
    time::Instant,
};

use crate::memory_link::{MemoryLink, cable};

const PORT: u16 = 7;
/// Posted receives of each end, and messages in flight in the pipelined scenarios.
const DEPTH: usize = 64;
/// Bytes of a small and of a large message.
const SMALL: usize = 64;
const LARGE: usize = 64 << 10;
/// Bytes of the largest headers before a packet's IP header.
const ETHERNET: usize = 14;
/// Virtual time from one turn to the next.
const STEP: Duration = Duration::from_micros(2);
/// Pieces of traffic before the count begins, so that tables and lists have their sizes and the windows are open.
const WARM_UP: usize = 64;

/// One kind of traffic.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    pub name: &'static str,
    pub what: &'static str,
    /// The divisor of the figures.
    pub unit: Unit,
    /// Over IPv6.
    v6: bool,
    mtu: u16,
    /// TCP checksums are left to the link, as on a veth.
    offload: bool,
    /// Bytes of a chunk; `None`: frames have one chunk.
    chunk: Option<usize>,
    len: usize,
    kind: Kind,
    /// Messages in flight; 1 is a ping-pong.
    depth: usize,
    /// Messages that are counted.
    messages: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Message,
    /// A frame with payload.
    Frame,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
}

/// Usable bytes of a receive chunk of AF_XDP.
const CHUNK: usize = 3840;

/// All scenarios, in the order of the report.
pub const SCENARIOS: [Scenario; 10] = [
    small("send-64", "Sends of 64 bytes, ping-pong: one way", Kind::Send, 1),
    small("write-64", "RDMA Writes of 64 bytes, ping-pong: one way", Kind::Write, 1),
    Scenario {
        v6: true,
        ..small("send-64-v6", "Sends of 64 bytes over IPv6, ping-pong: one way", Kind::Send, 1)
    },
    Scenario {
        offload: true,
        ..small(
            "send-64-offload",
            "The Sends over IPv4, with checksums left to the link as on a veth",
            Kind::Send,
            1,
        )
    },
    Scenario { offload: true, ..small("write-64-offload", "The Writes, likewise", Kind::Write, 1) },
    small("sends-64", "Sends of 64 bytes in one direction, 64 in flight", Kind::Send, DEPTH),
    small("writes-64", "RDMA Writes of 64 bytes in one direction, 64 in flight", Kind::Write, DEPTH),
    large("frame-1500", "RDMA Writes of 64 KiB in one direction at an MTU of 1500, 16 in flight", 1500),
    large("frame-9000", "RDMA Writes of 64 KiB in one direction at an MTU of 9000, 16 in flight", 9000),
    Scenario {
        name: "chain-9000",
        what: "The same in chunks of 3840 bytes: each frame is a chain of three",
        chunk: Some(CHUNK),
        ..large("", "", 9000)
    },
];

const fn small(name: &'static str, what: &'static str, kind: Kind, depth: usize) -> Scenario {
    Scenario {
        name,
        what,
        unit: Unit::Message,
        v6: false,
        mtu: 1500,
        offload: false,
        chunk: None,
        len: SMALL,
        kind,
        depth,
        messages: 2048,
    }
}

const fn large(name: &'static str, what: &'static str, mtu: u16) -> Scenario {
    Scenario {
        name,
        what,
        unit: Unit::Frame,
        v6: false,
        mtu,
        offload: false,
        chunk: None,
        len: LARGE,
        kind: Kind::Write,
        depth: 16,
        messages: 128,
    }
}

/// One engine with its objects.
struct End {
    engine: Engine,
    link: MemoryLink,
    qp: QpId,
    ring: Arc<CompletionRing>,
    key: STag,
    /// Messages posted, and those whose completion was taken.
    posted: usize,
    completed: usize,
    received: usize,
}

/// Two connected ends.
pub struct Pair {
    now: Instant,
    ends: [End; 2],
    scenario: Scenario,
}

impl End {
    fn new(link: MemoryLink, framing: FramingConfig) -> Self {
        let config = EngineConfig { secret: Secret::from_number(1), framing, ..EngineConfig::default() };
        let mut engine = Engine::new(config);
        engine.set_polling(Polling::Busy);
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let (cq, ring) = engine.rnic().registry().create_cq(1024, None).unwrap();
        let qp = engine.rnic_mut().create_qp(QpAttributes::new(pd, cq, cq)).unwrap();
        let memory = Memory::anonymous(DEPTH * LARGE, Pages::Normal).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let key = engine
            .rnic()
            .registry()
            .register(Registration { pd, memory, access, base: 0, stream: None })
            .unwrap();
        Self { engine, link, qp, ring, key, posted: 0, completed: 0, received: 0 }
    }

    fn post_receive(&mut self, number: usize) {
        let offset = (number % DEPTH * LARGE) as u64;
        let scatter = [Sge { key: self.key, offset, len: LARGE as u32 }];
        let request = RecvRequest { wr_id: 0, scatter: &scatter };
        self.engine.rnic_mut().post_recv(self.qp, &request).unwrap();
    }

    fn post(&mut self, peer: STag, scenario: &Scenario) {
        let offset = (self.posted % DEPTH * LARGE) as u64;
        let operation = match scenario.kind {
            Kind::Send => Operation::Send { invalidate: None },
            Kind::Write => Operation::Write { remote: Remote { key: peer, offset } },
        };
        let payload = Payload::Piece(Sge { key: self.key, offset, len: scenario.len as u32 });
        let request = WorkRequest { wr_id: 0, operation, payload, flags: SendFlags::SIGNALED };
        self.engine.rnic_mut().post_send(self.qp, &request).unwrap();
        self.posted += 1;
    }

    fn transmit(&mut self, now: Instant) {
        let Self { engine, link, .. } = self;
        if engine.wants_to_transmit() {
            engine.transmit(now, link);
        }
    }

    /// A poll of an application: takes a completion, or runs the engine if there is none.
    fn poll(&mut self, now: Instant) {
        let Self { engine, link, .. } = self;
        if self.ring.is_empty() {
            engine.turn(now, link);
        }
        while let Some(completion) = self.ring.pop() {
            assert_eq!(completion.status, WcStatus::Success);
            if matches!(completion.opcode, Opcode::Recv) {
                self.post_receive(self.received);
                self.received += 1;
            } else {
                self.completed += 1;
            }
        }
    }
}

impl Pair {
    /// Connects two engines for `scenario`, and lets some of its traffic pass.
    pub fn new(scenario: Scenario, framing: &FramingConfig) -> Self {
        let frame_bytes = usize::from(scenario.mtu) + ETHERNET;
        let links = cable(scenario.chunk.unwrap_or(frame_bytes), frame_bytes, scenario.offload);
        let mut ends = links.map(|link| End::new(link, framing.clone()));
        let [near, far] = &mut ends;
        let mut now = Instant::ZERO;
        far.engine.listen(&mut far.link, None, PORT, 8, scenario.mtu, None).unwrap();
        let path = path([(1, 40_000), (2, PORT)], scenario.v6, scenario.mtu);
        near.engine.connect(now, &mut near.link, near.qp, path, ConnectParams::default()).unwrap();
        let mut established = 0;
        while established < 2 {
            for end in [&mut *near, far] {
                end.engine.turn(now, &mut end.link);
                match end.engine.next_cm_event() {
                    Some(CmEvent::ConnectRequest { request, .. }) => {
                        end.engine.accept(request, end.qp, AcceptParams::default()).unwrap();
                    }
                    Some(CmEvent::Established { .. }) => established += 1,
                    _ => {}
                }
            }
            now += STEP;
            assert!(now < Instant::from_nanos(1_000_000), "not connected");
        }
        for end in &mut ends {
            (0..DEPTH).for_each(|number| end.post_receive(number));
        }
        let mut pair = Self { now, ends, scenario };
        pair.pass(WARM_UP);
        pair
    }

    /// Number of units in the counted traffic, which [`Self::counted`] has run.
    pub fn run(&mut self) -> u64 {
        let before = self.frames();
        self.counted();
        match self.scenario.unit {
            Unit::Message => self.scenario.messages as u64,
            Unit::Frame => self.frames() - before,
        }
    }

    /// Runs the traffic. The profiler starts and stops counting at this function by its name.
    #[inline(never)]
    fn counted(&mut self) {
        self.pass(self.scenario.messages);
    }

    /// Frames with payload that the first end has sent.
    fn frames(&self) -> u64 {
        let counters = self.ends[0].engine.stack().tcp_counters();
        counters.segments_out - counters.acks_out
    }

    fn pass(&mut self, messages: usize) {
        if self.scenario.depth == 1 { self.ping_pong(messages) } else { self.stream(messages) }
    }

    fn step(&mut self) {
        self.now += STEP;
    }

    fn ping_pong(&mut self, messages: usize) {
        for message in 0..messages {
            let [from, to] = &mut self.ends;
            let (from, to) = if message % 2 == 0 { (from, to) } else { (to, from) };
            from.post(to.key, &self.scenario);
            from.transmit(self.now);
            to.poll(self.now);
            self.step();
        }
    }

    fn stream(&mut self, messages: usize) {
        let end = self.ends[0].completed + messages;
        while self.ends[0].completed < end {
            let [near, far] = &mut self.ends;
            while near.posted < end && near.posted - near.completed < self.scenario.depth {
                near.post(far.key, &self.scenario);
            }
            near.transmit(self.now);
            far.poll(self.now);
            near.poll(self.now);
            self.step();
        }
    }
}
