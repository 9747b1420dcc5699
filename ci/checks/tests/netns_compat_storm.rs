//! Many connections of one program over the drop-in libraries: on an interface of its own, and through `xwarpd`, whose limits are for users
//! who harm others.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
    unmodified::{LIMIT, compiled, run, start, start_shared},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
/// Connections that are started before one is established.
const BURST: u32 = 200;
/// Refused attempts: before 42fa024, xwarpd refused a user's requests from about the 220th connection of a second on.
const ATTEMPTS: u32 = 600;

fn lab() -> (Lab, String) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "storm", &["-libverbs", "-lrdmacm"]).unwrap();
    (lab, program)
}

/// A server on side B accepts the connections that `client` starts from side A.
fn burst(lab: &Lab, program: &str, client: impl Fn(&str) -> Running) {
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(lab, Side::B, &format!("{program} serve {BURST}")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = client(&format!("{program} burst {address} {BURST}"));
    let said = [client.finish(LIMIT), server.finish(LIMIT)];
    assert!(said.iter().all(|said| said.as_ref().is_ok_and(|said| said.contains("done"))), "{said:?}");
}

#[test]
fn netns_compat_storm_of_connections_is_established() {
    let (lab, program) = lab();
    burst(&lab, &program, |line| start(&lab, Side::A, line).unwrap());
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    burst(&lab, &program, |line| start_shared(&lab, &shared, line).unwrap());
}

/// A failed attempt gives back at once what it held: otherwise ports, queue pairs or requests would run out.
#[test]
fn netns_compat_storm_of_attempts_is_refused_by_the_peer_only() {
    let (lab, program) = lab();
    let line = format!("{program} refused {} {ATTEMPTS}", lab.address(Side::B, Family::V4));
    run(&lab, Side::A, &line).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    start_shared(&lab, &shared, &line).unwrap().finish(LIMIT).unwrap();
}

/// An error number says neither which limit a user has reached, nor who sets it.
#[test]
fn netns_compat_storm_beyond_a_limit_of_the_helper_is_explained_once() {
    let (lab, program) = lab();
    let shared = SharedInterface::start(&lab, HELPER, &["--ports-per-user", "5"]).unwrap();
    let line = format!("{program} ports {} 9", lab.address(Side::A, Family::V4));
    let said = start_shared(&lab, &shared, &line).unwrap().finish(LIMIT).unwrap();
    assert!(said.contains("4 without a port"), "{said}");
    let words = "xwarp: this user has 5 ports already (--ports-per-user of xwarpd)";
    assert_eq!(said.matches(words).count(), 1, "{said}");
}
