//! Spurious retransmissions are detected, and their reduction is undone: RFC 3522, 4015, 3708, 5682.

use super::bulk;
use crate::{
    tcp::{
        TcpConfig,
        testing::{Script, ms, offset},
    },
    wire::Options,
};

#[test]
fn rfc3708_all_retransmissions_reported_as_duplicates_undo_the_reduction() {
    let mut script = Script::established(TcpConfig::default(), bulk(10));
    script.run();
    script.now += ms(1);
    let before = script.conn.info();
    assert_eq!(offset(&script.ack(0, &[(1000, 4000)])[0]), 0);
    assert!(script.conn.info().ssthresh < before.ssthresh);
    // The original was only late; then the retransmission is reported.
    script.ack(4000, &[]);
    script.ack(4000, &[(0, 1000)]);
    let after = script.conn.info();
    assert_eq!((after.counters.undone, after.counters.dsacks_in), (1, 1));
    assert!(after.cwnd >= before.cwnd);
    assert_eq!(after.ssthresh, before.ssthresh);
}

fn stamped(segments: u64) -> (Script, u32) {
    let mut script = Script::connecting(TcpConfig::default(), bulk(segments));
    let syn = script.run()[0];
    let clock = syn.options.timestamps.expect("offered").value;
    script.stamp(500, clock);
    let options = Options { mss: Some(1012), sack_permitted: true, ..script.template.options };
    script.syn_ack(options);
    (script, clock)
}

#[test]
fn rfc3522_s3_the_echo_of_the_original_undoes_a_timeout() {
    let (mut script, _) = stamped(10);
    let first = script.run();
    let original = first[0].options.timestamps.expect("stamped").value;
    let before = script.conn.info();
    script.wait(ms(250));
    assert!(script.conn.info().counters.rto_expired > 0);
    script.stamp(501, original);
    script.ack(3000, &[]);
    let after = script.conn.info();
    assert_eq!(after.counters.undone, 1);
    assert!(after.cwnd >= before.cwnd, "{} then {}", before.cwnd, after.cwnd);
}

#[test]
fn rfc3522_s3_the_echo_of_the_retransmission_undoes_nothing() {
    let (mut script, _) = stamped(10);
    script.run();
    let seen = script.wait(ms(250));
    let again = seen.last().expect("a retransmission").1.options.timestamps.expect("stamped").value;
    script.stamp(501, again);
    script.ack(10_000, &[]);
    assert_eq!(script.conn.counters().undone, 0);
}

#[test]
fn rfc3522_s3_2_the_echo_of_the_original_undoes_a_fast_recovery() {
    let (mut script, _) = stamped(40);
    let original = script.run()[0].options.timestamps.expect("stamped").value;
    let before = script.conn.info();
    script.now += ms(5);
    script.stamp(501, original);
    assert_eq!(offset(&script.ack(0, &[(1000, 10_000)])[0]), 0);
    script.now += ms(1);
    script.ack(10_000, &[]);
    let after = script.conn.info();
    assert_eq!(after.counters.undone, 1);
    assert!(after.cwnd >= before.cwnd, "{} then {}", before.cwnd, after.cwnd);
}

#[test]
fn rfc3522_s3_2_the_echo_of_a_retransmission_beyond_a_gap_undoes_nothing() {
    let (mut script, _) = stamped(40);
    let original = script.run()[0].options.timestamps.expect("stamped").value;
    script.now += ms(5);
    script.stamp(501, original);
    let sent = script.ack(0, &[(2000, 8000)]);
    assert!([0, 1000].iter().all(|at| sent.iter().any(|s| offset(s) == *at)), "both are retransmitted");
    // The second arrives, the first is lost again: the peer still echoes the timestamp before both.
    script.now += ms(5);
    let sent = script.ack(0, &[(1000, 9000)]);
    assert_eq!(script.conn.counters().undone, 0);
    let again = sent[0].options.timestamps.expect("stamped").value;
    script.now += ms(5);
    script.stamp(502, again);
    script.ack(10_000, &[]);
    assert_eq!(script.conn.counters().undone, 0);
}

#[test]
fn rfc5682_s3_1_step_3b_two_acks_of_originals_make_a_timeout_spurious() {
    let mut script = Script::established(TcpConfig { rto_min: ms(3), ..TcpConfig::default() }, bulk(40));
    script.run();
    let before = script.conn.info();
    script.wait(ms(30));
    assert!(script.conn.info().counters.rto_expired > 0);
    // Step 2b: the ACK advances, new data is sent instead of retransmissions.
    let acked = 2000;
    let sent = script.ack(acked, &[]);
    assert!(
        !sent.is_empty() && sent.iter().all(|s| offset(s) >= 10_000),
        "{:?}",
        sent.iter().map(offset).collect::<Vec<_>>()
    );
    // Step 3b: the next ACK covers data that was sent only once.
    script.ack(acked + 1000, &[]);
    let after = script.conn.info();
    assert_eq!(after.counters.undone, 1);
    assert!(after.cwnd >= before.cwnd);
}

/// Segments sent shortly before the time-out are still in flight, more of them than the window of one segment allows.
#[test]
fn rfc5682_s3_1_step_2b_two_new_segments_are_sent_whatever_is_in_flight() {
    let config = TcpConfig { timestamps: false, ..TcpConfig::default() };
    let mut script = Script::connecting(config, bulk(1));
    script.run();
    script.syn_ack_after(ms(50), Options { mss: Some(1000), sack_permitted: true, ..Options::default() });
    assert_eq!(script.run().len(), 1);
    script.wait(ms(150));
    assert_eq!(script.conn.counters().tlp_probes, 1);
    let due = script.conn.deadline().expect("the time-out");
    script.wait(due.since(script.now).saturating_sub(ms(5)));
    script.source.total = 40_000;
    let late = script.run().len();
    script.wait(ms(10));
    let after = script.conn.info();
    assert_eq!((after.counters.rto_expired, after.cwnd), (1, 1000));
    assert!(after.in_flight >= 6000, "{late} sent late: {after:?}");
    let next = script.source.at as i32;
    let sent = script.ack(1000, &[]);
    assert_eq!(sent.iter().map(offset).collect::<Vec<_>>(), [next, next + 1000]);
    let after = script.conn.info();
    assert!(after.in_flight > after.cwnd + 4000, "{after:?}");
    script.ack(2000, &[]);
    assert_eq!(script.conn.counters().undone, 1, "step 3b: data sent once was acknowledged");
}

#[test]
fn rfc5682_s3_1_step_3a_a_duplicate_ack_leads_to_conventional_recovery() {
    let mut script = Script::established(TcpConfig { rto_min: ms(3), ..TcpConfig::default() }, bulk(40));
    script.run();
    script.wait(ms(30));
    script.ack(2000, &[]);
    let sent = script.ack(2000, &[]);
    assert!(sent.iter().any(|s| offset(s) == 2000), "{:?}", sent.iter().map(offset).collect::<Vec<_>>());
    assert_eq!(script.conn.counters().undone, 0);
}
