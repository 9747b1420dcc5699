//! Many processes on one interface, which come and go; and processes that fork.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const FORKS: &str = env!("CARGO_BIN_EXE_xwarp-fork");
const LIMIT: Duration = Duration::from_secs(120);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// `pairs` of a server and a client exchange verified messages, half of them over IPv6. One client of each eighth pair is killed
/// and another one takes its place.
fn crowd(pairs: u16, messages: &str) {
    let lab = lab();
    let shared =
        SharedInterface::start(&lab, HELPER, &["--devices-per-user", "256", "--memory-per-user", "1024"])
            .unwrap();
    let at = |pair: u16| {
        let family = if pair.is_multiple_of(2) { Family::V4 } else { Family::V6 };
        SocketAddr::new(lab.address(Side::A, family), 7000 + pair).to_string()
    };
    let start = |args: &[&str]| shared.start_unprivileged(NOBODYS, args).unwrap();
    let killed = |pair: u16| pair.is_multiple_of(8);
    let mut servers: Vec<Running> =
        (0..pairs).map(|pair| start(&["serve", &at(pair), if killed(pair) { "2" } else { "1" }])).collect();
    for server in &mut servers {
        server.wait_for("listens", LIMIT).unwrap();
    }
    let clients: Vec<Running> = (0..pairs)
        .map(|pair| start(&["talk", &at(pair), if killed(pair) { "0" } else { messages }]))
        .collect();
    let mut replaced = Vec::new();
    let mut others = Vec::new();
    for (pair, mut client) in (0..pairs).zip(clients) {
        if killed(pair) {
            client.wait_for("talks", LIMIT).unwrap();
            client.signal(Signal::KILL).unwrap();
            drop(client);
            replaced.push(start(&["talk", &at(pair), messages]));
        } else {
            others.push(client);
        }
    }
    for process in others.into_iter().chain(replaced).chain(servers) {
        process.finish(LIMIT).unwrap();
    }
}

#[test]
fn netns_shared_two_processes_exchange_many_messages() {
    crowd(1, "300");
}

#[test]
fn netns_shared_ten_processes_exchange_messages() {
    crowd(5, "100");
}

#[test]
fn netns_shared_a_hundred_processes_exchange_messages() {
    let begin = Instant::now();
    crowd(50, "10");
    println!("{:?}", begin.elapsed());
}

#[test]
fn netns_shared_a_fork_leaves_the_parent_its_device() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), 7000).to_string();
    // The parent has a device through the helper; then one that owns the interface at the other end.
    let running = shared.serve(NOBODYS, &address, "2").unwrap();
    shared.start_unprivileged(FORKS, &["granted", &address]).unwrap().finish(LIMIT).unwrap();
    lab.start(Side::B, FORKS, &["owned", &address]).unwrap().finish(LIMIT).unwrap();
    running.finish(LIMIT).unwrap();
}
