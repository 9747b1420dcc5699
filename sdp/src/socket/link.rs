//! Resources of the device that a connection uses, and the work requests of the machine's actions.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use xwarp_verbs::{
    CompletionQueue, MemoryRegion, Payload, ProtectionDomain, QueuePair, Remote, STag, WorkRequest, cm::CmId,
};

use crate::{
    buffers::{Receives, SendSlots, Work},
    machine::Action,
    wire::Advert,
};

/// Largest number of RDMA Writes and Reads in the send queue beside messages.
pub(crate) const MAX_RDMA: usize = 8;

/// Resources of the device that a connection uses, dropped when the connection has ended.
pub(crate) struct Link {
    // Dropped first: it disconnects what the queue pair would reset.
    pub(crate) id: CmId,
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) pd: ProtectionDomain,
    pub(crate) slots: SendSlots,
    pub(crate) receives: Receives,
    /// RDMA Reads and Writes in the send queue.
    pub(crate) rdma: usize,
    /// Number of posted and of completed RDMA Writes, which complete in order.
    pub(crate) writes_posted: u64,
    pub(crate) writes_done: u64,
    /// Messages may be posted.
    pub(crate) established: bool,
    /// Reset when all messages are acknowledged, at this time at the latest.
    pub(crate) reset_at: Option<Instant>,
    /// The peer has suspended the connection, which continues at this port of the peer.
    pub(crate) moving: Option<u16>,
    /// Memory of the program that is being sent and received, by its identifiers.
    pub(crate) sends: BTreeMap<u64, MemoryRegion>,
    pub(crate) wants: BTreeMap<u64, MemoryRegion>,
    /// Memory that was sent by RDMA Writes, oldest first: its identifier, and how many Writes must be complete before it is free.
    pub(crate) written: VecDeque<(u64, u64, MemoryRegion)>,
}

impl Link {
    /// An RDMA Write is complete: frees the memory whose Writes are all complete.
    pub(super) fn write_done(&mut self) {
        self.writes_done += 1;
        while self.written.front().is_some_and(|(_, most, _)| *most <= self.writes_done) {
            self.written.pop_front();
        }
    }

    /// Whether sent memory is free again.
    pub(crate) fn is_sent(&self, id: u64) -> bool {
        !self.sends.contains_key(&id) && self.written.iter().all(|(written, ..)| *written != id)
    }

    pub(super) fn execute(&mut self, action: &Action, bytes: &mut Vec<u8>) -> Result<(), String> {
        match *action {
            Action::PostReceives { count, bytes } => {
                self.receives.post(&self.pd, &self.qp, count, bytes).map_err(|e| e.to_string())
            }
            Action::Send { memory, solicited, invalidate } => {
                if let Some(piece) = memory {
                    self.append_memory(piece, bytes)?;
                }
                self.send(bytes, solicited, invalidate)
            }
            Action::Read { remote, local } => {
                let request = WorkRequest::read(Work::Read.wr_id(), sge(local), place(remote)).signaled();
                self.rdma += 1;
                self.qp.post_send(&request).map_err(|e| e.to_string())
            }
            Action::Write { local, remote } => {
                let request = WorkRequest::write(Work::Write.wr_id(), sge(local), place(remote)).signaled();
                self.rdma += 1;
                self.writes_posted += 1;
                self.qp.post_send(&request).map_err(|e| e.to_string())
            }
            Action::Reconnect { port } => {
                self.moving = Some(port);
                Ok(())
            }
            Action::Disconnect => self.id.disconnect().map_err(|e| e.to_string()),
            Action::Reset { flush: true } => {
                self.reset_at = Some(Instant::now() + Duration::from_secs(2));
                Ok(())
            }
            Action::Reset { flush: false } => self.qp.abort().map_err(|e| e.to_string()),
        }
    }

    /// Appends a piece of the program's memory to a message.
    fn append_memory(&self, piece: Advert, bytes: &mut Vec<u8>) -> Result<(), String> {
        let region = self.sends.values().find(|region| region.key().value() == piece.stag);
        let region = region.ok_or("memory is gone")?;
        let copied = region.to_vec(piece.offset as usize, piece.len as usize).map_err(|e| e.to_string())?;
        bytes.extend(copied);
        Ok(())
    }

    fn send(&mut self, bytes: &[u8], solicited: bool, invalidate: Option<u32>) -> Result<(), String> {
        let slot = self.slots.free.pop().ok_or("no slot")?;
        let at = slot * self.slots.slot_bytes;
        self.slots.region.write(at, bytes).map_err(|e| e.to_string())?;
        let payload = Payload::Piece(self.slots.region.sge(at, bytes.len()));
        let wr_id = Work::Send(slot).wr_id();
        let request = match invalidate {
            Some(key) => WorkRequest::send_with_invalidate(wr_id, payload, STag::new(key)),
            None => WorkRequest::send(wr_id, payload),
        };
        let request = request.signaled();
        let request = if solicited { request.solicited() } else { request };
        self.qp.post_send(&request).map_err(|e| e.to_string())
    }
}

fn sge(piece: Advert) -> xwarp_verbs::Sge {
    xwarp_verbs::Sge { key: STag::new(piece.stag), offset: piece.offset, len: piece.len }
}

fn place(piece: Advert) -> Remote {
    Remote { key: STag::new(piece.stag), offset: piece.offset }
}
