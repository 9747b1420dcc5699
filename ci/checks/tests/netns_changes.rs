//! Changes of an interface and its environment while connections are open: links, addresses, neighbours,
//! routes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Barrier, mpsc::channel},
    thread,
    time::Duration,
};

use ends::{LIMIT, between, parts};
use xwarp_checks::lab::{Family, HOP_INTERFACES, INTERFACE, Lab, LabOptions, Side};
use xwarp_verbs::{
    AsyncEvent, CloseReason, Device, RecvRequest,
    cm::{ConnectOptions, ConnectionError, ListenOptions},
};

mod ends;

const PORT: u16 = 4791;

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

fn server_address(lab: &Lab) -> SocketAddr {
    SocketAddr::new(lab.address(Side::B, Family::V4), PORT)
}

fn ip(lab: &Lab, side: Side, command: &str) -> String {
    lab.run(side, "ip", &command.split_whitespace().collect::<Vec<_>>()).unwrap()
}

#[test]
fn netns_a_removed_interface_is_fatal_to_its_device_and_reported() {
    let lab = lab();
    let ends = |end: ends::End| {
        let events = end.failed_by(CloseReason::InterfaceRemoved);
        assert!(events.contains(&AsyncEvent::DeviceFatal), "{events:?}");
        assert!(!end.device.attributes().interface.up);
        // A new connection reports it too.
        let (_pd, _cq, qp, _inbox) = parts(&end.device);
        let to = SocketAddr::new(IpAddr::from([10, 77, 0, 9]), PORT);
        let error = end.device.connect(&qp, to, ConnectOptions::default(), LIMIT).unwrap_err().to_string();
        assert!(error.contains("removed"), "{error}");
    };
    between(
        &lab,
        server_address(&lab),
        |end| {
            ip(&lab, Side::A, &format!("link del {INTERFACE}"));
            ends(end);
        },
        ends,
    );
}

/// A server that only listens is notified, with and without waiting, at each call.
#[test]
fn netns_a_removed_interface_ends_the_wait_of_a_listener() {
    let lab = lab();
    let (ready, listening) = channel();
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, || {
            let device = Device::open(INTERFACE).unwrap();
            let listener = device.listen(server_address(&lab), ListenOptions::default()).unwrap();
            ready.send(()).unwrap();
            for _ in 0..2 {
                let error = listener.accept(LIMIT).unwrap_err();
                assert!(matches!(error, ConnectionError::InterfaceRemoved(_)), "{error:?}");
                assert_eq!(error.to_string(), format!("the interface {INTERFACE} was removed"));
            }
            assert!(listener.poll().is_err());
        });
        listening.recv().unwrap();
        ip(&lab, Side::A, &format!("link del {INTERFACE}"));
        server.unwrap().join().unwrap();
    });
}

#[test]
fn netns_a_link_that_goes_down_and_up_is_reported_and_survived() {
    let lab = lab();
    between(
        &lab,
        server_address(&lab),
        |end| {
            ip(&lab, Side::A, &format!("link set {INTERFACE} down"));
            end.events_until(|event| *event == AsyncEvent::PortDown);
            let (_pd, _cq, qp, _inbox) = parts(&end.device);
            let to = server_address(&lab);
            let error =
                end.device.connect(&qp, to, ConnectOptions::default(), LIMIT).unwrap_err().to_string();
            assert!(error.contains(&format!("ip link set dev {INTERFACE} up")), "{error}");
            ip(&lab, Side::A, &format!("link set {INTERFACE} up"));
            end.events_until(|event| *event == AsyncEvent::PortUp);
            end.say("still here");
        },
        |end| assert_eq!(end.hear(), "still here"),
    );
}

#[test]
fn netns_a_removed_address_ends_its_connections_and_is_reported() {
    let lab = lab();
    let address = lab.address(Side::A, Family::V4);
    between(
        &lab,
        server_address(&lab),
        |end| {
            ip(&lab, Side::A, &format!("addr add 10.77.0.99/24 dev {INTERFACE}"));
            let added = AsyncEvent::AddressAdded(IpAddr::from([10, 77, 0, 99]));
            end.events_until(|event| *event == added);
            ip(&lab, Side::A, &format!("addr del {address}/24 dev {INTERFACE}"));
            end.events_until(|event| *event == AsyncEvent::AddressRemoved(address));
            end.failed_by(CloseReason::AddressRemoved);
        },
        |end| {
            end.failed_by(CloseReason::Reset);
        },
    );
}

/// Programs that configure interfaces remove addresses and add them again, or have them twice with two prefixes.
#[test]
fn netns_attack_an_address_that_comes_back_ends_nothing() {
    let lab = lab();
    let address = lab.address(Side::A, Family::V4);
    between(
        &lab,
        server_address(&lab),
        |end| {
            ip(&lab, Side::A, &format!("addr del {address}/24 dev {INTERFACE}"));
            thread::sleep(Duration::from_secs(1));
            ip(&lab, Side::A, &format!("addr add {address}/24 dev {INTERFACE}"));
            ip(&lab, Side::A, &format!("addr add {address}/25 dev {INTERFACE}"));
            ip(&lab, Side::A, &format!("addr del {address}/25 dev {INTERFACE}"));
            // Longer than a missing address is tolerated.
            thread::sleep(ends::ADDRESS_LIMIT + Duration::from_secs(1));
            end.say("still here");
            let events = end.device.async_events();
            while let Some(event) = events.poll() {
                assert!(!matches!(event, AsyncEvent::AddressRemoved(_)), "{event:?}");
            }
        },
        |end| assert_eq!(end.hear(), "still here"),
    );
}

/// Both ends change their Ethernet address in turn; neither re-resolves the other's address on its own.
#[test]
fn netns_open_connections_follow_new_ethernet_addresses() {
    let lab = lab();
    let step = Barrier::new(2);
    let change = |side: Side, last: u8| {
        ip(&lab, side, &format!("link set {INTERFACE} address 02:00:00:00:77:{last:02x}"));
        // An ARP request from the kernel announces the change.
        ip(&lab, side, &format!("neigh flush dev {INTERFACE}"));
        let peer = lab.address(side.peer(), Family::V4);
        lab.run(side, "ping", &["-c1", "-W5", &peer.to_string()]).unwrap();
    };
    between(
        &lab,
        server_address(&lab),
        |end| {
            end.say("one");
            step.wait();
            change(Side::A, 1);
            end.say("two");
            step.wait();
        },
        |end| {
            assert_eq!(end.hear(), "one");
            end.qp.post_recv(&RecvRequest::new(1, &[end.inbox.sge(0, 64)])).unwrap();
            change(Side::B, 2);
            step.wait();
            assert_eq!(end.hear(), "two");
            step.wait();
        },
    );
}

/// Runs `ip` in the namespace between the sides.
fn router_ip(lab: &Lab, command: &str) {
    let status = lab.hop_command("ip").args(command.split_whitespace()).status().unwrap();
    assert!(status.success(), "ip {command}");
}

/// A server that never connects takes the path of an accepted connection from a frame. It follows a gateway whose Ethernet
/// address changes, and a route that names another gateway. The router drops frames to its earlier Ethernet addresses.
#[test]
fn netns_a_server_follows_its_gateway() {
    let lab = Lab::up(LabOptions { hop: true, ..LabOptions::default() }).unwrap();
    let [to_client, to_server] = HOP_INTERFACES;
    let server = lab.address(Side::B, Family::V4);
    ip(&lab, Side::A, &format!("addr flush dev {INTERFACE}"));
    ip(&lab, Side::A, &format!("addr add 10.78.0.1/24 dev {INTERFACE}"));
    ip(&lab, Side::A, "route add default via 10.78.0.254");
    router_ip(&lab, &format!("addr add 10.78.0.254/24 dev {to_client}"));
    router_ip(&lab, &format!("addr add 10.77.0.254/24 dev {to_server}"));
    let forward = lab.hop_command("sysctl").args(["-qw", "net.ipv4.ip_forward=1"]).status().unwrap();
    assert!(forward.success());
    ip(&lab, Side::B, "route add 10.78.0.0/24 via 10.77.0.254");

    let address = |last: u8| {
        router_ip(&lab, &format!("link set {to_server} address 02:00:00:00:77:{last:02x}"));
        router_ip(&lab, &format!("neigh flush dev {to_server}"));
    };
    between(
        &lab,
        SocketAddr::new(server, PORT),
        |end| {
            end.say("one");
            for text in ["two", "three"] {
                assert_eq!(end.hear(), text);
                end.qp.post_recv(&RecvRequest::new(1, &[end.inbox.sge(0, 64)])).unwrap();
            }
        },
        |end| {
            assert_eq!(end.hear(), "one");
            address(0x11);
            // An ARP request of the router announces the change.
            let ping = lab.hop_command("ping").args(["-qc1", "-W5", &server.to_string()]).output().unwrap();
            assert!(ping.status.success());
            end.say("two");
            router_ip(&lab, &format!("addr del 10.77.0.254/24 dev {to_server}"));
            router_ip(&lab, &format!("addr add 10.77.0.253/24 dev {to_server}"));
            address(0x12);
            ip(&lab, Side::B, "route replace 10.78.0.0/24 via 10.77.0.253");
            end.say("three");
        },
    );
}

/// The scope of a link-local address is the device's interface.
#[test]
fn netns_link_local_addresses_connect() {
    let lab = lab();
    for (side, last) in [(Side::A, 1), (Side::B, 2)] {
        ip(&lab, side, &format!("addr add fe80::77:{last}/64 dev {INTERFACE} nodad"));
    }
    let address = SocketAddr::new("fe80::77:2".parse().unwrap(), PORT);
    between(&lab, address, |end| end.say("near"), |end| assert_eq!(end.hear(), "near"));
}
