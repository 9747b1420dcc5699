//! The work for one segment against the number of held bytes and known FPDUs, counted in steps instead of time.

use super::*;
use crate::{
    framing::Mulpdu,
    link::FrameWriter,
    mpa::{frames::Fpdus, layout::Layout},
    sim::{SimLink, Wire, WireConfig},
    steps,
    ulp::{ConnId, Event, Pulled, Refusal, Ulpdu, UlpduWriter},
};

const CONN: ConnId = ConnId { index: 0, generation: 0 };

/// An upper layer that places either everything early or nothing.
struct Picky {
    early: bool,
}

impl Ulp for Picky {
    type Placed = ();

    fn place(&mut self, _: ConnId, _: &Ulpdu<'_>, arrival: Arrival) -> Result<(), Refusal> {
        if self.early || arrival == Arrival::InOrder { Ok(()) } else { Err(Refusal::Withhold) }
    }

    fn deliver(&mut self, _: ConnId, (): ()) -> Result<(), Refusal> {
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        true
    }

    fn pull(&mut self, _: ConnId, _: &mut UlpduWriter<'_, '_>) -> Pulled {
        Pulled::Nothing
    }

    fn acked(&mut self, _: ConnId, _: StreamOffset) {}
    fn event(&mut self, _: ConnId, _: Event) {}
}

struct Lab {
    receiver: Receiver<(), Fpdus>,
    ulp: Picky,
    link: SimLink,
    peer: SimLink,
}

impl Lab {
    fn new(markers: bool, early: bool) -> Self {
        let (_, link, peer) = Wire::new(WireConfig { rx_chunks: 1 << 14, ..WireConfig::default() });
        let mut receiver = Receiver::new();
        receiver.expect(Fpdus { layout: Layout { origin: 0, markers }, crc: true });
        Self { receiver, ulp: Picky { early }, link, peer }
    }

    /// Processes the payload `bytes` with room for `most` held bytes; returns whether it was taken, and the steps.
    /// The beginning of the stream has not arrived.
    fn take(&mut self, offset: usize, bytes: &[u8], most: usize) -> (bool, usize) {
        self.peer.inject(bytes);
        let mut batch = Vec::new();
        self.link.receive(&mut batch, 1);
        let frame = batch.pop().unwrap();
        let arrival = tcp::NewPayload {
            offset: offset as u64,
            start: 0,
            len: bytes.len(),
            contiguous: 0,
            pushed: true,
        };
        let carried = Carried { payload: arrival, frame, spare: 0, fast: false };
        let mut upper = Upper { ulp: &mut self.ulp, conn: CONN };
        let mut taken = false;
        let steps = steps::of(|| {
            let (receiver, link) = (&mut self.receiver, &mut self.link);
            let (ok, outcome) = receiver.receive(Instant::ZERO, &mut upper, link, carried, most, Ok(()));
            assert_eq!(outcome, Ok(()));
            taken = ok;
        });
        (taken, steps)
    }
}

/// A stream of FPDUs with `ulpdu` bytes each, at least `len` bytes long.
fn stream(ulpdu: usize, len: usize, markers: bool) -> Vec<u8> {
    let layout = Layout { origin: 0, markers };
    let mut stream = Vec::new();
    let mut memory = vec![0; 1 << 17];
    while stream.len() < len {
        let chunks = [&mut memory[..]].into_iter().collect();
        let mut out = FrameWriter::new(chunks, 0, 1 << 17);
        let mut writer =
            UlpduWriter::begin(&mut out, layout, stream.len() as u64, Mulpdu::of(ulpdu), true).unwrap();
        writer.fill(ulpdu, |_, space| space.fill(7));
        let written = writer.finish();
        drop(out);
        stream.extend_from_slice(&memory[..written]);
    }
    stream
}

/// The steps for one byte for which there is no room, in a receiver that knows about `fpdus` held FPDUs of 24 bytes
/// beyond a gap.
fn cost_of_a_refused_byte(fpdus: usize) -> usize {
    let mut lab = Lab::new(true, false);
    let bytes = stream(18, 24 * fpdus + 2000, true);
    for at in (512..24 * fpdus).step_by(1400) {
        lab.take(at, &bytes[at..at + 1400], usize::MAX);
    }
    assert!(lab.receiver.track.known.len() >= fpdus * 9 / 10, "{}", lab.receiver.track.known.len());
    let (taken, steps) = lab.take(bytes.len() - 1, &[0], lab.receiver.held_bytes());
    assert!(!taken);
    steps
}

#[test]
fn a_byte_that_is_refused_costs_the_same_whatever_is_known() {
    let (few, many) = (cost_of_a_refused_byte(100), cost_of_a_refused_byte(8000));
    assert!(many <= few + 2 && many < 100, "{few} steps with 100 FPDUs, {many} with 8000");
}

/// The steps for the most expensive of the segments `pieces` of `bytes`, without the first `skip`.
fn worst(lab: &mut Lab, bytes: &[u8], pieces: impl Iterator<Item = (usize, usize)>, skip: usize) -> usize {
    pieces.map(|(from, to)| lab.take(from, &bytes[from..to], usize::MAX).1).skip(skip).max().unwrap()
}

/// FPDUs that fill the holes between thousands of others.
#[test]
fn a_segment_in_the_middle_of_thousands_costs_what_it_contains() {
    for early in [false, true] {
        let mut lab = Lab::new(true, early);
        let bytes = stream(18, 200_000, true);
        let segment = |n: usize| (512 * n, 512 * (n + 1));
        let holes = (3..380).step_by(2).map(segment);
        let between = (2..380).step_by(2).map(segment);
        let worst = worst(&mut lab, &bytes, holes.chain(between), 0);
        assert!(worst < 6000, "{worst} steps for a segment of 21 FPDUs");
    }
}

/// Single bytes that form one long FPDU, the last one first: no segment walks over all the others.
#[test]
fn a_byte_of_a_long_fpdu_costs_the_same_however_many_pieces_there_are() {
    for markers in [false, true] {
        let mut lab = Lab::new(markers, true);
        let bytes = stream(60_000, 1, markers);
        let worst = worst(&mut lab, &bytes, (1..4000).rev().map(|at| (at, at + 1)), 8);
        assert!(worst < 200, "{worst} steps for one byte");
    }
}

/// An FPDU beyond a gap with a wrong CRC is not checked again for each byte before it.
#[test]
fn an_invalid_fpdu_beyond_a_gap_is_checked_once() {
    let mut lab = Lab::new(true, true);
    let mut bytes = stream(60_000, 1, true);
    *bytes.last_mut().unwrap() ^= 1;
    for (from, to) in (516..bytes.len()).step_by(1024).map(|at| (at, bytes.len().min(at + 1024))) {
        lab.take(from, &bytes[from..to], usize::MAX);
    }
    // The gap contains the FPDU's header, which does not arrive here.
    assert_eq!(lab.receiver.counters().crc_errors, 0);
    let mut lab = Lab::new(true, true);
    let mut bytes = stream(1000, 30_000, true);
    let second = Layout { origin: 0, markers: true }.end(0, 1000) as usize;
    let third = second + second;
    bytes[third - 1] ^= 1;
    lab.take(second, &bytes[second..third], usize::MAX);
    assert_eq!(lab.receiver.counters().crc_errors, 1);
    for at in (second - 400..second - 300).rev() {
        lab.take(at, &bytes[at..=at], usize::MAX);
    }
    // The same byte, refused repeatedly.
    for _ in 0..10 {
        lab.take(third, &bytes[third..=third], lab.receiver.held_bytes());
    }
    assert_eq!(lab.receiver.counters().crc_errors, 1);
}
