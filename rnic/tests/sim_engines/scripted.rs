//! An engine and a peer without a stack, whose segments the test builds one by one.

use std::{sync::Arc, time::Duration};

use xwarp_rnic::{
    Access, Memory, Operation, Pages, Payload, QpId, QpState, Remote, STag, SendFlags, Sge, WcStatus,
    WorkRequest,
    engine::EngineConfig,
    rnic::{CompletionRing, PdId, QpAttributes, Registration},
    sim::{self, Station},
};
use xwarp_tcp::{
    framing::AcceptParams,
    link::Link,
    mpa::MpaRequest,
    secret::Secret,
    sim::{Faults, Node, RawPeer, RawSegment, SimLink, Wire, WireConfig, fpdu, run},
    time::Instant,
    wire::{Flags, Inbound, parse},
};

const PORT: u16 = 7;

/// The peer's end of the wire. It acknowledges each segment when `acknowledges` is set.
struct RawHost {
    peer: RawPeer,
    link: SimLink,
    acknowledges: bool,
    /// Bytes of FPDUs sent.
    sent: u64,
}

impl RawHost {
    fn send(&mut self, segment: &RawSegment<'_>) {
        let frame = self.peer.segment(&RawSegment { window: u16::MAX, ..*segment });
        self.peer.sent += segment.payload.len() as u32 + u32::from(segment.flags.fin);
        self.link.inject(&frame);
    }

    /// The FPDU of `ulpdu`, which is the next of the stream.
    fn fpdu(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let bytes = fpdu(self.sent, false, ulpdu);
        self.sent += bytes.len() as u64;
        bytes
    }
}

impl Node for RawHost {
    fn turn(&mut self, _now: Instant) -> bool {
        let mut batch = Vec::new();
        let received = self.link.receive(&mut batch, 64);
        for frame in batch {
            let parsed = parse(&self.link, &frame);
            self.link.recycle(frame);
            let Ok(Inbound::Tcp(segment)) = parsed else { panic!("not TCP: {parsed:?}") };
            self.peer.receive(&segment);
            if self.acknowledges && !segment.flags.rst {
                self.send(&RawSegment::ack());
            }
        }
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

/// An engine that has accepted the request of a raw peer, which has not sent its first FPDU.
struct World {
    wire: Wire,
    now: Instant,
    card: Station,
    host: RawHost,
    pd: PdId,
    qp: QpId,
    ring: Arc<CompletionRing>,
}

impl World {
    fn new() -> Self {
        let faults = Faults { delay: Duration::from_micros(50), ..Faults::default() };
        let (wire, near, far) = Wire::new(WireConfig { faults: [faults; 2], ..WireConfig::default() });
        let config = EngineConfig { secret: Secret::from_number(11), ..EngineConfig::default() };
        let mut card = Station::new(near, config);
        card.accept = AcceptParams { ird: 4, ord: 4, ..AcceptParams::default() };
        let engine = &mut card.engine;
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let (cq, ring) = engine.rnic().registry().create_cq(64, None).unwrap();
        let qp = engine.rnic_mut().create_qp(QpAttributes::new(pd, cq, cq)).unwrap();
        engine.listen(&mut card.link, None, PORT, 8, 1500, None).unwrap();
        card.expected.insert(sim::ipv4(2), qp);
        let peer = RawPeer::new(sim::path([(2, 40_000), (1, PORT)], false, 1500), 1000, false);
        let host = RawHost { peer, link: far, acknowledges: true, sent: 0 };
        let mut world = Self { wire, now: Instant::ZERO, card, host, pd, qp, ring };
        let syn = world.host.peer.syn();
        world.host.link.inject(&syn);
        world.run(Duration::from_millis(1));
        let request = MpaRequest { revision: 1, crc: true, ..MpaRequest::default() };
        world.host.send(&RawSegment { payload: &request.emit(), ..RawSegment::ack() });
        world.run(Duration::from_millis(1));
        assert_eq!(world.state(), QpState::Rts);
        world
    }

    fn run(&mut self, time: Duration) {
        let Self { wire, card, host, .. } = self;
        run(wire, &mut [card, host], self.now, time, |_, _| false);
        self.now += time;
    }

    fn state(&self) -> QpState {
        self.card.engine.rnic().query_qp(self.qp).unwrap().state
    }

    fn region(&mut self, len: usize) -> (STag, Memory) {
        let memory = Memory::anonymous(len, Pages::Normal).unwrap();
        let region = Registration {
            pd: self.pd,
            memory: memory.clone(),
            access: Access::all(),
            base: 0,
            stream: None,
        };
        (self.card.engine.rnic().registry().register(region).unwrap(), memory)
    }

    fn post(&mut self, wr_id: u64, operation: Operation, key: STag) {
        let pieces = [Sge { key, offset: 0, len: 8 }];
        let payload = Payload::Gather(&pieces);
        let request = WorkRequest { wr_id, operation, payload, flags: SendFlags::SIGNALED };
        self.card.engine.rnic_mut().post_send(self.qp, &request).unwrap();
    }

    fn outcomes(&self) -> Vec<(u64, WcStatus)> {
        let mut out = Vec::new();
        self.ring.poll(&mut out, usize::MAX);
        out.iter().map(|c| (c.wr_id, c.status)).collect()
    }
}

/// A tagged segment, the last of its message (RFC 5041 figure 4).
fn tagged(control: u8, stag: u32, payload: &[u8]) -> Vec<u8> {
    [&[0xc1, control][..], &stag.to_be_bytes(), &[0; 8], payload].concat()
}

/// The peer answers a Read, but its TCP does not acknowledge the Send before it (it has no memory for the rest of that
/// segment, say). When the connection fails, the Send is flushed, and the Read behind it must not succeed.
#[test]
fn sim_no_request_succeeds_after_a_flushed_one() {
    let mut world = World::new();
    let first = world.host.fpdu(&tagged(0x40, 0, b""));
    world.host.send(&RawSegment { payload: &first, ..RawSegment::ack() });
    world.run(Duration::from_millis(1));
    let (key, memory) = world.region(8);
    world.host.acknowledges = false;
    let before = world.host.peer.received;
    world.post(1, Operation::Send { invalidate: None }, key);
    let remote = Remote { key: STag::new(7), offset: 0 };
    world.post(2, Operation::Read { remote, invalidate: false }, key);
    world.run(Duration::from_millis(1));
    let unacknowledged = (world.host.peer.received - before) as i32;
    assert!(unacknowledged > 0, "the Send and the Read Request");
    let response = world.host.fpdu(&tagged(0x42, key.value(), b"response"));
    world.host.send(&RawSegment { payload: &response, ack: -unacknowledged, ..RawSegment::ack() });
    world.run(Duration::from_millis(1));
    let mut bytes = [0; 8];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!((&bytes, world.outcomes()), (b"response", vec![]), "the Read is done and waits for the Send");
    let flags = Flags { rst: true, ..Flags::default() };
    world.host.send(&RawSegment { flags, ..RawSegment::default() });
    world.run(Duration::from_millis(1));
    assert_eq!(world.outcomes(), [(1, WcStatus::Flushed), (2, WcStatus::Flushed)]);
}

/// An initiator that closes its direction without its first FPDU (RFC 5044 section 7.1.2), but acknowledges everything:
/// the posted Send can never be sent, and an orderly close waits for it, but not for ever.
#[test]
fn sim_a_peer_that_never_lets_us_send_does_not_hold_up_a_close() {
    let mut world = World::new();
    let (key, _memory) = world.region(8);
    world.post(1, Operation::Send { invalidate: None }, key);
    let flags = Flags { fin: true, ack: true, ..Flags::default() };
    world.host.send(&RawSegment { flags, ..RawSegment::default() });
    world.run(Duration::from_secs(1));
    world.card.engine.disconnect(world.qp).unwrap();
    world.run(Duration::from_secs(290));
    assert_eq!((world.card.engine.stack().connections(), world.host.peer.reset), (1, false));
    assert_eq!(world.outcomes(), [], "the Send waits");
    world.run(Duration::from_secs(30));
    assert_eq!((world.card.engine.stack().connections(), world.host.peer.reset), (0, true));
    assert_eq!(world.outcomes(), [(1, WcStatus::Flushed)]);
    assert_eq!(world.state(), QpState::Error);
}
