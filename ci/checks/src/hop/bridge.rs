//! [`Bridge`]: two interfaces, joined by the simulator's directions in real time.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant as Clock},
};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use xwarp_tcp::{
    sim::{Direction, Faults, Tally},
    time::Instant,
};

use super::socket::RawSocket;

/// Longest sleep, which limits the delay of a stop request.
const LOOK: Duration = Duration::from_millis(50);

/// Frames taken from one side before the other side is served.
const BATCH: usize = 64;

/// The largest frame: an IP packet of 65535 bytes and its Ethernet header.
const MAX_FRAME_BYTES: usize = 65_535 + 14;

/// Delay of frames beyond the time given by the model, caused by the machine.
#[derive(Debug, Default)]
struct Lateness {
    frames: u64,
    total: Duration,
    most: Duration,
}

/// A bridge between two interfaces.
#[derive(Debug)]
pub struct Bridge {
    /// The interfaces of A and B.
    sockets: [RawSocket; 2],
    /// The direction with index `i` carries the frames received by socket `i` to the other socket.
    directions: [Direction; 2],
    began: Clock,
    lateness: Lateness,
    /// Number of frames that an interface refused.
    refused: u64,
}

impl Bridge {
    /// Joins two interfaces by name. `faults` are those of the direction from the first to the second, and of
    /// the reverse.
    pub fn new(interfaces: [&str; 2], faults: [Faults; 2], seed: u64) -> Result<Self> {
        let [a, b] = interfaces.map(RawSocket::open);
        let [there, back] = faults;
        Ok(Self {
            sockets: [a?, b?],
            directions: [Direction::new(there, seed), Direction::new(back, seed ^ 1)],
            began: Clock::now(),
            lateness: Lateness::default(),
            refused: 0,
        })
    }

    /// Forwards frames until `stop` is set. With `spin`, it never sleeps.
    pub fn run(&mut self, stop: &AtomicBool, spin: bool) -> Result<()> {
        let mut buffer = vec![0; MAX_FRAME_BYTES];
        while !stop.load(Ordering::Relaxed) {
            let mut moved = false;
            for side in 0..2 {
                moved |= self.take(side, &mut buffer)?;
                moved |= self.give(1 - side);
                moved |= self.give(side);
            }
            if !moved && !spin {
                self.sleep().context("waiting for frames")?;
            }
        }
        Ok(())
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Takes the frames received at one side.
    fn take(&mut self, side: usize, buffer: &mut [u8]) -> Result<bool> {
        let mut taken = 0;
        while taken < BATCH
            && let Some(len) = self.sockets[side].receive(buffer).context("taking a frame")?
        {
            taken += 1;
            let now = self.now();
            if let Some(answer) = self.directions[side].send(now, &buffer[..len]) {
                self.refused += u64::from(!self.sockets[side].send(&answer));
            }
        }
        Ok(taken > 0)
    }

    /// Sends the due frames of the direction that begins at `from`.
    fn give(&mut self, from: usize) -> bool {
        let mut given = false;
        loop {
            let now = self.now();
            let Some(due) = self.directions[from].next_due().filter(|due| *due <= now) else { return given };
            let Some(frame) = self.directions[from].deliver(now) else { return given };
            self.refused += u64::from(!self.sockets[1 - from].send(&frame));
            self.lateness.note(now.since(due));
            given = true;
        }
    }

    fn sleep(&self) -> io::Result<()> {
        let due = self.directions.iter().filter_map(Direction::next_due).min();
        let limit = due.map_or(LOOK, |due| due.since(self.now()).min(LOOK));
        let limit = Timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()) };
        let mut set = self.sockets.each_ref().map(|socket| PollFd::new(socket, PollFlags::IN));
        match poll(&mut set, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The faults applied to the frames of both directions, and the timing error.
    pub fn report(&self) -> Value {
        let late = &self.lateness;
        let mean = late.total.as_nanos() as f64 / late.frames.max(1) as f64 / 1000.0;
        json!({
            "a_to_b": tally(self.directions[0].tally()),
            "b_to_a": tally(self.directions[1].tally()),
            "refused": self.refused,
            "late_mean_us": mean,
            "late_most_us": late.most.as_nanos() as f64 / 1000.0,
        })
    }
}

impl Lateness {
    fn note(&mut self, late: Duration) {
        self.frames += 1;
        self.total += late;
        self.most = self.most.max(late);
    }
}

fn tally(tally: Tally) -> Value {
    tally
        .iter()
        .map(|(name, value)| (name.trim_start_matches("wire.").to_owned(), Value::from(value)))
        .collect()
}
