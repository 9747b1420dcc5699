//! Finds the work request that a peer's Terminate blames.
//!
//! The peer may quote the header of the faulty segment in its Terminate (RFC 5040 section 7.1). The request that sent
//! this segment completes with a remote error; all other requests are flushed.

use super::{
    qp::{AskedKind, Current, QueuePair},
    send_queue::{Position, Progress},
    work::{Operation, Remote, WcStatus},
};
use crate::{
    ddp::{Header, Msn, Queue, Tagged, TaggedOffset, Untagged},
    rdmap::{Control, LAYER_RDMA, MessageType, ReadRequest, TerminateHeader},
};

/// Error Type of a Remote Protection Error, in the layer RDMA (RFC 5040 figure 9).
const REMOTE_PROTECTION: u8 = 1;

impl QueuePair {
    /// Fails the request that `terminate` quotes, if it has not completed.
    pub(super) fn blame(&mut self, terminate: &TerminateHeader) {
        let quoted = terminate.ddp_header.and_then(|raw| raw.header());
        let position = match (terminate.rdma_header, quoted) {
            (Some(request), _) => self.position_of_read(&request),
            (None, Some(Header::Tagged(header))) => self.position_of_write(&header),
            (None, Some(Header::Untagged(header))) => self.position_of_message(&header),
            (None, None) => None,
        };
        // The numbers alone do not decide: Linux's siw exchanges layer and type (decision 8). A Read Request is
        // quoted for protection errors only (figure 10), and an error in a tagged segment can only be in its tag.
        let is_protection = terminate.rdma_header.is_some()
            || matches!(quoted, Some(Header::Tagged(_)))
            || (terminate.layer, terminate.error_type) == (LAYER_RDMA, REMOTE_PROTECTION);
        let status = if is_protection { WcStatus::RemoteAccess } else { WcStatus::RemoteOperation };
        if let Some(entry) = position.and_then(|p| self.sq.get_mut(p))
            && !matches!(entry.progress, Progress::Done(_) | Progress::Overtook)
        {
            entry.progress = Progress::Done(status);
        }
    }

    fn position_of_read(&self, quoted: &ReadRequest) -> Option<Position> {
        self.rx.asked.iter().find_map(|asked| match asked.kind {
            AskedKind::Read { sink, to, len, .. } => {
                // The quoted request is advanced by the bytes that were answered, so its end has not changed.
                let end = |to: TaggedOffset, len: u32| to.wrapping_add(u64::from(len));
                let same = sink == quoted.sink_stag
                    && quoted.len <= len
                    && end(to, len) == end(quoted.sink_to, quoted.len);
                asked.position.filter(|_| same)
            }
            AskedKind::Atomic { .. } => None,
        })
    }

    /// Position of the oldest RDMA Write in the queue whose target contains the segment.
    fn position_of_write(&self, header: &Tagged) -> Option<Position> {
        if Control::parse(header.control, self.versions).ok()?.message != MessageType::Write {
            return None;
        }
        self.begun().find(|position| {
            self.sq.get(*position).is_some_and(|entry| match entry.operation {
                Operation::Write { remote: Remote { key, offset } }
                | Operation::WriteImmediate { remote: Remote { key, offset }, .. } => {
                    let within = header.to.checked_sub(offset);
                    key == header.stag
                        && within.is_some_and(|at| at < u64::from(entry.len) || at == 0 && entry.len == 0)
                }
                _ => false,
            })
        })
    }

    fn position_of_message(&self, header: &Untagged) -> Option<Position> {
        match Queue::from_number(header.queue)? {
            Queue::Send => self.position_of_send(header.msn),
            Queue::Request => {
                let from_the_newest = self.tx.request_msn.ahead_of(header.msn)? as usize;
                let index = self.rx.asked.len().checked_sub(from_the_newest)?;
                self.rx.asked.get(index)?.position
            }
            Queue::Terminate | Queue::AtomicResponse => None,
        }
    }

    /// Position of the Send or Immediate Data with sequence number `msn`. [`super::qp::Transmitter::send_msn`] is the
    /// number of the next message to finish; part of that message may already be sent.
    fn position_of_send(&self, msn: Msn) -> Option<Position> {
        let takes_msn = |position: &Position| {
            self.sq.get(*position).is_some_and(|entry| {
                matches!(
                    entry.operation,
                    Operation::Send { .. }
                        | Operation::SendImmediate { .. }
                        | Operation::Immediate { .. }
                        | Operation::WriteImmediate { .. }
                )
            })
        };
        match self.tx.send_msn.ahead_of(msn)? {
            0 => self.current_position().filter(takes_msn),
            behind => self.sq.finished().rev().filter(takes_msn).nth(behind as usize - 1),
        }
    }

    /// Positions of the requests that were at least partly sent, oldest first.
    fn begun(&self) -> impl Iterator<Item = Position> + '_ {
        self.sq.finished().chain(self.current_position())
    }

    fn current_position(&self) -> Option<Position> {
        match self.tx.current? {
            Current::Request { .. } | Current::Immediate { .. } => Some(self.sq.next),
            Current::Rtr(_) | Current::Response => None,
        }
    }
}
