//! Reads the packets of pcap and pcapng files, also compressed by gzip, also from a pipe. It reads one packet at a time, and
//! holds at most [`MAX_BLOCK_BYTES`] and a table of [`MAX_INTERFACES`] entries, whatever the file contains.

use std::{
    io::{self, Chain, Cursor, Read},
    time::Duration,
};

use flate2::read::MultiGzDecoder;

pub use super::link_type::LinkType;
use super::tally::Tally;

/// Largest length of a pcapng block or a pcap packet, in bytes. The longest frame has 65535 bytes and a few headers.
const MAX_BLOCK_BYTES: usize = 1 << 20;
/// Largest number of interfaces of a pcapng section.
const MAX_INTERFACES: usize = 4096;

/// Block types of pcapng: `draft-ietf-opsawg-pcapng`, section 11.1.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const INTERFACE_DESCRIPTION: u32 = 1;
/// Obsolete, but old programs write it.
const PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
/// Blocks without packets.
const SKIPPED_BLOCKS: [(u32, &str); 11] = [
    (4, "name resolution"),
    (5, "interface statistics"),
    (7, "IRIG timestamp"),
    (8, "ARINC 429"),
    (9, "systemd journal"),
    (10, "decryption secrets"),
    (0x204, "Sysdig event"),
    (0x208, "Sysdig event with flags"),
    (0x216, "Sysdig event, version 2"),
    (0x0bad, "custom"),
    (0x4000_0bad, "custom"),
];
const OPTION_TIMESTAMP_RESOLUTION: u16 = 9;
const OPTION_TIMESTAMP_OFFSET: u16 = 14;
/// First bytes of a file that gzip has written.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// First bytes of other files with captures in them, and the command that makes them readable.
const CONVERTED: [(&[u8], &str, &str); 5] = [
    (&[0x28, 0xb5, 0x2f, 0xfd], "compressed with zstd", "zstd -dc FILE | xwarp explain -"),
    (&[0xfd, b'7', b'z', b'X'], "compressed with xz", "xz -dc FILE | xwarp explain -"),
    (b"BZh", "compressed with bzip2", "bzip2 -dc FILE | xwarp explain -"),
    (&[0x04, 0x22, 0x4d, 0x18], "compressed with lz4", "lz4 -dc FILE | xwarp explain -"),
    (b"snoo", "in the format of snoop", "editcap FILE - | xwarp explain -"),
];

/// Why a file cannot be read, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Reading failed.
    #[error("cannot read the capture: {0}")]
    Io(#[from] io::Error),
    /// The first bytes are those of no known format.
    #[error(
        "this is neither a pcap nor a pcapng file (record one with 'tcpdump -w FILE' or 'xwarp-perf --pcap FILE')"
    )]
    Format,
    /// A format that another program converts.
    #[error("the capture is {0}, which is not read here: convert it with '{1}'")]
    Converted(&'static str, &'static str),
    /// The file ends within a packet.
    #[error("the capture ends within a packet: it was cut off, or is still being written")]
    CutOff,
    /// A length or reference in the file is impossible.
    #[error("the capture is damaged behind its packet {0}: the rest cannot be read")]
    Damaged(u64),
    /// The file has more connections than are followed.
    #[error(
        "{0} frames belong to further connections than the first {1}, which are followed: split the capture, for \
         instance with 'tcpdump -r FILE -w PART port PORT'"
    )]
    NotFollowed(u64, usize),
}

/// A compressed file that ends early says so with the kind of its error.
fn read_error(error: io::Error) -> FileError {
    if error.kind() == io::ErrorKind::UnexpectedEof { FileError::CutOff } else { FileError::Io(error) }
}

/// A packet of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Position in the file, from 1.
    pub number: u64,
    /// Time since 1970; `None` if the file has no time.
    pub time: Option<Duration>,
    /// The form of the first bytes.
    pub link: LinkType,
    /// Bytes of the packet on the wire.
    pub wire_len: usize,
    /// The captured bytes.
    pub bytes: &'a [u8],
}

/// Reads packets in sequence.
pub struct CaptureFile<R> {
    input: Input<R>,
    format: Format,
    buffer: Vec<u8>,
    packets: u64,
    skipped: Tally,
}

/// The file, with its first bytes again.
enum Input<R> {
    Plain(Chain<Cursor<Vec<u8>>, R>),
    Gzip(Box<MultiGzDecoder<Chain<Cursor<Vec<u8>>, R>>>),
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(input) => input.read(bytes),
            Self::Gzip(input) => input.read(bytes),
        }
    }
}

enum Format {
    Pcap { big_endian: bool, nanoseconds: bool, link: LinkType, record_header: usize },
    PcapNg { big_endian: bool, interfaces: Vec<Description> },
}

/// An interface of a pcapng section.
struct Description {
    link: LinkType,
    snap_length: u32,
    ticks: Ticks,
    /// Seconds to add to its time stamps.
    offset: i64,
}

impl Description {
    fn time(&self, ticks: u64) -> Option<Duration> {
        let time = self.ticks.time(ticks)?;
        let offset = Duration::from_secs(self.offset.unsigned_abs());
        if self.offset < 0 { time.checked_sub(offset) } else { time.checked_add(offset) }
    }
}

/// Unit of a pcapng interface's time stamps.
#[derive(Clone, Copy)]
enum Ticks {
    /// 10 to the power of minus this, in seconds.
    Decimal(u8),
    /// 2 to the power of minus this.
    Binary(u8),
}

impl Ticks {
    fn from_option(value: u8) -> Self {
        if value & 0x80 == 0 { Self::Decimal(value) } else { Self::Binary(value & 0x7f) }
    }

    fn time(self, count: u64) -> Option<Duration> {
        let per_second = match self {
            Self::Decimal(power) => 10_u128.checked_pow(power.into())?,
            Self::Binary(power) => 1_u128.checked_shl(power.into())?,
        };
        let nanoseconds = u128::from(count).checked_mul(1_000_000_000)? / per_second;
        Some(Duration::from_nanos(u64::try_from(nanoseconds).ok()?))
    }
}

fn u16_at(bytes: &[u8], at: usize, big_endian: bool) -> Option<u16> {
    let bytes = *bytes.get(at..)?.first_chunk()?;
    Some(if big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
}

fn u32_at(bytes: &[u8], at: usize, big_endian: bool) -> Option<u32> {
    let bytes = *bytes.get(at..)?.first_chunk()?;
    Some(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
}

impl<R: Read> CaptureFile<R> {
    /// Reads the header of a file.
    pub fn open(mut input: R) -> Result<Self, FileError> {
        let mut first = Vec::new();
        (&mut input).take(4).read_to_end(&mut first).map_err(read_error)?;
        if let Some((_, what, command)) = CONVERTED.iter().find(|(magic, ..)| first.starts_with(magic)) {
            return Err(FileError::Converted(what, command));
        }
        let compressed = first.starts_with(&GZIP);
        let input = Cursor::new(first).chain(input);
        let input =
            if compressed { Input::Gzip(Box::new(MultiGzDecoder::new(input))) } else { Input::Plain(input) };
        let format = Format::PcapNg { big_endian: false, interfaces: Vec::new() };
        let mut file = Self { input, format, buffer: Vec::new(), packets: 0, skipped: Tally::default() };
        file.read_header()?;
        Ok(file)
    }

    /// Blocks that were skipped, by type.
    pub fn skipped(&self) -> &Tally {
        &self.skipped
    }

    fn read_header(&mut self) -> Result<(), FileError> {
        let mut magic = [0; 4];
        let full = |result: io::Result<()>| match result {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(FileError::Format),
            other => other.map_err(FileError::from),
        };
        full(self.input.read_exact(&mut magic))?;
        let (big_endian, nanoseconds, record_header) = match magic {
            [0xa1, 0xb2, 0xc3, 0xd4] => (true, false, 16),
            [0xd4, 0xc3, 0xb2, 0xa1] => (false, false, 16),
            [0xa1, 0xb2, 0x3c, 0x4d] => (true, true, 16),
            [0x4d, 0x3c, 0xb2, 0xa1] => (false, true, 16),
            // The form of Kuznetzov's patched libpcap has 8 bytes more in the header of each packet.
            [0xa1, 0xb2, 0xcd, 0x34] => (true, false, 24),
            [0x34, 0xcd, 0xb2, 0xa1] => (false, false, 24),
            _ if u32::from_be_bytes(magic) == SECTION_HEADER => return self.read_section_header(),
            _ => return Err(FileError::Format),
        };
        let mut header = [0; 20];
        full(self.input.read_exact(&mut header))?;
        // The upper bits of the link type announce the length of frame check sequences.
        let link = u32_at(&header, 16, big_endian).unwrap_or_default() & 0x0fff_ffff;
        let link = LinkType::from_number(link);
        self.format = Format::Pcap { big_endian, nanoseconds, link, record_header };
        Ok(())
    }

    /// The next packet; `None` at the end of the file. After an error no more packets can be read.
    pub fn next_packet(&mut self) -> Result<Option<Packet<'_>>, FileError> {
        let found = match self.format {
            Format::Pcap { big_endian, nanoseconds, link, record_header } => {
                self.next_of_pcap((big_endian, nanoseconds, record_header), link)?
            }
            Format::PcapNg { .. } => self.next_of_pcapng()?,
        };
        let Some(Found { time, link, begin, len, wire_len }) = found else { return Ok(None) };
        self.packets += 1;
        let bytes = self.buffer.get(begin..begin + len).unwrap_or_default();
        Ok(Some(Packet { number: self.packets, time, link, wire_len: wire_len.max(len), bytes }))
    }

    fn next_of_pcap(
        &mut self,
        (big_endian, nanoseconds, record_header): (bool, bool, usize),
        link: LinkType,
    ) -> Result<Option<Found>, FileError> {
        if !self.fill(record_header)? {
            return Ok(None);
        }
        let field = |at| u32_at(&self.buffer, at, big_endian).unwrap_or_default();
        let (seconds, fraction, len, wire_len) = (field(0), field(4), field(8) as usize, field(12) as usize);
        let unit = if nanoseconds { 1 } else { 1000 };
        let nanoseconds = u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * unit;
        self.fill_rest(0, len)?;
        Ok(Some(Found { time: Some(Duration::from_nanos(nanoseconds)), link, begin: 0, len, wire_len }))
    }

    fn next_of_pcapng(&mut self) -> Result<Option<Found>, FileError> {
        loop {
            if !self.fill(4)? {
                return Ok(None);
            }
            let big_endian = matches!(self.format, Format::PcapNg { big_endian: true, .. });
            let kind = u32_at(&self.buffer, 0, big_endian).unwrap_or_default();
            if kind == SECTION_HEADER {
                self.read_section_header()?;
                continue;
            }
            self.fill_rest(0, 4)?;
            let len = u32_at(&self.buffer, 0, big_endian).unwrap_or_default() as usize;
            let body = len.checked_sub(12).filter(|_| len.is_multiple_of(4)).ok_or(self.damaged())?;
            self.fill_rest(0, body + 4)?;
            self.buffer.truncate(body);
            match kind {
                INTERFACE_DESCRIPTION => self.read_description(big_endian)?,
                ENHANCED_PACKET | PACKET => return self.packet(big_endian, kind).map(Some),
                SIMPLE_PACKET => return self.simple_packet(big_endian).map(Some),
                _ => self.skip(kind),
            }
        }
    }

    fn skip(&mut self, kind: u32) {
        let name = SKIPPED_BLOCKS.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name);
        self.skipped.add(name.map_or_else(|| format!("of type {kind:#x}"), str::to_owned));
    }

    /// Reads a section header after its block type: length and byte order magic, then the rest.
    fn read_section_header(&mut self) -> Result<(), FileError> {
        self.fill_rest(0, 8)?;
        let big_endian = u32_at(&self.buffer, 4, true) == Some(BYTE_ORDER_MAGIC);
        if u32_at(&self.buffer, 4, big_endian) != Some(BYTE_ORDER_MAGIC) {
            return Err(self.damaged());
        }
        let len = u32_at(&self.buffer, 0, big_endian).unwrap_or_default() as usize;
        let rest = len.checked_sub(12).ok_or(self.damaged())?;
        self.fill_rest(0, rest)?;
        self.format = Format::PcapNg { big_endian, interfaces: Vec::new() };
        Ok(())
    }

    fn read_description(&mut self, big_endian: bool) -> Result<(), FileError> {
        let damaged = self.damaged();
        let Format::PcapNg { interfaces, .. } = &mut self.format else { return Err(damaged) };
        let body = &self.buffer;
        let link = u16_at(body, 0, big_endian);
        let (Some(link), Some(snap_length)) = (link, u32_at(body, 4, big_endian)) else {
            return Err(damaged);
        };
        if interfaces.len() == MAX_INTERFACES {
            return Err(damaged);
        }
        let (mut ticks, mut offset) = (Ticks::Decimal(6), 0);
        let mut at = 8;
        while let (Some(code), Some(len)) = (u16_at(body, at, big_endian), u16_at(body, at + 2, big_endian)) {
            if code == 0 {
                break;
            }
            if let (OPTION_TIMESTAMP_RESOLUTION, Some(&value)) = (code, body.get(at + 4)) {
                ticks = Ticks::from_option(value);
            }
            if let (OPTION_TIMESTAMP_OFFSET, Some(&value)) =
                (code, body.get(at + 4..).and_then(<[u8]>::first_chunk))
            {
                offset = if big_endian { i64::from_be_bytes(value) } else { i64::from_le_bytes(value) };
            }
            at += 4 + usize::from(len).next_multiple_of(4);
        }
        interfaces.push(Description { link: LinkType::from_number(link.into()), snap_length, ticks, offset });
        Ok(())
    }

    /// An Enhanced Packet Block, or the obsolete Packet Block, whose interface has 16 bits and is followed by a count of
    /// lost packets.
    fn packet(&self, big_endian: bool, kind: u32) -> Result<Found, FileError> {
        let field = |at| u32_at(&self.buffer, at, big_endian).ok_or(self.damaged());
        let Format::PcapNg { interfaces, .. } = &self.format else { return Err(self.damaged()) };
        let interface = if kind == PACKET {
            u16_at(&self.buffer, 0, big_endian).ok_or(self.damaged())?.into()
        } else {
            field(0)? as usize
        };
        let interface = interfaces.get(interface).ok_or(self.damaged())?;
        let ticks = u64::from(field(4)?) << 32 | u64::from(field(8)?);
        let (len, wire_len) = (field(12)? as usize, field(16)? as usize);
        if len > self.buffer.len().saturating_sub(20) {
            return Err(self.damaged());
        }
        Ok(Found { time: interface.time(ticks), link: interface.link, begin: 20, len, wire_len })
    }

    fn simple_packet(&self, big_endian: bool) -> Result<Found, FileError> {
        let original = u32_at(&self.buffer, 0, big_endian).ok_or(self.damaged())?;
        let Format::PcapNg { interfaces, .. } = &self.format else { return Err(self.damaged()) };
        let interface = interfaces.first().ok_or(self.damaged())?;
        let limit = if interface.snap_length == 0 { u32::MAX } else { interface.snap_length };
        let len = (original.min(limit) as usize).min(self.buffer.len() - 4);
        Ok(Found { time: None, link: interface.link, begin: 4, len, wire_len: original as usize })
    }

    fn damaged(&self) -> FileError {
        FileError::Damaged(self.packets)
    }

    /// Reads the first `len` bytes of a block or packet; false at the end of the file.
    fn fill(&mut self, len: usize) -> Result<bool, FileError> {
        self.buffer.clear();
        let got = (&mut self.input).take(len as u64).read_to_end(&mut self.buffer).map_err(read_error)?;
        if got == 0 {
            return Ok(false);
        }
        if got == len { Ok(true) } else { Err(FileError::CutOff) }
    }

    /// Replaces the buffer's bytes from `at` on by the next `len` bytes of the file.
    fn fill_rest(&mut self, at: usize, len: usize) -> Result<(), FileError> {
        if len > MAX_BLOCK_BYTES {
            return Err(self.damaged());
        }
        self.buffer.truncate(at);
        let got = (&mut self.input).take(len as u64).read_to_end(&mut self.buffer).map_err(read_error)?;
        if got == len { Ok(()) } else { Err(FileError::CutOff) }
    }
}

/// A packet in the buffer.
struct Found {
    time: Option<Duration>,
    link: LinkType,
    begin: usize,
    len: usize,
    wire_len: usize,
}
