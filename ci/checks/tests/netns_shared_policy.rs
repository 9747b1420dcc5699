//! What the administrator of `xwarpd` allows its clients: peers by prefix, and a rate.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::{Duration, Instant};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);

/// How many frames the switch counted by an outcome.
fn frames(shared: &SharedInterface, outcome: &str) -> u64 {
    let (report, _) = shared.xwarp(&["stat", "--json"]).unwrap();
    report["shared"][0]["frames"][outcome].as_u64().unwrap()
}

/// A client sends `messages` messages of 20000 bytes to a peer on the wire; returns how long that took.
fn sends(lab: &Lab, shared: &SharedInterface, family: Family, messages: u32) -> Duration {
    let messages = messages.to_string();
    let args = ["send_bw", "-d", INTERFACE, "--verify", "-n", &messages, "-s", "20000"];
    let mut peer = lab.start(Side::B, PERF, &args).unwrap();
    peer.wait_for("Waiting for a client", LIMIT).unwrap();
    let to = lab.address(Side::B, family).to_string();
    let begin = Instant::now();
    shared.start_unprivileged(PERF, &[&args[..], &[&to]].concat()).unwrap().finish(LIMIT).unwrap();
    let took = begin.elapsed();
    peer.finish(LIMIT).unwrap();
    took
}

/// Clients of one host talk to each other.
fn talk(lab: &Lab, shared: &SharedInterface) {
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let server = shared.serve(NOBODYS, &address, "1").unwrap();
    shared.start_unprivileged(NOBODYS, &["talk", &address, "20"]).unwrap().finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
}

#[test]
fn netns_shared_clients_reach_only_the_peers_that_are_allowed() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let [v4, v6] = [Family::V4, Family::V6].map(|family| lab.address(Side::B, family).to_string());
    let shared = SharedInterface::start(&lab, HELPER, &["--peers", "192.0.2.0/24,2001:db8::/32"]).unwrap();
    for (peer, port) in [(&v4, format!("{v4}:9")), (&v6, format!("[{v6}]:9"))] {
        let mut refused = shared.start_unprivileged(NOBODYS, &["talk", &port, "1"]).unwrap();
        refused.wait_for("the administrator allows no connection", LIMIT).unwrap_or_else(|error| {
            panic!("{peer}: {error}: {}", refused.output());
        });
    }
    // A peer that is not allowed gets no answer: neither a connection nor a reset.
    let server = shared.serve(NOBODYS, &format!("{}:7001", lab.address(Side::A, Family::V4)), "1").unwrap();
    let before = frames(&shared, "to_wire");
    let to = lab.address(Side::A, Family::V4).to_string();
    let mut stranger = lab.command(Side::B, "nc");
    let stranger = stranger.args(["-z", "-w", "2", &to, "7001"]).output().unwrap();
    assert!(!stranger.status.success(), "{stranger:?}");
    assert!(frames(&shared, "dropped_peer") > 0);
    assert_eq!(frames(&shared, "to_wire"), before);
    drop(server);
    talk(&lab, &shared);
    drop(shared);

    let allowed = [&*v4, "fd00::/8"].join(",");
    let shared = SharedInterface::start(&lab, HELPER, &["--peers", &allowed]).unwrap();
    for family in [Family::V4, Family::V6] {
        sends(&lab, &shared, family, 50);
    }
    assert_eq!(frames(&shared, "dropped_peer"), 0);
}

/// Ten megabytes at 40 Mbit/s take two seconds, less the burst; whatever is dropped is sent again, and clients of the host are not
/// slowed.
#[test]
fn netns_shared_a_client_sends_no_faster_than_its_rate() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &["--rate-per-client", "40"]).unwrap();
    let took = sends(&lab, &shared, Family::V4, 500);
    assert!(took > Duration::from_millis(1800), "10 MB at 40 Mbit/s took {took:?}");
    assert!(frames(&shared, "dropped_rate") > 0);
    talk(&lab, &shared);
}
