//! The receive direction out of order: FPDUs beyond gaps are placed when markers lead to them.

use proptest::prelude::*;
use xwarp_tcp::mpa::{MpaConfig, MpaError};

use crate::{
    receive::{lengths, receiver},
    support::{End, Reference, connect, ulpdus},
};

/// A few cuts, and an order of the pieces, some of which are repeated or extended.
#[derive(Debug, Clone)]
struct Disorder {
    cuts: Vec<usize>,
    picks: Vec<prop::sample::Index>,
    extra: Vec<(prop::sample::Index, usize)>,
}

fn disorder() -> impl Strategy<Value = Disorder> {
    let cuts = proptest::collection::vec(prop_oneof![1usize..100, 500usize..1448], 1..20);
    let picks = proptest::collection::vec(any::<prop::sample::Index>(), 1..40);
    let extra = proptest::collection::vec((any::<prop::sample::Index>(), 1usize..3000), 0..10);
    (cuts, picks, extra).prop_map(|(cuts, picks, extra)| Disorder { cuts, picks, extra })
}

impl Disorder {
    /// Ranges that cover `len` bytes, at most a few hundred of them, in a random order, with `extra` ranges in between.
    fn ranges(&self, len: usize) -> Vec<(usize, usize)> {
        let (mut pieces, mut at) = (Vec::new(), 0);
        for cut in self.cuts.iter().cycle() {
            if at == len {
                break;
            }
            let to = (at + cut.max(&(len / 400))).min(len);
            pieces.push((at, to));
            at = to;
        }
        let mut order = Vec::new();
        let mut picks = self.picks.iter().cycle();
        let mut extra = self.extra.iter();
        while !pieces.is_empty() {
            order.push(pieces.swap_remove(picks.next().unwrap().index(pieces.len())));
            if let Some((at, more)) = extra.next() {
                let at = at.index(len);
                order.push((at, (at + more).min(len)));
            }
        }
        order
    }
}

/// Which FPDUs can be placed when the bytes `have` were received: those that are complete and in order, contain a
/// marker, or follow an FPDU that can be placed.
fn placeable(stream: &Reference, have: &[bool], markers: bool) -> Vec<bool> {
    let mut known = vec![false; stream.ranges.len()];
    let mut before = true;
    for (n, &(from, to)) in stream.ranges.iter().enumerate() {
        let has_marker = markers && (from..to).any(|at| at % 512 == 0);
        known[n] = have[from..to].iter().all(|h| *h) && (before || has_marker);
        before = known[n];
    }
    known
}

proptest! {
    #[test]
    fn prop_islands_place_every_reachable_fpdu_and_deliver_in_order(
        lengths in lengths(40), disorder in disorder(), markers: bool, crc: bool,
    ) {
        let (mut end, start, stream, data) = receiver(&lengths, markers, crc);
        let mut have = vec![false; stream.bytes.len()];
        for (from, to) in disorder.ranges(stream.bytes.len()) {
            prop_assert!(end.receive(start + from, &stream.bytes[from..to]));
            have[from..to].fill(true);
            let placeable = placeable(&stream, &have, markers);
            let expected: Vec<_> = (0..data.len()).filter(|n| placeable[*n]).map(|n| &data[n]).collect();
            let mut placed: Vec<_> = end.ulp.placed.iter().map(|p| &p.bytes).collect();
            prop_assert_eq!(placed.len(), expected.len());
            for wanted in expected {
                let at = placed.iter().position(|p| *p == wanted);
                prop_assert!(at.is_some(), "not placed, or another was placed twice");
                placed.swap_remove(at.unwrap());
            }
            let in_order = placeable.iter().take_while(|p| **p).count();
            prop_assert_eq!(end.ulp.delivered.len(), in_order);
            // The held bytes are those that were received and could not be placed.
            let waiting = stream.ranges.iter().enumerate().filter(|(n, _)| !placeable[*n]);
            let waiting = waiting.flat_map(|(_, (from, to))| &have[*from..*to]).filter(|h| **h).count();
            prop_assert_eq!(end.session.held_bytes(), waiting);
        }
        prop_assert_eq!(&end.ulp.delivered, &data);
        prop_assert_eq!(end.ulp.stream_errors(), []);
        prop_assert_eq!((end.link.lent(), end.session.held_bytes()), (0, 0));
        let counters = end.session.counters();
        prop_assert_eq!(counters.placed_in_order + counters.placed_early, data.len() as u64);
        prop_assert_eq!(counters.delivered, data.len() as u64);
        prop_assert_eq!((counters.crc_errors, counters.marker_errors), (0, 0));
    }

    /// An early refusal means only that the ULPDU is offered again, in order.
    #[test]
    fn prop_islands_early_refusals_only_delay_placement(
        lengths in lengths(30), disorder in disorder(), crc: bool, rx_chunks in 0usize..100,
    ) {
        let (mut end, start, stream, data) = receiver(&lengths, true, crc);
        end.ulp.refuses_odd_early = true;
        end.link.rx_chunks = rx_chunks;
        for (from, to) in disorder.ranges(stream.bytes.len()) {
            prop_assert!(end.receive(start + from, &stream.bytes[from..to]));
            prop_assert!(end.link.lent() <= rx_chunks / 8 + 1, "more frames held than its share");
        }
        prop_assert_eq!(&end.ulp.delivered, &data);
        prop_assert_eq!(end.ulp.placed.len(), data.len());
        prop_assert!(end.ulp.placed.iter().all(|p| !p.early || p.bytes.first().is_none_or(|b| b % 2 == 0)));
        prop_assert_eq!((end.ulp.stream_errors(), end.link.lent()), (vec![], 0));
    }

    /// The hold limit refuses segments out of order; retransmission in order still gets everything through.
    #[test]
    fn prop_islands_hold_limit(
        lengths in lengths(30), disorder in disorder(), markers: bool, hold_bytes in 0usize..6000,
        refuses_odd_early: bool,
    ) {
        let config = MpaConfig { hold_bytes, ..MpaConfig::default() };
        let off = MpaConfig { markers: xwarp_tcp::mpa::Markers::Off, ..config.clone() };
        let (_, mut end) = connect(End::initiator(off), End::responder(MpaConfig {
            markers: if markers {
                xwarp_tcp::mpa::Markers::Require
            } else {
                xwarp_tcp::mpa::Markers::Off
            },
            ..config
        }));
        end.ulp.refuses_odd_early = refuses_odd_early;
        let start = end.contiguous;
        let data = ulpdus(&lengths);
        let stream = Reference::new(&data, markers, true);
        // An incomplete FPDU at the cursor is always held, however small the limit.
        let most = hold_bytes + stream.ranges.iter().map(|(from, to)| to - from).max().unwrap();
        for (from, to) in disorder.ranges(stream.bytes.len()) {
            end.receive(start + from, &stream.bytes[from..to]);
            prop_assert!(end.session.held_bytes() <= most);
        }
        // The sender retransmits everything as often as needed; each round advances at least one piece.
        for _ in 0..3 {
            for (from, to) in (0..stream.bytes.len()).step_by(700).map(|at| (at, at + 700)) {
                let to = to.min(stream.bytes.len());
                prop_assert!(end.receive(start + from, &stream.bytes[from..to]), "a segment in order is never refused");
                prop_assert!(end.session.held_bytes() <= most);
            }
        }
        prop_assert_eq!(&end.ulp.delivered, &data);
        prop_assert_eq!(end.ulp.placed.len(), data.len());
        prop_assert_eq!((end.ulp.stream_errors(), end.link.lent()), (vec![], 0));
    }

    /// The first copy of a byte is kept: later copies with other content change nothing.
    #[test]
    fn prop_islands_later_copies_do_not_matter(lengths in lengths(20), disorder in disorder()) {
        let (mut end, start, stream, data) = receiver(&lengths, true, true);
        let mut have: Vec<bool> = vec![false; stream.bytes.len()];
        for (from, to) in disorder.ranges(stream.bytes.len()) {
            let damaged: Vec<u8> =
                (from..to).map(|at| stream.bytes[at] ^ if have[at] { 0x55 } else { 0 }).collect();
            have[from..to].fill(true);
            prop_assert!(end.receive(start + from, &damaged));
        }
        prop_assert_eq!(&end.ulp.delivered, &data);
        prop_assert_eq!((end.ulp.stream_errors(), end.link.lent()), (vec![], 0));
    }

    /// Damage beyond a gap: all placed bytes are correct, and the error is reported when the cursor reaches it.
    #[test]
    fn prop_islands_corruption_is_detected(
        lengths in lengths(20), disorder in disorder(), at: prop::sample::Index, bit in 0u8..8,
    ) {
        let (mut end, start, mut stream, data) = receiver(&lengths, true, true);
        let at = at.index(stream.bytes.len());
        stream.bytes[at] ^= 1 << bit;
        for (from, to) in disorder.ranges(stream.bytes.len()) {
            prop_assert!(end.receive(start + from, &stream.bytes[from..to]));
        }
        end.peer_closed();
        prop_assert_eq!(end.ulp.stream_errors().len(), 1);
        prop_assert_eq!(&end.ulp.delivered, &data[..end.ulp.delivered.len()]);
        prop_assert!(end.ulp.placed.iter().all(|p| data.contains(&p.bytes)), "garbage was placed");
        end.session.release(&mut end.link);
        prop_assert_eq!(end.link.lent(), 0);
    }
}

#[test]
fn rfc5044_s4_3_whole_segments_beyond_a_gap_are_placed_and_their_frames_recycled() {
    let (mut end, start, stream, data) = receiver(&[1400; 20], true, true);
    for (from, to) in &stream.ranges[1..] {
        end.receive(start + from, &stream.bytes[*from..*to]);
        assert_eq!((end.link.lent(), end.session.held_bytes()), (0, 0));
    }
    assert_eq!((end.ulp.placed.len(), end.ulp.delivered.len()), (19, 0));
    assert_eq!(end.session.counters().placed_early, 19);
    let (from, to) = stream.ranges[0];
    end.receive(start + from, &stream.bytes[from..to]);
    assert_eq!(end.ulp.delivered, data);
}

/// A payload may be refused although an FPDU in it was placed. TCP sees no gap then, but the fast path must not take this FPDU
/// again.
#[test]
fn a_session_that_knows_placed_fpdus_allows_no_fast_path() {
    let config = MpaConfig { hold_bytes: 0, ..MpaConfig::default() };
    let (_, mut end) = connect(End::initiator(MpaConfig::default()), End::responder(config));
    let (start, data) = (end.contiguous, ulpdus(&[1400; 3]));
    let stream = Reference::new(&data, true, true);
    let second = stream.ranges[1].0;
    assert!(end.session.allows_fast_path());
    assert!(!end.receive(start + second, &stream.bytes[second..stream.ranges[2].0 + 600]));
    assert_eq!((end.ulp.placed.len(), end.session.held_bytes()), (1, 0));
    assert!(!end.session.allows_fast_path());
    assert!(end.receive(start, &stream.bytes));
    assert!(end.session.allows_fast_path());
    assert_eq!((end.ulp.placed.len(), &end.ulp.delivered), (3, &data));
}

#[test]
fn rfc5044_s6_without_markers_nothing_is_placed_beyond_a_gap() {
    let (mut end, start, stream, data) = receiver(&[1400, 1400], false, true);
    let second = stream.ranges[1].0;
    end.receive(start + second, &stream.bytes[second..]);
    assert!(end.ulp.placed.is_empty());
    assert_eq!((end.link.lent(), end.session.held_bytes()), (1, stream.bytes.len() - second));
    end.receive(start, &stream.bytes[..second]);
    assert_eq!(end.ulp.delivered, data);
    assert_eq!(end.link.lent(), 0);
}

/// RFC 5044 section 8, code 3: the check when a gap closes. Without CRC, a wrong marker beyond the gap leads to an
/// offset where no FPDU begins.
#[test]
fn rfc5044_s8_code_3_islands_that_do_not_fit_the_lengths() {
    let inner = Reference::new(&[vec![1; 34]], false, false);
    let (mut end, start, mut stream, _) = receiver(&[1000, 1000], true, false);
    stream.bytes[600..640].copy_from_slice(&inner.bytes);
    // Bytes at 600 look like an FPDU, and those at 640, right after it, like another: the markers at 1024 and at 1536
    // belong to the second FPDU, whose header is at 1016, and point to 640.
    stream.bytes[640..642].copy_from_slice(&1000u16.to_be_bytes());
    stream.bytes[1026..1028].copy_from_slice(&(1024u16 - 640).to_be_bytes());
    stream.bytes[1538..1540].copy_from_slice(&(1536u16 - 640).to_be_bytes());
    end.receive(start + 516, &stream.bytes[516..1700]);
    assert_eq!(end.ulp.placed.len(), 1, "nothing contradicts it yet");
    end.receive(start, &stream.bytes[..516]);
    assert_eq!(end.ulp.stream_errors(), [MpaError::MarkerMismatch]);
    assert!(end.ulp.delivered.is_empty());
}

/// The same in one segment: the error does not wait for the rest of the FPDU that the marker contradicts.
#[test]
fn rfc5044_s8_code_3_a_marker_that_contradicts_an_unfinished_fpdu() {
    let lie = |ulpdu: u16| {
        let (mut end, start, mut stream, _) = receiver(&[1000], true, false);
        // Bytes at 400 look like an FPDU, and the marker at 512 points to it.
        stream.bytes[400..402].copy_from_slice(&ulpdu.to_be_bytes());
        stream.bytes[514..516].copy_from_slice(&(512u16 - 400).to_be_bytes());
        end.receive(start, &stream.bytes[..800]);
        end
    };
    let end = lie(150);
    assert_eq!(end.ulp.stream_errors(), [MpaError::MarkerMismatch]);
    assert!(end.ulp.delivered.is_empty());
    assert_eq!((end.link.lent(), end.session.held_bytes()), (0, 0));
    // An FPDU cannot end before its own marker, so nothing contradicts it yet.
    let end = lie(34);
    assert!(end.ulp.placed.is_empty());
    assert_eq!(end.ulp.stream_errors(), []);
}

/// A peer that sends single bytes in order costs a few frames and one growing copy.
#[test]
fn rfc5044_a4_single_bytes_do_not_hold_frames() {
    let (mut end, start, stream, data) = receiver(&[3000, 20], true, true);
    for at in 0..stream.bytes.len() {
        assert!(end.receive(start + at, &stream.bytes[at..=at]));
        assert!(end.link.lent() <= 4);
    }
    assert_eq!(end.ulp.delivered, data);
    let counters = end.session.counters();
    assert_eq!(counters.copied_bytes as usize, stream.bytes.len() - 2 * 5, "4 are held, and 1 completes");
    assert_eq!((end.link.lent(), counters.refused_segments), (0, 0));
}

/// Pieces out of order are taken up to a fixed number, even when they are single bytes.
#[test]
fn rfc5044_a4_single_bytes_out_of_order_are_bounded() {
    let (mut end, start, stream, data) = receiver(&[9000], false, true);
    let mut taken = 0;
    for at in (1..stream.bytes.len()).step_by(2) {
        taken += usize::from(end.receive(start + at, &stream.bytes[at..=at]));
        assert!(end.link.lent() <= 4);
    }
    assert_eq!((taken, end.session.held_bytes()), (4096, 4096));
    assert!(end.receive(start, &stream.bytes));
    assert_eq!((end.ulp.delivered, end.link.lent()), (data, 0));
}

/// A refused segment leaves no state behind: its retransmission is checked again.
#[test]
fn rfc5044_s4_4_a_segment_refused_for_the_limit_is_checked_again_when_retransmitted() {
    let config = MpaConfig { hold_bytes: 100, ..MpaConfig::default() };
    let (_, mut end) = connect(End::initiator(config.clone()), End::responder(config));
    end.ulp.refuses_odd_early = true;
    let start = end.contiguous;
    let mut stream = Reference::new(&[vec![0; 600], vec![1; 600]], true, true);
    let second = stream.ranges[1].0;
    assert!(!end.receive(start + second, &stream.bytes[second..]));
    assert_eq!(end.session.counters().refused_early, 1);
    stream.bytes[second + 100] ^= 1;
    assert!(end.receive(start, &stream.bytes[..second]));
    assert!(end.receive(start + second, &stream.bytes[second..]));
    assert_eq!(end.ulp.stream_errors(), [MpaError::Crc]);
    assert_eq!(end.ulp.placed.len(), 1);
}
