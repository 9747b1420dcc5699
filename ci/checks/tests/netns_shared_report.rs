//! The reports of `xwarpd` to `xwarp stat`, to `xwarp doctor` and to monitors.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);
const MONITORS: &str = "127.0.0.1:9815";

/// Sends a request to the endpoint for monitors, and returns the answer.
fn asked(lab: &Lab, request: &str) -> String {
    let ask = || {
        let mut stream = TcpStream::connect(MONITORS).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    lab.within(Side::A, ask).unwrap()
}

/// The samples of all families; each must belong to the family before it.
fn samples(lab: &Lab) -> BTreeMap<String, u64> {
    let answer = asked(lab, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("application/openmetrics-text"), "{head}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let mut family = "";
    let mut samples = BTreeMap::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            family = kind.split(' ').next().unwrap();
        } else if !line.starts_with('#') {
            assert!(line.starts_with(family), "{line} in {family}");
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert_eq!(samples.insert(name.to_owned(), value.parse().unwrap()), None, "{line}");
        }
    }
    samples
}

#[test]
fn netns_shared_the_helper_counts_frames_and_devices_for_users_and_monitors() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    lab.run(Side::A, "ip", &["link", "set", "dev", "lo", "up"]).unwrap();
    let options = ["--metrics", MONITORS, "--devices-per-user", "8"];
    let shared = SharedInterface::start(&lab, HELPER, &options).unwrap();
    let frames = |samples: &BTreeMap<String, u64>, outcome: &str| {
        samples[&format!("xwarpd_frames_total{{interface=\"{INTERFACE}\",outcome=\"{outcome}\"}}")]
    };
    let before = samples(&lab);
    assert_eq!((frames(&before, "to_local_client"), frames(&before, "to_wire")), (0, 0));
    assert_eq!(before[&format!("xwarpd_devices{{interface=\"{INTERFACE}\"}}")], 0);
    // Messages between two clients, then from a client to the wire and back.
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let server = shared.serve(NOBODYS, &address, "2").unwrap();
    shared.start_unprivileged(NOBODYS, &["talk", &address, "20"]).unwrap().finish(LIMIT).unwrap();
    let mut peer = lab.start(Side::B, PERF, &["send_bw", "-d", INTERFACE, "-n", "50"]).unwrap();
    peer.wait_for("Waiting for a client", LIMIT).unwrap();
    let to = lab.address(Side::B, Family::V4).to_string();
    let args = ["send_bw", "-d", INTERFACE, "-n", "50", &to];
    shared.start_unprivileged(PERF, &args).unwrap().finish(LIMIT).unwrap();
    // This port has no listener.
    let nowhere = format!("{}:7777", lab.address(Side::A, Family::V4));
    let mut refused = shared.start_unprivileged(NOBODYS, &["talk", &nowhere, "1"]).unwrap();
    refused.wait_for("refused", LIMIT).unwrap();
    drop(refused);

    let after = samples(&lab);
    for outcome in ["to_client", "to_local_client", "to_wire", "refused"] {
        assert!(frames(&after, outcome) > 0, "{outcome}: {after:?}");
    }
    assert_eq!(frames(&after, "dropped_foreign"), 0);
    assert_eq!(after[&format!("xwarpd_devices{{interface=\"{INTERFACE}\"}}")], 1);
    assert_eq!((after["xwarpd_connections"], after["xwarpd_reserved_ports"]), (1, 1));
    assert!(after["xwarpd_quarantined_ports"] > 0);

    let (report, _) = shared.xwarp(&["stat", "--json"]).unwrap();
    let seen = &report["shared"][0];
    assert_eq!((&seen["interface"], &seen["devices"]), (&INTERFACE.into(), &1.into()), "{report}");
    assert_eq!(seen["own_devices"]["used"], 1);
    assert_eq!(seen["own_devices"]["most"], 8);
    for outcome in ["to_client", "to_local_client", "to_wire", "refused"] {
        assert!(seen["frames"][outcome].as_u64().unwrap() >= frames(&after, outcome), "{outcome}: {report}");
    }
    drop(server);
}

/// A monitor that sends nothing, one that sends too much, and one that reads nothing delay neither clients nor, for
/// long, other monitors.
#[test]
fn netns_shared_a_silent_monitor_stops_nobody() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    lab.run(Side::A, "ip", &["link", "set", "dev", "lo", "up"]).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &["--metrics", MONITORS]).unwrap();
    let silent = lab.within(Side::A, || TcpStream::connect(MONITORS).unwrap()).unwrap();
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let server = shared.serve(NOBODYS, &address, "1").unwrap();
    shared.start_unprivileged(NOBODYS, &["talk", &address, "20"]).unwrap().finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    assert!(samples(&lab).len() > 10);
    drop(silent);
    let other = asked(&lab, "POST /metrics HTTP/1.1\r\n\r\n");
    assert!(other.starts_with("HTTP/1.1 405"), "{other}");
    let long = lab.within(Side::A, || {
        let mut stream = TcpStream::connect(MONITORS).unwrap();
        // The helper disconnects in the middle.
        (0..100).try_for_each(|_| stream.write_all(&[b'x'; 1024])).is_err()
            || stream.read(&mut [0; 1]).map_or(true, |len| len == 0)
    });
    assert!(long.unwrap());
    assert!(samples(&lab).len() > 10);
}

/// An unprivileged user needs no privileges if the helper shares the interface, even from another network namespace.
#[test]
fn netns_shared_the_doctor_asks_the_helper() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &["--devices-per-user", "1"]).unwrap();
    let finding = |report: &Value, check: &str| -> (String, String) {
        let found = report["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == check);
        let found = found.unwrap_or_else(|| panic!("nothing about {check}: {report}"));
        (found["status"].as_str().unwrap().to_owned(), found["found"].as_str().unwrap().to_owned())
    };
    let (report, good) = shared.xwarp(&["doctor", INTERFACE, "--open", "--json"]).unwrap();
    assert!(good, "{report}");
    assert_eq!(finding(&report, "helper"), ("ok".to_owned(), format!("xwarpd shares {INTERFACE}")));
    assert_eq!(finding(&report, "open").0, "ok");
    // A veth does not always send redirected frames.
    assert_eq!(finding(&report, "mode").0, "note");
    assert!(finding(&report, "mode").1.contains("native XDP, generic from clients"), "{report}");
    // The only device of this user is taken.
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let _server: Running = shared.serve(NOBODYS, &address, "1").unwrap();
    let (report, good) = shared.xwarp(&["doctor", INTERFACE, "--json"]).unwrap();
    assert!(!good);
    assert_eq!(finding(&report, "limits").0, "problem");
}
