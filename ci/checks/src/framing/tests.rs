use std::net::SocketAddr;

use super::*;

fn start_up_frame(reply: bool, flags: u8, private_data: &[u8]) -> Vec<u8> {
    let mut frame = if reply { b"MPA ID Rep Frame".to_vec() } else { b"MPA ID Req Frame".to_vec() };
    frame.extend_from_slice(&[flags, 1]);
    frame.extend_from_slice(&(private_data.len() as u16).to_be_bytes());
    frame.extend_from_slice(private_data);
    frame
}

/// Figure 5 of RFC 5044: the first FPDU of a stream, after a marker.
fn figure_5() -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, 0, 0, 0x2a, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
    bytes.resize(0x30, 0);
    bytes.extend_from_slice(&[0x52, 0x23, 0x99, 0x83]);
    bytes
}

/// An FPDU without markers, `length` bytes of ULPDU.
fn plain_fpdu(length: u16) -> Vec<u8> {
    let mut fpdu = length.to_be_bytes().to_vec();
    fpdu.extend((0..length).map(|i| i as u8));
    while !fpdu.len().is_multiple_of(4) {
        fpdu.push(0);
    }
    let crc = crc32c::crc32c(&fpdu);
    fpdu.extend_from_slice(&crc.to_le_bytes());
    fpdu
}

/// Parses one connection, given the flags of Request and Reply and the initiator's segments.
fn judge(request_flags: u8, reply_flags: u8, segments: &[&[u8]]) -> Connection {
    let [from, to] = [1, 2].map(|host| SocketAddr::from(([10, 0, 0, host], 4000)));
    let stream = |frame: Vec<u8>, segments: &[&[u8]]| {
        let mut stream = Stream { bytes: frame, starts: vec![0], ..Stream::default() };
        for segment in segments {
            stream.starts.push(stream.bytes.len());
            stream.bytes.extend_from_slice(segment);
        }
        stream
    };
    let direction = Direction { from, to, earlier: 0 };
    let streams = Streams::from([
        (direction, stream(start_up_frame(false, request_flags, b"hi"), segments)),
        (direction.reverse(), stream(start_up_frame(true, reply_flags, b""), &[])),
    ]);
    let mut found = connections(&streams);
    assert_eq!(found.len(), 1, "one connection, found from its initiator's side only");
    found.remove(0)
}

#[test]
fn rfc5044_s4_4_figure_5_is_good() {
    let found = judge(CRC_FLAG, MARKERS_FLAG, &[&figure_5()]);
    assert_eq!(found.faults, Vec::<String>::new());
    assert_eq!((found.fpdus, found.marker_count, found.markers, found.crc), (1, 1, (true, false), true));
}

#[test]
fn rfc5044_s4_4_figure_6_is_good() {
    // The FPDU before it has 492 bytes including its marker; the figure's FPDU begins at byte 492 (0x1ec).
    let mut first = vec![0, 0, 0, 0];
    first.extend_from_slice(&482_u16.to_be_bytes());
    first.resize(488, 0);
    first.extend_from_slice(&crc32c::crc32c(&first).to_le_bytes());
    let mut second = vec![0, 0x2a, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x14];
    second.resize(0x21c - 0x1ec, 0);
    second.extend_from_slice(&[0x84, 0x92, 0x58, 0x98]);
    let found = judge(CRC_FLAG, MARKERS_FLAG, &[&first, &second]);
    assert_eq!(found.faults, Vec::<String>::new());
    assert_eq!((found.fpdus, found.marker_count), (2, 2));
}

#[test]
fn fpdus_of_every_pad_length_are_accepted_in_one_segment() {
    let both = [plain_fpdu(20), plain_fpdu(21)].concat();
    let found = judge(0, CRC_FLAG, &[&both, &plain_fpdu(22), &plain_fpdu(23), &plain_fpdu(0)]);
    assert_eq!(found.faults, Vec::<String>::new());
    assert_eq!((found.fpdus, found.marker_count, found.crc), (5, 0, true));
}

#[test]
fn every_flipped_bit_is_found() {
    let good = figure_5();
    for at in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[at / 8] ^= 1 << (at % 8);
        assert_ne!(judge(CRC_FLAG, MARKERS_FLAG, &[&bad]).faults, Vec::<String>::new(), "bit {at}");
    }
}

#[test]
fn a_wrong_pointer_is_found_without_crc_too() {
    let mut bad = figure_5();
    bad[3] = 4;
    let found = judge(0, MARKERS_FLAG, &[&bad]);
    assert!(found.faults[0].contains("points 4 bytes back instead of 0"), "{:?}", found.faults);
}

#[test]
fn a_segment_that_begins_within_an_fpdu_is_found() {
    let fpdu = plain_fpdu(100);
    let found = judge(CRC_FLAG, 0, &[&fpdu[..40], &fpdu[40..]]);
    assert!(found.faults[0].contains("does not begin with an FPDU"), "{:?}", found.faults);
}

#[test]
fn a_cut_stream_is_found_at_every_length() {
    let fpdu = plain_fpdu(30);
    for length in 1..fpdu.len() {
        let found = judge(CRC_FLAG, 0, &[&fpdu[..length]]);
        assert!(found.faults[0].contains("cut off"), "{length}: {:?}", found.faults);
    }
}

#[test]
fn a_rejection_is_not_a_fault() {
    let found = judge(CRC_FLAG, CRC_FLAG | REJECT_FLAG, &[]);
    assert!(found.rejected && found.faults.is_empty(), "{found:?}");
}

#[test]
fn a_connection_whose_first_fpdu_was_captured_twice_is_marked() {
    let fpdu = plain_fpdu(20);
    let [from, to] = [1, 2].map(|host| SocketAddr::from(([10, 0, 0, host], 4000)));
    let direction = Direction { from, to, earlier: 0 };
    let request = start_up_frame(false, CRC_FLAG, b"hi");
    let first = request.len();
    for (repeated, marked) in [(vec![], false), (vec![0, first + fpdu.len()], false), (vec![first], true)] {
        let bytes = [&request[..], &fpdu, &fpdu].concat();
        let stream = Stream { bytes, starts: vec![0, first], repeated, ..Stream::default() };
        let answer = start_up_frame(true, CRC_FLAG, b"");
        let reply = Stream { bytes: answer, starts: vec![0], ..Stream::default() };
        let streams = Streams::from([(direction, stream), (direction.reverse(), reply)]);
        assert_eq!(connections(&streams)[0].repeats_first, marked);
    }
}
