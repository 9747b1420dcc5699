//! The receive direction in order and under any cut: every ULPDU is placed once and delivered, and broken streams end
//! with one error.

use proptest::prelude::*;
use xwarp_tcp::{mpa::MpaError, ulp::Event};

use crate::support::{End, Reference, connected, ulpdus};

/// Lengths of ULPDUs for which markers fall on every position of an FPDU.
pub fn lengths(most: usize) -> impl Strategy<Value = Vec<usize>> {
    let length = prop_oneof![2 => 1usize..40, 2 => 400usize..1430, 1 => 480usize..530, 1 => 2000usize..9000];
    proptest::collection::vec(length, 1..most)
}

/// A receiver, the offset of the stream that it will receive, the stream, and its ULPDUs.
pub fn receiver(lengths: &[usize], markers: bool, crc: bool) -> (End, usize, Reference, Vec<Vec<u8>>) {
    let (_, end) = connected(markers, crc);
    let start = end.contiguous;
    let data = ulpdus(lengths);
    (end, start, Reference::new(&data, markers, crc), data)
}

proptest! {
    #[test]
    fn prop_receive_in_order_under_any_cut(
        lengths in lengths(30), cuts in proptest::collection::vec(1usize..2000, 1..20),
        markers: bool, crc: bool, chunk in prop_oneof![Just(0usize), 54usize..300],
    ) {
        let (mut end, start, stream, data) = receiver(&lengths, markers, crc);
        end.link.chunk = chunk;
        let mut at = 0;
        for cut in cuts.iter().cycle() {
            let to = (at + cut).min(stream.bytes.len());
            prop_assert!(end.receive(start + at, &stream.bytes[at..to]));
            // Complete FPDUs are placed and delivered at once, and only the rest is held.
            let complete = stream.ranges.iter().filter(|(_, end)| *end <= to).count();
            prop_assert_eq!(end.ulp.delivered.len(), complete);
            let rest = to - stream.ranges[..complete].last().map_or(0, |(_, end)| *end);
            prop_assert_eq!(end.session.held_bytes(), rest);
            at = to;
            if at == stream.bytes.len() {
                break;
            }
        }
        prop_assert_eq!(&end.ulp.delivered, &data);
        prop_assert_eq!(end.ulp.placed.len(), data.len());
        prop_assert_eq!(end.link.lent(), 0);
        end.peer_closed();
        prop_assert_eq!(end.ulp.events.last(), Some(&Event::PeerClosed));
        let counters = end.session.counters();
        prop_assert_eq!((counters.placed_in_order, counters.placed_early), (data.len() as u64, 0));
    }

    /// With CRC, a wrong bit anywhere is detected before anything after it is placed in order, and reported once.
    #[test]
    fn prop_receive_corruption_is_detected(
        lengths in lengths(12), at: prop::sample::Index, bit in 0u8..8, markers: bool, reverse: bool,
    ) {
        let (mut end, start, mut stream, data) = receiver(&lengths, markers, true);
        let at = at.index(stream.bytes.len());
        stream.bytes[at] ^= 1 << bit;
        let mut segments: Vec<_> = stream.ranges.clone();
        if reverse {
            segments.reverse();
        }
        for (from, to) in segments {
            prop_assert!(end.receive(start + from, &stream.bytes[from..to]));
        }
        end.peer_closed();
        let broken = stream.ranges.iter().position(|(_, end)| at < *end).unwrap();
        prop_assert!(end.ulp.delivered.len() <= broken);
        prop_assert_eq!(&end.ulp.delivered, &data[..end.ulp.delivered.len()]);
        prop_assert!(end.ulp.placed.iter().all(|p| data.contains(&p.bytes)), "garbage was placed");
        let errors = end.ulp.stream_errors();
        prop_assert_eq!(errors.len(), 1);
        // A wrong length may announce an FPDU that overlaps one placed early, or extends beyond the end.
        prop_assert!(matches!(errors[0], MpaError::Crc | MpaError::MarkerMismatch | MpaError::Truncated));
        end.session.release(&mut end.link);
        prop_assert_eq!(end.link.lent(), 0);
    }

    /// Arbitrary bytes at arbitrary offsets: no panic, no leak, at most one error.
    #[test]
    fn prop_receive_junk(
        segments in proptest::collection::vec(
            (0usize..3000, proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 1..700)), 1..20,
        ),
        markers: bool, crc: bool,
    ) {
        let (mut end, start, ..) = receiver(&[], markers, crc);
        for (offset, bytes) in segments {
            end.receive(start + offset, &bytes);
        }
        prop_assert!(end.ulp.stream_errors().len() <= 1);
        end.session.release(&mut end.link);
        prop_assert_eq!(end.link.lent(), 0);
    }
}

#[test]
fn rfc5044_s4_1_crc_field_is_not_checked_when_crc_is_off() {
    let (mut end, start, mut stream, data) = receiver(&[100, 7], false, false);
    let at = stream.bytes.len();
    stream.bytes[at - 4..].copy_from_slice(&[1, 2, 3, 4]);
    end.receive(start, &stream.bytes);
    assert_eq!(end.ulp.delivered, data);
}

#[test]
fn rfc5044_s4_1_the_pad_is_ignored_except_by_the_crc() {
    let mut stream = Reference::new(&ulpdus(&[9]), false, false);
    stream.bytes[11] = 0xff;
    let (mut end, start, _, data) = receiver(&[9], false, false);
    end.receive(start, &stream.bytes);
    assert_eq!(end.ulp.delivered, data);
    let (mut end, start, ..) = receiver(&[9], false, true);
    let crc = crc32c::crc32c(&stream.bytes[..12]).to_le_bytes();
    stream.bytes[12..].copy_from_slice(&crc);
    end.receive(start, &stream.bytes);
    assert_eq!(end.ulp.delivered, data);
}

#[test]
fn rfc5044_s8_nothing_is_delivered_after_an_error() {
    let (mut end, start, mut stream, data) = receiver(&[100, 100, 100], true, true);
    let second = stream.ranges[1].0;
    stream.bytes[second + 20] ^= 1;
    end.receive(start, &stream.bytes);
    assert_eq!(end.ulp.delivered, data[..1]);
    assert_eq!(end.ulp.stream_errors(), [MpaError::Crc]);
    let next = end.contiguous;
    assert!(end.receive(next, &[0; 100]), "taken and discarded");
    end.peer_closed();
    assert_eq!(end.ulp.stream_errors().len(), 1);
    assert_eq!((end.ulp.delivered.len(), end.link.lent(), end.session.held_bytes()), (1, 0, 0));
    // The opposite direction still works: for a Terminate.
    end.ulp.to_send = ulpdus(&[22]).into();
    assert!(end.fill(1448, 1448).is_ok());
    let code = MpaError::Crc.terminate_code();
    assert_eq!((code.layer, code.error_type, code.code), (2, 0, 2));
}

#[test]
fn rfc5044_s8_code_3_marker_and_length_disagree_though_the_crc_is_good() {
    let (mut end, start, mut stream, _) = receiver(&[1000], true, true);
    stream.bytes[512 + 3] ^= 4;
    let at = stream.bytes.len() - 4;
    let crc = crc32c::crc32c(&stream.bytes[..at]).to_le_bytes();
    stream.bytes[at..].copy_from_slice(&crc);
    end.receive(start, &stream.bytes);
    assert_eq!(end.ulp.stream_errors(), [MpaError::MarkerMismatch]);
    assert!(end.ulp.placed.is_empty());
}

#[test]
fn rfc5044_s8_code_1_fin_within_an_fpdu() {
    let (mut end, start, stream, _) = receiver(&[100], true, true);
    end.receive(start, &stream.bytes[..50]);
    end.peer_closed();
    assert_eq!(end.ulp.stream_errors(), [MpaError::Truncated]);
}

#[test]
fn rfc5041_s7_upper_layer_stops_the_stream() {
    let (mut end, start, stream, data) = receiver(&[100, 100, 100], true, true);
    end.ulp.stop_at = Some(1);
    end.receive(start, &stream.bytes);
    let next = end.contiguous;
    end.receive(next, &[0; 7]);
    assert_eq!(end.ulp.delivered, data[..1]);
    assert_eq!(end.ulp.stream_errors(), [], "the upper layer knows it already");
    assert_eq!(end.link.lent(), 0);
}
