//! The distribution's programs in several processes without privileges, on one interface that `xwarpd` shares.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
    unmodified::{LIMIT, compiled, connect_by, run, start, start_shared},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");

/// A server and its client, in which ADDRESS is the server's address.
const PAIRS: [[&str; 2]; 3] = [
    ["rping -s -a ADDRESS -p 7200 -C 20 -V", "rping -c -a ADDRESS -p 7200 -C 20 -V"],
    ["rping -s -a ADDRESS -p 7300 -C 20 -S 4001 -V", "rping -c -a ADDRESS -p 7300 -C 20 -S 4001 -V"],
    ["ib_write_bw -F -R -p 7400 -n 200 -s 16384", "ib_write_bw -F -R -p 7400 -n 200 -s 16384 ADDRESS"],
];

fn lab() -> (Lab, SharedInterface) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    // Creates the links that unprivileged users cannot create.
    run(&lab, Side::B, "true").unwrap();
    (lab, shared)
}

/// Runs all servers by `serve` at the same time, then the clients by `call`, while the servers that wait hold their devices.
fn exchange(
    address: &str,
    serve: impl Fn(&str) -> anyhow::Result<Running>,
    call: impl Fn(&str) -> anyhow::Result<Running>,
) {
    let pairs = PAIRS.map(|lines| lines.map(|line| line.replace("ADDRESS", address)));
    let servers = pairs.each_ref().map(|[server, _]| serve(server).unwrap());
    for (mut server, [line, client]) in servers.into_iter().zip(&pairs) {
        connect_by(&mut server, client, || call(client)).unwrap_or_else(|error| panic!("{error:#}"));
        server.finish(LIMIT).unwrap_or_else(|error| panic!("{line}: {error:#}"));
    }
}

#[test]
fn netns_compat_shared_several_processes_serve_on_one_interface() {
    let (lab, shared) = lab();
    let address = lab.address(Side::A, Family::V4).to_string();
    exchange(&address, |line| start_shared(&lab, &shared, line), |line| start(&lab, Side::B, line));
}

#[test]
fn netns_compat_shared_both_ends_are_on_one_host() {
    let (lab, shared) = lab();
    for family in [Family::V4, Family::V6] {
        let address = lab.address(Side::A, family).to_string();
        let on_host = |line: &str| start_shared(&lab, &shared, line);
        if family == Family::V4 {
            exchange(&address, on_host, on_host);
        } else {
            let [server, client] = PAIRS[0].map(|line| line.replace("ADDRESS", &address));
            let mut running = on_host(&server).unwrap();
            connect_by(&mut running, &client, || on_host(&client)).unwrap();
            running.finish(LIMIT).unwrap();
        }
    }
}

/// perftest's own connection is one of the kernel's TCP; its queue pairs are connected by their numbers.
#[test]
fn netns_compat_shared_queue_pairs_of_one_host_are_connected_by_number() {
    let (lab, shared) = lab();
    let address = lab.address(Side::A, Family::V4);
    let on_host = |line: &str| start_shared(&lab, &shared, line);
    for line in ["ib_write_bw -F -x 0 -n 200 -s 16384", "ib_send_lat -F -x 0 -n 200 -s 64"] {
        let mut server = on_host(line).unwrap();
        let client = format!("{line} {address}");
        connect_by(&mut server, &client, || on_host(&client)).unwrap_or_else(|error| panic!("{error:#}"));
        server.finish(LIMIT).unwrap();
    }
}

/// A wildcard listener has its port on each interface, also where a helper reserves it.
#[test]
fn netns_compat_shared_a_wildcard_listener_accepts_through_every_interface() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let beyond = lab.namespace(Side::B);
    let line = format!("link add xw1 type veth peer name xw1 netns {beyond}");
    let ip = |side, line: &str| lab.run(side, "ip", &line.split_whitespace().collect::<Vec<_>>()).unwrap();
    ip(Side::A, &line);
    for (side, host) in [(Side::A, 1), (Side::B, 2)] {
        ip(side, &format!("addr add 10.79.0.{host}/24 dev xw1"));
        ip(side, "link set xw1 up");
    }
    let shared = SharedInterface::start_on(&lab, HELPER, &[INTERFACE, "xw1"]).unwrap();
    run(&lab, Side::B, "true").unwrap();
    let program = compiled(&lab, "manager", &["-libverbs", "-lrdmacm", "-lpthread"]).unwrap();
    let mut server = start_shared(&lab, &shared, &format!("--device xw1 {program} serve 2")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    for (device, address) in [(INTERFACE, "10.77.0.1"), ("xw1", "10.79.0.1")] {
        let client = start(&lab, Side::B, &format!("--device xw1 {program} talk {address}")).unwrap();
        assert!(client.finish(LIMIT).unwrap().contains("done"), "{address}: {}", server.output());
        server.wait_for(&format!("wildcard through {device}"), LIMIT).unwrap();
    }
    server.finish(LIMIT).unwrap();
}
