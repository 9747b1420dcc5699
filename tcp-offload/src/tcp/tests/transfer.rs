//! Streams both ways over every kind of fault: all bytes arrive, in order, and no frame leaks.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::SmallRng};

use crate::{
    sim::{Blackout, Faults, Gilbert, run_seeds},
    tcp::{
        State, TcpConfig,
        testing::{Pair, Stream, at_ms, ms, us},
    },
    ulp::CloseReason,
};

#[test]
fn bytes_flow_both_ways_without_faults() {
    let mut pair = Pair::plain([300_000, 200_000]);
    pair.open(0);
    pair.run_to_the_end(at_ms(1000));
    for end in &pair.ends {
        let counters = end.conn().counters();
        assert_eq!((counters.retransmits, counters.rto_expired), (0, 0));
        assert_eq!(end.conn().emss(), 1448);
    }
    pair.tear_down();
}

#[test]
fn both_ends_may_open_at_the_same_time() {
    let mut pair = Pair::plain([50_000, 50_000]);
    pair.open(0);
    pair.open(1);
    pair.run_to_the_end(at_ms(1000));
    pair.tear_down();
}

#[test]
fn both_ends_close_in_order() {
    let mut pair = Pair::plain([10_000, 20_000]);
    for end in &mut pair.ends {
        end.source.finish = true;
    }
    pair.open(0);
    pair.run_until(at_ms(5000), |p| p.ends.iter().all(|e| e.conn.is_some() && e.state() == State::Closed));
    assert!(pair.ends.iter().all(|e| e.closed == Some(CloseReason::Graceful)));
    assert_eq!((pair.ends[0].taken, pair.ends[1].taken), (20_000, 10_000));
    pair.tear_down();
}

fn faulty(faults: &Faults, config: TcpConfig, seed: u64) -> Pair {
    let sources = [Stream::new(400_000, 0, true), Stream::new(150_000, 250, true)];
    let mut pair = Pair::new(&[config; 2], &[*faults; 2], sources, seed);
    pair.open(0);
    pair.run_until(at_ms(600_000), |p| p.ends.iter().all(|e| e.conn.is_some() && e.closed.is_some()));
    assert_eq!((pair.ends[0].taken, pair.ends[1].taken), (150_000, 400_000), "seed {seed}");
    assert!(pair.ends.iter().all(|e| e.closed == Some(CloseReason::Graceful)), "seed {seed}");
    pair
}

fn configs() -> [TcpConfig; 4] {
    let long = ms(600_000);
    // TIME-WAIT must outlast a time-out that was doubled many times: in this test no stack answers for a closed
    // connection.
    let base = TcpConfig {
        user_timeout: long,
        connect_timeout: long,
        fin_wait_2: long,
        time_wait: long,
        // With a quarter of the frames lost in each direction, the back-off would exceed the limit of the test.
        rto_max: ms(10_000),
        ..TcpConfig::default()
    };
    [
        base,
        TcpConfig { sack: false, ..base },
        TcpConfig { timestamps: false, window_scaling: false, ecn: false, ..base },
        TcpConfig { sack: false, timestamps: false, algorithm: crate::tcp::Algorithm::NewReno, ..base },
    ]
}

#[test]
fn sim_loss_from_light_to_extreme() {
    for (seed, config) in configs().into_iter().enumerate() {
        for loss in [0.001, 0.01, 0.05, 0.25] {
            let faults = Faults { loss, delay: us(50), ..Faults::default() };
            faulty(&faults, config, seed as u64 + 10).tear_down();
        }
    }
}

#[test]
fn sim_reordering_and_duplication() {
    for (seed, config) in configs().into_iter().enumerate() {
        let faults =
            Faults { reorder: 0.2, reorder_by: us(300), duplicate: 0.05, delay: us(50), ..Faults::default() };
        faulty(&faults, config, seed as u64 + 20).tear_down();
    }
}

#[test]
fn sim_corruption_bursts_and_a_slow_line() {
    for (seed, config) in configs().into_iter().enumerate() {
        let bursts = Some(Gilbert { enter: 0.005, leave: 0.2, loss: 0.7 });
        let faults = Faults { corrupt: 0.01, bursts, delay: ms(2), ..Faults::default() };
        let faults = Faults { rate_bytes: Some(12_500_000), queue_frames: 60, ..faults };
        let mut pair = faulty(&faults, config, seed as u64 + 30);
        assert!(pair.ends.iter().map(|e| e.bad_frames).sum::<u64>() > 0);
        pair.tear_down();
    }
}

/// Faults of all kinds at once, drawn from the seed.
fn mixed(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut chance = |most: f64| if rng.random_bool(0.5) { rng.random_range(0.0..most) } else { 0.0 };
    let faults = Faults {
        loss: chance(0.05),
        duplicate: chance(0.05),
        reorder: chance(0.3),
        corrupt: chance(0.02),
        delay: Duration::from_secs_f64(chance(0.02)),
        reorder_by: Duration::from_secs_f64(chance(0.01)),
        jitter: Duration::from_secs_f64(chance(0.002)),
        bursts: (chance(1.0) > 0.2).then_some(Gilbert { enter: 0.002, leave: 0.2, loss: 0.5 }),
        ..Faults::default()
    };
    let dark = Duration::from_secs_f64(chance(0.1));
    let from = at_ms(1) + Duration::from_secs_f64(chance(0.05));
    let faults = Faults { blackout: Some(Blackout { from, length: dark, every: None }), ..faults };
    faulty(&faults, configs()[seed as usize % 4], seed).tear_down();
}

#[test]
fn sim_mixed_faults() {
    run_seeds(|seed| mixed(999 + seed));
}
