//! Two stacks over the virtual wire, with an upper layer that numbers its ULPDUs and checks that each is
//! placed once with the right bytes and delivered once, in order.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod hostile;
mod mixed;

use std::{net::SocketAddr, time::Duration};

use xwarp_tcp::{
    mpa::{Markers, MpaConfig},
    secret::Secret,
    sim::{self, End, Faults, Gilbert, Outcome, SimLink, Wire, WireConfig, run},
    stack::{ConnectParams, StackConfig},
    tcp::{IsnKey, TcpConfig},
    time::Instant,
    wire::Path,
};

/// An initiator's private data.
const PRIVATE_DATA: &[u8] = b"hello";

fn path(from: &str, to: &str, mtu: u16) -> Path {
    let [from, to] = [from, to].map(|address| address.parse::<SocketAddr>().unwrap());
    Path { mtu, ..sim::path(from, to) }
}

/// Checks the ends of a connection, initiator and responder, after it has ended.
fn check_both(ends: [&End<SimLink>; 2], success: bool, context: &str) {
    for (end, other) in [(ends[0], ends[1]), (ends[1], ends[0])] {
        let census = end.link.census();
        assert_eq!((census.tx_out, census.rx_out), (0, 0), "{context}: frames leaked");
        if success {
            end.check_success(other.ulp.to_send, context);
        } else {
            end.check_end(context);
        }
    }
    assert!(!success || ends.iter().any(|end| end.ulp.peer_closed), "{context}");
    if let Some(offer) = ends[1].ulp.offer.clone() {
        assert_eq!(offer.into_private_data(), PRIVATE_DATA, "{context}");
    }
}

struct Scenario {
    name: &'static str,
    faults: Faults,
    markers: Markers,
    crc: bool,
    ulpdus: u32,
    v6: bool,
}

impl Default for Scenario {
    fn default() -> Self {
        let faults = Faults { delay: Duration::from_micros(10), ..Default::default() };
        Self { name: "clean", faults, markers: Markers::Prefer, crc: true, ulpdus: 400, v6: false }
    }
}

/// Both ends send `ulpdus`, then close. Returns the two ends in their final state.
fn exchange(scenario: &Scenario, seed: u64) -> (End<SimLink>, End<SimLink>) {
    let config = WireConfig { faults: [scenario.faults; 2], seed, ..Default::default() };
    let (wire, link_a, link_b) = Wire::new(config);
    let end = |link, seed| {
        // Bursts are counted in frames: when little is sent, a burst lasts for many time-outs in both directions.
        let patient = Duration::from_mins(5);
        let rto_max = Duration::from_secs(2);
        let tcp = TcpConfig { user_timeout: patient, fin_wait_2: patient, rto_max, ..TcpConfig::default() };
        End::new(link, StackConfig { secret: Secret::from_number(seed), tcp, ..StackConfig::default() })
    };
    let (mut a, mut b) = (end(link_a, seed), end(link_b, seed + 1));
    let mpa = MpaConfig { markers: scenario.markers, crc: scenario.crc, ..Default::default() };
    let (from, to): (&str, &str) = if scenario.v6 {
        ("[fd00::1]:40000", "[fd00::2]:18515")
    } else {
        ("10.1.0.1:40000", "10.1.0.2:18515")
    };
    let port = to.parse::<SocketAddr>().unwrap().port();
    b.stack.listen(&mut b.link, None, port, 8, 1500, mpa.clone()).unwrap();
    let params = ConnectParams { ird: 4, ord: 4, private_data: PRIVATE_DATA.to_vec() };
    a.conn = Some(a.stack.connect(Instant::ZERO, &mut a.link, path(from, to, 1500), mpa, params).unwrap());
    for ulp in [&mut a.ulp, &mut b.ulp] {
        ulp.to_send = scenario.ulpdus;
    }
    a.ulp.finish = true;
    let outcome = run(&wire, &mut [&mut a, &mut b], Instant::ZERO, Duration::from_secs(600), |_, _| false);
    let context = format!("{} seed {seed}: {outcome:?}", scenario.name);
    assert!(matches!(outcome, Outcome::Stalled(_)), "{context}: {:?} {:?}", a.ulp, b.ulp);
    check_both([&a, &b], true, &context);
    assert_eq!(a.link.census().rules, 0);
    (a, b)
}

#[test]
fn sim_clean_exchange_both_ways() {
    for (v6, markers, crc) in [
        (false, Markers::Prefer, true),
        (true, Markers::Prefer, true),
        (false, Markers::Off, true),
        (true, Markers::Off, false),
        (false, Markers::Require, false),
    ] {
        let (a, b) = exchange(&Scenario { markers, crc, v6, ..Default::default() }, 1);
        assert_eq!(a.stack.tcp_counters().retransmits + b.stack.tcp_counters().retransmits, 0);
    }
}

fn lossy() -> Faults {
    Faults {
        loss: 0.02,
        duplicate: 0.01,
        reorder: 0.05,
        reorder_by: Duration::from_micros(200),
        delay: Duration::from_micros(20),
        jitter: Duration::from_micros(5),
        ..Default::default()
    }
}

#[test]
fn sim_loss_duplication_reordering_with_markers() {
    for seed in 1..=16 {
        let scenario = Scenario { name: "lossy, markers", faults: lossy(), ..Default::default() };
        let (a, b) = exchange(&scenario, seed);
        assert!(a.ulp.early + b.ulp.early > 0, "seed {seed}: nothing was placed beyond a gap");
    }
}

#[test]
fn sim_loss_duplication_reordering_without_markers() {
    for seed in 1..=16 {
        let scenario = Scenario {
            name: "lossy, no markers",
            faults: lossy(),
            markers: Markers::Off,
            ..Default::default()
        };
        exchange(&scenario, seed);
    }
}

/// Marker positions count from the beginning of the stream, independent of its sequence numbers.
#[test]
fn rfc5044_s4_3_markers_across_the_wrap_of_sequence_numbers() {
    let flow = path("10.1.0.1:40000", "10.1.0.2:18515", 1500).flow;
    let wraps = |seed: &u64| {
        IsnKey::new(&Secret::from_number(*seed)).isn(Instant::ZERO, &flow).seq.value() > u32::MAX - 200_000
    };
    for seed in (1..).filter(wraps).take(2) {
        let scenario = Scenario { name: "wrap", faults: lossy(), ..Default::default() };
        let (a, b) = exchange(&scenario, seed);
        assert!(*a.ulp.sent_ends.last().unwrap() > 200_000, "seed {seed}: the numbers have wrapped");
        assert!(b.ulp.early > 0, "seed {seed}: nothing was placed beyond a gap");
    }
}

#[test]
fn sim_bursts_and_corruption() {
    let bursts = Some(Gilbert { enter: 0.005, leave: 0.2, loss: 0.8 });
    let faults = Faults { bursts, corrupt: 0.01, ..lossy() };
    for seed in 1..=16 {
        exchange(&Scenario { name: "bursts", faults, ..Default::default() }, seed);
    }
}
