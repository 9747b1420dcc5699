//! A second MPA parser (RFC 5044), written from the RFC and without shared code with the stack. From the
//! bytes of both directions of a connection it reads the start-up frames and FPDUs, and it checks each
//! marker, pad and CRC. When markers are in use, Wireshark's dissector expects one FPDU per segment; this
//! parser accepts any segmentation.

use crate::capture::{Direction, Stream, Streams};

/// Distance between markers, in stream bytes (section 4.3).
const MARKER_INTERVAL: usize = 512;
const MARKER_BYTES: usize = 4;
/// Size of a start-up frame without its private data (section 7.1.1).
const START_UP_BYTES: usize = 20;

const MARKERS_FLAG: u8 = 0x80;
const CRC_FLAG: u8 = 0x40;
const REJECT_FLAG: u8 = 0x20;

const PAD_FAULT: &str = "the pad is not zero";
const CUT_OFF: &str = "cut off by the end of the stream";

/// A Request or Reply frame (section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StartUp {
    reply: bool,
    flags: u8,
    revision: u8,
    bytes: usize,
}

/// The contents of one connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connection {
    /// MPA revision of the reply.
    pub revision: u8,
    /// Whether CRCs are in use: either end requested them.
    pub crc: bool,
    /// Whether the initiator's direction has markers (requested by the reply's M flag), and whether the
    /// responder's has.
    pub markers: (bool, bool),
    /// Whether the responder rejected the connection.
    pub rejected: bool,
    /// Number of FPDUs in both directions.
    pub fpdus: usize,
    /// The first FPDU of a direction was captured more than once.
    pub repeats_first: bool,
    /// Number of markers in both directions.
    pub marker_count: usize,
    /// Number of Terminate messages (`RDMAP` opcode 7) in both directions.
    pub terminates: usize,
    /// Detected violations.
    pub faults: Vec<String>,
}

/// Reads every MPA connection with both SYNs in the capture.
pub fn connections(streams: &Streams) -> Vec<Connection> {
    streams
        .iter()
        .filter_map(|(direction, request)| {
            let reply = streams.get(&direction.reverse())?;
            let start = start_up(&request.bytes)?;
            (!start.reply).then(|| connection(*direction, request, start, reply))
        })
        .collect()
}

/// The ULPDUs of a direction after its start-up frame, up to the first incomplete one.
pub fn ulpdus(bytes: &[u8], markers: bool, crc: bool) -> Result<Vec<Vec<u8>>, String> {
    let mut reader = Reader { bytes, at: 0, markers, crc };
    let mut found = Vec::new();
    while reader.at < bytes.len() {
        match reader.read_one() {
            Ok(fpdu) if !fpdu.pad_is_zero => return Err(PAD_FAULT.to_owned()),
            Ok(fpdu) => found.push(fpdu.ulpdu),
            Err(fault) if fault.contains(CUT_OFF) => break,
            Err(fault) => return Err(fault),
        }
    }
    Ok(found)
}

/// Whether a fault is only that a direction ended in the middle of an FPDU.
pub fn is_cut_off(fault: &str) -> bool {
    fault.ends_with(CUT_OFF)
}

/// Whether a fault is only a nonzero pad (section 4.1).
pub fn is_of_the_pad(fault: &str) -> bool {
    fault.ends_with(PAD_FAULT)
}

fn connection(direction: Direction, request: &Stream, start: StartUp, reply: &Stream) -> Connection {
    let mut found = Connection::default();
    for fault in request.faults.iter().chain(&reply.faults) {
        found.faults.push(format!("{direction}: {fault}"));
    }
    let Some(answer) = start_up(&reply.bytes) else {
        if !reply.bytes.is_empty() {
            found.faults.push(format!("{direction}: the answer to the MPA Request is not a Reply"));
        }
        return found;
    };
    found.revision = answer.revision;
    found.crc = (start.flags | answer.flags) & CRC_FLAG != 0;
    found.rejected = answer.flags & REJECT_FLAG != 0;
    // Section 7.1.1: M requires markers in the direction that the sender of the frame receives.
    found.markers = (answer.flags & MARKERS_FLAG != 0, start.flags & MARKERS_FLAG != 0);
    let (to, from) = found.markers;
    for (direction, stream, skip, markers) in
        [(direction, request, start.bytes, to), (direction.reverse(), reply, answer.bytes, from)]
    {
        let mut reader =
            Reader { bytes: stream.bytes.get(skip..).unwrap_or_default(), at: 0, markers, crc: found.crc };
        let boundaries = reader.read_all(direction, &mut found);
        found.repeats_first |= stream.repeated.contains(&skip);
        // The sender begins each segment with an FPDU (design section 5, RFC 5044 section 5.1).
        for start in stream.starts.iter().filter(|&&start| start > skip) {
            if boundaries.binary_search(&(start - skip)).is_err() {
                found
                    .faults
                    .push(format!("{direction}: the segment at byte {start} does not begin with an FPDU"));
            }
        }
    }
    found
}

fn start_up(bytes: &[u8]) -> Option<StartUp> {
    let head = bytes.get(..START_UP_BYTES)?;
    let reply = match &head[..16] {
        b"MPA ID Req Frame" => false,
        b"MPA ID Rep Frame" => true,
        _ => return None,
    };
    let private_data = usize::from(u16::from_be_bytes([head[18], head[19]]));
    Some(StartUp { reply, flags: head[16], revision: head[17], bytes: START_UP_BYTES + private_data })
}

/// Reads the full operation phase of one direction.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    markers: bool,
    crc: bool,
}

impl Reader<'_> {
    /// Reads all FPDUs; returns their offsets, and the end of the last one.
    fn read_all(&mut self, direction: Direction, found: &mut Connection) -> Vec<usize> {
        let mut boundaries = vec![0];
        while self.at < self.bytes.len() {
            let start = self.at;
            match self.read_one() {
                Ok(Fpdu { markers, pad_is_zero, ulpdu }) => {
                    let opcode = ulpdu.get(1).map(|control| control & 0x0f);
                    if !pad_is_zero {
                        found.faults.push(format!("{direction}: FPDU at byte {start}: {PAD_FAULT}"));
                    }
                    found.fpdus += 1;
                    found.marker_count += markers;
                    found.terminates += usize::from(opcode == Some(7));
                }
                Err(fault) => {
                    found.faults.push(format!("{direction}: FPDU at byte {start}: {fault}"));
                    break;
                }
            }
            boundaries.push(self.at);
        }
        boundaries
    }

    fn read_one(&mut self) -> Result<Fpdu, String> {
        let begin = self.at;
        let mut header = None;
        let mut markers = 0;
        let mut take = |reader: &mut Self, want: usize| -> Result<Vec<u8>, String> {
            let mut out = Vec::with_capacity(want);
            while out.len() < want {
                if reader.markers && reader.at.is_multiple_of(MARKER_INTERVAL) {
                    reader.check_marker(header)?;
                    markers += 1;
                }
                header.get_or_insert(reader.at);
                let until_marker = MARKER_INTERVAL - reader.at % MARKER_INTERVAL;
                let room = if reader.markers { until_marker } else { want };
                let n = room.min(want - out.len());
                let piece =
                    reader.bytes.get(reader.at..reader.at + n).ok_or_else(|| format!("it is {CUT_OFF}"))?;
                out.extend_from_slice(piece);
                reader.at += n;
            }
            Ok(out)
        };
        let length = take(self, 2)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        let ulpdu = take(self, length)?;
        let pad = take(self, (4 - (2 + length) % 4) % 4)?;
        // A marker between the pad and the CRC is covered by the CRC (section 4.4, 1).
        if self.markers && self.at.is_multiple_of(MARKER_INTERVAL) {
            self.check_marker(header)?;
            markers += 1;
        }
        let covered = self.bytes.get(begin..self.at).unwrap_or_default();
        let sent = self.bytes.get(self.at..self.at + 4).ok_or_else(|| format!("its CRC is {CUT_OFF}"))?;
        self.at += 4;
        // Least significant byte first, as in iSCSI.
        let computed = crc32c::crc32c(covered).to_le_bytes();
        if self.crc && sent != computed {
            return Err(format!("its CRC is {sent:02x?} instead of {computed:02x?}"));
        }
        Ok(Fpdu { markers, pad_is_zero: pad.iter().all(|byte| *byte == 0), ulpdu })
    }

    /// Checks the marker at the current position and skips it; `header` is the offset of the FPDU's length
    /// field.
    fn check_marker(&mut self, header: Option<usize>) -> Result<(), String> {
        let marker = self
            .bytes
            .get(self.at..self.at + MARKER_BYTES)
            .ok_or_else(|| format!("a marker is {CUT_OFF}"))?;
        let reserved = u16::from_be_bytes([marker[0], marker[1]]);
        let pointer = usize::from(u16::from_be_bytes([marker[2], marker[3]]));
        let expected = header.map_or(0, |header| self.at - header);
        if reserved != 0 {
            return Err(format!("the reserved field of the marker at byte {} is not zero", self.at));
        }
        if pointer != expected {
            return Err(format!(
                "the marker at byte {} points {pointer} bytes back instead of {expected}",
                self.at
            ));
        }
        self.at += MARKER_BYTES;
        Ok(())
    }
}

struct Fpdu {
    markers: usize,
    pad_is_zero: bool,
    ulpdu: Vec<u8>,
}

#[cfg(test)]
mod tests;
