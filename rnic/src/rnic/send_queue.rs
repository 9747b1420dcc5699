//! The send queue: work requests from posting to their in-order completion.

use std::{collections::VecDeque, ops::Range};

use xwarp_tcp::seq::StreamOffset;

use super::{
    attributes::PostError,
    work::{Operation, Payload, SendFlags, SgeList, WcStatus, WorkRequest},
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
    /// Allocated for `max_wr` requests with the first one, because most queue pairs of many are idle.
    entries: VecDeque<SendRequest>,
    /// Position of the first entry.
    head: Position,
    /// Position of the first entry that is not fully sent.
    pub(crate) next: Position,
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
            entries: VecDeque::new(),
            head: 0,
            next: 0,
            max_wr,
            max_sge,
            max_inline,
            arena: Box::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The next request to begin. Requests that were posted only to be flushed are never begun.
    #[inline]
    pub(crate) fn upcoming(&self) -> Option<&SendRequest> {
        self.get(self.next).filter(|entry| matches!(entry.progress, Progress::Posted))
    }

    /// Appends a request with its initial progress.
    pub(crate) fn post(&mut self, request: &WorkRequest<'_>, progress: Progress) -> Result<(), PostError> {
        if self.entries.len() >= self.max_wr as usize {
            return Err(PostError::QueueFull(self.max_wr));
        }
        let len = self.check_payload(request)?;
        let (mut payload, mut inline, mut memory) = (SgeList::new(), None, None);
        match request.payload {
            Payload::Gather(list) => payload = SgeList::from_slice(list),
            Payload::Piece(piece) => payload.push(piece),
            Payload::Memory(pieces) => memory = Some(pieces.into()),
            Payload::Inline(bytes) => {
                let slot = ((self.head + self.entries.len() as u64) % u64::from(self.max_wr)) as u32;
                let (slots, size) = (self.max_wr as usize, self.max_inline as usize);
                if self.arena.is_empty() {
                    self.arena = vec![0; slots * size].into_boxed_slice();
                }
                let at = slot as usize * size;
                if let Some(to) = self.arena.get_mut(at..at + bytes.len()) {
                    to.copy_from_slice(bytes);
                }
                inline = Some(slot);
            }
        }
        if self.entries.capacity() == 0 {
            self.entries.reserve_exact(self.max_wr as usize);
        }
        self.entries.push_back(SendRequest {
            wr_id: request.wr_id,
            operation: request.operation,
            flags: request.flags,
            payload,
            inline,
            memory,
            len,
            progress,
        });
        Ok(())
    }

    /// Bytes of the payload, if it is valid for the operation and the queue.
    fn check_payload(&self, request: &WorkRequest<'_>) -> Result<u32, PostError> {
        let (pieces, len) = match request.payload {
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
            (Operation::Send { .. } | Operation::Write { .. } | Operation::WriteImmediate { .. }, _) => true,
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

    pub(crate) fn get(&self, position: Position) -> Option<&SendRequest> {
        self.entries.get(usize::try_from(position.checked_sub(self.head)?).ok()?)
    }

    pub(crate) fn get_mut(&mut self, position: Position) -> Option<&mut SendRequest> {
        self.entries.get_mut(usize::try_from(position.checked_sub(self.head)?).ok()?)
    }

    /// Positions of the entries that were fully passed to the framing or completed without it.
    pub(crate) fn finished(&self) -> Range<Position> {
        self.head..self.next
    }

    /// The inline bytes of an entry.
    pub(crate) fn inline(&self, entry: &SendRequest) -> Option<&[u8]> {
        let at = entry.inline? as usize * self.max_inline as usize;
        self.arena.get(at..at + entry.len as usize)
    }

    /// Removes the first request if it is done; `acked` is the stream offset up to which the peer has acknowledged.
    #[inline]
    pub(crate) fn pop_done(&mut self, acked: StreamOffset) -> Option<(Summary, WcStatus)> {
        loop {
            let entry = self.entries.front()?;
            let status = match entry.progress {
                Progress::Sent(end) if end <= acked => WcStatus::Success,
                Progress::Done(status) => status,
                Progress::Posted | Progress::Sent(_) | Progress::Asked => return None,
                Progress::Overtook => {
                    self.pop();
                    continue;
                }
            };
            let summary = entry.summary();
            self.pop();
            return Some((summary, status));
        }
    }

    /// Removes the first requests as far as they have completed already.
    fn drop_overtaken(&mut self) {
        while self.entries.front().is_some_and(|entry| matches!(entry.progress, Progress::Overtook)) {
            self.pop();
        }
    }

    /// Removes the first request to flush it; its outcome is kept if it is already done.
    pub(crate) fn pop_flushed(&mut self) -> Option<(Summary, WcStatus)> {
        self.drop_overtaken();
        let entry = self.entries.front()?;
        let status = match entry.progress {
            Progress::Done(status) => status,
            _ => WcStatus::Flushed,
        };
        let summary = entry.summary();
        self.pop();
        Some((summary, status))
    }

    /// Removes the first request, if there is one. It is dropped in place, because moving it takes longer than
    /// completing it.
    #[inline]
    fn pop(&mut self) {
        if self.entries.pop_front().is_some() {
            self.head += 1;
            self.next = self.next.max(self.head);
        }
    }
}
