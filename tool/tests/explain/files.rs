//! The forms of capture files that people have.

use std::{
    env, fs,
    io::Write as _,
    process::{self, Command},
};

use flate2::{Compression, write::GzEncoder};

use super::{Pcap, events, lines, run, summaries, words};
use xwarp_tool::explain::{FileError, Options};

const NAME: &str = "rping-rev2-crc.pcap";

/// An integer in one byte order.
fn int(value: u32, big_endian: bool) -> [u8; 4] {
    if big_endian { value.to_be_bytes() } else { value.to_le_bytes() }
}

/// A block of pcapng.
fn block(kind: u32, body: &[u8], big_endian: bool) -> Vec<u8> {
    let padded = body.len().next_multiple_of(4);
    let len = int(padded as u32 + 12, big_endian);
    let padding = vec![0; padded - body.len()];
    [&int(kind, big_endian)[..], &len, body, &padding, &len].concat()
}

/// The begin of a pcapng file: a section and an interface of this link type.
fn section(link: u16, big_endian: bool) -> Vec<u8> {
    let magic = int(0x1a2b_3c4d, big_endian);
    let short = |value: u16| if big_endian { value.to_be_bytes() } else { value.to_le_bytes() };
    let header = [&magic[..], &short(1), &short(0), &[0xff; 8]].concat();
    let interface = [&short(link)[..], &[0; 6]].concat();
    [block(0x0a0d_0d0a, &header, big_endian), block(1, &interface, big_endian)].concat()
}

/// Time in microseconds and bytes of each record.
fn packets(pcap: &Pcap) -> Vec<(u64, &[u8])> {
    let field = |record: &[u8], at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap());
    let time = |record: &[u8]| u64::from(field(record, 0)) * 1_000_000 + u64::from(field(record, 4));
    pcap.records.iter().map(|record| (time(record), &record[16..])).collect()
}

/// A capture as pcapng with this block type for its packets: 2, 3 or 6.
fn pcapng(pcap: &Pcap, kind: u32, big_endian: bool) -> Vec<u8> {
    let mut file = section(1, big_endian);
    for (time, bytes) in packets(pcap) {
        let len = int(bytes.len() as u32, big_endian);
        let stamp = [int((time >> 32) as u32, big_endian), int(time as u32, big_endian)].concat();
        // Interface 0; the obsolete block has a count of drops in the other half of this field.
        let interface = if kind == 2 && big_endian {
            7
        } else if kind == 2 {
            7 << 16
        } else {
            0
        };
        let body = match kind {
            3 => [&len[..], bytes].concat(),
            _ => [&int(interface, big_endian)[..], &stamp, &len, &len, bytes].concat(),
        };
        file.extend(block(kind, &body, big_endian));
    }
    file
}

/// A capture as classic pcap.
fn classic(pcap: &Pcap, magic: u32, big_endian: bool) -> Vec<u8> {
    let field = |value: u32| int(value, big_endian);
    let mut file = [field(magic), field(0x0004_0002), [0; 4], [0; 4], field(65535), field(1)].concat();
    let unit = if magic == 0xa1b2_3c4d { 1000 } else { 1 };
    for (time, bytes) in packets(pcap) {
        let len = field(bytes.len() as u32);
        let fraction = field((time % 1_000_000) as u32 * unit);
        file.extend([field((time / 1_000_000) as u32), fraction, len, len].concat());
        if magic == 0xa1b2_cd34 {
            file.extend([9; 8]);
        }
        file.extend(bytes);
    }
    file
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn every_packet_block_of_pcapng_is_read() {
    let pcap = Pcap::read(NAME);
    let expected = words(&pcap.bytes());
    for big_endian in [false, true] {
        assert_eq!(words(&pcapng(&pcap, 6, big_endian)), expected);
        assert_eq!(words(&pcapng(&pcap, 2, big_endian)), expected, "obsolete Packet Blocks");
        let simple = words(&pcapng(&pcap, 3, big_endian));
        assert!(simple.contains("client  Send of 16 bytes, MSN 1"), "Simple Packet Blocks: {simple}");
        assert!(simple.contains("26 frames, 1 TCP connection"), "{simple}");
    }
}

#[test]
fn every_form_of_classic_pcap_is_read() {
    let pcap = Pcap::read(NAME);
    let expected = words(&pcap.bytes());
    for magic in [0xa1b2_c3d4, 0xa1b2_3c4d, 0xa1b2_cd34] {
        for big_endian in [false, true] {
            assert_eq!(words(&classic(&pcap, magic, big_endian)), expected, "{magic:x} {big_endian}");
        }
    }
}

#[test]
fn a_compressed_capture_is_read_and_a_cut_one_reported() {
    let pcap = Pcap::read(NAME);
    let compressed = gzip(&pcap.bytes());
    assert_eq!(words(&compressed), words(&pcap.bytes()));
    let (text, result) = run(&compressed[..compressed.len() / 2], Options::default());
    assert!(matches!(result, Err(FileError::CutOff)), "{result:?}");
    assert!(text.contains("MPA Request"), "the part before the cut is explained: {text}");
    let (_, result) = run(&[0x28, 0xb5, 0x2f, 0xfd, 0, 0, 0, 0], Options::default());
    let error = result.unwrap_err().to_string();
    assert!(error.contains("zstd -dc FILE | xwarp explain -"), "{error}");
}

#[test]
fn blocks_without_packets_are_counted() {
    let pcap = Pcap::read(NAME);
    let mut file = pcapng(&pcap, 6, false);
    for kind in [5, 5, 4, 0x0bad, 0x77] {
        file.extend(block(kind, &[0; 8], false));
    }
    let text = words(&file);
    let expected = "blocks of the file that have no packets: 1 custom, 2 interface statistics, 1 name resolution, 1 of type 0x77";
    assert!(text.contains(expected), "{text}");
    let lines = lines(&file);
    assert_eq!(lines.last().unwrap()["skipped_blocks"]["interface statistics"], 2);
    // A file may choose the types of its blocks: the table of them is bounded.
    for kind in 0x1000..0x3000 {
        file.extend(block(kind, &[], false));
    }
    assert!(words(&file).contains(" of further kinds"));
}

#[test]
fn link_types_are_named() {
    let pcap = Pcap::read(NAME);
    let mut loopback = classic(&pcap, 0xa1b2_c3d4, false);
    loopback[20] = 127;
    let text = words(&loopback);
    assert!(text.contains("26 IEEE 802.11 with a radiotap header, link type 127 (not explained)"), "{text}");
    // The same packets as BSD's loopback has them: the address family, then IP.
    let mut file = section(0, false);
    for (_, bytes) in packets(&pcap) {
        let Some(ip) = bytes.get(14..).filter(|_| bytes[12..14] == [8, 0]) else { continue };
        let len = int(ip.len() as u32 + 4, false);
        file.extend(block(6, &[&[0; 12][..], &len, &len, &[2, 0, 0, 0], ip].concat(), false));
    }
    let text = words(&file);
    assert!(text.contains("client  Send of 16 bytes, MSN 1"), "{text}");
}

/// Frames of several processors or merged files are not in the order of time.
#[test]
fn frames_are_sorted_by_time() {
    let mut pcap = Pcap::read("send-1x10001-crc.pcap");
    let expected = lines(&pcap.bytes());
    let retransmissions = |lines: &[serde_json::Value]| events(lines, "retransmission").len();
    for pair in pcap.records.chunks_mut(2) {
        pair.reverse();
    }
    let sorted = lines(&pcap.bytes());
    assert_eq!(sorted.last().unwrap()["misplaced_frames"], 0);
    assert_eq!(retransmissions(&sorted), retransmissions(&expected));
    assert_eq!(summaries(&sorted)[1]["ends"][0]["messages"], summaries(&expected)[1]["ends"][0]["messages"],);
    assert_eq!(events(&sorted, "syn")[0]["frame"], 2, "frames have their numbers in the file");
    // A pipe is not sorted, but the reader is told.
    let (text, result) = run(&pcap.bytes(), Options { live: true, ..Options::default() });
    result.unwrap();
    assert!(text.contains("not in the order of time"), "{text}");
    // A file that is out of order by more than the window.
    let mut far = pcap.bytes();
    let late = pcap.records[..40].concat();
    for _ in 0..110 {
        far.extend(&late);
    }
    let mut end = late.clone();
    end[..4].fill(0);
    far.extend(end);
    let text = words(&far);
    assert!(text.contains("frames not in the order of time") && text.contains("reordercap"), "{text}");
}

/// The command gives status 1 for a result that was cut, with the reason.
#[test]
fn connections_beyond_the_limit_are_an_error() {
    let pcap = Pcap::read(NAME);
    let syn = packets(&pcap).into_iter().find(|(_, bytes)| bytes.len() > 47 && bytes[47] & 2 != 0).unwrap().1;
    let mut file = section(1, false);
    for port in 1..4200_u16 {
        let mut frame = syn.to_vec();
        frame[34..36].copy_from_slice(&port.to_be_bytes());
        let len = int(frame.len() as u32, false);
        file.extend(block(6, &[&[0; 12][..], &len, &len, &frame].concat(), false));
    }
    let path = env::temp_dir().join(format!("xwarp-many-{}.pcapng.gz", process::id()));
    fs::write(&path, gzip(&file)).unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_xwarp")).args(["explain", "--summary"]).arg(&path).output().unwrap();
    fs::remove_file(&path).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("103 frames belong to further connections than the first 4096"), "{errors}");
    assert!(errors.contains(&path.display().to_string()), "{errors}");
}
