//! The send queue: work requests from posting to their in-order completion.

use std::ops::Range;

use xwarp_tcp::seq::StreamOffset;

use super::{
    attributes::PostError,
    slots::Slots,
    work::{Operation, Payload, SendFlags, Sge, SgeList, WcStatus, WorkRequest},
};
use crate::memory::Memory;

/// Progress of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Not yet fully passed to the framing.
    Posted,
    /// Fully sent; done when the peer's TCP has acknowledged the stream up to this offset.
    Sent(StreamOffset),
    /// The Read or Atomic Request was sent; its response is outstanding.
    Asked,
    /// Done or failed, with this outcome.
    Done(WcStatus),
    /// Done, and completed before earlier requests.
    Overtook,
}

/// A work request in the queue.
#[derive(Debug)]
pub(crate) struct SendRequest {
    pub(crate) wr_id: u64,
    pub(crate) operation: Operation,
    pub(crate) flags: SendFlags,
    pub(crate) payload: SgeList,
    /// Slot of the inline arena that holds the payload.
    pub(crate) inline: Option<u32>,
    /// Memory of a fast registration.
    pub(crate) memory: Option<Box<[Memory]>>,
    pub(crate) len: u32,
    pub(crate) progress: Progress,
}

/// The data for the completion of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Summary {
    pub(crate) wr_id: u64,
    pub(crate) operation: Operation,
    pub(crate) flags: SendFlags,
    pub(crate) len: u32,
    /// It completes before requests that were posted before it.
    pub(crate) overtook: bool,
}

impl SendRequest {
    /// What a slot holds before its first request.
    fn unused() -> Self {
        Self {
            wr_id: 0,
            operation: Operation::Send { invalidate: None },
            flags: SendFlags::empty(),
            payload: SgeList::new(),
            inline: None,
            memory: None,
            len: 0,
            progress: Progress::Posted,
        }
    }

    pub(crate) fn summary(&self) -> Summary {
        let Self { wr_id, operation, flags, len, .. } = *self;
        Summary { wr_id, operation, flags, len, overtook: false }
    }
}

/// A position in the queue that stays the same while earlier requests complete.
pub(crate) type Position = u64;

/// A send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    /// Allocated with the first request, because most queue pairs of many are idle.
    slots: Slots<SendRequest>,
    /// Position of the first entry.
    head: Position,
    /// Position of the first entry that is not fully sent.
    pub(crate) next: Position,
    /// Number of entries.
    len: u32,
    max_wr: u32,
    max_sge: u32,
    max_inline: u32,
    /// `max_wr` slots of `max_inline` bytes. An entry's slot is its position modulo `max_wr`. Empty before the first
    /// inline payload.
    arena: Box<[u8]>,
}

impl SendQueue {
    pub(crate) fn new(max_wr: u32, max_sge: u32, max_inline: u32) -> Self {
        Self {
            slots: Slots::new(max_wr),
            head: 0,
            next: 0,
            len: 0,
            max_wr,
            max_sge,
            max_inline,
            arena: Box::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Position of the next entry to be posted.
    #[inline]
    fn tail(&self) -> Position {
        self.head + u64::from(self.len)
    }

    /// The next request to begin. Requests that were posted only to be flushed are never begun.
    #[inline]
    pub(crate) fn upcoming(&self) -> Option<&SendRequest> {
        self.get(self.next).filter(|entry| matches!(entry.progress, Progress::Posted))
    }

    /// Appends a request with its initial progress.
    #[expect(clippy::inline_always, reason = "the caller of nearly all requests passes a constant")]
    #[inline(always)]
    pub(crate) fn post(&mut self, request: &WorkRequest<'_>, progress: Progress) -> Result<(), PostError> {
        let (position, max_wr) = (self.tail(), self.max_wr);
        if self.len >= max_wr {
            return Err(PostError::QueueFull(max_wr));
        }
        let len = self.check_payload(request)?;
        let Some(entry) = self.slots.claim(position, SendRequest::unused) else {
            return Err(PostError::QueueFull(max_wr));
        };
        entry.wr_id = request.wr_id;
        entry.operation = request.operation;
        entry.flags = request.flags;
        entry.inline = None;
        entry.len = len;
        entry.progress = progress;
        self.len += 1;
        if let Payload::Piece(piece) = request.payload {
            entry.payload.set(&[piece]);
        } else {
            self.keep_payload(position, request.payload);
        }
        Ok(())
    }

    /// Whether [`Self::post`] would append `request` behind `others` further ones.
    pub(crate) fn check(&self, request: &WorkRequest<'_>, others: u32) -> Result<(), PostError> {
        if self.len.saturating_add(others) >= self.max_wr {
            return Err(PostError::QueueFull(self.max_wr));
        }
        self.check_payload(request).map(|_| ())
    }

    /// Puts a payload into the entry at `position`.
    #[inline(never)]
    fn keep_payload(&mut self, position: Position, payload: Payload<'_>) {
        let slot = (position % u64::from(self.max_wr)) as u32;
        let Some(entry) = self.get_mut(position) else { return };
        entry.payload.set(payload.pieces());
        match payload {
            Payload::Piece(_) | Payload::Gather(_) => {}
            Payload::Memory(pieces) => entry.memory = Some(pieces.into()),
            Payload::Inline(bytes) => {
                entry.inline = Some(slot);
                self.keep_inline(slot, bytes);
            }
        }
    }

    /// Copies a payload to a slot of the arena.
    fn keep_inline(&mut self, slot: u32, bytes: &[u8]) {
        let (slots, size) = (self.max_wr as usize, self.max_inline as usize);
        if self.arena.is_empty() {
            self.arena = vec![0; slots * size].into_boxed_slice();
        }
        let at = slot as usize * size;
        if let Some(to) = self.arena.get_mut(at..at + bytes.len()) {
            to.copy_from_slice(bytes);
        }
    }

    /// Bytes of the payload, if it is valid for the operation and the queue.
    #[inline]
    fn check_payload(&self, request: &WorkRequest<'_>) -> Result<u32, PostError> {
        match (&request.operation, request.payload) {
            (Operation::Send { .. } | Operation::Write { .. }, Payload::Piece(piece))
                if self.max_sge > 0 && !piece.is_too_long() =>
            {
                Ok(piece.len)
            }
            _ => self.check_other_payload(request),
        }
    }

    #[inline(never)]
    fn check_other_payload(&self, request: &WorkRequest<'_>) -> Result<u32, PostError> {
        let (pieces, len) = match request.payload {
            Payload::Piece(piece) if piece.is_too_long() => return Err(PostError::MessageTooLong),
            Payload::Gather(list) if list.iter().any(Sge::is_too_long) => {
                return Err(PostError::MessageTooLong);
            }
            Payload::Piece(piece) => (1, u64::from(piece.len)),
            Payload::Gather(list) => (list.len(), list.iter().map(|s| u64::from(s.len)).sum()),
            Payload::Inline(bytes) if bytes.len() > self.max_inline as usize => {
                return Err(PostError::InlineTooLong(self.max_inline));
            }
            Payload::Inline(bytes) => (0, bytes.len() as u64),
            Payload::Memory(_) => (0, 0),
        };
        if pieces > self.max_sge as usize {
            return Err(PostError::TooManyPieces(self.max_sge));
        }
        let len = u32::try_from(len).map_err(|_| PostError::MessageTooLong)?;
        let fits = match (request.operation, request.payload) {
            (Operation::FastRegister { .. }, payload) => matches!(payload, Payload::Memory(_)),
            (_, Payload::Memory(_)) => false,
            (
                Operation::Send { .. }
                | Operation::SendImmediate { .. }
                | Operation::Write { .. }
                | Operation::WriteImmediate { .. },
                _,
            ) => true,
            (
                Operation::Immediate { .. }
                | Operation::LocalInvalidate { .. }
                | Operation::BindWindow { .. },
                _,
            ) => len == 0,
            (_, Payload::Inline(_)) => false,
            (Operation::Read { .. }, _) => pieces == 1 || len == 0 && pieces == 0,
            (Operation::FetchAdd { .. } | Operation::CompareSwap { .. }, _) => pieces == 1 && len == 8,
        };
        if fits { Ok(len) } else { Err(PostError::Payload) }
    }

    #[inline]
    fn holds(&self, position: Position) -> bool {
        position.wrapping_sub(self.head) < u64::from(self.len)
    }

    #[inline]
    pub(crate) fn get(&self, position: Position) -> Option<&SendRequest> {
        if self.holds(position) { self.slots.get(position) } else { None }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, position: Position) -> Option<&mut SendRequest> {
        if self.holds(position) { self.slots.get_mut(position) } else { None }
    }

    /// Positions of the entries that were fully passed to the framing or completed without it.
    pub(crate) fn finished(&self) -> Range<Position> {
        self.head..self.next
    }

    /// The first entry that is not fully sent, and its inline bytes if it has them.
    #[inline]
    pub(crate) fn get_to_send(&mut self) -> Option<(&mut SendRequest, Option<&[u8]>)> {
        if !self.holds(self.next) {
            return None;
        }
        let entry = self.slots.get_mut(self.next)?;
        let inline = entry.inline.and_then(|slot| {
            let at = slot as usize * self.max_inline as usize;
            self.arena.get(at..at + entry.len as usize)
        });
        Some((entry, inline))
    }

    /// The first request.
    #[inline]
    pub(crate) fn first(&self) -> Option<&SendRequest> {
        self.get(self.head)
    }

    /// Removes the first request if it is done; `acked` is the stream offset up to which the peer has acknowledged.
    pub(crate) fn pop_done(&mut self, acked: StreamOffset) -> Option<(Summary, WcStatus)> {
        self.drop_overtaken();
        match self.first()?.progress {
            Progress::Sent(end) if end <= acked => Some((self.pop()?, WcStatus::Success)),
            Progress::Done(status) => Some((self.pop()?, status)),
            _ => None,
        }
    }

    /// Removes the first requests as far as they have completed already.
    fn drop_overtaken(&mut self) {
        while self.first().is_some_and(|entry| matches!(entry.progress, Progress::Overtook)) {
            self.pop();
        }
    }

    /// Removes the first request to flush it; its outcome is kept if it is already done.
    pub(crate) fn pop_flushed(&mut self) -> Option<(Summary, WcStatus)> {
        self.drop_overtaken();
        let status = match self.first()?.progress {
            Progress::Done(status) => status,
            _ => WcStatus::Flushed,
        };
        Some((self.pop()?, status))
    }

    /// Removes the first request, if there is one.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Summary> {
        let entry = self.get_mut(self.head)?;
        // A fast registration that was not executed. Nothing else in the slot has to be dropped.
        if entry.memory.is_some() {
            entry.memory = None;
        }
        let summary = entry.summary();
        self.head += 1;
        self.len -= 1;
        self.next = self.next.max(self.head);
        Some(summary)
    }
}
