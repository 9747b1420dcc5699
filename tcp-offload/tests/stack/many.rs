//! The cost of many idle connections.

use std::time::Duration;

use xwarp_tcp::{sim::Node, tcp::TcpConfig};

use crate::support::Lab;

const CONNECTIONS: usize = 10_000;

/// Connections that fill the tables, which grow by doubling.
const FULL_TABLES: usize = 1024;

/// Largest heap use of an idle connection at one end when the tables are full, in bytes: its slot, its share of the
/// tables, and the bookkeeping of this test. 2873 when the limit was set.
const MAX_BYTES_FULL: i64 = 3072;

/// Largest heap use of a connection at one end, in bytes. This includes its MPA session, its entries in all tables,
/// which grow by doubling, and the bookkeeping of the simulator and this test.
const MAX_BYTES: i64 = 5120;

/// Minutes for which the connections are idle.
const MINUTES: u32 = 2;

#[test]
fn ten_thousand_idle_connections_cost_memory_and_one_probe_every_15_seconds() {
    let mut lab = Lab::new(TcpConfig::default(), CONNECTIONS);
    let measured = allocation_counter::measure(|| {
        for _ in 0..CONNECTIONS / 100 {
            for _ in 0..100 {
                lab.connect();
            }
            lab.pass(Duration::from_millis(20));
        }
    });
    lab.pass(Duration::from_mins(1));
    assert_eq!((lab.client.stack.connections(), lab.server.stack.connections()), (CONNECTIONS, CONNECTIONS));
    assert_eq!(lab.server.upper.established.len(), CONNECTIONS);
    let each = measured.bytes_current / (2 * CONNECTIONS as i64);
    println!("{each} bytes for a connection");
    assert!(each < MAX_BYTES, "{each} bytes for a connection");
    // The only cost is keepalive: the client probes every 15 s, and the server answers.
    let numbers = |lab: &Lab| {
        [&lab.client, &lab.server].map(|end| {
            let tcp = end.stack.tcp_counters();
            (end.stack.counters().timer_looks, tcp.keepalives, tcp.segments_out)
        })
    };
    let before = numbers(&lab);
    let begin = std::time::Instant::now();
    lab.pass(Duration::from_mins(MINUTES.into()));
    println!("{:?} for {MINUTES} minutes at both ends", begin.elapsed());
    let after = numbers(&lab);
    let periods = u64::from(MINUTES) * 4 * CONNECTIONS as u64;
    let [client, server] = [0, 1].map(|end| {
        let ((looks, probes, sent), (looks_before, probes_before, sent_before)) = (after[end], before[end]);
        (looks - looks_before, probes - probes_before, sent - sent_before)
    });
    assert!(client.1 == client.2 && client.1 == server.2 && server.1 == 0, "{client:?} {server:?}");
    assert!(client.1.abs_diff(periods) <= CONNECTIONS as u64, "{client:?}");
    assert!(client.0 <= 2 * periods + CONNECTIONS as u64 && server.0 <= periods, "{client:?} {server:?}");
    // Between the probes, no turn visits a connection.
    for end in [&mut lab.client, &mut lab.server] {
        let (before, sent) = (end.stack.counters(), end.stack.tcp_counters());
        for _ in 0..100 {
            assert!(!end.turn(lab.now));
        }
        assert_eq!((end.stack.counters(), end.stack.tcp_counters()), (before, sent));
    }
    // An active connection costs about as much as it would alone; its round-trip times were measured among many
    // others.
    let looks = |lab: &Lab| lab.client.stack.counters().timer_looks;
    let before = looks(&lab);
    let busy = lab.client.upper.established[CONNECTIONS / 2];
    lab.client.send(busy, 1_000_000);
    lab.pass(Duration::from_secs(1));
    let with_many = looks(&lab) - before;
    let mut alone = Lab::new(TcpConfig::default(), 1);
    let conn = alone.connect();
    alone.pass(Duration::from_mins(1));
    let before = looks(&alone);
    alone.client.send(conn, 1_000_000);
    alone.pass(Duration::from_secs(1));
    let alone = looks(&alone) - before;
    assert!(with_many <= 2 * alone, "{with_many} looks at timers, and {alone} alone");
    lab.assert_no_errors();
}

#[test]
fn an_idle_connection_uses_at_most_three_kib() {
    let mut lab = Lab::new(TcpConfig::default(), FULL_TABLES);
    let measured = allocation_counter::measure(|| {
        for _ in 0..FULL_TABLES {
            lab.connect();
            lab.pass(Duration::from_millis(1));
        }
    });
    assert_eq!((lab.client.stack.connections(), lab.server.stack.connections()), (FULL_TABLES, FULL_TABLES));
    assert_eq!(lab.server.upper.established.len(), FULL_TABLES);
    let each = measured.bytes_current / (2 * FULL_TABLES as i64);
    assert!(each <= MAX_BYTES_FULL, "{each} bytes for a connection");
}

/// RFC 9293 section 3.8.6: an advertised window must not be taken back.
#[test]
fn no_window_exceeds_the_frames_of_the_link() {
    let config = TcpConfig { receive_window: 1 << 28, ..TcpConfig::default() };
    let mut lab = Lab::new(config, 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(10));
    let info = lab.client.stack.info(conn).unwrap();
    assert!(info.rcv_wnd > 4_000_000 && info.rcv_wnd <= 4096 * 1400, "{} for 4096 frames", info.rcv_wnd);
    assert!(info.snd_wnd <= 4096 * 1400, "{} advertised by the listener", info.snd_wnd);
}
