//! The connection manager through the public API: every step, every event and every failure to connect.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use common::{LIMIT, connect, devices, devices_with, queue_pair};
use xwarp_tcp::stack::ConnectError;
use xwarp_verbs::{
    CloseReason, CompletionQueue, Device, DeviceOptions, FramingConfig, Keepalive, Markers, MpaConfig,
    Payload, PeerDepths, Progress, ProtectionDomain, QpState, QueuePair, QueuePairOptions, RecvRequest,
    Tuning, WorkRequest,
    cm::{
        AcceptOptions, CmError, CmId, ConnectOptions, ConnectionError, EngineError, Event, EventChannel,
        EventKind, IncomingRequest, ListenOptions,
    },
    sim::{self, WireConfig},
};

fn server_address(port: u16) -> SocketAddr {
    (sim::ipv4(1), port).into()
}

/// Waits at most [`LIMIT`] for the next event.
fn next(device: &Device, channel: &EventChannel) -> Event {
    assert!(device.wait(channel, Some(LIMIT)).unwrap(), "no event came");
    channel.poll().expect("readable means an event")
}

fn listening(device: &Device, channel: &EventChannel, port: u16) -> CmId {
    let id = CmId::new(device, channel);
    id.bind(server_address(port)).unwrap();
    id.listen(ListenOptions::default()).unwrap();
    id
}

fn resolved(device: &Device, channel: &EventChannel, peer: SocketAddr) -> CmId {
    let id = CmId::new(device, channel);
    resolve(device, channel, &id, peer);
    id
}

fn resolve(device: &Device, channel: &EventChannel, id: &CmId, peer: SocketAddr) {
    id.resolve_address(peer, LIMIT).unwrap();
    assert!(matches!(next(device, channel).kind, EventKind::AddressResolved));
    id.resolve_route().unwrap();
    assert!(matches!(next(device, channel).kind, EventKind::RouteResolved));
}

fn request(device: &Device, channel: &EventChannel, listener: &CmId) -> IncomingRequest {
    let event = next(device, channel);
    assert_eq!(event.id, listener.key());
    match event.kind {
        EventKind::ConnectRequest(request) => request,
        other => panic!("{other:?}"),
    }
}

/// A client whose request waits for the server's answer.
struct Requested {
    id: CmId,
    incoming: IncomingRequest,
    _listener: CmId,
    /// The queue pair of each end, with its objects.
    server_qp: (ProtectionDomain, CompletionQueue, QueuePair),
    _client_qp: (ProtectionDomain, CompletionQueue, QueuePair),
    at_server: EventChannel,
    at_client: EventChannel,
    _server: Device,
    client: Device,
}

fn requested() -> Requested {
    let [server, client] = devices(Progress::Auto);
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let listener = listening(&server, &at_server, 7);
    let [server_qp, client_qp] = [&server, &client].map(|end| queue_pair(end, QueuePairOptions::default()));
    let id = resolved(&client, &at_client, server_address(7));
    id.connect(&client_qp.2, ConnectOptions::default()).unwrap();
    let incoming = request(&server, &at_server, &listener);
    Requested {
        id,
        incoming,
        _listener: listener,
        server_qp,
        _client_qp: client_qp,
        at_server,
        at_client,
        _server: server,
        client,
    }
}

#[test]
fn the_steps_of_both_ends_one_by_one() {
    let [server, client] = devices(Progress::Auto);
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let listener = listening(&server, &at_server, 7);
    let (_spd, scq, sqp) = queue_pair(&server, QueuePairOptions::default());
    let (_cpd, ccq, cqp) = queue_pair(&client, QueuePairOptions::default());

    let id = resolved(&client, &at_client, server_address(7));
    assert_eq!(id.peer_address(), Some(server_address(7)));
    assert!(id.tcp_info().is_none(), "no connection yet");
    let options =
        ConnectOptions { private_data: b"who is there".to_vec(), ird: 3, ord: 5, ..Default::default() };
    id.connect(&cqp, options).unwrap();

    let incoming = request(&server, &at_server, &listener);
    assert_eq!(incoming.private_data, b"who is there");
    assert_eq!(incoming.depths, PeerDepths { ird: Some(3), ord: Some(5) });
    assert_eq!((incoming.local, incoming.peer.ip()), (server_address(7), sim::ipv4(2)));
    let options = AcceptOptions { private_data: b"it is me".to_vec(), ird: 4, ord: 2, ..Default::default() };
    incoming.id.accept(&sqp, options).unwrap();
    let event = next(&server, &at_server);
    assert_eq!(event.id, incoming.id.key());
    assert!(matches!(event.kind, EventKind::Established { .. }), "{event:?}");

    let EventKind::Established { private_data, ird, ord, peer } = next(&client, &at_client).kind else {
        panic!()
    };
    // RFC 6581 section 9.1: the initiator gets the responder's own values, not only the negotiated ones.
    assert_eq!(peer, PeerDepths { ird: Some(4), ord: Some(2) });
    assert_eq!(private_data, b"it is me");
    // RFC 6581 section 9.1: neither end has more outstanding than the other serves.
    assert!(ird >= 2 && ord <= 4, "ird {ird}, ord {ord}");
    assert_eq!(id.local_address(), incoming.id.peer_address());
    assert_eq!((sqp.state(), cqp.state()), (QpState::Rts, QpState::Rts));
    assert_eq!(id.tcp_info().unwrap().emss, cqp.tcp_info().unwrap().emss);
    assert!(incoming.id.tcp_info().is_some());

    // perftest destroys its listener and listens again on the port while its connection lives.
    drop(listener);
    let again = listening(&server, &at_server, 7);
    sqp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    cqp.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
    assert_eq!(scq.spin(LIMIT).unwrap().check().unwrap().wr_id, 1);
    assert_eq!(ccq.spin(LIMIT).unwrap().check().unwrap().wr_id, 2);

    id.disconnect().unwrap();
    assert!(matches!(next(&server, &at_server).kind, EventKind::Disconnected));
    incoming.id.disconnect().unwrap();
    assert!(matches!(next(&client, &at_client).kind, EventKind::Disconnected));
    assert!(matches!(next(&client, &at_client).kind, EventKind::Closed(_)));
    assert!(matches!(next(&server, &at_server).kind, EventKind::Closed(_)));
    assert!(id.disconnect().is_ok(), "closed already");
    assert!(id.tcp_info().is_none() && incoming.id.tcp_info().is_none());
    drop(again);
    assert!(at_server.poll().is_none());
}

/// The application of the closing end need not wait until the other application reads its events.
#[test]
fn a_direction_may_close_with_the_peers() {
    let Requested { id, incoming, server_qp, at_server, at_client, client, .. } = &requested();
    let options = AcceptOptions { close_with_peer: true, ..AcceptOptions::default() };
    incoming.id.accept(&server_qp.2, options).unwrap();
    assert!(matches!(next(client, at_client).kind, EventKind::Established { .. }));
    id.disconnect().unwrap();
    assert!(matches!(next(client, at_client).kind, EventKind::Disconnected));
    assert!(matches!(next(client, at_client).kind, EventKind::Closed(_)));
    let kinds: Vec<_> = std::iter::from_fn(|| at_server.poll()).map(|event| event.kind).collect();
    assert!(matches!(kinds[..], [EventKind::Established { .. }, EventKind::Disconnected, ..]), "{kinds:?}");
}

/// RFC 5044 section 7.1.3.
#[test]
fn the_steps_of_both_ends_with_streaming_data_before_mpa() {
    let [server, client] = devices(Progress::Auto);
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let framing: FramingConfig = MpaConfig { streaming: Some(LIMIT), ..MpaConfig::default() }.into();
    let framing = Some(framing);
    let listener = CmId::new(&server, &at_server);
    listener.bind(server_address(3260)).unwrap();
    listener.listen(ListenOptions { framing: framing.clone(), ..ListenOptions::default() }).unwrap();
    let (_spd, _scq, sqp) = queue_pair(&server, QueuePairOptions::default());
    let (_cpd, _ccq, cqp) = queue_pair(&client, QueuePairOptions::default());

    let id = resolved(&client, &at_client, server_address(3260));
    assert!(matches!(id.stream_send(b"early"), Err(CmError::State { .. })));
    id.connect(&cqp, ConnectOptions { framing: framing.clone(), ..ConnectOptions::default() }).unwrap();
    assert!(matches!(next(&client, &at_client).kind, EventKind::Streaming));
    let event = next(&server, &at_server);
    assert_eq!(event.id, listener.key());
    let EventKind::StreamRequest(incoming) = event.kind else { panic!("{:?}", event.kind) };
    assert!(matches!(incoming.id.accept(&sqp, AcceptOptions::default()), Err(CmError::State { .. })));
    assert_eq!(id.stream_send(b"hello").unwrap(), 5);
    let mut bytes = [0; 16];
    while incoming.id.stream_recv(&mut bytes).unwrap() == 0 {
        assert!(matches!(next(&server, &at_server).kind, EventKind::StreamReadable));
    }
    assert_eq!(bytes[..5], *b"hello");
    incoming.id.begin_mpa(b"ack").unwrap();
    while id.stream_recv(&mut bytes).unwrap() == 0 {
        assert!(matches!(next(&client, &at_client).kind, EventKind::StreamReadable));
    }
    assert_eq!(bytes[..3], *b"ack");
    id.begin_mpa(b"").unwrap();

    let mut event = next(&server, &at_server);
    if matches!(event.kind, EventKind::StreamReadable) {
        // The bytes were taken before the event was.
        event = next(&server, &at_server);
    }
    assert_eq!(event.id, incoming.id.key());
    assert!(matches!(event.kind, EventKind::MpaRequest { .. }), "{event:?}");
    incoming.id.accept(&sqp, AcceptOptions::default()).unwrap();
    assert!(matches!(next(&server, &at_server).kind, EventKind::Established { .. }));
    while !matches!(next(&client, &at_client).kind, EventKind::Established { .. }) {}
    assert!(matches!(id.stream_send(b"late"), Err(CmError::State { .. })));

    // A dropped identifier resets a connection that has not begun MPA.
    let (_pd, _cq, qp) = queue_pair(&client, QueuePairOptions::default());
    let other = resolved(&client, &at_client, server_address(3260));
    other.connect(&qp, ConnectOptions { framing, ..ConnectOptions::default() }).unwrap();
    assert!(matches!(next(&client, &at_client).kind, EventKind::Streaming));
    drop(next(&server, &at_server));
    let event = next(&client, &at_client);
    assert!(matches!(event.kind, EventKind::ConnectError(CloseReason::Reset)), "{event:?}");
}

#[test]
fn steps_out_of_order_are_refused() {
    let [server, client] = devices(Progress::Auto);
    let channel = EventChannel::new().unwrap();
    let (_pd, _cq, qp) = queue_pair(&client, QueuePairOptions::default());
    let id = CmId::new(&client, &channel);
    assert!(matches!(
        id.connect(&qp, ConnectOptions::default()),
        Err(CmError::State { call: "connect", .. })
    ));
    assert!(matches!(id.resolve_route(), Err(CmError::State { .. })));
    assert!(matches!(id.listen(ListenOptions::default()), Err(CmError::State { .. })));
    assert!(matches!(id.accept(&qp, AcceptOptions::default()), Err(CmError::State { .. })));
    assert!(matches!(id.reject(&[]), Err(CmError::State { .. })));
    assert!(matches!(id.disconnect(), Err(CmError::State { .. })));
    let (_pd, _cq, foreign) = queue_pair(&server, QueuePairOptions::default());
    assert!(matches!(id.connect(&foreign, ConnectOptions::default()), Err(CmError::OtherDevice)));
    id.bind((sim::ipv4(2), 9).into()).unwrap();
    assert_eq!(id.local_address(), Some((sim::ipv4(2), 9).into()));
    id.listen(ListenOptions::default()).unwrap();
    let second = CmId::new(&client, &channel);
    second.bind((sim::ipv4(2), 9).into()).unwrap();
    assert!(matches!(second.listen(ListenOptions::default()), Err(CmError::Listen(_))));
}

#[test]
fn a_rejection_carries_private_data_and_leaves_the_queue_pair_usable() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let listener = server.listen(server_address(7), ListenOptions::default()).unwrap();
    let (_pd, _cq, qp) = queue_pair(client, QueuePairOptions::default());
    let (_spd, _scq, sqp) = queue_pair(server, QueuePairOptions::default());
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = listener.accept(LIMIT).unwrap();
            assert!(request.reject(&vec![0; 70_000]).is_err(), "too long");
            request.reject(b"not today").unwrap();
            drop(request);
            // Dropping a request rejects it too.
            drop(listener.accept(LIMIT).unwrap());
            listener.accept(LIMIT).unwrap().accept(&sqp, AcceptOptions::default(), LIMIT).unwrap()
        });
        let ask = || client.connect(&qp, server_address(7), ConnectOptions::default(), LIMIT);
        assert!(matches!(ask(), Err(ConnectionError::Rejected(data)) if data == b"not today"));
        assert!(matches!(ask(), Err(ConnectionError::Rejected(data)) if data.is_empty()));
        assert_eq!(qp.state(), QpState::Idle);
        ask().unwrap();
    });
}

/// RFC 5044 section 7.1.2 lets the acceptor send only after the initiator's first message, which devices send themselves.
#[test]
fn either_end_may_speak_first() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    client.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    server.qp.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
    assert_eq!(client.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, 1);
    assert_eq!(server.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, 2);
}

/// By the end itself, not by its event, which is read once.
#[test]
fn a_connection_that_has_ended_says_so_each_time() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let asked = |connection: &xwarp_verbs::cm::Connection| {
        [(); 3].map(|()| connection.wait_disconnected(Duration::from_millis(200)).unwrap())
    };
    assert_eq!(asked(&client.connection), [false; 3]);
    server.connection.disconnect().unwrap();
    assert!(client.connection.wait_disconnected(LIMIT).unwrap());
    assert_eq!(asked(&client.connection), [true; 3]);

    // The event was taken by a poll.
    let [server, client] = connect(&pair, 2);
    server.connection.disconnect().unwrap();
    let end = Instant::now() + LIMIT;
    while !matches!(client.connection.poll(), Some(EventKind::Disconnected)) {
        assert!(Instant::now() < end, "no event");
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(asked(&client.connection), [true; 3]);
}

/// A rejection without markers and without private data may be a refusal of markers (design section 5): the initiator
/// repeats the attempt without markers.
#[test]
fn design_s5_a_second_attempt_leaves_from_another_port_unless_one_was_bound() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let markers = |markers| Some(MpaConfig { markers, ..MpaConfig::default() }.into());
    let listener = CmId::new(server, &at_server);
    listener.bind("0.0.0.0:7".parse().unwrap()).unwrap();
    listener.listen(ListenOptions { framing: markers(Markers::Off), ..ListenOptions::default() }).unwrap();
    let refused = |bound: Option<SocketAddr>| {
        let id = CmId::new(client, &at_client);
        if let Some(address) = bound {
            id.bind(address).unwrap();
        }
        // Alternate address families, because the peer is remembered by its address.
        let peer = if bound.is_some() { sim::ipv6(1) } else { sim::ipv4(1) };
        id.resolve_address((peer, 7).into(), LIMIT).unwrap();
        assert!(matches!(next(client, &at_client).kind, EventKind::AddressResolved));
        id.resolve_route().unwrap();
        assert!(matches!(next(client, &at_client).kind, EventKind::RouteResolved));
        let (_pd, _cq, qp) = queue_pair(client, QueuePairOptions::default());
        let (_spd, _scq, sqp) = queue_pair(server, QueuePairOptions::default());
        id.connect(&qp, ConnectOptions::default()).unwrap();
        let first = request(server, &at_server, &listener);
        first.id.reject(&[]).unwrap();
        let second = request(server, &at_server, &listener);
        second.id.accept(&sqp, AcceptOptions::default()).unwrap();
        assert!(matches!(next(client, &at_client).kind, EventKind::Established { .. }));
        assert_eq!(id.local_address(), Some(second.peer));
        assert!(matches!(next(server, &at_server).kind, EventKind::Established { .. }));
        drop((qp, sqp));
        while at_server.poll().is_some() || at_client.poll().is_some() {}
        (first.peer, second.peer)
    };
    let (first, second) = refused(None);
    assert_ne!(first.port(), second.port());
    let bound = SocketAddr::new(sim::ipv6(2), 4444);
    assert_eq!(refused(Some(bound)), (bound, bound));
}

#[test]
fn nobody_listening_refuses_at_once() {
    let [_server, client] = devices(Progress::Auto);
    let (_pd, _cq, qp) = queue_pair(&client, QueuePairOptions::default());
    let begin = Instant::now();
    let refused = client.connect(&qp, server_address(99), ConnectOptions::default(), LIMIT).unwrap_err();
    assert!(matches!(refused, ConnectionError::Failed(CloseReason::Refused)), "{refused:?}");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_unknown_neighbour_is_an_address_error_within_the_limit() {
    let [_server, client] = devices(Progress::Auto);
    let channel = EventChannel::new().unwrap();
    let id = CmId::new(&client, &channel);
    let begin = Instant::now();
    id.resolve_address("192.0.2.77:1".parse().unwrap(), Duration::from_millis(150)).unwrap();
    assert!(begin.elapsed() < Duration::from_millis(100), "resolving must not block");
    assert!(matches!(next(&client, &channel).kind, EventKind::AddressError(_)));
    assert!(begin.elapsed() >= Duration::from_millis(140));
    // The resolution may be repeated.
    id.resolve_address(server_address(1), LIMIT).unwrap();
    assert!(matches!(next(&client, &channel).kind, EventKind::AddressResolved));
}

#[test]
fn a_peer_that_answers_nothing_ends_the_wait() {
    let [server, client] = devices(Progress::Application);
    let listener = server.listen(server_address(7), ListenOptions::default()).unwrap();
    let (_pd, _cq, qp) = queue_pair(&client, QueuePairOptions::default());
    // No thread runs the server's engine.
    let limit = Duration::from_millis(300);
    let error = client.connect(&qp, server_address(7), ConnectOptions::default(), limit).unwrap_err();
    assert!(matches!(error, ConnectionError::TimeLimit), "{error:?}");
    drop(listener);
}

#[test]
fn unread_requests_end_with_their_listener() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let channel = EventChannel::new().unwrap();
    let listener = listening(server, &channel, 7);
    let (_pd, _cq, qp) = queue_pair(client, QueuePairOptions::default());
    thread::scope(|scope| {
        let asked = scope.spawn(|| client.connect(&qp, server_address(7), ConnectOptions::default(), LIMIT));
        assert!(server.wait(&channel, Some(LIMIT)).unwrap());
        drop(listener);
        assert!(matches!(asked.join().unwrap(), Err(ConnectionError::Rejected(_))));
    });
    assert!(channel.poll().is_none());
}

#[test]
fn an_initiator_that_leaves_takes_its_request_back() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let listener = listening(server, &at_server, 7);
    let (_pd, _cq, qp) = queue_pair(client, QueuePairOptions::default());
    let id = resolved(client, &at_client, server_address(7));
    id.connect(&qp, ConnectOptions::default()).unwrap();
    let incoming = request(server, &at_server, &listener);
    drop(qp);
    drop(id);
    let event = next(server, &at_server);
    assert_eq!(event.id, incoming.id.key());
    assert!(matches!(event.kind, EventKind::RequestGone), "{event:?}");
    let (_spd, _scq, sqp) = queue_pair(server, QueuePairOptions::default());
    assert!(incoming.id.accept(&sqp, AcceptOptions::default()).is_err());
}

#[test]
fn requests_of_initiators_that_leave_do_not_wait_at_a_listener_that_is_not_polled() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let _listener = listening(server, &at_server, 7);
    for _ in 0..50 {
        let (_pd, _cq, qp) = queue_pair(client, QueuePairOptions::default());
        let id = resolved(client, &at_client, server_address(7));
        id.connect(&qp, ConnectOptions::default()).unwrap();
        assert!(server.wait(&at_server, Some(LIMIT)).unwrap(), "the request arrived");
        drop((qp, id));
        let begin = Instant::now();
        while server.wait(&at_server, Some(Duration::ZERO)).unwrap() {
            assert!(begin.elapsed() < LIMIT, "the request waits");
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(at_server.poll().is_none());
}

#[test]
fn one_listener_serves_many_clients_at_once() {
    const CLIENTS: usize = 64;
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let listener = server.listen(server_address(7), ListenOptions::default()).unwrap();
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let (pd, cq, _unused) = queue_pair(server, QueuePairOptions::default());
            (0..CLIENTS)
                .map(|_| {
                    let mut request = listener.accept(LIMIT).unwrap();
                    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
                    let private_data = request.private_data().to_vec();
                    let options = AcceptOptions { private_data, ..Default::default() };
                    (request.accept(&qp, options, LIMIT).unwrap(), qp)
                })
                .collect::<Vec<_>>()
        });
        let channel = EventChannel::new().unwrap();
        let (pd, cq, _unused) = queue_pair(client, QueuePairOptions::default());
        let asking: Vec<_> = (0..CLIENTS)
            .map(|i| {
                let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
                let id = resolved_in_between(client, server_address(7));
                let (id, _old) = id;
                let mut id = id;
                id.migrate(&channel);
                id.connect(&qp, ConnectOptions { private_data: vec![i as u8], ..Default::default() })
                    .unwrap();
                (id, qp)
            })
            .collect();
        let mut seen = [false; CLIENTS];
        for _ in 0..CLIENTS {
            let event = next(client, &channel);
            let EventKind::Established { private_data, .. } = event.kind else { panic!("{event:?}") };
            let index = usize::from(private_data[0]);
            assert_eq!(asking[index].0.key(), event.id, "each answer reaches who asked");
            assert!(!std::mem::replace(&mut seen[index], true));
        }
        let connections = serving.join().unwrap();
        let ports: std::collections::HashSet<_> =
            connections.iter().map(|(c, _)| c.peer_address().unwrap()).collect();
        assert_eq!(ports.len(), CLIENTS);
    });
}

/// A resolved identifier on its own channel, as programs create it before they migrate it.
fn resolved_in_between(device: &Device, peer: SocketAddr) -> (CmId, EventChannel) {
    let channel = EventChannel::new().unwrap();
    (resolved(device, &channel, peer), channel)
}

#[test]
fn a_peer_that_vanishes_is_noticed() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 7);
    server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    client.qp.abort().unwrap();
    assert!(server.connection.wait_disconnected(LIMIT).unwrap());
    assert_eq!(server.cq.spin(LIMIT).unwrap().status, xwarp_verbs::WcStatus::Flushed);
    assert_eq!(server.qp.state(), QpState::Error);
}

#[test]
fn a_queue_pair_connects_again_after_a_reset() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 7);
    drop(server);
    assert!(client.connection.wait_disconnected(LIMIT).unwrap());
    let common::End { connection, qp, .. } = client;
    drop(connection);
    let begin = Instant::now();
    while let Err(error) = qp.reset() {
        assert!(begin.elapsed() < LIMIT, "{error}");
        thread::sleep(Duration::from_millis(1));
    }
    let listener = pair[0].listen(server_address(8), ListenOptions::default()).unwrap();
    let (_pd, _cq, sqp) = queue_pair(&pair[0], QueuePairOptions::default());
    thread::scope(|scope| {
        let accepted =
            scope.spawn(|| listener.accept(LIMIT).unwrap().accept(&sqp, AcceptOptions::default(), LIMIT));
        let connected = pair[1].connect(&qp, server_address(8), ConnectOptions::default(), LIMIT);
        assert!(connected.is_ok() && accepted.join().unwrap().is_ok());
    });
}

/// Keepalive probes that a device has sent.
fn keepalives(device: &Device) -> u64 {
    device.counters().value("tcp.keepalives").unwrap()
}

/// RFC 9293 section 3.8.4: a listener's settings apply to its incoming connections, an identifier's to its
/// connection, at whatever time they are made; other connections of the device are not affected.
#[test]
fn rfc9293_s3_8_4_identifiers_tune_their_connections_before_and_after_they_are_made() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let listener = listening(server, &at_server, 7);
    let default = listener.tuning();
    assert_eq!(default.keepalive, Some(Keepalive::default()));
    let often = Duration::from_millis(5);
    let keepalive = Keepalive { idle: often, interval: often, probes: 2000 };
    let lively = Tuning { keepalive: Some(keepalive), ..default };
    listener.tune(lively).unwrap();

    let (_pd, _cq, qp) = queue_pair(client, QueuePairOptions::default());
    let (_spd, _scq, sqp) = queue_pair(server, QueuePairOptions::default());
    let id = resolved(client, &at_client, server_address(7));
    assert!(matches!(id.tune(Tuning { dscp: 64, ..default }), Err(CmError::Codepoint(64))));
    id.tune(Tuning { dscp: 10, ..default }).unwrap();
    id.connect(&qp, ConnectOptions::default()).unwrap();
    let incoming = request(server, &at_server, &listener);
    assert_eq!(incoming.id.tuning(), lively);
    incoming.id.accept(&sqp, AcceptOptions::default()).unwrap();
    assert!(matches!(next(client, &at_client).kind, EventKind::Established { .. }));
    assert!(matches!(next(server, &at_server).kind, EventKind::Established { .. }));
    let until = |done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < LIMIT, "nobody probes");
            thread::sleep(often);
        }
    };
    until(&|| keepalives(server) > 2);
    assert_eq!((keepalives(client), id.tuning().keepalive), (0, default.keepalive));

    // Probes are far apart at one end and frequent at the other.
    incoming.id.tune(default).unwrap();
    id.tune(lively).unwrap();
    let before = keepalives(server);
    until(&|| keepalives(client) > 2);
    assert_eq!(keepalives(server), before);
}

#[test]
fn a_bound_port_is_the_one_that_the_peer_sees() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let listener = listening(server, &at_server, 7);
    let (_pd, _cq, qp) = queue_pair(client, QueuePairOptions::default());
    let id = CmId::new(client, &at_client);
    id.bind("0.0.0.0:4444".parse().unwrap()).unwrap();
    id.resolve_address(server_address(7), LIMIT).unwrap();
    assert!(matches!(next(client, &at_client).kind, EventKind::AddressResolved));
    id.resolve_route().unwrap();
    assert!(matches!(next(client, &at_client).kind, EventKind::RouteResolved));
    id.connect(&qp, ConnectOptions::default()).unwrap();
    assert_eq!(request(server, &at_server, &listener).peer, (sim::ipv4(2), 4444).into());
}

#[test]
fn a_request_that_was_rejected_with_too_much_private_data_still_waits() {
    let Requested { incoming, server_qp, at_client, client, .. } = &requested();
    assert!(matches!(incoming.id.reject(&vec![0; 70_000]), Err(CmError::Engine(_))));
    let too_much = AcceptOptions { private_data: vec![0; 70_000], ..AcceptOptions::default() };
    assert!(matches!(incoming.id.accept(&server_qp.2, too_much), Err(CmError::Engine(_))));
    incoming.id.accept(&server_qp.2, AcceptOptions::default()).unwrap();
    assert!(matches!(next(client, at_client).kind, EventKind::Established { .. }));
}

/// What was wrong with an answer costs the answer, not the request: the peer still waits.
#[test]
fn a_request_that_could_not_be_accepted_can_be_accepted_or_rejected() {
    let pair = devices(Progress::Auto);
    let [server, client] = &pair;
    let (_spd, _scq, sqp) = queue_pair(server, QueuePairOptions::default());
    let (_cpd, _ccq, cqp) = queue_pair(client, QueuePairOptions::default());
    let listener = server.listen(server_address(7), ListenOptions::default()).unwrap();
    let too_much = || AcceptOptions { private_data: vec![0; 70_000], ..AcceptOptions::default() };
    thread::scope(|scope| {
        let connecting =
            scope.spawn(|| client.connect(&cqp, server_address(7), ConnectOptions::default(), LIMIT));
        let mut request = listener.accept(LIMIT).unwrap();
        assert!(request.accept(&sqp, too_much(), LIMIT).is_err());
        assert!(matches!(request.start_accept(&sqp, too_much()), Err(CmError::Engine(_))));
        let _connection = request.accept(&sqp, AcceptOptions::default(), LIMIT).unwrap();
        assert!(matches!(request.reject(b"late"), Err(CmError::State { .. })), "it has been answered");
        connecting.join().unwrap().unwrap();
    });
    let (_other, _other_cq, other) = queue_pair(client, QueuePairOptions::default());
    thread::scope(|scope| {
        let connecting =
            scope.spawn(|| client.connect(&other, server_address(7), ConnectOptions::default(), LIMIT));
        let mut request = listener.accept(LIMIT).unwrap();
        assert!(request.start_accept(&sqp, too_much()).is_err());
        request.reject(b"sorry").unwrap();
        let refused = connecting.join().unwrap().unwrap_err();
        assert!(matches!(&refused, ConnectionError::Rejected(data) if data == b"sorry"), "{refused:?}");
    });
}

#[test]
fn an_address_that_cannot_be_resolved_now_can_be_resolved_later() {
    let [_server, client] = devices(Progress::Auto);
    let channel = EventChannel::new().unwrap();
    let nobody = SocketAddr::from(([192, 0, 2, 99], 7));
    let limit = Duration::from_secs(3);
    let mut waiting = Vec::new();
    let refused = loop {
        let id = CmId::new(&client, &channel);
        match id.resolve_address(nobody, limit) {
            Ok(()) => waiting.push(id),
            Err(_) => break id,
        }
        assert!(waiting.len() < 1000, "there is a limit");
    };
    assert_eq!(refused.peer_address(), None);
    refused.resolve_address(server_address(7), limit).unwrap();
    let event = next(&client, &channel);
    assert!(matches!(event.kind, EventKind::AddressResolved));
    assert_eq!((event.id, refused.peer_address()), (refused.key(), Some(server_address(7))));
}

#[test]
fn a_connect_that_fails_leaves_no_port_behind() {
    let [_server, client] = devices(Progress::Auto);
    let channel = EventChannel::new().unwrap();
    let (_pd, _cq, qp) = queue_pair(&client, QueuePairOptions::default());
    let id = resolved(&client, &channel, server_address(7));
    let before = id.local_address();
    let too_much = ConnectOptions { private_data: vec![0; 70_000], ..ConnectOptions::default() };
    assert!(matches!(id.connect(&qp, too_much), Err(CmError::Engine(_))));
    assert_eq!((id.local_address(), qp.state()), (before, QpState::Idle));
    // Both ports of the failed attempt are free again.
    let bound = [(); 2].map(|()| {
        let id = CmId::new(&client, &channel);
        id.bind((sim::ipv4(2), 0).into()).unwrap();
        id
    });
    assert_eq!(bound.map(|id| id.local_address().unwrap().port()), [49152, 49153]);
}

/// A queue pair with its objects.
type Pair = (ProtectionDomain, CompletionQueue, QueuePair);

/// Two devices, the events of each, and listeners at ports 7 and 8 of the server.
struct Hosts {
    listeners: [CmId; 2],
    at_server: EventChannel,
    at_client: EventChannel,
    server: Device,
    client: Device,
}

/// An established connection of [`Hosts`].
struct Joined {
    id: CmId,
    client: Pair,
    accepted: CmId,
    server: Pair,
    /// The client's address, as the server sees it.
    from: SocketAddr,
}

impl Hosts {
    /// `time_wait` is that of both.
    fn new(time_wait: Duration) -> Self {
        let mut options = DeviceOptions::default();
        options.tcp.time_wait = time_wait;
        let [server, client] = devices_with(&options, &WireConfig::default());
        let (at_server, at_client) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
        let listeners = [7, 8].map(|port| listening(&server, &at_server, port));
        Self { listeners, at_server, at_client, server, client }
    }

    /// An identifier of the client with the port of `other`.
    fn bound_as(&self, other: &CmId) -> CmId {
        let id = CmId::new(&self.client, &self.at_client);
        id.bind_as(other).unwrap();
        id
    }

    /// Connects an idle identifier of the client to `port` of the server.
    fn join(&self, id: CmId, port: u16) -> Joined {
        let pair = queue_pair(&self.client, QueuePairOptions::default());
        resolve(&self.client, &self.at_client, &id, server_address(port));
        id.connect(&pair.2, ConnectOptions::default()).unwrap();
        let incoming = request(&self.server, &self.at_server, &self.listeners[usize::from(port - 7)]);
        self.answer(incoming, id, pair)
    }

    /// Accepts the request of the client's identifier `id`.
    fn answer(&self, incoming: IncomingRequest, id: CmId, client: Pair) -> Joined {
        let server = queue_pair(&self.server, QueuePairOptions::default());
        incoming.id.accept(&server.2, AcceptOptions::default()).unwrap();
        for (device, channel) in [(&self.server, &self.at_server), (&self.client, &self.at_client)] {
            let event = next(device, channel);
            assert!(matches!(event.kind, EventKind::Established { .. }), "{event:?}");
        }
        Joined { id, client, accepted: incoming.id, server, from: incoming.peer }
    }

    fn join_new(&self, port: u16) -> Joined {
        self.join(CmId::new(&self.client, &self.at_client), port)
    }

    /// The lowest port that the client's interface can reserve.
    fn lowest_free_port(&self) -> u16 {
        let id = CmId::new(&self.client, &self.at_client);
        id.bind((sim::ipv4(2), 0).into()).unwrap();
        id.local_address().unwrap().port()
    }

    /// Waits until `port` is the lowest free one.
    fn wait_for_port(&self, port: u16) {
        let begin = Instant::now();
        while self.lowest_free_port() != port {
            assert!(begin.elapsed() < LIMIT, "port {port} is still reserved");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Joined {
    /// Sends a message from the client to the server.
    fn exchange(&self) {
        self.server.2.post_recv(&RecvRequest::new(1, &[])).unwrap();
        self.client.2.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
        assert_eq!(self.server.1.spin(LIMIT).unwrap().check().unwrap().wr_id, 1);
        assert_eq!(self.client.1.spin(LIMIT).unwrap().check().unwrap().wr_id, 2);
    }

    /// Closes the connection at the client, and then at the server.
    fn close(&self, hosts: &Hosts) {
        self.id.disconnect().unwrap();
        assert!(matches!(next(&hosts.server, &hosts.at_server).kind, EventKind::Disconnected));
        self.accepted.disconnect().unwrap();
        assert!(matches!(next(&hosts.client, &hosts.at_client).kind, EventKind::Disconnected));
        assert!(matches!(next(&hosts.client, &hosts.at_client).kind, EventKind::Closed(_)));
        assert!(matches!(next(&hosts.server, &hosts.at_server).kind, EventKind::Closed(_)));
    }
}

#[test]
fn a_connection_has_the_port_of_another_one_to_another_port_of_the_peer() {
    let hosts = Hosts::new(Duration::from_secs(1));
    let first = hosts.join_new(7);
    let second = hosts.bound_as(&first.id);
    assert_eq!(second.local_address(), Some(first.from));
    let second = hosts.join(second, 8);
    assert_eq!((second.from, second.id.local_address()), (first.from, Some(first.from)));
    first.exchange();
    second.exchange();
    drop(first);
    second.exchange();
}

/// The end that accepted a connection connects from the port of its listener, which serves on.
#[test]
fn a_connection_has_the_port_of_one_that_was_accepted() {
    let hosts = Hosts::new(Duration::from_secs(1));
    let first = hosts.join_new(7);
    let listener = CmId::new(&hosts.client, &hosts.at_client);
    listener.bind((sim::ipv4(2), 9).into()).unwrap();
    listener.listen(ListenOptions::default()).unwrap();
    let second = CmId::new(&hosts.server, &hosts.at_server);
    second.bind_as(&first.accepted).unwrap();
    let (_pd, _cq, qp) = queue_pair(&hosts.server, QueuePairOptions::default());
    resolve(&hosts.server, &hosts.at_server, &second, (sim::ipv4(2), 9).into());
    second.connect(&qp, ConnectOptions::default()).unwrap();
    let incoming = request(&hosts.client, &hosts.at_client, &listener);
    assert_eq!(incoming.peer, server_address(7));
    hosts.join_new(7).exchange();
    first.exchange();
}

/// The peer has refused the first attempt, which left from another port.
#[test]
fn a_connection_has_the_port_of_another_ones_last_attempt() {
    let hosts = Hosts::new(Duration::from_secs(1));
    let markers = |markers| Some(MpaConfig { markers, ..MpaConfig::default() }.into());
    let listener = CmId::new(&hosts.server, &hosts.at_server);
    listener.bind(server_address(9)).unwrap();
    listener.listen(ListenOptions { framing: markers(Markers::Off), ..ListenOptions::default() }).unwrap();
    let id = resolved(&hosts.client, &hosts.at_client, server_address(9));
    let pair = queue_pair(&hosts.client, QueuePairOptions::default());
    id.connect(&pair.2, ConnectOptions::default()).unwrap();
    let refused = request(&hosts.server, &hosts.at_server, &listener);
    refused.id.reject(&[]).unwrap();
    let first = hosts.answer(request(&hosts.server, &hosts.at_server, &listener), id, pair);
    assert_ne!(first.from, refused.peer);
    let second = hosts.bound_as(&first.id);
    assert_eq!(second.local_address(), Some(first.from));
    assert_eq!(hosts.join(second, 8).from, first.from);
}

/// Nothing else happens on the device meanwhile.
#[test]
fn the_port_of_the_last_connection_is_released_after_time_wait() {
    const TIME_WAIT: Duration = Duration::from_millis(300);
    let hosts = Hosts::new(TIME_WAIT);
    let joined = hosts.join_new(7);
    let port = joined.from.port();
    let end = Instant::now();
    joined.close(&hosts);
    drop(joined);
    hosts.wait_for_port(port);
    assert!(end.elapsed() >= TIME_WAIT, "released after {:?}", end.elapsed());
}

/// TIME-WAIT is at least as long as the peer has waited with its FIN.
#[test]
fn a_port_is_reserved_while_time_wait_is_longer_than_configured() {
    let hosts = Hosts::new(Duration::from_millis(20));
    let joined = hosts.join_new(7);
    let port = joined.from.port();
    joined.id.disconnect().unwrap();
    assert!(matches!(next(&hosts.server, &hosts.at_server).kind, EventKind::Disconnected));
    thread::sleep(Duration::from_millis(100));
    let end = Instant::now();
    joined.accepted.disconnect().unwrap();
    drop(joined);
    hosts.wait_for_port(port);
    assert!(end.elapsed() >= Duration::from_millis(100), "released after {:?}", end.elapsed());
    assert_eq!(hosts.join_new(7).from.port(), port);
}

#[test]
fn only_a_connection_of_the_same_device_lends_its_port() {
    let hosts = Hosts::new(Duration::from_secs(1));
    let new = || CmId::new(&hosts.client, &hosts.at_client);
    let refused = |other: &CmId| matches!(new().bind_as(other), Err(CmError::State { call: "bind_as", .. }));
    assert!(refused(&new()), "an idle one");
    assert!(refused(&resolved(&hosts.client, &hosts.at_client, server_address(7))), "a resolved one");
    let bound = new();
    bound.bind((sim::ipv4(2), 9).into()).unwrap();
    assert!(refused(&bound), "a bound one");
    bound.listen(ListenOptions::default()).unwrap();
    assert!(refused(&bound), "a listener");
    let first = hosts.join_new(7);
    assert!(matches!(new().bind_as(&first.accepted), Err(CmError::OtherDevice)));
    assert!(matches!(first.id.bind_as(&first.id), Err(CmError::State { call: "bind_as", .. })));
    let second = hosts.bound_as(&first.id);
    resolve(&hosts.client, &hosts.at_client, &second, server_address(8));
    assert!(matches!(second.bind_as(&first.id), Err(CmError::State { call: "bind_as", .. })));
}

/// The four-tuple of a connection is taken while it exists and in TIME-WAIT. The failed attempt leaves its queue pair and the other
/// connection as they were.
#[test]
fn a_second_connection_to_the_same_port_of_the_peer_is_refused() {
    let hosts = Hosts::new(Duration::from_secs(60));
    let first = hosts.join_new(7);
    let pair = queue_pair(&hosts.client, QueuePairOptions::default());
    let connect = || {
        let second = hosts.bound_as(&first.id);
        resolve(&hosts.client, &hosts.at_client, &second, server_address(7));
        let error = second.connect(&pair.2, ConnectOptions::default()).unwrap_err();
        let taken = EngineError::Connect(ConnectError::AddressInUse);
        assert!(matches!(&error, CmError::Engine(engine) if *engine == taken), "{error:?}");
        assert_eq!(pair.2.state(), QpState::Idle);
    };
    connect();
    first.exchange();
    first.close(&hosts);
    connect();
    let second = hosts.bound_as(&first.id);
    resolve(&hosts.client, &hosts.at_client, &second, server_address(8));
    second.connect(&pair.2, ConnectOptions::default()).unwrap();
    let incoming = request(&hosts.server, &hosts.at_server, &hosts.listeners[1]);
    let second = hosts.answer(incoming, second, pair);
    assert_eq!(second.from, first.from);
    second.exchange();
}

#[test]
fn a_port_is_reserved_until_both_of_its_connections_have_ended() {
    let hosts = Hosts::new(Duration::from_millis(20));
    let first = hosts.join_new(7);
    let port = first.from.port();
    assert_eq!(hosts.lowest_free_port(), port + 1);
    drop(hosts.bound_as(&first.id));
    assert_eq!(hosts.lowest_free_port(), port + 1, "the first connection has it");
    let second = hosts.bound_as(&first.id);
    drop(first);
    // That of a later connection is released meanwhile, after its TIME-WAIT.
    let begin = Instant::now();
    loop {
        let ended = hosts.join_new(7).from.port();
        assert!(ended > port, "the port was released");
        if hosts.lowest_free_port() == port + 1 {
            break;
        }
        assert!(begin.elapsed() < LIMIT, "no port is released");
    }
    drop(second);
    hosts.wait_for_port(port);
}
