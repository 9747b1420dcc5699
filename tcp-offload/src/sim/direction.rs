//! One direction of a wire as a pure model from frames and times to frames and times. The same seed and the same
//! frames at the same times give the same trace.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use rand::{Rng, RngCore, SeedableRng, rngs::SmallRng};

use super::{
    Faults,
    faults::{Aim, Recut},
    packet::{self, Ip, Tcp},
};
use crate::{counters, seq::SeqNum, time::Instant};

/// Largest number of connections whose highest sequence numbers are kept, for resets with numbers beyond them.
const MAX_FLOWS: usize = 1 << 12;

counters! {
    /// Counters of a direction's effects on frames.
    pub struct Tally in "wire" {
        /// Frames sent into the direction.
        frames,
        /// Lost by chance, in a burst or in a blackout.
        lost,
        /// Dropped because the queue was full.
        queue_full,
        /// Larger than the path's MTU.
        too_big,
        /// Marked Congestion Experienced.
        marked,
        /// Duplicated.
        duplicated,
        /// Held back so that other frames overtake it.
        reordered,
        /// Corrupted so that the TCP checksum detects it.
        corrupted,
        /// Corrupted with the TCP checksum repaired.
        corrupted_unseen,
        /// Splits of a segment in two.
        split,
        /// Joined to the previous segment.
        joined,
        /// Forged resets injected.
        resets,
    }
}

/// A frame that others overtake.
#[derive(Debug)]
struct Late {
    /// The frame continues after this number of further overtakers, or at `until`.
    overtakers: u32,
    until: Instant,
    frame: Vec<u8>,
}

/// One direction of a wire with its [`Faults`].
///
/// A caller passes frames to [`send`](Self::send) and takes those that have arrived from
/// [`deliver`](Self::deliver), at [`next_due`](Self::next_due) or later. A direction reads no clock.
#[derive(Debug)]
pub struct Direction {
    faults: Faults,
    rng: SmallRng,
    in_burst: bool,
    /// Departure times of the frames that wait for the line or are on it.
    line: VecDeque<Instant>,
    /// Latest arrival time of a frame in order; jitter alone never reorders.
    last_due: Instant,
    /// A segment that waits to be joined with the next one, and the end of its wait.
    joining: Option<(Instant, Vec<u8>)>,
    late: Vec<Late>,
    /// By time of arrival, then by order of sending.
    due: BTreeMap<(Instant, u64), Vec<u8>>,
    serial: u64,
    /// Highest sequence number seen of each flow.
    highest: BTreeMap<Vec<u8>, SeqNum>,
    tally: Tally,
}

impl Direction {
    /// A direction without frames in flight.
    pub fn new(faults: Faults, seed: u64) -> Self {
        Self {
            faults,
            rng: SmallRng::seed_from_u64(seed),
            in_burst: false,
            line: VecDeque::new(),
            last_due: Instant::ZERO,
            joining: None,
            late: Vec::new(),
            due: BTreeMap::new(),
            serial: 0,
            highest: BTreeMap::new(),
            tally: Tally::default(),
        }
    }

    /// The faults in force.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Replaces the faults for frames that are sent from now on.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// The counters so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Frames that are on their way.
    pub fn in_flight(&self) -> usize {
        self.due.len() + self.late.len() + usize::from(self.joining.is_some())
    }

    /// The time at which [`Self::deliver`] returns the next frame, if no more frames are sent.
    pub fn next_due(&self) -> Option<Instant> {
        let due = self.due.keys().next().map(|key| key.0);
        let late = self.late.iter().map(|l| l.until).min();
        let joining = self.joining.as_ref().map(|j| j.0);
        [due, late, joining].into_iter().flatten().min()
    }

    /// Takes the next frame that has arrived by `now`.
    pub fn deliver(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.expire(now);
        let entry = self.due.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(entry.remove())
    }

    /// Sends a frame, from its Ethernet header on, at `now`, which must never decrease. Returns a frame for the
    /// sender, if any: the ICMP error of a hop whose MTU is too small.
    pub fn send(&mut self, now: Instant, frame: &[u8]) -> Option<Vec<u8>> {
        self.expire(now);
        self.tally.frames += 1;
        if let Some(mtu) = self.faults.mtu.filter(|mtu| now >= mtu.from)
            && Ip::of(frame).is_some_and(|ip| ip.len() > usize::from(mtu.bytes))
        {
            self.tally.too_big += 1;
            return if mtu.icmp { packet::too_big(frame, mtu.bytes) } else { None };
        }
        if self.is_lost(now) {
            self.tally.lost += 1;
            return None;
        }
        self.inject_reset(now, frame);
        match self.faults.recut {
            Some(recut) => self.recut(now, frame, &recut),
            None => self.enqueue(now, frame.to_vec()),
        }
        None
    }

    fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.rng.random::<f64>() < p
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        let ns = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.rng.random_range(0..=ns))
    }

    fn is_lost(&mut self, now: Instant) -> bool {
        let faults = self.faults;
        if let Some(bursts) = faults.bursts {
            let change = if self.in_burst { bursts.leave } else { bursts.enter };
            self.in_burst ^= self.chance(change);
        }
        let in_burst = faults.bursts.filter(|_| self.in_burst).map_or(0.0, |b| b.loss);
        let dark = faults.blackout.is_some_and(|b| b.covers(now));
        self.chance(faults.loss) || self.chance(in_burst) || dark
    }

    /// Injects a forged reset before `frame`, if `frame` is a TCP segment and chance decides so.
    fn inject_reset(&mut self, now: Instant, frame: &[u8]) {
        let Some(resets) = self.faults.resets else { return };
        let Some(tcp) = Tcp::of(frame) else { return };
        let Some((addresses, ports)) = tcp.flow(frame) else { return };
        if self.highest.len() >= MAX_FLOWS {
            self.highest.clear();
        }
        let next = tcp.next_seq(frame);
        let highest = self.highest.entry([addresses, ports].concat()).or_insert(next);
        *highest = highest.latest(next);
        let highest = *highest;
        if !self.chance(resets.chance) {
            return;
        }
        let seq = match resets.aim {
            Aim::Next => tcp.seq(frame),
            Aim::Near => highest.add(self.rng.random_range(1..1000)),
            Aim::Far => highest.add(self.rng.random_range(1 << 30..1 << 31)),
        };
        if let Some(forged) = packet::reset(frame, seq) {
            self.tally.resets += 1;
            // It arrives before all data that is sent from now on. Later, that data could have reached its number, which
            // would make it the peer's own reset.
            let due = self.due_at(now, forged.len());
            self.arrive(due, forged);
        }
    }

    /// The middlebox: joins the segment with a waiting one, makes it wait, or splits it.
    fn recut(&mut self, now: Instant, frame: &[u8], recut: &Recut) {
        let mut segment = frame.to_vec();
        if let Some((_, waiting)) = self.joining.take() {
            if let Some(joined) = packet::join(&waiting, &segment, recut.most_bytes) {
                self.tally.joined += 1;
                segment = joined;
            } else {
                self.enqueue(now, waiting);
            }
        }
        let payload = Tcp::of(&segment).map_or(0, |tcp| tcp.payload_len());
        if payload > 0 && self.chance(recut.join) {
            self.joining = Some((now + recut.wait, segment));
            return;
        }
        self.cut_and_enqueue(now, segment, recut.split);
    }

    fn cut_and_enqueue(&mut self, now: Instant, mut segment: Vec<u8>, split: f64) {
        while let payload @ 2.. = Tcp::of(&segment).map_or(0, |tcp| tcp.payload_len()) {
            if !self.chance(split) {
                break;
            }
            let at = self.rng.random_range(1..payload);
            let Some([first, rest]) = packet::split(&segment, at) else { break };
            self.tally.split += 1;
            self.enqueue(now, first);
            segment = rest;
        }
        self.enqueue(now, segment);
    }

    /// Puts a frame into the line's queue, which may drop, mark, corrupt or duplicate it.
    fn enqueue(&mut self, now: Instant, mut frame: Vec<u8>) {
        while self.line.front().is_some_and(|left| *left <= now) {
            self.line.pop_front();
        }
        if self.line.len() >= self.faults.queue_frames {
            self.tally.queue_full += 1;
            return;
        }
        let marks = self.line.len() >= self.faults.mark_frames || self.chance(self.faults.mark);
        if marks && packet::mark(&mut frame) {
            self.tally.marked += 1;
        }
        self.corrupt(&mut frame);
        if self.chance(self.faults.duplicate) {
            self.tally.duplicated += 1;
            self.travel(now, frame.clone());
        }
        self.travel(now, frame);
    }

    fn corrupt(&mut self, frame: &mut Vec<u8>) {
        if !self.chance(self.faults.corrupt) {
            return;
        }
        let bit = self.rng.next_u64();
        if self.chance(self.faults.repair_checksum) {
            self.tally.corrupted_unseen += u64::from(packet::flip_unseen(frame, bit));
        } else {
            packet::flip(frame, bit);
            self.tally.corrupted += 1;
        }
    }

    /// When the next frame arrives, by line rate and propagation delay.
    fn due_at(&mut self, now: Instant, len: usize) -> Instant {
        let faults = self.faults;
        let mut left = now;
        if let Some(rate) = faults.rate_bytes {
            let ns = (len as u64).saturating_mul(1_000_000_000) / rate.max(1);
            left = self.line.back().copied().unwrap_or(now).max(now) + Duration::from_nanos(ns);
            self.line.push_back(left);
        }
        let due = (left + faults.delay + self.up_to(faults.jitter)).max(self.last_due);
        self.last_due = due;
        due
    }

    /// Lets a frame arrive, unless it is reordered.
    fn travel(&mut self, now: Instant, frame: Vec<u8>) {
        let faults = self.faults;
        let due = self.due_at(now, frame.len());
        if self.chance(faults.reorder) {
            self.tally.reordered += 1;
            let overtakers = self.rng.random_range(1..=faults.reorder_depth.max(1));
            let until = due + self.up_to(faults.reorder_by);
            self.late.push(Late { overtakers, until, frame });
            return;
        }
        self.arrive(due, frame);
        let mut index = 0;
        while let Some(late) = self.late.get_mut(index) {
            late.overtakers -= 1;
            if late.overtakers == 0 {
                let late = self.late.remove(index);
                self.arrive(due.min(late.until), late.frame);
            } else {
                index += 1;
            }
        }
    }

    fn arrive(&mut self, due: Instant, frame: Vec<u8>) {
        self.serial += 1;
        self.due.insert((due, self.serial), frame);
    }

    /// Forwards the frames whose wait ends at or before `now`.
    fn expire(&mut self, now: Instant) {
        if let Some((until, frame)) = self.joining.take_if(|(until, _)| *until <= now) {
            let split = self.faults.recut.map_or(0.0, |recut| recut.split);
            self.cut_and_enqueue(until, frame, split);
        }
        while let Some(index) = self.late.iter().position(|late| late.until <= now) {
            let late = self.late.remove(index);
            self.arrive(late.until, late.frame);
        }
    }
}
