//! Events of a connection, as text and as JSON.

use std::{fmt, time::Duration};

use serde::Serialize;
use xwarp_tcp::mpa::{Enhanced, MpaReply, MpaRequest, RtrOptions};

/// An action of one end, or a fact about its direction.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A SYN, or the SYN-ACK that answers it.
    Syn { answer: bool, mss: Option<u16>, window_scale: Option<u8>, sack_permitted: bool, timestamps: bool },
    /// The handshake is complete.
    Connected { handshake_ms: Option<f64> },
    /// The capture starts in the middle of the connection.
    Middle,
    /// The initiator's MPA start-up frame.
    MpaRequest(StartUp),
    /// The responder's MPA start-up frame.
    MpaReply { rejected: bool, start_up: StartUp },
    /// The result of both start-up frames. The markers are those in FPDUs that this end receives, and sends.
    Agreed {
        revision: u8,
        crc: bool,
        markers_received: bool,
        markers_sent: bool,
        warning: Option<&'static str>,
    },
    /// FPDUs were found in the middle of the stream.
    Found { markers: bool, crc: bool },
    /// A whole RDMAP message, or the part of it that the capture has.
    Message(Message),
    /// An FPDU without ULPDU: the ready-to-receive message of peer-to-peer mode.
    EmptyFpdu,
    /// A Terminate message.
    Terminate { layer: u8, error_type: u8, code: u8, meaning: String, blames: Option<String> },
    /// An invalid FPDU.
    BadFpdu { error: String },
    /// A retransmission of bytes that are in the capture already.
    Retransmission { bytes: u64 },
    /// Bytes that fill a gap so late that they were probably retransmitted; the first copy is not in the capture.
    LateSegment { bytes: u64, after_ms: f64 },
    /// Bytes that overtook earlier ones.
    OutOfOrder { gap_bytes: u64 },
    /// Bytes that are missing in the capture, although the receiver acknowledged them.
    NotCaptured { bytes: u64 },
    /// A keepalive probe.
    KeepaliveProbe,
    /// The receive window closes, or opens again.
    Window { closed: bool },
    /// The end of this direction.
    Fin,
    /// The abrupt end of the connection.
    Reset,
}

/// The contents of a start-up frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StartUp {
    pub revision: u8,
    pub crc: bool,
    pub markers: bool,
    pub ird: Option<u16>,
    pub ord: Option<u16>,
    pub ready_to_receive: Option<String>,
    /// Request: an offer of Sends with immediate data. Reply: the agreement to it.
    pub send_immediate: bool,
    pub private_data_bytes: usize,
}

/// An RDMAP message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// The message type.
    pub kind: &'static str,
    /// Payload bytes of the segments.
    pub bytes: u64,
    /// DDP segments.
    pub segments: u64,
    /// Queue number and message sequence number of an untagged message.
    pub queue: Option<(u32, u32)>,
    /// STag and tagged offset of a tagged message's first byte.
    pub target: Option<(u32, u64)>,
    /// The immediate data of a Send.
    pub immediate: Option<u32>,
    /// The protocol fields of the message, for kinds that have them.
    pub detail: Option<String>,
    /// Whether its first or last segments are missing in the capture.
    pub partial: bool,
    /// Payload bytes that a snap length has cut off; they are counted in `bytes`.
    pub missing_bytes: u64,
}

impl Event {
    /// Consecutive events with equal keys are shown as one. `None`: always shown.
    pub fn key(&self) -> Option<(&'static str, u64)> {
        match self {
            Self::Message(message) if !message.partial => Some((message.kind, message.bytes)),
            Self::Retransmission { .. } => Some(("retransmission", 0)),
            Self::LateSegment { .. } => Some(("late segment", 0)),
            Self::OutOfOrder { .. } => Some(("out of order", 0)),
            Self::NotCaptured { .. } => Some(("not captured", 0)),
            Self::KeepaliveProbe => Some(("keepalive", 0)),
            Self::Window { .. } => Some(("window", 0)),
            _ => None,
        }
    }

    /// Whether the event slowed or ended the connection otherwise than by intent.
    pub fn is_trouble(&self) -> bool {
        match self {
            Self::Terminate { .. }
            | Self::BadFpdu { .. }
            | Self::Retransmission { .. }
            | Self::LateSegment { .. }
            | Self::OutOfOrder { .. }
            | Self::NotCaptured { .. }
            | Self::Window { closed: true }
            | Self::MpaReply { rejected: true, .. }
            | Self::Reset => true,
            Self::Agreed { warning, .. } => warning.is_some(),
            _ => false,
        }
    }
}

impl StartUp {
    fn new(
        revision: u8,
        [crc, markers, send_immediate]: [bool; 3],
        enhanced: Option<Enhanced>,
        private_data: &[u8],
    ) -> Self {
        let names = |rtr: RtrOptions| {
            let kinds = [(rtr.send, "Send"), (rtr.write, "RDMA Write"), (rtr.read, "RDMA Read")];
            let named: Vec<_> = kinds.iter().filter(|(has, _)| *has).map(|(_, name)| *name).collect();
            if named.is_empty() { "empty FPDU".to_owned() } else { named.join(" or ") }
        };
        Self {
            revision,
            crc,
            markers,
            ird: enhanced.map(|e| e.ird),
            ord: enhanced.map(|e| e.ord),
            ready_to_receive: enhanced.and_then(|e| e.peer_to_peer).map(names),
            send_immediate,
            private_data_bytes: private_data.len(),
        }
    }
}

impl From<&MpaRequest> for StartUp {
    fn from(frame: &MpaRequest) -> Self {
        let flags = [frame.crc, frame.markers, frame.send_immediate];
        Self::new(frame.revision, flags, frame.enhanced, &frame.private_data)
    }
}

impl From<&MpaReply> for StartUp {
    fn from(frame: &MpaReply) -> Self {
        let flags = [frame.crc, frame.markers, frame.send_immediate];
        Self::new(frame.revision, flags, frame.enhanced, &frame.private_data)
    }
}

impl fmt::Display for StartUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let asks = |asked: bool, what: &str| format!("{} {what}", if asked { "wants" } else { "no" });
        write!(
            f,
            "revision {}, {}, {}",
            self.revision,
            asks(self.crc, "CRC"),
            asks(self.markers, "markers")
        )?;
        if let (Some(ird), Some(ord)) = (self.ird, self.ord) {
            write!(f, ", IRD {ird}, ORD {ord}")?;
        }
        if let Some(kinds) = &self.ready_to_receive {
            write!(f, ", peer-to-peer mode with {kinds}")?;
        }
        if self.send_immediate {
            write!(f, ", Sends with immediate data")?;
        }
        match self.private_data_bytes {
            0 => write!(f, ", no private data"),
            bytes => write!(f, ", {} of private data", count(bytes as u64, "byte")),
        }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, bytes, segments, queue, target, immediate, detail, partial, missing_bytes } = self;
        write!(f, "{kind}")?;
        match detail {
            Some(detail) => write!(f, ": {detail}")?,
            None => write!(f, " of {}", count(*bytes, "byte"))?,
        }
        if let Some(data) = immediate {
            write!(f, ", immediate data {data:#010x}")?;
        }
        if let Some((_, msn)) = queue {
            write!(f, ", MSN {msn}")?;
        }
        if let Some((stag, to)) = target {
            write!(f, " to STag {stag:#010x} offset {to:#x}")?;
        }
        if *segments > 1 {
            write!(f, ", in {segments} segments")?;
        }
        if *partial {
            write!(f, " (only a part of it is in the capture)")?;
        }
        if *missing_bytes > 0 {
            write!(f, " (payload missing in the capture: {missing_bytes})")?;
        }
        Ok(())
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syn { answer, mss, window_scale, sack_permitted, timestamps } => {
                write!(f, "{}", if *answer { "SYN-ACK" } else { "SYN" })?;
                match mss {
                    Some(mss) => write!(f, ", MSS {mss}")?,
                    None => write!(f, ", no MSS")?,
                }
                match window_scale {
                    Some(scale) => write!(f, ", window scale {scale}")?,
                    None => write!(f, ", no window scale")?,
                }
                let offers = |has: bool, what: &str| format!(", {}{what}", if has { "" } else { "no " });
                write!(f, "{}{}", offers(*sack_permitted, "SACK"), offers(*timestamps, "timestamps"))
            }
            Self::Connected { handshake_ms: Some(ms) } => {
                write!(f, "connected, the handshake took {ms:.3} ms")
            }
            Self::Connected { handshake_ms: None } => write!(f, "connected"),
            Self::Middle => write!(f, "the capture begins in the middle of this connection"),
            Self::MpaRequest(start_up) => write!(f, "MPA Request: {start_up}"),
            Self::MpaReply { rejected: false, start_up } => write!(f, "MPA Reply: {start_up}"),
            Self::MpaReply { rejected: true, start_up } => {
                write!(f, "MPA Reply that REJECTS the connection: {start_up}")
            }
            Self::Agreed { revision, crc, markers_received, markers_sent, warning } => {
                let markers = match (markers_received, markers_sent) {
                    (true, true) => "markers in both directions",
                    (true, false) => "markers only in FPDUs that this end receives",
                    (false, true) => "markers only in FPDUs that this end sends",
                    (false, false) => "no markers",
                };
                let crc = if *crc { "CRC" } else { "no CRC" };
                write!(f, "agreed: MPA revision {revision}, {crc}, {markers}")?;
                warning.map_or(Ok(()), |warning| write!(f, "; {warning}"))
            }
            Self::Found { markers, crc } => write!(
                f,
                "found FPDUs {} markers and {} CRC in the middle of the stream",
                if *markers { "with" } else { "without" },
                if *crc { "with" } else { "without" }
            ),
            Self::Message(message) => write!(f, "{message}"),
            Self::EmptyFpdu => write!(f, "empty FPDU (ready to receive)"),
            Self::Terminate { meaning, blames, .. } => {
                write!(f, "TERMINATE: {meaning}")?;
                blames.as_ref().map_or(Ok(()), |blames| write!(f, "; it blames {blames}"))
            }
            Self::BadFpdu { error } => write!(f, "BAD FPDU: {error}"),
            Self::Retransmission { bytes } => write!(f, "retransmission of {}", count(*bytes, "byte")),
            Self::LateSegment { bytes, after_ms } => write!(
                f,
                "{} that were missing, after {after_ms:.3} ms (a retransmission; the first copy is not in the capture)",
                count(*bytes, "byte")
            ),
            Self::OutOfOrder { gap_bytes } => {
                write!(f, "out of order: {} before this segment are missing", count(*gap_bytes, "byte"))
            }
            Self::NotCaptured { bytes } => {
                write!(f, "the capture lacks {} that arrived", count(*bytes, "byte"))
            }
            Self::KeepaliveProbe => write!(f, "keepalive or window probe"),
            Self::Window { closed: true } => write!(f, "receive window closed"),
            Self::Window { closed: false } => write!(f, "receive window open again"),
            Self::Fin => write!(f, "FIN: no more data from this end"),
            Self::Reset => write!(f, "RESET"),
        }
    }
}

/// A number with its noun.
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The time of an event in a column.
pub fn at(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| format!("{:>12}", "-"), |seconds| format!("{seconds:>12.6}"))
}

/// A time as the figures have it.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
