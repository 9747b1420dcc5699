//! Operations of a host and its network that kernel TCP survives: so do connections of ours.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::{SocketAddr, TcpStream},
    process::Stdio,
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use ends::{LIMIT, between, parts};
use xwarp_checks::{
    lab::{Family, HOP_INTERFACES, INTERFACE, Lab, LabOptions, Side},
    process::{Running, wait_until},
};
use xwarp_verbs::{
    AsyncEvent, CloseReason, Device, Payload, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
};

mod ends;

const PORT: u16 = 4791;
/// Python programs of the tests.
const PROGRAMS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/network");

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

fn server_address(lab: &Lab) -> SocketAddr {
    SocketAddr::new(lab.address(Side::B, Family::V4), PORT)
}

/// A program of the tests, in the namespace of a side, with a pipe as its input.
fn start(lab: &Lab, side: Side, program: &str, args: &[&str]) -> Running {
    let mut command = lab.command(side, "python3");
    command.arg(format!("{PROGRAMS}/{program}")).args(args);
    Running::start_with(command, Stdio::piped()).unwrap()
}

fn has_program(lab: &Lab, side: Side) -> bool {
    lab.run(side, "ip", &["-d", "link", "show", "dev", INTERFACE]).unwrap().contains("prog/xdp")
}

/// Queues that are added while a device is open are served: before, the kernel refused every connection whose SYN came to one of
/// them.
#[test]
fn netns_network_queues_that_are_added_are_served() {
    let lab = &Lab::up(LabOptions { queues: 4, ..LabOptions::default() }).unwrap();
    let queues = move |number| {
        lab.run(Side::B, "ethtool", &["-L", INTERFACE, "rx", number, "tx", number]).unwrap();
    };
    let (ready, listening) = channel();
    let (done, finished) = channel::<()>();
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || {
            queues("1");
            let device = Device::open(INTERFACE).unwrap();
            assert_eq!(device.attributes().interface.queues, 1);
            let listener = device.listen(server_address(lab), ListenOptions::default()).unwrap();
            queues("4");
            ready.send(()).unwrap();
            finished.recv().unwrap();
            assert_eq!(device.attributes().interface.queues, 4);
            drop(listener);
        });
        let client = lab.enter(scope, Side::A, move || {
            listening.recv().unwrap();
            for number in 0..40 {
                let connected = TcpStream::connect_timeout(&server_address(lab), LIMIT);
                assert!(connected.is_ok(), "connection {number}: {connected:?}");
            }
            done.send(()).unwrap();
        });
        client.unwrap().join().unwrap();
        server.unwrap().join().unwrap();
    });
}

/// Before, the kernel had all frames from then on, and reset every connection.
#[test]
fn netns_network_a_program_that_is_detached_is_attached_again() {
    let lab = lab();
    between(
        &lab,
        server_address(&lab),
        |end| {
            let process = std::process::id().to_string();
            start(&lab, Side::A, "detach.py", &[&process]).finish(LIMIT).unwrap();
            for side in [Side::A, Side::B] {
                wait_until("the program is attached again", LIMIT, || has_program(&lab, side).then_some(()))
                    .unwrap();
            }
            end.say("still here");
        },
        |end| assert_eq!(end.hear(), "still here"),
    );
}

/// Somebody else's program has the interface: the device ends, and says why.
#[test]
fn netns_network_a_program_that_is_replaced_ends_the_device_with_the_reason() {
    let lab = &lab();
    let ends = |end: &ends::End| {
        let events = end.failed_by(CloseReason::InterfaceRemoved);
        assert!(events.contains(&AsyncEvent::DeviceFatal), "{events:?}");
        let (_pd, _cq, qp, _inbox) = parts(&end.device);
        let to = SocketAddr::from(([10, 77, 0, 2], PORT));
        let connected = end.device.connect(&qp, to, ConnectOptions::default(), LIMIT);
        let error = connected.unwrap_err().to_string();
        assert!(error.contains("attached another one") && error.contains("passes_all"), "{error}");
    };
    let process = std::process::id().to_string();
    let (done, finished) = channel::<()>();
    between(
        lab,
        server_address(lab),
        move |end| {
            let _done = done;
            let mut theirs = start(lab, Side::A, "detach.py", &[&process, INTERFACE]);
            theirs.wait_for("detached", LIMIT).unwrap();
            ends(&end);
        },
        move |end| {
            let _ = finished.recv();
            drop(end);
        },
    );
}

fn ip(lab: &Lab, side: Side, command: &str) -> String {
    lab.run(side, "ip", &command.split_whitespace().collect::<Vec<_>>()).unwrap()
}

/// Time in which a message would arrive if it was sent.
const SILENCE: Duration = Duration::from_secs(1);

/// An emergency stop by the administrator stops connections that are open, and its end lets them go on. Before, they sent on.
#[test]
fn netns_network_routes_and_rules_that_forbid_hold_the_output() {
    let lab = lab();
    for (family, number) in [(Family::V4, 32), (Family::V6, 128)] {
        let server = lab.address(Side::B, family);
        let option = if number == 32 { "-4" } else { "-6" };
        let route = |kind: &str| {
            (
                format!("{option} route add {kind} {server}/{number}"),
                format!("{option} route del {kind} {server}/{number}"),
            )
        };
        let rule = |action: &str| {
            (
                format!("{option} rule add ipproto tcp dport {PORT} {action}"),
                format!("{option} rule del ipproto tcp dport {PORT} {action}"),
            )
        };
        let stops = [route("blackhole"), route("unreachable"), route("prohibit"), rule("prohibit")];
        let count = stops.len();
        between(
            &lab,
            SocketAddr::new(server, PORT),
            |end| {
                for (stop, go) in stops {
                    ip(&lab, Side::A, &stop);
                    // The device is told of the change at once, and reads it within 20 ms.
                    thread::sleep(Duration::from_millis(500));
                    end.post("go on");
                    assert!(end.cq.spin(SILENCE).is_none(), "{stop}: sent on");
                    ip(&lab, Side::A, &go);
                    end.sent();
                }
            },
            |end| {
                for _ in 0..count {
                    assert_eq!(end.hear(), "go on");
                    end.receive();
                }
            },
        );
    }
}

/// Local is what the kernel's local table says: a virtual address on the loopback, and a route's preferred source. Before, the client
/// had no route, and the server's kernel refused it.
#[test]
fn netns_network_virtual_addresses_on_the_loopback_are_served() {
    let lab = lab();
    for (family, client, server, number) in
        [(Family::V4, "10.98.0.1", "10.99.0.1", 32), (Family::V6, "fd98::1", "fd99::1", 128)]
    {
        let option = if number == 32 { "-4" } else { "-6" };
        for (side, own, other) in [(Side::A, client, server), (Side::B, server, client)] {
            ip(&lab, side, "link set lo up");
            ip(&lab, side, &format!("addr add {own}/{number} dev lo"));
            let (local, gateway) = (lab.address(side, family), lab.address(side.peer(), family));
            let source = if side == Side::A { own.to_owned() } else { local.to_string() };
            ip(
                &lab,
                side,
                &format!("{option} route add {other}/{number} via {gateway} dev {INTERFACE} src {source}"),
            );
        }
        // The listener is at all addresses, and was there before this one.
        let (ready, listening) = channel();
        thread::scope(|scope| {
            let any = if number == 32 { "0.0.0.0" } else { "::" };
            let lab = &lab;
            let server_side = lab.enter(scope, Side::B, move || {
                let end = ends::End::accepted(SocketAddr::new(any.parse().unwrap(), PORT), &ready);
                assert_eq!(end.hear(), "to a virtual address");
            });
            let client_side = lab.enter(scope, Side::A, move || {
                listening.recv().unwrap();
                let end = ends::End::connected(SocketAddr::new(server.parse().unwrap(), PORT));
                assert_eq!(end.local().ip().to_string(), client);
                end.say("to a virtual address");
            });
            client_side.unwrap().join().unwrap();
            server_side.unwrap().join().unwrap();
        });
    }
}

/// An address that is missing for a while, for whatever reason, stalls its connections, and ends none.
#[test]
fn netns_network_an_address_that_is_missing_stalls_its_connections() {
    let lab = lab();
    for (family, number) in [(Family::V4, 24), (Family::V6, 64)] {
        let (client, server) = (lab.address(Side::A, family), lab.address(Side::B, family));
        between(
            &lab,
            SocketAddr::new(server, PORT),
            |end| {
                let nodad = if number == 64 { "nodad" } else { "" };
                let add = format!("addr replace {client}/{number} dev {INTERFACE} {nodad}");
                ip(&lab, Side::A, &format!("addr del {client}/{number} dev {INTERFACE}"));
                thread::sleep(ends::ADDRESS_LIMIT / 2);
                ip(&lab, Side::A, &add);
                end.say("again");
                // Without a carrier, the kernel removes the addresses of IPv6. That is no reason to end connections.
                ip(&lab, Side::A, &format!("link set {INTERFACE} down"));
                thread::sleep(ends::ADDRESS_LIMIT + Duration::from_secs(1));
                ip(&lab, Side::A, &format!("link set {INTERFACE} up"));
                let v6 = lab.address(Side::A, Family::V6);
                ip(&lab, Side::A, &format!("addr replace {v6}/64 dev {INTERFACE} nodad"));
                end.say("still here");
            },
            |end| {
                assert_eq!(end.hear(), "again");
                end.receive();
                assert_eq!(end.hear(), "still here");
            },
        );
    }
}

/// Packets of the peer arrive in fragments, of TCP over both families. Before, the kernel reassembled them, and reset the connection.
#[test]
fn netns_network_segments_in_fragments_arrive() {
    let lab = Lab::up(LabOptions { hop: true, ..LabOptions::default() }).unwrap();
    let mut command = lab.hop_command("python3");
    command.arg(format!("{PROGRAMS}/fragment.py")).args(HOP_INTERFACES);
    let mut hop = Running::start(command).unwrap();
    hop.wait_for("forwards", LIMIT).unwrap();
    for family in [Family::V4, Family::V6] {
        between(
            &lab,
            SocketAddr::new(lab.address(Side::B, family), PORT),
            |end| {
                for number in 0..20 {
                    end.say(&format!("number {number} of twenty"));
                }
            },
            |end| {
                for number in 0..20 {
                    assert_eq!(end.hear(), format!("number {number} of twenty"));
                    end.receive();
                }
                let counted = end.counter("link.reassembled");
                // Several messages may share a packet.
                assert!(counted >= 5, "{counted} packets");
            },
        );
    }
}

/// Connections between two hosts use several paths, where the kernel's would: it chooses by the ports of each. Before, all took the first
/// one, because the route was asked for without ports.
#[test]
fn netns_network_connections_are_spread_over_gateways() {
    const CONNECTIONS: usize = 16;
    const MESSAGES: usize = 20;
    let lab = &Lab::up(LabOptions { hop: true, ..LabOptions::default() }).unwrap();
    let [to_client, to_server] = HOP_INTERFACES;
    let router = |line: String| {
        let words: Vec<&str> = line.split(' ').collect();
        let status = lab.hop_command(words[0]).args(&words[1..]).status().unwrap();
        assert!(status.success(), "{line}");
    };
    router(format!("ip addr add 10.78.0.254/24 dev {to_client}"));
    router(format!("ip link add second link {to_client} type macvlan mode bridge"));
    router("ip link set second up".to_owned());
    router("ip addr add 10.78.0.253/32 dev second".to_owned());
    router(format!("ip addr add 10.77.0.254/24 dev {to_server}"));
    router("sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0".to_owned());
    // Only the second gateway's interface answers for its address.
    router("sysctl -qw net.ipv4.conf.all.arp_ignore=1".to_owned());
    ip(lab, Side::A, &format!("addr flush dev {INTERFACE}"));
    ip(lab, Side::A, &format!("addr add 10.78.0.1/24 dev {INTERFACE}"));
    lab.run(Side::A, "sysctl", &["-qw", "net.ipv4.fib_multipath_hash_policy=1"]).unwrap();
    ip(lab, Side::A, "route add default nexthop via 10.78.0.254 nexthop via 10.78.0.253");
    ip(lab, Side::B, "route add 10.78.0.0/24 via 10.77.0.254");
    let frames = |interface: &str| -> u64 {
        let path = format!("/sys/class/net/{interface}/statistics/rx_packets");
        let output = lab.hop_command("cat").arg(path).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    };

    let (ready, listening) = channel();
    thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || {
            let device = ends::open();
            let listener = device.listen(server_address(lab), ListenOptions::default()).unwrap();
            ready.send(()).unwrap();
            for _ in 0..CONNECTIONS {
                let (_pd, cq, qp, inbox) = parts(&device);
                let mut request = listener.accept(LIMIT).unwrap();
                let _connection = request.accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
                for _ in 0..MESSAGES {
                    cq.spin(LIMIT).unwrap().check().unwrap();
                    qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, 64)])).unwrap();
                    qp.post_send(&WorkRequest::send(2, Payload::Inline(b"yes")).signaled()).unwrap();
                    cq.spin(LIMIT).unwrap().check().unwrap();
                }
            }
        });
        let client = lab.enter(scope, Side::A, move || {
            listening.recv().unwrap();
            let device = ends::open();
            for _ in 0..CONNECTIONS {
                let (_pd, cq, qp, inbox) = parts(&device);
                let options = ConnectOptions::default();
                let _connection = device.connect(&qp, server_address(lab), options, LIMIT).unwrap();
                for _ in 0..MESSAGES {
                    qp.post_send(&WorkRequest::send(2, Payload::Inline(b"well?")).signaled()).unwrap();
                    for _ in 0..2 {
                        cq.spin(LIMIT).unwrap().check().unwrap();
                    }
                    qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, 64)])).unwrap();
                }
            }
        });
        client.unwrap().join().unwrap();
        server.unwrap().join().unwrap();
    });
    let (all, second) = (frames(to_client), frames("second"));
    let one = MESSAGES as u64;
    assert!(second >= one && all >= second + one, "{second} of {all} frames through the second gateway");
}
