//! Explicit congestion notification: RFC 3168 section 6.1.

use super::{bulk, iss, plain, silent};
use crate::{
    seq::SeqNum,
    sim::Faults,
    tcp::{
        Algorithm, TcpConfig,
        testing::{IRS, Pair, Script, Stream, at_ms, ms, us},
    },
    wire::{Ecn, Fields, Flags, Options},
};

fn negotiated(source: Stream) -> Script {
    negotiated_by(TcpConfig { timestamps: false, ..TcpConfig::default() }, source)
}

fn negotiated_by(config: TcpConfig, source: Stream) -> Script {
    let mut script = Script::connecting(config, source);
    let syn = script.run()[0];
    assert!(syn.flags.ece && syn.flags.cwr, "section 6.1.1: an ECN-setup SYN");
    assert_eq!(syn.ecn, Ecn::NotEct);
    script.now += ms(1);
    let flags = Flags { syn: true, ack: true, ece: true, ..Flags::default() };
    let options = Options { mss: Some(1000), sack_permitted: true, ..Options::default() };
    script.inject(Fields { seq: SeqNum::new(IRS), flags, options, ..script.template }, 0);
    script
}

#[test]
fn rfc3168_s6_1_only_new_data_is_ecn_capable() {
    let mut script = negotiated(bulk(3));
    let sent = script.run();
    assert!(sent.iter().all(|s| s.ecn == Ecn::Ect0));
    let again = script.wait(ms(300));
    assert!(!again.is_empty() && again.iter().all(|(_, s)| s.ecn == Ecn::NotEct));
    let acks = script.data(100, 10);
    assert!(acks.iter().all(|s| s.ecn == Ecn::NotEct));
}

#[test]
fn rfc3168_s6_1_2_an_echo_halves_once_a_window_and_is_answered_with_cwr() {
    let mut script = negotiated(bulk(40));
    script.run();
    script.now += ms(1);
    let before = script.conn.info().cwnd;
    let echo = |script: &Script, offset| {
        let flags = Flags { ack: true, ece: true, ..Flags::default() };
        Fields { ack: iss(offset), flags, ..plain(script) }
    };
    let first = script.exchange(echo(&script, 6000), 0);
    let reduced = script.conn.info().cwnd;
    assert!(reduced < before);
    let second = script.exchange(echo(&script, 8000), 0);
    assert_eq!(script.conn.info().cwnd, reduced, "once a window, and an echo never grows it");
    let cwr: Vec<bool> = first.iter().chain(&second).map(|s| s.flags.cwr).collect();
    assert_eq!(cwr.iter().filter(|c| **c).count(), 1);
    assert!(cwr[0], "on the first new segment");
}

#[test]
fn rfc3168_s6_1_3_a_mark_is_echoed_until_cwr() {
    let mut script = negotiated(silent());
    script.run();
    script.exchange(Fields { ecn: Ecn::Ce, ..plain(&script) }, 1000);
    script.conn.flush_ack();
    assert!(script.run()[0].flags.ece);
    script.data(1000, 1000);
    script.conn.flush_ack();
    assert!(script.run()[0].flags.ece, "until the sender answers");
    let cwr = Fields {
        seq: super::irs(2000),
        flags: Flags { ack: true, cwr: true, ..Flags::default() },
        ..plain(&script)
    };
    script.exchange(cwr, 1000);
    script.conn.flush_ack();
    assert!(!script.run()[0].flags.ece);
}

#[test]
fn rfc3168_s6_1_1_without_the_peers_consent_no_packet_is_ecn_capable() {
    let mut script = Script::established(TcpConfig::default(), bulk(2));
    assert!(script.run().iter().all(|s| s.ecn == Ecn::NotEct && !s.flags.ece));
}

#[test]
fn rfc3168_s6_1_1_1_a_retransmitted_syn_does_not_request_ecn() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    let again = script.wait(ms(1100));
    assert!(!again[0].1.flags.ece && !again[0].1.flags.cwr);
}

/// A segment of the peer with 1000 bytes at `offset`, marked or not.
fn from_peer(script: &mut Script, offset: u32, marked: bool) {
    let ecn = if marked { Ecn::Ce } else { Ecn::Ect0 };
    script.inject(Fields { seq: super::irs(offset), ecn, ..plain(script) }, 1000);
}

fn dctcp() -> TcpConfig {
    TcpConfig { algorithm: Algorithm::Dctcp, timestamps: false, ..TcpConfig::default() }
}

#[test]
fn rfc8257_s3_2_an_ack_reports_exactly_whether_its_data_was_marked() {
    let mut script = negotiated_by(dctcp(), silent());
    script.run();
    for (n, marked) in [false, false, true, true, true, false].into_iter().enumerate() {
        from_peer(&mut script, n as u32 * 1000, marked);
    }
    script.conn.flush_ack();
    let acks = script.run();
    let reported: Vec<(u32, bool)> =
        acks.iter().map(|s| (s.ack.since(super::irs(0)) as u32, s.flags.ece)).collect();
    assert_eq!(reported, [(2000, false), (5000, true), (6000, false)]);
    let edges: Vec<u32> = acks.iter().map(advertised_edge).collect();
    assert!(edges.windows(2).all(|w| w[0] <= w[1]), "the right edge never moves left: {edges:?}");
    // CWR has no effect.
    from_peer(&mut script, 6000, true);
    let cwr = Flags { ack: true, cwr: true, ..Flags::default() };
    script.inject(Fields { seq: super::irs(7000), ecn: Ecn::Ce, flags: cwr, ..plain(&script) }, 1000);
    script.conn.flush_ack();
    assert_eq!(script.run().last().map(|s| s.flags.ece), Some(true));
}

fn advertised_edge(segment: &crate::wire::Segment) -> u32 {
    segment.ack.since(super::irs(0)) as u32 + u32::from(segment.window)
}

#[test]
fn rfc8257_s3_3_few_marks_cost_little() {
    let mut script = negotiated_by(dctcp(), bulk(4000));
    let mut acked = 0;
    script.run();
    let (mut rounds, mut reduced) = (0, 0);
    while acked < 3_000_000 {
        script.now += ms(1);
        rounds += 1;
        let sent = script.source.at as u32;
        // The first segment of every second round is marked.
        let flags = Flags { ack: true, ece: rounds % 2 == 0, ..Flags::default() };
        script.exchange(Fields { ack: iss(acked + 1000), flags, ..plain(&script) }, 0);
        let before = script.conn.info().cwnd;
        script.ack(sent, &[]);
        reduced += u32::from(script.conn.info().cwnd < before);
        acked = sent;
    }
    assert_eq!(script.conn.counters().retransmits, 0);
    assert!(script.conn.info().cwnd > 40_000, "{} after {reduced}", script.conn.info().cwnd);
}

/// An echo in each window leaves two segments, which no timer holds back. The window of an application that sends little falls by
/// the same factor as any other, not to what was in flight.
#[test]
fn rfc3168_s6_1_2_marks_reduce_the_window_not_the_flight_and_leave_two_segments() {
    let echo = Flags { ack: true, ece: true, ..Flags::default() };
    let mut script = negotiated(bulk(1));
    script.run();
    script.now += ms(1);
    script.exchange(Fields { ack: iss(1000), flags: echo, ..plain(&script) }, 0);
    assert_eq!(script.conn.info().cwnd, 7000, "one segment of ten was in flight");

    let mut script = negotiated(bulk(400));
    script.run();
    for round in 0..20 {
        script.now += ms(1);
        let acked = script.source.at as u32;
        let sent = script.exchange(Fields { ack: iss(acked), flags: echo, ..plain(&script) }, 0);
        assert!(sent.len() >= 2, "round {round}: {}", sent.len());
    }
    assert_eq!(script.conn.info().cwnd, 2000);
    assert_eq!(script.conn.counters().ecn_reductions, 20);
}

/// The loss of a segment reduces the window, which answers the marks of the same window.
#[test]
fn rfc3168_s6_1_2_a_reduction_for_a_loss_is_reported_and_answers_marks() {
    let mut script = negotiated(bulk(400));
    script.run();
    script.now += ms(1);
    script.ack(0, &[(1000, 4000)]);
    assert_eq!(script.conn.counters().recoveries, 1);
    script.now += ms(1);
    let flags = Flags { ack: true, ece: true, ..Flags::default() };
    let sent = script.exchange(Fields { ack: iss(10_000), flags, ..plain(&script) }, 0);
    assert_eq!(sent.iter().filter(|s| s.flags.cwr).count(), 1);
    script.exchange(Fields { ack: iss(10_000), flags, ..plain(&script) }, 0);
    assert_eq!(script.conn.counters().ecn_reductions, 0);
}

/// A path with a round trip of 20 ms that marks a share of the packets in both directions.
fn marking(share: f64, totals: [u64; 2]) -> Pair {
    let faults = Faults { delay: ms(10), mark: share, ..Faults::default() };
    let sources = totals.map(|total| Stream::new(total, 0, false));
    let mut pair = Pair::new(&[TcpConfig::default(); 2], &[faults; 2], sources, 5);
    pair.open(0);
    pair.run_until(at_ms(1000), |p| p.ends.iter().all(|end| end.established));
    pair
}

/// Kernel TCP takes 2.2 s for this: two segments a round trip. A window of one that waits for a time-out took 24 s for a part.
#[test]
fn sim_marks_on_all_packets_leave_two_segments_a_round_trip() {
    let mut pair = marking(1.0, [300_000, 0]);
    pair.run_to_the_end(at_ms(2_400));
    let info = pair.ends[0].conn().info();
    assert_eq!(info.counters.rto_expired, 0, "{info:?}");
    pair.tear_down();
}

/// Messages of 64 bytes there and back: a mark delays none.
#[test]
fn sim_marks_do_not_delay_small_messages() {
    for share in [0.02, 0.5] {
        let mut pair = marking(share, [0, 0]);
        for round in 1..=300 {
            let begin = pair.now;
            for end in [0, 1] {
                pair.ends[end].source.total = round * 64;
                pair.run_until(begin + ms(1_000), |p| p.ends[1 - end].taken == round * 64);
            }
            let time = pair.now.since(begin);
            assert!(time <= ms(24), "share {share}, round {round}: {time:?}");
        }
        assert!(pair.ends[0].conn().counters().ecn_reductions > 0, "share {share}");
        pair.tear_down();
    }
}

#[test]
fn sim_after_marks_of_an_application_that_sends_little_the_window_grows_again() {
    let mut pair = marking(0.1, [0, 0]);
    let mut next = pair.now;
    for _ in 0..1000 {
        pair.ends[0].source.total += 3000;
        next += ms(5);
        let limit = next + ms(100);
        pair.run_until(limit, |p| p.now >= next || p.wire.next_arrival().is_none());
        pair.now = pair.now.max(next);
    }
    let limited = pair.ends[0].conn().info();
    assert!(limited.counters.ecn_reductions > 10 && limited.cwnd < 10 * 1448, "{limited:?}");
    pair.wire.with_faults([Faults { delay: ms(10), ..Faults::default() }; 2]);
    pair.ends[0].source.total += 100_000_000;
    let end = pair.now + ms(6_000);
    pair.run_until(end + ms(100), |p| p.now >= end);
    // CUBIC: 0.4 segments a second cubed from the plateau on.
    let grown = pair.ends[0].conn().info().cwnd;
    assert!(grown > 40 * 1448, "{grown}");
    pair.tear_down();
}

/// Behind a switch that marks early, DCTCP keeps the line busy, the queue short, and loses nothing.
#[test]
fn sim_dctcp_fills_a_line_that_marks_without_losses() {
    let faults = Faults {
        delay: us(200),
        rate_bytes: Some(125_000_000),
        mark_frames: 30,
        queue_frames: 200,
        ..Faults::default()
    };
    let config = TcpConfig { algorithm: Algorithm::Dctcp, receive_window: 1 << 22, ..TcpConfig::default() };
    let sources = [Stream::new(50_000_000, 0, false), silent()];
    let mut pair = Pair::new(&[config; 2], &[faults; 2], sources, 7);
    pair.open(0);
    pair.run_to_the_end(at_ms(10_000));
    let info = pair.ends[0].conn().info();
    assert!(info.counters.ecn_echoes > 100, "{info:?}");
    assert_eq!((info.counters.rto_expired, info.counters.recoveries), (0, 0), "{info:?}");
    // 50 MB at 125 MB/s are 400 ms.
    assert!(pair.now < at_ms(460), "{:?}", pair.now);
    let queued = info.srtt.unwrap();
    assert!(queued < us(400 + 12 * 60), "60 frames of 12 us, not 200: {queued:?}");
    pair.tear_down();
}
