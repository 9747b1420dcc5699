//! Captures of our own frame tap: pcapng, markers, Terminates.

use std::{
    env, fs, process,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use xwarp_verbs::{
    Access, Device, DeviceOptions, Markers, MpaConfig, Payload, QueuePairOptions, RecvRequest, Remote,
    WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
    sim::{self, WireConfig},
};

use super::{events, lines, summaries, words};

const LIMIT: Duration = Duration::from_secs(20);

/// A session with markers in both directions: a Send of 5000 bytes with immediate data, then an RDMA Write to a key that does not exist.
/// Returns the client's capture.
fn session() -> Vec<u8> {
    static SESSIONS: AtomicU32 = AtomicU32::new(0);
    let number = SESSIONS.fetch_add(1, Ordering::Relaxed);
    let path = env::temp_dir().join(format!("xwarp-own-{}-{number}.pcapng", process::id()));
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    let mpa = MpaConfig { markers: Markers::Require, ..MpaConfig::default() };
    let options = || DeviceOptions { framing: mpa.clone().into(), ..DeviceOptions::default() };
    let server = Device::over(Box::new(a), options()).unwrap();
    let recorded = DeviceOptions { capture: Some(path.clone()), ..options() };
    let client = Device::over(Box::new(b), recorded).unwrap();
    let listener = server.listen((sim::ipv4(1), 4791).into(), ListenOptions::default()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let cq = server.create_cq(16).unwrap();
            let pd = server.create_pd().unwrap();
            let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
            let inbox = pd.allocate(5000, Access::LOCAL_WRITE).unwrap();
            qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, inbox.len())])).unwrap();
            let connection =
                listener.accept(LIMIT).unwrap().accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
            cq.spin(LIMIT).unwrap().check().unwrap();
            let _ = connection.wait_disconnected(LIMIT);
        });
        let cq = client.create_cq(16).unwrap();
        let pd = client.create_pd().unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        let outbox = pd.allocate(5000, Access::empty()).unwrap();
        let options = ConnectOptions { private_data: b"who I am".to_vec(), ..ConnectOptions::default() };
        let connection = client.connect(&qp, (sim::ipv4(1), 4791).into(), options, LIMIT).unwrap();
        let message = WorkRequest::send_with_immediate(1, outbox.sge(0, 5000), [0, 1, 2, 255]);
        qp.post_send(&message.signaled()).unwrap();
        cq.spin(LIMIT).unwrap().check().unwrap();
        let nowhere = Remote { key: xwarp_verbs::STag::new(0xdead_0700), offset: 0x1000 };
        qp.post_send(&WorkRequest::write(2, Payload::Inline(b"not wanted"), nowhere)).unwrap();
        let _ = connection.wait_disconnected(LIMIT);
    });
    drop((server, client));
    let capture = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    capture
}

#[test]
fn markers_and_the_terminate_of_an_own_session_are_understood() {
    let capture = session();
    let text = words(&capture);
    for line in [
        "MPA Request: revision 2, wants CRC, wants markers",
        "Sends with immediate data, 8 bytes of private data",
        "MPA Reply: revision 2, wants CRC, wants markers",
        "Sends with immediate data, no private data",
        "agreed: MPA revision 2, CRC, markers in both directions",
        "client  Send with Immediate Data of 5000 bytes, immediate data 0x000102ff, MSN 1, in 4 segments",
        "client  RDMA Write of 10 bytes to STag 0xdead0700 offset 0x1000",
        "server  TERMINATE: ",
        "; it blames the peer's RDMA Write of 10 bytes, which begins in frame ",
        ", at STag 0xdead0700 offset 0x1000",
    ] {
        assert!(text.contains(line), "{line:?} is missing in\n{text}");
    }
    let lines = lines(&capture);
    assert_eq!(events(&lines, "terminate").len(), 1);
    assert_eq!(summaries(&lines)[0]["ends"][0]["bad_fpdus"], 0);
}

/// The capture without its first packets: the marker's distance from the begin of a segment must be guessed.
#[test]
fn markers_are_found_in_the_middle_of_a_connection() {
    let capture = session();
    // Blocks of the tap: section header and interface description, then packets.
    let (mut at, mut blocks) = (0, Vec::new());
    while at < capture.len() {
        let len = u32::from_ne_bytes(capture[at + 4..at + 8].try_into().unwrap()) as usize;
        blocks.push(capture[at..at + len].to_vec());
        at += len;
    }
    blocks.drain(2..2 + 7);
    let lines = lines(&blocks.concat());
    let found = events(&lines, "found");
    assert!(
        found.iter().any(|event| event["markers"] == true && event["crc"] == true),
        "{}",
        words(&blocks.concat())
    );
    assert_eq!(events(&lines, "terminate").len(), 1);
}

/// The command prints what it could read, then the error, and fails.
#[test]
fn a_file_that_is_still_being_written_is_explained_to_its_end() {
    let capture = session();
    let path = std::env::temp_dir().join(format!("xwarp-explain-{}.pcapng", std::process::id()));
    fs::write(&path, &capture[..capture.len() - 3]).unwrap();
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_xwarp")).arg("explain").arg(&path).output().unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (text, errors) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(text.contains("Send with Immediate Data of 5000 bytes"), "{text}");
    assert!(errors.contains("ends within a packet"), "{errors}");
}
