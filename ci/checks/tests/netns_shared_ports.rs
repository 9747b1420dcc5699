//! Ports of clients of `xwarpd`: reserved in the kernel, and kept from other users after their release.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    process::Running,
    shared::{NOBODY, SharedInterface},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);
const MONITORS: &str = "127.0.0.1:9815";

/// A server of a user.
fn serve(shared: &SharedInterface, user: u32, address: SocketAddr) -> Running {
    let mut command = shared.unprivileged_as(user, NOBODYS);
    command.args(["serve", &address.to_string(), "1"]);
    Running::start(command).unwrap()
}

/// Whether a server of a user listens; otherwise the port is in use.
fn may_listen(shared: &SharedInterface, user: u32, address: SocketAddr) -> bool {
    let mut server = serve(shared, user, address);
    let listens = server.wait_for("listens", LIMIT).is_ok();
    assert!(listens || server.output().contains("in use"), "{}", server.output());
    server.signal(Signal::KILL).unwrap();
    server.wait(LIMIT).unwrap();
    listens
}

/// Ports in quarantine, from the helper's metrics.
fn quarantined(lab: &Lab) -> u64 {
    let ask = || {
        let mut stream = TcpStream::connect(MONITORS).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = lab.within(Side::A, ask).unwrap();
    let line = answer.lines().find_map(|line| line.strip_prefix("xwarpd_quarantined_ports "));
    line.unwrap().parse().unwrap()
}

fn until(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is() {
        assert!(Instant::now() < end, "{what}");
    }
}

#[test]
fn netns_shared_a_released_port_stays_with_its_user_and_container() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    lab.run(Side::A, "ip", &["link", "set", "dev", "lo", "up"]).unwrap();
    let shared =
        SharedInterface::start(&lab, HELPER, &["--quarantine", "3600", "--metrics", MONITORS]).unwrap();
    let (user, other) = (NOBODY, NOBODY - 1);
    let wildcard = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    for (port, host) in
        [(7000, lab.address(Side::A, Family::V4)), (7001, lab.address(Side::A, Family::V6)), (7002, wildcard)]
    {
        let address = SocketAddr::new(host, port);
        let before = quarantined(&lab);
        let kernel =
            || lab.within(Side::A, || TcpListener::bind(address).err().map(|error| error.kind())).unwrap();
        assert_eq!(kernel(), None, "nobody has it");
        let mut server = serve(&shared, user, address);
        server.wait_for("listens", LIMIT).unwrap();
        // Neither the kernel's TCP nor another client gets it, of whatever user.
        assert_eq!(kernel(), Some(ErrorKind::AddrInUse));
        assert!(!may_listen(&shared, other, address) && !may_listen(&shared, user, address));
        server.signal(Signal::KILL).unwrap();
        server.wait(LIMIT).unwrap();
        until("the port is not released", || quarantined(&lab) > before);
        assert_eq!(kernel(), Some(ErrorKind::AddrInUse));
        assert!(!may_listen(&shared, other, address), "another user takes the port over");
        // Peers of one container may still send to it.
        let mut elsewhere = shared.contained_as(user, NOBODYS);
        elsewhere.args(["serve", &address.to_string(), "1"]);
        let mut elsewhere = Running::start(elsewhere).unwrap();
        elsewhere.wait_for("in use", LIMIT).unwrap();
        elsewhere.wait(LIMIT).unwrap();
        assert!(may_listen(&shared, user, address), "the user does not get it back");
    }
}

#[test]
fn netns_shared_the_quarantine_of_a_port_ends() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "1"]).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), 7000);
    assert!(may_listen(&shared, NOBODY, address));
    until("the quarantine does not end", || may_listen(&shared, NOBODY - 1, address));
}

/// The helper reserves a port for a client although the kernel's TCP remembers a connection of it, but not while a program listens
/// there or has a connection from it.
#[test]
fn netns_shared_a_port_in_time_wait_can_be_bound() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "1"]).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), 7000);
    let listener = lab.within(Side::A, || TcpListener::bind(address)).unwrap().unwrap();
    let client = lab.within(Side::B, || TcpStream::connect_timeout(&address, LIMIT)).unwrap().unwrap();
    let (server, _) = listener.accept().unwrap();
    assert!(!may_listen(&shared, NOBODY, address), "beside a listener");
    drop(listener);
    assert!(!may_listen(&shared, NOBODY, address), "beside a connection");
    drop(server);
    client.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!((&client).read(&mut [0]).unwrap(), 0);
    drop(client);
    assert!(may_listen(&shared, NOBODY, address), "beside a connection in TIME-WAIT");
}
