//! Seed inputs for the fuzzer, made from captures of real sessions.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::Path,
};

use etherparse::{SlicedPacket, TransportSlice};
use pcap_file::pcap::PcapReader;

/// Maximum number of inputs of one kind from a capture.
const MOST: usize = 100;
/// Maximum bytes of stream in one input.
const STREAM: usize = 6000;

/// Inputs by target.
pub type Seeds = BTreeMap<&'static str, Vec<Vec<u8>>>;

/// The bytes sent by one end of a connection, by their offset in the stream.
type Segments = BTreeMap<u32, Vec<u8>>;

/// Creates inputs from a capture.
pub fn of_capture(path: &Path) -> io::Result<Seeds> {
    let mut seeds = Seeds::new();
    let mut streams: BTreeMap<(u16, u16), (u32, Segments)> = BTreeMap::new();
    let mut reader = PcapReader::new(File::open(path)?).map_err(io::Error::other)?;
    add(&mut seeds, "explain", [&[12][..], &prefix(fs::read(path)?)].concat());
    let mut frames = vec![5, 0];
    while let Some(packet) = reader.next_packet() {
        let frame = packet.map_err(io::Error::other)?.data.into_owned();
        frames.extend_from_slice(&[&[1][..], &(frame.len() as u16).to_be_bytes(), &frame].concat());
        let Ok(SlicedPacket { transport: Some(TransportSlice::Tcp(tcp)), .. }) =
            SlicedPacket::from_ethernet(&frame)
        else {
            continue;
        };
        let stream = streams.entry((tcp.source_port(), tcp.destination_port())).or_default();
        if tcp.syn() {
            *stream = (tcp.sequence_number().wrapping_add(1), Segments::new());
        }
        if !tcp.payload().is_empty() {
            let offset = tcp.sequence_number().wrapping_sub(stream.0);
            stream.1.insert(offset, tcp.payload().to_vec());
        }
        add(&mut seeds, "wire", [&[1, 0][..], &frame].concat());
        add(&mut seeds, "wire", [&[2, 0][..], tcp.options()].concat());
    }
    add(&mut seeds, "explain", prefix(frames));
    for (_, segments) in streams.into_values() {
        let stream: Vec<u8> = segments.into_values().flatten().collect();
        of_stream(&mut seeds, &stream);
    }
    Ok(seeds)
}

/// Frames both ways through a leg, by an honest switch and by an honest owner of the memory; a frame that is too long.
pub fn of_legs() -> Vec<Vec<u8>> {
    let switch = [
        // The handshake as it is.
        &[0; 7][..],
        // A frame of 5000 bytes is allocated, submitted, given back, and freed.
        &[9, 0x13, 0x88, 10, 0, 0x13, 0x88, 4, 7, 31, 11, 0],
        // A frame of 1500 bytes comes, and is freed.
        &[5, 0x05, 0xdc, 7, 31, 8, 0],
    ];
    let owner = [
        &[1, 0, 0, 0, 0, 0, 0][..],
        // A frame of 1500 bytes in two pieces is posted and taken.
        &[0, 0, 2, 0, 1, 0, 0, 0x02, 0xbc, 0, 0x10, 0x00],
        &[0, 0, 2, 1, 0, 0, 0, 0x03, 0x20, 0, 0x20, 0x00],
        &[0, 0, 0, 2, 4],
        // Memory is posted and filled.
        &[0, 1, 2, 0, 0, 0, 0, 0x10, 0x00, 0, 0x30, 0x00],
        &[0, 1, 0, 1, 5, 0x05, 0xdc, 7, 1],
    ];
    // A frame of 70000 bytes, which are all in the memory.
    let too_long = [
        &[1, 0, 0, 0, 0, 0, 0][..],
        &[0, 0, 2, 0, 0, 0, 0xff, 0x00, 0x01, 0x11, 0x70, 0xff, 0, 0, 0, 0],
        &[0, 0, 0, 1, 4],
    ];
    vec![switch.concat(), owner.concat(), too_long.concat()]
}

/// As much of a file as an input may have.
fn prefix(mut file: Vec<u8>) -> Vec<u8> {
    file.truncate(STREAM);
    file
}

fn add(seeds: &mut Seeds, target: &'static str, input: Vec<u8>) {
    let known = seeds.entry(target).or_default();
    if known.len() < MOST && !known.contains(&input) {
        known.push(input);
    }
}

/// The stream of one end from its start-up frame on. Soft-iWARP sends no markers.
fn of_stream(seeds: &mut Seeds, stream: &[u8]) {
    let Some((fixed, _)) = stream.split_first_chunk::<20>() else { return };
    let initiator = fixed.starts_with(b"MPA ID Req");
    let start_up = 20 + usize::from(u16::from_be_bytes([fixed[18], fixed[19]]));
    let Some((start_up, fpdus)) = stream.split_at_checked(start_up) else { return };
    let settings = if initiator { 32 } else { 18 };
    add(seeds, "startup", [&[settings, 1, 10], start_up].concat());
    let ulpdus = ulpdus(fpdus);
    for ulpdu in &ulpdus {
        add(seeds, "headers", ulpdu[..ulpdu.len().min(80)].to_vec());
    }
    // Reversed, with a gap, and in order; each without and with markers.
    let steps: [&[u8]; 3] = [
        &[4, 12, 0, 4, 0, 8, 0, 4, 0, 4, 0, 5, 0, 0, 0, 4, 0],
        &[2, 1, 0x20, 0x0f, 0xff, 0, 0, 0xf0, 2],
        &[0],
    ];
    let marked = with_markers(&ulpdus);
    for (settings, stream) in [(2, fpdus), (3, &marked), (1, &marked), (3 | 16, &marked), (2 | 32, fpdus)] {
        for steps in steps {
            let stream = &stream[..stream.len().min(STREAM)];
            add(seeds, "deframe", [&[settings | 4 | 8], steps, stream].concat());
        }
    }
    engine_inputs(seeds, initiator, start_up, &ulpdus);
}

/// Extracts the ULPDUs from FPDUs without markers.
fn ulpdus(mut fpdus: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while let Some((length, rest)) = fpdus.split_first_chunk::<2>() {
        let len = usize::from(u16::from_be_bytes(*length));
        let Some(ulpdu) = rest.get(..len) else { break };
        found.push(ulpdu);
        fpdus = fpdus.get((2 + len).next_multiple_of(4) + 4..).unwrap_or_default();
    }
    found
}

/// Encodes FPDUs with room for markers and CRCs, which the target corrects.
fn with_markers(ulpdus: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for ulpdu in ulpdus {
        let mut body = (ulpdu.len() as u16).to_be_bytes().to_vec();
        body.extend_from_slice(ulpdu);
        body.resize(body.len().next_multiple_of(4) + 4, 0);
        for byte in body {
            if out.len().is_multiple_of(512) {
                out.extend_from_slice(&[0; 4]);
            }
            out.push(byte);
        }
    }
    out
}

/// Key numbers (see [`crate::engine`]) for the peer's Writes and Reads, and the records that open those keys
/// first.
struct Aim {
    write: u8,
    read: u8,
    opens: &'static [u8],
}

/// Regions that are always open.
const REGIONS: Aim = Aim { write: 1, read: 2, opens: &[] };
/// A memory window with all remote rights.
const WINDOW: Aim = Aim { write: 7, read: 7, opens: &[8, 192, 0, 255, 0, 5, 14, 0, 0, 0x0c, 0, 0, 0, 0] };
/// A fast-registration region with two pieces.
const FAST: Aim =
    Aim { write: 9, read: 9, opens: &[8, 192, 0, 255, 2, 7, 7, 4, 0, 8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0] };

/// Attacks of several segments (see [`crate::engine`]) after everything else: a window closed over two of our Sends for
/// two minutes, retransmissions with other boundaries and new bytes, a trickle, and a FIN with the SYN of the next
/// connection.
const ATTACKS: [&[u8]; 4] = [
    &[
        8, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 16, 240, 0, 0, 16, 8, 2, 0, 0, 0, 0, 1, 0,
        0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 16, 6, 0x75, 0x30, 240, 0, 0, 0, 6, 0x75, 0x30, 8, 7, 0, 6, 0x75,
        0x30, 6, 0x75, 0x30,
    ],
    &[241, 0, 100, 0, 60, 0, 0, 241, 0, 40, 0, 80, 0, 4, 1, 2, 3, 4, 241, 4, 0, 2, 0, 0, 0],
    &[242, 0x10, 0, 0, 8, 0, 4, 1, 2, 3, 4, 5, 6, 6, 0x75, 0x30],
    &[8, 7, 0, 243, 0, 8, 0, 4, 1, 2, 3, 4, 5, 6, 6, 0, 200],
];

/// Creates inputs of all kinds, which differ in settings, in the arrival of FPDUs, and in their target keys.
fn engine_inputs(seeds: &mut Seeds, initiator: bool, start_up: &[u8], ulpdus: &[&[u8]]) {
    let role = if initiator { 0 } else { 8 };
    for settings in [role | 1, role, role | 64 | 1, role | 16, role | 4 | 1] {
        for how in [1, 1 | 2, 1 | 4, 1 | 16] {
            add(seeds, "engine", engine_input([settings, how], &REGIONS, start_up, ulpdus));
        }
    }
    for attack in ATTACKS {
        for settings in [role | 1, role] {
            add(
                seeds,
                "engine",
                [&engine_input([settings, 1], &REGIONS, start_up, ulpdus)[..], attack].concat(),
            );
        }
    }
    for settings in [role | 1, role | 3] {
        for aim in [&REGIONS, &WINDOW, &FAST] {
            add(seeds, "engine", engine_input([settings, 1], aim, start_up, ulpdus));
        }
    }
}

/// Start-up, receives, some work requests, and the FPDUs with their keys replaced by those of the engine's
/// regions.
fn engine_input([settings, how]: [u8; 2], aim: &Aim, start_up: &[u8], ulpdus: &[&[u8]]) -> Vec<u8> {
    let mut input = vec![settings, 0, start_up[16], start_up[17]];
    input.extend_from_slice(&start_up[18..]);
    // Receives with one piece at the start of the sink.
    for _ in 0..4 {
        input.extend_from_slice(&[8, 0, 0, 1, 0, 0, 0x0b, 0]);
    }
    input.extend_from_slice(aim.opens);
    let room = ulpdus.iter().scan(0, |sum, ulpdu| {
        *sum += ulpdu.len() + 4;
        Some(*sum)
    });
    let count = room.take_while(|sum| *sum < STREAM).count().max(1);
    let mut answered = 0;
    let mut last_write = Vec::new();
    for (number, ulpdu) in ulpdus.iter().take(count).enumerate() {
        let mut ulpdu = ulpdu.to_vec();
        let is_response =
            ulpdu.first_chunk().is_some_and(|[first, control]| first & 0x80 != 0 && control & 15 == 2);
        if is_response && answered == 0 {
            input.extend_from_slice(&read(response_bytes(&ulpdus[number..])));
        }
        rename_keys(&mut ulpdu, aim, answered);
        answered = match ulpdu.first() {
            Some(first) if is_response && first & 0x40 == 0 => answered + ulpdu.len() as u16 - 14,
            _ => 0,
        };
        let record = [&[1, how], &(ulpdu.len() as u16).to_be_bytes()[..], &ulpdu].concat();
        input.extend_from_slice(&record);
        let tagged_opcode = ulpdu.first_chunk().map(|[first, control]| (first & 0x80 != 0, control & 15));
        if tagged_opcode == Some((true, 0)) {
            last_write = record;
        }
        if number % 4 == 1 && !is_response {
            // Our own Send or Write of 16 bytes, to the region that the peer calls 1.
            let what = 2 + (number / 4 % 2) as u8;
            input.extend_from_slice(&[8, what, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 16]);
        }
    }
    if !aim.opens.is_empty() {
        // We invalidate the key: a Write to the same place is then rejected.
        input.extend_from_slice(&[8, 195, 0, aim.write, 0]);
        if let Some(last) = last_write.last_mut() {
            *last ^= 0xff;
        }
        input.extend_from_slice(&last_write);
    }
    // Delivers the withheld records in reverse order; time passes.
    input.extend_from_slice(&[7, 1, 6, 0, 200]);
    input
}

/// Bytes of the Read Response whose segments come first; a single read may request that many.
fn response_bytes(ulpdus: &[&[u8]]) -> u16 {
    let mut bytes = 0;
    for ulpdu in ulpdus {
        bytes += ulpdu.len() - 14;
        if ulpdu.first().is_some_and(|first| first & 0x40 != 0) {
            break;
        }
    }
    bytes as u16
}

/// Encodes the record of our own RDMA Read into the start of the sink.
fn read(len: u16) -> Vec<u8> {
    let mut record = vec![8, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    record.extend_from_slice(&len.to_be_bytes());
    record
}

/// Redirects a segment to valid memory: the peer's accesses to the target keys at valid offsets; responses to
/// our own reads to the start of region 0's middle, of which `answered` bytes have already arrived.
fn rename_keys(ulpdu: &mut [u8], aim: &Aim, answered: u16) {
    let Some(&[first, control]) = ulpdu.first_chunk::<2>() else { return };
    let places: &[(usize, u8, u16)] = match (first & 0x80 != 0, control & 15) {
        (true, 2) => &[(2, 0, 1024 + answered)],
        (true, _) => &[(2, aim.write, 0)],
        (false, 1) => &[(18, 0, 0), (34, aim.read, 0)],
        (false, _) => &[],
    };
    for &(at, number, offset) in places {
        if let Some(field) = ulpdu.get_mut(at..at + 12) {
            field.fill(0);
            field[3] = number;
            field[10..].copy_from_slice(&offset.to_be_bytes());
        }
    }
}

/// The record of a segment of RDMA/TCP (see [`crate::engine`]): how it arrives, its second byte, words of control data, order
/// field, distance of its number, and all bytes from the 21st on.
fn segment(how: u8, flags: u8, words: u8, order: u16, distance: i8, rest: &[&[u8]]) -> Vec<u8> {
    let [high, low] = order.to_be_bytes();
    let body = [&[flags, words, high, low, distance.cast_unsigned()][..], &rest.concat()].concat();
    [&[1, how][..], &(body.len() as u16).to_be_bytes(), &body].concat()
}

/// Inputs for RDMA/TCP, made by hand: all types of messages and of control data, in both roles of the engine, as they come,
/// withheld and delivered in reverse order, each twice, and split.
pub fn of_segments() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for settings in [0, 3, 8, 16, 32, 64] {
        for how in [1, 1 | 2, 1 | 4, 1 | 16] {
            let mut input = vec![settings, 0, 0, 0x44, 0, 3, b'y', b'o', b'u'];
            for _ in 0..8 {
                // A receive with one piece at the start of the sink.
                input.extend_from_slice(&[8, 0, 0, 1, 0, 0, 0x0b, 0]);
            }
            // Our Reads of 64 and of 16 bytes, the second of which may overtake, into the start of the sink.
            input.extend_from_slice(&read(64));
            input.extend_from_slice(&[8, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 16]);
            let (strict, at_once, none) = (0, u16::MAX, [0; 4]);
            let open =
                |offset: u32, total: u32| [[0, 0, 0, 1], offset.to_be_bytes(), total.to_be_bytes()].concat();
            for record in [
                segment(how, 0x09, 0, at_once, 0, &[&open(64, 300), &[0xa5; 200]]),
                segment(how, 0x05, 0, at_once, 0, &[&open(264, 300), &[0xa6; 100]]),
                segment(how, 0x0c, 0, strict, 0, &[&none, b"in order"]),
                segment(how, 0x08, 0, strict, 0, &[&none, &[7; 100]]),
                segment(how, 0x0f, 0, at_once, 1, &[&none, &[8; 16]]),
                segment(how, 0x0b, 0, at_once, 0, &[&none, &[9; 40]]),
                segment(how, 0x04, 0, strict, 0, &[&100_u32.to_be_bytes(), &[7; 50]]),
                segment(how, 0x07, 0, at_once, 0, &[&40_u32.to_be_bytes(), &[9; 24]]),
                segment(how, 0x1c, 0, at_once, 0, &[&none, b"at once, solicited"]),
                segment(how, 0x0c, 3, strict, 0, &[&none, &[6, 0, 0, 0], b"8 bytes!"]),
                segment(how, 0x0e, 0, strict, 0, &[&[0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 100]]),
                segment(how, 0x0e, 0, at_once, 0, &[&[0, 0, 0, 2, 0, 0, 0, 8, 0, 0, 0, 8]]),
                // Fetch and add 1 at the start of the open region.
                segment(how, 0x0e, 10, strict, 0, &[&open(0, 8), &[0; 8], &1_u64.to_be_bytes(), &[0; 24]]),
                // Invalidates a key, then a Write with the high half of an offset, which is out of bounds.
                segment(how, 0x0c, 2, strict, 0, &[&none, &[5, 0, 0, 0, 0, 0, 0, 1], b"close"]),
            ] {
                input.extend_from_slice(&record);
            }
            // Delivers the withheld records in reverse order; time passes.
            input.extend_from_slice(&[7, 1, 6, 0, 200]);
            let wrong = segment(1, 0x0d, 1, at_once, 0, &[&open(0, 1), &[0, 0, 0, 9], &[1]]);
            input.extend_from_slice(&wrong);
            seeds.push(input);
        }
    }
    seeds
}
