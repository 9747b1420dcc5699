//! `xwarp-perf` with RDMA/TCP of 2000 between two namespaces: every byte is verified, and every captured segment by the
//! dissector of `docs/rdma-tcp.lua`, which shares nothing with the code.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions},
    perf::{Perf, Ran},
    tshark::{self, Segments},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const FRAMING: &str = "--framing rdma-tcp";

/// Checks every segment of a captured run.
fn judge(ran: &Ran) -> Segments {
    for name in [
        "stack.malformed",
        "stack.bad_checksum",
        "framing.crc_errors",
        "framing.marker_errors",
        "rdmap.failed",
    ] {
        assert_eq!(ran.counter(name), 0, "{name}: {:#}", ran.client["xwarp"]["counters"]);
    }
    assert!(ran.printed.contains("all as they were sent"), "{}", ran.printed);
    let segments = tshark::segments(ran.capture.as_deref().unwrap()).unwrap();
    assert!(segments.complaints.is_empty(), "{:#?}", segments.complaints);
    let complete = segments.payloads == segments.frames && segments.good_crcs >= segments.frames;
    assert!(complete || ran.retransmitted(), "{segments:?}");
    assert!(segments.controls.contains_key(&1) && segments.controls.contains_key(&2), "{segments:?}");
    segments
}

fn every_operation(family: Family) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    for (test, kinds) in [
        ("send_bw", &[0][..]),
        ("send_lat", &[0]),
        ("write_bw", &[1]),
        ("write_lat", &[1]),
        ("read_bw", &[2, 3]),
        ("read_lat", &[2, 3]),
    ] {
        let perf =
            Perf::new(&lab, PROGRAM, test).over(family).both(FRAMING).both("-s 3000 -n 200").captured();
        let ran = perf.run().unwrap();
        let segments = judge(&ran);
        for kind in kinds {
            assert!(segments.messages[*kind] >= 200 || ran.retransmitted(), "{test}: {segments:?}");
        }
        let operation = test.split('_').next().unwrap();
        assert!(ran.counter(&format!("rdmap.{operation}s")) >= 200, "{:#}", ran.client["xwarp"]["counters"]);
    }
}

#[test]
fn netns_rdma_tcp_every_operation_over_ipv4() {
    every_operation(Family::V4);
}

#[test]
fn netns_rdma_tcp_every_operation_over_ipv6() {
    every_operation(Family::V6);
}

#[test]
fn netns_rdma_tcp_sizes_from_one_byte_up() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    // Sizes around the limits of words, segments and 16-bit lengths.
    for size in ["1", "3", "4", "1411", "1412", "1413", "1420", "1421", "65535"] {
        for test in ["send_bw", "write_bw", "read_bw"] {
            let line = format!("{FRAMING} -s {size} -n 8 -t 8 -r 8");
            judge(&Perf::new(&lab, PROGRAM, test).both(&line).captured().run().unwrap());
        }
    }
}

/// Segments of up to 64 KiB less one, in frames of several chunks; both directions, and several queue pairs.
#[test]
fn netns_rdma_tcp_frames_of_many_chunks() {
    for mtu in [9000, 65_535] {
        let lab = Lab::up(LabOptions { mtu, ..LabOptions::default() }).unwrap();
        for test in ["send_bw", "write_bw", "read_bw"] {
            let line = format!("{FRAMING} -b -q 2 -s 100000 -n 4");
            judge(&Perf::new(&lab, PROGRAM, test).both(&line).captured().run().unwrap());
        }
    }
}

/// Nothing negotiates the framing: ends that chose different ones must fail in time, not wait for each other.
#[test]
fn netns_rdma_tcp_and_mpa_do_not_connect() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    for (server, client) in [("", FRAMING), (FRAMING, "")] {
        let perf = Perf::new(&lab, PROGRAM, "write_bw").server(server).client(client).both("-n 5");
        let running = perf.start_server().unwrap();
        let mut client = perf.start_client().unwrap();
        let status = client.wait(std::time::Duration::from_secs(30)).unwrap();
        assert!(!status.success(), "{}", client.output());
        drop(running);
    }
}
