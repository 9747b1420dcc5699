//! Messages that no test of perftest sends, over a real veth pair: RDMA Write with Immediate Data, Sends with
//! invalidation and solicited event, fences, memory windows, and Terminate; and Wireshark's interpretation of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc,
    thread,
    time::Duration,
};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    tshark,
};
use xwarp_verbs::{
    Access, AsyncEvent, CompletionQueue, DdpError, Device, DeviceOptions, LAYER_DDP, Markers, MpaConfig,
    Opcode, Payload, ProtectionDomain, QpFault, QpState, QueuePair, QueuePairOptions, RecvRequest, Remote,
    StreamError, WcStatus, WorkCompletion, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ListenOptions},
};

const LIMIT: Duration = Duration::from_secs(20);
const PORT: u16 = 4791;
/// Size of the Write: many segments.
const LONG: usize = 20_000;
/// The part of them that the memory window exposes, and the target word of the atomic operation.
const SHOWN: std::ops::Range<usize> = 5000..8000;
const WORD: usize = 7992;

/// Opens the interface of the calling thread's namespace, without markers, which Wireshark does not
/// understand.
fn open(capture: Option<PathBuf>) -> Device {
    let mpa = MpaConfig { markers: Markers::Off, ..MpaConfig::default() };
    Device::open_with(INTERFACE, DeviceOptions { capture, framing: mpa.into(), ..DeviceOptions::default() })
        .unwrap()
}

/// One end of a connection; the fields are dropped in this order.
struct End {
    connection: Connection,
    qp: QueuePair,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    device: Device,
}

impl End {
    fn new(device: Device, connect: impl FnOnce(&Device, &QueuePair) -> Connection) -> Self {
        let pd = device.create_pd().unwrap();
        let cq = device.create_cq(1024).unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        let connection = connect(&device, &qp);
        Self { connection, qp, cq, pd, device }
    }

    fn next(&self) -> WorkCompletion {
        self.cq.spin(LIMIT).expect("a completion").check().expect("a success")
    }

    /// Waits for the queue pair's failure and returns its reason.
    fn fault(&self) -> QpFault {
        let events = self.device.async_events();
        assert!(self.device.wait(&events, Some(LIMIT)).unwrap(), "an asynchronous event");
        match events.poll() {
            Some(AsyncEvent::QpFatal { fault, .. }) => fault,
            other => panic!("{other:?}"),
        }
    }
}

fn sent() -> Vec<u8> {
    (0..LONG).map(|i| (i * 7) as u8).collect()
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes[WORD..WORD + 8].try_into().unwrap())
}

/// The server: receives a Write with Immediate Data, grants a memory window, and receives its invalidation;
/// the client's next Write then ends the stream.
fn serve(address: SocketAddr, keys: &mpsc::Sender<Remote>) {
    let device = open(None);
    let listener = device.listen(address, ListenOptions::default()).unwrap();
    // The client connects after it has received the first key.
    let pd = device.create_pd().unwrap();
    let access = Access::REMOTE_WRITE | Access::LOCAL_WRITE | Access::WINDOW_BIND;
    let sink = pd.allocate(LONG, access).unwrap();
    keys.send(sink.remote(0)).unwrap();
    let cq = device.create_cq(64).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    for wr_id in 1..4 {
        qp.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
    }
    let connection = listener.accept(LIMIT).unwrap().accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
    let end = End { connection, qp, cq, pd, device };

    let written = end.next();
    assert_eq!((written.wr_id, written.opcode, written.byte_len), (1, Opcode::RecvImmediate, LONG as u32));
    assert_eq!((written.immediate, written.solicited), (Some(*b"all here"), true));
    let mut bytes = sent();
    assert_eq!(sink.to_vec(0, LONG).unwrap(), bytes);

    let window = end.pd.alloc_window().unwrap();
    let key = window.next_key();
    let binding = sink.binding(SHOWN.start, SHOWN.len(), Access::REMOTE).zero_based();
    end.qp.post_send(&WorkRequest::bind_window(8, key, binding).signaled()).unwrap();
    assert_eq!(end.next().opcode, Opcode::BindWindow);
    keys.send(Remote { key, offset: 0 }).unwrap();
    let back = end.next();
    assert_eq!((back.wr_id, back.opcode, back.byte_len), (2, Opcode::Recv, 0));
    assert_eq!((back.invalidated, back.solicited), (Some(key), true));
    keys.send(Remote { key, offset: 0 }).unwrap();

    let refused = QpFault::Local(StreamError::Ddp(DdpError::InvalidStag));
    assert_eq!(end.fault(), refused);
    let flushed = end.cq.spin(LIMIT).unwrap();
    assert_eq!((flushed.wr_id, flushed.status), (3, WcStatus::Flushed));
    assert!(end.connection.wait_disconnected(LIMIT).unwrap());
    let added = word(&bytes).wrapping_add(5);
    bytes[WORD..WORD + 8].copy_from_slice(&added.to_ne_bytes());
    assert_eq!(sink.to_vec(0, LONG).unwrap(), bytes, "nothing more was placed");
}

fn ask(address: SocketAddr, keys: &mpsc::Receiver<Remote>, capture: PathBuf) {
    let sink = keys.recv_timeout(LIMIT).unwrap();
    let end = End::new(open(Some(capture)), |device, qp| {
        device.connect(qp, address, ConnectOptions::default(), LIMIT).unwrap()
    });
    let source = end.pd.allocate(LONG, Access::LOCAL_WRITE).unwrap();
    let bytes = sent();
    source.write(0, &bytes).unwrap();
    let piece = source.sge(0, LONG);
    let write = WorkRequest::write_with_immediate(1, piece, sink, *b"all here");
    end.qp.post_send(&write.solicited().signaled()).unwrap();
    assert_eq!(end.next().opcode, Opcode::RdmaWrite);

    // The fence delays the invalidation until the Read and the FetchAdd have been answered.
    let window = keys.recv_timeout(LIMIT).unwrap();
    source.memory().fill(0, LONG, 0).unwrap();
    let (place, before) = (source.sge(0, SHOWN.len()), source.sge(WORD, 8));
    let remote_word = Remote { key: window.key, offset: (WORD - SHOWN.start) as u64 };
    let give_back = WorkRequest::send_with_invalidate(3, Payload::EMPTY, window.key);
    end.qp
        .post_send_list(&[
            WorkRequest::read(2, place, window).signaled(),
            WorkRequest::fetch_add(6, before, remote_word, 5).signaled(),
            give_back.fenced().solicited().signaled(),
        ])
        .unwrap();
    let read = end.next();
    assert_eq!((read.wr_id, read.opcode, read.byte_len), (2, Opcode::RdmaRead, SHOWN.len() as u32));
    assert_eq!(source.to_vec(0, SHOWN.len()).unwrap(), bytes[SHOWN]);
    assert_eq!((end.next().opcode, source.memory().load_u64(WORD)), (Opcode::FetchAdd, Ok(word(&bytes))));
    assert_eq!(end.next().wr_id, 3);

    // The invalidated window is closed.
    let gone = keys.recv_timeout(LIMIT).unwrap();
    end.qp.post_recv(&RecvRequest::new(4, &[])).unwrap();
    end.qp.post_send(&WorkRequest::write(5, Payload::Inline(b"too late"), gone)).unwrap();
    let QpFault::Remote(terminate) = end.fault() else { panic!("no Terminate came") };
    let (error_type, code) = DdpError::InvalidStag.numbers();
    assert_eq!((terminate.layer, terminate.error_type, terminate.code), (LAYER_DDP, error_type, code));
    assert_eq!(terminate.segment_length, Some(14 + 8));
    let flushed = end.cq.spin(LIMIT).unwrap();
    assert_eq!((flushed.wr_id, flushed.status), (4, WcStatus::Flushed));
    assert!(end.connection.wait_disconnected(LIMIT).unwrap());
    assert_eq!(end.qp.state(), QpState::Error);
    assert_eq!(end.device.counters().value("rdmap.terminate_received_ddp_invalid_stag"), Some(1));
}

/// Values of one field in all frames that have it, read by Wireshark.
fn field(capture: &Path, name: &str) -> Vec<String> {
    let output = Command::new("tshark")
        .args(["--disable-protocol", "rpcordma", "-n", "-r"])
        .arg(capture)
        .args(["-T", "fields", "-E", "occurrence=a", "-E", "aggregator= ", "-e", name])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().split_whitespace().map(str::to_owned).collect()
}

fn converse(family: Family) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::B, family), PORT);
    let capture = lab.file("messages.pcapng");
    for side in [Side::A, Side::B] {
        lab.without_checksum_offload(side).unwrap();
    }
    let (tell, keys) = mpsc::channel();
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || serve(address, &tell)).unwrap();
        let file = capture.clone();
        let client = lab.enter(scope, Side::A, move || ask(address, &keys, file)).unwrap();
        client.join().unwrap();
        server.join().unwrap();
    });
    let verdict = tshark::judge(&capture, false).unwrap();
    assert!(verdict.complaints.is_empty(), "{:#?}", verdict.complaints);
    assert!(verdict.mpa_frames > LONG / 1500 && verdict.good_crcs >= verdict.mpa_frames - 2, "{verdict:?}");
    // Write, Read Request and Response, Send with SE and Invalidate, Terminate; Immediate Data with SE, Atomic
    // Request and Response.
    let opcodes = field(&capture, "iwarp_rdma.opcode");
    for opcode in ["0x00", "0x01", "0x02", "0x06", "0x07", "0x09", "0x0a", "0x0b"] {
        assert!(opcodes.iter().any(|seen| seen == opcode), "{opcode} in {opcodes:?}");
    }
    let number = |name: &str| {
        let values = field(&capture, name);
        assert_eq!(values.len(), 1, "{name}: {values:?}");
        u64::from_str_radix(values[0].trim_start_matches("0x"), 16).unwrap()
    };
    assert_eq!(number("iwarp_rdma.atomic.add_data"), 5);
    let terminate =
        ["iwarp_rdma.term_layer", "iwarp_rdma.term_etype_ddp", "iwarp_rdma.term_errcode_ddp_tagged"];
    assert_eq!(terminate.map(number), [1, 1, 0], "DDP, tagged buffer error, invalid STag");
}

#[test]
fn netns_messages_beyond_perftest_over_ipv4() {
    converse(Family::V4);
}

#[test]
fn netns_messages_beyond_perftest_over_ipv6() {
    converse(Family::V6);
}
