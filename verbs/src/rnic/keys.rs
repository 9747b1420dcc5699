//! The key table: which Steering Tag names which bytes, and who may do what with them (RFC 5042).

use std::collections::VecDeque;

use super::{
    QpId,
    attributes::Registration,
    work::{Access, PdId},
};
use crate::{
    ddp::{DdpError, STag, TaggedOffset},
    memory::Memory,
    rdmap::RdmapError,
};

/// Bits of a Steering Tag's index.
const INDEX_BITS: u32 = 24;
const HALF_BITS: u32 = INDEX_BITS / 2;
const HALF_MASK: u32 = (1 << HALF_BITS) - 1;

/// Freed places that rest before the oldest is used again: a tag shall return as late as possible (RFC 5042
/// section 6.1.1).
const RESTING: usize = 4096;

/// Why a key does not open a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// No region, or one whose remote rights were revoked.
    Unknown,
    /// A region of another protection domain or stream.
    Foreign,
    /// The region does not grant this.
    Access,
    /// Bytes outside of it.
    Bounds,
    /// Offset plus length exceed 64 bits.
    Wrap,
}

impl From<KeyError> for DdpError {
    /// RFC 5041 section 7.2. It has no number for a missing access right: the tag is then not valid *for this*.
    fn from(error: KeyError) -> Self {
        match error {
            KeyError::Unknown | KeyError::Access => Self::InvalidStag,
            KeyError::Foreign => Self::StagNotAssociated,
            KeyError::Bounds => Self::TaggedBounds,
            KeyError::Wrap => Self::ToWrap,
        }
    }
}

impl From<KeyError> for RdmapError {
    /// RFC 5040 section 4.8, Remote Protection Error.
    fn from(error: KeyError) -> Self {
        match error {
            KeyError::Unknown => Self::InvalidStag,
            KeyError::Foreign => Self::StagNotAssociated,
            KeyError::Access => Self::AccessRights,
            KeyError::Bounds => Self::Bounds,
            KeyError::Wrap => Self::ToWrap,
        }
    }
}

/// On whose behalf memory is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) pd: PdId,
    pub(crate) qp: QpId,
}

#[derive(Debug)]
struct Region {
    pd: PdId,
    stream: Option<QpId>,
    memory: Memory,
    access: Access,
    base: TaggedOffset,
    /// The peer's rights were invalidated. The owner's stand.
    revoked: bool,
}

#[derive(Debug)]
struct Slot {
    key: u8,
    region: Option<Region>,
}

/// Regions by Steering Tag.
#[derive(Debug)]
pub(crate) struct KeyTable {
    slots: Vec<Slot>,
    /// Places that were used, oldest first.
    free: VecDeque<u32>,
    limit: u32,
    live: u32,
    scramble: Scramble,
}

impl KeyTable {
    pub(crate) fn new(limit: u32, seed: u64) -> Self {
        Self {
            slots: Vec::new(),
            free: VecDeque::new(),
            // One place may fall on index 0, which no tag has.
            limit: limit.min((1 << INDEX_BITS) - 1),
            live: 0,
            scramble: Scramble::new(seed),
        }
    }

    /// Regions registered.
    pub(crate) fn len(&self) -> u32 {
        self.live
    }

    /// Registers a region; `None` when the table is full.
    pub(crate) fn insert(&mut self, registration: Registration) -> Option<STag> {
        let place = self.place()?;
        let slot = self.slots.get_mut(place as usize)?;
        let Registration { pd, memory, access, base, stream } = registration;
        slot.region = Some(Region { pd, stream, memory, access, base, revoked: false });
        self.live += 1;
        Some(STag::from_parts(self.scramble.index(place), slot.key))
    }

    fn place(&mut self) -> Option<u32> {
        if self.live >= self.limit {
            return None;
        }
        if self.free.len() > RESTING || self.slots.len() > self.limit as usize {
            return self.free.pop_front();
        }
        if self.scramble.index(self.slots.len() as u32) == 0 {
            self.slots.push(Slot { key: 0, region: None });
        }
        let place = self.slots.len() as u32;
        self.slots.push(Slot { key: self.scramble.first_key(place), region: None });
        Some(place)
    }

    fn slot_of(&self, stag: STag) -> Option<usize> {
        let place = self.scramble.place(stag.index()) as usize;
        self.slots.get(place).filter(|s| s.key == stag.key() && s.region.is_some()).map(|_| place)
    }

    fn region(&self, stag: STag) -> Option<&Region> {
        let place = self.slot_of(stag)?;
        self.slots.get(place)?.region.as_ref()
    }

    fn region_mut(&mut self, stag: STag) -> Option<&mut Region> {
        let place = self.slot_of(stag)?;
        self.slots.get_mut(place)?.region.as_mut()
    }

    /// Forgets a region: at once, for everybody. Returns its protection domain.
    pub(crate) fn remove(&mut self, stag: STag) -> Option<PdId> {
        let place = self.slot_of(stag)?;
        let slot = self.slots.get_mut(place)?;
        let region = slot.region.take()?;
        slot.key = slot.key.wrapping_add(1);
        self.free.push_back(place as u32);
        self.live -= 1;
        Some(region.pd)
    }

    /// The memory that `stag` opens to `user` for `need`, and where `offset` lies in it; all `len` bytes
    /// from there are in bounds. The checks are in the order of RFC 5040 section 7.2.
    pub(crate) fn open(
        &self,
        user: User,
        stag: STag,
        need: Access,
        offset: TaggedOffset,
        len: u64,
    ) -> Result<(&Memory, usize), KeyError> {
        let remote = need.intersects(Access::REMOTE);
        let region = self.region(stag).filter(|r| !(remote && r.revoked)).ok_or(KeyError::Unknown)?;
        if region.pd != user.pd || region.stream.is_some_and(|qp| qp != user.qp) {
            return Err(KeyError::Foreign);
        }
        if !region.access.contains(need) {
            return Err(KeyError::Access);
        }
        let end = offset.checked_add(len).ok_or(KeyError::Wrap)?;
        let start = offset.checked_sub(region.base).ok_or(KeyError::Bounds)?;
        if end - region.base > region.memory.len() as u64 {
            return Err(KeyError::Bounds);
        }
        Ok((&region.memory, usize::try_from(start).map_err(|_| KeyError::Bounds)?))
    }

    /// Revokes the peer's rights on a region at the peer's wish. `alone` says whether `user` is the only
    /// stream of its domain: the tag of a region that several streams share is nobody's to invalidate
    /// (RFC 5040 section 8.1.1, rule 7).
    pub(crate) fn invalidate_remotely(
        &mut self,
        user: User,
        stag: STag,
        alone: bool,
    ) -> Result<(), RdmapError> {
        let region = self.region_mut(stag).filter(|r| !r.revoked).ok_or(RdmapError::InvalidStag)?;
        let theirs = match region.stream {
            Some(stream) => stream == user.qp,
            None => alone,
        };
        if region.pd != user.pd || !theirs {
            return Err(RdmapError::CannotInvalidate);
        }
        region.revoked = true;
        Ok(())
    }

    /// Revokes the peer's rights on a region at the owner's wish; done already is fine.
    pub(crate) fn invalidate_locally(&mut self, pd: PdId, stag: STag) -> Result<(), KeyError> {
        let region = self.region_mut(stag).ok_or(KeyError::Unknown)?;
        if region.pd != pd {
            return Err(KeyError::Foreign);
        }
        region.revoked = true;
        Ok(())
    }
}

/// Spreads places over all indices in an order that only the seed tells (RFC 5040 section 8.1.1, rule 8): a
/// small Feistel network, so that a tag leads back to its place without a search.
#[derive(Debug)]
struct Scramble {
    rounds: [u32; 4],
}

impl Scramble {
    fn new(seed: u64) -> Self {
        let mut state = seed;
        Self {
            rounds: std::array::from_fn(|_| {
                // SplitMix64: seeds that differ in one bit give unrelated rounds.
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                (z ^ (z >> 31)) as u32
            }),
        }
    }

    fn index(&self, place: u32) -> u32 {
        let (left, right) =
            self.rounds.iter().fold((place >> HALF_BITS, place & HALF_MASK), |(left, right), key| {
                (right, left ^ mix(right, *key))
            });
        left << HALF_BITS | right
    }

    fn place(&self, index: u32) -> u32 {
        let (left, right) =
            self.rounds.iter().rev().fold((index >> HALF_BITS, index & HALF_MASK), |(left, right), key| {
                (right ^ mix(left, *key), left)
            });
        left << HALF_BITS | right
    }

    fn first_key(&self, place: u32) -> u8 {
        let [first, ..] = self.rounds;
        mix(place.rotate_left(7), first) as u8
    }
}

fn mix(half: u32, key: u32) -> u32 {
    let x = (half ^ key).wrapping_mul(0x9e37_79b1);
    (x ^ (x >> 15)).wrapping_mul(0x85eb_ca6b) >> (32 - HALF_BITS)
}
