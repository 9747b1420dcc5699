//! SYN floods: bounded tables, and honest peers that still connect (RFC 4987).

use std::{net::Ipv4Addr, time::Duration};

use xwarp_tcp::{
    seq::SeqNum,
    sim::{SimLink, path},
    tcp::TcpConfig,
    wire::{Fields, Flags, Headers, MAX_HEADER_BYTES, Mac, Options, Path, Sum},
};

use crate::{
    raw::RawPeer,
    support::{Lab, PORT},
};

/// A bare segment from a host that may not exist.
pub fn forged(link: &mut SimLink, host: u32, port: u16, fields: &Fields) {
    let source = Ipv4Addr::from(0x0a09_0000 + host);
    let path = Path { source_mac: Mac([2, 0, 0, 0, 0, 9]), ..path((source, port), ([10, 1, 1, 1], PORT)) };
    let mut frame = [0; MAX_HEADER_BYTES];
    let len = Headers::new(&path).emit(&mut frame, fields, 0, Sum::default()).unwrap();
    link.inject(&frame[..len]);
}

pub fn syn(seq: u32) -> Fields {
    let flags = Flags { syn: true, ..Flags::default() };
    let options =
        Options { mss: Some(1460), window_scale: Some(7), sack_permitted: true, ..Options::default() };
    Fields { seq: SeqNum::new(seq), flags, window: 65_535, options, ..Fields::default() }
}

fn ack(seq: u32, ack: u32) -> Fields {
    let flags = Flags { ack: true, ..Flags::default() };
    Fields { seq: SeqNum::new(seq), ack: SeqNum::new(ack), flags, window: 65_535, ..Fields::default() }
}

#[test]
fn rfc4987_s2_a_flood_is_bounded_and_honest_peers_still_connect() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let first = lab.connect();
    lab.pass(Duration::from_millis(5));
    lab.client.send(first, 2_000_000);
    // 100 000 SYNs of as many flows in a second, and meanwhile honest peers come.
    for burst in 0..1000u32 {
        for n in 0..100 {
            let host = burst * 100 + n;
            forged(&mut lab.stranger, host, 1024, &syn(host));
        }
        if burst % 200 == 100 {
            lab.connect();
        }
        lab.pass(Duration::from_millis(1));
        assert!(lab.server.stack.half_open() <= 4096);
        assert!(lab.server.link.census().rules <= 4096 + 8, "one rule for each known flow");
    }
    let counters = lab.server.stack.counters();
    assert_eq!((counters.half_open - counters.half_open_evicted) as usize, 4096 + 6);
    assert_eq!((counters.passive_opens, counters.backlog_full), (6, 0));
    assert_eq!((lab.client.upper.established.len(), lab.server.upper.established.len()), (6, 6));
    assert_eq!(lab.server.stack.connections(), 6, "a SYN is no connection");
    assert_eq!(lab.server.upper.delivered, 2_000_000);
    let info = lab.client.stack.info(first).unwrap();
    let lost = (info.counters.rto_expired, info.counters.recoveries);
    assert_eq!(lost, (0, 0), "the open connection was not affected");
    // After the flood, all entries time out.
    lab.pass(Duration::from_secs(20));
    assert_eq!((lab.server.stack.half_open(), lab.server.link.census().rules), (0, 7));
    assert!(lab.server.stack.counters().half_open_expired >= 4096);
    lab.assert_no_errors();
}

#[test]
fn rfc6298_s2_1_syn_acks_are_retransmitted_after_1_2_and_4_seconds() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    forged(&mut lab.stranger, 1, 1024, &syn(7));
    let mut sent = Vec::new();
    for second in 0..20 {
        lab.pass(Duration::from_millis(500));
        let out = lab.server.stack.tcp_counters().segments_out;
        if sent.last().is_none_or(|(_, n)| *n != out) {
            sent.push((second, out));
        }
    }
    // In halves of a second.
    assert_eq!(sent, [(0, 1), (2, 2), (6, 3), (14, 4)]);
    assert_eq!(lab.server.stack.half_open(), 1, "the last SYN-ACK also waits for its time-out");
    lab.pass(Duration::from_secs(8));
    assert_eq!(lab.server.stack.half_open(), 0);
    assert_eq!(lab.server.stack.tcp_counters().retransmits, 3);
}

/// No FPDU fits such segments, so the peer would be served nothing.
#[test]
fn rfc9293_s3_7_1_a_syn_with_an_mss_below_256_is_refused() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let small = Fields { options: Options { mss: Some(255), ..Options::default() }, ..syn(7) };
    forged(&mut lab.stranger, 1, 1024, &small);
    lab.pass(Duration::from_millis(1));
    let counters = lab.server.stack.counters();
    assert_eq!((lab.server.stack.half_open(), counters.small_segments, counters.resets_sent), (0, 1, 1));
    let enough = Fields { options: Options { mss: Some(256), ..Options::default() }, ..syn(7) };
    forged(&mut lab.stranger, 1, 1024, &enough);
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.stack.half_open(), 1);
}

#[test]
fn rfc9293_s3_10_7_4_a_half_open_connection_applies_the_checks_of_an_open_one() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let step = Duration::from_millis(1);
    forged(&mut lab.stranger, 1, 1024, &syn(7));
    lab.pass(step);
    let out = |lab: &Lab| lab.server.stack.tcp_counters().segments_out;
    assert_eq!((lab.server.stack.half_open(), out(&lab)), (1, 1));
    // A retransmitted SYN is answered by another SYN-ACK.
    forged(&mut lab.stranger, 1, 1024, &syn(7));
    lab.pass(step);
    assert_eq!(out(&lab), 2);
    // A wrong acknowledgment is answered by a reset, and the half-open connection stays.
    forged(&mut lab.stranger, 1, 1024, &ack(8, 12_345));
    lab.pass(step);
    assert_eq!((lab.server.stack.half_open(), out(&lab)), (1, 3));
    // A reset within the window that is not next is challenged (RFC 5961 section 3.2), an exact one is accepted.
    let reset = |seq| Fields { flags: Flags { rst: true, ..Flags::default() }, ..ack(seq, 0) };
    forged(&mut lab.stranger, 1, 1024, &reset(9));
    lab.pass(step);
    assert_eq!((lab.server.stack.half_open(), out(&lab)), (1, 4));
    forged(&mut lab.stranger, 1, 1024, &reset(8));
    lab.pass(step);
    assert_eq!((lab.server.stack.half_open(), lab.server.link.census().rules), (0, 1));
    assert_eq!(lab.server.stack.connections(), 0);
}

/// The answer is built by a connection that is then forgotten: the one that follows knows only the window of the SYN-ACK,
/// and must not advertise less than was promised.
#[test]
fn rfc7323_s2_4_an_answer_before_the_handshake_ends_promises_no_larger_window() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    RawPeer::listen_in(&mut lab);
    let mut peer = RawPeer::new(1, 1024);
    peer.send(&mut lab, &syn(1000), &[]);
    lab.pass(Duration::from_millis(1));
    let (syn_ack, _) = peer.receive(&mut lab).pop().expect("a SYN-ACK");
    // A reset within the window that is not next is challenged (RFC 5961 section 3.2).
    let reset = Fields { flags: Flags { rst: true, ..Flags::default() }, ..ack(1002, 0) };
    peer.send(&mut lab, &reset, &[]);
    lab.pass(Duration::from_millis(1));
    let (answer, _) = peer.receive(&mut lab).pop().expect("a challenge ACK");
    assert_eq!((answer.flags.syn, answer.flags.rst, answer.ack), (false, false, syn_ack.ack));
    assert_eq!(lab.server.stack.half_open(), 1);
    let shift = syn_ack.options.window_scale.expect("offered");
    let promised = u32::from(answer.window) << shift;
    assert!(shift > 0 && promised > 0 && promised <= u32::from(syn_ack.window), "{promised}: {syn_ack:?}");
}

/// RFC 9293 section 3.5: the ACK of the handshake may be lost, or carry data.
#[test]
fn data_confirms_a_half_open_connection_and_is_taken() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    // The client's ACK of the SYN-ACK and its first data are lost.
    lab.connect();
    lab.lose_until(Duration::from_micros(400));
    lab.pass(Duration::from_secs(4));
    assert_eq!((lab.client.upper.established.len(), lab.server.upper.established.len()), (1, 1));
    let all = lab.server.stack.tcp_counters();
    assert_eq!((all.out_of_window, lab.server.stack.half_open()), (0, 0));
}

#[test]
fn a_peer_is_accepted_once_a_full_backlog_has_room() {
    let mut lab = Lab::new(TcpConfig::default(), 2);
    lab.server.upper.deaf = true;
    let conns: Vec<_> = (0..3).map(|_| lab.connect()).collect();
    lab.pass(Duration::from_millis(10));
    assert_eq!(lab.server.stack.connections(), 2);
    assert!(lab.server.stack.counters().backlog_full > 0);
    lab.server.upper.deaf = false;
    lab.pass(Duration::from_secs(10));
    assert_eq!(lab.client.upper.established.len(), conns.len());
    lab.assert_no_errors();
}

#[test]
fn closing_a_listener_drops_its_half_open_connections() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    for host in 0..10 {
        forged(&mut lab.stranger, host, 1024, &syn(7));
    }
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.stack.half_open(), 10);
    let listener = lab.listener;
    lab.server.stack.unlisten(&mut lab.server.link, listener);
    assert_eq!((lab.server.stack.half_open(), lab.server.link.census().rules), (0, 0));
}

#[test]
fn time_wait_is_bounded_and_yields_to_new_connections() {
    let config = TcpConfig { time_wait: Duration::from_mins(4), ..TcpConfig::default() };
    let mut lab = Lab::limited(config, 16, |stack| stack.most_time_wait = 5);
    for _ in 0..8 {
        let conn = lab.connect();
        lab.pass(Duration::from_millis(5));
        lab.client.finish(conn);
        lab.pass(Duration::from_millis(5));
    }
    assert_eq!((lab.client.stack.connections(), lab.server.stack.connections()), (5, 0));
    assert_eq!(lab.client.stack.counters().time_wait_cut, 3);

    let mut lab = Lab::limited(config, 16, |stack| stack.most_connections = 5);
    for _ in 0..8 {
        let conn = lab.connect();
        lab.pass(Duration::from_millis(5));
        lab.client.finish(conn);
        lab.pass(Duration::from_millis(5));
    }
    assert_eq!(lab.client.upper.closed.values().count(), 5, "eight connections used five indices");
    assert_eq!(lab.client.stack.counters().time_wait_cut, 3);
    lab.assert_no_errors();
}

/// Half-open connections keep nothing between segments, so they share one budget of challenge ACKs.
#[test]
fn rfc5961_s7_half_open_connections_share_a_budget_of_challenges() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    for host in 0..500 {
        forged(&mut lab.stranger, host, 1024, &syn(7));
    }
    lab.pass(Duration::from_millis(5));
    let sent = |lab: &Lab| lab.server.stack.tcp_counters().segments_out;
    let mut in_periods = Vec::new();
    for _ in 0..4 {
        // Begin with a fresh period, before or between retransmissions of SYN-ACKs.
        lab.pass(Duration::from_millis(5_100));
        let before = sent(&lab);
        let retransmits = lab.server.stack.tcp_counters().retransmits;
        for host in 0..500 {
            forged(&mut lab.stranger, 1000 + host, 1024, &syn(7));
        }
        lab.pass(Duration::from_millis(2));
        let opened = sent(&lab);
        assert_eq!(opened - before - (lab.server.stack.tcp_counters().retransmits - retransmits), 500);
        for host in 0..500 {
            let flags = Flags { rst: true, ..Flags::default() };
            forged(&mut lab.stranger, 1000 + host, 1024, &Fields { flags, ..ack(100, 0) });
            let far = ack(7u32.wrapping_sub(5), 0);
            forged(&mut lab.stranger, 1000 + host, 1024, &far);
        }
        lab.pass(Duration::from_millis(2));
        in_periods.push(sent(&lab) - opened);
        for host in 0..500 {
            let flags = Flags { rst: true, ..Flags::default() };
            forged(&mut lab.stranger, 1000 + host, 1024, &Fields { flags, ..ack(8, 0) });
        }
        lab.pass(Duration::from_millis(2));
    }
    assert!(in_periods.iter().all(|n| (64..=128).contains(n)), "{in_periods:?}");
    assert!(in_periods.iter().any(|n| *n != in_periods[0]), "the budget cannot be predicted: {in_periods:?}");
}

/// Neither the first SYN-ACK nor answers to retransmitted SYNs and other segments.
#[test]
fn half_open_connections_use_no_frame_of_the_reserve() {
    let tcp = TcpConfig { reserve_chunks: 1 << 20, ..TcpConfig::default() };
    let mut lab = Lab::new(tcp, 8);
    for fields in [syn(7), syn(7), ack(8, 1), ack(100, 0), syn(7)] {
        forged(&mut lab.stranger, 1, 1024, &fields);
        lab.pass(Duration::from_millis(1));
    }
    assert_eq!((lab.server.stack.half_open(), lab.server.stack.tcp_counters().segments_out), (1, 0));
}

#[test]
fn the_number_and_time_limit_of_syn_acks_are_configurable() {
    let tcp = TcpConfig { syn_acks: 8, syn_ack_timeout: Duration::from_mins(3), ..TcpConfig::default() };
    for (tcp, seconds, sent) in [
        (tcp, 180, 8),
        (TcpConfig { syn_acks: 2, ..tcp }, 3, 2),
        (TcpConfig { syn_ack_timeout: Duration::from_secs(7), ..tcp }, 7, 3),
    ] {
        let mut lab = Lab::new(tcp, 8);
        forged(&mut lab.stranger, 1, 1024, &syn(7));
        lab.pass(Duration::from_millis(seconds * 1000 - 10));
        assert_eq!((lab.server.stack.half_open(), lab.server.stack.tcp_counters().segments_out), (1, sent));
        lab.pass(Duration::from_secs(80));
        assert_eq!(lab.server.stack.half_open(), 0);
    }
}
