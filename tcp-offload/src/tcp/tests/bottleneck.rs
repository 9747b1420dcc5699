//! Congestion control on long streams through a slow line with a short queue.

use std::time::Duration;

use crate::{
    sim::Faults,
    tcp::{
        TcpConfig,
        testing::{Pair, Stream, at_ms, us},
    },
};

/// 100 Mbit/s in each direction.
const RATE: u64 = 12_500_000;

/// Starts to send `total` bytes in one direction through the line.
fn begin(total: u64, there: &Faults, delay: Duration, queue_frames: usize, seed: u64) -> Pair {
    let line = |faults: &Faults| Faults { rate_bytes: Some(RATE), queue_frames, delay, ..*faults };
    let faults = [line(there), line(&Faults::default())];
    let sources = [Stream::new(total, 0, false), Stream::new(0, 0, false)];
    let mut pair = Pair::new(&[TcpConfig::default(); 2], &faults, sources, seed);
    pair.open(0);
    pair
}

/// Sends `total` bytes as [`begin`] does, until all are acknowledged.
fn through(total: u64, there: &Faults, delay: Duration, queue_frames: usize, seed: u64) -> Pair {
    let mut pair = begin(total, there, delay, queue_frames, seed);
    pair.run_until(at_ms(60_000), |p| p.ends[0].acked == total);
    pair
}

/// Data that the peer holds beyond gaps counts in the flight size of RFC 5681 but is not in the network. If the window
/// were set from it, each recovery would leave a window that the path cannot hold.
#[test]
fn sim_reordering_before_a_full_queue_costs_few_retransmissions() {
    let frame = Duration::from_nanos(1514 * 80);
    let there = Faults { reorder: 0.02, reorder_depth: 10, reorder_by: frame * 10, ..Faults::default() };
    let mut pair = through(10_000_000, &there, us(500), 100, 1);
    let counters = pair.ends[0].conn().counters();
    assert!(counters.retransmits < counters.segments_out / 20, "{counters:?}");
    pair.tear_down();
}

/// The round trip is longer than the minimum of the time-out: a recovery takes one round trip, and no time-out fires
/// meanwhile.
#[test]
fn sim_a_loss_on_a_very_long_path_causes_no_time_out() {
    let there = Faults { loss: 0.001, ..Faults::default() };
    for seed in 1..=3 {
        let mut pair = through(5_000_000, &there, us(150_000), 4000, seed);
        let counters = pair.ends[0].conn().counters();
        assert!(counters.recoveries > 0 && counters.rto_expired == 0, "seed {seed}: {counters:?}");
        pair.tear_down();
    }
}

/// 20 MB take 1.7 s at the rate of the line. Segments that RACK marks as lost are only late, which their first ACK
/// shows.
#[test]
fn sim_deep_reordering_on_a_long_path_does_not_keep_the_window_down() {
    let frame = Duration::from_nanos(1514 * 80);
    let there = Faults { reorder: 0.02, reorder_depth: 100, reorder_by: frame * 100, ..Faults::default() };
    for seed in 1..=3 {
        let mut pair = through(20_000_000, &there, us(25_000), 4000, seed);
        let counters = pair.ends[0].conn().counters();
        assert!(counters.undone > 0 && counters.undone == counters.recoveries, "seed {seed}: {counters:?}");
        assert!(pair.now < at_ms(2500), "seed {seed}: {:?}", pair.now);
        pair.tear_down();
    }
}

/// 40 MB take 3.2 s at the rate of the line, and slow start some round trips of 200 ms; through a window of 1 MiB they
/// would take 8 s.
#[test]
fn sim_the_receive_window_grows_to_fill_a_long_path() {
    let mut pair = through(40_000_000, &Faults::default(), us(100_000), 1000, 1);
    assert!(pair.now < at_ms(6_000), "{:?}", pair.now);
    let window = pair.ends[1].conn().info().rcv_wnd;
    assert!((5 << 20..=8 << 20).contains(&window), "{window}");
    pair.tear_down();
}

/// The slow start loses every second segment of a round trip; only those are retransmitted.
#[test]
fn sim_losses_of_a_slow_start_are_retransmitted_once() {
    let mut pair = through(20_000_000, &Faults::default(), us(25_000), 412, 1);
    let counters = pair.ends[0].conn().counters();
    let lost = pair.wire.tally(1).queue_full;
    assert!(lost > 300 && counters.retransmits <= lost, "{lost} lost: {counters:?}");
    pair.tear_down();
}

/// RFC 9406 section 4.2: a round of slow start ends with the acknowledgment of the first byte sent after the round
/// began. If it ended one ACK earlier, rounds would begin in the middle of bursts, and the transient queue that a burst
/// causes would look like a standing one.
#[test]
fn sim_rfc9406_s4_2_the_window_doubles_until_a_standing_queue_builds() {
    let mut pair = begin(10_000_000, &Faults::default(), us(25_000), 1000, 1);
    // The path holds 417 segments.
    pair.run_until(at_ms(1000), |p| p.ends[0].acked >= 600 * 1448);
    let grown = pair.ends[0].conn().info().cwnd - pair.ends[0].acked;
    assert_eq!(grown, 10 * 1448, "each byte acknowledged has opened the window by one");
    pair.tear_down();
}
