//! Time-outs, keepalive and the user timeout: RFC 6298, RFC 9293 sections 3.8.3 and 3.8.4.

use super::{bulk, irs, iss, plain, silent, unprobed, without_sack};
use crate::{
    tcp::{
        Keepalive, SoftError, TcpConfig,
        testing::{Script, ms, offset, path},
    },
    ulp::CloseReason,
    wire::{Fields, IcmpError, IcmpKind, Options},
};

#[test]
fn rfc6298_s5_the_first_segment_is_retransmitted_after_200_400_800_ms() {
    let mut script = Script::established(without_sack(), bulk(3));
    assert_eq!(script.run().len(), 3);
    let seen = script.wait(ms(1_500));
    let times: Vec<(u64, i32)> = seen.iter().map(|(t, s)| (t / 1000, offset(s))).collect();
    assert_eq!(times, [(201, 0), (603, 0), (1407, 0)], "beyond the round trip of 1 ms");
    let info = script.conn.info();
    assert_eq!(
        (info.cwnd, info.counters.rto_expired),
        (984, 3),
        "RFC 4821 section 7.7: packets of 1024 bytes"
    );
    assert_eq!(info.ssthresh, 2100 * 984 / 1000, "reduced once, not at each back-off (RFC 5681 section 3.1)");
}

/// RACK retransmits the first segment: the time-out restarts for this transmission.
#[test]
fn rfc6298_s5_a_segment_is_not_retransmitted_twice_within_a_time_out() {
    let mut script = Script::established(TcpConfig::default(), bulk(10));
    assert_eq!(script.run().len(), 10);
    script.wait(ms(3));
    script.now += ms(147);
    let sent = script.ack(0, &[(1000, 4000)]);
    assert_eq!(sent.iter().map(offset).collect::<Vec<_>>(), [0]);
    let rto = script.conn.info().rto;
    assert!(script.wait(rto.saturating_sub(ms(1))).is_empty(), "its ACK may still arrive");
    assert_eq!(offset(&script.wait(ms(1))[0].1), 0);
    assert_eq!(script.conn.counters().rto_expired, 1);
}

/// Without timestamps it is unknown which transmission an ACK answers.
#[test]
fn rfc6298_s3_retransmitted_segments_are_not_measured() {
    let mut script = Script::established(TcpConfig::default(), bulk(1));
    script.run();
    let before = script.conn.info().srtt;
    assert_eq!(before, Some(ms(1)));
    script.wait(ms(150));
    assert!(script.conn.counters().tlp_probes > 0);
    script.ack(1000, &[]);
    assert_eq!((script.conn.info().srtt, script.conn.info().chunks_retained), (before, 0));
    script.source.total += 1000;
    script.run();
    script.now += ms(9);
    script.ack(2000, &[]);
    assert_eq!(script.conn.info().srtt, Some(ms(2)), "a segment sent once is measured: 7/8 and 1/8");
}

#[test]
fn rfc5681_s3_1_ssthresh_is_two_segments_at_least() {
    let mut script = Script::established(without_sack(), bulk(1));
    script.run();
    script.wait(ms(250));
    let info = script.conn.info();
    assert_eq!((info.counters.rto_expired, info.ssthresh, info.cwnd), (1, 2000, 1000));
}

#[test]
fn rfc6298_s5_3_an_ack_of_new_data_restarts_the_timer() {
    let mut script = Script::established(without_sack(), bulk(3));
    script.run();
    script.wait(ms(150));
    script.ack(1000, &[]);
    let seen = script.wait(ms(250));
    assert_eq!(seen.len(), 1);
    assert!(seen[0].0 >= 200_000, "not at 50 ms, when the first timer would have fired");
    assert_eq!(offset(&seen[0].1), 1000);
}

#[test]
fn rfc6298_s5_2_no_timer_runs_when_all_is_acknowledged() {
    let mut script = Script::established(unprobed(), bulk(3));
    script.run();
    script.ack(3000, &[]);
    assert_eq!(script.conn.deadline(), None);
}

#[test]
fn rfc5681_s3_1_after_a_timeout_lost_segments_are_retransmitted_in_slow_start() {
    let mut script = Script::established(without_sack(), bulk(8));
    script.run();
    script.wait(ms(201));
    let sent = script.ack(1000, &[]);
    assert_eq!(sent.iter().map(offset).collect::<Vec<_>>(), [1000, 2000]);
    let sent = script.ack(3000, &[]);
    assert_eq!(sent.iter().map(offset).collect::<Vec<_>>(), [3000, 4000, 5000]);
    script.ack(8000, &[]);
    assert_eq!(script.conn.info().chunks_retained, 0);
}

#[test]
fn rfc9293_s3_8_3_the_user_timeout_ends_a_connection_that_makes_no_progress() {
    let config = TcpConfig { user_timeout: ms(5_000), ..TcpConfig::default() };
    let mut script = Script::established(config, bulk(1));
    script.run();
    let start = script.now;
    script.wait(ms(4_900));
    assert_eq!(script.closed, None);
    script.wait(ms(200));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
    assert!(script.now.since(start) < ms(5_200));
    let Script { conn, .. } = &script;
    assert!(conn.is_closed());
}

fn alive() -> TcpConfig {
    let keepalive = Keepalive { idle: ms(1_000), interval: ms(100), probes: 3 };
    TcpConfig { keepalive: Some(keepalive), ..TcpConfig::default() }
}

/// `docs/decisions/0013`.
#[test]
fn a_dead_peer_is_detected_after_half_a_minute_by_default() {
    let mut script = Script::established(TcpConfig::default(), silent());
    script.run();
    let seen = script.wait(ms(29_999));
    let times: Vec<u64> = seen.iter().map(|(t, _)| t / 1000).collect();
    assert_eq!((times, script.closed), (vec![15_000, 18_000, 21_000, 24_000, 27_000], None));
    script.wait(ms(1));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));

    let mut script = Script::established(unprobed(), silent());
    script.run();
    assert!(script.wait(ms(3_600_000)).is_empty());
    assert_eq!(script.closed, None);
}

/// The end that accepted the connection probes one interval later, and a probe from the other end shows that it is
/// alive.
#[test]
fn only_the_initiator_of_an_idle_connection_probes() {
    let mut script = Script::accepting(alive(), Options::default());
    script.run();
    script.inject(plain(&script), 0);
    let probe = Fields { seq: irs(0).sub(1), ..plain(&script) };
    for _ in 0..20 {
        assert!(script.wait(ms(1_000)).is_empty());
        let [answer] = script.exchange(probe, 0)[..] else { panic!("an ACK") };
        assert_eq!((answer.seq, answer.ack), (iss(0), irs(0)));
    }
    assert_eq!(script.conn.counters().keepalives, 0);
    let times: Vec<u64> = script.wait(ms(1_500)).iter().map(|(t, _)| t / 1000).collect();
    assert_eq!((times, script.closed), (vec![1100, 1200, 1300], Some(CloseReason::TimedOut)));
}

/// An off-path host that knows the four-tuple can use up the budget of challenge ACKs. It can neither prevent answers
/// to the peer's probes nor pretend that a dead peer is alive.
#[test]
fn forged_segments_neither_suppress_answers_to_probes_nor_hide_a_dead_peer() {
    let mut script = Script::established(alive(), silent());
    script.run();
    let near = [(2, 0), (1, 1), (1, 100_000)];
    let forged = near.map(|(below, beyond)| Fields {
        seq: irs(0).sub(below),
        ack: iss(0).add(beyond),
        ..plain(&script)
    });
    for _ in 0..50 {
        for fields in forged {
            script.exchange(fields, 0);
        }
        let probe = Fields { seq: irs(0).sub(1), ..plain(&script) };
        assert_eq!(script.exchange(probe, 0).len(), 1, "the probe of the peer is answered");
    }
    for _ in 0..14 {
        for fields in forged {
            script.exchange(fields, 0);
        }
        script.wait(ms(100));
    }
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}

#[test]
fn rfc9293_s3_8_4_a_silent_peer_is_probed_and_given_up() {
    let mut script = Script::established(alive(), silent());
    script.run();
    let seen = script.wait(ms(2_000));
    let times: Vec<u64> = seen.iter().map(|(t, _)| t / 1000).collect();
    assert_eq!(times, [1000, 1100, 1200]);
    assert!(seen.iter().all(|(_, s)| s.seq == iss(0).sub(1) && s.payload_len == 0 && s.ack == irs(0)));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}

#[test]
fn rfc9293_s3_8_4_answers_to_probes_keep_the_connection_open() {
    let mut script = Script::established(alive(), silent());
    script.run();
    for _ in 0..5 {
        assert_eq!(script.wait(ms(1_050)).len(), 1);
        script.inject(plain(&script), 0);
    }
    assert_eq!(script.closed, None);
    assert_eq!(script.conn.counters().keepalives, 5);
}

#[test]
fn rfc9293_s3_8_4_the_peers_keepalive_is_answered() {
    let mut script = Script::established(TcpConfig::default(), silent());
    script.run();
    let probe = Fields { seq: irs(0).sub(1), ..plain(&script) };
    let [answer] = script.exchange(probe, 0)[..] else { panic!("an ACK") };
    assert_eq!((answer.seq, answer.ack), (iss(0), irs(0)));
}

#[test]
fn rfc5681_s4_1_the_window_restarts_after_idle() {
    let mut script = Script::established(TcpConfig::default(), bulk(60));
    for _ in 0..20 {
        script.run();
        let all = script.source.at as u32;
        script.now += ms(1);
        script.ack(all, &[]);
    }
    assert!(script.conn.info().cwnd > 20_000);
    script.wait(ms(1_000));
    script.source.total += 50_000;
    assert_eq!(script.run().len(), 10, "RFC 5681 section 4.1: the restart window is the initial window");
}

#[test]
fn rfc9293_s3_9_1_8_soft_errors_are_reported_and_do_not_end_the_connection() {
    let mut script = Script::established(without_sack(), bulk(1));
    script.run();
    assert_eq!(script.conn.info().soft_error, None);
    let now = script.now;
    let unreachable = IcmpKind::Unreachable { hard: false };
    script.conn.icmp(now, &IcmpError { flow: path(true).flow, seq: iss(0), kind: unreachable });
    assert_eq!(script.conn.info().soft_error, Some((SoftError::Unreachable, now)));
    // Section 3.8.3: R1 is three time-outs in a row.
    script.wait(ms(700));
    assert_eq!(script.conn.info().soft_error, Some((SoftError::Unreachable, now)));
    script.wait(ms(800));
    assert!(matches!(script.conn.info().soft_error, Some((SoftError::NoAnswer, at)) if at > now));
    assert_eq!(script.closed, None);
}

#[test]
fn rfc9293_s3_9_1_8_a_soft_error_is_reported_once_until_data_is_acknowledged() {
    let mut script = Script::established(without_sack(), bulk(2));
    script.run();
    let icmp = |script: &mut Script, seq| {
        let kind = IcmpKind::Unreachable { hard: false };
        let now = script.now;
        script.conn.icmp(now, &IcmpError { flow: path(true).flow, seq, kind });
        script.conn.take_soft_error()
    };
    assert_eq!(script.conn.take_soft_error(), None);
    assert_eq!(icmp(&mut script, iss(0)), Some(SoftError::Unreachable));
    assert_eq!(icmp(&mut script, iss(0)), None, "nothing has changed");
    script.now += ms(1);
    script.ack(1000, &[]);
    script.now += ms(1);
    assert_eq!(icmp(&mut script, iss(1000)), Some(SoftError::Unreachable));
    // An error of another kind is reported.
    script.wait(ms(2_000));
    assert_eq!(script.conn.take_soft_error(), Some(SoftError::NoAnswer));
    assert_eq!(script.closed, None);
}

#[test]
fn rfc9293_s3_8_3_and_s3_8_4_timeouts_can_be_changed_for_one_connection() {
    let mut script = Script::established(TcpConfig::default(), bulk(1));
    script.run();
    let mut tuning = TcpConfig::default().tuning();
    tuning.user_timeout = ms(2_000);
    let now = script.now;
    script.conn.tune(now, &tuning);
    script.wait(ms(2_500));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));

    // Even when the next time-out is far away by now.
    let mut script = Script::established(TcpConfig::default(), bulk(1));
    script.run();
    script.wait(ms(8_000));
    let now = script.now;
    tuning.user_timeout = ms(8_200);
    script.conn.tune(now, &tuning);
    script.wait(ms(300));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));

    let mut script = Script::established(unprobed(), silent());
    script.run();
    assert_eq!(script.conn.deadline(), None);
    tuning.keepalive = alive().keepalive;
    let now = script.now;
    script.conn.tune(now, &tuning);
    assert_eq!(script.wait(ms(1_050)).len(), 1);
    script.inject(plain(&script), 0);
    tuning.keepalive = None;
    let now = script.now;
    script.conn.tune(now, &tuning);
    assert!(script.wait(ms(60_000)).is_empty());
    assert_eq!(script.closed, None);
}

/// Settings in which every time and every number of packets is zero.
fn zeros() -> TcpConfig {
    let zero = std::time::Duration::ZERO;
    TcpConfig {
        initial_window: 0,
        rto_initial: zero,
        rto_min: zero,
        rto_max: zero,
        tlp_ack_delay: zero,
        delayed_ack: zero,
        ack_every: 0,
        connect_timeout: zero,
        syn_acks: 0,
        syn_ack_timeout: zero,
        user_timeout: zero,
        keepalive: Some(Keepalive { idle: zero, interval: zero, probes: 0 }),
        time_wait: zero,
        fin_wait_2: zero,
        challenges: 0,
        challenge_period: zero,
        max_chunks: 0,
        reserve_chunks: 0,
        hop_limit: 0,
        dscp: 255,
        ..TcpConfig::default()
    }
}

/// `Script::wait` panics when a timer is armed at or before the present.
#[test]
fn no_timer_spins_with_settings_of_zero() {
    let clamped = zeros().clamped();
    assert_eq!(clamped.clamped(), clamped);
    assert_eq!(TcpConfig::default().clamped(), TcpConfig::default());
    for config in [clamped, TcpConfig { user_timeout: ms(60_000), ..clamped }] {
        let keepalive = Some(Keepalive { probes: 100, ..config.keepalive.expect("on") });
        for (keepalive, source) in [(keepalive, bulk(9)), (keepalive, silent()), (None, bulk(9))] {
            let mut script =
                Script::established(TcpConfig { connect_timeout: ms(50), keepalive, ..config }, source);
            script.run();
            script.data(0, 10);
            script.wait(ms(20));
            script.inject(Fields { window: 0, ..plain(&script) }, 0);
            script.wait(ms(5_000));
        }
    }
}

#[test]
fn tuning_replaces_values_that_are_out_of_range() {
    let mut script = Script::established(TcpConfig::default(), silent());
    script.run();
    let (now, tuning) = (script.now, zeros().tuning());
    script.conn.tune(now, &tuning);
    assert!(script.conn.deadline().is_some_and(|at| at > now));
    script.wait(ms(1_000));
    assert_eq!(script.closed, Some(CloseReason::TimedOut), "one probe without an answer");
    assert_eq!(script.conn.counters().keepalives, 1);
}

/// Data and its ACK at the same instant: the smoothed round-trip time is zero, and so would be the probe time-out when
/// more segments are in flight than a delayed ACK covers.
#[test]
fn rfc8985_s7_2_a_round_trip_time_of_zero_does_not_arm_a_probe_for_now() {
    let config = TcpConfig { timestamps: false, ack_every: 8, ..TcpConfig::default() };
    let mut script = Script::connecting(config, bulk(20));
    script.run();
    let before = script.now;
    let options = Options { mss: Some(1000), sack_permitted: true, ..Options::default() };
    script.syn_ack_after(ms(0), options);
    assert_eq!((script.now, script.run().len()), (before, 10));
    assert_eq!(script.conn.info().srtt, Some(ms(0)));
    assert!(script.conn.deadline().is_some_and(|at| at > before));
    script.wait(ms(1));
    assert_eq!(script.conn.counters().tlp_probes, 1);
}

/// A host without a route to the peer sends nothing, not even a probe. What waited is sent at once when there is a route again.
#[test]
fn held_output_is_sent_at_once_when_there_is_a_route_again() {
    for waited in [10, 500] {
        let mut script = Script::established(TcpConfig::default(), bulk(3));
        script.conn.hold_output();
        assert!(script.run().is_empty());
        assert!(script.wait(ms(waited)).is_empty());
        assert!(script.conn.way_found(script.now), "after {waited} ms");
        assert_eq!(script.run().first().map(offset), Some(0), "after {waited} ms");
        script.ack(1000, &[]);
        script.ack(3000, &[]);
        assert_eq!(script.conn.info().chunks_retained, 0);
        assert!(!script.conn.way_found(script.now), "nothing was delayed");
    }
}

/// As kernel TCP: the time without a route counts like any other time without an answer.
#[test]
fn the_user_timeout_ends_a_connection_whose_output_is_held() {
    let config = TcpConfig { user_timeout: ms(5_000), ..TcpConfig::default() };
    let mut script = Script::established(config, bulk(1));
    script.conn.hold_output();
    script.run();
    script.wait(ms(4_900));
    assert_eq!(script.closed, None);
    script.wait(ms(200));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}

/// The host knows that the way is there again: the next retransmission need not wait for the time-out, which has grown.
#[test]
fn rfc6069_s4_1_a_returned_way_ends_the_back_off() {
    let mut script = Script::established(without_sack(), bulk(1));
    script.run();
    assert!(!script.conn.way_found(script.now), "nothing was delayed");
    assert_eq!(script.wait(ms(650)).len(), 2, "after 200 and 600 ms; the next one is due after 1400");
    assert!(script.conn.way_found(script.now));
    assert_eq!(script.run().iter().map(offset).collect::<Vec<_>>(), [0]);
    assert_eq!(script.wait(ms(300)).len(), 1, "the next one after a time-out without back-off");
}

/// The same for a SYN.
#[test]
fn rfc6069_s4_1_a_returned_way_ends_the_back_off_of_a_syn() {
    let mut script = Script::connecting(TcpConfig::default(), bulk(1));
    assert_eq!(script.run().len(), 1);
    assert_eq!(script.wait(ms(4_000)).len(), 2, "after 1 s and after 3 s");
    assert!(script.conn.way_found(script.now));
    assert_eq!(script.run().len(), 1);
}
