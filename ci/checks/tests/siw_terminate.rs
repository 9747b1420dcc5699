//! Errors that Linux Soft-iWARP detects in its peer, and the Terminates that it sends, compared with the
//! RFCs: provoked by hand over a kernel socket, and by invalid requests on our own queue pairs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    hostile::{SocketPeer, fpdu, read_request, tagged, untagged},
    lab::{Family, INTERFACE},
    tshark,
    vm::{Ending, Job, Kernel, SHORT, Stage},
};
use xwarp_verbs::{
    AsyncEvent, CompletionChannel, Device, Markers, MpaConfig, Payload, QpFault, QueuePairOptions, Remote,
    STag, WorkRequest, cm::ConnectOptions,
};

/// Port of `cm` (`ci/vm/cm.c`).
const PORT: u16 = 7500;
/// Size of its receives, in bytes.
const RECEIVE_BYTES: usize = 64;

/// RDMAP's control bytes, version 1 (RFC 5040 section 4.1).
const WRITE: u8 = 0x40;
const READ_RESPONSE: u8 = 0x42;
const SEND: u8 = 0x43;
const SEND_INVALIDATE: u8 = 0x44;
const TERMINATE: u8 = 0x47;
/// Offset of an untagged segment's payload.
const UNTAGGED_BYTES: usize = 18;

/// The memory that the peer exposes.
#[derive(Debug, Clone, Copy)]
struct Memory {
    open: u32,
    closed: u32,
    address: u64,
    len: u32,
}

/// The memory reported for the connection that was just accepted, after `earlier` others.
fn memory(server: &mut Job, earlier: usize) -> Memory {
    let told = server.output().unwrap().stdout;
    let line = told.lines().filter(|line| line.starts_with("memory")).nth(earlier).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().skip(1).map(|word| word.parse().unwrap()).collect();
    let [open, closed, address, len] = numbers[..] else { panic!("{line}") };
    Memory { open: open as u32, closed: closed as u32, address, len: len as u32 }
}

/// Layer, error type, error code.
type Numbers = (u8, u8, u8);

struct Case {
    what: &'static str,
    /// The invalid bytes.
    bytes: fn(Memory) -> Vec<u8>,
    /// The Terminate that siw sends, with its nibbles in the right order; `None` if it ignores the error and
    /// answers a Read Request.
    siw: Option<Numbers>,
    /// The error required by RFC 5040 section 4.8, RFC 5041 section 7.2 and RFC 5044 section 8.
    rfc: Numbers,
}

/// Flips bits of the DDP version (first byte) or the RDMAP version (second byte).
fn flipped(mut ulpdu: Vec<u8>, byte: usize, bits: u8) -> Vec<u8> {
    ulpdu[byte] ^= bits;
    plain(&ulpdu)
}

/// Encodes an FPDU without markers.
fn plain(ulpdu: &[u8]) -> Vec<u8> {
    fpdu(ulpdu, None)
}

/// The first Send of a connection.
fn send(payload: &[u8]) -> Vec<u8> {
    untagged(SEND, 0, 0, 1, 0, payload)
}

const CASES: &[Case] = &[
    Case {
        what: "a wrong CRC",
        bytes: |_| {
            let mut bytes = plain(&send(b"hello"));
            *bytes.last_mut().unwrap() ^= 1;
            bytes
        },
        siw: Some((2, 0, 2)),
        rfc: (2, 0, 2),
    },
    Case {
        what: "a Write to no region",
        bytes: |memory| plain(&tagged(WRITE, memory.open ^ 0xffff_ff00, memory.address, b"x")),
        siw: Some((1, 1, 0)),
        rfc: (1, 1, 0),
    },
    Case {
        what: "a Write to an old key of a region",
        bytes: |memory| plain(&tagged(WRITE, memory.open ^ 1, memory.address, b"x")),
        siw: Some((1, 1, 0)),
        rfc: (1, 1, 0),
    },
    Case {
        what: "a Write beyond a region",
        bytes: |memory| plain(&tagged(WRITE, memory.open, memory.address + u64::from(memory.len) - 1, b"xy")),
        siw: Some((1, 1, 1)),
        rfc: (1, 1, 1),
    },
    Case {
        // DDP has no code for missing rights; RFC 5040 figure 9 has one, which belongs to RDMAP.
        what: "a Write without the right to",
        bytes: |memory| plain(&tagged(WRITE, memory.closed, memory.address, b"x")),
        siw: Some((1, 1, 0)),
        rfc: (0, 1, 2),
    },
    Case {
        what: "a Read of no region",
        bytes: |memory| plain(&read_request(1, memory.open ^ 0xffff_ff00, memory.address, 8)),
        siw: Some((0, 1, 0)),
        rfc: (0, 1, 0),
    },
    Case {
        what: "a Read beyond a region",
        bytes: |memory| plain(&read_request(1, memory.open, memory.address + 1, memory.len)),
        siw: Some((0, 1, 1)),
        rfc: (0, 1, 1),
    },
    Case {
        what: "a Read without the right to",
        bytes: |memory| plain(&read_request(1, memory.closed, memory.address, 8)),
        siw: None,
        rfc: (0, 1, 2),
    },
    Case {
        what: "a Read Request out of sequence",
        bytes: |memory| {
            let mut ulpdu = read_request(1, memory.open, memory.address, 8);
            // The last byte of the message sequence number.
            ulpdu[13] = 9;
            plain(&ulpdu)
        },
        siw: Some((1, 2, 3)),
        rfc: (1, 2, 3),
    },
    Case {
        what: "a Read Response that nobody asked for",
        bytes: |memory| plain(&tagged(READ_RESPONSE, memory.open, memory.address, b"x")),
        siw: Some((1, 0, 0)),
        rfc: (0, 2, 6),
    },
    Case {
        what: "a Send to a queue that is none",
        bytes: |_| plain(&untagged(SEND, 0, 5, 1, 0, b"x")),
        siw: Some((1, 2, 1)),
        rfc: (1, 2, 1),
    },
    Case {
        what: "a Send out of sequence",
        bytes: |_| plain(&untagged(SEND, 0, 0, 2, 0, b"x")),
        siw: Some((1, 2, 3)),
        rfc: (1, 2, 3),
    },
    Case {
        what: "a Send that begins in its middle",
        bytes: |_| plain(&untagged(SEND, 0, 0, 1, 8, b"x")),
        siw: Some((1, 2, 4)),
        rfc: (1, 2, 4),
    },
    Case {
        what: "a Send that is too long",
        bytes: |_| plain(&send(&[0; RECEIVE_BYTES + 1])),
        siw: Some((1, 2, 2)),
        rfc: (1, 2, 5),
    },
    Case {
        what: "a Send more than there are receives",
        bytes: |_| (1..=9).flat_map(|msn| plain(&untagged(SEND, 0, 0, msn, 0, b"x"))).collect(),
        siw: Some((1, 2, 2)),
        rfc: (1, 2, 2),
    },
    Case {
        what: "a Send that invalidates no region",
        bytes: |memory| {
            let invalidate = untagged(SEND_INVALIDATE, !memory.open, 0, 1, 0, b"x");
            [plain(&invalidate), plain(&read_request(1, memory.open, memory.address, 8))].concat()
        },
        siw: None,
        rfc: (0, 1, 9),
    },
    Case {
        what: "another version of DDP, untagged",
        bytes: |_| flipped(send(b"x"), 0, 3),
        siw: Some((1, 2, 6)),
        rfc: (1, 2, 6),
    },
    Case {
        what: "another version of DDP, tagged",
        bytes: |memory| flipped(tagged(WRITE, memory.open, memory.address, b"x"), 0, 3),
        siw: Some((1, 1, 4)),
        rfc: (1, 1, 4),
    },
    Case {
        what: "another version of RDMAP",
        bytes: |_| flipped(send(b"x"), 1, 0xc0),
        siw: Some((0, 2, 5)),
        rfc: (0, 2, 5),
    },
    Case {
        what: "a reserved opcode",
        bytes: |_| plain(&untagged(0x4d, 0, 0, 1, 0, b"x")),
        siw: Some((0, 2, 6)),
        rfc: (0, 2, 6),
    },
];

/// Cases in which siw deviates from the RFCs (docs/decisions/0008 discusses each).
const DIFFERENCES: [&str; 5] = [
    "a Write without the right to",
    "a Read without the right to",
    "a Read Response that nobody asked for",
    "a Send that is too long",
    "a Send that invalidates no region",
];

#[test]
fn siw_terminates_protocol_violations() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let address = stage.vm.address(Family::V4);
    let mut server = stage.serve(&format!("cm accept {address} {PORT} 0"), PORT).unwrap();
    let mut differences = Vec::new();
    let record = stage.recorded(|| {
        for (number, case) in CASES.iter().enumerate() {
            let said =
                stage.near.within(|| provoke(case, SocketAddr::new(address, PORT), &mut server, number));
            let said = said.unwrap().unwrap_or_else(|error| panic!("{}: {error:#}", case.what));
            if case.siw.is_some() {
                let said = &said[UNTAGGED_BYTES..];
                // siw puts the layer in the low nibble and the type in the high one, the reverse of RFC 5040
                // figure 8.
                let numbers = (said[0] & 0x0f, said[0] >> 4, said[1]);
                assert_eq!(Some(numbers), case.siw, "{}: {said:02x?}", case.what);
            }
            if case.siw != Some(case.rfc) {
                differences.push(case.what);
            }
        }
    });
    assert_eq!(differences, DIFFERENCES);
    let record = record.unwrap();
    let verdict = tshark::judge(&record, false).unwrap();
    // Wireshark reports the errors of MPA and parses everything else as intended.
    let [complaint] = &verdict.complaints[..] else { panic!("{}: {verdict:#?}", record.display()) };
    assert!(complaint.contains("Bad CRC32"), "{}: {complaint}", record.display());
    assert!(verdict.good_crcs >= 2 * CASES.len() - 1, "{verdict:#?}");
    std::fs::remove_file(&record).unwrap();
}

/// Opens the connection after `earlier` others, sends the invalid bytes, and returns the response.
fn provoke(case: &Case, peer: SocketAddr, server: &mut Job, earlier: usize) -> anyhow::Result<Vec<u8>> {
    let mut hostile = SocketPeer::started(peer, false, SHORT)?;
    hostile.say(&(case.bytes)(memory(server, earlier)))?;
    let answer = 0x0f & if case.siw.is_none() { READ_RESPONSE } else { TERMINATE };
    hostile.expect_opcode(answer)
}

/// Our queue pair's interpretation of an error that siw detects.
#[test]
fn siw_terminates_our_invalid_requests() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let address = stage.vm.address(Family::V4);
    let mut server = stage.serve(&format!("cm accept {address} {PORT} 0"), PORT).unwrap();
    let peer = SocketAddr::new(address, PORT);
    let record = stage.judged(Ending::Orderly, || {
        let work = || {
            let device = Device::open(INTERFACE).unwrap();
            // The nibbles are interpreted according to RFC 5040: siw's layer is our type.
            wrong_verb(&device, peer, &mut server, 0, |memory| {
                let remote = Remote { key: STag::new(memory.open ^ 1), offset: memory.address };
                (WorkRequest::write(1, Payload::Inline(b"x"), remote), (1, 1, 0))
            });
            wrong_verb(&device, peer, &mut server, 1, |memory| {
                let remote =
                    Remote { key: STag::new(memory.open), offset: memory.address + u64::from(memory.len) };
                (WorkRequest::write(1, Payload::Inline(b"x"), remote), (1, 1, 1))
            });
            wrong_verb(&device, peer, &mut server, 2, |_| {
                (WorkRequest::send(1, Payload::Inline(&[0; RECEIVE_BYTES + 1])), (2, 1, 2))
            });
        };
        stage.near.within(work).unwrap();
    });
    assert_eq!(record.unwrap().connections.iter().map(|c| c.terminates).collect::<Vec<_>>(), [1; 3]);
}

fn next_event(device: &Device) -> AsyncEvent {
    let (events, begin) = (device.async_events(), Instant::now());
    loop {
        if let Some(event) = events.poll() {
            return event;
        }
        assert!(begin.elapsed() < SHORT, "no event came");
        thread::sleep(Duration::from_millis(5));
    }
}

fn wrong_verb<'a>(
    device: &Device,
    peer: SocketAddr,
    server: &mut Job,
    earlier: usize,
    offence: impl FnOnce(Memory) -> (WorkRequest<'a>, Numbers),
) {
    let cq = device.create_cq_with_channel(16, &CompletionChannel::new().unwrap()).unwrap();
    let pd = device.create_pd().unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    let mpa = MpaConfig { markers: Markers::Off, ..MpaConfig::default() };
    let options = ConnectOptions { framing: Some(mpa.into()), ..ConnectOptions::default() };
    let connection = device.connect(&qp, peer, options, SHORT).unwrap();
    let (request, numbers) = offence(memory(server, earlier));
    qp.post_send(&request.signaled()).unwrap();
    // TCP acknowledged the request, or it was flushed; the Terminate arrives later in both cases.
    cq.wait(SHORT).unwrap().unwrap();
    assert!(connection.wait_disconnected(SHORT).unwrap());
    let AsyncEvent::QpFatal { fault: QpFault::Remote(header), .. } = next_event(device) else {
        panic!("no Terminate came")
    };
    assert_eq!((header.layer, header.error_type, header.code), numbers);
    let (layer, error_type, _) = numbers;
    // The text also gives siw's reading of the nibbles where that differs.
    assert!(header.to_string().contains(&format!("layer {error_type} type {layer}")), "{header}");
}
