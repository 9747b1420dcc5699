//! Grants: the memory and rights of valid tags, and each engine's cache of the grants that it has used.

use std::{
    cell::OnceCell,
    fmt,
    hash::{BuildHasherDefault, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use super::{
    QpId, Registry,
    keys::{KeyError, ManagementError, User},
    pieces::{Extent, Stretches},
    work::{Access, Binding, PdId, SgeList},
};
use crate::{
    ddp::{STag, TaggedOffset},
    memory::{Memory, Reader},
    rdmap::RdmapError,
};

/// `len` bytes from byte `start` of `extent`. The first has the tagged offset `base`.
#[derive(Debug)]
pub(crate) struct Bytes {
    pub(crate) extent: Extent,
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) base: TaggedOffset,
    pub(crate) access: Access,
}

impl Bytes {
    /// All bytes of `extent`.
    pub(crate) fn all(extent: Extent, access: Access, base: TaggedOffset) -> Self {
        Self { start: 0, len: extent.len(), extent, base, access }
    }
}

/// The users for whom a grant is still valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Validity {
    All,
    /// Only the owner's requests have access; peers no longer have.
    Local,
    Ended,
}

/// The memory and rights of a valid tag. Engines share it; only its validity changes, and never becomes valid again.
///
/// An engine loads the validity before each access. The copy that follows does not check it again, so code that ends a
/// grant and reuses the memory first passes through the lock of each engine ([`Rnic::forget`](super::Rnic::forget)).
#[derive(Debug)]
pub(crate) struct Grant {
    stag: STag,
    validity: AtomicU8,
    /// A window serves remote accesses only; local accesses use the region.
    window: bool,
    pd: PdId,
    /// The only stream that may use it, if it is limited to one.
    stream: Option<QpId>,
    pub(crate) bytes: Bytes,
}

impl Grant {
    pub(crate) fn new(stag: STag, pd: PdId, stream: Option<QpId>, window: bool, bytes: Bytes) -> Self {
        Self { stag, validity: AtomicU8::new(Validity::All as u8), window, pd, stream, bytes }
    }

    /// Reduces the validity.
    pub(crate) fn set(&self, validity: Validity) {
        self.validity.store(validity as u8, Ordering::Release);
    }

    /// Whether it is still valid for peers (`remote`), or for the owner's requests.
    #[inline]
    pub(crate) fn is_valid_for(&self, remote: bool) -> bool {
        let least = if remote { Validity::All } else { Validity::Local };
        self.validity.load(Ordering::Acquire) <= least as u8
    }

    /// The bytes that contain the `len` bytes from `offset`, and the position of the first of these, if `user` has access
    /// `need` to all of them. The checks follow those of the tag in the order of RFC 5040 section 7.2.
    #[expect(clippy::inline_always, reason = "see `Keys::find`")]
    #[inline(always)]
    fn find(
        &self,
        user: User,
        need: Access,
        offset: TaggedOffset,
        len: u64,
    ) -> Result<(&Extent, u64), KeyError> {
        if self.pd != user.pd || self.stream.is_some_and(|stream| stream != user.qp) {
            return Err(KeyError::Foreign);
        }
        let bytes = &self.bytes;
        if !bytes.access.intersection(user.rights).contains(need)
            || self.window && !need.intersects(Access::REMOTE)
        {
            return Err(KeyError::Access);
        }
        let end = offset.checked_add(len).ok_or(KeyError::Wrap)?;
        let start = offset.checked_sub(bytes.base).ok_or(KeyError::Bounds)?;
        if end - bytes.base > bytes.len {
            return Err(KeyError::Bounds);
        }
        Ok((&bytes.extent, bytes.start + start))
    }
}

/// A list of grants that were fetched from the registry through a shared reference.
#[derive(Default)]
struct Fetched(OnceCell<Box<FetchedGrant>>);

struct FetchedGrant {
    grant: Arc<Grant>,
    next: Fetched,
}

/// Entries of [`Keys::front`].
const FRONT: usize = 16;

/// The keys of one engine: a cache of the registry's grants. The engine asks the registry for a tag that is not in the
/// cache, or has ended there. Peers cannot cause many such requests, because an unknown tag ends their stream (RFC 5040
/// section 7.2).
pub(crate) struct Keys {
    registry: Arc<Registry>,
    /// By the tag's index: at most one for each object, ended ones included.
    cache: IndexMap<Arc<Grant>>,
    /// Those of the cache that were fetched last, at the lower bits of their tag's index: most accesses are to few tags, and
    /// need no search.
    front: [Option<Arc<Grant>>; FRONT],
    /// Fetched since the cache was last updated.
    fetched: Fetched,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({} cached)", self.cache.len())
    }
}

impl Keys {
    pub(crate) fn new(registry: Arc<Registry>) -> Self {
        Self { registry, cache: IndexMap::default(), front: Default::default(), fetched: Fetched::default() }
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
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

    /// Like [`Self::open`], but returns the registered memories and the position of the first byte.
    #[expect(clippy::inline_always, reason = "each access calls it once, and passes nine words")]
    #[inline(always)]
    pub(crate) fn find(
        &self,
        user: User,
        stag: STag,
        need: Access,
        offset: TaggedOffset,
        len: u64,
    ) -> Result<(&Extent, u64), KeyError> {
        let remote = need.intersects(Access::REMOTE);
        let grant = match self.front.get(front_place(stag)) {
            Some(Some(grant)) if grant.stag == stag && grant.is_valid_for(remote) => grant,
            _ => self.search(stag, remote).ok_or(KeyError::Unknown)?,
        };
        grant.find(user, need, offset, len)
    }

    /// A reader of the `len` bytes from byte `skip` of `pieces`, which the owner may always read, if they lie in the only piece
    /// and in one memory, as nearly all do.
    #[expect(clippy::inline_always, reason = "each segment calls it once")]
    #[inline(always)]
    pub(super) fn reader(&self, user: User, pieces: &SgeList, skip: u64, len: u64) -> Option<Reader<'_>> {
        let SgeList::One(piece) = pieces else { return None };
        // Without bytes, no key is checked.
        if len == 0 || skip + len > u64::from(piece.len) {
            return None;
        }
        let start = piece.offset.checked_add(skip)?;
        let (extent, start) = self.find(user, piece.key, Access::empty(), start, len).ok()?;
        extent.one_memory()?.reader(start as usize, len as usize).ok()
    }

    /// The grant in the whole cache or in the registry.
    #[inline(never)]
    fn search(&self, stag: STag, remote: bool) -> Option<&Arc<Grant>> {
        match self.cache.get(&stag.index()) {
            Some(grant) if grant.stag == stag && grant.is_valid_for(remote) => Some(grant),
            _ => self.fetch(stag, remote),
        }
    }

    /// Asks the registry for a grant.
    #[cold]
    fn fetch(&self, stag: STag, remote: bool) -> Option<&Arc<Grant>> {
        let mut end = &self.fetched;
        while let Some(FetchedGrant { grant, next }) = end.0.get().map(|fetched| &**fetched) {
            if grant.stag == stag && grant.is_valid_for(remote) {
                return Some(grant);
            }
            end = next;
        }
        let grant = self.registry.grant(stag).filter(|grant| grant.is_valid_for(remote))?;
        let fetched = end.0.get_or_init(|| Box::new(FetchedGrant { grant, next: Fetched::default() }));
        Some(&fetched.grant)
    }

    /// Moves fetched grants to the cache. Called before each operation, so that the list is at most as long as one
    /// gather list.
    #[inline]
    pub(crate) fn update(&mut self) {
        if self.fetched.0.get().is_some() {
            self.cache_fetched();
        }
    }

    #[cold]
    fn cache_fetched(&mut self) {
        while let Some(FetchedGrant { grant, next }) = self.fetched.0.take().map(|fetched| *fetched) {
            if let Some(front) = self.front.get_mut(front_place(grant.stag)) {
                *front = Some(Arc::clone(&grant));
            }
            self.cache.insert(grant.stag.index(), grant);
            self.fetched = next;
        }
    }

    /// Drops the cached grant of the object at the index of `stag`.
    pub(crate) fn forget(&mut self, stag: STag) {
        self.update();
        self.cache.remove(&stag.index());
        if let Some(front) = self.front.get_mut(front_place(stag))
            && front.as_ref().is_some_and(|grant| grant.stag.index() == stag.index())
        {
            *front = None;
        }
    }

    /// See [`KeyTable::invalidate_remotely`](super::keys::KeyTable::invalidate_remotely).
    pub(crate) fn invalidate_remotely(&mut self, user: User, stag: STag) -> Result<(), RdmapError> {
        self.registry.invalidate_remotely(user, stag)?;
        self.forget(stag);
        Ok(())
    }

    /// See [`KeyTable::invalidate_locally`](super::keys::KeyTable::invalidate_locally).
    pub(crate) fn invalidate_locally(&mut self, user: User, stag: STag) -> Result<(), ManagementError> {
        self.registry.with_keys(|keys| keys.invalidate_locally(user, stag))?;
        self.forget(stag);
        Ok(())
    }

    /// See [`KeyTable::bind`](super::keys::KeyTable::bind).
    pub(crate) fn bind(&self, user: User, window: STag, binding: &Binding) -> Result<(), ManagementError> {
        self.registry.with_keys(|keys| keys.bind(user, window, binding))
    }

    /// See [`KeyTable::register_fast`](super::keys::KeyTable::register_fast).
    pub(crate) fn register_fast(
        &self,
        user: User,
        key: STag,
        memory: impl IntoIterator<Item = Memory>,
        access: Access,
        base: TaggedOffset,
    ) -> Result<(), ManagementError> {
        self.registry.with_keys(|keys| keys.register_fast(user, key, memory, access, base))
    }

    /// See [`KeyTable::close_windows_of`](super::keys::KeyTable::close_windows_of).
    pub(crate) fn close_windows_of(&self, qp: QpId) {
        self.registry.with_keys(|keys| keys.close_windows_of(qp));
    }
}

/// The place of a tag in [`Keys::front`].
#[inline]
fn front_place(stag: STag) -> usize {
    stag.index() as usize % FRONT
}

/// A map by the index of tags.
#[expect(clippy::disallowed_types, reason = "with a hasher that has no state of its own")]
pub(crate) type IndexMap<V> = std::collections::HashMap<u32, V, BuildHasherDefault<IndexHasher>>;

/// Hashes indices. A simple hash suffices: indices are random, and peers cannot choose them.
#[derive(Debug, Default)]
pub(crate) struct IndexHasher(u64);

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
