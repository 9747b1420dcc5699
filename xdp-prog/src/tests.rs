//! The steering decision for every kind of frame, by running the program in the kernel on frames made
//! here (`BPF_PROG_TEST_RUN`). Needs root.

use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use etherparse::{EtherType, IpNumber, Ipv4Header, Ipv4Options, Ipv6Header, TcpHeader};
use libbpf_rs::ProgramInput;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::*;

mod classes;

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;

/// The Ethernet address to which the frames of the tests are sent.
pub(crate) const STATION: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Calls `f` with the program, loaded for `vlans` with a socket on queue 0, and a way to run it: frame in,
/// (action, names of the counters that went up by one) out.
fn with_program(vlans: &[u16], f: impl FnOnce(&SteeringProgram, &dyn Fn(&[u8]) -> (u32, Vec<&'static str>))) {
    let mut storage = MaybeUninit::uninit();
    let config = ProgramConfig { vlans, ..ProgramConfig::default() };
    let skeleton = load_skeleton(&config, 0, &mut storage).unwrap();
    let program = SteeringProgram::from_skeleton(&skeleton).unwrap();
    let socket = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
    program.add_socket(0, socket.as_fd()).unwrap();
    program.station().set(STATION).unwrap();
    let run = |frame: &[u8]| {
        let before = program.counters().unwrap();
        let input = ProgramInput { data_in: Some(frame), ..Default::default() };
        let action = skeleton.progs.xwarp_steer.test_run(input).unwrap().return_value;
        let after = program.counters().unwrap();
        let counted = before.iter().zip(after.iter()).filter(|((_, b), (_, a))| a > b);
        let name = |name: &'static str| name.strip_prefix("program.").unwrap_or(name);
        let names = counted.map(|((n, b), (_, a))| if a == b + 1 { name(n) } else { "counted twice" });
        (action, names.collect())
    };
    f(&program, &|frame| {
        let found = run(frame);
        let (addresses, rest) = frame.split_at(12);
        if !matches!(rest, [0x81, 0x00, ..] | [0x88, 0xa8, ..]) {
            // The program parses frames with tags in another way.
            let tagged = [addresses, &[0x81, 0x00, 0x60, 0], rest].concat();
            assert_eq!(run(&tagged), found, "with a priority");
        }
        found
    });
}

fn steered(by: &'static str) -> (u32, Vec<&'static str>) {
    (XDP_REDIRECT, vec![by])
}

fn dropped(by: &'static str) -> (u32, Vec<&'static str>) {
    (XDP_DROP, vec![by])
}

fn passed(by: &'static str) -> (u32, Vec<&'static str>) {
    (XDP_PASS, vec![by])
}

pub(crate) fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Our end and the peer's, by family.
pub(crate) fn ends() -> [(SocketAddr, SocketAddr); 2] {
    [
        (at("192.0.2.1:4791"), at("198.51.100.9:33000")),
        (at("[2001:db8::1]:4791"), at("[2001:db8:9::9]:33000")),
    ]
}

pub(crate) fn ethernet(tags: &[(u16, u16)], proto: EtherType, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    for (tpid, tci) in tags {
        frame.extend_from_slice(&tpid.to_be_bytes());
        frame.extend_from_slice(&tci.to_be_bytes());
    }
    frame.extend_from_slice(&proto.0.to_be_bytes());
    frame.extend_from_slice(packet);
    frame
}

pub(crate) fn frame(tags: &[(u16, u16)], packet: &[u8]) -> Vec<u8> {
    let proto = if packet.first().is_some_and(|b| b >> 4 == 4) { EtherType::IPV4 } else { EtherType::IPV6 };
    ethernet(tags, proto, packet)
}

pub(crate) fn packet(
    source: IpAddr,
    destination: IpAddr,
    protocol: IpNumber,
    options: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    let mut out = Vec::new();
    match (source, destination) {
        (IpAddr::V4(s), IpAddr::V4(d)) => {
            let mut ip = Ipv4Header::new(0, 64, protocol, s.octets(), d.octets()).unwrap();
            ip.options = Ipv4Options::try_from(options).unwrap();
            ip.set_payload_len(payload.len()).unwrap();
            ip.header_checksum = ip.calc_header_checksum();
            ip.write_raw(&mut out).unwrap();
        }
        (IpAddr::V6(s), IpAddr::V6(d)) => {
            let (source, destination) = (s.octets(), d.octets());
            let payload_length = payload.len() as u16;
            let ip = Ipv6Header {
                payload_length,
                next_header: protocol,
                hop_limit: 64,
                source,
                destination,
                ..Default::default()
            };
            ip.write(&mut out).unwrap();
        }
        _ => panic!("addresses of two families"),
    }
    out.extend_from_slice(payload);
    out
}

pub(crate) fn segment(
    source: SocketAddr,
    destination: SocketAddr,
    flags: impl FnOnce(&mut TcpHeader),
) -> Vec<u8> {
    let mut tcp = TcpHeader::new(source.port(), destination.port(), 1, 1000);
    flags(&mut tcp);
    let mut bytes = tcp.to_bytes().to_vec();
    bytes.extend_from_slice(b"payload");
    bytes
}

pub(crate) fn tcp(
    source: SocketAddr,
    destination: SocketAddr,
    flags: impl FnOnce(&mut TcpHeader),
) -> Vec<u8> {
    packet(source.ip(), destination.ip(), IpNumber::TCP, &[], &segment(source, destination, flags))
}

/// An ICMP error from a router on the way, to us.
fn icmp(ours: SocketAddr, kind: u8, quoted: &[u8]) -> Vec<u8> {
    let (router, protocol) = match ours.ip() {
        IpAddr::V4(_) => (at("203.0.113.1:0").ip(), IpNumber::ICMP),
        IpAddr::V6(_) => (at("[2001:db8:5::1]:0").ip(), IpNumber::IPV6_ICMP),
    };
    let message = [&[kind, 0, 0, 0, 0, 0, 5, 0], quoted].concat();
    packet(router, ours.ip(), protocol, &[], &message)
}

pub(crate) fn ack(tcp: &mut TcpHeader) {
    tcp.ack = true;
}

pub(crate) fn syn(tcp: &mut TcpHeader) {
    tcp.syn = true;
}

fn syn_ack(tcp: &mut TcpHeader) {
    (tcp.syn, tcp.ack) = (true, true);
}

fn rst(tcp: &mut TcpHeader) {
    tcp.rst = true;
}

#[test]
fn segments_of_a_known_connection_are_steered() {
    for (ours, peer) in ends() {
        with_program(&[], |program, run| {
            let one = frame(&[], &tcp(peer, ours, ack));
            assert_eq!(run(&one), passed("passed_tcp"), "not ours yet");
            program.add_flow(ours, peer).unwrap();
            for flags in [ack, syn, syn_ack, rst] {
                assert_eq!(run(&frame(&[], &tcp(peer, ours, flags))), steered("steered_flow"));
            }
            assert_eq!(run(&frame(&[], &tcp(ours, peer, ack))), passed("passed_tcp"), "the other direction");
            for (other_peer, other_ours) in [
                (SocketAddr::new(peer.ip(), peer.port() + 1), ours),
                (peer, SocketAddr::new(ours.ip(), ours.port() + 1)),
                (SocketAddr::new(other_address(peer.ip()), peer.port()), ours),
                (peer, SocketAddr::new(other_address(ours.ip()), ours.port())),
            ] {
                assert_eq!(run(&frame(&[], &tcp(other_peer, other_ours, ack))), passed("passed_tcp"));
            }
            program.remove_flow(ours, peer);
            assert_eq!(run(&one), passed("passed_tcp"), "no longer ours");
        });
    }
}

fn other_address(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4((u32::from(v4) ^ 0x100).into()),
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) ^ (1 << 80)).into()),
    }
}

/// A mapped address on the wire is a forgery: its packets must reach neither an IPv4 connection nor a listener, and
/// a rule for a mapped address must not be the rule of the IPv4 address.
#[test]
fn rfc4291_s2_5_5_2_ipv4_mapped_addresses_pass_and_share_no_key_with_ipv4() {
    let (ours, peer) = ends()[0];
    let mapped = |end: SocketAddr| match end.ip() {
        IpAddr::V4(v4) => SocketAddr::new(v4.to_ipv6_mapped().into(), end.port()),
        IpAddr::V6(_) => end,
    };
    let (ours6, peer6) = ends()[1];
    with_program(&[], |program, run| {
        program.add_flow(ours, peer).unwrap();
        program.add_flow(mapped(ours), mapped(peer)).unwrap();
        program.add_listener(None, ours.port()).unwrap();
        program.addresses().add(ours.ip()).unwrap();
        program.addresses().add(mapped(ours).ip()).unwrap();
        program.addresses().add(ours6.ip()).unwrap();
        for (source, destination) in
            [(mapped(peer), mapped(ours)), (mapped(peer), ours6), (peer6, mapped(ours))]
        {
            for flags in [syn, ack, rst] {
                assert_eq!(run(&frame(&[], &tcp(source, destination, flags))), passed("passed_mapped"));
            }
        }
        let quoted = tcp(mapped(ours), mapped(peer), ack);
        assert_eq!(run(&frame(&[], &icmp(ours6, 1, &quoted))), passed("passed_mapped"));
        program.remove_flow(mapped(ours), mapped(peer));
        assert_eq!(run(&frame(&[], &tcp(peer, ours, ack))), steered("steered_flow"), "still ours");
        program.addresses().remove(mapped(ours).ip());
        let other_port = SocketAddr::new(peer.ip(), peer.port() + 1);
        assert_eq!(run(&frame(&[], &tcp(other_port, ours, syn))), steered("steered_listener"));
    });
}

/// The keys compare by version too: an IPv6 address whose first octets are those of an IPv4 address is another one.
#[test]
fn keys_of_the_two_families_never_collide() {
    let v4: IpAddr = "192.0.2.1".parse().unwrap();
    let octets = [192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for v6 in [IpAddr::from(octets), "::ffff:192.0.2.1".parse().unwrap(), "::192.0.2.1".parse().unwrap()] {
        assert_ne!(keys::address(v4), keys::address(v6));
        assert_ne!(keys::port(Some(v4), 7), keys::port(Some(v6), 7));
    }
    assert_ne!(keys::port(Some("0.0.0.1".parse().unwrap()), 7), keys::port(None, 7));
}

#[test]
fn only_syns_to_a_listening_port_are_steered() {
    for (ours, peer) in ends() {
        with_program(&[], |program, run| {
            program.add_listener(Some(ours.ip()), ours.port()).unwrap();
            assert_eq!(run(&frame(&[], &tcp(peer, ours, syn))), steered("steered_listener"));
            for flags in [ack, syn_ack, rst] {
                assert_eq!(run(&frame(&[], &tcp(peer, ours, flags))), passed("passed_tcp"));
            }
            let elsewhere = SocketAddr::new(other_address(ours.ip()), ours.port());
            assert_eq!(run(&frame(&[], &tcp(peer, elsewhere, syn))), passed("passed_tcp"));
            let other_port = SocketAddr::new(ours.ip(), ours.port() + 1);
            assert_eq!(run(&frame(&[], &tcp(peer, other_port, syn))), passed("passed_tcp"));
            program.remove_listener(Some(ours.ip()), ours.port());
            assert_eq!(run(&frame(&[], &tcp(peer, ours, syn))), passed("passed_tcp"));
        });
    }
}

/// A wildcard listener answers on the interface's addresses, not on those to which this host forwards.
#[test]
fn a_wildcard_listener_answers_on_our_addresses_only() {
    for (ours, peer) in ends() {
        for wildcard in [None, Some(at("0.0.0.0:0").ip()), Some(at("[::]:0").ip())] {
            with_program(&[], |program, run| {
                program.add_listener(wildcard, ours.port()).unwrap();
                let one = frame(&[], &tcp(peer, ours, syn));
                assert_eq!(run(&one), passed("passed_tcp"), "an address of another host");
                program.addresses().add(ours.ip()).unwrap();
                assert_eq!(run(&one), steered("steered_listener"));
                program.addresses().remove(ours.ip());
                assert_eq!(run(&one), passed("passed_tcp"));
            });
        }
    }
}

#[test]
fn ip_options_are_looked_behind() {
    let (ours, peer) = ends()[0];
    with_program(&[], |program, run| {
        program.add_flow(ours, peer).unwrap();
        for options in [&[1u8; 4][..], &[1; 40]] {
            let ip = packet(peer.ip(), ours.ip(), IpNumber::TCP, options, &segment(peer, ours, ack));
            assert_eq!(run(&frame(&[], &ip)), steered("steered_flow"), "{} bytes of options", options.len());
        }
    });
}

/// With 0, 1 or 2 tags configured, exactly the frames with these tags are ours.
#[test]
fn vlan_tags_must_be_ours() {
    let frames: [&[(u16, u16)]; 8] = [
        &[],
        &[(0x8100, 42)],
        &[(0x8100, 43)],
        &[(0x88a8, 7), (0x8100, 42)],
        &[(0x8100, 7), (0x8100, 42)],
        &[(0x88a8, 42), (0x8100, 7)],
        &[(0x88a8, 7)],
        &[(0x88a8, 7), (0x8100, 42), (0x8100, 9)],
    ];
    let ours_by_config: [(&[u16], [bool; 8]); 3] = [
        (&[], [true, false, false, false, false, false, false, false]),
        (&[42], [false, true, false, false, false, false, false, false]),
        (&[7, 42], [false, false, false, true, true, false, false, false]),
    ];
    for (ours, peer) in ends() {
        for (vlans, is_ours) in ours_by_config {
            with_program(vlans, |program, run| {
                program.add_flow(ours, peer).unwrap();
                for (tags, is_ours) in frames.into_iter().zip(is_ours) {
                    let expected = if is_ours { steered("steered_flow") } else { passed("passed_vlan") };
                    assert_eq!(run(&frame(tags, &tcp(peer, ours, ack))), expected, "{tags:?} with {vlans:?}");
                }
            });
        }
    }
}

/// The priority and drop bits of a tag do not matter, and id 0 is no VLAN (IEEE 802.1Q).
#[test]
fn priorities_are_no_vlans() {
    let (ours, peer) = ends()[0];
    with_program(&[], |program, run| {
        program.add_flow(ours, peer).unwrap();
        assert_eq!(run(&frame(&[(0x8100, 0x6000)], &tcp(peer, ours, ack))), steered("steered_flow"));
    });
    with_program(&[42], |program, run| {
        program.add_flow(ours, peer).unwrap();
        assert_eq!(run(&frame(&[(0x8100, 0xf02a)], &tcp(peer, ours, ack))), steered("steered_flow"));
    });
}

#[test]
fn more_than_two_vlans_are_refused() {
    assert!(
        load_skeleton(
            &ProgramConfig { vlans: &[1, 2, 3], ..ProgramConfig::default() },
            0,
            &mut MaybeUninit::uninit()
        )
        .is_err()
    );
}

#[test]
fn icmp_errors_that_quote_us_are_steered() {
    for (ours, peer) in ends() {
        with_program(&[], |program, run| {
            let quoted = tcp(ours, peer, ack);
            let kinds: &[u8] = if ours.is_ipv4() { &[3, 11, 12] } else { &[1, 2, 3, 4] };
            let others: &[u8] = if ours.is_ipv4() { &[0, 4, 5, 8] } else { &[0, 5, 128, 134, 135, 136] };
            for kind in kinds {
                assert_eq!(
                    run(&frame(&[], &icmp(ours, *kind, &quoted))),
                    passed("passed_icmp"),
                    "not ours yet"
                );
            }
            program.add_flow(ours, peer).unwrap();
            for kind in kinds {
                assert_eq!(
                    run(&frame(&[], &icmp(ours, *kind, &quoted))),
                    steered("steered_icmp"),
                    "type {kind}"
                );
            }
            for kind in others {
                assert_eq!(
                    run(&frame(&[], &icmp(ours, *kind, &quoted))),
                    passed("passed_icmp"),
                    "type {kind}"
                );
            }
            let foreign = tcp(peer, ours, ack);
            assert_eq!(
                run(&frame(&[], &icmp(ours, kinds[0], &foreign))),
                passed("passed_icmp"),
                "we did not send that"
            );
            let udp = packet(ours.ip(), peer.ip(), IpNumber::UDP, &[], &segment(ours, peer, ack));
            assert_eq!(
                run(&frame(&[], &icmp(ours, kinds[0], &udp))),
                passed("passed_icmp"),
                "a quoted UDP packet"
            );
        });
    }
}

/// RFC 792 guarantees eight bytes of the quoted packet's payload: these suffice, and seven do not.
#[test]
fn a_quotation_may_end_after_the_sequence_number() {
    for (ours, peer) in ends() {
        with_program(&[], |program, run| {
            program.add_flow(ours, peer).unwrap();
            let quoted = tcp(ours, peer, ack);
            let ip_header = if ours.is_ipv4() { 20 } else { 40 };
            let kind = if ours.is_ipv4() { 3 } else { 2 };
            assert_eq!(
                run(&frame(&[], &icmp(ours, kind, &quoted[..ip_header + 8]))),
                steered("steered_icmp")
            );
            for len in 0..ip_header + 8 {
                assert_eq!(
                    run(&frame(&[], &icmp(ours, kind, &quoted[..len]))),
                    passed("passed_icmp"),
                    "{len} bytes"
                );
            }
        });
    }
}

/// Sets the field of an IPv4 packet with the flags and the offset of a fragment.
pub(crate) fn with_fragment_field(mut packet: Vec<u8>, field: u16) -> Vec<u8> {
    packet[6..8].copy_from_slice(&field.to_be_bytes());
    packet
}

/// A segment behind a fragment header of IPv6, with the offset field of that header.
pub(crate) fn fragment_v6(peer: SocketAddr, ours: SocketAddr, offset: u16) -> Vec<u8> {
    let [high, low] = offset.to_be_bytes();
    let fragment = [&[6, 0, high, low, 0, 0, 0, 9][..], &segment(peer, ours, ack)].concat();
    packet(peer.ip(), ours.ip(), IpNumber::IPV6_FRAGMENTATION_HEADER, &[], &fragment)
}

/// The kernel would reassemble a fragmented segment of ours, and reset the connection, which it does not know. Its fragments are
/// steered instead: the first one has the ports, and the others its identification. Those of other packets pass.
#[test]
fn attack_fragments_of_our_segments_do_not_reach_the_kernel() {
    let (ours, peer) = ends()[0];
    for listening in [false, true] {
        with_program(&[], |program, run| {
            let first = with_fragment_field(tcp(peer, ours, ack), 0x2000);
            assert_eq!(run(&frame(&[], &first)), passed("passed_fragment"), "not ours yet");
            if listening {
                program.add_listener(Some(ours.ip()), ours.port()).unwrap();
            } else {
                program.add_flow(ours, peer).unwrap();
                // Don't fragment is no fragment.
                let whole = with_fragment_field(tcp(peer, ours, ack), 0x4000);
                assert_eq!(run(&frame(&[], &whole)), steered("steered_flow"));
            }
            let later =
                [0x2001, 0x0001, 0x1fff].map(|field| with_fragment_field(tcp(peer, ours, ack), field));
            for later in &later {
                assert_eq!(run(&frame(&[], later)), passed("passed_fragment"), "before the first");
            }
            assert_eq!(run(&frame(&[], &first)), steered("steered_fragment"));
            // It may have the ports only.
            assert_eq!(run(&frame(&[], &first[..24])), steered("steered_fragment"));
            for later in later {
                assert_eq!(run(&frame(&[], &later)), steered("steered_fragment"));
                let mut other = later.clone();
                other[5] ^= 1;
                assert_eq!(run(&frame(&[], &other)), passed("passed_fragment"), "another packet");
                let mut udp = later;
                udp[9] = 17;
                assert_eq!(run(&frame(&[], &udp)), passed("passed_fragment"), "another protocol");
            }
        });
    }
    let (ours, peer) = ends()[1];
    with_program(&[], |program, run| {
        assert_eq!(run(&frame(&[], &fragment_v6(peer, ours, 1))), passed("passed_fragment"), "not ours yet");
        program.add_flow(ours, peer).unwrap();
        assert_eq!(run(&frame(&[], &fragment_v6(peer, ours, 8))), passed("passed_fragment"), "a later one");
        assert_eq!(run(&frame(&[], &fragment_v6(peer, ours, 1))), steered("steered_fragment"));
        assert_eq!(
            run(&frame(&[], &fragment_v6(peer, ours, 0))),
            steered("steered_flow"),
            "a whole segment (RFC 6946)"
        );
        assert_eq!(run(&frame(&[], &fragment_v6(peer, ours, 8))), steered("steered_fragment"));
        let (others, theirs) = (other_address(peer.ip()), peer.port());
        let other = fragment_v6(SocketAddr::new(others, theirs), ours, 8);
        assert_eq!(run(&frame(&[], &other)), passed("passed_fragment"), "of another host");
    });
}

/// Sources that no other host can have, ours among them (RFC 1122 section 3.2.1.3).
pub(crate) fn martians(ours: SocketAddr) -> Vec<SocketAddr> {
    let hosts: &[&str] = if ours.is_ipv4() {
        &["127.0.0.1", "0.0.0.0", "0.1.2.3", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"]
    } else {
        &["::1", "::", "ff02::1"]
    };
    let hosts = hosts.iter().map(|host| host.parse().unwrap()).chain([ours.ip()]);
    hosts.map(|host| SocketAddr::new(host, 33000)).collect()
}

#[test]
fn attack_syns_from_addresses_that_no_host_has_are_dropped() {
    for (ours, peer) in ends() {
        with_program(&[], |program, run| {
            program.add_listener(None, ours.port()).unwrap();
            program.addresses().add(ours.ip()).unwrap();
            for martian in martians(ours) {
                assert_eq!(
                    run(&frame(&[], &tcp(martian, ours, syn))),
                    dropped("dropped_martian"),
                    "{martian}"
                );
            }
            assert_eq!(run(&frame(&[], &tcp(peer, ours, syn))), steered("steered_listener"));
        });
    }
}

/// In promiscuous mode, frames to other stations arrive too; the kernel ignores them.
#[test]
fn attack_frames_to_another_station_are_not_ours() {
    for (ours, peer) in ends() {
        with_program(&[], |program, run| {
            program.add_flow(ours, peer).unwrap();
            program.add_listener(Some(ours.ip()), ours.port()).unwrap();
            for flags in [ack, syn] {
                let mut frame = frame(&[], &tcp(peer, ours, flags));
                assert_eq!(run(&frame), steered("steered_flow"));
                frame[5] ^= 1;
                assert_eq!(run(&frame), passed("passed_other_station"));
            }
        });
    }
}

#[test]
fn everything_else_passes() {
    let (ours, peer) = ends()[0];
    let (ours6, peer6) = ends()[1];
    with_program(&[], |program, run| {
        program.add_flow(ours, peer).unwrap();
        program.add_flow(ours6, peer6).unwrap();
        let udp = packet(peer.ip(), ours.ip(), IpNumber::UDP, &[], &segment(peer, ours, ack));
        assert_eq!(run(&frame(&[], &udp)), passed("passed_not_tcp"));
        assert_eq!(run(&ethernet(&[], EtherType::ARP, &[0; 28])), passed("passed_not_ip"));
        for first in [0x01, 0xff] {
            let mut group = frame(&[], &tcp(peer, ours, ack));
            group[0] = first;
            assert_eq!(run(&group), passed("passed_not_unicast"), "to a group of stations");
        }
        let mut wrong = tcp(peer, ours, ack);
        wrong[0] = 0x65;
        assert_eq!(
            run(&ethernet(&[], EtherType::IPV4, &wrong)),
            passed("passed_truncated"),
            "version 6 in an IPv4 frame"
        );
        wrong[0] = 0x44;
        assert_eq!(
            run(&ethernet(&[], EtherType::IPV4, &wrong)),
            passed("passed_truncated"),
            "a header of 16 bytes"
        );
    });
}

/// A frame truncated at any length is steered if it includes the ports and flags, and passed otherwise.
#[test]
fn a_frame_cut_anywhere_does_no_harm() {
    let tags: [&[(u16, u16)]; 2] = [&[], &[(0x88a8, 7), (0x8100, 42)]];
    for ((ours, peer), tags) in ends().into_iter().flat_map(|ends| tags.map(|tags| (ends, tags))) {
        let vlans: Vec<u16> = tags.iter().map(|(_, id)| *id).collect();
        with_program(&vlans, |program, run| {
            program.add_flow(ours, peer).unwrap();
            let whole = frame(tags, &tcp(peer, ours, ack));
            let headers = 14 + 4 * tags.len() + if ours.is_ipv4() { 20 } else { 40 } + 20;
            // The kernel refuses to run a program on less than an Ethernet header.
            for len in 14..=whole.len() {
                let (action, counted) = run(&whole[..len]);
                assert_eq!(counted.len(), 1);
                assert_eq!(action == XDP_REDIRECT, len >= headers, "{len} bytes");
            }
        });
    }
}

/// A network namespace with one veth pair, deleted on drop.
struct Namespace(String);

impl Namespace {
    fn new() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let this = Self(format!("xwp-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        ip(&["netns", "add", &this.0]);
        ip(&["-n", &this.0, "link", "add", "xw0", "type", "veth", "peer", "name", "xw1"]);
        this
    }

    /// Runs `f` in the namespace, on its own thread, with the index of `xw0`.
    fn run(&self, f: impl FnOnce(u32) + Send) {
        let index =
            ip(&["-n", &self.0, "-o", "link", "show", "xw0"]).split(':').next().unwrap().parse().unwrap();
        let joined = std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let namespace = std::fs::File::open(format!("/var/run/netns/{}", self.0)).unwrap();
                let kind = rustix::thread::LinkNameSpaceType::Network;
                rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(kind)).unwrap();
                f(index);
            });
            inside.join()
        });
        joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&["netns", "del", &self.0]);
    }
}

fn ip(arguments: &[&str]) -> String {
    let output = std::process::Command::new("ip").args(arguments).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Every configuration that changes the program for the verifier.
fn configurations() -> [ProgramConfig<'static>; 6] {
    let of = |vlans, multi_buffer| ProgramConfig { vlans, multi_buffer };
    [of(&[], false), of(&[], true), of(&[7], false), of(&[7], true), of(&[7, 8], false), of(&[7, 8], true)]
}

/// `CAP_PERFMON` allows arithmetic on packet pointers that the verifier otherwise refuses. `BPF_F_TEST_REG_INVARIANTS`
/// (Linux 6.8) makes it refuse a program whose register bounds contradict each other, where it otherwise only writes a
/// warning to the kernel log; that arithmetic caused one.
#[test]
fn two_capabilities_are_enough_to_load_the_program() {
    const TEST_REG_INVARIANTS: u32 = 1 << 7;
    let loads = |rights: CapabilitySet, flags| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let only = CapabilitySets { effective: rights, permitted: rights, inheritable: rights };
                set_capabilities(None, only).unwrap();
                configurations()
                    .map(|config| load_skeleton(&config, flags, &mut MaybeUninit::uninit()).map(drop))
            });
            thread.join().unwrap()
        })
    };
    for flags in [0, TEST_REG_INVARIANTS] {
        for loaded in loads(CapabilitySet::BPF | CapabilitySet::NET_ADMIN, flags) {
            loaded.unwrap();
        }
    }
    for refused in loads(CapabilitySet::BPF, 0) {
        assert!(refused.unwrap_err().is_permission());
    }
}

/// A program that is not ours, for tests that need one.
const FOREIGN: &str = "xwarp_to_xsk";

fn with_foreign(f: impl FnOnce(BorrowedFd<'_>)) {
    let mut storage = MaybeUninit::uninit();
    let skeleton = crate::switch::load_skeleton(&ProgramConfig::default(), &mut storage).unwrap();
    f(skeleton.progs.xwarp_to_xsk.as_fd());
}

fn there(index: u32) -> Option<(u32, String, AttachMode)> {
    attached_to(index).unwrap().map(|there| (there.id, there.name, there.mode))
}

#[test]
fn netns_a_foreign_program_is_named_and_replaced_only_on_demand() {
    for mode in [AttachMode::Native, AttachMode::Generic] {
        Namespace::new().run(|index| {
            with_foreign(|foreign| {
                let _link = attach::attach(foreign, index, mode).unwrap();
                refuses_then_replaces(index, attach::program_id(foreign).unwrap(), mode);
            });
        });
    }
}

/// Attachment without a link, the older way: the program stays when its owner exits.
#[test]
fn netns_a_program_without_a_link_is_named_and_replaced_too() {
    for (mode, flags) in [
        (AttachMode::Native, libbpf_rs::XdpFlags::DRV_MODE),
        (AttachMode::Generic, libbpf_rs::XdpFlags::SKB_MODE),
    ] {
        Namespace::new().run(|index| {
            with_foreign(|foreign| {
                libbpf_rs::Xdp::new(foreign).attach(index.cast_signed(), flags).unwrap();
                refuses_then_replaces(index, attach::program_id(foreign).unwrap(), mode);
            });
        });
    }
}

fn refuses_then_replaces(index: u32, id: u32, mode: AttachMode) {
    let mut ours = SteeringProgram::load(&ProgramConfig::default()).unwrap();
    let refused = ours.attach(index, AttachMode::Native, false).unwrap_err();
    let AttachError::Foreign(found) = refused else { panic!("{refused:?}") };
    assert_eq!((found.id, found.name.as_str(), found.mode), (id, FOREIGN, mode));
    assert!(ours.attach(index, AttachMode::Generic, false).is_err());

    ours.attach(index, AttachMode::Native, true).unwrap();
    let now = attached_to(index).unwrap().unwrap();
    assert_eq!((now.id, now.name.as_str(), now.mode), (ours.id(), PROGRAM_NAME, AttachMode::Native));
    assert_eq!(now.holder.map(|holder| holder.pid), Some(std::process::id()));
    assert_ne!(ours.id(), 0);
    // Opening fails later: the other program is there again.
    drop(ours);
    assert_eq!(there(index), Some((id, FOREIGN.to_owned(), mode)));

    let mut ours = SteeringProgram::load(&ProgramConfig::default()).unwrap();
    ours.attach(index, AttachMode::Native, true).unwrap();
    ours.give_up_replaced();
    ours.detach();
    drop(ours);
    assert_eq!(there(index), None);
}

/// Failing leaves no trace: the other program is put back.
#[test]
fn netns_a_program_that_cannot_be_attached_replaces_nothing() {
    let namespace = Namespace::new();
    // Beyond what a veth takes in native mode from a program without frames of several buffers.
    for end in ["xw0", "xw1"] {
        ip(&["-n", &namespace.0, "link", "set", end, "mtu", "9000"]);
    }
    namespace.run(|index| {
        with_foreign(|foreign| {
            let _link = attach::attach(foreign, index, AttachMode::Generic).unwrap();
            let before = there(index);
            let mut ours = SteeringProgram::load(&ProgramConfig::default()).unwrap();
            let refused = ours.attach(index, AttachMode::Native, true).unwrap_err();
            assert!(matches!(refused, AttachError::System(_)), "{refused:?}");
            assert_eq!(there(index), before);
        });
    });
}

/// The program of a process that lives is never replaced: its connections would end.
#[test]
fn netns_attack_the_program_of_a_living_process_is_not_replaced() {
    Namespace::new().run(|index| {
        let mut theirs = SteeringProgram::load(&ProgramConfig::default()).unwrap();
        theirs.attach(index, AttachMode::Native, false).unwrap();
        let mut ours = SteeringProgram::load(&ProgramConfig::default()).unwrap();
        for mode in [AttachMode::Native, AttachMode::Generic] {
            let refused = ours.attach(index, mode, true).unwrap_err();
            let AttachError::Foreign(found) = refused else { panic!("{refused:?}") };
            assert_eq!(found.id, theirs.id());
            assert_eq!(theirs.keep_attached().unwrap(), Kept::Attached);
        }
        let mut switch = Switch::load(&ProgramConfig::default()).unwrap();
        drop(theirs);
        switch.attach(index, AttachMode::Native).unwrap();
        assert!(matches!(ours.attach(index, AttachMode::Native, true), Err(AttachError::Foreign(_))));
        assert_eq!(switch.keep_attached().unwrap(), Kept::Attached);
    });
}

/// No event announces that a link was detached (`bpftool link detach`, other loaders).
#[test]
fn netns_a_program_that_somebody_detaches_is_attached_again() {
    for mode in [AttachMode::Native, AttachMode::Generic] {
        Namespace::new().run(|index| {
            let mut ours = SteeringProgram::load(&ProgramConfig::default()).unwrap();
            ours.attach(index, mode, false).unwrap();
            let found = there(index);
            for _ in 0..2 {
                assert_eq!(ours.keep_attached().unwrap(), Kept::Attached);
                ours.with_link(|link| attach::detach(link.unwrap())).unwrap();
                assert_eq!(there(index), None);
                assert_eq!(ours.keep_attached().unwrap(), Kept::Again);
                assert_eq!(there(index), found);
            }
            with_foreign(|foreign| {
                ours.with_link(|link| attach::detach(link.unwrap())).unwrap();
                let _link = attach::attach(foreign, index, mode).unwrap();
                let taken = ours.keep_attached().unwrap_err();
                assert!(matches!(&taken, AttachError::Foreign(by) if by.name == FOREIGN), "{taken:?}");
            });
            assert_eq!(ours.keep_attached().unwrap(), Kept::Again, "the other one is gone");
        });
    }
}

#[test]
fn netns_modes_change_and_dropping_detaches() {
    Namespace::new().run(|index| {
        let mut ours = SteeringProgram::load(&ProgramConfig::default()).unwrap();
        for mode in [AttachMode::Native, AttachMode::Native, AttachMode::Generic] {
            ours.attach(index, mode, false).unwrap();
            assert_eq!(there(index).map(|(id, _, mode)| (id, mode)), Some((ours.id(), mode)));
        }
        drop(ours);
        assert_eq!(there(index), None);
        let nowhere = SteeringProgram::load(&ProgramConfig::default()).unwrap().attach(
            index + 1000,
            AttachMode::Native,
            false,
        );
        assert!(matches!(nowhere, Err(AttachError::System(_))), "{nowhere:?}");
    });
}
