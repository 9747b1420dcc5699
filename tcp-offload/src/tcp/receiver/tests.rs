//! The receiver against a plain set of bytes.

use super::*;
use crate::{
    link::QueueId,
    wire::{Ecn, Flags, Flow, Mac, VlanTags},
};
use proptest::prelude::*;

const IRS: SeqNum = SeqNum::new(0xffff_fff0);
const BUFFER: u32 = 400;

fn segment(offset: i64, len: usize, fin: bool) -> Segment {
    let seq = IRS.add(1).add(offset as u32);
    let end = "10.0.0.1:1".parse().unwrap();
    Segment {
        source_mac: Mac::default(),
        destination_mac: Mac::default(),
        vlan: VlanTags::default(),
        queue: QueueId(0),
        flow: Flow { local: end, remote: end },
        seq,
        ack: SeqNum::default(),
        flags: Flags { ack: true, fin, ..Flags::default() },
        window: 0,
        options: Options::default(),
        ecn: Ecn::NotEct,
        payload_start: 54,
        payload_len: len,
        partial_checksum: false,
    }
}

/// A receiver with a window that does not grow.
fn with_window(window: u32) -> Receiver {
    let config = TcpConfig { receive_window: window, receive_window_max: window, ..TcpConfig::default() };
    Receiver::new(IRS, &config)
}

fn receiver() -> Receiver {
    let mut rx = with_window(BUFFER);
    rx.advertise(true);
    rx
}

fn blocks(rx: &mut Receiver) -> Vec<(u32, u32)> {
    let mut options = Options::default();
    rx.report(&mut options, 4);
    let offset = |s: SeqNum| s.since(IRS.add(1)) as u32;
    options.sack_blocks().iter().map(|b| (offset(b.left), offset(b.right))).collect()
}

/// RFC 9293 section 3.10.7.4, table 6.
#[test]
fn rfc9293_s3_10_7_4_the_four_cases_of_the_acceptability_test() {
    let mut rx = receiver();
    let acceptable =
        |rx: &mut Receiver, offset, len| rx.judge(&segment(offset, len, false)) != Verdict::Unacceptable;
    let window = i64::from(BUFFER);
    for (offset, len, expected) in [
        (0, 0, true),
        (-1, 0, false),
        (window - 1, 0, true),
        (window, 0, false),
        (0, 10, true),
        (-5, 10, true),
        (-10, 10, false),
        (window - 1, 10, true),
        (window, 10, false),
        (-10, 2000, true),
    ] {
        assert_eq!(acceptable(&mut rx, offset, len), expected, "{len} bytes at {offset}");
    }
    rx.add(0, BUFFER as usize);
    rx.hold(BUFFER as usize);
    rx.advertise(true);
    assert_eq!(rx.window(), 0);
    assert!(acceptable(&mut rx, window, 0));
    assert!(!acceptable(&mut rx, window + 1, 0));
    assert_eq!(rx.judge(&segment(window, 1, false)), Verdict::Nothing { duplicate: false }, "a window probe");
}

#[test]
fn rfc7323_s2_2_the_shift_is_the_smallest_that_fits() {
    for (buffer, shift) in [(1, 0), (65_535, 0), (65_536, 1), (131_071, 1), (1 << 20, 5), (1 << 30, 14)] {
        assert_eq!(with_window(buffer).shift(), shift, "{buffer}");
    }
}

#[test]
fn rfc7323_s2_4_rounding_down_is_honoured() {
    let mut rx = with_window(100_000);
    assert_eq!((rx.shift(), rx.advertise(true)), (1, 50_000));
    rx.hold(100_000);
    rx.add(0, 5);
    assert_eq!(rx.advertise(true), 49_997);
    assert_eq!(rx.window(), 99_995, "bytes lost by rounding are still accepted");
}

/// A slow start that overruns a queue loses every second segment. More holes than that come only from a hostile peer.
#[test]
fn the_number_of_ranges_beyond_gaps_is_limited() {
    let mut rx = with_window(1 << 20);
    rx.advertise(true);
    for i in 0..MAX_RANGES as u64 {
        assert!(matches!(rx.judge(&segment(100 * i as i64 + 50, 50, false)), Verdict::Payload(_)));
        rx.add(100 * i + 50, 50);
    }
    let behind = 100 * MAX_RANGES as i64 + 50;
    assert_eq!(rx.judge(&segment(behind, 50, false)), Verdict::Crowded);
    assert!(
        matches!(rx.judge(&segment(behind - 50, 50, false)), Verdict::Payload(_)),
        "touches the last one"
    );
    assert!(matches!(rx.judge(&segment(0, 50, false)), Verdict::Payload(_)), "fills a hole");
    rx.add(0, 50);
    assert_eq!(rx.next(), 100);
}

/// The window after one second at `rate` bytes a second, with one update every millisecond.
fn window_after(rx: &mut Receiver, rate: u64, rtt: Duration) -> u64 {
    for ms in 0..=1000 {
        rx.grow(Instant::ZERO + Duration::from_millis(ms), || Some(rtt), rate * ms / 1000);
    }
    rx.advertise(true);
    rx.window()
}

#[test]
fn the_window_grows_to_four_times_what_arrives_in_a_round_trip() {
    let rx = || Receiver::new(IRS, &TcpConfig::default());
    let (long, short) = (Duration::from_millis(50), Duration::from_micros(50));
    let window = window_after(&mut rx(), 12_500_000, long);
    assert!((2_400_000..=2_500_000).contains(&window), "{window}");
    assert_eq!(window_after(&mut rx(), 1_000_000_000, long), 8 << 20, "the configured maximum");
    assert_eq!(window_after(&mut rx(), 1_000_000, long), 1 << 20, "a slow sender needs no more");
    assert_eq!(window_after(&mut rx(), 1_250_000_000, short), 1 << 20, "a short path needs no more");
}

#[test]
fn a_backlog_after_sleep_is_not_counted_as_one_round_trip() {
    let mut rx = Receiver::new(IRS, &TcpConfig::default());
    let rtt = Some(Duration::from_micros(50));
    rx.grow(Instant::ZERO, || rtt, 0);
    for at in [100, 101] {
        rx.grow(Instant::ZERO + Duration::from_millis(at), || rtt, 1 << 20);
    }
    rx.advertise(true);
    assert_eq!(rx.window(), 1 << 20);
}

#[test]
fn a_fin_that_contradicts_earlier_data_is_ignored() {
    let mut rx = receiver();
    rx.add(100, 50);
    rx.note_fin(&segment(0, 120, true));
    rx.add(0, 100);
    assert!(!rx.fin_reached());
    rx.note_fin(&segment(150, 0, true));
    assert!(rx.fin_reached());
    assert_eq!(rx.next_seq(), IRS.add(1).add(151));
    assert_eq!(rx.judge(&segment(152, 10, false)), Verdict::Nothing { duplicate: false });
}

#[derive(Debug, Clone)]
struct Piece {
    offset: i64,
    len: usize,
    take: bool,
}

fn piece() -> impl Strategy<Value = Piece> {
    (-50i64..450, 0usize..60, prop::bool::weighted(0.9)).prop_map(|(offset, len, take)| Piece {
        offset,
        len,
        take,
    })
}

proptest! {
    /// For any pieces in any order: payload offered lies in the window and has new bytes, RCV.NXT is the first missing
    /// byte, and SACK blocks cover only received bytes.
    #[test]
    fn prop_the_receiver_agrees_with_a_set_of_bytes(pieces in proptest::collection::vec(piece(), 0..80)) {
        let mut rx = receiver();
        let mut have = [false; 600];
        for piece in &pieces {
            let verdict = rx.judge(&segment(piece.offset, piece.len, false));
            let next = have.iter().position(|b| !b).unwrap_or(600);
            let wanted = (piece.offset.max(0)..(piece.offset + piece.len as i64).min(i64::from(BUFFER)))
                .filter(|i| !have[*i as usize])
                .count();
            match verdict {
                Verdict::Payload(a) => {
                    prop_assert!(a.len > 0 && a.offset >= next as u64);
                    prop_assert!(a.offset + a.len as u64 <= u64::from(BUFFER));
                    prop_assert_eq!(a.start as i64 - 54, a.offset as i64 - piece.offset);
                    let covered = have[a.offset as usize..a.offset as usize + a.len].iter().filter(|b| !**b).count();
                    prop_assert_eq!(covered, wanted, "all that is new, nothing else");
                    if piece.take {
                        rx.add(a.offset, a.len);
                        have[a.offset as usize..a.offset as usize + a.len].fill(true);
                        prop_assert_eq!(rx.next(), a.contiguous);
                    }
                }
                Verdict::Nothing { .. } | Verdict::Unacceptable => prop_assert_eq!(wanted, 0),
                Verdict::Crowded => prop_assert!(false, "few ranges"),
            }
            prop_assert_eq!(rx.next(), have.iter().position(|b| !b).unwrap_or(600) as u64);
            prop_assert_eq!(rx.has_gap(), have[rx.next() as usize..].iter().any(|b| *b));
            for (left, right) in blocks(&mut rx) {
                prop_assert!(left < right);
                prop_assert!(have[left as usize..right as usize].iter().all(|b| *b));
            }
        }
    }
}

/// Linux's `tcp_dsack_mult.pkt`: of the duplicate parts in one segment the first is reported, also when new data stands around it.
#[test]
fn rfc2883_s4_2_2_a_segment_that_covers_received_ranges_reports_the_first_one() {
    let mut rx = with_window(10_000);
    rx.advertise(true);
    for (from, to) in [(1000, 3000), (4000, 5000), (7000, 8000)] {
        rx.add(from, (to - from) as usize);
    }
    assert!(matches!(rx.judge(&segment(0, 6000, false)), Verdict::Payload(new) if new.len == 6000));
    rx.add(0, 6000);
    assert_eq!(blocks(&mut rx), [(1000, 3000), (7000, 8000)]);
    rx.reported();
    // The part below the acknowledgment number comes first.
    rx.judge(&segment(5000, 4000, false));
    assert_eq!(blocks(&mut rx), [(5000, 6000), (7000, 8000)]);
}
