//! `xwarp explain`: explains a capture. [`Explainer`] reads packet by packet, keeps the state of each connection within
//! [`MAX_CONNECTIONS`] and [`MAX_HELD`], and prints events as they occur and summaries at the end.
//!
//! | module | owns |
//! |---|---|
//! | `file` | packets of pcap and pcapng files |
//! | `link_type` | forms of packets' first bytes |
//! | `sorted` | packets in the order of their times |
//! | `tally` | counts by names that a file chooses |
//! | `packet` | the TCP segment in a packet |
//! | `stream` | segments in order, retransmissions, gaps |
//! | `connection` | a TCP connection, its summary |
//! | `health` | what slowed a connection |
//! | `mpa` | start-up frames and FPDUs |
//! | `messages` | DDP segments, RDMAP messages, Terminates |
//! | `event` | events, as text and as JSON |
//! | `html` | a page with sequence diagrams |
//! | `frames` | single frames, by smoltcp's printers |

mod connection;
mod event;
mod file;
mod frames;
mod health;
mod html;
mod link_type;
mod messages;
mod mpa;
mod packet;
mod sorted;
mod stream;
mod tally;

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::SocketAddr,
    time::Duration,
};

use serde::Serialize;

use self::{
    connection::{Connection, EndSummary, Summary},
    event::{Event, at, count},
    file::{CaptureFile, Packet},
    health::Finding,
    html::DiagramPage,
    mpa::Events,
    packet::{Content, Segment},
    sorted::SortedPackets,
    tally::Tally,
};

pub use file::FileError;

/// Largest number of connections that are tracked.
const MAX_CONNECTIONS: usize = 4096;
/// Largest number of bytes in segments that wait for earlier ones, of all connections together.
const MAX_HELD: usize = 32 << 20;
/// Columns of an end's name.
const LINE_FIELD: usize = 6;

/// The output format.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// JSON, one object a line.
    pub json: bool,
    /// One HTML page, written at the end.
    pub html: bool,
    /// Each frame, by smoltcp's printers.
    pub frames: bool,
    /// Only the summaries.
    pub summary: bool,
    /// Each message, including repeated ones.
    pub all: bool,
    /// Only this connection.
    pub connection: Option<usize>,
    /// The input is a pipe that is still being written: packets are explained as they come, without sorting them.
    pub live: bool,
}

/// Explains the capture in `input`. An error of the file is returned after the summaries of the packets before it.
pub fn explain(input: impl Read, options: Options, out: &mut dyn Write) -> io::Result<Result<(), FileError>> {
    let file = match CaptureFile::open(input) {
        Ok(file) => file,
        Err(error) => return Ok(Err(error)),
    };
    let mut packets = SortedPackets::new(file, options.live);
    let mut explainer = Explainer::new(options, out);
    let result = loop {
        match packets.next_packet() {
            Ok(Some(packet)) => explainer.read(&packet.packet())?,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    let not_followed = explainer.not_followed;
    explainer.finish(packets.file().skipped(), packets.misplaced())?;
    Ok(match not_followed {
        0 => result,
        frames => result.and(Err(FileError::NotFollowed(frames, MAX_CONNECTIONS))),
    })
}

struct Explainer<'w> {
    options: Options,
    out: &'w mut dyn Write,
    begin: Option<Duration>,
    frame: u64,
    frames: u64,
    /// Frames of which the capture has only the first bytes.
    cut_frames: u64,
    connections: Vec<Connection>,
    /// The last connection between two ends, the lower one first.
    by_ends: BTreeMap<[SocketAddr; 2], usize>,
    /// Packets that are not TCP, by kind.
    other: Tally,
    not_followed: u64,
    held: usize,
    repeated: BTreeMap<(usize, usize), Repeated>,
    page: DiagramPage,
}

/// Repeated events that are not shown.
struct Repeated {
    key: (&'static str, u64),
    count: u64,
    until: Option<f64>,
}

#[derive(Serialize)]
struct EventLine<'a> {
    connection: usize,
    frame: u64,
    seconds: Option<f64>,
    from: &'static str,
    #[serde(flatten)]
    event: &'a Event,
}

#[derive(Serialize)]
struct SummaryLine<'a> {
    summary: &'a Summary,
}

#[derive(Serialize)]
struct FrameLine<'a> {
    frame: u64,
    seconds: Option<f64>,
    text: &'a str,
}

#[derive(Serialize)]
struct TotalLine<'a> {
    frames: u64,
    connections: usize,
    frames_not_followed: u64,
    other_frames: &'a Tally,
    cut_frames: u64,
    misplaced_frames: u64,
    skipped_blocks: &'a Tally,
}

impl<'w> Explainer<'w> {
    fn new(options: Options, out: &'w mut dyn Write) -> Self {
        Self {
            options,
            out,
            begin: None,
            frame: 0,
            frames: 0,
            cut_frames: 0,
            connections: Vec::new(),
            by_ends: BTreeMap::new(),
            other: Tally::default(),
            not_followed: 0,
            held: 0,
            repeated: BTreeMap::new(),
            page: DiagramPage::default(),
        }
    }

    fn read(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        self.frame = packet.number;
        self.frames += 1;
        self.cut_frames += u64::from(packet.bytes.len() < packet.wire_len);
        self.begin = self.begin.or(packet.time);
        if self.options.frames {
            self.print_frame(packet)?;
        }
        match packet::content(packet) {
            Content::Tcp(segment) => self.read_segment(&segment, packet.time),
            Content::Other(kind) => {
                self.other.add(kind.into_owned());
                Ok(())
            }
        }
    }

    fn read_segment(&mut self, segment: &Segment<'_>, time: Option<Duration>) -> io::Result<()> {
        let ends = [segment.from.min(segment.to), segment.from.max(segment.to)];
        let known = self.by_ends.get(&ends).copied();
        let index = known.filter(|index| !self.connections[*index].is_succeeded_by(segment));
        let index = match index {
            Some(index) => index,
            None if self.connections.len() == MAX_CONNECTIONS => {
                self.not_followed += 1;
                return Ok(());
            }
            None => {
                self.connections.push(Connection::new(segment, time));
                self.by_ends.insert(ends, self.connections.len() - 1);
                self.connections.len() - 1
            }
        };
        let mut events = Events::new();
        let connection = &mut self.connections[index];
        connection.read(segment, (self.frame, time), &mut self.held, MAX_HELD, &mut events);
        for (from, event) in events {
            self.print_event(index, from, &event, time)?;
        }
        Ok(())
    }

    fn is_wanted(&self, index: usize) -> bool {
        self.options.connection.is_none_or(|only| only == index + 1)
    }

    fn seconds(&self, time: Option<Duration>) -> Option<f64> {
        let (time, begin) = time.zip(self.begin)?;
        Some((time.as_nanos() as i128 - begin.as_nanos() as i128) as f64 / 1e9)
    }

    fn print_frame(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        let (frame, seconds, text) = (self.frame, self.seconds(packet.time), frames::describe(packet));
        if self.options.json {
            return json(self.out, &FrameLine { frame, seconds, text: &text });
        }
        writeln!(self.out, "{} frame {frame}", at(seconds))?;
        for line in text.lines() {
            writeln!(self.out, "{:14}{line}", "")?;
        }
        Ok(())
    }

    fn print_event(
        &mut self,
        index: usize,
        from: usize,
        event: &Event,
        time: Option<Duration>,
    ) -> io::Result<()> {
        if self.options.summary || !self.is_wanted(index) {
            return Ok(());
        }
        let seconds = self.seconds(time);
        if self.options.html {
            self.page.add(index, from, seconds, event, self.options.all);
            return Ok(());
        }
        let name = self.connections[index].names()[from];
        if self.options.json {
            let line = EventLine { connection: index + 1, frame: self.frame, seconds, from: name, event };
            return json(self.out, &line);
        }
        let key = event.key().filter(|_| !self.options.all);
        if let Some(repeated) = self.repeated.get_mut(&(index, from))
            && Some(repeated.key) == key
        {
            repeated.count += 1;
            repeated.until = seconds;
            return Ok(());
        }
        self.print_repeated(index, from)?;
        if let Some(key) = key {
            self.repeated.insert((index, from), Repeated { key, count: 0, until: None });
        }
        if matches!(event, Event::Middle | Event::Syn { answer: false, .. }) {
            let [a, b] = self.connections[index].ends;
            let [first, second] = self.connections[index].names();
            writeln!(
                self.out,
                "{} [{}] new connection: {first} is {a}, {second} is {b}",
                at(seconds),
                index + 1
            )?;
        }
        writeln!(self.out, "{} [{}] {name:LINE_FIELD$}  {event}", at(seconds), index + 1)
    }

    /// Prints how often the last event of an end was repeated.
    fn print_repeated(&mut self, index: usize, from: usize) -> io::Result<()> {
        if let Some(Repeated { count, until, .. }) = self.repeated.remove(&(index, from))
            && count > 0
        {
            let name = self.connections[index].names()[from];
            write!(self.out, "{:12} [{}] {name:LINE_FIELD$}  ... and {count} more like this", "", index + 1)?;
            match until {
                Some(until) => writeln!(self.out, ", until {until:.6}")?,
                None => writeln!(self.out)?,
            }
        }
        Ok(())
    }

    /// Prints the summaries and totals. The file had these skipped blocks, and packets so early that sorting missed them.
    fn finish(mut self, skipped_blocks: &Tally, misplaced_frames: u64) -> io::Result<()> {
        for index in 0..self.connections.len() {
            let mut events = Events::new();
            self.connections[index].finish(self.frame, &mut self.held, &mut events);
            let time = self.connections[index].last();
            for (from, event) in events {
                self.print_event(index, from, &event, time)?;
            }
        }
        let last: Vec<_> = self.repeated.keys().copied().collect();
        for (index, from) in last {
            self.print_repeated(index, from)?;
        }
        if self.options.html {
            return self.write_page(skipped_blocks, misplaced_frames);
        }
        for (index, connection) in self.connections.iter().enumerate() {
            if self.is_wanted(index) {
                let summary = connection.summary(index + 1);
                if self.options.json {
                    json(self.out, &SummaryLine { summary: &summary })?;
                } else {
                    write_summary(self.out, &summary)?;
                }
            }
        }
        if self.options.json {
            let total = TotalLine {
                frames: self.frames,
                connections: self.connections.len(),
                frames_not_followed: self.not_followed,
                other_frames: &self.other,
                cut_frames: self.cut_frames,
                misplaced_frames,
                skipped_blocks,
            };
            return json(self.out, &total);
        }
        let total = self.total(skipped_blocks, misplaced_frames)?;
        self.out.write_all(&total)
    }

    fn write_page(self, skipped_blocks: &Tally, misplaced_frames: u64) -> io::Result<()> {
        let wanted = (0..self.connections.len()).filter(|index| self.is_wanted(*index));
        let summaries = wanted.map(|index| {
            let (summary, mut text) = (self.connections[index].summary(index + 1), Vec::new());
            write_summary(&mut text, &summary)?;
            Ok((summary, String::from_utf8_lossy(&text).into_owned()))
        });
        let summaries: Vec<_> = summaries.collect::<io::Result<_>>()?;
        let total = self.total(skipped_blocks, misplaced_frames)?;
        self.page.write(&summaries, &String::from_utf8_lossy(&total), self.out)
    }

    /// The last lines.
    fn total(&self, skipped_blocks: &Tally, misplaced_frames: u64) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let connections = count(self.connections.len() as u64, "TCP connection");
        write!(out, "\n{}, {connections}", count(self.frames, "frame"))?;
        for (kind, number) in self.other.iter() {
            write!(out, "; {number} {kind}")?;
        }
        writeln!(out)?;
        if self.cut_frames > 0 {
            writeln!(
                out,
                "{} captured only in part (a snap length, as of 'tcpdump -s'): payload is missing",
                count(self.cut_frames, "frame")
            )?;
        }
        if misplaced_frames > 0 {
            let hint = if self.options.live {
                "a pipe is not sorted: write a file, and explain it"
            } else {
                "sort the file with 'reordercap FILE SORTED'"
            };
            writeln!(
                out,
                "{} not in the order of time, so retransmissions may be named wrongly: {hint}",
                count(misplaced_frames, "frame")
            )?;
        }
        if !skipped_blocks.is_empty() {
            let blocks: Vec<_> = skipped_blocks.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
            writeln!(out, "blocks of the file that have no packets: {}", blocks.join(", "))?;
        }
        Ok(out)
    }
}

fn json(out: &mut dyn Write, line: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

fn write_summary(out: &mut dyn Write, summary: &Summary) -> io::Result<()> {
    let Summary {
        connection, frames, seconds, first_byte_ms, mpa, health, end, ends: [first, second], ..
    } = summary;
    writeln!(
        out,
        "\nConnection {connection}: {} {}, {} {}",
        first.name, first.address, second.name, second.address
    )?;
    write!(out, "  {}", count(*frames, "frame"))?;
    if let Some(seconds) = seconds {
        write!(out, " in {seconds:.6} s")?;
    }
    writeln!(out, "; {end}{}", if *mpa { "" } else { "; no MPA in it" })?;
    for side in [first, second] {
        writeln!(out, "  {} sent {}", side.name, sent(side))?;
    }
    if let Some(ms) = first_byte_ms {
        let well = if health.iter().any(Finding::is_slow) { "" } else { "; nothing slowed it" };
        writeln!(out, "  first byte of data after {ms:.3} ms{well}")?;
    }
    for finding in health {
        writeln!(out, "  {}: {finding}", if finding.is_slow() { "slowed" } else { "idle" })?;
    }
    Ok(())
}

fn sent(side: &EndSummary) -> String {
    let mut parts = vec![format!("{} in {}", count(side.bytes, "byte"), count(side.segments, "segment"))];
    if side.fpdus > 0 {
        parts.push(count(side.fpdus, "FPDU"));
    }
    let messages = side.messages.iter();
    parts.extend(
        messages.map(|(kind, total)| format!("{}x {kind} ({})", total.messages, count(total.bytes, "byte"))),
    );
    let troubles = [
        (side.retransmissions, "retransmitted"),
        (side.out_of_order, "out of order"),
        (side.congestion_marks, "marked with congestion"),
        (side.bad_fpdus, "bad FPDU(s)"),
        (side.not_captured_bytes, "bytes not in the capture"),
    ];
    parts.extend(
        troubles.iter().filter(|(number, _)| *number > 0).map(|(number, what)| format!("{number} {what}")),
    );
    parts.join("; ")
}
