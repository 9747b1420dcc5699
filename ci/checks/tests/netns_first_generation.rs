//! Peers of MPA's first generation over the kernel's TCP, written byte by byte, end to end in both roles: an RNIC of the
//! RDMA Consortium (RFC 5044 appendix C), one of MPA draft 08, and peers that log in before MPA (section 7.1.3).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::{SocketAddr, TcpListener},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    hostile::{
        CRC, ENHANCED, End, MARKERS, REPLY, REQUEST, SEND_IMMEDIATE, SocketPeer, read_request, start_up,
        tagged, untagged,
    },
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
};
use xwarp_verbs::{
    Access, CompletionQueue, Device, Markers, MpaConfig, Payload, PostError, ProtectionDomain, QueuePair,
    QueuePairOptions, RecvRequest, Versions, WcStatus, WorkRequest,
    cm::{
        AcceptOptions, CmId, ConnectOptions, ConnectionError, Event, EventChannel, EventKind, ListenOptions,
    },
};

const LIMIT: Duration = Duration::from_secs(10);
const PORT: u16 = 3260;
const REGION: usize = 4096;

/// The segment with version 0 of DDP and RDMAP.
fn version_0(mut ulpdu: Vec<u8>) -> Vec<u8> {
    ulpdu[0] &= !3;
    ulpdu[1] &= 0x3f;
    ulpdu
}

fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged(0x43, 0, 0, msn, 0, payload)
}

/// The device's end of one connection.
struct Local {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
}

impl Local {
    fn open() -> Self {
        let device = Device::open(INTERFACE).unwrap();
        let pd = device.create_pd().unwrap();
        let cq = device.create_cq(16).unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        Self { device, pd, cq, qp }
    }

    fn completion(&self) -> (u64, WcStatus) {
        let begin = Instant::now();
        loop {
            if let Some(completion) = self.cq.poll_one() {
                return (completion.wr_id, completion.status);
            }
            assert!(begin.elapsed() < LIMIT, "no completion");
        }
    }

    /// Sends 600 bytes; they arrive, and so does the peer's Send, in either order.
    fn exchange(&self) {
        let bytes = vec![0x5e; 600];
        let region = self.pd.allocate(600, Access::LOCAL_WRITE).unwrap();
        region.memory().write(0, &bytes).unwrap();
        let pieces = [region.sge(0, 600)];
        self.qp.post_send(&WorkRequest::send(7, Payload::Gather(&pieces)).signaled()).unwrap();
        let mut completions = [self.completion(), self.completion()];
        completions.sort_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(completions, [(1, WcStatus::Success), (7, WcStatus::Success)]);
    }
}

/// The peer's part in full operation, after the start-up, with `version` (0 or 1) of DDP and RDMAP: a Write, a Read of
/// what was written, and a Send; then the device's Send, and at last the end.
fn converse(peer: &mut SocketPeer, key: u32, version: u8) {
    let headers = |ulpdu| if version == 0 { version_0(ulpdu) } else { ulpdu };
    let bytes: Vec<u8> = (0..1200_u32).map(|at| (at % 253) as u8).collect();
    peer.send(&headers(tagged(0x40, key, 16, &bytes))).unwrap();
    peer.send(&headers(read_request(1, key, 16, 1200))).unwrap();
    peer.send(&headers(send(1, b"first"))).unwrap();
    assert_eq!(message(peer, 2, 14, [0x80 | version, version << 6 | 2]), bytes, "Read Response");
    assert_eq!(message(peer, 3, 18, [version, version << 6 | 3]), [0x5e; 600], "Send");
}

/// The payload of the device's message with this opcode. Its segments have headers of `header` bytes that begin with
/// `control` but for the L bit; the message has two where the first one fills up a TCP segment.
fn message(peer: &mut SocketPeer, opcode: u8, header: usize, control: [u8; 2]) -> Vec<u8> {
    let segments = peer.expect_message(opcode).unwrap();
    for segment in &segments {
        assert_eq!([segment[0] & !0x40, segment[1]], control, "T, DV, RV, opcode");
    }
    segments.iter().flat_map(|segment| &segment[header..]).copied().collect()
}

/// Both versions mixed: a Send with the other version of DDP ends the stream by a Terminate of the connection's.
fn mix(peer: &mut SocketPeer, version: u8) {
    let mut other = send(2, b"mixed");
    other[0] = 0x40 | (1 - version);
    other[1] = version << 6 | 3;
    peer.send(&other).unwrap();
    let (ulpdus, end) = peer.to_the_end().unwrap();
    let terminate = ulpdus.last().unwrap();
    assert_eq!(terminate[..2], [0x40 | version, version << 6 | 7]);
    assert_eq!(terminate[18..20], [0x12, 0x06], "DDP, untagged, invalid version: {terminate:02x?}");
    assert_eq!(end, End::Closed);
}

/// The device as a responder. `request` and `reply` are the start-up frames, `version` what DDP and RDMAP then have.
fn serve(mpa: MpaConfig, request: Vec<u8>, reply: Vec<u8>, version: u8) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let (ready, is_ready): (Sender<u32>, Receiver<u32>) = channel();
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || {
            let local = Local::open();
            let region = local.pd.allocate(REGION, Access::all()).unwrap();
            local.qp.post_recv(&RecvRequest::new(1, &[region.sge(0, 16)])).unwrap();
            local.qp.post_recv(&RecvRequest::new(2, &[region.sge(0, 16)])).unwrap();
            let options = ListenOptions { framing: Some(mpa.into()), ..ListenOptions::default() };
            let listener = local.device.listen(address, options).unwrap();
            ready.send(region.key().value()).unwrap();
            let mut incoming = listener.accept(LIMIT).unwrap();
            let depths = AcceptOptions { ird: 2, ord: 2, ..AcceptOptions::default() };
            let connection = incoming.accept(&local.qp, depths, LIMIT).unwrap();
            let versions = if version == 0 { Versions::Rdmac } else { Versions::Ietf };
            assert_eq!(local.qp.query().unwrap().versions, versions);
            if version == 0 {
                let immediate = WorkRequest::immediate(9, [0; 8]);
                assert_eq!(local.qp.post_send(&immediate), Err(PostError::NoExtensions));
            }
            local.exchange();
            assert!(connection.wait_disconnected(LIMIT).unwrap());
        });
        let key = is_ready.recv().unwrap();
        let client = lab.enter(scope, Side::A, move || {
            let mut peer = SocketPeer::connect(address, LIMIT).unwrap();
            assert_eq!(peer.start(&request).unwrap(), reply);
            converse(&mut peer, key, version);
            mix(&mut peer, version);
        });
        client.unwrap().join().unwrap();
        server.unwrap().join().unwrap();
    });
}

/// The device as an initiator of two connections; the peer answers each request with `reply`, and `requests` are the
/// flags and revisions of those that it gets.
fn connect(mpa: MpaConfig, reply: Vec<u8>, requests: &[(u8, u8)], version: u8) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    let listener = lab.within(Side::A, || TcpListener::bind(address).unwrap()).unwrap();
    thread::scope(|scope| {
        let (tell, keys): (Sender<u32>, Receiver<u32>) = channel();
        let initiator = lab.enter(scope, Side::B, move || {
            let device = Device::open(INTERFACE).unwrap();
            for _ in 0..2 {
                let pd = device.create_pd().unwrap();
                let cq = device.create_cq(16).unwrap();
                let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
                let local = Local { device: device.clone(), pd, cq, qp };
                let region = local.pd.allocate(REGION, Access::all()).unwrap();
                local.qp.post_recv(&RecvRequest::new(1, &[region.sge(0, 16)])).unwrap();
                tell.send(region.key().value()).unwrap();
                let options =
                    ConnectOptions { framing: Some(mpa.clone().into()), ..ConnectOptions::default() };
                let connection = device.connect(&local.qp, address, options, LIMIT).unwrap();
                let versions = if version == 0 { Versions::Rdmac } else { Versions::Ietf };
                assert_eq!(local.qp.query().unwrap().versions, versions);
                local.exchange();
                connection.disconnect().unwrap();
                assert!(connection.wait_disconnected(LIMIT).unwrap());
            }
        });
        let mut seen = Vec::new();
        for round in 0..2 {
            let key = keys.recv().unwrap();
            let mut peer = loop {
                let mut peer = SocketPeer::accept_stream(&listener, LIMIT).unwrap();
                let request = peer.answer(|_| reply.clone()).unwrap();
                seen.push((request[16], request[17]));
                if request[17] == 1 {
                    break peer;
                }
                assert_ne!(peer.to_the_end().unwrap().1, End::Open, "revision 2 is given up");
            };
            assert_eq!(seen.len(), requests.len() + round, "the second connection needs one attempt");
            converse(&mut peer, key, version);
            peer.finish().unwrap();
            peer.to_the_end().unwrap();
        }
        assert_eq!(seen[..requests.len()], *requests);
        initiator.unwrap().join().unwrap();
    });
}

fn permissive() -> MpaConfig {
    MpaConfig { permissive: true, markers: Markers::Off, crc: false, ..MpaConfig::default() }
}

#[test]
fn netns_rfc5044_c2_4_an_rdmac_rnic_connects_to_a_permissive_listener() {
    let flags = MARKERS | CRC;
    serve(permissive(), start_up(REQUEST, flags, 0, b"hi"), start_up(REPLY, flags, 0, b""), 0);
}

#[test]
fn netns_rfc5044_c2_5_a_permissive_initiator_connects_to_an_rdmac_rnic() {
    let requests = [(ENHANCED | SEND_IMMEDIATE, 2), (0, 1)];
    connect(permissive(), start_up(REPLY, MARKERS | CRC, 0, b""), &requests, 0);
}

#[test]
fn netns_rfc5044_c2_2_without_the_permissive_mode_an_rdmac_rnic_is_refused() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    let listener = lab.within(Side::A, || TcpListener::bind(address).unwrap()).unwrap();
    thread::scope(|scope| {
        let initiator = lab.enter(scope, Side::B, move || {
            let local = Local::open();
            let refused = local.device.connect(&local.qp, address, ConnectOptions::default(), LIMIT);
            assert!(matches!(refused, Err(ConnectionError::Failed(_))), "{refused:?}");
        });
        let mut peer = SocketPeer::accept_stream(&listener, LIMIT).unwrap();
        peer.answer(|_| start_up(REPLY, MARKERS | CRC, 0, b"")).unwrap();
        assert_ne!(peer.to_the_end().unwrap().1, End::Open);
        initiator.unwrap().join().unwrap();
    });
}

/// MPA draft 08 has the frames of RFC 5044: revision 1, without IRD and ORD.
#[test]
fn netns_mpa_draft_08_peers_work_in_both_roles() {
    for markers in [0, MARKERS] {
        let reply = start_up(REPLY, CRC | markers, 1, b"");
        serve(MpaConfig::default(), start_up(REQUEST, CRC | markers, 1, b"draft 08"), reply.clone(), 1);
        connect(
            MpaConfig::default(),
            reply,
            &[(MARKERS | CRC | ENHANCED | SEND_IMMEDIATE, 2), (MARKERS | CRC, 1)],
            1,
        );
    }
}

/// The next event that `wanted` maps to something.
fn next<T>(local: &Local, channel: &EventChannel, mut wanted: impl FnMut(Event) -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        while let Some(event) = channel.poll() {
            if let Some(found) = wanted(event) {
                return found;
            }
        }
        assert!(begin.elapsed() < LIMIT, "no event");
        local.device.wait(channel, Some(Duration::from_millis(20))).unwrap();
    }
}

/// Takes streaming bytes until there are `len`.
fn hear(local: &Local, id: &CmId, channel: &EventChannel, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut at = id.stream_recv(&mut bytes).unwrap();
    while at < len {
        next(local, channel, |event| matches!(event.kind, EventKind::StreamReadable).then_some(()));
        at += id.stream_recv(&mut bytes[at..]).unwrap();
    }
    bytes
}

fn streaming() -> MpaConfig {
    MpaConfig { streaming: Some(LIMIT), markers: Markers::Require, ..MpaConfig::default() }
}

const HELLO: &[u8] = b"InitiatorName=iqn.2026-11.example:a RDMAExtensions=Yes";
const ACK: &[u8] = b"RDMAExtensions=Yes, the next byte is MPA's";

#[test]
fn netns_rfc5044_s7_1_3_a_peer_logs_in_and_then_begins_mpa() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let (ready, is_ready): (Sender<u32>, Receiver<u32>) = channel();
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || {
            let local = Local::open();
            let region = local.pd.allocate(REGION, Access::all()).unwrap();
            local.qp.post_recv(&RecvRequest::new(1, &[region.sge(0, 16)])).unwrap();
            let events = EventChannel::new().unwrap();
            let listener = CmId::new(&local.device, &events);
            listener.bind(address).unwrap();
            listener
                .listen(ListenOptions { framing: Some(streaming().into()), ..ListenOptions::default() })
                .unwrap();
            ready.send(region.key().value()).unwrap();
            let id = next(&local, &events, |event| match event.kind {
                EventKind::StreamRequest(request) => Some(request.id),
                _ => None,
            });
            assert_eq!(hear(&local, &id, &events, HELLO.len()), HELLO);
            id.begin_mpa(ACK).unwrap();
            let private_data = next(&local, &events, |event| match event.kind {
                EventKind::MpaRequest { private_data, .. } => Some(private_data),
                _ => None,
            });
            assert_eq!(private_data, b"logged in");
            id.accept(&local.qp, AcceptOptions::default()).unwrap();
            local.exchange();
            id.disconnect().unwrap();
            next(&local, &events, |event| matches!(event.kind, EventKind::Closed(_)).then_some(()));
        });
        let key = is_ready.recv().unwrap();
        let client = lab.enter(scope, Side::A, move || {
            let mut peer = SocketPeer::connect(address, LIMIT).unwrap();
            peer.say(&HELLO[..10]).unwrap();
            peer.say(&HELLO[10..]).unwrap();
            assert_eq!(peer.hear_stream(ACK.len()).unwrap(), ACK);
            let reply = peer.start(&start_up(REQUEST, MARKERS | CRC, 1, b"logged in")).unwrap();
            assert_eq!(reply, start_up(REPLY, MARKERS | CRC, 1, b""));
            converse(&mut peer, key, 1);
            peer.finish().unwrap();
            assert_eq!(peer.to_the_end().unwrap().1, End::Closed);
        });
        client.unwrap().join().unwrap();
        server.unwrap().join().unwrap();
    });
}

#[test]
fn netns_rfc5044_s7_1_3_we_log_in_at_a_peer_and_then_begin_mpa() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    let listener = lab.within(Side::A, || TcpListener::bind(address).unwrap()).unwrap();
    thread::scope(|scope| {
        let (tell, keys): (Sender<u32>, Receiver<u32>) = channel();
        let initiator = lab.enter(scope, Side::B, move || {
            let local = Local::open();
            let region = local.pd.allocate(REGION, Access::all()).unwrap();
            local.qp.post_recv(&RecvRequest::new(1, &[region.sge(0, 16)])).unwrap();
            tell.send(region.key().value()).unwrap();
            let events = EventChannel::new().unwrap();
            let id = CmId::new(&local.device, &events);
            id.resolve_address(address, LIMIT).unwrap();
            let is = |wanted: fn(&EventKind) -> bool| move |event: Event| wanted(&event.kind).then_some(());
            next(&local, &events, is(|kind| matches!(kind, EventKind::AddressResolved)));
            id.resolve_route().unwrap();
            next(&local, &events, is(|kind| matches!(kind, EventKind::RouteResolved)));
            id.connect(
                &local.qp,
                ConnectOptions { framing: Some(streaming().into()), ..ConnectOptions::default() },
            )
            .unwrap();
            next(&local, &events, is(|kind| matches!(kind, EventKind::Streaming)));
            assert_eq!(id.stream_send(HELLO).unwrap(), HELLO.len());
            assert_eq!(hear(&local, &id, &events, ACK.len()), ACK);
            id.begin_mpa(b"").unwrap();
            next(&local, &events, is(|kind| matches!(kind, EventKind::Established { .. })));
            local.exchange();
            id.disconnect().unwrap();
            next(&local, &events, is(|kind| matches!(kind, EventKind::Closed(_))));
        });
        let key = keys.recv().unwrap();
        let mut peer = SocketPeer::accept_stream(&listener, LIMIT).unwrap();
        assert_eq!(peer.hear_stream(HELLO.len()).unwrap(), HELLO);
        peer.say(ACK).unwrap();
        let request = peer.answer(|_| start_up(REPLY, MARKERS | CRC | ENHANCED, 2, &[0, 4, 0, 4])).unwrap();
        assert_eq!(request[16..18], [MARKERS | CRC | ENHANCED | SEND_IMMEDIATE, 2]);
        converse(&mut peer, key, 1);
        peer.finish().unwrap();
        peer.to_the_end().unwrap();
        initiator.unwrap().join().unwrap();
    });
}
