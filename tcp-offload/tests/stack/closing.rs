//! How connections go: with the address that they stand on, and by TIME-WAIT.

use std::time::Duration;

use xwarp_tcp::{tcp::TcpConfig, ulp::CloseReason};

use crate::{
    flood::{forged, syn},
    support::Lab,
};

#[test]
fn an_address_that_is_removed_takes_its_connections_with_it_also_half_open_ones() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(5));
    for host in 0..10 {
        forged(&mut lab.stranger, host, 1024, &syn(7));
    }
    lab.pass(Duration::from_millis(1));
    assert_eq!((lab.server.stack.connections(), lab.server.stack.half_open()), (1, 10));
    let before = lab.server.stack.tcp_counters().segments_out;
    let other = "10.1.1.2".parse().unwrap();
    lab.server.stack.address_removed(lab.now, &mut lab.server.link, other);
    assert_eq!((lab.server.stack.connections(), lab.server.stack.half_open()), (1, 10));
    let address = "10.1.1.1".parse().unwrap();
    lab.server.stack.address_removed(lab.now, &mut lab.server.link, address);
    assert_eq!(lab.server.stack.half_open(), 0);
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.stack.connections(), 0);
    assert_eq!(lab.server.stack.tcp_counters().segments_out - before, 11, "a reset for each");
    assert_eq!(lab.server.link.census().rules, 1, "the listener's");
    assert_eq!(lab.client.upper.closed.get(&conn.index), Some(&CloseReason::Reset));
    lab.pass(Duration::from_secs(20));
    assert_eq!(lab.server.stack.tcp_counters().segments_out - before, 11, "nothing is repeated");
    lab.server.assert_nothing_leaked();
}

/// The server's last words arrive, but for 10 s nothing that the client says to them: TIME-WAIT waits as long as the server
/// tries, which then knows that all was delivered.
#[test]
fn rfc9293_s3_10_7_4_last_words_are_acknowledged_also_after_a_long_back_off() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(5));
    let server = lab.server.upper.established[0];
    // A responder waits for the initiator's first FPDU.
    lab.client.send(conn, 100);
    lab.pass(Duration::from_millis(5));
    lab.client.finish(conn);
    lab.server.send(server, 1000);
    lab.lose_until(Duration::from_secs(10));
    lab.pass(Duration::from_secs(25));
    assert_eq!(lab.client.upper.delivered, 1000);
    let closed = [lab.client.upper.closed.get(&conn.index), lab.server.upper.closed.get(&server.index)];
    assert_eq!(closed, [Some(&CloseReason::Graceful); 2]);
    lab.assert_no_errors();
}
