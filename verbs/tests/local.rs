//! Connections of a device to itself: the frames return to it, and none reaches the wire.
#![cfg(feature = "sim")]
#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

mod common;

use std::{net::SocketAddr, thread, time::Duration};

use common::{End, LIMIT, connect, devices, pattern, queue_pair};
use xwarp_verbs::{
    Access, Device, DeviceOptions, Payload, Progress, QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, CmError, CmId, ConnectOptions, EventChannel, EventKind, ListenOptions},
    interface::Interface,
    sim::{self, Faults, WireConfig},
};

const BYTES: usize = 1 << 20;
const PORT: u16 = 7;

/// Writes, reads and sends a megabyte from one end of a connection to the other.
fn exchange(from: &End, to: &End, seed: u8) {
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let [source, target, inbox] = [&from.pd, &to.pd, &to.pd].map(|pd| pd.allocate(BYTES, rights).unwrap());
    let bytes = pattern(BYTES, seed);
    source.write(0, &bytes).unwrap();
    to.qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, BYTES)])).unwrap();
    let all = source.sge(0, BYTES);
    from.qp.post_send(&WorkRequest::write(2, all, target.remote(0))).unwrap();
    from.qp.post_send(&WorkRequest::send(3, Payload::Piece(all)).signaled()).unwrap();
    assert_eq!(to.cq.wait(LIMIT).unwrap().expect("in time").check().unwrap().wr_id, 1);
    assert_eq!(from.cq.wait(LIMIT).unwrap().expect("in time").check().unwrap().wr_id, 3);
    assert!(target.to_vec(0, BYTES).unwrap() == bytes && inbox.to_vec(0, BYTES).unwrap() == bytes);
    let back = from.pd.allocate(BYTES, rights).unwrap();
    let read = WorkRequest::read(4, back.sge(0, BYTES), target.remote(0)).signaled();
    from.qp.post_send(&read).unwrap();
    assert_eq!(from.cq.wait(LIMIT).unwrap().expect("in time").check().unwrap().wr_id, 4);
    assert!(back.to_vec(0, BYTES).unwrap() == bytes);
}

#[test]
fn a_device_exchanges_data_with_itself() {
    for progress in [Progress::Auto, Progress::Thread, Progress::Application] {
        let [device, _other] = devices(progress);
        let [server, client] = connect(&[device.clone(), device.clone()], PORT);
        exchange(&client, &server, 1);
        exchange(&server, &client, 2);
        client.connection.disconnect().unwrap();
        assert!(server.connection.wait_disconnected(LIMIT).unwrap());
    }
}

/// The cable loses every frame, so a frame that it carries would show.
#[test]
fn the_wire_carries_no_frame_of_a_device_to_itself() {
    let lost = Faults { loss: 1.0, ..Faults::default() };
    let (a, _b) = sim::pair(WireConfig { faults: [lost; 2], ..WireConfig::default() }, 1500).unwrap();
    let wire = a.wire();
    let device = Device::over(Box::new(a), DeviceOptions::default()).unwrap();
    let [server, client] = connect(&[device.clone(), device.clone()], PORT);
    exchange(&client, &server, 3);
    assert_eq!([0, 1].map(|end| wire.tally(end).frames), [0, 0]);
}

#[test]
fn each_end_wakes_the_other_when_both_sleep() {
    const ROUNDS: u64 = 50;
    for progress in [Progress::Auto, Progress::Thread, Progress::Application] {
        let [device, _other] = devices(progress);
        let ends = connect(&[device.clone(), device.clone()], PORT);
        thread::scope(|scope| {
            for (side, end) in ends.iter().enumerate() {
                scope.spawn(move || {
                    end.qp.post_recv(&RecvRequest::new(0, &[])).unwrap();
                    if side == 1 {
                        end.qp.post_send(&WorkRequest::send(0, Payload::EMPTY)).unwrap();
                    }
                    for round in 0..ROUNDS {
                        let got = end.cq.wait(LIMIT).unwrap().expect("a wake-up").check().unwrap();
                        assert_eq!(got.wr_id, round);
                        end.qp.post_recv(&RecvRequest::new(round + 1, &[])).unwrap();
                        if round + 1 < ROUNDS || side == 0 {
                            end.qp.post_send(&WorkRequest::send(round, Payload::EMPTY)).unwrap();
                        }
                    }
                });
            }
        });
    }
}

/// A connection to another host goes on beside one within the host.
#[test]
fn other_connections_use_the_interface_as_before() {
    let pair = devices(Progress::Auto);
    let [far_server, far_client] = connect(&pair, PORT);
    let [server, client] = connect(&[pair[0].clone(), pair[0].clone()], PORT + 1);
    for seed in 0..3 {
        exchange(&far_client, &far_server, seed);
        exchange(&client, &server, seed);
        exchange(&far_server, &far_client, seed);
    }
    drop((server, client));
    exchange(&far_client, &far_server, 9);
}

#[test]
fn localhost_is_an_address_of_the_device() {
    let [device, _other] = devices(Progress::Auto);
    for (loopback, own) in [("127.0.0.1", sim::ipv4(1)), ("::1", sim::ipv6(1))] {
        let listener = device.listen((own, PORT).into(), ListenOptions::default()).unwrap();
        let channel = EventChannel::new().unwrap();
        let id = CmId::new(&device, &channel);
        id.resolve_address(SocketAddr::new(loopback.parse().unwrap(), PORT), LIMIT).unwrap();
        assert!(device.wait(&channel, Some(LIMIT)).unwrap());
        assert!(matches!(channel.poll().unwrap().kind, EventKind::AddressResolved));
        assert_eq!(id.peer_address(), Some(SocketAddr::new(own, PORT)));
        assert_eq!(id.local_address().map(|local| local.ip()), Some(own));
        drop(listener);
    }
}

#[test]
fn a_port_without_a_listener_refuses() {
    let [device, _other] = devices(Progress::Auto);
    let (_pd, _cq, qp) = queue_pair(&device, QueuePairOptions::default());
    let begin = std::time::Instant::now();
    let to = SocketAddr::new(sim::ipv4(1), 9);
    assert!(device.connect(&qp, to, ConnectOptions::default(), LIMIT).is_err());
    assert!(begin.elapsed() < Duration::from_secs(5), "refused, not timed out");
}

/// TCP would open both directions of one connection, which has no initiator and no responder.
#[test]
fn an_identifier_does_not_connect_to_its_own_port() {
    let [device, _other] = devices(Progress::Auto);
    let (_pd, _cq, qp) = queue_pair(&device, QueuePairOptions::default());
    let channel = EventChannel::new().unwrap();
    let id = CmId::new(&device, &channel);
    let own = SocketAddr::new(sim::ipv4(1), PORT);
    id.bind(own).unwrap();
    id.resolve_address(own, LIMIT).unwrap();
    id.resolve_route().unwrap();
    let refused = id.connect(&qp, ConnectOptions::default());
    assert!(matches!(refused, Err(CmError::State { call: "connect", .. })), "{refused:?}");
}

#[test]
fn several_engines_connect_to_their_own_device() {
    let [parts, _others] = sim::queues(WireConfig::default(), 1500, 2).unwrap();
    let parts = parts.into_iter().map(|part| Box::new(part) as Box<dyn Interface>).collect();
    let device = Device::over_parts(parts, DeviceOptions::default()).unwrap();
    let address = SocketAddr::new(sim::ipv4(1), PORT);
    let listener = device.listen(address, ListenOptions::default()).unwrap();
    for engine in [0, 1, 0] {
        let make = || {
            let (pd, cq, qp) = queue_pair(&device, QueuePairOptions::default());
            qp.move_to_engine(engine).unwrap();
            (pd, cq, qp)
        };
        let [(server_pd, server_cq, server_qp), (client_pd, client_cq, client_qp)] = [(); 2].map(|()| make());
        let (accepted, connected) = thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                listener.accept(LIMIT).unwrap().accept(&server_qp, AcceptOptions::default(), LIMIT).unwrap()
            });
            let connected = device.connect(&client_qp, address, ConnectOptions::default(), LIMIT).unwrap();
            (accepted.join().unwrap(), connected)
        });
        let end = |connection, qp, cq, pd| End { connection, qp, cq, pd, device: device.clone() };
        let server = end(accepted, server_qp, server_cq, server_pd);
        let client = end(connected, client_qp, client_cq, client_pd);
        exchange(&client, &server, 5);
        exchange(&server, &client, 6);
    }
}
