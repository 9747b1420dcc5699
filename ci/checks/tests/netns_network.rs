//! Operations of a host and its network that kernel TCP survives: so do connections of ours.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    net::{SocketAddr, TcpStream},
    process::Stdio,
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use ends::{LIMIT, between, parts};
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
};
use xwarp_verbs::{
    AsyncEvent, CloseReason, Device,
    cm::{ConnectOptions, ListenOptions},
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

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not in time");
        thread::sleep(Duration::from_millis(20));
    }
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
                wait_until("the program is attached again", || has_program(&lab, side));
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
