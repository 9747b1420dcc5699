//! Connections that share scarce transmit frames and a small ring, over a path with faults.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::SmallRng};
use xwarp_tcp::{
    mpa::{Markers, MpaConfig},
    sim::{Blackout, Faults, WireConfig, run_seeds},
    tcp::TcpConfig,
    ulp::CloseReason,
};

use crate::support::Lab;

/// Longer than any time-out that a lost frame can lead to.
const LONG: Duration = Duration::from_secs(10_000);

/// All connections of both ends need more frames for data than there are. Each end waits for the other's ACK, which
/// uses a reserved frame.
#[test]
fn ends_without_frames_for_data_still_acknowledge() {
    let config = TcpConfig { reserve_chunks: 4096 - 32, ..TcpConfig::default() };
    let mut lab = Lab::new(config, 128);
    for _ in 0..100 {
        lab.connect();
    }
    lab.pass(Duration::from_millis(100));
    for end in [&mut lab.client, &mut lab.server] {
        assert_eq!(end.upper.established.len(), 100);
        for conn in end.upper.established.clone() {
            end.send(conn, 20_000);
        }
    }
    lab.pass(Duration::from_secs(1));
    assert_eq!((lab.client.upper.delivered, lab.server.upper.delivered), (2_000_000, 2_000_000));
    for end in [&lab.client, &lab.server] {
        assert_eq!(end.stack.tcp_counters().rto_expired, 0);
    }
    lab.assert_no_errors();
}

/// A turn in which no frame has become free tries one of the connections that wait for frames, not all of them.
#[test]
fn connections_that_wait_for_frames_cost_little_until_frames_are_free() {
    let config = TcpConfig { reserve_chunks: 4096 - 32, ..TcpConfig::default() };
    let mut lab = Lab::new(config, 128);
    for _ in 0..100 {
        lab.connect();
    }
    lab.pass(Duration::from_millis(100));
    for conn in lab.client.upper.established.clone() {
        lab.client.send(conn, 20_000);
    }
    let (now, end) = (lab.now, &mut lab.client);
    // Every connection tries once.
    for _ in 0..4 {
        end.stack.transmit(now, &mut end.link, &mut end.upper);
    }
    let before = end.upper.asked.get();
    for _ in 0..10 {
        end.stack.transmit(now, &mut end.link, &mut end.upper);
    }
    let asked = end.upper.asked.get() - before;
    assert!(asked <= 20, "{asked} connections asked in 10 turns");
    assert!(end.stack.wants_to_transmit());
    lab.pass(Duration::from_secs(1));
    assert_eq!(lab.server.upper.delivered, 2_000_000);
    lab.assert_no_errors();
}

/// Other connections find free frames while data to a peer that stops acknowledging is in frames. After some milliseconds,
/// that data moves to the heap.
#[test]
fn a_silent_peer_does_not_starve_other_connections_of_frames() {
    let links = WireConfig { tx_chunks: 256, ..WireConfig::default() };
    let mut lab = Lab::over(&links, TcpConfig::default(), MpaConfig::default(), 8, |_| {});
    let path = Faults { delay: Duration::from_micros(200), ..Faults::default() };
    lab.wire.with_faults([path; 2]);
    let [greedy, modest] = [lab.connect(), lab.connect()];
    lab.pass(Duration::from_millis(100));
    lab.client.send(greedy, 1 << 30);
    lab.pass(Duration::from_millis(200));
    let deaf = Blackout { from: lab.now, length: LONG, every: None };
    lab.wire.set_faults(0, Faults { blackout: Some(deaf), ..path });
    lab.pass(Duration::from_micros(500));
    let retained = |lab: &Lab| lab.client.stack.info(greedy).unwrap().chunks_retained;
    assert!(retained(&lab) > 190, "{} frames", retained(&lab));
    let before = lab.server.upper.delivered;
    lab.client.send(modest, 5_000);
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.upper.delivered - before, 5_000);
    lab.pass(Duration::from_millis(10));
    assert!(retained(&lab) < 50, "{} frames", retained(&lab));
}

/// Data in flight on a long path moves to the heap, so that frames do not limit it.
#[test]
fn a_long_path_has_more_in_flight_than_there_are_frames() {
    let links = WireConfig { tx_chunks: 256, ..WireConfig::default() };
    let mut lab = Lab::over(&links, TcpConfig::default(), MpaConfig::default(), 8, |_| {});
    lab.wire.with_faults([Faults { delay: Duration::from_millis(20), ..Faults::default() }; 2]);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(200));
    lab.client.send(conn, 1 << 30);
    lab.pass(Duration::from_secs(2));
    let before = lab.server.upper.delivered;
    lab.pass(Duration::from_millis(400));
    // In ten round trips, all frames would carry 3.7 MB.
    let delivered = lab.server.upper.delivered - before;
    assert!(delivered > 8_000_000, "{delivered} bytes");
    assert!(lab.client.stack.info(conn).unwrap().chunks_retained < 256);
    lab.assert_no_errors();
}

/// Without markers, payload beyond a gap stays in its frame. If all connections together held all frames, none would
/// be left for the segments that fill the gaps.
#[test]
fn held_payload_leaves_frames_for_receiving() {
    let links = WireConfig { rx_chunks: 64, ..WireConfig::default() };
    let mpa = MpaConfig { markers: Markers::Off, ..MpaConfig::default() };
    let mut lab = Lab::over(&links, TcpConfig::default(), mpa, 64, |_| {});
    let connections: Vec<_> = (0..64).map(|_| lab.connect()).collect();
    lab.pass(Duration::from_millis(100));
    lab.wire.set_faults(1, Faults { loss: 0.3, delay: Duration::from_micros(50), ..Faults::default() });
    for conn in &connections {
        lab.client.send(*conn, 30_000);
    }
    lab.pass(Duration::from_secs(1));
    lab.wire.set_faults(1, Faults { delay: Duration::from_micros(50), ..Faults::default() });
    lab.pass(LONG);
    assert_eq!(lab.server.upper.delivered, 64 * 30_000);
    lab.assert_no_errors();
}

fn faults(dice: &mut SmallRng) -> Faults {
    Faults {
        loss: dice.random_range(0.0..0.05),
        duplicate: dice.random_range(0.0..0.02),
        reorder: dice.random_range(0.0..0.1),
        reorder_by: Duration::from_micros(dice.random_range(0..2000)),
        reorder_depth: dice.random_range(1..50),
        delay: Duration::from_micros(dice.random_range(1..2000)),
        rate_bytes: Some(dice.random_range(1_000_000..200_000_000)),
        queue_frames: dice.random_range(20..500),
        ..Faults::default()
    }
}

/// Many connections, of which some send, at both ends: all data arrives, all connections close in order, and no frame
/// leaks.
fn crowd(seed: u64) {
    let mut dice = SmallRng::seed_from_u64(seed);
    let connections = dice.random_range(2..=40);
    let wire = WireConfig {
        tx_chunks: dice.random_range(20..=400),
        rx_chunks: dice.random_range(40..=1000),
        ring: dice.random_range(2..=256),
        seed,
        ..WireConfig::default()
    };
    let tcp = TcpConfig {
        max_chunks: dice.random_range(2..=100),
        reserve_chunks: dice.random_range(2..=16),
        receive_window: dice.random_range(4_000..=200_000),
        ack_every: dice.random_range(1..=16),
        user_timeout: LONG,
        time_wait: Duration::from_mins(2),
        ..TcpConfig::default()
    };
    let mpa = MpaConfig {
        markers: if dice.random_bool(0.5) { Markers::Prefer } else { Markers::Off },
        ..MpaConfig::default()
    };
    let most = 1 << dice.random_range(10..=24);
    let mut lab = Lab::over(&wire, tcp, mpa, connections, |stack| stack.most_held_bytes = most);
    for _ in 0..connections {
        lab.connect();
    }
    lab.pass(Duration::from_secs(5));
    for end in 0..2 {
        lab.wire.set_faults(end, faults(&mut dice));
    }
    let mut wanted = [0, 0];
    for (end, wanted) in [&mut lab.client, &mut lab.server].into_iter().zip(&mut wanted) {
        assert_eq!(end.upper.established.len(), connections, "seed {seed}");
        for conn in end.upper.established.clone() {
            // A responder waits for the initiator's first FPDU.
            let bytes = if dice.random_bool(0.7) { dice.random_range(1..=60_000) } else { 1 };
            *wanted += bytes as u64;
            end.send(conn, bytes);
        }
    }
    for _ in 0..dice.random_range(0..200) {
        lab.pass(Duration::from_millis(dice.random_range(1..50)));
        for end in [&lab.client, &lab.server] {
            // Payload in order, the beginning of an FPDU, is always taken.
            let held = end.stack.held_bytes();
            assert!(held <= most + 1500 * connections, "seed {seed}: {held} bytes held, more than {most}");
        }
    }
    // Now the path is good again.
    for end in 0..2 {
        lab.wire.set_faults(end, Faults { delay: Duration::from_micros(50), ..Faults::default() });
    }
    lab.pass(LONG);
    assert_eq!([lab.server.upper.delivered, lab.client.upper.delivered], wanted, "seed {seed}");
    for conn in lab.client.upper.established.clone() {
        lab.client.finish(conn);
    }
    lab.pass(LONG);
    lab.assert_no_errors();
    for end in [&lab.client, &lab.server] {
        assert!(end.upper.closed.values().all(|reason| *reason == CloseReason::Graceful), "seed {seed}");
        assert_eq!(end.upper.closed.len(), connections, "seed {seed}");
        end.assert_nothing_leaked();
        assert_eq!(end.stack.held_bytes(), 0, "seed {seed}");
    }
}

#[test]
fn sim_crowd_over_scarce_frames() {
    run_seeds(crowd);
}
