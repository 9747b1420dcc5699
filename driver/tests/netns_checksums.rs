//! TCP checksums that are left to the kernel, which completes them only where a device does not.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::num::NonZeroU16;

use common::frame::Frame;
use common::*;
use xwarp_driver::{DriverConfig, Interface, Mode, ModePreference};
use xwarp_tcp::link::{Link, Steer};
use xwarp_tcp::wire::Flow;

/// VLAN tags.
const TAGS: &[(u16, u16)] = &[(0x88a8, 7), (0x8100, 42)];

/// Both sides opened for frames with `tags`, and frames with as many bytes from A to B, of each version of IP.
fn connected(lab: &Lab, mode: Mode, tags: &[(u16, u16)], bytes: usize) -> (Interface, Interface, [Frame; 2]) {
    let id = |at: usize| tags.get(at).map(|(_, id)| *id);
    let mode = ModePreference::Force(mode);
    let config = DriverConfig { mode, service_vlan: id(0), vlan: id(1), ..DriverConfig::default() };
    let mut a = lab.open_with(Side::A, &config).unwrap();
    let mut b = lab.open_with(Side::B, &config).unwrap();
    let payload: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    let frames = [(A4, B4), (A6, B6)].map(|(from, to)| {
        let (local, remote) = (at(from, 4000), at(to, 5000));
        a.steer(Steer::Flow(Flow { local, remote })).unwrap();
        b.steer(Steer::Flow(Flow { local: remote, remote: local })).unwrap();
        Frame::tcp(a.attributes().mac, b.attributes().mac, local, remote).tags(tags).payload(&payload)
    });
    (a, b, frames)
}

#[test]
fn netns_a_veth_carries_partial_checksums_and_the_kernel_completes_them_elsewhere() {
    for (mode, tags, mtu) in [
        (Mode::Generic, &[][..], 1500),
        (Mode::Copy, &[], 1500),
        (Mode::Generic, TAGS, 1500),
        (Mode::Copy, TAGS, 1500),
        (Mode::Generic, &[], 65_535),
        (Mode::Copy, &[], 65_535),
    ] {
        let lab = Lab::with(mtu, 1);
        for payload in [0, 1, 700, mtu as usize - 68] {
            let (mut a, mut b, frames) = connected(&lab, mode, tags, payload);
            assert!(a.offloads_checksums() && b.offloads_checksums());
            for offload in ["on", "off"] {
                lab.sh(Side::A, &format!("ethtool -K {DEV} tx {offload}"));
                for frame in &frames {
                    let (partial, header) = frame.partial();
                    send_bytes_leaving(&mut a, 0, &partial, NonZeroU16::new(header as u16));
                    let expected = if offload == "on" { partial } else { frame.build() };
                    let arrived = receive_bytes(&mut b);
                    assert!(
                        arrived == expected,
                        "{mode}, {tags:?}, {payload} bytes at MTU {mtu}, offload {offload}"
                    );
                }
            }
            lab.sh(Side::A, &format!("ethtool -K {DEV} tx on"));
        }
    }
}

#[test]
fn netns_checksums_are_left_only_to_a_device_that_offloads_them() {
    let lab = Lab::new();
    lab.sh(Side::A, &format!("ethtool -K {DEV} tx off"));
    let (a, b, _) = connected(&lab, Mode::Generic, &[], 0);
    assert_eq!((a.offloads_checksums(), b.offloads_checksums()), (false, true));
}
