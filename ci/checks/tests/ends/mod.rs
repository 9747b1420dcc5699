//! Two connected devices in the namespaces of a lab, for tests of what happens to them.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part, and may panic")]

use std::{
    net::SocketAddr,
    sync::mpsc::{Sender, channel},
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::lab::{INTERFACE, Lab, Side};
use xwarp_verbs::{
    Access, AsyncEvent, CloseReason, CompletionQueue, Device, DeviceOptions, MemoryRegion, Payload,
    ProtectionDomain, QpFault, QueuePair, QueuePairOptions, RecvRequest, WcStatus, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ListenOptions},
};

pub const LIMIT: Duration = Duration::from_secs(20);
/// Time limit for the report of an interface's change. The end of an address is reported after some seconds, if it does not come
/// back.
const REPORTED: Duration = Duration::from_secs(20);
/// Time for which an address may be missing.
pub const ADDRESS_LIMIT: Duration = Duration::from_secs(3);

/// One end of a connection; the fields are dropped in this order.
pub struct End {
    connection: Connection,
    pub qp: QueuePair,
    pub cq: CompletionQueue,
    pub inbox: MemoryRegion,
    _pd: ProtectionDomain,
    pub device: Device,
}

/// The device of a side, which waits shorter than usual for addresses that are missing.
pub fn open() -> Device {
    let mut options = DeviceOptions::default();
    options.driver.address_limit = ADDRESS_LIMIT;
    Device::open_with(INTERFACE, options).unwrap()
}

pub fn parts(device: &Device) -> (ProtectionDomain, CompletionQueue, QueuePair, MemoryRegion) {
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(64).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    let inbox = pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, 64)])).unwrap();
    (pd, cq, qp, inbox)
}

impl End {
    pub fn accepted(address: SocketAddr, listening: &Sender<()>) -> Self {
        let device = open();
        let listener = device.listen(address, ListenOptions::default()).unwrap();
        listening.send(()).unwrap();
        let mut request = listener.accept(LIMIT).unwrap();
        let (pd, cq, qp, inbox) = parts(&device);
        let connection = request.accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
        Self { connection, qp, cq, inbox, _pd: pd, device }
    }

    pub fn connected(address: SocketAddr) -> Self {
        let device = open();
        let (pd, cq, qp, inbox) = parts(&device);
        let connection = device.connect(&qp, address, ConnectOptions::default(), LIMIT).unwrap();
        Self { connection, qp, cq, inbox, _pd: pd, device }
    }

    pub fn say(&self, text: &str) {
        self.post(text);
        self.sent();
    }

    pub fn post(&self, text: &str) {
        self.qp.post_send(&WorkRequest::send(2, Payload::Inline(text.as_bytes())).signaled()).unwrap();
    }

    pub fn sent(&self) {
        assert_eq!(self.cq.spin(LIMIT).unwrap().status, WcStatus::Success);
    }

    /// Posts the next receive.
    pub fn receive(&self) {
        self.qp.post_recv(&RecvRequest::new(1, &[self.inbox.sge(0, 64)])).unwrap();
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.device.counters().value(name).unwrap()
    }

    pub fn local(&self) -> SocketAddr {
        self.connection.local_address().unwrap()
    }

    pub fn hear(&self) -> String {
        let completion = self.cq.spin(LIMIT).unwrap();
        assert_eq!(completion.status, WcStatus::Success);
        String::from_utf8(self.inbox.to_vec(0, completion.byte_len as usize).unwrap()).unwrap()
    }

    /// The asynchronous events up to the first one that `is_last` accepts; panics after the time limit.
    pub fn events_until(&self, is_last: impl Fn(&AsyncEvent) -> bool) -> Vec<AsyncEvent> {
        let events = self.device.async_events();
        let (end, mut seen) = (Instant::now() + REPORTED, Vec::new());
        loop {
            match events.poll() {
                Some(event) => seen.push(event),
                None => assert!(Instant::now() < end, "only {seen:?}"),
            }
            if seen.last().is_some_and(&is_last) {
                return seen;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The asynchronous events up to the failure of the queue pair.
    pub fn failed_by(&self, reason: CloseReason) -> Vec<AsyncEvent> {
        self.events_until(|event| {
            matches!(event, AsyncEvent::QpFatal { fault: QpFault::Connection(by), .. } if *by == reason)
        })
    }
}

/// Connects a client in side A to a server in side B at `address`; each closure runs in its side's namespace.
pub fn between(
    lab: &Lab,
    address: SocketAddr,
    client: impl FnOnce(End) + Send,
    server: impl FnOnce(End) + Send,
) {
    let (ready, listening) = channel();
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || server(End::accepted(address, &ready))).unwrap();
        let client = lab
            .enter(scope, Side::A, move || {
                listening.recv().unwrap();
                client(End::connected(address));
            })
            .unwrap();
        client.join().unwrap();
        server.join().unwrap();
    });
}
