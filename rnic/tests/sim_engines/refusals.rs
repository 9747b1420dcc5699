//! An initiator and peers that do not support all of MPA (RFC 6581 section 10), written byte by byte: further attempts
//! over loss, the memory of peers, and peers that refuse everything.

use std::time::Duration;

use xwarp_rnic::{
    Operation, Payload, QpId, SendFlags, Versions, WorkRequest,
    engine::{ConnectParams, EngineConfig},
    rnic::{CmEvent, QpAttributes},
    sim::{Station, path},
};
use xwarp_tcp::{
    link::{Link, rx_pieces},
    mpa::{MpaConfig, MpaError, RequestRevision},
    sim::{Faults, Node, RawPeer, RawSegment, SimLink, Wire, WireConfig, run},
    tcp::TcpConfig,
    time::Instant,
    ulp::CloseReason,
    wire::{Flags, Inbound, Segment, parse},
};

const PORT: u16 = 7;
/// Time limits of the initiator: enough for many retransmissions.
const PATIENCE: Duration = Duration::from_secs(120);
const CRC: u8 = 0x40;
const REJECTED: u8 = 0x20;
const MARKERS: u8 = 0x80;
const ENHANCED: u8 = 0x10;
/// Reserved bits: Sends with immediate data are offered.
const OFFER: u8 = 0x01;
/// Flags and revision of the first request.
const REQUEST: (u8, u8) = (MARKERS | CRC | ENHANCED | OFFER, 2);

/// A peer's answer to the bytes of a request.
type Behaviour = fn(&[u8]) -> Answer;

/// A peer's answer to a request.
enum Answer {
    Reset,
    Close,
    Say(Vec<u8>),
}

/// The bytes of a reply without private data; IRD and ORD of an enhanced one are 0.
fn reply(flags: u8, revision: u8) -> Answer {
    let data: &[u8] = if flags & ENHANCED == 0 { &[0, 0] } else { &[0, 4, 0, 0, 0, 0] };
    Answer::Say([b"MPA ID Rep Frame", &[flags, revision][..], data].concat())
}

/// One connection of the peer.
struct Talk {
    raw: RawPeer,
    /// Bytes of the answer that were sent.
    said: usize,
}

/// A responder with a TCP that repeats its answer whenever it receives the request again.
struct OldPeer {
    link: SimLink,
    answer: Behaviour,
    talks: Vec<Talk>,
    /// Flags and revision of the request of each connection.
    requests: Vec<(u8, u8)>,
    /// All payloads.
    heard: Vec<Vec<u8>>,
}

impl OldPeer {
    fn receive(&mut self, segment: &Segment, payload: &[u8]) {
        let Segment { flow, flags, .. } = *segment;
        if flags.syn && !self.talks.iter().any(|talk| talk.raw.path().flow == flow) {
            let mut path = path([(2, PORT), (1, flow.remote.port())], false, 1500);
            path.flow = flow;
            self.talks.push(Talk { raw: RawPeer::new(path, 7000, false), said: 0 });
        }
        let Some(talk) = self.talks.iter_mut().find(|talk| talk.raw.path().flow == flow) else { return };
        talk.raw.receive(segment);
        if flags.rst {
            return;
        }
        let ack = RawSegment { window: u16::MAX, ..RawSegment::ack() };
        let frame = if flags.syn {
            talk.raw.syn()
        } else if !payload.is_empty() {
            self.heard.push(payload.to_vec());
            if talk.raw.received as usize == payload.len() && talk.said == 0 {
                self.requests.push((payload[16], payload[17]));
            }
            match (self.answer)(payload) {
                Answer::Reset => {
                    talk.said = 1;
                    talk.raw.segment(&RawSegment { flags: Flags { rst: true, ..ack.flags }, ..ack })
                }
                Answer::Close => {
                    talk.said = 1;
                    talk.raw.segment(&RawSegment { flags: Flags { fin: true, ..ack.flags }, ..ack })
                }
                Answer::Say(bytes) if talk.said == 0 => {
                    talk.said = bytes.len();
                    talk.raw.data(&bytes)
                }
                Answer::Say(bytes) => {
                    talk.raw.segment(&RawSegment { seq: -(talk.said as i32), payload: &bytes, ..ack })
                }
            }
        } else if flags.fin {
            talk.raw.segment(&RawSegment { flags: Flags { fin: true, ..ack.flags }, ..ack })
        } else {
            return;
        };
        self.link.inject(&frame);
    }
}

impl Node for OldPeer {
    fn turn(&mut self, _now: Instant) -> bool {
        let mut batch = Vec::new();
        let received = self.link.receive(&mut batch, 64) > 0;
        for frame in batch {
            if let Ok(Inbound::Tcp(segment)) = parse(&self.link, &frame) {
                let (start, len) = (segment.payload_start, segment.payload_len);
                let payload = rx_pieces(&self.link, &frame, start, len).concat();
                self.receive(&segment, &payload);
            }
            self.link.recycle(frame);
        }
        received
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

struct World {
    wire: Wire,
    now: Instant,
    near: Station,
    peer: OldPeer,
    next_port: u16,
}

impl World {
    fn new(seed: u64, loss: f64, answer: Behaviour) -> Self {
        let faults = Faults { loss, delay: Duration::from_micros(50), ..Faults::default() };
        let (wire, near, far) = Wire::new(WireConfig { seed, faults: [faults; 2], ..WireConfig::default() });
        let mpa = MpaConfig { startup_timeout: PATIENCE, ..MpaConfig::default() };
        // The peer answers no keepalives.
        let tcp = TcpConfig { user_timeout: PATIENCE, keepalive: None, ..TcpConfig::default() };
        let near = Station::new(near, EngineConfig { framing: mpa.into(), tcp, ..EngineConfig::default() });
        let peer = OldPeer { link: far, answer, talks: Vec::new(), requests: Vec::new(), heard: Vec::new() };
        Self { wire, now: Instant::ZERO, near, peer, next_port: 40_000 }
    }

    fn pass(&mut self, time: Duration) {
        run(&self.wire, &mut [&mut self.near as &mut dyn Node, &mut self.peer], self.now, time, |_, _| false);
        self.now += time;
    }

    /// Connects a new queue pair; returns it, the only event, and the peer's requests.
    fn connect(&mut self, mpa: Option<MpaConfig>) -> (QpId, CmEvent, Vec<(u8, u8)>) {
        self.connect_to(PORT, mpa)
    }

    /// [`Self::connect`] to the service at `service`.
    fn connect_to(&mut self, service: u16, mpa: Option<MpaConfig>) -> (QpId, CmEvent, Vec<(u8, u8)>) {
        let engine = &mut self.near.engine;
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let (cq, _ring) = engine.rnic().registry().create_cq(16, None).unwrap();
        let qp = engine.rnic_mut().create_qp(QpAttributes::new(pd, cq, cq)).unwrap();
        let port = self.next_port;
        self.next_port += 3;
        let path = |port| path([(1, port), (2, service)], false, 1500);
        let fallbacks = [path(port + 1), path(port + 2)].into();
        let params = ConnectParams { framing: mpa.map(Into::into), fallbacks, ..ConnectParams::default() };
        engine.connect(self.now, &mut self.near.link, qp, path(port), params).unwrap();
        self.pass(PATIENCE * 2);
        let events: Vec<_> = self.near.events.drain(..).collect();
        let [event] = &events[..] else { panic!("{events:?}") };
        (qp, event.clone(), self.peer.requests.drain(..).collect())
    }
}

/// Closes the connection on a request of revision 2, as RFC 6581 section 10 has it.
fn closes(request: &[u8]) -> Answer {
    if request[17] == 1 { reply(CRC, 1) } else { Answer::Close }
}

fn resets(request: &[u8]) -> Answer {
    if request[17] == 1 { reply(CRC, 1) } else { Answer::Reset }
}

/// Answers each request with revision 1.
fn answers_one(_request: &[u8]) -> Answer {
    reply(CRC, 1)
}

/// Rejects revision 2 by the only frame that it knows.
fn rejects_two(request: &[u8]) -> Answer {
    if request[17] == 1 { reply(CRC, 1) } else { reply(CRC | REJECTED, 1) }
}

/// Refuses markers, and closes on a request of revision 2.
fn refuses_both(request: &[u8]) -> Answer {
    match (request[16] & MARKERS != 0, request[17]) {
        (_, 2) => Answer::Close,
        (true, _) => reply(CRC | REJECTED, 1),
        (false, _) => reply(CRC, 1),
    }
}

#[test]
fn sim_rfc6581_s10_a_peer_of_revision_one_gets_another_request_and_is_remembered() {
    let one = (MARKERS | CRC, 1);
    let peers = [
        (closes as Behaviour, &[REQUEST, one][..]),
        (resets, &[REQUEST, one]),
        (answers_one, &[REQUEST, one]),
        (rejects_two, &[REQUEST, one]),
        (refuses_both, &[REQUEST, one, (CRC, 1)]),
    ];
    for (answer, expected) in peers {
        for (seed, loss) in [(0, 0.0), (1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1)] {
            let mut world = World::new(seed, loss, answer);
            let (qp, event, requests) = world.connect(None);
            assert!(matches!(event, CmEvent::Established { qp: of, .. } if of == qp), "{seed}: {event:?}");
            assert_eq!(requests, expected, "{seed}");
            let (_, event, requests) = world.connect(None);
            assert!(matches!(event, CmEvent::Established { .. }), "{seed}: {event:?}");
            assert_eq!(requests, expected[expected.len() - 1..], "{seed}: remembered");
            world.pass(Duration::from_secs(600));
            let (_, event, requests) = world.connect(None);
            assert!(matches!(event, CmEvent::Established { .. }), "{seed}: {event:?}");
            assert_eq!(requests, expected, "{seed}: asked again after the lifetime");
        }
    }
}

/// Peer-to-peer mode is a preference, which a peer need not know.
#[test]
fn sim_an_initiator_that_prefers_peer_to_peer_mode_connects_to_peers_without_it() {
    fn enhanced(_request: &[u8]) -> Answer {
        reply(MARKERS | CRC | ENHANCED, 2)
    }
    for (answer, expected) in [
        (closes as Behaviour, &[REQUEST, (MARKERS | CRC, 1)][..]),
        (answers_one, &[REQUEST, (MARKERS | CRC, 1)]),
        (enhanced, &[REQUEST]),
    ] {
        let mut world = World::new(0, 0.0, answer);
        let (_, event, requests) = world.connect(Some(MpaConfig::default().either_speaks_first()));
        assert!(matches!(event, CmEvent::Established { .. }), "{event:?}");
        assert_eq!(requests, expected);
    }
}

/// Any user of a host can open a port of his own.
#[test]
fn sim_a_program_at_one_port_does_not_decide_for_the_services_at_others() {
    fn complete(request: &[u8]) -> Answer {
        if request[17] == 1 { reply(CRC, 1) } else { reply(MARKERS | CRC | ENHANCED, 2) }
    }
    let mut world = World::new(0, 0.0, refuses_both);
    let (.., requests) = world.connect_to(5555, None);
    assert_eq!(requests.last(), Some(&(CRC, 1)));
    world.peer.answer = complete;
    let (_, event, requests) = world.connect(None);
    assert!(matches!(event, CmEvent::Established { .. }), "{event:?}");
    assert_eq!(requests, [REQUEST], "the service at the other port has refused nothing");
}

#[test]
fn sim_rfc6581_s10_an_initiator_that_requires_revision_two_does_not_ask_again() {
    for (answer, reason) in [
        (closes as Behaviour, CloseReason::Startup(MpaError::Truncated.into())),
        (resets, CloseReason::Reset),
        (answers_one, CloseReason::Startup(MpaError::NotEnhanced.into())),
    ] {
        let mut world = World::new(0, 0.0, answer);
        let mpa = MpaConfig { revision: RequestRevision::RequireTwo, ..MpaConfig::default() };
        let (qp, event, requests) = world.connect(Some(mpa));
        assert_eq!(event, CmEvent::ConnectError { qp, reason });
        assert_eq!(requests, [REQUEST]);
    }
}

/// A peer that refuses whatever it is asked costs a bounded number of attempts, and none of them is remembered.
/// With these seeds no attempt is lost altogether.
#[test]
fn sim_a_peer_that_always_refuses_costs_three_attempts_at_most() {
    fn resets_all(_: &[u8]) -> Answer {
        Answer::Reset
    }
    fn refuses_one_after_the_other(request: &[u8]) -> Answer {
        match (request[16] & MARKERS != 0, request[17]) {
            (true, _) => reply(CRC | REJECTED | ENHANCED, 2),
            (false, _) => Answer::Close,
        }
    }
    let truncated = CloseReason::Startup(MpaError::Truncated.into());
    for (answer, expected, end) in
        [(resets_all as Behaviour, 2, CloseReason::Reset), (refuses_one_after_the_other, 3, truncated)]
    {
        for (seed, loss) in [(0, 0.0), (2, 0.2), (3, 0.2)] {
            let mut world = World::new(seed, loss, answer);
            for _ in 0..3 {
                let (qp, event, requests) = world.connect(None);
                assert_eq!(event, CmEvent::ConnectError { qp, reason: end }, "{seed}");
                assert_eq!(requests.len(), expected, "{seed}: {requests:?}");
                assert_eq!(requests[0], REQUEST, "{seed}: nothing is remembered");
            }
        }
    }
}

#[test]
fn sim_rubbish_in_answer_to_revision_one_is_final_and_not_remembered() {
    fn rubbish(request: &[u8]) -> Answer {
        if request[17] == 1 { Answer::Say(b"MPA ID Rubbish".to_vec()) } else { reply(CRC, 1) }
    }
    let mut world = World::new(0, 0.0, rubbish);
    for _ in 0..2 {
        let (qp, event, requests) = world.connect(None);
        let reason = CloseReason::Startup(MpaError::InvalidKey.into());
        assert_eq!(event, CmEvent::ConnectError { qp, reason });
        assert_eq!(requests, [REQUEST, (MARKERS | CRC, 1)]);
    }
}

/// RFC 5044 appendix C.2.5: the RDMAC RNIC answers every request with revision 0, M and C.
#[test]
fn sim_rfc5044_c2_5_a_permissive_initiator_meets_an_rdmac_rnic() {
    fn rdmac(_: &[u8]) -> Answer {
        reply(MARKERS | CRC, 0)
    }
    for (permissive, requests) in [(false, 1), (true, 2)] {
        let mut world = World::new(0, 0.0, rdmac);
        let (qp, event, seen) = world.connect(Some(MpaConfig { permissive, ..MpaConfig::default() }));
        assert_eq!(seen.len(), requests);
        if !permissive {
            let reason = CloseReason::Startup(MpaError::UnsupportedRevision(0).into());
            assert_eq!(event, CmEvent::ConnectError { qp, reason });
            continue;
        }
        assert!(matches!(event, CmEvent::Established { .. }), "{event:?}");
        let versions = world.near.engine.rnic().query_qp(qp).unwrap().versions;
        assert_eq!(versions, Versions::Rdmac);
        world.peer.heard.clear();
        let operation = Operation::Send { invalidate: None };
        let flags = SendFlags::SIGNALED;
        let send = WorkRequest { wr_id: 1, operation, payload: Payload::Inline(b"hi"), flags };
        world.near.engine.rnic_mut().post_send(qp, &send).unwrap();
        world.pass(Duration::from_secs(1));
        let fpdu = &world.peer.heard[0];
        assert_eq!(fpdu[..8], [0, 0, 0, 0, 0, 20, 0x40, 0x03], "marker, length, version 0 of DDP and RDMAP");
    }
}
