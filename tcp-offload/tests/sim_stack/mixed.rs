//! All faults together, drawn from a seed: faults in both directions, settings of TCP, MPA and links. Some faults
//! cannot be repaired (a bit flip that only MPA's CRC detects, a reset with the exact sequence number). The connection
//! may then end, but no wrong data may be delivered, and nothing may leak. After a while the faults stop, and
//! everything must finish.

use std::{ops::RangeInclusive, time::Duration};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use xwarp_tcp::{
    mpa::{Markers, MpaConfig},
    secret::Secret,
    sim::{
        Aim, Blackout, Checksums, End, Faults, Gilbert, Outcome, PathMtu, Recut, Resets, Wire, WireConfig,
        run, run_seeds,
    },
    stack::{ConnectParams, Polling, StackConfig},
    tcp::{Algorithm, Keepalive, TcpConfig},
    time::Instant,
};

use super::{PRIVATE_DATA, check_both, path};

const PORT: u16 = 18515;

/// Longer than any time-out that a lost frame can lead to.
const LONG: Duration = Duration::from_secs(10_000);

/// Random parameters.
struct Dice(SmallRng);

impl Dice {
    fn often(&mut self) -> bool {
        self.0.random_bool(0.5)
    }

    /// Zero in half of all cases, otherwise up to `most`.
    fn chance(&mut self, most: f64) -> f64 {
        if self.often() { self.0.random_range(0.0..most) } else { 0.0 }
    }

    fn time(&mut self, most_us: u64) -> Duration {
        Duration::from_micros(self.0.random_range(0..=most_us))
    }

    /// A number from `range`, distributed logarithmically.
    fn size(&mut self, range: RangeInclusive<u32>) -> u32 {
        let (least, most) = (f64::from(*range.start()).ln(), f64::from(*range.end()).ln());
        self.0.random_range(least..=most).exp() as u32
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.0.random_range(0..of.len())]
    }

    /// Faults of one direction that TCP must survive.
    fn faults(&mut self, v6: bool) -> Faults {
        let from = Instant::ZERO + self.time(50_000);
        let blackout = Blackout { from, length: self.time(300_000), every: None };
        let again = Blackout { length: self.time(2_000), every: Some(self.time(30_000)), ..blackout };
        let least_mtu = if v6 { 1280 } else { 600 };
        let icmp = self.often();
        let mtu = PathMtu {
            from: Instant::ZERO + self.time(20_000),
            // Without ICMP, TCP falls back to segments of 1024 bytes.
            bytes: self.0.random_range(if icmp { least_mtu } else { 1280 }..=1500),
            icmp,
        };
        let recut =
            Recut { split: self.chance(0.3), join: self.chance(0.5), wait: self.time(100), most_bytes: 1500 };
        let aim = self.pick(&[Aim::Near, Aim::Far]);
        let rate = self.size(200_000..=1_000_000_000);
        Faults {
            loss: self.chance(0.08),
            bursts: self.0.random_bool(0.3).then_some(Gilbert { enter: 0.003, leave: 0.2, loss: 0.7 }),
            blackout: self.0.random_bool(0.2).then_some(if self.often() { blackout } else { again }),
            duplicate: self.chance(0.1),
            reorder: self.chance(0.3),
            reorder_by: self.time(20_000),
            reorder_depth: self.size(1..=300),
            corrupt: self.chance(0.02),
            repair_checksum: 0.0,
            recut: self.0.random_bool(0.4).then_some(recut),
            mtu: self.0.random_bool(0.2).then_some(mtu),
            resets: self.0.random_bool(0.2).then_some(Resets { chance: 0.01, aim }),
            delay: Duration::from_micros(u64::from(self.size(1..=20_000))),
            jitter: self.time(200),
            rate_bytes: self.often().then_some(rate.into()),
            queue_frames: self.size(8..=1000) as usize,
            mark_frames: self.size(2..=1000) as usize,
            mark: 0.0,
        }
    }

    fn tcp(&mut self) -> TcpConfig {
        TcpConfig {
            receive_window: self.size(4_000..=1 << 20),
            algorithm: self.pick(&[Algorithm::Cubic, Algorithm::NewReno, Algorithm::Bbr]),
            window_scaling: self.0.random_bool(0.8),
            timestamps: self.0.random_bool(0.7),
            sack: self.0.random_bool(0.7),
            ecn: self.often(),
            ack_every: self.size(1..=16),
            delayed_ack: self.time(40_000),
            max_chunks: self.size(4..=1000),
            connect_timeout: LONG,
            user_timeout: LONG,
            fin_wait_2: LONG,
            time_wait: LONG,
            // Without keepalive, an end whose peer was reset would wait forever.
            keepalive: Some(Keepalive { idle: LONG / 10, interval: LONG / 100, probes: 5 }),
            ..TcpConfig::default()
        }
    }

    fn wire(&mut self) -> WireConfig {
        WireConfig {
            tx_chunks: self.size(40..=1024) as usize,
            rx_chunks: self.size(40..=1024) as usize,
            ring: self.size(2..=256) as usize,
            ..WireConfig::default()
        }
    }

    fn mpa(&mut self) -> MpaConfig {
        MpaConfig {
            markers: self.pick(&[Markers::Prefer, Markers::Prefer, Markers::Off]),
            crc: self.0.random_bool(0.8),
            startup_timeout: LONG,
            hold_bytes: self.size(3_000..=1 << 20) as usize,
            ..MpaConfig::default()
        }
    }
}

/// From this seed on, applications that poll are busy.
const BUSY: u64 = 1 << 40;

/// From this seed on, a share of the packets is marked Congestion Experienced at random.
const MARKED: u64 = 1 << 41;

/// Runs the scenario of a seed with frames of one chunk and an MTU of 1500; returns the trace's hash.
fn mixed(seed: u64) -> u64 {
    scenario(seed, 1500, |config| config)
}

/// Runs the scenario of a seed with chunks of any size and an MTU of up to 65535.
fn mixed_on_chains(seed: u64) -> u64 {
    let mut dice = Dice(SmallRng::seed_from_u64(!seed));
    let (chunk, mtu) = (dice.size(160..=4096) as usize, dice.size(1280..=65_535) as u16);
    scenario(seed, mtu, |config| config.chained(chunk, mtu))
}

fn scenario(seed: u64, mtu: u16, chained: impl FnOnce(WireConfig) -> WireConfig) -> u64 {
    let mut dice = Dice(SmallRng::seed_from_u64(seed));
    let v6 = dice.often();
    let mpa = dice.mpa();
    let mut faults = [dice.faults(v6), dice.faults(v6)];
    if seed >= MARKED {
        let shares = [0.02, 0.5, 1.0, 0.0];
        faults[0].mark = shares[seed as usize % 4];
        faults[1].mark = shares[seed as usize / 4 % 4];
    }
    // A damaged partial checksum protects nothing, and a middlebox would complete it.
    let intact = faults.iter().all(|faults| faults.corrupt == 0.0 && faults.recut.is_none());
    let checksums = match seed & 8 {
        0 => Checksums::Computed,
        _ if intact && seed & 16 != 0 => Checksums::Partial,
        _ => Checksums::Completed,
    };
    let config = chained(WireConfig { seed, faults, checksums, ..dice.wire() });
    let (wire, link_a, link_b) = Wire::new(config);
    let mut end = |link, seed| {
        let secret = Secret::from_number(seed);
        let answer_delay = (seed & 4 != 0).then_some(Duration::from_millis(80));
        let tcp = TcpConfig { answer_delay, ..dice.tcp() };
        End::new(link, StackConfig { secret, tcp, ..StackConfig::default() })
    };
    let (mut a, mut b) = (end(link_a, seed), end(link_b, seed + 1));
    let polls = if seed < BUSY { Polling::Yes } else { Polling::Busy };
    a.stack.set_polling(if seed & 1 == 0 { Polling::No } else { polls });
    b.stack.set_polling(if seed & 2 == 0 { Polling::No } else { polls });
    let (from, to) =
        if v6 { ("[fd00::1]:40000", "[fd00::2]:18515") } else { ("10.1.0.1:40000", "10.1.0.2:18515") };
    b.stack.listen(&mut b.link, None, PORT, 8, mtu, mpa.clone()).unwrap();
    let params = ConnectParams { ird: 4, ord: 4, private_data: PRIVATE_DATA.to_vec() };
    a.conn =
        Some(a.stack.connect(Instant::ZERO, &mut a.link, path(from, to, mtu), mpa.clone(), params).unwrap());
    a.ulp.to_send = dice.size(1..=400);
    b.ulp.to_send = dice.size(1..=400);
    a.ulp.finish = true;

    // The start-up frames have no CRC, so faults that only a CRC detects begin after them.
    let irreparable = dice.0.random_bool(0.2);
    let beginning = dice.time(300_000);
    let outcome = run(&wire, &mut [&mut a, &mut b], Instant::ZERO, beginning, |_, _| false);
    let mut now = Instant::ZERO + beginning;
    let started = a.ulp.established.is_some() && b.ulp.delivered > 0;
    let irreparable = irreparable && started && matches!(outcome, Outcome::TimeLimit);
    if irreparable {
        let reset = Some(Resets { chance: 0.002, aim: Aim::Next });
        for direction in &mut faults {
            if mpa.crc && checksums != Checksums::Partial && dice.often() {
                (direction.corrupt, direction.repair_checksum) = (0.01, 0.7);
            } else {
                direction.resets = reset;
            }
        }
        wire.with_faults(faults);
    }
    let middle = dice.time(2_000_000);
    run(&wire, &mut [&mut a, &mut b], now, middle, |_, _| false);
    now += middle;

    // Now the network has no faults except its delay.
    wire.with_faults(faults.map(|f| Faults { delay: f.delay, ..Faults::default() }));
    let outcome = run(&wire, &mut [&mut a, &mut b], now, LONG * 3, |_, _| false);
    let context = format!("seed {seed}: {outcome:?}");
    assert!(matches!(outcome, Outcome::Stalled(_)), "{context}: {:?} {:?}", a.ulp, b.ulp);
    check_both([&a, &b], !irreparable, &context);
    wire.trace_hash()
}

#[test]
fn sim_mixed_faults_of_all_kinds() {
    run_seeds(mixed);
}

#[test]
fn sim_mixed_faults_on_chains_of_chunks() {
    run_seeds(mixed_on_chains);
}

#[test]
fn sim_mixed_faults_with_busy_applications() {
    run_seeds(|seed| mixed(BUSY + seed));
    run_seeds(|seed| mixed_on_chains(BUSY + seed));
}

#[test]
fn sim_mixed_faults_with_marks_at_random() {
    run_seeds(|seed| mixed(MARKED + seed));
}

#[test]
fn sim_the_same_seed_runs_the_same() {
    assert_eq!(mixed(7), mixed(7));
    assert_ne!(mixed(7), mixed(8));
}
