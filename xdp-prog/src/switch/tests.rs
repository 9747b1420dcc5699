//! The decisions of the switch's programs about hostile frames, by running them in the kernel (`BPF_PROG_TEST_RUN`). The
//! interface of such a run is the loopback, index 1. Needs root.

use std::net::SocketAddr;

use libbpf_rs::ProgramInput;

use super::*;
use crate::tests::{
    STATION, ack, at, ends, fragment_v6, frame, martians, packet, segment, syn, tcp, with_fragment_field,
};

/// Index of the loopback.
const LOOPBACK: u32 = 1;
const CLIENT: u32 = 1;

/// Calls `f` with the switch, loaded for `vlans`, and a way to run one of its programs: the counters that went up are
/// returned.
fn with_switch(vlans: &[u16], f: impl FnOnce(&Switch, &dyn Fn(&str, &[u8]) -> Vec<&'static str>)) {
    let mut storage = MaybeUninit::uninit();
    let skeleton = load_skeleton(&ProgramConfig { vlans, multi_buffer: false }, &mut storage).unwrap();
    let switch = Switch::from_skeleton(&skeleton).unwrap();
    switch.station().set(STATION).unwrap();
    switch.slots.update(&LOOPBACK.to_ne_bytes(), &CLIENT.to_ne_bytes(), MapFlags::ANY).unwrap();
    let run = |program: &str, frame: &[u8]| {
        let before = switch.counters().unwrap();
        let input = ProgramInput { data_in: Some(frame), ..Default::default() };
        let program =
            if program == "port" { &skeleton.progs.xwarp_port } else { &skeleton.progs.xwarp_uplink };
        program.test_run(input).unwrap();
        let after = switch.counters().unwrap();
        let counted = before.iter().zip(after.iter()).filter(|((_, b), (_, a))| a > b);
        counted.map(|((name, _), _)| name.strip_prefix("switch.").unwrap_or(name)).collect()
    };
    f(&switch, &run);
}

/// A client owns the port of our end.
fn owned(switch: &Switch, ours: SocketAddr) {
    switch.addresses().add(ours.ip()).unwrap();
    switch.add_owner(None, ours.port(), CLIENT).unwrap();
}

/// The frame with the station's address as its source, as clients send it.
fn sent(tags: &[(u16, u16)], packet: &[u8]) -> Vec<u8> {
    let mut frame = frame(tags, packet);
    frame[6..12].copy_from_slice(&STATION);
    frame[0..6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    frame
}

#[test]
fn attack_the_switch_drops_martians_and_frames_to_other_stations() {
    for (ours, peer) in ends() {
        with_switch(&[], |switch, run| {
            owned(switch, ours);
            assert_eq!(run("uplink", &frame(&[], &tcp(peer, ours, syn))), ["to_client"]);
            for martian in martians(ours) {
                for flags in [syn, ack] {
                    let frame = frame(&[], &tcp(martian, ours, flags));
                    assert_eq!(run("uplink", &frame), ["dropped_martian"], "{martian}");
                }
            }
            let mut elsewhere = frame(&[], &tcp(peer, ours, ack));
            elsewhere[5] ^= 1;
            assert_eq!(run("uplink", &elsewhere), ["passed_other_station"]);
            let first = match ours {
                SocketAddr::V4(_) => with_fragment_field(tcp(peer, ours, ack), 0x2000),
                SocketAddr::V6(_) => fragment_v6(peer, ours, 1),
            };
            assert_eq!(run("uplink", &frame(&[], &first)), ["to_client"]);
            let other = SocketAddr::new(ours.ip(), ours.port() + 1);
            let foreign = match ours {
                SocketAddr::V4(_) => with_fragment_field(tcp(peer, other, ack), 0x2000),
                SocketAddr::V6(_) => fragment_v6(peer, other, 1),
            };
            assert_eq!(run("uplink", &frame(&[], &foreign)), ["passed_fragment"]);
        });
    }
}

#[test]
fn attack_clients_send_only_what_ordinary_senders_send() {
    let ([(ours, peer), (ours6, peer6)], ip_options) = (ends(), [7u8, 4, 4, 0]);
    with_switch(&[], |switch, run| {
        owned(switch, ours);
        owned(switch, ours6);
        let plain = tcp(ours, peer, ack);
        assert_eq!(run("port", &sent(&[], &plain)), ["to_wire"]);
        assert_eq!(run("port", &sent(&[], &tcp(ours6, peer6, ack))), ["to_wire"]);
        let options =
            packet(ours.ip(), peer.ip(), etherparse::IpNumber::TCP, &ip_options, &segment(ours, peer, ack));
        let mut without_ttl = plain.clone();
        without_ttl[8] = 0;
        let mut without_hops = tcp(ours6, peer6, ack);
        without_hops[7] = 0;
        for (what, packet) in [
            ("options", options),
            ("no TTL", without_ttl),
            ("no hop limit", without_hops),
            ("a fragment", with_fragment_field(plain.clone(), 0x2000)),
            ("a fragment of IPv6", fragment_v6(ours6, peer6, 1)),
        ] {
            assert_eq!(run("port", &sent(&[], &packet)), ["dropped_foreign"], "{what}");
        }
        for destination in ["127.0.0.1:9", "224.0.0.1:9", "255.255.255.255:9", "0.0.0.0:9"] {
            let packet = tcp(ours, at(destination), ack);
            assert_eq!(run("port", &sent(&[], &packet)), ["dropped_foreign"], "{destination}");
        }
        for destination in ["[::1]:9", "[::]:9", "[ff02::1]:9"] {
            let packet = tcp(ours6, at(destination), ack);
            assert_eq!(run("port", &sent(&[], &packet)), ["dropped_foreign"], "{destination}");
        }
        assert_eq!(run("port", &sent(&[(0x8100, 0xe000)], &plain)), ["dropped_foreign"], "a priority tag");
    });
    with_switch(&[42], |switch, run| {
        owned(switch, ours);
        let plain = tcp(ours, peer, ack);
        assert_eq!(run("port", &sent(&[(0x8100, 42)], &plain)), ["to_wire"]);
        for tags in [&[(0x8100, 0xe000), (0x8100, 42)][..], &[(0x8100, 42), (0x8100, 0xe000)], &[]] {
            assert_eq!(run("port", &sent(tags, &plain)), ["dropped_foreign"], "{tags:?}");
        }
    });
}

/// Prefixes of both families and of any length, in both directions; without a prefix, everybody is allowed.
#[test]
fn peers_are_allowed_by_their_prefixes() {
    let [(ours, peer), (ours6, peer6)] = ends();
    let other_bit = |address: SocketAddr, bit: usize| match address.ip() {
        IpAddr::V4(v4) => {
            SocketAddr::new(IpAddr::from((v4.to_bits() ^ 1 << (31 - bit)).to_be_bytes()), address.port())
        }
        IpAddr::V6(v6) => {
            SocketAddr::new(IpAddr::from((v6.to_bits() ^ 1 << (127 - bit)).to_be_bytes()), address.port())
        }
    };
    for (ours, peer, bits) in [(ours, peer, 20), (ours, peer, 32), (ours6, peer6, 61), (ours6, peer6, 128)] {
        with_switch(&[], |switch, run| {
            owned(switch, ours);
            let others = [other_bit(peer, bits - 1), other_bit(peer, bits - 3)];
            for other in others {
                assert_eq!(run("port", &sent(&[], &tcp(ours, other, ack))), ["to_wire"], "{other}");
            }
            switch.policy().allow_peers(peer.ip(), bits as u8).unwrap();
            assert_eq!(run("port", &sent(&[], &tcp(ours, peer, ack))), ["to_wire"]);
            assert_eq!(run("uplink", &frame(&[], &tcp(peer, ours, syn))), ["to_client"]);
            for other in others {
                assert_eq!(run("port", &sent(&[], &tcp(ours, other, ack))), ["dropped_peer"], "{other}");
                assert_eq!(run("uplink", &frame(&[], &tcp(other, ours, syn))), ["dropped_peer"], "{other}");
            }
        });
    }
}

/// A client at 1000 bits per second may send two of the largest frames at once, and then no more for minutes.
#[test]
fn a_client_sends_its_burst_and_then_waits() {
    let [(ours, peer), _] = ends();
    with_switch(&[], |switch, run| {
        owned(switch, ours);
        switch.policy().limit_rate(0).unwrap();
        let frame = sent(&[], &tcp(ours, peer, ack));
        let sent = (0..10_000).take_while(|_| run("port", &frame) == ["to_wire"]).count();
        let bytes = sent * frame.len();
        assert!((1 << 17..1 << 18).contains(&bytes), "{sent} frames of {} bytes", frame.len());
        assert_eq!(run("port", &frame), ["dropped_rate"]);
    });
}
