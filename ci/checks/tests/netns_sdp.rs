//! SDP over AF_XDP between two namespaces: streams and listeners of `xwarp-sdp` on a real veth pair.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, LabOptions, Side},
    process::Running,
    recorded::Recorded,
};
use xwarp_sdp::{Sdp, SdpListener, SdpOptions, SdpStream};
use xwarp_verbs::{Device, DeviceOptions, Memory, Pages};

const SERVER: &str = env!("CARGO_BIN_EXE_xwarp-sdp-peer");
const PORT: u16 = 4800;
const LIMIT: Duration = Duration::from_secs(20);

fn lab(mtu: u32) -> Recorded {
    Recorded::up(LabOptions { mtu, ..LabOptions::default() }).unwrap()
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// SDP on the interface of a side, whose frames are recorded.
fn open(lab: &Recorded, side: Side) -> Sdp {
    let capture = Some(lab.captures().join(format!("{side:?}.pcapng")));
    let options = DeviceOptions { capture, ..DeviceOptions::default() };
    Sdp::new(&Device::open_with(INTERFACE, options).unwrap(), SdpOptions::default()).unwrap()
}

/// Runs `server` and `client` with the two ends of a connection, each in its namespace and over its own interface. Returns the
/// messages that the dissector of SDP finds in the captures of both.
fn connected(
    lab: &Recorded,
    family: Family,
    server: impl FnOnce(SdpStream, &Sdp) + Send,
    client: impl FnOnce(SdpStream, &Sdp) + Send,
) -> BTreeMap<u8, usize> {
    let address = SocketAddr::new(lab.address(Side::B, family), PORT);
    let listening = Barrier::new(2);
    thread::scope(|scope| {
        let listening = &listening;
        let serving = lab.enter(scope, Side::B, move || {
            let sdp = open(lab, Side::B);
            let listener = SdpListener::bind(&sdp, address).unwrap();
            listening.wait();
            let (stream, _) = listener.accept().unwrap();
            server(stream, &sdp);
        });
        let calling = lab.enter(scope, Side::A, move || {
            let sdp = open(lab, Side::A);
            listening.wait();
            let stream = SdpStream::connect_timeout(&sdp, address, LIMIT).unwrap();
            client(stream, &sdp);
        });
        calling.unwrap().join().unwrap();
        serving.unwrap().join().unwrap();
    });
    lab.messages().unwrap()
}

/// Sends `out`, half-closes, and compares what comes until the end of the other direction with `expected`.
fn exchange(stream: SdpStream, out: &[u8], expected: &[u8]) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut writer = &stream;
            writer.write_all(out).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        (&stream).read_to_end(&mut got).unwrap();
        assert!(got == expected, "{} of {} bytes, or others", got.len(), expected.len());
    });
}

#[test]
fn netns_sdp_both_directions_carry_data_between_hosts() {
    for (mtu, family) in [(1500, Family::V4), (9000, Family::V6)] {
        let lab = lab(mtu);
        let (up, down) = (pattern(3_000_000, 1), pattern(2_000_000, 77));
        let messages = connected(
            &lab,
            family,
            |stream, _| exchange(stream, &down, &up),
            |stream, _| exchange(stream, &up, &down),
        );
        assert!(messages[&0xff] > 100, "{messages:?}");
    }
}

#[test]
fn netns_sdp_a_half_closed_stream_carries_the_other_direction() {
    let lab = lab(1500);
    let bytes = pattern(500_000, 3);
    connected(
        &lab,
        Family::V4,
        |mut stream, _| {
            assert_eq!(stream.read(&mut [0; 9]).unwrap(), 0, "the client has closed its direction");
            stream.write_all(&bytes).unwrap();
        },
        |mut stream, _| {
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(stream.write(b"late").unwrap_err().kind(), ErrorKind::BrokenPipe);
            let mut got = Vec::new();
            stream.read_to_end(&mut got).unwrap();
            assert!(got == bytes);
        },
    );
}

#[test]
fn netns_sdp_registered_memory_is_read_by_rdma() {
    let lab = lab(9000);
    // Each word looks like the start of a SinkAvail, which the dissector must not find in a Read Response.
    let bytes: Vec<u8> =
        pattern(1 << 20, 9).chunks(4).flat_map(|word| [0xfd, 0x01, word[2], word[3]]).collect();
    let messages = connected(
        &lab,
        Family::V4,
        |stream, sdp| {
            let memory = Memory::anonymous(bytes.len(), Pages::Normal).unwrap();
            let mut at = 0;
            while at < bytes.len() {
                let n = stream.recv_memory(&memory, at..bytes.len()).unwrap();
                assert!(n > 0, "the end after {at} bytes");
                at += n;
            }
            let mut got = vec![0; bytes.len()];
            memory.read(0, &mut got).unwrap();
            assert!(got == bytes);
            let read = sdp.counters().get("sdp_bytes_read").copied().unwrap_or(0);
            assert!(read >= bytes.len() as u64 / 2, "{read} bytes by RDMA");
        },
        |stream, _| {
            let memory = Memory::anonymous(bytes.len(), Pages::Normal).unwrap();
            memory.write(0, &bytes).unwrap();
            stream.send_memory(&memory, 0..bytes.len()).unwrap();
        },
    );
    for (mid, name) in [(0x01, "HelloAck"), (0x02, "DisConn"), (0x06, "RdmaRdCompl"), (0xfe, "SrcAvail")] {
        assert!(messages.contains_key(&mid), "no {name}: {messages:?}");
    }
}

/// Transactions, then the client moves the connection to another service of its device, and continues.
#[test]
fn netns_sdp_transactions_go_on_after_a_suspension() {
    const ROUNDS: [usize; 2] = [8, 3];
    const REPLY: usize = 100_000;
    let lab = lab(9000);
    let messages = connected(
        &lab,
        Family::V4,
        |stream, _| {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
            for round in 0..ROUNDS.iter().sum::<usize>() {
                let mut command = [0; 3];
                (&stream).read_exact(&mut command).unwrap();
                assert_eq!(command, [round as u8; 3]);
                memory.write(0, &pattern(REPLY, round as u8)).unwrap();
                stream.send_memory(&memory, 0..REPLY).unwrap();
            }
        },
        |stream, sdp| {
            let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
            let ask = |stream: &SdpStream, round: usize| {
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                let mut at = stream.transact(&[round as u8; 3], &memory, 0..REPLY).unwrap();
                while at < REPLY {
                    at += stream.recv_memory(&memory, at..REPLY).unwrap();
                }
                let mut got = vec![0; REPLY];
                memory.read(0, &mut got).unwrap();
                assert!(got == pattern(REPLY, round as u8), "round {round}");
            };
            (0..ROUNDS[0]).for_each(|round| ask(&stream, round));
            let other = Sdp::new(sdp.device(), SdpOptions::default()).unwrap();
            let moved = stream.hand_over(&other).unwrap();
            (0..ROUNDS[1]).for_each(|round| ask(&moved, ROUNDS[0] + round));
        },
    );
    for (mid, name) in [
        (0x05, "RdmaWrCompl"),
        (0x06, "RdmaRdCompl"),
        (0x07, "ModeChange"),
        (0x0d, "SuspComm"),
        (0x0e, "SuspCommAck"),
        (0xfd, "SinkAvail"),
        (0xfe, "SrcAvail"),
    ] {
        assert!(messages.contains_key(&mid), "no {name}: {messages:?}");
    }
}

/// The kernel detaches the XDP program of a killed process and its TCP resets our connection: an error, not the end of the
/// stream.
#[test]
fn netns_sdp_a_killed_peer_is_a_reset() {
    let lab = lab(1500);
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let mut command = lab.command(Side::B, SERVER);
    command.args([INTERFACE, &address.to_string()]).arg(lab.captures().join("B.pcapng"));
    let mut server = Running::start(command).unwrap();
    server.wait_for("listens", LIMIT).unwrap();
    let recorded = &lab;
    lab.within(Side::A, move || {
        let sdp = open(recorded, Side::A);
        let mut stream = SdpStream::connect_timeout(&sdp, address, LIMIT).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"echo").unwrap();
        let mut back = [0; 4];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"echo");
        server.signal(Signal::KILL).unwrap();
        let begin = Instant::now();
        // Writes make the kernel answer, as with TCP.
        let error = loop {
            if let Err(error) = stream.write(b"anybody?") {
                break error;
            }
            thread::sleep(Duration::from_millis(20));
            assert!(begin.elapsed() < LIMIT, "the death of the peer was not noticed");
        };
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    })
    .unwrap();
}
