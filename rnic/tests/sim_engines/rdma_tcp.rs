//! Two engines with RDMA/TCP of 2000: the segments on the wire, and placement beyond gaps.

use std::{sync::Arc, time::Duration};

use xwarp_rnic::{
    Access, Memory, Operation, Pages, Payload, QpId, QpState, QueuePairOptions, RecvRequest, Remote, STag,
    SendFlags, Sge, WcStatus, WorkRequest,
    engine::{ConnectParams, EngineConfig},
    rnic::{CompletionRing, QpAttributes, Registration},
    sim::{Station, ipv4, path},
};
use xwarp_tcp::{
    framing::{FramingConfig, FramingCounters},
    mpa::MpaConfig,
    rdma_tcp::RdmaTcpConfig,
    secret::Secret,
    sim::{Faults, Node, Recut, Wire, WireConfig, run},
    tcp::TcpConfig,
    time::Instant,
};

const PORT: u16 = 7;
const MIB: usize = 1 << 20;

/// An end, and the payloads of the TCP segments that it received.
struct End {
    station: Station,
    qp: QpId,
    memory: Memory,
    key: STag,
    /// Another key of the same memory.
    other_key: STag,
    payloads: Vec<Vec<u8>>,
    ring: Arc<CompletionRing>,
}

impl End {
    fn new(link: xwarp_tcp::sim::SimLink, seed: u64, any_receive: bool, framing: FramingConfig) -> Self {
        let tcp = TcpConfig { initial_window: 1000, receive_window: 4 << 20, ..TcpConfig::default() };
        let secret = Secret::from_number(seed);
        let mut station =
            Station::new(link, EngineConfig { secret, tcp, framing, ..EngineConfig::default() });
        let engine = &mut station.engine;
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let (cq, ring) = engine.rnic().registry().create_cq(4096, None).unwrap();
        let options = QueuePairOptions { any_receive, ..QueuePairOptions::default() };
        let qp =
            engine.rnic_mut().create_qp(QpAttributes { options, ..QpAttributes::new(pd, cq, cq) }).unwrap();
        let memory = Memory::anonymous(4 * MIB, Pages::Normal).unwrap();
        let register = || {
            let memory = memory.clone();
            engine
                .rnic()
                .registry()
                .register(Registration { pd, memory, access: Access::all(), base: 0, stream: None })
                .unwrap()
        };
        let (key, other_key) = (register(), register());
        Self { station, qp, memory, key, other_key, payloads: Vec::new(), ring }
    }

    fn filled(&self) -> usize {
        let mut bytes = vec![0; 4 * MIB];
        self.memory.read(0, &mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte != 0).count()
    }

    fn counters(&self) -> FramingCounters {
        self.station.engine.stack().framing_counters()
    }
}

impl Node for End {
    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(bytes) = self.station.receive_one(now) {
            busy = true;
            let packet = 14 + usize::from(u16::from_be_bytes([bytes[16], bytes[17]]));
            let payload = &bytes[34 + usize::from(bytes[46] >> 4) * 4..packet];
            if !payload.is_empty() {
                self.payloads.push(payload.to_vec());
            }
        }
        self.station.turn(now);
        busy
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.station.next_deadline()
    }
}

struct Pair {
    wire: Wire,
    now: Instant,
    near: End,
    far: End,
}

impl Pair {
    fn new() -> Self {
        Self::with(false)
    }

    fn with(any_receive: bool) -> Self {
        let framing = || rdma_tcp().into();
        Self::framed([framing(), framing()], any_receive, Faults::default())
    }

    /// Ends with these framings, connected over a wire with these faults in both directions.
    fn framed([near_framing, far_framing]: [FramingConfig; 2], any_receive: bool, faults: Faults) -> Self {
        let (tx_chunks, rx_chunks, ring) = (4096, 4096, 4096);
        let (wire, near, far) = Wire::new(WireConfig { tx_chunks, rx_chunks, ring, ..WireConfig::default() });
        wire.with_faults([faults; 2]);
        let mut near = End::new(near, 1, false, near_framing);
        let mut far = End::new(far, 2, any_receive, far_framing);
        let bytes: Vec<u8> = (0..2 * MIB).map(|at| (at % 251) as u8 | 1).collect();
        near.memory.write(0, &bytes).unwrap();
        let listening = &mut far.station;
        listening.engine.listen(&mut listening.link, None, PORT, 8, 1500, None).unwrap();
        listening.expected.insert(ipv4(1), far.qp);
        listening.accept = xwarp_tcp::framing::AcceptParams { ird: 4, ord: 4, ..Default::default() };
        let path = path([(1, 40_000), (2, PORT)], false, 1500);
        let params = ConnectParams { ird: 4, ord: 4, ..ConnectParams::default() };
        let asking = &mut near.station;
        asking.engine.connect(Instant::ZERO, &mut asking.link, near.qp, path, params).unwrap();
        let mut pair = Self { wire, now: Instant::ZERO, near, far };
        pair.pass(Duration::from_millis(100));
        pair
    }

    fn pass(&mut self, time: Duration) {
        run(&self.wire, &mut [&mut self.near, &mut self.far], self.now, time, |_, _| false);
        self.now += time;
    }

    /// The first end writes the bytes from `at` on to the same place of the second end.
    fn write(&mut self, at: usize, len: usize) {
        let remote = Remote { key: self.far.key, offset: at as u64 };
        let pieces = [Sge { key: self.near.key, offset: at as u64, len: len as u32 }];
        post(&mut self.near, Operation::Write { remote }, &pieces);
    }

    /// The second end reads the bytes from `at` on to the same place of its own.
    fn read(&mut self, at: usize, len: usize) {
        let remote = Remote { key: self.near.key, offset: at as u64 };
        let pieces = [Sge { key: self.far.key, offset: at as u64, len: len as u32 }];
        post(&mut self.far, Operation::Read { remote, invalidate: false }, &pieces);
    }
}

fn rdma_tcp() -> RdmaTcpConfig {
    RdmaTcpConfig { hold_bytes: 4 << 20, ..RdmaTcpConfig::default() }
}

fn post(end: &mut End, operation: Operation, pieces: &[Sge]) {
    let payload = Payload::Gather(pieces);
    let request = WorkRequest { wr_id: 0, operation, payload, flags: SendFlags::SIGNALED };
    end.station.engine.rnic_mut().post_send(end.qp, &request).unwrap();
}

/// Section 2 recommends it, and a receiver depends on it beyond a gap.
#[test]
fn sim_rdma_tcp_every_tcp_segment_is_one_rdma_segment() {
    let mut pair = Pair::new();
    pair.write(0, 100_000);
    pair.read(200_000, 100_000);
    pair.pass(Duration::from_secs(1));
    assert_eq!(pair.far.filled(), 200_000);
    let id = pair.far.payloads[0][4..12].to_vec();
    for payload in pair.far.payloads.iter().chain(&pair.near.payloads) {
        assert_eq!((payload[0], &payload[4..12]), (1, &id[..]));
        let len = usize::from(u16::from_be_bytes([payload[2], payload[3]]));
        assert_eq!(len.next_multiple_of(4) + 4, payload.len());
    }
    assert!(pair.far.payloads.len() > 140, "{} segments", pair.far.payloads.len());
    assert_eq!((pair.far.payloads[0][1], pair.far.payloads[0][24]), (0x0c, 1), "Connect");
    assert_eq!((pair.near.payloads[0][1], pair.near.payloads[0][24]), (0x0c, 2), "Accept");
}

/// A client's first byte selects a listener's framing, even if that byte does not arrive first.
#[test]
fn sim_one_listener_accepts_clients_of_either_framing() {
    let recut = Recut { split: 1.0, join: 0.0, wait: Duration::ZERO, most_bytes: 1500 };
    let reordered = Faults {
        recut: Some(recut),
        reorder: 0.5,
        reorder_by: Duration::from_millis(5),
        reorder_depth: 5,
        loss: 0.02,
        ..Faults::default()
    };
    let mpa = || MpaConfig { hold_bytes: 4 << 20, ..MpaConfig::default() };
    let clients: [(FramingConfig, &[u8]); 2] =
        [(mpa().into(), b"MPA ID Req"), (rdma_tcp().into(), &[1, 0x0c])];
    for (client, first) in clients {
        for faults in [Faults::default(), reordered] {
            let either = FramingConfig::Either(mpa(), rdma_tcp());
            let mut pair = Pair::framed([client.clone(), either], false, faults);
            pair.pass(Duration::from_secs(30));
            pair.write(0, 100_000);
            pair.read(200_000, 100_000);
            pair.pass(Duration::from_secs(100));
            assert_eq!(pair.far.filled(), 200_000, "{client:?} {faults:?}");
            let whole = faults.recut.is_some() || pair.far.payloads[0].starts_with(first);
            assert!(whole, "{:02x?}", pair.far.payloads[0]);
        }
    }
}

/// One segment is lost; a Write of a MiB behind it is placed and not held.
fn beyond_a_gap(recut: Option<Recut>) -> FramingCounters {
    let mut pair = Pair::new();
    let slow = Faults { delay: Duration::from_millis(20), ..Faults::default() };
    pair.wire.with_faults([Faults { loss: 1.0, ..slow }, slow]);
    pair.write(3 * MIB, 1000);
    pair.pass(Duration::from_micros(1));
    pair.wire.with_faults([Faults { recut, ..slow }, slow]);
    pair.write(0, MIB);
    pair.pass(Duration::from_millis(25));
    let (placed, held) = (pair.far.filled(), pair.far.station.engine.stack().held_bytes());
    assert!(placed > 100_000, "{placed} bytes placed, {held} held");
    pair.pass(Duration::from_secs(5));
    assert_eq!(pair.far.filled(), MIB);
    let counters = pair.far.counters();
    assert!(counters.placed_early > 70, "{counters:?}");
    counters
}

#[test]
fn sim_rdma_tcp_writes_and_responses_are_placed_beyond_a_gap() {
    let writes = beyond_a_gap(None);
    assert!(writes.held_bytes_peak < 4096, "{writes:?}");
    let mut pair = Pair::new();
    let lossy = Faults { loss: 0.02, delay: Duration::from_millis(1), ..Faults::default() };
    pair.wire.with_faults([lossy; 2]);
    pair.read(0, MIB);
    pair.pass(Duration::from_secs(60));
    assert_eq!(pair.far.filled(), MIB);
    let responses = pair.far.counters();
    assert!(responses.placed_early > 10 && responses.held_bytes_peak < 4096, "{responses:?}");
}

/// A hop that splits segments: a segment is still found when its first half begins the held bytes, or follows a segment
/// that was found.
#[test]
fn sim_rdma_tcp_segments_that_a_hop_splits_are_found_once_they_are_whole() {
    let recut = Recut { split: 0.5, join: 0.0, wait: Duration::ZERO, most_bytes: 1500 };
    let counters = beyond_a_gap(Some(recut));
    assert!(counters.held_bytes_peak < 8192, "{counters:?}");
}

/// A Write of 3000 bytes with Immediate Data is lost; behind it come a Send with these flags of one segment, one of two
/// segments, and a plain one. Returns what the receives were completed with, before and after the retransmission:
/// identifier, bytes, first byte, and whether the message overtook others.
fn behind_a_lost_write(flags: SendFlags, any_receive: bool) -> [Vec<(u64, u32, u8, bool)>; 2] {
    let mut pair = Pair::with(any_receive);
    for wr_id in 0..4 {
        pair.receive(wr_id, MIB + wr_id as usize * 4096);
    }
    let slow = Faults { delay: Duration::from_millis(20), ..Faults::default() };
    pair.wire.with_faults([Faults { loss: 1.0, ..slow }, slow]);
    let remote = Remote { key: pair.far.key, offset: 0 };
    let lost = [Sge { key: pair.near.key, offset: 0, len: 3000 }];
    post(&mut pair.near, Operation::WriteImmediate { remote, data: *b"all here" }, &lost);
    pair.pass(Duration::from_micros(1));
    pair.wire.with_faults([slow; 2]);
    for (at, len, flags) in [(1, 64, flags), (2, 2000, flags), (3, 64, SendFlags::empty())] {
        let payload = [Sge { key: pair.near.key, offset: at, len }];
        let operation = Operation::Send { invalidate: None };
        let request = WorkRequest { wr_id: 0, operation, payload: Payload::Gather(&payload), flags };
        pair.near.station.engine.rnic_mut().post_send(pair.near.qp, &request).unwrap();
        pair.pass(Duration::from_micros(1));
    }
    [Duration::from_millis(25), Duration::from_secs(5)].map(|time| {
        pair.pass(time);
        let completions = std::iter::from_fn(|| pair.far.ring.pop());
        completions
            .map(|c| {
                let mut first = [0];
                pair.far.memory.read(MIB + c.wr_id as usize * 4096, &mut first).unwrap();
                (c.wr_id, c.byte_len, first[0], c.overtook)
            })
            .collect()
    })
}

/// Section 3.4, order: the application of either end can forbid it.
#[test]
fn sim_rdma_tcp_a_send_overtakes_a_lost_write_if_both_ends_want_it() {
    let first_byte = |at: usize| (at % 251) as u8 | 1;
    let early = vec![(0, 64, first_byte(1), true)];
    let rest = vec![(1, 3000, 0, false), (2, 2000, first_byte(2), false), (3, 64, first_byte(3), false)];
    assert_eq!(behind_a_lost_write(SendFlags::OVERTAKE, true), [early, rest]);
    let in_order = vec![
        (0, 3000, 0, false),
        (1, 64, first_byte(1), false),
        (2, 2000, first_byte(2), false),
        (3, 64, first_byte(3), false),
    ];
    for (flags, any_receive) in [(SendFlags::OVERTAKE, false), (SendFlags::empty(), true)] {
        assert_eq!(behind_a_lost_write(flags, any_receive), [vec![], in_order.clone()]);
    }
}

/// A Write, and then a Read without flags, are lost; behind them come a Read with these flags and one of two segments.
/// Returns what the requests were completed with, before and after the retransmission: identifier, bytes, and whether the
/// request overtook others.
fn reads_behind_a_loss(flags: SendFlags) -> [Vec<(u64, u32, bool)>; 2] {
    let mut pair = Pair::new();
    let (near, far) = (pair.near.key, pair.far.key);
    let bytes: Vec<u8> = (0..MIB).map(|at| (at % 241) as u8 | 1).collect();
    pair.far.memory.write(MIB, &bytes).unwrap();
    let request = |pair: &mut Pair, wr_id: u64, len: u32, operation: Operation, flags| {
        let payload = [Sge { key: near, offset: 2 * MIB as u64 + wr_id * 8192, len }];
        let request = WorkRequest { wr_id, operation, payload: Payload::Gather(&payload), flags };
        pair.near.station.engine.rnic_mut().post_send(pair.near.qp, &request).unwrap();
    };
    let from = |wr_id: u64| Operation::Read {
        remote: Remote { key: far, offset: MIB as u64 + wr_id * 8192 },
        invalidate: false,
    };
    let slow = Faults { delay: Duration::from_millis(20), ..Faults::default() };
    pair.wire.with_faults([Faults { loss: 1.0, ..slow }, slow]);
    let write = Operation::Write { remote: Remote { key: far, offset: 0 } };
    request(&mut pair, 0, 500, write, SendFlags::SIGNALED);
    request(&mut pair, 1, 100, from(1), SendFlags::SIGNALED);
    pair.pass(Duration::from_micros(1));
    pair.wire.with_faults([slow; 2]);
    request(&mut pair, 2, 64, from(2), SendFlags::SIGNALED | flags);
    request(&mut pair, 3, 2000, from(3), SendFlags::SIGNALED | flags);
    pair.pass(Duration::from_micros(1));
    let completed = [Duration::from_millis(45), Duration::from_secs(5)].map(|time| {
        pair.pass(time);
        std::iter::from_fn(|| pair.near.ring.pop()).map(|c| (c.wr_id, c.byte_len, c.overtook)).collect()
    });
    for (wr_id, len) in [(1, 100), (2, 64), (3, 2000)] {
        let mut read = vec![0; len];
        pair.near.memory.read(2 * MIB + wr_id * 8192, &mut read).unwrap();
        assert!(read == bytes[wr_id * 8192..wr_id * 8192 + len], "Read {wr_id} has other bytes");
    }
    completed
}

/// Section 3.4, order; A18: responses come in the order of execution.
#[test]
fn sim_rdma_tcp_a_read_overtakes_a_lost_write_and_a_lost_read() {
    let early = vec![(2, 64, true), (3, 2000, true)];
    let rest = vec![(0, 500, false), (1, 100, false)];
    assert_eq!(reads_behind_a_loss(SendFlags::OVERTAKE), [early, rest]);
    let in_order = vec![(0, 500, false), (1, 100, false), (2, 64, false), (3, 2000, false)];
    assert_eq!(reads_behind_a_loss(SendFlags::empty()), [vec![], in_order]);
}

/// More Reads that may overtake than IRD, between Writes and under loss.
#[test]
fn sim_rdma_tcp_reads_that_may_overtake_complete_once_under_loss() {
    let mut pair = Pair::new();
    let lossy = Faults { loss: 0.05, delay: Duration::from_millis(1), ..Faults::default() };
    pair.wire.with_faults([lossy; 2]);
    for at in 0..60 {
        pair.write(at * 4096, 4096);
        let remote = Remote { key: pair.far.key, offset: at as u64 * 64 };
        let pieces = [Sge { key: pair.near.key, offset: (2 * MIB + at * 64) as u64, len: 64 }];
        let operation = Operation::Read { remote, invalidate: false };
        let flags = SendFlags::SIGNALED | SendFlags::OVERTAKE;
        let request = WorkRequest { wr_id: 1, operation, payload: Payload::Gather(&pieces), flags };
        pair.near.station.engine.rnic_mut().post_send(pair.near.qp, &request).unwrap();
    }
    pair.pass(Duration::from_secs(100));
    let completions: Vec<_> = std::iter::from_fn(|| pair.near.ring.pop()).collect();
    assert_eq!(completions.len(), 120);
    assert!(completions.iter().all(|completion| completion.status == WcStatus::Success));
    assert!(completions.iter().any(|completion| completion.overtook));
    assert_eq!(pair.far.filled(), 60 * 4096);
}

/// A3: order 0 does not make a Send wait until the source of a Read before it was read, but a fence at the requester does.
#[test]
fn sim_rdma_tcp_a_fenced_send_waits_until_the_source_of_a_read_was_read() {
    for (flags, waits) in [(SendFlags::FENCE, true), (SendFlags::empty(), false)] {
        let mut pair = Pair::new();
        let slow = Faults { delay: Duration::from_millis(20), ..Faults::default() };
        pair.wire.with_faults([slow; 2]);
        let scatter = [Sge { key: pair.far.key, offset: 3 * MIB as u64, len: 64 }];
        pair.far
            .station
            .engine
            .rnic_mut()
            .post_recv(pair.far.qp, &RecvRequest { wr_id: 0, scatter: &scatter })
            .unwrap();
        let remote = Remote { key: pair.far.key, offset: 0 };
        let sink = [Sge { key: pair.near.key, offset: 2 * MIB as u64, len: MIB as u32 }];
        post(&mut pair.near, Operation::Read { remote, invalidate: false }, &sink);
        let payload = Payload::Gather(&[Sge { key: pair.near.key, offset: 0, len: 64 }]);
        let operation = Operation::Send { invalidate: None };
        let request = WorkRequest { wr_id: 1, operation, payload, flags };
        pair.near.station.engine.rnic_mut().post_send(pair.near.qp, &request).unwrap();
        while pair.far.ring.pop().is_none() {
            assert!(pair.now < Instant::ZERO + Duration::from_secs(10), "the Send does not arrive");
            pair.pass(Duration::from_millis(1));
        }
        assert_eq!(pair.near.ring.pop().is_some(), waits, "{flags:?}");
    }
}

/// The completions of an end so far: identifier, status, bytes, solicited event, invalidated tag.
fn completions(end: &End) -> Vec<(u64, WcStatus, u32, bool, Option<STag>)> {
    let all = std::iter::from_fn(|| end.ring.pop());
    all.map(|c| (c.wr_id, c.status, c.byte_len, c.solicited, c.invalidated)).collect()
}

impl Pair {
    /// The first end reads from a place of the second end, or writes to it.
    fn touch(&mut self, remote: Remote, reads: bool) {
        let pieces = [Sge { key: self.near.key, offset: MIB as u64, len: 8 }];
        let operation =
            if reads { Operation::Read { remote, invalidate: false } } else { Operation::Write { remote } };
        post(&mut self.near, operation, &pieces);
    }

    /// Waits for the Terminate of the second end, and returns its layer, type and code.
    fn terminate(&mut self) -> [u8; 2] {
        self.pass(Duration::from_secs(10));
        let last = self.near.payloads.last().unwrap();
        assert_eq!((last[1], last[19], last[24]), (0x0c, 2, 4), "{last:02x?}");
        [last[28], last[29]]
    }

    /// The first end sends `len` bytes.
    fn send(&mut self, len: u32, invalidate: Option<STag>, flags: SendFlags) {
        let payload = Payload::Gather(&[Sge { key: self.near.key, offset: 0, len }]);
        let operation = Operation::Send { invalidate };
        let request = WorkRequest { wr_id: 9, operation, payload, flags: flags | SendFlags::SIGNALED };
        self.near.station.engine.rnic_mut().post_send(self.near.qp, &request).unwrap();
    }

    /// The far end receives up to 4096 bytes at `offset` of its memory.
    fn receive(&mut self, wr_id: u64, offset: usize) {
        let scatter = [Sge { key: self.far.key, offset: offset as u64, len: 4096 }];
        let request = RecvRequest { wr_id, scatter: &scatter };
        self.far.station.engine.rnic_mut().post_recv(self.far.qp, &request).unwrap();
    }
}

/// Section 5 of the study: Sends with solicited event and with invalidation, and messages without bytes.
#[test]
fn sim_rdma_tcp_sends_invalidate_and_raise_events_and_may_be_empty() {
    let mut pair = Pair::new();
    for wr_id in 0..4 {
        pair.receive(wr_id, 2 * MIB);
    }
    let key = pair.far.other_key;
    pair.send(3000, None, SendFlags::SOLICITED);
    pair.send(0, None, SendFlags::empty());
    pair.send(2000, Some(key), SendFlags::SOLICITED);
    pair.send(0, None, SendFlags::SOLICITED);
    pair.write(0, 0);
    pair.read(0, 0);
    pair.pass(Duration::from_secs(1));
    let ok = WcStatus::Success;
    assert_eq!(
        completions(&pair.far),
        [
            (0, ok, 3000, true, None),
            (1, ok, 0, false, None),
            (2, ok, 2000, true, Some(key)),
            (3, ok, 0, true, None),
            (0, ok, 0, false, None),
        ]
    );
    assert!(completions(&pair.near).iter().all(|(_, status, ..)| *status == ok));
    // The tag is invalid now: the Write ends the stream.
    let remote = Remote { key, offset: 0 };
    let pieces = [Sge { key: pair.near.key, offset: 0, len: 8 }];
    post(&mut pair.near, Operation::Write { remote }, &pieces);
    assert_eq!(pair.terminate(), [0x11, 0x00], "DDP, tagged buffer, invalid STag");
}

/// An error that the second end detects ends both ends; the Terminate has its layer, type and code. It names no request, so
/// none is blamed: a request is flushed unless its bytes were acknowledged before.
#[test]
fn sim_rdma_tcp_an_error_ends_both_ends_with_a_terminate() {
    /// The first end's request, given an invalid tag, and layer, type and code of the answer.
    type Case = (fn(&mut Pair, STag), [u8; 2]);
    let cases: [Case; 5] = [
        (|pair, bad| pair.touch(Remote { key: bad, offset: 0 }, false), [0x11, 0x00]),
        (|pair, _| pair.touch(Remote { key: pair.far.key, offset: 4 * MIB as u64 }, false), [0x11, 0x01]),
        (|pair, bad| pair.touch(Remote { key: bad, offset: 0 }, true), [0x01, 0x00]),
        (|pair, _| pair.touch(Remote { key: pair.far.key, offset: 4 * MIB as u64 }, true), [0x01, 0x01]),
        (|pair, _| pair.send(4097, None, SendFlags::empty()), [0x12, 0x05]),
    ];
    for (post, code) in cases {
        let mut pair = Pair::new();
        pair.receive(0, 0);
        post(&mut pair, STag::new(0x00dd_dd00));
        pair.send(10, None, SendFlags::empty());
        assert_eq!(pair.terminate(), code);
        assert!(pair.near.payloads.len() <= 3, "nothing follows the Terminate");
        let statuses: Vec<_> = completions(&pair.near).iter().map(|c| c.1).collect();
        let is_read = code[0] == 0x01;
        let first = if is_read { &[WcStatus::Flushed][..] } else { &[WcStatus::Success, WcStatus::Flushed] };
        assert!(statuses.len() == 2 && first.contains(&statuses[0]), "{code:02x?}: {statuses:?}");
        assert!([WcStatus::Success, WcStatus::Flushed].contains(&statuses[1]), "{code:02x?}: {statuses:?}");
        let received = if code[0] == 0x12 { WcStatus::LocalLength } else { WcStatus::Flushed };
        assert_eq!(completions(&pair.far).iter().map(|c| c.1).collect::<Vec<_>>(), [received]);
        for end in [&pair.near, &pair.far] {
            assert_eq!(end.station.engine.rnic().query_qp(end.qp).unwrap().state, QpState::Error);
        }
    }
}
