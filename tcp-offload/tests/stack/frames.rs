//! Peers that keep transmit frames occupied must leave enough for other connections.

use std::time::Duration;

use xwarp_tcp::{
    mpa::MpaConfig,
    sim::WireConfig,
    stack::StackConfig,
    tcp::TcpConfig,
    ulp::{CloseReason, ConnId},
};

use crate::{raw::RawPeer, support::Lab};

const FRAMES: usize = 256;

/// A server with few transmit frames, and an honest client.
fn lab(limit: impl Fn(&mut StackConfig)) -> Lab {
    let links = WireConfig { tx_chunks: FRAMES, rx_chunks: 4096, ..WireConfig::default() };
    let mut lab = Lab::over(&links, TcpConfig::default(), MpaConfig::default(), 64, limit);
    RawPeer::listen_in(&mut lab);
    lab
}

/// A raw peer with an established connection, and the server's id of the connection.
fn established(lab: &mut Lab, host: u32) -> (RawPeer, ConnId) {
    let mut peer = RawPeer::open(lab, host, 1024);
    peer.request(lab);
    lab.pass(Duration::from_millis(1));
    // A bare FPDU, without which a responder sends none: length 0, pad, CRC over both.
    let crc = crc32c(&[0, 0, 0, 0]).to_le_bytes();
    peer.send_data(lab, &[&[0, 0, 0, 0][..], &crc].concat());
    lab.pass(Duration::from_millis(1));
    let conn = *lab.server.upper.established.last().unwrap();
    (peer, conn)
}

fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

/// Receives and acknowledges the server's data for some round trips with an open window, and leaves more data in
/// flight.
fn grab(lab: &mut Lab, peer: &mut RawPeer) {
    for _ in 0..12 {
        lab.pass(Duration::from_millis(1));
        peer.receive(lab);
        peer.acknowledge(lab, 65_535);
    }
    lab.pass(Duration::from_micros(80));
}

/// Runs for `time` while each peer advertises a closed window every 100 ms.
fn stay_closed(lab: &mut Lab, peers: &[RawPeer], time: Duration) {
    let until = lab.now + time;
    while lab.now < until {
        for peer in peers {
            peer.acknowledge(lab, 0);
        }
        lab.inbox.clear();
        lab.pass(Duration::from_millis(100));
    }
}

fn retained(lab: &Lab, conns: &[ConnId]) -> usize {
    conns.iter().filter_map(|conn| lab.server.stack.info(*conn)).map(|info| info.chunks_retained).sum()
}

/// Opens an honest connection from client to server, and `count` peers that will close their windows over data in
/// flight. Returns the honest connection at the server and the peers with their connections.
fn attack(lab: &mut Lab, count: u32) -> (ConnId, Vec<RawPeer>, Vec<ConnId>) {
    let client = lab.connect();
    lab.pass(Duration::from_millis(5));
    lab.client.send(client, 1);
    lab.pass(Duration::from_millis(5));
    let honest = lab.server.upper.established[0];
    let (mut peers, conns): (Vec<_>, Vec<_>) = (0..count).map(|host| established(lab, host)).unzip();
    for (peer, conn) in peers.iter_mut().zip(&conns) {
        lab.server.send(*conn, 10_000_000);
        grab(lab, peer);
    }
    (honest, peers, conns)
}

#[test]
fn closed_windows_over_data_in_flight_do_not_starve_other_connections_of_frames() {
    let mut lab = lab(|_| {});
    let (honest, peers, conns) = attack(&mut lab, 8);
    assert!(retained(&lab, &conns) > FRAMES * 3 / 4, "{} frames", retained(&lab, &conns));
    lab.server.send(honest, 20_000_000);
    stay_closed(&mut lab, &peers, Duration::from_secs(5));
    assert_eq!(lab.client.upper.delivered, 20_000_000, "the honest connection has its frames");
    let counters = lab.server.stack.counters();
    assert!(counters.spilled_bytes > 100_000, "{counters:?}");
    assert_eq!(counters.stalled_resets, 0, "there is room on the heap");
    assert!(conns.iter().all(|conn| lab.server.stack.info(*conn).is_some()));
    // After the window opens, the peer receives every byte unchanged; the wire's audit compares them.
    let mut peer = peers.into_iter().next().unwrap();
    let before = peer.ack;
    for _ in 0..50 {
        peer.acknowledge(&mut lab, 65_535);
        lab.pass(Duration::from_millis(200));
        peer.receive(&mut lab);
    }
    assert!(peer.ack.since(before) > 200_000, "{}", peer.ack.since(before));
}

#[test]
fn stalled_connections_are_reset_when_frames_and_heap_are_scarce() {
    let mut lab = lab(|config| config.most_spilled_bytes = 64 << 10);
    let (honest, peers, conns) = attack(&mut lab, 8);
    lab.server.send(honest, 20_000_000);
    stay_closed(&mut lab, &peers, Duration::from_secs(15));
    assert!(lab.server.stack.spilled_bytes() <= 64 << 10);
    assert!(lab.server.stack.counters().stalled_resets > 0);
    let closed = |conn: &ConnId| lab.server.upper.closed.get(&conn.index) == Some(&CloseReason::TimedOut);
    assert!(conns.iter().any(closed), "{:?}", lab.server.upper.closed);
    assert_eq!(lab.client.upper.delivered, 20_000_000);
    lab.assert_no_errors();
}
