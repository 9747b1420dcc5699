//! Asynchronous events of the drop-in libraries: of queues, of the port and of the device, and their acknowledgement.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
    unmodified::{LIMIT, compiled, start, start_shared},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
/// The line about the end of a device.
const END: &str = "the device xw0 has ended";

/// A case of `tests/compat/events.c` at both ends, when the client has started.
struct Case {
    lab: Lab,
    server: Running,
    client: Running,
}

fn program(lab: &Lab) -> String {
    compiled(lab, "events", &["-libverbs", "-lrdmacm", "-lpthread", "-rdynamic"]).unwrap()
}

impl Case {
    fn start(case: &str) -> Self {
        let lab = Lab::up(LabOptions::default()).unwrap();
        let program = program(&lab);
        let address = lab.address(Side::B, Family::V4);
        let mut server = start(&lab, Side::B, &format!("{program} {case}")).unwrap();
        server.wait_for("listening", LIMIT).unwrap();
        let client = start(&lab, Side::A, &format!("{program} {case} {address}")).unwrap();
        Self { lab, server, client }
    }

    fn ip(&self, side: Side, line: &str) {
        self.lab.run(side, "ip", &line.split_whitespace().collect::<Vec<_>>()).unwrap();
    }

    /// Returns what the client and the server have said.
    fn finish(self) -> [String; 2] {
        let Self { client, server, .. } = self;
        let [client, server] = [client.finish(LIMIT), server.finish(LIMIT)];
        let done = |said: &anyhow::Result<String>| said.as_ref().is_ok_and(|said| said.contains("done"));
        assert!(done(&client) && done(&server), "client: {client:?}\nserver: {server:?}");
        [client, server].map(Result::unwrap)
    }
}

#[test]
fn netns_compat_events_report_why_a_queue_pair_failed() {
    for case in ["access", "request"] {
        Case::start(case).finish();
    }
}

#[test]
fn netns_compat_events_report_an_overflowed_completion_queue() {
    Case::start("overflow").finish();
}

#[test]
fn netns_compat_events_report_the_last_receive_of_a_queue_pair() {
    Case::start("last").finish();
}

#[test]
fn netns_compat_events_reach_the_contexts_that_they_concern() {
    let mut case = Case::start("contexts");
    case.server.wait_for("changing", LIMIT).unwrap();
    case.ip(Side::B, &format!("addr add 10.77.0.9/24 dev {INTERFACE}"));
    case.server.wait_for("failing", LIMIT).unwrap();
    case.client.signal(Signal::USR1).unwrap();
    case.finish();
}

#[test]
fn netns_compat_events_report_a_new_ethernet_address() {
    let mut case = Case::start("mac");
    case.client.wait_for("changing", LIMIT).unwrap();
    case.ip(Side::A, &format!("link set {INTERFACE} address 02:00:00:00:77:01"));
    case.finish();
}

#[test]
fn netns_compat_events_report_a_removed_device() {
    let mut case = Case::start("removal");
    case.client.wait_for("removing", LIMIT).unwrap();
    case.server.wait_for("removing", LIMIT).unwrap();
    case.ip(Side::A, &format!("link del {INTERFACE}"));
    let [said, _] = case.finish();
    assert_eq!(said.matches(END).count(), 1, "{said}");
}

/// Both ends are behind the helper that is killed, so both lose their device.
#[test]
fn netns_compat_events_report_a_killed_helper() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let program = program(&lab);
    let address = lab.address(Side::A, Family::V4);
    let mut server = start_shared(&lab, &shared, &format!("{program} removal")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = start_shared(&lab, &shared, &format!("{program} removal {address}")).unwrap();
    let mut case = Case { lab, server, client };
    case.client.wait_for("removing", LIMIT).unwrap();
    case.server.wait_for("removing", LIMIT).unwrap();
    shared.helper.signal(Signal::KILL).unwrap();
    for said in case.finish() {
        assert_eq!(said.matches(END).count(), 1, "{said}");
    }
}

/// A fault of ours ends the device, and neither the program nor a wait of it.
#[test]
fn netns_compat_events_report_an_engine_that_panics() {
    // The interface falls silent, so the server waits.
    let Case { client, server: _server, lab: _lab } = Case::start("panic");
    let said = client.finish(LIMIT).unwrap();
    assert!(said.contains("done"), "{said}");
    assert_eq!(said.matches(END).count(), 1, "{said}");
}
