//! DDP segments and RDMAP messages of one direction, and which of them the peer's Terminate blames.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;
use xwarp_rnic::{
    TerminateHeader, Versions,
    ddp::{Header, Malformed, RawHeader},
    rdmap::{AtomicOperation, AtomicRequest, AtomicResponse, Control, MessageType, ReadRequest},
};
use xwarp_tcp::ulp::Ulpdu;

use super::event::{Event, Message, count};

/// Number of messages that are kept for a Terminate of the peer.
const MAX_REMEMBERED: usize = 64;
/// Bytes of a ULPDU that are examined: the longest header and the longest Terminate or Atomic Request after it.
const LOOKED_AT: usize = 128;

/// The messages of one direction.
#[derive(Debug, Default)]
pub struct Messages {
    open: Option<Open>,
    recent: VecDeque<Remembered>,
    totals: BTreeMap<&'static str, Total>,
}

/// Number and payload bytes of the messages of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Total {
    /// Messages that are in the capture as a whole or in part.
    pub messages: u64,
    /// Their payload.
    pub bytes: u64,
}

#[derive(Debug)]
struct Open {
    message: Message,
    kind: MessageType,
    frame: u64,
}

#[derive(Debug)]
struct Remembered {
    name: &'static str,
    bytes: u64,
    queue: Option<(u32, u32)>,
    target: Option<(u32, u64)>,
    frame: u64,
}

impl Messages {
    /// Bytes are missing: the current message is incomplete.
    pub fn cut(&mut self) {
        if let Some(open) = &mut self.open {
            open.message.partial = true;
        }
    }

    /// Totals by kind of message.
    pub fn totals(&self) -> &BTreeMap<&'static str, Total> {
        &self.totals
    }

    /// Reads a ULPDU of `whole` bytes, of which the capture has at least the first. `peer` has sent the message that a Terminate
    /// blames.
    pub fn read(
        &mut self,
        (ulpdu, whole): (&Ulpdu<'_>, usize),
        versions: Versions,
        frame: u64,
        peer: &Self,
        emit: &mut dyn FnMut(Event),
    ) {
        if whole == 0 {
            return emit(Event::EmptyFpdu);
        }
        let mut bytes = [0; LOOKED_AT];
        let len = ulpdu.peek(&mut bytes);
        let bytes = bytes.get(..len).unwrap_or_default();
        let header = match Header::parse(bytes, versions) {
            Ok(header) => header,
            // The capture does not have the header.
            Err(Malformed::Truncated) if ulpdu.len() < whole => return self.cut(),
            Err(Malformed::Truncated) => {
                return emit(Event::BadFpdu { error: "too short for a DDP header".to_owned() });
            }
            Err(Malformed::Version(error, _)) => return emit(Event::BadFpdu { error: error.to_string() }),
        };
        let kind = match Control::parse(header.control(), versions) {
            Ok(Control { message }) => message,
            Err(error) => return emit(Event::BadFpdu { error: error.0.to_string() }),
        };
        let payload = bytes.get(header.bytes()..).unwrap_or_default();
        let payload_bytes = whole.saturating_sub(header.bytes()) as u64;
        let captured_bytes = ulpdu.len().saturating_sub(header.bytes()) as u64;
        if kind == MessageType::Terminate
            && let Some(terminate) = TerminateHeader::parse(payload)
        {
            self.count("Terminate", payload_bytes);
            return emit(peer.explain_terminate(&terminate));
        }
        let open = match self.open.take().filter(|open| continues(open, kind, &header)) {
            Some(open) => open,
            None => begin(kind, &header, payload, frame),
        };
        let mut open =
            Open { message: Message { segments: open.message.segments + 1, ..open.message }, ..open };
        open.message.bytes += payload_bytes;
        open.message.missing_bytes += payload_bytes - captured_bytes;
        if header.last() { self.finish(open, emit) } else { self.open = Some(open) }
    }

    fn finish(&mut self, open: Open, emit: &mut dyn FnMut(Event)) {
        let Open { message, frame, .. } = open;
        self.count(message.kind, message.bytes);
        if self.recent.len() == MAX_REMEMBERED {
            self.recent.pop_front();
        }
        let Message { kind: name, bytes, queue, target, .. } = message;
        self.recent.push_back(Remembered { name, bytes, queue, target, frame });
        emit(Event::Message(message));
    }

    fn count(&mut self, name: &'static str, bytes: u64) {
        let total = self.totals.entry(name).or_default();
        total.messages += 1;
        total.bytes += bytes;
    }

    /// Explains a Terminate about a segment of these messages.
    fn explain_terminate(&self, terminate: &TerminateHeader) -> Event {
        let (layer, error_type, code) = terminate.numbers();
        let blames = terminate.ddp_header.as_ref().and_then(RawHeader::header).map(|header| {
            let text = self.blamed(&header);
            match &terminate.rdma_header {
                Some(request) => format!("{text} ({})", read_request(request)),
                None => text,
            }
        });
        Event::Terminate { layer, error_type, code, meaning: terminate.to_string(), blames }
    }

    fn blamed(&self, header: &Header) -> String {
        let open = self.open.as_ref().map(|open| Remembered {
            name: open.message.kind,
            bytes: open.message.bytes,
            queue: open.message.queue,
            target: open.message.target,
            frame: open.frame,
        });
        let names = |it: &&Remembered| match *header {
            Header::Untagged(untagged) => it.queue == Some((untagged.queue, untagged.msn.value())),
            Header::Tagged(tagged) => it.target.is_some_and(|(stag, to)| {
                stag == tagged.stag.value() && (0..it.bytes.max(1)).contains(&tagged.to.wrapping_sub(to))
            }),
        };
        if let Some(found) = open.iter().chain(self.recent.iter().rev()).find(names) {
            return format!(
                "the peer's {} of {}, which begins in frame {}, at {}",
                found.name,
                count(found.bytes, "byte"),
                found.frame,
                place(header)
            );
        }
        let kind = Control::parse(header.control(), Versions::default());
        let name = kind.map_or("message", |control| name(control.message));
        format!("a {name} that is not among the last {MAX_REMEMBERED} messages, at {}", place(header))
    }
}

fn place(header: &Header) -> String {
    match header {
        Header::Untagged(u) => format!("queue {} MSN {} offset {}", u.queue, u.msn.value(), u.mo),
        Header::Tagged(t) => format!("STag {:#010x} offset {:#x}", t.stag.value(), t.to),
    }
}

/// Whether a segment belongs to the current message.
fn continues(open: &Open, kind: MessageType, header: &Header) -> bool {
    open.kind == kind
        && match header {
            Header::Untagged(u) => open.message.queue == Some((u.queue, u.msn.value())),
            Header::Tagged(t) => open.message.target.is_some_and(|(stag, _)| stag == t.stag.value()),
        }
}

fn begin(kind: MessageType, header: &Header, payload: &[u8], frame: u64) -> Open {
    let (queue, target, partial) = match header {
        Header::Untagged(u) => (Some((u.queue, u.msn.value())), None, u.mo != 0),
        Header::Tagged(t) => (None, Some((t.stag.value(), t.to)), false),
    };
    let detail = match kind {
        MessageType::ReadRequest => ReadRequest::parse(payload).as_ref().map(read_request),
        MessageType::AtomicRequest => AtomicRequest::parse(payload).flatten().map(|request| {
            let operation = match request.operation {
                AtomicOperation::FetchAdd { .. } => "Fetch and Add",
                AtomicOperation::CompareSwap { .. } => "Compare and Swap",
            };
            format!("{operation} at STag {:#010x} offset {:#x}", request.stag.value(), request.to)
        }),
        MessageType::AtomicResponse => {
            AtomicResponse::parse(payload).map(|response| format!("former value {:#x}", response.original))
        }
        _ => None,
    };
    let immediate = match (kind, header) {
        (MessageType::SendImmediate { .. }, Header::Untagged(u)) => Some(u.word),
        _ => None,
    };
    let (bytes, segments, missing_bytes) = (0, 0, 0);
    let name = name(kind);
    let message =
        Message { kind: name, bytes, segments, queue, target, immediate, detail, partial, missing_bytes };
    Open { message, kind, frame }
}

fn read_request(request: &ReadRequest) -> String {
    let ReadRequest { sink_stag, sink_to, len, source_stag, source_to } = request;
    format!(
        "{} from STag {:#010x} offset {source_to:#x} to STag {:#010x} offset {sink_to:#x}",
        count(u64::from(*len), "byte"),
        source_stag.value(),
        sink_stag.value()
    )
}

fn name(kind: MessageType) -> &'static str {
    match kind {
        MessageType::Write => "RDMA Write",
        MessageType::ReadRequest => "RDMA Read Request",
        MessageType::ReadResponse => "RDMA Read Response",
        MessageType::Send { invalidate: false, solicited: false } => "Send",
        MessageType::Send { invalidate: false, solicited: true } => "Send with Solicited Event",
        MessageType::Send { invalidate: true, solicited: false } => "Send with Invalidate",
        MessageType::Send { invalidate: true, solicited: true } => "Send with Invalidate and Solicited Event",
        MessageType::Terminate => "Terminate",
        MessageType::Immediate { solicited: false } => "Immediate Data",
        MessageType::Immediate { solicited: true } => "Immediate Data with Solicited Event",
        MessageType::AtomicRequest => "Atomic Request",
        MessageType::AtomicResponse => "Atomic Response",
        MessageType::SendImmediate { solicited: false } => "Send with Immediate Data",
        MessageType::SendImmediate { solicited: true } => "Send with Immediate Data and Solicited Event",
    }
}

/// Whether bytes at a guessed place are a DDP segment: the versions, and a queue or tag that fits the opcode (RFC 5040
/// figure 4).
pub fn is_plausible(ulpdu: &Ulpdu<'_>, versions: Versions) -> bool {
    let mut bytes = [0; LOOKED_AT];
    let len = ulpdu.peek(&mut bytes);
    let Some(Ok(header)) = bytes.get(..len).map(|bytes| Header::parse(bytes, versions)) else { return false };
    let Ok(Control { message }) = Control::parse(header.control(), versions) else { return false };
    match header {
        Header::Tagged(_) => matches!(message, MessageType::Write | MessageType::ReadResponse),
        Header::Untagged(u) => {
            let queue = match message {
                MessageType::Write | MessageType::ReadResponse => return false,
                MessageType::Send { .. }
                | MessageType::Immediate { .. }
                | MessageType::SendImmediate { .. } => 0,
                MessageType::ReadRequest | MessageType::AtomicRequest => 1,
                MessageType::Terminate => 2,
                MessageType::AtomicResponse => 3,
            };
            u.queue == queue
        }
    }
}
