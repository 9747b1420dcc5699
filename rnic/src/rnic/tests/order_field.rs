//! The order field of RDMA/TCP through a queue pair, as a model: two groups of messages, segments in any arrival order, and
//! numbers that wrap. The peer's segments are built byte by byte; the oracle evaluates the rule of section 3.4 over the set of
//! processed messages.

use proptest::prelude::*;
use xwarp_tcp::{
    framing,
    rdma_tcp::{self, ConnectionId, MessageNumber},
};

use super::*;

const ID: u64 = 0x0123_4567_89ab_cdef;
/// Bytes of a segment's payload, and of memory for a message.
const PIECE: usize = 4;
const PLACE: usize = 16;
/// Most messages of the peer, and Reads of this end.
const MOST: usize = 40;
const READS: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Send,
    Write,
    Read,
}

/// A message of the peer: its type, its order field, and its segments.
#[derive(Debug, Clone, Copy)]
struct Message {
    what: What,
    order: u16,
    segments: usize,
}

fn message() -> impl Strategy<Value = Message> {
    let what = prop_oneof![Just(What::Send), Just(What::Write), Just(What::Read)];
    let order = prop_oneof![Just(0u16), Just(1), Just(2), Just(u16::MAX)];
    (what, order, 1usize..=3).prop_map(|(what, order, segments)| Message {
        what,
        order,
        segments: if what == What::Read { 1 } else { segments },
    })
}

/// A segment without pad and CRC: `fields` follow the Message Number, order and CLEN.
fn segment(flags: u8, number: u32, order: u16, fields: &[u32], payload: &[u8]) -> Vec<u8> {
    let len = (20 + 4 * fields.len() + payload.len()) as u16;
    let mut bytes = [&[1, flags][..], &len.to_be_bytes(), &ID.to_be_bytes(), &number.to_be_bytes()].concat();
    bytes.extend(order.to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(fields.iter().flat_map(|field| field.to_be_bytes()));
    bytes.extend(payload);
    bytes
}

/// The bits B and E of segment `at` of `count`.
fn ends(at: usize, count: usize) -> u8 {
    u8::from(at == 0) << 3 | u8::from(at + 1 == count) << 2
}

/// The segments of message `at`, with its number.
fn segments_of(at: usize, message: Message, number: u32, key: u32) -> Vec<Vec<u8>> {
    let Message { what, order, segments } = message;
    let payload = [at as u8 + 1; PIECE];
    let one = |part: usize| {
        let offset = (part * PIECE) as u32;
        let place = (at * PLACE) as u32 + offset;
        let flags = ends(part, segments);
        match what {
            What::Send => segment(flags, number, order, &[offset], &payload),
            What::Write => {
                segment(flags | 1, number, order, &[key, place, (segments * PIECE) as u32], &payload)
            }
            What::Read => segment(flags | 2, number, order, &[key, place, PIECE as u32], &[]),
        }
    };
    (0..segments).map(one).collect()
}

/// A segment in the peer's stream, and the message of group 1 that it belongs to.
type Sent = (Vec<u8>, Option<usize>);

/// This end with the peer's stream.
struct Model {
    end: End,
    target: Memory,
    inbox: Memory,
    sink: Memory,
    messages: Vec<Message>,
    stream: Vec<Sent>,
    arrived: Vec<bool>,
    placed: Vec<Option<Placed>>,
    cursor: usize,
    /// Messages whose Send was completed, or whose Read Request was answered.
    executed: Vec<bool>,
    /// Numbers of the first message of the peer.
    start: u32,
    /// Our Reads that have completed.
    reads: Vec<u64>,
}

impl Model {
    /// The peer sends `messages`, and a response of two segments to each of our Reads; `turns` chooses the group of
    /// each segment.
    fn new(start: u32, messages: Vec<Message>, turns: &[bool]) -> Self {
        let mut end = End::new(|_, attributes| {
            let options = QueuePairOptions { any_receive: true, ..attributes.options };
            QpAttributes { options, ..attributes }
        });
        let (next_sent, next_received) = (MessageNumber(u32::MAX - 2), MessageNumber(start));
        let connection = ConnectionId(ID);
        let (ird, ord, peer_ird, peer_ord) = (64, 64, 64, 64);
        let agreed = rdma_tcp::Agreed { ird, ord, peer_ird, peer_ord, connection, next_sent, next_received };
        let agreed = framing::Agreed::RdmaTcp(agreed);
        end.rnic.event(CONN, Event::Established { path: path(), agreed, private_data: Vec::new() });
        let [(key, target), (inbox_key, inbox), (sink_key, sink)] =
            [MOST * PLACE, MOST * PLACE, READS * PLACE].map(|len| {
                let (key, memory) = end.region(len, 0, ALL);
                memory.write(0, &vec![0; len]).unwrap();
                (key, memory)
            });
        for at in 0..MOST {
            let offset = (at * PLACE) as u64;
            end.receive(at as u64, &[Sge { key: inbox_key, offset, len: PLACE as u32 }]);
        }
        let mut responses = Vec::new();
        for read in 0..READS {
            let offset = (read * PLACE) as u64;
            let sink = [Sge { key: sink_key, offset, len: 2 * PIECE as u32 }];
            end.post(1000 + read as u64, read_from(STag::new(7), 0), &sink);
            let request = end.pull().expect("a Read Request");
            let number = u32::from_be_bytes(request[12..16].try_into().unwrap());
            for part in 0..2 {
                let offset = (part * PIECE) as u32;
                let response =
                    segment(ends(part, 2) | 3, number, u16::MAX, &[offset], &[read as u8 + 1; PIECE]);
                responses.push((response, None));
            }
        }
        let mut group: Vec<Sent> = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            let segments = segments_of(at, *message, start.wrapping_add(at as u32), key.value());
            group.extend(segments.into_iter().map(|bytes| (bytes, Some(at))));
        }
        let mut groups = [group.into_iter().peekable(), responses.into_iter().peekable()];
        let mut stream = Vec::new();
        for turn in turns.iter().copied().cycle() {
            let at = usize::from(turn);
            match groups[at].next().or_else(|| groups[1 - at].next()) {
                Some(segment) => stream.push(segment),
                None => break,
            }
        }
        let (arrived, placed) = (vec![false; stream.len()], vec![None; stream.len()]);
        let executed = vec![false; messages.len()];
        let (cursor, reads) = (0, Vec::new());
        Self { end, target, inbox, sink, messages, stream, arrived, placed, cursor, executed, start, reads }
    }

    /// A segment arrives: the framing offers it early beyond a gap, and in order when the gap has closed.
    fn arrive(&mut self, at: usize) -> Result<(), TestCaseError> {
        self.arrived[at] = true;
        if at > self.cursor {
            self.placed[at] = self.end.place(&self.stream[at].0, Arrival::Early).ok();
        }
        while self.cursor < self.stream.len() && self.arrived[self.cursor] {
            let placed = match self.placed[self.cursor] {
                Some(placed) => placed,
                None => self.end.place(&self.stream[self.cursor].0, Arrival::InOrder).unwrap(),
            };
            self.end.rnic.deliver(CONN, placed).unwrap();
            self.cursor += 1;
        }
        self.note_executed()
    }

    /// Notes the completions and the responses since the last arrival, each of which must be the only one of its message.
    fn note_executed(&mut self) -> Result<(), TestCaseError> {
        for completion in self.end.poll() {
            prop_assert_eq!(completion.status, WcStatus::Success);
            if completion.wr_id >= 1000 {
                self.reads.push(completion.wr_id - 1000);
                continue;
            }
            let mut first = [0];
            self.inbox.read(completion.wr_id as usize * PLACE, &mut first).unwrap();
            let at = usize::from(first[0]) - 1;
            prop_assert_eq!(completion.byte_len as usize, self.messages[at].segments * PIECE);
            prop_assert!(!std::mem::replace(&mut self.executed[at], true), "Send {} twice", at);
        }
        while let Some(response) = self.end.pull() {
            prop_assert_eq!(response[1] & 3, 3);
            let number = u32::from_be_bytes(response[12..16].try_into().unwrap());
            let at = number.wrapping_sub(self.start) as usize;
            prop_assert!(!std::mem::replace(&mut self.executed[at], true), "Read {} twice", at);
        }
        Ok(())
    }

    /// Whether the bytes of a Write were written: none, some, or all of them.
    fn written(&self, at: usize) -> (bool, bool) {
        let mut bytes = vec![0; self.messages[at].segments * PIECE];
        self.target.read(at * PLACE, &mut bytes).unwrap();
        let count = bytes.iter().filter(|byte| usize::from(**byte) == at + 1).count();
        (count > 0, count == bytes.len())
    }

    fn is_touched(&self, at: usize) -> bool {
        if self.messages[at].what == What::Write { self.written(at).0 } else { self.executed[at] }
    }

    fn is_processed(&self, at: usize) -> bool {
        if self.messages[at].what == What::Write { self.written(at).1 } else { self.executed[at] }
    }

    /// The rule of section 3.4 for every message, and what may be placed at once is.
    fn check(&self, at_arrival: usize) -> Result<(), TestCaseError> {
        for (at, message) in self.messages.iter().enumerate().filter(|(at, _)| self.is_touched(*at)) {
            let before = if message.order == u16::MAX { 0 } else { at.saturating_sub(message.order.into()) };
            for earlier in 0..before {
                prop_assert!(self.is_processed(earlier), "{} was touched before {}", at, earlier);
            }
        }
        if let (_, Some(at)) = self.stream[at_arrival]
            && self.messages[at].order == u16::MAX
            && self.messages[at].segments == 1
        {
            // A Send waits while another one is open, whose next segment is due.
            let waits = self.messages[at].what == What::Send;
            prop_assert!(waits || self.is_processed(at), "{} was not processed at once", at);
        }
        Ok(())
    }
}

proptest! {
    /// No message is touched before its order allows it, each is processed once, and all are in the end.
    #[test]
    fn prop_a_queue_pair_follows_the_order_field_for_any_arrival_order(
        start in prop_oneof![Just(u32::MAX - 7), Just(u32::MAX), any::<u32>()],
        messages in prop::collection::vec(message(), 1..MOST),
        turns in prop::collection::vec(any::<bool>(), 1..40),
        keys in prop::collection::vec(any::<u16>(), 3 * MOST + 2 * READS),
        // From nearly in order to any order.
        spread in prop_oneof![Just(2u64), Just(8), Just(1000)],
    ) {
        let mut model = Model::new(start, messages, &turns);
        let mut order: Vec<usize> = (0..model.stream.len()).collect();
        order.sort_by_key(|at| *at as u64 * 4 + u64::from(keys[*at]) % (4 * spread));
        for at in order {
            model.arrive(at)?;
            model.check(at)?;
        }
        prop_assert!((0..model.messages.len()).all(|at| model.is_processed(at)));
        prop_assert_eq!(&model.reads, &(0..READS as u64).collect::<Vec<_>>());
        for read in 0..READS {
            let mut bytes = [0; 2 * PIECE];
            model.sink.read(read * PLACE, &mut bytes).unwrap();
            prop_assert_eq!(bytes, [read as u8 + 1; 2 * PIECE]);
        }
        prop_assert_eq!(model.end.state(), QpState::Rts);
    }
}
