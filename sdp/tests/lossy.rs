//! Streams over a wire in memory that loses, duplicates, reorders and corrupts frames.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use xwarp_sdp::{Sdp, SdpListener, SdpOptions, SdpStream};
use xwarp_verbs::{
    Device, DeviceOptions, Memory, Pages, Slept,
    sim::{self, Faults, WireConfig},
};

const LIMIT: Duration = Duration::from_secs(60);
/// Bytes in each direction.
const BYTES: usize = 300_000;
/// Bytes per piece: every other piece is advertised.
const PIECE_BYTES: usize = 70_000;

fn pattern(seed: u64) -> Vec<u8> {
    (0..BYTES as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 11 ^ seed) as u8).collect()
}

/// Sends all bytes, alternately in messages and from memory, then closes the direction.
fn send(stream: &SdpStream, bytes: &[u8]) {
    let memory = Memory::anonymous(bytes.len(), Pages::Normal).unwrap();
    memory.write(0, bytes).unwrap();
    let mut writer = stream;
    for (number, at) in (0..bytes.len()).step_by(PIECE_BYTES).enumerate() {
        let end = bytes.len().min(at + PIECE_BYTES);
        if number % 2 == 0 {
            writer.write_all(&bytes[at..end]).unwrap();
        } else {
            stream.send_memory(&memory, at..end).unwrap();
        }
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

fn receive_into_memory(stream: &SdpStream) -> Vec<u8> {
    let memory = Memory::anonymous(PIECE_BYTES, Pages::Normal).unwrap();
    let mut all = Vec::new();
    loop {
        let len = stream.recv_memory(&memory, 0..PIECE_BYTES).unwrap();
        if len == 0 {
            return all;
        }
        let mut bytes = vec![0; len];
        memory.read(0, &mut bytes).unwrap();
        all.extend(bytes);
    }
}

#[test]
fn sim_streams_survive_a_wire_with_faults() {
    let faults = Faults {
        loss: 0.01,
        duplicate: 0.01,
        reorder: 0.02,
        reorder_depth: 8,
        corrupt: 0.005,
        ..Faults::default()
    };
    for seed in 1..=3 {
        let wire = WireConfig { faults: [faults; 2], seed, ..WireConfig::default() };
        let (a, b) = sim::pair(wire, 1500).unwrap();
        let [a, b] = [a, b].map(|end| Device::over(Box::new(end), DeviceOptions::default()).unwrap());
        let sdp = |device: &Device| Sdp::new(device, SdpOptions::default()).unwrap();
        let address: SocketAddr = (sim::ipv4(1), 7).into();
        let listener = SdpListener::bind(&sdp(&a), address).unwrap();
        let connected = SdpStream::connect_timeout(&sdp(&b), address, LIMIT).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for stream in [&accepted, &connected] {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
        }
        let (up, down) = (pattern(seed), pattern(seed + 100));
        thread::scope(|scope| {
            scope.spawn(|| send(&accepted, &down));
            scope.spawn(|| send(&connected, &up));
            scope.spawn(|| assert!(receive_into_memory(&accepted) == up, "seed {seed}"));
            let mut got = Vec::new();
            (&connected).read_to_end(&mut got).unwrap();
            assert!(got == down, "seed {seed}");
        });
    }
}

/// Reads `out` by a caller that sleeps: nobody else takes the data.
fn read_asleep(stream: &SdpStream, out: &mut [u8]) {
    let end = Instant::now() + LIMIT;
    let (mut at, mut begins) = (0, true);
    while at < out.len() {
        assert!(Instant::now() < end, "{at} of {} bytes have come", out.len());
        match stream.try_read_to_sleep(&mut out[at..], begins) {
            Ok(read) => at += read,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                // The service takes what came before the sleep.
                let slept = stream.sleep(Some(Duration::from_secs(5))).unwrap();
                assert!(matches!(slept, Slept::Ran | Slept::TimedOut), "{slept:?}");
            }
        }
        begins = at > 0;
    }
}

/// Two connected streams over a wire with `faults`, and their devices.
fn streams(faults: Faults) -> ([Device; 2], SdpStream, SdpStream) {
    let wire = WireConfig { faults: [faults; 2], seed: 5, ..WireConfig::default() };
    let (a, b) = sim::pair(wire, 1500).unwrap();
    let [a, b] = [a, b].map(|end| Device::over(Box::new(end), DeviceOptions::default()).unwrap());
    let sdp = |device: &Device| Sdp::new(device, SdpOptions::default()).unwrap();
    let address: SocketAddr = (sim::ipv4(1), 7).into();
    let listener = SdpListener::bind(&sdp(&a), address).unwrap();
    let connected = SdpStream::connect_timeout(&sdp(&b), address, LIMIT).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    ([a, b], connected, accepted)
}

/// Data that has come to a sleeping caller has notified nobody. If this caller does not read, another reader gets it.
#[test]
fn sim_a_sleeper_that_does_not_read_leaves_the_data_to_others() {
    let (_devices, connected, accepted) = streams(Faults::default());
    accepted.set_read_timeout(Some(LIMIT)).unwrap();
    for _ in 0..10 {
        let sent = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut bytes = [0; 8];
                (&accepted).read_exact(&mut bytes).expect("the sleeper has left");
            });
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                sent.store(true, Ordering::SeqCst);
                (&connected).write_all(&[7; 8]).unwrap();
            });
            let nothing = accepted.try_read_to_sleep(&mut [0; 8], true).unwrap_err();
            assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
            while accepted.sleep(Some(LIMIT)).unwrap() != Slept::Ran || !sent.load(Ordering::SeqCst) {}
            accepted.end_polling();
        });
    }
}

/// Requests and answers of two sleeping ends. While a frame is lost, nothing else comes: the sleeping writer of the frame
/// retransmits it.
#[test]
fn sim_sleeping_readers_retransmit_what_they_have_written() {
    let (devices, connected, accepted) = streams(Faults { loss: 0.1, ..Faults::default() });
    let mut bytes = [0; 8];
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = [0; 8];
            for _ in 0..100 {
                read_asleep(&accepted, &mut bytes);
                (&accepted).write_all(&bytes).unwrap();
            }
        });
        for round in 0..100u64 {
            (&connected).write_all(&round.to_le_bytes()).unwrap();
            read_asleep(&connected, &mut bytes);
            assert_eq!(u64::from_le_bytes(bytes), round);
        }
    });
    for device in devices {
        let counters = device.counters();
        let retransmits = counters.iter().any(|(name, count)| name.contains("retransmit") && count > 0);
        assert!(retransmits, "{counters}");
    }
}
