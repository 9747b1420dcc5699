//! The drop-in libraries with registered memory that a program has unmapped, protected, truncated or freed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    unmodified::{LIMIT, compiled, start},
};

/// Runs cases of `tests/compat/memory.c` at both ends, one after the other.
fn cases(names: &[&str]) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "memory", &["-libverbs", "-lrdmacm", "-pthread"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    for name in names {
        let mut server = start(&lab, Side::B, &format!("{program} {name}")).unwrap();
        server.wait_for("listening", LIMIT).unwrap();
        let client = start(&lab, Side::A, &format!("{program} {name} {address}")).unwrap();
        let [client, server] = [client.finish(LIMIT), server.finish(LIMIT)];
        let done = |said: &anyhow::Result<String>| said.as_ref().is_ok_and(|said| said.contains("done"));
        assert!(done(&client) && done(&server), "{name}: client: {client:?}\nserver: {server:?}");
    }
}

#[test]
fn netns_compat_memory_that_is_gone_ends_the_writes_of_peers() {
    cases(&["write-munmap", "write-none", "write-readonly", "write-truncate"]);
}

#[test]
fn netns_compat_memory_that_is_gone_ends_the_reads_of_peers() {
    cases(&["read-munmap", "read-none", "read-readonly", "read-truncate"]);
}

#[test]
fn netns_compat_memory_that_is_gone_ends_the_sends_and_atomics_of_peers() {
    cases(&["send-munmap", "send-none", "send-readonly", "send-truncate"]);
    cases(&["atomic-munmap", "atomic-none", "atomic-readonly", "atomic-truncate"]);
}

#[test]
fn netns_compat_memory_that_is_gone_ends_the_own_requests() {
    cases(&["local-send-munmap", "local-send-truncate", "local-send-readonly"]);
    cases(&["local-write-none", "local-write-truncate", "local-read-none", "local-read-readonly"]);
}

#[test]
fn netns_compat_memory_may_be_freed_before_it_is_deregistered() {
    cases(&["free"]);
}

#[test]
fn netns_compat_memory_faults_of_the_program_go_to_its_own_handlers() {
    cases(&["handlers"]);
}
