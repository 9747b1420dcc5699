//! Captures as TCP streams: each direction's bytes put together again, with what TCP itself must not do
//! checked on the way.

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, Result};
use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use pcap_file::pcapng::{Block, PcapNgReader};

/// One direction of one connection, named by its source and its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Direction {
    /// The sender.
    pub from: SocketAddr,
    /// The receiver.
    pub to: SocketAddr,
}

impl Direction {
    /// The other direction of the same connection.
    #[must_use]
    pub fn reverse(self) -> Self {
        Self { from: self.to, to: self.from }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// The bytes of one direction, from the first after the SYN.
#[derive(Debug, Default, Clone)]
pub struct Stream {
    /// The bytes, as far as the capture has them without a gap.
    pub bytes: Vec<u8>,
    /// Offsets at which segments began, in the order of the stream, without retransmissions.
    pub starts: Vec<usize>,
    /// Segments with payload.
    pub segments: usize,
    /// Segments that brought only bytes which were there before.
    pub retransmissions: usize,
    /// What TCP did wrong.
    pub faults: Vec<String>,
}

/// Of each direction of which the capture has the SYN.
pub type Streams = BTreeMap<Direction, Stream>;

struct Segment {
    seq: u32,
    payload: Vec<u8>,
}

/// Reads a pcapng file. A frame may be in it twice (taken on both ends); the second counts as a retransmission.
pub fn streams(path: &Path) -> Result<Streams> {
    let file = fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut reader = PcapNgReader::new(std::io::BufReader::new(file)).context("not a pcapng file")?;
    let mut initial: BTreeMap<Direction, u32> = BTreeMap::new();
    let mut segments: BTreeMap<Direction, Vec<Segment>> = BTreeMap::new();
    while let Some(block) = reader.next_block() {
        if let Block::EnhancedPacket(packet) = block.context("a broken pcapng block")? {
            read_frame(&packet.data, &mut initial, &mut segments);
        }
    }
    let mut streams = Streams::new();
    for (direction, first) in initial {
        let segments = segments.remove(&direction).unwrap_or_default();
        streams.insert(direction, assemble(first.wrapping_add(1), segments));
    }
    Ok(streams)
}

fn read_frame(
    frame: &[u8],
    initial: &mut BTreeMap<Direction, u32>,
    segments: &mut BTreeMap<Direction, Vec<Segment>>,
) {
    let Ok(packet) = SlicedPacket::from_ethernet(frame) else { return };
    let (Some(net), Some(TransportSlice::Tcp(tcp))) = (packet.net, packet.transport) else { return };
    let (from, to) = match net {
        NetSlice::Ipv4(ip) => {
            (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
        }
        NetSlice::Ipv6(ip) => {
            (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
        }
        NetSlice::Arp(_) => return,
    };
    let direction = Direction {
        from: SocketAddr::new(from, tcp.source_port()),
        to: SocketAddr::new(to, tcp.destination_port()),
    };
    if tcp.syn() {
        initial.insert(direction, tcp.sequence_number());
    }
    if !tcp.payload().is_empty() {
        let segment = Segment { seq: tcp.sequence_number(), payload: tcp.payload().to_vec() };
        segments.entry(direction).or_default().push(segment);
    }
}

/// Puts the bytes together; `first` is the sequence number of the first one.
fn assemble(first: u32, segments: Vec<Segment>) -> Stream {
    let mut stream = Stream { segments: segments.len(), ..Stream::default() };
    let mut waiting: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for segment in segments {
        // Offsets are 32 bits wide on the wire; the nearest to what was already read is meant.
        let near = stream.bytes.len();
        let distance = segment.seq.wrapping_sub(first.wrapping_add(near as u32)).cast_signed();
        let Some(offset) = near.checked_add_signed(distance as isize) else {
            // A keepalive probe repeats the byte before the window, which may be the SYN's number.
            continue;
        };
        if offset + segment.payload.len() <= near {
            stream.retransmissions += 1;
        }
        let longer = waiting.get(&offset).is_none_or(|known| known.len() < segment.payload.len());
        compare(&mut stream, offset, &segment.payload);
        if longer {
            waiting.insert(offset, segment.payload);
        }
        advance(&mut stream, &mut waiting);
    }
    if let Some((&offset, _)) = waiting.iter().next() {
        stream
            .faults
            .push(format!("bytes {} to {offset} are in no segment of the capture", stream.bytes.len()));
    }
    stream
}

/// A byte that has a sequence number never changes.
fn compare(stream: &mut Stream, offset: usize, payload: &[u8]) {
    let known = stream.bytes.get(offset..).unwrap_or_default();
    if let Some(at) = known.iter().zip(payload).position(|(a, b)| a != b) {
        stream.faults.push(format!("byte {} was sent again with another value", offset + at));
    }
}

fn advance(stream: &mut Stream, waiting: &mut BTreeMap<usize, Vec<u8>>) {
    while let Some(entry) = waiting.first_entry() {
        let (offset, end) = (*entry.key(), stream.bytes.len());
        if offset > end {
            break;
        }
        let payload = entry.remove();
        if let Some(new) = payload.get(end - offset..).filter(|new| !new.is_empty()) {
            if offset == end {
                stream.starts.push(offset);
            }
            stream.bytes.extend_from_slice(new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(list: &[(u32, &[u8])]) -> Vec<Segment> {
        list.iter().map(|&(seq, payload)| Segment { seq, payload: payload.to_vec() }).collect()
    }

    #[test]
    fn disorder_and_repetition_come_out_in_order() {
        let first = u32::MAX - 1;
        let stream = assemble(
            first,
            segments(&[
                (first, b"abc"),
                (first.wrapping_add(6), b"ghi"),
                (first, b"abc"),
                (first.wrapping_add(3), b"def"),
            ]),
        );
        assert_eq!(stream.bytes, b"abcdefghi");
        assert_eq!(stream.starts, [0, 3, 6]);
        assert_eq!((stream.segments, stream.retransmissions), (4, 1));
        assert!(stream.faults.is_empty(), "{:?}", stream.faults);
    }

    #[test]
    fn a_changed_byte_and_a_hole_are_faults() {
        let stream = assemble(0, segments(&[(0, b"abcd"), (2, b"cX"), (9, b"z")]));
        assert_eq!(stream.faults.len(), 2, "{:?}", stream.faults);
        assert!(stream.faults[0].starts_with("byte 3 "));
        assert!(stream.faults[1].starts_with("bytes 4 to 9 "));
    }
}
