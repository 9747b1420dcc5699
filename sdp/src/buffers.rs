//! Registered buffers of one connection: slots for messages that are sent, and receives.

use smallvec::SmallVec;
use xwarp_verbs::{
    Access, MemoryRegion, PostError, ProtectionDomain, QueuePair, RecvRequest, RegisterError, Sge,
};

/// Largest number of messages in the send queue.
pub(crate) const SEND_SLOTS: usize = 16;

/// Number of receives that are posted at a time without a list on the heap.
const USUAL: usize = 8;

/// The buffer of a completion, encoded in its `wr_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// A message from this slot.
    Send(usize),
    /// A receive: block and slot.
    Receive(usize, usize),
    Read,
    Write,
}

impl Work {
    pub(crate) fn wr_id(self) -> u64 {
        let (kind, block, slot) = match self {
            Self::Send(slot) => (0, 0, slot),
            Self::Receive(block, slot) => (1, block, slot),
            Self::Read => (2, 0, 0),
            Self::Write => (3, 0, 0),
        };
        (kind << 48) | ((block as u64) << 24) | slot as u64
    }

    pub(crate) fn of(wr_id: u64) -> Self {
        let (block, slot) = ((wr_id >> 24 & 0xff_ffff) as usize, (wr_id & 0xff_ffff) as usize);
        match wr_id >> 48 {
            0 => Self::Send(slot),
            1 => Self::Receive(block, slot),
            2 => Self::Read,
            _ => Self::Write,
        }
    }
}

/// Memory for messages that are sent. A slot is free again when its message was acknowledged.
#[derive(Debug)]
pub(crate) struct SendSlots {
    pub(crate) region: MemoryRegion,
    pub(crate) slot_bytes: usize,
    pub(crate) free: Vec<usize>,
}

impl SendSlots {
    pub(crate) fn new(pd: &ProtectionDomain, slot_bytes: usize) -> Result<Self, RegisterError> {
        let region = pd.allocate(SEND_SLOTS * slot_bytes, Access::empty())?;
        Ok(Self { region, slot_bytes, free: (0..SEND_SLOTS).collect() })
    }

    /// Whether no message is in the send queue.
    pub(crate) fn all_free(&self) -> bool {
        self.free.len() == SEND_SLOTS
    }
}

/// Receives of one size.
#[derive(Debug)]
struct Block {
    region: MemoryRegion,
    bytes: u32,
    slots: usize,
    free: Vec<usize>,
}

/// Memory for receives: blocks of slots, one size each.
#[derive(Debug, Default)]
pub(crate) struct Receives {
    blocks: Vec<Option<Block>>,
}

impl Receives {
    /// Posts `count` receives of `bytes` each.
    pub(crate) fn post(
        &mut self,
        pd: &ProtectionDomain,
        qp: &QueuePair,
        count: u16,
        bytes: u32,
    ) -> Result<(), PostError> {
        let mut pieces = SmallVec::<[(u64, [Sge; 1]); USUAL]>::new();
        for left in (1..=usize::from(count)).rev() {
            let Some((block, slot)) = self.take(pd, left, bytes) else { return Err(PostError::Unknown) };
            let Some(Some(Block { region, .. })) = self.blocks.get(block) else { continue };
            let piece = region.sge(slot * bytes as usize, bytes as usize);
            pieces.push((Work::Receive(block, slot).wr_id(), [piece]));
        }
        let requests: SmallVec<[_; USUAL]> =
            pieces.iter().map(|(wr_id, piece)| RecvRequest::new(*wr_id, piece)).collect();
        qp.post_recv_list(&requests).map_err(|error| error.source)
    }

    /// A free slot; allocates a block of `count` slots when there is none of this size.
    fn take(&mut self, pd: &ProtectionDomain, count: usize, bytes: u32) -> Option<(usize, usize)> {
        let fits = |block: &Option<Block>| {
            block.as_ref().is_some_and(|block| block.bytes == bytes && !block.free.is_empty())
        };
        if !self.blocks.iter().any(fits) {
            let region = pd.allocate(count * bytes as usize, Access::LOCAL_WRITE).ok()?;
            let block = Block { region, bytes, slots: count, free: (0..count).collect() };
            match self.blocks.iter_mut().find(|block| block.is_none()) {
                Some(place) => *place = Some(block),
                None => self.blocks.push(Some(block)),
            }
        }
        let index = self.blocks.iter().position(fits)?;
        let slot = self.blocks.get_mut(index)?.as_mut()?.free.pop()?;
        Some((index, slot))
    }

    /// Copies a received message to `out` and frees its slot. A block of a size that is no longer posted is dropped
    /// with its last message.
    pub(crate) fn complete(
        &mut self,
        block: usize,
        slot: usize,
        len: u32,
        post_bytes: u32,
        out: &mut Vec<u8>,
    ) {
        out.clear();
        let Some(place) = self.blocks.get_mut(block) else { return };
        let Some(known) = place.as_mut() else { return };
        out.resize(len.min(known.bytes) as usize, 0);
        if known.region.read(slot * known.bytes as usize, out).is_err() {
            out.clear();
        }
        known.free.push(slot);
        if known.bytes != post_bytes && known.free.len() == known.slots {
            *place = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_survives_its_number() {
        for work in [Work::Send(15), Work::Receive(3, 900), Work::Receive(0, 0), Work::Read, Work::Write] {
            assert_eq!(Work::of(work.wr_id()), work);
        }
    }
}
