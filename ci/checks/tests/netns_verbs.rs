//! The verbs between two namespaces with both ends in this process: features that `xwarp-perf` does not use.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    hostile::{SocketPeer, tagged},
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    perf::Perf,
};
use xwarp_verbs::{
    Access, CloseReason, CompletionQueue, Device, Payload, ProtectionDomain, QpState, QueuePair,
    QueuePairOptions, RecvRequest, WcStatus, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ConnectionError, ListenOptions},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(20);
const PORT: u16 = 4791;
/// Time limit for detecting that a peer's process died: the kernel detaches its XDP program, and the kernel's
/// TCP then resets our connection.
const NOTICED: Duration = Duration::from_secs(5);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// Opens the interface of the calling thread's namespace. All other calls are made in that namespace too,
/// because routes, neighbours and ports belong to it.
fn open() -> Device {
    Device::open(INTERFACE).unwrap()
}

/// One end of a connection; the fields are dropped in this order.
struct End {
    _connection: Connection,
    qp: QueuePair,
    cq: CompletionQueue,
    _pd: ProtectionDomain,
}

fn parts(device: &Device) -> (ProtectionDomain, CompletionQueue, QueuePair) {
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(1024).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    (pd, cq, qp)
}

const CLIENTS: u64 = 40;

/// Accepts all clients, then receives one message from each.
fn serve_many(lab: &Lab, listening: &Barrier) -> Vec<Vec<u8>> {
    let server = open();
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let listener = server.listen(address, ListenOptions::default()).unwrap();
    listening.wait();
    let mut ends = Vec::new();
    for _ in 0..CLIENTS {
        let mut request = listener.accept(LIMIT).unwrap();
        let (pd, cq, qp) = parts(&server);
        let inbox = pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, 64)])).unwrap();
        let private_data = request.private_data().iter().rev().copied().collect();
        let options = AcceptOptions { private_data, ..AcceptOptions::default() };
        let connection = request.accept(&qp, options, LIMIT).unwrap();
        ends.push((End { _connection: connection, qp, cq, _pd: pd }, inbox));
    }
    let hear = |(end, inbox): &(End, xwarp_verbs::MemoryRegion)| {
        let completion = end.cq.spin(LIMIT).unwrap();
        assert_eq!(completion.status, WcStatus::Success);
        inbox.to_vec(0, completion.byte_len as usize).unwrap()
    };
    ends.iter().map(hear).collect()
}

/// Connects all clients, then sends a message on each.
fn connect_many(lab: &Lab, listening: &Barrier) {
    let client = open();
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    listening.wait();
    let mut ends = Vec::new();
    for number in 0..CLIENTS {
        let (pd, cq, qp) = parts(&client);
        let private_data = number.to_be_bytes().to_vec();
        let options = ConnectOptions { private_data, ..ConnectOptions::default() };
        let connection = client.connect(&qp, address, options, LIMIT).unwrap();
        assert_eq!(connection.private_data(), number.to_le_bytes());
        ends.push(End { _connection: connection, qp, cq, _pd: pd });
    }
    for (number, end) in ends.iter().enumerate() {
        let text = format!("client {number}");
        end.qp.post_send(&WorkRequest::send(1, Payload::Inline(text.as_bytes())).signaled()).unwrap();
        assert_eq!(end.cq.spin(LIMIT).unwrap().status, WcStatus::Success);
    }
}

#[test]
fn netns_a_listener_takes_many_clients() {
    let lab = lab();
    let listening = Barrier::new(2);
    let heard = thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || serve_many(&lab, &listening)).unwrap();
        let client = lab.enter(scope, Side::A, || connect_many(&lab, &listening)).unwrap();
        client.join().unwrap();
        server.join().unwrap()
    });
    let expected: Vec<Vec<u8>> = (0..CLIENTS).map(|number| format!("client {number}").into_bytes()).collect();
    assert_eq!(heard, expected);
}

#[test]
fn netns_a_rejection_carries_its_private_data() {
    let lab = lab();
    let address = SocketAddr::new(lab.address(Side::B, Family::V6), PORT);
    let listening = Barrier::new(2);
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || {
            let listener = open().listen(address, ListenOptions::default()).unwrap();
            listening.wait();
            listener.accept(LIMIT).unwrap().reject(b"not today").unwrap();
        });
        let client = lab.enter(scope, Side::A, || {
            let device = open();
            let (_pd, _cq, qp) = parts(&device);
            listening.wait();
            device.connect(&qp, address, ConnectOptions::default(), LIMIT).unwrap_err()
        });
        let error = client.unwrap().join().unwrap();
        assert!(matches!(&error, ConnectionError::Rejected(words) if words == b"not today"), "{error:?}");
        server.unwrap().join().unwrap();
    });
}

#[test]
fn netns_refused_and_unreachable_are_distinguished() {
    let lab = lab();
    lab.within(Side::A, || {
        let client = open();
        // The kernel answers for a port that the stack does not own: refused immediately.
        let (_pd, _cq, qp) = parts(&client);
        let begin = Instant::now();
        let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
        let error = client.connect(&qp, address, ConnectOptions::default(), LIMIT).unwrap_err();
        assert!(matches!(error, ConnectionError::Failed(CloseReason::Refused)), "{error:?}");
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        // An address without a machine: neighbour resolution fails.
        let (_pd, _cq, qp) = parts(&client);
        let begin = Instant::now();
        let nobody = SocketAddr::from(([10, 77, 0, 99], PORT));
        let limit = Duration::from_secs(6);
        let error = client.connect(&qp, nobody, ConnectOptions::default(), limit).unwrap_err();
        assert!(matches!(error, ConnectionError::Route(_)), "{error:?}");
        assert!(begin.elapsed() < limit + Duration::from_secs(1), "{:?}", begin.elapsed());
    })
    .unwrap();
}

/// Starts a `send_bw` server, kills it during a transfer, and returns the client's output and the time until
/// the client exited.
fn kill_the_server(lab: &Lab, signal: Signal) -> (String, Duration) {
    let perf = Perf::new(lab, PROGRAM, "send_bw").both("-D 60 -s 64K");
    let mut server = perf.start_server().unwrap();
    let mut client = perf.start_client().unwrap();
    client.wait_for("#bytes", Duration::from_secs(1)).unwrap_err();
    server.signal(signal).unwrap();
    let killed = Instant::now();
    let status = client.wait(LIMIT).unwrap();
    assert!(!status.success(), "{}", client.output());
    server.wait(LIMIT).unwrap();
    (client.output(), killed.elapsed())
}

#[test]
fn netns_a_killed_peer_is_detected_immediately() {
    let lab = lab();
    let (output, took) = kill_the_server(&lab, Signal::KILL);
    assert!(took < NOTICED, "{took:?}: {output}");
    // The interface is free again, so a new pair works.
    Perf::new(&lab, PROGRAM, "send_bw").both("-n 10").run().unwrap();
}

/// Serves the first connection of a client that is then killed; returns the time until all work was flushed.
fn survive(lab: &Lab) {
    let device = open();
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), xwarp_perf::options::DEFAULT_PORT);
    let listener = device.listen(address, ListenOptions::default()).unwrap();
    // Any client works: it connects its control connection, sends its first message, and waits for ours.
    let client = Perf::new(lab, PROGRAM, "send_bw").start_client().unwrap();
    let (pd, cq, qp) = parts(&device);
    let inbox = pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    for id in 0..10 {
        qp.post_recv(&RecvRequest::new(id, &[inbox.sge(0, 4096)])).unwrap();
    }
    let connection = listener.accept(LIMIT).unwrap().accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
    assert_eq!(cq.spin(LIMIT).unwrap().status, WcStatus::Success);
    client.signal(Signal::KILL).unwrap();
    drop(client);
    let killed = Instant::now();
    // Post a Send, so that the peer's kernel has a segment to answer with a reset.
    let outbox = pd.allocate(1 << 20, Access::empty()).unwrap();
    let piece = outbox.sge(0, 1 << 20);
    let mut expected = 9;
    for id in 100..110 {
        if qp.post_send(&WorkRequest::send(id, piece).signaled()).is_ok() {
            expected += 1;
        }
    }
    let mut flushed = 0;
    while flushed < expected && killed.elapsed() < LIMIT {
        if let Some(completion) = cq.spin(Duration::from_millis(100)) {
            assert_ne!(completion.status, WcStatus::Success, "{completion:?}");
            flushed += 1;
        }
    }
    assert_eq!(flushed, expected, "nine receives, and what was sent: {:?}", qp.state());
    assert_eq!(qp.state(), QpState::Error);
    assert!(killed.elapsed() < NOTICED, "{:?}", killed.elapsed());
    assert!(connection.wait_disconnected(LIMIT).unwrap());
}

#[test]
fn netns_a_queue_pair_fails_and_flushes_after_its_peer_died() {
    let lab = lab();
    lab.within(Side::B, || survive(&lab)).unwrap();
}

#[test]
fn netns_kernel_traffic_is_unaffected() {
    let lab = lab();
    let address = lab.address(Side::B, Family::V4);
    let echo = lab.within(Side::B, || TcpListener::bind((address, 7)).unwrap()).unwrap();
    let perf = Perf::new(&lab, PROGRAM, "write_bw").both("-D 4 -s 64K");
    let server = perf.start_server().unwrap();
    let client = perf.start_client().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = echo.accept().unwrap();
            let mut bytes = vec![0; 64 << 10];
            loop {
                let n = stream.read(&mut bytes).unwrap();
                if n == 0 {
                    break;
                }
                stream.write_all(&bytes[..n]).unwrap();
            }
        });
        let ping = scope.spawn(|| {
            let v4 = lab.run(Side::A, "ping", &["-c", "50", "-i", "0.02", "-W", "2", "10.77.0.2"]).unwrap();
            let v6 = lab.run(Side::B, "ping", &["-c", "50", "-i", "0.02", "-W", "2", "fd77::1"]).unwrap();
            (v4, v6)
        });
        let kernel = lab.enter(scope, Side::A, || {
            let mut stream = TcpStream::connect_timeout(&(address, 7).into(), LIMIT).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let sent: Vec<u8> = (0..20_000_u32).map(|i| (i * 7) as u8).collect();
            let mut back = vec![0; sent.len()];
            for _ in 0..100 {
                stream.write_all(&sent).unwrap();
                stream.read_exact(&mut back).unwrap();
                assert_eq!(back, sent);
            }
        });
        kernel.unwrap().join().unwrap();
        let (v4, v6) = ping.join().unwrap();
        assert!(v4.contains(" 0% packet loss") && v6.contains(" 0% packet loss"), "{v4}{v6}");
    });
    client.finish(Duration::from_mins(1)).unwrap();
    server.finish(Duration::from_mins(1)).unwrap();
}

#[test]
fn netns_a_second_open_in_one_process_is_told_so() {
    let lab = lab();
    lab.within(Side::A, || {
        let first = open();
        let error = Device::open(INTERFACE).unwrap_err().to_string();
        assert!(error.contains("open in this process already"), "{error}");
        let link = lab.run(Side::A, "ip", &["link", "show", INTERFACE]).unwrap();
        assert!(link.contains("xdp"), "{link}");
        drop(first);
        drop(open());
    })
    .unwrap();
}

/// Bytes that each kernel peer writes.
const WRITTEN: usize = 16 << 20;
/// Payload of its FPDUs, which are not aligned with its segments.
const PIECE: usize = 1000;

/// The peer's kernel leaves segmentation to its veth, which has no hardware for it: its frames are longer than the MTU.
#[test]
fn netns_frames_that_the_peers_kernel_did_not_segment_are_received() {
    let lab = lab();
    let (keys, key) = std::sync::mpsc::channel();
    let listening = &Barrier::new(2);
    let servers = [Family::V4, Family::V6].map(|family| SocketAddr::new(lab.address(Side::B, family), PORT));
    thread::scope(|scope| {
        let peer = lab.enter(scope, Side::A, move || {
            listening.wait();
            for (server, markers) in servers.into_iter().zip([false, true]) {
                let mut peer = SocketPeer::started(server, markers, LIMIT).unwrap();
                let key = key.recv().unwrap();
                let bytes: Vec<u8> = (0..WRITTEN).map(|at| (at % 251) as u8).collect();
                let frames: Vec<Vec<u8>> = (bytes.chunks(PIECE).zip((0..).step_by(PIECE)))
                    .map(|(piece, at)| peer.frame(&tagged(0x40, key, at, piece)))
                    .collect();
                for some in frames.chunks(200) {
                    peer.say(&some.concat()).unwrap();
                }
                peer.finish().unwrap();
                peer.to_the_end().unwrap();
            }
        });
        lab.within(Side::B, || {
            let device = open();
            let listeners = servers.map(|server| device.listen(server, ListenOptions::default()).unwrap());
            listening.wait();
            for listener in &listeners {
                let (pd, _cq, qp) = parts(&device);
                let region = pd.allocate(WRITTEN, Access::all()).unwrap();
                let mut request = listener.accept(LIMIT).unwrap();
                let connection = request.accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
                keys.send(region.key().value()).unwrap();
                assert!(connection.wait_disconnected(LIMIT).unwrap());
                let mut written = vec![0; WRITTEN];
                region.read(0, &mut written).unwrap();
                assert!(written.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
            }
            let [bytes, frames] = ["link.received_bytes", "link.received_frames"]
                .map(|name| device.counters().value(name).unwrap());
            assert!(bytes / frames > 4000, "{frames} frames of {bytes} bytes in all: cut to the MTU of 1500");
        })
        .unwrap();
        peer.unwrap().join().unwrap();
    });
}
