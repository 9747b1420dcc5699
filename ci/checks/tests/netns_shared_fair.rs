//! Clients of `xwarpd` that flood, and clients that read nothing: the others exchange messages, each verified byte for byte.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{fmt::Write as _, fs, time::Duration};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::{NOBODY, SharedInterface},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// Address of side A with this port.
fn here(lab: &Lab, port: u16) -> String {
    format!("{}:{port}", lab.address(Side::A, Family::V4))
}

/// Starts a program of another user than the honest ones.
fn hostile(shared: &SharedInterface, args: &[&str]) -> Running {
    let mut command = shared.unprivileged_as(NOBODY - 1, NOBODYS);
    command.args(args);
    Running::start(command).unwrap()
}

/// Two clients exchange messages, and a client exchanges messages with a peer on the wire.
fn works(lab: &Lab, shared: &SharedInterface, port: u16) {
    let address = here(lab, port);
    let server = shared.serve(NOBODYS, &address, "1").unwrap();
    shared.start_unprivileged(NOBODYS, &["talk", &address, "30"]).unwrap().finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    let args = ["send_bw", "-d", INTERFACE, "--verify", "-n", "100", "-s", "20000"];
    let mut peer = lab.start(Side::B, PERF, &args).unwrap();
    peer.wait_for("Waiting for a client", LIMIT).unwrap();
    let to = lab.address(Side::B, Family::V4).to_string();
    let client = shared.start_unprivileged(PERF, &[&args[..], &[&to]].concat()).unwrap();
    client.finish(LIMIT).unwrap();
    peer.finish(LIMIT).unwrap();
}

/// A client sends frames without pause to a port without an owner, to the wire, and to the server that others use.
#[test]
fn netns_shared_a_flooding_client_does_not_block_others() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let wire = format!("{}:9", lab.address(Side::B, Family::V4));
    for target in [here(&lab, 9), wire, here(&lab, 7000)] {
        let mut flood = hostile(&shared, &["blast", &target]);
        flood.wait_for("blasts", LIMIT).unwrap();
        works(&lab, &shared, 7000);
        flood.signal(Signal::KILL).unwrap();
        assert!(!flood.wait(LIMIT).unwrap().success(), "the flood lasted: {}", flood.output());
    }
}

/// A stopped process reads neither frames nor events while its peer sends to it.
#[test]
fn netns_shared_a_client_that_reads_no_frames_does_not_block_others() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let stopped = shared.serve(NOBODYS, &here(&lab, 7001), "1").unwrap();
    let mut sender = shared.start_unprivileged(NOBODYS, &["talk", &here(&lab, 7001), "0"]).unwrap();
    sender.wait_for("talks", LIMIT).unwrap();
    stopped.signal(Signal::STOP).unwrap();
    // Frames of a hostile client fill its own rings, too.
    let mut flood = hostile(&shared, &["blast", &here(&lab, 7001)]);
    flood.wait_for("blasts", LIMIT).unwrap();
    works(&lab, &shared, 7000);
    flood.signal(Signal::KILL).unwrap();
    flood.wait(LIMIT).unwrap();
    stopped.signal(Signal::CONT).unwrap();
    works(&lab, &shared, 7002);
    assert!(sender.wait(Duration::from_secs(1)).is_err(), "it has ended: {}", sender.output());
}

/// A client that reads late is not disconnected for the changes of others, and gets the latest state.
#[test]
fn netns_shared_a_client_that_reads_no_events_keeps_its_device() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let mut deaf = hostile(&shared, &["deaf"]);
    deaf.wait_for("deaf", LIMIT).unwrap();
    let mut stopped = shared.start_unprivileged(NOBODYS, &["watch"]).unwrap();
    stopped.wait_for("watches", LIMIT).unwrap();
    stopped.signal(Signal::STOP).unwrap();
    let mut batch = String::new();
    for host in 1..=200 {
        writeln!(batch, "address add 10.77.9.{host}/24 dev {INTERFACE}").unwrap();
        writeln!(batch, "link set {INTERFACE} mtu {}", 1300 + host).unwrap();
        writeln!(batch, "route add 10.99.{host}.0/24 via 10.77.0.2 dev {INTERFACE}").unwrap();
        writeln!(batch, "route del 10.99.{host}.0/24").unwrap();
    }
    let file = lab.file("changes");
    fs::write(&file, batch).unwrap();
    lab.run(Side::A, "ip", &["-batch", file.to_str().unwrap()]).unwrap();
    works(&lab, &shared, 7000);
    stopped.signal(Signal::CONT).unwrap();
    stopped.wait_for("AddressAdded(10.77.9.200)", LIMIT).unwrap();
    stopped.wait_for("Mtu(1500)", LIMIT).unwrap();
    assert!(stopped.wait(Duration::from_secs(1)).is_err(), "it has ended: {}", stopped.output());
    assert!(deaf.wait_for("hung up", Duration::from_secs(1)).is_err(), "{}", deaf.output());
}
