//! Hostile clients of `xwarpd` that send random requests and descriptors and die, with honest clients beside them: these are
//! answered, their bytes are right, and nothing of the others is left.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    lasting::Crowd,
    leaks,
    process::Running,
    shared::{NOBODY, SharedInterface},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);
/// Hostile users, each with two processes at a time.
const USERS: u32 = 3;

/// `seconds` of havoc. Answers that take longer than 10 s, the patience of clients, fail the test; the distribution is printed.
fn havoc(seconds: u64) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "0"]).unwrap();
    let helper = shared.helper.id();
    let count = || (leaks::descriptors(helper).unwrap(), leaks::threads(helper).unwrap());
    let before = count();
    let limit = Duration::from_secs(seconds) + LIMIT;
    let address = format!("{}:12345", lab.address(Side::A, Family::V4));
    let mut crowd = Crowd::start(&address, 2, |args| shared.start_unprivileged(NOBODYS, args)).unwrap();
    let time = seconds.to_string();
    let hostile = |number: u32| {
        let mut command = shared.unprivileged_as(NOBODY - 1 - number % USERS, NOBODYS);
        command.args(["deaths", &number.to_string(), &time]);
        Running::start(command).unwrap()
    };
    let mut hostiles: Vec<Running> = (0..2 * USERS).map(hostile).collect();
    for one in &mut hostiles {
        one.wait_for("begins", LIMIT).unwrap();
    }
    // A user of its own, whose rate the others do not use up.
    let mut honest = shared.unprivileged_as(NOBODY - 1 - USERS, NOBODYS);
    honest.args(["answers", &time]);
    println!("{}", Running::start(honest).unwrap().finish(limit).unwrap());
    for one in hostiles {
        println!("{}", one.finish(limit).unwrap());
    }
    // The connections that were there before go on: every byte of them is compared.
    crowd.goes_on().unwrap();
    drop(crowd);
    leaks::settle(count, &before, LIMIT).unwrap();
}

#[test]
fn netns_shared_havoc_of_hostile_clients_concerns_no_honest_one() {
    havoc(5);
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_shared_havoc_for_minutes_concerns_no_honest_one() {
    havoc(180);
}
