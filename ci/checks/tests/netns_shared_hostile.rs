//! Hostile clients of `xwarpd`, and the limits of one user: each gets a clear refusal and nothing beyond its own.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{collections::BTreeMap, net::TcpListener, time::Duration};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    leaks,
    process::Running,
    shared::{NOBODY, SharedInterface},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// Descriptors of the helper by kind.
fn descriptors(shared: &SharedInterface) -> BTreeMap<String, usize> {
    leaks::descriptors(shared.helper.id()).unwrap()
}

/// Waits until the helper has the descriptors that it had before its clients came.
fn settles(shared: &SharedInterface, before: &BTreeMap<String, usize>) {
    leaks::settle(|| descriptors(shared), before, Duration::from_secs(10)).unwrap();
}

/// Runs a program of a client without privileges to its successful end.
fn run(shared: &SharedInterface, args: &[&str]) -> String {
    shared.start_unprivileged(NOBODYS, args).unwrap().finish(LIMIT).unwrap()
}

/// Two clients exchange messages, which the helper must still make possible.
fn works(lab: &Lab, shared: &SharedInterface) {
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let server = shared.serve(NOBODYS, &address, "1").unwrap();
    run(shared, &["talk", &address, "20"]);
    server.finish(LIMIT).unwrap();
}

#[test]
fn netns_shared_wrong_messages_are_refused_and_leave_nothing() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "0"]).unwrap();
    let before = descriptors(&shared);
    println!("{}", run(&shared, &["messages"]));
    println!("{}", run(&shared, &["socket"]));
    settles(&shared, &before);
    works(&lab, &shared);
}

/// TCP segments that the kernel of side B has received.
fn segments(lab: &Lab) -> u64 {
    let text = lab.run(Side::B, "cat", &["/proc/net/snmp"]).unwrap();
    let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let at = names.split_whitespace().position(|name| name == "InSegs").unwrap();
    values.split_whitespace().nth(at).unwrap().parse().unwrap()
}

#[test]
fn netns_shared_frames_from_foreign_sources_do_not_leave_the_host() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    // A listener on another port of the same client's host would not be reached either: nothing but the two own frames is.
    let _listener = lab.within(Side::B, || TcpListener::bind("10.77.0.2:9").unwrap()).unwrap();
    let before = segments(&lab);
    println!("{}", run(&shared, &["frames", "10.77.0.2"]));
    assert_eq!(segments(&lab) - before, 2, "the first and the last of nine frames are the client's");
}

/// A client that registers its own memory can have the kernel write a checksum to any place of a frame, also over the source
/// port. That happens before the switch looks at it, not behind it.
#[test]
fn netns_attack_no_checksum_is_written_over_a_port_behind_the_switch() {
    for from_clients in ["native", "generic"] {
        let lab = lab();
        let shared = SharedInterface::start(&lab, HELPER, &["--from-clients", from_clients]).unwrap();
        lab.run(Side::B, "ethtool", &["-K", INTERFACE, "gro", "on"]).unwrap();
        let before = segments(&lab);
        let mut command = shared.locking_as(NOBODY, NOBODYS);
        command.args(["metadata", "10.77.0.2"]);
        println!("{}", Running::start(command).unwrap().finish(LIMIT).unwrap());
        assert_eq!(segments(&lab) - before, 1, "{from_clients}: only the first frame has the client's port");
    }
}

/// A device counts while its socket is open, whatever else its client has closed: the memory that is registered to it is pinned.
#[test]
fn netns_attack_a_kept_socket_counts_until_it_is_closed() {
    let lab = lab();
    let few = ["--devices-per-user", "2", "--requests-per-second", "100000"];
    let shared = SharedInterface::start(&lab, HELPER, &few).unwrap();
    println!("{}", run(&shared, &["keep"]));
    works(&lab, &shared);
}

/// A process that may lock its frame memory registers it itself, on its own account, also where the helper could not do that.
#[test]
fn netns_shared_a_client_registers_its_own_memory() {
    let lab = lab();
    let without = ["--memlock=0", "setpriv", "--bounding-set=-ipc_lock", HELPER];
    let shared = SharedInterface::start_by(lab.file("xwarpd.sock"), &[INTERFACE], |args| {
        lab.start(Side::A, "prlimit", &[&without, args].concat())
    });
    let shared = shared.unwrap();
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let start = |args: &[&str]| {
        let mut command = shared.locking_as(NOBODY, NOBODYS);
        command.args(args);
        Running::start(command).unwrap()
    };
    let mut server = start(&["serve", &address, "1"]);
    server.wait_for("listens", LIMIT).unwrap();
    start(&["talk", &address, "20"]).finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    let mut client = shared.start_unprivileged(NOBODYS, &["talk", &address, "1"]).unwrap();
    client.wait_for("registering the frame memory", LIMIT).unwrap();
}

#[test]
fn netns_shared_a_flood_of_requests_waits_and_does_not_block_others() {
    let lab = lab();
    let shared =
        SharedInterface::start(&lab, HELPER, &["--quarantine", "0", "--requests-per-second", "200"]).unwrap();
    let before = descriptors(&shared);
    let mut command = shared.unprivileged_as(NOBODY - 1, NOBODYS);
    command.args(["flood", "200"]);
    let flood = Running::start(command).unwrap();
    works(&lab, &shared);
    println!("{}", flood.finish(LIMIT).unwrap());
    settles(&shared, &before);
}

/// Sockets whose closing takes an hour, which a client leaves to the helper, delay only their own user.
#[test]
fn netns_shared_slow_closes_of_descriptors_do_not_block_other_clients() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "0"]).unwrap();
    let before = descriptors(&shared);
    for way in ["requests", "unread", "early"] {
        // In a namespace with a loopback, and else without anything.
        let mut command = lab.command(Side::B, "setpriv");
        let user = (NOBODY - 1).to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"]);
        command.args(["--inh-caps=-all", "--bounding-set=-all", NOBODYS, "linger", way]);
        command.env("XWARP_HELPER", shared.socket());
        let mut hostile = Running::start(command).unwrap();
        hostile.wait_for("passed", LIMIT).unwrap();
        works(&lab, &shared);
        hostile.signal(Signal::KILL).unwrap();
        hostile.wait(LIMIT).unwrap();
        settles(&shared, &before);
    }
}

/// A user who connects repeatedly has one rate limit, and cannot have more devices in the kernel than its limit by
/// leaving before they are removed.
#[test]
fn netns_shared_reconnecting_evades_no_limit() {
    let lab = lab();
    let slow = ["--quarantine", "0", "--requests-per-second", "20"];
    let shared = SharedInterface::start(&lab, HELPER, &slow).unwrap();
    println!("{}", run(&shared, &["hurry", "20"]));
    drop(shared);
    let few = ["--quarantine", "0", "--devices-per-user", "2", "--requests-per-second", "100000"];
    let shared = SharedInterface::start(&lab, HELPER, &few).unwrap();
    let before = descriptors(&shared);
    let mut command = shared.unprivileged_as(NOBODY - 1, NOBODYS);
    command.arg("churn");
    println!("{}", Running::start(command).unwrap().finish(LIMIT).unwrap());
    works(&lab, &shared);
    settles(&shared, &before);
}

#[test]
fn netns_shared_each_user_has_limits_with_reasons() {
    let lab = lab();
    let options = ["--devices-per-user", "2", "--memory-per-user", "10", "--ports-per-user", "5"];
    let shared = SharedInterface::start(&lab, HELPER, &options).unwrap();
    run(&shared, &["ports", "5"]);
    let address = lab.address(Side::A, Family::V4).to_string();
    let serve = |uid, port: &str| {
        let mut command = shared.unprivileged_as(uid, NOBODYS);
        command.args(["serve", &format!("{address}:{port}"), "1"]);
        Running::start(command).unwrap()
    };
    let mut first = serve(NOBODY, "7001");
    first.wait_for("listens", LIMIT).unwrap();
    let peer = env!("CARGO_BIN_EXE_xwarp-peer");
    // 6 MiB beside 2 MiB, and 6 MiB more are too many.
    let mut second = shared.start_unprivileged(peer, &["send_bw", "-d", INTERFACE]).unwrap();
    second.wait_for("Waiting for a client", LIMIT).unwrap();
    drop(first);
    let mut big = shared.start_unprivileged(peer, &["send_bw", "-d", INTERFACE]).unwrap();
    big.wait_for("KiB of frame memory: this user has 6144 of 10240 KiB already", LIMIT).unwrap();
    let mut third = serve(NOBODY, "7002");
    third.wait_for("listens", LIMIT).unwrap();
    let mut fourth = serve(NOBODY, "7003");
    fourth.wait_for("this user has 2 devices already", LIMIT).unwrap();
    assert!(!fourth.wait(LIMIT).unwrap().success());
    let mut other = serve(NOBODY - 1, "7004");
    other.wait_for("listens", LIMIT).unwrap();
}
