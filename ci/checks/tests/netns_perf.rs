//! `xwarp-perf` between two namespaces: every operation, size and setting, each byte verified, each frame judged.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions},
    perf::{Expected, Perf, Ran},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const TESTS: [&str; 6] = ["send_bw", "send_lat", "write_bw", "write_lat", "read_bw", "read_lat"];

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// No frame was lost on the cable, and none was refused: there is nothing between the two ends that could.
fn undisturbed(ran: &Ran) {
    for name in
        ["stack.malformed", "stack.bad_checksum", "mpa.crc_errors", "mpa.marker_errors", "rdmap.failed"]
    {
        assert_eq!(ran.counter(name), 0, "{name}: {:#}", ran.client["counters"]);
        assert_eq!(ran.server["counters"][name].as_u64().unwrap_or(0), 0, "{name} at the server");
    }
}

fn every_operation(family: Family) {
    let lab = lab();
    for test in TESTS {
        let ran =
            Perf::new(&lab, PROGRAM, test).over(family).both("-s 3000 -n 200").captured().run().unwrap();
        assert!(ran.printed.contains("all as they were sent"), "{}", ran.printed);
        assert_eq!(ran.client["results"][0]["MsgSize"], 3000);
        let operation = test.split('_').next().unwrap();
        assert!(ran.counter(&format!("rdmap.{operation}s")) >= 200, "{:#}", ran.client["counters"]);
        undisturbed(&ran);
        ran.judge(Expected::default()).unwrap_or_else(|error| panic!("{test}: {error:#}"));
    }
}

#[test]
fn netns_every_operation_over_ipv4() {
    every_operation(Family::V4);
}

#[test]
fn netns_every_operation_over_ipv6() {
    every_operation(Family::V6);
}

#[test]
fn netns_sizes_from_one_byte_up() {
    let lab = lab();
    // Around the sizes at which something changes: words, markers, segments, 16 bits.
    for size in ["1", "3", "4", "505", "512", "1441", "1442", "1443", "65535", "65536", "1M"] {
        for test in ["send_bw", "write_bw", "read_bw"] {
            let line = format!("-s {size} -n 20 -t 8 -r 8");
            let ran = Perf::new(&lab, PROGRAM, test).both(&line).captured().run().unwrap();
            undisturbed(&ran);
            ran.judge_framing(Expected::default()).unwrap_or_else(|error| panic!("{test} {size}: {error:#}"));
        }
    }
}

#[test]
fn netns_messages_of_64_mebibytes() {
    let lab = lab();
    for test in ["send_bw", "write_bw", "read_bw"] {
        let ran = Perf::new(&lab, PROGRAM, test).both("-s 64M -n 2 -t 2 -r 2").captured().run().unwrap();
        undisturbed(&ran);
        ran.judge_framing(Expected::default()).unwrap();
    }
}

#[test]
fn netns_all_sizes_of_perftest() {
    let lab = lab();
    let ran = Perf::new(&lab, PROGRAM, "write_bw").both("-a -n 20").run().unwrap();
    assert_eq!(ran.client["results"].as_array().map(Vec::len), Some(23));
    undisturbed(&ran);
}

#[test]
fn netns_queue_pairs_from_2_to_64() {
    let lab = lab();
    for count in [2, 16, 64] {
        for test in ["send_bw", "write_bw", "read_bw"] {
            let line = format!("-q {count} -s 2000 -n 30 -t 16 -r 16");
            let ran = Perf::new(&lab, PROGRAM, test).both(&line).captured().run().unwrap();
            undisturbed(&ran);
            let connections = ran.judge_framing(Expected::default()).unwrap();
            assert_eq!(connections.len(), count + 1, "with the control connection");
        }
    }
}

#[test]
fn netns_both_directions_at_once() {
    let lab = lab();
    for test in ["send_bw", "write_bw", "read_bw"] {
        let ran = Perf::new(&lab, PROGRAM, test).both("-b -q 2 -s 10000 -n 200").captured().run().unwrap();
        assert_eq!(ran.client["results"][0]["n_iterations"], 800, "both directions count");
        undisturbed(&ran);
        ran.judge(Expected::default()).unwrap();
    }
}

#[test]
fn netns_a_shared_receive_queue() {
    let lab = lab();
    let ran = Perf::new(&lab, PROGRAM, "send_bw")
        .both("--use-srq -q 8 -s 3000 -n 100 -r 32")
        .captured()
        .run()
        .unwrap();
    undisturbed(&ran);
    ran.judge(Expected::default()).unwrap();
}

#[test]
fn netns_markers_crc_and_revisions_in_every_combination() {
    let lab = lab();
    for revision in [1, 2] {
        for (crc_line, crc) in [("", true), ("--no-crc", false)] {
            for (markers_line, markers) in [("--markers=require", true), ("--markers=off", false)] {
                let line = format!("-s 5000 -n 50 --mpa-rev {revision} {crc_line} {markers_line}");
                let expected = Expected { markers: (markers, markers), crc, revision };
                for test in ["send_bw", "write_bw"] {
                    let ran = Perf::new(&lab, PROGRAM, test).both(&line).captured().run().unwrap();
                    undisturbed(&ran);
                    ran.judge(expected).unwrap_or_else(|error| panic!("{test} {line}: {error:#}"));
                }
            }
        }
    }
}

#[test]
fn netns_each_end_decides_for_what_it_receives() {
    let lab = lab();
    // RFC 5044 section 7.1: M asks for markers towards who says it; C of either end means CRCs for both.
    let cases = [
        (
            "--markers=require --no-crc",
            "--markers=off",
            Expected { markers: (true, false), crc: true, revision: 2 },
        ),
        (
            "--markers=off",
            "--markers=require --no-crc",
            Expected { markers: (false, true), crc: true, revision: 2 },
        ),
        ("--markers=off", "--markers=prefer", Expected { markers: (false, true), crc: true, revision: 2 }),
    ];
    for (server, client, expected) in cases {
        let perf = Perf::new(&lab, PROGRAM, "send_lat").both("-s 3000 -n 50").server(server).client(client);
        let ran = perf.captured().run().unwrap();
        undisturbed(&ran);
        ran.judge_framing(expected).unwrap_or_else(|error| panic!("{server} / {client}: {error:#}"));
    }
}

#[test]
fn netns_a_vlan_by_option() {
    let lab = lab();
    let ran = Perf::new(&lab, PROGRAM, "write_bw").both("--vlan 42 -s 4000 -n 100").captured().run().unwrap();
    undisturbed(&ran);
    ran.judge(Expected::default()).unwrap();
    let capture = ran.capture.unwrap();
    let tags = std::process::Command::new("tshark")
        .args(["-n", "-r"])
        .arg(capture)
        .args(["-T", "fields", "-e", "vlan.id"])
        .output()
        .unwrap();
    let tags = String::from_utf8(tags.stdout).unwrap();
    assert!(tags.lines().count() > 100 && tags.lines().all(|tag| tag == "42"), "{tags}");
}

#[test]
fn netns_larger_frames_and_more_queues() {
    let lab = Lab::up(LabOptions { mtu: 3506, queues: 2, ..LabOptions::default() }).unwrap();
    for test in ["send_bw", "write_bw", "read_bw"] {
        let ran = Perf::new(&lab, PROGRAM, test).both("-q 4 -s 20000 -n 100").captured().run().unwrap();
        undisturbed(&ran);
        ran.judge(Expected::default()).unwrap();
    }
}

#[test]
fn netns_every_mode_and_way_of_progress() {
    let lab = lab();
    for line in [
        "--mode copy",
        "--mode generic",
        "--progress application",
        "--progress thread",
        "-e",
        "-e --progress application",
        "-e --progress thread",
    ] {
        for test in ["send_lat", "write_bw", "read_bw"] {
            let ran = Perf::new(&lab, PROGRAM, test).both(&format!("-s 2000 -n 50 {line}")).run();
            undisturbed(&ran.unwrap_or_else(|error| panic!("{test} {line}: {error:#}")));
        }
    }
}

#[test]
fn netns_a_duration_ends_in_time() {
    let lab = lab();
    for test in TESTS {
        let begin = std::time::Instant::now();
        let ran = Perf::new(&lab, PROGRAM, test).both("-s 4096 -D 1").run().unwrap();
        assert!(ran.client["results"][0]["n_iterations"].as_u64().unwrap() > 10, "{test}");
        assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{test} took {:?}", begin.elapsed());
        undisturbed(&ran);
    }
}

#[test]
fn netns_the_wrong_test_is_refused_with_words() {
    let lab = lab();
    let server = Perf::new(&lab, PROGRAM, "send_bw").start_server().unwrap();
    let error = Perf::new(&lab, PROGRAM, "write_lat").start_client().unwrap();
    let error = error.finish(std::time::Duration::from_secs(30)).unwrap_err().to_string();
    assert!(error.contains("the client runs write_lat, this server send_bw"), "{error}");
    let error = server.finish(std::time::Duration::from_secs(30)).unwrap_err().to_string();
    assert!(error.contains("the client runs write_lat, this server send_bw"), "{error}");
}
