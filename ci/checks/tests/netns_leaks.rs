//! Closed devices leave nothing behind. The only test of its process, because it counts descriptors and
//! threads.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{collections::BTreeMap, net::SocketAddr, sync::Barrier, thread, time::Duration};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    leaks,
};
use xwarp_verbs::{
    Access, CompletionQueue, Device, ProtectionDomain, QueuePair, QueuePairOptions, RecvRequest, WcStatus,
    WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
};

const LIMIT: Duration = Duration::from_secs(20);
const PORT: u16 = 4791;
const BYTES: usize = 100_000;
const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

fn parts(device: &Device) -> (ProtectionDomain, CompletionQueue, QueuePair) {
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(1024).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    (pd, cq, qp)
}

/// A server that receives one message over each family.
fn serve(lab: &Lab, listening: &Barrier) {
    let device = Device::open(INTERFACE).unwrap();
    for family in FAMILIES {
        let address = SocketAddr::new(lab.address(Side::B, family), PORT);
        let listener = device.listen(address, ListenOptions::default()).unwrap();
        listening.wait();
        let (pd, cq, qp) = parts(&device);
        let inbox = pd.allocate(BYTES, Access::LOCAL_WRITE).unwrap();
        qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, BYTES)])).unwrap();
        let connection =
            listener.accept(LIMIT).unwrap().accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
        assert_eq!(cq.spin(LIMIT).unwrap().byte_len as usize, BYTES);
        connection.wait_disconnected(LIMIT).unwrap();
    }
    expect_all_frames_back(&device);
}

fn connect(lab: &Lab, listening: &Barrier) {
    let device = Device::open(INTERFACE).unwrap();
    for family in FAMILIES {
        let address = SocketAddr::new(lab.address(Side::B, family), PORT);
        let (pd, cq, qp) = parts(&device);
        listening.wait();
        let _connection = device.connect(&qp, address, ConnectOptions::default(), LIMIT).unwrap();
        let outbox = pd.allocate(BYTES, Access::empty()).unwrap();
        let piece = outbox.sge(0, BYTES);
        qp.post_send(&WorkRequest::send(1, piece).signaled()).unwrap();
        assert_eq!(cq.spin(LIMIT).unwrap().status, WcStatus::Success);
    }
    expect_all_frames_back(&device);
}

fn round(lab: &Lab) {
    let listening = Barrier::new(2);
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || serve(lab, &listening)).unwrap();
        let client = lab.enter(scope, Side::A, || connect(lab, &listening)).unwrap();
        client.join().unwrap();
        server.join().unwrap();
    });
}

/// Waits until a device without connections has all receive and transmit frames back.
fn expect_all_frames_back(device: &Device) {
    let out = || ["link.chunks_held", "link.chunks_retained"].map(|name| device.counters().value(name));
    for _ in 0..100 {
        if out() == [Some(0); 2] {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("frames leaked: held and retained {:?}", out());
}

/// Descriptors and threads of this process. A joined thread may remain visible for a moment.
fn held() -> (BTreeMap<String, usize>, usize) {
    thread::sleep(Duration::from_millis(100));
    let pid = std::process::id();
    (leaks::descriptors(pid).unwrap(), leaks::threads(pid).unwrap())
}

#[test]
fn netns_closed_devices_and_connections_leak_nothing() {
    let labs = [1500, 65_535].map(|mtu| Lab::up(LabOptions { mtu, ..LabOptions::default() }).unwrap());
    // The first round also creates what exists once per process.
    round(&labs[0]);
    let before = held();
    for lab in labs.iter().cycle().take(6) {
        round(lab);
    }
    assert_eq!(before, held());
    // The XDP programs are detached too.
    for (lab, side) in labs.iter().flat_map(|lab| [(lab, Side::A), (lab, Side::B)]) {
        let link = lab.run(side, "ip", &["link", "show", INTERFACE]).unwrap();
        assert!(!link.contains("xdp"), "{link}");
    }
}
