use proptest::prelude::*;

use super::*;

const MSS: u64 = 1000;

fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

fn sampler() -> Sampler {
    Sampler::new(at(0))
}

/// Sends segments `from..to` at `ms`, one of which occupies [`MSS`] bytes.
fn send(sampler: &mut Sampler, ms: u64, from: u64, to: u64, in_flight_before: u64) {
    for n in from..to {
        sampler.sent(at(ms), n * MSS, (n + 1) * MSS, in_flight_before + (n + 1 - from) * MSS);
    }
}

fn per_second(sample: RateSample) -> u64 {
    sample.rate.expect("a rate").bytes_per_second()
}

#[test]
fn draft_ccwg_bbr_s4_1_2_3_a_flight_measures_its_round_trip() {
    let mut sampler = sampler();
    send(&mut sampler, 100, 0, 10, 0);
    sampler.delivered_to(at(150), 10 * MSS);
    let sample = sampler.sample(None).unwrap();
    assert_eq!((sample.delivered, sample.newly_acked, sample.prior_delivered), (10 * MSS, 10 * MSS, 0));
    assert_eq!(per_second(sample), 10 * MSS * 20);
    assert_eq!(sampler.sample(None), None, "the ACK is counted once");
}

/// Section 4.1.1.2.4: ACKs that were held back and arrive together do not show a rate above that of sending.
#[test]
fn draft_ccwg_bbr_s4_1_1_2_the_slower_of_send_rate_and_ack_rate_counts() {
    let mut sampler = sampler();
    send(&mut sampler, 0, 0, 1, 0);
    send(&mut sampler, 100, 1, 2, MSS);
    send(&mut sampler, 200, 2, 3, 2 * MSS);
    sampler.delivered_to(at(210), MSS);
    sampler.sample(None);
    sampler.delivered_to(at(211), 3 * MSS);
    let sample = sampler.sample(None).unwrap();
    // Three segments were sent within 200 ms and acknowledged within 211 ms.
    assert_eq!(per_second(sample), 3 * MSS * 1000 / 211);
    assert_eq!(sample.tx_in_flight, 3 * MSS);
}

#[test]
fn draft_ccwg_bbr_s4_1_2_2_a_pause_is_not_part_of_the_interval() {
    let mut sampler = sampler();
    send(&mut sampler, 0, 0, 1, 0);
    sampler.delivered_to(at(50), MSS);
    sampler.sample(None);
    send(&mut sampler, 5000, 1, 2, 0);
    sampler.delivered_to(at(5050), 2 * MSS);
    assert_eq!(per_second(sampler.sample(None).unwrap()), 20 * MSS);
}

#[test]
fn draft_ccwg_bbr_s4_1_2_3_an_interval_below_the_round_trip_is_no_sample() {
    let mut sampler = sampler();
    send(&mut sampler, 0, 0, 1, 0);
    sampler.resent(at(40), MSS, MSS);
    // The ACK of the first transmission, which was only late.
    sampler.delivered_to(at(41), MSS);
    let sample = sampler.sample(Some(Duration::from_millis(40))).unwrap();
    assert_eq!((sample.rate, sample.newly_acked), (None, MSS));
}

/// Section 4.1.2.4, and 4.1.1.3: until the bubble has left the path.
#[test]
fn draft_ccwg_bbr_s4_1_2_4_samples_are_app_limited_until_the_bubble_is_acknowledged() {
    let mut sampler = sampler();
    let cwnd = 10 * MSS;
    send(&mut sampler, 0, 0, 2, 0);
    sampler.ran_dry();
    sampler.check_app_limited(2 * MSS, cwnd, false);
    send(&mut sampler, 10, 2, 4, 2 * MSS);
    sampler.delivered_to(at(50), 2 * MSS);
    assert!(!sampler.sample(None).unwrap().app_limited, "it was sent before the source ran dry");
    sampler.delivered_to(at(60), 4 * MSS);
    assert!(sampler.sample(None).unwrap().app_limited);
    assert!(!sampler.is_app_limited(), "the bubble has left the path");
    send(&mut sampler, 61, 4, 5, 0);
    sampler.delivered_to(at(111), 5 * MSS);
    assert!(!sampler.sample(None).unwrap().app_limited);
}

#[test]
fn draft_ccwg_bbr_s4_1_2_4_a_full_window_or_a_loss_to_repair_is_not_the_application() {
    let cwnd = 2 * MSS;
    for (in_flight, has_lost, limited) in [(cwnd, false, false), (MSS, true, false), (MSS, false, true)] {
        let mut sampler = sampler();
        send(&mut sampler, 0, 0, 2, 0);
        sampler.check_app_limited(in_flight, cwnd, has_lost);
        assert!(!sampler.is_app_limited(), "the source was not dry");
        sampler.ran_dry();
        sampler.check_app_limited(in_flight, cwnd, has_lost);
        assert_eq!(sampler.is_app_limited(), limited, "{in_flight} {has_lost}");
    }
}

#[test]
fn selective_and_cumulative_acknowledgments_count_a_byte_once() {
    let mut sampler = sampler();
    send(&mut sampler, 0, 0, 4, 0);
    sampler.sacked(at(50), 2 * MSS, 3 * MSS);
    sampler.sacked(at(50), 3 * MSS, 4 * MSS);
    assert_eq!(sampler.sample(None).unwrap().newly_acked, 2 * MSS);
    sampler.sacked(at(51), 3 * MSS, 4 * MSS);
    assert_eq!(sampler.sample(None), None);
    sampler.delivered_to(at(60), 4 * MSS);
    let sample = sampler.sample(None).unwrap();
    assert_eq!((sample.newly_acked, sample.total_delivered), (2 * MSS, 4 * MSS));
}

#[test]
fn draft_ccwg_bbr_s5_5_10_a_loss_knows_what_was_in_flight_and_lost_since() {
    let mut sampler = sampler();
    send(&mut sampler, 0, 0, 4, 0);
    let first = sampler.lost(at(9), 0, MSS).unwrap();
    assert_eq!((first.tx_in_flight, first.since_sent), (MSS, MSS));
    let third = sampler.lost(at(9), 2 * MSS, 3 * MSS).unwrap();
    assert_eq!((third.tx_in_flight, third.since_sent), (3 * MSS, 2 * MSS));
    sampler.resent(at(10), MSS, 3 * MSS);
    assert_eq!(sampler.lost(at(20), 0, MSS).unwrap().since_sent, MSS, "since it was sent again");
    assert_eq!(sampler.lost(at(20), 4 * MSS, 5 * MSS), None, "it was never sent");
}

/// A step of the property test.
#[derive(Debug, Clone, Copy)]
enum Step {
    Send(u64),
    Ack(u64),
    Sack(u64, u64),
    Resend(u64),
    Lose(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..4000u64).prop_map(Step::Send),
        any::<u64>().prop_map(Step::Ack),
        (any::<u64>(), 1..3000u64).prop_map(|(a, b)| Step::Sack(a, b)),
        any::<u64>().prop_map(Step::Resend),
        any::<u64>().prop_map(Step::Lose),
    ]
}

proptest! {
    /// Whatever is acknowledged, also in pieces other than those sent: no byte is delivered twice, all are once the last one is
    /// acknowledged, and no rate is larger than all bytes within the shortest time.
    #[test]
    fn prop_each_byte_is_delivered_once(steps in prop::collection::vec(step(), 1..200)) {
        let mut sampler = sampler();
        let (mut nxt, mut una, mut total) = (0u64, 0u64, 0u64);
        for (ms, step) in (1..).zip(steps) {
            let outstanding = (nxt - una).max(1);
            match step {
                Step::Send(len) => {
                    sampler.sent(at(ms), nxt, nxt + len, nxt + len - una);
                    nxt += len;
                }
                Step::Ack(n) => {
                    una += n % (nxt - una + 1);
                    sampler.delivered_to(at(ms), una);
                }
                Step::Sack(n, len) if nxt > una => {
                    let start = una + n % outstanding;
                    sampler.sacked(at(ms), start, (start + len).min(nxt));
                }
                Step::Resend(n) if nxt > una => sampler.resent(at(ms), una + 1 + n % outstanding, nxt - una),
                Step::Lose(n) if nxt > una => {
                    let start = una + n % outstanding;
                    sampler.lost(at(ms), start, (start + 100).min(nxt));
                }
                _ => {}
            }
            if let Some(sample) = sampler.sample(None) {
                total += sample.newly_acked;
                prop_assert_eq!(sample.total_delivered, total);
                prop_assert!(sample.delivered <= total && sample.newly_acked <= sample.delivered);
                prop_assert!(sample.rate.is_none_or(|rate| rate.bytes_per_second() <= total * 1000));
            }
            prop_assert!(total <= nxt);
        }
        sampler.delivered_to(at(100_000), nxt);
        total += sampler.sample(None).map_or(0, |sample| sample.newly_acked);
        prop_assert_eq!(total, nxt);
        prop_assert!(sampler.segments.is_empty());
    }
}
