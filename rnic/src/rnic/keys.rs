//! The key table: maps each Steering Tag to bytes of memory and to the access rights of its users (RFC 5042).
//!
//! A tag names one of three objects: a region that a verb registered, valid until it is deregistered; a fast region,
//! whose memory is registered and invalidated by work requests; a window (type 2 of the verbs), which gives one peer
//! access to a part of a region between its binding and its invalidation.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    hash::{BuildHasherDefault, Hasher},
};

use rand::{RngCore as _, rngs::StdRng};
use xwarp_tcp::secret::Secret;

use super::{
    Limits, QpId,
    attributes::Registration,
    pieces::{Extent, Stretches},
    work::{Access, Binding, PdId},
};
use crate::{
    ddp::{DdpError, STag, TaggedOffset},
    memory::Memory,
    rdmap::RdmapError,
};

/// Largest number of regions, and of windows. Together they take at most half of the 2^24 indices, so that few random
/// draws find an unused index.
const MOST_KEYS: u32 = 1 << 22;

/// Freed indices that are kept unused before the oldest is reused: a tag should return as late as possible (RFC 5042
/// section 6.1.1).
const RESTING: usize = 4096;

/// Why a key gives no access to a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// The key names no object, or one that peers cannot use (any more).
    Unknown,
    /// The object belongs to another protection domain or stream.
    Foreign,
    /// The object does not grant this access.
    Access,
    /// Some bytes lie outside of the object.
    Bounds,
    /// Offset plus length exceed 64 bits.
    Wrap,
}

impl From<KeyError> for DdpError {
    /// RFC 5041 section 7.2. It defines no code for a missing access right: the tag counts as invalid for this
    /// access.
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

/// Why a work request that manages memory (binding, fast registration, local invalidation) is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ManagementError {
    #[error("no such key, or not one of this kind")]
    Unknown,
    #[error("the key belongs to another protection domain or queue pair")]
    Foreign,
    #[error("the key is in use: bound or registered already, or windows are bound to it")]
    InUse,
    #[error("the region does not grant this access")]
    Access,
    #[error("bytes outside of the region, no bytes at all, or more pieces than the key was created for")]
    Bounds,
}

/// The queue pair on whose behalf memory is accessed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) pd: PdId,
    pub(crate) qp: QpId,
}

/// The bytes of a region or of a valid fast region.
#[derive(Debug)]
struct Mapping {
    /// Never reused: a window that outlives the mapping finds that it is gone.
    number: u64,
    extent: Extent,
    access: Access,
    base: TaggedOffset,
    /// Number of windows bound to it.
    windows: u32,
}

/// The bytes that a bound window gives access to.
#[derive(Debug, Clone, Copy)]
struct Bound {
    /// The index and the mapping of the region.
    region: (u32, u64),
    /// Offset of the window's first byte in the region's bytes.
    start: u64,
    len: u64,
    access: Access,
    base: TaggedOffset,
    /// The only stream that may use the window.
    stream: QpId,
}

#[derive(Debug)]
enum Object {
    Region {
        mapping: Mapping,
        /// The remote rights were invalidated; the local rights remain.
        revoked: bool,
    },
    /// `None`: invalid, until a work request registers memory.
    Fast { max_pieces: u32, mapping: Option<Mapping> },
    /// `None`: not bound.
    Window(Option<Bound>),
}

impl Object {
    fn mapping(&self) -> Option<&Mapping> {
        match self {
            Self::Region { mapping, .. } => Some(mapping),
            Self::Fast { mapping, .. } => mapping.as_ref(),
            Self::Window(_) => None,
        }
    }

    fn mapping_mut(&mut self) -> Option<&mut Mapping> {
        match self {
            Self::Region { mapping, .. } => Some(mapping),
            Self::Fast { mapping, .. } => mapping.as_mut(),
            Self::Window(_) => None,
        }
    }

    fn is_window(&self) -> bool {
        matches!(self, Self::Window(_))
    }

    fn windows(&self) -> u32 {
        self.mapping().map_or(0, |mapping| mapping.windows)
    }
}

#[derive(Debug)]
struct KeyedObject {
    pd: PdId,
    /// The only stream that may use a region, if it is limited to one.
    limited_to: Option<QpId>,
    object: Object,
}

impl KeyedObject {
    /// The only stream that may use the object now, if it is limited to one.
    fn stream(&self) -> Option<QpId> {
        match &self.object {
            Object::Window(bound) => bound.map(|bound| bound.stream),
            Object::Region { .. } | Object::Fast { .. } => self.limited_to,
        }
    }

    /// Whether `user` is in the object's domain, and is its stream if the object is limited to one.
    fn is_for(&self, user: User) -> bool {
        self.pd == user.pd && self.stream().is_none_or(|stream| stream == user.qp)
    }

    fn is_open_to_peers(&self) -> bool {
        match &self.object {
            Object::Region { revoked, .. } => !revoked,
            Object::Fast { mapping, .. } => mapping.is_some(),
            Object::Window(bound) => bound.is_some(),
        }
    }
}

/// The bytes that a tag gives access to: `len` bytes from byte `start` of `extent`. The first has the tagged offset
/// `base`.
struct View<'k> {
    extent: &'k Extent,
    start: u64,
    len: u64,
    base: TaggedOffset,
    access: Access,
}

#[derive(Debug)]
struct TagSlot {
    key: u8,
    entry: Option<KeyedObject>,
}

/// Regions and windows by Steering Tag.
#[derive(Debug)]
pub(crate) struct KeyTable {
    /// Slots by the tag's index.
    slots: SlotsByIndex,
    /// Freed indices, oldest first.
    free: VecDeque<u32>,
    max_regions: u32,
    max_windows: u32,
    regions: u32,
    windows: u32,
    next_mapping: u64,
    /// Indices of bound windows, by the stream that may use them.
    bound: BTreeMap<QpId, BTreeSet<u32>>,
    /// Draws indices and first keys, so that tags cannot be predicted from earlier ones (RFC 5040 section 8.1.1, rule
    /// 8).
    rng: StdRng,
}

impl KeyTable {
    pub(crate) fn new(limits: &Limits, secret: &Secret) -> Self {
        Self {
            slots: SlotsByIndex::default(),
            free: VecDeque::new(),
            max_regions: limits.max_mr.min(MOST_KEYS),
            max_windows: limits.max_mw.min(MOST_KEYS),
            regions: 0,
            windows: 0,
            next_mapping: 0,
            bound: BTreeMap::new(),
            rng: secret.rng(),
        }
    }

    /// Number of regions, including fast regions.
    pub(crate) fn regions(&self) -> u32 {
        self.regions
    }

    /// Registers a region; `None` when the limit is reached.
    pub(crate) fn insert_region(&mut self, registration: Registration) -> Option<STag> {
        let Registration { pd, memory, access, base, stream } = registration;
        let mapping = self.mapping([memory].into_iter().collect(), access, base);
        self.insert(KeyedObject {
            pd,
            limited_to: stream,
            object: Object::Region { mapping, revoked: false },
        })
    }

    /// Creates an invalid fast region; `None` when the limit is reached.
    pub(crate) fn insert_fast_region(
        &mut self,
        pd: PdId,
        max_pieces: u32,
        limited_to: Option<QpId>,
    ) -> Option<STag> {
        self.insert(KeyedObject { pd, limited_to, object: Object::Fast { max_pieces, mapping: None } })
    }

    /// Creates an unbound window; `None` when the limit is reached.
    pub(crate) fn insert_window(&mut self, pd: PdId) -> Option<STag> {
        self.insert(KeyedObject { pd, limited_to: None, object: Object::Window(None) })
    }

    fn mapping(&mut self, extent: Extent, access: Access, base: TaggedOffset) -> Mapping {
        self.next_mapping += 1;
        Mapping { number: self.next_mapping, extent, access, base, windows: 0 }
    }

    fn insert(&mut self, entry: KeyedObject) -> Option<STag> {
        let (count, most) = match entry.object {
            Object::Window(_) => (&mut self.windows, self.max_windows),
            Object::Region { .. } | Object::Fast { .. } => (&mut self.regions, self.max_regions),
        };
        if *count >= most {
            return None;
        }
        *count += 1;
        let index = self.vacant();
        let slot = self.slots.get_mut(&index)?;
        slot.entry = Some(entry);
        Some(STag::from_parts(index, slot.key))
    }

    /// The index of a slot without an entry: the oldest freed one when more than [`RESTING`] are free, else a new
    /// random one.
    fn vacant(&mut self) -> u32 {
        if self.free.len() > RESTING
            && let Some(index) = self.free.pop_front()
        {
            return index;
        }
        loop {
            let tag = STag::new(self.rng.next_u32());
            // Some faulty peers treat index 0 as special, so no tag of ours has it.
            if tag.index() != 0 && !self.slots.contains_key(&tag.index()) {
                self.slots.insert(tag.index(), TagSlot { key: tag.key(), entry: None });
                return tag.index();
            }
        }
    }

    fn entry(&self, stag: STag) -> Option<&KeyedObject> {
        self.slots.get(&stag.index()).filter(|slot| slot.key == stag.key())?.entry.as_ref()
    }

    fn entry_mut(&mut self, stag: STag) -> Option<&mut KeyedObject> {
        self.slots.get_mut(&stag.index()).filter(|slot| slot.key == stag.key())?.entry.as_mut()
    }

    /// Number of windows bound to a region; `None` when the region does not exist.
    pub(crate) fn bound_windows(&self, stag: STag) -> Option<u32> {
        let slot = self.slots.get(&stag.index())?;
        let object = &slot.entry.as_ref()?.object;
        match object {
            Object::Region { .. } if slot.key != stag.key() => None,
            Object::Region { .. } | Object::Fast { .. } => Some(object.windows()),
            Object::Window(_) => None,
        }
    }

    /// Removes a region at once; windows that are bound to it give no access any more. Only the index of a fast
    /// region's tag is compared, because its owner chooses the key. Returns the protection domain.
    pub(crate) fn remove_region(&mut self, stag: STag) -> Option<PdId> {
        self.bound_windows(stag)?;
        self.regions -= 1;
        self.remove(stag.index())
    }

    /// Removes a window, bound or not. Only the index of the tag is compared, because the owner chooses the key.
    /// Returns the protection domain.
    pub(crate) fn remove_window(&mut self, stag: STag) -> Option<PdId> {
        let index = stag.index();
        self.slots.get(&index)?.entry.as_ref().filter(|entry| entry.object.is_window())?;
        self.close(index);
        self.windows -= 1;
        self.remove(index)
    }

    fn remove(&mut self, index: u32) -> Option<PdId> {
        let slot = self.slots.get_mut(&index)?;
        let entry = slot.entry.take()?;
        slot.key = slot.key.wrapping_add(1);
        self.free.push_back(index);
        Some(entry.pd)
    }

    /// The `len` bytes from `offset` of `stag`, if `user` has access `need` to all of them.
    pub(crate) fn open(
        &self,
        user: User,
        stag: STag,
        need: Access,
        offset: TaggedOffset,
        len: u64,
    ) -> Result<Stretches<'_>, KeyError> {
        let (extent, start) = self.find(user, stag, need, offset, len)?;
        Ok(extent.stretches(start, len))
    }

    /// The bytes that contain the `len` bytes from `offset` of `stag`, and the position of the first of these, if `user`
    /// has access `need` to all of them. The checks are in the order of RFC 5040 section 7.2.
    #[inline]
    pub(crate) fn find(
        &self,
        user: User,
        stag: STag,
        need: Access,
        offset: TaggedOffset,
        len: u64,
    ) -> Result<(&Extent, u64), KeyError> {
        let remote = need.intersects(Access::REMOTE);
        let entry =
            self.entry(stag).filter(|entry| !remote || entry.is_open_to_peers()).ok_or(KeyError::Unknown)?;
        let view = self.view(entry).ok_or(KeyError::Unknown)?;
        if !entry.is_for(user) {
            return Err(KeyError::Foreign);
        }
        // A window serves remote accesses only; local accesses use the region.
        if !view.access.contains(need) || !remote && entry.object.is_window() {
            return Err(KeyError::Access);
        }
        let end = offset.checked_add(len).ok_or(KeyError::Wrap)?;
        let start = offset.checked_sub(view.base).ok_or(KeyError::Bounds)?;
        if end - view.base > view.len {
            return Err(KeyError::Bounds);
        }
        Ok((view.extent, view.start + start))
    }

    /// The bytes that an entry gives access to; `None` while it is invalid or unbound, or when its region is gone.
    #[inline]
    fn view<'k>(&'k self, entry: &'k KeyedObject) -> Option<View<'k>> {
        if let Object::Window(bound) = &entry.object {
            return self.view_of_window(bound.as_ref()?);
        }
        let Mapping { extent, access, base, .. } = entry.object.mapping()?;
        Some(View { extent, start: 0, len: extent.len(), base: *base, access: *access })
    }

    #[cold]
    fn view_of_window(&self, bound: &Bound) -> Option<View<'_>> {
        let Bound { region: (index, number), start, len, access, base, .. } = *bound;
        let region = self.slots.get(&index)?.entry.as_ref()?;
        let mapping = region.object.mapping().filter(|mapping| mapping.number == number)?;
        Some(View { extent: &mapping.extent, start, len, base, access })
    }

    /// Invalidates a tag for the peer (Send with Invalidate). A tag that is not associated with the stream "cannot be
    /// invalidated" (RFC 5040 section 5.3), an error for which other operations have another code. `alone` says
    /// whether `user` is the only stream of its domain. The peer cannot invalidate a region that several streams
    /// share (section 8.1.1, rule 7), one with bound windows, or one without remote rights.
    pub(crate) fn invalidate_remotely(
        &mut self,
        user: User,
        stag: STag,
        alone: bool,
    ) -> Result<(), RdmapError> {
        let entry = self.entry(stag).filter(|e| e.is_open_to_peers()).ok_or(RdmapError::InvalidStag)?;
        let shared = entry.stream().is_none() && !alone;
        let local = entry.object.mapping().is_some_and(|mapping| !mapping.access.intersects(Access::REMOTE));
        if !entry.is_for(user) || shared || local || entry.object.windows() > 0 {
            return Err(RdmapError::CannotInvalidate);
        }
        self.close(stag.index());
        Ok(())
    }

    /// Invalidates a tag for the owner. Invalidating it again is no error.
    pub(crate) fn invalidate_locally(&mut self, user: User, stag: STag) -> Result<(), ManagementError> {
        let entry = self.entry(stag).ok_or(ManagementError::Unknown)?;
        if !entry.is_for(user) {
            return Err(ManagementError::Foreign);
        }
        if entry.object.windows() > 0 {
            return Err(ManagementError::InUse);
        }
        self.close(stag.index());
        Ok(())
    }

    /// Ends all access through a fast region or a window, and the remote access to a region.
    fn close(&mut self, index: u32) {
        let Some(entry) = self.slots.get_mut(&index).and_then(|slot| slot.entry.as_mut()) else { return };
        match &mut entry.object {
            Object::Region { revoked, .. } => *revoked = true,
            Object::Fast { mapping, .. } => *mapping = None,
            Object::Window(bound) => {
                let Some(Bound { region: (region, number), stream, .. }) = bound.take() else { return };
                if let Some(windows) = self.bound.get_mut(&stream) {
                    windows.remove(&index);
                }
                let region = self.slots.get_mut(&region).and_then(|slot| slot.entry.as_mut());
                if let Some(mapping) = region.and_then(|entry| entry.object.mapping_mut())
                    && mapping.number == number
                {
                    mapping.windows -= 1;
                }
            }
        }
    }

    /// Unbinds the windows of `qp`'s stream when it ends: the queue pair's next stream may be with another peer.
    pub(crate) fn close_windows_of(&mut self, qp: QpId) {
        for window in self.bound.remove(&qp).into_iter().flatten() {
            self.close(window);
        }
    }

    /// Binds an unbound window to a part of a region. The window's tag becomes `window`, with the key that the owner
    /// chose.
    pub(crate) fn bind(
        &mut self,
        user: User,
        window: STag,
        binding: &Binding,
    ) -> Result<(), ManagementError> {
        let Binding { region, offset, len, base, access } = *binding;
        self.check_vacant(user, window, |object| matches!(object, Object::Window(None)))?;
        let entry = self.entry(region).filter(|entry| entry.pd == user.pd).ok_or(ManagementError::Unknown)?;
        if !entry.is_for(user) {
            return Err(ManagementError::Foreign);
        }
        let mapping = entry.object.mapping().ok_or(ManagementError::Unknown)?;
        let changes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let needs = if changes { Access::WINDOW_BIND | Access::LOCAL_WRITE } else { Access::WINDOW_BIND };
        if !mapping.access.contains(needs) || !Access::REMOTE.contains(access) {
            return Err(ManagementError::Access);
        }
        let start = offset.checked_sub(mapping.base).ok_or(ManagementError::Bounds)?;
        let fits = start.checked_add(len).is_some_and(|end| end <= mapping.extent.len());
        if !fits || len == 0 || base.checked_add(len).is_none() {
            return Err(ManagementError::Bounds);
        }
        let number = mapping.number;
        if let Some(mapping) = self.entry_mut(region).and_then(|entry| entry.object.mapping_mut()) {
            mapping.windows += 1;
        }
        let bound = Bound { region: (region.index(), number), start, len, access, base, stream: user.qp };
        self.fill(window, Object::Window(Some(bound)));
        self.bound.entry(user.qp).or_default().insert(window.index());
        Ok(())
    }

    /// Registers memory for an invalid fast region. The region's tag becomes `key`, with the key that the owner
    /// chose.
    pub(crate) fn register_fast(
        &mut self,
        user: User,
        key: STag,
        memory: impl IntoIterator<Item = Memory>,
        access: Access,
        base: TaggedOffset,
    ) -> Result<(), ManagementError> {
        let vacant = |object: &Object| matches!(object, Object::Fast { mapping: None, .. });
        let max_pieces = match self.check_vacant(user, key, vacant)? {
            Object::Fast { max_pieces, .. } => *max_pieces,
            Object::Region { .. } | Object::Window(_) => 0,
        };
        let extent: Extent = memory.into_iter().collect();
        if access.intersects(Access::WRITES) && !extent.is_writable() {
            return Err(ManagementError::Access);
        }
        if extent.pieces() > max_pieces as usize || base.checked_add(extent.len()).is_none() {
            return Err(ManagementError::Bounds);
        }
        let mapping = self.mapping(extent, access, base);
        self.fill(key, Object::Fast { max_pieces, mapping: Some(mapping) });
        Ok(())
    }

    /// Checks that the object at the index of `key` is `user`'s and that `vacant` accepts it.
    fn check_vacant(
        &self,
        user: User,
        key: STag,
        vacant: impl FnOnce(&Object) -> bool,
    ) -> Result<&Object, ManagementError> {
        let entry = self.slots.get(&key.index()).and_then(|slot| slot.entry.as_ref());
        let entry = entry.ok_or(ManagementError::Unknown)?;
        if !entry.is_for(user) {
            Err(ManagementError::Foreign)
        } else if vacant(&entry.object) {
            Ok(&entry.object)
        } else {
            Err(ManagementError::InUse)
        }
    }

    fn fill(&mut self, key: STag, object: Object) {
        let Some(slot) = self.slots.get_mut(&key.index()) else { return };
        slot.key = key.key();
        if let Some(entry) = &mut slot.entry {
            entry.object = object;
        }
    }
}

#[expect(clippy::disallowed_types, reason = "with a hasher that has no state of its own")]
type SlotsByIndex = std::collections::HashMap<u32, TagSlot, BuildHasherDefault<IndexHasher>>;

/// Hashes indices. A simple hash suffices: indices are random, and peers cannot choose them.
#[derive(Debug, Default)]
struct IndexHasher(u64);

impl Hasher for IndexHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.0 = (self.0 ^ u64::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
