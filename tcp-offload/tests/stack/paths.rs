//! One estimate of the MTU for each destination: RFC 8201 section 5.2, RFC 4821 section 5.2.

use std::time::Duration;

use xwarp_tcp::{
    tcp::{PathMtuConfig, TcpConfig},
    ulp::ConnId,
};

use crate::support::Lab;

fn path_mtu(lab: &Lab, conn: ConnId) -> u16 {
    lab.client.stack.info(conn).unwrap().path_mtu
}

/// A client with two connections over a path that carries 1400 bytes, and no router that says so.
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
fn rfc4821_s5_2_what_one_connection_finds_the_others_use() {
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
        "no probe was taken for congestion"
    );
    let again = info.counters.retransmits - info.counters.tlp_probes;
    assert_eq!(again, 2 * info.counters.mtu_probes_lost, "nothing but probes was lost, each cut in two");
    // And one that begins later.
    let late = lab.connect();
    lab.pass(Duration::from_millis(10));
    assert_eq!(path_mtu(&lab, late), found);
    lab.assert_no_errors();
}

#[test]
fn rfc8201_s5_3_after_ten_minutes_a_wider_path_is_found() {
    let (mut lab, [busy, quiet]) = narrow();
    lab.client.send(busy, 20_000_000);
    lab.pass(Duration::from_secs(2));
    lab.narrow(None);
    lab.client.send(busy, 5_000_000);
    lab.pass(Duration::from_secs(2));
    assert!(path_mtu(&lab, busy) <= 1400, "not before its time");
    lab.pass(Duration::from_mins(10));
    lab.client.send(busy, 5_000_000);
    lab.pass(Duration::from_secs(2));
    assert_eq!((path_mtu(&lab, busy), path_mtu(&lab, quiet)), (1500, 1500));
    assert_eq!(lab.server.upper.delivered, 30_000_000);
}

#[test]
fn rfc4821_s7_7_a_router_that_says_nothing_is_survived() {
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
fn a_change_of_the_interface_reaches_connections_listeners_and_what_is_known() {
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
    assert_eq!(info.path_mtu, 1300, "the listener's new connections begin with it");
}
