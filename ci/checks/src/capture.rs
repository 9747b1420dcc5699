//! Captures as TCP streams: reassembles the bytes of each direction and checks them for violations of TCP.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    fs::File,
    io::BufReader,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, Result};
use etherparse::{NetSlice, SlicedPacket, TcpSlice, TransportSlice};
use pcap_file::pcapng::{Block, PcapNgReader, PcapNgWriter};

/// One direction of one connection, identified by its source and destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Direction {
    /// The sender.
    pub from: SocketAddr,
    /// The receiver.
    pub to: SocketAddr,
    /// Number of earlier connections between the same ports in the capture.
    pub earlier: usize,
}

impl Direction {
    /// The other direction of the same connection.
    #[must_use]
    pub fn reverse(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// The bytes of one direction, starting with the first after the SYN.
#[derive(Debug, Default, Clone)]
pub struct Stream {
    /// The bytes up to the first gap of the capture.
    pub bytes: Vec<u8>,
    /// Stream offsets at which segments began, ascending, without retransmissions.
    pub starts: Vec<usize>,
    /// Segments with payload.
    pub segments: usize,
    /// Segments that contained only bytes seen before.
    pub retransmissions: usize,
    /// Stream offsets of these segments.
    pub repeated: Vec<usize>,
    /// Detected violations of TCP.
    pub faults: Vec<String>,
}

/// The streams of all directions whose SYN is in the capture.
pub type Streams = BTreeMap<Direction, Stream>;

struct Segment {
    seq: u32,
    payload: Vec<u8>,
}

/// Reads a pcapng file. A frame that was captured at both ends occurs twice; the second occurrence counts as
/// a retransmission.
pub fn streams(path: &Path) -> Result<Streams> {
    let mut initial: BTreeMap<Direction, u32> = BTreeMap::new();
    let mut segments: BTreeMap<Direction, Vec<Segment>> = BTreeMap::new();
    let mut connections = Connections::default();
    for_each_block(path, |block| {
        if let Block::EnhancedPacket(packet) = block
            && let Some((direction, tcp)) = connections.read(&packet.data)
        {
            let seq = tcp.sequence_number();
            if tcp.syn() {
                initial.insert(direction, seq);
            }
            if !tcp.payload().is_empty() {
                let payload = tcp.payload().to_vec();
                segments.entry(direction).or_default().push(Segment { seq, payload });
            }
        }
        Ok(())
    })?;
    let mut streams = Streams::new();
    for (direction, first) in initial {
        let segments = segments.remove(&direction).unwrap_or_default();
        streams.insert(direction, assemble(first.wrapping_add(1), segments));
    }
    Ok(streams)
}

/// The largest number of connections in a capture that use the same addresses and ports.
pub fn most_between_two_ports(path: &Path) -> Result<usize> {
    let mut connections = Connections::default();
    let mut most = 0;
    for_each_block(path, |block| {
        if let Block::EnhancedPacket(packet) = block
            && let Some((direction, _)) = connections.read(&packet.data)
        {
            most = most.max(direction.earlier + 1);
        }
        Ok(())
    })?;
    Ok(most)
}

/// Copies those connections of a capture that follow `earlier` connections between the same ports.
pub fn copy_connections(path: &Path, copy: &Path, earlier: usize) -> Result<()> {
    let file = File::create(copy).with_context(|| format!("cannot create {}", copy.display()))?;
    let mut writer = PcapNgWriter::new(file)?;
    let mut connections = Connections::default();
    for_each_block(path, |block| {
        let wanted = match block {
            Block::EnhancedPacket(packet) => {
                connections.read(&packet.data).map_or(0, |(direction, _)| direction.earlier) == earlier
            }
            Block::InterfaceDescription(_) => true,
            _ => false,
        };
        if wanted {
            writer.write_block(block)?;
        }
        Ok(())
    })
}

fn for_each_block(path: &Path, mut each: impl FnMut(&Block<'_>) -> Result<()>) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut reader = PcapNgReader::new(BufReader::new(file)).context("not a pcapng file")?;
    while let Some(block) = reader.next_block() {
        each(&block.context("a broken pcapng block")?)?;
    }
    Ok(())
}

/// Distinguishes connections with the same addresses and ports by their SYNs.
#[derive(Debug, Default)]
struct Connections {
    /// For each pair of ends, the lower one first: the sequence number of the last SYN, and the number of
    /// earlier connections.
    last: BTreeMap<[SocketAddr; 2], (u32, usize)>,
}

impl Connections {
    /// The direction of a frame, if the frame is TCP.
    fn read<'f>(&mut self, frame: &'f [u8]) -> Option<(Direction, TcpSlice<'f>)> {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let (Some(net), Some(TransportSlice::Tcp(tcp))) = (packet.net, packet.transport) else { return None };
        let (from, to) = match net {
            NetSlice::Ipv4(ip) => {
                (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
            }
            NetSlice::Ipv6(ip) => {
                (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
            }
            NetSlice::Arp(_) => return None,
        };
        let from = SocketAddr::new(from, tcp.source_port());
        let to = SocketAddr::new(to, tcp.destination_port());
        let earlier = self.earlier([from.min(to), from.max(to)], &tcp);
        Some((Direction { from, to, earlier }, tcp))
    }

    fn earlier(&mut self, ends: [SocketAddr; 2], tcp: &TcpSlice<'_>) -> usize {
        let seq = tcp.sequence_number();
        match self.last.entry(ends) {
            Entry::Vacant(entry) => entry.insert((seq, 0)).1,
            Entry::Occupied(mut entry) => {
                let (last, earlier) = entry.get_mut();
                if tcp.syn() && !tcp.ack() && *last != seq {
                    (*last, *earlier) = (seq, *earlier + 1);
                }
                *earlier
            }
        }
    }
}

/// Reassembles a stream; `first` is the sequence number of its first byte.
fn assemble(first: u32, segments: Vec<Segment>) -> Stream {
    let mut stream = Stream { segments: segments.len(), ..Stream::default() };
    let mut waiting: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for segment in segments {
        // Extend the 32-bit offset to the value nearest to the bytes already read.
        let near = stream.bytes.len();
        let distance = segment.seq.wrapping_sub(first.wrapping_add(near as u32)).cast_signed();
        let Some(offset) = near.checked_add_signed(distance as isize) else {
            // A keepalive probe repeats the byte before the window, which may have the sequence number of the
            // SYN.
            continue;
        };
        if offset + segment.payload.len() <= near {
            stream.retransmissions += 1;
            stream.repeated.push(offset);
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

/// Records a fault when a byte is retransmitted with another value.
fn compare(stream: &mut Stream, offset: usize, payload: &[u8]) {
    let known = stream.bytes.get(offset..).unwrap_or_default();
    if let Some(at) = known.iter().zip(payload).position(|(a, b)| a != b) {
        stream.faults.push(format!("byte {} was retransmitted with another value", offset + at));
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
pub(crate) mod tests {
    use std::time::Duration;

    use etherparse::PacketBuilder;
    use pcap_file::{
        DataLink,
        pcapng::blocks::{
            enhanced_packet::EnhancedPacketBlock, interface_description::InterfaceDescriptionBlock,
        },
    };

    use super::*;

    fn segments(list: &[(u32, &[u8])]) -> Vec<Segment> {
        list.iter().map(|&(seq, payload)| Segment { seq, payload: payload.to_vec() }).collect()
    }

    /// A segment from port 1000 to port 7, or in reverse.
    fn frame(back: bool, flags: &str, seq: u32, payload: &[u8]) -> Vec<u8> {
        let (from, to) = if back { (7, 1000) } else { (1000, 7) };
        let builder = PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 1], 64);
        let mut tcp = builder.tcp(from, to, seq, 1000);
        if flags.contains('S') {
            tcp = tcp.syn();
        }
        if flags.contains('A') {
            tcp = tcp.ack(1);
        }
        let mut bytes = Vec::new();
        tcp.write(&mut bytes, payload).unwrap();
        bytes
    }

    /// Writes a capture of `frames`.
    pub(crate) fn record(path: &Path, frames: &[Vec<u8>]) {
        let mut writer = PcapNgWriter::new(File::create(path).unwrap()).unwrap();
        let interface =
            InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen: 0, options: Vec::new() };
        writer.write_pcapng_block(interface).unwrap();
        for frame in frames {
            let packet = EnhancedPacketBlock {
                interface_id: 0,
                timestamp: Duration::ZERO,
                original_len: frame.len() as u32,
                data: frame.into(),
                options: Vec::new(),
            };
            writer.write_pcapng_block(packet).unwrap();
        }
    }

    #[test]
    fn connections_that_reuse_ports_are_distinguished() {
        let path = std::env::temp_dir().join(format!("ports-used-again-{}.pcapng", std::process::id()));
        let copy = path.with_extension("copy");
        let of = |seq, payload: &[u8]| {
            [
                frame(false, "S", seq, b""),
                frame(true, "SA", seq + 500, b""),
                frame(false, "S", seq, b""),
                frame(false, "A", seq + 1, payload),
            ]
        };
        record(&path, &[of(100, b"one"), of(9000, b"two")].concat());
        assert_eq!(most_between_two_ports(&path).unwrap(), 2);
        let bytes = |path: &Path| -> Vec<(usize, Vec<u8>)> {
            let streams = streams(path).unwrap();
            streams.into_iter().filter(|(d, _)| d.to.port() == 7).map(|(d, s)| (d.earlier, s.bytes)).collect()
        };
        assert_eq!(bytes(&path), [(0, b"one".to_vec()), (1, b"two".to_vec())]);
        copy_connections(&path, &copy, 1).unwrap();
        assert_eq!(bytes(&copy), [(0, b"two".to_vec())]);
        for file in [path, copy] {
            std::fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn reordered_and_repeated_segments_are_reassembled() {
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
