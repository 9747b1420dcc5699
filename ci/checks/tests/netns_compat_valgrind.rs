//! The drop-in libraries under valgrind (memcheck), which must find no error.
//!
//! The copies of registered memory that is gone are the only reads and writes of memory that is not the program's: they are meant to
//! fault (`tests/compat/valgrind.supp`). Two cases are left out: that of
//! the program's own handlers, in which the program faults itself, and that of freed memory, which valgrind's `free` does not unmap.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{path::Path, time::Duration};

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    unmodified::{compiled, start},
};

/// Time limit of one program, which takes about twenty times as long as without valgrind.
const LIMIT: Duration = Duration::from_mins(5);

/// `line` under valgrind. Status 9 reports an error.
fn checked(line: &str) -> String {
    let suppressions = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compat/valgrind.supp");
    let options = "--quiet --error-exitcode=9 --fair-sched=yes";
    format!("valgrind {options} --suppressions={} {line}", suppressions.display())
}

/// Runs cases of a program of `tests/compat` at both ends.
fn cases(program: &str, names: &[&str]) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program =
        compiled(&lab, program, &["-g", "-DLIMIT_MS=200000", "-libverbs", "-lrdmacm", "-pthread"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    for name in names {
        let mut server = start(&lab, Side::B, &checked(&format!("{program} {name}"))).unwrap();
        server.wait_for("listening", LIMIT).unwrap();
        let client = start(&lab, Side::A, &checked(&format!("{program} {name} {address}"))).unwrap();
        let [client, server] = [client.finish(LIMIT), server.finish(LIMIT)];
        let done = |said: &anyhow::Result<String>| said.as_ref().is_ok_and(|said| said.contains("done"));
        assert!(done(&client) && done(&server), "{name}: client: {client:?}\nserver: {server:?}");
    }
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_compat_valgrind_finds_nothing_in_random_calls() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "model", &["-g", "-libverbs", "-pthread"]).unwrap();
    for run in ["1 4000", "2 4000", "9 4000 watched", "10 4000 two"] {
        let said =
            start(&lab, Side::A, &checked(&format!("{program} {run}"))).unwrap().finish(LIMIT).unwrap();
        assert!(said.contains("4000 calls as modelled"), "{run}: {said}");
    }
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_compat_valgrind_finds_nothing_in_threads() {
    cases("threads", &["batches", "polls", "domains", "channel", "answered"]);
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_compat_valgrind_finds_nothing_but_the_faults_of_peers_in_memory_that_is_gone() {
    let names = ["write-munmap", "write-none", "read-munmap", "read-truncate", "send-none", "atomic-munmap"];
    cases("memory", &names);
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_compat_valgrind_finds_nothing_but_the_own_faults_in_memory_that_is_gone() {
    cases("memory", &["local-send-munmap", "local-write-none", "local-read-none"]);
}
