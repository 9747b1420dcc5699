//! The raw AF_XDP reference of `xwarp-perf` between two namespaces, and the page that `compare` writes: every row
//! is there and every figure valid. Speed is judged once: polling ends on one processor must not be a thousand times too slow.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{collections::BTreeSet, fs, time::Duration};

use serde_json::Value;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
};
use xwarp_perf::cpu;

const PROGRAM: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);

/// Runs one raw test and returns the client's JSON.
fn raw(lab: &Lab, family: Family, line: &str) -> Value {
    run(lab, family, &format!("{line} -d {INTERFACE}"))
}

/// Runs one test and returns the client's JSON.
fn run(lab: &Lab, family: Family, line: &str) -> Value {
    let json = lab.file("run.json");
    let path = json.to_string_lossy().into_owned();
    let server = lab.address(Side::B, family).to_string();
    let words: Vec<&str> = line.split_whitespace().collect();
    let start = |side, extra: &[&str]| -> Running {
        lab.start(side, PROGRAM, &[words.as_slice(), extra].concat()).unwrap()
    };
    let mut waiting = start(Side::B, &[]);
    waiting.wait_for("Waiting for a client", LIMIT).unwrap();
    start(Side::A, &["--out_json", "--out_json_file", &path, &server]).finish(LIMIT).unwrap();
    waiting.finish(LIMIT).unwrap();
    serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap()
}

#[test]
fn netns_raw_frames_cross_in_both_families() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    for family in [Family::V4, Family::V6] {
        for line in ["raw_lat -s 64 -n 100", "raw_lat -s 1 -D 0.05 -e"] {
            let ran = raw(&lab, family, line);
            assert!(ran["xwarp"]["rows"][0]["latency"]["typical"].as_f64().unwrap() > 0.0, "{line}: {ran:#}");
        }
        for line in ["raw_bw -a -n 3", "raw_bw -s 64K -D 0.05 -e"] {
            let ran = raw(&lab, family, line);
            let rows = ran["xwarp"]["rows"].as_array().unwrap();
            assert_eq!(rows.len(), if line.contains("-a") { 23 } else { 1 });
            assert!(rows.iter().all(|row| row["bw_average"].as_f64().unwrap() > 0.0), "{line}: {ran:#}");
        }
    }
}

#[test]
fn netns_raw_frames_are_as_large_as_the_mtu() {
    let lab = Lab::up(LabOptions { mtu: 65535, ..LabOptions::default() }).unwrap();
    let ran = raw(&lab, Family::V4, "raw_bw -s 64K -n 100");
    assert!(ran["xwarp"]["rows"][0]["bw_average"].as_f64().unwrap() > 0.0, "{ran:#}");
    let ran = raw(&lab, Family::V4, "raw_lat -s 3000 -n 20");
    assert!(ran["xwarp"]["rows"][0]["latency"]["typical"].as_f64().unwrap() > 0.0, "{ran:#}");
}

/// The limit is measured over xsk-rs: its rows have what those over our driver have, in both modes and families, and with frames of
/// many chunks. The program of libxdp leaves the interface with the end.
#[test]
fn netns_raw_frames_cross_over_xsk_rs() {
    let small = Lab::up(LabOptions::default()).unwrap();
    for (family, mode) in [(Family::V4, "generic"), (Family::V6, "generic"), (Family::V4, "copy")] {
        for line in ["raw_lat -s 64 -n 100", "raw_lat -s 1 -D 0.05 -e"] {
            let ran = raw(&small, family, &format!("{line} --over xsk-rs --mode {mode}"));
            let latency = &ran["xwarp"]["rows"][0]["latency"];
            assert!(latency["typical"].as_f64().unwrap() > 0.0, "{line}, {mode}: {ran:#}");
        }
        let ran = raw(&small, family, &format!("raw_bw -s 64K -n 100 --over xsk-rs --mode {mode}"));
        assert_eq!(ran["xwarp"]["rows"][0]["iterations"].as_u64(), Some(100), "{mode}: {ran:#}");
        assert!(ran["xwarp"]["rows"][0]["bw_average"].as_f64().unwrap() > 0.0, "{mode}: {ran:#}");
    }
    for side in [Side::A, Side::B] {
        let link = small.run(side, "ip", &["link", "show", INTERFACE]).unwrap();
        assert!(!link.contains("xdp"), "{link}");
    }
    let large = Lab::up(LabOptions { mtu: 65535, ..LabOptions::default() }).unwrap();
    let ran = raw(&large, Family::V4, "raw_bw -s 64K -n 100 --over xsk-rs --mode generic");
    assert!(ran["xwarp"]["rows"][0]["bw_average"].as_f64().unwrap() > 0.0, "{ran:#}");
    let ran = raw(&large, Family::V4, "raw_lat -s 5000 -n 20 --over xsk-rs --mode generic");
    assert!(ran["xwarp"]["rows"][0]["latency"]["typical"].as_f64().unwrap() > 0.0, "{ran:#}");
}

/// Every 64-byte message is a frame; messages of 64 KiB are a stream of full frames.
#[test]
fn netns_raw_sends_frames_of_the_mtu_and_acknowledges_every_fourth() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let received = |side| {
        let text =
            lab.run(side, "cat", &[&format!("/sys/class/net/{INTERFACE}/statistics/rx_packets")]).unwrap();
        text.trim().parse::<u64>().unwrap()
    };
    for (line, frames) in
        [("raw_bw -s 64 -n 1000", 1000), ("raw_bw -s 65536 -n 20", (65536_u64 * 20).div_ceil(1460))]
    {
        let before = (received(Side::A), received(Side::B));
        raw(&lab, Family::V4, line);
        let (acks, data) = (received(Side::A) - before.0, received(Side::B) - before.1);
        // Besides: orders, their answers, and what the kernel says to its neighbours.
        assert!((frames..frames + 60).contains(&data), "{line}: {data} frames of data");
        assert!((frames / 4..frames / 4 + 60).contains(&acks), "{line}: {acks} acknowledgements");
    }
}

#[test]
fn netns_raw_refuses_a_ping_pong_that_does_not_fit_a_frame() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let mut server = lab.start(Side::B, PROGRAM, &["raw_lat", "-d", INTERFACE]).unwrap();
    server.wait_for("Waiting for a client", LIMIT).unwrap();
    let address = lab.address(Side::B, Family::V4).to_string();
    let client = lab.start(Side::A, PROGRAM, &["raw_lat", "-d", INTERFACE, "-s", "1461", &address]).unwrap();
    let error = client.finish(LIMIT).unwrap_err();
    assert!(format!("{error:#}").contains("1460 bytes"), "{error:#}");
}

/// Two ends that poll on one processor hand it over to each other, instead of polling in vain for the rest of their time slices: the
/// typical round trip then takes a few times as long as that of kernel TCP whose ends sleep, not a thousand times. Medians, because
/// others have the processor too.
#[test]
fn netns_polling_ends_on_one_processor_hand_it_over() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let cpu = cpu::allowed()[0];
    let typical = |line: &str| {
        let ran = run(&lab, Family::V4, &format!("{line} -s 64 -n 200 --pin {cpu}"));
        ran["xwarp"]["rows"][0]["latency"]["typical"].as_f64().unwrap()
    };
    let sleeping = typical("tcp_lat -e -p 18600");
    let polling = typical(&format!("send_lat -d {INTERFACE}"));
    assert!(polling < 100.0 * sleeping, "{polling} us, and {sleeping} us of kernel TCP whose ends sleep");
}

/// The tables of the page, with the subjects of each and the number of values in its first column.
const TABLES: [(&str, &[&str], usize); 12] = [
    ("Polling", &["Send", "Write", "raw AF_XDP", "raw xsk-rs, generic", "raw xsk-rs, native", "TCP"], 2),
    ("Sleeping", &["Send", "Write with Immediate", "raw AF_XDP", "TCP"], 1),
    ("Rate", &["Write", "Send", "raw AF_XDP", "TCP"], 1),
    (
        "Bulk",
        &[
            "Write",
            "Send",
            "raw AF_XDP",
            "raw xsk-rs, generic",
            "raw xsk-rs, native",
            "TCP, offloads off",
            "TCP",
        ],
        2,
    ),
    ("Pairs", &["Write"], 2),
    ("PairsRate", &["Write"], 2),
    ("Memory", &["Write"], 1),
    ("LatencySizes", &["Write", "Send", "TCP"], 23),
    ("BandwidthSizes", &["Write", "Send", "raw AF_XDP", "TCP"], 23),
    ("BusyLatency", &["Send", "Write", "TCP"], 1),
    ("BusyBandwidth", &["Write", "Write, sleeping", "TCP"], 1),
    ("Idle", &["xwarp"], 1),
];

/// The tables that are measured only if they are named.
const FRAMINGS: [(&str, &[&str], usize); 2] = [
    ("Framings", &["MPA, markers", "MPA, no markers", "RDMA/TCP", "TCP, offloads off", "TCP"], 2),
    ("FramingsRate", &["MPA, markers", "MPA, no markers", "RDMA/TCP", "TCP"], 1),
];

/// A page of `compare`: as Markdown, as HTML, and its samples and goals as JSON.
struct Page {
    markdown: String,
    html: String,
    all: Value,
}

/// Runs `compare` with short measurements, and checks that the page has the rows of `tables` and no failure.
fn compare(options: &[&str], tables: &[(&str, &[&str], usize)]) -> Page {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let (html, json) = (lab.file("page.html"), lab.file("page.json"));
    let [a, b] = [Side::A, Side::B].map(|side| lab.namespace(side));
    let output = std::process::Command::new(PROGRAM)
        .args(["compare", "--quick", "-D", "0.02", "--mtus", "1500,3506"])
        .args(options)
        .args(["--netns-a", &a, "--netns-b", &b, "--html"])
        .arg(&html)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("round 1 of 1"), "{errors}");

    let all: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(all["failures"].as_array().map(Vec::len), Some(0), "{:#}", all["failures"]);
    let samples = all["samples"].as_array().unwrap();
    for &(table, subjects, values) in tables {
        for subject in subjects {
            let rows: Vec<&Value> =
                samples.iter().filter(|s| s["table"] == table && s["what"] == *subject).collect();
            assert_eq!(rows.len(), values, "{table}, {subject}");
            for row in rows {
                judge(table, row);
            }
        }
    }
    Page { markdown: String::from_utf8(output.stdout).unwrap(), html: fs::read_to_string(html).unwrap(), all }
}

#[test]
fn netns_compare_writes_a_page_with_every_row() {
    let Page { markdown, html, all } = compare(&["--queue-pairs", "1,20"], &TABLES);
    let numbers: BTreeSet<u64> =
        all["goals"].as_array().unwrap().iter().map(|goal| goal["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, BTreeSet::from([1, 2, 3, 4, 5, 6, 7, 8]));
    for goal in all["goals"].as_array().unwrap() {
        let text = goal["text"].as_str().unwrap();
        assert!(markdown.contains(text), "the page lacks the goal {text}");
    }
    assert_eq!(markdown.matches("\n## ").count(), 2 + TABLES.len(), "{markdown}");

    assert_eq!(html.matches("<h2>").count(), 2 + TABLES.len());
    assert_eq!(html.matches("<svg").count(), 3, "by MTU, and twice by size");
    assert!(!html.contains("NaN") && !html.contains("href=") && !html.contains("src="), "it stands alone");
}

/// The framings beside each other and beside kernel TCP, without goals.
#[test]
fn netns_compare_measures_the_framings_if_they_are_named() {
    let Page { markdown, all, .. } = compare(&["--only", "framings,framings_rate"], &FRAMINGS);
    assert_eq!(all["goals"].as_array().map(Vec::len), Some(0));
    assert_eq!(markdown.matches("\n## ").count(), 1 + FRAMINGS.len(), "{markdown}");
}

/// Asserts that a measurement has the figures of its table.
fn judge(table: &str, row: &Value) {
    let figures: &[&str] = match table {
        "Polling" | "Sleeping" | "LatencySizes" | "BusyLatency" => &["half_round_trip_us", "p99_us"],
        "Memory" => &["bytes_per_connection"],
        "Idle" => &["registration_us"],
        _ => &["gbits", "million_messages", "cpu_sec_per_gib"],
    };
    for figure in figures {
        let value = row[figure].as_f64().unwrap_or_else(|| panic!("{figure}: {row:#}"));
        assert!(value.is_finite() && value > 0.0, "{figure}: {row:#}");
    }
    assert!(["N", "F", "~", "?"].contains(&row["tag"].as_str().unwrap()), "{row:#}");
}
