//! Many processes on one interface, which start and end; and processes that fork.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const FORKS: &str = env!("CARGO_BIN_EXE_xwarp-fork");
const LIMIT: Duration = Duration::from_secs(120);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// The work of a pair's server and client. All received bytes are compared.
#[derive(Clone, Copy)]
enum Traffic {
    /// They exchange messages in turn.
    Messages,
    /// The same; the client is killed, and another one takes its place.
    Killed,
    /// A test of xwarp-perf.
    Perf(&'static str),
}

impl Traffic {
    fn of(pair: u16) -> Self {
        match pair {
            pair if pair.is_multiple_of(8) => Self::Killed,
            // Their devices are larger.
            3 | 13 | 18 => Self::Perf("write_bw"),
            4 | 9 | 14 => Self::Perf("read_bw"),
            _ => Self::Messages,
        }
    }
}

/// `pairs` of a server and a client exchange verified Sends, Writes and Reads, half of them over IPv6.
fn crowd(pairs: u16, messages: &str) {
    let lab = lab();
    let shared =
        SharedInterface::start(&lab, HELPER, &["--devices-per-user", "256", "--memory-per-user", "1024"])
            .unwrap();
    let at = |pair: u16| {
        let family = if pair.is_multiple_of(2) { Family::V4 } else { Family::V6 };
        SocketAddr::new(lab.address(Side::A, family), 7000 + pair)
    };
    let perf = |pair: u16, test: &str, server: Option<String>| {
        let port = (7000 + pair).to_string();
        let mut args = vec![test, "-d", INTERFACE, "-p", &port, "--verify", "-n", "50", "-s", "5000"];
        args.extend(server.as_deref());
        shared.start_unprivileged(PERF, &args).unwrap()
    };
    let serve = |pair: u16| {
        let server = |connections: &str| {
            shared.start_unprivileged(NOBODYS, &["serve", &at(pair).to_string(), connections]).unwrap()
        };
        match Traffic::of(pair) {
            Traffic::Messages => server("1"),
            Traffic::Killed => server("2"),
            Traffic::Perf(test) => perf(pair, test, None),
        }
    };
    let talk = |pair: u16, messages: &str| {
        shared.start_unprivileged(NOBODYS, &["talk", &at(pair).to_string(), messages]).unwrap()
    };
    let mut servers: Vec<Running> = (0..pairs).map(serve).collect();
    for (pair, server) in (0..pairs).zip(&mut servers) {
        let ready =
            if matches!(Traffic::of(pair), Traffic::Perf(_)) { "Waiting for a client" } else { "listens" };
        server.wait_for(ready, LIMIT).unwrap();
    }
    let ask = |pair: u16| match Traffic::of(pair) {
        Traffic::Messages => talk(pair, messages),
        Traffic::Killed => talk(pair, "0"),
        Traffic::Perf(test) => perf(pair, test, Some(at(pair).ip().to_string())),
    };
    let clients: Vec<Running> = (0..pairs).map(ask).collect();
    let mut replaced = Vec::new();
    let mut others = Vec::new();
    for (pair, mut client) in (0..pairs).zip(clients) {
        if matches!(Traffic::of(pair), Traffic::Killed) {
            client.wait_for("talks", LIMIT).unwrap();
            client.signal(Signal::KILL).unwrap();
            drop(client);
            replaced.push(talk(pair, messages));
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
