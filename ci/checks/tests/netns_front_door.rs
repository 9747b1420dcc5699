//! What a newcomer does with root: the commands for two hosts in README and in the guide, and `ci/demo --sdp`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    documents::{Place, ShownCommand, commands},
    lab::{Family, INTERFACE, Lab, LabOptions, Side, ci_script},
    process::Running,
    user::{LIMIT, finish, is_early},
    vm::built,
};

/// The documents' names of an interface and of the first machine's address.
const DOCUMENTED: [&str; 2] = ["eth0", "10.0.0.1"];

/// The first machine is the one whose line says "one machine"; it serves.
#[test]
fn netns_commands_for_two_hosts_run_in_a_lab() {
    let blocks = commands().unwrap();
    let blocks: Vec<_> = blocks.iter().filter(|block| block.place == Place::TwoHosts).collect();
    assert!(!blocks.is_empty());
    for block in blocks {
        let lab = Lab::up(LabOptions::default()).unwrap();
        let address = lab.address(Side::B, Family::V4).to_string();
        let start = |side, line: &str| {
            let line = line.replace(DOCUMENTED[0], INTERFACE).replace(DOCUMENTED[1], &address);
            let words: Vec<_> = line.split_whitespace().collect();
            assert_eq!(words[0], "xwarp", "{}", block.document);
            let mut command = lab.program(side, built("xwarp").unwrap());
            command.args(&words[1..]);
            Running::start(command).unwrap()
        };
        let mut serving = Vec::new();
        for ShownCommand { line, comment, .. } in &block.commands {
            if comment.starts_with("one machine") {
                serving.push(start(Side::B, line));
                continue;
            }
            let end = Instant::now() + LIMIT;
            loop {
                let (success, said) = finish(start(Side::A, line));
                if success {
                    break;
                }
                assert!(is_early(&said) && Instant::now() < end, "{}: {line}: {said}", block.document);
                thread::sleep(Duration::from_millis(200));
            }
        }
        for server in serving {
            let (success, said) = finish(server);
            assert!(success, "{said}");
        }
    }
}

#[test]
fn netns_demo_shows_iperf3_over_sdp() {
    let mut demo = Command::new(ci_script("demo"));
    demo.arg("--programs").arg(built("libxwarp_sdp_preload.so").unwrap().parent().unwrap()).arg("--sdp");
    let (success, said) = finish(Running::start(demo).unwrap());
    assert!(success, "{said}");
    assert!(said.contains("iperf Done.") && said.contains("receiver"), "{said}");
    let moved = said.lines().find(|line| line.contains("bytes") && line.contains("xwarp"));
    assert!(moved.is_some(), "the statistics are missing in\n{said}");
}
