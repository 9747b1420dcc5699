//! `xwarp-perf` between two namespaces: every operation, size and setting, with verification of every byte
//! and every frame.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::{Duration, Instant};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    perf::{Expected, Perf, Ran},
};
use xwarp_perf::cpu;

const PROGRAM: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const TESTS: [&str; 6] = ["send_bw", "send_lat", "write_bw", "write_lat", "read_bw", "read_lat"];

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// Asserts that no frame was lost or rejected: nothing between the two ends could cause it.
fn undisturbed(ran: &Ran) {
    for name in [
        "stack.malformed",
        "stack.bad_checksum",
        "framing.crc_errors",
        "framing.marker_errors",
        "rdmap.failed",
    ] {
        assert_eq!(ran.counter(name), 0, "{name}: {:#}", ran.client["xwarp"]["counters"]);
        assert_eq!(ran.server["xwarp"]["counters"][name].as_u64().unwrap_or(0), 0, "{name} at the server");
    }
}

fn every_operation(family: Family) {
    let lab = lab();
    for test in TESTS {
        let ran =
            Perf::new(&lab, PROGRAM, test).over(family).both("-s 3000 -n 200").captured().run().unwrap();
        assert!(ran.printed.contains("all as they were sent"), "{}", ran.printed);
        assert_eq!(ran.client["results"]["MsgSize"], 3000);
        let operation = test.split('_').next().unwrap();
        assert!(ran.counter(&format!("rdmap.{operation}s")) >= 200, "{:#}", ran.client["xwarp"]["counters"]);
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
    // Sizes around the limits of words, markers, segments and 16-bit lengths.
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
    assert_eq!(ran.client["xwarp"]["rows"].as_array().map(Vec::len), Some(23));
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
fn netns_engines_share_the_queue_pairs() {
    let lab = Lab::up(LabOptions { queues: 2, ..LabOptions::default() }).unwrap();
    for test in ["send_bw", "write_bw", "read_bw"] {
        let line = "--engines 2 -q 4 -s 20000 -n 100 -t 16 -r 16";
        let ran = Perf::new(&lab, PROGRAM, test).both(line).run().unwrap();
        undisturbed(&ran);
        assert_eq!(ran.printed.matches("local address").count(), 2, "{}", ran.printed);
        assert_eq!(ran.client["results"]["n_iterations"], 400);
        // Each connection is on the queue of its engine.
        assert_eq!(ran.counter("stack.handed_over"), 0);
    }
    let perf = Perf::new(&lab, PROGRAM, "send_bw").both("-q 2 -n 10").client("--engines 2");
    let error = format!("{:#}", perf.run().unwrap_err());
    assert!(error.contains("the client has 2 engines, this server 1"), "{error}");
}

#[test]
fn netns_both_directions_at_once() {
    let lab = lab();
    for test in ["send_bw", "write_bw", "read_bw"] {
        let ran = Perf::new(&lab, PROGRAM, test).both("-b -q 2 -s 10000 -n 200").captured().run().unwrap();
        assert_eq!(ran.client["results"]["n_iterations"], 800, "both directions count");
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
fn netns_each_end_chooses_markers_for_its_receive_direction() {
    let lab = lab();
    // RFC 5044 section 7.1: M requests markers towards its sender; C from either end enables CRCs in both
    // directions.
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

/// Frames of several chunks, of both families and in both modes; the small ones of the same connection too.
#[test]
fn netns_frames_of_many_chunks() {
    for (mtu, chunked) in [(9000, 2), (65_535, 9)] {
        let lab = Lab::up(LabOptions { mtu, ..LabOptions::default() }).unwrap();
        for (family, mode) in [(Family::V4, "copy"), (Family::V6, "copy"), (Family::V4, "generic")] {
            for (test, depth) in
                [("send_bw", "-t 16 -r 16"), ("write_bw", "-t 16"), ("read_bw", "-t 16"), ("send_lat", "")]
            {
                let line = format!("-s 300000 -n 40 {depth} --mode {mode}");
                let ran = Perf::new(&lab, PROGRAM, test).over(family).both(&line).captured().run().unwrap();
                assert!(ran.printed.contains("all as they were sent"), "{}", ran.printed);
                undisturbed(&ran);
                for name in ["link.receive_malformed", "link.kernel_tx_invalid", "link.kick_failed"] {
                    assert_eq!(ran.counter(name), 0, "{name}: {:#}", ran.client["xwarp"]["counters"]);
                }
                // Full segments have as many bytes as the MTU allows.
                let (bytes, frames) = (ran.counter("link.sent_bytes"), ran.counter("link.sent_frames"));
                let received =
                    ran.counter("link.received_bytes") / ran.counter("link.received_frames").max(1);
                let mean = (bytes / frames.max(1)).max(received);
                assert!(mean > chunked * 1000, "{test} at MTU {mtu}: frames of {mean} bytes");
                ran.judge_framing(Expected::default())
                    .unwrap_or_else(|error| panic!("{test} {mtu}: {error:#}"));
            }
        }
    }
}

/// A peer whose frames have one chunk gets segments of its size, and sends its own.
#[test]
fn netns_a_peer_with_smaller_frames() {
    let lab = Lab::up(LabOptions { mtu: 65_535, ..LabOptions::default() }).unwrap();
    lab.run(Side::B, "ip", &["link", "set", INTERFACE, "mtu", "3506"]).unwrap();
    for test in ["send_bw", "write_bw", "read_bw"] {
        let ran = Perf::new(&lab, PROGRAM, test).both("-b -s 100000 -n 100").captured().run().unwrap();
        undisturbed(&ran);
        ran.judge_framing(Expected::default()).unwrap();
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

/// Polls that do not run the engine are no rest for the progress thread, also where they keep its processor: it would nap, and each message
/// would wait for a time-out.
#[test]
fn netns_polls_beside_the_progress_thread_leave_it_its_work() {
    let lab = lab();
    let line = format!("-s 2000 -n 50 --progress thread --pin {}", cpu::allowed()[0]);
    undisturbed(&Perf::new(&lab, PROGRAM, "send_lat").both(&line).run().unwrap());
}

#[test]
fn netns_a_duration_ends_in_time() {
    let lab = lab();
    for test in TESTS {
        let begin = std::time::Instant::now();
        let ran = Perf::new(&lab, PROGRAM, test).both("-s 4096 -D 1").run().unwrap();
        assert!(ran.client["results"]["n_iterations"].as_u64().unwrap() > 10, "{test}");
        assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{test} took {:?}", begin.elapsed());
        undisturbed(&ran);
    }
}

#[test]
fn netns_the_rate_limit_and_the_latency_gap_hold_messages_back() {
    let lab = lab();
    let limited = "--rate_limit 400 --rate_units p --burst_size 4";
    let ran = Perf::new(&lab, PROGRAM, "write_bw").both("-s 4096 -n 100").client(limited).run().unwrap();
    // The first of the 25 bursts does not wait.
    let rate = ran.client["results"]["MsgRate"].as_f64().unwrap() * 1e6;
    assert!(rate <= 400.0 * 25.0 / 24.0 + 1.0, "{rate} messages/sec");
    let ran = Perf::new(&lab, PROGRAM, "send_lat").both("-D 1").client("--latency_gap 20000").run().unwrap();
    let rate = ran.client["results"]["tps_average"].as_f64().unwrap();
    assert!(rate <= 50.0, "{rate} messages/sec");
}

#[test]
fn netns_a_different_test_is_rejected_with_a_reason() {
    let lab = lab();
    let server = Perf::new(&lab, PROGRAM, "send_bw").start_server().unwrap();
    let error = Perf::new(&lab, PROGRAM, "write_lat").start_client().unwrap();
    let error = error.finish(std::time::Duration::from_secs(30)).unwrap_err().to_string();
    assert!(error.contains("the client runs write_lat, this server send_bw"), "{error}");
    let error = server.finish(std::time::Duration::from_secs(30)).unwrap_err().to_string();
    assert!(error.contains("the client runs write_lat, this server send_bw"), "{error}");
}

#[test]
fn netns_atomic_operations_return_consecutive_words() {
    let lab = lab();
    for test in ["atomic_bw", "atomic_lat"] {
        for operation in ["FETCH_AND_ADD", "CMP_AND_SWAP"] {
            let line = format!("-A {operation} -n 200");
            let ran = Perf::new(&lab, PROGRAM, test).both(&line).captured().run().unwrap();
            assert!(ran.printed.contains("all as they were sent"), "{}", ran.printed);
            assert_eq!(ran.client["results"]["MsgSize"], 8);
            assert!(ran.counter("rdmap.atomics") >= 200, "{:#}", ran.client["xwarp"]["counters"]);
            undisturbed(&ran);
            ran.judge_framing(Expected::default()).unwrap();
        }
    }
    let ran = Perf::new(&lab, PROGRAM, "atomic_bw").both("-b -q 4 -n 300").run().unwrap();
    assert_eq!(ran.client["results"]["n_iterations"], 2400, "both directions and all queue pairs count");
}

#[test]
fn netns_writes_with_immediate_data_complete_receives() {
    let lab = lab();
    for line in ["", "--recv_post_list 8 -r 64", "--use-srq -q 4", "--reversed", "-I 64 -s 64"] {
        let line = format!("--write_with_imm -s 3000 -n 200 {line}");
        let line = if line.contains("-I") { line.replace("-s 3000 ", "") } else { line };
        let ran = Perf::new(&lab, PROGRAM, "write_bw").both(&line).run().unwrap();
        assert_eq!(ran.client["test_info"]["test"], "RDMA_Write_imm_BW_Test");
        undisturbed(&ran);
    }
    let ran = Perf::new(&lab, PROGRAM, "write_lat").both("--write_with_imm -s 3000 -n 200").run().unwrap();
    assert!(ran.printed.contains("all as they were sent"), "{}", ran.printed);
}

#[test]
fn netns_receives_are_posted_by_lists_and_directions_reversed() {
    let lab = lab();
    for line in ["--recv_post_list 16 -r 32", "--recv_post_list 256 -r 4", "--reversed"] {
        let ran = Perf::new(&lab, PROGRAM, "send_bw").both(&format!("-s 2000 -n 500 {line}")).run().unwrap();
        undisturbed(&ran);
    }
    for test in ["write_bw", "read_bw"] {
        let ran = Perf::new(&lab, PROGRAM, test).both("-s 2000 -n 500 --reversed").run().unwrap();
        let operation = test.split('_').next().unwrap();
        let name = format!("rdmap.{operation}s");
        let at_server = ran.server["xwarp"]["counters"][&name].as_u64().unwrap_or(0);
        assert!(at_server >= 500, "the server is the one that posts: {at_server}");
    }
}

#[test]
fn netns_a_timed_latency_has_percentiles() {
    let lab = lab();
    let ran = Perf::new(&lab, PROGRAM, "send_lat").both("-s 64 -D 1").run().unwrap();
    assert!(ran.client["results"]["tps_average"].as_f64().unwrap() > 0.0);
    let latency = &ran.client["xwarp"]["rows"][0]["latency"];
    let figure = |name: &str| latency[name].as_f64().unwrap();
    assert!(figure("min") <= figure("typical") && figure("typical") <= figure("p99"), "{latency}");
    assert!(figure("p99") <= figure("p999") && figure("p999") <= figure("max"), "{latency}");
}

#[test]
fn netns_an_endless_test_prints_a_row_for_each_duration() {
    let lab = lab();
    let perf = Perf::new(&lab, PROGRAM, "write_bw").both("-s 4096 -D 0.2 --run_infinitely --keepalive 2");
    let mut server = perf.start_server().unwrap();
    let mut client = perf.start_client().unwrap();
    for _ in 0..3 {
        client.wait_for("4096 ", Duration::from_secs(10)).unwrap();
    }
    std::thread::sleep(Duration::from_secs(1));
    client.signal(Signal::KILL).unwrap();
    client.wait(Duration::from_secs(5)).unwrap();
    server.wait(Duration::from_secs(10)).unwrap();
    let rows = server.output().lines().filter(|line| line.trim_start().starts_with("4096 ")).count();
    assert!(rows >= 3, "{}", server.output());
}

#[test]
fn netns_a_dead_peer_is_reported_within_the_keepalive_time() {
    let lab = lab();
    for test in ["send_bw", "write_bw", "write_lat", "read_lat", "atomic_bw"] {
        for (killed, mode) in [("client", ""), ("server", ""), ("client", "-e")] {
            if test == "write_lat" && mode == "-e" {
                continue;
            }
            let line = format!("-D 60 --keepalive 2 {mode}");
            let perf = Perf::new(&lab, PROGRAM, test).both(&line);
            let server = perf.start_server().unwrap();
            let client = perf.start_client().unwrap();
            let (mut dead, mut left) = if killed == "client" { (client, server) } else { (server, client) };
            std::thread::sleep(Duration::from_secs(1));
            dead.signal(Signal::KILL).unwrap();
            dead.wait(Duration::from_secs(5)).unwrap();
            let begin = Instant::now();
            let status = left.wait(Duration::from_secs(10)).unwrap();
            let took = begin.elapsed();
            assert_eq!(status.code(), Some(3), "{test}, {killed} killed: {}", left.output());
            assert!(left.output().contains("the other end is gone: "), "{test}: {}", left.output());
            assert!(took < Duration::from_secs(5), "{test}, {killed} killed: noticed after {took:?}");
        }
    }
}

#[test]
fn netns_a_result_below_a_limit_has_its_own_exit_status() {
    let lab = lab();
    let perf = Perf::new(&lab, PROGRAM, "write_bw").both("-s 4096 -n 100").client("-w 1000000");
    let server = perf.start_server().unwrap();
    let mut client = perf.start_client().unwrap();
    assert_eq!(client.wait(Duration::from_secs(30)).unwrap().code(), Some(4), "{}", client.output());
    assert!(client.output().contains("is below the limit of 1000000"), "{}", client.output());
    server.finish(Duration::from_secs(30)).unwrap();
}

#[test]
fn netns_options_without_effect_are_noted_and_logs_have_no_colours_in_a_pipe() {
    let lab = lab();
    let perf = Perf::new(&lab, PROGRAM, "write_bw").both("-s 4096 -n 10 -F -vvv");
    let server = perf.start_server().unwrap();
    let printed = perf.start_client().unwrap().finish(Duration::from_secs(30)).unwrap();
    server.finish(Duration::from_secs(30)).unwrap();
    assert!(printed.contains("--CPU-freq has no effect: "), "{printed}");
    assert!(printed.lines().any(|line| line.contains("xwarp_")), "-vvv logs: {printed}");
    assert!(!printed.contains('\u{1b}'), "{printed:?}");
}

#[test]
fn netns_an_error_is_printed_once() {
    let lab = lab();
    let mut client =
        lab.start(xwarp_checks::lab::Side::A, PROGRAM, &["send_bw", "-d", "nosuch0", "10.77.0.2"]).unwrap();
    assert_eq!(client.wait(Duration::from_secs(10)).unwrap().code(), Some(1));
    let output = client.output();
    assert_eq!(output.lines().count(), 1, "{output}");
    let causes: Vec<&str> = output.split(": ").collect();
    for (at, cause) in causes.iter().enumerate() {
        assert!(!causes[..at].contains(cause), "'{cause}' twice in {output}");
    }
}
