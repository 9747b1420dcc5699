//! Paths, neighbours and changes, as announced by the kernel.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use common::frame::Frame;
use common::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xwarp_driver::{DriverConfig, Event, Interface, Question, ResolveError, Resolver};
use xwarp_tcp::link::{Link, Steer};
use xwarp_tcp::wire::{Flow, Mac, VlanTags};

const LIMIT: Duration = Duration::from_secs(5);

fn resolver(lab: &Lab, link: &mut Interface) -> Resolver {
    lab.run(Side::A, move || link.resolver().unwrap())
}

fn mac_of(lab: &Lab, side: Side) -> Mac {
    let text = lab.sh(side, &format!("cat /sys/class/net/{DEV}/address"));
    let bytes: Vec<u8> = text.trim().split(':').map(|b| u8::from_str_radix(b, 16).unwrap()).collect();
    Mac(bytes.try_into().unwrap())
}

fn flow(local: &str, remote: &str) -> Flow {
    Flow { local: at(local, 4000), remote: at(remote, 4791) }
}

#[test]
fn netns_a_path_to_a_neighbour() {
    let lab = Lab::new();
    let config = DriverConfig { vlan: Some(42), ..DriverConfig::default() };
    let mut link = lab.open_with(Side::A, &config).unwrap();
    let resolver = resolver(&lab, &mut link);
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let flow = flow(local, remote);
        // Nothing is known of the peer before: the kernel is asked to find it.
        let path = resolver.resolve(flow, LIMIT).unwrap();
        assert_eq!((path.flow, path.mtu), (flow, 1500));
        assert_eq!((path.source_mac, path.next_hop_mac), (mac_of(&lab, Side::A), mac_of(&lab, Side::B)));
        assert_eq!(path.vlan, VlanTags([Some((0x8100, 42)), None]));
        let route = resolver.route(remote.parse().unwrap(), None).unwrap();
        assert_eq!((route.source, route.next_hop), (ip(local), ip(remote)));
        assert_eq!(resolver.neighbour(&route).unwrap(), Some(path.next_hop_mac));
    }
}

#[test]
fn netns_a_path_by_a_gateway_and_its_mtu() {
    let lab = Lab::new();
    let mut link = lab.open(Side::A);
    lab.sh(Side::A, &format!("ip route add 198.51.100.0/24 via {B4} mtu 1400"));
    lab.sh(Side::A, &format!("ip -6 route add 2001:db8::/32 via {B6}"));
    let resolver = resolver(&lab, &mut link);
    for (local, remote, gateway, mtu) in [(A4, "198.51.100.7", B4, 1400), (A6, "2001:db8::7", B6, 1500)] {
        let route = resolver.route(ip(remote), None).unwrap();
        assert_eq!((route.source, route.next_hop, route.mtu), (ip(local), ip(gateway), mtu));
        let path = resolver.resolve(flow(local, remote), LIMIT).unwrap();
        assert_eq!((path.next_hop_mac, path.mtu), (mac_of(&lab, Side::B), mtu));
    }
}

#[test]
fn netns_a_link_local_path() {
    let lab = Lab::new();
    let mut link = lab.open(Side::A);
    let link_local = |side| {
        let find = || lab.sh(side, &format!("ip -o -6 addr show dev {DEV} scope link"));
        eventually("duplicate address detection is over", || {
            find().contains("inet6") && !find().contains("tentative")
        });
        let text = find();
        let address = text.split_whitespace().find_map(|word| word.strip_suffix("/64")).unwrap().to_owned();
        SocketAddr::new(ip(&address), 4791)
    };
    let (local, remote) = (link_local(Side::A), link_local(Side::B));
    let path = resolver(&lab, &mut link).resolve(Flow { local, remote }, LIMIT).unwrap();
    assert_eq!(path.next_hop_mac, mac_of(&lab, Side::B));
}

#[test]
fn netns_there_is_no_path_and_why() {
    let lab = Lab::new();
    lab.sh(Side::A, "ip link add other type veth peer name other-peer");
    lab.sh(
        Side::A,
        "sh -c 'ip addr add 10.99.0.1/24 dev other && ip link set other up && ip link set other-peer up'",
    );
    let mut link = lab.open(Side::A);
    let resolver = resolver(&lab, &mut link);
    let why = |destination: &str, source: Option<&str>| {
        resolver.route(ip(destination), source.map(ip)).map(|route| panic!("{route:?}")).unwrap_err()
    };
    for own in [A4, A6, "127.0.0.1", "::1", "10.99.0.1"] {
        let error = why(own, None);
        assert!(matches!(error, ResolveError::Local(address) if address == ip(own)), "{own}: {error:?}");
        assert!(error.to_string().contains("no frame to it passes a network interface"), "{error}");
    }
    for group in ["224.0.0.1", "ff02::1", "255.255.255.255", "0.0.0.0", "::"] {
        assert!(matches!(why(group, None), ResolveError::NotUnicast(_)), "{group}");
    }
    for nowhere in ["192.0.2.9", "2001:db8::9"] {
        assert!(matches!(why(nowhere, None), ResolveError::NoRoute { .. }), "{nowhere}");
    }
    let error = why("10.99.0.7", None);
    assert!(
        matches!(&error, ResolveError::OtherInterface { through, .. } if through == "other"),
        "{error:?}"
    );
    // An address of the host, as for the kernel's TCP.
    assert_eq!(resolver.route(ip(B4), Some(ip("10.99.0.1"))).unwrap().source, ip("10.99.0.1"));
    for stranger in ["10.77.0.55", "127.0.0.1"] {
        let error = why(B4, Some(stranger));
        assert!(
            matches!(error, ResolveError::NotOurAddress { address, .. } if address == ip(stranger)),
            "{error:?}"
        );
    }
    assert!(matches!(why(B4, Some(A6)), ResolveError::Family(..)));
}

/// Two interfaces lead to the destination and the kernel prefers the other: the open one is used.
#[test]
fn netns_the_open_interface_is_preferred() {
    let lab = Lab::new();
    lab.sh(Side::A, "ip link add other type veth peer name other-peer");
    lab.sh(
        Side::A,
        "sh -c 'ip link set other up && ip link set other-peer up && ip addr add 10.99.0.1/24 dev other'",
    );
    lab.sh(Side::A, &format!("ip route add 198.51.100.0/24 via {B4} metric 200"));
    lab.sh(Side::A, "ip route add 198.51.100.0/24 via 10.99.0.9 metric 100");
    let mut link = lab.open(Side::A);
    let route = resolver(&lab, &mut link).route(ip("198.51.100.1"), None).unwrap();
    assert_eq!((route.source, route.next_hop), (ip(A4), ip(B4)));
}

#[test]
fn netns_a_silent_neighbour_ends_in_time() {
    let lab = Lab::new();
    let mut link = lab.open(Side::A);
    let resolver = resolver(&lab, &mut link);
    for (local, silent) in [(A4, "10.77.0.99"), (A6, "fd77::99")] {
        let (start, limit) = (Instant::now(), Duration::from_millis(100));
        let error = resolver.resolve(flow(local, silent), limit).unwrap_err();
        assert!(
            matches!(error, ResolveError::TimedOut { next_hop, .. } if next_hop == ip(silent)),
            "{error:?}"
        );
        assert!(start.elapsed() < Duration::from_secs(1));
    }
    // With patience the kernel's verdict is heard: it asks three times, a second apart.
    let error = resolver.resolve(flow(A4, "10.77.0.98"), Duration::from_secs(8)).unwrap_err();
    assert!(matches!(error, ResolveError::Unreachable { .. }), "{error:?}");
}

/// Waits for an event that `wanted` accepts.
fn expect_event(link: &mut Interface, wanted: &Event) {
    // A removed address is reported after five seconds, unless it comes back.
    eventually_within(10, &format!("{wanted:?}"), || {
        let mut seen = false;
        link.events(|event| seen |= event == *wanted).unwrap();
        seen
    });
}

fn readable(link: &Interface) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(link.event_fd(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

#[test]
fn netns_changes_are_reported() {
    let lab = Lab::new();
    let mut link = lab.open(Side::A);
    eventually("the start is over", || {
        std::thread::sleep(Duration::from_millis(50));
        link.events(|_| ()).unwrap();
        !readable(&link)
    });
    let added: IpAddr = ip("10.77.0.200");
    lab.sh(Side::A, &format!("ip addr add {added}/24 dev {DEV}"));
    eventually("the descriptor is readable", || readable(&link));
    expect_event(&mut link, &Event::AddressAdded(added));
    assert!(link.addresses().contains(&added));
    lab.sh(Side::A, &format!("ip addr del {added}/24 dev {DEV}"));
    expect_event(&mut link, &Event::AddressRemoved(added));
    assert!(!link.addresses().contains(&added));

    lab.sh(Side::A, &format!("ip link set {DEV} mtu 1400"));
    expect_event(&mut link, &Event::Mtu(1400));
    assert_eq!((link.attributes().mtu, link.attributes().path_mtu), (1400, 1400));

    lab.sh(Side::A, &format!("ip neigh replace 10.77.0.50 lladdr 02:00:00:00:00:50 dev {DEV}"));
    expect_event(
        &mut link,
        &Event::Neighbour { address: ip("10.77.0.50"), mac: Some(Mac([2, 0, 0, 0, 0, 0x50])) },
    );
    lab.sh(Side::A, &format!("ip neigh del 10.77.0.50 dev {DEV}"));
    expect_event(&mut link, &Event::Neighbour { address: ip("10.77.0.50"), mac: None });

    lab.sh(Side::A, &format!("ip route add 198.51.100.0/24 via {B4}"));
    expect_event(&mut link, &Event::Routes);

    lab.sh(Side::B, &format!("ip link set {DEV} down"));
    expect_event(&mut link, &Event::LinkState { up: false });
    lab.sh(Side::B, &format!("ip link set {DEV} up"));
    expect_event(&mut link, &Event::LinkState { up: true });
    assert!(link.attributes().up);
}

/// A wildcard listener answers on an address that the interface gets later.
#[test]
fn netns_a_wildcard_listener_follows_addresses() {
    let lab = Lab::new();
    let (mut a, mut b) = (lab.open(Side::A), lab.open(Side::B));
    b.steer(Steer::Listener { addr: None, port: 4791 }).unwrap();
    let later = at("10.77.0.200", 4791);
    let syn = Frame::tcp(a.attributes().mac, b.attributes().mac, at(A4, 4000), later).syn().build();
    send_bytes(&mut a, 0, &syn);
    lab.sh(Side::B, &format!("ip addr add {}/24 dev {DEV}", later.ip()));
    expect_event(&mut b, &Event::AddressAdded(later.ip()));
    assert_eq!((b.counters().received_frames, b.program_counters().unwrap().passed_tcp), (0, 1));
    send_bytes(&mut a, 0, &syn);
    assert_eq!(receive_bytes(&mut b), syn);
    lab.sh(Side::B, &format!("ip addr del {}/24 dev {DEV}", later.ip()));
    expect_event(&mut b, &Event::AddressRemoved(later.ip()));
    send_bytes(&mut a, 0, &syn);
    assert_eq!(b.counters().received_frames, 1);
}

#[test]
fn netns_a_link_that_is_down_is_named_as_the_reason() {
    let lab = Lab::new();
    let mut link = lab.open(Side::A);
    let resolver = resolver(&lab, &mut link);
    let why = || resolver.route(ip(B4), None).unwrap_err();
    lab.sh(Side::B, &format!("ip link set {DEV} down"));
    assert!(matches!(why(), ResolveError::NoCarrier { .. }), "{:?}", why());
    lab.sh(Side::A, &format!("ip link set {DEV} down"));
    assert!(matches!(why(), ResolveError::LinkDown { .. }), "{:?}", why());
    assert_eq!(why().to_string(), format!("{DEV} is down: ip link set dev {DEV} up"));
    lab.sh(Side::A, &format!("ip link del {DEV}"));
    assert!(matches!(why(), ResolveError::LinkRemoved { .. }), "{:?}", why());
}

/// What kernel TCP honours in rules and routes: ports, and routes that forbid, for both families.
#[test]
fn netns_network_rules_by_port_and_routes_that_forbid_are_honoured() {
    let lab = Lab::new();
    let mut link = lab.open(Side::A);
    let resolver = resolver(&lab, &mut link);
    for (family, remote, prefix, local, gateway) in
        [("-4", "198.51.100.7", "198.51.100.0/24", A4, B4), ("-6", "2001:db8::7", "2001:db8::/64", A6, B6)]
    {
        let ip_command = |command: &str| lab.sh(Side::A, &format!("ip {family} {command}"));
        let asked = || resolver.next_hop(flow(local, remote), false).map(|found| (found.address, found.mtu));
        assert!(asked().unwrap_err().forbids(), "no route");
        ip_command(&format!("route add {prefix} via {gateway} mtu 1400 table 100"));
        ip_command("rule add ipproto tcp dport 4791 table 100");
        assert_eq!(asked().unwrap(), (ip(gateway), Some(1400)));
        let question = Question { destination_port: 4791, ..Question::to(ip(remote), None) };
        assert_eq!(resolver.route_of(&question).unwrap().next_hop, ip(gateway));
        assert!(resolver.route(ip(remote), None).is_err(), "another port");
        ip_command("rule del ipproto tcp dport 4791 table 100");
        ip_command("rule add ipproto tcp sport 4000 table 100");
        assert_eq!(asked().unwrap(), (ip(gateway), Some(1400)));
        for forbids in ["blackhole", "unreachable", "prohibit"] {
            ip_command(&format!("route replace {forbids} {remote} table 100"));
            let error = asked().unwrap_err();
            assert!(error.forbids(), "{forbids}: {error:?}");
            ip_command(&format!("route del {forbids} {remote} table 100"));
            assert!(asked().is_ok());
        }
    }
}

/// A policy that demands encryption is not passed by: new connections are refused with the reason, and open ones hold their output.
#[test]
fn netns_network_policies_that_demand_ipsec_are_not_passed_by() {
    let lab = Lab::new();
    let mut link = lab.open(Side::A);
    let resolver = resolver(&lab, &mut link);
    for (local, remote, net) in [(A4, B4, "10.77.0.0/24"), (A6, B6, "fd77::/64")] {
        let policy = |command: &str| lab.sh(Side::A, &format!("ip xfrm policy {command}"));
        let flow = flow(local, remote);
        let refused = || {
            resolver.next_hop(flow, false).map(drop).map_err(|error| {
                assert!(error.forbids() && error.to_string().contains("IPsec policy"), "{error}");
                assert!(matches!(resolver.route(ip(remote), None), Err(ResolveError::Policy { .. })));
            })
        };
        let tmpl = "tmpl proto esp mode transport";
        assert!(refused().is_ok());
        policy(&format!("add dir out src {net} dst {net} priority 20 {tmpl}"));
        assert!(refused().is_err(), "{net}");
        // A more important policy exempts this port.
        policy(&format!("add dir out src {net} dst {net} proto tcp dport 4791 priority 10"));
        assert!(refused().is_ok(), "{net}");
        policy(&format!("del dir out src {net} dst {net} proto tcp dport 4791"));
        policy(&format!("del dir out src {net} dst {net}"));
        policy(&format!("add dir out src {net} dst {net} action block"));
        assert!(refused().is_err(), "{net}");
        policy(&format!("del dir out src {net} dst {net}"));
        for other in ["dir in", "dir out proto udp", "dir out proto tcp dport 80"] {
            policy(&format!("add {other} src {net} dst {net} {tmpl}"));
        }
        policy(&format!("add dir out src {net} dst {net} tmpl proto esp mode transport level use"));
        assert!(refused().is_ok(), "{net}");
        policy("flush");
    }
}

/// A server's queries for a connection that a client opened, and again when the client falls silent.
#[test]
fn netns_the_next_hop_of_a_connection_follows_routes_and_is_confirmed() {
    let lab = Lab::new();
    lab.sh(Side::A, "ip route add 198.51.100.0/24 via 10.77.0.2");
    let mut link = lab.open(Side::A);
    let resolver = resolver(&lab, &mut link);
    let of_client = |confirm| {
        let found = resolver.next_hop(flow(A4, "198.51.100.7"), confirm).unwrap();
        (found.address, found.mac)
    };
    let known = || of_client(false);
    eventually("the gateway is resolved", || known() == (ip(B4), Some(mac_of(&lab, Side::B))));

    // The gateway is not there any more: only a confirmation finds out.
    lab.sh(Side::B, &format!("ip addr del {B4}/24 dev {DEV}"));
    assert_eq!(known().1, Some(mac_of(&lab, Side::B)));
    assert_eq!(of_client(true).1, Some(mac_of(&lab, Side::B)));
    eventually_within(10, "the confirmation fails", || {
        lab.sh(Side::A, &format!("ip neigh show {B4} dev {DEV}")).contains("FAILED")
    });

    // An entry of the administrator's is not doubted.
    lab.sh(Side::A, &format!("ip neigh replace 10.77.0.3 lladdr 02:00:00:00:00:03 dev {DEV} nud permanent"));
    lab.sh(Side::A, "ip route replace 198.51.100.0/24 via 10.77.0.3");
    let static_hop = (ip("10.77.0.3"), Some(Mac([2, 0, 0, 0, 0, 3])));
    assert_eq!(of_client(true), static_hop);
    assert!(lab.sh(Side::A, &format!("ip neigh show 10.77.0.3 dev {DEV}")).contains("PERMANENT"));
}
