//! Devices with two engines in memory: connections on both, one region, one completion queue and one shared receive queue for all.
#![cfg(feature = "sim")]
#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

mod common;

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{LIMIT, pattern};
use xwarp_verbs::{
    Access, AsyncEvent, CompletionChannel, CompletionQueue, Device, DeviceOptions, Payload, PostError,
    Progress, ProtectionDomain, QpState, QueuePair, QueuePairOptions, RecvRequest, WcStatus, WorkCompletion,
    WorkRequest,
    cm::{
        AcceptOptions, CmId, ConnectOptions, Connecting, Connection, EventChannel, EventKind, ListenOptions,
        Listener,
    },
    interface::Interface,
    sim::{self, WireConfig},
};

const ENGINES: u16 = 2;
const PORT: u16 = 7;
/// Bytes of each message.
const BYTES: usize = 20_000;

fn devices_with(options: &DeviceOptions) -> [Device; 2] {
    sim::queues(WireConfig::default(), 1500, ENGINES).unwrap().map(|parts| {
        let parts = parts.into_iter().map(|part| Box::new(part) as Box<dyn Interface>).collect();
        Device::over_parts(parts, options.clone()).unwrap()
    })
}

fn devices(progress: Progress) -> [Device; 2] {
    devices_with(&DeviceOptions { progress, ..DeviceOptions::default() })
}

fn address() -> SocketAddr {
    (sim::ipv4(1), PORT).into()
}

fn listen(device: &Device) -> Listener {
    device.listen(address(), ListenOptions::default()).unwrap()
}

/// A queue pair of the client in `engine`.
fn client_qp(pd: &ProtectionDomain, cq: &CompletionQueue, engine: u16) -> QueuePair {
    let qp = pd.create_qp(cq, cq, QueuePairOptions::default()).unwrap();
    qp.move_to_engine(engine).unwrap();
    assert_eq!(qp.engine(), engine);
    qp
}

/// Connects a client's queue pair, which is in the engine of its number, to each of the server's.
fn connect<'qp>(
    [server, client]: [&Device; 2],
    listener: &Listener,
    served: impl IntoIterator<Item = &'qp QueuePair>,
    clients: impl IntoIterator<Item = &'qp QueuePair>,
) -> Vec<[Connection; 2]> {
    let pairs = served.into_iter().zip(clients);
    let connect = |(theirs, ours): (&QueuePair, &QueuePair)| {
        let engine = ours.engine();
        let mut connecting = client.start_connect(ours, address(), ConnectOptions::default(), LIMIT).unwrap();
        let mut accepting = None;
        let mut done = [None, None];
        let end = Instant::now() + LIMIT;
        while done.iter().any(Option::is_none) {
            assert!(Instant::now() < end, "no connection in time");
            server.progress();
            client.progress();
            if accepting.is_none()
                && let Some(mut request) = listener.poll().unwrap()
            {
                assert_eq!(request.engine(), engine, "a SYN arrives on the queue on which it was sent");
                accepting = Some(request.start_accept(theirs, AcceptOptions::default()).unwrap());
                assert_eq!(theirs.engine(), engine, "the queue pair is in the engine of its connection");
            }
            let [accepted, connected] = &mut done;
            if accepted.is_none()
                && let Some(outcome) = accepting.as_mut().and_then(Connecting::poll)
            {
                *accepted = Some(outcome.unwrap());
            }
            if connected.is_none()
                && let Some(outcome) = connecting.poll()
            {
                *connected = Some(outcome.unwrap());
            }
        }
        done.map(Option::unwrap)
    };
    pairs.map(connect).collect()
}

/// The next completion of `cq`, while the other device runs too.
fn next(cq: &CompletionQueue, other: &Device) -> WorkCompletion {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(completion) = cq.poll_one() {
            return completion;
        }
        other.progress();
        assert!(Instant::now() < end, "no completion in time");
    }
}

/// Clients in both engines write to one region, and one shared receive queue and one completion queue serve both. When the region is
/// deregistered, neither writes any more.
fn share(progress: Progress) {
    let [server, client] = devices(progress);
    let (pd, cq) = (server.create_pd().unwrap(), server.create_cq(64).unwrap());
    let srq = pd.create_srq(16, 1).unwrap();
    let region = pd.allocate(2 * BYTES, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    let memory = region.memory().clone();
    let served =
        [(); 2].map(|()| pd.create_qp_with_srq(&cq, &cq, &srq, QueuePairOptions::default()).unwrap());
    let client_pd = client.create_pd().unwrap();
    let client_cqs = [(); 2].map(|()| client.create_cq(64).unwrap());
    let clients = [0, 1].map(|engine| client_qp(&client_pd, &client_cqs[usize::from(engine)], engine));
    let source = client_pd.allocate(BYTES, Access::empty()).unwrap();
    let listener = listen(&server);
    // Each of the server's queue pairs is first in the engine where it is not connected.
    let _connections = connect([&server, &client], &listener, served.iter().rev(), &clients);
    for round in 0..10 {
        for (engine, qp) in (0u8..).zip(&clients) {
            let bytes = pattern(BYTES, 31u8.wrapping_mul(round) + engine);
            source.write(0, &bytes).unwrap();
            srq.post_recv(&RecvRequest::new(u64::from(engine), &[])).unwrap();
            let to = region.remote(usize::from(engine) * BYTES);
            qp.post_send(&WorkRequest::write(1, Payload::Gather(&[source.sge(0, BYTES)]), to)).unwrap();
            qp.post_send(&WorkRequest::send(2, Payload::Inline(b"")).signaled()).unwrap();
            let received = next(&cq, &client);
            assert_eq!(
                (received.status, received.qp),
                (WcStatus::Success, served[usize::from(1 - engine)].id())
            );
            assert!(region.to_vec(usize::from(engine) * BYTES, BYTES).unwrap() == bytes);
        }
    }
    assert_eq!(server.counters().value("rdmap.sends_in"), Some(20), "of both engines");
    let remote = region.remote(0);
    drop(region);
    let before: Vec<u8> = (0..2 * BYTES).map(|_| 0).collect();
    memory.write(0, &before).unwrap();
    for (qp, cq) in clients.iter().zip(&client_cqs) {
        while cq.poll_one().is_some() {}
        qp.post_send(&WorkRequest::write(3, Payload::Gather(&[source.sge(0, BYTES)]), remote)).unwrap();
        let end = Instant::now() + LIMIT;
        while qp.state() != QpState::Error {
            assert!(Instant::now() < end, "the stream goes on");
            server.progress();
            client.progress();
        }
    }
    let mut after = before.clone();
    memory.read(0, &mut after).unwrap();
    assert!(after == before, "written after the deregistration");
}

#[test]
fn engines_share_regions_and_queues() {
    share(Progress::Auto);
}

#[test]
fn engines_share_regions_and_queues_without_threads() {
    share(Progress::Application);
}

#[test]
fn engines_share_regions_and_queues_with_threads_alone() {
    share(Progress::Thread);
}

/// Connected queue pairs of both engines at both ends; all of an end complete to one queue.
struct Both {
    devices: [Device; 2],
    cqs: [CompletionQueue; 2],
    qps: [[QueuePair; 2]; 2],
    _connections: Vec<[Connection; 2]>,
}

fn both(options: QueuePairOptions, entries: u32) -> Both {
    let devices = devices(Progress::Auto);
    let pds = [&devices[0], &devices[1]].map(|device| device.create_pd().unwrap());
    let cqs = [&devices[0], &devices[1]].map(|device| device.create_cq(entries).unwrap());
    let qps =
        [0, 1].map(|end: usize| [(); 2].map(|()| pds[end].create_qp(&cqs[end], &cqs[end], options).unwrap()));
    let listener = listen(&devices[0]);
    let connections = connect([&devices[0], &devices[1]], &listener, &qps[0], &qps[1]);
    Both { devices, cqs, qps, _connections: connections }
}

#[test]
fn receives_move_with_their_queue_pair() {
    let [server, client] = devices(Progress::Auto);
    let (pd, cq) = (server.create_pd().unwrap(), server.create_cq(8).unwrap());
    let served = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    served.post_recv(&RecvRequest::new(5, &[])).unwrap();
    let (client_pd, client_cq) = (client.create_pd().unwrap(), client.create_cq(8).unwrap());
    let qp = client_qp(&client_pd, &client_cq, 1);
    assert_eq!(served.engine(), 0);
    let _connections = connect([&server, &client], &listen(&server), [&served], [&qp]);
    assert_eq!((served.engine(), served.query().unwrap().recv_outstanding), (1, 1));
    qp.post_send(&WorkRequest::send(1, Payload::Inline(b""))).unwrap();
    assert_eq!(next(&cq, &client).wr_id, 5);
    let refused = served.move_to_engine(0).unwrap_err();
    assert!(refused.to_string().contains("Rts"), "a connected queue pair does not move: {refused}");
    assert!(served.move_to_engine(2).unwrap_err().to_string().contains("no engine 2"));
}

#[test]
fn posts_find_a_queue_pair_that_moves() {
    const MOVES: u32 = 1000;
    let [device, _] = devices(Progress::Application);
    let (pd, cq) = (device.create_pd().unwrap(), device.create_cq(8).unwrap());
    let options = QueuePairOptions { max_recv_wr: 64, ..QueuePairOptions::default() };
    let qp = pd.create_qp(&cq, &cq, options).unwrap();
    let moved = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..MOVES {
                qp.move_to_engine(1 - qp.engine()).unwrap();
            }
            moved.store(true, Ordering::Relaxed);
        });
        for wr_id in (0..).take_while(|wr_id| *wr_id < 100 || !moved.load(Ordering::Relaxed)) {
            match qp.post_recv(&RecvRequest::new(wr_id, &[])) {
                Ok(()) => assert!(wr_id < 64),
                Err(error) => assert_eq!((error, wr_id >= 64), (PostError::QueueFull(64), true)),
            }
            assert_eq!(qp.state(), QpState::Idle);
        }
    });
    assert_eq!(qp.query().unwrap().recv_outstanding, 64);
}

#[test]
fn a_post_to_a_shared_queue_reaches_the_queue_pairs_that_wait_in_each_engine() {
    let [server, client] = devices(Progress::Auto);
    let (pd, cq) = (server.create_pd().unwrap(), server.create_cq(64).unwrap());
    let srq = pd.create_srq(16, 1).unwrap();
    let served =
        [(); 2].map(|()| pd.create_qp_with_srq(&cq, &cq, &srq, QueuePairOptions::default()).unwrap());
    let (client_pd, client_cq) = (client.create_pd().unwrap(), client.create_cq(64).unwrap());
    let clients = [0, 1].map(|engine| client_qp(&client_pd, &client_cq, engine));
    let _connections = connect([&server, &client], &listen(&server), &served, &clients);
    for qp in &clients {
        for _ in 0..3 {
            qp.post_send(&WorkRequest::send(1, Payload::Inline(b""))).unwrap();
        }
    }
    let end = Instant::now() + LIMIT;
    while server.counters().value("rdmap.no_receive").unwrap() < 2 {
        assert!(Instant::now() < end, "no message waits");
        thread::sleep(Duration::from_millis(1));
    }
    let mut by_qp = [0; 2];
    for wr_id in 0..6 {
        srq.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
        let completion = next(&cq, &client);
        assert_eq!((completion.status, completion.wr_id), (WcStatus::Success, wr_id));
        by_qp[usize::from(completion.qp == served[1].id())] += 1;
    }
    assert_eq!(by_qp, [3, 3]);
    assert_eq!(srq.posted(), Ok(0));
}

#[test]
fn a_completion_queue_of_two_engines_overflows_in_both() {
    let Both { devices: [server, _], cqs, qps: [served, clients], .. } =
        &both(QueuePairOptions::default(), 4);
    let events = server.async_events();
    for qp in served {
        for wr_id in 0..8 {
            qp.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
        }
    }
    for _ in 0..5 {
        for qp in clients {
            // Fails once the peer has ended the stream.
            let _ = qp.post_send(&WorkRequest::send(2, Payload::Inline(b"")));
        }
    }
    let end = Instant::now() + LIMIT;
    while served.iter().any(|qp| qp.state() != QpState::Error) {
        assert!(Instant::now() < end, "a queue pair goes on");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(cqs[0].overflowed());
    let told = std::iter::from_fn(|| events.poll());
    assert_eq!(told.filter(|event| *event == AsyncEvent::CqOverflow { cq: cqs[0].id() }).count(), 1);
}

#[test]
fn a_batch_leaves_in_all_engines_when_it_is_dropped() {
    let Both { devices: [_, client], cqs, qps: [served, clients], .. } =
        &both(QueuePairOptions::default(), 64);
    for qp in served {
        qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    }
    let batch = client.batch();
    for qp in clients {
        batch.post_send(qp, &WorkRequest::send(1, Payload::Inline(b""))).unwrap();
    }
    drop(batch);
    let mut heard: Vec<_> = (0..2).map(|_| next(&cqs[0], client).qp).collect();
    heard.sort_unstable();
    assert_eq!(heard, [served[0].id(), served[1].id()]);
}

#[test]
fn sleeping_applications_are_woken_by_each_engine() {
    let devices = devices(Progress::Auto);
    let [server, client] = &devices;
    let channel = CompletionChannel::new().unwrap();
    let (pd, cq) = (server.create_pd().unwrap(), server.create_cq_with_channel(64, &channel).unwrap());
    let served = [(); 2].map(|()| pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap());
    let (client_pd, client_cq) = (client.create_pd().unwrap(), client.create_cq(64).unwrap());
    let clients = [0, 1].map(|engine| client_qp(&client_pd, &client_cq, engine));
    let _connections = connect([server, client], &listen(server), &served, &clients);
    for round in 0..20 {
        let which = round % 2;
        served[which].post_recv(&RecvRequest::new(round as u64, &[])).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(2));
                clients[which].post_send(&WorkRequest::send(1, Payload::Inline(b""))).unwrap();
            });
            let completion = cq.wait(LIMIT).unwrap().expect("in time");
            let seen = (completion.status, completion.wr_id, completion.qp);
            assert_eq!(seen, (WcStatus::Success, round as u64, served[which].id()));
        });
    }
}

/// Requests arrive in both engines at one listener; a listener that moves to another channel or is dropped takes all with it.
#[test]
fn a_listener_has_the_requests_of_all_engines() {
    let [server, client] = devices(Progress::Auto);
    let (old, new) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let mut listener = CmId::new(&server, &old);
    listener.bind(address()).unwrap();
    listener.listen(ListenOptions::default()).unwrap();
    let (pd, cq) = (client.create_pd().unwrap(), client.create_cq(64).unwrap());
    let qps: Vec<_> = (0..6).map(|number| client_qp(&pd, &cq, number % 2)).collect();
    let start = |qp| client.start_connect(qp, address(), ConnectOptions::default(), LIMIT).unwrap();
    let mut connecting: Vec<_> = qps.iter().map(start).collect();
    let end = Instant::now() + LIMIT;
    let run = |done: &mut dyn FnMut() -> bool| {
        while !done() {
            assert!(Instant::now() < end, "not in time");
            thread::sleep(Duration::from_millis(1));
        }
    };
    // Each attempt takes its steps when it is polled, and the requests reach the listener's first channel.
    for _ in 0..20 {
        assert!(connecting.iter_mut().all(|attempt| attempt.poll().is_none()));
        thread::sleep(Duration::from_millis(5));
    }
    listener.migrate(&new);
    assert!(old.poll().is_none());
    let mut engines = Vec::new();
    let mut requests = Vec::new();
    run(&mut || {
        while requests.len() < 2
            && let Some(event) = new.poll()
        {
            assert_eq!(event.id, listener.key());
            let EventKind::ConnectRequest(request) = event.kind else { panic!("{:?}", event.kind) };
            engines.push(request.id.engine());
            requests.push(request);
        }
        requests.len() == 2
    });
    drop(requests);
    drop(listener);
    let mut rejected = 0;
    run(&mut || {
        rejected += connecting.iter_mut().filter_map(Connecting::poll).filter(Result::is_err).count();
        rejected == qps.len()
    });
    let mut refused = start(&qps[0]);
    run(&mut || refused.poll().is_some_and(|outcome| outcome.is_err()));
}

#[test]
fn engines_connect_and_listen_again_and_again() {
    let [server, client] = devices(Progress::Auto);
    let (pd, cq) = (server.create_pd().unwrap(), server.create_cq(8).unwrap());
    let (client_pd, client_cq) = (client.create_pd().unwrap(), client.create_cq(8).unwrap());
    let (served, qp) = (
        pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap(),
        client_pd.create_qp(&client_cq, &client_cq, QueuePairOptions::default()).unwrap(),
    );
    for round in 0..6 {
        qp.move_to_engine(round % 2).unwrap();
        let [accepted, connected] = connect([&server, &client], &listen(&server), [&served], [&qp]).remove(0);
        assert_eq!((served.engine(), qp.engine()), (round % 2, round % 2));
        connected.disconnect().unwrap();
        accepted.disconnect().unwrap();
        for connection in [&accepted, &connected] {
            assert!(connection.wait_disconnected(LIMIT).unwrap());
        }
        let end = Instant::now() + LIMIT;
        while served.reset().is_err() || qp.reset().is_err() {
            assert!(Instant::now() < end, "the connection does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(server.drain(LIMIT) && client.drain(LIMIT));
}

#[test]
fn a_device_counts_and_tells_of_all_engines() {
    let Both { devices, qps, .. } = &both(QueuePairOptions::default(), 64);
    for device in devices {
        let attributes = device.attributes();
        assert_eq!((attributes.engines, attributes.interface.queues), (ENGINES, ENGINES));
        let opens = ["stack.active_opens", "stack.passive_opens"];
        assert_eq!(opens.iter().map(|name| device.counters().value(name).unwrap()).sum::<u64>(), 2);
    }
    assert_eq!(qps.each_ref().map(|qps| qps.each_ref().map(QueuePair::engine)), [[0, 1], [0, 1]]);
}
