//! Two devices connected in memory, and helpers for tests.
#![allow(dead_code, missing_docs, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{fs, net::SocketAddr, thread, time::Duration};

use xwarp_verbs::{
    CompletionQueue, Device, DeviceOptions, Progress, ProtectionDomain, QueuePair, QueuePairOptions,
    cm::{AcceptOptions, ConnectOptions, Connection, ListenOptions},
    sim::{self, WireConfig},
};

pub mod probe;

pub const LIMIT: Duration = Duration::from_secs(20);

/// Two devices; the first has 192.0.2.1, the second 192.0.2.2.
pub fn devices_with(options: &DeviceOptions, wire: &WireConfig) -> [Device; 2] {
    let (a, b) = sim::pair(*wire, 1500).unwrap();
    [Device::over(Box::new(a), options.clone()).unwrap(), Device::over(Box::new(b), options.clone()).unwrap()]
}

pub fn devices(progress: Progress) -> [Device; 2] {
    devices_with(&DeviceOptions { progress, ..Default::default() }, &WireConfig::default())
}

/// One end of a connection with everything that it needs.
pub struct End {
    // Dropped first: it disconnects.
    pub connection: Connection,
    pub qp: QueuePair,
    pub cq: CompletionQueue,
    pub pd: ProtectionDomain,
    pub device: Device,
}

/// A queue pair with one completion queue for both directions.
pub fn queue_pair(
    device: &Device,
    options: QueuePairOptions,
) -> (ProtectionDomain, CompletionQueue, QueuePair) {
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(4096).unwrap();
    let qp = pd.create_qp(&cq, &cq, options).unwrap();
    (pd, cq, qp)
}

pub fn connect(devices: &[Device; 2], port: u16) -> [End; 2] {
    connect_with(devices, port, |device| queue_pair(device, QueuePairOptions::default()))
}

/// Connects a queue pair of the second device to a listener of the first.
pub fn connect_with(
    devices: &[Device; 2],
    port: u16,
    make: impl Fn(&Device) -> (ProtectionDomain, CompletionQueue, QueuePair),
) -> [End; 2] {
    let [server, client] = devices;
    let address = SocketAddr::new(sim::ipv4(1), port);
    let listener = server.listen(address, ListenOptions::default()).unwrap();
    let (server_pd, server_cq, server_qp) = make(server);
    let (client_pd, client_cq, client_qp) = make(client);
    let (accepted, connected) = thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            listener.accept(LIMIT).unwrap().accept(&server_qp, AcceptOptions::default(), LIMIT).unwrap()
        });
        let connected = client.connect(&client_qp, address, ConnectOptions::default(), LIMIT).unwrap();
        (accepted.join().unwrap(), connected)
    });
    [
        End { connection: accepted, qp: server_qp, cq: server_cq, pd: server_pd, device: server.clone() },
        End { connection: connected, qp: client_qp, cq: client_cq, pd: client_pd, device: client.clone() },
    ]
}

/// `len` bytes whose values depend on their position and `seed`.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// Number of times that the progress threads of both devices went to sleep since their start.
pub fn sleeps() -> u64 {
    let mut total = 0;
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        // A thread may end meanwhile.
        let Ok(name) = fs::read_to_string(task.join("comm")) else { continue };
        if name.starts_with("xwarp-sim") {
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            total += line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
        }
    }
    total
}
