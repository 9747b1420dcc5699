//! Active opens: what is refused, and what each new connection draws at random.

use std::{collections::BTreeSet, time::Duration};

use xwarp_tcp::{
    link::{Link, Steer, rx_pieces},
    mpa::MpaConfig,
    rdma_tcp::RdmaTcpConfig,
    sim::{Node, path},
    stack::{ConnectError, ConnectParams},
    tcp::TcpConfig,
    wire::{Inbound, Path, parse},
};

use crate::support::{Lab, PORT};

/// The client's attempt to connect over `path`, and what the attempt has left: connections, steering rules and counted opens.
fn attempt(lab: &mut Lab, path: Path) -> (Option<ConnectError>, [u64; 3]) {
    let (mpa, params) = (MpaConfig::default(), ConnectParams::default());
    let refused = lab.client.stack.connect(lab.now, &mut lab.client.link, path, mpa, params).err();
    let stack = &lab.client.stack;
    let left = [stack.connections(), lab.client.link.census().rules, stack.counters().active_opens as usize];
    (refused, left.map(|n| n as u64))
}

fn from_port(port: u16) -> Path {
    path(([10, 1, 0, 1], port), ([10, 1, 1, 1], PORT))
}

#[test]
fn rfc9293_s3_9_1_1_a_four_tuple_is_in_use_until_time_wait_has_ended() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let first = from_port(10_001);
    assert!(!lab.client.stack.has_connection(&first.flow));
    let conn = lab.connect();
    assert_eq!(lab.port, 10_001);
    for state in ["SYN-SENT", "ESTABLISHED", "TIME-WAIT"] {
        assert!(lab.client.stack.has_connection(&first.flow), "{state}");
        assert_eq!(attempt(&mut lab, first), (Some(ConnectError::AddressInUse), [1; 3]), "{state}");
        if state == "ESTABLISHED" {
            lab.client.send(conn, 100);
            lab.client.finish(conn);
        }
        lab.pass(Duration::from_millis(5));
    }
    lab.pass(Duration::from_secs(120));
    assert!(!lab.client.stack.has_connection(&first.flow));
    assert_eq!(attempt(&mut lab, first), (None, [1, 1, 2]));
}

/// A refused attempt leaves no connection, steering rule or count.
#[test]
fn refused_attempts_leave_nothing() {
    let mut lab = Lab::limited(TcpConfig::default(), 8, |config| config.most_connections = 2);
    let (v6, mapped) = ("[fd00::1]:10", "[::ffff:10.1.1.1]:10");
    for [local, remote] in [[mapped, v6], [v6, mapped]] {
        let path = path(
            local.parse::<std::net::SocketAddr>().unwrap(),
            remote.parse::<std::net::SocketAddr>().unwrap(),
        );
        assert_eq!(attempt(&mut lab, path), (Some(ConnectError::MappedAddress), [0; 3]));
    }
    let narrow = Path { mtu: 67, ..from_port(10_001) };
    assert_eq!(attempt(&mut lab, narrow), (Some(ConnectError::SmallMtu(67)), [0; 3]));
    assert_eq!(attempt(&mut lab, from_port(10_001)), (None, [1; 3]));
    assert_eq!(attempt(&mut lab, from_port(10_002)), (None, [2; 3]));
    assert_eq!(attempt(&mut lab, from_port(10_003)), (Some(ConnectError::TooMany(2)), [2; 3]));
    assert!(!lab.client.link.is_steered(Steer::Flow(from_port(10_003).flow)));
    lab.pass(Duration::from_millis(5));
    assert_eq!(lab.client.upper.established.len(), 2);
}

/// The first message of an RDMA/TCP connection carries its ID, in 64 bits, and its first message number, in 32.
#[test]
fn connections_of_rdma_tcp_draw_unpredictable_ids_and_numbers() {
    const CONNECTIONS: usize = 8;
    let mut lab = Lab::new(TcpConfig::default(), 16);
    let server = &mut lab.server;
    let rdma_tcp = RdmaTcpConfig::default();
    server.stack.listen(&mut server.link, None, PORT + 1, 16, 1500, rdma_tcp).unwrap();
    for port in 0..CONNECTIONS as u16 {
        let path = path(([10, 1, 0, 1], 20_000 + port), ([10, 1, 1, 1], PORT + 1));
        let (config, params) = (RdmaTcpConfig::default(), ConnectParams::default());
        lab.client.stack.connect(lab.now, &mut lab.client.link, path, config, params).unwrap();
    }
    let mut drawn: Vec<[u32; 3]> = Vec::new();
    for _ in 0..20 {
        lab.client.turn(lab.now);
        lab.now += Duration::from_millis(1);
        lab.wire.advance(lab.now);
        let (mut frames, server) = (Vec::new(), &mut lab.server);
        server.link.receive(&mut frames, 64);
        for frame in frames {
            let Ok(Inbound::Tcp(segment)) = parse(&server.link, &frame) else { panic!("not TCP") };
            let payload =
                rx_pieces(&server.link, &frame, segment.payload_start, segment.payload_len).concat();
            if let Some(head) = payload.first_chunk::<16>() {
                let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
                drawn.push([4, 8, 12].map(word));
            }
            server.stack.receive(lab.now, &mut server.link, frame, &mut server.upper);
        }
        server.turn(lab.now);
        lab.now += Duration::from_millis(1);
        lab.wire.advance(lab.now);
    }
    assert_eq!(drawn.len(), CONNECTIONS, "each sends its first message once");
    // Each of the three words differs from all others: chance makes two of 24 equal once in 15 million runs, and the
    // secrets are fixed.
    let words: BTreeSet<u32> = drawn.iter().flatten().copied().collect();
    assert_eq!(words.len(), 3 * CONNECTIONS, "{drawn:x?}");
    assert!(!words.contains(&0));
}
