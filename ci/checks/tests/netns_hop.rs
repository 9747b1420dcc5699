//! Transfers through the impairment hop: every byte arrives as it was sent, whatever happens to the frames.
//! Speed does not affect the outcome.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use serde_json::Value;
use xwarp_checks::{
    hop::Hop,
    lab::{Family, Lab, LabOptions, Side},
    perf::{Perf, Ran},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const HOP: &str = env!("CARGO_BIN_EXE_xwarp-hop");

fn lab() -> Lab {
    Lab::up(LabOptions { hop: true, ..LabOptions::default() }).unwrap()
}

/// Runs `tests` of `xwarp-perf` with the options `line` through a hop with the options `hop`; returns their
/// results and the hop's report.
fn through(lab: &Lab, family: Family, hop: &str, tests: &[&'static str], line: &str) -> (Vec<Ran>, Value) {
    let hop = Hop::start(lab, HOP, hop).unwrap();
    let run = |test: &&'static str| {
        let ran = Perf::new(lab, PROGRAM, test).over(family).both(line).run();
        let ran = ran.unwrap_or_else(|error| panic!("{test} over {family:?}: {error:#}"));
        assert!(ran.printed.contains("all as they were sent"), "{}", ran.printed);
        ran
    };
    let ran = tests.iter().map(run).collect();
    (ran, hop.stop().unwrap())
}

fn count(report: &Value, what: &str) -> u64 {
    ["a_to_b", "b_to_a"].iter().map(|direction| report[direction][what].as_u64().unwrap()).sum()
}

fn of_both_ends(ran: &[Ran], counter: &str) -> u64 {
    ran.iter()
        .map(|ran| ran.counter(counter) + ran.server["xwarp"]["counters"][counter].as_u64().unwrap_or(0))
        .sum()
}

#[test]
fn netns_hop_without_faults_is_a_cable_with_delay() {
    let lab = lab();
    let hop = Hop::start(&lab, HOP, "--rtt 20ms --rate 1G").unwrap();
    for family in [Family::V4, Family::V6] {
        let address = lab.address(Side::B, family).to_string();
        let ping = lab.run(Side::A, "ping", &["-c", "2", "-W", "5", "-s", "1400", &address]).unwrap();
        assert!(ping.contains(" 2 received"), "{ping}");
        let least = ping.split("mdev = ").nth(1).and_then(|times| times.split('/').next()).unwrap();
        assert!(least.parse::<f64>().unwrap() >= 20.0, "{ping}");
    }
    let report = hop.stop().unwrap();
    for fault in ["lost", "queue_full", "duplicated", "reordered", "corrupted"] {
        assert_eq!(count(&report, fault), 0, "{report:#}");
    }
    assert!(count(&report, "frames") >= 8, "{report:#}");
    assert_eq!(report["refused"], 0);
}

#[test]
fn netns_hop_stops_when_its_lab_is_dropped() {
    let lab = lab();
    let namespace = lab.namespace(Side::A).replace("-a", "-hop");
    let path = std::path::Path::new("/run/netns").join(&namespace);
    assert!(path.exists());
    let hop = Hop::start(&lab, HOP, "--loss 1").unwrap();
    drop(lab);
    assert!(!path.exists(), "{namespace} was left behind");
    assert!(hop.stop().is_err(), "it was ended");
}

/// BBR paces; CUBIC, the default, does not.
#[test]
fn netns_hop_loss_with_bbr() {
    let lab = lab();
    let tests = ["send_bw", "write_bw"];
    for (line, is_paced) in [("-s 20000 -n 60 -C bbr", true), ("-s 20000 -n 60", false)] {
        let (ran, report) = through(&lab, Family::V4, "--loss 3% --rtt 5ms --rate 100M", &tests, line);
        assert!(count(&report, "lost") > 0, "{report:#}");
        assert!(of_both_ends(&ran, "tcp.retransmits") > 0);
        assert_eq!(of_both_ends(&ran, "tcp.paced") > 0, is_paced, "{line}");
    }
}

fn loss_both_ways(family: Family) {
    let lab = lab();
    // The length of a burst is in frames, not time: a long burst would drop backed-off retransmissions for
    // half a minute.
    let hop = "--loss 2% --bursts 0.2%,50%,60% --rtt 1ms --rate 500M";
    let tests = ["send_bw", "write_bw", "read_bw", "send_lat"];
    let (ran, report) = through(&lab, family, hop, &tests, "-s 20000 -n 60");
    for direction in ["a_to_b", "b_to_a"] {
        assert!(report[direction]["lost"].as_u64().unwrap() > 0, "{report:#}");
    }
    assert!(of_both_ends(&ran, "tcp.retransmits") > 0);
    assert!(of_both_ends(&ran, "framing.placed_early") > 0, "nothing was placed beyond a gap");
}

#[test]
fn netns_hop_loss_both_ways_over_ipv4() {
    loss_both_ways(Family::V4);
}

#[test]
fn netns_hop_loss_both_ways_over_ipv6() {
    loss_both_ways(Family::V6);
}

/// Chains of chunks that are lost, retransmitted and, without markers, held beyond gaps.
#[test]
fn netns_hop_loss_of_frames_of_many_chunks() {
    for (family, mtu) in [(Family::V4, 9000), (Family::V6, 65_535)] {
        let lab = Lab::up(LabOptions { mtu, hop: true, ..LabOptions::default() }).unwrap();
        for markers in ["prefer", "off"] {
            let line = format!("-s 300000 -n 60 -t 16 -r 16 --markers {markers}");
            let hop = "--loss 3% --reorder 3% --reorder-by 1ms --rtt 1ms --rate 1G";
            let (ran, report) = through(&lab, family, hop, &["send_bw", "write_bw", "read_bw"], &line);
            assert!(count(&report, "lost") > 0 && of_both_ends(&ran, "tcp.retransmits") > 0, "{report:#}");
            assert!(of_both_ends(&ran, "tcp.out_of_order") > 0, "nothing arrived beyond a gap");
        }
    }
}

/// Without markers, data beyond gaps occupies receive frames; data in flight occupies transmit frames.
#[test]
fn netns_hop_hundreds_of_queue_pairs_share_the_frames_of_both_ends() {
    let lab = lab();
    let line = "-q 200 -b -s 64K -n 5 -t 5 --markers off";
    let (ran, _) = through(&lab, Family::V4, "--loss 1% --rtt 1ms", &["write_bw"], line);
    assert!(of_both_ends(&ran, "stack.starved") > 0, "frames never ran out");
}

fn reordering_and_duplication(family: Family) {
    let lab = lab();
    let hop = "--reorder 5% --depth 40 --reorder-by 2ms --duplicate 5% --rtt 500us --rate 500M";
    let (ran, report) = through(&lab, family, hop, &["send_bw", "write_bw", "read_bw"], "-s 20000 -n 100");
    assert!(count(&report, "reordered") > 0 && count(&report, "duplicated") > 0, "{report:#}");
    assert!(of_both_ends(&ran, "tcp.out_of_order") > 0 && of_both_ends(&ran, "tcp.duplicates") > 0);
}

#[test]
fn netns_hop_reordering_and_duplication_over_ipv4() {
    reordering_and_duplication(Family::V4);
}

#[test]
fn netns_hop_reordering_and_duplication_over_ipv6() {
    reordering_and_duplication(Family::V6);
}

fn corruption(family: Family) {
    let lab = lab();
    let hop = "--corrupt 2% --rtt 500us --rate 500M";
    let (ran, report) = through(&lab, family, hop, &["send_bw", "write_bw", "read_bw"], "-s 20000 -n 100");
    assert!(count(&report, "corrupted") > 0, "{report:#}");
    assert!(of_both_ends(&ran, "stack.bad_checksum") > 0);
    assert_eq!(of_both_ends(&ran, "framing.crc_errors"), 0, "TCP's checksum sees every single bit");
}

#[test]
fn netns_hop_corruption_over_ipv4() {
    corruption(Family::V4);
}

#[test]
fn netns_hop_corruption_over_ipv6() {
    corruption(Family::V6);
}

#[test]
fn netns_hop_corruption_with_valid_tcp_checksum_ends_the_stream_and_corrupts_nothing() {
    let lab = lab();
    let _hop = Hop::start(&lab, HOP, "--corrupt 5% --repair 1 --only a --rate 500M").unwrap();
    let error = Perf::new(&lab, PROGRAM, "write_bw").both("-s 20000 -n 300").run().unwrap_err();
    let error = format!("{error:#}");
    assert!(!error.contains("still running"), "{error}");
    assert!(!error.contains(" instead of 0x"), "{error}");
}

#[test]
fn netns_hop_a_long_path_with_a_short_queue() {
    let lab = lab();
    let hop = "--rate 50M --rtt 40ms --queue 30 --loss 0.5%";
    let (ran, report) = through(&lab, Family::V4, hop, &["write_bw"], "-s 64K -n 60 -t 32");
    assert!(count(&report, "queue_full") > 0, "{report:#}");
    assert!(of_both_ends(&ran, "tcp.recoveries") > 0);
}
