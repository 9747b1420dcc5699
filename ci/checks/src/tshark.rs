//! Wireshark as a checker: it must find no fault in our traffic, and it must recognise our protocols.

use std::{collections::BTreeMap, fs, path::Path, process::Command, sync::OnceLock};

use anyhow::{Context as _, Result, ensure};

use crate::capture;

/// Known false complaints of the dissectors (4.0.17), by their text, each with its reason. Any other expert
/// information of severity warning or error fails the test.
const QUIRKS: &[(&str, &str)] = &[
    ("Rev field is NOT set to one", "the dissector knows revision 1 only, RFC 6581 came later"),
    (
        "Res field is NOT set to zero",
        "RFC 6581 gave the first reserved bit a meaning (S), our extension the others",
    ),
    (
        CHECKSUM_OF_ONES,
        "Linux writes the checksum 0 of TCP as 0xffff too, which is the same number to a receiver",
    ),
];

const CHECKSUM_OF_ONES: &str = "Checksum 0xffff instead of 0x0000 (see RFC 1624)";

/// The protocols of our captures. Any other would be a wrong guess of Wireshark's, from a port (a client's port may be 57000, that
/// of IRC) or from the first bytes of the payload (RPC over RDMA reports short Sends as malformed).
const PROTOCOLS: [&str; 14] = [
    "frame",
    "eth",
    "ethertype",
    "vlan",
    "arp",
    "ip",
    "ipv6",
    "icmp",
    "icmpv6",
    "udp",
    "tcp",
    "iwarp_mpa",
    "iwarp_ddp_rdmap",
    "data",
];

/// Severities of Wireshark's expert information that fail a test: warning and error.
const WARNING: u32 = 0x0060_0000;

/// The result of tshark on a capture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Frames in the capture.
    pub frames: usize,
    /// Frames that contain TCP.
    pub tcp_frames: usize,
    /// Frames that contain MPA.
    pub mpa_frames: usize,
    /// FPDUs whose CRC is correct.
    pub good_crcs: usize,
    /// Known false complaints, with their number.
    pub quirks: BTreeMap<String, usize>,
    /// Other complaints: frame number and text.
    pub complaints: Vec<String>,
}

/// The fields printed for each frame, in column order.
const FIELDS: [&str; 9] = [
    "frame.number",
    "frame.protocols",
    "_ws.expert.severity",
    "_ws.expert.message",
    "_ws.malformed",
    "tcp.checksum.status",
    "ip.checksum.status",
    "iwarp_mpa.crc_check",
    "tcp.analysis.flags",
];

/// Runs tshark on a capture. `markers` states whether MPA markers are in use. The dissector ignores markers
/// when it looks for the next FPDU, takes lengths from the middle of messages, and reports malformed frames.
/// For such captures it is therefore disabled, and only TCP and the layers below are checked here
/// ([`crate::framing`] checks the rest).
///
/// tshark also takes a connection for an earlier one with the same ports and then reports malformed frames,
/// so such connections are passed to it one by one.
pub fn judge(path: &Path, markers: bool) -> Result<Verdict> {
    let most = capture::most_between_two_ports(path)?;
    if most <= 1 {
        return judge_distinct(path, markers);
    }
    let mut verdict = Verdict::default();
    for earlier in 0..most {
        let part = path.with_extension(format!("{earlier}.pcapng"));
        capture::copy_connections(path, &part, earlier)?;
        verdict.add(judge_distinct(&part, markers)?);
        fs::remove_file(&part)?;
    }
    Ok(verdict)
}

/// Checks a capture in which no ports were used twice.
fn judge_distinct(path: &Path, markers: bool) -> Result<Verdict> {
    let mut command = tshark(path)?;
    if markers {
        command.args(["--disable-heuristic", "iwarp_mpa_tcp"]);
    }
    command.args(["-T", "fields", "-E", "separator=/t", "-E", "occurrence=a", "-E", "aggregator=|"]);
    for field in FIELDS {
        command.args(["-e", field]);
    }
    let output = command.output().context("cannot run tshark: is it installed?")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "tshark: {}", errors.trim());
    let bad = if markers { Vec::new() } else { bad_crcs(path)? };
    let mut verdict = Verdict::default();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        verdict.read(line);
    }
    verdict.good_crcs -= bad.len().min(verdict.good_crcs);
    verdict.complaints.extend(bad);
    Ok(verdict)
}

/// Creates a tshark command that reads `path`: with reassembly out of order, because a segment that siw's TCP
/// resegmented on retransmission would be taken for the start of an FPDU; with enough layers for all FPDUs behind a gap, which
/// belong to the frame that fills it; without the protocols that no capture of ours contains; and
/// with verification of checksums, which is off by default.
fn tshark(path: &Path) -> Result<Command> {
    let mut command = Command::new("tshark");
    command.arg("-n").arg("-r").arg(path);
    for preference in [
        "tcp.check_checksum:TRUE",
        "ip.check_checksum:TRUE",
        "tcp.desegment_tcp_streams:TRUE",
        "tcp.reassemble_out_of_order:TRUE",
        "gui.max_tree_depth:20000",
    ] {
        command.args(["-o", preference]);
    }
    for protocol in foreign_protocols()? {
        command.args(["--disable-protocol", protocol]);
    }
    Ok(command)
}

/// The protocols of this tshark that are not in [`PROTOCOLS`]. Those of a Lua script are not among them.
fn foreign_protocols() -> Result<&'static [String]> {
    static FOREIGN: OnceLock<Vec<String>> = OnceLock::new();
    if let Some(known) = FOREIGN.get() {
        return Ok(known);
    }
    let output = Command::new("tshark").args(["-G", "protocols"]).output();
    let output = output.context("cannot run tshark: is it installed?")?;
    // Name, short name and filter name; those that begin with an underscore are Wireshark's own parts.
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter_map(|line| line.split('\t').nth(2));
    let foreign: Vec<String> =
        names.filter(|name| !PROTOCOLS.contains(name) && !name.starts_with('_')).map(str::to_owned).collect();
    ensure!(
        !foreign.is_empty(),
        "tshark names no protocols: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(FOREIGN.get_or_init(|| foreign))
}

/// Runs tshark with a dissector of ours on a capture. Returns a line for each frame that matches `options`, in which tabs separate
/// the fields, and bars the values of one field. An error when the dissector complains, or the capture ends within a frame, unless
/// it `may_be_cut`.
fn dissect(path: &Path, script: &str, options: &[&str], fields: &[&str], may_be_cut: bool) -> Result<String> {
    let mut command = tshark(path)?;
    command.args(["-X", &format!("lua_script:{DOCS}/{script}")]).args(options);
    command.args(["-T", "fields", "-E", "separator=/t", "-E", "occurrence=a", "-E", "aggregator=|"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().context("cannot run tshark: is it installed?")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let was_cut = may_be_cut && errors.contains("cut short in the middle of a packet");
    let was_read = output.status.success() || was_cut;
    ensure!(was_read && !errors.contains(script), "tshark: {}", errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where the dissectors are.
const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");

/// For captures in which checksums were left to the kernel: they are partial, and Wireshark would not reassemble their segments.
const ANY_CHECKSUM: [&str; 2] = ["-o", "tcp.check_checksum:FALSE"];

/// Runs tshark with the dissector of SDP on a capture: the number of messages of each identifier. An error when the dissector
/// complains, or has not found a message between two others of a direction.
///
/// The capture of a killed program may end within a frame. tshark reads all frames before and says so, which is no complaint.
pub fn sdp_messages(path: &Path) -> Result<BTreeMap<u8, usize>> {
    let fields =
        ["tcp.stream", "tcp.srcport", "sdpiwarp.mid", "sdpiwarp.mseq", "sdpiwarp.wrong", "_ws.malformed"];
    let options = [&ANY_CHECKSUM[..], &["-Y", "sdpiwarp"]].concat();
    let frames = dissect(path, "sdp.lua", &options, &fields, true)?;
    let (mut messages, mut last) = (BTreeMap::new(), BTreeMap::new());
    for line in frames.lines() {
        let mut columns = line.splitn(5, '\t');
        let mut next = || columns.next().unwrap_or_default();
        let (stream, port, kinds, numbers, complaint) = (next(), next(), next(), next(), next());
        ensure!(complaint.trim().is_empty(), "message {kinds}: {complaint}");
        // HelloAck is number 0, and the first message of the other direction is number 1.
        let last: &mut u32 = last.entry((stream.to_owned(), port.to_owned())).or_default();
        for (kind, number) in kinds.split('|').zip(numbers.split('|')) {
            let kind = u8::from_str_radix(kind.trim_start_matches("0x"), 16)?;
            let number: u32 = number.parse()?;
            ensure!(number <= *last + 1, "message {number} of stream {stream} follows message {last}");
            *last = number.max(*last);
            *messages.entry(kind).or_default() += 1;
        }
    }
    Ok(messages)
}

/// The results of the dissector of Sends with immediate data for a capture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImmediateSends {
    /// Frames with an offer.
    pub offered: usize,
    /// Frames with an agreement.
    pub agreed: usize,
    /// Data and solicited event of each message, in order.
    pub messages: Vec<(u32, bool)>,
}

/// Runs tshark with the dissector of Sends with immediate data on a capture without markers.
pub fn immediate_sends(path: &Path) -> Result<ImmediateSends> {
    let fields = ["sendimm.offered", "sendimm.agreed", "sendimm.data", "sendimm.solicited", "sendimm.last"];
    let options = [&ANY_CHECKSUM[..], &["-Y", "sendimm"]].concat();
    let frames = dissect(path, "send-immediate.lua", &options, &fields, false)?;
    let mut found = ImmediateSends::default();
    for line in frames.lines() {
        let mut columns = line.split('\t');
        let [offered, agreed, data, solicited, last] = [(); 5].map(|()| columns.next().unwrap_or_default());
        found.offered += usize::from(!offered.is_empty());
        found.agreed += usize::from(!agreed.is_empty());
        for ((data, solicited), last) in data.split('|').zip(solicited.split('|')).zip(last.split('|')) {
            if is_true(last) {
                let data = u32::from_str_radix(data.trim_start_matches("0x"), 16)?;
                found.messages.push((data, is_true(solicited)));
            }
        }
    }
    Ok(found)
}

/// The results of RDMA/TCP's dissector for a capture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Segments {
    /// Frames with TCP payload.
    pub payloads: usize,
    /// Frames in which segments end.
    pub frames: usize,
    /// Segments whose CRC is correct.
    pub good_crcs: usize,
    /// Whole messages by type: Send, RDMA Write, Read Request, Read Response.
    pub messages: [usize; 4],
    /// Sends of control data alone by code: Connect is 1, Accept 2.
    pub controls: BTreeMap<u8, usize>,
    /// Frame number and text.
    pub complaints: Vec<String>,
}

/// Runs tshark with the dissector of RDMA/TCP on a capture.
pub fn segments(path: &Path) -> Result<Segments> {
    let fields = [
        "frame.number",
        "tcp.len",
        "rdmatcp.type",
        "rdmatcp.end",
        "rdmatcp.crc_good",
        "rdmatcp.control",
        "_ws.malformed",
        "_ws.expert.severity",
        "_ws.expert.message",
    ];
    let frames = dissect(path, "rdma-tcp.lua", &[], &fields, false)?;
    let mut segments = Segments::default();
    for line in frames.lines() {
        segments.read(line);
    }
    Ok(segments)
}

impl Segments {
    /// Parses one line of tshark's output: one frame.
    fn read(&mut self, line: &str) {
        let mut columns = line.split('\t');
        let mut next = || columns.next().unwrap_or_default();
        let (number, payload) = (next(), next());
        let [types, ends, crcs, controls, malformed, severities, messages] =
            [next(), next(), next(), next(), next(), next(), next()].map(|text| text.split('|'));
        self.payloads += usize::from(payload != "0");
        let mut found = false;
        for (kind, end) in types.zip(ends).filter(|(kind, _)| !kind.is_empty()) {
            found = true;
            if is_true(end)
                && let Some(count) = kind.parse::<usize>().ok().and_then(|kind| self.messages.get_mut(kind))
            {
                *count += 1;
            }
        }
        self.frames += usize::from(found);
        for crc in crcs.filter(|crc| !crc.is_empty()) {
            if is_true(crc) {
                self.good_crcs += 1;
            } else {
                self.complaints.push(format!("frame {number}: the CRC is wrong"));
            }
        }
        for code in controls.filter_map(|code| code.parse().ok()) {
            *self.controls.entry(code).or_default() += 1;
        }
        if malformed.into_iter().any(|text| !text.is_empty()) {
            self.complaints.push(format!("frame {number}: malformed"));
        }
        if severities.into_iter().any(|s| s.parse::<u32>().is_ok_and(|severity| severity >= WARNING)) {
            for message in messages.filter(|message| is_severe(message) && *message != CHECKSUM_OF_ONES) {
                self.complaints.push(format!("frame {number}: {message}"));
            }
        }
    }
}

/// Whether a field of tshark's is true: booleans are numbers, or since 4.2 words.
fn is_true(field: &str) -> bool {
    matches!(field, "1" | "True")
}

impl Verdict {
    /// Adds the verdict on another part of the same capture, which has its own frame numbers.
    fn add(&mut self, other: Self) {
        let Self { frames, tcp_frames, mpa_frames, good_crcs, quirks, complaints } = other;
        self.frames += frames;
        self.tcp_frames += tcp_frames;
        self.mpa_frames += mpa_frames;
        self.good_crcs += good_crcs;
        for (words, times) in quirks {
            *self.quirks.entry(words).or_default() += times;
        }
        self.complaints.extend(complaints);
    }

    /// Parses one line of tshark's output: one frame.
    fn read(&mut self, line: &str) {
        let columns: Vec<&str> = line.split('\t').collect();
        let column = |index: usize| columns.get(index).copied().unwrap_or_default();
        let number = column(0);
        self.frames += 1;
        self.tcp_frames += usize::from(column(1).split(':').any(|p| p == "tcp"));
        self.mpa_frames += usize::from(column(1).split(':').any(|p| p == "iwarp_mpa"));
        self.good_crcs += column(7).split('|').filter(|c| !c.is_empty()).count();
        if !column(4).is_empty() {
            self.complaints.push(format!("frame {number}: malformed: {}", column(3)));
        }
        // 0 is "bad", 1 "good", 2 "unverified".
        for (index, what) in [(5, "TCP"), (6, "IP")] {
            let known = column(3).contains(CHECKSUM_OF_ONES);
            if !known && column(index).split('|').any(|status| status == "0") {
                self.complaints.push(format!("frame {number}: bad {what} checksum"));
            }
        }
        let severe = column(2).split('|').any(|s| s.parse::<u32>().is_ok_and(|severity| severity >= WARNING));
        if severe {
            self.weigh(number, column(3));
        }
    }

    fn weigh(&mut self, number: &str, messages: &str) {
        for message in messages.split('|') {
            if let Some((words, _)) = QUIRKS.iter().find(|(words, _)| message.contains(words)) {
                *self.quirks.entry((*words).to_owned()).or_default() += 1;
            } else if is_severe(message) {
                self.complaints.push(format!("frame {number}: {message}"));
            }
        }
    }
}

/// A frame's severities and messages are separate lists; messages of lower severities are recognised by their
/// text.
fn is_severe(message: &str) -> bool {
    const HARMLESS: [&str; 15] = [
        "Connection establish",
        "Connection finish",
        "This frame initiates the connection closing",
        "This frame undergoes the connection closing",
        "Connection reset (RST)",
        "TCP keep-alive",
        "TCP window update",
        "TCP window specified by the receiver is now completely full",
        "Zero Window",
        // The stack's own tests cover TCP's reaction to loss, which also occurs on a busy machine.
        "D-SACK Sequence",
        "retransmission",
        "Duplicate ACK",
        "Previous segment(s) not captured",
        "out-of-order segment",
        "ACKed segment that wasn't captured",
    ];
    !message.is_empty() && !HARMLESS.iter().any(|words| message.contains(words))
}

/// Frames with an FPDU whose CRC the dissector reports as bad, which is visible only in its text output.
fn bad_crcs(path: &Path) -> Result<Vec<String>> {
    let mut command = tshark(path)?;
    command.args(["-Y", "iwarp_mpa.crc_check", "-V", "-O", "iwarp_mpa"]);
    let output = command.output().context("cannot run tshark: is it installed?")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut frame = "";
    let mut bad = Vec::new();
    for line in text.lines() {
        if line.starts_with("Frame ") {
            frame = line.split(':').next().unwrap_or_default();
        } else if line.contains("Bad CRC32") {
            bad.push(format!("{frame}: {}", line.trim()));
        }
    }
    Ok(bad)
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;
    use crate::capture::tests::record;

    fn read(severity: &str, message: &str, checksum: &str) -> Verdict {
        let mut verdict = Verdict::default();
        verdict.read(&format!("7\teth:ip:tcp\t{severity}\t{message}\t\t{checksum}\t1\t\t"));
        verdict
    }

    #[test]
    fn complaints_count_unless_they_are_quirks_or_of_low_severity() {
        assert_eq!(read("8388608", "Bad checksum [should be 0x1234]", "0").complaints.len(), 2);
        assert_eq!(read("6291456", "Something new", "1").complaints, ["frame 7: Something new"]);
        assert_eq!(read("2097152", "Connection establish request (SYN)", "1").complaints.len(), 0);
        let ones = read("8388608", "TCP Checksum 0xffff instead of 0x0000 (see RFC 1624)", "0");
        assert!(ones.complaints.is_empty() && ones.quirks.len() == 1, "{ones:?}");
    }

    /// A client's port may be one that Wireshark knows by another name; 57000 is that of IRC.
    #[test]
    fn ports_of_other_protocols_do_not_change_the_verdict() {
        let path = std::env::temp_dir().join(format!("ports-{}.pcapng", std::process::id()));
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .tcp(57000, 18515, 1, 1000)
            .write(&mut frame, b"NICK \0somebody\0else\r\nUSER a\0b c d\r\n")
            .unwrap();
        record(&path, &[frame]);
        let verdict = judge(&path, false);
        fs::remove_file(&path).unwrap();
        let verdict = verdict.unwrap();
        assert_eq!((verdict.tcp_frames, verdict.complaints), (1, vec![]));
    }
}
