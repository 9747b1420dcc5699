//! The key table: which Steering Tag names which bytes, and who may do what with them (RFC 5042).
//!
//! A tag stands for one of three things: a region that a verb registered, which is open until it is
//! deregistered; a fast region, whose memory comes and goes by work requests; a window (type 2 of the
//! verbs), which opens a part of a region to one peer between its binding and its invalidation.

use std::{
    collections::{HashMap, HashSet, VecDeque},
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

/// Most regions, and most windows. Together they take at most half of the indices that a tag can have, so
/// that an unused one is soon drawn.
const MOST_KEYS: u32 = 1 << 22;

/// Freed places that rest before the oldest is used again: a tag shall return as late as possible (RFC 5042
/// section 6.1.1).
const RESTING: usize = 4096;

/// Why a key does not open a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// Nothing, or something that is not open to peers (any more).
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

/// Why a work request on memory itself (binding, fast registration, local invalidation) is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ManagementError {
    #[error("no such key, or not one of this kind")]
    Unknown,
    #[error("the key belongs to another protection domain or queue pair")]
    Foreign,
    #[error("the key is in use: bound or registered already, or windows are bound to it")]
    InUse,
    #[error("the region does not grant this")]
    Access,
    #[error("bytes outside of the region, none at all, or more pieces than the key was made for")]
    Bounds,
}

/// On whose behalf memory is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) pd: PdId,
    pub(crate) qp: QpId,
}

/// Bytes that a region or a valid fast region stands for.
#[derive(Debug)]
struct Mapping {
    /// Never used twice: windows that outlive it find that it is gone.
    number: u64,
    extent: Extent,
    access: Access,
    base: TaggedOffset,
    /// Windows bound to it.
    windows: u32,
}

/// What a bound window opens.
#[derive(Debug, Clone, Copy)]
struct Bound {
    /// The index and the mapping of the region.
    region: (u32, u64),
    /// Where the window begins in the region's bytes.
    start: u64,
    len: u64,
    access: Access,
    base: TaggedOffset,
    /// The only stream that may use it.
    stream: QpId,
}

#[derive(Debug)]
enum Object {
    Region {
        mapping: Mapping,
        /// The peer's rights were invalidated. The owner's stand.
        revoked: bool,
    },
    /// `None`: invalid, to be registered by a work request.
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
struct Entry {
    pd: PdId,
    /// The only stream that a region is for.
    limited_to: Option<QpId>,
    object: Object,
}

impl Entry {
    /// The only stream that may use it now.
    fn stream(&self) -> Option<QpId> {
        match &self.object {
            Object::Window(bound) => bound.map(|bound| bound.stream),
            Object::Region { .. } | Object::Fast { .. } => self.limited_to,
        }
    }

    /// Whether `user` shares the domain, and the stream if there is only one.
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

/// What a tag opens: `len` bytes from byte `start` of `extent` on, the first of which is called `base`.
struct View<'k> {
    extent: &'k Extent,
    start: u64,
    len: u64,
    base: TaggedOffset,
    access: Access,
}

#[derive(Debug)]
struct Slot {
    key: u8,
    entry: Option<Entry>,
}

/// Regions and windows by Steering Tag.
#[derive(Debug)]
pub(crate) struct KeyTable {
    /// By the tag's index.
    slots: HashMap<u32, Slot, BuildHasherDefault<IndexHasher>>,
    /// Indices that were used, oldest first.
    free: VecDeque<u32>,
    max_regions: u32,
    max_windows: u32,
    regions: u32,
    windows: u32,
    next_mapping: u64,
    /// Bound windows by the stream that may use them.
    bound: HashMap<QpId, HashSet<u32>>,
    /// Draws indices and first keys: nobody can tell the next tag from those before (RFC 5040 section
    /// 8.1.1, rule 8).
    rng: StdRng,
}

impl KeyTable {
    pub(crate) fn new(limits: &Limits, secret: &Secret) -> Self {
        Self {
            slots: HashMap::default(),
            free: VecDeque::new(),
            max_regions: limits.max_mr.min(MOST_KEYS),
            max_windows: limits.max_mw.min(MOST_KEYS),
            regions: 0,
            windows: 0,
            next_mapping: 0,
            bound: HashMap::new(),
            rng: secret.rng(),
        }
    }

    /// Regions there are, fast ones included.
    pub(crate) fn regions(&self) -> u32 {
        self.regions
    }

    /// Registers a region; `None` when there are too many.
    pub(crate) fn insert_region(&mut self, registration: Registration) -> Option<STag> {
        let Registration { pd, memory, access, base, stream } = registration;
        let mapping = self.mapping([memory].into_iter().collect(), access, base);
        self.insert(Entry { pd, limited_to: stream, object: Object::Region { mapping, revoked: false } })
    }

    /// Makes a fast region, which is invalid; `None` when there are too many.
    pub(crate) fn insert_fast_region(
        &mut self,
        pd: PdId,
        max_pieces: u32,
        limited_to: Option<QpId>,
    ) -> Option<STag> {
        self.insert(Entry { pd, limited_to, object: Object::Fast { max_pieces, mapping: None } })
    }

    /// Makes a window, which is not bound; `None` when there are too many.
    pub(crate) fn insert_window(&mut self, pd: PdId) -> Option<STag> {
        self.insert(Entry { pd, limited_to: None, object: Object::Window(None) })
    }

    fn mapping(&mut self, extent: Extent, access: Access, base: TaggedOffset) -> Mapping {
        self.next_mapping += 1;
        Mapping { number: self.next_mapping, extent, access, base, windows: 0 }
    }

    fn insert(&mut self, entry: Entry) -> Option<STag> {
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

    /// The index of a slot without an entry: the oldest that has rested enough, or a new one.
    fn vacant(&mut self) -> u32 {
        if self.free.len() > RESTING
            && let Some(index) = self.free.pop_front()
        {
            return index;
        }
        loop {
            let tag = STag::new(self.rng.next_u32());
            // Peers that broke give index 0 a meaning; no tag of ours has it.
            if tag.index() != 0 && !self.slots.contains_key(&tag.index()) {
                self.slots.insert(tag.index(), Slot { key: tag.key(), entry: None });
                return tag.index();
            }
        }
    }

    fn entry(&self, stag: STag) -> Option<&Entry> {
        self.slots.get(&stag.index()).filter(|slot| slot.key == stag.key())?.entry.as_ref()
    }

    fn entry_mut(&mut self, stag: STag) -> Option<&mut Entry> {
        self.slots.get_mut(&stag.index()).filter(|slot| slot.key == stag.key())?.entry.as_mut()
    }

    /// How many windows are bound to a region; `None` when there is no such region.
    pub(crate) fn bound_windows(&self, stag: STag) -> Option<u32> {
        let slot = self.slots.get(&stag.index())?;
        let object = &slot.entry.as_ref()?.object;
        match object {
            Object::Region { .. } if slot.key != stag.key() => None,
            Object::Region { .. } | Object::Fast { .. } => Some(object.windows()),
            Object::Window(_) => None,
        }
    }

    /// Forgets a region, at once and for everybody: windows that are bound to it open nothing any more.
    /// Of a fast region only the index counts, as its owner chooses the key. Returns its protection domain.
    pub(crate) fn remove_region(&mut self, stag: STag) -> Option<PdId> {
        self.bound_windows(stag)?;
        self.regions -= 1;
        self.remove(stag.index())
    }

    /// Forgets a window, bound or not. Only the index counts, as its owner chooses the key. Returns its
    /// protection domain.
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

    /// The bytes that `stag` opens to `user` for `need`: all `len` of them from `offset` on are in bounds.
    /// The checks are in the order of RFC 5040 section 7.2.
    pub(crate) fn open(
        &self,
        user: User,
        stag: STag,
        need: Access,
        offset: TaggedOffset,
        len: u64,
    ) -> Result<Stretches<'_>, KeyError> {
        let mut stretches = Stretches::default();
        self.open_into(user, stag, need, offset, len, &mut stretches)?;
        Ok(stretches)
    }

    /// As [`Self::open`], behind what `stretches` has already.
    pub(crate) fn open_into<'k>(
        &'k self,
        user: User,
        stag: STag,
        need: Access,
        offset: TaggedOffset,
        len: u64,
        stretches: &mut Stretches<'k>,
    ) -> Result<(), KeyError> {
        let remote = need.intersects(Access::REMOTE);
        let entry =
            self.entry(stag).filter(|entry| !remote || entry.is_open_to_peers()).ok_or(KeyError::Unknown)?;
        let view = self.view(entry).ok_or(KeyError::Unknown)?;
        if !entry.is_for(user) {
            return Err(KeyError::Foreign);
        }
        // A window is for the peer; its owner has the region.
        if !view.access.contains(need) || !remote && entry.object.is_window() {
            return Err(KeyError::Access);
        }
        let end = offset.checked_add(len).ok_or(KeyError::Wrap)?;
        let start = offset.checked_sub(view.base).ok_or(KeyError::Bounds)?;
        if end - view.base > view.len {
            return Err(KeyError::Bounds);
        }
        view.extent.cut(view.start + start, len, stretches);
        Ok(())
    }

    /// What an entry opens to whoever may use it, while it opens anything.
    fn view<'k>(&'k self, entry: &'k Entry) -> Option<View<'k>> {
        if let Object::Window(bound) = entry.object {
            let Bound { region: (index, number), start, len, access, base, .. } = bound?;
            let region = self.slots.get(&index)?.entry.as_ref()?;
            let mapping = region.object.mapping().filter(|mapping| mapping.number == number)?;
            Some(View { extent: &mapping.extent, start, len, base, access })
        } else {
            let Mapping { extent, access, base, .. } = entry.object.mapping()?;
            Some(View { extent, start: 0, len: extent.len(), base: *base, access: *access })
        }
    }

    /// Invalidates at the peer's wish. A tag that is not associated with the stream "cannot be invalidated" (RFC 5040
    /// section 5.3), though other operations call that by another number. `alone` says whether `user` is the only
    /// stream of its domain: the tag of a region that several streams share is nobody's to invalidate (section 8.1.1,
    /// rule 7), nor is one to which windows are bound, nor one that was never opened to peers: its owner needs it.
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

    /// Invalidates at the owner's wish; done already is fine.
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

    /// Ends what peers may do: of a fast region or a window everything, of a region what is remote.
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

    /// Closes the windows that only the stream of `qp` may use: it is over, and the next one is another peer's.
    pub(crate) fn close_windows_of(&mut self, qp: QpId) {
        for window in self.bound.remove(&qp).into_iter().flatten() {
            self.close(window);
        }
    }

    /// Binds a window that is not bound to a part of a region. From now on its tag is `window`, whose key
    /// its owner chose.
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

    /// Gives memory to a fast region that is invalid. From now on its tag is `key`, whose key its owner chose.
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

    /// The object at the index of `key`, when it is `user`'s and, as `vacant` says, waits to be filled.
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

/// Spreads indices. They are drawn at random already, and peers can look tags up but not choose them.
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
