//! Processes without privileges that share one interface through `xwarpd`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs,
    net::SocketAddr,
    time::{Duration, Instant},
};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
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
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
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
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let nobody = |args: &[&str]| shared.start_unprivileged(PERF, args).unwrap();
    for family in [Family::V4, Family::V6] {
        let here = lab.address(Side::A, family).to_string();
        exchange("read_bw", "-n 200 -s 20000", &here, nobody, nobody);
    }
    // The usual names of the own host lead to the server, too.
    for localhost in ["localhost", "127.0.0.1", "::1"] {
        exchange("send_bw", "-n 50", localhost, nobody, nobody);
    }
}

#[test]
fn netns_shared_a_port_of_this_host_without_owner_refuses_at_once() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    for family in [Family::V4, Family::V6] {
        let address = SocketAddr::new(lab.address(Side::A, family), 7777).to_string();
        let begin = Instant::now();
        let mut client = shared.start_unprivileged(NOBODYS, &["talk", &address, "1"]).unwrap();
        client.wait_for("refused", LIMIT).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }
}

#[test]
fn netns_shared_the_socket_may_come_from_the_service_manager() {
    let lab = lab();
    let shared = SharedInterface::activated(&lab, HELPER).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), 7777).to_string();
    let server = shared.serve(NOBODYS, &address, "1").unwrap();
    shared.start_unprivileged(NOBODYS, &["talk", &address, "10"]).unwrap().finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
}

/// The capabilities that the log names are those that the helper has, in each of its threads.
#[test]
fn netns_shared_the_helper_keeps_the_capabilities_that_it_names() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let named = shared.helper.output();
    let named = named.lines().find(|line| line.contains("capabilities")).unwrap();
    let threads = fs::read_dir(format!("/proc/{}/task", shared.helper.id())).unwrap();
    for thread in threads.flatten() {
        let status = fs::read_to_string(thread.path().join("status")).unwrap();
        let permitted = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
        let permitted = u64::from_str_radix(permitted.trim(), 16).unwrap();
        // Numbers of linux/capability.h.
        let numbers =
            [(10, "NET_BIND_SERVICE"), (12, "NET_ADMIN"), (13, "NET_RAW"), (14, "IPC_LOCK"), (39, "BPF")];
        let comm = fs::read_to_string(thread.path().join("comm")).unwrap();
        let expected: u64 = numbers.iter().map(|(number, _)| 1 << number).sum();
        let expected = match comm.trim() {
            // It writes the log.
            "xwarpd-log" => 0,
            // It makes pairs, and enters the network namespaces of clients (CAP_SYS_ADMIN, 21).
            "xwarpd-pairs" => expected | 1 << 21,
            _ => expected,
        };
        assert_eq!(permitted, expected, "{comm}");
        assert!(numbers.iter().all(|(_, name)| named.contains(&format!("CAP_{name}"))), "{named}");
        assert!(named.contains("CAP_SYS_ADMIN of the thread that makes pairs"), "{named}");
        assert_eq!(named.matches("CAP_").count(), numbers.len() + 1, "{named}");
    }
}

#[test]
fn netns_shared_changes_of_the_interface_reach_clients() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &["--address-limit", "1"]).unwrap();
    let run = |args: &[&str]| lab.run(Side::A, "ip", args).unwrap();
    let nobody = || {
        let mut watcher = shared.start_unprivileged(NOBODYS, &["watch"]).unwrap();
        watcher.wait_for("watches", LIMIT).unwrap();
        watcher
    };
    let mut watcher = nobody();
    run(&["address", "add", "10.77.0.50/24", "dev", INTERFACE]);
    watcher.wait_for("AddressAdded(10.77.0.50)", LIMIT).unwrap();
    run(&["address", "del", "10.77.0.50/24", "dev", INTERFACE]);
    watcher.wait_for("AddressRemoved(10.77.0.50)", LIMIT).unwrap();
    run(&["link", "set", "dev", INTERFACE, "mtu", "1400"]);
    watcher.wait_for("Mtu(1400)", LIMIT).unwrap();
    lab.run(Side::B, "ip", &["link", "set", "dev", INTERFACE, "down"]).unwrap();
    watcher.wait_for("LinkState { up: false }", LIMIT).unwrap();
    lab.run(Side::B, "ip", &["link", "set", "dev", INTERFACE, "up"]).unwrap();
    watcher.wait_for("LinkState { up: true }", LIMIT).unwrap();
    run(&["link", "delete", INTERFACE]);
    watcher.wait_for("LinkRemoved", LIMIT).unwrap();
}
