//! Target: two engines and the network between them.
//!
//! An input is: settings (bit 7: RDMA/TCP instead of MPA), then records until the end: a request posted by an end, a change of the next frame
//! by the network, or passing time. The expected value of each byte depends only on its offset,
//! independent of the order of arrival: see [`pattern`].

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use xwarp_rnic::{
    Access, Opcode, Operation, Payload, QpId, RecvRequest, Remote, STag, SendFlags, Sge, WcStatus,
    WorkCompletion, WorkRequest,
    engine::{ConnectParams, Engine, EngineConfig},
    rnic::{CmEvent, CompletionRing, QpAttributes, QueuePairOptions, Registration},
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

use crate::{
    canary::{Guarded, betrays},
    input::Input,
    link::FuzzLink,
    wire::mend,
};

const MAX_RECORDS: usize = 300;
const REGION: usize = 8192;
const FILL: u8 = 0x22;
/// Receives posted by one end at the same time, each with its own slot in the inbox.
const SLOTS: usize = 8;
const SLOT: usize = REGION / SLOTS;
const MAX_TURNS: usize = 20_000;

/// The expected byte at this offset. Data from offset `at` is always written, read or sent to offset `at`.
fn pattern(at: usize) -> u8 {
    ((at * 31 + at / 251) as u8) | 0x80
}

/// Runs one input.
pub fn target(data: &[u8]) {
    let mut input = Input::new(data);
    let mut world = World::new(input.u8());
    world.run(Duration::from_millis(100));
    for _ in 0..MAX_RECORDS {
        if input.is_empty() {
            break;
        }
        world.record(&mut input);
    }
    world.run(Duration::from_secs(2));
    world.over();
}

/// The memory regions of one end.
struct Regions {
    /// Filled with the pattern; the peer may read it.
    source: Guarded,
    /// Target of the peer's writes.
    open: Guarded,
    /// Destination of our reads.
    sink: Guarded,
    inbox: Guarded,
    secret: Guarded,
    /// The keys of these regions, in this order.
    keys: [STag; 5],
}

struct Side {
    engine: Engine,
    link: FuzzLink,
    qp: QpId,
    ring: Arc<CompletionRing>,
    regions: Regions,
    /// Numbers of outstanding requests in posting order: sends, receives.
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
    next_id: u64,
    free_slots: HashSet<usize>,
    /// Sends that the peer must receive: offset and length.
    said: VecDeque<(usize, usize)>,
    /// Requests posted from now on are flushed.
    closing: bool,
}

impl Side {
    fn new(seed: u64, framing: FramingConfig, chunk: usize) -> Self {
        let mut engine = Engine::new(EngineConfig {
            secret: Secret::from_number(seed),
            framing,
            ..EngineConfig::default()
        });
        // One of the two ends is busy.
        engine.set_polling(if seed.is_multiple_of(2) { Polling::Busy } else { Polling::No });
        let pd = engine.rnic().registry().alloc_pd().expect("a domain");
        let (cq, ring) = engine.rnic().registry().create_cq(256, None).expect("a completion queue");
        let options = QueuePairOptions { max_send_wr: 32, max_recv_wr: 32, ..QueuePairOptions::default() };
        let attributes = QpAttributes { options, ..QpAttributes::new(pd, cq, cq) };
        let qp = engine.rnic_mut().create_qp(attributes).expect("a queue pair");
        let mut keys = [STag::new(0); 5];
        let mut make = |number: usize, fill, access| {
            let guarded = Guarded::new(REGION, fill);
            let memory = guarded.region().clone();
            let registration = Registration { pd, memory, access, base: 0, stream: None };
            keys[number] = engine.rnic().registry().register(registration).expect("a region");
            guarded
        };
        let source = make(0, Some(0), Access::REMOTE_READ);
        let all: Vec<u8> = (0..REGION).map(pattern).collect();
        source.region().write(0, &all).expect("all of it");
        let open = make(1, Some(FILL), Access::REMOTE_WRITE | Access::LOCAL_WRITE);
        let sink = make(2, Some(FILL), Access::LOCAL_WRITE);
        let inbox = make(3, Some(FILL), Access::LOCAL_WRITE);
        let secret = make(4, None, Access::empty());
        Self {
            engine,
            link: FuzzLink::new(chunk),
            qp,
            ring,
            regions: Regions { source, open, sink, inbox, secret, keys },
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            next_id: 0,
            free_slots: (0..SLOTS).collect(),
            said: VecDeque::new(),
            closing: false,
        }
    }

    fn turn(&mut self, now: Instant) {
        self.engine.turn(now, &mut self.link);
        while let Some(event) = self.engine.next_cm_event() {
            if let CmEvent::ConnectRequest { request, .. } = event {
                let params = AcceptParams { ird: 4, ord: 4, private_data: Vec::new() };
                // The queue pair may not accept it; then the request times out.
                let _ = self.engine.accept(request, self.qp, params);
            }
        }
        while self.engine.next_async_event().is_some() {}
        self.engine.transmit(now, &mut self.link);
    }

    fn disconnect(&mut self) {
        self.closing |= self.engine.disconnect(self.qp).is_ok();
    }

    fn post_recv(&mut self) {
        let Some(slot) = (0..SLOTS).find(|slot| self.free_slots.contains(slot)) else { return };
        let wr_id = self.next_id << 8 | slot as u64;
        let scatter = [Sge { key: self.regions.keys[3], offset: (slot * SLOT) as u64, len: SLOT as u32 }];
        if self.engine.rnic_mut().post_recv(self.qp, &RecvRequest { wr_id, scatter: &scatter }).is_ok() {
            self.next_id += 1;
            self.free_slots.remove(&slot);
            self.receives.push_back(wr_id);
        }
    }

    /// Posts a request with the remote side's keys.
    fn post_send(&mut self, what: u8, offset: usize, len: usize, remote: &[STag; 5], flags: SendFlags) {
        let offset = offset % REGION;
        let len = len.min(REGION - offset);
        let at = |key| Remote { key, offset: offset as u64 };
        let piece = |key, len: usize| [Sge { key, offset: offset as u64, len: len as u32 }];
        let [source, _, sink, ..] = self.regions.keys;
        let message = len.min(SLOT);
        let (operation, local) = match what % 5 {
            0 | 1 => (Operation::Send { invalidate: None }, piece(source, message)),
            2 => (Operation::Write { remote: at(remote[1]) }, piece(source, len)),
            3 => (Operation::Read { remote: at(remote[0]), invalidate: false }, piece(sink, len)),
            // Lacks the access right: the peer ends the stream.
            _ => (Operation::Read { remote: at(remote[4]), invalidate: false }, piece(sink, len)),
        };
        let wr_id = self.next_id;
        let request = WorkRequest {
            wr_id,
            operation,
            payload: Payload::Gather(&local),
            flags: flags | SendFlags::SIGNALED,
        };
        if self.engine.rnic_mut().post_send(self.qp, &request).is_ok() {
            self.next_id += 1;
            self.sends.push_back(wr_id);
            if what % 5 < 2 && !self.closing {
                self.said.push_back((offset, message));
            }
        }
    }

    /// Checks completions: in order for each queue, each once, with the right bytes.
    fn reap(&mut self, heard: &mut VecDeque<(usize, usize)>) {
        while let Some(completion) = self.ring.pop() {
            let WorkCompletion { wr_id, status, opcode, byte_len, .. } = completion;
            if opcode != Opcode::Recv {
                assert_eq!(self.sends.pop_front(), Some(wr_id), "{completion:?}: out of order");
                continue;
            }
            assert_eq!(self.receives.pop_front(), Some(wr_id), "{completion:?}: out of order");
            let slot = (wr_id & 0xff) as usize;
            self.free_slots.insert(slot);
            if status == WcStatus::Success {
                let (offset, len) = heard.pop_front().expect("a message that was sent");
                assert_eq!(byte_len as usize, len, "the length of the message");
                let inbox = &self.regions.inbox.bytes()[slot * SLOT..][..len];
                let right = (offset..).zip(inbox).all(|(at, byte)| *byte == pattern(at));
                assert!(right, "the bytes of a message are wrong");
            }
        }
    }

    fn check_memory(&self) {
        let Regions { source, open, sink, inbox, secret, .. } = &self.regions;
        for guarded in [source, open, sink, inbox, secret] {
            guarded.check();
        }
        assert!((0..).zip(source.bytes()).all(|(at, byte)| byte == pattern(at)), "the source has changed");
        for guarded in [open, sink] {
            let right = (0..).zip(guarded.bytes()).all(|(at, byte)| byte == FILL || byte == pattern(at));
            assert!(right, "bytes at a wrong offset");
        }
        assert!(secret.is_secret(), "written without any right");
    }
}

struct World {
    now: Instant,
    sides: [Side; 2],
    /// Frames in flight to each end.
    under_way: [VecDeque<Vec<u8>>; 2],
    /// CRCs are in use, so that changes by the network are detected.
    crc: bool,
}

impl World {
    fn new(settings: u8) -> Self {
        // RDMA/TCP always has CRCs.
        let rdma_tcp = settings & 128 != 0;
        let crc = rdma_tcp || settings & 4 == 0;
        let wish = |bits: u8| [Markers::Prefer, Markers::Off, Markers::Require][usize::from(bits & 3) % 3];
        let hold_bytes = if settings & 8 != 0 { 4096 } else { 1 << 17 };
        let config = |markers| {
            if rdma_tcp {
                RdmaTcpConfig { hold_bytes, ..RdmaTcpConfig::default() }.into()
            } else {
                MpaConfig { markers, crc, hold_bytes, ..MpaConfig::default() }.into()
            }
        };
        let chunk = if settings & 16 != 0 { 512 } else { usize::MAX };
        let mut sides = [
            Side::new(1, config(wish(settings)), chunk),
            Side::new(2, config(wish(settings >> 5)), usize::MAX),
        ];
        let now = Instant::from_nanos(1_000_000_000);
        let path = path(([192, 0, 2, 2], 40_000), ([192, 0, 2, 1], 4791));
        let [listener, client] = &mut sides;
        listener.engine.listen(&mut listener.link, None, 4791, 4, 1500, None).expect("a listener");
        let params = ConnectParams { ird: 4, ord: 4, ..ConnectParams::default() };
        client.engine.connect(now, &mut client.link, client.qp, path, params).expect("the attempt starts");
        Self { now, sides, under_way: [VecDeque::new(), VecDeque::new()], crc }
    }

    fn record(&mut self, input: &mut Input<'_>) {
        let (what, arg) = (input.u8(), input.u8());
        let end = usize::from(what >> 7);
        match what & 0x0f {
            0 | 1 => self.sides[end].post_recv(),
            2..=5 => {
                let (offset, len) = (input.u16(), input.u16());
                let remote = self.sides[1 - end].regions.keys;
                let flags = SendFlags::from_bits_truncate(arg >> 5);
                self.sides[end].post_send(arg & 31, offset.into(), len.into(), &remote, flags);
            }
            6 => {
                self.under_way[end].pop_front();
            }
            7 => {
                if let Some(frame) = self.under_way[end].front().cloned() {
                    self.under_way[end].push_back(frame);
                }
            }
            8 => self.under_way[end].rotate_left(usize::from(arg).min(self.under_way[end].len())),
            9 => self.corrupt(end, input.u16().into(), arg),
            10 => self.split(end, input.u16().into()),
            11 => self.run(Duration::from_millis(arg.into())),
            12 => self.sides[end].disconnect(),
            13 => self.sides[end].engine.mtu_changed(self.now, u16::from(arg) * 8 + 200),
            _ => {
                // Delivers a few frames, to this end or the other one first.
                for _ in 0..=arg & 7 {
                    self.deliver(end);
                }
            }
        }
        self.turns();
    }

    /// Changes the next frame to one end in a way that TCP cannot detect.
    fn corrupt(&mut self, end: usize, at: usize, by: u8) {
        if let Some(frame) = self.under_way[end].front_mut().filter(|_| self.crc)
            && let Some(byte) = frame.get_mut(14 + at % 1500)
        {
            *byte ^= by;
            mend(frame);
        }
    }

    /// Splits the payload of the next frame to one end into two segments.
    fn split(&mut self, end: usize, at: usize) {
        let Some(frame) = self.under_way[end].pop_front() else { return };
        let headers = frame.get(46).map_or(0, |offset| 34 + usize::from(offset >> 4) * 4);
        let payload = frame.len().saturating_sub(headers);
        if payload < 2 || headers < 54 {
            return self.under_way[end].push_front(frame);
        }
        let cut = headers + 1 + at % (payload - 1);
        let mut first = frame[..cut].to_vec();
        let mut second = [&frame[..headers], &frame[cut..]].concat();
        let seq = u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]);
        second[38..42].copy_from_slice(&seq.wrapping_add((cut - headers) as u32).to_be_bytes());
        for part in [&mut second, &mut first] {
            let len = (part.len() - 14) as u16;
            part[16..18].copy_from_slice(&len.to_be_bytes());
            mend(part);
            self.under_way[end].push_front(part.clone());
        }
    }

    fn deliver(&mut self, end: usize) {
        if let Some(frame) = self.under_way[end].pop_front() {
            self.sides[end].link.arrive(&frame);
        }
    }

    /// Runs one turn of both ends.
    fn turns(&mut self) {
        for end in 0..2 {
            self.sides[end].turn(self.now);
            for frame in std::mem::take(&mut self.sides[end].link.sent) {
                assert!(!betrays(frame.get(54..).unwrap_or_default()), "a secret was sent");
                self.under_way[1 - end].push_back(frame);
            }
            let [first, second] = &mut self.sides;
            let (this, other) = if end == 0 { (first, second) } else { (second, first) };
            this.reap(&mut other.said);
        }
    }

    /// Delivers all frames in flight and lets time pass.
    fn run(&mut self, duration: Duration) {
        let limit = self.now + duration;
        for _ in 0..MAX_TURNS {
            let idle = self.under_way.iter().all(VecDeque::is_empty);
            if idle {
                let [a, b] = &self.sides;
                match a.engine.next_deadline().into_iter().chain(b.engine.next_deadline()).min() {
                    Some(at) if at <= limit => self.now = self.now.max(at),
                    _ => break,
                }
            }
            for end in 0..2 {
                for _ in 0..self.under_way[end].len() {
                    self.deliver(end);
                }
            }
            self.turns();
        }
        self.now = limit;
        self.turns();
    }

    /// Closes everything and checks that nothing is left.
    fn over(mut self) {
        for side in &mut self.sides {
            side.disconnect();
        }
        self.run(Duration::from_secs(1));
        for side in &mut self.sides {
            let _ = side.engine.abort(side.qp);
        }
        self.run(Duration::from_secs(200));
        for side in &mut self.sides {
            assert_eq!(side.engine.stack().connections(), 0, "connections do not end");
            assert_eq!((side.link.lent(), side.link.retained()), (0, 0), "frames leaked");
            assert_eq!((side.sends.len(), side.receives.len()), (0, 0), "requests never completed");
            side.check_memory();
        }
    }
}
