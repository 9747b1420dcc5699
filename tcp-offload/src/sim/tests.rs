use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::{
    link::Link,
    seq::SeqNum,
    time::Instant,
    wire::{
        Ecn, Fields, Flags, Flow, Headers, IcmpError, IcmpKind, Inbound, Mac, Malformed, Options, SackBlock,
        Segment, Sum, Timestamps, parse,
    },
};

const SENDER: Mac = Mac([2, 0, 0, 0, 0, 1]);

fn flow(v6: bool) -> Flow {
    let [local, remote] =
        if v6 { ["[fd00::1]:4000", "[fd00::2]:4001"] } else { ["10.0.0.1:4000", "10.0.0.2:4001"] };
    Flow { local: local.parse().unwrap(), remote: remote.parse().unwrap() }
}

fn frame(v6: bool, fields: &Fields, payload: &[u8]) -> Vec<u8> {
    frame_of(flow(v6), fields, payload)
}

fn frame_of(flow: Flow, fields: &Fields, payload: &[u8]) -> Vec<u8> {
    let path = path(flow.local, flow.remote);
    let mut bytes = vec![0; 200];
    let sum = Sum::of(payload);
    let len = Headers::new(&path).emit(&mut bytes, fields, payload.len(), sum).unwrap();
    bytes.truncate(len);
    bytes.extend_from_slice(payload);
    bytes
}

/// A data segment whose bytes encode their stream position.
fn data(v6: bool, start: u32, len: u32) -> Vec<u8> {
    let timestamps = Some(Timestamps { value: 7, echo: 8 });
    let fields = Fields {
        seq: SeqNum::new(start),
        ack: SeqNum::new(99),
        flags: Flags { ack: true, ..Flags::default() },
        window: 1000,
        options: Options { timestamps, ..Options::default() },
        ecn: Ecn::Ect0,
    };
    let payload: Vec<u8> = (start..start + len).map(|at| (at * 7) as u8).collect();
    frame(v6, &fields, &payload)
}

/// The result of our own parser for a frame, and the payload.
fn parsed(bytes: &[u8]) -> (Result<Inbound, Malformed>, Vec<u8>) {
    let (_, mut from, mut to) = Wire::new(WireConfig { tx_chunks: 0, rx_chunks: 1, ..WireConfig::default() });
    from.inject(bytes);
    let mut batch = Vec::new();
    to.receive(&mut batch, 1);
    let frame = batch.pop().unwrap();
    let inbound = parse(&to, &frame);
    let payload = match inbound {
        Ok(Inbound::Tcp(s)) => bytes[s.payload_start..s.payload_start + s.payload_len].to_vec(),
        _ => Vec::new(),
    };
    to.recycle(frame);
    (inbound, payload)
}

fn segment(bytes: &[u8]) -> (Segment, Vec<u8>) {
    match parsed(bytes) {
        (Ok(Inbound::Tcp(segment)), payload) => (segment, payload),
        (other, _) => panic!("{other:?}"),
    }
}

fn seq(bytes: &[u8]) -> u32 {
    packet::Tcp::of(bytes).unwrap().seq(bytes).value()
}

fn us(n: u64) -> Duration {
    Duration::from_micros(n)
}

fn at_us(n: u64) -> Instant {
    Instant::ZERO + us(n)
}

/// Every delivered frame with its time.
fn drain(direction: &mut Direction) -> Vec<(Instant, Vec<u8>)> {
    let mut out = Vec::new();
    while let Some(due) = direction.next_due() {
        while let Some(frame) = direction.deliver(due) {
            out.push((due, frame));
        }
    }
    out
}

#[test]
fn sim_a_middlebox_that_splits_and_joins_preserves_the_stream() {
    for v6 in [false, true] {
        let recut = Some(Recut { split: 0.4, join: 0.5, wait: us(50), most_bytes: 3000 });
        let mut direction = Direction::new(Faults { recut, ..Faults::default() }, 5);
        let (mut at, total) = (1000, 300);
        for number in 0..total {
            let len = 1 + number * 37 % 1400;
            direction.send(at_us(u64::from(number) * 20), &data(v6, at, len));
            at += len;
        }
        let mut next = 1000;
        for (_, bytes) in drain(&mut direction) {
            let (segment, payload) = segment(&bytes);
            assert_eq!((segment.seq, segment.flow.remote), (SeqNum::new(next), flow(v6).local));
            assert_eq!((segment.ack, segment.window, segment.ecn), (SeqNum::new(99), 1000, Ecn::Ect0));
            assert_eq!(segment.options.timestamps, Some(Timestamps { value: 7, echo: 8 }));
            assert!(bytes.len() <= 3014);
            for byte in payload {
                assert_eq!(byte, (next * 7) as u8);
                next += 1;
            }
        }
        assert_eq!(next, at, "all bytes arrived, in order");
        let tally = direction.tally();
        assert!(tally.split > 50 && tally.joined > 50, "{tally:?}");
    }
}

#[test]
fn sim_control_bits_stay_with_their_end_of_a_split_segment() {
    let flags = Flags { fin: true, psh: true, ack: true, cwr: true, ..Flags::default() };
    let fields = Fields { flags, seq: SeqNum::new(u32::MAX - 2), ..Fields::default() };
    let [head, tail] = packet::split(&frame(false, &fields, b"abcdef"), 4).unwrap();
    let (head, tail) = (segment(&head), segment(&tail));
    assert_eq!(head.1, b"abcd");
    assert_eq!(tail.1, b"ef");
    assert_eq!(tail.0.seq, SeqNum::new(1), "across the wrap");
    assert_eq!(head.0.flags, Flags { ack: true, cwr: true, ..Flags::default() });
    assert_eq!(tail.0.flags, Flags { fin: true, psh: true, ack: true, ..Flags::default() });
    let fin = data(false, 0, 10);
    let syn = Fields { flags: Flags { syn: true, ..Flags::default() }, ..Fields::default() };
    assert_eq!(packet::split(&frame(false, &syn, b"abc"), 1), None);
    assert_eq!(packet::join(&fin, &data(false, 11, 10), 3000), None, "a gap");
    assert_eq!(packet::join(&fin, &data(true, 10, 10), 3000), None, "another flow");
    assert_eq!(packet::join(&fin, &data(false, 10, 10), 70), None, "too long");
}

#[test]
fn sim_corruption_is_detected_by_tcp_unless_the_checksum_is_repaired() {
    for v6 in [false, true] {
        for (repair_checksum, seed) in [(0.0, 1), (1.0, 2)] {
            let faults = Faults { corrupt: 1.0, repair_checksum, ..Faults::default() };
            let mut direction = Direction::new(faults, seed);
            for n in 0..200 {
                direction.send(at_us(n), &data(v6, 0, 101));
            }
            for (_, bytes) in drain(&mut direction) {
                let before = data(v6, 0, 101);
                let flipped = bytes.iter().zip(&before).map(|(a, b)| (a ^ b).count_ones());
                let (inbound, payload) = parsed(&bytes);
                if repair_checksum == 0.0 {
                    assert_eq!(flipped.sum::<u32>(), 1);
                    // No checksum covers some fields of the IPv6 header.
                    assert!(v6 || !matches!(inbound, Ok(Inbound::Tcp(_))), "{inbound:?}");
                } else {
                    let wrong = payload.iter().zip(&before[before.len() - 101..]).filter(|(a, b)| a != b);
                    assert_eq!(wrong.count(), 1, "{inbound:?}");
                }
            }
        }
    }
}

#[test]
fn sim_the_line_delays_frames_and_its_queue_drops_and_marks() {
    for v6 in [false, true] {
        let len = data(v6, 0, 1000).len() as u64;
        let faults = Faults {
            rate_bytes: Some(len * 100_000),
            delay: us(5),
            queue_frames: 6,
            mark_frames: 4,
            ..Faults::default()
        };
        let mut direction = Direction::new(faults, 1);
        for n in 0..8 {
            direction.send(at_us(0), &data(v6, n * 1000, 1000));
        }
        let out = drain(&mut direction);
        let times: Vec<Instant> = out.iter().map(|o| o.0).collect();
        assert_eq!(times, [15, 25, 35, 45, 55, 65].map(at_us), "ten microseconds each on the line");
        let marks: Vec<Ecn> = out.iter().map(|o| segment(&o.1).0.ecn).collect();
        assert_eq!(marks, [Ecn::Ect0, Ecn::Ect0, Ecn::Ect0, Ecn::Ect0, Ecn::Ce, Ecn::Ce]);
        assert_eq!((direction.tally().queue_full, direction.tally().marked), (2, 2));
        // A packet that is not ECN-capable is not marked, and the line is free again.
        for _ in 0..6 {
            direction.send(at_us(100), &frame(v6, &Fields::default(), &[0; 1000]));
        }
        assert!(drain(&mut direction).iter().all(|o| segment(&o.1).0.ecn == Ecn::NotEct));
    }
}

#[test]
fn sim_a_hop_with_a_smaller_mtu_drops_with_or_without_an_icmp_error() {
    for (v6, header) in [(false, 20), (true, 40)] {
        let mtu = PathMtu { from: at_us(10), bytes: 1400, icmp: true };
        let mut direction = Direction::new(Faults { mtu: Some(mtu), ..Faults::default() }, 1);
        let (fits, large) = (data(v6, 5, 1400 - header - 32), data(v6, 5, 1401 - header - 32));
        assert_eq!(direction.send(at_us(9), &large), None, "before its time");
        assert_eq!(direction.send(at_us(10), &fits), None);
        let error = direction.send(at_us(11), &large).unwrap();
        let kind = IcmpKind::TooBig { mtu: 1400 };
        let expected = IcmpError { flow: flow(v6), seq: SeqNum::new(5), kind };
        assert_eq!(parsed(&error).0, Ok(Inbound::Icmp(expected)));
        assert_eq!(error[..6], SENDER.0);
        direction.set_faults(Faults { mtu: Some(PathMtu { icmp: false, ..mtu }), ..Faults::default() });
        assert_eq!(direction.send(at_us(12), &large), None);
        assert_eq!((drain(&mut direction).len(), direction.tally().too_big), (2, 2));
    }
}

#[test]
fn sim_the_reordering_depth_limits_how_many_frames_overtake() {
    let deep =
        Faults { reorder: 0.2, reorder_depth: 5, reorder_by: Duration::from_secs(9), ..Faults::default() };
    let mut direction = Direction::new(deep, 3);
    let total = 500;
    for n in 0..total {
        direction.send(at_us(u64::from(n)), &data(false, n, 1));
    }
    let out: Vec<u32> = drain(&mut direction).iter().map(|o| seq(&o.1)).collect();
    assert_eq!(out.len(), total as usize);
    let overtaken = |(place, n): (usize, &u32)| out[..place].iter().filter(|other| *other > n).count();
    // Frames that are held back do not count as overtakers until they continue.
    let most = out.iter().enumerate().take(total as usize - 20).map(overtaken).max().unwrap();
    assert!((2..=10).contains(&most), "{most}");
    assert!(direction.tally().reordered > 50);
}

#[test]
fn sim_forged_resets_have_the_configured_sequence_numbers() {
    for v6 in [false, true] {
        for aim in [Aim::Next, Aim::Near, Aim::Far] {
            let resets = Some(Resets { chance: 1.0, aim });
            let mut direction = Direction::new(Faults { resets, ..Faults::default() }, 1);
            direction.send(at_us(1), &data(v6, 1000, 100));
            let out = drain(&mut direction);
            let (forged, genuine) = (segment(&out[0].1).0, segment(&out[1].1).0);
            assert!(forged.flags.rst && !genuine.flags.rst);
            let beyond = forged.seq.since(SeqNum::new(1000));
            match aim {
                Aim::Next => assert_eq!(beyond, 0),
                Aim::Near => assert!((101..1100).contains(&beyond), "{beyond}"),
                Aim::Far => assert!(!(0..1 << 29).contains(&beyond), "{beyond}"),
            }
        }
    }
}

#[test]
fn sim_blackouts_occur_once_or_periodically() {
    let once = Blackout { from: at_us(10), length: us(5), every: None };
    let dark = |blackout: Blackout| (0..40).filter(|n| blackout.covers(at_us(*n))).collect::<Vec<_>>();
    assert_eq!(dark(once), [10, 11, 12, 13, 14]);
    let again = Blackout { length: us(2), every: Some(us(12)), ..once };
    assert_eq!(dark(again), [10, 11, 22, 23, 34, 35]);
}

#[test]
fn sim_bursts_lose_more_in_a_row_than_independent_loss() {
    let longest = |faults: Faults| {
        let mut direction = Direction::new(faults, 9);
        for n in 0..20_000 {
            direction.send(at_us(u64::from(n)), &data(false, n, 1));
        }
        let got: BTreeSet<u32> = drain(&mut direction).iter().map(|o| seq(&o.1)).collect();
        let mut runs = (0, 0);
        for n in 0..20_000 {
            runs.0 = if got.contains(&n) { 0 } else { runs.0 + 1 };
            runs.1 = runs.0.max(runs.1);
        }
        (runs.1, direction.tally().lost)
    };
    let bursts = Some(Gilbert { enter: 0.001, leave: 0.1, loss: 1.0 });
    let (run, lost) = longest(Faults { bursts, ..Faults::default() });
    assert!(run > 10 && (100..400).contains(&lost), "{run} in a row, {lost} in all");
    let (run, lost) = longest(Faults { loss: 0.01, ..Faults::default() });
    assert!(run < 6 && (100..400).contains(&lost), "{run} in a row, {lost} in all");
}

fn all() -> Faults {
    Faults {
        loss: 0.1,
        bursts: Some(Gilbert { enter: 0.1, leave: 0.3, loss: 0.5 }),
        blackout: Some(Blackout { from: at_us(50), length: us(20), every: Some(us(300)) }),
        duplicate: 0.1,
        reorder: 0.2,
        reorder_by: us(100),
        reorder_depth: 20,
        corrupt: 0.3,
        repair_checksum: 0.5,
        recut: Some(Recut { split: 0.3, join: 0.3, wait: us(30), most_bytes: 2000 }),
        mtu: Some(PathMtu { from: at_us(3000), bytes: 600, icmp: true }),
        resets: Some(Resets { chance: 0.1, aim: Aim::Near }),
        delay: us(10),
        jitter: us(10),
        rate_bytes: Some(50_000_000),
        queue_frames: 20,
        mark_frames: 2,
        mark: 0.1,
    }
}

#[test]
fn sim_the_same_seed_gives_the_same_trace() {
    let run = |seed| {
        let mut direction = Direction::new(all(), seed);
        let back: Vec<_> = (0..500)
            .map(|n| direction.send(at_us(u64::from(n) * 7), &data(n % 50 < 25, n * 600, 600)))
            .collect();
        (back, drain(&mut direction), direction.tally())
    };
    assert_eq!(run(1), run(1));
    let (first, second) = (run(1), run(2));
    assert_ne!(first.1, second.1);
    let t = first.2;
    for count in [
        t.lost,
        t.queue_full,
        t.too_big,
        t.marked,
        t.duplicated,
        t.reordered,
        t.corrupted,
        t.corrupted_unseen,
        t.split,
        t.joined,
        t.resets,
    ] {
        assert!(count > 0, "every fault occurs: {t:?}");
    }
}

/// Data sent after a forged reset could reach the reset's number, which would make it the peer's own. So nothing overtakes
/// the reset, even where all frames are held back for later ones.
#[test]
fn sim_data_does_not_overtake_a_forged_reset() {
    for seed in 0..20 {
        let resets = Some(Resets { chance: 1.0, aim: Aim::Near });
        let faults =
            Faults { resets, reorder: 1.0, reorder_by: us(1000), reorder_depth: 3, ..Faults::default() };
        let mut direction = Direction::new(faults, seed);
        let (mut highest, mut forged) = (0, 0);
        let mut arrived = |direction: &mut Direction, now, sent| {
            while let Some(frame) = direction.deliver(now) {
                let (segment, _) = segment(&frame);
                if segment.flags.rst {
                    forged += 1;
                    let ahead = segment.seq.since(SeqNum::new(sent));
                    assert!(ahead > 0, "{ahead} bytes beyond what was sent when it arrives");
                } else {
                    highest += 1;
                }
            }
        };
        for number in 0..50 {
            let at = at_us(u64::from(number) * 10);
            direction.send(at, &data(false, 1000 * number, 1000));
            arrived(&mut direction, at, 1000 * (number + 1));
        }
        assert_eq!(forged, 50u64, "each arrives at once");
        assert_eq!(forged, direction.tally().resets);
        assert!(highest < 50, "data is held back");
    }
}

#[test]
fn sim_a_switch_learns_the_ports_of_addresses() {
    let (wire, mut links) = Wire::switch(&WireConfig::default(), &[Faults::default(); 3]);
    let address = |n: u8| [2, 0, 0, 0, 0, n];
    let frame = |to: u8, from: u8| [address(to), address(from)].concat();
    let received = |links: &mut Vec<SimLink>| -> Vec<usize> {
        let mut count = |link: &mut SimLink| {
            let mut batch = Vec::new();
            link.receive(&mut batch, 9);
            let n = batch.len();
            for frame in batch {
                link.recycle(frame);
            }
            n
        };
        links.iter_mut().map(&mut count).collect()
    };
    links[0].inject(&frame(2, 0));
    assert_eq!(received(&mut links), [0, 1, 1], "an unknown address is flooded");
    links[2].inject(&frame(0, 2));
    assert_eq!(received(&mut links), [1, 0, 0]);
    links[0].inject(&frame(2, 0));
    assert_eq!(received(&mut links), [0, 0, 1]);
    assert_eq!((wire.tally(0).frames, wire.tally(1).frames, wire.tally(2).frames), (1, 1, 2));
}

/// Audits segments of two ends in order, beginning with the connection's first SYN; `true` marks segments of the
/// peer.
fn audited(said: &[(bool, Fields, &[u8])]) {
    let mut audit = audit::Audit::default();
    let syn = |ack| Flags { syn: true, ack, ..Flags::default() };
    let options = Options { window_scale: Some(1), ..Options::default() };
    let first = Fields { seq: SeqNum::new(99), window: 10, options, flags: syn(false), ..Fields::default() };
    let second = Fields { seq: SeqNum::new(199), ack: SeqNum::new(100), flags: syn(true), ..first };
    for (peer, fields, payload) in [(false, first, &b""[..]), (true, second, b"")].iter().chain(said) {
        let local = flow(false);
        let flow = if *peer { Flow { local: local.remote, remote: local.local } } else { local };
        audit.sent(&frame_of(flow, fields, payload));
    }
}

/// A segment of an established connection, by offsets.
fn established_segment(seq: u32, ack: u32, window: u16) -> Fields {
    let flags = Flags { ack: true, ..Flags::default() };
    Fields { seq: SeqNum::new(seq), ack: SeqNum::new(ack), flags, window, ..Fields::default() }
}

#[test]
fn sim_the_audit_accepts_valid_tcp() {
    audited(&[
        (false, established_segment(100, 200, 5), b"abcd"),
        (true, established_segment(200, 104, 3), b""),
        (false, established_segment(102, 200, 5), b"cdefgh"),
        (
            false,
            Fields {
                flags: Flags { fin: true, ack: true, ..Flags::default() },
                ..established_segment(108, 200, 5)
            },
            b"",
        ),
        (true, established_segment(200, 109, 1), b"x"),
        (false, established_segment(109, 201, 5), b""),
    ]);
}

#[test]
#[should_panic(expected = "byte 2 of a stream changed")]
fn sim_the_audit_detects_a_changed_byte() {
    audited(&[
        (false, established_segment(100, 200, 5), b"abcd"),
        (false, established_segment(102, 200, 5), b"xd"),
    ]);
}

#[test]
#[should_panic(expected = "sequence space skipped")]
fn sim_the_audit_detects_a_gap() {
    audited(&[
        (false, established_segment(100, 200, 5), b"ab"),
        (false, established_segment(103, 200, 5), b"d"),
    ]);
}

#[test]
#[should_panic(expected = "outside of the window")]
fn sim_the_audit_detects_data_beyond_the_window() {
    audited(&[(false, established_segment(100, 200, 5), b"0123456789ab")]);
}

#[test]
#[should_panic(expected = "acknowledges data that was not sent")]
fn sim_the_audit_detects_an_ack_of_unsent_data() {
    audited(&[
        (false, established_segment(100, 200, 5), b"ab"),
        (true, established_segment(200, 103, 5), b""),
    ]);
}

#[test]
#[should_panic(expected = "the window shrinks")]
fn sim_the_audit_detects_a_shrinking_window() {
    audited(&[
        (false, established_segment(100, 200, 6), b"ab"),
        (true, established_segment(200, 102, 4), b""),
        (true, established_segment(200, 102, 3), b""),
    ]);
}

#[test]
#[should_panic(expected = "a SACK block of data that was not sent")]
fn sim_the_audit_detects_a_wrong_sack_block() {
    let block = SackBlock { left: SeqNum::new(101), right: SeqNum::new(103) };
    let sack = [block, SackBlock::default(), SackBlock::default(), SackBlock::default()];
    let options = Options { sack, sack_count: 1, ..Options::default() };
    audited(&[
        (false, established_segment(100, 200, 5), b"ab"),
        (true, Fields { options, ..established_segment(200, 100, 5) }, b""),
    ]);
}

proptest! {
    #[test]
    fn prop_the_fault_model_accepts_any_frame(
        frames in proptest::collection::vec((any::<bool>(), proptest::collection::vec(any::<u8>(), 0..300),
            0usize..90, any::<u8>()), 1..30),
        seed: u64,
    ) {
        let mut direction = Direction::new(Faults { corrupt: 0.5, ..all() }, seed);
        for (n, (v6, tail, at, byte)) in frames.into_iter().enumerate() {
            let mut strange = data(v6, n as u32 * 100, 100);
            let len = strange.len();
            strange[at % len] = byte;
            direction.send(at_us(n as u64 * 10), &strange);
            direction.send(at_us(n as u64 * 10), &strange[..at % len]);
            direction.send(at_us(n as u64 * 10), &tail);
        }
        drain(&mut direction);
    }
}
