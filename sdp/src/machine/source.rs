//! The sending half: the Data Source.
//!
//! The data to send is a queue of segments: copied bytes, and memory that is advertised. The front of the queue is the
//! next byte of the stream.

use std::collections::VecDeque;

use super::{
    Control, Notice, Request, Violation,
    seeded::{Mistake, seeded},
};
use crate::wire::{Advert, Flags, Message, Mode, Seq};

/// Largest number of out-of-band bytes that wait to be sent.
pub(super) const MAX_MARKS: usize = 8;
/// Number of consecutive SendSm after which Pipelined mode is left, and after which Combined mode is left (draft
/// section 12 leaves the numbers to us).
const FORCED_TO_COMBINED: u8 = 2;
const FORCED_TO_BUFFERED: u8 = 8;
/// Largest allocation that is kept while nothing waits to be sent, in bytes.
const MAX_SPARE: usize = 4096;
/// Largest number of bytes of the stream between OOB_PEND and its byte (draft section 9.5.3).
const MAX_PENDING: u64 = 65_535;

/// A part of the stream that has not been transferred.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Segment {
    Bytes(VecDeque<u8>),
    Memory {
        id: u64,
        /// What is left.
        piece: Advert,
        /// Sent in messages, not advertised.
        in_messages: bool,
    },
}

/// A SrcAvail that the sink has not processed. The n-th one is for the n-th segment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SrcAdvert {
    rest: u32,
    seq: Seq,
}

/// The time from a ModeChange to Combined to its acknowledgement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Leaving {
    /// The number of the ModeChange, once it has been sent.
    seq: Option<Seq>,
    /// Payload messages sent since.
    payloads: u32,
}

/// Payload of the message to send.
#[derive(Debug, Default)]
pub(super) struct Payload {
    pub(super) flags: Flags,
    /// The payload is this piece of the program's memory, not bytes that were appended.
    pub(super) memory: Option<Advert>,
    pub(super) len: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Source {
    pub(super) mode: Mode,
    pub(super) segments: VecDeque<Segment>,
    /// Empty; kept for its allocation, unless that is large.
    spare: VecDeque<u8>,
    /// Number of copied bytes in all segments.
    copied: usize,
    adverts: VecDeque<SrcAdvert>,
    /// Bytes at the front that SendSm requested.
    owed: u64,
    cancel: Request,
    /// SinkAvails that are not stale.
    held: VecDeque<Advert>,
    /// PotentialNonDiscards (draft section 9.5.1).
    potential_non_discards: u32,
    leaving: Option<Leaving>,
    /// Out-of-band bytes: the number of bytes up to and with each, and whether OOB_PEND was sent.
    pub(super) marks: VecDeque<(u64, bool)>,
    pub(super) next_id: u64,
    /// SendSm received since the last RDMA Read: hints to leave the mode (draft section 12).
    forced: u8,
    /// The sink's last hint was to use Pipelined mode.
    advised: bool,
    /// DisConn was sent: SinkAvails are of no use.
    pub(super) closed: bool,
}

impl Source {
    pub(super) fn new() -> Self {
        Self {
            mode: Mode::Combined,
            segments: VecDeque::new(),
            spare: VecDeque::new(),
            copied: 0,
            adverts: VecDeque::new(),
            owed: 0,
            cancel: Request::None,
            held: VecDeque::new(),
            potential_non_discards: 0,
            leaving: None,
            marks: VecDeque::new(),
            next_id: 0,
            forced: 0,
            advised: false,
            closed: false,
        }
    }

    /// Copied bytes that have not been sent.
    pub(super) fn copied(&self) -> usize {
        self.copied
    }

    /// The counts that both ends agree on when nothing is in flight.
    #[cfg(test)]
    pub(super) fn rest(&self) -> (Mode, u32, bool) {
        let quiet = self.segments.is_empty()
            && self.adverts.is_empty()
            && self.held.is_empty()
            && self.owed == 0
            && self.cancel == Request::None;
        (self.mode, self.potential_non_discards, quiet)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    pub(super) fn adverts(&self) -> usize {
        self.adverts.len()
    }

    /// Whether there is nothing to send or to answer.
    pub(super) fn is_idle(&self) -> bool {
        self.segments.is_empty()
            && self.adverts.is_empty()
            && self.held.is_empty()
            && self.leaving.is_none()
            && self.cancel == Request::None
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.copied += bytes.len();
        if let Some(Segment::Bytes(last)) = self.segments.back_mut() {
            last.extend(bytes);
        } else {
            let mut segment = std::mem::take(&mut self.spare);
            segment.extend(bytes);
            self.segments.push_back(Segment::Bytes(segment));
        }
    }

    /// Appends an out-of-band byte; returns false when too many wait.
    pub(super) fn write_oob(&mut self, byte: u8) -> bool {
        if self.marks.len() >= MAX_MARKS {
            return false;
        }
        self.write(&[byte]);
        self.marks.push_back((self.segments.iter().map(Segment::len).sum(), false));
        true
    }

    /// Appends memory; [`Notice::Sent`] reports its transfer.
    pub(super) fn write_memory(&mut self, piece: Advert, notices: &mut VecDeque<Notice>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        if piece.len == 0 {
            notices.push_back(Notice::Sent { id });
            return id;
        }
        self.segments.push_back(Segment::Memory { id, piece, in_messages: false });
        id
    }

    /// Removes `n` transferred bytes from the front segment.
    fn advance(&mut self, n: u32, notices: &mut VecDeque<Notice>) {
        for (left, _) in &mut self.marks {
            *left = left.saturating_sub(u64::from(n));
        }
        self.marks.retain(|(left, _)| *left > 0);
        match self.segments.front_mut() {
            Some(Segment::Bytes(bytes)) => {
                bytes.drain(..bytes.len().min(n as usize));
                self.copied = self.copied.saturating_sub(n as usize);
                if bytes.is_empty() {
                    if bytes.capacity() <= MAX_SPARE {
                        self.spare = std::mem::take(bytes);
                    }
                    self.segments.pop_front();
                }
            }
            Some(Segment::Memory { id, piece, .. }) => {
                piece.offset = piece.offset.wrapping_add(u64::from(n));
                piece.len = piece.len.saturating_sub(n);
                if piece.len == 0 {
                    notices.push_back(Notice::Sent { id: *id });
                    self.segments.pop_front();
                }
            }
            None => {}
        }
    }

    /// Counts a payload message. It uses the oldest SinkAvail that we hold; otherwise the sink may have none for it.
    fn count_payload(&mut self) {
        if self.held.pop_front().is_none() {
            self.potential_non_discards = self.potential_non_discards.wrapping_add(1);
        }
        if let Some(leaving) = &mut self.leaving {
            leaving.payloads += 1;
        }
    }

    /// The number of our SrcAvailCancel, until it is answered.
    pub(super) fn cancel_sent(&self) -> Option<Seq> {
        self.cancel.sent()
    }

    /// SinkAvails that are held.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Whether a payload message could be sent, with at most `room` bytes of payload.
    pub(super) fn has_payload(&self) -> bool {
        self.owed > 0 || (!self.segments.is_empty() && self.adverts.is_empty())
    }

    /// The payload of the next Data message: copied bytes are appended to `out`.
    pub(super) fn take_data(
        &mut self,
        room: u32,
        out: &mut Vec<u8>,
        notices: &mut VecDeque<Notice>,
    ) -> Option<Payload> {
        if !self.has_payload() || self.wants_rdma() {
            return None;
        }
        let mut flags = self.take_pending();
        let front = self.segments.front()?;
        let mut len = front.len().min(u64::from(room));
        if self.owed > 0 {
            len = len.min(self.owed);
        }
        if let Some((left, _)) = self.marks.front() {
            len = len.min(*left);
            if len == *left {
                flags |= Flags::OOB_PRES;
            }
        }
        let len = len as u32;
        let memory = match front {
            Segment::Bytes(bytes) => {
                let (first, second) = bytes.as_slices();
                let n = first.len().min(len as usize);
                out.extend_from_slice(first.get(..n).unwrap_or_default());
                out.extend_from_slice(second.get(..len as usize - n).unwrap_or_default());
                None
            }
            Segment::Memory { piece, .. } => Some(Advert { len, ..*piece }),
        };
        self.owed = self.owed.saturating_sub(u64::from(len));
        self.count_payload();
        self.advance(len, notices);
        Some(Payload { flags, memory, len })
    }

    /// The payload of a SinkAvail: copied bytes at the front, unless an out-of-band byte waits, because only Data
    /// messages carry these.
    pub(super) fn take_command(
        &mut self,
        room: u32,
        out: &mut Vec<u8>,
        notices: &mut VecDeque<Notice>,
    ) -> Option<Payload> {
        let copied = matches!(self.segments.front(), Some(Segment::Bytes(_)));
        if !copied || !self.marks.is_empty() {
            return None;
        }
        self.take_data(room, out, notices)
    }

    /// Whether the front must be sent by RDMA now: it is advertisable memory, or a SinkAvail waits for it.
    fn wants_rdma(&self) -> bool {
        match (self.segments.front(), self.mode) {
            _ if self.owed > 0 => false,
            (Some(Segment::Memory { in_messages: false, piece, .. }), Mode::Combined) => piece.len >= 2,
            (Some(Segment::Memory { in_messages, .. }), Mode::Pipelined) => !in_messages,
            _ => false,
        }
    }

    /// The next SrcAvail: what it advertises, and in Combined mode the payload that it carries.
    pub(super) fn take_src_avail(&mut self, room: u32, seq: Seq) -> Option<(Advert, Payload)> {
        if self.cancel != Request::None || self.owed > 0 || !self.held.is_empty() {
            return None;
        }
        let Some(Segment::Memory { piece, in_messages: false, .. }) =
            self.segments.get_mut(self.adverts.len())
        else {
            return None;
        };
        let advert = *piece;
        match self.mode {
            Mode::Pipelined => {
                self.adverts.push_back(SrcAdvert { rest: advert.len, seq });
                Some((advert, Payload::default()))
            }
            Mode::Combined if self.adverts.is_empty() && advert.len >= 2 => {
                let len = room.min(advert.len - 1);
                piece.offset = piece.offset.wrapping_add(u64::from(len));
                piece.len -= len;
                self.adverts.push_back(SrcAdvert { rest: piece.len, seq });
                for (left, _) in &mut self.marks {
                    *left = left.saturating_sub(u64::from(len));
                }
                self.count_payload();
                let memory = Some(Advert { len, ..advert });
                Some((advert, Payload { flags: Flags::empty(), memory, len }))
            }
            _ => None,
        }
    }

    /// Whether the next SrcAvail would carry payload, so that it needs more credit.
    pub(super) fn src_avail_has_payload(&self) -> bool {
        self.mode == Mode::Combined
    }

    /// The next RDMA Write: from our memory into the oldest SinkAvail.
    pub(super) fn take_write(&mut self, notices: &mut VecDeque<Notice>) -> Option<(Advert, Advert)> {
        if !self.wants_rdma() || !self.adverts.is_empty() {
            return None;
        }
        let Some(Segment::Memory { piece, .. }) = self.segments.front() else { return None };
        let piece = *piece;
        let sink = self.held.pop_front()?;
        let len = piece.len.min(sink.len);
        self.advance(len, notices);
        Some((Advert { len, ..piece }, Advert { len, ..sink }))
    }

    /// OOB_PEND, if a byte needs it and it has not been sent for that byte.
    pub(super) fn take_pending(&mut self) -> Flags {
        match self.marks.iter_mut().find(|(_, pended)| !pended) {
            Some((left, pended)) if *left <= MAX_PENDING => {
                *pended = true;
                Flags::OOB_PEND
            }
            _ => Flags::empty(),
        }
    }

    /// Whether OOB_PEND is due.
    pub(super) fn pending_due(&self) -> bool {
        self.marks.iter().find(|(_, pended)| !pended).is_some_and(|(left, _)| *left <= MAX_PENDING)
    }

    /// Withdraws all SrcAvails; their data is sent in messages.
    pub(super) fn cancel(&mut self, control: &mut VecDeque<Control>) {
        if self.cancel != Request::None || self.adverts.is_empty() {
            return;
        }
        for segment in &mut self.segments {
            if let Segment::Memory { in_messages, .. } = segment {
                *in_messages = true;
            }
        }
        self.cancel = Request::Queued;
        control.push_back(Message::SrcAvailCancel.into());
    }

    /// The cancellation is about to be sent with number `seq`; returns false when nothing is left to cancel.
    pub(super) fn send_cancel(&mut self, seq: Seq) -> bool {
        let useful = !self.adverts.is_empty();
        self.cancel = if useful { Request::Sent(seq) } else { Request::None };
        useful
    }

    /// No SrcAvail is outstanding, for whatever reason, so the cancellation is complete (decision 14).
    fn settle_cancel(&mut self) {
        if self.adverts.is_empty() && matches!(self.cancel, Request::Sent(_)) {
            self.cancel = Request::None;
        }
    }

    pub(super) fn send_sm(&mut self, ack: Seq) {
        if let Request::Sent(seq) = self.cancel
            && ack.since(seq) >= 0
        {
            self.adverts.clear();
            self.cancel = Request::None;
            return;
        }
        if let Some(advert) = self.adverts.pop_front() {
            self.owed += u64::from(advert.rest);
            self.forced = self.forced.saturating_add(1);
            self.advised = false;
        }
        if !seeded(Mistake::SendSmLeavesCancel) {
            self.settle_cancel();
        }
    }

    pub(super) fn read_completed(
        &mut self,
        len: u32,
        invalidated: Option<u32>,
        notices: &mut VecDeque<Notice>,
    ) -> Result<(), Violation> {
        let fits = |rest| len <= rest || seeded(Mistake::CompletionUnchecked);
        let Some(advert) = self.adverts.front_mut().filter(|advert| self.owed == 0 && fits(advert.rest))
        else {
            return Err(Violation::Completion);
        };
        let Some(Segment::Memory { piece, .. }) = self.segments.front() else {
            return Err(Violation::Completion);
        };
        advert.rest -= len;
        let done = advert.rest == 0;
        if invalidated.is_some_and(|stag| !done || stag != piece.stag) {
            return Err(Violation::Invalidation);
        }
        if done {
            self.forced = 0;
            self.adverts.pop_front();
        }
        self.advance(len, notices);
        self.settle_cancel();
        Ok(())
    }

    /// A SinkAvail (draft section 9.5.1). `most` bounds those that are held.
    pub(super) fn sink_avail(
        &mut self,
        advert: Advert,
        non_discards: u32,
        most: usize,
    ) -> Result<(), Violation> {
        let expected = self.potential_non_discards;
        if let Some(leaving) = &self.leaving {
            // A message sent before the ModeChange may have used it; a later one did not (decision 10).
            let before = expected.wrapping_sub(leaving.payloads);
            if non_discards == before || seeded(Mistake::LateSinkAvailsUncounted) {
                let after = |advert: &SrcAdvert| leaving.seq.is_some_and(|seq| advert.seq.since(seq) > 0);
                self.adverts.retain(after);
                self.settle_cancel();
            } else {
                self.potential_non_discards = expected.wrapping_sub(1);
            }
            return Ok(());
        }
        if self.mode != Mode::Pipelined {
            return Err(Violation::AdvertMode);
        }
        if non_discards != expected {
            self.potential_non_discards = expected.wrapping_sub(1);
            return Ok(());
        }
        if self.closed {
            return Ok(());
        }
        if self.held.len() >= most {
            return Err(Violation::TooManyAdverts);
        }
        // It takes precedence over our own advertisements, which the sink ignores (draft section 11.3).
        self.adverts.clear();
        self.settle_cancel();
        self.held.push_back(advert);
        Ok(())
    }

    /// DisConn is about to be sent: held and later SinkAvails are void (draft section 8.2.1).
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.held.clear();
    }

    /// The sink withdraws its SinkAvails: those that we hold are dropped.
    pub(super) fn sink_cancelled(&mut self, control: &mut VecDeque<Control>) {
        if !self.held.is_empty() {
            self.held.clear();
            control.push_back(Message::SinkCancelAck.into());
        }
    }

    /// Changes the mode if that is a legal transition of the source, and queues the message.
    pub(super) fn change_mode(&mut self, mode: Mode, control: &mut VecDeque<Control>) -> bool {
        match (self.mode, mode) {
            (Mode::Combined, Mode::Buffered) if self.adverts.is_empty() && self.leaving.is_none() => {}
            (Mode::Combined, Mode::Pipelined) if self.leaving.is_none() => {}
            (Mode::Pipelined, Mode::Combined) => {
                self.held.clear();
                self.leaving = Some(Leaving { seq: None, payloads: 0 });
            }
            _ => return false,
        }
        self.mode = mode;
        self.forced = 0;
        self.advised = false;
        control.push_back(Message::ModeChange { half: crate::wire::Half::Receive, mode }.into());
        true
    }

    /// Records the number of a sent ModeChange of this half to Combined.
    pub(super) fn sent_mode_change(&mut self, seq: Seq) {
        if let Some(leaving) = &mut self.leaving
            && leaving.seq.is_none()
        {
            leaving.seq = Some(seq);
        }
    }

    /// Ends the acceptance of late SinkAvails once the ModeChange is acknowledged.
    pub(super) fn acknowledged(&mut self, ack: Seq) {
        if self.leaving.as_ref().is_some_and(|l| l.seq.is_some_and(|seq| ack.since(seq) >= 0)) {
            self.leaving = None;
        }
    }

    /// The sink ends Buffered mode.
    pub(super) fn leave_buffered(&mut self) -> Result<(), Violation> {
        if self.mode != Mode::Buffered {
            return Err(Violation::ModeChange);
        }
        self.mode = Mode::Combined;
        self.forced = 0;
        Ok(())
    }

    /// Records the sink's hint (REQ_PIPE), which is ignored in Buffered mode (draft section 6.1.2).
    pub(super) fn advise(&mut self, pipelined: bool) {
        if self.mode != Mode::Buffered {
            self.advised = pipelined;
        }
    }

    /// The mode that the sink's hints suggest, if it differs from the current one. A hint for Pipelined mode is
    /// followed when the program sends memory again.
    pub(super) fn preferred_mode(&self) -> Option<Mode> {
        let more = self.segments.iter().any(|s| matches!(s, Segment::Memory { in_messages: false, .. }));
        match self.mode {
            Mode::Combined if self.advised && more => Some(Mode::Pipelined),
            Mode::Combined if self.forced >= FORCED_TO_BUFFERED => Some(Mode::Buffered),
            Mode::Pipelined if self.forced >= FORCED_TO_COMBINED => Some(Mode::Combined),
            _ => None,
        }
    }

    /// Restarts after a suspension: no advertisement, Combined mode. The stream is unchanged.
    pub(super) fn start_again(&mut self) {
        self.mode = Mode::Combined;
        self.adverts.clear();
        self.owed = 0;
        self.cancel = Request::None;
        self.held.clear();
        if !seeded(Mistake::CountsSurviveSuspension) {
            self.potential_non_discards = 0;
        }
        self.leaving = None;
        self.forced = 0;
        self.advised = false;
    }

    /// Gives a piece of memory a new key.
    pub(super) fn rekey(&mut self, memory: u64, stag: u32) {
        for segment in &mut self.segments {
            if let Segment::Memory { id, piece, .. } = segment
                && *id == memory
            {
                piece.stag = stag;
            }
        }
    }
}

impl Segment {
    fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Memory { piece, .. } => u64::from(piece.len),
        }
    }
}
