//! What a direction of the wire does to frames: seeded, so that the same seed gives the same trace. The simulated
//! [`Wire`](super::Wire) is made of two [`Direction`]s, and so is anything else that carries frames with faults.

use std::{collections::VecDeque, time::Duration};

use rand::{Rng, RngCore, SeedableRng, rngs::SmallRng};
use smallvec::SmallVec;

use crate::time::Instant;

/// Bursty loss after Gilbert: a good and a bad state, and the chances to change between them per frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gilbert {
    /// Chance to enter the bad state, per frame.
    pub enter: f64,
    /// Chance to leave it, per frame.
    pub leave: f64,
    /// Chance to lose a frame while in it.
    pub loss: f64,
}

/// The faults of one direction. All chances are per frame, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Faults {
    /// Independent loss.
    pub loss: f64,
    /// Bursty loss, on top.
    pub bursts: Option<Gilbert>,
    /// A second copy arrives.
    pub duplicate: f64,
    /// The frame is held back for up to `reorder_by`, so later ones overtake it.
    pub reorder: f64,
    /// Longest time that a reordered frame is held back.
    pub reorder_by: Duration,
    /// One bit flips somewhere behind the Ethernet header.
    pub corrupt: f64,
    /// Of the corrupted frames, how many have their TCP checksum repaired by the network, so that only
    /// MPA's CRC can notice.
    pub repair_checksum: f64,
    /// Propagation delay.
    pub delay: Duration,
    /// Additional random delay (order is kept).
    pub jitter: Duration,
    /// Line rate in bytes per second; `None` is infinitely fast.
    pub rate_bytes: Option<u64>,
    /// Frames that may wait for the line; more are dropped at the tail.
    pub queue_frames: usize,
    /// Nothing passes in this time span.
    pub blackout: Option<(Instant, Instant)>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            loss: 0.0,
            bursts: None,
            duplicate: 0.0,
            reorder: 0.0,
            reorder_by: Duration::ZERO,
            corrupt: 0.0,
            repair_checksum: 0.0,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate_bytes: None,
            queue_frames: usize::MAX,
            blackout: None,
        }
    }
}

/// What a direction has done so far, in frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Given to it.
    pub frames: u64,
    /// Lost by chance, alone or in bursts, or in a blackout.
    pub lost: u64,
    /// Dropped because the queue before the line was full.
    pub overflowed: u64,
    /// Passed twice.
    pub duplicated: u64,
    /// Held back so that others may overtake.
    pub reordered: u64,
    /// With a bit flipped.
    pub corrupted: u64,
}

/// The state of one direction: where its random numbers and its line stand.
#[derive(Debug)]
pub struct Direction {
    pub(super) faults: Faults,
    rng: SmallRng,
    in_burst: bool,
    /// When the line has sent what was given to it and still waits or is being sent, in order.
    departures: VecDeque<Instant>,
    /// Latest delivery of an in-order frame: jitter alone never reorders.
    last_due: Instant,
    tally: Tally,
}

/// One arrival of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fate {
    /// When it arrives.
    pub due: Instant,
    /// Which bit is flipped (a number to reduce modulo the bits there are), and whether the checksum follows.
    flip: Option<(u64, bool)>,
}

impl Fate {
    /// Damages the frame as was decided for this arrival.
    pub fn damage(&self, frame: &mut [u8]) {
        if let Some((bit, repair)) = self.flip {
            flip_bit(frame, bit, repair);
        }
    }
}

impl Direction {
    /// A direction at rest.
    pub fn new(faults: Faults, seed: u64) -> Self {
        Self {
            faults,
            rng: SmallRng::seed_from_u64(seed),
            in_burst: false,
            departures: VecDeque::new(),
            last_due: Instant::ZERO,
            tally: Tally::default(),
        }
    }

    /// What has been done so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.rng.random::<f64>() < p
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        let ns = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        if ns == 0 { Duration::ZERO } else { Duration::from_nanos(self.rng.random_range(0..=ns)) }
    }

    /// Decides what becomes of a frame of `len` bytes sent at `now`: no, one or two arrivals.
    pub fn decide(&mut self, now: Instant, len: usize) -> SmallVec<[Fate; 2]> {
        let faults = self.faults;
        self.tally.frames += 1;
        if let Some(bursts) = faults.bursts {
            let flip = if self.in_burst { bursts.leave } else { bursts.enter };
            self.in_burst ^= self.chance(flip);
        }
        let burst_loss = faults.bursts.filter(|_| self.in_burst).map_or(0.0, |b| b.loss);
        let dark = faults.blackout.is_some_and(|(from, to)| from <= now && now < to);
        // Both dice are thrown always: the trace must not depend on what the first one showed.
        if [self.chance(faults.loss), self.chance(burst_loss), dark].contains(&true) {
            self.tally.lost += 1;
            return SmallVec::new();
        }
        while self.departures.front().is_some_and(|at| *at <= now) {
            self.departures.pop_front();
        }
        if self.departures.len() >= faults.queue_frames {
            self.tally.overflowed += 1;
            return SmallVec::new();
        }
        let twice = self.chance(faults.duplicate);
        self.tally.duplicated += u64::from(twice);
        (0..=u8::from(twice)).map(|_| self.arrival(now, len)).collect()
    }

    fn arrival(&mut self, now: Instant, len: usize) -> Fate {
        let faults = self.faults;
        let mut sent = now;
        if let Some(rate) = faults.rate_bytes {
            let ns = (len as u64).saturating_mul(1_000_000_000) / rate.max(1);
            let free = self.departures.back().copied().unwrap_or_default();
            sent = free.max(now) + Duration::from_nanos(ns);
            self.departures.push_back(sent);
        }
        let due = (sent + faults.delay + self.up_to(faults.jitter)).max(self.last_due);
        self.last_due = due;
        let held = self.chance(faults.reorder);
        self.tally.reordered += u64::from(held);
        let late = if held { self.up_to(faults.reorder_by) } else { Duration::ZERO };
        let corrupt = self.chance(faults.corrupt);
        self.tally.corrupted += u64::from(corrupt);
        let flip = corrupt.then(|| (self.rng.next_u64(), self.chance(faults.repair_checksum)));
        Fate { due: due + late, flip }
    }
}

/// Flips one bit behind the Ethernet header; with `repair`, one of the TCP payload, and the checksum
/// follows, so that TCP cannot see it.
fn flip_bit(frame: &mut [u8], bit: u64, repair: bool) {
    const ETHERNET: usize = 14;
    let tcp = tcp_header(frame).filter(|_| repair);
    let from = tcp.map_or(ETHERNET, |tcp| tcp + usize::from(frame[tcp + 12] >> 4) * 4);
    let bits = frame.len().saturating_sub(from) as u64 * 8;
    if bits == 0 {
        return;
    }
    let bit = bit % bits;
    let byte = from + (bit / 8) as usize;
    let before = frame[byte];
    frame[byte] ^= 1 << (bit % 8);
    if let Some(tcp) = tcp {
        // RFC 1624 equation 3, for the one 16-bit word that changed.
        let word = |b: u8| if (byte - tcp).is_multiple_of(2) { u32::from(b) << 8 } else { u32::from(b) };
        let field = u32::from(u16::from_be_bytes([frame[tcp + 16], frame[tcp + 17]]));
        let mut sum = (!field & 0xffff) + (!word(before) & 0xffff) + word(frame[byte]);
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        frame[tcp + 16..tcp + 18].copy_from_slice(&(!sum as u16).to_be_bytes());
    }
}

/// Where the TCP header of an untagged IPv4 or IPv6 frame begins, if the whole header is there.
fn tcp_header(frame: &[u8]) -> Option<usize> {
    const TCP: u8 = 6;
    let (protocol, at) = match frame.get(12..14)? {
        [0x08, 0x00] => (*frame.get(23)?, 14 + usize::from(frame.get(14)? & 15) * 4),
        [0x86, 0xdd] => (*frame.get(20)?, 54),
        _ => return None,
    };
    let header = usize::from(frame.get(at + 12)? >> 4) * 4;
    (protocol == TCP && frame.len() > at + header.max(20)).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: usize = 1000;

    /// A line of a frame in a millisecond.
    fn line() -> Faults {
        Faults { rate_bytes: Some(1_000_000), ..Faults::default() }
    }

    fn ms(n: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(n)
    }

    #[test]
    fn the_queue_holds_what_waits_for_the_line_and_not_what_is_on_its_way() {
        let faults = Faults { queue_frames: 3, delay: Duration::from_secs(1), ..line() };
        let mut direction = Direction::new(faults, 1);
        let due: Vec<_> = (0..5).flat_map(|_| direction.decide(ms(0), FRAME)).map(|f| f.due).collect();
        assert_eq!(due, [ms(1001), ms(1002), ms(1003)]);
        assert_eq!(direction.tally(), Tally { frames: 5, overflowed: 2, ..Tally::default() });
        // One has left the queue and is under way for a second yet.
        assert_eq!(direction.decide(ms(1), FRAME).len(), 1);
        assert_eq!(direction.decide(ms(1), FRAME).len(), 0);
    }

    #[test]
    fn what_is_done_is_counted() {
        let faults = Faults {
            loss: 0.1,
            duplicate: 0.2,
            reorder: 0.3,
            reorder_by: Duration::from_millis(1),
            corrupt: 0.4,
            ..Faults::default()
        };
        let mut direction = Direction::new(faults, 7);
        let arrivals: Vec<_> = (0..1000).flat_map(|_| direction.decide(ms(0), FRAME)).collect();
        let tally = direction.tally();
        assert_eq!(arrivals.len() as u64, tally.frames - tally.lost + tally.duplicated);
        assert_eq!(arrivals.iter().filter(|f| f.flip.is_some()).count() as u64, tally.corrupted);
        assert!((50..150).contains(&tally.lost) && (120..240).contains(&tally.duplicated), "{tally:?}");
        assert!(arrivals.iter().filter(|f| f.due > ms(0)).count() as u64 <= tally.reordered, "{tally:?}");
    }
}
