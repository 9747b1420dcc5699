//! Path MTU probes: RFC 4821 sections 4 and 7.

use super::iss;
use crate::{
    tcp::{
        PathMtuConfig, TcpConfig,
        testing::{Script, Stream, ms, offset, path},
    },
    wire::{IcmpError, IcmpKind, Options, Segment},
};

/// A path of 1500 bytes on which packets of 1040 are known to pass: segments of 1000 bytes, and probes of up to 1460.
fn narrow(bytes: u64) -> Script {
    let path_mtu = PathMtuConfig { initial: Some(1040), ..PathMtuConfig::default() };
    let config = TcpConfig { timestamps: false, path_mtu, ..TcpConfig::default() };
    let mut script = Script::connecting(config, Stream::new(bytes, 0, false));
    script.run();
    script.syn_ack(Options { mss: Some(1460), sack_permitted: true, ..Options::default() });
    assert_eq!((script.conn.emss(), script.conn.info().path_mtu), (1000, 1040));
    script
}

fn pieces(segments: &[Segment]) -> Vec<(i32, usize)> {
    segments.iter().filter(|s| s.payload_len > 0).map(|s| (offset(s), s.payload_len)).collect()
}

#[test]
fn rfc4821_s7_6_1_a_probe_that_arrives_raises_the_size() {
    let mut script = narrow(60_000);
    let sent = pieces(&script.run());
    assert_eq!(sent[..2], [(0, 1460), (1460, 1000)], "one probe, followed by whole segments");
    assert_eq!(sent.iter().filter(|p| p.1 > 1000).count(), 1);
    let before = script.conn.info();
    script.now += ms(1);
    script.ack(1460, &[]);
    let after = script.conn.info();
    assert_eq!((after.path_mtu, after.emss), (1500, 1460));
    assert_eq!(after.counters.mtu_probes, 1);
    assert!(after.cwnd <= before.cwnd + 1460, "section 4: the window in bytes does not rise");
    script.now += ms(1);
    let all = script.source.at as u32;
    assert!(pieces(&script.ack(all, &[])).iter().all(|p| p.1 == 1460));
}

#[test]
fn rfc4821_s7_6_2_a_probe_lost_alone_is_no_congestion() {
    let mut script = narrow(400_000);
    script.run();
    let before = script.conn.info();
    script.now += ms(1);
    script.ack(0, &[(1460, 2460)]);
    script.ack(0, &[(1460, 3460)]);
    let again = pieces(&script.ack(0, &[(1460, 4460)]));
    assert_eq!(again[..2], [(0, 1000), (1000, 460)], "cut into sizes that pass");
    script.now += ms(1);
    let sent = script.source.at as u32;
    script.ack(sent, &[]);
    let after = script.conn.info();
    assert_eq!((after.ssthresh, after.counters.recoveries), (u64::MAX, 0));
    assert!(after.cwnd >= before.cwnd, "{} then {}", before.cwnd, after.cwnd);
    assert_eq!((after.counters.mtu_probes_lost, after.path_mtu), (1, 1040));
    // Section 7.6.2: the next probe waits for as many round trips as the window has segments.
    let lost_at = script.now;
    let segments = u32::try_from(after.cwnd / 1000).unwrap();
    while script.conn.counters().mtu_probes == 1 {
        script.now += ms(1);
        let all = script.source.at as u32;
        script.ack(all, &[]);
        assert!(script.now.since(lost_at) < ms(200), "the search goes on");
        script.source.total += 10_000;
    }
    assert!(script.now.since(lost_at) >= after.srtt.unwrap() * segments);
    script.tear_down();
}

#[test]
fn rfc4821_s7_6_4_a_probe_lost_with_others_is_inconclusive() {
    let mut script = narrow(60_000);
    script.run();
    script.now += ms(1);
    // The segment after the probe is lost as well.
    script.ack(0, &[(2460, 3460)]);
    script.ack(0, &[(2460, 4460)]);
    script.ack(0, &[(2460, 5460)]);
    let info = script.conn.info();
    assert_eq!((info.counters.recoveries, info.counters.mtu_probes_lost), (1, 0));
    assert!(info.ssthresh < u64::MAX, "section 4: other losses are congestion");
    script.now += ms(1);
    let all = script.source.at as u32;
    let sent = pieces(&script.ack(all, &[]));
    assert!(sent.iter().any(|p| p.1 == 1460), "the same size is tried again at once: {sent:?}");
}

#[test]
fn rfc4821_s7_6_4_a_later_loss_in_the_window_makes_the_probe_inconclusive() {
    let mut script = narrow(60_000);
    script.run();
    script.now += ms(1);
    // First only the probe seems lost, then another segment of the same window.
    script.ack(0, &[(1460, 4460)]);
    script.ack(0, &[(5460, 8460), (1460, 4460)]);
    let counters = script.conn.counters();
    assert_eq!((counters.recoveries, counters.mtu_probes_lost), (1, 0));
    script.now += ms(1);
    let all = script.source.at as u32;
    script.ack(all, &[]);
    assert_eq!(script.conn.counters().mtu_probes_lost, 0);
}

#[test]
fn rfc4821_s7_6_3_a_probe_at_the_tail_is_cut_by_the_loss_probe_without_a_timeout() {
    let mut script = narrow(1460);
    assert_eq!(pieces(&script.run()), [(0, 1460)]);
    let seen: Vec<Segment> = script.wait(ms(50)).into_iter().map(|s| s.1).collect();
    assert_eq!(pieces(&seen), [(0, 1000), (1000, 460)]);
    script.ack(1460, &[]);
    let info = script.conn.info();
    assert_eq!((info.counters.rto_expired, info.counters.mtu_probes_lost), (0, 1));
    assert_eq!((info.ssthresh, info.path_mtu), (u64::MAX, 1040));
}

#[test]
fn rfc4821_s7_6_2_three_duplicate_acks_detect_a_lost_probe_without_sack() {
    let path_mtu = PathMtuConfig { initial: Some(1040), ..PathMtuConfig::default() };
    let config = TcpConfig { timestamps: false, sack: false, path_mtu, ..TcpConfig::default() };
    let mut script = Script::connecting(config, Stream::new(60_000, 0, false));
    script.run();
    script.syn_ack(Options { mss: Some(1460), ..Options::default() });
    assert_eq!(pieces(&script.run())[0], (0, 1460));
    script.now += ms(1);
    let again: Vec<_> = (0..6).flat_map(|_| pieces(&script.ack(0, &[]))).filter(|p| p.0 < 1460).collect();
    assert_eq!(again, [(0, 1000), (1000, 460)], "once, whatever duplicates follow");
    let all = script.source.at as u32;
    script.now += ms(1);
    script.ack(all, &[]);
    let info = script.conn.info();
    assert_eq!((info.counters.recoveries, info.counters.mtu_probes_lost, info.ssthresh), (0, 1, u64::MAX));
}

#[test]
fn rfc4821_s7_4_no_probe_is_sent_without_room_or_with_probing_off() {
    let mut script = narrow(60_000);
    script.template.window = 4000;
    script.ack(0, &[]);
    assert!(pieces(&script.run()).iter().all(|p| p.1 <= 1000), "no room for the segments after the probe");

    let off = PathMtuConfig { probing: false, initial: Some(1040), ..PathMtuConfig::default() };
    let config = TcpConfig { timestamps: false, path_mtu: off, ..TcpConfig::default() };
    let mut script = Script::connecting(config, Stream::new(60_000, 0, false));
    script.run();
    script.syn_ack(Options { mss: Some(1460), sack_permitted: true, ..Options::default() });
    assert!(pieces(&script.run()).iter().all(|p| p.1 <= 1000));
}

/// The first data after a pause is sent with the initial window of four segments (RFC 5681 section 4.1): a probe and
/// the three segments after it do not fit.
#[test]
fn rfc4821_s7_4_a_probe_after_a_pause_fits_the_restarted_window() {
    let after_a_pause = |pause| {
        let path_mtu = PathMtuConfig { initial: Some(1040), ..PathMtuConfig::default() };
        let config = TcpConfig { timestamps: false, initial_window: 4, path_mtu, ..TcpConfig::default() };
        let mut script = Script::connecting(config, Stream::new(4500, 0, false));
        script.run();
        script.syn_ack(Options { mss: Some(1460), sack_permitted: true, ..Options::default() });
        assert!(pieces(&script.run()).iter().all(|p| p.1 == 1000), "no room for a probe");
        script.now += ms(1);
        assert_eq!(pieces(&script.ack(4000, &[])), [(4000, 500)], "no data for a probe");
        script.now += ms(1);
        script.ack(4500, &[]);
        let before = script.conn.info();
        assert!(before.cwnd > 4460 && before.in_flight == 0, "{before:?}");
        script.now += pause;
        script.source.total += 20_000;
        let sent: Vec<_> = pieces(&script.run()).iter().map(|p| p.1).collect();
        let after = script.conn.info();
        assert!(after.in_flight <= after.cwnd, "{after:?}");
        sent
    };
    assert_eq!(after_a_pause(ms(1))[0], 1460, "without a pause, a probe is sent");
    assert_eq!(after_a_pause(ms(2_000)), [1000; 4]);
}

/// A middlebox may split a probe, so that a part of it is acknowledged. It counts in full, though it is longer than any
/// segment of the size in use.
#[test]
fn rfc4821_s7_a_partly_acknowledged_probe_counts_in_full() {
    let path_mtu = PathMtuConfig { initial: Some(2040), ..PathMtuConfig::default() };
    let config = TcpConfig { timestamps: false, path_mtu, ..TcpConfig::default() };
    let source = Stream::new(20_000, 0, false);
    let mut script = Script::connecting_over(&Script::links(), 9000, config, source);
    script.run();
    script.syn_ack(Options { mss: Some(4960), sack_permitted: true, ..Options::default() });
    let sent = pieces(&script.run());
    let (probe, all) = (sent[0].1, script.source.at);
    assert_eq!((script.conn.emss(), sent[0].0), (2000, 0));
    assert!(probe > 4000 && sent[1..].iter().all(|p| p.1 <= 2000), "{sent:?}");
    // Nothing more is sent.
    script.source.total = all;
    script.now += ms(1);
    assert!(script.ack(probe as u32 - 1, &[]).is_empty());
    let info = script.conn.info();
    assert_eq!((script.acked(), info.in_flight, info.path_mtu), (probe as u64 - 1, all, 2040));
    script.ack(probe as u32, &[]);
    let info = script.conn.info();
    assert_eq!((info.in_flight, usize::from(info.path_mtu)), (all - probe as u64, probe + 40));
}

#[test]
fn rfc4821_s7_6_2_a_routers_message_about_a_probe_gives_the_next_size() {
    let mut script = narrow(60_000);
    script.run();
    let now = script.now;
    let error = IcmpError { flow: path(true).flow, seq: iss(0), kind: IcmpKind::TooBig { mtu: 1400 } };
    assert_eq!(script.conn.icmp(now, &error), None);
    assert_eq!(script.conn.info().path_mtu, 1040, "not adopted until a probe succeeds");
    assert_eq!(
        pieces(&script.run())[..2],
        [(0, 1000), (1000, 460)],
        "the quoted segment is retransmitted at once"
    );
    script.now += ms(1);
    let all = script.source.at as u32;
    let sent = pieces(&script.ack(all, &[]));
    assert!(sent.contains(&(all as i32, 1360)), "{sent:?}");
    script.now += ms(1);
    let all = script.source.at as u32;
    script.ack(all, &[]);
    let info = script.conn.info();
    assert_eq!((info.path_mtu, info.counters.recoveries, info.ssthresh), (1400, 0, u64::MAX));
}

#[test]
fn rfc4821_s7_7_after_a_black_hole_probes_raise_the_size_again() {
    let mut script = Script::connecting(
        TcpConfig { timestamps: false, ..TcpConfig::default() },
        Stream::new(100_000, 0, false),
    );
    script.run();
    script.syn_ack(Options { mss: Some(1460), sack_permitted: true, ..Options::default() });
    assert!(pieces(&script.run()).iter().all(|p| p.1 == 1460));
    // Nothing is delivered for three time-outs.
    script.wait(ms(2_000));
    assert_eq!(script.conn.info().path_mtu, 1024);
    for _ in 0..40 {
        script.now += ms(1);
        script.source.total += 10_000;
        let all = script.source.at as u32;
        script.ack(all, &[]);
    }
    let info = script.conn.info();
    assert_eq!((info.path_mtu, info.counters.mtu_probes_lost), (1500, 0), "the path was down, not narrower");
}

#[test]
fn rfc5681_s3_1_the_window_keeps_its_segments_when_they_shrink() {
    let mut script = Script::established(TcpConfig::default(), Stream::new(100_000, 0, false));
    script.run();
    script.now += ms(1);
    script.ack(10_000, &[]);
    let before = script.conn.info();
    let now = script.now;
    script.conn.link_mtu(now, 540);
    let after = script.conn.info();
    assert_eq!((before.emss, after.emss), (1000, 500));
    assert_eq!(after.cwnd, before.cwnd / 2);
    script.conn.link_mtu(now, 1500);
    assert_eq!(script.conn.info().cwnd, after.cwnd, "RFC 4821 section 4: and its bytes when they grow");
}
