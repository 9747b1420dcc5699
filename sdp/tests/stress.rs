//! Streams whose two directions are used at random: every way to send and to receive, cancelled transfers, slow
//! readers, small and large buffers, ends in order and resets. Each direction must make progress, and each byte must
//! arrive at its place.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use xwarp_sdp::{Sdp, SdpListener, SdpOptions, SdpStream, machine::Config};
use xwarp_verbs::{
    Device, DeviceOptions, Memory, Pages,
    sim::{self, WireConfig},
};

/// Time limit for all directions together. The test fails if a direction makes no progress until then.
const LIMIT: Duration = Duration::from_secs(120);
/// Longest piece that is sent or received at a time, in bytes.
const MAX_PIECE: usize = 100_000;

/// Random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A random number of bytes: short and long ones are equally likely.
    fn piece(&mut self) -> usize {
        let most = [10, 300, 5000, MAX_PIECE][self.below(4)];
        1 + self.below(most)
    }
}

/// Byte `at` of the stream of a seed.
fn byte(seed: u64, at: usize) -> u8 {
    (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed.wrapping_mul(77)).to_le_bytes()[5]
}

fn pair(options: &SdpOptions) -> [Arc<SdpStream>; 2] {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    let [a, b] = [a, b].map(|end| {
        let device = Device::over(Box::new(end), DeviceOptions::default()).unwrap();
        Sdp::new(&device, options.clone()).unwrap()
    });
    let address: SocketAddr = (sim::ipv4(1), 7).into();
    let listener = SdpListener::bind(&a, address).unwrap();
    let connected = SdpStream::connect(&b, address).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    [accepted, connected].map(Arc::new)
}

fn is_timeout(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
}

/// Sends the bytes of `seed` in all ways, then closes the direction. Returns the number of accepted bytes.
fn send(stream: &SdpStream, seed: u64, total: usize) -> (usize, io::Result<()>) {
    let mut random = Random(seed ^ 0x5e4d);
    let bytes: Vec<u8> = (0..total).map(|at| byte(seed, at)).collect();
    let memory = Memory::anonymous(total, Pages::Normal).unwrap();
    memory.write(0, &bytes).unwrap();
    let (mut writer, mut at) = (stream, 0);
    while at < total {
        let end = total.min(at + random.piece());
        if random.below(10) == 0 {
            // Out-of-band bytes have no place in the stream that is read.
            match stream.send_oob(0xee) {
                Ok(()) => {}
                Err(error) => return (at, Err(error)),
            }
        }
        let sent = match random.below(4) {
            0 => stream.send_memory(&memory, at..end).map(|()| end - at),
            1 => {
                stream.set_write_timeout(Some(Duration::from_millis(2))).unwrap();
                let sent = writer.write(&bytes[at..end]);
                stream.set_write_timeout(None).unwrap();
                sent
            }
            _ => writer.write(&bytes[at..end]),
        };
        match sent {
            Ok(n) => at += n,
            Err(error) if is_timeout(&error) => {}
            Err(error) => return (at, Err(error)),
        }
        if random.below(20) == 0 {
            thread::sleep(Duration::from_millis(3));
        }
    }
    (at, stream.shutdown(Shutdown::Write))
}

/// Receives in all ways until the end of the stream, and checks every byte. Returns their number.
fn receive(stream: &SdpStream, seed: u64) -> (usize, io::Result<()>) {
    let mut random = Random(seed ^ 0x4ec7);
    let memory = Memory::anonymous(MAX_PIECE, Pages::Normal).unwrap();
    let mut bytes = vec![0; MAX_PIECE];
    let (mut reader, mut at) = (stream, 0);
    // Readers of some directions are slow.
    let nap = [0, 0, 2][random.below(3)];
    loop {
        let len = random.piece();
        let limit = (random.below(2) == 0).then(|| Duration::from_micros(1 + random.next() % 3000));
        stream.set_read_timeout(limit).unwrap();
        let peeks = random.below(8) == 0;
        let received = match random.below(3) {
            _ if peeks => stream.peek(&mut bytes[..len]),
            0 => reader.read(&mut bytes[..len]),
            _ => stream.recv_memory(&memory, 0..len).inspect(|n| memory.read(0, &mut bytes[..*n]).unwrap()),
        };
        let n = match received {
            Ok(0) => return (at, Ok(())),
            Ok(n) => n,
            Err(error) if is_timeout(&error) => continue,
            Err(error) => return (at, Err(error)),
        };
        for (i, got) in bytes[..n].iter().enumerate() {
            assert!(*got == byte(seed, at + i), "byte {} of direction {seed}", at + i);
        }
        if !peeks {
            at += n;
        }
        thread::sleep(Duration::from_millis(nap));
    }
}

/// A thread's report: the end, whether it sent, the number of bytes, and its outcome.
type Report = (usize, bool, usize, io::Result<()>);

/// Runs both directions, each from a thread that sends to one that receives; returns their reports by end, sender first.
fn run(
    ends: &[Arc<SdpStream>; 2],
    seed: u64,
    total: usize,
    meanwhile: impl FnOnce(&[Arc<SdpStream>; 2]),
) -> [[(usize, io::Result<()>); 2]; 2] {
    let (done, reports) = mpsc::channel::<Report>();
    for (number, end) in ends.iter().enumerate() {
        let own = seed * 2 + number as u64;
        let (stream, sent) = (Arc::clone(end), done.clone());
        thread::spawn(move || {
            let (bytes, outcome) = send(&stream, own, total);
            sent.send((number, true, bytes, outcome))
        });
        let (stream, received) = (Arc::clone(end), done.clone());
        thread::spawn(move || {
            let (bytes, outcome) = receive(&stream, own ^ 1);
            received.send((number, false, bytes, outcome))
        });
    }
    drop(done);
    meanwhile(ends);
    let mut all = [(); 2].map(|()| [(); 2].map(|()| None));
    for _ in 0..4 {
        let Ok((end, sends, bytes, outcome)) = reports.recv_timeout(LIMIT) else {
            panic!("seed {seed}: a direction does not go on; ended so far (accepted, connected): {all:?}");
        };
        all[end][usize::from(!sends)] = Some((bytes, outcome));
    }
    all.map(|end| end.map(|report| report.unwrap()))
}

/// Default sizes, and ones that are so small that credits, rings and limits are always reached. Advertised data is withdrawn
/// soon, so that reads and withdrawals cross.
fn options(small: bool) -> SdpOptions {
    let connection = Config {
        buffers: 3,
        buffer_bytes: 64,
        most_buffer_bytes: 300,
        desired_bytes: 200,
        send_bytes: 700,
        receive_bytes: 600,
        max_adverts: 1,
        ..Config::default()
    };
    let default = SdpOptions { unread_limit: Duration::from_millis(1), ..SdpOptions::default() };
    if small { SdpOptions { connection, bcopy_threshold: 150, ..default } } else { default }
}

#[test]
fn sim_both_directions_go_on_whatever_is_used() {
    for seed in 1..=6 {
        let small = seed % 2 == 0;
        let total = if small { 60_000 } else { 1_500_000 };
        let ends = pair(&options(small));
        for [(sent, outcome), (received, end)] in run(&ends, seed, total, |_| {}) {
            assert!(outcome.is_ok() && end.is_ok(), "seed {seed}: {outcome:?} {end:?}");
            assert_eq!((sent, received), (total, total), "seed {seed}");
        }
    }
}

#[test]
fn sim_a_reset_ends_every_call_of_both_ends() {
    for seed in 1..=6 {
        let ends = pair(&options(seed % 2 == 0));
        let which = seed as usize / 2 % 2;
        let reports = run(&ends, seed, 100_000_000, |ends| {
            thread::sleep(Duration::from_millis(40));
            ends[which].abort();
        });
        for [(_, sent), (_, received)] in reports {
            assert!(sent.is_err() && received.is_err(), "seed {seed}: {sent:?} {received:?}");
        }
    }
}
