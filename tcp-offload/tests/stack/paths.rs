//! Path MTU estimates shared by all connections to a destination: RFC 8201 section 5.2, RFC 4821 section 5.2.

use std::time::Duration;

use xwarp_tcp::{
    tcp::{PathMtuConfig, TcpConfig},
    ulp::ConnId,
};

use crate::{
    flood::{forged, syn},
    raw::RawPeer,
    support::Lab,
};

fn path_mtu(lab: &Lab, conn: ConnId) -> u16 {
    lab.client.stack.info(conn).unwrap().path_mtu
}

/// A client with two connections over a path that drops packets above 1400 bytes without ICMP errors.
fn narrow() -> (Lab, [ConnId; 2]) {
    let config = PathMtuConfig { initial: Some(1100), ..PathMtuConfig::default() };
    // A small window: after a failed probe the search waits for as many round trips as the window has segments.
    let tcp = TcpConfig { path_mtu: config, receive_window: 1 << 16, ..TcpConfig::default() };
    let mut lab = Lab::new(tcp, 8);
    lab.narrow(Some(1400));
    let conns = [lab.connect(), lab.connect()];
    lab.pass(Duration::from_millis(10));
    assert_eq!(lab.client.upper.established.len(), 2);
    (lab, conns)
}

#[test]
fn rfc4821_s5_2_all_connections_use_the_path_mtu_found_by_one() {
    let (mut lab, [busy, quiet]) = narrow();
    lab.client.send(busy, 20_000_000);
    lab.pass(Duration::from_secs(2));
    let found = path_mtu(&lab, busy);
    assert!((1320..=1400).contains(&found), "{found}");
    assert_eq!(path_mtu(&lab, quiet), found, "a connection that never sent a byte");
    let info = lab.client.stack.info(busy).unwrap();
    assert_eq!(lab.server.upper.delivered, 20_000_000);
    assert_eq!(
        (info.counters.rto_expired, info.counters.recoveries),
        (0, 0),
        "no lost probe counted as congestion"
    );
    let again = info.counters.retransmits - info.counters.tlp_probes;
    assert_eq!(
        again,
        2 * info.counters.mtu_probes_lost,
        "only probes were lost, each of which was cut in two"
    );
    // A connection opened later uses the estimate as well.
    let late = lab.connect();
    lab.pass(Duration::from_millis(10));
    assert_eq!(path_mtu(&lab, late), found);
    lab.assert_no_errors();
}

#[test]
fn rfc8201_s5_3_a_wider_path_is_detected_after_ten_minutes() {
    let (mut lab, [busy, quiet]) = narrow();
    lab.client.send(busy, 20_000_000);
    lab.pass(Duration::from_secs(2));
    lab.narrow(None);
    lab.client.send(busy, 5_000_000);
    lab.pass(Duration::from_secs(2));
    assert!(path_mtu(&lab, busy) <= 1400, "not before the estimate expires");
    lab.pass(Duration::from_mins(10));
    lab.client.send(busy, 5_000_000);
    lab.pass(Duration::from_secs(2));
    assert_eq!((path_mtu(&lab, busy), path_mtu(&lab, quiet)), (1500, 1500));
    assert_eq!(lab.server.upper.delivered, 30_000_000);
}

#[test]
fn rfc4821_s7_7_a_router_without_icmp_errors_is_survived() {
    let mut lab = Lab::new(TcpConfig { receive_window: 1 << 16, ..TcpConfig::default() }, 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(10));
    lab.narrow(Some(1400));
    lab.client.send(conn, 5_000_000);
    lab.pass(Duration::from_secs(20));
    assert_eq!(lab.server.upper.delivered, 5_000_000);
    assert!((1320..=1400).contains(&path_mtu(&lab, conn)), "{}", path_mtu(&lab, conn));
    lab.assert_no_errors();
    lab.client.assert_nothing_leaked();
}

#[test]
fn a_changed_interface_mtu_applies_to_connections_listeners_and_cached_paths() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(10));
    let now = lab.now;
    lab.client.stack.mtu_changed(now, 1300);
    lab.server.stack.mtu_changed(now, 1300);
    assert_eq!(path_mtu(&lab, conn), 1300);
    lab.connect();
    lab.pass(Duration::from_millis(10));
    let accepted = *lab.server.upper.established.last().unwrap();
    let info = lab.server.stack.info(accepted).unwrap();
    assert_eq!(info.path_mtu, 1300, "new connections of the listener start with it");
}

/// Many connections to one destination over a path whose MTU falls, and half-open connections of an address that is
/// removed. Events that affect all of them happen in the same order in each run.
#[test]
fn sim_the_same_seed_runs_the_same_with_many_connections_to_one_destination() {
    let trace = || {
        let mut lab = Lab::new(TcpConfig::default(), 64);
        let conns: Vec<_> = (0..40).map(|_| lab.connect()).collect();
        for host in 0..40 {
            forged(&mut lab.stranger, host, 1024, &syn(7));
        }
        lab.pass(Duration::from_millis(10));
        for conn in &conns {
            lab.client.send(*conn, 100_000);
        }
        lab.pass(Duration::from_millis(20));
        lab.narrow(Some(1300));
        lab.pass(Duration::from_secs(5));
        assert_eq!(lab.server.upper.delivered, 40 * 100_000);
        assert!(path_mtu(&lab, conns[39]) <= 1300);
        for host in 100..140 {
            forged(&mut lab.stranger, host, 1024, &syn(7));
        }
        lab.pass(Duration::from_millis(10));
        let server = &mut lab.server;
        assert!(server.stack.half_open() >= 40);
        server.stack.address_removed(lab.now, &mut server.link, [10, 1, 1, 1].into());
        RawPeer::listen_in(&mut lab);
        lab.pass(Duration::from_millis(10));
        assert!(lab.inbox.len() >= 40, "a reset for each half-open connection");
        lab.wire.trace_hash()
    };
    assert_eq!(trace(), trace());
}

/// MUST-20(b): a connection whose retransmissions are not acknowledged requests another lookup of its next hop.
#[test]
fn rfc9293_s3_8_3_at_r1_the_next_hop_is_looked_up_again() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(5));
    while lab.client.stack.next_lookup().is_some() {}
    lab.lose_until(Duration::from_secs(20));
    lab.pass(Duration::from_millis(1));
    lab.client.send(conn, 1000);
    lab.pass(Duration::from_secs(15));
    let lookup = lab.client.stack.next_lookup();
    assert!(lookup.is_some_and(|lookup| lookup.conn == conn && lookup.unanswered), "{lookup:?}");
    assert_eq!(lab.client.stack.next_lookup(), None, "once");
    lab.pass(Duration::from_secs(13));
    assert!(lab.client.stack.next_lookup().is_some(), "again after the next time-out");
}
