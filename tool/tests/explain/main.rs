//! `xwarp explain` on captures of Linux' siw, on captures of our own frame tap, and on captures that were damaged in
//! every way that captures are damaged.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod files;
mod health;
mod own;

use std::{fs, path::Path};

use proptest::prelude::*;
use serde_json::Value;
use xwarp_tool::explain::{FileError, Options, explain};

/// A pcap file as its header and its records.
struct Pcap {
    header: Vec<u8>,
    records: Vec<Vec<u8>>,
}

impl Pcap {
    fn read(name: &str) -> Self {
        let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tcp-offload/tests/captures");
        let bytes = fs::read(captures.join(name)).unwrap();
        let (header, mut rest) = bytes.split_at(24);
        let mut records = Vec::new();
        while !rest.is_empty() {
            let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
            let (record, behind) = rest.split_at(16 + len);
            records.push(record.to_vec());
            rest = behind;
        }
        Self { header: header.to_vec(), records }
    }

    fn bytes(&self) -> Vec<u8> {
        [&self.header[..], &self.records.concat()].concat()
    }

    /// Position of the first record from `from` on with at least this many bytes of Ethernet frame.
    fn long_record(&self, from: usize, len: usize) -> usize {
        from + self.records[from..].iter().position(|record| record.len() >= 16 + len).unwrap()
    }
}

fn run(bytes: &[u8], options: Options) -> (String, Result<(), FileError>) {
    let mut out = Vec::new();
    let result = explain(bytes, options, &mut out).unwrap();
    (String::from_utf8(out).unwrap(), result)
}

fn words(bytes: &[u8]) -> String {
    let (text, result) = run(bytes, Options::default());
    result.unwrap();
    text
}

/// The events and summaries of a capture.
fn lines(bytes: &[u8]) -> Vec<Value> {
    let (text, result) = run(bytes, Options { json: true, ..Options::default() });
    result.unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn summaries(lines: &[Value]) -> Vec<&Value> {
    lines.iter().map(|line| &line["summary"]).filter(|summary| !summary.is_null()).collect()
}

fn events<'a>(lines: &'a [Value], name: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["event"] == name).collect()
}

#[test]
fn a_session_of_siw_is_explained_from_syn_to_fin() {
    let text = words(&Pcap::read("rping-ipv6-crc.pcap").bytes());
    let expected = [
        "new connection: client is [fd77::3]:51557, server is [fd77::2]:7207",
        "client  SYN, MSS 1440, window scale 7, SACK, timestamps",
        "server  SYN-ACK, MSS 1440",
        "client  connected, the handshake took 2.093 ms",
        "client  MPA Request: revision 2, wants CRC, no markers, IRD 1, ORD 1, no private data",
        "server  MPA Reply: revision 2, wants CRC, no markers, IRD 1, ORD 1, no private data",
        "client  agreed: MPA revision 2, CRC, no markers",
        "client  Send of 16 bytes, MSN 1",
        "server  RDMA Read Request: 99 bytes from STag 0x80e95b00 offset 0x5654032b77d0 to STag 0x3a422200",
        "client  RDMA Read Response of 99 bytes to STag 0x3a422200 offset 0x5635745b3120",
        "server  RDMA Write of 99 bytes to STag 0x64ad6c00 offset 0x5654032b7120",
        "client  FIN",
        "server  FIN",
        "26 frames in 0.012798 s; closed by both ends",
        "client sent 424 bytes in 7 segments; 6 FPDUs; 2x RDMA Read Response (198 bytes); 4x Send (64 bytes)",
    ];
    let mut rest = &text[..];
    for line in expected {
        let at = rest.find(line).unwrap_or_else(|| panic!("{line:?} is missing or misplaced in\n{text}"));
        rest = &rest[at..];
    }
    assert!(!text.contains('\u{1b}'), "no escape sequences");
}

#[test]
fn messages_of_several_segments_and_connections_are_counted() {
    let lines = lines(&Pcap::read("write-read-8k-crc.pcap").bytes());
    let found = summaries(&lines);
    assert_eq!(found.len(), 2);
    assert_eq!(found[1]["ends"][1]["messages"]["RDMA Read Response"]["bytes"], 5 * 8192);
    assert_eq!(found[1]["ends"][0]["messages"]["RDMA Read Request"]["messages"], 5);
    assert!(found.iter().all(|summary| summary["end"] == "closed by both ends"));
    assert_eq!(lines.last().unwrap()["frames"], 149);
}

#[test]
fn ready_to_receive_messages_are_named() {
    let read = words(&Pcap::read("rping-p2p-read-rtr-crc.pcap").bytes());
    assert!(read.contains("peer-to-peer mode with RDMA Read, no private data"), "{read}");
    assert!(read.contains("client  RDMA Read Request: 0 bytes"), "{read}");
    let write = words(&Pcap::read("rping-p2p-write-rtr-crc.pcap").bytes());
    assert!(write.contains("peer-to-peer mode with RDMA Write or RDMA Read"), "{write}");
}

#[test]
fn every_truncation_is_reported_and_nothing_else_is_an_error() {
    let whole = Pcap::read("rping-p2p-read-rtr-crc.pcap").bytes();
    for cut in 0..whole.len() {
        let (_, result) = run(&whole[..cut], Options { frames: true, ..Options::default() });
        match result {
            Err(FileError::Format) => assert!(cut < 24),
            Err(FileError::CutOff) => assert!(cut > 24),
            Err(other) => panic!("{cut}: {other}"),
            Ok(()) => assert!(cut >= 24),
        }
    }
}

/// Without its begin a connection has no roles, but the FPDUs are found.
#[test]
fn a_connection_that_begins_in_the_middle_is_understood() {
    for (name, crc) in [("rping-rev2-crc.pcap", true), ("rping-rev2-nocrc.pcap", false)] {
        let mut pcap = Pcap::read(name);
        let whole = lines(&pcap.bytes());
        pcap.records.drain(..10);
        let lines = lines(&pcap.bytes());
        assert_eq!(events(&lines, "middle").len(), 1);
        for found in events(&lines, "found") {
            assert_eq!(
                (&found["crc"], &found["markers"]),
                (&Value::from(crc), &Value::from(false)),
                "{name}"
            );
        }
        let messages = |lines: &[Value]| events(lines, "message").len();
        assert!(messages(&lines) + 3 >= messages(&whole), "{name}: {} messages", messages(&lines));
        assert_eq!(summaries(&lines)[0]["begins_in_the_middle"], true);
        assert_eq!(events(&lines, "bad_fpdu").len(), 0);
    }
}

#[test]
fn missing_frames_of_a_capture_are_reported_and_fpdus_found_again() {
    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    let lost = pcap.long_record(60, 1400);
    pcap.records.remove(lost);
    let lines = lines(&pcap.bytes());
    assert_eq!(events(&lines, "not_captured").len(), 1);
    assert!(events(&lines, "message").iter().any(|message| message["partial"] == true), "a part of a Send");
    assert!(events(&lines, "bad_fpdu").is_empty());
    let text = words(&pcap.bytes());
    assert!(text.contains("the capture lacks 1448 bytes that arrived"), "{text}");
}

#[test]
fn retransmissions_and_reordering_are_reported() {
    let whole = lines(&Pcap::read("send-1x10001-crc.pcap").bytes());
    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    let first = pcap.long_record(60, 1400);
    pcap.records.insert(first + 1, pcap.records[first].clone());
    let lines = lines(&pcap.bytes());
    assert_eq!(events(&lines, "retransmission").len(), 1);
    assert_eq!(summaries(&lines)[1]["ends"][0]["retransmitted_bytes"], 1448);
    assert_eq!(events(&lines, "message").len(), events(&whole, "message").len());

    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    let first = pcap.long_record(60, 1400);
    let next = pcap.long_record(first + 1, 1400);
    pcap.records.swap(first, next);
    // The frames keep their times: the second one arrived first.
    let times = [first, next].map(|at| pcap.records[at][..8].to_vec());
    pcap.records[first][..8].copy_from_slice(&times[1]);
    pcap.records[next][..8].copy_from_slice(&times[0]);
    let lines = crate::lines(&pcap.bytes());
    assert_ne!(summaries(&lines)[1]["ends"][0]["out_of_order"], 0);
    assert_eq!(events(&lines, "message").len(), events(&whole, "message").len());
}

#[test]
fn a_wrong_crc_is_reported_once() {
    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    let record = pcap.long_record(60, 1400);
    let byte = pcap.records[record].len() - 100;
    pcap.records[record][byte] ^= 1;
    let text = words(&pcap.bytes());
    assert_eq!(text.matches("BAD FPDU: the CRC of an FPDU is wrong").count(), 1, "{text}");
}

#[test]
fn frames_are_shown_by_smoltcp() {
    let mut pcap = Pcap::read("rping-ipv6-crc.pcap");
    for record in &mut pcap.records {
        // A VLAN tag behind the addresses.
        record.splice(16 + 12..16 + 12, [0x81, 0, 0, 7]);
        let len = (record.len() - 16) as u32;
        record[8..12].copy_from_slice(&len.to_le_bytes());
    }
    let (text, result) = run(&pcap.bytes(), Options { frames: true, ..Options::default() });
    result.unwrap();
    assert!(text.contains("VLAN 7"), "{text}");
    assert!(text.contains("IPv6 src=fd77::3 dst=fd77::2 nxt_hdr=TCP"), "{text}");
    assert!(text.contains("TCP src=51557 dst=7207 syn seq=2978249817"), "{text}");
    assert!(text.contains("client  Send of 16 bytes, MSN 1"), "tagged frames are understood: {text}");
}

#[test]
fn a_snap_length_leaves_headers() {
    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    for record in &mut pcap.records {
        let len = (record.len() - 16).min(96);
        record.truncate(16 + len);
        record[8..12].copy_from_slice(&(len as u32).to_le_bytes());
    }
    let lines = lines(&pcap.bytes());
    let found = summaries(&lines);
    assert_eq!(found[1]["ends"][0]["segments"], 41);
    assert!(found[1]["ends"][0]["not_captured_bytes"].as_u64().unwrap() > 40_000);
    assert_eq!(events(&lines, "retransmission").len(), 0);
}

/// Frames that were captured up to `len` bytes. Their lengths on the wire stay.
fn snapped(name: &str, len: usize) -> Vec<u8> {
    let mut pcap = Pcap::read(name);
    for record in &mut pcap.records {
        let len = (record.len() - 16).min(len);
        record.truncate(16 + len);
        record[8..12].copy_from_slice(&(len as u32).to_le_bytes());
    }
    pcap.bytes()
}

/// The set-up and the messages of a capture: who sent which message of how many bytes.
fn sent(lines: &[Value]) -> Vec<String> {
    let names = ["message", "mpa_request", "mpa_reply", "agreed", "bad_fpdu"];
    let shown = lines.iter().filter(|line| names.iter().any(|name| line["event"] == *name));
    shown
        .map(|line| format!("{} {} {} {}", line["from"], line["event"], line["kind"], line["bytes"]))
        .collect()
}

#[test]
fn messages_that_a_snap_length_cuts_have_their_lengths() {
    for name in ["send-1x10001-crc.pcap", "write-read-8k-crc.pcap", "rping-ipv6-crc.pcap"] {
        let whole = lines(&Pcap::read(name).bytes());
        let cut = lines(&snapped(name, 112));
        assert_eq!(sent(&cut), sent(&whole), "{name}");
        let bytes = |lines: &[Value]| summaries(lines)[0]["ends"][0]["bytes"].clone();
        assert_eq!(bytes(&cut), bytes(&whole), "{name}");
        assert_ne!(cut.last().unwrap()["cut_frames"], 0);
        assert_eq!(events(&cut, "not_captured").len(), 0, "{name}");
    }
    let text = words(&snapped("send-1x10001-crc.pcap", 112));
    assert!(
        text.contains("client  Send of 10001 bytes, MSN 1, in 8 segments (payload missing in the capture: 9"),
        "{text}"
    );
    assert!(text.contains("captured only in part"), "{text}");
}

/// Captures of a mirror port, or of a tap of one fibre.
#[test]
fn one_direction_alone_is_explained() {
    for name in ["send-1x10001-crc.pcap", "rping-rev2-crc.pcap", "rping-rev2-nocrc.pcap"] {
        let whole = lines(&Pcap::read(name).bytes());
        for (side, from_server) in [("client", false), ("server", true)] {
            let mut pcap = Pcap::read(name);
            // Source ports of the servers are the ones below 10000.
            pcap.records.retain(|record| {
                let ports = record[16 + 34..].first_chunk::<2>().unwrap();
                record[16 + 12..16 + 14] == [8, 0] && (u16::from_be_bytes(*ports) < 10_000) == from_server
            });
            let alone = lines(&pcap.bytes());
            let of = |lines: &[Value]| -> Vec<String> {
                let sent = sent(lines).into_iter();
                sent.filter(|line| line.starts_with(&format!("\"{side}")) && !line.contains("agreed"))
                    .collect()
            };
            assert_eq!(of(&alone), of(&whole), "{name}, {side}");
            let text = words(&pcap.bytes());
            assert!(text.contains(&format!("only frames of {side} are in the capture")), "{text}");
            assert!(!text.contains("not answered"), "{text}");
        }
    }
}

/// Without acknowledgements, a gap in one direction is given up after a time, and at the end.
#[test]
fn a_gap_in_one_direction_alone_is_given_up() {
    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    pcap.records.retain(|record| record[16 + 34..16 + 36] != 7205_u16.to_be_bytes());
    let lost = pcap.long_record(0, 1400);
    pcap.records.remove(lost);
    let lines = lines(&pcap.bytes());
    let messages = events(&lines, "message");
    let sends = messages.iter().filter(|message| message["connection"] == 2);
    assert!(sends.count() >= 4, "{}", words(&pcap.bytes()));
    assert_eq!(events(&lines, "not_captured").len(), 1);
}

#[test]
fn one_connection_and_only_summaries_can_be_chosen() {
    let bytes = Pcap::read("write-read-8k-crc.pcap").bytes();
    let (text, _) = run(&bytes, Options { connection: Some(2), ..Options::default() });
    assert!(text.contains("[2]") && !text.contains("[1]"), "{text}");
    let (text, _) = run(&bytes, Options { summary: true, ..Options::default() });
    assert!(text.contains("Connection 1") && !text.contains("[1]"), "{text}");
}

#[test]
fn a_page_has_a_diagram_of_each_connection_and_needs_no_other_file() {
    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    let first = pcap.long_record(60, 1400);
    pcap.records.insert(first + 1, pcap.records[first].clone());
    let (page, result) = run(&pcap.bytes(), Options { html: true, ..Options::default() });
    result.unwrap();
    for words in [
        "Connection 2",
        "closed by both ends",
        ">Send of 10001 bytes, MSN 1, in 8 segments",
        "<g class=\"bad\">",
        "retransmission of 1448 bytes",
        "slowed: client retransmitted 1 segment",
        "more like this)",
    ] {
        assert!(page.contains(words), "{words:?} is missing in\n{page}");
    }
    assert_eq!(page.matches("<svg").count(), 2);
    for tag in ["svg", "g", "text", "pre", "title", "body", "html"] {
        let opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    for word in ["<script", "http:", "https:", "url(", "href"] {
        assert!(!page.contains(word), "{word}");
    }
    let (page, _) = run(&pcap.bytes(), Options { html: true, connection: Some(1), ..Options::default() });
    assert_eq!(page.matches("<svg").count(), 1);
}

proptest! {
    /// Any bytes may be wrong, in the frames and in the headers of the file.
    #[test]
    fn prop_a_damaged_capture_never_panics(
        name in prop::sample::select(vec!["rping-rev2-crc.pcap", "rping-ipv6-crc.pcap", "rping-rev1-nocrc.pcap"]),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        json: bool,
        html: bool,
    ) {
        let mut bytes = Pcap::read(name).bytes();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = run(&bytes, Options { frames: true, all: true, json, html, ..Options::default() });
    }
}

#[test]
fn other_files_are_refused() {
    for bytes in [&b""[..], b"GIF89a", b"{}", &[0x0a, 0x0d, 0x0d, 0x0a, 0, 0]] {
        let (text, result) = run(bytes, Options::default());
        assert!(text.is_empty() && result.is_err(), "{bytes:?}");
    }
}
