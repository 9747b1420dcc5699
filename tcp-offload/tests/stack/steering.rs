//! Which connections need a steering rule, and which packets may match it.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use xwarp_tcp::{
    forward_link,
    link::{Link, RxFrame, Steer},
    mpa::MpaConfig,
    seq::SeqNum,
    sim::{SimLink, path},
    stack::{ConnectError, ConnectParams},
    tcp::TcpConfig,
    wire::{Fields, Flags, Flow, Headers, MAX_HEADER_BYTES, Sum},
};

use crate::{flood::syn, raw::RawPeer, support::Lab};

/// A SYN from `::ffff:a.b.c.d` would create a half-open connection whose reset removes the rule of the IPv4 connection.
#[test]
fn rfc4291_s2_5_5_2_packets_of_mapped_addresses_are_dropped() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let mapped = |end: SocketAddr| match end.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), end.port()),
        IpAddr::V6(_) => end,
    };
    let victim = path(([10, 1, 0, 1], 10_001), ([10, 1, 1, 1], 4791)).flow;
    for (local, remote) in [
        (mapped(victim.local), mapped(victim.remote)),
        (mapped(victim.local), "[fd00::1]:4791".parse().unwrap()),
        ("[fd00::2]:10001".parse().unwrap(), mapped(victim.remote)),
    ] {
        let mut frame = [0; MAX_HEADER_BYTES];
        let len = Headers::new(&path(local, remote)).emit(&mut frame, &syn(7), 0, Sum::default()).unwrap();
        lab.stranger.inject(&frame[..len]);
    }
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.stack.counters().mapped_addresses, 3);
    assert_eq!((lab.server.stack.half_open(), lab.server.link.census().rules), (0, 1));

    let (mpa, params) = (MpaConfig::default(), ConnectParams::default());
    let path = path(mapped(victim.local), mapped(victim.remote));
    let refused = lab.client.stack.connect(lab.now, &mut lab.client.link, path, mpa, params);
    assert_eq!(refused, Err(ConnectError::MappedAddress));
}

/// When a half-open connection with the four-tuple of our own connection expires or is reset, the rule stays until
/// our connection ends.
#[test]
fn a_half_open_connection_does_not_unsteer_our_own() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let forger = RawPeer::new(1, 1024);
    let flow = forger.flow_at_server();
    forger.send(&mut lab, &syn(1000), &[]);
    lab.pass(Duration::from_millis(1));
    assert_eq!((lab.server.stack.half_open(), lab.server.link.is_steered(Steer::Flow(flow))), (1, true));

    let (mpa, params) = (MpaConfig::default(), ConnectParams::default());
    let server = &mut lab.server;
    let path = path(flow.local, flow.remote);
    server.stack.connect(lab.now, &mut server.link, path, mpa, params).unwrap();
    let reset = Flags { rst: true, ..Flags::default() };
    forger.send(&mut lab, &Fields { seq: SeqNum::new(1001), flags: reset, ..Fields::default() }, &[]);
    lab.pass(Duration::from_secs(20));
    assert_eq!(lab.server.stack.half_open(), 0, "the half-open connection has expired");
    assert!(lab.server.link.is_steered(Steer::Flow(flow)), "the connection has lost its steering rule");
    lab.pass(Duration::from_secs(20));
    assert_eq!((lab.server.stack.connections(), lab.server.link.census().rules), (0, 1));
}

/// The link of one of two engines; the other one has the flow `theirs`.
struct Shared<'l> {
    link: &'l mut SimLink,
    theirs: Flow,
    handed_over: Vec<usize>,
}

impl Link for Shared<'_> {
    forward_link!(link: chunk_bytes, tx_available, rx_capacity, rx_available, receive, rx_chunks, rx_head, recycle, alloc,
        tx_chunks_into, submit, release, flush, steer, unsteer);

    fn hand_over(&mut self, frame: &RxFrame, flow: &Flow) -> bool {
        let elsewhere = *flow == self.theirs;
        self.handed_over.extend(elsewhere.then_some(frame.len()));
        elsewhere
    }
}

/// A segment of another engine's connection is neither answered by a reset nor, if it is a SYN, by our listener.
#[test]
fn segments_of_other_engines_connections_are_handed_over() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let (theirs, unknown) = (RawPeer::new(1, 1024), RawPeer::new(2, 1024));
    let ack = Fields { flags: Flags { ack: true, ..Flags::default() }, ..Fields::default() };
    for peer in [&theirs, &unknown] {
        peer.send(&mut lab, &ack, b"payload");
        peer.send(&mut lab, &syn(1000), &[]);
    }
    lab.wire.advance(lab.now + Duration::from_millis(1));
    let Lab { now, server, .. } = &mut lab;
    let mut link =
        Shared { link: &mut server.link, theirs: theirs.flow_at_server(), handed_over: Vec::new() };
    let mut batch = Vec::new();
    assert_eq!(link.receive(&mut batch, 64), 4);
    let lengths: Vec<usize> = batch.iter().take(2).map(RxFrame::len).collect();
    for frame in batch {
        server.stack.receive(*now, &mut link, frame, &mut server.upper);
    }
    assert_eq!(link.handed_over, lengths);
    let counters = server.stack.counters();
    assert_eq!((counters.handed_over, counters.no_connection, server.stack.half_open()), (2, 1, 1));
    assert_eq!(server.link.census().rx_out, 0, "every frame was recycled");
}
