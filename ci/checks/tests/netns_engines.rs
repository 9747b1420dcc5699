//! Devices with several engines: each engine has queues of the interface of its own and runs in a thread of its own.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Barrier, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use etherparse::PacketBuilder;
use xwarp_checks::{
    exchange::serve_with,
    hop::RawSocket,
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
};
use xwarp_verbs::{
    Access, AsyncEvent, CompletionQueue, Device, DeviceOptions, Memory, MemoryRegion, Pages, Payload,
    Progress, ProtectionDomain, QpState, QueuePair, QueuePairOptions, RecvRequest, Remote, STag, WcStatus,
    WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ListenOptions, Listener},
};

const FORKS: &str = env!("CARGO_BIN_EXE_xwarp-fork");
const LIMIT: Duration = Duration::from_secs(60);
const PORT: u16 = 4791;
const ENGINES: u16 = 2;
/// Bytes of each Write, and Writes of each connection.
const BYTES: usize = 200_000;
const WRITES: usize = 20;
/// The number that identifies the completion of a receive.
const RECEIVE: u64 = 7;
/// Entries of a completion queue that overflows.
const ENTRIES: usize = 4;
/// Frames that wait for an engine to which others hand them over.
const INBOX: u64 = 64;
/// Connections whose forged frames are a flood; the kernel spreads them over both queues.
const FLOODED: usize = 16;
/// Frames of a burst of the flood, and the pause after it.
const BURST: usize = 8 * INBOX as usize;
const PAUSE: Duration = Duration::from_millis(5);
/// Time in which a message that the kernel has dropped in the flood is retransmitted.
const WHILE_SENT_AGAIN: Duration = Duration::from_secs(1);

fn lab(queues: u32) -> Lab {
    Lab::up(LabOptions { queues, ..LabOptions::default() }).unwrap()
}

fn options() -> DeviceOptions {
    DeviceOptions { engines: ENGINES, ..DeviceOptions::default() }
}

fn open() -> Device {
    Device::open_with(INTERFACE, options()).unwrap()
}

/// One end of a connection; the fields are dropped in this order.
struct End {
    connection: Connection,
    qp: QueuePair,
    cq: CompletionQueue,
    region: MemoryRegion,
}

fn parts(device: &Device) -> (ProtectionDomain, CompletionQueue, QueuePair, MemoryRegion) {
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(1024).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    let region = pd.allocate(BYTES, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    (pd, cq, qp, region)
}

/// The byte at `offset` of Write `number` by the client of `engine`.
fn byte(engine: usize, number: usize, offset: usize) -> u8 {
    (offset % 251 + 13 * number + 101 * engine) as u8
}

fn pattern(engine: usize, number: usize) -> Vec<u8> {
    (0..BYTES).map(|offset| byte(engine, number, offset)).collect()
}

/// Accepts one connection, whose private data is the number of the client's engine, and advertises the region.
fn accept_with(listener: &Listener, qp: &QueuePair, region: &MemoryRegion) -> (Connection, usize) {
    let mut request = listener.accept(LIMIT).unwrap();
    let engine = usize::from(request.private_data()[0]);
    let private_data = region.key().value().to_be_bytes().to_vec();
    let options = AcceptOptions { private_data, ..AcceptOptions::default() };
    (request.accept(qp, options, LIMIT).unwrap(), engine)
}

fn accept(device: &Device, listener: &Listener) -> (End, usize) {
    let (_, cq, qp, region) = parts(device);
    qp.post_recv(&RecvRequest::new(RECEIVE, &[])).unwrap();
    let (connection, engine) = accept_with(listener, &qp, &region);
    (End { connection, qp, cq, region }, engine)
}

fn connect(device: &Device, engine: usize, address: SocketAddr) -> (End, Remote) {
    let (_, cq, qp, region) = parts(device);
    qp.move_to_engine(engine as u16).unwrap();
    let options = ConnectOptions { private_data: vec![engine as u8], ..ConnectOptions::default() };
    let connection = device.connect(&qp, address, options, LIMIT).unwrap();
    let key = u32::from_be_bytes(connection.private_data()[..4].try_into().unwrap());
    let sink = Remote { key: STag::new(key), offset: 0 };
    (End { connection, qp, cq, region }, sink)
}

/// Writes patterns, each announced by a Send and acknowledged by one.
fn write(end: &End, engine: usize, sink: Remote) {
    for number in 0..WRITES {
        end.region.write(0, &pattern(engine, number)).unwrap();
        end.qp.post_recv(&RecvRequest::new(0, &[])).unwrap();
        let source = [end.region.sge(0, BYTES)];
        end.qp.post_send(&WorkRequest::write(1, Payload::Gather(&source), sink)).unwrap();
        end.qp.post_send(&WorkRequest::send(2, Payload::Inline(b"")).signaled()).unwrap();
        for _ in 0..2 {
            assert_eq!(end.cq.spin(LIMIT).expect("in time").status, WcStatus::Success);
        }
    }
}

fn verify(end: &End, engine: usize) {
    for number in 0..WRITES {
        assert_eq!(end.cq.spin(LIMIT).expect("in time").status, WcStatus::Success);
        assert!(end.region.to_vec(0, BYTES).unwrap() == pattern(engine, number), "Write {number} is damaged");
        end.qp.post_recv(&RecvRequest::new(0, &[])).unwrap();
        end.qp.post_send(&WorkRequest::send(2, Payload::Inline(b"")).signaled()).unwrap();
        assert_eq!(end.cq.spin(LIMIT).expect("in time").status, WcStatus::Success);
    }
}

fn value(device: &Device, counter: &str) -> u64 {
    device.counters().value(counter).expect(counter)
}

/// Between two devices of two engines each, a connection stays on the queue on which its SYN was sent: every engine carries
/// one, in a thread of its own, and no frame is handed over.
#[test]
fn netns_engines_of_a_device_carry_connections_in_parallel() {
    for progress in [Progress::Auto, Progress::Thread, Progress::Application] {
        carry_in_parallel(&DeviceOptions { progress, ..options() });
    }
}

fn carry_in_parallel(options: &DeviceOptions) {
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let listening = Barrier::new(2);
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || {
            let device = Device::open_with(INTERFACE, options.clone()).unwrap();
            let listener = device.listen(address, ListenOptions::default()).unwrap();
            listening.wait();
            let mut served: Vec<usize> = thread::scope(|engines| {
                let serve = |_| {
                    engines.spawn(|| {
                        let (end, engine) = accept(&device, &listener);
                        assert_eq!(usize::from(end.qp.engine()), engine, "in the engine of its queue");
                        verify(&end, engine);
                        engine
                    })
                };
                let running: Vec<_> = (0..ENGINES).map(serve).collect();
                running.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            served.sort_unstable();
            assert_eq!(served, [0, 1], "each engine served the client of one engine");
            device
        });
        let client = lab.enter(scope, Side::A, || {
            let device = Device::open_with(INTERFACE, options.clone()).unwrap();
            listening.wait();
            thread::scope(|engines| {
                for engine in 0..usize::from(ENGINES) {
                    let device = &device;
                    engines.spawn(move || {
                        let (end, sink) = connect(device, engine, address);
                        write(&end, engine, sink);
                    });
                }
            });
            device
        });
        for device in [server.unwrap().join().unwrap(), client.unwrap().join().unwrap()] {
            let attributes = device.attributes();
            assert_eq!((attributes.engines, attributes.interface.queues), (ENGINES, ENGINES));
            assert_eq!(value(&device, "stack.handed_over") + value(&device, "link.handed_in"), 0);
        }
    });
}

/// Waits until a connection with a waiting receive has ended.
fn ended(end: &End) {
    let mut completions = std::iter::from_fn(|| end.cq.spin(LIMIT));
    let receive = completions.find(|completion| completion.wr_id == RECEIVE).expect("in time");
    assert_eq!(receive.status, WcStatus::Flushed);
}

/// Writes to a region that is no longer registered, and waits until the connection has ended.
fn write_in_vain(end: &End, sink: Remote) {
    end.qp.post_recv(&RecvRequest::new(RECEIVE, &[])).unwrap();
    let source = [end.region.sge(0, BYTES)];
    end.qp.post_send(&WorkRequest::write(1, Payload::Gather(&source), sink)).unwrap();
    ended(end);
}

/// The clients of both engines write to one region, which was registered once; one completion queue and one shared receive
/// queue serve both. After the region is deregistered, neither writes to its memory.
#[test]
fn netns_engines_share_a_region_and_queues() {
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let (listening, deregistered, refused) = (Barrier::new(2), Barrier::new(3), Barrier::new(3));
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || {
            let device = open();
            let listener = device.listen(address, ListenOptions::default()).unwrap();
            listening.wait();
            let pd = device.create_pd().unwrap();
            let cq = device.create_cq(1024).unwrap();
            let srq = pd.create_srq(16, 1).unwrap();
            let memory = Memory::anonymous(2 * BYTES, Pages::Normal).unwrap();
            let region = pd.register(memory.clone(), Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
            let accept = |_| {
                srq.post_recv(&RecvRequest::new(RECEIVE, &[])).unwrap();
                let qp = pd.create_qp_with_srq(&cq, &cq, &srq, QueuePairOptions::default()).unwrap();
                let (connection, engine) = accept_with(&listener, &qp, &region);
                assert_eq!(usize::from(qp.engine()), engine);
                (qp, connection, engine, 0)
            };
            let mut served: Vec<_> = (0..ENGINES).map(accept).collect();
            assert_ne!(served[0].0.engine(), served[1].0.engine());
            let written = |engine| {
                let mut bytes = vec![0; BYTES];
                memory.read(engine * BYTES, &mut bytes).unwrap();
                bytes
            };
            while served.iter().any(|(.., number)| *number < WRITES) {
                let completion = cq.spin(LIMIT).expect("in time");
                assert_eq!(completion.status, WcStatus::Success);
                let (qp, _, engine, number) =
                    served.iter_mut().find(|(qp, ..)| qp.id() == completion.qp).unwrap();
                if completion.wr_id == RECEIVE {
                    assert!(written(*engine) == pattern(*engine, *number), "Write {number} is damaged");
                    *number += 1;
                    srq.post_recv(&RecvRequest::new(RECEIVE, &[])).unwrap();
                    qp.post_send(&WorkRequest::send(2, Payload::Inline(b"")).signaled()).unwrap();
                }
            }
            drop(region);
            deregistered.wait();
            refused.wait();
            for engine in 0..served.len() {
                assert!(written(engine) == pattern(engine, WRITES - 1), "written after the deregistration");
            }
            assert_eq!(value(&device, "rdmap.terminate_sent_ddp_invalid_stag"), 2);
        });
        let client = lab.enter(scope, Side::A, || {
            let device = open();
            listening.wait();
            thread::scope(|engines| {
                for engine in 0..usize::from(ENGINES) {
                    let (device, deregistered, refused) = (&device, &deregistered, &refused);
                    engines.spawn(move || {
                        let (end, sink) = connect(device, engine, address);
                        let sink = Remote { offset: (engine * BYTES) as u64, ..sink };
                        write(&end, engine, sink);
                        deregistered.wait();
                        write_in_vain(&end, sink);
                        refused.wait();
                    });
                }
            });
        });
        server.unwrap().join().unwrap();
        client.unwrap().join().unwrap();
    });
}

/// Both engines add to one completion queue, which is full and not polled: the queue pairs of both end, and one event
/// reports it.
#[test]
fn netns_a_completion_queue_of_two_engines_overflows_in_both() {
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let (listening, accepted) = (Barrier::new(2), Barrier::new(3));
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || {
            let device = open();
            let events = device.async_events();
            let listener = device.listen(address, ListenOptions::default()).unwrap();
            listening.wait();
            let pd = device.create_pd().unwrap();
            let cq = device.create_cq(ENTRIES as u32).unwrap();
            let region = pd.allocate(64, Access::REMOTE_WRITE).unwrap();
            let accept = |_| {
                let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
                for _ in 0..=ENTRIES {
                    qp.post_recv(&RecvRequest::new(RECEIVE, &[])).unwrap();
                }
                let (connection, _) = accept_with(&listener, &qp, &region);
                (connection, qp)
            };
            let served: Vec<_> = (0..ENGINES).map(accept).collect();
            accepted.wait();
            let end = Instant::now() + LIMIT;
            while served.iter().any(|(_, qp)| qp.state() != QpState::Error) {
                assert!(Instant::now() < end, "a queue pair goes on");
                thread::sleep(Duration::from_millis(1));
            }
            assert!(cq.overflowed());
            let told = std::iter::from_fn(|| events.poll());
            let overflows = told.filter(|event| *event == AsyncEvent::CqOverflow { cq: cq.id() }).count();
            assert_eq!(overflows, 1);
        });
        let client = lab.enter(scope, Side::A, || {
            let device = open();
            listening.wait();
            thread::scope(|engines| {
                for engine in 0..usize::from(ENGINES) {
                    let (device, accepted) = (&device, &accepted);
                    engines.spawn(move || {
                        let (end, _) = connect(device, engine, address);
                        end.qp.post_recv(&RecvRequest::new(RECEIVE, &[])).unwrap();
                        accepted.wait();
                        for _ in 0..=ENTRIES {
                            end.qp.post_send(&WorkRequest::send(2, Payload::Inline(b""))).unwrap();
                        }
                        ended(&end);
                    });
                }
            });
        });
        server.unwrap().join().unwrap();
        client.unwrap().join().unwrap();
    });
}

/// A process with a device of two engines forks. The device fails in the child and works on in the parent.
#[test]
fn netns_a_child_does_not_have_the_engines_of_its_parent() {
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    let listening = Barrier::new(2);
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::A, || {
            serve_with(&open(), address, 1, || _ = listening.wait()).unwrap();
        });
        listening.wait();
        let forks = lab.start(Side::B, FORKS, &["engines", &address.to_string()]).unwrap();
        forks.finish(LIMIT).unwrap();
        server.unwrap().join().unwrap();
    });
}

/// A peer with one queue sends everything to the first queue, so that the second engine gets the frames of its connections from
/// the first one: handed over, none is reset.
#[test]
fn netns_frames_on_another_engines_queue_are_handed_over() {
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::A, Family::V6), PORT);
    let listening = Barrier::new(2);
    let done = Barrier::new(2);
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::A, || {
            lab.run(Side::A, "ethtool", &["-L", INTERFACE, "tx", "1"]).unwrap();
            let device = Device::open(INTERFACE).unwrap();
            let listener = device.listen(address, ListenOptions::default()).unwrap();
            listening.wait();
            let (end, engine) = accept(&device, &listener);
            verify(&end, engine);
            done.wait();
        });
        let client = lab.enter(scope, Side::B, || {
            let device = open();
            listening.wait();
            let (end, sink) = connect(&device, 1, address);
            write(&end, 1, sink);
            done.wait();
            let handed_in = value(&device, "link.handed_in");
            assert!(handed_in > WRITES as u64, "{handed_in} frames were handed over");
            assert!(value(&device, "stack.handed_over") >= handed_in);
            assert_eq!(value(&device, "stack.resets_sent"), 0);
        });
        server.unwrap().join().unwrap();
        client.unwrap().join().unwrap();
    });
}

/// A frame to `to` that seems to be of its connection with `from`.
fn forged([from, to]: [SocketAddr; 2], macs: [[u8; 6]; 2]) -> Vec<u8> {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (from.ip(), to.ip()) else { panic!("not IPv4") };
    let builder = PacketBuilder::ethernet2(macs[0], macs[1]).ipv4(source.octets(), destination.octets(), 64);
    let mut frame = Vec::new();
    builder.tcp(from.port(), to.port(), 1000, 8192).ack(1).write(&mut frame, &[]).unwrap();
    frame
}

/// Sends forged frames of these connections until it is `done`.
fn forge<'a>(
    address: SocketAddr,
    macs: [[u8; 6]; 2],
    victims: impl Iterator<Item = &'a (End, usize)>,
    done: &AtomicBool,
) {
    let forged = |(end, _): &(End, usize)| forged([address, end.connection.peer_address().unwrap()], macs);
    // The kernel selects a queue by the flow.
    let frames: Vec<_> = victims.map(forged).collect();
    let wire = RawSocket::open(INTERFACE).unwrap();
    while !done.load(Ordering::Relaxed) {
        for frame in frames.iter().cycle().take(BURST) {
            wire.send(frame);
        }
        thread::sleep(PAUSE);
    }
}

/// Sends forged frames of the connections of the peer's second engine until it is `done`, while the first two connections go on.
fn flood(address: SocketAddr, macs: [[u8; 6]; 2], ends: &[(End, usize)], done: &AtomicBool) {
    thread::scope(|other| {
        other.spawn(|| ends.iter().take(2).for_each(|(end, engine)| verify(end, *engine)));
        forge(address, macs, ends.iter().filter(|(_, engine)| *engine == 1), done);
    });
}

/// Runs the engine that has the queue pair, by a poll of its completion queue; the other engine does not run.
fn run(end: &End) {
    assert_eq!(end.cq.poll_one(), None);
}

/// Sets the flag when it is dropped, also by a failed assertion, so that the other threads end.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Forged frames of the second engine's connections flood both queues, while that engine does not run and then while it
/// does: the frames for which its inbox has no room are dropped and counted, and the connections of both engines
/// continue.
#[test]
fn netns_a_flood_of_handed_over_frames_is_bounded() {
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    let (listening, connected) = (Barrier::new(2), Barrier::new(2));
    let (done, mac) = (AtomicBool::new(false), OnceLock::new());
    thread::scope(|scope| {
        let attacker = lab.enter(scope, Side::A, || {
            let device = Device::open(INTERFACE).unwrap();
            let listener = device.listen(address, ListenOptions::default()).unwrap();
            listening.wait();
            let ends: Vec<_> = (0..=FLOODED).map(|_| accept(&device, &listener)).collect();
            connected.wait();
            let macs = [device.attributes().interface.mac.0, *mac.get().unwrap()];
            flood(address, macs, &ends, &done);
        });
        let flooded = lab.enter(scope, Side::B, || {
            let _raise = Raise(&done);
            let device =
                Device::open_with(INTERFACE, DeviceOptions { progress: Progress::Application, ..options() });
            let device = device.unwrap();
            mac.set(device.attributes().interface.mac.0).unwrap();
            listening.wait();
            let first_end = connect(&device, 0, address);
            let second_ends: Vec<_> = (0..FLOODED).map(|_| connect(&device, 1, address)).collect();
            connected.wait();
            let before = value(&device, "link.handed_in");
            let begin = Instant::now();
            while value(&device, "link.hand_over_full") < 10 * INBOX {
                assert!(begin.elapsed() < LIMIT, "no frame was dropped");
                run(&first_end.0);
            }
            assert!(value(&device, "stack.handed_over") >= 11 * INBOX);
            // A turn may take frames of the engine's own queue only.
            (0..INBOX).for_each(|_| run(&second_ends[0].0));
            let taken = value(&device, "link.handed_in") - before;
            assert!((1..=INBOX).contains(&taken), "{taken} frames waited");
            write(&first_end.0, 0, first_end.1);
            let stop = AtomicBool::new(false);
            thread::scope(|engines| {
                let _raise = Raise(&stop);
                engines.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        run(&first_end.0);
                        thread::yield_now();
                    }
                });
                write(&second_ends[0].0, 1, second_ends[0].1);
            });
            assert!(value(&device, "link.handed_in") > before + INBOX, "the flood did not go on");
            done.store(true, Ordering::Relaxed);
            while value(&device, "link.chunks_held") > 0 {
                assert!(begin.elapsed() < LIMIT, "frames of the flood are still held");
                device.progress();
            }
            assert_eq!(value(&device, "stack.resets_sent"), 0);
        });
        attacker.unwrap().join().unwrap();
        flooded.unwrap().join().unwrap();
    });
}

#[test]
fn netns_an_interface_has_a_queue_for_each_engine() {
    let lab = lab(1);
    lab.within(Side::A, || {
        let error = Device::open_with(INTERFACE, options()).unwrap_err();
        assert!(error.to_string().contains("too few for 2 engines"), "{error}");
        assert_eq!(Device::open(INTERFACE).unwrap().attributes().interface.queues, 1);
    })
    .unwrap();
}

/// A peer with one queue floods the second engine with forged frames of many connections, while that engine does not run, and sends a
/// few messages on a connection that is not forged. The inbox keeps room for the honest flow: its messages have arrived when the
/// engine runs, though the flood has filled the inbox many times since.
#[test]
fn netns_a_flooded_inbox_keeps_room_for_an_honest_flow() {
    const MESSAGES: u64 = 3;
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    let (listening, connected, flooded, sent) =
        (Barrier::new(2), Barrier::new(2), Barrier::new(2), Barrier::new(2));
    let (done, mac) = (AtomicBool::new(false), OnceLock::new());
    thread::scope(|scope| {
        let attacker = lab.enter(scope, Side::A, || {
            lab.run(Side::A, "ethtool", &["-L", INTERFACE, "tx", "1"]).unwrap();
            let device = Device::open(INTERFACE).unwrap();
            let listener = device.listen(address, ListenOptions::default()).unwrap();
            listening.wait();
            let ends: Vec<_> = (0..=FLOODED).map(|_| accept(&device, &listener)).collect();
            connected.wait();
            let macs = [device.attributes().interface.mac.0, *mac.get().unwrap()];
            thread::scope(|other| {
                other.spawn(|| {
                    flooded.wait();
                    for _ in 0..MESSAGES {
                        ends[1].0.qp.post_send(&WorkRequest::send(1, Payload::Inline(b""))).unwrap();
                    }
                    sent.wait();
                });
                forge(address, macs, ends.iter().skip(2), &done);
            });
        });
        let victim = lab.enter(scope, Side::B, || {
            let _raise = Raise(&done);
            let device =
                Device::open_with(INTERFACE, DeviceOptions { progress: Progress::Application, ..options() });
            let device = device.unwrap();
            mac.set(device.attributes().interface.mac.0).unwrap();
            listening.wait();
            let first = connect(&device, 0, address).0;
            let honest = connect(&device, 1, address).0;
            let _others: Vec<_> = (1..FLOODED).map(|_| connect(&device, 1, address)).collect();
            for _ in 0..MESSAGES {
                honest.qp.post_recv(&RecvRequest::new(RECEIVE, &[])).unwrap();
            }
            // The responder sends after the initiator's first message only (RFC 5044 section 7.1.2).
            honest.qp.post_send(&WorkRequest::send(2, Payload::Inline(b"")).signaled()).unwrap();
            // The first engine hands the answer over, so both run.
            let begin = Instant::now();
            let sent_first = loop {
                device.progress();
                if let Some(completion) = honest.cq.poll_one() {
                    break completion;
                }
                assert!(begin.elapsed() < LIMIT, "the first message is not acknowledged");
            };
            assert_eq!(sent_first.status, WcStatus::Success);
            connected.wait();
            let flood = |frames, time| {
                let (begin, before) = (Instant::now(), value(&device, "link.hand_over_full"));
                while value(&device, "link.hand_over_full") < before + frames || begin.elapsed() < time {
                    assert!(begin.elapsed() < LIMIT, "no frame was dropped");
                    run(&first);
                }
            };
            flood(INBOX, Duration::ZERO);
            flooded.wait();
            sent.wait();
            flood(10 * INBOX, WHILE_SENT_AGAIN);
            // One turn of the second engine, which takes the frames of an inbox.
            let mut received = Vec::new();
            honest.cq.poll(&mut received, MESSAGES as usize);
            let received: Vec<_> = received.iter().map(|completion| completion.status).collect();
            assert_eq!(received, [WcStatus::Success; MESSAGES as usize]);
            done.store(true, Ordering::Relaxed);
        });
        attacker.unwrap().join().unwrap();
        victim.unwrap().join().unwrap();
    });
}
