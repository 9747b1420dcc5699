//! Builds segments from the send queue, the peer's requests, and errors ([`Ulp::pull`]).
//!
//! Messages of one stream are sent one after the other, never interleaved (RFC 5041 section 5.3). The send queue and
//! the responses to the peer alternate, message by message.
//!
//! [`Ulp::pull`]: xwarp_tcp::ulp::Ulp::pull

use xwarp_tcp::{
    copy::Fault,
    mpa::Rtr,
    rdma_tcp::{Order, SegmentHeader, SendControl},
    ulp::Pulled,
};

use super::{
    Shared,
    grant::Keys,
    keys::{KeyError, User},
    phase::Phase,
    pieces::{Gather, Stretches},
    qp::{Asked, AskedKind, Current, Ending, QueuePair, ToAnswer, Transmitter},
    rdma_tcp::{ATOMIC_VALUE_BYTES, Stream, atomic_words},
    send_queue::{Position, Progress, SendRequest},
    work::{Access, Operation, Remote, SendFlags, Sge, WcStatus},
};
use crate::{
    ddp::{Msn, Queue, STag, TAGGED_BYTES, UNTAGGED_BYTES, Untagged},
    rdmap::{
        ATOMIC_RESPONSE_BYTES, AtomicOperation, AtomicRequest, AtomicResponse, MessageType, RdmapError,
        ReadRequest, StreamError, TERMINATE_MAX_BYTES, TerminateHeader,
    },
    segment::{Head, Header, Quote, Seen, SegmentWriter, TaggedHead, UntaggedHead},
};

/// A message is not split to fill the rest of a frame with fewer bytes than this.
const LEAST_CUT: usize = 128;

/// The sink tag of a ready-to-receive Read. Nothing is placed there, but one vendor's RNIC rejects tag 0.
const RTR_STAG: STag = STag::new(1);

/// Result of writing a part of a message.
enum Part {
    /// This many bytes of the message were written.
    Written(u32),
    /// The message should continue in the next TCP segment.
    DoesNotFit,
    /// The local memory is not accessible.
    NotAccessible,
}

impl Part {
    /// A segment of `n` bytes, which stays in `out` if its bytes could be read.
    #[inline]
    fn of(n: u32, read: bool, out: &mut SegmentWriter<'_, '_, '_>) -> Self {
        if read {
            return Self::Written(n);
        }
        out.discard();
        Self::NotAccessible
    }
}

/// The bytes of a Send or RDMA Write from byte `sent` on.
struct LocalPayload<'a> {
    keys: &'a Keys,
    user: User,
    entry: &'a SendRequest,
    inline: Option<&'a [u8]>,
    sent: u32,
}

impl LocalPayload<'_> {
    /// Writes the next segment, with a header of `header` bytes: `head(is_last)`.
    #[inline]
    fn put<H: Head>(
        self,
        header: usize,
        head: impl Fn(bool) -> H,
        mut out: SegmentWriter<'_, '_, '_>,
    ) -> Part {
        let Self { keys, user, entry, inline, sent } = self;
        let rest = entry.len - sent;
        let Some(n) = segment_bytes(&out, header, rest) else { return Part::DoesNotFit };
        if let Some(bytes) = inline {
            let bytes = bytes.get(sent as usize..(sent + n) as usize).unwrap_or_default();
            put_inline(&head(n == rest), bytes, out);
            return Part::Written(n);
        }
        let (skip, len) = (sent.into(), n.into());
        if let Some(mut reader) = keys.reader(user, &entry.payload, skip, len) {
            out.fill(&head(n == rest), n as usize, |space| {
                let all = reader.read_gapped(space);
                debug_assert!(all, "the reader has the bytes of the segment");
            });
            return Part::of(n, !reader.is_broken(), &mut out);
        }
        match Gather::open(keys, user, Access::empty(), &entry.payload, skip, len) {
            Ok(gather) => {
                let read = put_gathered(&head(n == rest), n as usize, gather, out.reborrow());
                Part::of(n, read.is_ok(), &mut out)
            }
            Err(_) => Part::NotAccessible,
        }
    }

    /// [`Self::put`] on a connection with RDMA/TCP.
    #[inline(never)]
    fn put_numbered(self, stream: &mut Stream, out: SegmentWriter<'_, '_, '_>) -> Part {
        let (entry, sent) = (self.entry, self.sent);
        let header = stream.message_header(entry, sent);
        let part = self.put(header.bytes(), |last| SegmentHeader { last, ..header }, out);
        if let Part::Written(n) = part {
            stream.sent(&SegmentHeader { last: sent + n == entry.len, ..header });
        }
        part
    }
}

/// [`SegmentWriter::put`], apart from the segments that are read from one memory.
#[inline(never)]
fn put_inline(head: &impl Head, bytes: &[u8], mut out: SegmentWriter<'_, '_, '_>) {
    out.put(head, bytes);
}

/// [`SegmentWriter::fill`] from several memories.
#[inline(never)]
fn put_gathered(
    head: &impl Head,
    len: usize,
    mut gather: Gather<'_>,
    mut out: SegmentWriter<'_, '_, '_>,
) -> Result<(), Fault> {
    let mut read = Ok(());
    out.fill(head, len, |space| read = read.and_then(|()| gather.read(space)));
    read
}

impl Transmitter {
    /// Header of the segment that begins at byte `sent` of a Send.
    #[inline]
    fn message_head(&self, request: &SendRequest, sent: u32, last: bool) -> UntaggedHead {
        let solicited = request.flags.contains(SendFlags::SOLICITED);
        let (message, word) = match request.operation {
            Operation::Send { invalidate: Some(stag) } => {
                (MessageType::Send { invalidate: true, solicited }, stag.value())
            }
            Operation::SendImmediate { data } => {
                (MessageType::SendImmediate { solicited }, u32::from_be_bytes(data))
            }
            _ => (MessageType::Send { invalidate: false, solicited }, 0),
        };
        UntaggedHead { message, last, word, queue: Queue::Send, msn: self.send_msn, mo: sent }
    }
}

impl QueuePair {
    /// Whether [`Self::pull`] would write a ULPDU, if there were room, or finish the direction.
    #[expect(clippy::inline_always, reason = "each segment that is written calls it once")]
    #[inline(always)]
    pub(crate) fn has_data(&self) -> bool {
        self.tx.current.is_some()
            || self.may_begin()
            || !self.tx.to_answer.is_empty()
            || !matches!(self.tx.ending, Ending::No)
            || self.phase.is_closing() && self.drained()
    }

    /// Writes the next ULPDU.
    #[inline]
    pub(crate) fn pull(&mut self, shared: &mut Shared, mut out: SegmentWriter<'_, '_, '_>) -> Pulled {
        loop {
            if let Some(pulled) = self.send_segment(shared, out.reborrow()) {
                return pulled;
            }
            if let Some(pulled) = self.other_step(shared, out.reborrow()) {
                return pulled;
            }
        }
    }

    /// A step towards the next ULPDU if [`Self::send_segment`] does not apply. `None`: take another one.
    #[inline(never)]
    fn other_step(&mut self, shared: &mut Shared, mut out: SegmentWriter<'_, '_, '_>) -> Option<Pulled> {
        let out = &mut out;
        match (self.tx.ending, self.tx.current) {
            (Ending::Terminate(terminate), _) => Some(self.send_terminate(terminate, shared, out)),
            (Ending::Finished, _) => Some(Pulled::Finish),
            (Ending::No, Some(Current::Rtr(rtr))) => Some(self.send_rtr(rtr, out)),
            (Ending::No, Some(Current::Immediate { data })) => Some(self.send_immediate(data, out)),
            (Ending::No, Some(Current::Response)) => self.answer_segment(shared, out),
            (Ending::No, Some(Current::Request { .. })) => {
                debug_assert!(false, "the send queue has no entry for the current message");
                self.tx.current = None;
                None
            }
            (Ending::No, None) => self.choose(shared, out),
        }
    }

    /// Whether the next request of the send queue may begin: ORD and its fence allow it.
    #[inline]
    pub(crate) fn may_begin(&self) -> bool {
        if !matches!(self.phase, Phase::Open(_)) {
            return false;
        }
        self.sq.upcoming().is_some_and(|entry| {
            let fenced = entry.flags.contains(SendFlags::FENCE) && !self.rx.asked.is_empty();
            let full = entry.operation.is_answered() && self.rx.asked.len() >= usize::from(self.ord);
            !fenced && !full
        })
    }

    /// Chooses the next message and begins it.
    fn choose(&mut self, shared: &mut Shared, out: &mut SegmentWriter<'_, '_, '_>) -> Option<Pulled> {
        let may_begin = self.may_begin();
        let answer_first = !may_begin || !self.tx.answered_last;
        if answer_first && !self.tx.to_answer.is_empty() {
            self.tx.answered_last = true;
            return self.begin_answer(shared, out);
        }
        self.tx.answered_last = false;
        if may_begin {
            return self.begin_request(shared, out);
        }
        if self.phase.is_closing() && self.drained() {
            self.tx.ending = Ending::Finished;
            return None;
        }
        Some(Pulled::Nothing)
    }

    fn begin_request(&mut self, shared: &mut Shared, out: &mut SegmentWriter<'_, '_, '_>) -> Option<Pulled> {
        let position = self.sq.next;
        let Some(entry) = self.sq.get(position) else { return Some(Pulled::Nothing) };
        // An invalid sink fails the request before it is sent.
        if entry.operation.is_answered() && self.open_sink(entry, shared).is_err() {
            self.sq.next += 1;
            self.fail_request(position, WcStatus::LocalProtection, shared);
            return None;
        }
        match entry.operation {
            Operation::Send { .. }
            | Operation::SendImmediate { .. }
            | Operation::Write { .. }
            | Operation::WriteImmediate { .. } => {
                self.tx.current = Some(Current::Request { sent: 0 });
                None
            }
            Operation::Read { remote, .. } => self.ask_to_read(position, remote, out),
            Operation::Immediate { data } => Some(self.send_immediate(data, out)),
            Operation::FetchAdd { remote, add, mask } => {
                Some(self.ask_atomic(position, remote, AtomicOperation::FetchAdd { add, mask }, out))
            }
            Operation::CompareSwap { remote, compare, compare_mask, swap, swap_mask } => {
                let operation = AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask };
                Some(self.ask_atomic(position, remote, operation, out))
            }
            Operation::LocalInvalidate { .. }
            | Operation::BindWindow { .. }
            | Operation::FastRegister { .. } => {
                self.do_local_work(shared);
                None
            }
        }
    }

    /// The local memory of a Read or an atomic operation.
    fn open_sink<'k>(&self, entry: &SendRequest, shared: &'k Shared) -> Result<Stretches<'k>, KeyError> {
        let len = u64::from(entry.len);
        Stretches::open(&shared.keys, self.user(), Access::LOCAL_WRITE, &entry.payload, 0, len)
    }

    pub(crate) fn set_progress(&mut self, position: Position, progress: Progress) {
        if let Some(entry) = self.sq.get_mut(position) {
            entry.progress = progress;
        }
    }

    /// Fails a request that cannot be executed, and the stream with it (RFC 5040 section 7.1, case 1).
    pub(crate) fn fail_request(&mut self, position: Position, status: WcStatus, shared: &mut Shared) {
        self.set_progress(position, Progress::Done(status));
        self.fail(StreamError::Rdmap(RdmapError::LocalCatastrophic), Quote::default(), shared);
    }

    /// Writes the next segment of a Send or RDMA Write, which becomes or stays the current message unless it is the last one.
    /// `None`, and nothing was written, unless such a message is current or [`Self::choose`] would certainly choose it. Nearly all
    /// segments need no other step, so that one look-up of the request is enough for them.
    #[inline]
    fn send_segment(&mut self, shared: &mut Shared, mut out: SegmentWriter<'_, '_, '_>) -> Option<Pulled> {
        let (keys, user) = (&shared.keys, self.user());
        let (request, inline) = self.sq.get_to_send()?;
        let sent = match self.tx.current {
            Some(Current::Request { sent }) => sent,
            None if matches!(self.phase, Phase::Open(_))
                && self.tx.to_answer.is_empty()
                && request.progress == Progress::Posted
                && request.operation.is_plain()
                && !request.flags.contains(SendFlags::FENCE) =>
            {
                self.tx.answered_last = false;
                0
            }
            _ => return None,
        };
        let entry = &*request;
        // Built where it is used, because that avoids a copy in memory.
        let local = || LocalPayload { keys, user, entry, inline, sent };
        let writer = out.reborrow();
        let part = match (&mut self.stream, &entry.operation) {
            (None, Operation::Write { remote } | Operation::WriteImmediate { remote, .. }) => {
                let (stag, to) = (remote.key, remote.offset.wrapping_add(u64::from(sent)));
                let head = |last| TaggedHead { message: MessageType::Write, last, stag, to };
                local().put(TAGGED_BYTES, head, writer)
            }
            (None, _) => local().put(UNTAGGED_BYTES, |last| self.tx.message_head(entry, sent, last), writer),
            (Some(stream), _) => local().put_numbered(stream, writer),
        };
        let n = match part {
            Part::Written(n) => n,
            Part::DoesNotFit => {
                self.tx.current = Some(Current::Request { sent });
                return Some(Pulled::Nothing);
            }
            Part::NotAccessible => {
                let position = self.sq.next;
                self.fail_request(position, WcStatus::LocalProtection, shared);
                return None;
            }
        };
        if sent + n < entry.len {
            self.tx.current = Some(Current::Request { sent: sent + n });
        } else if let Operation::WriteImmediate { data, .. } = entry.operation {
            self.tx.current = Some(Current::Immediate { data });
        } else {
            if self.stream.is_none() && !matches!(entry.operation, Operation::Write { .. }) {
                self.tx.send_msn = self.tx.send_msn.next();
            }
            request.progress = Progress::Sent(out.end());
            self.tx.current = None;
            self.sq.next += 1;
        }
        Some(Pulled::Ulpdu)
    }

    /// Records that a segment of a message was written.
    fn note_sent(&mut self, header: &Header) {
        if let (Some(stream), Header::Numbered(header)) = (&mut self.stream, header) {
            stream.sent(header);
        }
    }

    /// Writes Immediate Data, of its own request or after an RDMA Write.
    #[inline(never)]
    fn send_immediate(&mut self, data: [u8; 8], out: &mut SegmentWriter<'_, '_, '_>) -> Pulled {
        let position = self.sq.next;
        let solicited = self.sq.get(position).is_some_and(|e| e.flags.contains(SendFlags::SOLICITED));
        let header = untagged(MessageType::Immediate { solicited }, Queue::Send, self.tx.send_msn);
        let written = match &mut self.stream {
            Some(stream) => stream.put_control(SendControl::Immediate { data }, solicited, out),
            None => out.put_whole(&header, &data),
        };
        if !written {
            return Pulled::Nothing;
        }
        self.tx.send_msn = self.tx.send_msn.next();
        self.tx.current = None;
        self.sq.next = position + 1;
        self.set_progress(position, Progress::Sent(out.end()));
        Pulled::Ulpdu
    }

    #[inline(never)]
    fn ask_to_read(
        &mut self,
        position: Position,
        remote: Remote,
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> Option<Pulled> {
        let entry = self.sq.get(position)?;
        let sink = entry.payload.first().copied().unwrap_or_default();
        let request = ReadRequest {
            sink_stag: sink.key,
            sink_to: sink.offset,
            len: entry.len,
            source_stag: remote.key,
            source_to: remote.offset,
        };
        let written = match &mut self.stream {
            Some(stream) => {
                let overtakes = entry.flags.contains(SendFlags::OVERTAKE);
                let order = if overtakes { Order::AT_ONCE } else { Order::STRICT };
                stream.put_request(remote, request.len, None, order, out)
            }
            None => self.put_request(MessageType::ReadRequest, &request.to_bytes(), out),
        };
        if !written {
            return Some(Pulled::Nothing);
        }
        self.asked(Some(position), AskedKind::read(&request));
        Some(Pulled::Ulpdu)
    }

    #[inline(never)]
    fn ask_atomic(
        &mut self,
        position: Position,
        remote: Remote,
        operation: AtomicOperation,
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> Pulled {
        let id = self.tx.next_atomic_id;
        let request = AtomicRequest { operation, id, stag: remote.key, to: remote.offset };
        let written = match &mut self.stream {
            Some(stream) => stream.put_request(remote, 8, Some(atomic_words(operation)), Order::STRICT, out),
            None => self.put_request(MessageType::AtomicRequest, &request.to_bytes(), out),
        };
        if !written {
            return Pulled::Nothing;
        }
        self.tx.next_atomic_id = id.wrapping_add(1);
        self.asked(Some(position), AskedKind::Atomic { id });
        Pulled::Ulpdu
    }

    /// Writes a message for the peer's request queue (queue 1).
    fn put_request(
        &mut self,
        message: MessageType,
        body: &[u8],
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> bool {
        let written = out.put_whole(&untagged(message, Queue::Request, self.tx.request_msn), body);
        if written {
            self.tx.request_msn = self.tx.request_msn.next();
        }
        written
    }

    fn asked(&mut self, position: Option<Position>, kind: AskedKind) {
        self.rx.asked.push_back(Asked { position, kind });
        if let Some(position) = position {
            self.sq.next = position + 1;
            self.set_progress(position, Progress::Asked);
        }
    }

    /// Writes the ready-to-receive message of peer-to-peer mode (RFC 6581 section 9.2).
    #[inline(never)]
    fn send_rtr(&mut self, rtr: Rtr, out: &mut SegmentWriter<'_, '_, '_>) -> Pulled {
        let written = match rtr {
            Rtr::EmptyFpdu => true,
            Rtr::Send => {
                let message = MessageType::Send { invalidate: false, solicited: false };
                let written = out.put_whole(&untagged(message, Queue::Send, self.tx.send_msn), &[]);
                self.tx.send_msn = if written { self.tx.send_msn.next() } else { self.tx.send_msn };
                written
            }
            Rtr::Write => {
                let message = MessageType::Write;
                out.put_whole(&TaggedHead { message, last: true, stag: RTR_STAG, to: 0 }, &[])
            }
            Rtr::Read => {
                let request = ReadRequest {
                    sink_stag: RTR_STAG,
                    sink_to: 0,
                    len: 0,
                    source_stag: RTR_STAG,
                    source_to: 0,
                };
                let written = self.put_request(MessageType::ReadRequest, &request.to_bytes(), out);
                if written {
                    self.asked(None, AskedKind::read(&request));
                }
                written
            }
        };
        if !written {
            return Pulled::Nothing;
        }
        self.tx.current = None;
        Pulled::Ulpdu
    }

    /// Begins the response to the peer's oldest request.
    #[inline(never)]
    fn begin_answer(&mut self, shared: &mut Shared, out: &mut SegmentWriter<'_, '_, '_>) -> Option<Pulled> {
        match self.tx.to_answer.front() {
            Some(&ToAnswer::Atomic { request, seen }) => self.answer_atomic(&request, seen, shared, out),
            Some(ToAnswer::Read { .. }) => {
                self.tx.current = Some(Current::Response);
                None
            }
            None => None,
        }
    }

    /// Writes the next segment of a Read Response. The source is checked for each segment, because it may be
    /// deregistered at any time.
    #[inline(never)]
    fn answer_segment(&mut self, shared: &mut Shared, out: &mut SegmentWriter<'_, '_, '_>) -> Option<Pulled> {
        let Some(&ToAnswer::Read { request, sent, seen }) = self.tx.to_answer.front() else {
            self.tx.current = None;
            return None;
        };
        let rest = request.advanced(sent);
        let (message, stag, to) = (MessageType::ReadResponse, rest.sink_stag, rest.sink_to);
        let mut header = match &self.stream {
            Some(stream) => Header::Numbered(stream.response_header(sent)),
            None => Header::Tagged(TaggedHead { message, last: false, stag, to }),
        };
        let Some(n) = segment_bytes(out, header.bytes(), rest.len) else {
            return Some(Pulled::Nothing);
        };
        let last = n == rest.len;
        header.end_message(last);
        if request.len == 0 {
            out.put(&header, &[]);
        } else {
            let source = [Sge { key: rest.source_stag, offset: rest.source_to, len: n }];
            let opened = Gather::open(&shared.keys, self.user(), Access::REMOTE_READ, &source, 0, n.into());
            let written = opened.and_then(|gather| {
                put_gathered(&header, n as usize, gather, out.reborrow()).map_err(|Fault| {
                    out.discard();
                    // The region is there, but it cannot be read.
                    KeyError::Access
                })
            });
            if let Err(error) = written {
                let quote = Quote { request: Some(rest), ..seen.into() };
                self.fail(RdmapError::from(error).into(), quote, shared);
                return None;
            }
        }
        self.note_sent(&header);
        if last {
            self.tx.to_answer.pop_front();
            self.tx.current = None;
        } else if let Some(ToAnswer::Read { sent, .. }) = self.tx.to_answer.front_mut() {
            *sent += n;
        }
        Some(Pulled::Ulpdu)
    }

    /// Executes an atomic operation once there is room for its response, and writes the response.
    fn answer_atomic(
        &mut self,
        request: &AtomicRequest,
        seen: Seen<Untagged>,
        shared: &mut Shared,
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> Option<Pulled> {
        let mut header = match &self.stream {
            Some(stream) => Header::Numbered(stream.response_header(0)),
            None => Header::Untagged(untagged(
                MessageType::AtomicResponse,
                Queue::AtomicResponse,
                self.tx.atomic_msn,
            )),
        };
        header.end_message(true);
        let bytes = if self.stream.is_some() { ATOMIC_VALUE_BYTES } else { ATOMIC_RESPONSE_BYTES };
        if out.room_behind(header.bytes()).is_none_or(|room| room < bytes) {
            self.tx.answered_last = false;
            return Some(Pulled::Nothing);
        }
        match shared.atomic(self.user(), request) {
            Ok(original) => {
                if self.stream.is_some() {
                    out.put(&header, &original.to_be_bytes());
                } else {
                    out.put(&header, &AtomicResponse { id: request.id, original }.to_bytes());
                }
                self.note_sent(&header);
                self.tx.atomic_msn = self.tx.atomic_msn.next();
                self.tx.to_answer.pop_front();
                Some(Pulled::Ulpdu)
            }
            Err(error) => {
                self.fail(error.into(), seen.into(), shared);
                None
            }
        }
    }

    /// Writes the Terminate, the last message of the stream (RFC 5040 section 5.4).
    #[inline(never)]
    fn send_terminate(
        &mut self,
        terminate: TerminateHeader,
        shared: &mut Shared,
        out: &mut SegmentWriter<'_, '_, '_>,
    ) -> Pulled {
        let mut body = [0; TERMINATE_MAX_BYTES];
        let len = terminate.emit(&mut body);
        let header = untagged(MessageType::Terminate, Queue::Terminate, Msn::FIRST);
        let (layer, error_type, code) = terminate.numbers();
        let code = u16::from(layer) << 12 | u16::from(error_type) << 8 | u16::from(code);
        let written = match &mut self.stream {
            Some(stream) => stream.put_control(SendControl::Terminate { code }, false, out),
            None => out.put_whole(&header, body.get(..len).unwrap_or_default()),
        };
        if !written {
            return Pulled::Nothing;
        }
        shared.terminates.sent.count(&terminate);
        self.tx.ending = Ending::Finished;
        Pulled::Ulpdu
    }
}

/// The header of an untagged message of one segment.
fn untagged(message: MessageType, queue: Queue, msn: Msn) -> UntaggedHead {
    UntaggedHead { message, last: true, word: 0, queue, msn, mo: 0 }
}

/// Number of the message's `rest` bytes to put behind `header` bytes into the current TCP segment; `None` when the message should
/// continue in the next one.
#[inline]
fn segment_bytes(out: &SegmentWriter<'_, '_, '_>, header: usize, rest: u32) -> Option<u32> {
    let (rest, space) = (rest as usize, out.room_behind(header)?);
    (rest <= space || out.has_all_room() || space >= LEAST_CUT).then_some(rest.min(space) as u32)
}
