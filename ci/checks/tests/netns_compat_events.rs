//! Asynchronous events of the drop-in libraries: of queues, of the port and of the device, and their acknowledgement.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    unmodified::{LIMIT, compiled, start},
};

/// A case of `tests/compat/events.c` at both ends, when the client has started.
struct Case {
    lab: Lab,
    server: Running,
    client: Running,
}

impl Case {
    fn start(case: &str) -> Self {
        let lab = Lab::up(LabOptions::default()).unwrap();
        let program = compiled(&lab, "events", &["-libverbs", "-lrdmacm", "-lpthread"]).unwrap();
        let address = lab.address(Side::B, Family::V4);
        let mut server = start(&lab, Side::B, &format!("{program} {case}")).unwrap();
        server.wait_for("listening", LIMIT).unwrap();
        let client = start(&lab, Side::A, &format!("{program} {case} {address}")).unwrap();
        Self { lab, server, client }
    }

    fn ip(&self, side: Side, line: &str) {
        self.lab.run(side, "ip", &line.split_whitespace().collect::<Vec<_>>()).unwrap();
    }

    /// Returns what the client has said.
    fn finish(self) -> String {
        let Self { client, server, .. } = self;
        let [client, server] = [client.finish(LIMIT), server.finish(LIMIT)];
        let done = |said: &anyhow::Result<String>| said.as_ref().is_ok_and(|said| said.contains("done"));
        assert!(done(&client) && done(&server), "client: {client:?}\nserver: {server:?}");
        client.unwrap()
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
    let said = case.finish();
    assert_eq!(said.matches("the device xw0 has ended").count(), 1, "{said}");
}
