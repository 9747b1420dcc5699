//! The connection manager of the drop-in libraries on several devices: listeners, addresses and options.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::net::TcpListener;

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    leaks,
    process::Running,
    unmodified::{LIMIT, compiled, start_over, start_with},
};

/// The second cable's interface in both namespaces.
const SECOND: &str = "xw1";
/// Port of the programs in `tests/compat`.
const PORT: u16 = 7250;
const DEVICES: [&str; 2] = [INTERFACE, SECOND];

/// A lab with a second cable.
fn lab() -> Lab {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let beyond = lab.namespace(Side::B);
    lab.run(
        Side::A,
        "ip",
        &["link", "add", SECOND, "type", "veth", "peer", "name", SECOND, "netns", &beyond],
    )
    .unwrap();
    for (side, host) in [(Side::A, 1), (Side::B, 2)] {
        for address in [format!("10.79.0.{host}/24"), format!("fd79::{host}/64")] {
            lab.run(side, "ip", &["addr", "add", &address, "dev", SECOND]).unwrap();
        }
        lab.run(side, "ip", &["link", "set", SECOND, "up"]).unwrap();
    }
    // The kernel reports the carrier of each end late.
    for side in [Side::A, Side::B] {
        let is_up = || lab.run(side, "ip", &["-o", "link", "show", SECOND]).unwrap().contains("state UP");
        leaks::settle(is_up, &true, LIMIT).unwrap();
    }
    lab
}

/// The addresses of side B: of the first cable, then of the second one.
fn beyond(lab: &Lab) -> [String; 4] {
    let first = [Family::V4, Family::V6].map(|family| lab.address(Side::B, family).to_string());
    let [v4, v6] = first;
    [v4, v6, "10.79.0.2".into(), "fd79::2".into()]
}

fn manager(lab: &Lab) -> String {
    compiled(lab, "manager", &["-libverbs", "-lrdmacm", "-lpthread"]).unwrap()
}

fn start(lab: &Lab, side: Side, line: &str) -> Running {
    start_over(lab, side, &DEVICES, line).unwrap()
}

/// Runs `line` on side A to its successful end.
fn run(lab: &Lab, server: &Running, line: &str) {
    let said = start(lab, Side::A, line).finish(LIMIT);
    let said = said.unwrap_or_else(|error| panic!("{line}: {error:#}\nthe server said: {}", server.output()));
    assert!(said.contains("done"), "{line}: {said}");
}

/// A server with `arguments` serves a client for each address of side B. Returns its output for each.
fn served(lab: &Lab, arguments: &str) -> Vec<String> {
    let program = manager(lab);
    let addresses = beyond(lab);
    let mut server = start(lab, Side::B, &format!("{program} serve {} {arguments}", addresses.len()));
    server.wait_for("listening", LIMIT).unwrap();
    for address in &addresses {
        run(lab, &server, &format!("{program} talk {address}"));
    }
    let said = server.finish(LIMIT).unwrap();
    said.lines().filter(|line| line.contains(" through ")).map(str::to_owned).collect()
}

#[test]
fn netns_compat_manager_a_wildcard_listener_accepts_through_every_device() {
    let expected: Vec<_> =
        [INTERFACE, INTERFACE, SECOND, SECOND].map(|name| format!("wildcard through {name}")).into();
    assert_eq!(served(&lab(), ""), expected);
}

#[test]
fn netns_compat_manager_listeners_share_a_port_by_family() {
    let name = |family, device| format!("{family} through {device}");
    let expected =
        [name("0.0.0.0", INTERFACE), name("::", INTERFACE), name("0.0.0.0", SECOND), name("::", SECOND)];
    assert_eq!(served(&lab(), ":: 0.0.0.0"), expected);
}

#[test]
fn netns_compat_manager_a_port_with_connections_is_listened_at_again() {
    let lab = lab();
    let program = manager(&lab);
    for addresses in ["0.0.0.0 0.0.0.0", "10.77.0.2 10.77.0.2", "0.0.0.0 10.77.0.2"] {
        let mut server = start(&lab, Side::B, &format!("{program} again {addresses}"));
        server.wait_for("listening", LIMIT).unwrap();
        run(&lab, &server, &format!("{program} both 10.77.0.2"));
        let said = server.finish(LIMIT).unwrap();
        assert!(said.contains("first through") && said.contains("second through"), "{said}");
    }
}

#[test]
fn netns_compat_manager_identifiers_exclude_each_other_as_in_the_kernel() {
    let lab = lab();
    let program = manager(&lab);
    let said = start(&lab, Side::A, &format!("{program} addresses 10.77.0.1 10.79.0.1")).finish(LIMIT);
    assert!(said.unwrap().contains("done"));
}

/// A server without other notification detects the loss of its client by keepalive.
#[test]
fn netns_compat_manager_an_idle_server_misses_a_killed_client() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = manager(&lab);
    let address = lab.address(Side::B, Family::V4);
    let mut server = start_over(&lab, Side::B, &[INTERFACE], &format!("{program} idle")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let mut client = start_over(&lab, Side::A, &[INTERFACE], &format!("{program} stay {address}")).unwrap();
    client.wait_for("connected", LIMIT).unwrap();
    client.signal(Signal::KILL).unwrap();
    client.wait(LIMIT).unwrap();
    assert!(server.finish(LIMIT).unwrap().contains("done"));
}

/// As with siw: `RDMA_CM_EVENT_UNREACHABLE` with status -110, which UCX and others read.
#[test]
fn netns_compat_manager_a_peer_without_an_mpa_reply_is_unreachable() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = manager(&lab);
    let address = lab.address(Side::B, Family::V4);
    let listener = lab.within(Side::B, || TcpListener::bind((address, PORT))).unwrap().unwrap();
    let client = start_over(&lab, Side::A, &[INTERFACE], &format!("{program} silent {address}")).unwrap();
    assert!(client.finish(LIMIT).unwrap().contains("done"));
    drop(listener);
}

#[test]
fn netns_compat_manager_channels_lose_no_event_between_threads_and_channels() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = manager(&lab);
    let address = lab.address(Side::B, Family::V4);
    for case in ["readers", "migrate"] {
        let mut server = start_over(&lab, Side::B, &[INTERFACE], &format!("{program} {case}")).unwrap();
        server.wait_for("listening", LIMIT).unwrap();
        let client = start_over(&lab, Side::A, &[INTERFACE], &format!("{program} crowd {address}")).unwrap();
        let [client, server] = [client.finish(LIMIT), server.finish(LIMIT)];
        let done = |said: &anyhow::Result<String>| said.as_ref().is_ok_and(|said| said.contains("done"));
        assert!(done(&client) && done(&server), "{case}: client: {client:?}\nserver: {server:?}");
    }
}

#[test]
fn netns_compat_manager_connections_have_the_codepoint_of_their_identifier() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = manager(&lab);
    let address = lab.address(Side::B, Family::V4);
    let mut server = start_over(&lab, Side::B, &[INTERFACE], &format!("{program} serve 1")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let capture = lab.file("codepoints.pcapng").display().to_string();
    // Codepoint 10, in its octet.
    let line = format!("{program} talk {address} 40");
    start_with(&lab, Side::A, &[("XWARP_CAPTURE", &capture)], &line).unwrap().finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    for (side, codepoint) in [(Side::A, "10"), (Side::B, "18")] {
        let filter = format!("tcp.len > 0 && ip.src == {}", lab.address(side, Family::V4));
        let args = ["-r", &capture, "-Y", &filter, "-T", "fields", "-e", "ip.dsfield.dscp"];
        let found = lab.run(side, "tshark", &args).unwrap();
        assert!(
            found.lines().count() > 0 && found.lines().all(|line| line == codepoint),
            "{side:?}: {found}"
        );
    }
}
