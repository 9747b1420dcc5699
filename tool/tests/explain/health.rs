//! What slowed a connection, from captures whose frames are lost, delayed or have other windows.

use super::{Pcap, lines, summaries, words};

const CAPTURE: &str = "send-1x10001-crc.pcap";

/// Bytes of a record's header, and of the Ethernet header, in front of IPv4.
const IP: usize = 16 + 14;

/// Delays all records from this one on.
fn delay(pcap: &mut Pcap, from: usize, milliseconds: u32) {
    for record in &mut pcap.records[from..] {
        let [seconds, micros] = [0, 4].map(|at| u32::from_le_bytes(record[at..at + 4].try_into().unwrap()));
        let micros = micros + milliseconds * 1000;
        record[..4].copy_from_slice(&(seconds + micros / 1_000_000).to_le_bytes());
        record[4..8].copy_from_slice(&(micros % 1_000_000).to_le_bytes());
    }
}

fn is_from_server(record: &[u8]) -> bool {
    u16::from_be_bytes([record[IP + 20], record[IP + 21]]) < 10_000
}

/// The reasons of the second connection of the capture, which has the data.
fn reasons(pcap: &Pcap) -> Vec<String> {
    let lines = lines(&pcap.bytes());
    let health = summaries(&lines)[1]["health"].as_array().unwrap().clone();
    health.iter().map(|finding| finding["reason"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_capture_without_faults_was_not_slowed() {
    let text = words(&Pcap::read(CAPTURE).bytes());
    assert!(text.contains("; nothing slowed it"), "{text}");
    assert!(text.contains("idle: silent for 224.086 ms after frame 97, with nothing on its way"), "{text}");
    assert!(!text.contains("slowed: "), "{text}");
    assert_eq!(reasons(&Pcap::read(CAPTURE)), ["idle"]);
    let lines = lines(&Pcap::read(CAPTURE).bytes());
    assert!(summaries(&lines)[1]["first_byte_ms"].as_f64().unwrap() > 0.0);
}

#[test]
fn silences_with_and_without_bytes_on_their_way_differ() {
    // After a segment that is not acknowledged yet; the capture has a silence of the other kind.
    let mut pcap = Pcap::read(CAPTURE);
    let data = pcap.long_record(60, 1400);
    assert!(!is_from_server(&pcap.records[data]));
    delay(&mut pcap, data + 1, 250);
    assert_eq!(reasons(&pcap), ["unanswered", "idle"]);
    let text = words(&pcap.bytes());
    assert!(text.contains("slowed: silent for 25"), "{text}");
    assert!(text.contains(&format!("after frame {} while bytes were not acknowledged", data + 1)), "{text}");
}

#[test]
fn retransmissions_and_their_recovery_are_named() {
    let mut pcap = Pcap::read(CAPTURE);
    let lost = pcap.long_record(60, 1400);
    // The segment arrives behind its successors, 40 ms later.
    let record = pcap.records.remove(lost);
    let after = lost + 2;
    let mut late = pcap.records[after].clone();
    late.truncate(16);
    late.extend_from_slice(&record[16..]);
    late[8..16].copy_from_slice(&record[8..16]);
    pcap.records.insert(after + 1, late);
    delay(&mut pcap, after + 1, 40);
    let text = words(&pcap.bytes());
    assert!(text.contains("slowed: client retransmitted 1 segment ("), "{text}");
    assert!(text.contains("of 1448 bytes; the longest gap was filled after 4"), "{text}");
}

/// A window of 0 in one acknowledgement, and full windows when all are small.
#[test]
fn closed_and_full_windows_are_named() {
    let window = |record: &mut Vec<u8>, window: u16| {
        record[IP + 20 + 14..IP + 20 + 16].copy_from_slice(&window.to_be_bytes());
    };
    let mut pcap = Pcap::read(CAPTURE);
    let data = pcap.long_record(60, 1400);
    let ack = data + pcap.records[data..].iter().position(|record| is_from_server(record)).unwrap();
    window(&mut pcap.records[ack], 0);
    delay(&mut pcap, ack + 1, 30);
    let found = reasons(&pcap);
    assert!(found.contains(&"closed_window".to_owned()), "{found:?}");
    let text = words(&pcap.bytes());
    assert!(text.contains("the receive window of server was closed for "), "{text}");

    let mut pcap = Pcap::read(CAPTURE);
    for record in pcap.records[data - 3..].iter_mut().filter(|record| is_from_server(record)) {
        window(record, 12);
    }
    let text = words(&pcap.bytes());
    assert!(text.contains("filled the receive window of server ("), "{text}");
}
