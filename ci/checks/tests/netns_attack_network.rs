//! What happens to the host's network beside clients of `xwarpd`: storms of routes, thousands of addresses, an address that comes
//! back, an interface that goes and comes back. Nothing of it ends a client that has no part in it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fmt::Write as _,
    fs, thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    let lab = Lab::up(LabOptions::default()).unwrap();
    lab.run(Side::A, "ip", &["link", "set", "dev", "lo", "up"]).unwrap();
    lab
}

fn ip(lab: &Lab, command: &str) {
    lab.run(Side::A, "ip", &command.split_whitespace().collect::<Vec<_>>()).unwrap();
}

fn batch(lab: &Lab, text: &str) {
    let file = lab.file("batch");
    fs::write(&file, text).unwrap();
    lab.run(Side::A, "ip", &["-batch", file.to_str().unwrap()]).unwrap();
}

/// A server and a client that exchange messages until they are killed.
fn talking(lab: &Lab, shared: &SharedInterface, port: u16) -> [Running; 2] {
    let address = format!("{}:{port}", lab.address(Side::A, Family::V4));
    let server = shared.serve(NOBODYS, &address, "1").unwrap();
    let mut client = shared.start_unprivileged(NOBODYS, &["talk", &address, "0"]).unwrap();
    client.wait_for("talks", LIMIT).unwrap();
    [server, client]
}

fn go_on(programs: &mut [Running]) {
    for program in programs {
        assert!(program.wait(Duration::from_secs(1)).is_err(), "it has ended: {}", program.output());
    }
}

/// Routes of other interfaces, by the thousands, are nothing to clients.
#[test]
fn netns_attack_a_storm_of_routes_ends_no_device() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let mut idle = shared.start_unprivileged(NOBODYS, &["watch"]).unwrap();
    idle.wait_for("watches", LIMIT).unwrap();
    let mut talking = talking(&lab, &shared, 7000);
    let mut text = String::new();
    for command in ["add", "del"] {
        for number in 0..8000 {
            writeln!(text, "route {command} 10.{}.{}.0/24 dev lo", 100 + number / 250, number % 250).unwrap();
        }
        for number in 0..500 {
            let (high, low) = (150 + number / 250, number % 250);
            writeln!(text, "route {command} 10.{high}.{low}.0/24 via 10.77.0.2 dev {INTERFACE}").unwrap();
        }
    }
    batch(&lab, &text);
    go_on(&mut talking);
    go_on(&mut [idle]);
}

/// An interface with 5000 addresses can be shared, its clients know all of them, and answers do not take longer.
#[test]
fn netns_attack_thousands_of_addresses_end_no_device() {
    let lab = lab();
    let mut text = String::new();
    for number in 0..5000 {
        writeln!(text, "address add 10.78.{}.{}/32 dev {INTERFACE}", number / 250, 1 + number % 250).unwrap();
    }
    batch(&lab, &text);
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let mut programs = talking(&lab, &shared, 7000);
    // One of the last addresses, which no message names at the start.
    let server = shared.serve(NOBODYS, "10.78.19.250:7001", "1").unwrap();
    shared.start_unprivileged(NOBODYS, &["talk", "10.78.19.250:7001", "20"]).unwrap().finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    go_on(&mut programs);
}

#[test]
fn netns_attack_an_address_that_comes_back_ends_no_connection_of_clients() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &["--address-limit", "3"]).unwrap();
    let mut talking = talking(&lab, &shared, 7000);
    let address = lab.address(Side::A, Family::V4);
    ip(&lab, &format!("address del {address}/24 dev {INTERFACE}"));
    thread::sleep(Duration::from_secs(1));
    ip(&lab, &format!("address add {address}/24 dev {INTERFACE}"));
    ip(&lab, &format!("address add {address}/25 dev {INTERFACE}"));
    ip(&lab, &format!("address del {address}/25 dev {INTERFACE}"));
    // Longer than a missing address is tolerated.
    thread::sleep(Duration::from_secs(4));
    go_on(&mut talking);
}

/// An interface that is removed is said, opens are refused with the reason, and it is taken again when it comes back.
#[test]
fn netns_attack_a_removed_interface_is_taken_again_when_it_comes_back() {
    let lab = lab();
    let mut shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "0"]).unwrap();
    let mut idle = shared.start_unprivileged(NOBODYS, &["watch"]).unwrap();
    idle.wait_for("watches", LIMIT).unwrap();
    ip(&lab, &format!("link del {INTERFACE}"));
    idle.wait_for("LinkRemoved", LIMIT).unwrap();
    shared.helper.wait_for("the interface was removed", LIMIT).unwrap();
    let mut late = shared.start_unprivileged(NOBODYS, &["watch"]).unwrap();
    late.wait_for("xw0 was removed from the host", LIMIT).unwrap();
    ip(&lab, &format!("link add {INTERFACE} type veth peer name other"));
    ip(&lab, "link set other up");
    ip(&lab, &format!("link set {INTERFACE} up"));
    ip(&lab, &format!("address add 10.77.0.1/24 dev {INTERFACE}"));
    let end = Instant::now() + LIMIT;
    let address = "10.77.0.1:7000";
    loop {
        let mut server = shared.start_unprivileged(NOBODYS, &["serve", address, "1"]).unwrap();
        if server.wait_for("listens", LIMIT).is_ok() {
            shared.start_unprivileged(NOBODYS, &["talk", address, "20"]).unwrap().finish(LIMIT).unwrap();
            server.finish(LIMIT).unwrap();
            return;
        }
        assert!(Instant::now() < end, "{}\n{}", server.output(), shared.helper.output());
        thread::sleep(Duration::from_millis(200));
    }
}
