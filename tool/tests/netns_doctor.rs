//! `xwarp doctor` in network namespaces, in good and bad states.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::process::{Command, Output};

use serde_json::Value;
use xwarp_checks::lab::{INTERFACE, Lab, LabOptions, Side};
use xwarp_driver::{CAPABILITIES, DriverConfig, Interface};

const XWARP: &str = env!("CARGO_BIN_EXE_xwarp");

/// Runs a command in A that prints `xwarp doctor --json`; returns its findings, and whether it reported a problem by its exit
/// code, which must agree with the findings.
fn findings(mut command: Command) -> (Vec<Value>, bool) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let report: Value = serde_json::from_slice(&stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&stderr)));
    let problem = status.code() == Some(1);
    assert_eq!(report["problem"], problem);
    (report["findings"].as_array().unwrap().clone(), problem)
}

fn doctor(lab: &Lab, args: &[&str]) -> (Vec<Value>, bool) {
    let mut command = lab.command(Side::A, XWARP);
    command.args(["doctor", "--json"]).args(args);
    findings(command)
}

/// The same as user `nobody` with these capabilities only, and with a limit of locked memory that is too small for the frames.
fn doctor_with(lab: &Lab, capabilities: &[&str], args: &[&str]) -> (Vec<Value>, bool) {
    let set: Vec<_> = capabilities.iter().map(|name| name.to_lowercase().replace("cap_", "+")).collect();
    let set = if set.is_empty() { "-all".to_owned() } else { set.join(",") };
    let mut command = lab.command(Side::A, "prlimit");
    command.args(["--memlock=1048576", "setpriv"]);
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"]);
    command.args(["--inh-caps", &set, "--ambient-caps", &set, XWARP, "doctor", "--json"]).args(args);
    findings(command)
}

fn one<'a>(findings: &'a [Value], check: &str) -> &'a Value {
    let mut matching = findings.iter().filter(|finding| finding["check"] == check);
    let found = matching.next().unwrap_or_else(|| panic!("nothing about {check}: {findings:?}"));
    assert_eq!(matching.next(), None);
    found
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[test]
fn netns_doctor_finds_nothing_wrong_with_a_good_interface() {
    let lab = Lab::up(LabOptions { mtu: 9000, ..LabOptions::default() }).unwrap();
    let (findings, problem) = doctor(&lab, &[INTERFACE, "--open"]);
    assert!(!problem, "{findings:?}");
    for check in ["kernel", "rights", "af_xdp", "link", "mtu", "addresses", "xdp", "memory", "open"] {
        assert_eq!(one(&findings, check)["status"], "ok", "{check}");
    }
    assert!(text(&one(&findings, "addresses")["found"]).contains("10.77.0.1, fd77::1"));
    assert!(text(&one(&findings, "open")["found"]).contains("path MTU 9000"));
}

/// The list in the error text is enough, and each of its capabilities is needed.
#[test]
fn netns_doctor_names_the_exact_capabilities() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let (findings, problem) = doctor_with(&lab, &CAPABILITIES, &[INTERFACE, "--open"]);
    assert!(!problem, "{findings:?}");
    assert_eq!(one(&findings, "open")["status"], "ok");
    for without in CAPABILITIES {
        let rest: Vec<_> = CAPABILITIES.into_iter().filter(|name| *name != without).collect();
        let (findings, problem) = doctor_with(&lab, &rest, &[INTERFACE, "--open"]);
        assert!(problem, "works without {without}: {findings:?}");
        assert_eq!(one(&findings, "open")["status"], "problem", "opens without {without}");
        let check = if without == "CAP_IPC_LOCK" { "memory" } else { "rights" };
        let finding = one(&findings, check);
        assert_eq!(finding["status"], "problem", "{without}: {finding}");
        assert!(
            text(&finding["advice"]).contains(if check == "rights" {
                "--ambient-caps +net_admin,+net_raw,+bpf,+ipc_lock"
            } else {
                "ulimit -l"
            }),
            "{finding}"
        );
    }
}

#[test]
fn netns_doctor_says_what_an_interface_lacks() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    lab.run(Side::A, "ip", &["link", "set", INTERFACE, "mtu", "1000"]).unwrap();
    let (found, problem) = doctor(&lab, &[INTERFACE]);
    assert!(!problem, "a small MTU is no more than a warning: {found:?}");
    assert_eq!(one(&found, "mtu")["status"], "warning");

    lab.run(Side::B, "ip", &["link", "set", INTERFACE, "down"]).unwrap();
    let (found, _) = doctor(&lab, &[INTERFACE]);
    assert!(text(&one(&found, "link")["found"]).contains("no carrier"), "{found:?}");

    lab.run(Side::A, "ip", &["link", "set", INTERFACE, "down"]).unwrap();
    lab.run(Side::A, "ip", &["addr", "flush", "dev", INTERFACE]).unwrap();
    let (found, problem) = doctor(&lab, &[INTERFACE]);
    assert!(problem);
    assert_eq!(one(&found, "link")["advice"], "ip link set dev xw0 up");
    assert_eq!(one(&found, "addresses")["status"], "problem");

    let (found, problem) = doctor(&lab, &["nowhere"]);
    assert!(problem);
    assert!(text(&one(&found, "interface")["found"]).contains("there are: lo, xw0"), "{found:?}");
    let (found, _) = doctor(&lab, &["lo"]);
    assert!(text(&one(&found, "interface")["found"]).contains("not an Ethernet interface"), "{found:?}");
}

#[test]
fn netns_doctor_names_the_process_that_holds_an_interface() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let held = lab.within(Side::A, || Interface::open(INTERFACE, &DriverConfig::default()).unwrap()).unwrap();
    let (found, problem) = doctor(&lab, &[INTERFACE]);
    assert!(problem);
    let finding = one(&found, "xdp");
    assert!(text(&finding["found"]).contains("generic mode"), "{finding}");
    let us = format!("process {}", std::process::id());
    assert!(text(&finding["advice"]).contains(&us), "{finding}");
    drop(held);
    let (found, problem) = doctor(&lab, &[INTERFACE]);
    assert!(!problem, "{found:?}");
}

#[test]
fn netns_doctor_prints_no_escape_sequences_into_pipes() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let output = lab.run(Side::A, XWARP, &["doctor", INTERFACE]).unwrap();
    assert!(output.contains("ok       link       xw0 is up"), "{output}");
    assert!(!output.contains('\u{1b}'), "{output:?}");
}
