//! Kinds of interfaces that `xwarpd` shares, and how frames pass between them and clients.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{fs, net::SocketAddr, time::Duration};

use rustix::process::Signal;
use xwarp_checks::{
    foreign,
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    leaks,
    process::Running,
    shared::SharedInterface,
    vm::built,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);

/// The peer's frames, and those that it accepts, carry this tag.
#[test]
fn netns_shared_frames_of_clients_carry_a_tag() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let ways = [&["--vlan", "42"][..], &["--vlan", "42", "--generic"]];
    for options in ways {
        let shared = SharedInterface::start(&lab, HELPER, options).unwrap();
        let nobody = |args: &[&str]| shared.start_unprivileged(PERF, args).unwrap();
        let tagged = |args: &[&str]| lab.start(Side::B, PERF, &[args, &["--vlan", "42"]].concat()).unwrap();
        for family in [Family::V4, Family::V6] {
            let [here, there] = [Side::A, Side::B].map(|side| lab.address(side, family).to_string());
            exchange(INTERFACE, &here, nobody, nobody);
            exchange(INTERFACE, &there, tagged, nobody);
            exchange(INTERFACE, &here, nobody, tagged);
            // A port without owner: the reset has the tag, too.
            let nowhere = SocketAddr::new(lab.address(Side::A, family), 7777).to_string();
            let mut refused = shared.start_unprivileged(NOBODYS, &["talk", &nowhere, "1"]).unwrap();
            refused.wait_for("refused", LIMIT).unwrap();
        }
    }
}

/// The foreign program stays attached, and frames of clients are taken behind it. After the helper's death nothing of
/// this remains.
#[test]
fn netns_shared_frames_are_taken_behind_a_foreign_program() {
    for (mtu, mode) in [(1500, "xdpdrv"), (9000, "xdpgeneric")] {
        let lab = Lab::up(LabOptions { mtu, ..LabOptions::default() }).unwrap();
        let links = || lab.run(Side::A, "ip", &["-brief", "link"]).unwrap().lines().count();
        let before = links();
        let id = foreign::attach(&lab, mode).unwrap();
        let is_there = || foreign::attached(&lab).unwrap() == Some(id);
        let mut shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
        assert!(
            shared.helper.output().contains("tc behind another XDP program"),
            "{}",
            shared.helper.output()
        );
        for family in [Family::V4, Family::V6] {
            let [here, there] = [Side::A, Side::B].map(|side| lab.address(side, family).to_string());
            all_ways(&lab, &shared, INTERFACE, &here, &there);
        }
        // The kernel's own connections are as before.
        lab.run(Side::A, "ping", &["-qc1", "-W5", "10.77.0.2"]).unwrap();
        let stat =
            shared.unprivileged(built("xwarp").unwrap().to_str().unwrap()).arg("stat").output().unwrap();
        let stat = String::from_utf8(stat.stdout).unwrap();
        assert!(stat.contains("tc behind another XDP program, generic from clients"), "{stat}");
        assert!(is_there(), "the foreign program was replaced");
        shared.helper.signal(Signal::KILL).unwrap();
        shared.helper.wait(LIMIT).unwrap();
        leaks::settle(links, &before, LIMIT).unwrap();
        assert!(is_there(), "the foreign program is gone");
        drop(SharedInterface::start(&lab, HELPER, &[]).unwrap());
    }
}

/// Exchanges verified messages between a server that listens on `interface` with `address`, and a client on it.
fn exchange(
    interface: &str,
    address: &str,
    server: impl Fn(&[&str]) -> Running,
    client: impl Fn(&[&str]) -> Running,
) {
    let args = ["send_bw", "-d", interface, "--verify", "-n", "100", "-s", "20000"];
    let mut server = server(&args);
    server.wait_for("Waiting for a client", LIMIT).unwrap();
    client(&[&args[..], &[address]].concat()).finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
}

/// Exchanges messages between two clients, and between a client and a peer on the wire, in both directions.
fn all_ways(lab: &Lab, shared: &SharedInterface, interface: &str, here: &str, there: &str) {
    let nobody = |args: &[&str]| shared.start_unprivileged(PERF, args).unwrap();
    let peer = |args: &[&str]| lab.start(Side::B, PERF, args).unwrap();
    exchange(interface, here, nobody, nobody);
    exchange(interface, there, peer, nobody);
    exchange(interface, here, nobody, peer);
}

#[test]
fn netns_shared_several_interfaces_are_shared_by_name_and_by_address() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let there = lab.namespace(Side::B);
    let ip = |side, line: &str| lab.run(side, "ip", &line.split_whitespace().collect::<Vec<_>>()).unwrap();
    ip(Side::A, &format!("link add xw1 type veth peer name xw1 netns {there}"));
    for (side, host) in [(Side::A, 1), (Side::B, 2)] {
        ip(side, &format!("address add 10.79.0.{host}/24 dev xw1"));
        ip(side, "link set xw1 up");
    }
    let shared = SharedInterface::start_on(&lab, HELPER, &[INTERFACE, "xw1"]).unwrap();
    let [here, there] = [Side::A, Side::B].map(|side| lab.address(side, Family::V4).to_string());
    all_ways(&lab, &shared, INTERFACE, &here, &there);
    all_ways(&lab, &shared, "xw1", "10.79.0.1", "10.79.0.2");
    let nobody = |args: &[&str]| shared.start_unprivileged(PERF, args).unwrap();
    exchange("10.79.0.1", "10.79.0.1", nobody, nobody);
    // An interface that is not shared is refused.
    let mut stranger = nobody(&["send_bw", "-d", "xw2"]);
    stranger.wait_for("no interface \"xw2\"", LIMIT).unwrap();
}

/// Native redirection all the way: the peer's end of the wire has GRO, so that the interface takes redirected frames.
#[test]
fn netns_shared_native_redirection_carries_frames_of_one_and_of_several_buffers() {
    for mtu in [1500, 9000] {
        let lab = Lab::up(LabOptions { mtu, ..LabOptions::default() }).unwrap();
        lab.run(Side::B, "ethtool", &["-K", INTERFACE, "gro", "on"]).unwrap();
        let shared = SharedInterface::start(&lab, HELPER, &["--from-clients", "native"]).unwrap();
        // Colours may be between the words.
        assert!(shared.helper.output().contains("\"native\""), "{}", shared.helper.output());
        let [here, there] = [Side::A, Side::B].map(|side| lab.address(side, Family::V4).to_string());
        all_ways(&lab, &shared, INTERFACE, &here, &there);
    }
}

#[test]
fn netns_shared_frames_of_clients_may_be_processed_on_kernel_threads() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    lab.run(Side::B, "ethtool", &["-K", INTERFACE, "gro", "on"]).unwrap();
    let shared =
        SharedInterface::start(&lab, HELPER, &["--from-clients", "native", "--threaded-napi"]).unwrap();
    let mut server = shared.start_unprivileged(PERF, &["send_bw", "-d", INTERFACE, "-p", "7001"]).unwrap();
    server.wait_for("Waiting for a client", LIMIT).unwrap();
    let threads = fs::read_dir("/proc").unwrap().flatten();
    let names = threads.filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok());
    assert!(names.into_iter().any(|name| name.starts_with("napi/near1")), "no thread of the pair");
    let [here, there] = [Side::A, Side::B].map(|side| lab.address(side, Family::V4).to_string());
    all_ways(&lab, &shared, INTERFACE, &here, &there);
}
