//! Alone in its process, so that descriptors, threads and memory maps can be counted.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::frame::Frame;
use common::*;
use xwarp_driver::DriverConfig;
use xwarp_tcp::link::{Link, Steer};
use xwarp_tcp::wire::Flow;

/// Open descriptors, threads, and maps of AF_XDP sockets and frame memory (large anonymous ones).
fn held() -> (usize, usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let sizes = maps.lines().filter_map(|line| {
        line.strip_prefix("Size:")?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    });
    let DriverConfig { receive_chunks, transmit_chunks, .. } = DriverConfig::default();
    let frames = u64::from(receive_chunks + transmit_chunks) * 4;
    let large = sizes.filter(|kib| *kib == frames).count() + maps.matches("socket:").count();
    (count("/proc/self/fd"), count("/proc/self/task"), large)
}

#[test]
fn netns_closing_gives_everything_back() {
    let lab = Lab::new();
    let open_use_close = || {
        let (mut a, mut b) = (lab.open(Side::A), lab.open(Side::B));
        let (local, remote) = (at(A4, 1), at(B4, 2));
        b.steer(Steer::Flow(Flow { local: remote, remote: local })).unwrap();
        let bytes = Frame::tcp(a.attributes().mac, b.attributes().mac, local, remote).build();
        send_bytes(&mut a, 0, &bytes);
        // One frame is received and never recycled, one allocated and never released, one submitted.
        let held = receive_one(&mut b);
        let out = a.alloc(60).unwrap();
        send_bytes(&mut a, 0, &bytes);
        let now = self::held();
        drop((a, b, held, out));
        now
    };
    open_use_close();
    let start = held();
    for _ in 0..5 {
        let open = open_use_close();
        assert!(
            open.0 > start.0 && open.2 >= start.2 + 10,
            "{open:?} {start:?}: both ends have maps and descriptors"
        );
    }
    assert_eq!(held(), start);
}
