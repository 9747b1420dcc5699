//! Detection and repair of losses: RFC 8985, 6675, 6582, 3042 and 6937 in whole connections.

use std::time::Duration;

use super::{bulk, without_sack};
use crate::{
    tcp::{
        TcpConfig,
        testing::{Script, ms, offset, us},
    },
    wire::{Options, Segment},
};

fn offsets(segments: &[Segment]) -> Vec<i32> {
    segments.iter().filter(|s| s.payload_len > 0).map(offset).collect()
}

/// Ten segments sent, none acknowledged, one round trip later.
fn flight(segments: u64) -> Script {
    let mut script = Script::established(TcpConfig::default(), bulk(segments));
    assert_eq!(script.run().len(), 10);
    script.now += ms(1);
    script
}

#[test]
fn rfc8985_s6_2_step4_three_sacked_segments_prove_a_loss_at_once() {
    let mut script = flight(10);
    assert!(script.ack(0, &[(1000, 2000)]).is_empty());
    assert!(script.ack(0, &[(1000, 3000)]).is_empty());
    assert_eq!(offsets(&script.ack(0, &[(1000, 4000)])), [0]);
    let info = script.conn.info();
    assert_eq!((info.counters.recoveries, info.counters.retransmits), (1, 1));
    script.ack(0, &[(1000, 10_000)]);
    script.now += ms(1);
    script.ack(10_000, &[]);
    let info = script.conn.info();
    assert_eq!(info.counters.retransmits, 1, "one loss costs one retransmission");
    assert_eq!((info.cwnd, info.ssthresh), (7000, 7000), "CUBIC's 0.7 of the flight");
}

#[test]
fn rfc8985_s6_2_step5_one_sacked_segment_suffices_after_the_reordering_window() {
    let mut script = flight(10);
    assert!(script.ack(0, &[(1000, 2000)]).is_empty());
    let seen = script.wait(ms(1));
    assert_eq!(offsets(&seen.iter().map(|s| s.1).collect::<Vec<_>>()), [0]);
    assert_eq!(seen[0].0, 250, "a quarter of the smallest round trip");
}

#[test]
fn rfc8985_s6_2_step3_after_observed_reordering_three_sacked_segments_prove_no_loss() {
    let mut script = flight(30);
    script.ack(0, &[(1000, 3000)]);
    script.now += us(100);
    let sent = script.ack(10_000, &[]);
    assert!(offsets(&sent).iter().all(|o| *o >= 10_000), "reordered, not lost");
    script.now += ms(1);
    let next = script.ack(10_000, &[(11_000, 20_000)]);
    assert!(!offsets(&next).contains(&10_000));
    let seen = script.wait(ms(2));
    assert!(offsets(&seen.iter().map(|s| s.1).collect::<Vec<_>>()).contains(&10_000));
}

#[test]
fn rfc8985_s6_2_lost_retransmissions_are_detected() {
    let mut script = flight(40);
    assert_eq!(offsets(&script.ack(0, &[(1000, 4000)]))[..1], [0]);
    // New data sent after the retransmission is acknowledged first.
    script.now += ms(1);
    script.ack(0, &[(1000, 10_000)]);
    script.now += ms(1);
    let sent = script.ack(0, &[(1000, 14_000)]);
    assert!(offsets(&sent).contains(&0), "{:?}", offsets(&sent));
    assert_eq!(script.conn.counters().rto_expired, 0);
}

/// A window of four segments, of which the first is lost and, a round trip later, its retransmission as well. `window`
/// is the peer's window by then. Returns the offsets sent in the recovery.
fn lost_twice(window: u16) -> (Script, Vec<i32>) {
    let config = TcpConfig { timestamps: false, ..TcpConfig::default() };
    let mut script = Script::connecting(config, bulk(30));
    script.run();
    script.template.window = 4000;
    script.syn_ack(Options { mss: Some(1000), sack_permitted: true, ..Options::default() });
    assert_eq!(offsets(&script.run()), [0, 1000, 2000, 3000]);
    script.now += ms(1);
    script.template.window = window;
    let sent = script.ack(0, &[(1000, 4000)]);
    script.now += ms(1);
    (script, offsets(&sent))
}

/// When the window allows one more segment, its SACK shows that the retransmission was lost.
#[test]
fn rfc8985_s6_2_in_a_tiny_window_one_later_segment_detects_the_lost_retransmission() {
    let (mut script, sent) = lost_twice(5000);
    assert_eq!(sent, [0, 4000]);
    assert_eq!(offsets(&script.ack(0, &[(4000, 5000), (1000, 4000)])), [0]);
    script.now += ms(1);
    script.ack(5000, &[]);
    let counters = script.conn.counters();
    assert_eq!((counters.retransmits, counters.recoveries, counters.rto_expired), (2, 1, 0));
}

/// When no more may be sent, no later segment can be acknowledged, and tail loss probes are not sent during a recovery:
/// the time-out repairs the loss, as RFC 8985 section 7.2 specifies (and Linux does). That costs the time-out, but no
/// more than one segment.
#[test]
fn rfc8985_s7_2_a_lost_retransmission_with_nothing_after_it_waits_for_the_time_out() {
    let (mut script, sent) = lost_twice(4000);
    assert_eq!(sent, [0]);
    let seen = script.wait(ms(250));
    assert_eq!(seen.iter().map(|(_, segment)| offset(segment)).collect::<Vec<_>>(), [0]);
    assert_eq!(seen[0].0, 200_000, "201 ms after the retransmission");
    assert_eq!(offsets(&script.ack(4000, &[]))[0], 4000);
    let counters = script.conn.counters();
    assert_eq!((counters.retransmits, counters.tlp_probes, counters.rto_expired), (2, 0, 1));
}

#[test]
fn rfc8985_s7_the_tail_is_probed_after_two_round_trips() {
    let mut script = flight(10);
    script.ack(8000, &[]);
    let seen = script.wait(ms(150));
    assert_eq!(seen.len(), 1, "only one probe before an answer");
    assert_eq!(offset(&seen[0].1), 9000, "the last segment");
    assert_eq!(seen[0].0, 4_000, "2 SRTT and the allowance for a delayed ACK");
    // Its SACK shows that the one before is lost.
    assert_eq!(offsets(&script.ack(8000, &[(9000, 10_000)])), [8000]);
    script.ack(10_000, &[]);
    let counters = script.conn.counters();
    assert_eq!((counters.tlp_probes, counters.rto_expired, counters.recoveries), (1, 0, 1));
}

/// While one probe is outstanding no other may be sent, and data sent meanwhile does not postpone the time-out.
#[test]
fn rfc8985_s7_3_a_probe_that_may_not_be_sent_does_not_postpone_the_time_out() {
    let mut script = Script::established(TcpConfig::default(), bulk(1));
    script.run();
    let rto = script.conn.info().rto;
    let seen = script.wait(ms(4));
    assert_eq!((seen.len(), script.conn.counters().tlp_probes), (1, 1));
    let mut waited = Duration::ZERO;
    while script.conn.counters().rto_expired == 0 {
        script.source.total += 1000;
        script.run();
        script.wait(ms(10));
        waited += ms(10);
        assert!(waited < rto + ms(10), "{waited:?} after the probe, and no time-out");
    }
    assert_eq!(script.conn.counters().tlp_probes, 1);
}

/// A peer that delays its ACKs by 40 ms, as Linux does, causes a few spurious probes and then no more. One lost tail
/// resets the allowance.
#[test]
fn rfc8985_s7_2_the_allowance_for_delayed_acks_adapts() {
    let mut script = Script::established(TcpConfig::default(), bulk(0));
    let mut probes = Vec::new();
    for _ in 0..12 {
        script.source.total += 1000;
        script.run();
        let end = script.source.at as u32;
        let seen = script.wait(ms(40));
        match seen.first() {
            // The peer answers the duplicate at once, with a D-SACK.
            Some(_) => script.ack(end, &[(end - 1000, end)]),
            None => script.ack(end, &[]),
        };
        probes.push(seen.len());
    }
    assert!((1..=5).contains(&probes.iter().sum::<usize>()), "{probes:?}: at most 2, 4, 8, 16 and 32 ms");
    assert!(probes[6..].iter().all(|n| *n == 0), "{probes:?}");
    // This time the segment is lost.
    script.source.total += 1000;
    script.run();
    let end = script.source.at as u32;
    assert_eq!(script.wait(ms(150)).len(), 1);
    script.ack(end, &[]);
    script.source.total += 1000;
    script.run();
    script.ack(end + 1000, &[]);
    assert_eq!(script.conn.counters().rto_expired, 0);
    script.source.total += 1000;
    script.run();
    let seen = script.wait(ms(150));
    assert!(!seen.is_empty() && seen[0].0 < 150_000, "{:?}", seen.first().map(|s| s.0));
    let pto = script.conn.info().srtt.unwrap() * 2 + ms(2);
    assert!(seen[0].0 <= pto.as_micros() as u64 + 1, "2 ms again: {:?}", seen[0].0);
}

#[test]
fn rfc8985_s7_3_the_tail_is_probed_after_new_data_was_sent() {
    let mut script = flight(10);
    script.ack(8000, &[]);
    script.now += us(100);
    script.source.total += 1000;
    // The window has room, so the new data is sent without a probe.
    script.run();
    let before = script.conn.counters().tlp_probes;
    script.wait(ms(20));
    assert_eq!(script.conn.counters().tlp_probes, before + 1);
}

#[test]
fn rfc8985_s7_3_a_probe_may_exceed_the_congestion_window_by_one_segment() {
    let mut script = Script::established(TcpConfig::default(), bulk(30));
    assert_eq!(script.run().len(), 10);
    let seen = script.wait(ms(150));
    assert_eq!(offsets(&seen.iter().map(|s| s.1).collect::<Vec<_>>()), [10_000]);
}

#[test]
fn rfc8985_s7_4_2_a_repaired_tail_reduces_the_window_a_duplicated_one_does_not() {
    for duplicated in [false, true] {
        let mut script = Script::established(TcpConfig::default(), bulk(5));
        script.run();
        script.wait(ms(20));
        assert_eq!(script.conn.counters().tlp_probes, 1);
        let before = script.conn.info().cwnd;
        if duplicated {
            script.ack(5000, &[(4000, 5000)]);
        } else {
            script.ack(5000, &[]);
        }
        script.source.total += 1000;
        script.run();
        script.ack(6000, &[]);
        let after = script.conn.info().cwnd;
        assert_eq!(after < before, !duplicated, "{before} then {after}");
    }
}

#[test]
fn rfc6582_s3_2_three_duplicate_acks_without_sack() {
    let mut script = Script::established(without_sack(), bulk(30));
    script.run();
    script.now += ms(1);
    let duplicates: Vec<Vec<i32>> = (0..4).map(|_| offsets(&script.ack(0, &[]))).collect();
    assert_eq!(duplicates[0], [10_000], "RFC 3042: new data on the first two");
    assert_eq!(duplicates[1], [11_000]);
    assert_eq!(duplicates[2], [0]);
    // A partial ACK shows the next hole.
    script.now += ms(1);
    let sent = offsets(&script.ack(3000, &[]));
    assert!(sent.contains(&3000), "{sent:?}");
    script.now += ms(1);
    script.ack(12_000, &[]);
    let counters = script.conn.counters();
    assert_eq!((counters.recoveries, counters.retransmits, counters.rto_expired), (1, 2, 0));
}

#[test]
fn rfc3042_s2_limited_transmit_with_sack() {
    let mut script = flight(30);
    assert_eq!(offsets(&script.ack(0, &[(1000, 2000)])), [10_000]);
    assert_eq!(offsets(&script.ack(0, &[(1000, 3000)])), [11_000]);
    assert_eq!(offsets(&script.ack(0, &[(1000, 4000)])), [0]);
}

#[test]
fn rfc6937_s3_recovery_never_stops_sending_and_never_bursts() {
    let mut script = flight(60);
    let mut sent = Vec::new();
    for i in 2..=10 {
        sent.push(offsets(&script.ack(0, &[(1000, i * 1000)])).len());
    }
    assert!(sent.iter().all(|n| *n <= 2), "{sent:?}");
    assert!(sent.iter().sum::<usize>() >= 6, "{sent:?}");
}

#[test]
fn a_retransmission_has_the_boundaries_of_the_original() {
    let source = crate::tcp::testing::Stream::new(9_000, 300, false);
    let mut script = Script::established(TcpConfig::default(), source);
    let first = script.run();
    assert!(first.iter().all(|s| s.payload_len == 300));
    let seen = script.wait(ms(2_000));
    assert!(seen.len() >= 3);
    for (_, segment) in seen {
        assert_eq!((segment.payload_len, offset(&segment) % 300), (300, 0));
    }
}

#[test]
fn rfc2018_s8_everything_is_retransmitted_to_a_reneging_receiver() {
    let mut script = flight(10);
    script.ack(0, &[(1000, 10_000)]);
    script.now += ms(1);
    // The first segment arrives, but the receiver has discarded the rest.
    script.ack(1000, &[]);
    let seen = script.wait(ms(3_000));
    let again = offsets(&seen.iter().map(|s| s.1).collect::<Vec<_>>());
    assert!(again.contains(&1000), "{again:?}");
    let mut acked = 1000;
    while acked < 10_000 {
        acked += 1000;
        script.now += ms(1);
        script.ack(acked, &[]);
        script.wait(ms(1));
    }
    assert_eq!(script.conn.info().chunks_retained, 0);
}

#[test]
fn invalid_sack_blocks_are_ignored() {
    let mut script = flight(10);
    for blocks in [[(9000, 8000)], [(5000, 5000)], [(9000, 11_000)], [(4_000_000_000, 4_000_001_000)]] {
        assert!(script.ack(0, &blocks).is_empty());
    }
    assert_eq!(script.conn.info().in_flight, 10_000);
    script.ack(0, &[(500, 1500)]);
    assert_eq!(script.conn.info().in_flight, 10_000, "a block that wholly covers no segment");
}
