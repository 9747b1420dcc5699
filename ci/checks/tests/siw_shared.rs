//! A process without privileges, behind `xwarpd`, and Linux Soft-iWARP, in both roles.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::env::temp_dir;

use xwarp_checks::{
    lab::{Family, INTERFACE},
    process::Running,
    shared::SharedInterface,
    vm::{Ending, Kernel, LONG, SHORT, Stage, built},
};

/// Port of rping.
const PORT: u16 = 7174;

/// Starts our rping as a user without privileges.
fn rping(shared: &SharedInterface, line: &str) -> Running {
    let program = built("examples/rping").unwrap();
    let words: Vec<_> = [INTERFACE].into_iter().chain(line.split_whitespace()).collect();
    shared.start_unprivileged(program.to_str().unwrap(), &words).unwrap()
}

#[test]
fn siw_talks_to_a_process_without_privileges() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let socket = temp_dir().join(format!("siw-shared-{}.sock", std::process::id()));
    let helper = built("xwarpd").unwrap();
    let shared =
        SharedInterface::start_by(socket, &[INTERFACE], |args| stage.near.start(&helper, args)).unwrap();
    let cases = [(Family::V4, 64), (Family::V6, 4001), (Family::V4, 65535)];
    let record = stage.judged(Ending::Orderly, || {
        for (family, size) in cases {
            let theirs = stage.vm.address(family);
            let mut server = stage.serve(&format!("rping -s -v -a {theirs} -S {size}"), PORT).unwrap();
            let line = format!("-c -a {theirs} -S {size} -C 5 --markers off");
            let said = rping(&shared, &line).finish(LONG).unwrap();
            assert!(said.contains(" rounds"), "{said}");
            assert_eq!(server.wait(SHORT).unwrap().status, Some(0), "{size}");

            let ours = stage.near.address(family);
            let mut server = rping(&shared, &format!("-s -a {ours} -S {size}"));
            server.wait_for("listening", SHORT).unwrap();
            let client = format!("rping -c -v -V -a {ours} -S {size} -C 5");
            let said = stage.vm.spawn(&client).unwrap().succeed(LONG).unwrap();
            assert_eq!(said.matches("ping data:").count(), 5, "{said}");
            server.finish(SHORT).unwrap();
        }
    });
    let record = record.unwrap();
    assert_eq!(record.connections.len(), 2 * cases.len());
    assert!(record.connections.iter().all(|c| c.revision == 2 && c.terminates == 0));
    assert!(record.verdict.good_crcs > 50, "{:?}", record.verdict);
}
