//! The kernel continues to work beside us: it receives all frames except ours.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use common::frame::{Frame, ethernet, icmp_error};
use common::*;
use etherparse::{EtherType, PacketHeaders, TransportHeader};
use xwarp_driver::{DriverConfig, Interface, Mode, ModePreference, PortError, reserve_port};
use xwarp_tcp::link::{Link, Steer};
use xwarp_tcp::wire::Flow;

const OURS: u16 = 4791;
const KERNELS: u16 = 4792;
/// Index of the loopback interface.
const LOOPBACK: u32 = 1;

/// Side B opened, with a wildcard listener and one connection of ours.
fn side_b(lab: &Lab, mode: Mode) -> Interface {
    let config = DriverConfig { mode: ModePreference::Force(mode), ..DriverConfig::default() };
    let mut b = lab.open_with(Side::B, &config).unwrap();
    b.steer(Steer::Listener { addr: None, port: OURS }).unwrap();
    for (local, remote) in [(at(B4, OURS), at(A4, 40_000)), (at(B6, OURS), at(A6, 40_000))] {
        b.steer(Steer::Flow(Flow { local, remote })).unwrap();
    }
    b
}

/// Sends four megabytes to `to` and back by kernel TCP on both sides.
fn echo_by_kernel(lab: &Lab, to: SocketAddr) {
    const BYTES: usize = 4 << 20;
    let listener = lab.run(Side::B, || TcpListener::bind(to).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut all = vec![0; BYTES];
            peer.read_exact(&mut all).unwrap();
            peer.write_all(&all).unwrap();
        });
        let mut peer = lab.run(Side::A, || TcpStream::connect_timeout(&to, Duration::from_secs(5)).unwrap());
        let sent: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
        peer.write_all(&sent).unwrap();
        let mut back = vec![0; BYTES];
        peer.read_exact(&mut back).unwrap();
        assert!(back == sent);
    });
}

#[test]
fn netns_kernel_traffic_is_undisturbed() {
    for mode in [Mode::Copy, Mode::Generic] {
        let lab = Lab::new();
        let b = side_b(&lab, mode);
        for (target, size) in [(B4, 56), (B6, 56), (B4, 5000), (B6, 5000)] {
            // Larger than the MTU: fragments.
            lab.sh(Side::A, &format!("ping -q -c 3 -i 0.01 -W 2 -s {size} {target}"));
        }
        for target in [B4, B6] {
            echo_by_kernel(&lab, at(target, KERNELS));
        }
        assert_eq!(b.counters().received_frames, 0);
        let program = b.program_counters().unwrap();
        assert_eq!((program.steered_flow, program.steered_listener, program.steered_icmp), (0, 0, 0));
        assert!(
            program.passed_icmp >= 6 && program.passed_tcp > 100 && program.passed_fragment >= 12,
            "{program:?}"
        );
    }
}

/// The kernel of side A connects to our port on side B: its SYN comes to us, the kernel's stack on side B
/// never answers; afterwards the reservation alone refuses. A reservation is of one interface, the loopback has its own.
#[test]
fn netns_syns_of_a_kernel_peer_come_to_us() {
    let lab = Lab::new();
    let mut b = side_b(&lab, Mode::Copy);
    let index = b.attributes().index;
    let reservation = lab.run(Side::B, || {
        let held = reserve_port(None, Some(OURS), index).unwrap();
        drop(reserve_port(None, Some(OURS), LOOPBACK).unwrap());
        for taken in [index, 0] {
            assert!(matches!(reserve_port(None, Some(OURS), taken), Err(PortError::InUse { .. })));
        }
        held
    });
    assert_eq!(
        lab.run(Side::B, || TcpListener::bind(at(B4, OURS)).unwrap_err().kind()),
        ErrorKind::AddrInUse
    );
    for (target, source) in [(B4, A4), (B6, A6)] {
        let connect = || TcpStream::connect_timeout(&at(target, OURS), Duration::from_millis(100));
        assert_eq!(lab.run(Side::A, || connect().unwrap_err().kind()), ErrorKind::TimedOut);
        let bytes = receive_bytes(&mut b);
        let headers = PacketHeaders::from_ethernet_slice(&bytes).unwrap();
        let Some(TransportHeader::Tcp(tcp)) = headers.transport else { panic!("{headers:?}") };
        assert!(tcp.syn && !tcp.ack && tcp.destination_port == OURS, "{tcp:?} from {source}");
    }
    b.unsteer(Steer::Listener { addr: None, port: OURS });
    // A SYN that we do not steer reaches the bound, not listening kernel socket: a reset.
    let refused = || TcpStream::connect_timeout(&at(B4, OURS), Duration::from_secs(2)).unwrap_err().kind();
    assert_eq!(lab.run(Side::A, refused), ErrorKind::ConnectionRefused);
    drop(reservation);
    lab.run(Side::B, || drop(TcpListener::bind(at(B4, OURS)).unwrap()));
}

#[test]
fn netns_icmp_errors_that_quote_us_come_to_us() {
    let lab = Lab::new();
    let mut b = side_b(&lab, Mode::Copy);
    let mut a = lab.open(Side::A);
    let (mac_a, mac_b) = (a.attributes().mac, b.attributes().mac);
    for (local, remote, proto, kind) in [
        (at(B4, OURS), at(A4, 40_000), EtherType::IPV4, 3),
        (at(B6, OURS), at(A6, 40_000), EtherType::IPV6, 2),
    ] {
        let quoted = Frame::tcp(mac_b, mac_a, local, remote).payload(&[0; 600]).packet();
        let error = icmp_error(remote.ip(), local.ip(), kind, 4, &quoted[..500]);
        let bytes = ethernet(mac_a, mac_b, &[], proto, &error);
        send_bytes(&mut a, 0, &bytes);
        assert_eq!(receive_bytes(&mut b), bytes);
    }
    assert_eq!(b.program_counters().unwrap().steered_icmp, 2);
}

/// Frames of our connections on a VLAN that is not ours go to the kernel (which drops them).
#[test]
fn netns_other_vlans_are_not_ours() {
    let lab = Lab::new();
    let config = DriverConfig { vlan: Some(42), ..DriverConfig::default() };
    let (mut a, mut b) = (lab.open_with(Side::A, &config).unwrap(), lab.open_with(Side::B, &config).unwrap());
    let (local, remote) = (at(B4, OURS), at(A4, 40_000));
    b.steer(Steer::Flow(Flow { local, remote })).unwrap();
    let frame = Frame::tcp(a.attributes().mac, b.attributes().mac, remote, local);
    for tags in [&[][..], &[(0x8100, 43)], &[(0x88a8, 7), (0x8100, 42)]] {
        send_bytes(&mut a, 0, &frame.clone().tags(tags).build());
    }
    let ours = frame.tags(&[(0x8100, 42)]).build();
    send_bytes(&mut a, 0, &ours);
    assert_eq!(receive_bytes(&mut b), ours);
    assert_eq!(b.counters().received_frames, 1);
    assert_eq!(b.attributes().vlans, [42]);
    // Ping still works, untagged.
    lab.sh(Side::A, &format!("ping -q -c 1 -W 2 {B4}"));
}
