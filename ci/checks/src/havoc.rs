//! Hostile clients of `xwarpd` that send random requests with random descriptors and die at random moments, and an honest one that
//! measures how long answers take meanwhile.

use std::{
    env,
    fs::File,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use xwarp_control::{Choice, Event, Reply, Request, Sizes, Tagged, VERSION};
use xwarp_leg::message::{receive_message, send_message};
use xwarp_perf::stats::{Latencies, Summary};

use crate::{
    granted::{SMALL, bytes_of, memory, open, opened, sealed},
    lab::INTERFACE,
    raw::Raw,
};

/// Longest life of a process that makes havoc.
const MAX_LIFE: Duration = Duration::from_millis(400);
/// Connections, and granted descriptors, that such a process keeps.
const MAX_CONNECTIONS: usize = 8;
const MAX_KEPT: usize = 32;
/// Pause of the honest client between two rounds.
const PAUSE: Duration = Duration::from_millis(5);
/// Rounds of the honest client after which it opens another device.
const ROUNDS_OF_A_DEVICE: usize = 50;

/// The same seed makes the same choices.
struct Random(StdRng);

impl Random {
    fn of(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.random()
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0.random_range(0..limit)
    }

    fn address(&mut self) -> IpAddr {
        match self.below(5) {
            0 => [10, 77, 0, 1].into(),
            1 => [10, 77, 0, 2].into(),
            2 => IpAddr::from([0; 4]),
            3 => (self.next() as u32).to_be_bytes().into(),
            _ => u128::from(self.next()).to_be_bytes().into(),
        }
    }

    fn optional_address(&mut self) -> Option<IpAddr> {
        (self.below(2) == 0).then(|| self.address())
    }

    fn sizes(&mut self) -> Sizes {
        let [receive_chunks, transmit_chunks] = [(); 2].map(|()| 1 << self.below(20));
        Sizes { receive_chunks, transmit_chunks, ring: 1 << self.below(16) }
    }

    fn request(&mut self) -> Request {
        let port = self.next() as u16 % 12_000;
        match self.below(12) {
            0 => Request::Hello { version: VERSION + self.below(2) as u16 },
            1 => Request::Open { interface: Choice::Address(self.address()), sizes: self.sizes() },
            2 => Request::Open { interface: Choice::Name("lo".into()), sizes: SMALL },
            3 | 4 => open(SMALL),
            5 => Request::Register,
            6 => Request::Reserve { address: self.optional_address(), port },
            7 => Request::Release { address: self.optional_address(), port },
            8 => Request::Resolve { destination: self.address(), source: self.optional_address() },
            9 => Request::NextHop {
                destination: self.address(),
                source: self.address(),
                destination_port: port,
                source_port: self.next() as u16,
                confirm: self.below(2) == 0,
            },
            10 => Request::Describe { number: self.below(3) as u16 },
            _ => Request::Host { name: INTERFACE.into(), join: true },
        }
    }

    fn descriptor(&mut self, kept: &[OwnedFd]) -> Result<Option<OwnedFd>> {
        Ok(Some(match self.below(10) {
            0 => memory(1 << self.below(24))?,
            1 => sealed(bytes_of(SMALL), false)?,
            2 => sealed(bytes_of(SMALL), true)?,
            3 => rustix::pipe::pipe()?.0,
            4 => File::open("/proc/self/exe")?.into(),
            5 => {
                // A socket with an unread descriptor of the other end.
                let (one, other) =
                    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
                send_message(one.as_fd(), b"x", &[one.as_fd()])?;
                other
            }
            6 if !kept.is_empty() => kept.get(self.below(kept.len())).context("kept")?.try_clone()?,
            _ => return Ok(None),
        }))
    }

    /// An encoded request, perhaps changed or cut.
    fn message(&mut self) -> Vec<u8> {
        let mut bytes = Tagged { id: self.next() as u32, body: self.request() }.encode();
        match self.below(6) {
            0 => bytes.truncate(self.below(bytes.len() + 1)),
            1 => {
                let at = self.below(bytes.len());
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = self.next() as u8;
                }
            }
            2 => bytes.extend(self.next().to_le_bytes()),
            _ => {}
        }
        bytes
    }
}

/// Starts processes that make havoc, one after another, and kills each, for some seconds.
pub(crate) fn deaths(seed: u64, seconds: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(seconds);
    let program = env::current_exe()?;
    let mut random = Random::of(seed);
    let mut killed = 0_u64;
    println!("begins");
    while Instant::now() < end {
        let mut child = Command::new(&program).args(["havoc", &random.next().to_string()]).spawn()?;
        thread::sleep(MAX_LIFE.mul_f64(random.below(1000) as f64 / 1000.0));
        child.kill()?;
        let status = child.wait()?;
        ensure!(status.code().is_none(), "a process with this seed has failed: {status}");
        killed += 1;
    }
    println!("killed {killed}");
    Ok(())
}

/// Sends random requests with random descriptors, reads some of the answers, and keeps what it gets, until it is killed.
pub(crate) fn havoc(seed: u64) -> Result<()> {
    let mut random = Random::of(seed);
    let mut connections: Vec<Raw> = Vec::new();
    let mut kept: Vec<OwnedFd> = Vec::new();
    loop {
        let at = random.below(MAX_CONNECTIONS);
        let Some(raw) = connections.get(at) else {
            // The helper may refuse it, which is no error here.
            let raw = Raw::connect()?;
            if random.below(4) > 0 {
                let hello = Tagged { id: 1, body: Request::Hello { version: VERSION } };
                let _ = send_message(raw.socket().as_fd(), &hello.encode(), &[]);
            }
            connections.push(raw);
            continue;
        };
        match random.below(10) {
            0 => drop(connections.swap_remove(at)),
            1..=3 => {
                if let Ok((_, mut granted)) = receive_message(raw.socket().as_fd()) {
                    kept.append(&mut granted);
                    kept.truncate(MAX_KEPT);
                }
            }
            4 => kept.clear(),
            _ => {
                let descriptor = random.descriptor(&kept)?;
                let bytes = random.message();
                let passed: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
                if send_message(raw.socket().as_fd(), &bytes, &passed).is_err() {
                    // It is full, or the helper has hung up.
                    drop(connections.swap_remove(at));
                }
            }
        }
    }
}

fn measured<T>(times: &mut Latencies, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let begin = Instant::now();
    let done = work();
    times.record(begin.elapsed());
    done
}

fn print(what: &str, times: &Latencies) -> Result<()> {
    let Summary { typical, p99, max, .. } = times.summary(1000.0).context("nothing was measured")?;
    println!("{what}: median {typical:.1} ms, 99 % {p99:.1} ms, longest {max:.1} ms");
    Ok(())
}

/// Asks the helper everything that a client asks, and opens devices, for some seconds; prints how long it takes.
pub(crate) fn answers(seconds: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut answers, mut opens) = (Latencies::new()?, Latencies::new()?);
    println!("begins");
    while Instant::now() < end {
        let raw = Raw::greeted()?;
        let device = measured(&mut opens, || opened(&raw))?;
        for _ in 0..ROUNDS_OF_A_DEVICE {
            let mut ask = |request| measured(&mut answers, || Ok(raw.ask(request, None)?.0));
            let Reply::Reserved { port } = ask(Request::Reserve { address: None, port: 0 })? else {
                bail!("no port");
            };
            let destination = [10, 77, 0, 2].into();
            let reply = ask(Request::Resolve { destination, source: None })?;
            ensure!(matches!(reply, Reply::Resolved { .. }), "{reply:?}");
            raw.send(Request::Release { address: None, port }, None)?;
            let reply = ask(Request::Describe { number: 0 })?;
            ensure!(matches!(reply, Reply::Described(_)), "{reply:?}");
            // Nothing of the others' doings concerns this device.
            while let Ok((bytes, _)) = receive_message(device.events()) {
                let event = Event::decode(&bytes)?;
                ensure!(matches!(event, Event::Neighbour { .. } | Event::Routes), "{event:?}");
            }
            thread::sleep(PAUSE);
        }
    }
    print("answers", &answers)?;
    print("openings", &opens)
}
