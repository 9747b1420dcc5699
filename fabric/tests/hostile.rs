//! Clients that lie in every way, beside honest ones, which must be served.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../verbs/examples/hello/client.rs"]
mod client;
#[path = "../../verbs/examples/hello/server.rs"]
mod server;

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, socketpair};
use xwarp_control::{Choice, Reply, Request, Sizes, Tagged, VERSION};
use xwarp_fabric::{Attempt, Options, Place, Server};
use xwarp_leg::fabric::Fabric;
use xwarp_leg::message::{receive_message, send_message};
use xwarp_verbs::{Device, DeviceOptions};

/// How long the hostile clients attack; minutes were run by hand.
const ATTACK: Duration = Duration::from_secs(6);
const ANSWER: Duration = Duration::from_millis(500);
/// Where the rings are in the memory of a hostile client, and its length.
const RINGS: [u64; 2] = [0, 4096];
const BYTES: u64 = 1 << 19;

/// One connection of a hostile client.
struct Hostile {
    control: OwnedFd,
    leg: OwnedFd,
    memory: File,
    ringer: OwnedFd,
    _bell: OwnedFd,
    _events: OwnedFd,
}

fn answer(socket: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let limit = Timespec::try_from(ANSWER).unwrap();
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)).unwrap();
    receive_message(socket.as_fd()).ok().filter(|(bytes, _)| !bytes.is_empty())
}

fn ask(socket: &OwnedFd, body: Request) -> Option<(Reply, Vec<OwnedFd>)> {
    send_message(socket.as_fd(), &Tagged { id: 1, body }.encode(), &[]).ok()?;
    let (bytes, descriptors) = answer(socket)?;
    Some((Tagged::<Reply>::decode(&bytes).unwrap().body, descriptors))
}

/// A message of memif.
fn message(kind: u16, fields: &[&[u8]]) -> [u8; 128] {
    let mut bytes = [0; 128];
    let all = [&kind.to_ne_bytes()[..], &fields.concat()].concat();
    bytes[..all.len()].copy_from_slice(&all);
    bytes
}

impl Hostile {
    /// Connects as an honest client would, but with memory of its own making.
    fn connect(place: &Place, rng: &mut SmallRng) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let control = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&control, &SocketAddrUnix::new(place.socket()).unwrap()).ok()?;
        ask(&control, Request::Hello { version: VERSION })?;
        let sizes = Sizes { receive_chunks: 64, transmit_chunks: 64, ring: 64 };
        let opened = ask(&control, Request::Open { interface: Choice::Name("h".into()), sizes })?;
        let [leg, events] = <[OwnedFd; 2]>::try_from(opened.1).ok()?;
        let memory = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let memory = File::from(memory);
        memory.set_len(BYTES).unwrap();
        if rng.random_bool(0.9) {
            fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        }
        for ring in RINGS {
            memory.write_all_at(&0x3E3_1F20_u32.to_ne_bytes(), ring).unwrap();
        }
        let ringer = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        // It is never read.
        let (bell, theirs) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
        let hostile = Self { control, leg, memory, ringer, _bell: bell, _events: events };
        hostile.handshake(theirs.as_fd(), rng).then_some(hostile)
    }

    fn handshake(&self, bell: BorrowedFd<'_>, rng: &mut SmallRng) -> bool {
        let ring = |to_master: u16, offset: u32| {
            message(5, &[&to_master.to_ne_bytes(), &[0; 4], &offset.to_ne_bytes(), &[6], &[0; 2]])
        };
        let steps: [([u8; 128], Option<BorrowedFd<'_>>); 5] = [
            (message(3, &[&0x0200_u16.to_ne_bytes(), &[0; 61]]), None),
            (message(4, &[&[0; 2], &BYTES.to_ne_bytes()]), Some(self.memory.as_fd())),
            (ring(1, 0), Some(self.ringer.as_fd())),
            (ring(0, 4096), Some(bell)),
            (message(6, &[&[0; 32]]), None),
        ];
        if answer(&self.leg).is_none() {
            return false;
        }
        for (mut bytes, descriptor) in steps {
            if rng.random_bool(0.02) {
                bytes[rng.random_range(0..30)] = rng.random();
            }
            let sent = send_message(self.leg.as_fd(), &bytes, descriptor.as_slice());
            if sent.is_err() || answer(&self.leg).is_none() {
                return false;
            }
        }
        true
    }

    /// Writes what no honest client writes, and rings.
    fn lie(&self, rng: &mut SmallRng) {
        let ring = RINGS[rng.random_range(0..2)];
        let position: u16 = if rng.random_bool(0.8) { rng.random_range(0..70) } else { rng.random() };
        let descriptor = ring + 128 + 16 * rng.random_range(0..64);
        match rng.random_range(0..5) {
            0 => self.memory.write_all_at(&position.to_ne_bytes(), ring + 6).unwrap(),
            1 => self.memory.write_all_at(&position.to_ne_bytes(), ring + 64).unwrap(),
            2 => {
                let len: u32 = if rng.random_bool(0.8) { rng.random_range(0..9000) } else { rng.random() };
                let offset: u32 =
                    if rng.random_bool(0.8) { rng.random_range(0..BYTES as u32) } else { rng.random() };
                let flags = u16::from(rng.random_bool(0.3)).to_ne_bytes();
                let bytes = [&flags[..], &[0; 2], &len.to_ne_bytes(), &offset.to_ne_bytes()].concat();
                self.memory.write_all_at(&bytes, descriptor).unwrap();
            }
            3 => {
                // A segment to the honest ones, from an address and a port that are theirs.
                let mut frame = vec![0_u8; 74];
                frame[12..14].copy_from_slice(&[8, 0]);
                frame[14] = 0x45;
                frame[16..18].copy_from_slice(&60_u16.to_be_bytes());
                frame[23] = 6;
                frame[26..30].copy_from_slice(&[127, 0, 0, 1]);
                frame[30..34].copy_from_slice(&[127, 0, 0, 1]);
                rng.fill(&mut frame[34..38]);
                frame[46] = 0x50;
                frame[47] = rng.random();
                let at = rng.random_range(8192..BYTES - 100);
                self.memory.write_all_at(&frame, at).unwrap();
                let bytes = [&[0; 4][..], &74_u32.to_ne_bytes(), &(at as u32).to_ne_bytes()].concat();
                self.memory.write_all_at(&bytes, descriptor).unwrap();
            }
            _ => {
                let random: u64 = rng.random();
                self.memory.write_all_at(&random.to_ne_bytes(), rng.random_range(0..BYTES - 8)).unwrap();
            }
        }
        let _ = rustix::io::write(&self.ringer, &1_u64.to_ne_bytes());
        if rng.random_bool(0.05) {
            let garbage: [u8; 40] = rng.random();
            let _ = send_message(self.control.as_fd(), &garbage, &[self.memory.as_fd()]);
        }
    }
}

/// Attacks until `stop`; returns how often it has connected.
fn attack(place: &Place, seed: u64, stop: &AtomicBool) -> u64 {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut connections = 0;
    while !stop.load(Ordering::Relaxed) {
        let Some(hostile) = Hostile::connect(place, &mut rng) else { continue };
        connections += 1;
        for _ in 0..rng.random_range(1..400) {
            hostile.lie(&mut rng);
        }
    }
    connections
}

#[test]
fn attack_hostile_clients_harm_nobody() {
    let place = Place::of(Some(&format!("test-hostile-{}", std::process::id()))).unwrap();
    let options = Options { idle: Some(Duration::from_secs(60)) };
    let Attempt::Serving(fabric) = Server::begin(&place, options).unwrap() else { panic!("it is served") };
    let serving = thread::spawn(move || fabric.serve(None));
    let open = || {
        let options = DeviceOptions { fabric: Some(place.name().into()), ..DeviceOptions::default() };
        Device::open_with("fabric:", options).unwrap()
    };
    let (honest, other) = (open(), open());
    let (stop, connections) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 0..2 {
            let (place, stop, connections) = (&place, &stop, &connections);
            scope.spawn(move || connections.fetch_add(attack(place, seed, stop), Ordering::Relaxed));
        }
        let end = Instant::now() + ATTACK;
        while Instant::now() < end {
            let (ready, listening) = mpsc::channel();
            let device = &honest;
            let served = scope.spawn(move || {
                let any = SocketAddr::from(([127, 0, 0, 1], 0));
                server::serve(device, any, |at| ready.send(at).unwrap()).map_err(|error| error.to_string())
            });
            let asked = client::ask(&other, listening.recv().unwrap(), "beside liars");
            if asked.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(asked.unwrap(), "BESIDE LIARS");
            assert_eq!(served.join().unwrap().unwrap(), "beside liars");
        }
        stop.store(true, Ordering::Relaxed);
    });
    // The attacks were some, and the fabric has noticed lies.
    assert!(connections.load(Ordering::Relaxed) > 5, "{connections:?}");
    let Ok(Reply::Described(state)) = Fabric::connect(&place).unwrap().call(Request::Describe { number: 0 })
    else {
        panic!("no answer");
    };
    let lies = state.counters.iter().find(|(name, _)| name == "fabric.lies").unwrap().1;
    assert!(lies > 0, "{:?}", state.counters);
    assert!(!serving.is_finished(), "it has ended");
    let _ = std::fs::remove_file(place.lock());
}
