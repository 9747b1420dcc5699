//! BBR beside CUBIC: on lines that lose segments without congestion, and on a line that flows share.

use std::time::Duration;

use crate::{
    sim::Faults,
    tcp::{
        Algorithm, TcpConfig, Tuning,
        testing::{Pair, Shared, Stream, at_ms, ms},
    },
};

fn config(algorithm: Algorithm) -> TcpConfig {
    TcpConfig { algorithm, receive_window_max: 32 << 20, ..TcpConfig::default() }
}

/// 100 Mbit/s and 40 ms: the path holds 345 segments.
fn long_line() -> Faults {
    Faults { rate_bytes: Some(12_500_000), delay: ms(20), queue_frames: 400, ..Faults::default() }
}

/// 32 Mbit/s and 20 ms: the path holds as many frames as the queue.
fn short_line() -> Faults {
    let queue_frames = SHORT_BDP_FRAMES;
    Faults { rate_bytes: Some(4_000_000), delay: ms(10), queue_frames, ..Faults::default() }
}
const SHORT_BDP_FRAMES: usize = 53;

fn lossy(algorithm: Algorithm, loss: f64, total: u64, seed: u64) -> Pair {
    let sources = [Stream::new(total, 0, false), Stream::new(0, 0, false)];
    let faults = [Faults { loss, ..long_line() }, long_line()];
    let mut pair = Pair::new(&[config(algorithm); 2], &faults, sources, seed);
    pair.open(0);
    pair
}

/// The share of the long line's rate that arrives within `seconds`.
fn goodput(algorithm: Algorithm, loss: f64, seconds: u64, seed: u64) -> f64 {
    let mut pair = lossy(algorithm, loss, u64::MAX / 2, seed);
    pair.run_until(at_ms(seconds * 1000 + 1000), |p| p.now >= at_ms(seconds * 1000));
    let taken = pair.ends[1].taken;
    pair.tear_down();
    let share = taken as f64 / (12_500_000 * seconds) as f64;
    println!("loss {loss}: {algorithm} {share:.3}");
    share
}

/// The share of each flow in the bytes that arrive through the short line from 5 s to 25 s, and the share of the line that they
/// use.
fn shares(algorithms: &[Algorithm], queue_frames: usize) -> (Vec<f64>, f64) {
    let starts: Vec<_> = algorithms.iter().zip(0..).map(|(a, n)| (config(*a), at_ms(10 + 500 * n))).collect();
    let mut shared = Shared::new(&starts, &Faults { queue_frames, ..short_line() }, 1);
    shared.run_until(at_ms(5_000));
    let before: Vec<_> = (0..starts.len()).map(|n| shared.taken(n)).collect();
    shared.run_until(at_ms(25_000));
    let gained: Vec<_> = before.iter().zip(0..).map(|(before, n)| shared.taken(n) - before).collect();
    let all: u64 = gained.iter().sum();
    let shares: Vec<_> = gained.iter().map(|n| *n as f64 / all as f64).collect();
    let used = all as f64 / f64::from(4_000_000 * 20);
    println!("{algorithms:?}, queue {queue_frames}: {shares:.2?} of {used:.2}");
    (shares, used)
}

#[test]
fn sim_bbr_keeps_its_rate_where_segments_are_lost_at_random() {
    for (loss, least) in [(0.01, 0.7), (0.03, 0.7), (0.05, 0.6)] {
        let bbr = goodput(Algorithm::Bbr, loss, 6, 1);
        assert!(bbr > least, "loss {loss}: {bbr}");
    }
    let cubic = goodput(Algorithm::Cubic, 0.01, 6, 1);
    assert!(cubic < 0.2, "CUBIC keeps its rate as well: {cubic}");
}

/// 300 kB, of which a twentieth is lost.
#[test]
fn sim_a_short_transfer_with_losses_takes_less_time_with_bbr() {
    let took = |algorithm| {
        let times = (1..=8).map(|seed| {
            let mut pair = lossy(algorithm, 0.05, 300_000, seed);
            pair.run_until(at_ms(30_000), |p| p.ends[0].acked == 300_000);
            pair.tear_down();
            pair.now.since(at_ms(0))
        });
        let mean = times.sum::<Duration>() / 8;
        println!("300 kB, loss 0.05: {algorithm} {mean:?}");
        mean
    };
    let (bbr, cubic) = (took(Algorithm::Bbr), took(Algorithm::Cubic));
    assert!(bbr * 3 < cubic * 2, "{bbr:?}, CUBIC {cubic:?}");
}

#[test]
fn sim_two_flows_of_bbr_share_a_line_fairly() {
    for queue in [SHORT_BDP_FRAMES, 2 * SHORT_BDP_FRAMES] {
        let (shares, used) = shares(&[Algorithm::Bbr; 2], queue);
        assert!(shares.iter().all(|share| (0.3..0.7).contains(share)), "{shares:?}");
        assert!(used > 0.85, "{used}");
    }
}

/// Neither starves the other in a queue of one and of two times what the path holds, whichever was first.
#[test]
fn sim_bbr_and_cubic_share_a_line() {
    for queue in [SHORT_BDP_FRAMES, 2 * SHORT_BDP_FRAMES] {
        for order in [[Algorithm::Bbr, Algorithm::Cubic], [Algorithm::Cubic, Algorithm::Bbr]] {
            let (shares, used) = shares(&order, queue);
            assert!(shares.iter().all(|share| *share > 0.1), "{order:?} {shares:?}");
            assert!(used > 0.85, "{used}");
        }
    }
}

/// CUBIC fills a queue of four times what the path holds: 100 ms of round trip.
#[test]
fn sim_bbr_keeps_the_queue_short() {
    let median = |algorithm| {
        let line = Faults { queue_frames: 4 * SHORT_BDP_FRAMES, ..short_line() };
        let mut shared = Shared::new(&[(config(algorithm), at_ms(10))], &line, 1);
        let mut rtts: Vec<_> = (20..80u64)
            .filter_map(|tenth| {
                shared.run_until(at_ms(tenth * 100));
                shared.info(0).srtt
            })
            .collect();
        rtts.sort_unstable();
        println!("{algorithm}: {rtts:?}");
        rtts.get(rtts.len() / 2).copied().unwrap_or_default()
    };
    let (bbr, cubic) = (median(Algorithm::Bbr), median(Algorithm::Cubic));
    assert!(bbr < ms(30) && cubic > ms(50), "{bbr:?}, CUBIC {cubic:?}");
}

/// The draft, section 5.4.1: after a pause of 3 s, the window is that of before and no burst leaves at once.
#[test]
fn sim_bbr_restarts_from_idle_at_its_rate() {
    let mut pair = lossy(Algorithm::Bbr, 0.0, 10_000_000, 1);
    pair.run_until(at_ms(10_000), |p| p.ends[0].acked == 10_000_000);
    let before = pair.ends[0].conn().info();
    let paused = at_ms(3000) + pair.now.since(at_ms(0));
    pair.run_until(paused, |p| p.now >= paused - ms(100));
    pair.ends[0].source.total = 20_000_000;
    let began = pair.now;
    pair.turn();
    let info = pair.ends[0].conn().info();
    assert!(info.cwnd >= before.cwnd && info.in_flight < 100_000, "{before:?} {info:?}");
    pair.run_until(began + Duration::from_secs(3), |p| p.ends[0].acked == 20_000_000);
    let took = pair.now.since(began);
    // 10 MB take 0.84 s at the rate of the line.
    assert!(took < ms(1100), "{took:?}");
    assert_eq!(pair.ends[0].conn().counters().retransmits, before.counters.retransmits);
    pair.tear_down();
}

/// Marks are congestion also without a loss: the queue stays short, and all arrives.
#[test]
fn sim_bbr_slows_down_when_packets_are_marked() {
    let sources = [Stream::new(20_000_000, 0, false), Stream::new(0, 0, false)];
    let faults = [Faults { mark_frames: 20, ..short_line() }, short_line()];
    let mut pair = Pair::new(&[config(Algorithm::Bbr); 2], &faults, sources, 1);
    pair.open(0);
    pair.run_until(at_ms(10_000), |p| p.ends[0].acked == 20_000_000);
    let counters = pair.ends[0].conn().counters();
    let share = pair.wire.tally(1).marked as f64 / counters.segments_out as f64;
    println!("{:?}: {share:.3} marked, {counters:?}", pair.now);
    assert!(counters.ecn_reductions > 0 && share < 0.2, "{share} {counters:?}");
    // 20 MB take 5.2 s at the rate of the line.
    assert!(pair.now < at_ms(6_500), "{:?}", pair.now);
    pair.tear_down();
}

/// [`Tuning::algorithm`] of a connection that has data in flight.
#[test]
fn sim_the_congestion_control_of_an_open_connection_can_be_changed() {
    let mut pair = lossy(Algorithm::Cubic, 0.02, 20_000_000, 1);
    for (algorithm, acked) in
        [(Algorithm::Bbr, 1_000_000), (Algorithm::NewReno, 10_000_000), (Algorithm::Bbr, 11_000_000)]
    {
        pair.run_until(at_ms(60_000), |p| p.ends[0].acked >= acked);
        let tuning = Tuning { algorithm, ..config(algorithm).tuning() };
        let now = pair.now;
        pair.ends[0].conn.as_mut().unwrap().tune(now, &tuning);
        let info = pair.ends[0].conn().info();
        assert_eq!((info.congestion, info.pacing_rate.is_some()), (algorithm, algorithm == Algorithm::Bbr));
    }
    let now = pair.now;
    pair.ends[0].conn.as_mut().unwrap().tune(now, &config(Algorithm::Dctcp).tuning());
    assert_eq!(pair.ends[0].conn().info().congestion, Algorithm::Bbr, "DCTCP is negotiated by the SYN");
    pair.run_until(at_ms(60_000), |p| p.ends[0].acked == 20_000_000);
    pair.tear_down();
}
