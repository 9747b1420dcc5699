//! Access to `xwarpd`, controlled by the mode and the group of its socket.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    time::Duration,
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::{NOBODY, SharedInterface},
    vm::built,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);
/// A group without a name.
const GROUP: u32 = 64321;

#[test]
fn netns_shared_a_user_outside_the_group_gets_in_nowhere() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let group = GROUP.to_string();
    let mut shared = SharedInterface::start(&lab, HELPER, &["--group", &group]).unwrap();
    let socket = fs::metadata(shared.socket()).unwrap();
    assert_eq!((socket.permissions().mode() & 0o777, socket.uid(), socket.gid()), (0o660, 0, GROUP));
    let start = |groups: &str, program: &str, args: &[&str]| {
        let mut command = shared.unprivileged_in(groups, NOBODY, program);
        command.args(args);
        Running::start(command).unwrap()
    };
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), 7000).to_string();

    let why = format!(
        "this user may not use xwarpd at {}: membership in group {GROUP} is needed (usermod -aG {GROUP} USER, then a new login)",
        shared.socket().display()
    );
    for outside in ["--clear-groups", "--groups=64320"] {
        // A program that insists on the helper, one that does not, and one that uses no library at all.
        for (program, args, error) in [
            (NOBODYS, &["serve", &address, "1"][..], &*why),
            (PERF, &["send_bw", "-d", INTERFACE], &why),
            (NOBODYS, &["messages"], "Permission denied"),
        ] {
            let mut refused = start(outside, program, args);
            refused.wait_for(error, LIMIT).unwrap();
            assert!(!refused.wait(LIMIT).unwrap().success(), "{}", refused.output());
        }
        let mut doctor = start(outside, built("xwarp").unwrap().to_str().unwrap(), &["doctor", INTERFACE]);
        doctor.wait_for(&why, LIMIT).unwrap();
    }

    let member = format!("--groups={GROUP}");
    let mut server = start(&member, NOBODYS, &["serve", &address, "1"]);
    server.wait_for("listens", LIMIT).unwrap();
    start(&member, NOBODYS, &["talk", &address, "10"]).finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    // The helper has seen only these two.
    shared.helper.signal(Signal::TERM).unwrap();
    assert!(shared.helper.wait(LIMIT).unwrap().success());
    let log = shared.helper.output();
    assert_eq!(
        (log.matches("opened a device").count(), log.matches("a client has disconnected").count()),
        (2, 2),
        "{log}"
    );
}
