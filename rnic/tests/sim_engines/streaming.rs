//! Streaming data before MPA (RFC 5044 sections 7.1.3 and 7.1.5) between two engines: a log-in over loss, then RDMA.

use std::time::Duration;

use xwarp_rnic::{
    Operation, Payload, QpId, RecvRequest, SendFlags, WorkRequest,
    engine::{ConnectParams, EngineConfig},
    rnic::{CmEvent, QpAttributes, StreamId},
    sim::{Station, ipv4, path},
};
use xwarp_tcp::{
    mpa::{MpaConfig, MpaError},
    sim::{Faults, Node, Wire, WireConfig, run},
    time::Instant,
    ulp::CloseReason,
};

const PORT: u16 = 3260;
const LIMIT: Duration = Duration::from_secs(60);
/// The initiator's log-in, and the responder's last streaming bytes.
const HELLO: usize = 150_000;
const ACK: usize = 20_000;

fn config() -> MpaConfig {
    MpaConfig { streaming: Some(LIMIT), startup_timeout: LIMIT, ..MpaConfig::default() }
}

fn byte(at: usize) -> u8 {
    (at % 251) as u8
}

/// One end of the log-in.
#[derive(Default)]
struct Side {
    stream: Option<StreamId>,
    sent: usize,
    received: usize,
    begun: bool,
}

struct World {
    wire: Wire,
    now: Instant,
    ends: [Station; 2],
    qps: [QpId; 2],
    sides: [Side; 2],
}

impl World {
    fn connecting(seed: u64, faults: Faults) -> Self {
        let (wire, near, far) = Wire::new(WireConfig { seed, faults: [faults; 2], ..WireConfig::default() });
        let mut ends = [near, far].map(|link| Station::new(link, EngineConfig::default()));
        let qps = [0, 1].map(|end: usize| {
            let engine = &mut ends[end].engine;
            let pd = engine.rnic().registry().alloc_pd().unwrap();
            let (cq, _ring) = engine.rnic().registry().create_cq(16, None).unwrap();
            engine.rnic_mut().create_qp(QpAttributes::new(pd, cq, cq)).unwrap()
        });
        let [near, far] = &mut ends;
        far.engine.listen(&mut far.link, None, PORT, 8, 1500, Some(config().into())).unwrap();
        far.expected.insert(ipv4(1), qps[1]);
        let path = path([(1, 40_000), (2, PORT)], false, 1500);
        let params = ConnectParams { framing: Some(config().into()), ..ConnectParams::default() };
        near.engine.connect(Instant::ZERO, &mut near.link, qps[0], path, params).unwrap();
        Self { wire, now: Instant::ZERO, ends, qps, sides: Default::default() }
    }

    fn pass(&mut self, time: Duration) {
        let [a, b] = &mut self.ends;
        run(&self.wire, &mut [a as &mut dyn Node, b], self.now, time, |_, _| false);
        self.now += time;
        for (end, side) in self.ends.iter().zip(&mut self.sides) {
            let reported = end.events.iter().find_map(|event| match event {
                CmEvent::Streaming { stream, .. } => Some(*stream),
                _ => None,
            });
            side.stream = reported;
        }
    }

    /// Takes and checks all bytes that have arrived at `end`.
    fn take(&mut self, end: usize) {
        let (Station { engine, link, .. }, side) = (&mut self.ends[end], &mut self.sides[end]);
        let Some(stream) = side.stream.filter(|_| !side.begun) else { return };
        let mut bytes = [0; 1000];
        loop {
            let len = engine.stream_recv(link, stream, &mut bytes).unwrap();
            for (at, got) in (side.received..).zip(&bytes[..len]) {
                assert_eq!(*got, byte(at), "byte {at}");
            }
            side.received += len;
            if len == 0 {
                return;
            }
        }
    }

    fn begin(&mut self, end: usize, last: &[u8]) {
        let Station { engine, link, .. } = &mut self.ends[end];
        let stream = self.sides[end].stream.unwrap();
        engine.begin_mpa(self.now, link, stream, last).unwrap();
        self.sides[end].begun = true;
    }

    /// One step of the log-in at both ends.
    fn log_in(&mut self) {
        self.take(0);
        self.take(1);
        if let Some(stream) = self.sides[0].stream
            && self.sides[0].sent < HELLO
        {
            let rest: Vec<u8> = (self.sides[0].sent..HELLO).map(byte).collect();
            self.sides[0].sent += self.ends[0].engine.stream_send(stream, &rest).unwrap();
        }
        if !self.sides[1].begun && self.sides[1].received == HELLO {
            let ack: Vec<u8> = (0..ACK).map(byte).collect();
            self.begin(1, &ack);
        }
        if !self.sides[0].begun && self.sides[0].received == ACK {
            self.begin(0, b"");
        }
    }

    fn established(&self) -> bool {
        self.ends.iter().all(|end| end.events.iter().any(|e| matches!(e, CmEvent::Established { .. })))
    }
}

#[test]
fn sim_rfc5044_s7_1_3_a_log_in_over_loss_and_then_rdma() {
    for (seed, loss) in [(0, 0.0), (1, 0.03), (2, 0.03), (3, 0.1)] {
        let delay = Duration::from_micros(50);
        let faults = Faults { loss, delay, duplicate: loss / 2.0, ..Faults::default() };
        let mut world = World::connecting(seed, faults);
        while !world.established() {
            world.pass(Duration::from_millis(5));
            world.log_in();
            assert!(world.now < Instant::ZERO + LIMIT, "{seed}: {:?}", world.ends.map(|end| end.events));
        }
        let [near, far] = &mut world.ends;
        far.engine.rnic_mut().post_recv(world.qps[1], &RecvRequest { wr_id: 9, scatter: &[] }).unwrap();
        let operation = Operation::Send { invalidate: None };
        let send = WorkRequest { wr_id: 1, operation, payload: Payload::EMPTY, flags: SendFlags::SIGNALED };
        near.engine.rnic_mut().post_send(world.qps[0], &send).unwrap();
        world.pass(Duration::from_secs(5));
        for (end, qp) in world.ends.iter().zip(world.qps) {
            let info = end.engine.rnic().query_qp(qp).unwrap();
            assert_eq!((info.send_outstanding, info.recv_outstanding), (0, 0), "{seed}");
        }
        // Each end took as many events as it took all bytes, at most.
        let readable = |event: &&CmEvent| matches!(event, CmEvent::StreamReadable { .. });
        assert!(world.ends[1].events.iter().filter(readable).count() <= HELLO / 1000);
    }
}

#[test]
fn sim_rfc5044_s7_1_2_rule_10_a_log_in_that_does_not_end_fails_at_both_ends() {
    let mut world = World::connecting(0, Faults { delay: Duration::from_micros(50), ..Faults::default() });
    world.pass(Duration::from_secs(1));
    let stream = world.sides[0].stream.unwrap();
    assert_eq!(world.ends[0].engine.stream_send(stream, b"hello?"), Ok(6));
    world.pass(LIMIT * 2);
    let reason = CloseReason::Startup(MpaError::StartupTimeout.into());
    let [near, far] = &world.ends;
    let failed = near.events.iter().filter(|e| {
        matches!(e, CmEvent::ConnectError { reason: of, .. } if *of == reason
        || *of == CloseReason::Reset)
    });
    assert_eq!(failed.count(), 1, "reported once, and not repeated: {:?}", near.events);
    assert!(matches!(far.events.last(), Some(CmEvent::RequestGone { .. })), "{:?}", far.events);
    assert_eq!(
        near.engine.stack().table_sizes().connections + far.engine.stack().table_sizes().connections,
        0
    );
}

/// The application's end of either side, at any time.
#[test]
fn sim_a_log_in_can_be_abandoned_by_either_end() {
    for end in [0, 1] {
        let mut world =
            World::connecting(0, Faults { delay: Duration::from_micros(50), ..Faults::default() });
        world.pass(Duration::from_secs(1));
        match world.sides[end].stream.unwrap() {
            StreamId::Qp(qp) => world.ends[end].engine.disconnect(qp).unwrap(),
            StreamId::Request(request) => world.ends[end].engine.abandon(request).unwrap(),
        }
        world.pass(Duration::from_secs(1));
        let [near, far] = &world.ends;
        assert!(matches!(near.events.last(), Some(CmEvent::ConnectError { .. })), "{:?}", near.events);
        let gone = matches!(far.events.last(), Some(CmEvent::RequestGone { .. }));
        assert_eq!(gone, end == 0, "{:?}", far.events);
    }
}

/// Streaming bytes at a listener that begins with MPA are no request, and a peer that begins with MPA logs in by
/// rubbish.
#[test]
fn sim_ends_that_disagree_about_streaming_data_fail() {
    let mut world = World::connecting(0, Faults { delay: Duration::from_micros(50), ..Faults::default() });
    world.pass(Duration::from_secs(1));
    let path = path([(1, 40_001), (2, PORT)], false, 1500);
    let [near, far] = &mut world.ends;
    let attributes = near.engine.rnic().query_qp(world.qps[0]).unwrap().attributes;
    let qp = near.engine.rnic_mut().create_qp(attributes).unwrap();
    let params = ConnectParams { framing: Some(MpaConfig::default().into()), ..ConnectParams::default() };
    near.engine.connect(world.now, &mut near.link, qp, path, params).unwrap();
    let before = far.events.len();
    world.pass(Duration::from_secs(1));
    let [near, far] = &mut world.ends;
    let [CmEvent::Streaming { stream, .. }] = far.events[before..] else { panic!("{:?}", far.events) };
    let mut bytes = [0; 64];
    let len = far.engine.stream_recv(&mut far.link, stream, &mut bytes).unwrap();
    assert!(bytes[..len].starts_with(b"MPA ID Req Frame"));
    far.engine.begin_mpa(world.now, &mut far.link, stream, b"Log in first").unwrap();
    near.events.clear();
    world.pass(Duration::from_secs(1));
    let reason = CloseReason::Startup(MpaError::InvalidKey.into());
    assert_eq!(world.ends[0].events, [CmEvent::ConnectError { qp, reason }]);
}
