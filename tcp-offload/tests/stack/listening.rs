//! Listeners, and connections that share their ports.

use std::time::Duration;

use xwarp_tcp::{
    framing::{FramingConfig, SetupError},
    link::{Link, Steer, rx_pieces},
    mpa::MpaConfig,
    rdma_tcp::RdmaTcpConfig,
    sim::{Node, path},
    stack::{ConnectError, ConnectParams, ListenError},
    tcp::TcpConfig,
    time::Instant,
    wire::{Headers, MAX_HEADER_BYTES, Sum},
};

use crate::{
    flood::syn,
    raw::RawPeer,
    support::{Lab, PORT},
};

/// MUST-41 and MUST-42: connections and listeners of the same port are independent.
#[test]
fn rfc9293_s3_9_1_1_a_listener_can_use_the_port_of_a_connection_in_syn_sent() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    let client = &mut lab.client;
    let port = lab.port;
    let mut listen =
        || client.stack.listen(&mut client.link, None, port, 8, 1500, MpaConfig::default()).map(|_| ());
    assert_eq!(listen(), Ok(()), "in SYN-SENT");
    assert_eq!(listen(), Err(ListenError::AddressInUse));
    lab.pass(Duration::from_millis(5));
    assert_eq!((lab.client.upper.established.len(), lab.server.upper.established.len()), (1, 1));
    lab.client.send(conn, 5000);
    lab.pass(Duration::from_millis(5));
    assert_eq!(lab.server.upper.delivered, 5000);
    lab.assert_no_errors();
}

/// A connector chooses its framing. A listener cannot distinguish streaming data from RDMA/TCP.
#[test]
fn either_framing_is_accepted_by_listeners_only_and_not_behind_streaming_data() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let client = &mut lab.client;
    let either = |streaming| {
        let mpa = MpaConfig { streaming, ..MpaConfig::default() };
        FramingConfig::Either(mpa, RdmaTcpConfig::default())
    };
    let mut listen = |framing| client.stack.listen(&mut client.link, None, 9, 8, 1500, framing).map(|_| ());
    let streaming = either(Some(Duration::from_secs(1)));
    assert_eq!(listen(streaming), Err(ListenError::StreamingBeforeEither));
    assert_eq!(listen(either(None)), Ok(()));
    let path = path(([10, 0, 0, 1], 4000), ([10, 0, 0, 2], 4000));
    let (link, params) = (&mut client.link, ConnectParams::default());
    let connected = client.stack.connect(Instant::ZERO, link, path, either(None), params);
    assert_eq!(connected, Err(ConnectError::Setup(SetupError::TwoFramings)));
}

/// A backlog full of silent peers that have completed the handshake, with new ones arriving all the time, does not
/// keep honest peers out.
#[test]
fn silent_connections_do_not_keep_honest_peers_out() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    RawPeer::listen_in(&mut lab);
    for host in 0..8 {
        RawPeer::open(&mut lab, host, 1024);
    }
    lab.pass(Duration::from_millis(50));
    assert_eq!(lab.server.stack.connections(), 8, "the backlog is full");
    for (round, host) in (8..40).enumerate() {
        RawPeer::open(&mut lab, host, 1024);
        lab.connect();
        lab.pass(Duration::from_millis(10));
        assert_eq!(lab.server.upper.established.len(), round + 1, "an honest peer is not accepted");
    }
    let silent = lab.server.stack.connections() - 32;
    assert!(silent <= 8, "{silent} silent connections");
    assert!(lab.server.stack.counters().startup_evicted >= 32);
    lab.assert_no_errors();
}

/// Honest peers whose handshakes end at the same time do not evict each other from a small backlog.
#[test]
fn fresh_connections_are_not_evicted_from_a_full_backlog() {
    let mut lab = Lab::new(TcpConfig::default(), 2);
    RawPeer::listen_in(&mut lab);
    let mut peers: Vec<_> = (0..2).map(|host| RawPeer::open(&mut lab, host, 1024)).collect();
    let newcomer = RawPeer::new(2, 1024);
    newcomer.send(&mut lab, &syn(1000), &[]);
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.stack.counters().backlog_full, 1, "the newcomer has to try again");
    for peer in &mut peers {
        peer.request(&mut lab);
    }
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.stack.counters().startup_evicted, 0);
    assert_eq!(lab.server.upper.requested_at, [lab.listener; 2]);
}

/// The listener that names the address most exactly gets a connection. Wildcards share one steering rule.
#[test]
fn a_wildcard_of_one_family_accepts_only_its_addresses() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let listen = |lab: &mut Lab, addr: &str| {
        let (addr, server) = (addr.parse().unwrap(), &mut lab.server);
        server.stack.listen(&mut server.link, Some(addr), PORT, 8, 1500, MpaConfig::default()).unwrap()
    };
    let connected_to = |lab: &mut Lab| {
        lab.connect();
        lab.pass(Duration::from_millis(5));
        lab.server.upper.requested_at.pop()
    };
    let six = listen(&mut lab, "::");
    assert_eq!(connected_to(&mut lab), Some(lab.listener));
    let four = listen(&mut lab, "0.0.0.0");
    assert_eq!(connected_to(&mut lab), Some(four));
    let one = listen(&mut lab, "10.1.1.1");
    assert_eq!(connected_to(&mut lab), Some(one));
    let rule = Steer::Listener { addr: None, port: PORT };
    for listener in [one, lab.listener, four] {
        let server = &mut lab.server;
        server.stack.unlisten(&mut server.link, listener);
        assert!(server.link.is_steered(rule));
    }
    assert_eq!(connected_to(&mut lab), None, "a listener of IPv6 only accepted IPv4");
    let server = &mut lab.server;
    server.stack.unlisten(&mut server.link, six);
    assert!(!server.link.is_steered(rule));
}

/// A late MPA Request names the closed listener that accepted its connection, not the new listener of the same port.
#[test]
fn a_late_request_never_reaches_the_next_listener() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    RawPeer::listen_in(&mut lab);
    let mut peer = RawPeer::open(&mut lab, 1, 1024);
    let (old, server) = (lab.listener, &mut lab.server);
    server.stack.unlisten(&mut server.link, old);
    let new = server.stack.listen(&mut server.link, None, PORT, 8, 1500, MpaConfig::default()).unwrap();
    assert_ne!(old, new);
    peer.request(&mut lab);
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.upper.requested_at, [old]);
}

/// Sections 3.9.1.9 and 3.9.2: all packets have the configured codepoint and TTL, including resets without a connection.
#[test]
fn rfc9293_s3_9_2_a_reset_without_a_connection_has_the_configured_dscp_and_hop_limit() {
    let tcp = TcpConfig { dscp: 0b10_1110, hop_limit: 7, ..TcpConfig::default() };
    let mut lab = Lab::new(tcp, 8);
    let nobody = path(([10, 1, 0, 1], 10_000), ([10, 1, 1, 1], PORT + 1));
    let mut frame = [0; MAX_HEADER_BYTES];
    let len = Headers::new(&nobody).emit(&mut frame, &syn(7), 0, Sum::default()).unwrap();
    lab.client.link.inject(&frame[..len]);
    for _ in 0..2 {
        lab.now += Duration::from_millis(1);
        lab.wire.advance(lab.now);
        lab.server.turn(lab.now);
    }
    let mut frames = Vec::new();
    lab.client.link.receive(&mut frames, 1);
    let frame = frames.pop().expect("a RST");
    let ip = rx_pieces(&lab.client.link, &frame, 14, 20).iter().flat_map(|p| p.to_vec()).collect::<Vec<u8>>();
    assert_eq!((ip[1] >> 2, ip[8]), (0b10_1110, 7));
    lab.client.link.recycle(frame);
    assert_eq!(lab.server.stack.counters().resets_sent, 1);
}
