//! A pair of network namespaces joined by a veth pair, made for one test and removed with it.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod frame;

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::AsFd;
use xwarp_driver::{DriverConfig, Interface, OpenError};
use xwarp_tcp::link::{FrameWriter, Link, RxFrame};

/// Addresses of side A and side B.
pub const A4: &str = "10.77.0.1";
pub const B4: &str = "10.77.0.2";
pub const A6: &str = "fd77::1";
pub const B6: &str = "fd77::2";

/// The interface on both sides.
pub const DEV: &str = "xw0";

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip(address), port)
}

/// One side of a lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    A,
    B,
}

pub struct Lab {
    names: [String; 2],
}

impl Lab {
    /// Two namespaces, one veth pair, MTU 1500, one queue.
    pub fn new() -> Self {
        Self::with(1500, 1)
    }

    pub fn with(mtu: u32, queues: u32) -> Self {
        Self::with_queues(mtu, queues, queues)
    }

    pub fn with_queues(mtu: u32, receive: u32, transmit: u32) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let lab = Self { names: [format!("xwd-a-{id}"), format!("xwd-b-{id}")] };
        let [a, b] = &lab.names;
        sh(&format!("ip netns add {a} && ip netns add {b}"));
        let queues = format!("numrxqueues {receive} numtxqueues {transmit}");
        sh(&format!("ip -n {a} link add {DEV} {queues} type veth peer name {DEV} netns {b} {queues}"));
        for (side, v4, v6) in [(a, A4, A6), (b, B4, B6)] {
            sh(&format!("ip -n {side} link set lo up"));
            sh(&format!(
                "ip -n {side} addr add {v4}/24 dev {DEV} && ip -n {side} addr add {v6}/64 dev {DEV} nodad"
            ));
            sh(&format!("ip -n {side} link set {DEV} mtu {mtu} up"));
        }
        lab
    }

    pub fn name(&self, side: Side) -> &str {
        &self.names[side as usize]
    }

    /// Runs `f` in the side's namespace, on a thread of its own.
    pub fn run<T: Send>(&self, side: Side, f: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let joined = scope
                .spawn(|| {
                    let namespace = File::open(format!("/var/run/netns/{}", self.name(side))).unwrap();
                    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                    f()
                })
                .join();
            joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs a command in the side's namespace and expects it to succeed.
    pub fn sh(&self, side: Side, command: &str) -> String {
        sh(&format!("ip netns exec {} {command}", self.name(side)))
    }

    pub fn open(&self, side: Side) -> Interface {
        // Tests do not wait as long as users for addresses that are missing.
        let config = DriverConfig { address_limit: Duration::from_secs(1), ..DriverConfig::default() };
        self.open_with(side, &config).unwrap()
    }

    pub fn open_with(&self, side: Side, config: &DriverConfig) -> Result<Interface, OpenError> {
        self.run(side, || Interface::open(DEV, config))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

pub fn sh(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command}: {out}{err}");
    out.into_owned()
}

/// Asks again until it is true or two seconds have passed.
pub fn eventually(what: &str, is_so: impl FnMut() -> bool) {
    eventually_within(2, what, is_so);
}

pub fn eventually_within(seconds: u64, what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(seconds);
    while !is_so() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::yield_now();
    }
}

/// The next frame, within a second.
pub fn receive_one(link: &mut Interface) -> RxFrame {
    let mut batch = Vec::new();
    eventually("a frame comes in", || link.receive(&mut batch, 1) == 1);
    batch.pop().unwrap()
}

/// The bytes of the next frame, which is recycled.
pub fn receive_bytes(link: &mut Interface) -> Vec<u8> {
    let frame = receive_one(link);
    let bytes = link.rx_chunks(&frame).concat();
    assert_eq!(bytes.len(), frame.len());
    link.recycle(frame);
    bytes
}

/// Sends one frame with these bytes, and gives its token back.
pub fn send_bytes(link: &mut Interface, queue: u16, bytes: &[u8]) {
    send_bytes_leaving(link, queue, bytes, None);
}

/// The same, and leaves the checksum of the TCP header at byte `left_checksum` to the kernel.
pub fn send_bytes_leaving(link: &mut Interface, queue: u16, bytes: &[u8], left_checksum: Option<NonZeroU16>) {
    let mut frame = link.alloc(bytes.len()).unwrap();
    frame.leave_checksum(left_checksum);
    let chunks = link.tx_chunks(&mut frame).unwrap();
    FrameWriter::new(chunks, 0, bytes.len()).put(bytes);
    link.submit(xwarp_tcp::link::QueueId(queue), &mut frame, bytes.len()).unwrap();
    link.release(frame);
    link.flush();
}
