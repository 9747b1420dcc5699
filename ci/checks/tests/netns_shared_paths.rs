//! Paths of unprivileged processes' frames: to the process itself, through routers, and in VLANs.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Output,
    time::Duration,
};

use xwarp_checks::{
    exchange::PART,
    lab::{Family, HOP_INTERFACES, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);

fn ip(lab: &Lab, side: Side, command: &str) {
    lab.run(side, "ip", &command.split_whitespace().collect::<Vec<_>>()).unwrap();
}

/// Runs a program in the router, the namespace between the sides.
fn in_router(lab: &Lab, command: &str) -> Output {
    let mut words = command.split_whitespace();
    lab.hop_command(words.next().unwrap()).args(words).output().unwrap()
}

/// The same with a program that must succeed.
fn router(lab: &Lab, command: &str) {
    let output = in_router(lab, command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn netns_shared_a_process_exchanges_messages_with_itself() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    for options in [&[][..], &["--generic"], &["--from-clients", "native"]] {
        let shared = SharedInterface::start(&lab, HELPER, options).unwrap();
        let [v4, v6] = [Family::V4, Family::V6].map(|family| lab.address(Side::A, family));
        for address in [v4, v6, Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
            let address = SocketAddr::new(address, 7000).to_string();
            let alone = shared.start_unprivileged(NOBODYS, &["itself", &address, "40"]).unwrap();
            alone.finish(LIMIT).unwrap();
        }
    }
}

/// A router between the sides: side A is in another network, 10.78.0.0/24 and `fd78::/64`.
fn routed_lab() -> Lab {
    let lab = Lab::up(LabOptions { hop: true, ..LabOptions::default() }).unwrap();
    let [to_a, to_b] = HOP_INTERFACES;
    ip(&lab, Side::A, &format!("address flush dev {INTERFACE} scope global"));
    for address in ["10.78.0.1/24", "fd78::1/64"] {
        ip(&lab, Side::A, &format!("address add {address} dev {INTERFACE}"));
    }
    for interface in ["all", "default", to_a, to_b] {
        router(
            &lab,
            &format!(
                "sysctl -qw net.ipv6.conf.{interface}.disable_ipv6=0 net.ipv6.conf.{interface}.accept_dad=0"
            ),
        );
    }
    router(&lab, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
    for (interface, v4, v6) in
        [(to_a, "10.78.0.254/24", "fd78::fe/64"), (to_b, "10.77.0.254/24", "fd77::fe/64")]
    {
        router(&lab, &format!("ip address add {v4} dev {interface}"));
        router(&lab, &format!("ip address add {v6} dev {interface} nodad"));
    }
    ip(&lab, Side::A, "route add default via 10.78.0.254");
    ip(&lab, Side::A, "route add default via fd78::fe");
    ip(&lab, Side::B, "route add 10.78.0.0/24 via 10.77.0.254");
    ip(&lab, Side::B, "route add fd78::/64 via fd77::fe");
    lab
}

/// Waits until a client has exchanged more than `before` messages; returns how many.
fn progress(client: &mut Running, before: usize) -> usize {
    let next = (before / PART + 1) * PART;
    client.wait_for(&format!("{next} messages"), LIMIT).unwrap();
    let said = client.output();
    said.lines().filter_map(|line| line.strip_suffix(" messages")?.parse().ok()).max().unwrap()
}

/// Both ends are processes without privileges, and the next hop of each is a router.
#[test]
fn netns_shared_the_next_hop_is_a_router() {
    let lab = routed_lab();
    let a = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let b = SharedInterface::start_beyond(&lab, HELPER).unwrap();
    for family in [Family::V4, Family::V6] {
        let address = SocketAddr::new(lab.address(Side::B, family), 7000).to_string();
        let server = b.serve(NOBODYS, &address, "1").unwrap();
        a.start_unprivileged(NOBODYS, &["talk", &address, "50"]).unwrap().finish(LIMIT).unwrap();
        server.finish(LIMIT).unwrap();
    }
}

/// While two processes exchange messages, the router changes its Ethernet address. Then the route of one of them names
/// another router: the old one with another address, under which alone it accepts frames from then on.
#[test]
fn netns_shared_open_connections_follow_the_next_hop() {
    let [to_a, _] = HOP_INTERFACES;
    for (family, old, new) in
        [(Family::V4, "10.78.0.254/24", "10.78.0.253/24"), (Family::V6, "fd78::fe/64", "fd78::fd/64")]
    {
        let lab = routed_lab();
        let a = SharedInterface::start(&lab, HELPER, &[]).unwrap();
        let b = SharedInterface::start_beyond(&lab, HELPER).unwrap();
        let address = SocketAddr::new(lab.address(Side::B, family), 7000).to_string();
        let _server = b.serve(NOBODYS, &address, "1").unwrap();
        let mut client = a.start_unprivileged(NOBODYS, &["talk", &address, "0"]).unwrap();
        let mut seen = progress(&mut client, 0);

        let new_mac = |last: u8| {
            router(&lab, &format!("ip link set {to_a} address 02:00:00:00:78:{last:02x}"));
            router(&lab, &format!("ip neigh flush dev {to_a}"));
        };
        new_mac(0x11);
        // A request of the router for the neighbour announces the change.
        let host = if family == Family::V4 { "10.78.0.1" } else { "fd78::1" };
        let answered = |_| in_router(&lab, &format!("ping -qc1 -W1 {host}")).status.success();
        assert!((0..30).any(answered), "{host} does not answer the router");
        seen = progress(&mut client, seen + 2 * PART);

        router(&lab, &format!("ip address del {old} dev {to_a}"));
        router(
            &lab,
            &format!("ip address add {new} dev {to_a} {}", if family == Family::V6 { "nodad" } else { "" }),
        );
        new_mac(0x12);
        let gateway = new.split('/').next().unwrap();
        ip(&lab, Side::A, &format!("route replace default via {gateway}"));
        progress(&mut client, seen + 2 * PART);
    }
}
