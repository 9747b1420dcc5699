//! One table of the classes of frames: what the steering program and the programs of a shared interface do with each, if it is for a
//! connection of ours, for a listening port, and for nobody. What is ours is served or dropped, because the kernel's TCP would
//! answer it by a reset; what is not ours passes.

use etherparse::{IpAuthHeader, IpFragOffset, Ipv6FragmentHeader, Ipv6RawExtHeader};

use super::*;
use crate::relay::load_skeleton as load_relay;
use crate::switch::{Switch, load_skeleton as load_switch};

const CLIENT: u32 = 1;
const TC_ACT_UNSPEC: u32 = u32::MAX;
const TC_ACT_SHOT: u32 = 2;
const TC_ACT_REDIRECT: u32 = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Served,
    Dropped(&'static str),
    Passed(&'static str),
}
use Fate::{Dropped, Passed, Served};

/// Makes a frame from the first address to the second one.
type Make = fn(SocketAddr, SocketAddr) -> Vec<u8>;

/// A class of frames.
struct Class {
    name: &'static str,
    make: Make,
    /// The fate of a frame that is for a connection, for a listening port (of a shared interface: of one's own port), and for nobody.
    fates: [Fate; 3],
}

/// A class that is served by connections, and by listening ports if it may open one.
fn served(name: &'static str, opens: bool, make: Make) -> Class {
    let fates = [Served, if opens { Served } else { Passed("passed_tcp") }, Passed("passed_tcp")];
    Class { name, make, fates }
}

/// Fragments of packets of which a first one has arrived.
fn fragments(name: &'static str, make: Make) -> Class {
    Class { name, make, fates: [Served, Served, Passed("passed_fragment")] }
}

fn passed(name: &'static str, by: &'static str, make: Make) -> Class {
    Class { name, make, fates: [Passed(by); 3] }
}

fn plain_classes() -> Vec<Class> {
    vec![
        served("a segment", false, |from, to| frame(&[], &tcp(from, to, ack))),
        served("a SYN", true, |from, to| frame(&[], &tcp(from, to, syn))),
        served("a priority", false, |from, to| frame(&[(0x8100, 0xe000)], &tcp(from, to, ack))),
        served("a priority, and a SYN", true, |from, to| frame(&[(0x8100, 0)], &tcp(from, to, syn))),
        passed("a VLAN", "passed_vlan", |from, to| frame(&[(0x8100, 7)], &tcp(from, to, ack))),
        Class {
            name: "to another station",
            make: |from, to| {
                let mut frame = frame(&[], &tcp(from, to, syn));
                frame[5] ^= 1;
                frame
            },
            fates: [Passed("passed_other_station"), Passed("passed_other_station"), Passed("passed_tcp")],
        },
        passed("to all stations", "passed_not_unicast", |from, to| {
            let mut frame = frame(&[], &tcp(from, to, syn));
            frame[..6].fill(0xff);
            frame
        }),
        Class {
            name: "from ourselves",
            make: |_, to| frame(&[], &tcp(SocketAddr::new(to.ip(), 9), to, syn)),
            fates: [Dropped("dropped_martian"), Dropped("dropped_martian"), Passed("passed_tcp")],
        },
        fragments("a first fragment", |from, to| match to {
            SocketAddr::V4(_) => frame(&[], &with_fragment_field(tcp(from, to, ack), 0x2000)),
            SocketAddr::V6(_) => frame(&[], &behind(from, to, &[fragment(0, true)])),
        }),
        fragments("a first fragment with the ports only", |from, to| match to {
            SocketAddr::V4(_) => frame(&[], &with_fragment_field(tcp(from, to, ack)[..28].to_vec(), 0x2000)),
            SocketAddr::V6(_) => frame(&[], &behind(from, to, &[fragment(0, true)])[..56]),
        }),
        fragments("a later fragment", |from, to| match to {
            SocketAddr::V4(_) => frame(&[], &with_fragment_field(tcp(from, to, ack), 0x0001)),
            SocketAddr::V6(_) => frame(&[], &behind(from, to, &[fragment(1, false)])),
        }),
        passed("a fragment that has overtaken the first one", "passed_fragment", |from, to| match to {
            SocketAddr::V4(_) => {
                let mut packet = with_fragment_field(tcp(from, to, ack), 0x0001);
                packet[4] ^= 1;
                frame(&[], &packet)
            }
            SocketAddr::V6(_) => {
                let mut packet = behind(from, to, &[fragment(1, false)]);
                packet[44] ^= 1;
                frame(&[], &packet)
            }
        }),
        passed("a cut header", "passed_truncated", |from, to| {
            let whole = frame(&[], &tcp(from, to, ack));
            whole[..whole.len() - b"payload".len() - 1].to_vec()
        }),
        served("behind an authentication header", true, |from, to| {
            let header = IpAuthHeader::new(IpNumber::TCP, 1, 1, &[0; 12]).unwrap();
            let bytes = [&header.to_bytes()[..], &segment(from, to, syn)].concat();
            frame(&[], &packet(from.ip(), to.ip(), IpNumber::AUTHENTICATION_HEADER, &[], &bytes))
        }),
    ]
}

fn v4_classes() -> Vec<Class> {
    vec![
        served("4 bytes of options", true, |from, to| with_options(from, to, &[148, 4, 0, 0])),
        served("40 bytes of options", true, |from, to| with_options(from, to, &[1; 40])),
        fragments("options, and a first fragment", |from, to| {
            let segment = segment(from, to, syn);
            let whole = packet(from.ip(), to.ip(), IpNumber::TCP, &[1; 40], &segment);
            frame(&[], &with_fragment_field(whole, 0x2000))
        }),
    ]
}

fn v6_classes() -> Vec<Class> {
    vec![
        served("a hop-by-hop header", true, |from, to| frame(&[], &behind(from, to, &[options(0)]))),
        served("a destination header", true, |from, to| frame(&[], &behind(from, to, &[options(60)]))),
        served("a routing header", true, |from, to| frame(&[], &behind(from, to, &[options(43)]))),
        served("a whole fragment", true, |from, to| frame(&[], &behind(from, to, &[fragment(0, false)]))),
        served("8 headers", true, |from, to| {
            let headers = [0, 60, 43, 60, 60, 60, 60].map(options);
            frame(&[], &behind(from, to, &[&headers[..], &[fragment(0, false)]].concat()))
        }),
        Class {
            name: "9 headers",
            make: |from, to| frame(&[], &behind(from, to, &[60; 9].map(options))),
            // Whose they are is not known, but they are for this host.
            fates: [Dropped("dropped_headers"); 3],
        },
        fragments("options, and a first fragment", |from, to| {
            frame(&[], &behind(from, to, &[options(0), fragment(0, true)]))
        }),
        fragments("a first fragment, and options", |from, to| {
            frame(&[], &behind(from, to, &[fragment(0, true), options(60)]))
        }),
        passed("mapped addresses", "passed_mapped", |from, to| {
            let mapped = |end: SocketAddr| {
                let [.., a, b] = end.port().to_be_bytes();
                SocketAddr::new(std::net::Ipv4Addr::new(192, 0, a, b).to_ipv6_mapped().into(), end.port())
            };
            frame(&[], &tcp(mapped(from), mapped(to), syn))
        }),
    ]
}

fn other_classes() -> Vec<Class> {
    vec![
        Class {
            name: "an ICMP error",
            make: |from, to| frame(&[], &icmp(to, 3, &tcp(to, from, ack))),
            fates: [Served, Passed("passed_icmp"), Passed("passed_icmp")],
        },
        passed("an echo request", "passed_icmp", |from, to| {
            frame(&[], &icmp(to, if to.is_ipv4() { 8 } else { 128 }, &tcp(to, from, ack)))
        }),
        passed("UDP", "passed_not_tcp", |from, to| protocol(from, to, IpNumber::UDP)),
        passed("ESP", "passed_not_tcp", |from, to| {
            protocol(from, to, IpNumber::ENCAPSULATING_SECURITY_PAYLOAD)
        }),
        passed("ARP", "passed_not_ip", |_, _| ethernet(&[], EtherType::ARP, &[0; 28])),
    ]
}

fn protocol(from: SocketAddr, to: SocketAddr, protocol: IpNumber) -> Vec<u8> {
    frame(&[], &packet(from.ip(), to.ip(), protocol, &[], &segment(from, to, syn)))
}

fn with_options(from: SocketAddr, to: SocketAddr, options: &[u8]) -> Vec<u8> {
    frame(&[], &packet(from.ip(), to.ip(), IpNumber::TCP, options, &segment(from, to, syn)))
}

/// A header between IP and TCP, with its number; its first byte is filled in.
type Header = (u8, Vec<u8>);

/// A header of type `number` with padding of 6 bytes: as a routing header, one whose segments are all visited.
fn options(number: u8) -> Header {
    let padding = if number == 43 { [0; 6] } else { [1, 4, 0, 0, 0, 0] };
    (number, Ipv6RawExtHeader::new_raw(IpNumber(0), &padding).unwrap().to_bytes().to_vec())
}

fn fragment(offset: u16, more: bool) -> Header {
    let offset = IpFragOffset::try_new(offset).unwrap();
    (44, Ipv6FragmentHeader::new(IpNumber(0), offset, more, 7).to_bytes().to_vec())
}

/// A SYN behind these headers.
fn behind(from: SocketAddr, to: SocketAddr, headers: &[Header]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (place, (_, header)) in headers.iter().enumerate() {
        bytes.push(headers.get(place + 1).map_or(IpNumber::TCP.0, |(number, _)| *number));
        bytes.extend(&header[1..]);
    }
    bytes.extend(segment(from, to, syn));
    packet(from.ip(), to.ip(), IpNumber(headers[0].0), &[], &bytes)
}

/// The classes that exist with addresses of this family.
fn of_family(is_ipv4: bool) -> Vec<Class> {
    let own = if is_ipv4 { v4_classes() } else { v6_classes() };
    [plain_classes(), own, other_classes()].into_iter().flatten().collect()
}

/// The counter that went up, and the action, of the steering program.
fn fate_of((action, counted): (u32, Vec<&'static str>)) -> Fate {
    let [by] = counted[..] else { panic!("counted {counted:?}") };
    match action {
        XDP_REDIRECT if by.starts_with("steered_") => Served,
        XDP_DROP => Dropped(by),
        XDP_PASS => Passed(by),
        _ => panic!("action {action}, {by}"),
    }
}

#[test]
fn the_steering_program_serves_or_drops_what_is_ours() {
    for (ours, peer) in ends() {
        with_program(&[], |program, run| {
            program.addresses().add(ours.ip()).unwrap();
            for case in 0..3 {
                for Class { name, make, fates } in of_family(ours.is_ipv4()) {
                    // The source is not that of the connection.
                    if name == "from ourselves" && case == 1 {
                        continue;
                    }
                    assert_eq!(fate_of(run(&make(peer, ours))), fates[[2, 0, 1][case]], "{name}, {ours}");
                }
                if case == 0 {
                    program.add_flow(ours, peer).unwrap();
                }
                if case == 1 {
                    program.remove_flow(ours, peer);
                    program.add_listener(None, ours.port()).unwrap();
                }
            }
        });
    }
}

/// A queue that was added a moment ago has no socket yet.
#[test]
fn the_steering_program_drops_what_is_ours_on_a_queue_without_a_socket() {
    for (ours, peer) in ends() {
        let mut storage = MaybeUninit::uninit();
        let skeleton = load_skeleton(&ProgramConfig::default(), 0, &mut storage).unwrap();
        let program = SteeringProgram::from_skeleton(&skeleton).unwrap();
        program.station().set(STATION).unwrap();
        program.addresses().add(ours.ip()).unwrap();
        let mut expected = ProgramCounters::default();
        for is_listener in [false, true] {
            if is_listener {
                program.remove_flow(ours, peer);
                program.add_listener(None, ours.port()).unwrap();
            } else {
                program.add_flow(ours, peer).unwrap();
            }
            let frame = frame(&[], &tcp(peer, ours, syn));
            let input = ProgramInput { data_in: Some(&frame), ..Default::default() };
            assert_eq!(skeleton.progs.xwarp_steer.test_run(input).unwrap().return_value, XDP_DROP);
            expected.dropped_no_socket += 1;
            assert_eq!(program.counters().unwrap(), expected);
        }
    }
}

#[test]
fn the_switch_and_the_relay_serve_or_drop_what_is_a_clients() {
    let mut storage = MaybeUninit::uninit();
    let skeleton = load_switch(&ProgramConfig::default(), &mut storage).unwrap();
    let switch = Switch::from_skeleton(&skeleton).unwrap();
    switch.station().set(STATION).unwrap();
    let mut storage = MaybeUninit::uninit();
    let relay = load_relay(&switch, 1, &mut storage).unwrap();
    let run = |relayed: bool, frame: &[u8]| {
        let before = switch.counters().unwrap();
        let input = ProgramInput { data_in: Some(frame), ..Default::default() };
        let program = if relayed { &relay.progs.xwarp_relay } else { &skeleton.progs.xwarp_uplink };
        let action = program.test_run(input).unwrap().return_value;
        let after = switch.counters().unwrap();
        let counted = before.iter().zip(after.iter()).filter(|((_, b), (_, a))| a > b);
        let counted: Vec<_> = counted.map(|((name, _), _)| name.strip_prefix("switch.").unwrap()).collect();
        match (relayed, action, &counted[..]) {
            (false, _, ["to_client"]) | (true, TC_ACT_REDIRECT, []) => Served,
            (false, XDP_DROP, [by]) | (true, TC_ACT_SHOT, [by]) => Dropped(by),
            (false, XDP_PASS, [by]) | (true, TC_ACT_UNSPEC, [by]) => Passed(by),
            other => panic!("{other:?}"),
        }
    };
    for (ours, peer) in ends() {
        switch.addresses().add(ours.ip()).unwrap();
        for is_owned in [false, true] {
            if is_owned {
                switch.add_owner(None, ours.port(), CLIENT).unwrap();
            }
            for Class { name, make, fates } in of_family(ours.is_ipv4()) {
                // What a port's owner gets does not depend on connections.
                let [connected, listening, nobodys] = fates;
                let fate = match (is_owned, connected, listening) {
                    (false, ..) => nobodys,
                    (true, Served, _) => Served,
                    (true, ..) => listening,
                };
                let frame = make(peer, ours);
                assert_eq!(run(false, &frame), fate, "{name}, {ours}, by the switch");
                // Behind the relay the switch checks the source, and tc gets no frame with tags.
                if name != "from ourselves" && !frame[12..].starts_with(&[0x81, 0]) {
                    assert_eq!(run(true, &frame), fate, "{name}, {ours}, by the relay");
                }
            }
        }
        switch.remove_owner(None, ours.port());
    }
}
