//! Death of clients and of the helper: all resources are released, and other processes detect it or are not affected.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    leaks,
    process::Running,
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the detection of a process's death.
const NOTICED: Duration = Duration::from_secs(5);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// The resources of a helper: its descriptors by kind (programs, maps, links, sockets), the interfaces of its private
/// namespace, and its AF_XDP rings.
fn census(helper: u32) -> (BTreeMap<String, usize>, usize, usize) {
    let threads = fs::read_dir(format!("/proc/{helper}/task")).unwrap().flatten();
    let pairs = threads.map(|thread| thread.path()).find(|thread| {
        fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.trim() == "xwarpd-pairs")
    });
    let interfaces = fs::read_to_string(pairs.unwrap().join("net/dev")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{helper}/maps")).unwrap();
    let interfaces = interfaces.lines().filter(|line| line.contains("near") || line.contains("far")).count();
    let mapped = maps.lines().filter(|line| line.contains("socket:[") || line.contains("umem")).count();
    (leaks::descriptors(helper).unwrap(), interfaces, mapped)
}

/// Waits until the census equals the earlier one.
fn settles(shared: &SharedInterface, before: &(BTreeMap<String, usize>, usize, usize)) {
    leaks::settle(|| census(shared.helper.id()), before, 2 * NOTICED).unwrap();
}

/// A server and a client that exchange messages endlessly.
fn talking(lab: &Lab, shared: &SharedInterface, port: u16, connections: &str) -> (Running, Running) {
    let address = format!("{}:{port}", lab.address(Side::A, Family::V4));
    let server = shared.serve(NOBODYS, &address, connections).unwrap();
    let mut client = shared.start_unprivileged(NOBODYS, &["talk", &address, "0"]).unwrap();
    client.wait_for("talks", LIMIT).unwrap();
    (server, client)
}

#[test]
fn netns_shared_a_killed_client_leaves_nothing_and_others_go_on() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "0"]).unwrap();
    let before = census(shared.helper.id());
    assert_eq!((before.1, before.2), (0, 0), "no client yet");
    let (server, mut client) = talking(&lab, &shared, 7000, "2");
    assert_eq!(census(shared.helper.id()).1, 2, "the near ends of two pairs");
    // The client dies in the middle of a message; the server serves the next one.
    client.signal(Signal::KILL).unwrap();
    client.wait(LIMIT).unwrap();
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let next = shared.start_unprivileged(NOBODYS, &["talk", &address, "20"]).unwrap();
    next.finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    settles(&shared, &before);
    // A server dies; its client detects it, and the port is free for the next server.
    for _ in 0..2 {
        let (server, mut client) = talking(&lab, &shared, 7000, "1");
        server.signal(Signal::KILL).unwrap();
        let killed = Instant::now();
        drop(server);
        assert!(!client.wait(LIMIT).unwrap().success());
        assert!(killed.elapsed() < 8 * NOTICED, "{:?}: {}", killed.elapsed(), client.output());
        settles(&shared, &before);
    }
}

#[test]
fn netns_shared_a_killed_helper_stops_its_clients_and_leaves_nothing() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let (mut server, mut client) = talking(&lab, &shared, 7000, "1");
    let peer_address = lab.address(Side::B, Family::V4).to_string();
    let args = ["send_bw", "-d", INTERFACE, "-D", "60"];
    let mut peer = lab.start(Side::B, PERF, &args).unwrap();
    peer.wait_for("Waiting for a client", LIMIT).unwrap();
    let wired_args = [&args[..], &[&peer_address]].concat();
    let mut wired = shared.start_unprivileged(PERF, &wired_args).unwrap();
    wired.wait_for("#bytes", Duration::from_secs(2)).unwrap_err();
    let listening = ["send_bw", "-d", INTERFACE, "-p", "7001"];
    let mut listening = shared.start_unprivileged(PERF, &listening).unwrap();
    listening.wait_for("Waiting for a client", LIMIT).unwrap();
    let programs = || lab.run(Side::A, "ip", &["link", "show", INTERFACE]).unwrap();
    assert!(programs().contains("xdp"), "{}", programs());
    shared.helper.signal(Signal::KILL).unwrap();
    let killed = Instant::now();
    for process in [&mut server, &mut client, &mut wired, &mut listening] {
        process.wait(LIMIT).unwrap();
        assert!(killed.elapsed() < NOTICED, "{:?}: {}", killed.elapsed(), process.output());
    }
    assert!(client.output().contains("xwarpd is gone"), "the reason is named: {}", client.output());
    listening.wait_for("is gone: xwarpd has ended", NOTICED).unwrap();
    assert!(!programs().contains("xdp"), "{}", programs());
    // Another helper takes over the interface and the socket that the first one left.
    drop(shared);
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let _ = talking(&lab, &shared, 7000, "1");
}

#[test]
fn netns_shared_a_stopped_helper_sends_its_clients_the_reason() {
    let lab = lab();
    let mut shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let mut waiting = shared.start_unprivileged(PERF, &["send_bw", "-d", INTERFACE]).unwrap();
    waiting.wait_for("Waiting for a client", LIMIT).unwrap();
    shared.helper.signal(Signal::TERM).unwrap();
    assert!(shared.helper.wait(LIMIT).unwrap().success(), "{}", shared.helper.output());
    assert!(!waiting.wait(NOTICED).unwrap().success(), "{}", waiting.output());
    waiting.wait_for("the device on interface xw0 is gone: xwarpd was stopped", NOTICED).unwrap();
}
