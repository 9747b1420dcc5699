//! Processes without privileges that share one interface through `xwarpd`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::Shared,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

fn listens(server: &mut Running) {
    server.wait_for("Waiting for a client", Duration::from_secs(30)).unwrap();
}

/// A client and a server of `test`, each started by the given function, that exchange verified messages.
fn exchange(
    test: &str,
    options: &str,
    address: &str,
    server: impl Fn(&[&str]) -> Running,
    client: impl Fn(&[&str]) -> Running,
) {
    let mut args = vec![test, "-d", INTERFACE, "--verify"];
    args.extend(options.split_whitespace());
    let mut server = server(&args);
    listens(&mut server);
    args.push(address);
    let client = client(&args);
    if let Err(error) = client.finish(LIMIT) {
        let _ = server.wait(Duration::from_secs(5));
        panic!("{error:#}\nserver:\n{}", server.output());
    }
    server.finish(LIMIT).unwrap();
}

#[test]
fn netns_a_process_without_privileges_talks_to_a_peer_on_the_wire() {
    let lab = lab();
    let shared = Shared::start(&lab, HELPER, &[]).unwrap();
    let nobody = |args: &[&str]| shared.start_unprivileged(PERF, args).unwrap();
    let peer = |args: &[&str]| lab.start(Side::B, PERF, args).unwrap();
    for family in [Family::V4, Family::V6] {
        let [a, b] = [Side::A, Side::B].map(|side| lab.address(side, family).to_string());
        exchange("send_bw", "-n 200 -s 20000", &b, peer, nobody);
        exchange("write_lat", "-n 200 -s 3000", &a, nobody, peer);
    }
}

#[test]
fn netns_two_processes_of_one_host_talk_without_privileges() {
    let lab = lab();
    let shared = Shared::start(&lab, HELPER, &[]).unwrap();
    let nobody = |args: &[&str]| shared.start_unprivileged(PERF, args).unwrap();
    for family in [Family::V4, Family::V6] {
        let here = lab.address(Side::A, family).to_string();
        exchange("read_bw", "-n 200 -s 20000", &here, nobody, nobody);
    }
}
