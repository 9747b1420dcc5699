//! The key table of the registry: the objects that Steering Tags name, and the [`Grant`] of each tag that is valid (RFC
//! 5042).
//!
//! A tag names one of three objects: a region that a verb registered, valid until it is deregistered; a fast region,
//! whose memory is registered and invalidated by work requests; a window (type 2 of the verbs), which gives one peer
//! access to a part of a region between its binding and its invalidation.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use rand::{RngCore as _, rngs::StdRng};
use xwarp_tcp::secret::Secret;

use super::{
    Limits, QpId,
    attributes::Registration,
    grant::{Bytes, Grant, IndexMap, Validity},
    pieces::Extent,
    work::{Access, Binding, PdId},
};
use crate::{
    ddp::{DdpError, STag, TaggedOffset},
    memory::Memory,
    rdmap::RdmapError,
};

/// Largest number of regions, and of windows. Together they take at most half of the 2^24 indices, so that few random
/// draws find an unused index.
const MAX_KEYS: u32 = 1 << 22;

/// Freed indices that are kept unused before the oldest is reused: a tag should return as late as possible (RFC 5042
/// section 6.1.1).
const RESTING: usize = 4096;

/// The reason why a key gives no access to a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// The key names no object, or one that peers cannot use, or can no longer use.
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
    /// The rights that the queue pair does not deny: the local ones, and the remote ones that its peer may use.
    pub(crate) rights: Access,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Has a grant for its whole life.
    Region,
    /// Has a grant from its registration by a work request to its invalidation.
    Fast { max_pieces: u32 },
    /// Has a grant from its binding to its invalidation.
    Window,
}

#[derive(Debug)]
struct KeyedObject {
    pd: PdId,
    /// The only stream that may use the object, if it is limited to one, as a bound window always is.
    stream: Option<QpId>,
    kind: Kind,
    grant: Option<Arc<Grant>>,
    /// Indices of the windows that are bound to a region.
    windows: BTreeSet<u32>,
    /// Index of the region to which a window is bound. It stays bound, without a grant, when the region is deregistered.
    region: Option<u32>,
}

impl KeyedObject {
    fn new(pd: PdId, stream: Option<QpId>, kind: Kind) -> Self {
        Self { pd, stream, kind, grant: None, windows: BTreeSet::new(), region: None }
    }

    /// Whether `user` is in the object's domain, and is its stream if the object is limited to one.
    fn is_for(&self, user: User) -> bool {
        self.pd == user.pd && self.stream.is_none_or(|stream| stream == user.qp)
    }

    /// Whether peers can use the object, or could if its region still existed.
    fn is_open_to_peers(&self) -> bool {
        self.region.is_some() || self.grant.as_ref().is_some_and(|grant| grant.is_valid_for(true))
    }
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
    slots: IndexMap<TagSlot>,
    /// Freed indices, oldest first.
    free: VecDeque<u32>,
    max_regions: u32,
    max_windows: u32,
    regions: u32,
    windows: u32,
    /// Indices of bound windows, by the stream that may use them.
    bound: BTreeMap<QpId, BTreeSet<u32>>,
    /// Draws indices and first keys, so that tags cannot be predicted from earlier ones (RFC 5040 section 8.1.1, rule
    /// 8).
    rng: StdRng,
}

impl KeyTable {
    pub(crate) fn new(limits: &Limits, secret: &Secret) -> Self {
        Self {
            slots: IndexMap::default(),
            free: VecDeque::new(),
            max_regions: limits.max_mr.min(MAX_KEYS),
            max_windows: limits.max_mw.min(MAX_KEYS),
            regions: 0,
            windows: 0,
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
        let stag = self.insert(KeyedObject::new(pd, stream, Kind::Region))?;
        self.fill(stag, Bytes::all(memory.into(), access, base));
        Some(stag)
    }

    /// Creates an invalid fast region; `None` when the limit is reached.
    pub(crate) fn insert_fast_region(
        &mut self,
        pd: PdId,
        max_pieces: u32,
        limited_to: Option<QpId>,
    ) -> Option<STag> {
        self.insert(KeyedObject::new(pd, limited_to, Kind::Fast { max_pieces }))
    }

    /// Creates an unbound window; `None` when the limit is reached.
    pub(crate) fn insert_window(&mut self, pd: PdId) -> Option<STag> {
        self.insert(KeyedObject::new(pd, None, Kind::Window))
    }

    fn insert(&mut self, entry: KeyedObject) -> Option<STag> {
        let (count, most) = match entry.kind {
            Kind::Window => (&mut self.windows, self.max_windows),
            Kind::Region | Kind::Fast { .. } => (&mut self.regions, self.max_regions),
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

    fn at_mut(&mut self, index: u32) -> Option<&mut KeyedObject> {
        self.slots.get_mut(&index)?.entry.as_mut()
    }

    /// The grant of a tag, if it is valid.
    pub(crate) fn grant(&self, stag: STag) -> Option<Arc<Grant>> {
        self.entry(stag)?.grant.clone()
    }

    /// Number of windows bound to a region; `None` when the region does not exist.
    pub(crate) fn bound_windows(&self, stag: STag) -> Option<usize> {
        let slot = self.slots.get(&stag.index())?;
        let entry = slot.entry.as_ref()?;
        match entry.kind {
            Kind::Region if slot.key != stag.key() => None,
            Kind::Region | Kind::Fast { .. } => Some(entry.windows.len()),
            Kind::Window => None,
        }
    }

    /// Registers a region without bound windows again, under its tag. Returns the protection domain of before; `None` if the tag
    /// is not that of such a region.
    pub(crate) fn replace_region(&mut self, stag: STag, registration: Registration) -> Option<PdId> {
        let Registration { pd, memory, access, base, stream } = registration;
        let slot = self.slots.get_mut(&stag.index()).filter(|slot| slot.key == stag.key())?;
        let entry = slot.entry.as_mut()?;
        if entry.kind != Kind::Region || !entry.windows.is_empty() {
            return None;
        }
        if let Some(grant) = &entry.grant {
            grant.set(Validity::Ended);
        }
        entry.stream = stream;
        let before = std::mem::replace(&mut entry.pd, pd);
        self.fill(stag, Bytes::all(memory.into(), access, base));
        Some(before)
    }

    /// Removes a region at once; windows that are bound to it no longer give access. Only the index of a fast region's
    /// tag is compared, because its owner chooses the key. Returns the protection domain.
    pub(crate) fn remove_region(&mut self, stag: STag) -> Option<PdId> {
        self.bound_windows(stag)?;
        self.regions -= 1;
        let gone = self.remove(stag.index())?;
        for window in gone.windows {
            if let Some(grant) = self.at_mut(window).and_then(|window| window.grant.take()) {
                grant.set(Validity::Ended);
            }
        }
        Some(gone.pd)
    }

    /// Removes a window, bound or not. Only the index of the tag is compared, because the owner chooses the key.
    /// Returns the protection domain.
    pub(crate) fn remove_window(&mut self, stag: STag) -> Option<PdId> {
        let index = stag.index();
        self.at_mut(index).filter(|entry| entry.kind == Kind::Window)?;
        self.close(index);
        self.windows -= 1;
        self.remove(index).map(|gone| gone.pd)
    }

    fn remove(&mut self, index: u32) -> Option<KeyedObject> {
        let slot = self.slots.get_mut(&index)?;
        let entry = slot.entry.take()?;
        slot.key = slot.key.wrapping_add(1);
        self.free.push_back(index);
        if let Some(grant) = &entry.grant {
            grant.set(Validity::Ended);
        }
        Some(entry)
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
        let shared = entry.stream.is_none() && !alone;
        let local = entry.kind != Kind::Window
            && entry.grant.as_ref().is_some_and(|grant| !grant.bytes.access.intersects(Access::REMOTE));
        if !entry.is_for(user) || shared || local || !entry.windows.is_empty() {
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
        if !entry.windows.is_empty() {
            return Err(ManagementError::InUse);
        }
        self.close(stag.index());
        Ok(())
    }

    /// Ends all access through a fast region or a window, and the remote access to a region.
    fn close(&mut self, index: u32) {
        let Some(entry) = self.at_mut(index) else { return };
        if entry.kind == Kind::Region {
            if let Some(grant) = &entry.grant {
                grant.set(Validity::Local);
            }
            return;
        }
        if let Some(grant) = entry.grant.take() {
            grant.set(Validity::Ended);
        }
        let Some(region) = entry.region.take() else { return };
        let stream = entry.stream.take();
        if let Some(region) = self.at_mut(region) {
            region.windows.remove(&index);
        }
        if let Some(windows) = stream.and_then(|stream| self.bound.get_mut(&stream)) {
            windows.remove(&index);
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
        self.check_vacant(user, window, |kind| kind == Kind::Window)?;
        let entry = self.entry(region).filter(|entry| entry.pd == user.pd).ok_or(ManagementError::Unknown)?;
        if !entry.is_for(user) {
            return Err(ManagementError::Foreign);
        }
        let grant = entry.grant.as_ref().filter(|_| entry.kind != Kind::Window);
        let grant = grant.ok_or(ManagementError::Unknown)?;
        // A window would open to peers again what an invalidation has closed.
        if !grant.is_valid_for(true) {
            return Err(ManagementError::Access);
        }
        let whole = &grant.bytes;
        let changes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let needs = if changes { Access::WINDOW_BIND | Access::LOCAL_WRITE } else { Access::WINDOW_BIND };
        if !whole.access.contains(needs) || !Access::REMOTE.contains(access) {
            return Err(ManagementError::Access);
        }
        let start = offset.checked_sub(whole.base).ok_or(ManagementError::Bounds)?;
        let fits = start.checked_add(len).is_some_and(|end| end <= whole.len);
        if !fits || len == 0 || base.checked_add(len).is_none() {
            return Err(ManagementError::Bounds);
        }
        let part = Bytes { extent: whole.extent.clone(), start, len, base, access };
        if let Some(entry) = self.at_mut(region.index()) {
            entry.windows.insert(window.index());
        }
        if let Some(entry) = self.at_mut(window.index()) {
            entry.region = Some(region.index());
            entry.stream = Some(user.qp);
        }
        self.fill(window, part);
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
        let is_fast = |kind| matches!(kind, Kind::Fast { .. });
        let max_pieces = match self.check_vacant(user, key, is_fast)? {
            Kind::Fast { max_pieces } => max_pieces,
            Kind::Region | Kind::Window => 0,
        };
        let extent: Extent = memory.into_iter().collect();
        if access.intersects(Access::WRITES) && !extent.is_writable() {
            return Err(ManagementError::Access);
        }
        if extent.pieces() > max_pieces as usize || base.checked_add(extent.len()).is_none() {
            return Err(ManagementError::Bounds);
        }
        self.fill(key, Bytes::all(extent, access, base));
        Ok(())
    }

    /// Checks that the object at the index of `key` belongs to `user`, is of the requested kind, and is neither
    /// registered nor bound.
    fn check_vacant(
        &self,
        user: User,
        key: STag,
        wanted: impl FnOnce(Kind) -> bool,
    ) -> Result<Kind, ManagementError> {
        let entry = self.slots.get(&key.index()).and_then(|slot| slot.entry.as_ref());
        let entry = entry.ok_or(ManagementError::Unknown)?;
        if !entry.is_for(user) {
            Err(ManagementError::Foreign)
        } else if wanted(entry.kind) && entry.grant.is_none() && entry.region.is_none() {
            Ok(entry.kind)
        } else {
            Err(ManagementError::InUse)
        }
    }

    /// Makes `stag` the valid tag of the object at its index, for these bytes.
    fn fill(&mut self, stag: STag, bytes: Bytes) {
        let Some(slot) = self.slots.get_mut(&stag.index()) else { return };
        slot.key = stag.key();
        if let Some(entry) = &mut slot.entry {
            let window = entry.kind == Kind::Window;
            entry.grant = Some(Arc::new(Grant::new(stag, entry.pd, entry.stream, window, bytes)));
        }
    }
}
