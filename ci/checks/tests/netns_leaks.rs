//! Closing devices leaves nothing behind. Alone in its process, because it counts descriptors and threads.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{net::SocketAddr, thread, time::Duration};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    leaks,
};
use xwarp_verbs::{
    Access, CompletionQueue, Device, ProtectionDomain, QueuePair, QueuePairOptions, RecvRequest, WcStatus,
    WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ListenOptions},
};

const LIMIT: Duration = Duration::from_secs(20);
const PORT: u16 = 4791;

fn open(lab: &Lab, side: Side) -> Device {
    lab.within(side, || Device::open(INTERFACE).unwrap()).unwrap()
}

/// One end of a connection; dropped in this order.
struct End {
    connection: Connection,
    qp: QueuePair,
    cq: CompletionQueue,
    pd: ProtectionDomain,
}

fn parts(device: &Device) -> (ProtectionDomain, CompletionQueue, QueuePair) {
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(1024).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    (pd, cq, qp)
}

/// A pair of ends, the server's first.
fn pair(lab: &Lab, server: &Device, client: &Device, family: Family) -> (End, End) {
    let address = SocketAddr::new(lab.address(Side::B, family), PORT);
    let listener = server.listen(address, ListenOptions::default()).unwrap();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let (pd, cq, qp) = parts(server);
            let request = listener.accept(LIMIT).unwrap();
            let connection = request.accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
            End { connection, qp, cq, pd }
        });
        let (pd, cq, qp) = parts(client);
        let connection = client.connect(&qp, address, ConnectOptions::default(), LIMIT).unwrap();
        (accepted.join().unwrap(), End { connection, qp, cq, pd })
    })
}

#[test]
fn netns_nothing_is_left_after_many_devices_and_connections() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let pid = std::process::id();
    let round = || {
        let (server, client) = (open(&lab, Side::B), open(&lab, Side::A));
        for family in [Family::V4, Family::V6] {
            let (a, b) = pair(&lab, &server, &client, family);
            let inbox = a.pd.allocate(100_000, Access::LOCAL_WRITE).unwrap();
            a.qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, 100_000)])).unwrap();
            let outbox = b.pd.allocate(100_000, Access::empty()).unwrap();
            b.qp.post_send(&WorkRequest::send(1, &outbox.sge(0, 100_000)).signaled()).unwrap();
            assert_eq!(b.cq.spin(LIMIT).unwrap().status, WcStatus::Success);
            assert_eq!(a.cq.spin(LIMIT).unwrap().byte_len, 100_000);
            drop((a.connection, b.connection));
        }
    };
    // What is made once and kept (thread-local buffers, the resolver's caches) is made now.
    round();
    let before = (leaks::descriptors(pid).unwrap(), leaks::threads(pid).unwrap());
    for _ in 0..5 {
        round();
    }
    let after = (leaks::descriptors(pid).unwrap(), leaks::threads(pid).unwrap());
    assert_eq!(before, after);
    // The programs are detached, too.
    for side in [Side::A, Side::B] {
        let link = lab.run(side, "ip", &["link", "show", INTERFACE]).unwrap();
        assert!(!link.contains("xdp"), "{link}");
    }
}
