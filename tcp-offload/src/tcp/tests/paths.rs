//! Path MTU, ICMP errors and changes of the next hop: RFC 1191, 8201, 4821, 5927.

use super::{bulk, iss};
use crate::{
    tcp::{
        TcpConfig,
        testing::{Script, Stream, ms, offset, path},
    },
    ulp::CloseReason,
    wire::{IcmpError, IcmpKind, Mac, Segment},
};

fn too_big(mtu: u32, seq: u32) -> IcmpError {
    IcmpError { flow: path(true).flow, seq: iss(seq), kind: IcmpKind::TooBig { mtu } }
}

fn pieces(segments: &[Segment]) -> Vec<(i32, usize)> {
    segments.iter().map(|s| (offset(s), s.payload_len)).collect()
}

#[test]
fn rfc1191_s6_segments_in_flight_are_cut_to_the_new_size_and_retransmitted() {
    let mut script = Script::established(TcpConfig::default(), bulk(6));
    script.source.total = 3000;
    assert_eq!(script.run().len(), 3);
    let before = script.conn.info();
    let now = script.now;
    assert_eq!(script.conn.icmp(now, &too_big(640, 1000)), None);
    assert_eq!(script.conn.emss(), 600);
    let again = script.run();
    assert_eq!(pieces(&again), [(0, 600), (600, 400), (1000, 600), (1600, 400), (2000, 600), (2600, 400)]);
    let after = script.conn.info();
    assert_eq!(after.counters.recut, 3);
    assert_eq!(after.ssthresh, before.ssthresh, "no congestion: the window stays");
    script.ack(3000, &[]);
    assert_eq!(script.conn.info().chunks_retained, 0);
    script.source.total += 600;
    assert_eq!(pieces(&script.run()), [(3000, 600)]);
}

/// A lost segment that is longer than the new size needs room for its first piece only. If it waited for more, shorter
/// new segments would overtake it.
#[test]
fn rfc1191_s6_a_lost_segment_longer_than_the_new_size_precedes_new_data() {
    let mut script = Script::established(TcpConfig::default(), bulk(10));
    assert_eq!(script.run().len(), 10);
    let now = script.now;
    script.conn.icmp(now, &too_big(640, 0));
    assert_eq!(pieces(&script.run()).last(), Some(&(5600, 400)));
    let full = script.conn.info();
    assert_eq!((full.in_flight, full.cwnd), (6000, 6000), "four segments are lost and wait for the window");
    script.now += ms(1);
    script.source.total += 6000;
    // Room for one segment of the new size, but not for a lost one.
    assert_eq!(pieces(&script.ack(600, &[])), [(6000, 600)]);
    assert_eq!(script.conn.info().cwnd, 6000);
}

#[test]
fn rfc5927_s4_1_errors_that_quote_no_segment_in_flight_are_ignored() {
    let mut script = Script::established(TcpConfig::default(), bulk(3));
    script.run();
    script.ack(1000, &[]);
    let now = script.now;
    for seq in [999, 3000, 70_000] {
        script.conn.icmp(now, &too_big(640, seq));
        assert_eq!(script.conn.emss(), 1000);
    }
    let unreachable = IcmpError { kind: IcmpKind::Unreachable { hard: true }, ..too_big(0, 1000) };
    assert_eq!(script.conn.icmp(now, &unreachable), None, "RFC 5927 section 5.2: not once established");
}

#[test]
fn rfc1191_s7_1_an_error_of_an_old_router_without_mtu_means_the_next_plateau() {
    let mut script = Script::established(TcpConfig::default(), bulk(3));
    script.run();
    let now = script.now;
    script.conn.icmp(now, &too_big(0, 0));
    assert_eq!(script.conn.info().path_mtu, 1492);
    script.conn.icmp(now, &too_big(9000, 0));
    assert_eq!(script.conn.info().path_mtu, 1492, "never raised by an error");
    script.conn.icmp(now, &too_big(67, 0));
    assert_eq!(script.conn.info().path_mtu, 1492, "RFC 1191 section 3: no link has less than 68");
    script.conn.icmp(now, &too_big(68, 0));
    assert_eq!((script.conn.info().path_mtu, script.conn.emss()), (68, 256));
}

#[test]
fn rfc1122_s4_2_3_9_a_hard_error_ends_the_attempt() {
    let mut script = Script::connecting(TcpConfig::default(), Stream::new(0, 0, false));
    script.run();
    let now = script.now;
    let syn = iss(0).sub(1);
    let error = |hard| IcmpError { flow: path(true).flow, seq: syn, kind: IcmpKind::Unreachable { hard } };
    assert_eq!(script.conn.icmp(now, &error(false)), None);
    assert_eq!(script.conn.icmp(now, &error(true)), Some(CloseReason::Unreachable));
}

#[test]
fn rfc4821_s7_7_large_segments_that_are_lost_silently_are_cut() {
    let mut script = Script::connecting(
        TcpConfig { timestamps: false, ..TcpConfig::default() },
        Stream::new(1400, 0, false),
    );
    script.run();
    script.syn_ack(crate::wire::Options { mss: Some(1460), sack_permitted: true, ..Default::default() });
    assert_eq!(pieces(&script.run()[..1]), [(0, 1400)]);
    let seen: Vec<Segment> = script.wait(ms(5_000)).into_iter().map(|s| s.1).collect();
    assert!(pieces(&seen).contains(&(0, 984)), "{:?}", pieces(&seen));
}

#[test]
fn a_raised_mtu_is_used_for_new_segments() {
    let mut script = Script::established(TcpConfig::default(), bulk(1));
    let now = script.now;
    script.conn.link_mtu(now, 540);
    assert_eq!(script.conn.emss(), 500);
    script.conn.link_mtu(now, 9000);
    assert_eq!(script.conn.emss(), 1000, "the peer's MSS still holds");
}

#[test]
fn frames_and_retransmissions_carry_changed_ethernet_addresses() {
    let mut script = Script::established(TcpConfig::default(), bulk(2));
    script.run();
    script.conn.redirect(Mac([8; 6]), Mac([9; 6]));
    let seen = script.wait(ms(500));
    let redirected = |s: &Segment| (s.source_mac, s.destination_mac) == (Mac([8; 6]), Mac([9; 6]));
    assert!(!seen.is_empty() && seen.iter().all(|(_, s)| redirected(s)));
}
