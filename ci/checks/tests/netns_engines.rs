//! Several engines on one interface: each has queues of its own and runs in a thread of its own.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{net::SocketAddr, sync::Barrier, thread, time::Duration};

use xwarp_checks::lab::{Family, INTERFACE, Lab, LabOptions, Side};
use xwarp_verbs::{
    Access, CompletionQueue, Device, DeviceOptions, MemoryRegion, Payload, ProtectionDomain, QueuePair,
    QueuePairOptions, RecvRequest, Remote, STag, WcStatus, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ListenOptions, Listener},
};

const LIMIT: Duration = Duration::from_secs(60);
const PORT: u16 = 4791;
const ENGINES: u16 = 2;
/// Bytes of each Write, and Writes of each connection.
const BYTES: usize = 200_000;
const WRITES: usize = 20;

fn lab(queues: u32) -> Lab {
    Lab::up(LabOptions { queues, ..LabOptions::default() }).unwrap()
}

fn open_several() -> Vec<Device> {
    Device::open_several(INTERFACE, ENGINES, &DeviceOptions::default()).unwrap()
}

/// One end of a connection; the fields are dropped in this order.
struct End {
    _connection: Connection,
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
fn accept(device: &Device, listener: &Listener) -> (End, usize) {
    let request = listener.accept(LIMIT).unwrap();
    let (_, cq, qp, region) = parts(device);
    let engine = usize::from(request.private_data()[0]);
    qp.post_recv(&RecvRequest::new(0, &[])).unwrap();
    let private_data = region.key().value().to_be_bytes().to_vec();
    let options = AcceptOptions { private_data, ..AcceptOptions::default() };
    let connection = request.accept(&qp, options, LIMIT).unwrap();
    (End { _connection: connection, qp, cq, region }, engine)
}

fn connect(device: &Device, engine: usize, address: SocketAddr) -> (End, Remote) {
    let (_, cq, qp, region) = parts(device);
    let options = ConnectOptions { private_data: vec![engine as u8], ..ConnectOptions::default() };
    let connection = device.connect(&qp, address, options, LIMIT).unwrap();
    let key = u32::from_be_bytes(connection.private_data()[..4].try_into().unwrap());
    let sink = Remote { key: STag::new(key), offset: 0 };
    (End { _connection: connection, qp, cq, region }, sink)
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
fn netns_engines_of_one_interface_carry_connections_in_parallel() {
    let lab = lab(2);
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let listening = Barrier::new(2);
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || {
            let devices = open_several();
            let listen = |device: &Device| device.listen(address, ListenOptions::default()).unwrap();
            let listeners: Vec<_> = devices.iter().map(listen).collect();
            listening.wait();
            let mut served: Vec<usize> = thread::scope(|engines| {
                let serve = |(device, listener)| {
                    engines.spawn(move || {
                        let (end, engine) = accept(device, listener);
                        verify(&end, engine);
                        engine
                    })
                };
                let running: Vec<_> = devices.iter().zip(&listeners).map(serve).collect();
                running.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            served.sort_unstable();
            assert_eq!(served, [0, 1], "each engine served the client of one engine");
            devices
        });
        let client = lab.enter(scope, Side::A, || {
            let devices = open_several();
            listening.wait();
            thread::scope(|engines| {
                for (engine, device) in devices.iter().enumerate() {
                    engines.spawn(move || {
                        let (end, sink) = connect(device, engine, address);
                        write(&end, engine, sink);
                    });
                }
            });
            devices
        });
        for device in server.unwrap().join().unwrap().iter().chain(&client.unwrap().join().unwrap()) {
            assert!(value(device, "link.received_frames") > WRITES as u64, "an engine carried nothing");
            assert_eq!(value(device, "stack.handed_over") + value(device, "link.handed_in"), 0);
        }
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
            let devices = open_several();
            listening.wait();
            let (end, sink) = connect(&devices[1], 1, address);
            write(&end, 1, sink);
            done.wait();
            let handed_in = value(&devices[1], "link.handed_in");
            assert!(handed_in > WRITES as u64, "{handed_in} frames were handed over");
            assert!(value(&devices[0], "stack.handed_over") >= handed_in);
            assert_eq!(value(&devices[0], "stack.resets_sent"), 0);
        });
        server.unwrap().join().unwrap();
        client.unwrap().join().unwrap();
    });
}

#[test]
fn netns_an_interface_has_a_queue_for_each_engine() {
    let lab = lab(1);
    lab.within(Side::A, || {
        let error = Device::open_several(INTERFACE, ENGINES, &DeviceOptions::default()).unwrap_err();
        assert!(error.to_string().contains("too few for 2 engines"), "{error}");
        let mut devices = Device::open_several(INTERFACE, 1, &DeviceOptions::default()).unwrap();
        assert_eq!(devices.pop().map(|device| device.attributes().interface.queues), Some(1));
    })
    .unwrap();
}
