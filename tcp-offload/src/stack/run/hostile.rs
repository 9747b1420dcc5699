//! A peer that chooses sequence numbers, timestamps, windows and acknowledgments freely finds no difference between the paths.

use std::time::Duration;

use proptest::prelude::*;

use crate::{
    link::Link,
    mpa::{Markers, MpaConfig, MpaRequest},
    sim::{Checksums, RawPeer, RawSegment, SimLink, Wire, WireConfig, fpdu, numbered, path},
    stack::{Polling, twins::Cabled},
    time::Instant,
    wire::{Flags, Inbound, parse},
};

/// One segment.
#[derive(Debug, Clone)]
struct Odd {
    len: usize,
    /// FPDUs up to whose end the segment extends; `len` counts if none.
    whole: usize,
    /// Change of the timestamp clock.
    stamp: u32,
    window: Option<u16>,
    /// Bytes that are not acknowledged.
    unacked: i32,
    psh: bool,
    /// Distance from the next number in order.
    seq: i32,
}

fn odd() -> impl Strategy<Value = Odd> {
    // Half of the number space ahead decides between newer and older (RFC 7323 section 5.2).
    let half = 0x7fff_fff0u32..=0x8000_0010;
    let stamp = prop_oneof![12 => Just(0u32), 4 => 1u32..50, 1 => Just(u32::MAX), 3 => half];
    let window =
        prop_oneof![8 => Just(None), 1 => any::<u16>().prop_map(Some), 1 => (0u16..20).prop_map(Some)];
    let unacked = prop_oneof![6 => Just(0), 2 => 0i32..6000, 1 => -5i32..0];
    let seq = prop_oneof![12 => Just(0), 1 => -2000i32..3000];
    let len = prop_oneof![1 => Just(0usize), 6 => 1usize..1400];
    let whole = prop_oneof![1 => Just(0usize), 12 => 1usize..5];
    (len, whole, stamp, window, unacked, any::<bool>(), seq).prop_map(
        |(len, whole, stamp, window, unacked, psh, seq)| Odd { len, whole, stamp, window, unacked, psh, seq },
    )
}

/// Reads the segments of a twin for the peer.
struct Reader(SimLink, SimLink);

impl Reader {
    fn new() -> Self {
        let (_, near, far) = Wire::new(WireConfig::default());
        Self(near, far)
    }

    fn read(&mut self, peer: &mut RawPeer, frame: &[u8]) {
        self.1.inject(frame);
        let mut batch = Vec::new();
        self.0.receive(&mut batch, 9);
        for frame in batch {
            if let Ok(Inbound::Tcp(segment)) = parse(&self.0, &frame) {
                peer.receive(&segment);
            }
            self.0.recycle(frame);
        }
    }
}

/// A hostile peer and two twins, one of them without header prediction.
struct Scene {
    twins: [Cabled; 2],
    peer: RawPeer,
    reader: Reader,
    now: Instant,
    /// The rest of the peer's stream, from `at` on.
    stream: Vec<u8>,
    ends: Vec<usize>,
    at: usize,
}

impl Scene {
    fn new() -> Self {
        let mpa = MpaConfig { markers: Markers::Off, ..MpaConfig::default() };
        let mut twins = [true, false].map(|predict| Cabled::new(predict, 4096, Checksums::Computed));
        for twin in &mut twins {
            twin.listen(mpa.clone());
        }
        let peer = RawPeer::new(path(([10, 0, 0, 1], 40_000), ([10, 0, 0, 2], 7)), 77, true);
        let (mut stream, mut ends) = (Vec::new(), Vec::new());
        for number in 0..1000 {
            let ulpdu = numbered(number);
            let one = fpdu(stream.len() as u64, false, &ulpdu[..ulpdu.len().min(12 + number as usize % 200)]);
            stream.extend(one);
            ends.push(stream.len());
        }
        let now = Instant::ZERO + Duration::from_secs(1);
        let mut scene = Self { twins, peer, reader: Reader::new(), now, stream, ends, at: 0 };
        let syn = scene.peer.syn();
        scene.turn(&[syn]).unwrap();
        let request = MpaRequest { revision: 1, crc: true, ..MpaRequest::default() };
        let ack = scene.peer.data(&[]);
        scene.turn(&[ack]).unwrap();
        let request = scene.peer.data(&request.emit());
        scene.turn(&[request]).unwrap();
        scene.turn(&[]).unwrap();
        scene
    }

    fn turn(&mut self, frames: &[Vec<u8>]) -> Result<(), TestCaseError> {
        self.now += Duration::from_micros(20);
        let now = self.now;
        let [ours, general] = self.twins.each_mut().map(|twin| twin.turn(now, frames));
        prop_assert_eq!(&ours, &general);
        let [one, other] = self.twins.each_ref().map(Cabled::state);
        prop_assert_eq!(one, other);
        for frame in &ours {
            self.reader.read(&mut self.peer, frame);
        }
        Ok(())
    }

    fn segment(&mut self, odd: &Odd) -> Vec<u8> {
        self.peer.clock = self.peer.clock.wrapping_add(odd.stamp);
        let at = self.at.saturating_add_signed(odd.seq as isize).min(self.stream.len());
        let behind = self.ends.partition_point(|end| *end <= at);
        let end = match odd.whole {
            0 => (at + odd.len).min(self.stream.len()),
            whole => self.ends.get(behind + whole - 1).copied().unwrap_or(self.stream.len()),
        };
        let frame = self.peer.segment(&RawSegment {
            flags: Flags { ack: true, psh: odd.psh, ..Flags::default() },
            seq: at as i32 - self.at as i32,
            ack: -odd.unacked,
            window: odd.window.unwrap_or(u16::MAX),
            sack: &[],
            payload: &self.stream[at..end],
        });
        if odd.seq == 0 {
            self.peer.sent += (end - at) as u32;
            self.at = end;
        }
        frame
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn prop_a_hostile_peer_finds_no_difference_between_the_paths(steps in steps()) {
        play(&steps)?;
    }
}

type Step = (Vec<Odd>, u32, bool, u64);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((prop::collection::vec(odd(), 0..7), 0u32..3, any::<bool>(), 0u64..3000), 1..40)
}

fn play(steps: &[Step]) -> Result<(), TestCaseError> {
    let mut scene = Scene::new();
    for (odds, to_send, polled, wait) in steps {
        let frames: Vec<_> = odds.iter().map(|odd| scene.segment(odd)).collect();
        for twin in &mut scene.twins {
            twin.end.ulp.to_send += to_send;
            twin.end.stack.set_polling(if *polled { Polling::Yes } else { Polling::No });
        }
        scene.turn(&frames)?;
        if wait % 3 == 0 {
            scene.now += Duration::from_micros(*wait);
            scene.turn(&[])?;
        }
    }
    Ok(())
}

/// Three segments in a batch, each stamped less than 2^31 after the one before it, but the last one before `TS.Recent`
/// (RFC 7323 section 5.3, R1).
#[test]
fn rfc7323_s5_3_a_continued_run_does_not_escape_paws() {
    let mut scene = Scene::new();
    let plain = |stamp| Odd { len: 0, whole: 1, stamp, window: None, unacked: 0, psh: false, seq: 0 };
    for _ in 0..4 {
        let frame = scene.segment(&plain(1));
        scene.turn(&[frame]).unwrap();
        scene.turn(&[]).unwrap();
    }
    let frames = [1, 0x7fff_fff0, 0x7fff_fff0].map(|stamp| scene.segment(&plain(stamp)));
    let before = scene.twins[0].end.ulp.delivered;
    if let Err(difference) = scene.turn(&frames) {
        let delivered = scene.twins.each_ref().map(|twin| twin.end.ulp.delivered - before);
        panic!(
            "the fast and the general path deliver {delivered:?} of three messages: {:.300}",
            difference.to_string()
        );
    }
}
