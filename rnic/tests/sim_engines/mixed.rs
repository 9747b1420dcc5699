//! Several engines on a switch, each client with a connection to the first: work of all kinds both ways, faults and
//! settings drawn from a seed.

use std::{cell::Cell, rc::Rc, time::Duration};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use xwarp_rnic::{
    engine::{ConnectParams, EngineConfig},
    sim::{Station, ipv4, ipv6, path},
};
use xwarp_tcp::{
    framing::AcceptParams,
    mpa::{Markers, MpaConfig},
    rdma_tcp::RdmaTcpConfig,
    secret::Secret,
    sim::{
        Aim, Checksums, Faults, Gilbert, Node, Outcome, Recut, Resets, SimLink, Wire, WireConfig, run,
        run_seeds,
    },
    stack::Polling,
    tcp::{Algorithm, TcpConfig},
    time::Instant,
};

use super::talk::{Plan, Talk};

const PORT: u16 = 7;

/// Longer than any time-out that a lost frame can lead to.
const LONG: Duration = Duration::from_secs(10_000);

/// A station and its ends of connections.
struct Host {
    station: Station,
    talks: Vec<Talk>,
    /// Ends of all hosts that have work left.
    working: Rc<Cell<usize>>,
    done: Vec<bool>,
    disconnected: bool,
}

impl Host {
    fn new(link: SimLink, config: EngineConfig, working: &Rc<Cell<usize>>) -> Self {
        let mut station = Station::new(link, config);
        station.accept = AcceptParams { ird: 4, ord: 4, ..AcceptParams::default() };
        let working = Rc::clone(working);
        Self { station, talks: Vec::new(), working, done: Vec::new(), disconnected: false }
    }

    fn add(&mut self, talk: Talk) {
        self.talks.push(talk);
        self.done.push(false);
        self.working.set(self.working.get() + 1);
    }
}

impl Node for Host {
    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.station.turn(now);
        let engine = &mut self.station.engine;
        while let Some(event) = engine.next_async_event() {
            // Each host has few queue pairs, so every talk sees the event.
            self.talks.iter_mut().for_each(|talk| talk.take_event(event.clone()));
        }
        for (talk, done) in self.talks.iter_mut().zip(&mut self.done) {
            busy |= talk.step(engine);
            if talk.is_done() && !std::mem::replace(done, true) {
                // Already 0 when the other ends were given up.
                self.working.set(self.working.get().saturating_sub(1));
                busy = true;
            }
        }
        if self.working.get() == 0 && !std::mem::replace(&mut self.disconnected, true) {
            for talk in &self.talks {
                // The peer may have disconnected first.
                let _ = engine.disconnect(talk.qp);
            }
            busy = true;
        }
        if busy {
            engine.transmit(now, &mut self.station.link);
        }
        busy
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.station.next_deadline()
    }
}

fn chance(rng: &mut SmallRng, most: f64) -> f64 {
    if rng.random_bool(0.5) { rng.random_range(0.0..most) } else { 0.0 }
}

fn time(rng: &mut SmallRng, most_us: u64) -> Duration {
    Duration::from_micros(rng.random_range(0..=most_us))
}

fn faults(rng: &mut SmallRng) -> Faults {
    let bursts = Gilbert { enter: 0.003, leave: 0.2, loss: 0.7 };
    let recut =
        Recut { split: chance(rng, 0.3), join: chance(rng, 0.5), wait: time(rng, 100), most_bytes: 1500 };
    let aim = if rng.random_bool(0.5) { Aim::Near } else { Aim::Far };
    Faults {
        loss: chance(rng, 0.05),
        bursts: rng.random_bool(0.2).then_some(bursts),
        duplicate: chance(rng, 0.05),
        reorder: chance(rng, 0.3),
        reorder_by: time(rng, 5_000),
        reorder_depth: rng.random_range(1..200),
        corrupt: chance(rng, 0.01),
        recut: rng.random_bool(0.3).then_some(recut),
        resets: rng.random_bool(0.2).then_some(Resets { chance: 0.01, aim }),
        delay: time(rng, 1_000),
        jitter: time(rng, 100),
        rate_bytes: rng.random_bool(0.5).then(|| rng.random_range(1_000_000..1_000_000_000)),
        queue_frames: rng.random_range(10..1000),
        mark_frames: rng.random_range(2..500),
        ..Faults::default()
    }
}

/// The framing of a scenario's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    Mpa,
    RdmaTcp,
}

fn config(rng: &mut SmallRng, seed: u64, framing: Framing) -> EngineConfig {
    let tcp = TcpConfig {
        receive_window: 1 << rng.random_range(13..=20),
        algorithm: if rng.random_bool(0.5) { Algorithm::Cubic } else { Algorithm::NewReno },
        timestamps: rng.random_bool(0.7),
        sack: rng.random_bool(0.7),
        ecn: rng.random_bool(0.5),
        connect_timeout: LONG,
        user_timeout: LONG,
        fin_wait_2: LONG,
        time_wait: LONG,
        keepalive: Some(xwarp_tcp::tcp::Keepalive { idle: LONG / 10, interval: LONG / 100, probes: 5 }),
        ..TcpConfig::default()
    };
    let mpa = MpaConfig {
        markers: if rng.random_bool(0.7) { Markers::Prefer } else { Markers::Off },
        startup_timeout: LONG,
        withhold_timeout: LONG,
        hold_bytes: 1 << rng.random_range(12..=20),
        ..MpaConfig::default()
    };
    let MpaConfig { startup_timeout, withhold_timeout, hold_bytes, max_ird, .. } = mpa;
    let framing = match framing {
        Framing::Mpa => mpa.into(),
        Framing::RdmaTcp => RdmaTcpConfig { startup_timeout, withhold_timeout, hold_bytes, max_ird }.into(),
    };
    EngineConfig { secret: Secret::from_number(seed), tcp, framing, ..EngineConfig::default() }
}

/// From this seed on, applications that poll are busy.
const BUSY: u64 = 1 << 40;

/// Engines on a switch: the first listens, each other has a connection to it.
fn hosts(
    rng: &mut SmallRng,
    links: Vec<SimLink>,
    (seed, framing): (u64, Framing),
    mtu: u16,
    working: &Rc<Cell<usize>>,
) -> Vec<Host> {
    let mut host = |(mut link, end): (SimLink, u8)| {
        // A broadcast frame, from which the switch learns this host's port.
        let own = [2, 0, 0, 0, 0, end];
        link.inject(&[&[0xff; 6][..], &own, &[0x88, 0xb5]].concat());
        let mut host = Host::new(link, config(rng, seed + 1, framing), working);
        let polls = if seed < BUSY { Polling::Yes } else { Polling::Busy };
        host.station.engine.set_polling(if (seed >> (end & 1)) & 1 == 0 { Polling::No } else { polls });
        host
    };
    let mut hosts: Vec<Host> = links.into_iter().zip(1..).map(&mut host).collect();
    let (server, clients) = hosts.split_first_mut().unwrap();
    let v6 = rng.random_bool(0.5);
    let overtakes = framing == Framing::RdmaTcp && rng.random_bool(0.5);
    let station = &mut server.station;
    station.engine.listen(&mut station.link, None, PORT, 8, mtu, None).unwrap();
    for (client, end) in clients.iter_mut().zip(2..) {
        let mut plan = || {
            let count = rng.random_range(1..40);
            let plan = Plan::random(rng, count, overtakes);
            if framing == Framing::Mpa { plan.with_immediate_sends() } else { plan }
        };
        let plans = [plan(), plan()];
        let depth = rng.random_range(1..16);
        let [ours, theirs] = plans.clone();
        let mut near = Talk::new(&mut client.station.engine, ours, theirs, seed, depth);
        let [theirs, ours] = plans;
        let mut far = Talk::new(&mut server.station.engine, ours, theirs, seed + 99, depth);
        Talk::introduce(&mut near, &mut far);
        server.station.expected.insert(if v6 { ipv6(end) } else { ipv4(end) }, far.qp);
        let params = ConnectParams { ird: 4, ord: 4, ..ConnectParams::default() };
        let path = path([(end, 40_000), (1, PORT)], v6, mtu);
        let station = &mut client.station;
        station.engine.connect(Instant::ZERO, &mut station.link, near.qp, path, params).unwrap();
        client.add(near);
        server.add(far);
    }
    hosts
}

/// Runs the scenario of a seed with frames of one chunk and an MTU of 1500; returns the trace's hash.
fn mixed(seed: u64, framing: Framing) -> u64 {
    scenario((seed, framing), 1500, &WireConfig::default())
}

/// Runs the scenario of a seed with chunks of any size and an MTU of up to 65535.
fn mixed_on_chains(seed: u64, framing: Framing) -> u64 {
    let mut rng = SmallRng::seed_from_u64(!seed);
    let (chunk, mtu) = (1 << rng.random_range(8..=12), 1280 << rng.random_range(0..=5));
    let (chunk, mtu) = (chunk - rng.random_range(0..chunk / 3), mtu + rng.random_range(0..=mtu / 2));
    scenario((seed, framing), mtu, &WireConfig::default().chained(chunk, mtu))
}

fn scenario((seed, framing): (u64, Framing), mtu: u16, config: &WireConfig) -> u64 {
    let mut rng = SmallRng::seed_from_u64(seed);
    let count = rng.random_range(2..=4);
    let mut directions: Vec<Faults> = (0..count).map(|_| faults(&mut rng)).collect();
    let checksums = if seed & 2 == 0 { Checksums::Computed } else { Checksums::Completed };
    let (wire, links) = Wire::switch(&WireConfig { seed, checksums, ..*config }, &directions);
    let working = Rc::new(Cell::new(0));
    let mut hosts = hosts(&mut rng, links, (seed, framing), mtu, &working);
    let mut go = |from, limit| {
        let mut nodes: Vec<&mut dyn Node> = hosts.iter_mut().map(|h| h as &mut dyn Node).collect();
        run(&wire, &mut nodes, from, limit, |_, _| false)
    };
    // The start-up frames have no CRC, so faults that only a CRC detects begin after them.
    let beginning = time(&mut rng, 100_000);
    go(Instant::ZERO, beginning);
    let mut now = Instant::ZERO + beginning;
    let irreparable = rng.random_bool(0.3);
    if irreparable {
        for (end, direction) in directions.iter_mut().enumerate() {
            if rng.random_bool(0.5) {
                (direction.corrupt, direction.repair_checksum) = (0.01, 0.7);
            } else {
                direction.resets = Some(Resets { chance: 0.002, aim: Aim::Next });
            }
            wire.set_faults(end, *direction);
        }
        let middle = time(&mut rng, 500_000);
        go(now, middle);
        now += middle;
    }
    let middle = time(&mut rng, 1_000_000);
    go(now, middle);
    now += middle;
    for (end, direction) in directions.iter().enumerate() {
        wire.set_faults(end, Faults { delay: direction.delay, ..Faults::default() });
    }
    let mut outcome = go(now, LONG * 3);
    if irreparable && matches!(outcome, Outcome::TimeLimit) {
        // An end waits for work that will never complete, because its connection is gone.
        working.set(0);
        outcome = go(now + LONG * 3, LONG * 3);
    }
    let context = format!("seed {seed}: {outcome:?}");
    assert!(matches!(outcome, Outcome::Stalled(_)), "{context}");
    for Host { station, talks, .. } in &hosts {
        for talk in talks {
            if irreparable {
                talk.check_end(&station.engine, &context);
            } else {
                talk.check_success(&station.engine, &context);
            }
        }
        let census = station.link.census();
        assert_eq!((census.tx_out, census.rx_out), (0, 0), "{context}: frames leaked");
        assert_eq!(station.engine.stack().connections(), 0, "{context}: connections left");
    }
    wire.trace_hash()
}

#[test]
fn sim_mixed_faults_under_whole_engines() {
    run_seeds(|seed| mixed(seed, Framing::Mpa));
}

#[test]
fn sim_mixed_faults_under_whole_engines_with_rdma_tcp() {
    run_seeds(|seed| mixed(seed, Framing::RdmaTcp));
}

#[test]
fn sim_mixed_faults_under_whole_engines_on_chains_of_chunks() {
    run_seeds(|seed| mixed_on_chains(seed, Framing::Mpa));
}

#[test]
fn sim_mixed_faults_under_whole_engines_on_chains_of_chunks_with_rdma_tcp() {
    run_seeds(|seed| mixed_on_chains(seed, Framing::RdmaTcp));
}

#[test]
fn sim_mixed_faults_under_whole_engines_with_busy_applications() {
    run_seeds(|seed| mixed(BUSY + seed, Framing::Mpa));
    run_seeds(|seed| mixed_on_chains(BUSY + seed, Framing::RdmaTcp));
}

#[test]
fn sim_the_same_seed_runs_engines_the_same() {
    for framing in [Framing::Mpa, Framing::RdmaTcp] {
        assert_eq!(mixed(3, framing), mixed(3, framing));
        assert_ne!(mixed(3, framing), mixed(4, framing));
    }
}
