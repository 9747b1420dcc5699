//! Transactions, RDMA Writes, out-of-band bytes, suspended connections and hostile peers over whole engines, on wires with and
//! without faults.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    sync::mpsc,
    thread,
    time::Duration,
};

use xwarp_sdp::{Received, Sdp, SdpListener, SdpOptions, SdpStream, Successor, machine::Config};
use xwarp_verbs::{
    Device, DeviceOptions, Memory, Pages,
    sim::{self, Faults, WireConfig},
};

const LIMIT: Duration = Duration::from_secs(60);
/// Length of a reply from memory: longer than the threshold and than all receives.
const REPLY: usize = 100_000;

fn faults() -> Faults {
    Faults {
        loss: 0.01,
        duplicate: 0.01,
        reorder: 0.02,
        reorder_depth: 8,
        corrupt: 0.005,
        ..Faults::default()
    }
}

/// No faults for seed 0.
fn devices(seed: u64) -> [Device; 2] {
    let faults = if seed == 0 { Faults::default() } else { faults() };
    let wire = WireConfig { faults: [faults; 2], seed, ..WireConfig::default() };
    let (a, b) = sim::pair(wire, 1500).unwrap();
    [a, b].map(|end| Device::over(Box::new(end), DeviceOptions::default()).unwrap())
}

struct Pair {
    accepted: SdpStream,
    connected: SdpStream,
    server: Sdp,
    client: Sdp,
}

fn pair(devices: &[Device; 2]) -> Pair {
    // Slow machines must not turn transfers by RDMA into messages.
    let options = SdpOptions { unread_limit: LIMIT, ..SdpOptions::default() };
    let [server, client] = devices.each_ref().map(|device| Sdp::new(device, options.clone()).unwrap());
    let address: SocketAddr = (sim::ipv4(1), 7).into();
    let listener = SdpListener::bind(&server, address).unwrap();
    let connected = SdpStream::connect_timeout(&client, address, LIMIT).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    for stream in [&accepted, &connected] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
    }
    Pair { accepted, connected, server, client }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 11 ^ seed) as u8).collect()
}

fn bytes(memory: &Memory, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

fn counter(sdp: &Sdp, name: &str) -> u64 {
    sdp.counters().get(name).copied().unwrap_or_default()
}

/// Commands of a few bytes and replies from memory.
#[test]
fn sim_sdp_s9_4_transactions_bring_replies_by_rdma_write() {
    const ROUNDS: usize = 12;
    for seed in 0..4 {
        let devices = devices(seed);
        let Pair { accepted, connected, server, client } = pair(&devices);
        thread::scope(|scope| {
            scope.spawn(|| {
                let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
                let mut reader = &accepted;
                for round in 0..ROUNDS {
                    let mut command = [0; 3];
                    reader.read_exact(&mut command).unwrap();
                    assert_eq!(command, [round as u8, 1, 2]);
                    memory.write(0, &pattern(REPLY, round)).unwrap();
                    accepted.send_memory(&memory, 0..REPLY).unwrap();
                }
            });
            let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
            for round in 0..ROUNDS {
                let mut at = connected.transact(&[round as u8, 1, 2], &memory, 0..REPLY).unwrap();
                while at < REPLY {
                    at += connected.recv_memory(&memory, at..REPLY).unwrap();
                }
                assert!(bytes(&memory, REPLY) == pattern(REPLY, round), "seed {seed} round {round}");
            }
        });
        assert!(counter(&client, "sdp_transactions") >= 1, "seed {seed}: {:?}", client.counters());
        assert!(counter(&client, "sdp_bytes_read") > 0, "seed {seed}: the first reply is read");
        let written = counter(&server, "sdp_bytes_written");
        assert!(written >= REPLY as u64, "seed {seed}: only {written} bytes went by RDMA Write");
    }
}

/// A receiver that waits before its data arrives gets it by RDMA Write.
#[test]
fn sim_sdp_s9_3_receives_that_wait_are_written_to() {
    const PIECES: usize = 20;
    for seed in 0..4 {
        let devices = devices(seed);
        let Pair { accepted, connected, server, .. } = &pair(&devices);
        let (waits, waiting) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
                for piece in 0..PIECES {
                    waiting.recv_timeout(LIMIT).unwrap();
                    // Time for the receive to begin. Some pieces may arrive before it, but not all.
                    thread::sleep(Duration::from_millis(3));
                    memory.write(0, &pattern(REPLY, piece)).unwrap();
                    accepted.send_memory(&memory, 0..REPLY).unwrap();
                }
                accepted.shutdown(Shutdown::Write).unwrap();
            });
            let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
            for piece in 0..PIECES {
                waits.send(()).unwrap();
                let mut at = 0;
                while at < REPLY {
                    at += connected.recv_memory(&memory, at..REPLY).unwrap();
                }
                assert!(bytes(&memory, REPLY) == pattern(REPLY, piece), "seed {seed} piece {piece}");
            }
            assert_eq!(connected.recv_memory(&memory, 0..REPLY).unwrap(), 0);
        });
        let written = counter(server, "sdp_bytes_written");
        assert!(written >= REPLY as u64, "seed {seed}: only {written} bytes went by RDMA Write");
    }
}

/// Out-of-band bytes between bytes in messages and from memory, for a receiver into memory.
#[test]
fn sim_sdp_s9_5_3_out_of_band_bytes_keep_their_place() {
    for seed in 0..4 {
        let devices = devices(seed);
        let Pair { accepted, connected, .. } = &pair(&devices);
        let (taken, next) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
                memory.write(0, &pattern(REPLY, 9)).unwrap();
                let mut writer = connected;
                for mark in 0..20 {
                    if mark % 3 == 0 {
                        connected.send_memory(&memory, 0..REPLY).unwrap();
                    } else {
                        writer.write_all(&pattern(mark * 500, 9)).unwrap();
                    }
                    connected.send_oob(mark as u8).unwrap();
                    if mark % 2 == 0 {
                        writer.write_all(b"behind").unwrap();
                    }
                    // The next byte would replace an unread one.
                    next.recv_timeout(LIMIT).unwrap();
                }
                connected.shutdown(Shutdown::Write).unwrap();
            });
            let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
            let (mut marks, mut got, mut expected) = (0, Vec::new(), Vec::new());
            loop {
                match accepted.recv_memory_or_oob(&memory, 0..REPLY).unwrap() {
                    Received::Bytes(0) => break,
                    Received::Bytes(len) => got.extend(bytes(&memory, len)),
                    Received::OutOfBand(byte) => {
                        assert_eq!(byte, marks, "seed {seed}");
                        let mark = usize::from(marks);
                        expected.extend(pattern(if mark % 3 == 0 { REPLY } else { mark * 500 }, 9));
                        assert!(got == expected, "seed {seed}: {} bytes before mark {mark}", got.len());
                        if mark % 2 == 0 {
                            expected.extend(b"behind");
                        }
                        marks += 1;
                        taken.send(()).unwrap();
                    }
                }
            }
            assert!(got == expected && marks == 20, "seed {seed}: {marks} marks");
        });
    }
}

/// A stream moves to another service of the same address while both directions are in use.
#[test]
fn sim_sdp_s13_a_stream_is_handed_over_to_another_service() {
    for seed in 0..4 {
        let pieces = if seed == 0 { 30 } else { 8 };
        let devices = devices(seed);
        let Pair { accepted, connected, server, .. } = pair(&devices);
        let other = Sdp::new(&devices[0], SdpOptions::default()).unwrap();
        let addresses = (accepted.local_addr().unwrap(), accepted.peer_addr().unwrap());
        let (begun, begins) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
                memory.write(0, &pattern(REPLY, 3)).unwrap();
                for piece in 0..pieces {
                    if piece % 2 == 0 {
                        connected.send_memory(&memory, 0..REPLY).unwrap();
                    } else {
                        (&connected).write_all(&pattern(REPLY, 3)).unwrap();
                    }
                }
                connected.shutdown(Shutdown::Write).unwrap();
            });
            scope.spawn(|| {
                let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
                let (mut got, expected) = (0, pattern(REPLY, 4));
                loop {
                    let len = connected.recv_memory(&memory, 0..REPLY).unwrap();
                    if len == 0 {
                        break;
                    }
                    begun.send(()).unwrap();
                    for (i, byte) in bytes(&memory, len).into_iter().enumerate() {
                        assert!(byte == expected[(got + i) % REPLY], "seed {seed} byte {}", got + i);
                    }
                    got += len;
                }
                assert_eq!(got, REPLY * 2, "seed {seed}");
            });
            let (mut got, expected) = (Vec::new(), pattern(REPLY, 3).repeat(pieces));
            let mut part = vec![0; REPLY * 3];
            (&accepted).write_all(&pattern(REPLY, 4)).unwrap();
            begins.recv_timeout(LIMIT).unwrap();
            (&accepted).read_exact(&mut part).unwrap();
            got.extend(part);
            let moved = accepted.hand_over(&other).unwrap();
            moved.set_read_timeout(Some(LIMIT)).unwrap();
            assert_eq!((moved.local_addr().unwrap(), moved.peer_addr().unwrap()), addresses);
            let late = (&accepted).write(b"late").unwrap_err();
            assert_eq!(late.kind(), ErrorKind::ConnectionAborted, "seed {seed}");
            (&moved).write_all(&pattern(REPLY, 4)).unwrap();
            moved.shutdown(Shutdown::Write).unwrap();
            (&moved).read_to_end(&mut got).unwrap();
            assert!(got == expected, "seed {seed}: {} of {} bytes", got.len(), expected.len());
        });
        assert_eq!(counter(&server, "sdp_suspend") + counter(&other, "sdp_suspend"), 0, "seed {seed}");
    }
}

/// The connecting end can hand over, too, but not during memory transfers.
#[test]
fn sdp_s13_the_connecting_end_hands_over_and_transfers_forbid_it() {
    let devices = devices(0);
    let Pair { accepted, connected, .. } = pair(&devices);
    let other = Sdp::new(&devices[1], SdpOptions::default()).unwrap();
    let receiver = connected.try_clone().unwrap();
    let (started, starts) = mpsc::channel();
    let waits = thread::spawn(move || {
        let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
        started.send(()).unwrap();
        receiver.recv_memory(&memory, 0..REPLY).unwrap()
    });
    starts.recv_timeout(LIMIT).unwrap();
    thread::sleep(Duration::from_millis(50));
    assert_eq!(connected.hand_over(&other).unwrap_err().kind(), ErrorKind::ResourceBusy);
    (&accepted).write_all(b"x").unwrap();
    assert_eq!(waits.join().unwrap(), 1);
    (&accepted).write_all(b"unread").unwrap();
    (&connected).write_all(b"before").unwrap();
    let moved = connected.hand_over(&other).unwrap();
    (&moved).write_all(b" after").unwrap();
    let mut got = [0; 12];
    (&accepted).read_exact(&mut got).unwrap();
    assert_eq!(&got, b"before after");
    (&moved).read_exact(&mut got[..6]).unwrap();
    assert_eq!(&got[..6], b"unread");
}

/// Another connection of the same host, from another port, does not get the suspended one, although it comes first. The new service has
/// other settings; those of the connection stay.
#[test]
fn sdp_s13_1_1_only_the_suspended_peer_continues_a_connection() {
    let devices = devices(0);
    let Pair { accepted, connected, client, .. } = pair(&devices);
    let connection = Config { buffers: 3, buffer_bytes: 64, desired_bytes: 64, ..Config::default() };
    let other = Sdp::new(&devices[0], SdpOptions { connection, ..SdpOptions::default() }).unwrap();
    let address = accepted.local_addr().unwrap();
    let successor = Successor::bind(&other, address.ip()).unwrap();
    let target = SocketAddr::new(address.ip(), successor.port().unwrap());
    let stranger = thread::spawn(move || SdpStream::connect_timeout(&client, target, LIMIT).err());
    thread::sleep(Duration::from_millis(100));
    (&connected).write_all(&pattern(REPLY, 1)).unwrap();
    let state = accepted.suspend(target.port()).unwrap();
    assert_eq!((&accepted).read(&mut [0; 9]).unwrap_err().kind(), ErrorKind::ConnectionAborted);
    let moved = successor.resume(&state).unwrap();
    assert_eq!(stranger.join().unwrap().map(|error| error.kind()), Some(ErrorKind::ConnectionRefused));
    moved.set_read_timeout(Some(LIMIT)).unwrap();
    let mut got = vec![0; REPLY];
    (&moved).read_exact(&mut got).unwrap();
    assert!(got == pattern(REPLY, 1));
    thread::scope(|scope| {
        scope.spawn(|| (&moved).write_all(&pattern(REPLY, 2)).unwrap());
        (&connected).read_exact(&mut got).unwrap();
    });
    assert!(got == pattern(REPLY, 2));
    let unusable = Successor::bind(&other, address.ip()).unwrap().resume(&state[..state.len() - 1]);
    assert_eq!(unusable.unwrap_err().kind(), ErrorKind::InvalidData);
}

#[test]
fn a_receive_into_memory_waits_for_another_threads_no_longer_than_its_limit() {
    let devices = devices(0);
    let Pair { accepted, connected, .. } = pair(&devices);
    accepted.set_read_timeout(None).unwrap();
    let first = accepted.try_clone().unwrap();
    let waits = thread::spawn(move || {
        let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
        first.recv_memory(&memory, 0..REPLY).unwrap()
    });
    thread::sleep(Duration::from_millis(50));
    accepted.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    let (done, ends) = mpsc::channel();
    let second = accepted.try_clone().unwrap();
    thread::spawn(move || {
        let memory = Memory::anonymous(REPLY, Pages::Normal).unwrap();
        done.send(second.recv_memory(&memory, 0..REPLY).map_err(|e| e.kind()))
    });
    assert_eq!(ends.recv_timeout(LIMIT).expect("the second receive waits"), Err(ErrorKind::WouldBlock));
    (&connected).write_all(b"two").unwrap();
    assert!(waits.join().unwrap() > 0);
}
